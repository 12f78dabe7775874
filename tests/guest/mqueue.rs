//! POSIX message queues: mq_open(3) and its family, mq_notify(3).
use std::ffi::CString;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use crate::Case;
use crate::sys::{call, errno, fork, handle, in_child, ok, pipe, read_byte, wait, write_byte};

/// The cases of this area.
pub const CASES: &[Case] = &[
    ("mq_priorities", priorities),
    ("mq_waiting", waiting),
    ("mq_attributes", attributes),
    ("mq_names", names),
    ("mq_notify_signal", notify_signal),
    ("mq_notify_thread", notify_thread),
    ("mq_refusals", refusals),
    ("mq_mounted", mounted),
];

fn name(what: &str) -> CString {
    CString::new(format!("/guest-{what}-{}", std::process::id())).unwrap()
}

fn attr(messages: i64, size: i64) -> libc::mq_attr {
    let mut a: libc::mq_attr = unsafe { std::mem::zeroed() };
    (a.mq_maxmsg, a.mq_msgsize) = (messages, size);
    a
}

fn open(name: &CString, flags: i32, attr: Option<&libc::mq_attr>) -> Result<i32, i32> {
    let attr = attr.map_or(std::ptr::null(), std::ptr::from_ref);
    ok(unsafe { libc::mq_open(name.as_ptr(), flags, 0o600, attr) }).map(|fd| fd as i32)
}

fn send(fd: i32, text: &str, priority: u32) -> Result<i64, i32> {
    ok(unsafe { libc::mq_send(fd, text.as_ptr().cast(), text.len(), priority) })
}

fn receive(fd: i32) -> Result<(String, u32), i32> {
    let (mut text, mut priority) = ([0_u8; 8192], 0);
    let n = unsafe { libc::mq_receive(fd, text.as_mut_ptr().cast(), text.len(), &raw mut priority) };
    if n < 0 { Err(errno()) } else { Ok((String::from_utf8(text[..n as usize].to_vec()).unwrap(), priority)) }
}

fn unlink(name: &CString) -> Result<i64, i32> {
    ok(unsafe { libc::mq_unlink(name.as_ptr()) })
}

const CREATE: i32 = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR;

fn until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "it never became true");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn priorities() {
    let n = name("prio");
    let fd = open(&n, CREATE, None).unwrap();
    for (text, priority) in [("a", 1), ("b", 5), ("c", 1), ("", 0), ("d", 32767)] {
        send(fd, text, priority).unwrap();
    }
    let all: Vec<_> = (0..5).map(|_| receive(fd).unwrap()).collect();
    let wanted = [("d", 32767), ("b", 5), ("a", 1), ("c", 1), ("", 0)];
    assert!(all.iter().zip(wanted).all(|(a, b)| (a.0.as_str(), a.1) == b), "{all:?}");
    unlink(&n).unwrap();
    // It lives on while it is open.
    send(fd, "late", 3).unwrap();
    in_child(|| assert_eq!(receive(fd), Ok(("late".into(), 3))));
    assert_eq!(open(&n, libc::O_RDWR, None), Err(libc::ENOENT));
}

fn timed(fd: i32, sec: i64, nsec: i64) -> Result<i64, i32> {
    let mut now: libc::timespec = unsafe { std::mem::zeroed() };
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut now) };
    let at = libc::timespec { tv_sec: if sec < 0 { sec } else { now.tv_sec + sec }, tv_nsec: nsec };
    let mut text = [0_u8; 8192];
    ok(unsafe { libc::mq_timedreceive(fd, text.as_mut_ptr().cast(), text.len(), std::ptr::null_mut(), &raw const at) }
        as i64)
}

