//! Exceptions as signals: which signal, code and address a processor exception or a failed memory access means.
use std::sync::Arc;

use super::queue::{code, info};
use super::send::{force, force_trap};
use super::set::Signal;
use super::state::TrapState;
use crate::mm::FaultSignal;
use crate::task::Task;
use crate::task::ptrace::flag;

const TRAP_FLAG: u64 = 0x100;
const PF_PRESENT: u64 = 1;
const PF_RESERVED: u64 = 8;

/// A processor exception other than one that the memory code settles. The context is as [`crate::platform::Exit::Exception`] says.
pub fn deliver_exception(task: &Arc<Task>, vector: u8, error: u32, cr2: u64) {
    let (rip, rflags) = {
        let ctx = task.context.lock();
        (ctx.rip, ctx.rflags)
    };
    let previous = task.signals.state.lock().trap.cr2;
    let trap = TrapState {
        trapno: u64::from(vector),
        error: u64::from(error),
        cr2: if vector == 14 { cr2 } else { previous },
    };
    let plain = |signal| (signal, info::kernel(signal));
    let at = |signal, code, addr| (signal, info::fault(signal, code, addr));
    let (signal, siginfo) = match vector {
        0 => at(Signal::SIGFPE, code::FPE_INTDIV, rip),
        1 if task.tracing.met_breakpoint() => at(Signal::SIGTRAP, code::TRAP_HWBKPT, rip),
        1 if rflags & TRAP_FLAG != 0 || task.tracing.has(flag::STEP) => at(Signal::SIGTRAP, code::TRAP_TRACE, rip),
        1 => at(Signal::SIGTRAP, code::TRAP_BRKPT, rip),
        3 => plain(Signal::SIGTRAP),
        6 => at(Signal::SIGILL, code::ILL_ILLOPN, rip),
        11 | 12 => plain(Signal::SIGBUS),
        14 => at(Signal::SIGSEGV, code::SEGV_MAPERR, cr2),
        16 | 19 => match float_code(&task.fpu.read(), vector == 16) {
            // Nothing is unmasked any more: the instruction runs again.
            0 => return,
            c => at(Signal::SIGFPE, c, rip),
        },
        17 => at(Signal::SIGBUS, code::BUS_ADRALN, 0),
        // #OF, #BR, #TS, #GP and whatever else a program cannot cause.
        _ => plain(Signal::SIGSEGV),
    };
    force_trap(task, signal, siginfo, trap);
}

/// si_code of a floating-point exception from the image of the vector state (Intel SDM volume 1, 8.4 and 11.5).
fn float_code(state: &[u8], x87: bool) -> i32 {
    let half = |at: usize| state.get(at..at + 2).map_or(0, |b| u32::from(u16::from_le_bytes([b[0], b[1]])));
    let pending = if x87 {
        let (control, status) = (half(0), half(2));
        status & !control
    } else {
        let mxcsr = half(24);
        !(mxcsr >> 7) & mxcsr
    } & 0x3f;
    // As in Linux, the first that applies: invalid, divide by zero, overflow, denormal or underflow, precision.
    if pending & 1 != 0 {
        code::FPE_FLTINV
    } else if pending & 4 != 0 {
        code::FPE_FLTDIV
    } else if pending & 8 != 0 {
        code::FPE_FLTOVF
    } else if pending & 0x12 != 0 {
        code::FPE_FLTUND
    } else if pending & 0x20 != 0 {
        code::FPE_FLTRES
    } else {
        0
    }
}

/// A memory access at `addr` that the address space refused; `error` is the page fault's error code.
pub fn memory(task: &Arc<Task>, addr: u64, why: FaultSignal, error: u32) {
    let mut trap = TrapState { trapno: 14, error: u64::from(error), cr2: addr };
    let (signal, code) = match why {
        FaultSignal::NotMapped => (Signal::SIGSEGV, code::SEGV_MAPERR),
        FaultSignal::Access => (Signal::SIGSEGV, code::SEGV_ACCERR),
        FaultSignal::Bus => (Signal::SIGBUS, code::BUS_ADRERR),
        FaultSignal::OutOfMemory => {
            task.group().begin_exit(Signal::SIGKILL.number());
            return;
        }
    };
    if addr >= guest_abi::layout::TASK_SIZE {
        // Nothing about what lies outside the program's half may be learnt from the error code.
        trap.error |= PF_PRESENT;
        trap.error &= !PF_RESERVED;
    }
    force_trap(task, signal, info::fault(signal, code, addr), trap);
}

/// SIGSEGV as the kernel sends it when it cannot go on with a task's registers or stack.
pub fn segv(task: &Arc<Task>) {
    force(task, Signal::SIGSEGV, info::kernel(Signal::SIGSEGV));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn float_codes_follow_the_status() {
        let mut image = vec![0u8; 576];
        image[0] = 0x3f & !4;
        image[2] = 4;
        assert_eq!(float_code(&image, true), code::FPE_FLTDIV);
        image[24..28].copy_from_slice(&(0x1f80u32 & !(1 << 10) | 8).to_le_bytes());
        assert_eq!(float_code(&image, false), code::FPE_FLTOVF);
        image[24..28].copy_from_slice(&0x1f80u32.to_le_bytes());
        assert_eq!(float_code(&image, false), 0);
    }
}
