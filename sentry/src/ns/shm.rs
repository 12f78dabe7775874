//! System V shared memory (sysvipc(7), shmget(2), shmat(2), shmctl(2)): the segments of one IPC namespace. Owns their numbers, permissions
//! and memory; never an address space, whose mappings hold a segment's memory and thereby count as its attachments.
use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use guest_abi::layout::PAGE_SIZE;

use super::user::{Caps, Credentials};
use super::user_namespace::UserNamespace;
use crate::lock::{Mutex, Rank};
use crate::mm::backing::{Mappable, MappedPage};
use crate::mm::shared::SharedAnonymous;
use crate::mm::{AddressSpace, Charge, MappedFile};
use crate::platform::{KernelMemory, Platform};
use crate::{Errno, Result};

/// The device that segments have as files: Linux's internal tmpfs.
pub const SHM_DEV: u64 = 1;
/// kernel.shmmni: segments of a namespace at most.
pub const SHMMNI: u32 = 4096;
/// kernel.shmmax: bytes of a segment at most.
pub const SHMMAX: u64 = u64::MAX - (1 << 24);
/// kernel.shmall: pages of all segments at most.
pub const SHMALL: u64 = u64::MAX - (1 << 24);

/// Bits of an identifier that are the index; above stands a sequence number.
const INDEX_BITS: u32 = 15;
/// Sequence numbers before they begin again.
const SEQUENCES: u32 = 1 << 16;

/// Bytes of a segment besides its pages.
const SEGMENT_COST: usize = 1024;

const IPC_PRIVATE: i32 = 0;
const IPC_CREAT: u32 = 0o1000;
const IPC_EXCL: u32 = 0o2000;
/// Mode bit: goes with its last attachment.
const SHM_DEST: u32 = 0o1000;
/// Mode bit: not to be swapped out.
const SHM_LOCKED: u32 = 0o2000;

/// The memory of a segment. Each mapping of it holds one reference.
pub struct ShmMemory {
    pages: Arc<SharedAnonymous>,
    size: u64,
    id: i32,
    ino: u64,
    segments: Weak<Segments>,
}

impl Mappable for ShmMemory {
    fn key(&self) -> (u64, u64) {
        (SHM_DEV, self.ino)
    }
    fn page(&self, offset: u64, write: bool) -> Result<MappedPage> {
        self.pages.page(offset, write)
    }
    fn size(&self) -> u64 {
        self.pages.size()
    }
    fn write_notify(&self) -> bool {
        false
    }
    fn punch_hole(&self, start: u64, end: u64) -> Result<()> {
        self.pages.punch_hole(start, end)
    }
    fn is_resident(&self, offset: u64) -> bool {
        self.pages.is_resident(offset)
    }
    // Never truncated, so nobody needs to be told.
    fn add_mapper(&self, _space: &Arc<AddressSpace>) {}
}

impl Drop for ShmMemory {
    fn drop(&mut self) {
        if let Some(segments) = self.segments.upgrade() {
            segments.forget(self.id, self.size);
        }
    }
}

/// The name of a segment in /proc/PID/maps.
struct Name(i32);

impl MappedFile for Name {
    fn maps_path(&self) -> Vec<u8> {
        format!("/SYSV{:08x} (deleted)", self.0).into_bytes()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

enum Held {
    /// It lives on without attachments.
    Kept(Arc<ShmMemory>),
    /// Removed: it lives while somebody has it attached.
    Removed(Weak<ShmMemory>),
}

struct Segment {
    stat: ShmStat,
    held: Held,
    name: Arc<Name>,
    _charge: Charge,
}

/// What shmctl(2) tells of a segment. Process numbers are those of the outermost PID namespace; times are s.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct ShmStat {
    pub id: i32,
    pub key: i32,
    pub uid: u32,
    pub gid: u32,
    pub cuid: u32,
    pub cgid: u32,
    pub mode: u32,
    pub size: u64,
    pub atime: i64,
    pub dtime: i64,
    pub ctime: i64,
    pub cpid: i32,
    pub lpid: i32,
    pub nattch: u64,
}

/// Who asks, and when.
pub struct Asker<'a> {
    /// Credentials.
    pub credentials: &'a Credentials,
    /// The process's number in the outermost PID namespace.
    pub pid: i32,
    /// CLOCK_REALTIME, s.
    pub now: i64,
}

