//! poll(2), ppoll(2), select(2), pselect6(2).
use std::sync::Arc;

use guest_abi::types::{PollFd, Timespec, Timeval};
use guest_abi::{UserAddr, UserPtr};

use crate::event::{Events, WaitEnd, WaitQueue};
use crate::mm::Charge;
use crate::platform::KernelMemory;
use crate::row;
use crate::signal::RestartBlock;
use crate::signal::mask::{end_temporary_mask, temporary_mask_from_user};
use crate::syscalls::table::Row;
use crate::task::Task;
use crate::task::limits::Resource;
use crate::time::Nanos;
use crate::vfs::File;
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(7, poll(fds: UserPtr<PollFd>, nfds: u32, timeout: i32), both poll_fast, poll, Full),
    row!(23, select(nfds: i32, readfds: UserAddr, writefds: UserAddr, exceptfds: UserAddr, timeout: UserPtr<Timeval>),
        slow select, Full),
    row!(270, pselect6(nfds: i32, readfds: UserAddr, writefds: UserAddr, exceptfds: UserAddr,
        timeout: UserPtr<Timespec>, sigmask: UserPtr<[u64; 2]>), slow pselect6, Full),
    row!(271, ppoll(fds: UserPtr<PollFd>, nfds: u32, timeout: UserPtr<Timespec>, sigmask: UserAddr, sigsetsize: u64),
        slow ppoll, Full),
];

/// A descriptor being watched: what is wanted of it, and what it answers.
struct Watched {
    file: Option<Arc<File>>,
    wanted: Events,
    got: Events,
}

impl Watched {
    /// Asks the object, and arms host readiness when it has nothing to tell yet.
    fn look(&mut self, task: &Task, arm: bool) -> bool {
        let Some(file) = &self.file else { return !self.got.is_empty() };
        self.got = file.ops().poll_as(file, task) & self.wanted;
        if !self.got.is_empty() {
            return true;
        }
        if arm {
            file.ops().arm(self.wanted);
            // What became true between the look and the arming is not reported by every host mechanism.
            self.got = file.ops().poll_as(file, task) & self.wanted;
        }
        !self.got.is_empty()
    }
}

fn look_all(task: &Task, set: &mut [Watched], arm: bool) -> usize {
    set.iter_mut().filter_map(|w| w.look(task, arm).then_some(())).count()
}

/// How a wait ended without anything ready.
enum End {
    Ready(usize),
    TimedOut,
    Interrupted,
}

/// Descriptors watched at no charge: the task's own covers them.
const WATCHED_FREE: usize = 64;
/// Bytes of a watched descriptor with its places in the wait queue and in the call's lists.
const WATCHED_COST: usize = 256;

/// Waits until something of `set` is ready. A deadline in the past only looks. ENOMEM for a set that the sandbox's memory cannot
/// hold while it waits.
async fn watch(task: &Task, set: &mut [Watched], deadline: Option<Nanos>) -> Result<End> {
    let ready = look_all(task, set, false);
    if ready > 0 {
        return Ok(End::Ready(ready));
    }
    if deadline.is_some_and(|at| at == 0 || at <= task.now()) {
        return Ok(End::TimedOut);
    }
    let cost = set.len().saturating_sub(WATCHED_FREE).saturating_mul(WATCHED_COST);
    let _charge = Charge::new(&task.kernel().platform, KernelMemory::Slab, cost)?;
    let queues: Vec<(Arc<WaitQueue>, Events)> =
        set.iter().filter_map(|w| Some((w.file.as_ref()?.ops().wait_queue_as(task)?, w.wanted))).collect();
    let end = task
        .wait(queues, deadline, || {
            let n = look_all(task, set, true);
            (n > 0).then_some(n)
        })
        .await;
    Ok(match end {
        Ok(n) => End::Ready(n),
        Err(WaitEnd::TimedOut) => End::TimedOut,
        Err(WaitEnd::Interrupted) => End::Interrupted,
    })
}

