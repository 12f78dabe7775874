//! POSIX message queues as files: what mq_open(2) opens, and the file system `mqueue` that shows the queues of a namespace
//! (mq_overview(7)). Owns neither messages nor names, which are the IPC namespace's.
use std::any::Any;
use std::sync::Arc;

use guest_abi::types::{Stat, Timespec};

use super::new_device;
use super::tmpfs::attr;
use crate::event::{Events, WaitQueue};
use crate::mm::IoDest;
use crate::ns::ipc::IpcNamespace;
use crate::ns::mq::{MqQueue, NewQueue};
use crate::platform::Platform;
use crate::platform::host::AttrChange;
use crate::task::Task;
use crate::task::limits::Resource;
use crate::vfs::file::Caller;
use crate::vfs::inode::Create;
use crate::vfs::{DirSink, File, FileOps, FileSystem, Inode, InodeKind, OpenFlags, OpenResult, PathRef};
use crate::{Errno, Result};

const MQUEUE_MAGIC: u64 = 0x1980_0202;
/// Bytes that the status text of a queue is said to have.
const STATUS_LEN: i64 = 80;

/// An open queue.
pub struct MqFile {
    queue: Arc<MqQueue>,
    name: Vec<u8>,
    dev: u64,
}

impl MqFile {
    /// The queue of `name` (without a slash).
    pub fn new(queue: Arc<MqQueue>, name: &[u8], dev: u64) -> MqFile {
        MqFile { queue, name: name.to_vec(), dev }
    }

    /// The queue.
    pub fn queue(&self) -> &Arc<MqQueue> {
        &self.queue
    }
}

fn stat_of(queue: &MqQueue, dev: u64) -> Stat {
    let (mode, uid, gid) = queue.access_attr();
    let [atime, mtime, ctime] = queue.times().map(|sec| Timespec { sec, nsec: 0 });
    Stat {
        dev,
        ino: queue.ino,
        nlink: 1,
        mode: InodeKind::Regular.mode() | mode,
        uid,
        gid,
        size: STATUS_LEN,
        blksize: 4096,
        atime,
        mtime,
        ctime,
        ..Stat::default()
    }
}

impl FileOps for MqFile {
    fn read(&self, _: &File, _: &mut IoDest<'_>, _: u64) -> Result<usize> {
        Err(Errno::EINVAL)
    }

    fn read_as(&self, _: &File, caller: &dyn Caller, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
        let reader = caller.as_any().downcast_ref::<Task>().ok_or(Errno::EINVAL)?;
        let (bytes, notified) = self.queue.status();
        let notified = notified.filter(|n| n.is_alive());
        let (kind, signal, pid) = notified.map_or((0, 0, 0), |n| n.shown(reader.pid_namespace()));
        let text = format!("QSIZE:{bytes:<10} NOTIFY:{kind:<5} SIGNO:{signal:<5} NOTIFY_PID:{pid:<6}\n");
        let rest = text.as_bytes().get(usize::try_from(pos).unwrap_or(usize::MAX)..).unwrap_or_default();
        if rest.is_empty() || dst.remaining() == 0 {
            return Ok(0);
        }
        dst.put(rest.get(..dst.remaining().min(rest.len())).unwrap_or_default())
    }

    fn seekable(&self) -> bool {
        true
    }

    fn size(&self) -> Result<u64> {
        Ok(STATUS_LEN as u64)
    }

    fn poll(&self, _: &File) -> Events {
        self.queue.poll()
    }

    fn wait_queue(&self) -> Option<Arc<WaitQueue>> {
        Some(self.queue.events.clone())
    }

    fn stat(&self) -> Option<Result<Stat>> {
        Some(Ok(stat_of(&self.queue, self.dev)))
    }

    fn set_attr(&self, change: &AttrChange) -> Option<Result<()>> {
        self.queue.set_attr(change.mode, change.uid, change.gid);
        Some(Ok(()))
    }

