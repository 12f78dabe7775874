//! Who a process is: process ids, process groups, sessions, user and group ids, capabilities.
use std::sync::Arc;

use guest_abi::{UserAddr, UserPtr};

use super::table::Row;
use crate::ns::user::{Caps, Credentials, Groups};
use crate::ns::user_namespace::IdKind;
use crate::row;
use crate::task::Task;
use crate::{Errno, Result};

/// System calls of this area.
pub const ROWS: &[Row] = &[
    row!(39, getpid(), fast getpid, Full),
    row!(102, getuid(), fast getuid, Full),
    row!(104, getgid(), fast getgid, Full),
    row!(105, setuid(uid: u32), fast setuid, Full),
    row!(106, setgid(gid: u32), fast setgid, Full),
    row!(107, geteuid(), fast geteuid, Full),
    row!(108, getegid(), fast getegid, Full),
    row!(109, setpgid(pid: i32, pgid: i32), fast setpgid, Full),
    row!(110, getppid(), fast getppid, Full),
    row!(111, getpgrp(), fast getpgrp, Full),
    row!(112, setsid(), fast setsid, Full),
    row!(113, setreuid(ruid: u32, euid: u32), fast setreuid, Full),
    row!(114, setregid(rgid: u32, egid: u32), fast setregid, Full),
    row!(115, getgroups(size: i32, list: UserAddr), fast getgroups, Full),
    row!(116, setgroups(size: i32, list: UserAddr), fast setgroups, Full),
    row!(117, setresuid(ruid: u32, euid: u32, suid: u32), fast setresuid, Full),
    row!(118, getresuid(ruid: UserPtr<u32>, euid: UserPtr<u32>, suid: UserPtr<u32>), fast getresuid, Full),
    row!(119, setresgid(rgid: u32, egid: u32, sgid: u32), fast setresgid, Full),
    row!(120, getresgid(rgid: UserPtr<u32>, egid: UserPtr<u32>, sgid: UserPtr<u32>), fast getresgid, Full),
    row!(121, getpgid(pid: i32), fast getpgid, Full),
    row!(122, setfsuid(uid: u32), fast setfsuid, Full),
    row!(123, setfsgid(gid: u32), fast setfsgid, Full),
    row!(124, getsid(pid: i32), fast getsid, Full),
    row!(125, capget(header: UserPtr<[u32; 2]>, data: UserAddr), fast capget, Full),
    row!(126, capset(header: UserPtr<[u32; 2]>, data: UserAddr), fast capset, Full),
];

fn getpid(task: &Arc<Task>) -> Result<u64> {
    Ok(task.group().tgid() as u64)
}

fn getppid(task: &Arc<Task>) -> Result<u64> {
    Ok(task.group().parent_number_in(task.pid_namespace()) as u64)
}

fn getpgrp(task: &Arc<Task>) -> Result<u64> {
    getpgid(task, 0)
}

fn getpgid(task: &Arc<Task>, pid: i32) -> Result<u64> {
    let ns = task.pid_namespace();
    let group = if pid == 0 { task.group().clone() } else { ns.task(pid).ok_or(Errno::ESRCH)?.group().clone() };
    Ok(group.process_group().pid().number_in(ns) as u64)
}

fn getsid(task: &Arc<Task>, pid: i32) -> Result<u64> {
    let ns = task.pid_namespace();
    let group = if pid == 0 { task.group().clone() } else { ns.task(pid).ok_or(Errno::ESRCH)?.group().clone() };
    Ok(group.session().pid().number_in(ns) as u64)
}

fn setpgid(task: &Arc<Task>, pid: i32, pgid: i32) -> Result<u64> {
    if pid < 0 {
        return Err(if pgid < 0 { Errno::EINVAL } else { Errno::ESRCH });
    }
    task.setpgid(pid, pgid)?;
    Ok(0)
}

fn setsid(task: &Arc<Task>) -> Result<u64> {
    task.setsid().map(|n| n as u64)
}

