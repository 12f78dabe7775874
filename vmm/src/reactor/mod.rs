//! The reactor: one host thread that waits for everything outside of the sandbox at once. Owns the nearest deadline, readiness of
//! host descriptors and the process's signals; never what follows from them. Without an event the thread sleeps.
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use sentry::event::{Events, WaitQueue};
use sentry::lock::{Mutex, Rank};

mod signals;

pub use signals::block;

const TIMER: u64 = 0;
const STOP: u64 = 1;
const SIGNALS: u64 = 2;
const CLOCK: u64 = 3;
const FIRST_WATCH: u64 = 16;

/// What the reactor calls. All calls come from its thread, with no lock held; none may block.
pub struct Callbacks {
    /// The deadline has passed.
    pub deadline: Box<dyn Fn() + Send>,
    /// CLOCK_REALTIME was set.
    pub clock_set: Box<dyn Fn() + Send>,
    /// The process has received a signal.
    pub signal: Box<dyn Fn(i32) + Send>,
}

#[derive(Default)]
struct Watches {
    next: u64,
    live: HashMap<u64, Arc<Watched>>,
}

struct Watched {
    queue: Arc<WaitQueue>,
    state: Mutex<WatchState>,
}

#[derive(Default)]
struct WatchState {
    added: bool,
    armed: Events,
}

/// The reactor.
pub struct Reactor {
    epoll: OwnedFd,
    timer: OwnedFd,
    /// Never expires; its read fails when CLOCK_REALTIME was set.
    clock: OwnedFd,
    stop: OwnedFd,
    /// The time the timer is set to, ns; None while it is off.
    armed: Mutex<Option<u64>>,
    watches: Mutex<Watches>,
    thread: Mutex<Option<JoinHandle<()>>>,
    stopping: AtomicBool,
}

/// A descriptor whose readiness somebody may wait for; forgotten on drop.
pub struct Watch {
    reactor: Arc<Reactor>,
    fd: OwnedFd,
    token: u64,
    watched: Arc<Watched>,
}

