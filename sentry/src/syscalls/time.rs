//! Clocks, sleeping and timers (time(7)).
use std::sync::Arc;

use guest_abi::types::{Timespec, Timeval};
use guest_abi::{UserAddr, UserPtr};
use linux_raw_sys::general::*;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::args::{Bits, Fd};
use super::table::Row;
use crate::event::WaitEnd;
use crate::fs::timerfd::{CANCEL_ON_SET, TimerFd};
use crate::row;
use crate::signal::state::SlowCall;
use crate::signal::{RestartBlock, Signal};
use crate::task::Task;
use crate::task::limits::Resource;
use crate::time::Nanos;
use crate::timers::clock::{self, Clock, CpuClock, CpuOwner};
use crate::timers::itimer::{self, Which};
use crate::timers::{cpu, posix_timer};
use crate::vfs::OpenFlags;
use crate::{Errno, Result};

/// The rows of this area.
pub const ROWS: &[Row] = &[
    row!(35, nanosleep(req: UserPtr<Timespec>, rem: UserPtr<Timespec>), slow nanosleep, Full),
    row!(36, getitimer(which: i32, curr_value: UserPtr<Itimerval>), fast getitimer, Full),
    row!(37, alarm(seconds: u32), fast alarm, Full),
    row!(38, setitimer(which: i32, new_value: UserPtr<Itimerval>, old_value: UserPtr<Itimerval>), fast setitimer, Full),
    row!(96, gettimeofday(tv: UserPtr<Timeval>, tz: UserPtr<u64>), fast gettimeofday, Full),
    row!(159, adjtimex(buf: UserPtr<Timex>), fast adjtimex, Partial, "changes give EPERM"),
    row!(164, settimeofday(tv: UserPtr<Timeval>, tz: UserPtr<u64>), fast settimeofday, Partial, "EPERM"),
    row!(201, time(tloc: UserPtr<i64>), fast time, Full),
    row!(222, timer_create(clockid: i32, sevp: UserPtr<SigEvent>, timerid: UserPtr<i32>), fast timer_create, Full),
    row!(223, timer_settime(timerid: i32, flags: i32, new_value: UserPtr<Itimerspec>, old_value: UserPtr<Itimerspec>), fast timer_settime, Full),
    row!(224, timer_gettime(timerid: i32, curr_value: UserPtr<Itimerspec>), fast timer_gettime, Full),
    row!(225, timer_getoverrun(timerid: i32), fast timer_getoverrun, Full),
    row!(226, timer_delete(timerid: i32), fast timer_delete, Full),
    row!(227, clock_settime(clockid: i32, tp: UserPtr<Timespec>), fast clock_settime, Partial, "EPERM"),
    row!(228, clock_gettime(clockid: i32, tp: UserPtr<Timespec>), fast clock_gettime, Partial, "no CLOCK_*_ALARM"),
    row!(229, clock_getres(clockid: i32, res: UserPtr<Timespec>), fast clock_getres, Partial, "no CLOCK_*_ALARM"),
    row!(230, clock_nanosleep(clockid: i32, flags: i32, request: UserPtr<Timespec>, remain: UserPtr<Timespec>), slow clock_nanosleep, Full),
    row!(283, timerfd_create(clockid: i32, flags: Bits), fast timerfd_create, Full),
    row!(286, timerfd_settime(fd: Fd, flags: Bits, new_value: UserPtr<Itimerspec>, old_value: UserPtr<Itimerspec>), fast timerfd_settime, Full),
    row!(287, timerfd_gettime(fd: Fd, curr_value: UserPtr<Itimerspec>), fast timerfd_gettime, Full),
    row!(305, clock_adjtime(clockid: i32, buf: UserPtr<Timex>), fast clock_adjtime, Partial, "changes give EPERM"),
];

/// struct itimerval.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Itimerval {
    interval: Timeval,
    value: Timeval,
}

/// struct itimerspec.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Itimerspec {
    interval: Timespec,
    value: Timespec,
}

