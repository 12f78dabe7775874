//! The files at the top of /proc that are about the whole sandbox.
use core::fmt::Write;

use super::node::What;
use super::pid::exe_file;
use super::{Cx, Row, cpuinfo, dir, link, sysctl, sysvipc, text};
use crate::Result;
use crate::ns::uts::{RELEASE, VERSION};
use crate::platform::KernelMemory;

/// The top.
pub(super) static ROOT: Row = Row { name: "", mode: 0o555, what: What::Root(ROOT_ROWS) };

static ROOT_ROWS: &[Row] = &[
    text("cgroups", 0o444, |_| Ok(b"#subsys_name\thierarchy\tnum_cgroups\tenabled\n".to_vec())),
    text("cmdline", 0o444, cmdline),
    text("consoles", 0o444, |_| Ok(Vec::new())),
    text("cpuinfo", 0o444, cpuinfo::cpuinfo),
    text("devices", 0o444, devices),
    text("diskstats", 0o444, |_| Ok(Vec::new())),
    text("filesystems", 0o444, filesystems),
    text("interrupts", 0o444, interrupts),
    text("loadavg", 0o444, loadavg),
    text("locks", 0o444, |_| Ok(Vec::new())),
    text("meminfo", 0o444, meminfo),
    text("misc", 0o444, |_| Ok(Vec::new())),
    text("modules", 0o444, |_| Ok(Vec::new())),
    link("mounts", "self/mounts"),
    link("net", "self/net"),
    text("partitions", 0o444, |_| Ok(b"major minor  #blocks  name\n\n".to_vec())),
    text("stat", 0o444, stat),
    text("swaps", 0o444, |_| Ok(b"Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n".to_vec())),
    dir("sys", sysctl::SYS_ROWS),
    dir("sysvipc", sysvipc::ROWS),
    dir("tty", &[text("drivers", 0o444, tty_drivers), text("ldiscs", 0o444, |_| Ok(b"n_tty       0\n".to_vec()))]),
    text("uptime", 0o444, uptime),
    text("version", 0o444, version),
    text("vmstat", 0o444, vmstat),
    Row { name: "self", mode: 0o777, what: What::SelfLink },
    Row { name: "thread-self", mode: 0o777, what: What::ThreadSelfLink },
];

/// net/ of a process: what there is to list is with the sockets, which are not listed; headers are as in Linux.
pub(super) static NET_ROWS: &[Row] = &[
    text("arp", 0o444, |_| {
        Ok(b"IP address       HW type     Flags       HW address            Mask     Device\n".to_vec())
    }),
    text("dev", 0o444, net_dev),
    text("if_inet6", 0o444, |_| Ok(Vec::new())),
    text("netlink", 0o444, |_| {
        Ok(b"sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode\n".to_vec())
    }),
    text("packet", 0o444, |_| Ok(b"sk               RefCnt Type Proto  Iface R Rmem   User   Inode\n".to_vec())),
    text("protocols", 0o444, |_| Ok(Vec::new())),
    text("raw", 0o444, |_| Ok(INET_HEADER_UDP.to_vec())),
    text("route", 0o444, |_| {
        Ok(b"Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT                                                       \n".to_vec())
    }),
    text("tcp", 0o444, |_| Ok(INET_HEADER_TCP.to_vec())),
    text("tcp6", 0o444, |_| Ok(INET6_HEADER_TCP.to_vec())),
    text("udp", 0o444, |_| Ok(INET_HEADER_UDP.to_vec())),
    text("udp6", 0o444, |_| Ok(INET6_HEADER_UDP.to_vec())),
    text("unix", 0o444, |_| Ok(b"Num       RefCount Protocol Flags    Type St Inode Path\n".to_vec())),
];

const INET_HEADER_TCP: &[u8] = b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode                                                     \n";
const INET6_HEADER_TCP: &[u8] = b"  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
const INET_HEADER_UDP: &[u8] = b"   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops             \n";
const INET6_HEADER_UDP: &[u8] = b"  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n";

fn net_dev(_: &Cx) -> Result<Vec<u8>> {
    let mut out = String::from(
        "Inter-|   Receive                                                |  Transmit\n \
         face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n",
    );
    out.push_str("    lo:       0       0    0    0    0     0          0         0        0       0    0    0    0     0       0          0\n");
    Ok(out.into_bytes())
}

