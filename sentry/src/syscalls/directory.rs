//! Directories and names: getdents64(2), chdir(2), getcwd(2), mkdir(2), unlink(2), rename(2), link(2), symlink(2), readlink(2),
//! mknod(2).
use std::sync::Arc;

use guest_abi::UserAddr;
use linux_raw_sys::general as raw;

use super::args::{Bits, Fd, PathArg};
use super::place::{self, CWD};
use super::table::Row;
use crate::ns::user::Caps;
use crate::row;
use crate::task::Task;
use crate::vfs::attr::{Access, permission};
use crate::vfs::{DirSink, InodeKind, LookupFlags, PathRef, names, notify, path};
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(78, getdents(fd: Fd, dirp: UserAddr, count: u32), fast getdents, Full),
    row!(79, getcwd(buf: UserAddr, size: u64), fast getcwd, Full),
    row!(80, chdir(path: PathArg), fast chdir, Full),
    row!(81, fchdir(fd: Fd), fast fchdir, Full),
    row!(82, rename(oldpath: PathArg, newpath: PathArg), fast rename, Full),
    row!(83, mkdir(path: PathArg, mode: u32), fast mkdir, Full),
    row!(84, rmdir(path: PathArg), fast rmdir, Full),
    row!(86, link(oldpath: PathArg, newpath: PathArg), fast link, Full),
    row!(87, unlink(path: PathArg), fast unlink, Full),
    row!(88, symlink(target: PathArg, linkpath: PathArg), fast symlink, Full),
    row!(89, readlink(path: PathArg, buf: UserAddr, bufsiz: i32), fast readlink, Full),
    row!(95, umask(mask: u32), fast umask, Full),
    row!(133, mknod(path: PathArg, mode: u32, dev: u64), fast mknod, Full),
    row!(161, chroot(path: PathArg), fast chroot, Full),
    row!(217, getdents64(fd: Fd, dirp: UserAddr, count: u32), fast getdents64, Full),
    row!(258, mkdirat(dirfd: Fd, path: PathArg, mode: u32), fast mkdirat, Full),
    row!(259, mknodat(dirfd: Fd, path: PathArg, mode: u32, dev: u64), fast mknodat, Full),
    row!(263, unlinkat(dirfd: Fd, path: PathArg, flags: Bits), fast unlinkat, Full),
    row!(264, renameat(olddirfd: Fd, oldpath: PathArg, newdirfd: Fd, newpath: PathArg), fast renameat, Full),
    row!(265, linkat(olddirfd: Fd, oldpath: PathArg, newdirfd: Fd, newpath: PathArg, flags: Bits), fast linkat, Full),
    row!(266, symlinkat(target: PathArg, newdirfd: Fd, linkpath: PathArg), fast symlinkat, Full),
    row!(267, readlinkat(dirfd: Fd, path: PathArg, buf: UserAddr, bufsiz: i32), fast readlinkat, Full),
    row!(316, renameat2(olddirfd: Fd, oldpath: PathArg, newdirfd: Fd, newpath: PathArg, flags: Bits),
        fast renameat2, Partial, "no RENAME_WHITEOUT"),
];

// Reading directories

/// Bytes gathered at one time, whatever buffer the program gave.
const DIRENTS_MAX: usize = 128 * 1024;

struct Dirents {
    out: Vec<u8>,
    room: usize,
    /// The old form, with the type in the last byte.
    old: bool,
    full: bool,
    /// Where the position field of the last entry lies: it names where the next one is.
    last: Option<usize>,
}

impl DirSink for Dirents {
    fn add(&mut self, name: &[u8], ino: u64, kind: u8, next: u64) -> bool {
        let header = if self.old { 18 } else { 19 };
        // The old form has a terminating NUL and the type behind the name.
        let len = (header + name.len() + if self.old { 2 } else { 1 }).next_multiple_of(8);
        if self.out.len() + len > self.room {
            self.full = true;
            return false;
        }
        let start = self.out.len();
        self.out.extend_from_slice(&ino.to_le_bytes());
        self.last = Some(self.out.len());
        self.out.extend_from_slice(&next.to_le_bytes());
        self.out.extend_from_slice(&u16::try_from(len).unwrap_or(u16::MAX).to_le_bytes());
        if !self.old {
            self.out.push(kind);
        }
        self.out.extend_from_slice(name);
        self.out.resize(start + len, 0);
        if self.old
            && let Some(b) = self.out.last_mut()
        {
            *b = kind;
        }
        true
    }
}

fn read_dir(task: &Arc<Task>, fd: Fd, dirp: UserAddr, count: u32, old: bool) -> Result<u64> {
    let file = place::file(task, fd)?;
    if file.kind() != Some(InodeKind::Directory) {
        return Err(Errno::ENOTDIR);
    }
    if file.path().is_some_and(|p| p.dentry.is_gone()) {
        return Err(Errno::ENOENT);
    }
    let room = (count as usize).min(DIRENTS_MAX);
    let mut sink = Dirents { out: Vec::new(), room, old, full: false, last: None };
    let mut pos = file.position();
    let next = file.ops().read_dir(&file, &**task, *pos, &mut sink)?;
    if sink.out.is_empty() && sink.full {
        return Err(Errno::EINVAL);
    }
    if let Some(at) = sink.last.and_then(|at| sink.out.get_mut(at..at + 8)) {
        at.copy_from_slice(&next.to_le_bytes());
    }
    task.space()?.write_bytes(dirp, &sink.out)?;
    *pos = next;
    drop(pos);
    notify::accessed(&file, 0);
    Ok(sink.out.len() as u64)
}

