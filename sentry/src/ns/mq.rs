//! POSIX message queues (mq_overview(7)): the queues of one IPC namespace by name, their messages and limits. Owns order and counts; never
//! a task: who is to be told of a message is a [`Notified`].
use std::any::Any;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::user::{Caps, Credentials};
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::mm::Charge;
use crate::platform::{KernelMemory, Platform};
use crate::{Errno, Result};

/// Priorities are below it (MQ_PRIO_MAX).
pub const PRIO_MAX: u32 = 32_768;
/// What CAP_SYS_RESOURCE may have: messages, and bytes of one.
const HARD_MESSAGES: u64 = 65_536;
const HARD_SIZE: u64 = 16 << 20;

/// Bytes of a queue, and of a message besides its text; the latter counts for RLIMIT_MSGQUEUE, too.
const QUEUE_COST: usize = 1024;
const MESSAGE_COST: u64 = 128;

/// Limits of a namespace (/proc/sys/fs/mqueue).
pub struct Limits {
    /// Queues.
    pub queues: AtomicU32,
    /// Messages of a queue.
    pub messages: AtomicU32,
    /// Bytes of a message.
    pub size: AtomicU32,
    /// Messages of a queue whose maker says nothing.
    pub messages_default: AtomicU32,
    /// Bytes of a message of such a queue.
    pub size_default: AtomicU32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            queues: AtomicU32::new(256),
            messages: AtomicU32::new(10),
            size: AtomicU32::new(8192),
            messages_default: AtomicU32::new(10),
            size_default: AtomicU32::new(8192),
        }
    }
}

/// Who is told once when a message comes to an empty queue (mq_notify(3)).
pub trait Notified: Send + Sync {
    /// A message came, sent by the task `sender`.
    fn arrived(&self, sender: &dyn Any);
    /// The registration is over without a message.
    fn removed(&self);
    /// Whether it is of `group`, a `task::ThreadGroup`.
    fn is_of(&self, group: &dyn Any) -> bool;
    /// Whether its process still is.
    fn is_alive(&self) -> bool;
    /// sigev_notify, the signal, and the process's number for a reader, a `task::PidNamespace`.
    fn shown(&self, reader: &dyn Any) -> (i32, i32, i32);
}

struct Message {
    text: Box<[u8]>,
    _charge: Charge,
}

struct Inner {
    mode: u32,
    uid: u32,
    gid: u32,
    times: [i64; 3],
    /// By priority.
    messages: BTreeMap<u32, VecDeque<Message>>,
    count: usize,
    bytes: usize,
    /// Tasks that wait for a message: they get it, and nobody is told.
    receivers: usize,
    notified: Option<Arc<dyn Notified>>,
    account: Charge,
}

/// A queue.
pub struct MqQueue {
    /// st_ino.
    pub ino: u64,
    /// Most messages.
    pub messages: usize,
    /// Most bytes of one.
    pub size: usize,
    inner: Mutex<Inner>,
    /// Fires IN when a message comes, OUT when there is room.
    pub events: Arc<WaitQueue>,
    user: u32,
    promised: u64,
    users: Arc<Mutex<HashMap<u32, u64>>>,
}

impl Drop for MqQueue {
    fn drop(&mut self) {
        let mut users = self.users.lock();
        if let Some(sum) = users.get_mut(&self.user) {
            *sum = sum.saturating_sub(self.promised);
            if *sum == 0 {
                users.remove(&self.user);
            }
        }
    }
}

impl MqQueue {
    /// Mode, owner, group.
    pub fn access_attr(&self) -> (u32, u32, u32) {
        let inner = self.inner.lock();
        (inner.mode, inner.uid, inner.gid)
    }

    /// Changes mode or owner.
    pub fn set_attr(&self, mode: Option<u32>, uid: Option<u32>, gid: Option<u32>) {
        let mut inner = self.inner.lock();
        inner.mode = mode.unwrap_or(inner.mode) & 0o7777;
        inner.uid = uid.unwrap_or(inner.uid);
        inner.gid = gid.unwrap_or(inner.gid);
    }

