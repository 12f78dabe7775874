//! PID namespaces: birth, numbers, signals, death, what /proc shows. Root only.
use std::ffi::CString;
use std::os::fd::AsRawFd;

use super::Case;
use super::namespaces::{link, mount, open, pidfd, setns_call, unshare};
use super::sys::{call, clone, fork, handle, in_child, no_core, ok, pipe, read_byte, wait, write_byte};

pub const CASES: &[Case] = &[
    ("pidns_first_is_one", first_is_one),
    ("pidns_unshare", unshare_pid),
    ("pidns_depth", depth),
    ("pidns_setns", setns),
    ("pidns_death", death),
    ("pidns_death_waits_for_outside_parents", death_waits),
    ("pidns_signals_to_init", init_signals),
    ("pidns_init_faults", init_faults),
    ("pidns_init_dies_tracing", dies_tracing),
    ("pidns_reboot", reboot),
    ("pidns_kill_all", kill_all),
    ("pidns_proc", proc_of_mount),
    ("pidns_invisible_numbers", invisible),
    ("pidns_orphans", orphans),
    ("pidns_parent_death", parent_death),
    ("pidns_file_owners", file_owners),
    ("pidns_exec_from_thread", exec_from_thread),
    ("pidns_set_tid", set_tid),
    ("pidns_last_pid", last_pid),
];

pub(super) const NEWPID: u64 = libc::CLONE_NEWPID as u64;
pub(super) const NEWNS: u64 = libc::CLONE_NEWNS as u64;

pub(super) fn getpid() -> i32 {
    unsafe { libc::getpid() }
}

/// The numbers in a line of a status file.
fn line(status: &str, name: &str) -> Vec<i32> {
    let text = std::fs::read_to_string(status).unwrap();
    let found = text.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_else(|| panic!("no {name} in {text}"));
    found.split_whitespace().map(|n| n.parse().unwrap()).collect()
}

fn kill(pid: i32, signal: i32) -> Result<i64, i32> {
    ok(unsafe { libc::kill(pid, signal) })
}

pub(super) fn sleep_for_ever() -> i32 {
    loop {
        unsafe { libc::pause() };
    }
}

/// Whether the signal killed the process with this status.
fn killed(status: i32, signal: i32) -> bool {
    libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == signal
}

fn first_is_one() {
    let (from, to) = pipe();
    let child = clone(NEWPID, || {
        assert_eq!((getpid(), unsafe { libc::getppid() }), (1, 0));
        assert_eq!(call(libc::SYS_gettid, [0; 6]), Ok(1));
        let second = fork(|| {
            assert_eq!((getpid(), unsafe { libc::getppid() }), (2, 1));
            5
        });
        assert_eq!(second, 2);
        assert_eq!(libc::WEXITSTATUS(wait(second)), 5);
        assert_eq!(fork(|| 0), 3);
        wait(3);
        read_byte(from);
        7
    })
    .unwrap();
    let numbers = line(&format!("/proc/{child}/status"), "NSpid:");
    assert_eq!((numbers[numbers.len() - 2], numbers[numbers.len() - 1]), (child, 1));
    let groups = line(&format!("/proc/{child}/status"), "NStgid:");
    assert_eq!(groups, numbers);
    write_byte(to);
    assert_eq!(libc::WEXITSTATUS(wait(child)), 7);
}

