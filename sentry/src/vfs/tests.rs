//! The virtual file system over tmpfs, with no machine.
use std::sync::Arc;

use linux_raw_sys::general as raw;

use super::attr::{Access, access};
use super::path::{self, open, resolve};
use super::*;
use crate::Errno;
use crate::fs::tmpfs::{TmpFs, TmpfsOptions};
use crate::mm::{IoDest, IoSource};
use crate::ns::user::Credentials;
use crate::platform::sim::SimPlatform;

struct World {
    ns: Arc<MountNamespace>,
    caller: KernelCaller,
    fs: FsState,
}

fn tmpfs() -> Arc<TmpFs> {
    TmpFs::new(SimPlatform::new(1), TmpfsOptions { mode: 0o755, ..TmpfsOptions::default() }, "tmpfs").unwrap()
}

impl World {
    fn new() -> World {
        let ns = MountNamespace::new(tmpfs());
        let root = ns.root().unwrap();
        World { ns, caller: KernelCaller::default(), fs: FsState { cwd: root.clone(), root, umask: 0o022 } }
    }

    fn cx(&self) -> Lookup<'_> {
        Lookup::new(self.fs.clone(), &self.caller)
    }

    fn find(&self, path: &str) -> Result<PathRef, Errno> {
        resolve(&self.cx(), None, path.as_bytes(), LookupFlags::FOLLOW)
    }

    fn mkdir(&self, path: &str) -> Result<PathRef, Errno> {
        names::mkdir(&self.cx(), None, path.as_bytes(), 0o777)
    }

    fn symlink(&self, target: &str, path: &str) {
        names::symlink(&self.cx(), target.as_bytes(), None, path.as_bytes()).unwrap();
    }

    fn open(&self, path: &str, flags: u32) -> Result<Arc<File>, Errno> {
        let how = OpenHow { flags: OpenFlags::from_bits_retain(flags), mode: 0o666, ..OpenHow::default() };
        open(&self.cx(), None, path.as_bytes(), &how)
    }

    fn make(&self, path: &str, content: &str) {
        let file = self.open(path, raw::O_CREAT | raw::O_RDWR).unwrap();
        let n = file.ops().write(&file, &mut IoSource::kernel(content.as_bytes()), 0).unwrap();
        assert_eq!(n, content.len());
    }

    fn content(&self, path: &str) -> String {
        let file = self.open(path, 0).unwrap();
        let mut buf = [0; 64];
        let n = file.ops().read(&file, &mut IoDest::kernel(&mut buf), 0).unwrap();
        String::from_utf8(buf[..n].to_vec()).unwrap()
    }

    fn rename(&self, from: &str, to: &str, flags: u32) -> Result<(), Errno> {
        names::rename(&self.cx(), (None, from.as_bytes()), (None, to.as_bytes()), flags)
    }

    fn text(&self, path: &str) -> String {
        String::from_utf8(self.find(path).unwrap().absolute()).unwrap()
    }
}

