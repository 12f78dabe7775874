//! Page faults: makes an access possible, filling pages ahead of the next faults. Owns the policy of what to fill; never who
//! gets a signal (the caller's).
use std::collections::VecDeque;
use std::sync::Arc;

use guest_abi::UserAddr;
use guest_abi::layout::{MMAP_MIN_ADDR, PAGE_SIZE, TASK_SIZE};

use super::backing::MappedPage;
use super::space::{MapFlags, Prot, State, is_private_page};
use super::vma::{Ahead, Backing, STACK_GUARD, Vma};
use super::{AddressSpace, FaultSignal, Mappable, PAGE_MASK};
use crate::platform::host::Window;
use crate::platform::{PhysAddr, Pte, PteFlags};
use crate::{Errno, Result};

/// A fault costs as much as filling some 15 pages, so guesses are cheap: what is filled first, and the most at a time.
const ANONYMOUS_FIRST: u64 = 8;
const ANONYMOUS_MOST: u64 = 512;
/// Pages of a window mapped with the one asked for: entries only, no memory.
const WINDOW_FIRST: u64 = 128;
const WINDOW_MOST: u64 = 512;
/// Private copies of file pages (a program's data) made at once.
const COPY_FIRST: u64 = 4;
const COPY_MOST: u64 = 64;
/// Frames of an object (tmpfs, shared memory) asked for at once.
const FRAMES_FIRST: u64 = 16;
const FRAMES_MOST: u64 = 64;
/// Pages of a stack filled downwards.
const STACK_PAGES: u64 = 4;
/// Pages around a write after a fork that are made writable with it if nobody shares them any more, and those that are copied
/// with it if somebody does.
const REGAIN_AROUND: u64 = 32;
const REGAIN_MOST: u64 = 512;
const COPY_AROUND: u64 = 4;
const COPY_AROUND_MOST: u64 = 64;
/// Pages written after a fork that are remembered, to be copied at once by the next fork.
const HOT_MOST: usize = 128;
/// Every fourth fork forgets one in so many of them.
const HOT_AGING: usize = 8;
/// Pages filled when a mapping is made: its first use would cost more than they do.
const PREFILL_ANONYMOUS: u64 = 4;
const PREFILL_SMALL: u64 = 16;
const PREFILL_HEAP: u64 = 8;
const PREFILL_STACK_TOP: u64 = 2;
const PREFILL_COPY: u64 = 16;
/// With more mappings than this nothing is filled unasked: a program that makes so many may not use them all.
const PREFILL_VMAS: usize = 1000;

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub write: bool,
    pub exec: bool,
    /// Regardless of the VMA's rights (ptrace, /proc/PID/mem).
    pub force: bool,
}

impl Access {
    pub(super) const READ: Access = Access { write: false, exec: false, force: false };
    pub(super) const WRITE: Access = Access { write: true, exec: false, force: false };

    /// Whether an entry allows it.
    pub(super) fn allowed_by(self, pte: Pte) -> bool {
        (!pte.flags.contains(PteFlags::NONE) || (self.force && !self.write))
            && (!self.write || pte.flags.contains(PteFlags::WRITE))
            && (!self.exec || pte.flags.contains(PteFlags::EXEC))
    }
}

fn signal_of(errno: Errno) -> FaultSignal {
    if errno == Errno::ENOMEM { FaultSignal::OutOfMemory } else { FaultSignal::Bus }
}

/// How many pages to fill: `first`, or four times the last fill where the fault is where it was expected; never more than `most`.
fn window_size(ahead: &Ahead, page: u64, first: u64, most: u64) -> u64 {
    let wanted = if ahead.next == page { ahead.pages.saturating_mul(4) } else { 0 };
    wanted.max(first).min(most)
}

/// What a fault needs to know of its VMA, copied out so that the tree can be changed.
struct Site {
    start: u64,
    end: u64,
    flags: MapFlags,
    entry: PteFlags,
    writable: bool,
    ahead: Ahead,
    offset: u64,
    /// Whether the VMA shows a file (shared anonymous memory is an object without one).
    file: bool,
}

