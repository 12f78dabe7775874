//! Typed arguments: how a register becomes a value. Truncation follows the C prototype, as Linux does.
use guest_abi::{UserAddr, UserPtr};

/// How the trace prints an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ArgKind {
    Int,
    Unsigned,
    Hex,
    Fd,
    Pointer,
    Path,
}

/// A type an argument register can be read as.
pub trait FromArg {
    /// How the trace prints it.
    const KIND: ArgKind;
    /// The value; bits beyond the C type are ignored as the ABI says.
    fn from_arg(raw: u64) -> Self;
}

macro_rules! int_arg {
    ($($ty:ty => $kind:ident),*) => {
        $(impl FromArg for $ty {
            const KIND: ArgKind = ArgKind::$kind;
            fn from_arg(raw: u64) -> Self {
                raw as $ty
            }
        })*
    };
}
int_arg!(i32 => Int, u32 => Unsigned, i64 => Int, u64 => Unsigned, usize => Unsigned);

/// A file descriptor (or AT_FDCWD).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fd(pub i32);

impl FromArg for Fd {
    const KIND: ArgKind = ArgKind::Fd;
    fn from_arg(raw: u64) -> Self {
        Fd(raw as i32)
    }
}

/// A bit set, printed in hexadecimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bits(pub u64);

impl FromArg for Bits {
    const KIND: ArgKind = ArgKind::Hex;
    fn from_arg(raw: u64) -> Self {
        Bits(raw)
    }
}

/// The address of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathArg(pub UserAddr);

impl FromArg for PathArg {
    const KIND: ArgKind = ArgKind::Path;
    fn from_arg(raw: u64) -> Self {
        PathArg(UserAddr(raw))
    }
}

impl FromArg for UserAddr {
    const KIND: ArgKind = ArgKind::Pointer;
    fn from_arg(raw: u64) -> Self {
        UserAddr(raw)
    }
}

impl<T> FromArg for UserPtr<T> {
    const KIND: ArgKind = ArgKind::Pointer;
    fn from_arg(raw: u64) -> Self {
        UserPtr::new(UserAddr(raw))
    }
}
