//! Byte streams of the host: the caller's standard streams and host character devices. Owns their descriptors; never blocks, and
//! never changes a flag of an open file description that others share.
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use guest_abi::Errno;
use guest_abi::file::MAX_RW_COUNT;
use guest_abi::types::Stat;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, Mode, OFlags, SeekFrom};
use rustix::process::{Pid, Signal, getpgrp, getpid, kill_process};
use sentry::event::{Events, WaitQueue};
use sentry::platform::PhysRange;
use sentry::platform::host::HostStream;

use super::vectored::{self, Buffers, Way};
use super::{errno, stat, terminal};
use crate::memory::GuestMemory;
use crate::reactor::{Reactor, Watch};

/// What a pipe or terminal that polls writable takes without blocking (PIPE_BUF).
const ATOMIC: usize = 4096;

/// How this stream avoids blocking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// Always ready, as regular files are; the shared position is used.
    Ready,
    /// Through a description of our own with O_NONBLOCK.
    Private,
    /// MSG_DONTWAIT.
    Socket,
    /// RWF_NOWAIT.
    NoWait,
    /// Looks before it acts.
    Polled,
}

enum Source {
    Plain(OwnedFd, Arc<WaitQueue>),
    Watched(Watch),
}

/// A stream.
pub struct Stream {
    /// The private description where there is one, else the caller's.
    source: Source,
    /// The caller's descriptor beside a private description: closing both lets the other end see the end.
    _original: Option<OwnedFd>,
    manner: Manner,
    terminal: bool,
    regular: bool,
    memory: Arc<GuestMemory>,
    /// The process group of this process, which the caller's shell moves between foreground and background as a whole.
    group: Pid,
}

/// Takes standard stream `fd` (0, 1 or 2) away from the process: the result is the caller's stream, and the number shows /dev/null
/// from now on, so that nothing else of this process holds the stream open or writes to it by accident. With `keep` the number
/// goes on to show the stream too.
pub fn take_standard(fd: BorrowedFd<'_>, keep: bool) -> std::io::Result<OwnedFd> {
    let copy = rustix::io::fcntl_dupfd_cloexec(fd, 3)?;
    if !keep {
        let null = rustix::fs::open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        match fd.as_raw_fd() {
            0 => rustix::stdio::dup2_stdin(&null)?,
            1 => rustix::stdio::dup2_stdout(&null)?,
            2 => rustix::stdio::dup2_stderr(&null)?,
            _ => {}
        }
    }
    Ok(copy)
}

/// The same object with a description of our own that does not block. Works for pipes and terminals while /proc is there.
fn reopen(fd: &OwnedFd) -> Option<OwnedFd> {
    let flags = rustix::fs::fcntl_getfl(fd).ok()?;
    let access = flags & (OFlags::RDONLY | OFlags::WRONLY | OFlags::RDWR);
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let flags = access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let new = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    // Two streams of one name: only the same object will do.
    let (a, b) = (rustix::fs::fstat(fd).ok()?, rustix::fs::fstat(&new).ok()?);
    (a.st_dev == b.st_dev && a.st_ino == b.st_ino && a.st_rdev == b.st_rdev).then_some(new)
}

impl Stream {
    /// Takes a descriptor. Must run before the jail closes /proc.
    pub fn new(fd: OwnedFd, reactor: &Arc<Reactor>, memory: Arc<GuestMemory>) -> Result<Arc<Stream>, Errno> {
        let st = rustix::fs::fstat(&fd).map_err(errno)?;
        let kind = FileType::from_raw_mode(st.st_mode);
        let terminal = kind == FileType::CharacterDevice && rustix::termios::isatty(&fd);
        let mut original = None;
        let mut fd = fd;
        let manner = match kind {
            FileType::RegularFile | FileType::Directory | FileType::BlockDevice => Manner::Ready,
            FileType::Socket => Manner::Socket,
            FileType::Fifo => match reopen(&fd) {
                Some(new) => {
                    original = Some(core::mem::replace(&mut fd, new));
                    Manner::Private
                }
                None => Manner::NoWait,
            },
            FileType::CharacterDevice if terminal => match reopen(&fd) {
                Some(new) => {
                    original = Some(core::mem::replace(&mut fd, new));
                    Manner::Private
                }
                None => Manner::Polled,
            },
            _ => Manner::Polled,
        };
        let source = match manner {
            Manner::Ready => Source::Plain(fd, WaitQueue::new()),
            _ => Source::Watched(reactor.watch(fd)),
        };
        let regular = kind == FileType::RegularFile;
        Ok(Arc::new(Stream { source, _original: original, manner, terminal, regular, memory, group: getpgrp() }))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match &self.source {
            Source::Plain(fd, _) => fd.as_fd(),
            Source::Watched(w) => w.fd(),
        }
    }

