//! Tracing (ptrace(2)): what a traced task knows of its tracer, and whether it stands in a stop. Owns that state; how a
//! relation begins and ends is in `attach`, what a tracee does in `stop`, what wait(2) sees in `report`.
//!
//! Relations change under the kinship lock. The state's own lock makes single looks whole and is held for moments.
pub mod attach;
pub mod debug;
pub mod regs;
pub mod report;
pub mod stop;

use core::task::Waker;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use guest_abi::types::SigInfo;

use super::{Task, ThreadGroup};
use crate::lock::{Mutex, Rank};
use crate::{Errno, Result};

/// PTRACE_O_* of ptrace(2).
#[allow(missing_docs)]
pub mod option {
    pub const TRACESYSGOOD: u32 = 1;
    pub const EXITKILL: u32 = 1 << 20;
    /// All but PTRACE_O_SUSPEND_SECCOMP, which a kernel without checkpoints refuses.
    pub const KNOWN: u32 = 0xff | EXITKILL;
}

/// PTRACE_EVENT_* of ptrace(2); event n is reported if option bit n is set.
#[allow(missing_docs)]
pub mod event {
    pub const FORK: i32 = 1;
    pub const VFORK: i32 = 2;
    pub const CLONE: i32 = 3;
    pub const EXEC: i32 = 4;
    pub const VFORK_DONE: i32 = 5;
    pub const EXIT: i32 = 6;
    pub const SECCOMP: i32 = 7;
    pub const STOP: i32 = 128;
}

/// Bits of [`Tracing::flags`].
pub mod flag {
    /// It has a tracer.
    pub const TRACED: u32 = 1;
    /// By PTRACE_SEIZE.
    pub const SEIZED: u32 = 2;
    /// Stops at entry to and exit from system calls (PTRACE_SYSCALL).
    pub const SYSCALL: u32 = 4;
    /// Stops at entry, and the call is skipped (PTRACE_SYSEMU).
    pub const EMULATE: u32 = 8;
    /// One instruction only (PTRACE_SINGLESTEP).
    pub const STEP: u32 = 16;
    /// It stands in a stop.
    pub const STOPPED: u32 = 32;
    /// It has to stop at its next look: PTRACE_INTERRUPT, the start of a seized task, a change of the group's stop.
    pub const TRAP: u32 = 64;
    /// PTRACE_LISTEN: it stands still, but the stop is over for its tracer.
    pub const LISTENING: u32 = 128;
    /// A handler was started in a step: stop before its first instruction.
    pub const HANDLER: u32 = 256;
    /// It has hardware breakpoints, with or without a tracer.
    pub const WATCH: u32 = 512;
    /// Seccomp judges its calls, with or without a tracer.
    pub const SECCOMP: u32 = 1024;
    /// How it goes on.
    pub(super) const RESUME: u32 = SYSCALL | EMULATE | STEP;
}

/// A stop as its tracer sees it.
pub(super) struct Stop {
    /// The high part of the wait(2) status: a signal, with flags and events above.
    pub code: i32,
    /// None in a group stop of a task that was not seized.
    pub info: Option<SigInfo>,
    /// wait(2) has not told of it.
    pub unreported: bool,
    /// In PTRACE_EVENT_EXIT; then whether the end of the group had been decided before.
    pub exit: Option<bool>,
}

/// The tie between a tracee and its tracer.
pub(super) struct Relation {
    pub tracer: Weak<Task>,
    /// The place in the tracer's list.
    key: u64,
    pub options: u32,
    /// PTRACE_GETEVENTMSG.
    pub message: u64,
    pub stop: Option<Stop>,
    waker: Option<Waker>,
}

#[derive(Default)]
struct State {
    relation: Option<Box<Relation>>,
    /// siginfo of the stop that has just ended, as its tracer left it.
    info: Option<Box<SigInfo>>,
    debug: Option<Box<debug::DebugRegisters>>,
}

/// The tracing state that each task embeds.
pub struct Tracing {
    flags: AtomicU32,
    /// The signal with which the tracer ended the last stop.
    data: AtomicI32,
    /// wait(2)'s status of a dead task.
    pub(super) exit_status: AtomicI32,
    state: Mutex<State>,
}

impl Default for Tracing {
    fn default() -> Self {
        Tracing {
            flags: AtomicU32::new(0),
            data: AtomicI32::new(0),
            exit_status: AtomicI32::new(0),
            state: Mutex::new(Rank::Leaf, State::default()),
        }
    }
}

impl Tracing {
    /// Bits of [`flag`]. One load: what the common paths look at.
    pub fn flags(&self) -> u32 {
        self.flags.load(Ordering::SeqCst)
    }

    /// Whether any of `bits` is set.
    pub fn has(&self, bits: u32) -> bool {
        self.flags() & bits != 0
    }

    pub(super) fn set(&self, bits: u32) {
        self.flags.fetch_or(bits, Ordering::SeqCst);
    }

    pub(super) fn clear(&self, bits: u32) -> bool {
        self.flags.fetch_and(!bits, Ordering::SeqCst) & bits != 0
    }

    /// Whether it has a tracer.
    pub fn is_traced(&self) -> bool {
        self.has(flag::TRACED)
    }

    /// Whether calls concern a tracer or seccomp.
    pub fn watches_calls(&self) -> bool {
        self.has(flag::SYSCALL | flag::EMULATE | flag::STEP | flag::SECCOMP)
    }

