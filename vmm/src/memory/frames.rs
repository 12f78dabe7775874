//! Frames: 4 KiB pages of the guest with reference counts. Owns which are free, the sandbox's memory limit, and how much freed
//! memory stays with the process; never what a frame holds, beyond zeroing it.
//!
//! Frames are kept in chunks of 2 MiB so that the host can back them with huge pages and so that memory goes back to the host in
//! large pieces. Freed frames keep their host page up to a bound, which makes reuse cheap.
#![allow(unsafe_code)]
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use guest_abi::Errno;
use guest_abi::layout::PAGE_SIZE;
use sentry::lock::{Mutex, Rank};
use sentry::platform::{KernelMemory, PhysAddr};

use super::chunk::{Bits, CHUNK, Chunk, List};
use super::region::Region;
use super::slots::{Area, FRAMES, Registry};

const CHUNK_BYTES: u64 = CHUNK as u64 * PAGE_SIZE;
/// Free frames the process keeps resident at most (64 MiB) …
const CACHE_HIGH: usize = 64 * 256;
/// … and what giving back leaves (40 MiB).
const CACHE_LOW: usize = 40 * 256;
/// Resident free frames that make a partly used chunk worth giving back.
const SCATTERED_MIN: u16 = 16;
/// Bytes let go of since the last giving back that make the next one worth its cost.
const SURPLUS: u64 = 4 << 20;
/// Partly used chunks looked at for a contiguous run before an unused one is broken.
const RUN_TRIES: usize = 8;

/// The sandbox's memory budget in bytes: frames, page tables, and what the sentry keeps for the guest, together.
pub struct Budget {
    used: AtomicU64,
    peak: AtomicU64,
    limit: u64,
    kernel: [AtomicU64; KernelMemory::COUNT],
    /// The largest number of bytes in use since free memory was last given back.
    high: AtomicU64,
    surplus: AtomicU8,
}

/// States of `Budget::surplus`: little is free, much is, and somebody has taken note of that.
const LITTLE: u8 = 0;
const MUCH: u8 = 1;
const NOTED: u8 = 2;

impl Budget {
    /// A budget of `bytes`.
    pub fn new(bytes: u64) -> Budget {
        Budget {
            used: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            limit: bytes & !(PAGE_SIZE - 1),
            kernel: Default::default(),
            high: AtomicU64::new(0),
            surplus: AtomicU8::new(LITTLE),
        }
    }

