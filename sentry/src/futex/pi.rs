//! Priority-inheritance futexes: the word holds its owner's tid, and the kernel hands ownership on. There are no real-time
//! priorities to inherit here, so waiters are served in order of arrival.
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

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
#[derive(Default)]
struct Owned {
    by_task: HashMap<i32, HashSet<FutexKey>>,
    by_key: HashMap<FutexKey, i32>,
}

impl Owned {
    fn forget(&mut self, key: FutexKey) {
        let Some(owner) = self.by_key.remove(&key) else { return };
        if let Some(keys) = self.by_task.get_mut(&owner) {
            keys.remove(&key);
            if keys.is_empty() {
                self.by_task.remove(&owner);
            }
        }
    }

    fn insert(&mut self, owner: i32, key: FutexKey) {
        self.forget(key);
        self.by_key.insert(key, owner);
        self.by_task.entry(owner).or_default().insert(key);
    }
}

/// The owners of all words with waiters.
pub(super) struct Owners(Mutex<Owned>);

impl Default for Owners {
    fn default() -> Self {
        Owners(Mutex::new(Rank::Leaf, Owned::default()))
    }
}

impl Owners {
    /// The word with waiters has this owner now, or no waiters.
    fn set(&self, owner: Option<i32>, key: FutexKey) {
        let mut owned = self.0.lock();
        match owner {
            Some(owner) => owned.insert(owner, key),
            None => owned.forget(key),
        }
    }

    /// As `set` for a first waiter; false if the owner has begun to die and would not hand the word on any more.
    fn add(&self, owner: &Task, key: FutexKey) -> bool {
        let mut owned = self.0.lock();
        if owner.futexes_settled.load(Ordering::Relaxed) {
            return false;
        }
        owned.insert(owner.global_tid(), key);
        true
    }

