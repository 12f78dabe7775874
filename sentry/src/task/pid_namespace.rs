//! PID namespaces (pid_namespaces(7)): numbers, and the index of thread groups by tgid. Owns which number means what; never
//! the life of what it names.
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Weak};

use super::numbers::Numbers;
use super::{Pid, ProcessGroup, Session, Task, ThreadGroup};
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::ns::Owner;
use crate::{Errno, Result};

/// Deepest nesting of PID namespaces (MAX_PID_NS_LEVEL).
pub const MAX_LEVEL: usize = 32;

struct Inner {
    numbers: Numbers,
    pids: HashMap<i32, Arc<Pid>>,
    groups: BTreeMap<i32, Arc<ThreadGroup>>,
    init: Weak<ThreadGroup>,
    had_init: bool,
}

/// A PID namespace.
pub struct PidNamespace {
    parent: Option<Arc<PidNamespace>>,
    level: usize,
    number: u64,
    /// Whose capabilities count.
    pub owner: Owner,
    exiting: AtomicBool,
    /// The signal with which its init ends because of reboot(2); 0 for none.
    reboot: AtomicI32,
    /// Fires (IN) when a thread group is reaped while the namespace is exiting.
    pub(super) thinned: Arc<WaitQueue>,
    inner: Mutex<Inner>,
}

impl PidNamespace {
    fn at_level(parent: Option<Arc<PidNamespace>>, level: usize, owner: Owner) -> Arc<PidNamespace> {
        Arc::new(PidNamespace {
            parent,
            level,
            number: crate::ns::next_number(),
            owner,
            exiting: AtomicBool::new(false),
            reboot: AtomicI32::new(0),
            thinned: WaitQueue::new(),
            inner: Mutex::new(
                Rank::PidNamespace,
                Inner {
                    numbers: Numbers::new(),
                    pids: HashMap::new(),
                    groups: BTreeMap::new(),
                    init: Weak::new(),
                    had_init: false,
                },
            ),
        })
    }

    /// The empty namespace of a new sandbox.
    pub fn outermost() -> Arc<PidNamespace> {
        Self::at_level(None, 0, Owner::initial())
    }

    /// An empty namespace inside `parent`, of `owner`. ENOSPC beyond the depth limit.
    pub fn nested(parent: &Arc<PidNamespace>, owner: impl FnOnce() -> Result<Owner>) -> Result<Arc<PidNamespace>> {
        if parent.level >= MAX_LEVEL {
            return Err(Errno::ENOSPC);
        }
        Ok(Self::at_level(Some(parent.clone()), parent.level + 1, owner()?))
    }

    /// The enclosing namespace.
    pub fn parent(&self) -> Option<&Arc<PidNamespace>> {
        self.parent.as_ref()
    }

    /// Its number, as the links in /proc/PID/ns show it.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whether it has or had a first process.
    pub fn had_init(&self) -> bool {
        self.inner.lock().had_init
    }

    /// Depth; 0 is the outermost.
    pub fn level(&self) -> usize {
        self.level
    }

    /// Whether its init has begun to exit.
    pub fn exiting(&self) -> bool {
        self.exiting.load(Ordering::SeqCst)
    }

    pub(super) fn set_exiting(&self) {
        self.exiting.store(true, Ordering::SeqCst);
    }

    pub(super) fn set_reboot(&self, signal: i32) {
        self.reboot.store(signal, Ordering::SeqCst);
    }

    /// The wait(2) status that reboot(2) gives its init.
    pub(super) fn reboot(&self) -> Option<i32> {
        Some(self.reboot.load(Ordering::SeqCst)).filter(|&s| s != 0)
    }

    /// Its init, number 1.
    pub fn init(&self) -> Option<Arc<ThreadGroup>> {
        self.inner.lock().init.upgrade()
    }

