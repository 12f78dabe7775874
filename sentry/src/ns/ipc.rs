//! The IPC namespace (ipc_namespaces(7)). System V IPC and message queues do not exist here, so it holds nothing: only its
//! identity can be told.
use super::ucounts::Charge;

/// An IPC namespace.
pub struct IpcNamespace {
    number: u64,
    _charge: Option<Charge>,
}

impl IpcNamespace {
    /// A namespace with a number of its own.
    pub fn new(charge: Option<Charge>) -> IpcNamespace {
        IpcNamespace { number: super::next_number(), _charge: charge }
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.number
    }
}
