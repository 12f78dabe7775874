//! One chunk: 512 frames that make up 2 MiB. Owns which of them are free and which hold old bytes; pure bookkeeping.

/// Frames in a chunk.
pub const CHUNK: usize = 512;
const WORDS: usize = CHUNK / 64;

/// A set of a chunk's frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bits([u64; WORDS]);

impl Bits {
    /// No frame.
    pub const NONE: Bits = Bits([0; WORDS]);
    /// Every frame.
    pub const ALL: Bits = Bits([u64::MAX; WORDS]);

    /// Whether frame `i` is in the set.
    pub fn has(&self, i: usize) -> bool {
        self.0[i / 64] >> (i % 64) & 1 == 1
    }

    /// Adds frame `i`.
    pub fn insert(&mut self, i: usize) {
        self.0[i / 64] |= 1 << (i % 64);
    }

    /// Adds or takes out `len` frames from `start` on.
    pub fn set_run(&mut self, start: usize, len: usize, value: bool) {
        let mut i = start;
        let end = (start + len).min(CHUNK);
        while i < end {
            let word = i / 64;
            let upto = ((word + 1) * 64).min(end);
            let n = upto - i;
            let mask = if n == 64 { u64::MAX } else { ((1 << n) - 1) << (i % 64) };
            if value {
                self.0[word] |= mask;
            } else {
                self.0[word] &= !mask;
            }
            i = upto;
        }
    }

    /// The lowest frame in both sets, else the lowest of this one.
    pub fn first_preferring(&self, other: &Bits) -> Option<usize> {
        let first = |words: &dyn Fn(usize) -> u64| {
            (0..WORDS).find(|&w| words(w) != 0).map(|w| w * 64 + words(w).trailing_zeros() as usize)
        };
        first(&|w| self.0[w] & other.0[w]).or_else(|| first(&|w| self.0[w]))
    }

    /// The lowest frame at or above `from` that is in the set (`value`) or outside of it.
    fn next(&self, from: usize, value: bool) -> usize {
        let mut i = from;
        while i < CHUNK {
            let word = if value { self.0[i / 64] } else { !self.0[i / 64] } >> (i % 64);
            if word != 0 {
                return i + word.trailing_zeros() as usize;
            }
            i = (i / 64 + 1) * 64;
        }
        CHUNK
    }

    /// The maximal runs `(start, length)` in ascending order.
    pub fn runs(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let mut at = 0;
        core::iter::from_fn(move || {
            let start = self.next(at, true);
            if start >= CHUNK {
                return None;
            }
            at = self.next(start, false);
            Some((start, at - start))
        })
    }

    /// The first run of at least `want` frames cut to `want`, else the longest.
    pub fn find_run(&self, want: usize) -> (usize, usize) {
        let mut best = (0, 0);
        for (start, len) in self.runs() {
            if len >= want {
                return (start, want);
            }
            if len > best.1 {
                best = (start, len);
            }
        }
        best
    }

    /// Number of frames in the set.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.0.iter().map(|w| w.count_ones() as usize).sum()
    }
}

/// Which list of the allocator a chunk is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    /// In none: no frame is free, or the chunk is being given back.
    None,
    /// Some frames are free.
    Partial,
    /// All are free, some may be resident.
    Warm,
    /// All are free and none is resident.
    Cold,
}

/// A chunk.
pub struct Chunk {
    /// Free frames.
    pub free: Bits,
    /// Free frames that hold old bytes and must be zeroed.
    pub dirty: Bits,
    /// Number of free frames.
    pub free_count: u16,
    /// Free frames that the host keeps in memory, as an upper estimate (a host huge page makes all resident).
    pub resident: u16,
    /// The list it is in, and where.
    pub list: List,
    /// Index in the list.
    pub position: u32,
}

impl Chunk {
    /// A chunk nobody has used.
    pub fn cold() -> Chunk {
        Chunk {
            free: Bits::ALL,
            dirty: Bits::NONE,
            free_count: CHUNK as u16,
            resident: 0,
            list: List::None,
            position: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_searches() {
        let mut b = Bits::NONE;
        b.set_run(3, 2, true);
        b.set_run(60, 100, true);
        b.set_run(511, 1, true);
        assert_eq!(b.runs().collect::<Vec<_>>(), [(3, 2), (60, 100), (511, 1)]);
        assert_eq!(b.count(), 103);
        assert_eq!(b.find_run(1), (3, 1));
        assert_eq!(b.find_run(50), (60, 50));
        assert_eq!(b.find_run(500), (60, 100));
        b.set_run(61, 98, false);
        assert_eq!(b.runs().collect::<Vec<_>>(), [(3, 2), (60, 1), (159, 1), (511, 1)]);
        let mut d = Bits::NONE;
        assert_eq!(b.first_preferring(&d), Some(3));
        d.insert(159);
        assert_eq!(b.first_preferring(&d), Some(159));
        assert_eq!(Bits::ALL.find_run(512), (0, 512));
        assert_eq!(Bits::NONE.find_run(1), (0, 0));
    }
}
