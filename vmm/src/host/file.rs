//! Open regular files of the host. Owns the descriptor; page-cache sharing is `memory::windows`'.
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use guest_abi::Errno;
use guest_abi::file::MAX_RW_COUNT;
use guest_abi::types::Stat;
use sentry::platform::PhysRange;
use sentry::platform::host::{HostFile, Window};

use super::vectored::{self, Buffers, Way};
use super::{errno, stat};
use crate::memory::GuestMemory;

/// An open file.
pub struct RegularFile {
    fd: OwnedFd,
    memory: Arc<GuestMemory>,
    key: (u64, u64),
    writable: bool,
}

impl RegularFile {
    /// Takes a descriptor whose (device, inode) is `key`.
    pub fn new(fd: OwnedFd, memory: Arc<GuestMemory>, key: (u64, u64), writable: bool) -> RegularFile {
        RegularFile { fd, memory, key, writable }
    }
}

impl HostFile for RegularFile {
    fn stat(&self) -> Result<Stat, Errno> {
        rustix::fs::fstat(&self.fd).map(|s| stat(&s)).map_err(errno)
    }

    fn read_phys(&self, offset: u64, dst: &[PhysRange]) -> Result<usize, Errno> {
        vectored::read(self.fd.as_fd(), &Buffers::guest(&self.memory, dst, MAX_RW_COUNT)?, Way::At(offset))
    }

    fn read(&self, offset: u64, dst: &mut [u8]) -> Result<usize, Errno> {
        vectored::read(self.fd.as_fd(), &Buffers::filling(dst), Way::At(offset))
    }

    fn write_phys(&self, offset: u64, src: &[PhysRange]) -> Result<usize, Errno> {
        vectored::write(self.fd.as_fd(), &Buffers::guest(&self.memory, src, MAX_RW_COUNT)?, Way::At(offset))
    }

    fn write(&self, offset: u64, src: &[u8]) -> Result<usize, Errno> {
        vectored::write(self.fd.as_fd(), &Buffers::sending(src, MAX_RW_COUNT), Way::At(offset))
    }

    fn truncate(&self, len: u64) -> Result<(), Errno> {
        rustix::fs::ftruncate(&self.fd, len).map_err(errno)
    }

    fn sync(&self, data_only: bool) -> Result<(), Errno> {
        if data_only { rustix::fs::fdatasync(&self.fd) } else { rustix::fs::fsync(&self.fd) }.map_err(errno)
    }

    fn window(&self, index: u64) -> Result<Arc<dyn Window>, Errno> {
        self.memory.window(self.fd.as_fd(), self.key, index, self.writable)
    }

    fn private_window(&self, index: u64, version: u64) -> Result<Arc<dyn Window>, Errno> {
        self.memory.private_window(self.fd.as_fd(), self.key, index, version)
    }
}
