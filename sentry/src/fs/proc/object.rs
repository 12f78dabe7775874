//! Open objects without a path as places, so that a link in /proc/PID/fd can be followed to them.
use std::any::Any;
use std::sync::Arc;

use guest_abi::types::Stat;

use crate::platform::host::AttrChange;
use crate::vfs::file::Caller;
use crate::vfs::{Dentry, File, FileSystem, Inode, InodeKind, Mount, OpenFlags, OpenResult, PathRef};
use crate::{Errno, Result};

/// The inode that stands for an open object.
struct Object {
    file: Arc<File>,
}

impl Inode for Object {
    fn kind(&self) -> InodeKind {
        let stat = self.stat().map_or(0, |s| s.mode);
        InodeKind::from_mode(stat).unwrap_or(InodeKind::Regular)
    }
    fn stat(&self) -> Result<Stat> {
        self.file.ops().stat().unwrap_or(Err(Errno::ENOENT))
    }
    fn set_attr(&self, change: &AttrChange) -> Result<()> {
        self.file.ops().set_attr(change).unwrap_or(Err(Errno::EPERM))
    }
    fn open(self: Arc<Self>, caller: &dyn Caller, _path: &PathRef, flags: OpenFlags) -> Result<OpenResult> {
        self.file.ops().reopen(caller, flags)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The mount of all such places: it hangs nowhere and holds nothing.
struct Nowhere;

struct Nothing;

impl Inode for Nothing {
    fn kind(&self) -> InodeKind {
        InodeKind::Directory
    }
    fn stat(&self) -> Result<Stat> {
        Ok(Stat { mode: InodeKind::Directory.mode(), ..Stat::default() })
    }
    fn open(self: Arc<Self>, _: &dyn Caller, _: &PathRef, _: OpenFlags) -> Result<OpenResult> {
        Err(Errno::ENXIO)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl FileSystem for Nowhere {
    fn name(&self) -> &'static str {
        "anon_inodefs"
    }
    fn root(&self) -> Arc<dyn Inode> {
        Arc::new(Nothing)
    }
    fn statfs(&self) -> Result<[u64; 8]> {
        Ok([0x0904_1934, 4096, 0, 0, 0, 0, 0, 255])
    }
}

/// The mount that all places of one /proc are in.
pub(super) fn new_mount() -> Arc<Mount> {
    Mount::detached(Arc::new(Nowhere))
}

/// The place of an open object, in a mount by [`new_mount`].
pub(super) fn place(mount: &Arc<Mount>, file: Arc<File>) -> PathRef {
    PathRef { mount: mount.clone(), dentry: Dentry::root(Arc::new(Object { file })) }
}

/// Whether a place is that of an open object.
pub(super) fn is_object(place: &PathRef) -> bool {
    place.inode().as_any().is::<Object>()
}