/// struct sigevent.
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SigEvent {
    pub(super) value: u64,
    pub(super) signo: i32,
    pub(super) notify: u32,
    tid: i32,
    pad: [i32; 11],
}

/// struct timex.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Timex {
    modes: u32,
    pad0: u32,
    offset: i64,
    freq: i64,
    maxerror: i64,
    esterror: i64,
    status: i32,
    pad1: i32,
    constant: i64,
    precision: i64,
    tolerance: i64,
    time: Timeval,
    tick: i64,
    ppsfreq: i64,
    jitter: i64,
    shift: i32,
    pad2: i32,
    stabil: i64,
    jitcnt: i64,
    calcnt: i64,
    errcnt: i64,
    stbcnt: i64,
    tai: i32,
    pad3: [i32; 11],
}

const _: () = assert!(size_of::<SigEvent>() == 64);
const _: () = assert!(size_of::<Timex>() == 208);

fn spec((left, interval): (Nanos, Nanos)) -> Itimerspec {
    Itimerspec { interval: clock::timespec(interval), value: clock::timespec(left) }
}

/// A setting: value and interval.
fn read_spec(task: &Task, at: UserPtr<Itimerspec>) -> Result<(Nanos, Nanos)> {
    let s = task.space()?.read(at)?;
    let value = clock::span(&s.value).ok_or(Errno::EINVAL)?;
    let interval = clock::span(&s.interval).ok_or(Errno::EINVAL)?;
    Ok((value, interval))
}

fn clock_gettime(task: &Arc<Task>, clockid: i32, tp: UserPtr<Timespec>) -> Result<u64> {
    let clock = Clock::from_id(task, clockid, true)?;
    let now = clock::from_machine(task, &clock, clock.now(task.kernel()));
    task.space()?.write(tp, &clock::timespec(now))?;
    Ok(0)
}

fn clock_getres(task: &Arc<Task>, clockid: i32, res: UserPtr<Timespec>) -> Result<u64> {
    let resolution = clock::resolution(task, clockid)?;
    if !res.is_null() {
        task.space()?.write(res, &clock::timespec(resolution))?;
    }
    Ok(0)
}

fn clock_settime(task: &Arc<Task>, clockid: i32, tp: UserPtr<Timespec>) -> Result<u64> {
    let clock = Clock::from_id(task, clockid, false)?;
    if clockid >= 0 && !matches!(clockid as u32, CLOCK_REALTIME | CLOCK_PROCESS_CPUTIME_ID | CLOCK_THREAD_CPUTIME_ID) {
        return Err(Errno::EINVAL);
    }
    let t = task.space()?.read(tp)?;
    if matches!(clock, Clock::Realtime) && clock::span(&t).is_none() {
        return Err(Errno::EINVAL);
    }
    // The clocks are the host's.
    Err(Errno::EPERM)
}

fn gettimeofday(task: &Arc<Task>, tv: UserPtr<Timeval>, tz: UserPtr<u64>) -> Result<u64> {
    let space = task.space()?;
    if !tv.is_null() {
        space.write(tv, &clock::timeval(task.kernel().platform.realtime()))?;
    }
    if !tz.is_null() {
        space.write(tz, &0)?;
    }
    Ok(0)
}

fn settimeofday(task: &Arc<Task>, tv: UserPtr<Timeval>, tz: UserPtr<u64>) -> Result<u64> {
    let space = task.space()?;
    if !tv.is_null() {
        clock::span_of_timeval(&space.read(tv)?).ok_or(Errno::EINVAL)?;
    }
    if !tz.is_null() {
        space.read(tz)?;
    }
    Err(Errno::EPERM)
}

fn time(task: &Arc<Task>, tloc: UserPtr<i64>) -> Result<u64> {
    let now = task.kernel().platform.realtime() / clock::SECOND;
    if !tloc.is_null() {
        task.space()?.write(tloc, &(now as i64))?;
    }
    Ok(now)
}

fn adjtimex(task: &Arc<Task>, buf: UserPtr<Timex>) -> Result<u64> {
    clock_adjtime(task, CLOCK_REALTIME as i32, buf)
}

