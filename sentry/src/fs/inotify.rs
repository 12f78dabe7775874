//! inotify(7): queues of events about files and directories. Owns the events and the watches of one instance.
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use guest_abi::types::Stat;
use linux_raw_sys::general as raw;
use linux_raw_sys::ioctl::FIONREAD;

use super::anon::{AnonInode, DEV_ANON, put_user};
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::mm::{Charge, IoDest};
use crate::platform::KernelMemory;
use crate::task::Task;
use crate::vfs::file::Caller;
use crate::vfs::notify::{self, Watch};
use crate::vfs::{Dentry, File, FileOps, OpenFlags};
use crate::{Errno, Result};

/// fs.inotify.max_queued_events.
pub const MAX_QUEUED_EVENTS: usize = 16_384;
/// fs.inotify.max_user_instances, here of the whole sandbox.
pub const MAX_INSTANCES: usize = 128;
/// fs.inotify.max_user_watches, here of the whole sandbox.
pub const MAX_WATCHES: usize = 65_536;

/// Bytes of a watch with its places, and of a queued event beside its name.
const WATCH_COST: usize = 512;
const EVENT_COST: usize = 64;

/// What all instances of a sandbox share.
#[derive(Default)]
pub struct Instances {
    instances: AtomicUsize,
    watches: AtomicUsize,
}

/// Takes one of `max`.
fn take(counter: &AtomicUsize, max: usize) -> bool {
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < max).then_some(n + 1)).is_ok()
}

/// Bits that choose events or change how (everything else of a mask is ignored).
const OPTIONS: u32 = raw::IN_EXCL_UNLINK | raw::IN_ONESHOT;

#[derive(PartialEq, Eq)]
struct Queued {
    wd: i32,
    mask: u32,
    cookie: u32,
    name: Vec<u8>,
}

impl Queued {
    /// Bytes as read(2) gives it: the name is padded with NULs to a multiple of the header.
    fn len(&self) -> usize {
        16 + if self.name.is_empty() { 0 } else { (self.name.len() + 1).next_multiple_of(16) }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let end = out.len() + self.len();
        let name_len = u32::try_from(self.len() - 16).unwrap_or(0);
        out.extend_from_slice(&self.wd.to_le_bytes());
        for word in [self.mask, self.cookie, name_len] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&self.name);
        out.resize(end, 0);
    }
}

struct State {
    queue: VecDeque<Queued>,
    /// For the queue.
    charge: Charge,
    watches: HashMap<i32, Arc<InotifyWatch>>,
    /// Watch descriptors by the identity of the inode, which the watch's dentry keeps.
    by_inode: HashMap<usize, i32>,
    next: i32,
}

/// An instance.
pub struct Inotify {
    all: Arc<Instances>,
    state: Mutex<State>,
    waiters: Arc<WaitQueue>,
    inode: AnonInode,
    own: Weak<Inotify>,
}

struct InotifyWatch {
    owner: Weak<Inotify>,
    wd: i32,
    mask: AtomicU32,
    dentry: Arc<Dentry>,
    all: Arc<Instances>,
    _charge: Charge,
}

impl Drop for InotifyWatch {
    fn drop(&mut self) {
        self.all.watches.fetch_sub(1, Ordering::Relaxed);
    }
}

fn inode_key(dentry: &Dentry) -> usize {
    Arc::as_ptr(dentry.inode()).addr()
}

impl Watch for InotifyWatch {
    fn event(&self, event: &notify::Event<'_>) {
        let mask = self.mask.load(Ordering::Relaxed);
        let happened = event.mask & mask & raw::IN_ALL_EVENTS;
        let ends = event.mask & raw::IN_DELETE_SELF != 0;
        let Some(owner) = self.owner.upgrade() else { return };
        if happened != 0 && !(event.unlinked && mask & raw::IN_EXCL_UNLINK != 0) {
            // A directory's own end is told without the mark of a directory (inotify(7)).
            let dir = if ends { 0 } else { event.mask & raw::IN_ISDIR };
            owner.push(Queued {
                wd: self.wd,
                mask: happened | dir,
                cookie: event.cookie,
                name: event.name.unwrap_or_default().to_vec(),
            });
            if mask & raw::IN_ONESHOT != 0 {
                let _ = owner.remove(self.wd);
            }
        }
        if ends {
            let _ = owner.remove(self.wd);
        }
    }
}

impl Inotify {
    /// A description of a new instance. EMFILE.
    pub fn open(task: &Task, nonblocking: bool) -> Result<Arc<File>> {
        let all = task.kernel().inotifies.clone();
        if !take(&all.instances, MAX_INSTANCES) {
            return Err(Errno::EMFILE);
        }
        let state = State {
            queue: VecDeque::new(),
            charge: Charge::empty(&task.kernel().platform, KernelMemory::Slab),
            watches: HashMap::new(),
            by_inode: HashMap::new(),
            next: 1,
        };
        let ops = Arc::new_cyclic(|own| Inotify {
            all,
            state: Mutex::new(Rank::Leaf, state),
            waiters: WaitQueue::new(),
            inode: AnonInode::new(task, DEV_ANON, 0o600),
            own: own.clone(),
        });
        let flags = if nonblocking { OpenFlags::NONBLOCK } else { OpenFlags::empty() };
        Ok(File::new(ops, None, flags))
    }

