//! What is behind an address space's lock: its VMAs, their limits and charge, and counts of present pages. Never the page tables.
use std::sync::Arc;

use super::Charge;
use super::direct::DirectSites;
use super::fault::Hot;
use super::space::{MapFlags, SpaceLimits};
use super::vma::VmaTree;
use crate::Result;
use crate::lock::Mutex;
use crate::platform::PteFlags;

/// What is behind the space's lock.
pub(super) struct State {
    pub vmas: VmaTree,
    /// For the VMAs.
    pub charge: Charge,
    pub limits: SpaceLimits,
    /// Mappings are placed below this address.
    pub mmap_base: u64,
    pub brk_base: u64,
    pub brk: u64,
    /// LOCKED and LOCKED_ONFAULT for mappings to come (mlockall MCL_FUTURE).
    pub future: MapFlags,
    /// Present pages owned by this space (anonymous memory).
    pub anonymous: u64,
    /// Present pages of objects.
    pub object_pages: u64,
    /// The largest number of present pages seen.
    pub peak: u64,
    /// Call sites that are direct.
    pub direct: DirectSites,
    /// Pages written soon after a fork: the next fork copies them at once.
    pub hot: Arc<Mutex<Hot>>,
}

/// Bytes of a VMA with its place in the trees.
const VMA_COST: usize = 256;
/// VMAs charged ahead.
const VMAS_AHEAD: usize = 16;

impl State {
    /// Charges `more` VMAs that are about to be made. ENOMEM at the sandbox's memory limit.
    pub(super) fn charge_vmas(&mut self, more: usize) -> Result<()> {
        let need = self.vmas.len().saturating_add(more);
        let have = self.charge.bytes() / VMA_COST;
        if need > have || have > need.saturating_mul(2).saturating_add(2 * VMAS_AHEAD) {
            self.charge.resize(need.saturating_add(VMAS_AHEAD).saturating_mul(VMA_COST))?;
        }
        Ok(())
    }

    /// Counts an entry as present.
    pub(super) fn count_in(&mut self, flags: PteFlags, pages: u64) {
        if is_private_page(flags) {
            self.anonymous += pages;
        } else {
            self.object_pages += pages;
        }
        self.peak = self.peak.max(self.anonymous + self.object_pages);
    }

    /// Counts entries as gone: of private frames, and others.
    pub(super) fn count_out_many(&mut self, private: u64, others: u64) {
        self.anonymous = self.anonymous.saturating_sub(private);
        self.object_pages = self.object_pages.saturating_sub(others);
    }

    /// Counts an entry as gone.
    pub(super) fn count_out(&mut self, flags: PteFlags) {
        let n = if is_private_page(flags) { &mut self.anonymous } else { &mut self.object_pages };
        *n = n.saturating_sub(1);
    }
}

/// Whether the entry's frame belongs to this space (or its forks) alone.
pub(super) fn is_private_page(flags: PteFlags) -> bool {
    flags.contains(PteFlags::OWNED) && !flags.contains(PteFlags::OBJECT)
}
