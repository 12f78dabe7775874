//! pidfds: opening, polling, signals, waiting, descriptors of others, what /proc tells.
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

use super::Case;
use super::sys::{call, fork, handle, in_child, ok, pipe, read_byte, wait, write_byte};

pub const CASES: &[Case] = &[
    ("pidfd_open", open_errors),
    ("pidfd_poll_and_wait", poll_and_wait),
    ("pidfd_threads", threads),
    ("pidfd_signals", signals),
    ("pidfd_getfd", getfd),
    ("pidfd_clone", clone_pidfd),
    ("pidfd_fdinfo", fdinfo),
    ("pidfd_namespaces", namespaces),
];

const THREAD: u64 = libc::O_EXCL as u64;

fn open(pid: i32, flags: u64) -> Result<OwnedFd, i32> {
    let fd = call(libc::SYS_pidfd_open, [pid as u64, flags, 0, 0, 0, 0])?;
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn send(fd: i32, signal: i32, info: u64, flags: u64) -> Result<i64, i32> {
    call(libc::SYS_pidfd_send_signal, [fd as u64, signal as u64, info, flags, 0, 0])
}

fn ready(fd: &OwnedFd, timeout: i32) -> i16 {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    unsafe { libc::poll(&raw mut poll, 1, timeout) };
    poll.revents
}

fn gettid() -> i32 {
    call(libc::SYS_gettid, [0; 6]).unwrap() as i32
}

fn pause() -> i32 {
    loop {
        unsafe { libc::pause() };
    }
}

fn open_errors() {
    assert_eq!(open(0, 0).unwrap_err(), libc::EINVAL);
    assert_eq!(open(-3, 0).unwrap_err(), libc::EINVAL);
    assert_eq!(open(1, 1).unwrap_err(), libc::EINVAL);
    let pid = fork(|| 0);
    let zombie = open(pid, 0).unwrap();
    assert_eq!(wait(pid), 0);
    assert_eq!(open(pid, 0).unwrap_err(), libc::ESRCH);
    assert_eq!(send(zombie.as_raw_fd(), 0, 0, 0), Err(libc::ESRCH));
    assert_eq!(ready(&zombie, -1), libc::POLLIN | libc::POLLHUP);
    assert_eq!(send(0, 0, 0, 0), Err(libc::EBADF));
    assert_eq!(send(999, 0, 0, 0), Err(libc::EBADF));
    let flags = unsafe { libc::fcntl(zombie.as_raw_fd(), libc::F_GETFD) };
    assert_eq!(flags, libc::FD_CLOEXEC);
    let mut byte = 0_u8;
    assert_eq!(ok(unsafe { libc::read(zombie.as_raw_fd(), (&raw mut byte).cast(), 1) } as i64), Err(libc::EINVAL));
}

fn poll_and_wait() {
    let (from, to) = pipe();
    let pid = fork(|| {
        read_byte(from);
        12
    });
    let fd = open(pid, 0).unwrap();
    assert_eq!(ready(&fd, 0), 0);
    let nonblocking = open(pid, libc::O_NONBLOCK as u64).unwrap();
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let id = |fd: &OwnedFd| fd.as_raw_fd() as u32;
    let r = ok(unsafe { libc::waitid(libc::P_PIDFD, id(&nonblocking), &raw mut info, libc::WEXITED) });
    assert_eq!(r, Err(libc::EAGAIN));
    write_byte(to);
    assert_eq!(ready(&fd, -1), libc::POLLIN);
    assert_eq!(ok(unsafe { libc::waitid(libc::P_PIDFD, id(&fd), &raw mut info, libc::WEXITED) }), Ok(0));
    assert_eq!(unsafe { (info.si_pid(), info.si_status()) }, (pid, 12));
    assert_eq!(ok(unsafe { libc::waitid(libc::P_PIDFD, id(&fd), &raw mut info, libc::WEXITED) }), Err(libc::ECHILD));
    assert_eq!(ok(unsafe { libc::waitid(libc::P_PIDFD, 0, &raw mut info, libc::WEXITED) }), Err(libc::EBADF));
}

static TAKER: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(_: i32) {
    TAKER.store(gettid(), Ordering::SeqCst);
}

fn threads() {
    let (ids, tell) = pipe();
    let (from, to) = pipe();
    let thread = std::thread::spawn(move || {
        let id = gettid();
        assert_eq!(unsafe { libc::write(tell, (&raw const id).cast(), 4) }, 4);
        read_byte(from);
    });
    let mut tid = 0_i32;
    assert_eq!(unsafe { libc::read(ids, (&raw mut tid).cast(), 4) }, 4);
    let own = unsafe { libc::getpid() };
    assert!(open(tid, 0).is_err());
    let fd = open(tid, THREAD).unwrap();
    assert_eq!(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) } & libc::O_EXCL, libc::O_EXCL);
    let process = open(own, 0).unwrap();
    assert_eq!((ready(&fd, 0), ready(&process, 0)), (0, 0));
    handle(libc::SIGUSR1, note as *const () as usize, libc::SA_RESTART);
    let sent = |fd: &OwnedFd, flags| {
        TAKER.store(0, Ordering::SeqCst);
        assert_eq!(send(fd.as_raw_fd(), libc::SIGUSR1, 0, flags), Ok(0));
        while TAKER.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        TAKER.load(Ordering::SeqCst)
    };
    assert_eq!(sent(&fd, 0), tid);
    assert_eq!(sent(&fd, 1), tid);
    assert_eq!(sent(&process, 1), own);
    assert_eq!(sent(&process, 0), own);
    write_byte(to);
    thread.join().unwrap();
    let end = ready(&fd, -1);
    assert_ne!(end & libc::POLLIN, 0);
    // A thread has ended a moment before it is gone.
    while send(fd.as_raw_fd(), 0, 0, 0) == Ok(0) {
        std::thread::yield_now();
    }
    assert_eq!(send(fd.as_raw_fd(), 0, 0, 0), Err(libc::ESRCH));
}

