//! Tests of this module.
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use guest_abi::Errno;
use rustix::fs::OFlags;
use sentry::event::Events;
use sentry::platform::host::{AttrChange, HostCreate, HostStream, HostTree};
use sentry::platform::{Memory, PhysRange};

use super::stream::Stream;
use super::tree::DirTree;
use crate::memory::GuestMemory;
use crate::reactor::Reactor;

struct Scratch(PathBuf);
impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("bartizan-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(path.join("tree/sub")).unwrap();
        fs::write(path.join("secret"), "secret").unwrap();
        fs::write(path.join("tree/sub/file"), "contents").unwrap();
        std::os::unix::fs::symlink("../secret", path.join("tree/up")).unwrap();
        std::os::unix::fs::symlink("sub", path.join("tree/aside")).unwrap();
        std::os::unix::fs::symlink(&path, path.join("tree/away")).unwrap();
        Scratch(path)
    }
}
impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn memory() -> Arc<GuestMemory> {
    GuestMemory::without_vm(8 << 20).unwrap()
}

#[test]
fn a_tree_confines() {
    let s = Scratch::new("confines");
    let t = DirTree::open(&s.0.join("tree"), false, memory()).unwrap();
    assert_eq!(t.open(b"sub/file", false).unwrap().stat().unwrap().size, 8);
    assert_eq!(t.stat(b"").unwrap().mode & 0o170000, 0o040000);
    assert_eq!(t.stat(b"up").unwrap().mode & 0o170000, 0o120000);
    assert_eq!(t.read_link(b"up").unwrap(), b"../secret");
    assert_eq!(t.read_link(b"sub").err(), Some(Errno::EINVAL));
    for path in [&b"../secret"[..], b"sub/../../secret", b"/etc/passwd"] {
        assert_eq!(t.stat(path).err(), Some(Errno::ENOENT), "{}", path.escape_ascii());
    }
    for path in [&b"up"[..], b"aside/file", b"away/secret", b"away"] {
        assert_eq!(t.open(path, false).err(), Some(Errno::ELOOP), "{}", path.escape_ascii());
    }
    assert_eq!(t.open(b"sub", false).err(), Some(Errno::EISDIR));
    assert_eq!(t.open(b"a\0b", false).err(), Some(Errno::EINVAL));
    assert_eq!(t.open(b"sub/file", true).err(), Some(Errno::EROFS));
    assert_eq!(t.create(b"new", HostCreate::File, 0o600).err(), Some(Errno::EROFS));
    assert_eq!(t.remove(b"up", false).err(), Some(Errno::EROFS));
    let mut names: Vec<_> = t.read_dir(b"").unwrap().into_iter().map(|e| (e.name, e.kind)).collect();
    names.sort();
    assert_eq!(names, [(b"aside".to_vec(), 10), (b"away".to_vec(), 10), (b"sub".to_vec(), 4), (b"up".to_vec(), 10)]);
}

#[test]
fn the_kernels_own_file_systems_are_refused() {
    let t = DirTree::open("/".as_ref(), false, memory()).unwrap();
    let mem = format!("proc/{}/mem", std::process::id());
    assert_eq!(t.open(mem.as_bytes(), false).err(), Some(Errno::EACCES));
    assert_eq!(t.stat(b"proc/version").err(), Some(Errno::EACCES));
    assert_eq!(t.read_dir(b"sys/kernel").err(), Some(Errno::EACCES));
    assert!(t.stat(b"etc").is_ok());
    assert!(t.stat(b"proc").is_ok());
    assert!(t.read_dir(b"proc").unwrap().is_empty());
}

