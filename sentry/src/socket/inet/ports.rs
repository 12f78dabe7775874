//! Ports: who holds which, by the rules of SO_REUSEADDR and SO_REUSEPORT (socket(7)). Owns the holds; never a socket.
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};

use crate::lock::Mutex;
use crate::ns::net::{Bound, NetNamespace, PortUse};
use crate::ns::user::Caps;
use crate::task::Task;
use crate::{Errno, Result};

/// net.ipv4.ip_local_port_range.
const EPHEMERAL: core::ops::RangeInclusive<u16> = 32768..=60999;
/// net.ipv4.ip_unprivileged_port_start.
const UNPRIVILEGED: u16 = 1024;

/// Which of the two port spaces.
#[derive(Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Protocol {
    Tcp,
    Udp,
}

type Table = Mutex<HashMap<u16, Vec<PortUse>>>;

fn table(net: &NetNamespace, protocol: Protocol) -> &Table {
    match protocol {
        Protocol::Tcp => &net.tcp,
        Protocol::Udp => &net.udp,
    }
}

/// A port held until this is dropped.
pub struct PortHold {
    net: Arc<NetNamespace>,
    protocol: Protocol,
    /// Address and port.
    pub addr: SocketAddr,
    receiving: Arc<AtomicBool>,
    id: u64,
}

impl PortHold {
    /// Whether packets to the port reach the holder.
    pub fn set_receiving(&self, on: bool) {
        self.receiving.store(on, Ordering::SeqCst);
    }
}

impl Drop for PortHold {
    fn drop(&mut self) {
        let mut ports = table(&self.net, self.protocol).lock();
        if let Some(uses) = ports.get_mut(&self.addr.port()) {
            uses.retain(|u| u.id != self.id);
            if uses.is_empty() {
                ports.remove(&self.addr.port());
            }
        }
    }
}

/// What a socket asks for when it is bound.
pub struct Wanted {
    /// Address; port 0 for any.
    pub addr: SocketAddr,
    /// SO_REUSEADDR.
    pub reuse_addr: bool,
    /// SO_REUSEPORT.
    pub reuse_port: bool,
    /// IPV6_V6ONLY, or an IPv4 address.
    pub one_family: bool,
    /// Datagrams arrive as soon as the port is held.
    pub receiving: bool,
    /// Who.
    pub socket: Bound,
}

fn overlap(a: IpAddr, a_one: bool, b: IpAddr, b_one: bool) -> bool {
    match (a.is_ipv4() == b.is_ipv4(), a.is_unspecified(), b.is_unspecified()) {
        (true, false, false) => a == b,
        (true, ..) => true,
        // Only the IPv6 wildcard reaches into the other family.
        (false, a_any, b_any) => (a.is_ipv6() && a_any && !a_one) || (b.is_ipv6() && b_any && !b_one),
    }
}

fn conflicts(uses: &[PortUse], wanted: &Wanted, protocol: Protocol) -> bool {
    uses.iter().any(|u| {
        if !overlap(u.addr, u.one_family, wanted.addr.ip(), wanted.one_family) {
            return false;
        }
        if u.reuse_port && wanted.reuse_port {
            return false;
        }
        let busy = protocol == Protocol::Tcp && u.receiving.load(Ordering::SeqCst);
        !(u.reuse_addr && wanted.reuse_addr && !busy)
    })
}

/// Binds. EADDRINUSE; EACCES for a privileged port.
pub fn hold(task: &Task, net: &Arc<NetNamespace>, protocol: Protocol, wanted: Wanted) -> Result<Arc<PortHold>> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let asked = wanted.addr.port();
    if asked != 0 && asked < UNPRIVILEGED && !task.credentials().has_in(&net.owner.user_ns, Caps::NET_BIND_SERVICE) {
        return Err(Errno::EACCES);
    }
    let mut ports = table(net, protocol).lock();
    let port = if asked == 0 {
        let mut seed = [0; 2];
        task.kernel().platform.random(&mut seed);
        let count = EPHEMERAL.end() - EPHEMERAL.start() + 1;
        let first = u16::from_ne_bytes(seed) % count;
        // A port nobody holds at all, as Linux prefers.
        (0..count)
            .map(|i| EPHEMERAL.start() + (first.wrapping_add(i)) % count)
            .find(|p| !ports.contains_key(p))
            .ok_or(Errno::EADDRINUSE)?
    } else {
        if ports.get(&asked).is_some_and(|uses| conflicts(uses, &wanted, protocol)) {
            return Err(Errno::EADDRINUSE);
        }
        asked
    };
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let receiving = Arc::new(AtomicBool::new(wanted.receiving));
    let addr = SocketAddr::new(wanted.addr.ip(), port);
    ports.entry(port).or_default().push(PortUse {
        addr: addr.ip(),
        reuse_addr: wanted.reuse_addr,
        receiving: receiving.clone(),
        id,
        reuse_port: wanted.reuse_port,
        one_family: wanted.one_family,
        socket: wanted.socket,
    });
    Ok(Arc::new(PortHold { net: net.clone(), protocol, addr, receiving, id }))
}

/// Whether another listener stands in the way of `hold` beginning to listen.
pub fn listener_conflicts(net: &NetNamespace, hold: &PortHold) -> bool {
    let ports = table(net, hold.protocol).lock();
    let Some(uses) = ports.get(&hold.addr.port()) else { return false };
    let Some(own) = uses.iter().find(|u| u.id == hold.id) else { return false };
    uses.iter().any(|u| {
        u.id != hold.id
            && u.receiving.load(Ordering::SeqCst)
            && overlap(u.addr, u.one_family, own.addr, own.one_family)
            && !(u.reuse_port && own.reuse_port)
    })
}

/// Who receives what is sent to `to`: those bound to the very address before those bound to all. Several share a port by
/// SO_REUSEPORT.
pub fn receivers(net: &NetNamespace, protocol: Protocol, to: SocketAddr) -> Vec<Bound> {
    let ports = table(net, protocol).lock();
    let Some(uses) = ports.get(&to.port()) else { return Vec::new() };
    let receiving = |u: &&PortUse| u.receiving.load(Ordering::SeqCst);
    let pick = |f: &dyn Fn(&PortUse) -> bool| -> Vec<Bound> {
        uses.iter().filter(receiving).filter(|u| f(u)).map(|u| Weak::clone(&u.socket)).collect()
    };
    let exact = pick(&|u| u.addr == to.ip());
    if !exact.is_empty() {
        return exact;
    }
    let family = pick(&|u| u.addr.is_unspecified() && u.addr.is_ipv4() == to.is_ipv4());
    if !family.is_empty() {
        return family;
    }
    pick(&|u| u.addr.is_unspecified() && u.addr.is_ipv6() && !u.one_family && to.is_ipv4())
}
