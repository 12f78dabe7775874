//! Signal masks: sigprocmask(2), and the masks that ppoll(2), sigsuspend(2) and others set for their duration.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use guest_abi::{UserAddr, UserPtr};

use super::deliver::deliverable;
use super::set::SigSet;
use crate::task::Task;
use crate::{Errno, Result};

/// Replaces the mask of `task`, which is the caller. What becomes unblocked interrupts it; what becomes blocked is left to the other
/// tasks of the group.
pub fn set_mask(task: &Arc<Task>, mask: SigSet) {
    let old = task.signals.mask();
    let mask = mask.without(SigSet::KERNEL_ONLY);
    if old == mask {
        return;
    }
    task.signals.store_mask(mask);
    let blocked = mask.without(old);
    if !blocked.is_empty() && task.interruption.is_pending() {
        super::deliver::retarget_shared(task, blocked);
    }
    if !old.without(mask).is_empty() && deliverable(task) {
        task.interruption.raise();
    }
}

/// PTRACE_SETSIGMASK: replaces the mask of `task`, which stands in a stop.
pub fn set_by_tracer(task: &Arc<Task>, mask: SigSet) {
    task.signals.store_mask(mask);
    // What is unblocked is looked at when the task goes on.
    if deliverable(task) {
        task.interruption.raise();
    }
}

/// Sets `mask` for the duration of one call. The call ends with [`end_temporary_mask`].
pub fn set_temporary_mask(task: &Arc<Task>, mask: SigSet) {
    let old = task.signals.mask();
    {
        let mut state = task.signals.state.lock();
        state.saved_mask.get_or_insert(old);
    }
    task.signals.has_saved_mask.store(true, Ordering::Relaxed);
    set_mask(task, mask);
}

/// [`set_temporary_mask`] with a mask in memory: nothing for a null pointer; EINVAL unless `size` is 8.
pub fn temporary_mask_from_user(task: &Arc<Task>, addr: UserAddr, size: u64) -> Result<()> {
    if addr.is_null() {
        return Ok(());
    }
    if size != 8 {
        return Err(Errno::EINVAL);
    }
    let mask = task.space()?.read(UserPtr::<u64>::new(addr))?;
    set_temporary_mask(task, SigSet(mask));
    Ok(())
}

/// Ends the duration. After an interruption the old mask comes back when the signal has been delivered, so that the temporary mask
/// decides which one that is.
pub fn end_temporary_mask(task: &Arc<Task>, interrupted: bool) {
    if !interrupted {
        restore_saved_mask(task);
    }
}

/// Puts the saved mask back, if there is one.
pub(super) fn restore_saved_mask(task: &Arc<Task>) {
    if !task.signals.has_saved_mask.load(Ordering::Relaxed) {
        return;
    }
    task.signals.has_saved_mask.store(false, Ordering::Relaxed);
    let saved = task.signals.state.lock().saved_mask.take();
    if let Some(mask) = saved {
        set_mask(task, mask);
    }
}

/// The mask that a signal frame remembers: the saved one, which is thereby consumed, or the present one.
pub(super) fn take_mask_for_frame(task: &Task) -> SigSet {
    if !task.signals.has_saved_mask.swap(false, Ordering::Relaxed) {
        return task.signals.mask();
    }
    let saved = task.signals.state.lock().saved_mask.take();
    saved.unwrap_or_else(|| task.signals.mask())
}
