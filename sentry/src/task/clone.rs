//! Birth: clone(2), clone3(2), fork(2), vfork(2). Owns the order in which a new task comes into being: whatever can fail comes
//! before anybody can see it.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use guest_abi::{UserAddr, UserPtr};
use linux_raw_sys::general as raw;

use super::limits::Resource;
use super::task::NewTask;
use super::{Task, ThreadGroup, pidfd, ptrace, run, seccomp, session, user_namespace};
use crate::event::{Events, WaitQueue};
use crate::mm::Charge;
use crate::ns::user::Caps;
use crate::platform::{KernelMemory, UserContext};
use crate::signal::{GroupSignals, SignalActions};
use crate::vfs::{FdTable, File, FsContext};
use crate::{Errno, Result};

/// Bytes of the sentry's memory behind a task: its structures, its future with what it holds while it waits, and its vector state.
pub(super) const TASK_COST: usize = 8 << 10;
/// And behind a process, also while it is a zombie.
const GROUP_COST: usize = 4 << 10;

/// Addresses at or above this are refused as a TLS base (TASK_SIZE_MAX).
pub const TLS_MAX: u64 = 0x7fff_ffff_f000;

/// CLONE_* flags that fit 32 bits, and those of clone3(2).
#[allow(missing_docs)]
pub mod flag {
    use linux_raw_sys::general as raw;
    pub const VM: u64 = raw::CLONE_VM as u64;
    pub const FS: u64 = raw::CLONE_FS as u64;
    pub const FILES: u64 = raw::CLONE_FILES as u64;
    pub const SIGHAND: u64 = raw::CLONE_SIGHAND as u64;
    pub const PIDFD: u64 = raw::CLONE_PIDFD as u64;
    pub const PTRACE: u64 = raw::CLONE_PTRACE as u64;
    pub const VFORK: u64 = raw::CLONE_VFORK as u64;
    pub const PARENT: u64 = raw::CLONE_PARENT as u64;
    pub const THREAD: u64 = raw::CLONE_THREAD as u64;
    pub const NEWNS: u64 = raw::CLONE_NEWNS as u64;
    pub const SYSVSEM: u64 = raw::CLONE_SYSVSEM as u64;
    pub const SETTLS: u64 = raw::CLONE_SETTLS as u64;
    pub const PARENT_SETTID: u64 = raw::CLONE_PARENT_SETTID as u64;
    pub const CHILD_CLEARTID: u64 = raw::CLONE_CHILD_CLEARTID as u64;
    pub const DETACHED: u64 = raw::CLONE_DETACHED as u64;
    pub const UNTRACED: u64 = raw::CLONE_UNTRACED as u64;
    pub const CHILD_SETTID: u64 = raw::CLONE_CHILD_SETTID as u64;
    pub const NEWCGROUP: u64 = raw::CLONE_NEWCGROUP as u64;
    pub const NEWUTS: u64 = raw::CLONE_NEWUTS as u64;
    pub const NEWIPC: u64 = raw::CLONE_NEWIPC as u64;
    pub const NEWUSER: u64 = raw::CLONE_NEWUSER as u64;
    pub const NEWPID: u64 = raw::CLONE_NEWPID as u64;
    pub const NEWNET: u64 = raw::CLONE_NEWNET as u64;
    pub const IO: u64 = raw::CLONE_IO as u64;
    pub const NEWTIME: u64 = raw::CLONE_NEWTIME as u64;
    pub const CLEAR_SIGHAND: u64 = 0x1_0000_0000;
    pub const INTO_CGROUP: u64 = 0x2_0000_0000;
}

/// A decoded request.
#[derive(Clone, Debug, Default)]
pub struct CloneRequest {
    /// CLONE_* flags without the exit signal.
    pub flags: u64,
    /// Signal to the parent at the end; 0 for none.
    pub exit_signal: i32,
    /// The child's stack pointer; 0 keeps the parent's.
    pub stack: u64,
    /// New FS base (CLONE_SETTLS).
    pub tls: u64,
    /// CLONE_PARENT_SETTID.
    pub parent_tid: UserAddr,
    /// CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID.
    pub child_tid: UserAddr,
    /// CLONE_PIDFD: where the descriptor goes.
    pub pidfd: UserAddr,
    /// Wanted numbers, innermost namespace first.
    pub set_tid: Vec<i32>,
}

