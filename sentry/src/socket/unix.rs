//! AF_UNIX sockets (unix(7)): connections, datagrams, sequenced packets. Owns queues and connections; names are in `unix_name`.
use core::sync::atomic::Ordering;
use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use super::message::{Ancillary, CHUNK, Creds, ReceiveQueue, Received, Segment, charged_bytes};
use super::options::{Options, SOL_SOCKET};
use super::unix_name::{self, Binding};
use super::{AF_UNIX, AF_UNSPEC, SendRequest, Socket, SocketType, msg};
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::mm::{IoDest, IoSource};
use crate::ns::net::NetNamespace;
use crate::platform::Platform;
use crate::task::Task;
use crate::{Errno, Result};

/// net.unix.max_dgram_qlen.
const MAX_DATAGRAMS: usize = 10;
/// net.core.somaxconn.
const MAX_BACKLOG: usize = 4096;

struct Listener {
    backlog: usize,
    pending: VecDeque<Arc<UnixSocket>>,
    creds: Creds,
}

#[derive(Default)]
struct State {
    received: ReceiveQueue,
    binding: Option<Arc<Binding>>,
    /// The other end, or where datagrams go by default.
    peer: Option<Weak<UnixSocket>>,
    /// The peer's address when the connection was made.
    peer_address: Option<Arc<[u8]>>,
    peer_creds: Option<Creds>,
    listener: Option<Listener>,
    shut_read: bool,
    shut_write: bool,
    error: Option<Errno>,
    released: bool,
    /// Who waits for room in this socket's queue of datagrams or connections.
    senders: Vec<Weak<WaitQueue>>,
}

impl State {
    fn address(&self) -> Option<Arc<[u8]>> {
        self.binding.as_ref().map(|b| b.address.clone())
    }

    fn wait_for_room(&mut self, queue: &Arc<WaitQueue>) {
        self.senders.retain(|w| w.strong_count() > 0);
        if !self.senders.iter().any(|w| core::ptr::eq(w.as_ptr(), Arc::as_ptr(queue))) {
            self.senders.push(Arc::downgrade(queue));
        }
    }
}

fn wake_all(queues: Vec<Weak<WaitQueue>>) {
    for queue in queues.iter().filter_map(Weak::upgrade) {
        queue.wake(Events::WRITABLE);
    }
}

/// An AF_UNIX socket.
pub struct UnixSocket {
    this: Weak<UnixSocket>,
    options: Options,
    /// Where its abstract names are.
    net: Arc<NetNamespace>,
    state: Mutex<State>,
}

impl UnixSocket {
    /// An unconnected socket.
    pub fn new(platform: &Arc<dyn Platform>, net: Arc<NetNamespace>, kind: SocketType) -> Arc<UnixSocket> {
        Arc::new_cyclic(|this| UnixSocket {
            this: this.clone(),
            options: Options::new(platform, AF_UNIX, kind, 0),
            net,
            state: Mutex::new(Rank::Socket, State::default()),
        })
    }

    /// socketpair(2).
    pub fn pair(task: &Task, kind: SocketType) -> (Arc<UnixSocket>, Arc<UnixSocket>) {
        let platform = &task.kernel().platform;
        let [a, b] = [(); 2].map(|()| UnixSocket::new(platform, task.net(), kind));
        for (one, other) in [(&a, &b), (&b, &a)] {
            let mut state = one.state.lock();
            state.peer = Some(Arc::downgrade(other));
            state.peer_creds = Some(Creds::of(task));
        }
        (a, b)
    }

    /// The network namespace it was made in.
    pub(super) fn net(&self) -> &Arc<NetNamespace> {
        &self.net
    }

    /// The descriptions that messages waiting here carry, by identity.
    pub fn carried_files(&self) -> Vec<usize> {
        self.state.lock().received.carried()
    }

    /// Takes every waiting message out.
    pub fn take_queue(&self) -> VecDeque<Segment> {
        self.state.lock().received.clear()
    }

    /// SOCK_*.
    pub fn kind(&self) -> SocketType {
        self.options.kind
    }

    fn is_datagram(&self) -> bool {
        self.options.kind == SocketType::Datagram
    }

    fn queue(&self) -> &Arc<WaitQueue> {
        &self.options.queue
    }

    fn passes_credentials(&self) -> bool {
        self.options.pass_credentials.load(Ordering::Relaxed)
    }

