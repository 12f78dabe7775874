//! mmap(2) and its family, mlock(2), madvise(2), mincore(2), msync(2), membarrier(2), protection keys.
use std::sync::Arc;

use guest_abi::UserAddr;
use guest_abi::layout::{PAGE_SIZE, TASK_SIZE};
use linux_raw_sys::general as raw;

use super::args::{Bits, Fd};
use super::slices::{self, SLICE};
use super::table::Row;
use crate::fs::tmpfs::data::seal;
use crate::mm::advise::{Advice, advice_error, lock_error};
use crate::mm::remap::RemapFlags;
use crate::mm::{AddressSpace, MapFlags, MapRequest, MapSource, Prot};
use crate::ns::user::Caps;
use crate::row;
use crate::task::Task;
use crate::vfs::mount::MountFlags;
use crate::{Errno, Result};

/// The rows of this area.
pub const ROWS: &[Row] = &[
    row!(9, mmap(addr: UserAddr, length: u64, prot: Bits, flags: Bits, fd: Fd, offset: Bits), both mmap_fast, mmap_slow, Partial,
        "no MAP_HUGETLB pages, no MAP_SYNC"),
    row!(10, mprotect(addr: UserAddr, length: u64, prot: Bits), fast mprotect, Full),
    row!(11, munmap(addr: UserAddr, length: u64), fast munmap, Full),
    row!(12, brk(addr: UserAddr), fast brk, Full),
    row!(25, mremap(old_address: UserAddr, old_size: u64, new_size: u64, flags: Bits, new_address: UserAddr), fast mremap, Full),
    row!(26, msync(addr: UserAddr, length: u64, flags: Bits), fast msync, Full),
    row!(27, mincore(addr: UserAddr, length: u64, vec: UserAddr), fast mincore, Full),
    row!(28, madvise(addr: UserAddr, length: u64, advice: u32), both madvise_fast, madvise_slow, Partial,
        "MADV_COLLAPSE, MADV_HWPOISON, guard regions: EINVAL; same-page merging does nothing"),
    row!(149, mlock(addr: UserAddr, length: u64), slow mlock, Full),
    row!(150, munlock(addr: UserAddr, length: u64), fast munlock, Full),
    row!(151, mlockall(flags: Bits), slow mlockall, Full),
    row!(152, munlockall(), fast munlockall, Full),
    row!(216, remap_file_pages(addr: UserAddr, size: u64, prot: Bits, pgoff: u64, flags: Bits), fast remap_file_pages, Full),
    row!(324, membarrier(cmd: i32, flags: u32, cpu_id: i32), fast membarrier, Partial, "no rseq commands"),
    row!(325, mlock2(addr: UserAddr, length: u64, flags: u32), slow mlock2, Full),
    row!(329, pkey_mprotect(addr: UserAddr, length: u64, prot: Bits, pkey: i32), fast pkey_mprotect, Full),
    row!(330, pkey_alloc(flags: u64, access_rights: u64), fast pkey_alloc, Full, "as on a processor without protection keys"),
    row!(331, pkey_free(pkey: i32), fast pkey_free, Full),
];

const KNOWN_MAP_FLAGS: u32 = raw::MAP_TYPE
    | raw::MAP_FIXED
    | raw::MAP_ANONYMOUS
    | raw::MAP_32BIT
    | raw::MAP_GROWSDOWN
    | raw::MAP_DENYWRITE
    | raw::MAP_EXECUTABLE
    | raw::MAP_LOCKED
    | raw::MAP_NORESERVE
    | raw::MAP_POPULATE
    | raw::MAP_NONBLOCK
    | raw::MAP_STACK
    | raw::MAP_HUGETLB
    | raw::MAP_FIXED_NOREPLACE
    | raw::MAP_UNINITIALIZED;

fn prot_of(bits: Bits) -> Prot {
    Prot::from_bits_truncate(bits.0 as u32)
}

