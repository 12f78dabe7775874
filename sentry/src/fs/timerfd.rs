//! timerfd_create(2): a timer as a file. Owns the count of expiries; the schedule is the time code's.
use std::any::Any;
use std::sync::Arc;

use guest_abi::types::Stat;
use linux_raw_sys::general::CLOCK_REALTIME;

use super::anon::{AnonInode, DEV_ANON};
use crate::event::{Events, Observer, Registration, WaitQueue};
use crate::kernel::Kernel;
use crate::lock::{Mutex, Rank};
use crate::mm::IoDest;
use crate::task::Task;
use crate::time::Nanos;
use crate::timers::alarm::{Expire, Schedule};
use crate::timers::clock::Clock;
use crate::vfs::{File, FileOps, OpenFlags};
use crate::{Errno, Result};

/// TFD_TIMER_CANCEL_ON_SET.
pub const CANCEL_ON_SET: u32 = 2;

struct State {
    schedule: Schedule,
    /// Expiries not read yet; the period goes on when they are.
    ticks: u64,
    /// An expiry has happened and the alarm was not set again.
    expired: bool,
    /// Flags of the last timerfd_settime(2), for fdinfo.
    flags: u32,
    /// TFD_TIMER_CANCEL_ON_SET: the stay among those who are told that the clock was set.
    watching: Option<Registration>,
    /// It was set.
    canceled: bool,
}

/// Tells a timer that the real-time clock was set.
struct ClockWatch(std::sync::Weak<TimerFd>);

impl Observer for ClockWatch {
    fn notify(&self, _events: Events) -> bool {
        let Some(timer) = self.0.upgrade() else { return false };
        {
            let mut s = timer.state.lock();
            if s.watching.is_none() {
                return false;
            }
            s.canceled = true;
            s.ticks = s.ticks.saturating_add(1);
        }
        timer.queue.wake_up_to(Events::READABLE, 1) > 0
    }
}

/// A timerfd object.
pub struct TimerFd {
    kernel: Arc<Kernel>,
    clock_id: i32,
    state: Mutex<State>,
    queue: Arc<WaitQueue>,
    inode: AnonInode,
    this: std::sync::Weak<TimerFd>,
}

impl Expire for TimerFd {
    fn expired(self: Arc<Self>, generation: u64) {
        {
            let mut s = self.state.lock();
            if s.schedule.generation != generation {
                return;
            }
            s.expired = true;
            s.ticks = s.ticks.saturating_add(1);
            s.schedule.disarm();
        }
        self.queue.wake_up_to(Events::READABLE, 1);
    }
}

impl TimerFd {
    /// A description of a new, disarmed timer on the clock with the given id.
    pub fn open(task: &Task, clock: Clock, clock_id: i32, flags: OpenFlags) -> Arc<File> {
        let inode = AnonInode::new(task, DEV_ANON, 0o600);
        let ops = Arc::new_cyclic(|this| TimerFd {
            kernel: task.kernel().clone(),
            clock_id,
            state: Mutex::new(
                Rank::TimerState,
                State {
                    schedule: Schedule::new(clock),
                    ticks: 0,
                    expired: false,
                    flags: 0,
                    watching: None,
                    canceled: false,
                },
            ),
            queue: WaitQueue::new(),
            inode,
            this: this.clone(),
        });
        File::new(ops, None, flags | OpenFlags::RDWR)
    }

    /// Brings the count up to date and sets the alarm again if the period goes on.
    fn catch_up(&self, s: &mut State) {
        let now = s.schedule.clock.now(&self.kernel);
        if !s.expired || s.schedule.interval == 0 {
            return;
        }
        // The first of these periods was counted when the alarm went off.
        let periods = s.schedule.forward(now);
        s.ticks = s.ticks.saturating_add(periods.saturating_sub(1));
        s.expired = false;
        if let Some(this) = self.this.upgrade() {
            s.schedule.arm(&self.kernel, &this);
        }
    }

    /// timerfd_gettime(2): time left and period.
    pub fn get(&self) -> (Nanos, Nanos) {
        let mut s = self.state.lock();
        self.catch_up(&mut s);
        if s.expired {
            return (0, s.schedule.interval);
        }
        s.schedule.remaining(s.schedule.clock.now(&self.kernel))
    }

    /// Its clock.
    pub fn clock(&self) -> Clock {
        self.state.lock().schedule.clock.clone()
    }

    /// timerfd_settime(2): the first expiry, relative or on the clock's axis (0 disarms), and the period; gives the old setting.
    pub fn set(&self, value: Nanos, absolute: bool, interval: Nanos, flags: u32) -> (Nanos, Nanos) {
        let old = self.get();
        let by_real = self.clock_id == CLOCK_REALTIME as i32;
        let cancels = by_real && absolute && flags & CANCEL_ON_SET != 0;
        let watching = cancels.then(|| {
            let told = Arc::new(ClockWatch(self.this.clone()));
            self.kernel.timers.clock_set.observe(Events::READABLE, told)
        });
        let mut s = self.state.lock();
        let before = core::mem::replace(&mut s.watching, watching);
        s.canceled = false;
        let now = s.schedule.begin(absolute).now(&self.kernel);
        let first = match value {
            0 => None,
            v if absolute => Some(v),
            v => Some(now.saturating_add(v)),
        };
        s.ticks = 0;
        s.expired = false;
        s.flags = flags;
        if let Some(this) = self.this.upgrade() {
            s.schedule.set(&self.kernel, first, interval, &this);
        }
        drop(s);
        drop(before);
        old
    }
}

impl FileOps for TimerFd {
    fn read(&self, _file: &File, dst: &mut IoDest<'_>, _pos: u64) -> Result<usize> {
        if dst.remaining() < 8 {
            return Err(Errno::EINVAL);
        }
        let ticks = {
            let mut s = self.state.lock();
            if core::mem::take(&mut s.canceled) {
                s.ticks = 0;
                s.expired = false;
                return Err(Errno::ECANCELED);
            }
            self.catch_up(&mut s);
            let ticks = core::mem::take(&mut s.ticks);
            if s.expired && s.schedule.interval == 0 {
                s.expired = false;
                s.schedule.next = None;
            }
            ticks
        };
        if ticks == 0 {
            return Err(Errno::EAGAIN);
        }
        dst.put(&ticks.to_ne_bytes())?;
        Ok(8)
    }

    fn poll(&self, _file: &File) -> Events {
        if self.state.lock().ticks > 0 { Events::IN } else { Events::empty() }
    }

    fn wait_queue(&self) -> Option<Arc<WaitQueue>> {
        Some(self.queue.clone())
    }

    fn stat(&self) -> Option<Result<Stat>> {
        Some(Ok(self.inode.stat()))
    }

    fn proc_name(&self) -> Vec<u8> {
        b"anon_inode:[timerfd]".to_vec()
    }

    fn fdinfo(&self) -> Vec<u8> {
        let (left, interval) = self.get();
        let s = self.state.lock();
        let part = |ns: Nanos| format!("({}, {})", ns / 1_000_000_000, ns % 1_000_000_000);
        format!(
            "clockid: {}\nticks: {}\nsettime flags: 0{:o}\nit_value: {}\nit_interval: {}\n",
            self.clock_id,
            s.ticks,
            s.flags,
            part(left),
            part(interval)
        )
        .into_bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