fn waiting() {
    extern "C" fn nothing(_: i32) {}
    let n = name("wait");
    let fd = open(&n, CREATE, Some(&attr(2, 100))).unwrap();
    let child = fork(|| i32::from(receive(fd) != Ok(("x".into(), 7))));
    send(fd, "x", 7).unwrap();
    assert_eq!(wait(child), 0);
    send(fd, "1", 1).unwrap();
    send(fd, "2", 1).unwrap();
    let mut p = libc::pollfd { fd, events: libc::POLLIN | libc::POLLOUT, revents: 0 };
    assert_eq!(unsafe { libc::poll(&raw mut p, 1, 0) }, 1);
    assert_eq!(p.revents, libc::POLLIN, "full");
    let child = fork(|| i32::from(send(fd, "3", 9) != Ok(0)));
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(receive(fd).unwrap().0, "1");
    assert_eq!(wait(child), 0);
    assert_eq!(receive(fd).unwrap().0, "3");
    assert_eq!(receive(fd).unwrap().0, "2");
    assert_eq!(unsafe { libc::poll(&raw mut p, 1, 0) }, 1);
    assert_eq!(p.revents, libc::POLLOUT, "empty");
    assert_eq!(timed(fd, 0, 0), Err(libc::ETIMEDOUT));
    assert_eq!(timed(fd, 0, 1_000_000_000), Err(libc::EINVAL));
    assert_eq!(timed(fd, -1, 0), Err(libc::EINVAL));
    let child = fork(|| {
        handle(libc::SIGALRM, nothing as *const () as usize, 0);
        let timer = libc::itimerval {
            it_interval: libc::timeval { tv_sec: 0, tv_usec: 20_000 },
            it_value: libc::timeval { tv_sec: 0, tv_usec: 20_000 },
        };
        unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
        i32::from(receive(fd) != Err(libc::EINTR))
    });
    assert_eq!(wait(child), 0);
    unlink(&n).unwrap();
}

fn attributes() {
    let n = name("attr");
    let fd = open(&n, CREATE | libc::O_NONBLOCK, Some(&attr(3, 64))).unwrap();
    let get = || {
        let mut a = attr(0, 0);
        assert_eq!(unsafe { libc::mq_getattr(fd, &raw mut a) }, 0);
        (a.mq_flags, a.mq_maxmsg, a.mq_msgsize, a.mq_curmsgs)
    };
    assert_eq!(get(), (i64::from(libc::O_NONBLOCK), 3, 64, 0));
    assert_eq!(receive(fd), Err(libc::EAGAIN));
    for _ in 0..3 {
        send(fd, "x", 0).unwrap();
    }
    assert_eq!(send(fd, "x", 0), Err(libc::EAGAIN));
    assert_eq!(get().3, 3);
    let mut new = attr(99, 99);
    new.mq_flags = 1;
    assert_eq!(ok(unsafe { libc::mq_setattr(fd, &raw const new, std::ptr::null_mut()) }), Err(libc::EINVAL));
    new.mq_flags = 0;
    assert_eq!(ok(unsafe { libc::mq_setattr(fd, &raw const new, std::ptr::null_mut()) }), Ok(0));
    assert_eq!(get(), (0, 3, 64, 3));
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::fstat(fd, &raw mut st) }, 0);
    assert_eq!((st.st_mode, st.st_size), (libc::S_IFREG | 0o600, 80));
    let mut text = [0_u8; 80];
    let n2 = unsafe { libc::read(fd, text.as_mut_ptr().cast(), 80) };
    let text = String::from_utf8_lossy(&text[..n2 as usize]).into_owned();
    assert!(text.starts_with("QSIZE:3 ") && text.contains("NOTIFY:0"), "{text}");
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_GETFD) }, libc::FD_CLOEXEC);
    unlink(&n).unwrap();
}

fn names() {
    let n = name("names");
    let raw = |name: &str, flags: i32| {
        let name = CString::new(name).unwrap();
        call(libc::SYS_mq_open, [name.as_ptr() as u64, flags as u64, 0o600, 0, 0, 0])
    };
    assert_eq!(raw("", CREATE), Err(libc::ENOENT));
    assert_eq!(raw("/x", CREATE), Err(libc::EACCES));
    assert_eq!(raw("a/b", CREATE), Err(libc::EACCES));
    assert_eq!(raw(".", CREATE), Err(libc::EACCES));
    assert_eq!(raw(&"n".repeat(256), CREATE), Err(libc::ENAMETOOLONG));
    assert_eq!(open(&n, libc::O_RDWR, None), Err(libc::ENOENT));
    let fd = open(&n, CREATE, None).unwrap();
    assert_eq!(open(&n, CREATE, None), Err(libc::EEXIST));
    assert_eq!(open(&n, 3, None), Err(libc::EINVAL));
    let reader = open(&n, libc::O_RDONLY, None).unwrap();
    assert_eq!(send(reader, "x", 0), Err(libc::EBADF));
    let writer = open(&n, libc::O_WRONLY, None).unwrap();
    assert_eq!(receive(writer), Err(libc::EBADF));
    in_child(|| {
        unsafe {
            assert_eq!(libc::setresgid(1000, 1000, 1000), 0);
            assert_eq!(libc::setresuid(1000, 1000, 1000), 0);
        }
        assert_eq!(open(&n, libc::O_RDONLY, None), Err(libc::EACCES));
        assert!([Err(libc::EPERM), Err(libc::EACCES)].contains(&unlink(&n)));
        let own = name("own");
        assert_eq!(open(&own, CREATE, Some(&attr(11, 100))), Err(libc::EINVAL), "beyond msg_max");
        let none = libc::rlimit { rlim_cur: 10_000, rlim_max: 10_000 };
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MSGQUEUE, &raw const none) }, 0);
        assert_eq!(open(&own, CREATE, Some(&attr(10, 8192))), Err(libc::EMFILE));
        assert!(open(&own, CREATE, Some(&attr(5, 100))).is_ok());
        unlink(&own).unwrap();
    });
    // Another IPC namespace has other queues.
    in_child(|| {
        call(libc::SYS_unshare, [libc::CLONE_NEWIPC as u64, 0, 0, 0, 0, 0]).unwrap();
        assert_eq!(open(&n, libc::O_RDWR, None), Err(libc::ENOENT));
        send(fd, "still", 0).unwrap();
    });
    assert_eq!(receive(fd).unwrap().0, "still");
    unlink(&n).unwrap();
    assert_eq!(unlink(&n), Err(libc::ENOENT));
}

