//! Opening (open(2), openat2(2)). Owns what the flags mean; never the contents behind what is opened.
use std::any::Any;
use std::sync::Arc;

use linux_raw_sys::general as raw;

use super::attr::{self, Access};
use super::inode::{Create, InodeKind, OpenResult};
use super::mount::MountFlags;
use super::path::{Last, Lookup, LookupFlags, Walk, resolve};
use super::{Dentry, File, FileOps, OpenFlags, PathRef, notify};
use crate::platform::host::AttrChange;
use crate::{Errno, Result};

/// How to open.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenHow {
    /// O_*.
    pub flags: OpenFlags,
    /// Permission bits of a new file, before the umask.
    pub mode: u32,
    /// RESOLVE_* and EMPTY.
    pub lookup: LookupFlags,
    /// EAGAIN, with nothing done, for what may have to wait for another opener (a FIFO).
    pub no_wait: bool,
}

impl OpenHow {
    /// With flags only.
    pub fn new(flags: OpenFlags) -> OpenHow {
        OpenHow { flags, ..OpenHow::default() }
    }
}

/// __O_TMPFILE without the O_DIRECTORY bit.
const TMPFILE_BIT: OpenFlags = OpenFlags::TMPFILE.difference(OpenFlags::DIRECTORY);

/// Opens a file by path, making it if the flags say so. What would block (a FIFO) says so by [`FileOps::open_blocks`].
pub fn open(cx: &Lookup<'_>, start: Option<&PathRef>, path: &[u8], how: &OpenHow) -> Result<Arc<File>> {
    let mut flags = how.flags;
    if flags.contains(OpenFlags::PATH) {
        flags &= OpenFlags::PATH | OpenFlags::DIRECTORY | OpenFlags::NOFOLLOW | OpenFlags::CLOEXEC;
    }
    if flags.contains(OpenFlags::CREAT | OpenFlags::DIRECTORY) {
        return Err(Errno::EINVAL);
    }
    if flags.intersects(TMPFILE_BIT) {
        if !flags.contains(OpenFlags::DIRECTORY) || !flags.writable() || flags.contains(OpenFlags::CREAT) {
            return Err(Errno::EINVAL);
        }
        return open_unnamed(cx, start, path, how);
    }
    if flags.contains(OpenFlags::CREAT) {
        return open_or_create(cx, start, path, how);
    }
    let mut lookup = how.lookup;
    lookup.set(LookupFlags::FOLLOW, !flags.contains(OpenFlags::NOFOLLOW));
    lookup.set(LookupFlags::DIRECTORY, flags.contains(OpenFlags::DIRECTORY));
    let at = resolve(cx, start, path, lookup)?;
    open_judged(cx, at, flags, how)
}

fn open_judged(cx: &Lookup<'_>, at: PathRef, flags: OpenFlags, how: &OpenHow) -> Result<Arc<File>> {
    let waits = at.dentry.kind() == InodeKind::Fifo && !flags.intersects(OpenFlags::NONBLOCK | OpenFlags::PATH);
    if how.no_wait && waits {
        return Err(Errno::EAGAIN);
    }
    open_place(cx, at, flags, false)
}

/// Opens what execve(2) runs: a regular file with execute permission, on a mount that allows it. EACCES otherwise.
pub fn open_exec(cx: &Lookup<'_>, start: Option<&PathRef>, path: &[u8], lookup: LookupFlags) -> Result<Arc<File>> {
    let at = resolve(cx, start, path, lookup)?;
    match at.dentry.kind() {
        InodeKind::Regular => {}
        InodeKind::Symlink => return Err(Errno::ELOOP),
        _ => return Err(Errno::EACCES),
    }
    if at.mount.flags().contains(MountFlags::NOEXEC) {
        return Err(Errno::EACCES);
    }
    attr::permission(&cx.credentials, at.inode(), Access::EXEC)?;
    // As the kernel does, the file is read whether or not the caller may read it.
    open_place(cx, at, OpenFlags::empty(), true)
}

/// Opens a place that is already known. `judged` when permission needs no check.
pub fn open_place(cx: &Lookup<'_>, at: PathRef, flags: OpenFlags, judged: bool) -> Result<Arc<File>> {
    if flags.contains(OpenFlags::PATH) {
        return Ok(File::new(Arc::new(PathOnly), Some(at), flags - OpenFlags::CLOEXEC));
    }
    let kind = at.dentry.kind();
    let writes = flags.writable() || flags.bits() & 3 == 3;
    if !judged {
        match kind {
            InodeKind::Symlink => return Err(Errno::ELOOP),
            InodeKind::Directory if writes || flags.contains(OpenFlags::TRUNC) => return Err(Errno::EISDIR),
            InodeKind::CharDevice | InodeKind::BlockDevice if at.mount.flags().contains(MountFlags::NODEV) => {
                return Err(Errno::EACCES);
            }
            _ => {}
        }
        let mut access = Access::empty();
        access.set(Access::READ, flags.readable() || flags.bits() & 3 == 3);
        access.set(Access::WRITE, writes || flags.contains(OpenFlags::TRUNC));
        attr::permission(&cx.credentials, at.inode(), access)?;
        if flags.contains(OpenFlags::NOATIME) {
            let (_, uid, _) = at.inode().access_attr()?;
            if !attr::owner_or_capable(&cx.credentials, uid) {
                return Err(Errno::EPERM);
            }
        }
    }
    if kind == InodeKind::Socket {
        return Err(Errno::ENXIO);
    }
    let truncate = flags.contains(OpenFlags::TRUNC) && kind == InodeKind::Regular;
    if kind == InodeKind::Regular && (writes || truncate) {
        at.mount.require_writable()?;
    }
    let kept = flags - (OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::NOCTTY | OpenFlags::TRUNC | OpenFlags::CLOEXEC);
    let passed = flags - (OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::TRUNC | OpenFlags::CLOEXEC);
    let inode = at.inode().clone();
    let file = match inode.open(cx.caller, &at, passed)? {
        OpenResult::Ops(ops) => File::new(ops, Some(at.clone()), kept),
        OpenResult::File(file) => file,
    };
    if truncate {
        let mode = attr::drop_privileges_mode(&cx.credentials, attr::Target::Path(&at))?;
        let change = AttrChange { size: Some(0), mode, ..AttrChange::default() };
        at.inode().set_attr(&change)?;
        notify::attributes(&at.dentry, &change);
    }
    notify::used(&at.dentry, raw::IN_OPEN);
    Ok(file)
}

