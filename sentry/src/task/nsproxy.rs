//! The namespaces of a task besides its own PID namespace (namespaces(7)): the CLONE_NEW* flags, unshare(2), setns(2). Owns which
//! a task is in and the rules for changing that; never what a namespace holds.
use std::sync::Arc;

use super::clone::flag::*;
use super::{PidNamespace, Task};
use crate::ns::cgroup::CgroupNamespace;
use crate::ns::ipc::IpcNamespace;
use crate::ns::net::NetNamespace;
use crate::ns::ucounts::Counted;
use crate::ns::user::Caps;
use crate::ns::uts::UtsNamespace;
use crate::vfs::fs_context::FsState;
use crate::vfs::{FsContext, MountNamespace};
use crate::{Errno, Result};

/// CLONE_NEW* flags that need CAP_SYS_ADMIN; CLONE_NEWUSER alone does not.
const PRIVILEGED: u64 = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET | NEWCGROUP | NEWTIME;

/// What a task is in. Immutable once shared; a change makes a new one.
#[derive(Clone)]
pub struct NsProxy {
    /// Host and domain name.
    pub uts: Arc<UtsNamespace>,
    /// System V IPC.
    pub ipc: Arc<IpcNamespace>,
    /// Network.
    pub net: Arc<NetNamespace>,
    /// Cgroups.
    pub cgroup: Arc<CgroupNamespace>,
    /// Mounts; None only if the root directory hangs in no namespace.
    pub mnt: Option<Arc<MountNamespace>>,
    /// The PID namespace of the next child: the task's own, or one below after unshare(2) or setns(2).
    pub pid_for_children: Arc<PidNamespace>,
}

impl NsProxy {
    /// A copy with a new namespace for each CLONE_NEW* flag, made for `task`. With CLONE_NEWNS the places of `fs` move to the copy
    /// of the mounts. EPERM without CAP_SYS_ADMIN, EINVAL for kinds that do not exist here and for CLONE_NEWPID where the
    /// next child's namespace is another than the task's own already, ENOSPC at a limit.
    pub(super) fn unshared(self: &Arc<Self>, task: &Task, flags: u64, fs: &mut FsState) -> Result<Arc<NsProxy>> {
        if flags & PRIVILEGED == 0 {
            return Ok(self.clone());
        }
        let credentials = task.credentials();
        if !credentials.has(Caps::SYS_ADMIN) {
            return Err(Errno::EPERM);
        }
        let charge = |kind| task.kernel().ucounts.charge(kind, credentials.euid);
        let mut new = NsProxy::clone(self);
        if flags & NEWNS != 0 {
            let old = new.mnt.as_ref().ok_or(Errno::EINVAL)?;
            new.mnt = Some(old.copy(&mut [&mut fs.root, &mut fs.cwd], charge(Counted::Mnt)?)?);
        }
        if flags & NEWUTS != 0 {
            new.uts = Arc::new(new.uts.copy(charge(Counted::Uts)?));
        }
        if flags & NEWIPC != 0 {
            new.ipc = Arc::new(IpcNamespace::new(Some(charge(Counted::Ipc)?)));
        }
        if flags & NEWPID != 0 {
            let own = task.pid_namespace();
            if !Arc::ptr_eq(&new.pid_for_children, own) {
                return Err(Errno::EINVAL);
            }
            new.pid_for_children = PidNamespace::nested(own, || charge(Counted::Pid))?;
        }
        if flags & NEWCGROUP != 0 {
            new.cgroup = Arc::new(CgroupNamespace::new(Some(charge(Counted::Cgroup)?)));
        }
        if flags & NEWNET != 0 {
            new.net = NetNamespace::new(Some(charge(Counted::Net)?));
        }
        if flags & NEWTIME != 0 {
            return Err(Errno::EINVAL);
        }
        Ok(Arc::new(new))
    }
}

/// A namespace that a descriptor stands for.
#[derive(Clone)]
pub enum Namespace {
    /// CLONE_NEWPID.
    Pid(Arc<PidNamespace>),
    /// CLONE_NEWUTS.
    Uts(Arc<UtsNamespace>),
    /// CLONE_NEWIPC.
    Ipc(Arc<IpcNamespace>),
    /// CLONE_NEWNET.
    Net(Arc<NetNamespace>),
    /// CLONE_NEWCGROUP.
    Cgroup(Arc<CgroupNamespace>),
    /// CLONE_NEWNS.
    Mnt(Arc<MountNamespace>),
    /// CLONE_NEWUSER: the only one.
    User,
    /// CLONE_NEWTIME: the only one.
    Time,
}

