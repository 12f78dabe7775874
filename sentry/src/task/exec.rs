//! execve(2): a new program in the same process. Owns the point of no return and what survives it; never the image (see
//! `loader`).
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::limits::Resource;
use super::{Task, exit, ptrace};
use crate::event::Events;
use crate::loader::{self, LoadRequest, Loaded};
use crate::mm::Tenancy;
use crate::ns::user::Caps;
use crate::signal::Signal;
use crate::vfs::File;
use crate::{Errno, Result};

/// Most bytes in one argument or environment string, its NUL included (MAX_ARG_STRLEN).
pub const MAX_ARG_STRLEN: usize = 32 * 4096;
/// However large the stack limit is, arguments take no more than this (three quarters of _STK_LIM).
const ARGS_HARD: u64 = 6 << 20;
/// However small it is, they may take this (ARG_MAX of old).
const ARGS_SOFT: u64 = 128 << 10;

/// Bytes that arguments, environment and their pointers may take: a quarter of the stack limit within bounds.
pub fn args_limit(task: &Task) -> u64 {
    (task.limit(Resource::Stack) / 4).clamp(ARGS_SOFT, ARGS_HARD)
}

/// Executes `file`. On success the task's next entry into the guest starts the new program.
pub async fn execve(
    task: &Arc<Task>,
    file: Arc<File>,
    path: Vec<u8>,
    argv: Vec<Vec<u8>>,
    envp: Vec<Vec<u8>>,
) -> Result<()> {
    let loaded = loader::load(LoadRequest { task, file, path, argv, envp })?;
    let old_tid = ptrace::stop::number_for_tracer(task);
    end_siblings(task).await?;
    commit(task, loaded);
    ptrace::stop::exec(task, old_tid).await;
    Ok(())
}

/// Ends all other tasks of the group, and takes the leader's place. EAGAIN if the group is exiting or in another exec.
pub(super) async fn end_siblings(task: &Arc<Task>) -> Result<()> {
    let group = task.group();
    let others = {
        let mut s = group.state.lock();
        if s.exiting.is_some() || s.exec_by.is_some() {
            return Err(Errno::EAGAIN);
        }
        if s.tasks.len() == 1 {
            return Ok(());
        }
        s.exec_by = Some(task.clone());
        s.tasks.values().filter(|t| !Arc::ptr_eq(t, task)).cloned().collect::<Vec<_>>()
    };
    for t in others {
        t.notify_signal();
    }
    let gone = task
        .wait_killable(vec![(group.task_events.clone(), Events::IN)], || {
            let s = group.state.lock();
            s.tasks.values().all(|t| Arc::ptr_eq(t, task) || (t.is_leader() && t.is_dead())).then_some(())
        })
        .await;
    if gone.is_err() {
        // Killed meanwhile: the caller exits at its next look.
        group.state.lock().exec_by = None;
        return Err(Errno::EINTR);
    }
    if !task.is_leader() {
        take_leadership(task);
    }
    group.state.lock().exec_by = None;
    Ok(())
}

/// The caller becomes the leader: its tid becomes the tgid in every namespace, the old leader is gone without a notice.
fn take_leadership(task: &Arc<Task>) {
    let group = task.group();
    let kernel = task.kernel();
    let old_leader = {
        let kinship = kernel.kinship();
        let own = task.pid();
        let old_leader = {
            let mut s = group.state.lock();
            let old = s.leader.take();
            // A reader of /proc must not meet a process that began later.
            if let Some(old) = &old {
                task.start_time.store(old.start_time.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            s.leader = Some(task.clone());
            s.tasks.clear();
            s.tasks.insert(group.pid().global(), task.clone());
            old
        };
        // Its tracer hears no more of the old leader.
        if let Some(tracer) = old_leader.as_ref().and_then(|old| old.tracing.tracer()) {
            old_leader.iter().for_each(|old| ptrace::attach::unlink(old, 0, &kinship));
            tracer.group().child_events.wake(Events::IN);
        }
        // The leader's identity changes hands before anybody can miss it; then the caller's old one is free.
        group.pid().hold_task(task);
        task.set_pid(group.pid().clone());
        own.drop_task();
        group.task_count.store(1, Ordering::Relaxed);
        old_leader
    };
    if old_leader.is_some() {
        kernel.uncount_task();
    }
}

/// Puts the loaded program in place. Nothing here can fail.
pub(super) fn commit(task: &Arc<Task>, loaded: Loaded) {
    let group = task.group();
    let new = loaded.credentials;
    // A program that runs as somebody else is not its caller's to look into, nor tied to its caller's parent. Who it is comes before its
    // memory, so that nobody is asked about the one and shown the other.
    let dumpable = new.euid == new.uid && new.egid == new.gid && !loaded.secure;
    if !dumpable {
        group.dumpable.store(0, Ordering::Relaxed);
    }
    // Never fails: the closure does not.
    let _ = task.change_credentials(|c| {
        *c = new;
        Ok(())
    });
    if loaded.secure && !loaded.watched {
        let user_ns = task.credentials().user_ns.clone();
        let kinship = task.kernel().kinship();
        let late = task.tracing.tracer().is_some_and(|t| !t.credentials().has_in(&user_ns, Caps::SYS_PTRACE));
        drop(kinship);
        if late {
            // It began to be traced after its ids were decided, by somebody whom they would not have been given to.
            crate::signal::send::force_fatal(task, Signal::SIGKILL);
        }
    }
    if let Ok(old) = task.space() {
        task.sched.clock.saw_rss(old.sizes().1 / 1024);
    }
    exit::leave_memory(task, task.space().ok());
    task.futexes_settled.store(false, Ordering::Relaxed);
    *task.space.lock() = Some(Tenancy::new(loaded.space));
    *task.context.lock() = loaded.context;
    task.fpu.reset();
    task.rseq.clear();
    if let Ok(proxy) = task.nsproxy() {
        let own = proxy.with_own_time();
        let time = own.time.clone();
        task.set_nsproxy(Some(own));
        // The image was made for the clocks of before.
        task.enter_time(&time);
    }
    task.tracing.forget_breakpoints();
    task.set_comm(&loaded.comm);
    group.set_image(loaded.image);
    group.has_execed.store(true, Ordering::Relaxed);
    group.execs.fetch_add(1, Ordering::Relaxed);
    group.exit_signal.store(Signal::SIGCHLD.number(), Ordering::Relaxed);
    task.signals.reset_for_exec();
    group.signals.reset_for_exec();
    group.timers.reset_for_exec();
    // A table shared with another process is not that process's to lose descriptors from.
    let files = task.files();
    let shared = Arc::strong_count(&files) > 2;
    drop(files);
    if shared && task.unshare_files().is_err() {
        // As Linux: past the point of no return there is nobody to tell.
        crate::signal::send::force_fatal(task, Signal::SIGKILL);
    } else {
        task.files().close_cloexec();
    }
    group.dumpable.store(i32::from(dumpable), Ordering::Relaxed);
    if loaded.secure {
        task.pdeath_signal.store(0, Ordering::Relaxed);
    }
}
