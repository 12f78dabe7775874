//! TCP over loopback (tcp(7)): a connection is two receive queues in memory. Owns connection states and what close, shutdown and
//! reset mean for the other end.
use core::sync::atomic::Ordering;
use std::any::Any;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};

use super::ip_options;
use super::ports::{self, PortHold, Protocol};
use super::sock::InetSock;
use super::{check_local, parse, source_for};
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::mm::{IoDest, IoSource};
use crate::ns::net::NetNamespace;
use crate::platform::Platform;
use crate::socket::message::{Ancillary, CHUNK, ReceiveQueue, Received, charged_bytes};
use crate::socket::options::Options;
use crate::socket::{AF_UNSPEC, SendRequest, Socket, msg};
use crate::task::Task;
use crate::{Errno, Result};

const MAX_BACKLOG: usize = 4096;
/// net.ipv4.tcp_rmem's default.
const DEFAULT_RECEIVE: u64 = 131_072;
/// Bytes in flight in one direction.
const WINDOW: usize = 1 << 20;

struct Listener {
    backlog: usize,
    pending: VecDeque<Arc<TcpSocket>>,
}

#[derive(Default)]
struct State {
    hold: Option<Arc<PortHold>>,
    local: Option<SocketAddr>,
    remote: Option<SocketAddr>,
    received: ReceiveQueue,
    peer: Option<Weak<TcpSocket>>,
    listener: Option<Listener>,
    /// A non-blocking connect has been made whose success connect(2) has not told yet.
    connecting: bool,
    connected: bool,
    /// The peer has sent its FIN.
    fin: bool,
    shut_read: bool,
    shut_write: bool,
    /// The connection was reset.
    reset: bool,
    error: Option<Errno>,
    released: bool,
    /// Who waits for room in the backlog.
    senders: Vec<Weak<WaitQueue>>,
}

impl State {
    /// Both directions have ended: the connection is no more, though what was received may still be read.
    fn closed(&self) -> bool {
        self.fin && self.shut_write
    }
}

/// A TCP socket.
pub struct TcpSocket {
    this: Weak<TcpSocket>,
    inet: InetSock,
    state: Mutex<State>,
}

impl TcpSocket {
    /// A closed socket.
    pub fn new(platform: &Arc<dyn Platform>, net: Arc<NetNamespace>, domain: u16) -> Arc<TcpSocket> {
        let inet = InetSock::new(platform, net, domain, Protocol::Tcp);
        inet.options.budget.set_limit(WINDOW);
        inet.options.receive_buffer.store(DEFAULT_RECEIVE, Ordering::Relaxed);
        Arc::new_cyclic(|this| TcpSocket {
            this: this.clone(),
            inet,
            state: Mutex::new(Rank::Socket, State::default()),
        })
    }

    fn queue(&self) -> &Arc<WaitQueue> {
        &self.inet.options.queue
    }

    fn take_port(&self, task: &Task, addr: SocketAddr) -> Result<Arc<PortHold>> {
        let this: Weak<TcpSocket> = self.this.clone();
        self.inet.take_port(task, addr, false, this)
    }

    fn peer(&self) -> Option<Arc<TcpSocket>> {
        self.state.lock().peer.as_ref().and_then(Weak::upgrade)
    }

    fn wake_all(&self) {
        self.queue().wake(Events::all());
    }

    /// The peer has reset the connection.
    fn be_reset(&self) {
        let mut state = self.state.lock();
        state.error = Some(if state.fin { Errno::EPIPE } else { Errno::ECONNRESET });
        state.reset = true;
        state.shut_read = true;
        state.shut_write = true;
        drop(state);
        self.wake_all();
    }

    fn find_listener(&self, to: SocketAddr) -> Option<Arc<TcpSocket>> {
        let found = ports::receivers(&self.inet.net, Protocol::Tcp, to);
        let found: Vec<_> = found.iter().filter_map(Weak::upgrade).collect();
        // Listeners that share a port take connections by the caller's address, which is as good as chance.
        let index = (Weak::as_ptr(&self.this) as usize >> 6) % found.len().max(1);
        found.into_iter().nth(index)?.downcast::<TcpSocket>().ok()
    }

    fn disconnect(&self) {
        let peer = self.peer();
        let mut state = self.state.lock();
        state.peer = None;
        state.remote = None;
        state.connected = false;
        state.connecting = false;
        state.fin = false;
        state.reset = false;
        state.shut_read = false;
        state.shut_write = false;
        let segments = state.received.clear();
        drop(state);
        drop(segments);
        if let Some(peer) = peer {
            peer.be_reset();
        }
    }

