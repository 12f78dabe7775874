//! The stops of a tracee (ptrace(2), "Stopped states"): system calls, signals, events, group stops. The code runs in the
//! tracee; a stop lasts until its tracer resumes it, leaves it, or the tracee has to die.
use core::future::poll_fn;
use core::task::Poll;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use guest_abi::types::SigInfo;

use super::super::task::RunState;
use super::super::{Task, ThreadGroup};
use super::{Stop, event, flag, option, reparented};
use crate::Errno;
use crate::signal::queue::Entry;
use crate::signal::{Sender, Signal, code, info, send_to_task, stop as job};

/// PTRACE_EVENTMSG_SYSCALL_ENTRY.
pub const ENTRY: u64 = 1;
/// PTRACE_EVENTMSG_SYSCALL_EXIT.
pub const EXIT: u64 = 2;
/// Added to SIGTRAP in system call stops with PTRACE_O_TRACESYSGOOD.
const SYSGOOD: i32 = 0x80;

/// A signal number as a tracer gives it, or none.
fn injected(data: i32) -> Option<Signal> {
    Signal::new(data)
}

/// Enters a stop and tells the tracer. False if there is no tracer any more, or the task has to die.
fn begin(task: &Arc<Task>, stop: Stop, message: u64, what: i32, completes: Option<Signal>) -> bool {
    let _kinship = task.kernel().kinship();
    let shown = stop.code & 0x7f;
    let dies = stop.exit.is_none() && task.must_exit().is_some();
    let entered = !dies
        && task
            .tracing
            .with(|r| {
                r.stop = Some(stop);
                r.message = message;
                task.tracing.set(flag::STOPPED);
            })
            .is_some();
    if entered && let Some(tracer) = task.tracing.tracer() {
        job::notify_tracer(task, &tracer, what, shown);
    }
    if let Some(signal) = completes
        && (!entered || reparented(task))
    {
        job::notify_stopped(task.group(), signal);
    }
    entered
}

/// Whether a task in a stop has to leave it without its tracer.
fn killed(task: &Task) -> bool {
    match task.tracing.with(|r| r.stop.as_ref().and_then(|s| s.exit)).flatten() {
        None => task.must_exit().is_some(),
        Some(true) => false,
        Some(false) => task.group().exiting().is_some(),
    }
}

