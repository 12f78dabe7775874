//! The directory of a process, and of a thread in task/.
use core::fmt::Write;

use guest_abi::UserAddr;
use linux_raw_sys::general::RLIM_INFINITY;

use super::node::What;
use super::{Cx, Row, dir, guarded, maps, setting, stat, status, text, user_ns};
use crate::task::Task;
use crate::task::limits::Resource;
use crate::task::ns_file::Kind;
use crate::task::task::RunState;
use crate::vfs::file::Caller;
use crate::vfs::{File, PathRef};
use crate::{Errno, Result};

/// /proc/PID.
pub(super) static PROCESS: Row = Row { name: "", mode: 0o555, what: What::Dir(PROCESS_ROWS) };
/// /proc/PID/task/TID.
pub(super) static THREAD: Row = Row { name: "", mode: 0o555, what: What::Dir(THREAD_ROWS) };

const fn place(name: &'static str, find: fn(&Task) -> Result<PathRef>) -> Row {
    Row { name, mode: 0o777, what: What::Place(find) }
}

const fn namespace(name: &'static str, kind: Kind) -> Row {
    Row { name, mode: 0o777, what: What::Ns(kind) }
}

static NS_ROWS: [Row; 10] = [
    namespace("cgroup", Kind::Cgroup),
    namespace("ipc", Kind::Ipc),
    namespace("mnt", Kind::Mnt),
    namespace("net", Kind::Net),
    namespace("pid", Kind::Pid),
    namespace("pid_for_children", Kind::PidForChildren),
    namespace("time", Kind::Time),
    namespace("time_for_children", Kind::TimeForChildren),
    namespace("user", Kind::User),
    namespace("uts", Kind::Uts),
];

macro_rules! rows {
    ($first:expr) => {
        &[
            $first,
            Row { name: "fd", mode: 0o500, what: What::Fds },
            Row { name: "fdinfo", mode: 0o555, what: What::FdInfos },
            Row { name: "ns", mode: 0o511, what: What::GuardedDir(&NS_ROWS) },
            dir("net", super::system::NET_ROWS),
            guarded("environ", 0o400, environ),
            guarded("auxv", 0o400, auxv),
            text("status", 0o444, status::status),
            guarded("personality", 0o400, personality),
            guarded("syscall", 0o400, syscall),
            text("limits", 0o444, limits),
            setting("comm", 0o644, comm, set_comm),
            text("cmdline", 0o444, cmdline),
            text("stat", 0o444, stat::stat),
            text("statm", 0o444, stat::statm),
            guarded("maps", 0o444, maps::maps),
            Row { name: "mem", mode: 0o600, what: What::Mem },
            place("cwd", |t| Ok(t.fs().get().cwd)),
            place("root", |t| Ok(t.fs().get().root)),
            place("exe", exe),
            text("mounts", 0o444, mounts),
            text("mountinfo", 0o444, mountinfo),
            guarded("smaps", 0o444, maps::smaps),
            guarded("smaps_rollup", 0o444, maps::smaps_rollup),
            text("wchan", 0o444, |_| Ok(b"0".to_vec())),
            text("sched", 0o644, status::sched),
            text("schedstat", 0o444, status::schedstat),
            text("cgroup", 0o444, |_| Ok(b"0::/\n".to_vec())),
            text("oom_score", 0o444, oom_score),
            setting("oom_adj", 0o644, oom_adj, set_oom_adj),
            setting("oom_score_adj", 0o644, oom_score_adj, set_oom_score_adj),
            setting("loginuid", 0o644, |_| Ok(b"4294967295".to_vec()), |_, _, _| Err(Errno::EPERM)),
            text("sessionid", 0o444, |_| Ok(b"4294967295".to_vec())),
            guarded("io", 0o400, io),
            setting("timens_offsets", 0o644, user_ns::time_offsets, user_ns::set_time_offsets),
            setting("uid_map", 0o644, user_ns::uid_map, user_ns::set_uid_map),
            setting("gid_map", 0o644, user_ns::gid_map, user_ns::set_gid_map),
            setting("projid_map", 0o644, user_ns::projid_map, user_ns::set_projid_map),
            setting("setgroups", 0o644, user_ns::setgroups, user_ns::set_setgroups),
        ]
    };
}

