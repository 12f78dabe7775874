//! The machine through the sentry's eyes: small programs run by `Platform::enter`. Passes with a plain message where there
//! is no KVM.
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use iced_x86::code_asm::{CodeAssembler, rdi as RDI, xmm7, xmmword_ptr, ymm7, ymmword_ptr};
use sentry::platform::{Exit, Fpu, GuestSpace, PhysAddr, Platform, Pte, PteFlags, UserContext};
use vmm::entry::TrapMode;
use vmm::kvm::PlatformError;
use vmm::platform::{Config, KvmPlatform, Service};

const CODE: u64 = 0x40_0000;
const DATA: u64 = 0x50_0000;
const STACK: u64 = 0x60_0000;

fn machine(cpus: usize) -> Option<Arc<KvmPlatform>> {
    match KvmPlatform::new(Config { cpus, memory_limit: 64 << 20, service: Service::Always, rewrite: true }) {
        Ok(p) => Some(p),
        Err(e @ (PlatformError::NoDevice | PlatformError::NoPermission)) => {
            println!("skipped: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// Runs `body` as the worker of `cpu`.
fn on_worker<R: Send>(p: &Arc<KvmPlatform>, cpu: usize, body: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|s| {
        s.spawn(|| {
            p.attach_worker(cpu).expect("attach");
            body()
        })
        .join()
        .unwrap()
    })
}

struct Program {
    p: Arc<KvmPlatform>,
    space: Arc<dyn GuestSpace>,
    data: PhysAddr,
}

impl Program {
    fn new(p: &Arc<KvmPlatform>, code: &[u8]) -> Program {
        let space = p.new_space().unwrap();
        let m = p.memory();
        let (text, data, stack) = (m.alloc().unwrap(), m.alloc().unwrap(), m.alloc().unwrap());
        m.write(text, code).unwrap();
        let map = |va, pa, flags| space.map(va, Pte { pa, flags: flags | PteFlags::OWNED }).unwrap();
        map(CODE, text, PteFlags::EXEC);
        map(DATA, data, PteFlags::WRITE);
        map(STACK, stack, PteFlags::WRITE);
        Program { p: p.clone(), space, data }
    }

    fn assemble(
        p: &Arc<KvmPlatform>,
        build: impl FnOnce(&mut CodeAssembler) -> Result<(), iced_x86::IcedError>,
    ) -> Program {
        let mut a = CodeAssembler::new(64).unwrap();
        build(&mut a).unwrap();
        Program::new(p, &a.assemble(CODE).unwrap())
    }

    #[allow(clippy::unused_self)] // one of the steps of a program
    fn context(&self) -> UserContext {
        UserContext { rip: CODE, rsp: STACK + 4096, rflags: 0x202, rdi: DATA, ..Default::default() }
    }

    fn enter(&self, ctx: &mut UserContext, fpu: &dyn Fpu) -> Exit {
        loop {
            let exit = self.p.enter(&*self.space, ctx, fpu);
            if exit != Exit::Interrupted {
                return exit;
            }
        }
    }

    fn start(&self) -> (Exit, UserContext) {
        let mut ctx = self.context();
        let exit = self.enter(&mut ctx, &*self.p.new_fpu());
        (exit, ctx)
    }
}

/// The exit of a program of these bytes on a fresh worker.
fn exit_of(p: &Arc<KvmPlatform>, cpu: usize, programs: &[&[u8]]) -> Vec<(Exit, UserContext)> {
    on_worker(p, cpu, || programs.iter().map(|code| Program::new(p, code).start()).collect())
}

#[test]
fn system_calls_keep_every_register() {
    let Some(p) = machine(1) else { return };
    println!("{:?}", p.self_test());
    let t = Program::assemble(&p, |a| {
        for _ in 0..3 {
            a.syscall()?;
        }
        a.ud2()
    });
    on_worker(&p, 0, || {
        let fpu = p.new_fpu();
        let mut ctx = UserContext {
            rax: 1,
            rbx: 2,
            rcx: 3,
            rdx: 4,
            rsi: 5,
            rdi: 6,
            rbp: 7,
            rsp: 8,
            r8: 9,
            r9: 10,
            r10: 11,
            r11: 12,
            r12: 13,
            r13: 14,
            r14: 15,
            r15: 16,
            rip: CODE,
            rflags: 0x202 | 0x8d5,
            fs_base: 0x7000_1234_5678,
            gs_base: 0x1111,
            orig_rax: 77,
        };
        for n in 1..=3u64 {
            let before = ctx;
            assert_eq!(t.enter(&mut ctx, &*fpu), Exit::Syscall);
            let rip = CODE + 2 * n;
            assert_eq!(ctx, UserContext { rip, rcx: rip, r11: before.rflags, ..before });
            // Once through the short way back, then with what only the long way can restore.
            if n == 2 {
                ctx.rcx = 0xdead;
                ctx.r11 = !0;
                ctx.fs_base = 0x4242;
            }
        }
        ctx.rax = !0;
        let before = ctx;
        let exit = t.enter(&mut ctx, &*fpu);
        assert!(matches!(exit, Exit::Exception { vector: 6, .. }), "{exit:?}");
        assert_eq!(ctx, UserContext { rflags: ctx.rflags, ..before });
        assert_eq!(ctx.rflags & !0x1_0000, before.rflags);
    });
}

#[test]
fn exceptions_are_what_hardware_delivers() {
    let Some(p) = machine(1) else { return };
    let cases: &[(&str, &[u8], u8, u32, u64)] = &[
        ("ud2", &[0x0f, 0x0b], 6, 0, 0),
        ("div0", &[0x31, 0xc9, 0xf7, 0xf1], 0, 0, 2),
        ("hlt", &[0xf4], 13, 0, 0),
        ("cli", &[0xfa], 13, 0, 0),
        ("rdmsr", &[0x0f, 0x32], 13, 0, 0),
        ("mov cr0", &[0x0f, 0x20, 0xc0], 13, 0, 0),
        ("lgdt", &[0x0f, 0x01, 0x17], 13, 0, 0),
        ("in", &[0xe4, 0x10], 13, 0, 0),
        ("out other port", &[0xe6, 0x80], 13, 0, 0),
        ("out system call port", &[0x90, 0xe6, 0x10], 13, 0, 1),
        ("out %dx", &[0x66, 0xba, 0x10, 0, 0xee], 13, 0, 4),
        ("out exception port", &[0xe6, 0x12], 13, 0, 0),
        ("int3", &[0xcc], 3, 0, 1),
        ("int 3", &[0xcd, 3], 3, 0, 2),
        ("int 4", &[0xcd, 4], 4, 0, 2),
        ("int 0", &[0xcd, 0], 13, 2, 0),
        ("int 1", &[0xcd, 1], 13, 10, 0),
        ("int 2", &[0xcd, 2], 13, 18, 0),
        ("int 14", &[0xcd, 14], 13, 14 * 8 + 2, 0),
        ("int 0x80", &[0xcd, 0x80], 13, 0x402, 0),
        ("int 0xff", &[0xcd, 0xff], 13, 0x7fa, 0),
        ("int1", &[0xf1], 1, 0, 1),
        ("load from a non-canonical address", &[0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0x80, 0x8a, 0], 13, 0, 10),
        ("push to a non-canonical address", &[0x48, 0xbc, 0, 0, 0, 0, 0, 0, 0, 0x80, 0x50], 12, 0, 10),
        ("far jump to a 32-bit segment", &[0x6a, 0x23, 0x6a, 0, 0x48, 0xcb], 13, 0x20, 4),
        ("simd", &[0xc7, 0x07, 0, 0, 0, 0, 0x0f, 0xae, 0x17, 0x0f, 0x57, 0xc0, 0x0f, 0x5e, 0xc0], 19, 0, 12),
        ("x87", &[0xc7, 0x07, 0, 0, 0, 0, 0xd9, 0x2f, 0xd9, 0xee, 0xd9, 0xee, 0xde, 0xf9, 0x9b], 16, 0, 14),
        ("locked int", &[0xf0, 0xcd, 0x80], 6, 0, 0),
    ];
    let programs: Vec<&[u8]> = cases.iter().map(|c| c.1).collect();
    // Where QEMU emulates the processor, it takes liberties.
    let emulated = std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|s| s.contains("QEMU"));
    let liberties = ["int1", "push to a non-canonical address", "simd", "locked int"];
    let mut wrong = 0;
    for ((name, _, vector, error, at), (exit, ctx)) in cases.iter().zip(exit_of(&p, 0, &programs)) {
        let right = matches!(exit, Exit::Exception { vector: v, error: e, .. } if (v, e) == (*vector, *error))
            && ctx.rip == CODE + at;
        if !right {
            println!("{name}: {exit:?} at {:#x}, not vector {vector} error {error:#x} at {:#x}", ctx.rip, CODE + at);
            wrong += u32::from(!(emulated && liberties.contains(name)));
        }
    }
    assert_eq!(wrong, 0);
    // SYSENTER is #UD on one vendor's processors and #GP on the other's.
    let (exit, _) = exit_of_more(&p, &[0x0f, 0x34]);
    assert!(matches!(exit, Exit::Exception { vector: 6 | 13, .. }), "{exit:?}");
}

#[test]
fn memory_that_the_host_cannot_supply_is_a_bus_error() {
    let Some(p) = machine(1) else { return };
    let path = std::env::temp_dir().join(format!("bartizan-window-{}", std::process::id()));
    std::fs::write(&path, vec![0x5a; 8192]).unwrap();
    let file = std::fs::File::open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let window = p.guest_memory().window(file.as_fd(), (1, 1), 0, false).unwrap();
    on_worker(&p, 0, || {
        // mov (%rdi), %al; syscall
        let t = Program::new(&p, &[0x8a, 0x07, 0x0f, 0x05]);
        let load = |page: u64| {
            let va = 0x1000_0000 + page * 4096;
            let pa = PhysAddr(window.base().0 + page * 4096);
            if t.space.lookup(va).is_none() {
                t.space.map(va, Pte { pa, flags: PteFlags::empty() }).unwrap();
            }
            let mut ctx = UserContext { rdi: va, ..t.context() };
            let exit = t.enter(&mut ctx, &*p.new_fpu());
            (exit, ctx.rip - CODE, ctx.rax)
        };
        assert_eq!(load(1), (Exit::Syscall, 4, 0x5a));
        for _ in 0..2 {
            let (exit, rip, _) = load(3);
            let right = |at| at == window.base().0 + 3 * 4096;
            assert!(
                matches!(exit, Exit::BusError { at, va: Some(va) } if va == 0x1000_3000 && at.is_none_or(|at| right(at.0 & !4095))),
                "{exit:?}"
            );
            assert_eq!(rip, 0);
            // The vCPU is as good as before.
            assert_eq!(load(0), (Exit::Syscall, 4, 0x5a));
        }
        t.space.update(0x1000_0000, 0x1100_0000, &mut |_, _| None);
    });
}

/// As `exit_of`, on a worker of a machine of its own: a CPU has one worker in its life.
fn exit_of_more(_: &Arc<KvmPlatform>, code: &[u8]) -> (Exit, UserContext) {
    let p = machine(1).unwrap();
    exit_of(&p, 0, &[code])[0]
}

#[test]
fn page_faults_tell_address_and_access() {
    let Some(p) = machine(1) else { return };
    on_worker(&p, 0, || {
        let fault = |code: &[u8], rdi: u64| {
            let t = Program::new(&p, code);
            let mut ctx = t.context();
            ctx.rdi = rdi;
            (t.enter(&mut ctx, &*p.new_fpu()), ctx.rip)
        };
        let (load, store): (&[u8], &[u8]) = (&[0x8a, 0x07], &[0x88, 0x07]);
        let jump: &[u8] = &[0xff, 0xe7];
        let pf = |error, cr2| Exit::Exception { vector: 14, error, cr2 };
        assert_eq!(fault(load, 0x1234), (pf(4, 0x1234), CODE));
        assert_eq!(fault(store, 0x7fff_1234), (pf(6, 0x7fff_1234), CODE));
        assert_eq!(fault(store, CODE + 8), (pf(7, CODE + 8), CODE));
        assert_eq!(fault(jump, 0x8888), (pf(0x14, 0x8888), 0x8888));
        assert_eq!(fault(jump, DATA), (pf(0x15, DATA), DATA));
        // The monitor's region: unreachable, or readable at most, but for the request page where SYSCALL arrives in ring 3.
        for page in 0..12 {
            let at = guest_abi::layout::MONITOR_BASE + page * 4096;
            if at == guest_abi::layout::REQUEST_PAGE && p.trap_mode() == TrapMode::Ring3 {
                continue;
            }
            let exit = fault(store, at).0;
            assert!(matches!(exit, Exit::Exception { vector: 14, cr2, .. } if cr2 == at), "{page}: {exit:?}");
        }
        // The kernel half.
        let exit = fault(load, 0xffff_8000_0000_0000).0;
        assert!(matches!(exit, Exit::Exception { vector: 14, cr2: 0xffff_8000_0000_0000, .. }), "{exit:?}");
        // A non-canonical instruction pointer, set by the sentry.
        let t = Program::new(&p, load);
        let mut ctx = UserContext { rip: 1 << 63, ..t.context() };
        assert!(matches!(t.enter(&mut ctx, &*p.new_fpu()), Exit::Exception { vector: 13, .. }));
        assert_eq!(ctx.rip, 1 << 63);
    });
}

#[test]
fn jumping_to_the_entry_is_a_system_call_or_a_fault() {
    let Some(p) = machine(1) else { return };
    on_worker(&p, 0, || {
        let t = Program::new(&p, &[0xff, 0xe7]);
        let mut ctx =
            UserContext { rdi: guest_abi::layout::ENTRY_PAGE, rcx: CODE, r11: !0, rflags: 0x302, ..t.context() };
        let fpu = p.new_fpu();
        for _ in 0..4 {
            match t.enter(&mut ctx, &*fpu) {
                Exit::Syscall => assert_eq!((ctx.rip, ctx.rflags & 0x3000), (CODE, 0)),
                Exit::Exception { vector: 14 | 1, .. } => {}
                e => panic!("{e:?}"),
            }
        }
        // Resuming at the stub itself.
        let mut ctx =
            UserContext { rip: guest_abi::layout::ENTRY_PAGE, rcx: guest_abi::layout::ENTRY_PAGE, ..t.context() };
        for _ in 0..3 {
            match t.enter(&mut ctx, &*fpu) {
                Exit::Syscall => assert_eq!(ctx.rip, guest_abi::layout::ENTRY_PAGE),
                Exit::Exception { vector: 14, .. } => {}
                e => panic!("{e:?}"),
            }
        }
    });
}

#[test]
fn single_step_traps_after_each_instruction() {
    let Some(p) = machine(1) else { return };
    on_worker(&p, 0, || {
        let t = Program::new(&p, &[0x90, 0x90, 0x0f, 0x05, 0x90, 0x90]);
        let fpu = p.new_fpu();
        let mut ctx = UserContext { rflags: 0x302, ..t.context() };
        let mut seen = Vec::new();
        for _ in 0..4 {
            let exit = t.enter(&mut ctx, &*fpu);
            seen.push((exit, ctx.rip - CODE));
        }
        let step = Exit::Exception { vector: 1, error: 0, cr2: 0 };
        assert_eq!(seen, [(step, 1), (step, 2), (Exit::Syscall, 4), (step, 5)]);
    });
}

#[test]
fn segment_bases_are_the_programs_own() {
    let Some(p) = machine(1) else { return };
    if p.hwcap().1 & 2 == 0 {
        return;
    }
    on_worker(&p, 0, || {
        // wrfsbase %rsi; wrgsbase %rdx; syscall
        let t = Program::new(&p, &[0xf3, 0x48, 0x0f, 0xae, 0xd6, 0xf3, 0x48, 0x0f, 0xae, 0xda, 0x0f, 0x05]);
        let fpu = p.new_fpu();
        let mut ctx = UserContext { rsi: 0x1_2345_6000, rdx: 0x7654_3000, ..t.context() };
        assert_eq!(t.enter(&mut ctx, &*fpu), Exit::Syscall);
        assert_eq!((ctx.fs_base, ctx.gs_base), (0x1_2345_6000, 0x7654_3000));
        // A base that VM entry would refuse does no harm.
        let mut ctx = UserContext { fs_base: 1 << 62, ..t.context() };
        assert_eq!(t.enter(&mut ctx, &*fpu), Exit::Syscall);
    });
}

/// vmovdqu (%rdi), %ymm7 (or movdqu to %xmm7); syscall; the reverse; syscall; from the start.
fn vector_program(avx: bool) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).unwrap();
    let mut top = a.create_label();
    a.set_label(&mut top).unwrap();
    if avx {
        a.vmovdqu(ymm7, ymmword_ptr(RDI)).unwrap();
    } else {
        a.movdqu(xmm7, xmmword_ptr(RDI)).unwrap();
    }
    a.syscall().unwrap();
    if avx {
        a.vmovdqu(ymmword_ptr(RDI), ymm7).unwrap();
    } else {
        a.movdqu(xmmword_ptr(RDI), xmm7).unwrap();
    }
    a.syscall().unwrap();
    a.jmp(top).unwrap();
    a.assemble(CODE).unwrap()
}

