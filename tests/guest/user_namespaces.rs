//! User namespaces: maps, names of ids, and capabilities that count in one namespace only. Root only.
use std::fs::{read_to_string, write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use super::Case;
use super::namespaces::{inode, link, mount, open, pidfd, setns_call, unshare};
use super::sys::{call, clone, errno, fork, in_child, ok, pipe, read_byte, wait, write_byte};

/// The cases of this area.
pub const CASES: &[Case] = &[
    ("userns_own_id", own_id),
    ("userns_maps", maps),
    ("userns_bad_maps", bad_maps),
    ("userns_capabilities", capabilities),
    ("userns_files", files),
    ("userns_owners", owners),
    ("userns_setns", setns),
    ("userns_depth", depth),
    ("userns_signals", signals),
    ("userns_exec", exec),
    ("userns_mounts", mounts),
];

const NEWUSER: u64 = libc::CLONE_NEWUSER as u64;
const NEWNS: u64 = libc::CLONE_NEWNS as u64;
const NEWUTS: u64 = libc::CLONE_NEWUTS as u64;
const NEWNET: u64 = libc::CLONE_NEWNET as u64;
const NEWPID: u64 = libc::CLONE_NEWPID as u64;
const NEWIPC: u64 = libc::CLONE_NEWIPC as u64;

fn become_user(id: u32) {
    unsafe {
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setresgid(id, id, id), 0);
        assert_eq!(libc::setresuid(id, id, id), 0);
        // A change of ids takes the right to look at oneself through /proc away.
        assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1), 0);
    }
}

fn ids() -> [u32; 4] {
    unsafe { [libc::getuid(), libc::geteuid(), libc::getgid(), libc::getegid()] }
}

fn put(path: &str, text: &str) -> Result<(), i32> {
    write(path, text).map_err(|e| e.raw_os_error().unwrap_or(0))
}

fn words(text: &str) -> Vec<u64> {
    text.split_whitespace().map(|w| w.parse().unwrap()).collect()
}

fn status_caps(name: &str) -> u64 {
    let text = read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap()
}

/// What `unshare -r` does.
fn as_root_inside(uid: u32) {
    unshare(NEWUSER).unwrap();
    put("/proc/self/setgroups", "deny").unwrap();
    put("/proc/self/uid_map", &format!("0 {uid} 1")).unwrap();
    put("/proc/self/gid_map", &format!("0 {uid} 1")).unwrap();
}

fn own_id() {
    in_child(|| {
        become_user(1234);
        let outside = link("/proc/self/ns/user");
        assert_eq!(status_caps("CapEff:"), 0);
        unshare(NEWUSER).unwrap();
        assert_ne!(link("/proc/self/ns/user"), outside);
        assert_eq!(ids(), [65534; 4]);
        assert_ne!(status_caps("CapEff:"), 0);
        assert_eq!(read_to_string("/proc/self/uid_map").unwrap(), "");
        assert_eq!(read_to_string("/proc/self/setgroups").unwrap(), "allow\n");
        assert_eq!(put("/proc/self/gid_map", "0 1234 1"), Err(libc::EPERM), "setgroups must be denied first");
        put("/proc/self/setgroups", "deny\n").unwrap();
        assert_eq!(put("/proc/self/setgroups", "allow"), Err(libc::EPERM));
        assert_eq!(put("/proc/self/uid_map", "0 1235 1"), Err(libc::EPERM), "not the own id");
        assert_eq!(put("/proc/self/uid_map", "0 1234 2"), Err(libc::EPERM), "more than the own id");
        put("/proc/self/uid_map", "0 1234 1\n").unwrap();
        put("/proc/self/gid_map", "7 1234 1").unwrap();
        assert_eq!(put("/proc/self/uid_map", "0 1234 1"), Err(libc::EPERM), "once only");
        assert_eq!(ids(), [0, 0, 7, 7]);
        assert_eq!(words(&read_to_string("/proc/self/uid_map").unwrap()), [0, 1234, 1]);
        assert_eq!(words(&read_to_string("/proc/self/gid_map").unwrap()), [7, 1234, 1]);
        assert_eq!(ok(unsafe { libc::setgroups(0, std::ptr::null()) }), Err(libc::EPERM));
        assert_eq!(ok(unsafe { libc::setuid(5) }), Err(libc::EINVAL), "an id that means nobody");
        assert_eq!(ok(unsafe { libc::setresuid(0, u32::MAX, 0) }), Ok(0));
        let text = read_to_string("/proc/self/status").unwrap();
        assert!(text.contains("\nUid:\t0\t0\t0\t0\n") && text.contains("\nGid:\t7\t7\t7\t7\n"), "{text}");
        in_child(|| assert_eq!(ids(), [0, 0, 7, 7]));
    });
}

