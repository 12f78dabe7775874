//! chmod(2), chown(2), utimensat(2), truncate(2), fallocate(2) and their families.
use std::sync::Arc;

use guest_abi::UserPtr;
use guest_abi::types::{Timespec, Timeval};
use linux_raw_sys::general as raw;

use super::args::{Bits, Fd, PathArg};
use super::place::{self, CWD, Named};
use super::table::Row;
use crate::ns::user_namespace::IdKind;
use crate::row;
use crate::task::Task;
use crate::vfs::attr::{self, SetTime, Target};
use crate::vfs::{InodeKind, LookupFlags, notify, path};
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(76, truncate(path: PathArg, length: i64), fast truncate, Full),
    row!(77, ftruncate(fd: Fd, length: i64), fast ftruncate, Full),
    row!(90, chmod(path: PathArg, mode: u32), fast chmod, Full),
    row!(91, fchmod(fd: Fd, mode: u32), fast fchmod, Full),
    row!(92, chown(path: PathArg, owner: u32, group: u32), fast chown, Full),
    row!(93, fchown(fd: Fd, owner: u32, group: u32), fast fchown, Full),
    row!(94, lchown(path: PathArg, owner: u32, group: u32), fast lchown, Full),
    row!(132, utime(path: PathArg, times: UserPtr<[i64; 2]>), fast utime, Full),
    row!(235, utimes(path: PathArg, times: UserPtr<[Timeval; 2]>), fast utimes, Full),
    row!(260, fchownat(dirfd: Fd, path: PathArg, owner: u32, group: u32, flags: Bits), fast fchownat, Full),
    row!(261, futimesat(dirfd: Fd, path: PathArg, times: UserPtr<[Timeval; 2]>), fast futimesat, Full),
    row!(268, fchmodat(dirfd: Fd, path: PathArg, mode: u32), fast fchmodat, Full),
    row!(280, utimensat(dirfd: Fd, path: PathArg, times: UserPtr<[Timespec; 2]>, flags: Bits), fast utimensat, Full),
    row!(285, fallocate(fd: Fd, mode: Bits, offset: i64, len: i64), fast fallocate, Full),
    row!(452, fchmodat2(dirfd: Fd, path: PathArg, mode: u32, flags: Bits), fast fchmodat2, Full),
];

// Mode and owner

fn chmod(task: &Arc<Task>, path: PathArg, mode: u32) -> Result<u64> {
    fchmodat2(task, CWD, path, mode, Bits(0))
}

fn fchmodat(task: &Arc<Task>, dirfd: Fd, path: PathArg, mode: u32) -> Result<u64> {
    fchmodat2(task, dirfd, path, mode, Bits(0))
}

