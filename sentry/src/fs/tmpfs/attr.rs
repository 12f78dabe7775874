//! Attributes and extended attributes of in-memory inodes. Owns the values; never judges who may change them.
use std::collections::BTreeMap;

use guest_abi::types::{Stat, Timespec};
use linux_raw_sys::general::{XATTR_CREATE, XATTR_REPLACE};

use crate::platform::Platform;
use crate::platform::host::AttrChange;
use crate::{Errno, Result};

/// CLOCK_REALTIME as a timestamp.
pub fn now(platform: &dyn Platform) -> Timespec {
    let ns = platform.realtime();
    Timespec { sec: (ns / 1_000_000_000) as i64, nsec: (ns % 1_000_000_000) as i64 }
}

fn later(a: &Timespec, b: &Timespec) -> bool {
    (a.sec, a.nsec) > (b.sec, b.nsec)
}

/// What an inode says of itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attr {
    /// Permission bits (07777).
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Names.
    pub nlink: u32,
    /// Device number of a device inode.
    pub rdev: u64,
    /// Last access.
    pub atime: Timespec,
    /// Last change of contents.
    pub mtime: Timespec,
    /// Last change of the inode.
    pub ctime: Timespec,
}

impl Attr {
    /// A new inode of one name.
    pub fn new(mode: u32, uid: u32, gid: u32, now: Timespec) -> Attr {
        Attr { mode: mode & 0o7777, uid, gid, nlink: 1, rdev: 0, atime: now, mtime: now, ctime: now }
    }

    /// As a host file has them.
    pub fn from_stat(st: &Stat) -> Attr {
        Attr {
            mode: st.mode & 0o7777,
            uid: st.uid,
            gid: st.gid,
            nlink: u32::try_from(st.nlink).unwrap_or(u32::MAX),
            rdev: st.rdev,
            atime: st.atime,
            mtime: st.mtime,
            ctime: st.ctime,
        }
    }

    /// Applies everything but the size.
    pub fn apply(&mut self, change: &AttrChange, now: Timespec) {
        if let Some(mode) = change.mode {
            self.mode = mode & 0o7777;
        }
        if let Some(uid) = change.uid {
            self.uid = uid;
        }
        if let Some(gid) = change.gid {
            self.gid = gid;
        }
        if let Some(t) = change.atime {
            self.atime = t;
        }
        if let Some(t) = change.mtime {
            self.mtime = t;
        } else if change.size.is_some() {
            self.mtime = now;
        }
        self.ctime = now;
    }

    /// Contents changed.
    pub fn modified(&mut self, now: Timespec) {
        self.mtime = now;
        self.ctime = now;
    }

    /// Contents were read: the rule of the mount option relatime (mount(8)).
    pub fn accessed(&mut self, now: Timespec) {
        if !later(&self.atime, &self.mtime) || !later(&self.atime, &self.ctime) || now.sec - self.atime.sec >= 86_400 {
            self.atime = now;
        }
    }
}

/// Bytes of names and values one inode may hold; Linux's own bound is the memory of the cgroup.
const XATTR_TOTAL: usize = 256 << 10;

/// Extended attributes by name (xattr(7)).
#[derive(Default)]
pub struct Xattrs {
    map: BTreeMap<Vec<u8>, Vec<u8>>,
    bytes: usize,
}

impl Xattrs {
    /// ENODATA if absent.
    pub fn get(&self, name: &[u8]) -> Result<Vec<u8>> {
        self.map.get(name).cloned().ok_or(Errno::ENODATA)
    }

    /// Sets, with XATTR_CREATE (EEXIST) and XATTR_REPLACE (ENODATA).
    pub fn set(&mut self, name: &[u8], value: &[u8], flags: u32) -> Result<()> {
        let old = self.map.get(name).map(Vec::len);
        if flags & XATTR_CREATE != 0 && old.is_some() {
            return Err(Errno::EEXIST);
        }
        if flags & XATTR_REPLACE != 0 && old.is_none() {
            return Err(Errno::ENODATA);
        }
        let without = self.bytes - old.map_or(0, |len| len + name.len());
        let total = without + name.len() + value.len();
        if total > XATTR_TOTAL {
            return Err(Errno::ENOSPC);
        }
        self.bytes = total;
        self.map.insert(name.to_vec(), value.to_vec());
        Ok(())
    }

    /// ENODATA if absent.
    pub fn remove(&mut self, name: &[u8]) -> Result<()> {
        let old = self.map.remove(name).ok_or(Errno::ENODATA)?;
        self.bytes -= old.len() + name.len();
        Ok(())
    }

    /// What they count in inodes of the file system's bound: one for each started KiB.
    pub fn charge(&self) -> u64 {
        self.bytes.div_ceil(1024) as u64
    }

    /// All names.
    pub fn names(&self) -> Vec<Vec<u8>> {
        self.map.keys().cloned().collect()
    }
}

/// Whether tmpfs keeps an attribute of this name (the kinds that Linux's tmpfs keeps).
pub fn xattr_supported(name: &[u8]) -> bool {
    [&b"user."[..], b"trusted.", b"security."].iter().any(|p| name.len() > p.len() && name.starts_with(p))
}
