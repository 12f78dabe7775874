//! Memory slots: the areas of guest-physical memory and how each grows. Owns slot numbers; never what lies in an area.
//!
//! KVM's cost for a slot grows with its size (1–2 ms a GiB), so an area starts small and takes larger steps as it grows.
#![allow(unsafe_code)]
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use sentry::lock::{Mutex, Rank};
use sentry::platform::PhysAddr;

use super::region::Region;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Page-table pages: above the addresses that hardware (local APIC, firmware) claims below 4 GiB.
pub const TABLES: Span = Span { base: 4 * GIB, len: 32 * GIB };
/// Frames.
pub const FRAMES: Span = Span { base: 64 * GIB, len: 320 * GIB };
/// File windows that share the host's page cache.
pub const WINDOWS: Span = Span { base: 384 * GIB, len: 64 * GIB };
/// File windows for private mappings.
pub const PRIVATE_WINDOWS: Span = Span { base: 448 * GIB, len: 64 * GIB };

/// A fixed range of guest-physical addresses.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// First byte.
    pub base: u64,
    /// Bytes.
    pub len: u64,
}

impl Span {
    /// Whether `pa` is inside.
    pub fn contains(self, pa: PhysAddr) -> bool {
        pa.0.wrapping_sub(self.base) < self.len
    }
}

/// Where slots are registered: a virtual machine, or nothing in tests.
pub struct Registry {
    vm: Option<Arc<VmFd>>,
    next: AtomicU32,
}

impl Registry {
    /// Slots of `vm`.
    pub fn new(vm: Option<Arc<VmFd>>) -> Registry {
        Registry { vm, next: AtomicU32::new(0) }
    }

    /// A slot number nobody uses.
    pub fn number(&self) -> u32 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Registers a slot, or with `len` 0 deletes it.
    pub fn set(&self, region: &Region, slot: u32, pa: PhysAddr, len: u64) -> io::Result<()> {
        let host = region.host(pa, len as usize).map_err(|e| io::Error::from_raw_os_error(e.raw()))?;
        let Some(vm) = &self.vm else { return Ok(()) };
        let r = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: pa.0,
            memory_size: len,
            userspace_addr: host as u64,
        };
        // SAFETY: the host range is inside our reservation, which outlives the guest's runs; what is not committed there is
        // PROT_NONE and makes KVM_RUN fail instead of reaching anything.
        unsafe { vm.set_user_memory_region(r) }.map_err(|e| io::Error::from_raw_os_error(e.errno()))
    }
}

/// An area that grows by slots.
pub struct Area {
    span: Span,
    first: u64,
    largest: u64,
    committed: bool,
    grown: AtomicU64,
    growing: Mutex<()>,
}

impl Area {
    /// An area whose first slot has `first` bytes and later ones up to `largest`. With `committed` slots are backed by private
    /// memory, without they stay PROT_NONE until somebody maps something there.
    pub fn new(span: Span, first: u64, largest: u64, committed: bool) -> Area {
        Area { span, first, largest, committed, grown: AtomicU64::new(0), growing: Mutex::new(Rank::Leaf, ()) }
    }

    /// Bytes that have slots.
    pub fn grown(&self) -> u64 {
        self.grown.load(Ordering::Acquire)
    }

    /// Whether `len` bytes at `pa` have a slot.
    pub fn covers(&self, pa: PhysAddr, len: u64) -> bool {
        pa.0.checked_sub(self.span.base).and_then(|o| o.checked_add(len)).is_some_and(|end| end <= self.grown())
    }

    /// Adds a slot if the area still has `seen` bytes; at most `most` bytes altogether. False if it cannot grow.
    pub fn grow(&self, registry: &Registry, region: &Region, seen: u64, most: u64) -> bool {
        let _guard = self.growing.lock();
        let grown = self.grown();
        if grown != seen {
            return true;
        }
        let most = most.min(self.span.len).next_multiple_of(2 * MIB);
        let len = grown.clamp(self.first, self.largest).min(most.saturating_sub(grown)) & !(2 * MIB - 1);
        if len == 0 {
            return false;
        }
        let pa = PhysAddr(self.span.base + grown);
        let slot = registry.number();
        let done = if self.committed { region.commit(pa, len) } else { Ok(()) };
        if self.committed {
            // The first piece stays in small pages: a small sandbox then takes no more memory than it uses.
            let small = if grown == 0 { len.min(2 * MIB) } else { 0 };
            region.prefer_huge(PhysAddr(pa.0 + small), len - small);
            region.cover(pa, len);
        }
        match done.and_then(|()| registry.set(region, slot, pa, len)) {
            Ok(()) => {
                self.grown.store(grown + len, Ordering::Release);
                true
            }
            Err(e) => {
                log::warn!("guest memory cannot grow by {} MiB at {:#x}: {e}", len / MIB, pa.0);
                false
            }
        }
    }
}
