//! An address space: the tree of VMAs, and the operations of mmap(2) and its family.
use std::any::Any;
use std::sync::Arc;

use bitflags::bitflags;
use guest_abi::UserAddr;

use super::Mappable;
use crate::platform::{GuestSpace, Platform};
use crate::{Errno, Result};

bitflags! {
    /// PROT_* of mmap(2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Prot: u32 {
        #[allow(missing_docs)] const READ = 1;
        #[allow(missing_docs)] const WRITE = 2;
        #[allow(missing_docs)] const EXEC = 4;
    }
}

bitflags! {
    /// Properties of a mapping.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct MapFlags: u32 {
        /// MAP_SHARED.
        const SHARED = 1;
        /// MAP_FIXED: replace what is there.
        const FIXED = 2;
        /// MAP_FIXED_NOREPLACE.
        const FIXED_NOREPLACE = 4;
        /// MAP_GROWSDOWN, and the initial stack.
        const GROWSDOWN = 8;
        /// MAP_POPULATE or MAP_LOCKED.
        const POPULATE = 16;
        /// The initial stack (named so in /proc/PID/maps).
        const STACK = 32;
        /// MAP_NORESERVE.
        const NORESERVE = 64;
        /// MAP_LOCKED.
        const LOCKED = 128;
    }
}

/// What a mapping shows.
#[derive(Clone)]
pub enum MapSource {
    /// Zeroes.
    Anonymous,
    /// A file from a page-aligned offset on.
    File {
        /// Contents.
        object: Arc<dyn Mappable>,
        /// Byte offset of the first page.
        offset: u64,
        /// The open file description (`vfs::File`), kept for as long as the mapping lives; names it in /proc/PID/maps.
        file: Option<Arc<dyn MappedFile>>,
        /// Whether PROT_WRITE may ever be given to a shared mapping (the file was opened for writing).
        may_write: bool,
    },
    /// The kernel's own pages, such as `[vdso]` and `[vvar]`: frames owned by the kernel, never copied.
    Special {
        /// Name in /proc/PID/maps.
        name: &'static str,
        /// The frames, one a page.
        frames: Arc<[crate::platform::PhysAddr]>,
    },
}

/// An open file as a mapping keeps it.
pub trait MappedFile: Send + Sync + Any {
    /// Path for /proc/PID/maps.
    fn maps_path(&self) -> Vec<u8>;
    /// For downcasts to `vfs::File`.
    fn as_any(&self) -> &dyn Any;
}

/// A request to [`AddressSpace::map`].
pub struct MapRequest {
    /// Wanted address (a hint unless a FIXED flag is set).
    pub addr: UserAddr,
    /// Bytes, rounded up to pages; 0 is EINVAL.
    pub len: u64,
    /// Rights.
    pub prot: Prot,
    /// Properties.
    pub flags: MapFlags,
    /// Contents.
    pub source: MapSource,
}

/// One VMA as /proc/PID/maps shows it.
#[derive(Clone)]
pub struct VmaInfo {
    /// First address.
    pub start: u64,
    /// End, exclusive.
    pub end: u64,
    /// Rights.
    pub prot: Prot,
    /// Properties.
    pub flags: MapFlags,
    /// Contents.
    pub source: MapSource,
    /// Byte offset in the file.
    pub offset: u64,
    /// Bytes with a page present (only by `maps(true)`).
    pub resident: u64,
    /// `[heap]`, `[stack]`, `[vdso]`, a path, or empty.
    pub name: Vec<u8>,
}

/// The signal a failed access deserves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultSignal {
    /// SIGSEGV, SEGV_MAPERR.
    NotMapped,
    /// SIGSEGV, SEGV_ACCERR.
    Access,
    /// SIGBUS, BUS_ADRERR: past the end of a mapped file.
    Bus,
    /// The sandbox's memory limit: the group is killed as by the OOM killer.
    OutOfMemory,
}

/// An address space. All methods lock inside.
pub struct AddressSpace {
    pages: Arc<dyn GuestSpace>,
}

#[allow(unused_variables, missing_docs)]
impl AddressSpace {
    /// An empty address space.
    pub fn new(platform: &Arc<dyn Platform>) -> Result<Arc<AddressSpace>> {
        todo!()
    }

    /// A copy-on-write copy for fork(2).
    pub fn fork(self: &Arc<Self>) -> Result<Arc<AddressSpace>> {
        todo!()
    }

    /// The page tables, for `Platform::enter`.
    pub fn pages(&self) -> &dyn GuestSpace {
        &*self.pages
    }

    /// mmap(2) after its arguments were decoded. Gives the address.
    pub fn map(self: &Arc<Self>, request: MapRequest) -> Result<UserAddr> {
        todo!()
    }

    /// munmap(2).
    pub fn unmap(&self, addr: UserAddr, len: u64) -> Result<()> {
        todo!()
    }

    /// Drops every mapping (exec, exit); frames are released at once.
    pub fn clear(&self) {
        todo!()
    }

    /// Drops entries that show `start..end` bytes of a truncated or copied-up object.
    pub fn unmap_object(&self, object: &dyn Mappable, start: u64, end: u64) {
        todo!()
    }

    /// Makes an access possible, or says which signal it deserves. `write` and `exec` as in the page fault's error code.
    pub fn fault(self: &Arc<Self>, addr: UserAddr, write: bool, exec: bool) -> Result<(), FaultSignal> {
        todo!()
    }

    /// Sets the start of the heap (exec).
    pub fn set_brk_base(&self, addr: UserAddr) {
        todo!()
    }

    /// brk(2): gives the new (or unchanged) break.
    pub fn brk(self: &Arc<Self>, addr: UserAddr) -> UserAddr {
        todo!()
    }

    /// All VMAs in order; `resident` counts present pages too.
    pub fn maps(&self, resident: bool) -> Vec<VmaInfo> {
        todo!()
    }

    /// Total mapped bytes and resident bytes.
    pub fn sizes(&self) -> (u64, u64) {
        todo!()
    }

    /// The identity of the futex word at `addr`: private (space, address) or shared (object or frame, offset).
    pub fn futex_key(self: &Arc<Self>, addr: UserAddr, shared: bool) -> Result<FutexKey> {
        todo!()
    }
}

/// Identity of a futex word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FutexKey {
    /// Private to an address space: its identity and the address.
    Private(u64, u64),
    /// In a shared mapping: the object's key and byte offset.
    Shared((u64, u64), u64),
}
