//! ptrace(2), process_vm_readv(2) and process_vm_writev(2).
use std::sync::Arc;

use guest_abi::types::SigInfo;
use guest_abi::{UserAddr, UserPtr};
use linux_raw_sys::ptrace as raw;

use super::table::Row;
use crate::mm::AddressSpace;
use crate::row;
use crate::signal::{self, Sender, SigSet, Signal, info};
use crate::task::ptrace::{Stopped, attach, flag, option, regs};
use crate::task::{Task, access};
use crate::{Errno, Result};

/// System calls of this area.
pub const ROWS: &[Row] = &[
    row!(101, ptrace(request: i64, pid: i32, addr: u64, data: u64), fast ptrace, Partial,
        "no seccomp requests, only 64-bit register sets"),
    row!(310, process_vm_readv(pid: i32, lvec: UserAddr, liovcnt: u64, rvec: UserAddr, riovcnt: u64, flags: u64),
        fast process_vm_readv, Full),
    row!(311, process_vm_writev(pid: i32, lvec: UserAddr, liovcnt: u64, rvec: UserAddr, riovcnt: u64, flags: u64),
        fast process_vm_writev, Full),
];

/// PTRACE_ARCH_PRCTL.
const ARCH_PRCTL: u32 = 30;
/// NT_* of <linux/elf.h>.
const NT_PRSTATUS: u64 = 1;
const NT_PRFPREG: u64 = 2;
const NT_X86_XSTATE: u64 = 0x202;
/// AUDIT_ARCH_X86_64.
const AUDIT_ARCH: u32 = 0xc000_003e;
/// sizeof(sigset_t) of the kernel.
const SIGSET_SIZE: u64 = 8;
/// PTRACE_PEEKSIGINFO_SHARED.
const PEEK_SHARED: u32 = 1;
/// Most entries one PTRACE_PEEKSIGINFO gives.
const PEEK_MOST: i32 = 4096;

fn ptrace(task: &Arc<Task>, request: i64, pid: i32, addr: u64, data: u64) -> Result<u64> {
    let request = u32::try_from(request).unwrap_or(u32::MAX);
    if request == raw::PTRACE_TRACEME {
        attach::trace_me(task)?;
        return Ok(0);
    }
    let target = task.pid_namespace().task(pid).ok_or(Errno::ESRCH)?;
    match request {
        raw::PTRACE_ATTACH => {
            attach::attach(task, &target, None)?;
            return Ok(0);
        }
        raw::PTRACE_SEIZE => {
            if addr != 0 || data & !u64::from(option::KNOWN) != 0 {
                return Err(Errno::EIO);
            }
            attach::attach(task, &target, Some(data as u32))?;
            return Ok(0);
        }
        _ => {}
    }
    if !target.tracing.tracer().is_some_and(|t| Arc::ptr_eq(&t, task)) {
        return Err(Errno::ESRCH);
    }
    match request {
        raw::PTRACE_KILL => {
            let about = info::kernel(Signal::SIGKILL);
            signal::send_to_task(&target, Signal::SIGKILL, about, Sender::Task(task))?;
            return Ok(0);
        }
        raw::PTRACE_INTERRUPT => {
            if !target.tracing.has(flag::SEIZED) {
                return Err(Errno::EIO);
            }
            attach::interrupt(&target);
            return Ok(0);
        }
        _ => {}
    }
    if target.is_dead() || target.tracing.flags() & (flag::STOPPED | flag::LISTENING) != flag::STOPPED {
        return Err(Errno::ESRCH);
    }
    stopped(task, &target, request, addr, data)
}

