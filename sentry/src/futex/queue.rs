//! The hashed buckets of waiters. Owns who waits where; never why.
use core::hash::BuildHasher;
use core::ops::Bound;
use core::task::Waker;
use std::collections::BTreeMap;
use std::hash::RandomState;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Word;
use crate::lock::{Mutex, MutexGuard, Rank};
use crate::mm::space::FutexKey;
use crate::task::Task;
use crate::{Errno, Result};

/// Number of buckets; a power of two.
const BUCKETS: usize = 256;

/// What a waiter waits for.
#[derive(Clone)]
pub(super) enum Kind {
    /// A wake.
    Plain,
    /// Ownership of a priority-inheritance futex.
    Pi,
    /// A requeue to the given priority-inheritance futex.
    RequeuePi(Word),
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It has not, or its waiter left by itself.
    None,
    /// Woken.
    Woken,
    /// The waiter owns the priority-inheritance futex now.
    Acquired,
}

struct Place {
    at: Option<(FutexKey, u64)>,
    kind: Kind,
    /// The word as the waiter sees it, at its present place.
    word: Word,
    outcome: Outcome,
    waker: Option<Waker>,
}

/// Somebody who waits for a word.
pub(super) struct Waiter {
    pub bitset: u32,
    pub task: Arc<Task>,
    place: Mutex<Place>,
}

impl Waiter {
    pub fn new(task: &Arc<Task>, word: &Word, bitset: u32, kind: Kind) -> Arc<Waiter> {
        Arc::new(Waiter {
            bitset,
            task: task.clone(),
            place: Mutex::new(
                Rank::Leaf,
                Place { at: None, kind, word: word.clone(), outcome: Outcome::None, waker: None },
            ),
        })
    }

    pub fn kind(&self) -> Kind {
        self.place.lock().kind.clone()
    }

    fn is_plain(&self) -> bool {
        matches!(self.place.lock().kind, Kind::Plain)
    }

    fn key(&self) -> FutexKey {
        self.place.lock().word.key
    }

    pub fn word(&self) -> Word {
        self.place.lock().word.clone()
    }

    pub fn outcome(&self) -> Outcome {
        self.place.lock().outcome
    }

    /// Whether it was woken; if not, `waker` will be.
    pub fn poll_woken(&self, waker: &Waker) -> bool {
        let mut place = self.place.lock();
        if place.outcome != Outcome::None {
            return true;
        }
        if !place.waker.as_ref().is_some_and(|w| w.will_wake(waker)) {
            place.waker = Some(waker.clone());
        }
        false
    }
}

/// A waiter's stay in a queue; leaving on drop.
pub(super) struct Queued<'a> {
    futexes: &'a Futexes,
    waiter: Arc<Waiter>,
}

impl Queued<'_> {
    pub fn waiter(&self) -> &Arc<Waiter> {
        &self.waiter
    }

    /// Leaves the queue. True if the waiter was woken before.
    pub fn leave(&self) -> bool {
        loop {
            let at = {
                let place = self.waiter.place.lock();
                match place.at {
                    None => return place.outcome != Outcome::None,
                    Some(at) => at,
                }
            };
            let mut bucket = self.futexes.bucket(at.0).lock();
            let mut place = self.waiter.place.lock();
            if place.at == Some(at) {
                place.at = None;
                let removed = bucket.remove(&at);
                drop(place);
                drop(bucket);
                drop(removed);
                return false;
            }
        }
    }
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Waiters of several words, in order of arrival for each.
pub(super) type Bucket = BTreeMap<(FutexKey, u64), Arc<Waiter>>;

/// Everybody who waits for a futex in this sandbox.
pub struct Futexes {
    buckets: Box<[Mutex<Bucket>]>,
    hasher: RandomState,
    arrival: AtomicU64,
    pub(super) owners: super::pi::Owners,
}

impl Default for Futexes {
    fn default() -> Self {
        Futexes {
            buckets: (0..BUCKETS).map(|_| Mutex::new(Rank::Futex, Bucket::new())).collect(),
            hasher: RandomState::new(),
            arrival: AtomicU64::new(0),
            owners: super::pi::Owners::default(),
        }
    }
}

/// Waiters taken off their queues, to be woken (and let go of) without a lock.
#[derive(Default)]
pub(super) struct Taken(Vec<Arc<Waiter>>);

impl Taken {
    pub fn wake(self) {
        for waiter in self.0 {
            let waker = waiter.place.lock().waker.take();
            if let Some(w) = waker {
                w.wake();
            }
        }
    }
}

/// Takes a waiter off its bucket; it is woken with `taken`.
pub(super) fn take(bucket: &mut Bucket, at: (FutexKey, u64), outcome: Outcome, taken: &mut Taken) {
    let Some(waiter) = bucket.remove(&at) else { return };
    {
        let mut place = waiter.place.lock();
        place.at = None;
        place.outcome = outcome;
    }
    taken.0.push(waiter);
}

/// The waiters of `key`, oldest first.
pub(super) fn waiters(bucket: &Bucket, key: FutexKey) -> impl Iterator<Item = (u64, &Arc<Waiter>)> {
    let range = (Bound::Included((key, 0)), Bound::Included((key, u64::MAX)));
    bucket.range(range).map(|((_, n), w)| (*n, w))
}

fn wake_in(bucket: &mut Bucket, key: FutexKey, count: usize, bitset: u32, taken: &mut Taken) -> Result<usize> {
    let mut chosen = Vec::new();
    for (n, w) in waiters(bucket, key) {
        if !w.is_plain() {
            return Err(Errno::EINVAL);
        }
        if w.bitset & bitset != 0 {
            chosen.push(n);
            // As in Linux a count of 0 wakes one.
            if chosen.len() >= count {
                break;
            }
        }
    }
    for n in &chosen {
        take(bucket, (key, *n), Outcome::Woken, taken);
    }
    Ok(chosen.len())
}