    /// The tracer; None without one, or once that is gone.
    pub fn tracer(&self) -> Option<Arc<Task>> {
        self.state.lock().relation.as_ref().and_then(|r| r.tracer.upgrade())
    }

    pub(super) fn with<R>(&self, f: impl FnOnce(&mut Relation) -> R) -> Option<R> {
        self.state.lock().relation.as_deref_mut().map(f)
    }

    /// Whether an event is to be reported.
    pub fn wants(&self, event: i32) -> bool {
        self.is_traced() && self.with(|r| r.options & 1 << event != 0) == Some(true)
    }

    /// A handler is about to run: a step ends before its first instruction.
    pub fn handler_starts(&self) {
        if self.clear(flag::STEP) {
            self.set(flag::HANDLER);
        }
    }

    /// Ends the stop, if it stands in one: `set` of [`flag`] says how it goes on.
    pub fn resume(&self, set: u32, data: i32) {
        let waker = {
            let mut state = self.state.lock();
            let (ended, waker) = self.end_stop(&mut state, data);
            if ended {
                self.set(set & flag::RESUME);
            }
            waker
        };
        if let Some(w) = waker {
            w.wake();
        }
    }

    /// Whether there was a stop, and whom to wake.
    fn end_stop(&self, state: &mut State, data: i32) -> (bool, Option<Waker>) {
        let Some(r) = state.relation.as_deref_mut() else { return (false, None) };
        let Some(stop) = r.stop.take() else { return (false, None) };
        let waker = r.waker.take();
        state.info = stop.info.map(Box::new);
        self.data.store(data, Ordering::SeqCst);
        self.clear(flag::RESUME | flag::LISTENING | flag::STOPPED);
        (true, waker)
    }

    /// Ends the relation, and the stop with it: the task goes on untraced.
    fn end(&self, data: i32) -> Option<Box<Relation>> {
        let (relation, waker) = {
            let mut state = self.state.lock();
            let (_, waker) = self.end_stop(&mut state, data);
            self.clear(!(flag::WATCH | flag::SECCOMP));
            (state.relation.take(), waker)
        };
        if let Some(w) = waker {
            w.wake();
        }
        relation
    }

    /// The signal and the siginfo with which the tracer ended the last stop.
    fn take_outcome(&self) -> (i32, Option<Box<SigInfo>>) {
        (self.data.swap(0, Ordering::SeqCst), self.state.lock().info.take())
    }
}

/// Those whom the tasks of a group trace, in the order in which they were attached.
pub struct Tracees {
    count: AtomicUsize,
    list: Mutex<(u64, BTreeMap<u64, Arc<Task>>)>,
}

impl Default for Tracees {
    fn default() -> Self {
        Tracees { count: AtomicUsize::new(0), list: Mutex::new(Rank::Leaf, (0, BTreeMap::new())) }
    }
}

impl Tracees {
    /// Whether there is none. One load.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    fn add(&self, task: &Arc<Task>) -> u64 {
        let mut list = self.list.lock();
        list.0 += 1;
        let key = list.0;
        list.1.insert(key, task.clone());
        self.count.fetch_add(1, Ordering::SeqCst);
        key
    }

    fn remove(&self, key: u64) -> Option<Arc<Task>> {
        let removed = self.list.lock().1.remove(&key);
        if removed.is_some() {
            self.count.fetch_sub(1, Ordering::SeqCst);
        }
        removed
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<Task>> {
        if self.is_empty() { Vec::new() } else { self.list.lock().1.values().cloned().collect() }
    }
}

/// Whether `tracee` is traced by a task of another group than its parent.
pub fn reparented(tracee: &Task) -> bool {
    let Some(tracer) = tracee.tracing.tracer() else { return false };
    !tracee.group().parent().is_some_and(|p| Arc::ptr_eq(&p, tracer.group()))
}

/// Whether a task of `group` traces `tracee`.
pub fn traced_by(tracee: &Task, group: &Arc<ThreadGroup>) -> bool {
    tracee.tracing.is_traced() && tracee.tracing.tracer().is_some_and(|t| Arc::ptr_eq(t.group(), group))
}

/// What a tracer may do to a tracee that stands in a stop.
pub struct Stopped<'a>(pub &'a Arc<Task>);

impl Stopped<'_> {
    fn with<R>(&self, f: impl FnOnce(&mut Relation) -> R) -> Result<R> {
        self.0.tracing.with(f).ok_or(Errno::ESRCH)
    }

    /// PTRACE_SETOPTIONS; EINVAL for unknown ones.
    pub fn set_options(&self, options: u64) -> Result<()> {
        let options = u32::try_from(options).ok().filter(|o| o & !option::KNOWN == 0).ok_or(Errno::EINVAL)?;
        self.with(|r| r.options = options)
    }

    /// PTRACE_GETEVENTMSG.
    pub fn message(&self) -> Result<u64> {
        self.with(|r| r.message)
    }

    /// siginfo of the stop; EINVAL in a group stop, which has none.
    pub fn info(&self) -> Result<SigInfo> {
        self.with(|r| r.stop.as_ref().and_then(|s| s.info))?.ok_or(Errno::EINVAL)
    }

    /// PTRACE_SETSIGINFO.
    pub fn set_info(&self, info: SigInfo) -> Result<()> {
        self.with(|r| match r.stop.as_mut().and_then(|s| s.info.as_mut()) {
            Some(slot) => {
                *slot = info;
                Ok(())
            }
            None => Err(Errno::EINVAL),
        })?
    }
}
