//! Thread groups: processes. Owns the list of its tasks, its place among parents, children and process groups, its limits, and
//! what wait(2) tells of it; never what a signal does.
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use super::answers::{self, Version};
use super::limits::{Limits, Resource};
use super::ptrace::Tracees;
use super::{Pid, PidNamespace, ProcessGroup, Session, Task};
use crate::event::WaitQueue;
use crate::kernel::Kernel;
use crate::lock::{Mutex, Rank};
use crate::mm::Charge;
use crate::sched::{GroupClock, Usage, UsageValue};
use crate::signal::GroupSignals;
use crate::time::Nanos;
use crate::timers::GroupTimers;
use crate::vfs::File;

/// What the last execve(2) made of the process, for /proc.
#[derive(Clone, Default)]
pub struct Image {
    /// The program file (/proc/PID/exe).
    pub exe: Option<Arc<File>>,
    /// Start and end of the argument strings in memory (/proc/PID/cmdline).
    pub args: (u64, u64),
    /// Start and end of the environment strings.
    pub env: (u64, u64),
    /// The auxiliary vector as it lies in memory (/proc/PID/auxv).
    pub auxv: Vec<u8>,
    /// Top of the initial stack (startstack of /proc/PID/stat).
    pub stack_top: u64,
}

pub(super) struct State {
    /// Tasks that have not been reaped, by global tid; a dead leader stays while siblings live.
    pub tasks: BTreeMap<i32, Arc<Task>>,
    pub leader: Option<Arc<Task>>,
    /// Tasks that have not begun to exit.
    pub live: usize,
    pub parent: Weak<ThreadGroup>,
    /// The thread of the parent that made this group (or inherited it).
    pub parent_task: Weak<Task>,
    pub children: BTreeMap<i32, Arc<ThreadGroup>>,
    /// Those of `children` that may have news for wait(2): it looks at no others.
    pub news: BTreeMap<i32, Arc<ThreadGroup>>,
    pub process_group: Option<Arc<ProcessGroup>>,
    /// The status all tasks are to exit with: a fatal signal or exit_group(2) has been decided.
    pub exiting: Option<i32>,
    /// The task that is in execve(2) and waits for all others to go.
    pub exec_by: Option<Arc<Task>>,
    /// The status in wait(2)'s form, once a zombie.
    pub zombie: Option<i32>,
    /// Somebody has taken the zombie away.
    pub reaped: bool,
}

/// A process.
pub struct ThreadGroup {
    /// Its own memory, until it is reaped.
    pub(super) charge: OnceLock<Charge>,
    kernel: Arc<Kernel>,
    pid: Arc<Pid>,
    /// Actions, shared pending signals, job control.
    pub signals: GroupSignals,
    /// Interval timers, POSIX timers, CPU-time alarms.
    pub timers: GroupTimers,
    pub(super) state: Mutex<State>,
    limits: Mutex<Limits>,
    image: Mutex<Arc<Image>>,
    /// CPU time and counters of all its tasks, dead and alive.
    pub cpu_clock: Arc<GroupClock>,
    /// Usage of children that were waited for, and of their waited-for children.
    pub children_usage: Usage,
    /// Whom its tasks trace.
    pub tracees: Tracees,
    /// Tasks of it in PTRACE_EVENT_EXIT.
    pub(super) exit_stops: AtomicUsize,
    /// Fires (IN) when a child has news for wait(2).
    pub child_events: Arc<WaitQueue>,
    /// Fires (IN) when a task of the group is gone: exec waits here.
    pub task_events: Arc<WaitQueue>,
    /// The signal the parent gets at its end; 0 for none.
    pub exit_signal: AtomicI32,
    /// Counts execve(2): a parent that has become another program gets no signal but SIGCHLD from older children.
    pub(super) execs: AtomicU64,
    /// `execs` of the parent when it made this one.
    pub(super) parent_execs: AtomicU64,
    /// CLOCK_BOOTTIME of its start (survives exec).
    pub start_time: Nanos,
    /// PR_SET_CHILD_SUBREAPER.
    pub is_subreaper: AtomicBool,
    /// An ancestor is a subreaper.
    pub has_subreaper: AtomicBool,
    /// PR_SET_DUMPABLE.
    pub dumpable: AtomicI32,
    /// It has executed a program since fork: setpgid(2) by the parent is refused.
    pub has_execed: AtomicBool,
    /// Some task of it has asked for a parent-death signal.
    pub(super) wants_pdeath: AtomicBool,
    /// oom_score_adj.
    pub oom_score_adj: AtomicI32,
    /// personality(2).
    pub personality: AtomicU64,
    /// The version of its parent and process group.
    pub(super) answers: Version,
    /// Tasks that have not been reaped (kept beside the list for cheap reads).
    pub(super) task_count: AtomicUsize,
}

