//! Long transfers under way: who holds a file position or a file's contents for more than one step of a call. Owns the claims; the
//! system calls wait for them.
//!
//! A transfer of many megabytes is done in slices, between which the worker runs others. What Linux does in one piece, under the
//! lock of the position (reads and writes at the file position) and of the inode (writes), stays in one piece by a claim: who comes
//! meanwhile waits until it ends.
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::File;
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};

/// What is claimed: a position or contents, by address.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    Position(usize),
    Contents(usize),
}

/// The claims of a sandbox.
pub struct Transfers {
    active: AtomicUsize,
    held: Mutex<HashSet<Key>>,
    queue: Arc<WaitQueue>,
}

impl Default for Transfers {
    fn default() -> Self {
        let held = Mutex::new(Rank::Leaf, HashSet::new());
        Transfers { active: AtomicUsize::new(0), held, queue: WaitQueue::new() }
    }
}

/// What a call needs for itself: the position of `file`, its contents.
fn keys(file: &File, position: bool, contents: bool) -> impl Iterator<Item = Key> {
    let position = position.then(|| Key::Position(core::ptr::from_ref(file).addr()));
    let inode = file.inode().filter(|_| contents).map(|i| Key::Contents(Arc::as_ptr(i).addr()));
    position.into_iter().chain(inode)
}

impl Transfers {
    /// Whether a call that needs these has to wait. Cheap while there is no long transfer.
    pub fn is_claimed(&self, file: &File, position: bool, contents: bool) -> bool {
        if self.active.load(Ordering::Acquire) == 0 {
            return false;
        }
        let held = self.held.lock();
        keys(file, position, contents).any(|key| held.contains(&key))
    }

    /// Claims all of these; None if one is taken: then wait on [`Transfers::queue`].
    pub fn claim(self: &Arc<Self>, file: &Arc<File>, position: bool, contents: bool) -> Option<Claim> {
        let mut held = self.held.lock();
        if keys(file, position, contents).any(|key| held.contains(&key)) {
            return None;
        }
        let keys: Vec<Key> = keys(file, position, contents).collect();
        held.extend(keys.iter().copied());
        self.active.fetch_add(1, Ordering::Release);
        Some(Claim { transfers: self.clone(), _file: file.clone(), keys })
    }

    /// Fires (IN) when a claim ends.
    pub fn queue(&self) -> &Arc<WaitQueue> {
        &self.queue
    }
}

/// A claim, until it is dropped.
pub struct Claim {
    transfers: Arc<Transfers>,
    /// Keeps the addresses from being used again.
    _file: Arc<File>,
    keys: Vec<Key>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        {
            let mut held = self.transfers.held.lock();
            for key in &self.keys {
                held.remove(key);
            }
            self.transfers.active.fetch_sub(1, Ordering::Release);
        }
        self.transfers.queue.wake(Events::IN);
    }
}
