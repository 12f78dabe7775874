//! System V message queues (msgsnd(2), msgrcv(2), msgctl(2)): the queues of one IPC namespace. Owns messages, limits and counts; never a
//! task, nor how one waits.
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::ipc_ids::{Actor, Ids, MOST, Perm};
use super::user::Caps;
use crate::event::WaitQueue;
use crate::lock::{Mutex, Rank};
use crate::mm::Charge;
use crate::platform::{KernelMemory, Platform};
use crate::{Errno, Result};

/// Bytes of a queue, and of a message besides its text.
const QUEUE_COST: usize = 1024;
const MESSAGE_COST: usize = 128;

/// Limits of a namespace (/proc/sys/kernel/msg*).
pub struct Limits {
    /// Bytes of a message.
    pub max: AtomicU32,
    /// Bytes of a new queue.
    pub bytes: AtomicU32,
    /// Queues.
    pub queues: AtomicU32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { max: AtomicU32::new(8192), bytes: AtomicU32::new(16384), queues: AtomicU32::new(MOST) }
    }
}

/// A message.
pub struct Message {
    /// Above 0.
    pub kind: i64,
    /// The text.
    pub text: Box<[u8]>,
    _charge: Charge,
}

impl Message {
    /// ENOMEM.
    pub fn new(platform: &Arc<dyn Platform>, kind: i64, text: Vec<u8>) -> Result<Message> {
        let charge = Charge::new(platform, KernelMemory::Buffer, MESSAGE_COST + text.len())?;
        Ok(Message { kind, text: text.into_boxed_slice(), _charge: charge })
    }
}

/// Which message msgrcv(2) wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The first.
    Any,
    /// The first of this type.
    Kind(i64),
    /// The first of another.
    Not(i64),
    /// The first of the lowest type that is no higher.
    UpTo(i64),
}

impl Wanted {
    /// What msgtyp and MSG_EXCEPT say.
    pub fn new(kind: i64, except: bool) -> Wanted {
        match kind {
            0 => Wanted::Any,
            k if k < 0 => Wanted::UpTo(k.checked_neg().unwrap_or(i64::MAX)),
            k if except => Wanted::Not(k),
            k => Wanted::Kind(k),
        }
    }

    fn find(self, messages: &VecDeque<Message>) -> Option<usize> {
        match self {
            Wanted::Any => (!messages.is_empty()).then_some(0),
            Wanted::Kind(k) => messages.iter().position(|m| m.kind == k),
            Wanted::Not(k) => messages.iter().position(|m| m.kind != k),
            Wanted::UpTo(k) => {
                let lowest = messages.iter().map(|m| m.kind).filter(|&m| m <= k).min()?;
                messages.iter().position(|m| m.kind == lowest)
            }
        }
    }
}

/// A queue as it is.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct MsgStat {
    pub perm: Perm,
    pub stime: i64,
    pub rtime: i64,
    pub ctime: i64,
    pub bytes: u64,
    pub count: u64,
    pub most: u64,
    pub lspid: i32,
    pub lrpid: i32,
}

struct Inner {
    stat: MsgStat,
    removed: bool,
    messages: VecDeque<Message>,
    _charge: Charge,
}

/// A queue.
pub struct MsgQueue {
    inner: Mutex<Inner>,
    /// Fires IN when a message comes, OUT when there is room, both when the queue goes.
    pub events: Arc<WaitQueue>,
}

impl MsgQueue {
    /// Puts `message` in; gives it back where there is no room. EIDRM, EACCES.
    pub fn send(&self, message: Message, by: &Actor<'_>) -> Result<Option<Message>> {
        let mut inner = self.inner.lock();
        if inner.removed {
            return Err(Errno::EIDRM);
        }
        inner.stat.perm.permits(by, 0o222)?;
        let size = message.text.len() as u64;
        if inner.stat.bytes + size > inner.stat.most || inner.stat.count + 1 > inner.stat.most {
            return Ok(Some(message));
        }
        inner.stat.bytes += size;
        inner.stat.count += 1;
        inner.stat.lspid = by.pid;
        inner.stat.stime = by.now;
        inner.messages.push_back(message);
        Ok(None)
    }

    /// Takes a message of at most `room` bytes out; None if there is none. EIDRM, EACCES; E2BIG for a larger one unless it may be `cut`.
    pub fn receive(&self, wanted: Wanted, room: usize, cut: bool, by: &Actor<'_>) -> Result<Option<Message>> {
        let mut inner = self.inner.lock();
        if inner.removed {
            return Err(Errno::EIDRM);
        }
        inner.stat.perm.permits(by, 0o444)?;
        let Some(at) = wanted.find(&inner.messages) else { return Ok(None) };
        if !cut && inner.messages.get(at).is_some_and(|m| m.text.len() > room) {
            return Err(Errno::E2BIG);
        }
        let Some(message) = inner.messages.remove(at) else { return Ok(None) };
        inner.stat.bytes -= message.text.len() as u64;
        inner.stat.count -= 1;
        inner.stat.lrpid = by.pid;
        inner.stat.rtime = by.now;
        Ok(Some(message))
    }

