//! Futexes (futex(2)): wait queues keyed by the identity of a word. Owns the waiters; never the word.
//!
//! A waiter compares the word and queues itself under the lock of its bucket; whoever wakes has changed the word before and
//! takes the same lock: so no wake is lost. Reading the word may fault a page in, so the bucket ranks before memory.
pub mod pi;
pub mod queue;
pub mod robust;

use core::future::poll_fn;
use core::task::Poll;
use std::sync::Arc;

use guest_abi::UserAddr;

pub use queue::Futexes;
use queue::{Kind, Queued, Waiter};

use crate::event::WaitEnd;
use crate::mm::AddressSpace;
use crate::mm::space::FutexKey;
use crate::signal::state::SlowCall;
use crate::signal::{RestartBlock, deliver};
use crate::task::Task;
use crate::task::task::RunState;
use crate::time::Nanos;
use crate::{Errno, Kernel, Result};

/// Matches every waiter.
pub const MATCH_ANY: u32 = u32::MAX;

/// A futex word: where it is and what identifies it.
#[derive(Clone)]
pub struct Word {
    /// The memory it was named in.
    pub space: Arc<AddressSpace>,
    /// Where.
    pub addr: UserAddr,
    /// Identity.
    pub key: FutexKey,
}

impl Word {
    /// The word at `addr`; `shared` unless the caller gave FUTEX_PRIVATE_FLAG. EINVAL if unaligned, EFAULT if not mapped.
    pub fn new(space: Arc<AddressSpace>, addr: UserAddr, shared: bool) -> Result<Word> {
        if !addr.0.is_multiple_of(4) {
            return Err(Errno::EINVAL);
        }
        if !addr.range_ok(4) {
            return Err(Errno::EFAULT);
        }
        let key = space.futex_key(addr, shared)?;
        Ok(Word { space, addr, key })
    }

    pub(self) fn load(&self) -> Result<u32> {
        self.space.load_u32(self.addr)
    }
}

/// FUTEX_WAKE, FUTEX_WAKE_BITSET: wakes at most `count` waiters whose bitset intersects; gives how many.
pub fn wake(kernel: &Kernel, word: &Word, count: usize, bitset: u32) -> Result<usize> {
    kernel.futexes.wake(word.key, count, bitset)
}

/// Wakes at most `count` waiters of the word at `addr` (clear_child_tid, robust lists); nothing if the address is bad.
pub fn wake_at(kernel: &Kernel, space: &Arc<AddressSpace>, addr: UserAddr, count: usize) {
    if let Ok(word) = Word::new(space.clone(), addr, true) {
        let _ = wake(kernel, &word, count, MATCH_ANY);
    }
}

/// Whether a FUTEX_WAIT for `value` would block now: a first look without queueing.
pub fn would_block(word: &Word, value: u32) -> Result<bool> {
    Ok(word.load()? == value)
}

/// Waits until the waiter is woken, `deadline` (monotonic) passes or the task must look at a signal.
async fn sleep(task: &Arc<Task>, waiters: &[Queued<'_>], deadline: Option<Nanos>) -> Result<(), WaitEnd> {
    let mut deadline = deadline.map(|at| task.kernel().timers.deadline(at));
    task.set_run_state(RunState::Sleeping);
    let end = poll_fn(|cx| {
        task.interruption.set_waker(cx.waker());
        for w in waiters {
            if w.waiter().poll_woken(cx.waker()) {
                return Poll::Ready(Ok(()));
            }
        }
        if deadline.as_mut().is_some_and(|d| d.poll_passed(cx.waker())) {
            return Poll::Ready(Err(WaitEnd::TimedOut));
        }
        // A signal that another task took meanwhile is no reason to give up.
        if task.interruption.is_pending() && deliver::still_interrupted(task) {
            return Poll::Ready(Err(WaitEnd::Interrupted));
        }
        Poll::Pending
    })
    .await;
    task.set_run_state(RunState::Running);
    end
}

/// FUTEX_WAIT, FUTEX_WAIT_BITSET. EAGAIN if the word is not `value`, ETIMEDOUT; interrupted, ERESTARTSYS.
pub async fn wait(
    task: &Arc<Task>,
    word: &Word,
    value: u32,
    deadline: Option<Nanos>,
    bitset: u32,
) -> Result<(), Errno> {
    let waiter = Waiter::new(task, word, bitset, Kind::Plain);
    let futexes = &task.kernel().futexes;
    let queued = futexes.enqueue_if(waiter, || Ok(word.load()? == value))?.ok_or(Errno::EAGAIN)?;
    let end = sleep(task, core::slice::from_ref(&queued), deadline).await;
    if queued.leave() {
        return Ok(());
    }
    match end {
        Ok(()) => Ok(()),
        Err(WaitEnd::TimedOut) => Err(Errno::ETIMEDOUT),
        Err(WaitEnd::Interrupted) => Err(Errno::ERESTARTSYS),
    }
}

/// [`wait`] as the system call: with a deadline an interrupted wait goes on through restart_syscall(2), so that it does not last longer.
pub async fn wait_restartable(
    task: &Arc<Task>,
    addr: UserAddr,
    shared: bool,
    value: u32,
    deadline: Option<Nanos>,
    bitset: u32,
) -> Result<u64> {
    let word = Word::new(task.space()?, addr, shared)?;
    let end = wait(task, &word, value, deadline, bitset).await;
    if end == Err(Errno::ERESTARTSYS)
        && let Some(deadline) = deadline
    {
        task.signals.set_restart(RestartBlock {
            run: resume_wait,
            args: [addr.0, u64::from(shared), u64::from(value), deadline, u64::from(bitset), 0],
        });
        return Err(Errno::ERESTART_RESTARTBLOCK);
    }
    end.map(|()| 0)
}

fn resume_wait(task: &Arc<Task>, args: [u64; 6]) -> SlowCall<'_> {
    let [addr, shared, value, deadline, bitset, _] = args;
    Box::pin(async move {
        wait_restartable(task, UserAddr(addr), shared != 0, value as u32, Some(deadline), bitset as u32).await
    })
}

