//! The task: one guest thread. Fields that others may touch are behind locks; registers belong to whoever runs the task.
use core::future::Future;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use super::answers::Version;
use super::limits::Resource;
use super::nsproxy::NsProxy;
use super::ptrace::Tracing;
use super::rseq::Rseq;
use super::seccomp::Seccomp;
use super::{Pid, PidNamespace, ThreadGroup};
use crate::event::{Events, Interruption, WaitEnd, WaitQueue};
use crate::kernel::Kernel;
use crate::lock::{Mutex, Rank};
use crate::mm::{AddressSpace, Charge, Tenancy};
use crate::ns::net::NetNamespace;
use crate::ns::sem::UndoList;
use crate::ns::time::Offsets;
use crate::ns::user::Credentials;
use crate::ns::uts::UtsNamespace;
use crate::platform::{Fpu, UserContext};
use crate::sched::Entity;
use crate::signal::TaskSignals;
use crate::time::Nanos;
use crate::timers::cpu::CpuAlarms;
use crate::vfs::file::Caller;
use crate::vfs::{FdTable, FsContext};
use crate::{Errno, Result};

/// What a task is doing, as /proc/PID/stat shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum RunState {
    Running = b'R',
    Sleeping = b'S',
    Stopped = b'T',
    Traced = b't',
    Zombie = b'Z',
    Dead = b'X',
}

/// One guest thread.
pub struct Task {
    kernel: Arc<Kernel>,
    group: Arc<ThreadGroup>,
    pid: Mutex<Arc<Pid>>,
    global_tid: AtomicI32,
    own_tid: AtomicI32,
    /// Registers. Locked by the task's own loop for moments, never while the guest runs; others look only when it is stopped.
    pub context: Mutex<UserContext>,
    /// Vector registers.
    pub fpu: Arc<dyn Fpu>,
    /// Ends its waits. Raise it through [`Task::notify_signal`].
    pub interruption: Interruption,
    /// Blocked and pending signals, alternate stack, restart block.
    pub signals: TaskSignals,
    /// Its tracer, and whether it stands in a stop.
    pub tracing: Tracing,
    /// Which system calls it may still make.
    pub seccomp: Seccomp,
    pub(super) space: Mutex<Option<Tenancy>>,
    pub(super) files: Mutex<Arc<FdTable>>,
    pub(super) fs: Mutex<Arc<FsContext>>,
    credentials: Mutex<Arc<Credentials>>,
    nsproxy: Mutex<Option<Arc<NsProxy>>>,
    comm: Mutex<[u8; 16]>,
    /// The version of its number and credentials.
    pub(super) answers: Version,
    /// Scheduling parameters and CPU time.
    pub sched: Arc<Entity>,
    /// Alarms on its CPU clock.
    pub cpu_alarms: CpuAlarms,
    /// The worker whose vCPU runs the task's guest code right now; -1 if none.
    running_on: AtomicI32,
    run_state: AtomicU8,
    /// Word cleared and woken at exit (set_tid_address(2)).
    pub clear_child_tid: AtomicU64,
    /// Head of the robust futex list (set_robust_list(2)); 0 if none.
    pub robust_list: AtomicU64,
    /// How far its monotonic and boot-time clocks are from the machine's.
    time_offsets: [AtomicI64; 2],
    /// What semop(2) has to undo at the end; shared with CLONE_SYSVSEM.
    pub(super) sem_undo: Mutex<Option<Arc<UndoList>>>,
    /// Restartable sequences.
    pub rseq: Rseq,
    /// The task has handed on the priority-inheritance futexes it owned and will not look again; execve(2) begins anew.
    pub futexes_settled: AtomicBool,
    /// PR_SET_PDEATHSIG.
    pub pdeath_signal: AtomicI32,
    /// PR_SET_TIMERSLACK, ns.
    pub timer_slack: AtomicU64,
    /// CLOCK_BOOTTIME of its start (a task that takes the leader's place by exec inherits the leader's).
    pub start_time: AtomicU64,
    /// Children of the group whose parent is this very task.
    pub(super) own_children: AtomicUsize,
    /// The task that vfork(2) made from a parent which still waits; fires (IN) when it lets go of the memory.
    pub(super) vfork_done: Mutex<Option<Arc<super::clone::VforkDone>>>,
    dead: AtomicBool,
    /// Bit 32 set: it has called exit(2); the low half is the wait(2) status.
    own_exit: AtomicU64,
    /// The user whose RLIMIT_NPROC count holds it.
    charged_uid: AtomicU32,
    /// Its user namespace may still get the maps that say what its ids read as.
    ids_unsettled: AtomicBool,
    /// Its own memory and, for a leader, its process's.
    _charge: Charge,
}

