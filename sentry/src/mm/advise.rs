//! madvise(2), mincore(2), msync(2), mlock(2) and its family.
use std::sync::Arc;

use guest_abi::UserAddr;
use guest_abi::layout::{PAGE_SIZE, TASK_SIZE};

use super::space::{FaultSignal, MAX_MAP_COUNT, MapFlags, Removed, State, is_private_page, page_ceil};
use super::vma::{Backing, Vma};
use super::{AddressSpace, Mappable, PAGE_MASK};
use crate::platform::PteFlags;
use crate::{Errno, Result};

/// MADV_* of madvise(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Advice {
    Normal,
    Random,
    Sequential,
    WillNeed,
    DontNeed,
    DontNeedLocked,
    Free,
    Remove,
    DontFork,
    DoFork,
    WipeOnFork,
    KeepOnFork,
    DontDump,
    DoDump,
    Mergeable,
    Unmergeable,
    HugePage,
    NoHugePage,
    Cold,
    PageOut,
    PopulateRead,
    PopulateWrite,
}

impl Advice {
    /// From the number; EINVAL for one that is not known.
    pub fn from_raw(raw: u32) -> Result<Advice> {
        Ok(match raw {
            0 => Advice::Normal,
            1 => Advice::Random,
            2 => Advice::Sequential,
            3 => Advice::WillNeed,
            4 => Advice::DontNeed,
            8 => Advice::Free,
            9 => Advice::Remove,
            10 => Advice::DontFork,
            11 => Advice::DoFork,
            12 => Advice::Mergeable,
            13 => Advice::Unmergeable,
            14 => Advice::HugePage,
            15 => Advice::NoHugePage,
            16 => Advice::DontDump,
            17 => Advice::DoDump,
            18 => Advice::WipeOnFork,
            19 => Advice::KeepOnFork,
            20 => Advice::Cold,
            21 => Advice::PageOut,
            22 => Advice::PopulateRead,
            23 => Advice::PopulateWrite,
            24 => Advice::DontNeedLocked,
            _ => return Err(Errno::EINVAL),
        })
    }
}

/// The flags an advice sets and clears, for advices that only change flags.
fn flag_change(advice: Advice) -> Option<(MapFlags, MapFlags)> {
    let none = MapFlags::empty();
    Some(match advice {
        Advice::Normal => (none, MapFlags::RANDOM | MapFlags::SEQUENTIAL),
        Advice::Random => (MapFlags::RANDOM, MapFlags::SEQUENTIAL),
        Advice::Sequential => (MapFlags::SEQUENTIAL, MapFlags::RANDOM),
        Advice::DontFork => (MapFlags::DONTFORK, none),
        Advice::DoFork => (none, MapFlags::DONTFORK),
        Advice::WipeOnFork => (MapFlags::WIPEONFORK, none),
        Advice::KeepOnFork => (none, MapFlags::WIPEONFORK),
        Advice::DontDump => (MapFlags::DONTDUMP, none),
        Advice::DoDump => (none, MapFlags::DONTDUMP),
        Advice::HugePage => (MapFlags::HUGEPAGE, MapFlags::NOHUGEPAGE),
        Advice::NoHugePage => (MapFlags::NOHUGEPAGE, MapFlags::HUGEPAGE),
        _ => return None,
    })
}

fn check_one(vma: &Vma, advice: Advice) -> Result<()> {
    let special = matches!(vma.backing, Backing::Special { .. });
    let private_anonymous = matches!(vma.backing, Backing::Anonymous);
    let locked = vma.flags.contains(MapFlags::LOCKED);
    match advice {
        Advice::DontNeed | Advice::Cold | Advice::PageOut if locked => Err(Errno::EINVAL),
        Advice::DontNeedLocked if special => Err(Errno::EINVAL),
        Advice::Free | Advice::WipeOnFork if !private_anonymous => Err(Errno::EINVAL),
        Advice::Remove if locked => Err(Errno::EINVAL),
        Advice::Remove => match &vma.backing {
            Backing::Object { .. } if !(vma.shared() && vma.writable()) => Err(Errno::EACCES),
            Backing::Object { .. } => Ok(()),
            _ => Err(Errno::EINVAL),
        },
        Advice::DoDump | Advice::DoFork | Advice::HugePage if special => Err(Errno::EINVAL),
        _ => Ok(()),
    }
}

