//! Direct calls: a program whose call sites jump to trampolines gets the same registers, flags and memory as by SYSCALL, whatever the moment
//! at which it is kicked. Passes with a plain message where there is no KVM, or SYSCALL arrives in ring 0.
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use guest_abi::layout::PAGE_SIZE;
use iced_x86::code_asm::{CodeAssembler, CodeLabel, eax, ptr, qword_ptr, r11, r12, r13, r14, r15, rax, rbx, rcx, rsp};
use sentry::platform::{DirectCalls, Exit, GuestSpace, Platform, Pte, PteFlags, UserContext};
use vmm::kvm::PlatformError;
use vmm::platform::{Config, KvmPlatform, Service};

const CODE: u64 = 0x40_0000;
const TRAMPOLINES: u64 = 0x50_0000;
const STACK: u64 = 0x60_0000;
/// CF PF AF ZF SF OF, and what is always set in ring 3.
const FLAGS: u64 = 0xad7;
const CALL: u16 = 39;
const RED: u32 = 0x5a5a_1234;

/// The checks after a call: RBX sums the results, R14 collects what is wrong with RCX, R11, the flags and the red zone.
fn checks(a: &mut CodeAssembler, after: &mut CodeLabel) -> Result<(), iced_x86::IcedError> {
    a.set_label(after)?;
    // The word just below the stack first: pushing the flags overwrites it.
    a.mov(r12, qword_ptr(rsp - 8))?;
    a.pushfq()?;
    a.pop(r13)?;
    a.xor(r12, RED as i32)?;
    a.or(r14, r12)?;
    a.lea(r12, ptr(*after))?;
    a.xor(r12, rcx)?;
    a.or(r14, r12)?;
    a.mov(r12, r11)?;
    a.xor(r12, FLAGS as i32)?;
    a.or(r14, r12)?;
    a.xor(r13, FLAGS as i32)?;
    a.or(r14, r13)?;
    a.add(rbx, rax)
}

fn flags(a: &mut CodeAssembler) -> Result<(), iced_x86::IcedError> {
    a.push(FLAGS as i32)?;
    a.popfq()?;
    a.mov(qword_ptr(rsp - 8), RED as i32)
}

/// The code, and where its two calls return to: one with its number before it, one with padding behind it.
fn program() -> (Vec<u8>, [u64; 2]) {
    let mut a = CodeAssembler::new(64).unwrap();
    let mut build = || -> Result<[CodeLabel; 3], iced_x86::IcedError> {
        let (mut again, mut by_number, mut by_call) = (a.create_label(), a.create_label(), a.create_label());
        let (mut outside, mut on) = (a.create_label(), a.create_label());
        a.nops_with_size(32)?;
        a.set_label(&mut again)?;
        flags(&mut a)?;
        a.mov(eax, u32::from(CALL))?;
        a.syscall()?;
        checks(&mut a, &mut by_number)?;
        flags(&mut a)?;
        a.mov(eax, u32::from(CALL))?;
        // Some instruction between the number and the call.
        a.lea(rcx, ptr(rax))?;
        a.syscall()?;
        checks(&mut a, &mut by_call)?;
        a.jmp(outside)?;
        a.int3()?;
        a.int3()?;
        a.nops_with_size(9)?;
        a.nops_with_size(9)?;
        a.nops_with_size(9)?;
        a.set_label(&mut outside)?;
        a.dec(r15)?;
        a.jz(on)?;
        a.jmp(again)?;
        a.set_label(&mut on)?;
        a.ud2()?;
        Ok([again, by_number, by_call])
    };
    let [_, by_number, by_call] = build().unwrap();
    let options = iced_x86::BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS;
    let block = a.assemble_options(CODE, options).unwrap();
    let at = |label| block.label_ip(label).unwrap();
    let after = [at(&by_number), at(&by_call)];
    (block.inner.code_buffer, after)
}

/// Padding before a boundary of 16 bytes behind the second call, if the first found none: `program` cannot align.
fn patched(direct: &dyn DirectCalls, code: &[u8], after: [u64; 2]) -> (Vec<u8>, Vec<u8>) {
    let mut page = code.to_vec();
    page.resize(PAGE_SIZE as usize, 0x90);
    let mut trampolines = direct.page_head();
    trampolines.resize(PAGE_SIZE as usize, 0xcc);
    for (n, after) in after.into_iter().enumerate() {
        let at = (n as u64 + 1) * direct.trampoline_len();
        let plan = direct.plan(&page, CODE, after, u64::from(CALL), TRAMPOLINES + at).expect("it can be direct");
        assert_eq!(plan.patches.len(), n + 1);
        for (va, bytes) in plan.patches {
            let from = (va - CODE) as usize;
            page[from..from + bytes.len()].copy_from_slice(&bytes);
        }
        trampolines[at as usize..at as usize + plan.trampoline.len()].copy_from_slice(&plan.trampoline);
    }
    (page, trampolines)
}

