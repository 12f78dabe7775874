//! pidfds (pidfd_open(2)): a process as a file. Owns the file; the process is the identity's.
use std::any::Any;
use std::sync::Arc;

use super::limits::Resource;
use super::{Pid, Task};
use crate::Result;
use crate::event::{Events, WaitQueue};
use crate::vfs::{File, FileOps, OpenFlags};

/// The object behind a pidfd.
pub struct PidFd {
    pid: Arc<Pid>,
}

impl PidFd {
    /// The process it stands for, dead or alive.
    pub fn pid(&self) -> &Arc<Pid> {
        &self.pid
    }
}

impl FileOps for PidFd {
    fn poll(&self, _file: &File) -> Events {
        match self.pid.group() {
            Some(g) if !g.is_zombie() => Events::empty(),
            Some(_) => Events::READABLE,
            None => Events::READABLE | Events::HUP,
        }
    }

    fn wait_queue(&self) -> Option<Arc<WaitQueue>> {
        Some(self.pid.exited.clone())
    }

    fn proc_name(&self) -> Vec<u8> {
        b"anon_inode:[pidfd]".to_vec()
    }

    fn fdinfo(&self) -> Vec<u8> {
        let gone = self.pid.group().is_none();
        let numbers: Vec<String> = self.pid.numbers().iter().map(|(_, n)| n.to_string()).collect();
        if gone {
            return b"Pid:\t-1\nNSpid:\t-1\n".to_vec();
        }
        format!("Pid:\t{}\nNSpid:\t{}\n", self.pid.global(), numbers.join("\t")).into_bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A new descriptor of `task` for `pid`, close-on-exec.
pub fn open(task: &Task, pid: &Arc<Pid>, nonblock: bool) -> Result<i32> {
    let mut flags = OpenFlags::RDWR;
    flags.set(OpenFlags::NONBLOCK, nonblock);
    let file = File::new(Arc::new(PidFd { pid: pid.clone() }), None, flags);
    task.files().insert(file, true, 0, task.limit(Resource::Nofile))
}
