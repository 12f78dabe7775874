//! `bartizan run`: from options to a sandbox, and from its end to an exit status.
use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use sentry::syscalls::strace::{Filter, Trace};

use super::logging::Output;
use super::options::{RunOptions, ServiceMode};
use super::{Failure, accounts, report, status};
use crate::jail::Refusal;
use crate::platform::Service;
use crate::sandbox::{BindSource, Outcome, Sandbox, SandboxConfig, SandboxError};

/// PATH of a command that has none.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs the command; the exit status.
pub fn run(options: &RunOptions) -> Result<u8, Failure> {
    if options.tty && !std::io::stdin().is_terminal() {
        return Err(Failure::usage("--tty: standard input is not a terminal"));
    }
    let output = Output::open(options.log_file.as_deref())?;
    output.install(options.log);
    let trace = match options.strace.as_deref() {
        None => None,
        Some("all") => Some(Filter::all()),
        Some("" | "!") => return Err(Failure::usage("--strace: no system call is named")),
        Some(text) => Some(
            Filter::parse(text)
                .map_err(|name| Failure::usage(format!("--strace: there is no system call '{name}'")))?,
        ),
    };
    let config = config(options, trace.map(|filter| Trace::new(filter, Box::new(output.clone()))))?;
    let sandbox = Sandbox::start(config).map_err(|e| failure(&e))?;
    let outcome = sandbox.wait();
    if let Some(format) = options.stats {
        output.text(&report::report(sandbox.kernel(), format));
    }
    sandbox.leave();
    Ok(match outcome {
        Outcome::Exited(code) => code,
        Outcome::Killed(signal) => 128 + signal,
        Outcome::TimedOut => status::TIMEOUT,
    })
}

fn failure(error: &SandboxError) -> Failure {
    let status = match error {
        SandboxError::NotFound(_) => status::NOT_FOUND,
        SandboxError::NotExecutable(..) => status::NOT_EXECUTABLE,
        _ => status::FAILED,
    };
    Failure { status, message: error.to_string() }
}

fn config(options: &RunOptions, trace: Option<Trace>) -> Result<SandboxConfig, Failure> {
    let own_root = options.rootfs.is_none();
    let mut binds = Vec::new();
    for bind in &options.bind {
        binds.push(BindSource {
            source: bind.source.clone(),
            target: bind.target.as_os_str().as_bytes().to_vec(),
            read_only: bind.read_only,
        });
    }
    let cwd = match &options.workdir {
        Some(dir) => dir.clone(),
        None if own_root => std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/")),
        None => PathBuf::from("/"),
    };
    let root = options.rootfs.clone().unwrap_or_else(|| PathBuf::from("/"));
    let (user, home) = match &options.user {
        Some(user) => accounts::resolve(user, &root).map(|(identity, home)| (Some(identity), home))?,
        None => (None, None),
    };
    let host_cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    Ok(SandboxConfig {
        root,
        binds,
        tmpfs: options.tmpfs.iter().map(|p| p.as_os_str().as_bytes().to_vec()).collect(),
        workdir: cwd.into_os_string().into_vec(),
        workdir_must_exist: options.workdir.is_some(),
        env: environment(options, own_root, home),
        user,
        hostname: options.hostname.clone().unwrap_or_else(|| "bartizan".to_owned()).into_bytes(),
        cpus: options.cpus.map_or(host_cpus, usize::from),
        memory: options.memory,
        service: match options.service {
            ServiceMode::Auto => Service::Auto,
            ServiceMode::Always => Service::Always,
            ServiceMode::Off => Service::Off,
        },
        rewrite: !options.no_rewrite,
        timeout: options.timeout,
        trace,
        refusal: if options.log >= log::LevelFilter::Debug { Refusal::Report } else { Refusal::Kill },
        name: options.name.clone(),
        argv: options.command.iter().map(|a| a.as_bytes().to_vec()).collect(),
    })
}

/// The caller's environment where its own root file system is shown, else only what every program expects; then `--env`.
/// `home` is that of a user given by name.
fn environment(options: &RunOptions, own_root: bool, home: Option<String>) -> Vec<Vec<u8>> {
    let mut vars: Vec<(OsString, OsString)> = if own_root {
        std::env::vars_os().collect()
    } else {
        let term = std::env::var_os("TERM").map(|t| ("TERM".into(), t));
        [("PATH".into(), DEFAULT_PATH.into()), ("HOME".into(), "/root".into())].into_iter().chain(term).collect()
    };
    if let Some(home) = home {
        vars.retain(|(n, _)| n != "HOME");
        vars.push(("HOME".into(), home.into()));
    }
    for (name, value) in &options.env {
        vars.retain(|(n, _)| n != name.as_str());
        if let Some(value) = value.clone().map(OsString::from).or_else(|| std::env::var_os(name)) {
            vars.push((name.into(), value));
        }
    }
    vars.into_iter().map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat()).collect()
}
