//! fcntl(2) and flock(2).
use std::any::Any;
use std::sync::Arc;

use guest_abi::file::{FOwnerEx, Flock};
use guest_abi::{UserAddr, UserPtr};
use linux_raw_sys::general as raw;

use super::args::Fd;
use super::table::Row;
use crate::event::{Events, WaitEnd};
use crate::fs::pipe::pipe_of;
use crate::ns::user::Caps;
use crate::row;
use crate::task::limits::Resource;
use crate::task::{Pid, Task};
use crate::vfs::file::FileOwner;
use crate::vfs::lock::{self, FileLocks, LOCK_END, LockOwner, RecordLock};
use crate::vfs::{File, OpenFlags, attr};
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(72, fcntl(fd: Fd, op: u32, arg: u64), both fcntl_fast, fcntl_slow, Partial, "no leases, no F_NOTIFY"),
    row!(73, flock(fd: Fd, operation: u32), both flock_fast, flock_slow, Full),
];

const F_CREATED_QUERY: u32 = 1028;
const F_GETPIPE_SZ: u32 = 1032;
const F_GET_SEALS: u32 = 1034;
const F_SETOWN_EX: u32 = 15;
const F_GETSIG: u32 = 11;
const F_SETLK: u32 = 6;
const F_SETLKW: u32 = 7;
const F_SETOWN: u32 = 8;
const F_GETLEASE: u32 = 1025;
const F_CANCELLK: u32 = 1029;
const F_OWNER_TID: i32 = 0;
const F_OWNER_PID: i32 = 1;
const F_OWNER_PGRP: i32 = 2;

fn fcntl_fast(task: &Arc<Task>, fd: Fd, op: u32, arg: u64) -> Result<Option<u64>> {
    if matches!(op, F_SETLKW | raw::F_OFD_SETLKW) {
        return match set_lock(task, fd, op, UserPtr::new(UserAddr(arg))) {
            Ok((locks, want)) => match try_lock(task, &locks, &want) {
                Err((Errno::EAGAIN, _)) => Ok(None),
                Err((e, _)) => Err(e),
                Ok(()) => Ok(Some(0)),
            },
            Err(e) => Err(e),
        };
    }
    fcntl(task, fd, op, arg).map(Some)
}

async fn fcntl_slow(task: &Arc<Task>, fd: Fd, op: u32, arg: u64) -> Result<u64> {
    if !matches!(op, F_SETLKW | raw::F_OFD_SETLKW) {
        return fcntl(task, fd, op, arg);
    }
    let (locks, want) = set_lock(task, fd, op, UserPtr::new(UserAddr(arg)))?;
    loop {
        let other = match try_lock(task, &locks, &want) {
            Ok(()) => return Ok(0),
            Err((Errno::EAGAIN, Some(other))) => other,
            Err((e, _)) => return Err(e),
        };
        // Only one lock in the way is known to be waited for; when it goes the next is found.
        let waiting = match &want {
            Want::Set(RecordLock { owner: LockOwner::Table(id), .. }) => {
                task.kernel().lock_waits.begin(*id, other.owner)?
            }
            _ => None,
        };
        let end = task
            .wait(vec![(locks.queue().clone(), Events::all())], None, || match try_lock(task, &locks, &want) {
                Ok(()) => Some(Ok(true)),
                Err((Errno::EAGAIN, Some(now))) if now.owner == other.owner => None,
                Err((Errno::EAGAIN, _)) => Some(Ok(false)),
                Err((e, _)) => Some(Err(e)),
            })
            .await;
        drop(waiting);
        match end {
            Ok(Ok(true)) => return Ok(0),
            Ok(Ok(false)) => {}
            Ok(Err(e)) => return Err(e),
            Err(WaitEnd::Interrupted | WaitEnd::TimedOut) => return Err(Errno::ERESTARTSYS),
        }
    }
}

fn duplicate(task: &Task, file: Arc<File>, arg: u64, cloexec: bool) -> Result<u64> {
    let limit = task.limit(Resource::Nofile);
    let min = arg as u32;
    if u64::from(min) >= limit {
        return Err(Errno::EINVAL);
    }
    let min = i32::try_from(min).map_err(|_| Errno::EINVAL)?;
    Ok(task.files().insert(file, cloexec, min, limit)? as u64)
}

