//! ptrace(2): stops, events, registers, memory of a tracee; what wait(2) tells the tracer and the parent.
use std::ptr::null_mut;

use crate::Case;
use crate::sys::{call, errno, fork, handle, map, ok, wait};

/// The cases of this area.
pub const CASES: &[Case] = &[
    ("ptrace_syscall_stops", syscall_stops),
    ("ptrace_sysemu", sysemu),
    ("ptrace_signals", signals),
    ("ptrace_step", step),
    ("ptrace_step_into_handler", step_into_handler),
    ("ptrace_breakpoint_in_text", breakpoint_in_text),
    ("ptrace_registers", registers),
    ("ptrace_watchpoint", watchpoint),
    ("ptrace_fork_events", fork_events),
    ("ptrace_thread_events", thread_events),
    ("ptrace_exec", exec),
    ("ptrace_exec_by_thread", exec_by_thread),
    ("ptrace_exit_event", exit_event),
    ("ptrace_attach_detach", attach_detach),
    ("ptrace_attach_stopped", attach_stopped),
    ("ptrace_seize", seize),
    ("ptrace_listen", listen),
    ("ptrace_tracer_dies", tracer_dies),
    ("ptrace_zombies", zombies),
    ("ptrace_restart", restart),
    ("ptrace_refusals", refusals),
    ("ptrace_pending_signals", pending_signals),
    ("ptrace_set_id_program", set_id_program),
];

const CONT: u32 = libc::PTRACE_CONT;
const SYSCALL: u32 = libc::PTRACE_SYSCALL;
const STEP: u32 = libc::PTRACE_SINGLESTEP;

fn ptrace(request: u32, pid: i32, addr: u64, data: u64) -> Result<i64, i32> {
    call(libc::SYS_ptrace, [request.into(), pid as u64, addr, data, 0, 0])
}

fn go(request: u32, pid: i32, signal: i32) {
    assert_eq!(ptrace(request, pid, 0, signal as u64), Ok(0), "request {request}");
}

/// The status of `pid`, a task of any kind.
pub(crate) fn wait_any(pid: i32) -> i32 {
    let mut status = 0;
    assert_eq!(ok(unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL) }), Ok(pid.into()));
    status
}

/// Waits for a stop; gives the signal with the event above it.
fn stop(pid: i32) -> i32 {
    let status = wait_any(pid);
    assert!(libc::WIFSTOPPED(status), "status {status:#x}");
    status >> 8
}

fn event(number: i32) -> i32 {
    libc::SIGTRAP | number << 8
}

/// A child that is traced by the caller and stands in the delivery of SIGSTOP.
fn traced(child: impl FnOnce() -> i32) -> i32 {
    let pid = fork(|| {
        ptrace(libc::PTRACE_TRACEME, 0, 0, 0).expect("PTRACE_TRACEME");
        unsafe { libc::raise(libc::SIGSTOP) };
        child()
    });
    assert_eq!(stop(pid), libc::SIGSTOP);
    pid
}

fn options(pid: i32, options: i32) {
    assert_eq!(ptrace(libc::PTRACE_SETOPTIONS, pid, 0, options as u64), Ok(0));
}

fn regs(pid: i32) -> libc::user_regs_struct {
    let mut r: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    assert_eq!(ptrace(libc::PTRACE_GETREGS, pid, 0, (&raw mut r) as u64), Ok(0));
    r
}

fn set_regs(pid: i32, r: &libc::user_regs_struct) {
    assert_eq!(ptrace(libc::PTRACE_SETREGS, pid, 0, std::ptr::from_ref(r) as u64), Ok(0));
}

fn peek(pid: i32, addr: u64) -> Result<u64, i32> {
    let mut word = 0u64;
    ptrace(libc::PTRACE_PEEKDATA, pid, addr, (&raw mut word) as u64).map(|_| word)
}

fn message(pid: i32) -> u64 {
    let mut word = 0u64;
    assert_eq!(ptrace(libc::PTRACE_GETEVENTMSG, pid, 0, (&raw mut word) as u64), Ok(0));
    word
}

fn info(pid: i32) -> Result<libc::siginfo_t, i32> {
    let mut i: libc::siginfo_t = unsafe { std::mem::zeroed() };
    ptrace(libc::PTRACE_GETSIGINFO, pid, 0, (&raw mut i) as u64).map(|_| i)
}

/// Lets the tracee go on to its end; gives its status.
fn finish(pid: i32) -> i32 {
    go(CONT, pid, 0);
    wait_any(pid)
}

/// The line of /proc/PID/status that begins with `name`.
fn status_line(pid: i32, name: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    text.lines().find(|l| l.starts_with(name)).unwrap_or_default().to_owned()
}

