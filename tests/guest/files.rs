//! Files, directories, descriptors, links, locks, /proc and /dev as programs use them.
use std::ffi::CString;
use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use super::Case;
use super::sys::{call, errno, fork, in_child, ok, wait};

pub const CASES: &[Case] = &[
    ("file_read_write", read_write),
    ("file_append", append),
    ("file_sparse", sparse),
    ("file_truncate", truncate),
    ("file_pread_pwrite", positional),
    ("file_readv_writev", vectored),
    ("dir_entries", entries),
    ("dir_10000_entries", many_entries),
    ("dir_errors", dir_errors),
    ("rename_replaces", rename),
    ("link_counts", links),
    ("symlink_loops", symlinks),
    ("unlink_open_file", unlink_open),
    ("open_flags", open_flags),
    ("permissions", permissions),
    ("times", times),
    ("dup_shares_position", dup),
    ("fcntl_flags", fcntl),
    ("posix_locks", locks),
    ("cwd_and_relative", cwd),
    ("proc_self", proc_self),
    ("dev_nodes", dev_nodes),
    ("statx_agrees", statx),
    ("copy_up_keeps_content", copy_up),
    ("sendfile_copies", sendfile),
    ("memfd_seals", memfd),
    ("close_range", close_range),
    ("path_too_long", too_long),
    ("o_path", o_path),
    ("getdents_errors", getdents_errors),
];

