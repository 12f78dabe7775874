//! Signals, futexes and timers as a program meets them, on the simulated platform. `r15` is the program's step, as in the tests
//! of tasks.
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use linux_raw_sys::general as raw;

use crate::kernel::ExitStatus;
use crate::platform::sim::SimPlatform;
use crate::platform::{Exit, Fpu, GuestSpace, Memory, PhysAddr, UserContext};
use crate::task::tests::{call, exit_group, run_program};

const HANDLER: u64 = 0x41_0000;
const RESTORER: u64 = 0x42_0000;
const SA_RESTORER: u64 = 0x0400_0000;
const SA_RESTART: u64 = 0x1000_0000;

/// The program's memory.
struct Mem<'a> {
    space: &'a dyn GuestSpace,
    platform: &'a SimPlatform,
}

impl Mem<'_> {
    fn at(&self, va: u64) -> PhysAddr {
        let pte = self.space.lookup(va & !0xfff).expect("a present page");
        PhysAddr(pte.pa.0 + (va & 0xfff))
    }
    fn store(&self, va: u64, words: &[u64]) {
        for (i, w) in words.iter().enumerate() {
            self.platform.sim_memory().write(self.at(va + 8 * i as u64), &w.to_le_bytes()).unwrap();
        }
    }
    fn load(&self, va: u64) -> u64 {
        let mut b = [0; 8];
        self.platform.sim_memory().read(self.at(va), &mut b).unwrap();
        u64::from_le_bytes(b)
    }
}

