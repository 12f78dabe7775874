//! Call sites that are called so often that a sandbox may replace them: programs must not know the difference.
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::Case;
use crate::sys::{call, fork, handle, map, wait};

/// The cases of this area.
pub const CASES: &[Case] = &[
    ("direct_keeps_registers", keeps_registers),
    ("direct_signals_at_every_moment", signals),
    ("direct_across_fork", across_fork),
    ("direct_text_keeps_its_bytes", keeps_bytes),
    ("direct_in_writable_text", writable_text),
    ("direct_text_changes_rights", changes_rights),
    ("direct_text_goes_away", goes_away),
    ("direct_while_text_changes", while_text_changes),
    ("direct_single_steps", single_steps),
    ("direct_restarts", restarts),
    ("direct_under_a_tracer", under_a_tracer),
];

/// More than any site needs to be found hot.
const MANY: u64 = 3000;
/// CF PF AF ZF SF OF, and what is always set.
const FLAGS: u64 = 0xad7;

// Sites of this program's own text: with a number before the call, with padding behind it, and entered at the call itself. Each takes the
// flags to call with in RDX; the flags after the call are in RDX then.
core::arch::global_asm!(
    r"
    .balign 64
    .globl direct_number
direct_number:
    push rdx
    popfq
    mov eax, 39
    .globl direct_call
direct_call:
    syscall
    .globl direct_after
direct_after:
    pushfq
    pop rdx
    cld
    ret
    .balign 64
    .globl direct_padded
direct_padded:
    push rdx
    popfq
    mov rax, rdi
    .globl direct_padded_call
direct_padded_call:
    syscall
    .globl direct_padded_after
direct_padded_after:
    pushfq
    pop rdx
    cld
    ret
    .balign 64
    .globl direct_end
direct_end:
    nop
"
);

unsafe extern "C" {
    fn direct_number();
    fn direct_call();
    fn direct_after();
    fn direct_padded();
    fn direct_padded_call();
    fn direct_padded_after();
    fn direct_end();
}

/// What a call leaves: RAX, RCX, R11, the flags.
type Left = (u64, u64, u64, u64);

fn at(entry: usize, rax: u64, rdi: u64) -> Left {
    let (result, rcx, r11, flags): (u64, u64, u64, u64);
    // The red zone is not used by what is called; `call` needs the stack.
    unsafe {
        core::arch::asm!(
            "call {entry}",
            entry = in(reg) entry,
            inlateout("rax") rax => result,
            inlateout("rdi") rdi => _,
            inlateout("rdx") FLAGS => flags,
            out("rcx") rcx,
            out("r11") r11,
        );
    }
    (result, rcx, r11, flags)
}

fn number() -> Left {
    at(direct_number as *const () as usize, 0, 0)
}

fn padded(nr: i64, rdi: u64) -> Left {
    // RDI is the number and the call's first argument: none of those called here looks at it but those that take a descriptor.
    let _ = rdi;
    at(direct_padded as *const () as usize, 0, nr as u64)
}

fn pid() -> u64 {
    u64::from(std::process::id())
}

fn keeps_registers() {
    let me = pid();
    for _ in 0..MANY {
        let after = direct_after as *const () as u64;
        assert_eq!(number(), (me, after, FLAGS, FLAGS));
        let after = direct_padded_after as *const () as u64;
        assert_eq!(padded(libc::SYS_getpid, 0), (me, after, FLAGS, FLAGS));
        // dup(32): it fails, and leaves the guest where nobody serves it.
        assert_eq!(padded(libc::SYS_dup, 0), (-libc::EBADF as u64, after, FLAGS, FLAGS));
    }
    for _ in 0..MANY {
        // The number before the call does not matter to who jumps to the call.
        let left = at(direct_call as *const () as usize, libc::SYS_getppid as u64, 0);
        assert_eq!(left.0, unsafe { libc::getppid() } as u64);
        let left = at(direct_padded_call as *const () as usize, libc::SYS_getppid as u64, 0);
        assert_eq!(left.0, unsafe { libc::getppid() } as u64);
        // A number that means nothing.
        assert_eq!(padded(9999, 0).0, -libc::ENOSYS as u64);
    }
}