fn unshare_pid() {
    in_child(|| {
        let own = getpid();
        let before = link("/proc/self/ns/pid");
        assert_eq!(link("/proc/self/ns/pid_for_children"), before);
        assert_eq!(unshare(NEWPID), Ok(0));
        assert_eq!(getpid(), own);
        assert_eq!(link("/proc/self/ns/pid"), before);
        // Nobody lives there yet.
        let missing = std::fs::read_link("/proc/self/ns/pid_for_children").unwrap_err();
        assert_eq!(missing.raw_os_error(), Some(libc::ENOENT));
        assert_eq!(unshare(NEWPID), Err(libc::EINVAL));
        assert_eq!(clone(NEWPID, || 0), Err(libc::EINVAL));
        let thread = (libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD) as u64;
        assert_eq!(call(libc::SYS_clone, [thread, 0, 0, 0, 0, 0]), Err(libc::EINVAL));
        let first = fork(|| {
            assert_eq!((getpid(), unsafe { libc::getppid() }), (1, 0));
            sleep_for_ever()
        });
        assert_ne!(link("/proc/self/ns/pid_for_children"), before);
        let second = fork(|| {
            // The parent is outside.
            assert_eq!((getpid(), unsafe { libc::getppid() }), (2, 0));
            3
        });
        assert_eq!(libc::WEXITSTATUS(wait(second)), 3);
        kill(first, libc::SIGKILL).unwrap();
        assert!(killed(wait(first), libc::SIGKILL));
        assert_eq!(ok(unsafe { libc::fork() }), Err(libc::ENOMEM));
        // The way back is open, and then a new one leads on.
        let own = open("/proc/self/ns/pid");
        assert_eq!(setns_call(own.as_raw_fd(), NEWPID), Ok(0));
        in_child(|| assert_ne!(getpid(), 1));
        assert_eq!(unshare(NEWPID), Ok(0));
        in_child(|| assert_eq!(getpid(), 1));
    });
}

fn descend() -> i32 {
    match clone(NEWPID, || {
        assert_eq!(getpid(), 1);
        descend()
    }) {
        Ok(child) => match libc::WEXITSTATUS(wait(child)) {
            n if n < 100 => n + 1,
            n => n,
        },
        Err(e) => {
            assert_eq!(e, libc::ENOSPC);
            0
        }
    }
}

fn depth() {
    let levels = descend();
    assert!((20..=32).contains(&levels), "{levels}");
}

fn setns() {
    let (from, to) = pipe();
    let (ready, tell) = pipe();
    let init = clone(NEWPID, || {
        // What setns makes of the caller: nothing.
        let inner = clone(NEWPID, || {
            read_byte(from);
            0
        });
        write_byte(tell);
        read_byte(from);
        wait(inner.unwrap());
        0
    })
    .unwrap();
    read_byte(ready);
    let file = open(&format!("/proc/{init}/ns/pid"));
    let fd = file.as_raw_fd();
    in_child(|| {
        let own = getpid();
        assert_eq!(setns_call(fd, libc::CLONE_NEWUTS as u64), Err(libc::EINVAL));
        assert_eq!(setns_call(1, 0), Err(libc::EINVAL));
        assert_eq!(setns_call(999, 0), Err(libc::EBADF));
        assert_eq!(setns_call(fd, NEWPID), Ok(0));
        assert_eq!(getpid(), own);
        let child = fork(|| {
            // 1 and 2 live there.
            assert!(getpid() > 2);
            assert_eq!(unsafe { libc::getppid() }, 0);
            // Not out again: what lies outside is no descendant.
            let outside = CString::new(format!("/proc/{own}/ns/pid")).unwrap();
            let out = unsafe { libc::open(outside.as_ptr(), libc::O_RDONLY) };
            assert!(out >= 0);
            assert_eq!(setns_call(out, NEWPID), Err(libc::EINVAL));
            // Nor is the caller's own any harm.
            let here = open(&format!("/proc/{init}/ns/pid"));
            assert_eq!(setns_call(here.as_raw_fd(), 0), Ok(0));
            in_child(|| assert!(getpid() > 2));
            11
        });
        assert_eq!(libc::WEXITSTATUS(wait(child)), 11);
        // A clone with a namespace of its own needs the pending one to be the caller's.
        assert_eq!(clone(NEWPID, || 0), Err(libc::EINVAL));
    });
    let by_pidfd = pidfd(init);
    in_child(|| {
        let fd = by_pidfd.as_raw_fd();
        assert_eq!(setns_call(fd, 0), Err(libc::EINVAL));
        assert_eq!(setns_call(fd, NEWPID | 1), Err(libc::EINVAL));
        assert_eq!(setns_call(fd, NEWPID | libc::CLONE_NEWUTS as u64), Ok(0));
        in_child(|| assert!(getpid() > 2));
    });
    in_child(|| {
        unsafe { libc::setuid(12345) };
        assert_eq!(setns_call(fd, NEWPID), Err(libc::EPERM));
        assert_eq!(unshare(NEWPID), Err(libc::EPERM));
        assert_eq!(clone(NEWPID, || 0), Err(libc::EPERM));
    });
    write_byte(to);
    write_byte(to);
    assert_eq!(wait(init), 0);
    // Who is gone lends nothing.
    in_child(|| assert_eq!(setns_call(by_pidfd.as_raw_fd(), NEWPID), Err(libc::ESRCH)));
}

