//! Which addresses an instruction touches: KVM tells of memory that the host cannot supply by its guest-physical address at
//! best, while the program is owed the address it used. Decides nothing.
use iced_x86::{Decoder, DecoderOptions, InstructionInfoFactory, OpAccess, OpKind, Register};
use sentry::platform::{Touch, UserContext};

/// Addresses of memory operands and their sizes, then what a push, pop or call would touch, then the instruction itself.
pub fn touched(code: &[u8], ctx: &UserContext) -> Vec<(u64, u64)> {
    let instruction = Decoder::with_ip(64, code, ctx.rip, DecoderOptions::NONE).decode();
    let mut out = Vec::new();
    for operand in 0..instruction.op_count() {
        let kind = instruction.op_kind(operand);
        let memory = matches!(
            kind,
            OpKind::Memory
                | OpKind::MemorySegRSI
                | OpKind::MemorySegESI
                | OpKind::MemorySegRDI
                | OpKind::MemorySegEDI
                | OpKind::MemoryESRDI
                | OpKind::MemoryESEDI
        );
        if memory && let Some(at) = instruction.virtual_address(operand, 0, |register, _, _| value(register, ctx)) {
            out.push((at, instruction.memory_size().size().max(1) as u64));
        }
    }
    out.push((ctx.rsp.wrapping_sub(8), 16));
    out.push((ctx.rip, instruction.len().max(1) as u64));
    out
}

/// What an instruction reads and writes, its stack included.
pub fn accesses(code: &[u8], ctx: &UserContext) -> Vec<Touch> {
    let instruction = Decoder::with_ip(64, code, ctx.rip, DecoderOptions::NONE).decode();
    if instruction.is_invalid() {
        return Vec::new();
    }
    let mut factory = InstructionInfoFactory::new();
    let used = factory.info(&instruction).used_memory().iter().filter_map(|m| {
        let write = match m.access() {
            OpAccess::Read | OpAccess::CondRead => false,
            OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite => true,
            _ => return None,
        };
        let addr = m.virtual_address(0, |register, _, _| value(register, ctx))?;
        Some(Touch { addr, len: m.memory_size().size().max(1) as u64, write })
    });
    used.collect()
}

fn value(register: Register, ctx: &UserContext) -> Option<u64> {
    let low = |v: u64| v & 0xffff_ffff;
    Some(match register {
        Register::RAX => ctx.rax,
        Register::EAX => low(ctx.rax),
        Register::RBX => ctx.rbx,
        Register::EBX => low(ctx.rbx),
        Register::RCX => ctx.rcx,
        Register::ECX => low(ctx.rcx),
        Register::RDX => ctx.rdx,
        Register::EDX => low(ctx.rdx),
        Register::RSI => ctx.rsi,
        Register::ESI => low(ctx.rsi),
        Register::RDI => ctx.rdi,
        Register::EDI => low(ctx.rdi),
        Register::RBP => ctx.rbp,
        Register::EBP => low(ctx.rbp),
        Register::RSP => ctx.rsp,
        Register::ESP => low(ctx.rsp),
        Register::R8 => ctx.r8,
        Register::R8D => low(ctx.r8),
        Register::R9 => ctx.r9,
        Register::R9D => low(ctx.r9),
        Register::R10 => ctx.r10,
        Register::R10D => low(ctx.r10),
        Register::R11 => ctx.r11,
        Register::R11D => low(ctx.r11),
        Register::R12 => ctx.r12,
        Register::R12D => low(ctx.r12),
        Register::R13 => ctx.r13,
        Register::R13D => low(ctx.r13),
        Register::R14 => ctx.r14,
        Register::R14D => low(ctx.r14),
        Register::R15 => ctx.r15,
        Register::R15D => low(ctx.r15),
        Register::FS => ctx.fs_base,
        Register::GS => ctx.gs_base,
        Register::CS | Register::DS | Register::ES | Register::SS => 0,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_operands() {
        let ctx = UserContext {
            rax: 0x1000,
            rbx: 8,
            rsi: 0x2000,
            rdi: 0x3000,
            rsp: 0x7000,
            rip: 0x40_0000,
            fs_base: 0x10_0000,
            ..Default::default()
        };
        let first = |code: &[u8]| touched(code, &ctx)[0];
        assert_eq!(first(&[0x8b, 0x44, 0xd8, 0x04]), (0x1044, 4)); // mov 4(%rax,%rbx,8), %eax
        assert_eq!(first(&[0x64, 0x8a, 0x00]), (0x10_1000, 1)); // mov %fs:(%rax), %al
        assert_eq!(first(&[0x8b, 0x05, 0x10, 0, 0, 0]), (0x40_0016, 4)); // mov 16(%rip), %eax
        let movs = touched(&[0xf3, 0xa4], &ctx); // rep movsb
        assert_eq!(movs[..2], [(0x3000, 1), (0x2000, 1)]);
        assert_eq!(first(&[0x50]), (0x6ff8, 16)); // push %rax
        let touch = |addr, len, write| Touch { addr, len, write };
        assert_eq!(accesses(&[0x50], &ctx), [touch(0x6ff8, 8, true)]);
        assert_eq!(accesses(&[0x8b, 0x44, 0xd8, 0x04], &ctx), [touch(0x1044, 4, false)]);
        assert_eq!(accesses(&[0x01, 0x18], &ctx), [touch(0x1000, 4, true)]); // add %ebx, (%rax)
        assert_eq!(accesses(&[0x8d, 0x00], &ctx), []); // lea (%rax), %eax
    }
}
