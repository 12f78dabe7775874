//! System calls served by an idle worker while their program stays in the guest: registers, results, kicks, and programs that write the
//! request page themselves. Passes with a plain message where there is no KVM.
mod calls;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use guest_abi::layout::REQUEST_PAGE;
use iced_x86::code_asm::{CodeAssembler, dword_ptr, eax, qword_ptr, rbx, rdi, rsi};
use sentry::platform::{Exit, GuestSpace, Platform, Pte, PteFlags, RequestedCalls, Served, UserContext};
use vmm::kvm::PlatformError;
use vmm::platform::{Config, KvmPlatform, Service};

const CODE: u64 = 0x40_0000;
const STACK: u64 = 0x60_0000;
const CALL: u64 = 500;
const ROUNDS: u64 = 500;

struct Calls {
    platform: Weak<KvmPlatform>,
    asked: AtomicU64,
    served: AtomicU64,
    held: AtomicU64,
    /// Every how many calls one is held; the one after it is refused.
    hold: u64,
}

impl RequestedCalls for Calls {
    fn serve(&self, cpu: usize, nr: u64, args: [u64; 6], _from: u64) -> Served {
        assert_eq!(cpu, 0);
        if nr != CALL {
            return Served::Refused;
        }
        let n = self.asked.fetch_add(1, Ordering::SeqCst);
        if self.hold != 0 && n.is_multiple_of(self.hold) {
            self.held.fetch_add(1, Ordering::SeqCst);
            self.served.fetch_add(1, Ordering::SeqCst);
            self.platform.upgrade().unwrap().kick(cpu);
            return Served::Held(args[0] + args[5]);
        }
        if self.hold != 0 && n % self.hold == 1 {
            return Served::Refused;
        }
        self.served.fetch_add(1, Ordering::SeqCst);
        Served::Done(args[0] + args[5])
    }
}

fn machine() -> Option<Arc<KvmPlatform>> {
    match KvmPlatform::new(Config { cpus: 2, memory_limit: 64 << 20, service: Service::Always, rewrite: true }) {
        Ok(p) => Some(p),
        Err(e @ (PlatformError::NoDevice | PlatformError::NoPermission)) => {
            println!("skipped: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

fn space(
    p: &Arc<KvmPlatform>,
    build: impl FnOnce(&mut CodeAssembler) -> Result<(), iced_x86::IcedError>,
) -> Arc<dyn GuestSpace> {
    let mut a = CodeAssembler::new(64).unwrap();
    build(&mut a).unwrap();
    let space = p.new_space().unwrap();
    let m = p.memory();
    let (text, stack) = (m.alloc().unwrap(), m.alloc().unwrap());
    m.write(text, &a.assemble(CODE).unwrap()).unwrap();
    space.map(CODE, Pte { pa: text, flags: PteFlags::EXEC | PteFlags::OWNED }).unwrap();
    space.map(STACK, Pte { pa: stack, flags: PteFlags::WRITE | PteFlags::OWNED }).unwrap();
    space
}

/// Runs `body` as worker 0 while worker 1 has nothing to do.
fn beside_an_idle_worker(p: &Arc<KvmPlatform>, body: impl FnOnce() + Send) {
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            p.attach_worker(1).expect("attach");
            while !over.load(Ordering::SeqCst) {
                p.park(1);
            }
        });
        let worker = s.spawn(|| {
            p.attach_worker(0).expect("attach");
            body();
        });
        let result = worker.join();
        over.store(true, Ordering::SeqCst);
        p.unpark(1);
        result.unwrap();
    });
}

fn keeps_registers(hold: u64) {
    let Some(p) = machine() else { return };
    let calls = Arc::new(Calls {
        platform: Arc::downgrade(&p),
        asked: AtomicU64::new(0),
        served: AtomicU64::new(0),
        held: AtomicU64::new(0),
        hold,
    });
    p.serve_requests(calls.clone());
    let space = space(&p, |a| calls::calling(a, CALL as u32));
    let begin = Instant::now();
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        // Kicks at all moments: a call is served once, by whomever.
        s.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                p.kick(0);
                std::thread::sleep(Duration::from_micros(50));
            }
        });
        keeps_on(&p, &calls, &*space, begin);
        over.store(true, Ordering::SeqCst);
    });
}

