//! Workers: the run queues and the loop of a host thread with a vCPU.
use core::cell::Cell;
use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use async_task::{Builder, Runnable, ScheduleInfo, WithInfo};

use super::Entity;
use crate::lock::{Mutex, Rank};
use crate::platform::Platform;
use crate::time::Nanos;

type Ready = Runnable<Arc<Entity>>;

/// How long a task runs while another waits.
const SLICE: Nanos = 4_000_000;
/// A woken task that is this far behind the running one replaces it at once.
const WAKE_GRANULARITY: u64 = 1_000_000;
/// A sleeper is placed at most this far before the queue, so that sleep does not store up CPU time.
const SLEEPER_BONUS: u64 = 2_000_000;
/// Entries a thief looks at in one queue.
const STEAL_SCAN: usize = 32;

thread_local! { static CPU: Cell<Option<usize>> = const { Cell::new(None) }; }

/// The worker that the calling host thread is.
pub fn current_cpu() -> Option<usize> {
    CPU.get()
}

#[derive(Default)]
struct Queue {
    ready: BTreeMap<(u64, u64), Ready>,
    next: u64,
    min_vruntime: u64,
}

struct Worker {
    queue: Mutex<Queue>,
    /// Length of the queue.
    waiting: AtomicUsize,
    /// Parked or about to be. Whoever resets it must unpark.
    idle: AtomicBool,
    /// A preemption deadline is set.
    armed: AtomicBool,
    /// Makes a change of `armed` and of the platform's deadline one step.
    arming: Mutex<()>,
    /// The running task should yield at its next preemption point.
    resched: AtomicBool,
    /// When the running task was picked.
    slice_start: AtomicU64,
    /// Its virtual run time at that moment; u64::MAX if nothing runs.
    running_vruntime: AtomicU64,
    /// Identity of the entity that ran last, for counting switches only.
    last: AtomicUsize,
    /// Switches from one task to another.
    switches: AtomicU64,
    /// Nanoseconds of user and system time it has given to tasks (/proc/stat).
    user: AtomicU64,
    system: AtomicU64,
}

struct Shared {
    platform: Arc<dyn Platform>,
    workers: Box<[Worker]>,
    shutdown: AtomicBool,
}

/// Run queues of all workers.
pub struct Scheduler {
    shared: Arc<Shared>,
}

impl Scheduler {
    /// Empty queues, one for each CPU of the platform.
    pub fn new(platform: Arc<dyn Platform>) -> Scheduler {
        let workers = (0..platform.cpus().max(1))
            .map(|_| Worker {
                queue: Mutex::new(Rank::RunQueue, Queue::default()),
                waiting: AtomicUsize::new(0),
                idle: AtomicBool::new(false),
                armed: AtomicBool::new(false),
                arming: Mutex::new(Rank::Leaf, ()),
                resched: AtomicBool::new(false),
                slice_start: AtomicU64::new(0),
                running_vruntime: AtomicU64::new(u64::MAX),
                last: AtomicUsize::new(0),
                switches: AtomicU64::new(0),
                user: AtomicU64::new(0),
                system: AtomicU64::new(0),
            })
            .collect();
        Scheduler { shared: Arc::new(Shared { platform, workers, shutdown: AtomicBool::new(false) }) }
    }

    /// Nanoseconds that `cpu` has spent in the guest and in the sentry for tasks, up to their last turns.
    pub fn cpu_times(&self, cpu: usize) -> (u64, u64) {
        let worker = self.shared.workers.get(cpu);
        worker.map_or((0, 0), |w| (w.user.load(Ordering::Relaxed), w.system.load(Ordering::Relaxed)))
    }

    /// Number of workers.
    pub fn cpus(&self) -> usize {
        self.shared.workers.len()
    }

    /// Tasks that run or wait for a CPU (procs_running of /proc/stat).
    pub fn runnable(&self) -> usize {
        self.shared
            .workers
            .iter()
            .map(|w| {
                w.waiting.load(Ordering::Relaxed) + usize::from(w.running_vruntime.load(Ordering::Relaxed) != u64::MAX)
            })
            .sum()
    }

    /// Switches from one task to another so far, all workers together.
    pub fn context_switches(&self) -> u64 {
        self.shared.workers.iter().map(|w| w.switches.load(Ordering::Relaxed)).sum()
    }

    /// Starts `future`, scheduled by `entity`'s parameters.
    pub fn spawn(&self, entity: Arc<Entity>, future: impl Future<Output = ()> + Send + 'static) {
        let shared = self.shared.clone();
        let schedule = move |ready: Ready, info: ScheduleInfo| shared.enqueue(ready, info.woken_while_running);
        let future =
            Accounted { inner: Box::pin(future), entity: entity.clone(), platform: self.shared.platform.clone() };
        let (ready, task) = Builder::new().metadata(entity).spawn(|_| future, WithInfo(schedule));
        task.detach();
        ready.schedule();
    }

    /// The loop of worker `cpu`; returns after [`Scheduler::shutdown`].
    pub fn run_worker(&self, cpu: usize) {
        CPU.set(Some(cpu));
        self.shared.run(cpu);
        CPU.set(None);
    }

