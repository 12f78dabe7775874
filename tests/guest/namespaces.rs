//! Namespaces of all kinds as descriptors and links, and the kinds other than PID. Root only.
use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::Case;
use super::pidns::{NEWNS, NEWPID, getpid, sleep_for_ever};
use super::sys::{call, clone, errno, fork, in_child, ok, pipe, read_byte, wait, write_byte};

pub const CASES: &[Case] = &[
    ("ns_links", links),
    ("ns_requests", requests),
    ("ns_unshare_kinds", kinds),
    ("ns_limits", limits),
    ("ns_stacked_mounts", stacked),
];

pub(super) fn unshare(flags: u64) -> Result<i64, i32> {
    call(libc::SYS_unshare, [flags, 0, 0, 0, 0, 0])
}

pub(super) fn setns_call(fd: i32, kind: u64) -> Result<i64, i32> {
    call(libc::SYS_setns, [fd as u64, kind, 0, 0, 0, 0])
}

pub(super) fn open(path: &str) -> OwnedFd {
    let name = CString::new(path).unwrap();
    let fd = unsafe { libc::open(name.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    assert!(fd >= 0, "open {path}: {}", errno());
    unsafe { OwnedFd::from_raw_fd(fd) }
}

pub(super) fn pidfd(pid: i32) -> OwnedFd {
    let fd = call(libc::SYS_pidfd_open, [pid as u64, 0, 0, 0, 0, 0]).unwrap();
    unsafe { OwnedFd::from_raw_fd(fd as i32) }
}

pub(super) fn inode(fd: i32) -> u64 {
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::fstat(fd, &raw mut st) }, 0);
    st.st_ino
}

pub(super) fn link(path: &str) -> String {
    std::fs::read_link(path).unwrap_or_else(|e| panic!("{path}: {e}")).to_str().unwrap().to_owned()
}

pub(super) fn mount(source: &str, target: &str, kind: &str, flags: u64) -> Result<i64, i32> {
    let [source, target, kind] = [source, target, kind].map(|s| CString::new(s).unwrap());
    ok(unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, std::ptr::null()) })
}

const KINDS: [(&str, u64); 8] = [
    ("cgroup", libc::CLONE_NEWCGROUP as u64),
    ("ipc", libc::CLONE_NEWIPC as u64),
    ("mnt", libc::CLONE_NEWNS as u64),
    ("net", libc::CLONE_NEWNET as u64),
    ("pid", NEWPID),
    ("time", 0x80),
    ("user", libc::CLONE_NEWUSER as u64),
    ("uts", libc::CLONE_NEWUTS as u64),
];

fn links() {
    for (name, flag) in KINDS {
        let path = format!("/proc/self/ns/{name}");
        let text = link(&path);
        let number: u64 =
            text.strip_prefix(name).unwrap().strip_prefix(":[").unwrap().strip_suffix(']').unwrap().parse().unwrap();
        let file = open(&path);
        assert_eq!(inode(file.as_raw_fd()), number);
        assert_eq!(std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap().to_str(), Some(&*text));
        assert_eq!(call(libc::SYS_ioctl, [file.as_raw_fd() as u64, 0xb703, 0, 0, 0, 0]), Ok(flag as i64));
        assert_eq!(link(&format!("/proc/{}/ns/{name}", getpid())), text);
    }
    let names: Vec<_> = std::fs::read_dir("/proc/self/ns").unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(names.len() >= 10);
    // A zombie has let go of all but its PID namespace.
    let pid = fork(|| 0);
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOWAIT;
    assert_eq!(unsafe { libc::waitid(libc::P_PID, pid as u32, &raw mut info, flags) }, 0);
    assert_eq!(link(&format!("/proc/{pid}/ns/pid")), link("/proc/self/ns/pid"));
    for name in ["uts", "mnt", "net", "pid_for_children"] {
        let gone = std::fs::read_link(format!("/proc/{pid}/ns/{name}")).unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::ENOENT), "{name}");
    }
    wait(pid);
    // Others' are not to be looked at without the right.
    in_child(|| {
        let parent = unsafe { libc::getppid() };
        unsafe { libc::setuid(12345) };
        let denied = std::fs::read_link(format!("/proc/{parent}/ns/pid")).unwrap_err();
        assert_eq!(denied.raw_os_error(), Some(libc::EACCES));
    });
}

