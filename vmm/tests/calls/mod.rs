//! Guest code that the tests of served and answered calls share.
use iced_x86::code_asm::{CodeAssembler, eax, ptr, r11, r12, r13, r14, r15, rax, rbx, rcx};

/// CF PF AF ZF SF OF, and what is always set in ring 3.
pub const FLAGS: u64 = 0xad7;

/// `call` in a loop of R15 rounds; RBX sums the results, R14 collects what is wrong with RCX, R11 or the flags.
pub fn calling(a: &mut CodeAssembler, call: u32) -> Result<(), iced_x86::IcedError> {
    let (mut again, mut after) = (a.create_label(), a.create_label());
    a.set_label(&mut again)?;
    a.push(FLAGS as i32)?;
    a.popfq()?;
    a.mov(eax, call)?;
    a.syscall()?;
    a.set_label(&mut after)?;
    a.pushfq()?;
    a.pop(r13)?;
    a.lea(r12, ptr(after))?;
    a.xor(r12, rcx)?;
    a.or(r14, r12)?;
    a.mov(r12, r11)?;
    a.xor(r12, FLAGS as i32)?;
    a.or(r14, r12)?;
    a.xor(r13, FLAGS as i32)?;
    a.or(r14, r13)?;
    a.add(rbx, rax)?;
    a.dec(r15)?;
    a.jnz(again)?;
    a.ud2()
}
