//! Path resolution (path_resolution(7)). Owns how a path leads to a place; the operations on names stand in `names`, opening in
//! `open`.
use std::sync::Arc;

use bitflags::bitflags;
use linux_raw_sys::general as raw;

use super::file::Caller;
use super::fs_context::FsState;
use super::inode::InodeKind;
use super::mount::{MountFlags, follow_mounts};
use super::{Dentry, PathRef};
use crate::ns::user::Credentials;
use crate::{Errno, Result};

pub use super::attachments::Attachments;
pub use super::open::{OpenHow, open, open_exec};

/// Symbolic links followed in one resolution (path_resolution(7)).
const MAX_LINKS: u32 = 40;
/// Bytes in a component.
pub const NAME_MAX: usize = 255;
/// Bytes in a path argument, the final NUL included.
pub const PATH_MAX: usize = 4096;

/// On whose behalf and from where a path is resolved.
pub struct Lookup<'a> {
    /// Root, working directory, umask.
    pub fs: FsState,
    /// Who is judged (access(2) judges by the real ids).
    pub credentials: Arc<Credentials>,
    /// Who acts, for file systems that answer by caller.
    pub caller: &'a dyn Caller,
}

impl<'a> Lookup<'a> {
    /// With the caller's own credentials.
    pub fn new(fs: FsState, caller: &'a dyn Caller) -> Lookup<'a> {
        Lookup { fs, credentials: caller.credentials(), caller }
    }
}

bitflags! {
    /// How to resolve.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct LookupFlags: u32 {
        /// Follow a symbolic link in the last component.
        const FOLLOW = 1;
        /// The result must be a directory.
        const DIRECTORY = 2;
        /// An empty path means the start itself (AT_EMPTY_PATH).
        const EMPTY = 4;
        /// RESOLVE_NO_XDEV.
        const NO_XDEV = 8;
        /// RESOLVE_NO_MAGICLINKS.
        const NO_MAGICLINKS = 16;
        /// RESOLVE_NO_SYMLINKS.
        const NO_SYMLINKS = 32;
        /// RESOLVE_BENEATH.
        const BENEATH = 64;
        /// RESOLVE_IN_ROOT.
        const IN_ROOT = 128;
        /// Stop at what a mount covers in the last component (umount resolves the covering root all the same).
        const NO_COVER = 256;
    }
}

impl LookupFlags {
    /// RESOLVE_* of openat2(2); EINVAL for unknown bits or contradictions, EAGAIN for RESOLVE_CACHED (nothing promises to
    /// be cached).
    pub fn from_resolve(resolve: u64) -> Result<LookupFlags> {
        let mut flags = LookupFlags::empty();
        let mut left = resolve;
        for (bit, flag) in [
            (raw::RESOLVE_NO_XDEV, LookupFlags::NO_XDEV),
            (raw::RESOLVE_NO_MAGICLINKS, LookupFlags::NO_MAGICLINKS),
            (raw::RESOLVE_NO_SYMLINKS, LookupFlags::NO_SYMLINKS | LookupFlags::NO_MAGICLINKS),
            (raw::RESOLVE_BENEATH, LookupFlags::BENEATH),
            (raw::RESOLVE_IN_ROOT, LookupFlags::IN_ROOT),
        ] {
            if left & u64::from(bit) != 0 {
                flags |= flag;
                left &= !u64::from(bit);
            }
        }
        if flags.contains(LookupFlags::BENEATH | LookupFlags::IN_ROOT) {
            return Err(Errno::EINVAL);
        }
        if left & !u64::from(raw::RESOLVE_CACHED) != 0 {
            return Err(Errno::EINVAL);
        }
        if left != 0 {
            return Err(Errno::EAGAIN);
        }
        Ok(flags)
    }
}

/// The last component of a path, its directory being known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Last {
    /// A name; whether slashes follow it.
    Name(Vec<u8>, bool),
    /// `.`
    Dot,
    /// `..`
    DotDot,
    /// The path was all slashes.
    Root,
}

/// Finds the place a path names. `start` is where relative paths begin, None the working directory.
pub fn resolve(cx: &Lookup<'_>, start: Option<&PathRef>, path: &[u8], flags: LookupFlags) -> Result<PathRef> {
    let mut walk = Walk::new(cx, start, path, flags)?;
    walk.walk_all()?;
    Ok(walk.at)
}

