//! Generation of signals: permission, what is dropped at once, queueing, choice of the task that acts. Owns how a signal gets into a
//! queue; never what its delivery does.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use guest_abi::types::SigInfo;

use super::action::{self, SIG_DFL};
use super::queue::{Entry, Pending, TimerSignal, code, info};
use super::set::{DefaultAction, SigSet, Signal};
use super::state::TrapState;
use super::stop;
use crate::event::Events;
use crate::ns::user::Caps;
use crate::task::limits::Resource;
use crate::task::ptrace::flag;
use crate::task::{ProcessGroup, Task, ThreadGroup};
use crate::{Errno, Result};

/// Who sends. It decides whether the signal acts on the init of a PID namespace that has no handler for it.
#[derive(Clone, Copy)]
pub enum Sender<'a> {
    /// A task, by a system call. From an ancestor namespace SIGKILL and SIGSTOP act on an init.
    Task(&'a Task),
    /// The kernel for a reason of its own (a terminal, the end of a namespace): SIGKILL and SIGSTOP act on an init.
    Kernel,
    /// The kernel as the consequence of what some task did (SIGPIPE, SIGCHLD, timers): as a task inside.
    Event,
    /// The host: acts on everybody. To the one who runs the sandbox its init is the command, not an init.
    Host,
}

/// How far a signal gets with an init.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Force {
    None,
    KernelOnly,
    All,
}

impl Sender<'_> {
    fn force(self, target: &ThreadGroup) -> Force {
        // The command is number 1 of the outermost namespace, yet whoever runs the sandbox knows it as a command: what it does to
        // itself and what the kernel makes of its acts (SIGPIPE, alarms, terminals) end it as on the host. Only other
        // processes of the sandbox find an init.
        let command = target.pid_namespace().level() == 0;
        match self {
            Sender::Task(t) if command && core::ptr::eq(&raw const **t.group(), target) => Force::All,
            Sender::Event | Sender::Kernel if command => Force::All,
            Sender::Task(t) if t.group().pid().number_in(target.pid_namespace()) == 0 => Force::KernelOnly,
            Sender::Task(_) | Sender::Event => Force::None,
            Sender::Kernel => Force::KernelOnly,
            Sender::Host => Force::All,
        }
    }
}

/// Whom a signal is meant for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Directed {
    /// One task.
    Task,
    /// A thread group.
    Group,
    /// Every member of a process group.
    ProcessGroup,
}

/// Where a signal is queued.
#[derive(Clone, Copy)]
enum Queue<'a> {
    Task(&'a Arc<Task>),
    Group(&'a Arc<ThreadGroup>),
}

impl Queue<'_> {
    fn group(&self) -> &Arc<ThreadGroup> {
        match self {
            Queue::Task(t) => t.group(),
            Queue::Group(g) => g,
        }
    }

    fn with<R>(&self, f: impl FnOnce(&mut Pending) -> R) -> R {
        match self {
            Queue::Task(t) => f(&mut t.signals.state.lock().pending),
            Queue::Group(g) => f(&mut g.signals.state.lock().pending),
        }
    }
}

/// Whether `sender` may send `signal` to `target` (kill(2)).
pub fn check_permission(sender: &Task, target: &ThreadGroup, signal: Option<Signal>) -> Result<()> {
    if core::ptr::eq(&raw const **sender.group(), target) {
        return Ok(());
    }
    let own = sender.credentials();
    let Some(leader) = target.leader() else { return Err(Errno::ESRCH) };
    let other = leader.credentials();
    let same = own.euid == other.suid || own.euid == other.uid || own.uid == other.suid || own.uid == other.uid;
    if same || own.has_in(&other.user_ns, Caps::KILL) {
        return Ok(());
    }
    if signal == Some(Signal::SIGCONT) && Arc::ptr_eq(&sender.group().session(), &target.session()) {
        return Ok(());
    }
    Err(Errno::EPERM)
}

/// The siginfo of kill(2) (`SI_USER`) or tgkill(2) (`SI_TKILL`) as the target sees its sender.
pub fn info_from(sender: &Task, target: &ThreadGroup, signal: Signal, code: i32) -> SigInfo {
    let pid = sender.group().pid().number_in(target.pid_namespace());
    let uid = sender.credentials().uid;
    let uid = target.leader().map_or(uid, |t| t.credentials().user_ns.shown_user(uid));
    info::from_process(signal, code, pid, uid)
}

/// Queues a signal for one task. EAGAIN if a queued signal exceeds RLIMIT_SIGPENDING.
pub fn send_to_task(target: &Arc<Task>, signal: Signal, info: SigInfo, sender: Sender<'_>) -> Result<()> {
    if target.signals.exiting.load(Ordering::SeqCst) {
        return Ok(());
    }
    generate(Queue::Task(target), signal, info, sender, None).map(|_| ())
}

