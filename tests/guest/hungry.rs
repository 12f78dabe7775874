//! Programs that take all of one thing they can get. Not in the list of cases, as the host would pay: `tests/tests/bounds.rs` runs
//! them in sandboxes with little memory. Each prints how much it got and the error number that ended it.
use super::Case;
use super::sys::{call, ok};

pub const HUNGRY: &[Case] = &[
    ("hungry_pipes", pipes),
    ("hungry_sockets", sockets),
    ("hungry_descriptors", descriptors),
    ("hungry_tables", tables),
    ("hungry_tasks", tasks),
];

/// As many descriptors as there may be.
fn raise_limit() {
    let most = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const most) };
}

/// Calls `take` until it fails with something, at most `most` times.
fn take_all(what: &str, most: usize, mut take: impl FnMut(usize) -> Result<(), i32>) {
    for n in 0..most {
        if let Err(e) = take(n) {
            println!("{what}: {n}, then error {e}");
            assert!(
                [libc::ENOMEM, libc::EMFILE, libc::ENFILE, libc::EAGAIN, libc::ENOBUFS, libc::ENOSPC, libc::ENOLCK]
                    .contains(&e),
                "{what}: error {e}"
            );
            return;
        }
    }
    println!("{what}: all {most}");
}

/// Writes until the descriptor takes no more. What ends it early is no failure unless it is the first byte.
fn fill(fd: i32) -> Result<usize, i32> {
    let bytes = [b'x'; 4096];
    let mut total = 0;
    loop {
        match ok(unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) } as i64) {
            Ok(n) => total += n as usize,
            Err(libc::EAGAIN) => return Ok(total),
            Err(e) if total == 0 => return Err(e),
            Err(_) => return Ok(total),
        }
    }
}

fn pipes() {
    raise_limit();
    take_all("pipes full of data", 100_000, |_| {
        let mut fds = [0; 2];
        ok(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_NONBLOCK) })?;
        fill(fds[1]).map(|_| ())
    });
}

fn sockets() {
    raise_limit();
    for kind in [libc::SOCK_STREAM, libc::SOCK_DGRAM] {
        take_all("socket pairs full of data", 100_000, |_| {
            let mut fds = [0; 2];
            ok(unsafe { libc::socketpair(libc::AF_UNIX, kind | libc::SOCK_NONBLOCK, 0, fds.as_mut_ptr()) })?;
            fill(fds[0]).map(|_| ())
        });
        unsafe { libc::close_range(3, u32::MAX, 0) };
    }
}

fn descriptors() {
    raise_limit();
    take_all("eventfds", 1 << 20, |_| ok(unsafe { libc::eventfd(0, 0) }).map(|_| ()));
}

fn kill_all(made: &[i32]) {
    for &pid in made {
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}

/// Children, each with a copy of a large descriptor table.
fn tables() {
    raise_limit();
    assert_eq!(ok(unsafe { libc::dup2(0, 100_000) }), Ok(100_000));
    let mut made = Vec::new();
    take_all("copies of a table", 2000, |_| {
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            loop {
                unsafe { libc::pause() };
            }
        }
        ok(pid).map(|pid| made.push(pid as i32))
    });
    kill_all(&made);
}

fn tasks() {
    let mut made = Vec::new();
    take_all("children", 40_000, |_| {
        let pid = call(libc::SYS_fork, [0; 6])?;
        if pid == 0 {
            loop {
                unsafe { libc::pause() };
            }
        }
        made.push(pid as i32);
        Ok(())
    });
    kill_all(&made);
}