    fn take(&self, task: &Task) -> HashSet<FutexKey> {
        let mut owned = self.0.lock();
        task.futexes_settled.store(true, Ordering::Relaxed);
        let keys = owned.by_task.remove(&task.global_tid()).unwrap_or_default();
        for key in &keys {
            owned.by_key.remove(key);
        }
        keys
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
    /// Held by the owner that the caller had looked up; the waiters bit is set.
    Held,
    /// Held by this tid, which the caller is to look up without the bucket.
    HeldBy(u32),
}

/// Tries to make `task` the owner. The caller holds the bucket and knows that a living task has tid `owner`. EDEADLK if the
/// caller is the owner already.
fn attempt(bucket: &Bucket, word: &Word, task: &Arc<Task>, set_waiters: bool, owner: Option<u32>) -> Result<Attempt> {
    let tid = task.tid() as u32;
    let queue = first_pi(bucket, word.key)?.is_some();
    let mut old = word.load()?;
    loop {
        let holder = old & FUTEX_TID_MASK;
        if holder == tid {
            return Err(Errno::EDEADLK);
        }
        let new = if holder == 0 {
            let waiters = if set_waiters || queue { FUTEX_WAITERS } else { 0 };
            tid | old & FUTEX_OWNER_DIED | waiters
        } else if owner != Some(holder) {
            return Ok(Attempt::HeldBy(holder));
        } else {
            old | FUTEX_WAITERS
        };
        let found = if new == old { old } else { word.space.compare_exchange_u32(word.addr, old, new)? };
        if found == old {
            return Ok(if holder == 0 { Attempt::Acquired } else { Attempt::Held });
        }
        old = found;
    }
}

/// Owners looked up for one call before it starts again: each means that the word has changed hands.
const MAX_LOOKUPS: usize = 64;

/// The living task that a word names as its owner. ESRCH if there is none.
fn find_owner(task: &Arc<Task>, tid: u32) -> Result<Arc<Task>> {
    let found = i32::try_from(tid).ok().and_then(|n| task.pid_namespace().task(n));
    found.filter(|t| !t.is_dead()).ok_or(Errno::ESRCH)
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
    let mut owner: Option<(u32, Arc<Task>)> = None;
    let mut held = false;
    for _ in 0..MAX_LOOKUPS {
        let mut bucket = futexes.bucket(word.key).lock();
        let tid = match attempt(&bucket, word, task, false, owner.as_ref().map(|o| o.0))? {
            Attempt::Acquired => return Ok(()),
            Attempt::Held => {
                if owner.as_ref().is_some_and(|o| !futexes.owners.add(&o.1, word.key)) {
                    return Err(Errno::ESRCH);
                }
                futexes.insert(&mut bucket, word.key, &waiter);
                held = true;
                break;
            }
            Attempt::HeldBy(tid) => tid,
        };
        drop(bucket);
        owner = Some((tid, find_owner(task, tid)?));
    }
    drop(owner);
    if !held {
        return Err(Errno::ERESTARTNOINTR);
    }
    let queued = futexes.queued(waiter);
    let end = sleep(task, core::slice::from_ref(&queued), deadline).await;
    if queued.leave() {
        return Ok(());
    }
    given_up(futexes, word.key);
    Err(match end {
        Err(WaitEnd::TimedOut) => Errno::ETIMEDOUT,
        _ => Errno::ERESTARTNOINTR,
    })
}

/// A waiter of `key` has given up: without others its owner has nothing to hand on.
fn given_up(futexes: &Futexes, key: FutexKey) {
    let bucket = futexes.bucket(key).lock();
    if waiters(&bucket, key).next().is_none() {
        futexes.owners.set(None, key);
    }
}

/// Hands the word to its first waiter, or frees it. The caller holds the bucket.
fn hand_on(futexes: &Futexes, bucket: &mut Bucket, key: FutexKey, died: bool, taken: &mut Taken) -> Result<bool> {
    let Some((n, waiter)) = first_pi(bucket, key)? else {
        futexes.owners.set(None, key);
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
    futexes.owners.set(more.then_some(next), key);
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
        match hand_on(futexes, &mut bucket, word.key, false, &mut taken) {
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
    if moved {
        given_up(futexes, queued.waiter().word().key);
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
    let mut owner: Option<(u32, Arc<Task>)> = None;
    for _ in 0..MAX_LOOKUPS {
        let mut taken = Taken::default();
        let known = owner.as_ref().map(|(tid, t)| (*tid, t.global_tid()));
        let done = futexes.with_two(from.key, target.key, |a, b| {
            requeue_locked(futexes, a, b, from, target, count, expected, known, &mut taken)
        });
        taken.wake();
        match done? {
            Requeued::Done(n) => return Ok(n),
            Requeued::HeldBy(tid) => owner = Some((tid, find_owner(task, tid)?)),
        }
    }
    Err(Errno::ERESTARTNOINTR)
}

enum Requeued {
    Done(usize),
    HeldBy(u32),
}

#[allow(clippy::too_many_arguments)]
fn requeue_locked(
    futexes: &Futexes,
    first: &mut Bucket,
    mut second: Option<&mut Bucket>,
    from: &Word,
    target: &Word,
    count: usize,
    expected: u32,
    known: Option<(u32, i32)>,
    taken: &mut Taken,
) -> Result<Requeued> {
    if from.load()? != expected {
        return Err(Errno::EAGAIN);
    }
    let limit = count.saturating_add(1);
    let chosen: Vec<_> = waiters(first, from.key).take(limit).map(|(n, w)| (n, w.clone())).collect();
    for (_, w) in &chosen {
        match w.kind() {
            Kind::RequeuePi(to) if to.key == target.key => {}
            _ => return Err(Errno::EINVAL),
        }
    }
    let mut owner = None;
    for (i, (n, w)) in chosen.iter().enumerate() {
        if i == 0 {
            let bucket = second.as_deref_mut().unwrap_or(&mut *first);
            match attempt(bucket, target, &w.task, chosen.len() > 1, known.map(|k| k.0))? {
                Attempt::Acquired => {
                    owner = Some(w.task.global_tid());
                    take(first, (from.key, *n), Outcome::Acquired, taken);
                    continue;
                }
                Attempt::Held => owner = known.map(|k| k.1),
                Attempt::HeldBy(tid) => return Ok(Requeued::HeldBy(tid)),
            }
        }
        first.remove(&(from.key, *n));
        let bucket = second.as_deref_mut().unwrap_or(&mut *first);
        futexes.requeue_to_pi(bucket, w);
        if let Some(owner) = owner {
            futexes.owners.set(Some(owner), target.key);
        }
    }
    Ok(Requeued::Done(chosen.len()))
}

/// The task dies: every word it owns with waiters goes to the first of them, marked with FUTEX_OWNER_DIED.
pub fn exit(task: &Arc<Task>) {
    let futexes = &task.kernel().futexes;
    for key in futexes.owners.take(task) {
        let mut taken = Taken::default();
        {
            let mut bucket = futexes.bucket(key).lock();
            // A word that cannot be written has waiters that cannot look at it either.
            let _ = hand_on(futexes, &mut bucket, key, true, &mut taken);
        }
        taken.wake();
    }
}
