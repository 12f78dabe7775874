//! The caller's standard streams and other host streams as open files. Owns the translation between guest requests and the
//! host stream; never lets a request reach the host that could act on the caller's terminal beyond its settings.
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::any::Any;
use std::sync::{Arc, Weak};

use guest_abi::UserAddr;
use guest_abi::types::Stat;
use linux_raw_sys::ioctl as raw;

use super::tty::termios::lflag;
use super::tty::{JobControl, TtyDevice};
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::mm::{IoDest, IoSource};
use crate::platform::host::{AttrChange, HostStream};
use crate::task::Task;
use crate::task::session::Terminal;
use crate::vfs::file::Caller;
use crate::vfs::{File, FileOps, OpenFlags, OpenResult};
use crate::{Errno, Result};

/// Most bytes pinned for one transfer.
const PIN_MAX: usize = 1 << 20;
/// Bytes moved at once through the sentry's own memory.
const BOUNCE: usize = 64 << 10;

/// How the argument of a terminal request is passed.
enum Arg {
    /// The kernel reads this many bytes from the address.
    In(usize),
    /// The kernel writes this many bytes.
    Out(usize),
    /// The argument is the value itself.
    Value,
}

/// Requests that may be passed to a host terminal: its settings and queues, nothing that injects input (TIOCSTI), steals or
/// shares the terminal (TIOCSCTTY, TIOCCONS), or concerns host process groups.
fn terminal_request(request: u32) -> Option<Arg> {
    const TERMIOS: usize = 36;
    const TERMIOS2: usize = 44;
    const TERMIO: usize = 18;
    Some(match request {
        raw::TCGETS => Arg::Out(TERMIOS),
        raw::TCSETS | raw::TCSETSW | raw::TCSETSF => Arg::In(TERMIOS),
        raw::TCGETA => Arg::Out(TERMIO),
        raw::TCSETA | raw::TCSETAW | raw::TCSETAF => Arg::In(TERMIO),
        raw::TCGETS2 => Arg::Out(TERMIOS2),
        raw::TCSETS2 | raw::TCSETSW2 | raw::TCSETSF2 => Arg::In(TERMIOS2),
        raw::TIOCGWINSZ => Arg::Out(8),
        raw::TIOCSWINSZ => Arg::In(8),
        raw::FIONREAD | raw::TIOCOUTQ | raw::TIOCGETD | raw::TIOCMGET => Arg::Out(4),
        raw::TCSBRK | raw::TCSBRKP | raw::TCXONC | raw::TCFLSH => Arg::Value,
        _ => return None,
    })
}

/// A terminal of the host that the sandbox was given. All standard streams that are the same terminal share one. Inside it is
/// the pseudo-terminal slave of its number, so that programs find its name.
pub struct HostTerminal {
    stream: Arc<dyn HostStream>,
    job: Arc<JobControl>,
    /// Its number in /dev/pts.
    pub index: u32,
    devpts: Arc<AtomicU64>,
}

/// The terminals of the host that one sandbox was given.
pub struct HostTerminals {
    /// By the host's device number: what makes two streams the same terminal. They stay: a process that closed all its
    /// streams may still open /dev/tty.
    list: Mutex<Vec<(u64, Arc<HostTerminal>)>>,
    /// st_dev of the devpts that shows them, the sandbox's first; 0 before it exists.
    devpts: Arc<AtomicU64>,
}

impl Default for HostTerminals {
    fn default() -> Self {
        HostTerminals { list: Mutex::new(Rank::Leaf, Vec::new()), devpts: Arc::default() }
    }
}

impl HostTerminals {
    /// The terminal that `stream` is.
    fn of(&self, stream: &Arc<dyn HostStream>) -> Arc<HostTerminal> {
        let rdev = stream.stat().map_or(0, |s| s.rdev);
        let mut terminals = self.list.lock();
        if let Some(known) = terminals.iter().find(|(dev, _)| *dev == rdev).map(|(_, t)| t.clone()) {
            return known;
        }
        let index = u32::try_from(terminals.len()).unwrap_or(0);
        let job = JobControl::new(super::pts::device(index));
        let devpts = self.devpts.clone();
        let terminal = Arc::new(HostTerminal { stream: stream.clone(), job, index, devpts });
        let device: Weak<dyn TtyDevice> = Arc::downgrade(&terminal) as Weak<dyn TtyDevice>;
        terminal.job.set_terminal(device);
        terminals.push((rdev, terminal.clone()));
        terminal
    }

