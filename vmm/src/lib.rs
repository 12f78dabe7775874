//! bartizan's virtual machine monitor: KVM, guest memory, page tables, vCPU workers, host files, jail, command line.

pub mod cli;
pub mod clock;
pub mod control;
pub mod entry;
pub mod fpu;
pub mod host;
pub mod jail;
pub mod kvm;
pub mod memory;
pub mod page_table;
pub mod platform;
pub mod reactor;
pub mod sandbox;
pub mod self_test;
pub mod vcpu_pool;