fn cmdline(cx: &Cx) -> Result<Vec<u8>> {
    // There is no boot loader; the first program stands where one would name its image.
    let init = cx.kernel().init().and_then(|g| g.leader());
    let mut out = b"init=".to_vec();
    match init.and_then(|t| exe_file(&t)).and_then(|f| f.path().cloned()) {
        Some(path) => out.extend_from_slice(&path.absolute()),
        None => out.clear(),
    }
    out.push(b'\n');
    Ok(out)
}

fn devices(_: &Cx) -> Result<Vec<u8>> {
    Ok(b"Character devices:\n  1 mem\n  5 /dev/tty\n  5 /dev/console\n  5 /dev/ptmx\n136 pts\n\nBlock devices:\n"
        .to_vec())
}

fn tty_drivers(_: &Cx) -> Result<Vec<u8>> {
    let mut out = String::new();
    for (driver, node, major, minors, kind) in [
        ("/dev/tty", "/dev/tty", 5, "0", "system:/dev/tty"),
        ("/dev/console", "/dev/console", 5, "1", "system:console"),
        ("/dev/ptmx", "/dev/ptmx", 5, "2", "system"),
        ("pty_slave", "/dev/pts", 136, "0-1048575", "pty:slave"),
        ("pty_master", "/dev/ptm", 128, "0-1048575", "pty:master"),
    ] {
        let _ = writeln!(out, "{driver:<20} {node:<8} {major:>3} {minors} {kind}");
    }
    Ok(out.into_bytes())
}

fn filesystems(_: &Cx) -> Result<Vec<u8>> {
    Ok(b"nodev\tsysfs\nnodev\ttmpfs\nnodev\tproc\nnodev\tdevtmpfs\nnodev\tdevpts\nnodev\toverlay\nnodev\tmqueue\n"
        .to_vec())
}

fn interrupts(cx: &Cx) -> Result<Vec<u8>> {
    let mut out = String::from("    ");
    for cpu in 0..cx.kernel().platform.cpus() {
        let _ = write!(out, "       CPU{cpu:<4}");
    }
    out.push('\n');
    Ok(out.into_bytes())
}

/// Nanoseconds in a clock tick (USER_HZ is 100).
const TICK: u64 = 10_000_000;

/// Nanoseconds since the sandbox began.
pub(crate) fn up(cx: &Cx) -> u64 {
    let kernel = cx.kernel();
    kernel.platform.monotonic().saturating_sub(kernel.started)
}

fn uptime(cx: &Cx) -> Result<Vec<u8>> {
    let sched = &cx.kernel().sched;
    let now = up(cx);
    let busy: u64 = (0..sched.cpus()).map(|cpu| sched.cpu_times(cpu)).map(|(u, s)| u + s).sum();
    let idle = (now * sched.cpus() as u64).saturating_sub(busy);
    let now = now.saturating_add_signed(cx.boottime_offset());
    let show = |ns: u64| format!("{}.{:02}", ns / 1_000_000_000, ns / TICK % 100);
    Ok(format!("{} {}\n", show(now), show(idle)).into_bytes())
}

fn version(_: &Cx) -> Result<Vec<u8>> {
    Ok(format!("Linux version {RELEASE} (bartizan@bartizan) (rustc) {VERSION}\n").into_bytes())
}

fn stat(cx: &Cx) -> Result<Vec<u8>> {
    let kernel = cx.kernel();
    let now = up(cx);
    let cpus: Vec<(u64, u64)> = (0..kernel.sched.cpus()).map(|cpu| kernel.sched.cpu_times(cpu)).collect();
    let mut out = String::new();
    let mut line = |name: &str, user: u64, system: u64, total: u64| {
        let idle = total.saturating_sub(user + system);
        let _ = writeln!(out, "{name} {} 0 {} {} 0 0 0 0 0 0", user / TICK, system / TICK, idle / TICK);
    };
    let (user, system) = cpus.iter().fold((0, 0), |(a, b), (u, s)| (a + u, b + s));
    line("cpu ", user, system, now * cpus.len() as u64);
    for (i, (user, system)) in cpus.iter().enumerate() {
        line(&format!("cpu{i}"), *user, *system, now);
    }
    let boot = kernel.platform.realtime().saturating_sub(now) / 1_000_000_000;
    let _ = write!(
        out,
        "intr 0\nctxt {}\nbtime {boot}\nprocesses {}\nprocs_running {}\nprocs_blocked 0\nsoftirq 0 0 0 0 0 0 0 0 0 0 0\n",
        kernel.sched.context_switches(),
        kernel.fork_count(),
        kernel.sched.runnable().max(1),
    );
    Ok(out.into_bytes())
}

