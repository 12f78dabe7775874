//! Birth, exec, death and waiting: clone(2), execve(2), exit(2), wait4(2) and their like.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use guest_abi::{UserAddr, UserPtr};
use linux_raw_sys::general as raw;

use super::args::{Bits, Fd, PathArg};
use super::limits::rusage;
use super::table::Row;
use crate::row;
use crate::signal::Signal;
use crate::task::clone::{CSIGNAL, CloneRequest, clone_task, flag, wait_vfork};
use crate::task::pidfd::PidFd;
use crate::task::wait::{Options, Report, Target, wait};
use crate::task::{Task, access, exec, exit, ptrace, rseq};
use crate::vfs::path::{Lookup, LookupFlags, open_exec};
use crate::vfs::{File, PathRef};
use crate::{Errno, Result};

/// System calls of this area.
pub const ROWS: &[Row] = &[
    row!(56, clone(flags: Bits, stack: u64, parent_tid: UserAddr, child_tid: UserAddr, tls: u64), slow clone, Full),
    row!(57, fork(), both fork, fork_traced, Full),
    row!(58, vfork(), slow vfork, Full),
    row!(59, execve(path: PathArg, argv: UserAddr, envp: UserAddr), slow execve, Partial, "file capabilities are ignored"),
    row!(60, exit(status: i32), fast exit_call, Full),
    row!(61, wait4(pid: i32, status: UserPtr<i32>, options: i32, rusage: UserAddr), slow wait4, Full),
    row!(186, gettid(), fast gettid, Full),
    row!(218, set_tid_address(tidptr: UserAddr), fast set_tid_address, Full),
    row!(231, exit_group(status: i32), fast exit_group, Full),
    row!(247, waitid(idtype: i32, id: i32, info: UserAddr, options: i32, rusage: UserAddr), slow waitid, Full),
    row!(312, kcmp(pid1: i32, pid2: i32, kind: i32, idx1: u64, idx2: u64), fast kcmp, Partial, "no KCMP_EPOLL_TFD"),
    row!(322, execveat(dirfd: Fd, path: PathArg, argv: UserAddr, envp: UserAddr, flags: u32), slow execveat, Partial,
        "file capabilities are ignored"),
    row!(334, rseq(rseq: UserAddr, rseq_len: u32, flags: Bits, sig: u32), fast rseq_call, Full),
    row!(435, clone3(args: UserAddr, size: usize), slow clone3, Partial, "no cgroup for CLONE_INTO_CGROUP"),
];

fn rseq_call(task: &Arc<Task>, address: UserAddr, len: u32, flags: Bits, sig: u32) -> Result<u64> {
    rseq::register(task, address, len, flags.0 as u32, sig)?;
    Ok(0)
}

async fn start(task: &Arc<Task>, request: CloneRequest) -> Result<u64> {
    let event = ptrace::attach::clone_event(task, request.flags, request.exit_signal);
    let (child, vfork) = clone_task(task, &request)?;
    let number = child.tid_in(task.pid_namespace());
    let shown = ptrace::stop::child_for_tracer(task, &child);
    drop(child);
    if let Some(event) = event {
        ptrace::stop::event(task, event, shown).await;
    }
    if let Some(done) = vfork
        && wait_vfork(task, &done).await
    {
        ptrace::stop::event(task, ptrace::event::VFORK_DONE, shown).await;
    }
    Ok(number as u64)
}

async fn clone(
    task: &Arc<Task>,
    flags: Bits,
    stack: u64,
    parent_tid: UserAddr,
    child_tid: UserAddr,
    tls: u64,
) -> Result<u64> {
    let flags = flags.0 & 0xffff_ffff;
    if flags & flag::PIDFD != 0 && flags & flag::PARENT_SETTID != 0 {
        return Err(Errno::EINVAL);
    }
    let request = CloneRequest {
        flags: flags & !CSIGNAL,
        exit_signal: (flags & CSIGNAL) as i32,
        stack,
        tls,
        parent_tid,
        child_tid,
        pidfd: parent_tid,
        set_tid: Vec::new(),
    };
    start(task, request).await
}

fn fork(task: &Arc<Task>) -> Result<Option<u64>> {
    if task.tracing.is_traced() {
        return Ok(None);
    }
    let request = CloneRequest { exit_signal: Signal::SIGCHLD.number(), ..CloneRequest::default() };
    let (child, _) = clone_task(task, &request)?;
    Ok(Some(child.tid_in(task.pid_namespace()) as u64))
}