fn fchmodat2(task: &Arc<Task>, dirfd: Fd, path: PathArg, mode: u32, flags: Bits) -> Result<u64> {
    let flags = flags.0 as u32;
    if flags & !(raw::AT_SYMLINK_NOFOLLOW | raw::AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    let cx = place::lookup(task);
    let named = place::named(&cx, task, dirfd, path, flags)?;
    attr::set_mode(&cx.credentials, named.target(), mode)?;
    Ok(0)
}

fn fchmod(task: &Arc<Task>, fd: Fd, mode: u32) -> Result<u64> {
    let file = place::file(task, fd)?;
    attr::set_mode(&task.credentials(), Target::File(&file), mode)?;
    Ok(0)
}

/// Owner and group of a call, each None where it is to stay. EINVAL for one that means nobody in the caller's user namespace.
fn ids(task: &Task, owner: u32, group: u32) -> Result<(Option<u32>, Option<u32>)> {
    let user_ns = &task.credentials().user_ns;
    let id = |raw: u32, kind| (raw != u32::MAX).then(|| user_ns.to_initial(kind, raw).ok_or(Errno::EINVAL)).transpose();
    Ok((id(owner, IdKind::User)?, id(group, IdKind::Group)?))
}

fn chown(task: &Arc<Task>, path: PathArg, owner: u32, group: u32) -> Result<u64> {
    fchownat(task, CWD, path, owner, group, Bits(0))
}

fn lchown(task: &Arc<Task>, path: PathArg, owner: u32, group: u32) -> Result<u64> {
    fchownat(task, CWD, path, owner, group, Bits(u64::from(raw::AT_SYMLINK_NOFOLLOW)))
}

fn fchownat(task: &Arc<Task>, dirfd: Fd, path: PathArg, owner: u32, group: u32, flags: Bits) -> Result<u64> {
    let flags = flags.0 as u32;
    if flags & !(raw::AT_SYMLINK_NOFOLLOW | raw::AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    let cx = place::lookup(task);
    let named = place::named(&cx, task, dirfd, path, flags)?;
    let (owner, group) = ids(task, owner, group)?;
    attr::set_owner(&cx.credentials, named.target(), owner, group)?;
    Ok(0)
}

fn fchown(task: &Arc<Task>, fd: Fd, owner: u32, group: u32) -> Result<u64> {
    let file = place::file(task, fd)?;
    let (owner, group) = ids(task, owner, group)?;
    attr::set_owner(&task.credentials(), Target::File(&file), owner, group)?;
    Ok(0)
}

// Times

const UTIME_NOW: i64 = 0x3fff_ffff;
const UTIME_OMIT: i64 = 0x3fff_fffe;

fn now(task: &Task) -> Timespec {
    let ns = task.kernel().platform.realtime();
    Timespec { sec: (ns / 1_000_000_000) as i64, nsec: (ns % 1_000_000_000) as i64 }
}

fn set_times(task: &Arc<Task>, named: &Named, times: [SetTime; 2]) -> Result<u64> {
    let [atime, mtime] = times;
    attr::set_times(&task.credentials(), named.target(), atime, mtime, now(task))?;
    Ok(0)
}

fn utimensat(task: &Arc<Task>, dirfd: Fd, path: PathArg, times: UserPtr<[Timespec; 2]>, flags: Bits) -> Result<u64> {
    let flags = flags.0 as u32;
    let times = if times.is_null() {
        [SetTime::Now; 2]
    } else {
        let mut out = [SetTime::Omit; 2];
        for (out, t) in out.iter_mut().zip(task.space()?.read(times)?) {
            *out = match t.nsec {
                UTIME_NOW => SetTime::Now,
                UTIME_OMIT => SetTime::Omit,
                0..1_000_000_000 => SetTime::At(t),
                _ => return Err(Errno::EINVAL),
            };
        }
        out
    };
    if times == [SetTime::Omit; 2] {
        return Ok(0);
    }
    if flags & !(raw::AT_SYMLINK_NOFOLLOW | raw::AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    if path.0.is_null() && dirfd != CWD {
        // The descriptor itself: what futimens(3) asks for.
        if flags & !raw::AT_EMPTY_PATH != 0 {
            return Err(Errno::EINVAL);
        }
        let file = place::file(task, dirfd)?;
        return set_times(task, &Named::File(file), times);
    }
    let cx = place::lookup(task);
    let named = place::named(&cx, task, dirfd, path, flags)?;
    set_times(task, &named, times)
}

fn from_timevals(task: &Task, times: UserPtr<[Timeval; 2]>) -> Result<[SetTime; 2]> {
    let mut out = [SetTime::Now; 2];
    if times.is_null() {
        return Ok(out);
    }
    for (out, t) in out.iter_mut().zip(task.space()?.read(times)?) {
        if !(0..1_000_000).contains(&t.usec) {
            return Err(Errno::EINVAL);
        }
        *out = SetTime::At(Timespec { sec: t.sec, nsec: t.usec * 1000 });
    }
    Ok(out)
}

fn utime(task: &Arc<Task>, path: PathArg, times: UserPtr<[i64; 2]>) -> Result<u64> {
    let times = if times.is_null() {
        [SetTime::Now; 2]
    } else {
        task.space()?.read(times)?.map(|sec| SetTime::At(Timespec { sec, nsec: 0 }))
    };
    let cx = place::lookup(task);
    let named = place::named(&cx, task, CWD, path, 0)?;
    set_times(task, &named, times)
}

fn utimes(task: &Arc<Task>, path: PathArg, times: UserPtr<[Timeval; 2]>) -> Result<u64> {
    futimesat(task, CWD, path, times)
}

fn futimesat(task: &Arc<Task>, dirfd: Fd, path: PathArg, times: UserPtr<[Timeval; 2]>) -> Result<u64> {
    let times = from_timevals(task, times)?;
    if path.0.is_null() && dirfd != CWD {
        let file = place::file(task, dirfd)?;
        return set_times(task, &Named::File(file), times);
    }
    let cx = place::lookup(task);
    let named = place::named(&cx, task, dirfd, path, 0)?;
    set_times(task, &named, times)
}

// Length

/// RLIMIT_FSIZE bounds growth only.
fn check_growth(task: &Arc<Task>, len: u64, size: i64, file: impl FnOnce() -> Result<()>) -> Result<()> {
    let limit = task.limit(crate::task::limits::Resource::Fsize);
    if len > limit && i64::try_from(len).is_ok_and(|l| l > size) {
        super::io::file_too_large(task);
        return Err(Errno::EFBIG);
    }
    file()
}

fn truncate(task: &Arc<Task>, path: PathArg, length: i64) -> Result<u64> {
    let len = u64::try_from(length).map_err(|_| Errno::EINVAL)?;
    let path = task.space()?.read_path(path.0)?;
    let cx = place::lookup(task);
    let at = path::resolve(&cx, None, &path, LookupFlags::FOLLOW)?;
    if at.dentry.kind() != InodeKind::Regular {
        return attr::truncate(&cx, &at, len).map(|()| 0);
    }
    check_growth(task, len, at.inode().stat()?.size, || attr::truncate(&cx, &at, len))?;
    Ok(0)
}

fn ftruncate(task: &Arc<Task>, fd: Fd, length: i64) -> Result<u64> {
    let len = u64::try_from(length).map_err(|_| Errno::EINVAL)?;
    let file = place::file(task, fd)?;
    let stat = file.stat()?;
    if !file.flags().writable() || InodeKind::from_mode(stat.mode) != Some(InodeKind::Regular) {
        return Err(Errno::EINVAL);
    }
    attr::drop_privileges(&task.credentials(), &file)?;
    check_growth(task, len, stat.size, || file.ops().truncate(len))?;
    notify::file_used(&file, raw::IN_MODIFY);
    Ok(0)
}

fn fallocate(task: &Arc<Task>, fd: Fd, mode: Bits, offset: i64, len: i64) -> Result<u64> {
    let mode = mode.0 as u32;
    let file = place::file(task, fd)?;
    let offset = u64::try_from(offset).map_err(|_| Errno::EINVAL)?;
    let len = u64::try_from(len).ok().filter(|&n| n > 0).ok_or(Errno::EINVAL)?;
    let keep = raw::FALLOC_FL_KEEP_SIZE;
    let punch = raw::FALLOC_FL_PUNCH_HOLE;
    let whole = [raw::FALLOC_FL_COLLAPSE_RANGE, raw::FALLOC_FL_INSERT_RANGE];
    let known = keep | punch | raw::FALLOC_FL_ZERO_RANGE | whole[0] | whole[1] | raw::FALLOC_FL_UNSHARE_RANGE;
    if mode & !known != 0 || mode & (punch | raw::FALLOC_FL_ZERO_RANGE) == punch | raw::FALLOC_FL_ZERO_RANGE {
        return Err(Errno::EOPNOTSUPP);
    }
    if mode & punch != 0 && mode & keep == 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    if whole.iter().any(|bit| mode & bit != 0 && mode != *bit) {
        return Err(Errno::EINVAL);
    }
    if !file.flags().writable() {
        return Err(Errno::EBADF);
    }
    match InodeKind::from_mode(file.stat()?.mode) {
        Some(InodeKind::Regular | InodeKind::BlockDevice) => {}
        Some(InodeKind::Fifo) => return Err(Errno::ESPIPE),
        Some(InodeKind::Directory) => return Err(Errno::EISDIR),
        _ => return Err(Errno::ENODEV),
    }
    let end = offset.checked_add(len).filter(|&e| i64::try_from(e).is_ok()).ok_or(Errno::EFBIG)?;
    attr::drop_privileges(&task.credentials(), &file)?;
    let allocate = || file.ops().allocate(mode, offset, len);
    if mode & keep == 0 && mode & punch == 0 {
        check_growth(task, end, file.stat()?.size, allocate)?;
    } else {
        allocate()?;
    }
    notify::file_used(&file, raw::IN_MODIFY);
    Ok(0)
}
