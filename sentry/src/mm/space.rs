//! An address space: the tree of VMAs, and the operations of mmap(2) and its family.
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use bitflags::bitflags;
use guest_abi::UserAddr;
use guest_abi::layout::{MMAP_MIN_ADDR, PAGE_SIZE, TASK_SIZE};

use super::direct::{DirectSites, HotCalls};
use super::fault::Hot;
use super::image::ImageInfo;
use super::shared::SharedAnonymous;
pub(super) use super::state::{State, is_private_page};
use super::vma::{Ahead, Backing, Vma, VmaTree};
use super::{Charge, Mappable, PAGE_MASK};
use crate::lock::{Mutex, Rank, RwLock};
use crate::platform::{GuestSpace, KernelMemory, Memory, PhysAddr, Platform, Pte, PteFlags};
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
        /// MAP_LOCKED, mlock(2).
        const LOCKED = 128;
        /// MADV_DONTFORK.
        const DONTFORK = 256;
        /// MADV_WIPEONFORK.
        const WIPEONFORK = 512;
        /// MADV_DONTDUMP.
        const DONTDUMP = 1024;
        /// MADV_HUGEPAGE.
        const HUGEPAGE = 2048;
        /// MADV_NOHUGEPAGE.
        const NOHUGEPAGE = 4096;
        /// MADV_SEQUENTIAL.
        const SEQUENTIAL = 8192;
        /// MADV_RANDOM: nothing is filled ahead of a fault.
        const RANDOM = 16384;
        /// MAP_STACK: a thread's stack, filled page by page.
        const THREAD_STACK = 32768;
        /// MLOCK_ONFAULT.
        const LOCKED_ONFAULT = 65536;
        /// MAP_32BIT: placed in the second GiB.
        const LOW = 131_072;
        /// MAP_DENYWRITE: ignored by Linux, but it is how the dynamic linker maps libraries, which do not change while they are
        /// mapped.
        const LIBRARY = 262_144;
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

impl VmaInfo {
    fn name_file(&mut self) {
        if let MapSource::File { file: Some(file), .. } = &self.source {
            self.name = file.maps_path();
        }
    }
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

/// Most VMAs of a space (vm.max_map_count).
pub const MAX_MAP_COUNT: usize = 65530;

/// Limits of the owning process that memory calls obey, in bytes; u64::MAX is none (getrlimit(2)).
#[derive(Clone, Copy, Debug)]
pub struct SpaceLimits {
    /// RLIMIT_AS.
    pub address_space: u64,
    /// RLIMIT_DATA.
    pub data: u64,
    /// RLIMIT_STACK.
    pub stack: u64,
    /// RLIMIT_MEMLOCK.
    pub memlock: u64,
}

impl Default for SpaceLimits {
    fn default() -> Self {
        SpaceLimits { address_space: u64::MAX, data: u64::MAX, stack: 8 << 20, memlock: 8 << 20 }
    }
}

/// What a change took out. It is let go only after the space's lock: dropping a file runs code of other modules.
#[derive(Default)]
pub(super) struct Removed {
    pub vmas: Vec<Vma>,
    pub frames: Vec<PhysAddr>,
}

impl Removed {
    pub(super) fn let_go(self, memory: &dyn Memory) {
        if !self.frames.is_empty() {
            memory.release(&self.frames);
        }
    }
}

/// An address space. All methods lock inside.
pub struct AddressSpace {
    pub(super) id: u64,
    pub(super) platform: Arc<dyn Platform>,
    pub(super) pages: Arc<dyn GuestSpace>,
    pub(super) state: RwLock<State>,
    pub(super) image: Mutex<ImageInfo>,
    /// Where calls come from.
    pub(super) hot_calls: HotCalls,
    /// Bits of membarrier(2) commands registered for.
    pub(super) barriers: AtomicU32,
    /// Tasks whose memory it is.
    pub(super) tasks: AtomicU32,
}

impl Drop for AddressSpace {
    fn drop(&mut self) {
        let mut frames = Vec::new();
        self.pages.drain(&mut |_, pte| {
            if pte.flags.contains(PteFlags::OWNED) {
                frames.push(pte.pa);
            }
        });
        if !frames.is_empty() {
            self.memory().release(&frames);
        }
        // VMAs and the windows they keep go with the fields, after the entries.
    }
}

/// Rounds up to pages.
pub(super) fn page_ceil(len: u64) -> Option<u64> {
    len.checked_add(PAGE_SIZE - 1).map(|l| l & PAGE_MASK)
}

impl AddressSpace {
    /// An empty address space, laid out at random.
    pub fn new(platform: &Arc<dyn Platform>) -> Result<Arc<AddressSpace>> {
        Self::with_layout(platform, SpaceLimits::default(), true)
    }

