//! Clocks as the guest sees them and what can be armed on them: interval timers, POSIX timers, CPU-time alarms. Owns periods and
//! expirations; never the heap of deadlines (`time::timer`).
pub mod alarm;
pub mod clock;
pub mod cpu;
pub mod itimer;
pub mod posix_timer;

use crate::lock::{Mutex, Rank};

/// The timers of a thread group.
pub struct GroupTimers {
    /// setitimer(2).
    pub interval: itimer::IntervalTimers,
    /// timer_create(2).
    pub posix: posix_timer::PosixTimers,
    /// Alarms on the group's CPU clock.
    pub cpu: cpu::CpuAlarms,
    /// The alarm for RLIMIT_CPU.
    cpu_limit: Mutex<Option<cpu::CpuArmed>>,
}

impl Default for GroupTimers {
    fn default() -> Self {
        GroupTimers {
            interval: itimer::IntervalTimers::default(),
            posix: posix_timer::PosixTimers::default(),
            cpu: cpu::CpuAlarms::default(),
            cpu_limit: Mutex::new(Rank::Leaf, None),
        }
    }
}

impl GroupTimers {
    /// execve(2): POSIX timers go, interval timers stay.
    pub fn reset_for_exec(&self) {
        self.posix.clear();
    }

    /// The group is gone.
    pub fn clear(&self) {
        self.posix.clear();
        self.interval.clear();
        let limit = self.cpu_limit.lock().take();
        drop(limit);
    }
}
