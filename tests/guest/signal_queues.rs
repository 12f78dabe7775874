//! Pending signals: order, limits, what comes with them, who takes them.
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use super::Case;
use super::sys::{call, errno, fork, handle, in_child, ok, wait};

pub const CASES: &[Case] = &[
    ("signal_order_of_delivery", order),
    ("sigqueue_limit", limit),
    ("sigqueue_values_and_permissions", values),
    ("tgsigqueueinfo_to_a_thread", to_thread),
    ("sigwaitinfo_details", waitinfo),
    ("signal_to_a_process_finds_a_thread", choice),
    ("signalfd_belongs_to_its_reader", signalfd_reader),
    ("signalfd_in_epoll", signalfd_epoll),
    ("signal_ignoring_drops_pending", ignoring_drops),
    ("signal_stop_and_continue_cancel", stop_and_continue_cancel),
    ("signal_status_file", status_file),
    ("signal_unblocked_before_the_call_returns", at_once),
];

fn set_of(signals: &[i32]) -> libc::sigset_t {
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    unsafe { libc::sigemptyset(&raw mut set) };
    for &s in signals {
        unsafe { libc::sigaddset(&raw mut set, s) };
    }
    set
}

fn block(signals: &[i32]) {
    let set = set_of(signals);
    assert_eq!(unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) }, 0);
}

fn unblock(signals: &[i32]) {
    let set = set_of(signals);
    assert_eq!(unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) }, 0);
}

fn sigqueue(pid: i32, signal: i32, value: usize) -> Result<i64, i32> {
    let value = libc::sigval { sival_ptr: value as *mut libc::c_void };
    ok(unsafe { libc::sigqueue(pid, signal, value) })
}

fn pid() -> i32 {
    unsafe { libc::getpid() }
}

fn tid() -> i32 {
    unsafe { libc::syscall(libc::SYS_gettid) as i32 }
}

/// Takes one of `signals`; its number and information, or the error number.
fn take(signals: &[i32], milliseconds: i64) -> Result<libc::siginfo_t, i32> {
    let set = set_of(signals);
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let time = libc::timespec { tv_sec: milliseconds / 1000, tv_nsec: milliseconds % 1000 * 1_000_000 };
    let n = unsafe { libc::sigtimedwait(&raw const set, &raw mut info, &raw const time) };
    if n < 0 { Err(errno()) } else { Ok(info) }
}

static SEEN: [AtomicI32; 16] = [const { AtomicI32::new(0) }; 16];
static COUNT: AtomicUsize = AtomicUsize::new(0);

extern "C" fn note(signal: i32) {
    SEEN[COUNT.fetch_add(1, Ordering::SeqCst) % 16].store(signal, Ordering::SeqCst);
}

extern "C" fn note_value(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let value = unsafe { (*info).si_value().sival_ptr } as i32;
    SEEN[COUNT.fetch_add(1, Ordering::SeqCst) % 16].store(value, Ordering::SeqCst);
}

fn seen() -> Vec<i32> {
    (0..COUNT.swap(0, Ordering::SeqCst).min(16)).map(|i| SEEN[i].load(Ordering::SeqCst)).collect()
}

fn order() {
    let rt = libc::SIGRTMIN();
    let all = [libc::SIGUSR1, libc::SIGUSR2, libc::SIGTERM, rt, rt + 1, rt + 5];
    block(&all);
    for &s in &all {
        handle(s, note_value as *const () as usize, libc::SA_SIGINFO);
    }
    // Each handler runs to its end before the next begins.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = note_value as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    action.sa_mask = set_of(&all);
    for &s in &all {
        unsafe { libc::sigaction(s, &raw const action, std::ptr::null_mut()) };
    }
    for (signal, value) in [(rt + 5, 1), (rt, 2), (rt + 1, 3), (rt, 4), (rt + 5, 5)] {
        assert_eq!(sigqueue(pid(), signal, value), Ok(0));
    }
    assert_eq!(sigqueue(pid(), libc::SIGTERM, 6), Ok(0));
    // A standard signal is there once, as the first one came.
    assert_eq!(sigqueue(pid(), libc::SIGUSR1, 7), Ok(0));
    assert_eq!(sigqueue(pid(), libc::SIGUSR1, 8), Ok(0));
    unblock(&all);
    assert_eq!(seen(), [7, 6, 2, 4, 3, 1, 5]);
}