fn syscall_stops() {
    let pid = traced(|| {
        let own = unsafe { libc::syscall(libc::SYS_getppid) };
        let skipped = unsafe { libc::syscall(libc::SYS_getpid) };
        let changed = unsafe { libc::syscall(libc::SYS_getuid, 1, 2, 3, 4, 5, 6) };
        i32::from(own != 4711 || skipped != 42 || changed != unsafe { i64::from(libc::getpid()) })
    });
    assert_eq!(status_line(pid, "State:"), "State:\tt (tracing stop)");
    assert_eq!(status_line(pid, "TracerPid:"), format!("TracerPid:\t{}", std::process::id()));
    options(pid, libc::PTRACE_O_TRACESYSGOOD);
    let trap = libc::SIGTRAP | 0x80;
    let call_info = |size: u64| {
        let mut bytes = [0u8; 96];
        let n = ptrace(0x420e, pid, size, (&raw mut bytes) as u64);
        (n, bytes)
    };
    // getppid: the result is changed at exit.
    go(SYSCALL, pid, 0);
    assert_eq!(stop(pid), trap);
    let r = regs(pid);
    assert_eq!((r.orig_rax as i64, r.rax as i64), (libc::SYS_getppid, -i64::from(libc::ENOSYS)));
    assert_eq!((r.cs, r.ss, r.ds, r.es, r.fs, r.gs), (0x33, 0x2b, 0, 0, 0, 0));
    let (n, bytes) = call_info(96);
    assert_eq!((n, bytes[0], bytes[4..8] == 0xc000_003e_u32.to_le_bytes()), (Ok(80), 1, true));
    assert_eq!(bytes[8..16], r.rip.to_le_bytes());
    assert_eq!(bytes[24..32], (libc::SYS_getppid as u64).to_le_bytes());
    assert_eq!(message(pid), 1);
    assert_eq!(info(pid).map(|i| (i.si_signo, i.si_code)), Ok((libc::SIGTRAP, trap)));
    go(SYSCALL, pid, 0);
    assert_eq!(stop(pid), trap);
    let mut r = regs(pid);
    assert_eq!((r.orig_rax as i64, r.rax), (libc::SYS_getppid, u64::from(std::process::id())));
    assert_eq!(call_info(24).0, Ok(33));
    assert_eq!((call_info(96).1[0], message(pid)), (2, 2));
    r.rax = 4711;
    set_regs(pid, &r);
    // getpid: skipped.
    go(SYSCALL, pid, 0);
    assert_eq!(stop(pid), trap);
    let mut r = regs(pid);
    assert_eq!(r.orig_rax as i64, libc::SYS_getpid);
    r.orig_rax = u64::MAX;
    r.rax = 42;
    set_regs(pid, &r);
    go(SYSCALL, pid, 0);
    assert_eq!(stop(pid), trap);
    assert_eq!(regs(pid).rax, 42);
    // getuid: another call is made.
    go(SYSCALL, pid, 0);
    assert_eq!(stop(pid), trap);
    let r = regs(pid);
    assert_eq!([r.rdi, r.rsi, r.rdx, r.r10, r.r8, r.r9], [1, 2, 3, 4, 5, 6]);
    let at = std::mem::offset_of!(libc::user_regs_struct, orig_rax) as u64;
    assert_eq!(ptrace(libc::PTRACE_POKEUSER, pid, at, libc::SYS_getpid as u64), Ok(0));
    let mut word = 0u64;
    assert_eq!(ptrace(libc::PTRACE_PEEKUSER, pid, at, (&raw mut word) as u64), Ok(0));
    assert_eq!(word as i64, libc::SYS_getpid);
    go(SYSCALL, pid, 0);
    assert_eq!(stop(pid), trap);
    assert_eq!(regs(pid).rax, pid as u64);
    assert_eq!(finish(pid), 0);
}

fn sysemu() {
    let pid = traced(|| i32::from(unsafe { libc::syscall(libc::SYS_getpid) } != 99));
    go(libc::PTRACE_SYSEMU, pid, 0);
    assert_eq!(stop(pid), libc::SIGTRAP);
    let mut r = regs(pid);
    assert_eq!((r.orig_rax as i64, r.rax as i64), (libc::SYS_getpid, -i64::from(libc::ENOSYS)));
    r.rax = 99;
    set_regs(pid, &r);
    assert_eq!(finish(pid), 0);
}

