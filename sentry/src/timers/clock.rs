//! Clocks as the guest sees them (clock_gettime(2)). Owns how a clock id is read and turned into a deadline; never an armed timer.
use std::sync::Arc;

use guest_abi::types::{Timespec, Timeval};
use linux_raw_sys::general::*;

use crate::task::{Task, ThreadGroup};
use crate::time::Nanos;
use crate::time::timer::Axis;
use crate::{Errno, Kernel, Result};

/// Nanoseconds in a second.
pub const SECOND: u64 = 1_000_000_000;
/// What a tick would last: the resolution of clocks that Linux counts in ticks.
pub const TICK: Nanos = 4_000_000;

/// The length of a span, at most some 584 years; None if it is negative or its nanoseconds are out of range.
pub fn span(t: &Timespec) -> Option<Nanos> {
    let sec = u64::try_from(t.sec).ok()?;
    let nsec = u64::try_from(t.nsec).ok().filter(|&n| n < SECOND)?;
    Some(sec.saturating_mul(SECOND).saturating_add(nsec))
}

/// The length of a span in microseconds; None as for [`span`].
pub fn span_of_timeval(t: &Timeval) -> Option<Nanos> {
    let sec = u64::try_from(t.sec).ok()?;
    let usec = u64::try_from(t.usec).ok().filter(|&n| n < 1_000_000)?;
    Some(sec.saturating_mul(SECOND).saturating_add(usec * 1000))
}

/// Nanoseconds as a timespec.
pub fn timespec(ns: Nanos) -> Timespec {
    Timespec { sec: (ns / SECOND) as i64, nsec: (ns % SECOND) as i64 }
}

/// Nanoseconds as a timeval, rounded down.
pub fn timeval(ns: Nanos) -> Timeval {
    Timeval { sec: (ns / SECOND) as i64, usec: (ns % SECOND / 1000) as i64 }
}

/// A point of CLOCK_REALTIME on the monotonic axis; 0 for one before the machine started.
pub fn realtime_deadline(kernel: &Kernel, at: Nanos) -> Nanos {
    let (mono, real) = (kernel.platform.monotonic(), kernel.platform.realtime());
    mono.saturating_add(at).saturating_sub(real)
}

/// A point of `clock` as `task` sees it, on the clock's own axis: time namespaces shift two of them.
pub fn to_machine(task: &Task, clock: &Clock, at: Nanos) -> Nanos {
    match clock {
        Clock::Monotonic => shift(at, task.time_offsets().monotonic.saturating_neg()),
        Clock::Boottime => shift(at, task.time_offsets().boottime.saturating_neg()),
        _ => at,
    }
}

/// What `clock` shows `task` when it is `at` on the clock's own axis.
pub fn from_machine(task: &Task, clock: &Clock, at: Nanos) -> Nanos {
    match clock {
        Clock::Monotonic => shift(at, task.time_offsets().monotonic),
        Clock::Boottime => shift(at, task.time_offsets().boottime),
        _ => at,
    }
}

fn shift(at: Nanos, by: i64) -> Nanos {
    at.saturating_add_signed(by)
}

/// Which part of CPU time counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuPart {
    /// User and system time, in Linux sampled by ticks (ITIMER_PROF).
    Prof,
    /// User time (ITIMER_VIRTUAL).
    Virtual,
    /// All of it, exact.
    Sched,
}

/// Whose CPU time counts.
#[derive(Clone)]
pub enum CpuOwner {
    /// One task's.
    Task(Arc<Task>),
    /// A whole group's.
    Group(Arc<ThreadGroup>),
}

impl CpuOwner {
    /// The sandbox.
    pub fn kernel(&self) -> &Arc<Kernel> {
        match self {
            CpuOwner::Task(t) => t.kernel(),
            CpuOwner::Group(g) => g.kernel(),
        }
    }

    /// User and system time up to `now`.
    pub fn times(&self, now: Nanos) -> (Nanos, Nanos) {
        match self {
            CpuOwner::Task(t) => t.sched.clock.times(now),
            CpuOwner::Group(g) => g.cpu_clock.times(now),
        }
    }
}

/// A CPU-time clock.
#[derive(Clone)]
pub struct CpuClock {
    /// Whose.
    pub owner: CpuOwner,
    /// Which part.
    pub part: CpuPart,
}

impl CpuClock {
    /// The time counted so far.
    pub fn now(&self) -> Nanos {
        let (user, system) = self.owner.times(self.owner.kernel().timers.now());
        match self.part {
            CpuPart::Virtual => user,
            CpuPart::Prof | CpuPart::Sched => user.saturating_add(system),
        }
    }
}