fn fcntl(task: &Arc<Task>, fd: Fd, op: u32, arg: u64) -> Result<u64> {
    let files = task.files();
    let (file, cloexec) = files.get_with_flag(fd.0)?;
    // What also serves an O_PATH descriptor.
    match op {
        raw::F_DUPFD => return duplicate(task, file, arg, false),
        raw::F_DUPFD_CLOEXEC => return duplicate(task, file, arg, true),
        raw::F_GETFD => return Ok(u64::from(cloexec)),
        raw::F_SETFD => {
            files.set_cloexec(fd.0, arg as u32 & raw::FD_CLOEXEC != 0)?;
            return Ok(0);
        }
        raw::F_GETFL => return Ok(u64::from(file.flags().bits())),
        raw::F_DUPFD_QUERY => {
            let other = files.get(Fd(arg as i32).0)?;
            return Ok(u64::from(Arc::ptr_eq(&file, &other)));
        }
        _ if file.is_path_only() => return Err(Errno::EBADF),
        _ => {}
    }
    let space = || task.space();
    match op {
        raw::F_SETFL => set_status(task, &file, arg),
        raw::F_GETLK | raw::F_OFD_GETLK => get_lock(task, &file, op, UserPtr::new(UserAddr(arg))),
        F_SETLK | raw::F_OFD_SETLK => {
            let (locks, want) = set_lock(task, fd, op, UserPtr::new(UserAddr(arg)))?;
            try_lock(task, &locks, &want).map_err(|(e, _)| e)?;
            Ok(0)
        }
        F_CANCELLK => Err(Errno::EINVAL),
        F_SETOWN => {
            let id = arg as i32;
            let (kind, id) =
                if id < 0 { (F_OWNER_PGRP, id.checked_neg().ok_or(Errno::EINVAL)?) } else { (F_OWNER_PID, id) };
            set_owner(task, &file, kind, id)
        }
        raw::F_GETOWN => {
            let (kind, id) = owner_seen(task, &file);
            let id = if kind == F_OWNER_PGRP { -id } else { id };
            Ok(i64::from(id) as u64)
        }
        F_SETOWN_EX => {
            let owner: FOwnerEx = space()?.read(UserPtr::new(UserAddr(arg)))?;
            if !matches!(owner.kind, F_OWNER_TID | F_OWNER_PID | F_OWNER_PGRP) || owner.pid < 0 {
                return Err(Errno::EINVAL);
            }
            set_owner(task, &file, owner.kind, owner.pid)
        }
        raw::F_GETOWN_EX => {
            let (kind, pid) = owner_seen(task, &file);
            let answer = FOwnerEx { kind, pid };
            space()?.write(UserPtr::new(UserAddr(arg)), &answer).map(|()| 0)
        }
        raw::F_SETSIG => {
            let signal = i32::try_from(arg).ok().filter(|s| (0..=64).contains(s)).ok_or(Errno::EINVAL)?;
            file.owner().signal = signal;
            Ok(0)
        }
        F_GETSIG => Ok(file.owner().signal as u64),
        raw::F_SETLEASE => match arg as u32 {
            raw::F_UNLCK => Err(Errno::EAGAIN),
            raw::F_RDLCK | raw::F_WRLCK => Err(Errno::EAGAIN),
            _ => Err(Errno::EINVAL),
        },
        F_GETLEASE => Ok(u64::from(raw::F_UNLCK)),
        raw::F_NOTIFY => Err(Errno::EINVAL),
        raw::F_SETPIPE_SZ => {
            let pipe = pipe_of(&file).ok_or(Errno::EBADF)?;
            let size = usize::try_from(arg as u32).map_err(|_| Errno::EINVAL)?;
            pipe.set_capacity(size, task.credentials().has(Caps::SYS_RESOURCE)).map(|n| n as u64)
        }
        F_GETPIPE_SZ => pipe_of(&file).map(|p| p.capacity() as u64).ok_or(Errno::EBADF),
        raw::F_ADD_SEALS => {
            if !file.flags().writable() {
                return Err(Errno::EPERM);
            }
            file.ops().add_seals(arg as u32).map(|()| 0)
        }
        F_GET_SEALS => file.ops().seals().map(u64::from).ok_or(Errno::EINVAL),
        F_CREATED_QUERY => Ok(0),
        raw::F_GET_RW_HINT | raw::F_GET_FILE_RW_HINT => {
            let hint: u64 = u64::from(raw::RWF_WRITE_LIFE_NOT_SET);
            space()?.write(UserPtr::new(UserAddr(arg)), &hint).map(|()| 0)
        }
        raw::F_SET_RW_HINT | raw::F_SET_FILE_RW_HINT => {
            let hint: u64 = space()?.read(UserPtr::new(UserAddr(arg)))?;
            if hint > 5 { Err(Errno::EINVAL) } else { Ok(0) }
        }
        _ => Err(Errno::EINVAL),
    }
}

