//! rename(2) inside one tmpfs. The VFS holds the directories' dentry locks and has refused loops.
use std::sync::Arc;

use linux_raw_sys::general::{RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT};

use super::inode::{Children, TmpInode};
use crate::lock::MutexGuard;
use crate::vfs::{Inode, InodeKind};
use crate::{Errno, Result};

struct Both<'a> {
    old: MutexGuard<'a, Children>,
    /// None: the same directory.
    new: Option<MutexGuard<'a, Children>>,
}

impl Both<'_> {
    fn new_entries(&mut self) -> &mut Children {
        self.new.as_deref_mut().unwrap_or(&mut self.old)
    }
}

/// Locks both directories in the order of their numbers.
fn lock_both<'a>(old: &'a TmpInode, new: &'a TmpInode) -> Result<Both<'a>> {
    let (a, b) = (old.children()?, new.children()?);
    if core::ptr::eq(old, new) {
        return Ok(Both { old: a.lock(), new: None });
    }
    if old.ino() < new.ino() {
        let old = a.lock();
        Ok(Both { old, new: Some(b.lock_nested()) })
    } else {
        let new = b.lock();
        Ok(Both { old: a.lock_nested(), new: Some(new) })
    }
}

/// Moves or exchanges.
pub(super) fn rename(old_dir: &TmpInode, name: &[u8], new_dir: &TmpInode, new_name: &[u8], flags: u32) -> Result<()> {
    if flags & RENAME_WHITEOUT != 0 {
        return Err(Errno::EINVAL);
    }
    let mut both = lock_both(old_dir, new_dir)?;
    let moved = both.old.get(name).cloned().ok_or(Errno::ENOENT)?;
    if new_dir.is_dead() {
        return Err(Errno::ENOENT);
    }
    let target = both.new_entries().get(new_name).cloned();
    let same_dir = core::ptr::eq(old_dir, new_dir);
    let is_dir = |i: &Arc<TmpInode>| i.kind() == InodeKind::Directory;
    let links = |delta_old: i32, delta_new: i32| {
        if !same_dir {
            if delta_old != 0 {
                old_dir.add_links(delta_old);
            }
            if delta_new != 0 {
                new_dir.add_links(delta_new);
            }
        }
    };
    if flags & RENAME_EXCHANGE != 0 {
        let target = target.ok_or(Errno::ENOENT)?;
        both.old.insert(name, target.clone());
        both.new_entries().insert(new_name, moved.clone());
        drop(both);
        if is_dir(&moved) {
            moved.set_parent_ino(new_dir.ino());
            links(-1, 1);
        }
        if is_dir(&target) {
            target.set_parent_ino(old_dir.ino());
            links(1, -1);
        }
        target.touch_ctime();
    } else {
        if let Some(target) = &target {
            if flags & RENAME_NOREPLACE != 0 {
                return Err(Errno::EEXIST);
            }
            if Arc::ptr_eq(target, &moved) {
                return Ok(());
            }
            match (is_dir(&moved), is_dir(target)) {
                (true, false) => return Err(Errno::ENOTDIR),
                (false, true) => return Err(Errno::EISDIR),
                (true, true) => {
                    let inside = target.children()?.lock_nested();
                    if !inside.is_empty() {
                        return Err(Errno::ENOTEMPTY);
                    }
                    target.kill();
                }
                (false, false) => {}
            }
        }
        both.old.remove(name);
        both.new_entries().insert(new_name, moved.clone());
        drop(both);
        if let Some(target) = &target {
            if is_dir(target) {
                new_dir.add_links(-1);
            } else {
                target.lose_name();
            }
        }
        if is_dir(&moved) {
            moved.set_parent_ino(new_dir.ino());
            links(-1, 1);
        }
    }
    moved.touch_ctime();
    old_dir.touch();
    if !same_dir {
        new_dir.touch();
    }
    Ok(())
}
