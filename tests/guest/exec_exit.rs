//! What exec by a thread that is not the leader resets and keeps, and in which order a thread's and a process's end is seen.
use std::ffi::CString;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::Case;
use super::sys::{call, errno, fork, handle, in_child, map, ok, pipe, read_byte, wait, write_byte};

pub const CASES: &[Case] = &[
    ("exec_by_a_thread_resets_and_keeps", resets),
    ("exec_found", found),
    ("exit_robust_list_before_tid_word", robust_first),
    ("exit_files_before_zombie", files_first),
    ("exit_leader_waits_for_siblings", leader_last),
    ("exit_vfork_child", vfork_child),
    ("exit_of_a_session_leader", session_leader),
];

/// Set in the environment of the program that `exec_found` judges.
const TOLD: &str = "GUEST_EXEC_FOUND";

/// Flags of the alternate stack as the program finds them before the language's runtime has made one of its own.
static FIRST_ALTSTACK: OnceLock<i32> = OnceLock::new();

extern "C" fn look_at_altstack() {
    let mut stack: libc::stack_t = unsafe { std::mem::zeroed() };
    unsafe { libc::sigaltstack(std::ptr::null(), &raw mut stack) };
    let _ = FIRST_ALTSTACK.set(stack.ss_flags);
}

#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look_at_altstack;

extern "C" fn nothing(_: i32) {}

fn set_of(signals: &[i32]) -> libc::sigset_t {
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    unsafe { libc::sigemptyset(&raw mut set) };
    signals.iter().for_each(|s| assert_eq!(unsafe { libc::sigaddset(&raw mut set, *s) }, 0));
    set
}

/// A POSIX timer that sends `signal` after `after`.
fn timer(signal: i32, after: Duration) {
    let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
    event.sigev_notify = libc::SIGEV_SIGNAL;
    event.sigev_signo = signal;
    let mut id: libc::timer_t = std::ptr::null_mut();
    assert_eq!(unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut id) }, 0);
    let mut spec: libc::itimerspec = unsafe { std::mem::zeroed() };
    spec.it_value.tv_nsec = after.subsec_nanos().into();
    spec.it_value.tv_sec = after.as_secs().cast_signed();
    assert_eq!(unsafe { libc::timer_settime(id, 0, &raw const spec, std::ptr::null_mut()) }, 0);
}

fn resets() {
    let pid = fork(|| {
        handle(libc::SIGUSR1, nothing as *const () as usize, 0);
        handle(libc::SIGUSR2, libc::SIG_IGN, 0);
        let far = libc::itimerval {
            it_interval: libc::timeval { tv_sec: 0, tv_usec: 0 },
            it_value: libc::timeval { tv_sec: 1000, tv_usec: 0 },
        };
        assert_eq!(unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const far, std::ptr::null_mut()) }, 0);
        let blocked = set_of(&[libc::SIGHUP, libc::SIGTERM]);
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const blocked, std::ptr::null_mut()) };
        std::thread::spawn(|| {
            loop {
                std::thread::park();
            }
        });
        std::thread::spawn(|| {
            // Its default action ends the program: it must not come after exec.
            timer(libc::SIGUSR1, Duration::from_millis(100));
            let stack = libc::stack_t { ss_sp: map(65536, 3).cast(), ss_flags: 0, ss_size: 65536 };
            assert_eq!(unsafe { libc::sigaltstack(&raw const stack, std::ptr::null_mut()) }, 0);
            // One pending for the thread, one for the process.
            unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGHUP) };
            unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
            let told = CString::new(format!("{TOLD}={}", unsafe { libc::getpid() })).unwrap();
            let argv = [c"guest".as_ptr(), c"exec_found".as_ptr(), std::ptr::null()];
            let env = [told.as_ptr(), std::ptr::null()];
            unsafe { libc::execve(c"/proc/self/exe".as_ptr(), argv.as_ptr(), env.as_ptr()) };
            panic!("execve: {}", errno());
        })
        .join()
        .unwrap();
        1
    });
    assert_eq!(wait(pid), 0);
}

