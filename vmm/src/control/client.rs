//! The client's side of the control socket. Owns one conversation; never what is printed.
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::{Answer, Ask, Page, Process, Request, Runtime, Signalled, State, VERSION};

/// A sandbox answers at once or is stuck.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of an answer at most.
const MAX_ANSWER: u64 = 64 << 20;

/// What went wrong, in one sentence.
#[derive(Debug)]
pub struct ControlError(pub String);

impl fmt::Display for ControlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ControlError {}

/// A connection to a running sandbox.
pub struct Client {
    name: String,
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Connects to the sandbox of this name; None if it is not running, after removing what it may have left.
    pub fn connect(runtime: &Runtime, name: &str) -> Result<Option<Client>, ControlError> {
        let socket = runtime.socket(name);
        let failed = |e: io::Error| ControlError(format!("the sandbox '{name}' cannot be reached: {e}"));
        let stream = match UnixStream::connect(&socket) {
            Ok(stream) => stream,
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                runtime.clean(name);
                return Ok(None);
            }
            Err(e) => return Err(failed(e)),
        };
        stream.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
        Ok(Some(Client { name: name.to_owned(), stream: BufReader::new(stream) }))
    }

    fn ask<T: DeserializeOwned>(&mut self, ask: Ask) -> Result<T, ControlError> {
        let name = &self.name;
        let failed = |e: io::Error| match e.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                ControlError(format!("the sandbox '{name}' does not answer"))
            }
            _ => ControlError(format!("the sandbox '{name}' cannot be asked: {e}")),
        };
        let mut line = serde_json::to_string(&Request { version: VERSION, ask }).map_err(|e| failed(e.into()))?;
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes()).map_err(failed)?;
        let mut line = String::new();
        self.stream.by_ref().take(MAX_ANSWER).read_line(&mut line).map_err(failed)?;
        if !line.ends_with('\n') {
            return Err(ControlError(format!("the sandbox '{name}' has ended")));
        }
        let odd = || ControlError(format!("the sandbox '{name}' speaks another version of the protocol"));
        let answer: Answer<T> = serde_json::from_str(&line).map_err(|_| odd())?;
        match answer {
            Answer { ok: Some(ok), .. } => Ok(ok),
            Answer { error: Some(error), .. } => Err(ControlError(format!("the sandbox '{name}': {error}"))),
            Answer { .. } => Err(odd()),
        }
    }

    /// Facts of the sandbox.
    pub fn state(&mut self) -> Result<State, ControlError> {
        self.ask(Ask::State)
    }

    /// All its processes in order of their numbers.
    pub fn processes(&mut self, threads: bool) -> Result<Vec<Process>, ControlError> {
        let mut all = Vec::new();
        let mut from = 0;
        loop {
            let page: Page = self.ask(Ask::Ps { from, threads })?;
            all.extend(page.processes);
            match page.next {
                Some(next) if next > from => from = next,
                _ => return Ok(all),
            }
        }
    }

    /// Sends a signal to a process, to all, or to the command; gives how many it reached.
    pub fn kill(&mut self, signal: i32, pid: Option<i32>, all: bool) -> Result<usize, ControlError> {
        self.ask(Ask::Kill { signal, pid, all }).map(|s: Signalled| s.processes)
    }
}
