//! wait4(2) and waitid(2): which child has news, and taking them. Owns the choice; never how a child changes state.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Pid, ProcessGroup, Task, ThreadGroup, exit};
use crate::event::{Events, WaitEnd};
use crate::sched::UsageValue;
use crate::signal::{Signal, StopReport, code};
use crate::{Errno, Result};

/// Whom to wait for.
#[derive(Clone)]
pub enum Target {
    /// Any child.
    Any,
    /// The child with this identity.
    Pid(Arc<Pid>),
    /// Children in this process group.
    ProcessGroup(Arc<ProcessGroup>),
    /// A number that names nobody.
    Nobody,
}

/// W* options of wait(2).
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct Options {
    pub no_hang: bool,
    pub exited: bool,
    pub stopped: bool,
    pub continued: bool,
    /// WNOWAIT: leave the news.
    pub keep: bool,
    /// __WALL.
    pub all: bool,
    /// __WCLONE.
    pub clone: bool,
    /// __WNOTHREAD.
    pub own_only: bool,
}

/// A child's news.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// The child's tgid as the waiter sees it.
    pub pid: i32,
    /// Its real user id.
    pub uid: u32,
    /// CLD_*.
    pub code: i32,
    /// Exit code or signal, as si_status.
    pub si_status: i32,
    /// wait(2)'s form.
    pub status: i32,
    /// What the child and its waited-for children used.
    pub usage: UsageValue,
}

fn eligible(child: &Arc<ThreadGroup>, waiter: &Arc<Task>, target: &Target, o: Options) -> bool {
    let named = match target {
        Target::Any => true,
        Target::Pid(p) => Arc::ptr_eq(child.pid(), p),
        Target::ProcessGroup(pg) => Arc::ptr_eq(&child.process_group(), pg),
        Target::Nobody => false,
    };
    if !named {
        return false;
    }
    let is_clone = child.exit_signal.load(Ordering::Relaxed) != Signal::SIGCHLD.number();
    if !o.all && is_clone != o.clone {
        return false;
    }
    !o.own_only || child.state.lock().parent_task.upgrade().is_some_and(|t| Arc::ptr_eq(&t, waiter))
}

fn base(child: &Arc<ThreadGroup>, waiter: &Arc<Task>) -> Report {
    let uid = child.leader().map_or(0, |l| l.credentials().uid);
    let mut usage = child.usage();
    usage.add(&child.children_usage.get());
    Report { pid: child.pid().number_in(waiter.pid_namespace()), uid, code: 0, si_status: 0, status: 0, usage }
}

fn dead(child: &Arc<ThreadGroup>, waiter: &Arc<Task>, status: i32) -> Report {
    let (code, si_status) = match status & 0x7f {
        0 => (code::CLD_EXITED, (status >> 8) & 0xff),
        n if status & 0x80 != 0 => (code::CLD_DUMPED, n),
        n => (code::CLD_KILLED, n),
    };
    Report { code, si_status, status, ..base(child, waiter) }
}

/// One look: news, or None if eligible children have none; ECHILD without an eligible child.
pub fn try_wait(waiter: &Arc<Task>, target: &Target, o: Options) -> Result<Option<Report>> {
    let kernel = waiter.kernel();
    let group = waiter.group();
    let mut reaped = None;
    let result = {
        let kinship = kernel.kinship();
        let one = match target {
            Target::Pid(p) => Some(p.group().filter(|g| g.parent().is_some_and(|p| Arc::ptr_eq(&p, group)))),
            _ => None,
        };
        let children = match one {
            Some(child) => child.into_iter().collect(),
            None => group.children(),
        };
        let mut found = false;
        let mut news = None;
        for child in &children {
            if !eligible(child, waiter, target, o) {
                continue;
            }
            found = true;
            let zombie = child.state.lock().zombie;
            if let Some(status) = zombie {
                if !o.exited {
                    continue;
                }
                let report = dead(child, waiter, status);
                if !o.keep {
                    group.children_usage.add(&report.usage);
                    reaped = exit::release(child, &kinship);
                }
                news = Some(report);
                break;
            }
            if let Some(report) = child.signals.stop_report(o.stopped, o.continued, !o.keep) {
                let (code, si_status, status) = match report {
                    StopReport::Stopped(s) => (code::CLD_STOPPED, s.number(), s.number() << 8 | 0x7f),
                    StopReport::Continued => (code::CLD_CONTINUED, Signal::SIGCONT.number(), 0xffff),
                };
                news = Some(Report { code, si_status, status, ..base(child, waiter) });
                break;
            }
        }
        match news {
            Some(n) => Ok(Some(n)),
            None if found => Ok(None),
            None => Err(Errno::ECHILD),
        }
    };
    drop(reaped);
    result
}

/// Waits for news; None only with WNOHANG. ECHILD without an eligible child, ERESTARTSYS on a signal.
pub async fn wait(waiter: &Arc<Task>, target: &Target, o: Options) -> Result<Option<Report>> {
    let first = try_wait(waiter, target, o)?;
    if first.is_some() || o.no_hang {
        return Ok(first);
    }
    let queue = waiter.group().child_events.clone();
    let end = waiter.wait(vec![(queue, Events::IN)], None, || try_wait(waiter, target, o).transpose()).await;
    match end {
        Ok(report) => report.map(Some),
        Err(WaitEnd::Interrupted | WaitEnd::TimedOut) => Err(Errno::ERESTARTSYS),
    }
}
