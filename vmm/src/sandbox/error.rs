//! Why a sandbox could not start: each a sentence that names what was wrong.
use std::fmt;
use std::io;
use std::path::PathBuf;

use guest_abi::Errno;

use crate::control::ControlError;
use crate::kvm::PlatformError;

/// Why a sandbox could not start.
#[derive(Debug)]
pub enum SandboxError {
    /// KVM or the virtual machine.
    Platform(PlatformError),
    /// A host path that cannot be shown.
    Source {
        /// What it was wanted for.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// Why.
        errno: Errno,
    },
    /// A place in the tree of mounts.
    Mount {
        /// The path in the sandbox.
        at: Vec<u8>,
        /// Why.
        errno: Errno,
    },
    /// The working directory.
    Workdir(String, Errno),
    /// The command is nowhere.
    NotFound(String),
    /// The command is there and cannot be executed.
    NotExecutable(String, Errno),
    /// The jail.
    Jail(String),
    /// The control socket.
    Control(ControlError),
    /// A resource of the host.
    Host(String),
}

impl SandboxError {
    /// A refused host operation.
    pub fn host(operation: &str, error: &io::Error) -> SandboxError {
        SandboxError::Host(format!("cannot {operation}: {error}"))
    }
}

impl From<PlatformError> for SandboxError {
    fn from(error: PlatformError) -> Self {
        SandboxError::Platform(error)
    }
}

impl fmt::Display for SandboxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SandboxError::Platform(e) => e.fmt(f),
            SandboxError::Source { what, path, errno } => {
                write!(f, "the {what} '{}' cannot be used: {}", path.display(), describe(*errno))
            }
            SandboxError::Mount { at, errno } => {
                let at = String::from_utf8_lossy(at);
                write!(f, "nothing can be mounted at '{at}' in the sandbox: {}", describe(*errno))
            }
            SandboxError::Workdir(dir, errno) => {
                write!(f, "the working directory '{dir}' cannot be used: {}", describe(*errno))
            }
            SandboxError::NotFound(command) => {
                write!(f, "command '{command}' not found")?;
                // A path that may well exist: then it is what the file asks for that is missing.
                if command.contains('/') {
                    f.write_str(", or the interpreter that it names is missing")
                } else {
                    Ok(())
                }
            }
            SandboxError::NotExecutable(command, errno) => {
                write!(f, "command '{command}' cannot be executed: {}", describe(*errno))
            }
            SandboxError::Jail(why) => write!(f, "the jail cannot be entered: {why}"),
            SandboxError::Control(e) => e.fmt(f),
            SandboxError::Host(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for SandboxError {}

/// An error number in words, as the C library says it.
pub fn describe(errno: Errno) -> String {
    let text = io::Error::from_raw_os_error(errno.raw()).to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// The number behind an I/O error.
pub fn errno_of(error: &io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO))
}
