//! AF_NETLINK, route family (rtnetlink(7)): tells of the loopback interface. Owns the answers that wait; changes nothing.
use std::any::Any;
use std::sync::Arc;

use super::message::{Ancillary, ReceiveQueue, Received, Segment, take_bytes};
use super::options::Options;
use super::{AF_INET, AF_INET6, AF_NETLINK, SendRequest, Socket, SocketType, msg};
use crate::event::Events;
use crate::lock::{Mutex, Rank};
use crate::mm::{IoDest, IoSource};
use crate::ns::user::Caps;
use crate::task::Task;
use crate::{Errno, Result};

const NETLINK_ROUTE: i32 = 0;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_MULTI: u16 = 2;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
/// Longest request looked at.
const REQUEST_MAX: usize = 32 << 10;

#[derive(Default)]
struct State {
    port: u32,
    received: ReceiveQueue,
    peer_port: Option<u32>,
}

/// A route netlink socket.
pub struct NetlinkSocket {
    options: Options,
    state: Mutex<State>,
}

/// A netlink socket. EPROTONOSUPPORT for other families than route.
pub fn create(task: &Task, kind: u32, protocol: i32) -> Result<Arc<dyn Socket>> {
    let Some(kind @ (SocketType::Raw | SocketType::Datagram)) = SocketType::from_raw(kind) else {
        return Err(Errno::ESOCKTNOSUPPORT);
    };
    if protocol != NETLINK_ROUTE {
        return Err(Errno::EPROTONOSUPPORT);
    }
    let options = Options::new(&task.kernel().platform, AF_NETLINK, kind, protocol);
    Ok(Arc::new(NetlinkSocket { options, state: Mutex::new(Rank::Socket, State::default()) }))
}

fn address(port: u32) -> Vec<u8> {
    let mut out = AF_NETLINK.to_ne_bytes().to_vec();
    out.extend_from_slice(&[0; 2]);
    out.extend_from_slice(&port.to_ne_bytes());
    out.extend_from_slice(&[0; 4]);
    out
}

/// One answer under construction.
struct Message {
    bytes: Vec<u8>,
}

impl Message {
    fn new(kind: u16, flags: u16, sequence: u32, port: u32, body: &[u8]) -> Message {
        let mut bytes = vec![0; 4];
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(&sequence.to_ne_bytes());
        bytes.extend_from_slice(&port.to_ne_bytes());
        bytes.extend_from_slice(body);
        Message { bytes }
    }

    fn attribute(mut self, kind: u16, value: &[u8]) -> Message {
        let len = u16::try_from(value.len() + 4).unwrap_or(4);
        self.bytes.extend_from_slice(&len.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self
    }

    fn finish(mut self) -> Vec<u8> {
        let len = u32::try_from(self.bytes.len()).unwrap_or(0).to_ne_bytes();
        for (to, from) in self.bytes.iter_mut().zip(len) {
            *to = from;
        }
        self.bytes
    }
}

/// The header of a request.
struct Request {
    kind: u16,
    flags: u16,
    sequence: u32,
}

fn link(request: &Request, port: u32, flags: u16) -> Vec<u8> {
    // struct ifinfomsg: ARPHRD_LOOPBACK, index 1, IFF_UP | IFF_LOOPBACK | IFF_RUNNING | IFF_LOWER_UP.
    let mut body = vec![0, 0];
    body.extend_from_slice(&772u16.to_ne_bytes());
    body.extend_from_slice(&1i32.to_ne_bytes());
    body.extend_from_slice(&0x1_0049u32.to_ne_bytes());
    body.extend_from_slice(&0u32.to_ne_bytes());
    Message::new(RTM_NEWLINK, flags, request.sequence, port, &body)
        // IFLA_IFNAME, IFLA_TXQLEN, IFLA_OPERSTATE, IFLA_LINKMODE, IFLA_MTU, IFLA_QDISC, IFLA_ADDRESS, IFLA_BROADCAST
        .attribute(3, b"lo\0")
        .attribute(13, &1000u32.to_ne_bytes())
        .attribute(16, &[0])
        .attribute(17, &[0])
        .attribute(4, &65536u32.to_ne_bytes())
        .attribute(6, b"noqueue\0")
        .attribute(1, &[0; 6])
        .attribute(2, &[0; 6])
        .finish()
}

fn addr(request: &Request, port: u32, family: u16) -> Vec<u8> {
    let (prefix, ip): (u8, Vec<u8>) = if family == AF_INET {
        (8, vec![127, 0, 0, 1])
    } else {
        (128, std::net::Ipv6Addr::LOCALHOST.octets().to_vec())
    };
    // struct ifaddrmsg: IFA_F_PERMANENT, RT_SCOPE_HOST, index 1.
    let mut body = vec![u8::try_from(family).unwrap_or(0), prefix, 0x80, 254];
    body.extend_from_slice(&1u32.to_ne_bytes());
    let message = Message::new(RTM_NEWADDR, NLM_F_MULTI, request.sequence, port, &body).attribute(1, &ip);
    // IFA_ADDRESS above; IFA_LOCAL, IFA_LABEL, IFA_CACHEINFO, IFA_FLAGS.
    let message = if family == AF_INET { message.attribute(2, &ip).attribute(3, b"lo\0") } else { message };
    let mut cache = vec![0xff; 8];
    cache.extend_from_slice(&[0; 8]);
    message.attribute(6, &cache).attribute(8, &0x80u32.to_ne_bytes()).finish()
}

fn route(request: &Request, port: u32) -> Vec<u8> {
    // struct rtmsg: 127.0.0.0/8 in the local table, protocol kernel, scope host, type local.
    let body = [2, 8, 0, 0, 255, 2, 254, 2, 0, 0, 0, 0];
    Message::new(RTM_NEWROUTE, NLM_F_MULTI, request.sequence, port, &body)
        .attribute(15, &255u32.to_ne_bytes())
        .attribute(1, &[127, 0, 0, 0])
        .attribute(7, &[127, 0, 0, 1])
        .attribute(4, &1u32.to_ne_bytes())
        .finish()
}

fn error(request: &Request, port: u32, code: i32, original: &[u8]) -> Vec<u8> {
    let mut body = code.to_ne_bytes().to_vec();
    body.extend_from_slice(original.get(..16).unwrap_or_default());
    Message::new(NLMSG_ERROR, 0, request.sequence, port, &body).finish()
}

/// Whether a request to bring the loopback device up, or to give it 127.0.0.1/8, asks for nothing else.
fn asks_for_what_is(kind: u16, bytes: &[u8]) -> bool {
    const IFF_UP: u32 = 1;
    let word = |at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_ne_bytes);
    let loopback = word(20) == Some(1);
    if kind == RTM_NEWLINK {
        // struct ifinfomsg: index at 4, flags at 8, which of them to change at 12.
        return loopback && bytes.len() == 32 && word(24).is_some_and(|f| f & IFF_UP != 0) && word(28) == Some(IFF_UP);
    }
    // struct ifaddrmsg: family, prefix; then IFA_ADDRESS and IFA_LOCAL, of eight bytes each.
    let attributes = bytes.get(24..).unwrap_or_default().chunks(8);
    let ours = |a: &[u8]| matches!(a, [8, 0, 1 | 2, 0, 127, 0, 0, 1]);
    loopback && bytes.get(16..18) == Some(&[AF_INET as u8, 8]) && attributes.len() > 0 && attributes.clone().all(ours)
}

