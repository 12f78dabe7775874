//! Who a process is, asked again and again: the answers change at once, whoever changes them.
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::Case;
use crate::sys::{call, fork, wait};

/// The cases of this area.
pub const CASES: &[Case] = &[
    ("answers_follow_credentials", credentials),
    ("answers_follow_the_parent", parent),
    ("answers_follow_the_process_group", process_group),
    ("answers_differ_between_threads", threads),
    ("answers_obey_filters", filters),
    ("answers_keep_registers", registers),
    ("answers_to_yields", yields),
];

const LONG: Duration = Duration::from_secs(60);

fn ask(nr: i64) -> i64 {
    // Arguments mean nothing to these calls.
    call(nr, [7, 7, 7, 7, 7, 7]).expect("they do not fail")
}

/// Asks until the answer is `wanted`; whether it came.
fn ask_until(nr: i64, wanted: i64) -> bool {
    let begin = Instant::now();
    while ask(nr) != wanted {
        if begin.elapsed() > LONG {
            return false;
        }
    }
    true
}

fn credentials() {
    if ask(libc::SYS_geteuid) != 0 {
        return;
    }
    let child = fork(|| {
        let ids = || [libc::SYS_getuid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getegid].map(ask);
        assert_eq!(ids()[..2], [0, 0]);
        for round in 0..200 {
            call(libc::SYS_setresgid, [1000 + round, 2000 + round, 0, 0, 0, 0]).expect("setresgid");
            call(libc::SYS_setresuid, [3000 + round, 4000 + round, 0, 0, 0, 0]).expect("setresuid");
            let round = round as i64;
            assert_eq!(ids(), [3000 + round, 4000 + round, 1000 + round, 2000 + round]);
            call(libc::SYS_setresuid, [u64::from(u32::MAX), 0, u64::from(u32::MAX), 0, 0, 0]).expect("back");
        }
        0
    });
    assert_eq!(wait(child), 0);
}

fn parent() {
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }, 0);
    let me = ask(libc::SYS_getpid);
    for _ in 0..5 {
        let middle = fork(|| {
            let middle = ask(libc::SYS_getpid);
            let asking = [0; 2];
            assert_eq!(unsafe { libc::pipe(asking.as_ptr().cast_mut()) }, 0);
            fork(|| {
                assert_eq!(ask(libc::SYS_getppid), middle);
                assert_eq!(unsafe { libc::write(asking[1], [1_u8].as_ptr().cast(), 1) }, 1);
                i32::from(!ask_until(libc::SYS_getppid, me))
            });
            let mut byte = [0_u8];
            assert_eq!(unsafe { libc::read(asking[0], byte.as_mut_ptr().cast(), 1) }, 1);
            0
        });
        assert_eq!(wait(middle), 0);
        assert_eq!(wait(-1), 0);
    }
}

fn process_group() {
    for _ in 0..5 {
        let child = fork(|| {
            let me = ask(libc::SYS_getpid);
            i32::from(!ask_until(libc::SYS_getpgrp, me))
        });
        assert_ne!(ask(libc::SYS_getpgrp), i64::from(child));
        assert_eq!(unsafe { libc::setpgid(child, child) }, 0);
        assert_eq!(wait(child), 0);
    }
    let child = fork(|| {
        let before = ask(libc::SYS_getpgrp);
        assert_eq!(call(libc::SYS_setsid, [0; 6]).expect("setsid"), ask(libc::SYS_getpid));
        assert_ne!(ask(libc::SYS_getpgrp), before);
        i32::from(ask(libc::SYS_getpgrp) != ask(libc::SYS_getpid))
    });
    assert_eq!(wait(child), 0);
}

fn threads() {
    let me = ask(libc::SYS_getpid);
    assert_eq!(ask(libc::SYS_gettid), me);
    let mut tids: Vec<i64> = std::thread::scope(|s| {
        let asking = |_| {
            s.spawn(move || {
                let tid = ask(libc::SYS_gettid);
                for _ in 0..2000 {
                    assert_eq!(ask(libc::SYS_getpid), me);
                    assert_eq!(ask(libc::SYS_gettid), tid);
                }
                tid
            })
        };
        let all: Vec<_> = (0..4).map(asking).collect();
        all.into_iter().map(|t| t.join().expect("it agrees")).collect()
    });
    tids.push(me);
    tids.sort_unstable();
    tids.dedup();
    assert_eq!(tids.len(), 5);
    // A fork is somebody else, and its parent is who made it.
    let child = fork(|| i32::from(ask(libc::SYS_getpid) == me || ask(libc::SYS_getppid) != me));
    assert_eq!(wait(child), 0);
}

/// A filter for all threads holds for the very next call of each.
fn filters() {
    static STEP: AtomicU32 = AtomicU32::new(0);
    static WRONG: AtomicBool = AtomicBool::new(false);
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    let asking = std::thread::spawn(|| {
        while STEP.load(Ordering::SeqCst) < 2 {
            let over = STEP.load(Ordering::SeqCst) == 1;
            let result = call(libc::SYS_getppid, [0; 6]);
            if over && result != Err(libc::EDOM) {
                WRONG.store(true, Ordering::SeqCst);
            }
            if over {
                STEP.store(2, Ordering::SeqCst);
            }
        }
    });
    std::thread::sleep(Duration::from_millis(20));
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        op(0x20, 0, 0, 0),
        op(0x15, 0, 1, libc::SYS_getppid as u32),
        op(6, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EDOM as u32),
        op(6, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    assert_eq!(call(libc::SYS_seccomp, [1, 1, (&raw const program) as u64, 0, 0, 0]), Ok(0));
    STEP.store(1, Ordering::SeqCst);
    assert_eq!(call(libc::SYS_getppid, [0; 6]), Err(libc::EDOM));
    asking.join().expect("it ends");
    assert!(!WRONG.load(Ordering::SeqCst));
}

/// RCX and R11 hold what SYSCALL leaves there, the flags stay, and the upper half of RAX does not count.
fn registers() {
    let me = ask(libc::SYS_getpid) as u64;
    let number = libc::SYS_getpid as u64;
    for (round, number) in [number, number | 0xffff_ffff_0000_0000, number].into_iter().enumerate() {
        let (result, rcx, r11, after, before, flags): (u64, u64, u64, u64, u64, u64);
        unsafe {
            core::arch::asm!(
                "push {wanted}", "popfq",
                "pushfq", "pop {before}",
                "syscall",
                "2: pushfq", "pop {flags}",
                "cld",
                "lea {after}, [rip + 2b]",
                wanted = in(reg) 0x0ad7_u64 ^ ((round as u64 & 1) * 0x8d5),
                before = out(reg) before,
                flags = out(reg) flags,
                after = out(reg) after,
                inlateout("rax") number => result,
                out("rcx") rcx,
                out("r11") r11,
            );
        }
        assert_eq!(result, me);
        assert_eq!((rcx, r11, flags), (after, before, before));
    }
}

fn yields() {
    // Two that wait for each other by yielding, also where there is one CPU.
    static TURN: AtomicU32 = AtomicU32::new(0);
    let play = |mine: u32| {
        let begin = Instant::now();
        for _ in 0..200 {
            while TURN.load(Ordering::SeqCst) % 2 != mine {
                assert_eq!(ask(libc::SYS_sched_yield), 0);
                assert!(begin.elapsed() < LONG);
            }
            TURN.fetch_add(1, Ordering::SeqCst);
        }
    };
    std::thread::scope(|s| {
        s.spawn(|| play(0));
        s.spawn(|| play(1));
    });
    assert_eq!(TURN.load(Ordering::SeqCst), 400);
}
