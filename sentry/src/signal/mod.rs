//! Signals: actions, queues, choice of target, delivery, frames. Owns what a signal does; never who may send it across
//! namespaces (task) nor terminal generation (fs::pts).
pub mod action;
pub mod queue;
pub mod set;
pub mod state;

pub use action::SignalActions;
pub use queue::{code, info};
pub use set::{SigSet, Signal};
pub use state::{GroupSignals, RestartBlock, StopReport, TaskSignals};
