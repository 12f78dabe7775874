//! The command line: options to configuration, failures to one sentence and a status. Owns what the user reads; never what
//! a sandbox does.
mod accounts;
mod control;
mod doctor;
mod logging;
mod options;
mod report;
mod run;
mod value;

use std::ffi::OsString;
use std::fmt;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

/// Exit statuses of bartizan itself; otherwise the status is the command's.
pub mod status {
    /// A bad command line.
    pub const USAGE: u8 = 2;
    /// `--timeout` ended the command.
    pub const TIMEOUT: u8 = 124;
    /// bartizan itself failed.
    pub const FAILED: u8 = 125;
    /// The command is not executable.
    pub const NOT_EXECUTABLE: u8 = 126;
    /// The command was not found.
    pub const NOT_FOUND: u8 = 127;
}

/// A failure told to the user: one sentence and an exit status.
#[derive(Debug)]
pub struct Failure {
    /// Exit status.
    pub status: u8,
    /// The sentence, without a full stop.
    pub message: String,
}

impl Failure {
    /// A failure of bartizan itself (status 125).
    pub fn internal(message: impl fmt::Display) -> Failure {
        Failure { status: status::FAILED, message: message.to_string() }
    }

    /// A bad command line (status 2).
    pub fn usage(message: impl fmt::Display) -> Failure {
        Failure { status: status::USAGE, message: message.to_string() }
    }
}

/// Runs the command line; the status to exit with.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    // A worker that has failed must not leave a sandbox behind that waits for it. Neither may the report need more of the
    // host than the jail allows: no backtrace.
    std::panic::set_hook(Box::new(|failure| {
        eprintln!("bartizan: internal error: {failure}");
        std::process::exit(i32::from(status::FAILED));
    }));
    let cli = match options::Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            let _ = e.print();
            return ExitCode::SUCCESS;
        }
        Err(e) => return report(&Failure::usage(one_sentence(&e))),
    };
    let result = match cli.command {
        options::Command::Run(options) => run::run(&options),
        options::Command::List(options) => control::list(&options),
        options::Command::Ps(options) => control::ps(&options),
        options::Command::Kill(options) => control::kill(&options),
        options::Command::Doctor(options) => doctor::doctor(&options),
    };
    match result {
        Ok(status) => ExitCode::from(status),
        Err(failure) => report(&failure),
    }
}

fn report(failure: &Failure) -> ExitCode {
    eprintln!("bartizan: {}", failure.message);
    ExitCode::from(failure.status)
}

/// The essence of a clap error, which spans several lines.
fn one_sentence(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return "no subcommand given; try 'bartizan --help'".to_owned();
    }
    let text = error.to_string();
    let mut lines = text.lines().map(str::trim).take_while(|l| !l.starts_with("Usage:") && !l.starts_with("For more"));
    let first = lines.next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    let rest: Vec<&str> = lines.filter(|l| !l.is_empty() && !l.starts_with("tip:")).collect();
    if rest.is_empty() { first } else { format!("{first} {}", rest.join(" ")) }
}
