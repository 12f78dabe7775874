//! Job control: group stop and continuation (signal(7)), and the notices to the parent. A stop is complete when every task
//! of the group stands still.
use core::future::poll_fn;
use core::task::Poll;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::action::{SIG_IGN, sa};
use super::queue::{code, info};
use super::send::{Sender, send_to_group};
use super::set::{SigSet, Signal};
use super::state::GroupState;
use crate::event::Events;
use crate::task::ptrace::{self, attach, flag};
use crate::task::task::RunState;
use crate::task::{Task, ThreadGroup};

/// Drops pending signals of the whole group and of each task.
pub(super) fn discard_everywhere(group: &ThreadGroup, signals: SigSet) {
    group.signals.state.lock().pending.discard(signals);
    let mut from = 0;
    loop {
        let page = group.tasks_from(from, 64);
        let Some(next) = page.last().and_then(|t| t.global_tid().checked_add(1)) else { return };
        for task in page {
            task.signals.state.lock().pending.discard(signals);
        }
        from = next;
    }
}

/// Drops a pending signal that has become ignored, from the group and from each of its tasks.
pub fn discard(group: &ThreadGroup, signal: Signal) {
    discard_everywhere(group, SigSet::of(&[signal]));
}

/// SIGCONT was generated: ends a stop, or one under way, whatever its action.
pub(super) fn continue_group(group: &Arc<ThreadGroup>) {
    let tasks = group.tasks();
    let (mut woken, mut trapped) = (Vec::new(), Vec::new());
    let notice = {
        let mut state = group.signals.state.lock();
        state.continues += 1;
        for task in &tasks {
            let was_pending = task.signals.stop_pending.swap(false, Ordering::SeqCst);
            if task.signals.stopped.swap(false, Ordering::SeqCst) || was_pending {
                woken.push(task.clone());
            }
            if task.tracing.has(flag::SEIZED) {
                trapped.push(task.clone());
            }
        }
        let signal = state.stop_signal.take();
        let stopped = core::mem::take(&mut state.stopped);
        let under_way = core::mem::take(&mut state.stop_count) > 0;
        state.stop_unreported = false;
        if stopped {
            state.continued = true;
            Some((code::CLD_CONTINUED, Signal::SIGCONT))
        } else if under_way {
            signal.map(|s| (code::CLD_STOPPED, s))
        } else {
            None
        }
    };
    for task in woken {
        task.notify_signal();
    }
    for task in trapped {
        attach::trap(&task);
    }
    if let Some((what, signal)) = notice {
        notify_parent(group, what, signal);
    }
}

fn mark(state: &mut GroupState, tasks: &[Arc<Task>], but: &Arc<Task>) {
    for task in tasks {
        let s = &task.signals;
        if s.exiting.load(Ordering::SeqCst)
            || s.stopped.load(Ordering::SeqCst)
            || s.stop_pending.swap(true, Ordering::SeqCst)
        {
            continue;
        }
        state.stop_count += 1;
        if task.tracing.has(flag::SEIZED) {
            attach::trap(task);
        } else if !Arc::ptr_eq(task, but) {
            task.notify_signal();
        }
    }
}

/// Starts a group stop by `signal`, dequeued when the group had seen `continues` SIGCONTs. The caller takes part at its
/// next look. False if a SIGCONT or the group's exit came in between.
pub(super) fn begin(task: &Arc<Task>, signal: Signal, continues: u64) -> bool {
    let group = task.group();
    // A clone that is not in the first list has either seen the stop or is in the second.
    for round in 0..2 {
        let tasks = group.tasks();
        if group.exiting().is_some() {
            return false;
        }
        let mut state = group.signals.state.lock();
        if state.continues != continues {
            return false;
        }
        if round == 0 {
            state.stop_signal = Some(signal);
        }
        mark(&mut state, &tasks, task);
    }
    true
}

/// A new task of a group that is stopping or stopped takes part. Call it when the task is in the group's list.
pub fn join_group_stop(task: &Arc<Task>) {
    let mut state = task.group().signals.state.lock();
    if state.stop_signal.is_none() {
        return;
    }
    if state.stopped {
        state.stopped = false;
    }
    let s = &task.signals;
    if !s.stopped.load(Ordering::SeqCst) && !s.stop_pending.swap(true, Ordering::SeqCst) {
        state.stop_count += 1;
        drop(state);
        task.interruption.raise();
    }
}

/// Takes one task out of the count; gives the stop signal if that completed the stop.
pub(super) fn count_down(state: &mut GroupState) -> Option<Signal> {
    state.stop_count = state.stop_count.saturating_sub(1);
    if state.stop_count == 0 && !state.stopped {
        let signal = state.stop_signal?;
        state.stopped = true;
        state.stop_unreported = true;
        state.continued = false;
        return Some(signal);
    }
    None
}

