//! Which task is in the guest on which CPU, for whoever serves its calls there, and whose answers the guest there may give. Owns that
//! record only.
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::Task;
use super::answers::{self, CALLS, YIELD};
use crate::kernel::Kernel;
use crate::lock::{Mutex, Rank};

#[derive(Default)]
struct Place {
    task: Option<Arc<Task>>,
    /// The versions of the answers that the guest gives on this CPU. Once the task is gone they stay: it may come back.
    shown: Option<(u64, u64)>,
}

/// One place for each CPU.
pub struct InGuest(Box<[Mutex<Place>]>);

impl InGuest {
    /// Nobody is in the guest.
    pub fn new(cpus: usize) -> InGuest {
        InGuest((0..cpus).map(|_| Mutex::new(Rank::Leaf, Place::default())).collect())
    }

    /// The task that may be served on `cpu`.
    pub fn get(&self, cpu: usize) -> Option<Arc<Task>> {
        self.0.get(cpu)?.lock().task.clone()
    }

    /// `task` is about to enter the guest on `cpu`, which is to give its answers.
    pub fn enter(&self, cpu: usize, task: &Arc<Task>) {
        let Some(place) = self.0.get(cpu) else { return };
        let kernel = task.kernel();
        let shown = {
            let mut p = place.lock();
            p.task = Some(task.clone());
            p.shown
        };
        // Looked at once the task is in its place: whoever changes something later finds it there.
        let versions = answers::versions(task);
        if versions != shown {
            let values = versions.map(|_| answers::answers(task));
            let mut p = place.lock();
            // Whoever changes something after this look finds the task in its place.
            let current = values.filter(|_| answers::current(task) == versions);
            for (i, &call) in CALLS.iter().enumerate() {
                kernel.platform.set_answer(cpu, call as u16, current.and_then(|c| c.get(i).copied()));
            }
            p.shown = versions.filter(|_| current.is_some());
        }
        // Whoever queues a task takes this answer back after it shows in the length of the queue.
        kernel.platform.set_answer(cpu, YIELD as u16, versions.map(|_| 0));
        // The store is seen before the look, or both might miss each other.
        fence(Ordering::SeqCst);
        if kernel.sched.somebody_waits() {
            kernel.platform.set_answer(cpu, YIELD as u16, None);
        }
    }

    /// Nobody is in the guest on `cpu` any more.
    pub fn leave(&self, cpu: usize, kernel: &Kernel) {
        let Some(place) = self.0.get(cpu) else { return };
        // It is dropped without the lock: it may be the last reference.
        let old = place.lock().task.take();
        drop(old);
        for call in CALLS.into_iter().chain([YIELD]) {
            let count = kernel.platform.take_answered(cpu, call as u16);
            if count != 0 {
                kernel.stats.answered(cpu, call.into(), count);
            }
        }
    }

    /// Tasks of which `whose` holds get no answers until they enter the guest again.
    pub fn forget(&self, kernel: &Kernel, whose: impl Fn(&Arc<Task>) -> bool) {
        for (cpu, place) in self.0.iter().enumerate() {
            let mut p = place.lock();
            if p.shown.is_none() || !p.task.as_ref().is_some_and(&whose) {
                continue;
            }
            for call in CALLS.into_iter().chain([YIELD]) {
                kernel.platform.set_answer(cpu, call as u16, None);
            }
            p.shown = None;
        }
    }
}