static SEEN: AtomicU64 = AtomicU64::new(0);
static STRAY: AtomicU64 = AtomicU64::new(0);

extern "C" fn note_rip(_signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    let rip = unsafe { (*context).uc_mcontext.gregs[libc::REG_RIP as usize] }.cast_unsigned() as usize;
    let text = direct_number as *const () as usize..direct_end as *const () as usize;
    if text.contains(&rip) {
        // Padding is never executed.
        let number = direct_number as *const () as usize..direct_after as *const () as usize + 4;
        let padded = direct_padded as *const () as usize..direct_padded_after as *const () as usize + 4;
        if !number.contains(&rip) && !padded.contains(&rip) {
            STRAY.store(rip as u64, Ordering::SeqCst);
        }
    } else {
        // Somewhere else in the program or its libraries; never in what no mapping shows.
        let maps = LINES.load(Ordering::SeqCst) as *const Vec<(usize, usize)>;
        let known = maps.is_null() || unsafe { &*maps }.iter().any(|&(from, to)| (from..to).contains(&rip));
        if !known {
            STRAY.store(rip as u64, Ordering::SeqCst);
        }
    }
    SEEN.fetch_add(1, Ordering::SeqCst);
}

static LINES: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// The executable mappings.
fn texts() -> Vec<(usize, usize)> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let parse = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let hex = |s| usize::from_str_radix(s, 16).ok();
        rest.starts_with("r-x").then_some((hex(from)?, hex(to)?))
    };
    maps.lines().filter_map(parse).collect()
}

/// A handler sees RIP at an instruction of the program, and calls go on as if it had not been.
fn signals() {
    let known = Box::leak(Box::new(texts()));
    LINES.store(std::ptr::from_ref(known) as usize, Ordering::SeqCst);
    handle(libc::SIGUSR1, note_rip as *const () as usize, libc::SA_SIGINFO | libc::SA_RESTART);
    let over = AtomicBool::new(false);
    let me = pid();
    let tid = call(libc::SYS_gettid, [0; 6]).expect("gettid") as u64;
    std::thread::scope(|s| {
        s.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                let _ = call(libc::SYS_tgkill, [me, tid, libc::SIGUSR1 as u64, 0, 0, 0]);
                std::thread::sleep(Duration::from_micros(100));
            }
        });
        let begin = Instant::now();
        while SEEN.load(Ordering::SeqCst) < 2000 && begin.elapsed() < Duration::from_secs(3) {
            let after = direct_after as *const () as u64;
            assert_eq!(number(), (me, after, FLAGS, FLAGS));
            let after = direct_padded_after as *const () as u64;
            assert_eq!(padded(libc::SYS_getpid, 0), (me, after, FLAGS, FLAGS));
            assert_eq!(padded(libc::SYS_dup, 0), (-libc::EBADF as u64, after, FLAGS, FLAGS));
        }
        over.store(true, Ordering::SeqCst);
    });
    assert_eq!(STRAY.load(Ordering::SeqCst), 0, "{:x}", STRAY.load(Ordering::SeqCst));
    assert!(SEEN.load(Ordering::SeqCst) > 0);
}

fn across_fork() {
    for round in 0..4 {
        let child = fork(|| {
            let me = pid();
            for _ in 0..MANY {
                assert_eq!(number().0, me);
                assert_eq!(padded(libc::SYS_getpid, 0).0, me);
            }
            wait(fork(|| i32::from((0..MANY).any(|_| number().0 != pid()))))
        });
        for _ in 0..MANY * round {
            assert_eq!(padded(libc::SYS_getpid, 0).0, pid());
        }
        assert_eq!(wait(child), 0);
    }
}