impl Namespace {
    /// Its CLONE_NEW* flag (NS_GET_NSTYPE).
    pub fn flag(&self) -> u64 {
        match self {
            Namespace::Pid(_) => NEWPID,
            Namespace::Uts(_) => NEWUTS,
            Namespace::Ipc(_) => NEWIPC,
            Namespace::Net(_) => NEWNET,
            Namespace::Cgroup(_) => NEWCGROUP,
            Namespace::Mnt(_) => NEWNS,
            Namespace::User => NEWUSER,
            Namespace::Time => NEWTIME,
        }
    }
}

impl Task {
    /// unshare(2).
    pub fn unshare(&self, flags: u64) -> Result<()> {
        const FILES_AND_MORE: u64 = THREAD | FS | SIGHAND | VM | FILES | SYSVSEM;
        if flags & NEWUSER != 0 {
            return Err(Errno::EINVAL);
        }
        if flags & !(FILES_AND_MORE | PRIVILEGED) != 0 {
            return Err(Errno::EINVAL);
        }
        if flags & (THREAD | SIGHAND | VM) != 0 && self.group().task_count() != 1 {
            return Err(Errno::EINVAL);
        }
        let mut fs = self.fs().get();
        let old = self.nsproxy()?;
        let new = old.unshared(self, flags, &mut fs)?;
        if flags & FILES != 0 {
            self.unshare_files()?;
        }
        if flags & (FS | NEWNS) != 0 {
            self.set_fs(Arc::new(FsContext::new(fs)));
        }
        if !Arc::ptr_eq(&old, &new) {
            self.set_nsproxy(Some(new));
        }
        Ok(())
    }

    /// setns(2): all of `namespaces` or none. EPERM without the capabilities, EINVAL for what the task cannot join: its own user
    /// namespace, a PID namespace that is neither its own nor below, a mount namespace while others share its directories.
    pub fn join_namespaces(&self, namespaces: &[Namespace]) -> Result<()> {
        let credentials = self.credentials();
        let mut new = NsProxy::clone(&*self.nsproxy()?);
        let mut fs = None;
        for ns in namespaces {
            match ns {
                // The one there is is the caller's.
                Namespace::User => return Err(Errno::EINVAL),
                Namespace::Mnt(mnt) => {
                    if !credentials.has(Caps::SYS_ADMIN | Caps::SYS_CHROOT) {
                        return Err(Errno::EPERM);
                    }
                    let shared = self.fs();
                    // One handle is the task's, one is ours.
                    if namespaces.len() == 1 && Arc::strong_count(&shared) > 2 {
                        return Err(Errno::EINVAL);
                    }
                    let root = mnt.root()?;
                    new.mnt = Some(mnt.clone());
                    fs = Some(FsState { root: root.clone(), cwd: root, umask: shared.get().umask });
                    continue;
                }
                Namespace::Time if self.group().task_count() != 1 => return Err(Errno::EUSERS),
                _ => {}
            }
            if !credentials.has(Caps::SYS_ADMIN) {
                return Err(Errno::EPERM);
            }
            match ns {
                Namespace::Pid(pid) => {
                    if !pid.is_within(self.pid_namespace()) {
                        return Err(Errno::EINVAL);
                    }
                    new.pid_for_children = pid.clone();
                }
                Namespace::Uts(uts) => new.uts = uts.clone(),
                Namespace::Ipc(ipc) => new.ipc = ipc.clone(),
                Namespace::Net(net) => new.net = net.clone(),
                Namespace::Cgroup(cgroup) => new.cgroup = cgroup.clone(),
                Namespace::Time | Namespace::User | Namespace::Mnt(_) => {}
            }
        }
        if let Some(fs) = fs {
            self.set_fs(Arc::new(FsContext::new(fs)));
        }
        self.set_nsproxy(Some(Arc::new(new)));
        Ok(())
    }
}
