//! Nodes of a host tree.
use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use guest_abi::types::Stat;
use linux_raw_sys::general::RENAME_EXCHANGE;

use super::file::{HostDir, HostRegular};
use super::{Content, HostShared};
use crate::lock::{Mutex, Rank};
use crate::platform::host::{AttrChange, HostCreate, HostDirEntry};
use crate::vfs::file::Caller;
use crate::vfs::inode::Create;
use crate::vfs::path::Attachments;
use crate::vfs::{Inode, InodeKind, OpenFlags, OpenResult, PathRef};
use crate::{Errno, Result};

/// Where a node is.
enum Place {
    /// A path for good: nothing in a read-only tree is renamed by us.
    Fixed(Arc<[u8]>),
    /// A name in a directory that may move.
    Linked(Arc<HostInode>, Arc<[u8]>),
    /// Removed by us.
    Gone,
}

/// A node of a host tree.
pub struct HostInode {
    me: Weak<HostInode>,
    shared: Arc<HostShared>,
    kind: InodeKind,
    place: Mutex<Place>,
    /// Living children of a directory in a writable tree, by name, so that a rename finds them.
    live: Mutex<HashMap<Arc<[u8]>, Weak<HostInode>>>,
    content: Mutex<Weak<Content>>,
    attachments: Attachments,
}

/// The host's longest path, bytes.
const PATH_MAX: usize = 4095;

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(dir.len() + 1 + name.len());
    path.extend_from_slice(dir);
    if !dir.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

impl HostInode {
    fn new(shared: &Arc<HostShared>, kind: InodeKind, place: Place) -> Arc<HostInode> {
        Arc::new_cyclic(|me| HostInode {
            me: me.clone(),
            shared: shared.clone(),
            kind,
            place: Mutex::new(Rank::Leaf, place),
            live: Mutex::new(Rank::Inode, HashMap::new()),
            content: Mutex::new(Rank::Leaf, Weak::new()),
            attachments: Attachments::default(),
        })
    }

    pub(super) fn root(shared: &Arc<HostShared>) -> Arc<HostInode> {
        Self::new(shared, InodeKind::Directory, Place::Fixed(Arc::from(&b""[..])))
    }

    /// The path from the tree's root; ENOENT if removed, ENAMETOOLONG beyond the host's bound.
    pub fn path(&self) -> Result<Arc<[u8]>> {
        let mut names: Vec<Arc<[u8]>> = Vec::new();
        let mut at: Option<Arc<HostInode>> = None;
        let base = loop {
            let step = match &*at.as_deref().unwrap_or(self).place.lock() {
                Place::Gone => return Err(Errno::ENOENT),
                Place::Fixed(path) => Err(path.clone()),
                Place::Linked(parent, name) => Ok((parent.clone(), name.clone())),
            };
            match step {
                Err(path) if names.is_empty() => return Ok(path),
                Err(path) => break path,
                Ok((parent, name)) => {
                    names.push(name);
                    at = Some(parent);
                }
            }
        };
        let mut path = base.to_vec();
        for name in names.iter().rev() {
            path = join(&path, name);
            if path.len() > PATH_MAX {
                return Err(Errno::ENAMETOOLONG);
            }
        }
        Ok(path.into())
    }

    fn child_path(&self, name: &[u8]) -> Result<Vec<u8>> {
        let path = join(&self.path()?, name);
        if path.len() > PATH_MAX { Err(Errno::ENAMETOOLONG) } else { Ok(path) }
    }

    /// Attributes, fresh from the host.
    pub fn host_stat(&self) -> Result<Stat> {
        match self.path() {
            Ok(path) => self.shared.tree.stat(&path),
            Err(e) => self.content.lock().upgrade().ok_or(e)?.stat(),
        }
    }

    /// The contents of a regular file.
    pub fn content(&self, write: bool) -> Result<Arc<Content>> {
        self.content_of(write, None)
    }