fn limit() {
    in_child(|| {
        let rt = libc::SIGRTMIN();
        block(&[rt, libc::SIGUSR1, libc::SIGUSR2]);
        // Queued signals count by user, so this is a user of our own.
        assert_eq!(unsafe { libc::setuid(54321) }, 0);
        let ten = libc::rlimit { rlim_cur: 10, rlim_max: 10 };
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_SIGPENDING, &raw const ten) }, 0);
        for i in 0..10 {
            assert_eq!(sigqueue(pid(), rt, i), Ok(0));
        }
        assert_eq!(sigqueue(pid(), rt, 10), Err(libc::EAGAIN));
        // kill(2) loses no signal, only what would come with it.
        assert_eq!(ok(unsafe { libc::kill(pid(), rt) }), Ok(0));
        assert_eq!(ok(unsafe { libc::kill(pid(), libc::SIGUSR1) }), Ok(0));
        assert_eq!(sigqueue(pid(), libc::SIGUSR2, 1), Ok(0));
        let mut timer: libc::timer_t = std::ptr::null_mut();
        let made = ok(unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, std::ptr::null_mut(), &raw mut timer) });
        assert_eq!(made, Err(libc::EAGAIN));
        assert_eq!(take(&[libc::SIGUSR1], 0).unwrap().si_signo, libc::SIGUSR1);
        let mut values = Vec::new();
        while let Ok(info) = take(&[rt], 0) {
            values.push(unsafe { info.si_value().sival_ptr } as usize);
        }
        assert_eq!(values[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(sigqueue(pid(), rt, 11), Ok(0));
    });
}

fn values() {
    let rt = libc::SIGRTMIN();
    block(&[rt]);
    assert_eq!(sigqueue(pid(), rt, 0xdead_beef_1234), Ok(0));
    let info = take(&[rt], 0).unwrap();
    assert_eq!((info.si_signo, info.si_code), (rt, libc::SI_QUEUE));
    assert_eq!(unsafe { (info.si_pid(), info.si_value().sival_ptr as usize) }, (pid(), 0xdead_beef_1234));
    assert_eq!(sigqueue(pid(), 0, 0), Ok(0));
    assert_eq!(sigqueue(pid(), 65, 0), Err(libc::EINVAL));
    assert_eq!(sigqueue(0x3f_fff0, rt, 0), Err(libc::ESRCH));
    // The raw call takes any negative code, but not the kernel's own for others.
    let child = fork(|| {
        thread::sleep(Duration::from_secs(30));
        0
    });
    let raw = |to: i32, code: i32| {
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        info.si_code = code;
        call(libc::SYS_rt_sigqueueinfo, [to as u64, rt as u64, &raw const info as u64, 0, 0, 0])
    };
    for code in [0, 1, 0x80, -6] {
        assert_eq!(raw(child, code), Err(libc::EPERM), "code {code}");
        assert_eq!(raw(pid(), code), Ok(0), "code {code}");
        // The C library shows SI_TKILL as SI_USER.
        assert_eq!(take(&[rt], 0).unwrap().si_code, if code == -6 { 0 } else { code });
    }
    assert_eq!(raw(pid(), -60), Ok(0));
    assert_eq!(take(&[rt], 0).unwrap().si_code, -60);
    assert_eq!(call(libc::SYS_rt_sigqueueinfo, [pid() as u64, rt as u64, 8, 0, 0, 0]), Err(libc::EFAULT));
    in_child(|| {
        assert_eq!(unsafe { libc::setuid(54322) }, 0);
        assert_eq!(sigqueue(child, rt, 0), Err(libc::EPERM));
        assert_eq!(sigqueue(child, 0, 0), Err(libc::EPERM));
        // A session may be told to go on by any of its members.
        assert_eq!(ok(unsafe { libc::kill(child, libc::SIGCONT) }), Ok(0));
        assert_eq!(ok(unsafe { libc::kill(child, libc::SIGTERM) }), Err(libc::EPERM));
    });
    unsafe { libc::kill(child, libc::SIGKILL) };
    assert_eq!(wait(child), libc::SIGKILL);
}

