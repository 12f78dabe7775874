//! A sandbox's memory limit bounds the process, whatever a program makes the sentry keep: each hungry program of the guest binary
//! ends with an error number of its own accord, and the host process stays near the limit. And what a crowd of tasks took goes back to
//! the host when they are gone.
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tests::{bartizan, guest, kvm_missing};

/// The limit given to each sandbox.
const LIMIT_MIB: u64 = 16;
/// What the process may have beyond it: its own code (a debug build), file windows, the allocator's slack. Without charges a hungry
/// program takes gigabytes.
const BEYOND_MIB: u64 = 112;
/// Seconds of CPU time a sandbox may take.
const CPU_SECONDS: u64 = 300;

/// Runs a hungry program and looks at what the process takes meanwhile.
fn hungry(case: &str) {
    if let Some(missing) = kvm_missing() {
        panic!("{missing}");
    }
    let mut command = Command::new(bartizan());
    command.args(["run", "--memory", &format!("{LIMIT_MIB}M"), "--timeout", &CPU_SECONDS.to_string(), "--"]);
    command.arg(guest()).arg(case).stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
    let mut child = command.spawn().unwrap();
    let mut peak = 0;
    let status = loop {
        // The figure is gone with the process, so it is read all the time.
        peak = peak.max(peak_mib(child.id()).unwrap_or(0));
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    println!("{case}: peak {peak} MiB\n{text}");
    assert!(status.success(), "{case}: {status}; {text}");
    assert!(text.contains("then error"), "{case} met no limit; {text}");
    assert!(peak < LIMIT_MIB + BEYOND_MIB, "{case}: the process had {peak} MiB; {text}");
}

/// The largest resident size of a process so far; None once it is gone.
fn peak_mib(pid: u32) -> Option<u64> {
    status_kib(pid, "VmHWM:").map(|kib| kib / 1024)
}

fn status_kib(pid: u32, name: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|l| l.starts_with(name))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

/// What the process may keep after a crowd: the allocator's slack and the sentry's tables that grew.
const KEPT_KIB: u64 = 12 << 10;
/// What the sandbox may then have in use beyond what it had: the program's own few pages, and the kernel's objects for them.
const IN_USE_KIB: u64 = 512;
/// How long giving back may take, on a slow machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a case twice in one sandbox and waits until tasks, frames and host memory are back.
fn leaves_nothing(case: &str) {
    if let Some(missing) = kvm_missing() {
        panic!("{missing}");
    }
    let mut command = Command::new(bartizan());
    command.args(["run", "--timeout", &CPU_SECONDS.to_string(), "--"]).arg(guest()).args([case, "rounds"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut in_use = |line: &str| -> (u64, u64) {
        if !line.is_empty() {
            writeln!(input, "{line}").unwrap();
        }
        let said = lines.next().expect("the program goes on").unwrap();
        let mut numbers = said.split(' ').map(|n| n.parse().unwrap());
        (numbers.next().unwrap(), numbers.next().unwrap())
    };
    let before = in_use("");
    let resident = |pid| status_kib(pid, "VmRSS:").unwrap();
    let resident_before = resident(child.id());
    in_use("again");
    let crowd = (in_use("again"), resident(child.id()));
    let start = Instant::now();
    let after = loop {
        let now = (in_use("tell"), resident(child.id()));
        let back = now.0.0 <= before.0 + IN_USE_KIB && now.0.1 <= before.1 + IN_USE_KIB / 4;
        if back && now.1 <= resident_before + KEPT_KIB || start.elapsed() > PATIENCE {
            break now;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    println!(
        "{case}: KiB in use, the kernel's, resident: {before:?} {resident_before}, then {crowd:?}, then {after:?}"
    );
    assert!(
        after.0.0 <= before.0 + IN_USE_KIB,
        "{case}: memory is in use that was not: {before:?}, then {:?}",
        after.0
    );
    assert!(
        after.0.1 <= before.1 + IN_USE_KIB / 4,
        "{case}: the kernel has more than it had: {before:?}, then {:?}",
        after.0
    );
    assert!(
        after.1 <= resident_before + KEPT_KIB,
        "{case}: host memory did not come back: {resident_before} KiB, then {}",
        after.1
    );
    drop(input);
    assert!(child.wait().unwrap().success());
}

/// Memory of the host that is the process's own, beyond what the guest sees as its pages: the allocator's, stacks, tables, and pages of
/// programs that were copied for a KVM with shadow paging.
const SLEEPING_KIB: u64 = 12 << 10;
/// The same for each sleeping thread more.
const THREAD_KIB: u64 = 6;
/// Threads that the case makes.
const THREADS: u64 = 1000;

/// A sleeping sandbox is small, and a sleeping thread costs little more than its pages.
#[test]
fn sleepers_cost_little() {
    if let Some(missing) = kvm_missing() {
        panic!("{missing}");
    }
    let mut command = Command::new(bartizan());
    command.args(["run", "--cpus", "2", "--timeout", &CPU_SECONDS.to_string(), "--"]).arg(guest()).arg("crowd_asleep");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // What the process has, less what the guest says that its pages are.
    let mut beyond = || {
        let said = lines.next().expect("the program goes on").unwrap();
        let numbers: Vec<u64> = said.split(' ').map(|n| n.parse().unwrap()).collect();
        let pages = numbers[0] - numbers[1];
        let anonymous = status_kib(child.id(), "RssAnon:").unwrap();
        println!("{pages} KiB of pages, {anonymous} KiB of host memory");
        anonymous.saturating_sub(pages)
    };
    let before = beyond();
    writeln!(input, "go on").unwrap();
    let after = beyond();
    drop(input);
    assert!(child.wait().unwrap().success());
    assert!(before < SLEEPING_KIB, "a sandbox with one process: {before} KiB beyond its pages");
    let each = after.saturating_sub(before) / THREADS;
    assert!(each < THREAD_KIB, "{THREADS} sleeping threads: {each} KiB each beyond their pages");
}

#[test]
fn nothing_is_left_of_threads() {
    leaves_nothing("crowd_of_threads");
}

#[test]
fn nothing_is_left_of_processes() {
    leaves_nothing("crowd_of_processes");
}

#[test]
fn nothing_is_left_of_processes_with_threads() {
    leaves_nothing("crowd_of_processes_with_threads");
}

#[test]
fn nothing_is_left_after_an_exec_by_a_thread() {
    leaves_nothing("crowd_exec_by_a_thread");
}

#[test]
fn pipes() {
    hungry("hungry_pipes");
}

#[test]
fn sockets() {
    hungry("hungry_sockets");
}

#[test]
fn descriptors() {
    hungry("hungry_descriptors");
}

#[test]
fn descriptor_tables() {
    hungry("hungry_tables");
}

#[test]
fn tasks() {
    hungry("hungry_tasks");
}

#[test]
fn names() {
    hungry("hungry_names");
}

#[test]
fn interest() {
    hungry("hungry_interest");
}

#[test]
fn signals() {
    hungry("hungry_signals");
}

#[test]
fn mappings() {
    hungry("hungry_mappings");
}

#[test]
fn groups() {
    hungry("hungry_groups");
}

#[test]
fn texts() {
    hungry("hungry_texts");
}

#[test]
fn mounts() {
    hungry("hungry_mounts");
}

#[test]
fn large_forks() {
    hungry("hungry_forks");
}
