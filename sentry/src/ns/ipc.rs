//! The IPC namespace (ipc_namespaces(7)). System V shared memory; semaphores and message queues do not exist here.
use std::sync::Arc;

use super::Owner;
use super::shm::Segments;

/// An IPC namespace.
pub struct IpcNamespace {
    number: u64,
    /// System V shared memory.
    pub shm: Arc<Segments>,
    /// Whose capabilities count.
    pub owner: Owner,
}

impl IpcNamespace {
    /// A namespace with a number of its own.
    pub fn new(owner: Owner) -> IpcNamespace {
        let shm = Segments::new(owner.user_ns.clone());
        IpcNamespace { number: super::next_number(), shm, owner }
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.number
    }
}