fn clock_adjtime(task: &Arc<Task>, clockid: i32, buf: UserPtr<Timex>) -> Result<u64> {
    const ADJ_OFFSET_SS_READ: u32 = 0xa001;
    const STA_UNSYNC: i32 = 0x40;
    const TIME_ERROR: u64 = 5;
    const MAX_ERROR: i64 = 16_000_000;
    let space = task.space()?;
    let asked = space.read(buf)?;
    match u32::try_from(clockid) {
        Ok(CLOCK_REALTIME) => {}
        Ok(10 | 12..) => return Err(Errno::EINVAL),
        _ => return Err(Errno::EOPNOTSUPP),
    }
    if asked.modes != 0 && asked.modes != ADJ_OFFSET_SS_READ {
        return Err(Errno::EPERM);
    }
    // The state of a clock that nobody disciplines, as the sandbox has it.
    let answer = Timex {
        offset: 0,
        freq: 0,
        maxerror: MAX_ERROR,
        esterror: MAX_ERROR,
        status: STA_UNSYNC,
        constant: 2,
        precision: 1,
        tolerance: 32_768_000,
        time: clock::timeval(task.kernel().platform.realtime()),
        tick: 10_000,
        ppsfreq: 0,
        jitter: 0,
        shift: 0,
        stabil: 0,
        jitcnt: 0,
        calcnt: 0,
        errcnt: 0,
        stbcnt: 0,
        tai: 0,
        ..asked
    };
    space.write(buf, &answer)?;
    Ok(TIME_ERROR)
}

async fn nanosleep(task: &Arc<Task>, req: UserPtr<Timespec>, rem: UserPtr<Timespec>) -> Result<u64> {
    let span = clock::span(&task.space()?.read(req)?).ok_or(Errno::EINVAL)?;
    sleep_until(task, task.now().saturating_add(span), rem.addr).await
}

/// Sleeps until monotonic time `deadline`; interrupted, tells the time left and goes on through restart_syscall(2).
async fn sleep_until(task: &Arc<Task>, deadline: Nanos, rem: UserAddr) -> Result<u64> {
    match task.wait(Vec::new(), Some(deadline), || None::<()>).await {
        Ok(()) | Err(WaitEnd::TimedOut) => Ok(0),
        Err(WaitEnd::Interrupted) => {
            let left = deadline.saturating_sub(task.now());
            if left == 0 {
                return Ok(0);
            }
            if !rem.is_null() {
                task.space()?.write(UserPtr::new(rem), &clock::timespec(left))?;
            }
            task.signals.set_restart(RestartBlock { run: resume_sleep, args: [deadline, rem.0, 0, 0, 0, 0] });
            Err(Errno::ERESTART_RESTARTBLOCK)
        }
    }
}

fn resume_sleep(task: &Arc<Task>, args: [u64; 6]) -> SlowCall<'_> {
    let [deadline, rem, ..] = args;
    Box::pin(async move { sleep_until(task, deadline, UserAddr(rem)).await })
}

/// CLOCK_REALTIME_ALARM, CLOCK_BOOTTIME_ALARM: known, but without a device that wakes the machine of little use.
fn is_alarm(clockid: i32) -> bool {
    matches!(u32::try_from(clockid), Ok(CLOCK_REALTIME_ALARM | CLOCK_BOOTTIME_ALARM))
}

