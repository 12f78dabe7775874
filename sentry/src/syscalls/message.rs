//! sendto(2), sendmsg(2), sendmmsg(2), recvfrom(2), recvmsg(2), recvmmsg(2): messages, their addresses and control data.
use std::sync::Arc;

use guest_abi::file::MAX_RW_COUNT;
use guest_abi::types::{Iovec, Timespec};
use guest_abi::{UserAddr, UserPtr};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::args::Fd;
use super::io::broken_pipe;
use super::poll::timespec_ns;
use super::socket::{ADDRESS_MAX, deadline, interrupted, read_address, write_address};
use crate::event::{Events, WaitEnd};
use crate::mm::{IoDest, IoSource};
use crate::ns::user::Caps;
use crate::row;
use crate::socket::message::{Creds, InFlight, Received};
use crate::socket::{SendRequest, Socket, SocketType, msg, socket_of};
use crate::syscalls::table::Row;
use crate::task::Task;
use crate::task::limits::Resource;
use crate::vfs::File;
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(44, sendto(sockfd: Fd, buf: UserAddr, len: u64, flags: u32, dest_addr: UserAddr, addrlen: i32),
        both sendto_fast, sendto, Full),
    row!(45, recvfrom(sockfd: Fd, buf: UserAddr, len: u64, flags: u32, src_addr: UserAddr, addrlen: UserPtr<i32>),
        both recvfrom_fast, recvfrom, Full),
    row!(46, sendmsg(sockfd: Fd, msg: UserPtr<MsgHdr>, flags: u32), both sendmsg_fast, sendmsg, Full),
    row!(47, recvmsg(sockfd: Fd, msg: UserPtr<MsgHdr>, flags: u32), both recvmsg_fast, recvmsg, Full),
    row!(307, sendmmsg(sockfd: Fd, msgvec: UserPtr<MmsgHdr>, vlen: u32, flags: u32), slow sendmmsg, Full),
    row!(299, recvmmsg(sockfd: Fd, msgvec: UserPtr<MmsgHdr>, vlen: u32, flags: u32, timeout: UserPtr<Timespec>),
        slow recvmmsg, Full),
];

/// struct msghdr.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct MsgHdr {
    pub name: u64,
    pub namelen: i32,
    pub pad0: u32,
    pub iov: u64,
    pub iovlen: u64,
    pub control: u64,
    pub controllen: u64,
    pub flags: u32,
    pub pad1: u32,
}

/// struct mmsghdr.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct MmsgHdr {
    pub hdr: MsgHdr,
    pub len: u32,
    pub pad: u32,
}

const IOV_MAX: u64 = 1024;
/// net.core.optmem_max.
const CONTROL_MAX: u64 = 131_072;
/// SCM_MAX_FD.
const MAX_RIGHTS: usize = 253;
const SOL_SOCKET: i32 = 1;
const SCM_RIGHTS: i32 = 1;
const SCM_CREDENTIALS: i32 = 2;
const CMSG_HEADER: usize = 16;

fn buffers(task: &Task, iov: UserAddr, count: u64) -> Result<Vec<(UserAddr, usize)>> {
    if count > IOV_MAX {
        return Err(Errno::EMSGSIZE);
    }
    let count = usize::try_from(count).map_err(|_| Errno::EMSGSIZE)?;
    let entries: Vec<Iovec> =
        if count == 0 { Vec::new() } else { task.space()?.read_array(UserPtr::new(iov), count)? };
    let mut left = MAX_RW_COUNT as u64;
    let mut out = Vec::with_capacity(entries.len());
    for e in entries {
        if i64::try_from(e.len).is_err() {
            return Err(Errno::EINVAL);
        }
        let len = e.len.min(left);
        left -= len;
        out.push((UserAddr(e.base), usize::try_from(len).map_err(|_| Errno::EINVAL)?));
    }
    Ok(out)
}

/// What a sending call was given.
#[derive(Default)]
struct Outgoing {
    to: Option<Vec<u8>>,
    creds: Option<Creds>,
    rights: Option<Arc<InFlight>>,
    iov: Vec<(UserAddr, usize)>,
}

fn plain_outgoing(task: &Task, buf: UserAddr, len: u64, dest: UserAddr, addrlen: i32) -> Result<Outgoing> {
    let len = usize::try_from(len.min(MAX_RW_COUNT as u64)).map_err(|_| Errno::EINVAL)?;
    let to = if dest.is_null() { None } else { Some(read_address(task, dest, addrlen)?).filter(|a| !a.is_empty()) };
    Ok(Outgoing { to, iov: vec![(buf, len)], ..Outgoing::default() })
}