fn death() {
    let (from, to) = pipe();
    let (pids, tell) = pipe();
    let init = clone(NEWPID, || {
        for _ in 0..5 {
            fork(|| {
                // Each with a child, a group of its own, and what might save it.
                unsafe { libc::setpgid(0, 0) };
                handle(libc::SIGTERM, libc::SIG_IGN, 0);
                fork(sleep_for_ever);
                sleep_for_ever()
            });
        }
        clone(NEWPID, || {
            fork(sleep_for_ever);
            clone(NEWPID, sleep_for_ever).unwrap();
            sleep_for_ever()
        })
        .unwrap();
        // A zombie that nobody will wait for.
        fork(|| 0);
        write_byte(tell);
        read_byte(from);
        21
    })
    .unwrap();
    read_byte(pids);
    let members: Vec<i32> = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|e| e.unwrap().file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| {
            std::fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(|s| {
                let numbers = s.lines().find_map(|l| l.strip_prefix("NSpid:")).unwrap_or_default();
                numbers.split_whitespace().count() > 1 && is_below(*pid, init)
            })
        })
        .collect();
    assert!(members.len() >= 8, "{members:?}");
    write_byte(to);
    assert_eq!(libc::WEXITSTATUS(wait(init)), 21);
    for pid in members {
        assert_eq!(kill(pid, 0), Err(libc::ESRCH));
    }
}

/// Whether `pid` has `ancestor` among its parents.
fn is_below(pid: i32, ancestor: i32) -> bool {
    let mut at = pid;
    while at > 1 {
        let Ok(status) = std::fs::read_to_string(format!("/proc/{at}/status")) else { return false };
        let parent = status.lines().find_map(|l| l.strip_prefix("PPid:")).map(|n| n.trim().parse().unwrap());
        match parent {
            Some(p) if p == ancestor => return true,
            Some(p) => at = p,
            None => return false,
        }
    }
    false
}

fn death_waits() {
    in_child(|| {
        assert_eq!(unshare(NEWPID), Ok(0));
        let (from, to) = pipe();
        let init = fork(|| {
            read_byte(from);
            9
        });
        let member = fork(sleep_for_ever);
        write_byte(to);
        // The member dies with the namespace; the init is complete only when its parent, which is outside, has waited for it.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let flags = libc::WEXITED | libc::WNOWAIT;
        assert_eq!(unsafe { libc::waitid(libc::P_PID, member as u32, &raw mut info, flags) }, 0);
        assert_eq!(unsafe { (info.si_code, info.si_status()) }, (libc::CLD_KILLED, libc::SIGKILL));
        let mut status = 0;
        for _ in 0..20 {
            assert_eq!(unsafe { libc::waitpid(init, &raw mut status, libc::WNOHANG) }, 0);
            unsafe { libc::usleep(1000) };
        }
        assert!(killed(wait(member), libc::SIGKILL));
        assert_eq!(libc::WEXITSTATUS(wait(init)), 9);
    });
}

static TAKEN: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(0);

extern "C" fn take(signal: i32) {
    TAKEN.store(signal, std::sync::atomic::Ordering::SeqCst);
}

fn taken() -> i32 {
    TAKEN.load(std::sync::atomic::Ordering::SeqCst)
}

