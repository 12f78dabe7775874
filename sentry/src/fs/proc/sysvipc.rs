//! /proc/sysvipc (sysvipc(7)) and the limits of messages in /proc/sys: System V IPC of the reader's namespace. Owns the texts.
use core::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::pid::parse_number;
use super::{Cx, Row, text};
use crate::ns::ipc::IpcNamespace;
use crate::ns::user::Caps;
use crate::task::Task;
use crate::vfs::file::Caller;
use crate::{Errno, Result};

pub(super) static ROWS: &[Row] = &[text("msg", 0o444, msg), text("sem", 0o444, sem), text("shm", 0o444, shm)];

fn namespace(cx: &Cx) -> Result<Arc<IpcNamespace>> {
    let of_reader = cx.reader.as_ref().and_then(|r| r.ipc.clone());
    of_reader.or_else(|| cx.kernel().first_ns().map(|f| f.ipc.clone())).ok_or(Errno::ESRCH)
}

/// A process as the reader numbers it.
fn number(cx: &Cx, global: i32) -> i32 {
    let root = &cx.kernel().root_pid_ns;
    cx.reader.as_ref().map_or(global, |r| root.number_for(global, &r.pid_namespace))
}

fn ids(cx: &Cx, uid: u32, gid: u32, cuid: u32, cgid: u32) -> String {
    let ns = cx.user_ns();
    let (uid, gid) = (ns.shown_user(uid), ns.shown_group(gid));
    format!("{uid:>5} {gid:>5} {:>5} {:>5}", ns.shown_user(cuid), ns.shown_group(cgid))
}

fn msg(cx: &Cx) -> Result<Vec<u8>> {
    let mut out = String::from(
        "       key      msqid perms      cbytes       qnum lspid lrpid   uid   gid  cuid  cgid      stime      rtime      \
         ctime\n",
    );
    for s in namespace(cx)?.msg.all() {
        let p = &s.perm;
        let _ = writeln!(
            out,
            "{:>10} {:>10}  {:>4o}  {:>10} {:>10} {:>5} {:>5} {} {:>10} {:>10} {:>10}",
            p.key,
            p.id,
            p.mode,
            s.bytes,
            s.count,
            number(cx, s.lspid),
            number(cx, s.lrpid),
            ids(cx, p.uid, p.gid, p.cuid, p.cgid),
            s.stime,
            s.rtime,
            s.ctime,
        );
    }
    Ok(out.into_bytes())
}

fn sem(cx: &Cx) -> Result<Vec<u8>> {
    let mut out =
        String::from("       key      semid perms      nsems   uid   gid  cuid  cgid      otime      ctime\n");
    for s in namespace(cx)?.sem.all() {
        let p = &s.perm;
        let ids = ids(cx, p.uid, p.gid, p.cuid, p.cgid);
        let _ = writeln!(
            out,
            "{:>10} {:>10}  {:>4o} {:>10} {ids} {:>10} {:>10}",
            p.key, p.id, p.mode, s.count, s.otime, s.ctime
        );
    }
    Ok(out.into_bytes())
}

fn shm(cx: &Cx) -> Result<Vec<u8>> {
    let mut out = String::from(
        "       key      shmid perms                  size  cpid  lpid nattch   uid   gid  cuid  cgid      atime      dtime      \
         ctime                   rss                  swap\n",
    );
    for (s, resident) in namespace(cx)?.shm.all() {
        let ids = ids(cx, s.uid, s.gid, s.cuid, s.cgid);
        let _ = writeln!(
            out,
            "{:>10} {:>10}  {:>4o} {:>21} {:>5} {:>5}  {:>5} {ids} {:>10} {:>10} {:>10} {resident:>21} {:>21}",
            s.key,
            s.id,
            s.mode,
            s.size,
            number(cx, s.cpid),
            number(cx, s.lpid),
            s.nattch,
            s.atime,
            s.dtime,
            s.ctime,
            0,
        );
    }
    Ok(out.into_bytes())
}

/// A limit of an IPC namespace.
pub(super) fn show(cx: &Cx, which: fn(&IpcNamespace) -> &AtomicU32) -> Result<Vec<u8>> {
    let ns = namespace(cx)?;
    Ok(format!("{}\n", which(&ns).load(Ordering::Relaxed)).into_bytes())
}

/// Sets it, in the writer's namespace.
pub(super) fn set(caller: &dyn Caller, value: &[u8], which: fn(&IpcNamespace) -> &AtomicU32) -> Result<()> {
    let task = caller.as_any().downcast_ref::<Task>().ok_or(Errno::EPERM)?;
    let ns = task.nsproxy()?.ipc.clone();
    if !caller.credentials().has_in(&ns.owner.user_ns, Caps::SYS_ADMIN) {
        return Err(Errno::EPERM);
    }
    let value = u32::try_from(parse_number(value)?).ok().filter(|&v| i32::try_from(v).is_ok()).ok_or(Errno::EINVAL)?;
    which(&ns).store(value, Ordering::Relaxed);
    Ok(())
}
