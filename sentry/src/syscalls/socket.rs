//! socket(2), bind(2), connect(2) and the other calls that make and describe sockets. Messages are in `message`.
use std::sync::Arc;

use guest_abi::{UserAddr, UserPtr};
use linux_raw_sys::general as raw;

use super::args::Fd;
use crate::event::{Events, WaitEnd};
use crate::row;
use crate::socket::{self, Socket, SocketFile, socket_of};
use crate::syscalls::table::Row;
use crate::task::Task;
use crate::task::limits::Resource;
use crate::time::Nanos;
use crate::vfs::File;
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(41, socket(domain: i32, kind: u32, protocol: i32), fast socket, Partial, "AF_UNIX; AF_INET, AF_INET6 over loopback; AF_NETLINK route"),
    row!(53, socketpair(domain: i32, kind: u32, protocol: i32, sv: UserPtr<[i32; 2]>), fast socketpair, Full),
    row!(49, bind(sockfd: Fd, addr: UserAddr, addrlen: i32), fast bind, Full),
    row!(50, listen(sockfd: Fd, backlog: i32), fast listen, Full),
    row!(42, connect(sockfd: Fd, addr: UserAddr, addrlen: i32), slow connect, Full),
    row!(43, accept(sockfd: Fd, addr: UserAddr, addrlen: UserPtr<i32>), both accept_fast, accept, Full),
    row!(288, accept4(sockfd: Fd, addr: UserAddr, addrlen: UserPtr<i32>, flags: u32), both accept4_fast, accept4, Full),
    row!(48, shutdown(sockfd: Fd, how: u32), fast shutdown, Full),
    row!(51, getsockname(sockfd: Fd, addr: UserAddr, addrlen: UserPtr<i32>), fast getsockname, Full),
    row!(52, getpeername(sockfd: Fd, addr: UserAddr, addrlen: UserPtr<i32>), fast getpeername, Full),
    row!(54, setsockopt(sockfd: Fd, level: i32, optname: i32, optval: UserAddr, optlen: i32), fast setsockopt, Full),
    row!(55, getsockopt(sockfd: Fd, level: i32, optname: i32, optval: UserAddr, optlen: UserPtr<i32>),
        fast getsockopt, Full),
];

/// sizeof(struct sockaddr_storage).
pub const ADDRESS_MAX: usize = 128;

/// Splits socket(2)'s type into the type and SOCK_CLOEXEC, SOCK_NONBLOCK. EINVAL for other flags.
fn split_kind(kind: u32) -> Result<(u32, bool, bool)> {
    let flags = kind & !0xf;
    if flags & !(raw::O_CLOEXEC | raw::O_NONBLOCK) != 0 {
        return Err(Errno::EINVAL);
    }
    Ok((kind & 0xf, flags & raw::O_CLOEXEC != 0, flags & raw::O_NONBLOCK != 0))
}

fn install(task: &Task, file: Arc<File>, cloexec: bool) -> Result<i32> {
    task.files().insert(file, cloexec, 0, task.limit(Resource::Nofile))
}

fn fd_value(fd: i32) -> Result<u64> {
    u64::try_from(fd).map_err(|_| Errno::EBADF)
}

fn socket(task: &Arc<Task>, domain: i32, kind: u32, protocol: i32) -> Result<u64> {
    let (kind, cloexec, nonblocking) = split_kind(kind)?;
    let made = socket::create(task, domain, kind, protocol)?;
    fd_value(install(task, SocketFile::open(task, made, nonblocking), cloexec)?)
}

fn socketpair(task: &Arc<Task>, domain: i32, kind: u32, protocol: i32, sv: UserPtr<[i32; 2]>) -> Result<u64> {
    let (kind, cloexec, nonblocking) = split_kind(kind)?;
    let (a, b) = socket::create_pair(task, domain, kind, protocol)?;
    let first = install(task, SocketFile::open(task, a, nonblocking), cloexec)?;
    let undo = |fds: &[i32]| {
        for &fd in fds {
            let removed = task.files().remove(fd);
            drop(removed);
        }
    };
    let second = match install(task, SocketFile::open(task, b, nonblocking), cloexec) {
        Ok(fd) => fd,
        Err(e) => {
            undo(&[first]);
            return Err(e);
        }
    };
    if let Err(e) = task.space().and_then(|s| s.write(sv, &[first, second])) {
        undo(&[first, second]);
        return Err(e);
    }
    Ok(0)
}