fn signals() {
    static mut GOT: i32 = 0;
    extern "C" fn note(n: i32) {
        unsafe { GOT = GOT * 100 + n };
    }
    let pid = traced(|| {
        handle(libc::SIGUSR1, note as *const () as usize, 0);
        handle(libc::SIGUSR2, note as *const () as usize, 0);
        handle(libc::SIGWINCH, libc::SIG_IGN, 0);
        unsafe {
            libc::raise(libc::SIGUSR1); // suppressed
            libc::raise(libc::SIGUSR1); // becomes SIGUSR2
            libc::raise(libc::SIGWINCH); // ignored, but shown
            libc::raise(libc::SIGUSR1); // as it is
            i32::from(GOT != libc::SIGUSR2 * 100 + libc::SIGUSR1)
        }
    });
    go(CONT, pid, 0);
    assert_eq!(stop(pid), libc::SIGUSR1);
    let i = info(pid).expect("siginfo");
    assert_eq!((i.si_signo, i.si_code, unsafe { i.si_pid() }), (libc::SIGUSR1, libc::SI_TKILL, pid));
    go(CONT, pid, 0);
    assert_eq!(stop(pid), libc::SIGUSR1);
    go(CONT, pid, libc::SIGUSR2);
    assert_eq!(stop(pid), libc::SIGWINCH);
    go(CONT, pid, libc::SIGWINCH);
    assert_eq!(stop(pid), libc::SIGUSR1);
    assert_eq!(ptrace(CONT, pid, 0, 65), Err(libc::EIO));
    go(CONT, pid, libc::SIGUSR1);
    assert_eq!(wait_any(pid), 0);
    // A fatal signal is shown before it kills; SIGKILL is not.
    let pid = traced(|| unsafe { libc::raise(libc::SIGTERM) });
    go(CONT, pid, 0);
    assert_eq!(stop(pid), libc::SIGTERM);
    go(CONT, pid, libc::SIGTERM);
    assert_eq!(wait_any(pid), libc::SIGTERM);
    let pid = traced(|| 0);
    go(libc::PTRACE_KILL, pid, 0);
    assert_eq!(wait_any(pid), libc::SIGKILL);
}

/// xor %eax, %eax; inc %eax × 3; getpid; int3; ret
const CODE: &[u8] =
    &[0x31, 0xc0, 0xff, 0xc0, 0xff, 0xc0, 0xff, 0xc0, 0xb8, 39, 0, 0, 0, 0x0f, 0x05, 0xcc, 0x31, 0xc0, 0xc3];

fn code() -> *mut u8 {
    let page = map(4096, libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC);
    unsafe { std::ptr::copy_nonoverlapping(CODE.as_ptr(), page, CODE.len()) };
    page
}

fn step() {
    let at = code();
    let pid = traced(|| unsafe { std::mem::transmute::<*mut u8, extern "C" fn() -> i32>(at)() });
    let base = at as u64;
    let mut r = regs(pid);
    while r.rip != base {
        go(STEP, pid, 0);
        assert_eq!(stop(pid), libc::SIGTRAP);
        r = regs(pid);
    }
    for (offset, rax) in [(2, 0), (4, 1), (6, 2), (8, 3), (13, 39)] {
        go(STEP, pid, 0);
        assert_eq!(stop(pid), libc::SIGTRAP);
        let r = regs(pid);
        assert_eq!((r.rip - base, r.rax, r.eflags & 0x100), (offset, rax, 0));
        let i = info(pid).expect("siginfo");
        assert_eq!((i.si_code, unsafe { i.si_addr() } as u64), (2, r.rip));
    }
    // Over the system call at once.
    go(STEP, pid, 0);
    assert_eq!(stop(pid), libc::SIGTRAP);
    let r = regs(pid);
    assert_eq!((r.rip - base, r.rax), (15, pid as u64));
    // The breakpoint instruction, met at full speed: after it.
    go(CONT, pid, 0);
    assert_eq!(stop(pid), libc::SIGTRAP);
    let r = regs(pid);
    assert_eq!(r.rip - base, 16);
    assert_eq!(info(pid).map(|i| i.si_code), Ok(0x80));
    assert_eq!(finish(pid), 0);
}

fn step_into_handler() {
    extern "C" fn nothing(_: i32) {}
    let pid = traced(|| {
        handle(libc::SIGUSR1, nothing as *const () as usize, 0);
        unsafe { libc::raise(libc::SIGUSR1) };
        0
    });
    go(CONT, pid, 0);
    assert_eq!(stop(pid), libc::SIGUSR1);
    go(STEP, pid, libc::SIGUSR1);
    assert_eq!(stop(pid), libc::SIGTRAP);
    assert_eq!(regs(pid).rip, nothing as *const () as u64);
    assert_eq!(finish(pid), 0);
}

/// A function of its own in read-only text.
#[inline(never)]
extern "C" fn target(n: i32) -> i32 {
    std::hint::black_box(n) + 1
}

