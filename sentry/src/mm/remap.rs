//! mremap(2).
use std::sync::Arc;

use guest_abi::UserAddr;
use guest_abi::layout::{PAGE_SIZE, TASK_SIZE};

use super::space::{MAX_MAP_COUNT, MapFlags, Removed, State, page_ceil};
use super::vma::{Ahead, Backing, Vma};
use super::{AddressSpace, PAGE_MASK};
use crate::platform::{Pte, PteFlags};
use crate::{Errno, Result};

/// What mremap(2) may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RemapFlags {
    /// MREMAP_MAYMOVE.
    pub may_move: bool,
    /// MREMAP_FIXED: the wanted address.
    pub fixed: Option<UserAddr>,
    /// MREMAP_DONTUNMAP.
    pub dont_unmap: bool,
    /// The wanted address of MREMAP_DONTUNMAP without FIXED, a hint.
    pub hint: UserAddr,
}

impl AddressSpace {
    /// mremap(2). Gives the new address.
    pub fn remap(self: &Arc<Self>, addr: UserAddr, old_len: u64, new_len: u64, flags: RemapFlags) -> Result<UserAddr> {
        if (flags.fixed.is_some() || flags.dont_unmap) && !flags.may_move {
            return Err(Errno::EINVAL);
        }
        if (flags.dont_unmap && old_len != new_len) || addr.page_offset() != 0 {
            return Err(Errno::EINVAL);
        }
        let old_len = page_ceil(old_len).ok_or(Errno::EINVAL)?;
        let new_len = page_ceil(new_len).filter(|&l| l != 0).ok_or(Errno::EINVAL)?;
        let mut removed = Removed::default();
        let result = {
            let mut state = self.state.write();
            self.remap_locked(&mut state, addr.0, old_len, new_len, flags, &mut removed)
        };
        removed.let_go(self.memory());
        let (at, grown) = result?;
        if let Some((start, end)) = grown {
            let _ = self.populate(start, end, None);
        }
        Ok(UserAddr(at))
    }

    fn remap_locked(
        &self,
        state: &mut State,
        addr: u64,
        mut old_len: u64,
        new_len: u64,
        flags: RemapFlags,
        removed: &mut Removed,
    ) -> Result<(u64, Option<(u64, u64)>)> {
        let targeted = flags.fixed.is_some() || flags.dont_unmap;
        if targeted {
            let wanted = flags.fixed.unwrap_or(flags.hint).0;
            if wanted & !PAGE_MASK != 0 || new_len > TASK_SIZE || wanted > TASK_SIZE - new_len {
                return Err(Errno::EINVAL);
            }
            let overlap = addr.saturating_add(old_len) > wanted && wanted.saturating_add(new_len) > addr;
            if overlap && (flags.fixed.is_some() || wanted != 0) {
                return Err(Errno::EINVAL);
            }
            if state.vmas.len() + 2 >= MAX_MAP_COUNT - 3 {
                return Err(Errno::ENOMEM);
            }
            state.charge_vmas(4)?;
            if let Some(wanted) = flags.fixed {
                Self::check_fixed(wanted.0, new_len)?;
                self.unmap_locked(state, wanted.0, wanted.0 + new_len, removed);
            }
        }
        if addr.checked_add(old_len).is_none_or(|end| end > TASK_SIZE) {
            return Err(if old_len > new_len { Errno::EINVAL } else { Errno::EFAULT });
        }
        if old_len > new_len {
            // The tail goes in any case; the rest may span several VMAs if it does not move.
            if state.vmas.find(addr).is_none() {
                return Err(Errno::EFAULT);
            }
            if state.vmas.len() + state.vmas.splits(addr + new_len, addr + old_len) > MAX_MAP_COUNT {
                return Err(Errno::ENOMEM);
            }
            self.unmap_locked(state, addr + new_len, addr + old_len, removed);
            old_len = new_len;
        }
        if old_len == new_len && !targeted {
            return if state.vmas.find(addr).is_some() { Ok((addr, None)) } else { Err(Errno::EFAULT) };
        }
        let vma = self.resizable(state, addr, old_len, new_len, flags)?;
        let locked = vma.flags.contains(MapFlags::LOCKED) && !vma.flags.contains(MapFlags::LOCKED_ONFAULT);
        let (start, end) = (vma.start, vma.end);
        if !targeted && old_len > 0 && addr + old_len == end {
            // In place, where there is room above.
            let new_end = addr.checked_add(new_len).filter(|&e| e <= TASK_SIZE);
            if let Some(new_end) = new_end.filter(|&e| state.vmas.place(e - end, end, e) == Some(end)) {
                self.make_way(state, end, new_end);
                state.vmas.grow_up(start, new_end);
                return Ok((addr, locked.then_some((end, new_end))));
            }
        }
        if !flags.may_move {
            return Err(Errno::ENOMEM);
        }
        if state.vmas.len() >= MAX_MAP_COUNT - 3 {
            return Err(Errno::ENOMEM);
        }
        state.charge_vmas(3)?;
        let target = match flags.fixed {
            Some(wanted) => wanted.0,
            None => {
                Self::place(state, if flags.dont_unmap { flags.hint.0 } else { 0 }, new_len).ok_or(Errno::ENOMEM)?
            }
        };
        self.move_range(state, addr, old_len, target, new_len, flags.dont_unmap, removed)?;
        Ok((target, (locked && new_len > old_len).then_some((target + old_len, target + new_len))))
    }

