//! Death: exit(2), exit_group(2), what a dying task leaves and to whom, and the reaping of zombies. Owns the order in which memory,
//! files, kinship and notices are settled; never decides who must die.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use guest_abi::{UserAddr, UserPtr};

use super::task::RunState;
use super::{PidNamespace, Task, ThreadGroup, ptrace, session};
use crate::event::Events;
use crate::futex;
use crate::kernel::{ExitStatus, Kinship};
use crate::mm::Tenancy;
use crate::signal::{self, Sender, Signal, stop};
use crate::vfs::FdTable;

/// A page of the tgid index while a namespace dies.
const PAGE: usize = 64;

/// wait(2)'s form of an argument of exit(2).
pub fn exited(code: i32) -> i32 {
    (code & 0xff) << 8
}

/// Lets go of the memory: the robust list and the child-tid word while it is there, then the vfork parent goes on.
pub(super) fn leave_memory(task: &Arc<Task>, space: Option<Arc<crate::mm::AddressSpace>>) {
    let robust = task.robust_list.swap(0, Ordering::Relaxed);
    if let Some(space) = &space {
        futex::robust::exit(task, space, UserAddr(robust));
    }
    futex::pi::exit(task);
    let clear = task.clear_child_tid.swap(0, Ordering::Relaxed);
    let shared = task.space.lock().as_ref().is_some_and(Tenancy::is_shared);
    // The word is for those who go on in this memory: without them, Linux leaves it as it is.
    if clear != 0
        && shared
        && let Some(space) = &space
    {
        // A bad address is the program's own affair.
        let _ = space.write(UserPtr::new(UserAddr(clear)), &0u32);
        futex::wake_at(task.kernel(), space, UserAddr(clear), 1);
    }
    let old = task.space.lock().take();
    drop(old);
    drop(space);
    let vfork = task.vfork_done.lock().take();
    if let Some(done) = vfork {
        done.complete();
    }
}

/// Ends `task` with a wait(2) status. The last task of a group ends the group.
pub(super) async fn exit_task(task: Arc<Task>, status: i32) {
    let kernel = task.kernel().clone();
    let group = task.group().clone();
    ptrace::stop::exit(&task, status).await;
    signal::deliver::exit_task(&task);
    let last = {
        let mut s = group.state.lock();
        s.live = s.live.saturating_sub(1);
        // Where no exit of the whole group was decided, the last task's status is the group's.
        if s.live == 0 {
            s.exiting.get_or_insert(status);
        }
        s.live == 0
    };
    let space = task.space().ok();
    if last && let Some(space) = &space {
        task.sched.clock.saw_rss(space.sizes().1 / 1024);
    }
    leave_memory(&task, space);
    task.leave_sem_undo();
    task.set_files(Arc::new(FdTable::new(&task.kernel().platform)));
    task.set_nsproxy(None);
    let mut dropped: Vec<Arc<ThreadGroup>> = Vec::new();
    if last {
        group.timers.clear();
        leave_terminal(&group);
        if group.tgid() == 1 {
            // A member that waits for its tracer to let it go would never be gone if that is this task.
            {
                let kinship = kernel.kinship();
                ptrace::attach::tracer_exits(&task, &kinship, &mut dropped);
            }
            dropped.clear();
            end_namespace(&group).await;
        }
    }
    let ended = {
        let kinship = kernel.kinship();
        ptrace::attach::tracer_exits(&task, &kinship, &mut dropped);
        leave_children(&task, &group, last, &kinship, &mut dropped);
        // The rest of this poll counts for nobody.
        task.sched.clock.stop(|| kernel.timers.now());
        task.set_dead();
        task.set_run_state(RunState::Zombie);
        let status = group.exiting().unwrap_or(status);
        task.tracing.exit_status.store(status, Ordering::Relaxed);
        if !task.is_leader() && !task.tracing.is_traced() {
            forget_thread(&task);
        }
        let all_gone = is_empty(&group);
        if all_gone && !group.is_zombie() {
            become_zombie(&group, &kinship, &mut dropped);
            true
        } else {
            tell_tracer(&task, status);
            false
        }
    };
    group.task_events.wake(Events::IN);
    drop(dropped);
    if ended && group.parent().is_none() && Arc::ptr_eq(group.pid_namespace(), &kernel.root_pid_ns) && group.tgid() == 1
    {
        let status = group.state.lock().zombie.unwrap_or(0);
        let released = {
            let kinship = kernel.kinship();
            release(&group, &kinship)
        };
        drop(released);
        kernel.set_exit(ExitStatus(status));
    }
}

