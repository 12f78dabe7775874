//! System V semaphores and message queues: semop(2), semctl(2), msgsnd(2), msgrcv(2), msgctl(2).
use std::time::{Duration, Instant};

use crate::Case;
use crate::sys::{call, clone, errno, fork, handle, in_child, ok, pipe, read_byte, wait, write_byte};

/// The cases of this area.
pub const CASES: &[Case] = &[
    ("sem_operations", operations),
    ("sem_waiting", waiting),
    ("sem_undo", undo),
    ("sem_control", control),
    ("sem_refusals", refusals),
    ("sem_ends_of_waits", ends_of_waits),
    ("sem_many", many),
    ("msg_types", types),
    ("msg_waiting", msg_waiting),
    ("msg_control", msg_control),
    ("msg_refusals", msg_refusals),
    ("sysv_namespaces", namespaces),
];

const NOWAIT: i16 = libc::IPC_NOWAIT as i16;
const UNDO: i16 = 0x1000;

fn semget(key: i32, count: i32, flags: i32) -> Result<i32, i32> {
    ok(unsafe { libc::semget(key, count, flags) }).map(|id| id as i32)
}

fn new_set(count: i32) -> i32 {
    semget(libc::IPC_PRIVATE, count, 0o600).unwrap()
}

fn semop(id: i32, ops: &[(u16, i16, i16)]) -> Result<i64, i32> {
    let mut raw: Vec<libc::sembuf> =
        ops.iter().map(|&(sem_num, sem_op, sem_flg)| libc::sembuf { sem_num, sem_op, sem_flg }).collect();
    ok(unsafe { libc::semop(id, raw.as_mut_ptr(), raw.len()) })
}

fn semctl(id: i32, number: i32, op: i32, arg: u64) -> Result<i64, i32> {
    call(libc::SYS_semctl, [id as u64, number as u64, op as u64, arg, 0, 0])
}

const GETPID: i32 = 11;
const GETVAL: i32 = 12;
const GETALL: i32 = 13;
const GETNCNT: i32 = 14;
const GETZCNT: i32 = 15;
const SETVAL: i32 = 16;
const SETALL: i32 = 17;

fn value(id: i32, number: i32) -> i64 {
    semctl(id, number, GETVAL, 0).unwrap()
}

fn remove_set(id: i32) {
    semctl(id, 0, libc::IPC_RMID, 0).unwrap();
}

/// Waits until a condition holds that another process brings about.
fn until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "it never became true");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn operations() {
    let id = new_set(3);
    assert_eq!((0..3).map(|n| value(id, n)).collect::<Vec<_>>(), [0, 0, 0]);
    assert_eq!(semop(id, &[(0, 5, 0), (1, 2, 0)]), Ok(0));
    // All or nothing.
    assert_eq!(semop(id, &[(0, -3, NOWAIT), (1, -3, NOWAIT)]), Err(libc::EAGAIN));
    assert_eq!((value(id, 0), value(id, 1)), (5, 2));
    // In order, on the values that those before have left.
    assert_eq!(semop(id, &[(0, -5, NOWAIT), (0, 0, NOWAIT), (0, 1, NOWAIT)]), Ok(0));
    assert_eq!(value(id, 0), 1);
    assert_eq!(semop(id, &[(0, 0, NOWAIT)]), Err(libc::EAGAIN));
    assert_eq!(semop(id, &[(2, 0, NOWAIT)]), Ok(0));
    assert_eq!(semctl(id, 2, GETPID, 0), Ok(i64::from(std::process::id())));
    assert_eq!(semop(id, &[(0, 32767, 0)]), Err(libc::ERANGE));
    assert_eq!(value(id, 0), 1);
    remove_set(id);
    assert_eq!(semop(id, &[(0, 1, 0)]), Err(libc::EINVAL));
}

