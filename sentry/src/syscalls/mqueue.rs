//! POSIX message queues: mq_open(2), mq_unlink(2), mq_timedsend(2), mq_timedreceive(2), mq_notify(2), mq_getsetattr(2).
use std::any::Any;
use std::sync::{Arc, Weak};

use guest_abi::types::Timespec;
use guest_abi::{UserAddr, UserPtr};
use linux_raw_sys::general as raw;

use super::args::{Bits, Fd, PathArg};
use super::place;
use super::table::Row;
use super::time::SigEvent;
use crate::event::{Events, WaitEnd};
use crate::fs::mqueue::{MqFile, allowed};
use crate::ns::ipc::IpcNamespace;
use crate::ns::ipc_ids::seconds;
use crate::ns::mq::{MqQueue, NewQueue, Notified, PRIO_MAX};
use crate::ns::user::{Caps, Credentials};
use crate::ns::user_namespace::UserNamespace;
use crate::row;
use crate::signal::{Sender, Signal, code, info, send_to_group};
use crate::socket::netlink::NetlinkSocket;
use crate::socket::{Socket, socket_of};
use crate::task::limits::Resource;
use crate::task::{Pid, PidNamespace, Task, ThreadGroup};
use crate::time::Nanos;
use crate::timers::clock;
use crate::vfs::{File, OpenFlags};
use crate::{Errno, Result};

/// The rows of this area.
pub const ROWS: &[Row] = &[
    row!(240, mq_open(name: PathArg, oflag: Bits, mode: u32, attr: UserAddr), fast mq_open, Full),
    row!(241, mq_unlink(name: PathArg), fast mq_unlink, Full),
    row!(242, mq_timedsend(mqdes: Fd, msg_ptr: UserAddr, msg_len: u64, msg_prio: u32, abs_timeout: UserPtr<Timespec>),
        slow mq_timedsend, Full),
    row!(243, mq_timedreceive(mqdes: Fd, msg_ptr: UserAddr, msg_len: u64, msg_prio: UserPtr<u32>, abs_timeout: UserPtr<Timespec>),
        slow mq_timedreceive, Full),
    row!(244, mq_notify(mqdes: Fd, sevp: UserPtr<SigEvent>), fast mq_notify, Partial,
        "a registration ends with the process, not when it closes the queue"),
    row!(245, mq_getsetattr(mqdes: Fd, newattr: UserAddr, oldattr: UserAddr), fast mq_getsetattr, Full),
];

/// struct mq_attr: mq_flags, mq_maxmsg, mq_msgsize, mq_curmsgs, and four words that are reserved.
type Attr = [i64; 8];

fn namespace(task: &Task) -> Result<Arc<IpcNamespace>> {
    Ok(task.nsproxy()?.ipc.clone())
}

/// A name in the one directory that there is.
fn read_name(task: &Task, name: PathArg) -> Result<Vec<u8>> {
    let name = task.space()?.read_path(name.0)?;
    match name.as_slice() {
        b"" => Err(Errno::ENOENT),
        b"." | b".." => Err(Errno::EACCES),
        n if n.contains(&b'/') => Err(Errno::EACCES),
        n if n.len() > 255 => Err(Errno::ENAMETOOLONG),
        _ => Ok(name),
    }
}

fn permitted(queue: &MqQueue, by: &Credentials, wanted: u32) -> Result<()> {
    let (mode, uid, gid) = queue.access_attr();
    let granted = if by.fsuid == uid {
        mode >> 6
    } else if by.in_group(gid) {
        mode >> 3
    } else {
        mode
    };
    let able = wanted & !granted == 0
        || by.has_over(Caps::DAC_OVERRIDE, uid, gid)
        || wanted == 4 && by.has_over(Caps::DAC_READ_SEARCH, uid, gid);
    if able { Ok(()) } else { Err(Errno::EACCES) }
}

