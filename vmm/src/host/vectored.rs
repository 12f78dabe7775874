//! Vectored host I/O on raw memory: the guest's, which may change or vanish under the call. Owns the system calls; the host kernel
//! judges the addresses and gives EFAULT or a short count.
#![allow(unsafe_code)]
use std::os::fd::{AsRawFd, BorrowedFd};

use guest_abi::Errno;
use sentry::platform::PhysRange;

use crate::memory::GuestMemory;

/// Most buffers of one call (IOV_MAX).
const IOV_MAX: usize = 1024;

/// Buffers for one call. The addresses are the guest's memory, or a buffer borrowed for `'a`.
pub(super) struct Buffers<'a> {
    list: List,
    borrow: core::marker::PhantomData<&'a ()>,
}

impl<'a> Buffers<'a> {
    /// The guest's memory; at most IOV_MAX ranges and `most` bytes of it.
    pub(super) fn guest(memory: &'a GuestMemory, ranges: &[PhysRange], most: usize) -> Result<Buffers<'a>, Errno> {
        let mut iov = Vec::with_capacity(ranges.len().min(IOV_MAX));
        let mut left = most;
        for r in ranges.iter().take(IOV_MAX) {
            let len = r.len.min(left);
            let base = memory.host_range(PhysRange { addr: r.addr, len })?;
            iov.push(libc::iovec { iov_base: base.cast(), iov_len: len });
            left -= len;
            if left == 0 {
                break;
            }
        }
        Ok(Buffers { list: List::Many(iov), borrow: core::marker::PhantomData })
    }

    /// A buffer to be filled.
    pub(super) fn filling(buf: &'a mut [u8]) -> Buffers<'a> {
        let iov = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
        Buffers { list: List::One([iov]), borrow: core::marker::PhantomData }
    }

    /// A buffer to be sent, `most` bytes of it. Only for calls that read memory.
    pub(super) fn sending(buf: &'a [u8], most: usize) -> Buffers<'a> {
        let iov = libc::iovec { iov_base: buf.as_ptr().cast_mut().cast(), iov_len: buf.len().min(most) };
        Buffers { list: List::One([iov]), borrow: core::marker::PhantomData }
    }

    /// Bytes in all.
    pub(super) fn len(&self) -> usize {
        self.iov().iter().map(|v| v.iov_len).sum()
    }

    fn iov(&self) -> &[libc::iovec] {
        match &self.list {
            List::One(one) => one,
            List::Many(many) => many,
        }
    }
}

/// One buffer, the common case, needs no allocation.
enum List {
    One([libc::iovec; 1]),
    Many(Vec<libc::iovec>),
}

/// How a call transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// At a position of the file.
    At(u64),
    /// At the description's own position.
    Stream,
    /// The same, but EAGAIN instead of waiting (RWF_NOWAIT).
    StreamNoWait,
    /// A socket, EAGAIN instead of waiting.
    Socket,
}

fn result(n: isize) -> Result<usize, Errno> {
    usize::try_from(n).map_err(|_| Errno::from_raw(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)))
}

fn position(at: u64) -> Result<i64, Errno> {
    i64::try_from(at).map_err(|_| Errno::EINVAL)
}

fn message(b: &Buffers<'_>) -> libc::msghdr {
    // SAFETY: zero is a valid msghdr: no address, no control data.
    let mut m: libc::msghdr = unsafe { core::mem::zeroed() };
    m.msg_iov = b.iov().as_ptr().cast_mut();
    m.msg_iovlen = b.iov().len();
    m
}

fn again(mut call: impl FnMut() -> Result<usize, Errno>) -> Result<usize, Errno> {
    // A kick of the worker interrupts its host calls too; the kick itself is remembered elsewhere.
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            r => return r,
        }
    }
}

/// Fills the buffers.
pub(super) fn read(fd: BorrowedFd<'_>, b: &Buffers<'_>, way: Way) -> Result<usize, Errno> {
    let (raw, iov, n) = (fd.as_raw_fd(), b.iov().as_ptr(), b.iov().len() as i32);
    again(|| {
        // SAFETY: the kernel writes only to the listed ranges: guest memory (to which no Rust reference exists) or a buffer that
        // `b` borrows exclusively.
        result(unsafe {
            match way {
                Way::At(at) => libc::preadv(raw, iov, n, position(at)?),
                Way::Stream => libc::readv(raw, iov, n),
                Way::StreamNoWait => libc::preadv2(raw, iov, n, -1, libc::RWF_NOWAIT),
                Way::Socket => libc::recvmsg(raw, &mut message(b), libc::MSG_DONTWAIT),
            }
        })
    })
}

/// Sends the buffers.
pub(super) fn write(fd: BorrowedFd<'_>, b: &Buffers<'_>, way: Way) -> Result<usize, Errno> {
    let (raw, iov, n) = (fd.as_raw_fd(), b.iov().as_ptr(), b.iov().len() as i32);
    again(|| {
        // SAFETY: the kernel only reads the listed ranges.
        result(unsafe {
            match way {
                Way::At(at) => libc::pwritev(raw, iov, n, position(at)?),
                Way::Stream => libc::writev(raw, iov, n),
                Way::StreamNoWait => libc::pwritev2(raw, iov, n, -1, libc::RWF_NOWAIT),
                Way::Socket => libc::sendmsg(raw, &message(b), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL),
            }
        })
    })
}
