//! Open files and directories of a host tree.
use std::any::Any;
use std::sync::Arc;

use super::{Content, HostInode};
use crate::lock::{Mutex, Rank};
use crate::mm::{IoDest, IoSource, Mappable};
use crate::platform::host::HostDirEntry;
use crate::vfs::file::Caller;
use crate::vfs::{DirSink, File, FileOps, OpenFlags};
use crate::{Errno, Result};

/// An open regular file.
pub struct HostRegular {
    content: Arc<Content>,
}

impl HostRegular {
    /// Of contents opened with the rights needed.
    pub fn new(content: Arc<Content>) -> HostRegular {
        HostRegular { content }
    }
}

impl FileOps for HostRegular {
    fn read(&self, _file: &File, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
        self.content.read(dst, pos, usize::MAX)
    }
    fn write(&self, file: &File, src: &mut IoSource<'_>, pos: u64) -> Result<usize> {
        let at = if file.flags().contains(OpenFlags::APPEND) { self.content.length()? } else { pos };
        self.content.write(src, at)
    }
    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        self.content.length()
    }
    fn mappable(&self) -> Result<Arc<dyn Mappable>> {
        Ok(self.content.clone())
    }
    fn truncate(&self, len: u64) -> Result<()> {
        self.content.truncate(len)
    }
    fn allocate(&self, mode: u32, offset: u64, len: u64) -> Result<()> {
        let end = offset.checked_add(len).ok_or(Errno::EFBIG)?;
        if mode != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if end > self.content.length()? { self.content.truncate(end) } else { Ok(()) }
    }
    fn sync(&self, data_only: bool) -> Result<()> {
        self.content.sync(data_only)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A listing taken when reading began, so that positions stay valid for one opened directory.
pub struct HostDir {
    inode: Arc<HostInode>,
    listing: Mutex<Option<Arc<[HostDirEntry]>>>,
}

impl HostDir {
    /// Of a directory.
    pub fn new(inode: Arc<HostInode>) -> HostDir {
        HostDir { inode, listing: Mutex::new(Rank::Leaf, None) }
    }

    fn listing(&self, pos: u64) -> Result<Arc<[HostDirEntry]>> {
        if pos > 0
            && let Some(known) = &*self.listing.lock()
        {
            return Ok(known.clone());
        }
        let fresh: Arc<[HostDirEntry]> = self.inode.list()?.into();
        let old = self.listing.lock().replace(fresh.clone());
        drop(old);
        Ok(fresh)
    }
}

const DT_DIR: u8 = 4;

impl FileOps for HostDir {
    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        Ok(i64::MAX as u64)
    }
    fn read(&self, _file: &File, _dst: &mut IoDest<'_>, _pos: u64) -> Result<usize> {
        Err(Errno::EISDIR)
    }
    fn read_dir(&self, file: &File, _caller: &dyn Caller, mut pos: u64, sink: &mut dyn DirSink) -> Result<u64> {
        let listing = self.listing(pos)?;
        if pos < 2 {
            let own = self.inode.host_stat()?.ino;
            if pos == 0 {
                if !sink.add(b".", own, DT_DIR, 1) {
                    return Ok(pos);
                }
                pos = 1;
            }
            if !sink.add(b"..", crate::fs::parent_ino(file).unwrap_or(own), DT_DIR, 2) {
                return Ok(pos);
            }
            pos = 2;
        }
        let from = usize::try_from(pos - 2).unwrap_or(usize::MAX);
        for entry in listing.get(from..).unwrap_or_default() {
            if !sink.add(&entry.name, entry.ino, entry.kind, pos + 1) {
                break;
            }
            pos += 1;
        }
        Ok(pos)
    }
    fn sync(&self, _data_only: bool) -> Result<()> {
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
