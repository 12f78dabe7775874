//! UDP over loopback (udp(7)). Owns the datagrams that wait; a full receiver loses what arrives, as the network does.
use core::sync::atomic::Ordering;
use std::any::Any;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use super::ip_options::{self, IpOptions};
use super::ports::{self, PortHold, Protocol, Wanted};
use super::{IPPROTO_UDP, check_local, encode, parse, route, source_for, unspecified};
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::mm::{IoDest, IoSource};
use crate::ns::net::NetNamespace;
use crate::platform::Platform;
use crate::socket::message::{Ancillary, Budget, ReceiveQueue, Received, Segment, take_bytes};
use crate::socket::options::Options;
use crate::socket::{AF_INET, AF_INET6, AF_UNSPEC, SendRequest, Socket, SocketType, msg};
use crate::task::Task;
use crate::{Errno, Result};

/// Largest payload over IPv4.
const MAX_PAYLOAD: usize = 65507;

#[derive(Default)]
struct State {
    hold: Option<Arc<PortHold>>,
    local: Option<SocketAddr>,
    /// Default destination, and the only source admitted.
    remote: Option<SocketAddr>,
    received: ReceiveQueue,
    shut_read: bool,
    shut_write: bool,
    error: Option<Errno>,
    released: bool,
}

/// A UDP socket.
pub struct UdpSocket {
    this: Weak<UdpSocket>,
    net: Arc<NetNamespace>,
    options: Options,
    ip: IpOptions,
    /// What waits here is charged to the receiver.
    inbox: Arc<Budget>,
    state: Mutex<State>,
}

impl UdpSocket {
    /// An unbound socket.
    pub fn new(platform: &Arc<dyn Platform>, net: Arc<NetNamespace>, domain: u16) -> Arc<UdpSocket> {
        let levels: &'static [i32] = if domain == AF_INET {
            &[ip_options::IP, ip_options::UDP]
        } else {
            &[ip_options::IP, ip_options::UDP, ip_options::IPV6]
        };
        let options = Options::new(platform, domain, SocketType::Datagram, IPPROTO_UDP);
        let inbox = Budget::new(platform, options.budget.limit(), WaitQueue::new());
        Arc::new_cyclic(|this| UdpSocket {
            this: this.clone(),
            net,
            options,
            ip: IpOptions::new(levels),
            inbox,
            state: Mutex::new(Rank::Socket, State::default()),
        })
    }

    fn domain(&self) -> u16 {
        self.options.domain
    }

    fn v6only(&self) -> bool {
        self.domain() == AF_INET || self.ip.get(ip_options::IPV6, ip_options::V6ONLY).is_ok_and(|v| v != 0)
    }

    fn take_port(&self, task: &Task, addr: SocketAddr) -> Result<()> {
        let this: Weak<UdpSocket> = self.this.clone();
        let wanted = Wanted {
            addr,
            reuse_addr: self.options.reuse_addr.load(Ordering::Relaxed),
            reuse_port: self.options.reuse_port.load(Ordering::Relaxed),
            one_family: self.v6only() || addr.is_ipv4(),
            receiving: true,
            socket: this,
        };
        let hold = ports::hold(task, &self.net, Protocol::Udp, wanted)?;
        let mut state = self.state.lock();
        state.local = Some(hold.addr);
        let old = state.hold.replace(hold);
        drop(state);
        drop(old);
        Ok(())
    }

    fn bind_if_needed(&self, task: &Task) -> Result<()> {
        if self.state.lock().hold.is_some() {
            return Ok(());
        }
        self.take_port(task, SocketAddr::new(unspecified(self.domain()), 0))
    }

    /// Takes a datagram in, unless it is not for this socket or there is no room.
    fn deliver(&self, from: SocketAddr, data: Vec<u8>) {
        {
            let mut state = self.state.lock();
            if state.released || state.shut_read || self.inbox.room() < data.len() {
                return;
            }
            let source: Arc<[u8]> = encode(self.domain(), from).into();
            let ancillary = Ancillary { source: Some(source), ..Ancillary::default() };
            // No memory is no room.
            let Ok(charge) = self.inbox.charge(data.len()) else { return };
            state.received.push(Segment::new(data, ancillary, charge));
        }
        self.options.queue.wake_up_to(Events::READABLE, 1);
    }

    /// The receiver of a datagram: one connected to the sender before one that takes all.
    fn receiver(&self, from: SocketAddr, to: SocketAddr) -> Option<Arc<UdpSocket>> {
        let found = ports::receivers(&self.net, Protocol::Udp, to);
        let found = found.iter().filter_map(Weak::upgrade).filter_map(|s| s.downcast::<UdpSocket>().ok());
        let mut open = None;
        for socket in found {
            let remote = socket.state.lock().remote;
            match remote {
                Some(remote) if remote == from => return Some(socket),
                Some(_) => {}
                None => open = open.or(Some(socket)),
            }
        }
        open
    }
}

impl Socket for UdpSocket {
    fn options(&self) -> &Options {
        &self.options
    }

    fn bind(&self, task: &Arc<Task>, addr: &[u8]) -> Result<()> {
        let addr = parse(self.domain(), addr)?;
        check_local(addr.ip())?;
        if self.state.lock().hold.is_some() {
            return Err(Errno::EINVAL);
        }
        self.take_port(task, addr)
    }

