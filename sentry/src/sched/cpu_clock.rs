//! CPU time and the other counters of getrusage(2): exact, taken at guest entry and exit. Owns the counters; never reads a
//! clock by itself.
//!
//! A task and its group count at the same moments: the task in a meter of its own, the group in one for each worker, which only that
//! worker changes. So the time of a group is read without looking at its tasks, and agrees with the sum of theirs.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, Ordering::Relaxed, fence};

use super::current_cpu;
use crate::time::Nanos;

/// Attempts at a reading before the thread gives its CPU to others in between.
const QUICK_READS: usize = 64;

/// A sum of counters that belongs to nobody who runs: waited-for children.
#[derive(Default)]
pub struct Usage {
    user: AtomicU64,
    system: AtomicU64,
    events: EventCounts,
    max_rss: AtomicU64,
}

/// Faults and switches.
#[derive(Default)]
struct EventCounts {
    minor_faults: AtomicU64,
    major_faults: AtomicU64,
    voluntary_switches: AtomicU64,
    involuntary_switches: AtomicU64,
}

impl EventCounts {
    fn get(&self) -> UsageValue {
        UsageValue {
            minor_faults: self.minor_faults.load(Relaxed),
            major_faults: self.major_faults.load(Relaxed),
            voluntary_switches: self.voluntary_switches.load(Relaxed),
            involuntary_switches: self.involuntary_switches.load(Relaxed),
            ..UsageValue::default()
        }
    }
}

/// A reading of the counters of getrusage(2).
#[derive(Clone, Copy, Debug, Default)]
pub struct UsageValue {
    /// Time in the guest, ns.
    pub user: Nanos,
    /// Time in the sentry, ns.
    pub system: Nanos,
    /// Page faults served without the host's storage.
    pub minor_faults: u64,
    /// Page faults that read a file.
    pub major_faults: u64,
    /// Times it gave up the CPU by itself.
    pub voluntary_switches: u64,
    /// Times it was preempted.
    pub involuntary_switches: u64,
    /// Largest resident set, KiB.
    pub max_rss: u64,
}

impl UsageValue {
    /// Adds another's counters; of the largest resident set it keeps the larger.
    pub fn add(&mut self, other: &UsageValue) {
        self.user = self.user.saturating_add(other.user);
        self.system = self.system.saturating_add(other.system);
        self.minor_faults = self.minor_faults.saturating_add(other.minor_faults);
        self.major_faults = self.major_faults.saturating_add(other.major_faults);
        self.voluntary_switches = self.voluntary_switches.saturating_add(other.voluntary_switches);
        self.involuntary_switches = self.involuntary_switches.saturating_add(other.involuntary_switches);
        self.max_rss = self.max_rss.max(other.max_rss);
    }

    /// User and system time.
    pub fn cpu(&self) -> Nanos {
        self.user.saturating_add(self.system)
    }
}

impl Usage {
    /// The counters now.
    pub fn get(&self) -> UsageValue {
        UsageValue {
            user: self.user.load(Relaxed),
            system: self.system.load(Relaxed),
            max_rss: self.max_rss.load(Relaxed),
            ..self.events.get()
        }
    }

    /// Adds a reading.
    pub fn add(&self, v: &UsageValue) {
        self.user.fetch_add(v.user, Relaxed);
        self.system.fetch_add(v.system, Relaxed);
        self.events.minor_faults.fetch_add(v.minor_faults, Relaxed);
        self.events.major_faults.fetch_add(v.major_faults, Relaxed);
        self.events.voluntary_switches.fetch_add(v.voluntary_switches, Relaxed);
        self.events.involuntary_switches.fetch_add(v.involuntary_switches, Relaxed);
        self.max_rss.fetch_max(v.max_rss, Relaxed);
    }
}

/// What a stretch of time counts as.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stretch {
    None,
    Guest,
    Sentry,
}

/// User and system time with the stretch that lasts. One thread at a time changes it; readers meanwhile read again (a sequence lock), so
/// that no reading is ahead of a later one.
#[derive(Default)]
struct Meter {
    sequence: AtomicU64,
    user: AtomicU64,
    system: AtomicU64,
    /// Since when the present stretch lasts.
    since: AtomicU64,
    stretch: AtomicU64,
}

impl Meter {
    /// Makes readers wait for the end of a turn. The clock is read after it: whoever has read the present stretch up to some time
    /// is not contradicted by a turn at an earlier one.
    fn begin_turn(&self) {
        self.sequence.fetch_add(1, Ordering::SeqCst);
    }

