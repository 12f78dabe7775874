//! Restartable sequences (rseq(2)): what a thread has registered, which words the sentry keeps true in it, and when a critical
//! section starts over. Never decides when a task runs or is signalled; it only hears of it.
//!
//! A task that goes back where it ran before pays one comparison. The words are written when the CPU differs, and the section is looked
//! at when somebody else had the CPU since, unless the task had left the guest by a system call, which no section may make.
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use guest_abi::layout::TASK_SIZE;
use guest_abi::{UserAddr, UserPtr};

use super::Task;
use crate::platform::UserContext;
use crate::sched::current_cpu;
use crate::signal::fault;
use crate::{Errno, Result};

/// sizeof(struct rseq) when it was new: the least a registration may have.
pub const LEAST_LEN: u32 = 32;
/// Bytes of it that have a meaning (AT_RSEQ_FEATURE_SIZE).
pub const FEATURE_SIZE: u32 = 28;
/// What its address must be a multiple of (AT_RSEQ_ALIGN).
pub const ALIGN: u32 = 32;

const FLAG_UNREGISTER: u32 = 1;
/// cpu_id of a thread that has no registration.
const CPU_ID_UNINITIALIZED: u32 = u32::MAX;
/// Offsets in struct rseq: the section, and node_id with mm_cid after it. cpu_id_start and cpu_id are at 0.
const RSEQ_CS: u64 = 8;
const NODE_ID: u64 = 20;
/// sizeof(struct rseq_cs).
const CS_LEN: usize = 32;
/// Nowhere: the words are due.
const NO_PLACE: u64 = u64::MAX;

/// What one thread has registered.
pub struct Rseq {
    /// 0: nothing.
    address: AtomicU64,
    len: AtomicU32,
    signature: AtomicU32,
    /// CPU in the words.
    cpu: AtomicU32,
    /// Where the task last ran: the CPU, and how often that had changed its task.
    place: AtomicU64,
}

impl Default for Rseq {
    fn default() -> Rseq {
        Rseq {
            address: AtomicU64::new(0),
            len: AtomicU32::new(0),
            signature: AtomicU32::new(0),
            cpu: AtomicU32::new(CPU_ID_UNINITIALIZED),
            place: AtomicU64::new(NO_PLACE),
        }
    }
}

impl Rseq {
    /// Address, length and signature of the registration (PTRACE_GET_RSEQ_CONFIGURATION); zeroes without one.
    pub fn configuration(&self) -> (u64, u32, u32) {
        (self.address.load(Relaxed), self.len.load(Relaxed), self.signature.load(Relaxed))
    }

    /// No registration: a new program, or a thread that shares its maker's memory.
    pub(super) fn clear(&self) {
        self.set(0, 0, 0);
    }

    fn set(&self, address: u64, len: u32, signature: u32) {
        self.address.store(address, Relaxed);
        self.len.store(len, Relaxed);
        self.signature.store(signature, Relaxed);
        self.cpu.store(CPU_ID_UNINITIALIZED, Relaxed);
        self.place.store(NO_PLACE, Relaxed);
    }

    /// A copy of the memory has a copy of the registration.
    pub(super) fn inherit(&self, parent: &Rseq) {
        let (address, len, signature) = parent.configuration();
        self.set(address, len, signature);
        self.cpu.store(parent.cpu.load(Relaxed), Relaxed);
    }
}

/// rseq(2) of `task`, the caller.
pub fn register(task: &Arc<Task>, address: UserAddr, len: u32, flags: u32, signature: u32) -> Result<()> {
    let rseq = &task.rseq;
    let (registered, old_len, old_signature) = rseq.configuration();
    let same = || registered == address.0 && old_len == len;
    if flags & FLAG_UNREGISTER != 0 {
        if flags != FLAG_UNREGISTER || registered == 0 || !same() {
            return Err(Errno::EINVAL);
        }
        if old_signature != signature {
            return Err(Errno::EPERM);
        }
        write_words(task, address.0, None)?;
        rseq.clear();
        return Ok(());
    }
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    if registered != 0 {
        return Err(match (same(), old_signature == signature) {
            (false, _) => Errno::EINVAL,
            (true, false) => Errno::EPERM,
            (true, true) => Errno::EBUSY,
        });
    }
    if len < LEAST_LEN || !address.0.is_multiple_of(u64::from(ALIGN)) {
        return Err(Errno::EINVAL);
    }
    if !address.range_ok(len.into()) {
        return Err(Errno::EFAULT);
    }
    // What was left there by an earlier user of the memory must not be taken for a section.
    task.space()?.write(UserPtr::new(address.wrapping_add(RSEQ_CS)), &0u64)?;
    rseq.set(address.0, len, signature);
    Ok(())
}

