//! The page tables of an address space, as the guest's processor walks them. Owns entry formats, the per-vCPU top-level
//! tables and the coherence of changes; which address maps what is the sentry's.
//!
//! Rules: absent → present is a plain store. Any other change to a present entry is a store followed by a zap of the old
//! page's host mapping, which makes KVM forget every translation that leads to the page, on nested and shadow paging
//! alike. Table pages stay until the address space dies, so that walks need no lock.
use core::any::Any;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use guest_abi::Errno;
use guest_abi::layout::{PAGE_SIZE, TASK_SIZE};
use parking_lot::Mutex;
use sentry::platform::{GuestSpace, PhysAddr, PhysRange, Pte, PteFlags};

use crate::memory::GuestMemory;

/// Entry formats.
pub mod pte {
    use super::{PhysAddr, Pte, PteFlags};

    const PRESENT: u64 = 1;
    const WRITE: u64 = 2;
    const USER: u64 = 4;
    /// Preset: setting them would cost a KVM on shadow paging a fault a page.
    const ACCESSED_DIRTY: u64 = 0x60;
    const ACCESSED: u64 = 0x20;
    /// Software: the entry owns a reference.
    const OWNED: u64 = 1 << 9;
    /// Software: a kept page that the program may not touch. The address is stored inverted, as Linux does, so that a
    /// processor that speculates through non-present entries finds no memory there (L1TF).
    const KEPT: u64 = 1 << 10;
    /// Software: the frame belongs to a mapped object.
    const OBJECT: u64 = 1 << 11;
    /// Software: program text with direct call sites.
    const PATCHED: u64 = 1 << 52;
    /// Software: trampolines of such sites.
    const TRAMPOLINES: u64 = 1 << 53;
    const NO_EXEC: u64 = 1 << 63;
    const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

    /// An entry that leads to a table.
    pub fn table(pa: PhysAddr) -> u64 {
        pa.0 & ADDRESS | PRESENT | WRITE | USER | ACCESSED
    }

    /// The table an entry leads to.
    pub fn target(entry: u64) -> Option<PhysAddr> {
        (entry & PRESENT != 0).then_some(PhysAddr(entry & ADDRESS))
    }

    fn rights(write: bool, exec: bool) -> u64 {
        (if write { WRITE } else { 0 }) | (if exec { 0 } else { NO_EXEC })
    }

    /// A page of the monitor's.
    pub fn supervisor(pa: PhysAddr, write: bool, exec: bool) -> u64 {
        pa.0 & ADDRESS | PRESENT | ACCESSED_DIRTY | rights(write, exec)
    }

    /// A page of the monitor's that the program may read.
    pub fn user(pa: PhysAddr, write: bool, exec: bool) -> u64 {
        supervisor(pa, write, exec) | USER
    }

    /// A leaf.
    pub fn encode(pte: Pte) -> u64 {
        let mut e = rights(pte.flags.contains(PteFlags::WRITE), pte.flags.contains(PteFlags::EXEC));
        if pte.flags.contains(PteFlags::OWNED) {
            e |= OWNED;
        }
        if pte.flags.contains(PteFlags::OBJECT) {
            e |= OBJECT;
        }
        if pte.flags.contains(PteFlags::PATCHED) {
            e |= PATCHED;
        }
        if pte.flags.contains(PteFlags::TRAMPOLINES) {
            e |= TRAMPOLINES;
        }
        if pte.flags.contains(PteFlags::NONE) {
            e | KEPT | !pte.pa.0 & ADDRESS
        } else {
            e | PRESENT | USER | ACCESSED_DIRTY | pte.pa.0 & ADDRESS
        }
    }

    /// The leaf an entry stands for.
    pub fn decode(entry: u64) -> Option<Pte> {
        let mut flags = PteFlags::empty();
        let pa = if entry & PRESENT != 0 {
            entry & ADDRESS
        } else if entry & KEPT != 0 {
            flags |= PteFlags::NONE;
            !entry & ADDRESS
        } else {
            return None;
        };
        flags.set(PteFlags::WRITE, entry & WRITE != 0);
        flags.set(PteFlags::EXEC, entry & NO_EXEC == 0);
        flags.set(PteFlags::OWNED, entry & OWNED != 0);
        flags.set(PteFlags::OBJECT, entry & OBJECT != 0);
        flags.set(PteFlags::PATCHED, entry & PATCHED != 0);
        flags.set(PteFlags::TRAMPOLINES, entry & TRAMPOLINES != 0);
        Some(Pte { pa: PhysAddr(pa), flags })
    }

