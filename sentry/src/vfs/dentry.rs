//! Names: the tree of dentries of each file system, cached. Owns which names are kept and how they hang together; never
//! decides who may use one.
//!
//! A dentry holds its parent; a parent knows its children weakly. What keeps an unused dentry is the bounded
//! [`DentryCache`] of its file system alone.
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use super::inode::{Inode, InodeKind};
use super::mount::Mount;
use crate::lock::{Mutex, Rank, RwLock};
use crate::{Errno, Result};

/// Counts renames and unlinks of all sandboxes of the process, so that a walk towards the root can tell whether it saw one state: one too
/// many only makes it walk again.
static NAMES_CHANGED: AtomicU64 = AtomicU64::new(0);

/// Where a dentry hangs.
struct Place {
    parent: Option<Arc<Dentry>>,
    name: Arc<[u8]>,
    gone: bool,
}

/// A name in a directory (or the root of a file system).
pub struct Dentry {
    inode: Arc<dyn Inode>,
    kind: InodeKind,
    place: Mutex<Place>,
    children: Mutex<HashMap<Arc<[u8]>, Weak<Dentry>>>,
    /// Held shared by lookups that ask the file system, exclusively by changes of the directory.
    contents: RwLock<()>,
    /// Mounts that cover this dentry, in any namespace.
    mounted: AtomicU32,
    referenced: AtomicBool,
    /// Key in the cache; 0 when not there.
    cached: AtomicU64,
    /// Made without a name that linkat(2) may give it (O_TMPFILE without O_EXCL).
    linkable: AtomicBool,
}

impl Dentry {
    fn with_place(inode: Arc<dyn Inode>, parent: Option<Arc<Dentry>>, name: Arc<[u8]>) -> Arc<Dentry> {
        Arc::new(Dentry {
            kind: inode.kind(),
            inode,
            place: Mutex::new(Rank::Leaf, Place { parent, name, gone: false }),
            children: Mutex::new(Rank::Leaf, HashMap::new()),
            contents: RwLock::new(Rank::Dentry, ()),
            mounted: AtomicU32::new(0),
            referenced: AtomicBool::new(false),
            cached: AtomicU64::new(0),
            linkable: AtomicBool::new(false),
        })
    }

    /// The root of a file system.
    pub fn root(inode: Arc<dyn Inode>) -> Arc<Dentry> {
        Dentry::with_place(inode, None, Arc::from(&b"/"[..]))
    }

    /// A name outside every directory, such as an O_TMPFILE inode made in `parent`: gone from the start. `linkable` if
    /// linkat(2) may give it a name.
    pub fn unlinked(inode: Arc<dyn Inode>, parent: &Arc<Dentry>, name: &[u8], linkable: bool) -> Arc<Dentry> {
        let dentry = Dentry::with_place(inode, Some(parent.clone()), Arc::from(name));
        dentry.linkable.store(linkable, Ordering::Relaxed);
        dentry.place.lock_nested().gone = true;
        dentry
    }

    /// What it names.
    pub fn inode(&self) -> &Arc<dyn Inode> {
        &self.inode
    }

    /// Type of the inode.
    pub fn kind(&self) -> InodeKind {
        self.kind
    }

    /// Whether it names a directory.
    pub fn is_dir(&self) -> bool {
        self.kind == InodeKind::Directory
    }

    /// The name in the parent.
    pub fn name(&self) -> Arc<[u8]> {
        self.place.lock_nested().name.clone()
    }

    /// The directory it hangs in; None for a root.
    pub fn parent(&self) -> Option<Arc<Dentry>> {
        self.place.lock_nested().parent.clone()
    }

    /// Whether the name was removed.
    pub fn is_gone(&self) -> bool {
        self.place.lock_nested().gone
    }

    /// Whether it may get a name though it has none.
    pub fn is_linkable(&self) -> bool {
        self.linkable.load(Ordering::Relaxed)
    }

    /// Whether some mount covers it.
    pub fn is_mountpoint(&self) -> bool {
        self.mounted.load(Ordering::SeqCst) > 0
    }

