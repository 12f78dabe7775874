//! The SYSCALL entry: the code that answers a call by itself, hands it to a polling worker, or leaves the guest. Owns the code, its places,
//! and the layout of the request page and of the table of answers; never runs a vCPU.
//!
//! The code changes no flags but those SYSCALL clears, uses RCX and R11 only, and no stack. In ring3 mode a program can jump anywhere
//! into it and write the request page: that harms itself alone, since all that is believed of the page is a call to be judged like any
//! other, or a result that the program gets back.
//!
//! | words | written by | hold |
//! |---|---|---|
//! | [`STATE`] | both | whose turn it is: [`state`] |
//! | [`CALL`], [`ARGS`] | the stub; the result by whoever serves | RAX, then RDI, RSI, RDX, R10, R8, R9 |
//! | [`POLLED`] | the host | not zero while somebody looks for requests |
//! | [`SEQUENCE`] | the stub | one more with each request |
//! | [`RCX`], [`R11`] | the stub | where the program goes on, and its flags |
//! | [`ANSWER`] | the stub | the answer that it is about to give |
//! | [`SAMPLE`] | both | answers left until the host is to see a call |
//! | [`RSP`] and those below word 32 | the stub | the program's stack pointer and flags in a direct call |
//! | from [`ANSWERED`] on | the stub; the host takes them | how often the call of this number was answered |
//!
//! The answers stand in the mailbox page, which the program can only read: from word [`ANSWERS`] on one for each number below
//! [`ANSWERABLE`], 0 if there is none, otherwise the result and 1.
#[cfg(not(assembled))]
use guest_abi::layout::{ENTRY_PAGE, MAILBOX_PAGE, REQUEST_PAGE};
#[cfg(not(assembled))]
use iced_x86::code_asm::qword_ptr;
#[cfg(not(assembled))]
use iced_x86::code_asm::registers::gpr8::{al, ch, cl};
#[cfg(not(assembled))]
use iced_x86::code_asm::registers::gpr32::{ecx, r11d};
#[cfg(not(assembled))]
use iced_x86::code_asm::registers::gpr64::{r11, rax, rcx};
#[cfg(not(assembled))]
use iced_x86::code_asm::{CodeAssembler, CodeLabel};
#[cfg(not(assembled))]
use iced_x86::{BlockEncoderOptions, Code, IcedError, Instruction, MemoryOperand, Register};

use super::TrapMode;
#[cfg(not(assembled))]
use super::{SUPERVISOR_SYSCALL, SYSCALL_PORT};

/// What the build script made of this module.
#[cfg(assembled)]
mod assembled {
    use super::*;
    include!(concat!(env!("OUT_DIR"), "/stub.rs"));
}

/// Word of the request page: see [`state`].
pub const STATE: usize = 0;
/// The call's number; then its result.
pub const CALL: usize = 1;
/// First of the six arguments.
pub const ARGS: usize = 2;
/// Whether anybody polls. On a line of its own, which stays in the guest CPU's cache.
pub const POLLED: usize = 8;
/// The number of the request. What became of it the host finds by this, not by [`STATE`], which the stub may have in a register.
pub const SEQUENCE: usize = 18;
/// The program's RCX: the return address.
pub const RCX: usize = 16;
/// The program's R11: its flags.
pub const R11: usize = 17;
/// The result of a call that the stub answers.
pub const ANSWER: usize = 19;
/// Answers left before a call that has one leaves the guest all the same, so that the host sees where it comes from. Not for direct calls.
pub const SAMPLE: usize = 20;
/// The program's stack pointer, while a direct call has its flags on a stack of its own.
pub const RSP: usize = 21;
/// The top of that stack.
#[cfg(any(not(assembled), test))]
pub const STACK: usize = 32;
/// Calls answered, from here on one word for each number below [`ANSWERABLE`].
pub const ANSWERED: usize = 256;
/// Word of the mailbox page: the answer to call 0.
pub const ANSWERS: usize = 256;
/// Numbers of calls that may have an answer are below.
pub const ANSWERABLE: usize = 256;

/// Values of [`STATE`].
pub mod state {
    /// No request.
    pub const FREE: u64 = 0;
    /// A request that nobody has taken.
    pub const REQUESTED: u64 = 1;
    /// Somebody serves it.
    pub const CLAIMED: u64 = 2;
    /// The result is there.
    pub const DONE: u64 = 3;
    /// The call has to leave the guest.
    pub const REFUSED: u64 = 4;
    /// The result is there, and the vCPU is about to be kicked: the stub waits for that.
    pub const HELD: u64 = 5;
}

/// Looks at the state before the stub takes its request back (a look is some tens of nanoseconds).
#[cfg(not(assembled))]
const PATIENCE: u32 = 120;