fn dir(name: &str) -> String {
    let path = crate::own_path(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir(&path).unwrap();
    path
}

fn c(path: &str) -> CString {
    CString::new(path).unwrap()
}

fn open(path: &str, flags: i32) -> Result<i32, i32> {
    ok(unsafe { libc::open(c(path).as_ptr(), flags, 0o644) }).map(|fd| fd as i32)
}

fn read_write() {
    let d = dir("rw");
    let path = format!("{d}/f");
    let data: Vec<u8> = (0..300_000_u32).map(|i| (i * 7) as u8).collect();
    fs::write(&path, &data).unwrap();
    assert_eq!(fs::read(&path).unwrap(), data);
    assert_eq!(fs::metadata(&path).unwrap().len(), 300_000);
    let fd = open(&path, libc::O_RDONLY).unwrap();
    assert_eq!(ok(unsafe { libc::write(fd, b"x".as_ptr().cast(), 1) } as i64), Err(libc::EBADF));
    assert_eq!(ok(unsafe { libc::read(fd, std::ptr::null_mut(), 0) } as i64), Ok(0));
    assert_eq!(call(libc::SYS_read, [fd as u64, 16, 10, 0, 0, 0]), Err(libc::EFAULT));
    assert_eq!(call(libc::SYS_read, [999, 16, 10, 0, 0, 0]), Err(libc::EBADF));
    fs::remove_dir_all(d).unwrap();
}

fn append() {
    let d = dir("append");
    let path = format!("{d}/f");
    for _ in 0..3 {
        let mut f = fs::OpenOptions::new().append(true).create(true).open(&path).unwrap();
        f.write_all(b"line\n").unwrap();
    }
    assert_eq!(fs::read_to_string(&path).unwrap(), "line\nline\nline\n");
    fs::remove_dir_all(d).unwrap();
}

fn sparse() {
    let d = dir("sparse");
    let mut f = fs::File::create_new(format!("{d}/f")).unwrap();
    f.seek(SeekFrom::Start(1 << 30)).unwrap();
    f.write_all(b"end").unwrap();
    drop(f);
    let mut f = fs::File::open(format!("{d}/f")).unwrap();
    assert_eq!(f.metadata().unwrap().len(), (1 << 30) + 3);
    assert!(f.metadata().unwrap().blocks() < 1000);
    let mut buf = [1_u8; 10];
    f.seek(SeekFrom::Start(12345)).unwrap();
    f.read_exact(&mut buf).unwrap();
    assert_eq!(buf, [0; 10]);
    fs::remove_dir_all(d).unwrap();
}

fn truncate() {
    let d = dir("truncate");
    let path = format!("{d}/f");
    fs::write(&path, [7; 10_000]).unwrap();
    let f = fs::OpenOptions::new().write(true).open(&path).unwrap();
    f.set_len(5000).unwrap();
    f.set_len(9000).unwrap();
    let data = fs::read(&path).unwrap();
    assert!(data[..5000].iter().all(|&b| b == 7) && data[5000..].iter().all(|&b| b == 0));
    assert_eq!(ok(unsafe { libc::truncate(c(&path).as_ptr(), -1) }), Err(libc::EINVAL));
    assert_eq!(ok(unsafe { libc::truncate(c(&d).as_ptr(), 0) }), Err(libc::EISDIR));
    fs::remove_dir_all(d).unwrap();
}

fn positional() {
    let d = dir("positional");
    let fd = open(&format!("{d}/f"), libc::O_RDWR | libc::O_CREAT).unwrap();
    unsafe {
        assert_eq!(libc::pwrite(fd, b"hello".as_ptr().cast(), 5, 100), 5);
        assert_eq!(libc::lseek(fd, 0, libc::SEEK_CUR), 0);
        assert_eq!(libc::lseek(fd, 0, libc::SEEK_END), 105);
        assert_eq!(libc::lseek(fd, -106, libc::SEEK_END), -1);
        assert_eq!(errno(), libc::EINVAL);
        let mut b = [0_u8; 5];
        assert_eq!(libc::pread(fd, b.as_mut_ptr().cast(), 5, 102), 3);
        assert_eq!(&b[..3], b"llo");
        assert_eq!(libc::pread(fd, b.as_mut_ptr().cast(), 5, -1), -1);
        assert_eq!(errno(), libc::EINVAL);
    }
    let mut fds = [0; 2];
    unsafe { libc::pipe(fds.as_mut_ptr()) };
    assert_eq!(ok(unsafe { libc::lseek(fds[0], 0, libc::SEEK_SET) }), Err(libc::ESPIPE));
    fs::remove_dir_all(d).unwrap();
}

fn vectored() {
    let d = dir("vectored");
    let fd = open(&format!("{d}/f"), libc::O_RDWR | libc::O_CREAT).unwrap();
    let parts: [&[u8]; 3] = [b"ab", b"", b"cdef"];
    let iov: Vec<libc::iovec> =
        parts.iter().map(|p| libc::iovec { iov_base: p.as_ptr() as *mut _, iov_len: p.len() }).collect();
    assert_eq!(unsafe { libc::writev(fd, iov.as_ptr(), 3) }, 6);
    unsafe { libc::lseek(fd, 0, libc::SEEK_SET) };
    let (mut a, mut b) = ([0_u8; 1], [0_u8; 9]);
    let iov = [
        libc::iovec { iov_base: a.as_mut_ptr().cast(), iov_len: 1 },
        libc::iovec { iov_base: b.as_mut_ptr().cast(), iov_len: 9 },
    ];
    assert_eq!(unsafe { libc::readv(fd, iov.as_ptr(), 2) }, 6);
    assert_eq!((&a, &b[..5]), (b"a", b"bcdef".as_slice()));
    assert_eq!(ok(unsafe { libc::readv(fd, iov.as_ptr(), 1025) } as i64), Err(libc::EINVAL));
    fs::remove_dir_all(d).unwrap();
}

fn entries() {
    let d = dir("entries");
    for i in 0..100 {
        fs::write(format!("{d}/f{i}"), "").unwrap();
    }
    fs::create_dir(format!("{d}/sub")).unwrap();
    let mut names: Vec<String> =
        fs::read_dir(&d).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names.len(), 101);
    for e in fs::read_dir(&d).unwrap() {
        let e = e.unwrap();
        assert_eq!(e.file_type().unwrap().is_dir(), e.file_name() == "sub");
        fs::remove_file(e.path()).or_else(|_| fs::remove_dir(e.path())).unwrap();
    }
    assert_eq!(fs::read_dir(&d).unwrap().count(), 0);
    fs::remove_dir(d).unwrap();
}

fn many_entries() {
    let d = dir("many");
    for i in 0..10_000 {
        fs::File::create(format!("{d}/{i}")).unwrap();
    }
    assert_eq!(fs::read_dir(&d).unwrap().count(), 10_000);
    fs::remove_dir_all(d).unwrap();
}

