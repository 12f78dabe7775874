//! Windows: extents of host files mapped into guest-physical memory. Owns which extent lies where, and how much of private
//! ones may be copied; never a file's contents.
//!
//! One window serves all mappings of its extent, because the host bounds how many mappings a process may have.
use std::collections::{BTreeSet, HashMap};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use guest_abi::Errno;
use guest_abi::layout::PAGE_SIZE;
use sentry::lock::{Mutex, Rank};
use sentry::platform::PhysAddr;
use sentry::platform::host::{WINDOW_LEN, Window};

use super::GuestMemory;
use super::region::{Region, Rights};
use super::slots::{Area, Registry, Span};

/// Host mappings left for everything else, windows split by copies among it.
const SPARE_MAPPINGS: u64 = 8192;

/// Copied pages of private windows at most (128 MiB); beyond, they show the page cache.
const COPIES: usize = 32768;
/// Pages copied together (64 KiB).
const BLOCK: usize = 16;

/// How a window shows its extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The page cache, read-only.
    Read,
    /// The page cache.
    Write,
    /// For private mappings of the file as of a version.
    Private(u64),
}

/// What a window shows: (device, inode, index of the extent, kind).
pub type Key = (u64, u64, u64, Kind);

#[derive(Default)]
struct State {
    live: HashMap<Key, Weak<FileWindow>>,
    free: BTreeSet<u32>,
    places: Vec<Option<Key>>,
    /// Places whose host mapping does not join that of the place before.
    borders: usize,
}

/// Whether the host keeps two neighbours as one mapping.
fn join(a: Option<Key>, b: Option<Key>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => (a.0, a.1, a.3) == (b.0, b.1, b.3) && a.2.checked_add(1) == Some(b.2),
        _ => false,
    }
}

impl State {
    fn place(&self, number: usize) -> Option<Key> {
        self.places.get(number).copied().flatten()
    }

    fn put(&mut self, number: u32, key: Option<Key>) {
        let n = number as usize;
        let before = n.checked_sub(1).and_then(|n| self.place(n));
        let (old, after) = (self.place(n), self.place(n + 1));
        let borders = |at: Option<Key>| usize::from(!join(before, at)) + usize::from(!join(at, after));
        self.borders = self.borders + borders(key) - borders(old);
        if let Some(place) = self.places.get_mut(n) {
            *place = key;
        }
    }
}

/// All windows of a sandbox.
pub struct Windows {
    area: Area,
    span: Span,
    state: Mutex<State>,
    /// Most places, and most borders between them.
    most: (usize, usize),
    copies: AtomicUsize,
}

/// A mapped extent.
pub struct FileWindow {
    memory: Arc<GuestMemory>,
    key: Key,
    base: PhysAddr,
    number: u32,
    /// Blocks that were copied, one bit each.
    copied: AtomicU32,
}

impl Windows {
    fn base(&self, number: u32) -> PhysAddr {
        PhysAddr(self.span.base + u64::from(number) * WINDOW_LEN)
    }

