//! Tests of this module.
use std::collections::BTreeMap;
use std::sync::Arc;

use guest_abi::types::Stat;
use parking_lot::Mutex;

use super::*;
use crate::Errno;
use crate::mm::{IoDest, IoSource};
use crate::platform::PhysRange;
use crate::platform::host::{AttrChange, HostCreate, HostDirEntry, HostFile, HostTree, Window};
use crate::platform::sim::SimPlatform;
use crate::vfs::file::KernelCaller;
use crate::vfs::path::resolve;
use crate::vfs::{
    DirSink, File, FsState, Lookup, LookupFlags, MountNamespace, OpenFlags, OpenHow, PathRef, names, open,
};

/// A read-only host tree in memory: None is a directory.
struct MemTree {
    /// The one file that the host removes.
    removed: Mutex<Vec<u8>>,
    nodes: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
    stats: Mutex<usize>,
    platform: Arc<SimPlatform>,
}

struct MemFile(Vec<u8>, Stat, Arc<SimPlatform>);

impl HostFile for MemFile {
    fn stat(&self) -> Result<Stat, Errno> {
        Ok(self.1)
    }
    fn read_phys(&self, offset: u64, dst: &[PhysRange]) -> Result<usize, Errno> {
        let rest = self.0.get(offset as usize..).unwrap_or_default();
        let n = rest.len().min(dst[0].len);
        self.2.memory().write(dst[0].addr, &rest[..n])?;
        Ok(n)
    }
    fn read(&self, offset: u64, dst: &mut [u8]) -> Result<usize, Errno> {
        let rest = self.0.get(offset as usize..).unwrap_or_default();
        let n = rest.len().min(dst.len());
        dst[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }
    fn write_phys(&self, _: u64, _: &[PhysRange]) -> Result<usize, Errno> {
        Err(Errno::EROFS)
    }
    fn write(&self, _: u64, _: &[u8]) -> Result<usize, Errno> {
        Err(Errno::EROFS)
    }
    fn truncate(&self, _: u64) -> Result<(), Errno> {
        Err(Errno::EROFS)
    }
    fn sync(&self, _: bool) -> Result<(), Errno> {
        Ok(())
    }
    fn window(&self, _: u64) -> Result<Arc<dyn Window>, Errno> {
        Err(Errno::ENODEV)
    }
}

impl HostTree for MemTree {
    fn stat(&self, path: &[u8]) -> Result<Stat, Errno> {
        *self.stats.lock() += 1;
        if *self.removed.lock() == path && !path.is_empty() {
            return Err(Errno::ENOENT);
        }
        let (i, (_, node)) = self.nodes.iter().enumerate().find(|(_, (p, _))| *p == path).ok_or(Errno::ENOENT)?;
        let (mode, size) = node.as_ref().map_or((0o040_755, 4096), |c| (0o100_644, c.len()));
        let subdirs = self.nodes.iter().filter(|(p, n)| n.is_none() && parent(p) == Some(path)).count();
        let nlink = if node.is_none() { 2 + subdirs as u64 } else { 1 };
        Ok(Stat { dev: 77, ino: 1000 + i as u64, nlink, mode, size: size as i64, ..Stat::default() })
    }
    fn read_link(&self, _: &[u8]) -> Result<Vec<u8>, Errno> {
        Err(Errno::EINVAL)
    }
    fn read_dir(&self, path: &[u8]) -> Result<Vec<HostDirEntry>, Errno> {
        let entries = self.nodes.iter().enumerate().filter(|(_, (p, _))| parent(p) == Some(path));
        Ok(entries
            .map(|(i, (p, n))| HostDirEntry {
                name: p.rsplit(|&b| b == b'/').next().unwrap().to_vec(),
                ino: 1000 + i as u64,
                kind: if n.is_none() { 4 } else { 8 },
            })
            .collect())
    }
    fn open(&self, path: &[u8], _: bool) -> Result<Arc<dyn HostFile>, Errno> {
        let content = self.nodes.get(path).cloned().flatten().ok_or(Errno::ENOENT)?;
        Ok(Arc::new(MemFile(content, self.stat(path)?, self.platform.clone())))
    }
    fn get_xattr(&self, _: &[u8], _: &[u8]) -> Result<Vec<u8>, Errno> {
        Err(Errno::ENODATA)
    }
    fn list_xattr(&self, _: &[u8]) -> Result<Vec<Vec<u8>>, Errno> {
        Ok(Vec::new())
    }
    fn statfs(&self) -> Result<[u64; 8], Errno> {
        Ok([0; 8])
    }
    fn writable(&self) -> bool {
        false
    }
    fn create(&self, _: &[u8], _: HostCreate<'_>, _: u32) -> Result<(), Errno> {
        panic!("a write to the host")
    }
    fn link(&self, _: &[u8], _: &[u8]) -> Result<(), Errno> {
        panic!("a write to the host")
    }
    fn remove(&self, _: &[u8], _: bool) -> Result<(), Errno> {
        panic!("a write to the host")
    }
    fn rename(&self, _: &[u8], _: &[u8], _: u32) -> Result<(), Errno> {
        panic!("a write to the host")
    }
    fn set_attr(&self, _: &[u8], _: &AttrChange) -> Result<(), Errno> {
        panic!("a write to the host")
    }
}

fn parent(path: &[u8]) -> Option<&[u8]> {
    if path.is_empty() {
        return None;
    }
    Some(path.iter().rposition(|&b| b == b'/').map_or(&b""[..], |i| &path[..i]))
}

struct World {
    ns: Arc<MountNamespace>,
    caller: KernelCaller,
    tree: Arc<MemTree>,
}

impl World {
    fn new() -> World {
        let mut nodes: BTreeMap<Vec<u8>, Option<Vec<u8>>> = BTreeMap::new();
        for dir in ["", "etc", "usr", "usr/lib", "usr/lib/deep", "empty"] {
            nodes.insert(dir.into(), None);
        }
        for (name, content) in
            [("etc/passwd", "root"), ("etc/group", "wheel"), ("usr/lib/a", "A"), ("usr/lib/deep/b", "B")]
        {
            nodes.insert(name.into(), Some(content.into()));
        }
        let platform = SimPlatform::new(1);
        let tree =
            Arc::new(MemTree { removed: Mutex::default(), nodes, stats: Mutex::new(0), platform: platform.clone() });
        let fs = OverlayFs::new(platform, tree.clone()).unwrap();
        World { ns: MountNamespace::new(fs), caller: KernelCaller::default(), tree }
    }

