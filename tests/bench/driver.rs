//! The driving side: runs every row on every system in turn, several times over, and prints medians and ratios.
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::{Command, Stdio};
use std::time::Instant;

use super::guest;

/// A system under measurement: its name and the words before the command.
struct System {
    name: &'static str,
    prefix: Vec<String>,
}

struct Options {
    quick: bool,
    repeats: usize,
    runsc: Option<String>,
    json: Option<String>,
    rows: Vec<String>,
}

fn parse(args: &[String]) -> Options {
    let mut o = Options { quick: false, repeats: 5, runsc: None, json: None, rows: Vec::new() };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--quick" => {
                o.quick = true;
                o.repeats = 3;
            }
            "--repeats" => o.repeats = args.next().and_then(|n| n.parse().ok()).unwrap_or(5).max(1),
            "--runsc" => o.runsc = args.next().cloned(),
            "--json" => o.json = args.next().cloned(),
            row if !row.starts_with('-') => o.rows.push(row.to_owned()),
            other => {
                eprintln!("bench: unknown option '{other}'");
                std::process::exit(2);
            }
        }
    }
    o
}

fn systems(o: &Options) -> Vec<System> {
    let own = std::env::current_exe().expect("the benchmark knows its path");
    let bartizan = own.with_file_name("bartizan").display().to_string();
    let words = |w: &[&str]| w.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
    let mut all = vec![
        System { name: "native", prefix: Vec::new() },
        System { name: "bartizan", prefix: words(&[&bartizan, "run", "--"]) },
    ];
    if let Some(runsc) = &o.runsc {
        for (name, platform) in [("systrap", "--platform=systrap"), ("ptrace", "--platform=ptrace")] {
            all.push(System { name, prefix: words(&[runsc, platform, "--network=none", "do"]) });
        }
    }
    all
}

/// Runs a command line; its standard output and wall time in ns, or None if it fails.
fn run_once(system: &System, command: &[&str]) -> Option<(String, f64)> {
    let words: Vec<&str> = system.prefix.iter().map(String::as_str).chain(command.iter().copied()).collect();
    let (program, args) = words.split_first()?;
    let start = Instant::now();
    let out = Command::new("timeout")
        .arg("120")
        .arg(program)
        .args(args)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let wall = start.elapsed().as_nanos() as f64;
    out.status.success().then(|| (String::from_utf8_lossy(&out.stdout).trim().to_owned(), wall))
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn show(ns: Option<f64>) -> String {
    match ns {
        None => "–".to_owned(),
        Some(ns) if ns < 1_000.0 => format!("{ns:.0} ns"),
        Some(ns) if ns < 1_000_000.0 => format!("{:.1} µs", ns / 1e3),
        Some(ns) if ns < 1_000_000_000.0 => format!("{:.1} ms", ns / 1e6),
        Some(ns) => format!("{:.2} s", ns / 1e9),
    }
}

/// Measures and prints.
pub fn run(args: &[String]) {
    let o = parse(args);
    let systems = systems(&o);
    let own = std::env::current_exe().expect("the benchmark knows its path").display().to_string();
    let wanted = |name: &str, quick: bool| {
        if o.rows.is_empty() { quick || !o.quick } else { o.rows.iter().any(|r| r == name) }
    };
    let mut rows: Vec<(&str, &str)> = Vec::new();
    if wanted("start", true) {
        rows.push(("start", "start, run true, exit (wall)"));
    }
    rows.extend(guest::ROWS.iter().filter(|r| wanted(r.name, r.quick)).map(|r| (r.name, r.label)));

    println!("| what | {} |", systems.iter().map(|s| s.name).collect::<Vec<_>>().join(" | "));
    println!("|---|{}", "---|".repeat(systems.len()));
    let mut json = String::from("[");
    for (name, label) in rows {
        let mut figures: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for _ in 0..o.repeats {
            for (i, system) in systems.iter().enumerate() {
                let figure = if name == "start" {
                    run_once(system, &["/bin/true"]).map(|(_, wall)| wall)
                } else {
                    run_once(system, &[&own, "guest", name]).and_then(|(out, _)| out.parse().ok())
                };
                if let Some(f) = figure {
                    figures.entry(i).or_default().push(f);
                }
            }
        }
        let medians: Vec<Option<f64>> =
            (0..systems.len()).map(|i| figures.get_mut(&i).and_then(|v| median(v))).collect();
        let native = medians.first().copied().flatten();
        let cells: Vec<String> = medians
            .iter()
            .enumerate()
            .map(|(i, m)| match (i, m, native) {
                (1.., Some(m), Some(n)) if n > 0.0 => format!("{} (×{:.1})", show(Some(*m)), m / n),
                _ => show(*m),
            })
            .collect();
        println!("| {label} | {} |", cells.join(" | "));
        let _ = write!(json, "{}{{\"row\":\"{name}\"", if json.len() > 1 { "," } else { "" });
        for (system, m) in systems.iter().zip(&medians) {
            let _ = write!(json, ",\"{}_ns\":{}", system.name, m.map_or("null".to_owned(), |m| format!("{m:.1}")));
        }
        json.push('}');
    }
    json.push_str("]\n");
    if let Some(path) = &o.json
        && let Err(e) = std::fs::write(path, json)
    {
        eprintln!("bench: cannot write {path}: {e}");
        std::process::exit(1);
    }
}