/// The bytes of the sites as others see them.
fn bytes(path: &str, len: usize) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::open(path).expect("mem");
    let mut text = vec![0; len];
    file.read_exact_at(&mut text, direct_number as *const () as u64).expect("read");
    text
}

fn keeps_bytes() {
    let start = direct_number as *const () as usize;
    let len = direct_end as *const () as usize - start;
    let before = unsafe { std::slice::from_raw_parts(start as *const u8, len) }.to_vec();
    for _ in 0..MANY {
        number();
        padded(libc::SYS_getpid, 0);
    }
    let mut text = vec![0_u8; len];
    let local = libc::iovec { iov_base: text.as_mut_ptr().cast(), iov_len: len };
    let remote = libc::iovec { iov_base: start as *mut libc::c_void, iov_len: len };
    let me = unsafe { libc::getpid() };
    assert_eq!(unsafe { libc::process_vm_readv(me, &raw const local, 1, &raw const remote, 1, 0) }, len as isize);
    assert_eq!(text, before);
    assert_eq!(bytes("/proc/self/mem", len), before);
    for _ in 0..MANY {
        number();
        padded(libc::SYS_getpid, 0);
    }
    // Another process looks.
    let parent = pid();
    let child = fork(|| i32::from(bytes(&format!("/proc/{parent}/mem"), len) != before));
    assert_eq!(wait(child), 0);
}

/// A page that can be written is the program's own affair: what it reads there is what it wrote.
fn writable_text() {
    let page = map(4096, libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC);
    let start = (direct_number as *const ()).cast::<u8>();
    let len = direct_end as *const () as usize - start as usize;
    let before = unsafe { std::slice::from_raw_parts(start, len) }.to_vec();
    unsafe { std::ptr::copy_nonoverlapping(before.as_ptr(), page, len) };
    for _ in 0..MANY {
        assert_eq!(at(page as usize, 0, 0).0, pid());
    }
    assert_eq!(unsafe { std::slice::from_raw_parts(page, len) }, before);
    // Also when the right to write is gone.
    assert_eq!(unsafe { libc::mprotect(page.cast(), 4096, libc::PROT_READ | libc::PROT_EXEC) }, 0);
    for _ in 0..MANY {
        assert_eq!(at(page as usize, 0, 0).0, pid());
    }
    assert_eq!(unsafe { std::slice::from_raw_parts(page, len) }, before);
}

fn text_page() -> *mut libc::c_void {
    ((direct_number as *const () as usize) & !4095) as *mut libc::c_void
}

fn changes_rights() {
    let start = (direct_number as *const ()).cast::<u8>();
    let before = unsafe { std::slice::from_raw_parts(start, 16) }.to_vec();
    for round in 0..3 {
        for _ in 0..MANY {
            assert_eq!(number().0, pid());
            assert_eq!(padded(libc::SYS_getpid, 0).0, pid());
        }
        let all = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        assert_eq!(unsafe { libc::mprotect(text_page(), 8192, all) }, 0);
        let own = unsafe { std::slice::from_raw_parts(start, 16) };
        assert_eq!(own, before);
        if round == 1 {
            // mov $102,%eax: getuid.
            unsafe { start.cast_mut().add(3).write_volatile(102) };
            assert_eq!(number().0, u64::from(unsafe { libc::getuid() }));
            unsafe { start.cast_mut().add(3).write_volatile(39) };
        }
        assert_eq!(number().0, pid());
        assert_eq!(unsafe { libc::mprotect(text_page(), 8192, libc::PROT_READ | libc::PROT_EXEC) }, 0);
    }
}

/// The program's file, and the offset in it of the two pages that begin at [`text_page`].
fn own_file() -> (std::fs::File, i64) {
    let page = text_page() as usize;
    let line = texts().into_iter().find(|&(from, to)| (from..to).contains(&page)).expect("its own text");
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let begins = format!("{:x}-", line.0);
    let offset = maps.lines().find(|l| l.starts_with(&begins)).and_then(|l| l.split_whitespace().nth(2));
    let offset = i64::from_str_radix(offset.expect("an offset"), 16).expect("hex") + (page - line.0) as i64;
    (std::fs::File::open("/proc/self/exe").expect("exe"), offset)
}

