//! Scheduling parameters: what is kept and refused, and that they decide who runs.
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::Case;
use super::sys::{call, fork, in_child, ok, wait};

pub const CASES: &[Case] = &[
    ("sched_policies_kept", kept),
    ("sched_errors", errors),
    ("sched_reset_on_fork", reset_on_fork),
    ("sched_attr", attr),
    ("sched_realtime_runs_first", realtime_first),
    ("sched_idle_gives_way", idle),
    ("sched_nice_shares", nice_shares),
    ("sched_yield_lets_others_run", yields),
    ("sched_affinity_moves", affinity_moves),
    ("getpriority_setpriority", priorities),
    ("ioprio", io_priorities),
];

fn set(policy: i32, priority: i32) -> Result<i64, i32> {
    let param = libc::sched_param { sched_priority: priority };
    ok(unsafe { libc::sched_setscheduler(0, policy, &raw const param) })
}

/// Whether this machine lets the test have real-time policies; containers often do not.
fn may_be_realtime() -> bool {
    let allowed = set(libc::SCHED_FIFO, 1).is_ok();
    let _ = set(libc::SCHED_OTHER, 0);
    allowed
}

fn get() -> (i32, i32) {
    let mut param: libc::sched_param = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::sched_getparam(0, &raw mut param) }, 0);
    (unsafe { libc::sched_getscheduler(0) }, param.sched_priority)
}

fn pin(cpu: usize) {
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    unsafe { libc::CPU_SET(cpu, &mut set) };
    let size = std::mem::size_of::<libc::cpu_set_t>();
    assert_eq!(unsafe { libc::sched_setaffinity(0, size, &raw const set) }, 0);
}

fn kept() {
    in_child(|| {
        assert_eq!(get(), (libc::SCHED_OTHER, 0));
        for policy in [libc::SCHED_BATCH, libc::SCHED_IDLE, libc::SCHED_OTHER] {
            assert_eq!(set(policy, 0), Ok(0));
            assert_eq!(get(), (policy, 0));
        }
        if may_be_realtime() {
            for policy in [libc::SCHED_FIFO, libc::SCHED_RR] {
                assert_eq!(set(policy, 7), Ok(0));
                assert_eq!(get(), (policy, 7));
            }
            let mut slice: libc::timespec = unsafe { std::mem::zeroed() };
            assert_eq!(unsafe { libc::sched_rr_get_interval(0, &raw mut slice) }, 0);
            assert!(slice.tv_sec == 0 && slice.tv_nsec > 0, "{}", slice.tv_nsec);
        }
    });
}

fn errors() {
    in_child(|| {
        for policy in [libc::SCHED_OTHER, libc::SCHED_BATCH, libc::SCHED_IDLE] {
            assert_eq!(set(policy, 1), Err(libc::EINVAL));
            assert_eq!(unsafe { libc::sched_get_priority_max(policy) }, 0);
        }
        for policy in [libc::SCHED_FIFO, libc::SCHED_RR] {
            for priority in [0, 100, -1] {
                assert_eq!(set(policy, priority), Err(libc::EINVAL));
            }
            assert_eq!(unsafe { libc::sched_get_priority_max(policy) }, 99);
            assert_eq!(unsafe { libc::sched_get_priority_min(policy) }, 1);
        }
        assert_eq!(set(4, 0), Err(libc::EINVAL));
        assert_eq!(set(99, 0), Err(libc::EINVAL));
        assert_eq!(set(-1, 0), Err(libc::EINVAL));
        let param = libc::sched_param { sched_priority: 0 };
        let nobody = ok(unsafe { libc::sched_setscheduler(0x3f_fff0, libc::SCHED_OTHER, &raw const param) });
        assert_eq!(nobody, Err(libc::ESRCH));
        assert_eq!(ok(unsafe { libc::sched_getscheduler(-1) }), Err(libc::EINVAL));
        assert_eq!(call(libc::SYS_sched_setscheduler, [0, 0, 0, 0, 0, 0]), Err(libc::EINVAL));
        assert_eq!(call(libc::SYS_sched_getparam, [0, 0, 0, 0, 0, 0]), Err(libc::EINVAL));
        assert_eq!(ok(unsafe { libc::sched_get_priority_max(17) }), Err(libc::EINVAL));
        let mut none: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        let size = std::mem::size_of::<libc::cpu_set_t>();
        assert_eq!(ok(unsafe { libc::sched_setaffinity(0, size, &raw const none) }), Err(libc::EINVAL));
        assert_eq!(ok(unsafe { libc::sched_getaffinity(0, 3, &raw mut none) }), Err(libc::EINVAL));
        assert_eq!(ok(unsafe { libc::sched_setaffinity(0x3f_fff0, size, &raw const none) }), Err(libc::ESRCH));
    });
}