    /// As `content`, with attributes that the host gave just now.
    pub fn content_of(&self, write: bool, said: Option<Stat>) -> Result<Arc<Content>> {
        let path = match self.path() {
            Ok(path) => path,
            Err(e) => return self.content.lock().upgrade().ok_or(e),
        };
        let content = self.shared.content(&path, write, said)?;
        *self.content.lock() = Arc::downgrade(&content);
        Ok(content)
    }

    /// All entries in the host's order.
    pub fn list(&self) -> Result<Vec<HostDirEntry>> {
        self.shared.tree.read_dir(&self.path()?)
    }

    /// Whether the host has a child of this name.
    pub fn has_child(&self, name: &[u8]) -> bool {
        self.child_path(name).is_ok_and(|path| self.shared.tree.stat(&path).is_ok())
    }

    /// The child `name` and its attributes.
    pub fn find(self: &Arc<Self>, name: &[u8]) -> Result<(Arc<HostInode>, Stat)> {
        if self.kind != InodeKind::Directory {
            return Err(Errno::ENOTDIR);
        }
        let path = self.child_path(name)?;
        let st = self.shared.tree.stat(&path)?;
        let kind = InodeKind::from_mode(st.mode).ok_or(Errno::EIO)?;
        if !self.shared.tree.writable() {
            return Ok((Self::new(&self.shared, kind, Place::Fixed(path.into())), st));
        }
        let mut live = self.live.lock();
        if let Some(known) = live.get(name).and_then(Weak::upgrade).filter(|k| k.kind == kind) {
            return Ok((known, st));
        }
        let name: Arc<[u8]> = name.into();
        let child = Self::new(&self.shared, kind, Place::Linked(self.clone(), name.clone()));
        if live.len() >= 64 && live.len().is_power_of_two() {
            live.retain(|_, c| c.strong_count() > 0);
        }
        live.insert(name, Arc::downgrade(&child));
        Ok((child, st))
    }

    fn forget(&self, name: &[u8]) {
        let gone = self.live.lock().remove(name).and_then(|c| c.upgrade());
        if let Some(child) = gone {
            let old = core::mem::replace(&mut *child.place.lock(), Place::Gone);
            drop(old);
        }
    }

    fn arc(&self) -> Result<Arc<HostInode>> {
        self.me.upgrade().ok_or(Errno::ENOENT)
    }
}

impl Inode for HostInode {
    fn kind(&self) -> InodeKind {
        self.kind
    }

    fn stat(&self) -> Result<Stat> {
        self.host_stat()
    }

    fn set_attr(&self, change: &AttrChange) -> Result<()> {
        let path = self.path()?;
        let mut change = *change;
        if let Some(size) = change.size {
            if self.kind == InodeKind::Directory {
                return Err(Errno::EISDIR);
            }
            self.content(true)?.truncate(size)?;
            change.size = None;
            let AttrChange { mode: None, uid: None, gid: None, atime: None, mtime: None, .. } = change else {
                return self.shared.tree.set_attr(&path, &change);
            };
            return Ok(());
        }
        self.shared.tree.set_attr(&path, &change)
    }

    fn lookup(&self, name: &[u8]) -> Result<Arc<dyn Inode>> {
        Ok(self.arc()?.find(name)?.0)
    }

    fn create(&self, name: &[u8], what: Create<'_>, mode: u32, uid: u32, gid: u32) -> Result<Arc<dyn Inode>> {
        let path = self.child_path(name)?;
        let tree = &self.shared.tree;
        let host = match what {
            Create::Regular => HostCreate::File,
            Create::Directory => HostCreate::Directory,
            Create::Symlink(target) => HostCreate::Symlink(target),
            Create::Node(kind @ (InodeKind::Fifo | InodeKind::Socket), _) => HostCreate::Special(kind.mode()),
            Create::Node(InodeKind::Regular, _) => HostCreate::File,
            // A device of the host's would be a way out.
            Create::Node(..) => return Err(Errno::EPERM),
        };
        tree.create(&path, host, mode & 0o7777)?;
        self.forget(name);
        let (child, st) = self.arc()?.find(name)?;
        if (st.uid, st.gid) != (uid, gid) {
            // Without the privilege the node stays the monitor's own user's, as on a file system that maps owners.
            let owner = AttrChange { uid: Some(uid), gid: Some(gid), ..AttrChange::default() };
            let _ = tree.set_attr(&path, &owner);
        }
        Ok(child)
    }