fn breakpoint_in_text() {
    let at = target as *const () as u64;
    let pid = traced(|| target(1) + target(-3));
    let old = peek(pid, at).expect("peek");
    let with = old & !0xff | 0xcc;
    assert_eq!(ptrace(libc::PTRACE_POKETEXT, pid, at, with), Ok(0));
    assert_eq!(peek(pid, at), Ok(with));
    // The tracer's own copy is untouched.
    assert_eq!(unsafe { (at as *const u64).read_unaligned() }, old);
    for argument in [1i32, -3] {
        go(CONT, pid, 0);
        assert_eq!(stop(pid), libc::SIGTRAP);
        let mut r = regs(pid);
        assert_eq!((r.rip, r.rdi as i32), (at + 1, argument));
        r.rip = at;
        set_regs(pid, &r);
        assert_eq!(ptrace(libc::PTRACE_POKETEXT, pid, at, old), Ok(0));
        go(STEP, pid, 0);
        assert_eq!(stop(pid), libc::SIGTRAP);
        assert_eq!(ptrace(libc::PTRACE_POKETEXT, pid, at, with), Ok(0));
    }
    // The same through /proc/PID/mem.
    let mem = std::fs::OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem")).expect("mem");
    std::os::unix::fs::FileExt::write_all_at(&mem, &old.to_le_bytes(), at).expect("write");
    assert_eq!(peek(pid, at), Ok(old));
    assert_eq!(peek(pid, 0x10), Err(libc::EIO));
    assert_eq!(ptrace(libc::PTRACE_POKEDATA, pid, 0x10, 1), Err(libc::EIO));
    assert_eq!(finish(pid), 0);
}

fn registers() {
    let pid = traced(|| {
        let mut x = 0f64;
        unsafe { std::arch::asm!("int3", "movsd [{}], xmm5", in(reg) &raw mut x, inout("xmm5") 2.5f64 => _) };
        i32::from(x.to_bits() != 7.25f64.to_bits())
    });
    go(CONT, pid, 0);
    assert_eq!(stop(pid), libc::SIGTRAP);
    let mut fx = [0u8; 512];
    assert_eq!(ptrace(libc::PTRACE_GETFPREGS, pid, 0, (&raw mut fx) as u64), Ok(0));
    let slot = 160 + 5 * 16;
    assert_eq!(fx[slot..slot + 8], 2.5f64.to_le_bytes());
    // The same by register set, and written through the XSAVE image.
    let mut image = vec![0u8; 16384];
    let mut vec = libc::iovec { iov_base: image.as_mut_ptr().cast(), iov_len: image.len() };
    assert_eq!(ptrace(libc::PTRACE_GETREGSET, pid, 0x202, (&raw mut vec) as u64), Ok(0));
    assert!(vec.iov_len >= 576, "{}", vec.iov_len);
    assert_eq!(image[slot..slot + 8], 2.5f64.to_le_bytes());
    assert_eq!(image[464] & 3, 3);
    image[slot..slot + 8].copy_from_slice(&7.25f64.to_le_bytes());
    assert_eq!(ptrace(libc::PTRACE_SETREGSET, pid, 0x202, (&raw mut vec) as u64), Ok(0));
    let mut words = [0u64; 40];
    let mut vec = libc::iovec { iov_base: (&raw mut words).cast(), iov_len: 320 };
    assert_eq!(ptrace(libc::PTRACE_GETREGSET, pid, 1, (&raw mut vec) as u64), Ok(0));
    assert_eq!((vec.iov_len, words[16]), (216, regs(pid).rip));
    vec.iov_len = 7;
    assert_eq!(ptrace(libc::PTRACE_GETREGSET, pid, 1, (&raw mut vec) as u64), Err(libc::EINVAL));
    assert_eq!(ptrace(libc::PTRACE_GETREGSET, pid, 0x7777, (&raw mut vec) as u64), Err(libc::EINVAL));
    let mut r = regs(pid);
    r.fs_base = 1 << 62;
    assert_eq!(ptrace(libc::PTRACE_SETREGS, pid, 0, (&raw const r) as u64), Err(libc::EIO));
    assert_eq!(ptrace(libc::PTRACE_PEEKUSER, pid, 3, (&raw mut words) as u64), Err(libc::EIO));
    assert_eq!(ptrace(libc::PTRACE_PEEKUSER, pid, 4096, (&raw mut words) as u64), Err(libc::EIO));
    assert_eq!(finish(pid), 0);
}

fn watchpoint() {
    static mut WATCHED: u64 = 0;
    let at = (&raw mut WATCHED) as u64;
    let pid = traced(|| {
        for n in 1..=2 {
            unsafe { (&raw mut WATCHED).write_volatile(n) };
        }
        target(1) + target(-3)
    });
    let debug = |n: u64| std::mem::offset_of!(libc::user, u_debugreg) as u64 + 8 * n;
    let poke = |n, value| ptrace(libc::PTRACE_POKEUSER, pid, debug(n), value);
    let read = |n| {
        let mut word = 0u64;
        assert_eq!(ptrace(libc::PTRACE_PEEKUSER, pid, debug(n), (&raw mut word) as u64), Ok(0));
        word
    };
    // Eight bytes, written.
    assert_eq!(poke(0, at), Ok(0));
    assert_eq!(poke(7, 1 | 0b1001 << 16), Ok(0));
    assert_eq!((read(0), read(7)), (at, 1 | 0b1001 << 16));
    for n in 1..=2 {
        go(CONT, pid, 0);
        assert_eq!(stop(pid), libc::SIGTRAP);
        assert_eq!((peek(pid, at), read(6) & 0xf), (Ok(n), 1));
        assert_eq!(info(pid).map(|i| i.si_code), Ok(4));
    }
    // A breakpoint on execution, met before the instruction, once each time.
    assert_eq!(poke(7, 0), Ok(0));
    assert_eq!(poke(1, target as *const () as u64), Ok(0));
    assert_eq!(poke(7, 1 << 2), Ok(0));
    for argument in [1i32, -3] {
        go(CONT, pid, 0);
        assert_eq!(stop(pid), libc::SIGTRAP);
        let r = regs(pid);
        assert_eq!((r.rip, r.rdi as i32, read(6) & 0xf), (target as *const () as u64, argument, 2));
    }
    assert_eq!((poke(4, 1), poke(0, 1 << 63)), (Err(libc::EIO), Err(libc::EINVAL)));
    assert_eq!(poke(7, 1 | 0b1101 << 16 | 1 << 2 | 0b0100 << 20), Err(libc::EINVAL));
    assert_eq!(finish(pid), 0);
}

