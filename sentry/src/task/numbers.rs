//! The allocator of task numbers: a bitmap with two summary levels, cyclic as Linux's. Owns which numbers are taken; never
//! what they stand for.
use crate::{Errno, Result};

/// Hard bound of `kernel.pid_max`: numbers are below it.
pub const PID_MAX_LIMIT: i32 = 4_194_304;
/// After the first wrap-around numbers below this are not given out again.
pub const RESERVED: i32 = 300;

const WORDS: usize = PID_MAX_LIMIT as usize / 64;

/// Which numbers of one namespace are taken.
pub struct Numbers {
    /// Bit n: number n is taken. As long as the largest number ever taken needs; what lies beyond is free.
    bits: Vec<u64>,
    /// Bit w: word w of `bits` is full.
    full: Vec<u64>,
    /// Bit s: word s of `full` is full.
    top: Vec<u64>,
    last: i32,
    max: i32,
    used: usize,
}

fn zero_at_or_above(word: u64, bit: u32) -> Option<u32> {
    let candidates = !word & (u64::MAX << bit);
    (candidates != 0).then(|| candidates.trailing_zeros())
}

impl Default for Numbers {
    fn default() -> Self {
        Self::new()
    }
}

impl Numbers {
    /// Nothing taken; 1 comes first.
    pub fn new() -> Numbers {
        Numbers {
            bits: Vec::new(),
            full: vec![0; WORDS / 64],
            top: vec![0; WORDS / 64 / 64],
            last: 0,
            max: PID_MAX_LIMIT,
            used: 0,
        }
    }

    /// The number given out last (`ns_last_pid`).
    pub fn last(&self) -> i32 {
        self.last
    }

    /// Makes the search start after `last`.
    pub fn set_last(&mut self, last: i32) {
        self.last = last.clamp(0, self.max - 1);
    }

    /// How many are taken.
    pub fn used(&self) -> usize {
        self.used
    }

    /// One more than the largest number given out.
    pub fn max(&self) -> i32 {
        self.max
    }

    /// Sets `kernel.pid_max`. EINVAL outside 301..=4194304.
    pub fn set_max(&mut self, max: i32) -> Result<()> {
        if !(RESERVED + 1..=PID_MAX_LIMIT).contains(&max) {
            return Err(Errno::EINVAL);
        }
        self.max = max;
        Ok(())
    }

    fn word(&self, w: usize) -> u64 {
        self.bits.get(w).copied().unwrap_or(0)
    }

    fn is_taken(&self, n: i32) -> bool {
        let n = n as usize;
        self.word(n / 64) & (1 << (n % 64)) != 0
    }

    fn mark(&mut self, n: i32) {
        let n = n as usize;
        let (w, s) = (n / 64, n / 4096);
        if w >= self.bits.len() {
            self.bits.resize((w + 1).next_power_of_two().min(WORDS), 0);
        }
        self.bits[w] |= 1 << (n % 64);
        if self.bits[w] == u64::MAX {
            self.full[s] |= 1 << (w % 64);
            if self.full[s] == u64::MAX {
                self.top[s / 64] |= 1 << (s % 64);
            }
        }
        self.used += 1;
    }

    /// The first free number at or above `from`, below the hard bound.
    fn first_free(&self, from: i32) -> Option<i32> {
        let from = from as usize;
        let w = from / 64;
        if w >= WORDS {
            return None;
        }
        if let Some(bit) = zero_at_or_above(self.word(w), (from % 64) as u32) {
            return Some((w * 64) as i32 + bit as i32);
        }
        let w = w + 1;
        let s = w / 64;
        let word = if let Some(bit) = zero_at_or_above(*self.full.get(s)?, (w % 64) as u32) {
            s * 64 + bit as usize
        } else {
            let s = s + 1;
            let t = s / 64;
            let first = zero_at_or_above(*self.top.get(t)?, (s % 64) as u32).map(|bit| t * 64 + bit as usize);
            let summary = first.or_else(|| {
                (t + 1..self.top.len()).find_map(|t| Some(t * 64 + zero_at_or_above(self.top[t], 0)? as usize))
            })?;
            summary * 64 + zero_at_or_above(self.full[summary], 0)? as usize
        };
        Some((word * 64) as i32 + zero_at_or_above(self.word(word), 0)? as i32)
    }

    /// The next number in cyclic order; EAGAIN when all are taken.
    pub fn allocate(&mut self) -> Result<i32> {
        let low = if self.last >= RESERVED { RESERVED } else { 1 };
        let start = if self.last + 1 < self.max { self.last + 1 } else { low };
        let found = self
            .first_free(start)
            .filter(|&n| n < self.max)
            .or_else(|| self.first_free(low).filter(|&n| n < self.max))
            .ok_or(Errno::EAGAIN)?;
        self.mark(found);
        self.last = found;
        Ok(found)
    }

    /// A chosen number (clone3's set_tid). EINVAL outside the space, EEXIST if taken.
    pub fn allocate_chosen(&mut self, n: i32) -> Result<i32> {
        if n < 1 || n >= self.max {
            return Err(Errno::EINVAL);
        }
        if self.is_taken(n) {
            return Err(Errno::EEXIST);
        }
        self.mark(n);
        Ok(n)
    }

    /// Gives a number back.
    pub fn free(&mut self, n: i32) {
        if !(1..PID_MAX_LIMIT).contains(&n) || !self.is_taken(n) {
            return;
        }
        let n = n as usize;
        let (w, s) = (n / 64, n / 4096);
        self.bits[w] &= !(1 << (n % 64));
        self.full[s] &= !(1 << (w % 64));
        self.top[s / 64] &= !(1 << (s % 64));
        self.used -= 1;
    }

    /// Takes back an allocation that came to nothing, as if it had never been tried.
    pub fn roll_back(&mut self, n: i32, last: i32) {
        self.free(n);
        if self.used == 0 {
            self.last = 0;
        } else if self.last == n {
            self.last = last;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wraps_above_the_reserved_numbers() {
        let mut n = Numbers::new();
        assert_eq!(n.allocate(), Ok(1));
        assert_eq!(n.allocate(), Ok(2));
        n.free(2);
        assert_eq!(n.allocate(), Ok(3));
        n.set_last(PID_MAX_LIMIT - 2);
        assert_eq!(n.allocate(), Ok(PID_MAX_LIMIT - 1));
        assert_eq!(n.allocate(), Ok(300));
        assert_eq!(n.used(), 4);
    }

    #[test]
    fn finds_the_only_hole() {
        let mut n = Numbers::new();
        n.set_max(20_000).unwrap();
        for want in 1..20_000 {
            assert_eq!(n.allocate(), Ok(want));
        }
        assert_eq!(n.allocate(), Err(Errno::EAGAIN));
        n.free(12_345);
        assert_eq!(n.allocate(), Ok(12_345));
        n.free(7);
        assert_eq!(n.allocate(), Err(Errno::EAGAIN));
        assert_eq!(n.allocate_chosen(7), Ok(7));
        assert_eq!(n.allocate_chosen(7), Err(Errno::EEXIST));
    }
}