    /// No windows yet.
    pub fn new(span: Span) -> Windows {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        let maps: u64 = text.trim().parse().unwrap_or(65530);
        // There are two areas of windows.
        let most = ((span.len / WINDOW_LEN) as usize, (maps.saturating_sub(SPARE_MAPPINGS) / 2).max(64) as usize);
        Windows {
            area: Area::new(span, 64 << 20, 1 << 30, false),
            span,
            state: Mutex::new(Rank::Frames, State::default()),
            most,
            copies: AtomicUsize::new(0),
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
        if state.borders + 2 > self.most.1 {
            return Err(Errno::ENOMEM);
        }
        let number = if let Some(n) = state.free.pop_first() {
            n
        } else {
            let n = state.places.len();
            let end = (n as u64 + 1) * WINDOW_LEN;
            let grown = self.area.grown();
            if n >= self.most.0 || (end > grown && !self.area.grow(registry, region, grown, self.span.len)) {
                return Err(Errno::ENOMEM);
            }
            state.places.push(None);
            n as u32
        };
        let base = self.base(number);
        let mapped = match key.3 {
            Kind::Read => region.map_file(base, WINDOW_LEN, Rights::Read, fd, offset),
            Kind::Write => region.map_file(base, WINDOW_LEN, Rights::ReadWrite, fd, offset),
            Kind::Private(_) => region.map_file_private(base, WINDOW_LEN, fd, offset),
        };
        if let Err(e) = mapped {
            state.free.insert(number);
            return Err(Errno::from_raw(e.raw_os_error().unwrap_or(libc::ENOMEM)));
        }
        state.put(number, Some(key));
        let window = Arc::new(FileWindow { memory: memory.clone(), key, base, number, copied: AtomicU32::new(0) });
        state.live.insert(key, Arc::downgrade(&window));
        Ok(window)
    }

    /// Turns the blocks around pages that are about to be used into copies.
    fn copy(&self, region: &Region, window: &FileWindow, pa: PhysAddr, pages: usize) {
        let Some(offset) = pa.0.checked_sub(window.base.0) else { return };
        let first = (offset / PAGE_SIZE) as usize / BLOCK;
        let end = ((offset / PAGE_SIZE) as usize + pages).div_ceil(BLOCK).min(32);
        if first >= end {
            return;
        }
        let wanted = (u32::MAX >> (32 - (end - first))) << first;
        let known = window.copied.load(Ordering::Relaxed);
        let count = (wanted & !known).count_ones() as usize * BLOCK;
        if count == 0 || self.copies.fetch_add(count, Ordering::Relaxed) + count > COPIES {
            self.copies.fetch_sub(count, Ordering::Relaxed);
            return;
        }
        let new = wanted & !window.copied.fetch_or(wanted, Ordering::Relaxed);
        // Others may have claimed some meanwhile.
        self.copies.fetch_sub(count - new.count_ones() as usize * BLOCK, Ordering::Relaxed);
        let mut block = first;
        while block < end {
            let run = (new >> block).trailing_ones() as usize;
            if run == 0 {
                block += 1;
                continue;
            }
            let run = run.min(end - block);
            let bytes = BLOCK as u64 * PAGE_SIZE;
            // Fails at the end of the file after doing what is before it; what is not copied shows the page cache.
            let _ = region.populate(PhysAddr(window.base.0 + block as u64 * bytes), run as u64 * bytes);
            block += run;
        }
    }

    fn close(&self, region: &Region, window: &FileWindow) {
        let mut state = self.state.lock();
        if state.live.get(&window.key).is_some_and(|w| w.strong_count() == 0) {
            state.live.remove(&window.key);
        }
        let copied = window.copied.load(Ordering::Relaxed).count_ones() as usize;
        self.copies.fetch_sub(copied * BLOCK, Ordering::Relaxed);
        match region.decommit(window.base, WINDOW_LEN) {
            Ok(()) => {
                state.put(window.number, None);
                state.free.insert(window.number);
            }
            Err(e) => log::warn!("a file window cannot be unmapped: {e}"),
        }
    }
}

impl Window for FileWindow {
    fn base(&self) -> PhysAddr {
        self.base
    }

    fn expect(&self, pa: PhysAddr, pages: usize) {
        if let Kind::Private(_) = self.key.3
            && self.memory.tables.shadow()
        {
            self.memory.private_windows.copy(&self.memory.region, self, pa, pages);
        }
    }
}

impl Drop for FileWindow {
    fn drop(&mut self) {
        self.memory.close_window(self);
    }
}

impl GuestMemory {
    pub(super) fn close_window(&self, window: &FileWindow) {
        match window.key.3 {
            Kind::Private(_) => self.private_windows.close(&self.region, window),
            Kind::Read | Kind::Write => self.windows.close(&self.region, window),
        }
    }
}
