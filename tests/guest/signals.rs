//! Signals: handlers, masks, stacks, restart, faults, timers.
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::Case;
use super::sys::{call, errno, fork, handle, in_child, killed_by, map, ok, wait};

pub const CASES: &[Case] = &[
    ("signal_handler", handler),
    ("signal_10000", ten_thousand),
    ("signal_mask_pending", mask),
    ("signal_altstack", altstack),
    ("signal_restart", restart),
    ("signal_eintr", eintr),
    ("signal_sigsuspend", sigsuspend),
    ("signal_sigtimedwait", sigtimedwait),
    ("signal_realtime_queue", realtime),
    ("signal_nodefer_resethand", flags),
    ("signal_sigchld", sigchld),
    ("signal_ignored_sigchld_reaps", sigchld_ignored),
    ("signal_stop_continue", stop_continue),
    ("signal_kill_thread_spinning", kill_spinning),
    ("fault_codes", fault_codes),
    ("fault_in_handler_kills", fault_in_handler),
    ("signal_errors", errors),
    ("sigreturn_edits_registers", edits),
    ("sigpipe", sigpipe),
    ("alarm_interrupts", alarm),
    ("itimer_repeats", itimer),
    ("posix_timer", posix_timer),
    ("signalfd", signalfd),
    ("default_actions", defaults),
];

static COUNT: AtomicUsize = AtomicUsize::new(0);
static LAST: AtomicI32 = AtomicI32::new(0);
static CODE: AtomicI32 = AtomicI32::new(0);
static VALUE: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count(signal: i32) {
    COUNT.fetch_add(1, Ordering::SeqCst);
    LAST.store(signal, Ordering::SeqCst);
}

extern "C" fn record(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    COUNT.fetch_add(1, Ordering::SeqCst);
    LAST.store(signal, Ordering::SeqCst);
    unsafe {
        CODE.store((*info).si_code, Ordering::SeqCst);
        VALUE.store((*info).si_value().sival_ptr as usize, Ordering::SeqCst);
    }
}

fn on(signal: i32, flags: i32) {
    handle(signal, count as *const () as usize, flags);
}

fn handler() {
    on(libc::SIGUSR1, 0);
    for i in 1..=10 {
        assert_eq!(unsafe { libc::raise(libc::SIGUSR1) }, 0);
        assert_eq!(COUNT.load(Ordering::SeqCst), i);
    }
    handle(libc::SIGUSR2, record as *const () as usize, libc::SA_SIGINFO);
    unsafe { libc::kill(libc::getpid(), libc::SIGUSR2) };
    assert_eq!((LAST.load(Ordering::SeqCst), CODE.load(Ordering::SeqCst)), (libc::SIGUSR2, 0));
}

fn ten_thousand() {
    on(libc::SIGUSR1, 0);
    for _ in 0..10_000 {
        unsafe { libc::raise(libc::SIGUSR1) };
    }
    assert_eq!(COUNT.load(Ordering::SeqCst), 10_000);
}

fn set(signals: &[i32]) -> libc::sigset_t {
    let mut s: libc::sigset_t = unsafe { std::mem::zeroed() };
    for &n in signals {
        unsafe { libc::sigaddset(&raw mut s, n) };
    }
    s
}

fn mask() {
    on(libc::SIGUSR1, 0);
    let block = set(&[libc::SIGUSR1, libc::SIGKILL, libc::SIGSTOP]);
    unsafe {
        libc::sigprocmask(libc::SIG_BLOCK, &raw const block, std::ptr::null_mut());
        libc::raise(libc::SIGUSR1);
        libc::raise(libc::SIGUSR1);
        assert_eq!(COUNT.load(Ordering::SeqCst), 0);
        let mut pending = set(&[]);
        libc::sigpending(&raw mut pending);
        assert_eq!(libc::sigismember(&raw const pending, libc::SIGUSR1), 1);
        let mut old = set(&[]);
        libc::sigprocmask(libc::SIG_UNBLOCK, &raw const block, &raw mut old);
        assert_eq!(libc::sigismember(&raw const old, libc::SIGKILL), 0);
    }
    assert_eq!(COUNT.load(Ordering::SeqCst), 1);
}

