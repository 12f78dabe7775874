//! /sys/devices/system: CPUs with their topology and caches, and the one memory node.
use super::{Tree, dir, text};
use crate::fs::proc::{cpu_list, cpu_mask};
use crate::platform::Platform;

/// NR_CPUS - 1 of the kernel that is imitated.
const KERNEL_MAX: usize = 8191;

/// devices/system/cpu.
pub(super) fn cpus(platform: &dyn Platform) -> Tree {
    let n = platform.cpus();
    let all = cpu_list(0..n);
    let mut entries: Vec<(String, Tree)> = (0..n).map(|cpu| (format!("cpu{cpu}"), one(platform, cpu))).collect();
    for (name, value) in [
        ("isolated", String::new()),
        ("kernel_max", KERNEL_MAX.to_string()),
        ("offline", String::new()),
        ("online", all.clone()),
        ("possible", all.clone()),
        ("present", all),
    ] {
        entries.push((name.to_string(), text(value)));
    }
    Tree::Dir(entries)
}

fn one(platform: &dyn Platform, cpu: usize) -> Tree {
    let n = platform.cpus();
    let own = (cpu_mask(n, |c| c == cpu), cpu.to_string());
    let package = (cpu_mask(n, |c| c < n), cpu_list(0..n));
    let topology = dir([
        ("cluster_cpus", text(&own.0)),
        ("cluster_cpus_list", text(&own.1)),
        ("cluster_id", text(65535)),
        ("core_cpus", text(&own.0)),
        ("core_cpus_list", text(&own.1)),
        ("core_id", text(cpu)),
        ("core_siblings", text(&package.0)),
        ("core_siblings_list", text(&package.1)),
        ("die_cpus", text(&package.0)),
        ("die_cpus_list", text(&package.1)),
        ("die_id", text(0)),
        ("package_cpus", text(&package.0)),
        ("package_cpus_list", text(&package.1)),
        ("physical_package_id", text(0)),
        ("thread_siblings", text(&own.0)),
        ("thread_siblings_list", text(&own.1)),
    ]);
    let mut caches = Vec::new();
    for (i, cache) in platform.cpu_model().caches.iter().enumerate() {
        let shared = if cache.shared { &package } else { &own };
        let index = dir([
            ("coherency_line_size", text(cache.line)),
            ("id", text(if cache.shared { 0 } else { cpu })),
            ("level", text(cache.level)),
            ("number_of_sets", text(cache.sets)),
            ("physical_line_partition", text(1)),
            ("shared_cpu_list", text(&shared.1)),
            ("shared_cpu_map", text(&shared.0)),
            ("size", text(format!("{}K", cache.kib))),
            ("type", text(cache.kind)),
            ("ways_of_associativity", text(cache.ways)),
        ]);
        caches.push((format!("index{i}"), index));
    }
    let mut entries = vec![("topology".to_string(), topology)];
    if !caches.is_empty() {
        entries.push(("cache".to_string(), Tree::Dir(caches)));
    }
    if cpu > 0 {
        entries.push(("online".to_string(), text(1)));
    }
    Tree::Dir(entries)
}

/// devices/system/node.
pub(super) fn nodes(platform: &dyn Platform) -> Tree {
    let n = platform.cpus();
    let node = dir([
        ("cpulist", text(cpu_list(0..n))),
        ("cpumap", text(cpu_mask(n, |c| c < n))),
        ("distance", text(10)),
        ("meminfo", Tree::Live(node_meminfo)),
    ]);
    dir([
        ("has_cpu", text(0)),
        ("has_memory", text(0)),
        ("has_normal_memory", text(0)),
        ("node0", node),
        ("online", text(0)),
        ("possible", text(0)),
    ])
}

fn node_meminfo(platform: &dyn Platform) -> String {
    let memory = platform.memory();
    let (total, used) = (memory.limit() / 1024, memory.used() / 1024);
    format!(
        "Node 0 MemTotal:       {total:8} kB\nNode 0 MemFree:        {:8} kB\nNode 0 MemUsed:        {used:8} kB",
        total.saturating_sub(used)
    )
}
