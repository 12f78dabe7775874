//! Restartable sequences: rseq(2), as glibc registers them for every thread.
use std::arch::asm;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::Case;
use crate::sys::{call, fork, handle, in_child, killed_by, wait};

/// The cases of this area.
pub const CASES: &[Case] = &[
    ("rseq_names_the_cpu", names_the_cpu),
    ("rseq_registration", registration),
    ("rseq_inheritance", inheritance),
    ("rseq_aborted_by_signal", aborted_by_signal),
    ("rseq_aborted_by_preemption", aborted_by_preemption),
    ("rseq_counters", counters),
    ("rseq_bad_sections", bad_sections),
];

const SYS_RSEQ: i64 = 334;
const SIGNATURE: u32 = 0x5305_3053;

unsafe extern "C" {
    static __rseq_offset: isize;
}

/// struct rseq.
#[repr(C, align(32))]
struct Area {
    cpu_id_start: AtomicU32,
    cpu_id: AtomicU32,
    section: AtomicU64,
    flags: AtomicU32,
    node_id: AtomicU32,
    mm_cid: AtomicU32,
    end: u32,
}

impl Area {
    fn new() -> Area {
        unsafe { std::mem::zeroed() }
    }
}

/// struct rseq_cs.
#[repr(C, align(32))]
#[derive(Default)]
struct Section {
    version: u32,
    flags: u32,
    start: u64,
    len: u64,
    abort: u64,
}

/// What glibc registered for this thread.
fn own() -> &'static Area {
    let thread: u64;
    unsafe { asm!("mov {}, fs:0", out(reg) thread) };
    unsafe { &*((thread as isize + __rseq_offset) as *const Area) }
}

fn register(area: *const Area, len: u32, flags: u32, signature: u32) -> Result<i64, i32> {
    call(SYS_RSEQ, [area as u64, len.into(), flags.into(), signature.into(), 0, 0])
}

/// Takes the thread's registration away from glibc.
fn unregister_own() {
    register(own(), 32, 1, SIGNATURE).unwrap();
}

fn cpu_now() -> u32 {
    let mut cpu = u32::MAX;
    call(libc::SYS_getcpu, [&raw mut cpu as u64, 0, 0, 0, 0, 0]).unwrap();
    cpu
}

fn pin(cpu: usize) {
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    unsafe { libc::CPU_SET(cpu, &mut set) };
    assert_eq!(unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) }, 0);
}

fn allowed() -> Vec<usize> {
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    assert_eq!(unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) }, 0);
    (0..1024).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
}

/// Stands in a section until it is aborted.
fn spin(area: &Area, section: &mut Section) {
    unsafe {
        asm!(
            "lea {t}, [rip + 2f]",
            "mov [{s} + 8], {t}",
            "lea {u}, [rip + 3f]",
            "sub {u}, {t}",
            "mov [{s} + 16], {u}",
            "lea {t}, [rip + 4f]",
            "mov [{s} + 24], {t}",
            "mov [{a} + 8], {s}",
            "2:",
            "pause",
            "jmp 2b",
            "3:",
            "ud2",
            ".byte 0x0f, 0xb9, 0x3d",
            ".long 0x53053053",
            "4:",
            a = in(reg) area, s = in(reg) section, t = out(reg) _, u = out(reg) _,
        );
    }
}

/// Adds one to the counter of the CPU, without a lock or an atomic operation; false if it was aborted.
fn add(area: &Area, section: &mut Section, counters: *mut u64) -> bool {
    let done: u64;
    unsafe {
        asm!(
            "lea {t}, [rip + 2f]",
            "mov [{s} + 8], {t}",
            "lea {u}, [rip + 3f]",
            "sub {u}, {t}",
            "mov [{s} + 16], {u}",
            "lea {t}, [rip + 4f]",
            "mov [{s} + 24], {t}",
            "mov [{a} + 8], {s}",
            "2:",
            "mov {t:e}, [{a} + 4]",
            "mov {u}, [{c} + {t} * 8]",
            // Room for an interruption.
            "pause",
            "pause",
            "add {u}, 1",
            "mov [{c} + {t} * 8], {u}",
            "3:",
            "mov {u:e}, 1",
            "jmp 5f",
            ".byte 0x0f, 0xb9, 0x3d",
            ".long 0x53053053",
            "4:",
            "xor {u:e}, {u:e}",
            "5:",
            a = in(reg) area, s = in(reg) section, c = in(reg) counters, t = out(reg) _, u = out(reg) done,
        );
    }
    done == 1
}

