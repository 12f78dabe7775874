//! prctl(2), arch_prctl(2), personality(2).
use std::sync::Arc;
use std::sync::atomic::Ordering;

use guest_abi::{UserAddr, UserPtr};
use linux_raw_sys::prctl as raw;

use super::table::Row;
use crate::ns::user::Caps;
use crate::row;
use crate::signal::Signal;
use crate::task::Task;
use crate::task::clone::TLS_MAX;
use crate::task::credentials::{SECBIT_KEEP_CAPS, SECBIT_NO_CAP_AMBIENT_RAISE};
use crate::{Errno, Result};

/// System calls of this area.
pub const ROWS: &[Row] = &[
    row!(135, personality(persona: u32), fast personality, Partial, "recorded; only ADDR_NO_RANDOMIZE acts"),
    row!(157, prctl(option: i32, arg2: u64, arg3: u64, arg4: u64, arg5: u64), fast prctl, Partial,
        "options that concern machine checks, speculation and memory layout give EINVAL"),
    row!(158, arch_prctl(code: u32, addr: u64), fast arch_prctl, Partial, "FS and GS bases, ARCH_GET_CPUID"),
];

/// The largest capability number.
const CAP_LAST: u64 = 40;

fn personality(task: &Arc<Task>, persona: u32) -> Result<u64> {
    let slot = &task.group().personality;
    let old = slot.load(Ordering::Relaxed);
    if persona != u32::MAX {
        slot.store(persona.into(), Ordering::Relaxed);
    }
    Ok(old)
}

fn cap(number: u64) -> Result<Caps> {
    if number > CAP_LAST {
        return Err(Errno::EINVAL);
    }
    Ok(Caps::from_bits_truncate(1 << number))
}

fn prctl(task: &Arc<Task>, option: i32, a2: u64, a3: u64, a4: u64, a5: u64) -> Result<u64> {
    let group = task.group();
    let no_more = |zero: &[u64]| if zero.iter().all(|&a| a == 0) { Ok(()) } else { Err(Errno::EINVAL) };
    match option as u32 {
        raw::PR_SET_PDEATHSIG => {
            let signal = i32::try_from(a2).ok().filter(|&n| n == 0 || Signal::new(n).is_some()).ok_or(Errno::EINVAL)?;
            task.set_pdeath_signal(signal);
            Ok(0)
        }
        raw::PR_GET_PDEATHSIG => {
            let signal = task.pdeath_signal.load(Ordering::Relaxed);
            task.space()?.write(UserPtr::new(UserAddr(a2)), &signal)?;
            Ok(0)
        }
        raw::PR_GET_DUMPABLE => Ok(group.dumpable.load(Ordering::Relaxed) as u64),
        raw::PR_SET_DUMPABLE => match a2 {
            0 | 1 => {
                group.dumpable.store(a2 as i32, Ordering::Relaxed);
                Ok(0)
            }
            _ => Err(Errno::EINVAL),
        },
        raw::PR_GET_KEEPCAPS => Ok(task.credentials().keep_caps.into()),
        raw::PR_SET_KEEPCAPS => {
            if a2 > 1 {
                return Err(Errno::EINVAL);
            }
            task.change_credentials(|c| {
                // SECBIT_KEEP_CAPS_LOCKED.
                if c.securebits & SECBIT_KEEP_CAPS << 1 != 0 {
                    return Err(Errno::EPERM);
                }
                c.keep_caps = a2 == 1;
                c.securebits = c.securebits & !SECBIT_KEEP_CAPS | if a2 == 1 { SECBIT_KEEP_CAPS } else { 0 };
                Ok(())
            })?;
            Ok(0)
        }
        raw::PR_GET_TIMING => Ok(0),
        raw::PR_SET_TIMING => no_more(&[a2]).map(|()| 0),
        raw::PR_SET_NAME => {
            let mut name = [0u8; 15];
            let n = task.space()?.read_partial(UserAddr(a2), &mut name);
            let read = name.get(..n).unwrap_or(&name);
            if n < name.len() && !read.contains(&0) {
                return Err(Errno::EFAULT);
            }
            task.set_comm(read);
            Ok(0)
        }
        raw::PR_GET_NAME => {
            task.space()?.write(UserPtr::new(UserAddr(a2)), &task.comm())?;
            Ok(0)
        }
        raw::PR_GET_SECCOMP => Ok(task.seccomp.mode().into()),
        raw::PR_SET_SECCOMP => super::seccomp::set_mode(task, a2, UserAddr(a3)),
        raw::PR_CAPBSET_READ => Ok(task.credentials().bounding.contains(cap(a2)?).into()),
        raw::PR_CAPBSET_DROP => {
            let c = cap(a2)?;
            task.change_credentials(|own| {
                if !own.has_in_own(Caps::SETPCAP) {
                    return Err(Errno::EPERM);
                }
                own.bounding &= !c;
                Ok(())
            })?;
            Ok(0)
        }
        raw::PR_GET_TSC => {
            task.space()?.write(UserPtr::new(UserAddr(a2)), &raw::PR_TSC_ENABLE)?;
            Ok(0)
        }
        raw::PR_SET_TSC if a2 == u64::from(raw::PR_TSC_ENABLE) => Ok(0),
        raw::PR_GET_SECUREBITS => Ok(task.credentials().securebits.into()),
        raw::PR_SET_SECUREBITS => set_securebits(task, a2),
        raw::PR_SET_TIMERSLACK => {
            // 0 means the default; a value beyond u64's half means the same to Linux.
            let slack = if a2 as i64 <= 0 { 50_000 } else { a2 };
            task.timer_slack.store(slack, Ordering::Relaxed);
            Ok(0)
        }
        raw::PR_GET_TIMERSLACK => Ok(task.timer_slack.load(Ordering::Relaxed)),
        raw::PR_TASK_PERF_EVENTS_DISABLE | raw::PR_TASK_PERF_EVENTS_ENABLE => Ok(0),
        raw::PR_SET_CHILD_SUBREAPER => {
            task.set_subreaper(a2 != 0);
            Ok(0)
        }
        raw::PR_GET_CHILD_SUBREAPER => {
            let on = i32::from(group.is_subreaper.load(Ordering::Relaxed));
            task.space()?.write(UserPtr::new(UserAddr(a2)), &on)?;
            Ok(0)
        }
        raw::PR_SET_NO_NEW_PRIVS => {
            if a2 != 1 {
                return Err(Errno::EINVAL);
            }
            no_more(&[a3, a4, a5])?;
            task.change_credentials(|c| {
                c.no_new_privs = true;
                Ok(())
            })?;
            Ok(0)
        }
        raw::PR_GET_NO_NEW_PRIVS => no_more(&[a2, a3, a4, a5]).map(|()| task.credentials().no_new_privs.into()),
        raw::PR_GET_TID_ADDRESS => {
            let addr = task.clear_child_tid.load(Ordering::Relaxed);
            task.space()?.write(UserPtr::new(UserAddr(a2)), &addr)?;
            Ok(0)
        }
        raw::PR_GET_THP_DISABLE => no_more(&[a2, a3, a4, a5]).map(|()| 0),
        raw::PR_CAP_AMBIENT => ambient(task, a2, a3, a4, a5),
        _ => Err(Errno::EINVAL),
    }
}