#[test]
fn a_writable_tree_changes() {
    let s = Scratch::new("changes");
    let root = s.0.join("tree");
    let m = memory();
    let t = DirTree::open(&root, true, m.clone()).unwrap();
    t.create(b"dir", HostCreate::Directory, 0o751).unwrap();
    t.create(b"dir/f", HostCreate::File, 0o640).unwrap();
    assert_eq!(t.create(b"dir/f", HostCreate::File, 0o640), Err(Errno::EEXIST));
    assert_eq!(t.stat(b"dir/f").unwrap().mode, 0o100640);
    t.create(b"dir/l", HostCreate::Symlink(b"/target"), 0).unwrap();
    assert_eq!(t.read_link(b"dir/l").unwrap(), b"/target");
    t.create(b"dir/p", HostCreate::Special(0o010000), 0o600).unwrap();
    assert_eq!(t.create(b"dir/c", HostCreate::Special(0o020000), 0o600), Err(Errno::EPERM));
    assert_eq!(t.open(b"dir/p", false).err(), Some(Errno::ENXIO));
    let f = t.open(b"dir/f", true).unwrap();
    assert_eq!(f.write(3, b"abc"), Ok(3));
    let frame = m.alloc().unwrap();
    let range = PhysRange { addr: frame, len: 4096 };
    assert_eq!(f.read_phys(1, &[range]), Ok(5));
    let mut buf = [0; 6];
    m.read(frame, &mut buf).unwrap();
    assert_eq!(&buf, b"\0\0abc\0");
    assert_eq!(f.write_phys(100, &[PhysRange { addr: frame, len: 5 }]), Ok(5));
    assert_eq!(f.stat().unwrap().size, 105);
    t.set_attr(b"dir/f", &AttrChange { mode: Some(0o4711), size: Some(2), ..AttrChange::default() }).unwrap();
    let st = t.stat(b"dir/f").unwrap();
    assert_eq!((st.mode & 0o7777, st.size), (0o4711, 2));
    let time = guest_abi::types::Timespec { sec: 1_000_000, nsec: 5 };
    t.set_attr(b"dir/l", &AttrChange { mtime: Some(time), ..AttrChange::default() }).unwrap();
    assert_eq!(t.stat(b"dir/l").unwrap().mtime, time);
    t.link(b"dir/f", b"g").unwrap();
    assert_eq!(t.rename(b"g", b"dir/l", 1), Err(Errno::EEXIST));
    t.rename(b"g", b"dir/h", 0).unwrap();
    assert_eq!(t.stat(b"dir/h").unwrap().nlink, 2);
    assert_eq!(t.create(b"aside/x", HostCreate::File, 0o600), Err(Errno::ENOTDIR));
    assert_eq!(t.create(b"../x", HostCreate::File, 0o600), Err(Errno::ENOENT));
    assert_eq!(t.create(b"..", HostCreate::File, 0o600), Err(Errno::EINVAL));
    assert_eq!(t.remove(b"dir", true), Err(Errno::ENOTEMPTY));
    for name in [&b"f"[..], b"l", b"p", b"h"] {
        t.remove(&[b"dir/", name].concat(), false).unwrap();
    }
    t.remove(b"dir", true).unwrap();
    assert_eq!(t.stat(b"dir").err(), Some(Errno::ENOENT));
    let w = t.open(b"sub/file", true).unwrap().window(0).unwrap();
    m.write(w.base(), b"C").unwrap();
    assert_eq!(fs::read(root.join("sub/file")).unwrap(), b"Contents");
}

fn stream(fd: OwnedFd) -> Arc<Stream> {
    Stream::new(fd, &Reactor::new().unwrap(), memory()).unwrap()
}

#[test]
fn pipes_do_not_block_and_keep_their_flags() {
    let (read, write) = rustix::pipe::pipe().unwrap();
    let shared_read = read.try_clone().unwrap();
    let shared_write = write.try_clone().unwrap();
    let (r, w) = (stream(read), stream(write));
    let mut buf = [0; 100];
    assert_eq!(r.read(&mut buf), Err(Errno::EAGAIN));
    assert_eq!(r.poll() & Events::IN, Events::empty());
    assert_eq!(w.write(b"hello"), Ok(5));
    assert!(r.poll().contains(Events::IN));
    assert_eq!(r.read(&mut buf), Ok(5));
    let big = vec![1; 1 << 20];
    let n = w.write(&big).unwrap();
    assert!(n > 4096 && n < big.len());
    assert_eq!(w.write(&big), Err(Errno::EAGAIN));
    assert_eq!(w.poll() & Events::OUT, Events::empty());
    for fd in [&shared_read, &shared_write] {
        assert!(!rustix::fs::fcntl_getfl(fd).unwrap().contains(OFlags::NONBLOCK));
    }
    drop(shared_write);
    drop(w);
    let mut rest = vec![0; 2 << 20];
    let mut got = 0;
    loop {
        match r.read(&mut rest) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(e) => panic!("{e:?} after {got}"),
        }
    }
    assert_eq!(got, n, "then the end is seen");
    assert_eq!(r.seek(0, 0), Err(Errno::ESPIPE));
    assert!(!r.is_terminal());
    assert_eq!(r.terminal_request(0x5401, &mut [0; 36]), Err(Errno::ENOTTY));
    drop(r);
    drop(shared_read);
}

#[test]
fn a_closed_reader_is_epipe() {
    let (read, write) = rustix::pipe::pipe().unwrap();
    let w = stream(write);
    drop(read);
    assert_eq!(w.write(b"x"), Err(Errno::EPIPE));
}

#[test]
fn sockets_files_and_null() {
    let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
    let s = stream(a.into());
    let mut buf = [0; 16];
    assert_eq!(s.read(&mut buf), Err(Errno::EAGAIN));
    rustix::io::write(&b, b"hi").unwrap();
    assert_eq!(s.read(&mut buf), Ok(2));
    assert_eq!(s.write(b"yo"), Ok(2));
    drop(b);
    assert_eq!(s.write(b"x"), Err(Errno::EPIPE));

    let scratch = Scratch::new("appends");
    let path = scratch.0.join("log");
    let file = fs::File::options().append(true).create(true).open(&path).unwrap();
    let shared = file.try_clone().unwrap();
    let s = stream(file.into());
    s.write(b"one ").unwrap();
    rustix::io::write(shared.as_fd(), b"two ").unwrap();
    s.write(b"three").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"one two three");
    assert_eq!(s.seek(0, 1), Ok(13));

    let s = stream(fs::File::options().read(true).write(true).open("/dev/null").unwrap().into());
    assert_eq!(s.read(&mut buf), Ok(0));
    assert_eq!(s.write(&[0; 4096]), Ok(4096));
}
