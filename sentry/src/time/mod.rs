//! Time: the one heap of timers. Owns deadlines; never a host timer (the platform has one).
pub mod timer;

/// Nanoseconds; on the CLOCK_MONOTONIC axis where a point in time is meant.
pub type Nanos = u64;
