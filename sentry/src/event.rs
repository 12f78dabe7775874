//! Waiting: readiness bits, wait queues, interruption. Owns who waits for what; never decides what a wake means.
//!
//! A blocking system call is a future that registers in wait queues, re-evaluates its condition on every wake, and ends
//! early when its task is interrupted.
use core::future::Future;
use core::pin::Pin;
use core::sync::atomic::{AtomicBool, Ordering};
use core::task::{Context, Poll, Waker};
use std::sync::Arc;

use bitflags::bitflags;

use crate::lock::{Mutex, Rank};

bitflags! {
    /// Readiness, with poll(2)'s values.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Events: u32 {
        #[allow(missing_docs)] const IN = 0x1;
        #[allow(missing_docs)] const PRI = 0x2;
        #[allow(missing_docs)] const OUT = 0x4;
        #[allow(missing_docs)] const ERR = 0x8;
        #[allow(missing_docs)] const HUP = 0x10;
        #[allow(missing_docs)] const NVAL = 0x20;
        #[allow(missing_docs)] const RDNORM = 0x40;
        #[allow(missing_docs)] const RDBAND = 0x80;
        #[allow(missing_docs)] const WRNORM = 0x100;
        #[allow(missing_docs)] const WRBAND = 0x200;
        #[allow(missing_docs)] const RDHUP = 0x2000;
    }
}

impl Events {
    /// Readable, in both spellings.
    pub const READABLE: Events = Events::IN.union(Events::RDNORM);
    /// Writable, in both spellings.
    pub const WRITABLE: Events = Events::OUT.union(Events::WRNORM);
}

/// Called on a wake, with no lock of the caller's promise beyond ranks below `EpollReady`: it must be short.
pub trait Observer: Send + Sync {
    /// `events` may have become true. Whether somebody was woken who will look: if not, an exclusive observer does not count as woken.
    fn notify(&self, events: Events) -> bool;
}

enum Target {
    Waker(Waker),
    Observer(Arc<dyn Observer>),
}

struct Waiter {
    mask: Events,
    target: Target,
    list: List,
    prev: u32,
    next: u32,
}

/// Which list a waiter is in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum List {
    /// Woken by every wake.
    All,
    /// Woken one at a time by `wake_up_to`, oldest first.
    Exclusive,
    /// An exclusive one that was woken, until its future looks again.
    Fired,
    /// Observers told one at a time, in turn.
    InTurn,
}

const NOBODY: u32 = u32::MAX;

/// Slots given back stay for reuse up to this number once the queue is empty.
const KEPT_SLOTS: usize = 4;

/// The ends of a list.
#[derive(Clone, Copy)]
struct Ends {
    first: u32,
    last: u32,
}

/// Waiters in slots, linked into lists: joining and leaving cost the same however many there are.
struct Waiters {
    slots: Vec<Option<Waiter>>,
    free: Vec<u32>,
    ends: [Ends; 4],
    lengths: [usize; 4],
    count: usize,
}

impl Default for Waiters {
    fn default() -> Self {
        let none = Ends { first: NOBODY, last: NOBODY };
        Waiters { slots: Vec::new(), free: Vec::new(), ends: [none; 4], lengths: [0; 4], count: 0 }
    }
}

impl Waiters {
    fn get(&mut self, key: u32) -> Option<&mut Waiter> {
        self.slots.get_mut(key as usize)?.as_mut()
    }

    fn link(&mut self, key: u32, list: List) {
        let last = self.ends[list as usize].last;
        if let Some(w) = self.get(key) {
            (w.list, w.prev, w.next) = (list, last, NOBODY);
        }
        match self.get(last) {
            Some(before) => before.next = key,
            None => self.ends[list as usize].first = key,
        }
        self.ends[list as usize].last = key;
        self.lengths[list as usize] += 1;
    }

    fn unlink(&mut self, key: u32) {
        let Some(&mut Waiter { list, prev, next, .. }) = self.get(key) else { return };
        match self.get(prev) {
            Some(before) => before.next = next,
            None => self.ends[list as usize].first = next,
        }
        match self.get(next) {
            Some(after) => after.prev = prev,
            None => self.ends[list as usize].last = prev,
        }
        self.lengths[list as usize] -= 1;
    }

    fn insert(&mut self, mask: Events, target: Target, list: List) -> u32 {
        let waiter = Some(Waiter { mask, target, list, prev: NOBODY, next: NOBODY });
        let key = if let Some(key) = self.free.pop() {
            if let Some(slot) = self.slots.get_mut(key as usize) {
                *slot = waiter;
            }
            key
        } else {
            self.slots.push(waiter);
            // As many waiters as tasks and watches: far fewer than u32::MAX.
            u32::try_from(self.slots.len() - 1).unwrap_or(NOBODY)
        };
        self.count += 1;
        self.link(key, list);
        key
    }

