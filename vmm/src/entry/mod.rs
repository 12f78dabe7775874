//! The monitor's region of every address space: the SYSCALL entry, exception stubs, descriptor tables, ring-0 stack and
//! mailbox, and which of them the program may touch. Owns their bytes and addresses; never runs a vCPU.
//!
//! A vCPU has one chain of tables for the region, which the last lower-half entry of each top-level table it uses leads to.
//! Everything but the stack and the mailbox is shared by all vCPUs.
pub mod decode;
pub mod direct;
#[cfg(test)]
mod model;
pub mod operand;
mod places;
pub mod stub;
pub mod tables;

use guest_abi::Errno;
use guest_abi::layout::{ENTRY_PAGE, MAILBOX_PAGE, MONITOR_BASE, REQUEST_PAGE};
pub use places::*;
use sentry::platform::{Memory as _, PhysAddr};

use crate::memory::GuestMemory;
use crate::page_table::pte;

/// The pages that all vCPUs of a machine share.
pub struct SharedPages {
    entry: PhysAddr,
    descriptors: PhysAddr,
    idt: PhysAddr,
    stubs: PhysAddr,
}

impl SharedPages {
    /// Makes them.
    pub fn new(memory: &GuestMemory) -> Result<SharedPages, Errno> {
        let shared = SharedPages {
            entry: memory.alloc_table_page()?,
            descriptors: memory.alloc_table_page()?,
            idt: memory.alloc_table_page()?,
            stubs: memory.alloc_table_page()?,
        };
        memory.write(shared.entry, &tables::filled(&[(0, &stub::Stub::new(TrapMode::Ring3).code)]))?;
        memory.write(shared.descriptors, &tables::descriptors())?;
        memory.write(shared.idt, &tables::interrupt_descriptors())?;
        memory.write(shared.stubs, &tables::stubs())?;
        Ok(shared)
    }

    /// Shuts or opens the system call port to ring 3. Only while no vCPU runs.
    pub fn set_port_open(&self, memory: &GuestMemory, open: bool) -> Result<(), Errno> {
        memory.write(self.descriptors, &tables::descriptors_with_port(open))
    }
}

/// The tables and pages of one vCPU.
pub struct Chain {
    /// The page-directory-pointer table for the region's top-level entry.
    pub pdpt: PhysAddr,
    table: PhysAddr,
    /// The ring-0 stack.
    pub stack: PhysAddr,
    /// The request page.
    pub requests: PhysAddr,
    /// The mailbox page: the CPU's number, and the answers of the SYSCALL entry.
    pub mailbox: PhysAddr,
}

impl Chain {
    /// Makes the chain of the CPU numbered `cpu`. Without a mode the system call entry of ring3 mode is left out.
    pub fn new(memory: &GuestMemory, shared: &SharedPages, cpu: u32, mode: Option<TrapMode>) -> Result<Chain, Errno> {
        let (pdpt, directory) = (memory.alloc_table_page()?, memory.alloc_table_page()?);
        let chain = Chain {
            pdpt,
            table: memory.alloc_table_page()?,
            stack: memory.alloc_table_page()?,
            requests: memory.alloc_table_page()?,
            mailbox: memory.alloc_table_page()?,
        };
        memory.write(chain.mailbox, &cpu.to_le_bytes())?;
        memory.table_write(pdpt, index(MONITOR_BASE, 30), pte::table(directory));
        memory.table_write(directory, index(MONITOR_BASE, 21), pte::table(chain.table));
        chain.set(memory, DESCRIPTOR_PAGE, pte::supervisor(shared.descriptors, false, false));
        chain.set(memory, IDT_PAGE, pte::supervisor(shared.idt, false, false));
        chain.set(memory, STUB_PAGE, pte::supervisor(shared.stubs, false, true));
        chain.set(memory, STACK_PAGE, pte::supervisor(chain.stack, true, false));
        chain.set(memory, REQUEST_PAGE, pte::supervisor(chain.requests, true, false));
        // The program may read its CPU's number and the answers. What it may write (the request page) the monitor never relies on.
        chain.set(memory, MAILBOX_PAGE, pte::user(chain.mailbox, false, false));
        if mode == Some(TrapMode::Ring3) {
            chain.open_entry(memory, shared);
        }
        Ok(chain)
    }

    /// Shows the system call entry of ring3 mode, and its request page, to the program.
    pub fn open_entry(&self, memory: &GuestMemory, shared: &SharedPages) {
        self.set(memory, REQUEST_PAGE, pte::user(self.requests, true, false));
        self.set(memory, ENTRY_PAGE, pte::user(shared.entry, false, true));
    }

    fn set(&self, memory: &GuestMemory, va: u64, entry: u64) {
        memory.table_write(self.table, index(va, 12), entry);
    }
}

fn index(va: u64, shift: u32) -> usize {
    ((va >> shift) & 511) as usize
}
