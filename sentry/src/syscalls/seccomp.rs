//! seccomp(2), and its older form in prctl(2).
use std::sync::Arc;

use guest_abi::{UserAddr, UserPtr};

use super::table::Row;
use crate::row;
use crate::task::Task;
use crate::task::seccomp::bpf::{Instruction, MAX_INSTRUCTIONS, Program};
use crate::task::seccomp::{action, install, may_install, set_strict};
use crate::{Errno, Result};

/// System calls of this area.
pub const ROWS: &[Row] = &[row!(317, seccomp(operation: u32, flags: u32, args: UserAddr), fast seccomp, Partial,
    "no user notification (SECCOMP_FILTER_FLAG_NEW_LISTENER)")];

/// SECCOMP_SET_MODE_STRICT and the other operations.
const SET_MODE_STRICT: u32 = 0;
const SET_MODE_FILTER: u32 = 1;
const GET_ACTION_AVAIL: u32 = 2;

/// SECCOMP_FILTER_FLAG_*.
const TSYNC: u32 = 1;
const LOG: u32 = 2;
const SPEC_ALLOW: u32 = 4;
const TSYNC_ESRCH: u32 = 16;

fn seccomp(task: &Arc<Task>, operation: u32, flags: u32, args: UserAddr) -> Result<u64> {
    match operation {
        SET_MODE_STRICT => {
            if flags != 0 || !args.is_null() {
                return Err(Errno::EINVAL);
            }
            set_strict(task).map(|()| 0)
        }
        SET_MODE_FILTER => set_filter(task, flags, args),
        GET_ACTION_AVAIL => {
            if flags != 0 {
                return Err(Errno::EINVAL);
            }
            let wanted: u32 = task.space()?.read(UserPtr::new(args))?;
            if action::KNOWN.contains(&wanted) { Ok(0) } else { Err(Errno::EOPNOTSUPP) }
        }
        _ => Err(Errno::EINVAL),
    }
}

/// PR_SET_SECCOMP. EINVAL for an unknown mode.
pub fn set_mode(task: &Arc<Task>, mode: u64, args: UserAddr) -> Result<u64> {
    match mode {
        1 => set_strict(task).map(|()| 0),
        2 => set_filter(task, 0, args),
        _ => Err(Errno::EINVAL),
    }
}

fn set_filter(task: &Arc<Task>, flags: u32, args: UserAddr) -> Result<u64> {
    if flags & !(TSYNC | LOG | SPEC_ALLOW | TSYNC_ESRCH) != 0 {
        return Err(Errno::EINVAL);
    }
    let space = task.space()?;
    // struct sock_fprog: a length, and a pointer at the next multiple of eight.
    let len: u16 = space.read(UserPtr::new(args))?;
    let code: u64 = space.read(UserPtr::new(args.wrapping_add(8)))?;
    let len = usize::from(len);
    if len == 0 || len > MAX_INSTRUCTIONS {
        return Err(Errno::EINVAL);
    }
    may_install(task)?;
    let mut bytes = vec![0; len * 8];
    space.read_bytes(UserAddr(code), &mut bytes)?;
    let code = bytes.chunks_exact(8).filter_map(|c| c.try_into().ok()).map(Instruction::from_bytes).collect();
    let program = Program::new(code)?;
    match install(task, program, flags & TSYNC != 0)? {
        None => Ok(0),
        Some(_) if flags & TSYNC_ESRCH != 0 => Err(Errno::ESRCH),
        Some(tid) => Ok(tid as u64),
    }
}
