//! One pseudo-terminal: the line between its two ends. Owns the ends' counts and what the loss of one means to the other.
use std::sync::{Arc, Weak};

use guest_abi::types::Stat;

use super::ends::PtySlave;
use super::{Home, Shared};
use crate::Result;
use crate::event::{Events, WaitQueue};
use crate::fs::tty::{JobControl, Line, TtyDevice, WinSize};
use crate::lock::{Mutex, MutexGuard, Rank};
use crate::platform::host::AttrChange;
use crate::signal::Signal;
use crate::task::Task;
use crate::time::Nanos;
use crate::time::timer::{Armed, TimerTarget};
use crate::vfs::{OpenFlags, OpenResult};

/// What both ends change.
pub struct Inner {
    /// The line discipline.
    pub line: Line,
    /// Window size.
    pub size: WinSize,
    /// TIOCSPTLCK: the slave may not be opened.
    pub locked: bool,
    /// TIOCEXCL.
    pub exclusive: bool,
    /// TIOCPKT.
    pub packet: bool,
    /// Open slave descriptions.
    pub slaves: usize,
    /// A slave has been open at some time, and none is since the last one closed.
    pub slave_lost: bool,
    /// The master is closed.
    pub hung_up: bool,
    /// A read with TIME waits: the timer and how much input there was when it was armed.
    pub timer: Option<(Armed, usize)>,
    /// The timer of a read has run out.
    pub timed_out: bool,
}

/// A pseudo-terminal.
pub struct Pty {
    this: Weak<Pty>,
    home: Home,
    /// Its number.
    pub index: u32,
    /// Its device number.
    pub rdev: u64,
    /// Sessions and process groups.
    pub job: Arc<JobControl>,
    inner: Mutex<Inner>,
    /// Fires for users of the master.
    pub master_queue: Arc<WaitQueue>,
    /// Fires for users of the slave.
    pub slave_queue: Arc<WaitQueue>,
    stat: Mutex<Stat>,
}

impl Pty {
    pub(super) fn new(home: &Arc<Shared>, index: u32, rdev: u64, stat: Stat) -> Arc<Pty> {
        let inner = Inner {
            line: Line::default(),
            size: WinSize::default(),
            locked: true,
            exclusive: false,
            packet: false,
            slaves: 0,
            slave_lost: false,
            hung_up: false,
            timer: None,
            timed_out: false,
        };
        let job = JobControl::new(rdev);
        let pty = Arc::new_cyclic(|this: &Weak<Pty>| Pty {
            this: this.clone(),
            home: Arc::downgrade(home),
            index,
            rdev,
            job,
            inner: Mutex::new(Rank::Pipe, inner),
            master_queue: WaitQueue::new(),
            slave_queue: WaitQueue::new(),
            stat: Mutex::new(Rank::Leaf, stat),
        });
        let terminal: Weak<dyn TtyDevice> = pty.this.clone();
        pty.job.set_terminal(terminal);
        pty
    }

    /// The state between the ends.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Attributes of the slave's name.
    pub fn stat(&self) -> Stat {
        *self.stat.lock()
    }

    /// Changes them.
    pub fn set_attr(&self, change: &AttrChange) {
        let mut stat = self.stat.lock();
        if let Some(mode) = change.mode {
            stat.mode = (stat.mode & !0o7777) | (mode & 0o7777);
        }
        stat.uid = change.uid.unwrap_or(stat.uid);
        stat.gid = change.gid.unwrap_or(stat.gid);
        stat.atime = change.atime.unwrap_or(stat.atime);
        stat.mtime = change.mtime.unwrap_or(stat.mtime);
    }

    /// Sends signals that typed characters or requests cause.
    pub fn signal(&self, signals: &[Signal]) {
        for &signal in signals {
            self.job.signal_foreground(signal);
        }
    }

    /// Arms the timer of a reader that waits with TIME.
    pub fn arm_timer(self: &Arc<Self>, task: &Task, inner: &mut Inner, after: Nanos) {
        let target = Arc::new(ReadTimer { pty: self.this.clone() });
        let armed = task.kernel().timers.arm_target(task.now().saturating_add(after), target);
        inner.timer = Some((armed, inner.line.raw_len()));
    }

    /// The master is closed: the slave hangs up.
    pub(super) fn hang_up(&self) {
        let timer = {
            let mut inner = self.inner.lock();
            inner.hung_up = true;
            inner.line.flush_input();
            inner.line.flush_output();
            inner.timer.take()
        };
        drop(timer);
        self.job.hang_up();
        self.slave_queue.wake(Events::all());
        if let Some(home) = self.home.upgrade() {
            home.forget(self.index);
        }
    }
}

impl TtyDevice for Pty {
    fn open_again(self: Arc<Self>, task: &Task, flags: OpenFlags) -> Result<OpenResult> {
        Ok(OpenResult::Ops(PtySlave::open(&self, task, flags | OpenFlags::NOCTTY)?))
    }
}

struct ReadTimer {
    pty: Weak<Pty>,
}

impl TimerTarget for ReadTimer {
    fn fire(&self, _at: Nanos) {
        if let Some(pty) = self.pty.upgrade() {
            pty.lock().timed_out = true;
            pty.slave_queue.wake(Events::READABLE);
        }
    }
}
