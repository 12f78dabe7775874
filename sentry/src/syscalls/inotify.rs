//! inotify_init1(2), inotify_add_watch(2), inotify_rm_watch(2).
use std::sync::Arc;

use linux_raw_sys::general as raw;

use super::args::{Bits, Fd, PathArg};
use super::place;
use super::table::Row;
use crate::fs::inotify::Inotify;
use crate::row;
use crate::task::Task;
use crate::task::limits::Resource;
use crate::vfs::attr::{Access, permission};
use crate::vfs::{LookupFlags, path};
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(253, inotify_init(), fast inotify_init, Full),
    row!(254, inotify_add_watch(fd: Fd, pathname: PathArg, mask: Bits), fast inotify_add_watch, Partial,
        "IN_DELETE_SELF comes when the last name goes, open or not; no IN_UNMOUNT"),
    row!(255, inotify_rm_watch(fd: Fd, wd: i32), fast inotify_rm_watch, Full),
    row!(294, inotify_init1(flags: Bits), fast inotify_init1, Full),
];

fn inotify_init(task: &Arc<Task>) -> Result<u64> {
    inotify_init1(task, Bits(0))
}

fn inotify_init1(task: &Arc<Task>, flags: Bits) -> Result<u64> {
    let flags = flags.0 as u32;
    if flags & !(raw::IN_CLOEXEC | raw::IN_NONBLOCK) != 0 {
        return Err(Errno::EINVAL);
    }
    let file = Inotify::open(task, flags & raw::IN_NONBLOCK != 0)?;
    let cloexec = flags & raw::IN_CLOEXEC != 0;
    Ok(task.files().insert(file, cloexec, 0, task.limit(Resource::Nofile))? as u64)
}

fn inotify_add_watch(task: &Arc<Task>, fd: Fd, pathname: PathArg, mask: Bits) -> Result<u64> {
    let mask = mask.0 as u32;
    let options = raw::IN_ONLYDIR | raw::IN_DONT_FOLLOW | raw::IN_EXCL_UNLINK | raw::IN_MASK_CREATE;
    let known = raw::IN_ALL_EVENTS | options | raw::IN_MASK_ADD | raw::IN_ISDIR | raw::IN_ONESHOT;
    if mask & (known | raw::IN_UNMOUNT | raw::IN_Q_OVERFLOW | raw::IN_IGNORED) == 0 {
        return Err(Errno::EINVAL);
    }
    let file = place::file(task, fd)?;
    if mask & raw::IN_MASK_ADD != 0 && mask & raw::IN_MASK_CREATE != 0 {
        return Err(Errno::EINVAL);
    }
    let inotify = file.downcast::<Inotify>().ok_or(Errno::EINVAL)?;
    let path = task.space()?.read_path(pathname.0)?;
    let cx = place::lookup(task);
    let mut flags = LookupFlags::empty();
    flags.set(LookupFlags::FOLLOW, mask & raw::IN_DONT_FOLLOW == 0);
    flags.set(LookupFlags::DIRECTORY, mask & raw::IN_ONLYDIR != 0);
    let at = path::resolve(&cx, None, &path, flags)?;
    permission(&cx.credentials, at.inode(), Access::READ)?;
    Ok(inotify.add(&at.dentry, mask)? as u64)
}

fn inotify_rm_watch(task: &Arc<Task>, fd: Fd, wd: i32) -> Result<u64> {
    let file = place::file(task, fd)?;
    file.downcast::<Inotify>().ok_or(Errno::EINVAL)?.remove(wd)?;
    Ok(0)
}
