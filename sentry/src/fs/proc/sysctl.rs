//! /proc/sys (proc_sys(5)). Only what is true of the sandbox or can be changed in it; what cannot be changed refuses writes.
use core::fmt::Write;

use super::pid::parse_number;
use super::{Cx, Row, dir, setting, sysvipc, text};
use crate::fs::pipe::PIPE_MAX_SIZE;
use crate::mm::space::MAX_MAP_COUNT;
use crate::ns::ucounts::Counted;
use crate::ns::user::Caps;
use crate::ns::uts::{RELEASE, UtsNamespace, VERSION};
use crate::task::Task;
use crate::vfs::file::Caller;
use crate::{Errno, Result};

/// sys/.
pub(super) static SYS_ROWS: &[Row] = &[
    dir("dev", &[]),
    dir("fs", FS_ROWS),
    dir("kernel", KERNEL_ROWS),
    dir("net", NET_ROWS),
    dir("user", USER_ROWS),
    dir("vm", VM_ROWS),
];

macro_rules! fixed {
    ($name:literal, $value:literal) => {
        text($name, 0o444, |_| Ok(concat!($value, "\n").as_bytes().to_vec()))
    };
}

fn line(value: impl core::fmt::Display) -> Result<Vec<u8>> {
    Ok(format!("{value}\n").into_bytes())
}

static KERNEL_ROWS: &[Row] = &[
    fixed!("arch", "x86_64"),
    fixed!("cap_last_cap", "40"),
    fixed!("core_pattern", "core"),
    fixed!("core_pipe_limit", "0"),
    fixed!("core_uses_pid", "0"),
    fixed!("dmesg_restrict", "1"),
    setting(
        "domainname",
        0o644,
        |cx| names(cx, 1),
        |cx, by, value| set_name(cx, by, value, UtsNamespace::set_domainname),
    ),
    setting("hostname", 0o644, |cx| names(cx, 0), |cx, by, value| set_name(cx, by, value, UtsNamespace::set_hostname)),
    fixed!("kptr_restrict", "1"),
    setting(
        "msgmax",
        0o644,
        |cx| sysvipc::show(cx, |ipc| &ipc.msg.limits.max),
        |_, by, value| sysvipc::set(by, value, |ipc| &ipc.msg.limits.max),
    ),
    setting(
        "msgmnb",
        0o644,
        |cx| sysvipc::show(cx, |ipc| &ipc.msg.limits.bytes),
        |_, by, value| sysvipc::set(by, value, |ipc| &ipc.msg.limits.bytes),
    ),
    setting(
        "msgmni",
        0o644,
        |cx| sysvipc::show(cx, |ipc| &ipc.msg.limits.queues),
        |_, by, value| sysvipc::set(by, value, |ipc| &ipc.msg.limits.queues),
    ),
    fixed!("ngroups_max", "65536"),
    setting(
        "ns_last_pid",
        0o666,
        |cx| line(cx.reader.as_ref().map_or(&cx.shared.ns, |r| &r.pid_namespace).last()),
        set_last_pid,
    ),
    text("osrelease", 0o444, |_| line(RELEASE)),
    fixed!("ostype", "Linux"),
    fixed!("overflowgid", "65534"),
    fixed!("overflowuid", "65534"),
    fixed!("panic", "0"),
    fixed!("panic_on_oops", "0"),
    fixed!("perf_event_paranoid", "4"),
    setting("pid_max", 0o644, |cx| line(cx.shared.ns.pid_max()), set_pid_max),
    fixed!("printk", "4\t4\t1\t7"),
    dir("random", RANDOM_ROWS),
    fixed!("randomize_va_space", "2"),
    fixed!("sched_child_runs_first", "0"),
    fixed!("sched_rr_timeslice_ms", "100"),
    fixed!("sched_rt_period_us", "1000000"),
    fixed!("sched_rt_runtime_us", "950000"),
    fixed!("sem", "32000\t1024000000\t500\t32000"),
    fixed!("shmall", "18446744073692774399"),
    fixed!("shmmax", "18446744073692774399"),
    fixed!("shmmni", "4096"),
    fixed!("tainted", "0"),
    setting("threads-max", 0o644, |cx| line(cx.kernel().max_tasks()), set_threads_max),
    fixed!("unprivileged_bpf_disabled", "2"),
    text("version", 0o444, |_| line(VERSION)),
    dir("yama", &[fixed!("ptrace_scope", "0")]),
];

