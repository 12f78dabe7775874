//! Pending signals: standard ones once, real-time ones queued, each with its siginfo. Owns order and the RLIMIT_SIGPENDING
//! charge; never decides who gets a signal.
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use guest_abi::types::SigInfo;

use super::set::{SigSet, Signal};
use crate::lock::{Mutex, Rank};
use crate::mm;
use crate::platform::{KernelMemory, Platform};

/// si_code values (sigaction(2)).
#[allow(missing_docs)]
pub mod code {
    pub const SI_USER: i32 = 0;
    pub const SI_KERNEL: i32 = 0x80;
    pub const SI_QUEUE: i32 = -1;
    pub const SI_TIMER: i32 = -2;
    pub const SI_MESGQ: i32 = -3;
    pub const SI_ASYNCIO: i32 = -4;
    pub const SI_SIGIO: i32 = -5;
    pub const SI_TKILL: i32 = -6;
    pub const ILL_ILLOPN: i32 = 2;
    pub const FPE_INTDIV: i32 = 1;
    pub const FPE_INTOVF: i32 = 2;
    pub const FPE_FLTDIV: i32 = 3;
    pub const FPE_FLTOVF: i32 = 4;
    pub const FPE_FLTUND: i32 = 5;
    pub const FPE_FLTRES: i32 = 6;
    pub const FPE_FLTINV: i32 = 7;
    pub const SEGV_MAPERR: i32 = 1;
    pub const SEGV_ACCERR: i32 = 2;
    pub const SEGV_BNDERR: i32 = 3;
    pub const BUS_ADRALN: i32 = 1;
    pub const BUS_ADRERR: i32 = 2;
    pub const TRAP_BRKPT: i32 = 1;
    pub const TRAP_TRACE: i32 = 2;
    pub const TRAP_HWBKPT: i32 = 4;
    pub const CLD_EXITED: i32 = 1;
    pub const CLD_KILLED: i32 = 2;
    pub const CLD_DUMPED: i32 = 3;
    pub const CLD_TRAPPED: i32 = 4;
    pub const CLD_STOPPED: i32 = 5;
    pub const CLD_CONTINUED: i32 = 6;
}

/// siginfo constructors, laid out as <asm-generic/siginfo.h>: the union starts at byte 16.
pub mod info {
    use guest_abi::types::SigInfo;

    use super::super::set::Signal;
    use super::code;

    fn pair(low: i32, high: u32) -> u64 {
        u64::from(low as u32) | u64::from(high) << 32
    }

    /// Header only; the union is zero.
    pub fn bare(signal: Signal, code: i32) -> SigInfo {
        SigInfo { signo: signal.number(), errno: 0, code, pad: 0, fields: [0; 14] }
    }

    /// si_pid and si_uid: kill(2), tgkill(2).
    pub fn from_process(signal: Signal, code: i32, pid: i32, uid: u32) -> SigInfo {
        let mut i = bare(signal, code);
        i.fields[0] = pair(pid, uid);
        i
    }

    /// What the kernel sends without further information (SEND_SIG_PRIV).
    pub fn kernel(signal: Signal) -> SigInfo {
        bare(signal, code::SI_KERNEL)
    }

    /// si_addr: a fault.
    pub fn fault(signal: Signal, code: i32, addr: u64) -> SigInfo {
        let mut i = bare(signal, code);
        i.fields[0] = addr;
        i
    }

    /// A child's change of state: si_pid, si_uid, si_status, si_utime, si_stime (clock ticks).
    pub fn child(signal: Signal, code: i32, pid: i32, uid: u32, status: i32, utime: i64, stime: i64) -> SigInfo {
        let mut i = bare(signal, code);
        i.fields[0] = pair(pid, uid);
        i.fields[1] = pair(status, 0);
        i.fields[2] = utime as u64;
        i.fields[3] = stime as u64;
        i
    }

    /// si_timerid, si_overrun, si_value: timer_create(2).
    pub fn timer(signal: Signal, id: i32, overrun: i32, value: u64) -> SigInfo {
        let mut i = bare(signal, code::SI_TIMER);
        i.fields[0] = pair(id, overrun as u32);
        i.fields[1] = value;
        i
    }

    /// si_band, si_fd: F_SETSIG.
    pub fn poll(signal: Signal, code: i32, band: i64, fd: i32) -> SigInfo {
        let mut i = bare(signal, code);
        i.fields[0] = band as u64;
        i.fields[1] = pair(fd, 0);
        i
    }