/// Finds the directory that holds the last component, without looking that up.
pub fn resolve_parent(
    cx: &Lookup<'_>,
    start: Option<&PathRef>,
    path: &[u8],
    flags: LookupFlags,
) -> Result<(PathRef, Last)> {
    let mut walk = Walk::new(cx, start, path, flags)?;
    let last = walk.walk_parents()?;
    Ok((walk.at, last))
}

/// A resolution under way.
pub(super) struct Walk<'a> {
    cx: &'a Lookup<'a>,
    flags: LookupFlags,
    /// What `/` and the top `..` mean.
    root: PathRef,
    /// Where it is.
    pub(super) at: PathRef,
    links: u32,
    /// What is still to be walked.
    rest: Vec<u8>,
    pos: usize,
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        cx: &'a Lookup<'a>,
        start: Option<&PathRef>,
        path: &[u8],
        flags: LookupFlags,
    ) -> Result<Walk<'a>> {
        if path.is_empty() && !flags.contains(LookupFlags::EMPTY) {
            return Err(Errno::ENOENT);
        }
        let start = start.unwrap_or(&cx.fs.cwd);
        let scoped = flags.intersects(LookupFlags::BENEATH | LookupFlags::IN_ROOT);
        let root = if scoped { start.clone() } else { cx.fs.root.clone() };
        let mut walk = Walk { cx, flags, root, at: start.clone(), links: 0, rest: path.to_vec(), pos: 0 };
        walk.begin(start)?;
        Ok(walk)
    }

    /// Goes to the root if the rest is absolute.
    fn begin(&mut self, _start: &PathRef) -> Result<()> {
        if self.rest.get(self.pos) == Some(&b'/') {
            if self.flags.contains(LookupFlags::BENEATH) {
                return Err(Errno::EXDEV);
            }
            if self.flags.contains(LookupFlags::NO_XDEV) && !Arc::ptr_eq(&self.at.mount, &self.root.mount) {
                return Err(Errno::EXDEV);
            }
            self.at = self.root.clone();
        }
        Ok(())
    }

    /// The next component as a range of `rest`, whether it is the last, and whether slashes follow it.
    fn next(&mut self) -> Option<(std::ops::Range<usize>, bool, bool)> {
        let skip = |from: usize, rest: &[u8]| {
            from + rest.get(from..).unwrap_or_default().iter().take_while(|&&b| b == b'/').count()
        };
        let start = skip(self.pos, &self.rest);
        if start >= self.rest.len() {
            self.pos = start;
            return None;
        }
        let tail = self.rest.get(start..).unwrap_or_default();
        let end = start + tail.iter().position(|&b| b == b'/').unwrap_or(tail.len());
        let after = skip(end, &self.rest);
        self.pos = end;
        Some((start..end, after >= self.rest.len(), after > end))
    }

    /// Walks all but the last component.
    pub(super) fn walk_parents(&mut self) -> Result<Last> {
        loop {
            let Some((range, last, slash)) = self.next() else { return Ok(Last::Root) };
            self.require_search()?;
            let name = self.rest.get(range).unwrap_or_default();
            if last {
                return Ok(match name {
                    b"." => Last::Dot,
                    b".." => Last::DotDot,
                    _ if name.len() > NAME_MAX => return Err(Errno::ENAMETOOLONG),
                    _ => Last::Name(name.to_vec(), slash),
                });
            }
            let name = name.to_vec();
            self.step(&name, true)?;
        }
    }

    /// Walks the whole path.
    fn walk_all(&mut self) -> Result<()> {
        let mut must_be_dir = self.flags.contains(LookupFlags::DIRECTORY);
        while let Some((range, last, slash)) = self.next() {
            self.require_search()?;
            let name = self.rest.get(range).unwrap_or_default();
            // Short names are the rule; they need no allocation.
            let mut short = [0u8; 64];
            let long;
            let name: &[u8] = if let Some(space) = short.get_mut(..name.len()) {
                space.copy_from_slice(name);
                space
            } else {
                long = name.to_vec();
                &long
            };
            must_be_dir |= last && slash;
            let follow = !last || slash || self.flags.contains(LookupFlags::FOLLOW);
            self.step(name, follow)?;
        }
        if must_be_dir {
            self.at.require_dir()?;
        }
        Ok(())
    }

    /// Goes through a component that the caller was allowed to look for.
    pub(super) fn step(&mut self, name: &[u8], follow: bool) -> Result<()> {
        match name {
            b"." => return Ok(()),
            b".." => return self.up(),
            _ if name.len() > NAME_MAX => return Err(Errno::ENAMETOOLONG),
            _ => {}
        }
        let sb = self.at.mount.sb();
        let child = self.at.dentry.lookup(sb.cache(), name, false)?;
        if follow && child.kind() == InodeKind::Symlink {
            return self.follow(&child);
        }
        self.enter(child)
    }

    /// Makes a child of where it is the new place, what covers it included.
    pub(super) fn enter(&mut self, child: Arc<Dentry>) -> Result<()> {
        let at = PathRef { mount: self.at.mount.clone(), dentry: child };
        if at.dentry.is_mountpoint() {
            let top = follow_mounts(at);
            if self.flags.contains(LookupFlags::NO_XDEV) && !Arc::ptr_eq(&top.mount, &self.at.mount) {
                return Err(Errno::EXDEV);
            }
            self.at = top;
        } else {
            self.at = at;
        }
        Ok(())
    }

    /// `..`
    pub(super) fn up(&mut self) -> Result<()> {
        loop {
            if self.at.is(&self.root) {
                if self.flags.contains(LookupFlags::BENEATH) {
                    return Err(Errno::EXDEV);
                }
                return Ok(());
            }
            if !Arc::ptr_eq(&self.at.dentry, self.at.mount.root()) {
                break;
            }
            let Some(on) = self.at.mount.mountpoint() else { return Ok(()) };
            if self.flags.contains(LookupFlags::NO_XDEV) {
                return Err(Errno::EXDEV);
            }
            self.at = on;
        }
        if let Some(parent) = self.at.dentry.parent() {
            self.at.dentry = parent;
        }
        if self.at.dentry.is_mountpoint() {
            self.at = follow_mounts(self.at.clone());
        }
        Ok(())
    }

    /// Follows the symbolic link `link`, a child of where it is: what it says comes before the rest.
    pub(super) fn follow(&mut self, link: &Arc<Dentry>) -> Result<()> {
        self.links += 1;
        if self.links > MAX_LINKS || self.flags.contains(LookupFlags::NO_SYMLINKS) {
            return Err(Errno::ELOOP);
        }
        if self.at.mount.flags().contains(MountFlags::NOSYMFOLLOW) {
            return Err(Errno::ELOOP);
        }
        if let Some(target) = link.inode().magic_link(self.cx.caller) {
            if self.flags.contains(LookupFlags::NO_MAGICLINKS) {
                return Err(Errno::ELOOP);
            }
            if self.flags.intersects(LookupFlags::BENEATH | LookupFlags::IN_ROOT) {
                return Err(Errno::EXDEV);
            }
            let target = target?;
            if self.flags.contains(LookupFlags::NO_XDEV) && !Arc::ptr_eq(&target.mount, &self.at.mount) {
                return Err(Errno::EXDEV);
            }
            self.at = target;
            return Ok(());
        }
        let mut text = link.inode().read_link_as(self.cx.caller)?;
        if text.is_empty() {
            return Err(Errno::ENOENT);
        }
        text.extend_from_slice(self.rest.get(self.pos..).unwrap_or_default());
        self.rest = text;
        self.pos = 0;
        let start = self.at.clone();
        self.begin(&start)
    }

    /// ENOTDIR, EACCES unless it may look for names where it is.
    fn require_search(&self) -> Result<()> {
        self.at.require_dir()?;
        super::attr::permission(&self.cx.credentials, self.at.inode(), super::attr::Access::EXEC)
    }
}

/// lseek(2) for an object with or without a position. SEEK_DATA and SEEK_HOLE see one piece of data up to the end.
pub fn default_seek(
    seekable: bool,
    size: impl FnOnce() -> Result<u64>,
    pos: u64,
    offset: i64,
    whence: u32,
) -> Result<u64> {
    if !seekable {
        return Err(Errno::ESPIPE);
    }
    let from = |base: u64| {
        let target = i64::try_from(base).ok().and_then(|b| b.checked_add(offset));
        match target {
            None => Err(Errno::EOVERFLOW),
            Some(t) => u64::try_from(t).map_err(|_| Errno::EINVAL),
        }
    };
    match whence {
        raw::SEEK_SET => u64::try_from(offset).map_err(|_| Errno::EINVAL),
        raw::SEEK_CUR => from(pos),
        raw::SEEK_END => from(size()?),
        raw::SEEK_DATA | raw::SEEK_HOLE => {
            let size = size()?;
            match u64::try_from(offset) {
                Ok(at) if at < size => Ok(if whence == raw::SEEK_DATA { at } else { size }),
                _ => Err(Errno::ENXIO),
            }
        }
        _ => Err(Errno::EINVAL),
    }
}