/// The aligned block of `pages` pages that holds `page`, as far as the VMA goes.
fn block_around(page: u64, pages: u64, site: &Site) -> (u64, u64) {
    let start = page & !(pages * PAGE_SIZE - 1);
    (start.max(site.start), (start + pages * PAGE_SIZE).min(site.end))
}

/// The pages to serve with the fault at `page`: those that follow where the faults come in order, else its aligned block.
fn reach(page: u64, site: &Site, first: u64, most: u64) -> (u64, u64) {
    if site.ahead.next == page && site.ahead.pages > 0 {
        let pages = window_size(&site.ahead, page, first, most);
        return (page, (page + pages * PAGE_SIZE).min(site.end));
    }
    block_around(page, first, site)
}

/// Pages that a process or its forks write soon after a fork. Shared by all forks of one program, so that a parent knows what its
/// children will write.
#[derive(Default)]
pub(super) struct Hot {
    pages: VecDeque<u64>,
    /// Forks seen.
    pub forks: u64,
}

impl Hot {
    fn add(&mut self, page: u64) {
        if !self.pages.contains(&page) {
            if self.pages.len() >= HOT_MOST {
                self.pages.pop_front();
            }
            self.pages.push_back(page);
        }
    }

    /// The pages to copy at this fork, ascending. Now and then some are forgotten: if they still matter, they come back by a fault.
    pub(super) fn take(&mut self) -> Vec<u64> {
        self.forks += 1;
        if self.forks.is_multiple_of(4) {
            let old = self.pages.len() / HOT_AGING;
            self.pages.drain(..old);
        }
        let mut pages: Vec<u64> = self.pages.iter().copied().collect();
        pages.sort_unstable();
        pages
    }
}

impl State {
    fn remember(&mut self, page: u64, next: u64, pages: u64) {
        if let Some(vma) = self.vmas.find_mut(page) {
            vma.ahead = Ahead { next, pages };
        }
    }

    fn keep_window(&mut self, page: u64, run: (u64, PhysAddr, usize), keep: Arc<dyn Window>) {
        let base = keep.base();
        let at = run.0.saturating_sub(run.1.0.saturating_sub(base.0));
        if let Some(vma) = self.vmas.find_mut(page) {
            vma.windows.entry(base).or_insert((at, keep));
        }
    }
}

impl AddressSpace {
    /// Makes an access possible, or says which signal it deserves. `write` and `exec` as in the page fault's error code.
    pub fn fault(self: &Arc<Self>, addr: UserAddr, write: bool, exec: bool) -> Result<(), FaultSignal> {
        let mut state = self.state.write();
        self.fault_locked(&mut state, addr.0, Access { write, exec, force: false }).map(|_| ())
    }

    /// As `fault`; gives the entry that allows the access (for a forced write: that holds a private copy).
    pub(super) fn fault_locked(&self, state: &mut State, addr: u64, access: Access) -> Result<Pte, FaultSignal> {
        let page = addr & PAGE_MASK;
        if addr >= TASK_SIZE {
            return Err(FaultSignal::NotMapped);
        }
        if state.vmas.find(page).is_none() {
            self.grow_stack(state, page)?;
        }
        let vma = state.vmas.find(page).ok_or(FaultSignal::NotMapped)?;
        Self::check_access(vma, access)?;
        if self.pages.own(page, access.write) {
            // Used soon after the fork: the next one copies the entries around it.
            state.hot.lock().add(page);
        }
        let present = self.pages.lookup(page);
        if let Some(pte) = present
            && access.allowed_by(pte)
        {
            return Ok(pte);
        }
        let site = Site {
            start: vma.start,
            end: vma.end,
            flags: vma.flags,
            entry: vma.entry_flags(),
            writable: vma.writable(),
            ahead: vma.ahead,
            offset: vma.offset_of(page),
            file: matches!(&vma.backing, Backing::Object { file: Some(_), .. }),
        };
        let done = match (&vma.backing, present) {
            (Backing::Special { frames, .. }, None) => {
                let index = usize::try_from(site.offset / PAGE_SIZE).unwrap_or(usize::MAX);
                let pa = *frames.get(index).ok_or(FaultSignal::Bus)?;
                self.enter(state, page, Pte { pa, flags: site.entry })
            }
            (Backing::Special { .. }, Some(_)) => return Err(FaultSignal::Access),
            (Backing::Object { object, .. }, _) if vma.shared() => {
                let object = object.clone();
                self.fault_shared(state, page, access, &site, &object, present)
            }
            (_, Some(old)) => self.break_copy(state, page, access, &site, old),
            (Backing::Anonymous, None) => self.fault_anonymous(state, page, &site),
            (Backing::Object { object, .. }, None) => {
                let object = object.clone();
                if access.write {
                    self.fault_copy(state, page, &site, &object)
                } else {
                    self.fault_object(state, page, object.private_page(site.offset), false, &site, &object)
                }
            }
        };
        done.map_err(signal_of)?;
        self.pages.lookup(page).ok_or(FaultSignal::OutOfMemory)
    }

