//! How path arguments of system calls become places: directory descriptors, AT_* flags.
use std::sync::Arc;

use guest_abi::UserAddr;
use linux_raw_sys::general as raw;

use super::args::{Fd, PathArg};
use crate::task::Task;
use crate::vfs::{File, Lookup, LookupFlags, PathRef, path};
use crate::{Errno, Result};

/// AT_FDCWD.
pub const CWD: Fd = Fd(raw::AT_FDCWD);

/// The task's own view of the tree.
pub fn lookup(task: &Arc<Task>) -> Lookup<'_> {
    Lookup::new(task.fs().get(), &**task)
}

/// An open file that is more than an O_PATH name. EBADF.
pub fn file(task: &Task, fd: Fd) -> Result<Arc<File>> {
    let file = task.files().get(fd.0)?;
    if file.is_path_only() { Err(Errno::EBADF) } else { Ok(file) }
}

/// Where `path` starts if it is relative: None is the working directory.
pub fn start(task: &Task, dirfd: Fd, path: &[u8]) -> Result<Option<PathRef>> {
    if dirfd == CWD || path.first() == Some(&b'/') {
        return Ok(None);
    }
    let file = task.files().get(dirfd.0)?;
    match file.path() {
        Some(at) => Ok(Some(at.clone())),
        None => Err(Errno::ENOTDIR),
    }
}

/// Reads a path argument; with AT_EMPTY_PATH a null pointer is the empty path.
pub fn read_path(task: &Task, path: PathArg, at_flags: u32) -> Result<Vec<u8>> {
    if path.0 == UserAddr::NULL && at_flags & raw::AT_EMPTY_PATH != 0 {
        return Ok(Vec::new());
    }
    task.space()?.read_path(path.0)
}

/// AT_EMPTY_PATH and AT_SYMLINK_NOFOLLOW as lookup flags.
pub fn lookup_flags(at_flags: u32) -> LookupFlags {
    let mut flags = LookupFlags::empty();
    flags.set(LookupFlags::FOLLOW, at_flags & raw::AT_SYMLINK_NOFOLLOW == 0);
    flags.set(LookupFlags::EMPTY, at_flags & raw::AT_EMPTY_PATH != 0);
    flags
}

/// What a (directory descriptor, path) pair names: a place, or with an empty path the open file itself.
pub enum Named {
    /// A place.
    Path(PathRef),
    /// An open file, which may have no path.
    File(Arc<File>),
}

impl Named {
    /// As the subject of an attribute call.
    pub fn target(&self) -> crate::vfs::attr::Target<'_> {
        match self {
            Named::Path(p) => crate::vfs::attr::Target::Path(p),
            Named::File(f) => crate::vfs::attr::Target::File(f),
        }
    }

    /// The place; EBADF if there is none.
    pub fn path(&self) -> Result<&PathRef> {
        match self {
            Named::Path(p) => Ok(p),
            Named::File(f) => f.path().ok_or(Errno::EBADF),
        }
    }
}

/// Resolves the pair as the AT_* flags say.
pub fn named(cx: &Lookup<'_>, task: &Task, dirfd: Fd, path: PathArg, at_flags: u32) -> Result<Named> {
    let path = read_path(task, path, at_flags)?;
    if path.is_empty() && at_flags & raw::AT_EMPTY_PATH != 0 && dirfd != CWD {
        return task.files().get(dirfd.0).map(Named::File);
    }
    let start = start(task, dirfd, &path)?;
    path::resolve(cx, start.as_ref(), &path, lookup_flags(at_flags)).map(Named::Path)
}
