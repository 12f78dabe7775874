//! Inodes of /proc: fixed rows and the directories that change by themselves.
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use guest_abi::types::Stat;

use super::file::{MemFile, ProcDir, TextFile};
use super::{Cx, Row, Scope, fd, may_inspect, ns, object, pid};
use crate::fs::tmpfs::attr;
use crate::platform::host::AttrChange;
use crate::task::Task;
use crate::task::ns_file::Kind;
use crate::vfs::file::Caller;
use crate::vfs::{Inode, InodeKind, OpenFlags, OpenResult, PathRef};
use crate::{Errno, Result};

/// Takes what was written to a setting.
pub(crate) type Store = fn(&Cx, &dyn Caller, &[u8]) -> Result<()>;

/// What a node is.
pub(crate) enum What {
    /// The top: rows and a directory for each process.
    Root(&'static [Row]),
    /// Fixed rows.
    Dir(&'static [Row]),
    /// Fixed rows, for those who may trace the process.
    GuardedDir(&'static [Row]),
    /// Threads of a process.
    Tasks,
    /// Open descriptors as links.
    Fds,
    /// Open descriptors as files.
    FdInfos,
    /// One descriptor of `Fds`.
    Fd,
    /// One descriptor of `FdInfos`.
    FdInfo,
    /// Text.
    Text {
        /// Makes it.
        make: fn(&Cx) -> Result<Vec<u8>>,
        /// Takes what is written.
        store: Option<Store>,
        /// Only for those who may trace the process.
        guarded: bool,
    },
    /// A fixed link.
    Link(&'static str),
    /// /proc/self.
    SelfLink,
    /// /proc/thread-self.
    ThreadSelfLink,
    /// A link to a place: exe, cwd, root.
    Place(fn(&Task) -> Result<PathRef>),
    /// Memory of the process.
    Mem,
    /// A namespace.
    Ns(Kind),
}

/// First directory position of a process in the root; its tgid is added.
pub(super) const FIRST_PROCESS: u64 = 256;

/// An inode.
pub(crate) struct Node {
    pub(super) cx: Cx,
    pub(super) row: &'static Row,
    ino: u64,
    /// The descriptor of an `Fd` or `FdInfo`.
    pub(super) number: i32,
}

fn hash(parent: u64, name: &[u8]) -> u64 {
    // FNV-1a; numbers of proc inodes are Linux's own to choose and small there too.
    let mut h = 0xcbf2_9ce4_8422_2325 ^ parent;
    for &b in name {
        h = (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3);
    }
    ((h >> 32) ^ h) & 0xffff_ffff | 0x1_0000_0000
}

fn number(name: &[u8]) -> Option<i32> {
    let digits =
        !name.is_empty() && name.iter().all(u8::is_ascii_digit) && (name.len() == 1 || name.first() != Some(&b'0'));
    if digits { core::str::from_utf8(name).ok()?.parse().ok() } else { None }
}

impl Node {
    pub(super) fn new(cx: Cx, row: &'static Row, ino: u64, number: i32) -> Arc<Node> {
        Arc::new(Node { cx, row, ino, number })
    }

    pub(super) fn child_ino(&self, name: &[u8]) -> u64 {
        hash(self.ino, name)
    }

    fn child(&self, row: &'static Row, name: &[u8]) -> Arc<Node> {
        Node::new(self.cx.clone(), row, self.child_ino(name), 0)
    }

    pub(super) fn ino(&self) -> u64 {
        self.ino
    }

    fn row_called(&self, rows: &'static [Row], name: &[u8]) -> Result<Arc<dyn Inode>> {
        let row = rows.iter().find(|r| r.name.as_bytes() == name).ok_or(Errno::ENOENT)?;
        Ok(self.child(row, name))
    }
}

pub(super) fn kind_of(what: &What) -> InodeKind {
    match what {
        What::Root(_) | What::Dir(_) | What::GuardedDir(_) | What::Tasks | What::Fds | What::FdInfos => {
            InodeKind::Directory
        }
        What::Fd | What::Link(_) | What::SelfLink | What::ThreadSelfLink | What::Place(_) | What::Ns(_) => {
            InodeKind::Symlink
        }
        What::Text { .. } | What::FdInfo | What::Mem => InodeKind::Regular,
    }
}

impl Inode for Node {
    fn kind(&self) -> InodeKind {
        kind_of(&self.row.what)
    }

    fn stat(&self) -> Result<Stat> {
        let now = attr::now(&*self.cx.kernel().platform);
        let mut mode = self.row.mode;
        let mut nlink = if self.kind() == InodeKind::Directory { 2 } else { 1 };
        match &self.row.what {
            What::Root(_) => nlink = 2 + self.cx.shared.ns.group_count() as u64,
            What::Dir(rows) | What::GuardedDir(rows) => {
                nlink += rows.iter().filter(|r| kind_of(&r.what) == InodeKind::Directory).count() as u64;
            }
            What::Tasks => nlink = 2 + self.cx.group()?.task_count() as u64,
            What::Fd => mode = fd::link_mode(&self.cx, self.number)?,
            _ => {}
        }
        let (uid, gid) = if let Scope::System = self.cx.scope {
            (0, 0)
        } else {
            let task = self.cx.task()?;
            let credentials = task.credentials();
            // What must not be dumped is root's, except the directory itself, as in Linux.
            let open = task.group().dumpable.load(Ordering::Relaxed) == 1 || mode == 0o555 && self.row.name.is_empty();
            if open { (credentials.euid, credentials.egid) } else { (0, 0) }
        };
        Ok(Stat {
            dev: self.cx.shared.dev,
            ino: self.ino,
            nlink,
            mode: self.kind().mode() | mode,
            uid,
            gid,
            size: if matches!(self.row.what, What::Fd | What::Place(_)) { 64 } else { 0 },
            blksize: 1024,
            atime: now,
            mtime: now,
            ctime: now,
            ..Stat::default()
        })
    }

    fn set_attr(&self, change: &AttrChange) -> Result<()> {
        // O_TRUNC and the like on settings is harmless.
        if change.mode.is_none() && change.uid.is_none() && change.gid.is_none() { Ok(()) } else { Err(Errno::EPERM) }
    }

    fn cacheable(&self) -> bool {
        false
    }

    fn lookup(&self, name: &[u8]) -> Result<Arc<dyn Inode>> {
        match &self.row.what {
            What::Root(rows) => {
                let Some(n) = number(name) else { return self.row_called(rows, name) };
                let ns = &self.cx.shared.ns;
                // Any tid is found, though only tgids are listed.
                let pid = ns.pid(n).ok_or(Errno::ENOENT)?;
                let scope = if pid.group().is_some() {
                    Scope::Process(pid)
                } else if pid.task().is_some() {
                    Scope::Thread(pid)
                } else {
                    return Err(Errno::ENOENT);
                };
                let row = if matches!(scope, Scope::Process(_)) { &pid::PROCESS } else { &pid::THREAD };
                Ok(Node::new(Cx { shared: self.cx.shared.clone(), scope, reader: None }, row, self.child_ino(name), 0))
            }
            What::Dir(rows) | What::GuardedDir(rows) => {
                if !matches!(self.cx.scope, Scope::System) {
                    self.cx.task().map_err(|_| Errno::ENOENT)?;
                }
                self.row_called(rows, name)
            }
            What::Tasks => {
                let n = number(name).ok_or(Errno::ENOENT)?;
                let group = self.cx.group().map_err(|_| Errno::ENOENT)?;
                let pid = self.cx.shared.ns.pid(n).ok_or(Errno::ENOENT)?;
                let task = pid.task().filter(|t| Arc::ptr_eq(t.group(), &group)).ok_or(Errno::ENOENT)?;
                drop(task);
                let cx = Cx { shared: self.cx.shared.clone(), scope: Scope::Thread(pid), reader: None };
                Ok(Node::new(cx, &pid::THREAD, self.child_ino(name), 0))
            }
            What::Fds | What::FdInfos => {
                let n = number(name).ok_or(Errno::ENOENT)?;
                let task = self.cx.task().map_err(|_| Errno::ENOENT)?;
                task.files().get(n).map_err(|_| Errno::ENOENT)?;
                let row = if matches!(self.row.what, What::Fds) { &fd::FD } else { &fd::FDINFO };
                Ok(Node::new(self.cx.clone(), row, self.child_ino(name), n))
            }
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn read_link(&self) -> Result<Vec<u8>> {
        match &self.row.what {
            What::Link(target) => Ok(target.as_bytes().to_vec()),
            What::SelfLink | What::ThreadSelfLink => Err(Errno::ENOENT),
            What::Place(place) => Ok(place(&*self.cx.task()?)?.absolute()),
            What::Fd => fd::link_text(&self.cx, self.number),
            What::Ns(kind) => ns::link_text(&self.cx, *kind),
            _ => Err(Errno::EINVAL),
        }
    }

    fn read_link_as(&self, caller: &dyn Caller) -> Result<Vec<u8>> {
        match &self.row.what {
            What::SelfLink | What::ThreadSelfLink => {
                let task = caller.as_any().downcast_ref::<Task>().ok_or(Errno::ENOENT)?;
                let ns = &self.cx.shared.ns;
                let tgid = task.group().pid().number_in(ns);
                if tgid == 0 {
                    return Err(Errno::ENOENT);
                }
                if matches!(self.row.what, What::SelfLink) {
                    return Ok(tgid.to_string().into_bytes());
                }
                Ok(format!("{tgid}/task/{}", task.tid_in(ns)).into_bytes())
            }
            What::Place(_) | What::Fd | What::Ns(_) => {
                may_inspect(caller, &*self.cx.task()?)?;
                // A path is shown as the reader's root directory makes it look.
                let place = match &self.row.what {
                    What::Place(place) => Some(place(&*self.cx.task()?)?),
                    What::Fd => fd::file(&self.cx, self.number)?.path().filter(|p| !object::is_object(p)).cloned(),
                    _ => None,
                };
                match (place, caller.as_any().downcast_ref::<Task>()) {
                    (Some(place), Some(reader)) => {
                        let root = reader.fs().get().root;
                        Ok(place.seen_from(Some(&root)).0)
                    }
                    _ => self.read_link(),
                }
            }
            _ => self.read_link(),
        }
    }

    fn magic_link(&self, caller: &dyn Caller) -> Option<Result<PathRef>> {
        let find = || -> Result<Option<PathRef>> {
            match &self.row.what {
                What::Place(place) => {
                    let task = self.cx.task()?;
                    may_inspect(caller, &task)?;
                    Ok(Some(place(&task)?))
                }
                What::Fd => {
                    may_inspect(caller, &*self.cx.task()?)?;
                    fd::place(&self.cx, self.number).map(Some)
                }
                What::Ns(kind) => {
                    may_inspect(caller, &*self.cx.task()?)?;
                    Ok(Some(object::place(&self.cx.shared.objects, ns::open(&self.cx, *kind)?)))
                }
                _ => Ok(None),
            }
        };
        find().transpose()
    }

    fn open(self: Arc<Self>, caller: &dyn Caller, _path: &PathRef, flags: OpenFlags) -> Result<OpenResult> {
        match &self.row.what {
            What::Root(_) | What::Dir(_) | What::GuardedDir(_) | What::Tasks | What::Fds | What::FdInfos => {
                if matches!(self.row.what, What::GuardedDir(_) | What::Fds | What::FdInfos) {
                    may_inspect(caller, &*self.cx.task()?)?;
                }
                Ok(OpenResult::Ops(Arc::new(ProcDir::new(self))))
            }
            What::Text { guarded, store, .. } => {
                if *guarded {
                    may_inspect(caller, &*self.cx.task()?)?;
                }
                if flags.writable() && store.is_none() {
                    return Err(Errno::EACCES);
                }
                Ok(OpenResult::Ops(Arc::new(TextFile::new(self, caller.credentials()))))
            }
            What::FdInfo => Ok(OpenResult::Ops(Arc::new(TextFile::new(self, caller.credentials())))),
            What::Mem => {
                let task = self.cx.task()?;
                // Before the question: execve(2) changes who it is first, then its memory.
                let space = task.space().ok();
                may_inspect(caller, &task)?;
                Ok(OpenResult::Ops(Arc::new(MemFile::new(space))))
            }
            _ => Err(Errno::ELOOP),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