/// A dead thread that does not lead its group is gone for good.
fn forget_thread(task: &Arc<Task>) {
    let group = task.group();
    group.state.lock().tasks.remove(&task.global_tid());
    group.task_count.fetch_sub(1, Ordering::Relaxed);
    task.pid().exited.wake(Events::IN);
    task.pid().drop_task();
    task.kernel().uncount_task();
    task.set_run_state(RunState::Dead);
}

/// Whether no task is left but the dead leader: dead threads stay for their tracers.
fn is_empty(group: &ThreadGroup) -> bool {
    let s = group.state.lock();
    s.live == 0 && s.tasks.len() <= 1 && s.tasks.values().all(|t| t.is_dead() && t.is_leader())
}

/// Tells the tracer of a dead task, if it has one.
fn tell_tracer(task: &Arc<Task>, status: i32) -> bool {
    let Some(tracer) = task.tracing.tracer() else { return false };
    let (what, shown) = stop::death_code(status);
    let alone = task.is_leader() && task.group().is_zombie() && !ptrace::reparented(task);
    let signal =
        if alone { Signal::new(task.group().exit_signal.load(Ordering::Relaxed)) } else { Some(Signal::SIGCHLD) };
    if let Some(signal) = signal {
        stop::tell_tracer(task, &tracer, what, shown, signal);
    }
    tracer.group().child_events.wake(Events::IN);
    true
}

/// The tracer has waited for a dead tracee: a thread is gone, a process becomes its parent's.
pub(super) fn reap_tracee(task: &Arc<Task>, kinship: &Kinship<'_>, dropped: &mut Vec<Arc<ThreadGroup>>) {
    ptrace::attach::unlink(task, 0, kinship);
    untraced(task, kinship, dropped);
}

/// A dead task has no tracer any more.
fn untraced(task: &Arc<Task>, kinship: &Kinship<'_>, dropped: &mut Vec<Arc<ThreadGroup>>) {
    let group = task.group();
    if !task.is_leader() {
        forget_thread(task);
        if is_empty(group) && !group.is_zombie() {
            become_zombie(group, kinship, dropped);
        }
        group.task_events.wake(Events::IN);
    } else if group.is_zombie() && (reaped_by_namespace(group) || notify(group)) {
        dropped.extend(release(group, kinship));
    }
}

/// `tracer`, which ends, no longer traces `task`.
pub(super) fn tracer_gone(task: &Arc<Task>, tracer: &Task, kinship: &Kinship<'_>, dropped: &mut Vec<Arc<ThreadGroup>>) {
    let own_child = task.group().parent().is_some_and(|p| Arc::ptr_eq(&p, tracer.group()));
    // A child of the tracer's own was told of already; whoever inherits it hears of it then.
    if task.is_dead() && !(task.is_leader() && own_child) {
        untraced(task, kinship, dropped);
    }
}

/// A session leader lets go of the controlling terminal.
fn leave_terminal(group: &Arc<ThreadGroup>) {
    let session = group.session();
    if session.pid().global() == group.pid().global()
        && let Some(tty) = session.set_tty(None)
    {
        tty.disassociate(&session);
    }
}

/// The init of a namespace is gone: nobody may be born in it any more, everybody in it dies, and this returns when they are
/// gone.
async fn end_namespace(init: &Arc<ThreadGroup>) {
    let ns = init.pid_namespace().clone();
    let kernel = init.kernel().clone();
    let mut zombies = Vec::new();
    {
        let _kinship = kernel.kinship();
        ns.set_exiting();
    }
    let mut from = 2;
    loop {
        let page = ns.groups_from(from, PAGE);
        let Some(last) = page.last().map(|p| p.0) else { break };
        for (_, group) in page {
            if !group.begin_exit(Signal::SIGKILL.number()) {
                zombies.push(group);
            }
        }
        from = last.saturating_add(1);
    }
    let released: Vec<_> = {
        let kinship = kernel.kinship();
        zombies
            .iter()
            .filter(|g| g.is_zombie() && reaped_by_namespace(g))
            .filter_map(|g| release(g, &kinship))
            .collect()
    };
    drop(released);
    drop(zombies);
    let empty = crate::event::wait_for(None, vec![(ns.thinned.clone(), Events::IN)], None, || {
        (ns.group_count() <= 1).then_some(())
    });
    // Nothing interrupts this wait and it has no deadline.
    let _ = empty.await;
}

