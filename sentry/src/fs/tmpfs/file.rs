//! Open files and directories of tmpfs, and memfd (memfd_create(2)).
use std::any::Any;
use std::sync::Arc;

use guest_abi::types::Stat;
use linux_raw_sys::general::{SEEK_DATA, SEEK_HOLE};

use super::TmpShared;
use super::data::FileData;
use super::dir::FIRST_COOKIE;
use super::inode::TmpInode;
use crate::mm::{IoDest, IoSource, Mappable};
use crate::platform::host::AttrChange;
use crate::vfs::file::Caller;
use crate::vfs::inode::Create;
use crate::vfs::{DirSink, File, FileOps, Inode, OpenFlags, OpenResult, path};
use crate::{Errno, Result};

/// lseek(2) over in-memory contents.
pub(crate) fn seek_data(data: &FileData, pos: u64, offset: i64, whence: u32) -> Result<u64> {
    match whence {
        SEEK_DATA | SEEK_HOLE => {
            let at = u64::try_from(offset).map_err(|_| Errno::ENXIO)?;
            data.seek_data(at, whence == SEEK_DATA)
        }
        _ => path::default_seek(true, || Ok(data.length()), pos, offset, whence),
    }
}

/// An open regular file.
pub struct TmpFile {
    inode: Arc<TmpInode>,
}

impl TmpFile {
    /// Of a regular inode.
    pub fn new(inode: Arc<TmpInode>) -> TmpFile {
        TmpFile { inode }
    }

    /// The inode.
    pub fn inode(&self) -> &Arc<TmpInode> {
        &self.inode
    }

    fn data(&self) -> Result<&Arc<FileData>> {
        self.inode.data().ok_or(Errno::EINVAL)
    }
}

/// read(2) of an in-memory regular inode.
pub(crate) fn read_inode(inode: &TmpInode, file: &File, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
    let n = inode.data().ok_or(Errno::EINVAL)?.read(dst, pos)?;
    if !file.flags().contains(OpenFlags::NOATIME) {
        inode.accessed();
    }
    Ok(n)
}

/// write(2) of an in-memory regular inode; gives the count and the position after it.
pub(crate) fn write_inode(inode: &TmpInode, file: &File, src: &mut IoSource<'_>, pos: u64) -> Result<(usize, u64)> {
    let append = file.flags().contains(OpenFlags::APPEND);
    let done = inode.data().ok_or(Errno::EINVAL)?.write(src, pos, append)?;
    if done.0 > 0 {
        inode.touch();
    }
    Ok(done)
}

impl FileOps for TmpFile {
    fn read(&self, file: &File, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
        read_inode(&self.inode, file, dst, pos)
    }
    fn write(&self, file: &File, src: &mut IoSource<'_>, pos: u64) -> Result<usize> {
        Ok(write_inode(&self.inode, file, src, pos)?.0)
    }
    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        Ok(self.data()?.length())
    }
    fn seek(&self, _file: &File, pos: u64, offset: i64, whence: u32) -> Result<u64> {
        seek_data(self.data()?, pos, offset, whence)
    }
    fn mappable(&self) -> Result<Arc<dyn Mappable>> {
        Ok(self.data()?.clone())
    }
    fn truncate(&self, len: u64) -> Result<()> {
        self.inode.set_attr(&AttrChange { size: Some(len), ..AttrChange::default() })
    }
    fn allocate(&self, mode: u32, offset: u64, len: u64) -> Result<()> {
        self.data()?.allocate(mode, offset, len)?;
        self.inode.touch();
        Ok(())
    }
    fn sync(&self, _data_only: bool) -> Result<()> {
        Ok(())
    }
    fn seals(&self) -> Option<u32> {
        self.data().ok().map(|d| d.seals())
    }
    fn add_seals(&self, seals: u32) -> Result<()> {
        self.data()?.add_seals(seals)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// An open directory.
pub struct TmpDir {
    inode: Arc<TmpInode>,
}

impl TmpDir {
    /// Of a directory inode.
    pub fn new(inode: Arc<TmpInode>) -> TmpDir {
        TmpDir { inode }
    }
}

const DT_DIR: u8 = 4;

impl FileOps for TmpDir {
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
        if pos == 0 {
            if !sink.add(b".", self.inode.ino(), DT_DIR, 1) {
                return Ok(pos);
            }
            pos = 1;
        }
        if pos == 1 {
            if !sink.add(b"..", self.inode.parent_ino(), DT_DIR, FIRST_COOKIE) {
                return Ok(pos);
            }
            pos = FIRST_COOKIE;
        }
        {
            let children = self.inode.children()?.lock();
            for (cookie, name, child) in children.range(pos) {
                if !sink.add(name, child.ino(), child.kind().dirent(), cookie + 1) {
                    break;
                }
                pos = cookie + 1;
            }
        }
        if !file.flags().contains(OpenFlags::NOATIME) {
            self.inode.accessed();
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

/// A file without a place in any tree.
pub struct MemFd {
    file: TmpFile,
    name: Vec<u8>,
}

impl MemFd {
    /// A new file; `name` as the caller of memfd_create(2) gave it.
    pub fn new(shared: &Arc<TmpShared>, name: &[u8], uid: u32, gid: u32, sealing: bool, exec: bool) -> Result<MemFd> {
        let inode = TmpInode::new(shared, Create::Regular, if exec { 0o777 } else { 0o666 }, uid, gid)?;
        inode.change_attr(|a| a.nlink = 0);
        inode.allow_sealing(sealing, !exec);
        Ok(MemFd { file: TmpFile::new(inode), name: name.to_vec() })
    }

    /// The inode.
    pub fn inode(&self) -> &Arc<TmpInode> {
        &self.file.inode
    }
}

impl FileOps for MemFd {
    fn read(&self, file: &File, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
        self.file.read(file, dst, pos)
    }
    fn write(&self, file: &File, src: &mut IoSource<'_>, pos: u64) -> Result<usize> {
        self.file.write(file, src, pos)
    }
    fn seekable(&self) -> bool {
        true
    }
    fn size(&self) -> Result<u64> {
        self.file.size()
    }
    fn seek(&self, file: &File, pos: u64, offset: i64, whence: u32) -> Result<u64> {
        self.file.seek(file, pos, offset, whence)
    }
    fn mappable(&self) -> Result<Arc<dyn Mappable>> {
        self.file.mappable()
    }
    fn truncate(&self, len: u64) -> Result<()> {
        self.file.truncate(len)
    }
    fn allocate(&self, mode: u32, offset: u64, len: u64) -> Result<()> {
        self.file.allocate(mode, offset, len)
    }
    fn sync(&self, _data_only: bool) -> Result<()> {
        Ok(())
    }
    fn stat(&self) -> Option<Result<Stat>> {
        Some(Inode::stat(&*self.file.inode))
    }
    fn set_attr(&self, change: &AttrChange) -> Option<Result<()>> {
        Some(Inode::set_attr(&*self.file.inode, change))
    }
    fn reopen(&self, _caller: &dyn Caller, _flags: OpenFlags) -> Result<OpenResult> {
        let file = TmpFile::new(self.file.inode.clone());
        Ok(OpenResult::Ops(Arc::new(MemFd { file, name: self.name.clone() })))
    }
    fn proc_name(&self) -> Vec<u8> {
        [b"/memfd:", &self.name[..], b" (deleted)"].concat()
    }
    fn seals(&self) -> Option<u32> {
        self.file.seals()
    }
    fn add_seals(&self, seals: u32) -> Result<()> {
        self.file.add_seals(seals)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}
