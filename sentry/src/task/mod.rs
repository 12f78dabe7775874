//! Tasks (guest threads), thread groups (processes), PID namespaces, sessions: their birth, life and death. Owns identity and
//! kinship; never memory or files, which a task only refers to.
pub mod limits;
pub mod pid_namespace;
#[allow(clippy::module_inception)]
pub mod task;
pub mod thread_group;

pub use pid_namespace::PidNamespace;
pub use task::Task;
pub use thread_group::ThreadGroup;
