//! Changes of names: mkdir, mknod, symlink, link, unlink, rmdir, rename. Owns who may change a directory and what is locked
//! meanwhile; the file systems store the names.
use std::sync::Arc;

use linux_raw_sys::general as raw;

use super::attr::{self, Access, S_ISVTX};
use super::inode::{Create, InodeKind};
use super::path::{Last, Lookup, LookupFlags, resolve_parent};
use super::{Dentry, PathRef, notify};
use crate::lock::RwLockWriteGuard;
use crate::ns::user::{Caps, Credentials};
use crate::{Errno, Result};

/// Holds the contents of a directory still. Trees that change by themselves (/proc) have no such lock: their lookups may
/// take any other.
pub(super) fn lock_contents(dir: &Arc<Dentry>) -> Option<RwLockWriteGuard<'_, ()>> {
    dir.inode().cacheable().then(|| dir.contents().write())
}

fn lock_contents_nested(dir: &Arc<Dentry>) -> Option<RwLockWriteGuard<'_, ()>> {
    dir.inode().cacheable().then(|| dir.contents().write_nested())
}

/// Whether a name may be added to `dir`, whose contents are locked.
pub(super) fn may_create(cx: &Lookup<'_>, dir: &PathRef) -> Result<()> {
    if dir.dentry.is_gone() {
        return Err(Errno::ENOENT);
    }
    attr::permission(&cx.credentials, dir.inode(), Access::WRITE | Access::EXEC)
}

/// Whether `victim` may be taken out of `dir`; `as_dir` when the operation takes directories only, else it takes none.
fn may_delete(credentials: &Credentials, dir: &PathRef, victim: &Dentry, as_dir: bool) -> Result<()> {
    attr::permission(credentials, dir.inode(), Access::WRITE | Access::EXEC)?;
    if !credentials.has(Caps::FOWNER) {
        let (mode, dir_uid, _) = dir.inode().access_attr()?;
        if mode & S_ISVTX != 0 && credentials.fsuid != dir_uid {
            let (_, uid, gid) = victim.inode().access_attr()?;
            if credentials.fsuid != uid && !credentials.has_over(Caps::FOWNER, uid, gid) {
                return Err(Errno::EPERM);
            }
        }
    }
    match (as_dir, victim.is_dir()) {
        (true, false) => Err(Errno::ENOTDIR),
        (false, true) => Err(Errno::EISDIR),
        _ if dir.dentry.is_gone() => Err(Errno::ENOENT),
        _ => Ok(()),
    }
}

fn create(
    cx: &Lookup<'_>,
    start: Option<&PathRef>,
    path: &[u8],
    is_dir: bool,
    make: impl FnOnce(&PathRef, &[u8]) -> Result<Arc<dyn super::Inode>>,
) -> Result<PathRef> {
    let (dir, last) = resolve_parent(cx, start, path, LookupFlags::empty())?;
    let Last::Name(name, slash) = last else { return Err(Errno::EEXIST) };
    let cache = dir.mount.sb().cache();
    let guard = lock_contents(&dir.dentry);
    match dir.dentry.lookup(cache, &name, true) {
        Ok(_) => return Err(Errno::EEXIST),
        Err(Errno::ENOENT) => {}
        Err(e) => return Err(e),
    }
    if slash && !is_dir {
        return Err(Errno::ENOENT);
    }
    dir.mount.require_writable()?;
    may_create(cx, &dir)?;
    let inode = make(&dir, &name)?;
    let dentry = dir.dentry.adopt(cache, &name, inode);
    drop(guard);
    notify::child(&dir.dentry, &name, is_dir, raw::IN_CREATE, 0);
    Ok(PathRef { mount: dir.mount.clone(), dentry })
}

