//! The control socket of a named sandbox. Owns where it lies, who may use it and what is said over it; never what a request
//! does to the sandbox beyond asking the kernel.
//!
//! The protocol: the client writes one JSON object a line, at most [`MAX_REQUEST`] bytes, and reads one JSON object a line for
//! each, in order. Every object carries `version`; `docs/USER.md` describes the members.
mod client;
mod directory;
mod server;

use serde::{Deserialize, Serialize};

pub use client::{Client, ControlError};
pub use directory::{Claim, Runtime, name_is_good};
pub use server::{Facts, Server};

/// Version of the protocol.
pub const VERSION: u32 = 1;

/// Bytes of a request at most, the newline included.
pub const MAX_REQUEST: usize = 4096;

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "lowercase", deny_unknown_fields)]
pub enum Ask {
    /// Facts of the sandbox: answered by [`State`].
    State,
    /// A page of its processes: answered by [`Page`].
    Ps {
        /// The lowest number wanted.
        #[serde(default)]
        from: i32,
        /// Whether the threads of each process are wanted.
        #[serde(default)]
        threads: bool,
    },
    /// A signal: answered by [`Signalled`].
    Kill {
        /// Its number.
        signal: i32,
        /// The process, by its number in the sandbox's outermost PID namespace; the command if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pid: Option<i32>,
        /// Whether every process is meant.
        #[serde(default)]
        all: bool,
    },
}

/// A request as it is sent.
#[derive(Debug, Serialize, Deserialize)]
pub struct Request {
    /// [`VERSION`].
    pub version: u32,
    /// The rest.
    #[serde(flatten)]
    pub ask: Ask,
}

/// An answer as it is sent: `ok` or `error`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Answer<T> {
    /// [`VERSION`].
    pub version: u32,
    /// What was asked for.
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    pub ok: Option<T>,
    /// One sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

fn none<T>() -> Option<T> {
    None
}

/// Facts of a sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct State {
    /// `--name`.
    pub name: String,
    /// The host's number of the bartizan process.
    pub pid: u32,
    /// Time since the start, ns.
    pub uptime_ns: u64,
    /// CPUs.
    pub cpus: usize,
    /// Processes, zombies included.
    pub processes: usize,
    /// Threads of all processes.
    pub threads: usize,
    /// Memory in use, bytes.
    pub memory_bytes: u64,
    /// The limit of it, bytes.
    pub memory_limit_bytes: u64,
    /// The command and its arguments.
    pub command: Vec<String>,
}

/// A page of processes in order of their numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Page {
    /// The processes.
    pub processes: Vec<Process>,
    /// Where the next page begins; absent on the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<i32>,
}

/// A process. Numbers are those of the sandbox's outermost PID namespace.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Process {
    /// Number.
    pub pid: i32,
    /// The parent's; 0 for the command.
    pub ppid: i32,
    /// Process group.
    pub pgid: i32,
    /// Session.
    pub sid: i32,
    /// Effective user.
    pub uid: u32,
    /// State as in /proc/PID/stat: R, S, T, Z …
    pub state: char,
    /// Number of threads.
    pub threads: usize,
    /// CPU time in the program, ns.
    pub user_ns: u64,
    /// CPU time in the sentry, ns.
    pub system_ns: u64,
    /// Start, ns after the sandbox's.
    pub start_ns: u64,
    /// Name (comm).
    pub name: String,
    /// Command line, at most 4 KiB of it; empty for a zombie.
    pub command: Vec<String>,
    /// Its threads, if they were asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<Thread>,
}

/// A thread.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Thread {
    /// Number.
    pub tid: i32,
    /// State.
    pub state: char,
    /// CPU time in the program, ns.
    pub user_ns: u64,
    /// CPU time in the sentry, ns.
    pub system_ns: u64,
    /// Name (comm).
    pub name: String,
}

/// What a signal reached.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Signalled {
    /// Processes.
    pub processes: usize,
}