/// Threads call sites that become hot while others change the rights of their text, advise on it and fork.
fn while_text_changes() {
    let (file, offset) = own_file();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    let rx = libc::PROT_READ | libc::PROT_EXEC;
    let base = text_page() as usize;
    let (first, second) = (direct_number as *const () as usize - base, direct_padded as *const () as usize - base);
    for round in 0..6 {
        let copy = unsafe { libc::mmap(std::ptr::null_mut(), 8192, rx, libc::MAP_PRIVATE, fd, offset) };
        assert_ne!(copy, libc::MAP_FAILED);
        let over = AtomicBool::new(false);
        let here = copy as usize;
        std::thread::scope(|s| {
            let callers: Vec<_> = (0..2)
                .map(|_| {
                    s.spawn(|| {
                        let me = pid();
                        for _ in 0..1000 {
                            assert_eq!(at(here + first, 0, 0).0, me);
                            let left = at(here + second, 0, libc::SYS_dup as u64);
                            assert_eq!((left.0, left.2, left.3), (-libc::EBADF as u64, FLAGS, FLAGS));
                            assert_eq!(at(here + second, 0, libc::SYS_getpid as u64).0, me);
                        }
                    })
                })
                .collect();
            s.spawn(|| {
                let all = rx | libc::PROT_WRITE;
                while !over.load(Ordering::SeqCst) {
                    match round % 3 {
                        0 => {
                            assert_eq!(unsafe { libc::mprotect(copy_at(here), 8192, all) }, 0);
                            assert_eq!(unsafe { libc::mprotect(copy_at(here), 8192, rx) }, 0);
                        }
                        1 => assert_eq!(unsafe { libc::madvise(copy_at(here), 8192, libc::MADV_DONTNEED) }, 0),
                        _ => assert_eq!(
                            wait(fork(|| i32::from(at(here + second, 0, libc::SYS_getpid as u64).0 != pid()))),
                            0
                        ),
                    }
                    std::thread::sleep(Duration::from_micros(500));
                }
            });
            let fine: Vec<bool> = callers.into_iter().map(|c| c.join().is_ok()).collect();
            over.store(true, Ordering::SeqCst);
            assert_eq!(fine, [true, true]);
        });
        // Sites once more, where they are undone.
        assert_eq!(at(here + first, 0, 0).0, pid());
        assert_eq!(unsafe { libc::munmap(copy, 8192) }, 0);
    }
}

fn copy_at(address: usize) -> *mut libc::c_void {
    address as *mut libc::c_void
}

