//! Inodes of tmpfs.
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use guest_abi::layout::PAGE_SIZE;
use guest_abi::types::Stat;

use super::attr::{Attr, Xattrs, xattr_supported};
use super::data::{FileData, seal};
use super::dir::Entries;
use super::file::{TmpDir, TmpFile};
use super::{TmpShared, rename};
use crate::lock::{Mutex, Rank};
use crate::mm::Charge;
use crate::platform::KernelMemory;
use crate::platform::host::AttrChange;
use crate::vfs::file::Caller;
use crate::vfs::inode::Create;
use crate::vfs::path::Attachments;
use crate::vfs::{Inode, InodeKind, OpenFlags, OpenResult, PathRef};
use crate::{Errno, Result};

/// Children of a directory.
pub(super) type Children = Entries<Arc<TmpInode>>;

/// What an inode holds.
pub enum Body {
    /// A regular file.
    Regular(Arc<FileData>),
    /// A directory.
    Directory(Mutex<Entries<Arc<TmpInode>>>),
    /// A symbolic link.
    Symlink(Box<[u8]>),
    /// FIFO, socket, device.
    Special,
}

/// An inode in memory.
pub struct TmpInode {
    pub(super) shared: Arc<TmpShared>,
    ino: u64,
    kind: InodeKind,
    attr: Mutex<Attr>,
    xattrs: Mutex<Xattrs>,
    body: Body,
    parent_ino: AtomicU64,
    /// Removed while still open: takes no new names.
    dead: AtomicBool,
    attachments: Attachments,
    /// For a link's target.
    _target: Option<Charge>,
}

/// Link targets may have this many bytes (symlink(2)).
const SYMLINK_MAX: usize = 4095;

impl TmpInode {
    /// A new inode without a name but counted as having one (a directory as having two).
    pub fn new(shared: &Arc<TmpShared>, what: Create<'_>, mode: u32, uid: u32, gid: u32) -> Result<Arc<TmpInode>> {
        let ino = shared.new_ino();
        let mut attr = Attr::new(mode, uid, gid, shared.now());
        let (kind, body) = match what {
            Create::Regular => {
                let data = FileData::new(shared.platform.clone(), shared.quota.clone(), (shared.dev, ino));
                (InodeKind::Regular, Body::Regular(data))
            }
            Create::Directory => {
                attr.nlink = 2;
                (InodeKind::Directory, Body::Directory(Mutex::new(Rank::Inode, Entries::default())))
            }
            Create::Symlink(target) if target.len() > SYMLINK_MAX => return Err(Errno::ENAMETOOLONG),
            Create::Symlink(target) => {
                attr.mode = 0o777;
                (InodeKind::Symlink, Body::Symlink(target.into()))
            }
            Create::Node(kind, rdev) => {
                attr.rdev = rdev;
                match kind {
                    InodeKind::Directory | InodeKind::Symlink => return Err(Errno::EINVAL),
                    InodeKind::Regular => return Self::new(shared, Create::Regular, mode, uid, gid),
                    _ => (kind, Body::Special),
                }
            }
        };
        Self::with(shared, ino, kind, attr, Xattrs::default(), body)
    }

    /// An inode of given parts; `ino` may be foreign (the upper layer of an overlay).
    pub fn with(
        shared: &Arc<TmpShared>,
        ino: u64,
        kind: InodeKind,
        attr: Attr,
        xattrs: Xattrs,
        body: Body,
    ) -> Result<Arc<TmpInode>> {
        let target = match &body {
            Body::Symlink(target) => Some(Charge::new(&shared.platform, KernelMemory::Slab, target.len())?),
            _ => None,
        };
        shared.quota.inodes.take(1 + xattrs.charge())?;
        Ok(Arc::new(TmpInode {
            shared: shared.clone(),
            ino,
            kind,
            attr: Mutex::new(Rank::Leaf, attr),
            xattrs: Mutex::new(Rank::Leaf, xattrs),
            body,
            parent_ino: AtomicU64::new(ino),
            dead: AtomicBool::new(false),
            attachments: Attachments::default(),
            _target: target,
        }))
    }

