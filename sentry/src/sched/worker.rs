//! Workers: the run queues and the loop of a host thread with a vCPU.
use core::cell::Cell;
use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use async_task::{Builder, Runnable, ScheduleInfo, WithInfo};

use super::Entity;
use crate::lock::{Mutex, Rank};
use crate::platform::Platform;
use crate::time::Nanos;

type Ready = Runnable<Arc<Entity>>;

/// How long a task runs while another of its kind waits.
const SLICE: Nanos = 4_000_000;
/// The same for SCHED_RR among equals (sched_rr_get_interval(2)).
const RR_SLICE: Nanos = 100_000_000;
/// A woken task that is this far behind the running one replaces it, once that has run for as long: a wake of many must not make each of
/// them run before the waker can go on.
const WAKE_GRANULARITY: u64 = 1_000_000;
/// Of each period real-time tasks get at most so much while others wait (sched(7): sched_rt_period_us, sched_rt_runtime_us).
const RT_PERIOD: Nanos = 1_000_000_000;
const RT_RUNTIME: Nanos = 950_000_000;
/// Entries a thief looks at in one queue.
const STEAL_SCAN: usize = 32;

/// Its number.
const SCHED_YIELD: u16 = linux_raw_sys::general::__NR_sched_yield as u16;

thread_local! {
    static CPU: Cell<Option<usize>> = const { Cell::new(None) };
    /// The worker whose task the calling thread serves.
    static SERVED: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The worker that the calling host thread is.
pub fn current_cpu() -> Option<usize> {
    CPU.get()
}

/// Runs `f`, a call of the task that is in the guest on worker `cpu`: what it wakes stays near that worker, not the calling one.
pub fn on_behalf_of<R>(cpu: usize, f: impl FnOnce() -> R) -> R {
    let outer = SERVED.replace(Some(cpu));
    let result = f();
    SERVED.set(outer);
    result
}

/// The order of a queue: class (real-time ones by priority, then all others), virtual run time within it, then turn.
pub(super) type Key = (u32, u64, i64);

#[derive(Default)]
struct Queue {
    ready: BTreeMap<Key, Ready>,
    /// Turns for the tail and, counting down, for the head.
    tail: i64,
    head: i64,
    min_vruntime: u64,
}

struct Worker {
    queue: Mutex<Queue>,
    /// Length of the queue.
    waiting: AtomicUsize,
    /// Parked or about to be. Whoever resets it must unpark.
    idle: AtomicBool,
    /// Tasks that were made to wait so.
    kept: AtomicU64,
    /// The preemption deadline that is set, or was: one that nobody needs any more is left to pass.
    armed: AtomicU64,
    /// Makes a change of `armed` and of the platform's deadline one step.
    arming: Mutex<()>,
    /// When the running task is to give way to one that waits.
    due: AtomicU64,
    /// When the running task was picked.
    slice_start: AtomicU64,
    /// Its virtual run time at that moment.
    running_vruntime: AtomicU64,
    /// Its weight.
    running_weight: AtomicU64,
    /// Its precedence; IDLE if nothing runs.
    running_class: AtomicU32,
    /// Begin of the period, and CPU time that real-time tasks have had in it.
    rt_period: AtomicU64,
    rt_used: AtomicU64,
    /// Identity of the entity that ran last, for counting switches.
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
    /// For each worker whether a task waits for another though this one was idle: it served too many calls to be called away.
    owed: Arc<[AtomicBool]>,
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
                kept: AtomicU64::new(0),
                armed: AtomicU64::new(0),
                arming: Mutex::new(Rank::Leaf, ()),
                due: AtomicU64::new(u64::MAX),
                slice_start: AtomicU64::new(0),
                running_vruntime: AtomicU64::new(0),
                running_weight: AtomicU64::new(1024),
                running_class: AtomicU32::new(IDLE),
                rt_period: AtomicU64::new(0),
                rt_used: AtomicU64::new(0),
                last: AtomicUsize::new(0),
                switches: AtomicU64::new(0),
                user: AtomicU64::new(0),
                system: AtomicU64::new(0),
            })
            .collect();
        let owed = (0..platform.cpus().max(1)).map(|_| AtomicBool::new(false)).collect();
        Scheduler { shared: Arc::new(Shared { platform, workers, owed, shutdown: AtomicBool::new(false) }) }
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
            .map(|w| w.waiting.load(Ordering::Relaxed) + usize::from(w.running_class.load(Ordering::Relaxed) != IDLE))
            .sum()
    }

    /// Switches from one task to another so far, all workers together.
    pub fn context_switches(&self) -> u64 {
        self.shared.workers.iter().map(|w| w.switches.load(Ordering::Relaxed)).sum()
    }

    /// How often `cpu` has changed its task: equal numbers mean that nobody else ran there between.
    pub fn turns(&self, cpu: usize) -> u64 {
        self.shared.workers.get(cpu).map_or(0, |w| w.switches.load(Ordering::Relaxed))
    }

    /// Whether a task that `cpu` may run waits for another worker because `cpu` keeps tasks away; see
    /// [`crate::platform::Platform::keeps_tasks_away`].
    pub fn task_waits_for_others(&self, cpu: usize) -> bool {
        let Some(owed) = self.shared.owed.get(cpu) else { return false };
        if !owed.load(Ordering::SeqCst) {
            return false;
        }
        // Whoever sets the mark has queued its task before: what is queued now is seen, and what comes later sets it again.
        owed.store(false, Ordering::SeqCst);
        let waits = self.shared.workers.iter().any(|w| w.waiting.load(Ordering::SeqCst) != 0);
        if waits {
            owed.store(true, Ordering::SeqCst);
        }
        waits
    }

    /// For each worker whether [`Scheduler::task_waits_for_others`] is worth asking: for whoever looks at it all the time.
    pub fn owed(&self) -> Arc<[AtomicBool]> {
        self.shared.owed.clone()
    }

    /// Tasks that waited for the worker of whoever woke them while another, idle one, served its calls.
    pub fn kept_near(&self) -> u64 {
        self.shared.workers.iter().map(|w| w.kept.load(Ordering::Relaxed)).sum()
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
        let due = worker.due.load(Ordering::SeqCst);
        if due == 0 {
            return true;
        }
        // The deadline's clock and this one differ a little, and an almost equal deadline is not set anew.
        let over = self.shared.platform.monotonic() >= due.saturating_sub(TOLERANCE);
        if over && entity.is_round_robin() {
            entity.let_pass();
        }
        over
    }

    /// Lets the parameters of a task take effect that have changed: if it waits for a CPU it is queued anew, if it runs the worker looks
    /// again whose turn it is.
    pub fn requeue(&self, entity: &Entity) {
        let Some((cpu, key)) = entity.queued() else {
            let cpu = entity.last_cpu();
            if entity.clock.is_running()
                && let Some(worker) = self.shared.workers.get(cpu)
            {
                worker.due.store(0, Ordering::SeqCst);
                if current_cpu() != Some(cpu) {
                    self.shared.platform.kick(cpu);
                }
            }
            return;
        };
        let Some(worker) = self.shared.workers.get(cpu) else { return };
        let ready = {
            let mut q = worker.queue.lock();
            // Keys are used once: what stands there is the same task.
            let ready = q.ready.remove(&key);
            worker.waiting.store(q.ready.len(), Ordering::SeqCst);
            ready
        };
        if let Some(ready) = ready {
            self.shared.enqueue(ready, false);
        }
    }

    /// Whether a task waits for the calling worker.
    pub fn somebody_waits(&self) -> bool {
        current_cpu()
            .and_then(|cpu| self.shared.workers.get(cpu))
            .is_some_and(|w| w.waiting.load(Ordering::SeqCst) != 0)
    }

    /// The task on the calling worker is about to enter the guest: arms preemption if somebody waits.
    pub fn before_enter(&self) {
        if let Some(cpu) = current_cpu() {
            self.shared.adjust_preemption(cpu);
        }
    }
}

