//! System V semaphores and message queues: semget(2), semop(2), semctl(2), msgget(2), msgsnd(2), msgrcv(2), msgctl(2).
use std::sync::Arc;
use std::sync::atomic::Ordering;

use guest_abi::types::Timespec;
use guest_abi::{UserAddr, UserPtr};

use super::table::Row;
use crate::event::{Events, WaitEnd};
use crate::ns::ipc::IpcNamespace;
use crate::ns::ipc_ids::{Actor, IPC_NOWAIT, MOST, Perm, seconds};
use crate::ns::msg::{Message, MsgQueue, MsgStat, Wanted};
use crate::ns::sem::{Begun, SEMMNS, SEMMSL, SEMOPM, SEMVMX, SemOp, SemStat};
use crate::row;
use crate::task::Task;
use crate::time::Nanos;
use crate::{Errno, Result};

/// The rows of this area.
pub const ROWS: &[Row] = &[
    row!(64, semget(key: i32, nsems: i32, semflg: u32), fast semget, Full),
    row!(65, semop(semid: i32, sops: UserAddr, nsops: u32), slow semop, Full),
    row!(66, semctl(semid: i32, semnum: i32, op: i32, arg: UserAddr), fast semctl, Full),
    row!(68, msgget(key: i32, msgflg: u32), fast msgget, Full),
    row!(69, msgsnd(msqid: i32, msgp: UserAddr, msgsz: u64, msgflg: u32), both msgsnd_fast, msgsnd, Full),
    row!(70, msgrcv(msqid: i32, msgp: UserAddr, msgsz: u64, msgtyp: i64, msgflg: u32), both msgrcv_fast, msgrcv, Full),
    row!(71, msgctl(msqid: i32, op: i32, buf: UserAddr), fast msgctl, Full),
    row!(220, semtimedop(semid: i32, sops: UserAddr, nsops: u32, timeout: UserPtr<Timespec>), slow semtimedop, Full),
];

const IPC_RMID: i32 = 0;
const IPC_SET: i32 = 1;
const IPC_STAT: i32 = 2;
const IPC_INFO: i32 = 3;

