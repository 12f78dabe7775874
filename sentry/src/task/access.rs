//! Whether one task may look into another (ptrace(2), "Ptrace access mode checking"). Owns the rule; never what is looked at.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Task;
use crate::ns::user::Caps;
use crate::{Errno, Result};

/// PTRACE_MODE_READ_REALCREDS: the real ids of `by` count. EPERM if it may not.
pub fn may_inspect(by: &Task, target: &Task) -> Result<()> {
    if Arc::ptr_eq(by.group(), target.group()) {
        return Ok(());
    }
    let (own, other) = (by.credentials(), target.credentials());
    if own.has_in(&other.user_ns, Caps::SYS_PTRACE) {
        return Ok(());
    }
    let same = [other.uid, other.euid, other.suid].iter().all(|&u| u == own.uid)
        && [other.gid, other.egid, other.sgid].iter().all(|&g| g == own.gid);
    let inside = Arc::ptr_eq(&own.user_ns, &other.user_ns);
    if same && inside && target.group().dumpable.load(Ordering::Relaxed) == 1 && own.permitted.contains(other.permitted)
    {
        Ok(())
    } else {
        Err(Errno::EPERM)
    }
}
