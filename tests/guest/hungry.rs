//! Programs that take all of one thing they can get. Not in the list of cases, as the host would pay: `tests/tests/bounds.rs` runs
//! them in sandboxes with little memory. Each prints how much it got and the error number that ended it.
use super::Case;
use super::sys::{call, fork, ok, wait};

pub const HUNGRY: &[Case] = &[
    ("hungry_pipes", pipes),
    ("hungry_sockets", sockets),
    ("hungry_descriptors", descriptors),
    ("hungry_tables", tables),
    ("hungry_tasks", tasks),
    ("hungry_names", names),
    ("hungry_interest", interest),
    ("hungry_signals", signals),
    ("hungry_mappings", mappings),
    ("hungry_groups", groups),
    ("hungry_texts", texts),
    ("hungry_mounts", mounts),
    ("hungry_forks", large_forks),
];

/// Runs a hungry program in a process group of its own. At the limit whoever writes to a page that a fork has shared is killed, as by
/// Linux's out-of-memory killer, and the program may be that one; who judges it has all it needs before.
pub fn judge(case: fn()) {
    println!("judged:");
    let pid = fork(|| {
        unsafe { libc::setpgid(0, 0) };
        case();
        0
    });
    let status = wait(pid);
    unsafe { libc::kill(-pid, libc::SIGKILL) };
    if libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL {
        println!("killed, then error {}", libc::ENOMEM);
        return;
    }
    assert_eq!(status, 0);
}

/// As many descriptors as there may be.
fn raise_limit() {
    let most = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const most) };
}

/// Calls `take` until it fails with something, at most `most` times.
fn take_all(what: &str, most: usize, mut take: impl FnMut(usize) -> Result<(), i32>) {
    for n in 0..most {
        if let Err(e) = take(n) {
            println!("{what}: {n}, then error {e}");
            assert!(
                [libc::ENOMEM, libc::EMFILE, libc::ENFILE, libc::EAGAIN, libc::ENOBUFS, libc::ENOSPC, libc::ENOLCK]
                    .contains(&e),
                "{what}: error {e}"
            );
            return;
        }
    }
    println!("{what}: all {most}");
}

/// Writes until the descriptor takes no more. What ends it early is no failure unless it is the first byte.
fn fill(fd: i32) -> Result<usize, i32> {
    let bytes = [b'x'; 4096];
    let mut total = 0;
    loop {
        match ok(unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) } as i64) {
            Ok(n) => total += n as usize,
            Err(libc::EAGAIN) => return Ok(total),
            Err(e) if total == 0 => return Err(e),
            Err(_) => return Ok(total),
        }
    }
}

fn pipes() {
    raise_limit();
    take_all("pipes full of data", 100_000, |_| {
        let mut fds = [0; 2];
        ok(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_NONBLOCK) })?;
        fill(fds[1]).map(|_| ())
    });
}

fn sockets() {
    raise_limit();
    for kind in [libc::SOCK_STREAM, libc::SOCK_DGRAM] {
        take_all("socket pairs full of data", 100_000, |_| {
            let mut fds = [0; 2];
            ok(unsafe { libc::socketpair(libc::AF_UNIX, kind | libc::SOCK_NONBLOCK, 0, fds.as_mut_ptr()) })?;
            fill(fds[0]).map(|_| ())
        });
        unsafe { libc::close_range(3, u32::MAX, 0) };
    }
}

fn descriptors() {
    raise_limit();
    take_all("eventfds", 1 << 20, |_| ok(unsafe { libc::eventfd(0, 0) }).map(|_| ()));
}

