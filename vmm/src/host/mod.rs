//! What lies outside of the sandbox: directory trees, files, byte streams. Owns descriptors opened before the guest runs and what is
//! opened beneath them; never a path of the host after that.
mod chmod;
pub mod file;
pub mod inherited;
pub mod stream;
mod terminal;
pub(crate) use terminal::REQUESTS as TERMINAL_REQUESTS;
pub mod tree;
mod vectored;

use guest_abi::Errno;
use guest_abi::types::{Stat, Timespec};

fn errno(e: rustix::io::Errno) -> Errno {
    Errno::from_raw(e.raw_os_error())
}

fn stat(s: &rustix::fs::Stat) -> Stat {
    Stat {
        dev: s.st_dev,
        ino: s.st_ino,
        nlink: s.st_nlink,
        mode: s.st_mode,
        uid: s.st_uid,
        gid: s.st_gid,
        pad0: 0,
        rdev: s.st_rdev,
        size: s.st_size,
        blksize: s.st_blksize,
        blocks: s.st_blocks,
        atime: Timespec { sec: s.st_atime, nsec: s.st_atime_nsec as i64 },
        mtime: Timespec { sec: s.st_mtime, nsec: s.st_mtime_nsec as i64 },
        ctime: Timespec { sec: s.st_ctime, nsec: s.st_ctime_nsec as i64 },
        unused: [0; 3],
    }
}

#[cfg(test)]
mod tests;
