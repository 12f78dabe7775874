//! What objects without a path have in common: inode numbers, attributes, names. Owns the numbering; never an object.
use core::sync::atomic::{AtomicU64, Ordering};

use guest_abi::types::{Stat, Timespec};
use guest_abi::{UserAddr, UserPtr};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::Result;
use crate::lock::{Mutex, Rank};
use crate::platform::host::AttrChange;
use crate::task::Task;
use crate::vfs::file::Caller;

/// st_dev of sockets.
pub const DEV_SOCKFS: u64 = 8;
/// st_dev of pipes.
pub const DEV_PIPEFS: u64 = 13;
/// st_dev of other anonymous inodes.
pub const DEV_ANON: u64 = 14;

/// A fresh inode number for pipefs, sockfs and anon_inodefs.
pub fn next_ino() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1025);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// CLOCK_REALTIME as a timespec.
pub fn timestamp(realtime_ns: u64) -> Timespec {
    let sec = i64::try_from(realtime_ns / 1_000_000_000).unwrap_or(i64::MAX);
    Timespec { sec, nsec: i64::from(u32::try_from(realtime_ns % 1_000_000_000).unwrap_or(0)) }
}

/// The inode of an object without a path.
pub struct AnonInode {
    /// Number.
    pub ino: u64,
    stat: Mutex<Stat>,
}

impl AnonInode {
    /// An inode of device `dev` with S_IF* and permission bits `mode`, owned by `task`.
    pub fn new(task: &Task, dev: u64, mode: u32) -> AnonInode {
        let cred = task.credentials();
        let now = timestamp(task.kernel().platform.realtime());
        let ino = next_ino();
        let stat = Stat {
            dev,
            ino,
            nlink: 1,
            mode,
            uid: cred.fsuid,
            gid: cred.fsgid,
            blksize: 4096,
            atime: now,
            mtime: now,
            ctime: now,
            ..Stat::default()
        };
        AnonInode { ino, stat: Mutex::new(Rank::Leaf, stat) }
    }

    /// Attributes.
    pub fn stat(&self) -> Stat {
        *self.stat.lock()
    }

    /// fchmod, fchown, futimens of such an object.
    pub fn set_attr(&self, change: &AttrChange) {
        let mut stat = self.stat.lock();
        if let Some(mode) = change.mode {
            stat.mode = (stat.mode & !0o7777) | (mode & 0o7777);
        }
        stat.uid = change.uid.unwrap_or(stat.uid);
        stat.gid = change.gid.unwrap_or(stat.gid);
        stat.atime = change.atime.unwrap_or(stat.atime);
        stat.mtime = change.mtime.unwrap_or(stat.mtime);
    }
}

/// Writes the answer of an ioctl to its argument.
pub fn put_user<T: IntoBytes + Immutable>(caller: &dyn Caller, arg: u64, value: &T) -> Result<u64> {
    caller.space()?.write(UserPtr::new(UserAddr(arg)), value)?;
    Ok(0)
}

/// Reads the argument of an ioctl.
pub fn get_user<T: FromBytes>(caller: &dyn Caller, arg: u64) -> Result<T> {
    caller.space()?.read(UserPtr::new(UserAddr(arg)))
}
