//! State that others tie to an inode while it is in use: a FIFO's buffer, a bound socket. Owns the tie; never the state.
use std::any::Any;
use std::sync::{Arc, Weak};

use crate::lock::{Mutex, Rank};

/// State that belongs to an inode while something uses it, at most one of each type; see [`super::Inode::attachments`].
pub struct Attachments {
    slots: Mutex<Vec<Weak<dyn Any + Send + Sync>>>,
}

impl Default for Attachments {
    fn default() -> Self {
        Attachments { slots: Mutex::new(Rank::Leaf, Vec::new()) }
    }
}

impl Attachments {
    /// The attached `T`, if somebody still holds it.
    pub fn get<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.slots.lock().iter().find_map(|w| w.upgrade()?.downcast().ok())
    }

    /// The attached `T`, or what `make` gives, which is then attached. Only a weak reference is kept.
    pub fn get_or_attach<T: Any + Send + Sync>(&self, make: impl FnOnce() -> Arc<T>) -> Arc<T> {
        let mut slots = self.slots.lock();
        if let Some(found) = slots.iter().find_map(|w| w.upgrade()?.downcast().ok()) {
            return found;
        }
        let made = make();
        slots.retain(|w| w.strong_count() > 0);
        let erased: Arc<dyn Any + Send + Sync> = made.clone();
        slots.push(Arc::downgrade(&erased));
        made
    }

    /// Attaches `value` unless a living `T` is attached; whether it did.
    pub fn attach<T: Any + Send + Sync>(&self, value: &Arc<T>) -> bool {
        Arc::ptr_eq(&self.get_or_attach(|| value.clone()), value)
    }
}