async fn clock_nanosleep(
    task: &Arc<Task>,
    clockid: i32,
    flags: i32,
    request: UserPtr<Timespec>,
    remain: UserPtr<Timespec>,
) -> Result<u64> {
    if is_alarm(clockid) {
        clock::span(&task.space()?.read(request)?).ok_or(Errno::EINVAL)?;
        return Err(Errno::EOPNOTSUPP);
    }
    let clock = Clock::from_id(task, clockid, false)?;
    let by_id = u32::try_from(clockid).ok();
    if matches!(
        by_id,
        Some(CLOCK_THREAD_CPUTIME_ID | CLOCK_MONOTONIC_RAW | CLOCK_REALTIME_COARSE | CLOCK_MONOTONIC_COARSE)
    ) {
        return Err(Errno::EOPNOTSUPP);
    }
    let span = clock::span(&task.space()?.read(request)?).ok_or(Errno::EINVAL)?;
    let absolute = flags & TIMER_ABSTIME as i32 != 0;
    if let Clock::Cpu(cpu) = &clock {
        if matches!(&cpu.owner, CpuOwner::Task(t) if Arc::ptr_eq(t, task)) {
            return Err(Errno::EINVAL);
        }
        let at = if absolute { span } else { cpu.now().saturating_add(span) };
        return match sleep_on_cpu(task, cpu, at).await {
            Err(Errno::ERESTARTNOHAND) if !absolute => interrupted_on_cpu(task, clockid, cpu, at, remain.addr),
            end => end,
        };
    }
    let kernel = task.kernel();
    if !absolute {
        // A relative sleep on any clock lasts as long: the real-time clock's jumps do not count.
        return sleep_until(task, task.now().saturating_add(span), remain.addr).await;
    }
    let span = clock::to_machine(task, &clock, span);
    let bell = cpu::Bell::new();
    let _armed = kernel.timers.arm_target_on(clock.axis(), span, bell.clone());
    let queue = vec![(bell.queue.clone(), crate::event::Events::READABLE)];
    match task.wait(queue, None, || (bell.rung() || clock.now(kernel) >= span).then_some(())).await {
        Ok(()) | Err(WaitEnd::TimedOut) => Ok(0),
        Err(WaitEnd::Interrupted) => Err(Errno::ERESTARTNOHAND),
    }
}

/// Sleeps until a CPU clock shows `at`. ERESTARTNOHAND when interrupted.
async fn sleep_on_cpu(task: &Arc<Task>, cpu: &CpuClock, at: Nanos) -> Result<u64> {
    let bell = cpu::Bell::new();
    let _armed = cpu::arm(cpu, at, bell.clone());
    let queue = vec![(bell.queue.clone(), crate::event::Events::READABLE)];
    match task.wait(queue, None, || bell.rung().then_some(())).await {
        Ok(()) | Err(WaitEnd::TimedOut) => Ok(0),
        Err(WaitEnd::Interrupted) => Err(Errno::ERESTARTNOHAND),
    }
}

/// A relative sleep on a CPU clock was interrupted: tells what is left of it, and goes on through restart_syscall(2).
fn interrupted_on_cpu(task: &Arc<Task>, clockid: i32, cpu: &CpuClock, at: Nanos, remain: UserAddr) -> Result<u64> {
    let left = at.saturating_sub(cpu.now());
    if left == 0 {
        return Ok(0);
    }
    if !remain.is_null() {
        task.space()?.write(UserPtr::new(remain), &clock::timespec(left))?;
    }
    let id = u64::from(clockid.cast_unsigned());
    task.signals.set_restart(RestartBlock { run: resume_on_cpu, args: [id, at, remain.0, 0, 0, 0] });
    Err(Errno::ERESTART_RESTARTBLOCK)
}

fn resume_on_cpu(task: &Arc<Task>, args: [u64; 6]) -> SlowCall<'_> {
    let [id, at, remain, ..] = args;
    Box::pin(async move {
        let clockid = (id as u32).cast_signed();
        let Clock::Cpu(cpu) = Clock::from_id(task, clockid, false)? else { return Err(Errno::EINVAL) };
        match sleep_on_cpu(task, &cpu, at).await {
            Err(Errno::ERESTARTNOHAND) => interrupted_on_cpu(task, clockid, &cpu, at, UserAddr(remain)),
            end => end,
        }
    })
}

fn which(n: i32) -> Result<Which> {
    match n {
        0 => Ok(Which::Real),
        1 => Ok(Which::Virtual),
        2 => Ok(Which::Prof),
        _ => Err(Errno::EINVAL),
    }
}

fn itimerval((left, interval): (Nanos, Nanos)) -> Itimerval {
    // Less than a microsecond left is not none.
    let value = if left != 0 { left.max(1000) } else { 0 };
    Itimerval { interval: clock::timeval(interval), value: clock::timeval(value) }
}