/// The code of one trap mode, and its places.
#[derive(Clone, Debug)]
pub struct Stub {
    /// Its bytes, from the entry on.
    pub code: Vec<u8>,
    /// Where SYSCALL arrives.
    pub entry: u64,
    /// The `out` of a call that leaves the guest.
    pub out: u64,
    /// After the `out`; in ring0 mode the SYSRET by which the host may resume a program.
    pub after_out: u64,
    /// The code that gives answers, to SYSCALL and to direct calls.
    answers: [Answers; 2],
    /// Where direct calls arrive.
    pub direct: u64,
    /// Their stack is not the program's from here.
    switched: u64,
    /// It is again, and RCX and R11 are as SYSCALL leaves them.
    arrived: u64,
    /// After the code of direct calls.
    direct_end: u64,
    /// R11 has been saved.
    saved: u64,
    /// The request has been made.
    requested: u64,
    /// The result is there.
    done: u64,
    /// The call is to leave: the program's R11 comes back here.
    plain: u64,
    /// After the last instruction.
    end: u64,
}

/// Places in the code that gives an answer.
#[derive(Clone, Copy, Debug, Default)]
struct Answers {
    /// R11 has been saved.
    answering: u64,
    /// The answer has been counted: it will be given.
    counted: u64,
    /// After the code.
    end: u64,
}

impl Answers {
    fn holds(&self, rip: u64) -> bool {
        (self.answering..self.end).contains(&rip)
    }

    fn given(&self, rip: u64) -> bool {
        (self.counted..self.end).contains(&rip)
    }
}

/// What a program interrupted in the stub was at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// RCX is in its word, no longer in the register.
    pub rcx_saved: bool,
    /// R11 is in its word.
    pub r11_saved: bool,
    /// The call has been requested.
    pub requested: bool,
    /// The call has been served; the result is in [`CALL`].
    pub done: bool,
    /// The stub has answered the call; the result is in [`ANSWER`].
    pub answered: bool,
    /// A direct call has begun, R11 does not hold the flags yet.
    pub arriving: bool,
    /// RSP is in its word.
    pub switched: bool,
}

impl Stub {
    /// The code for a trap mode.
    #[cfg(assembled)]
    pub fn new(mode: TrapMode) -> Stub {
        assembled::stub(mode)
    }

    /// Whether `rip` lies in the code.
    pub fn contains(&self, rip: u64) -> bool {
        (self.entry..self.direct_end).contains(&rip) && rip != self.end
    }

    /// What the program was at when it was interrupted at `rip`, which lies in the code.
    pub fn place(&self, rip: u64) -> Place {
        let done = (self.done..self.plain).contains(&rip);
        Place {
            rcx_saved: (rip > self.entry && rip < self.out) || (rip > self.arrived && rip < self.direct_end),
            r11_saved: self.answers.iter().any(|a| a.holds(rip)) || (self.saved..=self.plain).contains(&rip),
            requested: (self.requested..self.done).contains(&rip),
            done,
            answered: self.answers.iter().any(|a| a.given(rip)),
            arriving: (self.direct..self.arrived).contains(&rip),
            switched: (self.switched..self.arrived).contains(&rip),
        }
    }
}

// What follows makes the code. The build script compiles it and not the monitor: an assembler at work costs every start 0.6 ms and
// 0.6 MiB for its tables.

/// A word of the request page.
#[cfg(not(assembled))]
fn memory(word: usize) -> MemoryOperand {
    at(REQUEST_PAGE + 8 * word as u64)
}

#[cfg(not(assembled))]
fn at(va: u64) -> MemoryOperand {
    MemoryOperand::with_base_displ(Register::RIP, va.cast_signed())
}

#[cfg(not(assembled))]
struct Writer(CodeAssembler);

#[cfg(not(assembled))]
impl Writer {
    fn store(&mut self, word: usize, from: Register) -> Result<(), IcedError> {
        self.0.add_instruction(Instruction::with2(Code::Mov_rm64_r64, memory(word), from)?)
    }

    fn store_value(&mut self, word: usize, value: u64) -> Result<(), IcedError> {
        self.0.add_instruction(Instruction::with2(Code::Mov_rm64_imm32, memory(word), value as i32)?)
    }

    fn load(&mut self, to: Register, word: usize) -> Result<(), IcedError> {
        self.0.add_instruction(Instruction::with2(Code::Mov_r64_rm64, to, memory(word))?)
    }

    fn swap_rcx(&mut self, word: usize) -> Result<(), IcedError> {
        self.0.add_instruction(Instruction::with2(Code::Xchg_rm64_r64, memory(word), Register::RCX)?)
    }