fn fork_events() {
    let pid = traced(|| {
        let child = fork(|| 3);
        i32::from(libc::WEXITSTATUS(wait(child)) != 3)
            + unsafe {
                // vfork(2), whose child borrows this stack: nothing but _exit there.
                let child: i64;
                std::arch::asm!(
                    "syscall", "test rax, rax", "jnz 2f", "mov edi, 5", "mov eax, 60", "syscall", "2:",
                    inlateout("rax") libc::SYS_vfork => child, out("rcx") _, out("r11") _, out("rdi") _,
                );
                i32::from(libc::WEXITSTATUS(wait(child as i32)) != 5)
            }
    });
    options(pid, libc::PTRACE_O_TRACEFORK | libc::PTRACE_O_TRACEVFORK | libc::PTRACE_O_TRACEVFORKDONE);
    for (number, code) in [(1, 3), (2, 5)] {
        go(CONT, pid, 0);
        assert_eq!(stop(pid), event(number));
        let child = message(pid) as i32;
        assert_eq!(stop(child), libc::SIGSTOP);
        assert_eq!(status_line(child, "PPid:"), format!("PPid:\t{pid}"));
        go(CONT, child, 0);
        if number == 2 {
            go(CONT, pid, 0);
            assert_eq!(wait_any(child), code << 8);
            assert_eq!(stop(pid), event(5));
            assert_eq!(message(pid) as i32, child);
        } else {
            assert_eq!(wait_any(child), code << 8);
        }
        go(CONT, pid, 0);
        assert_eq!(stop(pid), libc::SIGCHLD);
    }
    assert_eq!(finish(pid), 0);
}

fn thread_events() {
    let pid = traced(|| {
        std::thread::spawn(|| unsafe { libc::syscall(libc::SYS_exit, 7) });
        // Until the other is gone for its tracer too.
        while std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count) > 1 {
            std::thread::yield_now();
        }
        0
    });
    options(pid, libc::PTRACE_O_TRACECLONE);
    go(CONT, pid, 0);
    assert_eq!(stop(pid), event(3));
    let tid = message(pid) as i32;
    assert_eq!(stop(tid), libc::SIGSTOP);
    assert_eq!(status_line(tid, "Tgid:"), format!("Tgid:\t{pid}"));
    go(CONT, tid, 0);
    assert_eq!(wait_any(tid), 7 << 8);
    assert_eq!(finish(pid), 0);
}

fn exec() {
    let run = || unsafe {
        let args = [c"/bin/true".as_ptr(), std::ptr::null()];
        libc::execv(args[0], args.as_ptr());
        1
    };
    let pid = traced(run);
    go(CONT, pid, 0);
    assert_eq!(stop(pid), libc::SIGTRAP);
    assert_eq!(info(pid).map(|i| i.si_code), Ok(libc::SI_USER));
    assert_eq!(finish(pid), 0);
    let pid = traced(run);
    options(pid, libc::PTRACE_O_TRACEEXEC | libc::PTRACE_O_TRACESYSGOOD);
    go(SYSCALL, pid, 0);
    assert_eq!(stop(pid), libc::SIGTRAP | 0x80);
    go(SYSCALL, pid, 0);
    assert_eq!(stop(pid), event(4));
    assert_eq!(message(pid) as i32, pid);
    go(SYSCALL, pid, 0);
    assert_eq!(stop(pid), libc::SIGTRAP | 0x80);
    let r = regs(pid);
    assert_eq!((r.orig_rax as i64, r.rax), (libc::SYS_execve, 0));
    assert_eq!(finish(pid), 0);
}

fn exec_by_thread() {
    let pid = traced(|| {
        std::thread::spawn(|| unsafe {
            let args = [c"/bin/true".as_ptr(), std::ptr::null()];
            libc::execv(args[0], args.as_ptr());
        });
        loop {
            unsafe { libc::pause() };
        }
    });
    options(pid, libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_TRACEEXEC);
    go(CONT, pid, 0);
    assert_eq!(stop(pid), event(3));
    let tid = message(pid) as i32;
    assert_eq!(stop(tid), libc::SIGSTOP);
    go(CONT, pid, 0);
    go(CONT, tid, 0);
    // The thread has the leader's number now.
    assert_eq!(stop(pid), event(4));
    assert_eq!(message(pid) as i32, tid);
    assert_eq!(ptrace(CONT, tid, 0, 0), Err(libc::ESRCH));
    assert_eq!(finish(pid), 0);
}