fn waiting() {
    let id = new_set(2);
    let child = fork(|| i32::from(semop(id, &[(0, -2, 0), (1, 1, 0)]) != Ok(0)));
    until(|| semctl(id, 0, GETNCNT, 0) == Ok(1));
    assert_eq!(semctl(id, 0, GETZCNT, 0), Ok(0));
    semop(id, &[(0, 1, 0)]).unwrap();
    assert_eq!((value(id, 0), value(id, 1)), (1, 0), "not enough yet");
    semop(id, &[(0, 1, 0)]).unwrap();
    assert_eq!(wait(child), 0);
    assert_eq!((value(id, 0), value(id, 1)), (0, 1));
    assert_eq!(semctl(id, 1, GETPID, 0), Ok(i64::from(child)));
    // For zero.
    let child = fork(|| i32::from(semop(id, &[(1, 0, 0)]) != Ok(0)));
    until(|| semctl(id, 1, GETZCNT, 0) == Ok(1));
    semop(id, &[(1, -1, 0)]).unwrap();
    assert_eq!(wait(child), 0);
    // SETVAL and SETALL wake too.
    let child = fork(|| i32::from(semop(id, &[(0, -7, 0)]) != Ok(0) || semop(id, &[(1, -9, 0)]) != Ok(0)));
    until(|| semctl(id, 0, GETNCNT, 0) == Ok(1));
    semctl(id, 0, SETVAL, 8).unwrap();
    until(|| semctl(id, 1, GETNCNT, 0) == Ok(1));
    semctl(id, 0, SETALL, [3_u16, 9].as_ptr() as u64).unwrap();
    assert_eq!(wait(child), 0);
    let mut all = [0_u16; 2];
    semctl(id, 0, GETALL, all.as_mut_ptr() as u64).unwrap();
    assert_eq!(all, [3, 0]);
    remove_set(id);
}

fn undo() {
    let id = new_set(2);
    semctl(id, 0, SETALL, [5_u16, 5].as_ptr() as u64).unwrap();
    let child = fork(|| {
        semop(id, &[(0, -2, UNDO), (1, 3, UNDO)]).unwrap();
        semop(id, &[(0, -1, UNDO), (1, 1, 0)]).unwrap();
        assert_eq!((value(id, 0), value(id, 1)), (2, 9));
        0
    });
    assert_eq!(wait(child), 0);
    assert_eq!((value(id, 0), value(id, 1)), (5, 6));
    assert_eq!(semctl(id, 0, GETPID, 0), Ok(i64::from(child)));
    // A fork has nothing to undo of its parent's; SETVAL forgets; a killed process undoes, too, and that wakes.
    let (r, w) = pipe();
    let child = fork(|| {
        semop(id, &[(0, -5, UNDO), (1, -1, UNDO)]).unwrap();
        in_child(|| {});
        semctl(id, 1, SETVAL, 0).unwrap();
        write_byte(w);
        loop {
            unsafe { libc::pause() };
        }
    });
    read_byte(r);
    assert_eq!((value(id, 0), value(id, 1)), (0, 0));
    let waiter = fork(|| i32::from(semop(id, &[(0, -4, 0)]) != Ok(0)));
    until(|| semctl(id, 0, GETNCNT, 0) == Ok(1));
    unsafe { libc::kill(child, libc::SIGKILL) };
    wait(child);
    assert_eq!(wait(waiter), 0);
    assert_eq!((value(id, 0), value(id, 1)), (1, 0));
    // Shared by threads: undone when the last of them is gone; never below 0.
    let child = fork(|| {
        std::thread::spawn(move || semop(id, &[(1, 2, UNDO)]).unwrap()).join().unwrap();
        assert_eq!(value(id, 1), 2);
        semop(id, &[(1, -1, 0)]).unwrap();
        0
    });
    assert_eq!(wait(child), 0);
    assert_eq!(value(id, 1), 0);
    // CLONE_SYSVSEM shares the list, unshare(2) leaves it.
    let child = fork(|| {
        let other = clone(libc::CLONE_SYSVSEM as u64, || {
            semop(id, &[(1, 3, UNDO)]).unwrap();
            0
        });
        assert_eq!(wait(other.unwrap()), 0);
        assert_eq!(value(id, 1), 3, "the other one still shares the list");
        assert_eq!(call(libc::SYS_unshare, [libc::CLONE_SYSVSEM as u64, 0, 0, 0, 0, 0]), Ok(0));
        assert_eq!(value(id, 1), 0);
        0
    });
    assert_eq!(wait(child), 0);
    remove_set(id);
}

