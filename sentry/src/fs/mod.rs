//! File systems and anonymous files. Each owns its contents; none resolves paths.
pub mod anon;
pub mod dev;
pub mod epoll;
pub mod eventfd;
pub mod host;
pub mod inotify;
pub mod kinds;
pub mod mqueue;
pub mod overlay;
pub mod pipe;
pub mod proc;
pub mod pts;
mod recent;
pub mod root;
pub mod signalfd;
pub mod stdio;
pub mod sys;
pub mod timerfd;
pub mod tmpfs;
pub mod tty;

use std::sync::atomic::{AtomicU64, Ordering};

pub use root::{Bind, MountError, RootConfig, assemble_root};

use crate::vfs::{File, PathRef};

/// A device number of its own for a file system without a device (major 0), above those that `anon` names.
pub fn new_device() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(32);
    dev::makedev(0, NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The inode number that `..` of an opened directory shows.
pub(crate) fn parent_ino(file: &File) -> Option<u64> {
    let mut at: PathRef = file.path()?.clone();
    while at.dentry.parent().is_none() {
        at = at.mount.mountpoint()?;
    }
    at.dentry.parent()?.inode().stat().ok().map(|s| s.ino)
}
