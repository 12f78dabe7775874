//! POSIX timers (timer_create(2)). Each has at most one signal queued; expiries meanwhile are its overrun, and a periodic timer goes on
//! when the signal is taken, as in Linux. Owns the timers of a group; the queue is the signal code's.
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use guest_abi::types::SigInfo;

use super::alarm::{Expire, Schedule};
use super::clock::{Clock, TICK};
use crate::lock::{Mutex, Rank};
use crate::signal::queue::{Charge, TimerSignal};
use crate::signal::{Signal, info, send};
use crate::task::{Task, ThreadGroup};
use crate::time::Nanos;
use crate::{Errno, Result};

/// Whom an expiry is told to.
#[derive(Clone)]
pub enum Notify {
    /// SIGEV_NONE.
    None,
    /// SIGEV_SIGNAL.
    Group(Signal),
    /// SIGEV_THREAD_ID.
    Task(Signal, Weak<Task>),
}

struct State {
    schedule: Schedule,
    /// A signal is queued for the present setting.
    queued: bool,
    /// Expiries since the queued one.
    overrun: u64,
    /// What the last taken signal told.
    last_overrun: i32,
}

/// A timer.
pub struct PosixTimer {
    id: i32,
    group: Weak<ThreadGroup>,
    notify: Notify,
    value: u64,
    state: Mutex<State>,
    _charge: Charge,
}

fn clamp(n: u64) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

impl Expire for PosixTimer {
    fn expired(self: Arc<Self>, generation: u64) {
        let Some(group) = self.group.upgrade() else { return };
        let kernel = group.kernel();
        {
            let mut s = self.state.lock();
            if s.schedule.generation != generation {
                return;
            }
            s.schedule.disarm();
            if matches!(self.notify, Notify::None) {
                return;
            }
            s.queued = true;
            s.overrun = 0;
        }
        let as_signal: Arc<dyn TimerSignal> = self.clone();
        let sent = match &self.notify {
            Notify::None => true,
            Notify::Group(signal) => {
                send::send_timer(&group, None, *signal, info::timer(*signal, self.id, 0, self.value), &as_signal)
            }
            Notify::Task(signal, task) => task.upgrade().is_some_and(|t| {
                send::send_timer(&group, Some(&t), *signal, info::timer(*signal, self.id, 0, self.value), &as_signal)
            }),
        };
        if !sent {
            // The signal is ignored: nobody will take it, and the period goes on, no faster than a tick.
            let clock = self.state.lock().schedule.clock.clone();
            let now = clock.now(kernel);
            let mut s = self.state.lock();
            s.queued = false;
            if s.schedule.generation == generation && s.schedule.interval != 0 {
                s.schedule.forward(now.saturating_add(TICK));
                s.schedule.arm(kernel, &self);
            } else if s.schedule.generation == generation {
                s.schedule.next = None;
            }
        }
    }
}

impl TimerSignal for PosixTimer {
    fn taken(self: Arc<Self>, info: &mut SigInfo) -> bool {
        let Some(group) = self.group.upgrade() else { return false };
        let clock = self.state.lock().schedule.clock.clone();
        let now = clock.now(group.kernel());
        let mut s = self.state.lock();
        if !s.queued {
            return false;
        }
        s.queued = false;
        if s.schedule.interval == 0 {
            s.schedule.next = None;
        } else {
            // The first of these periods is the expiry that the signal tells of.
            let periods = s.schedule.forward(now);
            s.overrun = periods.saturating_sub(1);
            s.schedule.arm(group.kernel(), &self);
        }
        s.last_overrun = clamp(s.overrun);
        s.overrun = 0;
        *info = info::timer(Signal::new(info.signo).unwrap_or(Signal::SIGALRM), self.id, s.last_overrun, self.value);
        true
    }
}

#[derive(Default)]
struct Table {
    next: i32,
    timers: BTreeMap<i32, Arc<PosixTimer>>,
}

/// The POSIX timers of a group.
pub struct PosixTimers {
    table: Mutex<Table>,
}

impl Default for PosixTimers {
    fn default() -> Self {
        PosixTimers { table: Mutex::new(Rank::Leaf, Table::default()) }
    }
}

