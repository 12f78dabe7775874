//! Delivery: what a task does about its signals before it enters the guest. Takes them off the queues, performs default
//! actions, starts handlers, and settles whether an interrupted system call runs again.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use guest_abi::Errno;
use guest_abi::types::SigAction;
use linux_raw_sys::general::__NR_restart_syscall;

use super::action::{SIG_DFL, SIG_IGN, sa};
use super::queue::Entry;
use super::set::{DefaultAction, SigSet, Signal};
use super::{fault, frame, mask, send, stop};
use crate::event::WaitEnd;
use crate::platform::UserContext;
use crate::task::ptrace::{self, flag};
use crate::task::{Task, rseq};
use crate::time::Nanos;

/// Signals acted on before others get a chance to run: a program may have queued a hundred thousand.
const MAX_ROUNDS: usize = 128;
/// Length of the SYSCALL instruction.
const SYSCALL_LEN: u64 = 2;

/// The kernel-internal error in rax of a call that asks to be restarted.
fn restart_code(ctx: &UserContext) -> Option<Errno> {
    if ctx.orig_rax == u64::MAX {
        return None;
    }
    let n = i32::try_from(0u64.wrapping_sub(ctx.rax)).ok()?;
    let e = Errno::from_raw(n);
    asks_for_restart(e).then_some(e)
}

/// Whether this is not an error of the call but a wish for what is to follow a signal.
pub fn asks_for_restart(e: Errno) -> bool {
    [Errno::ERESTARTSYS, Errno::ERESTARTNOINTR, Errno::ERESTARTNOHAND, Errno::ERESTART_RESTARTBLOCK].contains(&e)
}

/// Whether [`prepare_return`] has anything to do. Cheap: one atomic and two registers on the common path.
pub fn needs_prepare(task: &Task, ctx: &UserContext) -> bool {
    task.interruption.is_pending() || restart_code(ctx).is_some() || task.signals.has_saved_mask.load(Ordering::Relaxed)
}

/// Whether there is something that must end a wait of `task`.
pub fn deliverable(task: &Task) -> bool {
    let signals = &task.signals;
    let unblocked = !signals.mask();
    signals.stop_pending.load(Ordering::SeqCst)
        || signals.is_stopped()
        || task.tracing.has(flag::TRAP)
        || signals.pending().intersects(unblocked)
        || task.group().signals.pending().intersects(unblocked)
        || task.must_exit().is_some()
}

/// Whether the task is about to die: a wait that only a fatal signal may end (vfork) looks at this.
pub fn fatal_pending(task: &Task) -> bool {
    task.must_exit().is_some()
}

/// Settles everything that stands between `task` and its next entry into the guest: stops, signals, restarts, masks. The caller
/// (the task itself) does not hold the context. `Err` is the wait(2) status with which the task is to exit; the group's
/// exit has been decided by then.
pub async fn prepare_return(task: &Arc<Task>) -> Result<(), i32> {
    for _ in 0..MAX_ROUNDS {
        task.interruption.clear();
        if let Some(status) = task.must_exit() {
            return Err(status);
        }
        if task.tracing.has(flag::STOPPED) {
            ptrace::stop::stand(task).await;
            continue;
        }
        if task.signals.is_stopped() {
            stop::stand_still(task).await;
            continue;
        }
        if task.signals.stop_pending.load(Ordering::SeqCst) {
            stop::take_part(task).await;
            continue;
        }
        if task.tracing.has(flag::TRAP) {
            ptrace::stop::group(task, None).await;
            continue;
        }
        let Some((entry, continues)) = take(task) else {
            no_handler(task);
            // The mask that comes back may unblock something.
            mask::restore_saved_mask(task);
            if deliverable(task) {
                continue;
            }
            return Ok(());
        };
        let entry = if task.tracing.is_traced() && entry.signal != Signal::SIGKILL {
            let Some(entry) = ptrace::stop::signal(task, entry).await else { continue };
            entry
        } else {
            entry
        };
        if let Some(status) = act(task, entry, continues) {
            task.group().begin_exit(status);
            return Err(task.must_exit().unwrap_or(status));
        }
        if task.tracing.has(flag::HANDLER) {
            ptrace::stop::handler(task).await;
        }
    }
    // There is more to do; the way into the guest leads back here, past the scheduler.
    task.interruption.raise();
    Ok(())
}

