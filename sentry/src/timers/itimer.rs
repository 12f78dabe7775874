//! Interval timers (setitimer(2)): one real, one virtual and one profiling timer a group. Owns their state; the signal does the rest.
use std::sync::{Arc, Weak};

use super::alarm::{Expire, Schedule};
use super::clock::{Clock, CpuClock, CpuOwner, CpuPart};
use crate::lock::{Mutex, Rank};
use crate::signal::{Sender, Signal, info, send_to_group};
use crate::task::ThreadGroup;
use crate::time::Nanos;

/// Which of the three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Which {
    Real,
    Virtual,
    Prof,
}

impl Which {
    fn signal(self) -> Signal {
        match self {
            Which::Real => Signal::SIGALRM,
            Which::Virtual => Signal::SIGVTALRM,
            Which::Prof => Signal::SIGPROF,
        }
    }

    fn clock(self, group: &Arc<ThreadGroup>) -> Clock {
        let cpu = |part| Clock::Cpu(CpuClock { owner: CpuOwner::Group(group.clone()), part });
        match self {
            Which::Real => Clock::Monotonic,
            Which::Virtual => cpu(CpuPart::Virtual),
            Which::Prof => cpu(CpuPart::Prof),
        }
    }
}

struct Timer {
    which: Which,
    group: Weak<ThreadGroup>,
    /// The clock of a CPU timer names its group, so it is only there while the timer is armed.
    schedule: Mutex<Schedule>,
}

impl Expire for Timer {
    fn expired(self: Arc<Self>, generation: u64) {
        let Some(group) = self.group.upgrade() else { return };
        let kernel = group.kernel();
        {
            let clock = self.schedule.lock().clock.clone();
            let now = clock.now(kernel);
            let mut s = self.schedule.lock();
            if s.generation != generation {
                return;
            }
            if s.interval == 0 {
                s.next = None;
                s.disarm();
            } else if self.which == Which::Real {
                // Goes on when the signal is taken, so that a short period cannot flood a slow program.
                s.disarm();
            } else {
                s.forward(now);
                s.arm(kernel, &self);
            }
        }
        let signal = self.which.signal();
        // A standard signal is marked even at the limit.
        let _ = send_to_group(&group, signal, info::kernel(signal), Sender::Event);
    }
}

/// The interval timers of a group.
pub struct IntervalTimers {
    timers: Mutex<[Option<Arc<Timer>>; 3]>,
}

impl Default for IntervalTimers {
    fn default() -> Self {
        IntervalTimers { timers: Mutex::new(Rank::Leaf, [None, None, None]) }
    }
}

impl IntervalTimers {
    fn get(&self, which: Which) -> Option<Arc<Timer>> {
        self.timers.lock()[which as usize].clone()
    }

    /// SIGALRM is taken off the queue: a periodic real timer goes on.
    pub fn alarm_taken(&self, group: &ThreadGroup) {
        let Some(timer) = self.get(Which::Real) else { return };
        let kernel = group.kernel();
        let mut s = timer.schedule.lock();
        if s.next.is_some() && !s.is_armed() {
            s.forward(kernel.timers.now());
            s.arm(kernel, &timer);
        }
    }

    /// Drops all timers: the group is gone.
    pub fn clear(&self) {
        let old = core::mem::take(&mut *self.timers.lock());
        drop(old);
    }
}

/// Time left and period.
pub fn get(group: &Arc<ThreadGroup>, which: Which) -> (Nanos, Nanos) {
    let Some(timer) = group.timers.interval.get(which) else { return (0, 0) };
    let now = which.clock(group).now(group.kernel());
    let s = timer.schedule.lock();
    s.remaining(now)
}

/// Sets the time to the first expiry (0 disarms) and the period; gives the old values.
pub fn set(group: &Arc<ThreadGroup>, which: Which, value: Nanos, interval: Nanos) -> (Nanos, Nanos) {
    let clock = which.clock(group);
    let kernel = group.kernel();
    let now = clock.now(kernel);
    let old = get(group, which);
    if value == 0 {
        let gone = group.timers.interval.timers.lock()[which as usize].take();
        drop(gone);
        return old;
    }
    let timer = Arc::new(Timer {
        which,
        group: Arc::downgrade(group),
        schedule: Mutex::new(Rank::TimerState, Schedule::new(clock)),
    });
    timer.schedule.lock().set(kernel, Some(now.saturating_add(value)), interval, &timer);
    let gone = group.timers.interval.timers.lock()[which as usize].replace(timer);
    drop(gone);
    old
}