#[test]
fn vector_state_follows_its_thread() {
    let Some(p) = machine(2) else { return };
    let avx = p.xcr0() & 4 != 0;
    let len = if avx { 32 } else { 16 };
    let code = vector_program(avx);
    struct Thread {
        t: Program,
        fpu: Arc<dyn Fpu>,
        ctx: UserContext,
        fill: u8,
    }
    let mut threads: Vec<Thread> = [0x11, 0x22]
        .map(|fill| {
            let t = Program::new(&p, &code);
            let ctx = t.context();
            Thread { t, fpu: p.new_fpu(), ctx, fill }
        })
        .into();
    let load = |th: &mut Thread| {
        p.memory().write(th.t.data, &vec![th.fill; len]).unwrap();
        assert_eq!(th.t.enter(&mut th.ctx, &*th.fpu), Exit::Syscall);
    };
    let check = |th: &mut Thread| {
        p.memory().write(th.t.data, &vec![0; len]).unwrap();
        assert_eq!(th.t.enter(&mut th.ctx, &*th.fpu), Exit::Syscall);
        let mut got = vec![0; len];
        p.memory().read(th.t.data, &mut got).unwrap();
        assert_eq!(got, vec![th.fill; len]);
    };
    // Two threads on one vCPU, then each on the other vCPU while the first still holds a state.
    on_worker(&p, 0, || {
        for _ in 0..3 {
            threads.iter_mut().for_each(load);
            threads.iter_mut().for_each(check);
        }
        threads.iter_mut().for_each(load);
    });
    on_worker(&p, 1, || {
        threads.iter_mut().rev().for_each(check);
        threads.iter_mut().for_each(load);
        // The image a signal frame would carry: read, changed, written back.
        let th = &mut threads[1];
        let mut image = th.fpu.read();
        assert_eq!(image.len(), p.xsave_len());
        assert_eq!(image[160 + 7 * 16..][..16], [0x22; 16]);
        image[160 + 7 * 16..][..16].fill(0x33);
        th.fpu.write(&image).unwrap();
        let again = th.fpu.read();
        assert_eq!(again[160 + 7 * 16..][..16], [0x33; 16]);
        th.fpu.write(&[0; 5]).unwrap_err();
        let mut bad = again.clone();
        bad[27] = 0xff;
        th.fpu.write(&bad).unwrap_err();
        let mut bad = again.clone();
        bad[519] = 0x40;
        th.fpu.write(&bad).unwrap_err();
        let mut bad = again;
        bad[520] = 1;
        th.fpu.write(&bad).unwrap_err();
        assert_eq!(th.t.enter(&mut th.ctx, &*th.fpu), Exit::Syscall);
        let mut got = vec![0; len];
        p.memory().read(th.t.data, &mut got).unwrap();
        assert_eq!(got[..16], [0x33; 16]);
        th.fpu.reset();
        assert_eq!(th.fpu.read()[160..416], [0; 256]);
        threads.iter_mut().take(1).for_each(check);
    });
}