fn getitimer(task: &Arc<Task>, n: i32, curr_value: UserPtr<Itimerval>) -> Result<u64> {
    let now = itimerval(itimer::get(task.group(), which(n)?));
    task.space()?.write(curr_value, &now)?;
    Ok(0)
}

fn setitimer(task: &Arc<Task>, n: i32, new_value: UserPtr<Itimerval>, old_value: UserPtr<Itimerval>) -> Result<u64> {
    let new = if new_value.is_null() { Itimerval::default() } else { task.space()?.read(new_value)? };
    let value = clock::span_of_timeval(&new.value).ok_or(Errno::EINVAL)?;
    let interval = clock::span_of_timeval(&new.interval).ok_or(Errno::EINVAL)?;
    let old = itimer::set(task.group(), which(n)?, value, interval);
    if !old_value.is_null() {
        task.space()?.write(old_value, &itimerval(old))?;
    }
    Ok(0)
}

fn alarm(task: &Arc<Task>, seconds: u32) -> Result<u64> {
    let (left, _) = itimer::set(task.group(), Which::Real, u64::from(seconds) * clock::SECOND, 0);
    let (sec, nsec) = (left / clock::SECOND, left % clock::SECOND);
    // Rounded, but never to 0: that would mean that no alarm was set.
    Ok(if nsec >= clock::SECOND / 2 || (sec == 0 && nsec > 0) { sec + 1 } else { sec })
}

fn timer_create(task: &Arc<Task>, clockid: i32, sevp: UserPtr<SigEvent>, timerid: UserPtr<i32>) -> Result<u64> {
    const SIGEV_SIGNAL: u32 = 0;
    const SIGEV_NONE: u32 = 1;
    const SIGEV_THREAD: u32 = 2;
    const SIGEV_THREAD_ID: u32 = 4;
    let event = if sevp.is_null() { None } else { Some(task.space()?.read(sevp)?) };
    let clock = Clock::from_id(task, clockid, false);
    match u32::try_from(clockid) {
        Ok(CLOCK_MONOTONIC_RAW | CLOCK_REALTIME_COARSE | CLOCK_MONOTONIC_COARSE) => return Err(Errno::EOPNOTSUPP),
        Ok(_) if clock.is_err() && !is_alarm(clockid) => return Err(Errno::EINVAL),
        _ => {}
    }
    let limit = task.limit(Resource::Sigpending);
    let charge = task.kernel().pending_counts.charge(task.credentials().uid, limit).ok_or(Errno::EAGAIN)?;
    let notify = match &event {
        None => posix_timer::Notify::Group(Signal::SIGALRM),
        Some(e) => {
            let signal = || Signal::new(e.signo).ok_or(Errno::EINVAL);
            match e.notify {
                SIGEV_NONE => posix_timer::Notify::None,
                SIGEV_SIGNAL | SIGEV_THREAD => posix_timer::Notify::Group(signal()?),
                SIGEV_THREAD_ID => {
                    let target = task.pid_namespace().task(e.tid).ok_or(Errno::EINVAL)?;
                    if !Arc::ptr_eq(target.group(), task.group()) {
                        return Err(Errno::EINVAL);
                    }
                    posix_timer::Notify::Task(signal()?, Arc::downgrade(&target))
                }
                _ => return Err(Errno::EINVAL),
            }
        }
    };
    let clock = match clock {
        Ok(clock) => clock,
        // Linux has given the id out before it asks such a clock.
        Err(e) => {
            task.space()?.write(timerid, &0)?;
            return Err(if is_alarm(clockid) { Errno::EOPNOTSUPP } else { e });
        }
    };
    let timer = posix_timer::create(task.group(), clock, charge, notify, event.map(|e| e.value))?;
    if let Err(e) = task.space()?.write(timerid, &timer.id()) {
        task.group().timers.posix.delete(timer.id())?;
        return Err(e);
    }
    Ok(0)
}