    /// The terminal with a number.
    pub fn numbered(&self, index: u32) -> Option<Arc<HostTerminal>> {
        self.list.lock().get(usize::try_from(index).ok()?).map(|(_, t)| t.clone())
    }

    /// One more than the largest number ever given.
    pub fn end(&self) -> u32 {
        u32::try_from(self.list.lock().len()).unwrap_or(0)
    }

    /// Makes the devpts with st_dev `dev` the one that shows them, unless another is.
    pub fn show_in(&self, dev: u64) {
        let _ = self.devpts.compare_exchange(0, dev, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Whether the devpts with st_dev `dev` shows them.
    pub fn shown_in(&self, dev: u64) -> bool {
        self.devpts.load(Ordering::Relaxed) == dev
    }
}

impl HostTerminal {
    /// A further open, as `task` opens it by name.
    pub fn open(self: &Arc<Self>, task: &Task, flags: OpenFlags) -> Arc<dyn FileOps> {
        self.job.opened(task, flags);
        StdioFile::new(self.stream.clone(), Some(self.clone()))
    }

    /// Attributes: the host's, under the identity it has inside.
    pub fn stat(&self) -> Result<Stat> {
        let host = self.stream.stat()?;
        Ok(super::pts::host_terminal_stat(self.devpts.load(Ordering::Relaxed), self.index, &host))
    }

    /// Whether TOSTOP is set.
    fn stops_background_output(&self) -> bool {
        let mut termios = [0; 36];
        if self.stream.terminal_request(raw::TCGETS, &mut termios).is_err() {
            return false;
        }
        let lflag = termios.get(12..16).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes);
        lflag & lflag::TOSTOP != 0
    }
}

impl TtyDevice for HostTerminal {
    fn open_again(self: Arc<Self>, _task: &Task, _flags: OpenFlags) -> Result<OpenResult> {
        Ok(OpenResult::Ops(StdioFile::new(self.stream.clone(), Some(self))))
    }
}

/// A host stream as a file.
pub struct StdioFile {
    stream: Arc<dyn HostStream>,
    terminal: Option<Arc<HostTerminal>>,
    /// Somebody observes reads or writes edge by edge: after a transfer the host is asked again for the next edge.
    polled: AtomicBool,
}

impl StdioFile {
    fn new(stream: Arc<dyn HostStream>, terminal: Option<Arc<HostTerminal>>) -> Arc<StdioFile> {
        Arc::new(StdioFile { stream, terminal, polled: AtomicBool::new(false) })
    }

    /// A description of `stream`, opened with `flags` (an access mode and status flags); `terminals` are the sandbox's.
    pub fn open(terminals: &HostTerminals, stream: Arc<dyn HostStream>, flags: OpenFlags) -> Arc<File> {
        let terminal = stream.is_terminal().then(|| terminals.of(&stream));
        File::new(StdioFile::new(stream, terminal), None, flags)
    }

    /// Whether it is a terminal.
    pub fn is_terminal(&self) -> bool {
        self.terminal.is_some()
    }

    /// After a transfer the next readiness is news for edge-triggered observers.
    fn rearm(&self, interest: Events) {
        if self.polled.load(Ordering::Relaxed) {
            self.stream.arm(interest);
        }
    }

    fn read_some(&self, dst: &mut IoDest<'_>) -> Result<usize> {
        if let Some(pinned) = dst.pin(PIN_MAX)? {
            let n = self.stream.read_phys(pinned.ranges())?;
            dst.advance(n);
            return Ok(n);
        }
        let mut buffer = vec![0; dst.remaining().min(BOUNCE)];
        let n = self.stream.read(&mut buffer)?;
        dst.put(buffer.get(..n).unwrap_or_default())
    }

