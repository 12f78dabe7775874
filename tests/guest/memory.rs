//! mmap(2) and its family, copy-on-write, faults.
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Case;
use super::sys::{call, errno, fork, handle, in_child, killed_by, map, ok, wait};

pub const CASES: &[Case] = &[
    ("mmap_zeroed", zeroed),
    ("mmap_errors", errors),
    ("munmap_hole", hole),
    ("mprotect_faults", protect),
    ("mprotect_split", split),
    ("mremap_moves", remap),
    ("fork_cow", cow),
    ("fork_shared_anonymous", shared_anonymous),
    ("mmap_file_private", file_private),
    ("mmap_file_shared", file_shared),
    ("mmap_truncated_sigbus", truncated),
    ("madvise_dontneed", dontneed),
    ("brk_grows", brk),
    ("stack_grows", stack),
    ("mincore_residency", mincore),
    ("efault_everywhere", efault),
    ("execute_written_code", jit),
    ("mmap_many", many),
    ("mmap_huge_noreserve", huge),
    ("madvise_random_shared", random_shared),
];

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const PAGE: usize = 4096;

fn zeroed() {
    let p = map(64 * PAGE, RW);
    for i in 0..64 * PAGE {
        assert_eq!(unsafe { *p.add(i) }, 0);
    }
    unsafe { p.add(5 * PAGE).write(7) };
    assert_eq!(unsafe { *p.add(5 * PAGE) }, 7);
    assert_eq!(unsafe { libc::munmap(p.cast(), 64 * PAGE) }, 0);
}

fn errors() {
    let mmap =
        |addr: u64, len: u64, flags: i32, fd: i64| call(libc::SYS_mmap, [addr, len, 3, flags as u64, fd as u64, 0]);
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    assert_eq!(mmap(0, 0, private, -1), Err(libc::EINVAL));
    assert_eq!(mmap(0, 4096, libc::MAP_ANONYMOUS, -1), Err(libc::EINVAL));
    assert_eq!(mmap(0, 4096, libc::MAP_PRIVATE, -1), Err(libc::EBADF));
    assert_eq!(mmap(1, 4096, private | libc::MAP_FIXED, -1), Err(libc::EINVAL));
    assert_eq!(mmap(0, u64::MAX - 8192, private, -1), Err(libc::ENOMEM));
    assert_eq!(call(libc::SYS_munmap, [1, 4096, 0, 0, 0, 0]), Err(libc::EINVAL));
    assert_eq!(call(libc::SYS_munmap, [4096, 0, 0, 0, 0, 0]), Err(libc::EINVAL));
    assert_eq!(call(libc::SYS_mprotect, [0x1000_0000, 4096, 1, 0, 0, 0]), Err(libc::ENOMEM));
    let p = map(PAGE, RW) as u64;
    let noreplace = private | libc::MAP_FIXED_NOREPLACE;
    assert_eq!(mmap(p, 4096, noreplace, -1), Err(libc::EEXIST));
}

fn hole() {
    let p = map(3 * PAGE, RW);
    unsafe {
        p.write(1);
        p.add(2 * PAGE).write(3);
        assert_eq!(libc::munmap(p.add(PAGE).cast(), PAGE), 0);
        assert_eq!(*p, 1);
        assert_eq!(*p.add(2 * PAGE), 3);
    }
    killed_by(libc::SIGSEGV, || unsafe { p.add(PAGE).write_volatile(1) });
}

static FAULT_ADDR: AtomicUsize = AtomicUsize::new(0);
static FAULT_CODE: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_fault(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let addr = unsafe { (*info).si_addr() } as usize;
    FAULT_ADDR.store(addr, Ordering::SeqCst);
    FAULT_CODE.store(unsafe { (*info).si_code } as usize, Ordering::SeqCst);
    unsafe { libc::mprotect((addr & !(PAGE - 1)) as *mut _, PAGE, RW) };
}