    fn begin_connect(&self, task: &Task, to: SocketAddr, nonblocking: bool) -> Result<()> {
        let target = match self.find_listener(to) {
            Some(target) if !core::ptr::eq(&raw const *target, self) => target,
            _ => return Err(Errno::ECONNREFUSED),
        };
        let bound = self.state.lock().hold.clone();
        let hold =
            if let Some(hold) = bound { hold } else { self.take_port(task, SocketAddr::new(source_for(to.ip()), 0))? };
        let local_ip = if hold.addr.ip().is_unspecified() { source_for(to.ip()) } else { hold.addr.ip() };
        let local = SocketAddr::new(local_ip, hold.addr.port());
        let server = TcpSocket::new(self.inet.options.budget.platform(), self.inet.net.clone(), target.inet.domain());
        server.inet.options.charge_unaccepted()?;
        server.inet.options.inherit(&target.inet.options);
        server.inet.ip.inherit(&target.inet.ip);
        {
            let mut listening = target.state.lock();
            let listener_hold = listening.hold.clone();
            let Some(listener) = &listening.listener else { return Err(Errno::ECONNREFUSED) };
            // A connection that may not wait is let in beyond the backlog: its SYN would be sent again meanwhile.
            let room = if nonblocking { MAX_BACKLOG } else { listener.backlog };
            if listener.pending.len() > room {
                if nonblocking {
                    return Err(Errno::ECONNREFUSED);
                }
                let queue = Arc::downgrade(self.queue());
                listening.senders.retain(|w| w.strong_count() > 0 && !Weak::ptr_eq(w, &queue));
                listening.senders.push(queue);
                return Err(Errno::EAGAIN);
            }
            {
                let mut state = server.state.lock_nested();
                state.hold = listener_hold;
                state.local = Some(to);
                state.remote = Some(local);
                state.peer = Some(self.this.clone());
                state.connected = true;
            }
            {
                let mut state = self.state.lock_nested();
                state.hold = Some(hold);
                state.local = Some(local);
                state.remote = Some(to);
                state.peer = Some(Arc::downgrade(&server));
                state.connected = true;
            }
            if let Some(listener) = &mut listening.listener {
                listener.pending.push_back(server);
            }
        }
        // One connection is for one of those who wait in accept(2).
        target.queue().wake_up_to(Events::READABLE, 1);
        self.queue().wake(Events::WRITABLE);
        Ok(())
    }
}

impl Socket for TcpSocket {
    fn options(&self) -> &Options {
        &self.inet.options
    }

    fn bind(&self, task: &Arc<Task>, addr: &[u8]) -> Result<()> {
        let addr = parse(self.inet.domain(), addr)?;
        check_local(addr.ip())?;
        {
            let state = self.state.lock();
            if state.hold.is_some() || state.connected {
                return Err(Errno::EINVAL);
            }
        }
        let hold = self.take_port(task, addr)?;
        let mut state = self.state.lock();
        state.local = Some(hold.addr);
        let old = state.hold.replace(hold);
        drop(state);
        drop(old);
        Ok(())
    }

    fn listen(&self, task: &Arc<Task>, backlog: i32) -> Result<()> {
        let bound = {
            let state = self.state.lock();
            if state.connected {
                return Err(Errno::EINVAL);
            }
            state.hold.clone()
        };
        let hold = match bound {
            Some(hold) => hold,
            None => self.take_port(task, self.inet.nowhere())?,
        };
        if ports::listener_conflicts(&self.inet.net, &hold) {
            return Err(Errno::EADDRINUSE);
        }
        let backlog = usize::try_from(backlog).unwrap_or(MAX_BACKLOG).min(MAX_BACKLOG);
        let mut state = self.state.lock();
        state.local = Some(hold.addr);
        match &mut state.listener {
            Some(listener) => listener.backlog = backlog,
            None => state.listener = Some(Listener { backlog, pending: VecDeque::new() }),
        }
        state.hold = Some(hold.clone());
        drop(state);
        hold.set_receiving(true);
        Ok(())
    }

    fn accept(&self) -> Result<(Arc<dyn Socket>, Vec<u8>)> {
        let mut state = self.state.lock();
        let listener = state.listener.as_mut().ok_or(Errno::EINVAL)?;
        let socket = listener.pending.pop_front().ok_or(Errno::EAGAIN)?;
        let senders = core::mem::take(&mut state.senders);
        drop(state);
        for queue in senders.iter().filter_map(Weak::upgrade) {
            queue.wake(Events::WRITABLE);
        }
        let remote = socket.state.lock().remote;
        Ok((socket, self.inet.encode(remote)))
    }

