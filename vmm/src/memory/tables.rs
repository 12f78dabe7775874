//! Page-table pages: zeroed pages of a slot area of their own. Owns when a page of a dead address space may be used again; never
//! what an entry means.
//!
//! A KVM that shadows guest page tables remembers its shadows by guest frame number: a page used again for another table would
//! show the old entries. There, dead pages wait in quarantine until all shadows are dropped at once, which deleting any memory
//! slot does (KVM_X86_QUIRK_SLOT_ZAP_ALL, KVM API documentation).
use std::sync::atomic::{AtomicBool, Ordering};

use guest_abi::Errno;
use guest_abi::layout::PAGE_SIZE;
use sentry::lock::{Mutex, Rank};
use sentry::platform::PhysAddr;

use super::frames::Budget;
use super::region::Region;
use super::slots::{Area, Registry, TABLES};

/// Dead pages that make dropping all shadows worth its cost.
const QUARANTINE: usize = 2048;
/// Free pages kept; more give their memory back to the host (8 MiB).
const KEEP: usize = 2048;

#[derive(Default)]
struct Lists {
    /// Pages that were never used: from this index on.
    fresh: u64,
    /// Zeroed on reuse.
    free: Vec<PhysAddr>,
    /// Given back to the host: zero.
    cold: Vec<PhysAddr>,
    quarantine: Vec<PhysAddr>,
}

/// The allocator of page-table pages.
pub struct Tables {
    area: Area,
    lists: Mutex<Lists>,
    shadow: AtomicBool,
    /// The number of the slot whose deletion drops all shadows; held by whoever is at it.
    tripwire: Mutex<u32>,
}

impl Tables {
    /// No pages yet.
    pub fn new(registry: &Registry) -> Tables {
        Tables {
            area: Area::new(TABLES, 8 << 20, 256 << 20, true),
            lists: Mutex::new(Rank::Frames, Lists::default()),
            shadow: AtomicBool::new(true),
            tripwire: Mutex::new(Rank::PageTable, registry.number()),
        }
    }

    /// Whether KVM shadows page tables (the cautious default). Without, dead pages are used again at once.
    pub fn set_shadow(&self, shadow: bool) {
        self.shadow.store(shadow, Ordering::Relaxed);
    }

    /// Whether KVM shadows page tables.
    pub fn shadow(&self) -> bool {
        self.shadow.load(Ordering::Relaxed)
    }

    /// Whether `pa` is a page of this area.
    pub fn contains(&self, pa: PhysAddr) -> bool {
        self.area.covers(pa, PAGE_SIZE)
    }

    /// A zeroed page.
    pub fn alloc(&self, registry: &Registry, region: &Region, budget: &Budget) -> Result<PhysAddr, Errno> {
        self.reserve(registry, region, budget, true)
    }

    /// A page, zeroed if asked for.
    pub fn reserve(
        &self,
        registry: &Registry,
        region: &Region,
        budget: &Budget,
        zeroed: bool,
    ) -> Result<PhysAddr, Errno> {
        budget.take(1)?;
        loop {
            let mut lists = self.lists.lock();
            if let Some(pa) = lists.free.pop() {
                drop(lists);
                if zeroed {
                    super::zero_committed(region, pa);
                }
                return Ok(pa);
            }
            if let Some(pa) = lists.cold.pop() {
                return Ok(pa);
            }
            let grown = self.area.grown();
            if lists.fresh < grown / PAGE_SIZE {
                let pa = PhysAddr(TABLES.base + lists.fresh * PAGE_SIZE);
                lists.fresh += 1;
                return Ok(pa);
            }
            drop(lists);
            if !self.area.grow(registry, region, grown, TABLES.len) {
                self.drop_shadows(registry, region, budget);
                let lists = self.lists.lock();
                if lists.free.is_empty() && lists.cold.is_empty() {
                    budget.give(1);
                    return Err(Errno::ENOMEM);
                }
            }
        }
    }

    /// Takes back a page of `reserve` that was never linked, so that nobody can have a shadow of it.
    pub fn unreserve(&self, budget: &Budget, page: PhysAddr) {
        debug_assert!(self.contains(page));
        self.lists.lock().free.push(page);
        budget.give(1);
    }

    /// Takes pages that no live address space names any more. They leave the budget at once, so that nobody fails for want of what
    /// only waits; what waits is bounded.
    pub fn retire(&self, registry: &Registry, region: &Region, budget: &Budget, pages: Vec<PhysAddr>) {
        debug_assert!(pages.iter().all(|p| self.contains(*p)));
        budget.give(pages.len() as u64);
        let mut lists = self.lists.lock();
        lists.quarantine.extend(pages);
        let full = lists.quarantine.len() >= QUARANTINE;
        drop(lists);
        if full || !self.shadow.load(Ordering::Relaxed) {
            self.drop_shadows(registry, region, budget);
        }
    }

    /// Pages in quarantine.
    pub fn quarantined(&self) -> usize {
        self.lists.lock().quarantine.len()
    }

    /// Makes KVM forget every shadow page, while vCPUs run (KVM orders the two), and frees what was in quarantine when it began.
    pub fn drop_shadows(&self, registry: &Registry, region: &Region, budget: &Budget) {
        let pages = core::mem::take(&mut self.lists.lock().quarantine);
        if pages.is_empty() {
            return;
        }
        if self.shadow.load(Ordering::Relaxed) && !self.trip(registry, region) {
            // Lost: they cannot be used again, and count for ever.
            budget.lose(pages.len() as u64);
            return;
        }
        let mut lists = self.lists.lock();
        let room = KEEP.saturating_sub(lists.free.len()).min(pages.len());
        let (keep, mut rest) = (pages[..room].to_vec(), pages[room..].to_vec());
        lists.free.extend(keep);
        drop(lists);
        rest.sort_unstable();
        let mut given_back = true;
        super::for_each_run(&rest, |pa, len| given_back &= region.discard(pa, len).is_ok());
        let mut lists = self.lists.lock();
        if given_back { lists.cold.extend(rest) } else { lists.free.extend(rest) }
    }

    /// Gives the memory of free pages back to the host.
    pub fn trim(&self, region: &Region) {
        let mut free = core::mem::take(&mut self.lists.lock().free);
        free.sort_unstable();
        let mut given_back = true;
        super::for_each_run(&free, |pa, len| given_back &= region.discard(pa, len).is_ok());
        let mut lists = self.lists.lock();
        if given_back { lists.cold.extend(free) } else { lists.free.extend(free) }
    }

    /// Adds and deletes a one-page slot that the guest never uses.
    fn trip(&self, registry: &Registry, region: &Region) -> bool {
        let pa = PhysAddr(TABLES.base - (2 << 20));
        let slot = self.tripwire.lock();
        let done = registry.set(region, *slot, pa, PAGE_SIZE).and_then(|()| registry.set(region, *slot, pa, 0));
        drop(slot);
        if let Err(e) = &done {
            log::error!("shadow page tables cannot be dropped: {e}");
        }
        done.is_ok()
    }
}
