//! Calls that the guest answers by itself: which they are, what the answers of a task are, and when they are no longer true. Owns their
//! versions; where they stand is [`super::in_guest`]'s affair.
//!
//! Each version is a number that was never used before. A task has one for what only it changes (its number, its credentials) and its
//! group one for what others change as well (parent, process group): answers of the same two versions are the same.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use linux_raw_sys::general as nr;

use super::{Task, ThreadGroup};

/// The calls. None has arguments.
pub const CALLS: [u32; 8] = [
    nr::__NR_getpid,
    nr::__NR_gettid,
    nr::__NR_getppid,
    nr::__NR_getpgrp,
    nr::__NR_getuid,
    nr::__NR_geteuid,
    nr::__NR_getgid,
    nr::__NR_getegid,
];

/// One that depends on the worker's queue alone, and is 0 while nobody waits there.
pub const YIELD: u32 = nr::__NR_sched_yield;

/// Whether the guest answers call `number` while it may.
pub fn is_answered(number: u64) -> bool {
    CALLS.into_iter().chain([YIELD]).any(|n| u64::from(n) == number)
}

static NEXT: AtomicU64 = AtomicU64::new(1);

/// A version of something that answers depend on.
pub struct Version(AtomicU64);

impl Default for Version {
    fn default() -> Self {
        let version = Version(AtomicU64::new(0));
        version.change();
        version
    }
}

impl Version {
    /// What answers depend on is another now.
    pub fn change(&self) {
        self.0.store(NEXT.fetch_add(1, Ordering::SeqCst), Ordering::SeqCst);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

/// The versions that the answers of `task` have now; None if it is to get none: somebody watches its calls, or its user namespace has not
/// got its maps.
pub fn versions(task: &Task) -> Option<(u64, u64)> {
    // Of the same version of credentials this is true for good.
    if task.ids_are_settled() { current(task) } else { None }
}

/// As [`versions`] for one whose ids are settled at this version. Takes no lock.
pub(super) fn current(task: &Task) -> Option<(u64, u64)> {
    let watched = task.kernel().trace.get().is_some() || task.tracing.is_traced() || task.tracing.watches_calls();
    (!watched).then(|| (task.answers.get(), task.group().answers.get()))
}

/// The answers, in the order of [`CALLS`].
pub fn answers(task: &Task) -> [u32; CALLS.len()] {
    let group = task.group();
    let ns = task.pid_namespace();
    let c = task.credentials();
    let signed = [group.tgid(), task.tid(), group.parent_number_in(ns), group.process_group().pid().number_in(ns)];
    let [tgid, tid, parent, process_group] = signed.map(i32::cast_unsigned);
    let [uid, euid] = [c.uid, c.euid].map(|id| c.user_ns.shown_user(id));
    let [gid, egid] = [c.gid, c.egid].map(|id| c.user_ns.shown_group(id));
    [tgid, tid, parent, process_group, uid, euid, gid, egid]
}

/// Parent or process group of `group` have changed: whatever its tasks ask from now on is answered by what is true now.
pub fn group_changed(group: &Arc<ThreadGroup>) {
    group.answers.change();
    group.kernel().in_guest.forget(group.kernel(), |t| Arc::ptr_eq(t.group(), group));
}
