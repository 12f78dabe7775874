//! One vCPU in use: its set-up, and the way into the guest and out of it. Owns the translation between a task's registers
//! and the vCPU's, and from KVM's exits to the sentry's; the only place that knows both trap modes.
use guest_abi::layout::PAGE_SIZE;
use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::VmFd;
use sentry::platform::{Exit, GuestSpace as _, Memory as _, PhysAddr, PteFlags, Touch, UserContext};

use super::Machine;
use super::requests::{Requests, Service};
use super::signal::Kick;
use crate::clock::tsc;
use crate::entry::direct::{self, Site};
use crate::entry::stub::{self, Stub};
use crate::entry::tables::{GDT_LIMIT, KERNEL_CS, TSS_LIMIT, TSS_SELECTOR, USER_CS, USER_SS, has_error_code};
use crate::entry::{
    Chain, DESCRIPTOR_PAGE, EXCEPTION_PORT, IDT_PAGE, STACK_TOP, STUB_PAGE, STUB_STRIDE, SUPERVISOR_SYSCALL,
    SYSCALL_PORT, SharedPages, TSS, TrapMode, decode, operand,
};
use crate::fpu::{KvmFpu, Resident};
use crate::kvm::cpuid::GuestCpuid;
use crate::kvm::vcpu::{RunExit, RunPage};
use crate::kvm::{PlatformError, Vcpu, msr};
use crate::memory::GuestMemory;
use crate::page_table::KvmSpace;

/// PG, AM, WP, NE, ET, MP, PE.
const CR0: u64 = 0x8005_0033;
/// PAE, OSFXSR, OSXMMEXCPT, OSXSAVE.
const CR4: u64 = 0x0004_0620;
/// FSGSBASE.
const CR4_FSGSBASE: u64 = 1 << 16;
/// SCE, LME, LMA, NXE.
const EFER: u64 = 0xd01;
/// Trap flag.
const TF: u64 = 0x100;
/// Resume flag.
const RF: u64 = 0x1_0000;
/// In an error code: the index is of a gate in the IDT.
const ERROR_IDT: u32 = 2;
/// What a program may set in RFLAGS: CF PF AF ZF SF TF DF OF RF AC ID.
const USER_FLAGS: u64 = 0x0025_0dd5;
/// Always set in ring 3: IF, and bit 1.
const FIXED_FLAGS: u64 = 0x202;
/// Answered calls before the first one that leaves the guest as a sample, and the most.
const FIRST_SAMPLE: u64 = 64;
const LAST_SAMPLE: u64 = 1 << 20;
/// An exception frame on the ring-0 stack page, in 64-bit words from the page's start.
mod frame {
    pub const RSP: usize = 510;
    pub const RFLAGS: usize = 509;
    pub const CS: usize = 508;
    pub const RIP: usize = 507;
    pub const ERROR: usize = 506;
}

/// RFLAGS as the processor may be given them.
pub fn user_flags(rflags: u64) -> u64 {
    rflags & USER_FLAGS | FIXED_FLAGS
}

fn canonical(va: u64) -> bool {
    sign_extend(va) == va
}

/// The canonical address with the same low 48 bits. A base that is not canonical would make VM entry fail.
fn sign_extend(va: u64) -> u64 {
    ((va << 16).cast_signed() >> 16).cast_unsigned()
}

/// The privilege level in a selector.
fn privilege(selector: u16) -> u16 {
    selector & 3
}

fn segment(selector: u16, type_: u8) -> kvm_segment {
    let code = type_ & 8 != 0;
    kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: (selector & 3) as u8,
        db: u8::from(!code),
        s: 1,
        l: u8::from(code),
        g: 1,
        ..Default::default()
    }
}

/// A vCPU ready to run tasks.
pub struct Guest {
    vcpu: Vcpu,
    chain: Chain,
    resident: Resident,
    /// System registers of a task with no segment bases, in no address space.
    template: kvm_sregs,
    /// The space whose tables CR3 names, or 0.
    space: u64,
    mode: TrapMode,
    stub: Stub,
    xcr0: u64,
    number: u32,
    /// Answers until the next sample, as they were counted last.
    sample: u64,
    /// Sites made direct by then.
    planned: u64,
    /// The vCPU's registers are to be set up anew.
    lost: bool,
    /// At the last system call KVM reported the address after the `out`, not that of the `out`.
    out_advanced: bool,
}

