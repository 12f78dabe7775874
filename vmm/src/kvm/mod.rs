//! The KVM device: what it offers, virtual machines, virtual CPUs, and what the guest's CPUID and MSRs say. Owns every KVM
//! system call but those for memory slots; knows nothing of tasks or page tables.
pub mod caps;
pub mod cpuid;
pub mod model;
pub mod msr;
pub mod vcpu;
pub mod vm;

pub use caps::{Caps, PlatformError};
pub use vcpu::Vcpu;
