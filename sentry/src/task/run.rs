//! The life of a task: settle signals, enter the guest, serve why it left, again. Owns the loop; what happens in it belongs to
//! others.
use core::future::Future;
use core::pin::Pin;
use std::sync::Arc;

use guest_abi::UserAddr;

use super::answers::is_answered;
use super::ptrace::debug::Watch;
use super::ptrace::{self, flag};
use super::{Task, exit, rseq, seccomp};
use crate::Result;
use crate::mm::FaultSignal;
use crate::platform::Exit;
use crate::sched::{self, current_cpu};
use crate::signal::{self, fault};
use crate::trace::ExitReason;

/// Tasks whose broken end is told as an error; later ones are told to whoever debugs.
const LOUD_ENDS: u64 = 10;
/// Page fault error code: the access was a write.
const PF_WRITE: u32 = 2;
/// Page fault error code: a protection key forbids the access.
const PF_PROTECTION_KEY: u32 = 0x20;
/// Page fault error code: the access was an instruction fetch.
const PF_EXEC: u32 = 16;

/// For how many calls one that the guest could have answered counts.
const SAMPLE_WEIGHT: u64 = 32;
/// RFLAGS.TF.
const TRAP_FLAG: u64 = 0x100;

/// A call that has been begun.
pub enum Served<'a> {
    /// It is over.
    Done(Result<u64>),
    /// It may block: the rest of it.
    Blocks(Pin<Box<dyn Future<Output = Result<u64>> + Send + 'a>>),
}

/// The system call layer, which lies above tasks.
pub trait SystemCalls: Send + Sync {
    /// Begins call `nr` for `task`.
    fn serve<'a>(&self, task: &'a Arc<Task>, nr: u64, args: [u64; 6]) -> Served<'a>;
}

/// Lets a complete task run.
pub(super) fn start(task: &Arc<Task>) {
    let entity = task.sched.clone();
    task.kernel().sched.spawn(entity, life(task.clone()));
}

async fn life(task: Arc<Task>) {
    let status = until_end(&task).await;
    exit::exit_task(task, status).await;
}

/// Runs the task until it must exit; gives the wait(2) status.
async fn until_end(task: &Arc<Task>) -> i32 {
    let kernel = task.kernel();
    let mut by_call = false;
    loop {
        let prepare = signal::needs_prepare(task, &task.context.lock());
        if prepare && let Err(status) = signal::prepare_return(task).await {
            return status;
        }
        if kernel.sched.should_yield(&task.sched) {
            sched::yield_now().await;
            continue;
        }
        if !rseq::settle(task, by_call) {
            continue;
        }
        let exit = enter(task);
        by_call = matches!(exit, Exit::Syscall);
        match exit {
            Exit::Syscall => syscall(task).await,
            Exit::Exception { vector: 14, error, cr2 } => page_fault(task, error, cr2),
            Exit::Exception { vector, error, cr2 } => fault::deliver_exception(task, vector, error, cr2),
            Exit::Interrupted => {}
            Exit::BusError { va, .. } => {
                let addr = va.unwrap_or_else(|| task.context.lock().rip);
                fault::memory(task, addr, FaultSignal::Bus, 0);
            }
            Exit::Broken(why) => {
                // A program at its memory limit can bring this about as often as it likes.
                let level = if kernel.stats.exits(ExitReason::Broken) > LOUD_ENDS {
                    log::Level::Debug
                } else {
                    log::Level::Error
                };
                log::log!(level, "task {} cannot go on: {why}", task.global_tid());
                task.group().begin_exit(signal::Signal::SIGKILL.number());
            }
        }
    }
}

