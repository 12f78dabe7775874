//! The signal frame on the program's stack: building it for a handler, and undoing it for rt_sigreturn(2). Byte for byte
//! what Linux builds; owns no state.
use std::sync::Arc;

use guest_abi::layout::TASK_SIZE;
use guest_abi::signal::*;
use guest_abi::types::{SigAction, SigInfo};
use guest_abi::{UserAddr, UserPtr};
use zerocopy::{FromBytes, IntoBytes};

use super::action::sa;
use super::mask;
use super::queue::info;
use super::send;
use super::set::{SigSet, Signal};
use super::state::{AltStack, SS_AUTODISARM};
use crate::platform::UserContext;
use crate::task::Task;
use crate::{Errno, Result};

/// __USER_CS as the program sees it.
const USER_CS: u16 = 0x33;
/// __USER_DS.
const USER_DS: u16 = 0x2b;
/// Bytes below the stack pointer that the ABI lets a function use.
const RED_ZONE: u64 = 128;
/// Bytes of the FXSAVE area.
const FXSAVE_LEN: usize = 512;
/// FXSAVE area and XSAVE header.
const XSAVE_MIN: usize = 576;
/// Offset of XSTATE_BV.
const XSTATE_BV: usize = 512;
/// Where the part of the header ends that XRSTOR checks.
const HEADER_CHECKED: usize = 536;
/// x87 and SSE state.
const XFEATURE_FPSSE: u64 = 3;
/// Trap, direction and resume flags, which a handler starts without.
const FLAGS_CLEARED: u64 = 0x100 | 0x400 | 0x1_0000;
/// Flags that rt_sigreturn(2) restores (FIX_EFLAGS): AC OF DF TF SF ZF AF PF CF RF.
const FLAGS_RESTORED: u64 = 0x4_0000 | 0x800 | 0x400 | 0x100 | 0x80 | 0x40 | 0x10 | 0x4 | 0x1 | 0x1_0000;

fn put<T: IntoBytes + zerocopy::Immutable>(image: &mut [u8], at: usize, value: &T) {
    if let Some(slot) = image.get_mut(at..at + size_of::<T>()) {
        slot.copy_from_slice(value.as_bytes());
    }
}

fn get<T: FromBytes>(image: &[u8], at: usize) -> Option<T> {
    image.get(at..at.checked_add(size_of::<T>())?).and_then(|b| T::read_from_bytes(b).ok())
}

/// Whether the processor may go to `rip` in ring 3.
pub fn is_user_rip(rip: u64) -> bool {
    rip < TASK_SIZE
}

