//! A bounded set of things kept alive because they were used lately. Owns strong references only; finds nothing.
use std::collections::{BTreeMap, HashMap};

/// The `capacity` things used last, by a key of the caller's.
pub struct Recent<T> {
    capacity: usize,
    clock: u64,
    by_key: HashMap<usize, u64>,
    by_age: BTreeMap<u64, (usize, T)>,
}

impl<T> Recent<T> {
    /// Nothing yet.
    pub fn new(capacity: usize) -> Recent<T> {
        Recent { capacity, clock: 0, by_key: HashMap::new(), by_age: BTreeMap::new() }
    }

    /// Lets go of everything, for the caller to drop without a lock.
    pub fn take_all(&mut self) -> BTreeMap<u64, (usize, T)> {
        self.by_key.clear();
        core::mem::take(&mut self.by_age)
    }

    /// Notes a use; gives what falls out, for the caller to drop without a lock.
    #[must_use]
    pub fn touch(&mut self, key: usize, value: T) -> Option<T> {
        self.clock += 1;
        let old = self.by_key.insert(key, self.clock).and_then(|age| self.by_age.remove(&age));
        self.by_age.insert(self.clock, (key, value));
        if old.is_some() {
            return old.map(|o| o.1);
        }
        if self.by_age.len() <= self.capacity {
            return None;
        }
        let (_, (key, value)) = self.by_age.pop_first()?;
        self.by_key.remove(&key);
        Some(value)
    }
}
