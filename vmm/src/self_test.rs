//! What this machine's KVM does, found out by running a few instructions when a sandbox starts: how SYSCALL arrives, whether
//! exceptions come as they should, whether the guest's TSC is the host's. Owns the verdicts that `bartizan doctor` prints.
use std::sync::Arc;

use guest_abi::Errno;
use kvm_ioctls::{Kvm, VmFd};
use sentry::platform::{Exit, GuestSpace, Memory as _, PhysAddr, Platform as _, Pte, PteFlags, UserContext};

use crate::clock;
use crate::entry::{SUPERVISOR_SYSCALL, SharedPages, TrapMode};
use crate::fpu::{Format, KvmFpu};
use crate::kvm::cpuid::GuestCpuid;
use crate::kvm::model::{self, LEAVES, Leaf};
use crate::kvm::{Caps, PlatformError, vm};
use crate::memory::GuestMemory;
use crate::page_table::KvmSpace;
use crate::platform::KvmPlatform;
use crate::vcpu_pool::guest::Guest;
use crate::vcpu_pool::{Kick, Machine};

/// What the self-test found.
#[derive(Clone, Debug)]
pub struct SelfTest {
    /// Capabilities.
    pub caps: Caps,
    /// How SYSCALL arrives.
    pub trap_mode: TrapMode,
    /// Whether KVM walks the guest's page tables in hardware (nested paging), as far as the host tells; else it is taken for
    /// one that shadows them.
    pub nested_paging: bool,
    /// Whether the guest's TSC is the host's and counts at one rate: the vDSO can then tell the time.
    pub tsc_usable: bool,
    /// The TSC's rate, kHz, if KVM knows.
    pub tsc_khz: Option<u64>,
    /// State components the guest may use.
    pub xcr0: u64,
    /// Bytes of a signal frame's extended state.
    pub xsave_len: usize,
    /// Whether the guest's debug registers act; else breakpoints in them are watched step by step.
    pub debug_registers: bool,
    /// Whether programs may set their FS and GS bases themselves.
    pub fsgsbase: bool,
    /// CPUID as it is inside the guest.
    pub leaves: Vec<Leaf>,
    /// The host's name for its CPU, where CPUID in the guest gives none.
    pub host_cpu: String,
}

/// Where the test program lies, and the offsets of its parts.
const CODE: u64 = 0x40_0000;
const TSC: u64 = 0x10;
const UD2: u64 = 0x30;
const LOAD: u64 = 0x40;
const RDFSBASE: u64 = 0x50;
const CPUID: u64 = 0x60;
/// A page of the program's: for each leaf EAX and ECX before CPUID, and EAX, EBX, ECX, EDX after it.
const DATA: u64 = 0x50_0000;
/// Bytes of one of them.
const RECORD: usize = 24;
/// Leaves at the head of the list that are asked for first.
const TELLING: usize = 3;
/// An address that nothing maps.
const ABSENT: u64 = 0x1234_5678_9000;

fn program() -> [u8; 0xa0] {
    let mut code = [0xcc; 0xa0];
    let mut put = |at: u64, bytes: &[u8]| code[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    put(0, &[0x0f, 0x05]); // syscall
    put(TSC, &[0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09, 0xd0, 0x0f, 0x05]); // rdtsc; shl; or; syscall
    put(UD2, &[0x0f, 0x0b]);
    put(LOAD, &[0x8a, 0x07]); // mov (%rdi), %al
    put(RDFSBASE, &[0xf3, 0x48, 0x0f, 0xae, 0xc0, 0x0f, 0x05]); // rdfsbase %rax; syscall
    #[rustfmt::skip]
    put(CPUID, &[
        0x8b, 0x07, // 1: mov (%rdi), %eax
        0x8b, 0x4f, 0x04, // mov 4(%rdi), %ecx
        0x0f, 0xa2, // cpuid
        0x89, 0x47, 0x08, // mov %eax, 8(%rdi)
        0x89, 0x5f, 0x0c, // mov %ebx, 12(%rdi)
        0x89, 0x4f, 0x10, // mov %ecx, 16(%rdi)
        0x89, 0x57, 0x14, // mov %edx, 20(%rdi)
        0x48, 0x83, 0xc7, 0x18, // add $24, %rdi
        0x48, 0x39, 0xf7, // cmp %rsi, %rdi
        0x75, 0xe4, // jne 1b
        0x0f, 0x05, // syscall
    ]);
    code
}

/// Whether the host says that its KVM uses nested paging.
fn nested_paging() -> bool {
    let yes = |path: &str| std::fs::read_to_string(path).is_ok_and(|s| matches!(s.trim(), "Y" | "1"));
    !std::path::Path::new("/sys/module/kvm_pvm").exists()
        && (yes("/sys/module/kvm_intel/parameters/ept") || yes("/sys/module/kvm_amd/parameters/npt"))
}

/// "model name" of the host.
fn host_cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|l| l.starts_with("model name"));
    line.and_then(|l| l.split_once(':')).map_or_else(|| "unknown".into(), |(_, name)| name.trim().into())
}

