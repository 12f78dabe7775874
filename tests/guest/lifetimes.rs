//! Births whose numbers are taken back, the order of a thread's end, who hears of it. Some are for root only.
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use super::Case;
use super::pidns::{NEWPID, clone3_tid, getpid, sleep_for_ever};
use super::sys::{call, clone, fork, handle, in_child, ok, pipe, read_byte, wait, write_byte};

pub const CASES: &[Case] = &[
    ("clone3_values", values),
    ("clone_numbers_roll_back", numbers_roll_back),
    ("exit_order_of_a_thread", exit_order),
    ("exit_child_tid_word", child_tid_word),
    ("pdeath_signal_of_a_thread", pdeath_of_thread),
];

/// Where nothing is mapped.
const NOWHERE: u64 = 16;

/// The fields of struct clone_args by their index.
mod field {
    pub const PIDFD: usize = 1;
    pub const CHILD_TID: usize = 2;
    pub const EXIT_SIGNAL: usize = 4;
    pub const STACK: usize = 5;
    pub const STACK_SIZE: usize = 6;
    pub const SET_TID: usize = 8;
    pub const SET_TID_SIZE: usize = 9;
    pub const CGROUP: usize = 10;
}

/// clone3 as fork with further fields; a child ends with 0.
fn birth(flags: u64, fields: &[(usize, u64)], size: u64) -> Result<i32, i32> {
    let mut args = vec![0_u64; 1024];
    args[0] = flags;
    args[field::EXIT_SIGNAL] = libc::SIGCHLD as u64;
    for (i, value) in fields {
        args[*i] = *value;
    }
    let r = call(libc::SYS_clone3, [args.as_ptr() as u64, size, 0, 0, 0, 0])?;
    if r == 0 {
        unsafe { libc::_exit(0) };
    }
    Ok(r as i32)
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Runs `f`, which leaves no child and no descriptor.
fn leaves_nothing(f: impl FnOnce()) {
    let before = descriptors();
    f();
    assert_eq!(descriptors(), before);
    assert_eq!(ok(unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::__WALL | libc::WNOHANG) }), Err(libc::ECHILD));
    assert_eq!(std::fs::read_dir("/proc/self/task").unwrap().count(), 1);
}

fn born(r: Result<i32, i32>) {
    assert_eq!(wait(r.unwrap()), 0);
}

fn values() {
    let inval = Err(libc::EINVAL);
    let thread = (libc::CLONE_THREAD | libc::CLONE_SIGHAND | libc::CLONE_VM) as u64;
    let into_cgroup = 0x2_0000_0000;
    in_child(|| {
        leaves_nothing(|| {
            for size in [64, 65, 72, 80, 88, 96, 4096] {
                born(birth(0, &[], size));
            }
            assert_eq!(birth(0, &[], 63), inval);
            assert_eq!(birth(0, &[], 0), inval);
            assert_eq!(birth(0, &[], 4097), Err(libc::E2BIG));
            assert_eq!(birth(0, &[(11, 1)], 96), Err(libc::E2BIG));
            assert_eq!(birth(0, &[(511, 1)], 4096), Err(libc::E2BIG));
            // Beyond the size that was given nothing is read.
            born(birth(0, &[(field::SET_TID, NOWHERE), (field::SET_TID_SIZE, 1)], 64));

            assert_eq!(birth(1 << 63, &[], 88), inval);
            assert_eq!(birth(libc::CLONE_DETACHED as u64, &[], 88), inval);
            assert_eq!(birth(1, &[], 88), inval);
            assert_eq!(birth(thread, &[], 88), inval);
            assert_eq!(birth(0, &[(field::EXIT_SIGNAL, 65)], 88), inval);
            assert_eq!(birth(0, &[(field::EXIT_SIGNAL, 0x111)], 88), inval);
            assert_eq!(birth(0, &[(field::STACK, NOWHERE)], 88), inval);
            assert_eq!(birth(0, &[(field::STACK_SIZE, NOWHERE)], 88), inval);
            assert_eq!(birth(0, &[(field::STACK, u64::MAX - 4095), (field::STACK_SIZE, 4096)], 88), inval);
            assert_eq!(birth(0, &[(field::SET_TID, NOWHERE)], 88), inval);
            assert_eq!(birth(0, &[(field::SET_TID_SIZE, 1)], 88), inval);
            assert_eq!(birth(0, &[(field::SET_TID, NOWHERE), (field::SET_TID_SIZE, 1)], 88), Err(libc::EFAULT));
            assert_eq!(birth(into_cgroup, &[(field::CGROUP, u64::MAX)], 88), inval);
            assert_eq!(birth(into_cgroup, &[], 80), inval);
            assert_eq!(birth(into_cgroup, &[(field::CGROUP, 0x7fff_ffff)], 88), Err(libc::EBADF));
        });
    });
}

