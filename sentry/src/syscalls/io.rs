//! read(2), write(2), their vector and positioned forms, lseek(2), ioctl(2).
use std::sync::Arc;

use guest_abi::file::MAX_RW_COUNT;
use guest_abi::types::Iovec;
use guest_abi::{UserAddr, UserPtr};
use linux_raw_sys::{general as raw, ioctl};

use super::args::{Bits, Fd};
use super::table::Row;
use super::{place, slices};
use crate::event::{Events, WaitEnd};
use crate::mm::{AddressSpace, IoDest, IoSource};
use crate::row;
use crate::signal::{Sender, Signal, code, info, send_to_task};
use crate::task::Task;
use crate::task::limits::Resource;
use crate::vfs::{File, InodeKind, OpenFlags, notify};
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(0, read(fd: Fd, buf: UserAddr, count: u64), both read_fast, read_slow, Full),
    row!(1, write(fd: Fd, buf: UserAddr, count: u64), both write_fast, write_slow, Full),
    row!(8, lseek(fd: Fd, offset: i64, whence: u32), fast lseek, Full),
    row!(16, ioctl(fd: Fd, request: u32, arg: UserAddr), fast ioctl_call, Full),
    row!(17, pread64(fd: Fd, buf: UserAddr, count: u64, offset: i64), both pread_fast, pread_slow, Full),
    row!(18, pwrite64(fd: Fd, buf: UserAddr, count: u64, offset: i64), both pwrite_fast, pwrite_slow, Full),
    row!(19, readv(fd: Fd, iov: UserPtr<Iovec>, iovcnt: u64), both readv_fast, readv_slow, Full),
    row!(20, writev(fd: Fd, iov: UserPtr<Iovec>, iovcnt: u64), both writev_fast, writev_slow, Full),
    row!(278, vmsplice(fd: Fd, iov: UserPtr<Iovec>, nr_segs: u64, flags: Bits), both vmsplice_fast, vmsplice_slow, Full),
    row!(295, preadv(fd: Fd, iov: UserPtr<Iovec>, iovcnt: u64, pos_l: i64, pos_h: i64),
        both preadv_fast, preadv_slow, Full),
    row!(296, pwritev(fd: Fd, iov: UserPtr<Iovec>, iovcnt: u64, pos_l: i64, pos_h: i64),
        both pwritev_fast, pwritev_slow, Full),
    row!(327, preadv2(fd: Fd, iov: UserPtr<Iovec>, iovcnt: u64, pos_l: i64, pos_h: i64, flags: Bits),
        both preadv2_fast, preadv2_slow, Full),
    row!(328, pwritev2(fd: Fd, iov: UserPtr<Iovec>, iovcnt: u64, pos_l: i64, pos_h: i64, flags: Bits),
        both pwritev2_fast, pwritev2_slow, Partial, "no RWF_ATOMIC, RWF_DONTCACHE"),
];

/// IOV_MAX.
const IOV_MAX: u64 = 1024;
/// Writes up to this many bytes are all or nothing on pipes (PIPE_BUF).
const PIPE_BUF: usize = 4096;

/// The program's buffers of one call, bounded and with plausible addresses.
#[derive(Clone)]
pub(super) enum Buffers {
    /// One.
    One(UserAddr, usize),
    /// Several, none of them empty.
    Many(Vec<(UserAddr, usize)>),
}

impl Buffers {
    /// One buffer. EFAULT beyond the address space; EINVAL for a negative length cannot be reached before it.
    fn one(addr: UserAddr, len: u64) -> Result<Buffers> {
        if !addr.range_ok(len) {
            return Err(Errno::EFAULT);
        }
        Ok(Buffers::One(addr, len.min(MAX_RW_COUNT as u64) as usize))
    }

