//! Figures: units, medians, spread, and how they are shown.
use super::rows::Unit;

/// What several runs of one row on one system gave.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Summary {
    /// None of no values.
    pub fn of(values: &[f64]) -> Option<Summary> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Summary { median: *sorted.get(sorted.len() / 2)?, least: *sorted.first()?, most: *sorted.last()? })
    }

    /// Half the distance between the extremes, in percent of the median.
    pub fn spread_percent(&self) -> f64 {
        if self.median == 0.0 { 0.0 } else { (self.most - self.least) / 2.0 / self.median.abs() * 100.0 }
    }
}

/// A figure with its unit, short.
pub fn show(value: f64, unit: Unit) -> String {
    let scaled = |step: f64, names: &[&str]| {
        let mut value = value;
        let mut at = 0;
        while value.abs() >= step && at + 1 < names.len() {
            value /= step;
            at += 1;
        }
        let digits = if at == 0 { 0 } else { 1 + usize::from(value.abs() < 10.0) };
        format!("{value:.digits$} {}", names.get(at).copied().unwrap_or_default())
    };
    match unit {
        Unit::Time => scaled(1000.0, &["ns", "µs", "ms", "s"]),
        Unit::Bytes => scaled(1024.0, &["B", "KiB", "MiB", "GiB"]),
        Unit::Share => format!("{:.2} %", value * 100.0),
    }
}
