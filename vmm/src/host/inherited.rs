//! Which standard streams the process was started with. Owns a note taken before the language's runtime puts /dev/null in the place
//! of closed ones.
#![allow(unsafe_code)]
use std::sync::atomic::{AtomicU8, Ordering};

static OPEN: AtomicU8 = AtomicU8::new(0);

extern "C" fn note() {
    for fd in 0..3 {
        // SAFETY: a query that takes no pointer.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0 {
            OPEN.fetch_or(1 << fd, Ordering::Relaxed);
        }
    }
}

// SAFETY: the section holds functions of this type, which the C library calls once, before main and any thread.
#[used]
#[unsafe(link_section = ".init_array")]
static NOTE: extern "C" fn() = note;

/// Whether standard stream `fd` was open when the process started.
pub fn was_open(fd: u8) -> bool {
    fd < 3 && OPEN.load(Ordering::Relaxed) & (1 << fd) != 0
}
