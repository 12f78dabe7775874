//! Namespaces other than PID, and the credentials that belong to a user namespace.
pub mod net;
pub mod user;
pub mod uts;