    /// Answers a call whose number is small and has an answer, others go to `ask`. With `sample` so does the last of a number of them,
    /// with R11 saved. RCX is saved.
    fn answer(
        &mut self,
        [small, answering, counted]: [&mut CodeLabel; 3],
        ask: CodeLabel,
        sample: Option<CodeLabel>,
        mode: TrapMode,
    ) -> Result<(), IcedError> {
        self.0.mov(rcx, rax)?;
        self.0.mov(cl, 0)?;
        self.0.jrcxz(*small)?;
        self.0.jmp(ask)?;
        self.0.set_label(small)?;
        self.address(Register::RCX, MAILBOX_PAGE + 8 * ANSWERS as u64)?;
        self.0.mov(rcx, qword_ptr(rcx + rax * 8))?;
        self.0.jrcxz(ask)?;
        self.store(R11, Register::R11)?;
        self.0.set_label(answering)?;
        self.0.lea(rcx, rcx - 1)?;
        self.store(ANSWER, Register::RCX)?;
        if let Some(plain) = sample {
            self.load(Register::RCX, SAMPLE)?;
            self.0.jrcxz(plain)?;
            self.0.lea(rcx, rcx - 1)?;
            self.store(SAMPLE, Register::RCX)?;
        }
        self.address(Register::R11, REQUEST_PAGE + 8 * ANSWERED as u64)?;
        self.0.mov(rcx, qword_ptr(r11 + rax * 8))?;
        self.0.lea(rcx, rcx + 1)?;
        self.0.mov(qword_ptr(r11 + rax * 8), rcx)?;
        self.0.set_label(counted)?;
        self.load(Register::RAX, ANSWER)?;
        self.back(mode)
    }

    fn address(&mut self, to: Register, va: u64) -> Result<(), IcedError> {
        self.0.add_instruction(Instruction::with2(Code::Lea_r64_m, to, at(va))?)
    }

    /// The way back to the program, with its RCX and R11.
    fn back(&mut self, mode: TrapMode) -> Result<(), IcedError> {
        self.load(Register::R11, R11)?;
        self.load(Register::RCX, RCX)?;
        match mode {
            TrapMode::Ring0 => self.0.sysretq(),
            TrapMode::Ring3 => self.0.jmp(rcx),
        }
    }

    /// Goes to `target` if RCX is `n`; leaves RCX less `n`.
    fn if_rcx(&mut self, n: u64, target: CodeLabel) -> Result<(), IcedError> {
        self.0.lea(rcx, rcx - n as i32)?;
        self.0.jrcxz(target)
    }
}