    /// An empty address space with limits. `randomize` is false under ADDR_NO_RANDOMIZE (personality(2)).
    pub fn with_layout(
        platform: &Arc<dyn Platform>,
        limits: SpaceLimits,
        randomize: bool,
    ) -> Result<Arc<AddressSpace>> {
        let mut random = [0; 8];
        if randomize {
            platform.random(&mut random);
        }
        // As mmap_base(): room for the stack to grow, its random offset and its guard; then 28 random bits of pages.
        let room = limits.stack.clamp(128 << 20, TASK_SIZE / 6 * 5 - (64 << 30));
        let gap = (room & PAGE_MASK) + (16 << 30) + super::vma::STACK_GUARD;
        let shift = (u64::from_le_bytes(random) & ((1 << 28) - 1)) * PAGE_SIZE;
        let state = State {
            vmas: VmaTree::default(),
            charge: Charge::empty(platform, KernelMemory::Slab),
            limits,
            mmap_base: TASK_SIZE.saturating_sub(gap).saturating_sub(shift).max(TASK_SIZE / 6),
            brk_base: 0,
            brk: 0,
            future: MapFlags::empty(),
            anonymous: 0,
            object_pages: 0,
            peak: 0,
            direct: DirectSites::default(),
            hot: Arc::new(Mutex::new(Rank::Leaf, Hot::default())),
        };
        Self::from_state(platform.clone(), state, ImageInfo::default())
    }

    pub(super) fn from_state(platform: Arc<dyn Platform>, state: State, image: ImageInfo) -> Result<Arc<AddressSpace>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let pages = platform.new_space()?;
        Ok(Arc::new(AddressSpace {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            platform,
            pages,
            state: RwLock::new(Rank::AddressSpace, state),
            image: Mutex::new(Rank::Leaf, image),
            hot_calls: HotCalls::default(),
            barriers: AtomicU32::new(0),
            tasks: AtomicU32::new(0),
        }))
    }

    /// The page tables, for `Platform::enter`.
    pub fn pages(&self) -> &dyn GuestSpace {
        &*self.pages
    }

    /// An identity that no other address space of the sandbox ever has.
    pub fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn memory(&self) -> &dyn Memory {
        self.platform.memory()
    }

    /// The limits obeyed now.
    pub fn limits(&self) -> SpaceLimits {
        self.state.read().limits
    }

    /// Changes the limits (setrlimit(2)).
    pub fn set_limits(&self, limits: SpaceLimits) {
        self.state.write().limits = limits;
    }

    /// mmap(2) after its arguments were decoded. Gives the address.
    pub fn map(self: &Arc<Self>, request: MapRequest) -> Result<UserAddr> {
        let (addr, fill) = self.map_unfilled(request)?;
        if let Some((start, end)) = fill {
            // As Linux: a failure to populate does not fail the mapping.
            let _ = self.populate(start, end, None);
        }
        Ok(addr)
    }

    /// Whether new mappings are locked and filled (mlockall(2) with MCL_FUTURE).
    pub fn locks_future(&self) -> bool {
        self.state.read().future.contains(MapFlags::LOCKED)
    }

    /// The frames of the kernel's own pages that are mapped at `addr`, if it is such.
    pub fn special_at(&self, addr: UserAddr) -> Option<Arc<[crate::platform::PhysAddr]>> {
        let state = self.state.read();
        let vma = state.vmas.find(addr.0).filter(|v| v.start == addr.0)?;
        if let Backing::Special { frames, .. } = &vma.backing { Some(frames.clone()) } else { None }
    }

