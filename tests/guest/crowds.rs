//! Crowds of threads and processes in a PID namespace of their own: created, enumerated while they change, killed with their init;
//! then nothing is left. With GUEST_SCALE=full: 16,384 threads, 4,096 processes, 64 times 256.
use std::sync::Barrier;
use std::thread;

use super::Case;
use super::scale::scaled;
use super::sys::{clone, fork, map, pipe, read_byte, wait, write_byte};

pub const CASES: &[Case] = &[
    ("crowd_of_threads", threads),
    ("crowd_of_processes", processes),
    ("crowd_of_processes_with_threads", both),
    ("crowd_exec_by_a_thread", exec),
];

/// Driven line by line over standard input by a test that looks at the sandbox from outside; not among the listed.
pub const DRIVEN: &[Case] = &[("crowd_asleep", asleep)];

/// Says what the system has in use, in KiB: memory in all, and of it the kernel's objects.
fn tell() {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    let kib = |name: &str| -> u64 {
        let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    let kernel = kib("Slab:") + kib("KernelStack:");
    println!("{} {kernel}", kib("MemTotal:") - kib("MemFree:"));
}

/// Says what is in use; and again for each line of standard input, after it has run the case if the line says `again`.
pub fn rounds(case: fn()) {
    let mut lines = std::io::stdin().lines();
    loop {
        tell();
        let Some(Ok(line)) = lines.next() else { return };
        if line == "again" {
            let child = fork(|| {
                case();
                0
            });
            assert_eq!(wait(child), 0);
        }
    }
}

/// Threads that sleep, between two lines of standard input; says before and then what is in use.
fn asleep() {
    let mut lines = std::io::stdin().lines();
    tell();
    let _ = lines.next();
    sleepers(1000);
    tell();
    let _ = lines.next();
}

extern "C" fn sleeper(ready: *mut libc::c_void) -> *mut libc::c_void {
    unsafe { &*ready.cast::<Barrier>() }.wait();
    loop {
        unsafe { libc::pause() };
    }
}

/// Threads that sleep for ever, all of them running when this returns. Their stacks lie in one mapping: with one each, and its guard,
/// and a signal stack, a full crowd would meet the limit on mappings (vm.max_map_count).
fn sleepers(n: u32) {
    const STACK: usize = 32 << 10;
    if n == 0 {
        return;
    }
    let ready: &'static Barrier = Box::leak(Box::new(Barrier::new(n as usize + 1)));
    let stacks = map(n as usize * STACK, 3);
    for i in 0..n as usize {
        unsafe {
            let mut attr: libc::pthread_attr_t = std::mem::zeroed();
            let mut thread = 0;
            assert_eq!(libc::pthread_attr_init(&raw mut attr), 0);
            assert_eq!(libc::pthread_attr_setstack(&raw mut attr, stacks.add(i * STACK).cast(), STACK), 0);
            let arg = std::ptr::from_ref(ready).cast_mut().cast();
            assert_eq!(libc::pthread_create(&raw mut thread, &raw const attr, sleeper, arg), 0, "thread {i}");
        }
    }
    ready.wait();
}

fn pids() -> Vec<i32> {
    std::fs::read_dir("/proc").unwrap().filter_map(|e| e.unwrap().file_name().to_str()?.parse().ok()).collect()
}

/// Runs `crowd` as the init of a namespace, which tells when it is complete; then enumerates, kills and looks for what is left.
fn in_namespace(crowd: impl FnOnce(), processes: usize) {
    let before = pids();
    let (ready, tell) = pipe();
    let init = clone(libc::CLONE_NEWPID as u64, || {
        crowd();
        // Everybody but the sender and the init, and the sender's own group.
        let sender = fork(|| i32::from(unsafe { libc::kill(-1, 0) } != if processes > 1 { 0 } else { -1 }));
        assert_eq!(wait(sender), 0);
        write_byte(tell);
        loop {
            unsafe { libc::pause() };
        }
    })
    .unwrap();
    // A listing while the crowd grows shows each process once at most, in order.
    let growing = pids();
    assert!(growing.is_sorted_by(|a, b| a < b), "{growing:?}");
    read_byte(ready);
    let complete = pids();
    assert!(complete.is_sorted_by(|a, b| a < b));
    let fresh: Vec<i32> = complete.into_iter().filter(|pid| !before.contains(pid)).collect();
    assert!(fresh.len() >= processes, "{} of {processes}", fresh.len());
    unsafe { libc::kill(init, libc::SIGKILL) };
    let status = wait(init);
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
    let left = pids();
    let inside = |pid: &&i32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let numbers = status.lines().find_map(|l| l.strip_prefix("NSpid:")).unwrap_or_default();
        left.contains(pid) && numbers.split_whitespace().count() > 1
    };
    assert_eq!(fresh.iter().find(inside), None);
}

fn threads() {
    let n = scaled(16_384);
    in_namespace(
        || {
            sleepers(n);
            let status = std::fs::read_to_string("/proc/thread-self/status");
            // The mount of /proc is the outer namespace's; the thread is seen there.
            assert!(status.unwrap().contains(&format!("Threads:\t{}\n", n + 1)));
        },
        1,
    );
}

fn family(processes: u32, threads: u32) {
    let (ready, tell) = pipe();
    for _ in 0..processes {
        fork(|| {
            sleepers(threads);
            write_byte(tell);
            loop {
                unsafe { libc::pause() };
            }
        });
    }
    (0..processes).for_each(|_| read_byte(ready));
}

fn processes() {
    let n = scaled(4096);
    in_namespace(|| family(n, 0), n as usize + 1);
}

fn both() {
    let (processes, threads) = (scaled(640) / 10, scaled(2560) / 10);
    in_namespace(|| family(processes, threads), processes as usize + 1);
}

fn exec() {
    let n = scaled(16_384);
    let pid = fork(|| {
        sleepers(n);
        let own = format!("test $$ = {} && exit 19", unsafe { libc::getpid() });
        let script = std::ffi::CString::new(own).unwrap();
        let by_thread = thread::spawn(move || {
            let argv = [c"sh".as_ptr(), c"-c".as_ptr(), script.as_ptr(), std::ptr::null()];
            unsafe { libc::execv(c"/bin/sh".as_ptr(), argv.as_ptr()) };
        });
        by_thread.join().unwrap();
        1
    });
    let status = wait(pid);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 19, "{status:#x}");
}
