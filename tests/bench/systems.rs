//! The systems under measurement: how each runs a command, and why one failed.
use std::process::Command;
use std::time::Instant;

use super::options::Options;

/// Seconds a command may take, many of which are the making of large crowds on slow systems.
const LIMIT_SECONDS: u64 = 120;

/// A system under measurement: its name and the words before the command.
pub struct System {
    /// What the table and the JSON call it.
    pub name: &'static str,
    prefix: Vec<String>,
}

/// What a command gave.
pub struct Done {
    /// Its standard output.
    pub text: String,
    /// From before its start until after its end.
    pub wall_ns: f64,
}

/// bartizan's program.
pub fn bartizan_program(o: &Options) -> String {
    let beside = || std::env::current_exe().map(|p| p.with_file_name("bartizan").display().to_string());
    o.bartizan.clone().or_else(|| beside().ok()).unwrap_or_else(|| "bartizan".to_owned())
}

/// bartizan with the wanted options of `bartizan run` and these.
pub fn bartizan(o: &Options, options: &[String]) -> System {
    let mut prefix = vec![bartizan_program(o), "run".to_owned()];
    prefix.extend(o.run_options.iter().chain(options).cloned());
    prefix.push("--".to_owned());
    System { name: "bartizan", prefix }
}

/// The systems that the options ask for; the host itself is the first.
pub fn all(o: &Options) -> Vec<System> {
    let mut all = vec![System { name: "native", prefix: Vec::new() }, bartizan(o, &[])];
    if let Some(runsc) = &o.runsc {
        for (name, platform) in [("systrap", "--platform=systrap"), ("ptrace", "--platform=ptrace")] {
            let words = [runsc.as_str(), platform, "--network=none", "do"];
            all.push(System { name, prefix: words.map(str::to_owned).to_vec() });
        }
    }
    all
}

impl System {
    /// The command line that runs `words` on this system.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut all = self.prefix.iter().map(String::as_str).chain(words.iter().copied());
        let mut command = Command::new(all.next().unwrap_or_default());
        command.args(all);
        command
    }

    /// Runs a command to its end; Err says in a few words why there is nothing to show.
    pub fn run(&self, words: &[&str]) -> Result<Done, String> {
        let start = Instant::now();
        let out = tests::output(&mut self.command(words), LIMIT_SECONDS)
            .map_err(|why| if why.contains("did not end") { format!("no end in {LIMIT_SECONDS} s") } else { why })?;
        let wall_ns = start.elapsed().as_nanos() as f64;
        if out.status.success() {
            Ok(Done { text: String::from_utf8_lossy(&out.stdout).trim().to_owned(), wall_ns })
        } else {
            Err(reason(&String::from_utf8_lossy(&out.stderr), out.status))
        }
    }
}

/// The line of a program's complaints that says most, and how it ended.
fn reason(complaints: &str, status: std::process::ExitStatus) -> String {
    let lines: Vec<&str> = complaints.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    // After a Rust panic's place comes its text; the notes after that say nothing of the cause.
    let panic = lines.iter().position(|l| l.contains("panicked at")).and_then(|i| lines.get(i + 1));
    match panic.or(lines.last()) {
        Some(line) => format!("{} ({status})", line.chars().take(160).collect::<String>()),
        None => status.to_string(),
    }
}

/// The words that run a row of this program.
pub fn guest_words(row: &str, operations: Option<u32>) -> Vec<String> {
    let own = std::env::current_exe().map_or_else(|_| "bench".to_owned(), |p| p.display().to_string());
    let mut words = vec![own, "guest".to_owned(), row.to_owned()];
    words.extend(operations.map(|n| n.to_string()));
    words
}
