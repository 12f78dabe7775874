//! Rows of a few tasks that wait for each other, and of their making.
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::raw::{fork, futex, make_pipe, wait};
use super::{Row, per, times};

pub const ROWS: &[Row] = &[
    Row::inside("pingpong_futex", "ping-pong of two threads (futex)", 1000, pingpong_futex),
    Row::inside("pingpong_pipe", "ping-pong of two processes (pipe)", 1000, pingpong_pipe),
    Row::inside("thread_create", "thread create + join (pthread)", 200, pthread_create),
    Row::inside("thread_create_rust", "thread create + join (Rust, with its signal stack)", 200, thread_create),
    Row::inside("threads_1024", "1,024 threads parking and unparking, one wake-up", 4096, condvars),
];

fn pingpong_futex() -> f64 {
    let word = Arc::new(AtomicU32::new(0));
    let rounds = times(3000);
    let side = move |word: &AtomicU32, me: u32| {
        for _ in 0..rounds {
            while word.load(Ordering::SeqCst) != me {
                futex(word, libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, 1 - me);
            }
            word.store(1 - me, Ordering::SeqCst);
            futex(word, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1);
        }
    };
    let other = word.clone();
    let start = Instant::now();
    let t = thread::spawn(move || side(&other, 1));
    side(&word, 0);
    t.join().unwrap();
    per(start, rounds)
}

fn pingpong_pipe() -> f64 {
    let (a, b) = (make_pipe(), make_pipe());
    let rounds = times(3000);
    let pass = |from: i32, to: i32| unsafe {
        let mut byte = [0_u8];
        libc::read(from, byte.as_mut_ptr().cast(), 1);
        libc::write(to, byte.as_ptr().cast(), 1);
    };
    let other = fork(|| {
        (0..rounds).for_each(|_| pass(a[0], b[1]));
        0
    });
    let start = Instant::now();
    super::raw::write_byte(a[1]);
    (1..rounds).for_each(|_| pass(b[0], a[1]));
    super::raw::read_byte(b[0]);
    let result = per(start, rounds);
    wait(other);
    result
}

extern "C" fn nothing(_: *mut libc::c_void) -> *mut libc::c_void {
    std::ptr::null_mut()
}

fn pthread_create() -> f64 {
    let n = times(500);
    let start = Instant::now();
    for _ in 0..n {
        let mut t: libc::pthread_t = 0;
        unsafe {
            assert_eq!(libc::pthread_create(&raw mut t, std::ptr::null(), nothing, std::ptr::null_mut()), 0);
            libc::pthread_join(t, std::ptr::null_mut());
        }
    }
    per(start, n)
}

fn thread_create() -> f64 {
    let n = times(500);
    let start = Instant::now();
    for _ in 0..n {
        thread::spawn(|| ()).join().unwrap();
    }
    per(start, n)
}

/// Nanoseconds of one wake-up of one of 1,024 threads.
fn condvars() -> f64 {
    let pairs: Vec<Arc<(Mutex<u32>, Condvar)>> = (0..1024).map(|_| Arc::default()).collect();
    let rounds = (times(4096) / 1024).max(1);
    let threads: Vec<_> = pairs
        .iter()
        .cloned()
        .map(|p| {
            let body = move || {
                for want in 1..=rounds {
                    let mut n = p.0.lock().unwrap();
                    while *n < want {
                        n = p.1.wait(n).unwrap();
                    }
                }
            };
            thread::Builder::new().stack_size(32 << 10).spawn(body).expect("a thread")
        })
        .collect();
    thread::sleep(Duration::from_millis(200));
    let start = Instant::now();
    for _ in 0..rounds {
        for p in &pairs {
            *p.0.lock().unwrap() += 1;
            p.1.notify_one();
        }
    }
    threads.into_iter().for_each(|t| t.join().unwrap());
    per(start, 1024 * rounds)
}
