//! The root object of one sandbox: handles to everything that exists once. Owns nothing but handles.
use std::sync::Arc;

use crate::futex::Futexes;
use crate::ns::net::NetNamespace;
use crate::ns::uts::UtsNamespace;
use crate::platform::Platform;
use crate::sched::Scheduler;
use crate::signal::queue::PendingCounts;
use crate::task::pid_namespace::PidNamespace;
use crate::time::timer::Timers;
use crate::trace::Stats;

/// One sandbox.
pub struct Kernel {
    /// The machine.
    pub platform: Arc<dyn Platform>,
    /// Armed timers.
    pub timers: Arc<Timers>,
    /// Run queues.
    pub sched: Scheduler,
    /// Counters.
    pub stats: Stats,
    /// The outermost PID namespace.
    pub root_pid_ns: Arc<PidNamespace>,
    /// The initial UTS namespace.
    pub uts: Arc<UtsNamespace>,
    /// The initial network namespace.
    pub net: Arc<NetNamespace>,
    /// Queued signals per user (RLIMIT_SIGPENDING).
    pub pending_counts: PendingCounts,
    /// Everybody who waits for a futex.
    pub futexes: Futexes,
}

impl Kernel {
    /// The nearest deadline has passed; called by the platform's reactor thread.
    pub fn on_deadline(&self) {
        self.timers.run_due();
    }
}
