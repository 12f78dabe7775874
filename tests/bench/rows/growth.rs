//! Costs of operations while much else exists: tasks, processes, mappings, open files, directory entries. One run measures all
//! operations beside one crowd of one size.
use std::ffi::CString;
use std::io::Error;
use std::time::{Duration, Instant};

use super::raw::{Crowd, fork, make_pipe, map, wait};

/// An operation: its name and one of it.
type Operation<'a> = (&'static str, Box<dyn FnMut() + 'a>);

/// What grows, and its code, which prints a line for each operation beside so many.
type Dimension = (&'static str, fn(u32));

/// All that grows.
pub const DIMENSIONS: &[Dimension] = &[
    ("tasks", tasks),
    ("processes", processes),
    ("mappings", mappings),
    ("open files", open_files),
    ("directory entries", entries),
];

/// Operations of which one does something for every one of the crowd: the figure is that for one of them.
const OF_ALL: &[&str] = &["list the directory", "list /proc", "kill(-1, 0)"];

/// Time for one operation's figure.
const BUDGET: Duration = Duration::from_millis(60);

/// Measures one dimension at one size.
pub fn run(dimension: &str, n: u32) {
    match DIMENSIONS.iter().find(|(name, _)| *name == dimension) {
        Some((_, f)) => f(n),
        None => std::process::exit(2),
    }
}

fn measure(n: u32, dimension: &str, operations: &mut [Operation]) {
    for (name, f) in operations {
        f();
        let start = Instant::now();
        let mut count = 0;
        while start.elapsed() < BUDGET {
            (0..4).for_each(|_| f());
            count += 4;
        }
        let ns = start.elapsed().as_nanos() as f64 / f64::from(count);
        let all = OF_ALL.contains(name) && dimension != "tasks";
        println!("{ns:.1} {name}{}", if all { format!(", of {n}") } else { String::new() });
    }
}

fn getppid() {
    unsafe { libc::syscall(libc::SYS_getppid) };
}

fn fork_wait() {
    wait(fork(|| 0));
}

fn mmap_munmap() {
    let p = map(64 << 10);
    unsafe {
        p.write_volatile(1);
        libc::munmap(p.cast(), 64 << 10);
    }
}

fn open_close() {
    unsafe {
        let fd = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY);
        assert!(fd >= 0, "open: {}", Error::last_os_error());
        libc::close(fd);
    }
}

fn list_proc() {
    assert!(std::fs::read_dir("/proc").map_or(0, Iterator::count) > 0);
}

fn read_own_stat() {
    assert!(std::fs::read("/proc/self/stat").is_ok());
}

fn thread_create() {
    Crowd::new(1).end();
}

fn kill(pid: i32) {
    unsafe { libc::kill(pid, 0) };
}

fn tasks(n: u32) {
    let crowd = Crowd::new(n);
    let own = unsafe { libc::getpid() };
    measure(
        n,
        "tasks",
        &mut [
            ("getppid", Box::new(getppid)),
            ("kill(self, 0)", Box::new(|| kill(own))),
            ("kill(-1, 0)", Box::new(|| kill(-1))),
            ("list /proc", Box::new(list_proc)),
            ("read /proc/self/stat", Box::new(read_own_stat)),
            ("mmap, touch, munmap", Box::new(mmap_munmap)),
            ("fork, exit, wait", Box::new(fork_wait)),
            ("thread create, end", Box::new(thread_create)),
        ],
    );
    crowd.end();
}

fn processes(n: u32) {
    let [held, hold] = make_pipe();
    let sleeper = || {
        fork(|| {
            unsafe { libc::close(hold) };
            let mut byte = 0_u8;
            unsafe { libc::read(held, (&raw mut byte).cast(), 1) };
            0
        })
    };
    let pids: Vec<i32> = (0..n).map(|_| sleeper()).collect();
    let last = pids.last().copied().unwrap_or(0);
    measure(
        n,
        "processes",
        &mut [
            ("getppid", Box::new(getppid)),
            ("kill(child, 0)", Box::new(|| kill(last))),
            ("kill(-1, 0)", Box::new(|| kill(-1))),
            ("list /proc", Box::new(list_proc)),
            (
                "wait with nobody to wait for",
                Box::new(|| unsafe {
                    libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG);
                }),
            ),
            ("fork, exit, wait", Box::new(fork_wait)),
        ],
    );
    unsafe { libc::close(hold) };
    pids.into_iter().for_each(wait);
}

