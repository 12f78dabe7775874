//! Rows of crowds: 16,384 threads, 4,096 processes, 64 times 256; made, listed, signalled and killed.
use std::io::Error;
use std::time::Instant;

use super::raw::{Crowd, fork, in_own_namespace, make_pipe, read_byte, wait, write_byte};
use super::{Row, looped, times};

pub const ROWS: &[Row] = &[
    Row::inside("pthreads_16384", "16,384 threads created (pthread)", 256, pthreads_16384).slow(),
    Row::inside("threads_16384", "16,384 threads created (clone)", 256, threads_16384).slow(),
    Row::inside("processes_4096", "4,096 processes created, then killed", 64, || families(times(4096), 0)).slow(),
    Row::inside("groups_64x256", "64 processes of 256 threads created, then killed", 2048, || {
        families(times(16_384) / 256, 255)
    })
    .slow(),
    Row::inside("death_16384", "death of a PID namespace with 16,384 threads", 256, || death(times(16_384))).slow(),
    Row::inside("list_proc_1", "list /proc, one thread beside", 300, || list_proc(1)),
    Row::inside("list_proc", "list /proc, 1,024 threads in one process", 0, || list_proc(1024)),
    Row::inside("list_proc_16384", "list /proc, 16,384 threads in one process", 0, || list_proc(16_384)).slow(),
    Row::inside("list_own_proc_1", "the same in a PID namespace of its own, one thread beside", 300, || {
        in_own_namespace(|| list_proc(1))
    }),
    Row::inside("list_own_proc_16384", "the same in a PID namespace of its own, 16,384 threads", 0, || {
        in_own_namespace(|| list_proc(16_384))
    })
    .slow(),
    Row::inside("kill_all_1", "kill(-1, 0), one thread beside", 500, || kill_all(1)),
    Row::inside("kill_all", "kill(-1, 0), 1,024 threads in one process", 0, || kill_all(1024)),
    Row::inside("kill_all_16384", "kill(-1, 0), 16,384 threads in one process", 0, || kill_all(16_384)).slow(),
    Row::inside("kill_own_1", "the same in a PID namespace of its own, one thread beside", 500, || {
        in_own_namespace(|| kill_all(1))
    }),
    Row::inside("kill_own_16384", "the same in a PID namespace of its own, 16,384 threads", 0, || {
        in_own_namespace(|| kill_all(16_384))
    })
    .slow(),
];

/// What a pthread waits on.
struct Gate {
    mutex: libc::pthread_mutex_t,
    condition: libc::pthread_cond_t,
    open: bool,
}

extern "C" fn wait_at_gate(gate: *mut libc::c_void) -> *mut libc::c_void {
    let gate: *mut Gate = gate.cast();
    unsafe {
        libc::pthread_mutex_lock(&raw mut (*gate).mutex);
        while !(*gate).open {
            libc::pthread_cond_wait(&raw mut (*gate).condition, &raw mut (*gate).mutex);
        }
        libc::pthread_mutex_unlock(&raw mut (*gate).mutex);
    }
    std::ptr::null_mut()
}

/// As a C program makes them: a mapping and a guard page each.
fn pthreads_16384() -> f64 {
    let gate = Box::into_raw(Box::new(Gate {
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        condition: libc::PTHREAD_COND_INITIALIZER,
        open: false,
    }));
    let n = times(16_384);
    let mut threads: Vec<libc::pthread_t> = vec![0; n as usize];
    let start = Instant::now();
    unsafe {
        let mut attr: libc::pthread_attr_t = std::mem::zeroed();
        libc::pthread_attr_init(&raw mut attr);
        libc::pthread_attr_setstacksize(&raw mut attr, 32 << 10);
        for (i, t) in threads.iter_mut().enumerate() {
            let error = libc::pthread_create(t, &raw const attr, wait_at_gate, gate.cast());
            assert_eq!(error, 0, "pthread_create of thread {i}: {}", Error::from_raw_os_error(error));
        }
    }
    let created = start.elapsed().as_nanos() as f64;
    unsafe {
        libc::pthread_mutex_lock(&raw mut (*gate).mutex);
        (*gate).open = true;
        libc::pthread_cond_broadcast(&raw mut (*gate).condition);
        libc::pthread_mutex_unlock(&raw mut (*gate).mutex);
        threads.into_iter().for_each(|t| assert_eq!(libc::pthread_join(t, std::ptr::null_mut()), 0));
    }
    created
}

fn threads_16384() -> f64 {
    let start = Instant::now();
    let crowd = Crowd::new(times(16_384));
    let created = start.elapsed().as_nanos() as f64;
    crowd.end();
    created
}

fn list_proc(threads: u32) -> f64 {
    let crowd = Crowd::new(threads);
    let figure = looped(|| {
        let n = std::fs::read_dir("/proc").map_or(0, Iterator::count);
        assert!(n > 0);
    });
    crowd.end();
    figure
}

fn kill_all(threads: u32) -> f64 {
    let crowd = Crowd::new(threads);
    let figure = looped(|| unsafe {
        libc::kill(-1, 0);
    });
    crowd.end();
    figure
}

fn sleep_for_ever() -> ! {
    loop {
        unsafe { libc::pause() };
    }
}

/// Time to make processes of one thread and `more` each, to kill and to reap them.
fn families(processes: u32, more: u32) -> f64 {
    let [ready, tell] = make_pipe();
    let start = Instant::now();
    let member = || {
        fork(|| {
            let _crowd = (more > 0).then(|| Crowd::new(more));
            write_byte(tell);
            sleep_for_ever()
        })
    };
    let pids: Vec<i32> = (0..processes).map(|_| member()).collect();
    pids.iter().for_each(|_| read_byte(ready));
    for pid in &pids {
        unsafe { libc::kill(*pid, libc::SIGKILL) };
    }
    pids.into_iter().for_each(wait);
    start.elapsed().as_nanos() as f64
}

/// Time from the kill of a namespace's init, a process of `threads`, to its end.
fn death(threads: u32) -> f64 {
    let [ready, tell] = make_pipe();
    let made = unsafe { libc::unshare(libc::CLONE_NEWPID) };
    assert_eq!(made, 0, "unshare: {}", Error::last_os_error());
    let init = fork(|| {
        let member = fork(|| {
            let _crowd = Crowd::new(threads);
            write_byte(tell);
            sleep_for_ever()
        });
        wait(member);
        0
    });
    read_byte(ready);
    let start = Instant::now();
    unsafe { libc::kill(init, libc::SIGKILL) };
    wait(init);
    start.elapsed().as_nanos() as f64
}
