//! What the scheduler knows of a task. Owns its parameters and virtual run time.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::worker::Key;
use super::{CpuClock, GroupClock};
use crate::lock::{Mutex, Rank};

/// Most CPUs an affinity mask can name (CONFIG_NR_CPUS).
pub const MAX_CPUS: usize = 1024;

/// A set of CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuSet(pub [u64; MAX_CPUS / 64]);

impl CpuSet {
    /// CPUs `0..n`.
    pub fn first(n: usize) -> CpuSet {
        let mut set = CpuSet([0; MAX_CPUS / 64]);
        for cpu in 0..n.min(MAX_CPUS) {
            set.0[cpu / 64] |= 1 << (cpu % 64);
        }
        set
    }

    /// Whether `cpu` is in it.
    pub fn contains(&self, cpu: usize) -> bool {
        self.0.get(cpu / 64).is_some_and(|w| w & (1 << (cpu % 64)) != 0)
    }

    /// Members of both.
    #[must_use]
    pub fn intersection(&self, other: &CpuSet) -> CpuSet {
        let mut out = *self;
        for (a, b) in out.0.iter_mut().zip(other.0) {
            *a &= b;
        }
        out
    }

    /// Whether it has no member.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|w| *w == 0)
    }

    /// Number of members.
    pub fn len(&self) -> usize {
        self.0.iter().map(|w| w.count_ones() as usize).sum()
    }
}

/// A policy of sched(7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// SCHED_OTHER (0), FIFO (1), RR (2), BATCH (3), IDLE (5).
    pub number: u32,
    /// 1..=99 for FIFO and RR, else 0.
    pub priority: i32,
    /// SCHED_RESET_ON_FORK.
    pub reset_on_fork: bool,
}

/// Scheduling state of one task.
pub struct Entity {
    /// Weighted CPU time, ns.
    pub(super) vruntime: AtomicU64,
    nice: AtomicI32,
    io_priority: AtomicU32,
    pub(super) last_cpu: AtomicUsize,
    /// Whether the affinity differs from all workers.
    pub(super) pinned: AtomicU32,
    affinity: Mutex<CpuSet>,
    policy: Mutex<Policy>,
    /// What the policy means for the order of queues: its number, and [`Entity::precedence`].
    kind: AtomicU32,
    precedence: AtomicU32,
    /// At its next turn it lets its equals pass.
    lets_pass: AtomicBool,
    /// Where it waits for a CPU.
    queued: Mutex<Option<(usize, Key)>>,
    /// CPU time and switches.
    pub clock: CpuClock,
}

/// Weights of nice -20..=19 as in sched(7)'s implementation: each step is a factor of about 1.25.
const WEIGHTS: [u64; 40] = [
    88761, 71755, 56483, 46273, 36291, 29154, 23254, 18705, 14949, 11916, 9548, 7620, 6100, 4904, 3906, 3121, 2501,
    1991, 1586, 1277, 1024, 820, 655, 526, 423, 335, 272, 215, 172, 137, 110, 87, 70, 56, 45, 36, 29, 23, 18, 15,
];

impl Policy {
    fn precedence(self) -> u32 {
        match self.number {
            1 | 2 => u32::try_from(99 - self.priority).unwrap_or(0).min(98),
            5 => Entity::FAIR + 1,
            _ => Entity::FAIR,
        }
    }
}

impl Entity {
    /// Class of all that are not real-time.
    pub(super) const FAIR: u32 = 100;

    /// A new entity with default parameters on `cpus` workers; its CPU time counts for `group` too.
    pub fn new(cpus: usize, group: Arc<GroupClock>) -> Entity {
        Entity {
            vruntime: AtomicU64::new(0),
            nice: AtomicI32::new(0),
            io_priority: AtomicU32::new(0),
            last_cpu: AtomicUsize::new(0),
            pinned: AtomicU32::new(0),
            affinity: Mutex::new(Rank::Leaf, CpuSet::first(cpus)),
            policy: Mutex::new(Rank::Leaf, Policy { number: 0, priority: 0, reset_on_fork: false }),
            kind: AtomicU32::new(0),
            precedence: AtomicU32::new(Entity::FAIR),
            lets_pass: AtomicBool::new(false),
            queued: Mutex::new(Rank::Leaf, None),
            clock: CpuClock::new(group),
        }
    }

