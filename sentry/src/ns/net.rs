//! The network namespace: the names and ports that sockets are bound to. Owns the bindings; never a socket.
use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use super::Owner;
use crate::lock::{Mutex, Rank};

/// A bound socket as the tables hold it; `socket` downcasts it.
pub type Bound = Weak<dyn Any + Send + Sync>;

/// One port in use.
pub struct PortUse {
    /// Bound address; the unspecified one takes the port on every address.
    pub addr: std::net::IpAddr,
    /// SO_REUSEADDR was set at bind.
    pub reuse_addr: bool,
    /// Connections are accepted here (TCP), or datagrams (UDP).
    pub receiving: Arc<AtomicBool>,
    /// Distinguishes the uses of one port.
    pub id: u64,
    /// SO_REUSEPORT was set at bind.
    pub reuse_port: bool,
    /// IPV6_V6ONLY (true for IPv4 addresses).
    pub one_family: bool,
    /// Who.
    pub socket: Bound,
}

/// Bindings of one network namespace.
pub struct NetNamespace {
    number: u64,
    /// Whose capabilities count.
    pub owner: Owner,
    /// Abstract AF_UNIX names (without the leading NUL).
    pub abstract_names: Mutex<HashMap<Vec<u8>, Bound>>,
    /// TCP ports.
    pub tcp: Mutex<HashMap<u16, Vec<PortUse>>>,
    /// UDP ports.
    pub udp: Mutex<HashMap<u16, Vec<PortUse>>>,
}

impl NetNamespace {
    /// A namespace with a loopback interface and no bindings.
    pub fn new(owner: Owner) -> Arc<NetNamespace> {
        Arc::new(NetNamespace {
            number: super::next_number(),
            owner,
            abstract_names: Mutex::new(Rank::Leaf, HashMap::new()),
            tcp: Mutex::new(Rank::Leaf, HashMap::new()),
            udp: Mutex::new(Rank::Leaf, HashMap::new()),
        })
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.number
    }
}