#[test]
fn paths_resolve_as_the_man_page_says() {
    let w = World::new();
    w.mkdir("/a").unwrap();
    w.mkdir("/a/b/").unwrap();
    w.make("/a/b/file", "hello");
    w.symlink("b/file", "/a/link");
    w.symlink("/a/b", "/abs");
    w.symlink("loop", "/loop");
    w.symlink("nowhere", "/dangling");
    assert_eq!(w.text("//a/./b/../b//file"), "/a/b/file");
    assert_eq!(w.text("/a/link"), "/a/b/file");
    assert_eq!(w.text("/abs/../b/file"), "/a/b/file");
    assert_eq!(w.text("/../.."), "/");
    assert_eq!(w.find("").err(), Some(Errno::ENOENT));
    assert_eq!(w.find("/a/b/file/").err(), Some(Errno::ENOTDIR));
    assert_eq!(w.find("/a/b/file/x").err(), Some(Errno::ENOTDIR));
    assert_eq!(w.find("/a/link/").err(), Some(Errno::ENOTDIR));
    assert_eq!(w.find("/loop").err(), Some(Errno::ELOOP));
    assert_eq!(w.find("/dangling").err(), Some(Errno::ENOENT));
    assert_eq!(w.find(&format!("/{}", "x".repeat(256))).err(), Some(Errno::ENAMETOOLONG));
    assert_eq!(w.open("/a/link", raw::O_NOFOLLOW).err(), Some(Errno::ELOOP));
    assert!(w.open("/a/link", raw::O_NOFOLLOW | raw::O_PATH).is_ok());
    assert_eq!(w.open("/a", raw::O_RDWR).err(), Some(Errno::EISDIR));
    assert_eq!(w.open("/a", raw::O_CREAT).err(), Some(Errno::EISDIR));
    assert_eq!(w.open("/new/", raw::O_CREAT).err(), Some(Errno::EISDIR));
    assert_eq!(w.open("/a/link", raw::O_CREAT | raw::O_EXCL).err(), Some(Errno::EEXIST));
    // O_CREAT goes through a dangling link.
    assert!(w.open("/dangling", raw::O_CREAT).is_ok());
    assert_eq!(w.text("/dangling"), "/nowhere");
}

#[test]
fn scoped_resolution_stays_inside() {
    let w = World::new();
    w.mkdir("/jail").unwrap();
    w.mkdir("/jail/etc").unwrap();
    w.make("/secret", "no");
    w.symlink("/secret", "/jail/abs");
    w.symlink("../secret", "/jail/up");
    w.symlink("/etc", "/jail/inside");
    let jail = w.find("/jail").unwrap();
    let at = |path: &str, flags| resolve(&w.cx(), Some(&jail), path.as_bytes(), LookupFlags::FOLLOW | flags);
    assert_eq!(at("up", LookupFlags::BENEATH).err(), Some(Errno::EXDEV));
    assert_eq!(at("abs", LookupFlags::BENEATH).err(), Some(Errno::EXDEV));
    assert_eq!(at("/etc", LookupFlags::BENEATH).err(), Some(Errno::EXDEV));
    assert_eq!(at("up", LookupFlags::IN_ROOT).err(), Some(Errno::ENOENT));
    assert!(at("inside", LookupFlags::IN_ROOT).is_ok());
    assert_eq!(at("inside", LookupFlags::NO_SYMLINKS).err(), Some(Errno::ELOOP));
    assert!(at("etc/../etc", LookupFlags::BENEATH).is_ok());
}

#[test]
fn renames() {
    let w = World::new();
    w.mkdir("/d").unwrap();
    w.mkdir("/d/sub").unwrap();
    w.mkdir("/e").unwrap();
    w.make("/f", "f");
    w.make("/g", "g");
    let open = w.open("/f", 0).unwrap();
    w.rename("/f", "/d/sub/f2", 0).unwrap();
    assert_eq!(open.path().unwrap().absolute(), b"/d/sub/f2");
    assert_eq!(w.find("/f").err(), Some(Errno::ENOENT));
    assert_eq!(w.rename("/d", "/d/sub/x", 0), Err(Errno::EINVAL));
    assert_eq!(w.rename("/d/sub", "/d", 0), Err(Errno::ENOTEMPTY));
    assert_eq!(w.rename("/e", "/d", 0), Err(Errno::ENOTEMPTY));
    assert_eq!(w.rename("/g", "/d", 0), Err(Errno::EISDIR));
    assert_eq!(w.rename("/d", "/g", 0), Err(Errno::ENOTDIR));
    assert_eq!(w.rename("/g", "/d/sub/f2", raw::RENAME_NOREPLACE), Err(Errno::EEXIST));
    assert_eq!(w.rename("/g", "/nope", raw::RENAME_EXCHANGE), Err(Errno::ENOENT));
    w.rename("/g", "/d/sub/f2", raw::RENAME_EXCHANGE).unwrap();
    assert_eq!((w.content("/g"), w.content("/d/sub/f2")), ("f".into(), "g".into()));
    assert_eq!(open.path().unwrap().absolute(), b"/g");
    w.rename("/d/sub/f2", "/g", 0).unwrap();
    assert_eq!(open.path().unwrap().absolute(), b"/g (deleted)");
    assert_eq!(w.content("/g"), "g");
    w.rename("/d/sub", "/e", 0).unwrap();
    assert_eq!(w.rename("/g", "/g/", 0), Err(Errno::ENOTDIR));
    assert_eq!(names::rmdir(&w.cx(), None, b"/d/."), Err(Errno::EINVAL));
    assert_eq!(names::rmdir(&w.cx(), None, b"/d/.."), Err(Errno::ENOTEMPTY));
    assert_eq!(names::rmdir(&w.cx(), None, b"/"), Err(Errno::EBUSY));
    names::rmdir(&w.cx(), None, b"/d/").unwrap();
    assert_eq!(names::unlink(&w.cx(), None, b"/e"), Err(Errno::EISDIR));
    assert_eq!(names::unlink(&w.cx(), None, b"/g/"), Err(Errno::ENOTDIR));
}