/// Parts of a new task that its maker decides.
pub(super) struct NewTask {
    pub kernel: Arc<Kernel>,
    pub group: Arc<ThreadGroup>,
    pub pid: Arc<Pid>,
    pub context: UserContext,
    pub fpu: Arc<dyn Fpu>,
    pub signals: TaskSignals,
    pub space: Arc<AddressSpace>,
    pub files: Arc<FdTable>,
    pub fs: Arc<FsContext>,
    pub credentials: Arc<Credentials>,
    pub nsproxy: Arc<NsProxy>,
    pub comm: [u8; 16],
    pub sched: Arc<Entity>,
    pub start_time: Nanos,
    pub charge: Charge,
}

impl Task {
    pub(super) fn new(n: NewTask) -> Arc<Task> {
        n.kernel.charge_user(n.credentials.uid);
        Arc::new(Task {
            _charge: n.charge,
            charged_uid: AtomicU32::new(n.credentials.uid),
            ids_unsettled: AtomicBool::new(!n.credentials.ids_are_settled()),
            own_exit: AtomicU64::new(0),
            global_tid: AtomicI32::new(n.pid.global()),
            own_tid: AtomicI32::new(n.pid.own()),
            kernel: n.kernel,
            group: n.group,
            pid: Mutex::new(Rank::Leaf, n.pid),
            context: Mutex::new(Rank::Task, n.context),
            fpu: n.fpu,
            interruption: Interruption::default(),
            signals: n.signals,
            tracing: Tracing::default(),
            seccomp: Seccomp::default(),
            space: Mutex::new(Rank::Leaf, Some(Tenancy::new(n.space))),
            files: Mutex::new(Rank::Leaf, n.files),
            fs: Mutex::new(Rank::Leaf, n.fs),
            credentials: Mutex::new(Rank::Leaf, n.credentials),
            nsproxy: Mutex::new(Rank::Leaf, Some(n.nsproxy)),
            comm: Mutex::new(Rank::Leaf, n.comm),
            answers: Version::default(),
            sched: n.sched,
            cpu_alarms: CpuAlarms::default(),
            running_on: AtomicI32::new(-1),
            run_state: AtomicU8::new(RunState::Running as u8),
            clear_child_tid: AtomicU64::new(0),
            robust_list: AtomicU64::new(0),
            time_offsets: [const { AtomicI64::new(0) }; 2],
            sem_undo: Mutex::new(Rank::Leaf, None),
            rseq: Rseq::default(),
            futexes_settled: AtomicBool::new(false),
            pdeath_signal: AtomicI32::new(0),
            timer_slack: AtomicU64::new(50_000),
            start_time: AtomicU64::new(n.start_time),
            own_children: AtomicUsize::new(0),
            vfork_done: Mutex::new(Rank::Leaf, None),
            dead: AtomicBool::new(false),
        })
    }

    /// The sandbox.
    pub fn kernel(&self) -> &Arc<Kernel> {
        &self.kernel
    }

    /// The process.
    pub fn group(&self) -> &Arc<ThreadGroup> {
        &self.group
    }

    /// Its identity. Changes only when exec gives it the leader's.
    pub fn pid(&self) -> Arc<Pid> {
        self.pid.lock().clone()
    }

    pub(super) fn set_pid(&self, pid: Arc<Pid>) {
        self.global_tid.store(pid.global(), Ordering::SeqCst);
        self.own_tid.store(pid.own(), Ordering::SeqCst);
        let old = core::mem::replace(&mut *self.pid.lock(), pid);
        self.answers.change();
        drop(old);
    }

