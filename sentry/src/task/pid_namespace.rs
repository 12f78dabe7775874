//! PID namespaces (pid_namespaces(7)): numbers, and the index of thread groups by tgid.

/// A PID namespace.
pub struct PidNamespace {}
