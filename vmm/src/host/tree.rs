//! Host directory trees. Owns one directory descriptor a tree and reaches everything by openat2(2) beneath it; never follows a
//! symbolic link, and never enters a file system that shows the host kernel's own state.
use std::collections::HashMap;
use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use guest_abi::Errno;
use guest_abi::types::Stat;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Timestamps};
use sentry::lock::{Mutex, Rank};
use sentry::platform::host::{AttrChange, HostCreate, HostDirEntry, HostFile, HostTree};

use super::file::RegularFile;
use super::{chmod, errno, stat};
use crate::memory::GuestMemory;

/// File systems that show the kernel's or this process's state instead of stored files (<linux/magic.h>).
const REFUSED: &[u64] = &[
    0x9fa0,     // proc: /proc/self/mem would be this very process
    0x62656572, // sysfs
    0x64626720, // debugfs
    0x74726163, // tracefs
    0x73636673, // securityfs
    0x27e0eb,   // cgroup
    0x63677270, // cgroup2
    0xcafe4a11, // bpf
    0xde5e81e4, // efivarfs
    0x62656570, // configfs
    0x1cd1,     // devpts
    0x19800202, // mqueue
    0x6e736673, // nsfs
    0x50494446, // pidfs
    0x42494e4d, // binfmt_misc
    0xf97cff8c, // selinux
    0x43415d53, // smack
    0x67596969, // rpc_pipefs
    0x6165676c, // pstore
    0x65735543, // fusectl
];

/// A directory tree of the host.
pub struct DirTree {
    root: OwnedFd,
    memory: Arc<GuestMemory>,
    writable: bool,
    /// Devices met so far, and whether the file system on them may be used.
    devices: Mutex<HashMap<u64, bool>>,
}

fn confined() -> ResolveFlags {
    ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS
}

/// The parent's path and the last name.
fn split(path: &[u8]) -> Result<(&[u8], &[u8]), Errno> {
    let (parent, name) = match path.iter().rposition(|b| *b == b'/') {
        Some(i) => (&path[..i], &path[i + 1..]),
        None => (&path[..0], path),
    };
    match name {
        b"" => Err(Errno::EBUSY),
        b"." | b".." => Err(Errno::EINVAL),
        _ => Ok((parent, name)),
    }
}

impl DirTree {
    /// Opens a host directory, the only path of the host that is ever resolved from its root. Writable trees clear the process's
    /// umask, because the permission bits of new nodes are the guest's own.
    pub fn open(path: &Path, writable: bool, memory: Arc<GuestMemory>) -> Result<Arc<DirTree>, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(path.as_os_str().as_bytes(), flags, Mode::empty()).map_err(errno)?;
        if writable {
            rustix::process::umask(Mode::empty());
        }
        let tree = DirTree { root, memory, writable, devices: Mutex::new(Rank::Leaf, HashMap::new()) };
        // Without openat2 (Linux 5.6) nothing works: say so now.
        tree.at(b"", OFlags::PATH)?;
        Ok(Arc::new(tree))
    }

    fn at(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        let path: &[u8] = if path.is_empty() { b"." } else { path };
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        // EAGAIN: the kernel could not exclude a race with a rename; a handful of tries is what openat2(2) advises.
        for _ in 0..16 {
            match rustix::fs::openat2(&self.root, path, flags, Mode::empty(), confined()) {
                Err(rustix::io::Errno::AGAIN) => {}
                // Leaving the tree looks like what it is to the guest: a name that is not there.
                Err(rustix::io::Errno::XDEV) => return Err(Errno::ENOENT),
                r => return r.map_err(errno),
            }
        }
        Err(Errno::EAGAIN)
    }

    /// Attributes, and whether the node is on a file system for storage.
    fn judge(&self, fd: &OwnedFd) -> Result<(rustix::fs::Stat, bool), Errno> {
        let st = rustix::fs::fstat(fd).map_err(errno)?;
        let known = self.devices.lock().get(&st.st_dev).copied();
        let admitted = if let Some(a) = known {
            a
        } else {
            let kind = rustix::fs::fstatfs(fd).map_err(errno)?.f_type;
            let admitted = !REFUSED.contains(&(kind as u64 & 0xffff_ffff));
            self.devices.lock().insert(st.st_dev, admitted);
            admitted
        };
        Ok((st, admitted))
    }

    /// Refuses nodes on file systems of the kernel.
    fn admitted(&self, fd: &OwnedFd) -> Result<rustix::fs::Stat, Errno> {
        match self.judge(fd)? {
            (st, true) => Ok(st),
            (_, false) => Err(Errno::EACCES),
        }
    }

    /// As `admitted`, but the root of a refused file system passes with `false`: it is where the host mounts it, and shows as
    /// an empty directory on which the sandbox can mount its own.
    fn admitted_or_mount_point(&self, fd: &OwnedFd) -> Result<(rustix::fs::Stat, bool), Errno> {
        match self.judge(fd)? {
            (st, false) if st.st_ino != 1 || FileType::from_raw_mode(st.st_mode) != FileType::Directory => {
                Err(Errno::EACCES)
            }
            judged => Ok(judged),
        }
    }

    fn node(&self, path: &[u8]) -> Result<(OwnedFd, rustix::fs::Stat), Errno> {
        let fd = self.at(path, OFlags::PATH)?;
        let st = self.admitted(&fd)?;
        Ok((fd, st))
    }

    fn parent<'a>(&self, path: &'a [u8]) -> Result<(OwnedFd, &'a [u8]), Errno> {
        if !self.writable {
            return Err(Errno::EROFS);
        }
        let (parent, name) = split(path)?;
        let fd = self.at(parent, OFlags::PATH | OFlags::DIRECTORY)?;
        self.admitted(&fd)?;
        Ok((fd, name))
    }

    /// For extended attributes, which no O_PATH descriptor serves. None for nodes that cannot be opened without side effects.
    fn readable(&self, path: &[u8]) -> Result<Option<OwnedFd>, Errno> {
        let (_, st) = self.node(path)?;
        match FileType::from_raw_mode(st.st_mode) {
            FileType::RegularFile | FileType::Directory => {
                self.at(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY).map(Some)
            }
            _ => Ok(None),
        }
    }
}

