//! Counters of one sandbox: exits by reason, system calls by number, faults. Sharded by worker so that counting never meets.
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers counted one by one; larger ones are counted together.
const NUMBERS: usize = 512;

/// Why the guest left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
#[allow(missing_docs)]
pub enum ExitReason {
    Syscall,
    PageFault,
    OtherException,
    Interrupted,
    BusError,
    Broken,
}

impl ExitReason {
    /// All reasons with the names that reports use.
    pub const ALL: [(ExitReason, &'static str); 6] = [
        (ExitReason::Syscall, "syscall"),
        (ExitReason::PageFault, "page_fault"),
        (ExitReason::OtherException, "other_exception"),
        (ExitReason::Interrupted, "interrupted"),
        (ExitReason::BusError, "bus_error"),
        (ExitReason::Broken, "broken"),
    ];
}

struct Shard {
    syscalls: Box<[AtomicU64]>,
    beyond: AtomicU64,
    exits: [AtomicU64; ExitReason::ALL.len()],
    inside: AtomicU64,
    answered: AtomicU64,
    direct_sites: AtomicU64,
    in_vain: AtomicU64,
}

/// Counters of one sandbox.
pub struct Stats {
    shards: Vec<Shard>,
}

impl Stats {
    /// Zeroed counters for `cpus` workers.
    pub fn new(cpus: usize) -> Stats {
        let shard = || Shard {
            syscalls: (0..NUMBERS).map(|_| AtomicU64::new(0)).collect(),
            beyond: AtomicU64::new(0),
            exits: Default::default(),
            inside: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            direct_sites: AtomicU64::new(0),
            in_vain: AtomicU64::new(0),
        };
        Stats { shards: (0..cpus.max(1)).map(|_| shard()).collect() }
    }

    fn add(&self, cpu: usize, counter: impl FnOnce(&Shard) -> &AtomicU64) {
        if let Some(shard) = self.shards.get(cpu).or(self.shards.first()) {
            counter(shard).fetch_add(1, Ordering::Relaxed);
        }
    }

    fn sum(&self, counter: impl Fn(&Shard) -> &AtomicU64) -> u64 {
        self.shards.iter().map(|s| counter(s).load(Ordering::Relaxed)).sum()
    }

    /// Counts a system call made on worker `cpu`.
    pub fn syscall(&self, cpu: usize, nr: u64) {
        let index = usize::try_from(nr).unwrap_or(usize::MAX);
        self.add(cpu, |s| s.syscalls.get(index).unwrap_or(&s.beyond));
    }

    /// Counts an exit on worker `cpu`.
    pub fn exit(&self, cpu: usize, reason: ExitReason) {
        self.add(cpu, |s| &s.exits[reason as usize]);
    }

    /// Counts a system call that worker `cpu` served while its task stayed in the guest.
    pub fn served_inside(&self, cpu: usize) {
        self.add(cpu, |s| &s.inside);
    }

    /// System calls served while their tasks stayed in the guest.
    pub fn inside(&self) -> u64 {
        self.sum(|s| &s.inside)
    }

    /// Counts a time at which worker `cpu` had no more to run and went on serving others for so long that a task moved to it after all.
    pub fn waited_in_vain(&self, cpu: usize) {
        self.add(cpu, |s| &s.in_vain);
    }

    /// How often a task moved to a serving worker after it had waited in vain.
    pub fn moved_after_wait(&self) -> u64 {
        self.sum(|s| &s.in_vain)
    }

    /// Counts `count` calls of `nr` that the guest on worker `cpu` answered by itself.
    pub fn answered(&self, cpu: usize, nr: u64, count: u64) {
        let index = usize::try_from(nr).unwrap_or(usize::MAX);
        if let Some(shard) = self.shards.get(cpu).or(self.shards.first()) {
            shard.syscalls.get(index).unwrap_or(&shard.beyond).fetch_add(count, Ordering::Relaxed);
            shard.answered.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// System calls that the guest answered by itself.
    pub fn answered_in_guest(&self) -> u64 {
        self.sum(|s| &s.answered)
    }

    /// Counts a call site that was made direct by worker `cpu`.
    pub fn direct_site(&self, cpu: usize) {
        self.add(cpu, |s| &s.direct_sites);
    }

    /// Call sites made direct.
    pub fn direct_sites(&self) -> u64 {
        self.sum(|s| &s.direct_sites)
    }

    /// Exits of one kind so far.
    pub fn exits(&self, reason: ExitReason) -> u64 {
        self.sum(|s| &s.exits[reason as usize])
    }

    /// `(number, calls)` of every number called so far, ascending; numbers of 512 and more stand together under `u64::MAX`.
    pub fn syscalls(&self) -> Vec<(u64, u64)> {
        let mut out: Vec<(u64, u64)> = (0..NUMBERS)
            .map(|nr| (nr as u64, self.sum(|s| s.syscalls.get(nr).unwrap_or(&s.beyond))))
            .filter(|&(_, count)| count > 0)
            .collect();
        let beyond = self.sum(|s| &s.beyond);
        if beyond > 0 {
            out.push((u64::MAX, beyond));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_by_number_and_beyond() {
        let stats = Stats::new(2);
        stats.syscall(0, 39);
        stats.syscall(1, 39);
        stats.syscall(7, 600);
        stats.exit(1, ExitReason::PageFault);
        assert_eq!(stats.syscalls(), vec![(39, 2), (u64::MAX, 1)]);
        assert_eq!(stats.exits(ExitReason::PageFault), 1);
    }
}
