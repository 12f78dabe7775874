//! Signal actions, masks, waits and sending (signal(7)).
use std::sync::Arc;

use guest_abi::types::{SigAction, SigInfo, SigStack, Timespec};
use guest_abi::{UserAddr, UserPtr};

use super::args::{Bits, Fd};
use super::table::Row;
use crate::event::WaitEnd;
use crate::fs::signalfd::SignalFd;
use crate::row;
use crate::signal::queue::code;
use crate::signal::{self, Sender, SigSet, Signal, action, altstack, deliver, frame, send};
use crate::task::Task;
use crate::task::limits::Resource;
use crate::timers::clock;
use crate::vfs::OpenFlags;
use crate::{Errno, Result};

/// The rows of this area.
pub const ROWS: &[Row] = &[
    row!(13, rt_sigaction(signum: i32, act: UserPtr<SigAction>, oldact: UserPtr<SigAction>, sigsetsize: u64), fast rt_sigaction, Full),
    row!(14, rt_sigprocmask(how: u32, set: UserPtr<u64>, oldset: UserPtr<u64>, sigsetsize: u64), fast rt_sigprocmask, Full),
    row!(15, rt_sigreturn(), fast rt_sigreturn, Full),
    row!(34, pause(), slow pause, Full),
    row!(62, kill(pid: i32, sig: i32), fast kill, Full),
    row!(127, rt_sigpending(set: UserAddr, sigsetsize: u64), fast rt_sigpending, Full),
    row!(128, rt_sigtimedwait(set: UserPtr<u64>, info: UserPtr<SigInfo>, timeout: UserPtr<Timespec>, sigsetsize: u64), slow rt_sigtimedwait, Full),
    row!(129, rt_sigqueueinfo(pid: i32, sig: i32, info: UserPtr<SigInfo>), fast rt_sigqueueinfo, Full),
    row!(130, rt_sigsuspend(set: UserAddr, sigsetsize: u64), slow rt_sigsuspend, Full),
    row!(131, sigaltstack(ss: UserPtr<SigStack>, old_ss: UserPtr<SigStack>), fast sigaltstack, Full),
    row!(200, tkill(tid: i32, sig: i32), fast tkill, Full),
    row!(219, restart_syscall(), slow restart_syscall, Full),
    row!(234, tgkill(tgid: i32, tid: i32, sig: i32), fast tgkill, Full),
    row!(282, signalfd(fd: Fd, mask: UserPtr<u64>, sizemask: u64), fast signalfd, Full),
    row!(289, signalfd4(fd: Fd, mask: UserPtr<u64>, sizemask: u64, flags: Bits), fast signalfd4, Full),
    row!(297, rt_tgsigqueueinfo(tgid: i32, tid: i32, sig: i32, info: UserPtr<SigInfo>), fast rt_tgsigqueueinfo, Full),
];

/// sizeof(sigset_t) of the kernel.
const SIGSET_SIZE: u64 = 8;

fn rt_sigaction(
    task: &Arc<Task>,
    signum: i32,
    act: UserPtr<SigAction>,
    oldact: UserPtr<SigAction>,
    sigsetsize: u64,
) -> Result<u64> {
    if sigsetsize != SIGSET_SIZE {
        return Err(Errno::EINVAL);
    }
    let new = if act.is_null() { None } else { Some(task.space()?.read(act)?) };
    let signal = Signal::new(signum).ok_or(Errno::EINVAL)?;
    if new.is_some() && signal.is_kernel_only() {
        return Err(Errno::EINVAL);
    }
    let actions = task.group().signals.actions();
    let old = match new {
        Some(mut action) => {
            action.flags &= action::sa::KNOWN;
            action.mask &= !SigSet::KERNEL_ONLY.0;
            let old = actions.set(signal, action);
            if action::is_ignored(signal, action.handler) {
                // POSIX: what is pending and now ignored goes, blocked or not.
                signal::discard(task.group(), signal);
            }
            old
        }
        None => actions.get(signal),
    };
    if !oldact.is_null() {
        task.space()?.write(oldact, &old)?;
    }
    Ok(0)
}

fn rt_sigprocmask(task: &Arc<Task>, how: u32, set: UserPtr<u64>, oldset: UserPtr<u64>, sigsetsize: u64) -> Result<u64> {
    if sigsetsize != SIGSET_SIZE {
        return Err(Errno::EINVAL);
    }
    let old = task.signals.mask();
    if !set.is_null() {
        let change = SigSet(task.space()?.read(set)?);
        let new = match how {
            0 => old | change,
            1 => old.without(change),
            2 => change,
            _ => return Err(Errno::EINVAL),
        };
        signal::set_mask(task, new);
    }
    if !oldset.is_null() {
        task.space()?.write(oldset, &old.0)?;
    }
    Ok(0)
}

fn rt_sigreturn(task: &Arc<Task>) -> Result<u64> {
    Ok(frame::sigreturn(task))
}