#[test]
fn protection_keys_do_not_outlive_a_turn() {
    let Some(p) = machine(1) else { return };
    on_worker(&p, 0, || {
        // xor %ecx, %ecx; xor %edx, %edx; mov $3, %eax; wrpkru; syscall
        let hostile = Program::new(&p, &[0x31, 0xc9, 0x31, 0xd2, 0xb8, 3, 0, 0, 0, 0x0f, 0x01, 0xef, 0x0f, 0x05]);
        let load = Program::new(&p, &[0x8a, 0x07, 0x0f, 0x05]);
        let exit = hostile.start().0;
        // Where the entry stub runs in ring 3 the keys lock it out of the request page.
        let own = guest_abi::layout::REQUEST_PAGE..guest_abi::layout::ENTRY_PAGE;
        let locked_out = matches!(exit, Exit::Exception { vector: 14, cr2, .. } if own.contains(&cr2));
        assert!(locked_out || matches!(exit, Exit::Syscall | Exit::Exception { vector: 6, .. }), "{exit:?}");
        assert_eq!(load.start().0, Exit::Syscall);
    });
}

#[test]
fn changed_mappings_are_seen() {
    let Some(p) = machine(2) else { return };
    // mov (%rdi), %al; syscall; mov %al, (%rdi); syscall; from the start
    let code: &[u8] = &[0x8a, 0x07, 0x0f, 0x05, 0x88, 0x07, 0x0f, 0x05, 0xeb, 0xf6];
    let t = Program::new(&p, code);
    let other = p.memory().alloc().unwrap();
    p.memory().write(other, &[0x77; 16]).unwrap();
    let set = |new: Option<Pte>| t.space.update(DATA, DATA + 4096, &mut |_, _| new);
    let pte = |pa, flags| Some(Pte { pa, flags: flags | PteFlags::OWNED });
    let read = |fpu: &dyn Fpu| {
        let mut ctx = t.context();
        let exit = t.enter(&mut ctx, fpu);
        (exit, ctx.rax as u8)
    };
    let write = |fpu: &dyn Fpu| {
        let mut ctx = UserContext { rip: CODE + 4, rax: 0x55, ..t.context() };
        t.enter(&mut ctx, fpu)
    };
    let pf = |error| Exit::Exception { vector: 14, error, cr2: DATA };
    on_worker(&p, 0, || {
        let fpu = p.new_fpu();
        for _ in 0..20 {
            assert_eq!(write(&*fpu), Exit::Syscall);
            assert_eq!(read(&*fpu), (Exit::Syscall, 0x55));
            // Replaced.
            set(pte(other, PteFlags::WRITE));
            assert_eq!(read(&*fpu), (Exit::Syscall, 0x77));
            set(pte(t.data, PteFlags::WRITE));
            assert_eq!(read(&*fpu), (Exit::Syscall, 0x55));
            // Write-protected, and opened again without a shootdown.
            set(pte(t.data, PteFlags::empty()));
            assert_eq!(write(&*fpu), pf(7));
            assert_eq!(read(&*fpu), (Exit::Syscall, 0x55));
            t.space.map(DATA, pte(t.data, PteFlags::WRITE).unwrap()).unwrap();
            // A processor may fault once more on a translation that lacked the right.
            let exit = write(&*fpu);
            assert!(exit == Exit::Syscall || (exit == pf(7) && write(&*fpu) == Exit::Syscall), "{exit:?}");
            // Forbidden though kept.
            set(pte(t.data, PteFlags::WRITE | PteFlags::NONE));
            assert_eq!(read(&*fpu).0, pf(4));
            assert_eq!(t.space.lookup(DATA), pte(t.data, PteFlags::WRITE | PteFlags::NONE));
            set(pte(t.data, PteFlags::WRITE));
            assert_eq!(read(&*fpu), (Exit::Syscall, 0x55));
            // Cleared.
            set(None);
            assert_eq!(read(&*fpu).0, pf(4));
            assert_eq!(t.space.lookup(DATA), None);
            t.space.map(DATA, pte(t.data, PteFlags::WRITE).unwrap()).unwrap();
        }
    });
}