    /// Whether a translation made from `old` would be wrong for `new`.
    pub fn needs_shootdown(old: u64, new: u64) -> bool {
        if old & PRESENT == 0 {
            return false;
        }
        let moved = (old ^ new) & (PRESENT | USER | ADDRESS) != 0;
        moved || (old & WRITE != 0 && new & WRITE == 0) || (old & NO_EXEC == 0 && new & NO_EXEC != 0)
    }
}

/// Entries in a table.
const ENTRIES: usize = 512;
/// Top-level entries that belong to the program.
const USER_SLOTS: usize = (TASK_SIZE >> 39) as usize;
/// The top-level entry that belongs to the monitor.
const MONITOR_SLOT: usize = USER_SLOTS;
/// Ranges collected before they are zapped: bounds what `update` allocates.
const ZAP_BATCH: usize = 1024;

/// The page tables of one address space.
pub struct KvmSpace {
    memory: Arc<GuestMemory>,
    /// Top-level entries, which every root repeats.
    slots: Box<[AtomicU64]>,
    /// Each CPU's own top-level table, made at its first entry.
    roots: Box<[OnceLock<PhysAddr>]>,
    /// Held while a table is linked.
    growth: Mutex<()>,
    /// Differs from that of every other space of the process.
    id: u64,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

fn index(va: u64, level: u32) -> usize {
    ((va >> (12 + 9 * level)) & 511) as usize
}

/// Bytes under one entry of a table at `level` (0: leaf table).
const fn span(level: u32) -> u64 {
    1 << (12 + 9 * level)
}

impl KvmSpace {
    /// An empty address space for `cpus` CPUs.
    pub fn new(memory: Arc<GuestMemory>, cpus: usize) -> KvmSpace {
        KvmSpace {
            memory,
            slots: (0..USER_SLOTS).map(|_| AtomicU64::new(0)).collect(),
            roots: (0..cpus).map(|_| OnceLock::new()).collect(),
            growth: Mutex::new(()),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Identity of the space, never used twice.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The top-level table for `cpu`, whose monitor region is `chain`.
    pub fn root(&self, cpu: usize, chain: PhysAddr) -> Result<PhysAddr, Errno> {
        let slot = self.roots.get(cpu).ok_or(Errno::EINVAL)?;
        if let Some(&root) = slot.get() {
            return Ok(root);
        }
        let _growth = self.growth.lock();
        if let Some(&root) = slot.get() {
            return Ok(root);
        }
        let root = self.memory.alloc_table_page()?;
        for (i, entry) in self.slots.iter().enumerate() {
            let entry = entry.load(Ordering::Relaxed);
            if entry != 0 {
                self.memory.table_write(root, i, entry);
            }
        }
        self.memory.table_write(root, MONITOR_SLOT, pte::table(chain));
        let _ = slot.set(root);
        Ok(root)
    }

    /// The leaf table that covers `va`, if it exists.
    fn leaf_table(&self, va: u64) -> Option<PhysAddr> {
        let mut table = pte::target(self.slots.get(index(va, 3))?.load(Ordering::Acquire))?;
        for level in [2, 1] {
            table = pte::target(self.memory.table_read(table, index(va, level)))?;
        }
        Some(table)
    }

    /// The leaf table that covers `va`, made if need be.
    fn grow(&self, va: u64) -> Result<PhysAddr, Errno> {
        if let Some(table) = self.leaf_table(va) {
            return Ok(table);
        }
        let _growth = self.growth.lock();
        let slot = self.slots.get(index(va, 3)).ok_or(Errno::EINVAL)?;
        let mut table = if let Some(table) = pte::target(slot.load(Ordering::Relaxed)) {
            table
        } else {
            let table = self.memory.alloc_table_page()?;
            slot.store(pte::table(table), Ordering::Release);
            for root in self.roots.iter().filter_map(|r| r.get()) {
                self.memory.table_write(*root, index(va, 3), pte::table(table));
            }
            table
        };
        for level in [2, 1] {
            let i = index(va, level);
            table = if let Some(next) = pte::target(self.memory.table_read(table, i)) {
                next
            } else {
                let next = self.memory.alloc_table_page()?;
                self.memory.table_write(table, i, pte::table(next));
                next
            };
        }
        Ok(table)
    }

    /// Applies `visit` to what one table stores of `start..end`.
    fn visit_table(&self, table: PhysAddr, level: u32, start: u64, end: u64, change: &mut Change<'_>) {
        let mut va = start;
        while va < end {
            let next = ((va & !(span(level) - 1)) + span(level)).min(end);
            let i = index(va, level);
            let entry = self.memory.table_read(table, i);
            if level > 0 {
                if let Some(below) = pte::target(entry) {
                    self.visit_table(below, level - 1, va, next, change);
                }
            } else if let Some(old) = pte::decode(entry) {
                let new = (change.visit)(va, old).map_or(0, pte::encode);
                if new != entry {
                    self.memory.table_write(table, i, new);
                    if pte::needs_shootdown(entry, new) {
                        change.stale.push(&self.memory, old.pa);
                    }
                }
            }
            va = next;
        }
    }

    /// Clears all leaves under a table, with no shootdown.
    fn drain_table(&self, table: PhysAddr, level: u32, start: u64, visit: &mut dyn FnMut(u64, Pte)) {
        for i in 0..ENTRIES {
            let entry = self.memory.table_read(table, i);
            let va = start + i as u64 * span(level);
            if level > 0 {
                if let Some(below) = pte::target(entry) {
                    self.drain_table(below, level - 1, va, visit);
                }
            } else if let Some(old) = pte::decode(entry) {
                self.memory.table_write(table, i, 0);
                visit(va, old);
            }
        }
    }

    fn free_table(&self, table: PhysAddr, level: u32, out: &mut Vec<PhysAddr>) {
        if level > 0 {
            for i in 0..ENTRIES {
                if let Some(below) = pte::target(self.memory.table_read(table, i)) {
                    self.free_table(below, level - 1, out);
                }
            }
        }
        out.push(table);
    }
}

/// Pages whose translations must go.
#[derive(Default)]
struct Stale {
    ranges: Vec<PhysRange>,
}

impl Stale {
    fn push(&mut self, memory: &GuestMemory, pa: PhysAddr) {
        if let Some(last) = self.ranges.last_mut()
            && last.addr.0.checked_add(last.len as u64) == Some(pa.0)
        {
            last.len += PAGE_SIZE as usize;
            return;
        }
        if self.ranges.len() >= ZAP_BATCH {
            self.flush(memory);
        }
        self.ranges.push(PhysRange { addr: pa, len: PAGE_SIZE as usize });
    }

    fn flush(&mut self, memory: &GuestMemory) {
        if !self.ranges.is_empty() {
            memory.zap(&self.ranges);
            self.ranges.clear();
        }
    }
}

struct Change<'a> {
    visit: &'a mut dyn FnMut(u64, Pte) -> Option<Pte>,
    stale: Stale,
}

impl GuestSpace for KvmSpace {
    fn lookup(&self, va: u64) -> Option<Pte> {
        if va >= TASK_SIZE {
            return None;
        }
        pte::decode(self.memory.table_read(self.leaf_table(va)?, index(va, 0)))
    }

