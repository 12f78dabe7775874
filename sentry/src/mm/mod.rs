//! Memory management: the VMA tree of each address space, its backing, faults, and copies to and from the program.
//! Owns who may touch which address; never file contents (see `backing::Mappable`) nor page-table formats (the platform's).
pub mod advise;
pub mod backing;
pub mod charge;
mod detach;
mod direct;
pub mod fault;
mod fork;
mod gaps;
pub mod image;
pub mod io;
pub mod protect;
pub mod remap;
pub mod shared;
pub mod space;
mod state;
mod tenancy;
#[cfg(test)]
mod tests;
pub mod usercopy;
mod vma;

/// Clears the offset within a page.
pub(crate) const PAGE_MASK: u64 = !(guest_abi::layout::PAGE_SIZE - 1);

pub use backing::{Mappable, Mappers};
pub use charge::Charge;
pub use image::ImageInfo;
pub use io::{IoDest, IoSource, Pinned};
pub use space::{
    AddressSpace, FaultSignal, FutexKey, MapFlags, MapRequest, MapSource, MappedFile, Prot, SpaceLimits, Usage, VmaInfo,
};
pub use tenancy::Tenancy;