/// mkdir(2).
pub fn mkdir(cx: &Lookup<'_>, start: Option<&PathRef>, path: &[u8], mode: u32) -> Result<PathRef> {
    create(cx, start, path, true, |dir, name| {
        let (mode, uid, gid) = attr::for_new_inode(cx, dir, true, mode & (0o777 | S_ISVTX))?;
        dir.inode().create(name, Create::Directory, mode, uid, gid)
    })
}

/// mknod(2), and bind(2) of a unix socket. `dev` matters for devices only.
pub fn mknod(
    cx: &Lookup<'_>,
    start: Option<&PathRef>,
    path: &[u8],
    kind: InodeKind,
    mode: u32,
    dev: u64,
) -> Result<PathRef> {
    create(cx, start, path, false, |dir, name| {
        let device = matches!(kind, InodeKind::CharDevice | InodeKind::BlockDevice);
        let whiteout = kind == InodeKind::CharDevice && dev == 0;
        if device && !whiteout && !cx.credentials.has(Caps::MKNOD) {
            return Err(Errno::EPERM);
        }
        let what = match kind {
            InodeKind::Regular => Create::Regular,
            InodeKind::Directory => return Err(Errno::EPERM),
            InodeKind::Symlink => return Err(Errno::EINVAL),
            _ => Create::Node(kind, if device { dev } else { 0 }),
        };
        let (mode, uid, gid) = attr::for_new_inode(cx, dir, false, mode)?;
        dir.inode().create(name, what, mode, uid, gid)
    })
}

/// symlink(2).
pub fn symlink(cx: &Lookup<'_>, target: &[u8], start: Option<&PathRef>, path: &[u8]) -> Result<PathRef> {
    if target.is_empty() {
        return Err(Errno::ENOENT);
    }
    create(cx, start, path, false, |dir, name| {
        let (_, uid, gid) = attr::for_new_inode(cx, dir, false, 0o777)?;
        dir.inode().create(name, Create::Symlink(target), 0o777, uid, gid)
    })
}

/// link(2): another name for `old`.
pub fn link(cx: &Lookup<'_>, old: &PathRef, start: Option<&PathRef>, path: &[u8]) -> Result<PathRef> {
    create(cx, start, path, false, |dir, name| {
        if !Arc::ptr_eq(&old.mount, &dir.mount) {
            return Err(Errno::EXDEV);
        }
        if old.dentry.is_dir() {
            return Err(Errno::EPERM);
        }
        if old.dentry.is_gone() && !old.dentry.is_linkable() && old.inode().stat()?.nlink == 0 {
            return Err(Errno::ENOENT);
        }
        dir.inode().link(name, old.inode())?;
        Ok(old.inode().clone())
    })
}

/// unlink(2).
pub fn unlink(cx: &Lookup<'_>, start: Option<&PathRef>, path: &[u8]) -> Result<()> {
    let (dir, last) = resolve_parent(cx, start, path, LookupFlags::empty())?;
    let Last::Name(name, slash) = last else { return Err(Errno::EISDIR) };
    dir.mount.require_writable()?;
    let cache = dir.mount.sb().cache();
    let guard = lock_contents(&dir.dentry);
    let victim = dir.dentry.lookup(cache, &name, true)?;
    if slash {
        return Err(if victim.is_dir() { Errno::EISDIR } else { Errno::ENOTDIR });
    }
    may_delete(&cx.credentials, &dir, &victim, false)?;
    if victim.is_mountpoint() {
        return Err(Errno::EBUSY);
    }
    dir.inode().unlink(&name)?;
    victim.remove(cache);
    drop(guard);
    notify::removed(&dir.dentry, &name, &victim);
    Ok(())
}