    fn map(&self, va: u64, pte: Pte) -> Result<(), Errno> {
        if va >= TASK_SIZE {
            return Err(Errno::EINVAL);
        }
        let table = self.grow(va)?;
        let (i, new) = (index(va, 0), pte::encode(pte));
        let old = self.memory.table_read(table, i);
        self.memory.table_write(table, i, new);
        // The contract asks for no shootdown here; a caller's mistake must still not leave a translation behind.
        if pte::needs_shootdown(old, new) {
            debug_assert!(false, "map() over {old:#x} with {new:#x} at {va:#x}");
            if let Some(old) = pte::decode(old) {
                self.memory.zap(&[PhysRange { addr: old.pa, len: PAGE_SIZE as usize }]);
            }
        }
        Ok(())
    }

    fn map_run(&self, va: u64, pa: PhysAddr, count: usize, flags: PteFlags) -> usize {
        let mut done = 0;
        while done < count {
            let at = va + done as u64 * PAGE_SIZE;
            if at >= TASK_SIZE {
                break;
            }
            let Ok(table) = self.grow(at) else { break };
            let first = index(at, 0);
            for i in first..ENTRIES.min(first + (count - done)) {
                if self.memory.table_read(table, i) != 0 {
                    return done;
                }
                let pa = PhysAddr(pa.0 + done as u64 * PAGE_SIZE);
                self.memory.table_write(table, i, pte::encode(Pte { pa, flags }));
                done += 1;
            }
        }
        done
    }

