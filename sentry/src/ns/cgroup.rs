//! The cgroup namespace (cgroup_namespaces(7)). There is one cgroup, the root, which looks the same from every namespace: only
//! the identity can be told.
use super::ucounts::Charge;

/// A cgroup namespace.
pub struct CgroupNamespace {
    number: u64,
    _charge: Option<Charge>,
}

impl CgroupNamespace {
    /// A namespace with a number of its own.
    pub fn new(charge: Option<Charge>) -> CgroupNamespace {
        CgroupNamespace { number: super::next_number(), _charge: charge }
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.number
    }
}
