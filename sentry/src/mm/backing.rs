//! What a file must offer to be mapped.
use std::collections::HashMap;
use std::sync::{Arc, Weak};

use super::AddressSpace;
use crate::lock::{Mutex, Rank};
use crate::platform::PhysAddr;
use crate::{Errno, Result};

/// A page of a mapped object.
pub enum MappedPage {
    /// A frame; the caller receives one reference of its own.
    Frame(PhysAddr),
    /// A page inside a window that `keep` holds mapped; the caller keeps `keep` for as long as an entry names the page.
    Window {
        /// The page.
        pa: PhysAddr,
        /// The first page-aligned file offset and the physical address of the whole run that may be mapped ahead with it,
        /// and its length in pages (pages past the end of the file excluded).
        run: (u64, PhysAddr, usize),
        /// Keeps the window mapped.
        keep: Arc<dyn crate::platform::host::Window>,
    },
}

/// The spaces that have mapped an object, for [`Mappable::add_mapper`]. They are held weakly.
pub struct Mappers {
    spaces: Mutex<HashMap<usize, Weak<AddressSpace>>>,
}

impl Default for Mappers {
    fn default() -> Self {
        Mappers { spaces: Mutex::new(Rank::Mapping, HashMap::new()) }
    }
}

impl Mappers {
    /// Remembers `space`.
    pub fn add(&self, space: &Arc<AddressSpace>) {
        let mut spaces = self.spaces.lock();
        spaces.insert(Arc::as_ptr(space) as usize, Arc::downgrade(space));
        // What is gone is looked for when there is twice as much: O(1) on average.
        if spaces.len() >= 64 && spaces.len().is_power_of_two() {
            spaces.retain(|_, s| s.strong_count() > 0);
        }
    }

    /// Those that are still there.
    pub fn all(&self) -> Vec<Arc<AddressSpace>> {
        self.spaces.lock().values().filter_map(Weak::upgrade).collect()
    }
}

/// An object that can be mapped: a file's contents. Identity (for shared futexes and /proc/PID/maps) is `key`.
///
/// All are called with an address space locked: implementations take locks of rank `Mapping` and above only, and copy to or
/// from no user memory.
pub trait Mappable: Send + Sync {
    /// (device, inode) as stat(2) gives them; also the identity for shared futex keys.
    fn key(&self) -> (u64, u64);
    /// The page at byte offset `offset` (page-aligned). `write` when a shared mapping is about to be written: the
    /// object must then give the very page that all sharers see and mark itself changed. EFAULT past the end of the
    /// object (the program gets SIGBUS).
    fn page(&self, offset: u64, write: bool) -> Result<MappedPage>;
    /// As `page(offset, false)`, for private mappings only: whether a later change of the object shows there is unspecified.
    fn private_page(&self, offset: u64) -> Result<MappedPage> {
        self.page(offset, false)
    }
    /// Length in bytes now.
    fn size(&self) -> u64;
    /// Whether a page mapped for reading must stay read-only until `page(_, true)` was asked for it. False lets a shared
    /// writable mapping be written with no further notice.
    fn write_notify(&self) -> bool {
        true
    }
    /// Frees `start..end` (page-aligned) so that it reads as zeroes; for MADV_REMOVE. The caller unmaps its own space; the
    /// object tells other mappers.
    fn punch_hole(&self, start: u64, end: u64) -> Result<()> {
        let _ = (start, end);
        Err(Errno::EOPNOTSUPP)
    }
    /// Whether the page at `offset` is in memory, for mincore(2).
    fn is_resident(&self, offset: u64) -> bool {
        offset < self.size()
    }
    /// Writes changes back, for msync(2).
    fn sync(&self) -> Result<()> {
        Ok(())
    }
    /// `space` has mapped part of the object (once per space, weakly remembered), so that a truncation can
    /// call [`AddressSpace::unmap_object`].
    fn add_mapper(&self, space: &Arc<AddressSpace>);
}