impl Guest {
    /// Creates vCPU `id` of `vm`, which shows itself as CPU `number`. Without a mode SYSCALL goes to the supervisor entry.
    pub fn new(
        vm: &VmFd,
        memory: &GuestMemory,
        shared: &SharedPages,
        cpuid: &GuestCpuid,
        id: u32,
        number: u32,
        mode: Option<TrapMode>,
    ) -> Result<Guest, PlatformError> {
        let no_memory = |e: guest_abi::Errno| PlatformError::Memory(format!("no page for a virtual CPU ({e})"));
        let chain = Chain::new(memory, shared, number, mode).map_err(no_memory)?;
        let vcpu = Vcpu::new(vm, u64::from(id))?;
        cpuid.apply(vcpu.fd(), number)?;
        let mut template = vcpu.fd().get_sregs().map_err(PlatformError::kvm("read the system registers"))?;
        let data = segment(USER_SS, 3);
        template.cs = segment(USER_CS, 11);
        (template.ss, template.ds, template.es, template.fs, template.gs) = (data, data, data, data, data);
        template.tr = kvm_segment {
            base: TSS,
            limit: TSS_LIMIT,
            selector: TSS_SELECTOR,
            type_: 11,
            present: 1,
            ..Default::default()
        };
        // No local descriptors: a selector that names one is #GP, not an access to what a reset LDTR points at.
        template.ldt = kvm_segment { type_: 2, unusable: 1, ..Default::default() };
        template.gdt.base = DESCRIPTOR_PAGE;
        template.gdt.limit = GDT_LIMIT;
        template.idt.base = IDT_PAGE;
        template.idt.limit = 0xfff;
        template.cr0 = CR0;
        template.cr4 = CR4 | CR4_FSGSBASE;
        template.efer = EFER;
        let mode = mode.unwrap_or(TrapMode::Ring0);
        let xcr0 = cpuid.xcr0;
        let mut guest = Guest {
            vcpu,
            chain,
            resident: Resident::default(),
            template,
            space: 0,
            mode,
            stub: Stub::new(mode),
            xcr0,
            number,
            sample: FIRST_SAMPLE,
            planned: 0,
            lost: true,
            out_advanced: false,
        };
        if guest.set_up(PhysAddr(0)).is_err() {
            guest.template.cr4 = CR4;
            guest.set_up(PhysAddr(0))?;
        }
        Ok(guest)
    }

    /// Gives the vCPU all its registers. CR3 must name a table unless nothing runs before the next change.
    fn set_up(&mut self, root: PhysAddr) -> Result<(), PlatformError> {
        let mut sregs = self.template;
        sregs.cr3 = root.0;
        self.vcpu.load_sregs(&sregs)?;
        self.vcpu.set_xcr0(self.xcr0)?;
        msr::set_syscall(self.vcpu.fd(), self.stub.entry, self.mode)?;
        msr::set_tsc_aux(self.vcpu.fd(), self.number);
        if !self.vcpu.share_tsc() {
            msr::set_tsc(self.vcpu.fd(), crate::clock::tsc());
        }
        self.lost = false;
        self.space = 0;
        Ok(())
    }

    /// Makes SYSCALL arrive as ring3 mode wants it. For the self-test, on a vCPU made without a mode.
    pub fn become_ring3(&mut self, machine: &Machine) -> Result<(), PlatformError> {
        self.chain.open_entry(&machine.memory, &machine.shared);
        self.mode = TrapMode::Ring3;
        self.stub = Stub::new(self.mode);
        self.lost = true;
        Ok(())
    }

    /// Whether KVM reports the address after an `out` instead of its own, as seen at the last system call.
    pub fn out_advanced(&self) -> bool {
        self.out_advanced
    }

    /// For kicks.
    pub fn run_page(&mut self) -> RunPage {
        self.vcpu.run_page()
    }

    /// The page of this vCPU's requests.
    pub fn request_page(&self) -> PhysAddr {
        self.chain.requests
    }

    /// The page with the answers of this vCPU's SYSCALL entry.
    pub fn mailbox_page(&self) -> PhysAddr {
        self.chain.mailbox
    }

    /// The vCPU and whose extended state it holds.
    pub fn parts(&mut self) -> (&Vcpu, &mut Resident) {
        (&self.vcpu, &mut self.resident)
    }

