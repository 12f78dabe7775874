//! Where everything in the monitor's region of an address space lies, and by which ports programs leave the guest. Owns addresses only;
//! the build script, which assembles the entry stub, reads them here too.
use guest_abi::layout::{MAILBOX_PAGE, PAGE_SIZE};

/// GDT and, from [`TSS`] on, the task state segment.
pub const DESCRIPTOR_PAGE: u64 = MAILBOX_PAGE + PAGE_SIZE;
/// The task state segment with its I/O permission bitmap.
pub const TSS: u64 = DESCRIPTOR_PAGE + 0x100;
/// The interrupt descriptor table, 256 gates.
pub const IDT_PAGE: u64 = DESCRIPTOR_PAGE + PAGE_SIZE;
/// Exception stubs, and the SYSCALL entry of ring0 mode.
pub const STUB_PAGE: u64 = IDT_PAGE + PAGE_SIZE;
/// The stack that every gate switches to.
pub const STACK_PAGE: u64 = STUB_PAGE + PAGE_SIZE;
/// Its top: exception frames are always at the same place below it.
pub const STACK_TOP: u64 = STACK_PAGE + PAGE_SIZE;

/// Distance of exception stubs.
pub const STUB_STRIDE: u64 = 8;
/// The SYSCALL entry of ring0 mode.
pub const SUPERVISOR_SYSCALL: u64 = STUB_PAGE + 0xc00;
/// The port by which a system call leaves the guest.
pub const SYSCALL_PORT: u8 = 0x10;
/// The port by which an exception leaves the guest.
pub const EXCEPTION_PORT: u8 = 0x12;

/// How SYSCALL arrives on this KVM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrapMode {
    /// In ring 0, as the processor manuals say: the entry is a supervisor page and ends in SYSRET.
    Ring0,
    /// Still in ring 3: the entry is a user page, and the I/O permission bitmap admits its one port.
    Ring3,
}

impl core::fmt::Display for TrapMode {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            TrapMode::Ring0 => "ring0",
            TrapMode::Ring3 => "ring3",
        })
    }
}