/// A copy of the program's file is mapped, called, dropped, moved and mapped over.
fn goes_away() {
    let page = text_page() as usize;
    let line = texts().into_iter().find(|&(from, to)| (from..to).contains(&page)).expect("its own text");
    let (file, offset) = own_file();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    let within = direct_number as *const () as usize - page;
    let rx = libc::PROT_READ | libc::PROT_EXEC;
    let room = map(16 * 4096, libc::PROT_NONE);
    let to = |n: usize| unsafe { room.add(n * 8192) }.cast::<libc::c_void>();
    let show = |n: usize| {
        let fixed = libc::MAP_PRIVATE | libc::MAP_FIXED;
        assert_eq!(unsafe { libc::mmap(to(n), 8192, rx, fixed, fd, offset) }, to(n));
    };
    let hot = |n: usize| {
        for _ in 0..MANY {
            let (result, rcx, ..) = at(to(n) as usize + within, 0, 0);
            assert_eq!(result, pid());
            assert_eq!(rcx as usize - to(n) as usize, direct_after as *const () as usize - page);
        }
    };
    for _ in 0..3 {
        show(0);
        hot(0);
        assert_eq!(unsafe { libc::madvise(to(0), 8192, libc::MADV_DONTNEED) }, 0);
        hot(0);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        assert_eq!(unsafe { libc::mremap(to(0), 8192, 8192, flags, to(2)) }, to(2));
        hot(2);
        show(2);
        hot(2);
        assert_eq!(unsafe { libc::munmap(to(2), 8192) }, 0);
        show(2);
        hot(2);
    }
    // Whatever is free around the text can be mapped by who wants it there, and the sites work on.
    let fixed = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let mut mapped = 0;
    for n in 1..2000 {
        for at in [line.0.wrapping_sub(n * 4096), line.1 + n * 4096] {
            let got = unsafe { libc::mmap(at as *mut libc::c_void, 4096, libc::PROT_READ, fixed, -1, 0) };
            mapped += usize::from(got != libc::MAP_FAILED);
        }
    }
    assert!(mapped > 0);
    for _ in 0..MANY {
        assert_eq!(number().0, pid());
        assert_eq!(padded(libc::SYS_getpid, 0).0, pid());
    }
}

static STEPS: AtomicU64 = AtomicU64::new(0);
static PATH: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

extern "C" fn step(_signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    let rip = unsafe { (*context).uc_mcontext.gregs[libc::REG_RIP as usize] }.cast_unsigned();
    let text = direct_number as *const () as u64..direct_end as *const () as u64;
    let n = STEPS.load(Ordering::SeqCst) as usize;
    if n < PATH.len() && text.contains(&rip) {
        PATH[n].store(rip - text.start, Ordering::SeqCst);
        STEPS.store(n as u64 + 1, Ordering::SeqCst);
    } else if !text.contains(&rip) && n > 0 {
        // It is back: no more steps.
        unsafe { (*context).uc_mcontext.gregs[libc::REG_EFL as usize] &= !0x100 };
    }
}

/// A program that steps through its calls meets the same instructions as before.
fn single_steps() {
    handle(libc::SIGTRAP, step as *const () as usize, libc::SA_SIGINFO);
    let walk = |entry: unsafe extern "C" fn(), rdi: u64| {
        STEPS.store(0, Ordering::SeqCst);
        let result: u64;
        unsafe {
            core::arch::asm!(
                "call {entry}",
                "2:",
                "nop",
                "nop",
                entry = in(reg) entry as *const () as usize,
                inlateout("rax") 0_u64 => result,
                inlateout("rdi") rdi => _,
                inlateout("rdx") FLAGS | 0x100 => _,
                out("rcx") _,
                out("r11") _,
            );
        }
        let n = STEPS.load(Ordering::SeqCst) as usize;
        let path: Vec<u64> = PATH.iter().take(n).map(|p| p.load(Ordering::SeqCst)).collect();
        (result, path)
    };
    let before = (walk(direct_number, 0), walk(direct_padded, libc::SYS_getpid as u64));
    for _ in 0..MANY {
        number();
        padded(libc::SYS_getpid, 0);
    }
    let after = (walk(direct_number, 0), walk(direct_padded, libc::SYS_getpid as u64));
    assert_eq!(before, after);
    assert_eq!(before.0.0, pid());
}