fn maps() {
    // A parent with capabilities gives its child any ids.
    let (r, w) = pipe();
    let (r2, w2) = pipe();
    let child = clone(NEWUSER, || {
        write_byte(w2);
        read_byte(r);
        assert_eq!(ids(), [0; 4]);
        unsafe {
            assert_eq!(libc::setgroups(2, [5_u32, 100].as_ptr()), 0);
            assert_eq!(ok(libc::setgroups(1, [12345_u32].as_ptr())), Err(libc::EINVAL));
            let mut list = [0_u32; 4];
            assert_eq!(libc::getgroups(4, list.as_mut_ptr()), 2);
            assert_eq!(list[..2], [5, 100]);
            assert_eq!(libc::setresuid(100, 101, 102), 0);
        }
        write_byte(w2);
        read_byte(r);
        0
    })
    .unwrap();
    read_byte(r2);
    put(&format!("/proc/{child}/uid_map"), "0 0 1\n100 100000 1000\n5 5000 3").unwrap();
    put(&format!("/proc/{child}/gid_map"), "0 0 200").unwrap();
    let text = read_to_string(format!("/proc/{child}/uid_map")).unwrap();
    assert_eq!(words(&text), [0, 0, 1, 100, 100_000, 1000, 5, 5000, 3]);
    write_byte(w);
    read_byte(r2);
    let text = read_to_string(format!("/proc/{child}/status")).unwrap();
    assert!(text.contains("\nUid:\t100000\t100001\t100002\t100001\n"), "{text}");
    assert!(text.contains("\nGroups:\t5 100 \n"), "{text}");
    write_byte(w);
    assert_eq!(wait(child), 0);
    assert_eq!(words(&read_to_string("/proc/self/uid_map").unwrap()), [0, 0, 4_294_967_295]);
    assert_eq!(put("/proc/self/uid_map", "0 0 1"), Err(libc::EPERM));
}

fn bad_maps() {
    let (r, w) = pipe();
    let child = clone(NEWUSER, || {
        read_byte(r);
        0
    })
    .unwrap();
    let path = format!("/proc/{child}/uid_map");
    for bad in [
        "\n",
        "0",
        "0 0",
        "0 0 0",
        "0 0 1 1",
        "x 0 1",
        "-1 0 1",
        "4294967295 0 1",
        "0 4294967295 1",
        "0 0 4294967295 5",
        "1 0 4294967295",
        "0 0 5\n4 100 1",
        "0 0 5\n5 4 1",
        "0 0 1\n\n1 1 1",
    ] {
        assert_eq!(put(&path, bad), Err(libc::EINVAL), "{bad:?}");
    }
    let lines = |n: u32| (0..n).map(|i| format!("{} {} 1", 2 * i, 2 * i)).collect::<Vec<_>>().join("\n");
    let many = lines(341);
    assert_eq!(put(&path, &many), Err(libc::EINVAL));
    assert_eq!(put(&path, &" ".repeat(5000)), Err(libc::EINVAL));
    assert_eq!(read_to_string(&path).unwrap(), "");
    let most = lines(200);
    put(&path, &most).unwrap();
    assert_eq!(read_to_string(&path).unwrap().lines().count(), 200);
    for bad in ["", "x", "allowed", "deny deny", "denydeny"] {
        let r = put(&format!("/proc/{child}/setgroups"), bad);
        assert!(bad.is_empty() && r.is_ok() || r == Err(libc::EINVAL), "{bad:?}: {r:?}");
    }
    write_byte(w);
    assert_eq!(wait(child), 0);
    assert_eq!(unshare(NEWUSER | libc::CLONE_SIGHAND as u64), Ok(0));
    assert_eq!(clone(NEWUSER | libc::CLONE_FS as u64, || 0), Err(libc::EINVAL));
    let thread = std::thread::spawn(|| unshare(NEWUSER));
    assert_eq!(thread.join().unwrap(), Err(libc::EINVAL));
}

