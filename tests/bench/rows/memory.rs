//! Rows of memory: first touch, mappings, and forks of a process that has touched much.
use std::time::Instant;

use super::raw::{fork, map, touch, wait};
use super::{Row, looped, per, times};

pub const ROWS: &[Row] = &[
    Row::inside("first_touch", "first touch of a page, 64 MiB", 16_384, first_touch),
    Row::inside("mmap_munmap", "mmap 64 KiB, touch one page, munmap", 500, mmap_munmap),
    Row::inside("fork_wait", "fork + exit + wait, 64 MiB touched", 20, || forks(|| 0)),
    Row::inside("fork_wait_small", "fork + exit + wait, nothing touched", 20, || forks_of(0, || 0)),
    Row::inside("fork_exec", "fork + exec + wait, 64 MiB touched", 20, || forks(exec_true)),
];

fn first_touch() -> f64 {
    let pages = times(16_384);
    let len = pages as usize * 4096;
    let p = map(len);
    let start = Instant::now();
    touch(p, len);
    per(start, pages)
}

fn mmap_munmap() -> f64 {
    looped(|| {
        let p = map(64 << 10);
        unsafe {
            p.write_volatile(1);
            libc::munmap(p.cast(), 64 << 10);
        }
    })
}

fn exec_true() -> i32 {
    let argv = [c"true".as_ptr(), std::ptr::null()];
    unsafe { libc::execv(c"/bin/true".as_ptr(), argv.as_ptr()) };
    1
}

fn forks(child: fn() -> i32) -> f64 {
    forks_of(64 << 20, child)
}

fn forks_of(touched: usize, child: fn() -> i32) -> f64 {
    if touched > 0 {
        touch(map(touched), touched);
    }
    let n = times(50);
    let start = Instant::now();
    for _ in 0..n {
        wait(fork(child));
    }
    per(start, n)
}
