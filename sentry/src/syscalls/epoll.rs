//! epoll_create(2), epoll_ctl(2), epoll_wait(2) and their variants.
use std::sync::Arc;

use guest_abi::types::Timespec;
use guest_abi::{UserAddr, UserPtr};
use linux_raw_sys::general as raw;

use super::args::Fd;
use super::poll::{finish_interrupted, timespec_ns};
use crate::event::{Events, WaitEnd};
use crate::fs::epoll::Epoll;
use crate::row;
use crate::signal::mask::temporary_mask_from_user;
use crate::syscalls::table::Row;
use crate::task::Task;
use crate::task::limits::Resource;
use crate::time::Nanos;
use crate::vfs::File;
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(213, epoll_create(size: i32), fast epoll_create, Full),
    row!(291, epoll_create1(flags: u32), fast epoll_create1, Full),
    row!(233, epoll_ctl(epfd: Fd, op: i32, fd: Fd, event: UserPtr<[u8; 12]>), fast epoll_ctl, Full),
    row!(232, epoll_wait(epfd: Fd, events: UserAddr, maxevents: i32, timeout: i32), both wait_fast, epoll_wait, Full),
    row!(281, epoll_pwait(epfd: Fd, events: UserAddr, maxevents: i32, timeout: i32, sigmask: UserAddr,
        sigsetsize: u64), slow epoll_pwait, Full),
    row!(441, epoll_pwait2(epfd: Fd, events: UserAddr, maxevents: i32, timeout: UserPtr<Timespec>,
        sigmask: UserAddr, sigsetsize: u64), slow epoll_pwait2, Full),
];

/// sizeof(struct epoll_event), which x86-64 packs.
const EVENT_LEN: usize = 12;
const MAX_EVENTS: i32 = i32::MAX / 12;

fn epoll_create(task: &Arc<Task>, size: i32) -> Result<u64> {
    if size <= 0 {
        return Err(Errno::EINVAL);
    }
    epoll_create1(task, 0)
}

fn epoll_create1(task: &Arc<Task>, flags: u32) -> Result<u64> {
    if flags & !raw::O_CLOEXEC != 0 {
        return Err(Errno::EINVAL);
    }
    let limit = task.limit(Resource::Nofile);
    let fd = task.files().insert(Epoll::open(task), flags & raw::O_CLOEXEC != 0, 0, limit)?;
    Ok(u64::try_from(fd).unwrap_or_default())
}

fn epoll_ctl(task: &Arc<Task>, epfd: Fd, op: i32, fd: Fd, event: UserPtr<[u8; 12]>) -> Result<u64> {
    const ADD: i32 = raw::EPOLL_CTL_ADD as i32;
    const DEL: i32 = raw::EPOLL_CTL_DEL as i32;
    const MOD: i32 = raw::EPOLL_CTL_MOD as i32;
    let (events, data) = if op == DEL {
        (0, 0)
    } else {
        let bytes: [u8; EVENT_LEN] = task.space()?.read(event)?;
        let [e0, e1, e2, e3, d @ ..] = bytes;
        (u32::from_ne_bytes([e0, e1, e2, e3]), u64::from_ne_bytes(d))
    };
    let files = task.files();
    let epoll_file = files.get(epfd.0)?;
    let file = files.get(fd.0)?;
    if file.ops().wait_queue().is_none() {
        return Err(Errno::EPERM);
    }
    let epoll = epoll_file.downcast::<Epoll>().ok_or(Errno::EINVAL)?;
    if Arc::ptr_eq(&epoll_file, &file) {
        return Err(Errno::EINVAL);
    }
    match op {
        ADD => epoll.add(&**task, fd.0, &file, events, data)?,
        MOD => epoll.modify(&**task, fd.0, &file, events, data)?,
        DEL => epoll.remove(fd.0, &file)?,
        _ => return Err(Errno::EINVAL),
    }
    Ok(0)
}