fn control() {
    let key = 0x5200_0000 | ((std::process::id() as i32 & 0xf_ffff) << 3);
    assert_eq!(semget(key, 1, 0), Err(libc::ENOENT));
    let id = semget(key, 4, libc::IPC_CREAT | 0o640).unwrap();
    assert_eq!(semget(key, 4, libc::IPC_CREAT | libc::IPC_EXCL | 0o600), Err(libc::EEXIST));
    assert_eq!(semget(key, 5, 0), Err(libc::EINVAL));
    assert_eq!(semget(key, 0, 0), Ok(id));
    let stat = || {
        let mut ds = [0_u64; 13];
        semctl(id, 0, libc::IPC_STAT, ds.as_mut_ptr() as u64).unwrap();
        ds
    };
    let ds = stat();
    assert_eq!((ds[0] as u32, ds[10]), (key as u32, 4));
    assert_eq!((ds[2] >> 32) & 0o777, 0o640);
    assert_eq!(ds[6], 0, "no operation yet");
    assert!(ds[8] > 1_500_000_000);
    semop(id, &[(0, 1, 0)]).unwrap();
    assert!(stat()[6] > 1_500_000_000);
    let text = std::fs::read_to_string("/proc/sysvipc/sem").unwrap();
    let line = text.lines().find(|l| l.split_whitespace().nth(1) == Some(&id.to_string())).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!((words[0], words[2], words[3]), (&*key.to_string(), "640", "4"));
    let mut set = stat();
    set[2] = (set[2] & 0xffff_ffff) | (0o600 << 32);
    semctl(id, 0, libc::IPC_SET, set.as_ptr() as u64).unwrap();
    assert_eq!((stat()[2] >> 32) & 0o777, 0o600);
    let mut info = [0_i32; 10];
    assert!(semctl(0, 0, libc::IPC_INFO, info.as_mut_ptr() as u64).is_ok());
    assert_eq!((info[5], info[8]), (500, 32767), "semopm, semvmx");
    let highest = semctl(0, 0, 19, info.as_mut_ptr() as u64).unwrap();
    assert!(info[7] >= 1 && info[9] >= 4);
    let by_index = (0..=highest as i32).any(|i| semctl(i, 0, 18, set.as_mut_ptr() as u64) == Ok(i64::from(id)));
    assert!(by_index);
    remove_set(id);
    assert_eq!(semget(key, 1, 0), Err(libc::ENOENT));
    let again = semget(key, 1, libc::IPC_CREAT | 0o600).unwrap();
    assert_ne!(again, id);
    remove_set(again);
}

