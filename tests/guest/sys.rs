//! Thin forms of calls that the cases share: results as `Result<i64, errno>`.

/// The last error number.
pub fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// A raw system call: its value, or the error number.
pub fn call(nr: i64, args: [u64; 6]) -> Result<i64, i32> {
    let r = unsafe { libc::syscall(nr, args[0], args[1], args[2], args[3], args[4], args[5]) };
    if r == -1 { Err(errno()) } else { Ok(r) }
}

/// Turns a libc result into a value or the error number.
pub fn ok(r: impl Into<i64>) -> Result<i64, i32> {
    match r.into() {
        -1 => Err(errno()),
        v => Ok(v),
    }
}

/// Forks; the child runs `child` and exits with what it gives. The parent gets the pid.
pub fn fork(child: impl FnOnce() -> i32) -> i32 {
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", errno());
    if pid == 0 {
        let status = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(101);
        unsafe { libc::_exit(status) }
    }
    pid
}

/// clone(2) as fork with further flags; the child runs `child` and exits with what it gives.
pub fn clone(flags: u64, child: impl FnOnce() -> i32) -> Result<i32, i32> {
    let pid = call(libc::SYS_clone, [flags | libc::SIGCHLD as u64, 0, 0, 0, 0, 0])?;
    if pid == 0 {
        let status = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(101);
        unsafe { libc::_exit(status) }
    }
    Ok(pid as i32)
}

/// A pipe: where to read, where to write.
pub fn pipe() -> (i32, i32) {
    let mut fds = [0; 2];
    assert_eq!(unsafe { libc::pipe(fds.as_mut_ptr()) }, 0);
    (fds[0], fds[1])
}

/// Waits for a byte.
pub fn read_byte(fd: i32) {
    let mut byte = [0_u8];
    assert_eq!(unsafe { libc::read(fd, byte.as_mut_ptr().cast(), 1) }, 1, "read: {}", errno());
}

/// Sends a byte.
pub fn write_byte(fd: i32) {
    assert_eq!(unsafe { libc::write(fd, b"x".as_ptr().cast(), 1) }, 1, "write: {}", errno());
}

/// Waits for a child; its raw status.
pub fn wait(pid: i32) -> i32 {
    let mut status = 0;
    loop {
        match ok(unsafe { libc::waitpid(pid, &raw mut status, 0) }) {
            Ok(_) => return status,
            Err(libc::EINTR) => {}
            Err(e) => panic!("waitpid: {e}"),
        }
    }
}

/// Runs `child` in a child process and asserts that it exits with 0.
pub fn in_child(child: impl FnOnce()) {
    let status = wait(fork(|| {
        child();
        0
    }));
    assert_eq!(status, 0, "the child ended with status {status:#x}");
}

/// Runs `child` in a child process and asserts that the signal kills it.
pub fn killed_by(signal: i32, child: impl FnOnce()) {
    let status = wait(fork(|| {
        no_core();
        child();
        0
    }));
    assert!(
        libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == signal,
        "status {status:#x}, expected signal {signal}"
    );
}

/// Keeps expected deaths from leaving core files.
pub fn no_core() {
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
}

/// An anonymous private mapping.
pub fn map(len: usize, prot: i32) -> *mut u8 {
    let p = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    assert_ne!(p, libc::MAP_FAILED, "mmap: {}", errno());
    p.cast()
}

/// Installs a handler with flags.
pub fn handle(signal: i32, handler: usize, flags: i32) {
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = flags;
    assert_eq!(unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) }, 0);
}
