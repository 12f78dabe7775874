//! Clones that fail half-way: Linux's error, and nothing of the task is left: no number, no child, no descriptor, no thread.
use super::Case;
use super::sys::{call, in_child, map, ok, wait};

pub const CASES: &[Case] = &[
    ("clone_bad_pointers", bad_pointers),
    ("clone_at_the_process_limit", process_limit),
    ("clone_bad_combinations", combinations),
    ("clone3_sizes", sizes),
    ("clone_without_descriptors", no_descriptors),
];

/// An address that nothing is mapped at.
const NOWHERE: u64 = 16;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

fn forking() -> CloneArgs {
    CloneArgs { exit_signal: libc::SIGCHLD as u64, ..CloneArgs::default() }
}

/// clone3; a child ends at once.
fn clone3(args: &CloneArgs) -> Result<i32, i32> {
    let r = call(libc::SYS_clone3, [std::ptr::from_ref(args) as u64, size_of::<CloneArgs>() as u64, 0, 0, 0, 0])?;
    if r == 0 {
        unsafe { libc::_exit(0) }
    }
    Ok(r as i32)
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Asserts that there is no child, one thread, and as many descriptors as before.
fn nothing_left(descriptors_before: usize) {
    assert_eq!(ok(unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::__WALL) }), Err(libc::ECHILD));
    assert_eq!(std::fs::read_dir("/proc/self/task").unwrap().count(), 1);
    assert_eq!(descriptors(), descriptors_before);
}

fn bad_pointers() {
    in_child(|| {
        let before = descriptors();
        // The descriptor is made before the number is told, and taken back.
        let args = CloneArgs { flags: libc::CLONE_PIDFD as u64, pidfd: NOWHERE, ..forking() };
        for _ in 0..20 {
            assert_eq!(clone3(&args), Err(libc::EFAULT));
        }
        let args = CloneArgs { set_tid: NOWHERE, set_tid_size: 1, ..forking() };
        assert_eq!(clone3(&args), Err(libc::EFAULT));
        nothing_left(before);
        // A number that cannot be told is no failure.
        let flags = (libc::CLONE_PARENT_SETTID | libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID) as u64;
        let pid = clone3(&CloneArgs { flags, parent_tid: NOWHERE, child_tid: NOWHERE, ..forking() }).unwrap();
        assert_eq!(wait(pid), 0);
        let tls = CloneArgs { flags: libc::CLONE_SETTLS as u64, tls: 1 << 63, ..forking() };
        assert_eq!(clone3(&tls), Err(libc::EPERM));
        nothing_left(before);
    });
}

fn process_limit() {
    in_child(|| {
        // A user of whom nobody else is.
        let user = 0x1234_0000 | std::process::id() & 0xffff;
        assert_eq!(unsafe { libc::setresuid(user, user, user) }, 0);
        let four = libc::rlimit { rlim_cur: 4, rlim_max: 4 };
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NPROC, &raw const four) }, 0);
        for _ in 0..3 {
            let (hold, release) = super::sys::pipe();
            let child = || {
                super::sys::fork(move || {
                    unsafe { libc::close(release) };
                    let mut byte = 0_u8;
                    unsafe { libc::read(hold, (&raw mut byte).cast(), 1) };
                    0
                })
            };
            let children: Vec<i32> = (0..3).map(|_| child()).collect();
            for _ in 0..10 {
                assert_eq!(clone3(&forking()), Err(libc::EAGAIN));
            }
            assert!(std::thread::Builder::new().spawn(|| ()).is_err(), "threads count");
            unsafe { (libc::close(release), libc::close(hold)) };
            children.into_iter().for_each(|pid| assert_eq!(wait(pid), 0));
        }
        assert_eq!(ok(unsafe { libc::waitpid(-1, std::ptr::null_mut(), 0) }), Err(libc::ECHILD));
    });
}