fn refusals() {
    assert_eq!(semget(libc::IPC_PRIVATE, 0, 0o600), Err(libc::EINVAL));
    assert_eq!(semget(libc::IPC_PRIVATE, -1, 0o600), Err(libc::EINVAL));
    assert_eq!(semget(libc::IPC_PRIVATE, i32::MAX, 0o600), Err(libc::EINVAL));
    let id = new_set(2);
    assert_eq!(semop(-1, &[(0, 1, 0)]), Err(libc::EINVAL));
    assert_eq!(semop(id, &[]), Err(libc::EINVAL));
    assert_eq!(semop(id, &vec![(0, 1, 0); 501]), Err(libc::E2BIG));
    assert_eq!(semop(id, &[(2, 1, 0)]), Err(libc::EFBIG));
    assert_eq!(semop(id, &[(u16::MAX, 1, 0)]), Err(libc::EFBIG));
    assert_eq!(call(libc::SYS_semop, [id as u64, 8, 1, 0, 0, 0]), Err(libc::EFAULT));
    assert_eq!(semctl(id, 2, GETVAL, 0), Err(libc::EINVAL));
    assert_eq!(semctl(id, -1, GETVAL, 0), Err(libc::EINVAL));
    assert_eq!(semctl(id, 0, SETVAL, 32768), Err(libc::ERANGE));
    assert_eq!(semctl(id, 0, SETVAL, u64::from(u32::MAX)), Err(libc::ERANGE));
    assert_eq!(semctl(id, 0, SETALL, [1_u16, 40000].as_ptr() as u64), Err(libc::ERANGE));
    assert_eq!(semctl(id, 0, SETALL, 8), Err(libc::EFAULT));
    assert_eq!(semctl(id, 0, GETALL, 8), Err(libc::EFAULT));
    assert_eq!(semctl(id, 0, 99, 0), Err(libc::EINVAL));
    assert_eq!(semctl(-1, 0, libc::IPC_STAT, 0), Err(libc::EINVAL));
    in_child(|| {
        unsafe {
            assert_eq!(libc::setresgid(1000, 1000, 1000), 0);
            assert_eq!(libc::setresuid(1000, 1000, 1000), 0);
        }
        assert_eq!(semop(id, &[(0, 1, 0)]), Err(libc::EACCES));
        assert_eq!(semctl(id, 0, GETVAL, 0), Err(libc::EACCES));
        assert_eq!(semctl(id, 0, SETVAL, 1), Err(libc::EACCES));
        assert_eq!(semctl(id, 0, libc::IPC_RMID, 0), Err(libc::EPERM));
    });
    remove_set(id);
}

fn ends_of_waits() {
    extern "C" fn nothing(_: i32) {}
    let id = new_set(1);
    // A time limit.
    let op = libc::sembuf { sem_num: 0, sem_op: -1, sem_flg: 0 };
    let timed = |sec: i64, nsec: i64| {
        let t = libc::timespec { tv_sec: sec, tv_nsec: nsec };
        call(libc::SYS_semtimedop, [id as u64, &raw const op as u64, 1, &raw const t as u64, 0, 0])
    };
    assert_eq!(timed(0, 1_000_000), Err(libc::EAGAIN));
    assert_eq!(timed(0, 1_000_000_000), Err(libc::EINVAL));
    assert_eq!(timed(-1, 0), Err(libc::EINVAL));
    assert_eq!(semctl(id, 0, GETNCNT, 0), Ok(0));
    // A signal, whether or not it asks for restarts.
    let child = fork(|| {
        handle(libc::SIGUSR1, nothing as *const () as usize, libc::SA_RESTART);
        i32::from(semop(id, &[(0, -1, 0)]) != Err(libc::EINTR))
    });
    until(|| semctl(id, 0, GETNCNT, 0) == Ok(1));
    unsafe { libc::kill(child, libc::SIGUSR1) };
    assert_eq!(wait(child), 0);
    assert_eq!(semctl(id, 0, GETNCNT, 0), Ok(0));
    // The end of the set, and of the waiter.
    let victim = fork(|| i32::from(semop(id, &[(0, -1, 0)]).is_ok()));
    until(|| semctl(id, 0, GETNCNT, 0) == Ok(1));
    unsafe { libc::kill(victim, libc::SIGKILL) };
    wait(victim);
    until(|| semctl(id, 0, GETNCNT, 0) == Ok(0));
    let child = fork(|| i32::from(semop(id, &[(0, -1, 0)]) != Err(libc::EIDRM)));
    until(|| semctl(id, 0, GETNCNT, 0) == Ok(1));
    remove_set(id);
    assert_eq!(wait(child), 0);
}

fn many() {
    // A token goes round among processes.
    const N: i32 = 16;
    const ROUNDS: i32 = 50;
    let id = new_set(N);
    let children: Vec<i32> = (0..N)
        .map(|i| {
            fork(|| {
                for _ in 0..ROUNDS {
                    semop(id, &[(i as u16, -1, 0)]).unwrap();
                    semop(id, &[(((i + 1) % N) as u16, 1, 0)]).unwrap();
                }
                0
            })
        })
        .collect();
    semop(id, &[(0, 1, 0)]).unwrap();
    for child in children {
        assert_eq!(wait(child), 0);
    }
    assert_eq!(value(id, 0), 1);
    remove_set(id);
}

