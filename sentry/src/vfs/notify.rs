//! Who is told when a file is used or changed (inotify(7)). Owns the watches on inodes; never the events of a watcher.
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use linux_raw_sys::general as raw;

use super::{Dentry, File, InodeKind};
use crate::lock::{Mutex, Rank};
use crate::platform::host::AttrChange;

/// What happened: IN_* bits, the cookie of a rename, and for the directory the name of the child it happened to.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// IN_*.
    pub mask: u32,
    /// The same for both halves of a rename; else 0.
    pub cookie: u32,
    /// The child of the watched directory.
    pub name: Option<&'a [u8]>,
    /// The child's name was removed before.
    pub unlinked: bool,
}

/// A watch on one inode.
pub trait Watch: Send + Sync {
    /// Something happened. Called with none of the VFS's locks held, though perhaps with the caller's own.
    fn event(&self, event: &Event<'_>);
}

/// The watches on an inode, attached to it.
pub struct Watches {
    list: Mutex<Vec<Arc<dyn Watch>>>,
}

impl Default for Watches {
    fn default() -> Self {
        Watches { list: Mutex::new(Rank::Leaf, Vec::new()) }
    }
}

/// Watches on all inodes of the process, whatever sandbox they are in: a hint only. Nothing is looked up while there are none.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);

fn idle() -> bool {
    ACTIVE.load(Ordering::Relaxed) == 0
}

/// Adds a watch; false if the inode cannot have any (it then never tells).
pub fn add(dentry: &Dentry, watch: Arc<dyn Watch>) -> bool {
    let Some(attachments) = dentry.inode().attachments() else { return false };
    attachments.get_or_insert_with(Watches::default).list.lock_nested().push(watch);
    ACTIVE.fetch_add(1, Ordering::Relaxed);
    true
}

/// Removes a watch.
pub fn remove(dentry: &Dentry, watch: &Arc<dyn Watch>) {
    let Some(watches) = dentry.inode().attachments().and_then(|a| a.get::<Watches>()) else { return };
    let taken = {
        let mut list = watches.list.lock_nested();
        let at = list.iter().position(|w| Arc::ptr_eq(w, watch));
        at.map(|i| list.swap_remove(i))
    };
    if taken.is_some() {
        ACTIVE.fetch_sub(1, Ordering::Relaxed);
    }
}

fn tell(dentry: &Dentry, event: &Event<'_>) {
    let Some(watches) = dentry.inode().attachments().and_then(|a| a.get::<Watches>()) else { return };
    let list = watches.list.lock_nested().clone();
    for watch in list {
        watch.event(event);
    }
}

fn dir_bit(is_dir: bool) -> u32 {
    if is_dir { raw::IN_ISDIR } else { 0 }
}

/// Something happened to what a name stands for: its own watches hear of it and those of its directory.
pub fn used(dentry: &Arc<Dentry>, mask: u32) {
    if idle() {
        return;
    }
    let mask = mask | dir_bit(dentry.is_dir());
    if let Some(parent) = dentry.parent() {
        let name = dentry.name();
        tell(&parent, &Event { mask, cookie: 0, name: Some(&name), unlinked: dentry.is_gone() });
    }
    tell(dentry, &Event { mask, cookie: 0, name: None, unlinked: false });
}

/// As [`used`], for an open file.
pub fn file_used(file: &File, mask: u32) {
    if idle() || file.is_path_only() {
        return;
    }
    if let Some(path) = file.path() {
        used(&path.dentry, mask);
    }
}

/// Something happened to the name of a child: only the directory's watches hear of it.
pub fn child(dir: &Dentry, name: &[u8], is_dir: bool, mask: u32, cookie: u32) {
    if idle() {
        return;
    }
    let mask = mask | dir_bit(is_dir);
    tell(dir, &Event { mask, cookie, name: Some(name), unlinked: false });
}

/// A name was removed: DELETE in its directory, and what becomes of the inode.
pub fn removed(dir: &Dentry, name: &[u8], victim: &Arc<Dentry>) {
    if idle() {
        return;
    }
    replaced(victim);
    child(dir, name, victim.is_dir(), raw::IN_DELETE, 0);
}

/// A name of the inode is gone: what its own watches hear.
pub fn replaced(victim: &Arc<Dentry>) {
    if !idle() && lost_link(victim) {
        itself(victim, raw::IN_DELETE_SELF);
    }
}

/// Tells the inode's watches of its link count; whether it has no name left.
fn lost_link(victim: &Arc<Dentry>) -> bool {
    if victim.is_dir() {
        return true;
    }
    itself(victim, raw::IN_ATTRIB);
    victim.inode().stat().is_ok_and(|s| s.nlink == 0)
}

fn itself(dentry: &Dentry, mask: u32) {
    tell(dentry, &Event { mask, cookie: 0, name: None, unlinked: false });
}

/// A rename ended.
pub fn renamed(from: &Dentry, from_name: &[u8], to: &Dentry, to_name: &[u8], moved: &Arc<Dentry>) {
    static COOKIE: AtomicU32 = AtomicU32::new(1);
    if idle() {
        return;
    }
    let cookie = COOKIE.fetch_add(1, Ordering::Relaxed);
    child(from, from_name, moved.is_dir(), raw::IN_MOVED_FROM, cookie);
    child(to, to_name, moved.is_dir(), raw::IN_MOVED_TO, cookie);
    itself(moved, raw::IN_MOVE_SELF);
}

/// Attributes changed.
pub fn attributes(dentry: &Arc<Dentry>, change: &AttrChange) {
    if idle() {
        return;
    }
    let mut mask = 0;
    if change.uid.is_some() || change.gid.is_some() || change.mode.is_some() {
        mask |= raw::IN_ATTRIB;
    }
    if change.size.is_some() {
        mask |= raw::IN_MODIFY;
    }
    mask |= match (change.atime, change.mtime) {
        (Some(_), Some(_)) => raw::IN_ATTRIB,
        (Some(_), None) => raw::IN_ACCESS,
        (None, Some(_)) => raw::IN_MODIFY,
        (None, None) => 0,
    };
    used(dentry, mask);
}

/// A description is gone.
pub fn closed(file: &File) {
    let mask = if file.flags().writable() { raw::IN_CLOSE_WRITE } else { raw::IN_CLOSE_NOWRITE };
    file_used(file, mask);
}

/// A read of `kind` ended well.
pub fn accessed(file: &File, n: usize) {
    if n > 0 || file.kind() == Some(InodeKind::Directory) {
        file_used(file, raw::IN_ACCESS);
    }
}