/// Requests for a tracee that stands in a stop.
fn stopped(task: &Arc<Task>, target: &Arc<Task>, request: u32, addr: u64, data: u64) -> Result<u64> {
    let space = task.space()?;
    let at = UserAddr(data);
    let stop = Stopped(target);
    match request {
        raw::PTRACE_PEEKTEXT | raw::PTRACE_PEEKDATA => {
            let mut word = [0; 8];
            target.space()?.read_forced(UserAddr(addr), &mut word).map_err(|_| Errno::EIO)?;
            space.write_bytes(at, &word)?;
        }
        raw::PTRACE_POKETEXT | raw::PTRACE_POKEDATA => {
            let word = data.to_le_bytes();
            target.space()?.write_forced(UserAddr(addr), &word).map_err(|_| Errno::EIO)?;
        }
        raw::PTRACE_PEEKUSR => {
            let value = peek_user(target, addr)?;
            space.write(UserPtr::new(at), &value)?;
        }
        raw::PTRACE_POKEUSR => poke_user(target, addr, data)?,
        raw::PTRACE_CONT => resume(target, 0, data)?,
        raw::PTRACE_SYSCALL => resume(target, flag::SYSCALL, data)?,
        raw::PTRACE_SYSEMU => resume(target, flag::EMULATE, data)?,
        raw::PTRACE_SINGLESTEP => resume(target, flag::STEP, data)?,
        raw::PTRACE_SYSEMU_SINGLESTEP => resume(target, flag::EMULATE | flag::STEP, data)?,
        raw::PTRACE_DETACH => attach::detach(target, signal_number(data)?),
        raw::PTRACE_LISTEN => attach::listen(target)?,
        raw::PTRACE_SETOPTIONS | raw::PTRACE_OLDSETOPTIONS => stop.set_options(data)?,
        raw::PTRACE_GETEVENTMSG => space.write(UserPtr::new(at), &stop.message()?)?,
        raw::PTRACE_GETSIGINFO => space.write(UserPtr::new(at), &stop.info()?)?,
        raw::PTRACE_SETSIGINFO => {
            let info: SigInfo = space.read(UserPtr::new(at))?;
            stop.set_info(info)?;
        }
        raw::PTRACE_PEEKSIGINFO => return peek_signals(&space, target, UserAddr(addr), at),
        raw::PTRACE_GETSIGMASK => {
            if addr != SIGSET_SIZE {
                return Err(Errno::EINVAL);
            }
            space.write(UserPtr::new(at), &target.signals.shown_mask().0)?;
        }
        raw::PTRACE_SETSIGMASK => {
            if addr != SIGSET_SIZE {
                return Err(Errno::EINVAL);
            }
            let mask: u64 = space.read(UserPtr::new(at))?;
            signal::mask::set_by_tracer(target, SigSet(mask));
        }
        raw::PTRACE_GET_RSEQ_CONFIGURATION => return rseq_configuration(&space, target, addr, at),
        raw::PTRACE_GET_SYSCALL_INFO => return syscall_info(&space, target, &stop, addr, at),
        _ => registers(&space, target, request, addr, data)?,
    }
    Ok(0)
}

/// Requests for registers. EIO for unknown ones.
fn registers(space: &Arc<AddressSpace>, target: &Arc<Task>, request: u32, addr: u64, data: u64) -> Result<()> {
    let at = UserAddr(data);
    match request {
        raw::PTRACE_GETREGS => space.write(UserPtr::new(at), &regs::read(target))?,
        raw::PTRACE_SETREGS => {
            let values: [u64; regs::COUNT] = space.read(UserPtr::new(at))?;
            regs::write(target, &values)?;
        }
        raw::PTRACE_GETFPREGS => space.write_bytes(at, &regs::read_fx(target))?,
        raw::PTRACE_SETFPREGS => {
            let mut bytes = [0; regs::FX_LEN];
            space.read_bytes(at, &mut bytes)?;
            regs::write_fx(target, &bytes)?;
        }
        raw::PTRACE_GETREGSET | raw::PTRACE_SETREGSET => register_set(space, target, request, addr, at)?,
        ARCH_PRCTL => super::prctl::arch_prctl_of(space, target, data as u32, addr).map(|_| ())?,
        _ => return Err(Errno::EIO),
    }
    Ok(())
}

/// PTRACE_GETREGSET and SETREGSET: a `struct iovec` names the buffer, and gets the length that was used.
fn register_set(space: &Arc<AddressSpace>, target: &Arc<Task>, request: u32, kind: u64, vec: UserAddr) -> Result<()> {
    let [base, len]: [u64; 2] = space.read(UserPtr::new(vec))?;
    let all = match kind {
        NT_PRSTATUS => regs::COUNT * 8,
        NT_PRFPREG => regs::FX_LEN,
        NT_X86_XSTATE => target.kernel().platform.xsave_len(),
        _ => return Err(Errno::EINVAL),
    };
    let unit = if kind == NT_PRFPREG { 4 } else { 8 };
    if !len.is_multiple_of(unit) {
        return Err(Errno::EINVAL);
    }
    let n = usize::try_from(len).map_or(all, |len| len.min(all));
    let base = UserAddr(base);
    if request == raw::PTRACE_GETREGSET {
        let bytes = match kind {
            NT_PRSTATUS => regs::read(target).iter().flat_map(|w| w.to_le_bytes()).collect(),
            NT_PRFPREG => regs::read_fx(target),
            _ => regs::read_xstate(target),
        };
        space.write_bytes(base, bytes.get(..n).unwrap_or(&bytes))?;
    } else {
        let mut bytes = vec![0; n];
        space.read_bytes(base, &mut bytes)?;
        match kind {
            NT_PRSTATUS => {
                let words: Vec<u64> =
                    bytes.chunks_exact(8).map(|c| c.try_into().map_or(0, u64::from_le_bytes)).collect();
                regs::write(target, &words)?;
            }
            NT_PRFPREG => regs::write_fx(target, &bytes)?,
            _ => regs::write_xstate(target, &bytes)?,
        }
    }
    space.write(UserPtr::new(vec.wrapping_add(8)), &(n as u64))
}