/// Precedence of a worker on which nothing runs: everything comes before it.
const IDLE: u32 = u32::MAX;
/// How far the clocks of deadlines and of this module may differ.
const TOLERANCE: Nanos = SLICE / 8;

impl Worker {
    fn is_idle_now(&self) -> bool {
        self.idle.load(Ordering::SeqCst)
    }

    /// Puts a task into the queue of this worker, that of `cpu`; gives its virtual run time there.
    fn insert(&self, cpu: usize, ready: Ready, yielded: bool) -> u64 {
        let entity = ready.metadata().clone();
        let passes = entity.passes();
        let mut vruntime = entity.vruntime.load(Ordering::Relaxed);
        let mut q = self.queue.lock();
        let fair = q.min_vruntime;
        if entity.is_realtime() {
            vruntime = 0;
        } else if !yielded {
            // Sleep does not store up CPU time.
            vruntime = vruntime.max(fair);
            // Virtual time of another queue may be far ahead; it means nothing here.
            vruntime = vruntime.min(fair.saturating_add(2 * SLICE));
            entity.vruntime.store(vruntime, Ordering::Relaxed);
        } else if passes && let Some((&(class, first, _), _)) = q.ready.first_key_value() {
            // sched_yield(2): behind the one that has waited longest.
            if class == Entity::FAIR && first > vruntime {
                vruntime = first;
                entity.vruntime.store(vruntime, Ordering::Relaxed);
            }
        }
        // A preempted real-time task stays the first of its priority.
        let turn = if entity.is_realtime() && yielded && !passes {
            q.head -= 1;
            q.head
        } else {
            q.tail += 1;
            q.tail
        };
        let key = (entity.class(), vruntime, turn);
        entity.set_queued(Some((cpu, key)));
        q.ready.insert(key, ready);
        self.waiting.store(q.ready.len(), Ordering::SeqCst);
        vruntime
    }