fn message_outgoing(task: &Task, header: &MsgHdr) -> Result<Outgoing> {
    if header.namelen < 0 {
        return Err(Errno::EINVAL);
    }
    let to = if header.name == 0 || header.namelen == 0 {
        None
    } else {
        let len = header.namelen.min(i32::try_from(ADDRESS_MAX).unwrap_or(0));
        Some(read_address(task, UserAddr(header.name), len)?)
    };
    let iov = buffers(task, UserAddr(header.iov), header.iovlen)?;
    let mut out = Outgoing { to, iov, ..Outgoing::default() };
    if header.controllen > 0 {
        read_control(task, header, &mut out)?;
    }
    Ok(out)
}

fn read_control(task: &Task, header: &MsgHdr, out: &mut Outgoing) -> Result<()> {
    if header.controllen > CONTROL_MAX {
        return Err(Errno::ENOBUFS);
    }
    let mut control = vec![0; usize::try_from(header.controllen).map_err(|_| Errno::ENOBUFS)?];
    task.space()?.read_bytes(UserAddr(header.control), &mut control)?;
    let mut rest: &[u8] = &control;
    let mut files = Vec::new();
    while rest.len() >= CMSG_HEADER {
        let word = |at: usize| -> Result<i32> {
            let bytes = rest.get(at..at + 4).ok_or(Errno::EINVAL)?;
            Ok(i32::from_ne_bytes(bytes.try_into().map_err(|_| Errno::EINVAL)?))
        };
        let len = rest.get(..8).and_then(|b| b.try_into().ok()).map(u64::from_ne_bytes).ok_or(Errno::EINVAL)?;
        let len = usize::try_from(len).ok().filter(|&l| l >= CMSG_HEADER && l <= rest.len()).ok_or(Errno::EINVAL)?;
        let (level, kind) = (word(8)?, word(12)?);
        let data = rest.get(CMSG_HEADER..len).unwrap_or_default();
        if level == SOL_SOCKET {
            match kind {
                SCM_RIGHTS => {
                    for fd in data.chunks_exact(4) {
                        if files.len() >= MAX_RIGHTS {
                            return Err(Errno::EINVAL);
                        }
                        let fd = i32::from_ne_bytes(fd.try_into().map_err(|_| Errno::EINVAL)?);
                        files.push(task.files().get(fd)?);
                    }
                }
                SCM_CREDENTIALS => out.creds = Some(read_credentials(task, data)?),
                _ => return Err(Errno::EINVAL),
            }
        }
        rest = rest.get(len.next_multiple_of(8)..).unwrap_or_default();
    }
    if !files.is_empty() {
        let limit = task.limit(Resource::Nofile);
        let privileged = task.credentials().has(Caps::SYS_RESOURCE) || task.credentials().has(Caps::SYS_ADMIN);
        out.rights =
            Some(Arc::new(InFlight::new(task.kernel(), files, if privileged { limit.max(65536) } else { limit })?));
    }
    Ok(())
}

/// Judges SCM_CREDENTIALS: a process may name itself only, unless it has capabilities.
fn read_credentials(task: &Task, data: &[u8]) -> Result<Creds> {
    let [pid, uid, gid] = <[u32; 3]>::read_from_bytes(data).map_err(|_| Errno::EINVAL)?;
    let cred = task.credentials();
    let pid = i32::try_from(pid).map_err(|_| Errno::ESRCH)?;
    let own = task.group().pid();
    let ns = task.pid_namespace();
    let itself = pid == own.number_in(ns);
    let uid = cred.user_ns.user(uid).ok_or(Errno::EINVAL)?;
    let gid = cred.user_ns.group(gid).ok_or(Errno::EINVAL)?;
    if !itself && !cred.has_in(&ns.owner.user_ns, Caps::SYS_ADMIN) {
        return Err(Errno::EPERM);
    }
    if ![cred.uid, cred.euid, cred.suid].contains(&uid) && !cred.has_in_own(Caps::SETUID) {
        return Err(Errno::EPERM);
    }
    if ![cred.gid, cred.egid, cred.sgid].contains(&gid) && !cred.has_in_own(Caps::SETGID) {
        return Err(Errno::EPERM);
    }
    let pid = if itself { own.clone() } else { ns.pid(pid).ok_or(Errno::ESRCH)? };
    Ok(Creds { pid, uid, gid, groups: None })
}

