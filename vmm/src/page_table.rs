//! The page tables of an address space, as the guest's processor walks them. Owns entry formats, the per-vCPU top-level
//! tables and the coherence of changes; which address maps what is the sentry's.
//!
//! Rules: absent → present is a plain store. Any other change to a present entry is a store followed by a zap of the old
//! page's host mapping, which makes KVM forget every translation that leads to the page, on nested and shadow paging
//! alike. Table pages stay until the address space dies, so that walks need no lock.
use core::any::Any;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use guest_abi::Errno;
use guest_abi::layout::{PAGE_SIZE, TASK_SIZE};
use parking_lot::Mutex;
use sentry::platform::{Bequest, GuestSpace, PhysAddr, PhysRange, Pte, PteFlags};

use crate::memory::GuestMemory;

mod heritage;

use heritage::{Heritage, Snapshot};

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

    /// Software, in an entry that leads to a leaf table: the table is lent to forks as it is.
    pub const LENT: u64 = 1 << 9;
    /// In the place of such an entry: there is no table yet, and what it will hold is in the space's heritage. Not present.
    pub const INHERITED: u64 = 1 << 10;

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
/// Private pages in a region from which on a fork leaves it to its child as it is: a fault there costs as much as copying this many
/// entries a few times.
const DENSE: u64 = 128;
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
    /// Regions that forks share, by `region`.
    heritage: Mutex<BTreeMap<u64, Heritage>>,
    /// Differs from that of every other space of the process.
    id: u64,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Whether the frame belongs to the space and its forks alone.
fn is_private(flags: PteFlags) -> bool {
    flags.contains(PteFlags::OWNED) && !flags.contains(PteFlags::OBJECT)
}