fn getdents(task: &Arc<Task>, fd: Fd, dirp: UserAddr, count: u32) -> Result<u64> {
    read_dir(task, fd, dirp, count, true)
}

fn getdents64(task: &Arc<Task>, fd: Fd, dirp: UserAddr, count: u32) -> Result<u64> {
    read_dir(task, fd, dirp, count, false)
}

// Root and working directory

fn getcwd(task: &Arc<Task>, buf: UserAddr, size: u64) -> Result<u64> {
    let fs = task.fs().get();
    if fs.cwd.dentry.is_gone() {
        return Err(Errno::ENOENT);
    }
    let (path, reachable) = fs.cwd.seen_from(Some(&fs.root));
    let mut text = if reachable { Vec::new() } else { b"(unreachable)".to_vec() };
    text.extend_from_slice(&path);
    text.push(0);
    if text.len() as u64 > size {
        return Err(Errno::ERANGE);
    }
    if text.len() > path::PATH_MAX {
        return Err(Errno::ENAMETOOLONG);
    }
    task.space()?.write_bytes(buf, &text)?;
    Ok(text.len() as u64)
}

fn directory(task: &Arc<Task>, path: PathArg) -> Result<PathRef> {
    let path = task.space()?.read_path(path.0)?;
    let cx = place::lookup(task);
    let at = path::resolve(&cx, None, &path, LookupFlags::FOLLOW | LookupFlags::DIRECTORY)?;
    permission(&cx.credentials, at.inode(), Access::EXEC)?;
    Ok(at)
}

fn chdir(task: &Arc<Task>, path: PathArg) -> Result<u64> {
    let at = directory(task, path)?;
    let old = task.fs().change(|fs| std::mem::replace(&mut fs.cwd, at));
    drop(old);
    Ok(0)
}

fn fchdir(task: &Arc<Task>, fd: Fd) -> Result<u64> {
    let file = task.files().get(fd.0)?;
    let at = file.path().ok_or(Errno::ENOTDIR)?.clone();
    at.require_dir()?;
    permission(&task.credentials(), at.inode(), Access::EXEC)?;
    let old = task.fs().change(|fs| std::mem::replace(&mut fs.cwd, at));
    drop(old);
    Ok(0)
}

fn chroot(task: &Arc<Task>, path: PathArg) -> Result<u64> {
    let at = directory(task, path)?;
    if !task.credentials().has_in_own(Caps::SYS_CHROOT) {
        return Err(Errno::EPERM);
    }
    let old = task.fs().change(|fs| std::mem::replace(&mut fs.root, at));
    drop(old);
    Ok(0)
}

fn umask(task: &Arc<Task>, mask: u32) -> Result<u64> {
    let old = task.fs().change(|fs| std::mem::replace(&mut fs.umask, mask & 0o777));
    Ok(u64::from(old))
}

// Making and removing names

fn mkdir(task: &Arc<Task>, path: PathArg, mode: u32) -> Result<u64> {
    mkdirat(task, CWD, path, mode)
}

fn mkdirat(task: &Arc<Task>, dirfd: Fd, path: PathArg, mode: u32) -> Result<u64> {
    let path = task.space()?.read_path(path.0)?;
    let start = place::start(task, dirfd, &path)?;
    names::mkdir(&place::lookup(task), start.as_ref(), &path, mode).map(|_| 0)
}

fn mknod(task: &Arc<Task>, path: PathArg, mode: u32, dev: u64) -> Result<u64> {
    mknodat(task, CWD, path, mode, dev)
}

fn mknodat(task: &Arc<Task>, dirfd: Fd, path: PathArg, mode: u32, dev: u64) -> Result<u64> {
    let kind = match mode & raw::S_IFMT {
        0 => InodeKind::Regular,
        raw::S_IFDIR => return Err(Errno::EPERM),
        raw::S_IFLNK => return Err(Errno::EINVAL),
        _ => InodeKind::from_mode(mode).ok_or(Errno::EINVAL)?,
    };
    let path = task.space()?.read_path(path.0)?;
    let start = place::start(task, dirfd, &path)?;
    // The device number is an unsigned int in the call.
    let dev = dev & 0xffff_ffff;
    names::mknod(&place::lookup(task), start.as_ref(), &path, kind, mode & 0o7777, dev).map(|_| 0)
}

fn rmdir(task: &Arc<Task>, path: PathArg) -> Result<u64> {
    unlinkat(task, CWD, path, Bits(u64::from(raw::AT_REMOVEDIR)))
}