fn hostname(name: &str) -> Result<i64, i32> {
    ok(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) })
}

fn capabilities() {
    in_child(|| {
        become_user(1000);
        assert_eq!(unshare(NEWUTS), Err(libc::EPERM));
        as_root_inside(1000);
        // All capabilities, but over nothing that belongs to the outside.
        assert_eq!(hostname("inside"), Err(libc::EPERM));
        let rlimit = libc::rlimit { rlim_cur: 4096, rlim_max: libc::RLIM_INFINITY };
        let small = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
        assert_eq!(ok(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const small) }), Ok(0));
        assert_eq!(ok(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const rlimit) }), Err(libc::EPERM));
        assert_eq!(ok(unsafe { libc::kill(libc::getppid(), 0) }), Err(libc::EPERM));
        let path = super::own_path("node");
        let name = std::ffi::CString::new(path).unwrap();
        let device = unsafe { libc::mknod(name.as_ptr(), libc::S_IFCHR | 0o600, libc::makedev(1, 3)) };
        assert_eq!(ok(device), Err(libc::EPERM));
        unshare(NEWUTS | NEWIPC | NEWNET | NEWNS).unwrap();
        assert_eq!(hostname("inside"), Ok(0));
        assert_eq!(std::net::TcpListener::bind("127.0.0.1:80").map(|_| ()).map_err(|e| e.raw_os_error()), Ok(()));
        // Identities and capabilities may change inside.
        assert_eq!(ok(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, 21) }), Ok(0));
    });
    // The maker of a namespace is powerful in it from outside, another user is not.
    let (r, w) = pipe();
    let child = clone(NEWUSER | NEWUTS, || {
        read_byte(r);
        0
    })
    .unwrap();
    let uts = open(&format!("/proc/{child}/ns/uts"));
    in_child(|| {
        become_user(1000);
        assert_eq!(setns_call(uts.as_raw_fd(), NEWUTS), Err(libc::EPERM));
        assert_eq!(ok(unsafe { libc::kill(child, 0) }), Err(libc::EPERM));
    });
    in_child(|| {
        setns_call(uts.as_raw_fd(), NEWUTS).unwrap();
        assert_eq!(hostname("other"), Ok(0));
    });
    write_byte(w);
    assert_eq!(wait(child), 0);
}