    /// As [`AddressSpace::map`], but populating is left to the caller: gives the range for [`AddressSpace::populate`] too.
    pub fn map_unfilled(self: &Arc<Self>, request: MapRequest) -> Result<(UserAddr, Option<(u64, u64)>)> {
        if request.len == 0 {
            return Err(Errno::EINVAL);
        }
        let len = page_ceil(request.len).filter(|&l| l <= TASK_SIZE).ok_or(Errno::ENOMEM)?;
        let shared = request.flags.contains(MapFlags::SHARED);
        let (backing, offset) = match request.source {
            MapSource::Anonymous if shared => {
                let object = SharedAnonymous::new(self.platform.clone(), len);
                (Backing::Object { object, file: None, may_write: true }, 0)
            }
            MapSource::Anonymous => (Backing::Anonymous, 0),
            MapSource::File { object, offset, file, may_write } => {
                object.add_mapper(self);
                (Backing::Object { object, file, may_write }, offset)
            }
            MapSource::Special { name, frames } => (Backing::Special { name, frames }, 0),
        };
        let mut removed = Removed::default();
        let mapped = {
            let mut state = self.state.write();
            let wanted = request.addr.0;
            // The backing is lent, so that a refusal does not drop a file under the lock.
            self.map_locked(&mut state, wanted, len, request.prot, request.flags, (&backing, offset), &mut removed)
        };
        removed.let_go(self.memory());
        let (addr, flags) = mapped?;
        let fill = flags.intersects(MapFlags::POPULATE | MapFlags::LOCKED) && !flags.contains(MapFlags::LOCKED_ONFAULT);
        Ok((UserAddr(addr), fill.then_some((addr, addr + len))))
    }

    #[allow(clippy::too_many_arguments)]
    fn map_locked(
        &self,
        state: &mut State,
        wanted: u64,
        len: u64,
        prot: Prot,
        flags: MapFlags,
        (backing, offset): (&Backing, u64),
        removed: &mut Removed,
    ) -> Result<(u64, MapFlags)> {
        if state.vmas.len() > MAX_MAP_COUNT {
            return Err(Errno::ENOMEM);
        }
        state.charge_vmas(3)?;
        let fixed = flags.intersects(MapFlags::FIXED | MapFlags::FIXED_NOREPLACE);
        let addr = if fixed {
            Self::check_fixed(wanted, len)?;
            if flags.contains(MapFlags::FIXED_NOREPLACE) && !state.vmas.is_free(wanted, wanted + len) {
                return Err(Errno::EEXIST);
            }
            wanted
        } else {
            let low = flags.contains(MapFlags::LOW);
            let at = if low { state.vmas.place(len, 1 << 30, 2 << 30) } else { Self::place(state, wanted, len) };
            at.ok_or(Errno::ENOMEM)?
        };
        let mut flags = flags | state.future;
        if !matches!(backing, Backing::Object { .. }) {
            flags -= MapFlags::LIBRARY;
        }
        let pages = len / PAGE_SIZE;
        let replaced = if fixed { state.vmas.mapped_pages(addr, addr + len) } else { 0 };
        self.may_expand(state, pages.saturating_sub(replaced), prot, flags)?;
        if flags.contains(MapFlags::LOCKED) {
            let bytes = (state.vmas.locked + pages).saturating_mul(PAGE_SIZE);
            if bytes > state.limits.memlock {
                return Err(Errno::EAGAIN);
            }
        }
        if replaced > 0 {
            if state.vmas.len() + state.vmas.splits(addr, addr + len) > MAX_MAP_COUNT {
                return Err(Errno::ENOMEM);
            }
            self.unmap_locked(state, addr, addr + len, removed);
        }
        self.make_way(state, addr, addr + len);
        let once = MapFlags::FIXED | MapFlags::FIXED_NOREPLACE | MapFlags::POPULATE | MapFlags::LOW;
        state.vmas.insert(Vma {
            start: addr,
            end: addr + len,
            prot,
            flags: flags - once,
            backing: backing.clone(),
            offset,
            windows: BTreeMap::new(),
            ahead: Ahead::default(),
            name: None,
        });
        if !flags.intersects(MapFlags::POPULATE | MapFlags::LOCKED) {
            self.prefill(state, addr, addr + len, flags);
        }
        Ok((addr, flags))
    }

    /// The checks of a fixed address.
    pub(super) fn check_fixed(addr: u64, len: u64) -> Result<()> {
        if addr & !PAGE_MASK != 0 {
            return Err(Errno::EINVAL);
        }
        if addr.checked_add(len).is_none_or(|end| end > TASK_SIZE) {
            return Err(Errno::ENOMEM);
        }
        if addr < MMAP_MIN_ADDR {
            return Err(Errno::EPERM);
        }
        Ok(())
    }