/// The end of `addr..addr + len` in whole pages for the calls that say ENOMEM to what lies outside.
fn range(addr: UserAddr, len: u64, outside: Errno) -> Result<(u64, u64)> {
    if addr.page_offset() != 0 {
        return Err(Errno::EINVAL);
    }
    let end = page_ceil(len).and_then(|len| addr.0.checked_add(len)).ok_or(outside)?;
    Ok((addr.0, end))
}

/// Why MADV_POPULATE_READ or MADV_POPULATE_WRITE fails.
pub fn advice_error(signal: FaultSignal) -> Errno {
    match signal {
        FaultSignal::NotMapped | FaultSignal::OutOfMemory => Errno::ENOMEM,
        FaultSignal::Access => Errno::EINVAL,
        FaultSignal::Bus => Errno::EFAULT,
    }
}

/// Why mlock(2) fails when the pages cannot be had.
pub fn lock_error(signal: FaultSignal) -> Errno {
    match signal {
        FaultSignal::OutOfMemory => Errno::EAGAIN,
        _ => Errno::ENOMEM,
    }
}

impl AddressSpace {
    /// madvise(2) but for MADV_POPULATE_*. Parts that are not mapped are passed over, then reported as ENOMEM.
    pub fn advise(self: &Arc<Self>, addr: UserAddr, len: u64, advice: Advice) -> Result<()> {
        let (start, end) = range(addr, len, Errno::EINVAL)?;
        if start == end {
            return Ok(());
        }
        let mut removed = Removed::default();
        let mut holes = Vec::new();
        let result = {
            let mut state = self.state.write();
            self.advise_locked(&mut state, start, end, advice, &mut removed, &mut holes)
        };
        removed.let_go(self.memory());
        for (object, from, to) in holes {
            object.punch_hole(from, to)?;
        }
        result
    }

    fn advise_locked(
        &self,
        state: &mut State,
        start: u64,
        end: u64,
        advice: Advice,
        removed: &mut Removed,
        holes: &mut Vec<(Arc<dyn Mappable>, u64, u64)>,
    ) -> Result<()> {
        let mut at = start;
        let mut hole = false;
        let mut refused = Ok(());
        let mut drops = Vec::new();
        let mut last = start;
        for vma in state.vmas.overlapping(start, end) {
            if vma.start > at {
                hole = true;
            }
            refused = check_one(vma, advice);
            if refused.is_err() {
                break;
            }
            let (from, to) = (vma.start.max(start), vma.end.min(end));
            if let (Advice::Remove, Backing::Object { object, .. }) = (advice, &vma.backing) {
                holes.push((object.clone(), vma.offset_of(from), vma.offset_of(to)));
            }
            if matches!(advice, Advice::DontNeed | Advice::DontNeedLocked | Advice::Free | Advice::Remove) {
                drops.push((from, to));
            }
            at = vma.end;
            last = to;
        }
        if at < end && refused.is_ok() {
            hole = true;
        }
        if let Some((set, clear)) = flag_change(advice)
            && last > start
        {
            if state.vmas.len() + state.vmas.splits(start, last) > MAX_MAP_COUNT {
                return Err(Errno::EAGAIN);
            }
            state.charge_vmas(2).map_err(|_| Errno::EAGAIN)?;
            let unchanged = state.vmas.overlapping(start, last).all(|v| (v.flags | set) - clear == v.flags);
            if !unchanged {
                state.vmas.change_range(start, last, |vma| vma.flags = (vma.flags | set) - clear);
            }
        }
        for (from, to) in drops {
            // Text with direct calls shows what the file does: it stays, for CPUs that are in it.
            self.drop_entries_but(state, from, to, PteFlags::TRAMPOLINES | PteFlags::PATCHED, removed);
            if let Some(vma) = state.vmas.find_mut(from) {
                vma.ahead = super::vma::Ahead::default();
            }
        }
        refused?;
        if hole { Err(Errno::ENOMEM) } else { Ok(()) }
    }

    /// The range of MADV_POPULATE_READ and MADV_POPULATE_WRITE, for [`AddressSpace::populate`]; its failure is told by
    /// [`advice_error`].
    pub fn advised_range(addr: UserAddr, len: u64) -> Result<(u64, u64)> {
        let (start, end) = range(addr, len, Errno::EINVAL)?;
        if end > TASK_SIZE { Err(Errno::ENOMEM) } else { Ok((start, end)) }
    }

