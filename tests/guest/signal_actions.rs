//! What signals do: SA_* flags, restarts, alternate stacks, stopping and going on, what parents are told.
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::Case;
use super::sys::{call, errno, fork, handle, in_child, map, ok, wait};

pub const CASES: &[Case] = &[
    ("sigaction_flags_kept", flags_kept),
    ("sigaction_mask_during_handler", mask_during),
    ("sa_restart_by_call", restarts),
    ("sa_restart_not_for_these", never_restarts),
    ("stop_does_not_end_waits", stop_in_waits),
    ("restart_syscall_alone", restart_syscall),
    ("sigaltstack_rules", altstack_rules),
    ("sigaltstack_autodisarm", autodisarm),
    ("stop_of_many_threads", stop_threads),
    ("sigchld_of_stops", sigchld_of_stops),
    ("sa_nocldstop_nocldwait", nocld),
    ("sigttin_ends_every_read", background_reads),
    ("orphaned_process_group", orphaned),
    ("wait_status_of_core_signals", core_signals),
    ("sigsuspend_and_pselect_masks", temporary_masks),
];

static COUNT: AtomicUsize = AtomicUsize::new(0);
static CODE: AtomicI32 = AtomicI32::new(0);
static STATUS: AtomicI32 = AtomicI32::new(0);
static WORD: AtomicU64 = AtomicU64::new(0);

extern "C" fn count(_: i32) {
    COUNT.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn child_news(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    CODE.store(unsafe { (*info).si_code }, Ordering::SeqCst);
    STATUS.store(unsafe { (*info).si_status() }, Ordering::SeqCst);
    COUNT.fetch_add(1, Ordering::SeqCst);
}

fn set_of(signals: &[i32]) -> libc::sigset_t {
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    unsafe { libc::sigemptyset(&raw mut set) };
    for &s in signals {
        unsafe { libc::sigaddset(&raw mut set, s) };
    }
    set
}

fn mask(how: i32, signals: &[i32]) {
    let set = set_of(signals);
    assert_eq!(unsafe { libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut()) }, 0);
}

fn blocked(signal: i32) -> bool {
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut set) };
    unsafe { libc::sigismember(&raw const set, signal) == 1 }
}

/// struct sigaction of the kernel.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Action {
    handler: u64,
    flags: u64,
    restorer: u64,
    mask: u64,
}

fn flags_kept() {
    let raw = |signal: i32, new: Option<&Action>| {
        let mut old = Action::default();
        let new = new.map_or(0, |a| std::ptr::from_ref(a) as u64);
        call(libc::SYS_rt_sigaction, [signal as u64, new, &raw mut old as u64, 8, 0, 0]).map(|_| old)
    };
    let action = Action { handler: 1, flags: u64::MAX, restorer: 0x1234, mask: u64::MAX };
    raw(libc::SIGUSR1, Some(&action)).unwrap();
    let kept = raw(libc::SIGUSR1, None).unwrap();
    // SA_UNSUPPORTED and unknown bits are not kept, which is how one finds out which are known.
    assert_eq!(kept.flags, 0xdc00_0807, "{:#x}", kept.flags);
    assert_eq!(kept.mask, !(1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1)));
    for signal in [libc::SIGKILL, libc::SIGSTOP] {
        assert_eq!(raw(signal, Some(&Action::default())).err(), Some(libc::EINVAL));
        assert_eq!(raw(signal, None).unwrap().handler, 0);
    }
    for signal in [0, -1, 65] {
        assert_eq!(raw(signal, None).err(), Some(libc::EINVAL));
    }
    assert_eq!(call(libc::SYS_rt_sigaction, [1, 0, 0, 4, 0, 0]), Err(libc::EINVAL));
    assert_eq!(call(libc::SYS_rt_sigaction, [1, 16, 0, 8, 0, 0]), Err(libc::EFAULT));
}