fn space(p: &KvmPlatform, text: &[u8], trampolines: &[u8]) -> std::sync::Arc<dyn GuestSpace> {
    let space = p.new_space().unwrap();
    let m = p.memory();
    let show = |va, bytes: &[u8], flags| {
        let pa = m.alloc().unwrap();
        m.write(pa, bytes).unwrap();
        space.map(va, Pte { pa, flags: flags | PteFlags::OWNED }).unwrap();
    };
    show(CODE, text, PteFlags::EXEC | PteFlags::PATCHED);
    show(TRAMPOLINES, trampolines, PteFlags::EXEC | PteFlags::TRAMPOLINES);
    show(STACK, &[0; 4096], PteFlags::WRITE);
    space
}

#[test]
fn direct_calls_keep_every_register() {
    let p = match KvmPlatform::new(Config { cpus: 1, memory_limit: 64 << 20, service: Service::Off, rewrite: true }) {
        Ok(p) => p,
        Err(e @ (PlatformError::NoDevice | PlatformError::NoPermission)) => {
            println!("skipped: {e}");
            return;
        }
        Err(e) => panic!("{e}"),
    };
    let Some(direct) = p.direct_calls() else {
        println!("skipped: SYSCALL arrives in ring 0");
        return;
    };
    let (code, after) = program();
    let (text, trampolines) = patched(direct, &code, after);
    let space = space(&p, &text, &trampolines);
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
        for (value, rounds) in [(Some(7), 400_000), (None, 300), (Some(0), 100_000)] {
            p.set_answer(0, CALL, value);
            let fixed = UserContext { rdi: 3, rsi: 4, rdx: 5, r10: 6, r8: 7, r9: 8, rbp: 9, ..Default::default() };
            let mut ctx = UserContext { rip: CODE, rsp: STACK + 4096, rflags: 0x202, r15: rounds, ..fixed };
            let (mut left, mut answered) = (0, 0);
            loop {
                let exit = p.enter(&*space, &mut ctx, &*fpu);
                answered += p.take_answered(0, CALL);
                match exit {
                    Exit::Syscall => {
                        left += 1;
                        assert_eq!(ctx.rax, u64::from(CALL));
                        assert!(after.contains(&ctx.rip) && ctx.rcx == ctx.rip, "{ctx:x?}");
                        ctx.rax = value.map_or(1, u64::from);
                    }
                    // Never where no program text is.
                    Exit::Interrupted => assert!((CODE..CODE + code.len() as u64).contains(&ctx.rip), "{ctx:x?}"),
                    Exit::Exception { vector: 6, .. } => break,
                    e => panic!("{e:?} {ctx:x?}"),
                }
            }
            assert_eq!((ctx.rbx, ctx.r14), (value.map_or(1, u64::from) * 2 * rounds, 0));
            assert_eq!(left + answered, 2 * rounds, "each call is answered or leaves");
            assert_eq!(left == 2 * rounds, value.is_none());
            let kept = (ctx.rdi, ctx.rsi, ctx.rdx, ctx.r10, ctx.r8, ctx.r9, ctx.rbp, ctx.rsp);
            assert_eq!(kept, (3, 4, 5, 6, 7, 8, 9, STACK + 4096));
        }
        over.store(true, Ordering::SeqCst);
    });
}

/// Every instruction of the way is stepped over: the traps are where the program's own instructions are.
#[test]
fn single_steps_do_not_see_the_way() {
    let Ok(p) = KvmPlatform::new(Config { cpus: 1, memory_limit: 64 << 20, service: Service::Off, rewrite: true })
    else {
        return;
    };
    let Some(direct) = p.direct_calls() else { return };
    let (code, after) = program();
    let (text, trampolines) = patched(direct, &code, after);
    let mut plain = code.clone();
    plain.resize(PAGE_SIZE as usize, 0x90);
    p.attach_worker(0).expect("attach");
    let fpu = p.new_fpu();
    p.set_answer(0, CALL, Some(7));
    let walk = |text: &[u8]| {
        let space = space(&p, text, &trampolines);
        let mut ctx = UserContext { rip: CODE, rsp: STACK + 4096, rflags: 0x202, r15: 2, ..Default::default() };
        let mut path = Vec::new();
        loop {
            // The program sets its flags itself; the step is the host's, as a tracer's.
            ctx.rflags |= 0x100;
            match p.enter(&*space, &mut ctx, &*fpu) {
                Exit::Exception { vector: 1, .. } => path.push((ctx.rip, ctx.rax)),
                Exit::Exception { vector: 6, .. } => return path,
                Exit::Syscall => {
                    path.push((ctx.rip, ctx.rax));
                    ctx.rax = 7;
                }
                e => panic!("{e:?} {ctx:x?}"),
            }
        }
    };
    assert_eq!(walk(&text), walk(&plain));
}
