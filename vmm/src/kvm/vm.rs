//! Making a virtual machine.
#![allow(unsafe_code)]
use std::io;
use std::os::fd::AsRawFd;

use kvm_ioctls::{Kvm, VmFd};

use super::PlatformError;

/// _IO(KVMIO, 0x44) of <linux/kvm.h>.
const KVM_SET_NR_MMU_PAGES: libc::c_ulong = 0xae44;
/// Shadow pages KVM may keep at least: 256 MiB, reached only by a guest with as many page tables.
const MIN_SHADOW_PAGES: u64 = 65_536;
/// And at most: 4 GiB.
const MAX_SHADOW_PAGES: u64 = 1 << 20;

/// A virtual machine whose guest memory will not exceed `memory_limit` bytes.
pub fn create(kvm: &Kvm, memory_limit: u64) -> Result<VmFd, PlatformError> {
    // A signal that arrives meanwhile ends the call early.
    let vm = loop {
        match kvm.create_vm() {
            Err(e) if e.errno() == libc::EINTR => {}
            other => break other.map_err(PlatformError::kvm("create a virtual machine"))?,
        }
    };
    // Without this a KVM on shadow paging recycles shadow pages as soon as they exceed 2 % of the slots' pages, for ever.
    let pages = (memory_limit / guest_abi::layout::PAGE_SIZE / 4).clamp(MIN_SHADOW_PAGES, MAX_SHADOW_PAGES);
    // SAFETY: the descriptor is a VM's, and the request takes a plain integer.
    let r = unsafe { libc::ioctl(vm.as_raw_fd(), KVM_SET_NR_MMU_PAGES, pages as libc::c_ulong) };
    if r != 0 {
        return Err(PlatformError::Kvm("set its number of shadow pages", io::Error::last_os_error()));
    }
    Ok(vm)
}
