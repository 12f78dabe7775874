//! The host side of guest-physical memory: one reservation of host addresses in which guest-physical address `pa` lies at
//! `base + pa`. Owns every mmap, mprotect and madvise on it; never decides what lies where.
//!
//! Whatever is not in use is PROT_NONE, so an access through any guest-physical address below [`SPAN`] either reaches guest
//! memory or faults, and [`super::trycopy`] turns the fault into EFAULT.
#![allow(unsafe_code)]
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

use guest_abi::Errno;
use sentry::platform::PhysAddr;

use super::nudge::Nudge;

/// Bytes of guest-physical address space: 2^39, which every x86-64 processor's physical addresses reach.
pub const SPAN: u64 = 1 << 39;
/// Alignment of the reservation: guest huge pages may be backed by host huge pages.
const ALIGN: u64 = 2 << 20;

/// What part of the reservation is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Readable.
    Read,
    /// Readable and writable.
    ReadWrite,
}

impl Rights {
    fn prot(self) -> i32 {
        match self {
            Rights::Read => libc::PROT_READ,
            Rights::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

/// The reservation.
pub struct Region {
    raw: NonNull<u8>,
    raw_len: usize,
    base: NonNull<u8>,
    nudge: Nudge,
}

// SAFETY: the region is only addresses; all access to the bytes goes through raw pointers and assembly that assume nothing
// about concurrent access.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

fn last() -> io::Error {
    io::Error::last_os_error()
}

impl Region {
    /// Reserves addresses; takes no memory.
    pub fn reserve() -> io::Result<Region> {
        let raw_len = (SPAN + ALIGN) as usize;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let raw = unsafe { libc::mmap(ptr::null_mut(), raw_len, libc::PROT_NONE, flags, -1, 0) };
        if raw == libc::MAP_FAILED {
            return Err(last());
        }
        let raw = NonNull::new(raw.cast::<u8>()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let skip = raw.as_ptr().align_offset(ALIGN as usize);
        // SAFETY: `skip < ALIGN`, and the mapping is ALIGN longer than the span.
        let base = unsafe { raw.add(skip) };
        // SAFETY: advice on our own mapping; failure only makes core dumps larger.
        unsafe { libc::madvise(raw.as_ptr().cast(), raw_len, libc::MADV_DONTDUMP) };
        Ok(Region { raw, raw_len, base, nudge: Nudge::new() })
    }

    /// The host address of `len` bytes at `pa`, or EFAULT where they leave the span. The memory may be PROT_NONE.
    pub fn host(&self, pa: PhysAddr, len: usize) -> Result<*mut u8, Errno> {
        let end = pa.0.checked_add(len as u64).ok_or(Errno::EFAULT)?;
        if end > SPAN {
            return Err(Errno::EFAULT);
        }
        // SAFETY: `pa <= SPAN`, and the reservation is at least SPAN bytes from `base` on.
        Ok(unsafe { self.base.as_ptr().add(pa.0 as usize) })
    }

    /// Whether `addr` is inside the reservation.
    pub fn contains(&self, addr: usize) -> bool {
        addr.wrapping_sub(self.base.as_ptr() as usize) < SPAN as usize
    }

    fn fixed(&self, pa: PhysAddr, len: u64, prot: i32, flags: i32, fd: i32, offset: i64) -> io::Result<()> {
        let at = self.host(pa, len as usize).map_err(|e| io::Error::from_raw_os_error(e.raw()))?;
        // SAFETY: the range lies in our reservation (checked by `host`), so MAP_FIXED replaces only our own mapping. Nobody holds
        // Rust references into it: all access is by raw pointer.
        let got = unsafe { libc::mmap(at.cast(), len as usize, prot, flags | libc::MAP_FIXED, fd, offset) };
        if got == libc::MAP_FAILED { Err(last()) } else { Ok(()) }
    }

    /// Puts zeroed private memory behind a range.
    pub fn commit(&self, pa: PhysAddr, len: u64) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        self.fixed(pa, len, Rights::ReadWrite.prot(), flags, -1, 0)?;
        self.advise(pa, len, libc::MADV_DONTDUMP)?;
        Ok(())
    }

    /// Prepares committed memory for [`Region::forget`].
    pub fn cover(&self, pa: PhysAddr, len: u64) {
        if let Ok(at) = self.host(pa, len as usize) {
            self.nudge.cover(at, len);
        }
    }

    /// Asks for huge pages behind a range, which makes populating cheap; a host without them still works.
    pub fn prefer_huge(&self, pa: PhysAddr, len: u64) {
        let _ = self.advise(pa, len, libc::MADV_HUGEPAGE);
    }

    /// Maps a file's bytes from `offset` on, shared.
    pub fn map_file(&self, pa: PhysAddr, len: u64, rights: Rights, fd: BorrowedFd<'_>, offset: u64) -> io::Result<()> {
        let offset = i64::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        self.fixed(pa, len, rights.prot(), flags, fd.as_raw_fd(), offset)
    }

    /// Maps a file's bytes from `offset` on, privately: pages that are written, by `populate` too, become copies.
    pub fn map_file_private(&self, pa: PhysAddr, len: u64, fd: BorrowedFd<'_>, offset: u64) -> io::Result<()> {
        let offset = i64::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        self.fixed(pa, len, Rights::ReadWrite.prot(), flags, fd.as_raw_fd(), offset)
    }

    /// Takes away what is behind a range.
    pub fn decommit(&self, pa: PhysAddr, len: u64) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        self.fixed(pa, len, libc::PROT_NONE, flags, -1, 0)
    }

    fn advise(&self, pa: PhysAddr, len: u64, advice: i32) -> io::Result<()> {
        let at = self.host(pa, len as usize).map_err(|e| io::Error::from_raw_os_error(e.raw()))?;
        // SAFETY: the range is ours. The advices used drop contents at most, which no Rust object relies on.
        if unsafe { libc::madvise(at.cast(), len as usize, advice) } == 0 { Ok(()) } else { Err(last()) }
    }

    /// Gives private memory back to the host: it reads as zeroes afterwards. For file mappings drops only translations.
    pub fn discard(&self, pa: PhysAddr, len: u64) -> io::Result<()> {
        self.advise(pa, len, libc::MADV_DONTNEED)
    }

    /// Makes memory present and writable.
    pub fn populate(&self, pa: PhysAddr, len: u64) -> io::Result<()> {
        self.advise(pa, len, libc::MADV_POPULATE_WRITE)
    }

    /// Makes every vCPU drop its translations of private memory, by the cheapest way that the host has.
    pub fn forget(&self, pa: PhysAddr, len: u64) -> io::Result<()> {
        if let Ok(at) = self.host(pa, len as usize)
            && self.nudge.nudge(at, len)
        {
            return Ok(());
        }
        self.flicker(pa, len)
    }

    /// Makes every vCPU drop its translations of private memory: the rights change and change back, which the host kernel
    /// tells KVM. "Write" without "read" is chosen because on x86 it still admits reads and writes by everybody else.
    pub fn flicker(&self, pa: PhysAddr, len: u64) -> io::Result<()> {
        let at = self.host(pa, len as usize).map_err(|e| io::Error::from_raw_os_error(e.raw()))?;
        for prot in [libc::PROT_WRITE, libc::PROT_READ | libc::PROT_WRITE] {
            // SAFETY: the range is ours, and the memory stays accessible in both states.
            if unsafe { libc::mprotect(at.cast(), len as usize, prot) } != 0 {
                return Err(last());
            }
        }
        Ok(())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing can reach it any more.
        unsafe { libc::munmap(self.raw.as_ptr().cast(), self.raw_len) };
    }
}
