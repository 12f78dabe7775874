//! Namespaces other than PID, how many of each a user may have, and the credentials that belong to a user namespace.
pub mod cgroup;
pub mod ipc;
pub mod ipc_ids;
pub mod mq;
pub mod msg;
pub mod net;
pub mod sem;
pub mod shm;
pub mod time;
pub mod ucounts;
pub mod user;
pub mod user_namespace;
pub mod uts;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of a new namespace, as stat(2) and the links in /proc/PID/ns show it. The initial namespaces have fixed ones,
/// which are below.
pub fn next_number() -> u64 {
    /// Where Linux's numbers begin, past the two fixed ones that lie in the same range.
    static NEXT: AtomicU64 = AtomicU64::new(0xf000_0010);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// To whom a namespace other than a user namespace belongs: the user namespace whose capabilities count for it, and its place in the count.
pub struct Owner {
    /// The user namespace of its maker.
    pub user_ns: Arc<user_namespace::UserNamespace>,
    _charge: Option<ucounts::Charge>,
}

impl Owner {
    /// The owner of what a sandbox begins with.
    pub fn initial() -> Owner {
        Owner { user_ns: user_namespace::UserNamespace::initial().clone(), _charge: None }
    }

    /// Made by somebody in `user_ns`.
    pub fn new(user_ns: &Arc<user_namespace::UserNamespace>, charge: ucounts::Charge) -> Owner {
        Owner { user_ns: user_ns.clone(), _charge: Some(charge) }
    }
}
