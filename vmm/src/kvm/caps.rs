//! What this host's KVM offers, and the words for what it lacks. Opens the device; changes nothing.
use core::fmt;
use std::io;

use kvm_ioctls::{Cap, Kvm};

/// Why no sandbox can run here. `Display` is one sentence for the user.
#[derive(Debug)]
pub enum PlatformError {
    /// No `/dev/kvm`.
    NoDevice,
    /// `/dev/kvm` cannot be opened by this user.
    NoPermission,
    /// Opening failed otherwise.
    Open(io::Error),
    /// Not version 12 of the interface.
    ApiVersion(i32),
    /// A capability is missing (its KVM name).
    MissingCapability(&'static str),
    /// A KVM call failed.
    Kvm(&'static str, io::Error),
    /// Guest memory could not be set up.
    Memory(String),
    /// A system call of the host failed.
    Host(&'static str, io::Error),
    /// The machine did not behave as any known KVM does.
    SelfTest(String),
    /// More CPUs were asked for than KVM can give.
    TooManyCpus(usize, usize),
}

impl fmt::Display for PlatformError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice => f.write_str(
                "/dev/kvm does not exist: load the kvm_intel or kvm_amd module, or enable virtualization in the firmware",
            ),
            Self::NoPermission => {
                f.write_str(
                    "/dev/kvm may not be opened by this user: let the group that owns it (often `kvm`) read and write it, and add the user to that group",
                )
            }
            Self::Open(e) => write!(f, "/dev/kvm cannot be opened: {e}"),
            Self::ApiVersion(v) => write!(f, "KVM speaks interface version {v}, not 12"),
            Self::MissingCapability(c) => write!(f, "this host's KVM is too old: it lacks {c}"),
            Self::Kvm(what, e) => write!(f, "KVM refused to {what}: {e}"),
            Self::Memory(e) => write!(f, "guest memory cannot be set up: {e}"),
            Self::Host(what, e) => write!(f, "the host refused to {what}: {e}"),
            Self::SelfTest(e) => write!(f, "the virtual machine failed its self-test: {e}"),
            Self::TooManyCpus(asked, max) => write!(f, "{asked} CPUs were asked for but KVM allows {max}"),
        }
    }
}

impl core::error::Error for PlatformError {}

impl PlatformError {
    /// For `map_err` on a KVM call.
    pub(crate) fn kvm(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> PlatformError {
        move |e| PlatformError::Kvm(what, io::Error::from_raw_os_error(e.errno()))
    }
}

/// The KVM capabilities that matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// KVM_GET_API_VERSION.
    pub api_version: i32,
    /// KVM_CAP_X86_USER_SPACE_MSR and other niceties are not needed; these are. Largest number of vCPUs.
    pub max_vcpus: usize,
    /// Largest number of memory slots.
    pub max_memslots: usize,
    /// KVM_CAP_GET_TSC_KHZ.
    pub tsc_khz: bool,
    /// KVM_CAP_MEMORY_FAULT_INFO: KVM tells which memory the host could not supply.
    pub memory_fault_info: bool,
    /// KVM_CAP_XSAVE2: size of its buffer, or 0.
    pub xsave2: i32,
}

/// KVM_CAP_MEMORY_FAULT_INFO of <linux/kvm.h>.
const CAP_MEMORY_FAULT_INFO: core::ffi::c_ulong = 232;
/// KVM_SYNC_X86_REGS | KVM_SYNC_X86_SREGS.
const SYNC_NEEDED: i32 = 3;

/// Opens `/dev/kvm` and checks what a sandbox cannot do without.
pub fn open() -> Result<(Kvm, Caps), PlatformError> {
    let kvm = Kvm::new().map_err(|e| match e.errno() {
        libc::ENOENT | libc::ENXIO | libc::ENODEV => PlatformError::NoDevice,
        libc::EACCES | libc::EPERM => PlatformError::NoPermission,
        n => PlatformError::Open(io::Error::from_raw_os_error(n)),
    })?;
    let api_version = kvm.get_api_version();
    if api_version != 12 {
        return Err(PlatformError::ApiVersion(api_version));
    }
    if kvm.check_extension_int(Cap::SyncRegs) & SYNC_NEEDED != SYNC_NEEDED {
        return Err(PlatformError::MissingCapability("KVM_CAP_SYNC_REGS"));
    }
    let needed = [
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::SyncMmu, "KVM_CAP_SYNC_MMU"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
        (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
        (Cap::Xsave, "KVM_CAP_XSAVE"),
        (Cap::Xcrs, "KVM_CAP_XCRS"),
        (Cap::MpState, "KVM_CAP_MP_STATE"),
        (Cap::VcpuEvents, "KVM_CAP_VCPU_EVENTS"),
    ];
    for (cap, name) in needed {
        if !kvm.check_extension(cap) {
            return Err(PlatformError::MissingCapability(name));
        }
    }
    let caps = Caps {
        api_version,
        max_vcpus: kvm.get_max_vcpus(),
        max_memslots: kvm.get_nr_memslots(),
        tsc_khz: kvm.check_extension(Cap::GetTscKhz),
        memory_fault_info: kvm.check_extension_raw(CAP_MEMORY_FAULT_INFO) > 0,
        xsave2: kvm.check_extension_int(Cap::Xsave2),
    };
    Ok((kvm, caps))
}
