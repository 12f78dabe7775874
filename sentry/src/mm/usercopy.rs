//! The only judge of user pointers: copies between the program's memory and the sentry.
//!
//! A copy holds the space's lock, so that no page goes away under it; callers hold locks of lower rank only.
use std::sync::Arc;

use guest_abi::layout::{PAGE_SIZE, TASK_SIZE};
use guest_abi::{UserAddr, UserPtr};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::fault::Access;
use super::space::{FutexKey, State};
use super::vma::Backing;
use super::{AddressSpace, PAGE_MASK};
use crate::platform::{PhysAddr, PteFlags};
use crate::{Errno, Result};

/// Bytes copied under one hold of the lock.
const HOLD: usize = 128 << 10;
/// Runs of frames are joined only inside blocks of this size, which never span two host mappings.
pub(super) const BLOCK: u64 = 2 << 20;
/// Values up to this size are read through the stack.
const SMALL: usize = 256;

/// Gets a piece of guest-physical memory, its length, and how many bytes came before it.
type Piece<'a> = dyn FnMut(PhysAddr, usize, usize) -> Result<()> + 'a;

impl AddressSpace {
    /// Calls `f` with each piece of `addr..addr + len` as far as the access is allowed; gives the bytes done.
    pub(super) fn pieces(&self, addr: u64, len: usize, access: Access, f: &mut Piece<'_>) -> usize {
        let len = match TASK_SIZE.checked_sub(addr) {
            Some(room) => usize::try_from(room).map_or(len, |room| len.min(room)),
            None => return 0,
        };
        let mut done = 0;
        while done < len {
            let target = len.min(done + HOLD);
            let (now, fine) = {
                let _state = self.state.read();
                self.present_pieces(addr, done, target, access, f)
            };
            done = now;
            if !fine {
                return done;
            }
            if done < target {
                let mut state = self.state.write();
                let at = addr + done as u64;
                let Ok(pte) = self.fault_locked(&mut state, at, access) else { return done };
                let within = at % PAGE_SIZE;
                let n = (len - done).min((PAGE_SIZE - within) as usize);
                if f(PhysAddr(pte.pa.0 + within), n, done).is_err() {
                    return done;
                }
                done += n;
            }
        }
        done
    }

    /// As `pieces`, from `done` to `target`, up to the first page that is not present with the right; false if `f` failed.
    fn present_pieces(
        &self,
        addr: u64,
        mut done: usize,
        target: usize,
        access: Access,
        f: &mut Piece<'_>,
    ) -> (usize, bool) {
        while done < target {
            let at = addr + done as u64;
            let allowed = |va: u64| self.pages.lookup(va).filter(|pte| access.allowed_by(*pte));
            let Some(pte) = allowed(at & PAGE_MASK) else { break };
            let pa = pte.pa.0 + at % PAGE_SIZE;
            let mut end = pa - at % PAGE_SIZE + PAGE_SIZE;
            let mut n = (end - pa) as usize;
            while done + n < target && !end.is_multiple_of(BLOCK) {
                match allowed(at + n as u64) {
                    Some(next) if next.pa.0 == end => {
                        end += PAGE_SIZE;
                        n += PAGE_SIZE as usize;
                    }
                    _ => break,
                }
            }
            let n = n.min(target - done);
            if f(PhysAddr(pa), n, done).is_err() {
                return (done, false);
            }
            done += n;
        }
        (done, true)
    }

    fn read_with(&self, addr: UserAddr, buf: &mut [u8], access: Access) -> usize {
        let memory = self.memory();
        let len = buf.len();
        self.pieces(addr.0, len, access, &mut |pa, n, at| {
            memory.read(pa, buf.get_mut(at..at + n).ok_or(Errno::EFAULT)?)
        })
    }

    fn write_with(&self, addr: UserAddr, buf: &[u8], access: Access) -> usize {
        let memory = self.memory();
        self.pieces(addr.0, buf.len(), access, &mut |pa, n, at| {
            memory.write(pa, buf.get(at..at + n).ok_or(Errno::EFAULT)?)
        })
    }

    /// Copies in. EFAULT if any byte is not readable.
    pub fn read_bytes(self: &Arc<Self>, addr: UserAddr, buf: &mut [u8]) -> Result<()> {
        if self.read_partial(addr, buf) == buf.len() { Ok(()) } else { Err(Errno::EFAULT) }
    }

    /// Copies out. EFAULT if any byte is not writable (bytes before it may have been written).
    pub fn write_bytes(self: &Arc<Self>, addr: UserAddr, buf: &[u8]) -> Result<()> {
        if self.write_partial(addr, buf) == buf.len() { Ok(()) } else { Err(Errno::EFAULT) }
    }

