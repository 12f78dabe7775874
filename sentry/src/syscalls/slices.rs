//! Long work in slices: large reads and writes of files with a position, and populating memory. Between two slices the worker runs
//! others and a kill is heeded, as Linux's cond_resched() and fatal_signal_pending() have it. Owns the steps; what a step does
//! belongs to `io` and `mm`.
use std::sync::Arc;

use super::io::{self, Io};
use crate::event::Events;
use crate::mm::{AddressSpace, FaultSignal};
use crate::task::Task;
use crate::vfs::OpenFlags;
use crate::{Errno, Result};

/// Bytes of a slice; what is not longer is done at once.
pub const SLICE: usize = 2 << 20;

/// Lets others run if it is their turn. False if the task has been killed: what it does is of no use any more.
pub async fn pause(task: &Arc<Task>) -> bool {
    if task.must_exit().is_some() {
        return false;
    }
    if task.kernel().sched.should_yield(&task.sched) {
        crate::sched::yield_now().await;
    }
    true
}

/// Whether a call is to be done by [`read`] or [`write`].
pub(super) fn is_long(io: &Io) -> bool {
    io.buffers.len() > SLICE && io.file.ops().seekable()
}

/// Whether a long transfer holds what a call of any length needs: then [`wait`] comes first.
pub(super) fn must_wait(task: &Task, io: &Io, writes: bool) -> bool {
    task.kernel().transfers.is_claimed(&io.file, io.pos.is_none(), writes)
}

/// Waits for the long transfer to end. EINTR if the task is killed.
pub(super) async fn wait(task: &Arc<Task>, io: &Io, writes: bool) -> Result<()> {
    let transfers = task.kernel().transfers.clone();
    task.wait_killable(vec![(transfers.queue().clone(), Events::IN)], || (!must_wait(task, io, writes)).then_some(()))
        .await
        .map_err(|_| Errno::EINTR)
}

async fn claim(task: &Arc<Task>, io: &Io, writes: bool) -> Result<crate::vfs::claim::Claim> {
    let transfers = task.kernel().transfers.clone();
    task.wait_killable(vec![(transfers.queue().clone(), Events::IN)], || {
        transfers.claim(&io.file, io.pos.is_none(), writes)
    })
    .await
    .map_err(|_| Errno::EINTR)
}

/// Moves the position that was at `start` when the transfer began; somebody may have set it anew.
fn settle(io: &Io, start: u64, total: usize) {
    if io.pos.is_none() {
        let mut at = io.file.position();
        if *at == start {
            *at = start.saturating_add(total as u64);
        }
    }
}

/// A long read.
pub(super) async fn read(task: &Arc<Task>, io: Io) -> Result<usize> {
    let _claim = claim(task, &io, false).await?;
    let len = io.buffers.len();
    let start = io.pos.unwrap_or_else(|| *io.file.position());
    io::check_range(start, len)?;
    let slice = |done, step| io::read_once(task, &io.part(done, step, Some(start.saturating_add(done as u64))));
    let (total, result) = sliced(task, len, slice).await;
    settle(&io, start, total);
    if total > 0 { Ok(total) } else { result.map(|()| 0) }
}

/// Calls `slice` with what has been moved so far and the length of the next part until `len` are moved, a part comes out short or fails, or
/// the task is killed; others run in between. Gives what was moved, and how it ended.
async fn sliced(
    task: &Arc<Task>,
    len: usize,
    slice: impl Fn(usize, usize) -> Result<usize> + Send,
) -> (usize, Result<()>) {
    let mut total = 0;
    while total < len {
        let step = SLICE.min(len - total);
        match slice(total, step) {
            Ok(n) => {
                total += n;
                if n < step {
                    break;
                }
            }
            Err(e) => return (total, Err(e)),
        }
        if !pause(task).await {
            break;
        }
    }
    (total, Ok(()))
}

/// A long write.
pub(super) async fn write(task: &Arc<Task>, io: Io) -> Result<usize> {
    let _claim = claim(task, &io, true).await?;
    let appends = io.file.flags().contains(OpenFlags::APPEND) || io.rwf & linux_raw_sys::general::RWF_APPEND != 0;
    let at = io.pos.unwrap_or_else(|| *io.file.position());
    let start = if appends { io.file.ops().size()? } else { at };
    io::check_range(start, io.buffers.len())?;
    // As Linux: what the limit leaves room for is known before the first byte.
    let len = io::file_size_room(task, &io.file, start, io.buffers.len())?;
    let slice = |done, step| {
        // Each slice of an appending write finds the end, and moves the position, itself.
        let pos = if appends { io.pos } else { Some(start.saturating_add(done as u64)) };
        io::write_once(task, &io.part(done, step, pos))
    };
    let (total, result) = sliced(task, len, slice).await;
    if !appends {
        settle(&io, start, total);
    }
    if total > 0 { Ok(total) } else { result.map(|()| 0) }
}

/// Makes `start..end` present; see [`AddressSpace::populate`].
pub async fn populate(
    task: &Arc<Task>,
    space: &AddressSpace,
    (start, end): (u64, u64),
    write: Option<bool>,
) -> Result<(), FaultSignal> {
    let mut at = start;
    while at < end {
        let next = end.min(at.saturating_add(SLICE as u64));
        space.populate(at, next, write)?;
        at = next;
        if at < end && !pause(task).await {
            break;
        }
    }
    Ok(())
}
