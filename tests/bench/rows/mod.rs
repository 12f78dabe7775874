//! The rows of the table, and how a row counts its operations. A row's code gives nanoseconds an operation (or another unit's
//! figure), and makes a given number of operations when it is counted rather than timed.
mod calls;
mod crowds;
pub mod growth;
mod holding;
mod memory;
mod programs;
mod raw;
pub mod seeding;
mod tasks;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::systems::System;

/// What a figure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Nanoseconds.
    Time,
    /// Bytes.
    Bytes,
    /// A part of one CPU; 1 is all of it.
    Share,
}

impl Unit {
    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Time => "ns",
            Unit::Bytes => "bytes",
            Unit::Share => "cpu",
        }
    }
}

/// Where a row is measured.
pub enum Measure {
    /// By a program on the system: the figure.
    Inside(fn() -> f64),
    /// By the driving side.
    Outside(fn(&System) -> Result<f64, String>),
}

/// A row of the table.
pub struct Row {
    pub name: &'static str,
    pub label: &'static str,
    /// Whether it belongs to the quick form.
    pub quick: bool,
    pub unit: Unit,
    /// Operations to make when they are counted; 0 where counting says nothing.
    pub counted: u32,
    pub measure: Measure,
}

impl Row {
    /// A row of the quick form that gives nanoseconds.
    const fn inside(name: &'static str, label: &'static str, counted: u32, measure: fn() -> f64) -> Row {
        Row { name, label, quick: true, unit: Unit::Time, counted, measure: Measure::Inside(measure) }
    }

    const fn outside(
        name: &'static str,
        label: &'static str,
        unit: Unit,
        measure: fn(&System) -> Result<f64, String>,
    ) -> Row {
        Row { name, label, quick: true, unit, counted: 0, measure: Measure::Outside(measure) }
    }

    /// Leaves it to the full form.
    const fn slow(mut self) -> Row {
        self.quick = false;
        self
    }
}

/// All rows in the table's order.
pub fn all() -> impl Iterator<Item = &'static Row> {
    [calls::ROWS, memory::ROWS, tasks::ROWS, crowds::ROWS, holding::ROWS, programs::ROWS].into_iter().flatten()
}

/// The row of this name.
pub fn find(name: &str) -> Option<&'static Row> {
    all().find(|r| r.name == name)
}

/// The wanted number of operations, when they are counted.
static OPERATIONS: OnceLock<u32> = OnceLock::new();

/// Runs a row that is measured inside, and prints its figure; or the program of a row that is measured outside.
pub fn run(name: &str, operations: Option<u32>) {
    if name == "hold" {
        return holding::program(operations.unwrap_or(1));
    }
    if let Some(dimension) = name.strip_prefix("growth:") {
        return growth::run(dimension, operations.unwrap_or(1));
    }
    if let Some(what) = name.strip_prefix("seed:") {
        return seeding::run(what, operations.unwrap_or(1));
    }
    if let Some(n) = operations {
        let _ = OPERATIONS.set(n);
    }
    if let Some(Measure::Inside(measure)) = find(name).map(|r| &r.measure) {
        println!("{:.1}", measure());
    } else {
        eprintln!("bench: no row named '{name}' is measured inside");
        std::process::exit(2);
    }
}

/// How often to do it: the wanted number, or that for a good figure.
fn times(usual: u32) -> u32 {
    OPERATIONS.get().copied().unwrap_or(usual)
}

fn per(start: Instant, n: u32) -> f64 {
    start.elapsed().as_nanos() as f64 / f64::from(n.max(1))
}

const BUDGET: Duration = Duration::from_millis(200);

/// Nanoseconds of `f`, done for a fifth of a second.
fn looped(mut f: impl FnMut()) -> f64 {
    let start = Instant::now();
    if let Some(&n) = OPERATIONS.get() {
        (0..n).for_each(|_| f());
        return per(start, n);
    }
    let mut n = 0;
    while start.elapsed() < BUDGET {
        (0..16).for_each(|_| f());
        n += 16;
    }
    per(start, n)
}