static PROCESS_ROWS: &[Row] = rows!(Row { name: "task", mode: 0o555, what: What::Tasks });
static THREAD_ROWS: &[Row] = rows!(text("children", 0o444, children));

/// The file in execution.
pub(super) fn exe_file(task: &Task) -> Option<std::sync::Arc<File>> {
    let of_space = task.space().ok().and_then(|s| s.exe());
    if let Some(file) = of_space {
        let any: std::sync::Arc<dyn crate::mm::MappedFile> = file;
        let any: std::sync::Arc<dyn std::any::Any + Send + Sync> = any;
        if let Ok(file) = any.downcast::<File>() {
            return Some(file);
        }
    }
    task.space().ok()?;
    task.group().image().exe.clone()
}

fn exe(task: &Task) -> Result<PathRef> {
    let file = exe_file(task).ok_or(Errno::ENOENT)?;
    file.path().cloned().ok_or(Errno::ENOENT)
}

/// Bytes of the process's memory that programs may change under us.
fn memory(task: &Task, start: u64, end: u64) -> Vec<u8> {
    /// Linux has no bound; what execve(2) takes has.
    const MOST: u64 = 8 << 20;
    let Ok(space) = task.space() else { return Vec::new() };
    let len = end.saturating_sub(start).min(MOST) as usize;
    let mut out = vec![0; len];
    let mut got = 0;
    while got < len {
        let at = start + got as u64;
        let n = (len - got).min(4096 - (at % 4096) as usize);
        let part = out.get_mut(got..got + n).unwrap_or_default();
        if space.read_forced(UserAddr(at), part).is_err() {
            break;
        }
        got += n;
    }
    out.truncate(got);
    out
}

/// (start, end) of the arguments and of the environment.
fn strings(task: &Task) -> ((u64, u64), (u64, u64)) {
    let of_space = task.space().map(|s| s.image()).unwrap_or_default();
    let of_group = task.group().image();
    let pick = |a: (u64, u64), b: (u64, u64)| if a.1 > a.0 { a } else { b };
    (
        pick((of_space.arg_start, of_space.arg_end), of_group.args),
        pick((of_space.env_start, of_space.env_end), of_group.env),
    )
}

pub(super) fn string_bounds(task: &Task) -> ((u64, u64), (u64, u64)) {
    strings(task)
}

fn cmdline(cx: &Cx) -> Result<Vec<u8>> {
    let task = cx.task()?;
    if task.space().is_err() {
        return Ok(Vec::new());
    }
    let ((start, end), (env_start, env_end)) = strings(&task);
    let mut out = memory(&task, start, end);
    // setproctitle: a program that overwrote the final NUL continues into the environment (proc_pid_cmdline(5)).
    if out.len() as u64 == end.saturating_sub(start) && out.last().is_some_and(|&b| b != 0) && env_start == end {
        out.extend(memory(&task, env_start, env_end));
        let stop = out.iter().position(|&b| b == 0).unwrap_or(out.len());
        out.truncate(stop);
    }
    Ok(out)
}

fn environ(cx: &Cx) -> Result<Vec<u8>> {
    let task = cx.task()?;
    let (_, (start, end)) = strings(&task);
    Ok(memory(&task, start, end))
}

fn auxv(cx: &Cx) -> Result<Vec<u8>> {
    let task = cx.task()?;
    let Ok(space) = task.space() else { return Ok(Vec::new()) };
    let words = space.image().auxv;
    if words.is_empty() {
        return Ok(task.group().image().auxv.clone());
    }
    Ok(words.iter().flat_map(|w| w.to_le_bytes()).collect())
}

