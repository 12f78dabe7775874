//! Identifiers and permissions of System V semaphores and message queues (sysvipc(7)). Owns the table from keys and identifiers to objects;
//! never what an object does.
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::user::{Caps, Credentials};
use super::user_namespace::UserNamespace;
use crate::platform::Platform;
use crate::{Errno, Result};

/// CLOCK_REALTIME in seconds, for the times that objects keep.
pub(crate) fn seconds(platform: &dyn Platform) -> i64 {
    i64::try_from(platform.realtime() / 1_000_000_000).unwrap_or(i64::MAX)
}

/// The key that names nothing.
pub const IPC_PRIVATE: i32 = 0;
/// Make what is not there.
pub const IPC_CREAT: u32 = 0o1000;
/// Fail if it is there.
pub const IPC_EXCL: u32 = 0o2000;
/// Do not wait.
pub const IPC_NOWAIT: u32 = 0o4000;

/// Bits of an identifier that are the index; above stands a sequence number.
const INDEX_BITS: u32 = 15;
const SEQUENCES: u32 = 1 << 16;
/// Objects of one kind in a namespace at most (semmni, msgmni).
pub const MOST: u32 = 32_000;

/// Who acts, and when.
pub struct Actor<'a> {
    /// Whose rights count.
    pub credentials: &'a Credentials,
    /// Whose capabilities those are measured by: the owner of the namespace.
    pub owner: &'a Arc<UserNamespace>,
    /// tgid in the root PID namespace.
    pub pid: i32,
    /// CLOCK_REALTIME in seconds.
    pub now: i64,
}

/// struct ipc_perm. Ids are those of the initial user namespace.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Perm {
    pub key: i32,
    pub id: i32,
    pub uid: u32,
    pub gid: u32,
    pub cuid: u32,
    pub cgid: u32,
    pub mode: u32,
}

impl Perm {
    /// Of an object that `by` makes.
    pub fn new(key: i32, id: i32, mode: u32, by: &Actor<'_>) -> Perm {
        let (uid, gid) = (by.credentials.euid, by.credentials.egid);
        Perm { key, id, uid, gid, cuid: uid, cgid: gid, mode: mode & 0o777 }
    }

    /// EACCES unless the access bits in `wanted` (those of any class count) are granted.
    pub fn permits(&self, by: &Actor<'_>, wanted: u32) -> Result<()> {
        let c = by.credentials;
        let wanted = (wanted >> 6) | (wanted >> 3) | wanted;
        let granted = if c.euid == self.cuid || c.euid == self.uid {
            self.mode >> 6
        } else if c.in_group(self.cgid) || c.in_group(self.gid) {
            self.mode >> 3
        } else {
            self.mode
        };
        let refused = wanted & !granted & 0o7;
        let able = refused == 0 || c.has_in(by.owner, Caps::IPC_OWNER);
        if able { Ok(()) } else { Err(Errno::EACCES) }
    }

    /// EPERM unless the actor owns it or administers the namespace.
    pub fn changeable(&self, by: &Actor<'_>) -> Result<()> {
        let c = by.credentials;
        let able = c.euid == self.cuid || c.euid == self.uid || c.has_in(by.owner, Caps::SYS_ADMIN);
        if able { Ok(()) } else { Err(Errno::EPERM) }
    }

    /// IPC_SET.
    pub fn set(&mut self, uid: u32, gid: u32, mode: u32) {
        (self.uid, self.gid, self.mode) = (uid, gid, (self.mode & !0o777) | (mode & 0o777));
    }
}

/// Objects by identifier and by key.
pub struct Ids<T> {
    objects: BTreeMap<u32, (i32, i32, Arc<T>)>,
    keys: HashMap<i32, u32>,
    sequence: u32,
    last: Option<u32>,
}

impl<T> Default for Ids<T> {
    fn default() -> Self {
        Ids { objects: BTreeMap::new(), keys: HashMap::new(), sequence: 0, last: None }
    }
}

impl<T> Ids<T> {
    fn index(id: i32) -> Option<u32> {
        u32::try_from(id).ok().map(|id| id & ((1 << INDEX_BITS) - 1))
    }