fn mask_during() {
    static SEEN: AtomicI32 = AtomicI32::new(0);
    extern "C" fn look(_: i32) {
        let own = i32::from(blocked(libc::SIGUSR1));
        let other = i32::from(blocked(libc::SIGUSR2));
        SEEN.store(own * 2 + other, Ordering::SeqCst);
    }
    for (flags, expected) in [(0, 3), (libc::SA_NODEFER, 1)] {
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = look as *const () as usize;
        action.sa_flags = flags;
        action.sa_mask = set_of(&[libc::SIGUSR2]);
        unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()) };
        unsafe { libc::raise(libc::SIGUSR1) };
        assert_eq!(SEEN.load(Ordering::SeqCst), expected);
        assert!(!blocked(libc::SIGUSR1) && !blocked(libc::SIGUSR2), "the mask comes back");
    }
}

fn alarm_in(ms: i64) {
    let timer = libc::itimerval {
        it_interval: libc::timeval { tv_sec: 0, tv_usec: 0 },
        it_value: libc::timeval { tv_sec: ms / 1000, tv_usec: ms % 1000 * 1000 },
    };
    assert_eq!(unsafe { libc::setitimer(libc::ITIMER_REAL as _, &raw const timer, std::ptr::null_mut()) }, 0);
}

/// Runs `f` while SIGALRM is handled with `flags` in the midst of it; gives what it gives.
fn interrupted<T>(flags: i32, f: impl FnOnce() -> T) -> T {
    handle(libc::SIGALRM, count as *const () as usize, flags);
    let before = COUNT.load(Ordering::SeqCst);
    alarm_in(60);
    let result = f();
    assert_eq!(COUNT.load(Ordering::SeqCst), before + 1, "the handler ran");
    result
}

fn pipe() -> [i32; 2] {
    let mut fds = [0; 2];
    assert_eq!(unsafe { libc::pipe(fds.as_mut_ptr()) }, 0);
    fds
}

/// A child that does `f` after 200 ms.
fn later(f: impl FnOnce()) -> i32 {
    fork(|| {
        thread::sleep(Duration::from_millis(200));
        f();
        0
    })
}

fn restarts() {
    let mut byte = 0_u8;
    let at = (&raw mut byte).cast::<libc::c_void>();
    for flags in [libc::SA_RESTART, 0] {
        let expected = |n: i64| if flags == 0 { Err(libc::EINTR) } else { Ok(n) };
        let [r, w] = pipe();
        let child = later(|| assert_eq!(unsafe { libc::write(w, [1_u8].as_ptr().cast(), 1) }, 1));
        assert_eq!(interrupted(flags, || ok(unsafe { libc::read(r, at, 1) as i64 })), expected(1), "read");
        assert_eq!(interrupted_wait(flags, child), expected(i64::from(child)), "waitpid");
        // flock of a file that the child holds.
        let path = super::own_path("restart-lock");
        let file = std::fs::File::create(&path).unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        let other = std::fs::File::open(&path).unwrap();
        let held = std::os::fd::AsRawFd::as_raw_fd(&other);
        assert_eq!(unsafe { libc::flock(held, libc::LOCK_EX) }, 0);
        let thread = thread::spawn(move || {
            mask(libc::SIG_BLOCK, &[libc::SIGALRM]);
            thread::sleep(Duration::from_millis(200));
            unsafe { libc::flock(held, libc::LOCK_UN) };
        });
        assert_eq!(interrupted(flags, || ok(unsafe { libc::flock(fd, libc::LOCK_EX) })), expected(0), "flock");
        thread.join().unwrap();
        std::fs::remove_file(path).unwrap();
        // recv from a socket.
        let mut pair = [0; 2];
        assert_eq!(unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr()) }, 0);
        let child = later(|| assert_eq!(unsafe { libc::send(pair[1], [1_u8].as_ptr().cast(), 1, 0) }, 1));
        assert_eq!(interrupted(flags, || ok(unsafe { libc::recv(pair[0], at, 1, 0) as i64 })), expected(1), "recv");
        assert_eq!(wait(child), 0);
        // futex without a time limit.
        let word = map(4096, 3).cast::<u32>();
        let thread = thread::spawn({
            let word = word as u64;
            move || {
                mask(libc::SIG_BLOCK, &[libc::SIGALRM]);
                thread::sleep(Duration::from_millis(200));
                let _ = call(libc::SYS_futex, [word, 129, 1, 0, 0, 0]);
            }
        });
        let futex = || call(libc::SYS_futex, [word as u64, 128, 0, 0, 0, 0]);
        assert_eq!(interrupted(flags, futex), expected(0), "futex");
        thread.join().unwrap();
    }
}

