//! The one heap of timers of a sandbox. The platform is told only the nearest deadline.
use core::task::Waker;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::Nanos;
use crate::event::Deadline;
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

#[derive(Default)]
struct Heap {
    next: u64,
    armed: BTreeMap<(Nanos, u64), Action>,
}

/// All armed timers.
pub struct Timers {
    platform: Arc<dyn Platform>,
    heap: Mutex<Heap>,
}

/// An armed timer; disarmed on drop.
pub struct Armed {
    timers: Arc<Timers>,
    key: (Nanos, u64),
}

impl Drop for Armed {
    fn drop(&mut self) {
        self.timers.heap.lock().armed.remove(&self.key);
    }
}

impl Timers {
    /// No timers yet.
    pub fn new(platform: Arc<dyn Platform>) -> Arc<Timers> {
        Arc::new(Timers { platform, heap: Mutex::new(Rank::Timers, Heap::default()) })
    }

    /// CLOCK_MONOTONIC now.
    pub fn now(&self) -> Nanos {
        self.platform.monotonic()
    }

    fn arm(self: &Arc<Self>, at: Nanos, action: Action) -> Armed {
        let mut heap = self.heap.lock();
        heap.next += 1;
        let key = (at, heap.next);
        let nearest = heap.armed.first_key_value().is_none_or(|(k, _)| at < k.0);
        heap.armed.insert(key, action);
        if nearest {
            self.platform.set_deadline(Some(at));
        }
        drop(heap);
        Armed { timers: self.clone(), key }
    }

    /// Calls `target` once after monotonic time `at`, unless the handle is dropped before.
    pub fn arm_target(self: &Arc<Self>, at: Nanos, target: Arc<dyn TimerTarget>) -> Armed {
        self.arm(at, Action::Target(target))
    }

    /// A deadline for [`crate::event::wait_for`].
    pub fn deadline(self: &Arc<Self>, at: Nanos) -> Box<dyn Deadline> {
        Box::new(WakerDeadline { timers: self.clone(), at, armed: None })
    }

    /// Fires all that is due and asks for the next call. Runs on the reactor thread.
    pub fn run_due(&self) {
        loop {
            let now = self.now();
            let mut heap = self.heap.lock();
            let Some(entry) = heap.armed.first_entry() else {
                self.platform.set_deadline(None);
                return;
            };
            let at = entry.key().0;
            if at > now {
                self.platform.set_deadline(Some(at));
                return;
            }
            let action = entry.remove();
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
            let armed = self.timers.arm(self.at, Action::Wake(waker.clone()));
            self.armed = Some((armed, waker.clone()));
        }
        false
    }
}
