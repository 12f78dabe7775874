//! Direct calls: instead of SYSCALL, which is slow where it arrives in ring 3, a call site jumps to a trampoline near it, and that to the
//! entry stub. Owns which instructions can be replaced and by what, and the format of trampolines; never whose pages they are in.
//!
//! Two forms of a site can be replaced, and neither leaves an instruction that begins at another place than before:
//!
//! - *Number*: `mov $nr,%eax` of five bytes (or of seven, with REX.W) directly before the SYSCALL becomes `jmp` to the trampoline, which
//!   sets RAX. The SYSCALL stays, for whoever jumps there and for calls that are made again. That the move is what is executed there
//!   is proven: RAX holds its number, and no other instruction that could have been executed ends where it ends.
//! - *Call*: the two bytes of the SYSCALL become a short `jmp` to five bytes of padding between functions, which become a `jmp` to the
//!   trampoline. That the SYSCALL is an instruction is certain, since it was executed, and what follows it up to the padding is
//!   decoded from there on.
//!
//! A trampoline sets RCX as SYSCALL does and changes no other register, flag or byte of memory; the stub sets R11. Whoever finds a program
//! interrupted in one ends what it has begun: SYSCALL has been executed, as soon as the first jump was.
use core::sync::atomic::{AtomicU64, Ordering};

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register};
use sentry::platform::{DirectCall, DirectCalls};

/// Bytes of a trampoline. The first of a page holds the address of the stub instead.
pub const STRIDE: u64 = 32;
/// Bytes of the longest instruction.
const LONGEST: usize = 15;
/// Bytes of `jmp rel32`.
const JUMP: usize = 5;
/// The longest padding that is looked at.
const LONGEST_PAD: usize = 64;
/// How far a short jump reaches forwards.
const SHORT: usize = 127;
/// Numbers of calls are below.
const NUMBERS: u32 = 512;
const SYSCALL: [u8; 2] = [0x0f, 0x05];
const RT_SIGRETURN: u64 = 15;

/// What a trampoline stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// The address after the SYSCALL.
    pub after: u64,
    /// The number that the trampoline sets, in the form of that name.
    pub number: Option<u32>,
}

/// Trampolines that lead to one stub.
pub struct Trampolines {
    stub: u64,
    /// Sites planned so far.
    planned: AtomicU64,
}

impl Trampolines {
    /// With the address at which the stub takes direct calls.
    pub fn new(stub: u64) -> Trampolines {
        Trampolines { stub, planned: AtomicU64::new(0) }
    }

    /// Sites planned so far.
    pub fn planned(&self) -> u64 {
        self.planned.load(Ordering::Relaxed)
    }
}

impl DirectCalls for Trampolines {
    fn trampoline_len(&self) -> u64 {
        STRIDE
    }

    fn page_head(&self) -> Vec<u8> {
        let mut head = self.stub.to_le_bytes().to_vec();
        head.resize(STRIDE as usize, 0xcc);
        head
    }

    fn plan(&self, page: &[u8], base: u64, after: u64, number: u64, trampoline: u64) -> Option<DirectCall> {
        let plan = plan(page, base, after, number, trampoline)?;
        self.planned.fetch_add(1, Ordering::Relaxed);
        Some(plan)
    }
}

/// The operand of a RIP-relative jump or address whose instruction ends at `from`.
fn relative(from: u64, to: u64) -> Option<[u8; 4]> {
    i32::try_from(to.wrapping_sub(from).cast_signed()).ok().map(i32::to_le_bytes)
}

fn jump(at: u64, to: u64) -> Option<Vec<u8>> {
    let operand = relative(at.wrapping_add(JUMP as u64), to)?;
    Some([&[0xe9][..], &operand].concat())
}

/// The bytes of the trampoline at `at`: lea after(%rip),%rcx; mov $number,%eax; jmp *head(%rip).
fn trampoline(at: u64, site: Site) -> Option<Vec<u8>> {
    let mut code = vec![0x48, 0x8d, 0x0d];
    code.extend(relative(at.wrapping_add(7), site.after)?);
    if let Some(number) = site.number {
        code.push(0xb8);
        code.extend(number.to_le_bytes());
    }
    code.extend([0xff, 0x25]);
    let end = at.wrapping_add(code.len() as u64 + 4);
    code.extend(relative(end, at & !0xfff)?);
    code.resize(STRIDE as usize, 0xcc);
    Some(code)
}

/// What the trampoline at `at` stands for, from its bytes; None if there is none.
pub fn site(at: u64, code: &[u8]) -> Option<Site> {
    let word = |i: usize| Some(i32::from_le_bytes(code.get(i..i + 4)?.try_into().ok()?));
    if code.get(..3)? != [0x48, 0x8d, 0x0d] {
        return None;
    }
    let after = at.wrapping_add(7).wrapping_add_signed(i64::from(word(3)?));
    let number = if code.get(7) == Some(&0xb8) { Some(word(8)?.cast_unsigned()) } else { None };
    Some(Site { after, number })
}

