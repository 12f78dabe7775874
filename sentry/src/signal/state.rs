//! Signal state of a task and of a thread group, as they embed it. Owns the data and its locks; who sends and what a
//! delivery does is in `send` and `deliver`.
use core::future::Future;
use core::pin::Pin;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

use guest_abi::types::{SigInfo, SigStack};

use super::action::SignalActions;
use super::queue::Pending;
use super::set::{SigSet, Signal};
use crate::Result;
use crate::event::WaitQueue;
use crate::lock::{Mutex, Rank};
use crate::task::Task;

/// The future of the rest of a call.
pub type SlowCall<'a> = Pin<Box<dyn Future<Output = Result<u64>> + Send + 'a>>;

/// How restart_syscall(2) goes on with an interrupted call.
#[derive(Clone, Copy)]
pub struct RestartBlock {
    /// Serves the rest of the call.
    pub run: for<'a> fn(&'a Arc<Task>, [u64; 6]) -> SlowCall<'a>,
    /// What it needs; a deadline is an absolute time, so that the restart does not wait longer.
    pub args: [u64; 6],
}

/// SS_ONSTACK.
pub const SS_ONSTACK: i32 = 1;
/// SS_DISABLE.
pub const SS_DISABLE: i32 = 2;
/// SS_AUTODISARM.
pub const SS_AUTODISARM: i32 = i32::MIN;

/// The alternate signal stack (sigaltstack(2)); size 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AltStack {
    /// Lowest address.
    pub sp: u64,
    /// Bytes.
    pub size: u64,
    /// SS_AUTODISARM or 0.
    pub flags: i32,
}

impl AltStack {
    /// Whether `sp` lies on the stack. As the stack grows down its lowest address is not on it and its end is.
    pub fn holds(&self, sp: u64) -> bool {
        sp > self.sp && sp - self.sp <= self.size
    }

    /// Whether a task with stack pointer `sp` counts as running on it.
    pub fn active(&self, sp: u64) -> bool {
        self.flags & SS_AUTODISARM == 0 && self.holds(sp)
    }

    /// stack_t as sigaltstack(2) and a frame's uc_stack show it.
    pub fn to_abi(self, sp: u64) -> SigStack {
        let state = if self.size == 0 {
            SS_DISABLE
        } else if self.active(sp) {
            SS_ONSTACK
        } else {
            0
        };
        SigStack { sp: self.sp, flags: state | self.flags, pad: 0, size: self.size }
    }
}

impl AltStack {
    /// stack_t as a frame's uc_stack remembers it for rt_sigreturn(2): without saying whether the task runs on it.
    pub fn to_frame(self) -> SigStack {
        let mode = if self.size == 0 { SS_DISABLE } else { 0 };
        SigStack { sp: self.sp, flags: mode | self.flags, pad: 0, size: self.size }
    }
}

/// What the last exception of a task was, as its next signal frame shows it.
#[derive(Clone, Copy, Debug, Default)]
pub struct TrapState {
    /// Vector.
    pub trapno: u64,
    /// Error code.
    pub error: u64,
    /// CR2.
    pub cr2: u64,
}

pub(super) struct TaskState {
    pub pending: Pending,
    /// The mask to put back when a call that replaced it for its duration has ended.
    pub saved_mask: Option<SigSet>,
    pub alt_stack: AltStack,
    pub trap: TrapState,
    pub restart: Option<RestartBlock>,
}

/// Signal state of one task.
pub struct TaskSignals {
    /// Written only by the task itself, read by senders.
    mask: AtomicU64,
    /// Signals that rt_sigtimedwait(2) waits for although they are blocked.
    waiting_for: AtomicU64,
    /// The task has to take part in a group stop. Changed under the group's lock.
    pub(super) stop_pending: AtomicBool,
    /// The task stands still in a group stop. Changed under the group's lock.
    pub(super) stopped: AtomicBool,
    /// The task takes no more signals.
    pub(super) exiting: AtomicBool,
    /// A mask waits in the state to be put back.
    pub(super) has_saved_mask: AtomicBool,
    pub(super) state: Mutex<TaskState>,
}

