//! stat(2) and its family, statx(2), access(2), statfs(2).
use std::sync::Arc;

use guest_abi::UserPtr;
use guest_abi::file::{Statfs, Statx, StatxTime};
use guest_abi::types::{Stat, Timespec};
use linux_raw_sys::general as raw;

use super::args::{Bits, Fd, PathArg};
use super::place::{self, CWD, Named};
use super::table::Row;
use crate::ns::user::{Caps, Credentials};
use crate::row;
use crate::task::Task;
use crate::vfs::attr::{self, Access};
use crate::vfs::mount::{dev_major, dev_minor};
use crate::vfs::{File, InodeKind, MountFlags, PathRef};
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(4, stat(path: PathArg, statbuf: UserPtr<Stat>), fast stat, Full),
    row!(5, fstat(fd: Fd, statbuf: UserPtr<Stat>), fast fstat, Full),
    row!(6, lstat(path: PathArg, statbuf: UserPtr<Stat>), fast lstat, Full),
    row!(21, access(path: PathArg, mode: u32), fast access, Full),
    row!(137, statfs(path: PathArg, buf: UserPtr<Statfs>), fast statfs, Full),
    row!(138, fstatfs(fd: Fd, buf: UserPtr<Statfs>), fast fstatfs, Full),
    row!(262, newfstatat(dirfd: Fd, path: PathArg, statbuf: UserPtr<Stat>, flags: Bits), fast newfstatat, Full),
    row!(269, faccessat(dirfd: Fd, path: PathArg, mode: u32), fast faccessat, Full),
    row!(332, statx(dirfd: Fd, path: PathArg, flags: Bits, mask: u32, statxbuf: UserPtr<Statx>), fast statx, Partial,
        "no birth time, no STATX_DIOALIGN"),
    row!(439, faccessat2(dirfd: Fd, path: PathArg, mode: u32, flags: Bits), fast faccessat2, Full),
];

/// The owners as the caller's user namespace has them.
fn shown(task: &Task, mut stat: Stat) -> Stat {
    let user_ns = &task.credentials().user_ns;
    stat.uid = user_ns.shown_user(stat.uid);
    stat.gid = user_ns.shown_group(stat.gid);
    stat
}

fn stat(task: &Arc<Task>, path: PathArg, statbuf: UserPtr<Stat>) -> Result<u64> {
    newfstatat(task, CWD, path, statbuf, Bits(0))
}

fn lstat(task: &Arc<Task>, path: PathArg, statbuf: UserPtr<Stat>) -> Result<u64> {
    newfstatat(task, CWD, path, statbuf, Bits(u64::from(raw::AT_SYMLINK_NOFOLLOW)))
}

fn fstat(task: &Arc<Task>, fd: Fd, statbuf: UserPtr<Stat>) -> Result<u64> {
    let stat = task.files().get(fd.0)?.stat()?;
    task.space()?.write(statbuf, &shown(task, stat))?;
    Ok(0)
}