/// Runs `f` with the caller as the actor in its IPC namespace.
fn with<R>(task: &Task, f: impl FnOnce(&IpcNamespace, &Actor<'_>) -> Result<R>) -> Result<R> {
    let ipc = task.nsproxy()?.ipc.clone();
    let credentials = task.credentials();
    let now = seconds(&*task.kernel().platform);
    let owner = &ipc.owner.user_ns;
    f(&ipc, &Actor { credentials: &credentials, owner, pid: task.group().pid().global(), now })
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | (u64::from(high) << 32)
}

/// A process as the caller's PID namespace numbers it.
pub(super) fn number(task: &Task, global: i32) -> u32 {
    task.kernel().root_pid_ns.number_for(global, task.pid_namespace()).cast_unsigned()
}

/// struct ipc64_perm.
fn perm(task: &Task, p: &Perm) -> [u64; 6] {
    let user_ns = &task.credentials().user_ns;
    [
        pair(p.key.cast_unsigned(), user_ns.shown_user(p.uid)),
        pair(user_ns.shown_group(p.gid), user_ns.shown_user(p.cuid)),
        pair(user_ns.shown_group(p.cgid), p.mode),
        u64::from(p.id.unsigned_abs() >> 15),
        0,
        0,
    ]
}

/// Owner and mode that IPC_SET asks for; no owner if an id means nobody.
fn wanted(task: &Task, words: &[u64]) -> (Option<(u32, u32)>, u32) {
    let word = |at: usize| words.get(at).copied().unwrap_or(0);
    let user_ns = &task.credentials().user_ns;
    let uid = user_ns.user((word(0) >> 32) as u32);
    let gid = user_ns.group(word(1) as u32);
    (uid.zip(gid), (word(2) >> 32) as u32)
}

fn id_of(id: i32) -> u64 {
    u64::from(id.unsigned_abs())
}

// Semaphores

fn semget(task: &Arc<Task>, key: i32, nsems: i32, flags: u32) -> Result<u64> {
    with(task, |ipc, by| ipc.sem.get(&task.kernel().platform, key, nsems, flags, by)).map(id_of)
}

fn read_ops(task: &Task, id: i32, sops: UserAddr, nsops: u32) -> Result<Vec<SemOp>> {
    if nsops == 0 || id < 0 {
        return Err(Errno::EINVAL);
    }
    let count = usize::try_from(nsops).ok().filter(|&n| n <= SEMOPM).ok_or(Errno::E2BIG)?;
    let raw = task.space()?.read_array(UserPtr::<[u16; 3]>::new(sops), count)?;
    Ok(raw.into_iter().map(|[number, op, flags]| SemOp { number, op: op.cast_signed(), flags }).collect())
}

async fn semop(task: &Arc<Task>, id: i32, sops: UserAddr, nsops: u32) -> Result<u64> {
    operate(task, id, sops, nsops, None).await
}

async fn semtimedop(task: &Arc<Task>, id: i32, sops: UserAddr, nsops: u32, timeout: UserPtr<Timespec>) -> Result<u64> {
    if timeout.is_null() {
        return operate(task, id, sops, nsops, None).await;
    }
    let t = task.space()?.read(timeout)?;
    let ops = nsops != 0 && id >= 0;
    let valid = t.sec >= 0 && (0..1_000_000_000).contains(&t.nsec);
    if !ops || !valid {
        return Err(Errno::EINVAL);
    }
    let ns = t.sec.cast_unsigned().saturating_mul(1_000_000_000).saturating_add(t.nsec.cast_unsigned());
    let deadline = task.now().saturating_add(ns);
    operate(task, id, sops, nsops, Some(deadline)).await
}

async fn operate(task: &Arc<Task>, id: i32, sops: UserAddr, nsops: u32, deadline: Option<Nanos>) -> Result<u64> {
    const SEM_UNDO: u16 = 0x1000;
    let ops = read_ops(task, id, sops, nsops)?;
    let undo = ops.iter().any(|op| op.flags & SEM_UNDO != 0).then(|| task.sem_undo());
    let begun = with(task, |ipc, by| ipc.sem.find(id)?.begin(&ops, undo.as_ref(), by))?;
    let Begun::Waits(waiting) = begun else { return Ok(0) };
    let waiter = waiting.waiter.clone();
    let end = task.wait(vec![(waiter.queue.clone(), Events::IN)], deadline, || waiter.end.get().copied()).await;
    drop(waiting);
    // What was done on the caller's behalf stays done, whatever came at the same time.
    match (waiter.end.get().copied(), end) {
        (Some(end), _) | (None, Ok(end)) => end.map(|()| 0),
        (None, Err(WaitEnd::TimedOut)) => Err(Errno::EAGAIN),
        (None, Err(WaitEnd::Interrupted)) => Err(Errno::EINTR),
    }
}

fn encode_sem(task: &Task, s: &SemStat) -> Vec<u64> {
    let mut words = perm(task, &s.perm).to_vec();
    words.extend([s.otime.cast_unsigned(), 0, s.ctime.cast_unsigned(), 0, s.count as u64, 0, 0]);
    words
}

fn put(task: &Task, buf: UserAddr, words: &[u64]) -> Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    task.space()?.write_bytes(buf, &bytes)
}

