//! Priority-inheritance futexes: the word holds its owner's tid, and the kernel hands ownership on. There are no real-time
//! priorities to inherit here, so waiters are served in order of arrival.
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use linux_raw_sys::general::{FUTEX_OWNER_DIED, FUTEX_TID_MASK, FUTEX_WAITERS};

use super::queue::{Bucket, Futexes, Kind, Outcome, Taken, Waiter, take, waiters};
use super::{MATCH_ANY, Word, sleep};
use crate::event::WaitEnd;
use crate::lock::{Mutex, Rank};
use crate::mm::space::FutexKey;
use crate::task::Task;
use crate::time::Nanos;
use crate::{Errno, Result};

/// Which words with waiters a task owns, by its global tid: what its death must hand on.
pub(super) struct Owners(Mutex<HashMap<i32, HashSet<FutexKey>>>);

impl Default for Owners {
    fn default() -> Self {
        Owners(Mutex::new(Rank::Leaf, HashMap::new()))
    }
}

impl Owners {
    fn set(&self, old: Option<i32>, new: Option<i32>, key: FutexKey) {
        let mut map = self.0.lock();
        if let Some(old) = old
            && let Some(keys) = map.get_mut(&old)
        {
            keys.remove(&key);
            if keys.is_empty() {
                map.remove(&old);
            }
        }
        if let Some(new) = new {
            map.entry(new).or_default().insert(key);
        }
    }

    fn take(&self, tid: i32) -> HashSet<FutexKey> {
        self.0.lock().remove(&tid).unwrap_or_default()
    }
}

/// The first waiter for ownership. EINVAL if others wait for the same word.
fn first_pi(bucket: &Bucket, key: FutexKey) -> Result<Option<(u64, Arc<Waiter>)>> {
    match waiters(bucket, key).next() {
        None => Ok(None),
        Some((n, w)) if matches!(w.kind(), Kind::Pi) => Ok(Some((n, w.clone()))),
        Some(_) => Err(Errno::EINVAL),
    }
}

/// What an attempt to own a word came to.
enum Attempt {
    Acquired,
    /// Held by a living task; the waiters bit is set.
    Held(Arc<Task>),
}

/// Tries to make `task` the owner. The caller holds the bucket. EDEADLK if it is already, ESRCH if the owner does not exist.
fn attempt(bucket: &Bucket, word: &Word, task: &Arc<Task>, set_waiters: bool) -> Result<Attempt> {
    let tid = task.tid() as u32;
    let queue = first_pi(bucket, word.key)?.is_some();
    let mut old = word.load()?;
    loop {
        let owner = old & FUTEX_TID_MASK;
        if owner == tid {
            return Err(Errno::EDEADLK);
        }
        if owner == 0 {
            let waiters = if set_waiters || queue { FUTEX_WAITERS } else { 0 };
            let new = tid | old & FUTEX_OWNER_DIED | waiters;
            let found = word.space.compare_exchange_u32(word.addr, old, new)?;
            if found == old {
                return Ok(Attempt::Acquired);
            }
            old = found;
            continue;
        }
        let holder = i32::try_from(owner).ok().and_then(|n| task.pid_namespace().task(n)).filter(|t| !t.is_dead());
        if old & FUTEX_WAITERS == 0 {
            let found = word.space.compare_exchange_u32(word.addr, old, old | FUTEX_WAITERS)?;
            if found != old {
                old = found;
                continue;
            }
        }
        return holder.map(Attempt::Held).ok_or(Errno::ESRCH);
    }
}

/// FUTEX_TRYLOCK_PI. EAGAIN if it is held.
pub fn try_lock(task: &Arc<Task>, word: &Word) -> Result<()> {
    let bucket = task.kernel().futexes.bucket(word.key).lock();
    // Nobody is to wait, so the owner need not learn of waiters.
    let tid = task.tid() as u32;
    let queue = first_pi(&bucket, word.key)?.is_some();
    let mut old = word.load()?;
    loop {
        if old & FUTEX_TID_MASK == tid {
            return Err(Errno::EDEADLK);
        }
        if old & FUTEX_TID_MASK != 0 {
            return Err(Errno::EAGAIN);
        }
        let waiters = if queue { FUTEX_WAITERS } else { 0 };
        let found = word.space.compare_exchange_u32(word.addr, old, tid | old & FUTEX_OWNER_DIED | waiters)?;
        if found == old {
            return Ok(());
        }
        old = found;
    }
}

/// FUTEX_LOCK_PI, FUTEX_LOCK_PI2. ETIMEDOUT; interrupted, ERESTARTNOINTR.
pub async fn lock(task: &Arc<Task>, word: &Word, deadline: Option<Nanos>) -> Result<()> {
    let futexes = &task.kernel().futexes;
    let waiter = Waiter::new(task, word, MATCH_ANY, Kind::Pi);
    {
        let mut bucket = futexes.bucket(word.key).lock();
        match attempt(&bucket, word, task, false)? {
            Attempt::Acquired => return Ok(()),
            Attempt::Held(owner) => {
                futexes.owners.set(None, Some(owner.global_tid()), word.key);
                futexes.insert(&mut bucket, word.key, &waiter);
            }
        }
    }
    let queued = futexes.queued(waiter);
    let end = sleep(task, core::slice::from_ref(&queued), deadline).await;
    if queued.leave() {
        return Ok(());
    }
    Err(match end {
        Err(WaitEnd::TimedOut) => Errno::ETIMEDOUT,
        _ => Errno::ERESTARTNOINTR,
    })
}

