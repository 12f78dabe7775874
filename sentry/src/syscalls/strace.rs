//! The system call trace: one line a call in strace's manner, written through a sink that the caller gives.
use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::Arc;

use crate::syscalls::args::ArgKind;
use crate::syscalls::table::{self, Call, Row};
use crate::task::Task;
use crate::{Errno, Result};

/// Receives whole lines without their newline.
pub trait Sink: Send + Sync {
    /// Takes a line; never blocks the guest for longer than the write takes.
    fn line(&self, line: &str);
}

/// Which calls are traced.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    names: BTreeSet<&'static str>,
    negated: bool,
}

impl Filter {
    /// All calls.
    pub fn all() -> Filter {
        Filter { names: BTreeSet::new(), negated: true }
    }

    /// From `name,name…`, or `!name,name…` for all others. The error names the first unknown call.
    pub fn parse(text: &str) -> Result<Filter, String> {
        let (negated, list) = match text.strip_prefix('!') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let mut names = BTreeSet::new();
        for name in list.split(',').filter(|n| !n.is_empty()) {
            match table::by_name(name).map(|row| row.name).or_else(|| table::absent_names().find(|n| *n == name)) {
                Some(known) => names.insert(known),
                None => return Err(name.to_owned()),
            };
        }
        Ok(Filter { names, negated })
    }

    fn admits(&self, name: &str) -> bool {
        self.names.contains(name) != self.negated
    }
}

/// An active trace.
pub struct Trace {
    filter: Filter,
    sink: Box<dyn Sink>,
}

impl Trace {
    /// A trace of what `filter` admits.
    pub fn new(filter: Filter, sink: Box<dyn Sink>) -> Trace {
        Trace { filter, sink }
    }

    /// The text of a call and its arguments as they are before the call, or None if it is not traced.
    pub fn enter(&self, call: &Call<'_>) -> Option<String> {
        let row = table::row(call.nr);
        let name = row.map_or_else(|| table::name(call.nr), |r| r.name);
        if !self.filter.admits(name) {
            return None;
        }
        let mut text = format!("[{}] ", call.task.global_tid());
        if name.is_empty() {
            let _ = write!(text, "syscall_{}", call.nr);
        } else {
            text.push_str(name);
        }
        text.push('(');
        match row {
            Some(row) => format_args(&mut text, row, call),
            None => text.push_str("..."),
        }
        text.push(')');
        Some(text)
    }

    /// Prints a call that has ended.
    pub fn exit(&self, call: String, result: Result<u64>) {
        let mut text = call;
        match result {
            Ok(value) if value > 0xffff_ffff => {
                let _ = write!(text, " = {value:#x}");
            }
            Ok(value) => {
                let _ = write!(text, " = {value}");
            }
            Err(errno) if errno.raw() >= 512 => {
                let _ = write!(text, " = ? {errno}");
            }
            Err(errno) => {
                let _ = write!(text, " = -1 {errno}");
            }
        }
        self.sink.line(&text);
    }

    /// Prints an event of a task that is no call: a signal, an exit.
    pub fn event(&self, task: &Task, what: &str) {
        self.sink.line(&format!("[{}] {what}", task.global_tid()));
    }
}

fn format_args(text: &mut String, row: &Row, call: &Call<'_>) {
    for (i, (spec, &raw)) in row.args.iter().zip(&call.args).enumerate() {
        if i > 0 {
            text.push_str(", ");
        }
        let _ = match spec.kind {
            ArgKind::Int if raw >> 32 == 0 => write!(text, "{}", raw as u32 as i32),
            ArgKind::Int => write!(text, "{}", raw as i64),
            ArgKind::Unsigned => write!(text, "{raw}"),
            ArgKind::Hex => write!(text, "{raw:#x}"),
            ArgKind::Fd if (raw as u32).cast_signed() == -100 => write!(text, "AT_FDCWD"),
            ArgKind::Fd => write!(text, "{}", raw as i32),
            ArgKind::Pointer if raw == 0 => write!(text, "NULL"),
            ArgKind::Pointer => write!(text, "{raw:#x}"),
            ArgKind::Path => match read_path(call.task, raw) {
                Ok(path) => write!(text, "\"{}\"", path.escape_ascii()),
                Err(_) => write!(text, "{raw:#x}"),
            },
        };
    }
}

fn read_path(task: &Arc<Task>, raw: u64) -> Result<Vec<u8>> {
    if raw == 0 {
        return Err(Errno::EFAULT);
    }
    task.space()?.read_path(guest_abi::UserAddr(raw))
}