impl Reactor {
    /// The descriptors, without the thread.
    pub fn new() -> io::Result<Arc<Reactor>> {
        let reactor = Reactor {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            timer: timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?,
            clock: timerfd_create(TimerfdClockId::Realtime, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?,
            stop: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            armed: Mutex::new(Rank::Leaf, None),
            watches: Mutex::new(Rank::Leaf, Watches { next: FIRST_WATCH, live: HashMap::new() }),
            thread: Mutex::new(Rank::Leaf, None),
            stopping: AtomicBool::new(false),
        };
        epoll::add(&reactor.epoll, &reactor.timer, epoll::EventData::new_u64(TIMER), epoll::EventFlags::IN)?;
        let never = Itimerspec {
            it_interval: Timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: Timespec { tv_sec: 1 << 33, tv_nsec: 0 },
        };
        timerfd_settime(&reactor.clock, TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET, &never)?;
        epoll::add(&reactor.epoll, &reactor.clock, epoll::EventData::new_u64(CLOCK), epoll::EventFlags::IN)?;
        epoll::add(&reactor.epoll, &reactor.stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        Ok(Arc::new(reactor))
    }

    /// Starts the thread. `signals` are taken by it; [`block`] must have blocked them before the process had other threads. It gets its
    /// callbacks, or ends without, before it looks at anything. The receiver tells when it has begun: a thread's own beginning makes host
    /// calls that the jail lets nobody make.
    pub fn start(
        self: &Arc<Self>,
        signals: &[i32],
        callbacks: impl FnOnce() -> Option<Callbacks> + Send + 'static,
    ) -> io::Result<Receiver<()>> {
        let signal_fd = signals::open(signals)?;
        epoll::add(&self.epoll, &signal_fd, epoll::EventData::new_u64(SIGNALS), epoll::EventFlags::IN)?;
        let this = self.clone();
        let (running, runs) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name("reactor".into()).stack_size(256 << 10).spawn(move || {
            let _ = running.send(());
            if let Some(callbacks) = callbacks() {
                this.run(&signal_fd, &callbacks);
            }
        })?;
        *self.thread.lock() = Some(thread);
        Ok(runs)
    }

    /// Ends the thread and waits for it, unless the caller is the thread itself.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        let thread = self.thread.lock().take();
        if let Some(t) = thread
            && t.thread().id() != std::thread::current().id()
        {
            let _ = t.join();
        }
    }

    /// Asks for one deadline callback at CLOCK_MONOTONIC `at` ns; replaces the earlier request. A later time than the one asked
    /// for before leaves the timer as it is: the callback then comes early and asks again, which is cheaper than a system
    /// call for every wait that ended before its time.
    pub fn set_deadline(&self, at: Option<u64>) {
        let mut armed = self.armed.lock();
        match (at, *armed) {
            (None, _) => return,
            (Some(new), Some(old)) if new >= old => return,
            _ => {}
        }
        let Some(ns) = at else { return };
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Zero would switch the timer off.
        let ns = ns.clamp(1, i64::MAX as u64);
        let value = Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 };
        let spec = Itimerspec { it_interval: zero, it_value: value };
        match timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &spec) {
            Ok(_) => *armed = at,
            Err(e) => log::error!("the deadline timer cannot be set: {e}"),
        }
    }

    /// Lets tasks wait for `fd`, which must be one that epoll(7) takes. Nothing is registered before the first [`Watch::arm`].
    pub fn watch(self: &Arc<Self>, fd: OwnedFd) -> Watch {
        let watched =
            Arc::new(Watched { queue: WaitQueue::new(), state: Mutex::new(Rank::Leaf, WatchState::default()) });
        let mut watches = self.watches.lock();
        let token = watches.next;
        watches.next += 1;
        watches.live.insert(token, watched.clone());
        drop(watches);
        Watch { reactor: self.clone(), fd, token, watched }
    }

    fn run(&self, signal_fd: &OwnedFd, callbacks: &Callbacks) {
        let mut events = Vec::with_capacity(64);
        while !self.stopping.load(Ordering::SeqCst) {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => {
                    log::error!("epoll_wait: {e}");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    TIMER => {
                        let mut count = [0; 8];
                        let fired = rustix::io::read(&self.timer, &mut count).is_ok();
                        if fired {
                            *self.armed.lock() = None;
                            (callbacks.deadline)();
                        }
                    }
                    CLOCK => {
                        let mut count = [0; 8];
                        if rustix::io::read(&self.clock, &mut count) == Err(rustix::io::Errno::CANCELED) {
                            (callbacks.clock_set)();
                        }
                    }
                    STOP => return,
                    SIGNALS => {
                        while let Some(signal) = signals::next(signal_fd) {
                            (callbacks.signal)(signal);
                        }
                    }
                    token => {
                        let watched = self.watches.lock().live.get(&token).cloned();
                        if let Some(w) = watched {
                            let ready = from_epoll(event.flags);
                            // One shot: the descriptor is disarmed now, whatever else was asked for.
                            let rest = {
                                let mut state = w.state.lock();
                                let ended = ready.intersects(Events::ERR | Events::HUP);
                                core::mem::take(&mut state.armed).difference(if ended { Events::all() } else { ready })
                            };
                            w.queue.wake(ready | widen(ready));
                            if !rest.is_empty() {
                                // Those who still wait for the rest look again and arm again.
                                w.queue.wake(rest);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Both spellings of readable and writable.
fn widen(e: Events) -> Events {
    let mut out = Events::empty();
    if e.intersects(Events::READABLE) {
        out |= Events::READABLE;
    }
    if e.intersects(Events::WRITABLE) {
        out |= Events::WRITABLE;
    }
    out
}

fn from_epoll(flags: epoll::EventFlags) -> Events {
    // epoll(7) and poll(2) share their values.
    Events::from_bits_truncate(flags.bits())
}

impl Watch {
    /// The descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Fires on readiness.
    pub fn queue(&self) -> &Arc<WaitQueue> {
        &self.watched.queue
    }

    /// Asks for one wake of the queue when any of `interest` is true, which may be at once.
    pub fn arm(&self, interest: Events) {
        let mut state = self.watched.state.lock();
        let wanted = state.armed | interest;
        if state.added && wanted == state.armed {
            return;
        }
        let flags = epoll::EventFlags::from_bits_retain(wanted.bits()) | epoll::EventFlags::ONESHOT;
        let data = epoll::EventData::new_u64(self.token);
        let done = if state.added {
            epoll::modify(&self.reactor.epoll, &self.fd, data, flags)
        } else {
            epoll::add(&self.reactor.epoll, &self.fd, data, flags)
        };
        match done {
            Ok(()) => {
                state.added = true;
                state.armed = wanted;
            }
            Err(e) => {
                drop(state);
                // A descriptor that cannot be waited for counts as ready.
                log::debug!("a host descriptor cannot be watched: {e}");
                self.watched.queue.wake(interest);
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if self.watched.state.lock().added {
            let _ = epoll::delete(&self.reactor.epoll, &self.fd);
        }
        self.reactor.watches.lock().live.remove(&self.token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    fn now() -> u64 {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
    }

    struct Tell(Mutex<mpsc::Sender<Events>>);
    impl sentry::event::Observer for Tell {
        fn notify(&self, events: Events) -> bool {
            let _ = self.0.lock().send(events);
            true
        }
    }

    #[test]
    fn deadlines_and_readiness() {
        let r = Reactor::new().unwrap();
        let (tx, rx) = mpsc::channel();
        let callbacks = Callbacks {
            deadline: Box::new(move || tx.send(now()).unwrap()),
            clock_set: Box::new(|| {}),
            signal: Box::new(|_| {}),
        };
        r.start(&[], || Some(callbacks)).unwrap();
        let at = now() + 20_000_000;
        r.set_deadline(Some(at + 1_000_000_000));
        r.set_deadline(Some(at));
        r.set_deadline(Some(at + 5_000_000_000));
        let fired = rx.recv_timeout(Duration::from_secs(5)).unwrap();
        assert!(fired >= at && fired < at + 900_000_000);
        assert!(rx.try_recv().is_err());
        r.set_deadline(Some(1));
        rx.recv_timeout(Duration::from_secs(5)).unwrap();

        let (read, write) = rustix::pipe::pipe().unwrap();
        let w = r.watch(read);
        let (tx, rx) = mpsc::channel();
        let _observing = w.queue().observe(Events::IN, Arc::new(Tell(Mutex::new(Rank::Leaf, tx))));
        w.arm(Events::IN);
        assert!(rx.recv_timeout(Duration::from_millis(30)).is_err());
        rustix::io::write(&write, b"x").unwrap();
        assert!(rx.recv_timeout(Duration::from_secs(5)).unwrap().contains(Events::IN));
        assert!(rx.recv_timeout(Duration::from_millis(30)).is_err(), "one shot");
        w.arm(Events::IN);
        assert!(rx.recv_timeout(Duration::from_secs(5)).unwrap().contains(Events::IN), "level, not edge");
        drop(w);
        assert!(r.watches.lock().live.is_empty());
        r.stop();
    }
}