/// The parent of a CLONE_VFORK child waits on this until the child lets go of the memory.
pub struct VforkDone {
    done: AtomicBool,
    queue: Arc<WaitQueue>,
}

impl VforkDone {
    pub(super) fn complete(&self) {
        self.done.store(true, Ordering::SeqCst);
        self.queue.wake(Events::IN);
    }
}

fn check(parent: &Task, r: &CloneRequest) -> Result<()> {
    use flag::*;
    let f = r.flags;
    let both = |a: u64, b: u64| f & a != 0 && f & b != 0;
    let without = |a: u64, b: u64| f & a != 0 && f & b == 0;
    if both(NEWNS, FS) || both(NEWUSER, FS) || without(THREAD, SIGHAND) || without(SIGHAND, VM) {
        return Err(Errno::EINVAL);
    }
    if f & PARENT != 0 && (parent.group().parent().is_none() || parent.group().tgid() == 1) {
        return Err(Errno::EINVAL);
    }
    if both(THREAD, NEWUSER | NEWPID) || both(SIGHAND, CLEAR_SIGHAND) || both(PIDFD, DETACHED) {
        return Err(Errno::EINVAL);
    }
    // A thread lives where its group does, so nobody who has sent children elsewhere may have one.
    if f & THREAD != 0 && !Arc::ptr_eq(&parent.nsproxy()?.pid_for_children, parent.pid_namespace()) {
        return Err(Errno::EINVAL);
    }
    if both(NEWIPC, SYSVSEM) {
        return Err(Errno::EINVAL);
    }
    Ok(())
}

/// Makes a task. Gives it, and with CLONE_VFORK what its parent must wait for.
pub fn clone_task(parent: &Arc<Task>, r: &CloneRequest) -> Result<(Arc<Task>, Option<Arc<VforkDone>>)> {
    let made = make(parent, r)?;
    run::start(&made.0);
    Ok(made)
}

/// [`clone_task`] but for the start.
pub(super) fn make(parent: &Arc<Task>, r: &CloneRequest) -> Result<(Arc<Task>, Option<Arc<VforkDone>>)> {
    use flag::*;
    check(parent, r)?;
    if r.flags & THREAD == 0 && parent.interruption.is_pending() {
        return Err(Errno::ERESTARTNOINTR);
    }
    let kernel = parent.kernel().clone();
    let credentials = parent.credentials();
    let nproc = parent.limit(Resource::Nproc);
    if credentials.uid != 0
        && kernel.user_tasks(credentials.uid) as u64 >= nproc
        && !credentials.has(Caps::SYS_RESOURCE)
        && !credentials.has(Caps::SYS_ADMIN)
    {
        return Err(Errno::EAGAIN);
    }
    kernel.count_task()?;
    build(parent, r, &kernel).inspect_err(|_| kernel.uncount_task())
}

fn child_context(parent: &Task, r: &CloneRequest) -> Result<UserContext> {
    let mut context = *parent.context.lock();
    context.rax = 0;
    context.orig_rax = u64::MAX;
    if r.stack != 0 {
        context.rsp = r.stack;
    }
    if r.flags & flag::SETTLS != 0 {
        if r.tls >= TLS_MAX {
            return Err(Errno::EPERM);
        }
        context.fs_base = r.tls;
    }
    Ok(context)
}