    fn autobind_if_needed(&self, task: &Task) -> Result<()> {
        if self.passes_credentials() && self.state.lock().binding.is_none() {
            let binding = Arc::new(unix_name::autobind(task, &self.this)?);
            self.state.lock().binding.get_or_insert(binding);
        }
        Ok(())
    }

    fn connect_datagram(&self, task: &Task, addr: &[u8]) -> Result<()> {
        if addr.get(..2).is_some_and(|f| f == AF_UNSPEC.to_ne_bytes()) {
            let mut state = self.state.lock();
            state.peer = None;
            state.peer_address = None;
            return Ok(());
        }
        self.autobind_if_needed(task)?;
        let peer = unix_name::find(task, &self.net, addr, self.options.kind)?;
        if peer.options.kind != self.options.kind {
            return Err(Errno::EPROTOTYPE);
        }
        let (address, taken) = {
            let state = peer.state.lock();
            (state.address(), state.peer.clone())
        };
        if taken.is_some_and(|t| t.strong_count() > 0 && !Weak::ptr_eq(&t, &self.this)) {
            return Err(Errno::EPERM);
        }
        let mut state = self.state.lock();
        state.peer = Some(Arc::downgrade(&peer));
        state.peer_address = address;
        Ok(())
    }

    fn connect_stream(&self, task: &Task, addr: &[u8], nonblocking: bool) -> Result<()> {
        self.autobind_if_needed(task)?;
        let (connected, listening, address) = {
            let state = self.state.lock();
            (state.peer.is_some(), state.listener.is_some(), state.address())
        };
        let target = unix_name::find(task, &self.net, addr, self.options.kind)?;
        if target.options.kind != self.options.kind {
            return Err(Errno::EPROTOTYPE);
        }
        let server = UnixSocket::new(self.options.budget.platform(), self.net.clone(), self.options.kind);
        server.options.charge_unaccepted()?;
        server.options.inherit(&target.options);
        {
            let mut listening_state = target.state.lock();
            let queue = self.queue().clone();
            if listening_state.released || listening_state.shut_read {
                return Err(Errno::ECONNREFUSED);
            }
            let binding = listening_state.binding.clone();
            let Some(listener) = &mut listening_state.listener else { return Err(Errno::ECONNREFUSED) };
            if listener.pending.len() > listener.backlog {
                if !nonblocking {
                    listening_state.wait_for_room(&queue);
                }
                return Err(Errno::EAGAIN);
            }
            if connected {
                return Err(Errno::EISCONN);
            }
            if listening {
                return Err(Errno::EINVAL);
            }
            let listener_creds = listener.creds.clone();
            {
                let mut state = server.state.lock_nested();
                state.peer = Some(self.this.clone());
                state.peer_address = address;
                state.peer_creds = Some(Creds::of(task));
                state.binding.clone_from(&binding);
            }
            {
                let mut state = self.state.lock_nested();
                state.peer = Some(Arc::downgrade(&server));
                state.peer_address = binding.map(|b| b.address.clone());
                state.peer_creds = Some(listener_creds);
            }
            if let Some(listener) = &mut listening_state.listener {
                listener.pending.push_back(server);
            }
        }
        // One connection is for one of those who wait in accept(2).
        target.queue().wake_up_to(Events::READABLE, 1);
        self.queue().wake(Events::WRITABLE);
        Ok(())
    }

    /// The connected peer. ENOTCONN; EPIPE once either side has shut this direction.
    fn stream_peer(&self) -> Result<Arc<UnixSocket>> {
        let mut state = self.state.lock();
        if let Some(e) = state.error.take() {
            return Err(e);
        }
        if state.shut_write {
            return Err(Errno::EPIPE);
        }
        let peer = state.peer.as_ref().ok_or(Errno::ENOTCONN)?;
        peer.upgrade().ok_or(Errno::EPIPE)
    }

    fn credentials_for(&self, peer: &UnixSocket, task: &Task, request: &SendRequest<'_>) -> Option<Creds> {
        if request.creds.is_some() {
            return request.creds.clone();
        }
        (self.passes_credentials() || peer.passes_credentials()).then(|| Creds::real_of(task))
    }