impl Futexes {
    fn index(&self, key: FutexKey) -> usize {
        self.hasher.hash_one(key) as usize & (BUCKETS - 1)
    }

    pub(super) fn bucket(&self, key: FutexKey) -> &Mutex<Bucket> {
        &self.buckets[self.index(key)]
    }

    /// Both buckets locked in order of their place; the second is None if they are one.
    fn lock_two(&self, a: FutexKey, b: FutexKey) -> (MutexGuard<'_, Bucket>, Option<MutexGuard<'_, Bucket>>) {
        let (i, j) = (self.index(a), self.index(b));
        match i.cmp(&j) {
            core::cmp::Ordering::Equal => (self.buckets[i].lock(), None),
            core::cmp::Ordering::Less => {
                let first = self.buckets[i].lock();
                let second = self.buckets[j].lock_nested();
                (first, Some(second))
            }
            core::cmp::Ordering::Greater => {
                let second = self.buckets[j].lock();
                let first = self.buckets[i].lock_nested();
                (first, Some(second))
            }
        }
    }

    /// Queues `waiter` if `check`, asked under the bucket's lock, says so.
    pub(super) fn enqueue_if(
        &self,
        waiter: Arc<Waiter>,
        check: impl FnOnce() -> Result<bool>,
    ) -> Result<Option<Queued<'_>>> {
        let key = waiter.key();
        let mut bucket = self.bucket(key).lock();
        if !check()? {
            return Ok(None);
        }
        self.insert(&mut bucket, key, &waiter);
        drop(bucket);
        Ok(Some(Queued { futexes: self, waiter }))
    }

    /// Queues a waiter in the bucket of `key`, which the caller has locked.
    pub(super) fn insert(&self, bucket: &mut Bucket, key: FutexKey, waiter: &Arc<Waiter>) {
        let at = (key, self.arrival.fetch_add(1, Ordering::Relaxed));
        waiter.place.lock().at = Some(at);
        bucket.insert(at, waiter.clone());
    }

    pub(super) fn queued(&self, waiter: Arc<Waiter>) -> Queued<'_> {
        Queued { futexes: self, waiter }
    }

    pub(super) fn wake(&self, key: FutexKey, count: usize, bitset: u32) -> Result<usize> {
        let mut taken = Taken::default();
        let woken = wake_in(&mut self.bucket(key).lock(), key, count, bitset, &mut taken);
        taken.wake();
        woken
    }

    /// Wakes `count` of `a`, and `count2` of `b` if `decide`, asked under both locks, says so.
    pub(super) fn wake_two(
        &self,
        a: FutexKey,
        b: FutexKey,
        count: usize,
        count2: usize,
        decide: impl FnOnce() -> Result<bool>,
    ) -> Result<usize> {
        let mut taken = Taken::default();
        let woken = {
            let (mut first, mut second) = self.lock_two(a, b);
            decide().and_then(|also| {
                let mut n = wake_in(&mut first, a, count, super::MATCH_ANY, &mut taken)?;
                if also {
                    let bucket = second.as_deref_mut().unwrap_or(&mut first);
                    n += wake_in(bucket, b, count2, super::MATCH_ANY, &mut taken)?;
                }
                Ok(n)
            })
        };
        taken.wake();
        woken
    }

    /// Wakes `wake` waiters of `from` and moves `requeue` more to `to` if `check`, asked under both locks, says so.
    pub(super) fn requeue(
        &self,
        from: FutexKey,
        to: FutexKey,
        wake: usize,
        requeue: usize,
        check: impl FnOnce() -> Result<bool>,
    ) -> Result<usize> {
        let mut taken = Taken::default();
        let done = {
            let (mut first, mut second) = self.lock_two(from, to);
            if !check()? {
                return Err(Errno::EAGAIN);
            }
            let limit = wake.saturating_add(requeue);
            let chosen: Vec<_> = waiters(&first, from).take(limit).map(|(n, w)| (n, w.clone())).collect();
            if chosen.iter().any(|(_, w)| !w.is_plain()) {
                return Err(Errno::EINVAL);
            }
            for (i, (n, waiter)) in chosen.iter().enumerate() {
                if i < wake {
                    take(&mut first, (from, *n), Outcome::Woken, &mut taken);
                } else if from != to {
                    first.remove(&(from, *n));
                    let bucket = second.as_deref_mut().unwrap_or(&mut first);
                    self.insert(bucket, to, waiter);
                }
            }
            chosen.len()
        };
        taken.wake();
        Ok(done)
    }

    /// Runs `f` with the waiters of `from` and of `to` locked, for the priority-inheritance requeue.
    pub(super) fn with_two<R>(
        &self,
        from: FutexKey,
        to: FutexKey,
        f: impl FnOnce(&mut Bucket, Option<&mut Bucket>) -> R,
    ) -> R {
        let (mut first, mut second) = self.lock_two(from, to);
        f(&mut first, second.as_deref_mut())
    }

    /// Turns a waiter that waits for a requeue into one that waits for ownership of its target, and queues it there.
    pub(super) fn requeue_to_pi(&self, bucket: &mut Bucket, waiter: &Arc<Waiter>) {
        let key = {
            let mut place = waiter.place.lock();
            if let Kind::RequeuePi(target) = core::mem::replace(&mut place.kind, Kind::Pi) {
                place.word = target;
            }
            place.word.key
        };
        self.insert(bucket, key, waiter);
    }
}