fn files() {
    let dir = super::own_path("userns");
    std::fs::create_dir(&dir).unwrap();
    let make = |name: &str, uid: u32, gid: u32, mode: u32| {
        let path = format!("{dir}/{name}");
        write(&path, "x").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        chown(&path, Some(uid), Some(gid)).unwrap();
        path
    };
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o777)).unwrap();
    let mine = make("mine", 1000, 1000, 0o000);
    let foreign = make("foreign", 2000, 2000, 0o600);
    let mixed = make("mixed", 1000, 2000, 0o000);
    let readable = make("readable", 2000, 2000, 0o644);
    in_child(|| {
        become_user(1000);
        as_root_inside(1000);
        let owner = |path: &str| std::fs::metadata(path).map(|m| (m.uid(), m.gid())).unwrap();
        assert_eq!(owner(&mine), (0, 0));
        assert_eq!(owner(&foreign), (65534, 65534));
        assert_eq!(owner(&mixed), (0, 65534));
        // Capabilities reach what both owners of which are known here.
        assert!(read_to_string(&mine).is_ok());
        assert!(read_to_string(&foreign).is_err());
        assert!(read_to_string(&mixed).is_err());
        assert!(read_to_string(&readable).is_ok());
        let refused = |r: std::io::Result<()>| r.unwrap_err().raw_os_error().unwrap();
        assert_eq!(refused(chown(&mine, Some(5), None)), libc::EINVAL);
        assert_eq!(refused(chown(&foreign, Some(0), None)), libc::EPERM);
        assert_eq!(refused(std::fs::set_permissions(&foreign, std::fs::Permissions::from_mode(0o644))), libc::EPERM);
        chown(&mixed, None, Some(0)).unwrap();
        assert_eq!(owner(&mixed), (0, 0));
        let new = format!("{dir}/new");
        write(&new, "x").unwrap();
        assert_eq!(owner(&new), (0, 0));
    });
    let m = std::fs::metadata(format!("{dir}/new")).unwrap();
    assert_eq!((m.uid(), m.gid()), (1000, 1000));
    std::fs::remove_dir_all(&dir).unwrap();
}

fn request(fd: i32, number: u64) -> Result<i32, i32> {
    call(libc::SYS_ioctl, [fd as u64, number, 0, 0, 0, 0]).map(|fd| fd as i32)
}

fn owners() {
    const USERNS: u64 = 0xb701;
    const PARENT: u64 = 0xb702;
    const OWNER_UID: u64 = 0xb704;
    let outer = open("/proc/self/ns/user");
    in_child(|| {
        become_user(1000);
        let uts_before = open("/proc/self/ns/uts");
        unshare(NEWUSER | NEWUTS | NEWNET).unwrap();
        let user = open("/proc/self/ns/user");
        for kind in ["uts", "net"] {
            let ns = open(&format!("/proc/self/ns/{kind}"));
            let owner = request(ns.as_raw_fd(), USERNS).unwrap();
            assert_eq!(inode(owner), inode(user.as_raw_fd()), "{kind}");
        }
        assert_eq!(request(uts_before.as_raw_fd(), USERNS), Err(libc::EPERM), "what lies outside is not shown");
        assert_eq!(request(user.as_raw_fd(), PARENT), Err(libc::EPERM));
        let mut uid = 0_u32;
        call(libc::SYS_ioctl, [user.as_raw_fd() as u64, OWNER_UID, &raw mut uid as u64, 0, 0, 0]).unwrap();
        assert_eq!(uid, 65534);
    });
    let (r, w) = pipe();
    let (r2, w2) = pipe();
    let child = fork(|| {
        become_user(1000);
        unshare(NEWUSER | NEWIPC).unwrap();
        write_byte(w2);
        read_byte(r);
        0
    });
    read_byte(r2);
    let user = open(&format!("/proc/{child}/ns/user"));
    let ipc = open(&format!("/proc/{child}/ns/ipc"));
    assert_eq!(inode(request(user.as_raw_fd(), PARENT).unwrap()), inode(outer.as_raw_fd()));
    assert_eq!(inode(request(ipc.as_raw_fd(), USERNS).unwrap()), inode(user.as_raw_fd()));
    assert_eq!(request(ipc.as_raw_fd(), PARENT), Err(libc::EINVAL));
    let mut uid = 0_u32;
    call(libc::SYS_ioctl, [user.as_raw_fd() as u64, OWNER_UID, &raw mut uid as u64, 0, 0, 0]).unwrap();
    assert_eq!(uid, 1000);
    write_byte(w);
    assert_eq!(wait(child), 0);
}

