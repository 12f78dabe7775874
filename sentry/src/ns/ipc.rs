//! The IPC namespace (ipc_namespaces(7)). System V shared memory; semaphores and message queues do not exist here.
use std::sync::Arc;

use super::shm::Segments;
use super::ucounts::Charge;

/// An IPC namespace.
pub struct IpcNamespace {
    number: u64,
    /// System V shared memory.
    pub shm: Arc<Segments>,
    _charge: Option<Charge>,
}

impl IpcNamespace {
    /// A namespace with a number of its own.
    pub fn new(charge: Option<Charge>) -> IpcNamespace {
        IpcNamespace { number: super::next_number(), shm: Segments::new(), _charge: charge }
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.number
    }
}
