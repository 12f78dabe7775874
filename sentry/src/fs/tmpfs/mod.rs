//! tmpfs: files that live in guest frames and sentry memory (tmpfs(5)). Owns names, attributes and contents; never
//! permissions or path resolution. Its parts (`attr`, `data`, `dir`) also carry the upper layer of `fs::overlay`.
pub mod attr;
pub mod data;
pub mod dir;
mod file;
mod inode;
pub mod quota;
mod rename;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use guest_abi::layout::PAGE_SIZE;
use guest_abi::types::Timespec;

pub use file::{MemFd, TmpFile};
pub(crate) use file::{read_inode, seek_data, write_inode};
pub use inode::{Body, TmpInode};
use quota::{Bound, Quota};

use crate::Result;
use crate::platform::Platform;
use crate::vfs::inode::Create;
use crate::vfs::{FileSystem, Inode};

/// TMPFS_MAGIC of statfs(2).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Mount options (tmpfs(5)).
#[derive(Clone, Copy, Debug)]
pub struct TmpfsOptions {
    /// size=, bytes; None: half of the sandbox's memory.
    pub size: Option<u64>,
    /// nr_inodes=; None: as many as half of the sandbox's memory has pages.
    pub inodes: Option<u64>,
    /// Permission bits of the root.
    pub mode: u32,
    /// Owner of the root.
    pub uid: u32,
    /// Group of the root.
    pub gid: u32,
}

impl Default for TmpfsOptions {
    fn default() -> Self {
        TmpfsOptions { size: None, inodes: None, mode: 0o1777, uid: 0, gid: 0 }
    }
}

/// What all inodes of one tmpfs share.
pub struct TmpShared {
    /// The machine: memory and clock.
    pub platform: Arc<dyn Platform>,
    /// st_dev.
    pub dev: u64,
    /// Bounds.
    pub quota: Arc<Quota>,
    next_ino: AtomicU64,
}

impl TmpShared {
    /// A store of inodes without names of its own. `first_ino` is the first number given out.
    pub fn new(platform: Arc<dyn Platform>, dev: u64, quota: Quota, first_ino: u64) -> Arc<TmpShared> {
        Arc::new(TmpShared { platform, dev, quota: Arc::new(quota), next_ino: AtomicU64::new(first_ino) })
    }

    /// The store of files that no mount shows: bounded by the sandbox's memory alone.
    pub fn kernel_internal(platform: Arc<dyn Platform>) -> Arc<TmpShared> {
        let memory = platform.memory().limit();
        let quota =
            Quota { pages: Bound::new(u64::MAX / PAGE_SIZE), inodes: Bound::inodes(&platform, memory / PAGE_SIZE) };
        TmpShared::new(platform, super::dev::makedev(0, 1), quota, 1)
    }

    /// An inode number of its own.
    pub fn new_ino(&self) -> u64 {
        self.next_ino.fetch_add(1, Ordering::Relaxed)
    }

    /// CLOCK_REALTIME.
    pub fn now(&self) -> Timespec {
        attr::now(&*self.platform)
    }
}

/// A mounted tmpfs.
pub struct TmpFs {
    shared: Arc<TmpShared>,
    root: Arc<TmpInode>,
    name: &'static str,
}

impl TmpFs {
    /// An empty file system; `name` as /proc/mounts shows it (`tmpfs`, or `devtmpfs`).
    pub fn new(platform: Arc<dyn Platform>, options: TmpfsOptions, name: &'static str) -> Result<Arc<TmpFs>> {
        let half = platform.memory().limit() / 2;
        let pages = options.size.unwrap_or(half).div_ceil(PAGE_SIZE);
        let inodes = options.inodes.unwrap_or(half / PAGE_SIZE);
        let quota = Quota { pages: Bound::new(pages), inodes: Bound::inodes(&platform, inodes) };
        let shared = TmpShared::new(platform, super::new_device(), quota, 1);
        let root = TmpInode::new(&shared, Create::Directory, options.mode, options.uid, options.gid)?;
        root.set_parent_ino(root.ino());
        Ok(Arc::new(TmpFs { shared, root, name }))
    }

    /// The root, as its own type.
    pub fn root_inode(&self) -> &Arc<TmpInode> {
        &self.root
    }

    /// What its inodes share.
    pub fn shared(&self) -> &Arc<TmpShared> {
        &self.shared
    }
}

/// statfs(2)'s fields for in-memory file systems.
pub(crate) fn statfs_of(quota: &Quota, platform: &dyn Platform, magic: u64) -> [u64; 8] {
    let memory = platform.memory();
    let room = memory.limit().saturating_sub(memory.used()) / PAGE_SIZE;
    let blocks = quota.pages.limit().min(memory.limit() / PAGE_SIZE);
    let free = quota.pages.free().min(room).min(blocks);
    [magic, PAGE_SIZE, blocks, free, free, quota.inodes.limit(), quota.inodes.free(), 255]
}

impl FileSystem for TmpFs {
    fn name(&self) -> &'static str {
        self.name
    }
    fn root(&self) -> Arc<dyn Inode> {
        self.root.clone()
    }
    fn statfs(&self) -> Result<[u64; 8]> {
        Ok(statfs_of(&self.shared.quota, &*self.shared.platform, TMPFS_MAGIC))
    }
}

#[cfg(test)]
mod tests;