fn to_thread() {
    let rt = libc::SIGRTMIN() + 1;
    block(&[rt]);
    let started = Arc::new(Barrier::new(2));
    let theirs = Arc::new(AtomicI32::new(0));
    let (s, t) = (started.clone(), theirs.clone());
    let thread = thread::spawn(move || {
        t.store(tid(), Ordering::SeqCst);
        s.wait();
        s.wait();
        unsafe { take(&[rt], 5000).unwrap().si_value().sival_ptr as usize }
    });
    started.wait();
    let to = theirs.load(Ordering::SeqCst);
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    info.si_code = libc::SI_QUEUE;
    unsafe { (&raw mut info).cast::<u64>().add(3).write(77) };
    let at = &raw const info as u64;
    let send = |tgid: i32, tid: i32, signal: i32| {
        call(libc::SYS_rt_tgsigqueueinfo, [tgid as u64, tid as u64, signal as u64, at, 0, 0])
    };
    assert_eq!(send(pid(), to, rt), Ok(0));
    assert_eq!(take(&[rt], 0).err(), Some(libc::EAGAIN), "it is that thread's alone");
    assert_eq!(send(pid() + 1, to, rt), Err(libc::ESRCH));
    assert_eq!(send(0, to, rt), Err(libc::EINVAL));
    assert_eq!(send(pid(), -1, rt), Err(libc::EINVAL));
    assert_eq!(send(pid(), to, 65), Err(libc::EINVAL));
    assert_eq!(call(libc::SYS_tgkill, [pid() as u64, 0x3f_fff0, 1, 0, 0, 0]), Err(libc::ESRCH));
    assert_eq!(call(libc::SYS_tkill, [0, 1, 0, 0, 0, 0]), Err(libc::EINVAL));
    started.wait();
    assert_eq!(thread.join().unwrap(), 77);
}

fn waitinfo() {
    block(&[libc::SIGUSR1, libc::SIGUSR2, libc::SIGCHLD]);
    assert_eq!(take(&[libc::SIGUSR1], 0).err(), Some(libc::EAGAIN));
    assert_eq!(take(&[libc::SIGUSR1], 30).err(), Some(libc::EAGAIN));
    unsafe { libc::raise(libc::SIGUSR1) };
    let info = take(&[libc::SIGUSR1, libc::SIGUSR2], 0).unwrap();
    assert_eq!((info.si_signo, info.si_code, unsafe { info.si_pid() }), (libc::SIGUSR1, 0, pid()));
    unsafe { libc::kill(pid(), libc::SIGUSR2) };
    let info = take(&[libc::SIGUSR1, libc::SIGUSR2], 0).unwrap();
    assert_eq!((info.si_signo, info.si_code, unsafe { info.si_uid() }), (libc::SIGUSR2, 0, unsafe { libc::getuid() }));
    let child = fork(|| 9);
    let info = take(&[libc::SIGCHLD], 10_000).unwrap();
    assert_eq!((info.si_code, unsafe { (info.si_pid(), info.si_status()) }), (libc::CLD_EXITED, (child, 9)));
    wait(child);
    // A handler for another signal ends the wait, whatever its flags.
    handle(libc::SIGALRM, note as *const () as usize, libc::SA_RESTART);
    let soon = libc::itimerval {
        it_interval: libc::timeval { tv_sec: 0, tv_usec: 0 },
        it_value: libc::timeval { tv_sec: 0, tv_usec: 30_000 },
    };
    unsafe { libc::setitimer(libc::ITIMER_REAL as _, &raw const soon, std::ptr::null_mut()) };
    assert_eq!(take(&[libc::SIGUSR1], 20_000).err(), Some(libc::EINTR));
    let bad = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000_000 };
    let set = set_of(&[libc::SIGUSR1]);
    let at = &raw const set as u64;
    assert_eq!(call(libc::SYS_rt_sigtimedwait, [at, 0, &raw const bad as u64, 8, 0, 0]), Err(libc::EINVAL));
    assert_eq!(call(libc::SYS_rt_sigtimedwait, [at, 0, 0, 16, 0, 0]), Err(libc::EINVAL));
    assert_eq!(call(libc::SYS_rt_sigtimedwait, [8, 0, 0, 8, 0, 0]), Err(libc::EFAULT));
}