    fn send_stream(&self, task: &Task, src: &mut IoSource<'_>, request: &mut SendRequest<'_>) -> Result<usize> {
        if request.to.is_some() {
            let connected = self.state.lock().peer.is_some();
            return Err(if connected { Errno::EISCONN } else { Errno::EOPNOTSUPP });
        }
        let peer = self.stream_peer()?;
        let creds = self.credentials_for(&peer, task, request);
        let mut total = 0;
        while src.remaining() > 0 {
            let room = self.options.budget.room();
            if room == 0 {
                break;
            }
            let most = room.min(CHUNK);
            let (charge, data) = match charged_bytes(&self.options.budget, src, most) {
                Ok(taken) => taken,
                Err(e) if total == 0 => return Err(e),
                Err(_) => break,
            };
            let len = data.len();
            let ancillary = Ancillary { source: self.source(), creds: creds.clone(), rights: request.rights.take() };
            {
                let mut state = peer.state.lock();
                if state.released || state.shut_read {
                    drop(state);
                    return if total > 0 { Ok(total) } else { Err(Errno::EPIPE) };
                }
                let rest = state.received.push_stream(data, ancillary, charge);
                drop(state);
                drop(rest);
            }
            total += len;
            peer.queue().wake_up_to(Events::READABLE, 1);
        }
        if total == 0 && src.remaining() > 0 { Err(Errno::EAGAIN) } else { Ok(total) }
    }

    fn source(&self) -> Option<Arc<[u8]>> {
        self.state.lock().address()
    }

    fn send_message(&self, task: &Task, src: &mut IoSource<'_>, request: &mut SendRequest<'_>) -> Result<usize> {
        let peer = match request.to {
            Some(to) if self.is_datagram() => {
                self.autobind_if_needed(task)?;
                let peer = unix_name::find(task, &self.net, to, self.options.kind)?;
                if !peer.is_datagram() {
                    return Err(Errno::EPROTOTYPE);
                }
                peer
            }
            Some(_) => {
                let connected = self.state.lock().peer.is_some();
                return Err(if connected { Errno::EISCONN } else { Errno::EOPNOTSUPP });
            }
            None if self.is_datagram() => {
                let mut state = self.state.lock();
                if state.shut_write {
                    return Err(Errno::EPIPE);
                }
                let peer = state.peer.as_ref().ok_or(Errno::ENOTCONN)?;
                let Some(peer) = peer.upgrade() else {
                    state.peer = None;
                    return Err(Errno::ECONNREFUSED);
                };
                peer
            }
            None => self.stream_peer()?,
        };
        let len = src.remaining();
        if len > self.options.budget.limit().saturating_sub(32) {
            return Err(Errno::EMSGSIZE);
        }
        if self.options.budget.room() < len.max(1) {
            return Err(Errno::EAGAIN);
        }
        {
            let mut state = peer.state.lock();
            if state.released {
                return Err(if self.is_datagram() { Errno::ECONNREFUSED } else { Errno::EPIPE });
            }
            if state.shut_read {
                return Err(Errno::EPIPE);
            }
            if self.is_datagram() {
                let foreign = state.peer.as_ref().is_some_and(|p| !Weak::ptr_eq(p, &self.this));
                if foreign {
                    return Err(Errno::EPERM);
                }
                // Two sockets connected to each other are bounded by SO_SNDBUF alone.
                let mutual = state.peer.is_some();
                if !mutual && state.received.len() > MAX_DATAGRAMS && !core::ptr::eq(&raw const *peer, self) {
                    state.wait_for_room(self.queue());
                    return Err(Errno::EAGAIN);
                }
            }
        }
        let (charge, data) = charged_bytes(&self.options.budget, src, len)?;
        if data.len() < len {
            return Err(Errno::EFAULT);
        }
        let creds = self.credentials_for(&peer, task, request);
        let ancillary = Ancillary { source: self.source(), creds, rights: request.rights.take() };
        let segment = Segment::new(data, ancillary, charge);
        let refused = {
            let mut state = peer.state.lock();
            if state.released {
                Some(segment)
            } else {
                state.received.push(segment);
                None
            }
        };
        if refused.is_some() {
            return Err(if self.is_datagram() { Errno::ECONNREFUSED } else { Errno::EPIPE });
        }
        peer.queue().wake_up_to(Events::READABLE, 1);
        Ok(len)
    }

    /// The connected end that is to be told of a shutdown.
    fn connected_peer(&self) -> Option<Arc<UnixSocket>> {
        if self.is_datagram() {
            return None;
        }
        self.state.lock().peer.as_ref().and_then(Weak::upgrade)
    }
}

impl Socket for UnixSocket {
    fn options(&self) -> &Options {
        &self.options
    }

