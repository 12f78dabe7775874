//! The two ends of a pseudo-terminal as open files.
use std::any::Any;
use std::sync::Arc;

use super::pty::Pty;
use super::{requests, task_of};
use crate::event::{Events, WaitQueue};
use crate::fs::tty::line::{Readable, packet};
use crate::fs::tty::termios::{cc, lflag};
use crate::mm::{IoDest, IoSource};
use crate::ns::user::Caps;
use crate::task::Task;
use crate::task::session::Terminal;
use crate::vfs::file::Caller;
use crate::vfs::{File, FileOps, OpenFlags};
use crate::{Errno, Result};

/// Bytes moved under one hold of the lock.
const STEP: usize = 4096;
/// One unit of TIME, ns.
const DECISECOND: u64 = 100_000_000;

/// The master end.
pub struct PtyMaster {
    pty: Arc<Pty>,
}

impl PtyMaster {
    /// The master of a fresh pseudo-terminal.
    pub fn new(pty: Arc<Pty>) -> PtyMaster {
        PtyMaster { pty }
    }
}

impl Drop for PtyMaster {
    fn drop(&mut self) {
        self.pty.hang_up();
    }
}

impl FileOps for PtyMaster {
    fn read(&self, _file: &File, dst: &mut IoDest<'_>, _pos: u64) -> Result<usize> {
        if dst.remaining() == 0 {
            return Ok(0);
        }
        let mut total = 0;
        let mut inner = self.pty.lock();
        if inner.packet {
            let status = core::mem::take(&mut inner.line.packet_status);
            if status == 0 && inner.line.output_len() == 0 {
                return if inner.slave_lost { Err(Errno::EIO) } else { Err(Errno::EAGAIN) };
            }
            drop(inner);
            total += dst.put(&[status])?;
            if status != 0 {
                return Ok(total);
            }
            inner = self.pty.lock();
        } else if inner.line.output_len() == 0 {
            return if inner.slave_lost { Err(Errno::EIO) } else { Err(Errno::EAGAIN) };
        }
        drop(inner);
        while dst.remaining() > 0 {
            let bytes = self.pty.lock().line.take_output(dst.remaining().min(STEP));
            if bytes.is_empty() {
                break;
            }
            match dst.put(&bytes) {
                Ok(n) => total += n,
                Err(e) if total == 0 => return Err(e),
                Err(_) => break,
            }
        }
        self.pty.slave_queue.wake(Events::WRITABLE);
        if total == 0 { Err(Errno::EAGAIN) } else { Ok(total) }
    }

    fn write(&self, _file: &File, src: &mut IoSource<'_>, _pos: u64) -> Result<usize> {
        let mut total = 0;
        let mut buffer = [0; STEP];
        while src.remaining() > 0 {
            let room = self.pty.lock().line.input_room().min(src.remaining()).min(STEP);
            if room == 0 {
                break;
            }
            let part = buffer.get_mut(..room).unwrap_or_default();
            let n = match src.take(part) {
                Ok(n) => n,
                Err(e) if total == 0 => return Err(e),
                Err(_) => break,
            };
            total += n;
            let (signals, echoed) = {
                let mut inner = self.pty.lock();
                let signals = inner.line.receive(part.get(..n).unwrap_or_default());
                (signals, inner.line.output_len() > 0 || inner.line.packet_status != 0)
            };
            self.pty.signal(&signals);
            self.pty.slave_queue.wake(Events::READABLE | Events::WRITABLE);
            if echoed {
                self.pty.master_queue.wake(Events::READABLE | Events::PRI);
            }
        }
        if total == 0 && src.remaining() > 0 { Err(Errno::EAGAIN) } else { Ok(total) }
    }

    fn writes_fully(&self) -> bool {
        true
    }

    fn poll(&self, _file: &File) -> Events {
        let inner = self.pty.lock();
        let mut events = Events::empty();
        if inner.line.output_len() > 0 {
            events |= Events::READABLE;
        }
        if inner.packet && inner.line.packet_status != 0 {
            events |= Events::READABLE | Events::PRI;
        }
        if inner.slave_lost {
            events |= Events::HUP;
        }
        if inner.line.input_room() > 0 {
            events |= Events::WRITABLE;
        }
        events
    }

    fn wait_queue(&self) -> Option<Arc<WaitQueue>> {
        Some(self.pty.master_queue.clone())
    }

    fn ioctl(&self, file: &File, caller: &dyn Caller, request: u32, arg: u64) -> Result<u64> {
        requests::ioctl(&self.pty, file, task_of(caller)?, caller, request, arg, true)
    }