    /// Takes real-time tasks' time into account; gives what is left to them in this period.
    fn rt_left(&self, now: Nanos) -> Nanos {
        if now.saturating_sub(self.rt_period.load(Ordering::Relaxed)) >= RT_PERIOD {
            self.rt_period.store(now, Ordering::Relaxed);
            self.rt_used.store(0, Ordering::Relaxed);
        }
        RT_RUNTIME.saturating_sub(self.rt_used.load(Ordering::Relaxed))
    }
}

impl Shared {
    /// Sets the deadline at which the running task of `cpu` gives way, if somebody waits and none is set that comes early enough. One
    /// that has become needless or too early stays: it costs an exit at most once a slice, taking it back would cost a host call a switch.
    fn adjust_preemption(&self, cpu: usize) {
        let Some(worker) = self.workers.get(cpu) else { return };
        if worker.waiting.load(Ordering::SeqCst) == 0 {
            return;
        }
        let now = self.platform.monotonic();
        let needed = |due: Nanos| {
            let armed = worker.armed.load(Ordering::SeqCst);
            armed <= now.saturating_add(TOLERANCE) || armed > due.saturating_add(TOLERANCE)
        };
        if !needed(worker.due.load(Ordering::SeqCst)) {
            return;
        }
        let _order = worker.arming.lock();
        let due = worker.due.load(Ordering::SeqCst);
        if needed(due) {
            let left = due.saturating_sub(now).max(1);
            worker.armed.store(now.saturating_add(left), Ordering::SeqCst);
            self.platform.set_preemption(cpu, Some(left));
        }
    }

    fn disarm(&self, cpu: usize, worker: &Worker) {
        if worker.armed.load(Ordering::SeqCst) != 0 {
            let _order = worker.arming.lock();
            if worker.armed.swap(0, Ordering::SeqCst) != 0 {
                self.platform.set_preemption(cpu, None);
            }
        }
    }

    /// An idle worker for the task, one that keeps tasks away only if there is no other.
    fn idle_worker(&self, entity: &Entity, first: usize) -> Option<(usize, bool)> {
        let n = self.workers.len();
        let mut serving = None;
        for cpu in (0..n).map(|i| (first + i) % n) {
            if self.workers[cpu].is_idle_now() && entity.may_run_on(cpu) {
                if !self.platform.keeps_tasks_away(cpu) {
                    return Some((cpu, false));
                }
                serving = Some((cpu, true));
            }
        }
        serving
    }

    /// The worker near which a task stays that it wakes, or whose task does: if it runs something, and may run `entity`.
    fn waking_worker(&self, entity: &Entity) -> Option<usize> {
        let cpu = SERVED.get().or(current_cpu())?;
        let fits = !self.workers.get(cpu)?.is_idle_now() && !entity.is_realtime() && entity.may_run_on(cpu);
        fits.then_some(cpu)
    }

    fn choose(&self, entity: &Entity, yielded: bool) -> usize {
        let n = self.workers.len();
        let last = entity.last_cpu().min(n - 1);
        if yielded && let Some(cpu) = current_cpu().filter(|&c| c < n && entity.may_run_on(c)) {
            return cpu;
        }
        if let Some((idle, serves)) = self.idle_worker(entity, last) {
            return self.waking_worker(entity).filter(|_| serves).unwrap_or(idle);
        }
        if entity.is_realtime() {
            // Where the least urgent task runs; its own last place among equals.
            let allowed = (0..n).map(|i| (last + i) % n).filter(|&cpu| entity.may_run_on(cpu));
            let class = |cpu: &usize| core::cmp::Reverse(self.workers[*cpu].running_class.load(Ordering::Relaxed));
            return allowed.min_by_key(class).unwrap_or(last);
        }
        if entity.may_run_on(last) {
            return last;
        }
        (0..n).find(|&cpu| entity.may_run_on(cpu)).unwrap_or(last)
    }

    /// Lets the idle worker `cpu` go on serving while a task that it may run waits. False if it stops doing so.
    fn keep(&self, cpu: usize, entity: &Entity) -> bool {
        let (Some(worker), Some(owed)) = (self.workers.get(cpu), self.owed.get(cpu)) else { return false };
        if self.waking_worker(entity).is_none() {
            return false;
        }
        owed.store(true, Ordering::SeqCst);
        // It stops before it asks whether something is owed.
        let keeps = self.platform.keeps_tasks_away(cpu);
        if keeps {
            worker.kept.fetch_add(1, Ordering::Relaxed);
        }
        keeps
    }

