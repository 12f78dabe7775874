//! A sandbox's memory limit bounds the process, whatever a program makes the sentry keep: each hungry program of the guest binary
//! ends with an error number of its own accord, and the host process stays near the limit.
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

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
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib / 1024)
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