fn mq_open(task: &Arc<Task>, name: PathArg, oflag: Bits, mode: u32, attr: UserAddr) -> Result<u64> {
    let space = task.space()?;
    let attr: Option<Attr> = if attr.is_null() { None } else { Some(space.read(UserPtr::new(attr))?) };
    let name = read_name(task, name)?;
    let flags = oflag.0 as u32;
    let ipc = namespace(task)?;
    let credentials = task.credentials();
    let access = match flags & raw::O_ACCMODE {
        raw::O_RDONLY => 4,
        raw::O_WRONLY => 2,
        raw::O_RDWR => 6,
        _ => 0,
    };
    let queue = loop {
        match ipc.mq.find(&name) {
            Some(_) if flags & raw::O_CREAT != 0 && flags & raw::O_EXCL != 0 => return Err(Errno::EEXIST),
            Some(_) if access == 0 => return Err(Errno::EINVAL),
            Some(queue) => {
                permitted(&queue, &credentials, access)?;
                break queue;
            }
            None if flags & raw::O_CREAT == 0 => return Err(Errno::ENOENT),
            None => {}
        }
        let wanted = |n: i64| u64::try_from(n).unwrap_or(0);
        let new = NewQueue {
            mode: mode & 0o7777 & !task.fs().get().umask,
            attr: attr.map(|a| (wanted(a[1]), wanted(a[2]))),
            limit: allowed(task),
            now: seconds(&*task.kernel().platform),
        };
        match ipc.mq.create(&task.kernel().platform, &name, &new, &credentials) {
            // Somebody was faster.
            Err(Errno::EEXIST) => {}
            made => break made?,
        }
    };
    let status = OpenFlags::from_bits_truncate(flags & (raw::O_ACCMODE | raw::O_NONBLOCK));
    let file = File::new(Arc::new(MqFile::new(queue, &name, DEV_MQUEUE)), None, status);
    task.files().insert(file, true, 0, task.limit(Resource::Nofile)).map(|fd| fd as u64)
}

/// st_dev of queues that were not opened through a mount.
const DEV_MQUEUE: u64 = 0x13;

fn mq_unlink(task: &Arc<Task>, name: PathArg) -> Result<u64> {
    let name = read_name(task, name)?;
    let ipc = namespace(task)?;
    let queue = ipc.mq.find(&name).ok_or(Errno::ENOENT)?;
    // The directory is sticky.
    let (_, uid, gid) = queue.access_attr();
    let credentials = task.credentials();
    if credentials.fsuid != uid && !credentials.has_over(Caps::FOWNER, uid, gid) {
        return Err(Errno::EPERM);
    }
    let old = ipc.mq.remove(&name).ok_or(Errno::ENOENT)?;
    drop(old);
    Ok(0)
}

/// The open queue behind a descriptor. EBADF.
fn open_queue(task: &Task, fd: Fd) -> Result<(Arc<File>, Arc<MqQueue>)> {
    let file = place::file(task, fd)?;
    let queue = file.downcast::<MqFile>().ok_or(Errno::EBADF)?.queue().clone();
    Ok((file, queue))
}

fn deadline(task: &Task, at: UserPtr<Timespec>) -> Result<Option<Nanos>> {
    if at.is_null() {
        return Ok(None);
    }
    let at = clock::span(&task.space()?.read(at)?).ok_or(Errno::EINVAL)?;
    Ok(Some(clock::realtime_deadline(task.kernel(), at)))
}

fn ended<T>(end: Result<Result<T>, WaitEnd>) -> Result<T> {
    end.unwrap_or_else(|e| Err(if e == WaitEnd::TimedOut { Errno::ETIMEDOUT } else { Errno::ERESTARTSYS }))
}

