//! Job control (credentials(7), ioctl_tty(2)): which session a terminal controls, its foreground process group, and what background
//! processes may do. Owns that tie; never sessions themselves.
use std::any::Any;
use std::sync::{Arc, OnceLock, Weak};

use linux_raw_sys::ioctl as raw;

use crate::fs::anon::{get_user, put_user};
use crate::lock::{Mutex, Rank};
use crate::ns::user::Caps;
use crate::signal::{Sender, Signal, send_to_pgrp};
use crate::task::session::ControllingTty;
use crate::task::{Pid, ProcessGroup, Session, Task};
use crate::vfs::file::Caller;
use crate::vfs::{OpenFlags, OpenResult};
use crate::{Errno, Result};

/// A terminal that can be opened again through /dev/tty.
pub trait TtyDevice: Send + Sync {
    /// A further open of the terminal.
    fn open_again(self: Arc<Self>, task: &Task, flags: OpenFlags) -> Result<OpenResult>;
}

#[derive(Default)]
struct State {
    session: Weak<Session>,
    /// The foreground process group's number, which may outlive the group.
    foreground: Option<Arc<Pid>>,
}

/// The job-control side of one terminal.
pub struct JobControl {
    this: Weak<JobControl>,
    device: u64,
    terminal: OnceLock<Weak<dyn TtyDevice>>,
    state: Mutex<State>,
}

impl ControllingTty for JobControl {
    fn device(&self) -> u64 {
        self.device
    }

    fn foreground(&self) -> Option<Arc<ProcessGroup>> {
        let pid = self.state.lock().foreground.clone()?;
        pid.process_group()
    }

    fn disassociate(&self, session: &Arc<Session>) {
        if let Some(group) = self.forget(session) {
            send_to_pgrp(&group, Signal::SIGHUP, Sender::Kernel);
        }
    }

