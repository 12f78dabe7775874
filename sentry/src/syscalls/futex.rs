//! futex(2) and its successors, robust lists.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use guest_abi::types::Timespec;
use guest_abi::{UserAddr, UserPtr};
use linux_raw_sys::general::*;
use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::table::Row;
use crate::futex::{self, MATCH_ANY, WaitAny, Word, pi, robust};
use crate::row;
use crate::task::Task;
use crate::time::Nanos;
use crate::timers::clock;
use crate::{Errno, Result};

/// The rows of this area.
pub const ROWS: &[Row] = &[
    row!(202, futex(uaddr: UserAddr, op: u32, val: u32, utime: u64, uaddr2: UserAddr, val3: u32), both futex_fast, futex_slow, Partial, "no priority is inherited"),
    row!(273, set_robust_list(head: UserAddr, len: u64), fast set_robust_list, Full),
    row!(274, get_robust_list(pid: i32, head: UserPtr<u64>, len: UserPtr<u64>), fast get_robust_list, Full),
    row!(449, futex_waitv(waiters: UserPtr<Waitv>, nr_futexes: u32, flags: u32, timeout: UserPtr<Timespec>, clockid: i32), slow futex_waitv, Full),
    row!(454, futex_wake(uaddr: UserAddr, mask: u64, nr: i32, flags: u32), fast futex_wake, Full),
    row!(455, futex_wait(uaddr: UserAddr, val: u64, mask: u64, flags: u32, timeout: UserPtr<Timespec>, clockid: i32), slow futex_wait, Full),
    row!(456, futex_requeue(waiters: UserPtr<Waitv>, flags: u32, nr_wake: i32, nr_requeue: i32), fast futex_requeue, Full),
];

/// struct futex_waitv.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Waitv {
    val: u64,
    uaddr: u64,
    flags: u32,
    reserved: u32,
}

/// The decoded arguments of futex(2).
struct Args {
    task: Arc<Task>,
    command: u32,
    shared: bool,
    realtime: bool,
    uaddr: UserAddr,
    val: u32,
    utime: u64,
    uaddr2: UserAddr,
}

impl Args {
    fn new(task: &Arc<Task>, uaddr: UserAddr, op: u32, val: u32, utime: u64, uaddr2: UserAddr) -> Result<Args> {
        let command = op & !(FUTEX_PRIVATE_FLAG | FUTEX_CLOCK_REALTIME);
        let mut realtime = op & FUTEX_CLOCK_REALTIME != 0;
        if realtime && !matches!(command, FUTEX_WAIT_BITSET | FUTEX_WAIT_REQUEUE_PI | FUTEX_LOCK_PI2) {
            return Err(Errno::ENOSYS);
        }
        if command == FUTEX_LOCK_PI {
            realtime = true;
        }
        let shared = op & FUTEX_PRIVATE_FLAG == 0;
        Ok(Args { task: task.clone(), command, shared, realtime, uaddr, val, utime, uaddr2 })
    }

    /// The fourth argument as a time: a deadline on the monotonic axis.
    fn deadline(&self) -> Result<Option<Nanos>> {
        if self.utime == 0 {
            return Ok(None);
        }
        let t: Timespec = self.task.space()?.read(UserPtr::new(UserAddr(self.utime)))?;
        let span = clock::span(&t).ok_or(Errno::EINVAL)?;
        Ok(Some(if self.command == FUTEX_WAIT {
            self.task.now().saturating_add(span)
        } else if self.realtime {
            clock::realtime_deadline(self.task.kernel(), span)
        } else {
            clock::to_machine(&self.task, &clock::Clock::Monotonic, span)
        }))
    }

    fn word(&self) -> Result<Word> {
        Word::new(self.task.space()?, self.uaddr, self.shared)
    }

    fn word2(&self) -> Result<Word> {
        Word::new(self.task.space()?, self.uaddr2, self.shared)
    }

    /// The third argument as a count of waiters to wake.
    fn count(&self) -> usize {
        usize::try_from(self.val as i32).unwrap_or(0)
    }

    /// The fourth argument as a count.
    fn count2(&self) -> usize {
        usize::try_from(self.utime as i32).unwrap_or(0)
    }

    fn requeue_counts(&self) -> Result<(usize, usize)> {
        let count = |n: i32| usize::try_from(n).map_err(|_| Errno::EINVAL);
        Ok((count(self.val as i32)?, count(self.utime as i32)?))
    }
}

