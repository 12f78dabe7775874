//! Rows of what a system takes while its program sleeps: memory and CPU time, seen from outside.
use std::io::{Read, Write};
use std::time::Duration;

use super::raw::Crowd;
use super::{Row, Unit};
use crate::held::{Held, host_kernel_memory};
use crate::systems::{System, guest_words};

const CROWD: u32 = 16_384;

pub const ROWS: &[Row] = &[
    Row::outside("resident_sleep", "memory of all processes of a system that runs sleep", Unit::Bytes, |system| {
        Ok(Held::start(system, &["/bin/sh", "-c", "echo ready; exec /bin/sleep 1000"])?.memory())
    }),
    Row::outside("asleep_cpu", "CPU while a program sleeps", Unit::Share, |system| {
        Ok(hold(system, 1)?.cpu_share(ASLEEP))
    }),
    Row::outside("asleep_cpu_16384", "CPU while 16,384 threads sleep", Unit::Share, |system| {
        Ok(hold(system, CROWD)?.cpu_share(ASLEEP))
    })
    .slow(),
    Row::outside("thread_memory", "host memory a sleeping thread beyond its guest pages", Unit::Bytes, |system| {
        let one = beyond(system, 1)?;
        Ok((beyond(system, CROWD)? - one) / f64::from(CROWD - 1))
    })
    .slow(),
    Row::outside("thread_kernel_memory", "memory of the host's kernel a sleeping thread", Unit::Bytes, |system| {
        let before = host_kernel_memory();
        let held = hold(system, CROWD)?;
        let after = host_kernel_memory();
        drop(held);
        Ok((after - before) / f64::from(CROWD))
    })
    .slow(),
];

/// How long sleepers are watched.
const ASLEEP: Duration = Duration::from_secs(1);

fn hold(system: &System, threads: u32) -> Result<Held, String> {
    let words = guest_words("hold", Some(threads));
    Held::start(system, &words.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Memory of the processes of a system with so many threads asleep, beyond the pages of the program, in bytes.
fn beyond(system: &System, threads: u32) -> Result<f64, String> {
    let held = hold(system, threads)?;
    Ok(held.memory() - held.said.parse::<f64>().unwrap_or(0.0))
}

/// The program of these rows: this many threads asleep, until standard input ends. Prints its own anonymous memory in bytes.
pub fn program(threads: u32) {
    let crowd = Crowd::new(threads);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("RssAnon:")).unwrap_or_default();
    let kib: u64 = line.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
    println!("{}", kib * 1024);
    let _ = std::io::stdout().flush();
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    crowd.end();
}