static SP: AtomicUsize = AtomicUsize::new(0);

extern "C" fn note_sp(_: i32) {
    let here = 0_u8;
    SP.store(std::ptr::from_ref(&here) as usize, Ordering::SeqCst);
}

fn altstack() {
    let size = 64 << 10;
    let base = map(size, 3);
    let stack = libc::stack_t { ss_sp: base.cast(), ss_flags: 0, ss_size: size };
    assert_eq!(unsafe { libc::sigaltstack(&raw const stack, std::ptr::null_mut()) }, 0);
    handle(libc::SIGUSR1, note_sp as *const () as usize, libc::SA_ONSTACK);
    unsafe { libc::raise(libc::SIGUSR1) };
    let sp = SP.load(Ordering::SeqCst);
    assert!((base as usize..base as usize + size).contains(&sp));
    let small = libc::stack_t { ss_sp: base.cast(), ss_flags: 0, ss_size: 1000 };
    assert_eq!(ok(unsafe { libc::sigaltstack(&raw const small, std::ptr::null_mut()) }), Err(libc::ENOMEM));
    // A stack overflow is survivable on the alternate stack.
    killed_by(libc::SIGSEGV, || {
        extern "C" fn die(_: i32) {
            unsafe {
                libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                libc::raise(libc::SIGSEGV);
                libc::_exit(1);
            }
        }
        #[allow(unconditional_recursion)] // it ends by overflowing the stack
        fn forever(n: u64) -> u64 {
            let b = std::hint::black_box([n; 100]);
            forever(n + 1) + b[(n % 100) as usize]
        }
        let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
        unsafe { libc::setrlimit(libc::RLIMIT_STACK, &raw const limit) };
        handle(libc::SIGSEGV, die as *const () as usize, libc::SA_ONSTACK | libc::SA_NODEFER);
        forever(0);
    });
}

fn later(signal: i32) -> thread::JoinHandle<()> {
    let target = unsafe { libc::pthread_self() } as usize;
    thread::spawn(move || {
        thread::sleep(Duration::from_millis(30));
        unsafe { libc::pthread_kill(target as libc::pthread_t, signal) };
        thread::sleep(Duration::from_millis(30));
    })
}

fn restart() {
    on(libc::SIGUSR1, libc::SA_RESTART);
    let mut fds = [0; 2];
    unsafe { libc::pipe(fds.as_mut_ptr()) };
    let sender = later(libc::SIGUSR1);
    let writer = thread::spawn(move || {
        thread::sleep(Duration::from_millis(100));
        unsafe { libc::write(fds[1], b"y".as_ptr().cast(), 1) };
    });
    let mut byte = [0_u8];
    assert_eq!(unsafe { libc::read(fds[0], byte.as_mut_ptr().cast(), 1) }, 1, "{}", errno());
    assert_eq!(COUNT.load(Ordering::SeqCst), 1);
    sender.join().unwrap();
    writer.join().unwrap();
}

fn eintr() {
    on(libc::SIGUSR1, 0);
    let mut fds = [0; 2];
    unsafe { libc::pipe(fds.as_mut_ptr()) };
    let sender = later(libc::SIGUSR1);
    let mut byte = [0_u8];
    assert_eq!(ok(unsafe { libc::read(fds[0], byte.as_mut_ptr().cast(), 1) } as i64), Err(libc::EINTR));
    sender.join().unwrap();
    let sender = later(libc::SIGUSR1);
    let long = libc::timespec { tv_sec: 10, tv_nsec: 0 };
    let mut left: libc::timespec = unsafe { std::mem::zeroed() };
    assert_eq!(ok(unsafe { libc::nanosleep(&raw const long, &raw mut left) }), Err(libc::EINTR));
    assert_eq!(left.tv_sec, 9);
    sender.join().unwrap();
    let sender = later(libc::SIGUSR1);
    let mut poll = libc::pollfd { fd: fds[0], events: libc::POLLIN, revents: 0 };
    assert_eq!(ok(unsafe { libc::poll(&raw mut poll, 1, 10_000) }), Err(libc::EINTR));
    sender.join().unwrap();
}