/// Stands still as long as the stop lasts.
pub async fn stand(task: &Arc<Task>) {
    task.set_run_state(RunState::Traced);
    poll_fn(|cx| {
        task.interruption.set_waker(cx.waker());
        if killed(task) {
            task.tracing.resume(0, 0);
        }
        let stands = task.tracing.with(|r| {
            let stands = r.stop.is_some();
            if stands {
                r.waker = Some(cx.waker().clone());
            }
            stands
        });
        if stands == Some(true) { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    task.set_run_state(RunState::Running);
    // Nobody was told of what came meanwhile.
    if crate::signal::deliver::deliverable(task) {
        task.interruption.raise();
    }
}

/// A trap of the kind that ptrace_notify(9) makes: si_code is the stop's code.
fn trap_info(task: &Task, signo: i32, code: i32) -> SigInfo {
    let mut i = info::from_process(Signal::SIGTRAP, code, task.tid(), task.own_uid());
    i.signo = signo;
    i
}

/// Stops with a trap; gives the signal that the tracer injects.
async fn trap_stop(task: &Arc<Task>, code: i32, message: u64, exit: Option<bool>) -> Option<Signal> {
    let info = Some(trap_info(task, Signal::SIGTRAP.number(), code));
    if !begin(task, Stop { code, info, unreported: true, exit }, message, code::CLD_TRAPPED, None) {
        return None;
    }
    stand(task).await;
    injected(task.tracing.take_outcome().0)
}

/// An event whose option is set; nothing else.
pub async fn event(task: &Arc<Task>, event: i32, message: u64) {
    if task.tracing.wants(event) {
        let _ = trap_stop(task, Signal::SIGTRAP.number() | event << 8, message, None).await;
    }
}

/// execve(2) is done; `old_tid` is the number the task had before in its tracer's namespace. Without the option a task that
/// was not seized gets a SIGTRAP.
pub async fn exec(task: &Arc<Task>, old_tid: i32) {
    if task.tracing.wants(event::EXEC) {
        event(task, event::EXEC, old_tid as u64).await;
    } else if task.tracing.flags() & (flag::TRACED | flag::SEIZED) == flag::TRACED {
        let i = info::from_process(Signal::SIGTRAP, code::SI_USER, task.group().tgid(), task.own_uid());
        let _ = send_to_task(task, Signal::SIGTRAP, i, Sender::Task(task));
    }
}

/// The task's number as its tracer sees it.
pub fn number_for_tracer(task: &Task) -> i32 {
    task.tracing.tracer().map_or(0, |t| task.tid_in(t.pid_namespace()))
}

/// `child`'s number as the tracer of `parent` sees it.
pub fn child_for_tracer(parent: &Task, child: &Task) -> u64 {
    parent.tracing.tracer().map_or(0, |t| child.tid_in(t.pid_namespace())) as u64
}

/// The task begins to exit.
pub async fn exit(task: &Arc<Task>, status: i32) {
    if task.tracing.wants(event::EXIT) {
        let decided = task.group().exiting().is_some();
        let code = Signal::SIGTRAP.number() | event::EXIT << 8;
        task.group().exit_stops.fetch_add(1, Ordering::SeqCst);
        let _ = trap_stop(task, code, u64::from(status as u32), Some(decided)).await;
        task.group().exit_stops.fetch_sub(1, Ordering::SeqCst);
    }
}

/// SIGKILL for a group whose end was decided before: those who stand in PTRACE_EVENT_EXIT go on.
pub fn end_exit_stops(group: &ThreadGroup) {
    if group.exit_stops.load(Ordering::SeqCst) == 0 {
        return;
    }
    for task in group.tasks() {
        if task.tracing.has(flag::STOPPED)
            && task.tracing.with(|r| r.stop.as_ref().is_some_and(|s| s.exit.is_some())) == Some(true)
        {
            task.tracing.resume(0, 0);
        }
    }
}

async fn syscall_stop(task: &Arc<Task>, message: u64) {
    let good = task.tracing.with(|r| r.options & option::TRACESYSGOOD != 0) == Some(true);
    let code = Signal::SIGTRAP.number() | if good { SYSGOOD } else { 0 };
    if let Some(signal) = trap_stop(task, code, message, None).await {
        let i = info::kernel(signal);
        let _ = send_to_task(task, signal, i, Sender::Task(task));
    }
}

/// Before a system call. False: the call is not to be made.
pub async fn syscall_entry(task: &Arc<Task>) -> bool {
    let emulate = task.tracing.has(flag::EMULATE);
    // What a tracer sees, and what stays if the call is skipped.
    task.context.lock().rax = Errno::ENOSYS.to_rax();
    syscall_stop(task, ENTRY).await;
    !emulate && task.must_exit().is_none()
}

/// After a system call: a stop, or the end of a step.
pub async fn syscall_exit(task: &Arc<Task>) {
    let flags = task.tracing.flags();
    if flags & flag::STEP != 0 && flags & flag::EMULATE == 0 {
        let rip = task.context.lock().rip;
        crate::signal::force(task, Signal::SIGTRAP, info::fault(Signal::SIGTRAP, code::TRAP_BRKPT, rip));
    } else if flags & flag::SYSCALL != 0 {
        syscall_stop(task, EXIT).await;
    }
}

/// A handler has been set up in a step.
pub async fn handler(task: &Arc<Task>) {
    if task.tracing.clear(flag::HANDLER) {
        let _ = trap_stop(task, Signal::SIGTRAP.number(), 0, None).await;
    }
}

/// A signal is about to be acted on. Gives what the tracer makes of it; None if it suppresses it.
pub async fn signal(task: &Arc<Task>, mut entry: Entry) -> Option<Entry> {
    let stop = Stop { code: entry.signal.number(), info: Some(entry.info), unreported: true, exit: None };
    if !begin(task, stop, 0, code::CLD_TRAPPED, None) {
        return Some(entry);
    }
    let tracer = task.tracing.tracer();
    stand(task).await;
    let (data, changed) = task.tracing.take_outcome();
    let signal = injected(data)?;
    if let Some(changed) = changed {
        entry.info = *changed;
    }
    if signal.number() != entry.info.signo {
        let (pid, uid) =
            tracer.map_or((0, 0), |t| (t.group().pid().number_in(task.pid_namespace()), task.shown_uid_of(&t)));
        entry.info = info::from_process(signal, code::SI_USER, pid, uid);
    }
    entry.signal = signal;
    if task.signals.mask().contains(signal) {
        let _ = send_to_task(task, signal, entry.info, Sender::Task(task));
        return None;
    }
    Some(entry)
}

/// A stop for the group: the task takes part in a group stop that `completes` with it, or the tracer of a seized task is to
/// look at where it is.
pub async fn group(task: &Arc<Task>, completes: Option<Signal>) {
    task.tracing.clear(flag::TRAP);
    let stop = group_stop(task);
    if begin(task, stop, 0, code::CLD_STOPPED, completes) {
        stand(task).await;
        let _ = task.tracing.take_outcome();
    }
}

/// The group's state as a stop of `task`.
fn group_stop(task: &Task) -> Stop {
    let signal = task.group().signals.stop_signal();
    if task.tracing.has(flag::SEIZED) {
        let signo = signal.unwrap_or(Signal::SIGTRAP).number();
        let code = signo | event::STOP << 8;
        return Stop { code, info: Some(trap_info(task, signo, code)), unreported: true, exit: None };
    }
    Stop { code: signal.unwrap_or(Signal::SIGSTOP).number(), info: None, unreported: true, exit: None }
}

/// A task that stands in a group stop has got a tracer: the stop becomes one of the tracer's. The caller holds the kinship lock.
pub(super) fn convert(task: &Arc<Task>, tracer: &Task) {
    if !task.signals.leave_group_stop() {
        return;
    }
    let stop = group_stop(task);
    let shown = stop.code & 0x7f;
    task.tracing.with(|r| r.stop = Some(stop));
    task.tracing.set(flag::STOPPED);
    task.notify_signal();
    job::notify_tracer(task, tracer, code::CLD_STOPPED, shown);
}
