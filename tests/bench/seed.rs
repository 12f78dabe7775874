//! The seed measurement on whole systems: CPU time of all processes of a system while something enumerates thread groups a hundred
//! times a second, beside many threads asleep; less what waking so often costs. With the walk over all tasks that this is to be compared
//! with: the benchmark `enumeration` of the sentry.
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::driver;
use super::held::Held;
use super::options::Options;
use super::rows::seeding::Way;
use super::systems::{self, System, guest_words};

/// Processes, and threads of each.
const SHAPES: &[(u32, u32)] = &[(1, 1), (1, 1024), (1, 4096), (1, 8192), (1, 16_384), (4096, 1), (64, 256)];
const PERIOD: Duration = Duration::from_millis(10);

/// Measures and prints.
pub fn run(o: &Options) {
    let seconds = o.seconds.unwrap_or(if o.quick { 10 } else { 120 });
    let systems = systems::all(o);
    let named = systems::bartizan(o, &["--name".to_owned(), name()]);
    println!("CPU time of all processes of a system in {seconds} s of 100 enumerations a second\n");
    println!(
        "| processes × threads | system | only waking | a ps loop inside | enumerating alone | `bartizan ps` outside |"
    );
    println!("|---|---|---|---|---|---|");
    let mut json = Vec::new();
    for &(processes, threads) in SHAPES {
        for system in &systems {
            let watched = |way| cpu_ms(system, way, processes, threads, seconds);
            let outside = (system.name == "bartizan").then(|| from_outside(o, &named, processes, threads, seconds));
            let figures = [watched(Way::Wake), watched(Way::Ps)];
            let alone = match &figures {
                [Ok(wake), Ok(ps)] => Ok(ps - wake),
                _ => Err(String::new()),
            };
            let cell = |figure: &Result<f64, String>| match figure {
                Ok(ms) => format!("{ms:.0} ms ({:.3} %)", ms / f64::from(seconds) / 10.0),
                Err(why) => format!("– {why}"),
            };
            let [wake, ps] = &figures;
            println!(
                "| {processes} × {threads} | {} | {} | {} | {} | {} |",
                system.name,
                cell(wake),
                cell(ps),
                cell(&alone),
                outside.as_ref().map_or_else(String::new, &cell)
            );
            let number = |f: Option<&Result<f64, String>>| match f {
                Some(Ok(ms)) => ms.to_string(),
                _ => "null".to_owned(),
            };
            json.push(format!(
                "{{\"processes\":{processes},\"threads\":{threads},\"system\":\"{}\",\"seconds\":{seconds},\"wake_ms\":{},\"ps_ms\":{},\"outside_ms\":{}}}",
                system.name,
                number(Some(wake)),
                number(Some(ps)),
                number(outside.as_ref())
            ));
        }
    }
    if let Some(path) = &o.json {
        driver::write_json(path, &json);
    }
}

fn name() -> String {
    format!("bench-{}", std::process::id())
}

fn start(system: &System, way: Way, processes: u32, threads: u32, seconds: u32) -> Result<Held, String> {
    let words = guest_words(&format!("seed:{}:{processes}:{threads}", way.word()), Some(seconds));
    Held::start(system, &words.iter().map(String::as_str).collect::<Vec<_>>())
}

/// CPU time in ms while the program inside goes its way; scaled to a hundred rounds a second where it could not go so fast.
fn cpu_ms(system: &System, way: Way, processes: u32, threads: u32, seconds: u32) -> Result<f64, String> {
    let held = start(system, way, processes, threads, seconds)?;
    let before = held.cpu_ns();
    // The last rounds may be slow.
    let rounds = held.next_line(Duration::from_secs(u64::from(seconds) + 60)).and_then(|l| l.parse::<f64>().ok());
    let rounds = rounds.filter(|&n| n > 0.0).ok_or("the program ended early")?;
    Ok((held.cpu_ns() - before) / 1e6 * f64::from(seconds) * 100.0 / rounds)
}

/// CPU time of the sandbox in ms while `bartizan ps` is run as often as it goes, a hundred times a second at most; scaled to that.
/// The callers' own time is not in it.
fn from_outside(o: &Options, named: &System, processes: u32, threads: u32, seconds: u32) -> Result<f64, String> {
    // Longer than it is watched, by what starting the watch may take.
    let held = start(named, Way::Hold, processes, threads, seconds + 5)?;
    let (stop, during) = (AtomicBool::new(false), Duration::from_secs(seconds.into()));
    let (share, calls) = std::thread::scope(|scope| {
        let caller = scope.spawn(|| {
            let (start, mut calls) = (Instant::now(), 0);
            while !stop.load(Ordering::SeqCst) {
                let mut ps = Command::new(systems::bartizan_program(o));
                ps.args(["ps", &name(), "--json"]).stdin(Stdio::null()).stdout(Stdio::null());
                calls += u32::from(ps.status().is_ok_and(|s| s.success()));
                std::thread::sleep((PERIOD * calls).saturating_sub(start.elapsed()));
            }
            calls
        });
        let share = held.child_cpu_share(during);
        stop.store(true, Ordering::SeqCst);
        (share, caller.join().unwrap_or(0))
    });
    if calls == 0 {
        return Err("bartizan ps failed".to_owned());
    }
    let wanted = f64::from(seconds) * 100.0;
    Ok(share * f64::from(seconds) * 1e3 * wanted / f64::from(calls))
}