/// Hands the word to its first waiter, or frees it. The caller holds the bucket.
fn hand_on(
    futexes: &Futexes,
    bucket: &mut Bucket,
    key: FutexKey,
    owner: i32,
    died: bool,
    taken: &mut Taken,
) -> Result<bool> {
    let Some((n, waiter)) = first_pi(bucket, key)? else {
        futexes.owners.set(Some(owner), None, key);
        return Ok(false);
    };
    let word = waiter.word();
    let died = if died { FUTEX_OWNER_DIED } else { 0 };
    let new = waiter.task.tid() as u32 | FUTEX_WAITERS | died;
    let mut old = word.load()?;
    loop {
        let found = word.space.compare_exchange_u32(word.addr, old, new)?;
        if found == old {
            break;
        }
        old = found;
    }
    let next = waiter.task.global_tid();
    take(bucket, (key, n), Outcome::Acquired, taken);
    let more = first_pi(bucket, key)?.is_some();
    futexes.owners.set(Some(owner), more.then_some(next), key);
    Ok(true)
}

/// FUTEX_UNLOCK_PI. EPERM if the caller is not the owner.
pub fn unlock(task: &Arc<Task>, word: &Word) -> Result<()> {
    let futexes = &task.kernel().futexes;
    let mut taken = Taken::default();
    let done = {
        let mut bucket = futexes.bucket(word.key).lock();
        let mut old = word.load()?;
        if old & FUTEX_TID_MASK != task.tid() as u32 {
            return Err(Errno::EPERM);
        }
        match hand_on(futexes, &mut bucket, word.key, task.global_tid(), false, &mut taken) {
            Ok(true) => Ok(()),
            Ok(false) => loop {
                match word.space.compare_exchange_u32(word.addr, old, 0) {
                    Ok(found) if found == old => break Ok(()),
                    Ok(found) => old = found,
                    Err(e) => break Err(e),
                }
            },
            Err(e) => Err(e),
        }
    };
    taken.wake();
    done
}

/// FUTEX_WAIT_REQUEUE_PI: waits on `word` until FUTEX_CMP_REQUEUE_PI makes it the owner of `target` or queues it there and it becomes the
/// owner then.
pub async fn wait_requeue(
    task: &Arc<Task>,
    word: &Word,
    value: u32,
    deadline: Option<Nanos>,
    bitset: u32,
    target: Word,
) -> Result<()> {
    if word.key == target.key {
        return Err(Errno::EINVAL);
    }
    let futexes = &task.kernel().futexes;
    let waiter = Waiter::new(task, word, bitset, Kind::RequeuePi(target));
    let queued = futexes.enqueue_if(waiter, || Ok(word.load()? == value))?.ok_or(Errno::EAGAIN)?;
    let end = sleep(task, core::slice::from_ref(&queued), deadline).await;
    let moved = matches!(queued.waiter().kind(), Kind::Pi);
    if queued.leave() && queued.waiter().outcome() == Outcome::Acquired {
        return Ok(());
    }
    Err(match end {
        Err(WaitEnd::TimedOut) => Errno::ETIMEDOUT,
        // Once moved it cannot go back to its first word: the program has to look again.
        _ if moved => Errno::EAGAIN,
        _ => Errno::ERESTARTNOINTR,
    })
}

/// FUTEX_CMP_REQUEUE_PI: gives `target` to the first waiter of `from` if it is free, and moves up to `count` others. Gives how
/// many were woken or moved.
pub fn cmp_requeue(task: &Arc<Task>, from: &Word, target: &Word, count: usize, expected: u32) -> Result<usize> {
    if from.key == target.key {
        return Err(Errno::EINVAL);
    }
    let futexes = &task.kernel().futexes;
    let mut taken = Taken::default();
    let done = futexes.with_two(from.key, target.key, |first, mut second| {
        if from.load()? != expected {
            return Err(Errno::EAGAIN);
        }
        let chosen: Vec<_> =
            waiters(first, from.key).take(count.saturating_add(1)).map(|(n, w)| (n, w.clone())).collect();
        for (_, w) in &chosen {
            match w.kind() {
                Kind::RequeuePi(to) if to.key == target.key => {}
                _ => return Err(Errno::EINVAL),
            }
        }
        let mut owner = None;
        let mut done = 0;
        for (i, (n, w)) in chosen.iter().enumerate() {
            let more = chosen.len() > 1;
            if i == 0 {
                let bucket = second.as_deref_mut().unwrap_or(&mut *first);
                match attempt(bucket, target, &w.task, more)? {
                    Attempt::Acquired => {
                        owner = Some(w.task.global_tid());
                        take(first, (from.key, *n), Outcome::Acquired, &mut taken);
                        done += 1;
                        continue;
                    }
                    Attempt::Held(task) => owner = Some(task.global_tid()),
                }
            }
            if done >= count.saturating_add(1) {
                break;
            }
            first.remove(&(from.key, *n));
            let bucket = second.as_deref_mut().unwrap_or(&mut *first);
            futexes.requeue_to_pi(bucket, w);
            futexes.owners.set(None, owner, target.key);
            done += 1;
        }
        Ok(done)
    });
    taken.wake();
    done
}

/// The task dies: every word it owns with waiters goes to the first of them, marked with FUTEX_OWNER_DIED.
pub fn exit(task: &Arc<Task>) {
    let futexes = &task.kernel().futexes;
    for key in futexes.owners.take(task.global_tid()) {
        let mut taken = Taken::default();
        {
            let mut bucket = futexes.bucket(key).lock();
            // A word that cannot be written has waiters that cannot look at it either.
            let _ = hand_on(futexes, &mut bucket, key, task.global_tid(), true, &mut taken);
        }
        taken.wake();
    }
}