/// The monotonic deadline `ns` from now; 0 stands for a mere look.
fn deadline_after(task: &Task, ns: u64) -> Nanos {
    if ns == 0 { 0 } else { task.now().saturating_add(ns) }
}

/// A timespec as nanoseconds. EINVAL unless it is valid.
pub fn timespec_ns(t: Timespec) -> Result<u64> {
    let sec = u64::try_from(t.sec).map_err(|_| Errno::EINVAL)?;
    let nsec = u64::try_from(t.nsec).ok().filter(|&n| n < 1_000_000_000).ok_or(Errno::EINVAL)?;
    Ok(sec.saturating_mul(1_000_000_000).saturating_add(nsec))
}

/// Writes what is left of a timeout back, as select and ppoll do; a fault there is not reported (select(2)).
fn write_rest(task: &Task, timeout: UserPtr<Timespec>, deadline: Option<Nanos>) {
    if let Some(at) = deadline {
        let rest = at.saturating_sub(task.now());
        let _ = task.space().and_then(|s| s.write(timeout, &crate::fs::anon::timestamp(rest)));
    }
}

// poll

fn poll_set(task: &Task, fds: UserPtr<PollFd>, nfds: u32) -> Result<(Vec<PollFd>, Vec<Watched>)> {
    if u64::from(nfds) > task.limit(Resource::Nofile) {
        return Err(Errno::EINVAL);
    }
    let count = usize::try_from(nfds).map_err(|_| Errno::EINVAL)?;
    let entries = if count == 0 { Vec::new() } else { task.space()?.read_array(fds, count)? };
    let files = task.files();
    let set = entries
        .iter()
        .map(|e| {
            if e.fd < 0 {
                return Watched { file: None, wanted: Events::empty(), got: Events::empty() };
            }
            let wanted = Events::from_bits_retain(u32::from(e.events)) | Events::ERR | Events::HUP;
            match files.get(e.fd) {
                Ok(file) => Watched { file: Some(file), wanted, got: Events::empty() },
                Err(_) => Watched { file: None, wanted, got: Events::NVAL },
            }
        })
        .collect();
    Ok((entries, set))
}

/// Puts the answers into the program's array: only the revents fields are written.
fn poll_answer(task: &Task, fds: UserPtr<PollFd>, entries: &mut [PollFd], set: &[Watched]) -> Result<()> {
    for (entry, w) in entries.iter_mut().zip(set) {
        entry.revents = u16::try_from(w.got.bits() & 0xffff).unwrap_or(0);
    }
    let space = task.space()?;
    for (i, entry) in entries.iter().enumerate() {
        let at = fds.offset(i as u64).addr.wrapping_add(6);
        space.write_bytes(at, &entry.revents.to_ne_bytes())?;
    }
    Ok(())
}

fn poll_fast(task: &Arc<Task>, fds: UserPtr<PollFd>, nfds: u32, timeout: i32) -> Result<Option<u64>> {
    let (mut entries, mut set) = poll_set(task, fds, nfds)?;
    let ready = look_all(task, &mut set, false);
    if ready == 0 && timeout != 0 {
        return Ok(None);
    }
    poll_answer(task, fds, &mut entries, &set)?;
    Ok(Some(ready as u64))
}

async fn poll_until(task: &Arc<Task>, fds: UserPtr<PollFd>, nfds: u32, deadline: Option<Nanos>) -> Result<Option<u64>> {
    let (mut entries, mut set) = poll_set(task, fds, nfds)?;
    let n = match watch(task, &mut set, deadline).await? {
        End::Ready(n) => n,
        End::TimedOut => 0,
        End::Interrupted => return Ok(None),
    };
    poll_answer(task, fds, &mut entries, &set)?;
    Ok(Some(n as u64))
}

async fn poll(task: &Arc<Task>, fds: UserPtr<PollFd>, nfds: u32, timeout: i32) -> Result<u64> {
    let deadline = u64::try_from(timeout).ok().map(|ms| deadline_after(task, ms.saturating_mul(1_000_000)));
    poll_restartable(task, fds, nfds, deadline).await
}

