//! Nodes of an overlay: what they show, and how the first change copies them up.
use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use guest_abi::types::Stat;

use super::dir::OverlayDir;
use super::file::OverlayFile;
use super::rename;
use crate::fs::host::{Content, HostInode, LazyContent};
use crate::fs::tmpfs::attr::{Attr, Xattrs, xattr_supported};
use crate::fs::tmpfs::data::FileData;
use crate::fs::tmpfs::dir::{Entries, Name};
use crate::fs::tmpfs::{Body, TmpInode, TmpShared};
use crate::lock::{Mutex, Rank};
use crate::platform::host::AttrChange;
use crate::time::Nanos;
use crate::vfs::file::Caller;
use crate::vfs::inode::Create;
use crate::vfs::path::Attachments;
use crate::vfs::{Inode, InodeKind, OpenFlags, OpenResult, PathRef};
use crate::{Errno, Result};

/// For how long an answer of the host stands for the present, ns: shorter than a program can tell.
const RECENT: Nanos = 50_000;

/// A name that differs from the host directory below.
pub(super) enum Entry {
    /// New or changed.
    Node(Arc<Node>),
    /// Removed.
    Whiteout,
}

/// What a directory knows beyond the host.
#[derive(Default)]
pub(super) struct Names {
    pub(super) entries: Entries<Entry>,
    /// Unchanged children in use, so that one name has one node.
    live: HashMap<Name, Weak<Node>>,
    /// Directories added minus removed.
    pub(super) subdirs: i64,
}

/// The inode behind a name of an overlay.
pub struct Node {
    me: Weak<Node>,
    pub(super) shared: Arc<TmpShared>,
    kind: InodeKind,
    /// Permission bits and owner of the host's directory when it was looked up, for path walks: a host that changes them
    /// under a running sandbox is seen by stat(2), and by walks once the dentry is dropped.
    walk: (u32, u32, u32),
    /// (st_dev, st_ino), constant.
    pub(super) id: (u64, u64),
    pub(super) lower: Option<Arc<HostInode>>,
    upper: OnceLock<Arc<TmpInode>>,
    copying: Mutex<()>,
    /// Where to pin the node once it changes; None: pinned, or removed.
    link: Mutex<Option<(Arc<Node>, Name)>>,
    pub(super) names: Option<Mutex<Names>>,
    /// What the host just said, and when: a lookup, the permission check and the operation itself ask within one call.
    said: Mutex<Option<(Nanos, Stat)>>,
    /// The name was removed.
    gone: AtomicBool,
    /// The host has removed or replaced what an unchanged node stands for.
    stale: AtomicBool,
    attachments: Attachments,
}

impl Node {
    fn make(
        shared: &Arc<TmpShared>,
        kind: InodeKind,
        id: (u64, u64),
        lower: Option<Arc<HostInode>>,
        upper: Option<Arc<TmpInode>>,
        link: Option<(Arc<Node>, Name)>,
        walk: (u32, u32, u32),
    ) -> Arc<Node> {
        let names = (kind == InodeKind::Directory).then(|| Mutex::new(Rank::Inode, Names::default()));
        Arc::new_cyclic(|me| Node {
            me: me.clone(),
            shared: shared.clone(),
            kind,
            walk,
            id,
            lower,
            upper: upper.map_or_else(OnceLock::new, OnceLock::from),
            copying: Mutex::new(Rank::Inode, ()),
            link: Mutex::new(Rank::Leaf, link),
            names,
            said: Mutex::new(Rank::Leaf, None),
            gone: AtomicBool::new(false),
            stale: AtomicBool::new(false),
            attachments: Attachments::default(),
        })
    }

    pub(super) fn root(shared: &Arc<TmpShared>, lower: Arc<HostInode>, st: &Stat) -> Arc<Node> {
        let walk = (st.mode & 0o7777, st.uid, st.gid);
        Self::make(shared, InodeKind::Directory, (st.dev, st.ino), Some(lower), None, None, walk)
    }

