//! Rows of single system calls on files, pipes and clocks, and of starting a program.
use super::raw::make_pipe;
use super::{Row, Unit, looped, per, times};
use std::time::Instant;

pub const ROWS: &[Row] = &[
    Row::outside("start", "start, run true, exit (wall)", Unit::Time, |system| {
        system.run(&["/bin/true"]).map(|done| done.wall_ns)
    }),
    Row::inside("getppid", "getppid", 5000, getppid),
    Row::inside("clock_gettime", "clock_gettime", 5000, clock_gettime),
    Row::inside("read_zero", "read 1 byte of /dev/zero", 5000, read_zero),
    Row::inside("pipe", "pipe write + read, one thread", 3000, pipe),
    Row::inside("open_read_close", "open + read + close of a small file", 1000, open_read_close),
    Row::inside("stat", "stat of a path of four components", 2000, stat),
    Row::inside("compute", "integer and floating-point work, 1 s natively", 0, compute).slow(),
];

fn getppid() -> f64 {
    looped(|| unsafe {
        libc::syscall(libc::SYS_getppid);
    })
}

fn clock_gettime() -> f64 {
    let n = times(200_000);
    let start = Instant::now();
    let mut t: libc::timespec = unsafe { std::mem::zeroed() };
    for _ in 0..n {
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut t) };
    }
    per(start, n)
}

fn read_zero() -> f64 {
    let fd = unsafe { libc::open(c"/dev/zero".as_ptr(), libc::O_RDONLY) };
    let mut b = [0_u8];
    looped(|| unsafe {
        libc::read(fd, b.as_mut_ptr().cast(), 1);
    })
}

fn pipe() -> f64 {
    let fds = make_pipe();
    let mut b = [0_u8];
    looped(|| unsafe {
        libc::write(fds[1], b.as_ptr().cast(), 1);
        libc::read(fds[0], b.as_mut_ptr().cast(), 1);
    })
}

fn open_read_close() -> f64 {
    let mut b = [0_u8; 64];
    looped(|| unsafe {
        let fd = libc::open(c"/etc/hostname".as_ptr(), libc::O_RDONLY);
        libc::read(fd, b.as_mut_ptr().cast(), 64);
        libc::close(fd);
    })
}

fn stat() -> f64 {
    let mut st: libc::stat = unsafe { std::mem::zeroed() };
    looped(|| unsafe {
        libc::stat(c"/usr/share/doc/bash/copyright".as_ptr(), &raw mut st);
    })
}

fn compute() -> f64 {
    let start = Instant::now();
    let (mut x, mut f) = (1_u64, 1.0_f64);
    for i in 0..150_000_000_u64 {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(i);
        f = f.mul_add(1.000_000_1, 1e-9);
    }
    std::hint::black_box((x, f));
    start.elapsed().as_nanos() as f64
}