    /// A place for `len` bytes: at the hint if that is free, else as high as possible below the base, else anywhere.
    pub(super) fn place(state: &State, hint: u64, len: u64) -> Option<u64> {
        if hint != 0 {
            let at = (hint & PAGE_MASK).max(MMAP_MIN_ADDR);
            let end = at.checked_add(len).filter(|&end| end <= TASK_SIZE);
            if end.is_some_and(|end| state.vmas.place(len, at, end) == Some(at)) {
                return Some(at);
            }
        }
        let below = state.vmas.place(len, MMAP_MIN_ADDR, state.mmap_base);
        below.or_else(|| state.vmas.place(len, MMAP_MIN_ADDR, TASK_SIZE))
    }

    /// ENOMEM if `pages` more would exceed RLIMIT_AS, RLIMIT_DATA, or are more than the sandbox could ever have.
    pub(super) fn may_expand(&self, state: &State, pages: u64, prot: Prot, flags: MapFlags) -> Result<()> {
        if (state.vmas.total + pages).saturating_mul(PAGE_SIZE) > state.limits.address_space {
            return Err(Errno::ENOMEM);
        }
        if Vma::is_data(prot, flags) && (state.vmas.data + pages).saturating_mul(PAGE_SIZE) > state.limits.data {
            return Err(Errno::ENOMEM);
        }
        self.may_commit(pages, prot, flags)
    }

    /// The overcommit heuristic (vm.overcommit_memory 0): refuses what alone exceeds all memory.
    pub(super) fn may_commit(&self, pages: u64, prot: Prot, flags: MapFlags) -> Result<()> {
        if Vma::accountable(prot, flags) && pages.saturating_mul(PAGE_SIZE) > self.memory().limit() {
            return Err(Errno::ENOMEM);
        }
        Ok(())
    }

    /// munmap(2).
    pub fn unmap(&self, addr: UserAddr, len: u64) -> Result<()> {
        let end = Self::check_range(addr, len)?;
        let mut removed = Removed::default();
        {
            let mut state = self.state.write();
            // Cutting a hole needs one VMA more.
            if state.vmas.splits(addr.0, end) == 2 && state.vmas.find(addr.0).is_some_and(|v| v.end > end) {
                if state.vmas.len() >= MAX_MAP_COUNT {
                    return Err(Errno::ENOMEM);
                }
                state.charge_vmas(1)?;
            }
            self.unmap_locked(&mut state, addr.0, end, &mut removed);
        }
        removed.let_go(self.memory());
        Ok(())
    }

    /// The range check of munmap(2): EINVAL for an unaligned start, nothing, or anything beyond the program's half.
    fn check_range(addr: UserAddr, len: u64) -> Result<u64> {
        if addr.page_offset() != 0 || addr.0 > TASK_SIZE || len > TASK_SIZE - addr.0 {
            return Err(Errno::EINVAL);
        }
        match page_ceil(len) {
            None | Some(0) => Err(Errno::EINVAL),
            Some(len) => Ok(addr.0 + len),
        }
    }

    pub(super) fn unmap_locked(&self, state: &mut State, start: u64, end: u64, removed: &mut Removed) {
        state.direct.forget(start, end);
        let vmas = state.vmas.remove_range(start, end);
        let (Some(first), Some(last)) = (vmas.first(), vmas.last()) else { return };
        self.drop_entries(state, first.start, last.end, removed);
        removed.vmas.extend(vmas);
    }

    /// Clears all entries in `start..end`, but not trampolines, which no VMA shows.
    pub(super) fn drop_entries(&self, state: &mut State, start: u64, end: u64, removed: &mut Removed) {
        self.drop_entries_but(state, start, end, PteFlags::TRAMPOLINES, removed);
    }

    /// Clears the entries in `start..end` that have none of the flags `kept`.
    pub(super) fn drop_entries_but(
        &self,
        state: &mut State,
        start: u64,
        end: u64,
        kept: PteFlags,
        removed: &mut Removed,
    ) {
        if state.anonymous + state.object_pages == 0 {
            return;
        }
        let (private, others) = self.pages.renounce(start, end);
        state.count_out_many(private, others);
        self.pages.update(start, end, &mut |_, pte| {
            if pte.flags.intersects(kept) {
                return Some(pte);
            }
            state.count_out(pte.flags);
            if pte.flags.contains(PteFlags::OWNED) {
                removed.frames.push(pte.pa);
            }
            None
        });
    }

