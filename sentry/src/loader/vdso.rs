//! The vDSO (vdso(7)): a shared object that every program finds mapped, whose functions tell the time without a system call.
//! Made once a sandbox. Owns its image and the page of clock parameters (vvar); never a clock.
//!
//! In every address space the vvar page lies directly before the image, which reads it relative to its own address.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use guest_abi::layout::{MAILBOX_PAGE, PAGE_SIZE};
use iced_x86::code_asm::*;
use iced_x86::{BlockEncoderOptions, IcedError};

use super::vdso_elf;
use crate::lock::{Mutex, Rank};
use crate::mm::MapSource;
use crate::platform::{PhysAddr, Platform, TscClock};
use crate::time::Nanos;
use crate::{Errno, Result};

/// How old the parameters may get while the guest runs.
const REFRESH: Nanos = 1_000_000_000;
/// Offset of the code in the image.
const TEXT: u64 = 0x800;

/// Offsets in the vvar page.
mod vvar {
    /// Odd while the rest changes (u32).
    pub const SEQ: i32 = 0;
    /// 1 if the TSC serves as a clock (u32).
    pub const VALID: i32 = 4;
    pub const BASE_TSC: i32 = 8;
    /// u32.
    pub const MULT: i32 = 16;
    /// u32.
    pub const SHIFT: i32 = 20;
    pub const BASE_MONO: i32 = 24;
    pub const REAL_OFFSET: i32 = 32;
}

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

struct State {
    seq: u32,
    clock: Option<TscClock>,
}

/// The vDSO of a sandbox.
pub struct Vdso {
    code: Arc<[PhysAddr]>,
    vvar: Arc<[PhysAddr]>,
    state: Mutex<State>,
    refreshed: AtomicU64,
}

impl Vdso {
    /// Makes the image and publishes the platform's present clock.
    pub fn new(platform: &dyn Platform) -> Result<Vdso> {
        let image = image(platform.mailbox_readable()).ok_or(Errno::ENOEXEC)?;
        let memory = platform.memory();
        let mut code = Vec::new();
        for chunk in image.chunks(PAGE_SIZE as usize) {
            let frame = memory.alloc()?;
            memory.write(frame, chunk)?;
            code.push(frame);
        }
        let vdso = Vdso {
            code: code.into(),
            vvar: vec![memory.alloc()?].into(),
            state: Mutex::new(Rank::PageCache, State { seq: 0, clock: None }),
            refreshed: AtomicU64::new(0),
        };
        vdso.refresh(platform, platform.monotonic());
        Ok(vdso)
    }

    /// The image, to be mapped readable and executable right after [`Vdso::vvar_source`].
    pub fn code_source(&self) -> MapSource {
        MapSource::Special { name: "[vdso]", frames: self.code.clone() }
    }

    /// The clock parameters, to be mapped readable.
    pub fn vvar_source(&self) -> MapSource {
        MapSource::Special { name: "[vvar]", frames: self.vvar.clone() }
    }

    /// Bytes of the image, whole pages.
    pub fn code_len(&self) -> u64 {
        self.code.len() as u64 * PAGE_SIZE
    }

    /// Bytes of the parameters, whole pages.
    pub fn vvar_len(&self) -> u64 {
        self.vvar.len() as u64 * PAGE_SIZE
    }

    /// Publishes the platform's parameters if those in the page are old; called on the way into the guest. `now` is monotonic.
    pub fn refresh_if_due(&self, platform: &dyn Platform, now: Nanos) {
        if now.saturating_sub(self.refreshed.load(Ordering::Relaxed)) >= REFRESH {
            self.refresh(platform, now);
        }
    }

    /// Publishes the platform's parameters. `now` is monotonic.
    pub fn refresh(&self, platform: &dyn Platform, now: Nanos) {
        self.refreshed.store(now, Ordering::Relaxed);
        self.publish(platform, platform.tsc_clock());
    }

    /// Publishes clock parameters; None: the functions make system calls.
    pub fn publish(&self, platform: &dyn Platform, clock: Option<TscClock>) {
        let Some(&page) = self.vvar.first() else { return };
        let mut state = self.state.lock();
        if state.seq != 0 && state.clock == clock {
            return;
        }
        let memory = platform.memory();
        let c = clock.unwrap_or_default();
        let mut body = Vec::with_capacity(36);
        // A shift the code cannot perform would make every answer wrong.
        let valid = clock.is_some_and(|c| c.shift < 64);
        body.extend_from_slice(&u32::from(valid).to_le_bytes());
        body.extend_from_slice(&c.base_tsc.to_le_bytes());
        body.extend_from_slice(&c.mult.to_le_bytes());
        body.extend_from_slice(&c.shift.to_le_bytes());
        body.extend_from_slice(&c.base_mono.to_le_bytes());
        body.extend_from_slice(&c.real_offset.to_le_bytes());
        let seq = state.seq.wrapping_add(2) & !1;
        let at = |offset: i32| PhysAddr(page.0 + offset as u64);
        // The frame is the sandbox's own; a write to it fails only when the machine is going away.
        let written = memory
            .write(at(vvar::SEQ), &(seq.wrapping_sub(1)).to_le_bytes())
            .and_then(|()| memory.write(at(vvar::VALID), &body))
            .and_then(|()| memory.write(at(vvar::SEQ), &seq.to_le_bytes()));
        if written.is_ok() {
            *state = State { seq, clock };
        }
    }
}

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
type Functions = Vec<(&'static str, u64)>;

/// The code and where each function starts.
fn code(mailbox_readable: bool) -> Result<(Vec<u8>, Functions), IcedError> {
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

fn image(mailbox_readable: bool) -> Option<Vec<u8>> {
    let (text, functions) = code(mailbox_readable).inspect_err(|e| log::error!("vDSO: {e}")).ok()?;
    vdso_elf::build(TEXT, &text, &functions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_is_made_and_fits() {
        for readable in [false, true] {
            code(readable).expect("code");
            let image = image(readable).expect("image");
            assert_eq!(&image[..4], b"\x7fELF");
            assert!(image.len() <= 2 * PAGE_SIZE as usize);
            if let Ok(path) = std::env::var("VDSO_OUT") {
                std::fs::write(format!("{path}.{readable}"), &image).expect("write");
            }
        }
    }
}