#[test]
fn changes_reach_a_running_cpu() {
    let Some(p) = machine(2) else { return };
    // 1: incq (%rdi); jmp 1b
    let t = Program::new(&p, &[0x48, 0xff, 0x07, 0xeb, 0xfb]);
    std::thread::scope(|s| {
        let runner = s.spawn(|| {
            p.attach_worker(0).unwrap();
            let fpu = p.new_fpu();
            let mut ctx = t.context();
            let mut exits = 0;
            for _ in 0..20 {
                let exit = t.enter(&mut ctx, &*fpu);
                assert!(matches!(exit, Exit::Exception { vector: 14, cr2: DATA, .. }), "{exit:?}");
                exits += 1;
                // The page is gone: from here on nobody may write to it.
                let mut first = [0; 8];
                p.memory().read(t.data, &mut first).unwrap();
                std::thread::sleep(Duration::from_micros(200));
                let mut second = [0; 8];
                p.memory().read(t.data, &mut second).unwrap();
                assert_eq!(first, second);
                t.space.map(DATA, Pte { pa: t.data, flags: PteFlags::WRITE | PteFlags::OWNED }).unwrap();
            }
            exits
        });
        let (p, t) = (&p, &t);
        s.spawn(move || {
            p.attach_worker(1).unwrap();
            while !runner.is_finished() {
                std::thread::sleep(Duration::from_millis(2));
                t.space.update(DATA, DATA + 4096, &mut |_, _| None);
            }
        });
        // `update` cleared: the runner ends by itself.
    });
}

