//! Sockets (socket(7)). Owns families inside the sandbox; the outside network is the platform's choice.
pub mod inet;
pub mod message;
pub mod netlink;
pub mod options;
pub mod unix;
pub mod unix_gc;
pub mod unix_name;

use std::any::Any;
use std::sync::Arc;

use guest_abi::types::Stat;

use crate::event::{Events, WaitQueue};
use crate::fs::anon::{AnonInode, DEV_SOCKFS};
use crate::mm::{IoDest, IoSource};
use crate::platform::host::AttrChange;
use crate::task::Task;
use crate::vfs::file::Caller;
use crate::vfs::{File, FileOps, OpenFlags};
use crate::{Errno, Result};
use message::{Creds, InFlight, Received};
use options::Options;

/// AF_UNSPEC.
pub const AF_UNSPEC: u16 = 0;
/// AF_UNIX.
pub const AF_UNIX: u16 = 1;
/// AF_INET.
pub const AF_INET: u16 = 2;
/// AF_INET6.
pub const AF_INET6: u16 = 10;
/// AF_NETLINK.
pub const AF_NETLINK: u16 = 16;

/// SOCK_* without flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum SocketType {
    Stream = 1,
    Datagram = 2,
    Raw = 3,
    SeqPacket = 5,
}

impl SocketType {
    /// From the low bits of socket(2)'s type.
    pub fn from_raw(raw: u32) -> Option<SocketType> {
        Some(match raw {
            1 => SocketType::Stream,
            2 => SocketType::Datagram,
            3 => SocketType::Raw,
            5 => SocketType::SeqPacket,
            _ => return None,
        })
    }
}

/// MSG_* of send and receive.
#[allow(missing_docs)]
pub mod msg {
    pub const OOB: u32 = 0x1;
    pub const PEEK: u32 = 0x2;
    pub const DONTROUTE: u32 = 0x4;
    pub const CTRUNC: u32 = 0x8;
    pub const TRUNC: u32 = 0x20;
    pub const DONTWAIT: u32 = 0x40;
    pub const EOR: u32 = 0x80;
    pub const WAITALL: u32 = 0x100;
    pub const ERRQUEUE: u32 = 0x2000;
    pub const NOSIGNAL: u32 = 0x4000;
    pub const MORE: u32 = 0x8000;
    pub const WAITFORONE: u32 = 0x10000;
    pub const CMSG_CLOEXEC: u32 = 0x4000_0000;
}

/// What a send carries besides its bytes.
#[derive(Default)]
pub struct SendRequest<'a> {
    /// The destination, a sockaddr.
    pub to: Option<&'a [u8]>,
    /// Who sends; the object adds what the address family does by itself.
    pub creds: Option<Creds>,
    /// SCM_RIGHTS.
    pub rights: Option<Arc<InFlight>>,
    /// MSG_*.
    pub flags: u32,
}

