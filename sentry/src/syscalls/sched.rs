//! Scheduling: sched_yield(2), priorities, policies, affinity, getcpu(2).
use std::sync::Arc;

use guest_abi::types::Timespec;
use guest_abi::{UserAddr, UserPtr};
use linux_raw_sys::general as raw;

use super::table::Row;
use crate::ns::user::Caps;
use crate::row;
use crate::sched::{CpuSet, Policy, current_cpu, yield_now};
use crate::task::limits::Resource;
use crate::task::{Task, ThreadGroup};
use crate::{Errno, Result};

/// System calls of this area.
pub const ROWS: &[Row] = &[
    row!(24, sched_yield(), both yield_fast, sched_yield, Full),
    row!(140, getpriority(which: i32, who: i32), fast getpriority, Full),
    row!(141, setpriority(which: i32, who: i32, niceval: i32), fast setpriority, Full),
    row!(142, sched_setparam(pid: i32, param: UserPtr<i32>), fast sched_setparam, Full),
    row!(143, sched_getparam(pid: i32, param: UserPtr<i32>), fast sched_getparam, Full),
    row!(144, sched_setscheduler(pid: i32, policy: i32, param: UserPtr<i32>), fast sched_setscheduler, Partial,
        "no SCHED_DEADLINE"),
    row!(145, sched_getscheduler(pid: i32), fast sched_getscheduler, Full),
    row!(146, sched_get_priority_max(policy: i32), fast priority_max, Full),
    row!(147, sched_get_priority_min(policy: i32), fast priority_min, Full),
    row!(148, sched_rr_get_interval(pid: i32, tp: UserPtr<Timespec>), fast rr_get_interval, Full),
    row!(203, sched_setaffinity(pid: i32, len: u32, mask: UserAddr), fast setaffinity, Full),
    row!(204, sched_getaffinity(pid: i32, len: u32, mask: UserAddr), fast getaffinity, Full),
    row!(309, getcpu(cpu: UserPtr<u32>, node: UserPtr<u32>, cache: UserAddr), fast getcpu, Full),
    row!(314, sched_setattr(pid: i32, attr: UserAddr, flags: u32), fast setattr, Partial,
        "no SCHED_DEADLINE, no utilization clamps"),
    row!(315, sched_getattr(pid: i32, attr: UserAddr, size: u32, flags: u32), fast getattr, Full),
];

fn yield_fast(task: &Arc<Task>) -> Result<Option<u64>> {
    // Nobody to yield to.
    Ok((!task.kernel().sched.somebody_waits()).then_some(0))
}

async fn sched_yield(task: &Arc<Task>) -> Result<u64> {
    task.sched.let_pass();
    yield_now().await;
    Ok(0)
}

fn find(task: &Arc<Task>, pid: i32) -> Result<Arc<Task>> {
    match pid {
        0 => Ok(task.clone()),
        p if p < 0 => Err(Errno::EINVAL),
        p => task.pid_namespace().task(p).ok_or(Errno::ESRCH),
    }
}

/// Calls `f` on every task that `which` and `who` name. ESRCH if there is none.
pub(super) fn for_each(task: &Arc<Task>, which: i32, who: i32, f: &mut dyn FnMut(&Arc<Task>)) -> Result<()> {
    let mut found = false;
    let mut all = |group: &Arc<ThreadGroup>, uid: Option<u32>| {
        for t in group.tasks() {
            if uid.is_none_or(|u| t.credentials().uid == u) {
                found = true;
                f(&t);
            }
        }
    };
    match which as u32 {
        raw::PRIO_PROCESS => {
            f(&find(task, who).map_err(|_| Errno::ESRCH)?);
            return Ok(());
        }
        raw::PRIO_PGRP => {
            let pg = if who == 0 {
                task.group().process_group()
            } else {
                task.pid_namespace().process_group(who).ok_or(Errno::ESRCH)?
            };
            for g in pg.members() {
                all(&g, None);
            }
        }
        raw::PRIO_USER => {
            let own = task.credentials();
            let uid = if who == 0 { own.uid } else { own.user_ns.user(who as u32).ok_or(Errno::ESRCH)? };
            let mut from = 1;
            loop {
                let page = task.pid_namespace().groups_from(from, 64);
                let Some(last) = page.last().map(|p| p.0) else { break };
                for (_, g) in page {
                    all(&g, Some(uid));
                }
                from = last.saturating_add(1);
            }
        }
        _ => return Err(Errno::EINVAL),
    }
    if found { Ok(()) } else { Err(Errno::ESRCH) }
}

