//! Direct calls in program text: which call sites are hot, and private copies of the pages in which the platform's jumps replace them.
//! Owns the copies, the pages of trampolines near them, and how both go away again; never what they hold (see
//! [`crate::platform::DirectCalls`]).
//!
//! A copy is an ordinary private page of a private mapping, as if a debugger had written there, with a mark: fork shares it, unmapping
//! drops it. A page is always replaced as a whole, by a shootdown, so that no CPU sees half of a change. Trampolines are in no VMA, at
//! addresses where nothing was mapped; when the program wants to have those, all sites are undone.
use std::collections::BTreeSet;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use guest_abi::UserAddr;
use guest_abi::layout::{MMAP_MIN_ADDR, PAGE_SIZE};

use super::space::{Prot, State, is_private_page};
use super::vma::Backing;
use super::{AddressSpace, PAGE_MASK};
use crate::platform::{DirectCalls, PhysAddr, Pte, PteFlags};

/// Places of the table of hot sites.
const PLACES: usize = 64;
/// Calls that make a site hot.
const HOT: u64 = 64;
/// The count of a site that has been looked at.
const SETTLED: u64 = 0xffff;
/// Bits of a place that count.
const COUNT: u64 = 0xffff;
/// Most direct sites of a space in its life.
const SITES: usize = 240;
/// Most pages of trampolines.
const PAGES: usize = 4;
/// How far a trampoline may be from its site: jumps reach 2 GiB.
const REACH: u64 = 1 << 30;
/// Pages left free on both sides of trampolines that are placed below a program.
const AROUND: u64 = 16;

/// How often calls came from where: a place for each of a few sites at a time.
#[derive(Default)]
pub(super) struct HotCalls(OnceLock<Box<[AtomicU64; PLACES]>>);

impl HotCalls {
    /// Counts a call that returns to `after`; true once for a site that has become hot.
    fn note(&self, after: u64, weight: u64) -> bool {
        let places = self.0.get_or_init(|| Box::new([const { AtomicU64::new(0) }; PLACES]));
        let index = (after ^ after >> 7) as usize % PLACES;
        let Some(place) = places.get(index) else { return false };
        let old = place.load(Ordering::Relaxed);
        let count = old & COUNT;
        if old >> 16 != after & (u64::MAX >> 16) {
            // Two sites of one place wear each other down.
            let new = if count <= weight { after << 16 | weight } else { old - weight };
            place.store(new, Ordering::Relaxed);
            return false;
        }
        if count >= HOT {
            return false;
        }
        let hot = count + weight >= HOT;
        place.store(after << 16 | if hot { SETTLED } else { count + weight }, Ordering::Relaxed);
        hot
    }
}

/// Bytes of the program that were replaced.
#[derive(Clone)]
struct Patch {
    at: u64,
    /// What the program has there.
    original: Vec<u8>,
    /// Where a call is made; otherwise padding, of which a CPU may be about to execute the replacement.
    is_site: bool,
}

/// The direct sites of a space.
#[derive(Clone, Default)]
pub(super) struct DirectSites {
    patches: Vec<Patch>,
    /// Pages with patches, whether they are still there or not.
    texts: BTreeSet<u64>,
    /// Pages of trampolines.
    pages: Vec<u64>,
    /// Sites made, which are as many trampolines.
    made: usize,
    /// No more of them.
    forbidden: bool,
}

impl DirectSites {
    /// The program's own bytes are put into what was read at `at`.
    fn show_original(&self, at: u64, buf: &mut [u8], patched: impl Fn(u64) -> bool) {
        let end = at.saturating_add(buf.len() as u64);
        for p in self.patches.iter().filter(|p| p.at < end && at < p.at + p.original.len() as u64) {
            if !patched(p.at & PAGE_MASK) {
                continue;
            }
            for (va, &byte) in (p.at..).zip(&p.original) {
                let slot = va.checked_sub(at).and_then(|i| buf.get_mut(usize::try_from(i).ok()?));
                if let Some(slot) = slot {
                    *slot = byte;
                }
            }
        }
    }

    /// What is in `start..end` is gone.
    pub(super) fn forget(&mut self, start: u64, end: u64) {
        if !self.patches.is_empty() {
            self.patches.retain(|p| p.at < start || p.at >= end);
            self.texts.retain(|&p| p < start || p >= end);
        }
    }

    /// Whether something mapped at `start..end` would lie over trampolines.
    fn in_the_way(&self, start: u64, end: u64) -> bool {
        self.pages.iter().any(|&p| p < end && start < p + PAGE_SIZE)
    }
}

impl AddressSpace {
    /// Notes a system call that returns to `after`; `weight` is how many calls it stands for. Where its site has become hot, the site is made
    /// direct if it can be: true then.
    pub fn note_call(&self, after: u64, number: u64, weight: u64) -> bool {
        let Some(direct) = self.platform.direct_calls() else { return false };
        if !self.hot_calls.note(after, weight) {
            return false;
        }
        let mut state = self.state.write();
        self.make_direct(&mut state, direct, after, number).is_some()
    }