static VALUE: AtomicI32 = AtomicI32::new(0);
static CODE: AtomicI32 = AtomicI32::new(0);
static PID: AtomicI32 = AtomicI32::new(0);

fn event(kind: i32, value: i32) -> libc::sigevent {
    let mut e: libc::sigevent = unsafe { std::mem::zeroed() };
    e.sigev_notify = kind;
    e.sigev_signo = libc::SIGUSR1;
    e.sigev_value.sival_ptr = value as usize as *mut libc::c_void;
    e
}

fn notify(fd: i32, event: Option<&libc::sigevent>) -> Result<i64, i32> {
    ok(unsafe { libc::mq_notify(fd, event.map_or(std::ptr::null(), std::ptr::from_ref)) })
}

fn notify_signal() {
    extern "C" fn told(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        unsafe {
            CODE.store((*info).si_code, Ordering::SeqCst);
            PID.store((*info).si_pid(), Ordering::SeqCst);
            VALUE.store((*info).si_value().sival_ptr as usize as i32, Ordering::SeqCst);
        }
    }
    let n = name("notify");
    let fd = open(&n, CREATE, None).unwrap();
    handle(libc::SIGUSR1, told as *const () as usize, libc::SA_SIGINFO);
    let signal = event(libc::SIGEV_SIGNAL, 42);
    notify(fd, Some(&signal)).unwrap();
    assert_eq!(notify(fd, Some(&signal)), Err(libc::EBUSY));
    in_child(|| assert_eq!(notify(fd, Some(&event(libc::SIGEV_NONE, 0))), Err(libc::EBUSY)));
    let child = fork(|| i32::from(send(fd, "x", 0) != Ok(0)));
    until(|| VALUE.load(Ordering::SeqCst) == 42);
    assert_eq!((CODE.load(Ordering::SeqCst), PID.load(Ordering::SeqCst)), (-3, child), "SI_MESGQ");
    wait(child);
    // Once only, and only when the queue was empty.
    VALUE.store(0, Ordering::SeqCst);
    notify(fd, Some(&signal)).unwrap();
    send(fd, "not empty", 0).unwrap();
    notify(fd, None).unwrap();
    notify(fd, None).unwrap();
    receive(fd).unwrap();
    receive(fd).unwrap();
    send(fd, "nobody", 0).unwrap();
    assert_eq!(VALUE.load(Ordering::SeqCst), 0);
    receive(fd).unwrap();
    // A registration goes with its process.
    in_child(|| notify(fd, Some(&event(libc::SIGEV_NONE, 0))).map(|_| ()).unwrap());
    notify(fd, Some(&signal)).unwrap();
    // Whoever waits for the message gets it, and nobody is told.
    let (r, w) = pipe();
    let child = fork(|| {
        write_byte(w);
        i32::from(receive(fd).is_err())
    });
    read_byte(r);
    std::thread::sleep(Duration::from_millis(50));
    send(fd, "direct", 0).unwrap();
    assert_eq!(wait(child), 0);
    notify(fd, None).unwrap();
    unlink(&n).unwrap();
}