/// Calls with growing buffers until the answer fits.
fn growing(mut call: impl FnMut(&mut [u8]) -> rustix::io::Result<usize>) -> Result<Vec<u8>, Errno> {
    let mut buf = vec![0; 256];
    loop {
        match call(&mut buf) {
            Ok(n) => {
                buf.truncate(n);
                return Ok(buf);
            }
            // XATTR_SIZE_MAX and XATTR_LIST_MAX are 65,536.
            Err(rustix::io::Errno::RANGE) if buf.len() < 65536 => buf.resize(buf.len() * 4, 0),
            Err(e) => return Err(errno(e)),
        }
    }
}

impl HostTree for DirTree {
    fn stat(&self, path: &[u8]) -> Result<Stat, Errno> {
        let fd = self.at(path, OFlags::PATH)?;
        self.admitted_or_mount_point(&fd).map(|(st, _)| stat(&st))
    }

    fn read_link(&self, path: &[u8]) -> Result<Vec<u8>, Errno> {
        let (fd, st) = self.node(path)?;
        if FileType::from_raw_mode(st.st_mode) != FileType::Symlink {
            return Err(Errno::EINVAL);
        }
        rustix::fs::readlinkat(&fd, c"", Vec::new()).map(|c| c.into_bytes()).map_err(errno)
    }

    fn read_dir(&self, path: &[u8]) -> Result<Vec<HostDirEntry>, Errno> {
        let fd = self.at(path, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut out = Vec::new();
        if !self.admitted_or_mount_point(&fd)?.1 {
            return Ok(out);
        }
        for entry in Dir::new(fd).map_err(errno)? {
            let entry = entry.map_err(errno)?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                // DT_* is S_IF* >> 12; unknown types are 0 in both.
                let kind = match entry.file_type() {
                    FileType::Unknown => 0,
                    t => (t.as_raw_mode() >> 12) as u8,
                };
                out.push(HostDirEntry { name: name.to_vec(), ino: entry.ino(), kind });
            }
        }
        Ok(out)
    }

    fn open(&self, path: &[u8], write: bool) -> Result<Arc<dyn HostFile>, Errno> {
        if write && !self.writable {
            return Err(Errno::EROFS);
        }
        // Looked at before it is opened: opening a device may act.
        let regular = |st: &rustix::fs::Stat| match FileType::from_raw_mode(st.st_mode) {
            FileType::RegularFile => Ok(()),
            FileType::Directory => Err(Errno::EISDIR),
            FileType::Symlink => Err(Errno::ELOOP),
            _ => Err(Errno::ENXIO),
        };
        regular(&self.node(path)?.1)?;
        let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
        let fd = self.at(path, access | OFlags::NONBLOCK | OFlags::NOCTTY)?;
        let st = self.admitted(&fd)?;
        regular(&st)?;
        Ok(Arc::new(RegularFile::new(fd, self.memory.clone(), (st.st_dev, st.st_ino), write)))
    }

    fn get_xattr(&self, path: &[u8], name: &[u8]) -> Result<Vec<u8>, Errno> {
        let Some(fd) = self.readable(path)? else { return Err(Errno::ENODATA) };
        growing(|buf| rustix::fs::fgetxattr(&fd, name, buf))
    }