fn dir_errors() {
    let d = dir("errors");
    fs::create_dir(format!("{d}/a")).unwrap();
    fs::write(format!("{d}/a/f"), "x").unwrap();
    let code = |r: i32| ok(r).unwrap_err();
    unsafe {
        assert_eq!(code(libc::mkdir(c(&format!("{d}/a")).as_ptr(), 0o755)), libc::EEXIST);
        assert_eq!(code(libc::mkdir(c(&format!("{d}/x/y")).as_ptr(), 0o755)), libc::ENOENT);
        assert_eq!(code(libc::rmdir(c(&format!("{d}/a")).as_ptr())), libc::ENOTEMPTY);
        assert_eq!(code(libc::rmdir(c(&format!("{d}/a/f")).as_ptr())), libc::ENOTDIR);
        assert_eq!(code(libc::unlink(c(&format!("{d}/a")).as_ptr())), libc::EISDIR);
        assert_eq!(code(libc::rmdir(c(&format!("{d}/a/.")).as_ptr())), libc::EINVAL);
        assert_eq!(code(libc::mkdir(c(&format!("{d}/a/f/g")).as_ptr(), 0o755)), libc::ENOTDIR);
        assert_eq!(code(libc::open(c(&format!("{d}/a")).as_ptr(), libc::O_WRONLY)), libc::EISDIR);
        assert_eq!(code(libc::open(c("").as_ptr(), 0)), libc::ENOENT);
        assert_eq!(code(libc::open(c(&format!("{d}/a/f/")).as_ptr(), 0)), libc::ENOTDIR);
    }
    fs::remove_dir_all(d).unwrap();
}

fn rename() {
    let d = dir("rename");
    let p = |n: &str| format!("{d}/{n}");
    fs::write(p("a"), "a").unwrap();
    fs::write(p("b"), "b").unwrap();
    fs::rename(p("a"), p("b")).unwrap();
    assert_eq!(fs::read_to_string(p("b")).unwrap(), "a");
    assert!(fs::metadata(p("a")).is_err());
    fs::create_dir(p("d")).unwrap();
    fs::create_dir(p("d/e")).unwrap();
    let r = |a: &str, b: &str| ok(unsafe { libc::rename(c(&p(a)).as_ptr(), c(&p(b)).as_ptr()) });
    assert_eq!(r("d", "d/e/f"), Err(libc::EINVAL));
    assert_eq!(r("b", "d"), Err(libc::EISDIR));
    assert_eq!(r("d", "b"), Err(libc::ENOTDIR));
    assert_eq!(r("none", "x"), Err(libc::ENOENT));
    fs::create_dir(p("empty")).unwrap();
    assert_eq!(r("d", "empty"), Ok(0));
    assert!(fs::metadata(p("empty/e")).unwrap().is_dir());
    fs::write(p("c"), "c").unwrap();
    let r2 = |a: &str, b: &str, flags: u32| {
        ok(unsafe { libc::syscall(libc::SYS_renameat2, -100, c(&p(a)).as_ptr(), -100, c(&p(b)).as_ptr(), flags) })
    };
    assert_eq!(r2("b", "c", 1), Err(libc::EEXIST));
    assert_eq!(r2("b", "c", 2), Ok(0));
    assert_eq!((fs::read_to_string(p("b")).unwrap(), fs::read_to_string(p("c")).unwrap()), ("c".into(), "a".into()));
    fs::remove_dir_all(d).unwrap();
}

fn links() {
    let d = dir("links");
    let p = |n: &str| format!("{d}/{n}");
    fs::write(p("a"), "1").unwrap();
    fs::hard_link(p("a"), p("b")).unwrap();
    let (a, b) = (fs::metadata(p("a")).unwrap(), fs::metadata(p("b")).unwrap());
    assert_eq!((a.ino(), a.nlink()), (b.ino(), 2));
    fs::write(p("b"), "22").unwrap();
    assert_eq!(fs::read_to_string(p("a")).unwrap(), "22");
    fs::remove_file(p("a")).unwrap();
    assert_eq!(fs::metadata(p("b")).unwrap().nlink(), 1);
    fs::remove_dir_all(d).unwrap();
}

fn symlinks() {
    let d = dir("symlinks");
    let p = |n: &str| format!("{d}/{n}");
    symlink("loop", p("loop")).unwrap();
    assert_eq!(open(&p("loop"), 0), Err(libc::ELOOP));
    symlink("target", p("dangling")).unwrap();
    assert_eq!(open(&p("dangling"), 0), Err(libc::ENOENT));
    assert_eq!(open(&p("dangling"), libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY), Err(libc::EEXIST));
    assert!(open(&p("dangling"), libc::O_CREAT | libc::O_WRONLY).is_ok());
    assert!(fs::metadata(p("target")).is_ok());
    assert_eq!(open(&p("dangling"), libc::O_NOFOLLOW), Err(libc::ELOOP));
    assert_eq!(fs::read_link(p("dangling")).unwrap().to_str(), Some("target"));
    symlink(".", p("here")).unwrap();
    assert!(fs::metadata(p("here/here/here/target")).is_ok());
    fs::remove_dir_all(d).unwrap();
}

