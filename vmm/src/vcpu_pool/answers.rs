//! The answers that the SYSCALL entry of one vCPU gives by itself. Owns where they and their counts stand; never what they are.
use core::sync::atomic::{AtomicU64, Ordering};

use sentry::platform::PhysAddr;

use crate::entry::stub::{ANSWERABLE, ANSWERED, ANSWERS};
use crate::memory::GuestMemory;

/// Most answers believed of one call between two looks: where SYSCALL arrives in ring 3 the program can write the counts.
const MOST: u64 = 1 << 32;

/// The answers of one vCPU.
#[derive(Default)]
pub struct Answers {
    /// Physical addresses of the mailbox page and of the request page, 0 before there are any.
    mailbox: AtomicU64,
    requests: AtomicU64,
}

impl Answers {
    /// Names the pages.
    pub fn set_pages(&self, mailbox: PhysAddr, requests: PhysAddr) {
        self.mailbox.store(mailbox.0, Ordering::Release);
        self.requests.store(requests.0, Ordering::Release);
    }

    /// See [`sentry::platform::Platform::set_answer`].
    pub fn set(&self, memory: &GuestMemory, nr: u16, value: Option<u32>) {
        let page = PhysAddr(self.mailbox.load(Ordering::Acquire));
        let nr = usize::from(nr);
        if page.0 == 0 || nr >= ANSWERABLE {
            return;
        }
        let word = value.map_or(0, |v| u64::from(v) + 1);
        // The vCPU reads the line often, and mostly nothing changes.
        if memory.table_read(page, ANSWERS + nr) != word {
            memory.table_write(page, ANSWERS + nr, word);
        }
    }

    /// How often the call was answered since the last look. Only while the vCPU is out of the guest.
    pub fn take(&self, memory: &GuestMemory, nr: u16) -> u64 {
        let page = PhysAddr(self.requests.load(Ordering::Acquire));
        let nr = usize::from(nr);
        if page.0 == 0 || nr >= ANSWERABLE {
            return 0;
        }
        let count = memory.table_read(page, ANSWERED + nr);
        if count != 0 {
            memory.table_write(page, ANSWERED + nr, 0);
        }
        count.min(MOST)
    }
}