fn set_owner(task: &Arc<Task>, file: &File, kind: i32, id: i32) -> Result<u64> {
    let who = if id == 0 {
        None
    } else {
        let pid = task.pid_namespace().pid(id).ok_or(Errno::ESRCH)?;
        if !holds(&pid, kind) {
            return Err(Errno::ESRCH);
        }
        Some(pid as Arc<dyn Any + Send + Sync>)
    };
    let old = {
        let mut owner = file.owner();
        let signal = owner.signal;
        core::mem::replace(&mut *owner, FileOwner { kind, who, signal })
    };
    drop(old);
    Ok(0)
}

/// Whether `pid` is in use as what F_OWNER_* `kind` says.
fn holds(pid: &Pid, kind: i32) -> bool {
    match kind {
        F_OWNER_PGRP => pid.process_group().is_some(),
        _ => pid.task().is_some() || pid.group().is_some(),
    }
}

/// The owner's kind and its number as `task` sees it; 0 for one that it does not see or that is gone.
fn owner_seen(task: &Task, file: &File) -> (i32, i32) {
    let FileOwner { kind, who, .. } = file.owner().clone();
    let pid = who.and_then(|w| w.downcast::<Pid>().ok()).filter(|pid| holds(pid, kind));
    (kind, pid.map_or(0, |pid| pid.number_in(task.pid_namespace())))
}

fn set_status(task: &Arc<Task>, file: &File, arg: u64) -> Result<u64> {
    let value = OpenFlags::from_bits_retain(arg as u32);
    let mask = OpenFlags::APPEND | OpenFlags::NONBLOCK | OpenFlags::ASYNC | OpenFlags::DIRECT | OpenFlags::NOATIME;
    let now = file.flags();
    if value.contains(OpenFlags::NOATIME)
        && !now.contains(OpenFlags::NOATIME)
        && let Some(inode) = file.inode()
    {
        let (_, uid, _) = inode.access_attr()?;
        if !attr::owner_or_capable(&task.credentials(), uid) {
            return Err(Errno::EPERM);
        }
    }
    file.set_flags(value, mask);
    Ok(0)
}

// Record locks

/// What a lock call asks for.
enum Want {
    Set(RecordLock),
    Unset(LockOwner, u64, u64),
}

fn try_lock(task: &Task, locks: &FileLocks, want: &Want) -> Result<(), (Errno, Option<RecordLock>)> {
    match want {
        Want::Set(lock) => locks.set(&task.kernel().platform, *lock),
        Want::Unset(owner, start, end) => locks.unset(*owner, *start, *end).map_err(|e| (e, None)),
    }
}

/// The range of a struct flock: EINVAL, EOVERFLOW.
fn range(file: &File, l: &Flock) -> Result<(u64, u64)> {
    let base = match u32::try_from(l.whence) {
        Ok(raw::SEEK_SET) => 0,
        Ok(raw::SEEK_CUR) => i64::try_from(*file.position()).map_err(|_| Errno::EOVERFLOW)?,
        Ok(raw::SEEK_END) => file.stat()?.size,
        _ => return Err(Errno::EINVAL),
    };
    let start = base.checked_add(l.start).ok_or(Errno::EOVERFLOW)?;
    let (start, end) = match l.len {
        0 => (start, i64::MAX),
        len if len > 0 => (start, start.checked_add(len - 1).ok_or(Errno::EOVERFLOW)?),
        // A negative length counts the bytes before the start.
        len => (start.checked_add(len).ok_or(Errno::EINVAL)?, start.checked_sub(1).ok_or(Errno::EINVAL)?),
    };
    let start = u64::try_from(start).map_err(|_| Errno::EINVAL)?;
    let end = u64::try_from(end).map_err(|_| Errno::EINVAL)?.min(LOCK_END);
    Ok((start, end))
}

fn owner_of(task: &Task, file: &Arc<File>, op: u32, l: &Flock) -> Result<(LockOwner, i32)> {
    if matches!(op, raw::F_OFD_GETLK | raw::F_OFD_SETLK | raw::F_OFD_SETLKW) {
        if l.pid != 0 {
            return Err(Errno::EINVAL);
        }
        return Ok((LockOwner::file(file), -1));
    }
    // Readers of all namespaces ask for it.
    Ok((LockOwner::Table(task.files().id()), task.group().pid().global()))
}

