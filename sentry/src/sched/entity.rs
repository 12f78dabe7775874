//! What the scheduler knows of a task. Owns its parameters and virtual run time.
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};

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

/// SCHED_* of sched(7) as recorded; all but IDLE run by weight.
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
    pub(super) last_cpu: AtomicUsize,
    /// Whether the affinity differs from all workers.
    pub(super) pinned: AtomicU32,
    affinity: Mutex<CpuSet>,
    policy: Mutex<Policy>,
    /// CPU time and switches.
    pub clock: CpuClock,
}

/// Weights of nice -20..=19 as in sched(7)'s implementation: each step is a factor of about 1.25.
const WEIGHTS: [u64; 40] = [
    88761, 71755, 56483, 46273, 36291, 29154, 23254, 18705, 14949, 11916, 9548, 7620, 6100, 4904, 3906, 3121, 2501,
    1991, 1586, 1277, 1024, 820, 655, 526, 423, 335, 272, 215, 172, 137, 110, 87, 70, 56, 45, 36, 29, 23, 18, 15,
];

impl Entity {
    /// A new entity with default parameters on `cpus` workers; its CPU time counts for `group` too.
    pub fn new(cpus: usize, group: Arc<GroupClock>) -> Entity {
        Entity {
            vruntime: AtomicU64::new(0),
            nice: AtomicI32::new(0),
            last_cpu: AtomicUsize::new(0),
            pinned: AtomicU32::new(0),
            affinity: Mutex::new(Rank::Leaf, CpuSet::first(cpus)),
            policy: Mutex::new(Rank::Leaf, Policy { number: 0, priority: 0, reset_on_fork: false }),
            clock: CpuClock::new(group),
        }
    }

    /// What a child of this entity starts with, of the group with clock `group`.
    #[must_use]
    pub fn inherit(&self, group: Arc<GroupClock>) -> Entity {
        let mut policy = self.policy();
        let mut nice = self.nice();
        if policy.reset_on_fork {
            if policy.number == 1 || policy.number == 2 {
                nice = 0;
            }
            policy = Policy { number: 0, priority: 0, reset_on_fork: false };
            nice = nice.max(0);
        }
        Entity {
            vruntime: AtomicU64::new(self.vruntime.load(Relaxed)),
            nice: AtomicI32::new(nice),
            last_cpu: AtomicUsize::new(self.last_cpu.load(Relaxed)),
            pinned: AtomicU32::new(self.pinned.load(Relaxed)),
            affinity: Mutex::new(Rank::Leaf, self.affinity()),
            policy: Mutex::new(Rank::Leaf, policy),
            clock: CpuClock::new(group),
        }
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
        *self.policy.lock() = policy;
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

    /// Virtual time that `ns` of CPU time are worth.
    pub(super) fn weighted(&self, ns: u64) -> u64 {
        let weight = if self.policy.lock().number == 5 {
            3
        } else {
            usize::try_from(self.nice() + 20).ok().and_then(|i| WEIGHTS.get(i).copied()).unwrap_or(1024)
        };
        if weight == 1024 { ns } else { ns.saturating_mul(1024) / weight }
    }
}