    /// Drops every mapping (exec, exit); frames are released at once.
    pub fn clear(&self) {
        let mut removed = Removed::default();
        {
            let mut state = self.state.write();
            removed.vmas = state.vmas.take_all();
            state.direct = DirectSites::default();
            self.drop_entries_but(&mut state, 0, TASK_SIZE, PteFlags::empty(), &mut removed);
            (state.brk, state.brk_base) = (0, 0);
        }
        removed.let_go(self.memory());
        let exe = self.image.lock().exe.take();
        drop(exe);
    }

    /// Drops entries that show `start..end` bytes of an object that was truncated, punched, or copied up. Past the
    /// object's end, private copies go too (as Linux does at truncation).
    pub fn unmap_object(&self, object: &dyn Mappable, start: u64, end: u64) {
        let key = object.key();
        let (start, end) = (start & PAGE_MASK, page_ceil(end).unwrap_or(PAGE_MASK));
        let size = object.size();
        let mut removed = Removed::default();
        {
            let mut state = self.state.write();
            let mut ranges = Vec::new();
            for vma in state.vmas.iter() {
                let Backing::Object { object: mapped, .. } = &vma.backing else { continue };
                let vma_end = vma.offset.saturating_add(vma.end - vma.start);
                if mapped.key() != key || vma.offset >= end || vma_end <= start {
                    continue;
                }
                let from = vma.start + start.saturating_sub(vma.offset);
                let to = vma.start + (end.min(vma_end) - vma.offset);
                ranges.push((from, to, vma.offset, vma.start));
            }
            for (from, to, offset, base) in ranges {
                self.pages.update(from, to, &mut |va, pte| {
                    let past_end = offset + (va - base) >= size;
                    if is_private_page(pte.flags) && !past_end {
                        return Some(pte);
                    }
                    state.count_out(pte.flags);
                    if pte.flags.contains(PteFlags::OWNED) {
                        removed.frames.push(pte.pa);
                    }
                    None
                });
            }
        }
        removed.let_go(self.memory());
    }

    /// Sets the start of the heap (exec).
    pub fn set_brk_base(&self, addr: UserAddr) {
        let mut state = self.state.write();
        state.brk_base = addr.0;
        state.brk = addr.0;
    }

    /// The start of the heap and the break.
    pub fn brk_range(&self) -> (u64, u64) {
        let state = self.state.read();
        (state.brk_base, state.brk)
    }

    /// brk(2): gives the new (or unchanged) break.
    pub fn brk(self: &Arc<Self>, addr: UserAddr) -> UserAddr {
        let data = {
            let image = self.image.lock();
            image.end_data.saturating_sub(image.start_data)
        };
        let mut removed = Removed::default();
        let (brk, populate) = {
            let mut state = self.state.write();
            self.brk_locked(&mut state, addr.0, data, &mut removed)
        };
        removed.let_go(self.memory());
        if let Some((start, end)) = populate {
            let _ = self.populate(start, end, None);
        }
        UserAddr(brk)
    }

    fn brk_locked(&self, state: &mut State, addr: u64, data: u64, removed: &mut Removed) -> (u64, Option<(u64, u64)>) {
        let unchanged = (state.brk, None);
        if addr < state.brk_base || addr > TASK_SIZE || state.brk_base == 0 {
            return unchanged;
        }
        if (addr - state.brk_base).saturating_add(data) > state.limits.data {
            return unchanged;
        }
        let (Some(old), Some(new)) = (page_ceil(state.brk), page_ceil(addr)) else { return unchanged };
        if new < old {
            self.unmap_locked(state, new, old, removed);
        } else if new > old {
            let flags = state.future;
            // One page is kept free above the heap, and the guard below a stack.
            let room = state.vmas.place(new - old + PAGE_SIZE, old, new + PAGE_SIZE) == Some(old);
            let prot = Prot::READ | Prot::WRITE;
            let pages = (new - old) / PAGE_SIZE;
            let locked = (state.vmas.locked + pages).saturating_mul(PAGE_SIZE) > state.limits.memlock;
            if !room
                || state.vmas.len() > MAX_MAP_COUNT
                || state.charge_vmas(1).is_err()
                || (flags.contains(MapFlags::LOCKED) && locked)
                || self.may_expand(state, pages, prot, flags).is_err()
            {
                return unchanged;
            }
            self.make_way(state, old, new);
            state.vmas.insert(Vma {
                start: old,
                end: new,
                prot,
                flags,
                backing: Backing::Anonymous,
                offset: 0,
                windows: BTreeMap::new(),
                ahead: Ahead::default(),
                name: None,
            });
            state.brk = addr;
            self.prefill_heap(state, old, new);
            let fill = flags.contains(MapFlags::LOCKED) && !flags.contains(MapFlags::LOCKED_ONFAULT);
            return (addr, fill.then_some((old, new)));
        }
        state.brk = addr;
        (addr, None)
    }