    /// An iovec array (readv(2)): EINVAL for too many or a negative length, EFAULT.
    fn many(space: &Arc<AddressSpace>, iov: UserPtr<Iovec>, count: u64) -> Result<Buffers> {
        if count > IOV_MAX {
            return Err(Errno::EINVAL);
        }
        let entries = space.read_array(iov, count as usize)?;
        let mut left = MAX_RW_COUNT as u64;
        let mut out = Vec::with_capacity(entries.len());
        for e in entries {
            if i64::try_from(e.len).is_err() {
                return Err(Errno::EINVAL);
            }
            let addr = UserAddr(e.base);
            if !addr.range_ok(e.len) {
                return Err(Errno::EFAULT);
            }
            let len = e.len.min(left);
            left -= len;
            if len > 0 {
                out.push((addr, len as usize));
            }
        }
        match out.as_slice() {
            [(addr, len)] => Ok(Buffers::One(*addr, *len)),
            _ => Ok(Buffers::Many(out)),
        }
    }

    /// Bytes of all.
    pub fn len(&self) -> usize {
        match self {
            Buffers::One(_, len) => *len,
            Buffers::Many(list) => list.iter().map(|(_, len)| len).sum(),
        }
    }

    fn bounded(&self, max: usize) -> Vec<(UserAddr, usize)> {
        let Buffers::Many(list) = self else { return Vec::new() };
        let mut left = max;
        let mut out = Vec::with_capacity(list.len());
        for &(addr, len) in list {
            let len = len.min(left);
            left -= len;
            if len == 0 {
                break;
            }
            out.push((addr, len));
        }
        out
    }

    /// The `len` bytes from `from` on.
    fn part(&self, from: usize, len: usize) -> Buffers {
        match self {
            Buffers::One(addr, whole) => {
                Buffers::One(addr.wrapping_add(from as u64), len.min(whole.saturating_sub(from)))
            }
            Buffers::Many(list) => {
                let (mut skip, mut left) = (from, len);
                let mut out = Vec::new();
                for &(addr, whole) in list {
                    let skipped = skip.min(whole);
                    skip -= skipped;
                    let n = (whole - skipped).min(left);
                    left -= n;
                    if n > 0 {
                        out.push((addr.wrapping_add(skipped as u64), n));
                    }
                    if left == 0 {
                        break;
                    }
                }
                Buffers::Many(out)
            }
        }
    }

    fn dest(&self, space: Arc<AddressSpace>) -> IoDest<'static> {
        match self {
            Buffers::One(addr, len) => IoDest::user(space, *addr, *len),
            Buffers::Many(list) => IoDest::user_vec(space, list.clone()),
        }
    }

    /// The first `max` bytes as a source.
    fn source(&self, space: Arc<AddressSpace>, max: usize) -> IoSource<'static> {
        match self {
            Buffers::One(addr, len) => IoSource::user(space, *addr, (*len).min(max)),
            Buffers::Many(_) => IoSource::user_vec(space, self.bounded(max)),
        }
    }
}

/// One call: what, where, how.
pub(super) struct Io {
    /// Where.
    pub file: Arc<File>,
    /// What.
    pub buffers: Buffers,
    /// None: at the file position.
    pub pos: Option<u64>,
    /// RWF_*.
    pub rwf: u32,
}

impl Io {
    /// The same call for `len` bytes from `from` on, at `pos`.
    pub fn part(&self, from: usize, len: usize, pos: Option<u64>) -> Io {
        Io { file: self.file.clone(), buffers: self.buffers.part(from, len), pos, rwf: self.rwf }
    }

    fn blocks(&self) -> bool {
        !self.file.nonblocking() && self.rwf & raw::RWF_NOWAIT == 0
    }
}

// Reading

fn readable(task: &Task, fd: Fd) -> Result<Arc<File>> {
    let file = place::file(task, fd)?;
    if file.flags().readable() { Ok(file) } else { Err(Errno::EBADF) }
}

/// EINVAL for a range that ends beyond the largest offset, as rw_verify_area() has it.
pub fn check_range(pos: u64, len: usize) -> Result<()> {
    let end = pos.checked_add(len as u64).and_then(|end| i64::try_from(end).ok());
    end.map(|_| ()).ok_or(Errno::EINVAL)
}

