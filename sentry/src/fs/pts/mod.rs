//! devpts: the file system of pseudo-terminals (pts(4)). Owns their numbers and names.
mod ends;
mod pty;
mod requests;

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use guest_abi::types::{Stat, Timespec};

use super::anon::timestamp;
use super::dev::makedev;
use super::stdio::{HostTerminal, HostTerminals};
use crate::kernel::Kernel;
use crate::lock::{Mutex, Rank};
use crate::platform::Platform;
use crate::platform::host::AttrChange;
use crate::task::Task;
use crate::vfs::file::Caller;
use crate::vfs::{Attachments, DirSink, File, FileOps, FileSystem, Inode, InodeKind, OpenFlags, OpenResult, PathRef};
use crate::{Errno, Result};
use ends::{PtyMaster, PtySlave};
pub use pty::Pty;

/// Pseudo-terminals of one mount (kernel.pty.max).
const MAX: u32 = 4096;
/// DEVPTS_SUPER_MAGIC.
const MAGIC: u64 = 0x1cd1;
/// The group of terminals (gid=5 by convention).
const TTY_GROUP: u32 = 5;
/// Major number of pseudo-terminal slaves.
const MAJOR: u64 = 136;
const ROOT_INO: u64 = 1;
const PTMX_INO: u64 = 2;

/// Device number of a slave.
pub const fn device(index: u32) -> u64 {
    makedev(MAJOR, index as u64)
}

/// Attributes of a terminal of the caller as the sandbox's devpts, whose st_dev is `dev`, shows it.
pub(super) fn host_terminal_stat(dev: u64, index: u32, host: &Stat) -> Stat {
    Stat { dev, ino: u64::from(index) + 3, nlink: 1, rdev: device(index), blksize: 1024, blocks: 0, size: 0, ..*host }
}

/// What all inodes of one devpts share.
pub(super) struct Shared {
    platform: Arc<dyn Platform>,
    dev: u64,
    born: Timespec,
    hosts: Arc<HostTerminals>,
    entries: Mutex<BTreeMap<u32, Arc<Pty>>>,
}

impl Shared {
    /// Whether this is the devpts that shows the caller's own terminals.
    fn primary(&self) -> bool {
        self.hosts.shown_in(self.dev)
    }

    fn forget(&self, index: u32) {
        let old = self.entries.lock().remove(&index);
        drop(old);
    }

    fn find(&self, index: u32) -> Option<Arc<Pty>> {
        self.entries.lock().get(&index).cloned()
    }

    /// A new pseudo-terminal at the lowest free number.
    fn allocate(self: &Arc<Self>, task: &Task) -> Result<Arc<Pty>> {
        let cred = task.credentials();
        // The caller's own terminals have the first numbers of the sandbox's devpts.
        let mut index = if self.primary() { self.hosts.end() } else { 0 };
        let mut entries = self.entries.lock();
        for &used in entries.keys() {
            if used != index {
                break;
            }
            index += 1;
        }
        if index >= MAX {
            return Err(Errno::ENOSPC);
        }
        let now = timestamp(self.platform.realtime());
        let rdev = device(index);
        let stat = Stat {
            dev: self.dev,
            ino: u64::from(index) + 3,
            nlink: 1,
            mode: 0o020_620,
            uid: cred.fsuid,
            gid: TTY_GROUP,
            rdev,
            blksize: 1024,
            atime: now,
            mtime: now,
            ctime: now,
            ..Stat::default()
        };
        let pty = Pty::new(self, index, rdev, stat);
        entries.insert(index, pty.clone());
        Ok(pty)
    }
}

/// A mounted devpts.
pub struct DevPts {
    root: Arc<Root>,
}

impl DevPts {
    /// An instance without terminals of its own; the first of a sandbox shows those of the host.
    pub fn new(kernel: &Kernel) -> Arc<DevPts> {
        let (platform, hosts) = (kernel.platform.clone(), kernel.terminals.clone());
        let born = timestamp(platform.realtime());
        let dev = super::new_device();
        hosts.show_in(dev);
        let entries = Mutex::new(Rank::Inode, BTreeMap::new());
        let shared = Arc::new(Shared { platform, dev, born, hosts, entries });
        Arc::new(DevPts { root: Arc::new(Root { shared, attachments: Attachments::default() }) })
    }
}

impl FileSystem for DevPts {
    fn name(&self) -> &'static str {
        "devpts"
    }
    fn root(&self) -> Arc<dyn Inode> {
        self.root.clone()
    }
    fn statfs(&self) -> Result<[u64; 8]> {
        Ok([MAGIC, 4096, 0, 0, 0, 0, 0, 255])
    }
}

/// The root directory.
struct Root {
    shared: Arc<Shared>,
    attachments: Attachments,
}

impl Root {
    fn plain(&self, ino: u64, mode: u32, rdev: u64, nlink: u64) -> Stat {
        let at = self.shared.born;
        Stat {
            dev: self.shared.dev,
            ino,
            nlink,
            mode,
            rdev,
            blksize: 1024,
            atime: at,
            mtime: at,
            ctime: at,
            ..Stat::default()
        }
    }
}