/// What a socket of any family can do. No operation blocks: one that would gives EAGAIN, and the system call waits on the socket's
/// queue and tries again.
#[allow(unused_variables)]
pub trait Socket: Send + Sync + Any {
    /// Options and the queue.
    fn options(&self) -> &Options;
    /// bind(2).
    fn bind(&self, task: &Arc<Task>, addr: &[u8]) -> Result<()>;
    /// listen(2).
    fn listen(&self, task: &Arc<Task>, backlog: i32) -> Result<()> {
        Err(Errno::EOPNOTSUPP)
    }
    /// accept(2): the connected socket and its peer's address.
    fn accept(&self) -> Result<(Arc<dyn Socket>, Vec<u8>)> {
        Err(Errno::EOPNOTSUPP)
    }
    /// connect(2). EAGAIN while the listener has no room.
    fn connect(&self, task: &Arc<Task>, addr: &[u8], nonblocking: bool) -> Result<()>;
    /// Sends what fits. A message is sent whole or not at all; of a stream perhaps a part. The rights go with the first byte and
    /// are taken from the request.
    fn send(&self, task: &Task, src: &mut IoSource<'_>, request: &mut SendRequest<'_>) -> Result<usize>;
    /// Receives. `skip` bytes of a stream are passed over (MSG_PEEK with MSG_WAITALL).
    fn receive(&self, dst: &mut IoDest<'_>, flags: u32) -> Result<Received>;
    /// shutdown(2): 0 reading, 1 writing, 2 both.
    fn shutdown(&self, how: u32) -> Result<()>;
    /// getsockname(2).
    fn name(&self) -> Result<Vec<u8>>;
    /// getpeername(2).
    fn peer_name(&self) -> Result<Vec<u8>>;
    /// Readiness.
    fn poll(&self) -> Events;
    /// An option of the family; ENOPROTOOPT by default.
    fn get_option(&self, task: &Task, level: i32, name: i32) -> Result<Vec<u8>> {
        Err(Errno::ENOPROTOOPT)
    }
    /// Sets an option of the family.
    fn set_option(&self, task: &Task, level: i32, name: i32, value: &[u8]) -> Result<()> {
        Err(Errno::ENOPROTOOPT)
    }
    /// Who the peer is: SO_PEERCRED, SO_PEERGROUPS.
    fn peer_credentials(&self) -> Option<Creds> {
        None
    }
    /// FIONREAD.
    fn readable_bytes(&self) -> Result<usize>;
    /// TIOCOUTQ.
    fn unsent_bytes(&self) -> usize {
        0
    }
    /// SO_ACCEPTCONN.
    fn is_listening(&self) -> bool {
        false
    }
    /// Takes the pending error (SO_ERROR).
    fn take_error(&self) -> Option<Errno> {
        None
    }
    /// The last descriptor is gone.
    fn release(&self);
    /// For downcasts, as the family's own type.
    fn as_any(&self) -> &dyn Any;
    /// For downcasts of a shared handle.
    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

/// Blocking writes up to this length are taken whole.
const WHOLE_WRITE: usize = 4096;

/// A socket as an open file.
pub struct SocketFile {
    socket: Arc<dyn Socket>,
    inode: AnonInode,
}

impl SocketFile {
    /// A description of `socket`.
    pub fn open(task: &Task, socket: Arc<dyn Socket>, nonblocking: bool) -> Arc<File> {
        let inode = AnonInode::new(task, DEV_SOCKFS, 0o140_777);
        let flags = if nonblocking { OpenFlags::RDWR | OpenFlags::NONBLOCK } else { OpenFlags::RDWR };
        File::new(Arc::new(SocketFile { socket, inode }), None, flags)
    }

    /// The socket.
    pub fn socket(&self) -> &Arc<dyn Socket> {
        &self.socket
    }
}

/// The socket behind a description. ENOTSOCK.
pub fn socket_of(file: &File) -> Result<&Arc<dyn Socket>> {
    file.downcast::<SocketFile>().map(SocketFile::socket).ok_or(Errno::ENOTSOCK)
}

fn task_of(caller: &dyn Caller) -> Result<&Task> {
    caller.as_any().downcast_ref::<Task>().ok_or(Errno::EINVAL)
}

impl FileOps for SocketFile {
    fn read(&self, _file: &File, dst: &mut IoDest<'_>, _pos: u64) -> Result<usize> {
        let received = self.socket.receive(dst, 0)?;
        Ok(received.copied)
    }

    fn write_as(&self, file: &File, caller: &dyn Caller, src: &mut IoSource<'_>, _pos: u64) -> Result<usize> {
        let task = task_of(caller)?;
        // A short blocking write is not split: its first attempt could not remember how far it came.
        let room = self.socket.options().budget.room();
        if !file.nonblocking() && self.writes_fully() && src.remaining() <= WHOLE_WRITE && room < src.remaining() {
            return Err(Errno::EAGAIN);
        }
        self.socket.send(task, src, &mut SendRequest::default())
    }

    fn io_timeout(&self, write: bool) -> Option<u64> {
        let options = self.socket.options();
        let ns = if write { options.send_timeout() } else { options.receive_timeout() };
        (ns > 0).then_some(ns)
    }

    fn writes_fully(&self) -> bool {
        self.socket.options().kind == SocketType::Stream
    }

    fn poll(&self, _file: &File) -> Events {
        self.socket.poll()
    }

    fn wait_queue(&self) -> Option<Arc<WaitQueue>> {
        Some(self.socket.options().queue.clone())
    }

    fn ioctl(&self, _file: &File, caller: &dyn Caller, request: u32, arg: u64) -> Result<u64> {
        use linux_raw_sys::ioctl::{FIONREAD, TIOCOUTQ};
        let count = match request {
            FIONREAD => self.socket.readable_bytes()?,
            TIOCOUTQ => self.socket.unsent_bytes(),
            _ => return options::interface_ioctl(task_of(caller)?, request, arg),
        };
        crate::fs::anon::put_user(caller, arg, &i32::try_from(count).unwrap_or(i32::MAX))
    }

    fn stat(&self) -> Option<Result<Stat>> {
        Some(Ok(self.inode.stat()))
    }

    fn set_attr(&self, change: &AttrChange) -> Option<Result<()>> {
        self.inode.set_attr(change);
        Some(Ok(()))
    }

    fn release(&self, _file: &File) {
        self.socket.release();
    }

    fn proc_name(&self) -> Vec<u8> {
        format!("socket:[{}]", self.inode.ino).into_bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// socket(2) without its flags. EAFNOSUPPORT, ESOCKTNOSUPPORT, EPROTONOSUPPORT.
pub fn create(task: &Arc<Task>, domain: i32, kind: u32, protocol: i32) -> Result<Arc<dyn Socket>> {
    match u16::try_from(domain).map_err(|_| Errno::EAFNOSUPPORT)? {
        AF_UNIX => Ok(unix::UnixSocket::new(&task.kernel().platform, task.net(), unix_kind(kind, protocol)?)),
        domain @ (AF_INET | AF_INET6) => inet::create(task, domain, kind, protocol),
        AF_NETLINK => netlink::create(task, kind, protocol),
        _ if kind > 10 => Err(Errno::EINVAL),
        _ => Err(Errno::EAFNOSUPPORT),
    }
}

/// socketpair(2) without its flags. EOPNOTSUPP where the family has no pairs.
pub fn create_pair(
    task: &Arc<Task>,
    domain: i32,
    kind: u32,
    protocol: i32,
) -> Result<(Arc<dyn Socket>, Arc<dyn Socket>)> {
    if domain != i32::from(AF_UNIX) {
        create(task, domain, kind, protocol)?;
        return Err(Errno::EOPNOTSUPP);
    }
    let (a, b) = unix::UnixSocket::pair(task, unix_kind(kind, protocol)?);
    Ok((a, b))
}

fn unix_kind(kind: u32, protocol: i32) -> Result<SocketType> {
    if kind > 10 {
        return Err(Errno::EINVAL);
    }
    if protocol != 0 && protocol != i32::from(AF_UNIX) {
        return Err(Errno::EPROTONOSUPPORT);
    }
    match SocketType::from_raw(kind) {
        // As Linux does, for the sake of old programs.
        Some(SocketType::Raw) => Ok(SocketType::Datagram),
        Some(kind) => Ok(kind),
        None => Err(Errno::ESOCKTNOSUPPORT),
    }
}