    fn connect(&self, task: &Arc<Task>, addr: &[u8], nonblocking: bool) -> Result<()> {
        if addr.get(..2).is_some_and(|f| f == AF_UNSPEC.to_ne_bytes()) {
            self.disconnect();
            return Ok(());
        }
        {
            let mut state = self.state.lock();
            if state.listener.is_some() {
                return Err(Errno::EISCONN);
            }
            if state.connecting {
                state.connecting = false;
                return state.error.take().map_or(Ok(()), Err);
            }
            if state.connected {
                return Err(Errno::EISCONN);
            }
        }
        let to = self.inet.destination(addr)?;
        match self.begin_connect(task, to, nonblocking) {
            Ok(()) if nonblocking => {
                self.state.lock().connecting = true;
                Err(Errno::EINPROGRESS)
            }
            Err(Errno::ECONNREFUSED) if nonblocking => {
                let mut state = self.state.lock();
                state.connecting = true;
                state.error = Some(Errno::ECONNREFUSED);
                drop(state);
                self.wake_all();
                Err(Errno::EINPROGRESS)
            }
            other => other,
        }
    }

    fn send(&self, _task: &Task, src: &mut IoSource<'_>, request: &mut SendRequest<'_>) -> Result<usize> {
        if request.flags & msg::OOB != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let peer = {
            let mut state = self.state.lock();
            if let Some(e) = state.error.take() {
                return Err(e);
            }
            if !state.connected || state.shut_write {
                return Err(Errno::EPIPE);
            }
            state.peer.as_ref().and_then(Weak::upgrade)
        };
        let mut total = 0;
        while src.remaining() > 0 {
            let room = self.inet.options.budget.room();
            if room == 0 {
                break;
            }
            let (charge, data) = match charged_bytes(&self.inet.options.budget, src, room.min(CHUNK)) {
                Ok(taken) => taken,
                Err(e) if total == 0 => return Err(e),
                Err(_) => break,
            };
            total += data.len();
            let delivered = peer.as_ref().is_some_and(|peer| {
                let mut state = peer.state.lock();
                if state.released {
                    return false;
                }
                if !state.shut_read {
                    let rest = state.received.push_stream(data, Ancillary::default(), charge);
                    drop(state);
                    drop(rest);
                }
                true
            });
            match &peer {
                Some(peer) if delivered => {
                    peer.queue().wake_up_to(Events::READABLE, 1);
                }
                _ => {
                    // Nobody is there any more: the bytes are answered by a reset, which the next call reports.
                    self.be_reset();
                    return Ok(total);
                }
            }
        }
        if total == 0 && src.remaining() > 0 { Err(Errno::EAGAIN) } else { Ok(total) }
    }