/// The number of the region (what one leaf table covers) that holds `va`.
fn region(va: u64) -> u64 {
    va >> 21
}

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
            heritage: Mutex::new(BTreeMap::new()),
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

    /// The table of the entries that lead to leaf tables, if it exists.
    fn directory(&self, va: u64) -> Option<PhysAddr> {
        let table = pte::target(self.slots.get(index(va, 3))?.load(Ordering::Acquire))?;
        pte::target(self.memory.table_read(table, index(va, 2)))
    }

    /// The entry that leads to the leaf table of `va`.
    fn leaf_entry(&self, va: u64) -> u64 {
        self.directory(va).map_or(0, |table| self.memory.table_read(table, index(va, 1)))
    }

    /// As `directory`, made if need be.
    fn grow_directory(&self, va: u64) -> Result<PhysAddr, Errno> {
        if let Some(table) = self.directory(va) {
            return Ok(table);
        }
        let _growth = self.growth.lock();
        let slot = self.slots.get(index(va, 3)).ok_or(Errno::EINVAL)?;
        let table = if let Some(table) = pte::target(slot.load(Ordering::Relaxed)) {
            table
        } else {
            let table = self.memory.alloc_table_page()?;
            slot.store(pte::table(table), Ordering::Release);
            for root in self.roots.iter().filter_map(|r| r.get()) {
                self.memory.table_write(*root, index(va, 3), pte::table(table));
            }
            table
        };
        self.grow_below(table, index(va, 2))
    }

    fn grow_below(&self, table: PhysAddr, i: usize) -> Result<PhysAddr, Errno> {
        if let Some(next) = pte::target(self.memory.table_read(table, i)) {
            return Ok(next);
        }
        let next = self.memory.alloc_table_page()?;
        self.memory.table_write(table, i, pte::table(next));
        Ok(next)
    }

    /// The leaf table that covers `va`, made if need be, to be changed.
    fn grow(&self, va: u64) -> Result<PhysAddr, Errno> {
        let entry = self.leaf_entry(va);
        if let Some(table) = pte::target(entry)
            && entry & pte::LENT == 0
        {
            return Ok(table);
        }
        let directory = self.grow_directory(va)?;
        let i = index(va, 1);
        if let Some(table) = self.own_table(directory, i, va) {
            return Ok(table);
        }
        let _growth = self.growth.lock();
        self.grow_below(directory, i)
    }

    /// The leaf table under entry `i` of `directory`, if there is one, as this space's own: forks no longer look at it, and
    /// what a fork left is in it.
    fn own_table(&self, directory: PhysAddr, i: usize, va: u64) -> Option<PhysAddr> {
        let entry = self.memory.table_read(directory, i);
        if entry & (pte::LENT | pte::INHERITED) == 0 {
            return pte::target(entry);
        }
        let heritage = self.heritage.lock().remove(&region(va));
        let table = match heritage {
            Some(Heritage::Lent(snapshot)) => {
                // Only holders make more holders, so 1 means that the forks are gone.
                if Arc::strong_count(&snapshot) > 1 {
                    snapshot.part(false);
                }
                pte::target(entry)
            }
            Some(Heritage::Inherited(snapshot, table)) => {
                match Arc::try_unwrap(snapshot) {
                    Ok(last) => last.fill_last(table),
                    Err(shared) => shared.fill(table),
                }
                Some(table)
            }
            None => pte::target(entry),
        };
        self.memory.table_write(directory, i, table.map_or(0, pte::table));
        table
    }

    /// One entry, wherever it is.
    fn read_entry(&self, va: u64) -> u64 {
        let entry = self.leaf_entry(va);
        if let Some(table) = pte::target(entry) {
            return self.memory.table_read(table, index(va, 0));
        }
        if entry & pte::INHERITED == 0 {
            return 0;
        }
        let snapshot = match self.heritage.lock().get(&region(va)) {
            Some(Heritage::Inherited(snapshot, _)) => snapshot.clone(),
            _ => return 0,
        };
        snapshot.entry(index(va, 0))
    }

    /// Write-protects the private pages of a leaf table, to be lent.
    fn protect_table(&self, table: PhysAddr, stale: &mut Stale) {
        for entry in self.memory.table(table) {
            let old = entry.load(Ordering::Relaxed);
            let Some(mut leaf) = pte::decode(old) else { continue };
            if is_private(leaf.flags) && leaf.flags.contains(PteFlags::WRITE) {
                leaf.flags -= PteFlags::WRITE;
                let new = pte::encode(leaf);
                entry.store(new, Ordering::Release);
                if pte::needs_shootdown(old, new) {
                    stale.push(&self.memory, leaf.pa);
                }
            }
        }
    }

    /// Present pages of a leaf table: private ones, and others. None where direct call sites are, whose pages are changed in place.
    fn count_table(&self, table: PhysAddr) -> Option<(u64, u64)> {
        let (mut private, mut others) = (0, 0);
        for entry in self.memory.table(table) {
            if let Some(leaf) = pte::decode(entry.load(Ordering::Relaxed)) {
                if leaf.flags.intersects(PteFlags::PATCHED | PteFlags::TRAMPOLINES) {
                    return None;
                }
                *if is_private(leaf.flags) { &mut private } else { &mut others } += 1;
            }
        }
        Some((private, others))
    }

    /// What a fork may have of the region under entry `i` of `directory` without a copy, if it is worth that.
    fn lend(&self, directory: PhysAddr, i: usize, va: u64, stale: &mut Stale) -> Option<Arc<Snapshot>> {
        let entry = self.memory.table_read(directory, i);
        if let Some(Heritage::Lent(snapshot) | Heritage::Inherited(snapshot, _)) = self.heritage.lock().get(&region(va))
        {
            return Some(snapshot.clone());
        }
        let table = pte::target(entry)?;
        let pages = self.count_table(table)?;
        if pages.0 < DENSE {
            return None;
        }
        let snapshot = Arc::new(Snapshot::new(&self.memory, table, pages)?);
        self.protect_table(table, stale);
        self.heritage.lock().insert(region(va), Heritage::Lent(snapshot.clone()));
        self.memory.table_write(directory, i, entry | pte::LENT);
        Some(snapshot)
    }

    /// Takes over a region of a fresh space. False at the memory limit.
    fn inherit(&self, va: u64, snapshot: Arc<Snapshot>) -> bool {
        let Ok(directory) = self.grow_directory(va) else { return false };
        let Ok(table) = self.memory.reserve_table_page() else { return false };
        self.heritage.lock().insert(region(va), Heritage::Inherited(snapshot, table));
        self.memory.table_write(directory, index(va, 1), pte::INHERITED);
        true
    }

    /// Calls `each` with the first address and the number of every present leaf table's place, and that of every region
    /// without one that a fork left, in ascending order.
    fn for_each_region(&self, each: &mut dyn FnMut(PhysAddr, usize, u64)) {
        for (i3, slot) in self.slots.iter().enumerate() {
            let Some(table) = pte::target(slot.load(Ordering::Acquire)) else { continue };
            for i2 in 0..ENTRIES {
                let Some(directory) = pte::target(self.memory.table_read(table, i2)) else { continue };
                for i1 in 0..ENTRIES {
                    if self.memory.table_read(directory, i1) != 0 {
                        each(directory, i1, i3 as u64 * span(3) + i2 as u64 * span(2) + i1 as u64 * span(1));
                    }
                }
            }
        }
    }

    /// Applies `visit` to what one table stores of `start..end`.
    fn visit_table(&self, table: PhysAddr, level: u32, start: u64, end: u64, change: &mut Change<'_>) {
        let mut va = start;
        while va < end {
            let next = ((va & !(span(level) - 1)) + span(level)).min(end);
            let i = index(va, level);
            let entry = self.memory.table_read(table, i);
            if level > 0 {
                let below = if level == 1 { self.own_table(table, i, va) } else { pte::target(entry) };
                if let Some(below) = below {
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
        pte::decode(self.read_entry(va))
    }

    fn own(&self, va: u64, write: bool) -> bool {
        let entry = self.leaf_entry(va);
        let inherited = entry & pte::INHERITED != 0;
        if (inherited || (write && entry & pte::LENT != 0))
            && let Some(directory) = self.directory(va)
        {
            self.own_table(directory, index(va, 1), va);
        }
        inherited
    }

    fn visit(&self, start: u64, end: u64, visit: &mut dyn FnMut(u64, Pte, bool)) {
        let (mut va, end) = (start & !(PAGE_SIZE - 1), end.min(TASK_SIZE));
        while va < end {
            // Where a table of a higher level is missing, what it would cover is passed over at once.
            let slot = self.slots.get(index(va, 3)).and_then(|s| pte::target(s.load(Ordering::Acquire)));
            let missing = match slot {
                None => Some(3),
                Some(table) if pte::target(self.memory.table_read(table, index(va, 2))).is_none() => Some(2),
                Some(_) => (self.leaf_entry(va) == 0).then_some(1),
            };
            if let Some(level) = missing {
                va = ((va & !(span(level) - 1)) + span(level)).min(end);
                continue;
            }
            let next = ((va & !(span(1) - 1)) + span(1)).min(end);
            let heir = match self.heritage.lock().get(&region(va)) {
                Some(Heritage::Inherited(snapshot, _) | Heritage::Lent(snapshot)) => Some(snapshot.clone()),
                None => None,
            };
            // One of the holders is the clone just made.
            let shared = heir.as_ref().is_some_and(|snapshot| Arc::strong_count(snapshot) > 2);
            let table = pte::target(self.leaf_entry(va));
            while va < next {
                let entry = match (table, &heir) {
                    (Some(table), _) => self.memory.table_read(table, index(va, 0)),
                    (None, Some(heir)) => heir.entry(index(va, 0)),
                    (None, None) => 0,
                };
                if let Some(pte) = pte::decode(entry) {
                    visit(va, pte, shared);
                }
                va += PAGE_SIZE;
            }
        }
    }

    fn bequeath(&self, child: &dyn GuestSpace, may: &mut dyn FnMut(u64, u64) -> bool) -> Vec<Bequest> {
        let Some(child) = child.as_any().downcast_ref::<KvmSpace>() else { return Vec::new() };
        let (mut given, mut stale) = (Vec::new(), Stale::default());
        self.for_each_region(&mut |directory, i, start| {
            let end = start + span(1);
            if may(start, end)
                && let Some(snapshot) = self.lend(directory, i, start, &mut stale)
            {
                let pages = snapshot.pages;
                if child.inherit(start, snapshot) {
                    given.push(Bequest { start, end, private: pages.0, others: pages.1 });
                }
            }
        });
        stale.flush(&self.memory);
        given
    }

    fn renounce(&self, start: u64, end: u64) -> (u64, u64) {
        let (first, last) = (region(start.saturating_add(span(1) - 1)), region(end));
        let mut gone = (0, 0);
        if first >= last {
            return gone;
        }
        let taken: Vec<_> = {
            let mut heritage = self.heritage.lock();
            let sole = |h: &Heritage| matches!(h, Heritage::Lent(s) if Arc::strong_count(s) == 1);
            let regions: Vec<_> = heritage.range(first..last).filter(|(_, h)| !sole(h)).map(|(r, _)| *r).collect();
            regions.into_iter().filter_map(|r| heritage.remove(&r).map(|h| (r, h))).collect()
        };
        // Held until no translation is left: the last to let go of them releases frames.
        let (mut stale, mut held) = (Stale::default(), Vec::new());
        for (r, heritage) in taken {
            let va = r * span(1);
            let Some(directory) = self.directory(va) else { continue };
            let i = index(va, 1);
            match heritage {
                Heritage::Inherited(snapshot, table) => {
                    gone = (gone.0 + snapshot.pages.0, gone.1 + snapshot.pages.1);
                    self.memory.table_write(directory, i, 0);
                    self.memory.unreserve_table_page(table);
                }
                Heritage::Lent(snapshot) => {
                    gone = (gone.0 + snapshot.pages.0, gone.1 + snapshot.pages.1);
                    snapshot.part(true);
                    let Some(table) = pte::target(self.memory.table_read(directory, i)) else { continue };
                    for entry in self.memory.table(table) {
                        let old = entry.swap(0, Ordering::AcqRel);
                        if let Some(leaf) = pte::decode(old)
                            && pte::needs_shootdown(old, 0)
                        {
                            stale.push(&self.memory, leaf.pa);
                        }
                    }
                    self.memory.table_write(directory, i, pte::table(table));
                    held.push(snapshot);
                }
            }
        }
        stale.flush(&self.memory);
        drop(held);
        gone
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
        self.renounce(0, TASK_SIZE);
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
        for heritage in core::mem::take(self.heritage.get_mut()).into_values() {
            match heritage {
                Heritage::Inherited(_, table) => self.memory.unreserve_table_page(table),
                Heritage::Lent(snapshot) if Arc::strong_count(&snapshot) > 1 => snapshot.part(false),
                Heritage::Lent(_) => {}
            }
        }
        self.memory.retire_table_pages(pages);
    }
}

#[cfg(test)]
mod tests;
