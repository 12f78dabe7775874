//! SOL_SOCKET options (socket(7)) and the interface requests of netdevice(7). Owns the values; the families act on them.
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use linux_raw_sys::net as raw;

use super::message::Budget;
use super::{Socket, SocketType};
use crate::event::WaitQueue;
use crate::mm::Charge;
use crate::ns::user::Caps;
use crate::platform::{KernelMemory, Platform};
use crate::task::Task;
use crate::time::Nanos;
use crate::{Errno, Result};

/// net.core.wmem_default and rmem_default.
const DEFAULT_BUFFER: usize = 212_992;
/// net.core.wmem_max and rmem_max.
const MAX_BUFFER: u32 = 212_992;
/// Bytes of a socket.
const SOCKET_COST: usize = 1024;
const MIN_SEND: usize = 4608;
const MIN_RECEIVE: usize = 2304;
/// SOL_SOCKET.
pub const SOL_SOCKET: i32 = 1;

/// Options that every socket has.
pub struct Options {
    /// AF_*.
    pub domain: u16,
    /// SOCK_*.
    pub kind: SocketType,
    /// IPPROTO_* as SO_PROTOCOL reports it.
    pub protocol: i32,
    /// Fires when readiness may have changed.
    pub queue: Arc<WaitQueue>,
    /// SO_SNDBUF.
    pub budget: Arc<Budget>,
    /// SO_RCVBUF.
    pub receive_buffer: AtomicU64,
    /// SO_PASSCRED.
    pub pass_credentials: AtomicBool,
    /// SO_REUSEADDR.
    pub reuse_addr: AtomicBool,
    /// SO_REUSEPORT.
    pub reuse_port: AtomicBool,
    /// For the socket itself while no description is charged for it.
    unaccepted: OnceLock<Charge>,
    keep_alive: AtomicBool,
    broadcast: AtomicBool,
    oob_inline: AtomicBool,
    dont_route: AtomicBool,
    timestamp: AtomicBool,
    priority: AtomicI32,
    mark: AtomicI32,
    receive_low_water: AtomicI32,
    /// SO_LINGER: seconds, or -1 when off.
    linger: AtomicI32,
    receive_timeout: AtomicU64,
    send_timeout: AtomicU64,
}

impl Options {
    /// The options of a new socket.
    pub fn new(platform: &Arc<dyn Platform>, domain: u16, kind: SocketType, protocol: i32) -> Options {
        let queue = WaitQueue::new();
        Options {
            domain,
            kind,
            protocol,
            budget: Budget::new(platform, DEFAULT_BUFFER, queue.clone()),
            queue,
            unaccepted: OnceLock::new(),
            receive_buffer: AtomicU64::new(DEFAULT_BUFFER as u64),
            pass_credentials: AtomicBool::new(false),
            reuse_addr: AtomicBool::new(false),
            reuse_port: AtomicBool::new(false),
            keep_alive: AtomicBool::new(false),
            broadcast: AtomicBool::new(false),
            oob_inline: AtomicBool::new(false),
            dont_route: AtomicBool::new(false),
            timestamp: AtomicBool::new(false),
            priority: AtomicI32::new(0),
            mark: AtomicI32::new(0),
            receive_low_water: AtomicI32::new(1),
            linger: AtomicI32::new(-1),
            receive_timeout: AtomicU64::new(0),
            send_timeout: AtomicU64::new(0),
        }
    }

    /// Charges the socket itself, which waits in a listener's queue and has no description yet. ENOMEM.
    pub fn charge_unaccepted(&self) -> Result<()> {
        let _ = self.unaccepted.set(Charge::new(self.budget.platform(), KernelMemory::Slab, SOCKET_COST)?);
        Ok(())
    }

    /// SO_RCVTIMEO in ns; 0 is none.
    pub fn receive_timeout(&self) -> Nanos {
        self.receive_timeout.load(Ordering::Relaxed)
    }

    /// SO_SNDTIMEO in ns; 0 is none.
    pub fn send_timeout(&self) -> Nanos {
        self.send_timeout.load(Ordering::Relaxed)
    }

    /// SO_LINGER with a time of zero: close(2) resets the connection.
    pub fn lingers_zero(&self) -> bool {
        self.linger.load(Ordering::Relaxed) == 0
    }

