//! System V shared memory: shmget(2), shmat(2), shmdt(2), shmctl(2).
use std::sync::Arc;

use guest_abi::layout::PAGE_SIZE;
use guest_abi::{UserAddr, UserPtr};

use super::args::Bits;
use super::table::Row;
use crate::mm::{MapFlags, MapRequest, MapSource, Prot};
use crate::ns::shm::{Asker, SHM_DEV, SHMALL, SHMMAX, SHMMNI, ShmStat};
use crate::row;
use crate::task::Task;
use crate::task::limits::Resource;
use crate::{Errno, Result};

/// The rows of this area.
pub const ROWS: &[Row] = &[
    row!(29, shmget(key: i32, size: u64, flags: u32), fast shmget, Partial, "no SHM_HUGETLB"),
    row!(30, shmat(id: i32, addr: UserAddr, flags: Bits), fast shmat, Full),
    row!(31, shmctl(id: i32, op: i32, buf: UserAddr), fast shmctl, Partial, "shm_dtime and shm_lpid tell of shmat and shmdt only"),
    row!(67, shmdt(addr: UserAddr), fast shmdt, Full),
];

const SHM_HUGETLB: u32 = 0o4000;

const SHM_RDONLY: u64 = 0o10000;
const SHM_RND: u64 = 0o20000;
const SHM_REMAP: u64 = 0o40000;
const SHM_EXEC: u64 = 0o100000;

const IPC_RMID: i32 = 0;
const IPC_SET: i32 = 1;
const IPC_STAT: i32 = 2;
const IPC_INFO: i32 = 3;
const SHM_LOCK: i32 = 11;
const SHM_UNLOCK: i32 = 12;
const SHM_STAT: i32 = 13;
const SHM_INFO: i32 = 14;
const SHM_STAT_ANY: i32 = 15;

