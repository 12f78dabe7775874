//! fchmodat2(2), which the libraries do not offer yet. Owns the one call.
#![allow(unsafe_code)]
use std::os::fd::{AsRawFd, BorrowedFd};

use guest_abi::Errno;

const SYS_FCHMODAT2: libc::c_long = 452;

/// Changes the permission bits of the very node `fd` refers to (O_PATH included). ENOSYS before Linux 6.6.
pub(super) fn chmod(fd: BorrowedFd<'_>, mode: u32) -> Result<(), Errno> {
    // SAFETY: the path is a valid empty string; nothing else is a pointer.
    let r = unsafe { libc::syscall(SYS_FCHMODAT2, fd.as_raw_fd(), c"".as_ptr(), mode, libc::AT_EMPTY_PATH) };
    if r == 0 {
        return Ok(());
    }
    Err(Errno::from_raw(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)))
}
