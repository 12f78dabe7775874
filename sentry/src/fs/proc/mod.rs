//! /proc (proc(5)). Owns the shape and the text of its files; never the state they show. One instance per mount, belonging to a
//! PID namespace: numbers are as that namespace sees them. Enumeration walks the tgid index, never the tasks.
mod cpuinfo;
mod fd;
mod file;
pub mod listing;
mod maps;
mod node;
mod ns;
mod object;
mod pid;
mod stat;
mod status;
mod sysctl;
mod system;
mod sysvipc;
mod user_ns;

use std::sync::Arc;

use node::{Node, Store, What};

use crate::fs::new_device;
use crate::kernel::Kernel;
use crate::lock::{Mutex, Rank};
use crate::ns::ipc::IpcNamespace;
use crate::ns::user::Credentials;
use crate::ns::user_namespace::UserNamespace;
use crate::ns::uts::UtsNamespace;
use crate::task::{Pid, PidNamespace, Task, ThreadGroup, access};
use crate::vfs::file::Caller;
use crate::vfs::{File, FileSystem, Inode, Mount};
use crate::{Errno, Result};

pub(crate) use status::{cpu_list, cpu_mask};

/// PROC_SUPER_MAGIC of statfs(2).
const PROC_MAGIC: u64 = 0x9fa0;

/// What all nodes of one mount share.
pub(crate) struct Shared {
    pub(crate) kernel: Arc<Kernel>,
    pub(crate) ns: Arc<PidNamespace>,
    pub(crate) dev: u64,
    /// Where the places of objects without a path are.
    pub(crate) objects: Arc<Mount>,
    pub(crate) load: Mutex<system::Load>,
}

/// Whom a node is about.
#[derive(Clone)]
pub(crate) enum Scope {
    /// Everybody.
    System,
    /// A process, by its tgid's identity.
    Process(Arc<Pid>),
    /// A thread, by its tid's identity, reached through `task/`.
    Thread(Arc<Pid>),
}

/// What a generator of text knows.
#[derive(Clone)]
pub(crate) struct Cx {
    pub(crate) shared: Arc<Shared>,
    pub(crate) scope: Scope,
    /// Who reads, where a task does.
    pub(crate) reader: Option<Reader>,
}

/// What of a reader shows in files about the reader's own namespaces.
#[derive(Clone)]
pub(crate) struct Reader {
    pub(crate) uts: Arc<UtsNamespace>,
    pub(crate) pid_namespace: Arc<PidNamespace>,
    pub(crate) ipc: Option<Arc<IpcNamespace>>,
    /// How far its CLOCK_BOOTTIME is from the machine's.
    pub(crate) boottime_offset: i64,
    /// Who opened the file.
    pub(crate) opener: Arc<Credentials>,
}

impl Cx {
    /// The process. ESRCH once it is reaped.
    pub(crate) fn group(&self) -> Result<Arc<ThreadGroup>> {
        match &self.scope {
            Scope::System => Err(Errno::ESRCH),
            Scope::Process(pid) => pid.group().ok_or(Errno::ESRCH),
            Scope::Thread(pid) => Ok(pid.task().ok_or(Errno::ESRCH)?.group().clone()),
        }
    }

    /// The task: a process's leader, dead or alive. ESRCH once it is reaped.
    pub(crate) fn task(&self) -> Result<Arc<Task>> {
        match &self.scope {
            Scope::System => Err(Errno::ESRCH),
            Scope::Process(pid) => pid.group().ok_or(Errno::ESRCH)?.leader().ok_or(Errno::ESRCH),
            Scope::Thread(pid) => pid.task().ok_or(Errno::ESRCH),
        }
    }

    /// Whether the subject is a single thread of `task/`.
    pub(crate) fn single(&self) -> bool {
        matches!(self.scope, Scope::Thread(_))
    }

    /// How far the reader's CLOCK_BOOTTIME is from the machine's.
    pub(crate) fn boottime_offset(&self) -> i64 {
        self.reader.as_ref().map_or(0, |r| r.boottime_offset)
    }

    /// The user namespace whose ids a text shows: that of whoever opened the file.
    pub(crate) fn user_ns(&self) -> &Arc<UserNamespace> {
        self.reader.as_ref().map_or_else(|| UserNamespace::initial(), |r| &r.opener.user_ns)
    }

    pub(crate) fn kernel(&self) -> &Arc<Kernel> {
        &self.shared.kernel
    }

    /// The number of `pid` as the mount's namespace sees it.
    pub(crate) fn number(&self, pid: &Pid) -> i32 {
        pid.number_in(&self.shared.ns)
    }
}

/// A mounted /proc.
pub struct ProcFs {
    shared: Arc<Shared>,
}

impl ProcFs {
    /// For readers in `ns`.
    pub fn new(kernel: &Arc<Kernel>, ns: Arc<PidNamespace>) -> Arc<ProcFs> {
        Arc::new(ProcFs {
            shared: Arc::new(Shared {
                kernel: kernel.clone(),
                ns,
                dev: new_device(),
                objects: object::new_mount(),
                load: Mutex::new(Rank::Leaf, system::Load::default()),
            }),
        })
    }
}

impl FileSystem for ProcFs {
    fn name(&self) -> &'static str {
        "proc"
    }
    fn root(&self) -> Arc<dyn Inode> {
        let cx = Cx { shared: self.shared.clone(), scope: Scope::System, reader: None };
        Node::new(cx, &system::ROOT, 1, 0)
    }
    fn statfs(&self) -> Result<[u64; 8]> {
        Ok([PROC_MAGIC, 4096, 0, 0, 0, 0, 0, 255])
    }
}

/// The process whose /proc/PID directory `file` is.
pub fn process_of(file: &File) -> Option<Arc<Pid>> {
    let node = file.inode()?.as_any().downcast_ref::<Node>()?;
    match &node.cx.scope {
        Scope::Process(pid) if core::ptr::eq(node.row, &raw const pid::PROCESS) => Some(pid.clone()),
        _ => None,
    }
}

/// Whether `caller` may look into `task` as ptrace(2)'s PTRACE_MODE_READ allows. EACCES.
pub(crate) fn may_inspect(caller: &dyn Caller, task: &Task) -> Result<()> {
    let by = caller.credentials();
    let who = caller.as_any().downcast_ref::<Task>();
    access::permitted(who, &by, (by.fsuid, by.fsgid), task).map_err(|_| Errno::EACCES)
}

/// A row of a directory: a name and what it is.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) mode: u32,
    pub(crate) what: What,
}

/// A read-only text file.
pub(crate) const fn text(name: &'static str, mode: u32, make: fn(&Cx) -> Result<Vec<u8>>) -> Row {
    Row { name, mode, what: What::Text { make, store: None, guarded: false } }
}

/// A text file that only those see who may trace the process.
pub(crate) const fn guarded(name: &'static str, mode: u32, make: fn(&Cx) -> Result<Vec<u8>>) -> Row {
    Row { name, mode, what: What::Text { make, store: None, guarded: true } }
}

/// A text file that can be written.
pub(crate) const fn setting(name: &'static str, mode: u32, make: fn(&Cx) -> Result<Vec<u8>>, store: Store) -> Row {
    Row { name, mode, what: What::Text { make, store: Some(store), guarded: false } }
}

/// A directory of fixed rows.
pub(crate) const fn dir(name: &'static str, rows: &'static [Row]) -> Row {
    Row { name, mode: 0o555, what: What::Dir(rows) }
}

/// A symbolic link with a fixed target.
pub(crate) const fn link(name: &'static str, target: &'static str) -> Row {
    Row { name, mode: 0o777, what: What::Link(target) }
}
