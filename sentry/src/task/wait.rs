//! wait4(2) and waitid(2): which child has news, and taking them. Owns the choice; never how a child changes state.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::ptrace::report::News;
use super::{Pid, ProcessGroup, Task, ThreadGroup, exit, ptrace};
use crate::event::{Events, WaitEnd};
use crate::kernel::Kinship;
use crate::sched::UsageValue;
use crate::signal::stop::death_code;
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
    let uid = child.leader().map_or(0, |l| waiter.shown_uid_of(&l));
    let mut usage = child.usage();
    usage.add(&child.children_usage.get());
    Report { pid: child.pid().number_in(waiter.pid_namespace()), uid, code: 0, si_status: 0, status: 0, usage }
}

fn dead(child: &Arc<ThreadGroup>, waiter: &Arc<Task>, status: i32) -> Report {
    let (code, si_status) = death_code(status);
    Report { code, si_status, status, ..base(child, waiter) }
}

/// One look: news, or None if eligible children have none; ECHILD without an eligible child.
pub fn try_wait(waiter: &Arc<Task>, target: &Target, o: Options) -> Result<Option<Report>> {
    let kernel = waiter.kernel();
    let group = waiter.group();
    let mut reaped = Vec::new();
    let result = {
        let kinship = kernel.kinship();
        let one = match target {
            Target::Nobody => Some(None),
            Target::Pid(p) => Some(p.group().filter(|g| g.parent().is_some_and(|p| Arc::ptr_eq(&p, group)))),
            _ => None,
        };
        let mut found = false;
        let mut news = None;
        let mut look = |child: &Arc<ThreadGroup>| {
            if !eligible(child, waiter, target, o) {
                return false;
            }
            found = true;
            news = child_news(child, waiter, o, &kinship, &mut reaped);
            group.settle_child(child);
            news.is_some()
        };
        match one {
            Some(child) => drop(child.as_ref().is_some_and(&mut look)),
            None => {
                // Only those with news, then one to see whether there is anybody to wait for.
                if !any_child(group, true, &mut look) && !found {
                    found = any_child(group, false, |child| eligible(child, waiter, target, o));
                }
            }
        }
        if news.is_none() && !group.tracees.is_empty() {
            news = traced_news(waiter, target, o, &mut found, &kinship, &mut reaped);
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

/// Whether `f` holds for some child of `group`, or for one of those that may have news. Asks in order of global numbers until
/// it does.
fn any_child(group: &ThreadGroup, with_news: bool, mut f: impl FnMut(&Arc<ThreadGroup>) -> bool) -> bool {
    const PAGE: usize = 16;
    let mut from = 0;
    loop {
        let page = group.children_from(from, PAGE, with_news);
        let Some(next) = page.last().and_then(|c| c.pid().global().checked_add(1)) else { return false };
        if page.iter().any(&mut f) {
            return true;
        }
        from = next;
    }
}

/// What there is to report of a child that the waiter does not trace; takes it unless WNOWAIT.
fn child_news(
    child: &Arc<ThreadGroup>,
    waiter: &Arc<Task>,
    o: Options,
    kinship: &Kinship<'_>,
    reaped: &mut Vec<Arc<ThreadGroup>>,
) -> Option<Report> {
    let group = waiter.group();
    let tracee = child.leader().filter(|l| l.tracing.is_traced());
    if tracee.as_ref().is_some_and(|l| ptrace::traced_by(l, group)) {
        // Looked at among the tracees.
        return None;
    }
    let zombie = child.state.lock().zombie;
    if let Some(status) = zombie {
        // A traced zombie is its tracer's first.
        if !o.exited || tracee.is_some() {
            return None;
        }
        let report = dead(child, waiter, status);
        if !o.keep {
            group.children_usage.add(&report.usage);
            reaped.extend(exit::release(child, kinship));
        }
        return Some(report);
    }
    let (code, si_status, status) = match child.signals.stop_report(o.stopped, o.continued, !o.keep)? {
        StopReport::Stopped(s) => (code::CLD_STOPPED, s.number(), s.number() << 8 | 0x7f),
        StopReport::Continued => (code::CLD_CONTINUED, Signal::SIGCONT.number(), 0xffff),
    };
    Some(Report { code, si_status, status, ..base(child, waiter) })
}

/// News of those whom the waiter's group traces.
fn traced_news(
    waiter: &Arc<Task>,
    target: &Target,
    o: Options,
    found: &mut bool,
    kinship: &Kinship<'_>,
    reaped: &mut Vec<Arc<ThreadGroup>>,
) -> Option<Report> {
    let group = waiter.group();
    let tracees = match target {
        Target::Pid(p) => p.task().filter(|t| ptrace::traced_by(t, group)).into_iter().collect(),
        Target::Nobody => return None,
        Target::Any | Target::ProcessGroup(_) => group.tracees.all(),
    };
    for t in &tracees {
        let own = || t.tracing.tracer().is_some_and(|tracer| Arc::ptr_eq(&tracer, waiter));
        let named = match target {
            Target::ProcessGroup(pg) => Arc::ptr_eq(&t.group().process_group(), pg),
            _ => true,
        };
        if !named || (o.own_only && !own()) {
            continue;
        }
        *found = true;
        let report = |code, si_status, status| Report {
            pid: t.tid_in(waiter.pid_namespace()),
            uid: waiter.shown_uid_of(t),
            code,
            si_status,
            status,
            usage: t.sched.clock.reading(t.now()),
        };
        match ptrace::report::news(t, o.exited, !o.keep) {
            Some(News::Stopped(stop)) => return Some(report(code::CLD_TRAPPED, stop, stop << 8 | 0x7f)),
            Some(News::Dead) => {
                let leads = t.is_leader();
                let status = if leads { t.group().state.lock().zombie } else { None };
                let status = status.unwrap_or_else(|| t.tracing.exit_status.load(Ordering::Relaxed));
                let (code, si_status) = death_code(status);
                let mut report = report(code, si_status, status);
                if leads {
                    report.usage = base(t.group(), waiter).usage;
                }
                if !o.keep {
                    if leads && !ptrace::reparented(t) {
                        group.children_usage.add(&report.usage);
                        reaped.extend(exit::release(t.group(), kinship));
                    } else {
                        exit::reap_tracee(t, kinship, reaped);
                    }
                }
                return Some(report);
            }
            None => {}
        }
        if t.is_leader() && t.group().signals.stop_report(false, o.continued, !o.keep).is_some() {
            return Some(report(code::CLD_CONTINUED, Signal::SIGCONT.number(), 0xffff));
        }
    }
    None
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