    fn drain(&self, visit: &mut dyn FnMut(u64, Pte)) {
        for (i, slot) in self.slots.iter().enumerate() {
            if let Some(table) = pte::target(slot.load(Ordering::Acquire)) {
                self.drain_table(table, 2, i as u64 * span(3), visit);
            }
        }
    }

    fn update(&self, start: u64, end: u64, visit: &mut dyn FnMut(u64, Pte) -> Option<Pte>) {
        let (mut va, end) = (start & !(PAGE_SIZE - 1), end.min(TASK_SIZE));
        let mut change = Change { visit, stale: Stale::default() };
        while va < end {
            let next = ((va & !(span(3) - 1)) + span(3)).min(end);
            let slot = self.slots.get(index(va, 3)).map_or(0, |s| s.load(Ordering::Acquire));
            if let Some(table) = pte::target(slot) {
                self.visit_table(table, 2, va, next, &mut change);
            }
            va = next;
        }
        change.stale.flush(&self.memory);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for KvmSpace {
    fn drop(&mut self) {
        let mut pages = Vec::new();
        for slot in &self.slots {
            if let Some(table) = pte::target(slot.load(Ordering::Acquire)) {
                self.free_table(table, 2, &mut pages);
            }
        }
        pages.extend(self.roots.iter().filter_map(|r| r.get()));
        self.memory.retire_table_pages(pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_survive_encoding() {
        for bits in 0..128 {
            let pte = Pte { pa: PhysAddr(0x1234_5000), flags: PteFlags::from_bits_truncate(bits) };
            assert_eq!(pte::decode(pte::encode(pte)), Some(pte));
            assert_eq!(pte::target(pte::encode(pte)).is_some(), !pte.flags.contains(PteFlags::NONE));
        }
        assert_eq!(pte::decode(0), None);
    }

    #[test]
    fn shootdown_only_when_rights_shrink_or_the_page_moves() {
        let at = |pa, flags| pte::encode(Pte { pa: PhysAddr(pa), flags });
        let (r, rw, rx) = (PteFlags::empty(), PteFlags::WRITE, PteFlags::EXEC);
        assert!(!pte::needs_shootdown(0, at(0x1000, rw)));
        assert!(!pte::needs_shootdown(at(0x1000, r), at(0x1000, rw)));
        assert!(!pte::needs_shootdown(at(0x1000, r), at(0x1000, rx)));
        assert!(!pte::needs_shootdown(at(0x1000, r), at(0x1000, r | PteFlags::OWNED)));
        assert!(pte::needs_shootdown(at(0x1000, rw), at(0x1000, r)));
        assert!(pte::needs_shootdown(at(0x1000, rx), at(0x1000, r)));
        assert!(pte::needs_shootdown(at(0x1000, r), at(0x2000, r)));
        assert!(pte::needs_shootdown(at(0x1000, r), 0));
        assert!(pte::needs_shootdown(at(0x1000, r), at(0x1000, r | PteFlags::NONE)));
        assert!(!pte::needs_shootdown(at(0x1000, PteFlags::NONE), at(0x1000, r)));
    }
}