    fn connect(&self, task: &Arc<Task>, addr: &[u8], _nonblocking: bool) -> Result<()> {
        if addr.get(..2).is_some_and(|f| f == AF_UNSPEC.to_ne_bytes()) {
            self.state.lock().remote = None;
            return Ok(());
        }
        let to = parse(self.domain(), addr)?;
        if self.domain() == AF_INET6 && self.v6only() && to.is_ipv4() {
            return Err(Errno::ENETUNREACH);
        }
        let to = route(to)?;
        self.bind_if_needed(task)?;
        let mut state = self.state.lock();
        state.remote = Some(to);
        if let Some(local) = &mut state.local
            && local.ip().is_unspecified()
        {
            local.set_ip(source_for(to.ip()));
        }
        Ok(())
    }

    fn send(&self, task: &Task, src: &mut IoSource<'_>, request: &mut SendRequest<'_>) -> Result<usize> {
        if request.flags & msg::OOB != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let len = src.remaining();
        if len > MAX_PAYLOAD {
            return Err(Errno::EMSGSIZE);
        }
        let remote = {
            let mut state = self.state.lock();
            if let Some(e) = state.error.take() {
                return Err(e);
            }
            if state.shut_write {
                return Err(Errno::EPIPE);
            }
            state.remote
        };
        self.bind_if_needed(task)?;
        let to = match request.to {
            Some(to) => route(parse(self.domain(), to)?)?,
            None => remote.ok_or(Errno::EDESTADDRREQ)?,
        };
        if to.port() == 0 {
            return Err(Errno::EINVAL);
        }
        let data = take_bytes(src, len)?;
        if data.len() < len {
            return Err(Errno::EFAULT);
        }
        let local = self.state.lock().local;
        let local = local.unwrap_or_else(|| SocketAddr::new(unspecified(self.domain()), 0));
        let ip = if local.ip().is_unspecified() { source_for(to.ip()) } else { local.ip() };
        let from = SocketAddr::new(ip, local.port());
        match self.receiver(from, to) {
            Some(receiver) => receiver.deliver(from, data),
            // The refusal comes back to a connected sender only.
            None if remote == Some(to) => {
                self.state.lock().error = Some(Errno::ECONNREFUSED);
                self.options.queue.wake(Events::ERR | Events::READABLE);
            }
            None => {}
        }
        Ok(len)
    }

    fn receive(&self, dst: &mut IoDest<'_>, flags: u32) -> Result<Received> {
        if flags & msg::OOB != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if flags & msg::ERRQUEUE != 0 {
            return Err(Errno::EAGAIN);
        }
        let mut done = Vec::new();
        let mut state = self.state.lock();
        let result = state.received.read_message(dst, flags & msg::PEEK != 0, &mut done);
        let answer = match result {
            Err(e) => Err(e),
            Ok(Some(mut received)) => {
                received.end_of_record = false;
                Ok(received)
            }
            Ok(None) => match state.error.take() {
                Some(e) => Err(e),
                None if state.shut_read => Ok(Received::default()),
                None => Err(Errno::EAGAIN),
            },
        };
        drop(state);
        drop(done);
        answer
    }

    fn shutdown(&self, how: u32) -> Result<()> {
        let mut state = self.state.lock();
        let connected = state.remote.is_some();
        match how {
            0 => state.shut_read = true,
            1 => state.shut_write = true,
            2 => {
                state.shut_read = true;
                state.shut_write = true;
            }
            _ => return Err(Errno::EINVAL),
        }
        drop(state);
        self.options.queue.wake(Events::all());
        if connected { Ok(()) } else { Err(Errno::ENOTCONN) }
    }

    fn name(&self) -> Result<Vec<u8>> {
        let local = self.state.lock().local;
        Ok(encode(self.domain(), local.unwrap_or_else(|| SocketAddr::new(unspecified(self.domain()), 0))))
    }

    fn peer_name(&self) -> Result<Vec<u8>> {
        let remote = self.state.lock().remote;
        Ok(encode(self.domain(), remote.ok_or(Errno::ENOTCONN)?))
    }

    fn poll(&self) -> Events {
        let state = self.state.lock();
        let mut events = Events::WRITABLE | Events::WRBAND;
        if state.error.is_some() {
            events |= Events::ERR | Events::READABLE;
        }
        if state.shut_read {
            events |= Events::READABLE | Events::RDHUP;
        }
        if state.shut_read && state.shut_write {
            events |= Events::HUP;
        }
        if !state.received.is_empty() {
            events |= Events::READABLE;
        }
        events
    }

    fn get_option(&self, _task: &Task, level: i32, name: i32) -> Result<Vec<u8>> {
        self.ip.get_bytes(level, name)
    }

    fn set_option(&self, _task: &Task, level: i32, name: i32, value: &[u8]) -> Result<()> {
        if (level, name) == (ip_options::IPV6, ip_options::V6ONLY) && self.state.lock().hold.is_some() {
            return Err(Errno::EINVAL);
        }
        self.ip.set(level, name, value)
    }

    fn readable_bytes(&self) -> Result<usize> {
        Ok(self.state.lock().received.first_len())
    }

    fn take_error(&self) -> Option<Errno> {
        self.state.lock().error.take()
    }

    fn release(&self) {
        let (hold, segments) = {
            let mut state = self.state.lock();
            state.released = true;
            (state.hold.take(), state.received.clear())
        };
        drop(hold);
        drop(segments);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}
