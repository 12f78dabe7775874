//! The UTS namespace: host and domain name (uts_namespaces(7)).
use super::Owner;
use crate::lock::{Mutex, Rank};

/// What uname(2) calls the release: the interface level that programs may expect.
pub const RELEASE: &str = "6.12.0-bartizan";
/// What uname(2) calls the version.
pub const VERSION: &str = "#1 SMP PREEMPT_DYNAMIC";

/// Host and domain name.
pub struct UtsNamespace {
    number: u64,
    /// Whose capabilities count.
    pub owner: Owner,
    names: Mutex<(Vec<u8>, Vec<u8>)>,
}

impl UtsNamespace {
    /// A namespace with the given host name and the domain name `(none)`.
    pub fn new(hostname: Vec<u8>) -> UtsNamespace {
        UtsNamespace {
            number: super::next_number(),
            owner: Owner::initial(),
            names: Mutex::new(Rank::Leaf, (hostname, b"(none)".to_vec())),
        }
    }

    /// A copy with the same names (CLONE_NEWUTS).
    #[must_use]
    pub fn copy(&self, owner: Owner) -> UtsNamespace {
        let names = self.names.lock().clone();
        UtsNamespace { number: super::next_number(), owner, names: Mutex::new(Rank::Leaf, names) }
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Host name and domain name.
    pub fn names(&self) -> (Vec<u8>, Vec<u8>) {
        self.names.lock().clone()
    }

    /// Changes the host name.
    pub fn set_hostname(&self, name: Vec<u8>) {
        self.names.lock().0 = name;
    }

    /// Changes the domain name.
    pub fn set_domainname(&self, name: Vec<u8>) {
        self.names.lock().1 = name;
    }
}
