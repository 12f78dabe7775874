//! Mounts and mount namespaces (mount_namespaces(7)). Owns where file systems hang; never their contents.
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use bitflags::bitflags;
use linux_raw_sys::general as raw;

use super::dentry::DentryCache;
use super::{Dentry, FileSystem, PathRef};
use crate::lock::{Mutex, Rank};
use crate::mm;
use crate::ns::Owner;
use crate::platform::{KernelMemory, Platform};
use crate::{Errno, Result};

bitflags! {
    /// Per-mount flags: MS_* of mount(2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct MountFlags: u32 {
        /// MS_RDONLY.
        const RDONLY = raw::MS_RDONLY;
        /// MS_NOSUID.
        const NOSUID = raw::MS_NOSUID;
        /// MS_NODEV.
        const NODEV = raw::MS_NODEV;
        /// MS_NOEXEC.
        const NOEXEC = raw::MS_NOEXEC;
        /// MS_NOATIME.
        const NOATIME = raw::MS_NOATIME;
        /// MS_NODIRATIME.
        const NODIRATIME = raw::MS_NODIRATIME;
        /// MS_RELATIME.
        const RELATIME = raw::MS_RELATIME;
        /// MS_NOSYMFOLLOW.
        const NOSYMFOLLOW = raw::MS_NOSYMFOLLOW;
    }
}

impl MountFlags {
    /// What says when access times are kept.
    pub const ATIME: MountFlags = MountFlags::NOATIME.union(MountFlags::NODIRATIME).union(MountFlags::RELATIME);
    /// What a user namespace cannot take off mounts it was given (mount_namespaces(7)).
    const RESTRICTIVE: MountFlags =
        MountFlags::RDONLY.union(MountFlags::NOSUID).union(MountFlags::NODEV).union(MountFlags::NOEXEC);
}

/// Unused dentries kept for one file system.
const KEPT_DENTRIES: usize = 8192;
/// Mounts of one namespace at most (fs.mount-max is 100,000 on Linux).
const MOUNT_MAX: usize = 10_000;

/// A file system with its tree of dentries, shared by all mounts of it.
pub struct SuperBlock {
    fs: Arc<dyn FileSystem>,
    root: Arc<Dentry>,
    cache: DentryCache,
    /// Serializes renames between directories, so that ancestors hold still.
    rename: Mutex<()>,
}

impl SuperBlock {
    /// The file system with an empty cache.
    pub fn new(fs: Arc<dyn FileSystem>) -> Arc<SuperBlock> {
        let root = Dentry::root(fs.root());
        Arc::new(SuperBlock { fs, root, cache: DentryCache::new(KEPT_DENTRIES), rename: Mutex::new(Rank::Rename, ()) })
    }

    /// The file system.
    pub fn fs(&self) -> &Arc<dyn FileSystem> {
        &self.fs
    }

    /// Kept dentries.
    pub fn cache(&self) -> &DentryCache {
        &self.cache
    }

    pub(super) fn rename_lock(&self) -> &Mutex<()> {
        &self.rename
    }
}

impl Drop for SuperBlock {
    fn drop(&mut self) {
        self.cache.clear();
    }
}

#[derive(Default)]
struct Attached {
    /// What it covers; None for a namespace's root and for what was detached.
    on: Option<PathRef>,
    namespace: Weak<MountNamespace>,
}

/// A file system attached to the tree.
pub struct Mount {
    id: u64,
    sb: Arc<SuperBlock>,
    root: Arc<Dentry>,
    source: Vec<u8>,
    flags: AtomicU32,
    /// Flags that must stay, with a bit of its own for access times.
    locked: AtomicU32,
    /// It stays where it is: it came with the rest from a more privileged user namespace.
    fixed: AtomicBool,
    attached: Mutex<Attached>,
    /// Mounts on dentries of this mount, by the address of the dentry, which the child keeps alive.
    children: Mutex<HashMap<usize, Arc<Mount>>>,
}

