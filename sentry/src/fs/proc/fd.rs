//! /proc/PID/fd and fdinfo.
use std::sync::Arc;

use super::node::What;
use super::{Cx, Row, object};
use crate::vfs::{File, OpenFlags, PathRef};
use crate::{Errno, Result};

/// A link in fd/.
pub(super) static FD: Row = Row { name: "", mode: 0o700, what: What::Fd };
/// A file in fdinfo/.
pub(super) static FDINFO: Row = Row { name: "", mode: 0o444, what: What::FdInfo };

pub(super) fn file(cx: &Cx, fd: i32) -> Result<Arc<File>> {
    cx.task()?.files().get(fd).map_err(|_| Errno::ENOENT)
}

/// Permission bits of the link: how the description may be used.
pub(super) fn link_mode(cx: &Cx, fd: i32) -> Result<u32> {
    let flags = file(cx, fd)?.flags();
    let path_only = flags.contains(OpenFlags::PATH);
    Ok(0o100 | if flags.readable() || path_only { 0o400 } else { 0 } | if flags.writable() { 0o200 } else { 0 })
}

/// Where the link leads: where the description was opened, or the object itself.
pub(super) fn place(cx: &Cx, fd: i32) -> Result<PathRef> {
    let file = file(cx, fd)?;
    Ok(file.path().cloned().unwrap_or_else(|| object::place(&cx.shared.objects, file)))
}

/// The text of the link.
pub(super) fn link_text(cx: &Cx, fd: i32) -> Result<Vec<u8>> {
    let file = file(cx, fd)?;
    let place = file.path().filter(|p| !object::is_object(p));
    Ok(place.map_or_else(|| file.ops().proc_name(), PathRef::absolute))
}

/// The text of fdinfo/N (proc_pid_fdinfo(5)).
pub(super) fn info(cx: &Cx, fd: i32) -> Result<Vec<u8>> {
    let task = cx.task()?;
    let (file, cloexec) = task.files().get_with_flag(fd).map_err(|_| Errno::ENOENT)?;
    let mut flags = file.flags().bits() | OpenFlags::LARGEFILE.bits();
    if cloexec {
        flags |= OpenFlags::CLOEXEC.bits();
    }
    let mount = file.path().map_or(15, |p| p.mount.id());
    let ino = match file.ops().stat() {
        Some(st) => st.map_or(0, |s| s.ino),
        None => file.path().and_then(|p| p.inode().stat().ok()).map_or(0, |s| s.ino),
    };
    let mut out =
        format!("pos:\t{}\nflags:\t0{flags:o}\nmnt_id:\t{mount}\nino:\t{ino}\n", file.position_seen()).into_bytes();
    out.extend_from_slice(&file.ops().fdinfo_for(&*cx.shared.ns));
    Ok(out)
}
