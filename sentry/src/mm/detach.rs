//! shmdt(2): finding and dropping the mappings of one attached segment.
use guest_abi::UserAddr;

use super::AddressSpace;
use super::space::{Removed, page_ceil};
use super::vma::Backing;
use crate::{Errno, Result};

impl AddressSpace {
    /// Unmaps what is left of an object of device `dev` that was mapped at `addr` from its beginning; gives the object's inode
    /// number. EINVAL if there is none.
    pub fn detach(&self, addr: UserAddr, dev: u64) -> Result<u64> {
        if addr.page_offset() != 0 {
            return Err(Errno::EINVAL);
        }
        let mut removed = Removed::default();
        let found = {
            let mut state = self.state.write();
            let (mut found, mut end, mut at) = (None, u64::MAX, addr.0);
            let mut ranges = Vec::new();
            while let Some(vma) = state.vmas.find(at).or_else(|| state.vmas.next_from(at)) {
                if vma.start >= end {
                    break;
                }
                at = vma.end;
                let Backing::Object { object, .. } = &vma.backing else { continue };
                let key = object.key();
                let in_place = vma.start.checked_sub(addr.0) == Some(vma.offset);
                if key.0 != dev || !in_place || found.is_some_and(|ino| ino != key.1) {
                    continue;
                }
                if found.is_none() {
                    found = Some(key.1);
                    end = page_ceil(object.size()).and_then(|len| addr.0.checked_add(len)).unwrap_or(u64::MAX);
                }
                if vma.end <= end {
                    ranges.push((vma.start, vma.end));
                }
            }
            for (start, end) in ranges {
                self.unmap_locked(&mut state, start, end, &mut removed);
            }
            found
        };
        removed.let_go(self.memory());
        found.ok_or(Errno::EINVAL)
    }
}