fn set_securebits(task: &Arc<Task>, bits: u64) -> Result<u64> {
    const ALL: u32 = 0xff;
    const LOCKS: u32 = 0xaa;
    let bits = u32::try_from(bits).ok().filter(|b| b & !ALL == 0).ok_or(Errno::EPERM)?;
    task.change_credentials(|c| {
        let locked = c.securebits & LOCKS;
        let changed = c.securebits ^ bits;
        if (locked >> 1) & changed != 0 || locked & !bits != 0 || !c.has_in_own(Caps::SETPCAP) {
            return Err(Errno::EPERM);
        }
        c.securebits = bits;
        c.keep_caps = bits & SECBIT_KEEP_CAPS != 0;
        Ok(())
    })?;
    Ok(0)
}

fn ambient(task: &Arc<Task>, a2: u64, a3: u64, a4: u64, a5: u64) -> Result<u64> {
    if a4 != 0 || a5 != 0 {
        return Err(Errno::EINVAL);
    }
    match a2 as u32 {
        raw::PR_CAP_AMBIENT_CLEAR_ALL if a3 == 0 => {
            task.change_credentials(|c| {
                c.ambient = Caps::empty();
                Ok(())
            })?;
            Ok(0)
        }
        raw::PR_CAP_AMBIENT_IS_SET => Ok(task.credentials().ambient.contains(cap(a3)?).into()),
        raw::PR_CAP_AMBIENT_RAISE => {
            let new = cap(a3)?;
            task.change_credentials(|c| {
                if !c.permitted.contains(new)
                    || !c.inheritable.contains(new)
                    || c.securebits & SECBIT_NO_CAP_AMBIENT_RAISE != 0
                {
                    return Err(Errno::EPERM);
                }
                c.ambient |= new;
                Ok(())
            })?;
            Ok(0)
        }
        raw::PR_CAP_AMBIENT_LOWER => {
            let old = cap(a3)?;
            task.change_credentials(|c| {
                c.ambient &= !old;
                Ok(())
            })?;
            Ok(0)
        }
        _ => Err(Errno::EINVAL),
    }
}

const ARCH_SET_GS: u32 = 0x1001;
const ARCH_SET_FS: u32 = 0x1002;
const ARCH_GET_FS: u32 = 0x1003;
const ARCH_GET_GS: u32 = 0x1004;
const ARCH_GET_CPUID: u32 = 0x1011;
const ARCH_SET_CPUID: u32 = 0x1012;

fn arch_prctl(task: &Arc<Task>, code: u32, addr: u64) -> Result<u64> {
    arch_prctl_of(&task.space()?, task, code, addr)
}

/// arch_prctl(2) of `task`; results go to `addr` in `space`.
pub fn arch_prctl_of(space: &Arc<crate::mm::AddressSpace>, task: &Task, code: u32, addr: u64) -> Result<u64> {
    match code {
        ARCH_SET_FS | ARCH_SET_GS => {
            if addr >= TLS_MAX {
                return Err(Errno::EPERM);
            }
            let mut ctx = task.context.lock();
            if code == ARCH_SET_FS {
                ctx.fs_base = addr;
            } else {
                ctx.gs_base = addr;
            }
            Ok(0)
        }
        ARCH_GET_FS | ARCH_GET_GS => {
            let value = {
                let ctx = task.context.lock();
                if code == ARCH_GET_FS { ctx.fs_base } else { ctx.gs_base }
            };
            space.write(UserPtr::new(UserAddr(addr)), &value)?;
            Ok(0)
        }
        ARCH_GET_CPUID => Ok(1),
        ARCH_SET_CPUID => Err(Errno::ENODEV),
        _ => Err(Errno::EINVAL),
    }
}