fn sigsuspend() {
    on(libc::SIGUSR1, 0);
    let block = set(&[libc::SIGUSR1]);
    unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const block, std::ptr::null_mut()) };
    let sender = later(libc::SIGUSR1);
    let none = set(&[]);
    assert_eq!(ok(unsafe { libc::sigsuspend(&raw const none) }), Err(libc::EINTR));
    assert_eq!(COUNT.load(Ordering::SeqCst), 1);
    sender.join().unwrap();
    unsafe { libc::raise(libc::SIGUSR1) };
    assert_eq!(COUNT.load(Ordering::SeqCst), 1, "the mask is back");
}

fn sigtimedwait() {
    let block = set(&[libc::SIGUSR1]);
    unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const block, std::ptr::null_mut()) };
    let short = libc::timespec { tv_sec: 0, tv_nsec: 10_000_000 };
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    assert_eq!(ok(unsafe { libc::sigtimedwait(&raw const block, &raw mut info, &raw const short) }), Err(libc::EAGAIN));
    let sender = later(libc::SIGUSR1);
    assert_eq!(unsafe { libc::sigwaitinfo(&raw const block, &raw mut info) }, libc::SIGUSR1);
    assert_eq!(info.si_code, 0, "libc reports SI_TKILL as SI_USER here");
    sender.join().unwrap();
}

fn realtime() {
    let signal = libc::SIGRTMIN() + 1;
    handle(signal, record as *const () as usize, libc::SA_SIGINFO);
    let block = set(&[signal]);
    unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const block, std::ptr::null_mut()) };
    for i in 1..=20_usize {
        let value = libc::sigval { sival_ptr: i as *mut _ };
        assert_eq!(unsafe { libc::sigqueue(libc::getpid(), signal, value) }, 0);
    }
    unsafe { libc::sigprocmask(libc::SIG_UNBLOCK, &raw const block, std::ptr::null_mut()) };
    assert_eq!(COUNT.load(Ordering::SeqCst), 20);
    assert_eq!(CODE.load(Ordering::SeqCst), libc::SI_QUEUE);
    assert_eq!(VALUE.load(Ordering::SeqCst), 20, "in the order they were queued");
}

static DEPTH: AtomicUsize = AtomicUsize::new(0);

extern "C" fn nest(signal: i32) {
    if DEPTH.fetch_add(1, Ordering::SeqCst) < 3 {
        unsafe { libc::raise(signal) };
    }
}

fn flags() {
    handle(libc::SIGUSR1, nest as *const () as usize, libc::SA_NODEFER);
    unsafe { libc::raise(libc::SIGUSR1) };
    assert_eq!(DEPTH.load(Ordering::SeqCst), 4);
    handle(libc::SIGUSR2, count as *const () as usize, libc::SA_RESETHAND);
    unsafe { libc::raise(libc::SIGUSR2) };
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    unsafe { libc::sigaction(libc::SIGUSR2, std::ptr::null(), &raw mut action) };
    assert_eq!(action.sa_sigaction, libc::SIG_DFL);
}