fn build(
    parent: &Arc<Task>,
    r: &CloneRequest,
    kernel: &Arc<crate::Kernel>,
) -> Result<(Arc<Task>, Option<Arc<VforkDone>>)> {
    use flag::*;
    let f = r.flags;
    let context = child_context(parent, r)?;
    let charge = Charge::new(&kernel.platform, KernelMemory::Task, TASK_COST)?;
    let fs = parent.fs();
    let mut fs_state = fs.get();
    let credentials = match f & NEWUSER {
        0 => parent.credentials(),
        _ => Arc::new(user_namespace::in_new_namespace(parent)?),
    };
    let nsproxy = parent.nsproxy()?.unshared(parent, f, &credentials.user_ns, &mut fs_state)?;
    let nsproxy = if f & VM == 0 { nsproxy.with_own_time() } else { nsproxy };
    let time = nsproxy.time.clone();
    let fs = if f & FS != 0 { fs } else { Arc::new(FsContext::new(fs_state)) };
    let space = parent.space()?;
    let space = if f & VM != 0 { space } else { space.fork()? };
    let files = parent.files();
    let files = if f & FILES != 0 { files } else { Arc::new(FdTable::duplicate(&files)?) };
    let fpu = kernel.platform.new_fpu();
    fpu.write(&parent.fpu.read())?;

    let now = kernel.timers.now();
    let owner = &nsproxy.pid_for_children.owner.user_ns;
    let able = |cap| parent.credentials().has_in(owner, cap);
    let may_choose = able(Caps::SYS_ADMIN) || able(Caps::CHECKPOINT_RESTORE);
    let pid = nsproxy.pid_for_children.allocate(&r.set_tid, may_choose)?;
    let mut undo = Undo { pid: Some(pid.clone()), kernel: kernel.clone(), pidfd: None };
    if f & INTO_CGROUP != 0 {
        // No descriptor can be that of a cgroup.
        return Err(Errno::EBADF);
    }

    let group = if f & THREAD != 0 {
        parent.group().clone()
    } else {
        let old = parent.group();
        let actions = old.signals.actions();
        let actions = if f & SIGHAND != 0 {
            actions
        } else if f & CLEAR_SIGHAND != 0 {
            actions.duplicate_reset()
        } else {
            SignalActions::duplicate(&actions)
        };
        let exit_signal = if f & PARENT != 0 { old.exit_signal.load(Ordering::Relaxed) } else { r.exit_signal };
        let group = ThreadGroup::new(
            kernel.clone(),
            pid.clone(),
            GroupSignals::new(actions),
            old.limits(),
            old.image(),
            exit_signal,
            now,
        );
        let execs = if f & PARENT != 0 { &old.parent_execs } else { &old.execs };
        group.parent_execs.store(execs.load(Ordering::Relaxed), Ordering::Relaxed);
        group.dumpable.store(old.dumpable.load(Ordering::Relaxed), Ordering::Relaxed);
        group.oom_score_adj.store(old.oom_score_adj.load(Ordering::Relaxed), Ordering::Relaxed);
        group.personality.store(old.personality.load(Ordering::Relaxed), Ordering::Relaxed);
        if pid.own() == 1 {
            group.signals.set_unkillable();
        }
        let _ = group.charge.set(charge.another(GROUP_COST)?);
        Arc::new(group)
    };
    let shares_beside = f & VM != 0 && f & VFORK == 0;
    let sched = Arc::new(parent.sched.inherit(group.cpu_clock.clone()));
    let task = Task::new(NewTask {
        kernel: kernel.clone(),
        group,
        pid: pid.clone(),
        context,
        fpu,
        signals: parent.signals.for_clone(shares_beside),
        space: space.clone(),
        files,
        fs,
        credentials,
        nsproxy,
        comm: parent.comm(),
        sched,
        start_time: now,
        charge,
    });
    task.timer_slack.store(parent.timer_slack.load(Ordering::Relaxed), Ordering::Relaxed);
    if f & SYSVSEM != 0 {
        *task.sem_undo.lock() = Some(parent.sem_undo());
    }
    task.set_time_offsets(parent.time_offsets());
    if f & VM == 0 {
        task.enter_time(&time);
        task.rseq.inherit(&parent.rseq);
    }
    if f & CHILD_CLEARTID != 0 {
        task.clear_child_tid.store(r.child_tid.0, Ordering::Relaxed);
    }
    let vfork = (f & VFORK != 0).then(|| Arc::new(VforkDone { done: AtomicBool::new(false), queue: WaitQueue::new() }));
    task.vfork_done.lock().clone_from(&vfork);

    if f & PIDFD != 0 {
        let file = pidfd::new_file(&pid, f & THREAD != 0, false);
        let table = parent.files();
        let fd = table.insert(file.clone(), true, 0, parent.limit(Resource::Nofile))?;
        undo.pidfd = Some((table, fd, file));
        parent.space()?.write(UserPtr::new(r.pidfd), &fd)?;
    }
    let traced = f & PTRACE != 0 || ptrace::attach::clone_event(parent, f, r.exit_signal).is_some();
    publish(parent, &task, f, traced).inspect_err(|_| {
        // Nobody has seen the task; its numbers go back.
        task.set_dead();
    })?;
    undo.keep();
    // Linux ignores a bad address here.
    if f & PARENT_SETTID != 0 {
        let tid = pid.number_in(parent.pid_namespace());
        let _ = parent.space()?.write(UserPtr::new(r.parent_tid), &tid);
    }
    if f & CHILD_SETTID != 0 {
        let _ = space.write(UserPtr::new(r.child_tid), &pid.own());
    }
    if f & THREAD == 0 {
        crate::timers::cpu::watch_limit(task.group());
    }
    Ok((task, vfork))
}

