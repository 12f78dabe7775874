//! `--timeout`: one timer that kills the sandbox's first process, and with it all others.
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use sentry::Kernel;
use sentry::time::Nanos;
use sentry::time::timer::{Armed, TimerTarget};

struct Timeout {
    kernel: Weak<Kernel>,
    passed: Arc<AtomicBool>,
}

impl TimerTarget for Timeout {
    fn fire(&self, _at: Nanos) {
        if let Some(kernel) = self.kernel.upgrade().filter(|k| k.exit_status().is_none()) {
            self.passed.store(true, Ordering::SeqCst);
            kernel.signal_from_host(libc::SIGKILL);
        }
    }
}

/// Starts the clock; it runs while the handle lives.
pub fn arm(kernel: &Arc<Kernel>, span: Duration, passed: &Arc<AtomicBool>) -> Armed {
    let target = Arc::new(Timeout { kernel: Arc::downgrade(kernel), passed: passed.clone() });
    let at = kernel.timers.now().saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX));
    kernel.timers.arm_target(at, target)
}
