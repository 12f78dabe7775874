//! Windows: extents of host files mapped into guest-physical memory. Owns which extent lies where; never a file's contents.
//!
//! One window serves all mappings of its extent, because the host bounds how many mappings a process may have.
use std::collections::{BTreeSet, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use guest_abi::Errno;
use sentry::lock::{Mutex, Rank};
use sentry::platform::PhysAddr;
use sentry::platform::host::{WINDOW_LEN, Window};

use super::GuestMemory;
use super::region::{Region, Rights};
use super::slots::{Area, Registry, WINDOWS};

/// Host mappings left for everything else.
const SPARE_MAPPINGS: u64 = 8192;

/// What a window shows: (device, inode, index of the extent, writable).
pub type Key = (u64, u64, u64, bool);

#[derive(Default)]
struct State {
    live: HashMap<Key, Weak<FileWindow>>,
    free: BTreeSet<u32>,
    fresh: u32,
}

/// All windows of a sandbox.
pub struct Windows {
    area: Area,
    state: Mutex<State>,
    most: u32,
}

/// A mapped extent.
pub struct FileWindow {
    memory: Arc<GuestMemory>,
    key: Key,
    number: u32,
}

fn base(number: u32) -> PhysAddr {
    PhysAddr(WINDOWS.base + u64::from(number) * WINDOW_LEN)
}

impl Windows {
    /// No windows yet.
    pub fn new() -> Windows {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        let maps: u64 = text.trim().parse().unwrap_or(65530);
        // Each window may cost two mappings: its own and the gap behind it.
        let most = (maps.saturating_sub(SPARE_MAPPINGS) / 2).clamp(64, WINDOWS.len / WINDOW_LEN) as u32;
        Windows {
            area: Area::new(WINDOWS, 64 << 20, 1 << 30, false),
            state: Mutex::new(Rank::Frames, State::default()),
            most,
        }
    }

    /// Live windows.
    pub fn count(&self) -> usize {
        self.state.lock().live.len()
    }

    /// Whether `pa` lies in the area's slots.
    pub fn contains(&self, pa: PhysAddr) -> bool {
        self.area.covers(pa, 1)
    }

    /// The window of an extent of the file `fd`, which `key` identifies. ENOMEM when no more can be mapped.
    pub fn get(
        &self,
        memory: &Arc<GuestMemory>,
        registry: &Registry,
        region: &Region,
        fd: BorrowedFd<'_>,
        key: Key,
    ) -> Result<Arc<FileWindow>, Errno> {
        let offset = key.2.checked_mul(WINDOW_LEN).ok_or(Errno::EOVERFLOW)?;
        // A handle that turns out to be the last one must be dropped after the lock.
        let mut state = self.state.lock();
        if let Some(w) = state.live.get(&key).and_then(Weak::upgrade) {
            return Ok(w);
        }
        let number = if let Some(n) = state.free.pop_first() {
            n
        } else {
            let n = state.fresh;
            let end = (u64::from(n) + 1) * WINDOW_LEN;
            let grown = self.area.grown();
            if n >= self.most || (end > grown && !self.area.grow(registry, region, grown, WINDOWS.len)) {
                return Err(Errno::ENOMEM);
            }
            state.fresh += 1;
            n
        };
        let rights = if key.3 { Rights::ReadWrite } else { Rights::Read };
        if let Err(e) = region.map_file(base(number), WINDOW_LEN, rights, fd, offset) {
            state.free.insert(number);
            return Err(Errno::from_raw(e.raw_os_error().unwrap_or(libc::ENOMEM)));
        }
        let window = Arc::new(FileWindow { memory: memory.clone(), key, number });
        state.live.insert(key, Arc::downgrade(&window));
        Ok(window)
    }

    fn close(&self, region: &Region, window: &FileWindow) {
        let mut state = self.state.lock();
        if state.live.get(&window.key).is_some_and(|w| w.strong_count() == 0) {
            state.live.remove(&window.key);
        }
        match region.decommit(base(window.number), WINDOW_LEN) {
            Ok(()) => {
                state.free.insert(window.number);
            }
            Err(e) => log::warn!("a file window cannot be unmapped: {e}"),
        }
    }
}

impl Default for Windows {
    fn default() -> Self {
        Windows::new()
    }
}

impl Window for FileWindow {
    fn base(&self) -> PhysAddr {
        base(self.number)
    }
}

impl Drop for FileWindow {
    fn drop(&mut self) {
        self.memory.close_window(self);
    }
}

impl GuestMemory {
    pub(super) fn close_window(&self, window: &FileWindow) {
        self.windows.close(&self.region, window);
    }
}
