//! Time: clocks as the guest sees them, and the one heap of timers. Owns deadlines; never a host timer (the platform has one).
pub mod alarm;
pub mod clock;
pub mod cpu;
pub mod itimer;
pub mod posix_timer;
pub mod timer;

/// Nanoseconds; on the CLOCK_MONOTONIC axis where a point in time is meant.
pub type Nanos = u64;

/// The timers of a thread group.
#[derive(Default)]
pub struct GroupTimers {
    /// setitimer(2).
    pub interval: itimer::IntervalTimers,
    /// timer_create(2).
    pub posix: posix_timer::PosixTimers,
    /// Alarms on the group's CPU clocks.
    pub cpu: cpu::CpuAlarms,
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
        self.cpu.clear();
    }
}
