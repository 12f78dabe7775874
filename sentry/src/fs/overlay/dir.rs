//! Open directories of an overlay: the host's entries and the changes merged, in O(n) for a whole listing.
use std::any::Any;
use std::collections::HashSet;
use std::sync::Arc;

use super::Node;
use super::node::Entry;
use crate::fs::tmpfs::dir::{FIRST_COOKIE, Name};
use crate::lock::{Mutex, Rank};
use crate::mm::IoDest;
use crate::vfs::file::Caller;
use crate::vfs::{DirSink, File, FileOps, Inode};
use crate::{Errno, Result};

struct Listed {
    name: Name,
    ino: u64,
    kind: u8,
}

/// An open directory. With a host directory below, the merged listing is taken when reading begins (or begins again),
/// and positions count in it; a directory with nothing below lists its own map by cookie.
pub struct OverlayDir {
    node: Arc<Node>,
    merged: Mutex<Option<Arc<[Listed]>>>,
}

const DT_DIR: u8 = 4;

impl OverlayDir {
    pub(super) fn new(node: Arc<Node>) -> OverlayDir {
        OverlayDir { node, merged: Mutex::new(Rank::Leaf, None) }
    }

    fn merge(&self) -> Result<Arc<[Listed]>> {
        let below = match &self.node.lower {
            Some(lower) if !self.node.is_gone() => lower.list()?,
            _ => Vec::new(),
        };
        let names = self.node.names()?.lock();
        let mut out = Vec::with_capacity(below.len() + names.entries.len());
        let mut seen: HashSet<Name> = HashSet::new();
        for entry in below {
            match names.entries.get(&entry.name) {
                None => out.push(Listed { name: entry.name.into(), ino: entry.ino, kind: entry.kind }),
                Some(Entry::Whiteout) => {}
                Some(Entry::Node(node)) => {
                    let name: Name = entry.name.into();
                    seen.insert(name.clone());
                    out.push(Listed { name, ino: node.id.1, kind: node.kind().dirent() });
                }
            }
        }
        for (_, name, entry) in names.entries.range(0) {
            if let Entry::Node(node) = entry
                && !seen.contains(name)
            {
                out.push(Listed { name: name.clone(), ino: node.id.1, kind: node.kind().dirent() });
            }
        }
        Ok(out.into())
    }

    fn merged(&self, pos: u64) -> Result<Arc<[Listed]>> {
        if pos > 0
            && let Some(known) = &*self.merged.lock()
        {
            return Ok(known.clone());
        }
        let fresh = self.merge()?;
        let old = self.merged.lock().replace(fresh.clone());
        drop(old);
        Ok(fresh)
    }
}

impl FileOps for OverlayDir {
    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        Ok(i64::MAX as u64)
    }
    fn read(&self, _file: &File, _dst: &mut IoDest<'_>, _pos: u64) -> Result<usize> {
        Err(Errno::EISDIR)
    }
    fn read_dir(&self, file: &File, _caller: &dyn Caller, mut pos: u64, sink: &mut dyn DirSink) -> Result<u64> {
        let listing = if self.node.lower.is_some() { Some(self.merged(pos)?) } else { None };
        if pos == 0 {
            if !sink.add(b".", self.node.id.1, DT_DIR, 1) {
                return Ok(pos);
            }
            pos = 1;
        }
        if pos == 1 {
            let parent = crate::fs::parent_ino(file).unwrap_or(self.node.id.1);
            if !sink.add(b"..", parent, DT_DIR, FIRST_COOKIE) {
                return Ok(pos);
            }
            pos = FIRST_COOKIE;
        }
        if let Some(listing) = listing {
            let from = usize::try_from(pos - FIRST_COOKIE).unwrap_or(usize::MAX);
            for entry in listing.get(from..).unwrap_or_default() {
                if !sink.add(&entry.name, entry.ino, entry.kind, pos + 1) {
                    break;
                }
                pos += 1;
            }
        } else {
            let names = self.node.names()?.lock();
            for (cookie, name, entry) in names.entries.range(pos) {
                if let Entry::Node(node) = entry
                    && !sink.add(name, node.id.1, node.kind().dirent(), cookie + 1)
                {
                    break;
                }
                pos = cookie + 1;
            }
        }
        Ok(pos)
    }
    fn sync(&self, _data_only: bool) -> Result<()> {
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