fn semctl(task: &Arc<Task>, id: i32, number_in_set: i32, op: i32, arg: UserAddr) -> Result<u64> {
    const GETPID: i32 = 11;
    const GETVAL: i32 = 12;
    const GETALL: i32 = 13;
    const GETNCNT: i32 = 14;
    const GETZCNT: i32 = 15;
    const SETVAL: i32 = 16;
    const SETALL: i32 = 17;
    const SEM_STAT: i32 = 18;
    const SEM_INFO: i32 = 19;
    const SEM_STAT_ANY: i32 = 20;
    if id < 0 {
        return Err(Errno::EINVAL);
    }
    let space = task.space()?;
    let index = usize::try_from(number_in_set).map_err(|_| Errno::EINVAL);
    match op {
        IPC_INFO | SEM_INFO => {
            let (sets, used, highest) = with(task, |ipc, _| Ok(ipc.sem.totals()))?;
            let (usz, aem) = if op == SEM_INFO { (sets as u32, used) } else { (20, SEMVMX.unsigned_abs()) };
            let opm = SEMOPM as u32;
            let info = [SEMMNS, MOST, SEMMNS, SEMMNS, SEMMSL, opm, opm, usz, SEMVMX.unsigned_abs(), aem];
            space.write(UserPtr::new(arg), &info)?;
            Ok(highest.into())
        }
        IPC_STAT => {
            let stat = with(task, |ipc, by| ipc.sem.find(id)?.stat(false, by))?;
            put(task, arg, &encode_sem(task, &stat))?;
            Ok(0)
        }
        SEM_STAT | SEM_STAT_ANY => {
            let stat = with(task, |ipc, by| ipc.sem.at(id)?.stat(op == SEM_STAT_ANY, by))?;
            put(task, arg, &encode_sem(task, &stat))?;
            Ok(id_of(stat.perm.id))
        }
        GETALL => {
            let values = with(task, |ipc, by| ipc.sem.find(id)?.values(by))?;
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            space.write_bytes(arg, &bytes)?;
            Ok(0)
        }
        GETVAL => Ok(with(task, |ipc, by| ipc.sem.find(id)?.one(index?, by))?.0 as u64),
        GETPID => {
            let (_, pid) = with(task, |ipc, by| ipc.sem.find(id)?.one(index?, by))?;
            Ok(number(task, pid).into())
        }
        GETNCNT => Ok(with(task, |ipc, by| ipc.sem.find(id)?.waiting(index?, by))?.0),
        GETZCNT => Ok(with(task, |ipc, by| ipc.sem.find(id)?.waiting(index?, by))?.1),
        SETVAL => {
            let value = arg.0 as i32;
            if !(0..=SEMVMX).contains(&value) {
                return Err(Errno::ERANGE);
            }
            with(task, |ipc, by| ipc.sem.find(id)?.set_value(index?, value, by)).map(|()| 0)
        }
        SETALL => {
            let (set, count) = with(task, |ipc, by| {
                let set = ipc.sem.find(id)?;
                set.may_alter(by)?;
                let count = set.stat(true, by)?.count;
                Ok((set, count))
            })?;
            let values = space.read_array(UserPtr::<u16>::new(arg), count)?;
            with(task, |_, by| set.set_all(&values, by)).map(|()| 0)
        }
        IPC_SET => {
            let words = space.read_array(UserPtr::<u64>::new(arg), 13)?;
            let (owner, mode) = wanted(task, &words);
            with(task, |ipc, by| ipc.sem.find(id)?.set_owner(owner, mode, by)).map(|()| 0)
        }
        IPC_RMID => with(task, |ipc, by| ipc.sem.remove(id, by)).map(|()| 0),
        _ => Err(Errno::EINVAL),
    }
}

// Messages

const MSG_NOERROR: u32 = 0o10000;
const MSG_EXCEPT: u32 = 0o20000;
const MSG_COPY: u32 = 0o40000;

fn msgget(task: &Arc<Task>, key: i32, flags: u32) -> Result<u64> {
    with(task, |ipc, by| ipc.msg.get(&task.kernel().platform, key, flags, by)).map(id_of)
}

fn read_message(task: &Task, id: i32, at: UserAddr, size: u64) -> Result<Message> {
    let space = task.space()?;
    let kind: i64 = space.read(UserPtr::new(at))?;
    let max = with(task, |ipc, _| Ok(ipc.msg.limits.max.load(Ordering::Relaxed)))?;
    if size > u64::from(max) || size.cast_signed() < 0 || id < 0 || kind < 1 {
        return Err(Errno::EINVAL);
    }
    // The limit is an administrator's; memory is charged before it is taken.
    let platform = &task.kernel().platform;
    let room = crate::mm::Charge::new(platform, crate::platform::KernelMemory::Buffer, size as usize)?;
    let mut text = vec![0; size as usize];
    space.read_bytes(at.wrapping_add(8), &mut text)?;
    drop(room);
    Message::new(platform, kind, text)
}

