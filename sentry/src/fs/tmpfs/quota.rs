//! What one in-memory file system may use: pages and inodes.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::platform::{KernelMemory, Platform};
use crate::{Errno, Result};

/// What an inode, a further name or a KiB of extended attributes takes of the sentry's memory: the structures, a name of up to 255
/// bytes and its places in the directory.
const INODE_COST: u64 = 1536;

/// A bound and what is used of it.
pub struct Bound {
    limit: AtomicU64,
    used: AtomicU64,
    /// Where each unit is charged too, and with how many bytes.
    charged: Option<(Arc<dyn Platform>, u64)>,
}

impl Bound {
    /// Nothing used of `limit`.
    pub fn new(limit: u64) -> Bound {
        Bound { limit: AtomicU64::new(limit), used: AtomicU64::new(0), charged: None }
    }

    /// A bound on inodes, which are charged to the sandbox's memory.
    pub fn inodes(platform: &Arc<dyn Platform>, limit: u64) -> Bound {
        Bound { charged: Some((platform.clone(), INODE_COST)), ..Bound::new(limit) }
    }

    /// Counts `n` more; ENOSPC beyond the limit, ENOMEM beyond the sandbox's memory.
    pub fn take(&self, n: u64) -> Result<()> {
        let Some((platform, cost)) = &self.charged else { return self.count(n) };
        let bytes = n.saturating_mul(*cost);
        platform.memory().charge(KernelMemory::Slab, bytes)?;
        self.count(n).inspect_err(|_| platform.memory().uncharge(KernelMemory::Slab, bytes))
    }

    fn count(&self, n: u64) -> Result<()> {
        let limit = self.limit.load(Ordering::Relaxed);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(n).filter(|&total| total <= limit)
            })
            .map(drop)
            .map_err(|_| Errno::ENOSPC)
    }

    /// Counts `n` less.
    pub fn give(&self, n: u64) {
        if let Some((platform, cost)) = &self.charged {
            platform.memory().uncharge(KernelMemory::Slab, n.saturating_mul(*cost));
        }
        self.used.fetch_sub(n, Ordering::Relaxed);
    }

    /// In use.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// The limit.
    pub fn limit(&self) -> u64 {
        self.limit.load(Ordering::Relaxed)
    }

    /// Left.
    pub fn free(&self) -> u64 {
        self.limit().saturating_sub(self.used())
    }
}

/// Bounds of one file system.
pub struct Quota {
    /// Data pages.
    pub pages: Bound,
    /// Inodes.
    pub inodes: Bound,
}
