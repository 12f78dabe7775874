//! pidfds and namespaces by descriptor: pidfd_open(2), pidfd_send_signal(2), pidfd_getfd(2), unshare(2), setns(2), reboot(2).
use std::sync::Arc;

use guest_abi::types::SigInfo;
use guest_abi::{UserAddr, UserPtr};

use super::args::{Bits, Fd};
use super::table::Row;
use crate::fs::proc::process_of;
use crate::ns::user::Caps;
use crate::row;
use crate::signal::send::{self, Directed};
use crate::signal::{self, Sender, Signal};
use crate::task::clone::flag;
use crate::task::limits::Resource;
use crate::task::ns_file::{Kind, NsFile};
use crate::task::nsproxy::Namespace;
use crate::task::pidfd::{self, PidFd};
use crate::task::{Pid, Task, access, exit};
use crate::vfs::{File, OpenFlags};
use crate::{Errno, Result};

/// System calls of this area.
pub const ROWS: &[Row] = &[
    row!(169, reboot(magic: u32, magic2: u32, op: u32, arg: UserAddr), fast reboot, Full,
        "ends the caller's PID namespace, the outermost one included"),
    row!(272, unshare(flags: Bits), fast unshare, Full),
    row!(308, setns(fd: Fd, nstype: Bits), fast setns, Full),
    row!(424, pidfd_send_signal(pidfd: Fd, sig: i32, info: UserPtr<SigInfo>, flags: u32), fast pidfd_send_signal, Full),
    row!(434, pidfd_open(pid: i32, flags: u32), fast pidfd_open, Full),
    row!(438, pidfd_getfd(pidfd: Fd, targetfd: i32, flags: u32), fast pidfd_getfd, Full),
];

fn pidfd_of(file: &File) -> Result<&PidFd> {
    file.downcast::<PidFd>().ok_or(Errno::EBADF)
}

fn pidfd_open(task: &Arc<Task>, pid: i32, flags: u32) -> Result<u64> {
    let flags = OpenFlags::from_bits_retain(flags);
    if !(flags - (OpenFlags::NONBLOCK | pidfd::THREAD)).is_empty() || pid <= 0 {
        return Err(Errno::EINVAL);
    }
    let pid = task.pid_namespace().pid(pid).ok_or(Errno::ESRCH)?;
    let thread = flags.contains(pidfd::THREAD);
    if pid.task().is_none() {
        return Err(Errno::ESRCH);
    }
    if !thread && pid.group().is_none() {
        return Err(Errno::ENOENT);
    }
    let file = pidfd::new_file(&pid, thread, flags.contains(OpenFlags::NONBLOCK));
    task.files().insert(file, true, 0, task.limit(Resource::Nofile)).map(|fd| fd as u64)
}

/// Flags of pidfd_send_signal(2): to whom, where the pidfd's own kind is not meant.
mod to {
    pub(super) const THREAD: u32 = 1;
    pub(super) const THREAD_GROUP: u32 = 2;
    pub(super) const PROCESS_GROUP: u32 = 4;
}

fn pidfd_send_signal(task: &Arc<Task>, fd: Fd, sig: i32, info: UserPtr<SigInfo>, flags: u32) -> Result<u64> {
    if !matches!(flags, 0 | to::THREAD | to::THREAD_GROUP | to::PROCESS_GROUP) {
        return Err(Errno::EINVAL);
    }
    let file = task.files().get(fd.0)?;
    let (pid, thread) = match file.downcast::<PidFd>() {
        Some(p) => (p.pid().clone(), p.is_thread()),
        // A directory /proc/PID will do.
        None => (process_of(&file).ok_or(Errno::EBADF)?, false),
    };
    if !pid.namespace().is_within(task.pid_namespace()) {
        return Err(Errno::EINVAL);
    }
    let directed = match flags {
        to::THREAD => Directed::Task,
        to::THREAD_GROUP => Directed::Group,
        to::PROCESS_GROUP => Directed::ProcessGroup,
        _ if thread => Directed::Task,
        _ => Directed::Group,
    };
    let given = if info.is_null() { None } else { Some(task.space()?.read(info)?) };
    if let Some(i) = &given {
        if i.signo != sig {
            return Err(Errno::EINVAL);
        }
        let own = Arc::ptr_eq(&pid, &task.pid()) && directed != Directed::ProcessGroup;
        if !own && (i.code >= 0 || i.code == signal::code::SI_TKILL) {
            return Err(Errno::EPERM);
        }
    }
    send_to_pid(task, &pid, directed, sig, given)?;
    Ok(0)
}