/// Gives numbers and the pidfd back unless the birth succeeds.
struct Undo {
    pid: Option<Arc<super::Pid>>,
    pidfd: Option<(Arc<FdTable>, i32, Arc<File>)>,
    kernel: Arc<crate::Kernel>,
}

impl Undo {
    fn keep(mut self) {
        self.pid = None;
        self.pidfd = None;
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some((table, fd, file)) = self.pidfd.take()
            // Another task that shares the table may have put something else there.
            && table.get(fd).is_ok_and(|there| Arc::ptr_eq(&there, &file))
        {
            let _ = table.remove(fd);
        }
        if let Some(pid) = self.pid.take() {
            let _kinship = self.kernel.kinship();
            pid.drop_task();
        }
    }
}

/// Makes the task visible to everybody, or fails without a trace.
fn publish(parent: &Arc<Task>, task: &Arc<Task>, flags: u64, traced: bool) -> Result<()> {
    use flag::{PARENT, THREAD};
    let kernel = task.kernel();
    let kinship = kernel.kinship();
    let group = task.group();
    seccomp::inherit(parent, task);
    if task.pid().numbers().iter().any(|(ns, _)| ns.exiting()) {
        return Err(Errno::ENOMEM);
    }
    if flags & THREAD != 0 {
        {
            let mut s = group.state.lock();
            if s.exiting.is_some() || s.exec_by.is_some() {
                return Err(Errno::ERESTARTNOINTR);
            }
            s.tasks.insert(task.global_tid(), task.clone());
            s.live += 1;
        }
        group.task_count.fetch_add(1, Ordering::Relaxed);
        task.pid().hold_task(task);
        if traced {
            ptrace::attach::inherit(parent, task, &kinship);
        }
        crate::signal::join_group_stop(task);
        return Ok(());
    }
    let own = parent.group();
    // Who signals the process group holds the kinship lock: the signal is pending here or finds the child.
    if own.exiting().is_some() || parent.interruption.is_pending() {
        return Err(Errno::ERESTARTNOINTR);
    }
    let (new_parent, parent_task) = if flags & PARENT != 0 {
        let s = own.state.lock();
        (s.parent.upgrade(), s.parent_task.upgrade())
    } else {
        (Some(own.clone()), Some(parent.clone()))
    };
    let process_group = own.process_group();
    {
        let mut s = group.state.lock();
        s.tasks.insert(task.global_tid(), task.clone());
        s.leader = Some(task.clone());
        s.live = 1;
        s.process_group = Some(process_group.clone());
        if let Some(p) = &new_parent {
            s.parent = Arc::downgrade(p);
        }
        if let Some(t) = &parent_task {
            s.parent_task = Arc::downgrade(t);
        }
    }
    if let Some(p) = &new_parent {
        let below = p.is_subreaper.load(Ordering::Relaxed) || p.has_subreaper.load(Ordering::Relaxed);
        group.has_subreaper.store(below, Ordering::Relaxed);
        p.state.lock().children.insert(group.pid().global(), group.clone());
    }
    if let Some(t) = &parent_task {
        t.own_children.fetch_add(1, Ordering::Relaxed);
    }
    group.task_count.store(1, Ordering::Relaxed);
    session::join(&process_group, group);
    task.pid().hold_task(task);
    group.pid().hold_group(group);
    if traced {
        ptrace::attach::inherit(parent, task, &kinship);
    }
    Ok(())
}

/// Waits for a vfork(2) child to let go of the memory, or for the caller's own end.
/// False in the latter case.
pub async fn wait_vfork(task: &Task, done: &Arc<VforkDone>) -> bool {
    // A kill ends the wait; the child goes on with the memory.
    task.wait_killable(vec![(done.queue.clone(), Events::IN)], || done.done.load(Ordering::SeqCst).then_some(()))
        .await
        .is_ok()
}

/// The exit signal of legacy clone(2), in the low byte of the flags.
pub const CSIGNAL: u64 = raw::CSIGNAL as u64;
