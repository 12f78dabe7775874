//! The bytes of the entry stubs and descriptor tables (Intel SDM volume 3, chapters 3, 6 and 8).
use super::stub::Stub;
use super::{EXCEPTION_PORT, STACK_TOP, STUB_PAGE, STUB_STRIDE, SUPERVISOR_SYSCALL, SYSCALL_PORT, TSS, TrapMode};

/// Ring-0 code segment selector.
pub const KERNEL_CS: u16 = 0x10;
/// Ring-0 data segment selector.
pub const KERNEL_SS: u16 = 0x18;
/// Linux's __USER_DS.
pub const USER_SS: u16 = 0x2b;
/// Linux's __USER_CS.
pub const USER_CS: u16 = 0x33;
/// Selector of the task state segment.
pub const TSS_SELECTOR: u16 = 0x40;
/// Limit of the GDT.
pub const GDT_LIMIT: u16 = 0x4f;
/// Bytes of a 64-bit task state segment without its bitmap.
const TSS_LEN: usize = 0x68;
/// Bytes of I/O permission bitmap: ports 0..=31, and the byte of ones that must follow.
const BITMAP_LEN: usize = 5;
/// Limit of the task state segment. Ports beyond its bitmap are refused.
pub const TSS_LIMIT: u32 = (TSS_LEN + BITMAP_LEN - 1) as u32;

/// A page of breakpoints but for `parts`: offsets and their bytes, which fit.
pub fn filled(parts: &[(usize, &[u8])]) -> Vec<u8> {
    let mut page = vec![0xcc; 4096];
    for (at, bytes) in parts {
        page[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    page
}

/// The page of exception stubs and the SYSCALL entry of ring0 mode.
pub fn stubs() -> Vec<u8> {
    let mut page = filled(&[((SUPERVISOR_SYSCALL - STUB_PAGE) as usize, &Stub::new(TrapMode::Ring0).code)]);
    for stub in page[..256 * STUB_STRIDE as usize].chunks_exact_mut(STUB_STRIDE as usize) {
        stub[..4].copy_from_slice(&[0xe6, EXCEPTION_PORT, 0xeb, 0xfc]); // 1: out %al, $EXCEPTION_PORT; jmp 1b
    }
    page
}

/// GDT and task state segment with the system call port shut to ring 3.
pub fn descriptors() -> Vec<u8> {
    descriptors_with_port(false)
}

/// GDT and task state segment. Accessed bits are preset: the page is read-only to the guest.
pub fn descriptors_with_port(open: bool) -> Vec<u8> {
    let mut page = vec![0; 0x100 + TSS_LIMIT as usize + 1];
    let mut gdt = |selector: u16, descriptor: u64| {
        let at = (selector & !7) as usize;
        page[at..at + 8].copy_from_slice(&descriptor.to_le_bytes());
    };
    gdt(KERNEL_CS, 0x00af_9b00_0000_ffff);
    gdt(KERNEL_SS, 0x00cf_9300_0000_ffff);
    gdt(USER_SS, 0x00cf_f300_0000_ffff);
    gdt(USER_CS, 0x00af_fb00_0000_ffff);
    // A busy 64-bit TSS of DPL 0.
    gdt(TSS_SELECTOR, u64::from(TSS_LIMIT) | (TSS & 0xff_ffff) << 16 | 0x8b << 40 | (TSS >> 24 & 0xff) << 56);
    gdt(TSS_SELECTOR + 8, TSS >> 32);

    let tss = &mut page[(TSS & 0xfff) as usize..];
    tss[4..12].copy_from_slice(&STACK_TOP.to_le_bytes()); // RSP0
    tss[0x24..0x2c].copy_from_slice(&STACK_TOP.to_le_bytes()); // IST1
    tss[0x66..0x68].copy_from_slice(&(TSS_LEN as u16).to_le_bytes());
    tss[TSS_LEN..TSS_LEN + BITMAP_LEN].fill(0xff);
    if open {
        tss[TSS_LEN + usize::from(SYSCALL_PORT / 8)] &= !(1 << (SYSCALL_PORT % 8));
    }
    page
}

/// 256 interrupt gates on IST 1. As in Linux, ring 3 may raise #BP and #OF by `int`; all else is #GP.
pub fn interrupt_descriptors() -> Vec<u8> {
    let mut page = Vec::with_capacity(4096);
    for vector in 0..256u64 {
        let stub = STUB_PAGE + vector * STUB_STRIDE;
        let dpl = if matches!(vector, 3 | 4) { 3 } else { 0 };
        let low = stub & 0xffff
            | u64::from(KERNEL_CS) << 16
            | 1 << 32
            | (0x8e | dpl << 5) << 40
            | (stub >> 16 & 0xffff) << 48;
        page.extend_from_slice(&low.to_le_bytes());
        page.extend_from_slice(&(stub >> 32).to_le_bytes());
    }
    page
}

/// Whether the processor pushes an error code for an exception (Intel SDM volume 3, table 6-1).
pub fn has_error_code(vector: u8) -> bool {
    matches!(vector, 8 | 10..=14 | 17 | 21 | 29 | 30)
}
