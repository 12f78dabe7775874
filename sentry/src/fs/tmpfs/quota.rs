//! What one in-memory file system may use: pages and inodes.
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Errno, Result};

/// A bound and what is used of it.
pub struct Bound {
    limit: AtomicU64,
    used: AtomicU64,
}

impl Bound {
    /// Nothing used of `limit`.
    pub fn new(limit: u64) -> Bound {
        Bound { limit: AtomicU64::new(limit), used: AtomicU64::new(0) }
    }

    /// Counts `n` more; ENOSPC beyond the limit.
    pub fn take(&self, n: u64) -> Result<()> {
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