fn timer_settime(
    task: &Arc<Task>,
    timerid: i32,
    flags: i32,
    new_value: UserPtr<Itimerspec>,
    old_value: UserPtr<Itimerspec>,
) -> Result<u64> {
    if new_value.is_null() {
        return Err(Errno::EINVAL);
    }
    let (value, interval) = read_spec(task, new_value)?;
    let timer = task.group().timers.posix.get(timerid)?;
    let absolute = flags & TIMER_ABSTIME as i32 != 0;
    // 0 disarms, on whatever clock.
    let value = if absolute && value != 0 { clock::to_machine(task, &timer.clock(), value).max(1) } else { value };
    let old = timer.set(task.group(), value, absolute, interval);
    if !old_value.is_null() {
        task.space()?.write(old_value, &spec(old))?;
    }
    Ok(0)
}

fn timer_gettime(task: &Arc<Task>, timerid: i32, curr_value: UserPtr<Itimerspec>) -> Result<u64> {
    let timer = task.group().timers.posix.get(timerid)?;
    task.space()?.write(curr_value, &spec(timer.get(task.group())))?;
    Ok(0)
}

fn timer_getoverrun(task: &Arc<Task>, timerid: i32) -> Result<u64> {
    Ok(task.group().timers.posix.get(timerid)?.overrun() as u64)
}

fn timer_delete(task: &Arc<Task>, timerid: i32) -> Result<u64> {
    task.group().timers.posix.delete(timerid)?;
    Ok(0)
}

fn timerfd_create(task: &Arc<Task>, clockid: i32, flags: Bits) -> Result<u64> {
    // The C prototype has int flags.
    let flags = OpenFlags::from_bits_retain(flags.0 as u32);
    if !(flags - (OpenFlags::CLOEXEC | OpenFlags::NONBLOCK)).is_empty() {
        return Err(Errno::EINVAL);
    }
    let clock = match u32::try_from(clockid) {
        Ok(CLOCK_REALTIME | CLOCK_REALTIME_ALARM) => Clock::Realtime,
        Ok(CLOCK_MONOTONIC) => Clock::Monotonic,
        Ok(CLOCK_BOOTTIME | CLOCK_BOOTTIME_ALARM) => Clock::Boottime,
        _ => return Err(Errno::EINVAL),
    };
    if is_alarm(clockid) && !task.credentials().has(crate::ns::user::Caps::WAKE_ALARM) {
        return Err(Errno::EPERM);
    }
    let file = TimerFd::open(task, clock, clockid, flags & OpenFlags::NONBLOCK);
    let fd = task.files().insert(file, flags.contains(OpenFlags::CLOEXEC), 0, task.limit(Resource::Nofile))?;
    Ok(fd as u64)
}

fn timerfd_settime(
    task: &Arc<Task>,
    fd: Fd,
    flags: Bits,
    new_value: UserPtr<Itimerspec>,
    old_value: UserPtr<Itimerspec>,
) -> Result<u64> {
    const ABSTIME: u32 = 1;

    let (value, interval) = read_spec(task, new_value)?;
    let flags = flags.0 as u32;
    if flags & !(ABSTIME | CANCEL_ON_SET) != 0 {
        return Err(Errno::EINVAL);
    }
    let file = task.files().get(fd.0)?;
    let timer = file.downcast::<TimerFd>().ok_or(Errno::EINVAL)?;
    let absolute = flags & ABSTIME != 0;
    let value = if absolute && value != 0 { clock::to_machine(task, &timer.clock(), value).max(1) } else { value };
    let old = timer.set(value, absolute, interval, flags);
    if !old_value.is_null() {
        task.space()?.write(old_value, &spec(old))?;
    }
    Ok(0)
}

fn timerfd_gettime(task: &Arc<Task>, fd: Fd, curr_value: UserPtr<Itimerspec>) -> Result<u64> {
    let file = task.files().get(fd.0)?;
    let timer = file.downcast::<TimerFd>().ok_or(Errno::EINVAL)?;
    task.space()?.write(curr_value, &spec(timer.get()))?;
    Ok(0)
}