fn unlink(task: &Arc<Task>, path: PathArg) -> Result<u64> {
    unlinkat(task, CWD, path, Bits(0))
}

fn unlinkat(task: &Arc<Task>, dirfd: Fd, path: PathArg, flags: Bits) -> Result<u64> {
    let flags = flags.0 as u32;
    if flags & !raw::AT_REMOVEDIR != 0 {
        return Err(Errno::EINVAL);
    }
    let path = task.space()?.read_path(path.0)?;
    let start = place::start(task, dirfd, &path)?;
    let cx = place::lookup(task);
    if flags & raw::AT_REMOVEDIR != 0 {
        names::rmdir(&cx, start.as_ref(), &path)?;
    } else {
        names::unlink(&cx, start.as_ref(), &path)?;
    }
    Ok(0)
}

fn rename(task: &Arc<Task>, oldpath: PathArg, newpath: PathArg) -> Result<u64> {
    renameat2(task, CWD, oldpath, CWD, newpath, Bits(0))
}

fn renameat(task: &Arc<Task>, olddirfd: Fd, oldpath: PathArg, newdirfd: Fd, newpath: PathArg) -> Result<u64> {
    renameat2(task, olddirfd, oldpath, newdirfd, newpath, Bits(0))
}

fn renameat2(
    task: &Arc<Task>,
    olddirfd: Fd,
    oldpath: PathArg,
    newdirfd: Fd,
    newpath: PathArg,
    flags: Bits,
) -> Result<u64> {
    let space = task.space()?;
    let (old, new) = (space.read_path(oldpath.0)?, space.read_path(newpath.0)?);
    let from = place::start(task, olddirfd, &old)?;
    let to = place::start(task, newdirfd, &new)?;
    let cx = place::lookup(task);
    names::rename(&cx, (from.as_ref(), &old), (to.as_ref(), &new), flags.0 as u32)?;
    Ok(0)
}

fn link(task: &Arc<Task>, oldpath: PathArg, newpath: PathArg) -> Result<u64> {
    linkat(task, CWD, oldpath, CWD, newpath, Bits(0))
}

fn linkat(
    task: &Arc<Task>,
    olddirfd: Fd,
    oldpath: PathArg,
    newdirfd: Fd,
    newpath: PathArg,
    flags: Bits,
) -> Result<u64> {
    let flags = flags.0 as u32;
    if flags & !(raw::AT_SYMLINK_FOLLOW | raw::AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    let cx = place::lookup(task);
    // Whoever has no right to search by descriptor gets the answer of an empty path.
    let empty = flags & raw::AT_EMPTY_PATH != 0 && cx.credentials.has(Caps::DAC_READ_SEARCH);
    let mut at_flags = if flags & raw::AT_SYMLINK_FOLLOW == 0 { raw::AT_SYMLINK_NOFOLLOW } else { 0 };
    if empty {
        at_flags |= raw::AT_EMPTY_PATH;
    }
    let old = place::named(&cx, task, olddirfd, oldpath, at_flags)?;
    let old = old.path().map_err(|_| Errno::EXDEV)?;
    let new = task.space()?.read_path(newpath.0)?;
    let start = place::start(task, newdirfd, &new)?;
    names::link(&cx, old, start.as_ref(), &new).map(|_| 0)
}

fn symlink(task: &Arc<Task>, target: PathArg, linkpath: PathArg) -> Result<u64> {
    symlinkat(task, target, CWD, linkpath)
}

fn symlinkat(task: &Arc<Task>, target: PathArg, newdirfd: Fd, linkpath: PathArg) -> Result<u64> {
    let space = task.space()?;
    let (target, path) = (space.read_path(target.0)?, space.read_path(linkpath.0)?);
    let start = place::start(task, newdirfd, &path)?;
    names::symlink(&place::lookup(task), &target, start.as_ref(), &path).map(|_| 0)
}

fn readlink(task: &Arc<Task>, path: PathArg, buf: UserAddr, bufsiz: i32) -> Result<u64> {
    readlinkat(task, CWD, path, buf, bufsiz)
}

fn readlinkat(task: &Arc<Task>, dirfd: Fd, path: PathArg, buf: UserAddr, bufsiz: i32) -> Result<u64> {
    let size = usize::try_from(bufsiz).ok().filter(|&n| n > 0).ok_or(Errno::EINVAL)?;
    let space = task.space()?;
    let path = space.read_path(path.0)?;
    let start = place::start(task, dirfd, &path)?;
    let cx = place::lookup(task);
    // An empty path names a symbolic link opened with O_PATH | O_NOFOLLOW.
    let at = path::resolve(&cx, start.as_ref(), &path, LookupFlags::EMPTY)?;
    if at.dentry.kind() != InodeKind::Symlink {
        return Err(if path.is_empty() { Errno::ENOENT } else { Errno::EINVAL });
    }
    let target = at.inode().read_link_as(&**task)?;
    let n = target.len().min(size);
    space.write_bytes(buf, target.get(..n).unwrap_or_default())?;
    Ok(n as u64)
}