    /// Ends the present stretch at `now` and begins another.
    fn end_turn(&self, now: Nanos, next: Stretch) {
        let past = now.saturating_sub(self.since.load(Relaxed));
        match self.stretch.load(Relaxed) {
            1 => self.user.store(self.user.load(Relaxed).wrapping_add(past), Relaxed),
            2 => self.system.store(self.system.load(Relaxed).wrapping_add(past), Relaxed),
            _ => {}
        }
        // A clock that seems to go back (another CPU's) must not count twice.
        self.since.fetch_max(now, Relaxed);
        self.stretch.store(next as u64, Relaxed);
        self.sequence.fetch_add(1, Ordering::Release);
    }

    fn is_running(&self) -> bool {
        self.stretch.load(Relaxed) != Stretch::None as u64
    }

    /// User and system time up to `now`.
    fn read(&self, now: Nanos) -> (Nanos, Nanos) {
        let mut tries = 0;
        loop {
            let before = self.sequence.load(Ordering::Acquire);
            let (mut user, mut system) = (self.user.load(Relaxed), self.system.load(Relaxed));
            let past = now.saturating_sub(self.since.load(Relaxed));
            match self.stretch.load(Relaxed) {
                1 => user = user.wrapping_add(past),
                2 => system = system.wrapping_add(past),
                _ => {}
            }
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.sequence.load(Relaxed) == before {
                return (user, system);
            }
            // A turn is a few instructions; if it lasts, its thread has lost its CPU.
            tries += 1;
            if tries < QUICK_READS { core::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}

/// What one worker has counted for a group; no two of them share a cache line.
#[derive(Default)]
#[repr(align(64))]
struct Slot {
    meter: Meter,
    events: EventCounts,
}

/// The counters of a thread group, dead tasks included. Reading is O(workers).
pub struct GroupClock {
    slots: Box<[Slot]>,
    max_rss: AtomicU64,
}

impl GroupClock {
    /// Nothing counted, for a machine of `cpus` workers.
    pub fn new(cpus: usize) -> Arc<GroupClock> {
        let slots = (0..cpus.max(1)).map(|_| Slot::default()).collect();
        Arc::new(GroupClock { slots, max_rss: AtomicU64::new(0) })
    }

    /// The slot of the calling worker; the first for a thread that is none, which counts no time.
    fn own(&self) -> Option<&Slot> {
        self.of(current_cpu().unwrap_or(0))
    }

    fn of(&self, cpu: usize) -> Option<&Slot> {
        self.slots.get(cpu)
    }

    /// User and system time up to `now`.
    pub fn times(&self, now: Nanos) -> (Nanos, Nanos) {
        self.slots.iter().map(|s| s.meter.read(now)).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1))
    }

    /// Tasks of the group that have a CPU now.
    pub fn running(&self) -> u64 {
        self.slots.iter().map(|s| u64::from(s.meter.is_running())).sum()
    }

    /// All counters up to `now`.
    pub fn reading(&self, now: Nanos) -> UsageValue {
        let mut sum = UsageValue { max_rss: self.max_rss.load(Relaxed), ..UsageValue::default() };
        for slot in &self.slots {
            let (user, system) = slot.meter.read(now);
            sum.add(&UsageValue { user, system, ..slot.events.get() });
        }
        sum
    }
}

/// The clock of one task, which counts for its group too. Times are monotonic ns; only the worker that runs the task changes it, or
/// whoever serves a call of the task while that worker is in the guest.
pub struct CpuClock {
    meter: Meter,
    events: EventCounts,
    group: Arc<GroupClock>,
}

impl CpuClock {
    /// A clock that has not run, of a task of the group with clock `group`.
    pub fn new(group: Arc<GroupClock>) -> CpuClock {
        CpuClock { meter: Meter::default(), events: EventCounts::default(), group }
    }

    fn turn(&self, clock: impl FnOnce() -> Nanos, next: Stretch) -> Nanos {
        self.turn_on(self.group.own(), clock, next)
    }

    fn turn_on(&self, slot: Option<&Slot>, clock: impl FnOnce() -> Nanos, next: Stretch) -> Nanos {
        let meters = || [Some(&self.meter), slot.map(|s| &s.meter)].into_iter().flatten();
        meters().for_each(Meter::begin_turn);
        let now = clock();
        meters().for_each(|m| m.end_turn(now, next));
        now
    }