/// Reads once at a position or at the file's own, which follows.
pub fn read_at(task: &Task, file: &File, dst: &mut IoDest<'_>, pos: Option<u64>) -> Result<usize> {
    let ops = file.ops();
    if file.kind() == Some(InodeKind::Directory) {
        check_range(pos.unwrap_or_else(|| *file.position()), dst.remaining())?;
        return Err(Errno::EISDIR);
    }
    let n = match pos {
        Some(pos) => {
            check_range(pos, dst.remaining())?;
            ops.read_as(file, task, dst, pos)?
        }
        None if ops.seekable() => {
            let mut at = file.position();
            check_range(*at, dst.remaining())?;
            let n = ops.read_as(file, task, dst, *at)?;
            *at = at.saturating_add(n as u64);
            n
        }
        None => ops.read_as(file, task, dst, 0)?,
    };
    notify::accessed(file, n);
    Ok(n)
}

/// One attempt to read.
pub(super) fn read_once(task: &Task, io: &Io) -> Result<usize> {
    let mut dst = io.buffers.dest(task.space()?);
    match read_at(task, &io.file, &mut dst, io.pos) {
        // Reading nothing never waits.
        Err(Errno::EAGAIN) if io.buffers.len() == 0 => Ok(0),
        other => other,
    }
}

fn read_try(task: &Task, io: &Io) -> Result<Option<u64>> {
    if slices::is_long(io) || slices::must_wait(task, io, false) {
        return Ok(None);
    }
    match read_once(task, io) {
        Err(Errno::EAGAIN) if io.blocks() => Ok(None),
        other => other.map(|n| Some(n as u64)),
    }
}

/// Waits for readiness and tries, until there is an answer other than EAGAIN.
pub async fn retry<T: Send>(
    task: &Task,
    file: &File,
    events: Events,
    attempt: impl FnMut() -> Result<T> + Send,
) -> Result<T> {
    retry_as(task, file, events, false, attempt).await
}

/// As `retry`, for an attempt that uses up readiness and depends on nothing else: where the object wakes one at a time, this waits so.
async fn retry_in_turn<T: Send>(
    task: &Task,
    file: &File,
    events: Events,
    attempt: impl FnMut() -> Result<T> + Send,
) -> Result<T> {
    let ops = file.ops();
    if ops.more_for_next(events).is_none() {
        return retry(task, file, events, attempt).await;
    }
    let answer = retry_as(task, file, events, true, attempt).await;
    if let Some(queue) = ops.wait_queue_as(task)
        && queue.is_occupied()
        && ops.more_for_next(events) == Some(true)
    {
        queue.wake_exclusive(events, 1);
    }
    answer
}

async fn retry_as<T: Send>(
    task: &Task,
    file: &File,
    events: Events,
    exclusive: bool,
    mut attempt: impl FnMut() -> Result<T> + Send,
) -> Result<T> {
    let ops = file.ops();
    let Some(queue) = ops.wait_queue_as(task) else { return attempt() };
    let timeout = ops.io_timeout(events.intersects(Events::WRITABLE));
    let deadline = timeout.map(|ns| task.now().saturating_add(ns));
    let ready = || {
        match attempt() {
            Err(Errno::EAGAIN) => {}
            other => return Some(other),
        }
        ops.arm(events);
        // What became ready between the attempt and the arming is not reported by every host mechanism.
        match attempt() {
            Err(Errno::EAGAIN) => None,
            other => Some(other),
        }
    };
    let end = if exclusive {
        task.wait_exclusive((queue, events), deadline, ready).await
    } else {
        task.wait(vec![(queue, events)], deadline, ready).await
    };
    match end {
        Ok(answer) => answer,
        Err(WaitEnd::TimedOut) => Err(Errno::EAGAIN),
        Err(WaitEnd::Interrupted) if timeout.is_some() => Err(Errno::EINTR),
        Err(WaitEnd::Interrupted) => Err(Errno::ERESTARTSYS),
    }
}

async fn read_wait(task: &Arc<Task>, io: Io) -> Result<u64> {
    if slices::is_long(&io) {
        return slices::read(task, io).await.map(|n| n as u64);
    }
    if slices::must_wait(task, &io, false) {
        slices::wait(task, &io, false).await?;
    }
    if !io.blocks() {
        return read_once(task, &io).map(|n| n as u64);
    }
    retry_in_turn(task, &io.file, Events::READABLE | Events::RDHUP, || read_once(task, &io)).await.map(|n| n as u64)
}

// Writing

