//! Namespaces other than PID, how many of each a user may have, and the credentials that belong to a user namespace.
pub mod cgroup;
pub mod ipc;
pub mod net;
pub mod shm;
pub mod ucounts;
pub mod user;
pub mod uts;

use std::sync::atomic::{AtomicU64, Ordering};

/// The number of a new namespace, as stat(2) and the links in /proc/PID/ns show it. The initial namespaces have fixed ones,
/// which are below.
pub fn next_number() -> u64 {
    /// Where Linux's numbers begin, past the two fixed ones that lie in the same range.
    static NEXT: AtomicU64 = AtomicU64::new(0xf000_0010);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