fn setns() {
    let (r, w) = pipe();
    let (r2, w2) = pipe();
    let child = fork(|| {
        become_user(1000);
        as_root_inside(1000);
        unshare(NEWUTS | NEWNS).unwrap();
        write_byte(w2);
        read_byte(r);
        0
    });
    read_byte(r2);
    let user = open(&format!("/proc/{child}/ns/user"));
    let own = open("/proc/self/ns/user");
    assert_eq!(setns_call(own.as_raw_fd(), NEWUSER), Err(libc::EINVAL), "it is in it");
    in_child(|| {
        setns_call(user.as_raw_fd(), NEWUSER).unwrap();
        assert_eq!(ids(), [65534; 4], "root outside is nobody inside");
        assert_ne!(status_caps("CapEff:"), 0);
        assert_eq!(setns_call(own.as_raw_fd(), NEWUSER), Err(libc::EPERM), "there is no way back");
        assert_eq!(ok(unsafe { libc::setresgid(0, 0, 0) }), Ok(0));
        assert_eq!(ok(unsafe { libc::setresuid(0, 0, 0) }), Ok(0));
        assert_eq!(ids(), [0; 4]);
    });
    in_child(|| {
        become_user(1000);
        setns_call(user.as_raw_fd(), NEWUSER).unwrap();
        assert_eq!(ids(), [0; 4]);
    });
    in_child(|| {
        become_user(1001);
        assert_eq!(setns_call(user.as_raw_fd(), NEWUSER), Err(libc::EPERM), "another's");
    });
    in_child(|| {
        become_user(1000);
        let fd = pidfd(child);
        setns_call(fd.as_raw_fd(), NEWUSER | NEWUTS | NEWNS).unwrap();
        assert_eq!(hostname("joined"), Ok(0));
    });
    write_byte(w);
    assert_eq!(wait(child), 0);
}

fn depth() {
    in_child(|| {
        let mut made = 0;
        let last = loop {
            match unshare(NEWUSER) {
                Ok(_) => made += 1,
                Err(e) => break e,
            }
            put("/proc/self/uid_map", "0 0 1").unwrap();
            put("/proc/self/setgroups", "deny").unwrap();
            put("/proc/self/gid_map", "0 0 1").unwrap();
        };
        // The host may be in one itself.
        assert!((20..=33).contains(&made), "{made}");
        assert!([libc::ENOSPC, libc::EUSERS].contains(&last), "{last}");
        assert_eq!(ids(), [0; 4]);
    });
}

fn signals() {
    // The sender's id as the receiver knows it.
    let info = |inside: bool| {
        let set = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigaddset(&raw mut set, libc::SIGUSR1);
            libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            set
        };
        let (r, w) = pipe();
        let child = fork(|| {
            if inside {
                as_root_inside(0);
            }
            write_byte(w);
            let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
            assert_eq!(unsafe { libc::sigwaitinfo(&raw const set, &raw mut info) }, libc::SIGUSR1);
            (unsafe { info.si_uid() } % 251) as i32
        });
        read_byte(r);
        in_child(|| {
            unsafe { assert_eq!(libc::setresuid(1000, 0, 0), 0) };
            assert_eq!(unsafe { libc::kill(child, libc::SIGUSR1) }, 0, "{}", errno());
        });
        libc::WEXITSTATUS(wait(child))
    };
    assert_eq!(info(false), 1000 % 251);
    assert_eq!(info(true), 65534 % 251);
}