#[repr(C)]
struct Buffer {
    kind: i64,
    text: [u8; 64],
}

fn msgget(key: i32, flags: i32) -> Result<i32, i32> {
    ok(unsafe { libc::msgget(key, flags) }).map(|id| id as i32)
}

fn send(id: i32, kind: i64, text: &[u8], flags: i32) -> Result<i64, i32> {
    let mut buffer = Buffer { kind, text: [0; 64] };
    buffer.text[..text.len()].copy_from_slice(text);
    ok(unsafe { libc::msgsnd(id, (&raw const buffer).cast(), text.len(), flags) })
}

fn receive(id: i32, room: usize, kind: i64, flags: i32) -> Result<(i64, Vec<u8>), i32> {
    let mut buffer = Buffer { kind: 0, text: [0xee; 64] };
    let n = unsafe { libc::msgrcv(id, (&raw mut buffer).cast(), room, kind, flags) };
    if n < 0 { Err(errno()) } else { Ok((buffer.kind, buffer.text[..n as usize].to_vec())) }
}

fn msgctl(id: i32, op: i32, buf: u64) -> Result<i64, i32> {
    call(libc::SYS_msgctl, [id as u64, op as u64, buf, 0, 0, 0])
}

const IPC_NOWAIT: i32 = libc::IPC_NOWAIT;
const NOERROR: i32 = 0o10000;
const EXCEPT: i32 = 0o20000;
const COPY: i32 = 0o40000;

fn types() {
    let id = msgget(libc::IPC_PRIVATE, 0o600).unwrap();
    for (kind, text) in [(5, "five"), (3, "three"), (7, "seven"), (3, "drei"), (1, "")] {
        send(id, kind, text.as_bytes(), 0).unwrap();
    }
    let get = |kind, flags| receive(id, 64, kind, flags | IPC_NOWAIT).map(|(k, t)| (k, String::from_utf8(t).unwrap()));
    let is = |k: i64, t: &str| Ok((k, t.to_owned()));
    assert_eq!(get(3, 0), is(3, "three"));
    assert_eq!(get(-4, 0), is(1, ""));
    assert_eq!(get(5, EXCEPT), is(7, "seven"));
    // A copy stays, where the kernel can make one at all.
    match get(1, COPY) {
        Err(libc::ENOSYS) => {}
        other => {
            assert_eq!(other, is(3, "drei"));
            assert_eq!(get(2, COPY), Err(libc::ENOMSG));
        }
    }
    assert_eq!(receive(id, 64, 0, COPY), Err(libc::EINVAL));
    assert_eq!(receive(id, 2, 3, IPC_NOWAIT), Err(libc::E2BIG));
    assert_eq!(receive(id, 2, 3, IPC_NOWAIT | NOERROR), Ok((3, b"dr".to_vec())));
    assert_eq!(get(i64::MIN, 0), is(5, "five"));
    assert_eq!(get(0, 0), Err(libc::ENOMSG));
    msgctl(id, libc::IPC_RMID, 0).unwrap();
}

fn msg_stat(id: i32) -> [u64; 15] {
    let mut ds = [0_u64; 15];
    msgctl(id, libc::IPC_STAT, ds.as_mut_ptr() as u64).unwrap();
    ds
}