/// A read that waits is interrupted by handlers and begun again, at a site that is hot.
fn restarts() {
    handle(libc::SIGUSR1, note_rip as *const () as usize, libc::SA_SIGINFO | libc::SA_RESTART);
    let (from, to) = crate::sys::pipe();
    let read = || {
        let mut byte = 0_u8;
        let result: i64;
        unsafe {
            core::arch::asm!(
                "call {entry}",
                entry = in(reg) direct_call as *const () as usize,
                inlateout("rax") libc::SYS_read => result,
                inlateout("rdi") i64::from(from) => _,
                inlateout("rsi") &raw mut byte => _,
                inlateout("rdx") 1_u64 => _,
                out("rcx") _,
                out("r11") _,
            );
        }
        (result, byte)
    };
    let zeroes = std::fs::File::open("/dev/zero").expect("zero");
    let zero = std::os::fd::AsRawFd::as_raw_fd(&zeroes);
    for _ in 0..MANY {
        let mut byte = 1_u8;
        assert_eq!(unsafe { libc::read(zero, (&raw mut byte).cast(), 1) }, 1);
        assert_eq!((byte, number().0), (0, pid()));
        assert_eq!(padded(libc::SYS_getpid, 0).0, pid());
    }
    let tid = call(libc::SYS_gettid, [0; 6]).expect("gettid") as u64;
    let me = pid();
    let before = SEEN.load(Ordering::SeqCst);
    std::thread::scope(|s| {
        s.spawn(move || {
            for _ in 0..5 {
                std::thread::sleep(Duration::from_millis(5));
                call(libc::SYS_tgkill, [me, tid, libc::SIGUSR1 as u64, 0, 0, 0]).expect("tgkill");
            }
            std::thread::sleep(Duration::from_millis(5));
            crate::sys::write_byte(to);
        });
        assert_eq!(read(), (1, b'x'));
    });
    assert!(SEEN.load(Ordering::SeqCst) > before);
}

/// A tracer sees the program's own bytes and instructions, and may put breakpoints at hot sites.
fn under_a_tracer() {
    let start = direct_number as *const () as usize;
    let before = unsafe { std::slice::from_raw_parts(start as *const u8, 16) }.to_vec();
    let (ready, go) = crate::sys::pipe();
    let child = fork(|| {
        let me = pid();
        for _ in 0..MANY {
            number();
            padded(libc::SYS_getpid, 0);
        }
        crate::sys::write_byte(go);
        for _ in 0..u64::MAX {
            if number().0 != me || padded(libc::SYS_getpid, 0).0 != me {
                return 1;
            }
        }
        0
    });
    crate::sys::read_byte(ready);
    let trace = |request: u32, addr: usize, data: usize| unsafe { libc::ptrace(request, child, addr, data) };
    assert_eq!(trace(libc::PTRACE_ATTACH, 0, 0), 0);
    let stopped = || {
        let mut status = 0;
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, libc::__WALL) }, child);
        assert!(libc::WIFSTOPPED(status), "{status:x}");
        libc::WSTOPSIG(status)
    };
    assert_eq!(stopped(), libc::SIGSTOP);
    let word = trace(libc::PTRACE_PEEKTEXT, start, 0).to_le_bytes();
    assert_eq!(word, before[..8]);
    // A breakpoint at the SYSCALL.
    let site = direct_call as *const () as usize;
    let old = trace(libc::PTRACE_PEEKTEXT, site, 0);
    assert_eq!(trace(libc::PTRACE_POKETEXT, site, ((old & !0xff) | 0xcc) as usize), 0);
    let regs = || {
        let mut regs: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        let to = &raw mut regs;
        assert_eq!(unsafe { libc::ptrace(libc::PTRACE_GETREGS, child, 0, to) }, 0);
        regs
    };
    for _ in 0..3 {
        assert_eq!(trace(libc::PTRACE_CONT, 0, 0), 0);
        assert_eq!(stopped(), libc::SIGTRAP);
        let mut r = regs();
        assert_eq!((r.rip as usize, r.rax), (site + 1, 39));
        // On with the call that it stands for.
        r.rip = direct_padded_call as *const () as u64;
        r.orig_rax = u64::MAX;
        assert_eq!(unsafe { libc::ptrace(libc::PTRACE_SETREGS, child, 0, &raw const r) }, 0);
    }
    assert_eq!(trace(libc::PTRACE_POKETEXT, site, old as usize), 0);
    assert_eq!(trace(libc::PTRACE_KILL, 0, 0), 0);
    let mut status = 0;
    unsafe { libc::waitpid(child, &raw mut status, libc::__WALL) };
}
