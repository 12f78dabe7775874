//! The second form: what an operation of each row costs in exits, faults and calls, from `bartizan run --stats`. Counts can be
//! compared where time cannot: on a busy machine, or on an emulated one.
use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value;

use super::driver;
use super::options::Options;
use super::rows;
use super::systems::{self, guest_words};

/// The columns of the table: how a counter is called in the report, and how here.
const COLUMNS: &[(&str, &str)] = &[
    ("calls", "system calls"),
    ("exits", "exits"),
    ("exit syscall", "of these, calls"),
    ("exit page_fault", "of these, faults"),
    ("served_inside", "calls served inside"),
    ("context_switches", "context switches"),
];

/// Figures of the report that are no counts of what happened.
const NO_COUNTS: &[&str] = &["memory_peak_bytes", "kernel_memory_bytes", "wall_ns", "page_faults", "processes_made"];

type Counters = BTreeMap<String, f64>;

/// Counts and prints.
pub fn run(o: &Options) {
    let wanted = |name: &str| o.rows.is_empty() || o.rows.iter().any(|r| r == name);
    let (mut json, mut notes, mut table) = (Vec::new(), Vec::new(), Vec::new());
    let mut columns: Vec<(String, String)> = COLUMNS.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    for row in rows::all().filter(|r| r.counted > 0 && wanted(r.name)) {
        match per_operation(o, row.name, row.counted) {
            Ok(counters) => {
                // What the report has beyond the known columns is shown as it calls itself.
                for key in counters.keys().filter(|k| !k.starts_with("exit ")) {
                    if !columns.iter().any(|(k, _)| k == key) {
                        columns.push((key.clone(), key.replace('_', " ")));
                    }
                }
                let figures: Vec<String> = counters.iter().map(|(k, v)| format!("\"{k}\":{v:.4}")).collect();
                json.push(format!("{{\"row\":\"{}\",{}}}", row.name, figures.join(",")));
                table.push((row.label, counters));
            }
            Err(why) => notes.push(format!("{}: {why}", row.name)),
        }
    }
    println!("| an operation of | {} |", columns.iter().map(|(_, v)| v.as_str()).collect::<Vec<_>>().join(" | "));
    println!("|---|{}", "---|".repeat(columns.len()));
    for (label, counters) in table {
        let mut line = format!("| {label} |");
        for (key, _) in &columns {
            let _ = write!(line, " {:.2} |", counters.get(key).copied().unwrap_or(0.0) + 0.0);
        }
        println!("{line}");
    }
    if !notes.is_empty() {
        println!();
        notes.iter().for_each(|note| println!("{note}"));
    }
    if let Some(path) = &o.json {
        driver::write_json(path, &json);
    }
}

/// Counters of one operation: the difference of two runs, of which one does as much again, so that what starting and ending a
/// sandbox costs is not in it.
fn per_operation(o: &Options, row: &str, n: u32) -> Result<Counters, String> {
    let (less, more) = (counters(o, row, n)?, counters(o, row, 2 * n)?);
    let of = |from: &Counters, key: &str| from.get(key).copied().unwrap_or(0.0);
    let figure = |key: &String| (of(&more, key) - of(&less, key)) / f64::from(n);
    Ok(more.keys().map(|key| (key.clone(), figure(key))).collect())
}

fn counters(o: &Options, row: &str, n: u32) -> Result<Counters, String> {
    let file = std::env::temp_dir().join(format!("bench-counts-{}", std::process::id()));
    let options = ["--stats=json".to_owned(), format!("--log-file={}", file.display())];
    let words = guest_words(row, Some(n));
    let done = systems::bartizan(o, &options).run(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let text = std::fs::read_to_string(&file).unwrap_or_default();
    let _ = std::fs::remove_file(&file);
    done?;
    let report = text.lines().rev().find_map(|l| serde_json::from_str::<Value>(l).ok());
    flatten(&report.ok_or("no report")?).ok_or_else(|| "a report of another form".to_owned())
}

/// The report's counters by name; `exit NAME` for the reasons of exits.
fn flatten(report: &Value) -> Option<Counters> {
    let list = |name: &str| -> Option<Vec<(String, f64)>> {
        let entry = |e: &Value| Some((e.get("name")?.as_str()?.to_owned(), e.get("count")?.as_f64()?));
        report.get(name)?.as_array()?.iter().map(entry).collect()
    };
    let mut all = Counters::new();
    let exits = list("exits")?;
    all.insert("exits".to_owned(), exits.iter().map(|(_, n)| n).sum());
    all.extend(exits.into_iter().map(|(name, n)| (format!("exit {name}"), n)));
    all.insert("calls".to_owned(), list("syscalls")?.iter().map(|(_, n)| n).sum());
    for (name, value) in report.as_object()?.iter().filter(|(name, _)| !NO_COUNTS.contains(&name.as_str())) {
        if let Some(n) = value.as_f64() {
            all.insert(name.clone(), n);
        }
    }
    Some(all)
}
