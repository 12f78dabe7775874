//! What keeping a ready task off an idle CPU costs, and what it saves. Owns that account; never moves a task.
//!
//! A worker that serves the calls of another spares each of them most of an exit. As long as that outweighs the time for which a task waits that
//! this worker could run, the task had better wait for the worker that is served. All times are TSC ticks.
use core::sync::atomic::{AtomicU64, Ordering};

/// The balance may fall to this below nothing, microseconds: the first wait comes before the first saving.
const CREDIT: u64 = 30;
/// It does not rise above this, microseconds: what was saved long ago is no reason to wait now.
const MOST: u64 = 200;
/// No task waits for longer than this at a time, microseconds, however much that saves: whoever is served may be waiting for it.
const LONGEST: u64 = 150;
/// Requests that a look has to serve before a task waits for it.
const PROVEN: u64 = 4;
/// Requests after which keeping tasks has proved right.
const WORTH: u64 = 64;
/// Shortest and longest time without another try after one that did not pay, microseconds.
const PAUSE: (u64, u64) = (5_000, 200_000);

/// What all looks of a sandbox share.
pub struct Experience {
    /// The shortest stay in the guest that a system call ended: little more than an exit costs.
    exit: AtomicU64,
    /// Time before which no task is kept.
    not_before: AtomicU64,
    /// Present pause after a try that did not pay, microseconds.
    pause: AtomicU64,
    microsecond: u64,
}

/// The account of one look.
pub struct Balance<'a> {
    experience: &'a Experience,
    balance: i64,
    /// How long somebody has been waiting now.
    waiting: u64,
    served: u64,
    keeps: bool,
}

impl Experience {
    /// None yet. `microsecond`: ticks in one.
    pub fn new(microsecond: u64) -> Experience {
        Experience {
            exit: AtomicU64::new(u64::MAX),
            not_before: AtomicU64::new(0),
            pause: AtomicU64::new(PAUSE.0),
            microsecond,
        }
    }

    /// A system call has ended a stay of `ticks` in the guest.
    pub fn saw_exit(&self, ticks: u64) {
        if ticks < self.exit.load(Ordering::Relaxed) {
            self.exit.fetch_min(ticks, Ordering::Relaxed);
        }
    }

    /// What serving one call saves: about half an exit, since handing it over costs something too.
    fn saved(&self) -> u64 {
        let exit = self.exit.load(Ordering::Relaxed);
        if exit == u64::MAX { 0 } else { exit / 2 }
    }

    /// The account of a look that begins.
    pub fn open(&self) -> Balance<'_> {
        Balance { experience: self, balance: 0, waiting: 0, served: 0, keeps: false }
    }
}

impl Balance<'_> {
    /// A request was served at `now`. True if tasks should be kept from here on.
    pub fn served(&mut self, now: u64) -> bool {
        let e = self.experience;
        self.served += 1;
        let most = (MOST * e.microsecond).cast_signed();
        self.balance = self.balance.saturating_add_unsigned(e.saved()).min(most);
        if self.keeps {
            if self.served == PROVEN + WORTH {
                e.pause.store(PAUSE.0, Ordering::Relaxed);
            }
            return false;
        }
        self.keeps = self.served >= PROVEN && now >= e.not_before.load(Ordering::Relaxed);
        self.keeps
    }

    /// Nobody waits.
    pub fn nobody_waits(&mut self) {
        self.waiting = 0;
    }

    /// A task has waited for `ticks` up to `now`. True if it should not wait any longer.
    pub fn waited(&mut self, now: u64, ticks: u64) -> bool {
        let e = self.experience;
        self.balance = self.balance.saturating_sub_unsigned(ticks);
        self.waiting = self.waiting.saturating_add(ticks);
        let spent = !self.keeps
            || self.balance < -(CREDIT * e.microsecond).cast_signed()
            || self.waiting > LONGEST * e.microsecond;
        if spent && self.keeps {
            self.keeps = false;
            let pause = e.pause.load(Ordering::Relaxed);
            e.pause.store((pause * 2).min(PAUSE.1), Ordering::Relaxed);
            e.not_before.store(now.wrapping_add(pause * e.microsecond), Ordering::Relaxed);
        }
        spent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A look in which `calls` calls are served between waits of `wait`: how many waits it bears.
    fn bears(e: &Experience, from: u64, calls: u64, wait: u64) -> u64 {
        let mut balance = e.open();
        let mut now = from;
        let begun = (0..PROVEN).any(|_| balance.served(now));
        if !begun {
            return 0;
        }
        for turn in 0..10_000 {
            now += wait;
            if balance.waited(now, wait) {
                return turn;
            }
            balance.nobody_waits();
            for _ in 0..calls {
                let _ = balance.served(now);
            }
        }
        u64::MAX
    }

    #[test]
    fn a_task_waits_as_long_as_that_saves_something() {
        let e = Experience::new(1);
        assert_eq!(bears(&e, 0, 100, 1), 30, "nothing is known to be saved: the credit alone counts");
        let e = Experience::new(1);
        e.saw_exit(40);
        e.saw_exit(24);
        e.saw_exit(30);
        assert_eq!(bears(&e, 0, 6, 70), u64::MAX);
        assert!((1..10).contains(&bears(&e, 0, 6, 75)));
        assert_eq!(bears(&e, 100, 6, 70), 0, "no other try at once");
        assert_eq!(bears(&e, 1_000_000, 6, 70), u64::MAX);
    }

    #[test]
    fn tries_that_do_not_pay_become_rare() {
        let e = Experience::new(1);
        e.saw_exit(24);
        let tries = (0..1_000_000)
            .step_by(100)
            .filter(|&now| bears(&e, now, 0, 1_000) == 0 && e.not_before.load(Ordering::Relaxed) > now + 200);
        assert!(tries.count() > 0);
        assert_eq!(e.pause.load(Ordering::Relaxed), PAUSE.1);
    }

    #[test]
    fn no_wait_is_long() {
        let e = Experience::new(1);
        e.saw_exit(24);
        let mut balance = e.open();
        // Calls that save as much as the wait costs: whoever makes them may be waiting for the one who waits.
        let waits = (0..10_000).find(|&n| {
            let _ = balance.served(n);
            n > PROVEN && balance.waited(n, 10)
        });
        assert_eq!(waits, Some(PROVEN + 1 + LONGEST / 10));
    }
}