fn exit_event() {
    let pid = traced(|| 9);
    options(pid, libc::PTRACE_O_TRACEEXIT);
    go(CONT, pid, 0);
    assert_eq!(stop(pid), event(6));
    assert_eq!(message(pid), 9 << 8);
    assert_eq!(finish(pid), 9 << 8);
}

/// A set-user-ID program is its owner's only where its tracer could be the owner anyway.
fn set_id_program() {
    if unsafe { libc::geteuid() } != 0 {
        return;
    }
    let path = crate::own_path("set-id");
    std::fs::copy("/usr/bin/id", &path).expect("copied");
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o4755)).expect("set");
    let program = std::ffi::CString::new(path.as_str()).expect("a path");
    let mut told = String::new();
    for privileged in [true, false] {
        let mut pipe = [0; 2];
        assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
        let tracer = fork(|| {
            let nobody = || unsafe { libc::setresuid(65534, 65534, 65534) };
            if !privileged {
                nobody();
            }
            let pid = traced(|| unsafe {
                nobody();
                libc::dup2(pipe[1], 1);
                libc::execl(program.as_ptr(), c"id".as_ptr(), c"-u".as_ptr(), std::ptr::null::<libc::c_char>());
                1
            });
            go(CONT, pid, 0);
            assert_eq!(stop(pid), libc::SIGTRAP);
            finish(pid)
        });
        assert_eq!(wait(tracer), 0);
        unsafe { libc::close(pipe[1]) };
        let mut output: std::fs::File = unsafe { std::os::fd::FromRawFd::from_raw_fd(pipe[0]) };
        std::io::Read::read_to_string(&mut output, &mut told).expect("read");
    }
    let _ = std::fs::remove_file(&path);
    assert_eq!(told, "0\n65534\n");
}

/// Waits until `pid` is in the state.
fn until_state(pid: i32, letter: &str) {
    while !status_line(pid, "State:").contains(letter) {
        std::thread::yield_now();
    }
}

/// A child that sleeps.
pub(crate) fn sleeper() -> i32 {
    let pid = fork(|| {
        loop {
            unsafe { libc::pause() };
        }
    });
    until_state(pid, "S (");
    pid
}

fn attach_detach() {
    let pid = sleeper();
    go(libc::PTRACE_ATTACH, pid, 0);
    assert_eq!(stop(pid), libc::SIGSTOP);
    assert_eq!(ptrace(libc::PTRACE_ATTACH, pid, 0, 0), Err(libc::EPERM));
    let r = regs(pid);
    assert_eq!((r.orig_rax as i64, r.rax as i64), (libc::SYS_pause, -514));
    let blocked = std::fs::read_to_string(format!("/proc/{pid}/syscall")).expect("readable");
    let words: Vec<&str> = blocked.split_whitespace().collect();
    assert_eq!((words.len(), words[0]), (9, "34"));
    assert_eq!((words[7], words[8]), (&*format!("{:#x}", r.rsp), &*format!("{:#x}", r.rip)));
    go(libc::PTRACE_DETACH, pid, 0);
    assert_eq!(status_line(pid, "TracerPid:"), "TracerPid:\t0");
    assert_eq!(ptrace(CONT, pid, 0, 0), Err(libc::ESRCH));
    // With a signal at the end.
    go(libc::PTRACE_ATTACH, pid, 0);
    assert_eq!(stop(pid), libc::SIGSTOP);
    go(libc::PTRACE_DETACH, pid, libc::SIGTERM);
    assert_eq!(wait_any(pid), libc::SIGTERM);
}

fn attach_stopped() {
    let pid = sleeper();
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    let mut status = 0;
    assert_eq!(ok(unsafe { libc::waitpid(pid, &raw mut status, libc::WUNTRACED) }), Ok(pid.into()));
    go(libc::PTRACE_ATTACH, pid, 0);
    assert_eq!(stop(pid), libc::SIGSTOP);
    assert!(info(pid).is_err_and(|e| e == libc::EINVAL));
    // The SIGSTOP of PTRACE_ATTACH is yet to come.
    go(CONT, pid, 0);
    assert_eq!(stop(pid), libc::SIGSTOP);
    assert_eq!(info(pid).map(|i| i.si_signo), Ok(libc::SIGSTOP));
    // The group is still stopped: so is the task without a tracer.
    go(libc::PTRACE_DETACH, pid, 0);
    until_state(pid, "T (");
    unsafe { libc::kill(pid, libc::SIGCONT) };
    until_state(pid, "S (");
    unsafe { libc::kill(pid, libc::SIGKILL) };
    assert_eq!(wait_any(pid), libc::SIGKILL);
}

