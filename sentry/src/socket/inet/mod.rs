//! AF_INET and AF_INET6 inside the sandbox: TCP and UDP over the loopback interface, as queues in memory (ip(7), tcp(7), udp(7)).
//! Owns addresses; nothing here leaves the sandbox: every other destination is ENETUNREACH.
pub mod ip_options;
pub mod ports;
mod sock;
pub mod tcp;
pub mod udp;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use super::{AF_INET, AF_INET6, Socket, SocketType};
use crate::ns::user::Caps;
use crate::task::Task;
use crate::{Errno, Result};

const IPPROTO_TCP: i32 = 6;
const IPPROTO_UDP: i32 = 17;

/// A socket of either family.
pub fn create(task: &Arc<Task>, domain: u16, kind: u32, protocol: i32) -> Result<Arc<dyn Socket>> {
    if kind > 10 {
        return Err(Errno::EINVAL);
    }
    let net = task.net();
    match (SocketType::from_raw(kind), protocol) {
        (Some(SocketType::Stream), 0 | IPPROTO_TCP) => Ok(tcp::TcpSocket::new(&task.kernel().platform, net, domain)),
        (Some(SocketType::Datagram), 0 | IPPROTO_UDP) => Ok(udp::UdpSocket::new(&task.kernel().platform, net, domain)),
        (Some(SocketType::Stream | SocketType::Datagram), _) => Err(Errno::EPROTONOSUPPORT),
        (Some(SocketType::Raw), _) if !task.credentials().has_in(&net.owner.user_ns, Caps::NET_RAW) => {
            Err(Errno::EPERM)
        }
        (Some(SocketType::Raw), _) => Err(Errno::EPROTONOSUPPORT),
        _ => Err(Errno::ESOCKTNOSUPPORT),
    }
}

/// Reads a sockaddr_in or sockaddr_in6 for a socket of family `domain`. EINVAL for a short one, EAFNOSUPPORT for another
/// family. IPv4 addresses in IPv6 form come out as IPv4.
pub fn parse(domain: u16, addr: &[u8]) -> Result<SocketAddr> {
    let family = addr.get(..2).and_then(|b| b.try_into().ok()).map(u16::from_ne_bytes).ok_or(Errno::EINVAL)?;
    let port = || addr.get(2..4).and_then(|b| b.try_into().ok()).map(u16::from_be_bytes).ok_or(Errno::EINVAL);
    let v4 = || -> Result<SocketAddr> {
        let ip: [u8; 4] = addr.get(4..8).and_then(|b| b.try_into().ok()).ok_or(Errno::EINVAL)?;
        if addr.len() < 16 {
            return Err(Errno::EINVAL);
        }
        Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::from(ip)), port()?))
    };
    match (domain, family) {
        (AF_INET, AF_INET) => v4(),
        (AF_INET6, AF_INET6) => {
            // SIN6_LEN_RFC2133: the scope may be missing.
            let ip: [u8; 16] = addr.get(8..24).and_then(|b| b.try_into().ok()).ok_or(Errno::EINVAL)?;
            let ip = Ipv6Addr::from(ip);
            let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
            Ok(SocketAddr::new(ip, port()?))
        }
        _ => Err(Errno::EAFNOSUPPORT),
    }
}

/// The sockaddr of an address as a socket of family `domain` shows it.
pub fn encode(domain: u16, addr: SocketAddr) -> Vec<u8> {
    let mut out = domain.to_ne_bytes().to_vec();
    out.extend_from_slice(&addr.port().to_be_bytes());
    if domain == AF_INET {
        match addr.ip() {
            IpAddr::V4(ip) => out.extend_from_slice(&ip.octets()),
            IpAddr::V6(_) => out.extend_from_slice(&[0; 4]),
        }
        out.extend_from_slice(&[0; 8]);
        return out;
    }
    let ip = match addr.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&ip.octets());
    out.extend_from_slice(&[0; 4]);
    out
}

/// The unspecified address of a family.
pub fn unspecified(domain: u16) -> IpAddr {
    if domain == AF_INET { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) }
}

/// Where a packet to `addr` goes inside the sandbox: the unspecified address stands for the loopback one. ENETUNREACH for all
/// else.
pub fn route(addr: SocketAddr) -> Result<SocketAddr> {
    let ip = match addr.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip if ip.is_loopback() => ip,
        _ => return Err(Errno::ENETUNREACH),
    };
    Ok(SocketAddr::new(ip, addr.port()))
}

/// The source address of packets to a loopback address.
pub fn source_for(to: IpAddr) -> IpAddr {
    match to {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
    }
}

/// Whether a socket may be bound to the address. EADDRNOTAVAIL.
pub fn check_local(addr: IpAddr) -> Result<()> {
    if addr.is_unspecified() || addr.is_loopback() { Ok(()) } else { Err(Errno::EADDRNOTAVAIL) }
}
