//! `bartizan list`, `ps` and `kill`: what they print of a running sandbox; never what is said over its socket.
use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;
use std::io::Write as _;

use serde::Serialize;

use super::Failure;
use super::options::{KillOptions, ListOptions, PsOptions};
use crate::control::{Client, ControlError, Process, Runtime, State};

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Failure {
        Failure::internal(error)
    }
}

/// Writes to standard output; a reader that has gone is no failure.
fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default() + "\n"
}

/// Every sandbox that answers; what is wrong with the others goes to standard error.
fn each(mut f: impl FnMut(&str, Client) -> Result<(), ControlError>) -> Result<(), Failure> {
    let Some(runtime) = Runtime::open()? else { return Ok(()) };
    for name in runtime.names()? {
        let served = match Client::connect(&runtime, &name) {
            Ok(None) => Ok(()),
            Ok(Some(client)) => f(&name, client),
            Err(e) => Err(e),
        };
        if let Err(e) = served {
            eprintln!("bartizan: {e}");
        }
    }
    Ok(())
}

fn named(name: &str) -> Result<Client, Failure> {
    let client = match Runtime::open()? {
        Some(runtime) => Client::connect(&runtime, name)?,
        None => None,
    };
    client.ok_or_else(|| Failure::internal(format!("there is no running sandbox named '{name}'")))
}

/// `bartizan list`.
pub fn list(options: &ListOptions) -> Result<u8, Failure> {
    let mut all: Vec<State> = Vec::new();
    each(|_, mut client| {
        all.push(client.state()?);
        Ok(())
    })?;
    if options.json {
        print(&json(&all));
        return Ok(0);
    }
    let mut out =
        format!("{:<20} {:>8} {:>9} {:>6} {:>8} {:>9}  COMMAND\n", "NAME", "PID", "UP", "PROCS", "THREADS", "MEMORY");
    for s in &all {
        let _ = writeln!(
            out,
            "{:<20} {:>8} {:>9} {:>6} {:>8} {:>8}K  {}",
            s.name,
            s.pid,
            age(s.uptime_ns),
            s.processes,
            s.threads,
            s.memory_bytes / 1024,
            visible(&s.command.join(" "))
        );
    }
    print(&out);
    Ok(0)
}

/// The processes of one sandbox, as `ps --json` prints them.
#[derive(Serialize)]
struct Sandbox {
    name: String,
    processes: Vec<Process>,
}

/// `bartizan ps`.
pub fn ps(options: &PsOptions) -> Result<u8, Failure> {
    let mut all = Vec::new();
    match &options.name {
        Some(name) => {
            all.push(Sandbox { name: name.clone(), processes: named(name)?.processes(options.threads)? });
        }
        None => each(|name, mut client| {
            all.push(Sandbox { name: name.to_owned(), processes: client.processes(options.threads)? });
            Ok(())
        })?,
    }
    if options.json {
        print(&json(&all));
        return Ok(0);
    }
    let mut out = String::new();
    for sandbox in &all {
        if options.name.is_none() {
            let _ = writeln!(out, "{}:", sandbox.name);
        }
        tree(&sandbox.processes, &mut out);
    }
    print(&out);
    Ok(0)
}

/// `bartizan kill`.
pub fn kill(options: &KillOptions) -> Result<u8, Failure> {
    named(&options.name)?.kill(options.signal, options.pid, options.all)?;
    Ok(0)
}

/// Processes below their parents, in order of their numbers. Those without a parent in the list stand at the left.
fn tree(processes: &[Process], out: &mut String) {
    let known: HashSet<i32> = processes.iter().map(|p| p.pid).collect();
    let mut children: HashMap<i32, Vec<&Process>> = HashMap::new();
    for p in processes {
        let parent = if known.contains(&p.ppid) && p.ppid != p.pid { p.ppid } else { 0 };
        children.entry(parent).or_default().push(p);
    }
    let _ = writeln!(out, "{:>8} {:>8} S {:>7} {:>9} {:>9}  COMMAND", "PID", "UID", "THREADS", "USER", "SYSTEM");
    // What was read in several pages can name a parent twice over; each process is printed once.
    let mut waiting: Vec<(&Process, usize)> =
        children.remove(&0).unwrap_or_default().into_iter().rev().map(|p| (p, 0)).collect();
    while let Some((p, depth)) = waiting.pop() {
        row(p, depth, out);
        waiting.extend(children.remove(&p.pid).unwrap_or_default().into_iter().rev().map(|c| (c, depth + 1)));
    }
}

fn row(p: &Process, depth: usize, out: &mut String) {
    let command = if p.command.is_empty() { format!("[{}]", p.name) } else { p.command.join(" ") };
    let branch = if depth == 0 { String::new() } else { format!("{}\\_ ", "   ".repeat(depth - 1)) };
    let _ = writeln!(
        out,
        "{:>8} {:>8} {} {:>7} {:>9} {:>9}  {branch}{}",
        p.pid,
        p.uid,
        p.state,
        p.threads,
        seconds(p.user_ns),
        seconds(p.system_ns),
        visible(&command)
    );
    for t in &p.tasks {
        let indent = "   ".repeat(depth);
        let _ = writeln!(
            out,
            "{:>8} {:>8} {} {:>7} {:>9} {:>9}  {indent}{{{}}}",
            t.tid,
            "",
            t.state,
            "",
            seconds(t.user_ns),
            seconds(t.system_ns),
            visible(&t.name)
        );
    }
}

/// Text from a sandbox may hold anything: nothing of it may drive the reader's terminal.
fn visible(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn seconds(ns: u64) -> String {
    format!("{}.{:02}", ns / 1_000_000_000, ns / 10_000_000 % 100)
}

fn age(ns: u64) -> String {
    let s = ns / 1_000_000_000;
    match s {
        0..3600 => format!("{}:{:02}", s / 60, s % 60),
        3600..86400 => format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60),
        _ => format!("{}d{:02}h", s / 86400, s / 3600 % 24),
    }
}