    /// The object. EINVAL.
    pub fn find(&self, id: i32) -> Result<Arc<T>> {
        let index = Self::index(id).ok_or(Errno::EINVAL)?;
        self.objects.get(&index).filter(|(there, ..)| *there == id).map(|(.., o)| o.clone()).ok_or(Errno::EINVAL)
    }

    /// The object at an index, whatever its sequence number (SEM_STAT, MSG_STAT). EINVAL.
    pub fn at(&self, index: i32) -> Result<Arc<T>> {
        let index = Self::index(index).ok_or(Errno::EINVAL)?;
        self.objects.get(&index).map(|(.., o)| o.clone()).ok_or(Errno::EINVAL)
    }

    /// What `flags` say about a key: the object that has it, or None where a new one is to be made. ENOENT, EEXIST.
    pub fn look_up(&self, key: i32, flags: u32) -> Result<Option<Arc<T>>> {
        let found = if key == IPC_PRIVATE { None } else { self.keys.get(&key).and_then(|i| self.objects.get(i)) };
        match found {
            Some(_) if flags & IPC_CREAT != 0 && flags & IPC_EXCL != 0 => Err(Errno::EEXIST),
            Some((.., object)) => Ok(Some(object.clone())),
            None if key != IPC_PRIVATE && flags & IPC_CREAT == 0 => Err(Errno::ENOENT),
            None => Ok(None),
        }
    }

    /// Puts in the object that `make` makes of its identifier. ENOSPC if there are `most`.
    pub fn insert(&mut self, key: i32, most: u32, make: impl FnOnce(i32) -> T) -> Result<i32> {
        if self.objects.len() >= most as usize {
            return Err(Errno::ENOSPC);
        }
        // Linux goes round, too, so that an index rests before it is used again.
        let mut index = self.last.map_or(0, |l| l + 1);
        if index >= MOST || self.objects.contains_key(&index) {
            index = (0..MOST).find(|i| !self.objects.contains_key(i)).ok_or(Errno::ENOSPC)?;
        }
        if self.last.is_some_and(|last| index <= last) {
            self.sequence = (self.sequence + 1) % SEQUENCES;
        }
        self.last = Some(index);
        let id = i32::try_from((self.sequence << INDEX_BITS) | index).map_err(|_| Errno::ENOSPC)?;
        self.objects.insert(index, (id, key, Arc::new(make(id))));
        if key != IPC_PRIVATE {
            self.keys.insert(key, index);
        }
        Ok(id)
    }

    /// Takes an object out.
    pub fn remove(&mut self, id: i32) -> Option<Arc<T>> {
        let index = Self::index(id)?;
        self.objects.get(&index).filter(|(there, ..)| *there == id)?;
        let (_, key, object) = self.objects.remove(&index)?;
        if key != IPC_PRIVATE {
            self.keys.remove(&key);
        }
        Some(object)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.objects.len()
    }

    /// The highest index in use; 0 if there is none.
    pub fn highest(&self) -> u32 {
        self.objects.last_key_value().map_or(0, |(i, _)| *i)
    }

    /// All objects, by index.
    pub fn all(&self) -> Vec<Arc<T>> {
        self.objects.values().map(|(.., o)| o.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_not_used_again_at_once() {
        let mut ids = Ids::default();
        let a = ids.insert(7, 10, |id| id).unwrap();
        assert_eq!(ids.look_up(7, 0).unwrap().as_deref(), Some(&a));
        assert_eq!(ids.look_up(7, IPC_CREAT | IPC_EXCL).err(), Some(Errno::EEXIST));
        assert_eq!(ids.look_up(8, 0).err(), Some(Errno::ENOENT));
        assert!(ids.look_up(8, IPC_CREAT).unwrap().is_none());
        assert!(ids.remove(a).is_some() && ids.remove(a).is_none());
        let b = ids.insert(7, 10, |id| id).unwrap();
        assert_ne!(a, b);
        assert_eq!(ids.find(a).err(), Some(Errno::EINVAL));
        assert_eq!(ids.insert(9, 1, |id| id), Err(Errno::ENOSPC));
    }
}
