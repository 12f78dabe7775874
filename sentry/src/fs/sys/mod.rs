//! /sys (sysfs(5)): the few subtrees programs ask about CPUs and memory. Owns a fixed tree made at mount time; never a device.
mod cpu;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use guest_abi::types::{Stat, Timespec};

use crate::fs::new_device;
use crate::fs::tmpfs::attr;
use crate::kernel::Kernel;
use crate::mm::{IoDest, IoSource};
use crate::platform::Platform;
use crate::platform::host::AttrChange;
use crate::vfs::file::Caller;
use crate::vfs::{DirSink, File, FileOps, FileSystem, Inode, InodeKind, OpenFlags, OpenResult, PathRef};
use crate::{Errno, Result};

/// SYSFS_MAGIC of statfs(2).
const SYSFS_MAGIC: u64 = 0x6265_6572;

/// A tree as it is written down.
pub(crate) enum Tree {
    /// A directory.
    Dir(Vec<(String, Tree)>),
    /// A text, without its final newline.
    Text(String),
    /// A text made when it is read.
    Live(fn(&dyn Platform) -> String),
}

/// A directory of named trees.
pub(crate) fn dir<const N: usize>(entries: [(&str, Tree); N]) -> Tree {
    Tree::Dir(entries.into_iter().map(|(name, tree)| (name.to_string(), tree)).collect())
}

/// A text.
pub(crate) fn text(value: impl core::fmt::Display) -> Tree {
    Tree::Text(value.to_string())
}

struct Shared {
    platform: Arc<dyn Platform>,
    dev: u64,
    made: Timespec,
    next_ino: AtomicU64,
}

enum Body {
    Dir(Vec<(Box<[u8]>, Arc<Node>)>),
    Text(String),
    Live(fn(&dyn Platform) -> String),
}

struct Node {
    shared: Arc<Shared>,
    ino: u64,
    body: Body,
}

impl Node {
    fn build(shared: &Arc<Shared>, tree: Tree) -> Arc<Node> {
        let ino = shared.next_ino.fetch_add(1, Ordering::Relaxed);
        let body = match tree {
            Tree::Dir(entries) => Body::Dir(
                entries.into_iter().map(|(name, t)| (name.into_bytes().into(), Node::build(shared, t))).collect(),
            ),
            Tree::Text(text) => Body::Text(text),
            Tree::Live(make) => Body::Live(make),
        };
        Arc::new(Node { shared: shared.clone(), ino, body })
    }
}

/// A mounted /sys.
pub struct SysFs {
    root: Arc<Node>,
}

impl SysFs {
    /// As the machine is now.
    pub fn new(kernel: &Arc<Kernel>) -> Arc<SysFs> {
        let platform = kernel.platform.clone();
        let empty = || dir([]);
        let tree = dir([
            ("block", empty()),
            ("bus", empty()),
            ("class", dir([("block", empty()), ("net", empty()), ("tty", empty())])),
            ("dev", dir([("block", empty()), ("char", empty())])),
            (
                "devices",
                dir([
                    ("system", dir([("cpu", cpu::cpus(&*platform)), ("node", cpu::nodes(&*platform))])),
                    ("virtual", empty()),
                ]),
            ),
            ("firmware", empty()),
            ("fs", dir([("cgroup", empty())])),
            ("hypervisor", empty()),
            ("kernel", kernel_tree()),
            ("module", empty()),
            ("power", empty()),
        ]);
        let shared =
            Arc::new(Shared { made: attr::now(&*platform), platform, dev: new_device(), next_ino: AtomicU64::new(1) });
        Arc::new(SysFs { root: Node::build(&shared, tree) })
    }
}

fn kernel_tree() -> Tree {
    let huge = dir([
        ("enabled", text("always [madvise] never")),
        ("defrag", text("always defer defer+madvise [madvise] never")),
        ("hpage_pmd_size", text(2 << 20)),
        ("shmem_enabled", text("always within_size advise [never] deny force")),
        ("use_zero_page", text(1)),
    ]);
    dir([("mm", dir([("transparent_hugepage", huge)]))])
}

