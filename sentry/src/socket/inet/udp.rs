//! UDP over loopback (udp(7)). Owns the datagrams that wait; a full receiver loses what arrives, as the network does.
use std::any::Any;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use super::ports::{self, PortHold, Protocol};
use super::sock::InetSock;
use super::{check_local, parse, source_for};
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::mm::{IoDest, IoSource};
use crate::ns::net::NetNamespace;
use crate::platform::Platform;
use crate::socket::message::{Ancillary, Budget, ReceiveQueue, Received, Segment, take_bytes};
use crate::socket::options::Options;
use crate::socket::{AF_UNSPEC, SendRequest, Socket, msg};
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
    inet: InetSock,
    /// What waits here is charged to the receiver.
    inbox: Arc<Budget>,
    state: Mutex<State>,
}

impl UdpSocket {
    /// An unbound socket.
    pub fn new(platform: &Arc<dyn Platform>, net: Arc<NetNamespace>, domain: u16) -> Arc<UdpSocket> {
        let inet = InetSock::new(platform, net, domain, Protocol::Udp);
        let inbox = Budget::new(platform, inet.options.budget.limit(), WaitQueue::new());
        Arc::new_cyclic(|this| UdpSocket {
            this: this.clone(),
            inet,
            inbox,
            state: Mutex::new(Rank::Socket, State::default()),
        })
    }

    fn take_port(&self, task: &Task, addr: SocketAddr) -> Result<()> {
        let this: Weak<UdpSocket> = self.this.clone();
        let hold = self.inet.take_port(task, addr, true, this)?;
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
        self.take_port(task, self.inet.nowhere())
    }

    /// Takes a datagram in, unless it is not for this socket or there is no room.
    fn deliver(&self, from: SocketAddr, data: Vec<u8>) {
        {
            let mut state = self.state.lock();
            if state.released || state.shut_read || self.inbox.room() < data.len() {
                return;
            }
            let source: Arc<[u8]> = self.inet.encode(Some(from)).into();
            let ancillary = Ancillary { source: Some(source), ..Ancillary::default() };
            // No memory is no room.
            let Ok(charge) = self.inbox.charge(data.len()) else { return };
            state.received.push(Segment::new(data, ancillary, charge));
        }
        self.inet.options.queue.wake_up_to(Events::READABLE, 1);
    }

    /// The receiver of a datagram: one connected to the sender before one that takes all.
    fn receiver(&self, from: SocketAddr, to: SocketAddr) -> Option<Arc<UdpSocket>> {
        let found = ports::receivers(&self.inet.net, Protocol::Udp, to);
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
        &self.inet.options
    }

    fn bind(&self, task: &Arc<Task>, addr: &[u8]) -> Result<()> {
        let addr = parse(self.inet.domain(), addr)?;
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
        let to = self.inet.destination(addr)?;
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
            Some(to) => self.inet.destination(to)?,
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
        let local = local.unwrap_or_else(|| self.inet.nowhere());
        let ip = if local.ip().is_unspecified() { source_for(to.ip()) } else { local.ip() };
        let from = SocketAddr::new(ip, local.port());
        match self.receiver(from, to) {
            Some(receiver) => receiver.deliver(from, data),
            // The refusal comes back to a connected sender only.
            None if remote == Some(to) => {
                self.state.lock().error = Some(Errno::ECONNREFUSED);
                self.inet.options.queue.wake(Events::ERR | Events::READABLE);
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
        self.inet.options.queue.wake(Events::all());
        if connected { Ok(()) } else { Err(Errno::ENOTCONN) }
    }

    fn name(&self) -> Result<Vec<u8>> {
        let local = self.state.lock().local;
        Ok(self.inet.encode(local))
    }

    fn peer_name(&self) -> Result<Vec<u8>> {
        let remote = self.state.lock().remote;
        Ok(self.inet.encode(Some(remote.ok_or(Errno::ENOTCONN)?)))
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
        self.inet.ip.get_bytes(level, name)
    }

    fn set_option(&self, _task: &Task, level: i32, name: i32, value: &[u8]) -> Result<()> {
        self.inet.set_option(level, name, value, || self.state.lock().hold.is_some())
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