fn interrupted_wait(flags: i32, done: i32) -> Result<i64, i32> {
    assert_eq!(wait_again(done), 0);
    let child = later(|| ());
    let result = interrupted(flags, || ok(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }));
    if result.is_err() {
        assert_eq!(wait(child), 0);
        return result;
    }
    assert_eq!(result, Ok(i64::from(child)));
    Ok(i64::from(done))
}

fn wait_again(pid: i32) -> i32 {
    wait(pid)
}

fn never_restarts() {
    let flags = libc::SA_RESTART;
    let long = libc::timespec { tv_sec: 20, tv_nsec: 0 };
    let mut rest = long;
    let sleep = || ok(unsafe { libc::nanosleep(&raw const long, &raw mut rest) });
    assert_eq!(interrupted(flags, sleep), Err(libc::EINTR));
    assert!(rest.tv_sec >= 10, "what is left of the sleep: {}", rest.tv_sec);
    assert_eq!(interrupted(flags, || ok(unsafe { libc::poll(std::ptr::null_mut(), 0, 20_000) })), Err(libc::EINTR));
    assert_eq!(interrupted(flags, || ok(unsafe { libc::pause() })), Err(libc::EINTR));
    let select = || unsafe {
        let null = std::ptr::null_mut();
        let mut t = libc::timeval { tv_sec: 20, tv_usec: 0 };
        ok(libc::select(0, null, null, null, &raw mut t))
    };
    assert_eq!(interrupted(flags, select), Err(libc::EINTR));
    let epoll = unsafe { libc::epoll_create1(0) };
    let mut event: libc::epoll_event = unsafe { std::mem::zeroed() };
    let wait = || ok(unsafe { libc::epoll_wait(epoll, &raw mut event, 1, 20_000) });
    assert_eq!(interrupted(flags, wait), Err(libc::EINTR));
    let word = map(4096, 3) as u64;
    let timed = || call(libc::SYS_futex, [word, 128, 0, &raw const long as u64, 0, 0]);
    assert_eq!(interrupted(flags, timed), Err(libc::EINTR));
    // A socket with a time limit.
    let mut pair = [0; 2];
    assert_eq!(unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, pair.as_mut_ptr()) }, 0);
    let limit = libc::timeval { tv_sec: 20, tv_usec: 0 };
    let (value, len) = ((&raw const limit).cast(), std::mem::size_of_val(&limit) as u32);
    assert_eq!(unsafe { libc::setsockopt(pair[0], libc::SOL_SOCKET, libc::SO_RCVTIMEO, value, len) }, 0);
    let mut byte = 0_u8;
    let recv = || ok(unsafe { libc::recv(pair[0], (&raw mut byte).cast(), 1, 0) as i64 });
    assert_eq!(interrupted(flags, recv), Err(libc::EINTR));
}

/// The state letter of a process.
fn state(pid: i32) -> char {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    text.rsplit(')').next().unwrap().trim().chars().next().unwrap()
}

fn wait_for_state(pid: i32, wanted: char) {
    let end = Instant::now() + Duration::from_secs(30);
    while state(pid) != wanted {
        assert!(Instant::now() < end, "{pid} is {} and not {wanted}", state(pid));
        thread::sleep(Duration::from_millis(5));
    }
}

fn stopped(pid: i32) {
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, libc::WUNTRACED) }, pid);
    assert!(libc::WIFSTOPPED(status), "{status:#x}");
}

