//! The beginning and the end of tracing: PTRACE_TRACEME, ATTACH, SEIZE, DETACH, the tasks a tracee makes, the end of a
//! tracer. Owns who traces whom.
use std::sync::{Arc, Weak};

use super::super::access::may_inspect;
use super::super::{Task, ThreadGroup, exit};
use super::{Relation, event, flag, option, stop};
use crate::kernel::Kinship;
use crate::ns::user::Caps;
use crate::signal::{Sender, Signal, info, send_to_task};
use crate::{Errno, Result};

fn link(tracee: &Arc<Task>, tracer: &Arc<Task>, flags: u32, options: u32, _kinship: &Kinship<'_>) {
    if let Ok(space) = tracee.space() {
        space.forbid_direct();
    }
    let key = tracer.group().tracees.add(tracee);
    let relation = Relation { tracer: Arc::downgrade(tracer), key, options, message: 0, stop: None, waker: None };
    tracee.tracing.state.lock().relation = Some(Box::new(relation));
    tracee.tracing.set(flag::TRACED | flags);
}

/// Ends the relation. The tracee goes on with `data` as the signal of its stop, or stands still if its group is stopped.
pub(in crate::task) fn unlink(tracee: &Arc<Task>, data: i32, _kinship: &Kinship<'_>) {
    if !tracee.tracing.is_traced() {
        return;
    }
    // Before it goes on, so that it does not run in between.
    let stands = !tracee.is_dead() && tracee.signals.rejoin_group_stop(tracee.group());
    let relation = tracee.tracing.end(data);
    if stands {
        tracee.notify_signal();
    }
    if let Some(relation) = relation
        && let Some(tracer) = relation.tracer.upgrade()
    {
        tracer.group().tracees.remove(relation.key);
    }
}

/// PTRACE_TRACEME: the parent becomes the tracer. EPERM if there is a tracer.
pub fn trace_me(task: &Arc<Task>) -> Result<()> {
    let kinship = task.kernel().kinship();
    if task.tracing.is_traced() {
        return Err(Errno::EPERM);
    }
    // Linux finds no fault with a parent outside of the PID namespace; here there may be none at all.
    // One that is dying lets nobody go any more.
    if let Some(parent) = task.group().parent_task().filter(|p| p.must_exit().is_none()) {
        // The child consents: only what it could do beyond its parent counts.
        let (by, own) = (parent.credentials(), task.credentials());
        let inside = Arc::ptr_eq(&by.user_ns, &own.user_ns) && by.permitted.contains(own.permitted);
        if !inside && !by.has_in(&own.user_ns, Caps::SYS_PTRACE) {
            return Err(Errno::EPERM);
        }
        link(task, &parent, 0, 0, &kinship);
    }
    Ok(())
}

/// PTRACE_ATTACH, or with `seize` PTRACE_SEIZE with options. EPERM without the right, for a task of the own group, a dead one and
/// one that is traced already.
pub fn attach(task: &Arc<Task>, target: &Arc<Task>, seize: Option<u32>) -> Result<()> {
    if Arc::ptr_eq(task.group(), target.group()) {
        return Err(Errno::EPERM);
    }
    let kinship = task.kernel().kinship();
    // Under the lock, so that execve(2) finds either the tracer or itself asked about its new ids.
    may_inspect(task, target)?;
    if target.is_dead() || target.space().is_err() || target.tracing.is_traced() {
        return Err(Errno::EPERM);
    }
    let flags = if seize.is_some() { flag::SEIZED } else { 0 };
    link(target, task, flags, seize.unwrap_or(0), &kinship);
    if seize.is_none() {
        let _ = send_to_task(target, Signal::SIGSTOP, info::kernel(Signal::SIGSTOP), Sender::Host);
    }
    stop::convert(target, task);
    Ok(())
}

/// PTRACE_DETACH of a tracee that stands in a stop. EIO unless `data` is a signal or 0.
pub fn detach(tracee: &Arc<Task>, data: i32) {
    let kinship = tracee.kernel().kinship();
    unlink(tracee, data, &kinship);
}

/// PTRACE_INTERRUPT of a seized task.
pub fn interrupt(tracee: &Arc<Task>) {
    trap(tracee);
}

/// Makes a seized task stop once more, at its next look or at once if it only listens.
pub fn trap(tracee: &Arc<Task>) {
    tracee.tracing.set(flag::TRAP);
    if tracee.tracing.has(flag::LISTENING) {
        tracee.tracing.resume(0, 0);
    }
    tracee.notify_signal();
}

/// PTRACE_LISTEN: EIO unless the stop is one of a seized task's group.
pub fn listen(tracee: &Arc<Task>) -> Result<()> {
    if !tracee.tracing.has(flag::SEIZED) {
        return Err(Errno::EIO);
    }
    let at_group_stop = tracee.tracing.with(|r| r.stop.as_ref().is_some_and(|s| s.code >> 8 == event::STOP));
    if at_group_stop != Some(true) {
        return Err(Errno::EIO);
    }
    tracee.tracing.set(flag::LISTENING);
    // What came since the stop is told at once.
    if tracee.tracing.has(flag::TRAP) {
        trap(tracee);
    }
    Ok(())
}

/// What is reported of a clone(2) with these flags; None if nothing is.
pub fn clone_event(parent: &Task, flags: u64, exit_signal: i32) -> Option<i32> {
    use super::super::clone::flag::{UNTRACED, VFORK};
    if !parent.tracing.is_traced() || flags & UNTRACED != 0 {
        return None;
    }
    let what = if flags & VFORK != 0 {
        event::VFORK
    } else if exit_signal != Signal::SIGCHLD.number() {
        event::CLONE
    } else {
        event::FORK
    };
    parent.tracing.wants(what).then_some(what)
}

/// A tracee has made `child`, which is to be traced too. The child has not run yet.
pub(in crate::task) fn inherit(parent: &Arc<Task>, child: &Arc<Task>, kinship: &Kinship<'_>) {
    let Some((tracer, options)) = parent.tracing.with(|r| (r.tracer.clone(), r.options)) else { return };
    let Some(tracer) = Weak::upgrade(&tracer) else { return };
    let seized = parent.tracing.flags() & flag::SEIZED;
    link(child, &tracer, seized, options, kinship);
    if seized != 0 {
        child.tracing.set(flag::TRAP);
        child.interruption.raise();
    } else {
        let _ = send_to_task(child, Signal::SIGSTOP, info::kernel(Signal::SIGSTOP), Sender::Host);
    }
}

/// `tracer` ends: its tracees go on without it, or die where PTRACE_O_EXITKILL says so. Dead ones become their parents'.
pub(in crate::task) fn tracer_exits(tracer: &Arc<Task>, kinship: &Kinship<'_>, dropped: &mut Vec<Arc<ThreadGroup>>) {
    for tracee in tracer.group().tracees.all() {
        if !tracee.tracing.tracer().is_some_and(|t| Arc::ptr_eq(&t, tracer)) {
            continue;
        }
        let kill = tracee.tracing.with(|r| r.options & option::EXITKILL != 0) == Some(true);
        if kill {
            let signal = Signal::SIGKILL;
            let _ = crate::signal::send_to_group(tracee.group(), signal, info::kernel(signal), Sender::Host);
        }
        unlink(&tracee, 0, kinship);
        exit::tracer_gone(&tracee, tracer, kinship, dropped);
    }
}