    /// PR_SET_VMA_ANON_NAME: names private anonymous mappings. EBADF for others, ENOMEM for holes.
    pub fn name_anonymous(&self, addr: UserAddr, len: u64, name: Option<&[u8]>) -> Result<()> {
        let (start, end) = range(addr, len, Errno::EINVAL)?;
        if start == end {
            return Ok(());
        }
        let name: Option<Arc<[u8]>> = name.map(Arc::from);
        let mut state = self.state.write();
        if state.vmas.overlapping(start, end).any(|v| !matches!(v.backing, Backing::Anonymous)) {
            return Err(Errno::EBADF);
        }
        if state.vmas.len() + state.vmas.splits(start, end) > MAX_MAP_COUNT {
            return Err(Errno::ENOMEM);
        }
        state.charge_vmas(2)?;
        let whole = state.vmas.mapped_pages(start, end) == (end - start) / PAGE_SIZE;
        state.vmas.change_range(start, end, |vma| vma.name.clone_from(&name));
        if whole { Ok(()) } else { Err(Errno::ENOMEM) }
    }

    /// mincore(2) for `pages` pages: one byte each, bit 0 set where the page is in memory. ENOMEM for holes.
    pub fn mincore(&self, addr: UserAddr, pages: usize) -> Result<Vec<u8>> {
        let (start, end) = range(addr, pages as u64 * PAGE_SIZE, Errno::ENOMEM)?;
        let state = self.state.read();
        let mut bytes = Vec::with_capacity(pages);
        let mut at = start;
        for vma in state.vmas.overlapping(start, end) {
            if vma.start > at {
                return Err(Errno::ENOMEM);
            }
            while at < vma.end.min(end) {
                let there = self.pages.lookup(at).is_some()
                    || matches!(&vma.backing, Backing::Object { object, .. } if object.is_resident(vma.offset_of(at)));
                bytes.push(u8::from(there));
                at += PAGE_SIZE;
            }
        }
        if at < end { Err(Errno::ENOMEM) } else { Ok(bytes) }
    }

    /// msync(2) after its flags were checked.
    pub fn msync(&self, addr: UserAddr, len: u64, invalidate: bool, sync: bool) -> Result<()> {
        let (start, end) = range(addr, len, Errno::ENOMEM)?;
        let mut objects: Vec<Arc<dyn Mappable>> = Vec::new();
        let mut at = start;
        let mut hole = false;
        {
            let state = self.state.read();
            for vma in state.vmas.overlapping(start, end) {
                hole |= vma.start > at;
                if invalidate && vma.flags.contains(MapFlags::LOCKED) {
                    return Err(Errno::EBUSY);
                }
                if let (true, true, Backing::Object { object, .. }) = (sync, vma.shared(), &vma.backing)
                    && !objects.last().is_some_and(|o| Arc::ptr_eq(o, object))
                {
                    objects.push(object.clone());
                }
                at = vma.end;
            }
        }
        for object in objects {
            object.sync()?;
        }
        if hole || at < end { Err(Errno::ENOMEM) } else { Ok(()) }
    }

    /// mlock2(2) up to populating: gives the range for [`AddressSpace::populate`], whose failure is told by [`lock_error`].
    /// `unlimited` with CAP_IPC_LOCK.
    pub fn lock_pages(&self, addr: UserAddr, len: u64, on_fault: bool, unlimited: bool) -> Result<(u64, u64)> {
        let (start, end) = lock_range(addr, len)?;
        let whole = {
            let mut state = self.state.write();
            if !unlimited {
                if state.limits.memlock == 0 {
                    return Err(Errno::EPERM);
                }
                let already: u64 = state
                    .vmas
                    .overlapping(start, end)
                    .filter(|v| v.flags.contains(MapFlags::LOCKED))
                    .map(|v| (v.end.min(end) - v.start.max(start)) / PAGE_SIZE)
                    .sum();
                let pages = state.vmas.locked + (end - start) / PAGE_SIZE - already;
                if pages.saturating_mul(PAGE_SIZE) > state.limits.memlock {
                    return Err(Errno::ENOMEM);
                }
            }
            if start == end {
                return Ok((start, end));
            }
            let set = if on_fault { MapFlags::LOCKED | MapFlags::LOCKED_ONFAULT } else { MapFlags::LOCKED };
            Self::set_locked(&mut state, start, end, set)?
        };
        if !whole {
            return Err(Errno::ENOMEM);
        }
        Ok((start, if on_fault { start } else { end }))
    }