fn protect() {
    let p = map(2 * PAGE, libc::PROT_NONE);
    handle(libc::SIGSEGV, on_fault as *const () as usize, libc::SA_SIGINFO);
    unsafe { p.add(123).write_volatile(9) };
    assert_eq!(FAULT_ADDR.load(Ordering::SeqCst), p as usize + 123);
    assert_eq!(FAULT_CODE.load(Ordering::SeqCst), 2, "SEGV_ACCERR");
    assert_eq!(unsafe { p.add(123).read_volatile() }, 9);
    for _ in 0..100 {
        assert_eq!(unsafe { libc::mprotect(p.cast(), PAGE, libc::PROT_READ) }, 0);
        FAULT_ADDR.store(0, Ordering::SeqCst);
        unsafe { p.write_volatile(p.read_volatile().wrapping_add(1)) };
        assert_eq!(FAULT_ADDR.load(Ordering::SeqCst), p as usize);
    }
    assert_eq!(unsafe { p.read_volatile() }, 100);
}

fn split() {
    let p = map(16 * PAGE, RW);
    for i in 0..16 {
        unsafe { p.add(i * PAGE).write(i as u8) };
    }
    assert_eq!(unsafe { libc::mprotect(p.add(4 * PAGE).cast(), 4 * PAGE, libc::PROT_READ) }, 0);
    for i in 0..16 {
        assert_eq!(unsafe { *p.add(i * PAGE) }, i as u8);
    }
    killed_by(libc::SIGSEGV, || unsafe { p.add(5 * PAGE).write_volatile(1) });
    unsafe { p.add(8 * PAGE).write(99) };
    assert_eq!(unsafe { libc::mprotect(p.add(4 * PAGE).cast(), 4 * PAGE, RW) }, 0);
    unsafe { p.add(5 * PAGE).write_volatile(1) };
}

fn remap() {
    let p = map(4 * PAGE, RW);
    for i in 0..4 {
        unsafe { p.add(i * PAGE).write(10 + i as u8) };
    }
    let q = unsafe { libc::mremap(p.cast(), 4 * PAGE, 1024 * PAGE, libc::MREMAP_MAYMOVE) }.cast::<u8>();
    assert_ne!(q.cast(), libc::MAP_FAILED, "{}", errno());
    for i in 0..4 {
        assert_eq!(unsafe { *q.add(i * PAGE) }, 10 + i as u8);
    }
    assert_eq!(unsafe { *q.add(1000 * PAGE) }, 0);
    let r = unsafe { libc::mremap(q.cast(), 1024 * PAGE, 2 * PAGE, 0) };
    assert_eq!(r.cast::<u8>(), q);
    killed_by(libc::SIGSEGV, || unsafe { q.add(3 * PAGE).write_volatile(1) });
}

fn cow() {
    let len = 512 * PAGE;
    let p = map(len, RW);
    for i in 0..512 {
        unsafe { p.add(i * PAGE).write(i as u8) };
    }
    let pid = fork(|| {
        for i in 0..512 {
            assert_eq!(unsafe { *p.add(i * PAGE) }, i as u8);
            unsafe { p.add(i * PAGE).write(!(i as u8)) };
        }
        0
    });
    for i in (0..512).step_by(2) {
        unsafe { p.add(i * PAGE).write(77) };
    }
    assert_eq!(wait(pid), 0);
    for i in 0..512 {
        assert_eq!(unsafe { *p.add(i * PAGE) }, if i % 2 == 0 { 77 } else { i as u8 });
    }
}

fn shared_anonymous() {
    let p = unsafe { libc::mmap(std::ptr::null_mut(), 4 * PAGE, RW, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0) };
    let p = p.cast::<u8>();
    in_child(|| unsafe { p.add(2 * PAGE).write(42) });
    assert_eq!(unsafe { *p.add(2 * PAGE) }, 42);
}

fn scratch(len: usize) -> i32 {
    let mut path = *b"/tmp/guest-XXXXXX\0";
    let fd = unsafe { libc::mkstemp(path.as_mut_ptr().cast()) };
    assert!(fd >= 0, "mkstemp: {}", errno());
    unsafe { libc::unlink(path.as_ptr().cast()) };
    let data: Vec<u8> = (0..len).map(|i| (i / PAGE) as u8 + 1).collect();
    assert_eq!(ok(unsafe { libc::write(fd, data.as_ptr().cast(), len) } as i64), Ok(len as i64));
    fd
}