    fn proc_name(&self) -> Vec<u8> {
        [b"/", self.name.as_slice()].concat()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A mount of the queues of a namespace.
pub struct MqFs {
    root: Arc<Directory>,
}

impl MqFs {
    /// Of `ipc`.
    pub fn new(platform: &Arc<dyn Platform>, ipc: Arc<IpcNamespace>) -> Arc<MqFs> {
        let made = attr::now(&**platform);
        Arc::new(MqFs { root: Arc::new(Directory { ipc, dev: new_device(), platform: platform.clone(), made }) })
    }
}

impl FileSystem for MqFs {
    fn name(&self) -> &'static str {
        "mqueue"
    }
    fn root(&self) -> Arc<dyn Inode> {
        self.root.clone()
    }
    fn statfs(&self) -> Result<[u64; 8]> {
        Ok([MQUEUE_MAGIC, 4096, 0, 0, 0, 0, 0, 255])
    }
}

struct Directory {
    ipc: Arc<IpcNamespace>,
    dev: u64,
    platform: Arc<dyn Platform>,
    made: Timespec,
}

struct Entry {
    queue: Arc<MqQueue>,
    name: Vec<u8>,
    dev: u64,
}

impl Inode for Directory {
    fn kind(&self) -> InodeKind {
        InodeKind::Directory
    }
    fn stat(&self) -> Result<Stat> {
        Ok(Stat {
            dev: self.dev,
            ino: 1,
            nlink: 2,
            mode: InodeKind::Directory.mode() | 0o1777,
            size: 20 * self.ipc.mq.count() as i64,
            blksize: 4096,
            atime: self.made,
            mtime: self.made,
            ctime: self.made,
            ..Stat::default()
        })
    }
    fn cacheable(&self) -> bool {
        false
    }
    fn lookup(&self, name: &[u8]) -> Result<Arc<dyn Inode>> {
        let queue = self.ipc.mq.find(name).ok_or(Errno::ENOENT)?;
        Ok(Arc::new(Entry { queue, name: name.to_vec(), dev: self.dev }))
    }
    fn create(&self, name: &[u8], what: Create<'_>, mode: u32, uid: u32, gid: u32) -> Result<Arc<dyn Inode>> {
        if !matches!(what, Create::Regular) {
            return Err(Errno::EPERM);
        }
        // The VFS does not say who: only the owner's limit cannot be known here, the sandbox's memory bounds it.
        let by = crate::ns::user::Credentials::new(uid, gid, Vec::new());
        let now = attr::now(&*self.platform).sec;
        let new = NewQueue { mode, attr: None, limit: u64::MAX, now };
        let queue = self.ipc.mq.create(&self.platform, name, &new, &by)?;
        Ok(Arc::new(Entry { queue, name: name.to_vec(), dev: self.dev }))
    }
    fn unlink(&self, name: &[u8]) -> Result<()> {
        self.ipc.mq.remove(name).map(|_| ()).ok_or(Errno::ENOENT)
    }
    fn open(self: Arc<Self>, _: &dyn Caller, _: &PathRef, flags: OpenFlags) -> Result<OpenResult> {
        if flags.writable() {
            return Err(Errno::EISDIR);
        }
        Ok(OpenResult::Ops(Arc::new(Opened(self))))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct Opened(Arc<Directory>);

impl FileOps for Opened {
    fn read(&self, _: &File, _: &mut IoDest<'_>, _: u64) -> Result<usize> {
        Err(Errno::EISDIR)
    }
    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        Ok(i64::MAX as u64)
    }
    fn read_dir(&self, file: &File, _: &dyn Caller, mut pos: u64, sink: &mut dyn DirSink) -> Result<u64> {
        let dots = [(&b"."[..], 1), (b"..", super::parent_ino(file).unwrap_or(1))];
        while let Some((name, ino)) = dots.get(usize::try_from(pos).unwrap_or(usize::MAX)) {
            if !sink.add(name, *ino, InodeKind::Directory.dirent(), pos + 1) {
                return Ok(pos);
            }
            pos += 1;
        }
        let from = usize::try_from(pos - 2).unwrap_or(usize::MAX);
        for (name, ino) in self.0.ipc.mq.names(from, 256) {
            if !sink.add(&name, ino, InodeKind::Regular.dirent(), pos + 1) {
                break;
            }
            pos += 1;
        }
        Ok(pos)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Inode for Entry {
    fn kind(&self) -> InodeKind {
        InodeKind::Regular
    }
    fn stat(&self) -> Result<Stat> {
        Ok(stat_of(&self.queue, self.dev))
    }
    fn set_attr(&self, change: &AttrChange) -> Result<()> {
        self.queue.set_attr(change.mode, change.uid, change.gid);
        Ok(())
    }
    fn open(self: Arc<Self>, _: &dyn Caller, _: &PathRef, _: OpenFlags) -> Result<OpenResult> {
        Ok(OpenResult::Ops(Arc::new(MqFile::new(self.queue.clone(), &self.name, self.dev))))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// What RLIMIT_MSGQUEUE allows `task`.
pub fn allowed(task: &Task) -> u64 {
    task.limit(Resource::Msgqueue)
}
