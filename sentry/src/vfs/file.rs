//! Open file descriptions (open(2)) and what the object behind one can do.
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use bitflags::bitflags;
use linux_raw_sys::general as raw;

use super::PathRef;
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::mm::space::MappedFile;
use crate::mm::{AddressSpace, Charge, IoDest, IoSource, Mappable};
use crate::ns::user::Credentials;
use crate::platform::host::AttrChange;
use crate::{Errno, Result};

bitflags! {
    /// O_* of open(2), x86-64 values. The access mode is in the low two bits ([`OpenFlags::access`]).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct OpenFlags: u32 {
        /// O_WRONLY.
        const WRONLY = raw::O_WRONLY;
        /// O_RDWR.
        const RDWR = raw::O_RDWR;
        /// O_CREAT.
        const CREAT = raw::O_CREAT;
        /// O_EXCL.
        const EXCL = raw::O_EXCL;
        /// O_NOCTTY.
        const NOCTTY = raw::O_NOCTTY;
        /// O_TRUNC.
        const TRUNC = raw::O_TRUNC;
        /// O_APPEND.
        const APPEND = raw::O_APPEND;
        /// O_NONBLOCK.
        const NONBLOCK = raw::O_NONBLOCK;
        /// O_DSYNC.
        const DSYNC = raw::O_DSYNC;
        /// FASYNC.
        const ASYNC = raw::FASYNC;
        /// O_DIRECT.
        const DIRECT = raw::O_DIRECT;
        /// O_LARGEFILE.
        const LARGEFILE = raw::O_LARGEFILE;
        /// O_DIRECTORY.
        const DIRECTORY = raw::O_DIRECTORY;
        /// O_NOFOLLOW.
        const NOFOLLOW = raw::O_NOFOLLOW;
        /// O_NOATIME.
        const NOATIME = raw::O_NOATIME;
        /// O_CLOEXEC.
        const CLOEXEC = raw::O_CLOEXEC;
        /// O_SYNC.
        const SYNC = raw::O_SYNC;
        /// O_PATH.
        const PATH = raw::O_PATH;
        /// O_TMPFILE.
        const TMPFILE = raw::O_TMPFILE;
    }
}

impl OpenFlags {
    /// Whether reading is allowed.
    pub fn readable(self) -> bool {
        matches!(self.bits() & 3, 0 | 2)
    }
    /// Whether writing is allowed.
    pub fn writable(self) -> bool {
        matches!(self.bits() & 3, 1 | 2)
    }
}

/// Who performs an operation, as far as the VFS and what lies below may know. `task::Task` implements it.
pub trait Caller: Send + Sync + Any {
    /// Memory of the caller.
    fn space(&self) -> Result<Arc<AddressSpace>>;
    /// Credentials of the caller.
    fn credentials(&self) -> Arc<Credentials>;
    /// For downcasts to `task::Task` in `fs`.
    fn as_any(&self) -> &dyn Any;
}

/// The sentry itself as a caller: no memory, the given credentials (by default all-powerful).
pub struct KernelCaller(pub Arc<Credentials>);

impl Default for KernelCaller {
    fn default() -> Self {
        KernelCaller(Arc::new(Credentials::new(0, 0, Vec::new())))
    }
}

