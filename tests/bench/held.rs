//! Programs that hold still on a system, and what all its processes take meanwhile: memory and CPU time. Everything that descends
//! from the started command counts, and so does what its parents leave behind.
use std::collections::{BTreeSet, HashMap};
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::systems::System;

/// How long a program may take to say that it is ready.
const READY: Duration = Duration::from_secs(60);

/// A started program that has said that it is ready.
pub struct Held {
    child: Child,
    /// The process whose descendants are the system's: this program, which holds one system at a time.
    root: i32,
    /// The program ends when this is closed.
    _input: Option<ChildStdin>,
    /// Its first line.
    pub said: String,
    lines: mpsc::Receiver<String>,
}

impl Held {
    /// Starts a command that prints a line when it is ready and ends when its standard input does.
    pub fn start(system: &System, words: &[&str]) -> Result<Held, String> {
        // Orphans come to this process, so that a system that leaves its children behind still counts whole.
        unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
        let mut command = system.command(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|e| e.to_string())?;
        let output = child.stdout.take();
        let input = child.stdin.take();
        let (tell, lines) = mpsc::channel();
        std::thread::spawn(move || {
            let lines = output.into_iter().flat_map(|o| BufReader::new(o).lines().map_while(Result::ok));
            for line in lines {
                let _ = tell.send(line);
            }
        });
        let mut held = Held { child, root: std::process::id() as i32, _input: input, said: String::new(), lines };
        let line = match held.lines.recv_timeout(READY) {
            Ok(line) => line,
            Err(mpsc::RecvTimeoutError::Timeout) => return Err("not ready in time".to_owned()),
            Err(mpsc::RecvTimeoutError::Disconnected) => String::new(),
        };
        line.trim().clone_into(&mut held.said);
        if held.said.is_empty() { Err(held.complaint()) } else { Ok(held) }
    }

    /// What a program that ended early complained of.
    fn complaint(&mut self) -> String {
        let mut last = String::new();
        if let Some(errors) = self.child.stderr.take() {
            for line in BufReader::new(errors).lines().map_while(Result::ok).filter(|l| !l.contains("RUST_BACKTRACE")) {
                last = line;
            }
        }
        format!("ended before it was ready: {last}")
    }

    /// Its next line, within so long.
    pub fn next_line(&self, within: Duration) -> Option<String> {
        self.lines.recv_timeout(within).ok()
    }

    /// The proportional share of resident memory of all its processes, in bytes.
    pub fn memory(&self) -> f64 {
        descendants(self.root).into_iter().filter_map(pss).sum()
    }

    /// CPU time that all its processes have taken, in ns.
    pub fn cpu_ns(&self) -> f64 {
        descendants(self.root).into_iter().filter_map(cpu_ns).sum()
    }

    /// CPU time per time, for as long as this; 1 is one CPU.
    pub fn cpu_share(&self, during: Duration) -> f64 {
        let (start, before) = (Instant::now(), self.cpu_ns());
        std::thread::sleep(during);
        (self.cpu_ns() - before) / start.elapsed().as_nanos() as f64
    }
}

impl Held {
    /// The same of the started process alone.
    pub fn child_cpu_share(&self, during: Duration) -> f64 {
        let pid = self.child.id() as i32;
        let (start, before) = (Instant::now(), cpu_ns(pid));
        std::thread::sleep(during);
        (cpu_ns(pid).unwrap_or(0.0) - before.unwrap_or(0.0)) / start.elapsed().as_nanos() as f64
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for pid in descendants(self.root) {
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        let _ = self.child.wait();
        // Orphans that came here.
        while unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) } > 0 {}
    }
}

/// All that descends from a process, itself not included.
fn descendants(root: i32) -> Vec<i32> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    let numbers = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in numbers.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok()) {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The name before it may contain anything.
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        if let Some(parent) = parent {
            children.entry(parent).or_default().push(pid);
        }
    }
    let (mut all, mut todo) = (BTreeSet::new(), vec![root]);
    while let Some(pid) = todo.pop() {
        for &child in children.get(&pid).into_iter().flatten() {
            if all.insert(child) {
                todo.push(child);
            }
        }
    }
    all.into_iter().collect()
}

fn pss(pid: i32) -> Option<f64> {
    kib(&format!("/proc/{pid}/smaps_rollup"), &["Pss:"])
}

/// Memory that the host's kernel keeps for everybody: stacks of threads, its own objects, page tables; in bytes.
pub fn host_kernel_memory() -> f64 {
    kib("/proc/meminfo", &["Slab:", "KernelStack:", "PageTables:", "SecPageTables:"]).unwrap_or(0.0)
}

/// The sum of lines of a file that give KiB, in bytes.
fn kib(path: &str, names: &[&str]) -> Option<f64> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = |name: &&str| {
        let line = text.lines().find(|l| l.starts_with(name))?;
        line.split_whitespace().nth(1)?.parse::<f64>().ok()
    };
    Some(names.iter().filter_map(line).sum::<f64>() * 1024.0)
}

fn cpu_ns(pid: i32) -> Option<f64> {
    let mut clock = 0;
    let mut t: libc::timespec = unsafe { std::mem::zeroed() };
    let known =
        unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) == 0 && libc::clock_gettime(clock, &raw mut t) == 0 };
    known.then_some(t.tv_sec as f64 * 1e9 + t.tv_nsec as f64)
}