/// Totals for SHM_INFO.
#[derive(Default)]
#[allow(missing_docs)]
pub struct ShmTotals {
    pub used: u32,
    pub pages: u64,
    pub resident: u64,
    pub highest: u32,
}

#[derive(Default)]
struct Table {
    segments: BTreeMap<u32, Segment>,
    keys: HashMap<i32, u32>,
    sequence: u32,
    last: Option<u32>,
    pages: u64,
}

/// The segments of one IPC namespace.
pub struct Segments {
    this: Weak<Segments>,
    serial: u64,
    /// Whose capabilities count.
    user_ns: Arc<UserNamespace>,
    table: Mutex<Table>,
}

/// A segment that may be mapped.
pub struct Attachment {
    /// Its memory.
    pub memory: Arc<ShmMemory>,
    /// Its name in /proc/PID/maps.
    pub name: Arc<dyn MappedFile>,
    /// Bytes.
    pub size: u64,
}

fn pages(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_SIZE)
}

impl Segment {
    fn stat(&self) -> ShmStat {
        let (count, kept) = match &self.held {
            Held::Kept(memory) => (Arc::strong_count(memory), 1),
            Held::Removed(memory) => (memory.strong_count(), 0),
        };
        ShmStat { nattch: count.saturating_sub(kept) as u64, ..self.stat }
    }

    /// ipcperms: whether the access bits in `wanted` (those of any class count) are granted.
    fn permits(&self, by: &Credentials, owner: &Arc<UserNamespace>, wanted: u32) -> Result<()> {
        let s = &self.stat;
        let wanted = (wanted >> 6) | (wanted >> 3) | wanted;
        let granted = if by.euid == s.cuid || by.euid == s.uid {
            s.mode >> 6
        } else if by.in_group(s.cgid) || by.in_group(s.gid) {
            s.mode >> 3
        } else {
            s.mode
        };
        if wanted & !granted & 0o7 != 0 && !by.has_in(owner, Caps::IPC_OWNER) { Err(Errno::EACCES) } else { Ok(()) }
    }

    fn owned(&self, by: &Credentials) -> bool {
        by.euid == self.stat.cuid || by.euid == self.stat.uid
    }

    /// EPERM unless the caller owns it or administers the system.
    fn changeable(&self, by: &Credentials, owner: &Arc<UserNamespace>) -> Result<()> {
        if self.owned(by) || by.has_in(owner, Caps::SYS_ADMIN) { Ok(()) } else { Err(Errno::EPERM) }
    }
}

impl Table {
    fn index(id: i32) -> Option<u32> {
        u32::try_from(id).ok().map(|id| id & ((1 << INDEX_BITS) - 1))
    }

    fn find(&mut self, id: i32) -> Result<&mut Segment> {
        let index = Self::index(id).ok_or(Errno::EINVAL)?;
        self.segments.get_mut(&index).filter(|s| s.stat.id == id).ok_or(Errno::EINVAL)
    }

    /// A free identifier; ENOSPC if all are taken.
    fn new_id(&mut self) -> Result<(u32, i32)> {
        let mut index = 0;
        for used in self.segments.keys() {
            if *used != index {
                break;
            }
            index += 1;
        }
        if index >= SHMMNI {
            return Err(Errno::ENOSPC);
        }
        if self.last.is_some_and(|last| index <= last) {
            self.sequence = (self.sequence + 1) % SEQUENCES;
        }
        self.last = Some(index);
        let id = i32::try_from((self.sequence << INDEX_BITS) | index).map_err(|_| Errno::ENOSPC)?;
        Ok((index, id))
    }
}