impl Caller for KernelCaller {
    fn space(&self) -> Result<Arc<AddressSpace>> {
        Err(Errno::EFAULT)
    }
    fn credentials(&self) -> Arc<Credentials> {
        self.0.clone()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Receives directory entries.
pub trait DirSink {
    /// Takes an entry; false when full (the entry was not taken). `next` is the position after this entry, `kind` a DT_* value.
    fn add(&mut self, name: &[u8], ino: u64, kind: u8, next: u64) -> bool;
}

/// What an open object can do. Defaults are Linux's answers for an object without the operation. No operation blocks: one
/// that would gives EAGAIN, and the system call waits on [`FileOps::wait_queue`] and tries again.
#[allow(unused_variables)]
pub trait FileOps: Send + Sync + Any {
    /// Reads at `pos` (ignored by streams).
    fn read(&self, file: &File, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
        Err(Errno::EINVAL)
    }
    /// Writes at `pos` (ignored by streams). With O_APPEND the object finds the end itself and the file position follows
    /// from [`FileOps::append_position`].
    fn write(&self, file: &File, src: &mut IoSource<'_>, pos: u64) -> Result<usize> {
        Err(Errno::EINVAL)
    }
    /// [`FileOps::read`] on behalf of a task; read(2) and its family call this one. For objects that answer by who asks
    /// (terminals, signalfd, sockets).
    fn read_as(&self, file: &File, caller: &dyn Caller, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
        self.read(file, dst, pos)
    }
    /// [`FileOps::write`] on behalf of a task; write(2) and its family call this one.
    fn write_as(&self, file: &File, caller: &dyn Caller, src: &mut IoSource<'_>, pos: u64) -> Result<usize> {
        self.write(file, src, pos)
    }
    /// Whether a blocking write(2) goes on until every byte is taken (pipes, stream sockets, terminals).
    fn writes_fully(&self) -> bool {
        false
    }
    /// How long a blocking read (or write) waits before it gives up with EAGAIN, ns (SO_RCVTIMEO, SO_SNDTIMEO).
    fn io_timeout(&self, write: bool) -> Option<u64> {
        None
    }
    /// Whether open(2) has to wait for another opener (a FIFO): it waits on [`FileOps::wait_queue`] for any event and asks
    /// again, as long as this is true. Interrupted, it gives up the description.
    fn open_blocks(&self) -> bool {
        false
    }
    /// A further description of the same object, as opening its link in /proc/PID/fd gives for an object without a path
    /// (pipes). Sockets and most anonymous inodes refuse.
    fn reopen(&self, caller: &dyn Caller, flags: OpenFlags) -> Result<super::OpenResult> {
        Err(Errno::ENXIO)
    }
    /// Whether it has a position (pread, lseek); streams do not.
    fn seekable(&self) -> bool {
        false
    }
    /// Length, for SEEK_END and O_APPEND.
    fn size(&self) -> Result<u64> {
        Err(Errno::ESPIPE)
    }
    /// lseek(2) given the current position; the default serves SEEK_SET, SEEK_CUR, SEEK_END, SEEK_DATA, SEEK_HOLE.
    fn seek(&self, file: &File, pos: u64, offset: i64, whence: u32) -> Result<u64> {
        super::path::default_seek(self.seekable(), || self.size(), pos, offset, whence)
    }
    /// Where an O_APPEND write that just ended left the end of the object; the file position follows.
    fn append_position(&self, file: &File) -> Result<u64> {
        self.size()
    }
    /// Readiness now.
    fn poll(&self, file: &File) -> Events {
        Events::READABLE | Events::WRITABLE
    }
    /// Readiness for a task that asks: poll(2) and its family call this one. For objects that answer by who asks (signalfd).
    fn poll_as(&self, file: &File, caller: &dyn Caller) -> Events {
        self.poll(file)
    }
    /// The queue that fires when readiness may have changed. None: always ready.
    fn wait_queue(&self) -> Option<Arc<WaitQueue>> {
        None
    }
    /// The queue that fires when readiness for a task that asks may have changed.
    fn wait_queue_as(&self, caller: &dyn Caller) -> Option<Arc<WaitQueue>> {
        self.wait_queue()
    }
    /// None: a wake reaches everybody who waits to read or to write. Some: it reaches one of them, and this says whether `events` are
    /// true, so that the next is to be woken when that one is done.
    fn more_for_next(&self, events: Events) -> Option<bool> {
        None
    }
    /// About to wait for `events`: host-backed objects arm their readiness here.
    fn arm(&self, events: Events) {}
    /// ioctl(2) other than FIOCLEX, FIONCLEX, FIONBIO, FIOASYNC, which the system call serves.
    fn ioctl(&self, file: &File, caller: &dyn Caller, request: u32, arg: u64) -> Result<u64> {
        Err(Errno::ENOTTY)
    }
    /// Feeds entries from position `pos` on, `.` and `..` included; gives the position to continue at.
    fn read_dir(&self, file: &File, caller: &dyn Caller, pos: u64, sink: &mut dyn DirSink) -> Result<u64> {
        Err(Errno::ENOTDIR)
    }
    /// What mmap(2) maps.
    fn mappable(&self) -> Result<Arc<dyn Mappable>> {
        Err(Errno::ENODEV)
    }
    /// ftruncate(2).
    fn truncate(&self, len: u64) -> Result<()> {
        Err(Errno::EINVAL)
    }
    /// fallocate(2).
    fn allocate(&self, mode: u32, offset: u64, len: u64) -> Result<()> {
        Err(Errno::ENODEV)
    }
    /// Whether mmap(2) gives anonymous memory (/dev/zero).
    fn maps_anonymous(&self) -> bool {
        false
    }
    /// F_GET_SEALS; None: the object knows no seals (EINVAL).
    fn seals(&self) -> Option<u32> {
        None
    }
    /// F_ADD_SEALS.
    fn add_seals(&self, seals: u32) -> Result<()> {
        Err(Errno::EINVAL)
    }
    /// fsync(2), fdatasync(2).
    fn sync(&self, data_only: bool) -> Result<()> {
        Err(Errno::EINVAL)
    }
    /// stat of an object that has no path (pipes, sockets, anonymous inodes); None: the dentry's inode answers.
    fn stat(&self) -> Option<Result<guest_abi::types::Stat>> {
        None
    }
    /// Attribute change of an object that has no path.
    fn set_attr(&self, change: &AttrChange) -> Option<Result<()>> {
        None
    }
    /// A descriptor of this description was closed (close(2)'s flush).
    fn flush(&self, file: &File) {}
    /// The last descriptor and mapping are gone.
    fn release(&self, file: &File) {}
    /// The link text in /proc/PID/fd for an object without a path, such as `pipe:[12]`.
    fn proc_name(&self) -> Vec<u8> {
        b"anon_inode:[unknown]".to_vec()
    }
    /// The terminal it is, as a `task::session::Terminal`.
    fn terminal(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }
    /// Lines for /proc/PID/fdinfo/N after pos, flags, mnt_id, ino.
    fn fdinfo(&self) -> Vec<u8> {
        Vec::new()
    }
    /// [`FileOps::fdinfo`] for a reader who sees the numbers of a `task::PidNamespace`, which `reader` is.
    fn fdinfo_for(&self, reader: &dyn Any) -> Vec<u8> {
        self.fdinfo()
    }
    /// Bytes of the sentry's memory that the object and its description take for as long as they exist, roughly and rather too
    /// much; what changes with use has charges of its own.
    fn footprint(&self) -> usize {
        1024
    }
    /// For downcasts.
    fn as_any(&self) -> &dyn Any;
}

/// An open file description.
pub struct File {
    /// Since it first had a descriptor.
    charge: OnceLock<Charge>,
    ops: Arc<dyn FileOps>,
    path: Option<PathRef>,
    flags: AtomicU32,
    pos: Mutex<u64>,
    owner: Mutex<FileOwner>,
    watchers: Mutex<Vec<Weak<dyn CloseWatcher>>>,
    /// Whether flock(2) or an open file description lock may be held through it.
    pub(super) locked: AtomicBool,
}

/// Told when the last reference to an open file description is gone (epoll's items).
pub trait CloseWatcher: Send + Sync {
    /// The description is no more. Called with no lock held.
    fn closed(&self);
}

/// F_SETOWN, F_SETSIG state (fcntl(2)).
#[derive(Clone, Default)]
pub struct FileOwner {
    /// F_OWNER_* type.
    pub kind: i32,
    /// Who, as a `task::Pid`; each reader sees the number of its own PID namespace.
    pub who: Option<Arc<dyn Any + Send + Sync>>,
    /// F_SETSIG.
    pub signal: i32,
}

impl File {
    /// A new description. `path` is None for objects without one.
    pub fn new(ops: Arc<dyn FileOps>, path: Option<PathRef>, flags: OpenFlags) -> Arc<File> {
        Arc::new(File {
            charge: OnceLock::new(),
            ops,
            path,
            flags: AtomicU32::new(flags.bits()),
            pos: Mutex::new(Rank::FilePosition, 0),
            owner: Mutex::new(Rank::Leaf, FileOwner::default()),
            watchers: Mutex::new(Rank::Leaf, Vec::new()),
            locked: AtomicBool::new(false),
        })
    }

    /// Charges the description to the account of `table`, once. ENOMEM.
    pub(super) fn charge(&self, table: &Charge) -> Result<()> {
        if self.charge.get().is_none() {
            let _ = self.charge.set(table.another(self.ops.footprint())?);
        }
        Ok(())
    }

    /// The object.
    pub fn ops(&self) -> &Arc<dyn FileOps> {
        &self.ops
    }

    /// The object as a concrete type.
    pub fn downcast<T: 'static>(&self) -> Option<&T> {
        self.ops.as_any().downcast_ref()
    }

    /// Where it was opened.
    pub fn path(&self) -> Option<&PathRef> {
        self.path.as_ref()
    }

    /// The inode, for what was opened by path.
    pub fn inode(&self) -> Option<&Arc<dyn super::Inode>> {
        self.path.as_ref().map(PathRef::inode)
    }

    /// Type of the inode, for what was opened by path.
    pub fn kind(&self) -> Option<super::InodeKind> {
        self.path.as_ref().map(|p| p.dentry.kind())
    }

    /// Whether it is an O_PATH description, good for naming a place only.
    pub fn is_path_only(&self) -> bool {
        self.flags().contains(OpenFlags::PATH)
    }

    /// fstat(2).
    pub fn stat(&self) -> Result<guest_abi::types::Stat> {
        match (self.ops.stat(), &self.path) {
            (Some(answer), _) => answer,
            (None, Some(path)) => path.inode().stat(),
            (None, None) => Err(Errno::EBADF),
        }
    }

    /// Changes attributes.
    pub fn set_attr(&self, change: &AttrChange) -> Result<()> {
        match (self.ops.set_attr(change), &self.path) {
            (Some(answer), _) => answer,
            (None, Some(path)) => path.inode().set_attr(change),
            (None, None) => Err(Errno::EPERM),
        }
    }

    /// Access mode and status flags (F_GETFL).
    pub fn flags(&self) -> OpenFlags {
        OpenFlags::from_bits_retain(self.flags.load(Ordering::Relaxed))
    }

    /// Changes status flags (F_SETFL): only those in `mask`.
    pub fn set_flags(&self, value: OpenFlags, mask: OpenFlags) {
        let _ = self.flags.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| {
            Some((old & !mask.bits()) | (value.bits() & mask.bits()))
        });
    }