/// Runs guest code until something needs the sentry.
fn enter(task: &Arc<Task>) -> Exit {
    let kernel = task.kernel();
    let (Some(cpu), Ok(space)) = (current_cpu(), task.space()) else {
        return Exit::Broken("no virtual CPU or no memory");
    };
    let mut context = *task.context.lock();
    context.orig_rax = u64::MAX;
    // A step of the tracer's; the program's own trap flag is the program's affair.
    let step = task.tracing.has(flag::STEP) && context.rflags & TRAP_FLAG == 0;
    if step {
        context.rflags |= TRAP_FLAG;
    }
    let watch = match Watch::begin(task, cpu, space.pages(), &mut context) {
        Ok(watch) => watch,
        Err(exit) => return exit,
    };
    kernel.sched.before_enter();
    task.set_running_on(Some(cpu));
    // Whoever raises the flag after this look finds `running_on` set and kicks.
    if task.interruption.is_pending() {
        task.set_running_on(None);
        return watch.end(task, cpu, &mut context, Exit::Interrupted);
    }
    let clock = &task.sched.clock;
    let now = clock.enter_guest(|| kernel.platform.monotonic());
    crate::timers::cpu::task_runs(task);
    if let Some(vdso) = &kernel.vdso {
        vdso.refresh_if_due(&*kernel.platform, now);
    }
    kernel.in_guest.enter(cpu, task);
    let exit = kernel.platform.enter(space.pages(), &mut context, &*task.fpu);
    let exit = watch.end(task, cpu, &mut context, exit);
    kernel.in_guest.leave(cpu, kernel);
    clock.leave_guest(|| kernel.platform.monotonic());
    task.set_running_on(None);
    if step {
        context.rflags &= !TRAP_FLAG;
    }
    if exit == Exit::Syscall && !task.tracing.is_traced() && !task.tracing.watches_calls() {
        let number = u64::from(context.rax as u32);
        // Of the calls that the guest answers only samples come here.
        let weight = if is_answered(number) { SAMPLE_WEIGHT } else { 1 };
        if space.note_call(context.rip, number, weight) {
            kernel.stats.direct_site(cpu);
        }
    }
    *task.context.lock() = context;
    let reason = match exit {
        Exit::Syscall => ExitReason::Syscall,
        Exit::Exception { vector: 14, .. } => ExitReason::PageFault,
        Exit::Exception { .. } => ExitReason::OtherException,
        Exit::Interrupted => ExitReason::Interrupted,
        Exit::BusError { .. } => ExitReason::BusError,
        Exit::Broken(_) => ExitReason::Broken,
    };
    kernel.stats.exit(cpu, reason);
    exit
}

fn page_fault(task: &Arc<Task>, error: u32, cr2: u64) {
    let Ok(space) = task.space() else { return };
    task.sched.clock.count_minor_fault();
    if error & PF_PROTECTION_KEY != 0 {
        // Keys are not offered, but some KVMs let a program set PKRU nevertheless: the entry is right and would fault again.
        fault::memory(task, cr2, FaultSignal::Access, error);
        return;
    }
    if let Err(why) = space.fault(UserAddr(cr2), error & PF_WRITE != 0, error & PF_EXEC != 0) {
        fault::memory(task, cr2, why, error);
    }
}

async fn syscall(task: &Arc<Task>) {
    let (nr, args) = {
        let mut c = task.context.lock();
        c.orig_rax = c.rax;
        let args = [c.rdi, c.rsi, c.rdx, c.r10, c.r8, c.r9];
        // The kernel's entry code looks at 32 bits only.
        (u64::from(c.rax as u32), args)
    };
    if task.tracing.watches_calls() {
        Box::pin(traced_syscall(task)).await;
        return;
    }
    serve(task, nr, args).await;
    // The tracer may have come while the call was served.
    if task.tracing.has(flag::SYSCALL | flag::STEP) {
        show_number(task, nr);
        ptrace::stop::syscall_exit(task).await;
    }
}

/// Has a call served, and puts its result where the program finds it.
async fn serve(task: &Arc<Task>, nr: u64, args: [u64; 6]) {
    let result = match task.kernel().system_calls().serve(task, nr, args) {
        Served::Done(result) => result,
        Served::Blocks(rest) => rest.await,
    };
    task.context.lock().rax = result.unwrap_or_else(|e| e.to_rax());
}

/// What a tracer sees after a call: its number, unless the call was rt_sigreturn(2), which restored that too.
fn show_number(task: &Task, nr: u64) {
    if nr != u64::from(linux_raw_sys::general::__NR_rt_sigreturn) {
        task.context.lock().orig_rax = nr;
    }
}

/// A call that a tracer or seccomp looks at first. The tracer may change number, arguments and result, or skip the call.
async fn traced_syscall(task: &Arc<Task>) {
    let wanted = !task.tracing.has(flag::SYSCALL | flag::EMULATE) || ptrace::stop::syscall_entry(task).await;
    if task.must_exit().is_some() {
        return;
    }
    let skipped = task.context.lock().orig_rax as u32 == u32::MAX;
    let wanted = wanted && (skipped || seccomp::admits(task).await);
    let (nr, args) = {
        let c = task.context.lock();
        (u64::from(c.orig_rax as u32), [c.rdi, c.rsi, c.rdx, c.r10, c.r8, c.r9])
    };
    if wanted && nr != u64::from(u32::MAX) {
        serve(task, nr, args).await;
        show_number(task, nr);
    }
    ptrace::stop::syscall_exit(task).await;
}