/// One attempt; the message where there is no room.
fn try_send(task: &Task, queue: &MsgQueue, message: Message) -> Result<Option<Message>> {
    let left = with(task, |_, by| queue.send(message, by))?;
    if left.is_none() {
        queue.events.wake(Events::IN);
    }
    Ok(left)
}

fn begin_send(task: &Task, id: i32, at: UserAddr, size: u64, flags: u32) -> Result<Option<(Arc<MsgQueue>, Message)>> {
    let message = read_message(task, id, at, size)?;
    let queue = with(task, |ipc, _| ipc.msg.find(id))?;
    match try_send(task, &queue, message)? {
        None => Ok(None),
        Some(_) if flags & IPC_NOWAIT != 0 => Err(Errno::EAGAIN),
        Some(message) => Ok(Some((queue, message))),
    }
}

fn msgsnd_fast(task: &Arc<Task>, id: i32, at: UserAddr, size: u64, flags: u32) -> Result<Option<u64>> {
    Ok(begin_send(task, id, at, size, flags)?.is_none().then_some(0))
}

async fn msgsnd(task: &Arc<Task>, id: i32, at: UserAddr, size: u64, flags: u32) -> Result<u64> {
    let Some((queue, message)) = begin_send(task, id, at, size, flags)? else { return Ok(0) };
    let mut left = Some(message);
    let end = task
        .wait(vec![(queue.events.clone(), Events::OUT)], None, || match try_send(task, &queue, left.take()?) {
            Ok(None) => Some(Ok(0)),
            Ok(Some(message)) => {
                left = Some(message);
                None
            }
            Err(e) => Some(Err(e)),
        })
        .await;
    end.unwrap_or(Err(Errno::ERESTARTNOHAND))
}

/// What msgrcv(2) asks for.
struct Receipt {
    room: usize,
    wanted: Wanted,
    cut: bool,
}

fn deliver(task: &Task, at: UserAddr, kind: i64, text: &[u8], room: usize) -> Result<u64> {
    let space = task.space()?;
    let text = text.get(..room.min(text.len())).unwrap_or_default();
    space.write(UserPtr::new(at), &kind)?;
    space.write_bytes(at.wrapping_add(8), text)?;
    Ok(text.len() as u64)
}

fn try_receive(task: &Task, queue: &MsgQueue, r: &Receipt) -> Result<Option<Message>> {
    let got = with(task, |_, by| queue.receive(r.wanted, r.room, r.cut, by))?;
    if got.is_some() {
        queue.events.wake(Events::OUT);
    }
    Ok(got)
}

/// The queue, what is wanted of it, and the answer if there is one already.
type Begin = (Arc<MsgQueue>, Receipt, Option<u64>);

fn begin_receive(task: &Task, id: i32, at: UserAddr, size: u64, kind: i64, flags: u32) -> Result<Begin> {
    if id < 0 || size.cast_signed() < 0 {
        return Err(Errno::EINVAL);
    }
    let has = |flag: u32| flags & flag != 0;
    if has(MSG_COPY) && (has(MSG_EXCEPT) || !has(IPC_NOWAIT)) {
        return Err(Errno::EINVAL);
    }
    let room = usize::try_from(size).unwrap_or(usize::MAX);
    let receipt = Receipt { room, wanted: Wanted::new(kind, has(MSG_EXCEPT)), cut: has(MSG_NOERROR) };
    let queue = with(task, |ipc, _| ipc.msg.find(id))?;
    if has(MSG_COPY) {
        let (kind, text) = with(task, |_, by| queue.copy(kind, room, receipt.cut, by))?;
        let done = deliver(task, at, kind, &text, room)?;
        return Ok((queue, receipt, Some(done)));
    }
    match try_receive(task, &queue, &receipt)? {
        Some(m) => {
            let done = deliver(task, at, m.kind, &m.text, room)?;
            Ok((queue, receipt, Some(done)))
        }
        None if has(IPC_NOWAIT) => Err(Errno::ENOMSG),
        None => Ok((queue, receipt, None)),
    }
}

