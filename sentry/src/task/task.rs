//! The task: one guest thread. Fields that others may touch are behind locks; registers belong to whoever runs the task.
#![allow(unused_variables, missing_docs)]
use std::any::Any;
use std::sync::Arc;

use super::ThreadGroup;
use super::limits::Resource;
use crate::event::{Events, Interruption, WaitEnd, WaitQueue};
use crate::kernel::Kernel;
use crate::lock::{Mutex, Rank};
use crate::mm::AddressSpace;
use crate::ns::user::Credentials;
use crate::platform::{Fpu, UserContext};
use crate::signal::TaskSignals;
use crate::time::Nanos;
use crate::vfs::file::Caller;
use crate::vfs::{FdTable, FsContext};
use crate::{Errno, Result};

/// One guest thread.
pub struct Task {
    kernel: Arc<Kernel>,
    group: Arc<ThreadGroup>,
    /// Registers. Locked by the task's own loop while it runs; others look only when it is stopped.
    pub context: Mutex<UserContext>,
    pub fpu: Arc<dyn Fpu>,
    pub interruption: Interruption,
    /// Mask, private queue, alternate stack.
    pub signals: TaskSignals,
}

impl Task {
    pub fn kernel(&self) -> &Arc<Kernel> {
        &self.kernel
    }
    pub fn group(&self) -> &Arc<ThreadGroup> {
        &self.group
    }
    /// Number in the root PID namespace (unique in the sandbox).
    pub fn global_tid(&self) -> i32 {
        todo!()
    }
    /// Memory; ESRCH once the task has let go of it.
    pub fn space(&self) -> Result<Arc<AddressSpace>> {
        todo!()
    }
    /// Descriptors; an empty table once the task has let go of them.
    pub fn files(&self) -> Arc<FdTable> {
        todo!()
    }
    pub fn fs(&self) -> Arc<FsContext> {
        todo!()
    }
    pub fn credentials(&self) -> Arc<Credentials> {
        todo!()
    }
    /// Replaces the credentials by a changed copy.
    pub fn change_credentials(&self, change: impl FnOnce(&mut Credentials) -> Result<()>) -> Result<()> {
        todo!()
    }
    /// Soft limit of the task's group.
    pub fn limit(&self, which: Resource) -> u64 {
        todo!()
    }
    /// CLOCK_MONOTONIC now.
    pub fn now(&self) -> Nanos {
        self.kernel.timers.now()
    }

    /// The one way a system call blocks: waits until `ready` gives a value; see [`crate::event::wait_for`]. `deadline` is
    /// monotonic time.
    pub async fn wait<T>(
        &self,
        queues: Vec<(Arc<WaitQueue>, Events)>,
        deadline: Option<Nanos>,
        ready: impl FnMut() -> Option<T> + Send,
    ) -> Result<T, WaitEnd> {
        let deadline = deadline.map(|at| self.kernel.timers.deadline(at));
        crate::event::wait_for(
            Some(&self.interruption),
            queues,
            deadline.map(|d| d as Box<dyn crate::event::Deadline>),
            ready,
        )
        .await
    }

    /// As `wait` on one queue, where `ready` consumes the condition: wakes that pick one waiter (`wake_up_to`) may pick this
    /// one alone.
    pub async fn wait_exclusive<T>(
        &self,
        queue: (Arc<WaitQueue>, Events),
        deadline: Option<Nanos>,
        ready: impl FnMut() -> Option<T> + Send,
    ) -> Result<T, WaitEnd> {
        let deadline = deadline.map(|at| self.kernel.timers.deadline(at));
        let deadline = deadline.map(|d| d as Box<dyn crate::event::Deadline>);
        crate::event::wait_for(Some(&self.interruption), vec![queue], deadline, ready).exclusive().await
    }
}

impl Caller for Task {
    fn space(&self) -> Result<Arc<AddressSpace>> {
        Task::space(self)
    }
    fn credentials(&self) -> Arc<Credentials> {
        Task::credentials(self)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