fn unlink_open() {
    let d = dir("unlink");
    let path = format!("{d}/f");
    let mut f = fs::OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    f.write_all(b"still here").unwrap();
    fs::remove_file(&path).unwrap();
    f.rewind().unwrap();
    let mut s = String::new();
    f.read_to_string(&mut s).unwrap();
    assert_eq!(s, "still here");
    assert_eq!(f.metadata().unwrap().nlink(), 0);
    fs::remove_dir(d).unwrap();
}

fn open_flags() {
    let d = dir("flags");
    let p = format!("{d}/f");
    assert_eq!(open(&p, libc::O_RDONLY), Err(libc::ENOENT));
    fs::write(&p, "content").unwrap();
    assert_eq!(open(&p, libc::O_CREAT | libc::O_EXCL | libc::O_RDWR), Err(libc::EEXIST));
    assert_eq!(open(&p, libc::O_DIRECTORY), Err(libc::ENOTDIR));
    open(&p, libc::O_TRUNC | libc::O_WRONLY).unwrap();
    assert_eq!(fs::metadata(&p).unwrap().len(), 0);
    unsafe { libc::umask(0o027) };
    let fd = ok(unsafe { libc::open(c(&format!("{d}/g")).as_ptr(), libc::O_CREAT | libc::O_RDONLY, 0o777) });
    assert!(fd.is_ok());
    assert_eq!(fs::metadata(format!("{d}/g")).unwrap().mode() & 0o777, 0o750);
    let fd = open(&d, libc::O_TMPFILE | libc::O_RDWR).unwrap();
    assert_eq!(unsafe { libc::write(fd, b"abc".as_ptr().cast(), 3) }, 3);
    fs::remove_dir_all(d).unwrap();
}

