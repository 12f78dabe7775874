//! The report of `--stats`: what the sandbox did, as text or JSON.
use std::fmt::Write;

use sentry::Kernel;
use sentry::platform::KernelMemory;
use sentry::syscalls::table;
use sentry::trace::ExitReason;
use serde::Serialize;

use super::options::StatsFormat;

/// Counters of a finished sandbox.
#[derive(Serialize)]
struct Report {
    exits: Vec<Count>,
    /// System calls served without an exit.
    served_inside: u64,
    /// System calls that the guest answered by itself.
    answered_in_guest: u64,
    /// Call sites of programs that were made direct.
    direct_sites: u64,
    context_switches: u64,
    /// Tasks that waited for the CPU of whoever woke them while an idle one served its calls.
    kept_near: u64,
    /// How often one had waited long enough and moved to the idle CPU.
    moved_after_wait: u64,
    syscalls: Vec<Count>,
    absent_syscalls: Vec<Count>,
    page_faults: u64,
    processes_made: usize,
    memory_peak_bytes: u64,
    /// Of the memory in use at the end, what the sentry kept for the sandbox.
    kernel_memory_bytes: u64,
    wall_ns: u64,
}

#[derive(Serialize)]
struct Count {
    name: String,
    count: u64,
}

/// The report in the wanted form, with a final newline.
pub fn report(kernel: &Kernel, format: StatsFormat) -> String {
    let stats = &kernel.stats;
    let exits =
        ExitReason::ALL.iter().map(|&(reason, name)| Count { name: name.to_owned(), count: stats.exits(reason) });
    let (mut syscalls, mut absent) = (Vec::new(), Vec::new());
    for (nr, count) in stats.syscalls() {
        let name = match table::name(nr) {
            "" if nr == u64::MAX => "beyond_table".to_owned(),
            "" => format!("syscall_{nr}"),
            name => name.to_owned(),
        };
        if table::row(nr).is_some() { &mut syscalls } else { &mut absent }.push(Count { name, count });
    }
    for list in [&mut syscalls, &mut absent] {
        list.sort_by_key(|c| std::cmp::Reverse(c.count));
    }
    let report = Report {
        exits: exits.filter(|c| c.count > 0).collect(),
        served_inside: stats.inside(),
        answered_in_guest: stats.answered_in_guest(),
        direct_sites: stats.direct_sites(),
        context_switches: kernel.sched.context_switches(),
        kept_near: kernel.sched.kept_near(),
        moved_after_wait: stats.moved_after_wait(),
        syscalls,
        absent_syscalls: absent,
        page_faults: stats.exits(ExitReason::PageFault),
        processes_made: kernel.fork_count(),
        memory_peak_bytes: kernel.platform.memory().peak(),
        kernel_memory_bytes: kernel_memory(kernel),
        wall_ns: kernel.uptime(),
    };
    match format {
        StatsFormat::Json => serde_json::to_string(&report).unwrap_or_default() + "\n",
        StatsFormat::Text => text(&report),
    }
}

/// Bytes charged for the sentry's own memory.
fn kernel_memory(kernel: &Kernel) -> u64 {
    KernelMemory::ALL.iter().map(|&what| kernel.platform.memory().charged(what)).sum()
}

fn text(report: &Report) -> String {
    let mut out = String::new();
    let mut section = |title: &str, counts: &[Count]| {
        if !counts.is_empty() {
            let _ = writeln!(out, "{title}:");
            for c in counts {
                let _ = writeln!(out, "  {:>12}  {}", c.count, c.name);
            }
        }
    };
    section("exits", &report.exits);
    section("system calls", &report.syscalls);
    section("absent system calls (ENOSYS)", &report.absent_syscalls);
    let _ = writeln!(out, "system calls served without an exit: {}", report.served_inside);
    let _ = writeln!(out, "system calls answered in the guest: {}", report.answered_in_guest);
    let _ = writeln!(out, "call sites made direct: {}", report.direct_sites);
    if report.kept_near != 0 {
        let _ = writeln!(
            out,
            "woken tasks that waited for the CPU of their waker, whose calls the idle one served: {}; moved after all: {} times",
            report.kept_near, report.moved_after_wait
        );
    }
    let _ = writeln!(out, "page faults: {}", report.page_faults);
    let _ = writeln!(out, "context switches: {}", report.context_switches);
    let _ = writeln!(out, "processes and threads made: {}", report.processes_made);
    let _ = writeln!(out, "memory peak: {} KiB", report.memory_peak_bytes / 1024);
    let _ = writeln!(out, "kernel memory at the end: {} KiB", report.kernel_memory_bytes / 1024);
    let _ = writeln!(out, "time: {}.{:03} s", report.wall_ns / 1_000_000_000, report.wall_ns / 1_000_000 % 1000);
    out
}
