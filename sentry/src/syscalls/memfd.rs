//! memfd_create(2).
use std::sync::Arc;

use guest_abi::UserAddr;

use super::args::Bits;
use super::table::Row;
use crate::fs::tmpfs::MemFd;
use crate::row;
use crate::task::Task;
use crate::task::limits::Resource;
use crate::vfs::{File, OpenFlags};
use crate::{Errno, Result};

const MFD_CLOEXEC: u32 = 1;
const MFD_ALLOW_SEALING: u32 = 2;
const MFD_HUGETLB: u32 = 4;
const MFD_NOEXEC_SEAL: u32 = 8;
const MFD_EXEC: u32 = 16;
/// The size bits that MFD_HUGETLB brings along.
const MFD_HUGE_MASK: u32 = 0x3f << 26;
/// NAME_MAX less the prefix `memfd:`.
const NAME_MAX: usize = 249;

fn memfd_create(task: &Arc<Task>, name: UserAddr, flags: Bits) -> Result<u64> {
    let flags = u32::try_from(flags.0 & 0xffff_ffff).map_err(|_| Errno::EINVAL)?;
    let known = MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL | MFD_EXEC;
    let huge = flags & MFD_HUGETLB != 0;
    if flags & !(known | if huge { MFD_HUGETLB | MFD_HUGE_MASK } else { 0 }) != 0 {
        return Err(Errno::EINVAL);
    }
    if flags & MFD_EXEC != 0 && flags & MFD_NOEXEC_SEAL != 0 {
        return Err(Errno::EINVAL);
    }
    let name = task.space()?.read_cstr(name, NAME_MAX + 1, Errno::EINVAL)?;
    if huge {
        // As a kernel without hugetlbfs answers.
        return Err(Errno::ENOSYS);
    }
    let noexec = flags & MFD_NOEXEC_SEAL != 0;
    let sealing = noexec || flags & MFD_ALLOW_SEALING != 0;
    let credentials = task.credentials();
    let shared = &task.kernel().shmem;
    let memfd = MemFd::new(shared, &name, credentials.fsuid, credentials.fsgid, sealing, !noexec)?;
    let file = File::new(Arc::new(memfd), None, OpenFlags::RDWR | OpenFlags::LARGEFILE);
    let fd = task.files().insert(file, flags & MFD_CLOEXEC != 0, 0, task.limit(Resource::Nofile))?;
    u64::try_from(fd).map_err(|_| Errno::EMFILE)
}

/// The area's rows.
pub const ROWS: &[Row] =
    &[row!(319, memfd_create(name: UserAddr, flags: Bits), fast memfd_create, Partial, "no MFD_HUGETLB")];
