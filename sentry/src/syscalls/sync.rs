//! fsync(2), sync(2), posix_fadvise(2), readahead(2).
use std::sync::Arc;

use super::args::{Bits, Fd};
use super::place;
use super::table::Row;
use crate::row;
use crate::task::Task;
use crate::vfs::InodeKind;
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(74, fsync(fd: Fd), fast fsync, Full),
    row!(75, fdatasync(fd: Fd), fast fdatasync, Full),
    row!(162, sync(), fast sync, Full, "writes to bound host directories reach the host at once"),
    row!(187, readahead(fd: Fd, offset: i64, count: u64), fast readahead, Full),
    row!(221, fadvise64(fd: Fd, offset: i64, len: i64, advice: i32), fast fadvise64, Full),
    row!(277, sync_file_range(fd: Fd, offset: i64, nbytes: i64, flags: Bits), fast sync_file_range, Full),
    row!(306, syncfs(fd: Fd), fast syncfs, Full),
];

fn sync_file(task: &Task, fd: Fd, data_only: bool) -> Result<u64> {
    let file = place::file(task, fd)?;
    match file.ops().sync(data_only) {
        // A directory of an in-memory tree has nothing to write.
        Err(Errno::EINVAL) if file.kind() == Some(InodeKind::Directory) => Ok(0),
        other => other.map(|()| 0),
    }
}

fn fsync(task: &Arc<Task>, fd: Fd) -> Result<u64> {
    sync_file(task, fd, false)
}

fn fdatasync(task: &Arc<Task>, fd: Fd) -> Result<u64> {
    sync_file(task, fd, true)
}

fn sync(_task: &Arc<Task>) -> Result<u64> {
    Ok(0)
}

fn syncfs(task: &Arc<Task>, fd: Fd) -> Result<u64> {
    place::file(task, fd)?;
    Ok(0)
}

fn sync_file_range(task: &Arc<Task>, fd: Fd, offset: i64, nbytes: i64, flags: Bits) -> Result<u64> {
    let file = place::file(task, fd)?;
    if flags.0 & !7 != 0 || offset < 0 || nbytes < 0 || offset.checked_add(nbytes).is_none() {
        return Err(Errno::EINVAL);
    }
    match file.kind() {
        Some(InodeKind::Regular | InodeKind::Directory | InodeKind::BlockDevice | InodeKind::Symlink) => {}
        _ => return Err(Errno::ESPIPE),
    }
    if file.kind() == Some(InodeKind::Regular) {
        file.ops().sync(true)?;
    }
    Ok(0)
}

fn readahead(task: &Arc<Task>, fd: Fd, _offset: i64, _count: u64) -> Result<u64> {
    let file = place::file(task, fd)?;
    if !file.flags().readable() {
        return Err(Errno::EBADF);
    }
    match file.kind() {
        Some(InodeKind::Regular | InodeKind::BlockDevice) => Ok(0),
        _ => Err(Errno::EINVAL),
    }
}

fn fadvise64(task: &Arc<Task>, fd: Fd, _offset: i64, len: i64, advice: i32) -> Result<u64> {
    let file = place::file(task, fd)?;
    if InodeKind::from_mode(file.stat()?.mode) == Some(InodeKind::Fifo) {
        return Err(Errno::ESPIPE);
    }
    if len < 0 || !(0..=5).contains(&advice) {
        return Err(Errno::EINVAL);
    }
    Ok(0)
}