impl Segments {
    /// None yet.
    pub fn new(user_ns: Arc<UserNamespace>) -> Arc<Segments> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let serial = NEXT.fetch_add(1, Ordering::Relaxed);
        Arc::new_cyclic(|this| Segments {
            this: this.clone(),
            serial,
            user_ns,
            table: Mutex::new(Rank::Leaf, Table::default()),
        })
    }

    /// shmget(2).
    pub fn get(&self, platform: &Arc<dyn Platform>, key: i32, size: u64, flags: u32, by: &Asker<'_>) -> Result<i32> {
        let mut table = self.table.lock();
        if key != IPC_PRIVATE {
            match table.keys.get(&key).and_then(|index| table.segments.get(index)) {
                Some(_) if flags & IPC_CREAT != 0 && flags & IPC_EXCL != 0 => return Err(Errno::EEXIST),
                Some(found) if size > found.stat.size => return Err(Errno::EINVAL),
                Some(found) => {
                    return found.permits(by.credentials, &self.user_ns, flags & 0o777).map(|()| found.stat.id);
                }
                None if flags & IPC_CREAT == 0 => return Err(Errno::ENOENT),
                None => {}
            }
        }
        if size == 0 || size > SHMMAX {
            return Err(Errno::EINVAL);
        }
        if table.pages.checked_add(pages(size)).is_none_or(|all| all > SHMALL) {
            return Err(Errno::ENOSPC);
        }
        if size > platform.memory().limit() {
            return Err(Errno::ENOMEM);
        }
        let charge = Charge::new(platform, KernelMemory::Slab, SEGMENT_COST)?;
        let (index, id) = table.new_id()?;
        let memory = Arc::new(ShmMemory {
            pages: SharedAnonymous::new(platform.clone(), pages(size) * PAGE_SIZE),
            size,
            id,
            ino: (self.serial << 32) | u64::from(id.unsigned_abs()),
            segments: self.this.clone(),
        });
        let (uid, gid) = (by.credentials.euid, by.credentials.egid);
        let stat = ShmStat {
            id,
            key,
            uid,
            gid,
            cuid: uid,
            cgid: gid,
            mode: flags & 0o777,
            size,
            atime: 0,
            dtime: 0,
            ctime: by.now,
            cpid: by.pid,
            lpid: 0,
            nattch: 0,
        };
        table.pages += pages(size);
        if key != IPC_PRIVATE {
            table.keys.insert(key, index);
        }
        table
            .segments
            .insert(index, Segment { stat, held: Held::Kept(memory), name: Arc::new(Name(key)), _charge: charge });
        Ok(id)
    }

    /// The memory of a segment for shmat(2), which needs the access bits in `wanted`.
    pub fn attach(&self, id: i32, wanted: u32, by: &Asker<'_>) -> Result<Attachment> {
        let mut table = self.table.lock();
        let segment = table.find(id)?;
        segment.permits(by.credentials, &self.user_ns, wanted)?;
        let memory = match &segment.held {
            Held::Kept(memory) => memory.clone(),
            // Its last attachment is just going.
            Held::Removed(memory) => memory.upgrade().ok_or(Errno::EIDRM)?,
        };
        Ok(Attachment { memory, name: segment.name.clone(), size: segment.stat.size })
    }

    /// A segment was mapped, or with `detached` unmapped, by the caller.
    pub fn touched(&self, id: i32, detached: bool, by: &Asker<'_>) {
        if let Ok(segment) = self.table.lock().find(id) {
            *(if detached { &mut segment.stat.dtime } else { &mut segment.stat.atime }) = by.now;
            segment.stat.lpid = by.pid;
        }
    }

    /// The identifier behind the inode number of a mapping of this namespace's.
    pub fn id_of(&self, ino: u64) -> Option<i32> {
        (ino >> 32 == self.serial).then(|| i32::try_from(ino & 0xffff_ffff).ok()).flatten()
    }

    /// IPC_STAT of an identifier.
    pub fn stat(&self, id: i32, by: &Credentials) -> Result<ShmStat> {
        let mut table = self.table.lock();
        let segment = table.find(id)?;
        segment.permits(by, &self.user_ns, 0o444)?;
        Ok(segment.stat())
    }

    /// SHM_STAT of an index; `any` asks for no permission.
    pub fn stat_index(&self, index: i32, any: bool, by: &Credentials) -> Result<ShmStat> {
        let table = self.table.lock();
        let segment = Table::index(index).and_then(|i| table.segments.get(&i)).ok_or(Errno::EINVAL)?;
        if !any {
            segment.permits(by, &self.user_ns, 0o444)?;
        }
        Ok(segment.stat())
    }

    /// IPC_SET.
    pub fn set(&self, id: i32, uid: u32, gid: u32, mode: u32, by: &Asker<'_>) -> Result<()> {
        let mut table = self.table.lock();
        let segment = table.find(id)?;
        segment.changeable(by.credentials, &self.user_ns)?;
        if uid == u32::MAX || gid == u32::MAX {
            return Err(Errno::EINVAL);
        }
        let s = &mut segment.stat;
        (s.uid, s.gid, s.mode, s.ctime) = (uid, gid, (s.mode & !0o777) | (mode & 0o777), by.now);
        Ok(())
    }

    /// IPC_RMID: gone at once, or with its last attachment.
    pub fn remove(&self, id: i32, by: &Credentials) -> Result<()> {
        let kept = {
            let mut table = self.table.lock();
            let segment = table.find(id)?;
            segment.changeable(by, &self.user_ns)?;
            let key = core::mem::replace(&mut segment.stat.key, IPC_PRIVATE);
            segment.stat.mode |= SHM_DEST;
            let weak = match &segment.held {
                Held::Kept(memory) => Arc::downgrade(memory),
                Held::Removed(memory) => memory.clone(),
            };
            let kept = core::mem::replace(&mut segment.held, Held::Removed(weak));
            if key != IPC_PRIVATE {
                table.keys.remove(&key);
            }
            kept
        };
        // Without an attachment this is the end of it, which takes the lock again.
        drop(kept);
        Ok(())
    }

    /// SHM_LOCK and SHM_UNLOCK; `may_lock`: the caller's RLIMIT_MEMLOCK is not 0. Nothing is ever swapped out here.
    pub fn lock(&self, id: i32, lock: bool, may_lock: bool, by: &Credentials) -> Result<()> {
        let mut table = self.table.lock();
        let segment = table.find(id)?;
        if !by.has_in(&self.user_ns, Caps::IPC_LOCK) && (!segment.owned(by) || (lock && !may_lock)) {
            return Err(Errno::EPERM);
        }
        segment.stat.mode &= !SHM_LOCKED;
        segment.stat.mode |= if lock { SHM_LOCKED } else { 0 };
        Ok(())
    }

    /// All segments as they are, with their resident bytes (/proc/sysvipc/shm).
    pub fn all(&self) -> Vec<(ShmStat, u64)> {
        let all: Vec<(ShmStat, Option<Arc<ShmMemory>>)> = {
            let table = self.table.lock();
            let memory = |s: &Segment| match &s.held {
                Held::Kept(memory) => Some(memory.clone()),
                Held::Removed(memory) => memory.upgrade(),
            };
            table.segments.values().map(|s| (s.stat(), memory(s))).collect()
        };
        all.into_iter().map(|(s, m)| (s, m.map_or(0, |m| m.pages.resident_pages() * PAGE_SIZE))).collect()
    }

    /// Totals.
    pub fn totals(&self) -> ShmTotals {
        let (mut totals, memories) = {
            let table = self.table.lock();
            let memories: Vec<Arc<ShmMemory>> = table
                .segments
                .values()
                .filter_map(|s| match &s.held {
                    Held::Kept(memory) => Some(memory.clone()),
                    Held::Removed(memory) => memory.upgrade(),
                })
                .collect();
            let used = u32::try_from(table.segments.len()).unwrap_or(SHMMNI);
            let highest = table.segments.keys().next_back().copied().unwrap_or(0);
            (ShmTotals { used, pages: table.pages, resident: 0, highest }, memories)
        };
        totals.resident = memories.iter().map(|m| m.pages.resident_pages()).sum();
        totals
    }

    fn forget(&self, id: i32, size: u64) {
        let gone = {
            let mut table = self.table.lock();
            let Some(index) = Table::index(id).filter(|_| table.find(id).is_ok()) else { return };
            table.pages = table.pages.saturating_sub(pages(size));
            table.segments.remove(&index)
        };
        drop(gone);
    }
}

impl ShmMemory {
    /// Its identifier.
    pub fn id(&self) -> i32 {
        self.id
    }
}