fn permissions() {
    let d = dir("permissions");
    let p = format!("{d}/f");
    fs::write(&p, "x").unwrap();
    fs::set_permissions(&p, fs::Permissions::from_mode(0o4711)).unwrap();
    assert_eq!(fs::metadata(&p).unwrap().mode() & 0o7777, 0o4711);
    if unsafe { libc::getuid() } == 0 {
        fs::set_permissions(&d, fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(&p, fs::Permissions::from_mode(0o600)).unwrap();
        in_child(|| {
            assert_eq!(unsafe { libc::setresuid(1000, 1000, 1000) }, 0);
            assert_eq!(open(&p, libc::O_RDONLY), Err(libc::EACCES));
            assert_eq!(ok(unsafe { libc::access(c(&p).as_ptr(), libc::R_OK) }), Err(libc::EACCES));
            assert_eq!(open(&format!("{d}/new"), libc::O_CREAT | libc::O_WRONLY), Err(libc::EACCES));
            assert_eq!(ok(unsafe { libc::chmod(c(&p).as_ptr(), 0o777) }), Err(libc::EPERM));
            assert_eq!(ok(unsafe { libc::unlink(c(&p).as_ptr()) }), Err(libc::EACCES));
            assert_eq!(ok(unsafe { libc::setuid(0) }), Err(libc::EPERM));
        });
        assert_eq!(unsafe { libc::chown(c(&p).as_ptr(), 7, 8) }, 0);
        let m = fs::metadata(&p).unwrap();
        assert_eq!((m.uid(), m.gid()), (7, 8));
    }
    fs::remove_dir_all(d).unwrap();
}

fn times() {
    let d = dir("times");
    let p = format!("{d}/f");
    fs::write(&p, "x").unwrap();
    let t = [libc::timespec { tv_sec: 1000, tv_nsec: 5 }, libc::timespec { tv_sec: 2000, tv_nsec: 7 }];
    assert_eq!(unsafe { libc::utimensat(libc::AT_FDCWD, c(&p).as_ptr(), t.as_ptr(), 0) }, 0);
    let m = fs::metadata(&p).unwrap();
    assert_eq!((m.atime(), m.atime_nsec(), m.mtime(), m.mtime_nsec()), (1000, 5, 2000, 7));
    fs::write(&p, "y").unwrap();
    assert!(fs::metadata(&p).unwrap().mtime() > 1_700_000_000);
    fs::remove_dir_all(d).unwrap();
}

fn dup() {
    let d = dir("dup");
    let fd = open(&format!("{d}/f"), libc::O_RDWR | libc::O_CREAT).unwrap();
    let other = unsafe { libc::dup(fd) };
    unsafe { libc::write(fd, b"12345".as_ptr().cast(), 5) };
    assert_eq!(unsafe { libc::lseek(other, 0, libc::SEEK_CUR) }, 5);
    in_child(|| unsafe {
        libc::lseek(fd, 2, libc::SEEK_SET);
    });
    assert_eq!(unsafe { libc::lseek(other, 0, libc::SEEK_CUR) }, 2);
    assert_eq!(unsafe { libc::dup2(fd, 77) }, 77);
    assert_eq!(ok(unsafe { libc::dup3(fd, fd, 0) }), Err(libc::EINVAL));
    assert_eq!(ok(unsafe { libc::dup2(1000, 5) }), Err(libc::EBADF));
    unsafe { libc::close(fd) };
    assert_eq!(ok(unsafe { libc::close(fd) }), Err(libc::EBADF));
    assert_eq!(unsafe { libc::fcntl(77, libc::F_DUPFD, 0) }, fd, "the lowest free number");
    fs::remove_dir_all(d).unwrap();
}

fn fcntl() {
    let mut fds = [0; 2];
    assert_eq!(unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    let get = |cmd| unsafe { libc::fcntl(fds[0], cmd) };
    assert_eq!(get(libc::F_GETFD), libc::FD_CLOEXEC);
    assert_eq!(get(libc::F_GETFL), libc::O_RDONLY);
    assert_eq!(unsafe { libc::fcntl(fds[0], libc::F_SETFL, libc::O_NONBLOCK) }, 0);
    assert_eq!(get(libc::F_GETFL), libc::O_NONBLOCK);
    let mut b = [0_u8];
    assert_eq!(ok(unsafe { libc::read(fds[0], b.as_mut_ptr().cast(), 1) } as i64), Err(libc::EAGAIN));
    assert_eq!(unsafe { libc::fcntl(fds[0], libc::F_SETFD, 0) }, 0);
    assert_eq!(get(libc::F_GETFD), 0);
    assert_eq!(ok(unsafe { libc::fcntl(fds[0], 9999) }), Err(libc::EINVAL));
    let high = unsafe { libc::fcntl(fds[0], libc::F_DUPFD_CLOEXEC, 100) };
    assert_eq!(high, 100);
}

fn locks() {
    let d = dir("locks");
    let p = format!("{d}/f");
    let fd = open(&p, libc::O_RDWR | libc::O_CREAT).unwrap();
    let lock = |fd: i32, kind: i32, start: i64, len: i64, cmd: i32| {
        let mut l: libc::flock = unsafe { std::mem::zeroed() };
        l.l_type = kind as i16;
        l.l_start = start;
        l.l_len = len;
        ok(unsafe { libc::fcntl(fd, cmd, &raw mut l) }).map(|_| l)
    };
    assert!(lock(fd, libc::F_WRLCK, 10, 10, libc::F_SETLK).is_ok());
    let me = unsafe { libc::getpid() };
    in_child(|| {
        assert_eq!(lock(fd, libc::F_WRLCK, 15, 1, libc::F_SETLK).err(), Some(libc::EAGAIN));
        assert!(lock(fd, libc::F_WRLCK, 20, 1, libc::F_SETLK).is_ok());
        let l = lock(fd, libc::F_WRLCK, 0, 0, libc::F_GETLK).unwrap();
        assert_eq!((i32::from(l.l_type), l.l_start, l.l_len, l.l_pid), (libc::F_WRLCK, 10, 10, me));
    });
    let pid = fork(|| {
        assert!(lock(fd, libc::F_WRLCK, 10, 1, libc::F_SETLKW).is_ok());
        0
    });
    unsafe { libc::usleep(20_000) };
    assert!(lock(fd, libc::F_UNLCK, 0, 0, libc::F_SETLK).is_ok());
    assert_eq!(wait(pid), 0);
    assert_eq!(unsafe { libc::flock(fd, libc::LOCK_EX) }, 0);
    let other = open(&p, libc::O_RDWR).unwrap();
    assert_eq!(ok(unsafe { libc::flock(other, libc::LOCK_EX | libc::LOCK_NB) }), Err(libc::EAGAIN));
    unsafe { libc::flock(fd, libc::LOCK_UN) };
    assert_eq!(unsafe { libc::flock(other, libc::LOCK_EX | libc::LOCK_NB) }, 0);
    fs::remove_dir_all(d).unwrap();
}

fn cwd() {
    let d = dir("cwd");
    fs::create_dir(format!("{d}/a")).unwrap();
    std::env::set_current_dir(format!("{d}/a")).unwrap();
    assert_eq!(std::env::current_dir().unwrap().to_str().unwrap(), format!("{d}/a"));
    fs::write("x", "1").unwrap();
    assert!(fs::metadata(format!("{d}/a/x")).is_ok());
    assert!(fs::metadata("../a/x").is_ok());
    fs::rename(format!("{d}/a"), format!("{d}/b")).unwrap();
    assert_eq!(std::env::current_dir().unwrap().to_str().unwrap(), format!("{d}/b"));
    assert_eq!(ok(unsafe { libc::chdir(c("x").as_ptr()) }), Err(libc::ENOTDIR));
    let fd = open(&d, libc::O_DIRECTORY).unwrap();
    assert_eq!(unsafe { libc::fchdir(fd) }, 0);
    assert!(fs::metadata("b/x").is_ok());
    fs::remove_dir_all(d).unwrap();
}

fn proc_self() {
    let me = unsafe { libc::getpid() };
    assert_eq!(fs::read_link("/proc/self").unwrap().to_str().unwrap(), me.to_string());
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    assert!(stat.starts_with(&format!("{me} (guest) R ")), "{stat}");
    assert_eq!(stat.split_whitespace().count(), 52);
    let status = fs::read_to_string("/proc/self/status").unwrap();
    for key in ["Name:\tguest\n", "Threads:\t1\n", "VmRSS:", "SigBlk:", "Cpus_allowed:", "NSpid:"] {
        assert!(status.contains(key), "{key} in {status}");
    }
    let cmdline = fs::read("/proc/self/cmdline").unwrap();
    assert!(cmdline.ends_with(b"\0proc_self\0"));
    let exe = fs::read_link("/proc/self/exe").unwrap();
    assert_eq!(exe, std::env::current_exe().unwrap());
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    for part in ["[stack]", "[heap]", "[vdso]", "guest\n", "r-xp"] {
        assert!(maps.contains(part), "{part} in {maps}");
    }
    let fd = fs::File::open("/dev/null").unwrap();
    let link = fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd))).unwrap();
    assert_eq!(link.to_str(), Some("/dev/null"));
    assert!(fs::read_dir("/proc").unwrap().any(|e| e.unwrap().file_name().to_str() == Some(&me.to_string())));
    assert!(fs::read_to_string("/proc/meminfo").unwrap().starts_with("MemTotal:"));
    assert!(fs::read_to_string("/proc/cpuinfo").unwrap().contains("processor\t: 0"));
    assert!(fs::read_to_string("/proc/mounts").unwrap().contains(" /proc proc "));
}