fn writable(task: &Task, fd: Fd) -> Result<Arc<File>> {
    let file = place::file(task, fd)?;
    if file.flags().writable() { Ok(file) } else { Err(Errno::EBADF) }
}

/// Sends the SIGPIPE that goes with EPIPE.
pub fn broken_pipe(task: &Arc<Task>) {
    own_signal(task, Signal::SIGPIPE);
}

/// Sends the SIGXFSZ that goes with EFBIG.
pub fn file_too_large(task: &Arc<Task>) {
    own_signal(task, Signal::SIGXFSZ);
}

fn own_signal(task: &Arc<Task>, signal: Signal) {
    let info = info::from_process(signal, code::SI_USER, task.group().pid().own(), task.own_uid());
    // Neither signal is queued, so nothing can fail.
    let _ = send_to_task(task, signal, info, Sender::Event);
}

/// How many of `len` bytes may be written to a regular file at `pos`: RLIMIT_FSIZE. EFBIG with SIGXFSZ if none.
pub fn file_size_room(task: &Arc<Task>, file: &File, pos: u64, len: usize) -> Result<usize> {
    let limit = task.limit(Resource::Fsize);
    if limit == u64::MAX || file.kind() != Some(InodeKind::Regular) || len == 0 {
        return Ok(len);
    }
    if pos >= limit {
        file_too_large(task);
        return Err(Errno::EFBIG);
    }
    Ok(usize::try_from(limit - pos).unwrap_or(usize::MAX).min(len))
}

/// Writes once at a position or at the file's own, which follows. `source` gives the bytes once it is known how many fit.
pub fn write_at<'s, S: AsMut<IoSource<'s>>>(
    task: &Arc<Task>,
    file: &File,
    pos: Option<u64>,
    append: bool,
    len: usize,
    source: impl FnOnce(usize) -> Result<S>,
) -> Result<usize> {
    let ops = file.ops();
    if !ops.seekable() {
        let n = ops.write_as(file, &**task, source(len)?.as_mut(), pos.unwrap_or(0))?;
        notify::file_used(file, raw::IN_MODIFY);
        return Ok(n);
    }
    crate::vfs::attr::drop_privileges(&task.credentials(), file)?;
    let own_append = file.flags().contains(OpenFlags::APPEND);
    let appends = append || own_append;
    let mut at = pos.is_none().then(|| file.position());
    let start = if appends { ops.size()? } else { pos.or(at.as_deref().copied()).unwrap_or(0) };
    check_range(start, len)?;
    let room = file_size_room(task, file, start, len)?;
    let n = ops.write_as(file, &**task, source(room)?.as_mut(), start)?;
    if let Some(at) = at.as_deref_mut()
        && (n > 0 || !appends)
    {
        *at = if own_append { ops.append_position(file)? } else { start.saturating_add(n as u64) };
    }
    drop(at);
    if n > 0 {
        notify::file_used(file, raw::IN_MODIFY);
    }
    Ok(n)
}

/// A source that may be owned or borrowed.
pub struct Owned<'s>(pub IoSource<'s>);

impl<'s> AsMut<IoSource<'s>> for Owned<'s> {
    fn as_mut(&mut self) -> &mut IoSource<'s> {
        &mut self.0
    }
}

/// One attempt to write.
pub(super) fn write_once(task: &Arc<Task>, io: &Io) -> Result<usize> {
    let space = task.space()?;
    let append = io.rwf & raw::RWF_APPEND != 0;
    let len = io.buffers.len();
    let n = write_at(task, &io.file, io.pos, append, len, |max| Ok(Owned(io.buffers.source(space, max))));
    match n {
        Err(Errno::EAGAIN) if len == 0 => Ok(0),
        other => other,
    }
}

fn write_done(task: &Arc<Task>, io: &Io, result: Result<usize>) -> Result<u64> {
    match result {
        Ok(n) => {
            let flags = io.file.flags();
            let whole = io.rwf & raw::RWF_SYNC != 0 || flags.contains(OpenFlags::SYNC);
            let data = io.rwf & raw::RWF_DSYNC != 0 || flags.contains(OpenFlags::DSYNC);
            if n > 0 && (whole || data) && io.file.ops().seekable() {
                io.file.ops().sync(!whole)?;
            }
            Ok(n as u64)
        }
        Err(Errno::EPIPE) => {
            broken_pipe(task);
            Err(Errno::EPIPE)
        }
        Err(e) => Err(e),
    }
}

