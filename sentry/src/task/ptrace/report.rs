//! What a tracer's wait(2) sees of its tracees: stops, and deaths before the parents see them.
use std::sync::Arc;

use super::super::Task;
use super::flag;

/// News of one tracee.
pub enum News {
    /// A stop: the high part of the status.
    Stopped(i32),
    /// It is dead, with this status; not to be taken before the last thread of its group if it leads it.
    Dead,
}

/// News of `tracee` that its tracer has not been told of. `consume` unless WNOWAIT.
pub fn news(tracee: &Arc<Task>, exited: bool, consume: bool) -> Option<News> {
    if tracee.is_dead() {
        let takable = !tracee.is_leader() || tracee.group().is_zombie();
        return (exited && takable).then_some(News::Dead);
    }
    if tracee.tracing.flags() & (flag::STOPPED | flag::LISTENING) != flag::STOPPED {
        return None;
    }
    tracee
        .tracing
        .with(|r| {
            let stop = r.stop.as_mut().filter(|s| s.unreported)?;
            if consume {
                stop.unreported = false;
            }
            Some(News::Stopped(stop.code))
        })
        .flatten()
}