fn reset_on_fork() {
    const RESET: i32 = 0x4000_0000;
    in_child(|| {
        assert_eq!(set(libc::SCHED_BATCH | RESET, 0), Ok(0));
        assert_eq!(get().0, libc::SCHED_BATCH | RESET);
        in_child(|| assert_eq!(get().0, libc::SCHED_BATCH));
        if may_be_realtime() {
            assert_eq!(set(libc::SCHED_RR | RESET, 3), Ok(0));
            in_child(|| assert_eq!(get(), (libc::SCHED_OTHER, 0)));
            assert_eq!(set(libc::SCHED_RR, 3), Ok(0));
            in_child(|| assert_eq!(get(), (libc::SCHED_RR, 3)));
        }
    });
}

#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Attr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    deadline: [u64; 3],
    clamps: [u32; 2],
}

fn attr() {
    in_child(|| {
        let mut a = Attr::default();
        let at = &raw mut a as u64;
        assert_eq!(call(libc::SYS_sched_getattr, [0, at, 48, 0, 0, 0]), Ok(0));
        assert_eq!((a.size, a.policy, a.nice, a.priority), (48, 0, 0, 0));
        a.policy = libc::SCHED_BATCH as u32;
        a.nice = 5;
        assert_eq!(call(libc::SYS_sched_setattr, [0, at, 0, 0, 0, 0]), Ok(0));
        assert_eq!(unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }, 5);
        assert_eq!(get(), (libc::SCHED_BATCH, 0));
        a.flags = 0x8;
        a.policy = 0;
        a.nice = 6;
        assert_eq!(call(libc::SYS_sched_setattr, [0, at, 0, 0, 0, 0]), Ok(0));
        assert_eq!(get().0, libc::SCHED_BATCH, "SCHED_FLAG_KEEP_POLICY");
        assert_eq!(unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }, 6);
        a.flags = 1 << 40;
        assert_eq!(call(libc::SYS_sched_setattr, [0, at, 0, 0, 0, 0]), Err(libc::EINVAL));
        a.flags = 0;
        assert_eq!(call(libc::SYS_sched_setattr, [0, at, 1, 0, 0, 0]), Err(libc::EINVAL));
        assert_eq!(call(libc::SYS_sched_setattr, [0, 0, 0, 0, 0, 0]), Err(libc::EINVAL));
        assert_eq!(call(libc::SYS_sched_getattr, [0, at, 47, 0, 0, 0]), Err(libc::EINVAL));
        a.size = 20;
        assert_eq!(call(libc::SYS_sched_setattr, [0, at, 0, 0, 0, 0]), Err(libc::E2BIG));
        assert!(a.size >= 48, "the size the kernel knows: {}", a.size);
    });
}

/// Runs `other` and `own` pinned to CPU 0 beside each other for a time; gives how far each counted.
fn race(other: impl Fn() + Send + 'static, own: impl Fn()) -> (u64, u64) {
    static STOP: AtomicBool = AtomicBool::new(false);
    static COUNTS: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];
    pin(0);
    let count = |which: usize| {
        while !STOP.load(Ordering::SeqCst) {
            COUNTS[which].fetch_add(1, Ordering::SeqCst);
        }
    };
    let ready = Arc::new(AtomicBool::new(false));
    let told = ready.clone();
    let thread = thread::spawn(move || {
        other();
        told.store(true, Ordering::SeqCst);
        count(1);
    });
    while !ready.load(Ordering::SeqCst) {
        thread::yield_now();
    }
    own();
    COUNTS[1].store(0, Ordering::SeqCst);
    let end = Instant::now() + Duration::from_millis(400);
    while Instant::now() < end {
        COUNTS[0].fetch_add(1, Ordering::SeqCst);
    }
    STOP.store(true, Ordering::SeqCst);
    let counts = (COUNTS[0].load(Ordering::SeqCst), COUNTS[1].load(Ordering::SeqCst));
    thread.join().unwrap();
    counts
}

