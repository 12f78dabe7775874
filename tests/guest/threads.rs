//! Threads, futexes, scheduling, floating-point state.
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::Case;
use super::sys::{call, handle, in_child, ok};

pub const CASES: &[Case] = &[
    ("threads_join", join),
    ("threads_mutex_contended", contended),
    ("threads_1024_condvar", condvar_1024),
    ("threads_exit_group", exit_group),
    ("threads_tls", tls),
    ("futex_errors", futex_errors),
    ("futex_timeout", futex_timeout),
    ("futex_requeue", requeue),
    ("futex_wake_op", wake_op),
    ("futex_shared_processes", shared),
    ("futex_robust_owner_dies", robust),
    ("futex_pi", pi),
    ("fpu_across_threads", fpu),
    ("fpu_across_signals", fpu_signals),
    ("affinity", affinity),
    ("sched_yield_fair", fair),
    ("main_thread_exits_first", main_exits),
    ("threads_beside_signals", beside_signals),
    ("threads_awaited_by_calls", awaited_by_calls),
];

fn join() {
    let sum: u64 = (0..64_u64).map(|i| thread::spawn(move || i)).map(|t| t.join().unwrap()).sum();
    assert_eq!(sum, 2016);
    for _ in 0..200 {
        thread::spawn(|| ()).join().unwrap();
    }
}