/// Where a `jmp rel32` at `at` leads to.
pub fn target(at: u64, code: &[u8]) -> Option<u64> {
    if code.first() != Some(&0xe9) {
        return None;
    }
    let operand = i32::from_le_bytes(code.get(1..JUMP)?.try_into().ok()?);
    Some(at.wrapping_add(JUMP as u64).wrapping_add_signed(i64::from(operand)))
}

/// How to make the call direct that `page`, mapped at `base`, makes before `after`, with `number` in RAX, by the trampoline `at`.
fn plan(page: &[u8], base: u64, after: u64, number: u64, at: u64) -> Option<DirectCall> {
    let end = usize::try_from(after.checked_sub(base)?).ok()?;
    let start = end.checked_sub(SYSCALL.len())?;
    // By the bytes of the call of rt_sigreturn(2) unwinders know a signal frame.
    if page.get(start..end)? != SYSCALL || number == RT_SIGRETURN {
        return None;
    }
    by_number(page, base, start, number, at).or_else(|| by_call(page, base, start, at))
}

fn decode(code: &[u8]) -> Option<Instruction> {
    let mut decoder = Decoder::new(64, code, DecoderOptions::NONE);
    let instruction = decoder.decode();
    (!instruction.is_invalid()).then_some(instruction)
}

/// The form named Number; the SYSCALL is at `start`.
fn by_number(page: &[u8], base: u64, start: usize, number: u64, at: u64) -> Option<DirectCall> {
    // With a small number nothing shorter than the move ends where it does, either.
    let number = u32::try_from(number).ok().filter(|&n| n < NUMBERS)?;
    // What ends where SYSCALL begins, by its length; all lengths have to be seen.
    start.checked_sub(LONGEST)?;
    let mut found = None;
    for len in 1..=LONGEST {
        let from = start - len;
        let Some(i) = decode(page.get(from..start)?).filter(|i| i.len() == len) else { continue };
        let sets = match (i.code(), i.op0_kind(), i.op0_register()) {
            (Code::Mov_r32_imm32 | Code::Mov_rm32_imm32, OpKind::Register, Register::EAX)
            | (Code::Mov_rm64_imm32, OpKind::Register, Register::RAX) => i.immediate(1) == u64::from(number),
            _ => false,
        };
        match (sets, found) {
            // Nobody encodes it in six bytes: it is the end of the form of seven.
            (true, _) if i.code() == Code::Mov_rm32_imm32 && page.get(from.checked_sub(1)?) == Some(&0x48) => {}
            (true, None) => found = Some(from),
            (true, Some(_)) => return None,
            (false, _) if len > JUMP && !impossible(&i) => return None,
            (false, _) => {}
        }
    }
    let from = found?;
    let va = base.wrapping_add(from as u64);
    let after = base.wrapping_add((start + SYSCALL.len()) as u64);
    let code = trampoline(at, Site { after, number: Some(number) })?;
    Some(DirectCall { patches: vec![(va, jump(va, at)?)], trampoline: code })
}

/// Whether an instruction longer than the move cannot have been executed: it would have reached memory at twice the number of a call,
/// where there is none. (The move's opcode can be read as an operand of RAX with a displacement.)
fn impossible(i: &Instruction) -> bool {
    let touches = (0..i.op_count()).any(|n| i.op_kind(n) == OpKind::Memory)
        && !matches!(i.mnemonic(), Mnemonic::Lea | Mnemonic::Nop);
    touches
        && i.memory_base() == Register::RAX
        && i.memory_index() == Register::None
        && i.segment_prefix() == Register::None
        && (0..i64::from(NUMBERS)).contains(&i.memory_displacement64().cast_signed())
}

/// The form named Call.
fn by_call(page: &[u8], base: u64, start: usize, at: u64) -> Option<DirectCall> {
    let va = base.wrapping_add(start as u64);
    let after = start + SYSCALL.len();
    let (hole, room) = padding(page, after)?;
    let back = u8::try_from(hole - after).ok().filter(|&n| usize::from(n) <= SHORT)?;
    let hole_va = base.wrapping_add(hole as u64);
    let site = Site { after: va.wrapping_add(2), number: None };
    // To the end of the padding, so that it can still be decoded from its beginning.
    let mut filling = jump(hole_va, at)?;
    filling.resize(room, 0xcc);
    Some(DirectCall { patches: vec![(va, vec![0xeb, back]), (hole_va, filling)], trampoline: trampoline(at, site)? })
}

/// The first padding within reach of a short jump from `from`, where an instruction begins, and how much of it is replaced. It follows what
/// never goes on.
fn padding(page: &[u8], from: usize) -> Option<(usize, usize)> {
    let mut at = from;
    let mut dead = false;
    while at <= from + SHORT {
        if dead && let Some(room) = pad(page, at) {
            return Some((at, room));
        }
        let i = instruction(page, at)?;
        dead = matches!(i.flow_control(), FlowControl::Return | FlowControl::UnconditionalBranch);
        at += i.len();
    }
    None
}

