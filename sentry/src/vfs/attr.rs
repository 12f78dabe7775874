//! Permission checks and attribute changes: chmod, chown, utimensat, truncate. Owns who may change what; the file systems
//! store it.
use bitflags::bitflags;
use guest_abi::types::{Stat, Timespec};

use super::inode::{Inode, InodeKind};
use super::mount::MountFlags;
use super::path::Lookup;
use super::{File, PathRef, notify};
use crate::ns::user::{Caps, Credentials};
use crate::ns::user_namespace::IdKind;
use crate::platform::host::AttrChange;
use crate::{Errno, Result};

/// S_ISUID.
pub const S_ISUID: u32 = 0o4000;
/// S_ISGID.
pub const S_ISGID: u32 = 0o2000;
/// S_ISVTX.
pub const S_ISVTX: u32 = 0o1000;
const S_IXGRP: u32 = 0o010;

bitflags! {
    /// Wanted access, in the order of permission bits.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Access: u32 {
        /// Execute a file, search a directory.
        const EXEC = 1;
        /// Write a file, change the names in a directory.
        const WRITE = 2;
        /// Read a file, list a directory.
        const READ = 4;
    }
}

/// EACCES unless `credentials` may do all of `access` to the inode (discretionary access control and capabilities).
pub fn permission(credentials: &Credentials, inode: &std::sync::Arc<dyn Inode>, access: Access) -> Result<()> {
    let dir = inode.kind() == InodeKind::Directory;
    if dir && credentials.has(Caps::DAC_OVERRIDE) {
        return Ok(());
    }
    let (mode, uid, gid) = inode.access_attr()?;
    if dir && credentials.has_over(Caps::DAC_OVERRIDE, uid, gid) {
        return Ok(());
    }
    let granted = if credentials.fsuid == uid {
        mode >> 6
    } else if credentials.in_group(gid) {
        mode >> 3
    } else {
        mode
    };
    if Access::from_bits_truncate(granted).contains(access) {
        return Ok(());
    }
    let read_search = if dir { !access.contains(Access::WRITE) } else { access == Access::READ };
    if read_search && credentials.has_over(Caps::DAC_READ_SEARCH, uid, gid) {
        return Ok(());
    }
    if credentials.has_over(Caps::DAC_OVERRIDE, uid, gid) && (!access.contains(Access::EXEC) || mode & 0o111 != 0) {
        return Ok(());
    }
    Err(Errno::EACCES)
}

/// access(2) once the place is known: permission, read-only and noexec mounts.
pub fn access(cx: &Lookup<'_>, at: &PathRef, access: Access) -> Result<()> {
    let kind = at.dentry.kind();
    if access.contains(Access::EXEC) && kind == InodeKind::Regular && at.mount.flags().contains(MountFlags::NOEXEC) {
        return Err(Errno::EACCES);
    }
    permission(&cx.credentials, at.inode(), access)?;
    let stored = matches!(kind, InodeKind::Regular | InodeKind::Directory | InodeKind::Symlink);
    if access.contains(Access::WRITE) && stored {
        at.mount.require_writable()?;
    }
    Ok(())
}

/// Whether the caller owns the inode or may act as if.
pub fn owner_or_capable(credentials: &Credentials, uid: u32) -> bool {
    // The owner alone must have a name.
    credentials.fsuid == uid
        || credentials.has_in_own(Caps::FOWNER) && credentials.user_ns.from_initial(IdKind::User, uid).is_some()
}

/// What has attributes: a place, or an open file (which may have none).
#[derive(Clone, Copy)]
pub enum Target<'a> {
    /// A place.
    Path(&'a PathRef),
    /// An open file.
    File(&'a File),
}

impl Target<'_> {
    /// stat(2).
    pub fn stat(&self) -> Result<Stat> {
        match self {
            Target::Path(p) => p.inode().stat(),
            Target::File(f) => f.stat(),
        }
    }

    fn set(&self, change: &AttrChange) -> Result<()> {
        let dentry = match self {
            Target::Path(p) => {
                p.inode().set_attr(change)?;
                Some(&p.dentry)
            }
            Target::File(f) => {
                f.set_attr(change)?;
                f.path().map(|p| &p.dentry)
            }
        };
        if let Some(dentry) = dentry {
            notify::attributes(dentry, change);
        }
        Ok(())
    }

    fn require_writable(&self) -> Result<()> {
        match self {
            Target::Path(p) => p.mount.require_writable(),
            Target::File(f) => f.path().map_or(Ok(()), |p| p.mount.require_writable()),
        }
    }
}