fn dev_nodes() {
    let mut b = [1_u8; 64];
    fs::File::open("/dev/zero").unwrap().read_exact(&mut b).unwrap();
    assert_eq!(b, [0; 64]);
    fs::File::open("/dev/urandom").unwrap().read_exact(&mut b).unwrap();
    assert_ne!(b, [0; 64]);
    assert_eq!(fs::read("/dev/null").unwrap(), b"");
    fs::write("/dev/null", "x").unwrap();
    assert_eq!(fs::write("/dev/full", "x").unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    let m = fs::metadata("/dev/null").unwrap();
    assert_eq!((m.mode() & libc::S_IFMT, m.rdev()), (libc::S_IFCHR, 0x103));
}

fn statx() {
    let mut x: libc::statx = unsafe { std::mem::zeroed() };
    assert_eq!(
        unsafe { libc::statx(libc::AT_FDCWD, c("/bin/sh").as_ptr(), 0, libc::STATX_BASIC_STATS, &raw mut x) },
        0
    );
    let m = fs::metadata("/bin/sh").unwrap();
    assert_eq!(
        (x.stx_ino, x.stx_size, u32::from(x.stx_mode), x.stx_nlink),
        (m.ino(), m.len(), m.mode(), m.nlink() as u32)
    );
    assert_eq!(ok(unsafe { libc::statx(-1, c("x").as_ptr(), 0, 0, &raw mut x) }), Err(libc::EBADF));
}

fn copy_up() {
    // A file that lies in the root file system can be changed by somebody allowed to, and reads back.
    let path = &crate::own_path("copy-up");
    fs::copy("/etc/passwd", path).unwrap();
    let before = fs::read(path).unwrap();
    let mut f = fs::OpenOptions::new().append(true).open(path).unwrap();
    f.write_all(b"more").unwrap();
    let after = fs::read(path).unwrap();
    assert_eq!(&after[..before.len()], &before);
    assert_eq!(&after[before.len()..], b"more");
    fs::remove_file(path).unwrap();
    assert!(fs::metadata(path).is_err());
}

fn sendfile() {
    let d = dir("sendfile");
    fs::write(format!("{d}/a"), vec![9; 100_000]).unwrap();
    let a = open(&format!("{d}/a"), libc::O_RDONLY).unwrap();
    let b = open(&format!("{d}/b"), libc::O_WRONLY | libc::O_CREAT).unwrap();
    let mut done = 0;
    while done < 100_000 {
        done += ok(unsafe { libc::sendfile(b, a, std::ptr::null_mut(), 100_000) } as i64).unwrap();
    }
    assert_eq!(fs::read(format!("{d}/b")).unwrap(), vec![9; 100_000]);
    fs::remove_dir_all(d).unwrap();
}

fn memfd() {
    let fd = unsafe { libc::memfd_create(c("x").as_ptr(), libc::MFD_ALLOW_SEALING) };
    assert!(fd >= 0);
    assert_eq!(unsafe { libc::write(fd, b"data".as_ptr().cast(), 4) }, 4);
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_WRITE | libc::F_SEAL_GROW) }, 0);
    assert_eq!(ok(unsafe { libc::write(fd, b"more".as_ptr().cast(), 4) } as i64), Err(libc::EPERM));
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_GET_SEALS) }, libc::F_SEAL_WRITE | libc::F_SEAL_GROW);
}

