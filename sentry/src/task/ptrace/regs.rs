//! Registers of a stopped tracee as ptrace(2) lays them out: struct user_regs_struct, the FXSAVE area, the XSAVE image, and
//! struct user. Owns the layout and what may be written; the tracee stands still meanwhile.
use super::super::Task;
use crate::platform::UserContext;
use crate::{Errno, Result};

/// Words of struct user_regs_struct.
pub const COUNT: usize = 27;
/// Bytes of struct user.
pub const USER_LEN: u64 = 928;
/// Offset of u_debugreg in struct user.
pub const DEBUG_OFFSET: u64 = 848;
/// Bytes of struct user_fpregs_struct.
pub const FX_LEN: usize = 512;
/// Where the XSAVE header begins.
const XSTATE_BV: usize = 512;
/// Bytes of FXSAVE area and header.
const XSAVE_MIN: usize = 576;
/// Software-reserved bytes of the FXSAVE area; the first word of them tells XCR0.
const SW_BYTES: usize = 464;
/// Where the part of the header ends that XRSTOR checks.
const HEADER_CHECKED: usize = 536;
/// Flags a tracer may set: CF PF AF ZF SF TF DF OF RF AC.
const FLAGS: u64 = 0x5_0dd5;
/// __USER_CS and __USER_DS.
const USER_CS: u64 = 0x33;
const USER_SS: u64 = 0x2b;
/// Bases at or above are refused (TASK_SIZE_MAX).
const BASE_MAX: u64 = super::super::clone::TLS_MAX;

/// Positions in struct user_regs_struct that are not general registers.
const ORIG_RAX: usize = 15;
const CS: usize = 17;
const FLAGS_AT: usize = 18;
const SS: usize = 20;
const FS_BASE: usize = 21;
const GS_BASE: usize = 22;

fn general(c: &mut UserContext, at: usize) -> Option<&mut u64> {
    Some(match at {
        0 => &mut c.r15,
        1 => &mut c.r14,
        2 => &mut c.r13,
        3 => &mut c.r12,
        4 => &mut c.rbp,
        5 => &mut c.rbx,
        6 => &mut c.r11,
        7 => &mut c.r10,
        8 => &mut c.r9,
        9 => &mut c.r8,
        10 => &mut c.rax,
        11 => &mut c.rcx,
        12 => &mut c.rdx,
        13 => &mut c.rsi,
        14 => &mut c.rdi,
        ORIG_RAX => &mut c.orig_rax,
        16 => &mut c.rip,
        19 => &mut c.rsp,
        _ => return None,
    })
}

fn get(c: &mut UserContext, at: usize) -> u64 {
    match at {
        CS => USER_CS,
        // Bit 1 always reads as one, and interrupts are always on.
        FLAGS_AT => c.rflags | 0x202,
        SS => USER_SS,
        FS_BASE => c.fs_base,
        GS_BASE => c.gs_base,
        _ => general(c, at).map_or(0, |r| *r),
    }
}

fn put(c: &mut UserContext, at: usize, value: u64) -> Result<()> {
    match at {
        // There are no segments but the usual ones: others cannot be had.
        CS if value & 0xffff != USER_CS => return Err(Errno::EIO),
        SS if value & 0xffff != USER_SS => return Err(Errno::EIO),
        CS | SS => {}
        23..=26 if value & 0xffff != 0 && value & 0xffff != USER_SS => return Err(Errno::EIO),
        23..=26 => {}
        FLAGS_AT => c.rflags = (c.rflags & !FLAGS) | (value & FLAGS),
        FS_BASE | GS_BASE if value >= BASE_MAX => return Err(Errno::EIO),
        FS_BASE => c.fs_base = value,
        GS_BASE => c.gs_base = value,
        _ => {
            if let Some(r) = general(c, at) {
                *r = value;
            }
        }
    }
    Ok(())
}

/// All of struct user_regs_struct.
pub fn read(task: &Task) -> [u64; COUNT] {
    let mut c = *task.context.lock();
    core::array::from_fn(|at| get(&mut c, at))
}

/// Writes the first `values` of struct user_regs_struct. EIO for what the task cannot have; those before it are written.
pub fn write(task: &Task, values: &[u64]) -> Result<()> {
    let mut c = task.context.lock();
    values.iter().take(COUNT).enumerate().try_for_each(|(at, &v)| put(&mut c, at, v))
}

/// One register by its offset.
pub fn read_at(task: &Task, offset: u64) -> u64 {
    get(&mut task.context.lock(), usize::try_from(offset / 8).unwrap_or(COUNT))
}

/// Writes one register by its offset.
pub fn write_at(task: &Task, offset: u64, value: u64) -> Result<()> {
    put(&mut task.context.lock(), usize::try_from(offset / 8).unwrap_or(COUNT), value)
}

/// The FXSAVE area.
pub fn read_fx(task: &Task) -> Vec<u8> {
    let mut image = task.fpu.read();
    image.truncate(FX_LEN);
    image
}

/// Writes the beginning of the FXSAVE area. EINVAL for what the processor would refuse.
pub fn write_fx(task: &Task, bytes: &[u8]) -> Result<()> {
    let mut image = task.fpu.read();
    let n = bytes.len().min(FX_LEN);
    image.get_mut(..n).ok_or(Errno::EINVAL)?.copy_from_slice(bytes.get(..n).ok_or(Errno::EINVAL)?);
    if let Some(reserved) = image.get_mut(SW_BYTES..FX_LEN) {
        reserved.fill(0);
    }
    // x87 and SSE are no longer in their initial state.
    if let Some(bv) = image.get_mut(XSTATE_BV) {
        *bv |= 3;
    }
    task.fpu.write(&image)
}

/// The XSAVE image, XCR0 in its software-reserved part.
pub fn read_xstate(task: &Task) -> Vec<u8> {
    let mut image = task.fpu.read();
    let xcr0 = task.kernel().platform.xcr0();
    if let Some(slot) = image.get_mut(SW_BYTES..SW_BYTES + 8) {
        slot.copy_from_slice(&xcr0.to_le_bytes());
    }
    image
}

/// Writes the whole XSAVE image. EFAULT unless all of it is there, as in Linux; EINVAL for what the processor would refuse.
pub fn write_xstate(task: &Task, bytes: &[u8]) -> Result<()> {
    let len = task.kernel().platform.xsave_len();
    if bytes.len() != len || len < XSAVE_MIN {
        return Err(Errno::EFAULT);
    }
    let mut image = bytes.to_vec();
    if image.get(HEADER_CHECKED..XSAVE_MIN).is_some_and(|rest| rest.iter().any(|&b| b != 0)) {
        return Err(Errno::EINVAL);
    }
    if let Some(reserved) = image.get_mut(SW_BYTES..FX_LEN) {
        reserved.fill(0);
    }
    task.fpu.write(&image)
}
