//! State that belongs to an inode while something uses it. Owns the slots; never knows what is in them.
use std::any::{Any, TypeId};
use std::sync::Arc;

use crate::lock::{Mutex, Rank};

/// Slots by type: FIFO buffer, bound socket, file locks, watches. See [`super::Inode::attachments`].
pub struct Attachments {
    slots: Mutex<Vec<(TypeId, Arc<dyn Any + Send + Sync>)>>,
}

impl Default for Attachments {
    fn default() -> Self {
        Attachments { slots: Mutex::new(Rank::Leaf, Vec::new()) }
    }
}

impl Attachments {
    /// Nothing attached; allocates nothing.
    pub fn new() -> Attachments {
        Attachments::default()
    }

    /// What of type `T` is attached.
    pub fn get<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        let found = self.slots.lock_nested().iter().find(|(id, _)| *id == TypeId::of::<T>()).map(|(_, v)| v.clone());
        found.and_then(|v| v.downcast().ok())
    }

    /// What of type `T` is attached, made by `make` if nothing is.
    pub fn get_or_insert_with<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        if let Some(found) = self.get::<T>() {
            return found;
        }
        let new = Arc::new(make());
        let mut slots = self.slots.lock_nested();
        if let Some((_, v)) = slots.iter().find(|(id, _)| *id == TypeId::of::<T>())
            && let Ok(found) = v.clone().downcast()
        {
            return found;
        }
        slots.push((TypeId::of::<T>(), new.clone()));
        new
    }

    /// Attaches `value`, giving what of its type was attached before.
    pub fn set<T: Any + Send + Sync>(&self, value: Arc<T>) -> Option<Arc<T>> {
        let old = {
            let mut slots = self.slots.lock_nested();
            let at = slots.iter().position(|(id, _)| *id == TypeId::of::<T>());
            let old = at.map(|i| slots.swap_remove(i).1);
            slots.push((TypeId::of::<T>(), value));
            old
        };
        old.and_then(|v| v.downcast().ok())
    }

    /// Detaches what of type `T` is attached.
    pub fn take<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        let old = {
            let mut slots = self.slots.lock_nested();
            let at = slots.iter().position(|(id, _)| *id == TypeId::of::<T>());
            at.map(|i| slots.swap_remove(i).1)
        };
        old.and_then(|v| v.downcast().ok())
    }
}