fn stop_in_waits() {
    // Stopped and continued without a handler, a wait goes on and ends at its own time.
    type Wait = fn() -> bool;
    let waits: [(&str, Wait); 5] = [
        ("nanosleep", || {
            let t = libc::timespec { tv_sec: 0, tv_nsec: 400_000_000 };
            unsafe { libc::nanosleep(&raw const t, std::ptr::null_mut()) == 0 }
        }),
        ("clock_nanosleep", || {
            let mut t: libc::timespec = unsafe { std::mem::zeroed() };
            unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut t) };
            t.tv_sec += 1;
            let (clock, flags) = (libc::CLOCK_MONOTONIC, libc::TIMER_ABSTIME);
            unsafe { libc::clock_nanosleep(clock, flags, &raw const t, std::ptr::null_mut()) == 0 }
        }),
        ("poll", || unsafe { libc::poll(std::ptr::null_mut(), 0, 400) == 0 }),
        ("select", || unsafe {
            let null = std::ptr::null_mut();
            let mut t = libc::timeval { tv_sec: 0, tv_usec: 400_000 };
            libc::select(0, null, null, null, &raw mut t) == 0
        }),
        ("futex", || {
            let word = map(4096, 3) as u64;
            let t = libc::timespec { tv_sec: 0, tv_nsec: 400_000_000 };
            call(libc::SYS_futex, [word, 128, 0, &raw const t as u64, 0, 0]) == Err(libc::ETIMEDOUT)
        }),
    ];
    for (name, f) in waits {
        let begun = Instant::now();
        let pid = fork(move || if f() { 0 } else { errno() });
        thread::sleep(Duration::from_millis(50));
        unsafe { libc::kill(pid, libc::SIGSTOP) };
        stopped(pid);
        unsafe { libc::kill(pid, libc::SIGCONT) };
        let status = wait(pid);
        assert_eq!(status, 0, "{name}: {status:#x}");
        assert!(begun.elapsed() >= Duration::from_millis(390), "{name}: {:?}", begun.elapsed());
    }
}

fn restart_syscall() {
    assert_eq!(call(libc::SYS_restart_syscall, [0; 6]), Err(libc::EINTR));
}

extern "C" fn where_am_i(_: i32) {
    let local = 0_u64;
    WORD.store(&raw const local as u64, Ordering::SeqCst);
    let mut now: libc::stack_t = unsafe { std::mem::zeroed() };
    unsafe { libc::sigaltstack(std::ptr::null(), &raw mut now) };
    CODE.store(now.ss_flags, Ordering::SeqCst);
    let fresh = libc::stack_t { ss_sp: map(1 << 16, 3).cast(), ss_flags: 0, ss_size: 1 << 16 };
    STATUS.store(
        ok(unsafe { libc::sigaltstack(&raw const fresh, std::ptr::null_mut()) }).err().unwrap_or(0),
        Ordering::SeqCst,
    );
}

fn altstack_rules() {
    let set = |sp: u64, flags: i32, size: usize| {
        let new = libc::stack_t { ss_sp: sp as *mut libc::c_void, ss_flags: flags, ss_size: size };
        call(libc::SYS_sigaltstack, [&raw const new as u64, 0, 0, 0, 0, 0])
    };
    let memory = map(1 << 16, 3) as u64;
    assert_eq!(set(memory, 4, 1 << 16), Err(libc::EINVAL));
    assert_eq!(set(memory, 3, 1 << 16), Err(libc::EINVAL));
    assert_eq!(set(memory, 0, 2047), Err(libc::ENOMEM));
    assert_eq!(set(memory, libc::SS_ONSTACK, 1 << 16), Ok(0), "SS_ONSTACK may be given");
    handle(libc::SIGUSR1, where_am_i as *const () as usize, libc::SA_ONSTACK);
    unsafe { libc::raise(libc::SIGUSR1) };
    let at = WORD.load(Ordering::SeqCst);
    assert!((memory..memory + (1 << 16)).contains(&at), "{at:#x} on {memory:#x}");
    assert_eq!((CODE.load(Ordering::SeqCst), STATUS.load(Ordering::SeqCst)), (libc::SS_ONSTACK, libc::EPERM));
    handle(libc::SIGUSR1, where_am_i as *const () as usize, 0);
    unsafe { libc::raise(libc::SIGUSR1) };
    assert_eq!(
        (CODE.load(Ordering::SeqCst), STATUS.load(Ordering::SeqCst)),
        (0, 0),
        "the ordinary stack, so it may change"
    );
    assert_eq!(set(0, libc::SS_DISABLE, 0), Ok(0));
    let mut now: libc::stack_t = unsafe { std::mem::zeroed() };
    unsafe { libc::sigaltstack(std::ptr::null(), &raw mut now) };
    assert_eq!(now.ss_flags, libc::SS_DISABLE);
    assert_eq!(call(libc::SYS_sigaltstack, [8, 0, 0, 0, 0, 0]), Err(libc::EFAULT));
}

