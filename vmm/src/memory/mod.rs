//! Guest-physical memory: frames, page-table pages and file windows, each in an area of slots of its own. Owns all host memory
//! the guest can reach; never who may use it (the sentry's) nor page-table formats (`page_table`'s).
#![allow(unsafe_code)]
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use guest_abi::Errno;
use guest_abi::layout::PAGE_SIZE;
use kvm_ioctls::VmFd;
use sentry::lock::{Mutex, Rank};
use sentry::platform::host::Window;
use sentry::platform::{KernelMemory, Memory, PhysAddr, PhysRange};

mod chunk;
pub mod frames;
mod nudge;
pub mod region;
pub mod slots;
pub mod tables;
pub mod trycopy;
pub mod windows;

pub(crate) use nudge::REQUESTS as NUDGE_REQUESTS;

use frames::{Budget, Frames};
use region::Region;
use slots::Registry;
use tables::Tables;
use windows::Windows;

/// The guest's memory.
pub struct GuestMemory {
    budget: Budget,
    frames: Frames,
    tables: Tables,
    windows: Windows,
    private_windows: Windows,
    registry: Registry,
    /// Zaps done so far, and the lock that makes them exclude each other.
    zaps: AtomicU64,
    zapping: Mutex<()>,
    region: Region,
}

/// Calls `each` with every maximal run of consecutive pages in the sorted list.
fn for_each_run(sorted: &[PhysAddr], mut each: impl FnMut(PhysAddr, u64)) {
    let mut rest = sorted;
    while let Some(&first) = rest.first() {
        let mut n = 1;
        while rest.get(n).is_some_and(|p| p.0 == first.0 + n as u64 * PAGE_SIZE) {
            n += 1;
        }
        each(first, n as u64 * PAGE_SIZE);
        rest = &rest[n..];
    }
}

fn zero_committed(region: &Region, pa: PhysAddr) {
    if let Ok(at) = region.host(pa, PAGE_SIZE as usize) {
        // SAFETY: guest memory, or a fault that trycopy ends.
        let _ = unsafe { trycopy::zero(at, PAGE_SIZE as usize) };
    }
}

impl GuestMemory {
    /// Memory of `vm` with at most `limit` bytes in frames and page tables. Installs the process's handlers of SIGBUS and
    /// SIGSEGV.
    pub fn new(vm: Arc<VmFd>, limit: u64) -> io::Result<Arc<GuestMemory>> {
        Self::build(Some(vm), limit)
    }

    /// Memory that belongs to no virtual machine, for tests.
    pub fn without_vm(limit: u64) -> io::Result<Arc<GuestMemory>> {
        Self::build(None, limit)
    }

    fn build(vm: Option<Arc<VmFd>>, limit: u64) -> io::Result<Arc<GuestMemory>> {
        trycopy::install();
        let registry = Registry::new(vm);
        Ok(Arc::new(GuestMemory {
            budget: Budget::new(limit),
            frames: Frames::new(limit)?,
            tables: Tables::new(&registry),
            windows: Windows::new(slots::WINDOWS),
            private_windows: Windows::new(slots::PRIVATE_WINDOWS),
            registry,
            zaps: AtomicU64::new(0),
            zapping: Mutex::new(Rank::Frames, ()),
            region: Region::reserve()?,
        }))
    }

    /// The host address of guest-physical `pa`. Valid for as long as this object lives; what lies there may be inaccessible, so
    /// only addresses of allocated frames and page-table pages may be dereferenced.
    ///
    /// # Panics
    /// If `pa` is beyond guest-physical memory, which no address handed out here is.
    pub fn host_ptr(&self, pa: PhysAddr) -> *mut u8 {
        self.region.host(pa, 1).expect("guest-physical address out of range")
    }

    /// The host address of a range for a host system call, which gives EFAULT itself where the memory cannot be had.
    pub fn host_range(&self, range: PhysRange) -> Result<*mut u8, Errno> {
        self.region.host(range.addr, range.len)
    }

    // Page tables.

    /// A zeroed page for page tables. ENOMEM beyond the limit.
    pub fn alloc_table_page(&self) -> Result<PhysAddr, Errno> {
        self.tables.alloc(&self.registry, &self.region, &self.budget)
    }

    /// A page for a table that may be needed later, with any contents. ENOMEM beyond the limit.
    pub fn reserve_table_page(&self) -> Result<PhysAddr, Errno> {
        self.tables.reserve(&self.registry, &self.region, &self.budget, false)
    }

    /// Takes back a page of `reserve_table_page` that was never linked.
    pub fn unreserve_table_page(&self, page: PhysAddr) {
        self.tables.unreserve(&self.budget, page);
    }

    /// Takes pages of dead address spaces, or tables taken out of a live one, whose entries no vCPU can walk any more. Each becomes
    /// free when KVM has no shadow of it left.
    pub fn retire_table_pages(&self, pages: Vec<PhysAddr>) {
        self.tables.retire(&self.registry, &self.region, &self.budget, pages);
    }