fn write_try(task: &Arc<Task>, io: &Io) -> Result<Option<u64>> {
    if slices::is_long(io) || slices::must_wait(task, io, true) {
        return Ok(None);
    }
    // What may be taken in parts has to remember how far it came.
    if io.blocks() && io.buffers.len() > PIPE_BUF && io.file.ops().writes_fully() {
        return Ok(None);
    }
    match write_once(task, io) {
        Err(Errno::EAGAIN) if io.blocks() => Ok(None),
        other => write_done(task, io, other).map(Some),
    }
}

async fn write_wait(task: &Arc<Task>, io: Io) -> Result<u64> {
    if slices::is_long(&io) {
        let done = io.part(0, 0, io.pos);
        let n = slices::write(task, io).await;
        return write_done(task, &done, n);
    }
    if slices::must_wait(task, &io, true) {
        slices::wait(task, &io, true).await?;
    }
    if !io.blocks() {
        let n = write_once(task, &io);
        return write_done(task, &io, n);
    }
    let ops = io.file.ops();
    if ops.seekable() || !ops.writes_fully() {
        let n = retry(task, &io.file, Events::WRITABLE, || write_once(task, &io)).await;
        return write_done(task, &io, n);
    }
    let mut src = io.buffers.source(task.space()?, io.buffers.len());
    let mut total = 0;
    loop {
        let n = retry_in_turn(task, &io.file, Events::WRITABLE, || ops.write_as(&io.file, &**task, &mut src, 0)).await;
        match n {
            Ok(n) => {
                total += n;
                if n == 0 || src.remaining() == 0 {
                    return Ok(total as u64);
                }
            }
            Err(e) => {
                if e == Errno::EPIPE {
                    broken_pipe(task);
                }
                return if total > 0 { Ok(total as u64) } else { Err(e) };
            }
        }
    }
}

// Decoding

fn plain(file: Arc<File>, addr: UserAddr, len: u64) -> Result<Io> {
    Ok(Io { file, buffers: Buffers::one(addr, len)?, pos: None, rwf: 0 })
}

/// EINVAL for a negative offset, ESPIPE for an object without a position.
fn position_arg(file: &File, offset: i64) -> Result<u64> {
    let pos = u64::try_from(offset).map_err(|_| Errno::EINVAL)?;
    let seekable = file.ops().seekable() || file.kind() == Some(InodeKind::Directory);
    if seekable { Ok(pos) } else { Err(Errno::ESPIPE) }
}

/// EBADF comes from `get`, but a negative offset is judged even before the descriptor.
fn positioned(
    task: &Task,
    fd: Fd,
    addr: UserAddr,
    len: u64,
    offset: i64,
    get: fn(&Task, Fd) -> Result<Arc<File>>,
) -> Result<Io> {
    if offset < 0 {
        return Err(Errno::EINVAL);
    }
    let file = place::file(task, fd)?;
    let pos = position_arg(&file, offset)?;
    let file = get(task, fd)?;
    Ok(Io { buffers: Buffers::one(addr, len)?, file, pos: Some(pos), rwf: 0 })
}

fn vector(task: &Task, file: Arc<File>, iov: UserPtr<Iovec>, count: u64) -> Result<Io> {
    let buffers = Buffers::many(&task.space()?, iov, count)?;
    Ok(Io { file, buffers, pos: None, rwf: 0 })
}

const RWF_KNOWN: u32 = raw::RWF_HIPRI | raw::RWF_DSYNC | raw::RWF_SYNC | raw::RWF_NOWAIT | raw::RWF_APPEND;

fn vector_at(
    task: &Task,
    fd: Fd,
    iov: UserPtr<Iovec>,
    count: u64,
    offset: i64,
    rwf: Bits,
    get: fn(&Task, Fd) -> Result<Arc<File>>,
) -> Result<Io> {
    if offset < 0 {
        return Err(Errno::EINVAL);
    }
    let file = place::file(task, fd)?;
    let pos = position_arg(&file, offset)?;
    let mut io = vector(task, get(task, fd)?, iov, count)?;
    io.pos = Some(pos);
    with_rwf(&mut io, rwf)?;
    Ok(io)
}

