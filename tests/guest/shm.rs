//! System V shared memory: shmget(2), shmat(2), shmdt(2), shmctl(2).
use std::ptr::{null, null_mut};

use crate::Case;
use crate::sys::{errno, fork, in_child, ok, pipe, read_byte, wait, write_byte};

/// The cases of this area.
pub const CASES: &[Case] = &[
    ("shm_shared_with_children", shared_with_children),
    ("shm_keys", keys),
    ("shm_attachments", attachments),
    ("shm_addresses", addresses),
    ("shm_permissions", permissions),
    ("shm_refusals", refusals),
];

const PAGE: usize = 4096;

/// A key of this process's own.
fn key(n: i32) -> i32 {
    0x4200_0000 | ((std::process::id() as i32 & 0xf_ffff) << 3) | n
}

fn get(key: i32, size: usize, flags: i32) -> Result<i32, i32> {
    ok(unsafe { libc::shmget(key, size, flags) }).map(|id| id as i32)
}

fn attach(id: i32, addr: *const u8, flags: i32) -> Result<*mut u8, i32> {
    let p = unsafe { libc::shmat(id, addr.cast(), flags) };
    if p as isize == -1 { Err(errno()) } else { Ok(p.cast()) }
}

fn detach(addr: *const u8) -> Result<i64, i32> {
    ok(unsafe { libc::shmdt(addr.cast()) })
}

fn stat(id: i32) -> Result<libc::shmid_ds, i32> {
    let mut ds: libc::shmid_ds = unsafe { std::mem::zeroed() };
    ok(unsafe { libc::shmctl(id, libc::IPC_STAT, &raw mut ds) }).map(|_| ds)
}

fn remove(id: i32) -> Result<i64, i32> {
    ok(unsafe { libc::shmctl(id, libc::IPC_RMID, null_mut()) })
}

fn shared_with_children() {
    let id = get(libc::IPC_PRIVATE, 3 * PAGE, libc::IPC_CREAT | 0o600).unwrap();
    let p = attach(id, null(), 0).unwrap();
    assert!((0..3 * PAGE).all(|i| unsafe { *p.add(i) } == 0));
    unsafe { *p = 7 };
    in_child(|| {
        // Inherited, and attached once more.
        assert_eq!(unsafe { *p }, 7);
        let again = attach(id, null(), 0).unwrap();
        assert_ne!(again, p);
        unsafe { *again.add(2 * PAGE) = 9 };
        assert_eq!(unsafe { *p.add(2 * PAGE) }, 9);
        assert_eq!(stat(id).unwrap().shm_nattch, 3);
    });
    assert_eq!(unsafe { *p.add(2 * PAGE) }, 9);
    assert_eq!(stat(id).unwrap().shm_nattch, 1, "the child's are gone");
    remove(id).unwrap();
    assert_eq!(unsafe { *p }, 7, "it stays while it is attached");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.lines().any(|l| l.contains("rw-s") && l.ends_with("/SYSV00000000 (deleted)")), "{maps}");
    detach(p).unwrap();
    assert_eq!(attach(id, null(), 0), Err(libc::EINVAL));
}

fn keys() {
    let (a, b) = (key(0), key(1));
    assert_eq!(get(a, PAGE, 0), Err(libc::ENOENT));
    let id = get(a, 100, libc::IPC_CREAT | 0o640).unwrap();
    assert_eq!(get(a, 100, 0), Ok(id));
    assert_eq!(get(a, 0, 0), Ok(id));
    assert_eq!(get(a, PAGE, libc::IPC_CREAT), Err(libc::EINVAL), "larger than it is");
    assert_eq!(get(a, 100, libc::IPC_CREAT | libc::IPC_EXCL), Err(libc::EEXIST));
    let other = get(b, PAGE, libc::IPC_CREAT | libc::IPC_EXCL | 0o600).unwrap();
    assert_ne!(other, id);
    let ds = stat(id).unwrap();
    assert_eq!((ds.shm_segsz, ds.shm_nattch), (100, 0));
    assert_eq!((ds.shm_perm.__key, ds.shm_perm.mode & 0o777), (a, 0o640));
    assert_eq!((ds.shm_cpid as u32, ds.shm_lpid), (std::process::id(), 0));
    assert_eq!((ds.shm_atime, ds.shm_dtime), (0, 0));
    assert!(ds.shm_ctime > 1_500_000_000);
    assert_eq!((ds.shm_perm.uid, ds.shm_perm.cuid), unsafe { (libc::geteuid(), libc::geteuid()) });
    // A removed key is free; the identifier of its segment is not used again at once.
    remove(id).unwrap();
    assert_eq!(stat(id).map(|_| ()), Err(libc::EINVAL));
    let new = get(a, 100, libc::IPC_CREAT | 0o600).unwrap();
    assert_ne!(new, id);
    remove(new).unwrap();
    remove(other).unwrap();
}

