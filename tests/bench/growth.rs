//! Growth: the cost of operations at 1, 10, … 10,000 tasks, processes, mappings, open files and directory entries, and the exponent
//! that fits: 0 is flat, 1 grows with the number.
use std::fmt::Write as _;

use super::driver;
use super::figures::{Summary, show};
use super::options::Options;
use super::rows::Unit;
use super::rows::growth::DIMENSIONS;
use super::systems::{self, System, guest_words};

const SIZES: &[u32] = &[1, 10, 100, 1000, 10_000];

/// Measures and prints.
pub fn run(o: &Options) {
    let sizes = if o.quick { SIZES.get(..4).unwrap_or(SIZES) } else { SIZES };
    let systems = systems::all(o);
    let shown: Vec<String> = sizes.iter().map(u32::to_string).collect();
    println!("| beside | operation | system | {} | exponent | of the last step |", shown.join(" | "));
    println!("|---|---|---|{}---|---|", "---|".repeat(sizes.len()));
    let mut json = Vec::new();
    for (dimension, _) in DIMENSIONS {
        // By system: for each operation its costs by size.
        let all: Vec<_> = systems.iter().map(|s| costs(s, dimension, sizes, o.repeats)).collect();
        let names: Vec<String> =
            all.iter().flatten().next().map_or(Vec::new(), |c| c.iter().map(|(n, _)| n.clone()).collect());
        for (i, name) in names.iter().enumerate() {
            for (system, costs) in systems.iter().zip(&all) {
                match costs {
                    Ok(costs) => {
                        let Some((_, costs)) = costs.get(i) else { continue };
                        let points: Vec<(f64, f64)> =
                            sizes.iter().zip(costs).map(|(&n, &ns)| (f64::from(n), ns)).collect();
                        let (whole, last) =
                            (exponent(&points), exponent(points.get(points.len().saturating_sub(2)..).unwrap_or(&[])));
                        let cells: Vec<String> = costs.iter().map(|&ns| show(ns, Unit::Time)).collect();
                        println!(
                            "| {dimension} | {name} | {} | {} | {whole:.2} | {last:.2} |",
                            system.name,
                            cells.join(" | ")
                        );
                        let mut entry = format!(
                            "{{\"beside\":\"{dimension}\",\"operation\":\"{name}\",\"system\":\"{}\",\"exponent\":{whole:.3},\"last\":{last:.3}",
                            system.name
                        );
                        for (n, ns) in &points {
                            let _ = write!(entry, ",\"{n}\":{ns}");
                        }
                        json.push(entry + "}");
                    }
                    Err(why) if i == 0 => println!("| {dimension} | – | {} | {why} |", system.name),
                    Err(_) => {}
                }
            }
        }
    }
    if let Some(path) = &o.json {
        driver::write_json(path, &json);
    }
}

/// For each operation of a dimension, its cost at each size.
fn costs(system: &System, dimension: &str, sizes: &[u32], repeats: usize) -> Result<Vec<(String, Vec<f64>)>, String> {
    let mut all: Vec<(String, Vec<f64>)> = Vec::new();
    for (at, &n) in sizes.iter().enumerate() {
        let mut runs: Vec<Vec<f64>> = Vec::new();
        for _ in 0..repeats {
            let words = guest_words(&format!("growth:{dimension}"), Some(n));
            let done = system.run(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
            for (i, line) in done.text.lines().enumerate() {
                let (ns, name) = line.split_once(' ').ok_or("no figure")?;
                let name =
                    name.strip_suffix(&format!(", of {n}")).map_or(name.to_owned(), |name| format!("{name} (all)"));
                if i == all.len() {
                    all.push((name, Vec::new()));
                }
                if i == runs.len() {
                    runs.push(Vec::new());
                }
                if let Some(run) = runs.get_mut(i) {
                    run.push(ns.parse().map_err(|_| format!("no figure: {line}"))?);
                }
            }
        }
        for ((_, costs), run) in all.iter_mut().zip(&runs) {
            costs.extend(Summary::of(run).map(|s| s.median));
            debug_assert_eq!(costs.len(), at + 1);
        }
    }
    Ok(all)
}

/// The slope of cost over size, both as logarithms, by least squares.
fn exponent(points: &[(f64, f64)]) -> f64 {
    let logs: Vec<(f64, f64)> = points.iter().map(|(n, ns)| (n.ln(), ns.max(1.0).ln())).collect();
    let count = logs.len() as f64;
    let (mx, my) = (logs.iter().map(|p| p.0).sum::<f64>() / count, logs.iter().map(|p| p.1).sum::<f64>() / count);
    let above: f64 = logs.iter().map(|p| (p.0 - mx) * (p.1 - my)).sum();
    let below: f64 = logs.iter().map(|p| (p.0 - mx).powi(2)).sum();
    if below > 0.0 { above / below } else { 0.0 }
}
