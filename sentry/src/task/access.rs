//! Whether one task may look into another (ptrace(2), "Ptrace access mode checking"). Owns the rule; never what is looked at.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Task;
use crate::ns::user::{Caps, Credentials};
use crate::{Errno, Result};

/// PTRACE_MODE_READ_REALCREDS: the real ids of `by` count. EPERM if it may not.
pub fn may_inspect(by: &Task, target: &Task) -> Result<()> {
    let own = by.credentials();
    permitted(Some(by), &own, (own.uid, own.gid), target)
}

/// Whether `own`, of which `ids` count, may look into `target`; `by` is the task it belongs to. EPERM.
pub(crate) fn permitted(by: Option<&Task>, own: &Credentials, ids: (u32, u32), target: &Task) -> Result<()> {
    if by.is_some_and(|by| Arc::ptr_eq(by.group(), target.group())) {
        return Ok(());
    }
    let other = target.credentials();
    let able = own.has_in(&other.user_ns, Caps::SYS_PTRACE);
    let same = [other.uid, other.euid, other.suid].iter().all(|&u| u == ids.0)
        && [other.gid, other.egid, other.sgid].iter().all(|&g| g == ids.1);
    let inside = Arc::ptr_eq(&own.user_ns, &other.user_ns) && own.permitted.contains(other.permitted);
    // What must not be dumped is open to who has power where the program began, wherever its process has gone since.
    let dumpable = target.group().dumpable.load(Ordering::Relaxed) == 1
        || target.space().is_ok_and(|space| own.has_in(&space.user_ns(), Caps::SYS_PTRACE));
    if (able || same && inside) && dumpable { Ok(()) } else { Err(Errno::EPERM) }
}