fn peek_user(target: &Task, addr: u64) -> Result<u64> {
    if !addr.is_multiple_of(8) || addr >= regs::USER_LEN {
        return Err(Errno::EIO);
    }
    Ok(match debug_register(addr) {
        Some(n) => target.tracing.debug_register(n),
        None if addr < regs::COUNT as u64 * 8 => regs::read_at(target, addr),
        None => 0,
    })
}

/// The debug register at an offset in struct user.
fn debug_register(addr: u64) -> Option<usize> {
    usize::try_from(addr.checked_sub(regs::DEBUG_OFFSET)? / 8).ok().filter(|&n| n < 8)
}

fn poke_user(target: &Task, addr: u64, value: u64) -> Result<()> {
    if !addr.is_multiple_of(8) || addr >= regs::USER_LEN {
        return Err(Errno::EIO);
    }
    if addr < regs::COUNT as u64 * 8 {
        return regs::write_at(target, addr, value);
    }
    target.tracing.set_debug_register(debug_register(addr).ok_or(Errno::EIO)?, value)
}

/// A signal to inject, or 0. EIO if it is neither.
fn signal_number(data: u64) -> Result<i32> {
    i32::try_from(data).ok().filter(|&n| n == 0 || Signal::new(n).is_some()).ok_or(Errno::EIO)
}

fn resume(target: &Task, how: u32, data: u64) -> Result<()> {
    target.tracing.resume(how, signal_number(data)?);
    Ok(())
}

/// PTRACE_PEEKSIGINFO: `struct ptrace_peeksiginfo_args` at `args`; gives how many entries were stored.
fn peek_signals(space: &Arc<AddressSpace>, target: &Arc<Task>, args: UserAddr, to: UserAddr) -> Result<u64> {
    let offset: u64 = space.read(UserPtr::new(args))?;
    let [flags, count]: [i32; 2] = space.read(UserPtr::new(args.wrapping_add(8)))?;
    let flags = flags as u32;
    if flags & !PEEK_SHARED != 0 || count < 0 {
        return Err(Errno::EINVAL);
    }
    let offset = usize::try_from(offset).unwrap_or(usize::MAX);
    let count = usize::try_from(count.min(PEEK_MOST)).unwrap_or(0);
    let infos = if flags & PEEK_SHARED != 0 {
        target.group().signals.peek(offset, count)
    } else {
        target.signals.peek(offset, count)
    };
    let out = UserPtr::<SigInfo>::new(to);
    for (i, info) in infos.iter().enumerate() {
        if let Err(e) = space.write(out.offset(i as u64), info) {
            return if i == 0 { Err(e) } else { Ok(i as u64) };
        }
    }
    Ok(infos.len() as u64)
}

/// PTRACE_GET_RSEQ_CONFIGURATION: `struct ptrace_rseq_configuration`, cut at `size` bytes; gives how many there are.
fn rseq_configuration(space: &Arc<AddressSpace>, target: &Arc<Task>, size: u64, to: UserAddr) -> Result<u64> {
    let (address, len, signature) = target.rseq.configuration();
    let mut bytes = address.to_le_bytes().to_vec();
    for word in [len, signature, 0, 0] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    let n = usize::try_from(size).map_or(bytes.len(), |n| n.min(bytes.len()));
    space.write_bytes(to, bytes.get(..n).unwrap_or_default())?;
    Ok(bytes.len() as u64)
}

/// PTRACE_GET_SYSCALL_INFO: `struct ptrace_syscall_info`, cut at `size` bytes; gives how many there are.
fn syscall_info(
    space: &Arc<AddressSpace>,
    target: &Arc<Task>,
    stop: &Stopped<'_>,
    size: u64,
    to: UserAddr,
) -> Result<u64> {
    use crate::task::ptrace::stop::{ENTRY, EXIT};
    const SYSCALL_TRAP: i32 = 5 | 0x80;
    let c = *target.context.lock();
    let at_call = stop.info().is_ok_and(|i| i.code == SYSCALL_TRAP);
    let op = if at_call { stop.message()? } else { 0 };
    let mut bytes = vec![op as u8, 0, 0, 0];
    bytes.extend_from_slice(&AUDIT_ARCH.to_le_bytes());
    for word in [c.rip, c.rsp] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    match op {
        ENTRY => {
            for word in [c.orig_rax, c.rdi, c.rsi, c.rdx, c.r10, c.r8, c.r9] {
                bytes.extend_from_slice(&word.to_le_bytes());
            }
        }
        EXIT => {
            bytes.extend_from_slice(&c.rax.to_le_bytes());
            bytes.push(u8::from(c.rax > u64::MAX - 4095));
        }
        _ => {}
    }
    let n = usize::try_from(size).map_or(bytes.len(), |n| n.min(bytes.len()));
    space.write_bytes(to, bytes.get(..n).unwrap_or_default())?;
    Ok(bytes.len() as u64)
}

