//! What a hostile program does: each case ends in Linux's signal or error number, and the program around it lives.
use super::Case;
use super::sys::{fork, in_child, map, wait};

pub const CASES: &[Case] = &[
    ("hostile_int_n", int_n),
    ("hostile_privileged", privileged),
    ("hostile_monitor_region", monitor_region),
    ("hostile_garbage_syscalls", garbage),
    ("hostile_syscall_registers", syscall_registers),
    ("hostile_flags", flags),
    ("hostile_stack_pointer", stack_pointer),
    ("hostile_ports", ports),
    ("hostile_fork_storm", storm),
];

/// Runs machine code in a child; prints how it ended.
fn run_code(name: &str, code: &[u8], print: bool) {
    let status = wait(fork(|| {
        super::sys::no_core();
        for signal in 1..=31 {
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        unsafe { libc::alarm(20) };
        let page = map(4096, 7);
        unsafe { std::ptr::copy_nonoverlapping(code.as_ptr(), page, code.len()) };
        let f: extern "C" fn() = unsafe { std::mem::transmute(page) };
        f();
        0
    }));
    if print {
        println!("{name}: {status:#x}");
    }
    assert!(!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGALRM), "{name} hangs");
}

fn int_n() {
    for n in 0..=255_u8 {
        if n == 0x80 {
            continue; // the 32-bit system call interface
        }
        // A KVM for machines without virtualization extensions keeps this vector to itself and answers it as CPUID, without
        // leaving the guest. Harmless, but no signal.
        run_code(&format!("int {n:#x}"), &[0xcd, n, 0xc3], n != 0x1a);
    }
}

fn privileged() {
    let codes: &[(&str, &[u8])] = &[
        ("hlt", &[0xf4]),
        ("cli", &[0xfa]),
        ("sti", &[0xfb]),
        ("clts", &[0x0f, 0x06]),
        ("invd", &[0x0f, 0x08]),
        ("wbinvd", &[0x0f, 0x09]),
        ("rdmsr", &[0x0f, 0x32]),
        ("wrmsr", &[0x0f, 0x30]),
        ("mov cr0,rax", &[0x0f, 0x22, 0xc0]),
        ("mov rax,cr4", &[0x0f, 0x20, 0xe0]),
        ("mov cr8,rax", &[0x44, 0x0f, 0x22, 0xc0]),
        ("mov dr7,rax", &[0x0f, 0x23, 0xf8]),
        ("lidt", &[0x0f, 0x01, 0x1c, 0x24]),
        ("lgdt", &[0x0f, 0x01, 0x14, 0x24]),
        ("ltr ax", &[0x0f, 0x00, 0xd8]),
        ("lldt ax", &[0x0f, 0x00, 0xd0]),
        ("swapgs", &[0x0f, 0x01, 0xf8]),
        ("sysret", &[0x48, 0x0f, 0x07]),
        ("invlpg", &[0x0f, 0x01, 0x3c, 0x24]),
        ("xsetbv", &[0x0f, 0x01, 0xd1]),
        ("ud2", &[0x0f, 0x0b]),
        ("lock nop", &[0xf0, 0x90]),
        ("ss far jump", &[0xff, 0x2c, 0x24]),
        ("mov ss,ax", &[0x66, 0xb8, 0x08, 0x00, 0x8e, 0xd0]),
        ("mov ds,ax", &[0x66, 0xb8, 0x10, 0x00, 0x8e, 0xd8]),
    ];
    for (name, code) in codes {
        let mut code = code.to_vec();
        code.push(0xc3);
        run_code(name, &code, true);
    }
}

fn monitor_region() {
    for page in 0..64_u64 {
        let target = 0x7f80_0000_0000 + page * 4096;
        for offset in [0_u64, 2, 16, 0xff8] {
            let address = (target + offset).to_le_bytes();
            let mut jump = vec![0x48, 0xb8];
            jump.extend(address);
            jump.extend([0xff, 0xe0]);
            let mut write = vec![0x48, 0xb8];
            write.extend(address);
            write.extend([0x48, 0xc7, 0x00, 0xff, 0xff, 0xff, 0xff, 0xc3]);
            if offset == 0 || page < 16 {
                run_code("jump", &jump, false);
                run_code("write", &write, false);
            }
        }
    }
    in_child(|| ());
}

/// A small deterministic generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

