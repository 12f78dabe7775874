//! Resource limits (getrlimit(2)).
use guest_abi::types::Rlimit;

/// RLIMIT_* numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
#[allow(missing_docs)]
pub enum Resource {
    Cpu = 0,
    Fsize = 1,
    Data = 2,
    Stack = 3,
    Core = 4,
    Rss = 5,
    Nproc = 6,
    Nofile = 7,
    Memlock = 8,
    As = 9,
    Locks = 10,
    Sigpending = 11,
    Msgqueue = 12,
    Nice = 13,
    Rtprio = 14,
    Rttime = 15,
}

/// All limits of a thread group.
pub type Limits = [Rlimit; 16];

const INFINITY: u64 = u64::MAX;

/// What a process starts with where the caller says nothing: Linux's usual values.
pub fn default_limits() -> Limits {
    let both = |v| Rlimit { cur: v, max: v };
    let mut l = [both(INFINITY); 16];
    l[Resource::Stack as usize] = Rlimit { cur: 8 << 20, max: INFINITY };
    l[Resource::Core as usize] = Rlimit { cur: 0, max: INFINITY };
    l[Resource::Nproc as usize] = both(131_072);
    l[Resource::Nofile as usize] = Rlimit { cur: 1024, max: 1 << 20 };
    l[Resource::Memlock as usize] = both(8 << 20);
    l[Resource::Sigpending as usize] = both(131_072);
    l[Resource::Msgqueue as usize] = both(819_200);
    l[Resource::Nice as usize] = both(0);
    l[Resource::Rtprio as usize] = both(0);
    l
}

impl Resource {
    /// From the number in a call; EINVAL beyond the last.
    pub fn from_number(n: u32) -> crate::Result<Resource> {
        const ALL: [Resource; 16] = [
            Resource::Cpu,
            Resource::Fsize,
            Resource::Data,
            Resource::Stack,
            Resource::Core,
            Resource::Rss,
            Resource::Nproc,
            Resource::Nofile,
            Resource::Memlock,
            Resource::As,
            Resource::Locks,
            Resource::Sigpending,
            Resource::Msgqueue,
            Resource::Nice,
            Resource::Rtprio,
            Resource::Rttime,
        ];
        usize::try_from(n).ok().and_then(|i| ALL.get(i).copied()).ok_or(guest_abi::Errno::EINVAL)
    }
}