/// One word of futex_waitv(2).
pub struct WaitAny {
    /// The word.
    pub word: Word,
    /// What it must hold.
    pub value: u32,
    /// Which wakes concern it.
    pub bitset: u32,
}

/// futex_waitv(2): waits for a wake of any of the words; gives its place. EAGAIN if one does not hold its value.
pub async fn wait_any(task: &Arc<Task>, words: &[WaitAny], deadline: Option<Nanos>) -> Result<usize> {
    let futexes = &task.kernel().futexes;
    let mut queued = Vec::with_capacity(words.len());
    let mut failed = None;
    for w in words {
        let waiter = Waiter::new(task, &w.word, w.bitset, Kind::Plain);
        match futexes.enqueue_if(waiter, || Ok(w.word.load()? == w.value)) {
            Ok(Some(q)) => queued.push(q),
            Ok(None) => failed = Some(Errno::EAGAIN),
            Err(e) => failed = Some(e),
        }
        if failed.is_some() {
            break;
        }
    }
    let end = match failed {
        Some(e) => Err(e),
        None => sleep(task, &queued, deadline).await.map_err(|end| match end {
            WaitEnd::TimedOut => Errno::ETIMEDOUT,
            WaitEnd::Interrupted => Errno::ERESTARTSYS,
        }),
    };
    // Every place is left, also behind the first that was woken; the last one woken is what Linux reports.
    let mut woken = None;
    for (i, q) in queued.iter().enumerate() {
        if q.leave() {
            woken = Some(i);
        }
    }
    match (woken, end) {
        (Some(i), _) => Ok(i),
        (None, Err(e)) => Err(e),
        (None, Ok(())) => Err(Errno::EAGAIN),
    }
}

/// FUTEX_REQUEUE, FUTEX_CMP_REQUEUE: wakes `wake` waiters of `from` and moves up to `requeue` more to `to`. EAGAIN if `expected` is given
/// and `from` does not hold it. Gives how many were woken or moved.
pub fn requeue(
    kernel: &Kernel,
    from: &Word,
    to: &Word,
    wake: usize,
    requeue: usize,
    expected: Option<u32>,
) -> Result<usize> {
    kernel.futexes.requeue(from.key, to.key, wake, requeue, || match expected {
        Some(value) => Ok(from.load()? == value),
        None => Ok(true),
    })
}

/// FUTEX_WAKE_OP: changes the word `second` atomically, wakes `count` waiters of `first`, and `count2` of `second` if its
/// old value compares as `encoded` says. Gives how many were woken.
pub fn wake_op(
    kernel: &Kernel,
    first: &Word,
    second: &Word,
    count: usize,
    count2: usize,
    encoded: u32,
) -> Result<usize> {
    let op = OpAndCompare::decode(encoded);
    kernel.futexes.wake_two(first.key, second.key, count, count2, || {
        let mut old = second.load()?;
        loop {
            let found = second.space.compare_exchange_u32(second.addr, old, op.apply(old)?)?;
            if found == old {
                return op.compare(old);
            }
            old = found;
        }
    })
}

/// The operation and comparison of FUTEX_WAKE_OP.
struct OpAndCompare {
    op: u32,
    op_arg: i32,
    cmp: u32,
    cmp_arg: i32,
}

impl OpAndCompare {
    fn decode(encoded: u32) -> OpAndCompare {
        let sign12 = |v: u32| ((v << 20) as i32) >> 20;
        let mut op_arg = sign12(encoded >> 12 & 0xfff);
        if encoded >> 31 != 0 {
            op_arg = 1i32.wrapping_shl(op_arg as u32 & 31);
        }
        OpAndCompare { op: encoded >> 28 & 7, op_arg, cmp: encoded >> 24 & 15, cmp_arg: sign12(encoded & 0xfff) }
    }

    fn apply(&self, old: u32) -> Result<u32> {
        let arg = self.op_arg as u32;
        Ok(match self.op {
            0 => arg,
            1 => old.wrapping_add(arg),
            2 => old | arg,
            3 => old & !arg,
            4 => old ^ arg,
            _ => return Err(Errno::ENOSYS),
        })
    }

    fn compare(&self, old: u32) -> Result<bool> {
        let old = old as i32;
        Ok(match self.cmp {
            0 => old == self.cmp_arg,
            1 => old != self.cmp_arg,
            2 => old < self.cmp_arg,
            3 => old <= self.cmp_arg,
            4 => old > self.cmp_arg,
            5 => old >= self.cmp_arg,
            _ => return Err(Errno::ENOSYS),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wake_op_decodes_as_linux_does() {
        // FUTEX_OP(FUTEX_OP_ADD, -1, FUTEX_OP_CMP_GT, 1)
        let op = OpAndCompare::decode(1 << 28 | 4 << 24 | 0xfff << 12 | 1);
        assert_eq!(op.apply(5), Ok(4));
        assert_eq!(op.compare(2), Ok(true));
        assert_eq!(op.compare(1), Ok(false));
        // FUTEX_OP_OPARG_SHIFT
        let op = OpAndCompare::decode(1 << 31 | 2 << 28 | 4 << 12);
        assert_eq!(op.apply(1), Ok(17));
        assert_eq!(OpAndCompare::decode(7 << 28).apply(0), Err(Errno::ENOSYS));
    }
}
