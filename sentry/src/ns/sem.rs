//! System V semaphores (semop(2), semctl(2)): the sets of one IPC namespace, who waits for them, and what is undone when a process ends.
//! Owns values and the order of waiters; never a task.
//!
//! An operation that must wait is left with the set. Whoever changes a value tries those that wait, oldest first, performs what has
//! become possible on their behalf, and wakes only these.
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use super::ipc_ids::{Actor, IPC_NOWAIT, Ids, MOST, Perm, seconds};
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::mm::Charge;
use crate::platform::{KernelMemory, Platform};
use crate::{Errno, Result};

/// Semaphores of a set at most (semmsl).
pub const SEMMSL: u32 = 32_000;
/// Semaphores of a namespace at most (semmns).
pub const SEMMNS: u32 = MOST * SEMMSL;
/// Operations of one call at most (semopm).
pub const SEMOPM: usize = 500;
/// The highest value (semvmx), and the furthest that can be undone (semaem).
pub const SEMVMX: i32 = 32_767;

/// Take it back at the end of the process.
const SEM_UNDO: u32 = 0x1000;

/// Bytes of a set, of a semaphore in it, and of an operation that waits.
const SET_COST: usize = 1024;
const SEM_COST: usize = 16;
const WAITER_COST: usize = 512;

/// struct sembuf.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct SemOp {
    pub number: u16,
    pub op: i16,
    pub flags: u16,
}

#[derive(Clone, Copy, Default)]
struct Semaphore {
    value: i32,
    pid: i32,
}

/// What a waiting call hears.
pub struct Waiter {
    /// How it ended.
    pub end: OnceLock<Result<()>>,
    /// Fires (IN) when it has.
    pub queue: Arc<WaitQueue>,
}

struct Pending {
    ops: Box<[SemOp]>,
    undo: Option<u64>,
    pid: i32,
    /// The operation in the way when it was last tried.
    blocked_by: usize,
    waiter: Arc<Waiter>,
    _charge: Charge,
}

struct Inner {
    perm: Perm,
    removed: bool,
    otime: i64,
    ctime: i64,
    semaphores: Box<[Semaphore]>,
    pending: BTreeMap<u64, Pending>,
    turn: u64,
    /// What each undo list would add.
    undo: HashMap<u64, (Box<[i16]>, Charge)>,
    account: Charge,
}

/// A set.
pub struct SemSet {
    inner: Mutex<Inner>,
}

/// A set as it is.
#[allow(missing_docs)]
pub struct SemStat {
    pub perm: Perm,
    pub otime: i64,
    pub ctime: i64,
    pub count: usize,
}

/// How an attempt ended.
enum Attempt {
    Done,
    /// This operation would have to wait.
    Blocks(usize),
}

impl Inner {
    /// All operations or none. EAGAIN, ERANGE.
    fn perform(&mut self, ops: &[SemOp], undo: Option<u64>, pid: i32) -> Result<Attempt> {
        let mut done = 0;
        let end = loop {
            let Some(&op) = ops.get(done) else { break Ok(Attempt::Done) };
            match self.step(op, undo, 1) {
                Ok(true) => done += 1,
                Ok(false) if u32::from(op.flags) & IPC_NOWAIT != 0 => break Err(Errno::EAGAIN),
                Ok(false) => break Ok(Attempt::Blocks(done)),
                Err(e) => break Err(e),
            }
        };
        if let Ok(Attempt::Done) = end {
            for op in ops {
                if let Some(s) = self.semaphores.get_mut(usize::from(op.number)) {
                    s.pid = pid;
                }
            }
        } else {
            for &op in ops.iter().take(done).rev() {
                // What could be done can be taken back.
                let _ = self.step(op, undo, -1);
            }
        }
        end
    }

    /// One operation, or with `sign` -1 its reverse. False if it would have to wait.
    fn step(&mut self, op: SemOp, undo: Option<u64>, sign: i32) -> Result<bool> {
        let s = self.semaphores.get_mut(usize::from(op.number)).ok_or(Errno::EFBIG)?;
        let change = i32::from(op.op) * sign;
        if change == 0 {
            return Ok(s.value == 0 || sign < 0);
        }
        let value = s.value + change;
        if sign > 0 && value < 0 {
            return Ok(false);
        }
        if value > SEMVMX {
            return Err(Errno::ERANGE);
        }
        if u32::from(op.flags) & SEM_UNDO != 0 {
            let adjust =
                undo.and_then(|id| self.undo.get_mut(&id)).and_then(|(a, _)| a.get_mut(usize::from(op.number)));
            let adjust = adjust.ok_or(Errno::ENOMEM)?;
            let undone = i32::from(*adjust) - change;
            if !(-SEMVMX - 1..=SEMVMX).contains(&undone) {
                return Err(Errno::ERANGE);
            }
            *adjust = undone as i16;
        }
        s.value = value;
        Ok(true)
    }