    /// si_pid of an information made by [`from_process`] or [`child`].
    pub fn pid(info: &SigInfo) -> i32 {
        info.fields[0] as u32 as i32
    }

    /// si_uid of the same.
    pub fn uid(info: &SigInfo) -> u32 {
        (info.fields[0] >> 32) as u32
    }
}

/// Queued signals per real user, for RLIMIT_SIGPENDING. One per sandbox.
pub struct PendingCounts {
    /// Where each is charged.
    account: mm::Charge,
    users: Mutex<HashMap<u32, Arc<AtomicU64>>>,
}

/// Bytes of a queued signal, or of a POSIX timer with its signal.
const ENTRY_COST: usize = 512;

/// One queued signal's share of its user's limit; given back on drop.
pub struct Charge {
    user: Arc<AtomicU64>,
    _memory: mm::Charge,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.user.fetch_sub(1, Ordering::Relaxed);
    }
}

impl PendingCounts {
    /// Nothing queued.
    pub fn new(platform: &Arc<dyn Platform>) -> PendingCounts {
        let account = mm::Charge::empty(platform, KernelMemory::Slab);
        PendingCounts { account, users: Mutex::new(Rank::Leaf, HashMap::new()) }
    }

    fn counter(&self, uid: u32) -> Arc<AtomicU64> {
        self.users.lock().entry(uid).or_default().clone()
    }

    /// Charges one signal to `uid` unless `limit`, or the sandbox's memory limit, is reached.
    pub fn charge(&self, uid: u32, limit: u64) -> Option<Charge> {
        let memory = self.account.another(ENTRY_COST).ok()?;
        let counter = self.counter(uid);
        if counter.fetch_add(1, Ordering::Relaxed) >= limit {
            counter.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Charge { user: counter, _memory: memory })
    }

    /// Charged now (SigQ of /proc/PID/status).
    pub fn count(&self, uid: u32) -> u64 {
        self.users.lock().get(&uid).map_or(0, |c| c.load(Ordering::Relaxed))
    }
}

/// The side of a POSIX timer that its queued signal talks to.
pub trait TimerSignal: Send + Sync {
    /// The signal is taken off the queue: fills in si_overrun, re-arms a periodic timer. False: the timer was deleted or
    /// set anew meanwhile, and the signal is dropped.
    fn taken(self: Arc<Self>, info: &mut SigInfo) -> bool;
}

/// A pending signal.
pub struct Entry {
    /// Which.
    pub signal: Signal,
    /// What a handler is told.
    pub info: SigInfo,
    /// Sent by an ancestor namespace, the host or the kernel's own force: acts on an init too.
    pub forced: bool,
    /// The POSIX timer whose expiry this is.
    pub timer: Option<Arc<dyn TimerSignal>>,
    /// The share of RLIMIT_SIGPENDING.
    pub charge: Option<Charge>,
}

/// A queue of pending signals, private to a task or shared by a group. No call but a discard looks at more than what it gives, however
/// many signals are queued.
#[derive(Default)]
pub struct Pending {
    set: SigSet,
    /// By order of arrival.
    entries: BTreeMap<u64, Entry>,
    arrivals: u64,
    /// The arrivals of each signal, oldest first; no list is empty.
    by_signal: BTreeMap<Signal, VecDeque<u64>>,
    /// The arrivals of timers' entries, by the timers' addresses.
    by_timer: BTreeMap<usize, u64>,
    /// Members of `set` that were marked without an entry, because the limit was reached, that act on an init.
    forced: SigSet,
}

fn address(timer: &Arc<dyn TimerSignal>) -> usize {
    Arc::as_ptr(timer).cast::<()>().addr()
}

impl Pending {
    /// Which signals are pending.
    pub fn set(&self) -> SigSet {
        self.set
    }

    /// Adds an entry.
    pub fn push(&mut self, entry: Entry) {
        self.set.add(entry.signal);
        self.arrivals += 1;
        self.by_signal.entry(entry.signal).or_default().push_back(self.arrivals);
        if let Some(timer) = &entry.timer {
            self.by_timer.insert(address(timer), self.arrivals);
        }
        self.entries.insert(self.arrivals, entry);
    }

    /// siginfo of at most `max` entries after the first `skip`, oldest first.
    pub fn peek(&self, skip: usize, max: usize) -> Vec<SigInfo> {
        self.entries.values().skip(skip).take(max).map(|e| e.info).collect()
    }

    /// Marks a signal without any information.
    pub fn mark(&mut self, signal: Signal, forced: bool) {
        self.set.add(signal);
        if forced {
            self.forced.add(signal);
        }
    }