fn failed(task: &Arc<Task>, socket: &dyn Socket, flags: u32, error: Errno) -> Errno {
    if error == Errno::EPIPE && flags & msg::NOSIGNAL == 0 && socket.options().kind == SocketType::Stream {
        broken_pipe(task);
    }
    error
}

/// One attempt: None where the call would block.
fn send_now(task: &Arc<Task>, file: &File, out: &Outgoing, flags: u32) -> Result<Option<u64>> {
    let socket = socket_of(file)?;
    let nonblocking = file.nonblocking() || flags & msg::DONTWAIT != 0;
    let mut src = IoSource::user_vec(task.space()?, out.iov.clone());
    let stream = socket.options().kind == SocketType::Stream;
    if stream && !nonblocking && socket.options().budget.room() < src.remaining() {
        // A part of it would be sent, which the blocking form could not take back.
        return Ok(None);
    }
    let mut request =
        SendRequest { to: out.to.as_deref(), creds: out.creds.clone(), rights: out.rights.clone(), flags };
    match socket.send(task, &mut src, &mut request) {
        Ok(n) => Ok(Some(n as u64)),
        Err(Errno::EAGAIN) if !nonblocking => Ok(None),
        Err(e) => Err(failed(task, &**socket, flags, e)),
    }
}

async fn send_all(task: &Arc<Task>, file: &File, out: Outgoing, flags: u32) -> Result<u64> {
    let socket = socket_of(file)?;
    let options = socket.options();
    let stream = options.kind == SocketType::Stream;
    let nonblocking = file.nonblocking() || flags & msg::DONTWAIT != 0;
    let timeout = options.send_timeout();
    let deadline = deadline(task, timeout);
    let mut src = IoSource::user_vec(task.space()?, out.iov);
    let mut request = SendRequest { to: out.to.as_deref(), creds: out.creds, rights: out.rights, flags };
    let mut total = 0u64;
    loop {
        let result = socket.send(task, &mut src, &mut request);
        let result = match result {
            Err(Errno::EAGAIN) if !nonblocking => {
                let queue = (options.queue.clone(), Events::WRITABLE);
                let end = task
                    .wait(vec![queue], deadline, || match socket.send(task, &mut src, &mut request) {
                        Err(Errno::EAGAIN) => None,
                        other => Some(other),
                    })
                    .await;
                match end {
                    Ok(result) => result,
                    Err(WaitEnd::TimedOut) => Err(Errno::EAGAIN),
                    Err(WaitEnd::Interrupted) => Err(interrupted(timeout)),
                }
            }
            other => other,
        };
        match result {
            Ok(n) => {
                total += n as u64;
                if !stream || src.remaining() == 0 {
                    return Ok(total);
                }
            }
            Err(_) if total > 0 => return Ok(total),
            Err(e) => return Err(failed(task, &**socket, flags, e)),
        }
    }
}

fn sendto_fast(
    task: &Arc<Task>,
    sockfd: Fd,
    buf: UserAddr,
    len: u64,
    flags: u32,
    dest_addr: UserAddr,
    addrlen: i32,
) -> Result<Option<u64>> {
    let file = task.files().get(sockfd.0)?;
    socket_of(&file)?;
    let out = plain_outgoing(task, buf, len, dest_addr, addrlen)?;
    send_now(task, &file, &out, flags)
}

async fn sendto(
    task: &Arc<Task>,
    sockfd: Fd,
    buf: UserAddr,
    len: u64,
    flags: u32,
    dest_addr: UserAddr,
    addrlen: i32,
) -> Result<u64> {
    let file = task.files().get(sockfd.0)?;
    socket_of(&file)?;
    let out = plain_outgoing(task, buf, len, dest_addr, addrlen)?;
    send_all(task, &file, out, flags).await
}

fn sendmsg_fast(task: &Arc<Task>, sockfd: Fd, msg: UserPtr<MsgHdr>, flags: u32) -> Result<Option<u64>> {
    let file = task.files().get(sockfd.0)?;
    socket_of(&file)?;
    let header = task.space()?.read(msg)?;
    let out = message_outgoing(task, &header)?;
    send_now(task, &file, &out, flags)
}

async fn sendmsg(task: &Arc<Task>, sockfd: Fd, msg: UserPtr<MsgHdr>, flags: u32) -> Result<u64> {
    let file = task.files().get(sockfd.0)?;
    socket_of(&file)?;
    let header = task.space()?.read(msg)?;
    let out = message_outgoing(task, &header)?;
    send_all(task, &file, out, flags).await
}