    fn cx(&self) -> Lookup<'_> {
        let root = self.ns.root().unwrap();
        Lookup::new(FsState { cwd: root.clone(), root, umask: 0 }, &self.caller)
    }

    fn at(&self, path: &str) -> crate::Result<PathRef> {
        resolve(&self.cx(), None, path.as_bytes(), LookupFlags::empty())
    }

    fn stat(&self, path: &str) -> crate::Result<Stat> {
        self.at(path)?.inode().stat()
    }

    fn open(&self, path: &str, flags: OpenFlags) -> crate::Result<Arc<File>> {
        let how = OpenHow { mode: 0o644, ..OpenHow::new(flags) };
        open::open(&self.cx(), None, path.as_bytes(), &how)
    }

    fn read(&self, path: &str) -> crate::Result<String> {
        let file = self.open(path, OpenFlags::empty())?;
        Ok(contents(&file))
    }

    fn list(&self, path: &str) -> Vec<String> {
        struct Sink(Vec<String>);
        impl DirSink for Sink {
            fn add(&mut self, name: &[u8], _: u64, _: u8, _: u64) -> bool {
                // Two at a time, so that positions matter.
                let full = self.0.len() % 3 == 2;
                self.0.push(if full { String::new() } else { String::from_utf8(name.to_vec()).unwrap() });
                !full
            }
        }
        let file = self.open(path, OpenFlags::DIRECTORY).unwrap();
        let (mut pos, mut all) = (0, Vec::new());
        loop {
            let mut sink = Sink(Vec::new());
            let next = file.ops().read_dir(&file, &self.caller, pos, &mut sink).unwrap();
            if next == pos {
                break;
            }
            all.extend(sink.0.into_iter().filter(|n| !n.is_empty() && n != "." && n != ".."));
            pos = next;
        }
        all
    }

