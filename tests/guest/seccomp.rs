//! seccomp(2): filters, their answers, and who may install them.
use crate::Case;
use crate::sys::{call, errno, fork, handle, killed_by, wait};

/// The cases of this area.
pub const CASES: &[Case] = &[
    ("seccomp_errno", answers_errno),
    ("seccomp_gravest_counts", gravest_counts),
    ("seccomp_trap", trap),
    ("seccomp_kill", kill),
    ("seccomp_strict", strict),
    ("seccomp_threads", threads),
    ("seccomp_trace", trace),
    ("seccomp_refusals", refusals),
];

type Op = libc::sock_filter;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const LOAD_NR: Op = op(0x20, 0, 0, 0);

const fn op(code: u16, jt: u8, jf: u8, k: u32) -> Op {
    libc::sock_filter { code, jt, jf, k }
}

fn install(program: &mut [Op], flags: u64) -> Result<i64, i32> {
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    call(libc::SYS_seccomp, [1, flags, (&raw const program) as u64, 0, 0, 0])
}

fn no_new_privs() {
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
}

/// The filter that answers `action` to call `nr`, and admits all others.
fn deny(nr: i64, action: u32, flags: u64) -> Result<i64, i32> {
    install(&mut [LOAD_NR, op(0x15, 0, 1, nr as u32), op(6, 0, 0, action), op(6, 0, 0, ALLOW)], flags)
}

fn getppid() -> Result<i64, i32> {
    call(libc::SYS_getppid, [1, 2, 3, 4, 5, 6])
}

