//! Limits and accounting: getrlimit(2), prlimit(2), getrusage(2), times(2).
use std::sync::Arc;

use guest_abi::types::Rlimit;
use guest_abi::{UserAddr, UserPtr};

use super::table::Row;
use crate::ns::user::Caps;
use crate::row;
use crate::sched::UsageValue;
use crate::task::Task;
use crate::task::limits::Resource;
use crate::{Errno, Result};

/// System calls of this area.
pub const ROWS: &[Row] = &[
    row!(97, getrlimit(resource: u32, rlim: UserPtr<Rlimit>), fast getrlimit, Full),
    row!(98, getrusage(who: i32, usage: UserAddr), fast getrusage, Full),
    row!(100, times(buf: UserAddr), fast times, Full),
    row!(160, setrlimit(resource: u32, rlim: UserPtr<Rlimit>), fast setrlimit, Full),
    row!(302, prlimit64(pid: i32, resource: u32, new: UserPtr<Rlimit>, old: UserPtr<Rlimit>), fast prlimit64, Full),
];

/// fs.nr_open: no process may have more descriptors.
const NR_OPEN: u64 = 1 << 20;
/// Nanoseconds of a clock tick (USER_HZ).
const TICK: u64 = 10_000_000;

/// struct rusage.
pub fn rusage(u: &UsageValue) -> [i64; 18] {
    let n = |v: u64| i64::try_from(v).unwrap_or(i64::MAX);
    let time = |ns: u64| (n(ns / 1_000_000_000), n(ns % 1_000_000_000 / 1000));
    let (user, system) = (time(u.user), time(u.system));
    let mut r = [0; 18];
    r[0] = user.0;
    r[1] = user.1;
    r[2] = system.0;
    r[3] = system.1;
    r[4] = n(u.max_rss);
    r[8] = n(u.minor_faults);
    r[9] = n(u.major_faults);
    r[16] = n(u.voluntary_switches);
    r[17] = n(u.involuntary_switches);
    r
}

fn getrlimit(task: &Arc<Task>, resource: u32, rlim: UserPtr<Rlimit>) -> Result<u64> {
    let value = task.group().limit(Resource::from_number(resource)?);
    task.space()?.write(rlim, &value)?;
    Ok(0)
}

fn change(task: &Task, target: &Task, which: Resource, new: Rlimit) -> Result<()> {
    if new.cur > new.max {
        return Err(Errno::EINVAL);
    }
    if which == Resource::Nofile && new.max > NR_OPEN {
        return Err(Errno::EPERM);
    }
    let old = target.group().limit(which);
    if new.max > old.max && !task.credentials().has(Caps::SYS_RESOURCE) {
        return Err(Errno::EPERM);
    }
    target.group().set_limit(which, new);
    if matches!(which, Resource::As | Resource::Data | Resource::Stack | Resource::Memlock)
        && let Ok(space) = target.space()
    {
        space.set_limits(crate::loader::space_limits(target));
    }
    if which == Resource::Cpu {
        crate::timers::cpu::watch_limit(target.group());
    }
    Ok(())
}

fn setrlimit(task: &Arc<Task>, resource: u32, rlim: UserPtr<Rlimit>) -> Result<u64> {
    let new = task.space()?.read(rlim)?;
    change(task, task, Resource::from_number(resource)?, new)?;
    Ok(0)
}

fn prlimit64(task: &Arc<Task>, pid: i32, resource: u32, new: UserPtr<Rlimit>, old: UserPtr<Rlimit>) -> Result<u64> {
    let space = task.space()?;
    let wanted = if new.is_null() { None } else { Some(space.read(new)?) };
    let target = if pid == 0 { task.clone() } else { task.pid_namespace().task(pid).ok_or(Errno::ESRCH)? };
    if !Arc::ptr_eq(target.group(), task.group()) {
        let (own, other) = (task.credentials(), target.credentials());
        let same = [other.uid, other.euid, other.suid].iter().all(|&u| u == own.uid)
            && [other.gid, other.egid, other.sgid].iter().all(|&g| g == own.gid);
        if !same && !own.has_in(&other.user_ns, Caps::SYS_RESOURCE) {
            return Err(Errno::EPERM);
        }
    }
    let which = Resource::from_number(resource)?;
    let before = target.group().limit(which);
    if let Some(new) = wanted {
        change(task, &target, which, new)?;
    }
    if !old.is_null() {
        space.write(old, &before)?;
    }
    Ok(0)
}

fn getrusage(task: &Arc<Task>, who: i32, usage: UserAddr) -> Result<u64> {
    let group = task.group();
    let resident = || task.space().map_or(0, |s| s.sizes().1 / 1024);
    let value = match who {
        0 => {
            let mut v = group.usage();
            v.max_rss = v.max_rss.max(resident());
            v
        }
        -1 => group.children_usage.get(),
        1 => {
            let mut v = task.sched.clock.reading(task.now());
            v.max_rss = v.max_rss.max(resident());
            v
        }
        _ => return Err(Errno::EINVAL),
    };
    task.space()?.write(UserPtr::new(usage), &rusage(&value))?;
    Ok(0)
}

fn times(task: &Arc<Task>, buf: UserAddr) -> Result<u64> {
    if !buf.is_null() {
        let own = task.group().usage();
        let children = task.group().children_usage.get();
        let words = [own.user, own.system, children.user, children.system].map(|ns| ns / TICK);
        task.space()?.write(UserPtr::new(buf), &words)?;
    }
    Ok(task.now() / TICK)
}