    /// inotify_add_watch(2): the watch descriptor. EEXIST, ENOSPC.
    pub fn add(&self, dentry: &Arc<Dentry>, mask: u32) -> Result<i32> {
        let wanted = mask & (raw::IN_ALL_EVENTS | OPTIONS);
        let mut state = self.state.lock_nested();
        let old = state.by_inode.get(&inode_key(dentry)).and_then(|wd| state.watches.get(wd)).cloned();
        if let Some(old) = old {
            if mask & raw::IN_MASK_CREATE != 0 {
                return Err(Errno::EEXIST);
            }
            if mask & raw::IN_MASK_ADD != 0 {
                old.mask.fetch_or(wanted, Ordering::Relaxed);
            } else {
                old.mask.store(wanted, Ordering::Relaxed);
            }
            return Ok(old.wd);
        }
        let wd = state.next;
        let next = wd.checked_add(1).ok_or(Errno::ENOSPC)?;
        let charge = state.charge.another(WATCH_COST)?;
        if !take(&self.all.watches, MAX_WATCHES) {
            return Err(Errno::ENOSPC);
        }
        let owner = self.own.clone();
        let watch = Arc::new(InotifyWatch {
            owner,
            wd,
            mask: AtomicU32::new(wanted),
            dentry: dentry.clone(),
            all: self.all.clone(),
            _charge: charge,
        });
        state.next = next;
        state.by_inode.insert(inode_key(dentry), wd);
        state.watches.insert(wd, watch.clone());
        drop(state);
        notify::add(dentry, watch);
        Ok(wd)
    }

    /// inotify_rm_watch(2). EINVAL.
    pub fn remove(&self, wd: i32) -> Result<()> {
        let watch = {
            let mut state = self.state.lock_nested();
            let watch = state.watches.remove(&wd).ok_or(Errno::EINVAL)?;
            state.by_inode.remove(&inode_key(&watch.dentry));
            watch
        };
        detach(&watch);
        self.push(Queued { wd, mask: raw::IN_IGNORED, cookie: 0, name: Vec::new() });
        Ok(())
    }

    fn push(&self, event: Queued) {
        {
            let mut state = self.state.lock_nested();
            if state.queue.back() == Some(&event) {
                return;
            }
            // Without memory the queue is as good as full; what tells of that takes none.
            if state.queue.len() >= MAX_QUEUED_EVENTS || state.charge.add(EVENT_COST + event.len()).is_err() {
                if state.queue.back().is_some_and(|e| e.mask == raw::IN_Q_OVERFLOW) {
                    return;
                }
                state.queue.push_back(Queued { wd: -1, mask: raw::IN_Q_OVERFLOW, cookie: 0, name: Vec::new() });
            } else {
                state.queue.push_back(event);
            }
        }
        self.waiters.wake(Events::READABLE);
    }
}

fn detach(watch: &Arc<InotifyWatch>) {
    let shared: Arc<dyn Watch> = watch.clone();
    notify::remove(&watch.dentry, &shared);
}

impl Drop for Inotify {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let watches = std::mem::take(&mut state.watches);
        for watch in watches.values() {
            detach(watch);
        }
        self.all.instances.fetch_sub(1, Ordering::Relaxed);
    }
}

impl FileOps for Inotify {
    fn read(&self, _file: &File, dst: &mut IoDest<'_>, _pos: u64) -> Result<usize> {
        let mut out = Vec::new();
        {
            let mut state = self.state.lock_nested();
            let Some(first) = state.queue.front() else { return Err(Errno::EAGAIN) };
            if first.len() > dst.remaining() {
                return Err(Errno::EINVAL);
            }
            while let Some(event) = state.queue.front() {
                if out.len() + event.len() > dst.remaining() {
                    break;
                }
                event.encode(&mut out);
                let bytes = EVENT_COST + event.len();
                // The mark of an overflow was never charged.
                if event.mask != raw::IN_Q_OVERFLOW {
                    state.charge.sub(bytes);
                }
                state.queue.pop_front();
            }
        }
        dst.put(&out)
    }

    fn poll(&self, _file: &File) -> Events {
        if self.state.lock_nested().queue.is_empty() { Events::empty() } else { Events::READABLE }
    }

    fn wait_queue(&self) -> Option<Arc<WaitQueue>> {
        Some(self.waiters.clone())
    }

    fn ioctl(&self, _file: &File, caller: &dyn Caller, request: u32, arg: u64) -> Result<u64> {
        match request {
            FIONREAD => {
                let bytes: usize = self.state.lock_nested().queue.iter().map(Queued::len).sum();
                put_user(caller, arg, &i32::try_from(bytes).unwrap_or(i32::MAX))
            }
            _ => Err(Errno::ENOTTY),
        }
    }

    fn stat(&self) -> Option<Result<Stat>> {
        Some(Ok(self.inode.stat()))
    }

    fn proc_name(&self) -> Vec<u8> {
        b"anon_inode:inotify".to_vec()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