fn with_rwf(io: &mut Io, rwf: Bits) -> Result<()> {
    let rwf = rwf.0 as u32;
    if rwf & !RWF_KNOWN != 0 {
        return Err(Errno::EOPNOTSUPP);
    }
    io.rwf = rwf;
    Ok(())
}

/// preadv2 and pwritev2: offset -1 is the file position.
fn vector2(
    task: &Task,
    fd: Fd,
    iov: UserPtr<Iovec>,
    count: u64,
    offset: i64,
    rwf: Bits,
    get: fn(&Task, Fd) -> Result<Arc<File>>,
) -> Result<Io> {
    if offset != -1 {
        return vector_at(task, fd, iov, count, offset, rwf, get);
    }
    let mut io = vector(task, get(task, fd)?, iov, count)?;
    with_rwf(&mut io, rwf)?;
    Ok(io)
}

const NO_RWF: Bits = Bits(0);

macro_rules! transfer_calls {
    ($($fast:ident, $slow:ident, $try:ident, $wait:ident, ($($arg:ident : $ty:ty),*), |$task:ident| $io:expr;)*) => {
        $(
            fn $fast($task: &Arc<Task>, $($arg: $ty),*) -> Result<Option<u64>> {
                let io = $io?;
                $try($task, &io)
            }

            async fn $slow($task: &Arc<Task>, $($arg: $ty),*) -> Result<u64> {
                let io = $io?;
                $wait($task, io).await
            }
        )*
    };
}

// The upper half of a split offset (pos_h) means nothing on a 64-bit machine: it is shifted out.
transfer_calls! {
    read_fast, read_slow, read_try, read_wait, (fd: Fd, buf: UserAddr, count: u64),
        |task| plain(readable(task, fd)?, buf, count);
    write_fast, write_slow, write_try, write_wait, (fd: Fd, buf: UserAddr, count: u64),
        |task| plain(writable(task, fd)?, buf, count);
    pread_fast, pread_slow, read_try, read_wait, (fd: Fd, buf: UserAddr, count: u64, offset: i64),
        |task| positioned(task, fd, buf, count, offset, readable);
    pwrite_fast, pwrite_slow, write_try, write_wait, (fd: Fd, buf: UserAddr, count: u64, offset: i64),
        |task| positioned(task, fd, buf, count, offset, writable);
    readv_fast, readv_slow, read_try, read_wait, (fd: Fd, iov: UserPtr<Iovec>, count: u64),
        |task| vector(task, readable(task, fd)?, iov, count);
    writev_fast, writev_slow, write_try, write_wait, (fd: Fd, iov: UserPtr<Iovec>, count: u64),
        |task| vector(task, writable(task, fd)?, iov, count);
    preadv_fast, preadv_slow, read_try, read_wait,
        (fd: Fd, iov: UserPtr<Iovec>, count: u64, pos_l: i64, _pos_h: i64),
        |task| vector_at(task, fd, iov, count, pos_l, NO_RWF, readable);
    pwritev_fast, pwritev_slow, write_try, write_wait,
        (fd: Fd, iov: UserPtr<Iovec>, count: u64, pos_l: i64, _pos_h: i64),
        |task| vector_at(task, fd, iov, count, pos_l, NO_RWF, writable);
    preadv2_fast, preadv2_slow, read_try, read_wait,
        (fd: Fd, iov: UserPtr<Iovec>, count: u64, pos_l: i64, _pos_h: i64, flags: Bits),
        |task| vector2(task, fd, iov, count, pos_l, flags, readable);
    pwritev2_fast, pwritev2_slow, write_try, write_wait,
        (fd: Fd, iov: UserPtr<Iovec>, count: u64, pos_l: i64, _pos_h: i64, flags: Bits),
        |task| vector2(task, fd, iov, count, pos_l, flags, writable);
}

// vmsplice: to or from a pipe, by the end that is given. Copies, which no program can tell from moved pages.