    /// Number in the root PID namespace (unique in the sandbox).
    pub fn global_tid(&self) -> i32 {
        self.global_tid.load(Ordering::Relaxed)
    }

    /// gettid(2): the number in its own PID namespace.
    pub fn tid(&self) -> i32 {
        self.own_tid.load(Ordering::Relaxed)
    }

    /// The number as `ns` sees it; 0 if it does not.
    pub fn tid_in(&self, ns: &PidNamespace) -> i32 {
        self.pid.lock().number_in(ns)
    }

    /// Its innermost PID namespace.
    pub fn pid_namespace(&self) -> &Arc<PidNamespace> {
        self.group.pid_namespace()
    }

    /// Whether it leads its group.
    pub fn is_leader(&self) -> bool {
        self.global_tid() == self.group.pid().global()
    }

    /// Memory; ESRCH once the task has let go of it.
    pub fn space(&self) -> Result<Arc<AddressSpace>> {
        self.space.lock().as_ref().map(|t| t.space().clone()).ok_or(Errno::ESRCH)
    }

    /// Descriptors; an empty table once the task has let go of them.
    pub fn files(&self) -> Arc<FdTable> {
        self.files.lock().clone()
    }

    /// Gives the task a descriptor table of its own (CLOSE_RANGE_UNSHARE). ENOMEM.
    pub fn unshare_files(&self) -> Result<()> {
        let own = Arc::new(self.files().duplicate()?);
        self.set_files(own);
        Ok(())
    }

    pub(super) fn set_files(&self, files: Arc<FdTable>) {
        let old = core::mem::replace(&mut *self.files.lock(), files);
        // The last user's drop closes what is open; no lock is held here.
        drop(old);
    }

    /// Root, working directory, umask.
    pub fn fs(&self) -> Arc<FsContext> {
        self.fs.lock().clone()
    }

    pub(super) fn set_fs(&self, fs: Arc<FsContext>) {
        let old = core::mem::replace(&mut *self.fs.lock(), fs);
        drop(old);
    }

    /// Who it acts as.
    pub fn credentials(&self) -> Arc<Credentials> {
        self.credentials.lock().clone()
    }

    /// Whether what its ids read as changes only with its credentials: its user namespace has its maps.
    pub(super) fn ids_are_settled(&self) -> bool {
        !self.ids_unsettled.load(Ordering::SeqCst) || self.credentials().ids_are_settled()
    }

    /// Its real user id as it sees it itself.
    pub fn own_uid(&self) -> u32 {
        self.shown_uid_of(self)
    }

    /// The real user id of `other` as this task sees it.
    pub fn shown_uid_of(&self, other: &Task) -> u32 {
        let uid = other.credentials().uid;
        self.credentials().user_ns.shown_user(uid)
    }

    /// Replaces the credentials by a changed copy. Only the task itself changes its credentials.
    pub fn change_credentials(&self, change: impl FnOnce(&mut Credentials) -> Result<()>) -> Result<()> {
        let mut new = Credentials::clone(&*self.credentials());
        change(&mut new)?;
        let charged = self.charged_uid.swap(new.uid, Ordering::Relaxed);
        if charged != new.uid {
            self.kernel.charge_user(new.uid);
            self.kernel.uncharge_user(charged);
        }
        self.ids_unsettled.store(!new.ids_are_settled(), Ordering::SeqCst);
        let old = core::mem::replace(&mut *self.credentials.lock(), Arc::new(new));
        self.answers.change();
        drop(old);
        Ok(())
    }

    /// How far its clocks are from the machine's (time_namespaces(7)).
    pub fn time_offsets(&self) -> Offsets {
        let [monotonic, boottime] = &self.time_offsets;
        Offsets { monotonic: monotonic.load(Ordering::Relaxed), boottime: boottime.load(Ordering::Relaxed) }
    }

    pub(super) fn set_time_offsets(&self, offsets: Offsets) {
        let [monotonic, boottime] = &self.time_offsets;
        monotonic.store(offsets.monotonic, Ordering::Relaxed);
        boottime.store(offsets.boottime, Ordering::Relaxed);
    }

