//! open(2), openat2(2), creat(2), close(2), close_range(2), dup(2).
use std::sync::Arc;

use guest_abi::UserAddr;
use linux_raw_sys::general as raw;

use super::args::{Bits, Fd, PathArg};
use super::place;
use super::table::Row;
use crate::event::{Events, WaitEnd};
use crate::row;
use crate::task::Task;
use crate::task::limits::Resource;
use crate::vfs::{FdTable, File, LookupFlags, OpenFlags, OpenHow, open};
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(2, open(path: PathArg, flags: Bits, mode: u32), both open_fast, open_slow, Full),
    row!(3, close(fd: Fd), fast close, Full),
    row!(32, dup(fd: Fd), fast dup, Full),
    row!(33, dup2(oldfd: Fd, newfd: Fd), fast dup2, Full),
    row!(85, creat(path: PathArg, mode: u32), both creat_fast, creat_slow, Full),
    row!(257, openat(dirfd: Fd, path: PathArg, flags: Bits, mode: u32), both openat_fast, openat_slow, Full),
    row!(292, dup3(oldfd: Fd, newfd: Fd, flags: Bits), fast dup3, Full),
    row!(436, close_range(first: u32, last: u32, flags: Bits), fast close_range, Full),
    row!(437, openat2(dirfd: Fd, path: PathArg, how: UserAddr, size: u64), slow openat2, Full),
];

/// What open(2) and openat(2) look at; other bits are ignored, as Linux does.
const KNOWN_FLAGS: u32 = 3
    | raw::O_CREAT
    | raw::O_EXCL
    | raw::O_NOCTTY
    | raw::O_TRUNC
    | raw::O_APPEND
    | raw::O_NONBLOCK
    | raw::O_SYNC
    | raw::FASYNC
    | raw::O_DIRECT
    | raw::O_LARGEFILE
    | raw::O_DIRECTORY
    | raw::O_NOFOLLOW
    | raw::O_NOATIME
    | raw::O_CLOEXEC
    | raw::O_PATH
    | raw::O_TMPFILE;

fn how_of_open(flags: Bits, mode: u32) -> OpenHow {
    let flags = flags.0 as u32 & KNOWN_FLAGS;
    OpenHow {
        // 64-bit programs always open large files.
        flags: OpenFlags::from_bits_retain(flags) | OpenFlags::LARGEFILE,
        mode: mode & 0o7777,
        ..OpenHow::default()
    }
}

fn install(task: &Task, file: Arc<File>, flags: OpenFlags) -> Result<u64> {
    let cloexec = flags.contains(OpenFlags::CLOEXEC);
    let fd = task.files().insert(file, cloexec, 0, task.limit(Resource::Nofile))?;
    Ok(fd as u64)
}

fn open_now(task: &Arc<Task>, dirfd: Fd, path: PathArg, how: &OpenHow) -> Result<Arc<File>> {
    let path = task.space()?.read_path(path.0)?;
    // The number is taken before anything is opened or made.
    task.files().check_room(0, task.limit(Resource::Nofile))?;
    let cx = place::lookup(task);
    let start = place::start(task, dirfd, &path)?;
    open::open(&cx, start.as_ref(), &path, how)
}

fn fast(task: &Arc<Task>, dirfd: Fd, path: PathArg, mut how: OpenHow) -> Result<Option<u64>> {
    how.no_wait = true;
    match open_now(task, dirfd, path, &how) {
        Ok(file) => install(task, file, how.flags).map(Some),
        Err(Errno::EAGAIN) => Ok(None),
        Err(e) => Err(e),
    }
}

async fn slow(task: &Arc<Task>, dirfd: Fd, path: PathArg, how: OpenHow) -> Result<u64> {
    let file = open_now(task, dirfd, path, &how)?;
    if file.ops().open_blocks() {
        let queues = file.ops().wait_queue().map(|q| (q, Events::all())).into_iter().collect();
        let end = task.wait(queues, None, || (!file.ops().open_blocks()).then_some(())).await;
        if end == Err(WaitEnd::Interrupted) {
            return Err(Errno::ERESTARTSYS);
        }
    }
    install(task, file, how.flags)
}

fn open_fast(task: &Arc<Task>, path: PathArg, flags: Bits, mode: u32) -> Result<Option<u64>> {
    fast(task, place::CWD, path, how_of_open(flags, mode))
}

async fn open_slow(task: &Arc<Task>, path: PathArg, flags: Bits, mode: u32) -> Result<u64> {
    slow(task, place::CWD, path, how_of_open(flags, mode)).await
}

fn openat_fast(task: &Arc<Task>, dirfd: Fd, path: PathArg, flags: Bits, mode: u32) -> Result<Option<u64>> {
    fast(task, dirfd, path, how_of_open(flags, mode))
}

async fn openat_slow(task: &Arc<Task>, dirfd: Fd, path: PathArg, flags: Bits, mode: u32) -> Result<u64> {
    slow(task, dirfd, path, how_of_open(flags, mode)).await
}

const CREAT: Bits = Bits((raw::O_CREAT | raw::O_WRONLY | raw::O_TRUNC) as u64);

