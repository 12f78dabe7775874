//! The contents of one regular host file: reads, writes, and windows that mappings share.
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use guest_abi::layout::PAGE_SIZE;
use guest_abi::types::Stat;

use super::HostInode;
use crate::fs::recent::Recent;
use crate::lock::{Mutex, Rank};
use crate::mm::backing::MappedPage;
use crate::mm::{AddressSpace, IoDest, IoSource, Mappable, Mappers};
use crate::platform::host::{HostFile, WINDOW_LEN, Window};
use crate::platform::{PhysAddr, PhysRange};
use crate::{Errno, Result};

/// Bytes moved by one host call into pinned program memory.
const DIRECT_CHUNK: usize = 4 << 20;
/// Bytes moved by one host call through the sentry's own memory.
const COPY_CHUNK: usize = 128 << 10;
/// Below this a copy is cheaper than pinning pages.
const DIRECT_MIN: usize = 2048;

/// How a window shows a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Access {
    Read,
    Write,
    /// For private mappings of the file as it was when it had this version.
    Private(u64),
}

/// Contents of a regular host file; one object for one (device, inode) of a tree.
pub struct Content {
    file: Arc<dyn HostFile>,
    writable: OnceLock<Arc<dyn HostFile>>,
    key: (u64, u64),
    /// Whether the tree can be written, so that mappers must be known.
    tracked: bool,
    windows: Mutex<HashMap<(u64, Access), Weak<dyn Window>>>,
    recent: Arc<Mutex<Recent<Arc<dyn Window>>>>,
    mappers: Mappers,
}

impl Content {
    pub(super) fn new(
        file: Arc<dyn HostFile>,
        key: (u64, u64),
        tracked: bool,
        recent: Arc<Mutex<Recent<Arc<dyn Window>>>>,
    ) -> Content {
        Content {
            file,
            writable: OnceLock::new(),
            key,
            tracked,
            windows: Mutex::new(Rank::PageCache, HashMap::new()),
            recent,
            mappers: Mappers::default(),
        }
    }

    pub(super) fn open_for_writing(&self, open: impl FnOnce() -> Result<Arc<dyn HostFile>>) -> Result<()> {
        if self.writable.get().is_none() {
            let file = open()?;
            let st = file.stat()?;
            if (st.dev, st.ino) != self.key {
                return Err(Errno::ESTALE);
            }
            let _ = self.writable.set(file);
        }
        Ok(())
    }

    fn writable(&self) -> Result<&Arc<dyn HostFile>> {
        self.writable.get().ok_or(Errno::EROFS)
    }

    /// fstat of the host file.
    pub fn stat(&self) -> Result<Stat> {
        self.file.stat()
    }

    /// Length now.
    pub fn length(&self) -> Result<u64> {
        Ok(u64::try_from(self.file.stat()?.size).unwrap_or(0))
    }

    /// Reads at `offset` into guest-physical memory.
    pub fn read_phys(&self, offset: u64, to: PhysRange) -> Result<usize> {
        self.file.read_phys(offset, &[to])
    }

    /// Reads at `offset` up to `max` bytes; 0 at the end of the file.
    pub fn read(&self, dst: &mut IoDest<'_>, offset: u64, max: usize) -> Result<usize> {
        let mut total = 0;
        let mut buffer = Vec::new();
        while total < max {
            let wanted = dst.remaining().min(max - total);
            if wanted == 0 {
                break;
            }
            let step = self.read_step(dst, offset.saturating_add(total as u64), wanted, &mut buffer);
            match step {
                Ok((0, _)) => break,
                Ok((n, asked)) => {
                    total += n;
                    if n < asked {
                        break;
                    }
                }
                Err(e) if total == 0 => return Err(e),
                Err(_) => break,
            }
        }
        Ok(total)
    }

    /// One host call: bytes had and bytes asked for.
    fn read_step(&self, dst: &mut IoDest<'_>, at: u64, wanted: usize, buffer: &mut Vec<u8>) -> Result<(usize, usize)> {
        if wanted >= DIRECT_MIN
            && let Some(pinned) = dst.pin(wanted.min(DIRECT_CHUNK))?
        {
            let asked = pinned.ranges().iter().map(|r| r.len).sum();
            let n = self.file.read_phys(at, pinned.ranges())?;
            dst.advance(n);
            return Ok((n, asked));
        }
        let asked = wanted.min(COPY_CHUNK);
        buffer.resize(asked, 0);
        let n = self.file.read(at, buffer)?;
        if n == 0 {
            return Ok((0, asked));
        }
        Ok((dst.put(buffer.get(..n).unwrap_or_default())?, asked))
    }

    /// Reads into the sentry's memory.
    pub fn read_bytes(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.file.read(offset, buf)
    }

    /// Writes at `offset`.
    pub fn write(&self, src: &mut IoSource<'_>, offset: u64) -> Result<usize> {
        let file = self.writable()?;
        let mut total = 0;
        let mut buffer = Vec::new();
        loop {
            let wanted = src.remaining();
            if wanted == 0 {
                return Ok(total);
            }
            let at = offset.checked_add(total as u64).ok_or(Errno::EFBIG)?;
            match Self::write_step(file, src, at, wanted, &mut buffer) {
                Ok((n, asked)) => {
                    total += n;
                    if n < asked {
                        return Ok(total);
                    }
                }
                Err(e) if total == 0 => return Err(e),
                Err(_) => return Ok(total),
            }
        }
    }

