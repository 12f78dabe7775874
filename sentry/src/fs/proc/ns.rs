//! /proc/PID/ns: namespaces as files (namespaces(7)).
use std::any::Any;
use std::sync::Arc;

use guest_abi::types::Stat;

use super::Cx;
use crate::task::PidNamespace;
use crate::vfs::{Caller, FileOps, OpenFlags, OpenResult};
use crate::{Errno, Result};

/// Which namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    Cgroup,
    Ipc,
    Mnt,
    Net,
    Pid,
    PidForChildren,
    Time,
    TimeForChildren,
    User,
    Uts,
}

impl Kind {
    const fn prefix(self) -> &'static str {
        match self {
            Kind::Cgroup => "cgroup",
            Kind::Ipc => "ipc",
            Kind::Mnt => "mnt",
            Kind::Net => "net",
            Kind::Pid | Kind::PidForChildren => "pid",
            Kind::Time | Kind::TimeForChildren => "time",
            Kind::User => "user",
            Kind::Uts => "uts",
        }
    }

    /// Linux's fixed numbers of the initial namespaces.
    const fn initial(self) -> u64 {
        match self {
            Kind::Ipc => 0xefff_ffff,
            Kind::Uts => 0xefff_fffe,
            Kind::User => 0xefff_fffd,
            Kind::Pid | Kind::PidForChildren => 0xefff_fffc,
            Kind::Cgroup => 0xefff_fffb,
            Kind::Time | Kind::TimeForChildren => 0xefff_fffa,
            Kind::Net => 0xf000_0001,
            Kind::Mnt => 0xf000_0000,
        }
    }
}

/// A namespace held open (for setns(2)).
pub struct NsFile {
    /// Which kind.
    pub kind: Kind,
    /// Its number, as the link shows.
    pub ino: u64,
    /// The namespace, where there can be more than one.
    pub object: Option<Arc<dyn Any + Send + Sync>>,
}

fn number_of(address: usize) -> u64 {
    // Distinct among living namespaces, which is all that a number has to be.
    0xf000_0010 + ((address as u64 >> 4) & 0x0fff_ffff)
}

fn resolve(cx: &Cx, kind: Kind) -> Result<NsFile> {
    let task = cx.task()?;
    let initial = kind.initial();
    Ok(match kind {
        Kind::Pid | Kind::PidForChildren => {
            let ns: Arc<PidNamespace> = task.pid_namespace().clone();
            let ino = if ns.level() == 0 { initial } else { number_of(Arc::as_ptr(&ns).addr()) };
            NsFile { kind, ino, object: Some(ns) }
        }
        Kind::Uts => {
            let ns = task.uts();
            let first = Arc::ptr_eq(&ns, &task.kernel().uts);
            let ino = if first { initial } else { number_of(Arc::as_ptr(&ns).addr()) };
            NsFile { kind, ino, object: Some(ns) }
        }
        Kind::Mnt => {
            let ns = task.fs().get().root.mount.namespace().ok_or(Errno::ENOENT)?;
            let first = cx.kernel().init().and_then(|g| g.leader()).is_some_and(|init| {
                init.fs().get().root.mount.namespace().is_some_and(|other| Arc::ptr_eq(&ns, &other))
            });
            let ino = if first { initial } else { number_of(Arc::as_ptr(&ns).addr()) };
            NsFile { kind, ino, object: Some(ns) }
        }
        _ => NsFile { kind, ino: initial, object: None },
    })
}

pub(super) fn link_text(cx: &Cx, kind: Kind) -> Result<Vec<u8>> {
    Ok(resolve(cx, kind)?.proc_name())
}

pub(super) fn open(cx: &Cx, kind: Kind) -> Result<NsFile> {
    resolve(cx, kind)
}

/// st_dev of nsfs.
const DEV_NSFS: u64 = 4;

impl FileOps for NsFile {
    fn stat(&self) -> Option<Result<Stat>> {
        Some(Ok(Stat { dev: DEV_NSFS, ino: self.ino, nlink: 1, mode: 0o100_444, blksize: 4096, ..Stat::default() }))
    }
    fn proc_name(&self) -> Vec<u8> {
        format!("{}:[{}]", self.kind.prefix(), self.ino).into_bytes()
    }
    fn reopen(&self, _caller: &dyn Caller, flags: OpenFlags) -> Result<OpenResult> {
        if flags.writable() {
            return Err(Errno::EPERM);
        }
        Ok(OpenResult::Ops(Arc::new(NsFile { kind: self.kind, ino: self.ino, object: self.object.clone() })))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