    /// What a socket made by accept(2) takes over from its listener.
    pub fn inherit(&self, from: &Options) {
        let copy = |to: &AtomicBool, from: &AtomicBool| to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        copy(&self.pass_credentials, &from.pass_credentials);
        copy(&self.reuse_addr, &from.reuse_addr);
        copy(&self.reuse_port, &from.reuse_port);
        copy(&self.keep_alive, &from.keep_alive);
        copy(&self.oob_inline, &from.oob_inline);
        self.linger.store(from.linger.load(Ordering::Relaxed), Ordering::Relaxed);
        self.budget.set_limit(from.budget.limit());
        self.receive_buffer.store(from.receive_buffer.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Whether the network namespace obeys the caller (priorities and marks).
fn over_network(task: &Task) -> bool {
    let (credentials, net) = (task.credentials(), task.net());
    let able = |cap| credentials.has_in(&net.owner.user_ns, cap);
    able(Caps::NET_ADMIN) || able(Caps::NET_RAW)
}

fn int(value: &[u8]) -> Result<i32> {
    let bytes = value.get(..4).ok_or(Errno::EINVAL)?;
    Ok(i32::from_ne_bytes(bytes.try_into().map_err(|_| Errno::EINVAL)?))
}

fn timeout(value: &[u8]) -> Result<u64> {
    let long = |at: usize| -> Result<i64> {
        let bytes = value.get(at..at + 8).ok_or(Errno::EINVAL)?;
        Ok(i64::from_ne_bytes(bytes.try_into().map_err(|_| Errno::EINVAL)?))
    };
    let (sec, usec) = (long(0)?, long(8)?);
    let usec = u64::try_from(usec).ok().filter(|&u| u < 1_000_000).ok_or(Errno::EDOM)?;
    // A negative time is no wait at all, which Linux keeps as the shortest one.
    let Ok(sec) = u64::try_from(sec) else { return Ok(1) };
    Ok(sec.saturating_mul(1_000_000_000).saturating_add(usec * 1000))
}

fn timeval(ns: u64) -> Vec<u8> {
    let mut out = (ns / 1_000_000_000).to_ne_bytes().to_vec();
    out.extend_from_slice(&((ns % 1_000_000_000) / 1000).to_ne_bytes());
    out
}

const SO_PEERCRED: i32 = 17;
const SO_BINDTODEVICE: i32 = 25;
const SO_MARK: i32 = 36;
const SO_PEERGROUPS: i32 = 59;

const fn opt(name: u32) -> i32 {
    name as i32
}

/// setsockopt(2) at SOL_SOCKET.
pub fn set(socket: &dyn Socket, task: &Task, name: i32, value: &[u8]) -> Result<()> {
    let o = socket.options();
    let flag = |to: &AtomicBool| -> Result<()> {
        to.store(int(value)? != 0, Ordering::Relaxed);
        Ok(())
    };
    const SO_RCVBUFFORCE: i32 = 33;
    const SO_SNDBUFFORCE: i32 = 32;
    match name {
        _ if name == opt(raw::SO_REUSEADDR) => flag(&o.reuse_addr),
        _ if name == opt(raw::SO_REUSEPORT) => flag(&o.reuse_port),
        _ if name == opt(raw::SO_KEEPALIVE) => flag(&o.keep_alive),
        _ if name == opt(raw::SO_BROADCAST) => flag(&o.broadcast),
        _ if name == opt(raw::SO_OOBINLINE) => flag(&o.oob_inline),
        _ if name == opt(raw::SO_DONTROUTE) => flag(&o.dont_route),
        _ if name == opt(raw::SO_PASSCRED) => flag(&o.pass_credentials),
        _ if name == opt(raw::SO_TIMESTAMP_OLD) => flag(&o.timestamp),
        _ if name == opt(raw::SO_PRIORITY) => {
            let priority = int(value)?;
            if !(0..=6).contains(&priority) && !over_network(task) {
                return Err(Errno::EPERM);
            }
            o.priority.store(priority, Ordering::Relaxed);
            Ok(())
        }
        SO_MARK => {
            if !over_network(task) {
                return Err(Errno::EPERM);
            }
            o.mark.store(int(value)?, Ordering::Relaxed);
            Ok(())
        }
        SO_BINDTODEVICE => match value.split(|&b| b == 0).next().unwrap_or_default() {
            b"" | b"lo" => Ok(()),
            _ => Err(Errno::ENODEV),
        },
        _ if name == opt(raw::SO_SNDBUF) || name == SO_SNDBUFFORCE => {
            if name == SO_SNDBUFFORCE && !task.credentials().has(Caps::NET_ADMIN) {
                return Err(Errno::EPERM);
            }
            let bytes = u32::try_from(int(value)?).unwrap_or(MAX_BUFFER).min(MAX_BUFFER);
            o.budget.set_limit((bytes as usize * 2).max(MIN_SEND));
            Ok(())
        }
        _ if name == opt(raw::SO_RCVBUF) || name == SO_RCVBUFFORCE => {
            if name == SO_RCVBUFFORCE && !task.credentials().has(Caps::NET_ADMIN) {
                return Err(Errno::EPERM);
            }
            let bytes = u32::try_from(int(value)?).unwrap_or(MAX_BUFFER).min(MAX_BUFFER);
            o.receive_buffer.store((bytes as usize * 2).max(MIN_RECEIVE) as u64, Ordering::Relaxed);
            Ok(())
        }
        _ if name == opt(raw::SO_RCVLOWAT) => {
            let mark = int(value)?;
            o.receive_low_water.store(if mark <= 0 { 1 } else { mark }, Ordering::Relaxed);
            Ok(())
        }
        _ if name == opt(raw::SO_LINGER) => {
            let on = int(value)? != 0;
            let seconds = int(value.get(4..).ok_or(Errno::EINVAL)?)?;
            o.linger.store(if on { seconds.max(0) } else { -1 }, Ordering::Relaxed);
            Ok(())
        }
        _ if name == opt(raw::SO_RCVTIMEO_OLD) => {
            o.receive_timeout.store(timeout(value)?, Ordering::Relaxed);
            Ok(())
        }
        _ if name == opt(raw::SO_SNDTIMEO_OLD) => {
            o.send_timeout.store(timeout(value)?, Ordering::Relaxed);
            Ok(())
        }
        _ => socket.set_option(task, SOL_SOCKET, name, value),
    }
}

/// getsockopt(2) at SOL_SOCKET.
pub fn get(socket: &dyn Socket, task: &Task, name: i32) -> Result<Vec<u8>> {
    let o = socket.options();
    let value = |v: i32| Ok(v.to_ne_bytes().to_vec());
    let flag = |of: &AtomicBool| value(i32::from(of.load(Ordering::Relaxed)));
    let size = |bytes: usize| value(i32::try_from(bytes).unwrap_or(i32::MAX));
    match name {
        _ if name == opt(raw::SO_TYPE) => value(o.kind as i32),
        _ if name == opt(raw::SO_DOMAIN) => value(i32::from(o.domain)),
        _ if name == opt(raw::SO_PROTOCOL) => value(o.protocol),
        _ if name == opt(raw::SO_ERROR) => value(socket.take_error().map_or(0, Errno::raw)),
        _ if name == opt(raw::SO_ACCEPTCONN) => value(i32::from(socket.is_listening())),
        _ if name == opt(raw::SO_REUSEADDR) => flag(&o.reuse_addr),
        _ if name == opt(raw::SO_REUSEPORT) => flag(&o.reuse_port),
        _ if name == opt(raw::SO_KEEPALIVE) => flag(&o.keep_alive),
        _ if name == opt(raw::SO_BROADCAST) => flag(&o.broadcast),
        _ if name == opt(raw::SO_OOBINLINE) => flag(&o.oob_inline),
        _ if name == opt(raw::SO_DONTROUTE) => flag(&o.dont_route),
        _ if name == opt(raw::SO_PASSCRED) && matches!(o.domain, super::AF_INET | super::AF_INET6) => {
            Err(Errno::EOPNOTSUPP)
        }
        _ if name == opt(raw::SO_PASSCRED) => flag(&o.pass_credentials),
        _ if name == opt(raw::SO_TIMESTAMP_OLD) => flag(&o.timestamp),
        _ if name == opt(raw::SO_PRIORITY) => value(o.priority.load(Ordering::Relaxed)),
        _ if name == opt(raw::SO_SNDBUF) => size(o.budget.limit()),
        _ if name == opt(raw::SO_RCVBUF) => {
            size(usize::try_from(o.receive_buffer.load(Ordering::Relaxed)).unwrap_or(0))
        }
        _ if name == opt(raw::SO_RCVLOWAT) => value(o.receive_low_water.load(Ordering::Relaxed)),
        _ if name == opt(raw::SO_SNDLOWAT) => value(1),
        _ if name == opt(raw::SO_LINGER) => {
            let linger = o.linger.load(Ordering::Relaxed);
            let mut out = i32::from(linger >= 0).to_ne_bytes().to_vec();
            out.extend_from_slice(&linger.max(0).to_ne_bytes());
            Ok(out)
        }
        _ if name == opt(raw::SO_RCVTIMEO_OLD) => Ok(timeval(o.receive_timeout())),
        _ if name == opt(raw::SO_SNDTIMEO_OLD) => Ok(timeval(o.send_timeout())),
        SO_MARK => value(o.mark.load(Ordering::Relaxed)),
        SO_PEERCRED => {
            // Without a peer that has credentials: pid 0, uid and gid -1.
            let seen = socket.peer_credentials().map_or([0, u32::MAX, u32::MAX], |c| c.as_seen_by(task));
            Ok(seen.iter().flat_map(|v| v.to_ne_bytes()).collect())
        }
        SO_PEERGROUPS => {
            let groups = socket.peer_credentials().and_then(|c| c.groups).ok_or(Errno::ENODATA)?;
            let user_ns = &task.credentials().user_ns;
            Ok(groups.groups.iter().flat_map(|&v| user_ns.shown_group(v).to_ne_bytes()).collect())
        }
        _ => socket.get_option(task, SOL_SOCKET, name),
    }
}

/// netdevice(7) requests about the one interface, `lo`.
pub fn interface_ioctl(task: &Task, request: u32, arg: u64) -> Result<u64> {
    use guest_abi::{UserAddr, UserPtr};
    const SIOCGIFNAME: u32 = 0x8910;
    const SIOCGIFCONF: u32 = 0x8912;
    const SIOCGIFFLAGS: u32 = 0x8913;
    const SIOCGIFADDR: u32 = 0x8915;
    const SIOCGIFNETMASK: u32 = 0x891b;
    const SIOCGIFMTU: u32 = 0x8921;
    const SIOCGIFHWADDR: u32 = 0x8927;
    const SIOCGIFINDEX: u32 = 0x8933;
    let space = task.space()?;
    let ptr = UserPtr::<[u8; 40]>::new(UserAddr(arg));
    let loopback = [2u8, 0, 0, 0, 127, 0, 0, 1];
    if request == SIOCGIFCONF {
        let [len, _, lo, hi]: [u32; 4] = space.read(UserPtr::new(UserAddr(arg)))?;
        let buffer = u64::from(lo) | (u64::from(hi) << 32);
        let mut entry = [0u8; 40];
        entry[..2].copy_from_slice(b"lo");
        entry[16..24].copy_from_slice(&loopback);
        let fits = buffer == 0 || len >= 40;
        if buffer != 0 && fits {
            space.write_bytes(UserAddr(buffer), &entry)?;
        }
        space.write(UserPtr::<u32>::new(UserAddr(arg)), &if fits { 40u32 } else { 0 })?;
        return Ok(0);
    }
    if !matches!(
        request,
        SIOCGIFNAME | SIOCGIFFLAGS | SIOCGIFADDR | SIOCGIFNETMASK | SIOCGIFMTU | SIOCGIFHWADDR | SIOCGIFINDEX
    ) {
        return Err(Errno::ENOTTY);
    }
    let mut entry: [u8; 40] = space.read(ptr)?;
    if request == SIOCGIFNAME {
        if entry[16..20] != 1i32.to_ne_bytes() {
            return Err(Errno::ENODEV);
        }
        entry[..16].fill(0);
        entry[..2].copy_from_slice(b"lo");
        space.write(ptr, &entry)?;
        return Ok(0);
    }
    if entry[..3] != *b"lo\0" {
        return Err(Errno::ENODEV);
    }
    let mut put = |bytes: &[u8]| {
        entry[16..].fill(0);
        entry[16..16 + bytes.len()].copy_from_slice(bytes);
    };
    match request {
        // IFF_UP, IFF_LOOPBACK, IFF_RUNNING.
        SIOCGIFFLAGS => put(&0x49u16.to_ne_bytes()),
        SIOCGIFADDR => put(&loopback),
        SIOCGIFNETMASK => put(&[2, 0, 0, 0, 255, 0, 0, 0]),
        SIOCGIFMTU => put(&65536i32.to_ne_bytes()),
        SIOCGIFHWADDR => put(&772u16.to_ne_bytes()),
        _ => put(&1i32.to_ne_bytes()),
    }
    space.write(ptr, &entry)?;
    Ok(0)
}