fn map_flags(bits: u32) -> MapFlags {
    let mut flags = MapFlags::empty();
    for (bit, flag) in [
        (raw::MAP_FIXED, MapFlags::FIXED),
        (raw::MAP_FIXED_NOREPLACE, MapFlags::FIXED_NOREPLACE),
        (raw::MAP_GROWSDOWN, MapFlags::GROWSDOWN),
        (raw::MAP_NORESERVE, MapFlags::NORESERVE),
        (raw::MAP_LOCKED, MapFlags::LOCKED),
        (raw::MAP_STACK, MapFlags::THREAD_STACK),
        (raw::MAP_32BIT, MapFlags::LOW),
        (raw::MAP_DENYWRITE, MapFlags::LIBRARY),
    ] {
        flags.set(flag, bits & bit != 0);
    }
    flags.set(MapFlags::POPULATE, bits & (raw::MAP_POPULATE | raw::MAP_NONBLOCK) == raw::MAP_POPULATE);
    flags
}

fn may_lock(task: &Task) -> bool {
    task.credentials().has(Caps::IPC_LOCK)
}

fn mmap_fast(
    task: &Arc<Task>,
    addr: UserAddr,
    length: u64,
    prot: Bits,
    flags: Bits,
    fd: Fd,
    offset: Bits,
) -> Result<Option<u64>> {
    let fills = flags.0 & u64::from(raw::MAP_POPULATE | raw::MAP_LOCKED) != 0;
    if length > SLICE as u64 && (fills || task.space()?.locks_future()) {
        return Ok(None);
    }
    let space = task.space()?;
    Ok(Some(space.map(map_request(task, &space, addr, length, prot, flags, fd, offset)?)?.0))
}

async fn mmap_slow(
    task: &Arc<Task>,
    addr: UserAddr,
    length: u64,
    prot: Bits,
    flags: Bits,
    fd: Fd,
    offset: Bits,
) -> Result<u64> {
    let space = task.space()?;
    let request = map_request(task, &space, addr, length, prot, flags, fd, offset)?;
    let (at, fill) = space.map_unfilled(request)?;
    if let Some(range) = fill {
        // As Linux: a failure to populate does not fail the mapping.
        let _ = slices::populate(task, &space, range, None).await;
    }
    Ok(at.0)
}

#[allow(clippy::too_many_arguments)] // those of the call
fn map_request(
    task: &Arc<Task>,
    space: &AddressSpace,
    addr: UserAddr,
    length: u64,
    prot: Bits,
    flags: Bits,
    fd: Fd,
    offset: Bits,
) -> Result<MapRequest> {
    let offset = offset.0;
    if !offset.is_multiple_of(PAGE_SIZE) {
        return Err(Errno::EINVAL);
    }
    let prot = prot_of(prot);
    let bits = flags.0 as u32;
    let anonymous = bits & raw::MAP_ANONYMOUS != 0;
    let file = if anonymous { None } else { Some(task.files().get(fd.0)?) };
    if bits & raw::MAP_HUGETLB != 0 {
        // The pool of huge pages is empty.
        return Err(if anonymous { Errno::ENOMEM } else { Errno::EINVAL });
    }
    if length == 0 {
        return Err(Errno::EINVAL);
    }
    let pages = length.checked_add(PAGE_SIZE - 1).ok_or(Errno::ENOMEM)? / PAGE_SIZE;
    if (offset / PAGE_SIZE).checked_add(pages).is_none_or(|end| end > u64::MAX / PAGE_SIZE) {
        return Err(Errno::EOVERFLOW);
    }
    let kind = bits & raw::MAP_TYPE;
    let mut flags = map_flags(bits);
    if flags.contains(MapFlags::LOCKED) && space.limits().memlock == 0 && !may_lock(task) {
        return Err(Errno::EPERM);
    }
    let source = match file {
        None => {
            match kind {
                raw::MAP_PRIVATE => {}
                raw::MAP_SHARED if flags.contains(MapFlags::GROWSDOWN) => return Err(Errno::EINVAL),
                raw::MAP_SHARED => flags |= MapFlags::SHARED,
                _ => return Err(Errno::EINVAL),
            }
            MapSource::Anonymous
        }
        Some(file) => {
            let open = file.flags();
            if file.is_path_only() {
                return Err(Errno::EBADF);
            }
            match kind {
                raw::MAP_PRIVATE => {}
                raw::MAP_SHARED | raw::MAP_SHARED_VALIDATE => {
                    if kind == raw::MAP_SHARED_VALIDATE && bits & !KNOWN_MAP_FLAGS != 0 {
                        return Err(Errno::EOPNOTSUPP);
                    }
                    if prot.contains(Prot::WRITE) && !open.writable() {
                        return Err(Errno::EACCES);
                    }
                    flags |= MapFlags::SHARED;
                }
                _ => return Err(Errno::EINVAL),
            }
            if !open.readable() {
                return Err(Errno::EACCES);
            }
            let noexec = file.path().is_some_and(|path| path.mount.flags().contains(MountFlags::NOEXEC));
            if noexec && prot.contains(Prot::EXEC) {
                return Err(Errno::EPERM);
            }
            let sealed = file.ops().seals().is_some_and(|s| s & (seal::WRITE | seal::FUTURE_WRITE) != 0);
            if sealed && flags.contains(MapFlags::SHARED) && prot.contains(Prot::WRITE) {
                return Err(Errno::EPERM);
            }
            if file.ops().maps_anonymous() {
                MapSource::Anonymous
            } else {
                let object = file.ops().mappable()?;
                MapSource::File { object, offset, file: Some(file), may_write: open.writable() && !sealed }
            }
        }
    };
    Ok(MapRequest { addr, len: length, prot, flags, source })
}