fn questions() -> Vec<u8> {
    let record = |&(function, index): &(u32, u32)| [function, index, 0, 0, 0, 0];
    LEAVES.iter().flat_map(record).flat_map(u32::to_le_bytes).collect()
}

fn leaf(record: &[u8]) -> Option<Leaf> {
    let mut words = record.chunks_exact(4).filter_map(|b| b.try_into().ok()).map(u32::from_le_bytes);
    let (function, index) = (words.next()?, words.next()?);
    Some(Leaf { function, index, regs: [words.next()?, words.next()?, words.next()?, words.next()?] })
}

struct Test<'a> {
    machine: &'a Machine,
    guest: Guest,
    kick: Kick,
    space: &'a KvmSpace,
    fpu: &'a KvmFpu,
}

impl Test<'_> {
    fn enter(&mut self, rip: u64, rdi: u64, rsi: u64) -> (Exit, UserContext) {
        let mut ctx =
            UserContext { rip: CODE + rip, rdi, rsi, rax: 39, rbx: !1, r8: 8, rsp: 0x5a5a, ..Default::default() };
        loop {
            let exit = self.guest.enter(self.machine, &self.kick, None, 0, self.space, &mut ctx, self.fpu);
            // A signal to this thread is no verdict.
            if exit != Exit::Interrupted {
                return (exit, ctx);
            }
        }
    }
}

fn failed<T>(what: &str, exit: &Exit) -> Result<T, PlatformError> {
    Err(PlatformError::SelfTest(format!("{what} ended in {exit:?}")))
}

/// Makes a virtual machine for `cpus` CPUs and finds out how it behaves, on the vCPU of CPU 0, which comes with it. It should stay
/// the calling thread's: a vCPU that changes threads costs some kernels a grace period of milliseconds.
pub fn run(kvm: &Kvm, caps: Caps, cpus: usize, memory_limit: u64) -> Result<(Machine, SelfTest, Guest), PlatformError> {
    let no_memory = |e: Errno| PlatformError::Memory(e.to_string());
    let fd: Arc<VmFd> = Arc::new(vm::create(kvm, memory_limit)?);
    let memory = GuestMemory::new(fd.clone(), memory_limit).map_err(|e| PlatformError::Memory(e.to_string()))?;
    let nested_paging = nested_paging();
    memory.set_shadow_paging(!nested_paging);
    let cpuid = GuestCpuid::new(kvm, cpus)?;
    let shared = SharedPages::new(&memory).map_err(no_memory)?;
    let mut guest = Guest::new(&fd, &memory, &shared, &cpuid, 0, 0, None)?;
    let (vcpu, _) = guest.parts();
    let format = Arc::new(Format::new(&cpuid, vcpu)?);
    let tsc_khz = if caps.tsc_khz { vcpu.fd().get_tsc_khz().ok().map(u64::from).filter(|&k| k > 0) } else { None };
    let mut machine = Machine {
        vm: fd,
        memory,
        shared,
        cpuid,
        mode: TrapMode::Ring0,
        out_advances: false,
        debug_registers: false,
        direct: None,
        format: format.clone(),
    };

    let space = KvmSpace::new(machine.memory.clone(), 1);
    let code = machine.memory.alloc().map_err(no_memory)?;
    machine.memory.write(code, &program()).map_err(no_memory)?;
    space.map(CODE, Pte { pa: code, flags: PteFlags::EXEC | PteFlags::OWNED }).map_err(no_memory)?;
    let data = machine.memory.alloc().map_err(no_memory)?;
    machine.memory.write(data, &questions()).map_err(no_memory)?;
    space.map(DATA, Pte { pa: data, flags: PteFlags::WRITE | PteFlags::OWNED }).map_err(no_memory)?;
    let verdict = test(&mut machine, guest, &space, data);
    space.drain(&mut |_, _| {});
    machine.memory.release(&[code, data]);
    let (tsc_matches, leaves, guest) = verdict?;
    if let Some(l) = leaves.iter().find(|l| l.function == 1) {
        machine.cpuid.hwcap = l.regs[3];
    }

    // The host formats all its CPUs for one line of that file.
    let host_cpu = if model::brand(&leaves).is_empty() { host_cpu() } else { String::new() };
    let report = SelfTest {
        caps,
        trap_mode: machine.mode,
        nested_paging,
        tsc_usable: tsc_matches && clock::host_tsc_is_constant(),
        tsc_khz,
        xcr0: machine.cpuid.xcr0,
        xsave_len: format.image_len(),
        fsgsbase: machine.cpuid.fsgsbase,
        debug_registers: machine.debug_registers,
        leaves,
        host_cpu,
    };
    Ok((machine, report, guest))
}