async fn sendmmsg(task: &Arc<Task>, sockfd: Fd, msgvec: UserPtr<MmsgHdr>, vlen: u32, flags: u32) -> Result<u64> {
    let file = task.files().get(sockfd.0)?;
    socket_of(&file)?;
    let mut sent = 0u64;
    for i in 0..u64::from(vlen).min(IOV_MAX) {
        let at = msgvec.offset(i);
        let one = async {
            let header: MsgHdr = task.space()?.read(at.cast())?;
            let out = message_outgoing(task, &header)?;
            let n = send_all(task, &file, out, flags).await?;
            let len = UserPtr::<u32>::new(at.addr.wrapping_add(size_of::<MsgHdr>() as u64));
            task.space()?.write(len, &u32::try_from(n).unwrap_or(u32::MAX))
        };
        match one.await {
            Ok(()) => sent += 1,
            Err(_) if sent > 0 => break,
            Err(e) => return Err(e),
        }
    }
    Ok(sent)
}

// Receiving

fn receive_now(task: &Arc<Task>, file: &File, iov: Vec<(UserAddr, usize)>, flags: u32) -> Result<Option<Received>> {
    let socket = socket_of(file)?;
    let nonblocking = file.nonblocking() || flags & msg::DONTWAIT != 0;
    if !nonblocking && flags & msg::WAITALL != 0 && flags & msg::PEEK == 0 {
        return Ok(None);
    }
    let mut dst = IoDest::user_vec(task.space()?, iov);
    match socket.receive(&mut dst, flags) {
        Ok(received) => Ok(Some(received)),
        Err(Errno::EAGAIN) if !nonblocking => Ok(None),
        Err(e) => Err(e),
    }
}

async fn receive(task: &Arc<Task>, file: &File, iov: Vec<(UserAddr, usize)>, flags: u32) -> Result<Received> {
    let socket = socket_of(file)?;
    let options = socket.options();
    let nonblocking = file.nonblocking() || flags & msg::DONTWAIT != 0;
    let wait_all =
        flags & msg::WAITALL != 0 && flags & msg::PEEK == 0 && options.kind == SocketType::Stream && !nonblocking;
    let timeout = options.receive_timeout();
    let deadline = deadline(task, timeout);
    let mut dst = IoDest::user_vec(task.space()?, iov);
    // A message is for one of those who wait; of a stream something may be left for the next.
    let exclusive = options.kind != SocketType::Stream && flags & msg::PEEK == 0;
    let mut all: Option<Received> = None;
    loop {
        let result = match socket.receive(&mut dst, flags) {
            Err(Errno::EAGAIN) if !nonblocking => {
                let queue = (options.queue.clone(), Events::READABLE);
                let attempt = || match socket.receive(&mut dst, flags) {
                    Err(Errno::EAGAIN) => None,
                    other => Some(other),
                };
                let end = if exclusive {
                    task.wait_exclusive(queue, deadline, attempt).await
                } else {
                    task.wait(vec![queue], deadline, attempt).await
                };
                match end {
                    Ok(result) => result,
                    Err(WaitEnd::TimedOut) => Err(Errno::EAGAIN),
                    Err(WaitEnd::Interrupted) => Err(interrupted(timeout)),
                }
            }
            other => other,
        };
        match (result, all.take()) {
            (Err(_), Some(before)) => return Ok(before),
            (Err(e), None) => return Err(e),
            (Ok(got), before) => {
                let ended = got.copied == 0;
                let mut sum = before.unwrap_or_default();
                sum.copied += got.copied;
                sum.full += got.full;
                sum.end_of_record |= got.end_of_record;
                sum.source = sum.source.or(got.source);
                sum.creds = sum.creds.or(got.creds);
                let rights = got.rights.is_some();
                sum.rights = sum.rights.or(got.rights);
                if !wait_all || ended || rights || dst.remaining() == 0 {
                    return Ok(sum);
                }
                all = Some(sum);
            }
        }
    }
}

/// The value of the call: the real length of a datagram if asked for.
fn received_len(socket: &dyn Socket, received: &Received, flags: u32) -> u64 {
    let datagram = socket.options().kind != SocketType::Stream;
    (if datagram && flags & msg::TRUNC != 0 { received.full } else { received.copied }) as u64
}