    /// Access, change and status time in seconds.
    pub fn times(&self) -> [i64; 3] {
        self.inner.lock().times
    }

    /// Messages in it.
    pub fn count(&self) -> usize {
        self.inner.lock().count
    }

    /// Bytes in it, and who is to be told.
    pub fn status(&self) -> (usize, Option<Arc<dyn Notified>>) {
        let inner = self.inner.lock();
        (inner.bytes, inner.notified.clone())
    }

    /// Readiness.
    pub fn poll(&self) -> Events {
        let count = self.count();
        let mut events = Events::empty();
        events.set(Events::READABLE, count > 0);
        events.set(Events::WRITABLE, count < self.messages);
        events
    }

    /// Puts a message in. False if it is full. ENOMEM.
    pub fn send(&self, text: &[u8], priority: u32, now: i64, sender: &dyn Any) -> Result<bool> {
        let told = {
            let mut inner = self.inner.lock();
            if inner.count >= self.messages {
                return Ok(false);
            }
            let charge = inner.account.another(text.len() + MESSAGE_COST as usize)?;
            let message = Message { text: text.into(), _charge: charge };
            inner.messages.entry(priority).or_default().push_back(message);
            inner.count += 1;
            inner.bytes += text.len();
            inner.times = [now, now, now];
            if inner.count == 1 && inner.receivers == 0 { inner.notified.take() } else { None }
        };
        self.events.wake(Events::READABLE);
        if let Some(told) = told {
            told.arrived(sender);
        }
        Ok(true)
    }

    /// Takes the oldest message of the highest priority out.
    pub fn receive(&self, now: i64) -> Option<(Box<[u8]>, u32)> {
        let (message, priority) = {
            let mut inner = self.inner.lock();
            let mut last = inner.messages.last_entry()?;
            let priority = *last.key();
            let message = last.get_mut().pop_front();
            if last.get().is_empty() {
                last.remove();
            }
            let message = message?;
            inner.count -= 1;
            inner.bytes -= message.text.len();
            inner.times = [now, now, now];
            (message, priority)
        };
        self.events.wake(Events::WRITABLE);
        Some((message.text, priority))
    }

    /// A task begins or ceases to wait for a message.
    pub fn waits(&self, begins: bool) {
        let mut inner = self.inner.lock();
        inner.receivers = if begins { inner.receivers + 1 } else { inner.receivers.saturating_sub(1) };
    }

    /// Registers. EBUSY while another living process is registered.
    pub fn notify(&self, who: Arc<dyn Notified>) -> Result<()> {
        let there = self.inner.lock().notified.clone();
        // Asked without the lock: the answer takes others.
        if there.as_ref().is_some_and(|n| n.is_alive()) {
            return Err(Errno::EBUSY);
        }
        let mut inner = self.inner.lock();
        let same = match (&inner.notified, &there) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, _) => true,
            (Some(_), None) => false,
        };
        if !same {
            return Err(Errno::EBUSY);
        }
        let old = inner.notified.replace(who);
        drop(inner);
        drop((old, there));
        Ok(())
    }

    /// Ends the registration of `group`, if it is its.
    pub fn forget(&self, group: &dyn Any) {
        let old = {
            let mut inner = self.inner.lock();
            if inner.notified.as_ref().is_some_and(|n| n.is_of(group)) { inner.notified.take() } else { None }
        };
        if let Some(old) = old {
            old.removed();
        }
    }
}

/// What the maker of a queue says.
pub struct NewQueue {
    /// Permission bits.
    pub mode: u32,
    /// Most messages and bytes of one.
    pub attr: Option<(u64, u64)>,
    /// RLIMIT_MSGQUEUE.
    pub limit: u64,
    /// CLOCK_REALTIME in seconds.
    pub now: i64,
}

