//! Tasks (guest threads), thread groups (processes), PID namespaces, sessions: their birth, life and death. Owns identity and
//! kinship; never memory or files, which a task only refers to.
//!
//! Locks: [`crate::Kernel::kinship`] serializes every change of who is whose parent, member or zombie; the locks inside
//! the objects only make single reads and writes whole.
pub mod access;
pub mod answers;
pub mod clone;
pub mod credentials;
pub mod exec;
pub mod exit;
pub mod in_guest;

pub mod init;
pub mod limits;
pub mod ns_file;
pub mod nsproxy;
pub mod numbers;
pub mod outside;
pub mod pid;
pub mod pid_namespace;
pub mod pidfd;
pub mod ptrace;
pub mod rseq;
pub mod run;
pub mod seccomp;
pub mod session;
#[allow(clippy::module_inception)]
pub mod task;
#[cfg(test)]
pub(crate) mod tests;
pub mod thread_group;
pub mod user_namespace;
pub mod wait;

pub use pid::Pid;
pub use pid_namespace::PidNamespace;
pub use session::{ProcessGroup, Session};
pub use task::Task;
pub use thread_group::ThreadGroup;