/// Makes `task`'s words and section true for the CPU it is about to enter the guest on; `by_call`: it had left by a system call. False
/// where that was impossible: the task has SIGSEGV pending and must look at its signals first.
pub(super) fn settle(task: &Arc<Task>, by_call: bool) -> bool {
    let rseq = &task.rseq;
    let address = rseq.address.load(Relaxed);
    if address == 0 {
        return true;
    }
    let Some(cpu) = current_cpu() else { return true };
    let place = (cpu as u64) << 48 | task.kernel().sched.turns(cpu) & (u64::MAX >> 16);
    if rseq.place.load(Relaxed) == place {
        return true;
    }
    let done = restart(task, address, by_call).and_then(|()| {
        if rseq.cpu.load(Relaxed) != cpu as u32 {
            write_words(task, address, Some(cpu as u32))?;
            rseq.cpu.store(cpu as u32, Relaxed);
        }
        Ok(())
    });
    if done.is_err() {
        fault::segv(task);
        return false;
    }
    rseq.place.store(place, Relaxed);
    true
}

fn restart(task: &Arc<Task>, address: u64, by_call: bool) -> Result<()> {
    if by_call {
        return Ok(());
    }
    // Taken out for the while: copies from user memory hold no lock of the task's.
    let mut context = *task.context.lock();
    let before = context.rip;
    leave_section(task, address, &mut context)?;
    if context.rip != before {
        task.context.lock().rip = context.rip;
    }
    Ok(())
}

/// A handler is about to start with `context` as what it will return to: the section it interrupts starts over. Errors where the section
/// is none that could: the task must have SIGSEGV.
pub fn before_handler(task: &Arc<Task>, context: &mut UserContext) -> Result<()> {
    let address = task.rseq.address.load(Relaxed);
    if address == 0 { Ok(()) } else { leave_section(task, address, context) }
}

/// Sends `context` to the abort address of the critical section it stands in, if it stands in one.
fn leave_section(task: &Arc<Task>, address: u64, context: &mut UserContext) -> Result<()> {
    let space = task.space()?;
    let pointer = UserAddr(address).wrapping_add(RSEQ_CS);
    let section: u64 = space.read(UserPtr::new(pointer))?;
    if section == 0 {
        return Ok(());
    }
    if section >= TASK_SIZE {
        return Err(Errno::EINVAL);
    }
    let mut bytes = [0; CS_LEN];
    space.read_bytes(UserAddr(section), &mut bytes)?;
    let word = |at: usize| bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
    let (version, cs_flags) = (word(0) as u32, (word(0) >> 32) as u32);
    let (start, len, abort) = (word(8), word(16), word(24));
    let Some(end) = start.checked_add(len).filter(|&end| end < TASK_SIZE) else { return Err(Errno::EINVAL) };
    let abort_inside = abort.wrapping_sub(start) < len;
    if start >= TASK_SIZE || abort >= TASK_SIZE || version > 0 || abort_inside {
        return Err(Errno::EINVAL);
    }
    // The signature before the abort address keeps an attacker from making any code one.
    let signature: u32 = space.read(UserPtr::new(UserAddr(abort).wrapping_add(4u64.wrapping_neg())))?;
    if signature != task.rseq.signature.load(Relaxed) {
        return Err(Errno::EINVAL);
    }
    let inside = (start..end).contains(&context.rip);
    if inside {
        let flags: u32 = space.read(UserPtr::new(UserAddr(address).wrapping_add(16)))?;
        // Sections that would not start over were never of use, and are no longer part of the interface.
        if flags != 0 || cs_flags != 0 {
            return Err(Errno::EINVAL);
        }
    }
    space.write(UserPtr::new(pointer), &0u64)?;
    if inside {
        context.rip = abort;
    }
    Ok(())
}

/// Writes cpu_id_start, cpu_id, node_id and mm_cid. Concurrency identifiers are CPU numbers: unique among threads that run at once, and
/// below the number of CPUs.
fn write_words(task: &Arc<Task>, address: u64, cpu: Option<u32>) -> Result<()> {
    let space = task.space()?;
    let (start, id) = cpu.map_or((0, CPU_ID_UNINITIALIZED), |cpu| (cpu, cpu));
    space.write(UserPtr::new(UserAddr(address)), &[start, id])?;
    space.write(UserPtr::new(UserAddr(address).wrapping_add(NODE_ID)), &[0, start])
}