/// Builds the frame of `signal` on the stack and points the registers at the handler. `Err`: there is no room to write it.
pub(super) fn build(
    task: &Arc<Task>,
    ctx: &mut UserContext,
    signal: Signal,
    siginfo: &SigInfo,
    action: &SigAction,
    saved_mask: SigSet,
) -> Result<()> {
    if action.flags & sa::RESTORER == 0 {
        return Err(Errno::EFAULT);
    }
    let alt = task.signals.alt_stack();
    let mut state = task.fpu.read();
    let top = ctx.rsp.wrapping_sub(RED_ZONE);
    let nested = alt.active(ctx.rsp);
    let entering = action.flags & sa::ONSTACK != 0 && alt.size != 0 && !nested;
    let top = if entering { alt.sp.wrapping_add(alt.size) } else { top };
    let state_len = state.len();
    let fp_at = top.wrapping_sub(state_len as u64 + 4) & !63;
    let frame_at = (fp_at.wrapping_sub(size_of::<RtSigFrame>() as u64) & !15).wrapping_sub(8);
    if (nested || entering) && !alt.holds(frame_at) {
        return Err(Errno::EFAULT);
    }

    let xsave = state_len >= XSAVE_MIN;
    if xsave {
        // The x87 and SSE parts are always meaningful to a reader of the frame, even in their initial state.
        let bv = get::<u64>(&state, XSTATE_BV).unwrap_or(0) | XFEATURE_FPSSE;
        put(&mut state, XSTATE_BV, &bv);
        let sw = FpxSwBytes {
            magic1: FP_XSTATE_MAGIC1,
            extended_size: state_len as u32 + 4,
            xfeatures: task.kernel().platform.xcr0(),
            xstate_size: state_len as u32,
            padding: [0; 7],
        };
        put(&mut state, SW_BYTES_OFFSET, &sw);
    }

    let trap = task.signals.state.lock().trap;
    let frame = RtSigFrame {
        pretcode: action.restorer,
        uc: UContext {
            flags: UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS | if xsave { UC_FP_XSTATE } else { 0 },
            link: 0,
            stack: alt.to_frame(),
            mcontext: SigContext {
                r8: ctx.r8,
                r9: ctx.r9,
                r10: ctx.r10,
                r11: ctx.r11,
                r12: ctx.r12,
                r13: ctx.r13,
                r14: ctx.r14,
                r15: ctx.r15,
                di: ctx.rdi,
                si: ctx.rsi,
                bp: ctx.rbp,
                bx: ctx.rbx,
                dx: ctx.rdx,
                ax: ctx.rax,
                cx: ctx.rcx,
                sp: ctx.rsp,
                ip: ctx.rip,
                flags: ctx.rflags,
                cs: USER_CS,
                gs: 0,
                fs: 0,
                ss: USER_DS,
                err: trap.error,
                trapno: trap.trapno,
                oldmask: saved_mask.0,
                cr2: trap.cr2,
                fpstate: fp_at,
                reserved: [0; 8],
            },
            sigmask: saved_mask.0,
        },
        info: *siginfo,
    };

    // One write for all, so that a frame that does not fit leaves no half of it behind a valid stack pointer.
    let fp_offset = (fp_at - frame_at) as usize;
    let mut image = vec![0; fp_offset + state_len + if xsave { 4 } else { 0 }];
    put(&mut image, 0, &frame);
    if let Some(slot) = image.get_mut(fp_offset..fp_offset + state_len) {
        slot.copy_from_slice(&state);
    }
    put(&mut image, fp_offset + state_len, &FP_XSTATE_MAGIC2);
    task.space()?.write_bytes(UserAddr(frame_at), &image)?;

    let offset = |field: usize| frame_at.wrapping_add(field as u64);
    ctx.rdi = signal.number() as u64;
    ctx.rsi = offset(core::mem::offset_of!(RtSigFrame, info));
    ctx.rdx = offset(core::mem::offset_of!(RtSigFrame, uc));
    ctx.rax = 0;
    ctx.rsp = frame_at;
    ctx.rip = action.handler;
    ctx.rflags &= !FLAGS_CLEARED;
    if alt.flags & SS_AUTODISARM != 0 {
        task.signals.set_alt_stack(AltStack::default());
    }
    task.fpu.reset();
    Ok(())
}

/// rt_sigreturn(2): restores what the frame at the stack pointer holds; gives the restored rax. A frame that cannot be read or holds what
/// the processor would refuse is a SIGSEGV.
pub fn sigreturn(task: &Arc<Task>) -> u64 {
    task.signals.state.lock().restart = None;
    restore(task).unwrap_or_else(|_| {
        send::force(task, Signal::SIGSEGV, info::kernel(Signal::SIGSEGV));
        task.context.lock().orig_rax = u64::MAX;
        0
    })
}

