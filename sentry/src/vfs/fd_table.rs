//! Descriptor tables. Lowest free number first, close-on-exec flags, the RLIMIT_NOFILE bound is the caller's to give.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::File;
use crate::lock::{Mutex, Rank};
use crate::mm::Charge;
use crate::platform::{KernelMemory, Platform};
use crate::{Errno, Result};

/// One more than the largest descriptor whatever the limit says (fs.nr_open).
const NR_OPEN: u64 = 1 << 20;

#[derive(Clone)]
struct Slot {
    file: Arc<File>,
    cloexec: bool,
}

/// What a slot is charged with: itself, and its share of the runs of free numbers.
const SLOT_COST: usize = 32;
/// Slots of a table that holds anything.
const MIN_SLOTS: usize = 16;

struct Slots {
    /// By number.
    slots: Vec<Option<Slot>>,
    charge: Charge,
    /// Free numbers as runs `start → end` (exclusive), the last of which is endless.
    free: BTreeMap<u32, u32>,
}

impl Slots {
    fn lowest_free(&self, min: u32) -> u32 {
        if let Some((_, &end)) = self.free.range(..=min).next_back()
            && end > min
        {
            return min;
        }
        self.free.range(min..).next().map_or(u32::MAX, |(&start, _)| start)
    }

    fn mark_used(&mut self, fd: u32) {
        let run = self.free.range(..=fd).next_back().map(|(&s, &e)| (s, e));
        if let Some((start, end)) = run
            && end > fd
        {
            self.free.remove(&start);
            if start < fd {
                self.free.insert(start, fd);
            }
            if fd + 1 < end {
                self.free.insert(fd + 1, end);
            }
        }
    }

    fn mark_free(&mut self, fd: u32) {
        let (mut start, mut end) = (fd, fd + 1);
        if let Some((&s, &e)) = self.free.range(..=fd).next_back() {
            if e > fd {
                return;
            }
            if e == fd {
                start = s;
            }
        }
        if let Some(&e) = self.free.get(&(fd + 1)) {
            self.free.remove(&(fd + 1));
            end = e;
        }
        self.free.insert(start, end);
    }

    fn get(&self, fd: i32) -> Result<&Slot> {
        usize::try_from(fd).ok().and_then(|i| self.slots.get(i)).and_then(Option::as_ref).ok_or(Errno::EBADF)
    }

    /// Makes room for `len` slots; ENOMEM at the sandbox's memory limit.
    fn reserve(&mut self, len: usize) -> Result<()> {
        let have = self.charge.bytes() / SLOT_COST;
        if len > have {
            let wanted = len.max(have.saturating_mul(2).min(NR_OPEN as usize)).max(MIN_SLOTS);
            self.charge.resize(wanted.saturating_mul(SLOT_COST))?;
            self.slots.reserve_exact(wanted.saturating_sub(self.slots.len()));
        }
        Ok(())
    }

    fn put(&mut self, fd: u32, slot: Slot) -> Result<Option<Slot>> {
        let index = fd as usize;
        if self.slots.len() <= index {
            self.reserve(index + 1)?;
            self.slots.resize(index + 1, None);
        }
        self.mark_used(fd);
        Ok(self.slots.get_mut(index).and_then(|s| s.replace(slot)))
    }

    fn take(&mut self, fd: u32) -> Option<Slot> {
        let slot = self.slots.get_mut(fd as usize)?.take()?;
        self.mark_free(fd);
        Some(slot)
    }
}

/// A table of descriptors (CLONE_FILES shares it). What owns POSIX record locks.
pub struct FdTable {
    id: u64,
    inner: Mutex<Slots>,
}

fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl FdTable {
    /// An empty table, whose growth and whose descriptions are charged to the sandbox.
    pub fn new(platform: &Arc<dyn Platform>) -> FdTable {
        let charge = Charge::empty(platform, KernelMemory::Slab);
        FdTable::with(Slots { slots: Vec::new(), charge, free: BTreeMap::from([(0, u32::MAX)]) })
    }

    fn with(slots: Slots) -> FdTable {
        FdTable { id: next_id(), inner: Mutex::new(Rank::FdTable, slots) }
    }

    /// Identity, as the owner of record locks.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The description behind `fd`; EBADF.
    pub fn get(&self, fd: i32) -> Result<Arc<File>> {
        self.inner.lock().get(fd).map(|s| s.file.clone())
    }

    /// The description and its close-on-exec flag.
    pub fn get_with_flag(&self, fd: i32) -> Result<(Arc<File>, bool)> {
        self.inner.lock().get(fd).map(|s| (s.file.clone(), s.cloexec))
    }

    /// EMFILE if `insert` with these would fail now. Linux takes the number before it opens.
    pub fn check_room(&self, min: i32, limit: u64) -> Result<()> {
        let min = u32::try_from(min).map_err(|_| Errno::EINVAL)?;
        let fd = self.inner.lock().lowest_free(min);
        if u64::from(fd) >= limit.min(NR_OPEN) { Err(Errno::EMFILE) } else { Ok(()) }
    }

    /// Puts `file` at the lowest free number at or above `min`; EMFILE at `limit`, ENOMEM at the sandbox's memory limit.
    pub fn insert(&self, file: Arc<File>, cloexec: bool, min: i32, limit: u64) -> Result<i32> {
        let min = u32::try_from(min).map_err(|_| Errno::EINVAL)?;
        let mut inner = self.inner.lock();
        let fd = inner.lowest_free(min);
        if u64::from(fd) >= limit.min(NR_OPEN) {
            drop(inner);
            return Err(Errno::EMFILE);
        }
        let done = file.charge(&inner.charge).and_then(|()| inner.put(fd, Slot { file: file.clone(), cloexec }));
        // A description that found no place ends after the lock.
        drop(inner);
        done?;
        i32::try_from(fd).map_err(|_| Errno::EMFILE)
    }

    /// Puts `file` at `fd`, giving what was there (dup2). EBADF at or beyond `limit`, ENOMEM at the sandbox's memory limit.
    pub fn replace(&self, fd: i32, file: Arc<File>, cloexec: bool, limit: u64) -> Result<Option<Arc<File>>> {
        let fd = u32::try_from(fd).map_err(|_| Errno::EBADF)?;
        if u64::from(fd) >= limit.min(NR_OPEN) {
            return Err(Errno::EBADF);
        }
        let mut inner = self.inner.lock();
        let old = file.charge(&inner.charge).and_then(|()| inner.put(fd, Slot { file: file.clone(), cloexec }));
        drop(inner);
        Ok(old?.map(|s| s.file))
    }

    /// Sets close-on-exec.
    pub fn set_cloexec(&self, fd: i32, cloexec: bool) -> Result<()> {
        let mut inner = self.inner.lock();
        let slot = usize::try_from(fd).ok().and_then(|i| inner.slots.get_mut(i)).and_then(Option::as_mut);
        slot.ok_or(Errno::EBADF)?.cloexec = cloexec;
        Ok(())
    }

    /// Sets close-on-exec on all in `first..=last` (CLOSE_RANGE_CLOEXEC).
    pub fn set_cloexec_range(&self, first: u32, last: u32) {
        let mut inner = self.inner.lock();
        let count = (last as usize).saturating_sub(first as usize).saturating_add(1);
        for slot in inner.slots.iter_mut().skip(first as usize).take(count).flatten() {
            slot.cloexec = true;
        }
    }

    /// Takes `fd` out; the caller then calls [`FdTable::closed`].
    pub fn remove(&self, fd: i32) -> Result<Arc<File>> {
        let fd = u32::try_from(fd).map_err(|_| Errno::EBADF)?;
        self.inner.lock().take(fd).map(|s| s.file).ok_or(Errno::EBADF)
    }

    /// Takes out all in `first..=last`.
    pub fn remove_range(&self, first: u32, last: u32) -> Vec<Arc<File>> {
        let mut inner = self.inner.lock();
        let end = (last as usize).saturating_add(1).min(inner.slots.len());
        let mut out = Vec::new();
        for fd in first as usize..end {
            out.extend(u32::try_from(fd).ok().and_then(|fd| inner.take(fd)).map(|s| s.file));
        }
        out
    }

    /// Takes out all with close-on-exec (exec).
    pub fn remove_cloexec(&self) -> Vec<Arc<File>> {
        let mut inner = self.inner.lock();
        let mut out = Vec::new();
        for fd in 0..inner.slots.len() {
            if inner.slots.get(fd).and_then(Option::as_ref).is_some_and(|s| s.cloexec) {
                out.extend(u32::try_from(fd).ok().and_then(|fd| inner.take(fd)).map(|s| s.file));
            }
        }
        out
    }

    /// close(2) of a description taken out of this table: drops the table's record locks on it and flushes it.
    pub fn closed(&self, file: &Arc<File>) {
        super::lock::release_table(self.id, file);
        file.ops().flush(file);
    }

    /// Closes all with close-on-exec (exec).
    pub fn close_cloexec(&self) {
        for file in self.remove_cloexec() {
            self.closed(&file);
        }
    }

    /// Closes everything (exit, when the table is not shared).
    pub fn close_all(&self) {
        for file in self.remove_range(0, u32::MAX) {
            self.closed(&file);
        }
    }

    /// A copy of the table (fork). ENOMEM at the sandbox's memory limit.
    pub fn duplicate(&self) -> Result<FdTable> {
        let inner = self.inner.lock();
        let len = inner.slots.iter().rposition(Option::is_some).map_or(0, |i| i + 1);
        let mut copy = Slots { slots: Vec::new(), charge: inner.charge.another(0)?, free: inner.free.clone() };
        copy.reserve(len)?;
        copy.slots.extend(inner.slots.iter().take(len).cloned());
        drop(inner);
        Ok(FdTable::with(copy))
    }

    /// Open descriptors in order, from `from` on.
    pub fn list(&self, from: i32) -> Vec<(i32, Arc<File>)> {
        let from = usize::try_from(from).unwrap_or(0);
        let inner = self.inner.lock();
        let open = inner.slots.iter().enumerate().skip(from);
        open.filter_map(|(i, s)| Some((i32::try_from(i).ok()?, s.as_ref()?.file.clone()))).collect()
    }

    /// The numbers of at most `max` open descriptors, from `from` on.
    pub fn numbers(&self, from: i32, max: usize) -> Vec<i32> {
        let from = usize::try_from(from).unwrap_or(0);
        let inner = self.inner.lock();
        let open = inner.slots.iter().enumerate().skip(from).filter(|(_, s)| s.is_some());
        open.filter_map(|(i, _)| i32::try_from(i).ok()).take(max).collect()
    }

    /// One more than the largest open descriptor.
    pub fn end(&self) -> usize {
        let inner = self.inner.lock();
        inner.slots.iter().rposition(Option::is_some).map_or(0, |i| i + 1)
    }
}

