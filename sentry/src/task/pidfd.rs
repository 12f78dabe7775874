//! pidfds (pidfd_open(2)): a process or a thread as a file. Owns the file; what it stands for is the identity's.
use std::any::Any;
use std::sync::Arc;

use guest_abi::types::Stat;

use super::access::may_inspect;
use super::limits::Resource;
use super::ns_file::{Kind, NsFile};
use super::nsproxy::Namespace;
use super::{Pid, PidNamespace, Task};
use crate::event::{Events, WaitQueue};
use crate::vfs::file::Caller;
use crate::vfs::{File, FileOps, OpenFlags};
use crate::{Errno, Result};

/// PIDFD_THREAD of pidfd_open(2), also among the status flags of the description.
pub const THREAD: OpenFlags = OpenFlags::EXCL;

/// st_dev of pidfs.
const DEV_PIDFS: u64 = 5;

/// The object behind a pidfd.
pub struct PidFd {
    pid: Arc<Pid>,
    /// Opened with PIDFD_THREAD: it stands for one task.
    thread: bool,
}

impl PidFd {
    /// What it stands for, dead or alive.
    pub fn pid(&self) -> &Arc<Pid> {
        &self.pid
    }

    /// Whether it stands for one thread, not a process.
    pub fn is_thread(&self) -> bool {
        self.thread
    }
}

/// The namespace that a PIDFD_GET_*_NAMESPACE request opens.
fn namespace_of(request: u32) -> Option<Kind> {
    Some(match request {
        0xff01 => Kind::Cgroup,
        0xff02 => Kind::Ipc,
        0xff03 => Kind::Mnt,
        0xff04 => Kind::Net,
        0xff05 => Kind::Pid,
        0xff06 => Kind::PidForChildren,
        0xff07 => Kind::Time,
        0xff08 => Kind::TimeForChildren,
        0xff09 => Kind::User,
        0xff0a => Kind::Uts,
        _ => return None,
    })
}

impl FileOps for PidFd {
    fn poll(&self, _file: &File) -> Events {
        let Some(task) = self.pid.task() else { return Events::READABLE | Events::HUP };
        let over = if self.thread { task.is_dead() } else { task.group().is_zombie() };
        if over { Events::READABLE } else { Events::empty() }
    }

    fn wait_queue(&self) -> Option<Arc<WaitQueue>> {
        Some(self.pid.exited.clone())
    }

    fn proc_name(&self) -> Vec<u8> {
        b"anon_inode:[pidfd]".to_vec()
    }

    fn stat(&self) -> Option<Result<Stat>> {
        let ino = self.pid.inode();
        Some(Ok(Stat { dev: DEV_PIDFS, ino, nlink: 1, mode: 0o100_700, blksize: 4096, ..Stat::default() }))
    }

    fn fdinfo_for(&self, reader: &dyn Any) -> Vec<u8> {
        let ns = reader.downcast_ref::<PidNamespace>();
        let (Some(ns), Some(_)) = (ns, self.pid.task()) else { return b"Pid:\t-1\nNSpid:\t-1\n".to_vec() };
        let seen = self.pid.number_in(ns);
        let below = if seen == 0 { usize::MAX } else { ns.level() + 1 };
        let inner = self.pid.numbers().iter().skip(below);
        let inner = inner.fold(String::new(), |text, (_, n)| text + &format!("\t{n}"));
        format!("Pid:\t{seen}\nNSpid:\t{seen}{inner}\n").into_bytes()
    }

    fn ioctl(&self, _file: &File, caller: &dyn Caller, request: u32, arg: u64) -> Result<u64> {
        let by = caller.as_any().downcast_ref::<Task>().ok_or(Errno::ENOTTY)?;
        let kind = namespace_of(request).ok_or(Errno::ENOTTY)?;
        if arg != 0 {
            return Err(Errno::EINVAL);
        }
        let task = self.pid.task().ok_or(Errno::ESRCH)?;
        task.nsproxy()?;
        may_inspect(by, &task).map_err(|_| Errno::EACCES)?;
        let file = NsFile::open(by.kernel(), Namespace::of(&task, kind)?);
        by.files().insert(file, true, 0, by.limit(Resource::Nofile)).map(|fd| fd as u64)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A new description for `pid`: of the process, or with `thread` of the one task.
pub fn new_file(pid: &Arc<Pid>, thread: bool, nonblock: bool) -> Arc<File> {
    let mut flags = OpenFlags::RDWR;
    flags.set(OpenFlags::NONBLOCK, nonblock);
    flags.set(THREAD, thread);
    File::new(Arc::new(PidFd { pid: pid.clone(), thread }), None, flags)
}