    /// The list that keeps what semop(2) has to undo.
    pub fn sem_undo(&self) -> Arc<UndoList> {
        self.sem_undo.lock().get_or_insert_with(|| UndoList::new(&self.kernel.platform)).clone()
    }

    /// Lets go of what semop(2) has to undo: the last one that does undoes it.
    pub(super) fn leave_sem_undo(&self) {
        let list = self.sem_undo.lock().take();
        if let Some(list) = &list {
            list.pid.store(self.group.pid().global(), Ordering::Relaxed);
        }
        drop(list);
    }

    /// Its namespaces; ESRCH once its exit has let go of them.
    pub fn nsproxy(&self) -> Result<Arc<NsProxy>> {
        self.nsproxy.lock().clone().ok_or(Errno::ESRCH)
    }

    pub(super) fn set_nsproxy(&self, new: Option<Arc<NsProxy>>) {
        let old = core::mem::replace(&mut *self.nsproxy.lock(), new);
        // The last user's drop takes mounts apart; no lock is held here.
        drop(old);
    }

    /// Host and domain name; the sandbox's own for a task that is gone.
    pub fn uts(&self) -> Arc<UtsNamespace> {
        self.nsproxy().map_or_else(|_| self.kernel.uts.clone(), |n| n.uts.clone())
    }

    /// The network; the sandbox's own for a task that is gone.
    pub fn net(&self) -> Arc<NetNamespace> {
        self.nsproxy().map_or_else(|_| self.kernel.net.clone(), |n| n.net.clone())
    }

    /// The name (PR_GET_NAME), NUL-padded.
    pub fn comm(&self) -> [u8; 16] {
        *self.comm.lock()
    }

    /// The name without padding.
    pub fn comm_str(&self) -> Vec<u8> {
        self.comm().into_iter().take_while(|&b| b != 0).collect()
    }

    /// Sets the name; cut at 15 bytes or the first NUL.
    pub fn set_comm(&self, name: &[u8]) {
        let mut comm = [0; 16];
        for (to, &from) in comm.iter_mut().take(15).zip(name.iter().take_while(|&&b| b != 0)) {
            *to = from;
        }
        *self.comm.lock() = comm;
    }

    /// Soft limit of the task's group.
    pub fn limit(&self, which: Resource) -> u64 {
        self.group.limit(which).cur
    }

    /// CLOCK_MONOTONIC now.
    pub fn now(&self) -> Nanos {
        self.kernel.timers.now()
    }

    /// Whether its exit is complete: it will never run again.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }

    pub(super) fn set_dead(&self) {
        self.dead.store(true, Ordering::SeqCst);
    }

    /// Decides that this task alone ends with `status` (wait(2)'s form) at its next look.
    pub fn end(&self, status: i32) {
        self.own_exit.store(1 << 32 | u64::from(status as u32), Ordering::SeqCst);
        self.interruption.raise();
    }

    /// PR_SET_PDEATHSIG.
    pub fn set_pdeath_signal(&self, signal: i32) {
        self.pdeath_signal.store(signal, Ordering::Relaxed);
        if signal != 0 {
            self.group.wants_pdeath.store(true, Ordering::Relaxed);
        }
    }

    /// PR_SET_CHILD_SUBREAPER: existing descendants learn of it.
    pub fn set_subreaper(&self, on: bool) {
        let _kinship = self.kernel.kinship();
        self.group.is_subreaper.store(on, Ordering::Relaxed);
        if !on {
            return;
        }
        let mut open = self.group.children();
        while let Some(g) = open.pop() {
            // Those below one that knows already know too.
            if !g.has_subreaper.swap(true, Ordering::Relaxed) {
                open.extend(g.children());
            }
        }
    }

    /// What it is doing.
    pub fn run_state(&self) -> RunState {
        match self.run_state.load(Ordering::Relaxed) {
            b'S' => RunState::Sleeping,
            b'T' => RunState::Stopped,
            b't' => RunState::Traced,
            b'Z' => RunState::Zombie,
            b'X' => RunState::Dead,
            _ => RunState::Running,
        }
    }

    /// Says what it is doing.
    pub fn set_run_state(&self, state: RunState) {
        self.run_state.store(state as u8, Ordering::Relaxed);
    }