    /// Bytes written and bytes offered.
    fn write_some(&self, src: &mut IoSource<'_>) -> Result<(usize, usize)> {
        if let Some(pinned) = src.pin(PIN_MAX)? {
            let offered = pinned.ranges().iter().map(|r| r.len).sum();
            let n = self.stream.write_phys(pinned.ranges())?;
            src.advance(n);
            return Ok((n, offered));
        }
        let mut buffer = vec![0; src.remaining().min(BOUNCE)];
        let offered = src.take(&mut buffer)?;
        Ok((self.stream.write(buffer.get(..offered).unwrap_or_default())?, offered))
    }
}

impl FileOps for StdioFile {
    fn read(&self, _file: &File, dst: &mut IoDest<'_>, _pos: u64) -> Result<usize> {
        if dst.remaining() == 0 {
            return Ok(0);
        }
        let result = self.read_some(dst);
        self.rearm(Events::READABLE);
        result
    }

    fn write(&self, _file: &File, src: &mut IoSource<'_>, _pos: u64) -> Result<usize> {
        let mut total = 0;
        while src.remaining() > 0 {
            match self.write_some(src) {
                Ok((n, offered)) => {
                    total += n;
                    if n < offered {
                        break;
                    }
                }
                Err(e) if total == 0 => {
                    self.rearm(Events::WRITABLE);
                    return Err(e);
                }
                Err(_) => break,
            }
        }
        self.rearm(Events::WRITABLE);
        Ok(total)
    }

    fn read_as(&self, file: &File, caller: &dyn Caller, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
        if let (Some(terminal), Some(task)) = (&self.terminal, caller.as_any().downcast_ref::<Task>()) {
            terminal.job.check_read(task)?;
        }
        self.read(file, dst, pos)
    }

    fn write_as(&self, file: &File, caller: &dyn Caller, src: &mut IoSource<'_>, pos: u64) -> Result<usize> {
        if let (Some(terminal), Some(task)) = (&self.terminal, caller.as_any().downcast_ref::<Task>())
            && terminal.job.in_background(task)
            && terminal.stops_background_output()
        {
            terminal.job.check_change(task)?;
        }
        self.write(file, src, pos)
    }

    fn writes_fully(&self) -> bool {
        true
    }

    fn terminal(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(Arc::new(Terminal(self.terminal.as_ref()?.job.clone())))
    }

    fn reopen(&self, _caller: &dyn Caller, _flags: OpenFlags) -> Result<OpenResult> {
        Ok(OpenResult::Ops(StdioFile::new(self.stream.clone(), self.terminal.clone())))
    }

    fn size(&self) -> Result<u64> {
        u64::try_from(self.stream.stat()?.size).map_err(|_| Errno::EINVAL)
    }

    fn seek(&self, _file: &File, _pos: u64, offset: i64, whence: u32) -> Result<u64> {
        self.stream.seek(offset, whence)
    }

    fn poll(&self, _file: &File) -> Events {
        self.stream.poll()
    }

    fn wait_queue(&self) -> Option<Arc<WaitQueue>> {
        Some(self.stream.wait_queue())
    }

    fn arm(&self, events: Events) {
        self.polled.store(true, Ordering::Relaxed);
        self.stream.arm(events);
    }

    fn ioctl(&self, _file: &File, caller: &dyn Caller, request: u32, arg: u64) -> Result<u64> {
        if let (Some(terminal), Some(task)) = (&self.terminal, caller.as_any().downcast_ref::<Task>())
            && let Some(answer) = terminal.job.ioctl(task, caller, request, arg, false)
        {
            return answer;
        }
        let form = terminal_request(request).ok_or(Errno::ENOTTY)?;
        match &self.terminal {
            None if request != raw::FIONREAD => return Err(Errno::ENOTTY),
            Some(terminal) if !matches!(form, Arg::Out(_)) && request != raw::TIOCSWINSZ => {
                if let Some(task) = caller.as_any().downcast_ref::<Task>() {
                    terminal.job.check_change(task)?;
                }
            }
            _ => {}
        }
        let addr = UserAddr(arg);
        match form {
            Arg::In(len) => {
                let mut data = vec![0; len];
                caller.space()?.read_bytes(addr, &mut data)?;
                self.stream.terminal_request(request, &mut data)
            }
            Arg::Out(len) => {
                let mut data = vec![0; len];
                let result = self.stream.terminal_request(request, &mut data)?;
                caller.space()?.write_bytes(addr, &data)?;
                Ok(result)
            }
            Arg::Value => {
                let mut data = arg.to_ne_bytes();
                self.stream.terminal_request(request, &mut data)
            }
        }
    }