fn msg_waiting() {
    extern "C" fn nothing(_: i32) {}
    let id = msgget(libc::IPC_PRIVATE, 0o600).unwrap();
    let child = fork(|| i32::from(receive(id, 64, 2, 0) != Ok((2, b"two".to_vec()))));
    send(id, 1, b"one", 0).unwrap();
    send(id, 2, b"two", 0).unwrap();
    assert_eq!(wait(child), 0);
    // Full: a sender waits until there is room.
    let mut ds = msg_stat(id);
    ds[11] = 100;
    msgctl(id, libc::IPC_SET, ds.as_ptr() as u64).unwrap();
    send(id, 3, &[3; 60], 0).unwrap();
    assert_eq!(send(id, 4, &[4; 60], IPC_NOWAIT), Err(libc::EAGAIN));
    let child = fork(|| i32::from(send(id, 4, &[4; 60], 0) != Ok(0)));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(receive(id, 64, 3, 0), Ok((3, vec![3; 60])));
    assert_eq!(wait(child), 0);
    assert_eq!(receive(id, 64, 4, 0), Ok((4, vec![4; 60])));
    // A signal ends a wait, and the end of the queue does.
    let (r, w) = pipe();
    let child = fork(|| {
        handle(libc::SIGUSR1, nothing as *const () as usize, libc::SA_RESTART);
        write_byte(w);
        if receive(id, 64, 9, 0) != Err(libc::EINTR) {
            return 1;
        }
        write_byte(w);
        i32::from(receive(id, 64, 9, 0) != Err(libc::EIDRM)) * 2
    });
    read_byte(r);
    until(|| {
        unsafe { libc::kill(child, libc::SIGUSR1) };
        let mut byte = [0_u8];
        let mut fd = libc::pollfd { fd: r, events: libc::POLLIN, revents: 0 };
        unsafe { libc::poll(&raw mut fd, 1, 0) == 1 && libc::read(r, byte.as_mut_ptr().cast(), 1) == 1 }
    });
    unsafe { libc::kill(child, 0) };
    std::thread::sleep(Duration::from_millis(20));
    msgctl(id, libc::IPC_RMID, 0).unwrap();
    let status = wait(child);
    // It may have been just before the call, where the queue is simply not there, or have had a late signal.
    assert!([0, 2 << 8].contains(&status), "{status:#x}");
}

fn msg_control() {
    let key = 0x5300_0000 | ((std::process::id() as i32 & 0xf_ffff) << 3);
    assert_eq!(msgget(key, 0), Err(libc::ENOENT));
    let id = msgget(key, libc::IPC_CREAT | 0o604).unwrap();
    assert_eq!(msgget(key, libc::IPC_CREAT | libc::IPC_EXCL), Err(libc::EEXIST));
    assert_eq!(msgget(key, 0), Ok(id));
    send(id, 1, b"hello", 0).unwrap();
    send(id, 1, b"you", 0).unwrap();
    let ds = msg_stat(id);
    assert_eq!((ds[0] as u32, ds[9], ds[10]), (key as u32, 8, 2));
    assert_eq!((ds[12] as u32, ds[12] >> 32), (std::process::id(), 0), "who sent last, who received last");
    assert!(ds[6] > 1_500_000_000 && ds[7] == 0 && ds[8] > 1_500_000_000);
    receive(id, 64, 0, 0).unwrap();
    assert_eq!(msg_stat(id)[12] >> 32, u64::from(std::process::id()));
    let text = std::fs::read_to_string("/proc/sysvipc/msg").unwrap();
    let line = text.lines().find(|l| l.split_whitespace().nth(1) == Some(&id.to_string())).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!((words[0], words[2], words[3], words[4]), (&*key.to_string(), "604", "3", "1"));
    let mut info = [0_u32; 8];
    msgctl(0, libc::IPC_INFO, info.as_mut_ptr() as u64).unwrap();
    let limit = |name: &str| -> u32 {
        std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap().trim().parse().unwrap()
    };
    assert_eq!([info[2], info[3], info[4]], [limit("msgmax"), limit("msgmnb"), limit("msgmni")]);
    msgctl(0, 12, info.as_mut_ptr() as u64).unwrap();
    assert!(info[0] >= 1 && info[1] >= 1 && info[6] >= 3);
    in_child(|| {
        unsafe {
            assert_eq!(libc::setresgid(1000, 1000, 1000), 0);
            assert_eq!(libc::setresuid(1000, 1000, 1000), 0);
        }
        let mut ds = msg_stat(id);
        assert_eq!(send(id, 1, b"x", 0), Err(libc::EACCES));
        assert_eq!(msgctl(id, libc::IPC_SET, ds.as_mut_ptr() as u64), Err(libc::EPERM));
        assert_eq!(msgctl(id, libc::IPC_RMID, 0), Err(libc::EPERM));
        let own = msgget(libc::IPC_PRIVATE, 0o600).unwrap();
        let mut ds = msg_stat(own);
        ds[11] += 1;
        assert_eq!(msgctl(own, libc::IPC_SET, ds.as_ptr() as u64), Err(libc::EPERM), "beyond msgmnb");
        msgctl(own, libc::IPC_RMID, 0).unwrap();
    });
    msgctl(id, libc::IPC_RMID, 0).unwrap();
    assert_eq!(msgctl(id, libc::IPC_RMID, 0), Err(libc::EINVAL));
}

