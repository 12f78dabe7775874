//! The IPC namespace (ipc_namespaces(7)). Owns what System V IPC is in it, each kind in a module of its own.
use std::sync::Arc;

use super::Owner;
use super::mq::MqTable;
use super::msg::MsgQueues;
use super::sem::Semaphores;
use super::shm::Segments;

/// An IPC namespace.
pub struct IpcNamespace {
    number: u64,
    /// System V shared memory.
    pub shm: Arc<Segments>,
    /// System V semaphores.
    pub sem: Semaphores,
    /// System V message queues.
    pub msg: MsgQueues,
    /// POSIX message queues.
    pub mq: MqTable,
    /// Whose capabilities count.
    pub owner: Owner,
}

impl IpcNamespace {
    /// A namespace with a number of its own.
    pub fn new(owner: Owner) -> IpcNamespace {
        let shm = Segments::new(owner.user_ns.clone());
        IpcNamespace {
            number: super::next_number(),
            shm,
            sem: Semaphores::default(),
            msg: MsgQueues::default(),
            mq: MqTable::default(),
            owner,
        }
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.number
    }
}