fn getuid(task: &Arc<Task>) -> Result<u64> {
    let c = task.credentials();
    Ok(c.user_ns.shown_user(c.uid).into())
}

fn geteuid(task: &Arc<Task>) -> Result<u64> {
    let c = task.credentials();
    Ok(c.user_ns.shown_user(c.euid).into())
}

fn getgid(task: &Arc<Task>) -> Result<u64> {
    let c = task.credentials();
    Ok(c.user_ns.shown_group(c.gid).into())
}

fn getegid(task: &Arc<Task>) -> Result<u64> {
    let c = task.credentials();
    Ok(c.user_ns.shown_group(c.egid).into())
}

/// Ids of a call, as the caller's user namespace has them; -1 stays. EINVAL for one that means nobody there.
fn known<const N: usize>(task: &Task, kind: IdKind, ids: [u32; N]) -> Result<[u32; N]> {
    let ns = task.credentials().user_ns.clone();
    let mut out = ids;
    for id in out.iter_mut().filter(|id| **id != u32::MAX) {
        *id = ns.to_initial(kind, *id).ok_or(Errno::EINVAL)?;
    }
    Ok(out)
}

fn setuid(task: &Arc<Task>, uid: u32) -> Result<u64> {
    task.setuid(known(task, IdKind::User, [uid])?[0]).map(|()| 0)
}

fn setgid(task: &Arc<Task>, gid: u32) -> Result<u64> {
    task.setgid(known(task, IdKind::Group, [gid])?[0]).map(|()| 0)
}

fn setreuid(task: &Arc<Task>, ruid: u32, euid: u32) -> Result<u64> {
    let [ruid, euid] = known(task, IdKind::User, [ruid, euid])?;
    task.setreuid(ruid, euid).map(|()| 0)
}

fn setregid(task: &Arc<Task>, rgid: u32, egid: u32) -> Result<u64> {
    let [rgid, egid] = known(task, IdKind::Group, [rgid, egid])?;
    task.setregid(rgid, egid).map(|()| 0)
}

fn setresuid(task: &Arc<Task>, ruid: u32, euid: u32, suid: u32) -> Result<u64> {
    task.setresuid(known(task, IdKind::User, [ruid, euid, suid])?).map(|()| 0)
}

fn setresgid(task: &Arc<Task>, rgid: u32, egid: u32, sgid: u32) -> Result<u64> {
    task.setresgid(known(task, IdKind::Group, [rgid, egid, sgid])?).map(|()| 0)
}

fn write3(task: &Arc<Task>, to: [UserPtr<u32>; 3], values: [u32; 3]) -> Result<u64> {
    let space = task.space()?;
    for (ptr, v) in to.into_iter().zip(values) {
        space.write(ptr, &v)?;
    }
    Ok(0)
}

fn getresuid(task: &Arc<Task>, r: UserPtr<u32>, e: UserPtr<u32>, s: UserPtr<u32>) -> Result<u64> {
    let c = task.credentials();
    write3(task, [r, e, s], [c.uid, c.euid, c.suid].map(|id| c.user_ns.shown_user(id)))
}

fn getresgid(task: &Arc<Task>, r: UserPtr<u32>, e: UserPtr<u32>, s: UserPtr<u32>) -> Result<u64> {
    let c = task.credentials();
    write3(task, [r, e, s], [c.gid, c.egid, c.sgid].map(|id| c.user_ns.shown_group(id)))
}

fn setfsuid(task: &Arc<Task>, uid: u32) -> Result<u64> {
    let ns = task.credentials().user_ns.clone();
    // One that means nobody only asks.
    Ok(ns.shown_user(task.setfsuid(ns.user(uid).unwrap_or(u32::MAX))).into())
}

fn setfsgid(task: &Arc<Task>, gid: u32) -> Result<u64> {
    let ns = task.credentials().user_ns.clone();
    Ok(ns.shown_group(task.setfsgid(ns.group(gid).unwrap_or(u32::MAX))).into())
}

