//! Shared anonymous memory (MAP_SHARED | MAP_ANONYMOUS): an object whose frames all mappers see. Owns its frames.
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::BTreeMap;
use std::sync::Arc;

use guest_abi::layout::PAGE_SIZE;

use super::backing::{Mappable, MappedPage};
use super::{AddressSpace, PAGE_MASK};
use crate::lock::{Mutex, Rank};
use crate::platform::{PhysAddr, Platform};
use crate::{Errno, Result};

/// The device number of shared anonymous memory; no file system has it.
pub const SHARED_ANONYMOUS_DEV: u64 = u64::MAX;

/// One region of shared anonymous memory.
pub struct SharedAnonymous {
    platform: Arc<dyn Platform>,
    id: u64,
    len: u64,
    frames: Mutex<BTreeMap<u64, PhysAddr>>,
}

impl SharedAnonymous {
    /// A region of `len` bytes, all zero.
    pub fn new(platform: Arc<dyn Platform>, len: u64) -> Arc<SharedAnonymous> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Arc::new(SharedAnonymous { platform, id, len, frames: Mutex::new(Rank::PageCache, BTreeMap::new()) })
    }
}

impl SharedAnonymous {
    /// Pages in memory.
    pub fn resident_pages(&self) -> u64 {
        self.frames.lock().len() as u64
    }
}

impl Drop for SharedAnonymous {
    fn drop(&mut self) {
        let frames: Vec<_> = self.frames.get_mut().values().copied().collect();
        self.platform.memory().release(&frames);
    }
}

impl Mappable for SharedAnonymous {
    fn key(&self) -> (u64, u64) {
        (SHARED_ANONYMOUS_DEV, self.id)
    }

    fn page(&self, offset: u64, _write: bool) -> Result<MappedPage> {
        if offset >= self.len {
            return Err(Errno::EFAULT);
        }
        let memory = self.platform.memory();
        let mut frames = self.frames.lock();
        let pa = if let Some(pa) = frames.get(&(offset & PAGE_MASK)) {
            *pa
        } else {
            let pa = memory.alloc()?;
            frames.insert(offset & PAGE_MASK, pa);
            pa
        };
        memory.share(pa);
        Ok(MappedPage::Frame(pa))
    }

    fn size(&self) -> u64 {
        self.len
    }

    fn write_notify(&self) -> bool {
        false
    }

    fn punch_hole(&self, start: u64, end: u64) -> Result<()> {
        let gone: Vec<_> = {
            let mut frames = self.frames.lock();
            let pages: Vec<_> = frames.range(start..end.max(start)).map(|(o, _)| *o).collect();
            pages.into_iter().filter_map(|o| frames.remove(&o)).collect()
        };
        self.platform.memory().release(&gone);
        Ok(())
    }

    fn is_resident(&self, offset: u64) -> bool {
        self.frames.lock().contains_key(&(offset & !(PAGE_SIZE - 1)))
    }

    // Never truncated, so nobody needs to be told.
    fn add_mapper(&self, _space: &Arc<AddressSpace>) {}
}
