//! Moving bytes between descriptors: sendfile(2), copy_file_range(2), splice(2), tee(2).
use std::sync::Arc;

use guest_abi::UserPtr;
use guest_abi::file::MAX_RW_COUNT;

use super::args::{Bits, Fd};
use super::io::{self, Owned};
use super::table::Row;
use super::{place, slices};
use crate::event::Events;
use crate::fs::pipe::{Pipe, pipe_of};
use crate::mm::{IoDest, IoSource};
use crate::row;
use crate::task::Task;
use crate::vfs::{File, InodeKind, OpenFlags};
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(40, sendfile(out_fd: Fd, in_fd: Fd, offset: UserPtr<i64>, count: u64), slow sendfile, Full),
    row!(275, splice(fd_in: Fd, off_in: UserPtr<i64>, fd_out: Fd, off_out: UserPtr<i64>, len: u64, flags: Bits),
        slow splice, Partial, "two tasks that splice out of one pipe at once may see the same bytes"),
    row!(276, tee(fd_in: Fd, fd_out: Fd, len: u64, flags: Bits), slow tee, Full),
    row!(326, copy_file_range(fd_in: Fd, off_in: UserPtr<i64>, fd_out: Fd, off_out: UserPtr<i64>, len: u64,
        flags: Bits), slow copy_file_range, Full),
];

/// Bytes moved at one time.
const CHUNK: usize = 64 * 1024;

/// Where bytes come from.
enum From {
    /// A pipe, and whether what was moved is taken out of it.
    Pipe(Arc<Pipe>, Arc<File>, bool),
    /// A file with a position, at an offset.
    At(Arc<File>, u64),
    /// Another stream: what was read must be written.
    Stream(Arc<File>),
}

/// Where bytes go.
struct To {
    file: Arc<File>,
    pos: Option<u64>,
}

impl From {
    fn fetch(&self, task: &Task, max: usize) -> Result<Vec<u8>> {
        match self {
            From::Pipe(pipe, ..) => pipe.peek(max),
            From::At(file, pos) => {
                let mut buf = vec![0; max];
                let n = io::read_at(task, file, &mut IoDest::kernel(&mut buf), Some(*pos))?;
                buf.truncate(n);
                Ok(buf)
            }
            From::Stream(file) => {
                let mut buf = vec![0; max];
                let n = io::read_at(task, file, &mut IoDest::kernel(&mut buf), None)?;
                buf.truncate(n);
                Ok(buf)
            }
        }
    }

    fn file(&self) -> &Arc<File> {
        match self {
            From::Pipe(_, file, _) | From::At(file, _) | From::Stream(file) => file,
        }
    }

    fn moved(&mut self, n: usize) {
        match self {
            From::Pipe(pipe, _, true) => pipe.consume(n),
            From::At(_, pos) => *pos = pos.saturating_add(n as u64),
            From::Pipe(..) | From::Stream(_) => {}
        }
    }
}

impl To {
    fn store(&mut self, task: &Arc<Task>, bytes: &[u8]) -> Result<usize> {
        let source = |max: usize| Ok(Owned(IoSource::kernel(bytes.get(..max).unwrap_or(bytes))));
        let n = io::write_at(task, &self.file, self.pos, false, bytes.len(), source)?;
        if let Some(pos) = &mut self.pos {
            *pos = pos.saturating_add(n as u64);
        }
        Ok(n)
    }
}

/// Moves up to `len` bytes; a fault after some were moved is not reported.
async fn transfer(task: &Arc<Task>, from: &mut From, to: &mut To, len: usize, wait: bool) -> Result<usize> {
    let mut total = 0;
    while total < len {
        let max = (len - total).min(CHUNK);
        let mut fetched = from.fetch(task, max);
        // Once something was moved, what is not there yet is left for the next call.
        if fetched == Err(Errno::EAGAIN) && total == 0 && wait && !from.file().nonblocking() {
            let file = from.file().clone();
            fetched = io::retry(task, &file, Events::READABLE | Events::RDHUP, || from.fetch(task, max)).await;
        }
        let bytes = match fetched {
            Ok(bytes) if bytes.is_empty() => break,
            Ok(bytes) => bytes,
            Err(_) if total > 0 => break,
            Err(e) => return Err(e),
        };
        let mut done = 0;
        let mut failure = None;
        while done < bytes.len() {
            let rest = bytes.get(done..).unwrap_or_default();
            let mut stored = to.store(task, rest);
            // One call fills or empties a pipe at most once.
            let through_pipe = matches!(from, From::Pipe(..)) || pipe_of(&to.file).is_some();
            let waits = wait && !to.file.nonblocking() && (total + done == 0 || !through_pipe);
            if stored == Err(Errno::EAGAIN) && waits {
                let file = to.file.clone();
                stored = io::retry(task, &file, Events::WRITABLE, || to.store(task, rest)).await;
            }
            match stored {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) => {
                    failure = Some(e);
                    break;
                }
            }
        }
        from.moved(done);
        total += done;
        if let Some(e) = failure {
            if e == Errno::EPIPE {
                io::broken_pipe(task);
            }
            return if total > 0 { Ok(total) } else { Err(e) };
        }
        if done < bytes.len() || matches!(from, From::Pipe(_, _, false)) {
            break;
        }
        if !slices::pause(task).await {
            break;
        }
    }
    Ok(total)
}