/// Most segments in one vector (UIO_MAXIOV).
const SEGMENTS: u64 = 1024;
/// Bytes moved at a time.
const CHUNK: usize = 64 << 10;
/// Most bytes one call moves, so that it does not hold its worker for long.
const MOST: u64 = 64 << 20;

/// Segments of a vector in the caller's memory. EINVAL for too many, or lengths that are negative in sum.
fn segments(space: &Arc<AddressSpace>, vec: UserAddr, count: u64) -> Result<Vec<[u64; 2]>> {
    if count > SEGMENTS {
        return Err(Errno::EINVAL);
    }
    let all = space.read_array(UserPtr::<[u64; 2]>::new(vec), count as usize)?;
    let total = all.iter().try_fold(0u64, |sum, s| sum.checked_add(s[1])).filter(|&t| i64::try_from(t).is_ok());
    total.map(|_| all).ok_or(Errno::EINVAL)
}

/// A place in a vector.
struct Cursor {
    segments: std::vec::IntoIter<[u64; 2]>,
    now: [u64; 2],
}

impl Cursor {
    fn new(segments: Vec<[u64; 2]>) -> Cursor {
        Cursor { segments: segments.into_iter(), now: [0; 2] }
    }

    /// Address and length of what comes next; None at the end.
    fn next(&mut self) -> Option<(u64, usize)> {
        while self.now[1] == 0 {
            self.now = self.segments.next()?;
        }
        Some((self.now[0], usize::try_from(self.now[1]).unwrap_or(usize::MAX)))
    }

    fn advance(&mut self, n: usize) {
        self.now[0] = self.now[0].wrapping_add(n as u64);
        self.now[1] = self.now[1].saturating_sub(n as u64);
    }
}

fn process_vm(
    task: &Arc<Task>,
    pid: i32,
    local: (UserAddr, u64),
    remote: (UserAddr, u64),
    flags: u64,
    write: bool,
) -> Result<u64> {
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    let own = task.space()?;
    let mut here = Cursor::new(segments(&own, local.0, local.1)?);
    let mut there = Cursor::new(segments(&own, remote.0, remote.1)?);
    if here.next().is_none() || there.next().is_none() {
        return Ok(0);
    }
    let target = task.pid_namespace().task(pid).ok_or(Errno::ESRCH)?;
    access::may_inspect(task, &target)?;
    let other = target.space()?;
    let mut buffer = vec![0; CHUNK];
    let mut done = 0u64;
    while let (Some((to, room)), Some((from, len))) = (here.next(), there.next()) {
        if done >= MOST {
            break;
        }
        let n = room.min(len).min(CHUNK);
        let part = buffer.get_mut(..n).unwrap_or_default();
        // As Linux: all that can be moved before the first address that cannot.
        let moved = if write {
            let got = own.read_partial(UserAddr(to), part);
            other.write_partial(UserAddr(from), part.get(..got).unwrap_or_default())
        } else {
            let got = other.read_partial(UserAddr(from), part);
            other.show_original(UserAddr(from), part);
            own.write_partial(UserAddr(to), part.get(..got).unwrap_or_default())
        };
        done += moved as u64;
        if moved < n {
            return if done == 0 { Err(Errno::EFAULT) } else { Ok(done) };
        }
        here.advance(n);
        there.advance(n);
    }
    Ok(done)
}

fn process_vm_readv(
    task: &Arc<Task>,
    pid: i32,
    lvec: UserAddr,
    liovcnt: u64,
    rvec: UserAddr,
    riovcnt: u64,
    flags: u64,
) -> Result<u64> {
    process_vm(task, pid, (lvec, liovcnt), (rvec, riovcnt), flags, false)
}

fn process_vm_writev(
    task: &Arc<Task>,
    pid: i32,
    lvec: UserAddr,
    liovcnt: u64,
    rvec: UserAddr,
    riovcnt: u64,
    flags: u64,
) -> Result<u64> {
    process_vm(task, pid, (lvec, liovcnt), (rvec, riovcnt), flags, true)
}