/// Queues a signal for a thread group. EAGAIN if a queued signal exceeds RLIMIT_SIGPENDING.
pub fn send_to_group(target: &Arc<ThreadGroup>, signal: Signal, info: SigInfo, sender: Sender<'_>) -> Result<()> {
    generate(Queue::Group(target), signal, info, sender, None).map(|_| ())
}

/// Sends to every member of a process group from the kernel (terminals, orphaned groups).
pub fn send_to_pgrp(target: &ProcessGroup, signal: Signal, sender: Sender<'_>) {
    for member in target.members() {
        // Only queued real-time signals can fail, and these are never sent here.
        let _ = send_to_group(&member, signal, info::kernel(signal), sender);
    }
}

/// Sends to every member of a process group on behalf of a task: success if one could be signalled, else the last error.
pub fn kill_pgrp(target: &ProcessGroup, signal: Option<Signal>, sender: &Task) -> Result<()> {
    let mut result = Err(Errno::ESRCH);
    // Nobody joins meanwhile: a member's child is one too.
    let _kinship = sender.kernel().kinship();
    for member in target.members() {
        let one = kill_group(&member, signal, sender);
        if result.is_err() {
            result = one;
        }
    }
    result
}

/// kill(2) of one group: permission, then SI_USER.
pub fn kill_group(target: &Arc<ThreadGroup>, signal: Option<Signal>, sender: &Task) -> Result<()> {
    check_permission(sender, target, signal)?;
    let Some(signal) = signal else { return Ok(()) };
    let info = info_from(sender, target, signal, code::SI_USER);
    send_to_group(target, signal, info, Sender::Task(sender))
}

/// Queues the expiry of a POSIX timer for a group or one of its tasks. False if it was dropped, so that nobody will take it.
pub fn send_timer(
    group: &Arc<ThreadGroup>,
    task: Option<&Arc<Task>>,
    signal: Signal,
    info: SigInfo,
    timer: &Arc<dyn TimerSignal>,
) -> bool {
    let queue = task.map_or(Queue::Group(group), Queue::Task);
    // The timer's own entry is never charged, so nothing can fail.
    generate(queue, signal, info, Sender::Event, Some(timer)).unwrap_or(false)
}

/// A signal that the host sent to the sandbox, for `target`.
pub fn from_host(target: &Arc<ThreadGroup>, signal: Signal) {
    let _ = send_to_group(target, signal, info::kernel(signal), Sender::Host);
}

/// Makes `task`, which is the caller, take `signal` as the consequence of its own instruction: neither a mask nor SIG_IGN nor
/// being an init helps.
pub fn force(task: &Arc<Task>, signal: Signal, info: SigInfo) {
    force_with(task, signal, info, false);
}

/// [`force`] with the default action whatever handler there is.
pub fn force_fatal(task: &Arc<Task>, signal: Signal) {
    force_with(task, signal, info::kernel(signal), true);
}

/// [`force_fatal`] with information of its own.
pub fn force_fatal_with(task: &Arc<Task>, signal: Signal, info: SigInfo) {
    force_with(task, signal, info, true);
}

/// [`force`] after an exception: the frame will show `trap`.
pub fn force_trap(task: &Arc<Task>, signal: Signal, info: SigInfo, trap: TrapState) {
    task.signals.set_trap(trap);
    force_with(task, signal, info, false);
}

fn force_with(task: &Arc<Task>, signal: Signal, info: SigInfo, default: bool) {
    let actions = task.group().signals.actions();
    let mut act = actions.get(signal);
    let blocked = task.signals.mask().contains(signal);
    if default || blocked || act.handler == action::SIG_IGN {
        act.handler = SIG_DFL;
        actions.set(signal, act);
        if blocked {
            let mut mask = task.signals.mask();
            mask.remove(signal);
            task.signals.store_mask(mask);
        }
    }
    let mut state = task.signals.state.lock();
    // A standard signal is queued once; this one must be the entry that a handler sees.
    if !signal.is_realtime() {
        state.pending.discard(SigSet::of(&[signal]));
    }
    state.pending.push(Entry { signal, info, forced: true, timer: None, charge: None });
    drop(state);
    task.interruption.raise();
}

/// Whether the signal is to be dropped although nobody blocks it.
fn dropped(group: &ThreadGroup, signal: Signal, force: Force) -> bool {
    let handler = group.signals.actions().get(signal).handler;
    if group.signals.unkillable.load(Ordering::SeqCst)
        && handler == SIG_DFL
        && !(force == Force::All || (force == Force::KernelOnly && signal.is_kernel_only()))
    {
        return true;
    }
    action::is_ignored(signal, handler)
}