fn combinations() {
    in_child(|| {
        let before = descriptors();
        let (vm, sighand, thread) = (libc::CLONE_VM as u64, libc::CLONE_SIGHAND as u64, libc::CLONE_THREAD as u64);
        let newpid = libc::CLONE_NEWPID as u64;
        let all = vm | sighand | thread;
        let invalid = [
            thread,
            sighand,
            thread | vm,
            all | newpid,
            libc::CLONE_FS as u64 | libc::CLONE_NEWNS as u64,
            libc::CLONE_PARENT as u64 | libc::CLONE_THREAD as u64 | vm,
            1 << 40,
        ];
        for flags in invalid {
            let exit_signal = if flags & thread == 0 { libc::SIGCHLD as u64 } else { 0 };
            let r = clone3(&CloneArgs { flags, exit_signal, ..forking() });
            assert_eq!(r, Err(libc::EINVAL), "{flags:#x}");
        }
        // A thread gives no signal at its end; a signal must be one; a stack is whole or not there.
        assert_eq!(clone3(&CloneArgs { flags: all, ..forking() }), Err(libc::EINVAL));
        assert_eq!(clone3(&CloneArgs { exit_signal: 65, ..forking() }), Err(libc::EINVAL));
        assert_eq!(clone3(&CloneArgs { stack_size: 4096, ..forking() }), Err(libc::EINVAL));
        assert_eq!(clone3(&CloneArgs { stack: map(4096, 3) as u64, ..forking() }), Err(libc::EINVAL));
        // Where descriptors and a detached thread exclude each other.
        let pidfd = (libc::CLONE_PIDFD | libc::CLONE_DETACHED) as u64;
        assert_eq!(clone3(&CloneArgs { flags: pidfd, ..forking() }), Err(libc::EINVAL));
        // clone takes CLONE_PIDFD and CLONE_PARENT_SETTID in one pointer.
        let both = (libc::CLONE_PIDFD | libc::CLONE_PARENT_SETTID | libc::SIGCHLD) as u64;
        assert_eq!(call(libc::SYS_clone, [both, 0, 0, 0, 0, 0]), Err(libc::EINVAL));
        // A cgroup's descriptor that is none.
        let into = CloneArgs { flags: 0x2_0000_0000, cgroup: u64::MAX, ..forking() };
        assert!(matches!(clone3(&into), Err(libc::EBADF | libc::EINVAL)));
        // After unshare of the PID namespace there are no threads.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWPID) }, 0);
        let in_one =
            CloneArgs { flags: all, exit_signal: 0, stack: map(4096, 3) as u64, stack_size: 4096, ..forking() };
        assert_eq!(clone3(&in_one), Err(libc::EINVAL));
        assert_eq!(ok(unsafe { libc::unshare(libc::CLONE_NEWPID) }), Err(libc::EINVAL));
        nothing_left(before);
    });
}

fn sizes() {
    in_child(|| {
        let page = map(8192, 3);
        assert_eq!(unsafe { libc::mprotect(page.add(4096).cast(), 4096, 0) }, 0);
        let at = |size: usize| (page as usize + 4096 - size) as u64;
        for size in [0, 1, 63] {
            assert_eq!(call(libc::SYS_clone3, [at(size), size as u64, 0, 0, 0, 0]), Err(libc::EINVAL), "{size}");
        }
        assert_eq!(call(libc::SYS_clone3, [at(64), 88, 0, 0, 0, 0]), Err(libc::EFAULT));
        assert_eq!(call(libc::SYS_clone3, [page as u64, 4097, 0, 0, 0, 0]), Err(libc::E2BIG));
        // Longer than known is well while the rest is zero.
        let long = [0_u64, 0, 0, 0, libc::SIGCHLD as u64, 0, 0, 0, 0, 0, 0, 0, 0];
        let pid = call(libc::SYS_clone3, [long.as_ptr() as u64, size_of_val(&long) as u64, 0, 0, 0, 0]).unwrap();
        if pid == 0 {
            unsafe { libc::_exit(0) }
        }
        assert_eq!(wait(pid as i32), 0);
        let unknown = [0_u64, 0, 0, 0, libc::SIGCHLD as u64, 0, 0, 0, 0, 0, 0, 0, 1];
        let r = call(libc::SYS_clone3, [unknown.as_ptr() as u64, size_of_val(&unknown) as u64, 0, 0, 0, 0]);
        assert_eq!(r, Err(libc::E2BIG));
        nothing_left(descriptors());
    });
}

fn no_descriptors() {
    in_child(|| {
        let before = descriptors();
        let mut word = -1_i32;
        let args = CloneArgs { flags: libc::CLONE_PIDFD as u64, pidfd: (&raw mut word) as u64, ..forking() };
        let mut limit: libc::rlimit = unsafe { std::mem::zeroed() };
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
        let none = libc::rlimit { rlim_cur: 3, ..limit };
        // Nothing above standard error is free for the new one.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) }, 0);
        for _ in 0..10 {
            assert_eq!(clone3(&args), Err(libc::EMFILE));
        }
        assert_eq!(word, -1);
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
        nothing_left(before);
    });
}