/// The code for a trap mode.
#[cfg(not(assembled))]
pub fn assemble(mode: TrapMode) -> Result<Stub, IcedError> {
    let entry = match mode {
        TrapMode::Ring0 => SUPERVISOR_SYSCALL,
        TrapMode::Ring3 => ENTRY_PAGE,
    };
    let mut w = Writer(CodeAssembler::new(64)?);
    let mut labels: [CodeLabel; 23] = core::array::from_fn(|_| w.0.create_label());
    let [saved, requested, spin, wait, done, plain, restored, out, after_out, again, no_trap, end, rest @ ..] =
        &mut labels;
    let [small, answering, counted, ask, direct, switched, arrived, direct_end, rest @ ..] = rest;
    let [direct_small, direct_answering, direct_counted] = rest;

    w.store(RCX, Register::RCX)?;
    // A program that single-steps is to meet its trap after the call: bit 8 of the flags to the top of a byte.
    w.0.mov(ecx, r11d)?;
    w.0.movzx(ecx, ch)?;
    w.0.lea(ecx, rcx * 8)?;
    w.0.lea(ecx, rcx * 8)?;
    w.0.lea(ecx, rcx * 2)?;
    w.0.movzx(ecx, cl)?;
    w.0.jrcxz(*no_trap)?;
    w.0.jmp(*restored)?;
    w.0.set_label(no_trap)?;
    w.answer([small, answering, counted], *ask, Some(*plain), mode)?;
    w.0.set_label(ask)?;
    w.load(Register::RCX, POLLED)?;
    w.0.jrcxz(*restored)?;
    w.store(R11, Register::R11)?;
    w.0.set_label(saved)?;
    w.store(CALL, Register::RAX)?;
    let arguments = [Register::RDI, Register::RSI, Register::RDX, Register::R10, Register::R8, Register::R9];
    for (i, register) in arguments.into_iter().enumerate() {
        w.store(ARGS + i, register)?;
    }
    w.load(Register::RCX, SEQUENCE)?;
    w.0.lea(rcx, rcx + 1)?;
    w.store(SEQUENCE, Register::RCX)?;
    w.store_value(STATE, state::REQUESTED)?;
    w.0.set_label(requested)?;
    w.0.mov(r11d, PATIENCE)?;
    w.0.set_label(spin)?;
    w.0.pause()?;
    w.load(Register::RCX, STATE)?;
    w.if_rcx(state::DONE, *done)?;
    w.if_rcx(state::REFUSED - state::DONE, *plain)?;
    w.0.lea(r11d, r11 - 1)?;
    w.0.mov(ecx, r11d)?;
    w.0.jrcxz(*again)?;
    w.0.jmp(*spin)?;
    w.0.set_label(again)?;
    w.0.mov(ecx, 0)?;
    w.swap_rcx(STATE)?;
    w.if_rcx(state::REQUESTED, *plain)?;
    w.if_rcx(state::DONE - state::REQUESTED, *done)?;
    w.if_rcx(state::REFUSED - state::DONE, *plain)?;
    w.0.set_label(wait)?;
    w.0.pause()?;
    w.load(Register::RCX, STATE)?;
    w.if_rcx(state::DONE, *done)?;
    w.if_rcx(state::REFUSED - state::DONE, *plain)?;
    w.0.jmp(*wait)?;

    w.0.set_label(done)?;
    w.load(Register::RAX, CALL)?;
    w.back(mode)?;

    w.0.set_label(plain)?;
    w.load(Register::R11, R11)?;
    w.0.set_label(restored)?;
    w.load(Register::RCX, RCX)?;
    w.0.set_label(out)?;
    w.0.out(u32::from(SYSCALL_PORT), al)?;
    w.0.set_label(after_out)?;
    match mode {
        TrapMode::Ring0 => w.0.sysretq()?,
        // A KVM that has not yet stepped over the `out` when the registers are replaced by ones that point at the `out` itself steps
        // over it then, and the jump makes that another system call, as it should be.
        TrapMode::Ring3 => w.0.jmp(*out)?,
    }
    w.0.set_label(end)?;
    w.0.nop()?;

    // From a trampoline, with RCX as SYSCALL leaves it. A program that single-steps met its trap there.
    w.0.set_label(direct)?;
    w.store(RSP, Register::RSP)?;
    w.address(Register::RSP, REQUEST_PAGE + 8 * STACK as u64)?;
    w.0.set_label(switched)?;
    w.0.pushfq()?;
    w.0.pop(r11)?;
    w.load(Register::RSP, RSP)?;
    w.0.set_label(arrived)?;
    w.store(RCX, Register::RCX)?;
    w.answer([direct_small, direct_answering, direct_counted], *ask, None, mode)?;
    w.0.set_label(direct_end)?;
    w.0.nop()?;

    let block = w.0.assemble_options(entry, BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS)?;
    let at = |label: &CodeLabel| block.label_ip(label);
    let answers = |answering, counted, end| -> Result<Answers, IcedError> {
        Ok(Answers { answering: at(answering)?, counted: at(counted)?, end: at(end)? })
    };
    Ok(Stub {
        entry,
        out: at(out)?,
        after_out: at(after_out)?,
        answers: [answers(answering, counted, ask)?, answers(direct_answering, direct_counted, direct_end)?],
        direct: at(direct)?,
        switched: at(switched)?,
        arrived: at(arrived)?,
        direct_end: at(direct_end)?,
        saved: at(saved)?,
        requested: at(requested)?,
        done: at(done)?,
        plain: at(plain)?,
        end: at(end)?,
        code: block.inner.code_buffer,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_tells_where_the_registers_are() {
        for mode in [TrapMode::Ring0, TrapMode::Ring3] {
            let stub = Stub::new(mode);
            assert_eq!(stub.direct_end - stub.entry + 1, stub.code.len() as u64);
            assert!(stub.code.len() < 0x400 - 8, "{}", stub.code.len());
            let place = |rip| stub.place(rip);
            let intact = Place {
                rcx_saved: false,
                r11_saved: false,
                requested: false,
                done: false,
                answered: false,
                arriving: false,
                switched: false,
            };
            assert_eq!(place(stub.entry), intact);
            assert_eq!(place(stub.out), intact);
            let saved = Place { rcx_saved: true, r11_saved: true, ..intact };
            for a in stub.answers {
                assert_eq!(place(a.answering), saved);
                assert_eq!(place(a.counted), Place { answered: true, ..saved });
            }
            assert_eq!(place(stub.answers[0].end), Place { rcx_saved: true, ..intact });
            assert_eq!(place(stub.direct), Place { arriving: true, ..intact });
            assert_eq!(place(stub.switched), Place { arriving: true, switched: true, ..intact });
            assert_eq!(place(stub.arrived), intact);
            assert_eq!(place(stub.arrived + 7), Place { rcx_saved: true, ..intact });
            assert_eq!(place(stub.requested), Place { requested: true, ..saved });
            assert_eq!(place(stub.done), Place { done: true, ..saved });
            assert!(!place(stub.plain).done && place(stub.plain).rcx_saved && place(stub.plain).r11_saved);
            assert!(stub.contains(stub.out) && stub.contains(stub.direct));
            assert!(!stub.contains(stub.end) && !stub.contains(stub.direct_end));
        }
    }
}