/// NGROUPS_MAX.
const NGROUPS_MAX: usize = 65536;

fn getgroups(task: &Arc<Task>, size: i32, list: UserAddr) -> Result<u64> {
    let size = usize::try_from(size).map_err(|_| Errno::EINVAL)?;
    let c = task.credentials();
    if size != 0 {
        if c.groups.len() > size {
            return Err(Errno::EINVAL);
        }
        let bytes: Vec<u8> = c.groups.iter().flat_map(|&g| c.user_ns.shown_group(g).to_le_bytes()).collect();
        task.space()?.write_bytes(list, &bytes)?;
    }
    Ok(c.groups.len() as u64)
}

fn setgroups(task: &Arc<Task>, size: i32, list: UserAddr) -> Result<u64> {
    let user_ns = task.credentials().user_ns.clone();
    if !task.credentials().has_in_own(Caps::SETGID) || !user_ns.may_set_groups() {
        return Err(Errno::EPERM);
    }
    let size = usize::try_from(size).ok().filter(|&n| n <= NGROUPS_MAX).ok_or(Errno::EINVAL)?;
    let groups = task.space()?.read_array(UserPtr::<u32>::new(list), size)?;
    let groups: Option<Vec<u32>> = groups.into_iter().map(|g| user_ns.group(g)).collect();
    let groups = groups.ok_or(Errno::EINVAL)?;
    let groups = Groups::charged(&task.kernel().platform, groups)?;
    task.change_credentials(|c| {
        c.groups = groups;
        Ok(())
    })?;
    Ok(0)
}

const CAP_V1: u32 = 0x1998_0330;
const CAP_V2: u32 = 0x2007_1026;
const CAP_V3: u32 = 0x2008_0522;

/// Checks the header; gives how many 32-bit halves the data has, and the pid.
fn cap_header(task: &Arc<Task>, header: UserPtr<[u32; 2]>) -> Result<(usize, i32)> {
    let space = task.space()?;
    let [version, pid] = space.read(header)?;
    match version {
        CAP_V1 => Ok((1, pid as i32)),
        CAP_V2 | CAP_V3 => Ok((2, pid as i32)),
        _ => {
            space.write(header.cast(), &CAP_V3)?;
            Err(Errno::EINVAL)
        }
    }
}

fn capget(task: &Arc<Task>, header: UserPtr<[u32; 2]>, data: UserAddr) -> Result<u64> {
    let (halves, pid) = match cap_header(task, header) {
        // Probing for the version.
        Err(Errno::EINVAL) if data.is_null() => return Ok(0),
        other => other?,
    };
    if pid < 0 {
        return Err(Errno::EINVAL);
    }
    let c: Arc<Credentials> =
        if pid == 0 { task.credentials() } else { task.pid_namespace().task(pid).ok_or(Errno::ESRCH)?.credentials() };
    if data.is_null() {
        return Ok(0);
    }
    let mut words = Vec::new();
    for half in 0..halves {
        for set in [c.effective, c.permitted, c.inheritable] {
            words.extend_from_slice(&((set.bits() >> (32 * half)) as u32).to_le_bytes());
        }
    }
    task.space()?.write_bytes(data, &words)?;
    Ok(0)
}

fn capset(task: &Arc<Task>, header: UserPtr<[u32; 2]>, data: UserAddr) -> Result<u64> {
    let (halves, pid) = cap_header(task, header)?;
    if pid != 0 && pid != task.tid() {
        return Err(Errno::EPERM);
    }
    let words = task.space()?.read_array(UserPtr::<u32>::new(data), halves * 3)?;
    let set = |which: usize| {
        let half = |h: usize| words.get(h * 3 + which).copied().map_or(0, u64::from);
        Caps::from_bits_truncate(half(0) | half(1) << 32)
    };
    task.capset(set(0), set(1), set(2))?;
    Ok(0)
}