    fn write_step(
        file: &Arc<dyn HostFile>,
        src: &mut IoSource<'_>,
        at: u64,
        wanted: usize,
        buffer: &mut Vec<u8>,
    ) -> Result<(usize, usize)> {
        if wanted >= DIRECT_MIN
            && let Some(pinned) = src.pin(wanted.min(DIRECT_CHUNK))?
        {
            let asked = pinned.ranges().iter().map(|r| r.len).sum();
            let n = file.write_phys(at, pinned.ranges())?;
            src.advance(n);
            return Ok((n, asked));
        }
        buffer.resize(wanted.min(COPY_CHUNK), 0);
        let taken = src.take(buffer)?;
        let mut done = 0;
        while done < taken {
            let n = file.write(at.saturating_add(done as u64), buffer.get(done..taken).unwrap_or_default())?;
            if n == 0 {
                break;
            }
            done += n;
        }
        Ok((done, taken))
    }

    /// ftruncate; pages past the end leave every mapping.
    pub fn truncate(&self, len: u64) -> Result<()> {
        self.writable()?.truncate(len)?;
        let end = len.checked_next_multiple_of(PAGE_SIZE).ok_or(Errno::EFBIG)?;
        for space in self.mappers.all() {
            space.unmap_object(self, end, !(PAGE_SIZE - 1));
        }
        Ok(())
    }

    /// fsync.
    pub fn sync(&self, data_only: bool) -> Result<()> {
        self.writable.get().unwrap_or(&self.file).sync(data_only)
    }

    fn window(&self, index: u64, access: Access) -> Result<Arc<dyn Window>> {
        let mut windows = self.windows.lock();
        let known = windows.get(&(index, access)).and_then(Weak::upgrade);
        let window = if let Some(window) = known {
            window
        } else {
            let window = match access {
                Access::Read => self.file.window(index)?,
                Access::Write => self.writable()?.window(index)?,
                Access::Private(version) => self.file.private_window(index, version)?,
            };
            if windows.len() >= 64 && windows.len().is_power_of_two() {
                windows.retain(|_, w| w.strong_count() > 0);
            }
            windows.insert((index, access), Arc::downgrade(&window));
            window
        };
        drop(windows);
        let displaced = self.recent.lock().touch(Arc::as_ptr(&window).cast::<()>() as usize, window.clone());
        drop(displaced);
        Ok(window)
    }
}

impl Mappable for Content {
    fn key(&self) -> (u64, u64) {
        self.key
    }

    fn page(&self, offset: u64, write: bool) -> Result<MappedPage> {
        // A file open for writing has one window for readers and writers: page-table entries gain rights in place.
        let write = write || self.writable.get().is_some();
        self.page_of(offset, self.length()?, if write { Access::Write } else { Access::Read })
    }

    fn private_page(&self, offset: u64) -> Result<MappedPage> {
        if self.tracked {
            // The guest's own writes are to show at once.
            return self.page(offset, false);
        }
        let st = self.file.stat()?;
        // What the host changes in place is seen by new mappings: a change moves st_ctime.
        let version = (st.ctime.sec as u64).wrapping_mul(1_000_000_007).wrapping_add(st.ctime.nsec as u64);
        self.page_of(offset, u64::try_from(st.size).unwrap_or(0), Access::Private(version))
    }

    fn size(&self) -> u64 {
        self.length().unwrap_or(0)
    }

    fn add_mapper(&self, space: &Arc<AddressSpace>) {
        // Only a truncation of ours unmaps; what the host does to its own file ends as a bus error.
        if self.tracked {
            self.mappers.add(space);
        }
    }
}

impl Content {
    fn page_of(&self, offset: u64, len: u64, access: Access) -> Result<MappedPage> {
        if offset >= len {
            return Err(Errno::EFAULT);
        }
        let index = offset / WINDOW_LEN;
        let window = self.window(index, access)?;
        let start = index * WINDOW_LEN;
        let bytes = (len - start).min(WINDOW_LEN);
        let run = (start, window.base(), usize::try_from(bytes.div_ceil(PAGE_SIZE)).unwrap_or(0));
        Ok(MappedPage::Window { pa: PhysAddr(window.base().0 + (offset - start)), run, keep: window })
    }
}

/// Contents that are opened when needed and may be closed again while unused, so that many changed files of an overlay
/// cost no descriptors.
pub struct LazyContent {
    inode: Arc<HostInode>,
    key: (u64, u64),
    open: Mutex<Weak<Content>>,
}

impl LazyContent {
    /// Contents of `inode`, which must stay the file `key` = (device, inode).
    pub fn new(inode: Arc<HostInode>, key: (u64, u64)) -> LazyContent {
        LazyContent { inode, key, open: Mutex::new(Rank::Leaf, Weak::new()) }
    }

    /// Opens. ESTALE if the host has put another file in its place.
    pub fn get(&self) -> Result<Arc<Content>> {
        if let Some(content) = self.open.lock().upgrade() {
            return Ok(content);
        }
        let content = self.inode.content(false)?;
        if content.key != self.key {
            return Err(Errno::ESTALE);
        }
        *self.open.lock() = Arc::downgrade(&content);
        Ok(content)
    }
}
