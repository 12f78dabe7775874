//! VMAs and their tree: split, merge, find. Owns which range has which rights and backing; never pages (the page tables do).
use std::collections::BTreeMap;
use std::sync::Arc;

use guest_abi::layout::{PAGE_SIZE, TASK_SIZE};

use super::Mappable;
use super::gaps::Gaps;
use super::space::{MapFlags, MappedFile, Prot};
use crate::platform::host::{WINDOW_LEN, Window};
use crate::platform::{PhysAddr, PteFlags};

/// Pages kept free below a stack that may grow (Linux's stack_guard_gap).
pub(super) const STACK_GUARD: u64 = 256 * PAGE_SIZE;

/// What a VMA shows.
#[derive(Clone)]
pub(super) enum Backing {
    /// Private zeroes; pages live in the page tables alone.
    Anonymous,
    /// An object, shared or private.
    Object { object: Arc<dyn Mappable>, file: Option<Arc<dyn MappedFile>>, may_write: bool },
    /// The kernel's own frames.
    Special { name: &'static str, frames: Arc<[PhysAddr]> },
}

impl Backing {
    fn same(&self, other: &Backing) -> bool {
        match (self, other) {
            (Backing::Anonymous, Backing::Anonymous) => true,
            (
                Backing::Object { object: a, file: fa, may_write: wa },
                Backing::Object { object: b, file: fb, may_write: wb },
            ) => {
                let same_file = match (fa, fb) {
                    (Some(x), Some(y)) => Arc::ptr_eq(x, y),
                    (None, None) => true,
                    _ => false,
                };
                same_file && wa == wb && Arc::ptr_eq(a, b)
            }
            _ => false,
        }
    }
}

/// Where the next fault of a sequential use is expected, and how many pages the last one filled.
#[derive(Clone, Copy, Default)]
pub(super) struct Ahead {
    pub next: u64,
    pub pages: u64,
}

/// A range of addresses with one set of rights and one backing.
#[derive(Clone)]
pub(super) struct Vma {
    pub start: u64,
    pub end: u64,
    pub prot: Prot,
    pub flags: MapFlags,
    pub backing: Backing,
    /// Byte offset of `start` in the object; 0 for anonymous memory.
    pub offset: u64,
    /// Windows that entries in this range may name, by base address, each with the file offset of its base.
    pub windows: BTreeMap<PhysAddr, (u64, Arc<dyn Window>)>,
    pub ahead: Ahead,
    /// PR_SET_VMA_ANON_NAME.
    pub name: Option<Arc<[u8]>>,
}

impl Vma {
    pub(super) fn pages(&self) -> u64 {
        (self.end - self.start) / PAGE_SIZE
    }

    pub(super) fn shared(&self) -> bool {
        self.flags.contains(MapFlags::SHARED)
    }

    /// Offset in the object of the page at `va`.
    pub(super) fn offset_of(&self, va: u64) -> u64 {
        self.offset + (va - self.start)
    }

    /// Whether any access is allowed (x86: each right implies reading).
    pub(super) fn accessible(&self) -> bool {
        !self.prot.is_empty()
    }

    /// The rights an entry here may have at most, WRITE left out.
    pub(super) fn entry_flags(&self) -> PteFlags {
        let mut flags = PteFlags::empty();
        flags.set(PteFlags::EXEC, self.prot.contains(Prot::EXEC));
        flags.set(PteFlags::NONE, self.prot.is_empty());
        flags
    }

    pub(super) fn writable(&self) -> bool {
        self.prot.contains(Prot::WRITE)
    }

    /// Whether PROT_WRITE may ever be given.
    pub(super) fn may_write(&self) -> bool {
        match &self.backing {
            Backing::Anonymous => true,
            Backing::Object { may_write, .. } => !self.shared() || *may_write,
            Backing::Special { .. } => false,
        }
    }

    /// Counts towards the commit limit: private and writable, reserve not waived.
    pub(super) fn accountable(prot: Prot, flags: MapFlags) -> bool {
        prot.contains(Prot::WRITE) && !flags.intersects(MapFlags::SHARED | MapFlags::NORESERVE)
    }

    /// Counts towards RLIMIT_DATA (Linux's is_data_mapping).
    pub(super) fn is_data(prot: Prot, flags: MapFlags) -> bool {
        prot.contains(Prot::WRITE) && !flags.intersects(MapFlags::SHARED | MapFlags::GROWSDOWN)
    }

    fn prune_windows(&mut self) {
        let (low, high) = (self.offset, self.offset + (self.end - self.start));
        self.windows.retain(|_, (at, _)| *at < high && at.saturating_add(WINDOW_LEN) > low);
    }

