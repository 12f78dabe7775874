//! rename(2) inside an overlay. The VFS holds the directories' dentry locks and has refused loops.
use std::sync::Arc;

use linux_raw_sys::general::{RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT};

use super::Node;
use super::node::Names;
use crate::lock::MutexGuard;
use crate::{Errno, Result};

struct Both<'a> {
    old: MutexGuard<'a, Names>,
    /// None: the same directory.
    new: Option<MutexGuard<'a, Names>>,
}

impl Both<'_> {
    fn new_names(&mut self) -> &mut Names {
        self.new.as_deref_mut().unwrap_or(&mut self.old)
    }
}

fn lock_both<'a>(old: &'a Node, new: &'a Node) -> Result<Both<'a>> {
    let (a, b) = (old.names()?, new.names()?);
    if core::ptr::eq(old, new) {
        return Ok(Both { old: a.lock(), new: None });
    }
    if core::ptr::from_ref(old) < core::ptr::from_ref(new) {
        let old = a.lock();
        Ok(Both { old, new: Some(b.lock_nested()) })
    } else {
        let new = b.lock();
        Ok(Both { old: a.lock_nested(), new: Some(new) })
    }
}

/// Moves or exchanges.
pub(super) fn rename(old_dir: &Node, name: &[u8], new_dir: &Node, new_name: &[u8], flags: u32) -> Result<()> {
    if flags & RENAME_WHITEOUT != 0 {
        return Err(Errno::EINVAL);
    }
    let moved = old_dir.find(name)?;
    if new_dir.is_gone() {
        return Err(Errno::ENOENT);
    }
    let target = match new_dir.find(new_name) {
        Ok(node) => Some(node),
        Err(Errno::ENOENT) => None,
        Err(e) => return Err(e),
    };
    if flags & RENAME_EXCHANGE != 0 {
        return exchange(old_dir, name, &moved, new_dir, new_name, &target.ok_or(Errno::ENOENT)?);
    }
    if let Some(target) = &target {
        if flags & RENAME_NOREPLACE != 0 {
            return Err(Errno::EEXIST);
        }
        if Arc::ptr_eq(target, &moved) {
            return Ok(());
        }
        match (moved.is_dir(), target.is_dir()) {
            (true, false) => return Err(Errno::ENOTDIR),
            (false, true) => return Err(Errno::EISDIR),
            (true, true) => target.check_empty()?,
            (false, false) => {}
        }
    }
    let upper = moved.upper()?;
    let (old_upper, new_upper) = (old_dir.upper()?, new_dir.upper()?);
    let below = old_dir.below_has(name);
    let replaced = {
        let mut both = lock_both(old_dir, new_dir)?;
        let dir = i64::from(moved.is_dir());
        both.old.subdirs -= dir;
        let covered = Node::cover(&mut both.old, name, below);
        let names = both.new_names();
        names.subdirs += dir - i64::from(target.as_ref().is_some_and(|t| t.is_dir()));
        (covered, Node::place(names, new_name, &moved))
    };
    drop(replaced);
    moved.unlinkable();
    if let Some(target) = target {
        target.lost_name();
    }
    upper.touch_ctime();
    old_upper.touch();
    new_upper.touch();
    Ok(())
}

fn exchange(
    old_dir: &Node,
    name: &[u8],
    one: &Arc<Node>,
    new_dir: &Node,
    new_name: &[u8],
    other: &Arc<Node>,
) -> Result<()> {
    let (one_upper, other_upper) = (one.upper()?, other.upper()?);
    let (old_upper, new_upper) = (old_dir.upper()?, new_dir.upper()?);
    let replaced = {
        let mut both = lock_both(old_dir, new_dir)?;
        let delta = i64::from(other.is_dir()) - i64::from(one.is_dir());
        both.old.subdirs += delta;
        let first = Node::place(&mut both.old, name, other);
        let names = both.new_names();
        names.subdirs -= delta;
        (first, Node::place(names, new_name, one))
    };
    drop(replaced);
    one_upper.touch_ctime();
    other_upper.touch_ctime();
    old_upper.touch();
    new_upper.touch();
    Ok(())
}
