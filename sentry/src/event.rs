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
    /// `events` may have become true.
    fn notify(&self, events: Events);
}

enum Target {
    Waker(Waker),
    Observer(Arc<dyn Observer>),
}

struct Waiter {
    key: u64,
    mask: Events,
    target: Target,
    /// Woken one at a time by `wake_up_to`; `fired` from its wake until its future looks again.
    exclusive: bool,
    fired: bool,
}

#[derive(Default)]
struct Waiters {
    next_key: u64,
    list: Vec<Waiter>,
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
    key: u64,
}

impl Registration {
    /// Makes an exclusive waiter that was woken eligible again.
    fn rearm(&self) {
        if let Some(w) = self.queue.waiters.lock().list.iter_mut().find(|x| x.key == self.key) {
            w.fired = false;
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut w = self.queue.waiters.lock();
        if let Some(i) = w.list.iter().position(|x| x.key == self.key) {
            w.list.remove(i);
        }
        if w.list.is_empty() {
            self.queue.occupied.store(false, Ordering::SeqCst);
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

    /// Wakes every observer, every ordinary waiter and at most `limit` exclusive ones, oldest first; gives how many exclusive
    /// ones were woken. One that was woken and has not run yet is passed over.
    pub fn wake_up_to(&self, events: Events, limit: usize) -> usize {
        if !self.occupied.load(Ordering::SeqCst) {
            return 0;
        }
        let mut woken = Vec::new();
        let mut observers = Vec::new();
        let mut count = 0;
        for w in &mut self.waiters.lock().list {
            if w.mask.union(Events::ERR | Events::HUP).intersects(events) {
                match &w.target {
                    Target::Observer(o) => observers.push(o.clone()),
                    Target::Waker(waker) if !w.exclusive => woken.push(waker.clone()),
                    Target::Waker(waker) if count < limit && !w.fired => {
                        w.fired = true;
                        count += 1;
                        woken.push(waker.clone());
                    }
                    Target::Waker(_) => {}
                }
            }
        }
        for o in observers {
            o.notify(events);
        }
        for w in woken {
            w.wake();
        }
        count
    }

    /// Whether somebody waits.
    pub fn is_occupied(&self) -> bool {
        self.occupied.load(Ordering::SeqCst)
    }

    fn add(self: &Arc<Self>, mask: Events, target: Target, exclusive: bool) -> Registration {
        let mut w = self.waiters.lock();
        self.occupied.store(true, Ordering::SeqCst);
        w.next_key += 1;
        let key = w.next_key;
        w.list.push(Waiter { key, mask, target, exclusive, fired: false });
        Registration { queue: self.clone(), key }
    }

    /// Wakes `waker` on each of `mask` until the registration is dropped.
    pub fn register(self: &Arc<Self>, mask: Events, waker: &Waker) -> Registration {
        self.add(mask, Target::Waker(waker.clone()), false)
    }

    /// Notifies `observer` on each of `mask` until the registration is dropped.
    pub fn observe(self: &Arc<Self>, mask: Events, observer: Arc<dyn Observer>) -> Registration {
        self.add(mask, Target::Observer(observer), false)
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
            let exclusive = this.exclusive;
            let join = |(q, mask): &(Arc<WaitQueue>, Events)| q.add(*mask, Target::Waker(waker.clone()), exclusive);
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