fn futex_fast(
    task: &Arc<Task>,
    uaddr: UserAddr,
    op: u32,
    val: u32,
    utime: u64,
    uaddr2: UserAddr,
    val3: u32,
) -> Result<Option<u64>> {
    let a = Args::new(task, uaddr, op, val, utime, uaddr2)?;
    let kernel = task.kernel();
    let done = match a.command {
        FUTEX_WAIT | FUTEX_WAIT_BITSET => {
            a.deadline()?;
            if a.command == FUTEX_WAIT_BITSET && val3 == 0 {
                return Err(Errno::EINVAL);
            }
            return if futex::would_block(&a.word()?, val)? { Ok(None) } else { Err(Errno::EAGAIN) };
        }
        FUTEX_LOCK_PI | FUTEX_LOCK_PI2 | FUTEX_WAIT_REQUEUE_PI => return Ok(None),
        FUTEX_WAKE => futex::wake(kernel, &a.word()?, a.count(), MATCH_ANY)?,
        FUTEX_WAKE_BITSET => {
            if val3 == 0 {
                return Err(Errno::EINVAL);
            }
            futex::wake(kernel, &a.word()?, a.count(), val3)?
        }
        FUTEX_REQUEUE | FUTEX_CMP_REQUEUE => {
            let (wake, requeue) = a.requeue_counts()?;
            let expected = (a.command == FUTEX_CMP_REQUEUE).then_some(val3);
            futex::requeue(kernel, &a.word()?, &a.word2()?, wake, requeue, expected)?
        }
        FUTEX_WAKE_OP => futex::wake_op(kernel, &a.word()?, &a.word2()?, a.count(), a.count2(), val3)?,
        FUTEX_TRYLOCK_PI => pi::try_lock(task, &a.word()?).map(|()| 0)?,
        FUTEX_UNLOCK_PI => {
            // The owner is looked at before the word is.
            let value: u32 = task.space()?.read(UserPtr::new(uaddr))?;
            if value & FUTEX_TID_MASK != task.tid() as u32 {
                return Err(Errno::EPERM);
            }
            pi::unlock(task, &a.word()?).map(|()| 0)?
        }
        FUTEX_CMP_REQUEUE_PI => {
            let (wake, requeue) = a.requeue_counts()?;
            if wake != 1 || uaddr == uaddr2 {
                return Err(Errno::EINVAL);
            }
            pi::cmp_requeue(task, &a.word()?, &a.word2()?, requeue, val3)?
        }
        _ => return Err(Errno::ENOSYS),
    };
    Ok(Some(done as u64))
}

async fn futex_slow(
    task: &Arc<Task>,
    uaddr: UserAddr,
    op: u32,
    val: u32,
    utime: u64,
    uaddr2: UserAddr,
    val3: u32,
) -> Result<u64> {
    let a = Args::new(task, uaddr, op, val, utime, uaddr2)?;
    let deadline = a.deadline()?;
    match a.command {
        FUTEX_LOCK_PI | FUTEX_LOCK_PI2 => pi::lock(task, &a.word()?, deadline).await.map(|()| 0),
        FUTEX_WAIT_REQUEUE_PI => {
            pi::wait_requeue(task, &a.word()?, val, deadline, MATCH_ANY, a.word2()?).await.map(|()| 0)
        }
        command => {
            let bitset = if command == FUTEX_WAIT_BITSET { val3 } else { MATCH_ANY };
            futex::wait_restartable(task, uaddr, a.shared, val, deadline, bitset).await
        }
    }
}

fn set_robust_list(task: &Arc<Task>, head: UserAddr, len: u64) -> Result<u64> {
    if len != robust::HEAD_LEN {
        return Err(Errno::EINVAL);
    }
    task.robust_list.store(head.0, Ordering::Relaxed);
    Ok(0)
}

fn get_robust_list(task: &Arc<Task>, pid: i32, head: UserPtr<u64>, len: UserPtr<u64>) -> Result<u64> {
    let target = if pid == 0 { task.clone() } else { task.pid_namespace().task(pid).ok_or(Errno::ESRCH)? };
    crate::task::access::may_inspect(task, &target)?;
    let space = task.space()?;
    space.write(len, &robust::HEAD_LEN)?;
    space.write(head, &target.robust_list.load(Ordering::Relaxed))?;
    Ok(0)
}