/// The answers to one request, each a datagram.
fn answer(request: &Request, port: u32, bytes: &[u8], admin: bool) -> Vec<Vec<u8>> {
    let dump = request.flags & NLM_F_DUMP != 0;
    let done = || Message::new(NLMSG_DONE, NLM_F_MULTI, request.sequence, port, &0i32.to_ne_bytes()).finish();
    let family = bytes.get(16).copied().map_or(0, u16::from);
    let mut out = match request.kind {
        RTM_GETLINK if dump => vec![link(request, port, NLM_F_MULTI), done()],
        RTM_GETLINK => {
            let index = bytes.get(20..24).and_then(|b| b.try_into().ok()).map_or(0, i32::from_ne_bytes);
            let named = bytes.windows(3).skip(32).any(|w| w == b"lo\0");
            if index == 1 || (index == 0 && named) {
                vec![link(request, port, 0)]
            } else {
                return vec![error(request, port, -Errno::ENODEV.raw(), bytes)];
            }
        }
        RTM_GETADDR => {
            let mut first = Vec::new();
            for f in [AF_INET, AF_INET6] {
                if family == 0 || family == f {
                    first.extend(addr(request, port, f));
                }
            }
            if first.is_empty() { vec![done()] } else { vec![first, done()] }
        }
        RTM_GETROUTE if dump => {
            if family == 0 || family == AF_INET {
                vec![route(request, port), done()]
            } else {
                vec![done()]
            }
        }
        16..=111 if request.kind % 4 == 2 && dump => vec![done()],
        // The loopback device is up and has its addresses from the start: to bring it up is done already.
        RTM_NEWLINK | RTM_NEWADDR if admin && asks_for_what_is(request.kind, bytes) => {
            // Of such a request NLM_F_EXCL is a bit of what NLM_F_DUMP is for others.
            let told = (request.flags & NLM_F_ACK != 0).then(|| error(request, port, 0, bytes));
            return told.into_iter().collect();
        }
        16..=111 if request.kind % 4 != 2 => return vec![error(request, port, -Errno::EPERM.raw(), bytes)],
        _ => return vec![error(request, port, -Errno::EOPNOTSUPP.raw(), bytes)],
    };
    if request.flags & NLM_F_ACK != 0 && !dump {
        out.push(error(request, port, 0, bytes));
    }
    out
}