/// Reads a sockaddr of the given length. EINVAL for a length out of range.
pub fn read_address(task: &Task, addr: UserAddr, len: i32) -> Result<Vec<u8>> {
    let len = usize::try_from(len).ok().filter(|&l| l <= ADDRESS_MAX).ok_or(Errno::EINVAL)?;
    let mut bytes = vec![0; len];
    if len > 0 {
        task.space()?.read_bytes(addr, &mut bytes)?;
    }
    Ok(bytes)
}

/// Writes a sockaddr cut to the length at `len`, and stores the full length there.
pub fn write_address(task: &Task, addr: UserAddr, len: UserPtr<i32>, value: &[u8]) -> Result<()> {
    let space = task.space()?;
    let room = usize::try_from(space.read(len)?).map_err(|_| Errno::EINVAL)?;
    let cut = value.get(..room.min(value.len())).unwrap_or_default();
    if !cut.is_empty() {
        space.write_bytes(addr, cut)?;
    }
    space.write(len, &i32::try_from(value.len()).unwrap_or(0))
}

fn bind(task: &Arc<Task>, sockfd: Fd, addr: UserAddr, addrlen: i32) -> Result<u64> {
    let file = task.files().get(sockfd.0)?;
    let socket = socket_of(&file)?;
    let address = read_address(task, addr, addrlen)?;
    socket.bind(task, &address)?;
    Ok(0)
}

fn listen(task: &Arc<Task>, sockfd: Fd, backlog: i32) -> Result<u64> {
    let file = task.files().get(sockfd.0)?;
    socket_of(&file)?.listen(task, backlog)?;
    Ok(0)
}

/// The deadline of an operation with timeout `ns`, 0 being none.
pub fn deadline(task: &Task, ns: Nanos) -> Option<Nanos> {
    (ns > 0).then(|| task.now().saturating_add(ns))
}

/// The error of an operation that a signal interrupted: a call with a timeout does not restart.
pub fn interrupted(timeout: Nanos) -> Errno {
    if timeout > 0 { Errno::EINTR } else { Errno::ERESTARTSYS }
}

async fn connect(task: &Arc<Task>, sockfd: Fd, addr: UserAddr, addrlen: i32) -> Result<u64> {
    let file = task.files().get(sockfd.0)?;
    let socket = socket_of(&file)?;
    let address = read_address(task, addr, addrlen)?;
    let nonblocking = file.nonblocking();
    match socket.connect(task, &address, nonblocking) {
        Err(Errno::EAGAIN) if !nonblocking => {}
        other => return other.map(|()| 0),
    }
    let timeout = socket.options().send_timeout();
    let queue = (socket.options().queue.clone(), Events::WRITABLE);
    let end = task
        .wait(vec![queue], deadline(task, timeout), || match socket.connect(task, &address, false) {
            Err(Errno::EAGAIN) => None,
            other => Some(other),
        })
        .await;
    match end {
        Ok(result) => result.map(|()| 0),
        Err(WaitEnd::TimedOut) => Err(Errno::EAGAIN),
        Err(WaitEnd::Interrupted) => Err(interrupted(timeout)),
    }
}

fn accept_flags(flags: u32) -> Result<(bool, bool)> {
    if flags & !(raw::O_CLOEXEC | raw::O_NONBLOCK) != 0 {
        return Err(Errno::EINVAL);
    }
    Ok((flags & raw::O_CLOEXEC != 0, flags & raw::O_NONBLOCK != 0))
}

fn accepted(
    task: &Task,
    got: (Arc<dyn Socket>, Vec<u8>),
    addr: UserAddr,
    addrlen: UserPtr<i32>,
    (cloexec, nonblocking): (bool, bool),
) -> Result<u64> {
    let (socket, peer) = got;
    let file = SocketFile::open(task, socket, nonblocking);
    if !addr.is_null() {
        write_address(task, addr, addrlen, &peer)?;
    }
    fd_value(install(task, file, cloexec)?)
}

