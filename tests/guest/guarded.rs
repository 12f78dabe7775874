//! What one process must not get at: another mount namespace, what /proc shows of a process that may not be looked into, privileges
//! under no_new_privs.
use std::ffi::CString;

use super::Case;
use super::sys::{call, errno, fork, in_child, ok, pipe, read_byte, wait, write_byte};

pub const CASES: &[Case] = &[
    ("guarded_mounts_of_another_namespace", other_mounts),
    ("guarded_kinds_of_mounts", kinds),
    ("guarded_processes_in_proc", processes),
    ("guarded_by_no_new_privs", no_new_privs),
    ("guarded_loopback_requests", loopback),
];

const NOBODY: u32 = 65534;

/// Becomes a user without privileges, whose processes may be looked into.
fn become_nobody() {
    assert_eq!(unsafe { libc::setresgid(NOBODY, NOBODY, NOBODY) }, 0);
    assert_eq!(unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) }, 0);
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) }, 0);
}

fn mount(source: &str, target: &str, kind: &str, flags: u64) -> Result<i64, i32> {
    let [source, target, kind] = [source, target, kind].map(|s| CString::new(s).unwrap());
    ok(unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, std::ptr::null()) })
}

/// A directory that was opened before unshare leads back into the old namespace, where the new root has no power.
fn other_mounts() {
    in_child(|| {
        become_nobody();
        let root = unsafe { libc::open(c"/".as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY) };
        let passwd = unsafe { libc::open(c"/etc/passwd".as_ptr(), libc::O_RDONLY) };
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) }, 0, "{}", errno());
        assert_eq!(unsafe { libc::fchdir(root) }, 0);
        assert_eq!(mount("none", "etc", "tmpfs", 0), Err(libc::EINVAL));
        assert_eq!(mount("/dev/null", &format!("/proc/self/fd/{passwd}"), "none", libc::MS_BIND), Err(libc::EINVAL));
        assert_eq!(mount("etc", "/mnt", "none", libc::MS_BIND), Err(libc::EINVAL));
        assert_eq!(mount("none", ".", "none", libc::MS_REMOUNT | libc::MS_BIND), Err(libc::EINVAL));
        assert_eq!(ok(unsafe { libc::umount2(c"proc".as_ptr(), libc::MNT_DETACH) }), Err(libc::EINVAL));
        assert_eq!(mount("none", "/mnt", "tmpfs", 0), Ok(0));
    });
}

/// File systems that show a namespace are mounted by those only who have power over it.
fn kinds() {
    in_child(|| {
        become_nobody();
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) }, 0, "{}", errno());
        for kind in ["proc", "sysfs", "mqueue", "devtmpfs"] {
            assert_eq!(mount("none", "/mnt", kind, 0), Err(libc::EPERM), "{kind}");
        }
    });
}

/// Whether another process of the same user may open `name` of `pid`.
fn opens(pid: i32, name: &str) -> Result<i64, i32> {
    let path = CString::new(format!("/proc/{pid}/{name}")).unwrap();
    let fd = ok(unsafe { libc::open(path.as_ptr(), libc::O_RDONLY) })?;
    unsafe { libc::close(fd as i32) };
    Ok(0)
}

/// Who has changed its ids, or says so, is not to be looked into by others of the same user.
fn processes() {
    let changed: fn() = || {
        assert_eq!(unsafe { libc::setresgid(NOBODY, NOBODY, NOBODY) }, 0);
        assert_eq!(unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) }, 0);
    };
    let open: fn() = become_nobody;
    let closed: fn() = || {
        become_nobody();
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) }, 0);
    };
    for (prepare, seen) in [(changed, Err(libc::EACCES)), (open, Ok(0)), (closed, Err(libc::EACCES))] {
        let (ready, say) = pipe();
        let (hold, release) = pipe();
        let pid = fork(|| {
            prepare();
            unsafe { libc::close(release) };
            write_byte(say);
            let mut byte = 0_u8;
            unsafe { libc::read(hold, (&raw mut byte).cast(), 1) };
            0
        });
        read_byte(ready);
        in_child(|| {
            become_nobody();
            for name in ["mem", "environ", "maps", "auxv"] {
                assert_eq!(opens(pid, name), seen, "{name}");
            }
        });
        unsafe { libc::close(release) };
        assert_eq!(wait(pid), 0);
        unsafe { (libc::close(ready), libc::close(say), libc::close(hold)) };
    }
}

/// A root without capabilities gets none by exec once it has set no_new_privs.
fn no_new_privs() {
    in_child(|| {
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
        // struct __user_cap_header_struct, version 3, and two of struct __user_cap_data_struct.
        let (header, none) = ([0x2008_0522_u32, 0], [0_u32; 6]);
        assert_eq!(call(libc::SYS_capset, [header.as_ptr() as u64, none.as_ptr() as u64, 0, 0, 0, 0]), Ok(0));
        let script = c"grep -q 'CapPrm:.0000000000000000' /proc/self/status && grep -q 'CapEff:.0000000000000000' /proc/self/status";
        let argv = [c"sh".as_ptr(), c"-c".as_ptr(), script.as_ptr(), std::ptr::null()];
        unsafe { libc::execv(c"/bin/sh".as_ptr(), argv.as_ptr()) };
        panic!("execv: {}", errno());
    });
}

/// Sends one request to the routing netlink; the error number of the acknowledgement.
fn request(kind: u16, flags: u16, body: &[u8]) -> i32 {
    let fd = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_ROUTE) };
    assert!(fd >= 0);
    let mut message = Vec::from((16 + body.len() as u32).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((flags | (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16).to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    let sent = unsafe { libc::send(fd, message.as_ptr().cast(), message.len(), 0) };
    assert_eq!(sent, message.len() as isize, "{}", errno());
    let mut answer = [0_u8; 256];
    let got = unsafe { libc::recv(fd, answer.as_mut_ptr().cast(), answer.len(), 0) };
    assert!(got >= 20, "{got}");
    unsafe { libc::close(fd) };
    assert_eq!(answer[4..6], (libc::NLMSG_ERROR as u16).to_ne_bytes());
    i32::from_ne_bytes(answer[16..20].try_into().unwrap())
}

/// What programs do to a network namespace of their own: the loopback device gets its address and comes up.
fn loopback() {
    in_child(|| {
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
        let up = (libc::IFF_UP as u32).to_ne_bytes();
        let address: Vec<u8> = [
            [libc::AF_INET as u8, 8, 0, 0, 1, 0, 0, 0],
            [8, 0, libc::IFA_LOCAL as u8, 0, 127, 0, 0, 1],
            [8, 0, libc::IFA_ADDRESS as u8, 0, 127, 0, 0, 1],
        ]
        .concat();
        let flags = (libc::NLM_F_CREATE | libc::NLM_F_EXCL) as u16;
        assert_eq!(request(libc::RTM_NEWADDR, flags, &address), 0);
        let link = [[0; 4], 1_i32.to_ne_bytes(), up, up].concat();
        assert_eq!(request(libc::RTM_NEWLINK, 0, &link), 0);
        become_nobody();
        assert_eq!(request(libc::RTM_NEWLINK, 0, &link), -libc::EPERM);
    });
}