fn keeps_on(p: &Arc<KvmPlatform>, calls: &Calls, space: &dyn GuestSpace, begin: Instant) {
    let hold = calls.hold;
    beside_an_idle_worker(p, || {
        let fpu = p.new_fpu();
        // A busy machine may let the two workers meet late.
        while begin.elapsed() < Duration::from_secs(60) {
            let fixed = UserContext { rdi: 3, rsi: 4, rdx: 5, r10: 6, r8: 7, r9: 8, rbp: 9, ..Default::default() };
            let mut ctx = UserContext { rip: CODE, rsp: STACK + 4096, rflags: 0x202, r15: ROUNDS, ..fixed };
            let before = calls.served.load(Ordering::SeqCst);
            let mut left = 0;
            loop {
                match p.enter(space, &mut ctx, &*fpu) {
                    Exit::Syscall => {
                        left += 1;
                        assert_eq!(ctx.rax, CALL);
                        ctx.rax = ctx.rdi + ctx.r9;
                    }
                    Exit::Interrupted => {}
                    Exit::Exception { vector: 6, .. } => break,
                    e => panic!("{e:?}"),
                }
            }
            assert_eq!((ctx.rbx, ctx.r14), (ROUNDS * 11, 0));
            assert_eq!(left + calls.served.load(Ordering::SeqCst) - before, ROUNDS, "each call is served once");
            let kept = (ctx.rdi, ctx.rsi, ctx.rdx, ctx.r10, ctx.r8, ctx.r9, ctx.rbp, ctx.rsp);
            assert_eq!(kept, (3, 4, 5, 6, 7, 8, 9, STACK + 4096));
            if calls.served.load(Ordering::SeqCst) > 200 && (hold == 0 || calls.held.load(Ordering::SeqCst) > 5) {
                return;
            }
        }
        panic!("only {} calls were served inside", calls.served.load(Ordering::SeqCst));
    });
}

#[test]
fn calls_served_inside_keep_every_register() {
    keeps_registers(0);
}

#[test]
fn calls_that_are_held_or_refused_keep_every_register() {
    keeps_registers(3);
}

/// A program that asks by itself, forges states and jumps into the stub gets results, signals or nothing; a kick always ends it.
#[test]
fn a_forged_request_page_harms_nobody() {
    let Some(p) = machine() else { return };
    let calls = Arc::new(Calls {
        platform: Arc::downgrade(&p),
        asked: AtomicU64::new(0),
        served: AtomicU64::new(0),
        held: AtomicU64::new(0),
        hold: 0,
    });
    p.serve_requests(calls);
    // Writes the state in RSI and the call, and then waits, or jumps to the stub at RDI if that is not 0.
    let space = space(&p, |a| {
        let (mut wait, mut jump) = (a.create_label(), a.create_label());
        a.mov(rbx, REQUEST_PAGE)?;
        a.mov(qword_ptr(rbx + 8), CALL as i32)?;
        a.mov(qword_ptr(rbx), rsi)?;
        a.test(rdi, rdi)?;
        a.jnz(jump)?;
        a.set_label(&mut wait)?;
        a.mov(eax, dword_ptr(rbx))?;
        a.jmp(wait)?;
        a.set_label(&mut jump)?;
        a.jmp(rdi)
    });
    beside_an_idle_worker(&p, || {
        let fpu = p.new_fpu();
        for state in 0..8 {
            for to in [0].into_iter().chain(REQUEST_PAGE + 0x1000..REQUEST_PAGE + 0x1100) {
                let mut ctx = UserContext {
                    rip: CODE,
                    rdi: to,
                    rsi: state,
                    rsp: STACK + 4096,
                    rflags: 0x202,
                    ..Default::default()
                };
                let kicker = p.clone();
                let kick = std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(2));
                    kicker.kick(0);
                });
                let exit = p.enter(&*space, &mut ctx, &*fpu);
                assert!(!matches!(exit, Exit::Broken(_) | Exit::BusError { .. }), "{exit:?} at {:#x}", ctx.rip);
                kick.join().unwrap();
                // Whatever kick is left over.
                let mut ctx = UserContext { rip: 1, ..Default::default() };
                while p.enter(&*space, &mut ctx, &*fpu) == Exit::Interrupted {}
            }
        }
    });
}