    /// Makes all workers return.
    pub fn shutdown(&self) {
        self.shared.shutdown.store(true, Ordering::SeqCst);
        for cpu in 0..self.shared.workers.len() {
            self.shared.platform.unpark(cpu);
            self.shared.platform.kick(cpu);
        }
    }

    /// Whether the task that runs on the calling worker should give it up now. Cheap when nobody waits.
    pub fn should_yield(&self, entity: &Entity) -> bool {
        let Some(cpu) = current_cpu() else { return false };
        if self.shared.shutdown.load(Ordering::Relaxed) || !entity.may_run_on(cpu) {
            return true;
        }
        let Some(worker) = self.shared.workers.get(cpu) else { return false };
        if worker.waiting.load(Ordering::SeqCst) == 0 {
            return false;
        }
        if worker.resched.swap(false, Ordering::SeqCst) {
            return true;
        }
        let ran = self.shared.platform.monotonic().saturating_sub(worker.slice_start.load(Ordering::Relaxed));
        // The deadline's clock and this one differ a little, and an almost equal deadline is not set anew.
        ran >= SLICE - SLICE / 4
    }

    /// Whether a task waits for the calling worker.
    pub fn somebody_waits(&self) -> bool {
        current_cpu()
            .and_then(|cpu| self.shared.workers.get(cpu))
            .is_some_and(|w| w.waiting.load(Ordering::SeqCst) != 0)
    }

    /// The task on the calling worker is about to enter the guest: arms preemption if somebody waits, disarms it if not.
    pub fn before_enter(&self) {
        if let Some(cpu) = current_cpu() {
            self.shared.adjust_preemption(cpu);
        }
    }
}

impl Shared {
    fn adjust_preemption(&self, cpu: usize) {
        let Some(worker) = self.workers.get(cpu) else { return };
        loop {
            let waits = worker.waiting.load(Ordering::SeqCst) != 0;
            if waits == worker.armed.load(Ordering::SeqCst) {
                return;
            }
            let order = worker.arming.lock();
            if worker.armed.swap(waits, Ordering::SeqCst) == waits {
                return;
            }
            let left = waits.then(|| {
                let ran = self.platform.monotonic().saturating_sub(worker.slice_start.load(Ordering::Relaxed));
                SLICE.saturating_sub(ran).max(1)
            });
            self.platform.set_preemption(cpu, left);
            drop(order);
            // Somebody may have queued and armed in between; look again.
        }
    }

    fn disarm(&self, cpu: usize, worker: &Worker) {
        if worker.armed.load(Ordering::SeqCst) {
            let _order = worker.arming.lock();
            if worker.armed.swap(false, Ordering::SeqCst) {
                self.platform.set_preemption(cpu, None);
            }
        }
    }

    fn idle_worker(&self, entity: &Entity, first: usize) -> Option<usize> {
        let n = self.workers.len();
        (0..n)
            .map(|i| (first + i) % n)
            .find(|&cpu| self.workers[cpu].idle.load(Ordering::SeqCst) && entity.may_run_on(cpu))
    }

    fn choose(&self, entity: &Entity, yielded: bool) -> usize {
        let n = self.workers.len();
        let last = entity.last_cpu().min(n - 1);
        if yielded && let Some(cpu) = current_cpu().filter(|&c| c < n && entity.may_run_on(c)) {
            return cpu;
        }
        if let Some(cpu) = self.idle_worker(entity, last) {
            return cpu;
        }
        if entity.may_run_on(last) {
            return last;
        }
        (0..n).find(|&cpu| entity.may_run_on(cpu)).unwrap_or(last)
    }

    fn enqueue(&self, ready: Ready, yielded: bool) {
        let entity = ready.metadata().clone();
        let cpu = self.choose(&entity, yielded);
        let Some(worker) = self.workers.get(cpu) else { return };
        let mut vruntime = entity.vruntime.load(Ordering::Relaxed);
        {
            let mut q = worker.queue.lock();
            if !yielded {
                vruntime = vruntime.max(q.min_vruntime.saturating_sub(SLEEPER_BONUS));
                // Virtual time of another queue may be far ahead; it means nothing here.
                vruntime = vruntime.min(q.min_vruntime.saturating_add(2 * SLICE));
                entity.vruntime.store(vruntime, Ordering::Relaxed);
            }
            q.next += 1;
            let key = (vruntime, q.next);
            q.ready.insert(key, ready);
            worker.waiting.store(q.ready.len(), Ordering::SeqCst);
        }
        if worker.idle.swap(false, Ordering::SeqCst) {
            self.platform.unpark(cpu);
            return;
        }
        if let Some(other) = self.idle_worker(&entity, cpu)
            && !yielded
            && self.workers[other].idle.swap(false, Ordering::SeqCst)
        {
            // It will steal, unless it finds something else first.
            self.platform.unpark(other);
            self.adjust_preemption(cpu);
            return;
        }
        let running = worker.running_vruntime.load(Ordering::Relaxed);
        if running != u64::MAX && !yielded {
            let ran = self.platform.monotonic().saturating_sub(worker.slice_start.load(Ordering::Relaxed));
            if vruntime.saturating_add(WAKE_GRANULARITY) < running.saturating_add(ran) {
                worker.resched.store(true, Ordering::SeqCst);
                if current_cpu() != Some(cpu) {
                    self.platform.kick(cpu);
                }
                return;
            }
        }
        if current_cpu() != Some(cpu) {
            self.adjust_preemption(cpu);
        }
    }

