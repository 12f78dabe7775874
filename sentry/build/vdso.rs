//! The code of the vDSO's functions, assembled by the build script: an assembler at work would cost every start of a sandbox 0.6 ms and
//! 0.6 MiB for its tables. Owns the code; `sentry/src/loader/vdso.rs` owns the image.
use guest_abi::layout::{MAILBOX_PAGE, PAGE_SIZE};
use iced_x86::code_asm::*;
use iced_x86::{BlockEncoderOptions, IcedError};

use crate::vvar::{self, TEXT};

const fn clock_set(clocks: &[u32]) -> u32 {
    let mut bits = 0;
    let mut i = 0;
    while i < clocks.len() {
        bits |= 1 << clocks[i];
        i += 1;
    }
    bits
}

/// REALTIME, MONOTONIC, MONOTONIC_RAW, REALTIME_COARSE, MONOTONIC_COARSE, BOOTTIME, TAI. There is no tick, so the coarse clocks are as
/// fine as the others.
const SERVED: u32 = clock_set(&[0, 1, 4, 5, 6, 7, 11]);
/// Those on the CLOCK_REALTIME axis.
const ON_REALTIME: u32 = clock_set(&[0, 5, 11]);
/// Those whose resolution is a tick.
const COARSE: u32 = clock_set(&[5, 6]);
/// Resolution of the coarse clocks, ns.
const COARSE_RESOLUTION: u32 = 4_000_000;

/// Emits the functions.
struct Code {
    asm: CodeAssembler,
    /// The first instruction, to which the vvar page has a fixed distance.
    start: CodeLabel,
}

/// A vvar field, once r8 holds the address of the code's start.
fn field(offset: i32) -> AsmMemoryOperand {
    r8 + (offset - PAGE_SIZE as i32 - TEXT as i32)
}

impl Code {
    fn system_call(&mut self, nr: u32) -> Result<(), IcedError> {
        self.asm.mov(eax, nr)?;
        self.asm.syscall()?;
        self.asm.ret()
    }

    /// rax = ns on the monotonic axis, plus the offset to CLOCK_REALTIME if `realtime` (Some(true)), or if the clock in edi has
    /// it (None). Goes to `fallback` if the TSC cannot serve. Changes rcx, rdx, r8, r9.
    fn now(&mut self, realtime: Option<bool>, fallback: CodeLabel) -> Result<(), IcedError> {
        let a = &mut self.asm;
        let mut begin = a.create_label();
        let mut spin = a.create_label();
        a.lea(r8, ptr(self.start))?;
        a.jmp(begin)?;
        a.set_label(&mut spin)?;
        a.pause()?;
        a.set_label(&mut begin)?;
        a.mov(r9d, dword_ptr(field(vvar::SEQ)))?;
        a.test(r9d, 1)?;
        a.jnz(spin)?;
        a.cmp(dword_ptr(field(vvar::VALID)), 0)?;
        a.je(fallback)?;
        // RDTSC alone may be executed before the loads above.
        a.lfence()?;
        a.rdtsc()?;
        a.shl(rdx, 32)?;
        a.or(rax, rdx)?;
        // A processor whose TSC is a little behind must not go back before the base.
        let mut ahead = a.create_label();
        a.sub(rax, qword_ptr(field(vvar::BASE_TSC)))?;
        a.jns(ahead)?;
        a.xor(eax, eax)?;
        a.set_label(&mut ahead)?;
        a.mov(ecx, dword_ptr(field(vvar::MULT)))?;
        a.mul(rcx)?;
        a.mov(ecx, dword_ptr(field(vvar::SHIFT)))?;
        a.shrd(rax, rdx, cl)?;
        a.add(rax, qword_ptr(field(vvar::BASE_MONO)))?;
        match realtime {
            Some(false) => {}
            Some(true) => a.add(rax, qword_ptr(field(vvar::REAL_OFFSET)))?,
            None => {
                let mut monotonic = a.create_label();
                a.mov(ecx, ON_REALTIME)?;
                a.bt(ecx, edi)?;
                a.jnc(monotonic)?;
                a.add(rax, qword_ptr(field(vvar::REAL_OFFSET)))?;
                a.set_label(&mut monotonic)?;
            }
        }
        a.cmp(r9d, dword_ptr(field(vvar::SEQ)))?;
        a.jne(begin)
    }

    /// rax = seconds, rdx = nanoseconds of rax nanoseconds. A division would take longer than all the rest: 10^9 is
    /// 2^9 × 1953125, and the multiplier is 2^75 / 1953125 rounded up.
    fn split(&mut self) -> Result<(), IcedError> {
        let a = &mut self.asm;
        a.mov(rcx, rax)?;
        a.shr(rax, 9)?;
        a.mov(rdx, 0x0044_b82f_a09b_5a53u64)?;
        a.mul(rdx)?;
        a.shr(rdx, 11)?;
        a.mov(rax, rdx)?;
        a.imul_3(rdx, rdx, 1_000_000_000)?;
        a.sub(rcx, rdx)?;
        a.mov(rdx, rcx)
    }

    /// Goes to `fallback` unless the clock in edi is served.
    fn only_served(&mut self, fallback: CodeLabel) -> Result<(), IcedError> {
        self.asm.cmp(edi, 11)?;
        self.asm.ja(fallback)?;
        self.asm.mov(eax, SERVED)?;
        self.asm.bt(eax, edi)?;
        self.asm.jnc(fallback)
    }

