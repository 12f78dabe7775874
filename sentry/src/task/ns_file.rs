//! Namespaces as files: what the links in /proc/PID/ns lead to (namespaces(7), ioctl_ns(2)). Owns the file; the namespace belongs
//! to whoever is in it.
use std::any::Any;
use std::sync::Arc;

use guest_abi::types::Stat;
use guest_abi::{UserAddr, UserPtr};

use super::limits::Resource;
use super::nsproxy::Namespace;
use super::{PidNamespace, Task};
use crate::kernel::Kernel;
use crate::vfs::file::Caller;
use crate::vfs::{File, FileOps, OpenFlags, OpenResult};
use crate::{Errno, Result};

/// Requests of ioctl_ns(2).
mod request {
    pub(super) const USERNS: u32 = 0xb701;
    pub(super) const PARENT: u32 = 0xb702;
    pub(super) const NSTYPE: u32 = 0xb703;
    pub(super) const OWNER_UID: u32 = 0xb704;
    pub(super) const MNTNS_ID: u32 = 0x8008_b705;
    pub(super) const PID_FROM_PIDNS: u32 = 0x8004_b706;
    pub(super) const TGID_FROM_PIDNS: u32 = 0x8004_b707;
    pub(super) const PID_IN_PIDNS: u32 = 0x8004_b708;
    pub(super) const TGID_IN_PIDNS: u32 = 0x8004_b709;
}

/// Which link of /proc/PID/ns, or request of a pidfd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    Cgroup,
    Ipc,
    Mnt,
    Net,
    Pid,
    PidForChildren,
    Time,
    TimeForChildren,
    User,
    Uts,
}

/// st_dev of nsfs.
const DEV_NSFS: u64 = 4;

impl Namespace {
    /// The namespace of `task` that `kind` names. ENOENT once the task has let go of it, and for a next child's PID namespace that
    /// has had no first process yet.
    pub fn of(task: &Task, kind: Kind) -> Result<Namespace> {
        if kind == Kind::Pid {
            return Ok(Namespace::Pid(task.pid_namespace().clone()));
        }
        let proxy = task.nsproxy().map_err(|_| Errno::ENOENT)?;
        Ok(match kind {
            Kind::Pid | Kind::PidForChildren => {
                if !proxy.pid_for_children.had_init() {
                    return Err(Errno::ENOENT);
                }
                Namespace::Pid(proxy.pid_for_children.clone())
            }
            Kind::Cgroup => Namespace::Cgroup(proxy.cgroup.clone()),
            Kind::Ipc => Namespace::Ipc(proxy.ipc.clone()),
            Kind::Mnt => Namespace::Mnt(proxy.mnt.clone().ok_or(Errno::ENOENT)?),
            Kind::Net => Namespace::Net(proxy.net.clone()),
            Kind::Uts => Namespace::Uts(proxy.uts.clone()),
            Kind::Time => Namespace::Time(proxy.time.clone()),
            Kind::TimeForChildren => Namespace::Time(proxy.time_for_children.clone()),
            Kind::User => Namespace::User(task.credentials().user_ns.clone()),
        })
    }

    const fn prefix(&self) -> &'static str {
        match self {
            Namespace::Cgroup(_) => "cgroup",
            Namespace::Ipc(_) => "ipc",
            Namespace::Mnt(_) => "mnt",
            Namespace::Net(_) => "net",
            Namespace::Pid(_) => "pid",
            Namespace::Time(_) => "time",
            Namespace::User(_) => "user",
            Namespace::Uts(_) => "uts",
        }
    }

    /// Its number: Linux's fixed one for the namespaces that the sandbox began with.
    pub fn number(&self, kernel: &Kernel) -> u64 {
        match self {
            Namespace::Ipc(n) if kernel.first_ns().is_some_and(|f| Arc::ptr_eq(&f.ipc, n)) => 0xefff_ffff,
            Namespace::Ipc(n) => n.number(),
            Namespace::Uts(n) if Arc::ptr_eq(&kernel.uts, n) => 0xefff_fffe,
            Namespace::Uts(n) => n.number(),
            Namespace::User(n) => n.number(),
            Namespace::Pid(n) if n.level() == 0 => 0xefff_fffc,
            Namespace::Pid(n) => n.number(),
            Namespace::Cgroup(n) if kernel.first_ns().is_some_and(|f| Arc::ptr_eq(&f.cgroup, n)) => 0xefff_fffb,
            Namespace::Cgroup(n) => n.number(),
            Namespace::Time(n) if kernel.first_ns().is_some_and(|f| Arc::ptr_eq(&f.time, n)) => 0xefff_fffa,
            Namespace::Time(n) => n.number(),
            Namespace::Mnt(n) if kernel.mounts.get().is_some_and(|f| Arc::ptr_eq(f, n)) => 0xf000_0000,
            Namespace::Mnt(n) => n.number(),
            Namespace::Net(n) if Arc::ptr_eq(&kernel.net, n) => 0xf000_0001,
            Namespace::Net(n) => n.number(),
        }
    }

    /// The text of a link to it, such as `pid:[4026531836]`.
    pub fn link_text(&self, kernel: &Kernel) -> Vec<u8> {
        format!("{}:[{}]", self.prefix(), self.number(kernel)).into_bytes()
    }
}

