//! What travels between sockets: segments with their source, credentials and descriptors, and the queue they wait in. Owns the
//! bytes in flight and their accounting; never decides who may send.
use core::cell::RefCell;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::sync::Arc;

use super::unix_gc::Flights;
use crate::event::{Events, WaitQueue};
use crate::mm::{self, IoDest, IoSource};
use crate::ns::user::Credentials;
use crate::platform::{KernelMemory, Platform};
use crate::task::{Pid, Task};
use crate::vfs::File;
use crate::{Errno, Kernel, Result};

/// Largest piece of a stream kept as one segment.
pub const CHUNK: usize = 32 << 10;
/// What a segment counts against SO_SNDBUF beyond its bytes, which count in units of 64: as much as a socket buffer of Linux.
const OVERHEAD: usize = 704;

/// Who sent: SCM_CREDENTIALS and SO_PEERCRED.
#[derive(Clone)]
pub struct Creds {
    /// The sender's thread group, translated for each reader.
    pub pid: Arc<Pid>,
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
    /// For SO_PEERGROUPS.
    pub groups: Option<Arc<Credentials>>,
}

impl Creds {
    /// Of a task.
    pub fn of(task: &Task) -> Creds {
        let cred = task.credentials();
        Creds { pid: task.group().pid().clone(), uid: cred.euid, gid: cred.egid, groups: Some(cred) }
    }

    /// As SCM_CREDENTIALS names them: the real ids.
    pub fn real_of(task: &Task) -> Creds {
        let cred = task.credentials();
        Creds { pid: task.group().pid().clone(), uid: cred.uid, gid: cred.gid, groups: None }
    }

    fn same(&self, other: &Creds) -> bool {
        Arc::ptr_eq(&self.pid, &other.pid) && self.uid == other.uid && self.gid == other.gid
    }

    /// struct ucred as `task` sees it.
    pub fn as_seen_by(&self, task: &Task) -> [u32; 3] {
        let pid = self.pid.number_in(task.pid_namespace());
        let user_ns = &task.credentials().user_ns;
        [u32::try_from(pid).unwrap_or(0), user_ns.shown_user(self.uid), user_ns.shown_group(self.gid)]
    }
}

/// Descriptors in flight; counted against the sender's RLIMIT_NOFILE as long as they are.
pub struct InFlight {
    files: Vec<Arc<File>>,
    flights: Arc<Flights>,
    _charge: mm::Charge,
}

/// What the sentry keeps for a message with descriptors, and for each descriptor.
const FLIGHT_COST: usize = 192;
const FLIGHT_FILE_COST: usize = 96;

impl InFlight {
    /// Sends `files` on their way. ETOOMANYREFS beyond `limit` in flight, ENOMEM at the sandbox's memory limit.
    pub fn new(kernel: &Kernel, files: Vec<Arc<File>>, limit: u64) -> Result<InFlight> {
        let flights = kernel.flights.clone();
        let cost = files.len().saturating_mul(FLIGHT_FILE_COST).saturating_add(FLIGHT_COST);
        let charge = mm::Charge::new(&kernel.platform, KernelMemory::Slab, cost)?;
        if flights.count() as u64 > limit {
            flights.collect();
        }
        let now = flights.depart(&files);
        let flight = InFlight { files, flights, _charge: charge };
        if now as u64 > limit {
            return Err(Errno::ETOOMANYREFS);
        }
        Ok(flight)
    }

    /// The descriptions.
    pub fn files(&self) -> &[Arc<File>] {
        &self.files
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.flights.arrive(&self.files);
        close_in_turn(core::mem::take(&mut self.files));
    }
}

thread_local! {
    /// Files that an outer call of [`close_in_turn`] will drop.
    static CLOSING: RefCell<Option<Vec<Arc<File>>>> = const { RefCell::new(None) };
}

/// Drops files one after the other. One may be a socket whose queue holds further files: a chain of such sockets is as long as the
/// guest makes it, and must not become a chain of calls.
fn close_in_turn(files: Vec<Arc<File>>) {
    let outermost = CLOSING.with_borrow_mut(|closing| {
        if let Some(list) = closing {
            list.extend(files);
            return false;
        }
        *closing = Some(files);
        true
    });
    if !outermost {
        return;
    }
    while let Some(file) = CLOSING.with_borrow_mut(|closing| closing.as_mut().and_then(Vec::pop)) {
        drop(file);
    }
    CLOSING.with_borrow_mut(|closing| *closing = None);
}

/// A sender's SO_SNDBUF account. What it has sent and nobody has received yet is charged to the sandbox's memory too.
pub struct Budget {
    platform: Arc<dyn Platform>,
    used: AtomicUsize,
    limit: AtomicUsize,
    queue: Arc<WaitQueue>,
}