static RANDOM_ROWS: &[Row] = &[
    text("boot_id", 0o444, |cx| {
        let mut bytes = cx.kernel().boot_id();
        Ok(uuid(&mut bytes))
    }),
    fixed!("entropy_avail", "256"),
    fixed!("poolsize", "256"),
    fixed!("urandom_min_reseed_secs", "60"),
    text("uuid", 0o444, |cx| {
        let mut bytes = [0; 16];
        cx.kernel().platform.random(&mut bytes);
        Ok(uuid(&mut bytes))
    }),
    fixed!("write_wakeup_threshold", "256"),
];

/// A version 4 UUID of random bytes (RFC 9562) and a newline.
fn uuid(bytes: &mut [u8; 16]) -> Vec<u8> {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut out = String::new();
    for (i, b) in bytes.iter().enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            out.push('-');
        }
        let _ = write!(out, "{b:02x}");
    }
    out.push('\n');
    out.into_bytes()
}

static VM_ROWS: &[Row] = &[
    fixed!("compaction_proactiveness", "0"),
    fixed!("dirty_background_ratio", "10"),
    fixed!("dirty_ratio", "20"),
    fixed!("hugetlb_shm_group", "0"),
    text("max_map_count", 0o444, |_| line(MAX_MAP_COUNT)),
    text("mmap_min_addr", 0o444, |_| line(guest_abi::layout::MMAP_MIN_ADDR)),
    fixed!("nr_hugepages", "0"),
    fixed!("oom_kill_allocating_task", "0"),
    fixed!("overcommit_kbytes", "0"),
    fixed!("overcommit_memory", "1"),
    fixed!("overcommit_ratio", "50"),
    fixed!("page-cluster", "3"),
    fixed!("panic_on_oom", "0"),
    fixed!("swappiness", "60"),
    fixed!("vfs_cache_pressure", "100"),
];

macro_rules! mqueue {
    ($name:literal, $limit:ident) => {
        setting(
            $name,
            0o644,
            |cx| sysvipc::show(cx, |ipc| &ipc.mq.limits.$limit),
            |_, by, value| sysvipc::set(by, value, |ipc| &ipc.mq.limits.$limit),
        )
    };
}

static FS_ROWS: &[Row] = &[
    fixed!("aio-max-nr", "65536"),
    fixed!("aio-nr", "0"),
    dir("epoll", &[fixed!("max_user_watches", "1048576")]),
    fixed!("file-max", "9223372036854775807"),
    text("file-nr", 0o444, |_| Ok(b"0\t0\t9223372036854775807\n".to_vec())),
    dir(
        "inotify",
        &[
            fixed!("max_queued_events", "16384"),
            fixed!("max_user_instances", "128"),
            fixed!("max_user_watches", "65536"),
        ],
    ),
    fixed!("lease-break-time", "45"),
    fixed!("leases-enable", "0"),
    fixed!("mount-max", "10000"),
    dir(
        "mqueue",
        &[
            mqueue!("msg_default", messages_default),
            mqueue!("msg_max", messages),
            mqueue!("msgsize_default", size_default),
            mqueue!("msgsize_max", size),
            mqueue!("queues_max", queues),
        ],
    ),
    fixed!("nr_open", "1048576"),
    fixed!("overflowgid", "65534"),
    fixed!("overflowuid", "65534"),
    text("pipe-max-size", 0o444, |_| line(PIPE_MAX_SIZE)),
    fixed!("pipe-user-pages-hard", "0"),
    fixed!("pipe-user-pages-soft", "16384"),
    fixed!("protected_fifos", "0"),
    fixed!("protected_hardlinks", "0"),
    fixed!("protected_regular", "0"),
    fixed!("protected_symlinks", "0"),
    fixed!("suid_dumpable", "0"),
];

macro_rules! namespaces {
    ($name:literal, $kind:expr) => {
        setting(
            $name,
            0o644,
            |cx| line(cx.kernel().ucounts.limit($kind)),
            |cx, by, value| set_namespaces(cx, by, value, $kind),
        )
    };
}

static USER_ROWS: &[Row] = &[
    namespaces!("max_cgroup_namespaces", Counted::Cgroup),
    namespaces!("max_ipc_namespaces", Counted::Ipc),
    namespaces!("max_mnt_namespaces", Counted::Mnt),
    namespaces!("max_net_namespaces", Counted::Net),
    namespaces!("max_pid_namespaces", Counted::Pid),
    namespaces!("max_time_namespaces", Counted::Time),
    namespaces!("max_user_namespaces", Counted::User),
    namespaces!("max_uts_namespaces", Counted::Uts),
];

