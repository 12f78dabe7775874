//! Root directory, working directory and umask of a task (CLONE_FS shares them).
use super::PathRef;
use crate::lock::{Mutex, Rank};

/// What paths of a task start from.
#[derive(Clone)]
pub struct FsState {
    /// chroot(2).
    pub root: PathRef,
    /// chdir(2).
    pub cwd: PathRef,
    /// umask(2).
    pub umask: u32,
}

/// Shared state of tasks that share file-system context.
pub struct FsContext {
    state: Mutex<FsState>,
}

impl FsContext {
    /// A context of its own.
    pub fn new(state: FsState) -> FsContext {
        FsContext { state: Mutex::new(Rank::FsContext, state) }
    }

    /// A copy of the state.
    pub fn get(&self) -> FsState {
        self.state.lock().clone()
    }

    /// Changes the state.
    pub fn change<R>(&self, f: impl FnOnce(&mut FsState) -> R) -> R {
        f(&mut self.state.lock())
    }
}