fn signals() {
    let pid = fork(|| {
        unsafe { libc::setpgid(0, 0) };
        pause()
    });
    while unsafe { libc::getpgid(pid) } != pid {
        unsafe { libc::usleep(1000) };
    }
    let member = fork(pause);
    assert_eq!(unsafe { libc::setpgid(member, pid) }, 0);
    let fd = open(pid, 0).unwrap();
    let raw = fd.as_raw_fd();
    assert_eq!(send(raw, 0, 0, 0), Ok(0));
    assert_eq!(send(raw, 65, 0, 0), Err(libc::EINVAL));
    assert_eq!(send(raw, 0, 0, 3), Err(libc::EINVAL));
    assert_eq!(send(raw, 0, 0, 8), Err(libc::EINVAL));
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    info.si_signo = libc::SIGTERM;
    let at = (&raw mut info) as u64;
    assert_eq!(send(raw, libc::SIGINT, at, 0), Err(libc::EINVAL));
    // SI_USER is not for anybody to claim.
    assert_eq!(send(raw, libc::SIGTERM, at, 0), Err(libc::EPERM));
    assert_eq!(send(raw, libc::SIGTERM, 8, 0), Err(libc::EFAULT));
    info.si_code = libc::SI_QUEUE;
    let at = (&raw mut info) as u64;
    assert_eq!(send(raw, 0, at, 0), Err(libc::EINVAL));
    // All of its process group.
    assert_eq!(send(raw, libc::SIGKILL, 0, 4), Ok(0));
    for pid in [pid, member] {
        assert_eq!(libc::WTERMSIG(wait(pid)), libc::SIGKILL);
    }
    assert_eq!(send(raw, 0, 0, 4), Err(libc::ESRCH));
    // A directory of /proc will do.
    let pid = fork(pause);
    let path = std::ffi::CString::new(format!("/proc/{pid}")).unwrap();
    let dir = unsafe { libc::open(path.as_ptr(), libc::O_DIRECTORY | libc::O_CLOEXEC) };
    assert_eq!(send(dir, libc::SIGTERM, 0, 0), Ok(0));
    assert_eq!(libc::WTERMSIG(wait(pid)), libc::SIGTERM);
    in_child(|| {
        let own = open(unsafe { libc::getppid() }, 0).unwrap();
        unsafe { libc::setuid(12345) };
        assert_eq!(send(own.as_raw_fd(), libc::SIGTERM, 0, 0), Err(libc::EPERM));
    });
}

