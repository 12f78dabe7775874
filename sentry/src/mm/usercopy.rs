//! The only judge of user pointers: copies between the program's memory and the sentry.
#![allow(unused_variables, missing_docs)]
use std::sync::Arc;

use guest_abi::{UserAddr, UserPtr};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::AddressSpace;
use crate::platform::PhysRange;
use crate::{Errno, Result};

impl AddressSpace {
    /// Copies in. EFAULT if any byte is not readable.
    pub fn read_bytes(self: &Arc<Self>, addr: UserAddr, buf: &mut [u8]) -> Result<()> {
        todo!()
    }

    /// Copies out. EFAULT if any byte is not writable (bytes before it may have been written).
    pub fn write_bytes(self: &Arc<Self>, addr: UserAddr, buf: &[u8]) -> Result<()> {
        todo!()
    }

    /// Copies in as much as is readable; gives the count.
    pub fn read_partial(self: &Arc<Self>, addr: UserAddr, buf: &mut [u8]) -> usize {
        todo!()
    }

    /// Reads a value.
    pub fn read<T: FromBytes>(self: &Arc<Self>, ptr: UserPtr<T>) -> Result<T> {
        todo!()
    }

    /// Writes a value.
    pub fn write<T: IntoBytes + Immutable>(self: &Arc<Self>, ptr: UserPtr<T>, value: &T) -> Result<()> {
        todo!()
    }

    /// Reads `count` values; the caller bounds `count`.
    pub fn read_array<T: FromBytes>(self: &Arc<Self>, ptr: UserPtr<T>, count: usize) -> Result<Vec<T>> {
        todo!()
    }

    /// Reads a string up to its NUL (not included); `too_long` if there is none within `max` bytes.
    pub fn read_cstr(self: &Arc<Self>, addr: UserAddr, max: usize, too_long: Errno) -> Result<Vec<u8>> {
        todo!()
    }

    /// A path argument: at most 4095 bytes, ENAMETOOLONG beyond.
    pub fn read_path(self: &Arc<Self>, addr: UserAddr) -> Result<Vec<u8>> {
        self.read_cstr(addr, 4096, Errno::ENAMETOOLONG)
    }

    /// Atomic load of an aligned word (futex).
    pub fn load_u32(self: &Arc<Self>, addr: UserAddr) -> Result<u32> {
        todo!()
    }

    /// Atomic compare-and-exchange of an aligned word; gives the value found.
    pub fn compare_exchange_u32(self: &Arc<Self>, addr: UserAddr, old: u32, new: u32) -> Result<u32> {
        todo!()
    }

    /// Writes regardless of the VMA's rights, breaking copy-on-write privately (ptrace POKE, /proc/PID/mem).
    pub fn write_forced(self: &Arc<Self>, addr: UserAddr, buf: &[u8]) -> Result<()> {
        todo!()
    }

    /// Reads regardless of PROT_READ (ptrace PEEK, /proc/PID/mem).
    pub fn read_forced(self: &Arc<Self>, addr: UserAddr, buf: &mut [u8]) -> Result<()> {
        todo!()
    }
}

/// Pages held so that the host may read or write them while others unmap them.
pub struct Pinned {
    ranges: Vec<PhysRange>,
}

impl Pinned {
    /// The memory.
    pub fn ranges(&self) -> &[PhysRange] {
        &self.ranges
    }
}

/// Where a read puts its bytes: the program's buffers, or the sentry's.
pub struct IoDest<'a> {
    kernel: &'a mut [u8],
}

impl<'a> IoDest<'a> {
    /// The sentry's own buffer.
    pub fn kernel(buf: &'a mut [u8]) -> IoDest<'a> {
        IoDest { kernel: buf }
    }

    /// One buffer of the program.
    pub fn user(space: Arc<AddressSpace>, addr: UserAddr, len: usize) -> IoDest<'a> {
        todo!()
    }

    /// Several buffers of the program, lengths already bounded (IOV_MAX entries, a total of at most MAX_RW_COUNT).
    pub fn user_vec(space: Arc<AddressSpace>, iov: Vec<(UserAddr, usize)>) -> IoDest<'a> {
        todo!()
    }

    /// Bytes still wanted.
    pub fn remaining(&self) -> usize {
        todo!()
    }

    /// Puts bytes: as many as fit and are writable. EFAULT if that is none of a non-empty `data`.
    pub fn put(&mut self, data: &[u8]) -> Result<usize> {
        todo!()
    }

    /// Puts `len` zeroes, as `put`.
    pub fn put_zeroes(&mut self, len: usize) -> Result<usize> {
        todo!()
    }

    /// Copies from guest-physical memory (a page-cache page), as `put`.
    pub fn put_phys(&mut self, from: PhysRange) -> Result<usize> {
        todo!()
    }

    /// For program buffers: up to `max` bytes of the destination made present, writable and pinned, without advancing. None for
    /// the sentry's own buffer. EFAULT if the first byte is not writable.
    pub fn pin(&mut self, max: usize) -> Result<Option<Pinned>> {
        todo!()
    }

    /// Counts `n` bytes as put (after a direct transfer to pinned memory).
    pub fn advance(&mut self, n: usize) {
        todo!()
    }
}

/// Where a write takes its bytes from. Mirrors [`IoDest`].
pub struct IoSource<'a> {
    kernel: &'a [u8],
}

impl<'a> IoSource<'a> {
    /// The sentry's own buffer.
    pub fn kernel(buf: &'a [u8]) -> IoSource<'a> {
        IoSource { kernel: buf }
    }

    /// One buffer of the program.
    pub fn user(space: Arc<AddressSpace>, addr: UserAddr, len: usize) -> IoSource<'a> {
        todo!()
    }

    /// Several buffers of the program.
    pub fn user_vec(space: Arc<AddressSpace>, iov: Vec<(UserAddr, usize)>) -> IoSource<'a> {
        todo!()
    }

    /// Bytes still to take.
    pub fn remaining(&self) -> usize {
        todo!()
    }

    /// Takes bytes: as many as `buf` holds and are readable. EFAULT if that is none of a non-empty rest.
    pub fn take(&mut self, buf: &mut [u8]) -> Result<usize> {
        todo!()
    }

    /// Takes bytes into guest-physical memory (a page-cache page), as `take`.
    pub fn take_phys(&mut self, to: PhysRange) -> Result<usize> {
        todo!()
    }

    /// Pins up to `max` bytes of the source for reading, without advancing. None for the sentry's own buffer.
    pub fn pin(&mut self, max: usize) -> Result<Option<Pinned>> {
        todo!()
    }

    /// Counts `n` bytes as taken.
    pub fn advance(&mut self, n: usize) {
        todo!()
    }
}