    fn check_access(vma: &Vma, access: Access) -> Result<(), FaultSignal> {
        let allowed = if access.force {
            // As FOLL_FORCE: a write goes to a private copy, so it needs a private mapping or a right to write.
            !access.write || (vma.may_write() && (!vma.shared() || vma.writable()))
        } else if access.write {
            vma.writable()
        } else if access.exec {
            vma.prot.contains(Prot::EXEC)
        } else {
            vma.accessible()
        };
        if allowed { Ok(()) } else { Err(FaultSignal::Access) }
    }

    /// Extends the stack above `page` down to it.
    fn grow_stack(&self, state: &mut State, page: u64) -> Result<(), FaultSignal> {
        let refused = FaultSignal::NotMapped;
        let stack = state.vmas.next_from(page).ok_or(refused)?;
        if !stack.flags.contains(MapFlags::GROWSDOWN) || page < MMAP_MIN_ADDR {
            return Err(refused);
        }
        let (start, end, flags, prot) = (stack.start, stack.end, stack.flags, stack.prot);
        if end - page > state.limits.stack {
            return Err(refused);
        }
        if let Some(below) = state.vmas.before(page) {
            let exempt = below.flags.contains(MapFlags::GROWSDOWN) || !below.accessible();
            if below.end > page || (!exempt && page - below.end < STACK_GUARD) {
                return Err(refused);
            }
        }
        let pages = (start - page) / PAGE_SIZE;
        if flags.contains(MapFlags::LOCKED) && (state.vmas.locked + pages) * PAGE_SIZE > state.limits.memlock {
            return Err(refused);
        }
        self.may_expand(state, pages, prot, flags).map_err(|_| refused)?;
        self.make_way(state, page, start);
        state.vmas.grow_down(start, page);
        Ok(())
    }

    /// Private zeroes, filled ahead in contiguous runs.
    fn fault_anonymous(&self, state: &mut State, page: u64, site: &Site) -> Result<()> {
        let mut flags = site.entry | PteFlags::OWNED;
        flags.set(PteFlags::WRITE, site.writable);
        let memory = self.memory();
        let (first, count) = if site.flags.intersects(MapFlags::GROWSDOWN | MapFlags::STACK) {
            let first = page.saturating_sub((STACK_PAGES - 1) * PAGE_SIZE).max(site.start);
            (first, (page - first) / PAGE_SIZE + 1)
        } else if site.flags.intersects(MapFlags::RANDOM | MapFlags::THREAD_STACK) {
            (page, 1)
        } else {
            let want = window_size(&site.ahead, page, ANONYMOUS_FIRST, ANONYMOUS_MOST);
            // Without a sign of order, the neighbours on both sides are as likely.
            let ordered = site.ahead.next == page && site.ahead.pages > 0;
            let first = if ordered { page } else { block_around(page, ANONYMOUS_FIRST, site).0 };
            (first, want.min((site.end - first) / PAGE_SIZE))
        };
        let (first, count) = self.absent_around(page, first, count);
        let mut runs = Vec::new();
        let many = count > 1 && memory.alloc_many(usize::try_from(count).unwrap_or(1), &mut runs).is_ok();
        let first = if many { first } else { page };
        if !many {
            runs.push((memory.alloc()?, 1));
        }
        let mut va = first;
        let mut result = Ok(());
        for (pa, pages) in runs {
            let stored = if result.is_ok() { self.pages.map_run(va, pa, pages, flags) } else { 0 };
            state.count_in(flags, stored as u64);
            if stored < pages {
                let rest: Vec<_> = (stored..pages).map(|i| PhysAddr(pa.0 + i as u64 * PAGE_SIZE)).collect();
                memory.release(&rest);
                if va + stored as u64 * PAGE_SIZE <= page {
                    result = Err(Errno::ENOMEM);
                }
            }
            va += pages as u64 * PAGE_SIZE;
        }
        let filled = if many { count } else { 1 };
        state.remember(page, first + filled * PAGE_SIZE, filled);
        result
    }