    fn rename(&self, from: &str, to: &str, flags: u32) -> crate::Result<()> {
        names::rename(&self.cx(), (None, from.as_bytes()), (None, to.as_bytes()), flags)
    }

    fn forget(&self) {
        self.ns.root().unwrap().mount.sb().cache().clear();
    }
}

fn contents(file: &File) -> String {
    let mut buf = [0; 100];
    let n = file.ops().read(file, &mut IoDest::kernel(&mut buf), 0).unwrap();
    String::from_utf8(buf[..n].to_vec()).unwrap()
}

fn put(file: &File, text: &str, pos: u64) {
    assert_eq!(file.ops().write(file, &mut IoSource::kernel(text.as_bytes()), pos), Ok(text.len()));
}

#[test]
fn copy_up_keeps_identity_and_is_seen_by_earlier_readers() {
    let w = World::new();
    let before = w.stat("/etc/group").unwrap();
    let reader = w.open("/etc/group", OpenFlags::empty()).unwrap();
    let writer = w.open("/etc/group", OpenFlags::RDWR).unwrap();
    put(&writer, "X", 1);
    assert_eq!(contents(&reader), "wXeel");
    drop((reader, writer));
    w.forget();
    assert_eq!(w.read("/etc/group").unwrap(), "wXeel");
    let after = w.stat("/etc/group").unwrap();
    assert_eq!((before.dev, before.ino, before.mode), (after.dev, after.ino, after.mode));
    // Written beyond the host's bytes, then cut inside them.
    let writer = w.open("/etc/group", OpenFlags::RDWR).unwrap();
    put(&writer, "!", 7);
    assert_eq!(contents(&writer), "wXeel\0\0!");
    writer.ops().truncate(3).unwrap();
    writer.ops().truncate(6).unwrap();
    assert_eq!(w.read("/etc/group").unwrap(), "wXe\0\0\0");
    let fresh = w.open("/etc/passwd", OpenFlags::WRONLY | OpenFlags::TRUNC).unwrap();
    put(&fresh, "new", 0);
    assert_eq!(w.read("/etc/passwd").unwrap(), "new");
}

#[test]
fn whiteouts_and_merged_listing() {
    let w = World::new();
    names::unlink(&w.cx(), None, b"/etc/passwd").unwrap();
    w.open("/etc/new", OpenFlags::CREAT | OpenFlags::RDWR).unwrap();
    w.forget();
    assert_eq!(w.list("/etc"), ["group", "new"]);
    assert_eq!(w.stat("/etc/passwd").unwrap_err(), Errno::ENOENT);
    w.open("/etc/passwd", OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::RDWR).unwrap();
    assert_eq!(w.read("/etc/passwd").unwrap(), "");
    assert_eq!(w.list("/etc"), ["group", "passwd", "new"]);
    assert_eq!(w.stat("/etc/new").unwrap().dev, 77);
}

#[test]
fn a_removed_directory_comes_back_empty() {
    let w = World::new();
    assert_eq!(names::rmdir(&w.cx(), None, b"/usr/lib/deep").unwrap_err(), Errno::ENOTEMPTY);
    names::unlink(&w.cx(), None, b"/usr/lib/deep/b").unwrap();
    names::rmdir(&w.cx(), None, b"/usr/lib/deep").unwrap();
    names::mkdir(&w.cx(), None, b"/usr/lib/deep", 0o700).unwrap();
    w.forget();
    assert!(w.list("/usr/lib/deep").is_empty());
    assert_eq!(w.stat("/usr/lib").unwrap().nlink, 3);
}