async fn mq_timedsend(
    task: &Arc<Task>,
    fd: Fd,
    at: UserAddr,
    len: u64,
    priority: u32,
    abs_timeout: UserPtr<Timespec>,
) -> Result<u64> {
    let deadline = deadline(task, abs_timeout)?;
    if priority >= PRIO_MAX {
        return Err(Errno::EINVAL);
    }
    let (file, queue) = open_queue(task, fd)?;
    if !file.flags().writable() {
        return Err(Errno::EBADF);
    }
    let len = usize::try_from(len).ok().filter(|&n| n <= queue.size).ok_or(Errno::EMSGSIZE)?;
    // Charged before it is taken: a queue's maker may have allowed much.
    let room = crate::mm::Charge::new(&task.kernel().platform, crate::platform::KernelMemory::Buffer, len)?;
    let mut text = vec![0; len];
    task.space()?.read_bytes(at, &mut text)?;
    let send = || queue.send(&text, priority, seconds(&*task.kernel().platform), &**task as &dyn Any);
    if send()? {
        return Ok(0);
    }
    if file.nonblocking() {
        return Err(Errno::EAGAIN);
    }
    let attempt = || match send() {
        Ok(true) => Some(Ok(0)),
        Ok(false) => None,
        Err(e) => Some(Err(e)),
    };
    let end = task.wait(vec![(queue.events.clone(), Events::OUT)], deadline, attempt).await;
    drop(room);
    ended(end)
}

/// A task that waits for a message.
struct Receiver<'a>(&'a MqQueue);

impl Drop for Receiver<'_> {
    fn drop(&mut self) {
        self.0.waits(false);
    }
}

async fn mq_timedreceive(
    task: &Arc<Task>,
    fd: Fd,
    at: UserAddr,
    len: u64,
    priority: UserPtr<u32>,
    abs_timeout: UserPtr<Timespec>,
) -> Result<u64> {
    let deadline = deadline(task, abs_timeout)?;
    let (file, queue) = open_queue(task, fd)?;
    if !file.flags().readable() {
        return Err(Errno::EBADF);
    }
    if usize::try_from(len).is_ok_and(|n| n < queue.size) {
        return Err(Errno::EMSGSIZE);
    }
    let (text, kind) = match queue.receive(seconds(&*task.kernel().platform)) {
        Some(message) => message,
        None if file.nonblocking() => return Err(Errno::EAGAIN),
        None => {
            queue.waits(true);
            let _receiver = Receiver(&queue);
            let attempt = || queue.receive(seconds(&*task.kernel().platform)).map(Ok);
            ended(task.wait(vec![(queue.events.clone(), Events::IN)], deadline, attempt).await)?
        }
    };
    let space = task.space()?;
    if !priority.is_null() {
        space.write(priority, &kind)?;
    }
    space.write_bytes(at, &text)?;
    Ok(text.len() as u64)
}

/// How a process is told.
enum How {
    None,
    Signal(Signal, u64),
    /// glibc's helper thread waits on a netlink socket for the cookie (SIGEV_THREAD).
    Cookie(Arc<File>, [u8; COOKIE_LEN]),
}

const COOKIE_LEN: usize = 32;
const COOKIE_WOKEN: u8 = 1;
const COOKIE_REMOVED: u8 = 2;

struct Registration {
    group: Weak<ThreadGroup>,
    pid: Arc<Pid>,
    user_ns: Arc<UserNamespace>,
    how: How,
}

impl Registration {
    fn tell(&self, what: u8) {
        if let How::Cookie(file, cookie) = &self.how
            && let Ok(socket) = socket_of(file)
            && let Some(netlink) = socket.as_any().downcast_ref::<NetlinkSocket>()
        {
            let mut cookie = *cookie;
            cookie[COOKIE_LEN - 1] = what;
            netlink.deliver(cookie.to_vec());
        }
    }
}

