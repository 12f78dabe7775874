//! The free ranges of an address space, indexed by size so that a place for a mapping is found without a walk over VMAs.
//! Owns what is free; never what is mapped (see [`super::vma`]).
use std::collections::{BTreeMap, BTreeSet};

use guest_abi::layout::PAGE_SHIFT;

/// Size classes: class k holds gaps of 2^k..2^(k+1) pages.
const CLASSES: usize = 48;

/// Gaps of the wanted size's own class that a search looks at before it takes a larger one. Bounds the search where many
/// gaps are only just too small.
const OWN_CLASS_TRIES: usize = 64;

/// Gaps of each larger class looked at: those at the edges of the search range may be cut too short.
const LARGER_CLASS_TRIES: usize = 4;

/// The free ranges.
#[derive(Clone)]
pub(super) struct Gaps {
    by_start: BTreeMap<u64, u64>,
    by_size: Vec<BTreeSet<u64>>,
}

fn class(len: u64) -> usize {
    ((len >> PAGE_SHIFT).max(1).ilog2() as usize).min(CLASSES - 1)
}

impl Gaps {
    /// One gap, `start..end`.
    pub(super) fn new(start: u64, end: u64) -> Gaps {
        let mut gaps = Gaps { by_start: BTreeMap::new(), by_size: vec![BTreeSet::new(); CLASSES] };
        gaps.add(start, end);
        gaps
    }

    fn add(&mut self, start: u64, end: u64) {
        if start < end {
            self.by_start.insert(start, end);
            self.by_size[class(end - start)].insert(start);
        }
    }

    fn remove(&mut self, start: u64) -> Option<u64> {
        let end = self.by_start.remove(&start)?;
        self.by_size[class(end - start)].remove(&start);
        Some(end)
    }

    /// Takes `start..end`, which must be free, out.
    pub(super) fn occupy(&mut self, start: u64, end: u64) {
        let Some((&gap_start, _)) = self.by_start.range(..=start).next_back() else { return };
        if let Some(gap_end) = self.remove(gap_start) {
            self.add(gap_start, start.min(gap_end));
            self.add(end, gap_end);
        }
    }

    /// Gives `start..end`, which must be taken, back.
    pub(super) fn vacate(&mut self, start: u64, end: u64) {
        let (mut start, mut end) = (start, end);
        if let Some((&before, &before_end)) = self.by_start.range(..start).next_back()
            && before_end == start
        {
            self.remove(before);
            start = before;
        }
        if let Some(after_end) = self.remove(end) {
            end = after_end;
        }
        self.add(start, end);
    }

    /// Whether `start..end` is wholly free.
    pub(super) fn is_free(&self, start: u64, end: u64) -> bool {
        self.by_start.range(..=start).next_back().is_some_and(|(_, &gap_end)| end <= gap_end)
    }

    /// The start of the highest place for `len` bytes in `low..high`. `usable_end(gap_end)` gives how far up a gap that
    /// ends there may be used (less below a stack).
    pub(super) fn highest(&self, len: u64, low: u64, high: u64, usable_end: impl Fn(u64) -> u64) -> Option<u64> {
        if low >= high {
            return None;
        }
        let mut best = None;
        for k in class(len)..CLASSES {
            let tries = if k == class(len) { OWN_CLASS_TRIES } else { LARGER_CLASS_TRIES };
            for &start in self.by_size[k].range(..high).rev().take(tries) {
                let Some(&gap_end) = self.by_start.get(&start) else { continue };
                if gap_end <= low || best.is_some_and(|b| gap_end <= b) {
                    break;
                }
                let end = usable_end(gap_end).min(high);
                if end.checked_sub(start.max(low)).is_some_and(|room| room >= len) {
                    best = best.max(Some(end - len));
                    break;
                }
            }
        }
        best
    }

    #[cfg(test)]
    pub(super) fn all(&self) -> Vec<(u64, u64)> {
        self.by_start.iter().map(|(s, e)| (*s, *e)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: u64 = 4096;

    #[test]
    fn search_is_top_down_and_exact_gaps_are_found() {
        let mut g = Gaps::new(P, 1000 * P);
        let at = g.highest(10 * P, 0, 900 * P, |e| e);
        assert_eq!(at, Some(890 * P));
        g.occupy(890 * P, 900 * P);
        g.occupy(870 * P, 880 * P);
        assert_eq!(g.highest(10 * P, 0, 900 * P, |e| e), Some(880 * P));
        assert_eq!(g.highest(11 * P, 0, 900 * P, |e| e), Some(859 * P));
        g.vacate(870 * P, 880 * P);
        assert_eq!(g.highest(11 * P, 0, 900 * P, |e| e), Some(879 * P));
        g.vacate(890 * P, 900 * P);
        assert_eq!(g.all(), [(P, 1000 * P)]);
    }

    #[test]
    fn room_below_a_stack_is_kept() {
        let mut g = Gaps::new(P, 1000 * P);
        g.occupy(500 * P, 600 * P);
        let usable = |e| if e == 500 * P { e - 20 * P } else { e };
        assert_eq!(g.highest(P, 0, 550 * P, usable), Some(479 * P));
    }
}
