//! Linux error numbers (errno(3)), including the kernel-internal restart codes.
use core::fmt;
use linux_raw_sys::errno as raw;

/// A Linux error number, 1..=4095. System calls return its negative in RAX.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(u16);

macro_rules! errnos {
    ($($name:ident)*) => {
        #[allow(missing_docs)]
        impl Errno {
            $(pub const $name: Errno = Errno(raw::$name as u16);)*

            /// The symbolic name, or `""` for a number without one.
            pub const fn name(self) -> &'static str {
                $(if self.0 == Self::$name.0 { return stringify!($name); })*
                match self.0 {
                    512 => "ERESTARTSYS",
                    513 => "ERESTARTNOINTR",
                    514 => "ERESTARTNOHAND",
                    516 => "ERESTART_RESTARTBLOCK",
                    _ => "",
                }
            }
        }
    };
}

errnos! {
    EPERM ENOENT ESRCH EINTR EIO ENXIO E2BIG ENOEXEC EBADF ECHILD EAGAIN ENOMEM EACCES EFAULT ENOTBLK EBUSY EEXIST
    EXDEV ENODEV ENOTDIR EISDIR EINVAL ENFILE EMFILE ENOTTY ETXTBSY EFBIG ENOSPC ESPIPE EROFS EMLINK EPIPE EDOM ERANGE
    EDEADLK ENAMETOOLONG ENOLCK ENOSYS ENOTEMPTY ELOOP ENOMSG EIDRM ENODATA ETIME EPROTO EBADMSG EOVERFLOW EILSEQ
    EUSERS ENOTSOCK EDESTADDRREQ EMSGSIZE EPROTOTYPE ENOPROTOOPT EPROTONOSUPPORT ESOCKTNOSUPPORT EOPNOTSUPP
    EPFNOSUPPORT EAFNOSUPPORT EADDRINUSE EADDRNOTAVAIL ENETDOWN ENETUNREACH ENETRESET ECONNABORTED ECONNRESET ENOBUFS
    EISCONN ENOTCONN ESHUTDOWN ETOOMANYREFS ETIMEDOUT ECONNREFUSED EHOSTDOWN EHOSTUNREACH EALREADY EINPROGRESS ESTALE
    EDQUOT ECANCELED EOWNERDEAD ENOTRECOVERABLE EBADFD ELIBBAD ENOKEY EHWPOISON
}

impl Errno {
    /// Restart after a handler with SA_RESTART, else EINTR (kernel-internal).
    pub const ERESTARTSYS: Errno = Errno(512);
    /// Always restart (kernel-internal).
    pub const ERESTARTNOINTR: Errno = Errno(513);
    /// Restart only if no handler runs (kernel-internal).
    pub const ERESTARTNOHAND: Errno = Errno(514);
    /// Restart through restart_syscall(2) if no handler runs (kernel-internal).
    pub const ERESTART_RESTARTBLOCK: Errno = Errno(516);

    /// From a positive number; anything out of 1..=4095 becomes EIO.
    pub const fn from_raw(n: i32) -> Errno {
        if n > 0 && n < 4096 { Errno(n as u16) } else { Errno::EIO }
    }

    /// The positive number.
    pub const fn raw(self) -> i32 {
        self.0 as i32
    }

    /// The value a system call leaves in RAX: the two's complement of the number.
    pub const fn to_rax(self) -> u64 {
        (-(self.0 as i64)) as u64
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            "" => write!(f, "errno {}", self.0),
            name => f.write_str(name),
        }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl core::error::Error for Errno {}
