//! The harness: finds the binaries, runs a command natively or in the sandbox, and says plainly what is missing.
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// The directory that holds the workspace's `Cargo.toml`.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("/"))
}

/// Builds the binaries once for this run and gives the directory they lie in: that of the running test's own profile.
fn bin_dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        let exe = std::env::current_exe().expect("the test knows its own path");
        let dir = exe.parent().and_then(Path::parent).expect("tests lie in target/PROFILE/deps").to_owned();
        if std::env::var_os("BARTIZAN_PREBUILT").is_some() {
            return dir;
        }
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--package", "vmm", "--package", "tests", "--bins"]).current_dir(workspace());
        if dir.file_name() == Some(OsStr::new("release")) {
            build.arg("--release");
        }
        if let Some(target) = dir.parent() {
            build.arg("--target-dir").arg(target);
        }
        let status = build.status().expect("cargo starts");
        assert!(status.success(), "building bartizan and the guest program failed");
        dir
    })
}

/// The `bartizan` binary under test.
pub fn bartizan() -> PathBuf {
    bin_dir().join("bartizan")
}

/// The guest program.
pub fn guest() -> PathBuf {
    bin_dir().join("guest")
}

/// Why no sandbox can run here, in one sentence with what to do about it.
pub fn kvm_missing() -> Option<String> {
    match std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(_) => None,
        Err(e) => Some(format!(
            "/dev/kvm cannot be opened ({e}): load the kvm_intel or kvm_amd module, enable virtualization in the firmware, \
             or join the group that owns the device; `bartizan doctor` tells more"
        )),
    }
}

/// A command to run natively.
pub fn native<S: AsRef<OsStr>>(argv: &[S]) -> Command {
    let mut argv = argv.iter();
    let mut command = Command::new(argv.next().expect("a command"));
    command.args(argv);
    command
}

/// The same command to run in a sandbox with these options of `bartizan run`.
pub fn sandboxed<S: AsRef<OsStr>>(options: &[&str], argv: &[S]) -> Command {
    let mut command = Command::new(bartizan());
    command.arg("run").args(options).arg("--").args(argv);
    command
}

/// Runs to the end with no input; kills after `seconds`.
pub fn output(command: &mut Command, seconds: u64) -> Result<Output, String> {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("{command:?} does not start: {e}"))?;
    let pid = child.id();
    let (done, finished) = std::sync::mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        let late = finished.recv_timeout(std::time::Duration::from_secs(seconds)).is_err();
        if late {
            let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
        }
        late
    });
    let output = child.wait_with_output().map_err(|e| e.to_string())?;
    let _ = done.send(());
    drop(done);
    match watchdog.join() {
        Ok(false) => Ok(output),
        _ => Err(format!(
            "{command:?} did not end within {seconds} s; stdout: {}; stderr: {}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}
