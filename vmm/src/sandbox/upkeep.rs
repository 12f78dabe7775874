//! Giving free memory back to the host: some time after the sandbox has let go of much, when it is quiet. Owns when; what there is
//! to give is `memory`'s. There is no tick: a timer runs only between such a fall and the end of giving back.
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use sentry::Kernel;
use sentry::lock::{Mutex, Rank};
use sentry::time::Nanos;
use sentry::time::timer::{Armed, TimerTarget};

use crate::memory::GuestMemory;
use crate::platform::KvmPlatform;

/// From the fall on: who frees and takes in turns keeps what it freed.
const PAUSE: Nanos = 1_000_000_000;
/// Pauses that a busy sandbox gets, which would otherwise pay for taking the memory again.
const PATIENCE: u32 = 20;

struct Upkeep {
    kernel: Weak<Kernel>,
    memory: Arc<GuestMemory>,
    pauses: AtomicU32,
    armed: Mutex<Option<Armed>>,
}

impl Upkeep {
    fn arm(self: &Arc<Self>) {
        let Some(kernel) = self.kernel.upgrade() else { return };
        let at = kernel.timers.now().saturating_add(PAUSE);
        let armed = kernel.timers.arm_target(at, Arc::new(Due(Arc::downgrade(self))));
        let old = self.armed.lock().replace(armed);
        drop(old);
    }

    fn due(self: &Arc<Self>) {
        let Some(kernel) = self.kernel.upgrade() else { return };
        if kernel.sched.runnable() > 0 && self.pauses.fetch_add(1, Ordering::Relaxed) < PATIENCE {
            return self.arm();
        }
        self.pauses.store(0, Ordering::Relaxed);
        self.memory.trim();
    }
}

/// The timer's end: without a hold on what it belongs to, which holds the timer.
struct Due(Weak<Upkeep>);

impl TimerTarget for Due {
    fn fire(&self, _at: Nanos) {
        if let Some(upkeep) = self.0.upgrade() {
            upkeep.due();
        }
    }
}

/// Lets `platform` say when there is memory to give back.
pub fn start(kernel: &Arc<Kernel>, platform: &KvmPlatform) {
    let upkeep = Arc::new(Upkeep {
        kernel: Arc::downgrade(kernel),
        memory: platform.guest_memory().clone(),
        pauses: AtomicU32::new(0),
        armed: Mutex::new(Rank::Leaf, None),
    });
    platform.set_surplus_sink(Box::new(move || upkeep.arm()));
}
