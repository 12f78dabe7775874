//! mount(2), umount2(2), pivot_root(2).
use std::sync::Arc;

use guest_abi::UserAddr;
use linux_raw_sys::general as raw;

use super::args::{Bits, Fd, PathArg};
use super::place;
use super::table::Row;
use crate::fs::kinds::{may_show, new_file_system};
use crate::ns::user::Caps;
use crate::row;
use crate::task::Task;
use crate::vfs::{LookupFlags, MountFlags, MountNamespace, PathRef, path};
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(155, pivot_root(new_root: PathArg, put_old: PathArg), fast pivot_root, Full),
    row!(165, mount(source: PathArg, target: PathArg, fstype: UserAddr, flags: Bits, data: UserAddr), fast mount,
        Partial, "proc, sysfs, tmpfs, devpts, devtmpfs, mqueue, bind and move; no shared propagation"),
    row!(166, umount2(target: PathArg, flags: Bits), fast umount2, Partial, "no MNT_EXPIRE"),
    row!(303, name_to_handle_at(dirfd: Fd, path: PathArg, handle: UserAddr, mount_id: UserAddr, flags: Bits),
        fast name_to_handle_at, Partial, "no file system here exports handles: EOPNOTSUPP"),
];

const MS_MGC_VAL: u32 = 0xc0ed_0000;
const MS_MGC_MSK: u32 = 0xffff_0000;

/// The caller's mount namespace, which must be that of `at`: a descriptor or /proc/PID/root may lead into another. EINVAL.
fn namespace(task: &Task, at: &PathRef) -> Result<Arc<MountNamespace>> {
    let own = task.nsproxy()?.mnt.clone();
    at.mount.namespace().filter(|ns| own.is_some_and(|own| Arc::ptr_eq(&own, ns))).ok_or(Errno::EINVAL)
}

fn require_admin(task: &Task) -> Result<()> {
    let mnt = task.nsproxy()?.mnt.clone();
    let able = mnt.is_some_and(|mnt| task.credentials().has_in(&mnt.owner.user_ns, Caps::SYS_ADMIN));
    if able { Ok(()) } else { Err(Errno::EPERM) }
}

fn resolve(task: &Arc<Task>, path: &[u8], follow: bool) -> Result<PathRef> {
    let flags = if follow { LookupFlags::FOLLOW } else { LookupFlags::empty() };
    path::resolve(&place::lookup(task), None, path, flags)
}

/// A string argument of at most a page; None for a null pointer.
fn text(task: &Task, addr: UserAddr) -> Result<Option<Vec<u8>>> {
    if addr.is_null() {
        return Ok(None);
    }
    task.space()?.read_cstr(addr, 4096, Errno::EINVAL).map(Some)
}

