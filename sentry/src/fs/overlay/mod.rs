//! A writable view of a read-only host tree (as overlayfs, Documentation/filesystems/overlayfs.rst). Owns what differs from the
//! host: changed attributes, changed pages, new names, removed names. The host tree is never written.
//!
//! A [`Node`] stands for a name's inode. A node nobody changed is only a path on the host and is dropped with its dentry. The
//! first change makes an upper inode (attributes; contents page by page as they are written) and pins the node in its
//! directory's map, and the directory in its own, up to the root. A renamed directory keeps its reference to the host
//! path: nothing below is copied. st_dev and st_ino stay the host's after copy-up.
mod dir;
mod file;
mod node;
mod rename;

use std::sync::Arc;

use guest_abi::layout::PAGE_SIZE;

pub use node::Node;

use crate::Result;
use crate::fs::host::HostFs;
use crate::fs::tmpfs::quota::{Bound, Quota};
use crate::fs::tmpfs::{TmpShared, statfs_of};
use crate::platform::Platform;
use crate::platform::host::HostTree;
use crate::vfs::{FileSystem, Inode};

/// OVERLAYFS_SUPER_MAGIC of statfs(2).
const OVERLAYFS_MAGIC: u64 = 0x794c_7630;

/// First inode number of new files: above what host file systems give, since new and host files share a device number
/// (so that `find -xdev` and the like see one file system).
const FIRST_INO: u64 = 1 << 48;

/// Bytes of the memory limit for each inode or whiteout that may be made.
const BYTES_PER_INODE: u64 = 4096;

/// A mounted overlay.
pub struct OverlayFs {
    upper: Arc<TmpShared>,
    root: Arc<Node>,
}

impl OverlayFs {
    /// A discardable layer over `tree`.
    pub fn new(platform: Arc<dyn Platform>, tree: Arc<dyn HostTree>) -> Result<Arc<OverlayFs>> {
        let lower = HostFs::new(tree)?;
        let st = lower.root_inode().host_stat()?;
        let inodes = platform.memory().limit() / BYTES_PER_INODE;
        let quota = Quota { pages: Bound::new(u64::MAX / PAGE_SIZE), inodes: Bound::inodes(&platform, inodes) };
        let upper = TmpShared::new(platform, st.dev, quota, FIRST_INO);
        let root = Node::root(&upper, lower.root_inode().clone(), &st);
        Ok(Arc::new(OverlayFs { upper, root }))
    }
}

impl FileSystem for OverlayFs {
    fn name(&self) -> &'static str {
        "overlay"
    }
    fn root(&self) -> Arc<dyn Inode> {
        self.root.clone()
    }
    fn statfs(&self) -> Result<[u64; 8]> {
        Ok(statfs_of(&self.upper.quota, &*self.upper.platform, OVERLAYFS_MAGIC))
    }
}

#[cfg(test)]
mod tests;