extern "C" fn end_thread(_: *mut libc::c_void) -> i32 {
    0
}

const THREAD: i32 = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_SIGHAND | libc::CLONE_THREAD | libc::CLONE_SYSVSEM;

/// A thread with nothing of its own but a stack, which runs `f`; its end clears `word`.
fn raw_thread(
    stack: &mut [u8],
    flags: i32,
    f: extern "C" fn(*mut libc::c_void) -> i32,
    arg: *mut libc::c_void,
    word: *const AtomicU32,
) -> Result<i64, i32> {
    let top = ((stack.as_mut_ptr() as usize + stack.len()) & !63) as *mut libc::c_void;
    let flags = THREAD | libc::CLONE_CHILD_CLEARTID | flags;
    let none = std::ptr::null_mut::<libc::c_void>();
    ok(unsafe { libc::clone(f, top, flags, arg, none, none, word.cast_mut()) })
}

fn wait_for_word(word: &AtomicU32) {
    while let value @ 1.. = word.load(Ordering::SeqCst) {
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, 0, 0, 0) };
    }
}

/// Numbers of every level are given or none is, and the next birth finds them free.
fn numbers_roll_back() {
    let init = clone(NEWPID, || {
        assert_eq!(clone(libc::CLONE_PARENT as u64, || 0), Err(libc::EINVAL));
        let held = clone3_tid(0, &[77], sleep_for_ever).unwrap();
        // The number inside was to be had, that outside was not.
        assert_eq!(clone3_tid(NEWPID, &[1, 77], || 0), Err(libc::EEXIST));
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWPID) }, 0);
        for _ in 0..3 {
            assert_eq!(clone3_tid(0, &[1, 77], || 0), Err(libc::EEXIST));
        }
        // The namespace has nobody yet: its first is 1.
        let (ready, tell) = pipe();
        let below = clone(0, || {
            assert_eq!(getpid(), 1);
            write_byte(tell);
            sleep_for_ever()
        })
        .unwrap();
        read_byte(ready);
        assert_eq!(clone3_tid(0, &[5, 77], || 0), Err(libc::EEXIST));
        assert_eq!(clone3_tid(0, &[1, 99], || 0), Err(libc::EEXIST));
        assert_eq!(clone3_tid(0, &[5, 99], getpid), Ok(99));
        assert_eq!(libc::WEXITSTATUS(wait(99)), 5);
        // A failure after the numbers were given gives them back at every level.
        let numbers = [6_i32, 98];
        let fields = [(field::SET_TID, numbers.as_ptr() as u64), (field::SET_TID_SIZE, 2), (field::PIDFD, NOWHERE)];
        assert_eq!(birth(libc::CLONE_PIDFD as u64, &fields, 88), Err(libc::EFAULT));
        assert_eq!(clone3_tid(0, &[6, 98], getpid), Ok(98));
        assert_eq!(libc::WEXITSTATUS(wait(98)), 6);
        for pid in [below, held] {
            unsafe { libc::kill(pid, libc::SIGKILL) };
            wait(pid);
        }
        // The namespace below has lost its init.
        assert_eq!(birth(0, &[], 88), Err(libc::ENOMEM));
        assert_eq!(ok(unsafe { libc::waitpid(-1, std::ptr::null_mut(), 0) }), Err(libc::ECHILD));
        0
    });
    assert_eq!(wait(init.unwrap()), 0);
}

fn block(signals: &[i32]) {
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        for s in signals {
            libc::sigaddset(&raw mut set, *s);
        }
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
}

/// What the dying thread of [`exit_order`] leaves.
#[repr(C)]
struct Legacy {
    /// struct robust_list_head: the list, the offset of the word from an entry, the entry under way.
    head: [u64; 3],
    entry: u64,
    lock: AtomicU32,
    child_tid: AtomicU32,
}

const OWNER_DIED: u32 = 0x4000_0000;

