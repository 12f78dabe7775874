//! Where reads put and writes take their bytes: buffers of the program or of the sentry. Owns the progress of one transfer.
use std::sync::Arc;

use guest_abi::UserAddr;

use super::AddressSpace;
use super::usercopy::BLOCK;
use crate::platform::host::Window;
use crate::platform::{PhysAddr, PhysRange, Platform};
use crate::{Errno, Result};

/// Most bytes pinned at once: more would only hold memory longer.
const PIN_MOST: usize = 4 << 20;

/// Pages held so that the host may read or write them while others unmap them.
pub struct Pinned {
    platform: Arc<dyn Platform>,
    ranges: Vec<PhysRange>,
    pub(super) frames: Vec<PhysAddr>,
    pub(super) windows: Vec<Arc<dyn Window>>,
}

impl Pinned {
    fn new(space: &AddressSpace) -> Pinned {
        Pinned { platform: space.platform.clone(), ranges: Vec::new(), frames: Vec::new(), windows: Vec::new() }
    }

    /// The memory.
    pub fn ranges(&self) -> &[PhysRange] {
        &self.ranges
    }

    /// Bytes held.
    pub fn len(&self) -> usize {
        self.ranges.iter().map(|r| r.len).sum()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(super) fn push(&mut self, pa: u64, len: usize) {
        if let Some(last) = self.ranges.last_mut() {
            let end = last.addr.0 + last.len as u64;
            if end == pa && !end.is_multiple_of(BLOCK) {
                last.len += len;
                return;
            }
        }
        self.ranges.push(PhysRange { addr: PhysAddr(pa), len });
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if !self.frames.is_empty() {
            self.platform.memory().release(&self.frames);
        }
    }
}

/// Buffers of the program, worked through in order.
struct UserBuffers {
    space: Arc<AddressSpace>,
    current: (UserAddr, usize),
    rest: std::vec::IntoIter<(UserAddr, usize)>,
    remaining: usize,
}

impl UserBuffers {
    fn one(space: Arc<AddressSpace>, addr: UserAddr, len: usize) -> UserBuffers {
        UserBuffers { space, current: (addr, len), rest: Vec::new().into_iter(), remaining: len }
    }

    fn many(space: Arc<AddressSpace>, iov: Vec<(UserAddr, usize)>) -> UserBuffers {
        let remaining = iov.iter().fold(0usize, |sum, (_, len)| sum.saturating_add(*len));
        UserBuffers { space, current: (UserAddr(0), 0), rest: iov.into_iter(), remaining }
    }

    /// The buffer to go on with; None when all are done.
    fn current(&mut self) -> Option<(UserAddr, usize)> {
        while self.current.1 == 0 {
            self.current = self.rest.next()?;
        }
        Some(self.current)
    }

    fn advance(&mut self, mut n: usize) {
        n = n.min(self.remaining);
        self.remaining -= n;
        while n > 0 {
            let Some((addr, len)) = self.current() else { return };
            let step = n.min(len);
            self.current = (addr.wrapping_add(step as u64), len - step);
            n -= step;
        }
    }

    /// Moves up to `len` bytes: `copy(space, addr, len, done)` gives how many it could. EFAULT if that is none.
    fn transfer(
        &mut self,
        len: usize,
        mut copy: impl FnMut(&Arc<AddressSpace>, UserAddr, usize, usize) -> usize,
    ) -> Result<usize> {
        let mut done = 0;
        while done < len {
            let Some((addr, room)) = self.current() else { break };
            let want = room.min(len - done);
            let got = copy(&self.space, addr, want, done);
            self.advance(got);
            done += got;
            if got < want {
                return if done == 0 { Err(Errno::EFAULT) } else { Ok(done) };
            }
        }
        Ok(done)
    }