    fn sync(&self, _data_only: bool) -> Result<()> {
        match (self.stream.stat()?.mode >> 12) & 15 {
            8 => Ok(()),
            _ => Err(Errno::EINVAL),
        }
    }

    fn stat(&self) -> Option<Result<Stat>> {
        Some(match &self.terminal {
            Some(terminal) => terminal.stat(),
            None => self.stream.stat(),
        })
    }

    fn truncate(&self, len: u64) -> Result<()> {
        self.stream.truncate(len)
    }

    fn set_attr(&self, change: &AttrChange) -> Option<Result<()>> {
        // The length alone is the guest's to change: `> /dev/stdout` asks for it.
        let AttrChange { mode, uid, gid, size, atime, mtime } = *change;
        let others = mode.is_some() || uid.is_some() || gid.is_some() || atime.is_some() || mtime.is_some();
        Some(match size {
            Some(len) if !others => self.stream.truncate(len),
            _ => Err(Errno::EPERM),
        })
    }

    fn proc_name(&self) -> Vec<u8> {
        if let Some(terminal) = &self.terminal {
            return format!("/dev/pts/{}", terminal.index).into_bytes();
        }
        let (kind, ino) = self.stream.stat().map_or((0, 0), |s| ((s.mode >> 12) & 15, s.ino));
        match kind {
            1 => format!("pipe:[{ino}]").into_bytes(),
            12 => format!("socket:[{ino}]").into_bytes(),
            _ => b"/dev/stdio".to_vec(),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::pts::DevPts;
    use crate::kernel::{Kernel, KernelConfig};
    use crate::platform::PhysRange;
    use crate::platform::sim::SimPlatform;
    use crate::vfs::FileSystem;

    /// A terminal with this device number that has nothing to say.
    struct Silent(u64);

    impl HostStream for Silent {
        fn stat(&self) -> Result<Stat> {
            Ok(Stat { rdev: self.0, ..Stat::default() })
        }
        fn read(&self, _: &mut [u8]) -> Result<usize> {
            Err(Errno::EAGAIN)
        }
        fn write(&self, _: &[u8]) -> Result<usize> {
            Err(Errno::EAGAIN)
        }
        fn read_phys(&self, _: &[PhysRange]) -> Result<usize> {
            Err(Errno::EAGAIN)
        }
        fn write_phys(&self, _: &[PhysRange]) -> Result<usize> {
            Err(Errno::EAGAIN)
        }
        fn poll(&self) -> Events {
            Events::empty()
        }
        fn wait_queue(&self) -> Arc<WaitQueue> {
            WaitQueue::new()
        }
        fn arm(&self, _: Events) {}
        fn is_terminal(&self) -> bool {
            true
        }
        fn terminal_request(&self, _: u32, _: &mut [u8]) -> Result<u64> {
            Err(Errno::ENOTTY)
        }
        fn seek(&self, _: i64, _: u32) -> Result<u64> {
            Err(Errno::ESPIPE)
        }
    }

    #[test]
    fn each_sandbox_shows_its_own_terminals() {
        let kernels = [1, 2].map(|_| Kernel::new(SimPlatform::new(1), KernelConfig::default()));
        for (kernel, others) in kernels.iter().zip([1, 2]) {
            let (first, further) = (DevPts::new(kernel), DevPts::new(kernel));
            assert_eq!(kernel.terminals.end(), 0);
            for rdev in [others, 7, 7, 8] {
                drop(StdioFile::open(&kernel.terminals, Arc::new(Silent(rdev)), OpenFlags::empty()));
            }
            assert_eq!(kernel.terminals.end(), 3, "two streams are one terminal");
            let root = first.root();
            let slave = root.lookup(b"2").unwrap();
            assert_eq!(slave.stat().unwrap().dev, root.stat().unwrap().dev);
            assert!(root.lookup(b"3").is_err());
            assert!(further.root().lookup(b"0").is_err(), "only the first devpts shows them");
        }
    }
}