/// The queues of a namespace.
pub struct MqTable {
    queues: Mutex<BTreeMap<Vec<u8>, Arc<MqQueue>>>,
    /// Limits.
    pub limits: Limits,
    users: Arc<Mutex<HashMap<u32, u64>>>,
    next_ino: AtomicU64,
}

impl Default for MqTable {
    fn default() -> Self {
        MqTable {
            queues: Mutex::new(Rank::Leaf, BTreeMap::new()),
            limits: Limits::default(),
            users: Arc::new(Mutex::new(Rank::Leaf, HashMap::new())),
            next_ino: AtomicU64::new(2),
        }
    }
}

impl MqTable {
    /// The queue of a name.
    pub fn find(&self, name: &[u8]) -> Option<Arc<MqQueue>> {
        self.queues.lock().get(name).cloned()
    }

    /// Takes the name away.
    pub fn remove(&self, name: &[u8]) -> Option<Arc<MqQueue>> {
        self.queues.lock().remove(name)
    }

    /// At most `max` names after `from`, in order.
    pub fn names(&self, from: usize, max: usize) -> Vec<(Vec<u8>, u64)> {
        self.queues.lock().iter().skip(from).take(max).map(|(n, q)| (n.clone(), q.ino)).collect()
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.queues.lock().len()
    }

    /// A new queue; EEXIST if there is one. EINVAL beyond the limits, ENOSPC for too many, EMFILE beyond RLIMIT_MSGQUEUE, ENOMEM.
    pub fn create(
        &self,
        platform: &Arc<dyn Platform>,
        name: &[u8],
        new: &NewQueue,
        by: &Credentials,
    ) -> Result<Arc<MqQueue>> {
        let limit = |l: &AtomicU32| u64::from(l.load(Ordering::Relaxed));
        let able = by.has(Caps::SYS_RESOURCE);
        let l = &self.limits;
        let (messages, size) = match new.attr {
            Some(attr) => attr,
            None => (limit(&l.messages).min(limit(&l.messages_default)), limit(&l.size).min(limit(&l.size_default))),
        };
        let (most, largest) = if able { (HARD_MESSAGES, HARD_SIZE) } else { (limit(&l.messages), limit(&l.size)) };
        if messages == 0 || size == 0 || messages > most || size > largest {
            return Err(Errno::EINVAL);
        }
        let promised = messages.saturating_mul(size.saturating_add(MESSAGE_COST));
        let account = Charge::new(platform, KernelMemory::Slab, QUEUE_COST + name.len())?;
        {
            let mut users = self.users.lock();
            let sum = users.get(&by.euid).copied().unwrap_or(0).saturating_add(promised);
            if sum > new.limit {
                return Err(Errno::EMFILE);
            }
            users.insert(by.euid, sum);
        }
        let queue = Arc::new(MqQueue {
            ino: self.next_ino.fetch_add(1, Ordering::Relaxed),
            messages: usize::try_from(messages).unwrap_or(usize::MAX),
            size: usize::try_from(size).unwrap_or(usize::MAX),
            events: WaitQueue::new(),
            user: by.euid,
            promised,
            users: self.users.clone(),
            inner: Mutex::new(
                Rank::Leaf,
                Inner {
                    mode: new.mode & 0o7777,
                    uid: by.fsuid,
                    gid: by.fsgid,
                    times: [new.now; 3],
                    messages: BTreeMap::new(),
                    count: 0,
                    bytes: 0,
                    receivers: 0,
                    notified: None,
                    account,
                },
            ),
        });
        let mut queues = self.queues.lock();
        let refused = if queues.contains_key(name) {
            Some(Errno::EEXIST)
        } else if queues.len() as u64 >= limit(&l.queues) && !able {
            Some(Errno::ENOSPC)
        } else {
            queues.insert(name.to_vec(), queue.clone());
            None
        };
        drop(queues);
        refused.map_or(Ok(queue), Err)
    }
}
