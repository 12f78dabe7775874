//! The memory devices (mem(4), null(4), full(4), random(4)).
use std::any::Any;
use std::sync::Arc;

use linux_raw_sys::general::{SEEK_CUR, SEEK_END, SEEK_SET};

use crate::mm::{IoDest, IoSource};
use crate::platform::Platform;
use crate::vfs::file::Caller;
use crate::vfs::{File, FileOps};
use crate::{Errno, Result};

/// Counts all of a source as taken, without looking at it.
fn discard(src: &mut IoSource<'_>) -> usize {
    let n = src.remaining();
    src.advance(n);
    n
}

/// lseek on these devices succeeds and means nothing.
fn seek_nowhere(whence: u32) -> Result<u64> {
    if matches!(whence, SEEK_SET | SEEK_CUR | SEEK_END) { Ok(0) } else { Err(Errno::EINVAL) }
}

/// /dev/null.
pub(super) struct Null;

impl FileOps for Null {
    fn read(&self, _: &File, _: &mut IoDest<'_>, _: u64) -> Result<usize> {
        Ok(0)
    }
    fn write(&self, _: &File, src: &mut IoSource<'_>, _: u64) -> Result<usize> {
        Ok(discard(src))
    }
    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        Ok(0)
    }
    fn seek(&self, _: &File, _: u64, _: i64, whence: u32) -> Result<u64> {
        seek_nowhere(whence)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn put_zeroes(dst: &mut IoDest<'_>) -> Result<usize> {
    // In steps, so that one read of gigabytes does not pin that much.
    const STEP: usize = 4 << 20;
    let mut total = 0;
    loop {
        let n = dst.remaining().min(STEP);
        if n == 0 {
            return Ok(total);
        }
        match dst.put_zeroes(n) {
            Ok(got) => {
                total += got;
                if got < n {
                    return Ok(total);
                }
            }
            Err(e) if total == 0 => return Err(e),
            Err(_) => return Ok(total),
        }
    }
}

/// /dev/zero.
pub(super) struct Zero;

impl FileOps for Zero {
    fn read(&self, _: &File, dst: &mut IoDest<'_>, _: u64) -> Result<usize> {
        put_zeroes(dst)
    }
    fn write(&self, _: &File, src: &mut IoSource<'_>, _: u64) -> Result<usize> {
        Ok(discard(src))
    }
    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        Ok(0)
    }
    fn seek(&self, _: &File, _: u64, _: i64, whence: u32) -> Result<u64> {
        seek_nowhere(whence)
    }
    fn maps_anonymous(&self) -> bool {
        true
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// /dev/full.
pub(super) struct Full;

impl FileOps for Full {
    fn read(&self, _: &File, dst: &mut IoDest<'_>, _: u64) -> Result<usize> {
        put_zeroes(dst)
    }
    fn write(&self, _: &File, src: &mut IoSource<'_>, _: u64) -> Result<usize> {
        if src.remaining() == 0 { Ok(0) } else { Err(Errno::ENOSPC) }
    }
    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        Ok(0)
    }
    fn seek(&self, _: &File, _: u64, _: i64, whence: u32) -> Result<u64> {
        seek_nowhere(whence)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// /dev/random and /dev/urandom.
pub(super) struct Random {
    platform: Arc<dyn Platform>,
}

impl Random {
    pub(super) fn new(platform: Arc<dyn Platform>) -> Random {
        Random { platform }
    }
}

impl FileOps for Random {
    fn read(&self, _: &File, dst: &mut IoDest<'_>, _: u64) -> Result<usize> {
        let mut buffer = [0; 4096];
        let mut total = 0;
        loop {
            let n = dst.remaining().min(buffer.len());
            let Some(part) = buffer.get_mut(..n).filter(|p| !p.is_empty()) else { return Ok(total) };
            self.platform.random(part);
            match dst.put(part) {
                Ok(got) => {
                    total += got;
                    if got < n {
                        return Ok(total);
                    }
                }
                Err(e) if total == 0 => return Err(e),
                Err(_) => return Ok(total),
            }
        }
    }
    fn write(&self, _: &File, src: &mut IoSource<'_>, _: u64) -> Result<usize> {
        // Entropy from the program adds nothing to the host's.
        Ok(discard(src))
    }
    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        Ok(0)
    }
    fn seek(&self, _: &File, _: u64, _: i64, whence: u32) -> Result<u64> {
        seek_nowhere(whence)
    }
    fn ioctl(&self, _: &File, caller: &dyn Caller, request: u32, arg: u64) -> Result<u64> {
        const RNDGETENTCNT: u32 = 0x8004_5200;
        if request == RNDGETENTCNT {
            return crate::fs::anon::put_user(caller, arg, &256i32);
        }
        Err(Errno::EINVAL)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
