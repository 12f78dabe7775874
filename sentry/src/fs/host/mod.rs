//! A file system over a directory tree of the host. Owns where each node is; never a copy of its attributes or contents,
//! which are the host's and read fresh. No host descriptor per inode: nodes are paths, opened files are cached.
mod content;
mod file;
mod inode;

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use guest_abi::types::Stat;

pub use content::{Content, LazyContent};
pub use file::{HostDir, HostRegular};
pub use inode::HostInode;

use crate::Errno;
use crate::Result;
use crate::fs::recent::Recent;
use crate::lock::{Mutex, Rank};
use crate::platform::host::{HostFile, HostTree, Window};
use crate::vfs::{FileSystem, Inode, InodeKind};

/// Contents kept open beyond their users: a host descriptor each.
const CACHED_FILES: usize = 192;
/// Windows kept beyond their mappings: a host mapping each.
const CACHED_WINDOWS: usize = 1024;

/// What all nodes of a tree share.
pub struct HostShared {
    /// The tree.
    pub tree: Arc<dyn HostTree>,
    contents: Mutex<HashMap<(u64, u64), Weak<Content>>>,
    recent_files: Mutex<Recent<Arc<Content>>>,
    recent_windows: Arc<Mutex<Recent<Arc<dyn Window>>>>,
}

impl HostShared {
    /// Opens, giving up cached files if the host has no more descriptors for us.
    fn open(&self, path: &[u8]) -> Result<Arc<dyn HostFile>> {
        match self.tree.open(path, false) {
            Err(Errno::EMFILE | Errno::ENFILE) => {
                let cached = self.recent_files.lock().take_all();
                drop(cached);
                // The program's own limit is not what was reached.
                self.tree.open(path, false).map_err(|e| if e == Errno::EMFILE { Errno::ENFILE } else { e })
            }
            opened => opened,
        }
    }

    /// The contents of the regular file at `path`, one object for one (device, inode). `write` opens it for writing too.
    /// `said`: its attributes, if they were just asked for.
    pub fn content(&self, path: &[u8], write: bool, said: Option<Stat>) -> Result<Arc<Content>> {
        let st = said.map_or_else(|| self.tree.stat(path), Ok)?;
        let known = self.contents.lock().get(&(st.dev, st.ino)).and_then(Weak::upgrade);
        let content = if let Some(content) = known {
            content
        } else {
            let file = self.open(path)?;
            let st = file.stat()?;
            let key = (st.dev, st.ino);
            let fresh = Arc::new(Content::new(file, key, self.tree.writable(), self.recent_windows.clone()));
            let mut contents = self.contents.lock();
            if let Some(other) = contents.get(&key).and_then(Weak::upgrade) {
                other
            } else {
                if contents.len() >= 1024 && contents.len().is_power_of_two() {
                    contents.retain(|_, c| c.strong_count() > 0);
                }
                contents.insert(key, Arc::downgrade(&fresh));
                fresh
            }
        };
        if write {
            content.open_for_writing(|| self.tree.open(path, true))?;
        }
        let displaced = self.recent_files.lock().touch(Arc::as_ptr(&content) as usize, content.clone());
        drop(displaced);
        Ok(content)
    }
}

/// A mounted host tree.
pub struct HostFs {
    shared: Arc<HostShared>,
    root: Arc<HostInode>,
}

impl HostFs {
    /// The tree as a file system.
    pub fn new(tree: Arc<dyn HostTree>) -> Result<Arc<HostFs>> {
        let st = tree.stat(b"")?;
        if InodeKind::from_mode(st.mode) != Some(InodeKind::Directory) {
            return Err(Errno::ENOTDIR);
        }
        let shared = Arc::new(HostShared {
            tree,
            contents: Mutex::new(Rank::Leaf, HashMap::new()),
            recent_files: Mutex::new(Rank::Leaf, Recent::new(CACHED_FILES)),
            recent_windows: Arc::new(Mutex::new(Rank::Leaf, Recent::new(CACHED_WINDOWS))),
        });
        let root = HostInode::root(&shared);
        Ok(Arc::new(HostFs { shared, root }))
    }

    /// The root, as its own type.
    pub fn root_inode(&self) -> &Arc<HostInode> {
        &self.root
    }
}

impl FileSystem for HostFs {
    fn name(&self) -> &'static str {
        "hostfs"
    }
    fn root(&self) -> Arc<dyn Inode> {
        self.root.clone()
    }
    fn statfs(&self) -> Result<[u64; 8]> {
        self.shared.tree.statfs()
    }
}