fn names_the_cpu() {
    for cpu in allowed() {
        pin(cpu);
        let area = own();
        assert_eq!(area.cpu_id.load(Ordering::Relaxed), cpu as u32);
        assert_eq!(area.cpu_id_start.load(Ordering::Relaxed), cpu as u32);
        assert_eq!(cpu_now(), cpu as u32);
        assert_eq!(unsafe { libc::sched_getcpu() }, cpu as i32);
        std::thread::spawn(move || assert_eq!(own().cpu_id.load(Ordering::Relaxed), cpu as u32)).join().unwrap();
        in_child(|| assert_eq!(own().cpu_id.load(Ordering::Relaxed), cpu as u32));
    }
    assert_eq!(unsafe { libc::getauxval(27) }, 28, "AT_RSEQ_FEATURE_SIZE");
    assert_eq!(unsafe { libc::getauxval(28) }, 32, "AT_RSEQ_ALIGN");
}

fn registration() {
    let area = own();
    let other = Area::new();
    assert_eq!(register(area, 32, 0, SIGNATURE), Err(libc::EBUSY));
    assert_eq!(register(area, 32, 0, 1), Err(libc::EPERM));
    assert_eq!(register(area, 64, 0, SIGNATURE), Err(libc::EINVAL));
    assert_eq!(register(&raw const other, 32, 0, SIGNATURE), Err(libc::EINVAL));
    assert_eq!(register(area, 32, 2, SIGNATURE), Err(libc::EINVAL));
    assert_eq!(register(area, 32, 3, SIGNATURE), Err(libc::EINVAL));
    assert_eq!(register(&raw const other, 32, 1, SIGNATURE), Err(libc::EINVAL));
    assert_eq!(register(area, 64, 1, SIGNATURE), Err(libc::EINVAL));
    assert_eq!(register(area, 32, 1, 1), Err(libc::EPERM));
    unregister_own();
    assert_eq!(area.cpu_id.load(Ordering::Relaxed), u32::MAX);
    assert_eq!(area.cpu_id_start.load(Ordering::Relaxed), 0);
    assert_eq!(register(area, 32, 1, SIGNATURE), Err(libc::EINVAL), "there is none");
    let odd = (&raw const other).cast::<u8>().wrapping_add(8).cast::<Area>();
    assert_eq!(register(odd, 32, 0, SIGNATURE), Err(libc::EINVAL));
    assert_eq!(register(&raw const other, 31, 0, SIGNATURE), Err(libc::EINVAL));
    assert_eq!(register(&raw const other, 0, 0, SIGNATURE), Err(libc::EINVAL));
    assert_eq!(register((1_u64 << 63) as *const Area, 32, 0, SIGNATURE), Err(libc::EFAULT));
    register(&raw const other, 32, 0, 77).unwrap();
    assert_ne!(other.cpu_id.load(Ordering::Relaxed), u32::MAX);
    assert!(other.cpu_id.load(Ordering::Relaxed) < 1024);
    register(&raw const other, 32, 1, 77).unwrap();
}

fn inheritance() {
    unregister_own();
    let area = Box::leak(Box::new(Area::new()));
    register(area, 32, 0, SIGNATURE).unwrap();
    // A copy of the memory keeps the registration, a thread that shares it has none.
    in_child(|| assert_eq!(register(area, 32, 0, SIGNATURE), Err(libc::EBUSY)));
    extern "C" fn has_none(area: *mut libc::c_void) -> i32 {
        i32::from(register(area.cast(), 32, 1, SIGNATURE) != Err(libc::EINVAL))
    }
    let stack = crate::sys::map(1 << 16, libc::PROT_READ | libc::PROT_WRITE).wrapping_add(1 << 16);
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    let child = unsafe { libc::clone(has_none, stack.cast(), flags, (&raw mut *area).cast()) };
    assert_eq!(wait(child), 0);
    assert_eq!(register(area, 32, 0, SIGNATURE), Err(libc::EBUSY));
    // A new program registers its own: it could not if the old one's were left.
    let guest = std::env::current_exe().unwrap();
    assert!(std::process::Command::new(guest).arg("rseq_names_the_cpu").status().unwrap().success());
}

