//! Making KVM drop its translations of private memory without touching contents or rights. Owns one userfaultfd(2), on which no
//! page is ever protected and no event ever arrives.
//!
//! "Lift the write protection" of pages that have none changes nothing but tells KVM that the range may have changed: one
//! system call under the shared memory lock, 0.5 µs where an mprotect(2) round trip takes 3 µs and splits mappings.
#![allow(unsafe_code)]
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// UFFD_USER_MODE_ONLY: needs no privilege.
const USER_MODE_ONLY: i32 = 1;
const API: u64 = 0xaa;
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1;
const REGISTER_MODE_WP: u64 = 2;
const WRITEPROTECT_MODE_DONTWAKE: u64 = 2;
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFDIO_WRITEPROTECT: u64 = 0xc018_aa06;

/// Requests made while the guest runs, for the jail's list.
pub(crate) const REQUESTS: &[u64] = &[UFFDIO_REGISTER, UFFDIO_WRITEPROTECT];

/// struct uffdio_api.
#[repr(C)]
struct ApiArgument {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// struct uffdio_register.
#[repr(C)]
struct RegisterArgument {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

/// struct uffdio_writeprotect.
#[repr(C)]
struct WriteProtectArgument {
    start: u64,
    len: u64,
    mode: u64,
}

/// The descriptor, where the host has such a thing.
pub(super) struct Nudge(Option<OwnedFd>);

impl Nudge {
    /// Asks the host kernel; what it lacks is replaced by the slower way.
    pub(super) fn new() -> Nudge {
        // SAFETY: no pointers; a new descriptor or an error.
        let raw = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY) };
        let Ok(raw) = i32::try_from(raw) else { return Nudge(None) };
        if raw < 0 {
            return Nudge(None);
        }
        // SAFETY: a new descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let mut argument = ApiArgument { api: API, features: FEATURE_PAGEFAULT_FLAG_WP, ioctls: 0 };
        // SAFETY: the argument is a valid uffdio_api.
        let r = unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &raw mut argument) };
        Nudge((r == 0 && argument.features & FEATURE_PAGEFAULT_FLAG_WP != 0).then_some(fd))
    }

    /// Makes `nudge` possible for a range of private anonymous memory. Without success the other way serves.
    pub(super) fn cover(&self, at: *mut u8, len: u64) {
        let Some(fd) = &self.0 else { return };
        let mut argument = RegisterArgument { start: at as u64, len, mode: REGISTER_MODE_WP, ioctls: 0 };
        // SAFETY: the argument is a valid uffdio_register; write-protect mode alone changes no access.
        let r = unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_REGISTER, &raw mut argument) };
        if r != 0 {
            log::debug!("userfaultfd does not cover guest memory: {}", std::io::Error::last_os_error());
        }
    }

    /// Makes KVM drop its translations of a range. False if this way does not work.
    pub(super) fn nudge(&self, at: *mut u8, len: u64) -> bool {
        let Some(fd) = &self.0 else { return false };
        let mut argument = WriteProtectArgument { start: at as u64, len, mode: WRITEPROTECT_MODE_DONTWAKE };
        // SAFETY: the argument is a valid uffdio_writeprotect, and no page is protected.
        unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_WRITEPROTECT, &raw mut argument) == 0 }
    }
}