async fn fork_traced(task: &Arc<Task>) -> Result<u64> {
    start(task, CloneRequest { exit_signal: Signal::SIGCHLD.number(), ..CloneRequest::default() }).await
}

async fn vfork(task: &Arc<Task>) -> Result<u64> {
    let request = CloneRequest {
        flags: flag::VFORK | flag::VM,
        exit_signal: Signal::SIGCHLD.number(),
        ..CloneRequest::default()
    };
    start(task, request).await
}

/// Words of struct clone_args known here (CLONE_ARGS_SIZE_VER2), and of its first version.
const CLONE_ARGS: usize = 11;
const CLONE_ARGS_V0: usize = 8;

async fn clone3(task: &Arc<Task>, args: UserAddr, size: usize) -> Result<u64> {
    let request = read_clone_args(task, args, size)?;
    start(task, request).await
}

fn read_clone_args(task: &Arc<Task>, args: UserAddr, size: usize) -> Result<CloneRequest> {
    if size > 4096 {
        return Err(Errno::E2BIG);
    }
    if size < CLONE_ARGS_V0 * 8 {
        return Err(Errno::EINVAL);
    }
    let space = task.space()?;
    let mut bytes = vec![0u8; size.max(CLONE_ARGS * 8)];
    space.read_bytes(args, bytes.get_mut(..size).ok_or(Errno::E2BIG)?)?;
    if bytes.iter().skip(CLONE_ARGS * 8).any(|&b| b != 0) {
        return Err(Errno::E2BIG);
    }
    let mut words = bytes.chunks_exact(8).map(|c| c.try_into().map_or(0, u64::from_le_bytes));
    let mut next = || words.next().unwrap_or(0);
    let (flags, pidfd, child_tid, parent_tid) = (next(), next(), next(), next());
    let (exit_signal, stack, stack_size, tls) = (next(), next(), next(), next());
    let (set_tid, set_tid_size, cgroup) = (next(), next(), next());
    if set_tid_size > crate::task::pid_namespace::MAX_LEVEL as u64 || (set_tid == 0) != (set_tid_size == 0) {
        return Err(Errno::EINVAL);
    }
    if exit_signal > 64 || (flags & flag::INTO_CGROUP != 0 && (cgroup > i32::MAX as u64 || size < CLONE_ARGS * 8)) {
        return Err(Errno::EINVAL);
    }
    let set_tid = if set_tid == 0 {
        Vec::new()
    } else {
        space.read_array(UserPtr::<i32>::new(UserAddr(set_tid)), set_tid_size as usize)?
    };
    if flags & !(0xffff_ffff | flag::CLEAR_SIGHAND | flag::INTO_CGROUP) != 0 {
        return Err(Errno::EINVAL);
    }
    if flags & (flag::DETACHED | (CSIGNAL & !flag::NEWTIME)) != 0 {
        return Err(Errno::EINVAL);
    }
    if flags & (flag::THREAD | flag::PARENT) != 0 && exit_signal != 0 {
        return Err(Errno::EINVAL);
    }
    if (stack == 0) != (stack_size == 0) {
        return Err(Errno::EINVAL);
    }
    let top = stack.checked_add(stack_size).filter(|&t| UserAddr(stack).range_ok(t - stack)).ok_or(Errno::EINVAL)?;
    Ok(CloneRequest {
        flags,
        exit_signal: exit_signal as i32,
        stack: top,
        tls,
        parent_tid: UserAddr(parent_tid),
        child_tid: UserAddr(child_tid),
        pidfd: UserAddr(pidfd),
        set_tid,
    })
}

/// Reads a NULL-terminated vector of strings; `left` is the room for strings and pointers.
fn read_strings(task: &Arc<Task>, vector: UserAddr, left: &mut u64) -> Result<Vec<Vec<u8>>> {
    let mut out = Vec::new();
    if vector.is_null() {
        return Ok(out);
    }
    let space = task.space()?;
    let base = UserPtr::<u64>::new(vector);
    loop {
        let pointer: u64 = space.read(base.offset(out.len() as u64))?;
        if pointer == 0 {
            return Ok(out);
        }
        let string = space.read_cstr(UserAddr(pointer), exec::MAX_ARG_STRLEN, Errno::E2BIG)?;
        let cost = string.len() as u64 + 1 + 8;
        *left = left.checked_sub(cost).ok_or(Errno::E2BIG)?;
        out.push(string);
    }
}