fn personality(cx: &Cx) -> Result<Vec<u8>> {
    let value = cx.group()?.personality.load(std::sync::atomic::Ordering::Relaxed);
    Ok(format!("{value:08x}\n").into_bytes())
}

/// The call in which the task is blocked, its arguments, stack pointer and instruction pointer (proc_pid_syscall(5)).
fn syscall(cx: &Cx) -> Result<Vec<u8>> {
    let task = cx.task()?;
    if task.run_state() == RunState::Running || task.running_on().is_some() {
        return Ok(b"running\n".to_vec());
    }
    let c = *task.context.lock();
    let mut out = (c.orig_rax as i64).to_string();
    if c.orig_rax != u64::MAX {
        for argument in [c.rdi, c.rsi, c.rdx, c.r10, c.r8, c.r9] {
            let _ = write!(out, " {argument:#x}");
        }
    }
    let _ = writeln!(out, " {:#x} {:#x}", c.rsp, c.rip);
    Ok(out.into_bytes())
}

fn comm(cx: &Cx) -> Result<Vec<u8>> {
    let mut name = cx.task()?.comm_str();
    name.push(b'\n');
    Ok(name)
}

fn set_comm(cx: &Cx, caller: &dyn Caller, value: &[u8]) -> Result<()> {
    let task = cx.task()?;
    let same = caller.as_any().downcast_ref::<Task>().is_some_and(|c| std::sync::Arc::ptr_eq(c.group(), task.group()));
    if !same {
        return Err(Errno::EINVAL);
    }
    task.set_comm(value.strip_suffix(b"\n").unwrap_or(value));
    Ok(())
}

fn children(cx: &Cx) -> Result<Vec<u8>> {
    let task = cx.task()?;
    let mut out = String::new();
    for child in task.group().children() {
        let n = cx.number(child.pid());
        if n > 0 && child.parent_task().is_some_and(|t| std::sync::Arc::ptr_eq(&t, &task)) {
            let _ = write!(out, "{n} ");
        }
    }
    Ok(out.into_bytes())
}

fn mounts(cx: &Cx) -> Result<Vec<u8>> {
    let root = cx.task()?.fs().get().root;
    let ns = root.mount.namespace().ok_or(Errno::EINVAL)?;
    Ok(ns.mounts_text(&root))
}

fn mountinfo(cx: &Cx) -> Result<Vec<u8>> {
    let root = cx.task()?.fs().get().root;
    let ns = root.mount.namespace().ok_or(Errno::EINVAL)?;
    Ok(ns.mountinfo_text(&root))
}

fn limits(cx: &Cx) -> Result<Vec<u8>> {
    let group = cx.group()?;
    let mut out = format!("{:<25} {:<20} {:<20} {:<10}\n", "Limit", "Soft Limit", "Hard Limit", "Units");
    let show =
        |v: u64| if v == RLIM_INFINITY as u64 || v == u64::MAX { "unlimited".to_string() } else { v.to_string() };
    for (which, name, unit) in [
        (Resource::Cpu, "Max cpu time", "seconds"),
        (Resource::Fsize, "Max file size", "bytes"),
        (Resource::Data, "Max data size", "bytes"),
        (Resource::Stack, "Max stack size", "bytes"),
        (Resource::Core, "Max core file size", "bytes"),
        (Resource::Rss, "Max resident set", "bytes"),
        (Resource::Nproc, "Max processes", "processes"),
        (Resource::Nofile, "Max open files", "files"),
        (Resource::Memlock, "Max locked memory", "bytes"),
        (Resource::As, "Max address space", "bytes"),
        (Resource::Locks, "Max file locks", "locks"),
        (Resource::Sigpending, "Max pending signals", "signals"),
        (Resource::Msgqueue, "Max msgqueue size", "bytes"),
        (Resource::Nice, "Max nice priority", ""),
        (Resource::Rtprio, "Max realtime priority", ""),
        (Resource::Rttime, "Max realtime timeout", "us"),
    ] {
        let limit = group.limit(which);
        // As fs/proc/base.c prints it: units are left out, not padded, where there are none.
        let (soft, hard) = (show(limit.cur), show(limit.max));
        if unit.is_empty() {
            let _ = writeln!(out, "{name:<25} {soft:<20} {hard:<20} ");
        } else {
            let _ = writeln!(out, "{name:<25} {soft:<20} {hard:<20} {unit:<10}");
        }
    }
    Ok(out.into_bytes())
}

