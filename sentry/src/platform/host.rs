//! Traits for what lies outside the sandbox: host directory trees, host files with windows into guest-physical memory, and
//! byte streams such as the caller's standard streams. Types and traits only.
use std::sync::Arc;

use guest_abi::Errno;
use guest_abi::types::{Stat, Timespec};

use super::{PhysAddr, PhysRange};
use crate::event::{Events, WaitQueue};

/// An entry of a host directory.
#[derive(Clone, Debug)]
pub struct HostDirEntry {
    /// Name, without `.` and `..`.
    pub name: Vec<u8>,
    /// Inode number.
    pub ino: u64,
    /// DT_* of <dirent.h>.
    pub kind: u8,
}

/// Changes to an inode's attributes; None leaves a field.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttrChange {
    /// Permission bits (07777).
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length in bytes.
    pub size: Option<u64>,
    /// Last access.
    pub atime: Option<Timespec>,
    /// Last modification.
    pub mtime: Option<Timespec>,
}

/// What kind of node to make in a host tree.
#[derive(Clone, Copy, Debug)]
pub enum HostCreate<'a> {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link with its target.
    Symlink(&'a [u8]),
    /// A FIFO or socket inode (S_IFIFO, S_IFSOCK).
    Special(u32),
}

/// A host directory opened once. Paths are relative to it, `/`-separated, without `.` or `..`, empty for the tree itself;
/// no symbolic link is ever followed (a link in the middle gives ELOOP), and nothing outside the tree can be reached.
pub trait HostTree: Send + Sync {
    /// stat of the node itself.
    fn stat(&self, path: &[u8]) -> Result<Stat, Errno>;
    /// Target of a symbolic link.
    fn read_link(&self, path: &[u8]) -> Result<Vec<u8>, Errno>;
    /// All entries, in the host's order.
    fn read_dir(&self, path: &[u8]) -> Result<Vec<HostDirEntry>, Errno>;
    /// Opens a regular file. EROFS for `write` on a read-only tree.
    fn open(&self, path: &[u8], write: bool) -> Result<Arc<dyn HostFile>, Errno>;
    /// An extended attribute.
    fn get_xattr(&self, path: &[u8], name: &[u8]) -> Result<Vec<u8>, Errno>;
    /// Names of extended attributes.
    fn list_xattr(&self, path: &[u8]) -> Result<Vec<Vec<u8>>, Errno>;
    /// f_type, f_bsize, f_blocks, f_bfree, f_bavail, f_files, f_ffree, f_namelen of statfs(2).
    fn statfs(&self) -> Result<[u64; 8], Errno>;
    /// Whether changes are allowed at all.
    fn writable(&self) -> bool;
    /// Makes a node with permission bits `mode`; EEXIST if there is one.
    fn create(&self, path: &[u8], what: HostCreate<'_>, mode: u32) -> Result<(), Errno>;
    /// Makes a hard link `to` to `from`.
    fn link(&self, from: &[u8], to: &[u8]) -> Result<(), Errno>;
    /// Removes a name; `dir` as rmdir(2).
    fn remove(&self, path: &[u8], dir: bool) -> Result<(), Errno>;
    /// rename with RENAME_* flags of renameat2(2).
    fn rename(&self, from: &[u8], to: &[u8], flags: u32) -> Result<(), Errno>;
    /// Changes attributes.
    fn set_attr(&self, path: &[u8], change: &AttrChange) -> Result<(), Errno>;
}

/// An open regular host file.
pub trait HostFile: Send + Sync {
    /// fstat.
    fn stat(&self) -> Result<Stat, Errno>;
    /// Reads at `offset` straight into guest memory; bytes read, 0 at the end.
    fn read_phys(&self, offset: u64, dst: &[PhysRange]) -> Result<usize, Errno>;
    /// Reads at `offset`.
    fn read(&self, offset: u64, dst: &mut [u8]) -> Result<usize, Errno>;
    /// Writes at `offset` straight from guest memory.
    fn write_phys(&self, offset: u64, src: &[PhysRange]) -> Result<usize, Errno>;
    /// Writes at `offset`.
    fn write(&self, offset: u64, src: &[u8]) -> Result<usize, Errno>;
    /// Sets the length.
    fn truncate(&self, len: u64) -> Result<(), Errno>;
    /// fsync, or fdatasync if `data_only`.
    fn sync(&self, data_only: bool) -> Result<(), Errno>;
    /// Maps the extent of [`WINDOW_LEN`] bytes that starts at `index * WINDOW_LEN` into guest-physical memory, sharing
    /// the host's page cache. Writable only if the file was opened so.
    fn window(&self, index: u64) -> Result<Arc<dyn Window>, Errno>;
    /// As `window`, for private mappings only: whether a later change of the file shows there is unspecified, as mmap(2) has
    /// it. Windows of different `version`s are never the same, so that a new mapping shows what the file is now.
    fn private_window(&self, index: u64, version: u64) -> Result<Arc<dyn Window>, Errno> {
        let _ = version;
        self.window(index)
    }
}

/// Bytes of a file that one window covers: 2 MiB.
pub const WINDOW_LEN: u64 = 2 << 20;

/// A file extent in guest-physical memory. Dropping the last handle unmaps it: no page-table entry may name it by then.
pub trait Window: Send + Sync {
    /// First byte, page-aligned; [`WINDOW_LEN`] bytes are addressable, those past the end of the file fault.
    fn base(&self) -> PhysAddr;
    /// `pages` pages from `pa` on are about to be mapped: a hint to make their first use cheap.
    fn expect(&self, pa: PhysAddr, pages: usize) {
        let _ = (pa, pages);
    }
}

/// A byte stream of the host: a pipe, terminal, socket, character device or file given by the caller. Never blocks, and
/// never changes a flag of an open file description that the caller shares.
pub trait HostStream: Send + Sync {
    /// fstat.
    fn stat(&self) -> Result<Stat, Errno>;
    /// Reads what is there; EAGAIN if nothing is yet, 0 at the end.
    fn read(&self, dst: &mut [u8]) -> Result<usize, Errno>;
    /// Writes what fits; EAGAIN if nothing does, EPIPE without SIGPIPE.
    fn write(&self, src: &[u8]) -> Result<usize, Errno>;
    /// Reads straight into guest memory.
    fn read_phys(&self, dst: &[PhysRange]) -> Result<usize, Errno>;
    /// Writes straight from guest memory.
    fn write_phys(&self, src: &[PhysRange]) -> Result<usize, Errno>;
    /// Current readiness.
    fn poll(&self) -> Events;
    /// Fires on readiness; armed for `interest` from now on until it fired once for it.
    fn wait_queue(&self) -> Arc<WaitQueue>;
    /// Asks for a wake of the queue when `interest` becomes true (one shot).
    fn arm(&self, interest: Events);
    /// Whether it is a terminal.
    fn is_terminal(&self) -> bool;
    /// A terminal request that does not concern sessions (TCGETS, TCSETS*, TIOCGWINSZ, TIOCSWINSZ, FIONREAD …): `data` goes in
    /// and comes out. ENOTTY if the stream does not know it.
    fn terminal_request(&self, request: u32, data: &mut [u8]) -> Result<u64, Errno>;
    /// ftruncate for a stream that is a regular file open for writing; EINVAL otherwise.
    fn truncate(&self, _len: u64) -> Result<(), Errno> {
        Err(Errno::EINVAL)
    }
    /// lseek for a stream that is a regular file; ESPIPE otherwise.
    fn seek(&self, offset: i64, whence: u32) -> Result<u64, Errno>;
}
