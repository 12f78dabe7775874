//! Advisory file locks: POSIX record locks, open file description locks, flock(2). Owns who holds what; the system calls wait.
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::File;
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::mm::Charge;
use crate::platform::{KernelMemory, Platform};
use crate::{Errno, Result};

/// The last byte a lock can cover.
pub const LOCK_END: u64 = i64::MAX as u64;
/// Record locks on one file at most, so that a file's list stays bounded.
const LOCKS_MAX: usize = 65_536;

/// Who holds a record lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LockOwner {
    /// A descriptor table (POSIX locks): [`super::FdTable::id`].
    Table(u64),
    /// An open file description, by address.
    File(usize),
}

impl LockOwner {
    /// The owner of open file description locks made through `file`.
    pub fn file(file: &Arc<File>) -> LockOwner {
        LockOwner::File(file_key(file))
    }
}

fn file_key(file: &File) -> usize {
    std::ptr::from_ref(file).addr()
}

/// A record lock: bytes `start..=end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordLock {
    /// Who.
    pub owner: LockOwner,
    /// F_WRLCK rather than F_RDLCK.
    pub exclusive: bool,
    /// First byte.
    pub start: u64,
    /// Last byte.
    pub end: u64,
    /// The outermost number of the process, for F_GETLK's l_pid; -1 for open file description locks.
    pub pid: i32,
}

#[derive(Default)]
struct Held {
    /// Record locks of each owner by first byte; those of one owner do not overlap.
    records: HashMap<LockOwner, BTreeMap<u64, RecordLock>>,
    count: usize,
    charge: Option<Charge>,
    /// flock: (file, exclusive).
    whole: Vec<(usize, bool)>,
}

/// Bytes of a lock in a growing list.
const LOCK_COST: usize = 128;

impl Held {
    /// Charges what setting a lock may add: two pieces. ENOMEM.
    fn reserve(&mut self, platform: &Arc<dyn Platform>) -> Result<()> {
        let charge = self.charge.get_or_insert_with(|| Charge::empty(platform, KernelMemory::Slab));
        let (need, have) = (self.count.saturating_add(2), charge.bytes() / LOCK_COST);
        if need > have || have > need.saturating_mul(4) {
            charge.resize(need.saturating_mul(2).saturating_mul(LOCK_COST))?;
        }
        Ok(())
    }

    /// The first lock that stands against `want`.
    fn conflict(&self, want: &RecordLock) -> Option<RecordLock> {
        let others = self.records.iter().filter(|(owner, _)| **owner != want.owner);
        let found = others.filter_map(|(_, locks)| {
            overlapping(locks, want.start, want.end).filter(|l| l.exclusive || want.exclusive).last()
        });
        found.min_by_key(|l| l.start).copied()
    }

    /// Takes `start..=end` out of what `owner` holds.
    fn carve(&mut self, owner: LockOwner, start: u64, end: u64) {
        let Some(locks) = self.records.get_mut(&owner) else { return };
        let cut: Vec<RecordLock> = overlapping(locks, start, end).copied().collect();
        for l in cut {
            locks.remove(&l.start);
            self.count -= 1;
            let below = (l.start < start).then(|| RecordLock { end: start - 1, ..l });
            let above = (l.end > end).then(|| RecordLock { start: end + 1, ..l });
            for piece in below.into_iter().chain(above) {
                locks.insert(piece.start, piece);
                self.count += 1;
            }
        }
        if locks.is_empty() {
            self.records.remove(&owner);
        }
    }

    /// Adds a lock where its owner holds nothing, joined with neighbours of its kind.
    fn insert(&mut self, mut new: RecordLock) {
        let locks = self.records.entry(new.owner).or_default();
        let before = locks.range(..new.start).next_back().map(|(_, l)| *l);
        if let Some(l) = before.filter(|l| l.exclusive == new.exclusive && l.end.saturating_add(1) == new.start) {
            locks.remove(&l.start);
            self.count -= 1;
            new.start = l.start;
        }
        let after = new.end.checked_add(1).and_then(|next| locks.get(&next)).copied();
        if let Some(l) = after.filter(|l| l.exclusive == new.exclusive) {
            locks.remove(&l.start);
            self.count -= 1;
            new.end = l.end;
        }
        locks.insert(new.start, new);
        self.count += 1;
    }
}

/// Those that overlap `start..=end`, the last one first.
fn overlapping(locks: &BTreeMap<u64, RecordLock>, start: u64, end: u64) -> impl Iterator<Item = &RecordLock> {
    locks.range(..=end).rev().map(|(_, l)| l).take_while(move |l| l.end >= start)
}

/// The locks of one inode, attached to it.
pub struct FileLocks {
    held: Mutex<Held>,
    queue: Arc<WaitQueue>,
}