fn sigchld() {
    handle(libc::SIGCHLD, record as *const () as usize, libc::SA_SIGINFO | libc::SA_RESTART);
    let pid = fork(|| 3);
    assert_eq!(libc::WEXITSTATUS(wait(pid)), 3);
    assert_eq!((COUNT.load(Ordering::SeqCst), CODE.load(Ordering::SeqCst)), (1, libc::CLD_EXITED));
    let pid = fork(|| {
        unsafe { libc::raise(libc::SIGTERM) };
        0
    });
    wait(pid);
    assert_eq!((COUNT.load(Ordering::SeqCst), CODE.load(Ordering::SeqCst)), (2, libc::CLD_KILLED));
}

fn sigchld_ignored() {
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    let pid = fork(|| 3);
    let mut status = 0;
    assert_eq!(ok(unsafe { libc::waitpid(pid, &raw mut status, 0) }), Err(libc::ECHILD));
}

fn stop_continue() {
    let pid = fork(|| {
        loop {
            thread::sleep(Duration::from_millis(5));
        }
    });
    let mut status = 0;
    unsafe {
        libc::kill(pid, libc::SIGSTOP);
        assert_eq!(libc::waitpid(pid, &raw mut status, libc::WUNTRACED), pid);
        assert!(libc::WIFSTOPPED(status) && libc::WSTOPSIG(status) == libc::SIGSTOP);
        libc::kill(pid, libc::SIGCONT);
        assert_eq!(libc::waitpid(pid, &raw mut status, libc::WCONTINUED), pid);
        assert!(libc::WIFCONTINUED(status));
        libc::kill(pid, libc::SIGSTOP);
        libc::kill(pid, libc::SIGKILL);
    }
    assert_eq!(libc::WTERMSIG(wait(pid)), libc::SIGKILL);
}

fn kill_spinning() {
    let pid = fork(|| {
        loop {
            std::hint::spin_loop();
        }
    });
    thread::sleep(Duration::from_millis(20));
    unsafe { libc::kill(pid, libc::SIGTERM) };
    assert_eq!(libc::WTERMSIG(wait(pid)), libc::SIGTERM);
}

extern "C" fn report_fault(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    unsafe {
        let greg = &(*context).uc_mcontext.gregs;
        let same_ip = (*info).si_addr() as i64 == greg[libc::REG_RIP as usize];
        println!(
            "signal {signal} code {} addr_is_rip {same_ip} trap {}",
            (*info).si_code,
            greg[libc::REG_TRAPNO as usize]
        );
        libc::_exit(signal);
    }
}

fn fault_codes() {
    use std::arch::asm;
    let cases: &[(&str, fn())] = &[
        ("ud2", || unsafe { asm!("ud2") }),
        ("int3", || unsafe { asm!("int3") }),
        ("div0", || unsafe {
            asm!("xor ecx, ecx", "xor edx, edx", "div ecx", out("eax") _, out("ecx") _, out("edx") _);
        }),
        ("hlt", || unsafe { asm!("hlt") }),
        ("cli", || unsafe { asm!("cli") }),
        ("in", || unsafe { asm!("in al, dx", out("al") _, in("dx") 0x60_u16) }),
        ("out", || unsafe { asm!("out 0x80, al") }),
        ("rdmsr", || unsafe { asm!("rdmsr", out("eax") _, out("edx") _) }),
        ("mov_cr3", || unsafe { asm!("mov rax, cr3", out("rax") _) }),
        ("lgdt", || unsafe { asm!("lgdt [rsp]") }),
        ("int_0x20", || unsafe { asm!("int 0x20") }),
        ("int_0xff", || unsafe { asm!("int 0xff") }),
        ("null", || unsafe { asm!("mov al, [rax]", inout("rax") 0_u64 => _) }),
        ("non_canonical", || unsafe { asm!("mov al, [rax]", inout("rax") 0x8000_0000_0000_0000_u64 => _) }),
        ("kernel_address", || unsafe { asm!("mov al, [rax]", inout("rax") 0xffff_ffff_8000_0000_u64 => _) }),
        ("jump_null", || unsafe { asm!("jmp rax", in("rax") 0_u64) }),
        ("jump_non_canonical", || unsafe { asm!("jmp rax", in("rax") 0x1234_0000_0000_0000_u64) }),
    ];
    for (name, case) in cases {
        let status = wait(fork(|| {
            for signal in [libc::SIGILL, libc::SIGTRAP, libc::SIGFPE, libc::SIGSEGV, libc::SIGBUS] {
                handle(signal, report_fault as *const () as usize, libc::SA_SIGINFO);
            }
            case();
            0
        }));
        println!("{name}: {status:#x}");
    }
}