    fn remove(&mut self, key: u32) -> Option<Waiter> {
        self.unlink(key);
        let taken = self.slots.get_mut(key as usize)?.take()?;
        self.count -= 1;
        if self.count == 0 && self.slots.len() > KEPT_SLOTS {
            (self.slots, self.free) = (Vec::new(), Vec::new());
        } else {
            self.free.push(key);
        }
        Some(taken)
    }
}

/// Those who wait for an object. Cheap when empty.
pub struct WaitQueue {
    waiters: Mutex<Waiters>,
    occupied: AtomicBool,
}

impl Default for WaitQueue {
    fn default() -> Self {
        WaitQueue { waiters: Mutex::new(Rank::WaitQueue, Waiters::default()), occupied: AtomicBool::new(false) }
    }
}

/// A place in a wait queue; leaving on drop.
pub struct Registration {
    queue: Arc<WaitQueue>,
    key: u32,
}

impl Registration {
    /// Makes an exclusive waiter that was woken eligible again.
    fn rearm(&self) {
        let mut waiters = self.queue.waiters.lock();
        if waiters.get(self.key).is_some_and(|w| w.list == List::Fired) {
            waiters.unlink(self.key);
            waiters.link(self.key, List::Exclusive);
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let left = {
            let mut w = self.queue.waiters.lock();
            let left = w.remove(self.key);
            if w.count == 0 {
                self.queue.occupied.store(false, Ordering::SeqCst);
            }
            left
        };
        // Woken for something that it did not look at: the next one takes its place.
        if let Some(Waiter { list: List::Fired, mask, .. }) = left {
            self.queue.wake_exclusive(mask, 1);
        }
    }
}

impl WaitQueue {
    /// An empty queue.
    pub fn new() -> Arc<WaitQueue> {
        Arc::new(WaitQueue::default())
    }

    /// Wakes everybody who waits for any of `events` (ERR and HUP reach all). Call it after the state changed.
    pub fn wake(&self, events: Events) {
        self.wake_up_to(events, usize::MAX);
    }

    /// Wakes every ordinary observer and waiter and at most `limit` exclusive ones: observers first, in turn, then waiters, oldest
    /// first. Gives how many exclusive ones were woken. A waiter that was woken and has not run yet is passed over.
    pub fn wake_up_to(&self, events: Events, limit: usize) -> usize {
        if !self.occupied.load(Ordering::SeqCst) {
            return 0;
        }
        let mut woken = Vec::new();
        let mut observers = Vec::new();
        {
            let mut waiters = self.waiters.lock();
            let mut at = waiters.ends[List::All as usize].first;
            while let Some(w) = waiters.get(at) {
                if w.mask.union(Events::ERR | Events::HUP).intersects(events) {
                    match &w.target {
                        Target::Observer(o) => observers.push(o.clone()),
                        Target::Waker(waker) => woken.push(waker.clone()),
                    }
                }
                at = w.next;
            }
        }
        for o in observers {
            o.notify(events);
        }
        for w in woken {
            w.wake();
        }
        let told = self.notify_in_turn(events, limit);
        told + self.wake_exclusive(events, limit - told)
    }

    /// Notifies exclusive observers until `limit` of them have woken somebody; each goes to the end of the line.
    fn notify_in_turn(&self, events: Events, limit: usize) -> usize {
        let (mut told, mut seen, mut most) = (0, 0, 1);
        while told < limit && seen < most {
            let observer = {
                let mut waiters = self.waiters.lock();
                let first = waiters.ends[List::InTurn as usize].first;
                if first == NOBODY {
                    break;
                }
                // Nobody can come before its turn twice.
                most = waiters.lengths[List::InTurn as usize];
                waiters.unlink(first);
                waiters.link(first, List::InTurn);
                waiters.get(first).and_then(|w| match &w.target {
                    Target::Observer(o) if w.mask.union(Events::ERR | Events::HUP).intersects(events) => {
                        Some(o.clone())
                    }
                    _ => None,
                })
            };
            seen += 1;
            told += usize::from(observer.is_some_and(|o| o.notify(events)));
        }
        told
    }

    /// Wakes at most `limit` exclusive waiters and nobody else; gives how many. For one that leaves something for the next.
    pub fn wake_exclusive(&self, events: Events, limit: usize) -> usize {
        if limit == 0 || !self.occupied.load(Ordering::SeqCst) {
            return 0;
        }
        let mut woken = Vec::new();
        {
            let mut waiters = self.waiters.lock();
            let mut at = waiters.ends[List::Exclusive as usize].first;
            while woken.len() < limit
                && let Some(w) = waiters.get(at)
            {
                let next = w.next;
                if w.mask.union(Events::ERR | Events::HUP).intersects(events)
                    && let Target::Waker(waker) = &w.target
                {
                    woken.push(waker.clone());
                    waiters.unlink(at);
                    waiters.link(at, List::Fired);
                }
                at = next;
            }
        }
        let count = woken.len();
        for w in woken {
            w.wake();
        }
        count
    }