fn getpriority(task: &Arc<Task>, which: i32, who: i32) -> Result<u64> {
    let mut best = 0;
    for_each(task, which, who, &mut |t| best = best.max(20 - t.sched.nice()))?;
    Ok(best as u64)
}

/// Whether `task` may schedule `target` at all; EPERM.
pub(super) fn may_schedule(task: &Task, target: &Task) -> Result<()> {
    let (own, other) = (task.credentials(), target.credentials());
    let able = own.euid == other.euid || own.euid == other.uid || own.has_in(&other.user_ns, Caps::SYS_NICE);
    if able { Ok(()) } else { Err(Errno::EPERM) }
}

/// Whether `task` may give `target` the nice value; EACCES.
fn may_nice(task: &Task, target: &Task, nice: i32) -> Result<()> {
    let allowed = i64::try_from(target.group().limit(Resource::Nice).cur).unwrap_or(i64::MAX);
    if nice >= target.sched.nice() || i64::from(20 - nice) <= allowed || task.credentials().has(Caps::SYS_NICE) {
        Ok(())
    } else {
        Err(Errno::EACCES)
    }
}

fn setpriority(task: &Arc<Task>, which: i32, who: i32, niceval: i32) -> Result<u64> {
    let nice = niceval.clamp(-20, 19);
    let mut result = Ok(0);
    for_each(task, which, who, &mut |t| match may_schedule(task, t).and_then(|()| may_nice(task, t, nice)) {
        Ok(()) => t.sched.set_nice(nice),
        Err(e) => result = Err(e),
    })?;
    result
}

const RESET_ON_FORK: u32 = raw::SCHED_RESET_ON_FORK;

fn is_realtime(policy: u32) -> bool {
    policy == raw::SCHED_FIFO || policy == raw::SCHED_RR
}

fn set_policy(task: &Arc<Task>, target: &Arc<Task>, new: Policy, nice: Option<i32>) -> Result<()> {
    if !matches!(new.number, raw::SCHED_NORMAL | raw::SCHED_FIFO | raw::SCHED_RR | raw::SCHED_BATCH | raw::SCHED_IDLE) {
        return Err(Errno::EINVAL);
    }
    if is_realtime(new.number) != (1..=99).contains(&new.priority) || new.priority < 0 || new.priority > 99 {
        return Err(Errno::EINVAL);
    }
    may_schedule(task, target)?;
    let old = target.sched.policy();
    if !task.credentials().has(Caps::SYS_NICE) {
        if is_realtime(new.number) {
            let limit = target.group().limit(Resource::Rtprio).cur;
            let raises = u64::try_from(new.priority).is_ok_and(|p| p > limit) && new.priority > old.priority;
            if raises || (new.number != old.number && limit == 0) {
                return Err(Errno::EPERM);
            }
        }
        if old.reset_on_fork && !new.reset_on_fork {
            return Err(Errno::EPERM);
        }
        if let Some(nice) = nice {
            may_nice(task, target, nice).map_err(|_| Errno::EPERM)?;
        }
    }
    target.sched.set_policy(new);
    if let Some(nice) = nice.filter(|_| !is_realtime(new.number)) {
        target.sched.set_nice(nice);
    }
    task.kernel().sched.requeue(&target.sched);
    Ok(())
}