fn fault_in_handler() {
    extern "C" fn bad(_: i32) {
        unsafe { (8 as *mut u8).write_volatile(1) };
    }
    killed_by(libc::SIGSEGV, || {
        handle(libc::SIGSEGV, bad as *const () as usize, 0);
        unsafe { (8 as *mut u8).write_volatile(1) };
    });
    killed_by(libc::SIGSEGV, || unsafe {
        // A handler whose stack is gone.
        libc::signal(libc::SIGSEGV, libc::SIG_DFL);
        on(libc::SIGUSR1, 0);
        std::arch::asm!(
            "mov rsp, 8",
            "mov eax, 39",
            "syscall",
            "mov edi, eax",
            "mov esi, 10",
            "mov eax, 62",
            "syscall",
            "ud2",
            options(noreturn)
        );
    });
}

fn errors() {
    let me = unsafe { libc::getpid() };
    assert_eq!(ok(unsafe { libc::kill(me, 65) }), Err(libc::EINVAL));
    assert_eq!(ok(unsafe { libc::kill(me, -1) }), Err(libc::EINVAL));
    assert_eq!(ok(unsafe { libc::kill(0x3fff_ffff, 0) }), Err(libc::ESRCH));
    assert_eq!(ok(unsafe { libc::kill(me, 0) }), Ok(0));
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = count as *const () as usize;
    for signal in [libc::SIGKILL, libc::SIGSTOP, 0, 65] {
        assert_eq!(ok(unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) }), Err(libc::EINVAL));
    }
    assert_eq!(call(libc::SYS_rt_sigprocmask, [0, 0, 0, 4, 0, 0]), Err(libc::EINVAL));
    assert_eq!(call(libc::SYS_tgkill, [me as u64, 0x3fff_ffff, 0, 0, 0, 0]), Err(libc::ESRCH));
    assert_eq!(call(libc::SYS_tgkill, [0, me as u64, 0, 0, 0, 0]), Err(libc::EINVAL));
}

extern "C" fn edit(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    unsafe {
        (*context).uc_mcontext.gregs[libc::REG_RBX as usize] = 0x1234_5678;
        (*context).uc_mcontext.gregs[libc::REG_RIP as usize] += 2; // past ud2
    }
}

fn edits() {
    handle(libc::SIGILL, edit as *const () as usize, libc::SA_SIGINFO);
    let got: u64;
    unsafe {
        std::arch::asm!("push rbx", "xor ebx, ebx", "ud2", "mov {got}, rbx", "pop rbx", got = out(reg) got);
    }
    assert_eq!(got, 0x1234_5678);
}

fn sigpipe() {
    let mut fds = [0; 2];
    unsafe { libc::pipe(fds.as_mut_ptr()) };
    unsafe { libc::close(fds[0]) };
    killed_by(libc::SIGPIPE, || unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::write(fds[1], b"x".as_ptr().cast(), 1);
    });
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    assert_eq!(ok(unsafe { libc::write(fds[1], b"x".as_ptr().cast(), 1) } as i64), Err(libc::EPIPE));
}

fn alarm() {
    on(libc::SIGALRM, 0);
    unsafe { libc::alarm(1) };
    let start = Instant::now();
    unsafe { libc::pause() };
    assert!(start.elapsed() >= Duration::from_millis(990));
    assert_eq!(LAST.load(Ordering::SeqCst), libc::SIGALRM);
}

