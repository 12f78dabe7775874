//! The layout of every guest address space.
//!
//! The program owns `0..TASK_SIZE`. The last top-level entry of the user half (index 255, 512 GiB) belongs to the
//! monitor: entry page, mailbox, descriptor tables and ring-0 stubs live there, in every address space.

/// Bytes in a base page.
pub const PAGE_SIZE: u64 = 4096;
/// log2 of PAGE_SIZE.
pub const PAGE_SHIFT: u32 = 12;
/// First address that does not belong to the program.
pub const TASK_SIZE: u64 = MONITOR_BASE;
/// Lowest address mmap may give or take (Linux's default vm.mmap_min_addr).
pub const MMAP_MIN_ADDR: u64 = 65536;
/// Start of the monitor's region: top-level entry 255.
pub const MONITOR_BASE: u64 = 0x7f80_0000_0000;
/// The page in which a vCPU asks for system calls without leaving the guest, directly before the entry page. The program sees it
/// where SYSCALL arrives in ring 3.
pub const REQUEST_PAGE: u64 = MONITOR_BASE;
/// The page that LSTAR points into: the SYSCALL entry stub.
pub const ENTRY_PAGE: u64 = MONITOR_BASE + 0x1000;
/// The page of the vCPU's own mailbox, directly after the entry page so that the stub reaches it RIP-relative.
pub const MAILBOX_PAGE: u64 = ENTRY_PAGE + 0x1000;