    fn pin(&mut self, max: usize, write: bool) -> Result<Pinned> {
        let mut pinned = Pinned::new(&self.space);
        let mut left = max.min(PIN_MOST).min(self.remaining);
        let first = self.current();
        let later = self.rest.as_slice().iter().copied();
        for (addr, len) in first.into_iter().chain(later) {
            if left == 0 {
                break;
            }
            let want = len.min(left);
            let got = self.space.pin(addr, want, write, &mut pinned);
            left -= got;
            if got < want {
                if pinned.is_empty() {
                    return Err(Errno::EFAULT);
                }
                break;
            }
        }
        Ok(pinned)
    }
}

enum Dest<'a> {
    Kernel { buf: &'a mut [u8], at: usize },
    User(UserBuffers),
}

/// Where a read puts its bytes: the program's buffers, or the sentry's.
pub struct IoDest<'a> {
    to: Dest<'a>,
}

impl<'a> IoDest<'a> {
    /// The sentry's own buffer.
    pub fn kernel(buf: &'a mut [u8]) -> IoDest<'a> {
        IoDest { to: Dest::Kernel { buf, at: 0 } }
    }

    /// One buffer of the program.
    pub fn user(space: Arc<AddressSpace>, addr: UserAddr, len: usize) -> IoDest<'a> {
        IoDest { to: Dest::User(UserBuffers::one(space, addr, len)) }
    }

    /// Several buffers of the program, lengths already bounded (IOV_MAX entries, a total of at most MAX_RW_COUNT).
    pub fn user_vec(space: Arc<AddressSpace>, iov: Vec<(UserAddr, usize)>) -> IoDest<'a> {
        IoDest { to: Dest::User(UserBuffers::many(space, iov)) }
    }

    /// Bytes still wanted.
    pub fn remaining(&self) -> usize {
        match &self.to {
            Dest::Kernel { buf, at } => buf.len() - at,
            Dest::User(u) => u.remaining,
        }
    }

    /// Puts bytes: as many as fit and are writable. EFAULT if that is none of a non-empty `data`.
    pub fn put(&mut self, data: &[u8]) -> Result<usize> {
        match &mut self.to {
            Dest::Kernel { buf, at } => {
                let n = data.len().min(buf.len() - *at);
                if let (Some(to), Some(from)) = (buf.get_mut(*at..*at + n), data.get(..n)) {
                    to.copy_from_slice(from);
                }
                *at += n;
                Ok(n)
            }
            Dest::User(u) => u.transfer(data.len(), |space, addr, n, done| {
                data.get(done..done + n).map_or(0, |part| space.write_partial(addr, part))
            }),
        }
    }

    /// Puts `len` zeroes, as `put`.
    pub fn put_zeroes(&mut self, len: usize) -> Result<usize> {
        match &mut self.to {
            Dest::Kernel { buf, at } => {
                let n = len.min(buf.len() - *at);
                if let Some(to) = buf.get_mut(*at..*at + n) {
                    to.fill(0);
                }
                *at += n;
                Ok(n)
            }
            Dest::User(u) => u.transfer(len, |space, addr, n, _| space.zero_partial(addr, n)),
        }
    }

    /// Copies from guest-physical memory (a page-cache page), as `put`. `memory` is where `from` lies.
    pub fn put_phys(&mut self, memory: &dyn crate::platform::Memory, from: PhysRange) -> Result<usize> {
        match &mut self.to {
            Dest::Kernel { buf, at } => {
                let n = from.len.min(buf.len() - *at);
                if let Some(to) = buf.get_mut(*at..*at + n) {
                    memory.read(from.addr, to)?;
                }
                *at += n;
                Ok(n)
            }
            Dest::User(u) => u.transfer(from.len, |space, addr, n, done| {
                let base = from.addr.0 + done as u64;
                space.pieces(addr.0, n, super::fault::Access::WRITE, &mut |pa, n, at| {
                    memory.copy(PhysAddr(base + at as u64), pa, n)
                })
            }),
        }
    }

    /// For program buffers: up to `max` bytes of the destination made present, writable and pinned, without advancing. None for
    /// the sentry's own buffer. EFAULT if the first byte is not writable.
    pub fn pin(&mut self, max: usize) -> Result<Option<Pinned>> {
        match &mut self.to {
            Dest::Kernel { .. } => Ok(None),
            Dest::User(u) => u.pin(max, true).map(Some),
        }
    }

    /// Counts `n` bytes as put (after a direct transfer to pinned memory).
    pub fn advance(&mut self, n: usize) {
        match &mut self.to {
            Dest::Kernel { buf, at } => *at = at.saturating_add(n).min(buf.len()),
            Dest::User(u) => u.advance(n),
        }
    }
}