    fn clock_gettime(&mut self) -> Result<(), IcedError> {
        let mut fallback = self.asm.create_label();
        self.only_served(fallback)?;
        self.now(None, fallback)?;
        self.split()?;
        self.asm.mov(qword_ptr(rsi), rax)?;
        self.asm.mov(qword_ptr(rsi + 8), rdx)?;
        self.asm.xor(eax, eax)?;
        self.asm.ret()?;
        self.asm.set_label(&mut fallback)?;
        self.system_call(228)
    }

    fn gettimeofday(&mut self) -> Result<(), IcedError> {
        let mut fallback = self.asm.create_label();
        let mut no_time = self.asm.create_label();
        let mut no_zone = self.asm.create_label();
        self.asm.test(rdi, rdi)?;
        self.asm.jz(no_time)?;
        self.now(Some(true), fallback)?;
        self.split()?;
        let a = &mut self.asm;
        a.mov(qword_ptr(rdi), rax)?;
        // Microseconds: 2^38 / 1000 rounded up is exact for 32 bits.
        a.imul_3(rdx, rdx, 274_877_907)?;
        a.shr(rdx, 38)?;
        a.mov(qword_ptr(rdi + 8), rdx)?;
        a.set_label(&mut no_time)?;
        a.test(rsi, rsi)?;
        a.jz(no_zone)?;
        a.mov(qword_ptr(rsi), 0)?;
        a.set_label(&mut no_zone)?;
        a.xor(eax, eax)?;
        a.ret()?;
        a.set_label(&mut fallback)?;
        self.system_call(96)
    }

    fn time(&mut self) -> Result<(), IcedError> {
        let mut fallback = self.asm.create_label();
        let mut no_store = self.asm.create_label();
        self.now(Some(true), fallback)?;
        self.split()?;
        let a = &mut self.asm;
        a.test(rdi, rdi)?;
        a.jz(no_store)?;
        a.mov(qword_ptr(rdi), rax)?;
        a.set_label(&mut no_store)?;
        a.ret()?;
        a.set_label(&mut fallback)?;
        self.system_call(201)
    }

    fn clock_getres(&mut self) -> Result<(), IcedError> {
        let mut fallback = self.asm.create_label();
        let mut done = self.asm.create_label();
        let mut fine = self.asm.create_label();
        self.only_served(fallback)?;
        let a = &mut self.asm;
        a.test(rsi, rsi)?;
        a.jz(done)?;
        a.mov(qword_ptr(rsi), 0)?;
        a.mov(eax, 1)?;
        a.mov(ecx, COARSE)?;
        a.bt(ecx, edi)?;
        a.jnc(fine)?;
        a.mov(eax, COARSE_RESOLUTION)?;
        a.set_label(&mut fine)?;
        a.mov(qword_ptr(rsi + 8), rax)?;
        a.set_label(&mut done)?;
        a.xor(eax, eax)?;
        a.ret()?;
        a.set_label(&mut fallback)?;
        self.system_call(229)
    }

    fn getcpu(&mut self, mailbox_readable: bool) -> Result<(), IcedError> {
        if !mailbox_readable {
            return self.system_call(309);
        }
        let a = &mut self.asm;
        let mut no_cpu = a.create_label();
        let mut no_node = a.create_label();
        a.mov(rax, MAILBOX_PAGE)?;
        a.mov(eax, dword_ptr(rax))?;
        a.test(rdi, rdi)?;
        a.jz(no_cpu)?;
        a.mov(dword_ptr(rdi), eax)?;
        a.set_label(&mut no_cpu)?;
        a.test(rsi, rsi)?;
        a.jz(no_node)?;
        a.mov(dword_ptr(rsi), 0)?;
        a.set_label(&mut no_node)?;
        a.xor(eax, eax)?;
        a.ret()
    }
}

/// Names of functions and where each starts, relative to the code.
pub type Functions = Vec<(&'static str, u64)>;

/// The code and where each function starts.
pub fn code(mailbox_readable: bool) -> Result<(Vec<u8>, Functions), IcedError> {
    let mut asm = CodeAssembler::new(64)?;
    let mut start = asm.create_label();
    asm.set_label(&mut start)?;
    // The padding gives the start an instruction of its own, as labels need.
    asm.int3()?;
    let mut c = Code { asm, start };
    type Emit = fn(&mut Code, bool) -> Result<(), IcedError>;
    let functions: [(&str, Emit); 5] = [
        ("clock_gettime", |c, _| c.clock_gettime()),
        ("gettimeofday", |c, _| c.gettimeofday()),
        ("time", |c, _| c.time()),
        ("clock_getres", |c, _| c.clock_getres()),
        ("getcpu", |c, readable| c.getcpu(readable)),
    ];
    let mut labels = Vec::new();
    for (name, emit) in functions {
        let mut label = c.asm.create_label();
        c.asm.set_label(&mut label)?;
        emit(&mut c, mailbox_readable)?;
        labels.push((name, label));
    }
    let result = c.asm.assemble_options(TEXT, BlockEncoderOptions::RETURN_NEW_INSTRUCTION_OFFSETS)?;
    let mut found = Vec::new();
    for (name, label) in &labels {
        found.push((*name, result.label_ip(label)? - TEXT));
    }
    Ok((result.inner.code_buffer, found))
}