static NET_ROWS: &[Row] = &[
    dir(
        "core",
        &[
            fixed!("default_qdisc", "pfifo_fast"),
            fixed!("optmem_max", "131072"),
            fixed!("rmem_default", "212992"),
            fixed!("rmem_max", "212992"),
            fixed!("somaxconn", "4096"),
            fixed!("wmem_default", "212992"),
            fixed!("wmem_max", "212992"),
        ],
    ),
    dir(
        "ipv4",
        &[
            fixed!("ip_forward", "0"),
            fixed!("ip_local_port_range", "32768\t60999"),
            fixed!("ip_unprivileged_port_start", "1024"),
            fixed!("tcp_fin_timeout", "60"),
            fixed!("tcp_keepalive_time", "7200"),
            fixed!("tcp_max_syn_backlog", "1024"),
            fixed!("tcp_rmem", "4096\t131072\t6291456"),
            fixed!("tcp_syncookies", "1"),
            fixed!("tcp_wmem", "4096\t16384\t4194304"),
        ],
    ),
    dir("unix", &[fixed!("max_dgram_qlen", "10")]),
];

fn names(cx: &Cx, which: usize) -> Result<Vec<u8>> {
    let (host, domain) = cx.reader.as_ref().map_or(&cx.kernel().uts, |r| &r.uts).names();
    let mut out = if which == 0 { host } else { domain };
    out.push(b'\n');
    Ok(out)
}

fn set_name(cx: &Cx, caller: &dyn Caller, value: &[u8], set: fn(&UtsNamespace, Vec<u8>)) -> Result<()> {
    let uts = caller.as_any().downcast_ref::<Task>().map_or_else(|| cx.kernel().uts.clone(), Task::uts);
    if !caller.credentials().has_in(&uts.owner.user_ns, Caps::SYS_ADMIN) {
        return Err(Errno::EPERM);
    }
    let mut name: Vec<u8> = value.iter().copied().take_while(|&b| b != b'\n' && b != 0).collect();
    name.truncate(64);
    set(&uts, name);
    Ok(())
}

fn set_threads_max(cx: &Cx, caller: &dyn Caller, value: &[u8]) -> Result<()> {
    if !caller.credentials().has(Caps::SYS_ADMIN) {
        return Err(Errno::EPERM);
    }
    cx.kernel().set_max_tasks(usize::try_from(parse_number(value)?).map_err(|_| Errno::EINVAL)?)
}

fn set_pid_max(cx: &Cx, caller: &dyn Caller, value: &[u8]) -> Result<()> {
    if !caller.credentials().has_in(&cx.shared.ns.owner.user_ns, Caps::SYS_ADMIN) {
        return Err(Errno::EPERM);
    }
    let max = i32::try_from(parse_number(value)?).map_err(|_| Errno::EINVAL)?;
    cx.shared.ns.set_pid_max(max)
}

/// Of the writer's own namespace, whatever mount shows the file.
fn set_last_pid(_: &Cx, caller: &dyn Caller, value: &[u8]) -> Result<()> {
    let task = caller.as_any().downcast_ref::<Task>().ok_or(Errno::EPERM)?;
    let credentials = task.credentials();
    let owner = &task.pid_namespace().owner.user_ns;
    if !credentials.has_in(owner, Caps::SYS_ADMIN) && !credentials.has_in(owner, Caps::CHECKPOINT_RESTORE) {
        return Err(Errno::EPERM);
    }
    let ns = task.pid_namespace();
    let last =
        i32::try_from(parse_number(value)?).ok().filter(|n| (0..ns.pid_max()).contains(n)).ok_or(Errno::EINVAL)?;
    ns.set_last(last);
    Ok(())
}

fn set_namespaces(cx: &Cx, caller: &dyn Caller, value: &[u8], kind: Counted) -> Result<()> {
    if !caller.credentials().has(Caps::SYS_RESOURCE) {
        return Err(Errno::EPERM);
    }
    let limit = i32::try_from(parse_number(value)?).ok().filter(|n| *n >= 0).ok_or(Errno::EINVAL)?;
    cx.kernel().ucounts.set_limit(kind, limit);
    Ok(())
}
