//! The options of every subcommand.
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use super::value;

/// Runs unmodified Linux x86-64 programs in KVM virtual CPUs, with no guest kernel.
#[derive(Parser, Debug)]
#[command(name = "bartizan", version, disable_help_subcommand = true, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run one command in a sandbox; the exit status is the command's.
    Run(Box<RunOptions>),
    /// List the running sandboxes that have a name.
    List(ListOptions),
    /// Show the processes of a named sandbox, or of all.
    Ps(PsOptions),
    /// Send a signal into a named sandbox.
    Kill(KillOptions),
    /// Say what this host's KVM can do, and what is missing.
    Doctor(DoctorOptions),
}

/// Form of `--stats`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StatsFormat {
    /// Lines for people.
    Text,
    /// One JSON object.
    Json,
}

/// `--service`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ServiceMode {
    /// When it pays.
    Auto,
    /// Whenever a CPU is idle, whether it pays or not.
    Always,
    /// Never.
    Off,
}

/// `bartizan run`.
#[derive(Args, Debug)]
pub struct RunOptions {
    /// Root file system; without it the host's own / is used. Read-only under a discardable in-memory overlay
    #[arg(long, value_name = "DIR")]
    pub rootfs: Option<PathBuf>,
    /// Show a host file or directory at DST, writable unless :ro (may be repeated)
    #[arg(long, value_name = "SRC:DST[:ro]", value_parser = value::bind)]
    pub bind: Vec<value::Bind>,
    /// Mount an empty in-memory file system (may be repeated)
    #[arg(long, value_name = "DIR", value_parser = value::mount_point)]
    pub tmpfs: Vec<PathBuf>,
    /// Working directory of the command [default: the caller's, or / with --rootfs]
    #[arg(long, short = 'w', value_name = "DIR", value_parser = value::absolute)]
    pub workdir: Option<PathBuf>,
    /// Set an environment variable, or pass the caller's (may be repeated)
    #[arg(long, short = 'e', value_name = "K=V", value_parser = value::env)]
    pub env: Vec<(String, Option<String>)>,
    /// Run as this user and group, by number or by name [default: the caller's]
    #[arg(long, short = 'u', value_name = "USER[:GROUP]", value_parser = value::user)]
    pub user: Option<value::User>,
    /// Nothing: standard input is always the caller's
    #[arg(long, short = 'i')]
    pub interactive: bool,
    /// Refuse to run unless standard input is a terminal, which is passed through with or without this option
    #[arg(long, short = 't')]
    pub tty: bool,
    /// Name the sandbox, so that `bartizan list`, `ps` and `kill` find it
    #[arg(long, value_name = "NAME", value_parser = value::name)]
    pub name: Option<String>,
    /// Host name in the sandbox [default: bartizan]
    #[arg(long, value_name = "NAME", value_parser = value::hostname)]
    pub hostname: Option<String>,
    /// Number of CPUs [default: those the caller may use]
    #[arg(long, value_name = "N", value_parser = value::cpus)]
    pub cpus: Option<u16>,
    /// Limit of the sandbox's memory [default: three quarters of the host's]
    #[arg(long, short = 'm', value_name = "SIZE", value_parser = value::memory)]
    pub memory: Option<u64>,
    /// Whether idle CPUs of the sandbox serve system calls of programs on the others, which then need not leave the guest
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub service: ServiceMode,
    /// Never replace system call instructions of programs by jumps, which are quicker on some hosts
    #[arg(long)]
    pub no_rewrite: bool,
    /// Kill everything after this time (500ms, 10s, 2m, 1h; seconds without a unit); the exit status is then 124
    #[arg(long, value_name = "DUR", value_parser = value::duration)]
    pub timeout: Option<Duration>,
    /// Print system calls to standard error: all, the named ones (name,…), or all but the named ones (!name,…) [default: all]
    #[arg(long, value_name = "FILTER", num_args = 0..=1, require_equals = true, default_missing_value = "all")]
    pub strace: Option<String>,
    /// Print counters to standard error at the end
    #[arg(long, value_name = "FORMAT", num_args = 0..=1, require_equals = true, default_missing_value = "text")]
    pub stats: Option<StatsFormat>,
    /// What bartizan says of itself: off, error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "warn", value_parser = value::level)]
    pub log: log::LevelFilter,
    /// Write log, trace and counters to this file and not to standard error
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// `bartizan list`.
#[derive(Args, Debug)]
pub struct ListOptions {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// `bartizan ps`.
#[derive(Args, Debug)]
pub struct PsOptions {
    /// The sandbox's name [default: all that run]
    #[arg(value_name = "NAME", value_parser = value::name)]
    pub name: Option<String>,
    /// Show every thread
    #[arg(long)]
    pub threads: bool,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// `bartizan kill`.
#[derive(Args, Debug)]
pub struct KillOptions {
    /// The sandbox's name
    #[arg(value_name = "NAME", value_parser = value::name)]
    pub name: String,
    /// A signal by name or number
    #[arg(value_name = "SIGNAL", value_parser = value::signal, default_value = "TERM")]
    pub signal: i32,
    /// The process, by its number as `bartizan ps` shows it [default: the command]
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..), conflicts_with = "all")]
    pub pid: Option<i32>,
    /// Every process
    #[arg(long)]
    pub all: bool,
}

/// `bartizan doctor`.
#[derive(Args, Debug)]
pub struct DoctorOptions {
    /// Print the findings as a JSON array
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::*;

    const PAGE: &str = include_str!("../../../docs/bartizan.1");
    const GUIDE: &str = include_str!("../../../docs/USER.md");

    /// The options that the manual page lists for a subcommand.
    fn listed(subcommand: &str) -> BTreeSet<String> {
        let heading = format!(".Ss bartizan {subcommand}");
        let section = PAGE.lines().skip_while(|l| **l != heading).skip(1);
        let items = section.take_while(|l| !l.starts_with(".S")).filter(|l| l.starts_with(".It Fl "));
        let flags = items.flat_map(|l| {
            let words: Vec<&str> = l.split_whitespace().collect();
            words.windows(2).filter(|w| w[0] == "Fl").map(|w| format!("-{}", w[1])).collect::<Vec<_>>()
        });
        flags.collect()
    }

    #[test]
    fn the_manual_page_and_the_guide_have_all_options_and_no_others() {
        for command in Cli::command().get_subcommands() {
            let options = command.get_arguments().filter(|a| !a.is_positional());
            let names = options.flat_map(|a| {
                [a.get_long().map(|l| format!("--{l}")), a.get_short().map(|s| format!("-{s}"))].into_iter().flatten()
            });
            let names: BTreeSet<String> = names.collect();
            assert_eq!(listed(command.get_name()), names, "{}", command.get_name());
            for name in names.iter().filter(|_| command.get_name() == "run") {
                assert!(GUIDE.contains(&format!("`{name}")), "{name} is not in the guide");
            }
        }
    }
}