    /// Whether KVM shadows the guest's page tables instead of using nested paging; true until told.
    pub fn set_shadow_paging(&self, shadow: bool) {
        self.tables.set_shadow(shadow);
    }

    fn entry(&self, pa: PhysAddr, index: usize) -> &AtomicU64 {
        assert!(index < 512 && pa.0.is_multiple_of(PAGE_SIZE) && self.tables.contains(pa), "{pa:?} is no page table");
        #[allow(clippy::cast_ptr_alignment)] // page-aligned, as just asserted
        // SAFETY: the page is committed for good (`contains`), aligned, and only ever accessed as atomics of 64 bits by the host;
        // the processor's own accesses are atomic too.
        unsafe {
            &*self.host_ptr(pa).cast::<AtomicU64>().add(index)
        }
    }

    /// Reads entry `index` (0..512) of the page-table page `pa`.
    ///
    /// # Panics
    /// If `pa` is no page of `alloc_table_page`, or `index` is out of range.
    pub fn table_read(&self, pa: PhysAddr, index: usize) -> u64 {
        self.entry(pa, index).load(Ordering::Acquire)
    }

    /// Writes entry `index` of the page-table page `pa`. Panics as `table_read`.
    pub fn table_write(&self, pa: PhysAddr, index: usize, value: u64) {
        self.entry(pa, index).store(value, Ordering::Release);
    }

    /// Replaces entry `index` of `pa` if it is `old`; gives what was found. Panics as `table_read`.
    pub fn table_exchange(&self, pa: PhysAddr, index: usize, old: u64, new: u64) -> u64 {
        match self.entry(pa, index).compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(v) | Err(v) => v,
        }
    }

    /// The page-table page `pa` as a whole. Panics as `table_read`.
    pub fn table(&self, pa: PhysAddr) -> &[AtomicU64; 512] {
        let first: *const AtomicU64 = self.entry(pa, 0);
        // SAFETY: as in `entry`; the page holds 512 entries.
        unsafe { &*first.cast() }
    }

    /// Makes every vCPU drop its translations of these pages (whole pages; any order). Others' accesses to the pages go on
    /// undisturbed. On a KVM with shadow paging this is what makes a change to a present entry seen.
    pub fn zap(&self, ranges: &[PhysRange]) {
        let mut runs: Vec<(u64, u64)> =
            ranges.iter().map(|r| (r.addr.0, r.addr.0.saturating_add(r.len as u64))).collect();
        runs.sort_unstable();
        runs.dedup_by(|next, run| {
            let joins = next.0 <= run.1;
            if joins {
                run.1 = run.1.max(next.1);
            }
            joins
        });
        let _guard = self.zapping.lock();
        for (start, end) in runs {
            let (pa, len) = (PhysAddr(start), end - start);
            let done = if slots::WINDOWS.contains(pa) {
                // The page cache keeps the contents; only translations go.
                self.region.discard(pa, len)
            } else if slots::PRIVATE_WINDOWS.contains(pa) {
                self.region.flicker(pa, len)
            } else {
                self.region.forget(pa, len)
            };
            if let Err(e) = done {
                log::error!("translations of {len} bytes at {start:#x} cannot be dropped: {e}");
            }
        }
        self.zaps.fetch_add(1, Ordering::Release);
    }

    /// Waits until no zap is under way, and gives the number of zaps so far: a vCPU whose access failed tries again while this
    /// changes.
    pub fn settle(&self) -> u64 {
        let _guard = self.zapping.lock();
        self.zaps.load(Ordering::Acquire)
    }

    // Windows.

    /// The window that shows the extent `index` of the file `fd`, whose identity is (`dev`, `ino`).
    pub fn window(
        self: &Arc<Self>,
        fd: BorrowedFd<'_>,
        (dev, ino): (u64, u64),
        index: u64,
        writable: bool,
    ) -> Result<Arc<dyn Window>, Errno> {
        let key = (dev, ino, index, if writable { windows::Kind::Write } else { windows::Kind::Read });
        let w = self.windows.get(self, &self.registry, &self.region, fd, key)?;
        Ok(w)
    }

    /// As `window`, for private mappings of the file in the state that `version` stands for. Shows the page cache too, but
    /// copies what is about to be used where that pays: a KVM on shadow paging maps a read-only page of the host by one slow
    /// fault each (8–17 µs, again in every address space), and writable ones eight at a time (2 µs each).
    pub fn private_window(
        self: &Arc<Self>,
        fd: BorrowedFd<'_>,
        (dev, ino): (u64, u64),
        index: u64,
        version: u64,
    ) -> Result<Arc<dyn Window>, Errno> {
        let key = (dev, ino, index, windows::Kind::Private(version));
        match self.private_windows.get(self, &self.registry, &self.region, fd, key) {
            Ok(w) => Ok(w),
            // No room: the other kind serves as well, only slower.
            Err(Errno::ENOMEM) => self.window(fd, (dev, ino), index, false),
            Err(e) => Err(e),
        }
    }

    /// Whether `pa` is a page of a window area (and not a frame).
    pub fn is_window(&self, pa: PhysAddr) -> bool {
        self.windows.contains(pa) || self.private_windows.contains(pa)
    }

    // Upkeep.

    /// Gives all free memory back to the host, that of the process's heap too; for idle times.
    pub fn trim(&self) {
        self.tables.drop_shadows(&self.registry, &self.region, &self.budget);
        self.tables.trim(&self.region);
        self.frames.trim(&self.region, 0);
        // The C library keeps what was freed below anything that is still in use.
        #[cfg(target_env = "gnu")]
        // SAFETY: any thread may call it at any time (malloc_trim(3)); it changes nothing that is in use.
        unsafe {
            libc::malloc_trim(0)
        };
        self.budget.settle();
    }

    /// Whether so much has been let go of since the last `trim` that it is time for one; says so once.
    pub fn take_surplus(&self) -> bool {
        self.budget.take_surplus()
    }

    /// Free frames that stay resident (an upper estimate), page-table pages in quarantine, and live windows.
    pub fn upkeep(&self) -> (usize, usize, usize) {
        (self.frames.cached(), self.tables.quarantined(), self.windows.count() + self.private_windows.count())
    }
}