enum Source<'a> {
    Kernel(&'a [u8]),
    User(UserBuffers),
}

/// Where a write takes its bytes from. Mirrors [`IoDest`].
pub struct IoSource<'a> {
    from: Source<'a>,
}

impl<'a> IoSource<'a> {
    /// The sentry's own buffer.
    pub fn kernel(buf: &'a [u8]) -> IoSource<'a> {
        IoSource { from: Source::Kernel(buf) }
    }

    /// One buffer of the program.
    pub fn user(space: Arc<AddressSpace>, addr: UserAddr, len: usize) -> IoSource<'a> {
        IoSource { from: Source::User(UserBuffers::one(space, addr, len)) }
    }

    /// Several buffers of the program.
    pub fn user_vec(space: Arc<AddressSpace>, iov: Vec<(UserAddr, usize)>) -> IoSource<'a> {
        IoSource { from: Source::User(UserBuffers::many(space, iov)) }
    }

    /// Bytes still to take.
    pub fn remaining(&self) -> usize {
        match &self.from {
            Source::Kernel(rest) => rest.len(),
            Source::User(u) => u.remaining,
        }
    }

    /// Takes bytes: as many as `buf` holds and are readable. EFAULT if that is none of a non-empty rest.
    pub fn take(&mut self, buf: &mut [u8]) -> Result<usize> {
        match &mut self.from {
            Source::Kernel(rest) => {
                let n = buf.len().min(rest.len());
                let (now, later) = rest.split_at(n);
                if let Some(to) = buf.get_mut(..n) {
                    to.copy_from_slice(now);
                }
                *rest = later;
                Ok(n)
            }
            Source::User(u) => u.transfer(buf.len(), |space, addr, n, done| {
                buf.get_mut(done..done + n).map_or(0, |part| space.read_partial(addr, part))
            }),
        }
    }

    /// Takes bytes into guest-physical memory (a page-cache page), as `take`. `memory` is where `to` lies.
    pub fn take_phys(&mut self, memory: &dyn crate::platform::Memory, to: PhysRange) -> Result<usize> {
        match &mut self.from {
            Source::Kernel(rest) => {
                let n = to.len.min(rest.len());
                let (now, later) = rest.split_at(n);
                memory.write(to.addr, now)?;
                *rest = later;
                Ok(n)
            }
            Source::User(u) => u.transfer(to.len, |space, addr, n, done| {
                let base = to.addr.0 + done as u64;
                space.pieces(addr.0, n, super::fault::Access::READ, &mut |pa, n, at| {
                    memory.copy(pa, PhysAddr(base + at as u64), n)
                })
            }),
        }
    }

    /// Pins up to `max` bytes of the source for reading, without advancing. None for the sentry's own buffer.
    pub fn pin(&mut self, max: usize) -> Result<Option<Pinned>> {
        match &mut self.from {
            Source::Kernel(_) => Ok(None),
            Source::User(u) => u.pin(max, false).map(Some),
        }
    }

    /// Counts `n` bytes as taken.
    pub fn advance(&mut self, n: usize) {
        match &mut self.from {
            Source::Kernel(rest) => *rest = rest.get(n..).unwrap_or(&[]),
            Source::User(u) => u.advance(n),
        }
    }
}