impl Default for FileLocks {
    fn default() -> Self {
        FileLocks { held: Mutex::new(Rank::Leaf, Held::default()), queue: WaitQueue::new() }
    }
}

/// The locks of what `file` shows; ENOLCK if it cannot have any.
pub fn locks_of(file: &File) -> Result<Arc<FileLocks>> {
    let attachments = file.inode().and_then(|i| i.attachments()).ok_or(Errno::ENOLCK)?;
    Ok(attachments.get_or_insert_with(FileLocks::default))
}

fn existing_locks(file: &File) -> Option<Arc<FileLocks>> {
    file.inode()?.attachments()?.get()
}

impl FileLocks {
    /// What to wait on for a conflicting lock to go.
    pub fn queue(&self) -> &Arc<WaitQueue> {
        &self.queue
    }

    fn changed(&self) {
        self.queue.wake(Events::all());
    }

    /// The first lock that stands against `want` (F_GETLK).
    pub fn conflict(&self, want: &RecordLock) -> Option<RecordLock> {
        self.held.lock_nested().conflict(want)
    }

    /// Sets a lock: Err gives the lock in the way, or ENOLCK.
    pub fn set(&self, platform: &Arc<dyn Platform>, want: RecordLock) -> Result<(), (Errno, Option<RecordLock>)> {
        {
            let mut held = self.held.lock_nested();
            if let Some(other) = held.conflict(&want) {
                return Err((Errno::EAGAIN, Some(other)));
            }
            if held.count >= LOCKS_MAX {
                return Err((Errno::ENOLCK, None));
            }
            held.reserve(platform).map_err(|_| (Errno::ENOLCK, None))?;
            held.carve(want.owner, want.start, want.end);
            held.insert(want);
        }
        // A write lock may have become a read lock.
        self.changed();
        Ok(())
    }

    /// Removes what `owner` holds of `start..=end`.
    pub fn unset(&self, owner: LockOwner, start: u64, end: u64) -> Result<()> {
        {
            let mut held = self.held.lock_nested();
            // Only a hole in the middle of a lock makes one more of it.
            let splits = held.records.get(&owner).is_some_and(|locks| {
                overlapping(locks, start, end).next().is_some_and(|l| l.start < start && l.end > end)
            });
            if splits && held.count >= LOCKS_MAX {
                return Err(Errno::ENOLCK);
            }
            held.carve(owner, start, end);
        }
        self.changed();
        Ok(())
    }

    fn unset_all(&self, owner: LockOwner) {
        let changed = {
            let mut held = self.held.lock_nested();
            let gone = held.records.remove(&owner).map_or(0, |locks| locks.len());
            held.count -= gone;
            gone > 0
        };
        if changed {
            self.changed();
        }
    }

    /// flock(2): takes or changes the lock of `file`; EAGAIN if another is in the way (the old one is then lost, as in Linux).
    pub fn flock(&self, file: &Arc<File>, exclusive: bool) -> Result<()> {
        let key = file_key(file);
        let mut lost = false;
        let answer = {
            let mut held = self.held.lock_nested();
            if held.whole.contains(&(key, exclusive)) {
                return Ok(());
            }
            let before = held.whole.len();
            held.whole.retain(|(k, _)| *k != key);
            lost |= held.whole.len() != before;
            if held.whole.iter().any(|(_, e)| exclusive || *e) {
                Err(Errno::EAGAIN)
            } else {
                held.whole.push((key, exclusive));
                file.locked.store(true, Ordering::Relaxed);
                Ok(())
            }
        };
        if lost {
            self.changed();
        }
        answer
    }

    /// flock(2) with LOCK_UN.
    pub fn funlock(&self, file: &File) {
        let key = file_key(file);
        let changed = {
            let mut held = self.held.lock_nested();
            let before = held.whole.len();
            held.whole.retain(|(k, _)| *k != key);
            held.whole.len() != before
        };
        if changed {
            self.changed();
        }
    }
}

/// Drops the POSIX locks that the table `id` holds on what `file` shows: any close of the file does so (fcntl(2)).
pub fn release_table(id: u64, file: &File) {
    if let Some(locks) = existing_locks(file) {
        locks.unset_all(LockOwner::Table(id));
    }
}

/// Drops the locks made through a description that ends.
pub fn release_file(file: &File) {
    if !file.locked.load(Ordering::Relaxed) {
        return;
    }
    if let Some(locks) = existing_locks(file) {
        locks.unset_all(LockOwner::File(file_key(file)));
        locks.funlock(file);
    }
}

/// Says that `file` may hold open file description locks.
pub fn mark_locked(file: &File) {
    file.locked.store(true, Ordering::Relaxed);
}

/// Which descriptor tables wait for which, for EDEADLK (POSIX locks only, as in Linux).
pub struct LockWaits {
    blockers: Mutex<HashMap<u64, Vec<u64>>>,
}

