//! Devices: what opening a special inode gives, and the tree that /dev shows. Owns the sandbox's own devices; a device number
//! of the host means nothing here.
mod memory;

use std::sync::Arc;

use crate::fs::pipe;
use crate::fs::tmpfs::{TmpFs, TmpInode, TmpfsOptions};
use crate::platform::Platform;
use crate::task::Task;
use crate::vfs::file::Caller;
use crate::vfs::inode::Create;
use crate::vfs::{Inode, InodeKind, OpenFlags, OpenResult, PathRef};
use crate::{Errno, Result};

/// dev_t of a device (makedev(3)).
pub const fn makedev(major: u64, minor: u64) -> u64 {
    ((major & 0xffff_f000) << 32) | ((major & 0xfff) << 8) | ((minor & 0xffff_ff00) << 12) | (minor & 0xff)
}

/// /dev/null.
pub const NULL: u64 = makedev(1, 3);
/// /dev/zero.
pub const ZERO: u64 = makedev(1, 5);
/// /dev/full.
pub const FULL: u64 = makedev(1, 7);
/// /dev/random.
pub const RANDOM: u64 = makedev(1, 8);
/// /dev/urandom.
pub const URANDOM: u64 = makedev(1, 9);
/// /dev/tty: the caller's controlling terminal.
pub const TTY: u64 = makedev(5, 0);
/// /dev/console.
pub const CONSOLE: u64 = makedev(5, 1);
/// /dev/ptmx.
pub const PTMX: u64 = makedev(5, 2);

/// The kernel behind a caller, for objects that need the machine.
pub(crate) fn platform_of(caller: &dyn Caller) -> Result<Arc<dyn Platform>> {
    let task = caller.as_any().downcast_ref::<Task>().ok_or(Errno::ENXIO)?;
    Ok(task.kernel().platform.clone())
}

/// Opens a FIFO, socket or device inode of any file system.
pub fn open_special(
    inode: &dyn Inode,
    rdev: u64,
    caller: &dyn Caller,
    _path: &PathRef,
    flags: OpenFlags,
) -> Result<OpenResult> {
    match inode.kind() {
        InodeKind::Fifo => {
            let attachments = inode.attachments().ok_or(Errno::ENXIO)?;
            Ok(OpenResult::Ops(pipe::open_fifo(caller, attachments, flags)?))
        }
        InodeKind::CharDevice => match rdev {
            NULL => Ok(OpenResult::Ops(Arc::new(memory::Null))),
            ZERO => Ok(OpenResult::Ops(Arc::new(memory::Zero))),
            FULL => Ok(OpenResult::Ops(Arc::new(memory::Full))),
            RANDOM | URANDOM => Ok(OpenResult::Ops(Arc::new(memory::Random::new(platform_of(caller)?)))),
            TTY | CONSOLE => {
                let task = caller.as_any().downcast_ref::<Task>().ok_or(Errno::ENXIO)?;
                crate::fs::tty::open_controlling(task, flags)
            }
            _ => Err(Errno::ENXIO),
        },
        _ => Err(Errno::ENXIO),
    }
}

/// The file system for /dev, with mount points for /dev/pts and /dev/shm.
pub fn new_dev_fs(platform: &Arc<dyn Platform>) -> Result<Arc<TmpFs>> {
    let options = TmpfsOptions { mode: 0o755, ..TmpfsOptions::default() };
    let fs = TmpFs::new(platform.clone(), options, "devtmpfs")?;
    let root = fs.root_inode();
    let add = |name: &str, what: Create<'_>, mode: u32, gid: u32| {
        root.attach(name.as_bytes(), TmpInode::new(fs.shared(), what, mode, 0, gid)?)
    };
    const TTY_GROUP: u32 = 5;
    for (name, number, mode, gid) in [
        ("null", NULL, 0o666, 0),
        ("zero", ZERO, 0o666, 0),
        ("full", FULL, 0o666, 0),
        ("random", RANDOM, 0o666, 0),
        ("urandom", URANDOM, 0o666, 0),
        ("tty", TTY, 0o666, TTY_GROUP),
        ("console", CONSOLE, 0o600, 0),
    ] {
        add(name, Create::Node(InodeKind::CharDevice, number), mode, gid)?;
    }
    add("pts", Create::Directory, 0o755, 0)?;
    add("shm", Create::Directory, 0o1777, 0)?;
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("core", "/proc/kcore"),
        ("ptmx", "pts/ptmx"),
    ] {
        add(name, Create::Symlink(target.as_bytes()), 0o777, 0)?;
    }
    Ok(fs)
}