/// Sets the machine's mode, and tells whether the guest's TSC is the host's, and its CPUID.
fn test(
    machine: &mut Machine,
    guest: Guest,
    space: &KvmSpace,
    data: PhysAddr,
) -> Result<(bool, Vec<Leaf>, Guest), PlatformError> {
    let fpu = KvmFpu::detached(&machine.format);
    let mut t = Test { machine, guest, kick: Kick::default(), space, fpu: &fpu };
    let page = t.guest.run_page();
    t.kick.set_run_page(page);
    match t.enter(0, 0, 0) {
        (Exit::Syscall, _) => {}
        // An instruction fetch by ring 3 from the supervisor's entry.
        (Exit::Exception { vector: 14, error: 0x15, cr2: SUPERVISOR_SYSCALL }, _) => {
            let Test { guest, kick, .. } = t;
            machine.mode = TrapMode::Ring3;
            machine.shared.set_port_open(&machine.memory, true).map_err(|e| PlatformError::Memory(e.to_string()))?;
            t = Test { machine, guest, kick, space, fpu: &fpu };
            t.guest.become_ring3(t.machine)?;
        }
        (exit, _) => return failed("SYSCALL", &exit),
    }
    match t.enter(0, 7, 0) {
        (Exit::Syscall, c)
            if c.rip == CODE + 2 && (c.rcx, c.rax, c.rbx, c.rdi, c.r8, c.rsp) == (c.rip, 39, !1, 7, 8, 0x5a5a) => {}
        (exit, _) => return failed("SYSCALL", &exit),
    }
    let out_advances = t.guest.out_advanced();
    let before = clock::tsc();
    let tsc_matches = match t.enter(TSC, 0, 0) {
        (Exit::Syscall, c) => (before..=clock::tsc()).contains(&c.rax),
        (exit, _) => return failed("RDTSC", &exit),
    };
    match t.enter(UD2, 0, 0) {
        (Exit::Exception { vector: 6, .. }, c) if c.rip == CODE + UD2 && c.rsp == 0x5a5a => {}
        (exit, _) => return failed("UD2", &exit),
    }
    match t.enter(LOAD, ABSENT, 0) {
        (Exit::Exception { vector: 14, error: 4, cr2: ABSENT }, c) if c.rip == CODE + LOAD => {}
        (exit, _) => return failed("a page fault", &exit),
    }
    // A breakpoint at the next probe's instruction.
    t.guest.parts().0.set_debug([CODE + LOAD, 0, 0, 0], 1);
    let debug_registers = matches!(t.enter(LOAD, ABSENT, 0).0, Exit::Exception { vector: 1, .. });
    t.guest.parts().0.set_debug([0; 4], 0);
    let fsgsbase = match t.enter(RDFSBASE, 0, 0) {
        (Exit::Syscall, _) => true,
        (Exit::Exception { vector: 6, .. }, _) => false,
        (exit, _) => return failed("RDFSBASE", &exit),
    };
    let leaves = leaves(&mut t, data)?;
    let guest = t.guest;
    machine.out_advances = out_advances;
    machine.debug_registers = debug_registers;
    machine.cpuid.fsgsbase = fsgsbase;
    Ok((tsc_matches, leaves, guest))
}

