//! The guest program: small checks of Linux behaviour, one a name, that pass on the host first and then in the sandbox.
//! It uses libc directly and knows nothing of bartizan.
//!
//! `guest --list` prints the names; `guest NAME` runs one case and exits with 0, or says what was wrong and exits with 101.
//! `guest NAME rounds` runs it as often as standard input says `again`, and says in between what memory is in use.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks, clippy::cast_ptr_alignment)] // each case calls Linux directly: that is what it tests

mod accounting;
mod answers;
mod clone_failures;
mod crowds;
mod direct;
mod exec_exit;
mod files;
mod forks;
mod guarded;
mod hello;
mod hostile;
mod hungry;
mod io;
mod lifetimes;
mod memory;
mod mqueue;
mod namespaces;
mod pidfd;
mod pidns;
mod process;
mod process_vm;
mod ptrace;
mod rseq;
mod scale;
mod scheduling;
mod seccomp;
mod shm;
mod signal_actions;
mod signal_queues;
mod signals;
mod sys;
mod sysv;
mod threads;
mod time;
mod time_namespaces;
mod user_namespaces;
mod wakes;

/// A case: its name and its code, which panics on failure.
type Case = (&'static str, fn());

/// All cases, by area.
const AREAS: &[&[Case]] = &[
    hello::CASES,
    guarded::CASES,
    memory::CASES,
    forks::CASES,
    process::CASES,
    clone_failures::CASES,
    exec_exit::CASES,
    lifetimes::CASES,
    process_vm::CASES,
    ptrace::CASES,
    pidns::CASES,
    namespaces::CASES,
    user_namespaces::CASES,
    time_namespaces::CASES,
    pidfd::CASES,
    threads::CASES,
    seccomp::CASES,
    rseq::CASES,
    signals::CASES,
    files::CASES,
    io::CASES,
    time::CASES,
    accounting::CASES,
    answers::CASES,
    direct::CASES,
    scheduling::CASES,
    shm::CASES,
    sysv::CASES,
    mqueue::CASES,
    signal_actions::CASES,
    signal_queues::CASES,
    hostile::CASES,
    scale::CASES,
    crowds::CASES,
    wakes::CASES,
];

/// A path beneath `/tmp` that is this process's own: the harness runs cases of the same name side by side.
fn own_path(name: &str) -> String {
    format!("/tmp/guest-{name}-{}", std::process::id())
}

fn main() {
    let name = std::env::args().nth(1).unwrap_or_default();
    let mut cases = AREAS.iter().copied().flatten();
    if name == "--list" {
        cases.for_each(|(name, _)| println!("{name}"));
        return;
    }
    if let Some((_, case)) = cases.find(|(n, _)| *n == name) {
        if std::env::args().nth(2).is_some_and(|how| how == "rounds") { crowds::rounds(*case) } else { case() }
    } else if let Some((_, case)) = crowds::DRIVEN.iter().find(|(n, _)| *n == name) {
        case();
    } else if let Some((_, case)) = hungry::HUNGRY.iter().find(|(n, _)| *n == name) {
        hungry::judge(*case);
    } else {
        eprintln!("guest: no case named '{name}'; see guest --list");
        std::process::exit(2);
    }
}