    /// Runs `ctx` until the sentry is needed. `kick` was told of the entry. With `service` the calls of the task may be served while
    /// it stays in the guest.
    #[allow(clippy::too_many_arguments)] // what an entry is made of
    pub fn enter(
        &mut self,
        machine: &Machine,
        kick: &Kick,
        service: Option<(&Service, &Requests)>,
        cpu: usize,
        space: &KvmSpace,
        ctx: &mut UserContext,
        fpu: &KvmFpu,
    ) -> Exit {
        if !canonical(ctx.rip) {
            // Linux's return to such an address faults before the first instruction.
            return Exit::Exception { vector: 13, error: 0, cr2: 0 };
        }
        let Ok(root) = space.root(cpu, self.chain.pdpt) else { return Exit::Broken("no memory for page tables") };
        if self.lost && self.set_up(root).is_err() {
            return Exit::Broken("the virtual CPU cannot be set up again");
        }
        if !self.resident.load(&self.vcpu, cpu, fpu, &machine.format) {
            return Exit::Broken("KVM refused the extended state");
        }
        let fresh = self.space != space.id();
        if fresh {
            // What one program asked for is not another's to read.
            (0..512).for_each(|w| machine.memory.table_write(self.chain.requests, w, 0));
        }
        self.sample(machine, fresh);
        self.load(machine.mode, root, space.id(), ctx);
        if let Some((service, requests)) = service {
            requests.open(&machine.memory, service);
        }
        let begin = tsc();
        let exit = self.run(machine, kick, service.map(|(_, requests)| requests), space, ctx);
        if let (Some((service, _)), Exit::Syscall) = (service, exit) {
            service.saw_exit(tsc().wrapping_sub(begin));
        }
        if let Some((_, requests)) = service {
            requests.close(&machine.memory);
        }
        if let Exit::Broken(_) = exit {
            self.resident.save(&self.vcpu, &machine.format);
            self.lost = true;
        }
        exit
    }

    /// Sees to it that answered calls leave the guest now and then, so that their sites can be made direct; ever more seldom, since some
    /// cannot.
    fn sample(&mut self, machine: &Machine, fresh: bool) {
        let (memory, page) = (&*machine.memory, self.chain.requests);
        let used_up = memory.table_read(page, stub::SAMPLE) == 0;
        if fresh || used_up {
            self.sample = match &machine.direct {
                None => u64::MAX >> 1,
                // It pays: there may be more.
                Some(d) if fresh || d.planned() != self.planned => {
                    self.planned = d.planned();
                    FIRST_SAMPLE
                }
                Some(_) => (self.sample * 2).min(LAST_SAMPLE),
            };
            memory.table_write(page, stub::SAMPLE, self.sample);
        }
    }

    /// Puts the task's registers into the vCPU.
    fn load(&mut self, mode: TrapMode, root: PhysAddr, space: u64, ctx: &UserContext) {
        let rflags = user_flags(ctx.rflags);
        let (fs, gs) = (sign_extend(ctx.fs_base), sign_extend(ctx.gs_base));
        let new_space = self.space != space;
        self.space = space;
        if new_space && self.vcpu.sregs().cr3 == root.0 {
            // The page was the table of a space that is gone. A CR3 that seems unchanged would keep its translations.
            let sregs = kvm_sregs { cr3: 0, ..*self.vcpu.sregs() };
            if self.vcpu.load_sregs(&sregs).is_err() {
                log::error!("CR3 cannot be reloaded");
            }
        }
        let template = self.template;
        let sregs = self.vcpu.sregs();
        let in_ring0 = sregs.cs.selector == KERNEL_CS;
        // SYSRET takes RIP and RFLAGS from RCX and R11; with TF it would trap before the program's first instruction.
        let sysret = mode == TrapMode::Ring0
            && in_ring0
            && ctx.rcx == ctx.rip
            && ctx.r11 == rflags
            && rflags & (TF | RF) == 0
            && ctx.rip < 1 << 47;
        let leave = !sysret && sregs.cs.selector != USER_CS;
        if leave || new_space || sregs.cr3 != root.0 || sregs.fs.base != fs || sregs.gs.base != gs {
            sregs.cr3 = root.0;
            if leave || new_space {
                (sregs.ds, sregs.es, sregs.fs, sregs.gs) = (template.ds, template.es, template.fs, template.gs);
            }
            if !sysret {
                (sregs.cs, sregs.ss) = (template.cs, template.ss);
            }
            sregs.fs.base = fs;
            sregs.gs.base = gs;
            self.vcpu.set_sregs_dirty();
        }
        *self.vcpu.regs() = kvm_regs {
            rax: ctx.rax,
            rbx: ctx.rbx,
            rcx: ctx.rcx,
            rdx: ctx.rdx,
            rsi: ctx.rsi,
            rdi: ctx.rdi,
            rsp: ctx.rsp,
            rbp: ctx.rbp,
            r8: ctx.r8,
            r9: ctx.r9,
            r10: ctx.r10,
            r11: ctx.r11,
            r12: ctx.r12,
            r13: ctx.r13,
            r14: ctx.r14,
            r15: ctx.r15,
            rip: if sysret { self.stub.after_out } else { ctx.rip },
            // In ring 0 the stub runs with interrupts off and no trap, as SYSCALL left it.
            rflags: if sysret { 2 } else { rflags },
        };
        self.vcpu.set_regs_dirty();
    }