impl FileSystem for SysFs {
    fn name(&self) -> &'static str {
        "sysfs"
    }
    fn root(&self) -> Arc<dyn Inode> {
        self.root.clone()
    }
    fn statfs(&self) -> Result<[u64; 8]> {
        Ok([SYSFS_MAGIC, 4096, 0, 0, 0, 0, 0, 255])
    }
}

impl Inode for Node {
    fn kind(&self) -> InodeKind {
        if matches!(self.body, Body::Dir(_)) { InodeKind::Directory } else { InodeKind::Regular }
    }

    fn stat(&self) -> Result<Stat> {
        let (mode, nlink, size) = match &self.body {
            Body::Dir(entries) => {
                let dirs = entries.iter().filter(|e| e.1.kind() == InodeKind::Directory).count();
                (0o755, 2 + dirs as u64, 0)
            }
            _ => (0o444, 1, 4096),
        };
        let made = self.shared.made;
        Ok(Stat {
            dev: self.shared.dev,
            ino: self.ino,
            nlink,
            mode: self.kind().mode() | mode,
            size,
            blksize: 4096,
            atime: made,
            mtime: made,
            ctime: made,
            ..Stat::default()
        })
    }

    fn set_attr(&self, change: &AttrChange) -> Result<()> {
        if change.mode.is_none() && change.uid.is_none() && change.gid.is_none() { Ok(()) } else { Err(Errno::EPERM) }
    }

    fn lookup(&self, name: &[u8]) -> Result<Arc<dyn Inode>> {
        let Body::Dir(entries) = &self.body else { return Err(Errno::ENOTDIR) };
        let found = entries.iter().find(|e| &*e.0 == name).ok_or(Errno::ENOENT)?;
        Ok(found.1.clone())
    }

    fn open(self: Arc<Self>, _: &dyn Caller, _: &PathRef, flags: OpenFlags) -> Result<OpenResult> {
        if flags.writable() {
            return Err(if self.kind() == InodeKind::Directory { Errno::EISDIR } else { Errno::EACCES });
        }
        Ok(OpenResult::Ops(Arc::new(Opened(self))))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct Opened(Arc<Node>);

impl FileOps for Opened {
    fn read(&self, _: &File, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
        let mut text = match &self.0.body {
            Body::Dir(_) => return Err(Errno::EISDIR),
            Body::Text(text) => text.clone(),
            Body::Live(make) => make(&*self.0.shared.platform),
        };
        text.push('\n');
        let rest = text.as_bytes().get(usize::try_from(pos).unwrap_or(usize::MAX)..).unwrap_or_default();
        if rest.is_empty() || dst.remaining() == 0 {
            return Ok(0);
        }
        dst.put(rest.get(..dst.remaining().min(rest.len())).unwrap_or_default())
    }
    fn write(&self, _: &File, _: &mut IoSource<'_>, _: u64) -> Result<usize> {
        Err(Errno::EIO)
    }
    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        Ok(if matches!(self.0.body, Body::Dir(_)) { i64::MAX as u64 } else { 4096 })
    }
    fn read_dir(&self, file: &File, _: &dyn Caller, mut pos: u64, sink: &mut dyn DirSink) -> Result<u64> {
        let Body::Dir(entries) = &self.0.body else { return Err(Errno::ENOTDIR) };
        let parent = crate::fs::parent_ino(file).unwrap_or(self.0.ino);
        let dots = [(&b"."[..], self.0.ino), (b"..", parent)];
        while let Some((name, ino)) = dots.get(usize::try_from(pos).unwrap_or(usize::MAX)) {
            if !sink.add(name, *ino, InodeKind::Directory.dirent(), pos + 1) {
                return Ok(pos);
            }
            pos += 1;
        }
        let from = usize::try_from(pos - 2).unwrap_or(usize::MAX);
        for (name, node) in entries.get(from..).unwrap_or_default() {
            if !sink.add(name, node.ino, node.kind().dirent(), pos + 1) {
                break;
            }
            pos += 1;
        }
        Ok(pos)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