    /// Copies in as much as is readable; gives the count.
    pub fn read_partial(self: &Arc<Self>, addr: UserAddr, buf: &mut [u8]) -> usize {
        self.read_with(addr, buf, Access::READ)
    }

    /// Copies in as much as is present and readable, without bringing in a page: for threads that must not wait for a file.
    pub fn read_present(self: &Arc<Self>, addr: UserAddr, buf: &mut [u8]) -> usize {
        let memory = self.memory();
        let Some(room) = TASK_SIZE.checked_sub(addr.0) else { return 0 };
        let len = usize::try_from(room).map_or(buf.len(), |room| buf.len().min(room));
        let _state = self.state.read();
        let (done, _) = self.present_pieces(addr.0, 0, len, Access::READ, &mut |pa, n, at| {
            memory.read(pa, buf.get_mut(at..at + n).ok_or(Errno::EFAULT)?)
        });
        done
    }

    /// Copies out as much as is writable; gives the count.
    pub fn write_partial(self: &Arc<Self>, addr: UserAddr, buf: &[u8]) -> usize {
        self.write_with(addr, buf, Access::WRITE)
    }

    /// Zeroes as much as is writable; gives the count.
    pub fn zero_partial(self: &Arc<Self>, addr: UserAddr, len: usize) -> usize {
        let memory = self.memory();
        self.pieces(addr.0, len, Access::WRITE, &mut |pa, n, _| memory.zero(pa, n))
    }

    /// Reads a value.
    pub fn read<T: FromBytes>(self: &Arc<Self>, ptr: UserPtr<T>) -> Result<T> {
        let mut small = [0; SMALL];
        if let Some(buf) = small.get_mut(..size_of::<T>()) {
            self.read_bytes(ptr.addr, buf)?;
            return T::read_from_bytes(buf).map_err(|_| Errno::EFAULT);
        }
        let mut large = vec![0; size_of::<T>()];
        self.read_bytes(ptr.addr, &mut large)?;
        T::read_from_bytes(&large).map_err(|_| Errno::EFAULT)
    }

    /// Writes a value.
    pub fn write<T: IntoBytes + Immutable>(self: &Arc<Self>, ptr: UserPtr<T>, value: &T) -> Result<()> {
        self.write_bytes(ptr.addr, value.as_bytes())
    }

    /// Reads `count` values; the caller bounds `count`.
    pub fn read_array<T: FromBytes>(self: &Arc<Self>, ptr: UserPtr<T>, count: usize) -> Result<Vec<T>> {
        let size = size_of::<T>().max(1);
        let mut bytes = vec![0; count.checked_mul(size).ok_or(Errno::EFAULT)?];
        self.read_bytes(ptr.addr, &mut bytes)?;
        bytes.chunks_exact(size).map(|c| T::read_from_bytes(c).map_err(|_| Errno::EFAULT)).collect()
    }

    /// Reads a string up to its NUL (not included); `too_long` if there is none within `max` bytes.
    pub fn read_cstr(self: &Arc<Self>, addr: UserAddr, max: usize, too_long: Errno) -> Result<Vec<u8>> {
        let mut text = Vec::new();
        // Short strings are the rule, and the next page may be absent.
        let mut step = 64;
        while text.len() < max {
            let from = addr.checked_add(text.len() as u64).ok_or(Errno::EFAULT)?;
            let to_page_end = (PAGE_SIZE - from.page_offset()) as usize;
            let n = step.min(to_page_end).min(max - text.len());
            let old = text.len();
            text.resize(old + n, 0);
            let chunk = text.get_mut(old..).ok_or(Errno::EFAULT)?;
            let got = self.read_partial(from, chunk);
            if let Some(nul) = chunk.iter().take(got).position(|&b| b == 0) {
                text.truncate(old + nul);
                return Ok(text);
            }
            if got < n {
                return Err(Errno::EFAULT);
            }
            step = PAGE_SIZE as usize;
        }
        Err(too_long)
    }

    /// A path argument: at most 4095 bytes, ENAMETOOLONG beyond.
    pub fn read_path(self: &Arc<Self>, addr: UserAddr) -> Result<Vec<u8>> {
        self.read_cstr(addr, 4096, Errno::ENAMETOOLONG)
    }