fn munmap(task: &Arc<Task>, addr: UserAddr, length: u64) -> Result<u64> {
    task.space()?.unmap(addr, length)?;
    Ok(0)
}

fn brk(task: &Arc<Task>, addr: UserAddr) -> Result<u64> {
    Ok(task.space()?.brk(addr).0)
}

fn mprotect(task: &Arc<Task>, addr: UserAddr, length: u64, prot: Bits) -> Result<u64> {
    const GROWS_DOWN: u64 = raw::PROT_GROWSDOWN as u64;
    const GROWS_UP: u64 = raw::PROT_GROWSUP as u64;
    let known = u64::from(Prot::all().bits() | raw::PROT_SEM);
    let grows = prot.0 & (GROWS_DOWN | GROWS_UP);
    if grows == GROWS_DOWN | GROWS_UP || addr.page_offset() != 0 {
        return Err(Errno::EINVAL);
    }
    if length == 0 {
        return Ok(0);
    }
    let end = length.checked_add(PAGE_SIZE - 1).and_then(|len| addr.checked_add(len));
    if end.is_none() {
        return Err(Errno::ENOMEM);
    }
    if prot.0 & !(known | grows) != 0 {
        return Err(Errno::EINVAL);
    }
    if grows == GROWS_UP {
        // No mapping of x86 grows upwards.
        return Err(Errno::EINVAL);
    }
    task.space()?.protect(addr, length, prot_of(prot), grows == GROWS_DOWN)?;
    Ok(0)
}

fn mremap(
    task: &Arc<Task>,
    old_address: UserAddr,
    old_size: u64,
    new_size: u64,
    flags: Bits,
    new_address: UserAddr,
) -> Result<u64> {
    let known = u64::from(raw::MREMAP_MAYMOVE | raw::MREMAP_FIXED | raw::MREMAP_DONTUNMAP);
    if flags.0 & !known != 0 {
        return Err(Errno::EINVAL);
    }
    let has = |bit: u32| flags.0 & u64::from(bit) != 0;
    let flags = RemapFlags {
        may_move: has(raw::MREMAP_MAYMOVE),
        fixed: has(raw::MREMAP_FIXED).then_some(new_address),
        dont_unmap: has(raw::MREMAP_DONTUNMAP),
        hint: new_address,
    };
    Ok(task.space()?.remap(old_address, old_size, new_size, flags)?.0)
}

fn msync(task: &Arc<Task>, addr: UserAddr, length: u64, flags: Bits) -> Result<u64> {
    let (asynchronous, invalidate, sync) = (1, 2, 4);
    if flags.0 & !(asynchronous | invalidate | sync) != 0
        || addr.page_offset() != 0
        || flags.0 & (asynchronous | sync) == asynchronous | sync
    {
        return Err(Errno::EINVAL);
    }
    task.space()?.msync(addr, length, flags.0 & invalidate != 0, flags.0 & sync != 0)?;
    Ok(0)
}