fn mappings(n: u32) {
    // Neighbours differ, so that they stay apart.
    let all = map(n as usize * 8192);
    for i in 0..n as usize {
        unsafe {
            assert_eq!(libc::mprotect(all.add(i * 8192).cast(), 4096, libc::PROT_READ), 0);
            all.add(i * 8192 + 4096).write_volatile(1);
        }
    }
    let page = unsafe { all.add(n as usize / 2 * 8192 + 4096) };
    measure(
        n,
        "mappings",
        &mut [
            ("mmap, touch, munmap", Box::new(mmap_munmap)),
            (
                "mprotect there and back",
                Box::new(|| unsafe {
                    libc::mprotect(page.cast(), 4096, libc::PROT_READ);
                    libc::mprotect(page.cast(), 4096, libc::PROT_READ | libc::PROT_WRITE);
                }),
            ),
            (
                "drop and touch a page",
                Box::new(|| unsafe {
                    libc::madvise(page.cast(), 4096, libc::MADV_DONTNEED);
                    page.write_volatile(1);
                }),
            ),
            ("fork, exit, wait", Box::new(fork_wait)),
        ],
    );
}

fn open_files(n: u32) {
    let limit = libc::rlimit { rlim_cur: 65_536, rlim_max: 65_536 };
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    let poller = unsafe { libc::epoll_create1(0) };
    let mut pipe = [0, 0];
    for i in 0..n {
        if i % 2 == 0 {
            pipe = make_pipe();
        }
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: u64::from(i) };
        let fd = pipe[i as usize % 2];
        let watched = unsafe { libc::epoll_ctl(poller, libc::EPOLL_CTL_ADD, fd, &raw mut event) };
        assert_eq!(watched, 0, "epoll_ctl: {}", Error::last_os_error());
    }
    measure(
        n,
        "open files",
        &mut [
            ("open, close", Box::new(open_close)),
            (
                "dup, close",
                Box::new(|| unsafe {
                    libc::close(libc::dup(poller));
                }),
            ),
            (
                "epoll_wait of one of them",
                Box::new(|| unsafe {
                    let mut event = libc::epoll_event { events: 0, u64: 0 };
                    let mut byte = 1_u8;
                    libc::write(pipe[1], (&raw const byte).cast(), 1);
                    assert_eq!(libc::epoll_wait(poller, &raw mut event, 1, 0), 1);
                    libc::read(pipe[0], (&raw mut byte).cast(), 1);
                }),
            ),
            ("fork, exit, wait", Box::new(fork_wait)),
        ],
    );
}

fn entries(n: u32) {
    let dir = std::env::temp_dir().join(format!("bench-growth-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory");
    for i in 0..n {
        std::fs::write(dir.join(format!("entry-{i}")), b"").expect("a file");
    }
    let path = |name: String| CString::new(dir.join(name).into_os_string().into_encoded_bytes()).unwrap_or_default();
    let (middle, fresh) = (path(format!("entry-{}", n / 2)), path("fresh".to_owned()));
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    measure(
        n,
        "directory entries",
        &mut [
            (
                "stat",
                Box::new(|| unsafe {
                    assert_eq!(libc::stat(middle.as_ptr(), &raw mut st), 0);
                }),
            ),
            (
                "open, close",
                Box::new(|| unsafe {
                    libc::close(libc::open(middle.as_ptr(), libc::O_RDONLY));
                }),
            ),
            (
                "create, unlink",
                Box::new(|| unsafe {
                    libc::close(libc::open(fresh.as_ptr(), libc::O_CREAT | libc::O_WRONLY, 0o600));
                    assert_eq!(libc::unlink(fresh.as_ptr()), 0);
                }),
            ),
            (
                "list the directory",
                Box::new(|| {
                    assert_eq!(std::fs::read_dir(&dir).map_or(0, Iterator::count), n as usize);
                }),
            ),
        ],
    );
    let _ = std::fs::remove_dir_all(&dir);
}
