//! Path resolution (path_resolution(7)) and the operations on names built on it.
use crate::Result;

pub use super::attachments::Attachments;

/// lseek(2) for an object with or without a position.
pub fn default_seek(
    seekable: bool,
    size: impl FnOnce() -> Result<u64>,
    pos: u64,
    offset: i64,
    whence: u32,
) -> Result<u64> {
    let _ = (seekable, size, pos, offset, whence);
    todo!()
}