fn init_signals() {
    let (ready, tell) = pipe();
    let init = clone(NEWPID, || {
        let child = fork(|| {
            for signal in [libc::SIGKILL, libc::SIGSTOP, libc::SIGTERM, libc::SIGINT] {
                assert_eq!(kill(1, signal), Ok(0));
            }
            0
        });
        assert_eq!(wait(child), 0);
        // Nor by its own hand.
        assert_eq!(kill(1, libc::SIGKILL), Ok(0));
        assert_eq!(kill(1, libc::SIGTERM), Ok(0));
        handle(libc::SIGUSR1, take as *const () as usize, 0);
        assert_eq!(wait(fork(|| kill(1, libc::SIGUSR1).map_or(1, |_| 0))), 0);
        assert_eq!(taken(), libc::SIGUSR1);
        // What is blocked stays pending though it would not act.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        unsafe {
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, libc::SIGTERM);
            libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        }
        assert_eq!(kill(1, libc::SIGTERM), Ok(0));
        let mut got = 0;
        assert_eq!(unsafe { libc::sigwait(&raw const set, &raw mut got) }, 0);
        assert_eq!(got, libc::SIGTERM);
        unsafe { libc::sigprocmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) };
        write_byte(tell);
        sleep_for_ever()
    })
    .unwrap();
    read_byte(ready);
    // From outside: those without a handler do nothing, SIGSTOP and SIGKILL act.
    assert_eq!(kill(init, libc::SIGTERM), Ok(0));
    assert_eq!(kill(init, libc::SIGSTOP), Ok(0));
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(init, &raw mut status, libc::WUNTRACED) }, init);
    assert!(libc::WIFSTOPPED(status));
    assert_eq!(kill(init, libc::SIGCONT), Ok(0));
    assert_eq!(unsafe { libc::waitpid(init, &raw mut status, libc::WCONTINUED) }, init);
    assert!(libc::WIFCONTINUED(status));
    assert_eq!(kill(init, libc::SIGKILL), Ok(0));
    assert!(killed(wait(init), libc::SIGKILL));
}

fn init_faults() {
    let init = clone(NEWPID, || {
        no_core();
        unsafe { std::ptr::without_provenance_mut::<u8>(8).write_volatile(1) };
        0
    });
    assert!(killed(wait(init.unwrap()), libc::SIGSEGV));
    let init = clone(NEWPID, || {
        no_core();
        unsafe { libc::abort() }
    });
    // abort(3) raises SIGABRT, which an init ignores, and then executes an instruction that faults.
    let status = wait(init.unwrap());
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) != libc::SIGABRT, "{status:#x}");
}

/// The init of a namespace ends while it traces a member: it lets the member go, and does not wait for it to be let go.
fn dies_tracing() {
    for thread in [false, true] {
        for options in [0, libc::PTRACE_O_TRACEEXIT] {
            let init = clone(NEWPID, || {
                let mut tid = 0_i32;
                let (from, to) = pipe();
                fork(|| {
                    if thread {
                        std::thread::spawn(move || {
                            write_tid(to);
                            sleep_for_ever()
                        });
                    } else {
                        write_tid(to);
                    }
                    sleep_for_ever()
                });
                assert_eq!(unsafe { libc::read(from, (&raw mut tid).cast(), 4) }, 4);
                ok(unsafe { libc::ptrace(libc::PTRACE_SEIZE, tid, 0, options) }).unwrap();
                9
            });
            assert_eq!(libc::WEXITSTATUS(wait(init.unwrap())), 9);
        }
    }
}

fn write_tid(to: i32) {
    let tid = unsafe { libc::syscall(libc::SYS_gettid) } as i32;
    assert_eq!(unsafe { libc::write(to, (&raw const tid).cast(), 4) }, 4);
}

fn reboot() {
    let op = |op: u32| call(libc::SYS_reboot, [0xfee1_dead, 672_274_793, op.into(), 0, 0, 0]);
    for (number, signal) in [
        (0x0123_4567_u32, libc::SIGHUP),
        (0xa1b2_c3d4, libc::SIGHUP),
        (0x4321_fedc, libc::SIGINT),
        (0xcdef_0123, libc::SIGINT),
    ] {
        let init = clone(NEWPID, || {
            assert_eq!(call(libc::SYS_reboot, [1, 672_274_793, number.into(), 0, 0, 0]), Err(libc::EINVAL));
            assert_eq!(op(0x89ab_cdef), Err(libc::EINVAL));
            fork(sleep_for_ever);
            fork(|| {
                let _ = op(number);
                3
            });
            sleep_for_ever()
        });
        let status = wait(init.unwrap());
        assert!(killed(status, signal), "{status:#x}");
    }
    let init = clone(NEWPID, || {
        unsafe { libc::setuid(12345) };
        assert_eq!(op(0x0123_4567), Err(libc::EPERM));
        0
    });
    assert_eq!(wait(init.unwrap()), 0);
}