fn getfd() {
    let (from, to) = pipe();
    let (ready, tell) = pipe();
    let pid = fork(|| {
        let (mine, other) = pipe();
        assert_eq!(unsafe { libc::dup2(other, 77) }, 77);
        write_byte(tell);
        read_byte(mine);
        read_byte(from);
        0
    });
    read_byte(ready);
    let fd = open(pid, 0).unwrap();
    let take = |n: u64, flags: u64| call(libc::SYS_pidfd_getfd, [fd.as_raw_fd() as u64, n, flags, 0, 0, 0]);
    assert_eq!(take(77, 1), Err(libc::EINVAL));
    assert_eq!(take(78, 0), Err(libc::EBADF));
    assert_eq!(call(libc::SYS_pidfd_getfd, [0, 77, 0, 0, 0, 0]), Err(libc::EBADF));
    let copy = take(77, 0).unwrap() as i32;
    assert_eq!(unsafe { libc::fcntl(copy, libc::F_GETFD) }, libc::FD_CLOEXEC);
    write_byte(copy);
    in_child(|| {
        unsafe { libc::setuid(12345) };
        assert_eq!(take(77, 0), Err(libc::EPERM));
    });
    write_byte(to);
    assert_eq!(wait(pid), 0);
    assert_eq!(take(77, 0), Err(libc::ESRCH));
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn clone_pidfd() {
    let before = descriptors();
    let mut fd = -1_i32;
    let flags = libc::CLONE_PIDFD as u64 | libc::SIGCHLD as u64;
    let pid = call(libc::SYS_clone, [flags, 0, (&raw mut fd) as u64, 0, 0, 0]).unwrap() as i32;
    if pid == 0 {
        unsafe { libc::_exit(6) }
    }
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    ready(&fd, -1);
    assert_eq!(libc::WEXITSTATUS(wait(pid)), 6);
    drop(fd);
    // A birth that fails leaves nothing behind.
    assert_eq!(call(libc::SYS_clone, [flags, 0, 8, 0, 0, 0]), Err(libc::EFAULT));
    let tids = [1_i32];
    let mut fd = -1_i32;
    let args: [u64; 11] = [
        libc::CLONE_PIDFD as u64,
        (&raw mut fd) as u64,
        0,
        0,
        libc::SIGCHLD as u64,
        0,
        0,
        0,
        tids.as_ptr() as u64,
        1,
        0,
    ];
    assert_eq!(call(libc::SYS_clone3, [args.as_ptr() as u64, 88, 0, 0, 0, 0]), Err(libc::EEXIST));
    let into_cgroup: [u64; 11] = [0x2_0000_0000, 0, 0, 0, libc::SIGCHLD as u64, 0, 0, 0, 0, 0, 0];
    assert_eq!(call(libc::SYS_clone3, [into_cgroup.as_ptr() as u64, 88, 0, 0, 0, 0]), Err(libc::EBADF));
    let both = flags | libc::CLONE_PARENT_SETTID as u64;
    assert_eq!(call(libc::SYS_clone, [both, 0, (&raw mut fd) as u64, 0, 0, 0]), Err(libc::EINVAL));
    assert_eq!(descriptors(), before);
    // CLONE_CLEAR_SIGHAND: handlers go, what is ignored stays.
    handle(libc::SIGUSR1, note as *const () as usize, 0);
    handle(libc::SIGUSR2, libc::SIG_IGN, 0);
    let clear: [u64; 11] = [0x1_0000_0000, 0, 0, 0, libc::SIGCHLD as u64, 0, 0, 0, 0, 0, 0];
    let pid = call(libc::SYS_clone3, [clear.as_ptr() as u64, 88, 0, 0, 0, 0]).unwrap() as i32;
    if pid == 0 {
        let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
        unsafe { libc::sigaction(libc::SIGUSR1, std::ptr::null(), &raw mut old) };
        let first = old.sa_sigaction == libc::SIG_DFL;
        unsafe { libc::sigaction(libc::SIGUSR2, std::ptr::null(), &raw mut old) };
        unsafe { libc::_exit(i32::from(!first || old.sa_sigaction != libc::SIG_IGN)) }
    }
    assert_eq!(wait(pid), 0);
}

fn info_of(fd: i32) -> String {
    std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap()
}

fn fdinfo() {
    let pid = fork(pause);
    let fd = open(pid, 0).unwrap();
    let text = info_of(fd.as_raw_fd());
    assert!(text.contains(&format!("\nPid:\t{pid}\nNSpid:\t{pid}\n")), "{text}");
    unsafe { libc::kill(pid, libc::SIGKILL) };
    wait(pid);
    let text = info_of(fd.as_raw_fd());
    assert!(text.contains("\nPid:\t-1\nNSpid:\t-1\n"), "{text}");
    let init = super::sys::clone(libc::CLONE_NEWPID as u64, pause).unwrap();
    let fd = open(init, 0).unwrap();
    let text = info_of(fd.as_raw_fd());
    assert!(text.contains(&format!("\nPid:\t{init}\nNSpid:\t{init}\t1\n")), "{text}");
    unsafe { libc::kill(init, libc::SIGKILL) };
    wait(init);
}

fn namespaces() {
    let pid = fork(pause);
    let fd = open(pid, 0).unwrap();
    let kinds = ["cgroup", "ipc", "mnt", "net", "pid", "pid_for_children", "time", "time_for_children", "user", "uts"];
    for (i, kind) in kinds.iter().enumerate() {
        let ns = call(libc::SYS_ioctl, [fd.as_raw_fd() as u64, 0xff01 + i as u64, 0, 0, 0, 0]).unwrap() as i32;
        let ns = unsafe { OwnedFd::from_raw_fd(ns) };
        let shown = std::fs::read_link(format!("/proc/self/fd/{}", ns.as_raw_fd())).unwrap();
        assert_eq!(shown, std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap());
    }
    assert_eq!(call(libc::SYS_ioctl, [fd.as_raw_fd() as u64, 0xff01, 1, 0, 0, 0]), Err(libc::EINVAL));
    unsafe { libc::kill(pid, libc::SIGKILL) };
    wait(pid);
    assert_eq!(call(libc::SYS_ioctl, [fd.as_raw_fd() as u64, 0xff01, 0, 0, 0, 0]), Err(libc::ESRCH));
}