impl Default for LockWaits {
    fn default() -> Self {
        LockWaits { blockers: Mutex::new(Rank::Leaf, HashMap::new()) }
    }
}

/// A table's wait for another's lock; ends on drop.
pub struct LockWait<'a> {
    waits: &'a LockWaits,
    who: u64,
    whom: u64,
}

impl LockWaits {
    /// `who` is about to wait for `whom`. EDEADLK if `whom` waits, however indirectly, for `who`.
    pub fn begin(&self, who: u64, whom: LockOwner) -> Result<Option<LockWait<'_>>> {
        let LockOwner::Table(whom) = whom else { return Ok(None) };
        let mut map = self.blockers.lock_nested();
        let mut seen = vec![whom];
        let mut at = 0;
        while let Some(&next) = seen.get(at) {
            if next == who {
                return Err(Errno::EDEADLK);
            }
            for &blocker in map.get(&next).into_iter().flatten() {
                if !seen.contains(&blocker) {
                    seen.push(blocker);
                }
            }
            at += 1;
            // Linux gives up after ten steps.
            if at > 10 {
                break;
            }
        }
        map.entry(who).or_default().push(whom);
        Ok(Some(LockWait { waits: self, who, whom }))
    }
}

impl Drop for LockWait<'_> {
    fn drop(&mut self) {
        let mut map = self.waits.blockers.lock_nested();
        if let Some(list) = map.get_mut(&self.who) {
            if let Some(i) = list.iter().position(|&w| w == self.whom) {
                list.swap_remove(i);
            }
            if list.is_empty() {
                map.remove(&self.who);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::sim::SimPlatform;

    fn lock(owner: u64, exclusive: bool, start: u64, end: u64) -> RecordLock {
        RecordLock { owner: LockOwner::Table(owner), exclusive, start, end, pid: 1 }
    }

    #[test]
    fn ranges_split_and_join() {
        let sim: Arc<dyn Platform> = SimPlatform::new(1);
        let locks = FileLocks::default();
        locks.set(&sim, lock(1, true, 0, 99)).unwrap();
        locks.unset(LockOwner::Table(1), 40, 59).unwrap();
        assert!(locks.set(&sim, lock(2, true, 40, 59)).is_ok());
        assert!(locks.set(&sim, lock(2, false, 59, 60)).is_err());
        locks.unset(LockOwner::Table(2), 0, LOCK_END).unwrap();
        locks.set(&sim, lock(1, true, 40, 59)).unwrap();
        assert_eq!(locks.conflict(&lock(3, false, 50, 50)).map(|l| (l.start, l.end)), Some((0, 99)));
        locks.set(&sim, lock(1, false, 10, 19)).unwrap();
        assert!(locks.conflict(&lock(3, false, 10, 19)).is_none());
        assert_eq!(locks.conflict(&lock(3, false, 0, LOCK_END)).map(|l| (l.start, l.end)), Some((0, 9)));
        locks.set(&sim, lock(2, false, 5, LOCK_END)).unwrap_err();
        locks.set(&sim, lock(1, true, 5, 30)).unwrap();
        assert_eq!(locks.conflict(&lock(3, true, 50, 50)).map(|l| (l.start, l.end)), Some((0, 99)));
        assert_eq!(locks.held.lock().count, 1);
    }

    #[test]
    fn many_locks_are_set_and_found_quickly() {
        let sim: Arc<dyn Platform> = SimPlatform::new(1);
        let locks = FileLocks::default();
        for i in 0..LOCKS_MAX as u64 - 1 {
            locks.set(&sim, lock(1, true, 2 * i, 2 * i)).unwrap();
        }
        assert_eq!(locks.conflict(&lock(2, true, 1000, 1001)).map(|l| l.start), Some(1000));
        locks.set(&sim, lock(1, true, 200_001, 200_001)).unwrap();
        assert_eq!(locks.set(&sim, lock(1, true, 200_003, 200_003)), Err((Errno::ENOLCK, None)));
        locks.unset(LockOwner::Table(1), 0, LOCK_END).unwrap();
        assert_eq!(locks.held.lock().count, 0);
    }

    #[test]
    fn circles_are_seen() {
        let (waits, others) = (LockWaits::default(), LockWaits::default());
        let a = waits.begin(1, LockOwner::Table(2)).unwrap();
        let b = waits.begin(2, LockOwner::Table(3)).unwrap();
        assert_eq!(waits.begin(3, LockOwner::Table(1)).err(), Some(Errno::EDEADLK));
        assert!(others.begin(3, LockOwner::Table(1)).is_ok());
        drop((a, b));
        assert!(waits.begin(3, LockOwner::Table(1)).is_ok());
    }
}
