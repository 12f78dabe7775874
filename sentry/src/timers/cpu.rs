//! CPU-time alarms of a group: interval timers and POSIX timers on CPU clocks, RLIMIT_CPU. Without ticks: while a task of the group
//! runs, one wall-clock alarm is set for the earliest moment at which a CPU clock could reach its point; while none runs there is none.
//! Owns the list; never what expires.
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

/// No alarm closer than this, so that many small steps towards a point do not become a storm.
const NEAREST: Nanos = 20_000;

/// Whose time an entry watches; weak, since the list belongs to the group itself.
enum Watched {
    Task(Weak<Task>),
    Group,
}

struct Entry {
    watched: Watched,
    part: CpuPart,
    at: Nanos,
    target: Arc<dyn TimerTarget>,
}

#[derive(Default)]
struct State {
    next_key: u64,
    entries: BTreeMap<u64, Entry>,
    wall: Option<Armed>,
}

const IDLE: u8 = 0;
const WATCHING: u8 = 1;
/// There are entries, but no task of the group ran when last looked at.
const DORMANT: u8 = 2;

/// CPU-time alarms of one group.
pub struct CpuAlarms {
    mode: AtomicU8,
    state: Mutex<State>,
    /// The alarm for RLIMIT_CPU.
    limit: Mutex<Option<CpuArmed>>,
}

impl Default for CpuAlarms {
    fn default() -> Self {
        CpuAlarms {
            mode: AtomicU8::new(IDLE),
            state: Mutex::new(Rank::TimerState, State::default()),
            limit: Mutex::new(Rank::Leaf, None),
        }
    }
}

impl CpuAlarms {
    /// Lets go of the watch on RLIMIT_CPU: the group is gone.
    pub fn clear(&self) {
        let old = self.limit.lock().take();
        drop(old);
    }
}

/// An armed CPU-time alarm; disarmed on drop.
pub struct CpuArmed {
    group: Weak<ThreadGroup>,
    key: u64,
}