fn request(fd: i32, number: u64, arg: u64) -> Result<i64, i32> {
    call(libc::SYS_ioctl, [fd as u64, number, arg, 0, 0, 0])
}

fn requests() {
    let own = open("/proc/self/ns/pid");
    let user = open("/proc/self/ns/user");
    let (from, to) = pipe();
    let (ready, tell) = pipe();
    let init = clone(NEWPID, || {
        let below = open("/proc/self/ns/pid");
        // What contains it cannot be told inside.
        assert_eq!(request(below.as_raw_fd(), 0xb702, 0), Err(libc::EPERM));
        wait(fork(|| 0));
        fork(sleep_for_ever);
        write_byte(tell);
        read_byte(from);
        0
    })
    .unwrap();
    read_byte(ready);
    let below = open(&format!("/proc/{init}/ns/pid"));
    let fd = below.as_raw_fd();
    assert_ne!(inode(fd), inode(own.as_raw_fd()));
    let parent = request(fd, 0xb702, 0).unwrap() as i32;
    assert_eq!(inode(parent), inode(own.as_raw_fd()));
    let owner = request(fd, 0xb701, 0).unwrap() as i32;
    assert_eq!(inode(owner), inode(user.as_raw_fd()));
    let uts = open("/proc/self/ns/uts");
    assert_eq!(request(uts.as_raw_fd(), 0xb702, 0), Err(libc::EINVAL));
    let mut uid = 7_u32;
    assert_eq!(request(user.as_raw_fd(), 0xb704, (&raw mut uid) as u64), Ok(0));
    assert_eq!(uid, 0);
    assert_eq!(request(fd, 0xb704, (&raw mut uid) as u64), Err(libc::EINVAL));
    // Numbers there and here.
    assert_eq!(request(fd, 0x8004_b706, 1), Ok(init.into()));
    assert_eq!(request(fd, 0x8004_b707, 1), Ok(init.into()));
    assert_eq!(request(fd, 0x8004_b708, init as u64), Ok(1));
    assert_eq!(request(fd, 0x8004_b709, init as u64), Ok(1));
    let third = request(fd, 0x8004_b706, 3).unwrap();
    assert_eq!(request(fd, 0x8004_b708, third as u64), Ok(3));
    assert_eq!(request(fd, 0x8004_b706, 2), Err(libc::ESRCH));
    assert_eq!(request(fd, 0x8004_b708, getpid() as u64), Err(libc::ESRCH));
    assert_eq!(request(uts.as_raw_fd(), 0x8004_b706, 1), Err(libc::EINVAL));
    assert_eq!(request(fd, 0xb7ff, 0), Err(libc::ENOTTY));
    write_byte(to);
    assert_eq!(wait(init), 0);
}

