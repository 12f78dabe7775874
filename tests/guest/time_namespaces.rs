//! Time namespaces: offsets of the monotonic and the boot-time clock. Root only.
use std::fs::{read_to_string, write};
use std::os::fd::AsRawFd;

use super::Case;
use super::namespaces::{link, open, setns_call, unshare};
use super::sys::{call, errno, fork, in_child, pipe, read_byte, wait, write_byte};

/// The cases of this area.
pub const CASES: &[Case] = &[("timens_clocks", clocks), ("timens_rules", rules), ("timens_bad_offsets", bad_offsets)];

const NEWTIME: u64 = 0x80;
const DAY: i64 = 86_400;

/// Seconds by the C library, which asks the vDSO.
fn seconds(clock: i32) -> i64 {
    let mut t: libc::timespec = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::clock_gettime(clock, &raw mut t) }, 0);
    t.tv_sec
}

fn by_call(clock: i32) -> i64 {
    let mut t: libc::timespec = unsafe { std::mem::zeroed() };
    call(libc::SYS_clock_gettime, [clock as u64, &raw mut t as u64, 0, 0, 0, 0]).unwrap();
    t.tv_sec
}

fn put(text: &str) -> Result<(), i32> {
    write("/proc/self/timens_offsets", text).map_err(|e| e.raw_os_error().unwrap_or(0))
}

fn ahead(of: i64, now: i64) -> i64 {
    (now - of + 1800) / 3600 * 3600
}

fn clocks() {
    in_child(|| {
        let (mono, boot, real) =
            (seconds(libc::CLOCK_MONOTONIC), seconds(libc::CLOCK_BOOTTIME), seconds(libc::CLOCK_REALTIME));
        unshare(NEWTIME).unwrap();
        put(&format!("monotonic {DAY} 0\nboottime {} 500000000\n", 7 * DAY)).unwrap();
        let text = read_to_string("/proc/self/timens_offsets").unwrap();
        let words: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(words, ["monotonic", "86400", "0", "boottime", "604800", "500000000"]);
        assert_eq!(ahead(mono, seconds(libc::CLOCK_MONOTONIC)), 0, "only children live by it");
        in_child(|| {
            for clock in [libc::CLOCK_MONOTONIC, libc::CLOCK_MONOTONIC_RAW, libc::CLOCK_MONOTONIC_COARSE] {
                assert_eq!(ahead(mono, seconds(clock)), DAY, "{clock}");
                assert_eq!(ahead(mono, by_call(clock)), DAY, "{clock}");
            }
            assert_eq!(ahead(boot, seconds(libc::CLOCK_BOOTTIME)), 7 * DAY);
            assert_eq!(ahead(real, seconds(libc::CLOCK_REALTIME)), 0);
            let uptime: f64 = read_to_string("/proc/uptime").unwrap().split('.').next().unwrap().parse().unwrap();
            assert!(uptime as i64 >= 7 * DAY);
            // Points in time are those of the namespace: this one is past, and that one near.
            let sleep = |clock: i32, sec: i64, nsec: i64| {
                let t = libc::timespec { tv_sec: sec, tv_nsec: nsec };
                unsafe { libc::clock_nanosleep(clock, libc::TIMER_ABSTIME, &raw const t, std::ptr::null_mut()) }
            };
            assert_eq!(sleep(libc::CLOCK_MONOTONIC, mono + DAY, 0), 0);
            assert_eq!(sleep(libc::CLOCK_BOOTTIME, seconds(libc::CLOCK_BOOTTIME) + 1, 0), 0);
            let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_NONBLOCK) };
            let mut spec: libc::itimerspec = unsafe { std::mem::zeroed() };
            spec.it_value.tv_sec = seconds(libc::CLOCK_MONOTONIC) - 1;
            assert_eq!(unsafe { libc::timerfd_settime(fd, 1, &raw const spec, std::ptr::null_mut()) }, 0);
            let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            assert_eq!(unsafe { libc::poll(&raw mut p, 1, 10_000) }, 1);
            let mut count = 0_u64;
            assert_eq!(unsafe { libc::read(fd, (&raw mut count).cast(), 8) }, 8, "{}", errno());
            spec.it_value.tv_sec += 3600;
            assert_eq!(unsafe { libc::timerfd_settime(fd, 1, &raw const spec, std::ptr::null_mut()) }, 0);
            assert_eq!(unsafe { libc::read(fd, (&raw mut count).cast(), 8) }, -1);
            // A thread and a program live by it, too.
            std::thread::spawn(move || assert_eq!(ahead(mono, seconds(libc::CLOCK_MONOTONIC)), DAY)).join().unwrap();
            let out = std::process::Command::new("cat").arg("/proc/uptime").output().unwrap().stdout;
            assert!(String::from_utf8(out).unwrap().split('.').next().unwrap().parse::<i64>().unwrap() >= 7 * DAY);
            assert_eq!(put("monotonic 5 0"), Err(libc::EACCES));
        });
        assert_eq!(put("monotonic 5 0"), Err(libc::EACCES), "somebody has lived by it");
    });
}