/// A clock.
#[derive(Clone)]
pub enum Clock {
    /// CLOCK_REALTIME, CLOCK_REALTIME_COARSE.
    Realtime,
    /// CLOCK_MONOTONIC, _RAW, _COARSE.
    Monotonic,
    /// CLOCK_BOOTTIME: the machine never sleeps, so it is the monotonic clock.
    Boottime,
    /// CLOCK_TAI: without leap-second data the offset to UTC is 0, as in a fresh Linux.
    Tai,
    /// CPU time.
    Cpu(CpuClock),
}

impl Clock {
    /// The clock behind an id. EINVAL if there is none. `reading`: a process clock may be named by any tid of the caller's own
    /// group, as Linux lets clock_gettime(2).
    pub fn from_id(task: &Arc<Task>, id: i32, reading: bool) -> Result<Clock> {
        if id < 0 {
            return cpu_from_id(task, id, reading).map(Clock::Cpu);
        }
        Ok(match id as u32 {
            CLOCK_REALTIME | CLOCK_REALTIME_COARSE => Clock::Realtime,
            CLOCK_MONOTONIC | CLOCK_MONOTONIC_RAW | CLOCK_MONOTONIC_COARSE => Clock::Monotonic,
            CLOCK_BOOTTIME => Clock::Boottime,
            CLOCK_TAI => Clock::Tai,
            CLOCK_PROCESS_CPUTIME_ID => {
                Clock::Cpu(CpuClock { owner: CpuOwner::Group(task.group().clone()), part: CpuPart::Sched })
            }
            CLOCK_THREAD_CPUTIME_ID => {
                Clock::Cpu(CpuClock { owner: CpuOwner::Task(task.clone()), part: CpuPart::Sched })
            }
            // CLOCK_*_ALARM need a clock device that wakes the machine; there is none.
            _ => return Err(Errno::EINVAL),
        })
    }

    /// The time now on the clock's own axis.
    pub fn now(&self, kernel: &Kernel) -> Nanos {
        match self {
            Clock::Realtime | Clock::Tai => kernel.platform.realtime(),
            Clock::Monotonic | Clock::Boottime => kernel.platform.monotonic(),
            Clock::Cpu(c) => c.now(),
        }
    }

    /// The axis of deadlines on a clock that always runs.
    pub fn axis(&self) -> Axis {
        match self {
            Clock::Realtime | Clock::Tai => Axis::Realtime,
            Clock::Monotonic | Clock::Boottime | Clock::Cpu(_) => Axis::Monotonic,
        }
    }

    /// The clock by which a span lasts that begins on this one: setting the real-time clock makes no span longer.
    #[must_use]
    pub fn of_spans(&self) -> Clock {
        match self {
            Clock::Realtime | Clock::Tai => Clock::Monotonic,
            other => other.clone(),
        }
    }
}

/// Resolution of the clock behind an id.
pub fn resolution(task: &Arc<Task>, id: i32) -> Result<Nanos> {
    Ok(match Clock::from_id(task, id, true)? {
        Clock::Cpu(CpuClock { part: CpuPart::Prof | CpuPart::Virtual, .. }) => TICK,
        _ if matches!(id as u32, CLOCK_REALTIME_COARSE | CLOCK_MONOTONIC_COARSE) => TICK,
        _ => 1,
    })
}

/// A clock id made of a pid or tid (clock_getcpuclockid(3), pthread_getcpuclockid(3)).
fn cpu_from_id(task: &Arc<Task>, id: i32, reading: bool) -> Result<CpuClock> {
    const PER_THREAD: i32 = 4;
    let part = match id & 3 {
        0 => CpuPart::Prof,
        1 => CpuPart::Virtual,
        2 => CpuPart::Sched,
        // A clock device's descriptor: there are none.
        _ => return Err(Errno::EINVAL),
    };
    let pid = !(id >> 3);
    let thread = id & PER_THREAD != 0;
    if pid == 0 {
        let owner = if thread { CpuOwner::Task(task.clone()) } else { CpuOwner::Group(task.group().clone()) };
        return Ok(CpuClock { owner, part });
    }
    let found = task.pid_namespace().task(pid).ok_or(Errno::EINVAL)?;
    let owner = if thread {
        if !Arc::ptr_eq(found.group(), task.group()) {
            return Err(Errno::EINVAL);
        }
        CpuOwner::Task(found)
    } else if found.is_leader() || (reading && Arc::ptr_eq(&found, task)) {
        CpuOwner::Group(found.group().clone())
    } else {
        return Err(Errno::EINVAL);
    };
    Ok(CpuClock { owner, part })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_refuse_what_linux_refuses() {
        assert_eq!(span(&Timespec { sec: 1, nsec: 5 }), Some(SECOND + 5));
        assert_eq!(span(&Timespec { sec: 0, nsec: 1_000_000_000 }), None);
        assert_eq!(span(&Timespec { sec: -1, nsec: 0 }), None);
        assert_eq!(span(&Timespec { sec: i64::MAX, nsec: 0 }), Some(u64::MAX));
        assert_eq!(span_of_timeval(&Timeval { sec: 0, usec: 1_000_000 }), None);
    }
}
