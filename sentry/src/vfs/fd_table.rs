//! Descriptor tables. Lowest free number first, close-on-exec flags, the RLIMIT_NOFILE bound is the caller's to give.
#![allow(unused_variables)]
use std::sync::Arc;

use super::File;
use crate::Result;
use crate::lock::{Mutex, Rank};

/// A table of descriptors (CLONE_FILES shares it).
pub struct FdTable {
    slots: Mutex<Vec<Option<(Arc<File>, bool)>>>,
}

impl Default for FdTable {
    fn default() -> Self {
        FdTable { slots: Mutex::new(Rank::FdTable, Vec::new()) }
    }
}

impl FdTable {
    /// The description behind `fd`; EBADF.
    pub fn get(&self, fd: i32) -> Result<Arc<File>> {
        todo!()
    }
    /// The description and its close-on-exec flag.
    pub fn get_with_flag(&self, fd: i32) -> Result<(Arc<File>, bool)> {
        todo!()
    }
    /// Puts `file` at the lowest free number at or above `min`; EMFILE at `limit`.
    pub fn insert(&self, file: Arc<File>, cloexec: bool, min: i32, limit: u64) -> Result<i32> {
        todo!()
    }
    /// Puts `file` at `fd`, giving what was there (dup2). EBADF at or beyond `limit`.
    pub fn replace(&self, fd: i32, file: Arc<File>, cloexec: bool, limit: u64) -> Result<Option<Arc<File>>> {
        todo!()
    }
    /// Sets close-on-exec.
    pub fn set_cloexec(&self, fd: i32, cloexec: bool) -> Result<()> {
        todo!()
    }
    /// Takes `fd` out; the caller flushes and drops it without locks held.
    pub fn remove(&self, fd: i32) -> Result<Arc<File>> {
        todo!()
    }
    /// Takes out all in `first..=last`.
    pub fn remove_range(&self, first: u32, last: u32) -> Vec<Arc<File>> {
        todo!()
    }
    /// Takes out all with close-on-exec (exec).
    pub fn remove_cloexec(&self) -> Vec<Arc<File>> {
        todo!()
    }
    /// A copy of the table (fork).
    pub fn duplicate(&self) -> FdTable {
        todo!()
    }
    /// Open descriptors in order, from `from` on.
    pub fn list(&self, from: i32) -> Vec<(i32, Arc<File>)> {
        todo!()
    }
}