fn kinds() {
    for (name, flag) in KINDS.iter().filter(|(name, _)| !["time", "user", "pid"].contains(name)) {
        in_child(|| {
            let path = format!("/proc/self/ns/{name}");
            let before = link(&path);
            let old = open(&path);
            in_child(|| {
                assert_eq!(unshare(*flag), Ok(0), "{name}");
                assert_ne!(link(&path), before);
                assert_eq!(setns_call(old.as_raw_fd(), *flag), Ok(0));
                assert_eq!(link(&path), before);
            });
            let child = clone(*flag, || i32::from(link(&path) == before)).unwrap();
            assert_eq!(wait(child), 0);
            assert_eq!(link(&path), before);
        });
    }
    // Each holds what is its own.
    in_child(|| {
        let name = || std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let before = name();
        in_child(|| {
            assert_eq!(unshare(libc::CLONE_NEWUTS as u64), Ok(0));
            assert_eq!(name(), before);
            assert_eq!(unsafe { libc::sethostname(c"elsewhere".as_ptr(), 9) }, 0);
            assert_eq!(name(), "elsewhere\n");
        });
        assert_eq!(name(), before);
    });
    in_child(|| {
        let dir = crate::own_path("mnt-ns");
        std::fs::create_dir(&dir).unwrap();
        in_child(|| {
            assert_eq!(unshare(NEWNS), Ok(0));
            assert_eq!(mount("none", "/", "none", libc::MS_REC | libc::MS_PRIVATE), Ok(0));
            assert_eq!(mount("none", &dir, "tmpfs", 0), Ok(0));
            std::fs::write(format!("{dir}/file"), "x").unwrap();
        });
        assert!(!std::fs::exists(format!("{dir}/file")).unwrap());
        std::fs::remove_dir(&dir).unwrap();
    });
    in_child(|| {
        let socket = std::os::unix::net::UnixDatagram::unbound().unwrap();
        drop(socket);
        let bind = || {
            use std::os::linux::net::SocketAddrExt;
            let name = std::os::unix::net::SocketAddr::from_abstract_name(crate::own_path("net-ns")).unwrap();
            std::os::unix::net::UnixDatagram::bind_addr(&name)
        };
        let held = bind().unwrap();
        assert!(bind().is_err());
        assert_eq!(unshare(libc::CLONE_NEWNET as u64), Ok(0));
        drop(bind().unwrap());
        drop(held);
    });
    let both = (libc::CLONE_NEWNS | libc::CLONE_FS) as u64;
    assert_eq!(clone(both, || 0), Err(libc::EINVAL));
    assert_eq!(unshare(1), Err(libc::EINVAL));
    in_child(|| {
        let mnt = open("/proc/self/ns/mnt");
        // Somebody shares the directories.
        std::thread::scope(|s| {
            s.spawn(|| assert_eq!(setns_call(mnt.as_raw_fd(), NEWNS), Err(libc::EINVAL)));
        });
        let user = open("/proc/self/ns/user");
        assert_eq!(setns_call(user.as_raw_fd(), 0), Err(libc::EINVAL));
    });
}

fn limits() {
    let file = "/proc/sys/user/max_pid_namespaces";
    let before = std::fs::read_to_string(file).unwrap();
    assert!(before.trim().parse::<i32>().unwrap() > 32);
    in_child(|| {
        unsafe { libc::setuid(12345) };
        let denied = std::fs::write(file, "1").unwrap_err().raw_os_error();
        assert!(denied == Some(libc::EPERM) || denied == Some(libc::EACCES));
    });
}

/// Many mounts in one place: all are listed, with one path, and the one below the last is seen when that goes.
fn stacked() {
    let dir = super::own_path("stacked");
    in_child(|| {
        assert_eq!(unshare(NEWNS), Ok(0));
        mount("none", "/", "none", libc::MS_REC | libc::MS_PRIVATE).unwrap();
        std::fs::create_dir(&dir).unwrap();
        let count = 200;
        for i in 0..count {
            mount(&format!("layer{i}"), &dir, "tmpfs", 0).unwrap();
            std::fs::write(format!("{dir}/{i}"), b"").unwrap();
        }
        for name in ["mounts", "mountinfo"] {
            let text = std::fs::read_to_string(format!("/proc/self/{name}")).unwrap();
            let lines: Vec<_> = text.lines().filter(|l| l.split(' ').any(|field| field == dir)).collect();
            assert_eq!(lines.len(), count, "{name}");
            assert!((0..count).all(|i| lines[i].contains(&format!("layer{i} "))), "{name}");
        }
        let path = CString::new(dir.as_str()).unwrap();
        for i in (0..count).rev() {
            assert!(std::path::Path::new(&format!("{dir}/{i}")).exists(), "layer {i}");
            assert_eq!(unsafe { libc::umount2(path.as_ptr(), 0) }, 0, "{}", errno());
        }
    });
    std::fs::remove_dir(&dir).unwrap();
}