    fn enqueue(&self, ready: Ready, yielded: bool) {
        let entity = ready.metadata().clone();
        let cpu = self.choose(&entity, yielded);
        let Some(worker) = self.workers.get(cpu) else { return };
        let vruntime = worker.insert(cpu, ready, yielded);
        // Somebody waits: a yield of the task in the guest is no longer nothing.
        self.platform.set_answer(cpu, SCHED_YIELD, None);
        if worker.idle.swap(false, Ordering::SeqCst) {
            self.platform.unpark(cpu);
            return;
        }
        if let Some((other, serves)) = self.idle_worker(&entity, cpu)
            && !yielded
            && !(serves && self.keep(other, &entity))
            && self.workers[other].idle.swap(false, Ordering::SeqCst)
        {
            // It will steal, unless it finds something else first.
            self.platform.unpark(other);
            self.adjust_preemption(cpu);
            return;
        }
        let running = worker.running_class.load(Ordering::Relaxed);
        if running != IDLE && !yielded {
            let start = worker.slice_start.load(Ordering::Relaxed);
            let now = self.platform.monotonic();
            if entity.precedence() < running {
                // More urgent, or the running one is SCHED_IDLE.
                worker.due.store(0, Ordering::SeqCst);
            } else if running == entity.precedence() && running >= Entity::FAIR && !entity.is_batch() {
                let weight = worker.running_weight.load(Ordering::Relaxed);
                let ran = super::entity::weighted(now.saturating_sub(start), weight);
                let ahead = worker.running_vruntime.load(Ordering::Relaxed).saturating_add(ran);
                if vruntime.saturating_add(WAKE_GRANULARITY) < ahead {
                    worker.due.fetch_min(start.saturating_add(WAKE_GRANULARITY), Ordering::SeqCst);
                }
            }
            if worker.due.load(Ordering::SeqCst) <= now {
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

    /// The key of the task to run next on `cpu`: the first, unless it is a real-time task whose share of the period is used up while
    /// others wait.
    fn next(&self, worker: &Worker, q: &Queue) -> Option<Key> {
        let (&first, _) = q.ready.first_key_value()?;
        if first.0 < Entity::FAIR && worker.rt_left(self.platform.monotonic()) == 0 {
            let fair = q.ready.range((Entity::FAIR, 0, i64::MIN)..).next();
            return Some(fair.map_or(first, |(&key, _)| key));
        }
        Some(first)
    }

    fn pop(&self, cpu: usize) -> Option<Ready> {
        let worker = self.workers.get(cpu)?;
        let mut q = worker.queue.lock();
        let key = self.next(worker, &q)?;
        let ready = q.ready.remove(&key)?;
        if key.0 == Entity::FAIR {
            q.min_vruntime = q.min_vruntime.max(key.1);
        }
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
            let lag = key.1.saturating_sub(q.min_vruntime).min(2 * SLICE);
            drop(q);
            if let Some(ready) = ready {
                if key.0 == Entity::FAIR {
                    let mine = self.workers[cpu].queue.lock().min_vruntime;
                    ready.metadata().vruntime.store(mine.saturating_add(lag), Ordering::Relaxed);
                }
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
        entity.set_queued(None);
        let realtime = entity.is_realtime();
        let slice = match (realtime, entity.is_round_robin()) {
            (false, _) => SLICE,
            (true, round_robin) => {
                let left = worker.rt_left(start).max(SLICE);
                if round_robin { left.min(RR_SLICE) } else { left }
            }
        };
        worker.slice_start.store(start, Ordering::Relaxed);
        worker.running_vruntime.store(vruntime, Ordering::Relaxed);
        worker.running_weight.store(entity.weight(), Ordering::Relaxed);
        worker.running_class.store(entity.precedence(), Ordering::Relaxed);
        worker.due.store(start.saturating_add(slice), Ordering::SeqCst);
        let before = entity.clock.times(start);
        let rescheduled = ready.run();
        // The task may already run elsewhere: what it uses there is counted here, which only shifts it between CPUs.
        let after = entity.clock.times(self.platform.monotonic());
        worker.user.fetch_add(after.0.saturating_sub(before.0), Ordering::Relaxed);
        worker.system.fetch_add(after.1.saturating_sub(before.1), Ordering::Relaxed);
        entity.clock.count_switch(!rescheduled);
        worker.running_class.store(IDLE, Ordering::Relaxed);
        if realtime {
            let ran = self.platform.monotonic().saturating_sub(start);
            worker.rt_used.fetch_add(ran, Ordering::Relaxed);
        }
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
        let start = self.entity.clock.start(|| self.platform.monotonic());
        let result = self.inner.as_mut().poll(cx);
        let now = self.entity.clock.stop(|| self.platform.monotonic());
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

#[cfg(test)]
mod tests;
