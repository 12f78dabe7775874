//! /proc/PID/status, sched and schedstat (proc_pid_status(5)).
use core::fmt::Write;

use super::Cx;
use super::stat::{signal_sets, state_letter};
use crate::Result;
use crate::sched::CpuSet;
use crate::task::limits::Resource;
use crate::task::{Pid, Task};

/// A CPU list such as `0-3,5`.
pub(crate) fn cpu_list(cpus: impl Iterator<Item = usize>) -> String {
    let mut out = String::new();
    let mut run: Option<(usize, usize)> = None;
    let mut flush = |run: Option<(usize, usize)>| {
        if let Some((a, b)) = run {
            if !out.is_empty() {
                out.push(',');
            }
            let _ = if a == b { write!(out, "{a}") } else { write!(out, "{a}-{b}") };
        }
    };
    for cpu in cpus {
        run = match run {
            Some((a, b)) if b + 1 == cpu => Some((a, cpu)),
            old => {
                flush(old);
                Some((cpu, cpu))
            }
        };
    }
    flush(run);
    out
}

/// A CPU mask as comma-separated 32-bit words, as many as `cpus` need.
pub(crate) fn cpu_mask(cpus: usize, contains: impl Fn(usize) -> bool) -> String {
    let words = cpus.div_ceil(32).max(1);
    let width = |w: usize| if w + 1 == words { (cpus - w * 32).min(32).div_ceil(4).max(1) } else { 8 };
    let word = |w: usize| (0..32).filter(|b| contains(w * 32 + b)).fold(0u32, |m, b| m | 1 << b);
    (0..words).rev().map(|w| format!("{:0width$x}", word(w), width = width(w))).collect::<Vec<_>>().join(",")
}

fn escaped(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for &b in name {
        match b {
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\\' => out.extend_from_slice(b"\\\\"),
            _ => out.push(b),
        }
    }
    out
}

/// The numbers of `pid` in each namespace of `task`, from the reader's inwards; 0 where it is not seen.
fn numbers(cx: &Cx, task: &Pid, pid: &Pid) -> String {
    let levels = task.numbers().iter().skip(cx.shared.ns.level());
    levels.fold(String::new(), |text, (ns, _)| text + &format!("\t{}", pid.number_in(ns)))
}

pub(super) fn status(cx: &Cx) -> Result<Vec<u8>> {
    let task = cx.task()?;
    let group = task.group();
    let ns = &cx.shared.ns;
    let credentials = task.credentials();
    let letter = state_letter(&task);
    let word = match letter {
        'R' => "running",
        'S' => "sleeping",
        'T' => "stopped",
        't' => "tracing stop",
        'Z' => "zombie",
        _ => "dead",
    };
    let mut out = b"Name:\t".to_vec();
    out.extend_from_slice(&escaped(&task.comm_str()));
    let mut s = String::new();
    let pg = group.process_group();
    let pid = task.pid();
    let c = &credentials;
    let fd_size = task.files().end().div_ceil(64).max(1) * 64;
    let user_ns = cx.user_ns();
    let groups: String = c.groups.iter().fold(String::new(), |text, &g| text + &format!("{} ", user_ns.shown_group(g)));
    let _ = write!(
        s,
        "\nUmask:\t{:04o}\nState:\t{letter} ({word})\nTgid:\t{}\nNgid:\t0\nPid:\t{}\nPPid:\t{}\nTracerPid:\t{}\n\
         Uid:\t{}\t{}\t{}\t{}\nGid:\t{}\t{}\t{}\t{}\nFDSize:\t{fd_size}\nGroups:\t{groups}\n\
         NStgid:{}\nNSpid:{}\nNSpgid:{}\nNSsid:{}\nKthread:\t0\n",
        task.fs().get().umask,
        cx.number(group.pid()),
        cx.number(&task.pid()),
        group.parent_number_in(ns),
        task.tracing.tracer().map_or(0, |t| t.tid_in(ns)),
        user_ns.shown_user(c.uid),
        user_ns.shown_user(c.euid),
        user_ns.shown_user(c.suid),
        user_ns.shown_user(c.fsuid),
        user_ns.shown_group(c.gid),
        user_ns.shown_group(c.egid),
        user_ns.shown_group(c.sgid),
        user_ns.shown_group(c.fsgid),
        numbers(cx, &pid, group.pid()),
        numbers(cx, &pid, &pid),
        numbers(cx, &pid, pg.pid()),
        numbers(cx, &pid, pg.session().pid()),
    );
    memory_lines(&mut s, &task);
    let sets = signal_sets(&task);
    let queued = cx.kernel().pending_counts.count(c.uid);
    let _ = write!(
        s,
        "Threads:\t{}\nSigQ:\t{queued}/{}\nSigPnd:\t{:016x}\nShdPnd:\t{:016x}\nSigBlk:\t{:016x}\nSigIgn:\t{:016x}\n\
         SigCgt:\t{:016x}\nCapInh:\t{:016x}\nCapPrm:\t{:016x}\nCapEff:\t{:016x}\nCapBnd:\t{:016x}\nCapAmb:\t{:016x}\n\
         NoNewPrivs:\t{}\nSeccomp:\t{}\nSeccomp_filters:\t{}\nSpeculation_Store_Bypass:\tvulnerable\n\
         SpeculationIndirectBranch:\tconditional enabled\n",
        group.task_count(),
        group.limit(Resource::Sigpending).cur,
        sets[0],
        sets[1],
        sets[2],
        sets[3],
        sets[4],
        c.inheritable.bits(),
        c.permitted.bits(),
        c.effective.bits(),
        c.bounding.bits(),
        c.ambient.bits(),
        u8::from(c.no_new_privs),
        task.seccomp.mode(),
        task.seccomp.count(),
    );
    let cpus = cx.kernel().platform.cpus();
    let allowed = task.sched.affinity().intersection(&CpuSet::first(cpus));
    let usage = task.sched.clock.reading(task.now());
    let _ = write!(
        s,
        "Cpus_allowed:\t{}\nCpus_allowed_list:\t{}\nMems_allowed:\t1\nMems_allowed_list:\t0\n\
         voluntary_ctxt_switches:\t{}\nnonvoluntary_ctxt_switches:\t{}\n",
        cpu_mask(cpus, |n| allowed.contains(n)),
        cpu_list((0..cpus).filter(|&n| allowed.contains(n))),
        usage.voluntary_switches,
        usage.involuntary_switches,
    );
    out.extend_from_slice(s.as_bytes());
    Ok(out)
}