    /// Whether O_NONBLOCK is set.
    pub fn nonblocking(&self) -> bool {
        self.flags().contains(OpenFlags::NONBLOCK)
    }

    /// The position, locked for the length of a read or write as POSIX asks.
    pub fn position(&self) -> crate::lock::MutexGuard<'_, u64> {
        self.pos.lock()
    }

    /// The position for a reader that must not wait for a read or write in progress (/proc/PID/fdinfo); 0 during one.
    pub fn position_seen(&self) -> u64 {
        self.pos.try_lock().map_or(0, |pos| *pos)
    }

    /// F_SETOWN state.
    pub fn owner(&self) -> crate::lock::MutexGuard<'_, FileOwner> {
        self.owner.lock()
    }

    /// Tells `watcher` when the description ends; forgotten once it is gone itself.
    pub fn watch_close(&self, watcher: Weak<dyn CloseWatcher>) {
        let mut watchers = self.watchers.lock();
        if watchers.len() == watchers.capacity() {
            watchers.retain(|w| w.strong_count() > 0);
        }
        watchers.push(watcher);
    }
}

impl Drop for File {
    fn drop(&mut self) {
        for watcher in core::mem::take(self.watchers.get_mut()) {
            if let Some(w) = watcher.upgrade() {
                w.closed();
            }
        }
        super::lock::release_file(self);
        super::notify::closed(self);
        let ops = self.ops.clone();
        ops.release(self);
    }
}

impl MappedFile for File {
    fn maps_path(&self) -> Vec<u8> {
        self.path.as_ref().map_or_else(|| self.ops.proc_name(), PathRef::absolute)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