fn msg_refusals() {
    let id = msgget(libc::IPC_PRIVATE, 0o600).unwrap();
    assert_eq!(send(id, 0, b"x", 0), Err(libc::EINVAL));
    assert_eq!(send(id, -1, b"x", 0), Err(libc::EINVAL));
    assert_eq!(send(-1, 1, b"x", 0), Err(libc::EINVAL));
    assert_eq!(send(id + 1, 1, b"x", IPC_NOWAIT), Err(libc::EINVAL));
    let raw = |at: u64, size: u64| call(libc::SYS_msgsnd, [id as u64, at, size, 0, 0, 0]);
    let kind = 1_i64;
    assert_eq!(raw(8, 1), Err(libc::EFAULT));
    assert_eq!(raw(&raw const kind as u64, 8193), Err(libc::EINVAL));
    assert_eq!(raw(&raw const kind as u64, u64::MAX), Err(libc::EINVAL));
    let rcv = |at: u64, size: u64| call(libc::SYS_msgrcv, [id as u64, at, size, 0, IPC_NOWAIT as u64, 0]);
    assert_eq!(rcv(8, u64::MAX), Err(libc::EINVAL));
    assert_eq!(rcv(8, 8), Err(libc::ENOMSG));
    send(id, 1, b"lost", 0).unwrap();
    assert_eq!(rcv(8, 8), Err(libc::EFAULT));
    assert_eq!(msgctl(id, 99, 0), Err(libc::EINVAL));
    assert_eq!(msgctl(id, -1, 0), Err(libc::EINVAL));
    msgctl(id, libc::IPC_RMID, 0).unwrap();
}

fn namespaces() {
    let key = 0x5400_0000 | ((std::process::id() as i32 & 0xf_ffff) << 3);
    let sem = semget(key, 1, libc::IPC_CREAT | 0o600).unwrap();
    let msg = msgget(key, libc::IPC_CREAT | 0o600).unwrap();
    in_child(|| {
        semop(sem, &[(0, 1, UNDO)]).unwrap();
        call(libc::SYS_unshare, [libc::CLONE_NEWIPC as u64, 0, 0, 0, 0, 0]).unwrap();
        assert_eq!(semget(key, 1, 0), Err(libc::ENOENT));
        assert_eq!(msgget(key, 0), Err(libc::ENOENT));
        assert_eq!(std::fs::read_to_string("/proc/sysvipc/sem").unwrap().lines().count(), 1);
        let own = semget(key, 1, libc::IPC_CREAT | 0o600).unwrap();
        semop(own, &[(0, 3, UNDO)]).unwrap();
        std::fs::write("/proc/sys/kernel/msgmax", "10").unwrap();
        let own = msgget(key, libc::IPC_CREAT | 0o600).unwrap();
        assert_eq!(send(own, 1, &[0; 11], 0), Err(libc::EINVAL));
        assert_eq!(send(own, 1, &[0; 10], 0), Ok(0));
    });
    assert_eq!(value(sem, 0), 0, "leaving the namespace undoes");
    assert_eq!(send(msg, 1, &[0; 11], 0), Ok(0));
    remove_set(sem);
    msgctl(msg, libc::IPC_RMID, 0).unwrap();
}
