//! The driving side: runs every row on every system in turn, several times over, and prints medians, spread and ratios.
use std::fmt::Write as _;

use super::figures::{Summary, show};
use super::options::Options;
use super::rows::{self, Measure, Row, Unit};
use super::systems::{self, System, guest_words};

/// Measures and prints.
pub fn run(o: &Options) {
    let systems = systems::all(o);
    let wanted = |r: &&Row| if o.rows.is_empty() { r.quick || !o.quick } else { o.rows.iter().any(|n| n == r.name) };

    println!("| what | {} |", systems.iter().map(|s| s.name).collect::<Vec<_>>().join(" | "));
    println!("|---|{}", "---|".repeat(systems.len()));
    let (mut json, mut notes) = (Vec::new(), Vec::new());
    for row in rows::all().filter(wanted) {
        let mut figures = vec![Vec::new(); systems.len()];
        let mut failed: Vec<Option<String>> = vec![None; systems.len()];
        for _ in 0..o.repeats {
            for ((system, figures), failed) in systems.iter().zip(&mut figures).zip(&mut failed) {
                // What failed once is not tried again: it would fail as slowly.
                if failed.is_none() {
                    match once(system, row) {
                        Ok(figure) => figures.push(figure),
                        Err(why) => *failed = Some(why),
                    }
                }
            }
        }
        let summaries: Vec<Option<Summary>> = figures.iter().map(|f| Summary::of(f)).collect();
        let native = summaries.first().copied().flatten();
        let mut cells = Vec::new();
        for (i, ((system, summary), failed)) in systems.iter().zip(&summaries).zip(&failed).enumerate() {
            let mut cell = summary.map_or_else(|| "–".to_owned(), |s| cell(&s, row.unit, native.filter(|_| i > 0)));
            if let Some(why) = failed {
                notes.push(format!("{}, {}: {why}", row.name, system.name));
                let _ = write!(cell, " [{}]", notes.len());
            }
            cells.push(cell);
        }
        println!("| {} | {} |", row.label, cells.join(" | "));
        json.push(entry(row, &systems, &summaries, &failed));
    }
    if !notes.is_empty() {
        println!();
        notes.iter().enumerate().for_each(|(i, note)| println!("[{}] {note}", i + 1));
    }
    if let Some(path) = &o.json {
        write_json(path, &json);
    }
}

/// One figure of a row on a system.
fn once(system: &System, row: &Row) -> Result<f64, String> {
    match row.measure {
        Measure::Inside(_) => {
            let words = guest_words(row.name, None);
            let done = system.run(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
            done.text.parse().map_err(|_| format!("no figure: {}", done.text))
        }
        Measure::Outside(measure) => measure(system),
    }
}

fn cell(s: &Summary, unit: Unit, native: Option<Summary>) -> String {
    let ratio = match native {
        Some(n) if n.median > 0.0 && unit != Unit::Share => format!(" (×{:.1})", s.median / n.median),
        _ => String::new(),
    };
    let spread = if s.most > s.least { format!(" ±{:.0} %", s.spread_percent()) } else { String::new() };
    format!("{}{ratio}{spread}", show(s.median, unit))
}

fn entry(row: &Row, systems: &[System], summaries: &[Option<Summary>], failed: &[Option<String>]) -> String {
    let mut out = format!("{{\"row\":\"{}\",\"unit\":\"{}\"", row.name, row.unit.name());
    for ((system, summary), failed) in systems.iter().zip(summaries).zip(failed) {
        let _ = match (summary, failed) {
            (Some(s), _) => {
                write!(out, ",\"{}\":{{\"median\":{},\"min\":{},\"max\":{}}}", system.name, s.median, s.least, s.most)
            }
            (None, why) => {
                let why = why.as_deref().unwrap_or_default().replace(['"', '\\'], "'");
                write!(out, ",\"{}\":{{\"failed\":\"{why}\"}}", system.name)
            }
        };
    }
    out + "}"
}

/// Writes a JSON array of these entries; ends the program when it cannot.
pub fn write_json(path: &str, entries: &[String]) {
    if let Err(e) = std::fs::write(path, format!("[\n{}\n]\n", entries.join(",\n"))) {
        eprintln!("bench: cannot write {path}: {e}");
        std::process::exit(1);
    }
}