fn accept4_fast(
    task: &Arc<Task>,
    sockfd: Fd,
    addr: UserAddr,
    addrlen: UserPtr<i32>,
    flags: u32,
) -> Result<Option<u64>> {
    let flags = accept_flags(flags)?;
    let file = task.files().get(sockfd.0)?;
    let socket = socket_of(&file)?;
    match socket.accept() {
        Err(Errno::EAGAIN) if !file.nonblocking() => Ok(None),
        Err(e) => Err(e),
        Ok(got) => accepted(task, got, addr, addrlen, flags).map(Some),
    }
}

async fn accept4(task: &Arc<Task>, sockfd: Fd, addr: UserAddr, addrlen: UserPtr<i32>, flags: u32) -> Result<u64> {
    let flags = accept_flags(flags)?;
    let file = task.files().get(sockfd.0)?;
    let socket = socket_of(&file)?;
    let attempt = || match socket.accept() {
        Err(Errno::EAGAIN) => None,
        other => Some(other),
    };
    let timeout = socket.options().receive_timeout();
    let queue = (socket.options().queue.clone(), Events::READABLE);
    let got = match task.wait_exclusive(queue, deadline(task, timeout), attempt).await {
        Ok(result) => result?,
        Err(WaitEnd::TimedOut) => return Err(Errno::EAGAIN),
        Err(WaitEnd::Interrupted) => return Err(interrupted(timeout)),
    };
    accepted(task, got, addr, addrlen, flags)
}

fn accept_fast(task: &Arc<Task>, sockfd: Fd, addr: UserAddr, addrlen: UserPtr<i32>) -> Result<Option<u64>> {
    accept4_fast(task, sockfd, addr, addrlen, 0)
}

async fn accept(task: &Arc<Task>, sockfd: Fd, addr: UserAddr, addrlen: UserPtr<i32>) -> Result<u64> {
    accept4(task, sockfd, addr, addrlen, 0).await
}

fn shutdown(task: &Arc<Task>, sockfd: Fd, how: u32) -> Result<u64> {
    let file = task.files().get(sockfd.0)?;
    socket_of(&file)?.shutdown(how)?;
    Ok(0)
}

fn getsockname(task: &Arc<Task>, sockfd: Fd, addr: UserAddr, addrlen: UserPtr<i32>) -> Result<u64> {
    let file = task.files().get(sockfd.0)?;
    let name = socket_of(&file)?.name()?;
    write_address(task, addr, addrlen, &name)?;
    Ok(0)
}

fn getpeername(task: &Arc<Task>, sockfd: Fd, addr: UserAddr, addrlen: UserPtr<i32>) -> Result<u64> {
    let file = task.files().get(sockfd.0)?;
    let name = socket_of(&file)?.peer_name()?;
    write_address(task, addr, addrlen, &name)?;
    Ok(0)
}

fn setsockopt(task: &Arc<Task>, sockfd: Fd, level: i32, optname: i32, optval: UserAddr, optlen: i32) -> Result<u64> {
    /// No option here is longer; what is beyond is not looked at.
    const LONGEST: usize = 256;
    let file = task.files().get(sockfd.0)?;
    let socket = socket_of(&file)?;
    let len = usize::try_from(optlen).map_err(|_| Errno::EINVAL)?.min(LONGEST);
    let mut value = vec![0; len];
    if len > 0 {
        task.space()?.read_bytes(optval, &mut value)?;
    }
    if level == socket::options::SOL_SOCKET {
        socket::options::set(&**socket, task, optname, &value)?;
    } else {
        socket.set_option(task, level, optname, &value)?;
    }
    Ok(0)
}

fn getsockopt(
    task: &Arc<Task>,
    sockfd: Fd,
    level: i32,
    optname: i32,
    optval: UserAddr,
    optlen: UserPtr<i32>,
) -> Result<u64> {
    let file = task.files().get(sockfd.0)?;
    let socket = socket_of(&file)?;
    let space = task.space()?;
    let room = usize::try_from(space.read(optlen)?).map_err(|_| Errno::EINVAL)?;
    let value = if level == socket::options::SOL_SOCKET {
        socket::options::get(&**socket, task, optname)?
    } else {
        socket.get_option(task, level, optname)?
    };
    let cut = value.get(..room.min(value.len())).unwrap_or_default();
    if !cut.is_empty() {
        space.write_bytes(optval, cut)?;
    }
    space.write(optlen, &i32::try_from(cut.len()).unwrap_or(0))?;
    Ok(0)
}