fn notify_thread() {
    extern "C" fn told(value: libc::sigval) {
        VALUE.store(value.sival_ptr as usize as i32, Ordering::SeqCst);
    }
    let n = name("thread");
    let fd = open(&n, CREATE, None).unwrap();
    // struct sigevent with the function where the union is.
    let mut e = [0_u64; 8];
    e[0] = 77;
    e[1] = 2 << 32;
    e[2] = told as *const () as u64;
    for round in 0..2 {
        VALUE.store(0, Ordering::SeqCst);
        assert_eq!(ok(unsafe { libc::mq_notify(fd, e.as_ptr().cast()) }), Ok(0), "{round}");
        send(fd, "x", 0).unwrap();
        until(|| VALUE.load(Ordering::SeqCst) == 77);
        receive(fd).unwrap();
    }
    unlink(&n).unwrap();
}

fn refusals() {
    let n = name("bad");
    for (messages, size) in [(0, 10), (10, 0), (-1, 10), (10, -1), (65537, 10), (10, (16 << 20) + 1)] {
        assert_eq!(open(&n, CREATE, Some(&attr(messages, size))), Err(libc::EINVAL), "{messages} {size}");
    }
    let fd = open(&n, CREATE, Some(&attr(4, 16))).unwrap();
    assert_eq!(send(fd, "12345678901234567", 0), Err(libc::EMSGSIZE));
    assert_eq!(send(fd, "x", 32768), Err(libc::EINVAL));
    let mut small = [0_u8; 15];
    let r = unsafe { libc::mq_receive(fd, small.as_mut_ptr().cast(), 15, std::ptr::null_mut()) };
    assert_eq!(ok(r as i64), Err(libc::EMSGSIZE));
    assert_eq!(call(libc::SYS_mq_timedsend, [fd as u64, 8, 4, 0, 0, 0]), Err(libc::EFAULT));
    assert_eq!(call(libc::SYS_mq_timedsend, [fd as u64, n.as_ptr() as u64, 4, 0, 8, 0]), Err(libc::EFAULT));
    assert_eq!(call(libc::SYS_mq_timedsend, [0, n.as_ptr() as u64, 4, 0, 0, 0]), Err(libc::EBADF));
    assert_eq!(call(libc::SYS_mq_notify, [0, 0, 0, 0, 0, 0]), Err(libc::EBADF));
    assert_eq!(call(libc::SYS_mq_getsetattr, [0, 0, 0, 0, 0, 0]), Err(libc::EBADF));
    let mut e = event(libc::SIGEV_SIGNAL, 0);
    e.sigev_signo = 65;
    assert_eq!(notify(fd, Some(&e)), Err(libc::EINVAL));
    e.sigev_notify = 9;
    assert_eq!(notify(fd, Some(&e)), Err(libc::EINVAL));
    assert_eq!(call(libc::SYS_mq_notify, [fd as u64, 8, 0, 0, 0, 0]), Err(libc::EFAULT));
    assert_eq!(call(libc::SYS_mq_unlink, [8, 0, 0, 0, 0, 0]), Err(libc::EFAULT));
    unlink(&n).unwrap();
}

fn mounted() {
    let dir = super::own_path("mqueue");
    std::fs::create_dir(&dir).unwrap();
    in_child(|| {
        call(libc::SYS_unshare, [(libc::CLONE_NEWIPC | libc::CLONE_NEWNS) as u64, 0, 0, 0, 0, 0]).unwrap();
        super::namespaces::mount("none", "/", "none", libc::MS_REC | libc::MS_PRIVATE).unwrap();
        super::namespaces::mount("mqueue", &dir, "mqueue", 0).unwrap();
        let n = CString::new("/seen").unwrap();
        let fd = open(&n, CREATE, None).unwrap();
        send(fd, "12345", 0).unwrap();
        let names: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["seen"]);
        let text = std::fs::read_to_string(format!("{dir}/seen")).unwrap();
        assert!(text.starts_with("QSIZE:5 "), "{text}");
        std::fs::write(format!("{dir}/made"), "").unwrap_or(());
        assert!(std::fs::metadata(format!("{dir}/made")).is_ok());
        assert!(open(&CString::new("/made").unwrap(), libc::O_RDWR, None).is_ok());
        std::fs::remove_file(format!("{dir}/seen")).unwrap();
        assert_eq!(open(&n, libc::O_RDWR, None), Err(libc::ENOENT));
        assert!(std::fs::create_dir(format!("{dir}/sub")).is_err());
    });
    std::fs::remove_dir(&dir).unwrap();
}