fn sched_setscheduler(task: &Arc<Task>, pid: i32, policy: i32, param: UserPtr<i32>) -> Result<u64> {
    if policy < 0 || pid < 0 || param.is_null() {
        return Err(Errno::EINVAL);
    }
    let priority = task.space()?.read(param)?;
    let target = find(task, pid)?;
    let policy = policy as u32;
    let new = Policy { number: policy & !RESET_ON_FORK, priority, reset_on_fork: policy & RESET_ON_FORK != 0 };
    set_policy(task, &target, new, None)?;
    Ok(0)
}

fn sched_setparam(task: &Arc<Task>, pid: i32, param: UserPtr<i32>) -> Result<u64> {
    if pid < 0 || param.is_null() {
        return Err(Errno::EINVAL);
    }
    let priority = task.space()?.read(param)?;
    let target = find(task, pid)?;
    set_policy(task, &target, Policy { priority, ..target.sched.policy() }, None)?;
    Ok(0)
}

fn sched_getparam(task: &Arc<Task>, pid: i32, param: UserPtr<i32>) -> Result<u64> {
    if param.is_null() {
        return Err(Errno::EINVAL);
    }
    let target = find(task, pid)?;
    task.space()?.write(param, &target.sched.policy().priority)?;
    Ok(0)
}

fn sched_getscheduler(task: &Arc<Task>, pid: i32) -> Result<u64> {
    let p = find(task, pid)?.sched.policy();
    Ok((p.number | if p.reset_on_fork { RESET_ON_FORK } else { 0 }).into())
}

fn priority_max(_task: &Arc<Task>, policy: i32) -> Result<u64> {
    match policy {
        1 | 2 => Ok(99),
        0 | 3 | 5 | 6 | 7 => Ok(0),
        _ => Err(Errno::EINVAL),
    }
}

fn priority_min(_task: &Arc<Task>, policy: i32) -> Result<u64> {
    match policy {
        1 | 2 => Ok(1),
        0 | 3 | 5 | 6 | 7 => Ok(0),
        _ => Err(Errno::EINVAL),
    }
}

fn rr_get_interval(task: &Arc<Task>, pid: i32, tp: UserPtr<Timespec>) -> Result<u64> {
    let target = find(task, pid)?;
    let nsec = match target.sched.policy().number {
        raw::SCHED_RR => 100_000_000,
        raw::SCHED_FIFO => 0,
        _ => 4_000_000,
    };
    task.space()?.write(tp, &Timespec { sec: 0, nsec })?;
    Ok(0)
}

fn setaffinity(task: &Arc<Task>, pid: i32, len: u32, mask: UserAddr) -> Result<u64> {
    let mut bytes = [0u8; 128];
    let n = (len as usize).min(bytes.len());
    task.space()?.read_bytes(mask, bytes.get_mut(..n).ok_or(Errno::EINVAL)?)?;
    let target = find(task, pid).map_err(|_| Errno::ESRCH)?;
    may_schedule(task, &target)?;
    let mut set = CpuSet::first(0);
    for (word, chunk) in set.0.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = chunk.try_into().map_or(0, u64::from_le_bytes);
    }
    let cpus = task.kernel().sched.cpus();
    let set = set.intersection(&CpuSet::first(cpus));
    if set.is_empty() {
        return Err(Errno::EINVAL);
    }
    target.sched.set_affinity(set, cpus);
    task.kernel().sched.requeue(&target.sched);
    // If it runs where it may no longer, its next look moves it.
    target.kick();
    Ok(0)
}

fn getaffinity(task: &Arc<Task>, pid: i32, len: u32, mask: UserAddr) -> Result<u64> {
    let cpus = task.kernel().sched.cpus();
    let len = len as usize;
    if len.saturating_mul(8) < cpus || !len.is_multiple_of(8) {
        return Err(Errno::EINVAL);
    }
    let target = find(task, pid).map_err(|_| Errno::ESRCH)?;
    let set = target.sched.affinity();
    let n = len.min(128);
    let bytes: Vec<u8> = set.0.iter().flat_map(|w| w.to_le_bytes()).take(n).collect();
    task.space()?.write_bytes(mask, &bytes)?;
    Ok(n as u64)
}

