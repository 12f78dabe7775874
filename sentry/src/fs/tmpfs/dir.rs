//! Directory entries in memory: found by name in O(1), listed from a cookie on in O(log n), cookies stable while entries come and go.
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// A name in a directory.
pub type Name = Arc<[u8]>;

/// First cookie of an entry; 0 and 1 stand for `.` and `..`.
pub const FIRST_COOKIE: u64 = 2;

/// Names with what they stand for.
pub struct Entries<T> {
    by_name: HashMap<Name, u64>,
    by_cookie: BTreeMap<u64, (Name, T)>,
    next: u64,
}

impl<T> Default for Entries<T> {
    fn default() -> Self {
        Entries { by_name: HashMap::new(), by_cookie: BTreeMap::new(), next: FIRST_COOKIE }
    }
}

impl<T> Entries<T> {
    /// What `name` stands for.
    pub fn get(&self, name: &[u8]) -> Option<&T> {
        self.by_cookie.get(self.by_name.get(name)?).map(|e| &e.1)
    }

    /// Adds or replaces; a replaced name keeps its cookie. Gives what was there.
    pub fn insert(&mut self, name: &[u8], value: T) -> Option<T> {
        if let Some(slot) = self.by_name.get(name).and_then(|c| self.by_cookie.get_mut(c)) {
            return Some(core::mem::replace(&mut slot.1, value));
        }
        let name: Name = name.into();
        self.by_name.insert(name.clone(), self.next);
        self.by_cookie.insert(self.next, (name, value));
        self.next += 1;
        None
    }

    /// Takes a name out.
    pub fn remove(&mut self, name: &[u8]) -> Option<T> {
        let cookie = self.by_name.remove(name)?;
        self.by_cookie.remove(&cookie).map(|e| e.1)
    }

    /// Number of names.
    pub fn len(&self) -> usize {
        self.by_cookie.len()
    }

    /// Whether there is no name.
    pub fn is_empty(&self) -> bool {
        self.by_cookie.is_empty()
    }

    /// Entries from `cookie` on.
    pub fn range(&self, cookie: u64) -> impl Iterator<Item = (u64, &Name, &T)> {
        self.by_cookie.range(cookie..).map(|(c, (n, v))| (*c, n, v))
    }

    /// Takes everything out.
    pub fn take_all(&mut self) -> impl Iterator<Item = T> + use<T> {
        self.by_name.clear();
        core::mem::take(&mut self.by_cookie).into_values().map(|e| e.1)
    }
}
