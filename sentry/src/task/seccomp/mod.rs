//! Seccomp (seccomp(2)): which system calls a task may still make. Owns its filters and what their answers lead to; never the calls.
pub mod bpf;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use linux_raw_sys::general as nr;

use self::bpf::{DATA_LEN, Program};
use super::Task;
use super::ptrace::{self, event, flag};
use crate::lock::{Mutex, Rank};
use crate::mm::Charge;
use crate::ns::user::Caps;
use crate::platform::KernelMemory;
use crate::signal::{self, Signal, info};
use crate::{Errno, Result};

/// SECCOMP_MODE_*.
pub const MODE_STRICT: u8 = 1;
#[allow(missing_docs)]
pub const MODE_FILTER: u8 = 2;
/// The task was killed by its filter and makes no more calls.
const MODE_DEAD: u8 = 3;

/// SECCOMP_RET_*.
#[allow(missing_docs)]
pub mod action {
    pub const KILL_PROCESS: u32 = 0x8000_0000;
    pub const KILL_THREAD: u32 = 0;
    pub const TRAP: u32 = 0x0003_0000;
    pub const ERRNO: u32 = 0x0005_0000;
    pub const USER_NOTIF: u32 = 0x7fc0_0000;
    pub const TRACE: u32 = 0x7ff0_0000;
    pub const LOG: u32 = 0x7ffc_0000;
    pub const ALLOW: u32 = 0x7fff_0000;
    /// The action in an answer; the rest is data.
    pub const MASK: u32 = 0xffff_0000;
    /// Those that act here.
    pub const KNOWN: [u32; 7] = [KILL_PROCESS, KILL_THREAD, TRAP, ERRNO, TRACE, LOG, ALLOW];
}

/// AUDIT_ARCH_X86_64.
const ARCH: u32 = 0xc000_003e;
/// si_code of SIGSYS from a filter.
const SYS_SECCOMP: i32 = 1;
/// The largest error number a filter may give.
const MAX_ERRNO: u32 = 4095;
/// Most instructions of all filters of a task, each counted with four more.
const PATH_MOST: usize = 32768;
const PATH_EXTRA: usize = 4;
/// Bytes of a filter besides its instructions.
const FILTER_COST: usize = 128;

/// A filter and those that were installed before it.
struct Filter {
    program: Program,
    before: Option<Arc<Filter>>,
    /// Instructions of all of them.
    path: usize,
    count: usize,
    _charge: Charge,
}

impl Drop for Filter {
    fn drop(&mut self) {
        // One after the other: a long chain must not take a deep stack.
        let mut next = self.before.take();
        while let Some(mut f) = next.and_then(Arc::into_inner) {
            next = f.before.take();
        }
    }
}

/// The seccomp state of a task.
pub struct Seccomp {
    mode: AtomicU8,
    filter: Mutex<Option<Arc<Filter>>>,
}

impl Default for Seccomp {
    fn default() -> Self {
        Seccomp { mode: AtomicU8::new(0), filter: Mutex::new(Rank::Leaf, None) }
    }
}

impl Seccomp {
    /// SECCOMP_MODE_*; 0 for none.
    pub fn mode(&self) -> u8 {
        self.mode.load(Ordering::SeqCst).min(MODE_FILTER)
    }

    /// Filters installed.
    pub fn count(&self) -> usize {
        self.filter.lock().as_ref().map_or(0, |f| f.count)
    }
}

fn set(task: &Task, mode: u8, filter: Option<Arc<Filter>>) {
    let old = core::mem::replace(&mut *task.seccomp.filter.lock(), filter);
    drop(old);
    task.seccomp.mode.store(mode, Ordering::SeqCst);
    task.tracing.set(flag::SECCOMP);
}

/// A new task begins under the filters of its maker.
pub(super) fn inherit(parent: &Task, child: &Task) {
    let mode = parent.seccomp.mode.load(Ordering::SeqCst);
    if mode != 0 {
        let filter = parent.seccomp.filter.lock().clone();
        set(child, mode, filter);
    }
}

/// SECCOMP_SET_MODE_STRICT. EINVAL under filters.
pub fn set_strict(task: &Task) -> Result<()> {
    if task.seccomp.mode() == MODE_FILTER {
        return Err(Errno::EINVAL);
    }
    set(task, MODE_STRICT, None);
    Ok(())
}

/// Whether `task` may install filters: EACCES without no_new_privs and CAP_SYS_ADMIN.
pub fn may_install(task: &Task) -> Result<()> {
    let c = task.credentials();
    if c.no_new_privs || c.has_in_own(Caps::SYS_ADMIN) { Ok(()) } else { Err(Errno::EACCES) }
}

