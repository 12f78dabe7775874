//! What rows do with the kernel directly: futexes, pipes, forks, and threads on stacks of one mapping, so that a crowd of them
//! meets no limit on mappings (vm.max_map_count).
use std::io::Error;
use std::sync::atomic::{AtomicU32, Ordering};

pub fn futex(word: &AtomicU32, op: i32, value: u32) {
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, value, 0) };
}

/// Sleeps until the word is no longer `value`.
pub fn sleep_while(word: &AtomicU32, value: u32) {
    while word.load(Ordering::SeqCst) == value {
        futex(word, libc::FUTEX_WAIT, value);
    }
}

pub fn make_pipe() -> [i32; 2] {
    let mut fds = [0; 2];
    assert_eq!(unsafe { libc::pipe(fds.as_mut_ptr()) }, 0, "pipe: {}", Error::last_os_error());
    fds
}

pub fn write_byte(fd: i32) {
    unsafe { libc::write(fd, b"x".as_ptr().cast(), 1) };
}

pub fn read_byte(fd: i32) {
    let mut byte = [0_u8];
    assert_eq!(unsafe { libc::read(fd, byte.as_mut_ptr().cast(), 1) }, 1, "a process ended early");
}

/// Runs `f` in a child, which ends with its status; the child's number.
pub fn fork(f: impl FnOnce() -> i32) -> i32 {
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", Error::last_os_error());
    if pid == 0 {
        let status = f();
        unsafe { libc::_exit(status) }
    }
    pid
}

pub fn wait(pid: i32) {
    let got = unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
    assert_eq!(got, pid, "waitpid: {}", Error::last_os_error());
}

pub fn map(len: usize) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let p = unsafe { libc::mmap(std::ptr::null_mut(), len, 3, flags, -1, 0) };
    assert_ne!(p, libc::MAP_FAILED, "mmap: {}", Error::last_os_error());
    p.cast()
}

pub fn touch(p: *mut u8, len: usize) {
    for offset in (0..len).step_by(4096) {
        unsafe { p.add(offset).write_volatile(1) };
    }
}

const STACK: usize = 16 << 10;

/// Threads that sleep until they are let go. They use no thread-local storage: it is their maker's.
pub struct Crowd {
    shared: Box<Shared>,
    ends: Vec<AtomicU32>,
    stacks: *mut u8,
}

#[derive(Default)]
struct Shared {
    asleep: AtomicU32,
    wanted: u32,
    open: AtomicU32,
}

extern "C" fn sleeper(shared: *mut libc::c_void) -> i32 {
    let shared = unsafe { &*shared.cast::<Shared>() };
    if shared.asleep.fetch_add(1, Ordering::SeqCst) + 1 == shared.wanted {
        futex(&shared.asleep, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1);
    }
    while shared.open.load(Ordering::SeqCst) == 0 {
        futex(&shared.open, libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, 0);
    }
    0
}

impl Crowd {
    /// `n` threads, made one after the other by clone(2); all of them have run when this returns.
    pub fn new(n: u32) -> Crowd {
        let count = n as usize;
        let mut shared = Box::new(Shared { wanted: n, ..Shared::default() });
        let ends: Vec<AtomicU32> = (0..count).map(|_| AtomicU32::new(1)).collect();
        let stacks = map((count * STACK).max(STACK));
        let flags = libc::CLONE_VM
            | libc::CLONE_FS
            | libc::CLONE_FILES
            | libc::CLONE_SIGHAND
            | libc::CLONE_THREAD
            | libc::CLONE_SYSVSEM
            | libc::CLONE_CHILD_CLEARTID;
        for (i, end) in ends.iter().enumerate() {
            let tid = unsafe {
                let top = stacks.add((i + 1) * STACK);
                let arg: *mut Shared = &raw mut *shared;
                libc::clone(sleeper, top.cast(), flags, arg.cast(), 0, 0, end.as_ptr())
            };
            assert!(tid > 0, "clone of thread {i}: {}", Error::last_os_error());
        }
        loop {
            let asleep = shared.asleep.load(Ordering::SeqCst);
            if asleep == n {
                break;
            }
            futex(&shared.asleep, libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, asleep);
        }
        Crowd { shared, ends, stacks }
    }

    /// Wakes all and waits for their ends.
    pub fn end(self) {
        self.shared.open.store(1, Ordering::SeqCst);
        futex(&self.shared.open, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX as u32);
        for end in &self.ends {
            sleep_while(end, 1);
        }
        unsafe { libc::munmap(self.stacks.cast(), (self.ends.len() * STACK).max(STACK)) };
    }
}

/// Runs `f` as the init of a PID namespace of its own that has its own /proc; what `f` gives. Needs root.
pub fn in_own_namespace(f: impl FnOnce() -> f64) -> f64 {
    let [result, tell] = make_pipe();
    let outer = fork(|| {
        let made = unsafe { libc::unshare(libc::CLONE_NEWPID | libc::CLONE_NEWNS) };
        assert_eq!(made, 0, "unshare: {}", Error::last_os_error());
        let init = fork(|| {
            let root = c"/".as_ptr();
            let proc = c"proc".as_ptr();
            let none = std::ptr::null();
            let mounted = unsafe {
                libc::mount(none, root, none, libc::MS_REC | libc::MS_PRIVATE, none.cast()) == 0
                    && libc::mount(proc, c"/proc".as_ptr(), proc, 0, none.cast()) == 0
            };
            assert!(mounted, "mount: {}", Error::last_os_error());
            let figure = f().to_ne_bytes();
            unsafe { libc::write(tell, figure.as_ptr().cast(), figure.len()) };
            0
        });
        wait(init);
        0
    });
    unsafe { libc::close(tell) };
    let mut figure = [0_u8; 8];
    let got = unsafe { libc::read(result, figure.as_mut_ptr().cast(), figure.len()) };
    wait(outer);
    assert_eq!(got, 8, "the process in the namespace gave no figure");
    f64::from_ne_bytes(figure)
}
