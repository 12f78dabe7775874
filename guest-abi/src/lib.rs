//! Facts about the guest side: Linux x86-64 ABI types that the well-kept crates lack, user-address types, and the
//! layout of the user address space with its entry page and mailbox. No behaviour, no unsafe.
#![no_std]
#![forbid(unsafe_code)]

pub mod addr;
pub mod errno;
pub mod file;
pub mod layout;
pub mod signal;
pub mod types;

pub use addr::{UserAddr, UserPtr, UserSlice};
pub use errno::Errno;