impl ThreadGroup {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        kernel: Arc<Kernel>,
        pid: Arc<Pid>,
        signals: GroupSignals,
        limits: Limits,
        image: Arc<Image>,
        exit_signal: i32,
        start_time: Nanos,
    ) -> ThreadGroup {
        let cpu_clock = GroupClock::new(kernel.sched.cpus());
        ThreadGroup {
            charge: OnceLock::new(),
            kernel,
            pid,
            signals,
            timers: GroupTimers::default(),
            state: Mutex::new(
                Rank::ThreadGroup,
                State {
                    tasks: BTreeMap::new(),
                    leader: None,
                    live: 0,
                    parent: Weak::new(),
                    parent_task: Weak::new(),
                    children: BTreeMap::new(),
                    news: BTreeMap::new(),
                    process_group: None,
                    exiting: None,
                    exec_by: None,
                    zombie: None,
                    reaped: false,
                },
            ),
            limits: Mutex::new(Rank::Leaf, limits),
            image: Mutex::new(Rank::Leaf, image),
            cpu_clock,
            children_usage: Usage::default(),
            tracees: Tracees::default(),
            exit_stops: AtomicUsize::new(0),
            child_events: WaitQueue::new(),
            task_events: WaitQueue::new(),
            exit_signal: AtomicI32::new(exit_signal),
            execs: AtomicU64::new(0),
            parent_execs: AtomicU64::new(0),
            start_time,
            is_subreaper: AtomicBool::new(false),
            has_subreaper: AtomicBool::new(false),
            dumpable: AtomicI32::new(1),
            has_execed: AtomicBool::new(false),
            wants_pdeath: AtomicBool::new(false),
            oom_score_adj: AtomicI32::new(0),
            personality: AtomicU64::new(0),
            answers: Version::default(),
            task_count: AtomicUsize::new(0),
        }
    }

    /// The sandbox.
    pub fn kernel(&self) -> &Arc<Kernel> {
        &self.kernel
    }

    /// Its identity; the same for its whole life.
    pub fn pid(&self) -> &Arc<Pid> {
        &self.pid
    }

    /// Its innermost PID namespace.
    pub fn pid_namespace(&self) -> &Arc<PidNamespace> {
        self.pid.namespace()
    }

    /// getpid(2): the tgid in its own namespace.
    pub fn tgid(&self) -> i32 {
        self.pid.own()
    }

    /// The leader, dead or alive; None only before it is complete and after it is reaped.
    pub fn leader(&self) -> Option<Arc<Task>> {
        self.state.lock().leader.clone()
    }

    /// All tasks that have not been reaped, by tid.
    pub fn tasks(&self) -> Vec<Arc<Task>> {
        let tasks: Vec<_> = self.state.lock().tasks.values().cloned().collect();
        visits::add(tasks.len());
        tasks
    }

    /// At most `max` tasks with a global tid at or above `from`.
    pub fn tasks_from(&self, from: i32, max: usize) -> Vec<Arc<Task>> {
        let tasks: Vec<_> = self.state.lock().tasks.range(from..).take(max).map(|(_, t)| t.clone()).collect();
        visits::add(tasks.len());
        tasks
    }

    /// Number of tasks that have not been reaped.
    pub fn task_count(&self) -> usize {
        self.task_count.load(Ordering::Relaxed)
    }

    /// Tasks that have not begun to exit.
    pub fn live(&self) -> usize {
        self.state.lock().live
    }

    /// The parent; None for the sandbox's init and for one that was reaped.
    pub fn parent(&self) -> Option<Arc<ThreadGroup>> {
        self.state.lock().parent.upgrade()
    }

    /// The thread of the parent that made this group (or inherited it).
    pub fn parent_task(&self) -> Option<Arc<Task>> {
        self.state.lock().parent_task.upgrade()
    }

    /// getppid(2) as `ns` sees it.
    pub fn parent_number_in(&self, ns: &PidNamespace) -> i32 {
        self.parent().map_or(0, |p| p.pid.number_in(ns))
    }

    /// Children that have not been reaped.
    pub fn children(&self) -> Vec<Arc<ThreadGroup>> {
        self.state.lock().children.values().cloned().collect()
    }

    /// At most `max` children with a global tgid at or above `from`, or only those that may have news for wait(2).
    pub(super) fn children_from(&self, from: i32, max: usize, with_news: bool) -> Vec<Arc<ThreadGroup>> {
        let s = self.state.lock();
        let map = if with_news { &s.news } else { &s.children };
        map.range(from..).take(max).map(|(_, c)| c.clone()).collect()
    }

    /// `child` has died, stopped or continued, which shows in its state already. No matter to one that is not its parent.
    pub fn note_child(&self, child: &Arc<ThreadGroup>) {
        let n = child.pid.global();
        let mut s = self.state.lock();
        if s.children.contains_key(&n) {
            s.news.insert(n, child.clone());
        }
    }

    /// wait(2) has looked at `child`: it is forgotten unless there is news left. Removed before the look, so that what
    /// happens meanwhile is noted again.
    pub(super) fn settle_child(&self, child: &Arc<ThreadGroup>) {
        let old = self.state.lock().news.remove(&child.pid.global());
        if child.has_news() {
            self.note_child(child);
        }
        drop(old);
    }

    /// Whether wait(2) could report something of it.
    pub(super) fn has_news(&self) -> bool {
        self.is_zombie() || self.signals.has_report()
    }

    /// Its process group; after it was reaped that of the sandbox's init or, at the very end, its last one.
    pub fn process_group(&self) -> Arc<ProcessGroup> {
        let own = self.state.lock().process_group.clone();
        // A group is in a process group from before it becomes visible; it keeps the handle even when reaped.
        own.expect("a visible thread group is in a process group")
    }

    /// Its session.
    pub fn session(&self) -> Arc<Session> {
        self.process_group().session().clone()
    }

    /// Whether all its tasks have exited and it waits for its parent.
    pub fn is_zombie(&self) -> bool {
        self.state.lock().zombie.is_some()
    }

    /// The wait(2) status its tasks must exit with, once that is decided.
    pub fn exiting(&self) -> Option<i32> {
        self.state.lock().exiting
    }

    /// Whether it is stopped by job control; one that is about to die is not.
    pub fn is_stopped(&self) -> bool {
        self.signals.is_stopped() && self.exiting().is_none()
    }

    /// Decides the end of the group: every task leaves the guest and exits with `status` (wait(2)'s form). The first decision
    /// stands; false if there was one before, or if nobody is left to follow it.
    pub fn begin_exit(&self, status: i32) -> bool {
        let tasks: Vec<Arc<Task>> = {
            let mut s = self.state.lock();
            // Tasks that have all begun to exit keep their own status.
            if s.exiting.is_some() || s.live == 0 {
                return false;
            }
            s.exiting = Some(status);
            s.tasks.values().cloned().collect()
        };
        visits::add(tasks.len());
        for t in tasks {
            t.notify_signal();
        }
        true
    }

    /// A limit.
    pub fn limit(&self, which: Resource) -> guest_abi::types::Rlimit {
        self.limits.lock()[which as usize]
    }

    /// All limits.
    pub fn limits(&self) -> Limits {
        *self.limits.lock()
    }

    /// Replaces a limit after the caller's checks.
    pub fn set_limit(&self, which: Resource, value: guest_abi::types::Rlimit) {
        self.limits.lock()[which as usize] = value;
    }

    /// What it executes.
    pub fn image(&self) -> Arc<Image> {
        self.image.lock().clone()
    }

    /// Changes what /proc shows of the image (exec, PR_SET_MM).
    pub fn set_image(&self, image: Image) {
        let old = core::mem::replace(&mut *self.image.lock(), Arc::new(image));
        drop(old);
    }

    /// CPU time and counters of all its tasks, dead and alive.
    pub fn usage(&self) -> UsageValue {
        self.cpu_clock.reading(self.kernel.timers.now())
    }
}

/// Counts, in debug builds, the tasks that a walk over the threads of a group looks at: what enumerates processes must not.
pub mod visits {
    #[cfg(debug_assertions)]
    thread_local! { static COUNT: core::cell::Cell<usize> = const { core::cell::Cell::new(0) }; }

    #[cfg(debug_assertions)]
    pub(super) fn add(tasks: usize) {
        COUNT.set(COUNT.get() + tasks);
    }

    #[cfg(not(debug_assertions))]
    pub(super) fn add(_tasks: usize) {}

    /// Tasks looked at by this host thread since the last call.
    #[cfg(all(test, debug_assertions))]
    pub(in crate::task) fn take() -> usize {
        COUNT.take()
    }
}

/// Moves a group to another process group. The caller holds the kinship lock.
pub(super) fn move_to(group: &Arc<ThreadGroup>, new: &Arc<ProcessGroup>) {
    let old = {
        let mut s = group.state.lock();
        if s.process_group.as_ref().is_some_and(|pg| Arc::ptr_eq(pg, new)) {
            return;
        }
        s.process_group.replace(new.clone())
    };
    super::session::join(new, group);
    if let Some(old) = old {
        super::session::leave(&old, group);
    }
    answers::group_changed(group);
}