fn mincore(task: &Arc<Task>, addr: UserAddr, length: u64, vec: UserAddr) -> Result<u64> {
    /// Pages looked at under one hold of the space.
    const STEP: u64 = 4096;
    if addr.page_offset() != 0 {
        return Err(Errno::EINVAL);
    }
    if !addr.range_ok(length) {
        return Err(Errno::ENOMEM);
    }
    let space = task.space()?;
    let pages = length.div_ceil(PAGE_SIZE);
    let mut done = 0;
    while done < pages {
        let n = (pages - done).min(STEP);
        let bytes = space.mincore(addr.wrapping_add(done * PAGE_SIZE), n as usize)?;
        space.write_bytes(vec.checked_add(done).ok_or(Errno::EFAULT)?, &bytes)?;
        done += n;
    }
    Ok(0)
}

fn madvise_fast(task: &Arc<Task>, addr: UserAddr, length: u64, advice: u32) -> Result<Option<u64>> {
    let populates = matches!(advice, raw::MADV_POPULATE_READ | raw::MADV_POPULATE_WRITE);
    if populates { Ok(None) } else { madvise(task, addr, length, advice).map(Some) }
}

async fn madvise_slow(task: &Arc<Task>, addr: UserAddr, length: u64, advice: u32) -> Result<u64> {
    let write = match advice {
        raw::MADV_POPULATE_READ => false,
        raw::MADV_POPULATE_WRITE => true,
        _ => return madvise(task, addr, length, advice),
    };
    let range = AddressSpace::advised_range(addr, length)?;
    slices::populate(task, &*task.space()?, range, Some(write)).await.map_err(advice_error)?;
    Ok(0)
}

fn madvise(task: &Arc<Task>, addr: UserAddr, length: u64, advice: u32) -> Result<u64> {
    const HWPOISON: u32 = 100;
    const SOFT_OFFLINE: u32 = 101;
    if (advice == HWPOISON || advice == SOFT_OFFLINE) && !task.credentials().has(Caps::SYS_ADMIN) {
        return Err(Errno::EPERM);
    }
    task.space()?.advise(addr, length, Advice::from_raw(advice)?)?;
    Ok(0)
}

async fn mlock(task: &Arc<Task>, addr: UserAddr, length: u64) -> Result<u64> {
    lock(task, addr, length, false).await
}

async fn lock(task: &Arc<Task>, addr: UserAddr, length: u64, on_fault: bool) -> Result<u64> {
    let space = task.space()?;
    let range = space.lock_pages(addr, length, on_fault, may_lock(task))?;
    slices::populate(task, &space, range, None).await.map_err(lock_error)?;
    Ok(0)
}

async fn mlock2(task: &Arc<Task>, addr: UserAddr, length: u64, flags: u32) -> Result<u64> {
    if flags & !raw::MLOCK_ONFAULT != 0 {
        return Err(Errno::EINVAL);
    }
    lock(task, addr, length, flags != 0).await
}

fn munlock(task: &Arc<Task>, addr: UserAddr, length: u64) -> Result<u64> {
    task.space()?.unlock_pages(addr, length)?;
    Ok(0)
}

async fn mlockall(task: &Arc<Task>, flags: Bits) -> Result<u64> {
    let (current, future, on_fault) =
        (u64::from(raw::MCL_CURRENT), u64::from(raw::MCL_FUTURE), u64::from(raw::MCL_ONFAULT));
    if flags.0 == 0 || flags.0 & !(current | future | on_fault) != 0 || flags.0 == on_fault {
        return Err(Errno::EINVAL);
    }
    let has = |bit| flags.0 & bit != 0;
    let space = task.space()?;
    for range in space.lock_all(has(current), has(future), has(on_fault), may_lock(task))? {
        let _ = slices::populate(task, &space, range, None).await;
    }
    Ok(0)
}