fn attachments() {
    let id = get(libc::IPC_PRIVATE, 4 * PAGE, 0o600).unwrap();
    let p = attach(id, null(), 0).unwrap();
    let ds = stat(id).unwrap();
    assert!(ds.shm_atime > 1_500_000_000 && ds.shm_lpid as u32 == std::process::id());
    // Pieces count, as mappings do.
    assert_eq!(unsafe { libc::munmap(p.add(PAGE).cast(), PAGE) }, 0);
    assert_eq!(stat(id).unwrap().shm_nattch, 2);
    assert_eq!(unsafe { libc::mprotect(p.add(2 * PAGE).cast(), PAGE, libc::PROT_READ) }, 0);
    assert_eq!(stat(id).unwrap().shm_nattch, 3);
    detach(p).unwrap();
    let ds = stat(id).unwrap();
    assert_eq!((ds.shm_nattch, ds.shm_dtime > 1_500_000_000), (0, true));
    assert_eq!(detach(p), Err(libc::EINVAL));
    // Removed while a child has it: told as SHM_DEST, gone with the child.
    let (ready, tell) = pipe();
    let (hold, go) = pipe();
    let child = fork(|| {
        attach(id, null(), 0).unwrap();
        write_byte(tell);
        read_byte(hold);
        0
    });
    read_byte(ready);
    remove(id).unwrap();
    let ds = stat(id).unwrap();
    assert_eq!((ds.shm_nattch, ds.shm_perm.__key, ds.shm_perm.mode & 0o1777), (1, 0, 0o1600));
    let q = attach(id, null(), 0).expect("by number it can be had still");
    detach(q).unwrap();
    write_byte(go);
    assert_eq!(wait(child), 0);
    assert_eq!(stat(id).map(|_| ()), Err(libc::EINVAL));
}

fn addresses() {
    let id = get(libc::IPC_PRIVATE, 2 * PAGE, 0o600).unwrap();
    let room = crate::sys::map(8 * PAGE, libc::PROT_READ | libc::PROT_WRITE);
    assert_eq!(attach(id, unsafe { room.add(1) }, 0), Err(libc::EINVAL));
    assert_eq!(attach(id, room, 0), Err(libc::EINVAL), "something is there");
    assert_eq!(
        attach(id, unsafe { room.add(PAGE + 5) }, libc::SHM_RND | libc::SHM_REMAP),
        Ok(unsafe { room.add(PAGE) })
    );
    assert_eq!(unsafe { libc::munmap(room.add(4 * PAGE).cast(), 4 * PAGE) }, 0);
    assert_eq!(attach(id, unsafe { room.add(5 * PAGE + 9) }, libc::SHM_RND), Ok(unsafe { room.add(5 * PAGE) }));
    assert_eq!(attach(id, null(), libc::SHM_REMAP), Err(libc::EINVAL));
    unsafe { *room.add(PAGE) = 3 };
    assert_eq!(unsafe { *room.add(5 * PAGE) }, 3);
    assert_eq!(detach(unsafe { room.add(2 * PAGE) }), Err(libc::EINVAL), "not where it begins");
    detach(unsafe { room.add(5 * PAGE) }).unwrap();
    // Without its first page it is still found by where it began.
    assert_eq!(unsafe { libc::munmap(room.add(PAGE).cast(), PAGE) }, 0);
    detach(unsafe { room.add(PAGE) }).unwrap();
    assert_eq!(stat(id).unwrap().shm_nattch, 0);
    let p = attach(id, null(), libc::SHM_RDONLY).unwrap();
    assert_eq!(unsafe { *p }, 3);
    assert_eq!(ok(unsafe { libc::mprotect(p.cast(), PAGE, libc::PROT_READ | libc::PROT_WRITE) }), Err(libc::EACCES));
    remove(id).unwrap();
}

