//! The command of a sandbox: its working directory, and why it could not be started.
use std::sync::Arc;

use guest_abi::Errno;
use sentry::Kernel;
use sentry::task::init::InitConfig;
use sentry::vfs::file::KernelCaller;
use sentry::vfs::path::{Lookup, LookupFlags, resolve};
use sentry::vfs::{FsState, InodeKind, MountNamespace};

use super::SandboxError;

/// Root and working directory. With `must_exist` false a missing directory is replaced by `/`.
pub fn places(
    mounts: &Arc<MountNamespace>,
    workdir: &[u8],
    must_exist: bool,
    umask: u32,
) -> Result<FsState, SandboxError> {
    let refused = |errno| SandboxError::Workdir(text(workdir), errno);
    let root = mounts.root().map_err(refused)?;
    let start = FsState { root: root.clone(), cwd: root, umask };
    let caller = KernelCaller::default();
    let found = resolve(&Lookup::new(start.clone(), &caller), None, workdir, LookupFlags::FOLLOW)
        .and_then(|place| if place.inode().kind() == InodeKind::Directory { Ok(place) } else { Err(Errno::ENOTDIR) });
    match found {
        Ok(cwd) => Ok(FsState { cwd, ..start }),
        Err(_) if !must_exist => Ok(start),
        Err(errno) => Err(refused(errno)),
    }
}

/// Starts the command as the sandbox's first process.
pub fn spawn(kernel: &Arc<Kernel>, init: InitConfig) -> Result<(), SandboxError> {
    let name = init.argv.first().map_or_else(String::new, |a| text(a));
    match kernel.spawn_init(init) {
        Ok(_) => Ok(()),
        Err(Errno::ENOENT) => Err(SandboxError::NotFound(name)),
        Err(errno) => Err(SandboxError::NotExecutable(name, errno)),
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