    /// The largest run of absent pages in `first..first + count` pages that holds `page`.
    fn absent_around(&self, page: u64, first: u64, count: u64) -> (u64, u64) {
        let end = first + count * PAGE_SIZE;
        let (mut low, mut high) = (page, page + PAGE_SIZE);
        while low > first && self.pages.lookup(low - PAGE_SIZE).is_none() {
            low -= PAGE_SIZE;
        }
        while high < end && self.pages.lookup(high).is_none() {
            high += PAGE_SIZE;
        }
        (low, (high - low) / PAGE_SIZE)
    }

    /// A write to a present page of a private mapping (or a present page without enough rights).
    fn break_copy(&self, state: &mut State, page: u64, access: Access, site: &Site, old: Pte) -> Result<()> {
        let memory = self.memory();
        if !access.write {
            // The entry lagged behind the VMA's rights.
            let flags = (old.flags - PteFlags::NONE - PteFlags::EXEC) | site.entry;
            return self.set_entry(page, Pte { pa: old.pa, flags });
        }
        let mut flags = site.entry | PteFlags::OWNED | (old.flags & PteFlags::PATCHED);
        flags.set(PteFlags::WRITE, site.writable);
        let private = is_private_page(old.flags);
        if private && memory.references(old.pa) == 1 {
            // A forced write to a mapping without the right leaves the entry as it is: the caller writes to the frame.
            self.set_entry(page, Pte { pa: old.pa, flags })?;
            if site.writable {
                state.hot.lock().add(page);
                let (start, end) = reach(page, site, REGAIN_AROUND, REGAIN_MOST);
                self.regain(start, end, flags);
                state.remember(page, end, (end - start) / PAGE_SIZE);
            }
            return Ok(());
        }
        let around = private && site.writable && !site.flags.contains(MapFlags::RANDOM);
        let (start, end) =
            if around { reach(page, site, COPY_AROUND, COPY_AROUND_MOST) } else { (page, page + PAGE_SIZE) };
        if around {
            state.hot.lock().add(page);
            state.remember(page, end, (end - start) / PAGE_SIZE);
        }
        let mut gone = Vec::new();
        let mut result = Ok(());
        self.pages.update(start, end, &mut |va, pte| {
            if va != page && (!is_private_page(pte.flags) || pte.flags.contains(PteFlags::WRITE)) {
                return Some(pte);
            }
            if va != page && memory.references(pte.pa) == 1 {
                return Some(Pte { pa: pte.pa, flags });
            }
            let copy = memory.alloc().and_then(|pa| match memory.copy_page(pte.pa, pa) {
                Ok(()) => Ok(pa),
                Err(e) => {
                    memory.release(&[pa]);
                    Err(e)
                }
            });
            match copy {
                Ok(pa) => {
                    gone.push(pte);
                    Some(Pte { pa, flags })
                }
                Err(e) => {
                    if va == page {
                        result = Err(e);
                    }
                    Some(pte)
                }
            }
        });
        let mut frames = Vec::new();
        for pte in gone {
            state.count_out(pte.flags);
            state.count_in(flags, 1);
            if pte.flags.contains(PteFlags::OWNED) {
                frames.push(pte.pa);
            }
        }
        memory.release(&frames);
        result
    }

    /// Gives the right to write back to pages that nobody shares any more: they were written before the fork.
    fn regain(&self, start: u64, end: u64, flags: PteFlags) {
        self.pages.update(start, end, &mut |_, pte| {
            let lost = is_private_page(pte.flags) && !pte.flags.contains(PteFlags::WRITE);
            let alone = lost && self.memory().references(pte.pa) == 1;
            Some(if alone { Pte { pa: pte.pa, flags } } else { pte })
        });
    }