fn seize() {
    let pid = sleeper();
    assert_eq!(ptrace(libc::PTRACE_SEIZE, pid, 1, 0), Err(libc::EIO));
    assert_eq!(ptrace(libc::PTRACE_SEIZE, pid, 0, libc::PTRACE_O_TRACESYSGOOD as u64), Ok(0));
    assert_eq!(ptrace(CONT, pid, 0, 0), Err(libc::ESRCH));
    go(libc::PTRACE_INTERRUPT, pid, 0);
    assert_eq!(stop(pid), event(128));
    assert_eq!(info(pid).map(|i| i.si_code), Ok(event(128)));
    assert_eq!(ptrace(libc::PTRACE_LISTEN, pid, 0, 0), Ok(0));
    assert_eq!(ptrace(CONT, pid, 0, 0), Err(libc::ESRCH));
    go(libc::PTRACE_INTERRUPT, pid, 0);
    assert_eq!(stop(pid), event(128));
    go(SYSCALL, pid, 0);
    // pause(2) begins again.
    assert_eq!(stop(pid), libc::SIGTRAP | 0x80);
    assert_eq!(regs(pid).orig_rax as i64, libc::SYS_pause);
    assert_eq!(ptrace(libc::PTRACE_LISTEN, pid, 0, 0), Err(libc::EIO));
    go(libc::PTRACE_DETACH, pid, 0);
    unsafe { libc::kill(pid, libc::SIGKILL) };
    assert_eq!(wait_any(pid), libc::SIGKILL);
}

fn listen() {
    let pid = sleeper();
    assert_eq!(ptrace(libc::PTRACE_SEIZE, pid, 0, 0), Ok(0));
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    assert_eq!(stop(pid), libc::SIGSTOP);
    go(CONT, pid, libc::SIGSTOP);
    // The group stop, as a stop of a seized task.
    assert_eq!(stop(pid), libc::SIGSTOP | 128 << 8);
    go(libc::PTRACE_LISTEN, pid, 0);
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) }, 0);
    unsafe { libc::kill(pid, libc::SIGCONT) };
    assert_eq!(stop(pid), event(128));
    go(CONT, pid, 0);
    assert_eq!(stop(pid), libc::SIGCONT);
    go(CONT, pid, 0);
    unsafe { libc::kill(pid, libc::SIGKILL) };
    assert_eq!(wait_any(pid), libc::SIGKILL);
}

fn tracer_dies() {
    for kill in [false, true] {
        let pid = sleeper();
        let tracer = fork(|| {
            let flags = if kill { libc::PTRACE_O_EXITKILL } else { 0 };
            i32::from(ptrace(libc::PTRACE_SEIZE, pid, 0, flags as u64) != Ok(0))
        });
        assert_eq!(wait(tracer), 0);
        if kill {
            assert_eq!(wait_any(pid), libc::SIGKILL);
        } else {
            assert_eq!(status_line(pid, "TracerPid:"), "TracerPid:\t0");
            unsafe { libc::kill(pid, libc::SIGTERM) };
            assert_eq!(wait_any(pid), libc::SIGTERM);
        }
    }
}

/// A child that another process traces: its death is the tracer's first, then the parent's.
fn zombies() {
    let pid = sleeper();
    let mut pipes = [[0; 2]; 2];
    for p in &mut pipes {
        assert_eq!(unsafe { libc::pipe(p.as_mut_ptr()) }, 0);
    }
    let [ready, told] = pipes;
    let mut byte = 0u8;
    let tracer = fork(|| {
        let mut byte = 0u8;
        go(libc::PTRACE_SEIZE, pid, 0);
        unsafe { libc::write(ready[1], (&raw const byte).cast(), 1) };
        let signal = stop(pid);
        go(CONT, pid, signal);
        // It is a zombie before it is waited for.
        until_state(pid, "Z (");
        unsafe {
            libc::write(ready[1], (&raw const byte).cast(), 1);
            libc::read(told[0], (&raw mut byte).cast(), 1);
        }
        i32::from(signal != libc::SIGTERM || wait_any(pid) != libc::SIGTERM)
    });
    unsafe {
        libc::read(ready[0], (&raw mut byte).cast(), 1);
        libc::kill(pid, libc::SIGTERM);
        libc::read(ready[0], (&raw mut byte).cast(), 1);
        assert_eq!(libc::waitpid(pid, null_mut(), libc::WNOHANG), 0);
        libc::write(told[1], (&raw const byte).cast(), 1);
    }
    assert_eq!(wait(pid), libc::SIGTERM);
    assert_eq!(wait(tracer), 0);
}

