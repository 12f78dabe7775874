//! CPU time and the other counters of getrusage(2): exact, taken at guest entry and exit. Owns the counters; never reads a
//! clock by itself.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::time::Nanos;

/// Counters of a task, or the sum over the dead tasks of a group or over its waited-for children.
#[derive(Default)]
pub struct Usage {
    /// Time in the guest, ns.
    pub user: AtomicU64,
    /// Time in the sentry, ns.
    pub system: AtomicU64,
    /// Page faults served without the host's storage.
    pub minor_faults: AtomicU64,
    /// Page faults that read a file.
    pub major_faults: AtomicU64,
    /// Times it gave up the CPU by itself.
    pub voluntary_switches: AtomicU64,
    /// Times it was preempted.
    pub involuntary_switches: AtomicU64,
    /// Largest resident set, KiB.
    pub max_rss: AtomicU64,
}

/// A reading of [`Usage`].
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct UsageValue {
    pub user: Nanos,
    pub system: Nanos,
    pub minor_faults: u64,
    pub major_faults: u64,
    pub voluntary_switches: u64,
    pub involuntary_switches: u64,
    pub max_rss: u64,
}

impl UsageValue {
    /// Adds another's counters; of the largest resident set it keeps the larger.
    pub fn add(&mut self, other: &UsageValue) {
        self.user = self.user.saturating_add(other.user);
        self.system = self.system.saturating_add(other.system);
        self.minor_faults = self.minor_faults.saturating_add(other.minor_faults);
        self.major_faults = self.major_faults.saturating_add(other.major_faults);
        self.voluntary_switches = self.voluntary_switches.saturating_add(other.voluntary_switches);
        self.involuntary_switches = self.involuntary_switches.saturating_add(other.involuntary_switches);
        self.max_rss = self.max_rss.max(other.max_rss);
    }

    /// User and system time.
    pub fn cpu(&self) -> Nanos {
        self.user.saturating_add(self.system)
    }
}

impl Usage {
    /// The counters now.
    pub fn get(&self) -> UsageValue {
        UsageValue {
            user: self.user.load(Relaxed),
            system: self.system.load(Relaxed),
            minor_faults: self.minor_faults.load(Relaxed),
            major_faults: self.major_faults.load(Relaxed),
            voluntary_switches: self.voluntary_switches.load(Relaxed),
            involuntary_switches: self.involuntary_switches.load(Relaxed),
            max_rss: self.max_rss.load(Relaxed),
        }
    }

    /// Adds a reading.
    pub fn add(&self, v: &UsageValue) {
        self.user.fetch_add(v.user, Relaxed);
        self.system.fetch_add(v.system, Relaxed);
        self.minor_faults.fetch_add(v.minor_faults, Relaxed);
        self.major_faults.fetch_add(v.major_faults, Relaxed);
        self.voluntary_switches.fetch_add(v.voluntary_switches, Relaxed);
        self.involuntary_switches.fetch_add(v.involuntary_switches, Relaxed);
        self.max_rss.fetch_max(v.max_rss, Relaxed);
    }
}

/// The running clock of one task. Times are monotonic ns; only the worker that runs the task changes it.
#[derive(Default)]
pub struct CpuClock {
    /// Counters.
    pub usage: Usage,
    /// Since when the present stretch of user or system time lasts; 0 while the task does not run.
    since: AtomicU64,
    /// Whether that stretch is user time.
    in_guest: AtomicU64,
}

impl CpuClock {
    /// The task begins to run in the sentry.
    pub fn start(&self, now: Nanos) {
        self.in_guest.store(0, Relaxed);
        self.since.store(now, Relaxed);
    }

    fn close(&self, now: Nanos) {
        let since = self.since.load(Relaxed);
        if since == 0 {
            return;
        }
        let counter = if self.in_guest.load(Relaxed) == 1 { &self.usage.user } else { &self.usage.system };
        counter.fetch_add(now.saturating_sub(since), Relaxed);
    }

    /// It enters the guest.
    pub fn enter_guest(&self, now: Nanos) {
        self.close(now);
        self.since.store(now, Relaxed);
        self.in_guest.store(1, Relaxed);
    }

    /// It has left the guest.
    pub fn leave_guest(&self, now: Nanos) {
        self.close(now);
        self.since.store(now, Relaxed);
        self.in_guest.store(0, Relaxed);
    }

    /// Whether a stretch lasts now: the task has a CPU.
    pub fn is_running(&self) -> bool {
        self.since.load(Relaxed) != 0
    }

    /// It gives up the CPU.
    pub fn stop(&self, now: Nanos) {
        self.close(now);
        self.since.store(0, Relaxed);
    }

    /// Counters including the stretch that lasts at `now`.
    pub fn reading(&self, now: Nanos) -> UsageValue {
        let mut v = self.usage.get();
        let since = self.since.load(Relaxed);
        if since != 0 {
            let part = now.saturating_sub(since);
            if self.in_guest.load(Relaxed) == 1 {
                v.user += part;
            } else {
                v.system += part;
            }
        }
        v
    }
}