    /// st_ino.
    pub fn ino(&self) -> u64 {
        self.ino
    }

    /// A copy of the attributes.
    pub fn attr(&self) -> Attr {
        *self.attr.lock()
    }

    /// Changes the attributes.
    pub fn change_attr<R>(&self, f: impl FnOnce(&mut Attr) -> R) -> R {
        f(&mut self.attr.lock())
    }

    /// Contents changed now.
    pub fn touch(&self) {
        let now = self.shared.now();
        self.attr.lock().modified(now);
    }

    /// The inode changed now.
    pub fn touch_ctime(&self) {
        let now = self.shared.now();
        self.attr.lock().ctime = now;
    }

    /// Contents were read now.
    pub fn accessed(&self) {
        let now = self.shared.now();
        self.attr.lock().accessed(now);
    }

    /// The contents of a regular file.
    pub fn data(&self) -> Option<&Arc<FileData>> {
        if let Body::Regular(data) = &self.body { Some(data) } else { None }
    }

    pub(super) fn children(&self) -> Result<&Mutex<Children>> {
        if let Body::Directory(children) = &self.body { Ok(children) } else { Err(Errno::ENOTDIR) }
    }

    pub(super) fn parent_ino(&self) -> u64 {
        self.parent_ino.load(Ordering::Relaxed)
    }

    /// Names the inode that `..` shows.
    pub fn set_parent_ino(&self, ino: u64) {
        self.parent_ino.store(ino, Ordering::Relaxed);
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    /// Adds `n` to a directory's nlink and sets ctime.
    pub fn add_links(&self, n: i32) {
        let now = self.shared.now();
        let mut attr = self.attr.lock();
        attr.nlink = attr.nlink.saturating_add_signed(n);
        attr.ctime = now;
    }

    /// A non-directory gets another name. Each name beyond the first counts as an inode, as on Linux. EMLINK, ENOSPC.
    pub fn gain_name(&self) -> Result<()> {
        let now = self.shared.now();
        let mut attr = self.attr.lock();
        let nlink = attr.nlink.checked_add(1).ok_or(Errno::EMLINK)?;
        if attr.nlink > 0 {
            self.shared.quota.inodes.take(1)?;
        }
        attr.nlink = nlink;
        attr.ctime = now;
        Ok(())
    }

    /// A non-directory has lost a name.
    pub fn lose_name(&self) {
        let now = self.shared.now();
        let mut attr = self.attr.lock();
        if attr.nlink > 1 {
            self.shared.quota.inodes.give(1);
        }
        attr.nlink = attr.nlink.saturating_sub(1);
        attr.ctime = now;
    }

    /// A removed directory: no names, no new ones.
    pub(super) fn kill(&self) {
        self.dead.store(true, Ordering::Relaxed);
        let now = self.shared.now();
        let mut attr = self.attr.lock();
        attr.nlink = 0;
        attr.ctime = now;
    }

    /// Puts `child` under `name` in a directory that the caller has exclusively (building a tree, create).
    pub fn attach(&self, name: &[u8], child: Arc<TmpInode>) -> Result<()> {
        let mut children = self.children()?.lock();
        if self.is_dead() {
            return Err(Errno::ENOENT);
        }
        if children.get(name).is_some() {
            return Err(Errno::EEXIST);
        }
        let directory = child.kind == InodeKind::Directory;
        child.set_parent_ino(self.ino);
        children.insert(name, child);
        drop(children);
        if directory {
            self.add_links(1);
        }
        self.touch();
        Ok(())
    }

    /// stat(2) with another identity (the overlay's).
    pub fn stat_as(&self, dev: u64, ino: u64) -> Stat {
        if self.data().is_some_and(|d| d.take_written()) {
            self.touch();
        }
        let (size, bytes) = match &self.body {
            Body::Regular(data) => (data.length(), data.allocated()),
            Body::Directory(children) => (children.lock().len() as u64 * 20 + 40, 0),
            Body::Symlink(target) => (target.len() as u64, 0),
            Body::Special => (0, 0),
        };
        let attr = self.attr();
        Stat {
            dev,
            ino,
            nlink: u64::from(attr.nlink),
            mode: self.kind.mode() | attr.mode,
            uid: attr.uid,
            gid: attr.gid,
            rdev: attr.rdev,
            size: size as i64,
            blksize: PAGE_SIZE as i64,
            blocks: (bytes / 512) as i64,
            atime: attr.atime,
            mtime: attr.mtime,
            ctime: attr.ctime,
            ..Stat::default()
        }
    }
}

impl Drop for TmpInode {
    fn drop(&mut self) {
        self.shared.quota.inodes.give(1 + self.xattrs.get_mut().charge());
        // Trees are as deep as the guest likes: take them down with a list, not with the stack.
        let Body::Directory(children) = &mut self.body else { return };
        let mut doomed: Vec<Arc<TmpInode>> = children.get_mut().take_all().collect();
        while let Some(inode) = doomed.pop() {
            if let Some(mut inode) = Arc::into_inner(inode)
                && let Body::Directory(children) = &mut inode.body
            {
                doomed.extend(children.get_mut().take_all());
            }
        }
    }
}

impl Inode for TmpInode {
    fn kind(&self) -> InodeKind {
        self.kind
    }