fn kill_all(made: &[i32]) {
    for &pid in made {
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}

/// A child that waits for a signal; Err where fork fails.
fn waiting_child(first: impl FnOnce()) -> Result<i32, i32> {
    let pid = call(libc::SYS_fork, [0; 6])?;
    if pid == 0 {
        first();
        loop {
            unsafe { libc::pause() };
        }
    }
    Ok(pid as i32)
}

/// Children, each with a copy of a large descriptor table.
fn tables() {
    raise_limit();
    assert_eq!(ok(unsafe { libc::dup2(0, 100_000) }), Ok(100_000));
    let mut made = Vec::new();
    take_all("copies of a table", 2000, |_| waiting_child(|| ()).map(|pid| made.push(pid)));
    kill_all(&made);
}

fn tasks() {
    let mut made = Vec::new();
    take_all("children", 40_000, |_| waiting_child(|| ()).map(|pid| made.push(pid)));
    kill_all(&made);
}

/// Children of a process with much memory, which do not look at it, or at every other MiB.
fn large_forks() {
    let len = 8 << 20;
    let p = super::sys::map(len, 3);
    (0..len).step_by(4096).for_each(|at| unsafe { p.add(at).write(1) });
    let mut made = Vec::new();
    take_all("large forks", 40_000, |n| {
        let look = || (0..len).step_by(2 << 20).for_each(|at| assert_eq!(unsafe { p.add(at).read_volatile() }, 1));
        waiting_child(|| {
            if n % 2 == 0 {
                look();
            }
        })
        .map(|pid| made.push(pid))
    });
    kill_all(&made);
}

fn names() {
    let dir = super::own_path("names");
    std::fs::create_dir(&dir).unwrap();
    let target = "t".repeat(4000);
    take_all("long symbolic links", 100_000, |n| {
        std::os::unix::fs::symlink(&target, format!("{dir}/{n}")).map_err(|e| e.raw_os_error().unwrap_or(0))
    });
}

/// Items of epoll instances.
fn interest() {
    raise_limit();
    let fds: Vec<i32> = (0..1000).map(|_| unsafe { libc::eventfd(1, 0) }).collect();
    let mut epoll = 0;
    take_all("items of epoll instances", 1 << 20, |n| {
        if n % fds.len() == 0 {
            epoll = ok(unsafe { libc::epoll_create1(0) })? as i32;
        }
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        ok(unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fds[n % fds.len()], &raw mut event) }).map(|_| ())
    });
    // What is added and removed again is not kept.
    for _ in 0..20_000 {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        assert_eq!(unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, fds[0], &raw mut event) }, 0);
        assert_eq!(unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fds[0], &raw mut event) }, 0);
    }
}

/// Queued signals, then timers.
fn signals() {
    let most = libc::rlimit { rlim_cur: 1 << 30, rlim_max: 1 << 30 };
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_SIGPENDING, &raw const most) }, 0);
    let signal = libc::SIGRTMIN();
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    unsafe {
        libc::sigaddset(&raw mut set, signal);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
    let value = libc::sigval { sival_ptr: std::ptr::null_mut() };
    take_all("queued signals", 1 << 20, |_| ok(unsafe { libc::sigqueue(libc::getpid(), signal, value) }).map(|_| ()));
    for _ in 0..1000 {
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        assert_eq!(unsafe { libc::sigtimedwait(&raw const set, std::ptr::null_mut(), &raw const none) }, signal);
    }
    take_all("timers", 1 << 20, |_| {
        let mut timer = std::ptr::null_mut();
        ok(unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, std::ptr::null_mut(), &raw mut timer) }).map(|_| ())
    });
}

/// Mappings that do not join, and children with copies of them.
fn mappings() {
    for n in 0..20_000 {
        let prot = if n % 2 == 0 { libc::PROT_READ } else { libc::PROT_NONE };
        super::sys::map(4096, prot);
    }
    let mut made = Vec::new();
    take_all("copies of 20,000 mappings", 1000, |_| waiting_child(|| ()).map(|pid| made.push(pid)));
    kill_all(&made);
}

/// Children with supplementary groups of their own.
fn groups() {
    let mut made = Vec::new();
    take_all("children with many groups", 20_000, |n| {
        let list = vec![n as libc::gid_t; 65_536];
        ok(unsafe { libc::setgroups(list.len(), list.as_ptr()) })?;
        waiting_child(|| ()).map(|pid| made.push(pid))
    });
    kill_all(&made);
}

/// Long texts of /proc, each begun and left open.
fn texts() {
    raise_limit();
    for n in 0..2000 {
        let prot = if n % 2 == 0 { libc::PROT_READ } else { libc::PROT_NONE };
        super::sys::map(4096, prot);
    }
    take_all("texts of /proc/self/smaps", 100_000, |_| {
        let fd = ok(unsafe { libc::open(c"/proc/self/smaps".as_ptr(), libc::O_RDONLY) })? as i32;
        let mut byte = 0_u8;
        ok(unsafe { libc::read(fd, (&raw mut byte).cast(), 1) } as i64).map(|_| ())
    });
}

fn mounts() {
    let dir = super::own_path("mount");
    std::fs::create_dir(&dir).unwrap();
    take_all("mounts", 200_000, |n| {
        let at = format!("{dir}/{n}");
        std::fs::create_dir(&at).map_err(|e| e.raw_os_error().unwrap_or(0))?;
        let at = std::ffi::CString::new(at).unwrap();
        ok(unsafe { libc::mount(c"none".as_ptr(), at.as_ptr(), c"tmpfs".as_ptr(), 0, std::ptr::null()) }).map(|_| ())
    });
}