fn autodisarm() {
    const AUTODISARM: i32 = i32::MIN;
    let memory = map(1 << 16, 3) as u64;
    let new = libc::stack_t { ss_sp: memory as *mut libc::c_void, ss_flags: AUTODISARM, ss_size: 1 << 16 };
    assert_eq!(ok(unsafe { libc::sigaltstack(&raw const new, std::ptr::null_mut()) }), Ok(0));
    handle(libc::SIGUSR1, where_am_i as *const () as usize, libc::SA_ONSTACK);
    unsafe { libc::raise(libc::SIGUSR1) };
    let at = WORD.load(Ordering::SeqCst);
    assert!((memory..memory + (1 << 16)).contains(&at), "{at:#x} on {memory:#x}");
    // In the handler there is none, so a new one may be set; the return puts the old one back.
    assert_eq!((CODE.load(Ordering::SeqCst), STATUS.load(Ordering::SeqCst)), (libc::SS_DISABLE, 0));
    let mut now: libc::stack_t = unsafe { std::mem::zeroed() };
    unsafe { libc::sigaltstack(std::ptr::null(), &raw mut now) };
    assert_eq!((now.ss_sp as u64, now.ss_flags, now.ss_size), (memory, AUTODISARM, 1 << 16));
}

fn stop_threads() {
    let pages = unsafe { libc::mmap(std::ptr::null_mut(), 4096, 3, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0) };
    let counter = unsafe { AtomicU64::from_ptr(pages.cast()) };
    let pid = fork(|| {
        for i in 0..4 {
            thread::spawn(move || {
                loop {
                    counter.fetch_add(1, Ordering::SeqCst);
                    if i == 0 {
                        thread::sleep(Duration::from_millis(1));
                    }
                }
            });
        }
        thread::sleep(Duration::from_secs(60));
        0
    });
    for round in 0..3 {
        let before = counter.load(Ordering::SeqCst);
        let end = Instant::now() + Duration::from_secs(30);
        while counter.load(Ordering::SeqCst) == before {
            assert!(Instant::now() < end, "round {round}: nobody goes on");
            thread::sleep(Duration::from_millis(1));
        }
        unsafe { libc::kill(pid, libc::SIGSTOP) };
        stopped(pid);
        let still = counter.load(Ordering::SeqCst);
        thread::sleep(Duration::from_millis(50));
        assert_eq!(counter.load(Ordering::SeqCst), still, "a stopped thread counts");
        assert_eq!(state(pid), 'T');
        unsafe { libc::kill(pid, libc::SIGCONT) };
        let mut status = 0;
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, libc::WCONTINUED) }, pid);
        assert!(libc::WIFCONTINUED(status), "{status:#x}");
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, libc::WCONTINUED | libc::WNOHANG) }, 0, "told once");
    }
    // A stopped process dies of SIGKILL at once; other signals wait until it goes on.
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    stopped(pid);
    unsafe { libc::kill(pid, libc::SIGTERM) };
    thread::sleep(Duration::from_millis(30));
    assert_eq!(state(pid), 'T');
    unsafe { libc::kill(pid, libc::SIGKILL) };
    assert_eq!(wait(pid), libc::SIGKILL);
}