fn with<R>(task: &Task, f: impl FnOnce(&Asker<'_>) -> R) -> R {
    let credentials = task.credentials();
    let now = i64::try_from(task.kernel().platform.realtime() / 1_000_000_000).unwrap_or(i64::MAX);
    f(&Asker { credentials: &credentials, pid: task.group().pid().global(), now })
}

fn shmget(task: &Arc<Task>, key: i32, size: u64, flags: u32) -> Result<u64> {
    if flags & SHM_HUGETLB != 0 {
        // The pool of huge pages is empty.
        return Err(Errno::ENOMEM);
    }
    let shm = &task.nsproxy()?.ipc.shm;
    let id = with(task, |by| shm.get(&task.kernel().platform, key, size, flags, by))?;
    Ok(u64::from(id.unsigned_abs()))
}

fn shmat(task: &Arc<Task>, id: i32, addr: UserAddr, flags: Bits) -> Result<u64> {
    let has = |flag: u64| flags.0 & flag != 0;
    if id < 0 {
        return Err(Errno::EINVAL);
    }
    let mut at = addr;
    let mut map = MapFlags::SHARED;
    if addr.0 != 0 {
        if addr.page_offset() != 0 {
            if !has(SHM_RND) {
                return Err(Errno::EINVAL);
            }
            at = UserAddr(addr.0 & !(PAGE_SIZE - 1));
            if at.0 == 0 && has(SHM_REMAP) {
                return Err(Errno::EINVAL);
            }
        }
        map |= if has(SHM_REMAP) { MapFlags::FIXED } else { MapFlags::FIXED_NOREPLACE };
    } else if has(SHM_REMAP) {
        return Err(Errno::EINVAL);
    }
    let mut prot = Prot::READ;
    let mut wanted = 0o444;
    if !has(SHM_RDONLY) {
        prot |= Prot::WRITE;
        wanted |= 0o222;
    }
    if has(SHM_EXEC) {
        prot |= Prot::EXEC;
        wanted |= 0o111;
    }
    let shm = &task.nsproxy()?.ipc.shm;
    let attachment = with(task, |by| shm.attach(id, wanted, by))?;
    let object = attachment.memory;
    let source = MapSource::File { object, offset: 0, file: Some(attachment.name), may_write: !has(SHM_RDONLY) };
    let request = MapRequest { addr: at, len: attachment.size, prot, flags: map, source };
    let mapped = task.space()?.map(request).map_err(|e| if e == Errno::EEXIST { Errno::EINVAL } else { e })?;
    with(task, |by| shm.touched(id, false, by));
    Ok(mapped.0)
}

fn shmdt(task: &Arc<Task>, addr: UserAddr) -> Result<u64> {
    let ino = task.space()?.detach(addr, SHM_DEV)?;
    let shm = &task.nsproxy()?.ipc.shm;
    if let Some(id) = shm.id_of(ino) {
        with(task, |by| shm.touched(id, true, by));
    }
    Ok(0)
}

/// struct shmid_ds.
fn encode(task: &Task, s: &ShmStat) -> [u64; 14] {
    let user_ns = &task.credentials().user_ns;
    let pair = |low: u32, high: u32| u64::from(low) | (u64::from(high) << 32);
    let number = |global: i32| {
        let root = &task.kernel().root_pid_ns;
        let own = task.pid_namespace();
        if Arc::ptr_eq(root, own) {
            return global;
        }
        root.pid(global).map_or(0, |p| p.number_in(own))
    };
    [
        pair(s.key.cast_unsigned(), user_ns.shown_user(s.uid)),
        pair(user_ns.shown_group(s.gid), user_ns.shown_user(s.cuid)),
        pair(user_ns.shown_group(s.cgid), s.mode),
        u64::from(s.id.unsigned_abs() >> 15),
        0,
        0,
        s.size,
        s.atime.cast_unsigned(),
        s.dtime.cast_unsigned(),
        s.ctime.cast_unsigned(),
        pair(number(s.cpid).cast_unsigned(), number(s.lpid).cast_unsigned()),
        s.nattch,
        0,
        0,
    ]
}

fn shmctl(task: &Arc<Task>, id: i32, op: i32, buf: UserAddr) -> Result<u64> {
    if op < 0 || id < 0 {
        return Err(Errno::EINVAL);
    }
    let shm = &task.nsproxy()?.ipc.shm;
    let credentials = task.credentials();
    match op {
        IPC_INFO => {
            let limits = [SHMMAX, 1, u64::from(SHMMNI), u64::from(SHMMNI), SHMALL, 0, 0, 0, 0];
            task.space()?.write(UserPtr::new(buf), &limits)?;
            Ok(u64::from(shm.totals().highest))
        }
        SHM_INFO => {
            let t = shm.totals();
            task.space()?.write(UserPtr::new(buf), &[u64::from(t.used), t.pages, t.resident, 0, 0, 0])?;
            Ok(u64::from(t.highest))
        }
        IPC_STAT => {
            let stat = encode(task, &shm.stat(id, &credentials)?);
            task.space()?.write(UserPtr::new(buf), &stat)?;
            Ok(0)
        }
        SHM_STAT | SHM_STAT_ANY => {
            let stat = shm.stat_index(id, op == SHM_STAT_ANY, &credentials)?;
            task.space()?.write(UserPtr::new(buf), &encode(task, &stat))?;
            Ok(u64::from(stat.id.unsigned_abs()))
        }
        IPC_SET => {
            let new: [u32; 6] = task.space()?.read(UserPtr::new(buf))?;
            let [_, uid, gid, _, _, mode] = new;
            let user_ns = &credentials.user_ns;
            let (uid, gid) = (user_ns.user(uid).unwrap_or(u32::MAX), user_ns.group(gid).unwrap_or(u32::MAX));
            with(task, |by| shm.set(id, uid, gid, mode, by)).map(|()| 0)
        }
        IPC_RMID => shm.remove(id, &credentials).map(|()| 0),
        SHM_LOCK | SHM_UNLOCK => {
            let may_lock = task.limit(Resource::Memlock) != 0;
            shm.lock(id, op == SHM_LOCK, may_lock, &credentials).map(|()| 0)
        }
        _ => Err(Errno::EINVAL),
    }
}