fn answers_errno() {
    no_new_privs();
    assert_eq!(deny(libc::SYS_getppid, libc::SECCOMP_RET_ERRNO | 0x4d, 0), Ok(0));
    assert_eq!(getppid(), Err(77));
    assert_eq!(unsafe { libc::prctl(libc::PR_GET_SECCOMP, 0, 0, 0, 0) }, 2);
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    assert!(status.contains("Seccomp:\t2\nSeccomp_filters:\t1\n"));
    // Inherited by fork and by exec.
    assert_eq!(wait(fork(|| i32::from(getppid() != Err(77)))), 0);
    // An argument decides: fcntl(…, F_GETFD) is refused.
    let mut by_argument = [
        LOAD_NR,
        op(0x15, 0, 3, libc::SYS_fcntl as u32),
        op(0x20, 0, 0, 24),
        op(0x15, 0, 1, libc::F_GETFD as u32),
        op(6, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        op(6, 0, 0, ALLOW),
    ];
    assert_eq!(install(&mut by_argument, 0), Ok(0));
    assert_eq!(unsafe { libc::fcntl(0, libc::F_GETFD) }, -1);
    assert_eq!(errno(), libc::EPERM);
    assert!(unsafe { libc::fcntl(0, libc::F_GETFL) } >= 0);
    // Larger numbers are cut, and 0 is success.
    assert_eq!(deny(libc::SYS_getpgid, libc::SECCOMP_RET_ERRNO | 0xffff, 0), Ok(0));
    assert_eq!(call(libc::SYS_getpgid, [0; 6]), Err(4095));
    assert_eq!(deny(libc::SYS_getsid, libc::SECCOMP_RET_ERRNO, 0), Ok(0));
    assert_eq!(call(libc::SYS_getsid, [0; 6]), Ok(0));
}

fn gravest_counts() {
    no_new_privs();
    assert_eq!(deny(libc::SYS_getppid, libc::SECCOMP_RET_ERRNO | 5, 0), Ok(0));
    assert_eq!(deny(libc::SYS_getppid, libc::SECCOMP_RET_LOG, 0), Ok(0));
    assert_eq!(getppid(), Err(5));
    // Of equals the newest.
    assert_eq!(deny(libc::SYS_getppid, libc::SECCOMP_RET_ERRNO | 6, 0), Ok(0));
    assert_eq!(getppid(), Err(6));
    killed_by(libc::SIGSYS, || {
        assert_eq!(deny(libc::SYS_getppid, libc::SECCOMP_RET_KILL_PROCESS, 0), Ok(0));
        let _ = getppid();
    });
}

fn trap() {
    static mut SEEN: [i64; 5] = [0; 5];
    extern "C" fn note(_: i32, info: *mut libc::siginfo_t, context: *mut libc::ucontext_t) {
        unsafe {
            let words = info.cast::<i32>();
            let registers = &mut (*context).uc_mcontext.gregs;
            SEEN = [
                (*info).si_code.into(),
                (*info).si_errno.into(),
                words.add(6).read().into(),
                i64::from(words.cast::<u64>().add(2).read() as i64 == registers[libc::REG_RIP as usize]),
                registers[libc::REG_RAX as usize],
            ];
            registers[libc::REG_RAX as usize] = 1234;
        }
    }
    no_new_privs();
    handle(libc::SIGSYS, note as *const () as usize, libc::SA_SIGINFO);
    assert_eq!(deny(libc::SYS_getppid, libc::SECCOMP_RET_TRAP | 9, 0), Ok(0));
    assert_eq!(getppid(), Ok(1234));
    assert_eq!(unsafe { SEEN }, [1, 9, libc::SYS_getppid, 1, libc::SYS_getppid]);
}

fn kill() {
    killed_by(libc::SIGSYS, || {
        no_new_privs();
        handle(libc::SIGSYS, libc::SIG_IGN, 0);
        assert_eq!(deny(libc::SYS_getppid, libc::SECCOMP_RET_KILL_THREAD, 0), Ok(0));
        let _ = getppid();
    });
    // One thread only, and nobody else notices.
    no_new_privs();
    static mut TID: i32 = 0;
    let mut stack = vec![0u8; 65536];
    extern "C" fn thread(_: *mut libc::c_void) -> i32 {
        let _ = deny(libc::SYS_getppid, libc::SECCOMP_RET_KILL_THREAD, 0);
        let _ = getppid();
        1
    }
    let flags = libc::CLONE_VM
        | libc::CLONE_THREAD
        | libc::CLONE_SIGHAND
        | libc::CLONE_FS
        | libc::CLONE_FILES
        | libc::CLONE_PARENT_SETTID
        | libc::CLONE_CHILD_CLEARTID;
    let top = stack.as_mut_ptr_range().end;
    let tid = &raw mut TID;
    let made = unsafe {
        libc::clone(thread, top.cast(), flags, std::ptr::null_mut(), tid, std::ptr::null_mut::<libc::c_void>(), tid)
    };
    assert!(made > 0);
    while unsafe { tid.read_volatile() } != 0 {
        std::thread::yield_now();
    }
    assert!(getppid().is_ok());
}

fn strict() {
    killed_by(libc::SIGKILL, || {
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_SECCOMP, 1, 0, 0, 0) }, 0);
        let _ = getppid();
    });
    let status = wait(fork(|| {
        assert_eq!(call(libc::SYS_seccomp, [0; 6]), Ok(0));
        let _ = call(libc::SYS_write, [u64::MAX, 0, 0, 0, 0, 0]);
        let _ = call(libc::SYS_exit, [4, 0, 0, 0, 0, 0]);
        0
    }));
    assert_eq!(status, 4 << 8);
}

fn threads() {
    no_new_privs();
    let barrier = std::sync::Barrier::new(2);
    std::thread::scope(|s| {
        let t = s.spawn(|| {
            barrier.wait();
            barrier.wait();
            getppid()
        });
        barrier.wait();
        assert_eq!(deny(libc::SYS_getppid, libc::SECCOMP_RET_ERRNO | 8, 1), Ok(0));
        barrier.wait();
        assert_eq!(t.join().expect("joined"), Err(8));
    });
    // A thread with a filter of its own cannot be made to follow.
    std::thread::scope(|s| {
        let (send, tid) = std::sync::mpsc::channel();
        let barrier = &barrier;
        s.spawn(move || {
            assert_eq!(deny(libc::SYS_getsid, libc::SECCOMP_RET_ERRNO | 8, 0), Ok(0));
            send.send(unsafe { libc::gettid() }).expect("sent");
            barrier.wait();
        });
        let tid = tid.recv().expect("received");
        assert_eq!(deny(libc::SYS_getpgrp, ALLOW, 1), Ok(tid.into()));
        assert_eq!(deny(libc::SYS_getpgrp, ALLOW, 1 | 16), Err(libc::ESRCH));
        barrier.wait();
    });
}

