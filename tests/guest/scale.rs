//! Larger numbers: many children of a large process, many signals beside vector code, many threads asleep. With GUEST_SCALE=full in
//! the environment the numbers are those that a release build is judged by.
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use super::Case;
use super::sys::{fork, handle, map, wait};
use super::threads::hold_vectors;

pub const CASES: &[Case] = &[
    ("scale_forks_of_64_mib", forks),
    ("scale_signals_beside_vectors", signals_beside_vectors),
    ("scale_1000_threads_asleep", asleep),
    ("scale_pipes_and_processes", chain),
];

/// `full` or a tenth of it.
pub(super) fn scaled(full: u32) -> u32 {
    if std::env::var_os("GUEST_SCALE").is_some_and(|v| v == "full") { full } else { full / 10 }
}

fn forks() {
    let len = 64 << 20;
    let p = map(len, 3);
    for offset in (0..len).step_by(4096) {
        unsafe { p.add(offset).cast::<u64>().write(offset as u64) };
    }
    let check = |mine: u64| {
        for offset in (0..len).step_by(1 << 20) {
            let word = unsafe { p.add(offset).cast::<u64>() };
            assert_eq!(unsafe { word.read() }, offset as u64);
            unsafe { word.add(1).write(mine) };
        }
        for offset in (0..len).step_by(1 << 20) {
            assert_eq!(unsafe { p.add(offset).cast::<u64>().add(1).read() }, mine);
        }
    };
    for batch in 0..u64::from(scaled(50)) {
        let pids: Vec<i32> = (0..10)
            .map(|i| {
                fork(move || {
                    check(batch * 10 + i + 1);
                    0
                })
            })
            .collect();
        pids.into_iter().for_each(|pid| assert_eq!(wait(pid), 0));
    }
    check(7);
}

static TAKEN: AtomicU32 = AtomicU32::new(0);
static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn take(_: i32) {
    TAKEN.fetch_add(1, Ordering::SeqCst);
}

fn signals_beside_vectors() {
    handle(libc::SIGUSR1, take as *const () as usize, libc::SA_RESTART);
    let computing = thread::spawn(|| {
        while !STOP.load(Ordering::SeqCst) {
            hold_vectors(0xfeed_beef, 5);
        }
    });
    let me = unsafe { libc::pthread_self() };
    for sent in 1..=scaled(10_000) {
        let (a, b) = std::hint::black_box((sent.wrapping_mul(31), f64::from(sent).sqrt()));
        unsafe { libc::pthread_kill(me, libc::SIGUSR1) };
        assert_eq!(TAKEN.load(Ordering::SeqCst), sent);
        assert_eq!(a, sent.wrapping_mul(31));
        assert!((b * b - f64::from(sent)).abs() < 1e-6);
    }
    STOP.store(true, Ordering::SeqCst);
    computing.join().unwrap();
}

fn asleep() {
    let threads: Vec<_> = (0..1000)
        .map(|_| {
            thread::Builder::new()
                .stack_size(64 << 10)
                .spawn(|| {
                    while !STOP.load(Ordering::SeqCst) {
                        thread::park();
                    }
                })
                .unwrap()
        })
        .collect();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    assert!(status.contains("Threads:\t1001\n"), "{status}");
    assert_eq!(std::fs::read_dir("/proc/self/task").unwrap().count(), 1001);
    STOP.store(true, Ordering::SeqCst);
    threads.iter().for_each(|t| t.thread().unpark());
    threads.into_iter().for_each(|t| t.join().unwrap());
}

fn chain() {
    // A token goes through a chain of 100 processes, twenty times around.
    let mut pipes = Vec::new();
    for _ in 0..=100 {
        let mut fds = [0; 2];
        assert_eq!(unsafe { libc::pipe(fds.as_mut_ptr()) }, 0);
        pipes.push(fds);
    }
    let pids: Vec<i32> = (0..100)
        .map(|i| {
            let (from, to) = (pipes[i][0], pipes[i + 1][1]);
            fork(move || {
                let mut byte = [0_u8];
                for _ in 0..20 {
                    assert_eq!(unsafe { libc::read(from, byte.as_mut_ptr().cast(), 1) }, 1);
                    byte[0] = byte[0].wrapping_add(1);
                    assert_eq!(unsafe { libc::write(to, byte.as_ptr().cast(), 1) }, 1);
                }
                0
            })
        })
        .collect();
    let mut byte = [0_u8];
    for _ in 0..20 {
        let before = byte[0];
        assert_eq!(unsafe { libc::write(pipes[0][1], byte.as_ptr().cast(), 1) }, 1);
        assert_eq!(unsafe { libc::read(pipes[100][0], byte.as_mut_ptr().cast(), 1) }, 1);
        assert_eq!(byte[0], before.wrapping_add(100));
    }
    pids.into_iter().for_each(|pid| assert_eq!(wait(pid), 0));
}
