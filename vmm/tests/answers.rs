//! System calls that the entry answers by itself: results, registers, counts, and kicks at every moment. Passes with a plain message where
//! there is no KVM.
mod calls;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use iced_x86::code_asm::CodeAssembler;
use sentry::platform::{Exit, Platform, Pte, PteFlags, UserContext};
use vmm::kvm::PlatformError;
use vmm::platform::{Config, KvmPlatform, Service};

const CODE: u64 = 0x40_0000;
const STACK: u64 = 0x60_0000;
const CALL: u16 = 39;
const ROUNDS: u64 = 20_000;

#[test]
fn answers_come_once_and_keep_every_register() {
    let p = match KvmPlatform::new(Config { cpus: 1, memory_limit: 64 << 20, service: Service::Off, rewrite: false }) {
        Ok(p) => p,
        Err(e @ (PlatformError::NoDevice | PlatformError::NoPermission)) => {
            println!("skipped: {e}");
            return;
        }
        Err(e) => panic!("{e}"),
    };
    let mut a = CodeAssembler::new(64).unwrap();
    calls::calling(&mut a, u32::from(CALL)).unwrap();
    let space = p.new_space().unwrap();
    let m = p.memory();
    let (text, stack) = (m.alloc().unwrap(), m.alloc().unwrap());
    m.write(text, &a.assemble(CODE).unwrap()).unwrap();
    space.map(CODE, Pte { pa: text, flags: PteFlags::EXEC | PteFlags::OWNED }).unwrap();
    space.map(STACK, Pte { pa: stack, flags: PteFlags::WRITE | PteFlags::OWNED }).unwrap();
    p.attach_worker(0).expect("attach");
    let fpu = p.new_fpu();
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                p.kick(0);
                std::thread::sleep(Duration::from_micros(20));
            }
        });
        let begin = Instant::now();
        let (mut rounds, mut all_left, mut interrupted) = (0, 0, 0);
        // An answer of 0 is one; one that is taken back makes calls leave.
        for value in [Some(7), Some(0), None, Some(u32::MAX)] {
            p.set_answer(0, CALL, value);
            let fixed = UserContext { rdi: 3, rsi: 4, rdx: 5, r10: 6, r8: 7, r9: 8, rbp: 9, ..Default::default() };
            let n = if value.is_none() || begin.elapsed() > Duration::from_secs(20) { 100 } else { ROUNDS };
            let mut ctx = UserContext { rip: CODE, rsp: STACK + 4096, rflags: 0x202, r15: n, ..fixed };
            let (mut left, mut answered) = (0, 0);
            loop {
                let exit = p.enter(&*space, &mut ctx, &*fpu);
                answered += p.take_answered(0, CALL);
                match exit {
                    // Interrupted before the answer: it is a call like any other.
                    Exit::Syscall => {
                        left += 1;
                        assert_eq!(ctx.rax, u64::from(CALL));
                        ctx.rax = value.map_or(1, u64::from);
                    }
                    Exit::Interrupted => interrupted += 1,
                    Exit::Exception { vector: 6, .. } => break,
                    e => panic!("{e:?}"),
                }
            }
            assert_eq!((ctx.rbx, ctx.r14), (value.map_or(1, u64::from).wrapping_mul(n), 0));
            assert_eq!(left + answered, n, "each call is answered or leaves");
            assert_eq!(left == n, value.is_none());
            let kept = (ctx.rdi, ctx.rsi, ctx.rdx, ctx.r10, ctx.r8, ctx.r9, ctx.rbp, ctx.rsp);
            assert_eq!(kept, (3, 4, 5, 6, 7, 8, 9, STACK + 4096));
            rounds += n;
            all_left += left;
        }
        over.store(true, Ordering::SeqCst);
        println!("{rounds} calls, {all_left} left, {interrupted} interruptions");
    });
}
