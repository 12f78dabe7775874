//! Open regular files of an overlay. A description opened before copy-up reads the new contents after it; a mapping keeps
//! what it showed.
use std::any::Any;
use std::sync::Arc;

use guest_abi::types::Stat;
use linux_raw_sys::general::{SEEK_DATA, SEEK_HOLE};

use super::Node;
use crate::fs::host::Content;
use crate::fs::tmpfs::data::FileData;
use crate::fs::tmpfs::{TmpInode, read_inode, seek_data, write_inode};
use crate::mm::{IoDest, IoSource, Mappable};
use crate::platform::host::AttrChange;
use crate::vfs::{File, FileOps, Inode, path};
use crate::{Errno, Result};

/// An open regular file.
pub struct OverlayFile {
    node: Arc<Node>,
    /// The host's contents, for a node that had not changed when it was opened.
    lower: Option<Arc<Content>>,
}

impl OverlayFile {
    pub(super) fn open(node: Arc<Node>, write: bool) -> Result<OverlayFile> {
        if write {
            node.upper()?;
        }
        let lower = node.lower_content()?;
        Ok(OverlayFile { node, lower })
    }

    fn upper(&self) -> Result<&Arc<TmpInode>> {
        self.node.changed().ok_or(Errno::EBADF)
    }

    fn data(&self) -> Result<&Arc<FileData>> {
        self.upper()?.data().ok_or(Errno::EINVAL)
    }

    /// The host's contents while they are what the file shows.
    fn unchanged(&self) -> Option<&Arc<Content>> {
        if self.node.changed().is_some() { None } else { self.lower.as_ref() }
    }
}

impl FileOps for OverlayFile {
    fn read(&self, file: &File, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
        match self.unchanged() {
            Some(content) => content.read(dst, pos, usize::MAX),
            None => read_inode(self.upper()?, file, dst, pos),
        }
    }
    fn write(&self, file: &File, src: &mut IoSource<'_>, pos: u64) -> Result<usize> {
        Ok(write_inode(self.upper()?, file, src, pos)?.0)
    }
    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        match self.unchanged() {
            Some(content) => content.length(),
            None => Ok(self.data()?.length()),
        }
    }
    fn seek(&self, _file: &File, pos: u64, offset: i64, whence: u32) -> Result<u64> {
        let Some(content) = self.unchanged() else {
            return seek_data(self.data()?, pos, offset, whence);
        };
        match whence {
            SEEK_DATA | SEEK_HOLE => {
                // One extent of data, as a file system without knowledge of holes answers.
                let at = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
                let len = content.length()?;
                if at >= len { Err(Errno::ENXIO) } else { Ok(if whence == SEEK_DATA { at } else { len }) }
            }
            _ => path::default_seek(true, || content.length(), pos, offset, whence),
        }
    }
    fn mappable(&self) -> Result<Arc<dyn Mappable>> {
        match self.unchanged() {
            Some(content) => Ok(content.clone()),
            None => Ok(self.data()?.clone()),
        }
    }
    fn truncate(&self, len: u64) -> Result<()> {
        self.node.set_attr(&AttrChange { size: Some(len), ..AttrChange::default() })
    }
    fn allocate(&self, mode: u32, offset: u64, len: u64) -> Result<()> {
        self.data()?.allocate(mode, offset, len)?;
        self.upper()?.touch();
        Ok(())
    }
    fn sync(&self, _data_only: bool) -> Result<()> {
        Ok(())
    }
    fn stat(&self) -> Option<Result<Stat>> {
        // The open file says it with one host call, and of the very file that was opened.
        let content = self.unchanged().filter(|_| !self.node.is_gone())?;
        Some(content.stat().map(|st| Stat { dev: self.node.id.0, ino: self.node.id.1, ..st }))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