fn both(task: &Task, fd_in: Fd, fd_out: Fd) -> Result<(Arc<File>, Arc<File>)> {
    let input = place::file(task, fd_in)?;
    let output = place::file(task, fd_out)?;
    if !input.flags().readable() || !output.flags().writable() {
        return Err(Errno::EBADF);
    }
    Ok((input, output))
}

fn offset_arg(task: &Task, ptr: UserPtr<i64>) -> Result<Option<u64>> {
    if ptr.is_null() {
        return Ok(None);
    }
    let offset = task.space()?.read(ptr)?;
    u64::try_from(offset).map(Some).map_err(|_| Errno::EINVAL)
}

/// Where a file is read from: the given offset, or the file position, which [`settle`] moves.
fn start(file: &File, given: Option<u64>) -> u64 {
    given.unwrap_or_else(|| *file.position())
}

fn settle(task: &Task, file: &File, ptr: UserPtr<i64>, pos: u64) -> Result<()> {
    if ptr.is_null() {
        *file.position() = pos;
        return Ok(());
    }
    task.space()?.write(ptr, &(pos as i64))
}

async fn sendfile(task: &Arc<Task>, out_fd: Fd, in_fd: Fd, offset: UserPtr<i64>, count: u64) -> Result<u64> {
    let given = offset_arg(task, offset)?;
    let (input, output) = both(task, in_fd, out_fd)?;
    if given.is_some() && !input.ops().seekable() {
        return Err(Errno::ESPIPE);
    }
    if i64::try_from(count).is_err() || output.flags().contains(OpenFlags::APPEND) {
        return Err(Errno::EINVAL);
    }
    let len = bounded(count.min(MAX_RW_COUNT as u64) as usize, &output);
    let mut from = match pipe_of(&input) {
        Some(pipe) => From::Pipe(pipe.clone(), input.clone(), true),
        None if input.kind() == Some(InodeKind::Directory) => return Err(Errno::EINVAL),
        None if input.ops().seekable() => From::At(input.clone(), start(&input, given)),
        None => From::Stream(input.clone()),
    };
    let mut to = To { file: output, pos: None };
    let n = transfer(task, &mut from, &mut to, len, true).await?;
    if let From::At(file, pos) = &from {
        settle(task, file, offset, *pos)?;
    }
    Ok(n as u64)
}

/// What one call moves at most into `output`.
fn bounded(len: usize, output: &File) -> usize {
    pipe_of(output).map_or(len, |pipe| len.min(pipe.capacity()))
}

const SPLICE_KNOWN: u64 = 15;
const SPLICE_NONBLOCK: u64 = 2;

async fn splice(
    task: &Arc<Task>,
    fd_in: Fd,
    off_in: UserPtr<i64>,
    fd_out: Fd,
    off_out: UserPtr<i64>,
    len: u64,
    flags: Bits,
) -> Result<u64> {
    if len == 0 {
        return Ok(0);
    }
    if flags.0 & !SPLICE_KNOWN != 0 {
        return Err(Errno::EINVAL);
    }
    let (input, output) = both(task, fd_in, fd_out)?;
    let (pipe_in, pipe_out) = (pipe_of(&input), pipe_of(&output));
    if pipe_in.is_none() && pipe_out.is_none() {
        return Err(Errno::EINVAL);
    }
    if (pipe_in.is_some() && !off_in.is_null()) || (pipe_out.is_some() && !off_out.is_null()) {
        return Err(Errno::ESPIPE);
    }
    if let (Some(a), Some(b)) = (pipe_in, pipe_out)
        && Arc::ptr_eq(a, b)
    {
        return Err(Errno::EINVAL);
    }
    let (at_in, at_out) = (offset_arg(task, off_in)?, offset_arg(task, off_out)?);
    if (at_in.is_some() && !input.ops().seekable()) || (at_out.is_some() && !output.ops().seekable()) {
        return Err(Errno::ESPIPE);
    }
    if output.ops().seekable() && output.flags().contains(OpenFlags::APPEND) {
        return Err(Errno::EINVAL);
    }
    let mut from = match pipe_in {
        Some(pipe) => From::Pipe(pipe.clone(), input.clone(), true),
        None if input.ops().seekable() => From::At(input.clone(), start(&input, at_in)),
        None => From::Stream(input.clone()),
    };
    let mut to = To { file: output.clone(), pos: at_out };
    let len = bounded(len.min(MAX_RW_COUNT as u64) as usize, &output);
    let n = transfer(task, &mut from, &mut to, len, flags.0 & SPLICE_NONBLOCK == 0).await?;
    if let From::At(file, pos) = &from {
        settle(task, file, off_in, *pos)?;
    }
    if let Some(pos) = to.pos {
        task.space()?.write(off_out, &(pos as i64))?;
    }
    Ok(n as u64)
}

