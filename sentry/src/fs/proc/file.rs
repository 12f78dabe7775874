//! Open files and directories of /proc.
use std::any::Any;
use std::sync::{Arc, Weak};

use guest_abi::UserAddr;

use super::fd;
use super::node::{FIRST_PROCESS, Node, What, kind_of};
use super::{Cx, Reader};
use crate::lock::{Mutex, Rank};
use crate::mm::{AddressSpace, Charge, IoDest, IoSource};
use crate::ns::user::Credentials;
use crate::platform::KernelMemory;
use crate::task::Task;
use crate::vfs::file::Caller;
use crate::vfs::{DirSink, File, FileOps, InodeKind};
use crate::{Errno, Result};

/// A text made when reading begins, and again when it begins anew at 0.
pub(super) struct TextFile {
    node: Arc<Node>,
    opener: Arc<Credentials>,
    made: Mutex<Option<Made>>,
}

/// A text, charged to the sandbox while it is kept.
type Made = (Arc<[u8]>, Charge);

impl TextFile {
    pub(super) fn new(node: Arc<Node>, opener: Arc<Credentials>) -> TextFile {
        TextFile { node, opener, made: Mutex::new(Rank::Leaf, None) }
    }

    /// What is known with `task` as the reader or writer.
    fn context(&self, task: Option<&Task>) -> Cx {
        let opener = &self.opener;
        let reader = task.map(|t| Reader {
            uts: t.uts(),
            pid_namespace: t.pid_namespace().clone(),
            boottime_offset: t.time_offsets().boottime,
            ipc: t.nsproxy().ok().map(|n| n.ipc.clone()),
            opener: opener.clone(),
        });
        Cx { reader, ..self.node.cx.clone() }
    }

    fn make(&self, caller: Option<&Task>) -> Result<Vec<u8>> {
        let cx = self.context(caller);
        match &self.node.row.what {
            What::Text { make, .. } => make(&cx),
            What::FdInfo => fd::info(&cx, self.node.number),
            _ => Err(Errno::EINVAL),
        }
    }

    fn read_text(&self, caller: Option<&Task>, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
        let known = if pos == 0 { None } else { self.made.lock().as_ref().map(|(text, _)| text.clone()) };
        let text = if let Some(text) = known {
            text
        } else {
            let text: Arc<[u8]> = self.make(caller)?.into();
            let charge = Charge::new(&self.node.cx.kernel().platform, KernelMemory::Slab, text.len())?;
            let old = self.made.lock().replace((text.clone(), charge));
            drop(old);
            text
        };
        let from = usize::try_from(pos).unwrap_or(usize::MAX);
        let rest = text.get(from..).unwrap_or_default();
        let n = rest.len().min(dst.remaining());
        if n == 0 {
            return Ok(0);
        }
        dst.put(rest.get(..n).unwrap_or_default())
    }
}

/// The most bytes one write to a setting takes (a page, as in Linux).
const WRITE_MAX: usize = 4096;

impl FileOps for TextFile {
    fn read(&self, _file: &File, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
        self.read_text(None, dst, pos)
    }

    fn read_as(&self, _file: &File, caller: &dyn Caller, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
        self.read_text(caller.as_any().downcast_ref(), dst, pos)
    }

    fn write(&self, _file: &File, _src: &mut IoSource<'_>, _pos: u64) -> Result<usize> {
        Err(Errno::EIO)
    }

    fn write_as(&self, _file: &File, caller: &dyn Caller, src: &mut IoSource<'_>, pos: u64) -> Result<usize> {
        let What::Text { store: Some(store), .. } = &self.node.row.what else { return Err(Errno::EIO) };
        let n = src.remaining();
        // A setting is written whole, at the beginning.
        if n == 0 || pos != 0 {
            return Ok(n);
        }
        let mut value = vec![0; n.min(WRITE_MAX)];
        let got = src.take(&mut value)?;
        value.truncate(got);
        store(&self.context(caller.as_any().downcast_ref()), caller, &value)?;
        Ok(got)
    }

    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        Ok(0)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// An open directory. Positions of processes, threads and descriptors are their numbers, so that a listing resumes where it
/// was however many come and go.
pub(super) struct ProcDir {
    node: Arc<Node>,
}

impl ProcDir {
    pub(super) fn new(node: Arc<Node>) -> ProcDir {
        ProcDir { node }
    }
}

/// Entries asked for at once.
const PAGE: usize = 64;

struct Feed<'a> {
    node: &'a Node,
    sink: &'a mut dyn DirSink,
    pos: u64,
}

impl Feed<'_> {
    fn put(&mut self, name: &[u8], kind: InodeKind, next: u64) -> bool {
        let ino = self.node.child_ino(name);
        let taken = self.sink.add(name, ino, kind.dirent(), next);
        if taken {
            self.pos = next;
        }
        taken
    }

    /// Numbered entries: `page(from)` gives some at or above `from` in order.
    fn numbers(&mut self, base: u64, kind: InodeKind, mut page: impl FnMut(i32) -> Vec<i32>) {
        loop {
            let Ok(from) = i32::try_from(self.pos.saturating_sub(base)) else { return };
            let some = page(from);
            if some.is_empty() {
                return;
            }
            for n in some {
                if !self.put(n.to_string().as_bytes(), kind, base + n as u64 + 1) {
                    return;
                }
            }
        }
    }
}