    fn ready(&self, wanted: PollFlags) -> Result<PollFlags, Errno> {
        let fd = self.fd();
        let mut list = [PollFd::new(&fd, wanted)];
        let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            match poll(&mut list, Some(&zero)) {
                Ok(_) => return Ok(list[0].revents()),
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(errno(e)),
            }
        }
    }

    fn way(&self, polled: PollFlags) -> Result<Way, Errno> {
        match self.manner {
            Manner::Ready | Manner::Private => Ok(Way::Stream),
            Manner::Socket => Ok(Way::Socket),
            Manner::NoWait => Ok(Way::StreamNoWait),
            Manner::Polled => {
                if self.ready(polled)?.is_empty() {
                    return Err(Errno::EAGAIN);
                }
                Ok(Way::Stream)
            }
        }
    }

    /// Whether this is the caller's terminal while another process group has it.
    fn in_background(&self) -> bool {
        self.terminal && rustix::termios::tcgetpgrp(self.fd()).is_ok_and(|p| p != self.group)
    }

    /// Stops this process as the terminal would have, until the caller's shell gives it the terminal. False if nothing can stop it,
    /// as in an orphaned process group.
    fn wait_for_foreground(&self, signal: Signal) -> bool {
        for _ in 0..8 {
            if !self.in_background() {
                return true;
            }
            let _ = kill_process(getpid(), signal);
            // The stop reaches this thread a little later.
            std::thread::sleep(core::time::Duration::from_millis(20));
        }
        false
    }

    fn fill(&self, b: &Buffers<'_>) -> Result<usize, Errno> {
        if b.len() == 0 {
            return Ok(0);
        }
        match vectored::read(self.fd(), b, self.way(PollFlags::IN)?) {
            // Workers block SIGTTIN, so the host says EIO where it would have stopped the process.
            Err(Errno::EIO) if self.in_background() => {
                if self.wait_for_foreground(Signal::TTIN) {
                    vectored::read(self.fd(), b, self.way(PollFlags::IN)?)
                } else {
                    Err(Errno::EIO)
                }
            }
            // No RWF_NOWAIT for this object.
            Err(Errno::EOPNOTSUPP) if self.manner == Manner::NoWait => {
                if self.ready(PollFlags::IN)?.is_empty() {
                    return Err(Errno::EAGAIN);
                }
                vectored::read(self.fd(), b, Way::Stream)
            }
            r => r,
        }
    }

    /// `cut` gives at most that many bytes of the source.
    fn send<'a>(&self, cut: impl Fn(usize) -> Result<Buffers<'a>, Errno>) -> Result<usize, Errno> {
        let most = if self.manner == Manner::Polled { ATOMIC } else { MAX_RW_COUNT };
        match vectored::write(self.fd(), &cut(most)?, self.way(PollFlags::OUT)?) {
            Err(Errno::EOPNOTSUPP) if self.manner == Manner::NoWait => {
                if self.ready(PollFlags::OUT)?.is_empty() {
                    return Err(Errno::EAGAIN);
                }
                vectored::write(self.fd(), &cut(ATOMIC)?, Way::Stream)
            }
            r => r,
        }
    }
}

impl HostStream for Stream {
    fn stat(&self) -> Result<Stat, Errno> {
        rustix::fs::fstat(self.fd()).map(|s| stat(&s)).map_err(errno)
    }

    fn read(&self, dst: &mut [u8]) -> Result<usize, Errno> {
        self.fill(&Buffers::filling(dst))
    }

    fn write(&self, src: &[u8]) -> Result<usize, Errno> {
        self.send(|most| Ok(Buffers::sending(src, most)))
    }

    fn read_phys(&self, dst: &[PhysRange]) -> Result<usize, Errno> {
        self.fill(&Buffers::guest(&self.memory, dst, MAX_RW_COUNT)?)
    }

    fn write_phys(&self, src: &[PhysRange]) -> Result<usize, Errno> {
        self.send(|most| Buffers::guest(&self.memory, src, most))
    }

    fn poll(&self) -> Events {
        if self.manner == Manner::Ready {
            return Events::READABLE | Events::WRITABLE;
        }
        let wanted = Events::READABLE | Events::WRITABLE | Events::PRI | Events::RDHUP;
        match self.ready(PollFlags::from_bits_retain(wanted.bits() as u16)) {
            Ok(f) => Events::from_bits_truncate(u32::from(f.bits())),
            Err(_) => Events::ERR,
        }
    }

    fn wait_queue(&self) -> Arc<WaitQueue> {
        match &self.source {
            Source::Plain(_, queue) => queue.clone(),
            Source::Watched(w) => w.queue().clone(),
        }
    }

    fn arm(&self, interest: Events) {
        match &self.source {
            Source::Plain(_, queue) => queue.wake(interest),
            Source::Watched(w) => w.arm(interest),
        }
    }

    fn is_terminal(&self) -> bool {
        self.terminal
    }

    fn terminal_request(&self, request: u32, data: &mut [u8]) -> Result<u64, Errno> {
        if terminal::changes(request) && self.in_background() && !self.wait_for_foreground(Signal::TTOU) {
            return Err(Errno::EIO);
        }
        terminal::request(self.fd(), request, data)
    }

    fn truncate(&self, len: u64) -> Result<(), Errno> {
        if !self.regular {
            return Err(Errno::EINVAL);
        }
        rustix::fs::ftruncate(self.fd(), len).map_err(errno)
    }

    fn seek(&self, offset: i64, whence: u32) -> Result<u64, Errno> {
        if !self.regular {
            return Err(Errno::ESPIPE);
        }
        let at = || u64::try_from(offset).map_err(|_| Errno::EINVAL);
        let to = match whence {
            linux_raw_sys::general::SEEK_SET => SeekFrom::Start(at()?),
            linux_raw_sys::general::SEEK_CUR => SeekFrom::Current(offset),
            linux_raw_sys::general::SEEK_END => SeekFrom::End(offset),
            linux_raw_sys::general::SEEK_DATA => SeekFrom::Data(at().map_err(|_| Errno::ENXIO)?),
            linux_raw_sys::general::SEEK_HOLE => SeekFrom::Hole(at().map_err(|_| Errno::ENXIO)?),
            _ => return Err(Errno::EINVAL),
        };
        rustix::fs::seek(self.fd(), to).map_err(errno)
    }
}
