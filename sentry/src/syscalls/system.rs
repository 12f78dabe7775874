//! Calls about the system as a whole: uname, sysinfo, getrandom, host and domain name, and the few that only an
//! administrator of a whole machine may use.
use std::sync::Arc;

use guest_abi::{UserAddr, UserPtr};
use zerocopy::{FromZeros, Immutable, IntoBytes};

use super::table::Row;
use crate::ns::user::Caps;
use crate::ns::uts::{RELEASE, VERSION};
use crate::row;
use crate::task::Task;
use crate::{Errno, Result};

/// Longest host or domain name (__NEW_UTS_LEN).
const UTS_LEN: usize = 64;

#[derive(Clone, Copy, IntoBytes, Immutable)]
#[repr(C)]
struct NewUtsname {
    fields: [[u8; UTS_LEN + 1]; 6],
}

fn uts_field(text: &[u8]) -> [u8; UTS_LEN + 1] {
    let mut field = [0; UTS_LEN + 1];
    for (to, from) in field.iter_mut().take(UTS_LEN).zip(text) {
        *to = *from;
    }
    field
}

fn uname(task: &Arc<Task>, buf: UserAddr) -> Result<u64> {
    let (host, domain) = task.uts().names();
    let fields =
        [b"Linux".as_slice(), &host, RELEASE.as_bytes(), VERSION.as_bytes(), b"x86_64", &domain].map(uts_field);
    task.space()?.write(UserPtr::new(buf), &NewUtsname { fields })?;
    Ok(0)
}

fn read_name(task: &Arc<Task>, addr: UserAddr, len: i32) -> Result<Vec<u8>> {
    if !task.credentials().has_in(&task.uts().owner.user_ns, Caps::SYS_ADMIN) {
        return Err(Errno::EPERM);
    }
    let len = usize::try_from(len).ok().filter(|&n| n <= UTS_LEN).ok_or(Errno::EINVAL)?;
    let mut name = vec![0; len];
    task.space()?.read_bytes(addr, &mut name)?;
    Ok(name)
}

fn sethostname(task: &Arc<Task>, name: UserAddr, len: i32) -> Result<u64> {
    let name = read_name(task, name, len)?;
    task.uts().set_hostname(name);
    Ok(0)
}

fn setdomainname(task: &Arc<Task>, name: UserAddr, len: i32) -> Result<u64> {
    let name = read_name(task, name, len)?;
    task.uts().set_domainname(name);
    Ok(0)
}

/// struct sysinfo of sysinfo(2) on x86-64.
#[derive(Clone, Copy, FromZeros, IntoBytes, Immutable)]
#[repr(C)]
struct Sysinfo {
    uptime: i64,
    loads: [u64; 3],
    totalram: u64,
    freeram: u64,
    sharedram: u64,
    bufferram: u64,
    totalswap: u64,
    freeswap: u64,
    procs: u16,
    pad: [u8; 6],
    totalhigh: u64,
    freehigh: u64,
    mem_unit: u32,
    tail: u32,
}

fn sysinfo(task: &Arc<Task>, info: UserAddr) -> Result<u64> {
    let kernel = task.kernel();
    let memory = kernel.platform.memory();
    let mut out = Sysinfo::new_zeroed();
    out.uptime = i64::try_from(kernel.uptime().saturating_add_signed(task.time_offsets().boottime) / 1_000_000_000)
        .unwrap_or(i64::MAX);
    out.totalram = memory.limit();
    out.freeram = memory.limit().saturating_sub(memory.used());
    out.procs = u16::try_from(kernel.task_count()).unwrap_or(u16::MAX);
    out.mem_unit = 1;
    task.space()?.write(UserPtr::new(info), &out)?;
    Ok(0)
}

/// Bytes handed over between two looks at signals; getrandom(2) never fails for up to 256.
const RANDOM_CHUNK: usize = 256;
/// Most bytes of one call.
const RANDOM_MAX: u64 = 33_554_431;

fn check_random(flags: u32) -> Result<()> {
    const GRND_NONBLOCK: u32 = 1;
    const GRND_RANDOM: u32 = 2;
    const GRND_INSECURE: u32 = 4;
    if flags & !(GRND_NONBLOCK | GRND_RANDOM | GRND_INSECURE) != 0
        || flags & (GRND_RANDOM | GRND_INSECURE) == GRND_RANDOM | GRND_INSECURE
    {
        return Err(Errno::EINVAL);
    }
    Ok(())
}