/// rmdir(2).
pub fn rmdir(cx: &Lookup<'_>, start: Option<&PathRef>, path: &[u8]) -> Result<()> {
    let (dir, last) = resolve_parent(cx, start, path, LookupFlags::empty())?;
    let name = match last {
        Last::Name(name, _) => name,
        Last::Dot => return Err(Errno::EINVAL),
        Last::DotDot => return Err(Errno::ENOTEMPTY),
        Last::Root => return Err(Errno::EBUSY),
    };
    dir.mount.require_writable()?;
    let cache = dir.mount.sb().cache();
    let guard = lock_contents(&dir.dentry);
    let victim = dir.dentry.lookup(cache, &name, true)?;
    may_delete(&cx.credentials, &dir, &victim, true)?;
    if victim.is_mountpoint() {
        return Err(Errno::EBUSY);
    }
    {
        // Nothing may be made in the directory between its end and the mark of it.
        let _inner = lock_contents_nested(&victim);
        dir.inode().rmdir(&name)?;
        victim.remove(cache);
    }
    drop(guard);
    notify::removed(&dir.dentry, &name, &victim);
    Ok(())
}

/// What moved and what was there before; None if both names were of one inode.
type Renamed = Option<(Arc<Dentry>, Option<Arc<Dentry>>)>;

/// The names of a rename once both directories are locked.
struct Rename<'a> {
    cx: &'a Lookup<'a>,
    from: &'a PathRef,
    from_name: &'a [u8],
    from_slash: bool,
    to: &'a PathRef,
    to_name: &'a [u8],
    to_slash: bool,
    flags: u32,
}

/// renameat2(2).
pub fn rename(
    cx: &Lookup<'_>,
    from: (Option<&PathRef>, &[u8]),
    to: (Option<&PathRef>, &[u8]),
    flags: u32,
) -> Result<()> {
    let known = raw::RENAME_NOREPLACE | raw::RENAME_EXCHANGE | raw::RENAME_WHITEOUT;
    let exclusive = raw::RENAME_NOREPLACE | raw::RENAME_WHITEOUT;
    if flags & !known != 0 || (flags & raw::RENAME_EXCHANGE != 0 && flags & exclusive != 0) {
        return Err(Errno::EINVAL);
    }
    if flags & raw::RENAME_WHITEOUT != 0 {
        // Only for the lower layers of overlays, and the file system's answer where it has none.
        return Err(Errno::EINVAL);
    }
    let (from_dir, from_last) = resolve_parent(cx, from.0, from.1, LookupFlags::empty())?;
    let (to_dir, to_last) = resolve_parent(cx, to.0, to.1, LookupFlags::empty())?;
    if !Arc::ptr_eq(&from_dir.mount, &to_dir.mount) {
        return Err(Errno::EXDEV);
    }
    let Last::Name(from_name, from_slash) = from_last else { return Err(Errno::EBUSY) };
    let Last::Name(to_name, to_slash) = to_last else {
        return Err(if flags & raw::RENAME_NOREPLACE != 0 { Errno::EEXIST } else { Errno::EBUSY });
    };
    from_dir.mount.require_writable()?;
    let names = Rename {
        cx,
        from: &from_dir,
        from_name: &from_name,
        from_slash,
        to: &to_dir,
        to_name: &to_name,
        to_slash,
        flags,
    };
    let renamed = run_locked(&names)?;
    names.tell(renamed);
    Ok(())
}

/// Takes the locks that both directories need.
fn run_locked(names: &Rename<'_>) -> Result<Renamed> {
    let (a, b) = (&names.from.dentry, &names.to.dentry);
    if !a.inode().cacheable() || !b.inode().cacheable() {
        return names.run();
    }
    if Arc::ptr_eq(a, b) {
        let _guard = a.contents().write();
        return names.run();
    }
    let sb = names.from.mount.sb().clone();
    let _ancestors = sb.rename_lock().lock();
    // An ancestor is locked before what lies below it; others in any order that is always the same.
    let a_first = a.is_ancestor_of(b) || (!b.is_ancestor_of(a) && Arc::as_ptr(a) < Arc::as_ptr(b));
    let (first, second) = if a_first { (a, b) } else { (b, a) };
    let _first = first.contents().write();
    let _second = second.contents().write_nested();
    names.run()
}