    /// What a child of this entity starts with, of the group with clock `group`.
    #[must_use]
    pub fn inherit(&self, group: Arc<GroupClock>) -> Entity {
        let mut policy = self.policy();
        let mut nice = self.nice();
        if policy.reset_on_fork {
            policy.reset_on_fork = false;
            if self.is_realtime() {
                policy = Policy { number: 0, priority: 0, reset_on_fork: false };
                nice = 0;
            }
            nice = nice.max(0);
        }
        Entity {
            vruntime: AtomicU64::new(self.vruntime.load(Relaxed)),
            nice: AtomicI32::new(nice),
            io_priority: AtomicU32::new(self.io_priority()),
            last_cpu: AtomicUsize::new(self.last_cpu.load(Relaxed)),
            pinned: AtomicU32::new(self.pinned.load(Relaxed)),
            affinity: Mutex::new(Rank::Leaf, self.affinity()),
            kind: AtomicU32::new(policy.number),
            precedence: AtomicU32::new(policy.precedence()),
            policy: Mutex::new(Rank::Leaf, policy),
            lets_pass: AtomicBool::new(false),
            queued: Mutex::new(Rank::Leaf, None),
            clock: CpuClock::new(group),
        }
    }

    /// What ioprio_set(2) was given: class and level; 0 if nothing.
    pub fn io_priority(&self) -> u32 {
        self.io_priority.load(Relaxed)
    }

    /// Keeps an I/O priority.
    pub fn set_io_priority(&self, value: u32) {
        self.io_priority.store(value, Relaxed);
    }

    /// Nice value, -20..=19.
    pub fn nice(&self) -> i32 {
        self.nice.load(Relaxed)
    }

    /// Sets the nice value, clamped.
    pub fn set_nice(&self, nice: i32) {
        self.nice.store(nice.clamp(-20, 19), Relaxed);
    }

    /// The policy.
    pub fn policy(&self) -> Policy {
        *self.policy.lock()
    }

    /// Sets the policy after the caller's checks.
    pub fn set_policy(&self, policy: Policy) {
        let mut place = self.policy.lock();
        *place = policy;
        self.kind.store(policy.number, Relaxed);
        self.precedence.store(policy.precedence(), Relaxed);
    }

    /// Which task runs first: 0 to 98 for real-time ones by priority, [`Entity::FAIR`], and after it SCHED_IDLE.
    pub(super) fn precedence(&self) -> u32 {
        self.precedence.load(Relaxed)
    }

    /// Its class in the order of a queue. SCHED_IDLE runs beside the others, by its small weight: it may hold what they wait for.
    pub(super) fn class(&self) -> u32 {
        self.precedence().min(Entity::FAIR)
    }

    /// SCHED_FIFO or SCHED_RR.
    pub(super) fn is_realtime(&self) -> bool {
        self.precedence() < Entity::FAIR
    }

    /// SCHED_RR.
    pub(super) fn is_round_robin(&self) -> bool {
        self.kind.load(Relaxed) == 2
    }

    /// SCHED_BATCH or SCHED_IDLE: its wake preempts none of its like.
    pub(super) fn is_batch(&self) -> bool {
        matches!(self.kind.load(Relaxed), 3 | 5)
    }

    /// At its next turn in a queue it goes behind its equals (sched_yield(2), the end of a round-robin slice).
    pub fn let_pass(&self) {
        self.lets_pass.store(true, Relaxed);
    }

    /// Whether [`Entity::let_pass`] was called since the last such question.
    pub(super) fn passes(&self) -> bool {
        self.lets_pass.swap(false, Relaxed)
    }

    /// The queue and the place in it where it waits for a CPU.
    pub(super) fn queued(&self) -> Option<(usize, Key)> {
        *self.queued.lock()
    }

    pub(super) fn set_queued(&self, at: Option<(usize, Key)>) {
        *self.queued.lock() = at;
    }

    /// The CPUs it may run on.
    pub fn affinity(&self) -> CpuSet {
        *self.affinity.lock()
    }

    /// Sets the CPUs it may run on, of `cpus` in all; the caller has made sure that one exists.
    pub fn set_affinity(&self, set: CpuSet, cpus: usize) {
        *self.affinity.lock() = set;
        self.pinned.store(u32::from(set != CpuSet::first(cpus)), Relaxed);
    }

    /// Whether it may run on `cpu`.
    pub fn may_run_on(&self, cpu: usize) -> bool {
        self.pinned.load(Relaxed) == 0 || self.affinity.lock().contains(cpu)
    }

    /// The CPU it ran on last.
    pub fn last_cpu(&self) -> usize {
        self.last_cpu.load(Relaxed)
    }

    /// Its share of CPU time in relation to others'; 1024 at nice 0.
    pub(super) fn weight(&self) -> u64 {
        if self.kind.load(Relaxed) == 5 {
            3
        } else {
            usize::try_from(self.nice() + 20).ok().and_then(|i| WEIGHTS.get(i).copied()).unwrap_or(1024)
        }
    }

    /// Virtual time that `ns` of its CPU time are worth.
    pub(super) fn weighted(&self, ns: u64) -> u64 {
        weighted(ns, self.weight())
    }
}

/// Virtual time that `ns` of CPU time are worth at `weight`.
pub(super) fn weighted(ns: u64, weight: u64) -> u64 {
    if weight == 1024 { ns } else { ns.saturating_mul(1024) / weight.max(1) }
}
