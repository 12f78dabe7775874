//! System calls served without leaving the guest: an idle worker looks at the request pages of the others, and serves what it finds
//! there while their vCPUs stay in the guest. Owns who may serve whom, and when looking pays; never what a call means.
//!
//! A worker looks only instead of sleeping, so that no CPU of the sandbox's is taken from its tasks; it stops when nothing has come for a
//! while, when it is wanted for a task, or when the host took its CPU away meanwhile: then another program needs it more. An attempt that did
//! not pay doubles the time to the next.
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use sentry::platform::{PhysAddr, RequestedCalls, Served};

use super::balance::{Balance, Experience};
use crate::clock::tsc;
use crate::entry::stub::{self, state};
use crate::memory::GuestMemory;

/// Exits for system calls closer together than this (on average) make looking worth a try, microseconds.
const HOT: u64 = 150;
/// Looking ends when nothing has come for this long, microseconds.
const PATIENCE: u64 = 150;
/// A gap of this length between two looks means that the host took the CPU away, microseconds.
const TAKEN_AWAY: u64 = 100;
/// Requests that an attempt has to serve to have paid.
const WORTH: u64 = 4;
/// Shortest and longest time between attempts that did not pay, microseconds.
const PAUSE: (u64, u64) = (1_000, 200_000);

/// When idle workers look for requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// When it pays.
    #[default]
    Auto,
    /// Whenever a worker is idle.
    Always,
    /// Never.
    Off,
}

/// A request that has been served.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// The request's number.
    sequence: u64,
    /// The call's number.
    pub call: u64,
    /// Its result.
    pub result: u64,
}

#[derive(Default)]
struct Gate {
    /// The vCPU is in the guest with a task whose calls may be served.
    open: bool,
    /// The last request served since the entry.
    answer: Option<Answer>,
}

/// One vCPU's side.
#[derive(Default)]
pub struct Requests {
    /// Held by whoever serves a request.
    gate: Mutex<Gate>,
    /// The physical address of the request page, 0 before there is one.
    page: AtomicU64,
    /// TSC at the last exit for a system call.
    last: AtomicU64,
    /// Average distance of such exits, TSC ticks.
    distance: AtomicU64,
    /// This vCPU's worker serves the others, and tasks wait for them rather than call it away.
    keeping: AtomicBool,
}

/// How a look ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The worker is wanted.
    Wanted,
    /// A task has waited for another worker long enough: it had better run on this one.
    Better,
    /// Nothing to serve.
    Quiet,
}

/// What the vCPUs of a sandbox share for it.
pub struct Service {
    mode: Mode,
    calls: OnceLock<Arc<dyn RequestedCalls>>,
    on: AtomicBool,
    /// Workers that look now.
    lookers: AtomicUsize,
    /// TSC before which no attempt is made.
    not_before: AtomicU64,
    /// Present pause after an attempt that did not pay, microseconds.
    pause: AtomicU64,
    /// TSC ticks in a microsecond.
    microsecond: u64,
    experience: Experience,
}

impl Service {
    /// Off until [`Service::start`].
    pub fn new(mode: Mode, tsc_khz: Option<u64>) -> Service {
        let microsecond = (tsc_khz.unwrap_or(2_000_000) / 1000).max(1);
        Service {
            mode,
            calls: OnceLock::new(),
            on: AtomicBool::new(false),
            lookers: AtomicUsize::new(0),
            not_before: AtomicU64::new(0),
            pause: AtomicU64::new(PAUSE.0),
            microsecond,
            experience: Experience::new(microsecond),
        }
    }

    /// Lets idle workers serve by `calls`. Once.
    pub fn start(&self, calls: Arc<dyn RequestedCalls>) {
        let started = self.mode != Mode::Off && self.calls.set(calls).is_ok();
        self.on.store(started, Ordering::SeqCst);
    }

    /// Whether it is on at all.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Whether a program in the guest should ask before it leaves.
    pub fn is_polled(&self) -> bool {
        self.lookers.load(Ordering::SeqCst) != 0
    }

