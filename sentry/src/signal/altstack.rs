//! sigaltstack(2): the rules for replacing the alternate stack.
use std::sync::Arc;

use guest_abi::types::SigStack;

use super::state::{AltStack, SS_AUTODISARM, SS_DISABLE, SS_ONSTACK};
use crate::task::Task;
use crate::{Errno, Result};

/// MINSIGSTKSZ of the system call.
const MIN_SIZE: u64 = 2048;

/// Replaces the alternate stack of a task with stack pointer `sp`. EPERM while it runs on the present one, EINVAL for unknown flags,
/// ENOMEM if it is too small; `check_size` as for sigaltstack(2) itself.
pub fn set(task: &Arc<Task>, new: &SigStack, sp: u64, check_size: bool) -> Result<()> {
    let present = task.signals.alt_stack();
    if present.size != 0 && present.active(sp) {
        return Err(Errno::EPERM);
    }
    let mode = new.flags & !SS_AUTODISARM;
    if mode != 0 && mode != SS_ONSTACK && mode != SS_DISABLE {
        return Err(Errno::EINVAL);
    }
    let stack = if mode == SS_DISABLE {
        AltStack::default()
    } else {
        let least = if check_size { MIN_SIZE } else { 0 };
        if new.size < least {
            return Err(Errno::ENOMEM);
        }
        AltStack { sp: new.sp, size: new.size, flags: new.flags & SS_AUTODISARM }
    };
    let stack = if mode == SS_DISABLE { AltStack { flags: new.flags & SS_AUTODISARM, ..stack } } else { stack };
    task.signals.set_alt_stack(stack);
    Ok(())
}