impl NetlinkSocket {
    /// Puts a message from the kernel in; it is lost where there is no room.
    pub fn deliver(&self, message: Vec<u8>) {
        let ancillary = Ancillary { source: Some(address(0).into()), ..Ancillary::default() };
        {
            let mut state = self.state.lock();
            if self.options.budget.room() == 0 {
                return;
            }
            let Ok(charge) = self.options.budget.charge(message.len()) else { return };
            state.received.push(Segment::new(message, ancillary, charge));
        }
        self.options.queue.wake(Events::READABLE);
    }

    fn port(&self, task: &Task) -> u32 {
        let mut state = self.state.lock();
        if state.port == 0 {
            state.port = u32::try_from(task.group().tgid()).unwrap_or(1);
        }
        state.port
    }
}

impl Socket for NetlinkSocket {
    fn options(&self) -> &Options {
        &self.options
    }

    fn bind(&self, task: &Arc<Task>, addr: &[u8]) -> Result<()> {
        if addr.len() < 12 || addr.get(..2) != Some(&AF_NETLINK.to_ne_bytes()[..]) {
            return Err(Errno::EINVAL);
        }
        let port = addr.get(4..8).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes);
        if port != 0 {
            self.state.lock().port = port;
        }
        self.port(task);
        Ok(())
    }

    fn connect(&self, task: &Arc<Task>, addr: &[u8], _nonblocking: bool) -> Result<()> {
        let port = addr.get(4..8).and_then(|b| b.try_into().ok()).map(u32::from_ne_bytes).ok_or(Errno::EINVAL)?;
        self.port(task);
        self.state.lock().peer_port = Some(port);
        Ok(())
    }

    fn send(&self, task: &Task, src: &mut IoSource<'_>, request: &mut SendRequest<'_>) -> Result<usize> {
        if request.flags & msg::OOB != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let len = src.remaining();
        if len > REQUEST_MAX {
            return Err(Errno::EMSGSIZE);
        }
        if let Some(to) = request.to {
            let port = to.get(4..8).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes);
            if port != 0 {
                return Err(Errno::ECONNREFUSED);
            }
        }
        let port = self.port(task);
        let admin = task.credentials().has_in(&task.net().owner.user_ns, Caps::NET_ADMIN);
        let bytes = take_bytes(src, len)?;
        let mut rest: &[u8] = &bytes;
        while rest.len() >= 16 {
            let short = |at: usize| rest.get(at..at + 2).and_then(|b| b.try_into().ok()).map_or(0, u16::from_ne_bytes);
            let long = |at: usize| rest.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes);
            let size = usize::try_from(long(0)).unwrap_or(0);
            if size < 16 || size > rest.len() {
                break;
            }
            let header = Request { kind: short(4), flags: short(6), sequence: long(8) };
            let one = rest.get(..size).unwrap_or_default();
            if header.kind >= 16 {
                for reply in answer(&header, port, one, admin) {
                    let ancillary = Ancillary { source: Some(address(0).into()), ..Ancillary::default() };
                    let mut state = self.state.lock();
                    if self.options.budget.room() == 0 {
                        return Err(Errno::ENOBUFS);
                    }
                    let charge = self.options.budget.charge(reply.len())?;
                    state.received.push(Segment::new(reply, ancillary, charge));
                }
            }
            rest = rest.get(size.next_multiple_of(4)..).unwrap_or_default();
        }
        self.options.queue.wake(Events::READABLE);
        Ok(len)
    }

    fn receive(&self, dst: &mut IoDest<'_>, flags: u32) -> Result<Received> {
        let mut done = Vec::new();
        let received = {
            let mut state = self.state.lock();
            state.received.read_message(dst, flags & msg::PEEK != 0, &mut done)
        };
        drop(done);
        let mut received = received?.ok_or(Errno::EAGAIN)?;
        received.end_of_record = false;
        Ok(received)
    }

    fn shutdown(&self, _how: u32) -> Result<()> {
        Err(Errno::EOPNOTSUPP)
    }

    fn name(&self) -> Result<Vec<u8>> {
        Ok(address(self.state.lock().port))
    }

    fn peer_name(&self) -> Result<Vec<u8>> {
        Ok(address(self.state.lock().peer_port.unwrap_or(0)))
    }

    fn poll(&self) -> Events {
        let readable = !self.state.lock().received.is_empty();
        let idle = Events::WRITABLE | Events::WRBAND;
        if readable { idle | Events::READABLE } else { idle }
    }

    fn set_option(&self, _task: &Task, level: i32, name: i32, _value: &[u8]) -> Result<()> {
        // NETLINK_EXT_ACK, NETLINK_GET_STRICT_CHK and NETLINK_PKTINFO refine what the answers tell.
        const SOL_NETLINK: i32 = 270;
        if level == SOL_NETLINK && matches!(name, 3 | 11 | 12) { Ok(()) } else { Err(Errno::ENOPROTOOPT) }
    }

    fn readable_bytes(&self) -> Result<usize> {
        Ok(self.state.lock().received.first_len())
    }

    fn release(&self) {
        let segments = self.state.lock().received.clear();
        drop(segments);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}