fn restore(task: &Arc<Task>) -> Result<u64> {
    let space = task.space()?;
    let frame_at = task.context.lock().rsp.wrapping_sub(8);
    let uc: UContext =
        space.read(UserPtr::new(UserAddr(frame_at.wrapping_add(core::mem::offset_of!(RtSigFrame, uc) as u64))))?;
    mask::set_mask(task, SigSet(uc.sigmask));
    let sc = uc.mcontext;
    // Only the 64-bit code segment is there; Linux would fault at its return to any other.
    if sc.cs | 3 != USER_CS || !is_user_rip(sc.ip) {
        return Err(Errno::EFAULT);
    }
    restore_state(task, &space, sc.fpstate)?;
    let stack = uc.stack;
    let mut ctx = *task.context.lock();
    ctx.r8 = sc.r8;
    ctx.r9 = sc.r9;
    ctx.r10 = sc.r10;
    ctx.r11 = sc.r11;
    ctx.r12 = sc.r12;
    ctx.r13 = sc.r13;
    ctx.r14 = sc.r14;
    ctx.r15 = sc.r15;
    ctx.rdi = sc.di;
    ctx.rsi = sc.si;
    ctx.rbp = sc.bp;
    ctx.rbx = sc.bx;
    ctx.rdx = sc.dx;
    ctx.rax = sc.ax;
    ctx.rcx = sc.cx;
    ctx.rsp = sc.sp;
    ctx.rip = sc.ip;
    ctx.rflags = (ctx.rflags & !FLAGS_RESTORED) | (sc.flags & FLAGS_RESTORED);
    ctx.orig_rax = u64::MAX;
    *task.context.lock() = ctx;
    // As in Linux an alternate stack that would be refused leaves the present one in place.
    let _ = super::altstack::set(task, &stack, ctx.rsp, false);
    Ok(sc.ax)
}

fn restore_state(task: &Arc<Task>, space: &Arc<crate::mm::AddressSpace>, at: u64) -> Result<()> {
    if at == 0 {
        task.fpu.reset();
        return Ok(());
    }
    let full = task.kernel().platform.xsave_len();
    let mut image = vec![0; full];
    let legacy = image.get_mut(..FXSAVE_LEN.min(full)).ok_or(Errno::EFAULT)?;
    space.read_bytes(UserAddr(at), legacy)?;
    let sw: FpxSwBytes = get(&image, SW_BYTES_OFFSET).ok_or(Errno::EFAULT)?;
    let len = sw.xstate_size as usize;
    let extended = full >= XSAVE_MIN
        && sw.magic1 == FP_XSTATE_MAGIC1
        && (XSAVE_MIN..=full).contains(&len)
        && sw.xstate_size <= sw.extended_size
        && space
            .read(UserPtr::<u32>::new(UserAddr(at.wrapping_add(len as u64))))
            .is_ok_and(|magic| magic == FP_XSTATE_MAGIC2);
    // XRSTOR and FXRSTOR would fault.
    if !at.is_multiple_of(if extended { 64 } else { 16 }) {
        return Err(Errno::EFAULT);
    }
    let features = if extended {
        let rest = image.get_mut(FXSAVE_LEN..len).ok_or(Errno::EFAULT)?;
        space.read_bytes(UserAddr(at.wrapping_add(FXSAVE_LEN as u64)), rest)?;
        let bv: u64 = get(&image, XSTATE_BV).unwrap_or(0);
        let allowed = task.kernel().platform.xcr0() & sw.xfeatures;
        if bv & !task.kernel().platform.xcr0() != 0 {
            return Err(Errno::EINVAL);
        }
        bv & allowed
    } else {
        XFEATURE_FPSSE
    };
    // The words of the program's own use are no processor state.
    put(&mut image, SW_BYTES_OFFSET, &FpxSwBytes::default());
    if full >= XSAVE_MIN {
        if !extended && let Some(header) = image.get_mut(XSTATE_BV..XSAVE_MIN) {
            header.fill(0);
        }
        put(&mut image, XSTATE_BV, &features);
        // XRSTOR looks at no more of the header.
        if let Some(rest) = image.get_mut(HEADER_CHECKED..XSAVE_MIN) {
            rest.fill(0);
        }
    }
    task.fpu.write(&image)
}