impl Budget {
    /// An account of `limit` bytes; `queue` is told when there is room again.
    pub fn new(platform: &Arc<dyn Platform>, limit: usize, queue: Arc<WaitQueue>) -> Arc<Budget> {
        let (used, limit) = (AtomicUsize::new(0), AtomicUsize::new(limit));
        Arc::new(Budget { platform: platform.clone(), used, limit, queue })
    }

    /// The machine whose memory the bytes take.
    pub fn platform(&self) -> &Arc<dyn Platform> {
        &self.platform
    }

    /// Bytes that may still be sent.
    pub fn room(&self) -> usize {
        self.limit().saturating_sub(self.used.load(Ordering::Relaxed))
    }

    /// Bytes sent and not yet received.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// SO_SNDBUF.
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// Sets SO_SNDBUF.
    pub fn set_limit(&self, bytes: usize) {
        self.limit.store(bytes, Ordering::Relaxed);
        self.queue.wake(Events::WRITABLE);
    }

    /// Whether poll(2) calls the socket writable: at most a quarter is used, as Linux's unix_writable.
    pub fn writable(&self) -> bool {
        self.used.load(Ordering::Relaxed).saturating_mul(4) <= self.limit()
    }

    /// Charges a segment of at most `len` bytes that is about to be made. ENOBUFS at the sandbox's memory limit, as where
    /// Linux has no memory for a socket buffer.
    pub fn charge(self: &Arc<Self>, len: usize) -> Result<Charge> {
        let bytes = len.max(1).next_multiple_of(64).saturating_add(OVERHEAD);
        self.platform.memory().charge(KernelMemory::Buffer, bytes as u64).map_err(|_| Errno::ENOBUFS)?;
        self.used.fetch_add(bytes, Ordering::Relaxed);
        Ok(Charge { budget: self.clone(), bytes })
    }
}

/// Bytes taken from a budget until it is dropped.
pub struct Charge {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Charge {
    /// Gives `bytes` back.
    fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.budget.platform.memory().uncharge(KernelMemory::Buffer, bytes as u64);
        self.budget.used.fetch_sub(bytes, Ordering::SeqCst);
        self.bytes -= bytes;
    }

    /// Takes over `bytes` of another charge on the same budget, which keeps the rest.
    fn take_over(&mut self, other: &mut Charge, bytes: usize) {
        let bytes = bytes.min(other.bytes);
        other.bytes -= bytes;
        self.bytes += bytes;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shrink(self.bytes);
        // A blocked sender may need any amount; nobody waiting costs nothing.
        self.budget.queue.wake(Events::WRITABLE);
    }
}

/// What goes with the bytes of one send.
#[derive(Default)]
pub struct Ancillary {
    /// The sender's address as a sockaddr.
    pub source: Option<Arc<[u8]>>,
    /// The sender's credentials.
    pub creds: Option<Creds>,
    /// SCM_RIGHTS.
    pub rights: Option<Arc<InFlight>>,
}

/// One message, or a piece of a stream.
pub struct Segment {
    data: Vec<u8>,
    start: usize,
    /// What came with it.
    pub ancillary: Ancillary,
    charge: Charge,
}

impl Segment {
    /// A segment whose charge was made for at least its length.
    pub fn new(data: Vec<u8>, ancillary: Ancillary, mut charge: Charge) -> Segment {
        let need = data.len().max(1).next_multiple_of(64) + OVERHEAD;
        if charge.bytes > need {
            charge.shrink(charge.bytes - need);
        }
        Segment { data, start: 0, ancillary, charge }
    }

    fn rest(&self) -> &[u8] {
        self.data.get(self.start..).unwrap_or_default()
    }
}

/// What a receive found.
#[derive(Default)]
pub struct Received {
    /// Bytes put.
    pub copied: usize,
    /// Length of the message (of a datagram, before truncation).
    pub full: usize,
    /// Sender's address.
    pub source: Option<Arc<[u8]>>,
    /// Sender's credentials.
    pub creds: Option<Creds>,
    /// Descriptors.
    pub rights: Option<Arc<InFlight>>,
    /// The message ended (MSG_EOR of SOCK_SEQPACKET).
    pub end_of_record: bool,
}

/// Segments that wait for their receiver.
#[derive(Default)]
pub struct ReceiveQueue {
    segments: VecDeque<Segment>,
    bytes: usize,
}