fn file_private() {
    let fd = scratch(3 * PAGE);
    let p = unsafe { libc::mmap(std::ptr::null_mut(), 3 * PAGE, RW, libc::MAP_PRIVATE, fd, 0) }.cast::<u8>();
    assert_eq!(unsafe { (*p, *p.add(PAGE), *p.add(2 * PAGE)) }, (1, 2, 3));
    unsafe { p.add(PAGE).write(50) };
    let mut back = [0_u8];
    unsafe { libc::pread(fd, back.as_mut_ptr().cast(), 1, PAGE as i64) };
    assert_eq!(back[0], 2, "a private write stays private");
}

fn file_shared() {
    let fd = scratch(3 * PAGE);
    let p = unsafe { libc::mmap(std::ptr::null_mut(), 3 * PAGE, RW, libc::MAP_SHARED, fd, 0) }.cast::<u8>();
    unsafe { p.add(PAGE + 1).write(50) };
    let mut back = [0_u8];
    unsafe { libc::pread(fd, back.as_mut_ptr().cast(), 1, PAGE as i64 + 1) };
    assert_eq!(back[0], 50);
    unsafe { libc::pwrite(fd, [60_u8].as_ptr().cast(), 1, 5) };
    assert_eq!(unsafe { p.add(5).read_volatile() }, 60);
    in_child(|| unsafe { p.write(61) });
    assert_eq!(unsafe { p.read_volatile() }, 61);
    assert_eq!(unsafe { libc::msync(p.cast(), 3 * PAGE, libc::MS_SYNC) }, 0);
}

fn truncated() {
    let fd = scratch(3 * PAGE);
    let p = unsafe { libc::mmap(std::ptr::null_mut(), 3 * PAGE, RW, libc::MAP_SHARED, fd, 0) }.cast::<u8>();
    assert_eq!(unsafe { p.add(2 * PAGE).read_volatile() }, 3);
    assert_eq!(unsafe { libc::ftruncate(fd, PAGE as i64) }, 0);
    killed_by(libc::SIGBUS, || unsafe {
        p.add(2 * PAGE).read_volatile();
    });
    assert_eq!(unsafe { p.read_volatile() }, 1);
    assert_eq!(unsafe { libc::write(1, p.add(2 * PAGE).cast(), 1) }, -1);
    assert_eq!(errno(), libc::EFAULT);
}

fn dontneed() {
    let p = map(8 * PAGE, RW);
    for i in 0..8 {
        unsafe { p.add(i * PAGE).write(1) };
    }
    assert_eq!(unsafe { libc::madvise(p.add(2 * PAGE).cast(), 2 * PAGE, libc::MADV_DONTNEED) }, 0);
    let got: Vec<u8> = (0..8).map(|i| unsafe { p.add(i * PAGE).read_volatile() }).collect();
    assert_eq!(got, [1, 1, 0, 0, 1, 1, 1, 1]);
    assert_eq!(ok(unsafe { libc::madvise(p.add(1).cast(), PAGE, libc::MADV_DONTNEED) }), Err(libc::EINVAL));
}

fn brk() {
    let base = call(libc::SYS_brk, [0; 6]).unwrap() as u64;
    let top = call(libc::SYS_brk, [base + 0x10000, 0, 0, 0, 0, 0]).unwrap() as u64;
    assert_eq!(top, base + 0x10000);
    unsafe { ((base + 0x8000) as *mut u8).write(5) };
    assert_eq!(call(libc::SYS_brk, [base, 0, 0, 0, 0, 0]).unwrap() as u64, base);
    assert_eq!(call(libc::SYS_brk, [base + 0x10000, 0, 0, 0, 0, 0]).unwrap() as u64, base + 0x10000);
    assert_eq!(unsafe { *((base + 0x8000) as *const u8) }, 0, "memory from brk is zeroed");
    assert_eq!(call(libc::SYS_brk, [1, 0, 0, 0, 0, 0]).unwrap() as u64, base + 0x10000);
}

#[inline(never)]
fn recurse(depth: u32) -> u64 {
    let block = std::hint::black_box([u64::from(depth); 64]);
    if depth == 0 { block[0] } else { recurse(depth - 1) + block[(depth % 64) as usize] }
}

fn stack() {
    assert_eq!(recurse(6000), (0..=6000_u64).sum());
}