/// Needs root, to become somebody else.
fn permissions() {
    let id = get(libc::IPC_PRIVATE, PAGE, 0o640).unwrap();
    in_child(|| {
        assert_eq!(unsafe { libc::setgroups(0, null()) }, 0);
        assert_eq!(unsafe { libc::setresgid(0, 0, 0) }, 0);
        assert_eq!(unsafe { libc::setresuid(1234, 1234, 1234) }, 0);
        // Of the group.
        assert_eq!(attach(id, null(), 0), Err(libc::EACCES));
        attach(id, null(), libc::SHM_RDONLY).unwrap();
        assert_eq!(stat(id).unwrap().shm_nattch, 1);
        assert_eq!(remove(id), Err(libc::EPERM));
    });
    let mut ds = stat(id).unwrap();
    ds.shm_perm.uid = 1234;
    ds.shm_perm.mode = 0o17600;
    ok(unsafe { libc::shmctl(id, libc::IPC_SET, &raw mut ds) }).unwrap();
    assert_eq!(stat(id).unwrap().shm_perm.mode & 0o7777, 0o600);
    in_child(|| {
        assert_eq!(unsafe { libc::setresgid(99, 99, 99) }, 0);
        assert_eq!(unsafe { libc::setresuid(1235, 1235, 1235) }, 0);
        assert_eq!(attach(id, null(), libc::SHM_RDONLY), Err(libc::EACCES));
        assert_eq!(stat(id).map(|_| ()), Err(libc::EACCES));
    });
    in_child(|| {
        assert_eq!(unsafe { libc::setresuid(1234, 1234, 1234) }, 0);
        attach(id, null(), 0).unwrap();
        remove(id).unwrap();
    });
    assert_eq!(stat(id).map(|_| ()), Err(libc::EINVAL));
}

fn refusals() {
    assert_eq!(get(libc::IPC_PRIVATE, 0, 0o600), Err(libc::EINVAL));
    assert_eq!(get(libc::IPC_PRIVATE, usize::MAX, 0o600), Err(libc::EINVAL));
    for id in [-1, i32::MIN, i32::MAX] {
        assert_eq!(attach(id, null(), 0), Err(libc::EINVAL));
        assert_eq!(stat(id).map(|_| ()), Err(libc::EINVAL));
        assert_eq!(remove(id), Err(libc::EINVAL));
    }
    assert_eq!(detach(null()), Err(libc::EINVAL));
    let local = [0_u8; 2 * PAGE];
    let aligned = (local.as_ptr() as usize).next_multiple_of(PAGE) as *const u8;
    assert_eq!(detach(aligned), Err(libc::EINVAL));
    let id = get(libc::IPC_PRIVATE, PAGE, 0o600).unwrap();
    assert_eq!(ok(unsafe { libc::shmctl(id, 99, null_mut()) }), Err(libc::EINVAL));
    assert_eq!(ok(unsafe { libc::shmctl(id, libc::IPC_STAT, 16 as *mut libc::shmid_ds) }), Err(libc::EFAULT));
    assert_eq!(ok(unsafe { libc::shmctl(id, libc::IPC_SET, 16 as *mut libc::shmid_ds) }), Err(libc::EFAULT));
    assert_eq!(ok(unsafe { libc::shmctl(id, libc::SHM_LOCK, null_mut()) }), Ok(0));
    assert_eq!(stat(id).unwrap().shm_perm.mode & 0o2000, 0o2000);
    assert_eq!(ok(unsafe { libc::shmctl(id, libc::SHM_UNLOCK, null_mut()) }), Ok(0));
    remove(id).unwrap();
}