impl PosixTimers {
    /// The timer with an id; EINVAL.
    pub fn get(&self, id: i32) -> Result<Arc<PosixTimer>> {
        self.table.lock().timers.get(&id).cloned().ok_or(Errno::EINVAL)
    }

    /// Deletes all timers (exec, exit).
    pub fn clear(&self) {
        let old = core::mem::take(&mut self.table.lock().timers);
        for timer in old.into_values() {
            timer.stop();
        }
    }

    /// Ids, clocks' settings for /proc/PID/timers.
    pub fn list(&self) -> Vec<Arc<PosixTimer>> {
        self.table.lock().timers.values().cloned().collect()
    }

    /// timer_delete(2).
    pub fn delete(&self, id: i32) -> Result<()> {
        let timer = self.table.lock().timers.remove(&id).ok_or(Errno::EINVAL)?;
        timer.stop();
        Ok(())
    }
}

/// timer_create(2). `notify` is given the id, which is the default value of a signal without sigevent. EAGAIN at RLIMIT_SIGPENDING.
pub fn create(
    group: &Arc<ThreadGroup>,
    clock: Clock,
    charge: Charge,
    notify: Notify,
    value: Option<u64>,
) -> Result<Arc<PosixTimer>> {
    let mut table = group.timers.posix.table.lock();
    let mut id = table.next;
    while table.timers.contains_key(&id) {
        id = id.checked_add(1).unwrap_or(0);
    }
    table.next = id.checked_add(1).unwrap_or(0);
    let timer = Arc::new(PosixTimer {
        id,
        group: Arc::downgrade(group),
        notify,
        value: value.unwrap_or(id as u64),
        state: Mutex::new(
            Rank::TimerState,
            State { schedule: Schedule::new(clock), queued: false, overrun: 0, last_overrun: 0 },
        ),
        _charge: charge,
    });
    table.timers.insert(id, timer.clone());
    Ok(timer)
}

impl PosixTimer {
    /// The id.
    pub fn id(&self) -> i32 {
        self.id
    }

    fn stop(&self) {
        let mut s = self.state.lock();
        s.schedule.generation += 1;
        s.schedule.next = None;
        s.schedule.disarm();
        // Its queued signal is dropped when it is taken.
        s.queued = false;
    }

    /// Its clock.
    pub fn clock(&self) -> Clock {
        self.state.lock().schedule.clock.clone()
    }

    /// timer_gettime(2): time left and period.
    pub fn get(&self, group: &ThreadGroup) -> (Nanos, Nanos) {
        let now = self.clock().now(group.kernel());
        let mut s = self.state.lock();
        let silent = matches!(self.notify, Notify::None);
        if s.schedule.interval != 0 && (silent || s.queued) {
            // The period goes on although nothing is armed for it.
            let periods = s.schedule.forward(now);
            if s.queued {
                s.overrun = s.overrun.saturating_add(periods);
            }
        } else if s.queued || silent && s.schedule.next.is_some_and(|at| at <= now) {
            return (0, 0);
        }
        s.schedule.remaining(now)
    }

    /// timer_settime(2): the first expiry, relative or on the clock's axis (0 disarms), and the period; gives the old setting.
    pub fn set(self: &Arc<Self>, group: &ThreadGroup, value: Nanos, absolute: bool, interval: Nanos) -> (Nanos, Nanos) {
        let old = self.get(group);
        let clock = self.state.lock().schedule.begin(absolute);
        let now = clock.now(group.kernel());
        let first = match value {
            0 => None,
            v if absolute => Some(v),
            v => Some(now.saturating_add(v)),
        };
        let mut s = self.state.lock();
        s.queued = false;
        s.overrun = 0;
        s.last_overrun = 0;
        let interval = if first.is_some() { interval } else { 0 };
        if matches!(self.notify, Notify::None) {
            s.schedule.generation += 1;
            s.schedule.next = first;
            s.schedule.interval = interval;
        } else {
            s.schedule.set(group.kernel(), first, interval, self);
        }
        old
    }

    /// timer_getoverrun(2).
    pub fn overrun(&self) -> i32 {
        self.state.lock().last_overrun
    }
}
