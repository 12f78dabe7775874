//! The signal frame of x86-64 as <asm/sigcontext.h>, <asm/ucontext.h> and <asm/sigframe.h> lay it out.
use crate::types::{SigInfo, SigStack};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// struct sigcontext_64.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct SigContext {
    pub r8: u64,
    pub r9: u64,
    pub r10: u64,
    pub r11: u64,
    pub r12: u64,
    pub r13: u64,
    pub r14: u64,
    pub r15: u64,
    pub di: u64,
    pub si: u64,
    pub bp: u64,
    pub bx: u64,
    pub dx: u64,
    pub ax: u64,
    pub cx: u64,
    pub sp: u64,
    pub ip: u64,
    pub flags: u64,
    pub cs: u16,
    pub gs: u16,
    pub fs: u16,
    pub ss: u16,
    pub err: u64,
    pub trapno: u64,
    pub oldmask: u64,
    pub cr2: u64,
    pub fpstate: u64,
    pub reserved: [u64; 8],
}

/// struct ucontext.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct UContext {
    pub flags: u64,
    pub link: u64,
    pub stack: SigStack,
    pub mcontext: SigContext,
    pub sigmask: u64,
}

/// struct rt_sigframe; the vector state follows at a 64-byte boundary.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RtSigFrame {
    pub pretcode: u64,
    pub uc: UContext,
    pub info: SigInfo,
}

/// struct _fpx_sw_bytes, in the FXSAVE area's bytes 464..512.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct FpxSwBytes {
    pub magic1: u32,
    pub extended_size: u32,
    pub xfeatures: u64,
    pub xstate_size: u32,
    pub padding: [u32; 7],
}

/// FP_XSTATE_MAGIC1.
pub const FP_XSTATE_MAGIC1: u32 = 0x4650_5853;
/// FP_XSTATE_MAGIC2, the word after the state.
pub const FP_XSTATE_MAGIC2: u32 = 0x4650_5845;
/// Offset of [`FpxSwBytes`] in the state.
pub const SW_BYTES_OFFSET: usize = 464;
/// UC_FP_XSTATE: extended state is there.
pub const UC_FP_XSTATE: u64 = 1;
/// UC_SIGCONTEXT_SS: the ss field is meaningful.
pub const UC_SIGCONTEXT_SS: u64 = 2;
/// UC_STRICT_RESTORE_SS: ss is restored as it is.
pub const UC_STRICT_RESTORE_SS: u64 = 4;

const _: () = assert!(size_of::<SigContext>() == 256);
const _: () = assert!(size_of::<UContext>() == 304);
const _: () = assert!(size_of::<RtSigFrame>() == 440);
const _: () = assert!(size_of::<FpxSwBytes>() == 48);
