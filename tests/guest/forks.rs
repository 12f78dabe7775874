//! Large memory across fork(2): what each side sees after either changed it, in every way in which memory changes.
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::Case;
use super::sys::{fork, in_child, killed_by, map, ok, pipe, read_byte, wait, write_byte};

pub const CASES: &[Case] = &[
    ("forks_each_side_writes", each_side_writes),
    ("forks_parent_changes_first", parent_changes_first),
    ("forks_nested", nested),
    ("forks_outlive_their_parent", outlive),
    ("forks_while_threads_write", while_threads_write),
    ("forks_change_ranges", change_ranges),
    ("forks_advise", advise),
    ("forks_move", moved),
    ("forks_mixed_shared", mixed_shared),
    ("forks_read_by_calls", read_by_calls),
];

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const PAGE: usize = 4096;
/// A few 2 MiB tables, with parts of one at both ends.
const PAGES: usize = 512 * 4 + 100;

/// Memory in which every page holds a number of its own.
struct Pages(*mut u8);
// SAFETY: threads write to words of their own.
unsafe impl Send for Pages {}

impl Pages {
    fn new() -> Pages {
        let pages = Pages(map(PAGES * PAGE, RW));
        (0..PAGES).for_each(|i| pages.set(i, i as u64));
        pages
    }

    fn word(&self, page: usize) -> *mut u64 {
        unsafe { self.0.add(page * PAGE).cast() }
    }

    fn get(&self, page: usize) -> u64 {
        unsafe { self.word(page).read_volatile() }
    }

    fn set(&self, page: usize, value: u64) {
        unsafe { self.word(page).write_volatile(value) }
    }

    /// That every page holds its number plus what `plus` says.
    fn check(&self, plus: impl Fn(usize) -> u64) {
        for i in 0..PAGES {
            assert_eq!(self.get(i), (i as u64).wrapping_add(plus(i)), "page {i}");
        }
    }
}

fn each_side_writes() {
    let p = Pages::new();
    for round in 0..4u64 {
        let pid = fork(|| {
            p.check(|i| if i % 7 == 0 { round } else { 0 });
            (0..PAGES).step_by(3).for_each(|i| p.set(i, i as u64 + 1000));
            p.check(|i| if i % 3 == 0 { 1000 } else { u64::from(i % 7 == 0) * round });
            0
        });
        (0..PAGES).step_by(7).for_each(|i| p.set(i, i as u64 + round + 1));
        assert_eq!(wait(pid), 0);
        p.check(|i| if i % 7 == 0 { round + 1 } else { 0 });
    }
}

/// A child that looks at everything only after its parent has written, and then a second one.
fn parent_changes_first() {
    let p = Pages::new();
    let (from, to) = pipe();
    let see = |plus: u64| {
        read_byte(from);
        p.check(|_| plus);
        (0..PAGES).for_each(|i| p.set(i, i as u64 + 50));
        p.check(|_| 50);
        0
    };
    let first = fork(|| see(0));
    (0..PAGES).for_each(|i| p.set(i, i as u64 + 1));
    let second = fork(|| see(1));
    (0..PAGES).rev().for_each(|i| p.set(i, i as u64 + 2));
    write_byte(to);
    write_byte(to);
    assert_eq!((wait(first), wait(second)), (0, 0));
    p.check(|_| 2);
}

fn nested() {
    let p = Pages::new();
    in_child(|| {
        // Not looked at by this process before it forks again.
        in_child(|| {
            (0..PAGES).step_by(2).for_each(|i| p.set(i, i as u64 + 9));
            in_child(|| {
                p.check(|i| if i % 2 == 0 { 9 } else { 0 });
                p.set(5, 0);
            });
            p.check(|i| if i % 2 == 0 { 9 } else { 0 });
        });
        p.check(|_| 0);
        p.set(513, 0);
    });
    p.check(|_| 0);
}

