//! The model-specific registers a vCPU starts with.
use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

use super::PlatformError;
use crate::entry::TrapMode;

const MSR_TSC: u32 = 0x10;
const MSR_STAR: u32 = 0xc000_0081;
const MSR_LSTAR: u32 = 0xc000_0082;
const MSR_CSTAR: u32 = 0xc000_0083;
const MSR_SFMASK: u32 = 0xc000_0084;
const MSR_TSC_AUX: u32 = 0xc000_0103;

/// What Linux clears at SYSCALL (syscall_init): CF PF AF ZF SF TF IF DF OF IOPL NT RF AC ID.
pub const SYSCALL_MASK: u64 = 0x0025_7fd5;

/// SYSCALL loads CS 0x10 and SS 0x18; SYSRET to 64-bit code loads CS 0x33 and SS 0x2b.
pub const STAR: u64 = (0x10 << 32) | (0x23 << 48);

fn entry(index: u32, data: u64) -> kvm_msr_entry {
    kvm_msr_entry { index, data, ..Default::default() }
}

/// The trap flag alone: in ring3 mode the flags are to be the program's again when the entry jumps back to it.
const TRAP_MASK: u64 = 0x100;

/// Sets the system call registers, with `lstar` as the entry point.
pub fn set_syscall(vcpu: &VcpuFd, lstar: u64, mode: TrapMode) -> Result<(), PlatformError> {
    let what = "set the system call registers of a virtual CPU";
    let mask = match mode {
        TrapMode::Ring0 => SYSCALL_MASK,
        TrapMode::Ring3 => TRAP_MASK,
    };
    let entries = [entry(MSR_STAR, STAR), entry(MSR_LSTAR, lstar), entry(MSR_CSTAR, 0), entry(MSR_SFMASK, mask)];
    let msrs = Msrs::from_entries(&entries)
        .map_err(|_| PlatformError::Kvm(what, std::io::Error::from_raw_os_error(libc::EINVAL)))?;
    let set = vcpu.set_msrs(&msrs).map_err(PlatformError::kvm(what))?;
    if set < entries.len() {
        return Err(PlatformError::Kvm(what, std::io::Error::from_raw_os_error(libc::EINVAL)));
    }
    Ok(())
}

/// Sets what RDTSCP and RDPID answer: Linux's CPU number (node 0). A processor without them has no such register.
pub fn set_tsc_aux(vcpu: &VcpuFd, cpu: u32) {
    if let Ok(msrs) = Msrs::from_entries(&[entry(MSR_TSC_AUX, u64::from(cpu))]) {
        let _ = vcpu.set_msrs(&msrs);
    }
}

/// Sets the TSC. KVM takes values that differ little from what the counter would be anyway for an offset of the first one.
pub fn set_tsc(vcpu: &VcpuFd, value: u64) {
    if let Ok(msrs) = Msrs::from_entries(&[entry(MSR_TSC, value)]) {
        let _ = vcpu.set_msrs(&msrs);
    }
}