fn mincore() {
    let p = map(4 * PAGE, RW);
    unsafe { p.add(PAGE).write(1) };
    let mut vec = [0_u8; 4];
    assert_eq!(unsafe { libc::mincore(p.cast(), 4 * PAGE, vec.as_mut_ptr()) }, 0);
    assert_eq!(vec[1] & 1, 1);
    assert_eq!(ok(unsafe { libc::mincore(p.add(1).cast(), PAGE, vec.as_mut_ptr()) }), Err(libc::EINVAL));
}

fn efault() {
    let bad = 0x10_u64;
    let none = map(PAGE, libc::PROT_NONE) as u64;
    for addr in [bad, none, 0x7fff_ffff_f000, 0x8000_0000_0000, u64::MAX - 3] {
        assert_eq!(call(libc::SYS_write, [1, addr, 1, 0, 0, 0]), Err(libc::EFAULT), "write from {addr:#x}");
        assert_eq!(call(libc::SYS_uname, [addr, 0, 0, 0, 0, 0]), Err(libc::EFAULT), "uname to {addr:#x}");
        assert_eq!(call(libc::SYS_clock_gettime, [1, addr, 0, 0, 0, 0]), Err(libc::EFAULT));
        assert_eq!(call(libc::SYS_pipe2, [addr, 0, 0, 0, 0, 0]), Err(libc::EFAULT));
        assert_eq!(call(libc::SYS_openat, [libc::AT_FDCWD as u64, addr, 0, 0, 0, 0]), Err(libc::EFAULT));
    }
    let ro = map(PAGE, libc::PROT_READ) as u64;
    assert_eq!(call(libc::SYS_uname, [ro, 0, 0, 0, 0, 0]), Err(libc::EFAULT));
}

fn jit() {
    let p = map(PAGE, RW | libc::PROT_EXEC);
    for value in [7_u8, 9, 200] {
        // mov $value,%eax; ret
        unsafe { std::ptr::copy_nonoverlapping([0xb8, value, 0, 0, 0, 0xc3].as_ptr(), p, 6) };
        let f: extern "C" fn() -> i32 = unsafe { std::mem::transmute(p) };
        assert_eq!(f(), i32::from(value));
    }
    killed_by(libc::SIGSEGV, || {
        let data = map(PAGE, RW);
        unsafe { data.write(0xc3) };
        let f: extern "C" fn() = unsafe { std::mem::transmute(data) };
        f();
    });
}

fn many() {
    let mut maps = Vec::new();
    for i in 0..2000_usize {
        let p = map(PAGE, if i % 2 == 0 { RW } else { libc::PROT_READ });
        if i % 2 == 0 {
            unsafe { p.write(i as u8) };
        }
        maps.push(p);
    }
    for (i, p) in maps.iter().enumerate() {
        assert_eq!(unsafe { **p }, if i % 2 == 0 { i as u8 } else { 0 });
    }
    for p in maps.iter().skip(1).step_by(3) {
        assert_eq!(unsafe { libc::munmap((*p).cast(), PAGE) }, 0);
    }
}

fn huge() {
    let len = 1_usize << 40;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let p = unsafe { libc::mmap(std::ptr::null_mut(), len, RW, flags, -1, 0) }.cast::<u8>();
    assert_ne!(p.cast(), libc::MAP_FAILED);
    for i in 0..16 {
        unsafe { p.add(i * (len / 16)).write(i as u8 + 1) };
    }
    for i in 0..16 {
        assert_eq!(unsafe { *p.add(i * (len / 16)) }, i as u8 + 1);
    }
    assert_eq!(unsafe { libc::munmap(p.cast(), len) }, 0);
}

fn random_shared() {
    let fd = unsafe { libc::memfd_create(c"shared".as_ptr(), 0) };
    assert_eq!(unsafe { libc::ftruncate(fd, 1 << 20) }, 0);
    let p = unsafe { libc::mmap(std::ptr::null_mut(), 1 << 20, RW, libc::MAP_SHARED, fd, 0) }.cast::<u8>();
    for page in 0..256 {
        if page == 8 {
            assert_eq!(unsafe { libc::madvise(p.cast(), 1 << 20, libc::MADV_RANDOM) }, 0);
        }
        unsafe { p.add(page * PAGE).write(page as u8) };
    }
    for page in 0..256 {
        assert_eq!(unsafe { *p.add(page * PAGE) }, page as u8);
    }
}