    /// Another worker begins to serve a call of the task, which stays in the guest on `cpu` meanwhile.
    pub fn begin_service(&self, cpu: usize, clock: impl FnOnce() -> Nanos) {
        self.turn_on(self.group.of(cpu), clock, Stretch::Sentry);
    }

    /// It has served it.
    pub fn end_service(&self, cpu: usize, clock: impl FnOnce() -> Nanos) {
        self.turn_on(self.group.of(cpu), clock, Stretch::Guest);
    }

    /// The task begins to run in the sentry. Gives the time, as the following do.
    pub fn start(&self, clock: impl FnOnce() -> Nanos) -> Nanos {
        self.turn(clock, Stretch::Sentry)
    }

    /// It enters the guest.
    pub fn enter_guest(&self, clock: impl FnOnce() -> Nanos) -> Nanos {
        self.turn(clock, Stretch::Guest)
    }

    /// It has left the guest.
    pub fn leave_guest(&self, clock: impl FnOnce() -> Nanos) -> Nanos {
        self.turn(clock, Stretch::Sentry)
    }

    /// It gives up the CPU.
    pub fn stop(&self, clock: impl FnOnce() -> Nanos) -> Nanos {
        if self.is_running() { self.turn(clock, Stretch::None) } else { clock() }
    }

    /// Whether a stretch lasts now: the task has a CPU.
    pub fn is_running(&self) -> bool {
        self.meter.is_running()
    }

    fn count(&self, which: impl Fn(&EventCounts) -> &AtomicU64) {
        which(&self.events).fetch_add(1, Relaxed);
        if let Some(slot) = self.group.own() {
            which(&slot.events).fetch_add(1, Relaxed);
        }
    }

    /// A page fault of the task was served without the host's storage.
    pub fn count_minor_fault(&self) {
        self.count(|e| &e.minor_faults);
    }

    /// The task has left the CPU: `voluntary`, to wait for something.
    pub fn count_switch(&self, voluntary: bool) {
        self.count(|e| if voluntary { &e.voluntary_switches } else { &e.involuntary_switches });
    }

    /// The group's resident set was `kib` KiB large.
    pub fn saw_rss(&self, kib: u64) {
        self.group.max_rss.fetch_max(kib, Relaxed);
    }

    /// User and system time up to `now`.
    pub fn times(&self, now: Nanos) -> (Nanos, Nanos) {
        self.meter.read(now)
    }

    /// Counters including the stretch that lasts at `now`. The resident set is the group's.
    pub fn reading(&self, now: Nanos) -> UsageValue {
        let (user, system) = self.meter.read(now);
        UsageValue { user, system, max_rss: self.group.max_rss.load(Relaxed), ..self.events.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_counts_what_its_tasks_count() {
        let group = GroupClock::new(2);
        let (a, b) = (CpuClock::new(group.clone()), CpuClock::new(group.clone()));
        a.start(|| 100);
        a.enter_guest(|| 110);
        assert_eq!((a.times(150), group.times(150)), ((40, 10), (40, 10)));
        assert_eq!(group.running(), 1);
        a.leave_guest(|| 160);
        a.stop(|| 170);
        a.stop(|| 180);
        assert_eq!((a.times(200), group.times(200), group.running()), ((50, 20), (50, 20), 0));
        b.start(|| 300);
        b.count_switch(true);
        b.count_minor_fault();
        b.stop(|| 305);
        let sum = group.reading(400);
        assert_eq!((sum.user, sum.system, sum.voluntary_switches, sum.minor_faults), (50, 25, 1, 1));
    }

    #[test]
    fn readings_never_go_back() {
        let group = GroupClock::new(1);
        let clock = CpuClock::new(group.clone());
        let now = AtomicU64::new(1);
        std::thread::scope(|s| {
            s.spawn(|| {
                for _ in 0..100_000 {
                    clock.enter_guest(|| now.fetch_add(1, Ordering::SeqCst));
                    clock.leave_guest(|| now.fetch_add(1, Ordering::SeqCst));
                }
                clock.stop(|| now.fetch_add(1, Ordering::SeqCst));
            });
            let mut last = (0, 0);
            for _ in 0..100_000 {
                let read = group.times(now.load(Ordering::SeqCst));
                assert!(read.0 >= last.0 && read.1 >= last.1, "{read:?} after {last:?}");
                last = read;
            }
        });
    }
}
