//! The cgroup namespace (cgroup_namespaces(7)). There is one cgroup, the root, which looks the same from every namespace: only
//! the identity can be told.
use super::Owner;

/// A cgroup namespace.
pub struct CgroupNamespace {
    number: u64,
    /// Whose capabilities count.
    pub owner: Owner,
}

impl CgroupNamespace {
    /// A namespace with a number of its own.
    pub fn new(owner: Owner) -> CgroupNamespace {
        CgroupNamespace { number: super::next_number(), owner }
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.number
    }
}