/// What CPUID gives inside the guest. Some KVMs leave CPUID to the processor, and then it may name more than KVM was told. Where the
/// leaves with most of the features are as KVM says, so are the others, which saves an exit each.
fn leaves(t: &mut Test<'_>, data: PhysAddr) -> Result<Vec<Leaf>, PlatformError> {
    let mut executed = Vec::new();
    for part in [0..TELLING, TELLING..LEAVES.len()] {
        let [start, end] = [part.start, part.end].map(|n| DATA + (n * RECORD) as u64);
        match t.enter(CPUID, start, end) {
            (Exit::Syscall, c) if c.rdi == end => {}
            (exit, _) => return failed("CPUID", &exit),
        }
        let mut answers = vec![0; part.len() * RECORD];
        let read = t.machine.memory.read(PhysAddr(data.0 + start - DATA), &mut answers);
        read.map_err(|e| PlatformError::Memory(e.to_string()))?;
        executed.extend(answers.chunks_exact(RECORD).filter_map(leaf));
        let said = GuestCpuid::in_force(t.guest.parts().0.fd())?;
        let regs = |function, index| {
            let entry = said.iter().find(|e| e.function == function && e.index == index);
            entry.map_or([0; 4], |e| [e.eax, e.ebx, e.ecx, e.edx])
        };
        if executed.iter().all(|l| l.regs == regs(l.function, l.index)) {
            let leaf = |&(function, index)| Leaf { function, index, regs: regs(function, index) };
            return Ok(LEAVES.iter().map(leaf).collect());
        }
    }
    Ok(executed)
}

/// Whether changes to page tables reach the guest as they must: takes a few hundred exits, for `bartizan doctor` on a machine
/// of its own. The text says what went wrong.
pub fn coherence(platform: &Arc<KvmPlatform>) -> Result<(), String> {
    std::thread::scope(|s| {
        let test = s.spawn(|| {
            platform.attach_worker(0).map_err(|e| e.to_string())?;
            change_mappings(platform)
        });
        test.join().unwrap_or_else(|_| Err("the test did not end".into()))
    })
}

fn change_mappings(platform: &Arc<KvmPlatform>) -> Result<(), String> {
    let text = |e: Errno| e.to_string();
    let memory = platform.memory();
    let pages = [memory.alloc().map_err(text)?, memory.alloc().map_err(text)?, memory.alloc().map_err(text)?];
    let [code, one, two] = pages;
    // mov (%rdi), %al; mov %al, (%rdi); syscall
    memory.write(code, &[0x8a, 0x07, 0x88, 0x07, 0x0f, 0x05]).map_err(text)?;
    memory.write(one, &[1]).map_err(text)?;
    memory.write(two, &[2]).map_err(text)?;
    let space = platform.new_space().map_err(text)?;
    space.map(CODE, Pte { pa: code, flags: PteFlags::EXEC }).map_err(text)?;
    let fpu = platform.new_fpu();
    let touch = || {
        let mut ctx = UserContext { rip: CODE, rdi: DATA, ..Default::default() };
        loop {
            let exit = platform.enter(&*space, &mut ctx, &*fpu);
            if exit != Exit::Interrupted {
                return (exit, ctx.rip - CODE, ctx.rax & 0xff);
            }
        }
    };
    let end = DATA + guest_abi::layout::PAGE_SIZE;
    let set = |new: Option<Pte>| space.update(DATA, end, &mut |_, _| new);
    let fault = |error| Exit::Exception { vector: 14, error, cr2: DATA };
    let writable = |pa| Pte { pa, flags: PteFlags::WRITE };
    let verdict = (0..20).try_for_each(|_| {
        space.map(DATA, writable(one)).map_err(text)?;
        let expect = |what: &str, exit, rip, value: Option<u64>| {
            let got = touch();
            let right = got.0 == exit && got.1 == rip && value.is_none_or(|v| v == got.2);
            if right { Ok(()) } else { Err(format!("{what}: {:?} at {:#x}", got.0, got.1)) }
        };
        expect("a page that was mapped", Exit::Syscall, 6, Some(1))?;
        set(Some(writable(two)));
        expect("a page that was replaced", Exit::Syscall, 6, Some(2))?;
        set(Some(Pte { pa: two, flags: PteFlags::empty() }));
        expect("a page that was write-protected", fault(7), 2, Some(2))?;
        set(None);
        expect("a page that was unmapped", fault(4), 0, None)
    });
    space.drain(&mut |_, _| {});
    drop(space);
    memory.release(&pages);
    verdict
}