#[test]
fn a_space_can_grow_while_another_cpu_uses_it() {
    let Some(p) = machine(2) else { return };
    // mov %rdi, (%rdi); syscall
    let t = Program::new(&p, &[0x48, 0x89, 0x3f, 0x0f, 0x05]);
    let touch = |at: u64| {
        let mut ctx = UserContext { rdi: at, ..t.context() };
        t.enter(&mut ctx, &*p.new_fpu())
    };
    let spread = |n: u64| 0x1_0000_0000 + n * 0x80_4020_1000;
    on_worker(&p, 0, || assert!(matches!(touch(spread(0)), Exit::Exception { vector: 14, .. })));
    on_worker(&p, 1, || {
        for n in 0..50 {
            let pa = p.memory().alloc().unwrap();
            t.space.map(spread(n), Pte { pa, flags: PteFlags::WRITE | PteFlags::OWNED }).unwrap();
            assert_eq!(touch(spread(n)), Exit::Syscall);
        }
        let mut seen = Vec::new();
        t.space.update(0, guest_abi::layout::TASK_SIZE, &mut |va, pte| {
            seen.push(va);
            Some(pte)
        });
        assert_eq!(seen.len(), 53);
        assert!(seen.is_sorted());
    });
    assert!(t.space.map(guest_abi::layout::TASK_SIZE, Pte { pa: t.data, flags: PteFlags::WRITE }).is_err());
    assert_eq!(t.space.lookup(guest_abi::layout::ENTRY_PAGE), None);
}