extern "C" fn leave_locked(legacy: *mut libc::c_void) -> i32 {
    // Nothing here may use the thread's own storage: it is its maker's.
    let legacy = legacy.cast::<Legacy>();
    unsafe {
        let tid = libc::syscall(libc::SYS_gettid) as u32;
        (*legacy).lock.store(tid, Ordering::SeqCst);
        libc::syscall(libc::SYS_set_robust_list, legacy, 24);
    }
    0
}

/// A dying thread lets go of robust locks, then clears its word, then closes its files.
fn exit_order() {
    in_child(|| {
        let mut stack = vec![0; 64 << 10];
        for round in 0..100 {
            let mut legacy =
                Box::new(Legacy { head: [0; 3], entry: 0, lock: AtomicU32::new(0), child_tid: AtomicU32::new(1) });
            legacy.entry = &raw const legacy.head as u64;
            legacy.head = [&raw const legacy.entry as u64, 8, 0];
            let (from, to) = pipe();
            let at = Box::into_raw(legacy);
            // It has a table of descriptors to itself.
            raw_thread(&mut stack, 0, leave_locked, at.cast(), unsafe { &raw const (*at).child_tid }).unwrap();
            unsafe { libc::close(to) };
            let legacy = unsafe { Box::from_raw(at) };
            let mut byte = 0_u8;
            if round % 2 == 0 {
                assert_eq!(unsafe { libc::read(from, (&raw mut byte).cast(), 1) }, 0);
                assert_eq!(legacy.child_tid.load(Ordering::SeqCst), 0, "files before the word");
            }
            wait_for_word(&legacy.child_tid);
            assert_eq!(legacy.lock.load(Ordering::SeqCst) & OWNER_DIED, OWNER_DIED, "the word before the lock");
            assert_eq!(unsafe { libc::read(from, (&raw mut byte).cast(), 1) }, 0);
            unsafe { libc::close(from) };
        }
    });
}

/// CLONE_CHILD_CLEARTID tells those who share the memory; where nobody does the word stays.
fn child_tid_word() {
    let shared = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(shared, libc::MAP_FAILED);
    let word = unsafe { &*shared.cast::<AtomicU32>() };
    let child_tid = [(field::CHILD_TID, shared as u64)];
    word.store(7, Ordering::SeqCst);
    born(birth(libc::CLONE_CHILD_CLEARTID as u64, &child_tid, 88));
    assert_eq!(word.load(Ordering::SeqCst), 7);
    let flags = libc::CLONE_CHILD_CLEARTID | libc::CLONE_VM | libc::CLONE_VFORK;
    let pid = unsafe {
        let mut stack = vec![0_u8; 64 << 10];
        let top = ((stack.as_mut_ptr() as usize + stack.len()) & !63) as *mut libc::c_void;
        let none = std::ptr::null_mut::<libc::c_void>();
        libc::clone(end_thread, top, flags | libc::SIGCHLD, none, none, none, shared)
    };
    assert!(pid > 0);
    // The vfork parent goes on when the memory is let go of, which is after that.
    assert_eq!(word.load(Ordering::SeqCst), 0);
    assert_eq!(wait(pid), 0);
    unsafe { libc::munmap(shared, 4096) };
}

static SENDER: AtomicI32 = AtomicI32::new(0);

extern "C" fn note_sender(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    SENDER.store(unsafe { (*info).si_pid() }, Ordering::SeqCst);
}

/// The parent-death signal comes when the thread that forked ends, though its process lives.
fn pdeath_of_thread() {
    in_child(|| {
        let (ready, tell) = pipe();
        let (child_number, number) = pipe();
        let maker = std::thread::spawn(move || {
            let child = fork(|| {
                block(&[libc::SIGUSR1]);
                handle(libc::SIGUSR1, note_sender as *const () as usize, libc::SA_SIGINFO);
                unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGUSR1) };
                write_byte(tell);
                let none: libc::sigset_t = unsafe { std::mem::zeroed() };
                unsafe { libc::sigsuspend(&raw const none) };
                i32::from(SENDER.load(Ordering::SeqCst) != unsafe { libc::getppid() })
            });
            read_byte(ready);
            assert_eq!(unsafe { libc::write(number, (&raw const child).cast(), 4) }, 4);
        });
        maker.join().unwrap();
        let mut child = 0_i32;
        assert_eq!(unsafe { libc::read(child_number, (&raw mut child).cast(), 4) }, 4);
        assert_eq!(wait(child), 0);
    });
}