impl ReceiveQueue {
    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Messages held.
    pub fn len(&self) -> usize {
        self.segments.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Length of the first message (FIONREAD of datagram sockets).
    pub fn first_len(&self) -> usize {
        self.segments.front().map_or(0, |s| s.rest().len())
    }

    /// Appends a message.
    pub fn push(&mut self, segment: Segment) {
        self.bytes += segment.rest().len();
        self.segments.push_back(segment);
    }

    /// Appends bytes of a stream, to the last segment where nothing tells them apart. What is left of the charge is given
    /// back to be dropped without locks.
    #[must_use]
    pub fn push_stream(&mut self, data: Vec<u8>, ancillary: Ancillary, mut charge: Charge) -> Option<Charge> {
        self.bytes += data.len();
        if ancillary.rights.is_none()
            && let Some(last) = self.segments.back_mut()
            && last.ancillary.rights.is_none()
            && last.data.len() + data.len() <= CHUNK
            && Arc::ptr_eq(&last.charge.budget, &charge.budget)
            && match (&last.ancillary.creds, &ancillary.creds) {
                (Some(a), Some(b)) => a.same(b),
                (None, None) => true,
                _ => false,
            }
        {
            last.data.extend_from_slice(&data);
            last.charge.take_over(&mut charge, data.len());
            return Some(charge);
        }
        self.segments.push_back(Segment::new(data, ancillary, charge));
        None
    }

    /// The descriptions that waiting messages carry, by identity.
    pub fn carried(&self) -> Vec<usize> {
        let rights = self.segments.iter().filter_map(|s| s.ancillary.rights.as_ref());
        rights.flat_map(|r| r.files().iter().map(|f| Arc::as_ptr(f) as usize)).collect()
    }

    /// Takes everything out, to be dropped without locks.
    pub fn clear(&mut self) -> VecDeque<Segment> {
        self.bytes = 0;
        core::mem::take(&mut self.segments)
    }

    /// Reads bytes of a stream. Consumed segments go to `done`, to be dropped without locks. With `split_creds` the bytes of
    /// one read come from one sender.
    pub fn read_stream(
        &mut self,
        dst: &mut IoDest<'_>,
        peek: bool,
        skip: usize,
        split_creds: bool,
        done: &mut Vec<Segment>,
    ) -> Result<Received> {
        let mut out = Received::default();
        let mut index = 0;
        let mut skip = skip;
        while dst.remaining() > 0 {
            let Some(segment) = self.segments.get_mut(index) else { break };
            let rest = segment.rest();
            if skip >= rest.len() && skip > 0 {
                skip -= rest.len();
                index += 1;
                continue;
            }
            let rest = rest.get(skip..).unwrap_or_default();
            skip = 0;
            if split_creds
                && let (Some(a), Some(b)) = (&out.creds, &segment.ancillary.creds)
                && !a.same(b)
            {
                break;
            }
            let wanted = rest.len().min(dst.remaining());
            let n = match dst.put(rest.get(..wanted).unwrap_or_default()) {
                Ok(n) => n,
                Err(e) if out.copied == 0 => return Err(e),
                Err(_) => break,
            };
            out.copied += n;
            if out.creds.is_none() {
                out.creds.clone_from(&segment.ancillary.creds);
            }
            if out.source.is_none() {
                out.source.clone_from(&segment.ancillary.source);
            }
            let rights = if peek { segment.ancillary.rights.clone() } else { segment.ancillary.rights.take() };
            let had_rights = rights.is_some();
            out.rights = rights;
            if peek {
                index += 1;
            } else {
                segment.start += n;
                self.bytes = self.bytes.saturating_sub(n);
                if segment.start >= segment.data.len() {
                    done.extend(self.segments.pop_front());
                }
            }
            if had_rights || n < wanted {
                break;
            }
        }
        out.full = out.copied;
        Ok(out)
    }

    /// Reads one message; what does not fit is lost. None if there is none.
    pub fn read_message(
        &mut self,
        dst: &mut IoDest<'_>,
        peek: bool,
        done: &mut Vec<Segment>,
    ) -> Result<Option<Received>> {
        let Some(segment) = self.segments.front_mut() else { return Ok(None) };
        let rest = segment.rest();
        let full = rest.len();
        let wanted = full.min(dst.remaining());
        let result = dst.put(rest.get(..wanted).unwrap_or_default());
        let mut out = Received { full, end_of_record: true, ..Received::default() };
        out.creds.clone_from(&segment.ancillary.creds);
        out.source.clone_from(&segment.ancillary.source);
        if peek {
            out.rights.clone_from(&segment.ancillary.rights);
        } else {
            out.rights = segment.ancillary.rights.take();
            self.bytes = self.bytes.saturating_sub(full);
            done.extend(self.segments.pop_front());
        }
        out.copied = if wanted == 0 { 0 } else { result? };
        if out.copied < wanted {
            return Err(Errno::EFAULT);
        }
        Ok(Some(out))
    }
}

/// Takes up to `max` bytes of a message from the program.
pub fn take_bytes(src: &mut IoSource<'_>, max: usize) -> Result<Vec<u8>> {
    let len = src.remaining().min(max);
    let mut data = vec![0; len];
    if len == 0 {
        return Ok(data);
    }
    let n = src.take(&mut data)?;
    data.truncate(n);
    Ok(data)
}

/// As [`take_bytes`], charged before anything is taken. ENOBUFS.
pub fn charged_bytes(budget: &Arc<Budget>, src: &mut IoSource<'_>, max: usize) -> Result<(Charge, Vec<u8>)> {
    let charge = budget.charge(src.remaining().min(max))?;
    Ok((charge, take_bytes(src, max)?))
}
