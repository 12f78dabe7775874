//! signalfd(2): pending signals as a file. Owns the set; the queues are those of whoever reads.
use std::any::Any;
use std::sync::{Arc, Weak};

use guest_abi::types::{SigInfo, Stat};
use zerocopy::{Immutable, IntoBytes};

use super::anon::{AnonInode, DEV_ANON};
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::mm::IoDest;
use crate::signal::queue::code;
use crate::signal::{SigSet, Signal, deliver};
use crate::task::Task;
use crate::vfs::file::Caller;
use crate::vfs::{File, FileOps, OpenFlags};
use crate::{Errno, Result};

/// struct signalfd_siginfo.
#[derive(Clone, Copy, IntoBytes, Immutable)]
#[repr(C)]
struct Record {
    signo: u32,
    errno: i32,
    code: i32,
    pid: u32,
    uid: u32,
    fd: i32,
    tid: u32,
    band: u32,
    overrun: u32,
    trapno: u32,
    status: i32,
    int: i32,
    ptr: u64,
    utime: u64,
    stime: u64,
    addr: u64,
    addr_lsb: u16,
    pad2: u16,
    syscall: i32,
    call_addr: u64,
    arch: u32,
    pad: [u8; 28],
}

const _: () = assert!(size_of::<Record>() == 128);

/// A signalfd object.
pub struct SignalFd {
    mask: Mutex<SigSet>,
    /// Who made it: readiness without a caller at hand is judged by this task's queues.
    maker: Weak<Task>,
    inode: AnonInode,
}

impl SignalFd {
    /// A description of a new object.
    pub fn open(task: &Arc<Task>, mask: SigSet, flags: OpenFlags) -> Arc<File> {
        let ops = Arc::new(SignalFd {
            mask: Mutex::new(Rank::Leaf, mask),
            maker: Arc::downgrade(task),
            inode: AnonInode::new(task, DEV_ANON, 0o600),
        });
        File::new(ops, None, flags | OpenFlags::RDWR)
    }

    /// Replaces the set; `task` is the caller, and those of its group that wait look again.
    pub fn set_mask(&self, task: &Task, mask: SigSet) {
        *self.mask.lock() = mask;
        task.group().signals.arrivals.wake(Events::READABLE);
    }

    fn readiness(&self, task: &Task) -> Events {
        let pending = task.signals.pending() | task.group().signals.pending();
        if pending.intersects(*self.mask.lock()) { Events::IN } else { Events::empty() }
    }
}

fn record(info: &SigInfo) -> Record {
    let low = |i: usize| info.fields[i] as u32;
    let high = |i: usize| (info.fields[i] >> 32) as u32;
    let mut r = Record {
        signo: info.signo as u32,
        errno: info.errno,
        code: info.code,
        pid: 0,
        uid: 0,
        fd: 0,
        tid: 0,
        band: 0,
        overrun: 0,
        trapno: 0,
        status: 0,
        int: 0,
        ptr: 0,
        utime: 0,
        stime: 0,
        addr: 0,
        addr_lsb: 0,
        pad2: 0,
        syscall: 0,
        call_addr: 0,
        arch: 0,
        pad: [0; 28],
    };
    let signal = Signal::new(info.signo);
    match info.code {
        code::SI_TIMER => {
            r.tid = low(0);
            r.overrun = high(0);
            r.int = low(1) as i32;
            r.ptr = info.fields[1];
        }
        c if c > 0 && signal == Some(Signal::SIGCHLD) => {
            r.pid = low(0);
            r.uid = high(0);
            r.status = low(1) as i32;
            r.utime = info.fields[2];
            r.stime = info.fields[3];
        }
        c if c > 0 && c != code::SI_KERNEL && signal.is_some_and(|s| SigSet::SYNCHRONOUS.contains(s)) => {
            r.addr = info.fields[0];
        }
        c if (c > 0 && c != code::SI_KERNEL && signal == Some(Signal::SIGIO)) || c == code::SI_SIGIO => {
            r.band = low(0);
            r.fd = low(1) as i32;
        }
        _ => {
            r.pid = low(0);
            r.uid = high(0);
            r.int = low(1) as i32;
            r.ptr = info.fields[1];
        }
    }
    r
}

impl FileOps for SignalFd {
    fn read_as(&self, _file: &File, caller: &dyn Caller, dst: &mut IoDest<'_>, _pos: u64) -> Result<usize> {
        let task = caller.as_any().downcast_ref::<Task>().ok_or(Errno::EINVAL)?;
        let count = dst.remaining() / size_of::<Record>();
        if count == 0 {
            return Err(Errno::EINVAL);
        }
        let mask = *self.mask.lock();
        let mut done = 0;
        for _ in 0..count {
            let Some(entry) = deliver::take_waited(task, mask) else { break };
            match dst.put(record(&entry.info).as_bytes()) {
                Ok(n) => done += n,
                Err(e) if done == 0 => return Err(e),
                Err(_) => break,
            }
        }
        if done == 0 { Err(Errno::EAGAIN) } else { Ok(done) }
    }

    fn poll(&self, _file: &File) -> Events {
        self.maker.upgrade().map_or(Events::empty(), |task| self.readiness(&task))
    }

    fn poll_as(&self, file: &File, caller: &dyn Caller) -> Events {
        caller.as_any().downcast_ref::<Task>().map_or_else(|| self.poll(file), |task| self.readiness(task))
    }

    fn wait_queue(&self) -> Option<Arc<WaitQueue>> {
        Some(self.maker.upgrade().map_or_else(WaitQueue::new, |task| task.group().signals.arrivals.clone()))
    }

    fn wait_queue_as(&self, caller: &dyn Caller) -> Option<Arc<WaitQueue>> {
        let task = caller.as_any().downcast_ref::<Task>();
        task.map_or_else(|| self.wait_queue(), |task| Some(task.group().signals.arrivals.clone()))
    }

    fn stat(&self) -> Option<Result<Stat>> {
        Some(Ok(self.inode.stat()))
    }

    fn proc_name(&self) -> Vec<u8> {
        b"anon_inode:[signalfd]".to_vec()
    }

    fn fdinfo(&self) -> Vec<u8> {
        format!("sigmask:\t{:016x}\n", self.mask.lock().0).into_bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