const SPLICE_KNOWN: u64 = 15;
const SPLICE_NONBLOCK: u64 = 2;

fn vmsplice_io(task: &Task, fd: Fd, iov: UserPtr<Iovec>, count: u64, flags: Bits) -> Result<Io> {
    if flags.0 & !SPLICE_KNOWN != 0 {
        return Err(Errno::EINVAL);
    }
    let file = place::file(task, fd)?;
    if crate::fs::pipe::pipe_of(&file).is_none() {
        return Err(Errno::EBADF);
    }
    let mut io = vector(task, file, iov, count)?;
    if flags.0 & SPLICE_NONBLOCK != 0 {
        io.rwf |= raw::RWF_NOWAIT;
    }
    Ok(io)
}

fn vmsplice_fast(task: &Arc<Task>, fd: Fd, iov: UserPtr<Iovec>, count: u64, flags: Bits) -> Result<Option<u64>> {
    let io = vmsplice_io(task, fd, iov, count, flags)?;
    if io.file.flags().writable() { write_try(task, &io) } else { read_try(task, &io) }
}

async fn vmsplice_slow(task: &Arc<Task>, fd: Fd, iov: UserPtr<Iovec>, count: u64, flags: Bits) -> Result<u64> {
    let io = vmsplice_io(task, fd, iov, count, flags)?;
    if io.file.flags().writable() { write_wait(task, io).await } else { read_wait(task, io).await }
}

// Position and control

fn lseek(task: &Arc<Task>, fd: Fd, offset: i64, whence: u32) -> Result<u64> {
    let file = place::file(task, fd)?;
    if whence > raw::SEEK_MAX {
        return Err(Errno::EINVAL);
    }
    let mut pos = file.position();
    let ops = file.ops();
    let new = if file.kind() == Some(InodeKind::Directory) && !ops.seekable() {
        crate::vfs::path::default_seek(whence <= raw::SEEK_CUR, || Err(Errno::EINVAL), *pos, offset, whence)
    } else {
        ops.seek(&file, *pos, offset, whence)
    }?;
    *pos = new;
    Ok(new)
}

fn ioctl_call(task: &Arc<Task>, fd: Fd, request: u32, arg: UserAddr) -> Result<u64> {
    let file = place::file(task, fd)?;
    let space = || task.space();
    let flag = |flag: OpenFlags| -> Result<u64> {
        let on: i32 = space()?.read(UserPtr::new(arg))?;
        file.set_flags(if on != 0 { flag } else { OpenFlags::empty() }, flag);
        Ok(0)
    };
    match request {
        ioctl::FIOCLEX => task.files().set_cloexec(fd.0, true).map(|()| 0),
        ioctl::FIONCLEX => task.files().set_cloexec(fd.0, false).map(|()| 0),
        ioctl::FIONBIO => flag(OpenFlags::NONBLOCK),
        ioctl::FIOASYNC => flag(OpenFlags::ASYNC),
        ioctl::FIOQSIZE => match file.kind() {
            Some(InodeKind::Regular | InodeKind::Directory | InodeKind::Symlink) => {
                let size = file.stat()?.size;
                space()?.write(UserPtr::new(arg), &size).map(|()| 0)
            }
            _ => Err(Errno::ENOTTY),
        },
        ioctl::FIGETBSZ => {
            let size = i32::try_from(file.stat()?.blksize).unwrap_or(i32::MAX);
            space()?.write(UserPtr::new(arg), &size).map(|()| 0)
        }
        ioctl::FICLONE | ioctl::FICLONERANGE | ioctl::FS_IOC_FIEMAP if file.kind() == Some(InodeKind::Regular) => {
            Err(Errno::EOPNOTSUPP)
        }
        ioctl::FIONREAD if file.kind() == Some(InodeKind::Regular) => {
            let rest = file.stat()?.size.saturating_sub(i64::try_from(*file.position()).unwrap_or(i64::MAX));
            let rest = i32::try_from(rest).unwrap_or(i32::MAX);
            space()?.write(UserPtr::new(arg), &rest).map(|()| 0)
        }
        _ => file.ops().ioctl(&file, &**task, request, arg.0),
    }
}
