//! eventfd(2): a counter that can be waited for. Owns the counter.
use std::any::Any;
use std::sync::Arc;

use guest_abi::types::Stat;

use super::anon::{AnonInode, DEV_ANON};
use crate::event::{Events, WaitQueue};
use crate::lock::{Mutex, Rank};
use crate::mm::{IoDest, IoSource};
use crate::task::Task;
use crate::vfs::{File, FileOps, OpenFlags};
use crate::{Errno, Result};

/// An eventfd object.
pub struct EventFd {
    count: Mutex<u64>,
    semaphore: bool,
    queue: Arc<WaitQueue>,
    inode: AnonInode,
}

impl EventFd {
    /// A description of a new object that starts at `initial`.
    pub fn open(task: &Task, initial: u32, semaphore: bool, nonblocking: bool) -> Arc<File> {
        let ops = Arc::new(EventFd {
            count: Mutex::new(Rank::Pipe, u64::from(initial)),
            semaphore,
            queue: WaitQueue::new(),
            inode: AnonInode::new(task, DEV_ANON, 0o600),
        });
        let flags = if nonblocking { OpenFlags::RDWR | OpenFlags::NONBLOCK } else { OpenFlags::RDWR };
        File::new(ops, None, flags)
    }
}

impl FileOps for EventFd {
    fn read(&self, _file: &File, dst: &mut IoDest<'_>, _pos: u64) -> Result<usize> {
        if dst.remaining() < 8 {
            return Err(Errno::EINVAL);
        }
        let mut count = self.count.lock();
        if *count == 0 {
            return Err(Errno::EAGAIN);
        }
        let value = if self.semaphore { 1 } else { *count };
        *count -= value;
        drop(count);
        self.queue.wake_up_to(Events::WRITABLE, 1);
        dst.put(&value.to_ne_bytes())?;
        Ok(8)
    }

    fn write(&self, _file: &File, src: &mut IoSource<'_>, _pos: u64) -> Result<usize> {
        if src.remaining() < 8 {
            return Err(Errno::EINVAL);
        }
        let mut bytes = [0; 8];
        if src.take(&mut bytes)? < 8 {
            return Err(Errno::EFAULT);
        }
        let value = u64::from_ne_bytes(bytes);
        if value == u64::MAX {
            return Err(Errno::EINVAL);
        }
        let mut count = self.count.lock();
        match count.checked_add(value) {
            Some(sum) if sum < u64::MAX => *count = sum,
            _ => return Err(Errno::EAGAIN),
        }
        drop(count);
        self.queue.wake_up_to(Events::READABLE, 1);
        Ok(8)
    }

    fn poll(&self, _file: &File) -> Events {
        let count = *self.count.lock();
        let mut events = Events::empty();
        if count > 0 {
            events |= Events::IN;
        }
        if count < u64::MAX - 1 {
            events |= Events::OUT;
        }
        if count == u64::MAX {
            events |= Events::ERR;
        }
        events
    }

    fn wait_queue(&self) -> Option<Arc<WaitQueue>> {
        Some(self.queue.clone())
    }

    fn stat(&self) -> Option<Result<Stat>> {
        Some(Ok(self.inode.stat()))
    }

    fn proc_name(&self) -> Vec<u8> {
        b"anon_inode:[eventfd]".to_vec()
    }

    fn fdinfo(&self) -> Vec<u8> {
        format!("eventfd-count: {:16x}\neventfd-semaphore: {}\n", *self.count.lock(), u8::from(self.semaphore))
            .into_bytes()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