    fn stat(&self) -> Result<Stat> {
        Ok(self.stat_as(self.shared.dev, self.ino))
    }

    fn access_attr(&self) -> Result<(u32, u32, u32)> {
        let attr = self.attr();
        Ok((attr.mode, attr.uid, attr.gid))
    }

    fn set_attr(&self, change: &AttrChange) -> Result<()> {
        if let Some(size) = change.size {
            self.data()
                .ok_or(if self.kind == InodeKind::Directory { Errno::EISDIR } else { Errno::EINVAL })?
                .truncate(size)?;
        }
        let now = self.shared.now();
        self.attr.lock().apply(change, now);
        Ok(())
    }

    fn lookup(&self, name: &[u8]) -> Result<Arc<dyn Inode>> {
        let children = self.children()?.lock();
        children.get(name).map(|c| c.clone() as Arc<dyn Inode>).ok_or(Errno::ENOENT)
    }

    fn create(&self, name: &[u8], what: Create<'_>, mode: u32, uid: u32, gid: u32) -> Result<Arc<dyn Inode>> {
        if self.children()?.lock().get(name).is_some() {
            return Err(Errno::EEXIST);
        }
        let child = TmpInode::new(&self.shared, what, mode, uid, gid)?;
        self.attach(name, child.clone())?;
        Ok(child)
    }

    fn create_unnamed(&self, mode: u32, uid: u32, gid: u32) -> Result<Arc<dyn Inode>> {
        self.children()?;
        let inode = TmpInode::new(&self.shared, Create::Regular, mode, uid, gid)?;
        inode.change_attr(|a| a.nlink = 0);
        Ok(inode)
    }

    fn link(&self, name: &[u8], target: &Arc<dyn Inode>) -> Result<()> {
        let Ok(target) = (target.clone() as Arc<dyn Any + Send + Sync>).downcast::<TmpInode>() else {
            return Err(Errno::EXDEV);
        };
        if !Arc::ptr_eq(&self.shared, &target.shared) {
            return Err(Errno::EXDEV);
        }
        if target.kind == InodeKind::Directory {
            return Err(Errno::EPERM);
        }
        {
            let mut children = self.children()?.lock();
            if self.is_dead() {
                return Err(Errno::ENOENT);
            }
            if children.get(name).is_some() {
                return Err(Errno::EEXIST);
            }
            target.gain_name()?;
            children.insert(name, target.clone());
        }
        self.touch();
        Ok(())
    }

    fn unlink(&self, name: &[u8]) -> Result<()> {
        let child = {
            let mut children = self.children()?.lock();
            match children.get(name) {
                None => return Err(Errno::ENOENT),
                Some(c) if c.kind == InodeKind::Directory => return Err(Errno::EISDIR),
                Some(_) => children.remove(name),
            }
        };
        if let Some(child) = child {
            child.lose_name();
        }
        self.touch();
        Ok(())
    }