fn mount(
    task: &Arc<Task>,
    source: PathArg,
    target: PathArg,
    fstype: UserAddr,
    flags: Bits,
    data: UserAddr,
) -> Result<u64> {
    let mut flags = flags.0 as u32;
    let fstype = text(task, fstype)?;
    let source = text(task, source.0)?;
    let data = text(task, data)?.unwrap_or_default();
    if flags & MS_MGC_MSK == MS_MGC_VAL {
        flags &= !MS_MGC_MSK;
    }
    let target = task.space()?.read_path(target.0)?;
    let at = resolve(task, &target, true)?;
    require_admin(task)?;
    let ns = namespace(task, &at)?;
    let wanted = MountFlags::from_bits_truncate(flags);
    let kinds = raw::MS_SHARED | raw::MS_PRIVATE | raw::MS_SLAVE | raw::MS_UNBINDABLE;
    if flags & raw::MS_REMOUNT != 0 {
        if !Arc::ptr_eq(at.mount.root(), &at.dentry) {
            return Err(Errno::EINVAL);
        }
        // Access times are left alone where nothing is said about them (mount(2)).
        let kept = if wanted.intersects(MountFlags::ATIME) {
            MountFlags::empty()
        } else {
            at.mount.flags() & MountFlags::ATIME
        };
        at.mount.set_flags(wanted | kept)?;
        return Ok(0);
    }
    if flags & raw::MS_BIND != 0 {
        let source = source.filter(|s| !s.is_empty()).ok_or(Errno::EINVAL)?;
        let from = resolve(task, &source, true)?;
        // What hangs in no namespace (the files of namespaces) may be bound as well.
        if from.mount.namespace().is_some_and(|other| !Arc::ptr_eq(&other, &ns)) {
            return Err(Errno::EINVAL);
        }
        ns.bind(&from, &at, flags & raw::MS_REC != 0)?;
        return Ok(0);
    }
    if flags & kinds != 0 {
        // Every mount is private here, which is what all but MS_SHARED ask for.
        return match flags & (kinds | !(raw::MS_REC | raw::MS_SILENT)) {
            raw::MS_PRIVATE | raw::MS_SLAVE => Ok(0),
            _ => Err(Errno::EINVAL),
        };
    }
    if flags & raw::MS_MOVE != 0 {
        let source = source.filter(|s| !s.is_empty()).ok_or(Errno::EINVAL)?;
        let from = resolve(task, &source, true)?;
        ns.move_mount(&from, &at)?;
        return Ok(0);
    }
    let fstype = fstype.ok_or(Errno::EINVAL)?;
    may_show(task, &fstype)?;
    let source = source.unwrap_or_else(|| b"none".to_vec());
    // One instance serves all mounts of these; /proc belongs to the caller's PID namespace, a devpts to its mount.
    let shared = [&b"sysfs"[..], b"devtmpfs"].contains(&fstype.as_slice());
    let Some(sb) = ns.find_fs(&fstype).filter(|_| shared) else {
        let fs = new_file_system(task, &fstype, &data)?;
        ns.attach_fs(&at, fs, source, wanted)?;
        return Ok(0);
    };
    ns.attach_sb(&at, &sb, source, wanted)?;
    Ok(0)
}

const MNT_FORCE: u32 = 1;
const MNT_DETACH: u32 = 2;
const UMOUNT_NOFOLLOW: u32 = 8;

fn umount2(task: &Arc<Task>, target: PathArg, flags: Bits) -> Result<u64> {
    let flags = flags.0 as u32;
    if flags & !(MNT_FORCE | MNT_DETACH | UMOUNT_NOFOLLOW) != 0 {
        return Err(Errno::EINVAL);
    }
    let path = task.space()?.read_path(target.0)?;
    let at = resolve(task, &path, flags & UMOUNT_NOFOLLOW == 0)?;
    require_admin(task)?;
    namespace(task, &at)?.unmount(at, flags & MNT_DETACH != 0)?;
    Ok(0)
}

fn pivot_root(task: &Arc<Task>, new_root: PathArg, put_old: PathArg) -> Result<u64> {
    require_admin(task)?;
    let space = task.space()?;
    let new_path = space.read_path(new_root.0)?;
    let old_path = space.read_path(put_old.0)?;
    let new = resolve(task, &new_path, true)?;
    new.require_dir()?;
    let old = resolve(task, &old_path, true)?;
    old.require_dir()?;
    let was = task.fs().get().root;
    namespace(task, &old)?;
    namespace(task, &new)?.pivot_root(&new, &old)?;
    // Whoever had the old root as root or working directory gets the new one (here: the caller; a sandbox's tree is built
    // by one process).
    task.fs().change(|fs| {
        if fs.root.is(&was) {
            fs.root = new.clone();
        }
        if fs.cwd.is(&was) {
            fs.cwd = new.clone();
        }
    });
    Ok(0)
}

fn name_to_handle_at(
    task: &Arc<Task>,
    dirfd: Fd,
    path: PathArg,
    _handle: UserAddr,
    _mount_id: UserAddr,
    flags: Bits,
) -> Result<u64> {
    let flags = flags.0 as u32;
    if flags & !(raw::AT_SYMLINK_FOLLOW | raw::AT_EMPTY_PATH) != 0 {
        return Err(Errno::EINVAL);
    }
    let follow = if flags & raw::AT_SYMLINK_FOLLOW == 0 { raw::AT_SYMLINK_NOFOLLOW } else { 0 };
    place::named(&place::lookup(task), task, dirfd, path, follow | flags & raw::AT_EMPTY_PATH)?;
    Err(Errno::EOPNOTSUPP)
}