#[test]
fn mounts_cover_and_uncover() {
    let w = World::new();
    w.mkdir("/mnt").unwrap();
    w.mkdir("/mnt/below").unwrap();
    w.ns.mount(b"/mnt", tmpfs(), MountFlags::NOSUID).unwrap();
    assert_eq!(w.find("/mnt/below").err(), Some(Errno::ENOENT));
    w.mkdir("/mnt/in").unwrap();
    assert_eq!(w.text("/mnt/in/../../mnt/in"), "/mnt/in");
    assert_eq!(w.rename("/mnt/in", "/in", 0), Err(Errno::EXDEV));
    assert_eq!(names::rmdir(&w.cx(), None, b"/mnt"), Err(Errno::EBUSY));
    w.mkdir("/bound").unwrap();
    w.ns.bind(&w.find("/mnt/in").unwrap(), &w.find("/bound").unwrap(), false).unwrap();
    w.make("/bound/file", "x");
    assert_eq!(w.content("/mnt/in/file"), "x");
    assert_eq!(w.text("/bound/file"), "/bound/file");
    assert_eq!(w.text("/bound/.."), "/");
    let bound = w.find("/bound").unwrap();
    bound.mount.set_flags(MountFlags::RDONLY | MountFlags::NOEXEC).unwrap();
    drop(bound);
    assert_eq!(w.open("/bound/file", raw::O_WRONLY).err(), Some(Errno::EROFS));
    assert_eq!(w.mkdir("/bound/x").err(), Some(Errno::EROFS));
    assert_eq!(w.mkdir("/bound/file").err(), Some(Errno::EEXIST));
    let root = w.ns.root().unwrap();
    let text = String::from_utf8(w.ns.mounts_text(&root)).unwrap();
    assert!(text.contains("tmpfs /mnt tmpfs rw,nosuid,relatime 0 0\n"), "{text}");
    assert!(text.contains("tmpfs /bound tmpfs ro,noexec,relatime 0 0\n"), "{text}");
    let held = w.find("/mnt/in").unwrap();
    assert_eq!(w.ns.unmount(w.find("/mnt").unwrap(), false), Err(Errno::EBUSY));
    drop(held);
    w.ns.unmount(w.find("/mnt").unwrap(), false).unwrap();
    assert!(w.find("/mnt/below").is_ok());
    w.ns.unmount(w.find("/bound").unwrap(), true).unwrap();
    assert_eq!(w.ns.mounts().len(), 1);
}

