//! Pipes and FIFOs (pipe(7), fifo(7)): page buffers between readers and writers. Owns the bytes in flight and the counts of
//! ends; never SIGPIPE (the system call's).
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use guest_abi::types::Stat;
use linux_raw_sys::ioctl::FIONREAD;

use super::anon::{AnonInode, DEV_PIPEFS, put_user};
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::mm::{Charge, IoDest, IoSource};
use crate::platform::KernelMemory;
use crate::platform::host::AttrChange;
use crate::task::Task;
use crate::vfs::attachments::Attachments;
use crate::vfs::file::Caller;
use crate::vfs::{File, FileOps, OpenFlags, OpenResult};
use crate::{Errno, Kernel, Result};

const PAGE: usize = 4096;
/// Buffers of a new pipe: 64 KiB.
const DEFAULT_SLOTS: usize = 16;
/// Buffers of a new pipe once its owner holds more than the soft limit.
const MIN_SLOTS: usize = 2;
/// /proc/sys/fs/pipe-user-pages-soft: slots of all pipes beyond which an unprivileged owner gets small pipes.
const SOFT_SLOTS: usize = 16384;
/// /proc/sys/fs/pipe-max-size, bytes.
pub const PIPE_MAX_SIZE: usize = 1 << 20;
/// Spare pages kept by a pipe.
const SPARE: usize = 4;

/// What all pipes of a sandbox share.
#[derive(Default)]
pub struct PipeSlots(AtomicUsize);

/// A page of a pipe.
struct Page(Box<[u8]>);

struct Buffer {
    page: Page,
    start: usize,
    end: usize,
    /// Written in packet mode: read as a whole, never merged.
    packet: bool,
}

struct Inner {
    buffers: VecDeque<Buffer>,
    spare: Vec<Page>,
    slots: usize,
    readers: usize,
    writers: usize,
    /// For the pages held and spare.
    charge: Charge,
}

impl Inner {
    fn page(&mut self) -> Result<Page> {
        if let Some(page) = self.spare.pop() {
            return Ok(page);
        }
        self.charge.add(PAGE)?;
        Ok(Page(vec![0; PAGE].into_boxed_slice()))
    }

    fn recycle(&mut self, page: Page) {
        if self.spare.len() < SPARE {
            self.spare.push(page);
        } else {
            self.charge.sub(PAGE);
        }
    }

    fn full(&self) -> bool {
        self.buffers.len() >= self.slots
    }
}

/// The object between the ends.
pub struct Pipe {
    inner: Mutex<Inner>,
    all: Arc<PipeSlots>,
    queue: Arc<WaitQueue>,
    /// Opens for reading and writing so far: what a blocked open of the other side waits for.
    reader_opens: AtomicU64,
    writer_opens: AtomicU64,
    /// Somebody polls: then every write and read wakes, for edge-triggered epoll; else only leaving empty and full does.
    polled: AtomicBool,
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.all.0.fetch_sub(self.inner.get_mut().slots, Ordering::Relaxed);
    }
}

impl Pipe {
    fn new(kernel: &Kernel, privileged: bool) -> Arc<Pipe> {
        let all = kernel.pipe_slots.clone();
        let used = all.0.load(Ordering::Relaxed);
        let slots = if used > SOFT_SLOTS && !privileged { MIN_SLOTS } else { DEFAULT_SLOTS };
        all.0.fetch_add(slots, Ordering::Relaxed);
        let charge = Charge::empty(&kernel.platform, KernelMemory::Buffer);
        let inner = Inner { buffers: VecDeque::new(), spare: Vec::new(), slots, readers: 0, writers: 0, charge };
        Arc::new(Pipe {
            inner: Mutex::new(Rank::Pipe, inner),
            all,
            queue: WaitQueue::new(),
            reader_opens: AtomicU64::new(0),
            writer_opens: AtomicU64::new(0),
            polled: AtomicBool::new(false),
        })
    }

    /// F_GETPIPE_SZ: bytes.
    pub fn capacity(&self) -> usize {
        self.inner.lock().slots.saturating_mul(PAGE)
    }

    /// F_SETPIPE_SZ: gives the new capacity. EPERM beyond pipe-max-size without CAP_SYS_RESOURCE, EBUSY below what is held.
    pub fn set_capacity(&self, bytes: usize, privileged: bool) -> Result<usize> {
        if bytes > 1 << 31 {
            return Err(Errno::EINVAL);
        }
        let slots = bytes.div_ceil(PAGE).max(1).next_power_of_two();
        let mut inner = self.inner.lock();
        let used = self.all.0.load(Ordering::Relaxed);
        if slots > inner.slots && !privileged && (slots * PAGE > PIPE_MAX_SIZE || used > SOFT_SLOTS) {
            return Err(Errno::EPERM);
        }
        if slots < inner.buffers.len() {
            return Err(Errno::EBUSY);
        }
        self.all.0.fetch_add(slots, Ordering::Relaxed);
        self.all.0.fetch_sub(inner.slots, Ordering::Relaxed);
        inner.slots = slots;
        drop(inner);
        self.queue.wake(Events::WRITABLE);
        Ok(slots * PAGE)
    }

