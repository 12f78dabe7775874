//! Robust futexes (get_robust_list(2)): what a dying task does to the list that it registered.
use std::sync::Arc;

use guest_abi::{UserAddr, UserPtr};
use linux_raw_sys::general::{FUTEX_OWNER_DIED, FUTEX_TID_MASK, FUTEX_WAITERS};
use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::wake_at;
use crate::mm::AddressSpace;
use crate::task::Task;
use crate::{Errno, Result};

/// The longest list that is walked (ROBUST_LIST_LIMIT): it may be a ring.
const LIMIT: usize = 2048;

/// struct robust_list_head.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Head {
    next: u64,
    futex_offset: i64,
    pending: u64,
}

/// sizeof(struct robust_list_head), which set_robust_list(2) insists on.
pub const HEAD_LEN: u64 = size_of::<Head>() as u64;

/// Walks the list at `head`: marks each word that the task owns and wakes a waiter. A bad list ends the walk.
pub fn exit(task: &Arc<Task>, space: &Arc<AddressSpace>, head: UserAddr) {
    if !head.is_null() {
        let _ = walk(task, space, head);
    }
}

/// An entry pointer without its lowest bit, which says that the word is a priority-inheritance futex.
fn entry(raw: u64) -> (u64, bool) {
    (raw & !1, raw & 1 != 0)
}

fn walk(task: &Arc<Task>, space: &Arc<AddressSpace>, at: UserAddr) -> Result<()> {
    let head: Head = space.read(UserPtr::new(at))?;
    let (pending, pending_pi) = entry(head.pending);
    let word = |e: u64| UserAddr(e.wrapping_add(head.futex_offset as u64));
    let (mut at_entry, mut pi) = entry(head.next);
    for _ in 0..LIMIT {
        if at_entry == at.0 {
            break;
        }
        // Fetched before the wake: the memory may be gone after it.
        let next = space.read(UserPtr::<u64>::new(UserAddr(at_entry)));
        if at_entry != pending {
            handle(task, space, word(at_entry), pi, false)?;
        }
        (at_entry, pi) = entry(next?);
    }
    if pending != 0 {
        handle(task, space, word(pending), pending_pi, true)?;
    }
    Ok(())
}

fn handle(task: &Arc<Task>, space: &Arc<AddressSpace>, addr: UserAddr, pi: bool, pending: bool) -> Result<()> {
    if !addr.0.is_multiple_of(4) {
        return Err(Errno::EINVAL);
    }
    let mut old = space.load_u32(addr)?;
    if pending && !pi && old == 0 {
        // It died between giving the lock up and waking: nobody else will.
        wake_at(task.kernel(), space, addr, 1);
        return Ok(());
    }
    loop {
        if old & FUTEX_TID_MASK != task.tid() as u32 {
            return Ok(());
        }
        let found = space.compare_exchange_u32(addr, old, old & FUTEX_WAITERS | FUTEX_OWNER_DIED)?;
        if found == old {
            break;
        }
        old = found;
    }
    if !pi && old & FUTEX_WAITERS != 0 {
        wake_at(task.kernel(), space, addr, 1);
    }
    Ok(())
}