    fn word(&self, addr: UserAddr, access: Access, f: &mut dyn FnMut(PhysAddr) -> Result<u32>) -> Result<u32> {
        if !addr.0.is_multiple_of(4) {
            return Err(Errno::EINVAL);
        }
        let mut value = Err(Errno::EFAULT);
        self.pieces(addr.0, 4, access, &mut |pa, _, _| {
            value = f(pa);
            Ok(())
        });
        value
    }

    /// Atomic load of an aligned word (futex). EINVAL if it is not aligned.
    pub fn load_u32(self: &Arc<Self>, addr: UserAddr) -> Result<u32> {
        let memory = self.memory();
        self.word(addr, Access::READ, &mut |pa| memory.load_u32(pa))
    }

    /// Atomic compare-and-exchange of an aligned word; gives the value found. EINVAL if it is not aligned.
    pub fn compare_exchange_u32(self: &Arc<Self>, addr: UserAddr, old: u32, new: u32) -> Result<u32> {
        let memory = self.memory();
        self.word(addr, Access::WRITE, &mut |pa| memory.compare_exchange_u32(pa, old, new))
    }

    /// Writes regardless of the VMA's rights, breaking copy-on-write privately (ptrace POKE, /proc/PID/mem).
    pub fn write_forced(self: &Arc<Self>, addr: UserAddr, buf: &[u8]) -> Result<()> {
        self.forbid_direct();
        let done = self.write_with(addr, buf, Access { force: true, ..Access::WRITE });
        if done == buf.len() { Ok(()) } else { Err(Errno::EFAULT) }
    }

    /// Reads regardless of PROT_READ (ptrace PEEK, /proc/PID/mem).
    pub fn read_forced(self: &Arc<Self>, addr: UserAddr, buf: &mut [u8]) -> Result<()> {
        let done = self.read_with(addr, buf, Access { force: true, ..Access::READ });
        self.show_original(addr, buf);
        if done == buf.len() { Ok(()) } else { Err(Errno::EFAULT) }
    }

    /// The identity of the futex word at `addr`: private (space, address) or shared (object, offset). EFAULT if nothing is
    /// mapped there (only looked at for `shared`).
    pub fn futex_key(self: &Arc<Self>, addr: UserAddr, shared: bool) -> Result<FutexKey> {
        if addr.0 >= TASK_SIZE {
            return Err(Errno::EFAULT);
        }
        if !shared {
            return Ok(FutexKey::Private(self.id, addr.0));
        }
        let state: &State = &self.state.read();
        let vma = state.vmas.find(addr.0).filter(|v| v.accessible()).ok_or(Errno::EFAULT)?;
        match &vma.backing {
            Backing::Object { object, .. } if vma.shared() => Ok(FutexKey::Shared(object.key(), vma.offset_of(addr.0))),
            // Nobody could ever change such a word.
            Backing::Anonymous if !vma.prot.contains(super::Prot::WRITE) => Err(Errno::EFAULT),
            _ => Ok(FutexKey::Private(self.id, addr.0)),
        }
    }

    /// Holds up to `max` bytes from `addr` on for a direct transfer, adding them to `pinned`; gives the bytes held.
    pub(super) fn pin(&self, addr: UserAddr, max: usize, write: bool, pinned: &mut super::Pinned) -> usize {
        let access = if write { Access::WRITE } else { Access::READ };
        let memory = self.memory();
        let Some(room) = TASK_SIZE.checked_sub(addr.0) else { return 0 };
        let max = usize::try_from(room).map_or(max, |room| max.min(room));
        let mut done = 0;
        while done < max {
            let at = addr.0 + done as u64;
            let page = at & PAGE_MASK;
            let n = ((PAGE_SIZE - at % PAGE_SIZE) as usize).min(max - done);
            let mut hold = |state: &State, pte: crate::platform::Pte| {
                if pte.flags.contains(PteFlags::OWNED) {
                    memory.share(pte.pa);
                    pinned.frames.push(pte.pa);
                } else if let Some(window) = state.vmas.find(page).and_then(|v| v.window_of(pte.pa))
                    && !pinned.windows.last().is_some_and(|w| Arc::ptr_eq(w, window))
                {
                    pinned.windows.push(window.clone());
                }
                pinned.push(pte.pa.0 + at % PAGE_SIZE, n);
            };
            let held = {
                let state = self.state.read();
                match self.pages.lookup(page) {
                    Some(pte) if access.allowed_by(pte) => {
                        hold(&state, pte);
                        true
                    }
                    _ => false,
                }
            };
            if !held {
                let mut state = self.state.write();
                match self.fault_locked(&mut state, at, access) {
                    Ok(pte) => hold(&state, pte),
                    Err(_) => return done,
                }
            }
            done += n;
        }
        done
    }
}