    /// Performs what waits and has become possible; gives whom to wake.
    fn settle(&mut self, now: i64) -> Vec<Arc<Waiter>> {
        let mut woken = Vec::new();
        let mut from = 0;
        while let Some((&turn, _)) = self.pending.range(from..).next() {
            from = turn + 1;
            let Some(mut p) = self.pending.remove(&turn) else { continue };
            let alters = p.ops.iter().any(|op| op.op != 0);
            match self.perform(&p.ops, p.undo, p.pid) {
                Ok(Attempt::Blocks(at)) => {
                    p.blocked_by = at;
                    self.pending.insert(turn, p);
                    continue;
                }
                Ok(Attempt::Done) => {
                    self.otime = now;
                    let _ = p.waiter.end.set(Ok(()));
                    // An older one may be possible now.
                    if alters {
                        from = 0;
                    }
                }
                Err(e) => {
                    let _ = p.waiter.end.set(Err(e));
                }
            }
            woken.push(p.waiter);
        }
        woken
    }

    /// Lets `undo` keep adjustments here.
    fn prepare_undo(&mut self, id: u64) -> Result<()> {
        if !self.undo.contains_key(&id) {
            let charge = self.account.another(SET_COST / 4 + self.semaphores.len() * 2)?;
            let none = vec![0; self.semaphores.len()].into_boxed_slice();
            self.undo.insert(id, (none, charge));
        }
        Ok(())
    }
}

fn wake(woken: Vec<Arc<Waiter>>) {
    for w in woken {
        w.queue.wake(Events::IN);
    }
}

/// A call that waits; leaves the set when dropped.
pub struct Waiting {
    set: Arc<SemSet>,
    turn: u64,
    /// What it waits for.
    pub waiter: Arc<Waiter>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let old = self.set.inner.lock().pending.remove(&self.turn);
        drop(old);
    }
}

/// How semop(2) began.
pub enum Begun {
    /// It is over.
    Done,
    /// It waits.
    Waits(Waiting),
}

impl SemSet {
    /// Begins semop(2). EIDRM, EFBIG, EACCES, EAGAIN, ERANGE, ENOMEM.
    pub fn begin(self: &Arc<Self>, ops: &[SemOp], undo: Option<&Arc<UndoList>>, by: &Actor<'_>) -> Result<Begun> {
        let most = ops.iter().map(|op| usize::from(op.number)).max().unwrap_or(0);
        let alters = ops.iter().any(|op| op.op != 0);
        let undo = undo.filter(|_| ops.iter().any(|op| u32::from(op.flags) & SEM_UNDO != 0));
        if let Some(list) = undo {
            // Whatever comes of it: what the set keeps for the list goes with the list.
            list.touches(self);
        }
        let woken = {
            let mut inner = self.inner.lock();
            if inner.removed {
                return Err(Errno::EIDRM);
            }
            if most >= inner.semaphores.len() {
                return Err(Errno::EFBIG);
            }
            inner.perm.permits(by, if alters { 0o222 } else { 0o444 })?;
            if let Some(list) = undo {
                inner.prepare_undo(list.id)?;
            }
            let id = undo.map(|list| list.id);
            match inner.perform(ops, id, by.pid)? {
                Attempt::Done => {
                    inner.otime = by.now;
                    if alters { inner.settle(by.now) } else { Vec::new() }
                }
                Attempt::Blocks(blocked_by) => {
                    let charge = inner.account.another(WAITER_COST + size_of_val(ops))?;
                    let waiter = Arc::new(Waiter { end: OnceLock::new(), queue: WaitQueue::new() });
                    inner.turn += 1;
                    let turn = inner.turn;
                    let pending = Pending {
                        ops: ops.into(),
                        undo: id,
                        pid: by.pid,
                        blocked_by,
                        waiter: waiter.clone(),
                        _charge: charge,
                    };
                    inner.pending.insert(turn, pending);
                    return Ok(Begun::Waits(Waiting { set: self.clone(), turn, waiter }));
                }
            }
        };
        wake(woken);
        Ok(Begun::Done)
    }

    fn read<R>(&self, by: &Actor<'_>, f: impl FnOnce(&Inner) -> Result<R>) -> Result<R> {
        let inner = self.inner.lock();
        if inner.removed {
            return Err(Errno::EIDRM);
        }
        inner.perm.permits(by, 0o444)?;
        f(&inner)
    }

    /// IPC_STAT and SEM_STAT; `any` asks for no permission.
    pub fn stat(&self, any: bool, by: &Actor<'_>) -> Result<SemStat> {
        let inner = self.inner.lock();
        if !any {
            inner.perm.permits(by, 0o444)?;
        }
        Ok(SemStat { perm: inner.perm, otime: inner.otime, ctime: inner.ctime, count: inner.semaphores.len() })
    }