/// Load averages without a tick: between two looks the load is the CPU time used in it, decayed as Linux decays.
#[derive(Default)]
pub(crate) struct Load {
    at: u64,
    busy: u64,
    average: [f64; 3],
}

impl Load {
    fn advance(&mut self, now: u64, busy: u64) {
        let span = now.saturating_sub(self.at);
        if span < 1_000_000 {
            return;
        }
        let active = busy.saturating_sub(self.busy) as f64 / span as f64;
        for (average, seconds) in self.average.iter_mut().zip([60.0, 300.0, 900.0]) {
            let kept = (-(span as f64) / 1e9 / seconds).exp();
            *average = *average * kept + active * (1.0 - kept);
        }
        (self.at, self.busy) = (now, busy);
    }
}

fn loadavg(cx: &Cx) -> Result<Vec<u8>> {
    let kernel = cx.kernel();
    let busy: u64 = (0..kernel.sched.cpus()).map(|cpu| kernel.sched.cpu_times(cpu)).map(|(u, s)| u + s).sum();
    let average = {
        let mut load = cx.shared.load.lock();
        load.advance(up(cx), busy);
        load.average
    };
    let [a, b, c] = average;
    Ok(format!(
        "{a:.2} {b:.2} {c:.2} {}/{} {}\n",
        kernel.sched.runnable().max(1),
        kernel.task_count(),
        cx.shared.ns.last()
    )
    .into_bytes())
}

fn meminfo(cx: &Cx) -> Result<Vec<u8>> {
    let memory = cx.kernel().platform.memory();
    let (total, used) = (memory.limit(), memory.used());
    let free = total.saturating_sub(used);
    let slab = memory.charged(KernelMemory::Slab).saturating_add(memory.charged(KernelMemory::Buffer));
    let tasks = memory.charged(KernelMemory::Task);
    let anon = used.saturating_sub(slab).saturating_sub(tasks);
    let mut out = String::new();
    for (name, bytes) in [
        ("MemTotal", total),
        ("MemFree", free),
        ("MemAvailable", free),
        ("Buffers", 0),
        ("Cached", 0),
        ("SwapCached", 0),
        ("Active", anon),
        ("Inactive", 0),
        ("Active(anon)", anon),
        ("Inactive(anon)", 0),
        ("Active(file)", 0),
        ("Inactive(file)", 0),
        ("Unevictable", 0),
        ("Mlocked", 0),
        ("SwapTotal", 0),
        ("SwapFree", 0),
        ("Dirty", 0),
        ("Writeback", 0),
        ("AnonPages", anon),
        ("Mapped", 0),
        ("Shmem", 0),
        ("KReclaimable", 0),
        ("Slab", slab),
        ("SReclaimable", 0),
        ("SUnreclaim", slab),
        ("KernelStack", tasks),
        ("PageTables", 0),
        ("SecPageTables", 0),
        ("NFS_Unstable", 0),
        ("Bounce", 0),
        ("WritebackTmp", 0),
        ("CommitLimit", total),
        ("Committed_AS", used),
        ("VmallocTotal", 0x1f_ffff_fc00 << 10 >> 10),
        ("VmallocUsed", 0),
        ("VmallocChunk", 0),
        ("Percpu", 0),
        ("AnonHugePages", 0),
        ("ShmemHugePages", 0),
        ("ShmemPmdMapped", 0),
        ("FileHugePages", 0),
        ("FilePmdMapped", 0),
    ] {
        let _ = writeln!(out, "{:<15} {:>8} kB", format!("{name}:"), bytes / 1024);
    }
    out.push_str(
        "HugePages_Total:       0\nHugePages_Free:        0\nHugePages_Rsvd:        0\nHugePages_Surp:        0\n",
    );
    out.push_str("Hugepagesize:       2048 kB\nHugetlb:               0 kB\n");
    Ok(out.into_bytes())
}

fn vmstat(cx: &Cx) -> Result<Vec<u8>> {
    let memory = cx.kernel().platform.memory();
    let free = memory.limit().saturating_sub(memory.used()) / 4096;
    Ok(format!(
        "nr_free_pages {free}\nnr_anon_pages {}\npgpgin 0\npgpgout 0\npswpin 0\npswpout 0\n",
        memory.used() / 4096
    )
    .into_bytes())
}