fn itimer() {
    on(libc::SIGALRM, libc::SA_RESTART);
    let tick = libc::timeval { tv_sec: 0, tv_usec: 10_000 };
    let timer = libc::itimerval { it_interval: tick, it_value: tick };
    assert_eq!(unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) }, 0);
    let start = Instant::now();
    while COUNT.load(Ordering::SeqCst) < 10 {
        std::hint::spin_loop();
        assert!(start.elapsed() < Duration::from_secs(30));
    }
    assert!(start.elapsed() >= Duration::from_millis(95));
    on(libc::SIGVTALRM, libc::SA_RESTART);
    COUNT.store(0, Ordering::SeqCst);
    let off: libc::itimerval = unsafe { std::mem::zeroed() };
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const off, std::ptr::null_mut()) };
    unsafe { libc::setitimer(libc::ITIMER_VIRTUAL, &raw const timer, std::ptr::null_mut()) };
    COUNT.store(0, Ordering::SeqCst);
    while COUNT.load(Ordering::SeqCst) < 5 {
        std::hint::spin_loop();
        assert!(start.elapsed() < Duration::from_secs(60));
    }
}

fn posix_timer() {
    let signal = libc::SIGRTMIN();
    handle(signal, record as *const () as usize, libc::SA_SIGINFO);
    unsafe {
        let mut event: libc::sigevent = std::mem::zeroed();
        event.sigev_notify = libc::SIGEV_SIGNAL;
        event.sigev_signo = signal;
        event.sigev_value = libc::sigval { sival_ptr: 0x77 as *mut _ };
        let mut timer: libc::timer_t = std::mem::zeroed();
        assert_eq!(libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer), 0);
        let tick = libc::timespec { tv_sec: 0, tv_nsec: 5_000_000 };
        let spec = libc::itimerspec { it_interval: tick, it_value: tick };
        assert_eq!(libc::timer_settime(timer, 0, &raw const spec, std::ptr::null_mut()), 0);
        while COUNT.load(Ordering::SeqCst) < 3 {
            libc::usleep(1000);
        }
        assert_eq!((CODE.load(Ordering::SeqCst), VALUE.load(Ordering::SeqCst)), (libc::SI_TIMER, 0x77));
        assert_eq!(libc::timer_delete(timer), 0);
        assert_eq!(ok(libc::timer_delete(timer)), Err(libc::EINVAL));
    }
}

fn signalfd() {
    let block = set(&[libc::SIGUSR1]);
    unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const block, std::ptr::null_mut()) };
    let fd = unsafe { libc::signalfd(-1, &raw const block, libc::SFD_NONBLOCK) };
    let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
    let size = std::mem::size_of_val(&info);
    assert_eq!(ok(unsafe { libc::read(fd, (&raw mut info).cast(), size) } as i64), Err(libc::EAGAIN));
    unsafe { libc::kill(libc::getpid(), libc::SIGUSR1) };
    assert_eq!(unsafe { libc::read(fd, (&raw mut info).cast(), size) }, size as isize);
    assert_eq!(info.ssi_signo, libc::SIGUSR1 as u32);
    assert_eq!(info.ssi_pid, unsafe { libc::getpid() } as u32);
}

fn defaults() {
    for signal in 1..=31 {
        let ignored = [libc::SIGCHLD, libc::SIGURG, libc::SIGWINCH, libc::SIGCONT].contains(&signal);
        let stops = [libc::SIGSTOP, libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU].contains(&signal);
        if stops {
            continue;
        }
        let status = wait(fork(|| unsafe {
            super::sys::no_core();
            libc::signal(signal, libc::SIG_DFL);
            libc::kill(libc::getpid(), signal);
            0
        }));
        if ignored {
            assert_eq!(status, 0, "signal {signal}");
        } else {
            assert_eq!(libc::WTERMSIG(status), signal, "signal {signal}");
        }
    }
    in_child(|| ());
}
