//! The time namespace (time_namespaces(7)): how far CLOCK_MONOTONIC and CLOCK_BOOTTIME are from the machine's. Owns the offsets; never a
//! clock.
use std::sync::Arc;

use super::Owner;
use crate::lock::{Mutex, Rank};
use crate::{Errno, Result};

/// Nanoseconds that a clock of the namespace is ahead of the machine's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offsets {
    /// CLOCK_MONOTONIC, _RAW, _COARSE.
    pub monotonic: i64,
    /// CLOCK_BOOTTIME.
    pub boottime: i64,
}

struct State {
    offsets: Offsets,
    /// Somebody lives by them.
    frozen: bool,
}

/// A time namespace.
pub struct TimeNamespace {
    number: u64,
    /// Whose capabilities count.
    pub owner: Owner,
    state: Mutex<State>,
}

/// Seconds that a clock may show at most: half of what nanoseconds can count (KTIME_SEC_MAX / 2).
const MOST: i64 = i64::MAX / 1_000_000_000 / 2;

impl TimeNamespace {
    /// The one in which a sandbox begins: the machine's own clocks.
    pub fn first() -> Arc<TimeNamespace> {
        Self::with(Owner::initial(), State { offsets: Offsets::default(), frozen: true })
    }

    /// A copy (CLONE_NEWTIME) whose offsets may be set until somebody is in it.
    #[must_use]
    pub fn copy(&self, owner: Owner) -> Arc<TimeNamespace> {
        Self::with(owner, State { offsets: self.offsets(), frozen: false })
    }

    fn with(owner: Owner, state: State) -> Arc<TimeNamespace> {
        Arc::new(TimeNamespace { number: super::next_number(), owner, state: Mutex::new(Rank::Leaf, state) })
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The offsets.
    pub fn offsets(&self) -> Offsets {
        self.state.lock().offsets
    }

    /// A task enters: from now on they stay as they are.
    pub fn enter(&self) -> Offsets {
        let mut state = self.state.lock();
        state.frozen = true;
        state.offsets
    }

    /// Sets the offsets that are given. EACCES once somebody is in it.
    pub fn set(&self, monotonic: Option<i64>, boottime: Option<i64>) -> Result<()> {
        let mut state = self.state.lock();
        if state.frozen {
            return Err(Errno::EACCES);
        }
        state.offsets.monotonic = monotonic.unwrap_or(state.offsets.monotonic);
        state.offsets.boottime = boottime.unwrap_or(state.offsets.boottime);
        Ok(())
    }
}

/// An offset as it is written: whole seconds, which may be negative, and nanoseconds beyond them. `now` is what the machine's clock shows.
/// EINVAL for bad nanoseconds, ERANGE where the clock would show less than 0 or too much.
pub fn offset(seconds: i64, nanoseconds: i64, now: u64) -> Result<i64> {
    if !(0..1_000_000_000).contains(&nanoseconds) {
        return Err(Errno::EINVAL);
    }
    if !(-2 * MOST..=2 * MOST).contains(&seconds) {
        return Err(Errno::ERANGE);
    }
    let total = i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
    let shown = i128::from(now) + total;
    if shown < 0 || shown > i128::from(MOST) * 1_000_000_000 {
        return Err(Errno::ERANGE);
    }
    i64::try_from(total).map_err(|_| Errno::ERANGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_keep_clocks_in_range() {
        assert_eq!(offset(5, 3, 0), Ok(5_000_000_003));
        assert_eq!(offset(-5, 500_000_000, 5_000_000_000), Ok(-4_500_000_000));
        assert_eq!(offset(-6, 0, 5_000_000_000), Err(Errno::ERANGE));
        assert_eq!(offset(0, 1_000_000_000, 0), Err(Errno::EINVAL));
        assert_eq!(offset(i64::MIN, 0, 0), Err(Errno::ERANGE));
        assert_eq!(offset(MOST + 1, 0, 0), Err(Errno::ERANGE));
    }

    #[test]
    fn offsets_hold_still_once_somebody_is_in() {
        let ns = TimeNamespace::first().copy(Owner::initial());
        ns.set(Some(5), None).unwrap();
        assert_eq!(ns.enter(), Offsets { monotonic: 5, boottime: 0 });
        assert_eq!(ns.set(Some(6), None), Err(Errno::EACCES));
    }
}
