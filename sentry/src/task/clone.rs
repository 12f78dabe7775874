//! Birth: clone(2), clone3(2), fork(2), vfork(2). Owns the order in which a new task comes into being.
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::event::WaitQueue;

/// The parent of a CLONE_VFORK child waits on this until the child lets go of the memory.
pub struct VforkDone {
    /// Set once.
    pub done: AtomicBool,
    /// Fires (IN) then.
    pub queue: Arc<WaitQueue>,
}
