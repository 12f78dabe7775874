//! The seed measurement: what it costs to enumerate thread groups a hundred times a second while many threads sleep, by the tgid
//! index and, for comparison, by a walk over all tasks, which exists only here. Tasks are real ones on the simulated platform.
//!
//! `cargo bench --package sentry --features sim --bench enumeration -- [--quick] [--seconds N]`
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use sentry::Kernel;
use sentry::fs::proc::listing;
use sentry::fs::tmpfs::{TmpFs, TmpfsOptions};
use sentry::kernel::KernelConfig;
use sentry::mm::IoSource;
use sentry::ns::user::Credentials;
use sentry::platform::sim::SimPlatform;
use sentry::task::clone::{CloneRequest, clone_task, flag};
use sentry::task::init::InitConfig;
use sentry::task::{Task, ThreadGroup};
use sentry::vfs::file::KernelCaller;
use sentry::vfs::fs_context::FsState;
use sentry::vfs::path::{Lookup, OpenHow, open};
use sentry::vfs::{MountNamespace, OpenFlags};

/// Processes, and threads of each.
const SHAPES: &[(usize, usize)] = &[(1, 1), (1, 1024), (1, 4096), (1, 8192), (1, 16_384), (4096, 1), (64, 256)];
const PERIOD: Duration = Duration::from_millis(10);
/// Where the only page of the program lies.
const BASE: u64 = 0x40_0000;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let given = args.iter().position(|a| a == "--seconds").and_then(|i| args.get(i + 1)?.parse().ok());
    let seconds = given.unwrap_or(if args.iter().any(|a| a == "--quick") { 10 } else { 120 });
    println!("| processes × threads | index | ps by the index | walk over all tasks |");
    println!("|---|---|---|---|");
    for &(processes, threads) in SHAPES {
        let (kernel, tasks) = populate(processes, threads);
        let [index, ps, walk] = watch(&kernel, &tasks, processes, Duration::from_secs(seconds));
        println!("| {processes} × {threads} | {index} | {ps} | {walk} |");
        // Tasks that never ran still hold each other; the process ends before long.
        std::mem::forget(kernel);
    }
}

/// Enumerates in three ways, each once a period, for so long; what each took, as text.
fn watch(kernel: &Arc<Kernel>, tasks: &BTreeMap<i32, Arc<Task>>, groups: usize, during: Duration) -> [String; 3] {
    let ways: [&dyn Fn() -> usize; 3] = [&|| by_index(kernel).len(), &|| by_listing(kernel), &|| by_walk(tasks).len()];
    let mut spent = [Duration::ZERO; 3];
    let start = Instant::now();
    let mut rounds = 0;
    while start.elapsed() < during {
        for (way, spent) in ways.iter().zip(&mut spent) {
            let before = thread_time();
            assert_eq!(std::hint::black_box(way()), groups);
            *spent += thread_time().saturating_sub(before);
        }
        rounds += 1;
        std::thread::sleep((PERIOD * rounds).saturating_sub(start.elapsed()));
    }
    let wall = start.elapsed();
    spent.map(|t| {
        let once = t / rounds.max(1);
        format!(
            "{t:.1?} in {wall:.0?} = {:.4} % of a CPU ({once:.1?} each)",
            t.as_secs_f64() / wall.as_secs_f64() * 100.0
        )
    })
}

fn thread_time() -> Duration {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec.unsigned_abs(), t.tv_nsec.try_into().unwrap_or(0))
}

/// As every enumeration of the product does it: pages of the index.
fn by_index(kernel: &Kernel) -> Vec<Arc<ThreadGroup>> {
    let mut out = Vec::new();
    let mut from = 1;
    loop {
        let page = kernel.root_pid_ns.groups_from(from, 64);
        let Some((last, _)) = page.last() else { return out };
        from = last + 1;
        out.extend(page.into_iter().map(|(_, group)| group));
    }
}

/// What `bartizan ps` asks for: every process with its facts.
fn by_listing(kernel: &Kernel) -> usize {
    let (mut count, mut from) = (0, 1);
    loop {
        let (page, next) = listing::page(kernel, from, 256, None);
        count += page.len();
        let Some(next) = next else { return count };
        from = next;
    }
}

/// The reference: looks at every task and takes the groups of those that lead one.
fn by_walk(tasks: &BTreeMap<i32, Arc<Task>>) -> Vec<Arc<ThreadGroup>> {
    tasks.values().filter(|t| t.is_leader()).map(|t| t.group().clone()).collect()
}

/// A sandbox with so many processes of so many threads, none of which runs; all tasks by number.
fn populate(processes: usize, threads: usize) -> (Arc<Kernel>, BTreeMap<i32, Arc<Task>>) {
    let kernel = Kernel::new(SimPlatform::new(1), KernelConfig::default());
    let first = first_task(&kernel);
    let born = |by: &Arc<Task>, flags, exit_signal| {
        clone_task(by, &CloneRequest { flags, exit_signal, ..CloneRequest::default() }).expect("a task").0
    };
    let mut leaders = vec![first.clone()];
    leaders.extend((1..processes).map(|_| born(&first, 0, 17)));
    let shared = flag::VM | flag::FS | flag::FILES | flag::SIGHAND | flag::THREAD;
    let mut tasks = BTreeMap::new();
    for leader in leaders {
        for thread in (1..threads).map(|_| born(&leader, shared, 0)) {
            tasks.insert(thread.global_tid(), thread);
        }
        tasks.insert(leader.global_tid(), leader);
    }
    assert_eq!(tasks.len(), processes * threads);
    (kernel, tasks)
}

fn first_task(kernel: &Arc<Kernel>) -> Arc<Task> {
    let fs = TmpFs::new(kernel.platform.clone(), TmpfsOptions::default(), "tmpfs").expect("tmpfs");
    let root = MountNamespace::new(fs).root().expect("a root");
    let state = FsState { root: root.clone(), cwd: root, umask: 0 };
    let caller = KernelCaller::default();
    let how = OpenHow { flags: OpenFlags::CREAT | OpenFlags::RDWR, mode: 0o755, ..OpenHow::default() };
    let file = open(&Lookup::new(state.clone(), &caller), None, b"/init", &how).expect("a file");
    let image = elf();
    assert_eq!(file.ops().write(&file, &mut IoSource::kernel(&image), 0), Ok(image.len()));
    let config = InitConfig {
        argv: vec![b"/init".to_vec()],
        envp: Vec::new(),
        credentials: Credentials::new(0, 0, Vec::new()),
        fs: state,
        fds: Vec::new(),
        limits: None,
    };
    kernel.spawn_init(config).expect("the first process")
}

/// A static program of one page (elf(5)).
fn elf() -> Vec<u8> {
    let mut image = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    let halves = |image: &mut Vec<u8>, values: &[u16]| values.iter().for_each(|v| image.extend(v.to_le_bytes()));
    let words = |image: &mut Vec<u8>, values: &[u32]| values.iter().for_each(|v| image.extend(v.to_le_bytes()));
    let longs = |image: &mut Vec<u8>, values: &[u64]| values.iter().for_each(|v| image.extend(v.to_le_bytes()));
    halves(&mut image, &[2, 62]);
    words(&mut image, &[1]);
    longs(&mut image, &[BASE + 0x100, 64, 0]);
    words(&mut image, &[0]);
    halves(&mut image, &[64, 56, 1, 64, 0, 0]);
    words(&mut image, &[1, 7]);
    longs(&mut image, &[0, BASE, BASE, 0x1000, 0x1000, 0x1000]);
    image.resize(0x1000, 0);
    image
}