fn restart() {
    extern "C" fn nothing(_: i32) {}
    let mut pipe = [0; 2];
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    let pid = traced(|| {
        handle(libc::SIGUSR1, nothing as *const () as usize, 0);
        let mut byte = 0u8;
        // Goes on after a suppressed signal, ends with EINTR after a delivered one.
        let first = unsafe { libc::read(pipe[0], (&raw mut byte).cast(), 1) };
        let second = unsafe { libc::read(pipe[0], (&raw mut byte).cast(), 1) };
        i32::from(first != 1 || second != -1 || errno() != libc::EINTR)
    });
    go(CONT, pid, 0);
    until_state(pid, "S (");
    unsafe { libc::kill(pid, libc::SIGUSR1) };
    assert_eq!(stop(pid), libc::SIGUSR1);
    let r = regs(pid);
    assert_eq!((r.orig_rax as i64, r.rax as i64), (libc::SYS_read, -512));
    go(CONT, pid, 0);
    assert_eq!(unsafe { libc::write(pipe[1], [1u8].as_ptr().cast(), 1) }, 1);
    let mut left = 1;
    while left != 0 {
        std::thread::yield_now();
        assert_eq!(unsafe { libc::ioctl(pipe[0], libc::FIONREAD, &raw mut left) }, 0);
    }
    until_state(pid, "S (");
    unsafe { libc::kill(pid, libc::SIGUSR1) };
    assert_eq!(stop(pid), libc::SIGUSR1);
    go(CONT, pid, libc::SIGUSR1);
    assert_eq!(wait_any(pid), 0);
}

fn refusals() {
    let own = unsafe { libc::getpid() };
    assert_eq!(ptrace(libc::PTRACE_ATTACH, own, 0, 0), Err(libc::EPERM));
    assert_eq!(ptrace(libc::PTRACE_ATTACH, 0x3f_fff0, 0, 0), Err(libc::ESRCH));
    assert_eq!(ptrace(CONT, own, 0, 0), Err(libc::ESRCH));
    let pid = traced(|| 0);
    assert_eq!(ptrace(libc::PTRACE_SETOPTIONS, pid, 0, 1 << 12), Err(libc::EINVAL));
    assert_eq!(ptrace(0x9999, pid, 0, 0), Err(libc::EIO));
    assert_eq!(ptrace(libc::PTRACE_INTERRUPT, pid, 0, 0), Err(libc::EIO));
    assert_eq!(ptrace(libc::PTRACE_LISTEN, pid, 0, 0), Err(libc::EIO));
    assert_eq!(ptrace(libc::PTRACE_DETACH, pid, 0, 100), Err(libc::EIO));
    assert_eq!(ptrace(libc::PTRACE_GETREGS, pid, 0, 8), Err(libc::EFAULT));
    assert_eq!(ptrace(libc::PTRACE_GETSIGMASK, pid, 4, 0), Err(libc::EINVAL));
    assert_eq!(finish(pid), 0);
    // A task without privileges may not trace root's.
    if unsafe { libc::geteuid() } == 0 {
        let pid = sleeper();
        let other = fork(|| {
            unsafe { libc::setresuid(65534, 65534, 65534) };
            i32::from(ptrace(libc::PTRACE_ATTACH, pid, 0, 0) != Err(libc::EPERM))
        });
        assert_eq!(wait(other), 0);
        unsafe { libc::kill(pid, libc::SIGKILL) };
        wait_any(pid);
    }
}

fn pending_signals() {
    let pid = traced(|| {
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        unsafe {
            libc::sigaddset(&raw mut set, libc::SIGUSR1);
            libc::sigprocmask(libc::SIG_BLOCK, &raw const set, null_mut());
            libc::raise(libc::SIGUSR1);
            libc::kill(libc::getpid(), libc::SIGUSR1);
            libc::raise(libc::SIGSTOP);
        }
        0
    });
    go(CONT, pid, 0);
    assert_eq!(stop(pid), libc::SIGSTOP);
    for shared in [0u32, 1] {
        let args = [0u64, u64::from(shared) | 8 << 32];
        let mut infos: [libc::siginfo_t; 8] = unsafe { std::mem::zeroed() };
        let n = ptrace(0x4209, pid, (&raw const args) as u64, (&raw mut infos) as u64);
        assert_eq!((n, infos[0].si_signo), (Ok(1), libc::SIGUSR1));
        let code = if shared == 1 { libc::SI_USER } else { libc::SI_TKILL };
        assert_eq!(infos[0].si_code, code);
    }
    let mut mask = 0u64;
    assert_eq!(ptrace(libc::PTRACE_GETSIGMASK, pid, 8, (&raw mut mask) as u64), Ok(0));
    assert_eq!(mask, 1 << (libc::SIGUSR1 - 1));
    mask = 0;
    assert_eq!(ptrace(libc::PTRACE_SETSIGMASK, pid, 8, (&raw mut mask) as u64), Ok(0));
    // Both are delivered now.
    go(CONT, pid, 0);
    assert_eq!(stop(pid), libc::SIGUSR1);
    go(CONT, pid, 0);
    assert_eq!(stop(pid), libc::SIGUSR1);
    assert_eq!(finish(pid), 0);
}