impl Default for TaskSignals {
    fn default() -> Self {
        TaskSignals::with(SigSet::EMPTY, AltStack::default())
    }
}

impl TaskSignals {
    fn with(mask: SigSet, alt_stack: AltStack) -> TaskSignals {
        TaskSignals {
            mask: AtomicU64::new(mask.0),
            waiting_for: AtomicU64::new(0),
            stop_pending: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            exiting: AtomicBool::new(false),
            state: Mutex::new(
                Rank::TaskSignals,
                TaskState {
                    pending: Pending::default(),
                    saved_mask: None,
                    alt_stack,
                    trap: TrapState::default(),
                    restart: None,
                },
            ),
            has_saved_mask: AtomicBool::new(false),
        }
    }

    /// The state of a task that this one clones: same mask, nothing pending. The alternate stack is inherited unless the
    /// child shares the memory and runs beside its parent (`CLONE_VM` without `CLONE_VFORK`).
    #[must_use]
    pub fn for_clone(&self, shares_memory_beside: bool) -> TaskSignals {
        let alt = if shares_memory_beside { AltStack::default() } else { self.state.lock().alt_stack };
        TaskSignals::with(self.mask(), alt)
    }

    /// execve(2): no alternate stack, no call to restart.
    pub fn reset_for_exec(&self) {
        let mut state = self.state.lock();
        state.alt_stack = AltStack::default();
        state.restart = None;
        state.trap = TrapState::default();
    }

    /// Blocked signals.
    pub fn mask(&self) -> SigSet {
        SigSet(self.mask.load(Ordering::SeqCst))
    }

    /// The mask as a tracer sees it: the lasting one while a call has replaced it.
    pub fn shown_mask(&self) -> SigSet {
        let mask = self.mask();
        self.state.lock().saved_mask.unwrap_or(mask)
    }

    /// siginfo of at most `max` of the pending signals after the first `skip`, oldest first.
    pub fn peek(&self, skip: usize, max: usize) -> Vec<SigInfo> {
        self.state.lock().pending.peek(skip, max)
    }

    /// Only `super::set_mask` may change it, since what became unblocked must be looked at.
    pub(super) fn store_mask(&self, mask: SigSet) {
        self.mask.store(mask.without(SigSet::KERNEL_ONLY).0, Ordering::SeqCst);
    }

    /// Signals that are not to be delivered and that nobody waits for now.
    pub(super) fn unwanted(&self) -> SigSet {
        self.mask().without(SigSet(self.waiting_for.load(Ordering::SeqCst)))
    }

    pub(super) fn wait_for_signals(&self, set: SigSet) {
        self.waiting_for.store(set.0, Ordering::SeqCst);
    }

    /// Signals pending for this task alone.
    pub fn pending(&self) -> SigSet {
        self.state.lock().pending.set()
    }

    /// Whether the task stands still in a group stop.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Ends its part in a group stop without a SIGCONT (its tracer takes over). False if it was in none.
    pub fn leave_group_stop(&self) -> bool {
        self.stopped.swap(false, Ordering::SeqCst)
    }

    /// Without a tracer, the task stands still again if its group, `group`, does. False if it does not.
    pub fn rejoin_group_stop(&self, group: &crate::task::ThreadGroup) -> bool {
        let state = group.signals.state.lock();
        let stands = state.stopped || state.stop_count > 0;
        if stands && !self.stop_pending.load(Ordering::SeqCst) {
            self.stopped.store(true, Ordering::SeqCst);
        }
        stands
    }

    /// The alternate stack.
    pub fn alt_stack(&self) -> AltStack {
        self.state.lock().alt_stack
    }

    /// Replaces the alternate stack.
    pub fn set_alt_stack(&self, stack: AltStack) {
        self.state.lock().alt_stack = stack;
    }

    /// Remembers how to go on with a call that is about to give ERESTART_RESTARTBLOCK.
    pub fn set_restart(&self, block: RestartBlock) {
        self.state.lock().restart = Some(block);
    }

    /// Takes the remembered call.
    pub fn take_restart(&self) -> Option<RestartBlock> {
        self.state.lock().restart.take()
    }

