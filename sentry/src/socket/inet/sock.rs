//! What a TCP and a UDP socket have in common: family, options, the port they take. Owns the values of options; never a connection or data.
use core::sync::atomic::Ordering;
use std::net::SocketAddr;
use std::sync::Arc;

use super::ip_options::{self, IpOptions};
use super::ports::{self, PortHold, Protocol, Wanted};
use super::{IPPROTO_TCP, IPPROTO_UDP, encode, parse, route, unspecified};
use crate::ns::net::{Bound, NetNamespace};
use crate::platform::Platform;
use crate::socket::options::Options;
use crate::socket::{AF_INET, AF_INET6, SocketType};
use crate::task::Task;
use crate::{Errno, Result};

/// The common part.
pub struct InetSock {
    /// Whose ports it takes.
    pub net: Arc<NetNamespace>,
    /// Options of SOL_SOCKET, and the queue.
    pub options: Options,
    /// Options of the other levels.
    pub ip: IpOptions,
    protocol: Protocol,
}

impl InetSock {
    /// Of family `domain` in `net`, with initial values.
    pub fn new(platform: &Arc<dyn Platform>, net: Arc<NetNamespace>, domain: u16, protocol: Protocol) -> InetSock {
        let (kind, number, levels): (_, _, &'static [i32]) = match (protocol, domain) {
            (Protocol::Tcp, AF_INET) => (SocketType::Stream, IPPROTO_TCP, &[ip_options::IP, ip_options::TCP]),
            (Protocol::Tcp, _) => {
                (SocketType::Stream, IPPROTO_TCP, &[ip_options::IP, ip_options::TCP, ip_options::IPV6])
            }
            (Protocol::Udp, AF_INET) => (SocketType::Datagram, IPPROTO_UDP, &[ip_options::IP, ip_options::UDP]),
            (Protocol::Udp, _) => {
                (SocketType::Datagram, IPPROTO_UDP, &[ip_options::IP, ip_options::UDP, ip_options::IPV6])
            }
        };
        let options = Options::new(platform, domain, kind, number);
        InetSock { net, options, ip: IpOptions::new(levels), protocol }
    }

    /// AF_INET or AF_INET6.
    pub fn domain(&self) -> u16 {
        self.options.domain
    }

    fn v6only(&self) -> bool {
        self.domain() == AF_INET || self.ip.get(ip_options::IPV6, ip_options::V6ONLY).is_ok_and(|v| v != 0)
    }

    /// The unspecified address, port 0.
    pub fn nowhere(&self) -> SocketAddr {
        SocketAddr::new(unspecified(self.domain()), 0)
    }

    /// The sockaddr that names `addr`, or [`InetSock::nowhere`].
    pub fn encode(&self, addr: Option<SocketAddr>) -> Vec<u8> {
        encode(self.domain(), addr.unwrap_or_else(|| self.nowhere()))
    }

    /// The destination that a sockaddr names. EINVAL and EAFNOSUPPORT as [`parse`], ENETUNREACH.
    pub fn destination(&self, addr: &[u8]) -> Result<SocketAddr> {
        let to = parse(self.domain(), addr)?;
        if self.domain() == AF_INET6 && self.v6only() && to.is_ipv4() {
            return Err(Errno::ENETUNREACH);
        }
        route(to)
    }

    /// Takes a port for `socket`, which packets reach from now on if it is `receiving`. EADDRINUSE; EACCES for a privileged port.
    pub fn take_port(&self, task: &Task, addr: SocketAddr, receiving: bool, socket: Bound) -> Result<Arc<PortHold>> {
        let wanted = Wanted {
            addr,
            reuse_addr: self.options.reuse_addr.load(Ordering::Relaxed),
            reuse_port: self.options.reuse_port.load(Ordering::Relaxed),
            one_family: self.v6only() || addr.is_ipv4(),
            receiving,
            socket,
        };
        ports::hold(task, &self.net, self.protocol, wanted)
    }

    /// setsockopt(2) beyond SOL_SOCKET. IPV6_V6ONLY is EINVAL for a `bound` socket.
    pub fn set_option(&self, level: i32, name: i32, value: &[u8], bound: impl FnOnce() -> bool) -> Result<()> {
        if (level, name) == (ip_options::IPV6, ip_options::V6ONLY) && bound() {
            return Err(Errno::EINVAL);
        }
        self.ip.set(level, name, value)
    }
}