impl Notified for Registration {
    fn arrived(&self, sender: &dyn Any) {
        self.tell(COOKIE_WOKEN);
        let How::Signal(signal, value) = self.how else { return };
        let (Some(group), Some(sender)) = (self.group.upgrade(), sender.downcast_ref::<Task>()) else { return };
        let pid = sender.group().pid().number_in(group.pid_namespace());
        let uid = self.user_ns.shown_user(sender.credentials().uid);
        let mut about = info::from_process(signal, code::SI_MESGQ, pid, uid);
        about.fields[1] = value;
        // A full queue of signals loses it, as on Linux.
        let _ = send_to_group(&group, signal, about, Sender::Event);
    }
    fn removed(&self) {
        self.tell(COOKIE_REMOVED);
    }
    fn is_of(&self, group: &dyn Any) -> bool {
        let group = group.downcast_ref::<ThreadGroup>();
        group.is_some_and(|g| core::ptr::eq(self.group.as_ptr(), g))
    }
    fn is_alive(&self) -> bool {
        self.group.upgrade().is_some_and(|g| !g.is_zombie())
    }
    fn shown(&self, reader: &dyn Any) -> (i32, i32, i32) {
        let (kind, signal) = match &self.how {
            How::None => (1, 0),
            How::Signal(signal, _) => (0, signal.number()),
            How::Cookie(..) => (2, 0),
        };
        (kind, signal, reader.downcast_ref::<PidNamespace>().map_or(0, |ns| self.pid.number_in(ns)))
    }
}

fn mq_notify(task: &Arc<Task>, fd: Fd, sevp: UserPtr<SigEvent>) -> Result<u64> {
    const SIGEV_SIGNAL: u32 = 0;
    const SIGEV_NONE: u32 = 1;
    const SIGEV_THREAD: u32 = 2;
    let space = task.space()?;
    let event = if sevp.is_null() { None } else { Some(space.read(sevp)?) };
    let how = match event {
        None => None,
        Some(e) => Some(match e.notify {
            SIGEV_NONE => How::None,
            SIGEV_SIGNAL => How::Signal(Signal::new(e.signo).ok_or(Errno::EINVAL)?, e.value),
            SIGEV_THREAD => {
                let cookie: [u8; COOKIE_LEN] = space.read(UserPtr::new(UserAddr(e.value)))?;
                let file = place::file(task, Fd(e.signo))?;
                let socket: &Arc<dyn Socket> = socket_of(&file)?;
                if socket.as_any().downcast_ref::<NetlinkSocket>().is_none() {
                    return Err(Errno::EINVAL);
                }
                How::Cookie(file, cookie)
            }
            _ => return Err(Errno::EINVAL),
        }),
    };
    let (_, queue) = open_queue(task, fd)?;
    let group: &ThreadGroup = task.group();
    match how {
        None => queue.forget(group),
        Some(how) => queue.notify(Arc::new(Registration {
            group: Arc::downgrade(task.group()),
            pid: task.group().pid().clone(),
            user_ns: task.credentials().user_ns.clone(),
            how,
        }))?,
    }
    Ok(0)
}

fn mq_getsetattr(task: &Arc<Task>, fd: Fd, new: UserAddr, old: UserAddr) -> Result<u64> {
    const NONBLOCK: i64 = raw::O_NONBLOCK as i64;
    let space = task.space()?;
    let new: Option<Attr> = if new.is_null() { None } else { Some(space.read(UserPtr::new(new))?) };
    if new.is_some_and(|a| a[0] & !NONBLOCK != 0) {
        return Err(Errno::EINVAL);
    }
    let (file, queue) = open_queue(task, fd)?;
    let flags = if file.nonblocking() { NONBLOCK } else { 0 };
    let was: Attr = [flags, queue.messages as i64, queue.size as i64, queue.count() as i64, 0, 0, 0, 0];
    if let Some(new) = new {
        let value = if new[0] & NONBLOCK != 0 { OpenFlags::NONBLOCK } else { OpenFlags::empty() };
        file.set_flags(value, OpenFlags::NONBLOCK);
    }
    if !old.is_null() {
        space.write(UserPtr::new(old), &was)?;
    }
    Ok(0)
}
