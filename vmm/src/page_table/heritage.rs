//! Regions (2 MiB, one leaf table) whose entries a fork did not copy. Owns what the child maps there until it uses the region, and
//! who holds the references to the frames meanwhile; never which regions are worth it (the sentry's).
//!
//! No table page is ever reachable from two address spaces: on shadow paging the entry that leads to a table cannot be changed
//! cheaply. The parent keeps its table, write-protected; the child has no table there, and a first fault that fills one. Whoever
//! changes the parent's entries first leaves a copy of them behind.
use core::sync::atomic::Ordering;
use std::sync::Arc;

use guest_abi::layout::PAGE_SIZE;
use sentry::lock::{Mutex, Rank};
use sentry::platform::{KernelMemory, Memory, PhysAddr, PteFlags};

use super::{ENTRIES, pte};
use crate::memory::GuestMemory;

/// Where the entries are.
enum Source {
    /// In the table of the space that was forked, which has not changed since; its references are that space's.
    Table(PhysAddr),
    /// Here, with references of their own.
    Copied(Box<[u64; ENTRIES]>),
}

/// What one region mapped at a fork.
pub(super) struct Snapshot {
    memory: Arc<GuestMemory>,
    source: Mutex<Source>,
    /// Present pages: private ones, and others.
    pub pages: (u64, u64),
}

/// Takes one reference more for what an entry owns.
fn share(memory: &GuestMemory, entry: u64) {
    if let Some(pte) = pte::decode(entry)
        && pte.flags.contains(PteFlags::OWNED)
    {
        memory.share(pte.pa);
    }
}

impl Snapshot {
    /// Of a table whose private entries are write-protected. None at the memory limit: the copy that may have to be made is paid
    /// for now.
    pub(super) fn new(memory: &Arc<GuestMemory>, table: PhysAddr, pages: (u64, u64)) -> Option<Snapshot> {
        memory.charge(KernelMemory::Slab, PAGE_SIZE).ok()?;
        let source = Mutex::new(Rank::PageTable, Source::Table(table));
        Some(Snapshot { memory: memory.clone(), source, pages })
    }

    /// One entry.
    pub(super) fn entry(&self, i: usize) -> u64 {
        match &*self.source.lock() {
            Source::Table(table) => self.memory.table_read(*table, i),
            Source::Copied(entries) => entries.get(i).copied().unwrap_or(0),
        }
    }

    /// Fills an unlinked table with the entries and references of its own.
    pub(super) fn fill(&self, table: PhysAddr) {
        let to = self.memory.table(table);
        let source = self.source.lock();
        match &*source {
            Source::Table(from) => {
                for (from, to) in self.memory.table(*from).iter().zip(to) {
                    let entry = from.load(Ordering::Relaxed);
                    share(&self.memory, entry);
                    to.store(entry, Ordering::Relaxed);
                }
            }
            Source::Copied(entries) => {
                for (&entry, to) in entries.iter().zip(to) {
                    share(&self.memory, entry);
                    to.store(entry, Ordering::Relaxed);
                }
            }
        }
    }

    /// As `fill`, by whoever held it last: the references move.
    pub(super) fn fill_last(mut self, table: PhysAddr) {
        let to = self.memory.table(table);
        let entries = match self.source.get_mut() {
            // Not the last then: the space that was forked holds it too.
            Source::Table(_) => return self.fill(table),
            Source::Copied(entries) => core::mem::replace(entries, Box::new([0; ENTRIES])),
        };
        for (&entry, to) in entries.iter().zip(to) {
            to.store(entry, Ordering::Relaxed);
        }
    }

    /// Leaves a copy behind because the table is about to change. With `hand_over` the table's references go with it, and the
    /// caller empties the table.
    pub(super) fn part(&self, hand_over: bool) {
        let mut source = self.source.lock();
        if let Source::Table(table) = *source {
            let mut copy = Box::new([0; ENTRIES]);
            for (from, to) in self.memory.table(table).iter().zip(copy.iter_mut()) {
                *to = from.load(Ordering::Relaxed);
                if !hand_over {
                    share(&self.memory, *to);
                }
            }
            *source = Source::Copied(copy);
        }
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        if let Source::Copied(entries) = self.source.get_mut() {
            let owned = entries.iter().filter_map(|&e| pte::decode(e)).filter(|p| p.flags.contains(PteFlags::OWNED));
            let frames: Vec<_> = owned.map(|p| p.pa).collect();
            if !frames.is_empty() {
                self.memory.release(&frames);
            }
        }
        self.memory.uncharge(KernelMemory::Slab, PAGE_SIZE);
    }
}

/// What a space knows of a region, by the region's number.
pub(super) enum Heritage {
    /// Its own table, unchanged since a fork.
    Lent(Arc<Snapshot>),
    /// What a fork left to it, and the page that its table will be. The page is no table yet, so nobody has a shadow of it.
    Inherited(Arc<Snapshot>, PhysAddr),
}
