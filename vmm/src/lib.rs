//! bartizan's virtual machine monitor: KVM, guest memory, page tables, vCPU workers, host files, jail, command line.

pub mod memory;
