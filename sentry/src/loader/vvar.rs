//! The layout of the page of clock parameters (vvar), which the sentry writes and the code of the vDSO reads, and where that code lies.
//! The build script, which assembles the code, reads it here too.

/// Offset of the code in the image.
pub const TEXT: u64 = 0x800;
/// Odd while the rest changes (u32).
pub const SEQ: i32 = 0;
/// 1 if the TSC serves as a clock (u32).
pub const VALID: i32 = 4;
/// u64; this and the rest are the fields of `TscClock`.
pub const BASE_TSC: i32 = 8;
/// u32.
pub const MULT: i32 = 16;
/// u32.
pub const SHIFT: i32 = 20;
/// u64.
pub const BASE_MONO: i32 = 24;
/// i64.
pub const REAL_OFFSET: i32 = 32;
/// Their end.
pub const END: i32 = 40;
