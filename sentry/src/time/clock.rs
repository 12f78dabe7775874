//! Clocks as the guest sees them.
use guest_abi::types::Timespec;

use super::Nanos;

/// Nanoseconds in a second.
pub const SECOND: u64 = 1_000_000_000;

/// The length of a span, at most some 584 years; None if it is negative or its nanoseconds are out of range.
pub fn span(t: &Timespec) -> Option<Nanos> {
    let sec = u64::try_from(t.sec).ok()?;
    let nsec = u64::try_from(t.nsec).ok().filter(|&n| n < SECOND)?;
    Some(sec.saturating_mul(SECOND).saturating_add(nsec))
}

/// Nanoseconds as a timespec.
pub fn timespec(ns: Nanos) -> Timespec {
    Timespec { sec: (ns / SECOND) as i64, nsec: (ns % SECOND) as i64 }
}

/// A point of CLOCK_REALTIME on the monotonic axis; 0 for one before the machine started.
pub fn realtime_deadline(kernel: &crate::Kernel, at: Nanos) -> Nanos {
    let (mono, real) = (kernel.platform.monotonic(), kernel.platform.realtime());
    mono.saturating_add(at).saturating_sub(real)
}