    /// Stores more rights to the same frame, or other rights.
    fn set_entry(&self, page: u64, pte: Pte) -> Result<()> {
        let less = self.pages.lookup(page).is_some_and(|old| {
            !pte.flags.contains(old.flags - PteFlags::NONE) || (pte.flags - old.flags).contains(PteFlags::NONE)
        });
        if less {
            self.pages.update(page, page + PAGE_SIZE, &mut |_, _| Some(pte));
            return Ok(());
        }
        self.pages.map(page, pte)
    }

    /// Puts another frame in the place of a present one and releases the old one.
    pub(super) fn replace_entry(&self, state: &mut State, page: u64, pte: Pte) {
        let mut gone = None;
        self.pages.update(page, page + PAGE_SIZE, &mut |_, old| {
            gone = Some(old);
            Some(pte)
        });
        if let Some(old) = gone {
            state.count_out(old.flags);
            state.count_in(pte.flags, 1);
            if old.flags.contains(PteFlags::OWNED) {
                self.memory().release(&[old.pa]);
            }
        }
    }

    /// First write to pages of a private file mapping: copies, some ahead.
    fn fault_copy(&self, state: &mut State, page: u64, site: &Site, object: &Arc<dyn Mappable>) -> Result<()> {
        let memory = self.memory();
        let mut flags = site.entry | PteFlags::OWNED;
        flags.set(PteFlags::WRITE, site.writable);
        let most = window_size(&site.ahead, page, COPY_FIRST, COPY_MOST).min((site.end - page) / PAGE_SIZE);
        // A page that is not written yet must show later changes of the file; only a program's own file does not change.
        let most = if site.flags.contains(MapFlags::LIBRARY) && site.writable { most } else { 1 };
        let (_, count) = self.absent_around(page, page, most);
        let mut done = 0;
        // Pages of one window are asked for once.
        let mut run: Option<(u64, PhysAddr, u64, Arc<dyn Window>)> = None;
        while done < count {
            let offset = site.offset + done * PAGE_SIZE;
            let known = run.as_ref().and_then(|(at, pa, pages, _)| {
                let ahead = offset.checked_sub(*at)?;
                (ahead < pages * PAGE_SIZE).then(|| PhysAddr(pa.0 + ahead))
            });
            let (source, frame) = match known {
                Some(pa) => (pa, None),
                None => match object.private_page(offset) {
                    Ok(MappedPage::Frame(pa)) => (pa, Some(pa)),
                    Ok(MappedPage::Window { pa, run: (at, run_pa, pages), keep }) => {
                        run = Some((at, run_pa, pages as u64, keep));
                        (pa, None)
                    }
                    Err(e) if done == 0 => return Err(e),
                    Err(_) => break,
                },
            };
            let copied = memory.alloc().and_then(|pa| {
                let stored = memory
                    .copy_page(source, pa)
                    .and_then(|()| self.pages.map(page + done * PAGE_SIZE, Pte { pa, flags }));
                if stored.is_err() {
                    memory.release(&[pa]);
                }
                stored
            });
            if let Some(frame) = frame {
                memory.release(&[frame]);
            }
            match copied {
                Ok(()) => state.count_in(flags, 1),
                Err(e) if done == 0 => return Err(e),
                Err(_) => break,
            }
            done += 1;
        }
        state.remember(page, page + done * PAGE_SIZE, done);
        Ok(())
    }