    /// GETALL.
    pub fn values(&self, by: &Actor<'_>) -> Result<Vec<u16>> {
        self.read(by, |inner| Ok(inner.semaphores.iter().map(|s| s.value as u16).collect()))
    }

    /// GETVAL and GETPID: value and pid.
    pub fn one(&self, number: usize, by: &Actor<'_>) -> Result<(i32, i32)> {
        self.read(by, |inner| inner.semaphores.get(number).map(|s| (s.value, s.pid)).ok_or(Errno::EINVAL))
    }

    /// GETNCNT and GETZCNT: how many wait for it to grow, and to be zero.
    pub fn waiting(&self, number: usize, by: &Actor<'_>) -> Result<(u64, u64)> {
        self.read(by, |inner| {
            if number >= inner.semaphores.len() {
                return Err(Errno::EINVAL);
            }
            let mut counts = (0, 0);
            for p in inner.pending.values() {
                match p.ops.get(p.blocked_by) {
                    Some(op) if usize::from(op.number) != number => {}
                    Some(op) if op.op == 0 => counts.1 += 1,
                    Some(_) => counts.0 += 1,
                    None => {}
                }
            }
            Ok(counts)
        })
    }

    fn assign(&self, by: &Actor<'_>, values: impl FnOnce(&mut Inner) -> Result<()>) -> Result<()> {
        let woken = {
            let mut inner = self.inner.lock();
            if inner.removed {
                return Err(Errno::EIDRM);
            }
            inner.perm.permits(by, 0o222)?;
            values(&mut inner)?;
            inner.ctime = by.now;
            inner.settle(by.now)
        };
        wake(woken);
        Ok(())
    }

    /// SETVAL. ERANGE, EINVAL.
    pub fn set_value(&self, number: usize, value: i32, by: &Actor<'_>) -> Result<()> {
        if !(0..=SEMVMX).contains(&value) {
            return Err(Errno::ERANGE);
        }
        let pid = by.pid;
        if number >= self.inner.lock().semaphores.len() {
            return Err(Errno::EINVAL);
        }
        self.assign(by, |inner| {
            *inner.semaphores.get_mut(number).ok_or(Errno::EINVAL)? = Semaphore { value, pid };
            for (adjust, _) in inner.undo.values_mut() {
                if let Some(a) = adjust.get_mut(number) {
                    *a = 0;
                }
            }
            Ok(())
        })
    }

    /// SETALL, with as many values as there are semaphores. ERANGE.
    pub fn set_all(&self, values: &[u16], by: &Actor<'_>) -> Result<()> {
        if values.iter().any(|&v| i32::from(v) > SEMVMX) {
            return Err(Errno::ERANGE);
        }
        let pid = by.pid;
        self.assign(by, |inner| {
            for (s, &value) in inner.semaphores.iter_mut().zip(values) {
                *s = Semaphore { value: value.into(), pid };
            }
            for (adjust, _) in inner.undo.values_mut() {
                adjust.fill(0);
            }
            Ok(())
        })
    }

    /// Whether SETALL is permitted. EACCES.
    pub fn may_alter(&self, by: &Actor<'_>) -> Result<()> {
        self.inner.lock().perm.permits(by, 0o222)
    }

    /// IPC_SET.
    pub fn set_owner(&self, owner: Option<(u32, u32)>, mode: u32, by: &Actor<'_>) -> Result<()> {
        let mut inner = self.inner.lock();
        inner.perm.changeable(by)?;
        let (uid, gid) = owner.ok_or(Errno::EINVAL)?;
        inner.perm.set(uid, gid, mode);
        inner.ctime = by.now;
        Ok(())
    }
}

/// The sets of a namespace.
pub struct Semaphores {
    /// With how many semaphores there are in all.
    ids: Mutex<(Ids<SemSet>, u32)>,
}

impl Default for Semaphores {
    fn default() -> Self {
        Semaphores { ids: Mutex::new(Rank::Leaf, (Ids::default(), 0)) }
    }
}

