//! /proc/PID/stat and statm (proc_pid_stat(5)).
use std::sync::atomic::Ordering;

use guest_abi::layout::PAGE_SIZE;

use super::{Cx, pid};
use crate::Result;
use crate::task::Task;
use crate::task::limits::Resource;
use crate::task::task::RunState;

/// Nanoseconds in a clock tick (USER_HZ is 100).
const TICK: u64 = 10_000_000;

/// The letter of a task's state.
pub(super) fn state_letter(task: &Task) -> char {
    if task.is_dead() || task.group().is_zombie() {
        return 'Z';
    }
    if task.group().is_stopped() {
        return 'T';
    }
    match task.run_state() {
        RunState::Running => 'R',
        RunState::Sleeping => 'S',
        RunState::Stopped => 'T',
        RunState::Traced => 't',
        RunState::Zombie => 'Z',
        RunState::Dead => 'X',
    }
}

/// (pending of the task, pending of the group, blocked, ignored, caught).
pub(super) fn signal_sets(task: &Task) -> [u64; 5] {
    let (ignored, caught) = task.group().signals.actions().summary();
    [task.signals.pending().0, task.group().signals.pending().0, task.signals.mask().0, ignored.0, caught.0]
}

/// The priority that `stat` shows: 20 + nice, or below zero for real-time policies.
fn priority(task: &Task) -> (i64, i64) {
    let policy = task.sched.policy();
    let nice = i64::from(task.sched.nice());
    match policy.number {
        1 | 2 => (-1 - i64::from(policy.priority), i64::from(policy.priority)),
        _ => (20 + nice, 0),
    }
}

pub(super) fn stat(cx: &Cx) -> Result<Vec<u8>> {
    let task = cx.task()?;
    let group = task.group();
    let ns = &cx.shared.ns;
    let pg = group.process_group();
    let session = pg.session().clone();
    let tty = session.tty();
    let tty_number = tty.as_ref().map_or(0, |t| t.device());
    let foreground = tty.and_then(|t| t.foreground()).map_or(-1, |f| f.pid().number_in(ns));
    let usage = if cx.single() { task.sched.clock.reading(task.now()) } else { group.usage() };
    let reaped = group.children_usage.get();
    let sets = signal_sets(&task);
    let (prio, rt_priority) = priority(&task);
    let space = task.space().ok();
    let sizes = space.as_ref().map(|s| s.usage()).unwrap_or_default();
    let image = space.as_ref().map(|s| s.image()).unwrap_or_default();
    let ((arg_start, arg_end), (env_start, env_end)) =
        if space.is_some() { pid::string_bounds(&task) } else { ((0, 0), (0, 0)) };
    let start_stack = if image.start_stack != 0 { image.start_stack } else { group.image().stack_top };
    let start_brk = space.as_ref().map_or(0, |s| s.brk_range().0);
    let start_time = if cx.single() { task.start_time.load(Ordering::Relaxed) } else { group.start_time };
    // Times count from the sandbox's own boot.
    let start_time = start_time.saturating_sub(cx.kernel().started).saturating_add_signed(cx.boottime_offset());
    let exit_code = 0;
    let mut out = format!("{} (", cx.number(&task.pid())).into_bytes();
    out.extend_from_slice(&task.comm_str());
    let fields: [i128; 49] = [
        i128::from(group.parent_number_in(ns)),
        i128::from(pg.pid().number_in(ns)),
        i128::from(session.pid().number_in(ns)),
        i128::from(tty_number),
        i128::from(foreground),
        // PF_RANDOMIZE; PF_FORKNOEXEC before the first exec.
        if group.has_execed.load(Ordering::Relaxed) { 0x40_0000 } else { 0x40_0040 },
        i128::from(usage.minor_faults),
        i128::from(reaped.minor_faults),
        i128::from(usage.major_faults),
        i128::from(reaped.major_faults),
        i128::from(usage.user / TICK),
        i128::from(usage.system / TICK),
        i128::from(reaped.user / TICK),
        i128::from(reaped.system / TICK),
        i128::from(prio),
        i128::from(task.sched.nice()),
        group.task_count() as i128,
        0,
        i128::from(start_time / TICK),
        i128::from(sizes.total),
        i128::from((sizes.anonymous + sizes.file) / PAGE_SIZE),
        i128::from(group.limit(Resource::Rss).cur),
        i128::from(image.start_code),
        i128::from(image.end_code),
        i128::from(start_stack),
        0,
        0,
        i128::from(sets[0] & 0x7fff_ffff),
        i128::from(sets[2] & 0x7fff_ffff),
        i128::from(sets[3] & 0x7fff_ffff),
        i128::from(sets[4] & 0x7fff_ffff),
        0,
        0,
        0,
        i128::from(group.exit_signal.load(Ordering::Relaxed)),
        task.sched.last_cpu() as i128,
        i128::from(rt_priority),
        i128::from(task.sched.policy().number),
        0,
        0,
        0,
        i128::from(image.start_data),
        i128::from(image.end_data),
        i128::from(start_brk),
        i128::from(arg_start),
        i128::from(arg_end),
        i128::from(env_start),
        i128::from(env_end),
        exit_code,
    ];
    out.extend_from_slice(format!(") {}", state_letter(&task)).as_bytes());
    for field in fields {
        out.extend_from_slice(format!(" {field}").as_bytes());
    }
    out.push(b'\n');
    Ok(out)
}

pub(super) fn statm(cx: &Cx) -> Result<Vec<u8>> {
    let task = cx.task()?;
    let Ok(space) = task.space() else { return Ok(b"0 0 0 0 0 0 0\n".to_vec()) };
    let sizes = space.usage();
    let image = space.image();
    let text = image.end_code.saturating_sub(image.start_code).div_ceil(PAGE_SIZE);
    Ok(format!(
        "{} {} {} {text} 0 {} 0\n",
        sizes.total / PAGE_SIZE,
        (sizes.anonymous + sizes.file) / PAGE_SIZE,
        sizes.file / PAGE_SIZE,
        sizes.data / PAGE_SIZE
    )
    .into_bytes())
}
