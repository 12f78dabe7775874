//! How many namespaces of each kind a user may have at one time (namespaces(7), /proc/sys/user). Owns the limits and counts.
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::lock::{Mutex, Rank};
use crate::mm;
use crate::platform::{KernelMemory, Platform};
use crate::{Errno, Result};

/// Kinds that are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
#[allow(missing_docs)]
pub enum Counted {
    Pid,
    Uts,
    Ipc,
    Net,
    Mnt,
    Cgroup,
    User,
    Time,
}

/// How many kinds there are.
const KINDS: usize = 8;
/// Half of the default kernel.threads-max, as in Linux.
const DEFAULT: i32 = 65_536;

/// Bytes of a namespace.
const NAMESPACE_COST: usize = 4096;

/// Limits and counts.
pub struct Ucounts {
    limits: [AtomicI32; KINDS],
    /// Where each is charged.
    account: mm::Charge,
    counts: Mutex<HashMap<(Counted, u32), i32>>,
}

impl Ucounts {
    /// Nothing counted.
    pub fn new(platform: &Arc<dyn Platform>) -> Arc<Ucounts> {
        Arc::new(Ucounts {
            limits: [const { AtomicI32::new(DEFAULT) }; KINDS],
            account: mm::Charge::empty(platform, KernelMemory::Slab),
            counts: Mutex::new(Rank::Leaf, HashMap::new()),
        })
    }

    /// Most namespaces of a kind per user.
    pub fn limit(&self, kind: Counted) -> i32 {
        self.limits[kind as usize].load(Ordering::Relaxed)
    }

    /// Changes it; what exists stays.
    pub fn set_limit(&self, kind: Counted, limit: i32) {
        self.limits[kind as usize].store(limit, Ordering::Relaxed);
    }

    /// Counts one for an effective user id. ENOSPC at the limit, ENOMEM at the sandbox's memory limit.
    pub fn charge(self: &Arc<Self>, kind: Counted, uid: u32) -> Result<Charge> {
        let memory = self.account.another(NAMESPACE_COST)?;
        let mut counts = self.counts.lock();
        let count = counts.get(&(kind, uid)).copied().unwrap_or(0);
        if count >= self.limit(kind) {
            return Err(Errno::ENOSPC);
        }
        counts.insert((kind, uid), count + 1);
        drop(counts);
        Ok(Charge { ucounts: self.clone(), kind, uid, _memory: memory })
    }
}

/// One namespace in the count, for as long as this lives.
pub struct Charge {
    ucounts: Arc<Ucounts>,
    kind: Counted,
    uid: u32,
    _memory: mm::Charge,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut counts = self.ucounts.counts.lock();
        if let Some(n) = counts.get_mut(&(self.kind, self.uid)) {
            *n -= 1;
            if *n <= 0 {
                counts.remove(&(self.kind, self.uid));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_by_user_and_kind() {
        let platform: Arc<dyn Platform> = crate::platform::sim::SimPlatform::new(1);
        let u = Ucounts::new(&platform);
        u.set_limit(Counted::Pid, 2);
        let one = u.charge(Counted::Pid, 7).unwrap();
        let _two = u.charge(Counted::Pid, 7).unwrap();
        assert_eq!(u.charge(Counted::Pid, 7).err(), Some(Errno::ENOSPC));
        assert!(u.charge(Counted::Pid, 8).is_ok());
        assert!(u.charge(Counted::Uts, 7).is_ok());
        drop(one);
        assert!(u.charge(Counted::Pid, 7).is_ok());
    }
}
