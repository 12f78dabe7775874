//! File systems by their names, for mount(2). Owns how options are read; never where anything is mounted.
use std::sync::Arc;

use super::dev::new_dev_fs;
use super::mqueue::MqFs;
use super::proc::ProcFs;
use super::pts::DevPts;
use super::sys::SysFs;
use super::tmpfs::{TmpFs, TmpfsOptions};
use crate::ns::Owner;
use crate::ns::user::Caps;
use crate::ns::user_namespace::IdKind;
use crate::task::Task;
use crate::vfs::FileSystem;
use crate::{Errno, Result};

/// Whether `task` may mount a file system of type `kind` that shows a namespace: only with power over that. EPERM.
pub fn may_show(task: &Task, kind: &[u8]) -> Result<()> {
    let own = task.credentials();
    let power = |owner: &Owner| own.has_in(&owner.user_ns, Caps::SYS_ADMIN);
    let may = match kind {
        b"proc" => power(&task.pid_namespace().owner),
        b"sysfs" => power(&task.net().owner),
        b"mqueue" => power(&task.nsproxy()?.ipc.owner),
        b"devtmpfs" => own.has(Caps::SYS_ADMIN),
        _ => true,
    };
    if may { Ok(()) } else { Err(Errno::EPERM) }
}

/// A new file system of type `kind` with the options of mount(2)'s `data`. ENODEV for a type that the sandbox has not, EINVAL
/// for an option that the type does not know.
pub fn new_file_system(task: &Arc<Task>, kind: &[u8], data: &[u8]) -> Result<Arc<dyn FileSystem>> {
    let kernel = task.kernel();
    Ok(match kind {
        b"proc" => ProcFs::new(kernel, task.pid_namespace().clone()),
        b"sysfs" => SysFs::new(kernel),
        b"tmpfs" | b"ramfs" => TmpFs::new(kernel.platform.clone(), tmpfs_options(task, data)?, "tmpfs")?,
        b"devpts" => DevPts::new(kernel),
        b"mqueue" => MqFs::new(&kernel.platform, task.nsproxy()?.ipc.clone()),
        b"devtmpfs" => new_dev_fs(&kernel.platform)?,
        _ => return Err(Errno::ENODEV),
    })
}

/// A size with a suffix k, m or g (tmpfs(5)); `%` is of the sandbox's memory.
fn size(text: &str, memory: u64) -> Result<u64> {
    if let Some(percent) = text.strip_suffix('%') {
        let percent: u64 = percent.parse().map_err(|_| Errno::EINVAL)?;
        return Ok(u64::try_from(u128::from(memory) * u128::from(percent) / 100).unwrap_or(u64::MAX));
    }
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 20),
        Some(b'g' | b'G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let n: u64 = digits.parse().map_err(|_| Errno::EINVAL)?;
    n.checked_mul(1 << shift).ok_or(Errno::EINVAL)
}

fn tmpfs_options(task: &Task, data: &[u8]) -> Result<TmpfsOptions> {
    let credentials = task.credentials();
    let mut options = TmpfsOptions { uid: credentials.fsuid, gid: credentials.fsgid, ..TmpfsOptions::default() };
    let memory = task.kernel().platform.memory().limit();
    let text = core::str::from_utf8(data).map_err(|_| Errno::EINVAL)?;
    let id = |text: &str, kind| {
        let id = text.parse().map_err(|_| Errno::EINVAL)?;
        credentials.user_ns.to_initial(kind, id).ok_or(Errno::EINVAL)
    };
    for option in text.split(',').filter(|o| !o.is_empty()) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        match name {
            // 0 means no limit.
            "size" => options.size = Some(size(value, memory)?).map(|n| if n == 0 { memory } else { n }),
            "nr_blocks" => options.size = Some(size(value, memory)?.saturating_mul(4096)),
            "nr_inodes" => options.inodes = Some(size(value, memory)?).filter(|&n| n > 0),
            "mode" => options.mode = u32::from_str_radix(value, 8).map_err(|_| Errno::EINVAL)? & 0o7777,
            "uid" => options.uid = id(value, IdKind::User)?,
            "gid" => options.gid = id(value, IdKind::Group)?,
            "inode64" | "inode32" => {}
            "huge" if value == "never" => {}
            _ => return Err(Errno::EINVAL),
        }
    }
    Ok(options)
}