impl FileOps for ProcDir {
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
        let node = &*self.node;
        if pos == 0 {
            if !sink.add(b".", node.ino(), InodeKind::Directory.dirent(), 1) {
                return Ok(pos);
            }
            pos = 1;
        }
        if pos == 1 {
            let parent = crate::fs::parent_ino(file).unwrap_or(node.ino());
            if !sink.add(b"..", parent, InodeKind::Directory.dirent(), 2) {
                return Ok(pos);
            }
            pos = 2;
        }
        let mut feed = Feed { node, sink, pos };
        match &node.row.what {
            What::Root(rows) | What::Dir(rows) | What::GuardedDir(rows) => {
                if pos < FIRST_PROCESS {
                    let from = usize::try_from(pos - 2).unwrap_or(usize::MAX);
                    for (i, row) in rows.iter().enumerate().skip(from) {
                        if !feed.put(row.name.as_bytes(), kind_of(&row.what), i as u64 + 3) {
                            return Ok(feed.pos);
                        }
                    }
                }
                if matches!(node.row.what, What::Root(_)) {
                    feed.pos = feed.pos.max(FIRST_PROCESS);
                    let ns = &node.cx.shared.ns;
                    feed.numbers(FIRST_PROCESS, InodeKind::Directory, |from| {
                        ns.groups_from(from, PAGE).into_iter().map(|(n, _)| n).collect()
                    });
                }
            }
            What::Tasks => list_tasks(&node.cx, &mut feed)?,
            What::Fds | What::FdInfos => {
                let kind = if matches!(node.row.what, What::Fds) { InodeKind::Symlink } else { InodeKind::Regular };
                let files = node.cx.task()?.files();
                feed.numbers(2, kind, |from| files.numbers(from, PAGE));
            }
            _ => return Err(Errno::ENOTDIR),
        }
        Ok(feed.pos)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Positions are global tids, which order the threads of a group whatever namespace reads.
fn list_tasks(cx: &Cx, feed: &mut Feed<'_>) -> Result<()> {
    let group = cx.group()?;
    loop {
        let Ok(from) = i32::try_from(feed.pos - 2) else { return Ok(()) };
        let tasks = group.tasks_from(from, PAGE);
        if tasks.is_empty() {
            return Ok(());
        }
        for task in tasks {
            let next = 2 + task.global_tid() as u64 + 1;
            let n = task.tid_in(&cx.shared.ns);
            if n == 0 {
                feed.pos = next;
            } else if !feed.put(n.to_string().as_bytes(), InodeKind::Directory, next) {
                return Ok(());
            }
        }
    }
}

/// /proc/PID/mem.
pub(super) struct MemFile {
    /// Weak: an open descriptor does not keep the memory of a process that is gone.
    space: Weak<AddressSpace>,
}

impl MemFile {
    pub(super) fn new(space: Option<Arc<AddressSpace>>) -> MemFile {
        MemFile { space: space.map_or_else(Weak::new, |s| Arc::downgrade(&s)) }
    }
}

impl FileOps for MemFile {
    fn read(&self, _file: &File, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
        let Some(space) = self.space.upgrade() else { return Ok(0) };
        let mut buffer = [0; 4096];
        let mut total = 0;
        while dst.remaining() > 0 {
            let at = pos.checked_add(total as u64).ok_or(Errno::EIO)?;
            let n = dst.remaining().min(buffer.len() - (at % 4096) as usize);
            let part = buffer.get_mut(..n).unwrap_or_default();
            if space.read_forced(UserAddr(at), part).is_err() {
                return if total == 0 { Err(Errno::EIO) } else { Ok(total) };
            }
            match dst.put(part) {
                Ok(got) => total += got,
                Err(e) if total == 0 => return Err(e),
                Err(_) => return Ok(total),
            }
        }
        Ok(total)
    }

    fn write(&self, _file: &File, src: &mut IoSource<'_>, pos: u64) -> Result<usize> {
        let Some(space) = self.space.upgrade() else { return Ok(0) };
        let mut buffer = [0; 4096];
        let mut total = 0;
        while src.remaining() > 0 {
            let at = pos.checked_add(total as u64).ok_or(Errno::EIO)?;
            let n = src.remaining().min(buffer.len() - (at % 4096) as usize);
            let got = match src.take(buffer.get_mut(..n).unwrap_or_default()) {
                Ok(got) => got,
                Err(e) if total == 0 => return Err(e),
                Err(_) => return Ok(total),
            };
            if space.write_forced(UserAddr(at), buffer.get(..got).unwrap_or_default()).is_err() {
                return if total == 0 { Err(Errno::EIO) } else { Ok(total) };
            }
            total += got;
        }
        Ok(total)
    }

    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        Ok(0)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
