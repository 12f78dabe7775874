//! The processes of a sandbox for whoever runs it, with the facts that /proc shows. Owns nothing; walks the tgid index and visits
//! threads only when they are asked for. Runs on any host thread: it never brings in a page of the program.
use std::sync::Arc;

use super::pid;
use super::stat::state_letter;
use crate::kernel::Kernel;
use crate::task::{Task, ThreadGroup};
use crate::time::Nanos;

/// Bytes of a command line at most.
const COMMAND: u64 = 4096;
/// Processes looked up under one hold of the index.
const STEP: usize = 64;

/// A process. Numbers are those of the outermost PID namespace.
pub struct Process {
    /// Tgid.
    pub pid: i32,
    /// The parent's; 0 for the first process.
    pub ppid: i32,
    /// Process group.
    pub pgid: i32,
    /// Session.
    pub sid: i32,
    /// Effective user.
    pub uid: u32,
    /// The letter of /proc/PID/stat.
    pub state: char,
    /// Number of threads.
    pub threads: usize,
    /// User time of all its threads.
    pub user: Nanos,
    /// System time of all its threads.
    pub system: Nanos,
    /// Start, counted from the sandbox's.
    pub start: Nanos,
    /// Name (comm).
    pub name: Vec<u8>,
    /// Arguments, as far as they are in memory and within 4 KiB; empty for a zombie.
    pub command: Vec<Vec<u8>>,
    /// Its threads, if they were asked for.
    pub tasks: Vec<Thread>,
}

/// A thread.
pub struct Thread {
    /// Tid.
    pub tid: i32,
    /// The letter of its state.
    pub state: char,
    /// User time.
    pub user: Nanos,
    /// System time.
    pub system: Nanos,
    /// Name (comm).
    pub name: Vec<u8>,
}

/// A page of processes with numbers at or above `from`, in order, and where the next page begins. It ends after `max` processes
/// or, with `max_threads` given, which asks for the threads too, with the process that reaches so many threads.
pub fn page(kernel: &Kernel, from: i32, max: usize, max_threads: Option<usize>) -> (Vec<Process>, Option<i32>) {
    let mut out = Vec::new();
    let mut threads = 0;
    let mut next = from;
    loop {
        let groups = kernel.root_pid_ns.groups_from(next, STEP);
        if groups.is_empty() {
            return (out, None);
        }
        for (number, group) in &groups {
            // Reaped since.
            let Some(process) = process(kernel, *number, group, max_threads.is_some()) else { continue };
            threads += process.tasks.len();
            out.push(process);
            next = number.saturating_add(1);
            if out.len() >= max || max_threads.is_some_and(|most| threads >= most) {
                return (out, Some(next));
            }
        }
        next = groups.last().map_or(i32::MAX, |(number, _)| number.saturating_add(1));
    }
}

fn process(kernel: &Kernel, number: i32, group: &Arc<ThreadGroup>, threads: bool) -> Option<Process> {
    let ns = &kernel.root_pid_ns;
    let leader = group.leader()?;
    let pg = group.process_group();
    let usage = group.usage();
    Some(Process {
        pid: number,
        ppid: group.parent_number_in(ns),
        pgid: pg.pid().number_in(ns),
        sid: pg.session().pid().number_in(ns),
        uid: leader.credentials().euid,
        state: state_letter(&leader),
        threads: group.task_count(),
        user: usage.user,
        system: usage.system,
        start: group.start_time.saturating_sub(kernel.started),
        name: leader.comm_str(),
        command: command(&leader),
        tasks: if threads { group.tasks().iter().map(|t| thread(kernel, t)).collect() } else { Vec::new() },
    })
}

fn thread(kernel: &Kernel, task: &Arc<Task>) -> Thread {
    let usage = task.sched.clock.reading(kernel.timers.now());
    Thread {
        tid: task.global_tid(),
        state: state_letter(task),
        user: usage.user,
        system: usage.system,
        name: task.comm_str(),
    }
}

fn command(leader: &Task) -> Vec<Vec<u8>> {
    let Ok(space) = leader.space() else { return Vec::new() };
    let ((start, end), _) = pid::string_bounds(leader);
    let mut bytes = vec![0; end.saturating_sub(start).min(COMMAND) as usize];
    let got = space.read_present(guest_abi::UserAddr(start), &mut bytes);
    bytes.truncate(got);
    let text = bytes.strip_suffix(b"\0").unwrap_or(&bytes);
    if text.is_empty() { Vec::new() } else { text.split(|&b| b == 0).map(<[u8]>::to_vec).collect() }
}