fn rules() {
    let before = link("/proc/self/ns/time");
    let (r, w) = pipe();
    let (r2, w2) = pipe();
    let child = fork(|| {
        unshare(NEWTIME).unwrap();
        assert_eq!(link("/proc/self/ns/time"), before);
        assert_ne!(link("/proc/self/ns/time_for_children"), before);
        put("boottime 1000000 0").unwrap();
        in_child(|| {
            assert_ne!(link("/proc/self/ns/time"), before);
            assert_eq!(link("/proc/self/ns/time"), link("/proc/self/ns/time_for_children"));
        });
        write_byte(w2);
        read_byte(r);
        0
    });
    read_byte(r2);
    let ns = open(&format!("/proc/{child}/ns/time_for_children"));
    let own = open("/proc/self/ns/time");
    in_child(|| {
        let boot = seconds(libc::CLOCK_BOOTTIME);
        setns_call(ns.as_raw_fd(), NEWTIME).unwrap();
        assert!(seconds(libc::CLOCK_BOOTTIME) >= boot + 1_000_000);
        setns_call(own.as_raw_fd(), NEWTIME).unwrap();
        assert!(seconds(libc::CLOCK_BOOTTIME) < boot + 1_000_000);
    });
    let fd = ns.as_raw_fd();
    std::thread::spawn(move || assert_eq!(setns_call(fd, NEWTIME), Err(libc::EUSERS))).join().unwrap();
    in_child(|| {
        unsafe { assert_eq!(libc::setresuid(1000, 1000, 1000), 0) };
        assert_eq!(unshare(NEWTIME), Err(libc::EPERM));
        assert_eq!(setns_call(fd, NEWTIME), Err(libc::EPERM));
    });
    write_byte(w);
    assert_eq!(wait(child), 0);
}

fn bad_offsets() {
    in_child(|| {
        assert_eq!(put("monotonic 1 0"), Err(libc::EACCES), "its own clocks");
        unshare(NEWTIME).unwrap();
        for bad in [
            "",
            "x",
            "monotonic",
            "monotonic 1",
            "monotonic 1 1000000000",
            "monotonic 1 -1",
            "realtime 1 0",
            "monotonic x 0",
        ] {
            let r = put(bad);
            assert!(bad.is_empty() || r == Err(libc::EINVAL), "{bad:?}: {r:?}");
        }
        let now = seconds(libc::CLOCK_MONOTONIC);
        assert_eq!(put(&format!("monotonic {} 0", -now - 100_000)), Err(libc::ERANGE));
        assert_eq!(put("monotonic 9000000000 0"), Err(libc::ERANGE));
        assert_eq!(put("boottime -1 0"), Ok(()));
    });
}
