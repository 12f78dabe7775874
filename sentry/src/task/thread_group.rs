//! Thread groups: processes.
use crate::signal::GroupSignals;

/// A process.
pub struct ThreadGroup {
    /// Actions, shared queue, group stop and group exit.
    pub signals: GroupSignals,
}
