//! ioctl_tty(2) on the ends of a pseudo-terminal.
use std::sync::Arc;

use guest_abi::{UserAddr, UserPtr};
use linux_raw_sys::ioctl as raw;
use zerocopy::{FromBytes, IntoBytes};

use super::ends::{PtySlave, tell_master};
use super::pty::Pty;
use crate::event::Events;
use crate::fs::anon::{get_user, put_user};
use crate::fs::tty::WinSize;
use crate::fs::tty::termios::{TERMIOS_LEN, Termios, cc};
use crate::ns::user::Caps;
use crate::signal::Signal;
use crate::task::Task;
use crate::task::limits::Resource;
use crate::vfs::file::Caller;
use crate::vfs::path::resolve;
use crate::vfs::{File, FsState, Lookup, LookupFlags, OpenFlags, PathRef};
use crate::{Errno, Result};

const TCIFLUSH: u64 = 0;
const TCOFLUSH: u64 = 1;
const TCIOFLUSH: u64 = 2;

/// Whether a request changes the terminal, which background processes may not do unless they ignore SIGTTOU.
fn changes(request: u32) -> bool {
    matches!(
        request,
        raw::TCSETS
            | raw::TCSETSW
            | raw::TCSETSF
            | raw::TCSETS2
            | raw::TCSETSW2
            | raw::TCSETSF2
            | raw::TCSETA
            | raw::TCSETAW
            | raw::TCSETAF
            | raw::TCSBRK
            | raw::TCSBRKP
            | raw::TCXONC
            | raw::TCFLSH
    )
}

/// Serves a request through the master or a slave.
pub(super) fn ioctl(
    pty: &Arc<Pty>,
    file: &File,
    task: &Task,
    caller: &dyn Caller,
    request: u32,
    arg: u64,
    master: bool,
) -> Result<u64> {
    if !master && pty.lock().hung_up {
        return Err(if request == raw::TIOCSPGRP { Errno::ENOTTY } else { Errno::EIO });
    }
    if let Some(answer) = pty.job.ioctl(task, caller, request, arg, master) {
        return answer;
    }
    if !master && changes(request) {
        pty.job.check_change(task)?;
    }
    match request {
        raw::TCGETS | raw::TCGETS2 | raw::TCGETA => get_termios(pty, caller, request, arg),
        raw::TCSETS | raw::TCSETSW | raw::TCSETSF | raw::TCSETS2 | raw::TCSETSW2 | raw::TCSETSF2 => {
            set_termios(pty, caller, request, arg)
        }
        raw::TCSETA | raw::TCSETAW | raw::TCSETAF => set_termio(pty, caller, request, arg),
        raw::TIOCGWINSZ => put_user(caller, arg, &pty.lock().size),
        raw::TIOCSWINSZ => {
            let size: WinSize = get_user(caller, arg)?;
            let changed = core::mem::replace(&mut pty.lock().size, size) != size;
            if changed {
                pty.job.signal_foreground(Signal::SIGWINCH);
            }
            Ok(0)
        }
        raw::FIONREAD => {
            let n = {
                let inner = pty.lock();
                if master { inner.line.output_len() } else { inner.line.input_len() }
            };
            put_user(caller, arg, &i32::try_from(n).unwrap_or(i32::MAX))
        }
        raw::TIOCOUTQ => {
            let n = if master { 0 } else { pty.lock().line.output_len() };
            put_user(caller, arg, &i32::try_from(n).unwrap_or(i32::MAX))
        }
        // Output counts as sent once the master can read it.
        raw::TCSBRK | raw::TCSBRKP | raw::TIOCSBRK | raw::TIOCCBRK => Ok(0),
        raw::TCXONC => flow(pty, arg),
        raw::TCFLSH => flush(pty, arg),
        raw::TIOCEXCL | raw::TIOCNXCL => {
            pty.lock().exclusive = request == raw::TIOCEXCL;
            Ok(0)
        }
        raw::TIOCGEXCL => {
            let exclusive = i32::from(pty.lock().exclusive);
            put_user(caller, arg, &exclusive)
        }
        raw::TIOCGETD => put_user(caller, arg, &0i32),
        raw::TIOCSETD => match get_user::<i32>(caller, arg)? {
            0 => Ok(0),
            _ => Err(Errno::EINVAL),
        },
        // dev.tty.legacy_tiocsti is off.
        raw::TIOCSTI if !task.credentials().has(Caps::SYS_ADMIN) => Err(Errno::EIO),
        raw::TIOCSTI => {
            let byte: u8 = get_user(caller, arg)?;
            let signals = pty.lock().line.receive(&[byte]);
            pty.signal(&signals);
            pty.slave_queue.wake(Events::READABLE);
            Ok(0)
        }
        raw::TIOCGDEV => put_user(caller, arg, &u32::try_from(pty.rdev).unwrap_or(0)),
        _ if master => master_ioctl(pty, file, task, caller, request, arg),
        _ => Err(Errno::ENOTTY),
    }
}

