//! ABI structures of the file calls.
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes one call of read(2), write(2) and their kin moves at most (MAX_RW_COUNT).
pub const MAX_RW_COUNT: usize = 0x7fff_f000;

/// struct statx_timestamp.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct StatxTime {
    pub sec: i64,
    pub nsec: u32,
    pub pad: i32,
}

/// struct statx (statx(2)).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Statx {
    pub mask: u32,
    pub blksize: u32,
    pub attributes: u64,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub mode: u16,
    pub pad0: u16,
    pub ino: u64,
    pub size: u64,
    pub blocks: u64,
    pub attributes_mask: u64,
    pub atime: StatxTime,
    pub btime: StatxTime,
    pub ctime: StatxTime,
    pub mtime: StatxTime,
    pub rdev_major: u32,
    pub rdev_minor: u32,
    pub dev_major: u32,
    pub dev_minor: u32,
    pub mnt_id: u64,
    pub dio_mem_align: u32,
    pub dio_offset_align: u32,
    pub spare: [u64; 12],
}

/// struct statfs of x86-64 (statfs(2)).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Statfs {
    pub kind: u64,
    pub bsize: u64,
    pub blocks: u64,
    pub bfree: u64,
    pub bavail: u64,
    pub files: u64,
    pub ffree: u64,
    pub fsid: [u32; 2],
    pub namelen: u64,
    pub frsize: u64,
    pub flags: u64,
    pub spare: [u64; 4],
}

/// struct flock of x86-64 (fcntl(2)).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Flock {
    pub kind: i16,
    pub whence: i16,
    pub pad0: i32,
    pub start: i64,
    pub len: i64,
    pub pid: i32,
    pub pad1: i32,
}

/// struct f_owner_ex (fcntl(2)).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct FOwnerEx {
    pub kind: i32,
    pub pid: i32,
}

const _: () = assert!(size_of::<Statx>() == 256 && size_of::<Statfs>() == 120 && size_of::<Flock>() == 32);
