//! What the command inherits from whoever runs bartizan, as a command run directly would: resource limits and umask.
use guest_abi::types::Rlimit;
use rustix::fs::Mode;
use rustix::process::{Resource, getrlimit, umask};
use sentry::task::limits::Limits;

use super::Identity;

/// Resources in the order of their numbers.
const RESOURCES: [Resource; 16] = [
    Resource::Cpu,
    Resource::Fsize,
    Resource::Data,
    Resource::Stack,
    Resource::Core,
    Resource::Rss,
    Resource::Nproc,
    Resource::Nofile,
    Resource::Memlock,
    Resource::As,
    Resource::Locks,
    Resource::Sigpending,
    Resource::Msgqueue,
    Resource::Nice,
    Resource::Rtprio,
    Resource::Rttime,
];

/// The caller's limits; read them before this process changes its own.
pub fn limits() -> Limits {
    RESOURCES.map(|r| {
        let limit = getrlimit(r);
        let value = |v: Option<u64>| v.unwrap_or(u64::MAX);
        Rlimit { cur: value(limit.current), max: value(limit.maximum) }
    })
}

/// The caller's umask.
pub fn file_mask() -> u32 {
    // It can only be read by setting it.
    let mask = umask(Mode::empty());
    umask(mask);
    mask.bits() & 0o777
}

/// The caller's user, group and supplementary groups.
pub fn identity() -> Identity {
    Identity {
        uid: rustix::process::getuid().as_raw(),
        gid: rustix::process::getgid().as_raw(),
        groups: rustix::process::getgroups().unwrap_or_default().iter().map(|g| g.as_raw()).collect(),
    }
}