fn choice() {
    // Only one thread does not block the signal: it is the one that takes it, and the main thread's wait goes on.
    static TAKER: AtomicI32 = AtomicI32::new(0);
    extern "C" fn taker(_: i32) {
        TAKER.store(tid(), Ordering::SeqCst);
    }
    handle(libc::SIGUSR1, taker as *const () as usize, 0);
    block(&[libc::SIGUSR1]);
    let thread = thread::spawn(|| {
        unblock(&[libc::SIGUSR1]);
        let own = tid();
        for _ in 0..500 {
            if TAKER.load(Ordering::SeqCst) != 0 {
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(TAKER.load(Ordering::SeqCst), own);
    });
    unsafe { libc::kill(pid(), libc::SIGUSR1) };
    thread.join().unwrap();
    // One that waits for a blocked signal takes it.
    let thread = thread::spawn(|| take(&[libc::SIGUSR1], 10_000).unwrap().si_signo);
    thread::sleep(Duration::from_millis(30));
    unsafe { libc::kill(pid(), libc::SIGUSR1) };
    assert_eq!(thread.join().unwrap(), libc::SIGUSR1);
}

fn signalfd(signals: &[i32], flags: i32) -> i32 {
    let set = set_of(signals);
    let fd = unsafe { libc::signalfd(-1, &raw const set, flags) };
    assert!(fd >= 0, "signalfd: {}", errno());
    fd
}

/// Reads one record: signal number and sender.
fn read_record(fd: i32) -> Result<(i32, i32), i32> {
    let mut record: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
    let n = ok(unsafe { libc::read(fd, (&raw mut record).cast(), 128) as i64 })?;
    assert_eq!(n, 128);
    Ok((record.ssi_signo as i32, record.ssi_pid as i32))
}

fn readable(fd: i32, milliseconds: i32) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    unsafe { libc::poll(&raw mut p, 1, milliseconds) == 1 }
}

fn signalfd_reader() {
    block(&[libc::SIGUSR1, libc::SIGUSR2]);
    let fd = signalfd(&[libc::SIGUSR1, libc::SIGUSR2], 0);
    unsafe { libc::raise(libc::SIGUSR1) };
    assert!(readable(fd, 0));
    let parent = pid();
    in_child(|| {
        // The parent's pending signals are no business of the child's.
        assert!(!readable(fd, 0));
        let waker = fork(|| {
            thread::sleep(Duration::from_millis(50));
            unsafe { libc::kill(libc::getppid(), libc::SIGUSR2) };
            0
        });
        assert!(readable(fd, 20_000));
        assert_eq!(read_record(fd), Ok((libc::SIGUSR2, waker)));
        assert_eq!(wait(waker), 0);
        let waker = fork(|| {
            thread::sleep(Duration::from_millis(50));
            unsafe { libc::kill(libc::getppid(), libc::SIGUSR2) };
            0
        });
        assert_eq!(read_record(fd), Ok((libc::SIGUSR2, waker)), "a read that waits");
        assert_eq!(wait(waker), 0);
    });
    assert_eq!(read_record(fd), Ok((libc::SIGUSR1, parent)));
    assert!(!readable(fd, 0));
    unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
    assert_eq!(read_record(fd), Err(libc::EAGAIN));
    let mut small = [0_u8; 127];
    assert_eq!(ok(unsafe { libc::read(fd, small.as_mut_ptr().cast(), 127) as i64 }), Err(libc::EINVAL));
}

fn signalfd_epoll() {
    block(&[libc::SIGUSR1]);
    let fd = signalfd(&[libc::SIGUSR1], libc::SFD_NONBLOCK);
    let epoll = unsafe { libc::epoll_create1(0) };
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 5 };
    assert_eq!(unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &raw mut event) }, 0);
    let ready = |timeout| unsafe { libc::epoll_wait(epoll, &raw mut event, 1, timeout) };
    let mut ready = ready;
    assert_eq!(ready(0), 0);
    unsafe { libc::raise(libc::SIGUSR1) };
    assert_eq!(ready(10_000), 1);
    assert_eq!(read_record(fd).unwrap().0, libc::SIGUSR1);
    assert_eq!(ready(0), 0);
    let me = pid();
    let child = fork(move || {
        thread::sleep(Duration::from_millis(50));
        unsafe { libc::kill(me, libc::SIGUSR1) };
        0
    });
    assert_eq!(ready(20_000), 1);
    assert_eq!(read_record(fd), Ok((libc::SIGUSR1, child)));
    assert_eq!(wait(child), 0);
}