/// FUTEX2_* flags of the newer calls: whether the futex is shared.
fn futex2_shared(flags: u32) -> Result<bool> {
    const SIZE_MASK: u32 = 3;
    const SIZE_U32: u32 = 2;
    if flags & !(SIZE_MASK | FUTEX_PRIVATE_FLAG) != 0 || flags & SIZE_MASK != SIZE_U32 {
        return Err(Errno::EINVAL);
    }
    Ok(flags & FUTEX_PRIVATE_FLAG == 0)
}

/// An absolute timeout with its clock.
fn absolute(task: &Arc<Task>, timeout: UserPtr<Timespec>, clockid: i32) -> Result<Option<Nanos>> {
    if timeout.is_null() {
        return Ok(None);
    }
    let realtime = match clockid as u32 {
        CLOCK_REALTIME => true,
        CLOCK_MONOTONIC => false,
        _ => return Err(Errno::EINVAL),
    };
    let at = clock::span(&task.space()?.read(timeout)?).ok_or(Errno::EINVAL)?;
    Ok(Some(if realtime {
        clock::realtime_deadline(task.kernel(), at)
    } else {
        clock::to_machine(task, &clock::Clock::Monotonic, at)
    }))
}

fn waitv_words(task: &Arc<Task>, waiters: UserPtr<Waitv>, count: usize) -> Result<Vec<WaitAny>> {
    let space = task.space()?;
    let entries = space.read_array(waiters, count)?;
    entries
        .iter()
        .map(|w| {
            if w.reserved != 0 {
                return Err(Errno::EINVAL);
            }
            let shared = futex2_shared(w.flags)?;
            let value = u32::try_from(w.val).map_err(|_| Errno::EINVAL)?;
            Ok(WaitAny { word: Word::new(space.clone(), UserAddr(w.uaddr), shared)?, value, bitset: MATCH_ANY })
        })
        .collect()
}

async fn futex_waitv(
    task: &Arc<Task>,
    waiters: UserPtr<Waitv>,
    nr_futexes: u32,
    flags: u32,
    timeout: UserPtr<Timespec>,
    clockid: i32,
) -> Result<u64> {
    if flags != 0 || nr_futexes == 0 || nr_futexes > FUTEX_WAITV_MAX || waiters.is_null() {
        return Err(Errno::EINVAL);
    }
    let deadline = absolute(task, timeout, clockid)?;
    let words = waitv_words(task, waiters, nr_futexes as usize)?;
    futex::wait_any(task, &words, deadline).await.map(|i| i as u64)
}

fn futex_wake(task: &Arc<Task>, uaddr: UserAddr, mask: u64, nr: i32, flags: u32) -> Result<u64> {
    let shared = futex2_shared(flags)?;
    let bitset = u32::try_from(mask).map_err(|_| Errno::EINVAL)?;
    if bitset == 0 {
        return Err(Errno::EINVAL);
    }
    let word = Word::new(task.space()?, uaddr, shared)?;
    match usize::try_from(nr) {
        Ok(0) => Ok(0),
        Ok(n) => futex::wake(task.kernel(), &word, n, bitset).map(|n| n as u64),
        Err(_) => futex::wake(task.kernel(), &word, 1, bitset).map(|n| n as u64),
    }
}

async fn futex_wait(
    task: &Arc<Task>,
    uaddr: UserAddr,
    val: u64,
    mask: u64,
    flags: u32,
    timeout: UserPtr<Timespec>,
    clockid: i32,
) -> Result<u64> {
    let shared = futex2_shared(flags)?;
    let (value, bitset) = match (u32::try_from(val), u32::try_from(mask)) {
        (Ok(v), Ok(m)) if m != 0 => (v, m),
        _ => return Err(Errno::EINVAL),
    };
    let deadline = absolute(task, timeout, clockid)?;
    let word = Word::new(task.space()?, uaddr, shared)?;
    futex::wait(task, &word, value, deadline, bitset).await.map(|()| 0)
}

fn futex_requeue(task: &Arc<Task>, waiters: UserPtr<Waitv>, flags: u32, nr_wake: i32, nr_requeue: i32) -> Result<u64> {
    if flags != 0 || waiters.is_null() {
        return Err(Errno::EINVAL);
    }
    let words = waitv_words(task, waiters, 2)?;
    let count = |n: i32| usize::try_from(n).map_err(|_| Errno::EINVAL);
    let (wake, requeue) = (count(nr_wake)?, count(nr_requeue)?);
    match words.as_slice() {
        [from, to] => {
            futex::requeue(task.kernel(), &from.word, &to.word, wake, requeue, Some(from.value)).map(|n| n as u64)
        }
        _ => Err(Errno::EINVAL),
    }
}