#[test]
fn permissions() {
    let mut w = World::new();
    w.mkdir("/tmp").unwrap();
    attr::set_mode(&w.caller.0, attr::Target::Path(&w.find("/tmp").unwrap()), 0o1777).unwrap();
    w.make("/tmp/root", "r");
    w.make("/private", "p");
    attr::set_mode(&w.caller.0, attr::Target::Path(&w.find("/private").unwrap()), 0o600).unwrap();
    w.caller = KernelCaller(Arc::new(Credentials::new(1000, 1000, vec![])));
    assert_eq!(w.open("/private", 0).err(), Some(Errno::EACCES));
    assert_eq!(w.open("/tmp/root", raw::O_WRONLY).err(), Some(Errno::EACCES));
    assert_eq!(w.mkdir("/x").err(), Some(Errno::EACCES));
    assert_eq!(names::unlink(&w.cx(), None, b"/tmp/root"), Err(Errno::EPERM));
    w.make("/tmp/mine", "m");
    let mine = w.find("/tmp/mine").unwrap();
    assert_eq!(mine.inode().stat().map(|s| (s.uid, s.mode & 0o777)), Ok((1000, 0o644)));
    assert_eq!(attr::set_owner(&w.caller.0, attr::Target::Path(&mine), Some(0), None), Err(Errno::EPERM));
    assert_eq!(access(&w.cx(), &mine, Access::EXEC), Err(Errno::EACCES));
    assert_eq!(access(&w.cx(), &mine, Access::READ | Access::WRITE), Ok(()));
    names::unlink(&w.cx(), None, b"/tmp/mine").unwrap();
}

#[test]
fn unnamed_files_get_a_name() {
    let w = World::new();
    let file = w.open("/", raw::O_TMPFILE | raw::O_RDWR).unwrap();
    assert_eq!(file.stat().unwrap().nlink, 0);
    names::link(&w.cx(), file.path().unwrap(), None, b"/named").unwrap();
    assert_eq!(w.find("/named").unwrap().inode().stat().unwrap().nlink, 1);
    let file = w.open("/", raw::O_TMPFILE | raw::O_RDWR | raw::O_EXCL).unwrap();
    assert_eq!(names::link(&w.cx(), file.path().unwrap(), None, b"/other").err(), Some(Errno::ENOENT));
}

#[test]
fn the_cache_is_bounded_and_deep_trees_end() {
    let w = World::new();
    let mut at = w.ns.root().unwrap();
    for _ in 0..20_000 {
        let cx = w.cx();
        at = names::mkdir(&cx, Some(&at), b"d", 0o755).unwrap();
    }
    let sb = w.ns.root().unwrap().mount.sb().clone();
    assert!(sb.cache().len() <= 8192);
    drop(at);
    sb.cache().clear();
    assert_eq!(sb.cache().len(), 0);
    assert!(path::resolve(&w.cx(), None, b"/d/d/d", LookupFlags::empty()).is_ok());
}

#[test]
fn watches_hear_of_changes() {
    use std::sync::Mutex;

    use super::notify::{self, Event, Watch};

    #[derive(Default)]
    struct Log(Mutex<Vec<(u32, String)>>);
    impl Watch for Log {
        fn event(&self, e: &Event<'_>) {
            let name = String::from_utf8(e.name.unwrap_or_default().to_vec()).unwrap();
            self.0.lock().unwrap().push((e.mask, name));
        }
    }

    let w = World::new();
    w.mkdir("/d").unwrap();
    let dir = w.find("/d").unwrap();
    let log = Arc::new(Log::default());
    let watch: Arc<dyn Watch> = log.clone();
    assert!(notify::add(&dir.dentry, watch.clone()));
    drop(w.open("/d/f", raw::O_CREAT | raw::O_WRONLY).unwrap());
    w.rename("/d/f", "/d/g", 0).unwrap();
    names::unlink(&w.cx(), None, b"/d/g").unwrap();
    notify::remove(&dir.dentry, &watch);
    w.mkdir("/d/late").unwrap();
    let got = log.0.lock().unwrap().clone();
    let want = [
        (raw::IN_CREATE, "f"),
        (raw::IN_OPEN, "f"),
        (raw::IN_CLOSE_WRITE, "f"),
        (raw::IN_MOVED_FROM, "f"),
        (raw::IN_MOVED_TO, "g"),
        (raw::IN_DELETE, "g"),
    ];
    assert_eq!(got, want.map(|(m, n)| (m, n.to_string())));
}
