//! pipe(2), pipe2(2), eventfd(2), eventfd2(2).
use std::sync::Arc;

use guest_abi::UserPtr;
use linux_raw_sys::general as raw;

use crate::fs::eventfd::EventFd;
use crate::fs::pipe::new_pipe;
use crate::row;
use crate::syscalls::table::Row;
use crate::task::Task;
use crate::task::limits::Resource;
use crate::vfs::OpenFlags;
use crate::{Errno, Result};

/// Rows of this area.
pub const ROWS: &[Row] = &[
    row!(22, pipe(pipefd: UserPtr<[i32; 2]>), fast pipe, Full),
    row!(293, pipe2(pipefd: UserPtr<[i32; 2]>, flags: u32), fast pipe2, Full),
    row!(284, eventfd(initval: u32), fast eventfd, Full),
    row!(290, eventfd2(initval: u32, flags: u32), fast eventfd2, Full),
];

fn pipe(task: &Arc<Task>, pipefd: UserPtr<[i32; 2]>) -> Result<u64> {
    pipe2(task, pipefd, 0)
}

fn pipe2(task: &Arc<Task>, pipefd: UserPtr<[i32; 2]>, flags: u32) -> Result<u64> {
    let flags = OpenFlags::from_bits_retain(flags);
    if !(flags - (OpenFlags::CLOEXEC | OpenFlags::NONBLOCK | OpenFlags::DIRECT)).is_empty() {
        return Err(Errno::EINVAL);
    }
    let cloexec = flags.contains(OpenFlags::CLOEXEC);
    let (reader, writer) = new_pipe(task, flags)?;
    let files = task.files();
    let limit = task.limit(Resource::Nofile);
    let read_fd = files.insert(reader, cloexec, 0, limit)?;
    let write_fd = match files.insert(writer, cloexec, 0, limit) {
        Ok(fd) => fd,
        Err(e) => {
            let removed = files.remove(read_fd);
            drop(removed);
            return Err(e);
        }
    };
    let copied = task.space().and_then(|s| s.write(pipefd, &[read_fd, write_fd]));
    if let Err(e) = copied {
        let removed = (files.remove(read_fd), files.remove(write_fd));
        drop(removed);
        return Err(e);
    }
    Ok(0)
}

fn eventfd(task: &Arc<Task>, initval: u32) -> Result<u64> {
    eventfd2(task, initval, 0)
}

fn eventfd2(task: &Arc<Task>, initval: u32, flags: u32) -> Result<u64> {
    const EFD_SEMAPHORE: u32 = 1;
    if flags & !(EFD_SEMAPHORE | raw::O_CLOEXEC | raw::O_NONBLOCK) != 0 {
        return Err(Errno::EINVAL);
    }
    let file = EventFd::open(task, initval, flags & EFD_SEMAPHORE != 0, flags & raw::O_NONBLOCK != 0);
    let cloexec = flags & raw::O_CLOEXEC != 0;
    let fd = task.files().insert(file, cloexec, 0, task.limit(Resource::Nofile))?;
    Ok(u64::try_from(fd).unwrap_or_default())
}