    fn bind(&self, task: &Arc<Task>, addr: &[u8]) -> Result<()> {
        unix_name::parse(addr)?;
        if self.state.lock().binding.is_some() {
            // A bound socket takes no second name; autobind of a bound one is a success.
            return if addr.len() == 2 { Ok(()) } else { Err(Errno::EINVAL) };
        }
        let binding = Arc::new(unix_name::bind(task, &self.this, addr)?);
        let mut state = self.state.lock();
        if state.binding.is_some() {
            drop(state);
            return Err(Errno::EINVAL);
        }
        state.binding = Some(binding);
        Ok(())
    }

    fn listen(&self, task: &Arc<Task>, backlog: i32) -> Result<()> {
        if self.is_datagram() {
            return Err(Errno::EOPNOTSUPP);
        }
        let backlog = usize::try_from(backlog).unwrap_or(MAX_BACKLOG).min(MAX_BACKLOG);
        let mut state = self.state.lock();
        if state.binding.is_none() || state.peer.is_some() {
            return Err(Errno::EINVAL);
        }
        let creds = Creds::of(task);
        match &mut state.listener {
            Some(listener) => {
                listener.backlog = backlog;
                listener.creds = creds;
            }
            None => state.listener = Some(Listener { backlog, pending: VecDeque::new(), creds }),
        }
        let senders = core::mem::take(&mut state.senders);
        drop(state);
        wake_all(senders);
        Ok(())
    }

    fn accept(&self) -> Result<(Arc<dyn Socket>, Vec<u8>)> {
        if self.is_datagram() {
            return Err(Errno::EOPNOTSUPP);
        }
        let mut state = self.state.lock();
        let shut = state.shut_read;
        let listener = state.listener.as_mut().ok_or(Errno::EINVAL)?;
        let Some(socket) = listener.pending.pop_front() else {
            return Err(if shut { Errno::EINVAL } else { Errno::EAGAIN });
        };
        let senders = core::mem::take(&mut state.senders);
        drop(state);
        wake_all(senders);
        let address = socket.state.lock().peer_address.clone();
        Ok((socket, address.map_or_else(unix_name::unnamed, |a| a.to_vec())))
    }

    fn connect(&self, task: &Arc<Task>, addr: &[u8], nonblocking: bool) -> Result<()> {
        if self.is_datagram() {
            self.connect_datagram(task, addr)
        } else {
            self.connect_stream(task, addr, nonblocking)
        }
    }

    fn send(&self, task: &Task, src: &mut IoSource<'_>, request: &mut SendRequest<'_>) -> Result<usize> {
        if request.flags & msg::OOB != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        match self.options.kind {
            SocketType::Stream => self.send_stream(task, src, request),
            _ => self.send_message(task, src, request),
        }
    }

    fn receive(&self, dst: &mut IoDest<'_>, flags: u32) -> Result<Received> {
        if flags & msg::OOB != 0 {
            return Err(if self.options.kind == SocketType::Stream { Errno::EINVAL } else { Errno::EOPNOTSUPP });
        }
        let peek = flags & msg::PEEK != 0;
        let mut done = Vec::new();
        let mut state = self.state.lock();
        let unconnected = state.peer.is_none();
        let result = match self.options.kind {
            SocketType::Stream if unconnected => return Err(Errno::EINVAL),
            SocketType::SeqPacket if unconnected => return Err(Errno::ENOTCONN),
            SocketType::Stream => {
                let split = self.passes_credentials();
                let wanted = dst.remaining();
                state.received.read_stream(dst, peek, 0, split, &mut done).map(|r| {
                    let got = r.copied > 0 || (wanted == 0 && !state.received.is_empty());
                    got.then_some(r)
                })
            }
            _ => state.received.read_message(dst, peek, &mut done),
        };
        let answer = match result {
            Err(e) => Err(e),
            Ok(Some(received)) => Ok(received),
            Ok(None) => {
                if let Some(e) = state.error.take() {
                    Err(e)
                } else if state.shut_read {
                    Ok(Received::default())
                } else {
                    Err(Errno::EAGAIN)
                }
            }
        };
        let senders = if done.is_empty() { Vec::new() } else { core::mem::take(&mut state.senders) };
        drop(state);
        drop(done);
        wake_all(senders);
        answer
    }