fn garbage() {
    // Calls that end, stop, or replace the child or wait for ever by design.
    let spared = [
        libc::SYS_exit,
        libc::SYS_exit_group,
        libc::SYS_pause,
        libc::SYS_rt_sigreturn,
        libc::SYS_vfork,
        libc::SYS_fork,
    ];
    let values = [
        0,
        1,
        2,
        3,
        4,
        7,
        64,
        4095,
        4096,
        0x7fff_ffff,
        0xffff_ffff,
        0x7f80_0000_0000,
        0x7fff_ffff_f000,
        1 << 63,
        u64::MAX,
        u64::MAX - 4095,
    ];
    let mut random = Random(0x1234_5678_9abc_def1);
    for nr in 0..=600_i64 {
        if spared.contains(&nr) {
            continue;
        }
        let page = map(4096, 3) as u64;
        let rounds: Vec<[u64; 6]> = (0..12)
            .map(|_| {
                std::array::from_fn(|_| {
                    let r = random.next();
                    match r % 4 {
                        0 => page + (r >> 8) % 4000,
                        1 => r,
                        _ => values[(r >> 8) as usize % values.len()],
                    }
                })
            })
            .collect();
        let pid = fork(move || {
            super::sys::no_core();
            unsafe {
                libc::setpgid(0, 0);
                // Nobody's identity: the same calls by root would set the clock or the host name of a real machine.
                libc::setresgid(65534, 65534, 65534);
                libc::setresuid(65534, 65534, 65534);
                for fd in 0..3 {
                    libc::close(fd);
                }
                for signal in 1..=31 {
                    libc::signal(signal, libc::SIG_DFL);
                }
                let second = libc::itimerval {
                    it_interval: libc::timeval { tv_sec: 0, tv_usec: 100_000 },
                    it_value: libc::timeval { tv_sec: 0, tv_usec: 100_000 },
                };
                libc::setitimer(libc::ITIMER_REAL, &raw const second, std::ptr::null_mut());
            }
            for args in rounds {
                // Never at somebody else: signals and priorities go to the child alone.
                let mut args = args;
                if [libc::SYS_kill, libc::SYS_tkill, libc::SYS_rt_sigqueueinfo, libc::SYS_setpriority].contains(&nr) {
                    args[0] = 0x3fff_fff0;
                }
                if [libc::SYS_tgkill, libc::SYS_rt_tgsigqueueinfo, libc::SYS_reboot, libc::SYS_kexec_load].contains(&nr)
                {
                    args[0] = 0x3fff_fff0;
                }
                let _ = super::sys::call(nr, args);
            }
            0
        });
        std::thread::sleep(std::time::Duration::from_micros(200));
        let mut status = 0;
        for round in 0.. {
            let r = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
            if r == pid {
                break;
            }
            if round > 2000 {
                unsafe { libc::kill(pid, libc::SIGKILL) };
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        unsafe { libc::munmap(page as *mut _, 4096) };
        // Children that the child made by clone end with their group.
        unsafe { libc::kill(-pid, libc::SIGKILL) };
        while unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) } > 0 {}
    }
    in_child(|| ());
}

fn syscall_registers() {
    // rcx and r11 are overwritten, everything else survives; the direction flag too.
    let (rcx, r11, rbx, rdx): (u64, u64, u64, u64);
    unsafe {
        std::arch::asm!(
            "push rbx", "mov rbx, 0x1111", "mov eax, 39", "mov rcx, 5", "mov r11, 5",
            "lea r8, [rip + 2f]", "syscall", "2:", "sub rcx, r8", "mov r9, rbx", "pop rbx",
            out("rcx") rcx, out("r11") r11, out("r9") rbx, out("r8") _, out("rax") _, inout("rdx") 0x2222_u64 => rdx,
        );
    }
    assert_eq!((rcx, rbx, rdx), (0, 0x1111, 0x2222));
    assert_ne!(r11 & 0x200, 0, "r11 holds rflags with IF");
}

fn flags() {
    // popf cannot change IOPL or IF; AC and ID may change; TF traps once.
    run_code("popf all", &[0x68, 0xff, 0xff, 0x3f, 0x00, 0x9d, 0x6a, 0x02, 0x9d, 0xc3], false);
    run_code("trap flag", &[0x68, 0x02, 0x01, 0x00, 0x00, 0x9d, 0x90, 0x90, 0xc3], true);
    // Single step over a system call.
    run_code(
        "trap flag, syscall",
        &[0xb8, 39, 0, 0, 0, 0x68, 0x02, 0x01, 0x00, 0x00, 0x9d, 0x0f, 0x05, 0x90, 0xc3],
        true,
    );
}

fn stack_pointer() {
    // A system call with a wild stack pointer returns; a push on it faults.
    for rsp in [0_u64, 8, 0x7fff_ffff_fff8, 0x8000_0000_0000, u64::MAX] {
        let ok: u64;
        unsafe {
            std::arch::asm!("mov r12, rsp", "mov rsp, {v}", "mov eax, 39", "syscall", "mov rsp, r12", v = in(reg) rsp,
                out("rax") ok, out("rcx") _, out("r11") _, out("r12") _);
        }
        assert!(ok > 0);
        let mut code = vec![0x48, 0xbc];
        code.extend(rsp.to_le_bytes());
        code.extend([0x50, 0xc3]);
        run_code(&format!("push at {rsp:#x}"), &code, true);
    }
}

fn ports() {
    for port in 0..=255_u8 {
        run_code(&format!("out {port:#x}"), &[0xe6, port, 0xc3], true);
    }
    for port in [0x10_u16, 0x3f8, 0xcf8, 0xffff] {
        let p = port.to_le_bytes();
        run_code(&format!("out dx {port:#x}"), &[0x66, 0xba, p[0], p[1], 0xee, 0xc3], true);
        run_code(&format!("in dx {port:#x}"), &[0x66, 0xba, p[0], p[1], 0xec, 0xc3], true);
        run_code(&format!("insb {port:#x}"), &[0x66, 0xba, p[0], p[1], 0x48, 0x89, 0xe7, 0x6c, 0xc3], true);
    }
}

fn storm() {
    in_child(|| {
        let limit = libc::rlimit { rlim_cur: 200, rlim_max: 200 };
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
        let mut made = Vec::new();
        for _ in 0..300 {
            match unsafe { libc::fork() } {
                0 => unsafe {
                    libc::pause();
                    libc::_exit(0)
                },
                pid if pid > 0 => made.push(pid),
                _ => break,
            }
        }
        for pid in &made {
            unsafe { libc::kill(*pid, libc::SIGKILL) };
        }
        for pid in made {
            assert_eq!(libc::WTERMSIG(wait(pid)), libc::SIGKILL);
        }
    });
}