    /// A node with nothing below.
    fn fresh(&self, what: Create<'_>, mode: u32, uid: u32, gid: u32) -> Result<Arc<Node>> {
        let upper = TmpInode::new(&self.shared, what, mode, uid, gid)?;
        let id = (self.shared.dev, upper.ino());
        Ok(Self::make(&self.shared, upper.kind(), id, None, Some(upper), None, (0, 0, 0)))
    }

    pub(super) fn arc(&self) -> Result<Arc<Node>> {
        self.me.upgrade().ok_or(Errno::ENOENT)
    }

    pub(super) fn names(&self) -> Result<&Mutex<Names>> {
        self.names.as_ref().ok_or(Errno::ENOTDIR)
    }

    pub(super) fn is_dir(&self) -> bool {
        self.kind == InodeKind::Directory
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }

    fn note(&self, st: &Stat) {
        *self.said.lock() = Some((self.shared.platform.monotonic(), *st));
    }

    fn is_recent(&self, at: Nanos) -> bool {
        self.shared.platform.monotonic().saturating_sub(at) < RECENT
    }

    /// The host's contents of an unchanged regular node.
    pub(super) fn lower_content(&self) -> Result<Option<Arc<Content>>> {
        let (None, Some(lower)) = (self.upper.get(), &self.lower) else { return Ok(None) };
        let said = self.said.lock().take().filter(|s| self.is_recent(s.0));
        lower.content_of(false, said.map(|s| s.1)).map(Some)
    }

    /// The upper inode if the node has changed.
    pub(super) fn changed(&self) -> Option<&Arc<TmpInode>> {
        self.upper.get()
    }

    /// The upper inode, made now if the node had not changed yet; then the node stays.
    pub(super) fn upper(&self) -> Result<&Arc<TmpInode>> {
        if let Some(upper) = self.upper.get() {
            return Ok(upper);
        }
        {
            let _one = self.copying.lock_nested();
            if self.upper.get().is_none() {
                let made = self.copy_up()?;
                let _ = self.upper.set(made);
            }
        }
        self.pin();
        self.upper.get().ok_or(Errno::EIO)
    }

    fn copy_up(&self) -> Result<Arc<TmpInode>> {
        let lower = self.lower.as_ref().ok_or(Errno::EIO)?;
        let st = lower.host_stat()?;
        let mut attr = Attr::from_stat(&st);
        if self.kind != InodeKind::Directory {
            // Other names of the host's inode keep showing the old one.
            attr.nlink = 1;
        }
        if self.is_gone() {
            attr.nlink = 0;
        }
        let mut xattrs = Xattrs::default();
        for name in lower.list_xattr().unwrap_or_default() {
            if xattr_supported(&name)
                && let Ok(value) = lower.get_xattr(&name)
            {
                xattrs.set(&name, &value, 0)?;
            }
        }
        let body = match self.kind {
            InodeKind::Regular => {
                let size = u64::try_from(st.size).unwrap_or(0);
                let below = LazyContent::new(lower.clone(), (st.dev, st.ino));
                let (platform, quota) = (self.shared.platform.clone(), self.shared.quota.clone());
                Body::Regular(FileData::over(platform, quota, self.id, Some(below), size))
            }
            InodeKind::Directory => Body::Directory(Mutex::new(Rank::Inode, Entries::default())),
            InodeKind::Symlink => Body::Symlink(lower.read_link()?.into()),
            _ => Body::Special,
        };
        TmpInode::with(&self.shared, self.id.1, self.kind, attr, xattrs, body)
    }

    /// Makes sure that the node is found again however long nobody uses it.
    pub(super) fn pin(&self) {
        let Ok(mut at) = self.arc() else { return };
        loop {
            let Some((parent, name)) = at.link.lock().take() else { return };
            if let Some(names) = &parent.names {
                let mut names = names.lock_nested();
                names.live.remove(&name);
                if names.entries.get(&name).is_none() {
                    names.entries.insert(&name, Entry::Node(at.clone()));
                }
            }
            at = parent;
        }
    }