    /// The VMA to be resized, if it may be (Linux's vma_to_resize).
    fn resizable(&self, state: &State, addr: u64, old_len: u64, new_len: u64, flags: RemapFlags) -> Result<Vma> {
        let vma = state.vmas.find(addr).ok_or(Errno::EFAULT)?;
        if old_len == 0 && (!vma.shared() || matches!(vma.backing, Backing::Special { .. })) {
            // A second mapping of the same pages makes sense for shared ones only.
            return Err(Errno::EINVAL);
        }
        let special = matches!(vma.backing, Backing::Special { .. });
        if flags.dont_unmap && special {
            return Err(Errno::EINVAL);
        }
        if old_len > vma.end - addr {
            return Err(Errno::EFAULT);
        }
        if new_len > old_len {
            if special {
                return Err(Errno::EFAULT);
            }
            if vma.offset_of(addr).checked_add(new_len).is_none() {
                return Err(Errno::EINVAL);
            }
            let pages = (new_len - old_len) / PAGE_SIZE;
            if vma.flags.contains(MapFlags::LOCKED)
                && (state.vmas.locked + pages).saturating_mul(PAGE_SIZE) > state.limits.memlock
            {
                return Err(Errno::EAGAIN);
            }
            self.may_expand(state, pages, vma.prot, vma.flags)?;
        } else if flags.dont_unmap {
            self.may_expand(state, new_len / PAGE_SIZE, vma.prot, vma.flags)?;
        }
        Ok(vma.clone())
    }

    /// Moves the pages of `addr..addr + old_len` to `target`, where a VMA of `new_len` bytes shows the same.
    #[allow(clippy::too_many_arguments)]
    fn move_range(
        &self,
        state: &mut State,
        addr: u64,
        old_len: u64,
        target: u64,
        new_len: u64,
        keep_old: bool,
        removed: &mut Removed,
    ) -> Result<()> {
        let mut vma = state.vmas.find(addr).ok_or(Errno::EFAULT)?.clone();
        if matches!(vma.backing, Backing::Object { .. } | Backing::Special { .. }) {
            vma.offset = vma.offset_of(addr);
        }
        vma.start = target;
        vma.end = target + new_len;
        vma.ahead = Ahead::default();
        if keep_old {
            // The old range stays, empty and unlocked.
            state.vmas.change_range(addr, addr + old_len, |v| {
                v.flags -= MapFlags::LOCKED | MapFlags::LOCKED_ONFAULT;
            });
        } else if old_len > 0 {
            removed.vmas.extend(state.vmas.remove_range(addr, addr + old_len));
        }
        self.make_way(state, target, target + new_len);
        state.vmas.insert(vma);
        state.direct.forget(addr, addr + old_len);
        if old_len == 0 {
            return Ok(());
        }
        let mut moved: Vec<(u64, Pte)> = Vec::new();
        self.pages.update(addr, addr + old_len, &mut |va, pte| {
            if pte.flags.contains(PteFlags::PATCHED) {
                // Its jumps lead from here; the file has the same without them.
                state.count_out(pte.flags);
                removed.frames.push(pte.pa);
            } else {
                moved.push((va, pte));
            }
            None
        });
        for (va, pte) in moved {
            if self.pages.map(va - addr + target, pte).is_err() {
                state.count_out(pte.flags);
                if pte.flags.contains(PteFlags::OWNED) {
                    removed.frames.push(pte.pa);
                }
            }
        }
        Ok(())
    }
}
