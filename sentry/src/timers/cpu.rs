//! CPU-time alarms of tasks and groups: interval timers and POSIX timers on CPU clocks, RLIMIT_CPU. Without ticks: while the owner of
//! a clock runs, one wall-clock alarm is set for the earliest moment at which it could reach its next point; while it does not run
//! there is none. Owns the lists; never what expires.
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};
use std::sync::{Arc, Weak};

use super::clock::{CpuClock, CpuOwner, CpuPart, SECOND};
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::signal::{Sender, Signal, info, send_to_group};
use crate::task::limits::Resource;
use crate::task::{Task, ThreadGroup};
use crate::time::Nanos;
use crate::time::timer::{Armed, TimerTarget};

/// Looks at one owner's clock are at least this far apart: a period of a microsecond must not become a storm. Linux looks at its ticks.
const QUANTUM: Nanos = 1_000_000;

/// The order of alarms: user time apart from the whole, then by the point on the clock.
type Key = (bool, Nanos, u64);

#[derive(Default)]
struct State {
    next_key: u64,
    entries: BTreeMap<Key, Arc<dyn TimerTarget>>,
    wall: Option<Armed>,
    /// The next look is not before this.
    not_before: Nanos,
}

const IDLE: u8 = 0;
const WATCHING: u8 = 1;
/// There are alarms, but the owner did not run when last looked at.
const DORMANT: u8 = 2;

/// CPU-time alarms of one task or one group.
pub struct CpuAlarms {
    mode: AtomicU8,
    state: Mutex<State>,
}

impl Default for CpuAlarms {
    fn default() -> Self {
        CpuAlarms { mode: AtomicU8::new(IDLE), state: Mutex::new(Rank::TimerState, State::default()) }
    }
}

/// An owner that may be gone by the time of a look: the alarms belong to it.
#[derive(Clone)]
enum WeakOwner {
    Task(Weak<Task>),
    Group(Weak<ThreadGroup>),
}

impl WeakOwner {
    fn upgrade(&self) -> Option<CpuOwner> {
        match self {
            WeakOwner::Task(t) => t.upgrade().map(CpuOwner::Task),
            WeakOwner::Group(g) => g.upgrade().map(CpuOwner::Group),
        }
    }
}

impl CpuOwner {
    fn downgrade(&self) -> WeakOwner {
        match self {
            CpuOwner::Task(t) => WeakOwner::Task(Arc::downgrade(t)),
            CpuOwner::Group(g) => WeakOwner::Group(Arc::downgrade(g)),
        }
    }

    fn alarms(&self) -> &CpuAlarms {
        match self {
            CpuOwner::Task(t) => &t.cpu_alarms,
            CpuOwner::Group(g) => &g.timers.cpu,
        }
    }

    /// How many CPUs its clock runs on now.
    fn running(&self) -> u64 {
        match self {
            CpuOwner::Task(t) => t.sched.clock.is_running().into(),
            CpuOwner::Group(g) => g.cpu_clock.running(),
        }
    }
}

/// An armed CPU-time alarm; disarmed on drop.
pub struct CpuArmed {
    owner: WeakOwner,
    key: Key,
}

impl Drop for CpuArmed {
    fn drop(&mut self) {
        let Some(owner) = self.owner.upgrade() else { return };
        let alarms = owner.alarms();
        let mut state = alarms.state.lock_nested();
        let old = state.entries.remove(&self.key);
        if state.entries.is_empty() {
            state.wall = None;
            alarms.mode.store(IDLE, Ordering::SeqCst);
        }
        drop(state);
        drop(old);
    }
}

/// An alarm's target that a sleeping task waits for.
pub struct Bell {
    rung: AtomicBool,
    /// Fires (IN) when it rings.
    pub queue: Arc<WaitQueue>,
}

impl Bell {
    /// Has not rung.
    pub fn new() -> Arc<Bell> {
        Arc::new(Bell { rung: AtomicBool::new(false), queue: WaitQueue::new() })
    }

    /// Whether it has.
    pub fn rung(&self) -> bool {
        self.rung.load(Ordering::SeqCst)
    }
}

impl TimerTarget for Bell {
    fn fire(&self, _at: Nanos) {
        self.rung.store(true, Ordering::SeqCst);
        self.queue.wake(Events::READABLE);
    }
}

struct Look(WeakOwner);

impl TimerTarget for Look {
    fn fire(&self, _at: Nanos) {
        if let Some(owner) = self.0.upgrade() {
            look(&owner);
        }
    }
}

/// Tells `target` when `clock` reaches `at`.
pub fn arm(clock: &CpuClock, at: Nanos, target: Arc<dyn TimerTarget>) -> CpuArmed {
    let owner = &clock.owner;
    let mut state = owner.alarms().state.lock_nested();
    state.next_key += 1;
    let key = (clock.part == CpuPart::Virtual, at, state.next_key);
    state.entries.insert(key, target);
    plan(owner, &mut state, owner.kernel().timers.now());
    drop(state);
    wake_dormant(owner);
    CpuArmed { owner: owner.downgrade(), key }
}