    /// A copy of the message at `position`, which stays (MSG_COPY). ENOMSG, and as [`MsgQueue::receive`].
    pub fn copy(&self, position: i64, room: usize, cut: bool, by: &Actor<'_>) -> Result<(i64, Vec<u8>)> {
        let inner = self.inner.lock();
        if inner.removed {
            return Err(Errno::EIDRM);
        }
        inner.stat.perm.permits(by, 0o444)?;
        let message = usize::try_from(position).ok().and_then(|at| inner.messages.get(at)).ok_or(Errno::ENOMSG)?;
        if !cut && message.text.len() > room {
            return Err(Errno::E2BIG);
        }
        Ok((message.kind, message.text.iter().copied().take(room).collect()))
    }

    /// IPC_STAT and MSG_STAT; `any` asks for no permission.
    pub fn stat(&self, any: bool, by: &Actor<'_>) -> Result<MsgStat> {
        let inner = self.inner.lock();
        if !any {
            inner.stat.perm.permits(by, 0o444)?;
        }
        Ok(inner.stat)
    }

    /// IPC_SET. EPERM also for more bytes than the namespace's limit without CAP_SYS_RESOURCE.
    pub fn set(&self, owner: Option<(u32, u32)>, mode: u32, most: u64, limits: &Limits, by: &Actor<'_>) -> Result<()> {
        let mut inner = self.inner.lock();
        inner.stat.perm.changeable(by)?;
        if most > u64::from(limits.bytes.load(Ordering::Relaxed)) && !by.credentials.has(Caps::SYS_RESOURCE) {
            return Err(Errno::EPERM);
        }
        let (uid, gid) = owner.ok_or(Errno::EINVAL)?;
        inner.stat.perm.set(uid, gid, mode);
        inner.stat.most = most;
        inner.stat.ctime = by.now;
        Ok(())
    }
}

/// The queues of a namespace.
pub struct MsgQueues {
    ids: Mutex<Ids<MsgQueue>>,
    /// Limits.
    pub limits: Limits,
}

impl Default for MsgQueues {
    fn default() -> Self {
        MsgQueues { ids: Mutex::new(Rank::Leaf, Ids::default()), limits: Limits::default() }
    }
}

impl MsgQueues {
    /// msgget(2).
    pub fn get(&self, platform: &Arc<dyn Platform>, key: i32, flags: u32, by: &Actor<'_>) -> Result<i32> {
        loop {
            let found = self.ids.lock().look_up(key, flags)?;
            if let Some(queue) = found {
                let inner = queue.inner.lock();
                inner.stat.perm.permits(by, flags & 0o777)?;
                return Ok(inner.stat.perm.id);
            }
            let charge = Charge::new(platform, KernelMemory::Slab, QUEUE_COST)?;
            let mut ids = self.ids.lock();
            if ids.look_up(key, flags)?.is_some() {
                // Somebody was faster.
                continue;
            }
            let most = self.limits.queues.load(Ordering::Relaxed).min(MOST);
            return ids.insert(key, most, |id| MsgQueue {
                events: WaitQueue::new(),
                inner: Mutex::new(
                    Rank::Leaf,
                    Inner {
                        stat: MsgStat {
                            perm: Perm::new(key, id, flags, by),
                            stime: 0,
                            rtime: 0,
                            ctime: by.now,
                            bytes: 0,
                            count: 0,
                            most: self.limits.bytes.load(Ordering::Relaxed).into(),
                            lspid: 0,
                            lrpid: 0,
                        },
                        removed: false,
                        messages: VecDeque::new(),
                        _charge: charge,
                    },
                ),
            });
        }
    }

    /// A queue. EINVAL.
    pub fn find(&self, id: i32) -> Result<Arc<MsgQueue>> {
        self.ids.lock().find(id)
    }

    /// The queue at an index. EINVAL.
    pub fn at(&self, index: i32) -> Result<Arc<MsgQueue>> {
        self.ids.lock().at(index)
    }

    /// IPC_RMID: its messages are lost, and whoever waits gets EIDRM.
    pub fn remove(&self, id: i32, by: &Actor<'_>) -> Result<()> {
        let queue = self.find(id)?;
        let lost = {
            let mut inner = queue.inner.lock();
            if inner.removed {
                return Err(Errno::EIDRM);
            }
            inner.stat.perm.changeable(by)?;
            inner.removed = true;
            core::mem::take(&mut inner.messages)
        };
        let old = self.ids.lock().remove(id);
        queue.events.wake(crate::event::Events::all());
        drop((lost, old));
        Ok(())
    }

    /// Queues, and the highest index.
    pub fn totals(&self) -> (usize, u32) {
        let ids = self.ids.lock();
        (ids.count(), ids.highest())
    }

    /// All queues as they are (/proc/sysvipc/msg).
    pub fn all(&self) -> Vec<MsgStat> {
        let queues = self.ids.lock().all();
        queues.iter().map(|q| q.inner.lock().stat).collect()
    }

    /// Messages and bytes in all queues (MSG_INFO).
    pub fn contents(&self) -> (u64, u64) {
        self.all().iter().fold((0, 0), |(n, bytes), s| (n + s.count, bytes + s.bytes))
    }
}