    fn make_direct(&self, state: &mut State, direct: &dyn DirectCalls, after: u64, number: u64) -> Option<()> {
        if state.direct.forbidden || state.direct.made >= SITES {
            return None;
        }
        let memory = self.memory();
        let text = after.checked_sub(2)? & PAGE_MASK;
        let vma = state.vmas.find(text)?;
        let is_file = matches!(&vma.backing, Backing::Object { file: Some(_), .. });
        if !is_file || vma.shared() || vma.prot != Prot::READ | Prot::EXEC {
            return None;
        }
        let start = vma.start;
        let old = self.pages.lookup(text)?;
        // A private page that is no copy of ours was written by somebody: a debugger, or the program before it took its right away.
        if !old.flags.contains(PteFlags::EXEC) || (is_private_page(old.flags) && !old.flags.contains(PteFlags::PATCHED))
        {
            return None;
        }
        let mut page = vec![0; PAGE_SIZE as usize];
        memory.read(old.pa, &mut page).ok()?;
        let at = self.trampoline_place(state, direct, text, start)?;
        let plan = direct.plan(&page, text, after, number, at)?;
        let mut patches = Vec::new();
        for (i, (va, bytes)) in plan.patches.iter().enumerate() {
            let from = usize::try_from(va.checked_sub(text)?).ok()?;
            let place = page.get_mut(from..from.checked_add(bytes.len())?)?;
            patches.push(Patch { at: *va, original: place.to_vec(), is_site: i == 0 });
            place.copy_from_slice(bytes);
        }
        // What has been replaced already is not replaced again.
        let taken = |p: &Patch| state.direct.patches.iter().any(|q| q.at < p.at + 8 && p.at < q.at + 8);
        if patches.iter().any(taken) {
            return None;
        }
        self.write_trampoline(at, &plan.trampoline)?;
        self.replace_text(state, text, &page)?;
        state.direct.patches.extend(patches);
        state.direct.texts.insert(text);
        state.direct.made += 1;
        Some(())
    }

    /// Puts a private copy with these contents in the place of a page of text.
    fn replace_text(&self, state: &mut State, text: u64, contents: &[u8]) -> Option<()> {
        let memory = self.memory();
        let pa = memory.alloc().ok()?;
        if memory.write(pa, contents).is_err() {
            memory.release(&[pa]);
            return None;
        }
        let flags = PteFlags::EXEC | PteFlags::OWNED | PteFlags::PATCHED;
        self.replace_entry(state, text, Pte { pa, flags });
        Some(())
    }

    /// The address of the next trampoline, in reach of the page `text` of a VMA that begins at `start`; makes a page for it if need be.
    fn trampoline_place(&self, state: &mut State, direct: &dyn DirectCalls, text: u64, start: u64) -> Option<u64> {
        let len = direct.trampoline_len().max(1);
        let places = PAGE_SIZE / len - 1;
        let n = state.direct.made as u64;
        let (page, place) = (usize::try_from(n / places).ok()?, n % places + 1);
        if let Some(&last) = state.direct.pages.get(page) {
            if last.abs_diff(text) < REACH {
                return Some(last + place * len);
            }
            // The rest of a page that is out of reach is left.
            state.direct.made = state.direct.pages.len().checked_mul(usize::try_from(places).ok()?)?;
            return self.trampoline_place(state, direct, text, start);
        }
        if state.direct.pages.len() >= PAGES {
            return None;
        }
        // Above the base of mappings nothing is placed unasked; below a program neither.
        let above = state.mmap_base + n / places * PAGE_SIZE;
        let fits = above.abs_diff(text) < REACH && state.vmas.is_free(above, above + PAGE_SIZE);
        let at = if fits {
            above
        } else {
            let low = start.saturating_sub(REACH / 2).max(MMAP_MIN_ADDR);
            let room = (2 * AROUND + 1) * PAGE_SIZE;
            state.vmas.place(room, low, start)? + AROUND * PAGE_SIZE
        };
        if state.direct.in_the_way(at, at + PAGE_SIZE) {
            return None;
        }
        let memory = self.memory();
        let pa = memory.alloc().ok()?;
        let flags = PteFlags::EXEC | PteFlags::OWNED | PteFlags::TRAMPOLINES;
        if memory.write(pa, &direct.page_head()).is_err() || self.pages.map(at, Pte { pa, flags }).is_err() {
            memory.release(&[pa]);
            return None;
        }
        state.count_in(flags, 1);
        state.direct.pages.push(at);
        Some(at + len)
    }

    /// Writes a trampoline that nothing leads to yet; into a frame of this space alone, since a fork has others there.
    fn write_trampoline(&self, at: u64, code: &[u8]) -> Option<()> {
        let memory = self.memory();
        let page = at & PAGE_MASK;
        let mut pte = self.pages.lookup(page)?;
        if memory.references(pte.pa) > 1 {
            let pa = memory.alloc().ok()?;
            if memory.copy_page(pte.pa, pa).is_err() {
                memory.release(&[pa]);
                return None;
            }
            let old = pte.pa;
            pte.pa = pa;
            self.pages.update(page, page + PAGE_SIZE, &mut |_, _| Some(pte));
            memory.release(&[old]);
        }
        memory.write(PhysAddr(pte.pa.0 + at % PAGE_SIZE), code).ok()
    }