#[test]
fn kicks_are_never_lost() {
    let Some(p) = machine(1) else { return };
    let t = Program::new(&p, &[0xeb, 0xfe]);
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        let worker = s.spawn(|| {
            p.attach_worker(0).unwrap();
            let fpu = p.new_fpu();
            let mut ctx = t.context();
            let mut kicks = 0u32;
            while !stop.load(Ordering::SeqCst) {
                assert_eq!(p.enter(&*t.space, &mut ctx, &*fpu), Exit::Interrupted);
                assert_eq!(ctx.rip, CODE);
                kicks += 1;
                p.unpark(0);
            }
            // Before an entry.
            p.kick(0);
            assert_eq!(p.enter(&*t.space, &mut ctx, &*fpu), Exit::Interrupted);
            // By the timer.
            let start = Instant::now();
            p.set_preemption(0, Some(3_000_000));
            p.set_preemption(0, Some(3_000_000));
            assert_eq!(p.enter(&*t.space, &mut ctx, &*fpu), Exit::Interrupted);
            assert!(start.elapsed() >= Duration::from_micros(2900), "{:?}", start.elapsed());
            // While out of the guest.
            p.set_preemption(0, Some(1_000_000));
            std::thread::sleep(Duration::from_millis(3));
            assert_eq!(p.enter(&*t.space, &mut ctx, &*fpu), Exit::Interrupted);
            // Disarmed.
            p.set_preemption(0, Some(5_000_000));
            p.set_preemption(0, None);
            let late = s.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                p.kick(0);
            });
            let start = Instant::now();
            assert_eq!(p.enter(&*t.space, &mut ctx, &*fpu), Exit::Interrupted);
            assert!(start.elapsed() >= Duration::from_millis(25), "{:?}", start.elapsed());
            late.join().unwrap();
            kicks
        });
        // Each kick is answered; the next one comes at a moment of its own.
        for n in 0..500u64 {
            p.kick(0);
            if n % 3 != 0 {
                std::thread::sleep(Duration::from_micros(n % 97));
            }
        }
        std::thread::sleep(Duration::from_millis(1));
        stop.store(true, Ordering::SeqCst);
        p.kick(0);
        let start = Instant::now();
        let kicks = worker.join().unwrap();
        assert!(kicks > 10, "{kicks} in {:?}", start.elapsed());
    });
}