fn kill_all() {
    let init = clone(NEWPID, || {
        assert_eq!(kill(-1, 0), Err(libc::ESRCH));
        let other = fork(sleep_for_ever);
        let below = clone(NEWPID, sleep_for_ever).unwrap();
        let sender = fork(|| {
            assert_eq!(kill(-1, 0), Ok(0));
            assert_eq!(kill(-1, libc::SIGKILL), Ok(0));
            4
        });
        assert!(killed(wait(other), libc::SIGKILL));
        assert!(killed(wait(below), libc::SIGKILL));
        assert_eq!(libc::WEXITSTATUS(wait(sender)), 4);
        // Alone again.
        assert_eq!(kill(-1, libc::SIGKILL), Err(libc::ESRCH));
        assert_eq!(kill(-1, 65), Err(libc::ESRCH));
        6
    });
    assert_eq!(libc::WEXITSTATUS(wait(init.unwrap())), 6);
}

fn processes() -> Vec<i32> {
    let mut all: Vec<i32> =
        std::fs::read_dir("/proc").unwrap().filter_map(|e| e.unwrap().file_name().to_str()?.parse().ok()).collect();
    all.sort_unstable();
    all
}

fn proc_of_mount() {
    let init = clone(NEWPID | NEWNS, || {
        assert_eq!(mount("none", "/", "none", libc::MS_REC | libc::MS_PRIVATE), Ok(0));
        // Still the mount of the namespace outside, which does not see it as 1.
        assert_ne!(link("/proc/self"), "1");
        assert_eq!(mount("proc", "/proc", "proc", 0), Ok(0));
        assert_eq!(link("/proc/self"), "1");
        assert_eq!(link("/proc/thread-self"), "1/task/1");
        assert_eq!(processes(), [1]);
        let child = fork(sleep_for_ever);
        assert_eq!(processes(), [1, child]);
        assert_eq!(line("/proc/2/status", "NSpid:"), [2]);
        assert_eq!(line("/proc/2/status", "PPid:"), [1]);
        assert_eq!(line("/proc/1/status", "PPid:"), [0]);
        assert!(std::fs::read_to_string("/proc/1/stat").unwrap().starts_with("1 ("));
        // One level down has numbers here and there.
        let below = clone(NEWPID, sleep_for_ever).unwrap();
        assert_eq!(line(&format!("/proc/{below}/status"), "NSpid:"), [below, 1]);
        assert_eq!(line(&format!("/proc/{below}/status"), "NStgid:"), [below, 1]);
        assert_eq!(line(&format!("/proc/{below}/status"), "NSpgid:").len(), 2);
        assert_eq!(line(&format!("/proc/{below}/status"), "NSsid:").len(), 2);
        0
    });
    assert_eq!(wait(init.unwrap()), 0);
}

static SENDER: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(-1);

extern "C" fn note_sender(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    SENDER.store(unsafe { (*info).si_pid() }, std::sync::atomic::Ordering::SeqCst);
}

fn invisible() {
    let (ready, tell) = pipe();
    let mut ends = [0; 2];
    assert_eq!(unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, ends.as_mut_ptr()) }, 0);
    let init = clone(NEWPID, || {
        // Group and session were made outside.
        assert_eq!(unsafe { (libc::getpgrp(), libc::getsid(0), libc::getppid()) }, (0, 0, 0));
        let mut peer: libc::ucred = unsafe { std::mem::zeroed() };
        let mut len = size_of::<libc::ucred>() as u32;
        let r = unsafe {
            libc::getsockopt(ends[0], libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut len)
        };
        assert_eq!((r, peer.pid), (0, 0));
        handle(libc::SIGUSR2, note_sender as *const () as usize, libc::SA_SIGINFO);
        write_byte(tell);
        while SENDER.load(std::sync::atomic::Ordering::SeqCst) == -1 {
            unsafe { libc::usleep(1000) };
        }
        assert_eq!(SENDER.load(std::sync::atomic::Ordering::SeqCst), 0);
        assert_eq!(unsafe { libc::setsid() }, 1);
        assert_eq!(unsafe { (libc::getpgrp(), libc::getsid(0)) }, (1, 1));
        0
    })
    .unwrap();
    read_byte(ready);
    kill(init, libc::SIGUSR2).unwrap();
    assert_eq!(wait(init), 0);
}