    /// Undoes all direct sites, and makes no more: somebody looks at the program closely. Padding stays as it is: a CPU may be about to
    /// execute it.
    pub fn forbid_direct(&self) {
        if self.platform.direct_calls().is_some() {
            let mut state = self.state.write();
            state.direct.forbidden = true;
            let texts: Vec<u64> = state.direct.texts.iter().copied().collect();
            texts.into_iter().for_each(|text| self.undo_text(&mut state, text));
        }
    }

    /// Undoes the direct sites in `start..end`, whose rights are about to change.
    pub(super) fn undo_direct(&self, state: &mut State, start: u64, end: u64) {
        let texts: Vec<u64> = state.direct.texts.range(start..end.max(start)).copied().collect();
        texts.into_iter().for_each(|text| self.undo_text(state, text));
    }

    fn undo_text(&self, state: &mut State, text: u64) {
        let memory = self.memory();
        let Some(old) = self.pages.lookup(text).filter(|pte| pte.flags.contains(PteFlags::PATCHED)) else { return };
        let mut page = vec![0; PAGE_SIZE as usize];
        if memory.read(old.pa, &mut page).is_err() {
            return;
        }
        let sites: Vec<Patch> =
            state.direct.patches.iter().filter(|p| p.is_site && p.at & PAGE_MASK == text).cloned().collect();
        for p in &sites {
            let from = (p.at - text) as usize;
            if let Some(place) = page.get_mut(from..from + p.original.len()) {
                place.copy_from_slice(&p.original);
            }
        }
        if self.replace_text(state, text, &page).is_none() {
            // No memory for another copy: the few bytes of a site are stored at once.
            for p in &sites {
                let _ = memory.write(PhysAddr(old.pa.0 + (p.at - text)), &p.original);
            }
        }
        state.direct.patches.retain(|p| !p.is_site || p.at & PAGE_MASK != text);
    }

    /// The program is about to have `start..end` mapped. Where that lies over trampolines, no text leads there any more.
    pub(super) fn make_way(&self, state: &mut State, start: u64, end: u64) {
        if !state.direct.in_the_way(start, end) {
            return;
        }
        state.direct.forbidden = true;
        let texts: Vec<u64> = state.direct.texts.iter().copied().collect();
        texts.into_iter().for_each(|text| self.undo_text(state, text));
        let mut frames = Vec::new();
        for page in core::mem::take(&mut state.direct.pages) {
            self.pages.update(page, page + PAGE_SIZE, &mut |_, pte| {
                state.count_out(pte.flags);
                frames.push(pte.pa);
                None
            });
        }
        self.memory().release(&frames);
    }

    /// Puts the program's own bytes into what was read at `addr`, for whoever looks at it from outside.
    pub fn show_original(&self, addr: UserAddr, buf: &mut [u8]) {
        if self.platform.direct_calls().is_none() {
            return;
        }
        let state = self.state.read();
        let patched = |page| self.pages.lookup(page).is_some_and(|pte| pte.flags.contains(PteFlags::PATCHED));
        state.direct.show_original(addr.0, buf, patched);
    }

    /// Direct sites made so far.
    pub fn direct_sites(&self) -> usize {
        self.state.read().direct.made
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_becomes_hot_once() {
        let hot = HotCalls::default();
        let mut times = 0;
        for _ in 0..1000 {
            times += u32::from(hot.note(0x7f00_1234_5678, 1));
            hot.note(0x7f00_1234_567a, 1);
        }
        assert_eq!(times, 1);
        // Rivals for one place: the more frequent one gets it.
        let hot = HotCalls::default();
        let (a, b) = (0x1000, 0x1000 + (1 << 40));
        let mut found = false;
        for _ in 0..300 {
            found |= hot.note(a, 2);
            assert!(!hot.note(b, 1));
        }
        assert!(found);
    }

    #[test]
    fn originals_are_shown_as_far_as_they_are_read() {
        let patch = |at, original: &[u8]| Patch { at, original: original.to_vec(), is_site: true };
        let sites = DirectSites { patches: vec![patch(0x1004, &[1, 2, 3, 4, 5])], ..DirectSites::default() };
        let mut buf = [0; 4];
        sites.show_original(0x1006, &mut buf, |_| true);
        assert_eq!(buf, [3, 4, 5, 0]);
        sites.show_original(0x1002, &mut buf, |_| true);
        assert_eq!(buf, [3, 4, 1, 2]);
        sites.show_original(0x1009, &mut buf, |_| true);
        sites.show_original(0x1002, &mut [9; 4], |_| false);
        assert_eq!(buf, [3, 4, 1, 2]);
    }
}