#[test]
fn a_renamed_host_directory_keeps_its_tree() {
    let w = World::new();
    let held = w.open("/usr/lib/deep/b", OpenFlags::empty()).unwrap();
    w.rename("/usr/lib", "/etc/moved", 0).unwrap();
    w.forget();
    assert_eq!(w.read("/etc/moved/deep/b").unwrap(), "B");
    assert_eq!(w.read("/etc/moved/a").unwrap(), "A");
    assert_eq!(w.stat("/usr/lib").unwrap_err(), Errno::ENOENT);
    assert!(w.list("/usr").is_empty());
    assert_eq!(w.list("/etc"), ["group", "passwd", "moved"]);
    // A change below the moved directory lasts.
    let file = w.open("/etc/moved/deep/b", OpenFlags::WRONLY).unwrap();
    put(&file, "C", 0);
    drop(file);
    w.forget();
    assert_eq!(w.read("/etc/moved/deep/b").unwrap(), "C");
    assert_eq!(contents(&held), "C");
    w.rename("/etc/moved/deep", "/empty", 2).unwrap();
    assert_eq!(w.read("/empty/b").unwrap(), "C");
    assert!(w.list("/etc/moved/deep").is_empty());
}

#[test]
fn links_and_unlinked_files() {
    let w = World::new();
    names::link(&w.cx(), &w.at("/etc/group").unwrap(), None, b"/g2").unwrap();
    assert_eq!(w.stat("/g2").unwrap().nlink, 2);
    w.forget();
    let file = w.open("/g2", OpenFlags::RDWR).unwrap();
    put(&file, "W", 0);
    assert_eq!(w.read("/etc/group").unwrap(), "Wheel");
    names::unlink(&w.cx(), None, b"/g2").unwrap();
    names::unlink(&w.cx(), None, b"/etc/group").unwrap();
    assert_eq!(contents(&file), "Wheel");
    assert_eq!(file.path().unwrap().inode().stat().unwrap().nlink, 0);
    w.forget();
    let held = w.open("/etc/passwd", OpenFlags::empty()).unwrap();
    names::unlink(&w.cx(), None, b"/etc/passwd").unwrap();
    held.path().unwrap().inode().set_attr(&AttrChange { mode: Some(0o600), ..AttrChange::default() }).unwrap();
    drop(held);
    w.forget();
    assert_eq!(w.stat("/etc/passwd").unwrap_err(), Errno::ENOENT);
}

#[test]
fn metadata_changes_last() {
    let w = World::new();
    let change = AttrChange { mode: Some(0o600), uid: Some(5), ..AttrChange::default() };
    w.at("/usr/lib/deep/b").unwrap().inode().set_attr(&change).unwrap();
    w.at("/usr").unwrap().inode().set_attr(&change).unwrap();
    w.at("/etc/passwd").unwrap().inode().set_xattr(b"user.k", b"v", 0).unwrap();
    w.forget();
    let st = w.stat("/usr/lib/deep/b").unwrap();
    assert_eq!((st.mode & 0o7777, st.uid, st.size), (0o600, 5, 1));
    assert_eq!(w.stat("/usr").unwrap().mode & 0o7777, 0o600);
    assert_eq!(w.at("/etc/passwd").unwrap().inode().get_xattr(b"user.k").unwrap(), b"v");
    assert_eq!(w.read("/usr/lib/deep/b").unwrap(), "B");
}

#[test]
fn what_the_host_removes_can_be_made_again() {
    let w = World::new();
    w.stat("/etc/group").unwrap();
    *w.tree.removed.lock() = b"etc/group".to_vec();
    assert_eq!(w.stat("/etc/group").unwrap_err(), Errno::ENOENT);
    let file = w.open("/etc/group", OpenFlags::CREAT | OpenFlags::EXCL | OpenFlags::RDWR).unwrap();
    put(&file, "mine", 0);
    assert_eq!(w.read("/etc/group").unwrap(), "mine");
}