    /// Takes the registers that a program's instruction stream keeps out of the vCPU.
    fn store(&mut self, ctx: &mut UserContext) -> kvm_regs {
        let regs = *self.vcpu.regs();
        let sregs = self.vcpu.sregs();
        (ctx.fs_base, ctx.gs_base) = (sregs.fs.base, sregs.gs.base);
        ctx.rax = regs.rax;
        ctx.rbx = regs.rbx;
        ctx.rcx = regs.rcx;
        ctx.rdx = regs.rdx;
        ctx.rsi = regs.rsi;
        ctx.rdi = regs.rdi;
        ctx.rbp = regs.rbp;
        ctx.rsp = regs.rsp;
        ctx.r8 = regs.r8;
        ctx.r9 = regs.r9;
        ctx.r10 = regs.r10;
        ctx.r11 = regs.r11;
        ctx.r12 = regs.r12;
        ctx.r13 = regs.r13;
        ctx.r14 = regs.r14;
        ctx.r15 = regs.r15;
        ctx.rip = regs.rip;
        ctx.rflags = user_flags(regs.rflags);
        regs
    }

    fn run(
        &mut self,
        machine: &Machine,
        kick: &Kick,
        requests: Option<&Requests>,
        space: &KvmSpace,
        ctx: &mut UserContext,
    ) -> Exit {
        let mut zaps = None;
        loop {
            let exit = self.vcpu.run();
            let ring0 = privilege(self.vcpu.sregs().cs.selector) == 0;
            match exit {
                RunExit::Out(port) if port == u16::from(SYSCALL_PORT) => {
                    let regs = self.store(ctx);
                    let out = self.stub.out;
                    if ring0 == (machine.mode == TrapMode::Ring0) && (regs.rip == out || regs.rip == out + 2) {
                        self.out_advanced = regs.rip != out;
                        if !ring0 && regs.rflags & TF != 0 {
                            // A jump into the stub with the trap flag: the step's #DB must not reach whoever runs next here.
                            self.vcpu.drop_exception();
                        }
                        return syscall(ctx);
                    }
                    return self.stray_port(machine, space, ctx);
                }
                RunExit::Out(port) if port == u16::from(EXCEPTION_PORT) && ring0 => {
                    return self.exception(machine, space, ctx);
                }
                RunExit::Out(_) | RunExit::OtherIo if !ring0 => {
                    self.store(ctx);
                    return self.stray_port(machine, space, ctx);
                }
                RunExit::Out(_) | RunExit::OtherIo => return Exit::Broken("port access in ring 0"),
                RunExit::Interrupted => {
                    let rip = self.vcpu.regs().rip;
                    kick.set_immediate_exit(false);
                    if ring0 && rip == self.stub.after_out {
                        // Not even the SYSRET has run: the task's registers stand in `ctx` as they were.
                        if kick.take() {
                            return Exit::Interrupted;
                        }
                        continue;
                    }
                    let in_stub = self.stub.contains(rip) && ring0 == (machine.mode == TrapMode::Ring0);
                    // On the way out already, or into an exception that must not hit another task: let it come. The kick
                    // stays for the next entry.
                    if (ring0 && !in_stub) || self.vcpu.exception_queued() {
                        continue;
                    }
                    if kick.take() {
                        self.store(ctx);
                        if in_stub {
                            return self.leave_stub(machine, requests, ctx);
                        }
                        return match direct_site(machine, space, ctx.rip) {
                            Some(site) => leave_trampoline(site, ctx),
                            None => Exit::Interrupted,
                        };
                    }
                }
                RunExit::Fault(at) => {
                    // The page may only have been unavailable while its translations were dropped.
                    let now = machine.memory.settle();
                    if zaps.replace(now) != Some(now) {
                        continue;
                    }
                    if ring0 {
                        return Exit::Broken("the monitor's own memory is missing");
                    }
                    self.store(ctx);
                    let at = at.map(PhysAddr);
                    return Exit::BusError { at, va: missing(machine, space, ctx, at) };
                }
                RunExit::Broken(what) => return Exit::Broken(what),
            }
        }
    }