    /// Whether somebody waits.
    pub fn is_occupied(&self) -> bool {
        self.occupied.load(Ordering::SeqCst)
    }

    fn add(self: &Arc<Self>, mask: Events, target: Target, list: List) -> Registration {
        let mut w = self.waiters.lock();
        self.occupied.store(true, Ordering::SeqCst);
        let key = w.insert(mask, target, list);
        Registration { queue: self.clone(), key }
    }

    /// Wakes `waker` on each of `mask` until the registration is dropped.
    pub fn register(self: &Arc<Self>, mask: Events, waker: &Waker) -> Registration {
        self.add(mask, Target::Waker(waker.clone()), List::All)
    }

    /// Notifies `observer` on each of `mask` until the registration is dropped.
    pub fn observe(self: &Arc<Self>, mask: Events, observer: Arc<dyn Observer>) -> Registration {
        self.add(mask, Target::Observer(observer), List::All)
    }

    /// As `observe`, but where a wake is for some only, it is for one such observer that finds somebody to wake.
    pub fn observe_exclusive(self: &Arc<Self>, mask: Events, observer: Arc<dyn Observer>) -> Registration {
        self.add(mask, Target::Observer(observer), List::InTurn)
    }
}

/// Whether a task has something to do that ends its wait: a signal, a kill, a stop. One per task.
pub struct Interruption {
    pending: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Default for Interruption {
    fn default() -> Self {
        Interruption { pending: AtomicBool::new(false), waker: Mutex::new(Rank::WaitQueue, None) }
    }
}

impl Interruption {
    /// Whether the wait must end.
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::SeqCst)
    }

    /// Sets the flag and wakes the waiting future.
    pub fn raise(&self) {
        self.pending.store(true, Ordering::SeqCst);
        let waker = self.waker.lock().clone();
        if let Some(w) = waker {
            w.wake();
        }
    }

    /// Clears the flag; the signal code does this when nothing deliverable is left.
    pub fn clear(&self) {
        self.pending.store(false, Ordering::SeqCst);
    }

    /// Names the waker to call from now on.
    pub fn set_waker(&self, waker: &Waker) {
        let mut slot = self.waker.lock();
        if !slot.as_ref().is_some_and(|w| w.will_wake(waker)) {
            *slot = Some(waker.clone());
        }
    }
}

/// Why a wait ended without its condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitEnd {
    /// The task has something else to do.
    Interrupted,
    /// The deadline passed.
    TimedOut,
}

/// A deadline registered somewhere that calls the waker; see `time::timer`.
pub trait Deadline: Send {
    /// Whether it has passed; registers `waker` if not.
    fn poll_passed(&mut self, waker: &Waker) -> bool;
}

/// The future of one wait.
pub struct WaitFor<'a, F> {
    interruption: Option<&'a Interruption>,
    queues: Vec<(Arc<WaitQueue>, Events)>,
    deadline: Option<Box<dyn Deadline + 'a>>,
    ready: F,
    registrations: Vec<Registration>,
    registered_for: Option<Waker>,
    exclusive: bool,
}

impl<F> WaitFor<'_, F> {
    /// Makes this waiter one of those that `wake_up_to` counts: for a condition that `ready` consumes, so that waking one
    /// waiter is enough.
    #[must_use]
    pub fn exclusive(mut self) -> Self {
        self.exclusive = true;
        self
    }
}

/// Waits until `ready` gives a value. It is evaluated at once, and after every wake of one of `queues`. With `interruption`
/// None the wait is uninterruptible. The condition wins over the interruption, the interruption over the deadline.
pub fn wait_for<'a, T, F: FnMut() -> Option<T>>(
    interruption: Option<&'a Interruption>,
    queues: Vec<(Arc<WaitQueue>, Events)>,
    deadline: Option<Box<dyn Deadline + 'a>>,
    ready: F,
) -> WaitFor<'a, F> {
    WaitFor { interruption, queues, deadline, ready, registrations: Vec::new(), registered_for: None, exclusive: false }
}

impl<F> Unpin for WaitFor<'_, F> {}

