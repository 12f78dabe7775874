//! Runs every case of the guest program natively first, then in the sandbox with one and with two CPUs, some of them also with an idle
//! CPU that always looks for calls to serve. A case passes where it exits with status 0; its output in the sandbox must be that of the
//! host.
use std::process::Output;
use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Failed, Trial};
use tests::{guest, kvm_missing, native, output, sandboxed};

/// Seconds a case may take, on an emulated machine too.
const LIMIT: u64 = 120;

/// A way to run a case in the sandbox: its name and the options of `bartizan run`.
type Way = (&'static str, &'static [&'static str]);

const WAYS: &[Way] = &[
    ("sandbox_cpus_1", &["--cpus", "1"]),
    ("sandbox_cpus_2", &["--cpus", "2"]),
    ("sandbox_served_inside", &["--cpus", "2", "--service", "always"]),
];

/// How the names of the cases begin for which the last way is worth its time.
const WORTH_SERVING: &[&str] = &[
    "alarm", "clock_", "cpu_", "epoll_", "file_", "fork_", "futex_", "mmap_", "mprotect", "pipe_", "poll_", "sig",
    "threads_", "unix_",
];

fn main() {
    let arguments = Arguments::from_args();
    let guest = guest().into_os_string().into_string().expect("the path is UTF-8");
    let listed = output(&mut native(&[&guest, "--list"]), LIMIT).expect("the guest program lists its cases");
    let names: Vec<String> = String::from_utf8_lossy(&listed.stdout).lines().map(str::to_owned).collect();
    let mut trials = Vec::new();
    for name in names {
        let host = Arc::new(OnceLock::new());
        let serve = WORTH_SERVING.iter().any(|start| name.starts_with(start));
        let ways = WAYS.iter().filter(|(_, options)| serve || !options.contains(&"--service"));
        for way in [None].into_iter().chain(ways.map(Some)) {
            let label = way.map_or("native", |(label, _)| label);
            let (case, guest, host) = (name.clone(), guest.clone(), Arc::clone(&host));
            let options = way.map(|&(_, options)| options);
            trials.push(Trial::test(format!("{name}::{label}"), move || run(&guest, &case, options, &host)));
        }
    }
    libtest_mimic::run(&arguments, trials).exit();
}

/// Runs one case; `host` is the native result, which the first trial of the case finds out for all of them.
fn run(
    guest: &str,
    case: &str,
    options: Option<&[&str]>,
    host: &OnceLock<Result<Output, String>>,
) -> Result<(), Failed> {
    let argv = [guest, case];
    let host = host.get_or_init(|| check(output(&mut native(&argv), LIMIT)?, "natively")).as_ref()?;
    if let Some(options) = options {
        if let Some(missing) = kvm_missing() {
            return Err(missing.into());
        }
        let inside = check(output(&mut sandboxed(options, &argv), LIMIT)?, "in the sandbox")?;
        if inside.stdout != host.stdout {
            return Err(format!(
                "the output differs; host:\n{}\nsandbox:\n{}",
                String::from_utf8_lossy(&host.stdout),
                String::from_utf8_lossy(&inside.stdout)
            )
            .into());
        }
    }
    Ok(())
}

fn check(output: Output, place: &str) -> Result<Output, String> {
    if output.status.success() {
        return Ok(output);
    }
    Err(format!(
        "{place}: {}; stdout:\n{}\nstderr:\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    ))
}