fn realtime_first() {
    if !may_be_realtime() {
        return;
    }
    in_child(|| {
        pin(0);
        // Threads that wait for the CPU run by priority, not by the order in which they came.
        assert_eq!(set(libc::SCHED_FIFO, 50), Ok(0));
        let order = Arc::new(Mutex::new(Vec::new()));
        let threads: Vec<_> =
            [(libc::SCHED_OTHER, 0), (libc::SCHED_FIFO, 10), (libc::SCHED_RR, 30), (libc::SCHED_FIFO, 20)]
                .into_iter()
                .map(|(policy, priority)| {
                    let order = order.clone();
                    let ready = Arc::new(AtomicBool::new(false));
                    let (told, go) = (ready.clone(), Arc::new(AtomicBool::new(false)));
                    let going = go.clone();
                    let thread = thread::spawn(move || {
                        assert_eq!(set(policy, priority), Ok(0));
                        told.store(true, Ordering::SeqCst);
                        while !going.load(Ordering::SeqCst) {
                            thread::park();
                        }
                        order.lock().unwrap().push(priority);
                    });
                    while !ready.load(Ordering::SeqCst) {
                        thread::sleep(Duration::from_millis(1));
                    }
                    thread::sleep(Duration::from_millis(5));
                    (thread, go)
                })
                .collect();
        for (thread, go) in &threads {
            go.store(true, Ordering::SeqCst);
            thread.thread().unpark();
        }
        assert!(order.lock().unwrap().is_empty(), "nobody comes before priority 50");
        threads.into_iter().for_each(|(t, _)| t.join().unwrap());
        assert_eq!(*order.lock().unwrap(), [30, 20, 10, 0]);
    });
    in_child(|| {
        // Below the share that real-time tasks may have of a second nobody else gets anything.
        let (own, other) = race(|| (), || assert_eq!(set(libc::SCHED_FIFO, 5), Ok(0)));
        assert!(other < own / 4, "{other} beside {own} of a real-time task");
    });
}

fn idle() {
    in_child(|| {
        let (own, other) = race(|| assert_eq!(set(libc::SCHED_IDLE, 0), Ok(0)), || ());
        assert!(other < own / 4, "{other} of an idle task beside {own}");
    });
}

fn nice_shares() {
    in_child(|| {
        let nice = || {
            let tid = unsafe { libc::syscall(libc::SYS_gettid) } as u32;
            assert_eq!(unsafe { libc::setpriority(libc::PRIO_PROCESS, tid, 15) }, 0);
        };
        let (own, other) = race(nice, || ());
        assert!(other < own / 3, "{other} at nice 15 beside {own}");
    });
}

fn yields() {
    in_child(|| {
        static TURNS: AtomicU32 = AtomicU32::new(0);
        pin(0);
        let other = thread::spawn(|| {
            while TURNS.load(Ordering::SeqCst) < 1000 {
                TURNS.fetch_add(1, Ordering::SeqCst);
                thread::yield_now();
            }
        });
        let mut own = 0_u32;
        while TURNS.load(Ordering::SeqCst) < 1000 {
            own += 1;
            thread::yield_now();
        }
        other.join().unwrap();
        // Not each yield lets the other run, but they may not be for nothing either.
        assert!(own < 100_000, "{own} yields for 1000 of the other's");
    });
}

