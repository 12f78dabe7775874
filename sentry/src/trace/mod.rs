//! Counters and the system call trace (`--stats`, `--strace`). Owns what is counted and printed; never changes what happens.
pub mod stats;
pub mod strace;

pub use stats::{ExitReason, Stats};
pub use strace::{Filter, Trace};
