//! epoll(7): interest lists and ready lists. Owns which descriptions are watched and which of them may be ready; readiness
//! itself is always asked of the object.
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::any::Any;
use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt::Write;
use std::sync::{Arc, Weak};

use guest_abi::types::Stat;

use super::anon::{AnonInode, DEV_ANON};
use crate::event::{Events, Observer, Registration, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::mm::Charge;
use crate::platform::KernelMemory;
use crate::task::Task;
use crate::vfs::file::{Caller, CloseWatcher};
use crate::vfs::{File, FileOps, OpenFlags};
use crate::{Errno, Result};

/// Paths by which a wake may climb through nested instances.
const MAX_PATHS: usize = 500;

/// EPOLLEXCLUSIVE.
const EXCLUSIVE: u32 = 1 << 28;
/// EPOLLWAKEUP: without CAP_BLOCK_SUSPEND, which nobody has here, Linux drops it silently.
const WAKEUP: u32 = 1 << 29;
/// EPOLLONESHOT.
const ONESHOT: u32 = 1 << 30;
/// EPOLLET.
const EDGE: u32 = 1 << 31;
const PRIVATE: u32 = EXCLUSIVE | WAKEUP | ONESHOT | EDGE;
const ALWAYS: u32 = Events::ERR.union(Events::HUP).bits();
/// Epoll instances may watch each other this deep (EP_MAX_NESTS).
const MAX_NESTS: usize = 4;
/// Items of all instances (max_user_watches).
const MAX_WATCHES: usize = 1 << 20;

/// Bytes of an item with its places in the instance, the description and the object's wait queue.
const ITEM_COST: usize = 512;

/// What all instances of a sandbox share.
pub struct Instances {
    watches: AtomicUsize,
    /// Serializes the additions of one instance to another, so that two of them cannot close a loop together.
    nesting: Mutex<()>,
}

impl Default for Instances {
    fn default() -> Self {
        Instances { watches: AtomicUsize::new(0), nesting: Mutex::new(Rank::EpollNesting, ()) }
    }
}

/// Items that may be ready. One that is forgotten stays until its turn comes or half of the list is such.
#[derive(Default)]
struct Ready {
    list: VecDeque<Arc<Item>>,
    forgotten: usize,
}

impl Ready {
    fn push(&mut self, item: &Arc<Item>) {
        if !item.queued.swap(true, Ordering::Relaxed) {
            self.list.push_back(item.clone());
        }
    }

    fn pop(&mut self) -> Option<Arc<Item>> {
        loop {
            let item = self.list.pop_front()?;
            item.queued.store(false, Ordering::Relaxed);
            if !item.removed.load(Ordering::SeqCst) {
                return Some(item);
            }
            self.forgotten = self.forgotten.saturating_sub(1);
        }
    }

    /// A removed item; those taken out are to be dropped without the lock.
    fn forget(&mut self, item: &Item) -> VecDeque<Arc<Item>> {
        if !item.queued.load(Ordering::Relaxed) {
            return VecDeque::new();
        }
        self.forgotten += 1;
        if self.forgotten.saturating_mul(2) < self.list.len() {
            return VecDeque::new();
        }
        self.forgotten = 0;
        let (gone, kept) = core::mem::take(&mut self.list).into_iter().partition(|i| i.removed.load(Ordering::SeqCst));
        self.list = kept;
        gone
    }
}

/// A description is watched once under each number it was added by.
type Key = (i32, usize);

#[derive(Clone, Copy)]
struct Interest {
    events: u32,
    data: u64,
}

struct Item {
    this: Weak<Item>,
    epoll: Weak<Epoll>,
    key: Key,
    file: Weak<File>,
    interest: Mutex<Interest>,
    /// In the ready list; changed under its lock.
    queued: AtomicBool,
    registration: Mutex<Option<Registration>>,
    removed: AtomicBool,
    /// Until it is removed.
    charge: Mutex<Option<Charge>>,
}

impl Item {
    fn interest(&self) -> Interest {
        *self.interest.lock()
    }

    /// What of the interest is true now; arms the object's readiness if nothing is.
    fn look(file: &File, caller: Option<&dyn Caller>, events: u32) -> u32 {
        let poll = || caller.map_or_else(|| file.ops().poll(file), |c| file.ops().poll_as(file, c));
        let mask = Events::from_bits_retain(events & !PRIVATE);
        let got = poll() & mask;
        if !got.is_empty() {
            return got.bits();
        }
        file.ops().arm(mask);
        (poll() & mask).bits()
    }

    /// (Re)joins the object's wait queue for the current interest.
    fn observe(self: &Arc<Self>, queue: &Arc<WaitQueue>) {
        let events = self.interest().events;
        let mask = Events::from_bits_retain(events & !PRIVATE);
        let new = if events & EXCLUSIVE == 0 {
            queue.observe(mask, self.clone())
        } else {
            queue.observe_exclusive(mask, self.clone())
        };
        let old = self.registration.lock().replace(new);
        drop(old);
        if self.removed.load(Ordering::SeqCst) {
            self.retire();
        }
    }

    /// Leaves the object's wait queue for good.
    fn retire(&self) {
        self.removed.store(true, Ordering::SeqCst);
        let old = self.registration.lock().take();
        drop(old);
    }
}

impl Observer for Item {
    fn notify(&self, events: Events) -> bool {
        // After EPOLLONESHOT has reported, no event bit is left until EPOLL_CTL_MOD.
        if events.bits() & self.interest().events & !PRIVATE == 0 {
            return false;
        }
        match (self.epoll.upgrade(), self.this.upgrade()) {
            (Some(epoll), Some(item)) => epoll.enqueue(&item),
            _ => false,
        }
    }
}

impl CloseWatcher for Item {
    fn closed(&self) {
        self.retire();
        if let Some(epoll) = self.epoll.upgrade() {
            epoll.forget(self.key);
        }
    }
}

/// An epoll instance.
pub struct Epoll {
    this: Weak<Epoll>,
    all: Arc<Instances>,
    /// Where items are charged.
    account: Charge,
    items: Mutex<HashMap<Key, Arc<Item>>>,
    ready: Mutex<Ready>,
    queue: Arc<WaitQueue>,
    /// Instances that watch this one; changed with `Instances::nesting` held or by removal.
    parents: Mutex<Vec<Weak<Epoll>>>,
    inode: AnonInode,
}

fn key(fd: i32, file: &Arc<File>) -> Key {
    (fd, Arc::as_ptr(file) as usize)
}

impl Epoll {
    /// A description of a new instance.
    pub fn open(task: &Task) -> Arc<File> {
        let inode = AnonInode::new(task, DEV_ANON, 0o600);
        let epoll = Arc::new_cyclic(|this| Epoll {
            this: this.clone(),
            all: task.kernel().epolls.clone(),
            account: Charge::empty(&task.kernel().platform, KernelMemory::Slab),
            items: Mutex::new(Rank::Epoll, HashMap::new()),
            ready: Mutex::new(Rank::EpollReady, Ready::default()),
            queue: WaitQueue::new(),
            parents: Mutex::new(Rank::Leaf, Vec::new()),
            inode,
        });
        File::new(epoll, None, OpenFlags::RDWR)
    }

    /// Says that `item` may be ready; whether one of those who wait was woken.
    fn enqueue(&self, item: &Arc<Item>) -> bool {
        let mut ready = self.ready.lock();
        if item.removed.load(Ordering::SeqCst) {
            return false;
        }
        ready.push(item);
        drop(ready);
        self.queue.wake_up_to(Events::READABLE, 1) > 0
    }

    fn dequeue(&self) -> Option<Arc<Item>> {
        self.ready.lock().pop()
    }

    fn forget(&self, key: Key) -> Option<Arc<Item>> {
        let item = self.items.lock().remove(&key)?;
        self.all.watches.fetch_sub(1, Ordering::Relaxed);
        let gone = {
            let mut ready = self.ready.lock();
            item.removed.store(true, Ordering::SeqCst);
            ready.forget(&item)
        };
        drop(gone);
        let charge = item.charge.lock().take();
        drop(charge);
        if let Some(file) = item.file.upgrade()
            && let Some(child) = file.downcast::<Epoll>()
        {
            child.forget_parent(self);
        }
        Some(item)
    }

    /// EPOLL_CTL_ADD. EEXIST; EPERM for an object that is always ready; ELOOP for instances that would watch each other in a
    /// circle or too deep; ENOSPC; ENOMEM.
    pub fn add(&self, caller: &dyn Caller, fd: i32, file: &Arc<File>, events: u32, data: u64) -> Result<()> {
        let queue = file.ops().wait_queue_as(caller).ok_or(Errno::EPERM)?;
        let nested = file.downcast::<Epoll>();
        if events & EXCLUSIVE != 0 {
            let allowed = Events::IN.bits() | Events::OUT.bits() | ALWAYS | WAKEUP | EDGE | EXCLUSIVE;
            if events & !allowed != 0 || nested.is_some() {
                return Err(Errno::EINVAL);
            }
        }
        let nesting = nested.map(|other| (self.all.nesting.lock(), other));
        if let Some((_, other)) = &nesting {
            if core::ptr::eq(*other, self) {
                return Err(Errno::EINVAL);
            }
            let mut seen = HashMap::new();
            if self.height(0) + other.depth(self, &mut seen, 0)? > MAX_NESTS {
                return Err(Errno::ELOOP);
            }
        }
        if self.all.watches.load(Ordering::Relaxed) >= MAX_WATCHES {
            return Err(Errno::ENOSPC);
        }
        let charge = self.account.another(ITEM_COST)?;
        if let Some((_, other)) = &nesting {
            other.parents.lock().push(self.this.clone());
            if !other.few_paths(&mut HashSet::new()) {
                other.forget_parent(self);
                return Err(Errno::EINVAL);
            }
        }
        let item = Arc::new_cyclic(|this| Item {
            this: this.clone(),
            epoll: self.this.clone(),
            key: key(fd, file),
            file: Arc::downgrade(file),
            interest: Mutex::new(Rank::Leaf, Interest { events: (events & !WAKEUP) | ALWAYS, data }),
            queued: AtomicBool::new(false),
            registration: Mutex::new(Rank::Leaf, None),
            removed: AtomicBool::new(false),
            charge: Mutex::new(Rank::Leaf, Some(charge)),
        });
        {
            let mut items = self.items.lock();
            if items.contains_key(&item.key) {
                drop(items);
                if let Some((_, other)) = &nesting {
                    other.forget_parent(self);
                }
                return Err(Errno::EEXIST);
            }
            items.insert(item.key, item.clone());
            self.all.watches.fetch_add(1, Ordering::Relaxed);
        }
        drop(nesting);
        let watcher: Weak<dyn CloseWatcher> = item.this.clone();
        file.watch_close(watcher);
        item.observe(&queue);
        if Item::look(file, Some(caller), item.interest().events) != 0 {
            self.enqueue(&item);
        }
        Ok(())
    }

    /// EPOLL_CTL_MOD. ENOENT; EINVAL where EPOLLEXCLUSIVE is involved.
    pub fn modify(&self, caller: &dyn Caller, fd: i32, file: &Arc<File>, events: u32, data: u64) -> Result<()> {
        let found = self.items.lock().get(&key(fd, file)).cloned();
        let item = found.ok_or(Errno::ENOENT)?;
        if events & EXCLUSIVE != 0 || item.interest().events & EXCLUSIVE != 0 {
            return Err(Errno::EINVAL);
        }
        *item.interest.lock() = Interest { events: (events & !WAKEUP) | ALWAYS, data };
        if let Some(queue) = file.ops().wait_queue_as(caller) {
            item.observe(&queue);
        }
        if Item::look(file, Some(caller), item.interest().events) != 0 {
            self.enqueue(&item);
        }
        Ok(())
    }

    /// EPOLL_CTL_DEL. ENOENT.
    pub fn remove(&self, fd: i32, file: &Arc<File>) -> Result<()> {
        let item = self.forget(key(fd, file)).ok_or(Errno::ENOENT)?;
        item.retire();
        Ok(())
    }

    /// Takes up to `max` (events, data) of what is ready now.
    pub fn collect(&self, caller: &dyn Caller, max: usize) -> Vec<(u32, u64)> {
        let mut out = Vec::new();
        let bound = self.ready.lock().list.len();
        for _ in 0..bound {
            if out.len() >= max {
                break;
            }
            let Some(item) = self.dequeue() else { break };
            let Some(file) = item.file.upgrade() else { continue };
            if item.removed.load(Ordering::SeqCst) {
                continue;
            }
            let Interest { events, data } = item.interest();
            if events & !PRIVATE == 0 {
                continue;
            }
            let got = Item::look(&file, Some(caller), events);
            if got == 0 {
                continue;
            }
            out.push((got, data));
            if events & ONESHOT != 0 {
                item.interest.lock().events &= PRIVATE;
            } else if events & EDGE == 0 {
                self.ready.lock().push(&item);
            }
        }
        out
    }

    /// Wakes the next waiter if something is still ready: a waiter that took some events calls this when it is done.
    pub fn pass_on(&self) {
        if self.queue.is_occupied() && !self.ready.lock().list.is_empty() {
            self.queue.wake_up_to(Events::READABLE, 1);
        }
    }

    /// Where waiters wait.
    pub fn queue(&self) -> &Arc<WaitQueue> {
        &self.queue
    }

    /// Levels of instances that watch this one, directly or through others: a wake climbs all of them.
    fn height(&self, level: usize) -> usize {
        if level > MAX_NESTS {
            return level;
        }
        let parents: Vec<Arc<Epoll>> = self.parents.lock().iter().filter_map(Weak::upgrade).collect();
        parents.iter().map(|p| 1 + p.height(level + 1)).max().unwrap_or(0)
    }

    /// Whether a wake of this instance, and of each below it, climbs a bounded number of paths (Linux's reverse_path_check).
    fn few_paths(&self, seen: &mut HashSet<usize>) -> bool {
        if !seen.insert(core::ptr::from_ref(self) as usize) {
            return true;
        }
        let mut left = MAX_PATHS;
        if !self.climb(&mut left) {
            return false;
        }
        let watched: Vec<Arc<File>> = self.items.lock().values().filter_map(|i| i.file.upgrade()).collect();
        watched.iter().filter_map(|f| f.downcast::<Epoll>()).all(|below| below.few_paths(seen))
    }

    /// Counts paths upwards; false once none is left of the allowance.
    fn climb(&self, left: &mut usize) -> bool {
        let parents: Vec<Arc<Epoll>> = self.parents.lock().iter().filter_map(Weak::upgrade).collect();
        parents.iter().all(|parent| {
            *left = left.saturating_sub(1);
            *left > 0 && parent.climb(left)
        })
    }

    fn forget_parent(&self, parent: &Epoll) {
        let mut parents = self.parents.lock();
        if let Some(i) = parents.iter().position(|p| core::ptr::eq(p.as_ptr(), parent)) {
            parents.swap_remove(i);
        }
        parents.retain(|p| p.strong_count() > 0);
    }

    /// Whether something is ready for `caller`, or for those who made the objects.
    fn readiness(&self, caller: Option<&dyn Caller>) -> Events {
        let bound = self.ready.lock().list.len();
        for _ in 0..bound {
            let Some(item) = self.dequeue() else { break };
            let Some(file) = item.file.upgrade() else { continue };
            let events = item.interest().events;
            if events & !PRIVATE != 0 && Item::look(&file, caller, events) != 0 {
                let mut ready = self.ready.lock();
                if !item.queued.swap(true, Ordering::Relaxed) {
                    ready.list.push_front(item.clone());
                }
                return Events::READABLE;
            }
        }
        Events::empty()
    }

    /// Levels of instances below and including this one. ELOOP if `target` is among them.
    fn depth(&self, target: &Epoll, seen: &mut HashMap<usize, usize>, level: usize) -> Result<usize> {
        if core::ptr::eq(self, target) || level > MAX_NESTS {
            return Err(Errno::ELOOP);
        }
        let me = core::ptr::from_ref(self) as usize;
        if let Some(&known) = seen.get(&me) {
            return Ok(known);
        }
        let watched: Vec<Arc<File>> = self.items.lock().values().filter_map(|i| i.file.upgrade()).collect();
        let mut deepest = 0;
        for file in &watched {
            if let Some(other) = file.downcast::<Epoll>() {
                deepest = deepest.max(other.depth(target, seen, level + 1)?);
            }
        }
        seen.insert(me, deepest + 1);
        Ok(deepest + 1)
    }
}

impl FileOps for Epoll {
    fn poll(&self, _file: &File) -> Events {
        self.readiness(None)
    }

    fn poll_as(&self, _file: &File, caller: &dyn Caller) -> Events {
        self.readiness(Some(caller))
    }

    fn wait_queue(&self) -> Option<Arc<WaitQueue>> {
        Some(self.queue.clone())
    }

    fn stat(&self) -> Option<Result<Stat>> {
        Some(Ok(self.inode.stat()))
    }

    fn release(&self, _file: &File) {
        let items = core::mem::take(&mut *self.items.lock());
        self.all.watches.fetch_sub(items.len(), Ordering::Relaxed);
        for item in items.values() {
            item.retire();
        }
        let ready = core::mem::take(&mut *self.ready.lock());
        drop(ready);
    }

    fn proc_name(&self) -> Vec<u8> {
        b"anon_inode:[eventpoll]".to_vec()
    }

    fn fdinfo(&self) -> Vec<u8> {
        let items: Vec<Arc<Item>> = self.items.lock().values().cloned().collect();
        let mut text = String::new();
        for item in items {
            let Interest { events, data } = item.interest();
            let _ = writeln!(text, "tfd: {:8} events: {events:8x} data: {data:16x}", item.key.0);
        }
        text.into_bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