/// Takes part in a stop: stands still until SIGCONT or the end of the group.
pub(super) async fn take_part(task: &Arc<Task>) {
    let group = task.group();
    let complete = {
        let mut state = group.signals.state.lock();
        if !task.signals.stop_pending.swap(false, Ordering::SeqCst) {
            return;
        }
        // A tracee stands still for its tracer instead.
        task.signals.stopped.store(!task.tracing.is_traced(), Ordering::SeqCst);
        count_down(&mut state)
    };
    if complete.is_some()
        && let Some(parent) = group.parent()
    {
        // Whoever traces it hears first; the parent may wait for it nevertheless.
        parent.note_child(group);
    }
    if !task.signals.is_stopped() && task.tracing.is_traced() {
        ptrace::stop::group(task, complete).await;
        return;
    }
    if let Some(signal) = complete {
        notify_parent(group, code::CLD_STOPPED, signal);
    }
    stand_still(task).await;
}

/// Waits for SIGCONT, a tracer, or the end of the group.
pub(super) async fn stand_still(task: &Arc<Task>) {
    task.set_run_state(RunState::Stopped);
    poll_fn(|cx| {
        task.interruption.set_waker(cx.waker());
        if !task.signals.is_stopped() || task.must_exit().is_some() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    task.signals.stopped.store(false, Ordering::SeqCst);
    task.set_run_state(RunState::Running);
}

/// Tells the parent that a stop is complete.
pub fn notify_stopped(group: &Arc<ThreadGroup>, signal: Signal) {
    notify_parent(group, code::CLD_STOPPED, signal);
}

/// Tells `tracer` that its tracee has stopped.
pub fn notify_tracer(tracee: &Task, tracer: &Task, what: i32, status: i32) {
    let group = tracer.group();
    let action = group.signals.actions().get(Signal::SIGCHLD);
    if action.handler != SIG_IGN && action.flags & sa::NOCLDSTOP == 0 {
        tell_tracer(tracee, tracer, what, status, Signal::SIGCHLD);
    }
    group.child_events.wake(Events::READABLE);
}

/// Sends `signal` to `tracer` with what happened to its tracee.
pub fn tell_tracer(tracee: &Task, tracer: &Task, what: i32, status: i32, signal: Signal) {
    let usage = tracee.sched.clock.reading(tracee.now());
    let pid = tracee.tid_in(tracer.pid_namespace());
    let uid = tracer.credentials().user_ns.shown_user(tracee.credentials().uid);
    let mut about =
        info::child(Signal::SIGCHLD, what, pid, uid, status, clock_ticks(usage.user), clock_ticks(usage.system));
    about.signo = signal.number();
    let _ = send_to_group(tracer.group(), signal, about, Sender::Event);
}

fn clock_ticks(ns: u64) -> i64 {
    i64::try_from(ns / 10_000_000).unwrap_or(i64::MAX)
}

/// Tells the parent that its child stopped or continued (SIGCHLD unless SA_NOCLDSTOP) and wakes its wait(2).
fn notify_parent(group: &Arc<ThreadGroup>, what: i32, signal: Signal) {
    let Some(parent) = group.parent() else { return };
    parent.note_child(group);
    let action = parent.signals.actions().get(Signal::SIGCHLD);
    if action.handler != SIG_IGN && action.flags & sa::NOCLDSTOP == 0 {
        let _ =
            send_to_group(&parent, Signal::SIGCHLD, child_info(group, &parent, what, signal.number()), Sender::Event);
    }
    parent.child_events.wake(Events::READABLE);
}

/// The siginfo of a child's change of state, as its parent sees it.
pub fn child_info(
    child: &Arc<ThreadGroup>,
    parent: &Arc<ThreadGroup>,
    what: i32,
    status: i32,
) -> guest_abi::types::SigInfo {
    let usage = child.usage();
    let uid = child.leader().map_or(0, |l| l.credentials().uid);
    let uid = parent.leader().map_or(uid, |p| p.credentials().user_ns.shown_user(uid));
    info::child(
        Signal::SIGCHLD,
        what,
        child.pid().number_in(parent.pid_namespace()),
        uid,
        status,
        clock_ticks(usage.user),
        clock_ticks(usage.system),
    )
}

/// CLD_* and si_status of a wait(2) status.
pub fn death_code(status: i32) -> (i32, i32) {
    match status & 0x7f {
        0 => (code::CLD_EXITED, status >> 8 & 0xff),
        n if status & 0x80 != 0 => (code::CLD_DUMPED, n),
        n => (code::CLD_KILLED, n),
    }
}

/// Tells the parent by `signal` that `child` has ended with `status` (wait(2)'s form). True if the parent does not care, so that the
/// child is to be reaped at once (SIG_IGN or SA_NOCLDWAIT for SIGCHLD).
pub fn notify_exit(child: &Arc<ThreadGroup>, parent: &Arc<ThreadGroup>, signal: Option<Signal>, status: i32) -> bool {
    let (what, shown) = death_code(status);
    let mut send = signal;
    let mut reap = false;
    if signal == Some(Signal::SIGCHLD) {
        let action = parent.signals.actions().get(Signal::SIGCHLD);
        if action.handler == SIG_IGN {
            reap = true;
            send = None;
        } else if action.flags & sa::NOCLDWAIT != 0 {
            reap = true;
        }
    }
    if let Some(signal) = send {
        let mut info = child_info(child, parent, what, shown);
        info.signo = signal.number();
        let _ = send_to_group(parent, signal, info, Sender::Event);
    }
    reap
}
