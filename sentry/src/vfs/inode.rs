//! Inodes and file systems: what a file system implements.
use std::any::Any;
use std::sync::Arc;

use guest_abi::types::Stat;

use super::file::Caller;
use super::{FileOps, OpenFlags, PathRef};
use crate::platform::host::AttrChange;
use crate::{Errno, Result};

/// The type of an inode; S_IF* >> 12.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum InodeKind {
    Fifo = 1,
    CharDevice = 2,
    Directory = 4,
    BlockDevice = 6,
    Regular = 8,
    Symlink = 10,
    Socket = 12,
}

impl InodeKind {
    /// S_IF* bits of st_mode.
    pub const fn mode(self) -> u32 {
        (self as u32) << 12
    }
    /// DT_* value of a directory entry.
    pub const fn dirent(self) -> u8 {
        self as u8
    }
    /// From st_mode.
    pub const fn from_mode(mode: u32) -> Option<InodeKind> {
        Some(match (mode >> 12) & 15 {
            1 => InodeKind::Fifo,
            2 => InodeKind::CharDevice,
            4 => InodeKind::Directory,
            6 => InodeKind::BlockDevice,
            8 => InodeKind::Regular,
            10 => InodeKind::Symlink,
            12 => InodeKind::Socket,
            _ => return None,
        })
    }
}

/// What opening an inode gives.
pub enum OpenResult {
    /// An object; the VFS makes the open file description.
    Ops(Arc<dyn FileOps>),
    /// A whole description made by the file system (/dev/fd, /dev/tty, ptmx).
    File(Arc<super::File>),
}

/// What the caller wants to make.
#[derive(Clone, Copy, Debug)]
pub enum Create<'a> {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link to the target.
    Symlink(&'a [u8]),
    /// A FIFO, socket or device inode.
    Node(InodeKind, u64),
}

/// A file-system object. The VFS has checked permissions and name lengths before it calls; it holds no lock over a call.
/// Concurrent changes to one directory are serialized by the VFS (it holds the directory dentry's lock).
#[allow(unused_variables)]
pub trait Inode: Send + Sync + Any {
    /// Type, constant for the inode's life.
    fn kind(&self) -> InodeKind;
    /// stat(2). `st_dev` as the file system reports it.
    fn stat(&self) -> Result<Stat>;
    /// Permission bits with suid, sgid and sticky, owner, group: what every permission check asks for. File systems that
    /// hold them at hand answer without a whole stat.
    fn access_attr(&self) -> Result<(u32, u32, u32)> {
        let stat = self.stat()?;
        Ok((stat.mode & 0o7777, stat.uid, stat.gid))
    }
    /// Changes attributes.
    fn set_attr(&self, change: &AttrChange) -> Result<()> {
        Err(Errno::EPERM)
    }
    /// Finds a child. ENOENT if there is none.
    fn lookup(&self, name: &[u8]) -> Result<Arc<dyn Inode>> {
        Err(Errno::ENOTDIR)
    }
    /// Whether the VFS may keep what `lookup` gave (not for /proc and other changing trees).
    fn cacheable(&self) -> bool {
        true
    }
    /// Whether the name that led here is known to lead elsewhere by now (a host changed its tree): the VFS then looks it up
    /// again. Cheap.
    fn is_stale(&self) -> bool {
        false
    }
    /// Makes a child owned by `uid`:`gid`. EEXIST if there is one.
    fn create(&self, name: &[u8], what: Create<'_>, mode: u32, uid: u32, gid: u32) -> Result<Arc<dyn Inode>> {
        Err(Errno::EROFS)
    }
    /// An unnamed file (O_TMPFILE).
    fn create_unnamed(&self, mode: u32, uid: u32, gid: u32) -> Result<Arc<dyn Inode>> {
        Err(Errno::EOPNOTSUPP)
    }
    /// Makes `name` another link to `target` of the same file system.
    fn link(&self, name: &[u8], target: &Arc<dyn Inode>) -> Result<()> {
        Err(Errno::EPERM)
    }
    /// Removes a non-directory.
    fn unlink(&self, name: &[u8]) -> Result<()> {
        Err(Errno::EROFS)
    }
    /// Removes an empty directory.
    fn rmdir(&self, name: &[u8]) -> Result<()> {
        Err(Errno::EROFS)
    }
    /// Moves `name` to `new_name` in `new_dir` of the same file system; flags RENAME_NOREPLACE, RENAME_EXCHANGE.
    fn rename(&self, name: &[u8], new_dir: &Arc<dyn Inode>, new_name: &[u8], flags: u32) -> Result<()> {
        Err(Errno::EROFS)
    }
    /// Target text of a symbolic link.
    fn read_link(&self) -> Result<Vec<u8>> {
        Err(Errno::EINVAL)
    }
    /// Target text as `caller` sees it (/proc/self differs by reader). Path resolution and readlink(2) ask this one.
    fn read_link_as(&self, caller: &dyn Caller) -> Result<Vec<u8>> {
        self.read_link()
    }
    /// Where a magic link leads (/proc/PID/{exe,cwd,root,fd/N}) in place of following its text.
    fn magic_link(&self, caller: &dyn Caller) -> Option<Result<PathRef>> {
        None
    }
    /// Opens it. `path` is where; O_CREAT, O_EXCL and O_TRUNC are the VFS's business.
    fn open(self: Arc<Self>, caller: &dyn Caller, path: &PathRef, flags: OpenFlags) -> Result<OpenResult>;
    /// An extended attribute.
    fn get_xattr(&self, name: &[u8]) -> Result<Vec<u8>> {
        Err(Errno::EOPNOTSUPP)
    }
    /// Sets an extended attribute; `flags` XATTR_CREATE, XATTR_REPLACE.
    fn set_xattr(&self, name: &[u8], value: &[u8], flags: u32) -> Result<()> {
        Err(Errno::EOPNOTSUPP)
    }
    /// Removes an extended attribute.
    fn remove_xattr(&self, name: &[u8]) -> Result<()> {
        Err(Errno::EOPNOTSUPP)
    }
    /// Names of extended attributes.
    fn list_xattr(&self) -> Result<Vec<Vec<u8>>> {
        Ok(Vec::new())
    }
    /// A place for state that belongs to the inode while it is open somewhere (FIFO buffer, bound socket, locks, watches).
    fn attachments(&self) -> Option<&super::Attachments> {
        None
    }
    /// For downcasts.
    fn as_any(&self) -> &dyn Any;
}

/// A mounted file system.
pub trait FileSystem: Send + Sync {
    /// Name in /proc/mounts, such as `tmpfs`.
    fn name(&self) -> &'static str;
    /// The root directory.
    fn root(&self) -> Arc<dyn Inode>;
    /// f_type, f_bsize, f_blocks, f_bfree, f_bavail, f_files, f_ffree, f_namelen of statfs(2).
    fn statfs(&self) -> Result<[u64; 8]>;
}
