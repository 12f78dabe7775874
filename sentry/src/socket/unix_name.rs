//! Names of AF_UNIX sockets (unix(7)): their form, and the sockets bound to them. Owns the tie between name and socket; never
//! the files (the VFS's).
use std::any::Any;
use std::sync::{Arc, Weak};

use super::unix::UnixSocket;
use super::{AF_UNIX, SocketType};
use crate::lock::{Mutex, Rank};
use crate::ns::net::NetNamespace;
use crate::task::Task;
use crate::vfs::attr::{Access, permission};
use crate::vfs::{InodeKind, Lookup, LookupFlags, PathRef};
use crate::{Errno, Result};

/// sizeof(sun_path).
const PATH_LEN: usize = 108;

/// What a sockaddr_un says.
pub enum Name<'a> {
    /// No name: autobind, or the unnamed address.
    Unnamed,
    /// A path.
    Path(&'a [u8]),
    /// An abstract name, without the leading NUL.
    Abstract(&'a [u8]),
}

/// Reads a sockaddr_un. EINVAL.
pub fn parse(addr: &[u8]) -> Result<Name<'_>> {
    let (family, name) = addr.split_at_checked(2).ok_or(Errno::EINVAL)?;
    if family != AF_UNIX.to_ne_bytes() || name.len() > PATH_LEN {
        return Err(Errno::EINVAL);
    }
    Ok(match name {
        [] => Name::Unnamed,
        [0, rest @ ..] => Name::Abstract(rest),
        path => Name::Path(path.split(|&b| b == 0).next().unwrap_or_default()),
    })
}

/// The sockaddr_un of a path as getsockname(2) shows it: with its NUL.
pub fn path_address(path: &[u8]) -> Arc<[u8]> {
    let mut out = AF_UNIX.to_ne_bytes().to_vec();
    out.extend_from_slice(path);
    out.push(0);
    out.into()
}

fn abstract_address(name: &[u8]) -> Arc<[u8]> {
    let mut out = AF_UNIX.to_ne_bytes().to_vec();
    out.push(0);
    out.extend_from_slice(name);
    out.into()
}

/// The address of a socket without a name.
pub fn unnamed() -> Vec<u8> {
    AF_UNIX.to_ne_bytes().to_vec()
}

/// A socket inode's tie to what is bound there.
struct Slot {
    socket: Mutex<Weak<UnixSocket>>,
}

impl Default for Slot {
    fn default() -> Self {
        Slot { socket: Mutex::new(Rank::Leaf, Weak::new()) }
    }
}

/// A name held by a socket; given back on drop, as far as an abstract name is concerned (a path stays).
pub struct Binding {
    /// The sockaddr_un.
    pub address: Arc<[u8]>,
    place: Place,
}

enum Place {
    Abstract(Arc<NetNamespace>, Vec<u8>, Weak<UnixSocket>),
    /// Kept so that the inode, and with it the tie, lives as long as the socket.
    Path {
        _at: PathRef,
    },
}

impl Drop for Binding {
    fn drop(&mut self) {
        if let Place::Abstract(net, name, socket) = &self.place {
            // Another socket may hold the name by now: this binding also belongs to the connections of a closed listener.
            let mut names = net.abstract_names.lock();
            let own = names.get(name).is_some_and(|w| core::ptr::addr_eq(w.as_ptr(), socket.as_ptr()));
            let old = if own { names.remove(name) } else { None };
            drop(names);
            drop(old);
        }
    }
}

fn erased(socket: &Weak<UnixSocket>) -> Weak<dyn Any + Send + Sync> {
    socket.clone()
}

/// Each type of socket has abstract names of its own.
fn abstract_key(kind: SocketType, name: &[u8]) -> Vec<u8> {
    let mut key = vec![kind as u8];
    key.extend_from_slice(name);
    key
}

fn net_of(socket: &Weak<UnixSocket>) -> Result<Arc<NetNamespace>> {
    Ok(socket.upgrade().ok_or(Errno::EINVAL)?.net().clone())
}

fn bind_abstract(net: &Arc<NetNamespace>, socket: &Weak<UnixSocket>, name: &[u8]) -> Result<Binding> {
    let kind = socket.upgrade().ok_or(Errno::EINVAL)?.kind();
    let key = abstract_key(kind, name);
    let mut names = net.abstract_names.lock();
    if names.get(&key).is_some_and(|w| w.strong_count() > 0) {
        return Err(Errno::EADDRINUSE);
    }
    names.insert(key.clone(), erased(socket));
    Ok(Binding { address: abstract_address(name), place: Place::Abstract(net.clone(), key, socket.clone()) })
}

/// Picks a free abstract name of five hexadecimal digits.
pub fn autobind(task: &Task, socket: &Weak<UnixSocket>) -> Result<Binding> {
    let net = &net_of(socket)?;
    let mut seed = [0; 4];
    task.kernel().platform.random(&mut seed);
    let first = u32::from_ne_bytes(seed);
    for i in 0..0x10_0000u32 {
        let name = format!("{:05x}", first.wrapping_add(i) & 0xf_ffff);
        match bind_abstract(net, socket, name.as_bytes()) {
            Err(Errno::EADDRINUSE) => {}
            other => return other,
        }
    }
    Err(Errno::ENOSPC)
}

/// Binds `socket` to an address. EADDRINUSE.
pub fn bind(task: &Arc<Task>, socket: &Weak<UnixSocket>, addr: &[u8]) -> Result<Binding> {
    match parse(addr)? {
        Name::Unnamed => autobind(task, socket),
        Name::Abstract(name) => bind_abstract(&net_of(socket)?, socket, name),
        Name::Path(path) => {
            let cx = Lookup::new(task.fs().get(), &**task);
            let made = crate::vfs::names::mknod(&cx, None, path, InodeKind::Socket, 0o777, 0);
            let at = made.map_err(|e| if e == Errno::EEXIST { Errno::EADDRINUSE } else { e })?;
            let attachments = at.inode().attachments().ok_or(Errno::EOPNOTSUPP)?;
            let slot = attachments.get_or_insert_with(Slot::default);
            *slot.socket.lock() = socket.clone();
            Ok(Binding { address: path_address(path), place: Place::Path { _at: at } })
        }
    }
}

/// The socket bound to an address, abstract names being those of `net`. ECONNREFUSED if nobody is. A path may lead to a socket of another type than `kind`.
pub fn find(task: &Task, net: &NetNamespace, addr: &[u8], kind: SocketType) -> Result<Arc<UnixSocket>> {
    match parse(addr)? {
        Name::Unnamed => Err(Errno::ECONNREFUSED),
        Name::Abstract(name) => {
            let key = abstract_key(kind, name);
            let found = net.abstract_names.lock().get(&key).and_then(Weak::upgrade);
            found.and_then(|s| s.downcast::<UnixSocket>().ok()).ok_or(Errno::ECONNREFUSED)
        }
        Name::Path(path) => {
            let cx = Lookup::new(task.fs().get(), task);
            let at = crate::vfs::path::resolve(&cx, None, path, LookupFlags::FOLLOW)?;
            permission(&cx.credentials, at.inode(), Access::WRITE)?;
            if at.inode().kind() != InodeKind::Socket {
                return Err(Errno::ECONNREFUSED);
            }
            let slot = at.inode().attachments().and_then(|a| a.get::<Slot>()).ok_or(Errno::ECONNREFUSED)?;
            let found = slot.socket.lock().upgrade();
            found.ok_or(Errno::ECONNREFUSED)
        }
    }
}