    /// Bytes held.
    pub fn len(&self) -> usize {
        self.inner.lock().buffers.iter().map(|b| b.end - b.start).sum()
    }

    /// Whether no byte is held.
    pub fn is_empty(&self) -> bool {
        self.inner.lock().buffers.is_empty()
    }

    /// Readers and writers are told of each other's changes here.
    pub fn queue(&self) -> &Arc<WaitQueue> {
        &self.queue
    }

    fn read(&self, dst: &mut IoDest<'_>) -> Result<usize> {
        if dst.remaining() == 0 {
            return Ok(0);
        }
        let mut inner = self.inner.lock();
        let was_full = inner.full();
        let mut total = 0;
        let mut failure = None;
        while let Some(buffer) = inner.buffers.front_mut() {
            if dst.remaining() == 0 {
                break;
            }
            let bytes = buffer.page.0.get(buffer.start..buffer.end).unwrap_or_default();
            let wanted = bytes.len().min(dst.remaining());
            let n = match dst.put(bytes.get(..wanted).unwrap_or_default()) {
                Ok(n) => n,
                Err(e) => {
                    failure = Some(e);
                    break;
                }
            };
            total += n;
            buffer.start += n;
            let packet = buffer.packet;
            if ((packet && n == wanted) || buffer.start >= buffer.end)
                && let Some(done) = inner.buffers.pop_front()
            {
                inner.recycle(done.page);
            }
            if packet || n < wanted {
                break;
            }
        }
        if total == 0 {
            if let Some(e) = failure {
                return Err(e);
            }
            return if inner.writers == 0 { Ok(0) } else { Err(Errno::EAGAIN) };
        }
        let now_full = inner.full();
        drop(inner);
        if (was_full && !now_full) || self.polled.load(Ordering::Relaxed) {
            self.queue.wake_up_to(Events::WRITABLE, 1);
        }
        Ok(total)
    }

    /// A copy of up to `max` of the bytes that a read would give next, at most one packet (splice(2), tee(2)). EAGAIN while
    /// there are none and somebody may write; nothing at the end.
    pub fn peek(&self, max: usize) -> Result<Vec<u8>> {
        let inner = self.inner.lock();
        let mut out = Vec::new();
        for buffer in &inner.buffers {
            let bytes = buffer.page.0.get(buffer.start..buffer.end).unwrap_or_default();
            let wanted = bytes.len().min(max - out.len());
            out.extend_from_slice(bytes.get(..wanted).unwrap_or_default());
            if out.len() >= max || buffer.packet {
                break;
            }
        }
        if out.is_empty() && inner.writers > 0 { Err(Errno::EAGAIN) } else { Ok(out) }
    }

    /// Takes out `n` bytes that [`Pipe::peek`] gave.
    pub fn consume(&self, n: usize) {
        let mut scratch = vec![0; n];
        let mut dst = IoDest::kernel(&mut scratch);
        while dst.remaining() > 0 && self.read(&mut dst).is_ok_and(|n| n > 0) {}
    }

    fn write(&self, src: &mut IoSource<'_>, packet: bool) -> Result<usize> {
        let mut inner = self.inner.lock();
        if inner.readers == 0 {
            return Err(Errno::EPIPE);
        }
        if src.remaining() == 0 {
            return Ok(0);
        }
        let was_empty = inner.buffers.is_empty();
        let mut total = 0;
        let mut failure = None;
        // As Linux does: the odd part may join the last page, everything else takes whole free pages. So a write of at
        // most PIPE_BUF bytes is taken whole or not at all.
        let odd = src.remaining() % PAGE;
        if odd > 0
            && !packet
            && let Some(last) = inner.buffers.back_mut().filter(|b| !b.packet && PAGE - b.end >= odd)
        {
            let end = last.end;
            match src.take(last.page.0.get_mut(end..end + odd).unwrap_or_default()) {
                Ok(n) => {
                    last.end += n;
                    total += n;
                    if n < odd {
                        failure = Some(Errno::EFAULT);
                    }
                }
                Err(e) => failure = Some(e),
            }
        }
        while failure.is_none() && src.remaining() > 0 && !inner.full() {
            let mut page = match inner.page() {
                Ok(page) => page,
                Err(e) => {
                    failure = Some(e);
                    break;
                }
            };
            let wanted = src.remaining().min(PAGE);
            match src.take(page.0.get_mut(..wanted).unwrap_or_default()) {
                Ok(n) => {
                    inner.buffers.push_back(Buffer { page, start: 0, end: n, packet });
                    total += n;
                    if n < wanted {
                        failure = Some(Errno::EFAULT);
                    }
                }
                Err(e) => {
                    inner.recycle(page);
                    failure = Some(e);
                }
            }
        }
        drop(inner);
        if total == 0 {
            return Err(failure.unwrap_or(Errno::EAGAIN));
        }
        if was_empty || self.polled.load(Ordering::Relaxed) {
            self.queue.wake_up_to(Events::READABLE, 1);
        }
        Ok(total)
    }
}