    /// An absent page of an object, shown as it is, with those around it that are at hand.
    fn fault_object(
        &self,
        state: &mut State,
        page: u64,
        first: Result<MappedPage>,
        writable: bool,
        site: &Site,
        object: &Arc<dyn Mappable>,
    ) -> Result<()> {
        let mut flags = site.entry;
        flags.set(PteFlags::WRITE, writable);
        match first? {
            MappedPage::Frame(pa) => {
                let flags = flags | PteFlags::OWNED | PteFlags::OBJECT;
                if let Err(e) = self.enter(state, page, Pte { pa, flags }) {
                    self.memory().release(&[pa]);
                    return Err(e);
                }
                let most = if site.flags.contains(MapFlags::RANDOM) { 1 } else { FRAMES_MOST };
                let want = window_size(&site.ahead, page, FRAMES_FIRST, most).min((site.end - page) / PAGE_SIZE);
                let mut done = 1;
                while done < want && self.pages.lookup(page + done * PAGE_SIZE).is_none() {
                    let offset = site.offset + done * PAGE_SIZE;
                    // A hole of a file stays one until it is touched.
                    if site.file && !object.is_resident(offset) {
                        break;
                    }
                    let Ok(MappedPage::Frame(pa)) = object.page(offset, writable) else { break };
                    if self.enter(state, page + done * PAGE_SIZE, Pte { pa, flags }).is_err() {
                        self.memory().release(&[pa]);
                        break;
                    }
                    done += 1;
                }
                state.remember(page, page + done * PAGE_SIZE, done);
            }
            MappedPage::Window { pa, run, keep } => {
                state.keep_window(page, run, keep.clone());
                self.enter(state, page, Pte { pa, flags })?;
                self.map_around(state, page, site, flags, run, &*keep);
            }
        }
        Ok(())
    }

    /// Maps the pages of a window around `page`.
    fn map_around(
        &self,
        state: &mut State,
        page: u64,
        site: &Site,
        flags: PteFlags,
        run: (u64, PhysAddr, usize),
        window: &dyn Window,
    ) {
        if site.flags.contains(MapFlags::RANDOM) {
            return;
        }
        let (run_offset, run_pa, run_pages) = run;
        let Some(before) = site.offset.checked_sub(run_offset) else { return };
        let want = window_size(&site.ahead, page, WINDOW_FIRST, WINDOW_MOST);
        // A quarter of the pages lies before the fault, as a rule of thumb; programs run forwards.
        let back = before.min(page - site.start).min(want / 4 * PAGE_SIZE);
        let run_end = page.saturating_sub(before).saturating_add(run_pages as u64 * PAGE_SIZE);
        let first = page - back;
        let end = run_end.min(site.end).min(first + want * PAGE_SIZE);
        let at = |va: u64| PhysAddr(run_pa.0 + before + va - page);
        window.expect(at(first), usize::try_from(end.saturating_sub(first) / PAGE_SIZE).unwrap_or(0));
        let mut va = first;
        while va < end {
            let pa = at(va);
            let left = usize::try_from((end - va) / PAGE_SIZE).unwrap_or(0);
            let stored = self.pages.map_run(va, pa, left, flags);
            state.count_in(flags, stored as u64);
            va += stored as u64 * PAGE_SIZE;
            if stored < left {
                if self.pages.lookup(va).is_none() {
                    break;
                }
                va += PAGE_SIZE;
            }
        }
        state.remember(page, end.max(page + PAGE_SIZE), want);
    }

    /// A page of a shared mapping, absent or present without the right to write.
    fn fault_shared(
        &self,
        state: &mut State,
        page: u64,
        access: Access,
        site: &Site,
        object: &Arc<dyn Mappable>,
        present: Option<Pte>,
    ) -> Result<()> {
        let writable = access.write || (site.writable && !object.write_notify());
        let Some(old) = present else {
            return self.fault_object(state, page, object.page(site.offset, writable), writable, site, object);
        };
        let mut flags = site.entry;
        flags.set(PteFlags::WRITE, writable);
        let (pa, flags) = match object.page(site.offset, writable)? {
            MappedPage::Frame(pa) => (pa, flags | PteFlags::OWNED | PteFlags::OBJECT),
            MappedPage::Window { pa, run, keep } => {
                state.keep_window(page, run, keep);
                (pa, flags)
            }
        };
        if pa == old.pa && old.flags.contains(PteFlags::OWNED) == flags.contains(PteFlags::OWNED) {
            if flags.contains(PteFlags::OWNED) {
                // The entry has its reference already.
                self.memory().release(&[pa]);
            }
            return self.set_entry(page, Pte { pa, flags });
        }
        self.replace_entry(state, page, Pte { pa, flags });
        Ok(())
    }