impl Drop for CpuArmed {
    fn drop(&mut self) {
        let Some(group) = self.group.upgrade() else { return };
        let alarms = &group.timers.cpu;
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

struct Look(Weak<ThreadGroup>);

impl TimerTarget for Look {
    fn fire(&self, _at: Nanos) {
        if let Some(group) = self.0.upgrade() {
            look(&group);
        }
    }
}

/// Tells `target` when `clock` reaches `at`.
pub fn arm(clock: &CpuClock, at: Nanos, target: Arc<dyn TimerTarget>) -> CpuArmed {
    let group = clock.group();
    let watched = match &clock.owner {
        CpuOwner::Task(t) => Watched::Task(Arc::downgrade(t)),
        CpuOwner::Group(_) => Watched::Group,
    };
    let alarms = &group.timers.cpu;
    let key = {
        let mut state = alarms.state.lock_nested();
        state.next_key += 1;
        let key = state.next_key;
        state.entries.insert(key, Entry { watched, part: clock.part, at, target });
        // The next look, at the latest when a task of the group goes on, finds the new entry.
        state.wall =
            Some(group.kernel().timers.arm_target(group.kernel().timers.now(), Arc::new(Look(Arc::downgrade(group)))));
        alarms.mode.store(WATCHING, Ordering::SeqCst);
        key
    };
    CpuArmed { group: Arc::downgrade(group), key }
}

struct LimitWatch(Weak<ThreadGroup>);

impl TimerTarget for LimitWatch {
    fn fire(&self, _at: Nanos) {
        let Some(group) = self.0.upgrade() else { return };
        let limit = group.limit(Resource::Cpu);
        let used = group.usage().cpu();
        if limit.max != u64::MAX && used >= limit.max.saturating_mul(SECOND) {
            group.begin_exit(Signal::SIGKILL.number());
            return;
        }
        if used >= limit.cur.saturating_mul(SECOND) {
            // A standard signal is marked even at the limit of queued ones.
            let _ = send_to_group(&group, Signal::SIGXCPU, info::kernel(Signal::SIGXCPU), Sender::Event);
        }
        watch_limit(&group);
    }
}

/// Watches RLIMIT_CPU: SIGXCPU at the soft limit and every second after it, SIGKILL at the hard one. Call it when the limit has changed and
/// for a new group.
pub fn watch_limit(group: &Arc<ThreadGroup>) {
    let limit = group.limit(Resource::Cpu);
    if limit.cur == u64::MAX && limit.max == u64::MAX {
        group.timers.cpu.clear();
        return;
    }
    let used = group.usage().cpu();
    let second = used / SECOND + 1;
    let soft = if limit.cur == u64::MAX { u64::MAX } else { limit.cur.max(second) };
    let at = soft.min(limit.max);
    let armed = (at != u64::MAX).then(|| {
        let clock = CpuClock { owner: CpuOwner::Group(group.clone()), part: CpuPart::Sched };
        arm(&clock, at.saturating_mul(SECOND), Arc::new(LimitWatch(Arc::downgrade(group))))
    });
    let old = core::mem::replace(&mut *group.timers.cpu.limit.lock(), armed);
    drop(old);
}

/// A task of the group enters the guest: its CPU clocks run from now on. The caller has started the task's clock.
pub fn task_runs(task: &Task) {
    let alarms = &task.group().timers.cpu;
    if alarms.mode.load(Ordering::Relaxed) == IDLE {
        return;
    }
    // The clock's start must be visible before the mode is judged: whoever sets it looks at the clocks after it.
    fence(Ordering::SeqCst);
    if alarms.mode.load(Ordering::SeqCst) == DORMANT {
        look(task.group());
    }
}

/// Tells what is due and sets the wall-clock alarm for the next look.
fn look(group: &Arc<ThreadGroup>) {
    let alarms = &group.timers.cpu;
    // Readings take the group's lock, which ranks before the alarms'.
    let tasks = group.tasks();
    let now = group.kernel().timers.now();
    let usage = group.usage();
    let running = tasks.iter().filter(|t| t.sched.clock.is_running()).count();
    let mut due = Vec::new();
    {
        let mut state = alarms.state.lock();
        let mut nearest: Option<Nanos> = None;
        let mut gone = Vec::new();
        for (key, entry) in &state.entries {
            let (usage, may_run) = match &entry.watched {
                Watched::Group => (usage, running),
                Watched::Task(t) => match t.upgrade() {
                    Some(t) if !t.is_dead() => (t.sched.clock.reading(now), usize::from(t.sched.clock.is_running())),
                    _ => continue,
                },
            };
            let reached = if entry.part == CpuPart::Virtual { usage.user } else { usage.cpu() };
            if reached >= entry.at {
                gone.push(*key);
            } else if may_run > 0 {
                let left = (entry.at - reached) / may_run as u64;
                nearest = Some(nearest.map_or(left, |n| n.min(left)));
            }
        }
        for key in gone {
            due.extend(state.entries.remove(&key));
        }
        if state.entries.is_empty() {
            state.wall = None;
            alarms.mode.store(IDLE, Ordering::SeqCst);
        } else if let Some(left) = nearest {
            let at = now.saturating_add(left.max(NEAREST));
            state.wall = Some(group.kernel().timers.arm_target(at, Arc::new(Look(Arc::downgrade(group)))));
            alarms.mode.store(WATCHING, Ordering::SeqCst);
        } else {
            state.wall = None;
            alarms.mode.store(DORMANT, Ordering::SeqCst);
        }
    }
    for entry in due {
        entry.target.fire(now);
    }
    // A task that started between the readings and the change of mode has not seen the mode.
    if alarms.mode.load(Ordering::SeqCst) == DORMANT {
        fence(Ordering::SeqCst);
        if tasks.iter().any(|t| t.sched.clock.is_running()) {
            let mut state = alarms.state.lock();
            if state.wall.is_none() && !state.entries.is_empty() {
                let at = now.saturating_add(NEAREST);
                state.wall = Some(group.kernel().timers.arm_target(at, Arc::new(Look(Arc::downgrade(group)))));
                alarms.mode.store(WATCHING, Ordering::SeqCst);
            }
        }
    }
}
