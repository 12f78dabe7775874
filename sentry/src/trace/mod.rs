//! Counters (`--stats`). Owns what is counted; never changes what happens.
pub mod stats;

pub use stats::{ExitReason, Stats};