    /// Ends by hand the call of a program that was interrupted in the stub: it is served already, or is now.
    fn leave_stub(&mut self, machine: &Machine, requests: Option<&Requests>, ctx: &mut UserContext) -> Exit {
        let place = self.stub.place(ctx.rip);
        let memory = &*machine.memory;
        let served = requests.and_then(|r| r.close(memory)).filter(|_| place.requested || place.done);
        let word = |w| memory.table_read(self.chain.requests, w);
        if place.arriving {
            ctx.r11 = ctx.rflags & !RF;
            if place.switched {
                ctx.rsp = word(stub::RSP);
            }
        }
        if place.rcx_saved {
            ctx.rcx = word(stub::RCX);
        }
        if place.r11_saved {
            ctx.r11 = word(stub::R11);
        }
        if place.answered {
            ctx.rax = word(stub::ANSWER);
        }
        if served.is_some() || place.done || place.answered {
            if let Some(answer) = served {
                (ctx.rax, ctx.orig_rax) = (answer.result, answer.call);
            }
            ctx.rip = ctx.rcx;
            ctx.rflags = user_flags(ctx.r11);
            return Exit::Interrupted;
        }
        syscall(ctx)
    }

    /// A port instruction that the bitmap admits but the program has no right to: #GP at the instruction, as with no port.
    fn stray_port(&mut self, machine: &Machine, space: &KvmSpace, ctx: &mut UserContext) -> Exit {
        self.vcpu.complete_io();
        self.vcpu.drop_exception();
        let mut before = [0; 2];
        if machine.out_advances {
            let start = ctx.rip.wrapping_sub(2);
            let mut code = [0; decode::MAX_LEN];
            if fetch(machine, space, start, &mut code) >= 2 {
                before.copy_from_slice(&code[..2]);
                ctx.rip = ctx.rip.wrapping_sub(decode::port_instruction_len(&before));
            }
        }
        Exit::Exception { vector: 13, error: 0, cr2: 0 }
    }

    /// The stub of an exception has left the guest: the frame tells where the program was.
    fn exception(&mut self, machine: &Machine, space: &KvmSpace, ctx: &mut UserContext) -> Exit {
        let regs = self.store(ctx);
        let word = |i| machine.memory.table_read(self.chain.stack, i);
        let offset = regs.rip.wrapping_sub(STUB_PAGE);
        let Ok(vector) = u8::try_from(offset / STUB_STRIDE) else { return Exit::Broken("a stub out of place") };
        let error = match STACK_TOP.wrapping_sub(regs.rsp) {
            40 if !has_error_code(vector) => 0,
            48 if has_error_code(vector) => word(frame::ERROR) as u32,
            _ => return Exit::Broken("an exception frame out of place"),
        };
        ctx.rip = word(frame::RIP);
        ctx.rsp = word(frame::RSP);
        ctx.rflags = user_flags(word(frame::RFLAGS));
        if privilege(word(frame::CS) as u16) == 0 {
            // A debug trap held back by MOV SS and taken at the first instruction after SYSCALL: the call is what counts.
            if vector == 1 && machine.mode == TrapMode::Ring0 && ctx.rip == SUPERVISOR_SYSCALL {
                return syscall(ctx);
            }
            log::error!("exception {vector} (error {error:#x}) in ring 0 at {:#x}", ctx.rip);
            return Exit::Broken("an exception in ring 0");
        }
        // A program steps through its calls, and has met a trampoline.
        if vector == 1
            && let Some(site) = direct_site(machine, space, ctx.rip)
        {
            let Some(number) = site.number.filter(|_| ctx.rip.is_multiple_of(direct::STRIDE)) else {
                return leave_trampoline(site, ctx);
            };
            // After the move, before the SYSCALL.
            ctx.rax = number.into();
            ctx.rip = site.after.wrapping_sub(2);
        }
        // `int n` through a gate of DPL 0 is #GP with an error code that names the gate; some KVMs deliver #UD, some
        // emulators another code.
        if vector == 6 || (vector == 13 && error & ERROR_IDT != 0) {
            let mut code = [0; decode::MAX_LEN];
            let len = fetch(machine, space, ctx.rip, &mut code);
            if let Some(n) = decode::software_interrupt(&code[..len]) {
                return Exit::Exception { vector: 13, error: u32::from(n) << 3 | ERROR_IDT, cr2: 0 };
            }
        }
        let cr2 = if vector == 14 { self.vcpu.sregs().cr2 } else { 0 };
        Exit::Exception { vector, error, cr2 }
    }
}