#[test]
fn parked_workers_wake_once() {
    let Some(p) = machine(1) else { return };
    std::thread::scope(|s| {
        s.spawn(|| {
            p.attach_worker(0).unwrap();
            p.unpark(0);
            p.park(0);
            let waker = s.spawn(|| {
                std::thread::sleep(Duration::from_millis(5));
                p.unpark(0);
            });
            let start = Instant::now();
            p.park(0);
            assert!(start.elapsed() >= Duration::from_millis(4));
            waker.join().unwrap();
        });
    });
}

#[test]
fn the_clock_is_the_guests_too() {
    let Some(p) = machine(1) else { return };
    let Some(clock) = p.tsc_clock() else {
        println!("no TSC clock here");
        return;
    };
    // rdtsc; shl $32, %rdx; or %rdx, %rax; syscall
    let t = Program::new(&p, &[0x0f, 0x31, 0x48, 0xc1, 0xe2, 0x20, 0x48, 0x09, 0xd0, 0x0f, 0x05]);
    on_worker(&p, 0, || {
        let before = p.monotonic();
        let (exit, ctx) = t.start();
        let after = p.monotonic();
        assert_eq!(exit, Exit::Syscall);
        let shown = vmm::clock::convert(&clock, ctx.rax);
        assert!(before <= shown && shown <= after, "{before} {shown} {after}");
    });
    // Refinement bends the rate only.
    std::thread::sleep(Duration::from_millis(1100));
    let a = p.monotonic();
    p.tsc_clock();
    let b = p.monotonic();
    assert!(b >= a && b - a < 1_000_000, "{a} {b}");
}