/// The next signal to act on, and how many SIGCONTs the group had seen when it was taken.
fn take(task: &Arc<Task>) -> Option<(Entry, u64)> {
    take_from(task, !task.signals.mask(), true)
}

/// Takes a pending signal among `wanted`, the task's own first. Signals of timers that are gone are skipped.
pub(super) fn take_from(task: &Task, wanted: SigSet, synchronous_first: bool) -> Option<(Entry, u64)> {
    loop {
        let (mut entry, continues) = {
            let mut group = task.group().signals.state.lock();
            let continues = group.continues;
            let mut own = task.signals.state.lock();
            let first = if synchronous_first { own.pending.take_synchronous(wanted) } else { None };
            let entry = first.or_else(|| own.pending.take(wanted)).or_else(|| group.pending.take(wanted))?;
            (entry, continues)
        };
        if entry.signal == Signal::SIGALRM {
            task.group().timers.interval.alarm_taken(task.group());
        }
        if let Some(timer) = entry.timer.take()
            && !timer.taken(&mut entry.info)
        {
            continue;
        }
        return Some((entry, continues));
    }
}

/// Takes a pending signal among `wanted` for rt_sigtimedwait(2) and signalfd(2).
pub fn take_waited(task: &Task, wanted: SigSet) -> Option<Entry> {
    take_from(task, wanted.without(SigSet::KERNEL_ONLY), false).map(|(e, _)| e)
}

/// Waits until a signal of `wanted` is pending and takes it; the signals are waited for although they are blocked.
pub async fn wait_for_signal(task: &Arc<Task>, wanted: SigSet, deadline: Option<Nanos>) -> Result<Entry, WaitEnd> {
    task.signals.wait_for_signals(wanted);
    let end = loop {
        let end = task.wait(Vec::new(), deadline, || take_waited(task, wanted)).await;
        if end.as_ref().err() == Some(&WaitEnd::Interrupted) && !still_interrupted(task) {
            // Another task of the group took the signal that woke this one.
            continue;
        }
        break end;
    };
    task.signals.wait_for_signals(SigSet::EMPTY);
    end
}

/// Whether the interruption of `task` (the caller) has a cause left; if not, the interruption is over.
pub fn still_interrupted(task: &Task) -> bool {
    task.interruption.clear();
    let cause = deliverable(task);
    if cause {
        task.interruption.raise();
    }
    cause
}

/// Does what the signal's action says. Some: the group must exit with this status.
fn act(task: &Arc<Task>, entry: Entry, continues: u64) -> Option<i32> {
    let signal = entry.signal;
    let group = task.group();
    let action = group.signals.actions().take(signal);
    match action.handler {
        SIG_IGN => None,
        SIG_DFL => {
            let protected = group.signals.unkillable.load(Ordering::SeqCst) && !entry.forced;
            let kind = signal.default_action();
            match kind {
                DefaultAction::Ignore | DefaultAction::Continue => None,
                _ if protected && !signal.is_kernel_only() => None,
                DefaultAction::Stop => {
                    // POSIX: a process group that nobody could continue does not stop by the terminal.
                    if signal == Signal::SIGSTOP || !is_orphaned(task) {
                        stop::begin(task, signal, continues);
                    }
                    None
                }
                // No core is ever written, and the status says so.
                DefaultAction::Terminate | DefaultAction::Core => Some(signal.number()),
            }
        }
        _ => {
            start_handler(task, &entry, &action);
            None
        }
    }
}

fn is_orphaned(task: &Arc<Task>) -> bool {
    let _kinship = task.kernel().kinship();
    task.group().process_group().is_orphaned(None)
}