async fn poll_restartable(task: &Arc<Task>, fds: UserPtr<PollFd>, nfds: u32, deadline: Option<Nanos>) -> Result<u64> {
    if let Some(n) = poll_until(task, fds, nfds, deadline).await? {
        return Ok(n);
    }
    let args = [fds.addr.0, u64::from(nfds), u64::from(deadline.is_some()), deadline.unwrap_or(0), 0, 0];
    task.signals.set_restart(RestartBlock { run: poll_again, args });
    Err(Errno::ERESTART_RESTARTBLOCK)
}

/// The form that a restart block names; boxed here, as a future that names itself has no size.
fn poll_again<'a>(
    task: &'a Arc<Task>,
    args: [u64; 6],
) -> core::pin::Pin<Box<dyn Future<Output = Result<u64>> + Send + 'a>> {
    let [fds, nfds, timed, deadline, _, _] = args;
    let nfds = u32::try_from(nfds).unwrap_or(0);
    let deadline = (timed != 0).then_some(deadline);
    Box::pin(poll_restartable(task, UserPtr::new(UserAddr(fds)), nfds, deadline))
}

async fn ppoll(
    task: &Arc<Task>,
    fds: UserPtr<PollFd>,
    nfds: u32,
    timeout: UserPtr<Timespec>,
    sigmask: UserAddr,
    sigsetsize: u64,
) -> Result<u64> {
    let deadline = if timeout.is_null() {
        None
    } else {
        let ns = timespec_ns(task.space()?.read(timeout)?)?;
        Some(deadline_after(task, ns))
    };
    temporary_mask_from_user(task, sigmask, sigsetsize)?;
    let result = poll_until(task, fds, nfds, deadline).await;
    write_rest(task, timeout, deadline);
    finish_interrupted(task, result, Errno::ERESTARTNOHAND)
}

/// Ends a call that may have replaced the mask: put back at once when it has an answer, by the handler's return otherwise.
pub fn finish_interrupted(task: &Arc<Task>, result: Result<Option<u64>>, code: Errno) -> Result<u64> {
    end_temporary_mask(task, matches!(result, Ok(None)));
    result?.ok_or(code)
}

// select

/// What makes a descriptor readable, writable and exceptional for select(2).
const SELECT_IN: Events = Events::READABLE.union(Events::RDBAND).union(Events::HUP).union(Events::ERR);
const SELECT_OUT: Events = Events::WRITABLE.union(Events::WRBAND).union(Events::ERR);
const SELECT_EX: Events = Events::PRI;

struct Sets {
    addrs: [UserAddr; 3],
    bits: [Vec<u8>; 3],
    bytes: usize,
}

fn select_sets(task: &Task, nfds: i32, addrs: [UserAddr; 3]) -> Result<(Sets, Vec<i32>, Vec<Watched>)> {
    let nfds = u64::try_from(nfds).map_err(|_| Errno::EINVAL)?;
    // As Linux does, what lies beyond the table's present size is not looked at.
    let end = task.files().end();
    let size = if end <= 64 { 64 } else { (end - 1).div_euclid(128).saturating_add(1).next_power_of_two() * 128 };
    let count = usize::try_from(nfds).map_err(|_| Errno::EINVAL)?.min(size);
    let bytes = count.div_ceil(64) * 8;
    let space = task.space()?;
    let mut bits: [Vec<u8>; 3] = Default::default();
    for (set, &addr) in bits.iter_mut().zip(&addrs) {
        *set = vec![0; bytes];
        if !addr.is_null() {
            space.read_bytes(addr, set)?;
        }
    }
    let files = task.files();
    let mut fds = Vec::new();
    let mut watched = Vec::new();
    for fd in 0..count {
        let has = |set: &Vec<u8>| set.get(fd / 8).is_some_and(|b| b & (1 << (fd % 8)) != 0);
        let mut wanted = Events::empty();
        for (set, events) in bits.iter().zip([SELECT_IN, SELECT_OUT, SELECT_EX]) {
            if has(set) {
                wanted |= events;
            }
        }
        if !wanted.is_empty() {
            let fd = i32::try_from(fd).map_err(|_| Errno::EBADF)?;
            let file = files.get(fd)?;
            fds.push(fd);
            watched.push(Watched { file: Some(file), wanted, got: Events::empty() });
        }
    }
    Ok((Sets { addrs, bits, bytes }, fds, watched))
}