async fn pause(task: &Arc<Task>) -> Result<u64> {
    let _ = task.wait(Vec::new(), None, || None::<()>).await;
    Err(Errno::ERESTARTNOHAND)
}

fn rt_sigpending(task: &Arc<Task>, set: UserAddr, sigsetsize: u64) -> Result<u64> {
    let len = usize::try_from(sigsetsize).unwrap_or(usize::MAX);
    let pending = (task.signals.pending() | task.group().signals.pending()) & task.signals.mask();
    let bytes = pending.0.to_le_bytes();
    let bytes = bytes.get(..len).ok_or(Errno::EINVAL)?;
    task.space()?.write_bytes(set, bytes)?;
    Ok(0)
}

async fn rt_sigtimedwait(
    task: &Arc<Task>,
    set: UserPtr<u64>,
    info: UserPtr<SigInfo>,
    timeout: UserPtr<Timespec>,
    sigsetsize: u64,
) -> Result<u64> {
    if sigsetsize != SIGSET_SIZE {
        return Err(Errno::EINVAL);
    }
    let wanted = SigSet(task.space()?.read(set)?);
    let deadline = if timeout.is_null() {
        None
    } else {
        let span = clock::span(&task.space()?.read(timeout)?).ok_or(Errno::EINVAL)?;
        Some(task.now().saturating_add(span))
    };
    let entry = deliver::wait_for_signal(task, wanted, deadline).await.map_err(|end| match end {
        WaitEnd::Interrupted => Errno::EINTR,
        WaitEnd::TimedOut => Errno::EAGAIN,
    })?;
    if !info.is_null() {
        task.space()?.write(info, &entry.info)?;
    }
    Ok(entry.signal.number() as u64)
}

async fn rt_sigsuspend(task: &Arc<Task>, set: UserAddr, sigsetsize: u64) -> Result<u64> {
    if sigsetsize != SIGSET_SIZE {
        return Err(Errno::EINVAL);
    }
    let mask = SigSet(task.space()?.read(UserPtr::new(set))?);
    signal::set_temporary_mask(task, mask);
    let _ = task.wait(Vec::new(), None, || None::<()>).await;
    Err(Errno::ERESTARTNOHAND)
}

fn sigaltstack(task: &Arc<Task>, ss: UserPtr<SigStack>, old_ss: UserPtr<SigStack>) -> Result<u64> {
    let new = if ss.is_null() { None } else { Some(task.space()?.read(ss)?) };
    let sp = task.context.lock().rsp;
    let old = task.signals.alt_stack().to_abi(sp);
    if let Some(new) = new {
        altstack::set(task, &new, sp, true)?;
    }
    if !old_ss.is_null() {
        task.space()?.write(old_ss, &old)?;
    }
    Ok(0)
}

async fn restart_syscall(task: &Arc<Task>) -> Result<u64> {
    match task.signals.take_restart() {
        Some(block) => (block.run)(task, block.args).await,
        None => Err(Errno::EINTR),
    }
}

/// The signal argument of kill(2) and its family: 0 only asks for permission.
fn signal_or_probe(sig: i32) -> Result<Option<Signal>> {
    if sig == 0 { Ok(None) } else { Signal::new(sig).map(Some).ok_or(Errno::EINVAL) }
}

fn kill(task: &Arc<Task>, pid: i32, sig: i32) -> Result<u64> {
    let ns = task.pid_namespace();
    match pid {
        1.. => {
            let group = ns.task(pid).map(|t| t.group().clone()).or_else(|| ns.group(pid)).ok_or(Errno::ESRCH)?;
            send::kill_group(&group, signal_or_probe(sig)?, task)?;
        }
        0 => send::kill_pgrp(&task.group().process_group(), signal_or_probe(sig)?, task)?,
        -1 => {
            let signal = signal_or_probe(sig);
            kill_all(task, signal)?;
        }
        i32::MIN => return Err(Errno::ESRCH),
        _ => {
            let target = ns.process_group(-pid).ok_or(Errno::ESRCH)?;
            send::kill_pgrp(&target, signal_or_probe(sig)?, task)?;
        }
    }
    Ok(0)
}

/// kill(-1): every group of the namespace but its init and the caller's own.
fn kill_all(task: &Arc<Task>, signal: Result<Option<Signal>>) -> Result<()> {
    let ns = task.pid_namespace();
    let mut result = Ok(());
    let mut found = false;
    let mut from = 2;
    // Nobody is born meanwhile, so that no child escapes what its parent gets.
    let _kinship = task.kernel().kinship();
    loop {
        let page = ns.groups_from(from, 64);
        let Some(next) = page.last().and_then(|(n, _)| n.checked_add(1)) else { break };
        for (_, group) in page {
            if Arc::ptr_eq(&group, task.group()) {
                continue;
            }
            found = true;
            let one = signal.and_then(|s| send::kill_group(&group, s, task));
            if one != Err(Errno::EPERM) {
                result = one;
            }
        }
        from = next;
    }
    if found { result } else { Err(Errno::ESRCH) }
}