fn instruction(page: &[u8], at: usize) -> Option<Instruction> {
    let rest = page.get(at..)?;
    decode(rest.get(..LONGEST.min(rest.len()))?)
}

/// How many bytes at `at` are whole instructions without effect, enough for a jump, if nothing but such leads from there up to a boundary of
/// 16 bytes. Functions and loops begin at such boundaries: none is where the jump will be.
fn pad(page: &[u8], at: usize) -> Option<usize> {
    let (mut end, mut room) = (at, None);
    loop {
        if end.is_multiple_of(16) {
            return room;
        }
        let i = instruction(page, end)?;
        if !matches!(i.mnemonic(), Mnemonic::Nop | Mnemonic::Int3) || end - at > LONGEST_PAD {
            return None;
        }
        end += i.len();
        if room.is_none() && end - at >= JUMP {
            room = Some(end - at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0x7f12_3456_7000;
    const AT: u64 = BASE + 0x10_0020;

    fn page(at: usize, code: &[u8]) -> Vec<u8> {
        let mut page = vec![0x90; 4096];
        page[at..at + code.len()].copy_from_slice(code);
        page
    }

    fn planned(code: &[u8], syscall: usize, number: u64) -> Option<DirectCall> {
        plan(&page(64, code), BASE, BASE + 64 + syscall as u64 + 2, number, AT)
    }

    #[test]
    fn a_number_before_the_call_is_replaced() {
        // endbr64; mov $39,%eax; syscall; ret
        let code = [0xf3, 0x0f, 0x1e, 0xfa, 0xb8, 39, 0, 0, 0, 0x0f, 0x05, 0xc3];
        let d = planned(&code, 9, 39).expect("it can be");
        assert_eq!(d.patches.len(), 1);
        let (va, bytes) = &d.patches[0];
        assert_eq!((*va, target(*va, bytes)), (BASE + 68, Some(AT)));
        assert_eq!(site(AT, &d.trampoline), Some(Site { after: BASE + 64 + 11, number: Some(39) }));
        // Another number in RAX: this is not what was executed.
        assert_eq!(planned(&code, 9, 40).map(|d| d.patches.len()), None);
        // REX.W form.
        let long = [0x48, 0xc7, 0xc0, 39, 0, 0, 0, 0x0f, 0x05, 0xc3];
        assert_eq!(planned(&long, 7, 39).expect("it can be").patches[0].0, BASE + 64);
    }

    #[test]
    fn what_may_be_another_instruction_stays() {
        // mov $39,%r8d; syscall, with 39 in RAX by chance, and an immediate that looks like the move.
        for code in [
            &[0x41, 0xb8, 39, 0, 0, 0, 0x0f, 0x05, 0x90][..],
            &[0xc7, 0x45, 0xb8, 39, 0, 0, 0, 0x0f, 0x05, 0x90],
            &[0x48, 0x8d, 0xb8, 39, 0, 0, 0, 0x0f, 0x05, 0x90],
        ] {
            assert_eq!(planned(code, code.len() - 3, 39), None, "{code:x?}");
        }
    }

    #[test]
    fn a_call_with_padding_behind_it_is_replaced() {
        // xor %eax,%eax; syscall; cmp $-4096,%rax; ja; ret; nopw
        let code =
            [0x31, 0xc0, 0x0f, 0x05, 0x48, 0x3d, 0, 0xf0, 0xff, 0xff, 0x77, 0x5b, 0xc3, 0x66, 0x0f, 0x1f, 0x44, 0, 0];
        // The padding leads over a boundary and up to the next: no function begins where it is.
        assert_eq!(
            planned(&code, 2, 0).map(|d| d.patches[1].clone()).map(|(va, b)| (va, b.len())),
            Some((BASE + 77, 6))
        );
        let mut page = page(64, &code);
        page[83] = 0x57;
        assert_eq!(plan(&page, BASE, BASE + 68, 0, AT), None, "it does not lead up to a boundary");
        // Only three bytes up to where a function may begin.
        page[77..83].copy_from_slice(&[0x0f, 0x1f, 0, 0x90, 0x90, 0x90]);
        assert_eq!(plan(&page, BASE, BASE + 68, 0, AT), None);
        let mut page = self::page(60, &code[..13]);
        page[73..80].copy_from_slice(&[0x0f, 0x1f, 0x80, 0, 0, 0, 0]);
        let d = plan(&page, BASE, BASE + 64, 0, AT).expect("it can be");
        assert_eq!(d.patches[0], (BASE + 62, vec![0xeb, 9]));
        assert_eq!(target(d.patches[1].0, &d.patches[1].1), Some(AT));
        assert_eq!(site(AT, &d.trampoline), Some(Site { after: BASE + 64, number: None }));
        // Out of reach of a jump.
        assert_eq!(plan(&page, BASE, BASE + 64, 0, AT + (1 << 33)), None);
    }
}
