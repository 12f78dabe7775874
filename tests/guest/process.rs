//! fork(2), clone(2), execve(2), exit and wait, identity, groups and sessions.
use std::ffi::CString;

use super::Case;
use super::sys::{call, errno, fork, in_child, ok, wait};

pub const CASES: &[Case] = &[
    ("fork_exit_status", exit_status),
    ("fork_many", fork_many),
    ("wait_echild", echild),
    ("waitid_nowait", waitid_nowait),
    ("vfork_shares", vfork_shares),
    ("exec_replaces", exec_replaces),
    ("exec_errors", exec_errors),
    ("exec_closes_cloexec", exec_cloexec),
    ("exec_from_thread", exec_from_thread),
    ("orphan_reparented", orphan),
    ("process_groups", groups),
    ("session", session),
    ("clone3_errors", clone3_errors),
    ("rusage_of_children", rusage),
    ("rlimits", rlimits),
    ("subreaper", subreaper),
    ("prctl_name", prctl_name),
    ("wait_many_children", many_children),
    ("exit_signal_after_exec", exit_signal_after_exec),
];

fn exit_status() {
    for code in [0, 1, 42, 255] {
        let status = wait(fork(|| code));
        assert!(libc::WIFEXITED(status));
        assert_eq!(libc::WEXITSTATUS(status), code);
    }
}

fn fork_many() {
    for _ in 0..100 {
        in_child(|| ());
    }
    let pids: Vec<i32> = (0..50).map(|i| fork(move || i)).collect();
    for (i, pid) in pids.iter().enumerate() {
        assert_eq!(libc::WEXITSTATUS(wait(*pid)), i as i32);
    }
}

fn echild() {
    let mut status = 0;
    assert_eq!(ok(unsafe { libc::waitpid(-1, &raw mut status, 0) }), Err(libc::ECHILD));
    assert_eq!(ok(unsafe { libc::waitpid(-1, &raw mut status, 0x4000_0000 >> 4) }), Err(libc::EINVAL));
    let pid = fork(|| {
        unsafe { libc::pause() };
        0
    });
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) }, 0);
    unsafe { libc::kill(pid, libc::SIGKILL) };
    let status = wait(pid);
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL);
}

fn waitid_nowait() {
    let pid = fork(|| 9);
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOWAIT;
    assert_eq!(unsafe { libc::waitid(libc::P_PID, pid as u32, &raw mut info, flags) }, 0);
    assert_eq!(info.si_signo, libc::SIGCHLD);
    assert_eq!(info.si_code, libc::CLD_EXITED);
    assert_eq!(unsafe { (info.si_pid(), info.si_status()) }, (pid, 9));
    assert_eq!(libc::WEXITSTATUS(wait(pid)), 9);
}

fn vfork_shares() {
    let mut shared = 1;
    let p = &raw mut shared;
    #[allow(deprecated)]
    let pid = unsafe { libc::vfork() };
    if pid == 0 {
        unsafe {
            p.write_volatile(2);
            libc::_exit(0);
        }
    }
    assert_eq!(unsafe { p.read_volatile() }, 2);
    wait(pid);
}

fn exec(path: &str, args: &[&str]) -> i32 {
    let path = CString::new(path).unwrap();
    let args: Vec<CString> = args.iter().map(|a| CString::new(*a).unwrap()).collect();
    let mut argv: Vec<*const libc::c_char> = args.iter().map(|a| a.as_ptr()).collect();
    argv.push(std::ptr::null());
    unsafe { libc::execv(path.as_ptr(), argv.as_ptr()) };
    errno()
}

fn exec_replaces() {
    let status = wait(fork(|| exec("/bin/sh", &["sh", "-c", "exit 17"])));
    assert_eq!(libc::WEXITSTATUS(status), 17);
    let status = wait(fork(|| exec("/bin/true", &["true"])));
    assert_eq!(status, 0);
}

fn exec_errors() {
    assert_eq!(exec("/nonexistent/x", &["x"]), libc::ENOENT);
    assert_eq!(exec("/etc/passwd", &["x"]), libc::EACCES);
    assert_eq!(exec("/etc", &["x"]), libc::EACCES);
    assert_eq!(exec("/etc/passwd/x", &["x"]), libc::ENOTDIR);
    let path = &crate::own_path("bad-elf");
    for content in [
        b"".as_slice(),
        b"\x7fELF",
        b"\x7fELF\x02\x01\x01garbage garbage garbage garbage garbage garbage garbage",
        b"plain text\n",
    ] {
        std::fs::write(path, content).unwrap();
        let name = CString::new(path.as_str()).unwrap();
        unsafe { libc::chmod(name.as_ptr(), 0o755) };
        assert_eq!(exec(path, &["x"]), libc::ENOEXEC);
    }
    std::fs::write(path, "#!/nonexistent/interpreter\n").unwrap();
    assert_eq!(exec(path, &["x"]), libc::ENOENT);
    std::fs::remove_file(path).unwrap();
}