fn finish_recvfrom(
    task: &Task,
    file: &File,
    received: &Received,
    flags: u32,
    src_addr: UserAddr,
    addrlen: UserPtr<i32>,
) -> Result<u64> {
    if !src_addr.is_null() {
        write_address(task, src_addr, addrlen, received.source.as_deref().unwrap_or_default())?;
    }
    Ok(received_len(&**socket_of(file)?, received, flags))
}

fn one_buffer(buf: UserAddr, len: u64) -> Result<Vec<(UserAddr, usize)>> {
    Ok(vec![(buf, usize::try_from(len.min(MAX_RW_COUNT as u64)).map_err(|_| Errno::EINVAL)?)])
}

fn recvfrom_fast(
    task: &Arc<Task>,
    sockfd: Fd,
    buf: UserAddr,
    len: u64,
    flags: u32,
    src_addr: UserAddr,
    addrlen: UserPtr<i32>,
) -> Result<Option<u64>> {
    let file = task.files().get(sockfd.0)?;
    match receive_now(task, &file, one_buffer(buf, len)?, flags)? {
        None => Ok(None),
        Some(received) => finish_recvfrom(task, &file, &received, flags, src_addr, addrlen).map(Some),
    }
}

async fn recvfrom(
    task: &Arc<Task>,
    sockfd: Fd,
    buf: UserAddr,
    len: u64,
    flags: u32,
    src_addr: UserAddr,
    addrlen: UserPtr<i32>,
) -> Result<u64> {
    let file = task.files().get(sockfd.0)?;
    let received = receive(task, &file, one_buffer(buf, len)?, flags).await?;
    finish_recvfrom(task, &file, &received, flags, src_addr, addrlen)
}

/// Control data under construction; what does not fit sets MSG_CTRUNC.
struct ControlWriter {
    bytes: Vec<u8>,
    room: usize,
    truncated: bool,
}

impl ControlWriter {
    /// Bytes of data that a further message may hold.
    fn left(&self) -> usize {
        self.room.saturating_sub(self.bytes.len()).saturating_sub(CMSG_HEADER)
    }