async fn tee(task: &Arc<Task>, fd_in: Fd, fd_out: Fd, len: u64, flags: Bits) -> Result<u64> {
    if flags.0 & !SPLICE_KNOWN != 0 {
        return Err(Errno::EINVAL);
    }
    if len == 0 {
        return Ok(0);
    }
    let (input, output) = both(task, fd_in, fd_out)?;
    let (Some(a), Some(b)) = (pipe_of(&input), pipe_of(&output)) else { return Err(Errno::EINVAL) };
    if Arc::ptr_eq(a, b) {
        return Err(Errno::EINVAL);
    }
    let mut from = From::Pipe(a.clone(), input.clone(), false);
    let mut to = To { file: output.clone(), pos: None };
    let len = len.min(b.capacity() as u64).min(CHUNK as u64) as usize;
    transfer(task, &mut from, &mut to, len, flags.0 & SPLICE_NONBLOCK == 0).await.map(|n| n as u64)
}

async fn copy_file_range(
    task: &Arc<Task>,
    fd_in: Fd,
    off_in: UserPtr<i64>,
    fd_out: Fd,
    off_out: UserPtr<i64>,
    len: u64,
    flags: Bits,
) -> Result<u64> {
    let (input, output) = (place::file(task, fd_in)?, place::file(task, fd_out)?);
    let (at_in, at_out) = (offset_arg(task, off_in)?, offset_arg(task, off_out)?);
    if flags.0 != 0 {
        return Err(Errno::EINVAL);
    }
    for file in [&input, &output] {
        match file.kind() {
            Some(InodeKind::Regular) => {}
            Some(InodeKind::Directory) => return Err(Errno::EISDIR),
            _ => return Err(Errno::EINVAL),
        }
    }
    let append = output.flags().contains(OpenFlags::APPEND);
    if !input.flags().readable() || !output.flags().writable() || append {
        return Err(Errno::EBADF);
    }
    let (mut from, mut to) = (start(&input, at_in), start(&output, at_out));
    let len = len.min(MAX_RW_COUNT as u64);
    let ends = (from.checked_add(len).ok_or(Errno::EOVERFLOW)?, to.checked_add(len).ok_or(Errno::EOVERFLOW)?);
    let same = match (input.path(), output.path()) {
        (Some(a), Some(b)) => Arc::ptr_eq(a.inode(), b.inode()),
        _ => false,
    };
    if same && from < ends.1 && to < ends.0 && len > 0 {
        return Err(Errno::EINVAL);
    }
    let mut buf = vec![0; CHUNK.min(len as usize)];
    let mut left = len as usize;
    let mut total = 0u64;
    while left > 0 {
        let max = left.min(buf.len());
        let room = buf.get_mut(..max).unwrap_or_default();
        let step = io::read_at(task, &input, &mut IoDest::kernel(room), Some(from)).and_then(|n| {
            let bytes = buf.get(..n).unwrap_or_default();
            let source = |max: usize| Ok(Owned(IoSource::kernel(bytes.get(..max).unwrap_or(bytes))));
            if n == 0 { Ok(0) } else { io::write_at(task, &output, Some(to), false, n, source) }
        });
        match step {
            Ok(0) => break,
            Ok(n) => {
                from += n as u64;
                to += n as u64;
                total += n as u64;
                left -= n.min(left);
                if !slices::pause(task).await {
                    break;
                }
            }
            Err(_) if total > 0 => break,
            Err(e) => return Err(e),
        }
    }
    settle(task, &input, off_in, from)?;
    settle(task, &output, off_out, to)?;
    Ok(total)
}
