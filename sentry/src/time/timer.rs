//! The timers of a sandbox: one heap for each axis of time. The platform is told only the nearest deadline.
use core::task::Waker;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::Nanos;
use crate::event::{Deadline, Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::platform::Platform;

/// Called when a timer fires, on the reactor thread, with no lock held.
pub trait TimerTarget: Send + Sync {
    /// The deadline `at` has passed. A periodic timer arms itself again here.
    fn fire(&self, at: Nanos);
}

enum Action {
    Wake(Waker),
    Target(Arc<dyn TimerTarget>),
}

/// What a deadline is a point of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// CLOCK_MONOTONIC.
    Monotonic,
    /// CLOCK_REALTIME: when somebody sets the host's clock the deadline comes earlier or later.
    Realtime,
}

type Armings = BTreeMap<(Nanos, u64), Action>;

#[derive(Default)]
struct Heap {
    next: u64,
    monotonic: Armings,
    realtime: Armings,
}

impl Heap {
    fn on(&mut self, axis: Axis) -> &mut Armings {
        match axis {
            Axis::Monotonic => &mut self.monotonic,
            Axis::Realtime => &mut self.realtime,
        }
    }
}

/// All armed timers.
pub struct Timers {
    platform: Arc<dyn Platform>,
    heap: Mutex<Heap>,
    /// Fires (IN) when the host's CLOCK_REALTIME was set.
    pub clock_set: Arc<WaitQueue>,
}

/// An armed timer; disarmed on drop.
pub struct Armed {
    timers: Arc<Timers>,
    axis: Axis,
    key: (Nanos, u64),
}

impl Drop for Armed {
    fn drop(&mut self) {
        let action = self.timers.heap.lock().on(self.axis).remove(&self.key);
        drop(action);
    }
}

impl Timers {
    /// No timers yet.
    pub fn new(platform: Arc<dyn Platform>) -> Arc<Timers> {
        Arc::new(Timers { platform, heap: Mutex::new(Rank::Timers, Heap::default()), clock_set: WaitQueue::new() })
    }

    /// CLOCK_MONOTONIC now.
    pub fn now(&self) -> Nanos {
        self.platform.monotonic()
    }

    fn arm(self: &Arc<Self>, axis: Axis, at: Nanos, action: Action) -> Armed {
        let mut heap = self.heap.lock();
        heap.next += 1;
        let key = (at, heap.next);
        let on = heap.on(axis);
        let first = on.first_key_value().is_none_or(|(k, _)| at < k.0);
        on.insert(key, action);
        if first {
            self.platform.set_deadline(self.nearest(&heap));
        }
        drop(heap);
        Armed { timers: self.clone(), axis, key }
    }

    /// When the first timer is due, on the monotonic axis as the clocks stand now.
    fn nearest(&self, heap: &Heap) -> Option<Nanos> {
        let monotonic = heap.monotonic.first_key_value().map(|(k, _)| k.0);
        let realtime = heap.realtime.first_key_value().map(|(k, _)| {
            let (mono, real) = (self.platform.monotonic(), self.platform.realtime());
            mono.saturating_add(k.0.saturating_sub(real))
        });
        monotonic.into_iter().chain(realtime).min()
    }

    /// Calls `target` once after monotonic time `at`, unless the handle is dropped before.
    pub fn arm_target(self: &Arc<Self>, at: Nanos, target: Arc<dyn TimerTarget>) -> Armed {
        self.arm_target_on(Axis::Monotonic, at, target)
    }

    /// [`Timers::arm_target`] with a point of either axis.
    pub fn arm_target_on(self: &Arc<Self>, axis: Axis, at: Nanos, target: Arc<dyn TimerTarget>) -> Armed {
        self.arm(axis, at, Action::Target(target))
    }

    /// The host's CLOCK_REALTIME was set. Runs on the reactor thread.
    pub fn clock_was_set(&self) {
        self.run_due();
        self.clock_set.wake(Events::READABLE);
    }

    /// A deadline for [`crate::event::wait_for`].
    pub fn deadline(self: &Arc<Self>, at: Nanos) -> Box<dyn Deadline> {
        Box::new(WakerDeadline { timers: self.clone(), at, armed: None })
    }

    /// Fires all that is due and asks for the next call. Runs on the reactor thread.
    pub fn run_due(&self) {
        loop {
            let mut heap = self.heap.lock();
            let due = [(Axis::Monotonic, self.platform.monotonic()), (Axis::Realtime, self.platform.realtime())]
                .into_iter()
                .find_map(|(axis, now)| {
                    heap.on(axis).first_entry().filter(|e| e.key().0 <= now).map(|e| e.remove_entry())
                });
            let Some(((at, _), action)) = due else {
                self.platform.set_deadline(self.nearest(&heap));
                return;
            };
            drop(heap);
            match action {
                Action::Wake(w) => w.wake(),
                Action::Target(t) => t.fire(at),
            }
        }
    }
}

struct WakerDeadline {
    timers: Arc<Timers>,
    at: Nanos,
    armed: Option<(Armed, Waker)>,
}

impl Deadline for WakerDeadline {
    fn poll_passed(&mut self, waker: &Waker) -> bool {
        if self.timers.now() >= self.at {
            return true;
        }
        if !self.armed.as_ref().is_some_and(|(_, w)| w.will_wake(waker)) {
            let armed = self.timers.arm(Axis::Monotonic, self.at, Action::Wake(waker.clone()));
            self.armed = Some((armed, waker.clone()));
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::platform::sim::SimPlatform;

    struct Count(AtomicU32);

    impl TimerTarget for Count {
        fn fire(&self, _at: Nanos) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn real_time_deadlines_follow_the_clock() {
        let platform = SimPlatform::new(1);
        let timers = Timers::new(platform.clone());
        let (mono, real) = (platform.monotonic(), platform.realtime());
        let (by_real, by_mono) = (Arc::new(Count(AtomicU32::new(0))), Arc::new(Count(AtomicU32::new(0))));
        let _real = timers.arm_target_on(Axis::Realtime, real + 1000, by_real.clone());
        let _mono = timers.arm_target(mono + 5000, by_mono.clone());
        assert_eq!(platform.deadline(), Some(mono + 1000));
        let counts = || (by_real.0.load(Ordering::SeqCst), by_mono.0.load(Ordering::SeqCst));
        // Set back: the deadline is not reached when it would have been.
        platform.set_realtime(real - 10_000);
        timers.clock_was_set();
        assert_eq!(platform.deadline(), Some(mono + 5000));
        platform.advance(5000);
        timers.run_due();
        assert_eq!(counts(), (0, 1));
        assert_eq!(platform.deadline(), Some(mono + 11_000));
        // Set forward past it: it is due at once.
        platform.set_realtime(real + 2000);
        timers.clock_was_set();
        assert_eq!(counts(), (1, 1));
        assert_eq!(platform.deadline(), None);
    }
}