    fn link(&self, name: &[u8], target: &Arc<dyn Inode>) -> Result<()> {
        let target = target.as_any().downcast_ref::<HostInode>().ok_or(Errno::EXDEV)?;
        if !Arc::ptr_eq(&self.shared, &target.shared) {
            return Err(Errno::EXDEV);
        }
        if target.kind == InodeKind::Directory {
            return Err(Errno::EPERM);
        }
        self.shared.tree.link(&target.path()?, &self.child_path(name)?)
    }

    fn unlink(&self, name: &[u8]) -> Result<()> {
        self.shared.tree.remove(&self.child_path(name)?, false)?;
        self.forget(name);
        Ok(())
    }

    fn rmdir(&self, name: &[u8]) -> Result<()> {
        self.shared.tree.remove(&self.child_path(name)?, true)?;
        self.forget(name);
        Ok(())
    }

    fn rename(&self, name: &[u8], new_dir: &Arc<dyn Inode>, new_name: &[u8], flags: u32) -> Result<()> {
        let new_dir = new_dir.as_any().downcast_ref::<HostInode>().ok_or(Errno::EXDEV)?;
        if !Arc::ptr_eq(&self.shared, &new_dir.shared) {
            return Err(Errno::EXDEV);
        }
        self.shared.tree.rename(&self.child_path(name)?, &new_dir.child_path(new_name)?, flags)?;
        let new_arc = new_dir.arc()?;
        if flags & RENAME_EXCHANGE != 0 {
            let one = self.live.lock().remove(name).and_then(|c| c.upgrade());
            let other = new_dir.live.lock().remove(new_name).and_then(|c| c.upgrade());
            if let Some(one) = one {
                one.settle(&new_arc, new_name);
            }
            if let Some(other) = other {
                other.settle(&self.arc()?, name);
            }
            return Ok(());
        }
        let moved = self.live.lock().remove(name).and_then(|c| c.upgrade());
        new_dir.forget(new_name);
        if let Some(moved) = moved {
            moved.settle(&new_arc, new_name);
        }
        Ok(())
    }

    fn read_link(&self) -> Result<Vec<u8>> {
        if self.kind != InodeKind::Symlink {
            return Err(Errno::EINVAL);
        }
        self.shared.tree.read_link(&self.path()?)
    }

    fn open(self: Arc<Self>, caller: &dyn Caller, path: &PathRef, flags: OpenFlags) -> Result<OpenResult> {
        match self.kind {
            InodeKind::Regular => {
                let content = self.content(flags.writable())?;
                Ok(OpenResult::Ops(Arc::new(HostRegular::new(content))))
            }
            InodeKind::Directory if flags.writable() => Err(Errno::EISDIR),
            InodeKind::Directory => Ok(OpenResult::Ops(Arc::new(HostDir::new(self)))),
            InodeKind::Symlink => Err(Errno::ELOOP),
            _ => crate::fs::dev::open_special(&*self, self.host_stat()?.rdev, caller, path, flags),
        }
    }

    fn get_xattr(&self, name: &[u8]) -> Result<Vec<u8>> {
        self.shared.tree.get_xattr(&self.path()?, name)
    }

    fn list_xattr(&self) -> Result<Vec<Vec<u8>>> {
        self.shared.tree.list_xattr(&self.path()?)
    }

    fn attachments(&self) -> Option<&Attachments> {
        Some(&self.attachments)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl HostInode {
    /// Takes its place after a rename.
    fn settle(self: &Arc<Self>, dir: &Arc<HostInode>, name: &[u8]) {
        let name: Arc<[u8]> = name.into();
        let old = core::mem::replace(&mut *self.place.lock(), Place::Linked(dir.clone(), name.clone()));
        drop(old);
        dir.live.lock().insert(name, Arc::downgrade(self));
    }
}