impl Inode for Root {
    fn kind(&self) -> InodeKind {
        InodeKind::Directory
    }
    fn stat(&self) -> Result<Stat> {
        Ok(self.plain(ROOT_INO, 0o040_755, 0, 2))
    }
    fn lookup(&self, name: &[u8]) -> Result<Arc<dyn Inode>> {
        if name == b"ptmx" {
            let stat = self.plain(PTMX_INO, 0o020_666, super::dev::PTMX, 1);
            return Ok(Arc::new(Ptmx { shared: self.shared.clone(), stat }));
        }
        let index = core::str::from_utf8(name).ok().and_then(|n| n.parse::<u32>().ok());
        let index = index.filter(|i| i.to_string().as_bytes() == name).ok_or(Errno::ENOENT)?;
        if self.shared.primary()
            && let Some(terminal) = self.shared.hosts.numbered(index)
        {
            return Ok(Arc::new(HostSlave { terminal }));
        }
        let pty = self.shared.find(index).ok_or(Errno::ENOENT)?;
        Ok(Arc::new(Slave { pty }))
    }
    fn cacheable(&self) -> bool {
        false
    }
    fn open(self: Arc<Self>, _: &dyn Caller, _: &PathRef, _: OpenFlags) -> Result<OpenResult> {
        Ok(OpenResult::Ops(Arc::new(RootDir { shared: self.shared.clone() })))
    }
    fn attachments(&self) -> Option<&Attachments> {
        Some(&self.attachments)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The opened root directory. Positions: 0 and 1 are the dots, 2 is ptmx, 3 + n is terminal n.
struct RootDir {
    shared: Arc<Shared>,
}

impl FileOps for RootDir {
    fn read_dir(&self, file: &File, _: &dyn Caller, pos: u64, sink: &mut dyn DirSink) -> Result<u64> {
        const DIRECTORY: u8 = InodeKind::Directory.dirent();
        const DEVICE: u8 = InodeKind::CharDevice.dirent();
        let parent = super::parent_ino(file).unwrap_or(ROOT_INO);
        let fixed: [(&[u8], u64, u8); 3] =
            [(b".", ROOT_INO, DIRECTORY), (b"..", parent, DIRECTORY), (b"ptmx", PTMX_INO, DEVICE)];
        let mut at = pos;
        for (i, (name, ino, kind)) in fixed.into_iter().enumerate() {
            let here = i as u64;
            if here < at {
                continue;
            }
            if !sink.add(name, ino, kind, here + 1) {
                return Ok(at);
            }
            at = here + 1;
        }
        let from = u32::try_from(at.saturating_sub(3)).unwrap_or(u32::MAX);
        let hosts = if self.shared.primary() { self.shared.hosts.end() } else { 0 };
        let mut numbers: Vec<u32> = (from..hosts).filter(|&n| self.shared.hosts.numbered(n).is_some()).collect();
        numbers.extend(self.shared.entries.lock().range(from..).map(|(&n, _)| n));
        for n in numbers {
            let next = u64::from(n) + 4;
            if !sink.add(n.to_string().as_bytes(), u64::from(n) + 3, DEVICE, next) {
                break;
            }
            at = next;
        }
        Ok(at)
    }
    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        Ok(0)
    }
    fn read(&self, _: &File, _: &mut crate::mm::IoDest<'_>, _: u64) -> Result<usize> {
        Err(Errno::EISDIR)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The multiplexer: each open makes a pseudo-terminal.
struct Ptmx {
    shared: Arc<Shared>,
    stat: Stat,
}

impl Inode for Ptmx {
    fn kind(&self) -> InodeKind {
        InodeKind::CharDevice
    }
    fn stat(&self) -> Result<Stat> {
        Ok(self.stat)
    }
    fn open(self: Arc<Self>, caller: &dyn Caller, _: &PathRef, _: OpenFlags) -> Result<OpenResult> {
        let task = task_of(caller)?;
        let pty = self.shared.allocate(task)?;
        Ok(OpenResult::Ops(Arc::new(PtyMaster::new(pty))))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The name of a slave.
struct Slave {
    pty: Arc<Pty>,
}

impl Inode for Slave {
    fn kind(&self) -> InodeKind {
        InodeKind::CharDevice
    }
    fn stat(&self) -> Result<Stat> {
        Ok(self.pty.stat())
    }
    fn set_attr(&self, change: &AttrChange) -> Result<()> {
        self.pty.set_attr(change);
        Ok(())
    }
    fn open(self: Arc<Self>, caller: &dyn Caller, _: &PathRef, flags: OpenFlags) -> Result<OpenResult> {
        Ok(OpenResult::Ops(PtySlave::open(&self.pty, task_of(caller)?, flags)?))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The name of a terminal of the caller.
struct HostSlave {
    terminal: Arc<HostTerminal>,
}

impl Inode for HostSlave {
    fn kind(&self) -> InodeKind {
        InodeKind::CharDevice
    }
    fn stat(&self) -> Result<Stat> {
        self.terminal.stat()
    }
    fn open(self: Arc<Self>, caller: &dyn Caller, _: &PathRef, flags: OpenFlags) -> Result<OpenResult> {
        Ok(OpenResult::Ops(self.terminal.open(task_of(caller)?, flags)))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub(super) fn task_of(caller: &dyn Caller) -> Result<&Task> {
    caller.as_any().downcast_ref::<Task>().ok_or(Errno::ENXIO)
}

/// What a pseudo-terminal keeps of its file system.
type Home = Weak<Shared>;
