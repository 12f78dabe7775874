//! The jail: what the process gives up before guest code runs. Owns the two restrictions, Landlock for files and seccomp for system
//! calls; never opens anything for anybody.
//!
//! Order: open everything from the host; [`restrict_files`] while the process has one thread (Landlock holds for the calling
//! thread and those it starts); start the threads; [`restrict_calls`], which reaches all of them.
mod calls;
mod files;
mod program;

use std::path::PathBuf;

/// Host paths that stay within reach.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    /// Directories and files for reading.
    pub readable: Vec<PathBuf>,
    /// Directories and files for reading and writing.
    pub writable: Vec<PathBuf>,
    /// Directories whose files may be removed.
    pub emptied: Vec<PathBuf>,
    /// Directories whose empty directories may be removed.
    pub thinned: Vec<PathBuf>,
}

/// A restriction that could not be put in place.
#[derive(Debug)]
pub struct JailError {
    what: &'static str,
    why: String,
}

impl core::fmt::Display for JailError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "cannot restrict {}: {}", self.what, self.why)
    }
}

impl core::error::Error for JailError {}

/// What happens on a system call that is not on the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The kernel ends the process at once (SIGSYS).
    Kill,
    /// The process says on standard error which call it was, and ends.
    Report,
}

pub use calls::restrict_calls;
pub use files::{landlock_abi, restrict_files};

#[cfg(test)]
mod tests;