    pub(super) fn add_mount(&self) {
        self.mounted.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn remove_mount(&self) {
        self.mounted.fetch_sub(1, Ordering::SeqCst);
    }

    /// The lock of the directory's contents; see [`Inode`].
    pub(super) fn contents(&self) -> &RwLock<()> {
        &self.contents
    }

    /// The live dentry of a child, without asking the file system.
    fn cached_child(&self, name: &[u8]) -> Option<Arc<Dentry>> {
        let child = self.children.lock_nested().get(name).and_then(Weak::upgrade);
        child.inspect(|c| {
            if !c.referenced.load(Ordering::Relaxed) {
                c.referenced.store(true, Ordering::Relaxed);
            }
        })
    }

    /// Finds a child: ENOENT, ENOTDIR. Takes the lock of the directory's contents unless `locked`.
    pub(super) fn lookup(self: &Arc<Self>, cache: &DentryCache, name: &[u8], locked: bool) -> Result<Arc<Dentry>> {
        if !self.inode.cacheable() {
            let inode = self.inode.lookup(name)?;
            // What covers a name must be found again, although the name itself is looked up anew.
            if let Some(child) = self.cached_child(name).filter(|c| c.is_mountpoint()) {
                return Ok(child);
            }
            let child = Dentry::with_place(inode, Some(self.clone()), Arc::from(name));
            return Ok(child);
        }
        if let Some(child) = self.cached_child(name) {
            if !child.inode.is_stale() || child.is_mountpoint() {
                return Ok(child);
            }
            self.forget_child(name, Arc::as_ptr(&child));
            cache.forget(&child);
        }
        let _guard = (!locked).then(|| self.contents.read());
        let inode = self.inode.lookup(name)?;
        Ok(self.adopt(cache, name, inode))
    }

    /// The dentry for a child whose inode is known; the lock of the contents is held.
    pub(super) fn adopt(self: &Arc<Self>, cache: &DentryCache, name: &[u8], inode: Arc<dyn Inode>) -> Arc<Dentry> {
        let name: Arc<[u8]> = Arc::from(name);
        let child = Dentry::with_place(inode, Some(self.clone()), name.clone());
        if !self.inode.cacheable() {
            return child;
        }
        let raced = {
            let mut children = self.children.lock_nested();
            let other = children.get(&name).and_then(Weak::upgrade);
            if other.is_none() {
                children.insert(name, Arc::downgrade(&child));
            }
            other
        };
        if let Some(other) = raced {
            // Not in the map: nothing to take out when it is dropped.
            child.place.lock_nested().gone = true;
            return other;
        }
        cache.keep(&child);
        child
    }

    /// Registers a dentry that something covers, so that [`Dentry::lookup`] finds it even in a changing tree.
    pub(super) fn pin_in_parent(self: &Arc<Self>) {
        let (parent, name) = {
            let place = self.place.lock_nested();
            (place.parent.clone(), place.name.clone())
        };
        if let Some(parent) = parent {
            let old = parent.children.lock_nested().insert(name, Arc::downgrade(self));
            drop(old);
        }
    }

    fn forget_child(&self, name: &[u8], child: *const Dentry) {
        let mut children = self.children.lock_nested();
        if children.get(name).is_some_and(|w| std::ptr::eq(w.as_ptr(), child)) {
            children.remove(name);
            if children.is_empty() {
                *children = HashMap::new();
            }
        }
    }

    /// The name was removed from its directory, whose contents lock is held.
    pub(super) fn remove(self: &Arc<Self>, cache: &DentryCache) {
        NAMES_CHANGED.fetch_add(1, Ordering::SeqCst);
        let (parent, name) = {
            let mut place = self.place.lock_nested();
            place.gone = true;
            (place.parent.clone(), place.name.clone())
        };
        if let Some(parent) = &parent {
            parent.forget_child(&name, Arc::as_ptr(self));
        }
        cache.forget(self);
    }

    /// The name moved; the contents locks of both directories are held.
    pub(super) fn moved(self: &Arc<Self>, to: &Arc<Dentry>, name: &[u8]) {
        NAMES_CHANGED.fetch_add(1, Ordering::SeqCst);
        let new: Arc<[u8]> = Arc::from(name);
        let (old_parent, old_name) = {
            let mut place = self.place.lock_nested();
            let old = std::mem::replace(&mut place.name, new.clone());
            (place.parent.replace(to.clone()), old)
        };
        if let Some(parent) = &old_parent {
            parent.forget_child(&old_name, Arc::as_ptr(self));
        }
        if to.inode.cacheable() {
            let replaced = to.children.lock_nested().insert(new, Arc::downgrade(self));
            drop(replaced);
        }
    }

    /// Whether `self` is `other` or an ancestor of it.
    pub(super) fn is_ancestor_of(self: &Arc<Self>, other: &Arc<Dentry>) -> bool {
        let mut at = Some(other.clone());
        while let Some(d) = at {
            if Arc::ptr_eq(self, &d) {
                return true;
            }
            at = d.parent();
        }
        false
    }

    /// Lets go of the parent.
    fn detach(&self) -> Option<Arc<Dentry>> {
        let (parent, name) = {
            let mut place = self.place.lock_nested();
            (place.parent.take()?, place.name.clone())
        };
        parent.forget_child(&name, self);
        Some(parent)
    }
}

impl Drop for Dentry {
    fn drop(&mut self) {
        // A loop in place of recursion: the guest chooses how deep directories go.
        let mut next = self.detach();
        while let Some(parent) = next {
            next = Arc::into_inner(parent).and_then(|p| p.detach());
        }
    }
}

struct Kept {
    next: u64,
    order: BTreeMap<u64, Arc<Dentry>>,
}

/// Keeps the dentries of one file system that nobody uses, at most a fixed number, the longest unused first to go.
pub struct DentryCache {
    limit: usize,
    kept: Mutex<Kept>,
}

impl DentryCache {
    /// A cache of at most `limit` dentries.
    pub fn new(limit: usize) -> DentryCache {
        DentryCache { limit, kept: Mutex::new(Rank::Leaf, Kept { next: 1, order: BTreeMap::new() }) }
    }

