//! Clocks, sleeping, CPU time.
use std::time::{Duration, Instant};

use super::Case;
use super::sys::{call, ok};

pub const CASES: &[Case] = &[
    ("clock_monotonic_advances", monotonic),
    ("clock_syscall_agrees", agrees),
    ("clock_realtime_sane", realtime),
    ("clock_errors", errors),
    ("sleep_lasts", sleeps),
    ("sleep_absolute", absolute),
    ("cpu_clocks", cpu),
    ("getcpu_valid", getcpu),
    ("vdso_has_symbols", vdso),
];

fn clock(id: i32) -> Duration {
    let mut t: libc::timespec = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::clock_gettime(id, &raw mut t) }, 0);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

fn clock_by_call(id: i32) -> Duration {
    let mut t: libc::timespec = unsafe { std::mem::zeroed() };
    assert_eq!(call(libc::SYS_clock_gettime, [id as u64, (&raw mut t) as u64, 0, 0, 0, 0]), Ok(0));
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

fn monotonic() {
    let mut last = clock(libc::CLOCK_MONOTONIC);
    for i in 0..20_000 {
        let now = if i % 50 == 0 { clock_by_call(libc::CLOCK_MONOTONIC) } else { clock(libc::CLOCK_MONOTONIC) };
        assert!(now >= last, "{now:?} after {last:?}");
        last = now;
    }
}

fn agrees() {
    for id in [
        libc::CLOCK_REALTIME,
        libc::CLOCK_MONOTONIC,
        libc::CLOCK_MONOTONIC_RAW,
        libc::CLOCK_BOOTTIME,
        libc::CLOCK_REALTIME_COARSE,
        libc::CLOCK_MONOTONIC_COARSE,
    ] {
        let (a, b, c) = (clock(id), clock_by_call(id), clock(id));
        let slack = Duration::from_millis(20);
        assert!(a <= b + slack && b <= c + slack, "clock {id}: {a:?} {b:?} {c:?}");
        assert!(c.checked_sub(a).unwrap() < Duration::from_secs(5));
    }
}

fn realtime() {
    let now = clock(libc::CLOCK_REALTIME).as_secs();
    assert!((1_700_000_000..10_000_000_000).contains(&now));
    assert!(unsafe { libc::time(std::ptr::null_mut()) } as u64 >= now);
    let mut tv: libc::timeval = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::gettimeofday(&raw mut tv, std::ptr::null_mut()) }, 0);
    assert!(tv.tv_sec as u64 >= now && tv.tv_usec < 1_000_000);
}

fn errors() {
    let mut t: libc::timespec = unsafe { std::mem::zeroed() };
    assert_eq!(ok(unsafe { libc::clock_gettime(99, &raw mut t) }), Err(libc::EINVAL));
    t.tv_nsec = 1_000_000_000;
    assert_eq!(ok(unsafe { libc::nanosleep(&raw const t, std::ptr::null_mut()) }), Err(libc::EINVAL));
    t.tv_nsec = 0;
    t.tv_sec = -1;
    assert_eq!(ok(unsafe { libc::nanosleep(&raw const t, std::ptr::null_mut()) }), Err(libc::EINVAL));
    assert_eq!(unsafe { libc::clock_getres(libc::CLOCK_MONOTONIC, &raw mut t) }, 0);
    assert_eq!((t.tv_sec, t.tv_nsec), (0, 1));
}

fn sleeps() {
    for ms in [1, 10, 50] {
        let start = Instant::now();
        std::thread::sleep(Duration::from_millis(ms));
        assert!(start.elapsed() >= Duration::from_millis(ms));
    }
}

fn absolute() {
    let at = clock(libc::CLOCK_MONOTONIC) + Duration::from_millis(20);
    let t = libc::timespec { tv_sec: at.as_secs() as i64, tv_nsec: i64::from(at.subsec_nanos()) };
    let absolute = libc::TIMER_ABSTIME;
    assert_eq!(
        unsafe { libc::clock_nanosleep(libc::CLOCK_MONOTONIC, absolute, &raw const t, std::ptr::null_mut()) },
        0
    );
    assert!(clock(libc::CLOCK_MONOTONIC) >= at);
}

fn cpu() {
    let (p, t) = (clock(libc::CLOCK_PROCESS_CPUTIME_ID), clock(libc::CLOCK_THREAD_CPUTIME_ID));
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(40) {
        std::hint::spin_loop();
    }
    let (dp, dt) = (
        clock(libc::CLOCK_PROCESS_CPUTIME_ID).checked_sub(p).unwrap(),
        clock(libc::CLOCK_THREAD_CPUTIME_ID).checked_sub(t).unwrap(),
    );
    assert!(dt > Duration::from_millis(5) && dt <= dp + Duration::from_millis(1), "{dt:?} {dp:?}");
    assert!(dp < Duration::from_secs(20));
    // A busy machine may take the CPU away from the few instructions around the sleep, and that may count.
    let cheap = (0..5).any(|_| {
        let before = clock(libc::CLOCK_THREAD_CPUTIME_ID);
        std::thread::sleep(Duration::from_millis(100));
        clock(libc::CLOCK_THREAD_CPUTIME_ID).checked_sub(before).unwrap() < Duration::from_millis(50)
    });
    assert!(cheap, "sleeping costs no CPU time");
}

fn getcpu() {
    let n = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
    for _ in 0..100 {
        let cpu = unsafe { libc::sched_getcpu() };
        assert!((0..n as i32).contains(&cpu), "{cpu} of {n}");
    }
}

fn vdso() {
    let base = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
    assert_ne!(base, 0);
    assert_eq!(unsafe { std::slice::from_raw_parts(base as *const u8, 4) }, b"\x7fELF");
    for name in [c"__vdso_clock_gettime", c"__vdso_gettimeofday", c"__vdso_time", c"__vdso_getcpu"] {
        let handle = unsafe { libc::dlopen(c"linux-vdso.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        assert!(!handle.is_null());
        assert!(!unsafe { libc::dlsym(handle, name.as_ptr()) }.is_null(), "{name:?}");
    }
}
