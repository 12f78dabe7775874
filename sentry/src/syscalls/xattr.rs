//! Extended attributes (xattr(7)).
use std::sync::Arc;

use guest_abi::UserAddr;
use linux_raw_sys::general as raw;

use super::args::{Bits, Fd, PathArg};
use super::place::{self, CWD, Named};
use super::table::Row;
use crate::ns::user::Caps;
use crate::row;
use crate::task::Task;
use crate::vfs::attr;
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(188, setxattr(path: PathArg, name: UserAddr, value: UserAddr, size: u64, flags: Bits), fast setxattr, Full),
    row!(189, lsetxattr(path: PathArg, name: UserAddr, value: UserAddr, size: u64, flags: Bits), fast lsetxattr, Full),
    row!(190, fsetxattr(fd: Fd, name: UserAddr, value: UserAddr, size: u64, flags: Bits), fast fsetxattr, Full),
    row!(191, getxattr(path: PathArg, name: UserAddr, value: UserAddr, size: u64), fast getxattr, Full),
    row!(192, lgetxattr(path: PathArg, name: UserAddr, value: UserAddr, size: u64), fast lgetxattr, Full),
    row!(193, fgetxattr(fd: Fd, name: UserAddr, value: UserAddr, size: u64), fast fgetxattr, Full),
    row!(194, listxattr(path: PathArg, list: UserAddr, size: u64), fast listxattr, Full),
    row!(195, llistxattr(path: PathArg, list: UserAddr, size: u64), fast llistxattr, Full),
    row!(196, flistxattr(fd: Fd, list: UserAddr, size: u64), fast flistxattr, Full),
    row!(197, removexattr(path: PathArg, name: UserAddr), fast removexattr, Full),
    row!(198, lremovexattr(path: PathArg, name: UserAddr), fast lremovexattr, Full),
    row!(199, fremovexattr(fd: Fd, name: UserAddr), fast fremovexattr, Full),
];

const XATTR_NAME_MAX: usize = 255;
const XATTR_SIZE_MAX: u64 = 65536;

fn read_name(task: &Task, name: UserAddr) -> Result<Vec<u8>> {
    let name = task.space()?.read_cstr(name, XATTR_NAME_MAX + 1, Errno::ERANGE)?;
    if name.is_empty() { Err(Errno::ERANGE) } else { Ok(name) }
}

/// The subject of a call, by path or by descriptor.
fn subject(task: &Arc<Task>, path: PathArg, follow: bool) -> Result<Named> {
    let flags = if follow { 0 } else { raw::AT_SYMLINK_NOFOLLOW };
    place::named(&place::lookup(task), task, CWD, path, flags)
}

fn by_fd(task: &Task, fd: Fd) -> Result<Named> {
    place::file(task, fd).map(Named::File)
}

fn inode(named: &Named) -> Result<&Arc<dyn crate::vfs::Inode>> {
    named.path().map(|p| p.inode()).map_err(|_| Errno::EOPNOTSUPP)
}

fn set(task: &Arc<Task>, named: &Named, name: UserAddr, value: UserAddr, size: u64, flags: Bits) -> Result<u64> {
    let flags = flags.0 as u32;
    if flags & !(raw::XATTR_CREATE | raw::XATTR_REPLACE) != 0 {
        return Err(Errno::EINVAL);
    }
    let name = read_name(task, name)?;
    if size > XATTR_SIZE_MAX {
        return Err(Errno::E2BIG);
    }
    let mut bytes = vec![0; size as usize];
    task.space()?.read_bytes(value, &mut bytes)?;
    attr::xattr_permission(&place::lookup(task), named.target(), &name, true)?;
    inode(named)?.set_xattr(&name, &bytes, flags)?;
    Ok(0)
}

fn answer(task: &Task, buf: UserAddr, size: u64, bytes: &[u8]) -> Result<u64> {
    let len = bytes.len() as u64;
    if size > 0 {
        if len > size {
            return Err(Errno::ERANGE);
        }
        task.space()?.write_bytes(buf, bytes)?;
    }
    Ok(len)
}

fn get(task: &Arc<Task>, named: &Named, name: UserAddr, value: UserAddr, size: u64) -> Result<u64> {
    let name = read_name(task, name)?;
    attr::xattr_permission(&place::lookup(task), named.target(), &name, false)?;
    let bytes = inode(named)?.get_xattr(&name)?;
    answer(task, value, size, &bytes)
}

fn list(task: &Arc<Task>, named: &Named, list: UserAddr, size: u64) -> Result<u64> {
    let trusted = task.credentials().has(Caps::SYS_ADMIN);
    let mut bytes = Vec::new();
    let Ok(inode) = inode(named) else { return Ok(0) };
    for name in inode.list_xattr()? {
        if trusted || !name.starts_with(b"trusted.") {
            bytes.extend_from_slice(&name);
            bytes.push(0);
        }
    }
    answer(task, list, size, &bytes)
}

fn remove(task: &Arc<Task>, named: &Named, name: UserAddr) -> Result<u64> {
    let name = read_name(task, name)?;
    attr::xattr_permission(&place::lookup(task), named.target(), &name, true)?;
    inode(named)?.remove_xattr(&name)?;
    Ok(0)
}

fn setxattr(task: &Arc<Task>, path: PathArg, name: UserAddr, value: UserAddr, size: u64, flags: Bits) -> Result<u64> {
    set(task, &subject(task, path, true)?, name, value, size, flags)
}

fn lsetxattr(task: &Arc<Task>, path: PathArg, name: UserAddr, value: UserAddr, size: u64, flags: Bits) -> Result<u64> {
    set(task, &subject(task, path, false)?, name, value, size, flags)
}

fn fsetxattr(task: &Arc<Task>, fd: Fd, name: UserAddr, value: UserAddr, size: u64, flags: Bits) -> Result<u64> {
    set(task, &by_fd(task, fd)?, name, value, size, flags)
}

fn getxattr(task: &Arc<Task>, path: PathArg, name: UserAddr, value: UserAddr, size: u64) -> Result<u64> {
    get(task, &subject(task, path, true)?, name, value, size)
}

fn lgetxattr(task: &Arc<Task>, path: PathArg, name: UserAddr, value: UserAddr, size: u64) -> Result<u64> {
    get(task, &subject(task, path, false)?, name, value, size)
}

fn fgetxattr(task: &Arc<Task>, fd: Fd, name: UserAddr, value: UserAddr, size: u64) -> Result<u64> {
    get(task, &by_fd(task, fd)?, name, value, size)
}

fn listxattr(task: &Arc<Task>, path: PathArg, buf: UserAddr, size: u64) -> Result<u64> {
    list(task, &subject(task, path, true)?, buf, size)
}

fn llistxattr(task: &Arc<Task>, path: PathArg, buf: UserAddr, size: u64) -> Result<u64> {
    list(task, &subject(task, path, false)?, buf, size)
}

fn flistxattr(task: &Arc<Task>, fd: Fd, buf: UserAddr, size: u64) -> Result<u64> {
    list(task, &by_fd(task, fd)?, buf, size)
}

fn removexattr(task: &Arc<Task>, path: PathArg, name: UserAddr) -> Result<u64> {
    remove(task, &subject(task, path, true)?, name)
}

fn lremovexattr(task: &Arc<Task>, path: PathArg, name: UserAddr) -> Result<u64> {
    remove(task, &subject(task, path, false)?, name)
}

fn fremovexattr(task: &Arc<Task>, fd: Fd, name: UserAddr) -> Result<u64> {
    remove(task, &by_fd(task, fd)?, name)
}