    /// Takes the next signal among `wanted`: synchronous ones first, then by number.
    pub fn take(&mut self, wanted: SigSet) -> Option<Entry> {
        let candidates = self.set & wanted;
        let signal = (candidates & SigSet::SYNCHRONOUS).first().or_else(|| candidates.first())?;
        self.take_one(signal)
    }

    /// Takes the next synchronous signal that the task's own instruction caused.
    pub fn take_synchronous(&mut self, wanted: SigSet) -> Option<Entry> {
        let mut candidates = self.set & wanted & SigSet::SYNCHRONOUS;
        let mut oldest: Option<u64> = None;
        while let Some(signal) = candidates.first() {
            candidates.remove(signal);
            let own = |n: &&u64| self.entries.get(n).is_some_and(|e| e.info.code > code::SI_USER);
            // A standard signal has one entry, and one more for each timer that sends it.
            let found = self.by_signal.get(&signal).and_then(|list| list.iter().find(own).copied());
            oldest = oldest.into_iter().chain(found).min();
        }
        self.remove(oldest?)
    }

    /// Takes an entry out, and the signal out of the set with its last one.
    fn remove(&mut self, arrival: u64) -> Option<Entry> {
        let entry = self.entries.remove(&arrival)?;
        if let Some(timer) = &entry.timer {
            self.by_timer.remove(&address(timer));
        }
        if let Some(list) = self.by_signal.get_mut(&entry.signal) {
            if list.front() == Some(&arrival) {
                list.pop_front();
            } else {
                list.retain(|&n| n != arrival);
            }
            if list.is_empty() {
                self.by_signal.remove(&entry.signal);
                self.set.remove(entry.signal);
            }
        }
        Some(entry)
    }

    fn take_one(&mut self, signal: Signal) -> Option<Entry> {
        let first = self.by_signal.get(&signal).and_then(|list| list.front().copied());
        if let Some(entry) = first.and_then(|n| self.remove(n)) {
            return Some(entry);
        }
        self.set.remove(signal);
        let forced = self.forced.contains(signal);
        self.forced.remove(signal);
        let info = info::from_process(signal, code::SI_USER, 0, 0);
        Some(Entry { signal, info, forced, timer: None, charge: None })
    }

    /// Drops every pending member of `signals`.
    pub fn discard(&mut self, signals: SigSet) {
        let mut gone = self.set & signals;
        self.set = self.set.without(signals);
        self.forced = self.forced.without(signals);
        while let Some(signal) = gone.first() {
            gone.remove(signal);
            for arrival in self.by_signal.remove(&signal).unwrap_or_default() {
                if let Some(Entry { timer: Some(timer), .. }) = self.entries.remove(&arrival) {
                    self.by_timer.remove(&address(&timer));
                }
            }
        }
    }

    /// Drops the signal of a deleted POSIX timer.
    pub fn discard_timer(&mut self, timer: &Arc<dyn TimerSignal>) {
        if let Some(&arrival) = self.by_timer.get(&address(timer)) {
            self.remove(arrival);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(signal: i32, code: i32) -> Entry {
        let signal = Signal::new(signal).unwrap();
        Entry { signal, info: info::bare(signal, code), forced: false, timer: None, charge: None }
    }

    #[test]
    fn order_is_linux_s() {
        let mut p = Pending::default();
        for (signal, code) in [(40, 1), (34, 2), (11, 0), (10, 0), (40, 3), (7, 0x80)] {
            p.push(entry(signal, code));
        }
        p.mark(Signal::SIGHUP, false);
        let all = SigSet::FULL;
        assert_eq!(p.peek(1, 2).iter().map(|i| i.signo).collect::<Vec<_>>(), [34, 11]);
        assert_eq!(p.take_synchronous(all).map(|e| e.signal.number()), Some(7));
        assert!(p.take_synchronous(all).is_none(), "what a user sent is no fault");
        let mut order = Vec::new();
        while let Some(e) = p.take(all) {
            order.push((e.signal.number(), e.info.code));
        }
        assert_eq!(order, [(11, 0), (1, 0), (10, 0), (34, 2), (40, 1), (40, 3)]);
        assert!(p.set().is_empty());
        p.push(entry(10, 0));
        p.push(entry(12, 0));
        p.discard(SigSet::of(&[Signal::SIGUSR1]));
        assert_eq!(p.take(all).map(|e| e.signal), Some(Signal::SIGUSR2));
        assert!(p.take(all).is_none() && p.entries.is_empty());
    }
}