/// Whether both are names of one inode; a file system may show links as objects of their own.
fn same_inode(a: &Arc<Dentry>, b: &Arc<Dentry>) -> Result<bool> {
    if Arc::ptr_eq(a, b) || Arc::ptr_eq(a.inode(), b.inode()) {
        return Ok(true);
    }
    if a.is_dir() || b.is_dir() {
        return Ok(false);
    }
    let (a, b) = (a.inode().stat()?, b.inode().stat()?);
    Ok(a.nlink > 1 && (a.dev, a.ino) == (b.dev, b.ino))
}

impl Rename<'_> {
    fn run(&self) -> Result<Renamed> {
        let Rename { cx, from, to, .. } = self;
        let cache = from.mount.sb().cache();
        let exchange = self.flags & raw::RENAME_EXCHANGE != 0;
        let old = from.dentry.lookup(cache, self.from_name, true)?;
        let new = match to.dentry.lookup(cache, self.to_name, true) {
            Ok(new) => Some(new),
            Err(Errno::ENOENT) => None,
            Err(e) => return Err(e),
        };
        if self.flags & raw::RENAME_NOREPLACE != 0 && new.is_some() {
            return Err(Errno::EEXIST);
        }
        match &new {
            None if exchange => return Err(Errno::ENOENT),
            Some(new) if exchange && !new.is_dir() && self.to_slash => return Err(Errno::ENOTDIR),
            _ => {}
        }
        if !old.is_dir() && (self.from_slash || (!exchange && self.to_slash)) {
            return Err(Errno::ENOTDIR);
        }
        if old.is_ancestor_of(&to.dentry) {
            return Err(Errno::EINVAL);
        }
        if new.as_ref().is_some_and(|n| n.is_ancestor_of(&from.dentry)) {
            return Err(if exchange { Errno::EINVAL } else { Errno::ENOTEMPTY });
        }
        if let Some(new) = &new
            && same_inode(new, &old)?
        {
            return Ok(None);
        }
        may_delete(&cx.credentials, from, &old, old.is_dir())?;
        match &new {
            None => may_create(cx, to)?,
            Some(new) => may_delete(&cx.credentials, to, new, if exchange { new.is_dir() } else { old.is_dir() })?,
        }
        // A directory that changes its parent has its `..` written.
        if !Arc::ptr_eq(&from.dentry, &to.dentry) {
            if old.is_dir() {
                attr::permission(&cx.credentials, old.inode(), Access::WRITE)?;
            }
            if let Some(new) = new.as_ref().filter(|n| exchange && n.is_dir()) {
                attr::permission(&cx.credentials, new.inode(), Access::WRITE)?;
            }
        }
        if old.is_mountpoint() || new.as_ref().is_some_and(|n| n.is_mountpoint()) {
            return Err(Errno::EBUSY);
        }
        let inner = new.as_ref().filter(|n| n.is_dir() && !exchange).map(lock_contents_nested);
        from.inode().rename(self.from_name, to.inode(), self.to_name, self.flags)?;
        match &new {
            Some(new) if exchange => {
                old.moved(&to.dentry, self.to_name);
                new.moved(&from.dentry, self.from_name);
            }
            Some(new) => {
                new.remove(cache);
                old.moved(&to.dentry, self.to_name);
            }
            None => old.moved(&to.dentry, self.to_name),
        }
        drop(inner);
        Ok(Some((old, new)))
    }

    /// Tells the watchers, once nothing is locked.
    fn tell(&self, renamed: Renamed) {
        let Some((old, new)) = renamed else { return };
        let (from, to) = (&self.from.dentry, &self.to.dentry);
        notify::renamed(from, self.from_name, to, self.to_name, &old);
        match new {
            Some(new) if self.flags & raw::RENAME_EXCHANGE != 0 => {
                notify::renamed(to, self.to_name, from, self.from_name, &new);
            }
            Some(new) => notify::replaced(&new),
            None => {}
        }
    }
}