    fn put(&mut self, level: i32, kind: i32, data: &[u8]) {
        if self.room.saturating_sub(self.bytes.len()) < CMSG_HEADER {
            self.truncated = true;
            return;
        }
        let cut = data.get(..self.left().min(data.len())).unwrap_or_default();
        self.truncated |= cut.len() < data.len();
        self.bytes.extend_from_slice(&((CMSG_HEADER + cut.len()) as u64).to_ne_bytes());
        self.bytes.extend_from_slice(&level.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(cut);
        let padded = self.bytes.len().next_multiple_of(8).min(self.room);
        self.bytes.resize(padded.max(self.bytes.len()), 0);
    }
}

/// Gives the received descriptors numbers, as many as there is room for in the control data and the table.
fn put_rights(task: &Task, control: &mut ControlWriter, rights: &InFlight, cloexec: bool) {
    let room = control.left() / 4;
    let limit = task.limit(Resource::Nofile);
    let mut numbers = Vec::new();
    for file in rights.files() {
        if numbers.len() >= room {
            control.truncated = true;
            break;
        }
        let Ok(fd) = task.files().insert(file.clone(), cloexec, 0, limit) else {
            control.truncated = true;
            break;
        };
        numbers.push(fd);
    }
    if !numbers.is_empty() {
        let data: Vec<u8> = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
        control.put(SOL_SOCKET, SCM_RIGHTS, &data);
    }
}

fn finish_recvmsg(
    task: &Task,
    file: &File,
    at: UserPtr<MsgHdr>,
    header: &MsgHdr,
    received: &Received,
    flags: u32,
) -> Result<u64> {
    let socket = socket_of(file)?;
    let space = task.space()?;
    let field = |offset: u64| at.addr.wrapping_add(offset);
    let mut out_flags = flags & msg::CMSG_CLOEXEC;
    if header.name != 0 {
        let source = received.source.as_deref().unwrap_or_default();
        let room = usize::try_from(header.namelen).map_err(|_| Errno::EINVAL)?;
        let cut = source.get(..room.min(source.len())).unwrap_or_default();
        space.write_bytes(UserAddr(header.name), cut)?;
        space.write_bytes(field(8), &i32::try_from(source.len()).unwrap_or(0).to_ne_bytes())?;
    }
    let room = usize::try_from(header.controllen.min(CONTROL_MAX)).unwrap_or(0);
    let room = if header.control == 0 { 0 } else { room };
    let mut control = ControlWriter { bytes: Vec::new(), room, truncated: false };
    if socket.options().pass_credentials.load(core::sync::atomic::Ordering::Relaxed)
        && socket.options().domain == crate::socket::AF_UNIX
    {
        let creds = received.creds.as_ref().map_or([0, 65534, 65534], |c| c.as_seen_by(task));
        let data: Vec<u8> = creds.iter().flat_map(|v| v.to_ne_bytes()).collect();
        control.put(SOL_SOCKET, SCM_CREDENTIALS, &data);
    }
    if let Some(rights) = &received.rights {
        put_rights(task, &mut control, rights, flags & msg::CMSG_CLOEXEC != 0);
    }
    if control.truncated {
        out_flags |= msg::CTRUNC;
    }
    let kind = socket.options().kind;
    if kind != SocketType::Stream && received.full > received.copied {
        out_flags |= msg::TRUNC;
    }
    if !control.bytes.is_empty() {
        space.write_bytes(UserAddr(header.control), &control.bytes)?;
    }
    space.write_bytes(field(40), &(control.bytes.len() as u64).to_ne_bytes())?;
    space.write_bytes(field(48), &out_flags.to_ne_bytes())?;
    Ok(received_len(&**socket, received, flags))
}

fn incoming(task: &Task, at: UserPtr<MsgHdr>) -> Result<(MsgHdr, Vec<(UserAddr, usize)>)> {
    let header: MsgHdr = task.space()?.read(at)?;
    if header.name != 0 && header.namelen < 0 {
        return Err(Errno::EINVAL);
    }
    let iov = buffers(task, UserAddr(header.iov), header.iovlen)?;
    Ok((header, iov))
}

fn recvmsg_fast(task: &Arc<Task>, sockfd: Fd, msg: UserPtr<MsgHdr>, flags: u32) -> Result<Option<u64>> {
    let file = task.files().get(sockfd.0)?;
    socket_of(&file)?;
    let (header, iov) = incoming(task, msg)?;
    match receive_now(task, &file, iov, flags)? {
        None => Ok(None),
        Some(received) => finish_recvmsg(task, &file, msg, &header, &received, flags).map(Some),
    }
}

async fn recvmsg(task: &Arc<Task>, sockfd: Fd, msg: UserPtr<MsgHdr>, flags: u32) -> Result<u64> {
    let file = task.files().get(sockfd.0)?;
    socket_of(&file)?;
    let (header, iov) = incoming(task, msg)?;
    let received = receive(task, &file, iov, flags).await?;
    finish_recvmsg(task, &file, msg, &header, &received, flags)
}

async fn recvmmsg(
    task: &Arc<Task>,
    sockfd: Fd,
    msgvec: UserPtr<MmsgHdr>,
    vlen: u32,
    flags: u32,
    timeout: UserPtr<Timespec>,
) -> Result<u64> {
    let deadline = if timeout.is_null() {
        None
    } else {
        Some(task.now().saturating_add(timespec_ns(task.space()?.read(timeout)?)?))
    };
    let file = task.files().get(sockfd.0)?;
    socket_of(&file)?;
    let mut got = 0u64;
    for i in 0..u64::from(vlen).min(IOV_MAX) {
        let at = msgvec.offset(i);
        // MSG_WAITFORONE: only the first message is waited for.
        let wait = if got > 0 && flags & msg::WAITFORONE != 0 { msg::DONTWAIT } else { 0 };
        let flags = (flags & !msg::WAITFORONE) | wait;
        let one = async {
            let header_at: UserPtr<MsgHdr> = at.cast();
            let (header, iov) = incoming(task, header_at)?;
            let received = receive(task, &file, iov, flags).await?;
            let n = finish_recvmsg(task, &file, header_at, &header, &received, flags)?;
            let len = UserPtr::<u32>::new(at.addr.wrapping_add(size_of::<MsgHdr>() as u64));
            task.space()?.write(len, &u32::try_from(n).unwrap_or(u32::MAX))
        };
        match one.await {
            Ok(()) => got += 1,
            Err(_) if got > 0 => break,
            Err(e) => return Err(e),
        }
        // As Linux does, the time is looked at after each message only.
        if deadline.is_some_and(|at| task.now() >= at) {
            break;
        }
    }
    if let Some(at) = deadline {
        let rest = crate::fs::anon::timestamp(at.saturating_sub(task.now()));
        task.space()?.write(timeout, &rest)?;
    }
    Ok(got)
}