    fn shutdown(&self, how: u32) -> Result<()> {
        let (read, write) = match how {
            0 => (true, false),
            1 => (false, true),
            2 => (true, true),
            _ => return Err(Errno::EINVAL),
        };
        {
            let mut state = self.state.lock();
            state.shut_read |= read;
            state.shut_write |= write;
        }
        if let Some(peer) = self.connected_peer() {
            {
                let mut state = peer.state.lock();
                state.shut_read |= write;
                state.shut_write |= read;
            }
            peer.queue().wake(Events::READABLE | Events::WRITABLE | Events::RDHUP | Events::HUP);
        }
        self.queue().wake(Events::READABLE | Events::WRITABLE | Events::RDHUP | Events::HUP);
        Ok(())
    }

    fn name(&self) -> Result<Vec<u8>> {
        let address = self.state.lock().address();
        Ok(address.map_or_else(unix_name::unnamed, |a| a.to_vec()))
    }

    fn peer_name(&self) -> Result<Vec<u8>> {
        let state = self.state.lock();
        if state.peer.is_none() {
            return Err(Errno::ENOTCONN);
        }
        Ok(state.peer_address.as_ref().map_or_else(unix_name::unnamed, |a| a.to_vec()))
    }

    fn poll(&self) -> Events {
        let mut events = Events::empty();
        let state = self.state.lock();
        if state.error.is_some() {
            events |= Events::ERR;
        }
        if state.shut_read && state.shut_write {
            events |= Events::HUP;
        }
        if state.shut_read {
            events |= Events::RDHUP | Events::READABLE;
        }
        if !state.received.is_empty() || state.listener.as_ref().is_some_and(|l| !l.pending.is_empty()) {
            events |= Events::READABLE;
        }
        if !self.is_datagram() && state.peer.is_none() && state.listener.is_none() {
            events |= Events::HUP;
        }
        let peer = state.peer.clone();
        drop(state);
        let mut writable = self.options.budget.writable();
        if writable
            && self.is_datagram()
            && let Some(peer) = peer.and_then(|p| p.upgrade())
            && !core::ptr::eq(&raw const *peer, self)
        {
            let mut state = peer.state.lock();
            let back = state.peer.as_ref().is_some_and(|p| Weak::ptr_eq(p, &self.this));
            if !back && state.received.len() > MAX_DATAGRAMS {
                state.wait_for_room(self.queue());
                writable = false;
            }
        }
        if writable {
            events |= Events::WRITABLE | Events::WRBAND;
        }
        events
    }

    fn get_option(&self, _task: &Task, level: i32, _name: i32) -> Result<Vec<u8>> {
        Err(if level == SOL_SOCKET { Errno::ENOPROTOOPT } else { Errno::EOPNOTSUPP })
    }

    fn peer_credentials(&self) -> Option<Creds> {
        self.state.lock().peer_creds.clone()
    }

    fn set_option(&self, _task: &Task, level: i32, _name: i32, _value: &[u8]) -> Result<()> {
        Err(if level == SOL_SOCKET { Errno::ENOPROTOOPT } else { Errno::EOPNOTSUPP })
    }

    fn readable_bytes(&self) -> Result<usize> {
        let state = self.state.lock();
        if state.listener.is_some() {
            return Err(Errno::EINVAL);
        }
        Ok(if self.options.kind == SocketType::Stream { state.received.bytes() } else { state.received.first_len() })
    }

    fn unsent_bytes(&self) -> usize {
        self.options.budget.used()
    }

    fn is_listening(&self) -> bool {
        self.state.lock().listener.is_some()
    }

    fn take_error(&self) -> Option<Errno> {
        self.state.lock().error.take()
    }

    fn release(&self) {
        let peer = self.connected_peer();
        let (unread, listener, binding, segments, senders) = {
            let mut state = self.state.lock();
            state.released = true;
            state.shut_read = true;
            state.shut_write = true;
            let unread = !state.received.is_empty();
            (
                unread,
                state.listener.take(),
                state.binding.take(),
                state.received.clear(),
                core::mem::take(&mut state.senders),
            )
        };
        if let Some(peer) = peer {
            {
                let mut state = peer.state.lock();
                state.shut_read = true;
                state.shut_write = true;
                if unread {
                    state.error = Some(Errno::ECONNRESET);
                }
            }
            peer.queue().wake(Events::all());
        }
        if let Some(listener) = listener {
            for socket in listener.pending {
                // The client sees its connection reset: nobody will ever accept it.
                if let Some(client) = socket.connected_peer() {
                    client.state.lock().error = Some(Errno::ECONNRESET);
                }
                socket.release();
            }
        }
        drop(segments);
        drop(binding);
        wake_all(senders);
        self.queue().wake(Events::all());
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}