/// Whether a group of an exiting namespace is reaped without notice: its parent is in that namespace too, or gone.
fn reaped_by_namespace(group: &Arc<ThreadGroup>) -> bool {
    if group.pid().numbers().len() == 1 && group.pid().own() == 1 {
        // The sandbox's first process has no parent and no namespace that could reap it.
        return false;
    }
    group
        .pid()
        .numbers()
        .iter()
        .any(|(ns, number)| ns.exiting() && *number != 1 && group.parent().is_none_or(|p| p.pid().number_in(ns) != 0))
}

/// reboot(2): the init of a PID namespace ends as if `signal` had killed it, and its namespace with it.
pub fn end_init(init: &Arc<ThreadGroup>, signal: Signal) {
    let ns = init.pid_namespace();
    ns.set_reboot(signal.number());
    init.begin_exit(Signal::SIGKILL.number());
}

/// Who takes over the children of a dying group.
fn reaper(group: &Arc<ThreadGroup>) -> Option<Arc<ThreadGroup>> {
    let ns: &Arc<PidNamespace> = group.pid_namespace();
    let alive = |g: &Arc<ThreadGroup>| g.state.lock().live > 0;
    if group.has_subreaper.load(Ordering::Relaxed) {
        let mut at = group.parent();
        while let Some(g) = at {
            if !Arc::ptr_eq(g.pid_namespace(), ns) || g.tgid() == 1 {
                break;
            }
            if g.is_subreaper.load(Ordering::Relaxed) && alive(&g) {
                return Some(g);
            }
            at = g.parent();
        }
    }
    ns.init().filter(|init| !Arc::ptr_eq(init, group) && alive(init))
}

/// Hands the children of a dying task to a sibling, or those of a dying group to its reaper. Parent-death signals go out.
fn leave_children(
    task: &Arc<Task>,
    group: &Arc<ThreadGroup>,
    last: bool,
    kinship: &Kinship<'_>,
    dropped: &mut Vec<Arc<ThreadGroup>>,
) {
    if !last {
        if task.own_children.load(Ordering::Relaxed) == 0 {
            return;
        }
        let sibling = group.state.lock().tasks.values().find(|t| !Arc::ptr_eq(t, task) && !t.is_dead()).cloned();
        let Some(sibling) = sibling else { return };
        for child in group.children() {
            let mut s = child.state.lock();
            if s.parent_task.upgrade().is_some_and(|p| Arc::ptr_eq(&p, task)) {
                s.parent_task = Arc::downgrade(&sibling);
                sibling.own_children.fetch_add(1, Ordering::Relaxed);
                drop(s);
                parent_death(&child, task);
            }
        }
        return;
    }
    let (children, news) = {
        let mut s = group.state.lock();
        (core::mem::take(&mut s.children), core::mem::take(&mut s.news))
    };
    drop(news);
    if children.is_empty() {
        return;
    }
    let to = reaper(group);
    let to_task = to.as_ref().and_then(|g| g.state.lock().tasks.values().find(|t| !t.is_dead()).cloned());
    for (number, child) in children {
        {
            let mut s = child.state.lock();
            s.parent = to.as_ref().map_or_else(std::sync::Weak::new, Arc::downgrade);
            s.parent_task = to_task.as_ref().map_or_else(std::sync::Weak::new, Arc::downgrade);
        }
        super::answers::group_changed(&child);
        if let Some(to) = &to {
            to.state.lock().children.insert(number, child.clone());
            to.settle_child(&child);
        }
        if let Some(t) = &to_task {
            t.own_children.fetch_add(1, Ordering::Relaxed);
        }
        child.exit_signal.store(Signal::SIGCHLD.number(), Ordering::Relaxed);
        parent_death(&child, task);
        if child.is_zombie() {
            if to.is_none() || notify(&child) {
                dropped.extend(release(&child, kinship));
            }
        } else {
            orphan_check(&child, group);
        }
    }
    if let Some(to) = to {
        to.child_events.wake(Events::IN);
    }
}

/// PR_SET_PDEATHSIG of the tasks of `child`, whose parent task has just died and counts as the sender: to the init of a namespace
/// below it comes from outside.
fn parent_death(child: &Arc<ThreadGroup>, parent: &Task) {
    if !child.wants_pdeath.load(Ordering::Relaxed) {
        return;
    }
    for t in child.tasks() {
        if let Some(signal) = Signal::new(t.pdeath_signal.load(Ordering::Relaxed)) {
            let info = signal::send::info_from(parent, child, signal, signal::code::SI_USER);
            let _ = signal::send_to_group(child, signal, info, Sender::Task(parent));
        }
    }
}