fn exec() {
    use std::process::Command;
    let dir = super::own_path("suid");
    std::fs::create_dir(&dir).unwrap();
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    let copy = |name: &str, uid: u32, gid: u32| {
        let path = format!("{dir}/{name}");
        std::fs::copy("/usr/bin/id", &path).unwrap();
        chown(&path, Some(uid), Some(gid)).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o6755)).unwrap();
        path
    };
    let [known, unknown] = [copy("known", 1000, 1000), copy("unknown", 2000, 2000)];
    let id = |program: &str, option: &str| {
        let out = Command::new(program).arg(option).output().unwrap();
        String::from_utf8(out.stdout).unwrap().trim().to_owned()
    };
    in_child(|| {
        become_user(3000);
        assert_eq!(id(&known, "-u"), "1000");
        assert_eq!(id(&unknown, "-u"), "2000");
    });
    let (r, w) = pipe();
    let (r2, w2) = pipe();
    let child = clone(NEWUSER, || {
        write_byte(w2);
        read_byte(r);
        unsafe {
            assert_eq!(libc::setresgid(5, 5, 5), 0);
            assert_eq!(libc::setresuid(5, 5, 5), 0);
        }
        // Nobody inside is the owner; and the mount is the outside's.
        assert_eq!(id(&unknown, "-u"), "5");
        assert_eq!(id("/usr/bin/id", "-u"), "5");
        0
    })
    .unwrap();
    read_byte(r2);
    put(&format!("/proc/{child}/uid_map"), "0 1000 10").unwrap();
    put(&format!("/proc/{child}/gid_map"), "0 1000 10").unwrap();
    write_byte(w);
    assert_eq!(wait(child), 0);
    // Root inside keeps its capabilities over exec, and nobody else has any.
    in_child(|| {
        become_user(1000);
        as_root_inside(1000);
        let text = Command::new("cat").arg("/proc/self/status").output().unwrap().stdout;
        let text = String::from_utf8(text).unwrap();
        assert!(text.lines().any(|l| l.starts_with("CapEff:\t000001ff")), "{text}");
    });
    in_child(|| {
        become_user(1000);
        unshare(NEWUSER).unwrap();
        let text = Command::new("cat").arg("/proc/self/status").output().unwrap().stdout;
        let text = String::from_utf8(text).unwrap();
        assert!(text.contains("CapEff:\t0000000000000000"), "{text}");
    });
    std::fs::remove_dir_all(&dir).unwrap();
}

fn mounts() {
    let dir = super::own_path("mounts");
    std::fs::create_dir(&dir).unwrap();
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o777)).unwrap();
    in_child(|| {
        unshare(NEWNS).unwrap();
        mount("none", "/", "none", libc::MS_REC | libc::MS_PRIVATE).unwrap();
        mount("tmpfs", &dir, "tmpfs", libc::MS_NOSUID | libc::MS_NODEV).unwrap();
        let inner = format!("{dir}/inner");
        std::fs::create_dir(&inner).unwrap();
        std::fs::set_permissions(&inner, std::fs::Permissions::from_mode(0o777)).unwrap();
        become_user(1000);
        assert_eq!(mount("tmpfs", &inner, "tmpfs", 0), Err(libc::EPERM));
        as_root_inside(1000);
        assert_eq!(mount("tmpfs", &inner, "tmpfs", 0), Err(libc::EPERM), "the mounts are the outside's still");
        unshare(NEWNS).unwrap();
        mount("tmpfs", &inner, "tmpfs", 0).unwrap();
        write(format!("{inner}/file"), "x").unwrap();
        assert_eq!(std::fs::metadata(format!("{inner}/file")).unwrap().uid(), 0);
        // What came from outside keeps its place and its restrictions.
        let name = std::ffi::CString::new(dir.clone()).unwrap();
        assert_eq!(ok(unsafe { libc::umount2(name.as_ptr(), libc::MNT_DETACH) }), Err(libc::EINVAL));
        assert_eq!(mount("none", &dir, "none", libc::MS_REMOUNT | libc::MS_BIND), Err(libc::EPERM));
        let more = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_NOSUID | libc::MS_NODEV | libc::MS_RDONLY;
        mount("none", &dir, "none", more).unwrap();
        let name = std::ffi::CString::new(inner.clone()).unwrap();
        assert_eq!(ok(unsafe { libc::umount2(name.as_ptr(), 0) }), Ok(0));
        // proc of a PID namespace of one's own.
        unshare(NEWPID).unwrap();
        in_child(|| {
            mount("proc", "/proc", "proc", 0).unwrap();
            assert_eq!(link("/proc/self"), "1");
        });
    });
    std::fs::remove_dir(&dir).unwrap();
}