fn badness(cx: &Cx) -> Result<i64> {
    let task = cx.task()?;
    let memory = cx.kernel().platform.memory();
    let resident = task.space().map_or(0, |s| s.sizes().1);
    let total = memory.limit().max(1);
    let points = i64::try_from(u128::from(resident) * 1000 / u128::from(total)).unwrap_or(1000);
    let adjust = i64::from(task.group().oom_score_adj.load(std::sync::atomic::Ordering::Relaxed));
    // As oom_score scales it since Linux 5.9: (1000 + points + adjustment) * 2 / 3.
    Ok((1000 + points + adjust).clamp(0, 3000) * 2 / 3)
}

fn oom_score(cx: &Cx) -> Result<Vec<u8>> {
    Ok(format!("{}\n", badness(cx)?).into_bytes())
}

fn oom_score_adj(cx: &Cx) -> Result<Vec<u8>> {
    let value = cx.group()?.oom_score_adj.load(std::sync::atomic::Ordering::Relaxed);
    Ok(format!("{value}\n").into_bytes())
}

/// A decimal number as kstrtoint(9) takes it.
pub(super) fn parse_number(value: &[u8]) -> Result<i64> {
    let text = core::str::from_utf8(value).map_err(|_| Errno::EINVAL)?;
    let text = text.trim_matches(|c: char| c.is_ascii_whitespace() || c == '\0');
    text.parse().map_err(|_| Errno::EINVAL)
}

fn store_adj(cx: &Cx, caller: &dyn Caller, value: i32) -> Result<()> {
    let group = cx.group()?;
    let old = group.oom_score_adj.load(std::sync::atomic::Ordering::Relaxed);
    if value < old && !caller.credentials().has(crate::ns::user::Caps::SYS_RESOURCE) {
        return Err(Errno::EACCES);
    }
    group.oom_score_adj.store(value, std::sync::atomic::Ordering::Relaxed);
    Ok(())
}

fn set_oom_score_adj(cx: &Cx, caller: &dyn Caller, value: &[u8]) -> Result<()> {
    let value = i32::try_from(parse_number(value)?).map_err(|_| Errno::EINVAL)?;
    if !(-1000..=1000).contains(&value) {
        return Err(Errno::EINVAL);
    }
    store_adj(cx, caller, value)
}

fn oom_adj(cx: &Cx) -> Result<Vec<u8>> {
    let value = cx.group()?.oom_score_adj.load(std::sync::atomic::Ordering::Relaxed);
    let old = if value == 1000 { 15 } else { value * 17 / 1000 };
    Ok(format!("{old}\n").into_bytes())
}

fn set_oom_adj(cx: &Cx, caller: &dyn Caller, value: &[u8]) -> Result<()> {
    let value = i32::try_from(parse_number(value)?).map_err(|_| Errno::EINVAL)?;
    if !(-17..=15).contains(&value) {
        return Err(Errno::EINVAL);
    }
    store_adj(cx, caller, if value == 15 { 1000 } else { value * 1000 / 17 })
}

fn io(cx: &Cx) -> Result<Vec<u8>> {
    // Bytes are not counted; zeroes are what Linux shows for a task that did no I/O.
    cx.task()?;
    Ok(b"rchar: 0\nwchar: 0\nsyscr: 0\nsyscw: 0\nread_bytes: 0\nwrite_bytes: 0\ncancelled_write_bytes: 0\n".to_vec())
}