impl Memory for GuestMemory {
    fn alloc(&self) -> Result<PhysAddr, Errno> {
        self.budget.take(1)?;
        self.frames.alloc(&self.registry, &self.region).inspect_err(|_| self.budget.give(1))
    }

    fn alloc_many(&self, count: usize, out: &mut Vec<(PhysAddr, usize)>) -> Result<(), Errno> {
        self.budget.take(count as u64)?;
        let done = self.frames.alloc_many(&self.registry, &self.region, count, out);
        done.inspect_err(|_| self.budget.give(count as u64))
    }

    fn share(&self, pa: PhysAddr) {
        self.frames.share(pa);
    }

    fn release(&self, frames: &[PhysAddr]) {
        self.frames.release(&self.region, &self.budget, frames);
    }

    fn references(&self, pa: PhysAddr) -> u32 {
        self.frames.references(pa)
    }

    fn read(&self, pa: PhysAddr, buf: &mut [u8]) -> Result<(), Errno> {
        let at = self.region.host(pa, buf.len())?;
        // SAFETY: the source is guest memory or faults; the destination is ours.
        unsafe { trycopy::copy(buf.as_mut_ptr(), at, buf.len()) }
    }

    fn write(&self, pa: PhysAddr, buf: &[u8]) -> Result<(), Errno> {
        let at = self.region.host(pa, buf.len())?;
        // SAFETY: the destination is guest memory or faults; the source is ours.
        unsafe { trycopy::copy(at, buf.as_ptr(), buf.len()) }
    }

    fn zero(&self, pa: PhysAddr, len: usize) -> Result<(), Errno> {
        let at = self.region.host(pa, len)?;
        // SAFETY: guest memory, or a fault.
        unsafe { trycopy::zero(at, len) }
    }

    fn copy_page(&self, from: PhysAddr, to: PhysAddr) -> Result<(), Errno> {
        let len = PAGE_SIZE as usize;
        let (from, to) = (self.region.host(from, len)?, self.region.host(to, len)?);
        // SAFETY: both are guest memory or fault.
        unsafe { trycopy::copy(to, from, len) }
    }

    fn load_u32(&self, pa: PhysAddr) -> Result<u32, Errno> {
        if !pa.0.is_multiple_of(4) {
            return Err(Errno::EINVAL);
        }
        let at = self.region.host(pa, 4)?;
        // SAFETY: aligned guest memory, or a fault.
        unsafe { trycopy::load_u32(at.cast()) }
    }

    fn compare_exchange_u32(&self, pa: PhysAddr, old: u32, new: u32) -> Result<u32, Errno> {
        if !pa.0.is_multiple_of(4) {
            return Err(Errno::EINVAL);
        }
        let at = self.region.host(pa, 4)?;
        // SAFETY: aligned guest memory, or a fault.
        unsafe { trycopy::compare_exchange_u32(at.cast(), old, new) }
    }

    fn charge(&self, what: KernelMemory, bytes: u64) -> Result<(), Errno> {
        self.budget.charge(what, bytes)
    }

    fn uncharge(&self, what: KernelMemory, bytes: u64) {
        self.budget.uncharge(what, bytes);
    }

    fn charged(&self, what: KernelMemory) -> u64 {
        self.budget.kernel(what)
    }

    fn used(&self) -> u64 {
        self.budget.used()
    }

    fn peak(&self) -> u64 {
        self.budget.peak()
    }

    fn limit(&self) -> u64 {
        self.budget.limit()
    }
}

#[cfg(test)]
mod tests;
