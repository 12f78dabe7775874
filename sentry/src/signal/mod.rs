//! Signals: actions, queues, choice of target, delivery, frames. Owns what a signal does; never who may send it across
//! namespaces (task) nor terminal generation (fs::pts).
//!
//! Locks: the group's signal lock covers the shared queue and job control, a task's signal lock its own queue and
//! alternate stack; masks are atomics that only their task writes. A sender queues first and looks at masks then; a task
//! changes its mask first and looks at the queues then: so neither misses the other.
pub mod action;
pub mod altstack;
pub mod deliver;
pub mod fault;
pub mod frame;
pub mod mask;
pub mod queue;
pub mod send;
pub mod set;
pub mod state;
pub mod stop;
#[cfg(test)]
mod tests;

pub use action::SignalActions;
pub use deliver::{exit_task, fatal_pending, needs_prepare, prepare_return};
pub use mask::{end_temporary_mask, set_mask, set_temporary_mask, temporary_mask_from_user};
pub use queue::{code, info};
pub use send::{Sender, force, send_to_group, send_to_pgrp, send_to_task};
pub use set::{SigSet, Signal};
pub use state::{GroupSignals, RestartBlock, StopReport, TaskSignals};
pub use stop::{discard, join_group_stop, notify_exit};