fn lock_kind(l: &Flock) -> Result<Option<bool>> {
    match u32::try_from(l.kind) {
        Ok(raw::F_RDLCK) => Ok(Some(false)),
        Ok(raw::F_WRLCK) => Ok(Some(true)),
        Ok(raw::F_UNLCK) => Ok(None),
        _ => Err(Errno::EINVAL),
    }
}

fn set_lock(task: &Arc<Task>, fd: Fd, op: u32, ptr: UserPtr<Flock>) -> Result<(Arc<FileLocks>, Want)> {
    let file = super::place::file(task, fd)?;
    let l = task.space()?.read(ptr)?;
    let (start, end) = range(&file, &l)?;
    let kind = lock_kind(&l)?;
    match kind {
        Some(false) if !file.flags().readable() => return Err(Errno::EBADF),
        Some(true) if !file.flags().writable() => return Err(Errno::EBADF),
        _ => {}
    }
    let (owner, pid) = owner_of(task, &file, op, &l)?;
    let locks = lock::locks_of(&file)?;
    if let LockOwner::File(_) = owner {
        lock::mark_locked(&file);
    }
    let want = match kind {
        Some(exclusive) => Want::Set(RecordLock { owner, exclusive, start, end, pid }),
        None => Want::Unset(owner, start, end),
    };
    Ok((locks, want))
}

fn get_lock(task: &Arc<Task>, file: &Arc<File>, op: u32, ptr: UserPtr<Flock>) -> Result<u64> {
    let space = task.space()?;
    let mut l = space.read(ptr)?;
    let exclusive = lock_kind(&l)?.ok_or(Errno::EINVAL)?;
    let (start, end) = range(file, &l)?;
    let (owner, pid) = owner_of(task, file, op, &l)?;
    let want = RecordLock { owner, exclusive, start, end, pid };
    match lock::locks_of(file)?.conflict(&want) {
        None => l.kind = raw::F_UNLCK as i16,
        Some(other) => {
            l.kind = if other.exclusive { raw::F_WRLCK as i16 } else { raw::F_RDLCK as i16 };
            l.whence = 0;
            l.start = other.start as i64;
            l.len = if other.end >= LOCK_END { 0 } else { (other.end - other.start + 1) as i64 };
            l.pid = match other.pid {
                -1 => -1,
                global => task.kernel().root_pid_ns.pid(global).map_or(0, |p| p.number_in(task.pid_namespace())),
            };
        }
    }
    space.write(ptr, &l)?;
    Ok(0)
}

// flock

fn flock_once(task: &Arc<Task>, fd: Fd, operation: u32) -> Result<Option<Arc<FileLocks>>> {
    // Mandatory locks are no more; Linux takes the request and does nothing.
    if operation & raw::LOCK_MAND != 0 {
        return Ok(None);
    }
    let operation_kind = operation & !raw::LOCK_NB;
    if !matches!(operation_kind, raw::LOCK_SH | raw::LOCK_EX | raw::LOCK_UN) {
        return Err(Errno::EINVAL);
    }
    let file = super::place::file(task, fd)?;
    if operation_kind == raw::LOCK_UN {
        lock::locks_of(&file)?.funlock(&file);
        return Ok(None);
    }
    let exclusive = operation_kind == raw::LOCK_EX;
    let locks = lock::locks_of(&file)?;
    match locks.flock(&file, exclusive) {
        Ok(()) => Ok(None),
        Err(Errno::EAGAIN) if operation & raw::LOCK_NB == 0 => Ok(Some(locks)),
        Err(e) => Err(e),
    }
}

fn flock_fast(task: &Arc<Task>, fd: Fd, operation: u32) -> Result<Option<u64>> {
    Ok(flock_once(task, fd, operation)?.is_none().then_some(0))
}

async fn flock_slow(task: &Arc<Task>, fd: Fd, operation: u32) -> Result<u64> {
    let Some(locks) = flock_once(task, fd, operation)? else { return Ok(0) };
    let end = task
        .wait(vec![(locks.queue().clone(), Events::all())], None, || match flock_once(task, fd, operation) {
            Ok(None) => Some(Ok(0)),
            Ok(Some(_)) => None,
            Err(e) => Some(Err(e)),
        })
        .await;
    end.unwrap_or(Err(Errno::ERESTARTSYS))
}