fn kind_of(stat: &Stat) -> Option<InodeKind> {
    InodeKind::from_mode(stat.mode)
}

/// chmod(2): permission bits and suid, sgid, sticky.
pub fn set_mode(credentials: &Credentials, target: Target<'_>, mode: u32) -> Result<()> {
    target.require_writable()?;
    let stat = target.stat()?;
    if kind_of(&stat) == Some(InodeKind::Symlink) {
        return Err(Errno::EOPNOTSUPP);
    }
    if !owner_or_capable(credentials, stat.uid) {
        return Err(Errno::EPERM);
    }
    let mut mode = mode & 0o7777;
    if !credentials.in_group(stat.gid) && !credentials.has_over(Caps::FSETID, stat.uid, stat.gid) {
        mode &= !S_ISGID;
    }
    target.set(&AttrChange { mode: Some(mode), ..AttrChange::default() })
}

/// What a change of owner or contents leaves of the mode: None if nothing changes.
fn mode_without_privileges(credentials: &Credentials, stat: &Stat) -> Option<u32> {
    let mut mode = stat.mode & 0o7777;
    if mode & S_ISUID != 0 {
        mode &= !S_ISUID;
    }
    if mode & S_ISGID != 0
        && (mode & S_IXGRP != 0
            || !(credentials.in_group(stat.gid) || credentials.has_over(Caps::FSETID, stat.uid, stat.gid)))
    {
        mode &= !S_ISGID;
    }
    (mode != stat.mode & 0o7777).then_some(mode)
}

/// chown(2); None leaves an id.
pub fn set_owner(credentials: &Credentials, target: Target<'_>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
    target.require_writable()?;
    let stat = target.stat()?;
    let owner = credentials.fsuid == stat.uid;
    let chown = credentials.has_over(Caps::CHOWN, stat.uid, stat.gid);
    if uid.is_some_and(|u| !(chown || owner && u == stat.uid)) {
        return Err(Errno::EPERM);
    }
    if gid.is_some_and(|g| !(chown || owner && (g == stat.gid || credentials.in_group(g)))) {
        return Err(Errno::EPERM);
    }
    let mode = match kind_of(&stat) {
        Some(InodeKind::Directory) => None,
        _ => mode_without_privileges(credentials, &stat),
    };
    if uid.is_none() && gid.is_none() && mode.is_none() {
        return Ok(());
    }
    target.set(&AttrChange { mode, uid, gid, ..AttrChange::default() })
}

/// A time argument of utimensat(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// UTIME_NOW.
    Now,
    /// UTIME_OMIT.
    Omit,
    /// A given time.
    At(Timespec),
}

/// utimensat(2): access and modification time; `now` is CLOCK_REALTIME.
pub fn set_times(
    credentials: &Credentials,
    target: Target<'_>,
    atime: SetTime,
    mtime: SetTime,
    now: Timespec,
) -> Result<()> {
    if atime == SetTime::Omit && mtime == SetTime::Omit {
        return Ok(());
    }
    target.require_writable()?;
    let stat = target.stat()?;
    if !owner_or_capable(credentials, stat.uid) {
        if atime != SetTime::Now || mtime != SetTime::Now {
            return Err(Errno::EPERM);
        }
        match target {
            Target::Path(p) => permission(credentials, p.inode(), Access::WRITE)?,
            Target::File(f) => match f.path() {
                Some(p) => permission(credentials, p.inode(), Access::WRITE)?,
                None => return Err(Errno::EACCES),
            },
        }
    }
    let value = |t| match t {
        SetTime::Now => Some(now),
        SetTime::Omit => None,
        SetTime::At(t) => Some(t),
    };
    target.set(&AttrChange { atime: value(atime), mtime: value(mtime), ..AttrChange::default() })
}

