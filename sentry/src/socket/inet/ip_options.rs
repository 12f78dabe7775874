//! Options of the IPPROTO_IP, IPPROTO_IPV6 and IPPROTO_TCP levels (ip(7), ipv6(7), tcp(7)). Owns their values: over loopback most
//! of them change nothing that can be seen.
use std::collections::BTreeMap;

use crate::lock::{Mutex, Rank};
use crate::socket::options::SOL_SOCKET;
use crate::{Errno, Result};

/// IPPROTO_IP.
pub const IP: i32 = 0;
/// IPPROTO_TCP.
pub const TCP: i32 = 6;
/// IPPROTO_UDP.
pub const UDP: i32 = 17;
/// IPPROTO_IPV6.
pub const IPV6: i32 = 41;
/// IPV6_V6ONLY.
pub const V6ONLY: i32 = 26;

/// Known integer options: level, name, initial value, least and greatest value.
#[rustfmt::skip]
const KNOWN: &[(i32, i32, i32, i32, i32)] = &[
    // IP_TOS, IP_TTL, IP_PKTINFO, IP_RECVOPTS, IP_MTU_DISCOVER, IP_RECVERR, IP_RECVTTL, IP_RECVTOS, IP_MTU, IP_FREEBIND
    (IP, 1, 0, 0, 255), (IP, 2, 64, -1, 255), (IP, 8, 0, 0, i32::MAX), (IP, 6, 0, 0, i32::MAX), (IP, 10, 1, 0, 5),
    (IP, 11, 0, 0, i32::MAX), (IP, 12, 0, 0, i32::MAX), (IP, 13, 0, 0, i32::MAX), (IP, 15, 0, 0, i32::MAX),
    // IP_BIND_ADDRESS_NO_PORT, IP_MULTICAST_TTL, IP_MULTICAST_LOOP
    (IP, 24, 0, 0, i32::MAX), (IP, 33, 1, -1, 255), (IP, 34, 1, 0, i32::MAX),
    // IPV6_UNICAST_HOPS, IPV6_MULTICAST_HOPS, IPV6_MULTICAST_LOOP, IPV6_MTU_DISCOVER, IPV6_RECVERR, IPV6_V6ONLY
    (IPV6, 16, 64, -1, 255), (IPV6, 18, 1, -1, 255), (IPV6, 19, 1, 0, 1), (IPV6, 23, 1, 0, 5),
    (IPV6, 25, 0, 0, i32::MAX), (IPV6, V6ONLY, 0, 0, i32::MAX),
    // IPV6_RECVPKTINFO, IPV6_RECVHOPLIMIT, IPV6_RECVTCLASS, IPV6_TCLASS
    (IPV6, 49, 0, 0, i32::MAX), (IPV6, 51, 0, 0, i32::MAX), (IPV6, 66, 0, 0, i32::MAX), (IPV6, 67, 0, -1, 255),
    // TCP_NODELAY, TCP_MAXSEG, TCP_CORK, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT, TCP_SYNCNT, TCP_LINGER2
    (TCP, 1, 0, i32::MIN, i32::MAX), (TCP, 2, 536, 88, 32767), (TCP, 3, 0, i32::MIN, i32::MAX),
    (TCP, 4, 7200, 1, 32767), (TCP, 5, 75, 1, 32767), (TCP, 6, 9, 1, 127), (TCP, 7, 6, 1, 127),
    (TCP, 8, 60, i32::MIN, i32::MAX),
    // TCP_DEFER_ACCEPT, TCP_WINDOW_CLAMP, TCP_QUICKACK, TCP_USER_TIMEOUT, TCP_FASTOPEN, TCP_FASTOPEN_CONNECT
    (TCP, 9, 0, i32::MIN, i32::MAX), (TCP, 10, 0, 0, i32::MAX), (TCP, 12, 1, i32::MIN, i32::MAX),
    (TCP, 18, 0, 0, i32::MAX), (TCP, 23, 0, 0, i32::MAX), (TCP, 30, 0, 0, 1),
    // UDP_CORK
    (UDP, 1, 0, i32::MIN, i32::MAX),
];

/// Values that differ from the initial ones.
pub struct IpOptions {
    values: Mutex<BTreeMap<(i32, i32), i32>>,
    levels: &'static [i32],
}

impl IpOptions {
    /// Initial values, of a socket that has these levels.
    pub fn new(levels: &'static [i32]) -> IpOptions {
        IpOptions { values: Mutex::new(Rank::Leaf, BTreeMap::new()), levels }
    }

    fn known(&self, level: i32, name: i32) -> Result<&'static (i32, i32, i32, i32, i32)> {
        if !self.levels.contains(&level) {
            return Err(Errno::ENOPROTOOPT);
        }
        KNOWN.iter().find(|k| (k.0, k.1) == (level, name)).ok_or(Errno::ENOPROTOOPT)
    }

    /// The value of an integer option. ENOPROTOOPT.
    pub fn get(&self, level: i32, name: i32) -> Result<i32> {
        let known = self.known(level, name)?;
        Ok(self.values.lock().get(&(level, name)).copied().unwrap_or(known.2))
    }

    /// getsockopt(2). EOPNOTSUPP for a level the socket does not have.
    pub fn get_bytes(&self, level: i32, name: i32) -> Result<Vec<u8>> {
        if !self.levels.contains(&level) {
            return Err(if level == SOL_SOCKET { Errno::ENOPROTOOPT } else { Errno::EOPNOTSUPP });
        }
        const TCP_CONGESTION: i32 = 13;
        if (level, name) == (TCP, TCP_CONGESTION) && self.levels.contains(&TCP) {
            return Ok(b"cubic\0\0\0\0\0\0\0\0\0\0\0".to_vec());
        }
        Ok(self.get(level, name)?.to_ne_bytes().to_vec())
    }

    /// setsockopt(2). A single byte will do for the IP level.
    pub fn set(&self, level: i32, name: i32, value: &[u8]) -> Result<()> {
        const TCP_CONGESTION: i32 = 13;
        if (level, name) == (TCP, TCP_CONGESTION) && self.levels.contains(&TCP) {
            let wanted = value.split(|&b| b == 0).next().unwrap_or_default();
            return if matches!(wanted, b"cubic" | b"reno") { Ok(()) } else { Err(Errno::ENOENT) };
        }
        let &(_, _, initial, least, greatest) = self.known(level, name)?;
        let number = match value {
            [a, b, c, d, ..] => i32::from_ne_bytes([*a, *b, *c, *d]),
            [a, ..] if level == IP => i32::from(*a),
            _ => return Err(Errno::EINVAL),
        };
        if number < least || number > greatest {
            return Err(Errno::EINVAL);
        }
        // -1 stands for the default where it is allowed.
        let number = if number == -1 && least == -1 { initial } else { number };
        self.values.lock().insert((level, name), number);
        Ok(())
    }

    /// Takes over the values of a listener.
    pub fn inherit(&self, from: &IpOptions) {
        let values = from.values.lock().clone();
        *self.values.lock() = values;
    }
}