/// Sends `sig` (0 only asks) with `given` or the siginfo of kill(2) or tgkill(2).
fn send_to_pid(task: &Arc<Task>, pid: &Arc<Pid>, directed: Directed, sig: i32, given: Option<SigInfo>) -> Result<()> {
    let signal = match sig {
        0 => None,
        n => Some(Signal::new(n).ok_or(Errno::EINVAL)?),
    };
    match directed {
        Directed::Task => {
            let target = pid.task().ok_or(Errno::ESRCH)?;
            send::check_permission(task, target.group(), signal)?;
            if let Some(s) = signal {
                let info = given.unwrap_or_else(|| send::info_from(task, target.group(), s, signal::code::SI_TKILL));
                signal::send_to_task(&target, s, info, Sender::Task(task))?;
            }
            Ok(())
        }
        Directed::Group => {
            let group = pid.task().ok_or(Errno::ESRCH)?.group().clone();
            send::check_permission(task, &group, signal)?;
            if let Some(s) = signal {
                let info = given.unwrap_or_else(|| send::info_from(task, &group, s, signal::code::SI_USER));
                signal::send_to_group(&group, s, info, Sender::Task(task))?;
            }
            Ok(())
        }
        Directed::ProcessGroup => {
            let target = pid.process_group().ok_or(Errno::ESRCH)?;
            // Nobody joins meanwhile: a member's child is one too.
            let _kinship = task.kernel().kinship();
            let mut result = Err(Errno::ESRCH);
            for member in target.members() {
                let leader = member.pid().clone();
                let one = send_to_pid(task, &leader, Directed::Group, sig, given);
                if result.is_err() {
                    result = one;
                }
            }
            result
        }
    }
}

fn pidfd_getfd(task: &Arc<Task>, fd: Fd, target: i32, flags: u32) -> Result<u64> {
    if flags != 0 {
        return Err(Errno::EINVAL);
    }
    let file = task.files().get(fd.0)?;
    let other = pidfd_of(&file)?.pid().task().ok_or(Errno::ESRCH)?;
    access::may_inspect(task, &other)?;
    if other.is_dead() || other.space().is_err() {
        return Err(Errno::ESRCH);
    }
    let file = other.files().get(target)?;
    task.files().insert(file, true, 0, task.limit(Resource::Nofile)).map(|n| n as u64)
}

fn unshare(task: &Arc<Task>, flags: Bits) -> Result<u64> {
    task.unshare(flags.0)?;
    Ok(0)
}

/// Kinds of namespaces in the order in which setns(2) joins those of a process.
const JOINED: [(u64, Kind); 8] = [
    (flag::NEWUSER, Kind::User),
    (flag::NEWNS, Kind::Mnt),
    (flag::NEWUTS, Kind::Uts),
    (flag::NEWIPC, Kind::Ipc),
    (flag::NEWPID, Kind::Pid),
    (flag::NEWCGROUP, Kind::Cgroup),
    (flag::NEWNET, Kind::Net),
    (flag::NEWTIME, Kind::Time),
];

fn setns(task: &Arc<Task>, fd: Fd, nstype: Bits) -> Result<u64> {
    let wanted = u64::from(nstype.0 as u32);
    let file = task.files().get(fd.0)?;
    if let Some(ns) = file.downcast::<NsFile>() {
        if wanted != 0 && wanted != ns.namespace().flag() {
            return Err(Errno::EINVAL);
        }
        task.join_namespaces(core::slice::from_ref(ns.namespace()))?;
        return Ok(0);
    }
    let pid = file.downcast::<PidFd>().ok_or(Errno::EINVAL)?.pid();
    let known = JOINED.iter().fold(0, |all, (flag, _)| all | flag);
    if wanted == 0 || wanted & !known != 0 {
        return Err(Errno::EINVAL);
    }
    let other = pid.task().ok_or(Errno::ESRCH)?;
    access::may_inspect(task, &other)?;
    other.nsproxy()?;
    let kinds = JOINED.iter().filter(|(flag, _)| wanted & flag != 0);
    let namespaces: Vec<Namespace> =
        kinds.map(|(_, kind)| Namespace::of(&other, *kind)).collect::<Result<_>>().map_err(|_| Errno::ESRCH)?;
    task.join_namespaces(&namespaces)?;
    Ok(0)
}

/// Arguments of reboot(2).
mod reboot_op {
    pub(super) const MAGIC1: u32 = 0xfee1_dead;
    pub(super) const MAGIC2: [u32; 4] = [672_274_793, 85_072_278, 369_367_448, 537_993_216];
    pub(super) const RESTART: u32 = 0x0123_4567;
    pub(super) const RESTART2: u32 = 0xa1b2_c3d4;
    pub(super) const HALT: u32 = 0xcdef_0123;
    pub(super) const POWER_OFF: u32 = 0x4321_fedc;
}

fn reboot(task: &Arc<Task>, magic: u32, magic2: u32, op: u32, _arg: UserAddr) -> Result<u64> {
    if !task.credentials().has_in(&task.pid_namespace().owner.user_ns, Caps::SYS_BOOT) {
        return Err(Errno::EPERM);
    }
    if magic != reboot_op::MAGIC1 || !reboot_op::MAGIC2.contains(&magic2) {
        return Err(Errno::EINVAL);
    }
    let signal = match op {
        reboot_op::RESTART | reboot_op::RESTART2 => Signal::SIGHUP,
        reboot_op::HALT | reboot_op::POWER_OFF => Signal::SIGINT,
        _ => return Err(Errno::EINVAL),
    };
    let init = task.pid_namespace().init().ok_or(Errno::ESRCH)?;
    exit::end_init(&init, signal);
    task.end(exit::exited(0));
    Ok(0)
}