async fn exec_file(task: &Arc<Task>, file: Arc<File>, name: Vec<u8>, argv: UserAddr, envp: UserAddr) -> Result<u64> {
    let mut left = exec::args_limit(task);
    let mut args = read_strings(task, argv, &mut left)?;
    let env = read_strings(task, envp, &mut left)?;
    if args.is_empty() {
        // As Linux does since 5.18: a program may rely on argv[0].
        args.push(Vec::new());
    }
    exec::execve(task, file, name, args, env).await?;
    Ok(0)
}

async fn execve(task: &Arc<Task>, path: PathArg, argv: UserAddr, envp: UserAddr) -> Result<u64> {
    let name = task.space()?.read_path(path.0)?;
    let file = {
        let cx = Lookup::new(task.fs().get(), &**task);
        open_exec(&cx, None, &name, LookupFlags::FOLLOW)?
    };
    exec_file(task, file, name, argv, envp).await
}

async fn execveat(
    task: &Arc<Task>,
    dirfd: Fd,
    path: PathArg,
    argv: UserAddr,
    envp: UserAddr,
    flags: u32,
) -> Result<u64> {
    if flags & !(raw::AT_EMPTY_PATH | raw::AT_SYMLINK_NOFOLLOW) != 0 {
        return Err(Errno::EINVAL);
    }
    let name = task.space()?.read_path(path.0)?;
    let mut lookup = LookupFlags::empty();
    lookup.set(LookupFlags::FOLLOW, flags & raw::AT_SYMLINK_NOFOLLOW == 0);
    lookup.set(LookupFlags::EMPTY, flags & raw::AT_EMPTY_PATH != 0);
    let (file, shown) = {
        let cx = Lookup::new(task.fs().get(), &**task);
        if name.first() == Some(&b'/') || dirfd.0 == raw::AT_FDCWD {
            (open_exec(&cx, None, &name, lookup)?, name)
        } else {
            let dir = task.files().get(dirfd.0)?;
            let mut shown = format!("/dev/fd/{}", dirfd.0).into_bytes();
            if !name.is_empty() {
                shown.push(b'/');
                shown.extend_from_slice(&name);
            }
            let start: Option<PathRef> = dir.path().cloned();
            match start {
                Some(at) => (open_exec(&cx, Some(&at), &name, lookup)?, shown),
                None if name.is_empty() && lookup.contains(LookupFlags::EMPTY) => (dir, shown),
                None => return Err(if name.is_empty() { Errno::ENOENT } else { Errno::ENOTDIR }),
            }
        }
    };
    exec_file(task, file, shown, argv, envp).await
}

fn exit_call(task: &Arc<Task>, status: i32) -> Result<u64> {
    task.end(exit::exited(status));
    Ok(0)
}

fn exit_group(task: &Arc<Task>, status: i32) -> Result<u64> {
    task.group().begin_exit(exit::exited(status));
    Ok(0)
}

fn gettid(task: &Arc<Task>) -> Result<u64> {
    Ok(task.tid() as u64)
}

fn set_tid_address(task: &Arc<Task>, tidptr: UserAddr) -> Result<u64> {
    task.clear_child_tid.store(tidptr.0, Ordering::Relaxed);
    Ok(task.tid() as u64)
}

const WAIT4_OPTIONS: u32 =
    raw::WNOHANG | raw::WUNTRACED | raw::WCONTINUED | raw::__WNOTHREAD | raw::__WCLONE | raw::__WALL;
const WAITID_OPTIONS: u32 = raw::WNOHANG
    | raw::WNOWAIT
    | raw::WEXITED
    | raw::WSTOPPED
    | raw::WCONTINUED
    | raw::__WNOTHREAD
    | raw::__WCLONE
    | raw::__WALL;

fn options(bits: u32) -> Options {
    let has = |b: u32| bits & b != 0;
    Options {
        no_hang: has(raw::WNOHANG),
        exited: has(raw::WEXITED),
        stopped: has(raw::WSTOPPED),
        continued: has(raw::WCONTINUED),
        keep: has(raw::WNOWAIT),
        all: has(raw::__WALL),
        clone: has(raw::__WCLONE),
        own_only: has(raw::__WNOTHREAD),
    }
}

fn by_pid(task: &Task, pid: i32) -> Target {
    task.pid_namespace().pid(pid).map_or(Target::Nobody, Target::Pid)
}

fn by_pgid(task: &Task, pgid: i32) -> Target {
    task.pid_namespace().process_group(pgid).map_or(Target::Nobody, Target::ProcessGroup)
}