impl Drop for FdTable {
    fn drop(&mut self) {
        self.close_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::sim::SimPlatform;

    struct Null;
    impl super::super::FileOps for Null {
        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }

    fn file() -> Arc<File> {
        File::new(Arc::new(Null), None, super::super::OpenFlags::empty())
    }

    #[test]
    fn lowest_free_number_first() {
        let sim = SimPlatform::new(1);
        let platform: Arc<dyn Platform> = sim.clone();
        let table = FdTable::new(&platform);
        for want in 0..5 {
            assert_eq!(table.insert(file(), false, 0, 1024), Ok(want));
        }
        table.remove(1).unwrap();
        table.remove(3).unwrap();
        table.remove(2).unwrap();
        assert_eq!(table.insert(file(), true, 2, 1024), Ok(2));
        assert_eq!(table.insert(file(), false, 0, 1024), Ok(1));
        assert_eq!(table.insert(file(), false, 0, 1024), Ok(3));
        assert_eq!(table.insert(file(), false, 0, 5), Err(Errno::EMFILE));
        assert!(table.replace(100, file(), false, 1024).unwrap().is_none());
        assert_eq!(table.insert(file(), false, 99, 1024), Ok(99));
        assert_eq!(table.insert(file(), false, 99, 1024), Ok(101));
        assert_eq!(table.remove_cloexec().len(), 1);
        assert_eq!(table.remove_range(50, u32::MAX).len(), 3);
        assert_eq!(table.end(), 5);
        assert_eq!(table.get(2).err(), Some(Errno::EBADF));
        let copy = table.duplicate().unwrap();
        assert_eq!(copy.insert(file(), false, 0, 1024), Ok(2));
        drop((table, copy));
        assert_eq!(sim.memory().used(), 0);
    }

    #[test]
    fn tables_and_descriptions_meet_the_memory_limit() {
        let sim = SimPlatform::new(1);
        sim.sim_memory().set_limit(64 << 10);
        let platform: Arc<dyn Platform> = sim.clone();
        let table = FdTable::new(&platform);
        let mut made = 0;
        let end = loop {
            match table.insert(file(), false, 0, 1 << 20) {
                Ok(_) => made += 1,
                Err(e) => break e,
            }
        };
        assert_eq!(end, Errno::ENOMEM);
        assert!((8..1000).contains(&made), "{made}");
        assert_eq!(table.duplicate().err(), Some(Errno::ENOMEM));
        assert_eq!(table.replace(60_000, table.get(0).unwrap(), false, 1 << 20).err(), Some(Errno::ENOMEM));
        table.close_all();
        assert_eq!(table.insert(file(), false, 0, 1 << 20), Ok(0));
    }
}
