//! Which task is in the guest on which CPU, for whoever serves its calls there. Owns that record only.
use std::sync::Arc;

use super::Task;
use crate::lock::{Mutex, Rank};

/// One place for each CPU.
pub struct InGuest(Box<[Mutex<Option<Arc<Task>>>]>);

impl InGuest {
    /// Nobody is in the guest.
    pub fn new(cpus: usize) -> InGuest {
        InGuest((0..cpus).map(|_| Mutex::new(Rank::Leaf, None)).collect())
    }

    /// The task that may be served on `cpu`.
    pub fn get(&self, cpu: usize) -> Option<Arc<Task>> {
        self.0.get(cpu)?.lock().clone()
    }

    /// `task` is about to enter the guest on `cpu`, or nobody is there any more.
    pub fn set(&self, cpu: usize, task: Option<Arc<Task>>) {
        if let Some(place) = self.0.get(cpu) {
            // The old one is dropped without the lock: it may be the last reference.
            let old = core::mem::replace(&mut *place.lock(), task);
            drop(old);
        }
    }
}