/// truncate(2) of a place. The caller has checked RLIMIT_FSIZE.
pub fn truncate(cx: &Lookup<'_>, at: &PathRef, len: u64) -> Result<()> {
    match at.dentry.kind() {
        InodeKind::Directory => return Err(Errno::EISDIR),
        InodeKind::Regular => {}
        _ => return Err(Errno::EINVAL),
    }
    at.mount.require_writable()?;
    permission(&cx.credentials, at.inode(), Access::WRITE)?;
    let mode = drop_privileges_mode(&cx.credentials, Target::Path(at))?;
    Target::Path(at).set(&AttrChange { size: Some(len), mode, ..AttrChange::default() })
}

/// The mode a write or truncation by `credentials` leaves, None if unchanged.
pub fn drop_privileges_mode(credentials: &Credentials, target: Target<'_>) -> Result<Option<u32>> {
    // Whoever has it keeps the bits, whosever the file is.
    if credentials.has_in_own(Caps::FSETID) {
        return Ok(None);
    }
    Ok(mode_without_privileges(credentials, &target.stat()?))
}

/// Takes suid and sgid off a regular file that is about to be written.
pub fn drop_privileges(credentials: &Credentials, file: &File) -> Result<()> {
    if credentials.has_in_own(Caps::FSETID) {
        return Ok(());
    }
    let Some(path) = file.path().filter(|p| p.dentry.kind() == InodeKind::Regular) else { return Ok(()) };
    let (mode, ..) = path.inode().access_attr()?;
    if mode & (S_ISUID | S_ISGID) == 0 {
        return Ok(());
    }
    match drop_privileges_mode(credentials, Target::Path(path))? {
        Some(mode) => path.inode().set_attr(&AttrChange { mode: Some(mode), ..AttrChange::default() }),
        None => Ok(()),
    }
}

/// Mode, owner and group of a new inode in `dir`: set-group-ID directories hand down their group.
pub(super) fn for_new_inode(cx: &Lookup<'_>, dir: &PathRef, is_dir: bool, mode: u32) -> Result<(u32, u32, u32)> {
    let credentials = &cx.credentials;
    let mut mode = mode & 0o7777 & !cx.fs.umask;
    let (dir_mode, dir_uid, dir_gid) = dir.inode().access_attr()?;
    let mut gid = credentials.fsgid;
    if dir_mode & S_ISGID != 0 {
        gid = dir_gid;
        if is_dir {
            mode |= S_ISGID;
        } else if mode & (S_ISGID | S_IXGRP) == S_ISGID | S_IXGRP
            && !credentials.in_group(gid)
            && !credentials.has_over(Caps::FSETID, dir_uid, dir_gid)
        {
            mode &= !S_ISGID;
        }
    }
    Ok((mode, credentials.fsuid, gid))
}

/// Which credentials an extended attribute's name asks for (xattr(7)).
pub fn xattr_permission(cx: &Lookup<'_>, target: Target<'_>, name: &[u8], write: bool) -> Result<()> {
    if write {
        target.require_writable()?;
    }
    let stat = target.stat()?;
    let credentials = &cx.credentials;
    if name.starts_with(b"security.") || name.starts_with(b"system.") {
        if write && name.starts_with(b"security.") && !credentials.has(Caps::SYS_ADMIN) {
            return Err(Errno::EPERM);
        }
        if write && name.starts_with(b"system.") && !owner_or_capable(credentials, stat.uid) {
            return Err(Errno::EPERM);
        }
        return Ok(());
    }
    if name.starts_with(b"trusted.") {
        return match credentials.has(Caps::SYS_ADMIN) {
            true => Ok(()),
            false if write => Err(Errno::EPERM),
            false => Err(Errno::ENODATA),
        };
    }
    if name.starts_with(b"user.") {
        let kind = kind_of(&stat);
        if !matches!(kind, Some(InodeKind::Regular | InodeKind::Directory)) {
            return Err(if write { Errno::EPERM } else { Errno::ENODATA });
        }
        if write
            && kind == Some(InodeKind::Directory)
            && stat.mode & S_ISVTX != 0
            && !owner_or_capable(credentials, stat.uid)
        {
            return Err(Errno::EPERM);
        }
        let access = if write { Access::WRITE } else { Access::READ };
        return match target {
            Target::Path(p) => permission(credentials, p.inode(), access),
            Target::File(f) => f.path().map_or(Ok(()), |p| permission(credentials, p.inode(), access)),
        };
    }
    Err(Errno::EOPNOTSUPP)
}