fn pending() -> Vec<i32> {
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    unsafe { libc::sigpending(&raw mut set) };
    (1..65).filter(|&s| unsafe { libc::sigismember(&raw const set, s) } == 1).collect()
}

fn ignoring_drops() {
    let all = [libc::SIGUSR1, libc::SIGUSR2, libc::SIGCHLD, libc::SIGWINCH];
    block(&all);
    for s in all {
        unsafe { libc::kill(pid(), s) };
        unsafe { libc::raise(s) };
    }
    assert_eq!(pending(), [10, 12, 17, 28], "blocked signals wait even if their default is to be ignored");
    unsafe { libc::signal(libc::SIGUSR1, libc::SIG_IGN) };
    assert_eq!(pending(), [12, 17, 28]);
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    assert_eq!(pending(), [12, 28]);
    unsafe { libc::raise(libc::SIGUSR1) };
    assert_eq!(pending(), [10, 12, 28], "a blocked signal is kept although it is ignored now");
    in_child(|| assert!(pending().is_empty(), "a child begins without pending signals"));
}

fn stop_and_continue_cancel() {
    let stops = [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU];
    block(&stops);
    block(&[libc::SIGCONT]);
    handle(libc::SIGCONT, note as *const () as usize, 0);
    for s in stops {
        unsafe { libc::kill(pid(), s) };
    }
    assert_eq!(pending(), [20, 21, 22]);
    unsafe { libc::kill(pid(), libc::SIGCONT) };
    assert_eq!(pending(), [18]);
    unsafe { libc::raise(libc::SIGTSTP) };
    assert_eq!(pending(), [20]);
}

fn status_file() {
    in_child(|| {
        let rt = libc::SIGRTMIN();
        block(&[libc::SIGUSR1, libc::SIGUSR2, rt]);
        handle(libc::SIGTERM, note as *const () as usize, 0);
        unsafe { libc::signal(libc::SIGINT, libc::SIG_IGN) };
        unsafe { libc::kill(pid(), libc::SIGUSR1) };
        unsafe { libc::raise(libc::SIGUSR2) };
        let text = std::fs::read_to_string("/proc/self/status").unwrap();
        let field = |name: &str| {
            let line = text.lines().find(|l| l.starts_with(name)).unwrap();
            line[name.len()..].trim().to_owned()
        };
        let mask = |name: &str| u64::from_str_radix(&field(name), 16).unwrap();
        let bit = |s: i32| 1_u64 << (s - 1);
        assert_eq!(mask("SigPnd:"), bit(libc::SIGUSR2));
        assert_eq!(mask("ShdPnd:"), bit(libc::SIGUSR1));
        assert_eq!(mask("SigBlk:"), bit(libc::SIGUSR1) | bit(libc::SIGUSR2) | bit(rt));
        assert_eq!(mask("SigIgn:") & bit(libc::SIGINT), bit(libc::SIGINT));
        assert_eq!(mask("SigCgt:") & (bit(libc::SIGTERM) | bit(libc::SIGINT)), bit(libc::SIGTERM));
        let (queued, limit) = field("SigQ:").split_once('/').map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
        assert!(queued.parse::<u64>().unwrap() >= 2);
        let mut l: libc::rlimit = unsafe { std::mem::zeroed() };
        unsafe { libc::getrlimit(libc::RLIMIT_SIGPENDING, &raw mut l) };
        assert_eq!(limit.parse::<u64>().unwrap(), l.rlim_cur);
    });
}

fn at_once() {
    handle(libc::SIGUSR1, note as *const () as usize, 0);
    for _ in 0..100 {
        block(&[libc::SIGUSR1]);
        unsafe { libc::kill(pid(), libc::SIGUSR1) };
        assert!(seen().is_empty());
        // POSIX: at least one is delivered before sigprocmask returns; so with kill to oneself.
        unblock(&[libc::SIGUSR1]);
        assert_eq!(seen(), [libc::SIGUSR1]);
        unsafe { libc::kill(pid(), libc::SIGUSR1) };
        assert_eq!(seen(), [libc::SIGUSR1]);
    }
}