    fn rmdir(&self, name: &[u8]) -> Result<()> {
        let child = {
            let mut children = self.children()?.lock();
            let child = children.get(name).cloned().ok_or(Errno::ENOENT)?;
            let inside = child.children()?.lock_nested();
            if !inside.is_empty() {
                return Err(Errno::ENOTEMPTY);
            }
            child.kill();
            drop(inside);
            children.remove(name);
            child
        };
        drop(child);
        self.add_links(-1);
        self.touch();
        Ok(())
    }

    fn rename(&self, name: &[u8], new_dir: &Arc<dyn Inode>, new_name: &[u8], flags: u32) -> Result<()> {
        let new_dir = new_dir.as_any().downcast_ref::<TmpInode>().ok_or(Errno::EXDEV)?;
        if !Arc::ptr_eq(&self.shared, &new_dir.shared) {
            return Err(Errno::EXDEV);
        }
        rename::rename(self, name, new_dir, new_name, flags)
    }

    fn read_link(&self) -> Result<Vec<u8>> {
        match &self.body {
            Body::Symlink(target) => Ok(target.to_vec()),
            _ => Err(Errno::EINVAL),
        }
    }

    fn open(self: Arc<Self>, caller: &dyn Caller, path: &PathRef, flags: OpenFlags) -> Result<OpenResult> {
        match &self.body {
            Body::Regular(_) => Ok(OpenResult::Ops(Arc::new(TmpFile::new(self)))),
            Body::Directory(_) if flags.writable() => Err(Errno::EISDIR),
            Body::Directory(_) => Ok(OpenResult::Ops(Arc::new(TmpDir::new(self)))),
            Body::Symlink(_) => Err(Errno::ELOOP),
            Body::Special => crate::fs::dev::open_special(&*self, self.attr().rdev, caller, path, flags),
        }
    }

    fn get_xattr(&self, name: &[u8]) -> Result<Vec<u8>> {
        if !xattr_supported(name) {
            return Err(Errno::EOPNOTSUPP);
        }
        self.xattrs.lock().get(name)
    }

    fn set_xattr(&self, name: &[u8], value: &[u8], flags: u32) -> Result<()> {
        if !xattr_supported(name) {
            return Err(Errno::EOPNOTSUPP);
        }
        {
            let mut xattrs = self.xattrs.lock();
            let before = xattrs.charge();
            let old = xattrs.get(name).ok();
            xattrs.set(name, value, flags)?;
            let after = xattrs.charge();
            if after > before && self.shared.quota.inodes.take(after - before).is_err() {
                match old {
                    Some(old) => xattrs.set(name, &old, 0)?,
                    None => xattrs.remove(name)?,
                }
                return Err(Errno::ENOSPC);
            }
            self.shared.quota.inodes.give(before.saturating_sub(after));
        }
        self.touch_ctime();
        Ok(())
    }

    fn remove_xattr(&self, name: &[u8]) -> Result<()> {
        if !xattr_supported(name) {
            return Err(Errno::EOPNOTSUPP);
        }
        {
            let mut xattrs = self.xattrs.lock();
            let before = xattrs.charge();
            xattrs.remove(name)?;
            self.shared.quota.inodes.give(before.saturating_sub(xattrs.charge()));
        }
        self.touch_ctime();
        Ok(())
    }

    fn list_xattr(&self) -> Result<Vec<Vec<u8>>> {
        Ok(self.xattrs.lock().names())
    }

    fn attachments(&self) -> Option<&Attachments> {
        Some(&self.attachments)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl TmpInode {
    /// The seals a new memfd starts with.
    pub(super) fn allow_sealing(&self, allow: bool, noexec: bool) {
        if let Some(data) = self.data() {
            let exec = if noexec { seal::EXEC } else { 0 };
            data.init_seals(if allow { exec } else { seal::SEAL });
        }
    }
}
