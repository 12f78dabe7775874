//! Landlock: no file outside of the bound trees can be opened any more, no new TCP connection made, no process outside signalled.
use std::path::Path;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};

use super::{JailError, Paths};

/// The newest Landlock this list knows (Linux 6.12); older kernels enforce what they have.
const KNOWN: ABI = ABI::V6;

fn failed(why: impl ToString) -> JailError {
    JailError { what: "file access", why: why.to_string() }
}

fn rule(path: &Path, access: BitFlags<AccessFs>) -> Result<PathBeneath<PathFd>, JailError> {
    let fd = PathFd::new(path).map_err(failed)?;
    let is_dir = path.metadata().map_err(failed)?.is_dir();
    // Rights over a directory's entries mean nothing for a file.
    Ok(PathBeneath::new(fd, if is_dir { access } else { access & AccessFs::from_file(KNOWN) }))
}

/// Restricts the calling thread and those it starts from now on; sets no_new_privs. Where the host has no Landlock a warning is
/// logged: the seccomp list and `openat2` beneath the trees then stand alone.
pub fn restrict_files(paths: &Paths) -> Result<(), JailError> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    // No device nodes, no execution, no ioctl on devices opened later.
    let write = AccessFs::from_all(KNOWN)
        & !(AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::Execute | AccessFs::IoctlDev);
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN))
        .and_then(|r| r.handle_access(AccessNet::from_all(KNOWN)))
        .and_then(|r| r.scope(Scope::from_all(KNOWN)))
        .and_then(Ruleset::create)
        .map_err(failed)?;
    let lists = [
        (&paths.readable, read),
        (&paths.writable, write),
        (&paths.emptied, AccessFs::RemoveFile.into()),
        (&paths.thinned, AccessFs::RemoveDir.into()),
    ];
    for (list, access) in lists {
        for path in list {
            ruleset = ruleset.add_rule(rule(path, access)?).map_err(failed)?;
        }
    }
    let status = ruleset.restrict_self().map_err(failed)?;
    match status.ruleset {
        RulesetStatus::FullyEnforced => {}
        RulesetStatus::PartiallyEnforced => log::info!("this host's Landlock enforces the file restrictions in part"),
        RulesetStatus::NotEnforced => {
            log::warn!("this host has no Landlock: file access is confined by openat2 and the system call list alone");
        }
    }
    rustix::thread::set_no_new_privs(true).map_err(failed)
}

/// The newest Landlock interface that the host has, or None without Landlock.
pub fn landlock_abi() -> Option<u32> {
    let versions = [(6, ABI::V6), (5, ABI::V5), (4, ABI::V4), (3, ABI::V3), (2, ABI::V2), (1, ABI::V1)];
    versions.into_iter().find_map(|(number, abi)| {
        let ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::HardRequirement)
            .handle_access(AccessFs::from_all(abi))
            .and_then(Ruleset::create);
        ruleset.is_ok().then_some(number)
    })
}