/// `child` loses `father`: if that orphans its process group while a member is stopped, the members get SIGHUP and SIGCONT.
fn orphan_check(child: &Arc<ThreadGroup>, father: &Arc<ThreadGroup>) {
    let (pg, other) = (child.process_group(), father.process_group());
    if Arc::ptr_eq(&pg, &other) || !Arc::ptr_eq(pg.session(), other.session()) {
        return;
    }
    if pg.has_stopped_member() && pg.is_orphaned(None) {
        signal::send_to_pgrp(&pg, Signal::SIGHUP, Sender::Kernel);
        signal::send_to_pgrp(&pg, Signal::SIGCONT, Sender::Kernel);
    }
}

/// All tasks of the group are gone: it becomes a zombie, or goes at once if nobody cares.
fn become_zombie(group: &Arc<ThreadGroup>, kinship: &Kinship<'_>, dropped: &mut Vec<Arc<ThreadGroup>>) {
    let pg = group.process_group();
    if let Some(parent) = group.parent() {
        let other = parent.process_group();
        // The dying group may have been what kept its process group from being orphaned.
        if !Arc::ptr_eq(&pg, &other)
            && Arc::ptr_eq(pg.session(), other.session())
            && pg.has_stopped_member()
            && pg.is_orphaned(Some(group))
        {
            signal::send_to_pgrp(&pg, Signal::SIGHUP, Sender::Kernel);
            signal::send_to_pgrp(&pg, Signal::SIGCONT, Sender::Kernel);
        }
    }
    {
        let mut s = group.state.lock();
        let reboot = if group.tgid() == 1 { group.pid_namespace().reboot() } else { None };
        s.zombie = reboot.or(s.exiting);
    }
    let image = super::thread_group::Image::default();
    group.set_image(image);
    if let Some(parent) = group.parent() {
        parent.note_child(group);
    }
    group.pid().exited.wake(Events::IN);
    let quiet = reaped_by_namespace(group);
    if quiet || notify(group) {
        let parent = group.parent();
        dropped.extend(release(group, kinship));
        if let Some(p) = parent {
            p.child_events.wake(Events::IN);
        }
    }
}

/// Tells the parent of a zombie. True if the zombie is to be reaped at once.
fn notify(group: &Arc<ThreadGroup>) -> bool {
    let status = group.state.lock().zombie.unwrap_or(0);
    // The parent hears of it when the tracer has.
    if group.leader().is_some_and(|l| tell_tracer(&l, status)) {
        return false;
    }
    let Some(parent) = group.parent() else { return false };
    let mut signal = Signal::new(group.exit_signal.load(Ordering::Relaxed));
    if signal.is_some() && group.parent_execs.load(Ordering::Relaxed) != parent.execs.load(Ordering::Relaxed) {
        // The program that asked for another signal is no more.
        signal = Some(Signal::SIGCHLD);
    }
    let reap = stop::notify_exit(group, &parent, signal, status);
    parent.child_events.wake(Events::IN);
    reap
}

/// Takes a zombie away: its numbers are free, its places are given up. Gives the group, to be dropped without locks; None if
/// somebody was faster.
pub(super) fn release(group: &Arc<ThreadGroup>, kinship: &Kinship<'_>) -> Option<Arc<ThreadGroup>> {
    let (leader, parent, parent_task) = {
        let mut s = group.state.lock();
        if s.reaped || s.zombie.is_none() {
            return None;
        }
        s.reaped = true;
        s.tasks.clear();
        (s.leader.take(), s.parent.upgrade(), s.parent_task.upgrade())
    };
    group.task_count.store(0, Ordering::Relaxed);
    if let Some(parent) = parent {
        let mut s = parent.state.lock();
        s.children.remove(&group.pid().global());
        s.news.remove(&group.pid().global());
    }
    if let Some(t) = parent_task {
        let _ = t.own_children.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
    }
    if let Some(leader) = leader {
        ptrace::attach::unlink(&leader, 0, kinship);
        leader.set_run_state(RunState::Dead);
        leader.pid().drop_task();
    }
    group.pid().drop_group();
    let pg = group.process_group();
    session::leave(&pg, group);
    group.kernel().uncount_task();
    Some(group.clone())
}
