//! The sandbox's tree of mounts at its start. Owns what is mounted where; never what the file systems hold.
use std::sync::Arc;

use super::dev::new_dev_fs;
use super::host::HostFs;
use super::overlay::OverlayFs;
use super::proc::ProcFs;
use super::sys::SysFs;
use super::tmpfs::{TmpFs, TmpfsOptions};
use crate::kernel::Kernel;
use crate::platform::host::HostTree;
use crate::vfs::file::KernelCaller;
use crate::vfs::path::resolve;
use crate::vfs::{FileSystem, FsState, InodeKind, Lookup, LookupFlags, MountFlags, MountNamespace, PathRef, names};
use crate::{Errno, Result};

/// A part of the host made visible.
pub struct Bind {
    /// The directory, or the directory that holds the file.
    pub tree: Arc<dyn HostTree>,
    /// The file in `tree`; empty for the whole directory.
    pub file: Vec<u8>,
    /// Absolute path in the sandbox.
    pub at: Vec<u8>,
    /// Whether the sandbox may not write.
    pub read_only: bool,
}

/// What the tree is made of.
pub struct RootConfig {
    /// The root, shown under a discardable layer.
    pub tree: Arc<dyn HostTree>,
    /// In this order.
    pub binds: Vec<Bind>,
    /// Absolute paths of further empty file systems.
    pub tmpfs: Vec<Vec<u8>>,
}

/// Why the tree cannot be made.
#[derive(Debug)]
pub struct MountError {
    /// The place that could not be mounted on.
    pub at: Vec<u8>,
    /// Why.
    pub errno: Errno,
}

/// Mounts everything: overlay, /proc, /sys, /dev with pts and shm, then tmpfs and binds as asked. Mount points that do not
/// exist are made in the upper layer.
pub fn assemble_root(kernel: &Arc<Kernel>, config: RootConfig) -> Result<Arc<MountNamespace>, MountError> {
    let platform = &kernel.platform;
    let at = |path: &[u8]| {
        let at = path.to_vec();
        move |errno| MountError { at, errno }
    };
    let ns = MountNamespace::new(OverlayFs::new(platform.clone(), config.tree).map_err(at(b"/"))?);
    let builder = Builder { ns, caller: KernelCaller::default() };
    let common = MountFlags::NOSUID | MountFlags::NODEV;
    let memory = || TmpFs::new(platform.clone(), TmpfsOptions::default(), "tmpfs");
    let proc = ProcFs::new(kernel, kernel.root_pid_ns.clone());
    let devpts = super::pts::DevPts::new(kernel);
    builder.mount(b"/proc", proc, b"proc", common | MountFlags::NOEXEC).map_err(at(b"/proc"))?;
    builder.mount(b"/sys", SysFs::new(kernel), b"sysfs", common | MountFlags::NOEXEC).map_err(at(b"/sys"))?;
    let dev = new_dev_fs(platform).map_err(at(b"/dev"))?;
    builder.mount(b"/dev", dev, b"devtmpfs", MountFlags::NOSUID).map_err(at(b"/dev"))?;
    builder.mount(b"/dev/pts", devpts, b"devpts", MountFlags::NOSUID).map_err(at(b"/dev/pts"))?;
    let shm = memory().map_err(at(b"/dev/shm"))?;
    builder.mount(b"/dev/shm", shm, b"tmpfs", common).map_err(at(b"/dev/shm"))?;
    for path in config.tmpfs {
        let fs = memory().map_err(at(&path))?;
        builder.mount(&path, fs, b"tmpfs", common).map_err(at(&path))?;
    }
    for bind in config.binds {
        let refused = at(&bind.at);
        builder.bind(bind).map_err(refused)?;
    }
    builder.ns.charge_to(platform).map_err(at(b"/"))?;
    Ok(builder.ns)
}

struct Builder {
    ns: Arc<MountNamespace>,
    caller: KernelCaller,
}

impl Builder {
    fn lookup(&self) -> Result<Lookup<'_>> {
        let root = self.ns.root()?;
        Ok(Lookup::new(FsState { cwd: root.clone(), root, umask: 0 }, &self.caller))
    }

    fn find(&self, path: &[u8]) -> Result<PathRef> {
        resolve(&self.lookup()?, None, path, LookupFlags::FOLLOW)
    }

    /// The directory `path`, made with its parents if missing.
    fn directory(&self, path: &[u8]) -> Result<PathRef> {
        let mut so_far = Vec::new();
        for name in path.split(|&b| b == b'/').filter(|n| !n.is_empty()) {
            so_far.push(b'/');
            so_far.extend_from_slice(name);
            match self.find(&so_far) {
                Ok(_) => {}
                Err(Errno::ENOENT) => drop(names::mkdir(&self.lookup()?, None, &so_far, 0o755)?),
                Err(e) => return Err(e),
            }
        }
        let at = if so_far.is_empty() { self.ns.root()? } else { self.find(&so_far)? };
        at.require_dir()?;
        Ok(at)
    }

    fn mount(&self, path: &[u8], fs: Arc<dyn FileSystem>, source: &[u8], flags: MountFlags) -> Result<()> {
        let at = self.directory(path)?;
        self.ns.attach_fs(&at, fs, source.to_vec(), flags)?;
        Ok(())
    }

    fn bind(&self, bind: Bind) -> Result<()> {
        let flags = if bind.read_only { MountFlags::RDONLY } else { MountFlags::empty() };
        let fs = HostFs::new(bind.tree)?;
        if bind.file.is_empty() {
            return self.mount(&bind.at, fs, b"host", flags);
        }
        let target = match self.find(&bind.at) {
            Ok(at) => at,
            Err(Errno::ENOENT) => {
                let slash = bind.at.iter().rposition(|&b| b == b'/').ok_or(Errno::EINVAL)?;
                self.directory(bind.at.get(..slash).unwrap_or_default())?;
                names::mknod(&self.lookup()?, None, &bind.at, InodeKind::Regular, 0o644, 0)?
            }
            Err(e) => return Err(e),
        };
        // A mount whose root is the file: bind the name inside the host tree's own mount.
        let detached = crate::vfs::Mount::detached(fs);
        let top = detached.root_path();
        let inside = Lookup::new(FsState { cwd: top.clone(), root: top, umask: 0 }, &self.caller);
        let from = resolve(&inside, None, &bind.file, LookupFlags::empty())?;
        self.ns.bind(&from, &target, false)?.set_flags(flags)?;
        Ok(())
    }
}