fn orphans() {
    let init = clone(NEWPID, || {
        let parent = fork(|| {
            fork(|| {
                while unsafe { libc::getppid() } == 2 {
                    unsafe { libc::usleep(1000) };
                }
                assert_eq!(unsafe { libc::getppid() }, 1);
                13
            });
            0
        });
        assert_eq!(wait(parent), 0);
        let mut status = 0;
        assert_eq!(unsafe { libc::wait(&raw mut status) }, 3);
        assert_eq!(libc::WEXITSTATUS(status), 13);
        // A subreaper outside takes nobody from within.
        0
    });
    assert_eq!(wait(init.unwrap()), 0);
    in_child(|| {
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) }, 0);
        let init = clone(NEWPID, || {
            assert_eq!(
                wait(fork(|| {
                    fork(|| {
                        unsafe { libc::usleep(10_000) };
                        14
                    });
                    0
                })),
                0
            );
            let mut status = 0;
            assert!(unsafe { libc::wait(&raw mut status) } > 0);
            libc::WEXITSTATUS(status)
        });
        assert_eq!(libc::WEXITSTATUS(wait(init.unwrap())), 14);
    });
}

fn exec_from_thread() {
    let init = clone(NEWPID, || {
        // Some number for the thread that is neither.
        wait(fork(|| 0));
        let path = c"/bin/sh";
        std::thread::spawn(sleep_for_ever);
        let script = CString::new("test $$ = 1 && exit 23; exit 1").unwrap();
        std::thread::spawn(move || {
            let argv = [c"sh".as_ptr(), c"-c".as_ptr(), script.as_ptr(), std::ptr::null()];
            unsafe { libc::execv(path.as_ptr(), argv.as_ptr()) };
        })
        .join()
        .unwrap();
        1
    })
    .unwrap();
    let handle = pidfd(init);
    let mut poll = libc::pollfd { fd: handle.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    assert_eq!(unsafe { libc::poll(&raw mut poll, 1, -1) }, 1);
    let status = wait(init);
    assert_eq!(libc::WEXITSTATUS(status), 23, "{status:#x}");
}

/// clone3 with chosen numbers, as fork.
pub(super) fn clone3_tid(flags: u64, tids: &[i32], child: impl FnOnce() -> i32) -> Result<i32, i32> {
    let args: [u64; 11] = [flags, 0, 0, 0, libc::SIGCHLD as u64, 0, 0, 0, tids.as_ptr() as u64, tids.len() as u64, 0];
    let r = call(libc::SYS_clone3, [args.as_ptr() as u64, 88, 0, 0, 0, 0])?;
    if r == 0 {
        let status = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(101);
        unsafe { libc::_exit(status) }
    }
    Ok(r as i32)
}

fn set_tid() {
    let init = clone(NEWPID, || {
        let child = clone3_tid(0, &[77], getpid).unwrap();
        assert_eq!((child, libc::WEXITSTATUS(wait(77))), (77, 77));
        let child = clone3_tid(0, &[77], sleep_for_ever).unwrap();
        assert_eq!(clone3_tid(0, &[77], || 0), Err(libc::EEXIST));
        assert_eq!(clone3_tid(0, &[0], || 0), Err(libc::EINVAL));
        assert_eq!(clone3_tid(0, &[-5], || 0), Err(libc::EINVAL));
        assert_eq!(clone3_tid(0, &[0x7fff_ffff], || 0), Err(libc::EINVAL));
        assert_eq!(clone3_tid(0, &[1; 33], || 0), Err(libc::EINVAL));
        // The first of a namespace is 1, and its number outside can be chosen with it.
        assert_eq!(clone3_tid(NEWPID, &[5], || 0), Err(libc::EINVAL));
        let below = clone3_tid(NEWPID, &[1, 88], getpid).unwrap();
        assert_eq!((below, libc::WEXITSTATUS(wait(88))), (88, 1));
        kill(child, libc::SIGKILL).unwrap();
        wait(child);
        unsafe { libc::setuid(12345) };
        assert_eq!(clone3_tid(0, &[99], || 0), Err(libc::EPERM));
        0
    });
    assert_eq!(wait(init.unwrap()), 0);
}

fn last_pid() {
    let init = clone(NEWPID | NEWNS, || {
        assert_eq!(mount("none", "/", "none", libc::MS_REC | libc::MS_PRIVATE), Ok(0));
        assert_eq!(mount("proc", "/proc", "proc", 0), Ok(0));
        let file = "/proc/sys/kernel/ns_last_pid";
        wait(fork(|| 0));
        assert_eq!(std::fs::read_to_string(file).unwrap(), "2\n");
        std::fs::write(file, "1000").unwrap();
        assert_eq!(fork(|| 0), 1001);
        wait(1001);
        // Numbers in use are passed over.
        let held = fork(sleep_for_ever);
        assert_eq!(held, 1002);
        std::fs::write(file, "1001").unwrap();
        assert_eq!(fork(|| 0), 1003);
        wait(1003);
        // A process group keeps the number of its leader, gone though that is.
        let leader = fork(|| {
            unsafe { libc::setpgid(0, 0) };
            fork(sleep_for_ever);
            0
        });
        assert_eq!(leader, 1004);
        wait(leader);
        std::fs::write(file, "1003").unwrap();
        let next = fork(|| 0);
        assert!(next > 1005, "{next}");
        wait(next);
        assert_eq!(std::fs::write(file, "-1").unwrap_err().raw_os_error(), Some(libc::EINVAL));
        0
    });
    assert_eq!(wait(init.unwrap()), 0);
}

fn parent_death() {
    // The init of a namespace dies of its parent's death: that comes from outside.
    let (ready, tell) = pipe();
    let (pids, number) = pipe();
    let parent = fork(|| {
        let init = clone(NEWPID, || {
            assert_eq!(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) }, 0);
            write_byte(tell);
            sleep_for_ever()
        })
        .unwrap();
        read_byte(ready);
        assert_eq!(unsafe { libc::write(number, (&raw const init).cast(), 4) }, 4);
        sleep_for_ever()
    });
    let mut init = 0_i32;
    assert_eq!(unsafe { libc::read(pids, (&raw mut init).cast(), 4) }, 4);
    let end = pidfd(init);
    kill(parent, libc::SIGKILL).unwrap();
    wait(parent);
    let mut poll = libc::pollfd { fd: end.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 20_000) }, 1);
}

