//! Names: the tree of dentries per file system, cached.
use std::sync::Arc;

use super::{Inode, Mount};

/// A name in a directory (or the root of a file system).
pub struct Dentry {
    inode: Arc<dyn Inode>,
}

impl Dentry {
    /// What it names.
    pub fn inode(&self) -> &Arc<dyn Inode> {
        &self.inode
    }
}

/// A place in the mount tree: what a path resolves to.
#[derive(Clone)]
pub struct PathRef {
    /// In which mount.
    pub mount: Arc<Mount>,
    /// Which name.
    pub dentry: Arc<Dentry>,
}

impl PathRef {
    /// The absolute path as seen from the mount namespace's root (d_path), with ` (deleted)` if the name is gone.
    pub fn absolute(&self) -> Vec<u8> {
        todo!()
    }

    /// The inode.
    pub fn inode(&self) -> &Arc<dyn Inode> {
        self.dentry.inode()
    }
}