/// Finds the task for tkill(2), tgkill(2) and rt_tgsigqueueinfo(2).
fn find_task(task: &Arc<Task>, tgid: Option<i32>, tid: i32) -> Result<Arc<Task>> {
    let target = task.pid_namespace().task(tid).ok_or(Errno::ESRCH)?;
    if tgid.is_some_and(|n| n != target.group().pid().number_in(task.pid_namespace())) {
        return Err(Errno::ESRCH);
    }
    Ok(target)
}

fn send_specific(task: &Arc<Task>, tgid: Option<i32>, tid: i32, sig: i32, info: Option<SigInfo>) -> Result<u64> {
    let target = find_task(task, tgid, tid)?;
    let signal = signal_or_probe(sig)?;
    // Linux asks for permission only where the information says that it comes from a user, which here it always does.
    send::check_permission(task, target.group(), signal)?;
    if let Some(signal) = signal {
        let info = info.unwrap_or_else(|| send::info_from(task, target.group(), signal, code::SI_TKILL));
        signal::send_to_task(&target, signal, info, Sender::Task(task))?;
    }
    Ok(0)
}

fn tkill(task: &Arc<Task>, tid: i32, sig: i32) -> Result<u64> {
    if tid <= 0 {
        return Err(Errno::EINVAL);
    }
    send_specific(task, None, tid, sig, None)
}

fn tgkill(task: &Arc<Task>, tgid: i32, tid: i32, sig: i32) -> Result<u64> {
    if tgid <= 0 || tid <= 0 {
        return Err(Errno::EINVAL);
    }
    send_specific(task, Some(tgid), tid, sig, None)
}

/// Reads the siginfo of a queueing call.
fn queued_info(task: &Arc<Task>, sig: i32, info: UserPtr<SigInfo>) -> Result<SigInfo> {
    let mut info = task.space()?.read(info)?;
    info.signo = sig;
    Ok(info)
}

/// EPERM for a siginfo that only the kernel or kill(2) may make, unless it goes to oneself.
fn check_queued(task: &Arc<Task>, to: i32, info: &SigInfo) -> Result<()> {
    if (info.code >= 0 || info.code == code::SI_TKILL) && to != task.tid() {
        return Err(Errno::EPERM);
    }
    Ok(())
}

fn rt_sigqueueinfo(task: &Arc<Task>, pid: i32, sig: i32, info: UserPtr<SigInfo>) -> Result<u64> {
    let info = queued_info(task, sig, info)?;
    check_queued(task, pid, &info)?;
    let target = task.pid_namespace().task(pid).filter(|_| pid > 0).ok_or(Errno::ESRCH)?;
    let signal = signal_or_probe(sig)?;
    send::check_permission(task, target.group(), signal)?;
    if let Some(signal) = signal {
        signal::send_to_group(target.group(), signal, info, Sender::Task(task))?;
    }
    Ok(0)
}

fn rt_tgsigqueueinfo(task: &Arc<Task>, tgid: i32, tid: i32, sig: i32, info: UserPtr<SigInfo>) -> Result<u64> {
    let info = queued_info(task, sig, info)?;
    if tgid <= 0 || tid <= 0 {
        return Err(Errno::EINVAL);
    }
    check_queued(task, tid, &info)?;
    send_specific(task, Some(tgid), tid, sig, Some(info))
}

fn signalfd(task: &Arc<Task>, fd: Fd, mask: UserPtr<u64>, sizemask: u64) -> Result<u64> {
    signalfd4(task, fd, mask, sizemask, Bits(0))
}

fn signalfd4(task: &Arc<Task>, fd: Fd, mask: UserPtr<u64>, sizemask: u64, flags: Bits) -> Result<u64> {
    if sizemask != SIGSET_SIZE {
        return Err(Errno::EINVAL);
    }
    let mask = SigSet(task.space()?.read(mask)?).without(SigSet::KERNEL_ONLY);
    // The C prototype has int flags.
    let flags = OpenFlags::from_bits_retain(flags.0 as u32);
    if !(flags - (OpenFlags::CLOEXEC | OpenFlags::NONBLOCK)).is_empty() {
        return Err(Errno::EINVAL);
    }
    if fd.0 == -1 {
        let file = SignalFd::open(task, mask, flags & OpenFlags::NONBLOCK);
        let fd = task.files().insert(file, flags.contains(OpenFlags::CLOEXEC), 0, task.limit(Resource::Nofile))?;
        return Ok(fd as u64);
    }
    let file = task.files().get(fd.0)?;
    file.downcast::<SignalFd>().ok_or(Errno::EINVAL)?.set_mask(task, mask);
    Ok(fd.0 as u64)
}
