//! fork(2) of an address space: VMAs are copied, private pages are shared until written.
use std::sync::Arc;

use guest_abi::layout::{PAGE_SIZE, TASK_SIZE};

use super::AddressSpace;
use super::space::{MapFlags, SpaceLimits, State, is_private_page};
use super::vma::{Backing, Vma};
use crate::platform::{Bequest, PhysAddr, Pte, PteFlags};
use crate::{Errno, Result};

/// What the first fork of a program takes for pages that will be written: those of mappings up to this size, and the stack,
/// up to so many.
const GUESS_VMA_PAGES: u64 = 16;
const GUESS_MOST: usize = 64;

/// Bytes that must be left for a fork: a child needs tables of its own, and copies of what it writes first, at once. It would be killed
/// for want of them where fork(2) can still say ENOMEM.
const CHILD_NEEDS: u64 = 32 * PAGE_SIZE;

/// Consecutive entries of one kind.
struct Run {
    va: u64,
    pa: PhysAddr,
    pages: usize,
    flags: PteFlags,
}

impl AddressSpace {
    /// A copy-on-write copy for fork(2).
    pub fn fork(self: &Arc<Self>) -> Result<Arc<AddressSpace>> {
        let image = self.image.lock().clone();
        let memory = self.memory();
        if memory.limit().saturating_sub(memory.used()) < CHILD_NEEDS {
            return Err(Errno::ENOMEM);
        }
        let mut objects = Vec::new();
        let (child, failed) = {
            let mut parent = self.state.write();
            // Before the copy, which may be large.
            let charge = parent.charge.another(parent.charge.bytes())?;
            let mut vmas = parent.vmas.filtered(|vma| {
                // Locks are not inherited (mlock(2)).
                vma.flags -= MapFlags::LOCKED | MapFlags::LOCKED_ONFAULT;
                !vma.flags.contains(MapFlags::DONTFORK)
            });
            vmas.locked = 0;
            for vma in vmas.iter() {
                if let Backing::Object { object, .. } = &vma.backing
                    && !objects.last().is_some_and(|last| Arc::ptr_eq(last, object))
                {
                    objects.push(object.clone());
                }
            }
            let state = State {
                vmas,
                charge,
                limits: SpaceLimits { ..parent.limits },
                mmap_base: parent.mmap_base,
                brk_base: parent.brk_base,
                brk: parent.brk,
                future: MapFlags::empty(),
                anonymous: 0,
                object_pages: 0,
                peak: 0,
                direct: parent.direct.clone(),
                hot: parent.hot.clone(),
            };
            let child = Self::from_state(self.platform.clone(), state, image)?;
            // Whoever takes pages out of an object meanwhile must find the child before its tables show them.
            for object in &objects {
                object.add_mapper(&child);
            }
            let (given, runs, hot) = self.share_pages(&mut parent, &child);
            let failed = {
                let mut state = child.state.write_nested();
                for bequest in given {
                    state.count_in(PteFlags::OWNED, bequest.private);
                    state.count_in(PteFlags::empty(), bequest.others);
                }
                let mut failed = !self.copy_hot(&child, &mut state, &hot);
                for run in runs {
                    let stored = if failed { 0 } else { child.pages.map_run(run.va, run.pa, run.pages, run.flags) };
                    state.count_in(run.flags, stored as u64);
                    if stored < run.pages {
                        failed = true;
                        if run.flags.contains(PteFlags::OWNED) {
                            let rest: Vec<_> =
                                (stored..run.pages).map(|i| PhysAddr(run.pa.0 + i as u64 * PAGE_SIZE)).collect();
                            memory.release(&rest);
                        }
                    }
                }
                failed
            };
            (child, failed)
        };
        // Given up outside of the lock: a dropped space locks itself.
        if failed {
            return Err(Errno::ENOMEM);
        }
        child.barrier_registrations(self.barrier_registrations(0));
        Ok(child)
    }

