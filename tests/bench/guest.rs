//! The measured side: each row prints nanoseconds an operation.
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// A row: its name, what it says in the table, and its code, which gives nanoseconds an operation.
pub struct Row {
    pub name: &'static str,
    pub label: &'static str,
    pub quick: bool,
    pub measure: fn() -> f64,
}

const fn row(name: &'static str, label: &'static str, quick: bool, measure: fn() -> f64) -> Row {
    Row { name, label, quick, measure }
}

/// All rows measured inside; starting a program is measured from outside.
pub const ROWS: &[Row] = &[
    row("getppid", "getppid", true, getppid),
    row("clock_gettime", "clock_gettime", true, clock_gettime),
    row("read_zero", "read 1 byte of /dev/zero", true, read_zero),
    row("pipe", "pipe write + read, one thread", true, pipe),
    row("pingpong_futex", "ping-pong of two threads (futex)", true, pingpong_futex),
    row("pingpong_pipe", "ping-pong of two processes (pipe)", true, pingpong_pipe),
    row("first_touch", "first touch of a page, 64 MiB", true, first_touch),
    row("mmap_munmap", "mmap 64 KiB, touch one page, munmap", true, mmap_munmap),
    row("fork_exec", "fork + exec + wait, 64 MiB touched", true, fork_exec),
    row("thread_create", "thread create + join", true, thread_create),
    row("open_read_close", "open + read + close of a small file", true, open_read_close),
    row("stat", "stat of a path of four components", true, stat),
    row("threads_1024", "1,024 threads parking and unparking", false, condvars),
    row("threads_16384", "16,384 threads created, then joined", false, threads_16384),
    row("processes_4096", "4,096 processes created, then killed", false, processes_4096),
    row("groups_64x256", "64 processes of 256 threads created, then killed", false, groups_64x256),
    row("list_proc_1", "list /proc with one thread in one process", false, || list_proc(1)),
    row("list_proc", "list /proc with 1,024 threads in one process", false, || list_proc(1024)),
    row("list_proc_16384", "list /proc with 16,384 threads in one process", false, || list_proc(16_384)),
    row("kill_all_1", "kill(-1, 0) with one thread", false, || kill_all(1)),
    row("kill_all", "kill(-1, 0) with 1,024 threads", false, || kill_all(1024)),
    row("kill_all_16384", "kill(-1, 0) with 16,384 threads", false, || kill_all(16_384)),
    row("compute", "integer and floating-point work, 1 s natively", false, compute),
];

/// Runs a row and prints its figure.
pub fn run(name: &str) {
    if let Some(row) = ROWS.iter().find(|r| r.name == name) {
        println!("{:.1}", (row.measure)());
    } else {
        eprintln!("bench: no row named '{name}'");
        std::process::exit(2);
    }
}

fn per(start: Instant, n: u32) -> f64 {
    start.elapsed().as_nanos() as f64 / f64::from(n)
}

fn loop_for(budget: Duration, mut f: impl FnMut()) -> f64 {
    let start = Instant::now();
    let mut n = 0;
    while start.elapsed() < budget {
        for _ in 0..16 {
            f();
        }
        n += 16;
    }
    per(start, n)
}

const BUDGET: Duration = Duration::from_millis(200);

fn getppid() -> f64 {
    loop_for(BUDGET, || unsafe {
        libc::syscall(libc::SYS_getppid);
    })
}

fn clock_gettime() -> f64 {
    let n = 200_000;
    let start = Instant::now();
    let mut t: libc::timespec = unsafe { std::mem::zeroed() };
    for _ in 0..n {
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut t) };
    }
    per(start, n)
}

fn read_zero() -> f64 {
    let fd = unsafe { libc::open(c"/dev/zero".as_ptr(), libc::O_RDONLY) };
    let mut b = [0_u8];
    loop_for(BUDGET, || unsafe {
        libc::read(fd, b.as_mut_ptr().cast(), 1);
    })
}

fn make_pipe() -> [i32; 2] {
    let mut fds = [0; 2];
    unsafe { libc::pipe(fds.as_mut_ptr()) };
    fds
}

fn pipe() -> f64 {
    let fds = make_pipe();
    let mut b = [0_u8];
    loop_for(BUDGET, || unsafe {
        libc::write(fds[1], b.as_ptr().cast(), 1);
        libc::read(fds[0], b.as_mut_ptr().cast(), 1);
    })
}

fn futex(word: &AtomicU32, op: i32, value: u32) {
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op | libc::FUTEX_PRIVATE_FLAG, value, 0) };
}

fn pingpong_futex() -> f64 {
    let word = Arc::new(AtomicU32::new(0));
    let rounds = 3000;
    let side = move |word: &AtomicU32, me: u32| {
        for _ in 0..rounds {
            while word.load(Ordering::SeqCst) != me {
                futex(word, libc::FUTEX_WAIT, 1 - me);
            }
            word.store(1 - me, Ordering::SeqCst);
            futex(word, libc::FUTEX_WAKE, 1);
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
    let rounds = 3000;
    let mut byte = [0_u8];
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        for _ in 0..rounds {
            unsafe {
                libc::read(a[0], byte.as_mut_ptr().cast(), 1);
                libc::write(b[1], byte.as_ptr().cast(), 1);
            }
        }
        unsafe { libc::_exit(0) }
    }
    let start = Instant::now();
    for _ in 0..rounds {
        unsafe {
            libc::write(a[1], byte.as_ptr().cast(), 1);
            libc::read(b[0], byte.as_mut_ptr().cast(), 1);
        }
    }
    let result = per(start, rounds);
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
    result
}

fn map(len: usize) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    unsafe { libc::mmap(std::ptr::null_mut(), len, 3, flags, -1, 0).cast() }
}

