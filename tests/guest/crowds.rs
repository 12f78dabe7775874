//! Crowds of threads and processes in a PID namespace of their own: created, enumerated while they change, killed with their init;
//! then nothing is left. With GUEST_SCALE=full: 16,384 threads, 4,096 processes, 64 times 256.
use std::sync::Barrier;
use std::thread;

use super::Case;
use super::scale::scaled;
use super::sys::{clone, fork, pipe, read_byte, wait, write_byte};

pub const CASES: &[Case] = &[
    ("crowd_of_threads", threads),
    ("crowd_of_processes", processes),
    ("crowd_of_processes_with_threads", both),
    ("crowd_exec_by_a_thread", exec),
];

/// Threads that sleep for ever, small ones, all of them running when this returns.
fn sleepers(n: u32) {
    let ready: &'static Barrier = Box::leak(Box::new(Barrier::new(n as usize + 1)));
    for _ in 0..n {
        let asleep = thread::Builder::new().stack_size(16 << 10).spawn(move || {
            ready.wait();
            loop {
                thread::park();
            }
        });
        asleep.unwrap();
    }
    ready.wait();
}

fn pids() -> Vec<i32> {
    std::fs::read_dir("/proc").unwrap().filter_map(|e| e.unwrap().file_name().to_str()?.parse().ok()).collect()
}

/// Runs `crowd` as the init of a namespace, which tells when it is complete; then enumerates, kills and looks for what is left.
fn in_namespace(crowd: impl FnOnce(), processes: usize) {
    let before = pids();
    let (ready, tell) = pipe();
    let init = clone(libc::CLONE_NEWPID as u64, || {
        crowd();
        // Everybody but the sender and the init, and the sender's own group.
        let sender = fork(|| i32::from(unsafe { libc::kill(-1, 0) } != if processes > 1 { 0 } else { -1 }));
        assert_eq!(wait(sender), 0);
        write_byte(tell);
        loop {
            unsafe { libc::pause() };
        }
    })
    .unwrap();
    // A listing while the crowd grows shows each process once at most, in order.
    let growing = pids();
    assert!(growing.is_sorted_by(|a, b| a < b), "{growing:?}");
    read_byte(ready);
    let complete = pids();
    assert!(complete.is_sorted_by(|a, b| a < b));
    let fresh: Vec<i32> = complete.into_iter().filter(|pid| !before.contains(pid)).collect();
    assert!(fresh.len() >= processes, "{} of {processes}", fresh.len());
    unsafe { libc::kill(init, libc::SIGKILL) };
    let status = wait(init);
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
    let left = pids();
    let inside = |pid: &&i32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let numbers = status.lines().find_map(|l| l.strip_prefix("NSpid:")).unwrap_or_default();
        left.contains(pid) && numbers.split_whitespace().count() > 1
    };
    assert_eq!(fresh.iter().find(inside), None);
}

fn threads() {
    let n = scaled(16_384);
    in_namespace(
        || {
            sleepers(n);
            let status = std::fs::read_to_string("/proc/thread-self/status");
            // The mount of /proc is the outer namespace's; the thread is seen there.
            assert!(status.unwrap().contains(&format!("Threads:\t{}\n", n + 1)));
        },
        1,
    );
}

fn family(processes: u32, threads: u32) {
    let (ready, tell) = pipe();
    for _ in 0..processes {
        fork(|| {
            sleepers(threads);
            write_byte(tell);
            loop {
                unsafe { libc::pause() };
            }
        });
    }
    (0..processes).for_each(|_| read_byte(ready));
}

fn processes() {
    let n = scaled(4096);
    in_namespace(|| family(n, 0), n as usize + 1);
}

fn both() {
    let (processes, threads) = (scaled(640) / 10, scaled(2560) / 10);
    in_namespace(|| family(processes, threads), processes as usize + 1);
}

fn exec() {
    let n = scaled(16_384);
    let pid = fork(|| {
        sleepers(n);
        let own = format!("test $$ = {} && exit 19", unsafe { libc::getpid() });
        let script = std::ffi::CString::new(own).unwrap();
        let by_thread = thread::spawn(move || {
            let argv = [c"sh".as_ptr(), c"-c".as_ptr(), script.as_ptr(), std::ptr::null()];
            unsafe { libc::execv(c"/bin/sh".as_ptr(), argv.as_ptr()) };
        });
        by_thread.join().unwrap();
        1
    });
    let status = wait(pid);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 19, "{status:#x}");
}