    /// Remembers the exception for the frame of the signal that it causes.
    pub(super) fn set_trap(&self, trap: TrapState) {
        self.state.lock().trap = trap;
    }
}

/// A change of state that wait4(2) may report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReport {
    /// Stopped by the signal (WSTOPPED).
    Stopped(Signal),
    /// Continued by SIGCONT (WCONTINUED).
    Continued,
}

#[derive(Default)]
pub(super) struct GroupState {
    pub pending: Pending,
    /// The stop signal of the stop under way or in force.
    pub stop_signal: Option<Signal>,
    /// Tasks that have yet to stop.
    pub stop_count: usize,
    /// All tasks stand still.
    pub stopped: bool,
    /// The stop has not been reported by wait4(2).
    pub stop_unreported: bool,
    /// Continued, and not reported by wait4(2).
    pub continued: bool,
    /// Counts SIGCONTs, so that a stop decided before one does not take effect after it.
    pub continues: u64,
    /// Global tid of the task that was chosen for the last group-directed signal, so that they take turns.
    pub turn: i32,
}

/// Signal state of a thread group.
pub struct GroupSignals {
    actions: Mutex<Arc<SignalActions>>,
    /// The init of a PID namespace: signals without a handler do not act on it unless they come from outside.
    pub(super) unkillable: AtomicBool,
    pub(super) state: Mutex<GroupState>,
    /// Fires (IN) when a signal becomes pending for the group or one of its tasks, for signalfd(2).
    pub arrivals: Arc<WaitQueue>,
}

impl Default for GroupSignals {
    fn default() -> Self {
        GroupSignals::new(Arc::new(SignalActions::default()))
    }
}

impl GroupSignals {
    /// The state of a new group. CLONE_SIGHAND passes the parent's actions, fork a [`SignalActions::duplicate`],
    /// CLONE_CLEAR_SIGHAND a fresh one.
    pub fn new(actions: Arc<SignalActions>) -> GroupSignals {
        GroupSignals {
            actions: Mutex::new(Rank::Leaf, actions),
            unkillable: AtomicBool::new(false),
            state: Mutex::new(Rank::GroupSignals, GroupState::default()),
            arrivals: WaitQueue::new(),
        }
    }

    /// The actions of the group.
    pub fn actions(&self) -> Arc<SignalActions> {
        self.actions.lock().clone()
    }

    /// execve(2): actions of its own, handlers reset.
    pub fn reset_for_exec(&self) {
        let fresh = self.actions().duplicate_reset();
        *self.actions.lock() = fresh;
    }

    /// Marks the group as the init of a PID namespace.
    pub fn set_unkillable(&self) {
        self.unkillable.store(true, Ordering::SeqCst);
    }

    /// Signals pending for the group as a whole.
    pub fn pending(&self) -> SigSet {
        self.state.lock().pending.set()
    }

    /// siginfo of at most `max` of the shared pending signals after the first `skip`, oldest first.
    pub fn peek(&self, skip: usize, max: usize) -> Vec<SigInfo> {
        self.state.lock().pending.peek(skip, max)
    }

    /// Whether all tasks stand still.
    pub fn is_stopped(&self) -> bool {
        self.state.lock().stopped
    }

    /// The signal of the stop under way or in force.
    pub fn stop_signal(&self) -> Option<Signal> {
        let state = self.state.lock();
        state.stop_signal.filter(|_| state.stopped || state.stop_count > 0)
    }

    /// Whether wait4(2) could report a stop or a continuation.
    pub fn has_report(&self) -> bool {
        let state = self.state.lock();
        (state.stopped && state.stop_unreported) || state.continued
    }

    /// What wait4(2) may report now, `stopped` as WSTOPPED, `continued` as WCONTINUED; `consume` unless WNOWAIT.
    pub fn stop_report(&self, stopped: bool, continued: bool, consume: bool) -> Option<StopReport> {
        let mut state = self.state.lock();
        if stopped && state.stopped && state.stop_unreported {
            if consume {
                state.stop_unreported = false;
            }
            return state.stop_signal.map(StopReport::Stopped);
        }
        if continued && state.continued {
            if consume {
                state.continued = false;
            }
            return Some(StopReport::Continued);
        }
        None
    }
}