    fn add(&self, bytes: u64) -> Result<(), Errno> {
        let now = self.used.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if now > self.limit {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
            return Err(Errno::ENOMEM);
        }
        if now > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(now, Ordering::Relaxed);
        }
        if now > self.high.load(Ordering::Relaxed) {
            self.high.fetch_max(now, Ordering::Relaxed);
        }
        Ok(())
    }

    fn sub(&self, bytes: u64) {
        let now = self.used.fetch_sub(bytes, Ordering::Relaxed).saturating_sub(bytes);
        let much = self.high.load(Ordering::Relaxed).saturating_sub(now) > SURPLUS;
        if much && self.surplus.load(Ordering::Relaxed) == LITTLE {
            let _ = self.surplus.compare_exchange(LITTLE, MUCH, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Whether much has been let go of that nobody has taken note of yet; the caller has then.
    pub fn take_surplus(&self) -> bool {
        self.surplus.load(Ordering::Relaxed) == MUCH
            && self.surplus.compare_exchange(MUCH, NOTED, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Free memory has been given back.
    pub fn settle(&self) {
        self.high.store(self.used(), Ordering::Relaxed);
        self.surplus.store(LITTLE, Ordering::Relaxed);
    }

    /// Takes `pages`, or ENOMEM.
    pub fn take(&self, pages: u64) -> Result<(), Errno> {
        self.add(pages.checked_mul(PAGE_SIZE).filter(|&bytes| bytes <= self.limit).ok_or(Errno::ENOMEM)?)
    }

    /// Gives `pages` back.
    pub fn give(&self, pages: u64) {
        self.sub(pages * PAGE_SIZE);
    }

    /// Takes `pages` whatever the limit is: they are gone already.
    pub fn lose(&self, pages: u64) {
        self.used.fetch_add(pages * PAGE_SIZE, Ordering::Relaxed);
    }

    /// Takes `bytes` for what the sentry keeps, or ENOMEM.
    pub fn charge(&self, what: KernelMemory, bytes: u64) -> Result<(), Errno> {
        if bytes > self.limit {
            return Err(Errno::ENOMEM);
        }
        self.add(bytes)?;
        self.kernel[what as usize].fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Gives back what `charge` took.
    pub fn uncharge(&self, what: KernelMemory, bytes: u64) {
        self.kernel[what as usize].fetch_sub(bytes, Ordering::Relaxed);
        self.sub(bytes);
    }

    /// Bytes charged for one purpose now.
    pub fn kernel(&self, what: KernelMemory) -> u64 {
        self.kernel[what as usize].load(Ordering::Relaxed)
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The largest number of bytes in use so far.
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// The limit in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }
}

/// A reference count for every frame there may ever be; the host supplies the pages of this table as they are used.
struct Counts {
    base: NonNull<AtomicU32>,
    len: usize,
}

// SAFETY: the table is a slice of atomics.
unsafe impl Send for Counts {}
// SAFETY: as above.
unsafe impl Sync for Counts {}

impl Counts {
    fn new(len: usize) -> std::io::Result<Counts> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let bytes = len * size_of::<AtomicU32>();
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(core::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let base = NonNull::new(at.cast()).ok_or_else(|| std::io::Error::from(std::io::ErrorKind::OutOfMemory))?;
        Ok(Counts { base, len })
    }

    fn slice(&self) -> &[AtomicU32] {
        // SAFETY: the mapping has room for `len` words, is zeroed, and lives as long as `self`.
        unsafe { core::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl Drop for Counts {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; `slice` borrows cannot outlive `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len * size_of::<AtomicU32>()) };
    }
}

#[derive(Default)]
struct Lists {
    chunks: Vec<Chunk>,
    partial: Vec<u32>,
    warm: Vec<u32>,
    cold: Vec<u32>,
    /// Sum of the chunks' `resident`.
    resident: usize,
}

impl Lists {
    fn list(&mut self, which: List) -> Option<&mut Vec<u32>> {
        match which {
            List::None => None,
            List::Partial => Some(&mut self.partial),
            List::Warm => Some(&mut self.warm),
            List::Cold => Some(&mut self.cold),
        }
    }

    fn move_to(&mut self, c: u32, to: List) {
        let chunk = &self.chunks[c as usize];
        let (from, at) = (chunk.list, chunk.position as usize);
        if from == to {
            return;
        }
        if let Some(list) = self.list(from) {
            list.swap_remove(at);
            if let Some(&moved) = list.get(at) {
                self.chunks[moved as usize].position = at as u32;
            }
        }
        let mut at = 0;
        if let Some(list) = self.list(to) {
            at = list.len() as u32;
            list.push(c);
        }
        let chunk = &mut self.chunks[c as usize];
        chunk.list = to;
        chunk.position = at;
    }

    fn settle(&mut self, c: u32) {
        let chunk = &self.chunks[c as usize];
        let to = match usize::from(chunk.free_count) {
            0 => List::None,
            CHUNK if chunk.resident == 0 => List::Cold,
            CHUNK => List::Warm,
            _ => List::Partial,
        };
        self.move_to(c, to);
    }

    /// Takes a run out of a chunk; gives which of its frames must be zeroed and whether the host may have to supply pages.
    fn take(&mut self, c: u32, start: usize, len: usize) -> Taken {
        let chunk = &mut self.chunks[c as usize];
        let mut dirty = Bits::NONE;
        for i in start..start + len {
            if chunk.dirty.has(i) {
                dirty.insert(i);
            }
        }
        chunk.free.set_run(start, len, false);
        chunk.dirty.set_run(start, len, false);
        chunk.free_count -= len as u16;
        let cold = chunk.resident == 0;
        let before = chunk.resident;
        chunk.resident = if cold && usize::from(chunk.free_count) + len == CHUNK {
            chunk.free_count
        } else {
            chunk.resident.saturating_sub(len as u16)
        };
        self.resident = self.resident + usize::from(chunk.resident) - usize::from(before);
        self.settle(c);
        Taken { chunk: c, start, len, dirty, cold }
    }

    fn put(&mut self, c: u32, i: usize) {
        let Some(chunk) = self.chunks.get_mut(c as usize) else { return };
        if chunk.free.has(i) {
            debug_assert!(false, "frame freed twice");
            return;
        }
        chunk.free.insert(i);
        chunk.dirty.insert(i);
        chunk.free_count += 1;
        if chunk.resident < chunk.free_count {
            chunk.resident += 1;
            self.resident += 1;
        }
        self.settle(c);
    }
}

struct Taken {
    chunk: u32,
    start: usize,
    len: usize,
    dirty: Bits,
    cold: bool,
}

impl Taken {
    fn pa(&self) -> PhysAddr {
        PhysAddr(FRAMES.base + u64::from(self.chunk) * CHUNK_BYTES + self.start as u64 * PAGE_SIZE)
    }
}

/// The frame allocator.
pub struct Frames {
    counts: Counts,
    lists: Mutex<Lists>,
    area: Area,
    trimming: AtomicBool,
    /// Resident free frames at which giving back starts.
    trim_at: AtomicUsize,
    most: u64,
}

impl Frames {
    /// No frames yet; at most `limit` bytes of them.
    pub fn new(limit: u64) -> std::io::Result<Frames> {
        // Frames on their way back to the host are for a moment neither free nor used: the slack lets others grow meanwhile.
        let most = limit.saturating_add(CACHE_HIGH as u64 * PAGE_SIZE).min(FRAMES.len);
        Ok(Frames {
            counts: Counts::new((FRAMES.len / PAGE_SIZE) as usize)?,
            lists: Mutex::new(Rank::Frames, Lists::default()),
            area: Area::new(FRAMES, 32 << 20, 1 << 30, true),
            trimming: AtomicBool::new(false),
            trim_at: AtomicUsize::new(CACHE_HIGH),
            most,
        })
    }

    fn count(&self, pa: PhysAddr) -> Option<&AtomicU32> {
        let offset = pa.0.checked_sub(FRAMES.base)?;
        if offset >= self.area.grown() {
            return None;
        }
        self.counts.slice().get((offset / PAGE_SIZE) as usize)
    }

    /// Whether `pa` lies in an existing frame.
    pub fn contains(&self, pa: PhysAddr) -> bool {
        self.count(pa).is_some()
    }

    /// Adds chunks. Called without the lock; several may race.
    fn grow(&self, registry: &Registry, region: &Region) -> Result<(), Errno> {
        let seen = self.lists.lock().chunks.len() as u64 * CHUNK_BYTES;
        if seen == self.area.grown() && !self.area.grow(registry, region, seen, self.most) {
            return Err(Errno::ENOMEM);
        }
        let mut lists = self.lists.lock();
        let total = (self.area.grown() / CHUNK_BYTES) as u32;
        let from = lists.chunks.len() as u32;
        for _ in from..total {
            lists.chunks.push(Chunk::cold());
        }
        // Low addresses are used first.
        for c in (from..total).rev() {
            lists.settle(c);
        }
        Ok(())
    }

    fn clean(&self, region: &Region, t: &Taken) {
        let Ok(at) = region.host(t.pa(), t.len * PAGE_SIZE as usize) else { return };
        if t.cold && t.len >= 4 {
            // An older host kernel or exhausted memory fails here; the stores below then do it page by page.
            let _ = region.populate(t.pa(), t.len as u64 * PAGE_SIZE);
        }
        for i in 0..t.len {
            // SAFETY: the run is committed memory of the region (`area` covers it), free until now and ours alone.
            unsafe {
                let page = at.add(i * PAGE_SIZE as usize);
                if t.dirty.has(t.start + i) {
                    page.write_bytes(0, PAGE_SIZE as usize);
                } else {
                    // The store makes the host supply the page now, which is cheaper than at the guest's touch.
                    page.write_volatile(0);
                }
            }
            if let Some(count) = self.count(PhysAddr(t.pa().0 + i as u64 * PAGE_SIZE)) {
                count.store(1, Ordering::Release);
            }
        }
    }

    /// One zeroed frame with one reference. The caller has taken it from the budget.
    pub fn alloc(&self, registry: &Registry, region: &Region) -> Result<PhysAddr, Errno> {
        loop {
            let mut lists = self.lists.lock();
            let chunk = lists.partial.last().or(lists.warm.last()).or(lists.cold.last()).copied();
            if let Some(c) = chunk {
                let ch = &lists.chunks[c as usize];
                let Some(i) = ch.free.first_preferring(&ch.dirty) else {
                    debug_assert!(false, "full chunk in a list");
                    lists.move_to(c, List::None);
                    continue;
                };
                let taken = lists.take(c, i, 1);
                drop(lists);
                self.clean(region, &taken);
                return Ok(taken.pa());
            }
            drop(lists);
            self.grow(registry, region)?;
        }
    }

    /// `count` zeroed frames in as few runs as can be had. The caller has taken them from the budget.
    pub fn alloc_many(
        &self,
        registry: &Registry,
        region: &Region,
        count: usize,
        out: &mut Vec<(PhysAddr, usize)>,
    ) -> Result<(), Errno> {
        let mut got: Vec<Taken> = Vec::new();
        let mut want = count;
        while want > 0 {
            let mut lists = self.lists.lock();
            let whole = lists.warm.last().or(lists.cold.last()).copied();
            let choice = if want >= CHUNK && whole.is_some() {
                whole.map(|c| (c, 0, CHUNK))
            } else {
                let mut best: Option<(u32, usize, usize)> = None;
                for &c in lists.partial.iter().rev().take(RUN_TRIES) {
                    let (start, len) = lists.chunks[c as usize].free.find_run(want.min(CHUNK));
                    if best.is_none_or(|b| len > b.2) {
                        best = Some((c, start, len));
                    }
                    if len >= want.min(CHUNK) {
                        break;
                    }
                }
                match (best, whole) {
                    (Some(b), _) if b.2 >= want => best,
                    (_, Some(c)) => Some((c, 0, want.min(CHUNK))),
                    _ => best,
                }
            };
            if let Some((c, start, len)) = choice {
                got.push(lists.take(c, start, len));
                want -= len;
                continue;
            }
            drop(lists);
            if let Err(e) = self.grow(registry, region) {
                let mut lists = self.lists.lock();
                for t in &got {
                    for i in 0..t.len {
                        lists.put(t.chunk, t.start + i);
                    }
                }
                return Err(e);
            }
        }
        got.sort_unstable_by_key(|t| t.pa());
        for t in &got {
            self.clean(region, t);
            match out.last_mut() {
                Some((start, pages)) if start.0 + *pages as u64 * PAGE_SIZE == t.pa().0 => *pages += t.len,
                _ => out.push((t.pa(), t.len)),
            }
        }
        Ok(())
    }

    /// One more reference.
    pub fn share(&self, pa: PhysAddr) {
        match self.count(pa) {
            Some(count) => {
                let before = count.fetch_add(1, Ordering::Relaxed);
                debug_assert!(before != 0, "free frame {pa:?} shared");
            }
            None => debug_assert!(false, "{pa:?} is no frame"),
        }
    }

    /// References, 0 for what is no frame.
    pub fn references(&self, pa: PhysAddr) -> u32 {
        self.count(pa).map_or(0, |c| c.load(Ordering::Acquire))
    }

    /// One reference less for each.
    pub fn release(&self, region: &Region, budget: &Budget, frames: &[PhysAddr]) {
        let mut batch = [(0u32, 0usize); 64];
        for group in frames.chunks(64) {
            let mut n = 0;
            for &pa in group {
                let Some(count) = self.count(pa) else {
                    debug_assert!(false, "{pa:?} is no frame");
                    continue;
                };
                match count.fetch_sub(1, Ordering::AcqRel) {
                    0 => {
                        count.store(0, Ordering::Release);
                        debug_assert!(false, "free frame {pa:?} released");
                    }
                    1 => {
                        let frame = (pa.0 - FRAMES.base) / PAGE_SIZE;
                        batch[n] = ((frame / CHUNK as u64) as u32, frame as usize % CHUNK);
                        n += 1;
                    }
                    _ => {}
                }
            }
            if n > 0 {
                let mut lists = self.lists.lock();
                for &(c, i) in &batch[..n] {
                    lists.put(c, i);
                }
                let full = lists.resident > self.trim_at.load(Ordering::Relaxed);
                drop(lists);
                budget.give(n as u64);
                if full {
                    self.trim(region, CACHE_LOW);
                }
            }
        }
    }

    /// Takes all free frames of a chunk out of the allocator's hands: (free, dirty, count).
    fn claim(lists: &mut Lists, c: u32) -> (Bits, Bits, u16) {
        let chunk = &mut lists.chunks[c as usize];
        let claimed = (chunk.free, chunk.dirty, core::mem::take(&mut chunk.free_count));
        let resident = core::mem::take(&mut chunk.resident);
        chunk.free = Bits::NONE;
        chunk.dirty = Bits::NONE;
        lists.resident -= usize::from(resident);
        lists.settle(c);
        claimed
    }

    /// Gives free resident memory back to the host until about `keep` pages of it are left. One thread at a time.
    pub fn trim(&self, region: &Region, keep: usize) {
        if self.trimming.swap(true, Ordering::Acquire) {
            return;
        }
        let mut scattered: Option<Vec<u32>> = None;
        let left = loop {
            let mut lists = self.lists.lock();
            if lists.resident <= keep {
                break lists.resident;
            }
            // Whole chunks first, then the free frames of partly used ones, each looked at once.
            let mut chosen = lists.warm.first().copied();
            if chosen.is_none() {
                let rest = scattered.get_or_insert_with(|| {
                    let worth = |c: &&u32| lists.chunks[**c as usize].resident >= SCATTERED_MIN;
                    lists.partial.iter().filter(worth).take(256).copied().collect()
                });
                chosen = rest.pop();
            }
            let Some(c) = chosen else { break lists.resident };
            let (free, dirty, count) = Self::claim(&mut lists, c);
            drop(lists);

            let base = FRAMES.base + u64::from(c) * CHUNK_BYTES;
            let mut failed = false;
            for (start, len) in free.runs() {
                let pa = PhysAddr(base + start as u64 * PAGE_SIZE);
                failed |= region.discard(pa, len as u64 * PAGE_SIZE).is_err();
            }

            let mut lists = self.lists.lock();
            let chunk = &mut lists.chunks[c as usize];
            // Others may have freed frames of the chunk meanwhile: those are dirty and stay so.
            for (start, len) in free.runs() {
                chunk.free.set_run(start, len, true);
            }
            if failed {
                for (start, len) in dirty.runs() {
                    chunk.dirty.set_run(start, len, true);
                }
            }
            chunk.free_count += count;
            lists.settle(c);
            if failed {
                break lists.resident;
            }
        };
        // Where little could be given back, the next attempt waits until more has come together.
        self.trim_at.store(CACHE_HIGH.max(left + (CACHE_HIGH - CACHE_LOW)), Ordering::Relaxed);
        self.trimming.store(false, Ordering::Release);
    }

    /// Free frames that are resident, as an upper estimate.
    pub fn cached(&self) -> usize {
        self.lists.lock().resident
    }
}