impl<T, F: FnMut() -> Option<T>> Future for WaitFor<'_, F> {
    type Output = Result<T, WaitEnd>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let waker = cx.waker();
        if !this.registered_for.as_ref().is_some_and(|w| w.will_wake(waker)) {
            let list = if this.exclusive { List::Exclusive } else { List::All };
            let join = |(q, mask): &(Arc<WaitQueue>, Events)| q.add(*mask, Target::Waker(waker.clone()), list);
            this.registrations = this.queues.iter().map(join).collect();
            if let Some(i) = this.interruption {
                i.set_waker(waker);
            }
            this.registered_for = Some(waker.clone());
        } else if this.exclusive {
            this.registrations.iter().for_each(Registration::rearm);
        }
        if let Some(v) = (this.ready)() {
            return Poll::Ready(Ok(v));
        }
        if this.interruption.is_some_and(Interruption::is_pending) {
            return Poll::Ready(Err(WaitEnd::Interrupted));
        }
        if this.deadline.as_mut().is_some_and(|d| d.poll_passed(waker)) {
            return Poll::Ready(Err(WaitEnd::TimedOut));
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    impl Count {
        fn get(&self) -> usize {
            self.0.load(Ordering::SeqCst)
        }
    }

    fn waiter() -> (Arc<Count>, Waker) {
        let count = Arc::new(Count::default());
        (count.clone(), Waker::from(count))
    }

    #[test]
    fn exclusive_waiters_go_one_by_one_and_hand_on() {
        let queue = WaitQueue::new();
        let made: Vec<_> = (0..3).map(|_| waiter()).collect();
        let add = |w: &Waker| queue.add(Events::IN, Target::Waker(w.clone()), List::Exclusive);
        let mut places: Vec<_> = made.iter().map(|(_, w)| Some(add(w))).collect();
        let counts = || made.iter().map(|(c, _)| c.get()).collect::<Vec<_>>();
        assert_eq!(queue.wake_up_to(Events::OUT, 1), 0);
        assert_eq!(queue.wake_up_to(Events::IN, 1), 1);
        assert_eq!(counts(), [1, 0, 0]);
        assert_eq!(queue.wake_up_to(Events::IN, 1), 1);
        assert_eq!(counts(), [1, 1, 0], "one that was woken is passed over");
        places[0] = None;
        assert_eq!(counts(), [1, 1, 1], "one that leaves without a look hands on");
        assert_eq!(queue.wake_up_to(Events::IN, 1), 0);
        places[1].as_ref().unwrap().rearm();
        assert_eq!(queue.wake_up_to(Events::IN, 5), 1);
        assert_eq!(counts(), [1, 2, 1]);
        places.clear();
        assert!(!queue.is_occupied());
    }

    struct Listener {
        told: AtomicUsize,
        listens: AtomicBool,
    }

    impl Observer for Listener {
        fn notify(&self, _: Events) -> bool {
            self.told.fetch_add(1, Ordering::SeqCst);
            self.listens.load(Ordering::SeqCst)
        }
    }

    #[test]
    fn exclusive_observers_take_turns() {
        let queue = WaitQueue::new();
        let listener = |_| Arc::new(Listener { told: AtomicUsize::new(0), listens: AtomicBool::new(true) });
        let made: Vec<_> = (0..3).map(listener).collect();
        let (count, waker) = waiter();
        let places: Vec<_> = made.iter().map(|l| queue.observe_exclusive(Events::IN, l.clone())).collect();
        let last = queue.add(Events::IN, Target::Waker(waker), List::Exclusive);
        let told = || made.iter().map(|l| l.told.load(Ordering::SeqCst)).collect::<Vec<_>>();
        assert_eq!(queue.wake_up_to(Events::OUT, 1), 0);
        assert_eq!(told(), [0, 0, 0]);
        for expected in [[1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1]] {
            assert_eq!(queue.wake_up_to(Events::IN, 1), 1);
            assert_eq!(told(), expected);
        }
        made[1].listens.store(false, Ordering::SeqCst);
        assert_eq!(queue.wake_up_to(Events::IN, 1), 1);
        assert_eq!(told(), [2, 2, 2], "one with nobody to wake does not count");
        assert_eq!(count.get(), 0);
        made.iter().for_each(|l| l.listens.store(false, Ordering::SeqCst));
        assert_eq!(queue.wake_up_to(Events::IN, 1), 1);
        assert_eq!((told(), count.get()), (vec![3, 3, 3], 1));
        queue.wake(Events::IN);
        assert_eq!(told(), [4, 4, 4]);
        drop((places, last));
        assert!(!queue.is_occupied());
    }

    #[test]
    fn leaving_does_not_depend_on_the_number() {
        let queue = WaitQueue::new();
        let (count, waker) = waiter();
        let mut places: Vec<_> = (0..100_000).map(|_| queue.register(Events::IN, &waker)).collect();
        // Any order: the middle, the ends.
        let kept = places.split_off(99_997);
        for place in places.into_iter().rev().step_by(1) {
            drop(place);
        }
        queue.wake(Events::IN);
        assert_eq!(count.get(), 3);
        drop(kept);
        assert!(!queue.is_occupied() && queue.waiters.lock().slots.is_empty());
    }
}
