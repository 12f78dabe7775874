//! The namespaces of a task besides its own PID namespace (namespaces(7)): the CLONE_NEW* flags, unshare(2), setns(2). Owns which
//! a task is in and the rules for changing that; never what a namespace holds.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::clone::flag::*;
use super::{PidNamespace, Task, user_namespace};
use crate::ns::Owner;
use crate::ns::cgroup::CgroupNamespace;
use crate::ns::ipc::IpcNamespace;
use crate::ns::net::NetNamespace;
use crate::ns::time::TimeNamespace;
use crate::ns::ucounts::Counted;
use crate::ns::user::Caps;
use crate::ns::user_namespace::UserNamespace;
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
    /// Clocks.
    pub time: Arc<TimeNamespace>,
    /// Clocks of the next child, and of the next program.
    pub time_for_children: Arc<TimeNamespace>,
    /// The PID namespace of the next child: the task's own, or one below after unshare(2) or setns(2).
    pub pid_for_children: Arc<PidNamespace>,
}

impl NsProxy {
    /// A copy with a new namespace for each CLONE_NEW* flag, made for `task` and belonging to
    /// `user_ns`. With CLONE_NEWNS the places of `fs` move to the copy
    /// of the mounts. EPERM without CAP_SYS_ADMIN, EINVAL for kinds that do not exist here and for CLONE_NEWPID where the
    /// next child's namespace is another than the task's own already, ENOSPC at a limit.
    pub(super) fn unshared(
        self: &Arc<Self>,
        task: &Task,
        flags: u64,
        user_ns: &Arc<UserNamespace>,
        fs: &mut FsState,
    ) -> Result<Arc<NsProxy>> {
        if flags & PRIVILEGED == 0 {
            return Ok(self.clone());
        }
        let credentials = task.credentials();
        if !credentials.has_in(user_ns, Caps::SYS_ADMIN) {
            return Err(Errno::EPERM);
        }
        let charge = |kind| Ok(Owner::new(user_ns, task.kernel().ucounts.charge(kind, credentials.euid)?));
        let mut new = NsProxy::clone(self);
        if flags & NEWNS != 0 {
            let old = new.mnt.as_ref().ok_or(Errno::EINVAL)?;
            new.mnt = Some(old.copy(&mut [&mut fs.root, &mut fs.cwd], charge(Counted::Mnt)?)?);
        }
        if flags & NEWUTS != 0 {
            new.uts = Arc::new(new.uts.copy(charge(Counted::Uts)?));
        }
        if flags & NEWIPC != 0 {
            new.ipc = Arc::new(IpcNamespace::new(charge(Counted::Ipc)?));
        }
        if flags & NEWPID != 0 {
            let own = task.pid_namespace();
            if !Arc::ptr_eq(&new.pid_for_children, own) {
                return Err(Errno::EINVAL);
            }
            // What is inside must not belong to somebody above its surroundings.
            if !user_ns.is_within(&own.owner.user_ns) {
                return Err(Errno::EINVAL);
            }
            new.pid_for_children = PidNamespace::nested(own, || charge(Counted::Pid))?;
        }
        if flags & NEWCGROUP != 0 {
            new.cgroup = Arc::new(CgroupNamespace::new(charge(Counted::Cgroup)?));
        }
        if flags & NEWNET != 0 {
            new.net = NetNamespace::new(charge(Counted::Net)?);
        }
        if flags & NEWTIME != 0 {
            new.time_for_children = new.time_for_children.copy(charge(Counted::Time)?);
        }
        Ok(Arc::new(new))
    }
}

impl NsProxy {
    /// As it is for a task with memory of its own: its clocks are those that its maker had for children.
    pub(super) fn with_own_time(self: &Arc<Self>) -> Arc<NsProxy> {
        if Arc::ptr_eq(&self.time, &self.time_for_children) {
            return self.clone();
        }
        let mut new = NsProxy::clone(self);
        new.time = new.time_for_children.clone();
        Arc::new(new)
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
    /// CLONE_NEWUSER.
    User(Arc<UserNamespace>),
    /// CLONE_NEWTIME.
    Time(Arc<TimeNamespace>),
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
            Namespace::User(_) => NEWUSER,
            Namespace::Time(_) => NEWTIME,
        }
    }

    /// The user namespace that it belongs to (NS_GET_USERNS); None for one that is itself the outermost.
    pub fn owner(&self) -> Option<Arc<UserNamespace>> {
        Some(match self {
            Namespace::Pid(n) => n.owner.user_ns.clone(),
            Namespace::Uts(n) => n.owner.user_ns.clone(),
            Namespace::Ipc(n) => n.owner.user_ns.clone(),
            Namespace::Net(n) => n.owner.user_ns.clone(),
            Namespace::Cgroup(n) => n.owner.user_ns.clone(),
            Namespace::Mnt(n) => n.owner.user_ns.clone(),
            Namespace::User(n) => return n.parent().cloned(),
            Namespace::Time(n) => n.owner.user_ns.clone(),
        })
    }
}