fn getcpu(task: &Arc<Task>, cpu: UserPtr<u32>, node: UserPtr<u32>, _cache: UserAddr) -> Result<u64> {
    let space = task.space()?;
    if !cpu.is_null() {
        space.write(cpu, &(current_cpu().unwrap_or(0) as u32))?;
    }
    if !node.is_null() {
        space.write(node, &0u32)?;
    }
    Ok(0)
}

/// SCHED_ATTR_SIZE_VER0 and VER1.
const ATTR_V0: usize = 48;
const ATTR_V1: usize = 56;
const ATTR_FLAG_RESET: u64 = 1;
const ATTR_FLAG_KEEP: u64 = 0x18;

fn setattr(task: &Arc<Task>, pid: i32, attr: UserAddr, flags: u32) -> Result<u64> {
    if attr.is_null() || pid < 0 || flags != 0 {
        return Err(Errno::EINVAL);
    }
    let space = task.space()?;
    let size: u32 = space.read(UserPtr::new(attr))?;
    let size = if size == 0 { ATTR_V0 } else { size as usize };
    if !(ATTR_V0..=4096).contains(&size) {
        // The kernel says which size it knows.
        let _ = space.write(UserPtr::new(attr), &(ATTR_V1 as u32));
        return Err(Errno::E2BIG);
    }
    let mut bytes = vec![0u8; size.max(ATTR_V1)];
    space.read_bytes(attr, bytes.get_mut(..size).ok_or(Errno::EINVAL)?)?;
    if bytes.iter().skip(ATTR_V1).any(|&b| b != 0) {
        let _ = space.write(UserPtr::new(attr), &(ATTR_V1 as u32));
        return Err(Errno::E2BIG);
    }
    let word = |at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes);
    let (policy, nice, priority) = (word(4), word(16) as i32, word(20));
    let bits = u64::from(word(8)) | u64::from(word(12)) << 32;
    if bits & !(ATTR_FLAG_RESET | ATTR_FLAG_KEEP) != 0 {
        return Err(Errno::EINVAL);
    }
    let target = find(task, pid)?;
    let old = target.sched.policy();
    let new = Policy {
        number: if bits & 8 != 0 { old.number } else { policy },
        priority: if bits & 16 != 0 { old.priority } else { i32::try_from(priority).map_err(|_| Errno::EINVAL)? },
        reset_on_fork: bits & ATTR_FLAG_RESET != 0,
    };
    let nice = (bits & 16 == 0).then(|| nice.clamp(-20, 19));
    set_policy(task, &target, new, nice)?;
    Ok(0)
}

fn getattr(task: &Arc<Task>, pid: i32, attr: UserAddr, size: u32, flags: u32) -> Result<u64> {
    let size = size as usize;
    if attr.is_null() || pid < 0 || flags != 0 || !(ATTR_V0..=4096).contains(&size) {
        return Err(Errno::EINVAL);
    }
    let target = find(task, pid)?;
    let p = target.sched.policy();
    let n = size.min(ATTR_V1);
    let mut out = Vec::with_capacity(ATTR_V1);
    out.extend_from_slice(&(n as u32).to_le_bytes());
    out.extend_from_slice(&p.number.to_le_bytes());
    out.extend_from_slice(&u64::from(p.reset_on_fork).to_le_bytes());
    let nice = if is_realtime(p.number) { 0 } else { target.sched.nice() };
    out.extend_from_slice(&nice.to_le_bytes());
    out.extend_from_slice(&p.priority.to_le_bytes());
    out.resize(n, 0);
    task.space()?.write_bytes(attr, &out)?;
    Ok(0)
}