fn news() -> (i32, i32) {
    let end = Instant::now() + Duration::from_secs(30);
    while COUNT.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < end, "no SIGCHLD");
        thread::sleep(Duration::from_millis(2));
    }
    COUNT.store(0, Ordering::SeqCst);
    (CODE.load(Ordering::SeqCst), STATUS.load(Ordering::SeqCst))
}

fn sleeper() -> i32 {
    fork(|| {
        thread::sleep(Duration::from_secs(60));
        0
    })
}

fn sigchld_of_stops() {
    handle(libc::SIGCHLD, child_news as *const () as usize, libc::SA_SIGINFO | libc::SA_RESTART);
    let pid = sleeper();
    for signal in [libc::SIGSTOP, libc::SIGTSTP] {
        unsafe { libc::setpgid(pid, pid) };
        unsafe { libc::kill(pid, signal) };
        assert_eq!(news(), (libc::CLD_STOPPED, signal));
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let options = libc::WSTOPPED | libc::WNOWAIT;
        assert_eq!(unsafe { libc::waitid(libc::P_PID, pid as u32, &raw mut info, options) }, 0);
        assert_eq!((info.si_code, unsafe { info.si_status() }), (libc::CLD_STOPPED, signal));
        stopped(pid);
        unsafe { libc::kill(pid, libc::SIGCONT) };
        assert_eq!(news(), (libc::CLD_CONTINUED, libc::SIGCONT));
        assert_eq!(unsafe { libc::waitid(libc::P_PID, pid as u32, &raw mut info, libc::WCONTINUED) }, 0);
        assert_eq!((info.si_code, unsafe { info.si_status() }), (libc::CLD_CONTINUED, libc::SIGCONT));
    }
    unsafe { libc::kill(pid, libc::SIGUSR1) };
    assert_eq!(news(), (libc::CLD_KILLED, libc::SIGUSR1));
    assert_eq!(wait(pid), libc::SIGUSR1);
}

fn nocld() {
    handle(libc::SIGCHLD, child_news as *const () as usize, libc::SA_SIGINFO | libc::SA_NOCLDSTOP | libc::SA_RESTART);
    let pid = sleeper();
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    stopped(pid);
    unsafe { libc::kill(pid, libc::SIGCONT) };
    thread::sleep(Duration::from_millis(50));
    assert_eq!(COUNT.load(Ordering::SeqCst), 0);
    unsafe { libc::kill(pid, libc::SIGKILL) };
    assert_eq!(news(), (libc::CLD_KILLED, libc::SIGKILL));
    assert_eq!(wait(pid), libc::SIGKILL);
    // SA_NOCLDWAIT: no zombie, yet Linux still sends the signal; a wait lasts until the last child is gone.
    handle(libc::SIGCHLD, child_news as *const () as usize, libc::SA_SIGINFO | libc::SA_NOCLDWAIT | libc::SA_RESTART);
    fork(|| 3);
    assert_eq!(ok(unsafe { libc::wait(std::ptr::null_mut()) }), Err(libc::ECHILD));
    assert_eq!(news(), (libc::CLD_EXITED, 3));
}

/// A background process that handles SIGTTIN without SA_RESTART: each read from the terminal ends in EINTR.
fn background_reads() {
    let mut terminal = 0;
    let (no_name, no_size) = (std::ptr::null_mut(), std::ptr::null());
    let shell = unsafe { libc::forkpty(&raw mut terminal, no_name, std::ptr::null(), no_size) };
    if shell == 0 {
        let reader = fork(|| {
            unsafe { libc::setpgid(0, 0) };
            handle(libc::SIGTTIN, count as *const () as usize, 0);
            let ends = (0..3000).filter(|_| {
                let mut byte = 0_u8;
                let n = unsafe { libc::read(0, (&raw mut byte).cast(), 1) };
                n == -1 && errno() == libc::EINTR
            });
            i32::from(ends.count() != 3000)
        });
        unsafe { libc::_exit(libc::WEXITSTATUS(wait(reader))) };
    }
    assert_eq!(libc::WEXITSTATUS(wait(shell)), 0);
}