/// The parent dies, or gives its memory up, before the child has looked.
fn outlive() {
    let p = Pages::new();
    let (from, to) = pipe();
    let (done, answer) = pipe();
    in_child(|| {
        fork(|| {
            read_byte(from);
            p.check(|_| 0);
            (0..PAGES).for_each(|i| p.set(i, 1));
            write_byte(answer);
            0
        });
    });
    write_byte(to);
    read_byte(done);
    let pid = fork(|| {
        read_byte(from);
        p.check(|_| 0);
        0
    });
    assert_eq!(unsafe { libc::munmap(p.0.cast(), PAGES * PAGE) }, 0);
    write_byte(to);
    assert_eq!(wait(pid), 0);
}

fn while_threads_write() {
    static STOP: AtomicBool = AtomicBool::new(false);
    let p = Pages::new();
    let writers: Vec<_> = (1..=2)
        .map(|thread| {
            let mine = Pages(p.0);
            thread::spawn(move || {
                let mine = mine;
                let mut n = 0;
                while !STOP.load(Ordering::SeqCst) {
                    n += 1;
                    for i in (0..PAGES).step_by(37) {
                        unsafe { mine.word(i).add(thread).write_volatile(n) };
                        assert_eq!(unsafe { mine.word(i).add(thread).read_volatile() }, n);
                    }
                }
            })
        })
        .collect();
    for _ in 0..10 {
        in_child(|| {
            p.check(|_| 0);
            // Nobody writes here now: what is seen stays.
            let all = |thread: usize| (0..PAGES).map(|i| unsafe { p.word(i).add(thread).read_volatile() }).collect();
            let before: [Vec<u64>; 2] = [all(1), all(2)];
            (0..PAGES).step_by(61).for_each(|i| p.set(i, i as u64));
            thread::yield_now();
            assert_eq!(before, [all(1), all(2)]);
        });
    }
    STOP.store(true, Ordering::SeqCst);
    writers.into_iter().for_each(|w| w.join().unwrap());
    p.check(|_| 0);
}

fn change_ranges() {
    let p = Pages::new();
    let half = PAGES / 2;
    let protect = |from: usize, pages: usize, prot: i32| {
        assert_eq!(unsafe { libc::mprotect(p.word(from).cast(), pages * PAGE, prot) }, 0);
    };
    // The child gives half of it up and keeps the other.
    let pid = fork(|| {
        assert_eq!(unsafe { libc::munmap(p.word(half).cast(), (PAGES - half) * PAGE) }, 0);
        killed_by(libc::SIGSEGV, || p.set(half, 1));
        (0..half).for_each(|i| assert_eq!(p.get(i), i as u64));
        p.set(half - 1, 3);
        0
    });
    protect(100, 1000, libc::PROT_READ);
    killed_by(libc::SIGSEGV, || p.set(100, 1));
    killed_by(libc::SIGSEGV, || p.set(1099, 1));
    in_child(|| {
        p.set(99, 1);
        p.set(1100, 1);
        protect(100, 1000, RW);
        p.set(100, 1);
        p.set(1099, 1);
    });
    protect(100, 1000, libc::PROT_NONE);
    killed_by(libc::SIGSEGV, || {
        p.get(700);
    });
    protect(100, 1000, RW);
    assert_eq!(wait(pid), 0);
    p.check(|_| 0);
    // The parent gives half up while the child keeps it.
    let (from, to) = pipe();
    let pid = fork(|| {
        read_byte(from);
        p.check(|_| 0);
        0
    });
    let (first, len) = (300, 900);
    assert_eq!(unsafe { libc::munmap(p.word(first).cast(), len * PAGE) }, 0);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let again = unsafe { libc::mmap(p.word(first).cast(), len * PAGE, RW, flags, -1, 0) };
    assert_eq!(again, p.word(first).cast());
    for i in 0..PAGES {
        assert_eq!(p.get(i), if (first..first + len).contains(&i) { 0 } else { i as u64 });
    }
    write_byte(to);
    assert_eq!(wait(pid), 0);
}

