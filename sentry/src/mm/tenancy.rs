//! Which address spaces are the memory of how many tasks. Owns the count; never ends a space, which lives as long as anybody looks at it.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::space::AddressSpace;

/// A task's hold on its memory. Others that look at the space (a tracer, a reader of /proc) have none.
pub struct Tenancy(Arc<AddressSpace>);

impl Tenancy {
    /// One more task has this memory.
    pub fn new(space: Arc<AddressSpace>) -> Tenancy {
        space.tasks.fetch_add(1, Ordering::SeqCst);
        Tenancy(space)
    }

    /// The memory.
    pub fn space(&self) -> &Arc<AddressSpace> {
        &self.0
    }

    /// Whether another task has this memory too.
    pub fn is_shared(&self) -> bool {
        self.0.tasks.load(Ordering::SeqCst) > 1
    }
}

impl Drop for Tenancy {
    fn drop(&mut self) {
        self.0.tasks.fetch_sub(1, Ordering::SeqCst);
    }
}
