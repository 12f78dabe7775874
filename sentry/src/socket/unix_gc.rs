//! Sockets that only reach each other through descriptors in flight (unix(7)): finds such circles and empties their queues. Owns
//! the list of sockets in flight. It runs when their number has doubled, so that a send costs O(1) on average.
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use super::SocketFile;
use super::unix::UnixSocket;
use crate::lock::{Mutex, Rank};
use crate::vfs::File;

/// Sockets in flight below which nothing is looked for.
const FIRST_LOOK: usize = 64;

struct Entry {
    file: Weak<File>,
    /// How many messages carry it.
    carried: usize,
}

struct Sockets {
    by_address: HashMap<usize, Entry>,
    look_at: usize,
}

/// Descriptors in flight of one sandbox.
pub struct Flights {
    /// All kinds of them.
    count: AtomicUsize,
    sockets: Mutex<Sockets>,
    running: AtomicBool,
}

impl Default for Flights {
    fn default() -> Self {
        let sockets = Sockets { by_address: HashMap::new(), look_at: FIRST_LOOK };
        Flights {
            count: AtomicUsize::new(0),
            sockets: Mutex::new(Rank::Leaf, sockets),
            running: AtomicBool::new(false),
        }
    }
}

fn unix_socket(file: &File) -> Option<&UnixSocket> {
    file.downcast::<SocketFile>()?.socket().as_any().downcast_ref()
}

impl Flights {
    /// Descriptors in flight.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// A message begins to carry `files`. Gives how many were in flight before.
    pub fn depart(&self, files: &[Arc<File>]) -> usize {
        let before = self.count.fetch_add(files.len(), Ordering::Relaxed);
        let mut sockets = self.sockets.lock();
        for file in files.iter().filter(|f| unix_socket(f).is_some()) {
            let entry = sockets.by_address.entry(Arc::as_ptr(file) as usize);
            entry.or_insert_with(|| Entry { file: Arc::downgrade(file), carried: 0 }).carried += 1;
        }
        let due = sockets.by_address.len() >= sockets.look_at;
        drop(sockets);
        if due {
            self.collect();
        }
        before
    }

    /// A message with `files` has come to its end.
    pub fn arrive(&self, files: &[Arc<File>]) {
        self.count.fetch_sub(files.len(), Ordering::Relaxed);
        let mut sockets = self.sockets.lock();
        for file in files {
            let key = Arc::as_ptr(file) as usize;
            if let Some(entry) = sockets.by_address.get_mut(&key) {
                entry.carried -= 1;
                if entry.carried == 0 {
                    sockets.by_address.remove(&key);
                }
            }
        }
    }

    /// Empties the queues of sockets that nobody can reach any more.
    pub fn collect(&self) {
        if self.running.swap(true, Ordering::SeqCst) {
            return;
        }
        let garbage = self.find();
        let mut dropped = Vec::new();
        for file in &garbage {
            if let Some(socket) = unix_socket(file) {
                dropped.extend(socket.take_queue());
            }
        }
        drop(dropped);
        drop(garbage);
        let mut sockets = self.sockets.lock();
        sockets.look_at = sockets.by_address.len().saturating_mul(2).max(FIRST_LOOK);
        drop(sockets);
        self.running.store(false, Ordering::SeqCst);
    }

    fn find(&self) -> Vec<Arc<File>> {
        // Candidates are held by messages alone. Whoever takes a reference meanwhile makes the count differ, and a message taken
        // out of a queue is no longer found there: both keep a socket alive.
        let known: Vec<(Arc<File>, usize)> = {
            let sockets = self.sockets.lock();
            sockets.by_address.values().filter_map(|e| Some((e.file.upgrade()?, e.carried))).collect()
        };
        let candidates: HashMap<usize, (Arc<File>, usize)> = known
            .into_iter()
            // One reference more is our own.
            .filter(|(file, carried)| Arc::strong_count(file) == carried + 1)
            .map(|(file, carried)| (Arc::as_ptr(&file) as usize, (file, carried)))
            .collect();
        let edges: HashMap<usize, Vec<usize>> = candidates
            .iter()
            .map(|(&key, (file, _))| (key, unix_socket(file).map(UnixSocket::carried_files).unwrap_or_default()))
            .collect();
        let mut inside: HashMap<usize, usize> = HashMap::new();
        for target in edges.values().flatten() {
            *inside.entry(*target).or_default() += 1;
        }
        let mut alive: Vec<usize> = candidates
            .iter()
            .filter(|(key, (_, carried))| inside.get(key).copied().unwrap_or(0) < *carried)
            .map(|(&key, _)| key)
            .collect();
        let mut reached: HashSet<usize> = alive.iter().copied().collect();
        while let Some(key) = alive.pop() {
            for &target in edges.get(&key).into_iter().flatten() {
                if candidates.contains_key(&target) && reached.insert(target) {
                    alive.push(target);
                }
            }
        }
        candidates.into_iter().filter(|(key, _)| !reached.contains(key)).map(|(_, (file, _))| file).collect()
    }
}