/// The program after exec; without its variable there is nothing to judge.
fn found() {
    let Some(pid) = std::env::var(TOLD).ok() else { return };
    assert_eq!(pid, std::process::id().to_string());
    assert_eq!(unsafe { libc::gettid() }, unsafe { libc::getpid() });
    assert_eq!(std::fs::read_dir("/proc/self/task").unwrap().count(), 1);
    assert_eq!(FIRST_ALTSTACK.get(), Some(&libc::SS_DISABLE));
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let mut action_of = |signal| {
        assert_eq!(unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) }, 0);
        action.sa_sigaction
    };
    assert_eq!((action_of(libc::SIGUSR1), action_of(libc::SIGUSR2)), (libc::SIG_DFL, libc::SIG_IGN));
    let mut mask = set_of(&[]);
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut mask) };
    let mut pending = set_of(&[]);
    unsafe { libc::sigpending(&raw mut pending) };
    for signal in [libc::SIGHUP, libc::SIGTERM] {
        assert_eq!(unsafe { libc::sigismember(&raw const mask, signal) }, 1);
        assert_eq!(unsafe { libc::sigismember(&raw const pending, signal) }, 1);
    }
    let mut left: libc::itimerval = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::getitimer(libc::ITIMER_REAL, &raw mut left) }, 0);
    assert!(left.it_value.tv_sec > 0, "the interval timer goes on");
    assert_eq!(call(libc::SYS_timer_delete, [0; 6]), Err(libc::EINVAL));
    std::thread::sleep(Duration::from_millis(200));
}

const STACK: usize = 64 << 10;

/// What a thread of `robust_first` works on: its robust list, a futex on it, and the word that is cleared at its end.
#[repr(C)]
struct Shared {
    /// struct robust_list_head: the list, the futex's distance from its entry, the one being taken.
    head: [u64; 3],
    entry: u64,
    futex: AtomicU32,
    tid: AtomicU32,
}

extern "C" fn die_holding(shared: *mut libc::c_void) -> i32 {
    let shared = unsafe { &*shared.cast::<Shared>() };
    let _ = call(libc::SYS_set_robust_list, [(&raw const shared.head) as u64, 24, 0, 0, 0, 0]);
    let me = call(libc::SYS_gettid, [0; 6]).unwrap_or(0) as u32;
    shared.futex.store(me, Ordering::SeqCst);
    0
}

/// Who finds the tid word cleared finds the futexes of the dead thread released: pthread_join counts on that.
fn robust_first() {
    for _ in 0..50 {
        let shared: &'static mut Shared = Box::leak(Box::new(Shared {
            head: [0; 3],
            entry: 0,
            futex: AtomicU32::new(0),
            tid: AtomicU32::new(u32::MAX),
        }));
        let (head, entry) = ((&raw const shared.head) as u64, (&raw const shared.entry) as u64);
        shared.head = [entry, (&raw const shared.futex) as u64 - entry, 0];
        shared.entry = head;
        let flags = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
        let stack = unsafe { map(STACK, 3).add(STACK) };
        let tid = (&raw const shared.tid).cast_mut();
        let at = std::ptr::from_mut(shared).cast();
        let r = unsafe {
            libc::clone(
                die_holding,
                stack.cast(),
                flags | libc::CLONE_CHILD_CLEARTID,
                at,
                std::ptr::null_mut::<libc::pid_t>(),
                std::ptr::null_mut::<libc::c_void>(),
                tid,
            )
        };
        assert!(r > 0, "clone: {}", errno());
        let shared: &Shared = unsafe { &*at.cast::<Shared>() };
        while shared.tid.load(Ordering::SeqCst) != 0 {
            std::thread::yield_now();
        }
        let left = shared.futex.load(Ordering::SeqCst);
        assert_eq!(left & 0x4000_0000, 0x4000_0000, "FUTEX_OWNER_DIED: {left:#x}");
    }
}

/// Who has waited for a process finds its descriptors closed and its record locks gone.
fn files_first() {
    let path = CString::new(super::own_path("exit-lock")).unwrap();
    for _ in 0..50 {
        let (reader, writer) = pipe();
        let pid = fork(|| {
            let file = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CREAT, 0o600) };
            assert_eq!(lock(file), Ok(0));
            0
        });
        unsafe { libc::close(writer) };
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let flags = libc::WEXITED | libc::WNOWAIT;
        assert_eq!(unsafe { libc::waitid(libc::P_PID, pid as u32, &raw mut info, flags) }, 0);
        let mut poll = libc::pollfd { fd: reader, events: libc::POLLIN, revents: 0 };
        assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 0) }, 1, "the writer's end is closed");
        assert_eq!(poll.revents, libc::POLLHUP);
        let file = unsafe { libc::open(path.as_ptr(), libc::O_RDWR) };
        assert_eq!(lock(file), Ok(0));
        unsafe { (libc::close(file), libc::close(reader)) };
        assert_eq!(wait(pid), 0);
    }
    unsafe { libc::unlink(path.as_ptr()) };
}