fn memory_lines(s: &mut String, task: &Task) {
    let Ok(space) = task.space() else { return };
    let u = space.usage();
    let image = space.image();
    let stack: u64 = task.group().limit(Resource::Stack).cur.min(132 << 10);
    let code = image.end_code.saturating_sub(image.start_code).next_multiple_of(4096);
    let resident = u.anonymous + u.file;
    for (name, bytes) in [
        ("VmPeak", u.total),
        ("VmSize", u.total),
        ("VmLck", u.locked),
        ("VmPin", 0),
        ("VmHWM", u.peak.max(resident)),
        ("VmRSS", resident),
        ("RssAnon", u.anonymous),
        ("RssFile", u.file),
        ("RssShmem", 0),
        ("VmData", u.data),
        ("VmStk", stack),
        ("VmExe", code),
        ("VmLib", 0),
        ("VmPTE", (resident / 512).next_multiple_of(4096)),
        ("VmSwap", 0),
        ("HugetlbPages", 0),
    ] {
        let _ = writeln!(s, "{name}:\t{:>8} kB", bytes / 1024);
    }
    s.push_str("CoreDumping:\t0\nTHP_enabled:\t1\nuntag_mask:\t0xffffffffffffffff\n");
}

pub(super) fn schedstat(cx: &Cx) -> Result<Vec<u8>> {
    let task = cx.task()?;
    let usage = task.sched.clock.reading(task.now());
    let slices = usage.voluntary_switches + usage.involuntary_switches;
    Ok(format!("{} 0 {slices}\n", usage.cpu()).into_bytes())
}

pub(super) fn sched(cx: &Cx) -> Result<Vec<u8>> {
    let task = cx.task()?;
    let usage = task.sched.clock.reading(task.now());
    let mut out = task.comm_str();
    let mut s = String::new();
    let _ = writeln!(s, " ({}, #threads: {})", cx.number(&task.pid()), task.group().task_count());
    s.push_str("-------------------------------------------------------------------\n");
    let ms = |ns: u64| format!("{}.{:06}", ns / 1_000_000, ns % 1_000_000);
    let mut line = |name: &str, value: String| {
        let _ = writeln!(s, "{name:<45}:{value:>21}");
    };
    line("se.sum_exec_runtime", ms(usage.cpu()));
    line("nr_switches", (usage.voluntary_switches + usage.involuntary_switches).to_string());
    line("nr_voluntary_switches", usage.voluntary_switches.to_string());
    line("nr_involuntary_switches", usage.involuntary_switches.to_string());
    line("policy", task.sched.policy().number.to_string());
    line("prio", (120 + task.sched.nice()).to_string());
    out.extend_from_slice(s.as_bytes());
    Ok(out)
}