    /// munlock(2).
    pub fn unlock_pages(&self, addr: UserAddr, len: u64) -> Result<()> {
        let (start, end) = lock_range(addr, len)?;
        if start == end {
            return Ok(());
        }
        let mut state = self.state.write();
        if Self::set_locked(&mut state, start, end, MapFlags::empty())? { Ok(()) } else { Err(Errno::ENOMEM) }
    }

    /// Sets the lock flags of a range up to its first hole; whether there was none.
    fn set_locked(state: &mut State, start: u64, end: u64, set: MapFlags) -> Result<bool> {
        let mut at = start;
        for vma in state.vmas.overlapping(start, end) {
            if vma.start > at {
                break;
            }
            at = vma.end.min(end);
        }
        if at > start {
            if state.vmas.len() + state.vmas.splits(start, at) > MAX_MAP_COUNT {
                return Err(Errno::ENOMEM);
            }
            state.charge_vmas(2)?;
            state.vmas.change_range(start, at, |vma| {
                let lockable = !matches!(vma.backing, Backing::Special { .. });
                vma.flags -= MapFlags::LOCKED | MapFlags::LOCKED_ONFAULT;
                if lockable {
                    vma.flags |= set;
                }
            });
        }
        Ok(at >= end)
    }

    /// mlockall(2): `current` locks what is mapped, `future` what will be; `on_fault` as MCL_ONFAULT. Gives the ranges to be
    /// populated; failures of that are not reported, as in Linux.
    #[allow(clippy::fn_params_excessive_bools)] // the three flags of the call, and a capability
    pub fn lock_all(&self, current: bool, future: bool, on_fault: bool, unlimited: bool) -> Result<Vec<(u64, u64)>> {
        let set = if on_fault { MapFlags::LOCKED | MapFlags::LOCKED_ONFAULT } else { MapFlags::LOCKED };
        let mut state = self.state.write();
        if !unlimited {
            if state.limits.memlock == 0 {
                return Err(Errno::EPERM);
            }
            if current && state.vmas.total.saturating_mul(PAGE_SIZE) > state.limits.memlock {
                return Err(Errno::ENOMEM);
            }
        }
        state.future = if future { set } else { MapFlags::empty() };
        if !current {
            return Ok(Vec::new());
        }
        let all = Self::all_ranges(&state);
        for (start, end) in &all {
            Self::set_locked(&mut state, *start, *end, set)?;
        }
        Ok(if on_fault { Vec::new() } else { all })
    }

    /// munlockall(2).
    pub fn unlock_all(&self) -> Result<()> {
        let mut state = self.state.write();
        state.future = MapFlags::empty();
        for (start, end) in Self::all_ranges(&state) {
            Self::set_locked(&mut state, start, end, MapFlags::empty())?;
        }
        Ok(())
    }

    fn all_ranges(state: &State) -> Vec<(u64, u64)> {
        let mut all: Vec<(u64, u64)> = Vec::new();
        for vma in state.vmas.iter() {
            match all.last_mut() {
                Some(last) if last.1 == vma.start => last.1 = vma.end,
                _ => all.push((vma.start, vma.end)),
            }
        }
        all
    }

    /// Present pages of a range by kind, for smaps: (private, of objects, private and shared with a fork), bytes.
    pub fn resident_kinds(&self, start: u64, end: u64) -> (u64, u64, u64) {
        let memory = self.memory();
        let (mut private, mut object, mut shared) = (0, 0, 0);
        let _state = self.state.read();
        self.pages.visit(start & PAGE_MASK, end & PAGE_MASK, &mut |_, pte, by_forks| {
            if is_private_page(pte.flags) {
                private += PAGE_SIZE;
                if by_forks || memory.references(pte.pa) > 1 {
                    shared += PAGE_SIZE;
                }
            } else {
                object += PAGE_SIZE;
            }
        });
        (private, object, shared)
    }
}

/// The range of mlock(2): any start, in whole pages.
fn lock_range(addr: UserAddr, len: u64) -> Result<(u64, u64)> {
    let start = addr.0 & PAGE_MASK;
    let len = len.checked_add(addr.page_offset()).and_then(page_ceil).ok_or(Errno::EINVAL)?;
    let end = start.checked_add(len).ok_or(Errno::EINVAL)?;
    Ok((start, end))
}