    /// Gives the child copies of the pages that both sides are expected to write, and the parent its right to write them back.
    /// A fault each on both sides would cost far more than the copy. False if an entry could not be stored.
    fn copy_hot(&self, child: &AddressSpace, state: &mut State, hot: &[(u64, Pte)]) -> bool {
        let memory = self.memory();
        let mut fine = true;
        for &(va, pte) in hot {
            let copy = memory.alloc().and_then(|pa| match memory.copy_page(pte.pa, pa) {
                Ok(()) => Ok(pa),
                Err(e) => {
                    memory.release(&[pa]);
                    Err(e)
                }
            });
            let entry = if let Ok(pa) = copy {
                if pte.flags.contains(PteFlags::WRITE) {
                    // More rights to the same frame: cannot fail where an entry is.
                    let _ = self.pages.map(va, pte);
                }
                Pte { pa, flags: pte.flags | PteFlags::WRITE }
            } else {
                memory.share(pte.pa);
                Pte { pa: pte.pa, flags: pte.flags - PteFlags::WRITE }
            };
            if child.pages.map(va, entry).is_ok() {
                state.count_in(entry.flags, 1);
            } else {
                memory.release(&[entry.pa]);
                fine = false;
            }
        }
        fine
    }

    /// Leaves densely used regions to the child as they are. Elsewhere, write-protects private pages and takes one reference to
    /// each page that the child shares, in one pass; gives what the child is to map, and apart from it the entries (with their
    /// rights before) of pages to be copied.
    fn share_pages(&self, state: &mut State, child: &AddressSpace) -> (Vec<Bequest>, Vec<Run>, Vec<(u64, Pte)>) {
        let memory = self.memory();
        let (hot_pages, first) = {
            let mut known = state.hot.lock();
            let pages = known.take();
            (pages, known.forks == 1)
        };
        // Before anything is known: the program's and its libraries' data, and the stack.
        let guess = |vma: &Vma| first && (vma.flags.contains(MapFlags::STACK) || vma.pages() <= GUESS_VMA_PAGES);
        let apart = MapFlags::DONTFORK | MapFlags::WIPEONFORK | MapFlags::STACK;
        let given = self.pages.bequeath(&*child.pages, &mut |start, end| {
            let first_hot = hot_pages.partition_point(|&page| page < start);
            let cold = hot_pages.get(first_hot).is_none_or(|&page| page >= end);
            cold && state.vmas.overlapping(start, end).all(|vma| !vma.flags.intersects(apart) && !guess(vma))
        });
        let mut hot = Vec::new();
        let mut runs: Vec<Run> = Vec::new();
        let mut vmas = state.vmas.iter().peekable();
        let mut copy = |va: u64, pte: Pte| {
            while vmas.next_if(|vma| vma.end <= va).is_some() {}
            let Some(vma) = vmas.peek().filter(|vma| vma.start <= va) else {
                if pte.flags.contains(PteFlags::TRAMPOLINES) {
                    memory.share(pte.pa);
                    runs.push(Run { va, pa: pte.pa, pages: 1, flags: pte.flags });
                }
                return Some(pte);
            };
            if vma.flags.intersects(MapFlags::DONTFORK | MapFlags::WIPEONFORK) {
                return Some(pte);
            }
            let mut shared = pte;
            if is_private_page(pte.flags) {
                shared.flags -= PteFlags::WRITE;
                let is_hot = hot_pages.binary_search(&va).is_ok() || (guess(vma) && hot.len() < GUESS_MOST);
                if is_hot && vma.writable() {
                    // Protected all the same until it is copied: other threads may be writing.
                    hot.push((va, pte));
                    return Some(shared);
                }
            }
            if pte.flags.contains(PteFlags::OWNED) {
                memory.share(pte.pa);
            }
            match runs.last_mut() {
                Some(run)
                    if run.va + run.pages as u64 * PAGE_SIZE == va
                        && run.pa.0 + run.pages as u64 * PAGE_SIZE == pte.pa.0
                        && run.flags == shared.flags =>
                {
                    run.pages += 1;
                }
                _ => runs.push(Run { va, pa: pte.pa, pages: 1, flags: shared.flags }),
            }
            Some(shared)
        };
        let mut start = 0;
        for bequest in &given {
            self.pages.update(start, bequest.start, &mut copy);
            start = bequest.end;
        }
        self.pages.update(start, TASK_SIZE, &mut copy);
        (given, runs, hot)
    }
}