fn orphaned() {
    handle(libc::SIGHUP, count as *const () as usize, 0);
    // Nobody outside of the process group could continue it: a terminal's stop signal does nothing to it.
    let leader = fork(|| {
        unsafe { libc::setsid() };
        unsafe { libc::raise(libc::SIGTSTP) };
        unsafe { libc::kill(libc::getpid(), libc::SIGTTIN) };
        0
    });
    assert_eq!(wait(leader), 0);
    // A stopped member of a group that becomes orphaned gets SIGHUP and SIGCONT.
    let [r, w] = pipe();
    let session = fork(|| {
        // Whoever takes over the orphan is of another session.
        unsafe { libc::setsid() };
        wait(fork(|| {
            let child = fork(|| {
                unsafe { libc::setpgid(0, 0) };
                handle(libc::SIGHUP, hung_up as *const () as usize, 0);
                handle(libc::SIGCONT, count as *const () as usize, 0);
                FD.store(w, Ordering::SeqCst);
                unsafe { libc::raise(libc::SIGSTOP) };
                thread::sleep(Duration::from_millis(20));
                let told = [COUNT.load(Ordering::SeqCst) as u8];
                unsafe { libc::write(w, told.as_ptr().cast(), 1) };
                0
            });
            wait_for_state(child, 'T');
            0
        }))
    });
    unsafe { libc::close(w) };
    assert_eq!(wait(session), 0);
    let mut got = [0_u8; 3];
    let mut n = 0;
    while n < 3 {
        match unsafe { libc::read(r, got[n..].as_mut_ptr().cast(), 3 - n) } {
            0 => break,
            k => n += k as usize,
        }
    }
    assert_eq!((n, got[0], got[1]), (2, b'H', 1), "SIGHUP, then SIGCONT's handler");
}

static FD: AtomicI32 = AtomicI32::new(-1);

extern "C" fn hung_up(_: i32) {
    unsafe { libc::write(FD.load(Ordering::SeqCst), b"H".as_ptr().cast(), 1) };
}

fn core_signals() {
    for signal in [libc::SIGQUIT, libc::SIGABRT, libc::SIGSYS, libc::SIGXCPU, libc::SIGTRAP] {
        let pid = fork(|| {
            super::sys::no_core();
            // Whoever runs the tests may ignore some.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                libc::raise(signal);
            }
            0
        });
        assert_eq!(wait(pid), signal, "without a core file the status says so");
    }
}

fn temporary_masks() {
    handle(libc::SIGUSR1, count as *const () as usize, 0);
    mask(libc::SIG_BLOCK, &[libc::SIGUSR1, libc::SIGUSR2]);
    unsafe { libc::raise(libc::SIGUSR1) };
    let only_second = set_of(&[libc::SIGUSR2]);
    assert_eq!(ok(unsafe { libc::sigsuspend(&raw const only_second) }), Err(libc::EINTR));
    assert_eq!(COUNT.load(Ordering::SeqCst), 1);
    assert!(blocked(libc::SIGUSR1) && blocked(libc::SIGUSR2), "the mask is back");
    unsafe { libc::raise(libc::SIGUSR1) };
    let t = libc::timespec { tv_sec: 20, tv_nsec: 0 };
    let n = ok(unsafe { libc::ppoll(std::ptr::null_mut(), 0, &raw const t, &raw const only_second) });
    assert_eq!((n, COUNT.load(Ordering::SeqCst)), (Err(libc::EINTR), 2));
    assert!(blocked(libc::SIGUSR1));
    // Nothing pending: the call ends by its time and the mask is back.
    let t = libc::timespec { tv_sec: 0, tv_nsec: 10_000_000 };
    let n = ok(unsafe { libc::ppoll(std::ptr::null_mut(), 0, &raw const t, &raw const only_second) });
    assert_eq!(n, Ok(0));
    assert!(blocked(libc::SIGUSR1));
    in_child(|| assert!(blocked(libc::SIGUSR1), "a child inherits the mask"));
}