    fn proc_name(&self) -> Vec<u8> {
        b"/dev/ptmx".to_vec()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A slave end.
pub struct PtySlave {
    pty: Arc<Pty>,
}

impl PtySlave {
    /// An open of the slave. EIO while it is locked or after a hangup; EBUSY under TIOCEXCL.
    pub fn open(pty: &Arc<Pty>, task: &Task, flags: OpenFlags) -> Result<Arc<PtySlave>> {
        {
            let mut inner = pty.lock();
            if inner.locked || inner.hung_up {
                return Err(Errno::EIO);
            }
            if inner.exclusive && inner.slaves > 0 && !task.credentials().has(Caps::SYS_ADMIN) {
                return Err(Errno::EBUSY);
            }
            inner.slaves += 1;
            inner.slave_lost = false;
        }
        let slave = Arc::new(PtySlave { pty: pty.clone() });
        pty.job.opened(task, flags);
        Ok(slave)
    }

    /// How much of the input a read of `max` bytes may take now. EAGAIN while it has to wait.
    fn available(&self, file: &File, task: &Task, max: usize) -> Result<usize> {
        let mut inner = self.pty.lock();
        let t = inner.line.termios;
        if t.l(lflag::ICANON) {
            return match inner.line.readable(max, 1) {
                Readable::Bytes(n) => Ok(n),
                Readable::Wait => Err(Errno::EAGAIN),
            };
        }
        let min = usize::from(t.count(cc::MIN));
        let time = u64::from(t.count(cc::TIME)) * DECISECOND;
        let present = inner.line.raw_len();
        if file.nonblocking() {
            // Nothing there is EAGAIN unless MIN and TIME are both zero, which is a look.
            return if present > 0 || (min == 0 && time == 0) { Ok(present.min(max)) } else { Err(Errno::EAGAIN) };
        }
        if core::mem::take(&mut inner.timed_out) {
            inner.timer = None;
            return Ok(present.min(max));
        }
        if (min == 0 && (time == 0 || present > 0)) || (min > 0 && present >= min.min(max)) {
            inner.timer = None;
            return Ok(present.min(max));
        }
        // With MIN the timer runs from byte to byte, without it from the call on.
        let runs = time > 0 && (min == 0 || present > 0);
        let stale = inner.timer.as_ref().is_none_or(|(_, len)| min > 0 && *len != present);
        if runs && stale {
            let old = inner.timer.take();
            self.pty.arm_timer(task, &mut inner, time);
            drop(inner);
            drop(old);
        }
        Err(Errno::EAGAIN)
    }
}

impl Drop for PtySlave {
    fn drop(&mut self) {
        let last = {
            let mut inner = self.pty.lock();
            inner.slaves -= 1;
            inner.slave_lost = inner.slaves == 0;
            inner.exclusive &= inner.slaves > 0;
            inner.slave_lost
        };
        if last {
            self.pty.master_queue.wake(Events::all());
        }
    }
}

impl FileOps for PtySlave {
    fn read_as(&self, file: &File, caller: &dyn Caller, dst: &mut IoDest<'_>, _pos: u64) -> Result<usize> {
        let task = task_of(caller)?;
        if self.pty.lock().hung_up {
            return Ok(0);
        }
        self.pty.job.check_read(task)?;
        if dst.remaining() == 0 {
            return Ok(0);
        }
        let n = self.available(file, task, dst.remaining())?;
        let bytes = self.pty.lock().line.take_input(n);
        self.pty.master_queue.wake(Events::WRITABLE);
        if bytes.is_empty() {
            return Ok(0);
        }
        dst.put(&bytes)
    }

    fn write_as(&self, file: &File, caller: &dyn Caller, src: &mut IoSource<'_>, _pos: u64) -> Result<usize> {
        let task = task_of(caller)?;
        let short = src.remaining() <= STEP && !file.nonblocking();
        if self.pty.lock().line.termios.l(lflag::TOSTOP) {
            self.pty.job.check_change(task)?;
        }
        let mut total = 0;
        let mut buffer = [0; STEP];
        while src.remaining() > 0 {
            let space = {
                let inner = self.pty.lock();
                if inner.hung_up {
                    drop(inner);
                    return if total > 0 { Ok(total) } else { Err(Errno::EIO) };
                }
                // A tab may become eight bytes.
                inner.line.output_room() / 8
            };
            // A short blocking write is not split: its first attempt could not remember how far it came.
            if space <= 1 || (short && space < src.remaining()) {
                break;
            }
            let part = buffer.get_mut(..space.min(src.remaining()).min(STEP)).unwrap_or_default();
            let n = match src.take(part) {
                Ok(n) => n,
                Err(e) if total == 0 => return Err(e),
                Err(_) => break,
            };
            self.pty.lock().line.write(part.get(..n).unwrap_or_default());
            total += n;
            self.pty.master_queue.wake(Events::READABLE);
        }
        if total == 0 && src.remaining() > 0 { Err(Errno::EAGAIN) } else { Ok(total) }
    }

    fn writes_fully(&self) -> bool {
        true
    }

    fn poll(&self, _file: &File) -> Events {
        let inner = self.pty.lock();
        if inner.hung_up {
            return Events::READABLE | Events::WRITABLE | Events::ERR | Events::HUP;
        }
        let mut events = Events::empty();
        let t = inner.line.termios;
        let least = if t.count(cc::TIME) == 0 { usize::from(t.count(cc::MIN)).max(1) } else { 1 };
        if matches!(inner.line.readable(usize::MAX, least), Readable::Bytes(_)) {
            events |= Events::READABLE;
        }
        if inner.line.output_room() >= 256 {
            events |= Events::WRITABLE;
        }
        events
    }

    fn wait_queue(&self) -> Option<Arc<WaitQueue>> {
        Some(self.pty.slave_queue.clone())
    }

    fn ioctl(&self, file: &File, caller: &dyn Caller, request: u32, arg: u64) -> Result<u64> {
        requests::ioctl(&self.pty, file, task_of(caller)?, caller, request, arg, false)
    }

    fn terminal(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(Arc::new(Terminal(self.pty.job.clone())))
    }

    fn proc_name(&self) -> Vec<u8> {
        format!("/dev/pts/{}", self.pty.index).into_bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Status bits that a master in packet mode has not seen yet are news to it.
pub(super) fn tell_master(pty: &Pty) {
    let status = pty.lock().line.packet_status;
    if status & (packet::FLUSHREAD | packet::FLUSHWRITE | packet::STOP | packet::START) != 0 || status != 0 {
        pty.master_queue.wake(Events::READABLE | Events::PRI);
    }
}