    /// Whether looking pays now, given what `others` (vCPUs) were last seen doing.
    pub fn pays<'a>(&self, mut others: impl Iterator<Item = &'a Requests>) -> bool {
        if self.mode == Mode::Always {
            return self.is_on();
        }
        self.is_on() && tsc() >= self.not_before.load(Ordering::Relaxed) && others.any(|r| self.is_hot(r))
    }

    fn is_hot(&self, requests: &Requests) -> bool {
        let distance = requests.distance.load(Ordering::Relaxed);
        distance != 0 && distance < HOT * self.microsecond
    }

    /// Notes an exit for a system call; true if a worker that sleeps should rather look.
    pub fn left(&self, requests: &Requests) -> bool {
        let now = tsc();
        let last = requests.last.swap(now, Ordering::Relaxed);
        let since = now.wrapping_sub(last).min(1000 * self.microsecond);
        let old = requests.distance.load(Ordering::Relaxed);
        let old = if old == 0 { 1000 * self.microsecond } else { old };
        requests.distance.store((old - old / 4 + since / 4).max(1), Ordering::Relaxed);
        self.is_on()
            && self.lookers.load(Ordering::Relaxed) == 0
            && self.is_hot(requests)
            && now >= self.not_before.load(Ordering::Relaxed)
    }

    /// No attempt for a moment: one has just been asked for.
    pub fn asked(&self) {
        self.not_before.store(tsc().wrapping_add(PAUSE.0 * self.microsecond), Ordering::Relaxed);
    }

    /// A system call has ended a stay of `ticks` in the guest.
    pub fn saw_exit(&self, ticks: u64) {
        self.experience.saw_exit(ticks);
    }

    /// Whether a task that worker `looker` could run waits for another; see [`RequestedCalls::task_waits`].
    pub fn task_waits(&self, looker: usize) -> bool {
        self.calls.get().is_some_and(|c| c.task_waits(looker))
    }

    /// Looks, as worker `looker`, for requests of `all` vCPUs, in order of their numbers, until there is none for a while, or `wanted` says
    /// so, or a task has waited for another worker for so long that it had better run here.
    pub fn look(&self, memory: &GuestMemory, looker: usize, all: &[&Requests], wanted: impl Fn() -> bool) -> Look {
        let Some(calls) = self.calls.get() else { return Look::Quiet };
        self.lookers.fetch_add(1, Ordering::SeqCst);
        all.iter().for_each(|r| r.show_polled(memory, true));
        let (end, served) = self.look_on(memory, &**calls, looker, all, wanted);
        if let Some(own) = all.get(looker) {
            own.keeping.store(false, Ordering::SeqCst);
        }
        if self.lookers.fetch_sub(1, Ordering::SeqCst) == 1 {
            all.iter().for_each(|r| r.show_polled(memory, false));
        }
        if end == Look::Quiet && served < WORTH {
            let pause = self.pause.load(Ordering::Relaxed);
            self.pause.store((pause * 2).min(PAUSE.1), Ordering::Relaxed);
            self.not_before.store(tsc().wrapping_add(pause * self.microsecond), Ordering::Relaxed);
        } else {
            self.pause.store(PAUSE.0, Ordering::Relaxed);
        }
        end
    }

    fn look_on(
        &self,
        memory: &GuestMemory,
        calls: &dyn RequestedCalls,
        looker: usize,
        all: &[&Requests],
        wanted: impl Fn() -> bool,
    ) -> (Look, u64) {
        let (mut last, mut before, mut served) = (tsc(), tsc(), 0);
        let mut balance: Balance<'_> = self.experience.open();
        loop {
            if wanted() {
                return (Look::Wanted, served);
            }
            let mut found = false;
            for (cpu, requests) in all.iter().enumerate() {
                found |= requests.serve(memory, calls, cpu);
            }
            let now = tsc();
            if found
                && balance.served(now)
                && let Some(own) = all.get(looker)
            {
                own.keeping.store(true, Ordering::SeqCst);
            }
            if !calls.task_waits(looker) {
                balance.nobody_waits();
            } else if balance.waited(now, now.wrapping_sub(before)) {
                calls.waited_in_vain(looker);
                return (Look::Better, served);
            }
            if found {
                served += 1;
                (last, before) = (now, now);
                continue;
            }
            let (gap, idle) = (now.wrapping_sub(before), now.wrapping_sub(last));
            if self.mode == Mode::Auto && (gap > TAKEN_AWAY * self.microsecond || idle > PATIENCE * self.microsecond) {
                return (Look::Quiet, served);
            }
            before = now;
            core::hint::spin_loop();
        }
    }
}

impl Requests {
    fn page(&self) -> Option<PhysAddr> {
        let page = self.page.load(Ordering::Acquire);
        (page != 0).then_some(PhysAddr(page))
    }

    /// Whether this vCPU's worker serves others so well that tasks wait for them.
    pub fn is_keeping(&self) -> bool {
        self.keeping.load(Ordering::SeqCst)
    }

    /// Names the request page.
    pub fn set_page(&self, page: PhysAddr) {
        self.page.store(page.0, Ordering::Release);
    }

    fn show_polled(&self, memory: &GuestMemory, polled: bool) {
        if let Some(page) = self.page() {
            memory.table_write(page, stub::POLLED, u64::from(polled));
        }
    }

    /// The vCPU is about to enter the guest.
    pub fn open(&self, memory: &GuestMemory, service: &Service) {
        let Some(page) = self.page() else { return };
        memory.table_write(page, stub::STATE, state::FREE);
        memory.table_write(page, stub::POLLED, u64::from(service.is_polled()));
        *self.gate.lock() = Gate { open: service.is_on(), answer: None };
    }

    /// Nobody serves this vCPU's task from now on; waits for whoever does. Gives the answer to the last request, if it was served.
    pub fn close(&self, memory: &GuestMemory) -> Option<Answer> {
        let mut gate = self.gate.lock();
        gate.open = false;
        let sequence = memory.table_read(self.page()?, stub::SEQUENCE);
        gate.answer.filter(|a| a.sequence == sequence)
    }

    /// Serves the request of this vCPU, that of `cpu`, if there is one.
    fn serve(&self, memory: &GuestMemory, calls: &dyn RequestedCalls, cpu: usize) -> bool {
        let Some(page) = self.page() else { return false };
        if memory.table_read(page, stub::STATE) != state::REQUESTED {
            return false;
        }
        let Some(mut gate) = self.gate.try_lock().filter(|gate| gate.open) else { return false };
        if memory.table_exchange(page, stub::STATE, state::REQUESTED, state::CLAIMED) != state::REQUESTED {
            return false;
        }
        let word = |w| memory.table_read(page, w);
        let args = core::array::from_fn(|i| word(stub::ARGS + i));
        let (sequence, call) = (word(stub::SEQUENCE), word(stub::CALL));
        let (end, result) = match calls.serve(cpu, call, args, word(stub::RCX)) {
            Served::Refused => (state::REFUSED, None),
            Served::Done(result) => (state::DONE, Some(result)),
            Served::Held(result) => (state::HELD, Some(result)),
        };
        if let Some(result) = result {
            gate.answer = Some(Answer { sequence, call, result });
            memory.table_write(page, stub::CALL, result);
        }
        memory.table_write(page, stub::STATE, end);
        drop(gate);
        end != state::REFUSED
    }
}