    /// The node called `name`. ENOENT.
    pub(super) fn find(&self, name: &[u8]) -> Result<Arc<Node>> {
        {
            let names = self.names()?.lock();
            match names.entries.get(name) {
                Some(Entry::Node(node)) => return Ok(node.clone()),
                Some(Entry::Whiteout) => return Err(Errno::ENOENT),
                None => {}
            }
        }
        let lower = self.lower.as_ref().ok_or(Errno::ENOENT)?;
        let (child, st) = lower.find(name)?;
        let mut names = self.names()?.lock();
        // Somebody may have changed or removed the name while the host was asked.
        match names.entries.get(name) {
            Some(Entry::Node(node)) => return Ok(node.clone()),
            Some(Entry::Whiteout) => return Err(Errno::ENOENT),
            None => {}
        }
        let known = names.live.get(name).and_then(Weak::upgrade);
        if let Some(node) = known.filter(|n| n.id == (st.dev, st.ino) && n.kind == child.kind()) {
            return Ok(node);
        }
        let name: Name = name.into();
        let link = (self.arc()?, name.clone());
        let walk = (st.mode & 0o7777, st.uid, st.gid);
        let node = Self::make(&self.shared, child.kind(), (st.dev, st.ino), Some(child), None, Some(link), walk);
        if names.live.len() >= 64 && names.live.len().is_power_of_two() {
            names.live.retain(|_, n| n.strong_count() > 0);
        }
        names.live.insert(name, Arc::downgrade(&node));
        node.note(&st);
        Ok(node)
    }

    /// Whether the host directory below has `name`.
    pub(super) fn below_has(&self, name: &[u8]) -> bool {
        self.lower.as_ref().is_some_and(|l| l.has_child(name))
    }

    /// Takes `name` out of the map; `below`: the host has it, so that it must be covered.
    pub(super) fn cover(names: &mut Names, name: &[u8], below: bool) -> Option<Entry> {
        names.live.remove(name);
        if below { names.entries.insert(name, Entry::Whiteout) } else { names.entries.remove(name) }
    }

    /// Puts `node` at `name`.
    pub(super) fn place(names: &mut Names, name: &[u8], node: &Arc<Node>) -> Option<Entry> {
        names.live.remove(name);
        names.entries.insert(name, Entry::Node(node.clone()))
    }

    /// ENOTEMPTY unless nothing shows in the directory.
    pub(super) fn check_empty(&self) -> Result<()> {
        let listing = match &self.lower {
            Some(lower) => lower.list()?,
            None => Vec::new(),
        };
        let names = self.names()?.lock_nested();
        let added = names.entries.range(0).any(|(_, _, e)| matches!(e, Entry::Node(_)));
        if added || listing.iter().any(|e| names.entries.get(&e.name).is_none()) {
            return Err(Errno::ENOTEMPTY);
        }
        Ok(())
    }