/// A namespace held open.
pub struct NsFile {
    kernel: Arc<Kernel>,
    namespace: Namespace,
}

impl NsFile {
    /// An open description of `namespace`.
    pub fn open(kernel: &Arc<Kernel>, namespace: Namespace) -> Arc<File> {
        File::new(Arc::new(NsFile { kernel: kernel.clone(), namespace }), None, OpenFlags::empty())
    }

    /// What it stands for.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    fn descriptor(&self, by: &Task, namespace: Namespace) -> Result<u64> {
        let file = NsFile::open(&self.kernel, namespace);
        by.files().insert(file, true, 0, by.limit(Resource::Nofile)).map(|fd| fd as u64)
    }

    /// The numbers of a task, from this PID namespace's to the caller's and back.
    fn translate(&self, by: &Task, request: u32, number: i32) -> Result<u64> {
        let Namespace::Pid(ns) = &self.namespace else { return Err(Errno::EINVAL) };
        let own = by.pid_namespace();
        let inwards = matches!(request, request::PID_IN_PIDNS | request::TGID_IN_PIDNS);
        let (from, to) = if inwards { (own, ns) } else { (ns, own) };
        let task = from.task(number).ok_or(Errno::ESRCH)?;
        let found = match request {
            request::PID_FROM_PIDNS | request::PID_IN_PIDNS => task.tid_in(to),
            _ => task.group().pid().number_in(to),
        };
        if found == 0 { Err(Errno::ESRCH) } else { Ok(found as u64) }
    }
}

impl FileOps for NsFile {
    fn stat(&self) -> Option<Result<Stat>> {
        let ino = self.namespace.number(&self.kernel);
        Some(Ok(Stat { dev: DEV_NSFS, ino, nlink: 1, mode: 0o100_444, blksize: 4096, ..Stat::default() }))
    }

    fn proc_name(&self) -> Vec<u8> {
        self.namespace.link_text(&self.kernel)
    }

    fn reopen(&self, _caller: &dyn Caller, flags: OpenFlags) -> Result<OpenResult> {
        if flags.writable() {
            return Err(Errno::EPERM);
        }
        Ok(OpenResult::Ops(Arc::new(NsFile { kernel: self.kernel.clone(), namespace: self.namespace.clone() })))
    }

    fn ioctl(&self, _file: &File, caller: &dyn Caller, request: u32, arg: u64) -> Result<u64> {
        let by = caller.as_any().downcast_ref::<Task>().ok_or(Errno::ENOTTY)?;
        match request {
            request::NSTYPE => Ok(self.namespace.flag()),
            request::USERNS => {
                // The caller must be in it or above.
                let owner = self.namespace.owner().filter(|o| o.is_within(&by.credentials().user_ns));
                self.descriptor(by, Namespace::User(owner.ok_or(Errno::EPERM)?))
            }
            request::PARENT => match &self.namespace {
                Namespace::Pid(ns) => {
                    let parent = ns.parent().filter(|p| p.is_within(by.pid_namespace())).ok_or(Errno::EPERM)?;
                    self.descriptor(by, Namespace::Pid(parent.clone()))
                }
                Namespace::User(ns) => {
                    let own = by.credentials().user_ns.clone();
                    let parent = ns.parent().filter(|p| p.is_within(&own)).ok_or(Errno::EPERM)?;
                    self.descriptor(by, Namespace::User(parent.clone()))
                }
                _ => Err(Errno::EINVAL),
            },
            request::OWNER_UID => match &self.namespace {
                Namespace::User(ns) => {
                    let uid = by.credentials().user_ns.shown_user(ns.owner());
                    by.space()?.write(UserPtr::new(UserAddr(arg)), &uid).map(|()| 0)
                }
                _ => Err(Errno::EINVAL),
            },
            request::MNTNS_ID => match &self.namespace {
                Namespace::Mnt(_) => {
                    let id = self.namespace.number(&self.kernel);
                    by.space()?.write(UserPtr::new(UserAddr(arg)), &id).map(|()| 0)
                }
                _ => Err(Errno::EINVAL),
            },
            request::PID_FROM_PIDNS | request::TGID_FROM_PIDNS | request::PID_IN_PIDNS | request::TGID_IN_PIDNS => {
                self.translate(by, request, arg as i32)
            }
            _ => Err(Errno::ENOTTY),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl PidNamespace {
    /// Whether it is `outer` or lies in it.
    pub fn is_within(self: &Arc<Self>, outer: &Arc<PidNamespace>) -> bool {
        let mut at = Some(self);
        while let Some(ns) = at {
            if ns.level() <= outer.level() {
                return Arc::ptr_eq(ns, outer);
            }
            at = ns.parent();
        }
        false
    }
}