    fn associate(&self, session: &Arc<Session>, foreground: &Arc<ProcessGroup>) {
        let Some(me) = self.this.upgrade() else { return };
        *self.state.lock() = State { session: Arc::downgrade(session), foreground: Some(foreground.pid().clone()) };
        let old = session.set_tty(Some(me));
        drop(old);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl JobControl {
    /// The job control of a terminal with device number `device`, controlling no session.
    pub fn new(device: u64) -> Arc<JobControl> {
        Arc::new_cyclic(|this| JobControl {
            this: this.clone(),
            device,
            terminal: OnceLock::new(),
            state: Mutex::new(Rank::Leaf, State::default()),
        })
    }

    /// Names the terminal, once.
    pub fn set_terminal(&self, terminal: Weak<dyn TtyDevice>) {
        let _ = self.terminal.set(terminal);
    }

    /// The terminal.
    pub fn terminal(&self) -> Option<Arc<dyn TtyDevice>> {
        self.terminal.get().and_then(Weak::upgrade)
    }

    /// Whether it is the caller's controlling terminal.
    pub fn controls(&self, task: &Task) -> bool {
        let tty = task.group().session().tty();
        tty.is_some_and(|t| t.as_any().downcast_ref::<JobControl>().is_some_and(|j| core::ptr::eq(j, self)))
    }

    fn session(&self) -> Option<Arc<Session>> {
        self.state.lock().session.upgrade()
    }

    fn in_foreground(&self, group: &ProcessGroup) -> bool {
        self.state.lock().foreground.as_ref().is_none_or(|pid| Arc::ptr_eq(pid, group.pid()))
    }

    /// Whether it is the caller's terminal and the caller is not in the foreground.
    pub fn in_background(&self, task: &Task) -> bool {
        self.controls(task) && !self.in_foreground(&task.group().process_group())
    }

    /// Sends a signal that the terminal causes to the foreground process group.
    pub fn signal_foreground(&self, signal: Signal) {
        if let Some(group) = self.foreground() {
            send_to_pgrp(&group, signal, Sender::Kernel);
        }
    }

    /// What a background process gets for an access that `signal` answers (SIGTTIN or SIGTTOU): EIO where the signal
    /// could not act; for SIGTTOU success where it is blocked or ignored; ERESTARTSYS when it was sent.
    fn background(&self, task: &Task, signal: Signal) -> Result<()> {
        if !self.controls(task) {
            return Ok(());
        }
        let group = task.group().process_group();
        if self.in_foreground(&group) {
            return Ok(());
        }
        let deaf = task.signals.mask().contains(signal) || task.group().signals.actions().ignores(signal);
        if deaf {
            return if signal == Signal::SIGTTIN { Err(Errno::EIO) } else { Ok(()) };
        }
        let orphaned = {
            let _kinship = task.kernel().kinship();
            group.is_orphaned(None)
        };
        if orphaned {
            return Err(Errno::EIO);
        }
        send_to_pgrp(&group, signal, Sender::Event);
        Err(Errno::ERESTARTSYS)
    }

    /// May the caller read?
    pub fn check_read(&self, task: &Task) -> Result<()> {
        self.background(task, Signal::SIGTTIN)
    }

    /// May the caller change settings, or write with TOSTOP set?
    pub fn check_change(&self, task: &Task) -> Result<()> {
        self.background(task, Signal::SIGTTOU)
    }

    /// An open by a session leader without a controlling terminal makes this the one, unless O_NOCTTY.
    pub fn opened(&self, task: &Task, flags: OpenFlags) {
        if flags.contains(OpenFlags::NOCTTY) {
            return;
        }
        let session = task.group().session();
        let leads = session.leader().is_some_and(|l| Arc::ptr_eq(&l, task.group()));
        if leads && session.tty().is_none() && self.session().is_none() {
            self.associate(&session, &task.group().process_group());
        }
    }

    /// The terminal is gone: the session loses it, its leader and the foreground group are told.
    pub fn hang_up(&self) {
        let foreground = self.foreground();
        let session = self.session();
        *self.state.lock() = State::default();
        if let Some(session) = session {
            let mine = session
                .tty()
                .is_some_and(|t| t.as_any().downcast_ref::<JobControl>().is_some_and(|j| core::ptr::eq(j, self)));
            if mine {
                let old = session.set_tty(None);
                drop(old);
            }
            if let Some(leader) = session.leader() {
                let leads_foreground = foreground.as_ref().is_some_and(|f| Arc::ptr_eq(f, &leader.process_group()));
                if !leads_foreground {
                    send_to_pgrp(&leader.process_group(), Signal::SIGHUP, Sender::Kernel);
                    send_to_pgrp(&leader.process_group(), Signal::SIGCONT, Sender::Kernel);
                }
            }
        }
        if let Some(group) = foreground {
            send_to_pgrp(&group, Signal::SIGHUP, Sender::Kernel);
            send_to_pgrp(&group, Signal::SIGCONT, Sender::Kernel);
        }
    }

    fn take(&self, task: &Task, steal: bool) -> Result<()> {
        let session = task.group().session();
        let leads = session.leader().is_some_and(|l| Arc::ptr_eq(&l, task.group()));
        if leads && self.controls(task) {
            return Ok(());
        }
        if !leads || session.tty().is_some() {
            return Err(Errno::EPERM);
        }
        if let Some(other) = self.session() {
            if !steal || !task.credentials().has(Caps::SYS_ADMIN) {
                return Err(Errno::EPERM);
            }
            let old = other.set_tty(None);
            drop(old);
        }
        self.associate(&session, &task.group().process_group());
        Ok(())
    }

    /// Ends the control of `session`, if there is any; who was in the foreground.
    fn forget(&self, session: &Arc<Session>) -> Option<Arc<ProcessGroup>> {
        let foreground = {
            let mut state = self.state.lock();
            if !core::ptr::eq(state.session.as_ptr(), Arc::as_ptr(session)) {
                return None;
            }
            core::mem::take(&mut *state).foreground
        };
        foreground.and_then(|pid| pid.process_group())
    }

    fn give_up(&self, task: &Task) -> Result<()> {
        if !self.controls(task) {
            return Err(Errno::ENOTTY);
        }
        let session = task.group().session();
        if session.leader().is_some_and(|l| Arc::ptr_eq(&l, task.group())) {
            let old = session.set_tty(None);
            drop(old);
            if let Some(group) = self.forget(&session) {
                send_to_pgrp(&group, Signal::SIGHUP, Sender::Kernel);
                send_to_pgrp(&group, Signal::SIGCONT, Sender::Kernel);
            }
        }
        Ok(())
    }

    fn set_foreground(&self, task: &Task, number: i32) -> Result<()> {
        self.check_change(task)?;
        let session = task.group().session();
        let ours = self.session().is_some_and(|s| Arc::ptr_eq(&s, &session));
        if !self.controls(task) || !ours {
            return Err(Errno::ENOTTY);
        }
        if number < 0 {
            return Err(Errno::EINVAL);
        }
        let group = task.pid_namespace().process_group(number).ok_or(Errno::ESRCH)?;
        if !Arc::ptr_eq(group.session(), &session) {
            return Err(Errno::EPERM);
        }
        self.state.lock().foreground = Some(group.pid().clone());
        Ok(())
    }

    /// The requests of ioctl_tty(2) about sessions and process groups; None for others. `master` when asked through the master
    /// side of a pseudo-terminal, which need not be the caller's terminal.
    pub fn ioctl(&self, task: &Task, caller: &dyn Caller, request: u32, arg: u64, master: bool) -> Option<Result<u64>> {
        let number = |pid: Option<Arc<Pid>>| pid.map_or(0, |p| p.number_in(task.pid_namespace()));
        Some(match request {
            raw::TIOCSCTTY => self.take(task, arg == 1).map(|()| 0),
            raw::TIOCNOTTY => self.give_up(task).map(|()| 0),
            raw::TIOCGPGRP | raw::TIOCGSID if !master && !self.controls(task) => Err(Errno::ENOTTY),
            raw::TIOCGPGRP => {
                let foreground = self.state.lock().foreground.clone();
                put_user(caller, arg, &number(foreground))
            }
            raw::TIOCGSID => match self.session() {
                Some(session) => put_user(caller, arg, &number(Some(session.pid().clone()))),
                None => Err(Errno::ENOTTY),
            },
            raw::TIOCSPGRP => get_user::<i32>(caller, arg).and_then(|n| self.set_foreground(task, n)).map(|()| 0),
            _ => return None,
        })
    }
}