/// SECCOMP_SET_MODE_FILTER; with `all` for every thread of the group: gives the number of one that has filters of its own, and then
/// changes nothing. EINVAL in strict mode, ENOMEM for too many instructions in all and at the sandbox's memory limit.
pub fn install(task: &Arc<Task>, program: Program, all: bool) -> Result<Option<i32>> {
    let _kinship = task.kernel().kinship();
    if task.seccomp.mode() == MODE_STRICT {
        return Err(Errno::EINVAL);
    }
    let before = task.seccomp.filter.lock().clone();
    let (path, count) = before.as_ref().map_or((0, 0), |f| (f.path, f.count));
    let path = path + program.len() + if before.is_some() { PATH_EXTRA } else { 0 };
    if path > PATH_MOST {
        return Err(Errno::ENOMEM);
    }
    let others = if all { task.group().tasks() } else { Vec::new() };
    let others: Vec<_> = others.into_iter().filter(|t| !Arc::ptr_eq(t, task) && !t.is_dead()).collect();
    if let Some(bad) = others.iter().find(|t| !is_ancestor(t, before.as_ref())) {
        return Ok(Some(bad.tid()));
    }
    let bytes = program.len().saturating_mul(size_of::<bpf::Instruction>()) + FILTER_COST;
    let charge = Charge::new(&task.kernel().platform, KernelMemory::Slab, bytes)?;
    let filter = Arc::new(Filter { program, before, path, count: count + 1, _charge: charge });
    let no_new_privs = task.credentials().no_new_privs;
    for t in &others {
        if no_new_privs && !t.credentials().no_new_privs {
            t.change_credentials(|c| {
                c.no_new_privs = true;
                Ok(())
            })?;
        }
        set(t, MODE_FILTER, Some(filter.clone()));
        // What it is about to call next is for the filter already.
        t.kick();
    }
    if !others.is_empty() {
        task.kernel().in_guest.forget(task.kernel(), |t| Arc::ptr_eq(t.group(), task.group()));
    }
    set(task, MODE_FILTER, Some(filter));
    Ok(None)
}

/// Whether the filters of `task` are some of `of`, the caller's.
fn is_ancestor(task: &Task, of: Option<&Arc<Filter>>) -> bool {
    match task.seccomp.mode.load(Ordering::SeqCst) {
        0 => true,
        MODE_FILTER => {
            let own = task.seccomp.filter.lock().clone();
            let mut at = of;
            while let Some(f) = at {
                if own.as_ref().is_some_and(|own| Arc::ptr_eq(own, f)) {
                    return true;
                }
                at = f.before.as_ref();
            }
            false
        }
        _ => false,
    }
}

/// Judges the call that `task` is about to make, whose number is in orig_rax. False: it is not made; rax has its result.
pub async fn admits(task: &Arc<Task>) -> bool {
    match task.seccomp.mode.load(Ordering::SeqCst) {
        MODE_STRICT => strict(task),
        MODE_FILTER => {
            let data = match judge(task) {
                Verdict::Admitted => return true,
                Verdict::Refused => return false,
                Verdict::Ask(data) => data,
            };
            // SECCOMP_RET_TRACE.
            if !task.tracing.wants(event::SECCOMP) {
                task.context.lock().rax = Errno::ENOSYS.to_rax();
                return false;
            }
            ptrace::stop::event(task, event::SECCOMP, data.into()).await;
            if task.must_exit().is_some() || task.context.lock().orig_rax as u32 == u32::MAX {
                return false;
            }
            // The tracer may have made it another call; this time nobody is asked.
            !matches!(judge(task), Verdict::Refused)
        }
        MODE_DEAD => false,
        _ => true,
    }
}

fn strict(task: &Arc<Task>) -> bool {
    let allowed = [nr::__NR_read, nr::__NR_write, nr::__NR_exit, nr::__NR_rt_sigreturn];
    if allowed.contains(&(task.context.lock().orig_rax as u32)) {
        return true;
    }
    task.seccomp.mode.store(MODE_DEAD, Ordering::SeqCst);
    task.end(Signal::SIGKILL.number());
    false
}

/// What the filters say of a call.
enum Verdict {
    Admitted,
    /// It is not made.
    Refused,
    /// A tracer is to be asked, and gets this.
    Ask(u32),
}

fn judge(task: &Arc<Task>) -> Verdict {
    let c = *task.context.lock();
    let number = c.orig_rax as u32;
    let mut data = [0; DATA_LEN];
    let head = u64::from(number) | u64::from(ARCH) << 32;
    for (slot, word) in data.chunks_exact_mut(8).zip([head, c.rip, c.rdi, c.rsi, c.rdx, c.r10, c.r8, c.r9]) {
        slot.copy_from_slice(&word.to_le_bytes());
    }
    let filter = task.seccomp.filter.lock().clone();
    let mut answer = action::ALLOW;
    let mut at = filter.as_ref();
    while let Some(f) = at {
        let one = f.program.run(&data);
        // The gravest counts; of equals the newest filter's.
        if (one & action::MASK).cast_signed() < (answer & action::MASK).cast_signed() {
            answer = one;
        }
        at = f.before.as_ref();
    }
    let detail = answer & !action::MASK;
    match answer & action::MASK {
        action::ALLOW | action::LOG => Verdict::Admitted,
        action::TRACE => Verdict::Ask(detail),
        action::ERRNO => {
            task.context.lock().rax = u64::from(detail.min(MAX_ERRNO)).wrapping_neg();
            Verdict::Refused
        }
        // Nobody listens.
        action::USER_NOTIF => {
            task.context.lock().rax = Errno::ENOSYS.to_rax();
            Verdict::Refused
        }
        action::TRAP => {
            task.context.lock().rax = c.orig_rax;
            sigsys(task, number, c.rip, detail, false);
            Verdict::Refused
        }
        act => {
            task.seccomp.mode.store(MODE_DEAD, Ordering::SeqCst);
            if act != action::KILL_THREAD || task.group().live() <= 1 {
                task.context.lock().rax = c.orig_rax;
                sigsys(task, number, c.rip, detail, true);
            } else {
                task.end(Signal::SIGSYS.number());
            }
            Verdict::Refused
        }
    }
}

fn sigsys(task: &Arc<Task>, number: u32, at: u64, detail: u32, fatal: bool) {
    let mut about = info::fault(Signal::SIGSYS, SYS_SECCOMP, at);
    about.errno = detail.cast_signed();
    about.fields[1] = u64::from(number) | u64::from(ARCH) << 32;
    if fatal {
        signal::send::force_fatal_with(task, Signal::SIGSYS, about);
    } else {
        signal::force(task, Signal::SIGSYS, about);
    }
}