/// Bytes handed over at once; larger requests let others run now and then.
const RANDOM_AT_ONCE: u64 = 256 << 10;

fn getrandom_fast(task: &Arc<Task>, buf: UserAddr, len: u64, flags: u32) -> Result<Option<u64>> {
    check_random(flags)?;
    if len > RANDOM_AT_ONCE { Ok(None) } else { random_part(task, buf, len).map(Some) }
}

async fn getrandom_slow(task: &Arc<Task>, buf: UserAddr, len: u64, flags: u32) -> Result<u64> {
    check_random(flags)?;
    let len = len.min(RANDOM_MAX);
    let mut done = 0;
    while done < len {
        let want = (len - done).min(RANDOM_AT_ONCE);
        match random_part(task, buf.wrapping_add(done), want) {
            Ok(n) => {
                done += n;
                if n < want {
                    break;
                }
            }
            Err(e) if done == 0 => return Err(e),
            Err(_) => break,
        }
        if !super::slices::pause(task).await {
            break;
        }
    }
    Ok(done)
}

/// Fills `buf` up to the first fault or signal.
fn random_part(task: &Arc<Task>, buf: UserAddr, len: u64) -> Result<u64> {
    let space = task.space()?;
    let mut done = 0;
    let mut chunk = [0; RANDOM_CHUNK];
    while done < len {
        let n = usize::try_from(len - done).unwrap_or(RANDOM_CHUNK).min(RANDOM_CHUNK);
        let part = chunk.get_mut(..n).unwrap_or_default();
        task.kernel().platform.random(part);
        match space.write_bytes(buf.wrapping_add(done), part) {
            Ok(()) => done += n as u64,
            Err(e) if done == 0 => return Err(e),
            Err(_) => break,
        }
        if task.interruption.is_pending() {
            break;
        }
    }
    Ok(done)
}

fn syslog(task: &Arc<Task>, kind: i32, _buf: UserAddr, len: i32) -> Result<u64> {
    const READ_ALL: i32 = 3;
    const SIZE_BUFFER: i32 = 10;
    let credentials = task.credentials();
    if kind != READ_ALL && kind != SIZE_BUFFER && !credentials.has(Caps::SYSLOG) {
        return Err(Errno::EPERM);
    }
    match kind {
        2..=4 if len < 0 => Err(Errno::EINVAL),
        0..=10 => Ok(0), // the sandbox's kernel log is empty
        _ => Err(Errno::EINVAL),
    }
}

/// Calls that need a capability over the whole machine, which nobody in a sandbox has.
fn machine_only(_task: &Arc<Task>) -> Result<u64> {
    Err(Errno::EPERM)
}

fn ioperm(_task: &Arc<Task>, from: u64, count: u64, _on: i32) -> Result<u64> {
    match from.checked_add(count) {
        Some(end) if count > 0 && end <= 65536 => Err(Errno::EPERM),
        _ => Err(Errno::EINVAL),
    }
}

fn iopl(_task: &Arc<Task>, level: u32) -> Result<u64> {
    if level > 3 { Err(Errno::EINVAL) } else { Err(Errno::EPERM) }
}

#[allow(missing_docs)]
pub const ROWS: &[Row] = &[
    row!(63, uname(buf: UserAddr), fast uname, Full),
    row!(99, sysinfo(info: UserAddr), fast sysinfo, Full),
    row!(103, syslog(kind: i32, buf: UserAddr, len: i32), fast syslog, Full, "the log is empty"),
    row!(167, swapon(), fast machine_only, Full, "EPERM: no device of the machine is reachable"),
    row!(168, swapoff(), fast machine_only, Full, "EPERM: no device of the machine is reachable"),
    row!(170, sethostname(name: UserAddr, len: i32), fast sethostname, Full),
    row!(171, setdomainname(name: UserAddr, len: i32), fast setdomainname, Full),
    row!(172, iopl(level: u32), fast iopl, Full, "EPERM"),
    row!(173, ioperm(from: u64, count: u64, on: i32), fast ioperm, Full, "EPERM"),
    row!(175, init_module(), fast machine_only, Full, "EPERM"),
    row!(176, delete_module(), fast machine_only, Full, "EPERM"),
    row!(313, finit_module(), fast machine_only, Full, "EPERM"),
    row!(318, getrandom(buf: UserAddr, len: u64, flags: u32), both getrandom_fast, getrandom_slow, Full),
];
