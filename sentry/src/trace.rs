//! Counters and the system call trace (`--stats`, `--strace`). Owns what is counted; never changes what happens.

/// Counters of one sandbox.
#[derive(Default)]
pub struct Stats {}