type Step = dyn Fn(&mut UserContext, &Mem<'_>, &dyn Fpu) -> Exit + Send + Sync;

/// Runs `step`; the clock goes on by itself, a millisecond at a time.
fn run(cpus: usize, step: Box<Step>) -> ExitStatus {
    let machine: Arc<OnceLock<Arc<SimPlatform>>> = Arc::default();
    let seen = machine.clone();
    let program = Box::new(move |space: &dyn GuestSpace, c: &mut UserContext, fpu: &dyn Fpu| {
        let platform = seen.get().unwrap();
        step(c, &Mem { space, platform }, fpu)
    });
    let (_, status) = run_program(cpus, program, |platform, kernel| {
        let _ = machine.set(platform.clone());
        let (platform, kernel) = (platform.clone(), Arc::downgrade(kernel));
        std::thread::spawn(move || {
            while let Some(kernel) = kernel.upgrade() {
                platform.advance(1_000_000);
                if platform.deadline().is_some_and(|at| at <= kernel.platform.monotonic()) {
                    kernel.on_deadline();
                }
                drop(kernel);
                std::thread::sleep(Duration::from_micros(200));
            }
        });
    });
    status
}

/// rt_sigaction with the action stored at the stack pointer.
fn sigaction(c: &mut UserContext, m: &Mem<'_>, next: u64, signal: u64, flags: u64) -> Exit {
    m.store(c.rsp, &[HANDLER, flags | SA_RESTORER, RESTORER, 0]);
    call(c, next, raw::__NR_rt_sigaction, [signal, c.rsp, 0, 8, 0, 0])
}

/// The handler returns at once: through the restorer's system call.
fn handler_returns(c: &mut UserContext, m: &Mem<'_>) -> Exit {
    assert_eq!(m.load(c.rsp), RESTORER);
    assert_eq!(c.rsp % 16, 8);
    c.rsp += 8;
    c.rip = RESTORER + 9;
    call(c, c.r15, raw::__NR_rt_sigreturn, [0; 6])
}

#[test]
fn a_handler_runs_and_everything_comes_back() {
    let status = run(
        1,
        Box::new(|c, m, fpu| match (c.rip, c.r15) {
            (HANDLER, _) => {
                assert_eq!(c.rdi, 10);
                assert_eq!(m.load(c.rsi) & 0xffff_ffff, 10);
                // Another vector state in the handler must not survive it.
                fpu.reset();
                c.r14 = 77;
                handler_returns(c, m)
            }
            (_, 0) => sigaction(c, m, 1, 10, 4),
            (_, 1) => {
                let mut image = fpu.read();
                image[160] = 0x5a;
                image[512] = 3;
                fpu.write(&image).unwrap();
                c.r14 = 1234;
                call(c, 2, raw::__NR_kill, [1, 10, 0, 0, 0, 0])
            }
            (_, 2) => {
                let right = c.rax == 0 && c.r14 == 1234 && fpu.read()[160] == 0x5a;
                exit_group(c, if right { 7 } else { 8 })
            }
            _ => Exit::Broken("lost"),
        }),
    );
    assert_eq!(status, ExitStatus(7 << 8));
}

#[test]
fn sleep_ends_with_eintr_or_goes_on() {
    for (flags, expected) in [(0, guest_abi::Errno::EINTR.raw()), (SA_RESTART, guest_abi::Errno::EINTR.raw())] {
        let handled = Arc::new(AtomicU64::new(0));
        let count = handled.clone();
        let status = run(
            2,
            Box::new(move |c, m, _| match (c.rip, c.r15) {
                (HANDLER, _) => {
                    count.fetch_add(1, Ordering::SeqCst);
                    handler_returns(c, m)
                }
                (_, 0) => sigaction(c, m, 1, 14, flags),
                (_, 1) => {
                    // setitimer: once, after 20 ms.
                    m.store(c.rsp, &[0, 0, 0, 20_000]);
                    call(c, 2, raw::__NR_setitimer, [0, c.rsp, 0, 0, 0, 0])
                }
                (_, 2) => {
                    m.store(c.rsp, &[50, 0]);
                    call(c, 3, raw::__NR_nanosleep, [c.rsp, 0, 0, 0, 0, 0])
                }
                // nanosleep is never restarted after a handler.
                (_, 3) => {
                    let e = (c.rax as i64).unsigned_abs();
                    exit_group(c, e)
                }
                _ => Exit::Broken("lost"),
            }),
        );
        assert_eq!(status, ExitStatus(expected << 8));
        assert_eq!(handled.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn stop_and_continue_are_reported_and_a_sleep_goes_on() {
    let status = run(
        2,
        Box::new(|c, m, _| match c.r15 {
            0 => call(c, 1, raw::__NR_fork, [0; 6]),
            // The child sleeps; being stopped and continued does not end that.
            1 if c.rax == 0 => {
                m.store(c.rsp, &[0, 300_000_000]);
                call(c, 20, raw::__NR_nanosleep, [c.rsp, c.rsp, 0, 0, 0, 0])
            }
            // The instruction pointer is back at the call, which is restart_syscall(2) now.
            20 if c.rax == u64::from(raw::__NR_restart_syscall) => Exit::Syscall,
            20 if c.rax == 0 => call(c, 99, raw::__NR_exit, [5, 0, 0, 0, 0, 0]),
            20 => call(c, 99, raw::__NR_exit, [(c.rax as i64).unsigned_abs(), 0, 0, 0, 0, 0]),
            1 => {
                c.r14 = c.rax;
                call(c, 2, raw::__NR_kill, [c.r14, 19, 0, 0, 0, 0])
            }
            2 => call(c, 3, raw::__NR_wait4, [c.r14, c.rsp, 2, 0, 0, 0]),
            3 => {
                assert_eq!(c.rax, c.r14);
                assert_eq!(m.load(c.rsp) & 0xffff, 19 << 8 | 0x7f);
                call(c, 4, raw::__NR_kill, [c.r14, 18, 0, 0, 0, 0])
            }
            4 => call(c, 5, raw::__NR_wait4, [c.r14, c.rsp, 8, 0, 0, 0]),
            5 => {
                assert_eq!(c.rax, c.r14);
                assert_eq!(m.load(c.rsp) & 0xffff, 0xffff);
                call(c, 6, raw::__NR_wait4, [c.r14, c.rsp, 0, 0, 0, 0])
            }
            6 => {
                let code = m.load(c.rsp) >> 8 & 0xff;
                exit_group(c, code)
            }
            _ => Exit::Broken("lost"),
        }),
    );
    assert_eq!(status, ExitStatus(5 << 8));
}

const THREAD_FLAGS: u64 =
    (raw::CLONE_VM | raw::CLONE_FS | raw::CLONE_FILES | raw::CLONE_SIGHAND | raw::CLONE_THREAD) as u64;

#[test]
fn futex_wakes_meet_their_waiters() {
    const ROUNDS: u64 = 200;
    let status = run(
        2,
        Box::new(|c, m, _| {
            let word = c.rbx;
            let private = 128;
            match c.r15 {
                0 => {
                    c.rbx = c.rsp;
                    m.store(c.rsp, &[0]);
                    call(c, 1, raw::__NR_clone, [THREAD_FLAGS, 0, 0, 0, 0, 0])
                }
                // The new thread raises the word and wakes.
                1 if c.rax == 0 => {
                    let n = m.load(word);
                    m.store(word, &[n + 1]);
                    call(c, if n + 1 == ROUNDS { 30 } else { 31 }, raw::__NR_futex, [word, 1 | private, 1, 0, 0, 0])
                }
                30 => call(c, 99, raw::__NR_exit, [0; 6]),
                31 => {
                    c.rax = 0;
                    call(c, 32, raw::__NR_sched_yield, [0; 6])
                }
                32 => {
                    c.r15 = 1;
                    c.rax = 0;
                    call(c, 1, raw::__NR_sched_yield, [0; 6])
                }
                // The first thread waits until it has seen the last round.
                1 | 2 => match m.load(word) {
                    ROUNDS => exit_group(c, 3),
                    n => call(c, 2, raw::__NR_futex, [word, private, n & 0xffff_ffff, 0, 0, 0]),
                },
                _ => Exit::Broken("lost"),
            }
        }),
    );
    assert_eq!(status, ExitStatus(3 << 8));
}

#[test]
fn an_unhandled_fault_kills_with_a_core_and_init_dies_of_its_own() {
    let status = run(1, Box::new(|_, _, _| Exit::Exception { vector: 13, error: 0, cr2: 0 }));
    assert_eq!(status, ExitStatus(11));
}

#[test]
fn init_is_not_killed_from_inside() {
    let status = run(
        1,
        Box::new(|c, _, _| match c.r15 {
            0 => call(c, 1, raw::__NR_fork, [0; 6]),
            1 if c.rax == 0 => call(c, 10, raw::__NR_kill, [1, 9, 0, 0, 0, 0]),
            1 => call(c, 2, raw::__NR_wait4, [u64::MAX, 0, 0, 0, 0, 0]),
            2 => exit_group(c, 4),
            10 => call(c, 11, raw::__NR_kill, [1, 15, 0, 0, 0, 0]),
            11 => exit_group(c, 0),
            _ => Exit::Broken("lost"),
        }),
    );
    assert_eq!(status, ExitStatus(4 << 8));
    let status = run(1, Box::new(|c, _, _| call(c, 1, raw::__NR_kill, [1, 9, 0, 0, 0, 0])));
    assert_eq!(status, ExitStatus(9), "its own signal acts on the command as on any process");
}