fn munlockall(task: &Arc<Task>) -> Result<u64> {
    task.space()?.unlock_all()?;
    Ok(0)
}

/// As Linux since 4.0: emulated by a new mapping over the old one.
fn remap_file_pages(task: &Arc<Task>, addr: UserAddr, size: u64, prot: Bits, pgoff: u64, flags: Bits) -> Result<u64> {
    let start = addr.page_floor();
    let size = size & !(PAGE_SIZE - 1);
    if prot.0 != 0 || size == 0 || start.checked_add(size).is_none_or(|end| end.0 > TASK_SIZE) {
        return Err(Errno::EINVAL);
    }
    let offset = pgoff.checked_mul(PAGE_SIZE).filter(|o| o.checked_add(size).is_some()).ok_or(Errno::EINVAL)?;
    let space = task.space()?;
    let vma = space.find_vma(start, false).filter(|v| v.start <= start.0).ok_or(Errno::EINVAL)?;
    if !vma.flags.contains(MapFlags::SHARED) || start.0 + size > vma.end {
        return Err(Errno::EINVAL);
    }
    let MapSource::File { object, file, may_write, .. } = vma.source else { return Err(Errno::EINVAL) };
    let mut keep = MapFlags::SHARED | MapFlags::FIXED | (vma.flags & MapFlags::LOCKED);
    keep.set(MapFlags::POPULATE, flags.0 & u64::from(raw::MAP_NONBLOCK) == 0);
    space.map(MapRequest {
        addr: start,
        len: size,
        prot: vma.prot,
        flags: keep,
        source: MapSource::File { object, offset, file, may_write },
    })?;
    Ok(0)
}

fn membarrier(task: &Arc<Task>, cmd: i32, flags: u32, _cpu_id: i32) -> Result<u64> {
    const GLOBAL: u32 = 1;
    const GLOBAL_EXPEDITED: u32 = 2;
    const REGISTER_GLOBAL_EXPEDITED: u32 = 4;
    const PRIVATE_EXPEDITED: u32 = 8;
    const REGISTER_PRIVATE_EXPEDITED: u32 = 16;
    const PRIVATE_EXPEDITED_SYNC_CORE: u32 = 32;
    const REGISTER_PRIVATE_EXPEDITED_SYNC_CORE: u32 = 64;
    const GET_REGISTRATIONS: u32 = 512;
    const ALL: u32 = 127 | GET_REGISTRATIONS;
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    let cmd = u32::try_from(cmd).map_err(|_| Errno::EINVAL)?;
    let space = task.space()?;
    match cmd {
        0 => Ok(ALL.into()),
        GLOBAL | GLOBAL_EXPEDITED => {
            task.kernel().platform.memory_barrier();
            Ok(0)
        }
        // A barrier makes every CPU leave the guest, which serializes its instruction stream as well.
        PRIVATE_EXPEDITED | PRIVATE_EXPEDITED_SYNC_CORE => {
            if space.barrier_registrations(0) & (cmd << 1) == 0 {
                return Err(Errno::EPERM);
            }
            task.kernel().platform.memory_barrier();
            Ok(0)
        }
        REGISTER_GLOBAL_EXPEDITED | REGISTER_PRIVATE_EXPEDITED | REGISTER_PRIVATE_EXPEDITED_SYNC_CORE => {
            space.barrier_registrations(cmd);
            Ok(0)
        }
        GET_REGISTRATIONS => Ok(space.barrier_registrations(0).into()),
        _ => Err(Errno::EINVAL),
    }
}

fn pkey_mprotect(task: &Arc<Task>, addr: UserAddr, length: u64, prot: Bits, pkey: i32) -> Result<u64> {
    if pkey != -1 {
        return Err(Errno::EINVAL);
    }
    mprotect(task, addr, length, prot)
}

fn pkey_alloc(_task: &Arc<Task>, flags: u64, access_rights: u64) -> Result<u64> {
    Err(if flags != 0 || access_rights & !3 != 0 { Errno::EINVAL } else { Errno::ENOSPC })
}

fn pkey_free(_task: &Arc<Task>, _pkey: i32) -> Result<u64> {
    Err(Errno::EINVAL)
}