async fn wait4(task: &Arc<Task>, pid: i32, status: UserPtr<i32>, bits: i32, rusage_ptr: UserAddr) -> Result<u64> {
    let bits = bits as u32;
    if bits & !WAIT4_OPTIONS != 0 {
        return Err(Errno::EINVAL);
    }
    let target = match pid {
        i32::MIN => return Err(Errno::ESRCH),
        -1 => Target::Any,
        0 => Target::ProcessGroup(task.group().process_group()),
        p if p < 0 => by_pgid(task, -p),
        p => by_pid(task, p),
    };
    let o = Options { exited: true, ..options(bits) };
    let Some(report) = wait(task, &target, o).await? else { return Ok(0) };
    let space = task.space()?;
    if !status.is_null() {
        space.write(status, &report.status)?;
    }
    if !rusage_ptr.is_null() {
        space.write(UserPtr::new(rusage_ptr), &rusage(&report.usage))?;
    }
    Ok(report.pid as u64)
}

async fn waitid(
    task: &Arc<Task>,
    idtype: i32,
    id: i32,
    info: UserAddr,
    bits: i32,
    rusage_ptr: UserAddr,
) -> Result<u64> {
    let bits = bits as u32;
    if bits & !WAITID_OPTIONS != 0 || bits & (raw::WEXITED | raw::WSTOPPED | raw::WCONTINUED) == 0 {
        return Err(Errno::EINVAL);
    }
    let mut o = options(bits);
    let mut nonblock = false;
    let target = match idtype as u32 {
        raw::P_ALL => Target::Any,
        raw::P_PID if id > 0 => by_pid(task, id),
        raw::P_PGID if id == 0 => Target::ProcessGroup(task.group().process_group()),
        raw::P_PGID if id > 0 => by_pgid(task, id),
        raw::P_PIDFD if id >= 0 => {
            let file = task.files().get(id)?;
            nonblock = file.nonblocking();
            Target::Pid(file.downcast::<PidFd>().ok_or(Errno::EBADF)?.pid().clone())
        }
        _ => return Err(Errno::EINVAL),
    };
    let hangs = !o.no_hang;
    o.no_hang |= nonblock;
    let report = wait(task, &target, o).await?;
    if report.is_none() && nonblock && hangs {
        return Err(Errno::EAGAIN);
    }
    let space = task.space()?;
    if let Some(r) = &report
        && !rusage_ptr.is_null()
    {
        space.write(UserPtr::new(rusage_ptr), &rusage(&r.usage))?;
    }
    if !info.is_null() {
        let (head, tail) = match &report {
            Some(Report { code, pid, uid, si_status, .. }) => {
                ([Signal::SIGCHLD.number(), 0, *code], [*pid, *uid as i32, *si_status])
            }
            None => ([0; 3], [0; 3]),
        };
        space.write(UserPtr::new(info), &head)?;
        space.write(UserPtr::new(info.wrapping_add(16)), &tail)?;
    }
    Ok(0)
}

fn kcmp(task: &Arc<Task>, pid1: i32, pid2: i32, kind: i32, idx1: u64, idx2: u64) -> Result<u64> {
    let ns = task.pid_namespace();
    let a = ns.task(pid1).ok_or(Errno::ESRCH)?;
    let b = ns.task(pid2).ok_or(Errno::ESRCH)?;
    access::may_inspect(task, &a)?;
    access::may_inspect(task, &b)?;
    fn order<T: ?Sized>(a: &Arc<T>, b: &Arc<T>) -> u64 {
        match Arc::as_ptr(a).cast::<()>().cmp(&Arc::as_ptr(b).cast::<()>()) {
            core::cmp::Ordering::Equal => 0,
            core::cmp::Ordering::Less => 1,
            core::cmp::Ordering::Greater => 2,
        }
    }
    let fd = |n: u64| i32::try_from(n).map_err(|_| Errno::EBADF);
    Ok(match kind {
        0 => order(&a.files().get(fd(idx1)?)?, &b.files().get(fd(idx2)?)?),
        1 => order(&a.space()?, &b.space()?),
        2 => order(&a.files(), &b.files()),
        3 => order(&a.fs(), &b.fs()),
        4 => order(&a.group().signals.actions(), &b.group().signals.actions()),
        // No task has an I/O context or System V undo list of its own.
        5 | 6 => 0,
        _ => return Err(Errno::EINVAL),
    })
}
