//! The process's signals as a descriptor (signalfd(2)). Owns the calls; never what a signal means.
#![allow(unsafe_code)]
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

fn set(signals: &[i32]) -> libc::sigset_t {
    // SAFETY: sigset_t is plain data, which sigemptyset initializes.
    let mut set: libc::sigset_t = unsafe { core::mem::zeroed() };
    // SAFETY: `set` is valid; an invalid number only gives an error.
    unsafe {
        libc::sigemptyset(&raw mut set);
        for s in signals {
            libc::sigaddset(&raw mut set, *s);
        }
    }
    set
}

/// Blocks signals in the calling thread and those it starts, so that only the reactor takes them.
pub fn block(signals: &[i32]) {
    let set = set(signals);
    // SAFETY: `set` is valid.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, core::ptr::null_mut()) };
}

/// A descriptor that delivers `signals`.
pub(super) fn open(signals: &[i32]) -> io::Result<OwnedFd> {
    let set = set(signals);
    // SAFETY: `set` is valid.
    let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The next signal, if there is one.
pub(super) fn next(fd: &OwnedFd) -> Option<i32> {
    let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
    match rustix::io::read(fd, &mut info) {
        // ssi_signo is the first member.
        Ok(n) if n == info.len() => Some(i32::from_ne_bytes([info[0], info[1], info[2], info[3]])),
        _ => None,
    }
}