#[test]
fn cpuid_shows_the_sandbox() {
    let Some(p) = machine(2) else { return };
    // cpuid; syscall
    let t = Program::new(&p, &[0x0f, 0xa2, 0x0f, 0x05]);
    on_worker(&p, 1, || {
        let leaf = |eax: u64, ecx: u64| {
            let mut ctx = UserContext { rax: eax, rcx: ecx, ..t.context() };
            assert_eq!(t.enter(&mut ctx, &*p.new_fpu()), Exit::Syscall);
            // RCX is the return address by now.
            (ctx.rax as u32, ctx.rbx as u32, ctx.rdx as u32)
        };
        let (max, ebx, edx) = leaf(0x4000_0000, 0);
        assert_eq!(max, 0x4000_0000);
        assert_eq!((&ebx.to_le_bytes(), &edx.to_le_bytes()), (b"Bart", b"Bart"));
        let (_, ebx, edx) = leaf(1, 0);
        assert_eq!((ebx >> 24, ebx >> 16 & 0xff), (1, 2));
        assert_eq!(u64::from(edx), p.hwcap().0);
        let (xcr0, len, _) = leaf(0xd, 0);
        // Some KVMs add to the table what ring 3 has anyway.
        assert_eq!(u64::from(xcr0) & p.xcr0(), p.xcr0());
        assert_eq!(len as usize, p.xsave_len());
    });
    // The CPU number for the vDSO: mov (%rdi), %eax; syscall
    let t = Program::new(&p, &[0x8b, 0x07, 0x0f, 0x05]);
    on_worker(&p, 0, || {
        let mut ctx = UserContext { rdi: guest_abi::layout::MAILBOX_PAGE, ..t.context() };
        assert_eq!(t.enter(&mut ctx, &*p.new_fpu()), Exit::Syscall);
        assert_eq!(ctx.rax, 0);
    });
}

#[test]
fn doctor_finds_coherence_and_a_processor() {
    let Some(p) = machine(1) else { return };
    vmm::self_test::coherence(&p).unwrap();
    let model = p.cpu_model();
    println!("{model:?}");
    assert!(model.flags.contains("sse2") && !model.name.is_empty() && !model.vendor.is_empty());
}

#[test]
fn dead_spaces_give_back_their_memory() {
    let Some(p) = machine(1) else { return };
    on_worker(&p, 0, || {
        let m = p.memory();
        let mut after_first = 0;
        for round in 0..200 {
            let t = Program::new(&p, &[0x0f, 0x05]);
            assert_eq!(t.start().0, Exit::Syscall);
            let mut frames = Vec::new();
            t.space.update(0, guest_abi::layout::TASK_SIZE, &mut |_, pte| {
                frames.push(pte.pa);
                None
            });
            m.release(&frames);
            drop(t);
            p.guest_memory().trim();
            if round == 0 {
                after_first = m.used();
            }
        }
        assert_eq!(m.used(), after_first);
    });
}
