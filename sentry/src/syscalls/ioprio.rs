//! Priorities of block I/O: ioprio_get(2), ioprio_set(2). They are kept for whoever asks; no block device is below.
use std::sync::Arc;

use super::sched::{for_each, may_schedule};
use super::table::Row;
use crate::ns::user::Caps;
use crate::row;
use crate::task::Task;
use crate::{Errno, Result};

/// The rows of this area.
pub const ROWS: &[Row] = &[
    row!(251, ioprio_set(which: i32, who: i32, ioprio: i32), fast ioprio_set, Partial, "kept; there is no block device to act on"),
    row!(252, ioprio_get(which: i32, who: i32), fast ioprio_get, Full),
];

const WHO_PROCESS: i32 = 1;
const CLASS_SHIFT: u32 = 13;
const NONE: u32 = 0;
const REAL_TIME: u32 = 1;
const BEST_EFFORT: u32 = 2;
const IDLE: u32 = 3;
/// Levels within a class.
const LEVELS: u32 = 8;

/// What a task that asked for nothing has, by its scheduling class and nice value (ioprio_set(2)).
fn effective(task: &Task) -> u32 {
    let kept = task.sched.io_priority();
    if kept >> CLASS_SHIFT != NONE {
        return kept;
    }
    let class = match task.sched.policy().number {
        1 | 2 => REAL_TIME,
        5 => IDLE,
        _ => BEST_EFFORT,
    };
    let level = u32::try_from((task.sched.nice() + 20) / 5).unwrap_or(0);
    (class << CLASS_SHIFT) | level
}

/// The kinds of `which` follow those of setpriority(2), one higher.
fn which_of(which: i32) -> Result<i32> {
    if (1..=3).contains(&which) { Ok(which - 1) } else { Err(Errno::EINVAL) }
}

fn ioprio_get(task: &Arc<Task>, which: i32, who: i32) -> Result<u64> {
    let mut best = u32::MAX;
    for_each(task, which_of(which)?, who, &mut |t| {
        let one = if which == WHO_PROCESS { t.sched.io_priority() } else { effective(t) };
        best = best.min(one);
    })?;
    Ok(u64::from(best))
}

fn ioprio_set(task: &Arc<Task>, which: i32, who: i32, ioprio: i32) -> Result<u64> {
    let value = ioprio.cast_unsigned() & 0xffff;
    let level = value & ((1 << CLASS_SHIFT) - 1);
    match value >> CLASS_SHIFT {
        REAL_TIME if !task.credentials().has(Caps::SYS_NICE) && !task.credentials().has(Caps::SYS_ADMIN) => {
            return Err(Errno::EPERM);
        }
        // Above the level stand hints, which may be anything.
        REAL_TIME | BEST_EFFORT | IDLE => {}
        NONE if level.is_multiple_of(LEVELS) => {}
        _ => return Err(Errno::EINVAL),
    }
    let mut result = Ok(0);
    for_each(task, which_of(which)?, who, &mut |t| {
        if result.is_ok() {
            match may_schedule(task, t) {
                Ok(()) => t.sched.set_io_priority(value),
                Err(e) => result = Err(e),
            }
        }
    })?;
    result
}
