//! The scheduler: run queues per worker, stealing, preemption when somebody waits. Owns which task runs where; never what it does.

/// Run queues of all workers.
pub struct Scheduler {}