    /// Fills the first pages of a new mapping (or the top of a thread's stack that has just become writable).
    pub(super) fn prefill(&self, state: &mut State, start: u64, end: u64, flags: MapFlags) {
        let fixed = flags.contains(MapFlags::FIXED);
        let memory = self.memory();
        if state.vmas.len() > PREFILL_VMAS || memory.used() > memory.limit() / 2 {
            return;
        }
        let Some(vma) = state.vmas.find(start) else { return };
        if !vma.accessible() || (vma.shared() && vma.writable()) || vma.flags.contains(MapFlags::GROWSDOWN) {
            return;
        }
        let pages = (end - start) / PAGE_SIZE;
        let (at, access, ahead) = match &vma.backing {
            Backing::Special { .. } => (start, Access::READ, WINDOW_MOST),
            Backing::Anonymous if !vma.writable() || vma.flags.contains(MapFlags::NORESERVE) => return,
            Backing::Anonymous if vma.flags.contains(MapFlags::THREAD_STACK) => {
                for i in 1..=PREFILL_STACK_TOP.min(pages) {
                    let _ = self.fault_locked(state, end - i * PAGE_SIZE, Access::WRITE);
                }
                return;
            }
            // Zeroed data of a program or library is small and used all over.
            Backing::Anonymous if fixed && pages <= PREFILL_SMALL => (start, Access::WRITE, pages),
            Backing::Anonymous => (start, Access::WRITE, PREFILL_ANONYMOUS.min(pages)),
            // The dynamic linker first maps a library as a whole, then its parts over that: the parts stay.
            Backing::Object { .. } if flags.contains(MapFlags::LIBRARY) && !fixed => return,
            Backing::Object { .. } if vma.writable() => {
                if !flags.contains(MapFlags::LIBRARY) {
                    return;
                }
                (start, Access::WRITE, PREFILL_COPY.min(pages))
            }
            Backing::Object { .. } => (start, Access::READ, WINDOW_MOST),
        };
        state.remember(at, at, ahead.div_ceil(4));
        let _ = self.fault_locked(state, at, access);
        if fixed && let Some(head) = self.head_of_library(state, start) {
            state.remember(head, head, WINDOW_MOST / 4);
            let _ = self.fault_locked(state, head, Access::READ);
        }
    }

    /// Fills the first pages of a heap that has grown.
    pub(super) fn prefill_heap(&self, state: &mut State, start: u64, end: u64) {
        state.remember(start, start, PREFILL_HEAP.min((end - start) / PAGE_SIZE).div_ceil(4));
        let _ = self.fault_locked(state, start, Access::WRITE);
    }

    /// The first part of a library whose second part has just been mapped at `at`: now it is known how far it goes.
    fn head_of_library(&self, state: &State, at: u64) -> Option<u64> {
        let head = state.vmas.find(at.checked_sub(1)?)?;
        let part = state.vmas.find(at)?;
        let (Backing::Object { object: a, .. }, Backing::Object { object: b, .. }) = (&head.backing, &part.backing)
        else {
            return None;
        };
        let fits = head.offset == 0 && !head.shared() && head.prot == Prot::READ && Arc::ptr_eq(a, b);
        (fits && self.pages.lookup(head.start).is_none()).then_some(head.start)
    }

    /// Makes `start..end` present (MAP_POPULATE, mlock, MADV_POPULATE_*): for writing where `write` says so, or where it is
    /// None and the mapping is private and writable. Stops at the first page that cannot be had.
    pub fn populate(&self, start: u64, end: u64, write: Option<bool>) -> Result<(), FaultSignal> {
        let mut va = start;
        while va < end {
            // The lock is let go now and then: faults of other threads wait for it.
            let mut state = self.state.write();
            let slice_end = end.min(va.saturating_add(2 << 20));
            while va < slice_end {
                let vma = state.vmas.find(va).ok_or(FaultSignal::NotMapped)?;
                let write = write.unwrap_or(vma.writable() && !vma.shared());
                if write == vma.writable() && matches!(vma.backing, Backing::Anonymous) && vma.ahead.next != va {
                    // Known to be used as a whole: fill in the largest steps.
                    let full = (vma.end.min(end) - va) / PAGE_SIZE;
                    state.remember(va, va, full.div_ceil(4).min(ANONYMOUS_MOST));
                }
                let access = if write { Access::WRITE } else { Access::READ };
                self.fault_locked(&mut state, va, access)?;
                va += PAGE_SIZE;
            }
        }
        Ok(())
    }
}