    fn receive(&self, dst: &mut IoDest<'_>, flags: u32) -> Result<Received> {
        if flags & msg::OOB != 0 {
            return Err(Errno::EINVAL);
        }
        if flags & msg::ERRQUEUE != 0 {
            return Err(Errno::EAGAIN);
        }
        let mut done = Vec::new();
        let mut state = self.state.lock();
        if state.listener.is_some() || (!state.connected && state.error.is_none()) {
            return Err(Errno::ENOTCONN);
        }
        let wanted = dst.remaining();
        let result = state.received.read_stream(dst, flags & msg::PEEK != 0, 0, false, &mut done);
        let answer = match result {
            Err(e) => Err(e),
            Ok(r) if r.copied > 0 || (wanted == 0 && !state.received.is_empty()) => Ok(r),
            Ok(_) if state.fin => Ok(Received::default()),
            Ok(_) => match state.error.take() {
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
        let (read, write) = match how {
            0 => (true, false),
            1 => (false, true),
            2 => (true, true),
            _ => return Err(Errno::EINVAL),
        };
        let (peer, listener, hold) = {
            let mut state = self.state.lock();
            if state.listener.is_some() {
                if !read {
                    return Ok(());
                }
                (None, state.listener.take(), state.hold.clone())
            } else if !state.connected || state.reset || state.closed() {
                return Err(Errno::ENOTCONN);
            } else {
                state.shut_read |= read;
                state.shut_write |= write;
                (state.peer.as_ref().and_then(Weak::upgrade), None, None)
            }
        };
        if let Some(hold) = hold {
            hold.set_receiving(false);
        }
        if let Some(listener) = listener {
            for socket in listener.pending {
                socket.release();
            }
        }
        if write && let Some(peer) = peer {
            peer.state.lock().fin = true;
            peer.queue().wake(Events::READABLE | Events::RDHUP | Events::HUP);
        }
        self.wake_all();
        Ok(())
    }

    fn name(&self) -> Result<Vec<u8>> {
        let local = self.state.lock().local;
        Ok(self.inet.encode(local))
    }

    fn peer_name(&self) -> Result<Vec<u8>> {
        let state = self.state.lock();
        let alive = state.connected && !state.reset && !state.closed();
        let remote = state.remote.filter(|_| alive).ok_or(Errno::ENOTCONN)?;
        Ok(self.inet.encode(Some(remote)))
    }

    fn poll(&self) -> Events {
        let state = self.state.lock();
        if let Some(listener) = &state.listener {
            return if listener.pending.is_empty() { Events::empty() } else { Events::READABLE };
        }
        let mut events = Events::empty();
        if state.error.is_some() {
            events |= Events::ERR;
        }
        let read_over = state.fin || state.shut_read;
        if (read_over && state.shut_write) || !state.connected || state.reset {
            events |= Events::HUP;
        }
        if read_over {
            events |= Events::READABLE | Events::RDHUP;
        }
        if !state.received.is_empty() {
            events |= Events::READABLE;
        }
        if state.error.is_some() && !state.connected {
            events |= Events::READABLE | Events::RDHUP;
        }
        if state.shut_write || !state.connected || self.inet.options.budget.writable() {
            events |= Events::WRITABLE;
        }
        events
    }

    fn get_option(&self, _task: &Task, level: i32, name: i32) -> Result<Vec<u8>> {
        const TCP_INFO: i32 = 11;
        const TCP_MAXSEG: i32 = 2;
        /// What the loopback interface's MTU leaves.
        const LOOPBACK_MSS: i32 = 65483;
        if (level, name) == (ip_options::TCP, TCP_MAXSEG) && self.state.lock().connected {
            return Ok(LOOPBACK_MSS.to_ne_bytes().to_vec());
        }
        if (level, name) == (ip_options::TCP, TCP_INFO) {
            let state = self.state.lock();
            let number: u8 = if state.listener.is_some() {
                10
            } else if !state.connected || state.reset {
                7
            } else if state.fin {
                8
            } else {
                1
            };
            let mut info = vec![0; 104];
            if let Some(first) = info.first_mut() {
                *first = number;
            }
            return Ok(info);
        }
        self.inet.ip.get_bytes(level, name)
    }

    fn set_option(&self, _task: &Task, level: i32, name: i32, value: &[u8]) -> Result<()> {
        self.inet.set_option(level, name, value, || self.state.lock().hold.is_some())
    }

    fn readable_bytes(&self) -> Result<usize> {
        let state = self.state.lock();
        if state.listener.is_some() { Err(Errno::EINVAL) } else { Ok(state.received.bytes()) }
    }

    fn unsent_bytes(&self) -> usize {
        self.inet.options.budget.used()
    }

    fn is_listening(&self) -> bool {
        self.state.lock().listener.is_some()
    }

    fn take_error(&self) -> Option<Errno> {
        self.state.lock().error.take()
    }

    fn release(&self) {
        let (unread, peer, listener, hold, segments, senders) = {
            let mut state = self.state.lock();
            state.released = true;
            (
                !state.received.is_empty(),
                state.peer.take(),
                state.listener.take(),
                state.hold.take(),
                state.received.clear(),
                core::mem::take(&mut state.senders),
            )
        };
        if listener.is_some()
            && let Some(hold) = &hold
        {
            hold.set_receiving(false);
        }
        if let Some(peer) = peer.and_then(|p| p.upgrade()) {
            if unread || self.inet.options.lingers_zero() {
                peer.be_reset();
            } else {
                peer.state.lock().fin = true;
                peer.queue().wake(Events::READABLE | Events::RDHUP | Events::HUP);
            }
        }
        if let Some(listener) = listener {
            for socket in listener.pending {
                if let Some(client) = socket.peer() {
                    client.be_reset();
                }
                socket.release();
            }
        }
        drop(hold);
        drop(segments);
        for queue in senders.iter().filter_map(Weak::upgrade) {
            queue.wake(Events::WRITABLE);
        }
        self.wake_all();
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}