/// The nearest alarm of each kind of time.
fn first(state: &State) -> impl Iterator<Item = Key> {
    let total = state.entries.range(..(true, 0, 0)).next();
    let user = state.entries.range((true, 0, 0)..).next();
    total.into_iter().chain(user).map(|(key, _)| *key)
}

/// Sets the wall-clock alarm for the next look.
fn plan(owner: &CpuOwner, state: &mut State, now: Nanos) {
    let (user, system) = owner.times(now);
    let running = owner.running();
    let left = first(state).map(|(virt, at, _)| at.saturating_sub(if virt { user } else { user + system })).min();
    let (mode, wall) = match left {
        None => (IDLE, None),
        Some(0) => (WATCHING, Some(now)),
        Some(_) if running == 0 => (DORMANT, None),
        Some(left) => (WATCHING, Some(now.saturating_add(left.div_ceil(running)))),
    };
    state.wall = wall.map(|at| {
        let look = Arc::new(Look(owner.downgrade()));
        owner.kernel().timers.arm_target(at.max(state.not_before), look)
    });
    owner.alarms().mode.store(mode, Ordering::SeqCst);
}

/// Tells what is due and plans the next look.
fn look(owner: &CpuOwner) {
    let now = owner.kernel().timers.now();
    let mut due = Vec::new();
    {
        let mut state = owner.alarms().state.lock();
        let (user, system) = owner.times(now);
        let reached = |k: &Key| k.1 <= if k.0 { user } else { user + system };
        loop {
            let key = first(&state).find(reached);
            let Some(target) = key.and_then(|k| state.entries.remove(&k)) else { break };
            due.push(target);
        }
        state.not_before = now.saturating_add(QUANTUM);
        plan(owner, &mut state, now);
    }
    for target in due {
        target.fire(now);
    }
    wake_dormant(owner);
}

/// A task that started between the readings and the change of mode has not seen the mode.
fn wake_dormant(owner: &CpuOwner) {
    let alarms = owner.alarms();
    if alarms.mode.load(Ordering::SeqCst) != DORMANT {
        return;
    }
    fence(Ordering::SeqCst);
    if owner.running() != 0 {
        let mut state = alarms.state.lock_nested();
        if state.wall.is_none() {
            plan(owner, &mut state, owner.kernel().timers.now());
        }
    }
}

/// `task` enters the guest: its CPU clocks run from now on. The caller has started the task's clock.
pub fn task_runs(task: &Arc<Task>) {
    let (own, group) = (&task.cpu_alarms, &task.group().timers.cpu);
    if own.mode.load(Ordering::Relaxed) == IDLE && group.mode.load(Ordering::Relaxed) == IDLE {
        return;
    }
    // The clock's start must be visible before the mode is judged: whoever sets it looks at the clocks after it.
    fence(Ordering::SeqCst);
    if own.mode.load(Ordering::SeqCst) == DORMANT {
        look(&CpuOwner::Task(task.clone()));
    }
    if group.mode.load(Ordering::SeqCst) == DORMANT {
        look(&CpuOwner::Group(task.group().clone()));
    }
}

struct LimitWatch(Weak<ThreadGroup>);

impl TimerTarget for LimitWatch {
    fn fire(&self, _at: Nanos) {
        let Some(group) = self.0.upgrade() else { return };
        let mut limit = group.limit(Resource::Cpu);
        let (user, system) = group.cpu_clock.times(group.kernel().timers.now());
        let used = user + system;
        if limit.max != u64::MAX && used >= limit.max.saturating_mul(SECOND) {
            group.begin_exit(Signal::SIGKILL.number());
            return;
        }
        if used >= limit.cur.saturating_mul(SECOND) {
            // A standard signal is marked even at the limit of queued ones.
            let _ = send_to_group(&group, Signal::SIGXCPU, info::kernel(Signal::SIGXCPU), Sender::Event);
            // As Linux has it, getrlimit(2) shows where the next one will come.
            limit.cur = limit.cur.saturating_add(1);
            group.set_limit(Resource::Cpu, limit);
        }
        watch_limit(&group);
    }
}

/// Watches RLIMIT_CPU: SIGXCPU at the soft limit and every second after it, SIGKILL at the hard one. Call it when the limit has changed and
/// for a new group.
pub fn watch_limit(group: &Arc<ThreadGroup>) {
    let limit = group.limit(Resource::Cpu);
    let at = limit.cur.min(limit.max);
    let armed = (at != u64::MAX).then(|| {
        let clock = CpuClock { owner: CpuOwner::Group(group.clone()), part: CpuPart::Sched };
        arm(&clock, at.saturating_mul(SECOND), Arc::new(LimitWatch(Arc::downgrade(group))))
    });
    let old = core::mem::replace(&mut *group.timers.cpu_limit.lock(), armed);
    drop(old);
}