fn next_mount_id() -> u64 {
    // Linux's first visible mount ids are small too; they only have to be unique.
    static NEXT: AtomicU64 = AtomicU64::new(20);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn dentry_key(dentry: &Arc<Dentry>) -> usize {
    Arc::as_ptr(dentry).addr()
}

impl Mount {
    fn new(sb: Arc<SuperBlock>, root: Arc<Dentry>, source: Vec<u8>, flags: MountFlags) -> Arc<Mount> {
        Arc::new(Mount {
            id: next_mount_id(),
            sb,
            root,
            source,
            flags: AtomicU32::new(flags.bits()),
            locked: AtomicU32::new(0),
            fixed: AtomicBool::new(false),
            attached: Mutex::new(Rank::Leaf, Attached::default()),
            children: Mutex::new(Rank::Leaf, HashMap::new()),
        })
    }

    /// A mount of a file system that hangs nowhere (pipes, memfd, and so on).
    pub fn detached(fs: Arc<dyn FileSystem>) -> Arc<Mount> {
        let sb = SuperBlock::new(fs);
        let root = sb.root.clone();
        Mount::new(sb, root, b"none".to_vec(), MountFlags::empty())
    }

    /// Number in mountinfo and statx.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The file system with its dentries.
    pub fn sb(&self) -> &Arc<SuperBlock> {
        &self.sb
    }

    /// The file system.
    pub fn fs(&self) -> &Arc<dyn FileSystem> {
        &self.sb.fs
    }

    /// The dentry at the top; not the file system's root for a bind mount.
    pub fn root(&self) -> &Arc<Dentry> {
        &self.root
    }

    /// The top as a place.
    pub fn root_path(self: &Arc<Self>) -> PathRef {
        PathRef { mount: self.clone(), dentry: self.root.clone() }
    }

    /// Flags now.
    pub fn flags(&self) -> MountFlags {
        MountFlags::from_bits_retain(self.flags.load(Ordering::Relaxed))
    }

    /// Changes the flags (MS_REMOUNT | MS_BIND). EPERM for those that must stay.
    pub fn set_flags(&self, flags: MountFlags) -> Result<()> {
        let locked = MountFlags::from_bits_retain(self.locked.load(Ordering::Relaxed));
        let atime_changes = (self.flags() ^ flags).intersects(MountFlags::ATIME & !MountFlags::RELATIME);
        if !flags.contains(locked & MountFlags::RESTRICTIVE) || locked.intersects(MountFlags::ATIME) && atime_changes {
            return Err(Errno::EPERM);
        }
        self.flags.store(flags.bits(), Ordering::Relaxed);
        Ok(())
    }

    /// A mount of the same at another place, or in another namespace.
    fn duplicate(&self, root: Arc<Dentry>) -> Arc<Mount> {
        let copy = Mount::new(self.sb.clone(), root, self.source.clone(), self.flags());
        copy.locked.store(self.locked.load(Ordering::Relaxed), Ordering::Relaxed);
        copy.fixed.store(self.fixed.load(Ordering::Relaxed), Ordering::Relaxed);
        copy
    }

    /// It comes into a less privileged user namespace, `whole` if what it is on comes with it.
    fn lock_for_less(&self, whole: bool) {
        let locked = (self.flags() & MountFlags::RESTRICTIVE) | MountFlags::RELATIME;
        self.locked.fetch_or(locked.bits(), Ordering::Relaxed);
        if whole {
            self.fixed.store(true, Ordering::Relaxed);
        }
    }

    fn is_fixed(&self) -> bool {
        self.fixed.load(Ordering::Relaxed)
    }

    /// EROFS on a read-only mount.
    pub fn require_writable(&self) -> Result<()> {
        if self.flags().contains(MountFlags::RDONLY) { Err(Errno::EROFS) } else { Ok(()) }
    }

    /// What it covers.
    pub fn mountpoint(&self) -> Option<PathRef> {
        self.attached.lock_nested().on.clone()
    }

    /// Whether it hangs in a namespace's tree.
    pub fn is_attached(&self) -> bool {
        self.namespace().is_some()
    }

    /// The namespace it belongs to.
    pub fn namespace(&self) -> Option<Arc<MountNamespace>> {
        self.attached.lock_nested().namespace.upgrade()
    }

    /// The mount that covers `dentry` of this mount.
    pub fn covering(&self, dentry: &Arc<Dentry>) -> Option<Arc<Mount>> {
        if !dentry.is_mountpoint() {
            return None;
        }
        self.children.lock_nested().get(&dentry_key(dentry)).cloned()
    }

    fn child_mounts(&self) -> Vec<Arc<Mount>> {
        let mut all: Vec<_> = self.children.lock_nested().values().cloned().collect();
        all.sort_by_key(|m| m.id);
        all
    }

    /// This mount and all below it, parents first.
    fn subtree(self: &Arc<Self>) -> Vec<Arc<Mount>> {
        let mut all = vec![self.clone()];
        let mut at = 0;
        while let Some(mount) = all.get(at).cloned() {
            all.extend(mount.child_mounts());
            at += 1;
        }
        all
    }

    /// Options as /proc/mounts shows them.
    fn options(&self) -> String {
        let flags = self.flags();
        let mut s = String::from(if flags.contains(MountFlags::RDONLY) { "ro" } else { "rw" });
        for (flag, text) in [
            (MountFlags::NOSUID, ",nosuid"),
            (MountFlags::NODEV, ",nodev"),
            (MountFlags::NOEXEC, ",noexec"),
            (MountFlags::NOATIME, ",noatime"),
            (MountFlags::NODIRATIME, ",nodiratime"),
            (MountFlags::NOSYMFOLLOW, ",nosymfollow"),
        ] {
            if flags.contains(flag) {
                s.push_str(text);
            }
        }
        if !flags.intersects(MountFlags::NOATIME) {
            s.push_str(",relatime");
        }
        s
    }
}

/// A tree of mounts.
pub struct MountNamespace {
    number: u64,
    /// Whose capabilities count.
    pub owner: Owner,
    root: Mutex<Option<Arc<Mount>>>,
    /// Serializes changes of the tree.
    changes: Mutex<Changes>,
}

/// Bytes of a mount with its superblock.
const MOUNT_COST: usize = 4096;

/// How many mounts there are.
struct Changes {
    count: usize,
    /// What they are charged to, once that is known.
    charge: Option<mm::Charge>,
}

impl Changes {
    /// ENOSPC at the limit, ENOMEM at the sandbox's memory limit.
    fn set_count(&mut self, count: usize) -> Result<()> {
        if count > self.count && count > MOUNT_MAX {
            return Err(Errno::ENOSPC);
        }
        if let Some(charge) = &mut self.charge {
            charge.resize(count.saturating_mul(MOUNT_COST))?;
        }
        self.count = count;
        Ok(())
    }
}

impl MountNamespace {
    /// A namespace whose only mount is `root`.
    pub fn new(root: Arc<dyn FileSystem>) -> Arc<MountNamespace> {
        let sb = SuperBlock::new(root);
        let dentry = sb.root.clone();
        let source = sb.fs.name().as_bytes().to_vec();
        Self::with_root(Mount::new(sb, dentry, source, MountFlags::empty()), Owner::initial())
    }

    fn with_root(mount: Arc<Mount>, owner: Owner) -> Arc<MountNamespace> {
        let ns = Arc::new(MountNamespace {
            number: crate::ns::next_number(),
            owner,
            root: Mutex::new(Rank::Leaf, Some(mount.clone())),
            changes: Mutex::new(Rank::Mount, Changes { count: 1, charge: None }),
        });
        mount.attached.lock().namespace = Arc::downgrade(&ns);
        ns
    }

    /// Charges its mounts, and those of its copies, to the sandbox's memory. ENOMEM.
    pub fn charge_to(&self, platform: &Arc<dyn Platform>) -> Result<()> {
        let mut changes = self.changes.lock();
        changes.charge = Some(mm::Charge::empty(platform, KernelMemory::Slab));
        let count = changes.count;
        changes.set_count(count)
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The place `/`, what covers it included.
    pub fn root(&self) -> Result<PathRef> {
        let mount = self.root.lock_nested().clone().ok_or(Errno::ENOENT)?;
        Ok(follow_mounts(mount.root_path()))
    }

    /// Mounts `fs` at the absolute path `at`, as seen from the namespace's root by an all-powerful caller.
    pub fn mount(self: &Arc<Self>, at: &[u8], fs: Arc<dyn FileSystem>, flags: MountFlags) -> Result<Arc<Mount>> {
        let root = self.root()?;
        let caller = super::file::KernelCaller::default();
        let cx = super::path::Lookup::new(super::fs_context::FsState { cwd: root.clone(), root, umask: 0 }, &caller);
        let place = super::path::resolve(&cx, None, at, super::path::LookupFlags::FOLLOW)?;
        let source = fs.name().as_bytes().to_vec();
        self.attach_fs(&place, fs, source, flags)
    }

    /// Mounts `fs` at a place; `source` is what /proc/mounts calls the device.
    pub fn attach_fs(
        self: &Arc<Self>,
        at: &PathRef,
        fs: Arc<dyn FileSystem>,
        source: Vec<u8>,
        flags: MountFlags,
    ) -> Result<Arc<Mount>> {
        let sb = SuperBlock::new(fs);
        let root = sb.root.clone();
        let mount = Mount::new(sb, root, source, flags);
        self.attach(&mount, at)?;
        Ok(mount)
    }

    /// Mounts a file system that some mount already shows.
    pub fn attach_sb(
        self: &Arc<Self>,
        at: &PathRef,
        sb: &Arc<SuperBlock>,
        source: Vec<u8>,
        flags: MountFlags,
    ) -> Result<Arc<Mount>> {
        let mount = Mount::new(sb.clone(), sb.root.clone(), source, flags);
        self.attach(&mount, at)?;
        Ok(mount)
    }

    /// The first mounted file system of that name.
    pub fn find_fs(&self, name: &[u8]) -> Option<Arc<SuperBlock>> {
        self.mounts().iter().find(|m| m.fs().name().as_bytes() == name).map(|m| m.sb.clone())
    }

    /// Moves the mount whose root is `from` to `at` (MS_MOVE).
    pub fn move_mount(self: &Arc<Self>, from: &PathRef, at: &PathRef) -> Result<()> {
        let _count = self.changes.lock();
        let mount = &from.mount;
        let ours = |m: &Arc<Mount>| m.namespace().is_some_and(|ns| Arc::ptr_eq(&ns, self));
        if !Arc::ptr_eq(mount.root(), &from.dentry) || !ours(mount) || !ours(&at.mount) {
            return Err(Errno::EINVAL);
        }
        let Some(on) = mount.mountpoint().filter(|_| !mount.is_fixed()) else { return Err(Errno::EINVAL) };
        if at.dentry.is_dir() != mount.root.is_dir() {
            return Err(Errno::ENOTDIR);
        }
        if at.is_beneath(from) {
            return Err(Errno::ELOOP);
        }
        unhang(mount, &on);
        hang(mount, follow_mounts(at.clone()));
        Ok(())
    }

    /// Makes the tree at `from` visible at `at` too (MS_BIND, with MS_REC all mounts below).
    pub fn bind(self: &Arc<Self>, from: &PathRef, at: &PathRef, recursive: bool) -> Result<Arc<Mount>> {
        if from.dentry.is_dir() != at.dentry.is_dir() {
            return Err(Errno::ENOTDIR);
        }
        // What a fixed mount hides must stay hidden.
        let hides =
            |m: &Arc<Mount>| m.is_fixed() && m.mountpoint().is_some_and(|on| from.dentry.is_ancestor_of(&on.dentry));
        if !recursive && from.mount.child_mounts().iter().any(hides) {
            return Err(Errno::EINVAL);
        }
        let copy = copy_tree(&from.mount, &from.dentry, recursive, &mut Vec::new());
        copy.fixed.store(false, Ordering::Relaxed);
        self.attach(&copy, at).inspect_err(|_| take_apart(&copy))?;
        Ok(copy)
    }

    fn attach(self: &Arc<Self>, mount: &Arc<Mount>, at: &PathRef) -> Result<()> {
        let mut changes = self.changes.lock();
        let at = follow_mounts(at.clone());
        if at.dentry.is_dir() != mount.root.is_dir() {
            return Err(Errno::ENOTDIR);
        }
        if !at.mount.namespace().is_some_and(|ns| Arc::ptr_eq(&ns, self)) {
            return Err(Errno::EINVAL);
        }
        if at.dentry.is_gone() {
            return Err(Errno::ENOENT);
        }
        let tree = mount.subtree();
        let count = changes.count.saturating_add(tree.len());
        changes.set_count(count)?;
        for m in &tree {
            m.attached.lock_nested().namespace = Arc::downgrade(self);
        }
        hang(mount, at);
        Ok(())
    }

    /// Takes the mount whose root `at` is out of the tree. EINVAL if it is none, EBUSY if it is used and not `lazy`.
    pub fn unmount(self: &Arc<Self>, at: PathRef, lazy: bool) -> Result<()> {
        let mut changes = self.changes.lock();
        let PathRef { mount, dentry } = at;
        if !Arc::ptr_eq(mount.root(), &dentry) || !mount.namespace().is_some_and(|ns| Arc::ptr_eq(&ns, self)) {
            return Err(Errno::EINVAL);
        }
        let Some(on) = mount.mountpoint().filter(|_| !mount.is_fixed()) else { return Err(Errno::EINVAL) };
        drop(dentry);
        if !lazy {
            // One handle is the parent's, one is ours.
            if !mount.children.lock_nested().is_empty() || Arc::strong_count(&mount) > 2 {
                return Err(Errno::EBUSY);
            }
        }
        let tree = mount.subtree();
        let left = changes.count.saturating_sub(tree.len());
        changes.set_count(left)?;
        unhang(&mount, &on);
        for m in tree.iter().rev() {
            m.attached.lock_nested().namespace = Weak::new();
            if !Arc::ptr_eq(m, &mount)
                && let Some(on) = m.mountpoint()
            {
                unhang(m, &on);
            }
        }
        drop(changes);
        Ok(())
    }

    /// Makes `new_root` the root mount and hangs the old one at `put_old` (pivot_root(2)).
    pub fn pivot_root(self: &Arc<Self>, new_root: &PathRef, put_old: &PathRef) -> Result<()> {
        let _count = self.changes.lock();
        let old = self.root()?.mount;
        let mount = &new_root.mount;
        if !Arc::ptr_eq(mount.root(), &new_root.dentry) {
            return Err(Errno::EINVAL);
        }
        if Arc::ptr_eq(mount, &old) || Arc::ptr_eq(&put_old.mount, &old) {
            return Err(Errno::EBUSY);
        }
        if !put_old.is_beneath(new_root) {
            return Err(Errno::EINVAL);
        }
        let Some(on) = mount.mountpoint().filter(|_| !mount.is_fixed()) else { return Err(Errno::EINVAL) };
        mount.fixed.store(old.fixed.swap(false, Ordering::Relaxed), Ordering::Relaxed);
        // A root that itself covers something leaves its place to the new one.
        let below = old.mountpoint();
        unhang(mount, &on);
        if let Some(below) = &below {
            unhang(&old, below);
        }
        if put_old.is(new_root) {
            // pivot_root(".", "."): the old root covers the new one.
            hang(&old, new_root.clone());
        } else {
            hang(&old, follow_mounts(put_old.clone()));
        }
        match below {
            Some(below) => hang(mount, below),
            None => *self.root.lock_nested() = Some(mount.clone()),
        }
        Ok(())
    }

    /// A copy of the namespace (CLONE_NEWNS) and, for each of `places`, the same place in the copy.
    pub fn copy(self: &Arc<Self>, places: &mut [&mut PathRef], owner: Owner) -> Result<Arc<MountNamespace>> {
        let changes = self.changes.lock();
        // Before the copy, which may be large.
        let cost = changes.count.saturating_mul(MOUNT_COST);
        let memory = changes.charge.as_ref().map(|c| c.another(cost)).transpose()?;
        let root = self.root.lock_nested().clone().ok_or(Errno::ENOENT)?;
        let mut pairs = Vec::new();
        let copy = copy_tree(&root, root.root(), true, &mut pairs);
        if !Arc::ptr_eq(&self.owner.user_ns, &owner.user_ns) {
            for (_, new) in &pairs {
                new.lock_for_less(!Arc::ptr_eq(new, &copy));
            }
        }
        let ns = Self::with_root(copy, owner);
        *ns.changes.lock_nested() = Changes { count: pairs.len(), charge: memory };
        for (_, new) in &pairs {
            new.attached.lock_nested().namespace = Arc::downgrade(&ns);
        }
        for place in places {
            if let Some((_, new)) = pairs.iter().find(|(old, _)| Arc::ptr_eq(old, &place.mount)) {
                place.mount = new.clone();
            }
        }
        Ok(ns)
    }

    /// All mounts, parents first.
    pub fn mounts(&self) -> Vec<Arc<Mount>> {
        let root = self.root.lock_nested().clone();
        root.map_or_else(Vec::new, |r| r.subtree())
    }

    /// The mounts that a reader whose root directory is `root` sees, parents first, each with its path. Mounts stacked on one
    /// another share theirs: there may be thousands in one place.
    fn visible_from(&self, root: &PathRef) -> Vec<(Arc<Mount>, Arc<[u8]>)> {
        let mut seen: HashMap<u64, Option<Arc<[u8]>>> = HashMap::new();
        let mut list = Vec::new();
        for mount in self.mounts() {
            let place = mount.root_path();
            let below = mount.mountpoint().filter(|on| Arc::ptr_eq(&on.dentry, on.mount.root()));
            let same = !place.is(root) && !mount.root().is_gone();
            let known = below.filter(|on| same && !on.dentry.is_gone()).and_then(|on| seen.get(&on.mount.id).cloned());
            let path = known.unwrap_or_else(|| {
                let (path, visible) = place.seen_from(Some(root));
                visible.then(|| path.into())
            });
            seen.insert(mount.id, path.clone());
            if let Some(path) = path {
                list.push((mount, path));
            }
        }
        list
    }

    /// The text of /proc/PID/mounts for a reader whose root directory is `root`.
    pub fn mounts_text(&self, root: &PathRef) -> Vec<u8> {
        let mut out = Vec::new();
        for (mount, path) in self.visible_from(root) {
            escape(&mut out, &mount.source);
            out.push(b' ');
            escape(&mut out, &path);
            out.extend_from_slice(format!(" {} {} 0 0\n", mount.fs().name(), mount.options()).as_bytes());
        }
        out
    }

    /// The text of /proc/PID/mountinfo (proc_pid_mountinfo(5)).
    pub fn mountinfo_text(&self, root: &PathRef) -> Vec<u8> {
        let mut out = Vec::new();
        for (mount, path) in self.visible_from(root) {
            let parent = mount.mountpoint().map_or(mount.id, |p| p.mount.id);
            let dev = mount.root.inode().stat().map_or(0, |s| s.dev);
            out.extend_from_slice(format!("{} {} {}:{} ", mount.id, parent, dev_major(dev), dev_minor(dev)).as_bytes());
            escape(&mut out, &path_in_fs(&mount.root));
            out.push(b' ');
            escape(&mut out, &path);
            out.extend_from_slice(format!(" {} - {} ", mount.options(), mount.fs().name()).as_bytes());
            escape(&mut out, &mount.source);
            let whole = if mount.flags().contains(MountFlags::RDONLY) { " ro\n" } else { " rw\n" };
            out.extend_from_slice(whole.as_bytes());
        }
        out
    }
}

impl Drop for MountNamespace {
    fn drop(&mut self) {
        let root = self.root.get_mut().take();
        if let Some(root) = root {
            take_apart(&root);
        }
    }
}

/// Undoes a tree: parents and children hold each other.
fn take_apart(root: &Arc<Mount>) {
    for mount in root.subtree().iter().rev() {
        if let Some(on) = mount.mountpoint() {
            unhang(mount, &on);
        }
    }
}

fn hang(mount: &Arc<Mount>, at: PathRef) {
    at.dentry.pin_in_parent();
    at.dentry.add_mount();
    mount.attached.lock_nested().on = Some(at.clone());
    let old = at.mount.children.lock_nested().insert(dentry_key(&at.dentry), mount.clone());
    drop(old);
}

fn unhang(mount: &Arc<Mount>, on: &PathRef) {
    let taken = on.mount.children.lock_nested().remove(&dentry_key(&on.dentry));
    on.dentry.remove_mount();
    let place = mount.attached.lock_nested().on.take();
    drop((taken, place));
}

/// A detached copy of a mount from `root` on; `pairs` receives each (old, new).
fn copy_tree(
    mount: &Arc<Mount>,
    root: &Arc<Dentry>,
    recursive: bool,
    pairs: &mut Vec<(Arc<Mount>, Arc<Mount>)>,
) -> Arc<Mount> {
    let top = mount.duplicate(root.clone());
    pairs.push((mount.clone(), top.clone()));
    if !recursive {
        return top;
    }
    let first = pairs.len() - 1;
    let mut at = first;
    while let Some((old, new)) = pairs.get(at).cloned() {
        for child in old.child_mounts() {
            let Some(on) = child.mountpoint() else { continue };
            if at == first && !root.is_ancestor_of(&on.dentry) {
                continue;
            }
            let copy = child.duplicate(child.root.clone());
            hang(&copy, PathRef { mount: new.clone(), dentry: on.dentry });
            pairs.push((child, copy));
        }
        at += 1;
    }
    top
}

/// Goes down to the root of the topmost mount at a place.
pub(super) fn follow_mounts(mut at: PathRef) -> PathRef {
    while let Some(mount) = at.mount.covering(&at.dentry) {
        at = mount.root_path();
    }
    at
}

fn path_in_fs(dentry: &Arc<Dentry>) -> Vec<u8> {
    let mut names = Vec::new();
    let mut at = dentry.clone();
    while let Some(parent) = at.parent() {
        names.push(at.name());
        at = parent;
    }
    let mut path = Vec::new();
    for name in names.iter().rev() {
        path.push(b'/');
        path.extend_from_slice(name);
    }
    if path.is_empty() {
        path.push(b'/');
    }
    path
}

/// Octal escapes of getmntent(3).
fn escape(out: &mut Vec<u8>, text: &[u8]) {
    for &b in text {
        if matches!(b, b' ' | b'\t' | b'\n' | b'\\' | b'#') {
            out.extend_from_slice(format!("\\{b:03o}").as_bytes());
        } else {
            out.push(b);
        }
    }
}

/// The major number in a dev_t.
pub fn dev_major(dev: u64) -> u64 {
    ((dev >> 8) & 0xfff) | ((dev >> 32) & !0xfff)
}

/// The minor number in a dev_t.
pub fn dev_minor(dev: u64) -> u64 {
    (dev & 0xff) | ((dev >> 12) & !0xff)
}