/// The instance behind a descriptor, after the checks that all waits share.
fn instance(task: &Task, epfd: Fd, maxevents: i32) -> Result<(Arc<File>, usize)> {
    if maxevents <= 0 || maxevents > MAX_EVENTS {
        return Err(Errno::EINVAL);
    }
    let file = task.files().get(epfd.0)?;
    if file.downcast::<Epoll>().is_none() {
        return Err(Errno::EINVAL);
    }
    Ok((file, usize::try_from(maxevents).map_err(|_| Errno::EINVAL)?))
}

fn put_events(task: &Task, events: UserAddr, got: &[(u32, u64)]) -> Result<u64> {
    let mut bytes = Vec::with_capacity(got.len() * EVENT_LEN);
    for (events, data) in got {
        bytes.extend_from_slice(&events.to_ne_bytes());
        bytes.extend_from_slice(&data.to_ne_bytes());
    }
    task.space()?.write_bytes(events, &bytes)?;
    Ok(got.len() as u64)
}

fn wait_fast(task: &Arc<Task>, epfd: Fd, events: UserAddr, maxevents: i32, timeout: i32) -> Result<Option<u64>> {
    let (file, max) = instance(task, epfd, maxevents)?;
    let Some(epoll) = file.downcast::<Epoll>() else { return Err(Errno::EINVAL) };
    let got = epoll.collect(&**task, max);
    if got.is_empty() {
        return Ok((timeout == 0).then_some(0));
    }
    epoll.pass_on();
    put_events(task, events, &got).map(Some)
}

/// `timeout` in ns, None for ever. Gives None when interrupted.
async fn wait(
    task: &Arc<Task>,
    epfd: Fd,
    events: UserAddr,
    maxevents: i32,
    timeout: Option<u64>,
) -> Result<Option<u64>> {
    let (file, max) = instance(task, epfd, maxevents)?;
    let Some(epoll) = file.downcast::<Epoll>() else { return Err(Errno::EINVAL) };
    let mut got = epoll.collect(&**task, max);
    if got.is_empty() && timeout != Some(0) {
        let deadline: Option<Nanos> = timeout.map(|ns| task.now().saturating_add(ns));
        let queue = (epoll.queue().clone(), Events::READABLE);
        let end = task
            .wait_exclusive(queue, deadline, || {
                let got = epoll.collect(&**task, max);
                (!got.is_empty()).then_some(got)
            })
            .await;
        match end {
            Ok(found) => got = found,
            Err(WaitEnd::TimedOut) => {}
            Err(WaitEnd::Interrupted) => return Ok(None),
        }
    }
    epoll.pass_on();
    put_events(task, events, &got).map(Some)
}

fn milliseconds(timeout: i32) -> Option<u64> {
    u64::try_from(timeout).ok().map(|ms| ms.saturating_mul(1_000_000))
}

async fn epoll_wait(task: &Arc<Task>, epfd: Fd, events: UserAddr, maxevents: i32, timeout: i32) -> Result<u64> {
    wait(task, epfd, events, maxevents, milliseconds(timeout)).await?.ok_or(Errno::EINTR)
}

async fn epoll_pwait(
    task: &Arc<Task>,
    epfd: Fd,
    events: UserAddr,
    maxevents: i32,
    timeout: i32,
    sigmask: UserAddr,
    sigsetsize: u64,
) -> Result<u64> {
    temporary_mask_from_user(task, sigmask, sigsetsize)?;
    let result = wait(task, epfd, events, maxevents, milliseconds(timeout)).await;
    finish_interrupted(task, result, Errno::EINTR)
}

async fn epoll_pwait2(
    task: &Arc<Task>,
    epfd: Fd,
    events: UserAddr,
    maxevents: i32,
    timeout: UserPtr<Timespec>,
    sigmask: UserAddr,
    sigsetsize: u64,
) -> Result<u64> {
    let ns = if timeout.is_null() { None } else { Some(timespec_ns(task.space()?.read(timeout)?)?) };
    temporary_mask_from_user(task, sigmask, sigsetsize)?;
    let result = wait(task, epfd, events, maxevents, ns).await;
    finish_interrupted(task, result, Errno::EINTR)
}