fn open_unnamed(cx: &Lookup<'_>, start: Option<&PathRef>, path: &[u8], how: &OpenHow) -> Result<Arc<File>> {
    let at = resolve(cx, start, path, how.lookup | LookupFlags::FOLLOW | LookupFlags::DIRECTORY)?;
    at.mount.require_writable()?;
    attr::permission(&cx.credentials, at.inode(), Access::WRITE | Access::EXEC)?;
    let (mode, uid, gid) = attr::for_new_inode(cx, &at, false, how.mode)?;
    let inode = at.inode().create_unnamed(mode, uid, gid)?;
    let name = format!("#{}", inode.stat()?.ino);
    let linkable = !how.flags.contains(OpenFlags::EXCL);
    let dentry = Dentry::unlinked(inode, &at.dentry, name.as_bytes(), linkable);
    let place = PathRef { mount: at.mount.clone(), dentry };
    open_place(cx, place, how.flags - OpenFlags::TRUNC, true)
}

fn open_or_create(cx: &Lookup<'_>, start: Option<&PathRef>, path: &[u8], how: &OpenHow) -> Result<Arc<File>> {
    let flags = how.flags;
    let exclusive = flags.contains(OpenFlags::EXCL);
    let mut walk = Walk::new(cx, start, path, how.lookup)?;
    loop {
        let name = match walk.walk_parents()? {
            Last::Name(_, true) => return Err(Errno::EISDIR),
            Last::Name(name, false) => name,
            Last::Dot | Last::DotDot => return Err(if exclusive { Errno::EEXIST } else { Errno::EISDIR }),
            // All slashes, or a magic link led here.
            Last::Root => return open_existing(cx, walk.at, how),
        };
        let (child, created) = match walk.at.dentry.lookup(walk.at.mount.sb().cache(), &name, false) {
            Ok(child) => (child, false),
            Err(Errno::ENOENT) => create_regular(cx, &walk.at, &name, how.mode)?,
            Err(e) => return Err(e),
        };
        if created {
            let at = PathRef { mount: walk.at.mount.clone(), dentry: child };
            return open_place(cx, at, flags - OpenFlags::TRUNC, true);
        }
        if child.kind() == InodeKind::Symlink && !exclusive {
            if flags.contains(OpenFlags::NOFOLLOW) {
                return Err(Errno::ELOOP);
            }
            walk.follow(&child)?;
            continue;
        }
        walk.enter(child)?;
        return open_existing(cx, walk.at, how);
    }
}

/// The end of an O_CREAT open whose name was there already.
fn open_existing(cx: &Lookup<'_>, at: PathRef, how: &OpenHow) -> Result<Arc<File>> {
    if how.flags.contains(OpenFlags::EXCL) {
        return Err(Errno::EEXIST);
    }
    if at.dentry.is_dir() {
        return Err(Errno::EISDIR);
    }
    open_judged(cx, at, how.flags, how)
}

fn create_regular(cx: &Lookup<'_>, dir: &PathRef, name: &[u8], mode: u32) -> Result<(Arc<Dentry>, bool)> {
    let cache = dir.mount.sb().cache();
    let guard = super::names::lock_contents(&dir.dentry);
    match dir.dentry.lookup(cache, name, true) {
        Ok(child) => return Ok((child, false)),
        Err(Errno::ENOENT) => {}
        Err(e) => return Err(e),
    }
    dir.mount.require_writable()?;
    super::names::may_create(cx, dir)?;
    let (mode, uid, gid) = attr::for_new_inode(cx, dir, false, mode)?;
    let inode = dir.inode().create(name, Create::Regular, mode, uid, gid)?;
    let dentry = dir.dentry.adopt(cache, name, inode);
    drop(guard);
    notify::child(&dir.dentry, name, false, raw::IN_CREATE, 0);
    Ok((dentry, true))
}

/// What an O_PATH descriptor can do: nothing but name its place.
pub struct PathOnly;

impl FileOps for PathOnly {
    fn read(&self, _: &File, _: &mut crate::mm::IoDest<'_>, _: u64) -> Result<usize> {
        Err(Errno::EBADF)
    }
    fn write(&self, _: &File, _: &mut crate::mm::IoSource<'_>, _: u64) -> Result<usize> {
        Err(Errno::EBADF)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