fn close_range() {
    for _ in 0..20 {
        unsafe { libc::dup(1) };
    }
    assert_eq!(call(libc::SYS_close_range, [3, u64::from(u32::MAX), 0, 0, 0, 0]), Ok(0));
    assert_eq!(unsafe { libc::dup(1) }, 3);
    assert_eq!(call(libc::SYS_close_range, [5, 4, 0, 0, 0, 0]), Err(libc::EINVAL));
}

fn too_long() {
    let name = "n".repeat(256);
    assert_eq!(open(&format!("/tmp/{name}"), libc::O_CREAT | libc::O_WRONLY), Err(libc::ENAMETOOLONG));
    assert_eq!(open(&"/x".repeat(2100), 0), Err(libc::ENAMETOOLONG));
}

fn o_path() {
    let fd = open("/etc/passwd", libc::O_PATH).unwrap();
    let mut b = [0_u8; 4];
    assert_eq!(ok(unsafe { libc::read(fd, b.as_mut_ptr().cast(), 4) } as i64), Err(libc::EBADF));
    let again = open(&format!("/proc/self/fd/{fd}"), libc::O_RDONLY).unwrap();
    assert_eq!(unsafe { libc::read(again, b.as_mut_ptr().cast(), 4) }, 4);
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::fstat(fd, &raw mut st) }, 0);
}

fn getdents_errors() {
    let fd = open("/etc/passwd", 0).unwrap();
    let mut buf = [0_u8; 512];
    assert_eq!(call(libc::SYS_getdents64, [fd as u64, buf.as_mut_ptr() as u64, 512, 0, 0, 0]), Err(libc::ENOTDIR));
    let fd = open("/etc", libc::O_DIRECTORY).unwrap();
    assert_eq!(call(libc::SYS_getdents64, [fd as u64, buf.as_mut_ptr() as u64, 5, 0, 0, 0]), Err(libc::EINVAL));
    assert_eq!(call(libc::SYS_getdents64, [fd as u64, 16, 512, 0, 0, 0]), Err(libc::EFAULT));
}