fn select_answer(task: &Task, sets: &Sets, fds: &[i32], watched: &[Watched]) -> Result<u64> {
    let mut out: [Vec<u8>; 3] = [vec![0; sets.bytes], vec![0; sets.bytes], vec![0; sets.bytes]];
    let mut total = 0;
    for (&fd, w) in fds.iter().zip(watched) {
        let fd = usize::try_from(fd).unwrap_or(0);
        for ((old, new), events) in sets.bits.iter().zip(&mut out).zip([SELECT_IN, SELECT_OUT, SELECT_EX]) {
            let asked = old.get(fd / 8).is_some_and(|b| b & (1 << (fd % 8)) != 0);
            if asked
                && w.got.intersects(events)
                && let Some(b) = new.get_mut(fd / 8)
            {
                *b |= 1 << (fd % 8);
                total += 1;
            }
        }
    }
    let space = task.space()?;
    for (&addr, set) in sets.addrs.iter().zip(&out) {
        if !addr.is_null() {
            space.write_bytes(addr, set)?;
        }
    }
    Ok(total)
}

async fn select_until(
    task: &Arc<Task>,
    nfds: i32,
    addrs: [UserAddr; 3],
    deadline: Option<Nanos>,
) -> Result<Option<u64>> {
    let (sets, fds, mut watched) = select_sets(task, nfds, addrs)?;
    match watch(task, &mut watched, deadline).await? {
        End::Interrupted => Ok(None),
        End::Ready(_) | End::TimedOut => select_answer(task, &sets, &fds, &watched).map(Some),
    }
}

async fn select(
    task: &Arc<Task>,
    nfds: i32,
    readfds: UserAddr,
    writefds: UserAddr,
    exceptfds: UserAddr,
    timeout: UserPtr<Timeval>,
) -> Result<u64> {
    let deadline = if timeout.is_null() {
        None
    } else {
        let tv: Timeval = task.space()?.read(timeout)?;
        // Linux carries whole seconds of the microseconds field over before it judges.
        let sec = tv.sec.checked_add(tv.usec / 1_000_000).ok_or(Errno::EINVAL)?;
        let ns = timespec_ns(Timespec { sec, nsec: (tv.usec % 1_000_000) * 1000 })?;
        Some(deadline_after(task, ns))
    };
    let result = select_until(task, nfds, [readfds, writefds, exceptfds], deadline).await;
    if let Some(at) = deadline {
        let rest = crate::fs::anon::timestamp(at.saturating_sub(task.now()));
        let rest = Timeval { sec: rest.sec, usec: rest.nsec / 1000 };
        let _ = task.space().and_then(|s| s.write(timeout, &rest));
    }
    result?.ok_or(Errno::ERESTARTNOHAND)
}

async fn pselect6(
    task: &Arc<Task>,
    nfds: i32,
    readfds: UserAddr,
    writefds: UserAddr,
    exceptfds: UserAddr,
    timeout: UserPtr<Timespec>,
    sigmask: UserPtr<[u64; 2]>,
) -> Result<u64> {
    let [mask, size] = if sigmask.is_null() { [0, 0] } else { task.space()?.read(sigmask)? };
    let deadline = if timeout.is_null() {
        None
    } else {
        let ns = timespec_ns(task.space()?.read(timeout)?)?;
        Some(deadline_after(task, ns))
    };
    temporary_mask_from_user(task, UserAddr(mask), size)?;
    let result = select_until(task, nfds, [readfds, writefds, exceptfds], deadline).await;
    write_rest(task, timeout, deadline);
    finish_interrupted(task, result, Errno::ERESTARTNOHAND)
}