fn file_owners() {
    let path = std::ffi::CString::new(crate::own_path("owner")).unwrap();
    let fd = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CREAT, 0o600) };
    assert!(fd >= 0);
    let set = |id: i32| ok(unsafe { libc::fcntl(fd, libc::F_SETOWN, id) });
    let owner = || unsafe { libc::fcntl(fd, libc::F_GETOWN) };
    let lock = |kind: i32, op: i32| {
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = kind as i16;
        assert_eq!(unsafe { libc::fcntl(fd, op, &raw mut lock) }, 0);
        lock
    };
    assert_eq!(set(999_999_999), Err(libc::ESRCH));
    assert_eq!(set(getpid()), Ok(0));
    assert_eq!(owner(), getpid());
    lock(libc::F_WRLCK, libc::F_SETLK);
    let (from, to) = pipe();
    let (ready, tell) = pipe();
    let init = clone(NEWPID, || {
        // Owner and holder are outside.
        assert_eq!(owner(), 0);
        let held = lock(libc::F_RDLCK, libc::F_GETLK);
        assert_eq!((i32::from(held.l_type), held.l_pid), (libc::F_WRLCK, 0));
        assert_eq!(set(1), Ok(0));
        assert_eq!(owner(), 1);
        write_byte(tell);
        read_byte(from);
        0
    })
    .unwrap();
    read_byte(ready);
    assert_eq!(owner(), init);
    let other = fork(|| i32::from(lock(libc::F_RDLCK, libc::F_GETLK).l_pid != unsafe { libc::getppid() }));
    assert_eq!(wait(other), 0);
    write_byte(to);
    assert_eq!(wait(init), 0);
    // Gone, it is nobody.
    assert_eq!(owner(), 0);
    unsafe { libc::unlink(path.as_ptr()) };
}
