//! Terminal requests to a host terminal. Owns the list of requests that may pass, with the size of what each points to.
#![allow(unsafe_code)]
use std::os::fd::{AsRawFd, BorrowedFd};

use guest_abi::Errno;
use linux_raw_sys::ioctl as raw;

enum Argument {
    /// A structure of this many bytes that the kernel reads or writes.
    Bytes(usize),
    /// A number.
    Value,
    /// Nothing.
    None,
}

/// TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD and the session requests are absent on purpose: they act on more than the stream.
fn argument(request: u32) -> Option<Argument> {
    Some(match request {
        raw::TCGETS | raw::TCSETS | raw::TCSETSW | raw::TCSETSF => Argument::Bytes(36),
        raw::TCGETS2 | raw::TCSETS2 | raw::TCSETSW2 | raw::TCSETSF2 => Argument::Bytes(44),
        raw::TCGETA | raw::TCSETA | raw::TCSETAW | raw::TCSETAF => Argument::Bytes(18),
        raw::TIOCGWINSZ | raw::TIOCSWINSZ => Argument::Bytes(8),
        raw::FIONREAD
        | raw::TIOCOUTQ
        | raw::TIOCGETD
        | raw::TIOCMGET
        | raw::TIOCMSET
        | raw::TIOCMBIS
        | raw::TIOCMBIC => Argument::Bytes(4),
        raw::TCSBRK | raw::TCSBRKP | raw::TCXONC | raw::TCFLSH => Argument::Value,
        raw::TIOCSBRK | raw::TIOCCBRK => Argument::None,
        _ => return None,
    })
}

/// Every request that may pass, for the jail's list.
pub(crate) const REQUESTS: &[u32] = &[
    raw::TIOCGPGRP,
    raw::TCGETS,
    raw::TCSETS,
    raw::TCSETSW,
    raw::TCSETSF,
    raw::TCGETS2,
    raw::TCSETS2,
    raw::TCSETSW2,
    raw::TCSETSF2,
    raw::TCGETA,
    raw::TCSETA,
    raw::TCSETAW,
    raw::TCSETAF,
    raw::TIOCGWINSZ,
    raw::TIOCSWINSZ,
    raw::FIONREAD,
    raw::TIOCOUTQ,
    raw::TIOCGETD,
    raw::TIOCMGET,
    raw::TIOCMSET,
    raw::TIOCMBIS,
    raw::TIOCMBIC,
    raw::TCSBRK,
    raw::TCSBRKP,
    raw::TCXONC,
    raw::TCFLSH,
    raw::TIOCSBRK,
    raw::TIOCCBRK,
];

/// Whether the request changes the terminal, which only the foreground process group may do (tcsetattr(3)).
pub(super) fn changes(request: u32) -> bool {
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

/// Carries out a request. `data` is the structure, or the number in little-endian order. ENOTTY for what is not on the list.
pub(super) fn request(fd: BorrowedFd<'_>, request: u32, data: &mut [u8]) -> Result<u64, Errno> {
    let raw = fd.as_raw_fd();
    let r = match argument(request).ok_or(Errno::ENOTTY)? {
        Argument::Bytes(n) => {
            let part = data.get_mut(..n).ok_or(Errno::EFAULT)?;
            // SAFETY: the kernel reads or writes exactly `n` bytes for this request, which `part` has.
            unsafe { libc::ioctl(raw, u64::from(request), part.as_mut_ptr()) }
        }
        Argument::Value => {
            let mut value = [0; 8];
            for (to, from) in value.iter_mut().zip(data.iter()) {
                *to = *from;
            }
            // SAFETY: the argument of this request is a number.
            unsafe { libc::ioctl(raw, u64::from(request), u64::from_le_bytes(value)) }
        }
        // SAFETY: the request takes no argument.
        Argument::None => unsafe { libc::ioctl(raw, u64::from(request), 0) },
    };
    u64::try_from(r).map_err(|_| Errno::from_raw(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)))
}