fn newfstatat(task: &Arc<Task>, dirfd: Fd, path: PathArg, statbuf: UserPtr<Stat>, flags: Bits) -> Result<u64> {
    let flags = flags.0 as u32;
    if flags & !(raw::AT_SYMLINK_NOFOLLOW | raw::AT_NO_AUTOMOUNT | raw::AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    let cx = place::lookup(task);
    let stat = place::named(&cx, task, dirfd, path, flags)?.target().stat()?;
    task.space()?.write(statbuf, &shown(task, stat))?;
    Ok(0)
}

const STATX_BASIC_STATS: u32 = 0x7ff;
const STATX_MNT_ID: u32 = 0x1000;
const STATX_RESERVED: u32 = 0x8000_0000;
const STATX_ATTR_MOUNT_ROOT: u64 = 0x2000;
const AT_STATX_SYNC_TYPE: u32 = 0x6000;

fn statx_time(t: Timespec) -> StatxTime {
    StatxTime { sec: t.sec, nsec: u32::try_from(t.nsec).unwrap_or(0), pad: 0 }
}

fn statx(task: &Arc<Task>, dirfd: Fd, path: PathArg, flags: Bits, mask: u32, statxbuf: UserPtr<Statx>) -> Result<u64> {
    let flags = flags.0 as u32;
    let known = raw::AT_SYMLINK_NOFOLLOW | raw::AT_NO_AUTOMOUNT | raw::AT_EMPTY_PATH | AT_STATX_SYNC_TYPE;
    if mask & STATX_RESERVED != 0 || flags & !known != 0 || flags & AT_STATX_SYNC_TYPE == AT_STATX_SYNC_TYPE {
        return Err(Errno::EINVAL);
    }
    let cx = place::lookup(task);
    let named = place::named(&cx, task, dirfd, path, flags)?;
    let s = shown(task, named.target().stat()?);
    let place = match &named {
        Named::Path(p) => Some(p),
        Named::File(f) => f.path(),
    };
    let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
    let mut out = Statx {
        mask: STATX_BASIC_STATS,
        blksize: u32::try_from(s.blksize).unwrap_or(4096),
        nlink: small(s.nlink),
        uid: s.uid,
        gid: s.gid,
        mode: s.mode as u16,
        ino: s.ino,
        size: s.size as u64,
        blocks: s.blocks as u64,
        attributes_mask: STATX_ATTR_MOUNT_ROOT,
        atime: statx_time(s.atime),
        ctime: statx_time(s.ctime),
        mtime: statx_time(s.mtime),
        rdev_major: small(dev_major(s.rdev)),
        rdev_minor: small(dev_minor(s.rdev)),
        dev_major: small(dev_major(s.dev)),
        dev_minor: small(dev_minor(s.dev)),
        ..Statx::default()
    };
    if let Some(p) = place {
        if Arc::ptr_eq(&p.dentry, p.mount.root()) {
            out.attributes |= STATX_ATTR_MOUNT_ROOT;
        }
        out.mask |= STATX_MNT_ID;
        out.mnt_id = p.mount.id();
    }
    task.space()?.write(statxbuf, &out)?;
    Ok(0)
}

// access

fn access(task: &Arc<Task>, path: PathArg, mode: u32) -> Result<u64> {
    faccessat2(task, CWD, path, mode, Bits(0))
}

fn faccessat(task: &Arc<Task>, dirfd: Fd, path: PathArg, mode: u32) -> Result<u64> {
    faccessat2(task, dirfd, path, mode, Bits(0))
}

const SECBIT_NO_SETUID_FIXUP: u32 = 4;

/// The credentials access(2) judges by: the real ids, and what capabilities root has by them.
fn real(credentials: &Credentials) -> Credentials {
    let mut c = credentials.clone();
    c.fsuid = c.uid;
    c.fsgid = c.gid;
    if c.securebits & SECBIT_NO_SETUID_FIXUP == 0 {
        c.effective = if c.is_root(c.uid) { c.permitted } else { Caps::empty() };
    }
    c
}

fn faccessat2(task: &Arc<Task>, dirfd: Fd, path: PathArg, mode: u32, flags: Bits) -> Result<u64> {
    let flags = flags.0 as u32;
    if mode & !7 != 0 || flags & !(raw::AT_EACCESS | raw::AT_SYMLINK_NOFOLLOW | raw::AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    let mut cx = place::lookup(task);
    if flags & raw::AT_EACCESS == 0 {
        cx.credentials = Arc::new(real(&cx.credentials));
    }
    let named = place::named(&cx, task, dirfd, path, flags)?;
    if let Ok(at) = named.path() {
        attr::access(&cx, at, Access::from_bits_truncate(mode))?;
    } else {
        // An object without a path belongs to whoever holds it.
        let stat = named.target().stat()?;
        if cx.credentials.fsuid != stat.uid && !cx.credentials.has_over(Caps::DAC_OVERRIDE, stat.uid, stat.gid) {
            return Err(Errno::EACCES);
        }
    }
    Ok(0)
}

// statfs

const ST_VALID: u64 = 0x20;
const PIPEFS_MAGIC: u64 = 0x5049_5045;
const SOCKFS_MAGIC: u64 = 0x534f_434b;
const ANON_INODE_MAGIC: u64 = 0x0904_1934;

fn mount_flags(flags: MountFlags) -> u64 {
    let mut st = ST_VALID;
    for (flag, bit) in [
        (MountFlags::RDONLY, 1),
        (MountFlags::NOSUID, 2),
        (MountFlags::NODEV, 4),
        (MountFlags::NOEXEC, 8),
        (MountFlags::NOATIME, 1024),
        (MountFlags::NODIRATIME, 2048),
        (MountFlags::NOSYMFOLLOW, 8192),
    ] {
        if flags.contains(flag) {
            st |= bit;
        }
    }
    if !flags.contains(MountFlags::NOATIME) {
        st |= 4096;
    }
    st
}

fn statfs_of(at: &PathRef) -> Result<Statfs> {
    let [kind, bsize, blocks, bfree, bavail, files, ffree, namelen] = at.mount.fs().statfs()?;
    let dev = at.mount.root().inode().stat().map_or(0, |s| s.dev);
    Ok(Statfs {
        kind,
        bsize,
        blocks,
        bfree,
        bavail,
        files,
        ffree,
        fsid: [dev as u32, (dev >> 32) as u32],
        namelen,
        frsize: bsize,
        flags: mount_flags(at.mount.flags()),
        spare: [0; 4],
    })
}

fn statfs_of_file(file: &File) -> Result<Statfs> {
    if let Some(at) = file.path() {
        return statfs_of(at);
    }
    let kind = match InodeKind::from_mode(file.stat()?.mode) {
        Some(InodeKind::Fifo) => PIPEFS_MAGIC,
        Some(InodeKind::Socket) => SOCKFS_MAGIC,
        _ => ANON_INODE_MAGIC,
    };
    Ok(Statfs { kind, bsize: 4096, frsize: 4096, namelen: 255, flags: ST_VALID, ..Statfs::default() })
}

fn statfs(task: &Arc<Task>, path: PathArg, buf: UserPtr<Statfs>) -> Result<u64> {
    let cx = place::lookup(task);
    let named = place::named(&cx, task, CWD, path, 0)?;
    let answer = statfs_of(named.path()?)?;
    task.space()?.write(buf, &answer)?;
    Ok(0)
}

fn fstatfs(task: &Arc<Task>, fd: Fd, buf: UserPtr<Statfs>) -> Result<u64> {
    let answer = statfs_of_file(&*task.files().get(fd.0)?)?;
    task.space()?.write(buf, &answer)?;
    Ok(0)
}
