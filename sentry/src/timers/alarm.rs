//! A point on any clock at which something is told: the timer heap for clocks that always run, the CPU-time watch of a group for CPU
//! clocks. Owns the arming; the period and what expires are its user's.
use std::sync::{Arc, Weak};

use super::clock::Clock;
use super::cpu::CpuArmed;
use crate::Kernel;
use crate::time::Nanos;
use crate::time::timer::{Armed, TimerTarget};

/// Something that expires.
pub trait Expire: Send + Sync {
    /// The alarm armed with `generation` went off. Called without locks.
    fn expired(self: Arc<Self>, generation: u64);
}

struct Fire<T: Expire + 'static> {
    of: Weak<T>,
    generation: u64,
}

impl<T: Expire> TimerTarget for Fire<T> {
    fn fire(&self, _at: Nanos) {
        if let Some(of) = self.of.upgrade() {
            of.expired(self.generation);
        }
    }
}

enum On {
    Heap { _armed: Armed },
    Cpu { _armed: CpuArmed },
}

/// A period that starts at some point of a clock (timer_settime(2)): the state common to POSIX timers, interval timers and timerfd.
pub struct Schedule {
    /// The clock that it was made for.
    of: Clock,
    /// The clock of the present setting.
    pub clock: Clock,
    /// The next expiry on the clock's own axis; None if disarmed.
    pub next: Option<Nanos>,
    /// The period; 0: expires once.
    pub interval: Nanos,
    /// Changes with every setting, so that a late alarm can be told from a current one.
    pub generation: u64,
    on: Option<On>,
}

impl Schedule {
    /// Disarmed.
    pub fn new(clock: Clock) -> Schedule {
        Schedule { of: clock.clone(), clock, next: None, interval: 0, generation: 0, on: None }
    }

    /// Before a new setting, `absolute` or a span from now: gives the clock of its first expiry.
    pub fn begin(&mut self, absolute: bool) -> Clock {
        self.clock = if absolute { self.of.clone() } else { self.of.of_spans() };
        self.clock.clone()
    }

    /// Sets a first expiry (None disarms) and a period.
    pub fn set<T: Expire + 'static>(&mut self, kernel: &Kernel, first: Option<Nanos>, interval: Nanos, owner: &Arc<T>) {
        self.generation += 1;
        self.next = first;
        self.interval = interval;
        self.arm(kernel, owner);
    }

    /// Arms the alarm for `next`.
    pub fn arm<T: Expire + 'static>(&mut self, kernel: &Kernel, owner: &Arc<T>) {
        self.on = None;
        let Some(at) = self.next else { return };
        let target = Arc::new(Fire { of: Arc::downgrade(owner), generation: self.generation });
        self.on = Some(match &self.clock {
            Clock::Cpu(clock) => On::Cpu { _armed: super::cpu::arm(clock, at, target) },
            clock => On::Heap { _armed: kernel.timers.arm_target_on(clock.axis(), at, target) },
        });
    }

    /// Lets go of the alarm without changing the period.
    pub fn disarm(&mut self) {
        self.on = None;
    }

    /// Whether the alarm is set.
    pub fn is_armed(&self) -> bool {
        self.on.is_some()
    }

    /// Moves `next` past `now` by whole periods; gives how many.
    pub fn forward(&mut self, now: Nanos) -> u64 {
        let Some(next) = self.next else { return 0 };
        if self.interval == 0 || next > now {
            return 0;
        }
        let periods = (now - next) / self.interval + 1;
        self.next = Some(next.saturating_add(periods.saturating_mul(self.interval)));
        periods
    }

    /// Time left and period, as gettime calls show them; a pending expiry counts as 1 ns.
    pub fn remaining(&self, now: Nanos) -> (Nanos, Nanos) {
        let left = self.next.map_or(0, |at| at.saturating_sub(now).max(1));
        (left, self.interval)
    }
}
