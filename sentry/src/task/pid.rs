//! A task's identity: one number in each namespace level. Owns the numbers and what holds them; a number is free again when
//! neither a task, a process group nor a session holds it.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{PidNamespace, ProcessGroup, Session, Task, ThreadGroup};
use crate::event::Events;
use crate::lock::{Mutex, Rank};

/// What holds a [`Pid`].
#[derive(Default)]
struct Holders {
    task: Option<Arc<Task>>,
    group: Option<Arc<ThreadGroup>>,
    process_group: Option<Arc<ProcessGroup>>,
    session: Option<Arc<Session>>,
}

static NEXT_INODE: AtomicU64 = AtomicU64::new(2);

/// An identity in all its namespaces. Outlives its holders as long as somebody (a pidfd) keeps it.
pub struct Pid {
    /// From the outermost namespace to the innermost; never empty.
    numbers: Box<[(Arc<PidNamespace>, i32)]>,
    holders: Mutex<Holders>,
    /// Fires when the task or the group that has this identity is dead (IN) or reaped (HUP): pidfd readiness.
    pub exited: Arc<crate::event::WaitQueue>,
    /// The inode number of its pidfds.
    inode: u64,
}

impl Pid {
    pub(super) fn new(numbers: Vec<(Arc<PidNamespace>, i32)>) -> Arc<Pid> {
        Arc::new(Pid {
            numbers: numbers.into_boxed_slice(),
            holders: Mutex::new(Rank::Pid, Holders::default()),
            exited: crate::event::WaitQueue::new(),
            inode: NEXT_INODE.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// The inode number of its pidfds, never used again.
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// (namespace, number) from the outermost to the innermost.
    pub fn numbers(&self) -> &[(Arc<PidNamespace>, i32)] {
        &self.numbers
    }

    /// The number in the outermost namespace.
    pub fn global(&self) -> i32 {
        self.numbers.first().map_or(0, |n| n.1)
    }

    /// The number in the innermost namespace.
    pub fn own(&self) -> i32 {
        self.numbers.last().map_or(0, |n| n.1)
    }

    /// The number as `ns` sees it; 0 if it does not.
    pub fn number_in(&self, ns: &PidNamespace) -> i32 {
        match self.numbers.get(ns.level()) {
            Some((n, number)) if core::ptr::eq(&raw const **n, ns) => *number,
            _ => 0,
        }
    }

    /// The innermost namespace.
    pub fn namespace(&self) -> &Arc<PidNamespace> {
        // `new` is only called with at least the root's number.
        &self.numbers[self.numbers.len() - 1].0
    }

    /// The task with this tid.
    pub fn task(&self) -> Option<Arc<Task>> {
        self.holders.lock().task.clone()
    }

    /// The thread group with this tgid.
    pub fn group(&self) -> Option<Arc<ThreadGroup>> {
        self.holders.lock().group.clone()
    }

    /// The process group with this number.
    pub fn process_group(&self) -> Option<Arc<ProcessGroup>> {
        self.holders.lock().process_group.clone()
    }

    /// The session with this number.
    pub fn session(&self) -> Option<Arc<Session>> {
        self.holders.lock().session.clone()
    }

    pub(super) fn hold_task(&self, task: &Arc<Task>) {
        let old = self.holders.lock().task.replace(task.clone());
        drop(old);
    }

    pub(super) fn hold_group(self: &Arc<Self>, group: &Arc<ThreadGroup>) {
        self.holders.lock().group = Some(group.clone());
        for (ns, n) in &self.numbers {
            ns.index_group(*n, group);
        }
    }

    pub(super) fn hold_process_group(&self, pg: &Arc<ProcessGroup>) {
        self.holders.lock().process_group = Some(pg.clone());
    }

    pub(super) fn hold_session(&self, session: &Arc<Session>) {
        self.holders.lock().session = Some(session.clone());
    }

    pub(super) fn drop_task(&self) {
        let old = self.holders.lock().task.take();
        drop(old);
        self.exited.wake(Events::IN | Events::HUP);
        self.free_if_unheld();
    }

    pub(super) fn drop_group(&self) {
        for (ns, n) in &self.numbers {
            ns.unindex_group(*n);
        }
        let old = self.holders.lock().group.take();
        drop(old);
        self.free_if_unheld();
    }

    pub(super) fn drop_process_group(&self) {
        let old = self.holders.lock().process_group.take();
        drop(old);
        self.free_if_unheld();
    }

    pub(super) fn drop_session(&self) {
        let old = self.holders.lock().session.take();
        drop(old);
        self.free_if_unheld();
    }

    /// Frees the numbers if nothing holds them. Callers hold the kinship lock, so nobody takes hold in between.
    fn free_if_unheld(&self) {
        {
            let h = self.holders.lock();
            if h.task.is_some() || h.group.is_some() || h.process_group.is_some() || h.session.is_some() {
                return;
            }
        }
        for (ns, n) in &self.numbers {
            ns.free_number(*n);
        }
    }
}