impl Task {
    /// unshare(2).
    pub fn unshare(&self, flags: u64) -> Result<()> {
        const FILES_AND_MORE: u64 = THREAD | FS | SIGHAND | VM | FILES | SYSVSEM;
        let flags = if flags & NEWUSER != 0 { flags | THREAD | FS } else { flags };
        if flags & !(FILES_AND_MORE | PRIVILEGED | NEWUSER) != 0 {
            return Err(Errno::EINVAL);
        }
        if flags & (THREAD | SIGHAND | VM) != 0 && self.group().task_count() != 1 {
            return Err(Errno::EINVAL);
        }
        let mut fs = self.fs().get();
        let old = self.nsproxy()?;
        let credentials = if flags & NEWUSER != 0 { Some(user_namespace::in_new_namespace(self)?) } else { None };
        let user_ns = credentials.as_ref().map_or_else(|| self.credentials().user_ns.clone(), |c| c.user_ns.clone());
        let new = old.unshared(self, flags, &user_ns, &mut fs)?;
        if flags & FILES != 0 {
            self.unshare_files()?;
        }
        if flags & (NEWIPC | SYSVSEM) != 0 {
            // Sets of another namespace are out of reach from then on.
            self.leave_sem_undo();
        }
        if flags & (FS | NEWNS) != 0 {
            self.set_fs(Arc::new(FsContext::new(fs)));
        }
        if !Arc::ptr_eq(&old, &new) {
            self.set_nsproxy(Some(new));
        }
        credentials.map_or(Ok(()), |new| {
            self.change_credentials(|c| {
                *c = new;
                Ok(())
            })
        })
    }

    /// Lives by the clocks of `time` from now on.
    pub(super) fn enter_time(&self, time: &TimeNamespace) {
        let offsets = time.enter();
        let changes = self.time_offsets() != offsets;
        self.set_time_offsets(offsets);
        if changes
            && let Some(vdso) = &self.kernel().vdso
            && let Ok(space) = self.space()
        {
            vdso.follow(&space, offsets);
        }
    }

    /// setns(2): all of `namespaces` or none. EPERM without the capabilities, EINVAL for what the task cannot join: its own user
    /// namespace, a PID namespace that is neither its own nor below, a mount namespace while others share its directories.
    pub fn join_namespaces(&self, namespaces: &[Namespace]) -> Result<()> {
        let credentials = self.credentials();
        let mut new = NsProxy::clone(&*self.nsproxy()?);
        let mut fs = None;
        // The user namespace comes first: what it gives counts for the others.
        let mut entered = credentials.user_ns.clone();
        for ns in namespaces {
            let Namespace::User(user) = ns else { continue };
            let shared = self.fs();
            // One handle is the task's, one is ours.
            if Arc::ptr_eq(user, &credentials.user_ns)
                || self.group().task_count() != 1
                || Arc::strong_count(&shared) > 2
            {
                return Err(Errno::EINVAL);
            }
            if !credentials.has_in(user, Caps::SYS_ADMIN) {
                return Err(Errno::EPERM);
            }
            entered = user.clone();
        }
        for ns in namespaces {
            match ns {
                Namespace::User(_) => continue,
                Namespace::Mnt(mnt) => {
                    if !credentials.has_in(&mnt.owner.user_ns, Caps::SYS_ADMIN)
                        || !credentials.has_in(&entered, Caps::SYS_ADMIN | Caps::SYS_CHROOT)
                    {
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
                Namespace::Time(_) if self.group().task_count() != 1 => return Err(Errno::EUSERS),
                _ => {}
            }
            let over = |owner: &Arc<UserNamespace>| credentials.has_in(owner, Caps::SYS_ADMIN);
            if !ns.owner().is_some_and(|owner| over(&owner)) || !over(&entered) {
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
                Namespace::Time(time) => {
                    new.time = time.clone();
                    new.time_for_children = time.clone();
                }
                Namespace::User(_) | Namespace::Mnt(_) => {}
            }
        }
        if !Arc::ptr_eq(&new.ipc, &self.nsproxy()?.ipc) {
            self.leave_sem_undo();
        }
        if let Some(fs) = fs {
            self.set_fs(Arc::new(FsContext::new(fs)));
        }
        let time = new.time.clone();
        self.set_nsproxy(Some(Arc::new(new)));
        self.enter_time(&time);
        if Arc::ptr_eq(&entered, &credentials.user_ns) {
            return Ok(());
        }
        // It may know what those inside must not: from its program, or from whoever sent it there.
        if entered.owner() != credentials.euid
            || !entered.parent().is_some_and(|p| Arc::ptr_eq(p, &credentials.user_ns))
        {
            self.group().dumpable.store(0, Ordering::Relaxed);
            self.pdeath_signal.store(0, Ordering::Relaxed);
        }
        self.change_credentials(|c| {
            c.enter_user_namespace(&entered);
            Ok(())
        })
    }
}