/// What an open description of a pipe refers to: one end, or both of a FIFO opened O_RDWR.
pub struct PipeEnd {
    pipe: Arc<Pipe>,
    reads: bool,
    writes: bool,
    /// `writer_opens` when a FIFO's reader opened, or `reader_opens` when its writer did.
    others_seen: u64,
    /// The open still waits for the other side.
    opening: AtomicBool,
    inode: Option<Arc<AnonInode>>,
}

impl PipeEnd {
    fn new(pipe: &Arc<Pipe>, reads: bool, writes: bool, inode: Option<Arc<AnonInode>>) -> PipeEnd {
        let mut inner = pipe.inner.lock();
        let (readers, writers) = (inner.readers, inner.writers);
        inner.readers += usize::from(reads);
        inner.writers += usize::from(writes);
        let others_seen = match (reads, writes) {
            (true, false) => pipe.writer_opens.load(Ordering::Relaxed),
            _ => pipe.reader_opens.load(Ordering::Relaxed),
        };
        if reads {
            pipe.reader_opens.fetch_add(1, Ordering::Relaxed);
        }
        if writes {
            pipe.writer_opens.fetch_add(1, Ordering::Relaxed);
        }
        drop(inner);
        let opening = (!writes && writers == 0) || (!reads && readers == 0);
        pipe.queue.wake(Events::READABLE | Events::WRITABLE);
        PipeEnd { pipe: pipe.clone(), reads, writes, others_seen, opening: AtomicBool::new(opening), inode }
    }

    /// The pipe itself.
    pub fn pipe(&self) -> &Arc<Pipe> {
        &self.pipe
    }

    fn others_changed(&self) -> bool {
        let counter = if self.writes { &self.pipe.reader_opens } else { &self.pipe.writer_opens };
        counter.load(Ordering::Relaxed) != self.others_seen
    }
}

impl Drop for PipeEnd {
    fn drop(&mut self) {
        let mut inner = self.pipe.inner.lock();
        inner.readers -= usize::from(self.reads);
        inner.writers -= usize::from(self.writes);
        let lonely = inner.readers == 0 || inner.writers == 0;
        drop(inner);
        if lonely {
            self.pipe.queue.wake(Events::READABLE | Events::WRITABLE | Events::HUP | Events::ERR);
        }
    }
}

impl FileOps for PipeEnd {
    fn read(&self, _file: &File, dst: &mut IoDest<'_>, _pos: u64) -> Result<usize> {
        self.pipe.read(dst)
    }

    fn write(&self, file: &File, src: &mut IoSource<'_>, _pos: u64) -> Result<usize> {
        self.pipe.write(src, file.flags().contains(OpenFlags::DIRECT))
    }

    fn writes_fully(&self) -> bool {
        true
    }

    fn open_blocks(&self) -> bool {
        if !self.opening.load(Ordering::Relaxed) {
            return false;
        }
        let inner = self.pipe.inner.lock();
        let present = if self.reads { inner.writers } else { inner.readers };
        drop(inner);
        let blocks = present == 0 && !self.others_changed();
        if !blocks {
            self.opening.store(false, Ordering::Relaxed);
        }
        blocks
    }

    fn reopen(&self, caller: &dyn Caller, flags: OpenFlags) -> Result<OpenResult> {
        let _ = caller;
        let end = open_end(&self.pipe, flags, self.inode.clone())?;
        Ok(OpenResult::Ops(end))
    }

    fn poll(&self, _file: &File) -> Events {
        self.pipe.polled.store(true, Ordering::SeqCst);
        let inner = self.pipe.inner.lock();
        let mut events = Events::empty();
        if self.reads {
            if !inner.buffers.is_empty() {
                events |= Events::READABLE;
            }
            if inner.writers == 0 && (self.inode.is_some() || self.others_changed()) {
                events |= Events::HUP;
            }
        }
        if self.writes {
            if !inner.full() {
                events |= Events::WRITABLE;
            }
            if inner.readers == 0 {
                events |= Events::ERR;
            }
        }
        events
    }