    /// Numbers in this namespace and every ancestor, assigned together or not at all. `chosen` (clone3 set_tid) names those of the
    /// innermost levels first, for one who `may_choose`. ENOMEM if this or an ancestor is exiting, EAGAIN when the numbers are
    /// used up, EINVAL, EPERM or EEXIST for a chosen number, ERESTARTNOINTR while another task makes the first process.
    pub(super) fn allocate(self: &Arc<Self>, chosen: &[i32], may_choose: bool) -> Result<Arc<Pid>> {
        if chosen.len() > self.level + 1 {
            return Err(Errno::EINVAL);
        }
        let mut numbers: Vec<(Arc<PidNamespace>, i32, i32)> = Vec::with_capacity(self.level + 1);
        let mut at = Some(self);
        let mut wanted = chosen.iter();
        let mut failed = None;
        while let Some(ns) = at {
            if ns.exiting() {
                failed = Some(Errno::ENOMEM);
                break;
            }
            let mut inner = ns.inner.lock();
            let last = inner.numbers.last();
            let got = match wanted.next() {
                Some(&n) if n < 1 || n >= inner.numbers.max() || (n != 1 && !inner.had_init) => Err(Errno::EINVAL),
                Some(_) if !may_choose => Err(Errno::EPERM),
                // Until the first process is complete nobody else can be born, and if it fails the next one is the first.
                _ if !inner.had_init && inner.numbers.used() > 0 => Err(Errno::ERESTARTNOINTR),
                Some(&n) => inner.numbers.allocate_chosen(n),
                None => inner.numbers.allocate(),
            };
            drop(inner);
            match got {
                Ok(n) => numbers.push((ns.clone(), n, last)),
                Err(e) => {
                    failed = Some(e);
                    break;
                }
            }
            at = ns.parent.as_ref();
        }
        if let Some(e) = failed {
            for (ns, n, last) in &numbers {
                ns.inner.lock().numbers.roll_back(*n, *last);
            }
            return Err(e);
        }
        numbers.reverse();
        let pid = Pid::new(numbers.iter().map(|(ns, n, _)| (ns.clone(), *n)).collect());
        for (ns, n, _) in &numbers {
            ns.inner.lock().pids.insert(*n, pid.clone());
        }
        Ok(pid)
    }

    pub(super) fn free_number(&self, n: i32) {
        let mut inner = self.inner.lock();
        let old = inner.pids.remove(&n);
        inner.numbers.free(n);
        drop(inner);
        drop(old);
    }

    pub(super) fn index_group(&self, n: i32, group: &Arc<ThreadGroup>) {
        let mut inner = self.inner.lock();
        inner.groups.insert(n, group.clone());
        if n == 1 && inner.init.strong_count() == 0 {
            inner.init = Arc::downgrade(group);
            inner.had_init = true;
        }
    }

    pub(super) fn unindex_group(&self, n: i32) {
        let old = self.inner.lock().groups.remove(&n);
        drop(old);
        if self.exiting() {
            self.thinned.wake(Events::IN);
        }
    }

    /// What `reader` calls the process `n` of this namespace: 0 where it cannot see it. A number that names nobody any more is shown to
    /// this namespace itself as it was.
    pub fn number_for(self: &Arc<Self>, n: i32, reader: &Arc<PidNamespace>) -> i32 {
        if Arc::ptr_eq(self, reader) { n } else { self.pid(n).map_or(0, |p| p.number_in(reader)) }
    }

    /// The identity behind a number.
    pub fn pid(&self, n: i32) -> Option<Arc<Pid>> {
        self.inner.lock().pids.get(&n).cloned()
    }

    /// The task with tid `n`.
    pub fn task(&self, n: i32) -> Option<Arc<Task>> {
        self.pid(n)?.task()
    }

    /// The thread group with tgid `n` (zombies included).
    pub fn group(&self, n: i32) -> Option<Arc<ThreadGroup>> {
        self.inner.lock().groups.get(&n).cloned()
    }

    /// The process group with number `n`.
    pub fn process_group(&self, n: i32) -> Option<Arc<ProcessGroup>> {
        self.pid(n)?.process_group()
    }

    /// The session with number `n`.
    pub fn session(&self, n: i32) -> Option<Arc<Session>> {
        self.pid(n)?.session()
    }

    /// At most `max` thread groups with tgid at or above `from`, in order of tgid: a page of /proc or kill(-1).
    pub fn groups_from(&self, from: i32, max: usize) -> Vec<(i32, Arc<ThreadGroup>)> {
        self.inner.lock().groups.range(from..).take(max).map(|(n, g)| (*n, g.clone())).collect()
    }

    /// Number of thread groups.
    pub fn group_count(&self) -> usize {
        self.inner.lock().groups.len()
    }

    /// Numbers taken (an upper bound of the tasks in it).
    pub fn used(&self) -> usize {
        self.inner.lock().numbers.used()
    }

    /// Sets `ns_last_pid`.
    pub fn set_last(&self, last: i32) {
        self.inner.lock().numbers.set_last(last);
    }

    /// `ns_last_pid`, also the last field of /proc/loadavg.
    pub fn last(&self) -> i32 {
        self.inner.lock().numbers.last()
    }

    /// `kernel.pid_max`.
    pub fn pid_max(&self) -> i32 {
        self.inner.lock().numbers.max()
    }

    /// Sets `kernel.pid_max`; EINVAL out of range.
    pub fn set_pid_max(&self, max: i32) -> Result<()> {
        self.inner.lock().numbers.set_max(max)
    }
}