fn creat_fast(task: &Arc<Task>, path: PathArg, mode: u32) -> Result<Option<u64>> {
    fast(task, place::CWD, path, how_of_open(CREAT, mode))
}

async fn creat_slow(task: &Arc<Task>, path: PathArg, mode: u32) -> Result<u64> {
    slow(task, place::CWD, path, how_of_open(CREAT, mode)).await
}

/// Bytes of struct open_how in its first version.
const OPEN_HOW_SIZE: usize = 24;

async fn openat2(task: &Arc<Task>, dirfd: Fd, path: PathArg, how: UserAddr, size: u64) -> Result<u64> {
    let size = usize::try_from(size).map_err(|_| Errno::E2BIG)?;
    if size < OPEN_HOW_SIZE {
        return Err(Errno::EINVAL);
    }
    if size > 4096 {
        return Err(Errno::E2BIG);
    }
    let mut bytes = vec![0; size];
    task.space()?.read_bytes(how, &mut bytes)?;
    if bytes.get(OPEN_HOW_SIZE..).is_some_and(|rest| rest.iter().any(|&b| b != 0)) {
        return Err(Errno::E2BIG);
    }
    let word = |i: usize| {
        let bytes = bytes.get(i * 8..i * 8 + 8).and_then(|b| b.try_into().ok());
        bytes.map_or(0, u64::from_le_bytes)
    };
    let (flags, mode, resolve) = (word(0), word(1), word(2));
    let flags = u32::try_from(flags).ok().filter(|f| f & !KNOWN_FLAGS == 0).ok_or(Errno::EINVAL)?;
    let mode = u32::try_from(mode).map_err(|_| Errno::EINVAL)?;
    let makes = flags & raw::O_CREAT != 0 || flags & raw::O_TMPFILE & !raw::O_DIRECTORY != 0;
    if mode & !0o7777 != 0 || (!makes && mode != 0) {
        return Err(Errno::EINVAL);
    }
    let path_only = raw::O_PATH | raw::O_DIRECTORY | raw::O_NOFOLLOW | raw::O_CLOEXEC;
    if flags & raw::O_PATH != 0 && flags & !path_only != 0 {
        return Err(Errno::EINVAL);
    }
    let lookup = LookupFlags::from_resolve(resolve)?;
    let how = OpenHow {
        flags: OpenFlags::from_bits_retain(flags) | OpenFlags::LARGEFILE,
        mode,
        lookup,
        ..OpenHow::default()
    };
    slow(task, dirfd, path, how).await
}

fn close(task: &Arc<Task>, fd: Fd) -> Result<u64> {
    let files = task.files();
    let file = files.remove(fd.0)?;
    files.closed(&file);
    Ok(0)
}

/// Give the caller a table of its own first.
const CLOSE_RANGE_UNSHARE: u32 = 2;
/// Set close-on-exec rather than close.
const CLOSE_RANGE_CLOEXEC: u32 = 4;

fn close_range(task: &Arc<Task>, first: u32, last: u32, flags: Bits) -> Result<u64> {
    let flags = flags.0 as u32;
    if flags & !(CLOSE_RANGE_UNSHARE | CLOSE_RANGE_CLOEXEC) != 0 || first > last {
        return Err(Errno::EINVAL);
    }
    if flags & CLOSE_RANGE_UNSHARE != 0 {
        task.unshare_files()?;
    }
    let files = task.files();
    if flags & CLOSE_RANGE_CLOEXEC != 0 {
        files.set_cloexec_range(first, last);
    } else {
        for file in files.remove_range(first, last) {
            files.closed(&file);
        }
    }
    Ok(0)
}

fn dup(task: &Arc<Task>, fd: Fd) -> Result<u64> {
    let files = task.files();
    let file = files.get(fd.0)?;
    Ok(files.insert(file, false, 0, task.limit(Resource::Nofile))? as u64)
}

fn put_at(task: &Task, files: &FdTable, file: Arc<File>, fd: Fd, cloexec: bool) -> Result<u64> {
    if let Some(old) = files.replace(fd.0, file, cloexec, task.limit(Resource::Nofile))? {
        files.closed(&old);
    }
    Ok(fd.0 as u64)
}

fn dup2(task: &Arc<Task>, oldfd: Fd, newfd: Fd) -> Result<u64> {
    let files = task.files();
    let file = files.get(oldfd.0)?;
    if oldfd == newfd {
        return Ok(newfd.0 as u64);
    }
    put_at(task, &files, file, newfd, false)
}

fn dup3(task: &Arc<Task>, oldfd: Fd, newfd: Fd, flags: Bits) -> Result<u64> {
    let flags = flags.0 as u32;
    if flags & !raw::O_CLOEXEC != 0 || oldfd == newfd {
        return Err(Errno::EINVAL);
    }
    let files = task.files();
    if newfd.0 < 0 || newfd.0 as u64 >= task.limit(Resource::Nofile) {
        return Err(Errno::EBADF);
    }
    let file = files.get(oldfd.0)?;
    put_at(task, &files, file, newfd, flags & raw::O_CLOEXEC != 0)
}