fn exec_cloexec() {
    let mut fds = [0; 2];
    assert_eq!(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    let keep = unsafe { libc::dup(fds[1]) };
    let script = format!("test ! -e /proc/self/fd/{} && test -e /proc/self/fd/{keep}", fds[1]);
    let status = wait(fork(|| exec("/bin/sh", &["sh", "-c", &script])));
    assert_eq!(status, 0);
}

fn exec_from_thread() {
    let pid = fork(|| {
        std::thread::spawn(|| {
            loop {
                std::thread::sleep(std::time::Duration::from_secs(100));
            }
        });
        let me = unsafe { libc::getpid() };
        let script = format!("test $$ = {me}");
        std::thread::spawn(move || exec("/bin/sh", &["sh", "-c", &script])).join().unwrap_or(1)
    });
    assert_eq!(wait(pid), 0);
}

fn orphan() {
    let mut fds = [0; 2];
    assert_eq!(unsafe { libc::pipe(fds.as_mut_ptr()) }, 0);
    in_child(|| {
        let parent = unsafe { libc::getpid() };
        fork(move || {
            while unsafe { libc::getppid() } == parent {
                unsafe { libc::usleep(1000) };
            }
            unsafe { libc::write(fds[1], b"x".as_ptr().cast(), 1) };
            0
        });
    });
    let mut byte = [0_u8];
    assert_eq!(unsafe { libc::read(fds[0], byte.as_mut_ptr().cast(), 1) }, 1);
}

fn groups() {
    let pid = fork(|| {
        unsafe { libc::setpgid(0, 0) };
        assert_eq!(unsafe { libc::getpgrp() }, unsafe { libc::getpid() });
        unsafe { libc::pause() };
        0
    });
    let r = ok(unsafe { libc::setpgid(pid, pid) });
    assert!(r == Ok(0) || r == Err(libc::EACCES));
    while unsafe { libc::getpgid(pid) } != pid {
        unsafe { libc::usleep(1000) };
    }
    assert_eq!(unsafe { libc::kill(-pid, libc::SIGTERM) }, 0);
    assert_eq!(libc::WTERMSIG(wait(pid)), libc::SIGTERM);
    assert_eq!(ok(unsafe { libc::kill(-pid, 0) }), Err(libc::ESRCH));
    assert_eq!(ok(unsafe { libc::setpgid(999_999, 0) }), Err(libc::ESRCH));
    assert_eq!(ok(unsafe { libc::setpgid(0, -1) }), Err(libc::EINVAL));
}

fn session() {
    in_child(|| {
        let me = unsafe { libc::getpid() };
        assert_eq!(unsafe { libc::setsid() }, me);
        assert_eq!(unsafe { (libc::getsid(0), libc::getpgrp()) }, (me, me));
        assert_eq!(ok(unsafe { libc::setsid() }), Err(libc::EPERM));
    });
}

fn clone3_errors() {
    let zero = [0_u64; 11];
    assert_eq!(call(libc::SYS_clone3, [zero.as_ptr() as u64, 8, 0, 0, 0, 0]), Err(libc::EINVAL));
    assert_eq!(call(libc::SYS_clone3, [zero.as_ptr() as u64, 5000, 0, 0, 0, 0]), Err(libc::E2BIG));
    assert_eq!(call(libc::SYS_clone3, [16, 64, 0, 0, 0, 0]), Err(libc::EFAULT));
    let thread = libc::CLONE_THREAD as u64;
    assert_eq!(call(libc::SYS_clone, [thread, 0, 0, 0, 0, 0]), Err(libc::EINVAL));
    let sighand = libc::CLONE_SIGHAND as u64;
    assert_eq!(call(libc::SYS_clone, [sighand, 0, 0, 0, 0, 0]), Err(libc::EINVAL));
}

fn rusage() {
    in_child(|| {
        let mut x = 1_u64;
        let start = std::time::Instant::now();
        while start.elapsed().as_millis() < 50 {
            x = std::hint::black_box(x.wrapping_mul(31));
        }
    });
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage) }, 0);
    let us = usage.ru_utime.tv_sec * 1_000_000 + usage.ru_utime.tv_usec + usage.ru_stime.tv_usec;
    assert!(us > 5_000, "{us}");
}