fn lock(file: i32) -> Result<i64, i32> {
    let mut whole: libc::flock = unsafe { std::mem::zeroed() };
    whole.l_type = libc::F_WRLCK as i16;
    ok(unsafe { libc::fcntl(file, libc::F_SETLK, &raw const whole) })
}

/// A leader that ends first is a zombie which nobody can wait for, keeps its number and its entry in /proc, and takes signals
/// for the rest; it becomes waitable with the last of them.
fn leader_last() {
    let (go_on, tell) = pipe();
    let pid = fork(|| {
        std::thread::spawn(move || {
            read_byte(go_on);
            unsafe { libc::syscall(libc::SYS_exit, 7) };
        });
        unsafe { libc::syscall(libc::SYS_exit, 42) };
        1
    });
    let stat = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    while !stat().contains(") Z ") {
        std::thread::yield_now();
    }
    assert_eq!(ok(unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) }), Ok(0));
    assert_eq!(unsafe { libc::kill(pid, 0) }, 0);
    assert_eq!(std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count(), 2);
    write_byte(tell);
    assert_eq!(libc::WEXITSTATUS(wait(pid)), 7, "the status of the last to exit is the process's");
}

/// A pipe as the child of `vfork_child` finds it: where it reads, where the parent writes; nothing if it is to end at once.
type Input = Option<(i32, i32)>;

extern "C" fn vforked(input: *mut libc::c_void) -> i32 {
    if let Some((reader, writer)) = unsafe { *input.cast::<Input>() } {
        let argv = [c"cat".as_ptr(), std::ptr::null()];
        unsafe { (libc::dup2(reader, 0), libc::close(writer)) };
        unsafe { libc::execv(c"/bin/cat".as_ptr(), argv.as_ptr()) };
    }
    5
}

/// The parent of a vfork goes on when the child has left its memory, by exec or by its end.
fn vfork_child() {
    let input = pipe();
    for mut how in [Some(input), None] {
        let stack = unsafe { map(STACK, 3).add(STACK) };
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        let pid = unsafe { libc::clone(vforked, stack.cast(), flags, (&raw mut how).cast()) };
        assert!(pid > 0, "clone: {}", errno());
        if how.is_some() {
            let early = ok(unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::WNOHANG) });
            assert_eq!(early, Ok(0), "the program reads, the parent goes on");
            unsafe { libc::close(input.1) };
            assert_eq!(wait(pid), 0);
        } else {
            assert_eq!(libc::WEXITSTATUS(wait(pid)), 5);
        }
    }
}

/// The end of a session's leader: the foreground group gets SIGHUP, and nobody of the session has a controlling terminal any more.
fn session_leader() {
    in_child(|| {
        let master = unsafe { libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY) };
        assert_eq!(unsafe { (libc::grantpt(master), libc::unlockpt(master)) }, (0, 0));
        let mut name = [0_u8; 64];
        assert_eq!(unsafe { libc::ptsname_r(master, name.as_mut_ptr().cast(), name.len()) }, 0);
        let (heard, tell) = pipe();
        let leader = fork(|| {
            assert!(unsafe { libc::setsid() } > 0);
            let terminal = unsafe { libc::open(name.as_ptr().cast(), libc::O_RDWR) };
            assert!(terminal >= 0);
            let (ready, say) = pipe();
            fork(|| {
                let hup = set_of(&[libc::SIGHUP, libc::SIGCONT]);
                unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const hup, std::ptr::null_mut()) };
                write_byte(say);
                assert_eq!(unsafe { libc::sigwaitinfo(&raw const hup, std::ptr::null_mut()) }, libc::SIGHUP);
                let mut pending = set_of(&[]);
                unsafe { libc::sigpending(&raw mut pending) };
                assert_eq!(unsafe { libc::sigismember(&raw const pending, libc::SIGCONT) }, 0);
                // The terminal itself lives on, without a session.
                assert_eq!(unsafe { libc::write(terminal, b"x".as_ptr().cast(), 1) }, 1);
                assert_eq!(ok(unsafe { libc::open(c"/dev/tty".as_ptr(), libc::O_RDWR) }), Err(libc::ENXIO));
                write_byte(tell);
                0
            });
            read_byte(ready);
            0
        });
        assert_eq!(wait(leader), 0);
        unsafe { libc::close(tell) };
        read_byte(heard);
    });
}