    /// Cuts the part from `at` on off.
    pub(super) fn split_off(&mut self, at: u64) -> Vma {
        let mut upper = self.clone();
        upper.start = at;
        if matches!(upper.backing, Backing::Object { .. } | Backing::Special { .. }) {
            upper.offset += at - self.start;
        }
        self.end = at;
        self.prune_windows();
        upper.prune_windows();
        upper
    }

    /// The window that holds a borrowed page.
    pub(super) fn window_of(&self, pa: PhysAddr) -> Option<&Arc<dyn Window>> {
        let (base, (_, window)) = self.windows.range(..=pa).next_back()?;
        (pa.0 - base.0 < WINDOW_LEN).then_some(window)
    }

    fn continues(&self, next: &Vma) -> bool {
        self.end == next.start
            && self.prot == next.prot
            && self.flags == next.flags
            && !self.flags.contains(MapFlags::GROWSDOWN)
            && self.name == next.name
            && self.backing.same(&next.backing)
            && match self.backing {
                Backing::Object { .. } => self.offset + (self.end - self.start) == next.offset,
                _ => true,
            }
    }
}

/// All VMAs of a space, with what they add up to.
pub(super) struct VmaTree {
    by_start: BTreeMap<u64, Vma>,
    gaps: Gaps,
    /// All mapped pages.
    pub total: u64,
    /// Pages that count towards RLIMIT_DATA.
    pub data: u64,
    /// Pages in locked VMAs.
    pub locked: u64,
}

impl Default for VmaTree {
    fn default() -> Self {
        VmaTree { by_start: BTreeMap::new(), gaps: Gaps::new(0, TASK_SIZE), total: 0, data: 0, locked: 0 }
    }
}

impl VmaTree {
    pub(super) fn len(&self) -> usize {
        self.by_start.len()
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &Vma> {
        self.by_start.values()
    }

    fn count(&mut self, vma: &Vma, sign: i64) {
        let pages = vma.pages() as i64 * sign;
        let add = |total: &mut u64| *total = total.saturating_add_signed(pages);
        add(&mut self.total);
        if Vma::is_data(vma.prot, vma.flags) {
            add(&mut self.data);
        }
        if vma.flags.contains(MapFlags::LOCKED) {
            add(&mut self.locked);
        }
    }

    /// The VMA that holds `addr`.
    pub(super) fn find(&self, addr: u64) -> Option<&Vma> {
        self.by_start.range(..=addr).next_back().map(|(_, v)| v).filter(|v| addr < v.end)
    }

    pub(super) fn find_mut(&mut self, addr: u64) -> Option<&mut Vma> {
        self.by_start.range_mut(..=addr).next_back().map(|(_, v)| v).filter(|v| addr < v.end)
    }

    /// The first VMA that starts at `addr` or above.
    pub(super) fn next_from(&self, addr: u64) -> Option<&Vma> {
        self.by_start.range(addr..).next().map(|(_, v)| v)
    }

    /// The last VMA that starts below `addr`.
    pub(super) fn before(&self, addr: u64) -> Option<&Vma> {
        self.by_start.range(..addr).next_back().map(|(_, v)| v)
    }

    /// VMAs that overlap `start..end`, in order.
    pub(super) fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = &Vma> {
        let first = self.find(start).map_or(start, |v| v.start);
        self.by_start.range(first..end.max(first)).map(|(_, v)| v)
    }

    /// Bytes of `start..end` that are mapped, in pages.
    pub(super) fn mapped_pages(&self, start: u64, end: u64) -> u64 {
        self.overlapping(start, end).map(|v| (v.end.min(end) - v.start.max(start)) / PAGE_SIZE).sum()
    }

    pub(super) fn is_free(&self, start: u64, end: u64) -> bool {
        self.gaps.is_free(start, end)
    }

    /// The highest place for `len` bytes in `low..high`, clear of the guard gap of stacks.
    pub(super) fn place(&self, len: u64, low: u64, high: u64) -> Option<u64> {
        self.gaps.highest(len, low, high, |end| match self.by_start.get(&end) {
            Some(v) if v.flags.contains(MapFlags::GROWSDOWN) => end.saturating_sub(STACK_GUARD),
            _ => end,
        })
    }

    /// Adds a VMA in free room, joined with its neighbours where they are alike. Gives the start of what it became.
    pub(super) fn insert(&mut self, vma: Vma) -> u64 {
        self.gaps.occupy(vma.start, vma.end);
        self.count(&vma, 1);
        let (start, end) = (vma.start, vma.end);
        self.by_start.insert(start, vma);
        self.join_at(end);
        self.join_at(start);
        self.find(start).map_or(start, |v| v.start)
    }

    /// Joins the VMAs on both sides of `at` if they are alike.
    fn join_at(&mut self, at: u64) {
        let alike = match (self.by_start.range(..at).next_back(), self.by_start.get(&at)) {
            (Some((_, a)), Some(b)) => a.continues(b),
            _ => false,
        };
        if !alike {
            return;
        }
        let Some(mut upper) = self.by_start.remove(&at) else { return };
        if let Some((_, lower)) = self.by_start.range_mut(..at).next_back() {
            lower.end = upper.end;
            lower.windows.append(&mut upper.windows);
            if upper.ahead.next > lower.ahead.next {
                lower.ahead = upper.ahead;
            }
        }
    }

    /// Joins whatever is alike in and around `start..end`.
    pub(super) fn join_range(&mut self, start: u64, end: u64) {
        let edges: Vec<u64> = self.by_start.range(start..=end).map(|(s, _)| *s).collect();
        for at in edges.into_iter().rev() {
            self.join_at(at);
        }
    }

    /// Makes `at` an edge of VMAs.
    pub(super) fn split_at(&mut self, at: u64) {
        let upper = match self.find_mut(at) {
            Some(v) if v.start < at => v.split_off(at),
            _ => return,
        };
        self.by_start.insert(at, upper);
    }

    /// How many VMAs more there would be after edges were made at both ends.
    pub(super) fn splits(&self, start: u64, end: u64) -> usize {
        let inner = |at: u64| self.find(at).is_some_and(|v| v.start < at);
        usize::from(inner(start)) + usize::from(inner(end))
    }

    /// Takes everything in `start..end` out.
    pub(super) fn remove_range(&mut self, start: u64, end: u64) -> Vec<Vma> {
        self.split_at(start);
        self.split_at(end);
        let mut removed = Vec::new();
        while let Some((&at, _)) = self.by_start.range(start..end).next() {
            if let Some(vma) = self.by_start.remove(&at) {
                self.count(&vma, -1);
                self.gaps.vacate(vma.start, vma.end);
                removed.push(vma);
            }
        }
        removed
    }

    /// Changes the VMAs in `start..end`, which are cut at its edges and joined again afterwards. Start and end must stay.
    pub(super) fn change_range(&mut self, start: u64, end: u64, mut change: impl FnMut(&mut Vma)) {
        self.split_at(start);
        self.split_at(end);
        let keys: Vec<u64> = self.by_start.range(start..end).map(|(s, _)| *s).collect();
        for key in keys {
            let Some(mut vma) = self.by_start.remove(&key) else { continue };
            self.count(&vma, -1);
            change(&mut vma);
            self.count(&vma, 1);
            self.by_start.insert(key, vma);
        }
        self.join_range(start, end);
    }

    /// Moves the start of the VMA at `start` down to `new_start`, over free room.
    pub(super) fn grow_down(&mut self, start: u64, new_start: u64) {
        if let Some(mut vma) = self.by_start.remove(&start) {
            self.gaps.occupy(new_start, start);
            self.count(&vma, -1);
            vma.start = new_start;
            self.count(&vma, 1);
            self.by_start.insert(new_start, vma);
        }
    }

    /// Moves the end of the VMA at `start` up to `new_end`, over free room.
    pub(super) fn grow_up(&mut self, start: u64, new_end: u64) {
        if let Some(mut vma) = self.by_start.remove(&start) {
            self.gaps.occupy(vma.end, new_end);
            self.count(&vma, -1);
            vma.end = new_end;
            self.count(&vma, 1);
            self.by_start.insert(start, vma);
            self.join_at(new_end);
        }
    }

    /// Takes all out.
    pub(super) fn take_all(&mut self) -> Vec<Vma> {
        let old = std::mem::take(self);
        old.by_start.into_values().collect()
    }

    /// A copy of the tree with the VMAs that `keep` changes and admits.
    pub(super) fn filtered(&self, mut keep: impl FnMut(&mut Vma) -> bool) -> VmaTree {
        let mut tree = VmaTree { gaps: self.gaps.clone(), ..VmaTree::default() };
        for vma in self.by_start.values() {
            let mut copy = vma.clone();
            if keep(&mut copy) {
                tree.count(&copy, 1);
                tree.by_start.insert(copy.start, copy);
            } else {
                tree.gaps.vacate(vma.start, vma.end);
            }
        }
        tree
    }

    #[cfg(test)]
    pub(super) fn check(&self) {
        let (mut at, mut total) = (0, 0);
        let mut gaps = Vec::new();
        for (s, v) in &self.by_start {
            assert_eq!(*s, v.start);
            assert!(
                v.start >= at
                    && v.start < v.end
                    && v.start.is_multiple_of(PAGE_SIZE)
                    && v.end.is_multiple_of(PAGE_SIZE)
            );
            if v.start > at {
                gaps.push((at, v.start));
            }
            at = v.end;
            total += v.pages();
        }
        if at < TASK_SIZE {
            gaps.push((at, TASK_SIZE));
        }
        assert_eq!(total, self.total);
        assert_eq!(gaps, self.gaps.all());
    }
}