fn rlimits() {
    let mut limit: libc::rlimit = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    let low = libc::rlimit { rlim_cur: 10, rlim_max: limit.rlim_max };
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const low) }, 0);
    let mut last = Ok(0);
    for _ in 0..12 {
        last = ok(unsafe { libc::dup(0) });
    }
    assert_eq!(last, Err(libc::EMFILE));
    assert_eq!(ok(unsafe { libc::dup2(0, 10) }), Err(libc::EBADF));
    assert_eq!(call(libc::SYS_getrlimit, [16, (&raw mut limit) as u64, 0, 0, 0, 0]), Err(libc::EINVAL));
    let upside_down = libc::rlimit { rlim_cur: 5, rlim_max: 4 };
    assert_eq!(ok(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const upside_down) }), Err(libc::EINVAL));
}

fn subreaper() {
    in_child(|| {
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) }, 0);
        in_child(|| {
            fork(|| {
                unsafe { libc::usleep(20_000) };
                33
            });
        });
        let mut status = 0;
        let pid = unsafe { libc::wait(&raw mut status) };
        assert!(pid > 0);
        assert_eq!(libc::WEXITSTATUS(status), 33);
    });
}

fn prctl_name() {
    let name = b"a-name-longer-than-15-bytes\0";
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) }, 0);
    let mut got = [0_u8; 16];
    assert_eq!(unsafe { libc::prctl(libc::PR_GET_NAME, got.as_mut_ptr()) }, 0);
    assert_eq!(&got, b"a-name-longer-t\0");
    assert_eq!(std::fs::read_to_string("/proc/self/comm").unwrap(), "a-name-longer-t\n");
    assert_eq!(ok(unsafe { libc::prctl(123_456, 0, 0, 0, 0) }), Err(libc::EINVAL));
}

fn many_children() {
    // Most sleep; those with news are found among them whatever is asked for.
    let sleepers: Vec<i32> = (0..60).map(|_| fork(|| unsafe { libc::pause() })).collect();
    let quick: Vec<i32> = (0..20).map(|i| fork(move || i)).collect();
    let mut seen = Vec::new();
    for _ in &quick {
        let mut status = 0;
        let pid = unsafe { libc::waitpid(-1, &raw mut status, 0) };
        assert_eq!(quick[libc::WEXITSTATUS(status) as usize], pid);
        seen.push(pid);
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), quick.len());
    let any = |options| ok(unsafe { libc::waitpid(-1, std::ptr::null_mut(), options) });
    assert_eq!(any(libc::WNOHANG), Ok(0));
    assert_eq!(any(libc::WNOHANG | libc::__WCLONE), Err(libc::ECHILD));
    unsafe { libc::kill(sleepers[30], libc::SIGSTOP) };
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(-1, &raw mut status, libc::WUNTRACED) }, sleepers[30]);
    assert!(libc::WIFSTOPPED(status));
    assert_eq!(unsafe { libc::waitpid(-1, &raw mut status, libc::WUNTRACED | libc::WNOHANG) }, 0);
    unsafe { libc::kill(sleepers[30], libc::SIGCONT) };
    // Not asked for, it stays.
    assert_eq!(unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) }, 0);
    assert_eq!(unsafe { libc::waitpid(-1, &raw mut status, libc::WCONTINUED) }, sleepers[30]);
    assert!(libc::WIFCONTINUED(status));
    sleepers.iter().for_each(|pid| assert_eq!(unsafe { libc::kill(*pid, libc::SIGKILL) }, 0));
    for _ in &sleepers {
        assert!(unsafe { libc::waitpid(-1, &raw mut status, 0) } > 0);
        assert_eq!(libc::WTERMSIG(status), libc::SIGKILL);
    }
    assert_eq!(ok(unsafe { libc::waitpid(-1, &raw mut status, 0) }), Err(libc::ECHILD));
}

fn exit_signal_after_exec() {
    // A child that was to end with SIGUSR1 must not send that to what its parent has become.
    let status = wait(fork(|| {
        let mut fds = [0; 2];
        assert_eq!(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        let child = call(libc::SYS_clone, [libc::SIGUSR1 as u64, 0, 0, 0, 0, 0]).unwrap();
        if child == 0 {
            // Its end is in sight when the parent executes.
            let mut byte = 0_u8;
            unsafe {
                libc::close(fds[1]);
                libc::read(fds[0], (&raw mut byte).cast(), 1);
                libc::_exit(0);
            }
        }
        let script = format!("until grep -q ') Z ' /proc/{child}/stat; do :; done; exit 9");
        exec("/bin/sh", &["sh", "-c", &script])
    }));
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 9, "{status:#x}");
}