    fn keep(&self, dentry: &Arc<Dentry>) {
        let mut evicted = None;
        {
            let mut kept = self.kept.lock_nested();
            let key = kept.next;
            kept.next += 1;
            dentry.cached.store(key, Ordering::Relaxed);
            kept.order.insert(key, dentry.clone());
            // Second chance for what was used since it came in; two tries bound the work of one insertion.
            for _ in 0..3 {
                if kept.order.len() <= self.limit {
                    break;
                }
                let Some((_, oldest)) = kept.order.pop_first() else { break };
                if oldest.referenced.swap(false, Ordering::Relaxed) && evicted.is_none() {
                    let key = kept.next;
                    kept.next += 1;
                    oldest.cached.store(key, Ordering::Relaxed);
                    kept.order.insert(key, oldest);
                } else {
                    oldest.cached.store(0, Ordering::Relaxed);
                    evicted = Some(oldest);
                    break;
                }
            }
        }
        drop(evicted);
    }

    fn forget(&self, dentry: &Dentry) {
        let taken = {
            let mut kept = self.kept.lock_nested();
            let key = dentry.cached.swap(0, Ordering::Relaxed);
            kept.order.remove(&key)
        };
        drop(taken);
    }

    /// Drops everything kept (umount, drop_caches).
    pub fn clear(&self) {
        let taken = std::mem::take(&mut self.kept.lock_nested().order);
        for dentry in taken.values() {
            dentry.cached.store(0, Ordering::Relaxed);
        }
        drop(taken);
    }

    /// Dentries kept now.
    pub fn len(&self) -> usize {
        self.kept.lock_nested().order.len()
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
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
        self.seen_from(None).0
    }

    /// The path as seen from `root` (d_path), and whether it lies beneath it; if not, the path is the one from the top of
    /// whatever tree it is in.
    pub fn seen_from(&self, root: Option<&PathRef>) -> (Vec<u8>, bool) {
        let mut tries = 0;
        loop {
            let before = NAMES_CHANGED.load(Ordering::SeqCst);
            let answer = self.walk_up(root);
            tries += 1;
            if tries == 8 || NAMES_CHANGED.load(Ordering::SeqCst) == before {
                return answer;
            }
        }
    }

    fn walk_up(&self, root: Option<&PathRef>) -> (Vec<u8>, bool) {
        let gone = self.dentry.is_gone() && self.dentry.parent().is_some();
        let mut names: Vec<Arc<[u8]>> = Vec::new();
        let mut at = self.clone();
        let reached = loop {
            if root.is_some_and(|r| at.is(r)) {
                break true;
            }
            if Arc::ptr_eq(&at.dentry, at.mount.root()) {
                match at.mount.mountpoint() {
                    Some(up) => {
                        at = up;
                        continue;
                    }
                    None => break root.is_none() && at.mount.is_attached(),
                }
            }
            match at.dentry.parent() {
                Some(parent) => {
                    names.push(at.dentry.name());
                    at.dentry = parent;
                }
                None => break false,
            }
        };
        let mut path = Vec::new();
        for name in names.iter().rev() {
            path.push(b'/');
            path.extend_from_slice(name);
        }
        if path.is_empty() {
            path.push(b'/');
        }
        if gone {
            path.extend_from_slice(b" (deleted)");
        }
        (path, reached)
    }

    /// The inode.
    pub fn inode(&self) -> &Arc<dyn Inode> {
        self.dentry.inode()
    }

    /// Whether both are the same place.
    pub fn is(&self, other: &PathRef) -> bool {
        Arc::ptr_eq(&self.dentry, &other.dentry) && Arc::ptr_eq(&self.mount, &other.mount)
    }

    /// Whether the name lies in the tree below (or at) `root`, mounts included.
    pub fn is_beneath(&self, root: &PathRef) -> bool {
        self.seen_from(Some(root)).1
    }

    /// ENOTDIR unless it is a directory.
    pub fn require_dir(&self) -> Result<()> {
        if self.dentry.is_dir() { Ok(()) } else { Err(Errno::ENOTDIR) }
    }
}
