//! mprotect(2).
use guest_abi::UserAddr;
use guest_abi::layout::TASK_SIZE;

use super::AddressSpace;
use super::space::{MAX_MAP_COUNT, MapFlags, Prot, State, is_private_page, page_ceil};
use super::vma::{Backing, Vma};
use crate::platform::PteFlags;
use crate::{Errno, Result};

impl AddressSpace {
    /// mprotect(2). `grows_down` is PROT_GROWSDOWN: the change reaches down to the start of the stack.
    pub fn protect(&self, addr: UserAddr, len: u64, prot: Prot, grows_down: bool) -> Result<()> {
        if addr.page_offset() != 0 {
            return Err(Errno::EINVAL);
        }
        if len == 0 {
            return Ok(());
        }
        let len = page_ceil(len).ok_or(Errno::ENOMEM)?;
        let end = addr.0.checked_add(len).filter(|&e| e <= TASK_SIZE).ok_or(Errno::ENOMEM)?;
        let mut state = self.state.write();
        let mut start = addr.0;
        let first = state.vmas.overlapping(start, end).next().ok_or(Errno::ENOMEM)?;
        if grows_down {
            if !first.flags.contains(MapFlags::GROWSDOWN) {
                return Err(Errno::EINVAL);
            }
            start = first.start;
        } else if first.start > start {
            return Err(Errno::ENOMEM);
        }
        // As Linux: what comes before a hole or a refusal is changed, then the call fails.
        let (good_end, result) = self.protectable(&state, start, end, prot);
        if start < good_end {
            if state.vmas.len() + state.vmas.splits(start, good_end) > MAX_MAP_COUNT {
                return Err(Errno::ENOMEM);
            }
            state.charge_vmas(2)?;
            self.protect_range(&mut state, start, good_end, prot);
            let stack_top = prot.contains(Prot::WRITE)
                && state
                    .vmas
                    .find(start)
                    .is_some_and(|v| v.flags.contains(MapFlags::THREAD_STACK) && v.end == good_end);
            if stack_top {
                self.prefill(&mut state, start, good_end, MapFlags::empty());
            }
        }
        result
    }

    /// How far from `start` on the change is allowed, and why not further.
    fn protectable(&self, state: &State, start: u64, end: u64, prot: Prot) -> (u64, Result<()>) {
        let mut at = start;
        for vma in state.vmas.overlapping(start, end) {
            if vma.start > at {
                return (at, Err(Errno::ENOMEM));
            }
            if prot.contains(Prot::WRITE) && !vma.may_write() {
                return (at, Err(Errno::EACCES));
            }
            let pages = (vma.end.min(end) - at) / guest_abi::layout::PAGE_SIZE;
            if Vma::accountable(prot, vma.flags)
                && !Vma::accountable(vma.prot, vma.flags)
                && let Err(e) = self.may_commit(pages, prot, vma.flags)
            {
                return (at, Err(e));
            }
            let becomes_data = Vma::is_data(prot, vma.flags) && !Vma::is_data(vma.prot, vma.flags);
            if becomes_data
                && (state.vmas.data + pages).saturating_mul(guest_abi::layout::PAGE_SIZE) > state.limits.data
            {
                return (at, Err(Errno::ENOMEM));
            }
            at = vma.end.min(end);
        }
        if at < end { (at, Err(Errno::ENOMEM)) } else { (end, Ok(())) }
    }

    fn protect_range(&self, state: &mut State, start: u64, end: u64, prot: Prot) {
        if prot != Prot::READ | Prot::EXEC {
            self.undo_direct(state, start, end);
        }
        let mut changed = Vec::new();
        state.vmas.change_range(start, end, |vma| {
            if vma.prot != prot {
                vma.prot = prot;
                let notify = match &vma.backing {
                    Backing::Object { object, .. } => vma.shared() && object.write_notify(),
                    _ => false,
                };
                changed.push((vma.start, vma.end, vma.entry_flags(), vma.shared(), notify));
            }
        });
        if state.anonymous + state.object_pages == 0 {
            return;
        }
        let memory = self.memory();
        for (start, end, entry, shared, notify) in changed {
            let writable = prot.contains(Prot::WRITE);
            self.pages.update(start, end, &mut |_, mut pte| {
                let had_write = pte.flags.contains(PteFlags::WRITE);
                pte.flags -= PteFlags::EXEC | PteFlags::NONE | PteFlags::WRITE;
                pte.flags.set(PteFlags::PATCHED, pte.flags.contains(PteFlags::PATCHED) && !writable);
                pte.flags |= entry;
                // Rights that a fault would only confirm are given at once.
                let write = if shared {
                    had_write || !notify
                } else {
                    is_private_page(pte.flags) && memory.references(pte.pa) == 1
                };
                pte.flags.set(PteFlags::WRITE, writable && write);
                Some(pte)
            });
        }
    }
}