static HANDLED: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(_: i32) {
    HANDLED.fetch_add(1, Ordering::SeqCst);
}

fn aborted_by_signal() {
    let area = own();
    handle(libc::SIGALRM, count as *const () as usize, 0);
    for round in 1..4 {
        let timer = libc::itimerval {
            it_interval: libc::timeval { tv_sec: 0, tv_usec: 0 },
            it_value: libc::timeval { tv_sec: 0, tv_usec: 20_000 },
        };
        assert_eq!(unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) }, 0);
        let mut section = Section::default();
        // An interruption other than the signal may have aborted it.
        while HANDLED.load(Ordering::SeqCst) < round {
            spin(area, &mut section);
            assert_eq!(area.section.load(Ordering::SeqCst), 0);
        }
    }
}

fn aborted_by_preemption() {
    pin(allowed()[0]);
    let child = fork(|| {
        loop {
            std::hint::spin_loop();
        }
    });
    let mut section = Section::default();
    for _ in 0..5 {
        spin(own(), &mut section);
        assert_eq!(own().section.load(Ordering::SeqCst), 0);
    }
    unsafe { libc::kill(child, libc::SIGKILL) };
    wait(child);
}

fn counters() {
    const THREADS: usize = 4;
    const ROUNDS: u64 = 200_000;
    let counters = Box::leak(vec![0_u64; 1024].into_boxed_slice());
    let address = counters.as_mut_ptr() as usize;
    let threads: Vec<_> = (0..THREADS)
        .map(|_| {
            std::thread::spawn(move || {
                let (area, mut section) = (own(), Section::default());
                for _ in 0..ROUNDS {
                    while !add(area, &mut section, address as *mut u64) {}
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    let sum: u64 = (0..1024).map(|i| unsafe { (address as *const u64).add(i).read_volatile() }).sum();
    assert_eq!(sum, THREADS as u64 * ROUNDS);
}

fn bad_sections() {
    extern "C" fn nothing(_: i32) {}
    let provoke = |section: u64| {
        move || {
            handle(libc::SIGUSR1, nothing as *const () as usize, 0);
            own().section.store(section, Ordering::SeqCst);
            unsafe { libc::raise(libc::SIGUSR1) };
            std::process::exit(0);
        }
    };
    killed_by(libc::SIGSEGV, provoke(0xffff_8000_0000_0000));
    killed_by(libc::SIGSEGV, provoke(16));
    let here = bad_sections as *const () as u64;
    let newer = Section { version: 1, start: here, len: 16, abort: here + 64, ..Section::default() };
    killed_by(libc::SIGSEGV, provoke(&raw const newer as u64));
    let unsigned = Section { start: here, len: 16, abort: here + 64, ..Section::default() };
    killed_by(libc::SIGSEGV, provoke(&raw const unsigned as u64));
    let inside = Section { start: here, len: 16, abort: here + 8, ..Section::default() };
    killed_by(libc::SIGSEGV, provoke(&raw const inside as u64));
    let wraps = Section { start: here, len: u64::MAX, abort: here + 8, ..Section::default() };
    killed_by(libc::SIGSEGV, provoke(&raw const wraps as u64));
    // The area itself is gone.
    killed_by(libc::SIGSEGV, || {
        unregister_own();
        let page = crate::sys::map(4096, libc::PROT_READ | libc::PROT_WRITE);
        register(page.cast(), 32, 0, SIGNATURE).unwrap();
        handle(libc::SIGUSR1, nothing as *const () as usize, 0);
        unsafe { libc::munmap(page.cast(), 4096) };
        unsafe { libc::raise(libc::SIGUSR1) };
    });
}