    fn wait_queue(&self) -> Option<Arc<WaitQueue>> {
        Some(self.pipe.queue.clone())
    }

    fn more_for_next(&self, events: Events) -> Option<bool> {
        let inner = self.pipe.inner.lock();
        let reads = events.intersects(Events::READABLE) && !inner.buffers.is_empty();
        Some(reads || (events.intersects(Events::WRITABLE) && !inner.full()))
    }

    fn ioctl(&self, _file: &File, caller: &dyn Caller, request: u32, arg: u64) -> Result<u64> {
        match request {
            FIONREAD => put_user(caller, arg, &i32::try_from(self.pipe.len()).unwrap_or(i32::MAX)),
            _ => Err(Errno::ENOTTY),
        }
    }

    fn stat(&self) -> Option<Result<Stat>> {
        self.inode.as_ref().map(|i| Ok(i.stat()))
    }

    fn set_attr(&self, change: &AttrChange) -> Option<Result<()>> {
        self.inode.as_ref().map(|i| {
            i.set_attr(change);
            Ok(())
        })
    }

    fn proc_name(&self) -> Vec<u8> {
        format!("pipe:[{}]", self.inode.as_ref().map_or(0, |i| i.ino)).into_bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn open_end(pipe: &Arc<Pipe>, flags: OpenFlags, inode: Option<Arc<AnonInode>>) -> Result<Arc<PipeEnd>> {
    // A pipe reopened through /proc/PID/fd never waits for the other side.
    let nonblocking = flags.contains(OpenFlags::NONBLOCK) || inode.is_some();
    let (reads, writes) = (flags.readable(), flags.writable());
    if writes && !reads && nonblocking && inode.is_none() && pipe.inner.lock().readers == 0 {
        return Err(Errno::ENXIO);
    }
    let end = PipeEnd::new(pipe, reads, writes, inode);
    if nonblocking || (reads && writes) {
        end.opening.store(false, Ordering::Relaxed);
    }
    Ok(Arc::new(end))
}

/// A FIFO's inode knows its pipe only as long as somebody has it open.
struct FifoSlot {
    pipe: Mutex<Weak<Pipe>>,
}

impl Default for FifoSlot {
    fn default() -> Self {
        FifoSlot { pipe: Mutex::new(Rank::Leaf, Weak::new()) }
    }
}

/// Opens a FIFO whose inode keeps `attachments`; the caller waits while [`FileOps::open_blocks`]. ENXIO for a write-only
/// O_NONBLOCK open without a reader.
pub fn open_fifo(caller: &dyn Caller, attachments: &Attachments, flags: OpenFlags) -> Result<Arc<dyn FileOps>> {
    let slot = attachments.get_or_insert_with(FifoSlot::default);
    let found = slot.pipe.lock().upgrade();
    let pipe = if let Some(pipe) = found {
        pipe
    } else {
        let task = caller.as_any().downcast_ref::<Task>().ok_or(Errno::ENXIO)?;
        let made = Pipe::new(task.kernel(), false);
        let mut current = slot.pipe.lock();
        current.upgrade().unwrap_or_else(|| {
            *current = Arc::downgrade(&made);
            made
        })
    };
    Ok(open_end(&pipe, flags, None)?)
}

/// pipe2(2): the read end and the write end. `flags` may hold O_NONBLOCK, O_DIRECT.
pub fn new_pipe(task: &Task, flags: OpenFlags) -> Result<(Arc<File>, Arc<File>)> {
    let privileged = task.credentials().has(crate::ns::user::Caps::SYS_RESOURCE);
    let pipe = Pipe::new(task.kernel(), privileged);
    let inode = Arc::new(AnonInode::new(task, DEV_PIPEFS, 0o010_600));
    let reader = PipeEnd::new(&pipe, true, false, Some(inode.clone()));
    let writer = PipeEnd::new(&pipe, false, true, Some(inode));
    let status = flags & (OpenFlags::NONBLOCK | OpenFlags::DIRECT);
    Ok((File::new(Arc::new(reader), None, status), File::new(Arc::new(writer), None, status | OpenFlags::WRONLY)))
}

/// The pipe behind a description, for F_GETPIPE_SZ, F_SETPIPE_SZ and splice(2).
pub fn pipe_of(file: &File) -> Option<&Arc<Pipe>> {
    file.downcast::<PipeEnd>().map(PipeEnd::pipe)
}