/// The registers after SYSCALL, as the instruction leaves them.
fn syscall(ctx: &mut UserContext) -> Exit {
    ctx.rip = ctx.rcx;
    ctx.rflags = user_flags(ctx.r11);
    Exit::Syscall
}

/// The call that a program has begun whose RIP is in a trampoline, or at the jump that leads from padding to one.
fn direct_site(machine: &Machine, space: &KvmSpace, rip: u64) -> Option<Site> {
    machine.direct.as_ref()?;
    let marked = |va: u64, mark: PteFlags| space.lookup(va).is_some_and(|pte| pte.flags.contains(mark));
    let trampoline = |at: u64| {
        let mut code = [0; direct::STRIDE as usize];
        let len = fetch(machine, space, at, &mut code);
        direct::site(at, &code[..len])
    };
    if marked(rip, PteFlags::TRAMPOLINES) {
        return trampoline(rip & !(direct::STRIDE - 1));
    }
    if !marked(rip, PteFlags::PATCHED) {
        return None;
    }
    let mut code = [0; 5];
    let len = fetch(machine, space, rip, &mut code);
    let at = direct::target(rip, &code[..len]).filter(|at| marked(*at, PteFlags::TRAMPOLINES))?;
    // A number's jump is where the program has its move, which has not been executed.
    trampoline(at).filter(|site| site.number.is_none())
}

/// Ends by hand what the jump of a direct call has begun.
fn leave_trampoline(site: Site, ctx: &mut UserContext) -> Exit {
    if let Some(number) = site.number {
        ctx.rax = number.into();
    }
    ctx.rcx = site.after;
    ctx.r11 = ctx.rflags & !RF;
    syscall(ctx)
}

/// The address by which the program reached memory that the host cannot supply: at `at`, or in any file window if KVM does not
/// tell.
fn missing(machine: &Machine, space: &KvmSpace, ctx: &UserContext, at: Option<PhysAddr>) -> Option<u64> {
    let mut code = [0; decode::MAX_LEN];
    let len = fetch(machine, space, ctx.rip, &mut code);
    let page = |va: u64| va & !(PAGE_SIZE - 1);
    let lacks = |va: u64| {
        let Some(pte) = space.lookup(va).filter(|p| !p.flags.contains(PteFlags::NONE)) else { return false };
        at.map_or_else(|| machine.memory.is_window(pte.pa), |at| page(at.0) == pte.pa.0)
    };
    operand::touched(&code[..len], ctx).into_iter().find_map(|(first, len)| {
        let last = first.wrapping_add(len - 1);
        if lacks(first) { Some(first) } else { lacks(last).then(|| page(last)) }
    })
}

/// See [`sentry::platform::Platform::touches`].
pub fn touches(machine: &Machine, space: &KvmSpace, ctx: &UserContext) -> Vec<Touch> {
    let mut code = [0; decode::MAX_LEN];
    let len = fetch(machine, space, ctx.rip, &mut code);
    operand::accesses(&code[..len], ctx)
}

/// Copies the program's code at `va`; gives how many bytes could be had.
fn fetch(machine: &Machine, space: &KvmSpace, va: u64, code: &mut [u8]) -> usize {
    let mut done = 0;
    while done < code.len() {
        let at = va.wrapping_add(done as u64);
        let Some(pte) = space.lookup(at).filter(|p| !p.flags.contains(PteFlags::NONE)) else { break };
        let offset = at & (PAGE_SIZE - 1);
        let n = ((PAGE_SIZE - offset) as usize).min(code.len() - done);
        if machine.memory.read(PhysAddr(pte.pa.0 + offset), &mut code[done..done + n]).is_err() {
            break;
        }
        done += n;
    }
    done
}