    /// The worker whose vCPU runs its guest code now.
    pub fn running_on(&self) -> Option<usize> {
        usize::try_from(self.running_on.load(Ordering::SeqCst)).ok()
    }

    pub(super) fn set_running_on(&self, cpu: Option<usize>) {
        self.running_on.store(cpu.map_or(-1, |c| c as i32), Ordering::SeqCst);
    }

    /// Makes it leave the guest if it is there now.
    pub fn kick(&self) {
        if let Some(cpu) = self.running_on() {
            self.kernel.platform.kick(cpu);
        }
    }

    /// There is something to look at before the task goes on: ends its wait, or takes it out of the guest. The one way
    /// to interrupt a task; the cause must be visible before the call.
    pub fn notify_signal(&self) {
        self.interruption.raise();
        // The task publishes `running_on` before its last look at the flag: either it sees the flag or is kicked.
        self.kick();
    }

    /// The wait(2) status with which it must exit now: the group is exiting, or another task's exec ends it.
    pub fn must_exit(&self) -> Option<i32> {
        let by_exec = self.group.state.lock().exec_by.as_ref().is_some_and(|by| !core::ptr::eq(&raw const **by, self));
        if by_exec {
            return Some(linux_raw_sys::general::SIGKILL as i32);
        }
        let own = self.own_exit.load(Ordering::SeqCst);
        self.group.exiting().or((own != 0).then_some(own as u32 as i32))
    }

    /// Waits until `ready` gives a value, uninterrupted but for the task's own end: then Err gives the status to exit with.
    pub async fn wait_killable<T>(
        &self,
        queues: Vec<(Arc<WaitQueue>, Events)>,
        mut ready: impl FnMut() -> Option<T> + Send,
    ) -> Result<T, i32> {
        let mut end =
            crate::event::wait_for(None, queues, None, || ready().map(Ok).or_else(|| self.must_exit().map(Err)));
        self.set_run_state(RunState::Sleeping);
        let end = core::future::poll_fn(|cx| {
            self.interruption.set_waker(cx.waker());
            core::pin::Pin::new(&mut end).poll(cx)
        })
        .await;
        self.set_run_state(RunState::Running);
        // Without an interruption and a deadline the wait ends only by its condition.
        end.unwrap_or(Err(linux_raw_sys::general::SIGKILL as i32))
    }

    /// The one way a system call blocks: waits until `ready` gives a value; see [`crate::event::wait_for`]. `deadline` is
    /// monotonic time.
    pub async fn wait<T>(
        &self,
        queues: Vec<(Arc<WaitQueue>, Events)>,
        deadline: Option<Nanos>,
        ready: impl FnMut() -> Option<T> + Send,
    ) -> Result<T, WaitEnd> {
        let deadline = deadline.map(|at| self.kernel.timers.deadline(at));
        let end = crate::event::wait_for(
            Some(&self.interruption),
            queues,
            deadline.map(|d| d as Box<dyn crate::event::Deadline>),
            ready,
        );
        self.set_run_state(RunState::Sleeping);
        let end = end.await;
        self.set_run_state(RunState::Running);
        end
    }

    /// As `wait` on one queue, where `ready` consumes the condition: wakes that pick one waiter (`wake_up_to`) may pick this
    /// one alone.
    pub async fn wait_exclusive<T>(
        &self,
        queue: (Arc<WaitQueue>, Events),
        deadline: Option<Nanos>,
        ready: impl FnMut() -> Option<T> + Send,
    ) -> Result<T, WaitEnd> {
        let deadline = deadline.map(|at| self.kernel.timers.deadline(at));
        let deadline = deadline.map(|d| d as Box<dyn crate::event::Deadline>);
        self.set_run_state(RunState::Sleeping);
        let end = crate::event::wait_for(Some(&self.interruption), vec![queue], deadline, ready).exclusive().await;
        self.set_run_state(RunState::Running);
        end
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.kernel.uncharge_user(self.charged_uid.load(Ordering::Relaxed));
    }
}

impl Caller for Task {
    fn space(&self) -> Result<Arc<AddressSpace>> {
        Task::space(self)
    }
    fn credentials(&self) -> Arc<Credentials> {
        Task::credentials(self)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