fn affinity_moves() {
    let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) } as usize;
    for round in 0..20 {
        let cpu = round % cpus.min(4);
        pin(cpu);
        assert_eq!(unsafe { libc::sched_getcpu() }, cpu as i32);
    }
    if cpus < 2 {
        return;
    }
    // A process that computes is moved by another.
    let pid = fork(|| {
        let end = Instant::now() + Duration::from_secs(20);
        while unsafe { libc::sched_getcpu() } != 1 {
            assert!(Instant::now() < end, "never moved");
        }
        0
    });
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    unsafe { libc::CPU_SET(1, &mut set) };
    assert_eq!(unsafe { libc::sched_setaffinity(pid, std::mem::size_of_val(&set), &raw const set) }, 0);
    assert_eq!(wait(pid), 0);
}

fn priorities() {
    in_child(|| {
        let get = |which, who| {
            unsafe { *libc::__errno_location() = 0 };
            ok(unsafe { libc::getpriority(which, who) })
        };
        assert_eq!(ok(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 100) }), Ok(0));
        assert_eq!(get(libc::PRIO_PROCESS, 0), Ok(19));
        assert_eq!(get(libc::PRIO_PROCESS, 0x3f_fff0), Err(libc::ESRCH));
        assert_eq!(ok(unsafe { libc::setpriority(7, 0, 1) }), Err(libc::EINVAL));
        assert_eq!(unsafe { libc::setpgid(0, 0) }, 0);
        let child = fork(|| {
            thread::sleep(Duration::from_millis(200));
            unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) - 10 }
        });
        assert_eq!(ok(unsafe { libc::setpriority(libc::PRIO_PGRP, 0, 10) }), Ok(0));
        assert_eq!(get(libc::PRIO_PGRP, 0), Ok(10));
        assert_eq!(wait(child), 0, "the child's nice value is 10");
        // Without the privilege it only goes up.
        assert_eq!(unsafe { libc::setresuid(1000, 1000, 1000) }, 0);
        assert_eq!(ok(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 5) }), Err(libc::EACCES));
        assert_eq!(ok(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 12) }), Ok(0));
        assert_eq!(set(libc::SCHED_FIFO, 1), Err(libc::EPERM));
        let init = ok(unsafe { libc::setpriority(libc::PRIO_PROCESS, libc::getppid() as u32, 19) });
        assert_eq!(init, Err(libc::EPERM));
    });
}

/// Needs root, to have the real-time class and to lose it.
fn io_priorities() {
    let get = |which: u64, who: u64| call(libc::SYS_ioprio_get, [which, who, 0, 0, 0, 0]);
    let set = |who: u64, class: u64, level: u64| call(libc::SYS_ioprio_set, [1, who, (class << 13) | level, 0, 0, 0]);
    assert_eq!(set(0, 2, 3), Ok(0));
    assert_eq!(get(1, 0), Ok((2 << 13) | 3));
    assert_eq!(get(1, u64::from(std::process::id())), Ok((2 << 13) | 3));
    in_child(|| {
        assert_eq!(get(1, 0), Ok((2 << 13) | 3), "a child has its parent's");
        assert_eq!(unsafe { libc::setpgid(0, 0) }, 0);
        assert_eq!(get(2, 0), Ok((2 << 13) | 3));
        assert_eq!(set(0, 0, 0), Ok(0));
        assert_eq!(get(2, 0), Ok((2 << 13) | 4), "by the nice value");
        assert_eq!(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 10) }, 0);
        assert_eq!(get(2, 0), Ok((2 << 13) | 6));
        assert_eq!(set(0, 1, 2), Ok(0));
        assert_eq!(get(2, 0), Ok((1 << 13) | 2));
        assert_eq!(unsafe { libc::setresuid(1234, 1234, 1234) }, 0);
        assert_eq!(set(0, 1, 3), Err(libc::EPERM));
        assert_eq!(set(0, 3, 0), Ok(0));
        assert_eq!(set(unsafe { libc::getppid() } as u64, 2, 0), Err(libc::EPERM));
    });
    assert_eq!(set(0, 0, 3), Err(libc::EINVAL));
    assert_eq!(set(0, 4, 0), Err(libc::EINVAL));
    assert_eq!(set(99_999_999, 2, 0), Err(libc::ESRCH));
    assert_eq!(get(9, 0), Err(libc::EINVAL));
    assert_eq!(get(1, 99_999_999), Err(libc::ESRCH));
}
