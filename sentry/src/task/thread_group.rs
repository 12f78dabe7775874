//! Thread groups: processes.

/// A process.
pub struct ThreadGroup {}
