//! Memory management: the VMA tree of each address space, its backing, faults, and copies to and from the program.
//! Owns who may touch which address; never file contents (see `backing::Mappable`) nor page-table formats (the platform's).
pub mod backing;
pub mod space;
pub mod usercopy;

pub use backing::Mappable;
pub use space::{AddressSpace, FaultSignal, MapFlags, MapRequest, MapSource, Prot, VmaInfo};
pub use usercopy::{IoDest, IoSource};