impl Semaphores {
    /// semget(2).
    pub fn get(&self, platform: &Arc<dyn Platform>, key: i32, count: i32, flags: u32, by: &Actor<'_>) -> Result<i32> {
        let count = u32::try_from(count).ok().filter(|&n| n <= SEMMSL).ok_or(Errno::EINVAL)?;
        loop {
            let found = self.ids.lock().0.look_up(key, flags)?;
            if let Some(set) = found {
                let inner = set.inner.lock();
                if count as usize > inner.semaphores.len() {
                    return Err(Errno::EINVAL);
                }
                inner.perm.permits(by, flags & 0o777)?;
                return Ok(inner.perm.id);
            }
            if count == 0 {
                return Err(Errno::EINVAL);
            }
            let charge = Charge::new(platform, KernelMemory::Slab, SET_COST + SEM_COST * count as usize)?;
            let mut table = self.ids.lock();
            if table.0.look_up(key, flags)?.is_some() {
                // Somebody was faster.
                continue;
            }
            let used = table.1.checked_add(count).filter(|&n| n <= SEMMNS).ok_or(Errno::ENOSPC)?;
            let id = table.0.insert(key, MOST, |id| SemSet {
                inner: Mutex::new(
                    Rank::Leaf,
                    Inner {
                        perm: Perm::new(key, id, flags, by),
                        removed: false,
                        otime: 0,
                        ctime: by.now,
                        semaphores: vec![Semaphore::default(); count as usize].into_boxed_slice(),
                        pending: BTreeMap::new(),
                        turn: 0,
                        undo: HashMap::new(),
                        account: charge,
                    },
                ),
            })?;
            table.1 = used;
            return Ok(id);
        }
    }

    /// A set. EINVAL.
    pub fn find(&self, id: i32) -> Result<Arc<SemSet>> {
        self.ids.lock().0.find(id)
    }

    /// The set at an index. EINVAL.
    pub fn at(&self, index: i32) -> Result<Arc<SemSet>> {
        self.ids.lock().0.at(index)
    }

    /// IPC_RMID: whoever waits gets EIDRM.
    pub fn remove(&self, id: i32, by: &Actor<'_>) -> Result<()> {
        let set = self.find(id)?;
        let woken: Vec<_> = {
            let mut inner = set.inner.lock();
            if inner.removed {
                return Err(Errno::EIDRM);
            }
            inner.perm.changeable(by)?;
            inner.removed = true;
            core::mem::take(&mut inner.pending).into_values().map(|p| p.waiter).collect()
        };
        let old = {
            let mut table = self.ids.lock();
            let old = table.0.remove(id);
            if old.is_some() {
                table.1 = table.1.saturating_sub(set.inner.lock_nested().semaphores.len() as u32);
            }
            old
        };
        for w in woken {
            let _ = w.end.set(Err(Errno::EIDRM));
            w.queue.wake(Events::IN);
        }
        drop(old);
        Ok(())
    }

    /// Sets, semaphores, and the highest index.
    pub fn totals(&self) -> (usize, u32, u32) {
        let table = self.ids.lock();
        (table.0.count(), table.1, table.0.highest())
    }

    /// All sets as they are (/proc/sysvipc/sem).
    pub fn all(&self) -> Vec<SemStat> {
        let sets = self.ids.lock().0.all();
        sets.iter()
            .map(|s| {
                let inner = s.inner.lock();
                SemStat { perm: inner.perm, otime: inner.otime, ctime: inner.ctime, count: inner.semaphores.len() }
            })
            .collect()
    }
}

/// What the tasks that share it would have undone: one for each process, or more with CLONE_SYSVSEM. When the last of them lets go of it,
/// its adjustments are applied.
pub struct UndoList {
    id: u64,
    /// The process that ended last.
    pub pid: AtomicI32,
    sets: Mutex<Vec<Weak<SemSet>>>,
    platform: Arc<dyn Platform>,
}

impl UndoList {
    /// Nothing to undo.
    pub fn new(platform: &Arc<dyn Platform>) -> Arc<UndoList> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new(UndoList {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            pid: AtomicI32::new(0),
            sets: Mutex::new(Rank::Leaf, Vec::new()),
            platform: platform.clone(),
        })
    }

    fn touches(&self, set: &Arc<SemSet>) {
        let mut sets = self.sets.lock();
        let known = sets.iter().any(|s| core::ptr::eq(s.as_ptr(), Arc::as_ptr(set)));
        if !known {
            // Those that are gone make room, so that the list is no longer than what is charged in the sets.
            sets.retain(|s| s.strong_count() > 0);
            sets.push(Arc::downgrade(set));
        }
    }
}

impl Drop for UndoList {
    fn drop(&mut self) {
        let sets = core::mem::take(self.sets.get_mut());
        let pid = self.pid.load(Ordering::Relaxed);
        for set in sets.iter().filter_map(Weak::upgrade) {
            let woken = {
                let mut inner = set.inner.lock();
                let Some((adjust, _)) = inner.undo.remove(&self.id) else { continue };
                let now = seconds(&*self.platform);
                for (s, adjust) in inner.semaphores.iter_mut().zip(&adjust) {
                    if *adjust != 0 {
                        s.value = (s.value + i32::from(*adjust)).clamp(0, SEMVMX);
                        s.pid = pid;
                    }
                }
                inner.otime = now;
                inner.settle(now)
            };
            wake(woken);
        }
    }
}