fn advise() {
    let p = Pages::new();
    let advise = |from: usize, pages: usize, advice: i32| {
        assert_eq!(unsafe { libc::madvise(p.word(from).cast(), pages * PAGE, advice) }, 0);
    };
    in_child(|| {
        advise(600, 600, libc::MADV_DONTNEED);
        for i in 0..PAGES {
            assert_eq!(p.get(i), if (600..1200).contains(&i) { 0 } else { i as u64 });
        }
    });
    let (from, to) = pipe();
    let pid = fork(|| {
        read_byte(from);
        p.check(|_| 0);
        0
    });
    advise(600, 600, libc::MADV_DONTNEED);
    assert_eq!((p.get(599), p.get(600), p.get(1200)), (599, 0, 1200));
    write_byte(to);
    assert_eq!(wait(pid), 0);
    (600..1200).for_each(|i| p.set(i, i as u64));
    in_child(|| p.check(|_| 0));
    advise(512, 512, libc::MADV_DONTFORK);
    killed_by(libc::SIGSEGV, || {
        p.get(512);
    });
    in_child(|| assert_eq!((p.get(511), p.get(1024)), (511, 1024)));
    advise(512, 512, libc::MADV_DOFORK);
    advise(512, 512, libc::MADV_WIPEONFORK);
    in_child(|| {
        for i in 0..PAGES {
            assert_eq!(p.get(i), if (512..1024).contains(&i) { 0 } else { i as u64 });
        }
    });
    advise(512, 512, libc::MADV_KEEPONFORK);
    in_child(|| p.check(|_| 0));
}

fn moved() {
    let p = Pages::new();
    let shift = |p: &Pages| {
        let to = map((PAGES + 1) * PAGE, libc::PROT_NONE);
        let to = unsafe { to.add(PAGE) };
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let at = unsafe { libc::mremap(p.0.cast(), PAGES * PAGE, PAGES * PAGE, flags, to) };
        assert_eq!(at, to.cast());
        Pages(to)
    };
    in_child(|| {
        let q = shift(&p);
        q.check(|_| 0);
        q.set(1, 7);
        in_child(|| assert_eq!(q.get(1), 7));
    });
    let (from, to) = pipe();
    let pid = fork(|| {
        read_byte(from);
        p.check(|_| 0);
        0
    });
    let q = shift(&p);
    (0..PAGES).for_each(|i| q.set(i, i as u64 + 1));
    write_byte(to);
    assert_eq!(wait(pid), 0);
    in_child(|| q.check(|_| 1));
}

/// Shared pages among private ones, all in the same tables.
fn mixed_shared() {
    let p = Pages::new();
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    for i in (64..PAGES).step_by(128) {
        assert_eq!(unsafe { libc::mmap(p.word(i).cast(), PAGE, RW, flags, -1, 0) }, p.word(i).cast());
        p.set(i, i as u64);
    }
    let shared = |i: usize| i >= 64 && (i - 64).is_multiple_of(128);
    for round in 1..4 {
        let pid = fork(|| {
            p.check(|i| if shared(i) { round - 1 } else { 0 });
            (0..PAGES).for_each(|i| p.set(i, i as u64 + round));
            0
        });
        assert_eq!(wait(pid), 0);
        p.check(|i| if shared(i) { round } else { 0 });
    }
}

/// System calls that read and write what the child has not touched yet.
fn read_by_calls() {
    let p = Pages::new();
    in_child(|| {
        let (from, to) = pipe();
        let bytes = 3 * PAGE;
        let at = |page: usize| p.word(page).cast();
        assert_eq!(ok(unsafe { libc::write(to, at(700), bytes) } as i64), Ok(bytes as i64));
        assert_eq!(ok(unsafe { libc::read(from, at(1400), bytes) } as i64), Ok(bytes as i64));
        (0..3).for_each(|i| assert_eq!((p.get(1400 + i), p.get(700 + i)), (700 + i as u64, 700 + i as u64)));
        p.check(|i| if (1400..1403).contains(&i) { 0u64.wrapping_sub(700) } else { 0 });
    });
    p.check(|_| 0);
}