fn touch(p: *mut u8, len: usize) {
    for offset in (0..len).step_by(4096) {
        unsafe { p.add(offset).write_volatile(1) };
    }
}

fn first_touch() -> f64 {
    let len = 64 << 20;
    let p = map(len);
    let start = Instant::now();
    touch(p, len);
    per(start, (len / 4096) as u32)
}

fn mmap_munmap() -> f64 {
    loop_for(BUDGET, || {
        let p = map(64 << 10);
        unsafe {
            p.write_volatile(1);
            libc::munmap(p.cast(), 64 << 10);
        }
    })
}

fn fork_exec() -> f64 {
    let len = 64 << 20;
    touch(map(len), len);
    let n = 20;
    let start = Instant::now();
    for _ in 0..n {
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let argv = [c"true".as_ptr(), std::ptr::null()];
            unsafe {
                libc::execv(c"/bin/true".as_ptr(), argv.as_ptr());
                libc::_exit(1)
            }
        }
        unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
    }
    per(start, n)
}

fn thread_create() -> f64 {
    let n = 500;
    let start = Instant::now();
    for _ in 0..n {
        thread::spawn(|| ()).join().unwrap();
    }
    per(start, n)
}

fn open_read_close() -> f64 {
    let mut b = [0_u8; 64];
    loop_for(BUDGET, || unsafe {
        let fd = libc::open(c"/etc/hostname".as_ptr(), libc::O_RDONLY);
        libc::read(fd, b.as_mut_ptr().cast(), 64);
        libc::close(fd);
    })
}

fn stat() -> f64 {
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    loop_for(BUDGET, || unsafe {
        libc::stat(c"/usr/share/doc/bash/copyright".as_ptr(), &raw mut st);
    })
}

fn small_thread(f: impl FnOnce() + Send + 'static) -> thread::JoinHandle<()> {
    thread::Builder::new().stack_size(32 << 10).spawn(f).expect("a thread")
}

fn condvars() -> f64 {
    let pairs: Vec<Arc<(Mutex<u32>, Condvar)>> = (0..1024).map(|_| Arc::default()).collect();
    let rounds = 4;
    let threads: Vec<_> = pairs
        .iter()
        .cloned()
        .map(|p| {
            small_thread(move || {
                for want in 1..=rounds {
                    let mut n = p.0.lock().unwrap();
                    while *n < want {
                        n = p.1.wait(n).unwrap();
                    }
                }
            })
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

fn threads_16384() -> f64 {
    let n = 16_384;
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let start = Instant::now();
    let threads: Vec<_> = (0..n)
        .map(|_| {
            let gate = gate.clone();
            small_thread(move || {
                let mut open = gate.0.lock().unwrap();
                while !*open {
                    open = gate.1.wait(open).unwrap();
                }
            })
        })
        .collect();
    let created = start.elapsed();
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    threads.into_iter().for_each(|t| t.join().unwrap());
    created.as_nanos() as f64
}

fn with_asleep(n: usize, f: impl FnOnce() -> f64) -> f64 {
    let (ready, done) = (Arc::new(Barrier::new(n + 1)), Arc::new(Barrier::new(n + 1)));
    let threads: Vec<_> = (0..n)
        .map(|_| {
            let (ready, done) = (ready.clone(), done.clone());
            small_thread(move || {
                ready.wait();
                done.wait();
            })
        })
        .collect();
    ready.wait();
    let result = f();
    done.wait();
    threads.into_iter().for_each(|t| t.join().unwrap());
    result
}

fn list_proc(threads: usize) -> f64 {
    with_asleep(threads, || {
        loop_for(BUDGET, || {
            let n = std::fs::read_dir("/proc").map_or(0, Iterator::count);
            assert!(n > 0);
        })
    })
}

fn kill_all(threads: usize) -> f64 {
    with_asleep(threads, || {
        loop_for(BUDGET, || unsafe {
            libc::kill(-1, 0);
        })
    })
}

/// Time to make `processes` of `threads` each and to kill and reap them.
fn families(processes: usize, threads: usize) -> f64 {
    let [ready, tell] = make_pipe();
    let start = Instant::now();
    let pids: Vec<i32> = (0..processes)
        .map(|_| {
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                let all: Vec<_> = (1..threads).map(|_| small_thread(thread::park)).collect();
                unsafe {
                    libc::write(tell, b"x".as_ptr().cast(), 1);
                    libc::pause();
                }
                drop(all);
                unsafe { libc::_exit(0) }
            }
            pid
        })
        .collect();
    let mut byte = [0_u8];
    for _ in 0..processes {
        unsafe { libc::read(ready, byte.as_mut_ptr().cast(), 1) };
    }
    for pid in &pids {
        unsafe { libc::kill(*pid, libc::SIGKILL) };
    }
    for pid in &pids {
        unsafe { libc::waitpid(*pid, std::ptr::null_mut(), 0) };
    }
    start.elapsed().as_nanos() as f64
}

fn processes_4096() -> f64 {
    families(4096, 1)
}

fn groups_64x256() -> f64 {
    families(64, 256)
}

fn compute() -> f64 {
    let start = Instant::now();
    let (mut x, mut f) = (1_u64, 1.0_f64);
    for i in 0..150_000_000_u64 {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(i);
        f = f.mul_add(1.000_000_1, 1e-9);
    }
    std::hint::black_box((x, f));
    start.elapsed().as_nanos() as f64
}