/// Gives whether the signal is pending now; it is not if it was dropped.
fn generate(
    queue: Queue<'_>,
    signal: Signal,
    info: SigInfo,
    sender: Sender<'_>,
    timer: Option<&Arc<dyn TimerSignal>>,
) -> Result<bool> {
    let group = queue.group();
    if group.is_zombie() || group.exiting().is_some() {
        if signal == Signal::SIGKILL {
            crate::task::ptrace::stop::end_exit_stops(group);
        }
        return Ok(false);
    }
    let force = sender.force(group);
    if SigSet::STOP.contains(signal) {
        stop::discard_everywhere(group, SigSet::of(&[Signal::SIGCONT]));
    } else if signal == Signal::SIGCONT {
        stop::discard_everywhere(group, SigSet::STOP);
        stop::continue_group(group);
    }
    let looked_at = match queue {
        Queue::Task(t) => Some(t.clone()),
        Queue::Group(g) => g.leader(),
    };
    let blocked = looked_at.as_ref().is_some_and(|t| t.signals.mask().contains(signal));
    // A tracer gets to see what its tracee ignores.
    let shown = signal != Signal::SIGKILL && looked_at.as_ref().is_some_and(|t| t.tracing.is_traced());
    if !blocked && !shown && dropped(group, signal, force) {
        return Ok(false);
    }
    // Reaching the limit must not lose a signal the kernel or kill(2) sends: only its siginfo.
    let kernel_code = info.code >= code::SI_USER;
    let unlimited = !signal.is_realtime() && kernel_code;
    let charge = if timer.is_some() {
        None
    } else {
        let uid = looked_at.as_ref().map_or(0, |t| t.credentials().uid);
        let limit = if unlimited { u64::MAX } else { group.limit(Resource::Sigpending).cur };
        let charge = group.kernel().pending_counts.charge(uid, limit);
        if charge.is_none() && signal.is_realtime() && info.code != code::SI_USER {
            return Err(Errno::EAGAIN);
        }
        charge
    };
    let forced = force == Force::All;
    let queued = queue.with(|pending| {
        // Every timer has an entry of its own; other standard signals are pending once.
        if timer.is_none() && !signal.is_realtime() && pending.set().contains(signal) {
            return false;
        }
        if let Some(timer) = timer {
            // A new setting replaces what an older one left.
            pending.discard_timer(timer);
        }
        if timer.is_none() && charge.is_none() {
            pending.mark(signal, forced);
        } else {
            pending.push(Entry { signal, info, forced, timer: timer.cloned(), charge });
        }
        true
    });
    if !queued {
        return Ok(true);
    }
    group.signals.arrivals.wake(Events::READABLE);
    if let Some(target) = choose(queue, signal) {
        // One that a task waits for by rt_sigtimedwait(2) is taken, not acted on.
        let shown = signal != Signal::SIGKILL && target.tracing.is_traced();
        if is_fatal(group, signal, forced) && !target.signals.mask().contains(signal) && !shown {
            // Without a core to dump nobody need run before the whole group knows.
            group.begin_exit(signal.number());
        }
        target.notify_signal();
    }
    Ok(true)
}

fn is_fatal(group: &ThreadGroup, signal: Signal, forced: bool) -> bool {
    signal.default_action() == DefaultAction::Terminate
        && group.signals.actions().get(signal).handler == SIG_DFL
        && (signal == Signal::SIGKILL || forced || !group.signals.unkillable.load(Ordering::SeqCst))
}

/// Whether `task` would act on the signal.
fn wants(task: &Task, signal: Signal) -> bool {
    if task.signals.unwanted().contains(signal) || task.signals.exiting.load(Ordering::SeqCst) || task.is_dead() {
        return false;
    }
    signal == Signal::SIGKILL || !(task.signals.is_stopped() || task.tracing.has(flag::STOPPED))
}

/// The task that is to act: the addressed one or the leader if it would, else the next of the group that would, one without
/// anything to do yet if possible.
fn choose(queue: Queue<'_>, signal: Signal) -> Option<Arc<Task>> {
    let group = match queue {
        Queue::Task(t) => return wants(t, signal).then(|| t.clone()),
        Queue::Group(g) => g,
    };
    if let Some(leader) = group.leader().filter(|l| wants(l, signal)) {
        return Some(leader);
    }
    let turn = group.signals.state.lock().turn;
    let mut busy = None;
    let found = search(group, turn.saturating_add(1), i32::MAX, signal, &mut busy)
        .or_else(|| search(group, 0, turn.saturating_add(1), signal, &mut busy))
        .or(busy)?;
    group.signals.state.lock().turn = found.global_tid();
    Some(found)
}

fn search(
    group: &ThreadGroup,
    mut from: i32,
    end: i32,
    signal: Signal,
    busy: &mut Option<Arc<Task>>,
) -> Option<Arc<Task>> {
    loop {
        let page = group.tasks_from(from, 16);
        let last = page.last()?.global_tid();
        for task in page {
            if task.global_tid() >= end {
                return None;
            }
            if wants(&task, signal) {
                if !task.interruption.is_pending() {
                    return Some(task);
                }
                busy.get_or_insert(task);
            }
        }
        from = last.checked_add(1)?;
    }
}