fn contended() {
    let counter = Arc::new(Mutex::new(0_u64));
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let counter = counter.clone();
            thread::spawn(move || {
                for _ in 0..2000 {
                    *counter.lock().unwrap() += 1;
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    assert_eq!(*counter.lock().unwrap(), 16_000);
}

fn condvar_1024() {
    let state = Arc::new((Mutex::new((0_u32, 0_u32)), Condvar::new()));
    let threads: Vec<_> = (0..1024_u32)
        .map(|i| {
            let state = state.clone();
            thread::Builder::new()
                .stack_size(64 << 10)
                .spawn(move || {
                    let (lock, changed) = &*state;
                    let mut s = lock.lock().unwrap();
                    s.0 += 1;
                    changed.notify_all();
                    while s.0 < 1024 {
                        s = changed.wait(s).unwrap();
                    }
                    s.1 = s.1.wrapping_add(i);
                })
                .unwrap()
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    assert_eq!(state.0.lock().unwrap().1, (0..1024).sum::<u32>());
}

fn exit_group() {
    let pid = super::sys::fork(|| {
        for _ in 0..8 {
            thread::spawn(|| {
                loop {
                    thread::sleep(Duration::from_secs(100));
                }
            });
        }
        thread::spawn(|| {
            loop {
                std::hint::spin_loop();
            }
        });
        thread::sleep(Duration::from_millis(10));
        23
    });
    assert_eq!(libc::WEXITSTATUS(super::sys::wait(pid)), 23);
}

fn tls() {
    thread_local! { static X: std::cell::Cell<u64> = const { std::cell::Cell::new(0) }; }
    let threads: Vec<_> = (0..16)
        .map(|i| {
            thread::spawn(move || {
                X.set(i);
                for _ in 0..50 {
                    thread::yield_now();
                    assert_eq!(X.get(), i);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
}

fn futex(
    word: &AtomicU32,
    op: i32,
    val: u32,
    timeout: Option<&libc::timespec>,
    word2: u64,
    val3: u32,
) -> Result<i64, i32> {
    let timeout = timeout.map_or(0, |t| std::ptr::from_ref(t) as u64);
    call(libc::SYS_futex, [word.as_ptr() as u64, op as u64, u64::from(val), timeout, word2, u64::from(val3)])
}

fn futex_errors() {
    let word = AtomicU32::new(5);
    assert_eq!(futex(&word, libc::FUTEX_WAIT, 4, None, 0, 0), Err(libc::EAGAIN));
    assert_eq!(futex(&word, libc::FUTEX_WAKE, 1, None, 0, 0), Ok(0));
    assert_eq!(futex(&word, 99, 1, None, 0, 0), Err(libc::ENOSYS));
    assert_eq!(call(libc::SYS_futex, [word.as_ptr() as u64 + 1, 0, 5, 0, 0, 0]), Err(libc::EINVAL));
    assert_eq!(call(libc::SYS_futex, [0x1000, 0, 5, 0, 0, 0]), Err(libc::EFAULT));
    assert_eq!(futex(&word, libc::FUTEX_WAIT_BITSET, 5, None, 0, 0), Err(libc::EINVAL));
    let bad = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000_000 };
    assert_eq!(futex(&word, libc::FUTEX_WAIT, 5, Some(&bad), 0, 0), Err(libc::EINVAL));
}

fn futex_timeout() {
    let word = AtomicU32::new(5);
    let short = libc::timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    let start = Instant::now();
    assert_eq!(futex(&word, libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, 5, Some(&short), 0, 0), Err(libc::ETIMEDOUT));
    assert!(start.elapsed() >= Duration::from_millis(20));
    let mut now: libc::timespec = unsafe { std::mem::zeroed() };
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    assert_eq!(futex(&word, libc::FUTEX_WAIT_BITSET, 5, Some(&now), 0, u32::MAX), Err(libc::ETIMEDOUT));
}

fn requeue() {
    let words = Arc::new((AtomicU32::new(0), AtomicU32::new(0)));
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let words = words.clone();
            thread::spawn(move || assert_eq!(futex(&words.0, libc::FUTEX_WAIT, 0, None, 0, 0), Ok(0)))
        })
        .collect();
    let mut moved = 0;
    while moved < 4 {
        let to = words.1.as_ptr() as u64;
        let args = [words.0.as_ptr() as u64, libc::FUTEX_CMP_REQUEUE as u64, 0, 100, to, 0];
        moved += call(libc::SYS_futex, args).unwrap();
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(futex(&words.0, libc::FUTEX_WAKE, 100, None, 0, 0), Ok(0));
    assert_eq!(futex(&words.1, libc::FUTEX_WAKE, 100, None, 0, 0), Ok(4));
    threads.into_iter().for_each(|t| t.join().unwrap());
}

fn wake_op() {
    let (a, b) = (AtomicU32::new(0), AtomicU32::new(10));
    // FUTEX_OP(ADD, 5, CMP_EQ, 10)
    let op = (1 << 28) | (5 << 12) | 0xa;
    let args = [a.as_ptr() as u64, libc::FUTEX_WAKE_OP as u64, 1, 1, b.as_ptr() as u64, op];
    assert_eq!(call(libc::SYS_futex, args), Ok(0));
    assert_eq!(b.load(Ordering::SeqCst), 15);
}

fn shared() {
    let p = unsafe { libc::mmap(std::ptr::null_mut(), 4096, 3, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0) };
    let word = unsafe { AtomicU32::from_ptr(p.cast()) };
    let pid = super::sys::fork(|| {
        while word.load(Ordering::SeqCst) == 0 {
            let _ = futex(word, libc::FUTEX_WAIT, 0, None, 0, 0);
        }
        0
    });
    thread::sleep(Duration::from_millis(20));
    word.store(1, Ordering::SeqCst);
    futex(word, libc::FUTEX_WAKE, 1, None, 0, 0).unwrap();
    assert_eq!(super::sys::wait(pid), 0);
}

fn robust() {
    unsafe {
        let mut attr: libc::pthread_mutexattr_t = std::mem::zeroed();
        libc::pthread_mutexattr_init(&raw mut attr);
        libc::pthread_mutexattr_setrobust(&raw mut attr, libc::PTHREAD_MUTEX_ROBUST);
        let mutex = Box::into_raw(Box::new(std::mem::zeroed::<libc::pthread_mutex_t>()));
        libc::pthread_mutex_init(mutex, &raw const attr);
        let address = mutex as usize;
        thread::spawn(move || assert_eq!(libc::pthread_mutex_lock(address as *mut _), 0)).join().unwrap();
        assert_eq!(libc::pthread_mutex_lock(mutex), libc::EOWNERDEAD);
        assert_eq!(libc::pthread_mutex_consistent(mutex), 0);
        assert_eq!(libc::pthread_mutex_unlock(mutex), 0);
    }
}

fn pi() {
    unsafe {
        let mut attr: libc::pthread_mutexattr_t = std::mem::zeroed();
        libc::pthread_mutexattr_init(&raw mut attr);
        assert_eq!(libc::pthread_mutexattr_setprotocol(&raw mut attr, libc::PTHREAD_PRIO_INHERIT), 0);
        let mutex = Box::into_raw(Box::new(std::mem::zeroed::<libc::pthread_mutex_t>()));
        assert_eq!(libc::pthread_mutex_init(mutex, &raw const attr), 0);
        let counter = Box::into_raw(Box::new(0_u64));
        let (mutex, counter) = (mutex as usize, counter as usize);
        let threads: Vec<_> = (0..4)
            .map(|_| {
                thread::spawn(move || {
                    for _ in 0..500 {
                        assert_eq!(libc::pthread_mutex_lock(mutex as *mut _), 0);
                        *(counter as *mut u64) += 1;
                        assert_eq!(libc::pthread_mutex_unlock(mutex as *mut _), 0);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        assert_eq!(*(counter as *mut u64), 2000);
    }
}

/// Fills all of xmm0-15 (ymm where there is AVX) with a seed, runs `calls` system calls, and compares.
pub fn hold_vectors(seed: u64, rounds: u32) {
    let want: [u64; 4] = [seed, !seed, seed.rotate_left(17), seed ^ 0x5555_5555];
    let mut got = [[0_u64; 4]; 4];
    for _ in 0..rounds {
        unsafe {
            if std::arch::is_x86_feature_detected!("avx") {
                std::arch::asm!(
                    "vmovdqu ymm3, [{w}]", "vmovdqu ymm7, [{w}]", "vmovdqu ymm12, [{w}]", "vmovdqu ymm15, [{w}]",
                    "mov eax, 24", "syscall",
                    "mov ecx, 300", "2:", "pause", "dec ecx", "jnz 2b",
                    "vmovdqu [{g}], ymm3", "vmovdqu [{g} + 32], ymm7", "vmovdqu [{g} + 64], ymm12", "vmovdqu [{g} + 96], ymm15",
                    w = in(reg) want.as_ptr(), g = in(reg) got.as_mut_ptr(),
                    out("rax") _, out("rcx") _, out("r11") _, out("ymm3") _, out("ymm7") _, out("ymm12") _, out("ymm15") _,
                );
                assert!(got.iter().all(|g| *g == want), "{got:x?} {want:x?}");
            }
        }
        let x = std::hint::black_box(seed as f64).sqrt();
        assert!((x * x - seed as f64).abs() <= seed as f64 * 1e-9);
    }
}

fn fpu() {
    let threads: Vec<_> = (1..=6_u64).map(|i| thread::spawn(move || hold_vectors(i * 0x0123_4567_89ab, 300))).collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    in_child(|| hold_vectors(77, 100));
}

static TAKEN: AtomicU64 = AtomicU64::new(0);

extern "C" fn scribble(_: i32) {
    TAKEN.fetch_add(1, Ordering::SeqCst);
    let v = std::hint::black_box([1.5_f64; 16]);
    let sum: f64 = v.iter().map(|x| x.sqrt()).sum();
    std::hint::black_box(sum);
    unsafe {
        if std::arch::is_x86_feature_detected!("avx") {
            std::arch::asm!("vpcmpeqd ymm3, ymm3, ymm3", "vpxor ymm7, ymm7, ymm7", "vpxor ymm12, ymm12, ymm12",
                out("ymm3") _, out("ymm7") _, out("ymm12") _);
        }
    }
}

fn fpu_signals() {
    handle(libc::SIGUSR1, scribble as *const () as usize, libc::SA_RESTART);
    static STOP: AtomicBool = AtomicBool::new(false);
    let target = unsafe { libc::pthread_self() } as usize;
    let sender = thread::spawn(move || {
        for _ in 0..2000 {
            if STOP.load(Ordering::SeqCst) {
                break;
            }
            unsafe { libc::pthread_kill(target as libc::pthread_t, libc::SIGUSR1) };
            thread::yield_now();
        }
    });
    hold_vectors(0x1122_3344, 500);
    STOP.store(true, Ordering::SeqCst);
    sender.join().unwrap();
    assert!(TAKEN.load(Ordering::SeqCst) > 0);
}

fn affinity() {
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let size = std::mem::size_of::<libc::cpu_set_t>();
    assert_eq!(unsafe { libc::sched_getaffinity(0, size, &raw mut set) }, 0);
    assert!(unsafe { libc::CPU_ISSET(0, &set) });
    let mut one: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    unsafe { libc::CPU_SET(0, &mut one) };
    assert_eq!(unsafe { libc::sched_setaffinity(0, size, &raw const one) }, 0);
    for _ in 0..20 {
        assert_eq!(unsafe { libc::sched_getcpu() }, 0);
        thread::yield_now();
    }
    let none: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    assert_eq!(ok(unsafe { libc::sched_setaffinity(0, size, &raw const none) }), Err(libc::EINVAL));
}

fn fair() {
    let stop = Arc::new(AtomicBool::new(false));
    let counts: Vec<Arc<AtomicU64>> = (0..4).map(|_| Arc::default()).collect();
    let threads: Vec<_> = counts
        .iter()
        .map(|c| {
            let (c, stop) = (c.clone(), stop.clone());
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    c.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let start = Instant::now();
    while counts.iter().any(|c| c.load(Ordering::Relaxed) < 1000) {
        assert!(start.elapsed() < Duration::from_secs(60), "a computing thread starves");
        thread::sleep(Duration::from_millis(5));
    }
    stop.store(true, Ordering::Relaxed);
    threads.into_iter().for_each(|t| t.join().unwrap());
}

fn main_exits() {
    let pid = super::sys::fork(|| {
        let ready = Arc::new(Barrier::new(2));
        let r = ready.clone();
        thread::spawn(move || {
            r.wait();
            thread::sleep(Duration::from_millis(30));
            unsafe { libc::_exit(5) }
        });
        ready.wait();
        unsafe { libc::syscall(libc::SYS_exit, 0) };
        1
    });
    assert_eq!(libc::WEXITSTATUS(super::sys::wait(pid)), 5);
}

/// Threads come and go, wake each other and make calls while signals arrive at any moment: no call is lost, made twice or given another's
/// result.
fn beside_signals() {
    static ALARMS: AtomicU64 = AtomicU64::new(0);
    extern "C" fn alarm(_: libc::c_int) {
        ALARMS.fetch_add(1, Ordering::Relaxed);
        unsafe { libc::getppid() };
    }
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = alarm as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()), 0);
        let every = libc::timeval { tv_sec: 0, tv_usec: 700 };
        let timer = libc::itimerval { it_interval: every, it_value: every };
        assert_eq!(libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()), 0);
    }
    let mut pipe = [0; 2];
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    let mut sum = 0;
    for i in 0..400_u32 {
        let writer = thread::spawn(move || {
            let bytes = i.to_ne_bytes();
            for b in &bytes {
                assert_eq!(unsafe { libc::write(pipe[1], std::ptr::from_ref(b).cast(), 1) }, 1);
            }
            u64::from(i)
        });
        let mut bytes = [0_u8; 4];
        for b in &mut bytes {
            assert_eq!(unsafe { libc::read(pipe[0], std::ptr::from_mut(b).cast(), 1) }, 1);
        }
        assert_eq!(u32::from_ne_bytes(bytes), i);
        sum += writer.join().unwrap();
    }
    assert_eq!(sum, 399 * 400 / 2);
    while ALARMS.load(Ordering::Relaxed) < 3 {
        unsafe { libc::pause() };
    }
    unsafe {
        let timer: libc::itimerval = std::mem::zeroed();
        assert_eq!(libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()), 0);
    }
}

/// A thread that makes calls without end until another, which it woke, has run: that one must not wait for the calls to end.
fn awaited_by_calls() {
    for _ in 0..50 {
        let done = Arc::new(AtomicBool::new(false));
        let d = done.clone();
        let other = thread::spawn(move || d.store(true, Ordering::SeqCst));
        let mut byte = 0_u8;
        while !done.load(Ordering::SeqCst) {
            assert_eq!(unsafe { libc::read(-1, std::ptr::from_mut(&mut byte).cast(), 1) }, -1);
        }
        other.join().unwrap();
    }
}
