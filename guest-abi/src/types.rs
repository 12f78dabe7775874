//! ABI structures of Linux on x86-64, byte for byte as <asm/*.h> and <linux/*.h> lay them out.
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// struct timespec: seconds and nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Timespec {
    /// Seconds.
    pub sec: i64,
    /// Nanoseconds, 0..1e9 when valid.
    pub nsec: i64,
}

/// struct timeval: seconds and microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Timeval {
    /// Seconds.
    pub sec: i64,
    /// Microseconds.
    pub usec: i64,
}

/// struct iovec.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Iovec {
    /// Start address.
    pub base: u64,
    /// Bytes.
    pub len: u64,
}

/// struct stat of x86-64 (stat(2)).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Stat {
    pub dev: u64,
    pub ino: u64,
    pub nlink: u64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub pad0: u32,
    pub rdev: u64,
    pub size: i64,
    pub blksize: i64,
    pub blocks: i64,
    pub atime: Timespec,
    pub mtime: Timespec,
    pub ctime: Timespec,
    pub unused: [i64; 3],
}

/// siginfo_t as 128 raw bytes: signo, errno, code at 0, 4, 8 and the union at 16.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct SigInfo {
    pub signo: i32,
    pub errno: i32,
    pub code: i32,
    pub pad: i32,
    pub fields: [u64; 14],
}

/// struct kernel sigaction (rt_sigaction(2)).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct SigAction {
    pub handler: u64,
    pub flags: u64,
    pub restorer: u64,
    pub mask: u64,
}

/// stack_t (sigaltstack(2)).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct SigStack {
    pub sp: u64,
    pub flags: i32,
    pub pad: i32,
    pub size: u64,
}

/// struct rlimit64 (prlimit(2)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Rlimit {
    /// Soft limit; u64::MAX is RLIM_INFINITY.
    pub cur: u64,
    /// Hard limit.
    pub max: u64,
}

/// struct pollfd (poll(2)).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct PollFd {
    pub fd: i32,
    pub events: u16,
    pub revents: u16,
}