    fn pop(&self, cpu: usize) -> Option<Ready> {
        let worker = self.workers.get(cpu)?;
        let mut q = worker.queue.lock();
        let ((vruntime, _), ready) = q.ready.pop_first()?;
        q.min_vruntime = q.min_vruntime.max(vruntime);
        worker.waiting.store(q.ready.len(), Ordering::SeqCst);
        Some(ready)
    }

    fn steal(&self, cpu: usize) -> Option<Ready> {
        let n = self.workers.len();
        for i in 1..n {
            let victim = &self.workers[(cpu + i) % n];
            if victim.waiting.load(Ordering::SeqCst) == 0 {
                continue;
            }
            let mut q = victim.queue.lock();
            let Some(key) =
                q.ready.iter().take(STEAL_SCAN).find(|(_, r)| r.metadata().may_run_on(cpu)).map(|(k, _)| *k)
            else {
                continue;
            };
            let ready = q.ready.remove(&key);
            victim.waiting.store(q.ready.len(), Ordering::SeqCst);
            let lag = key.0.saturating_sub(q.min_vruntime).min(2 * SLICE);
            drop(q);
            if let Some(ready) = ready {
                let mine = self.workers[cpu].queue.lock().min_vruntime;
                ready.metadata().vruntime.store(mine.saturating_add(lag), Ordering::Relaxed);
                return Some(ready);
            }
        }
        None
    }

    fn run(&self, cpu: usize) {
        let Some(worker) = self.workers.get(cpu) else { return };
        while !self.shutdown.load(Ordering::SeqCst) {
            if let Some(ready) = self.pop(cpu).or_else(|| self.steal(cpu)) {
                self.run_one(cpu, worker, ready);
                continue;
            }
            worker.idle.store(true, Ordering::SeqCst);
            // Whoever queues something now sees the flag; whoever did before is found here.
            if let Some(ready) = self.pop(cpu).or_else(|| self.steal(cpu)) {
                worker.idle.store(false, Ordering::SeqCst);
                self.run_one(cpu, worker, ready);
                continue;
            }
            if self.shutdown.load(Ordering::SeqCst) {
                break;
            }
            self.disarm(cpu, worker);
            self.platform.park(cpu);
            worker.idle.store(false, Ordering::SeqCst);
        }
        // Futures are dropped outside the lock: they own whatever their tasks own.
        let rest = core::mem::take(&mut worker.queue.lock().ready);
        drop(rest);
    }

    fn run_one(&self, cpu: usize, worker: &Worker, ready: Ready) {
        let entity = ready.metadata().clone();
        let start = self.platform.monotonic();
        let vruntime = entity.vruntime.load(Ordering::Relaxed);
        entity.last_cpu.store(cpu, Ordering::Relaxed);
        let identity = Arc::as_ptr(&entity).addr();
        if worker.last.swap(identity, Ordering::Relaxed) != identity {
            worker.switches.fetch_add(1, Ordering::Relaxed);
        }
        worker.slice_start.store(start, Ordering::Relaxed);
        worker.running_vruntime.store(vruntime, Ordering::Relaxed);
        worker.resched.store(false, Ordering::SeqCst);
        self.disarm(cpu, worker);
        let before = entity.clock.times(start);
        let rescheduled = ready.run();
        // The task may already run elsewhere: what it uses there is counted here, which only shifts it between CPUs.
        let after = entity.clock.times(self.platform.monotonic());
        worker.user.fetch_add(after.0.saturating_sub(before.0), Ordering::Relaxed);
        worker.system.fetch_add(after.1.saturating_sub(before.1), Ordering::Relaxed);
        entity.clock.count_switch(!rescheduled);
        worker.running_vruntime.store(u64::MAX, Ordering::Relaxed);
    }
}

/// A task's future with its books: CPU time is counted inside the poll, where no other worker can have the task.
struct Accounted<F> {
    inner: Pin<Box<F>>,
    entity: Arc<Entity>,
    platform: Arc<dyn Platform>,
}

impl<F: Future<Output = ()>> Future for Accounted<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let start = self.platform.monotonic();
        self.entity.clock.start(start);
        let result = self.inner.as_mut().poll(cx);
        let now = self.platform.monotonic();
        self.entity.clock.stop(now);
        let ran = self.entity.weighted(now.saturating_sub(start));
        self.entity.vruntime.fetch_add(ran, Ordering::Relaxed);
        result
    }
}

/// Gives the worker to whoever waits for it; see sched_yield(2).
pub fn yield_now() -> impl Future<Output = ()> + Send {
    Yield { done: false }
}

struct Yield {
    done: bool,
}

impl Future for Yield {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.done {
            return Poll::Ready(());
        }
        self.done = true;
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}
