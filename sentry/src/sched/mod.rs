//! The scheduler: run queues per worker, stealing, preemption when somebody waits. Owns which task runs where; never what it does.
//!
//! Fairness is by virtual run time: a queue is ordered by the weighted CPU time its entities have had. There is no tick: a
//! preemption deadline exists only while somebody waits for the worker.
pub mod cpu_clock;
pub mod entity;
mod worker;

pub use cpu_clock::{CpuClock, GroupClock, Usage, UsageValue};
pub use entity::{CpuSet, Entity, Policy};
pub use worker::{Scheduler, current_cpu, on_behalf_of, yield_now};