fn master_ioctl(pty: &Arc<Pty>, file: &File, task: &Task, caller: &dyn Caller, request: u32, arg: u64) -> Result<u64> {
    match request {
        raw::TIOCGPTN => put_user(caller, arg, &pty.index),
        raw::TIOCSPTLCK => {
            let locked = get_user::<i32>(caller, arg)? != 0;
            pty.lock().locked = locked;
            Ok(0)
        }
        raw::TIOCGPTLCK => {
            let locked = i32::from(pty.lock().locked);
            put_user(caller, arg, &locked)
        }
        raw::TIOCPKT => {
            let on = get_user::<i32>(caller, arg)? != 0;
            let mut inner = pty.lock();
            if on && !inner.packet {
                inner.line.packet_status = 0;
            }
            inner.packet = on;
            Ok(0)
        }
        raw::TIOCGPKT => {
            let packet = i32::from(pty.lock().packet);
            put_user(caller, arg, &packet)
        }
        raw::TIOCSIG => {
            let signal = i32::try_from(arg).ok().and_then(Signal::new).ok_or(Errno::EINVAL)?;
            pty.job.signal_foreground(signal);
            Ok(0)
        }
        raw::TIOCGPTPEER => peer(pty, file, task, arg),
        _ => Err(Errno::ENOTTY),
    }
}

/// TIOCGPTPEER: a descriptor of the slave, wherever the file system is mounted.
fn peer(pty: &Arc<Pty>, file: &File, task: &Task, arg: u64) -> Result<u64> {
    let flags = OpenFlags::from_bits_retain(u32::try_from(arg & 0xffff_ffff).unwrap_or(0));
    if !(flags & !(OpenFlags::RDWR | OpenFlags::WRONLY | OpenFlags::NOCTTY | OpenFlags::NONBLOCK | OpenFlags::CLOEXEC))
        .is_empty()
    {
        return Err(Errno::EINVAL);
    }
    let at = file.path().and_then(|master: &PathRef| {
        let top = master.mount.root_path();
        let inside = Lookup::new(FsState { cwd: top.clone(), root: top, umask: 0 }, task);
        resolve(&inside, None, pty.index.to_string().as_bytes(), LookupFlags::empty()).ok()
    });
    let slave = PtySlave::open(pty, task, flags)?;
    let description = File::new(slave, at, flags - (OpenFlags::NOCTTY | OpenFlags::CLOEXEC));
    let cloexec = flags.contains(OpenFlags::CLOEXEC);
    let fd = task.files().insert(description, cloexec, 0, task.limit(Resource::Nofile))?;
    u64::try_from(fd).map_err(|_| Errno::EBADF)
}

fn get_termios(pty: &Pty, caller: &dyn Caller, request: u32, arg: u64) -> Result<u64> {
    let termios = pty.lock().line.termios;
    if request == raw::TCGETA {
        return put_user(caller, arg, &termio_of(&termios));
    }
    let bytes = termios.as_bytes();
    let len = if request == raw::TCGETS { TERMIOS_LEN } else { bytes.len() };
    caller.space()?.write_bytes(UserAddr(arg), bytes.get(..len).unwrap_or_default())?;
    Ok(0)
}