fn start_handler(task: &Arc<Task>, entry: &Entry, action: &SigAction) {
    let mut ctx = *task.context.lock();
    if let Some(code) = restart_code(&ctx) {
        let again = match code {
            Errno::ERESTARTSYS => action.flags & sa::RESTART != 0,
            Errno::ERESTARTNOINTR => true,
            _ => false,
        };
        if again {
            let nr = ctx.orig_rax;
            restart(&mut ctx, nr);
        } else {
            ctx.rax = Errno::EINTR.to_rax();
        }
    }
    ctx.orig_rax = u64::MAX;
    let section = rseq::before_handler(task, &mut ctx);
    let old_mask = mask::take_mask_for_frame(task);
    let built = section.and_then(|()| frame::build(task, &mut ctx, entry.signal, &entry.info, action, old_mask));
    if let Ok(()) = built {
        let mut blocked = task.signals.mask() | SigSet(action.mask);
        if action.flags & sa::NODEFER == 0 {
            blocked.add(entry.signal);
        }
        *task.context.lock() = ctx;
        task.tracing.handler_starts();
        mask::set_mask(task, blocked);
        if !frame::is_user_rip(ctx.rip) {
            fault::segv(task);
        }
    } else {
        *task.context.lock() = ctx;
        mask::set_mask(task, old_mask);
        if entry.signal == Signal::SIGSEGV {
            send::force_fatal(task, Signal::SIGSEGV);
        } else {
            fault::segv(task);
        }
    }
}

fn restart(ctx: &mut UserContext, nr: u64) {
    ctx.rax = nr;
    ctx.rip = ctx.rip.wrapping_sub(SYSCALL_LEN);
}

/// No handler runs: an interrupted call goes on as if nothing had happened.
fn no_handler(task: &Task) {
    let mut ctx = task.context.lock();
    if let Some(code) = restart_code(&ctx) {
        let nr = if code == Errno::ERESTART_RESTARTBLOCK { u64::from(__NR_restart_syscall) } else { ctx.orig_rax };
        restart(&mut ctx, nr);
        ctx.orig_rax = u64::MAX;
    }
}

/// Leaves to other tasks what `task` no longer takes of the group's pending signals.
pub(super) fn retarget_shared(task: &Arc<Task>, signals: SigSet) {
    let mut open = task.group().signals.pending() & signals;
    if open.is_empty() {
        return;
    }
    let mut from = 0;
    loop {
        let page = task.group().tasks_from(from, 16);
        let Some(last) = page.last().map(|t| t.global_tid()) else { return };
        for other in page {
            if Arc::ptr_eq(&other, task) || other.signals.exiting.load(Ordering::SeqCst) {
                continue;
            }
            let takes = open.without(other.signals.mask());
            if !takes.is_empty() {
                open = open.without(takes);
                other.notify_signal();
            }
            if open.is_empty() {
                return;
            }
        }
        let Some(next) = last.checked_add(1) else { return };
        from = next;
    }
}

/// The task begins to exit: it takes no more signals, leaves shared ones to others, and no stop waits for it.
pub fn exit_task(task: &Arc<Task>) {
    let group = task.group();
    let complete = {
        let mut state = group.signals.state.lock();
        task.signals.exiting.store(true, Ordering::SeqCst);
        task.signals.stopped.store(false, Ordering::SeqCst);
        if task.signals.stop_pending.swap(false, Ordering::SeqCst) { stop::count_down(&mut state) } else { None }
    };
    if let Some(signal) = complete {
        stop::notify_stopped(group, signal);
    }
    let own = core::mem::take(&mut task.signals.state.lock().pending);
    drop(own);
    if group.task_count() <= 1 {
        // Nobody is left to take what waits for the group; its timers' entries would keep the group alive.
        let shared = core::mem::take(&mut group.signals.state.lock().pending);
        drop(shared);
    }
    if group.exiting().is_none() {
        retarget_shared(task, !task.signals.mask());
    }
}
