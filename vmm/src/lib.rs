//! bartizan's virtual machine monitor: KVM, guest memory, page tables, vCPU workers, host files, jail, command line.

pub mod host;
pub mod jail;
pub mod memory;
pub mod reactor;