fn set_termios(pty: &Pty, caller: &dyn Caller, request: u32, arg: u64) -> Result<u64> {
    let old = pty.lock().line.termios;
    let mut bytes: [u8; size_of::<Termios>()] = zerocopy::transmute!(old);
    let whole = matches!(request, raw::TCSETS2 | raw::TCSETSW2 | raw::TCSETSF2);
    let len = if whole { bytes.len() } else { TERMIOS_LEN };
    caller.space()?.read_bytes(UserAddr(arg), bytes.get_mut(..len).unwrap_or_default())?;
    let mut new = Termios::read_from_bytes(&bytes).map_err(|_| Errno::EFAULT)?;
    new.line = old.line;
    // CS8 and CREAD are how a pseudo-terminal is; parity it has none.
    new.cflag = (new.cflag & !(0o60 | 0o400)) | 0o60 | 0o200;
    new.settle_speed();
    apply(pty, new, matches!(request, raw::TCSETSF | raw::TCSETSF2));
    Ok(0)
}

fn apply(pty: &Pty, new: Termios, flush: bool) {
    {
        let mut inner = pty.lock();
        if flush {
            inner.line.flush_input();
        }
        inner.line.set_termios(new);
        inner.timed_out = false;
    }
    pty.slave_queue.wake(Events::READABLE | Events::WRITABLE);
    tell_master(pty);
}

/// struct termio, of old.
fn termio_of(t: &Termios) -> [u8; 18] {
    let mut out = [0; 18];
    for (i, flags) in [t.iflag, t.oflag, t.cflag, t.lflag].into_iter().enumerate() {
        let [a, b, ..] = flags.to_ne_bytes();
        if let Some(pair) = out.get_mut(i * 2..i * 2 + 2) {
            pair.copy_from_slice(&[a, b]);
        }
    }
    if let (Some(to), Some(from)) = (out.get_mut(9..17), t.cc.get(..8)) {
        to.copy_from_slice(from);
    }
    out
}

fn set_termio(pty: &Pty, caller: &dyn Caller, request: u32, arg: u64) -> Result<u64> {
    let bytes: [u8; 18] = caller.space()?.read(UserPtr::new(UserAddr(arg)))?;
    let mut new = pty.lock().line.termios;
    let low = |i: usize, old: u32| {
        let pair = bytes.get(i * 2..i * 2 + 2).and_then(|b| b.try_into().ok()).map_or(0, u16::from_ne_bytes);
        (old & 0xffff_0000) | u32::from(pair)
    };
    new.iflag = low(0, new.iflag);
    new.oflag = low(1, new.oflag);
    new.cflag = low(2, new.cflag);
    new.lflag = low(3, new.lflag);
    if let (Some(to), Some(from)) = (new.cc.get_mut(..8), bytes.get(9..17)) {
        to.copy_from_slice(from);
    }
    new.settle_speed();
    apply(pty, new, request == raw::TCSETAF);
    Ok(0)
}

fn flush(pty: &Pty, which: u64) -> Result<u64> {
    {
        let mut inner = pty.lock();
        match which {
            TCIFLUSH => inner.line.flush_input(),
            TCOFLUSH => inner.line.flush_output(),
            TCIOFLUSH => {
                inner.line.flush_input();
                inner.line.flush_output();
            }
            _ => return Err(Errno::EINVAL),
        }
    }
    pty.slave_queue.wake(Events::WRITABLE);
    tell_master(pty);
    Ok(0)
}

/// TCXONC: TCOOFF, TCOON, TCIOFF, TCION.
fn flow(pty: &Pty, what: u64) -> Result<u64> {
    {
        let mut inner = pty.lock();
        let line = &mut inner.line;
        match what {
            0 => line.set_stopped(true),
            1 => line.set_stopped(false),
            2 | 3 => {
                let index = if what == 2 { cc::STOP } else { cc::START };
                if let Some(c) = line.termios.special(index) {
                    line.write(&[c]);
                }
            }
            _ => return Err(Errno::EINVAL),
        }
    }
    pty.slave_queue.wake(Events::WRITABLE);
    pty.master_queue.wake(Events::READABLE | Events::PRI);
    Ok(0)
}