fn trace() {
    // Without a tracer the call does not exist.
    no_new_privs();
    assert_eq!(deny(libc::SYS_getppid, libc::SECCOMP_RET_TRACE | 0x15, 0), Ok(0));
    assert_eq!(getppid(), Err(libc::ENOSYS));
    let pid = fork(|| {
        unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) };
        unsafe { libc::raise(libc::SIGSTOP) };
        // The tracer makes the first call getpid, skips the second, lets the third be.
        let own = unsafe { libc::getpid() };
        i32::from(getppid() != Ok(own.into()) || getppid() != Ok(55) || getppid().is_err())
    });
    let stop = || {
        let mut status = 0;
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        status
    };
    assert_eq!(stop() >> 8, libc::SIGSTOP);
    let ask = |request, data: u64| unsafe { libc::ptrace(request, pid, 0, data) };
    assert_eq!(ask(libc::PTRACE_SETOPTIONS, libc::PTRACE_O_TRACESECCOMP as u64), 0);
    for n in 0..3 {
        assert_eq!(ask(libc::PTRACE_CONT, 0), 0);
        assert_eq!(stop() >> 8, libc::SIGTRAP | 7 << 8);
        let mut message = 0u64;
        assert_eq!(ask(libc::PTRACE_GETEVENTMSG, (&raw mut message) as u64), 0);
        assert_eq!(message, 21);
        let mut r: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        assert_eq!(ask(libc::PTRACE_GETREGS, (&raw mut r) as u64), 0);
        assert_eq!((r.orig_rax as i64, r.rdi), (libc::SYS_getppid, 1));
        match n {
            0 => r.orig_rax = libc::SYS_getpid as u64,
            1 => (r.orig_rax, r.rax) = (u64::MAX, 55),
            _ => {}
        }
        assert_eq!(ask(libc::PTRACE_SETREGS, (&raw mut r) as u64), 0);
    }
    assert_eq!(ask(libc::PTRACE_CONT, 0), 0);
    assert_eq!(stop(), 0);
}

fn refusals() {
    let available = |action: u32| call(libc::SYS_seccomp, [2, 0, (&raw const action) as u64, 0, 0, 0]);
    assert_eq!(available(libc::SECCOMP_RET_ERRNO), Ok(0));
    assert_eq!(available(0x1234_0000), Err(libc::EOPNOTSUPP));
    assert_eq!(call(libc::SYS_seccomp, [99, 0, 0, 0, 0, 0]), Err(libc::EINVAL));
    assert_eq!(call(libc::SYS_seccomp, [0, 1, 0, 0, 0, 0]), Err(libc::EINVAL));
    assert_eq!(call(libc::SYS_seccomp, [1, 0, 8, 0, 0, 0]), Err(libc::EFAULT));
    assert_eq!(deny(1, ALLOW, 1 << 20), Err(libc::EINVAL));
    no_new_privs();
    assert_eq!(install(&mut [LOAD_NR], 0), Err(libc::EINVAL));
    assert_eq!(install(&mut [op(0x20, 0, 0, 64), op(6, 0, 0, ALLOW)], 0), Err(libc::EINVAL));
    assert_eq!(install(&mut [op(0x05, 0, 0, 1), op(6, 0, 0, ALLOW)], 0), Err(libc::EINVAL));
    if unsafe { libc::geteuid() } == 0 {
        let status = wait(fork(|| {
            // no_new_privs stays with the child: a fresh look needs a process without it, so only its effect is seen.
            unsafe { libc::setresuid(65534, 65534, 65534) };
            i32::from(deny(libc::SYS_getppid, libc::SECCOMP_RET_ERRNO | 3, 0) != Ok(0) || getppid() != Err(3))
        }));
        assert_eq!(status, 0);
    }
    // Filters upon filters end somewhere.
    let mut long = vec![op(0x20, 0, 0, 0); 4095];
    long.push(op(6, 0, 0, ALLOW));
    let made = (0..20).take_while(|_| install(&mut long, 0) == Ok(0)).count();
    assert_eq!((made, install(&mut long, 0)), (7, Err(libc::ENOMEM)));
}