fn msgrcv_fast(task: &Arc<Task>, id: i32, at: UserAddr, size: u64, kind: i64, flags: u32) -> Result<Option<u64>> {
    Ok(begin_receive(task, id, at, size, kind, flags)?.2)
}

async fn msgrcv(task: &Arc<Task>, id: i32, at: UserAddr, size: u64, kind: i64, flags: u32) -> Result<u64> {
    let (queue, receipt, done) = begin_receive(task, id, at, size, kind, flags)?;
    if let Some(done) = done {
        return Ok(done);
    }
    let end = task
        .wait(vec![(queue.events.clone(), Events::IN)], None, || try_receive(task, &queue, &receipt).transpose())
        .await;
    let message = end.unwrap_or(Err(Errno::ERESTARTNOHAND))?;
    deliver(task, at, message.kind, &message.text, receipt.room)
}

fn encode_msg(task: &Task, s: &MsgStat) -> Vec<u64> {
    let mut words = perm(task, &s.perm).to_vec();
    let times = [s.stime, s.rtime, s.ctime].map(i64::cast_unsigned);
    words.extend(times);
    words.extend([s.bytes, s.count, s.most, pair(number(task, s.lspid), number(task, s.lrpid)), 0, 0]);
    words
}

fn msgctl(task: &Arc<Task>, id: i32, op: i32, buf: UserAddr) -> Result<u64> {
    const MSG_STAT: i32 = 11;
    const MSG_INFO: i32 = 12;
    const MSG_STAT_ANY: i32 = 13;
    if id < 0 || op < 0 {
        return Err(Errno::EINVAL);
    }
    match op {
        IPC_INFO | MSG_INFO => {
            let (words, highest) = with(task, |ipc, _| {
                let l = &ipc.msg.limits;
                let [max, bytes, queues] = [&l.max, &l.bytes, &l.queues].map(|l| l.load(Ordering::Relaxed));
                let (count, highest) = ipc.msg.totals();
                let (messages, held) = ipc.msg.contents();
                let small = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
                let [pool, map, tql] = match op {
                    MSG_INFO => [count as u32, small(messages), small(held)],
                    _ => [512_000, 16_384, 16_384],
                };
                Ok(([pool, map, max, bytes, queues, 16, tql, 0xffff], highest))
            })?;
            task.space()?.write(UserPtr::new(buf), &words)?;
            Ok(highest.into())
        }
        IPC_STAT => {
            let stat = with(task, |ipc, by| ipc.msg.find(id)?.stat(false, by))?;
            put(task, buf, &encode_msg(task, &stat))?;
            Ok(0)
        }
        MSG_STAT | MSG_STAT_ANY => {
            let stat = with(task, |ipc, by| ipc.msg.at(id)?.stat(op == MSG_STAT_ANY, by))?;
            put(task, buf, &encode_msg(task, &stat))?;
            Ok(id_of(stat.perm.id))
        }
        IPC_SET => {
            let words = task.space()?.read_array(UserPtr::<u64>::new(buf), 15)?;
            let (owner, mode) = wanted(task, &words);
            let most = words.get(11).copied().unwrap_or(0);
            let queue = with(task, |ipc, by| {
                let queue = ipc.msg.find(id)?;
                queue.set(owner, mode, most, &ipc.msg.limits, by)?;
                Ok(queue)
            })?;
            // There may be more room, and other rights.
            queue.events.wake(Events::IN | Events::OUT);
            Ok(0)
        }
        IPC_RMID => with(task, |ipc, by| ipc.msg.remove(id, by)).map(|()| 0),
        _ => Err(Errno::EINVAL),
    }
}