    /// The node lost a name (a directory: its only one).
    pub(super) fn lost_name(&self) {
        let whole = self.is_dir();
        let old = self.link.lock().take();
        drop(old);
        match self.upper.get() {
            Some(upper) if whole => upper.change_attr(|a| a.nlink = 0),
            Some(upper) => upper.lose_name(),
            None => {}
        }
        if whole || self.upper.get().is_none_or(|u| u.attr().nlink == 0) {
            self.gone.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn unlinkable(&self) {
        let old = self.link.lock().take();
        drop(old);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Neither trees nor paths are taken down by recursion: the guest chooses how deep they are.
        let mut doomed = Vec::new();
        self.strip(&mut doomed);
        while let Some(node) = doomed.pop() {
            if let Some(mut node) = Arc::into_inner(node) {
                node.strip(&mut doomed);
            }
        }
    }
}

impl Node {
    fn strip(&mut self, doomed: &mut Vec<Arc<Node>>) {
        if let Some((parent, _)) = self.link.get_mut().take() {
            doomed.push(parent);
        }
        if let Some(names) = &mut self.names {
            let entries = names.get_mut().entries.take_all();
            doomed.extend(entries.filter_map(|e| if let Entry::Node(node) = e { Some(node) } else { None }));
        }
    }
}

impl Inode for Node {
    fn kind(&self) -> InodeKind {
        self.kind
    }

    fn stat(&self) -> Result<Stat> {
        let Some(upper) = self.upper.get() else {
            let lower = self.lower.as_ref().ok_or(Errno::EIO)?;
            let said = self.said.lock().take();
            let mut st = match said.filter(|s| self.is_recent(s.0)) {
                Some((_, st)) => st,
                None => lower.host_stat().inspect_err(|_| self.stale.store(true, Ordering::Relaxed))?,
            };
            if (st.dev, st.ino) != self.id || InodeKind::from_mode(st.mode) != Some(self.kind) {
                self.stale.store(true, Ordering::Relaxed);
            }
            if self.is_gone() {
                st.nlink = if self.is_dir() { 0 } else { st.nlink.saturating_sub(1) };
            }
            return Ok(st);
        };
        let mut st = upper.stat_as(self.id.0, self.id.1);
        if let Some(names) = self.names.as_ref().filter(|_| !self.is_gone()) {
            let subdirs = names.lock().subdirs;
            let below = self.lower.as_ref().and_then(|l| l.host_stat().ok());
            let nlink = below.map_or(2, |b| b.nlink as i64).saturating_add(subdirs);
            st.nlink = u64::try_from(nlink).unwrap_or(1);
            // A new directory looks like one of a disk's: a block.
            st.size = below.map_or(4096, |b| b.size);
            st.blocks = below.map_or(8, |b| b.blocks);
        } else if self.lower.is_some() && self.kind == InodeKind::Regular {
            // Bytes still on the host occupy it.
            st.blocks = st.blocks.max(st.size.unsigned_abs().div_ceil(4096).saturating_mul(8) as i64);
        }
        Ok(st)
    }

    fn is_stale(&self) -> bool {
        self.stale.load(Ordering::Relaxed) && self.upper.get().is_none()
    }

    fn access_attr(&self) -> Result<(u32, u32, u32)> {
        if let Some(upper) = self.upper.get() {
            let attr = upper.attr();
            return Ok((attr.mode, attr.uid, attr.gid));
        }
        if self.is_dir() {
            return Ok(self.walk);
        }
        let said = *self.said.lock();
        let st = if let Some((_, st)) = said.filter(|s| self.is_recent(s.0)) {
            st
        } else {
            let st = self.stat()?;
            self.note(&st);
            st
        };
        Ok((st.mode & 0o7777, st.uid, st.gid))
    }

    fn set_attr(&self, change: &AttrChange) -> Result<()> {
        self.upper()?.set_attr(change)
    }

    fn lookup(&self, name: &[u8]) -> Result<Arc<dyn Inode>> {
        Ok(self.find(name)?)
    }

    fn create(&self, name: &[u8], what: Create<'_>, mode: u32, uid: u32, gid: u32) -> Result<Arc<dyn Inode>> {
        self.names()?;
        if self.is_gone() {
            return Err(Errno::ENOENT);
        }
        match self.find(name) {
            Ok(_) => return Err(Errno::EEXIST),
            Err(Errno::ENOENT) => {}
            Err(e) => return Err(e),
        }
        let dir = self.upper()?;
        let child = self.fresh(what, mode, uid, gid)?;
        {
            let mut names = self.names()?.lock();
            names.subdirs += i64::from(child.is_dir());
            Self::place(&mut names, name, &child);
        }
        dir.touch();
        Ok(child)
    }

    fn create_unnamed(&self, mode: u32, uid: u32, gid: u32) -> Result<Arc<dyn Inode>> {
        self.names()?;
        let node = self.fresh(Create::Regular, mode, uid, gid)?;
        node.upper()?.change_attr(|a| a.nlink = 0);
        Ok(node)
    }

    fn link(&self, name: &[u8], target: &Arc<dyn Inode>) -> Result<()> {
        let target = target.as_any().downcast_ref::<Node>().ok_or(Errno::EXDEV)?.arc()?;
        if !Arc::ptr_eq(&self.shared, &target.shared) {
            return Err(Errno::EXDEV);
        }
        if target.is_dir() {
            return Err(Errno::EPERM);
        }
        if self.is_gone() {
            return Err(Errno::ENOENT);
        }
        if self.find(name).is_ok() {
            return Err(Errno::EEXIST);
        }
        let upper = target.upper()?;
        let dir = self.upper()?;
        upper.gain_name()?;
        Self::place(&mut self.names()?.lock(), name, &target);
        target.gone.store(false, Ordering::Relaxed);
        dir.touch();
        Ok(())
    }

    fn unlink(&self, name: &[u8]) -> Result<()> {
        let node = self.find(name)?;
        if node.is_dir() {
            return Err(Errno::EISDIR);
        }
        self.take_away(name, &node)
    }

    fn rmdir(&self, name: &[u8]) -> Result<()> {
        let node = self.find(name)?;
        if !node.is_dir() {
            return Err(Errno::ENOTDIR);
        }
        node.check_empty()?;
        self.take_away(name, &node)
    }

    fn rename(&self, name: &[u8], new_dir: &Arc<dyn Inode>, new_name: &[u8], flags: u32) -> Result<()> {
        let new_dir = new_dir.as_any().downcast_ref::<Node>().ok_or(Errno::EXDEV)?;
        if !Arc::ptr_eq(&self.shared, &new_dir.shared) {
            return Err(Errno::EXDEV);
        }
        rename::rename(self, name, new_dir, new_name, flags)
    }

    fn read_link(&self) -> Result<Vec<u8>> {
        match (self.upper.get(), &self.lower) {
            (Some(upper), _) => upper.read_link(),
            (None, Some(lower)) => lower.read_link(),
            (None, None) => Err(Errno::EIO),
        }
    }

    fn open(self: Arc<Self>, caller: &dyn Caller, path: &PathRef, flags: OpenFlags) -> Result<OpenResult> {
        match self.kind {
            InodeKind::Regular => Ok(OpenResult::Ops(Arc::new(OverlayFile::open(self, flags.writable())?))),
            InodeKind::Directory if flags.writable() => Err(Errno::EISDIR),
            InodeKind::Directory => Ok(OpenResult::Ops(Arc::new(OverlayDir::new(self)))),
            InodeKind::Symlink => Err(Errno::ELOOP),
            _ => crate::fs::dev::open_special(&*self, self.stat()?.rdev, caller, path, flags),
        }
    }

    fn get_xattr(&self, name: &[u8]) -> Result<Vec<u8>> {
        match (self.upper.get(), &self.lower) {
            (Some(upper), _) => upper.get_xattr(name),
            (None, Some(lower)) => lower.get_xattr(name),
            (None, None) => Err(Errno::EIO),
        }
    }

    fn set_xattr(&self, name: &[u8], value: &[u8], flags: u32) -> Result<()> {
        if !xattr_supported(name) {
            return Err(Errno::EOPNOTSUPP);
        }
        self.upper()?.set_xattr(name, value, flags)
    }

    fn remove_xattr(&self, name: &[u8]) -> Result<()> {
        self.get_xattr(name)?;
        self.upper()?.remove_xattr(name)
    }

    fn list_xattr(&self) -> Result<Vec<Vec<u8>>> {
        match (self.upper.get(), &self.lower) {
            (Some(upper), _) => upper.list_xattr(),
            (None, Some(lower)) => lower.list_xattr(),
            (None, None) => Err(Errno::EIO),
        }
    }

    fn attachments(&self) -> Option<&Attachments> {
        Some(&self.attachments)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Node {
    fn take_away(&self, name: &[u8], node: &Arc<Node>) -> Result<()> {
        let dir = self.upper()?;
        let below = self.below_has(name);
        {
            let mut names = self.names()?.lock();
            names.subdirs -= i64::from(node.is_dir());
            let old = Self::cover(&mut names, name, below);
            drop(names);
            drop(old);
        }
        node.lost_name();
        dir.touch();
        Ok(())
    }
}