    /// All VMAs in order; `resident` counts present pages too.
    pub fn maps(&self, resident: bool) -> Vec<VmaInfo> {
        let mut list: Vec<VmaInfo> = {
            let state = self.state.read();
            state.vmas.iter().map(|vma| self.describe(&state, vma, resident)).collect()
        };
        // Paths take locks of the VFS, which come before the space's.
        for info in &mut list {
            info.name_file();
        }
        list
    }

    /// The VMA at `addr`, or the next one above.
    pub fn find_vma(&self, addr: UserAddr, resident: bool) -> Option<VmaInfo> {
        let mut info = {
            let state = self.state.read();
            let vma = state.vmas.find(addr.0).or_else(|| state.vmas.next_from(addr.0))?;
            self.describe(&state, vma, resident)
        };
        info.name_file();
        Some(info)
    }

    fn describe(&self, state: &State, vma: &Vma, resident: bool) -> VmaInfo {
        let mut present = 0;
        if resident {
            self.pages.visit(vma.start, vma.end, &mut |_, _, _| present += PAGE_SIZE);
        }
        let (source, name) = match &vma.backing {
            Backing::Anonymous => {
                let name = if vma.flags.contains(MapFlags::STACK) {
                    b"[stack]".to_vec()
                } else if vma.start < state.brk && vma.end > state.brk_base {
                    b"[heap]".to_vec()
                } else {
                    vma.name.as_ref().map_or_else(Vec::new, |name| [b"[anon:", &**name, b"]"].concat())
                };
                (MapSource::Anonymous, name)
            }
            Backing::Object { object, file, may_write } => {
                let (object, file) = (object.clone(), file.clone());
                let name = if file.is_some() { Vec::new() } else { b"/dev/zero (deleted)".to_vec() };
                (MapSource::File { object, offset: vma.offset, file, may_write: *may_write }, name)
            }
            Backing::Special { name, frames } => {
                (MapSource::Special { name, frames: frames.clone() }, name.as_bytes().to_vec())
            }
        };
        VmaInfo {
            start: vma.start,
            end: vma.end,
            prot: vma.prot,
            flags: vma.flags,
            source,
            offset: vma.offset,
            resident: present,
            name,
        }
    }

    /// Total mapped bytes and resident bytes.
    pub fn sizes(&self) -> (u64, u64) {
        let usage = self.usage();
        (usage.total, usage.anonymous + usage.file)
    }

    /// What /proc/PID/status and statm show.
    pub fn usage(&self) -> Usage {
        let state = self.state.read();
        Usage {
            total: state.vmas.total * PAGE_SIZE,
            data: state.vmas.data * PAGE_SIZE,
            locked: state.vmas.locked * PAGE_SIZE,
            anonymous: state.anonymous * PAGE_SIZE,
            file: state.object_pages * PAGE_SIZE,
            peak: state.peak * PAGE_SIZE,
        }
    }

    /// The membarrier(2) registrations; those in `add` are added.
    pub fn barrier_registrations(&self, add: u32) -> u32 {
        self.barriers.fetch_or(add, Ordering::SeqCst) | add
    }

    /// Stores an entry where there was none, counted.
    pub(super) fn enter(&self, state: &mut State, va: u64, pte: Pte) -> Result<()> {
        self.pages.map(va, pte)?;
        state.count_in(pte.flags, 1);
        Ok(())
    }
}

/// Memory use of a space, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// VmSize.
    pub total: u64,
    /// VmData: private writable mappings.
    pub data: u64,
    /// VmLck.
    pub locked: u64,
    /// RssAnon.
    pub anonymous: u64,
    /// RssFile and RssShmem.
    pub file: u64,
    /// VmHWM.
    pub peak: u64,
}

/// Identity of a futex word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FutexKey {
    /// Private to an address space: its identity and the address.
    Private(u64, u64),
    /// In a shared mapping: the object's key and byte offset.
    Shared((u64, u64), u64),
}