    fn list_xattr(&self, path: &[u8]) -> Result<Vec<Vec<u8>>, Errno> {
        let Some(fd) = self.readable(path)? else { return Ok(Vec::new()) };
        let names = growing(|buf| rustix::fs::flistxattr(&fd, buf))?;
        Ok(names.split(|b| *b == 0).filter(|n| !n.is_empty()).map(<[u8]>::to_vec).collect())
    }

    fn statfs(&self) -> Result<[u64; 8], Errno> {
        let s = rustix::fs::fstatfs(&self.root).map_err(errno)?;
        Ok([
            s.f_type as u64,
            s.f_bsize as u64,
            s.f_blocks,
            s.f_bfree,
            s.f_bavail,
            s.f_files,
            s.f_ffree,
            s.f_namelen as u64,
        ])
    }

    fn writable(&self) -> bool {
        self.writable
    }

    fn create(&self, path: &[u8], what: HostCreate<'_>, mode: u32) -> Result<(), Errno> {
        let (dir, name) = self.parent(path)?;
        let mode_bits = Mode::from_raw_mode(mode & 0o7777);
        match what {
            HostCreate::File => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                rustix::fs::openat(&dir, name, flags, mode_bits).map(drop)
            }
            HostCreate::Directory => rustix::fs::mkdirat(&dir, name, mode_bits),
            HostCreate::Symlink(target) => rustix::fs::symlinkat(target, &dir, name),
            HostCreate::Special(kind) => {
                let kind = FileType::from_raw_mode(kind);
                if !matches!(kind, FileType::Fifo | FileType::Socket) {
                    return Err(Errno::EPERM);
                }
                rustix::fs::mknodat(&dir, name, kind, mode_bits, 0)
            }
        }
        .map_err(errno)
    }

    fn link(&self, from: &[u8], to: &[u8]) -> Result<(), Errno> {
        let (from_dir, from_name) = self.parent(from)?;
        let (to_dir, to_name) = self.parent(to)?;
        rustix::fs::linkat(&from_dir, from_name, &to_dir, to_name, AtFlags::empty()).map_err(errno)
    }

    fn remove(&self, path: &[u8], dir: bool) -> Result<(), Errno> {
        let (parent, name) = self.parent(path)?;
        let flags = if dir { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        rustix::fs::unlinkat(&parent, name, flags).map_err(errno)
    }

    fn rename(&self, from: &[u8], to: &[u8], flags: u32) -> Result<(), Errno> {
        let known = RenameFlags::NOREPLACE | RenameFlags::EXCHANGE;
        let flags = RenameFlags::from_bits_retain(flags);
        if !known.contains(flags) {
            return Err(Errno::EINVAL);
        }
        let (from_dir, from_name) = self.parent(from)?;
        let (to_dir, to_name) = self.parent(to)?;
        rustix::fs::renameat_with(&from_dir, from_name, &to_dir, to_name, flags).map_err(errno)
    }

    fn set_attr(&self, path: &[u8], change: &AttrChange) -> Result<(), Errno> {
        if !self.writable {
            return Err(Errno::EROFS);
        }
        let (fd, _) = self.node(path)?;
        if let Some(len) = change.size {
            self.open(path, true)?.truncate(len)?;
        }
        // The owner first: changing it clears set-user-ID bits that the mode may set.
        if change.uid.is_some() || change.gid.is_some() {
            let uid = change.uid.map(rustix::fs::Uid::from_raw);
            let gid = change.gid.map(rustix::fs::Gid::from_raw);
            rustix::fs::chownat(&fd, c"", uid, gid, AtFlags::EMPTY_PATH).map_err(errno)?;
        }
        if let Some(mode) = change.mode {
            match chmod::chmod(fd.as_fd(), mode & 0o7777) {
                // Before Linux 6.6 there is no chmod of an O_PATH descriptor.
                Err(Errno::ENOSYS) => {
                    let fd = self.readable(path)?.ok_or(Errno::EOPNOTSUPP)?;
                    rustix::fs::fchmod(&fd, Mode::from_raw_mode(mode & 0o7777)).map_err(errno)?;
                }
                r => r?,
            }
        }
        if change.atime.is_some() || change.mtime.is_some() {
            let omit = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
            let time = |t: Option<guest_abi::types::Timespec>| {
                t.map_or(omit, |t| rustix::fs::Timespec { tv_sec: t.sec, tv_nsec: t.nsec.clamp(0, 999_999_999) })
            };
            let times = Timestamps { last_access: time(change.atime), last_modification: time(change.mtime) };
            let empty: &CStr = c"";
            rustix::fs::utimensat(&fd, empty, &times, AtFlags::EMPTY_PATH).map_err(errno)?;
        }
        Ok(())
    }
}
