//! The command line from outside: what passes through, exit statuses, and one clear sentence for every bad input.
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tests::{bartizan, guest, kvm_missing, output};

const LIMIT: u64 = 60;

fn run(args: &[&str]) -> Output {
    if let Some(missing) = kvm_missing() {
        panic!("{missing}");
    }
    output(Command::new(bartizan()).args(args), LIMIT).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Asserts the status and that standard error is one line that contains `part`.
fn refused(args: &[&str], status: i32, part: &str) {
    let out = run(args);
    let stderr = text(&out.stderr);
    assert_eq!(out.status.code(), Some(status), "{args:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
    assert!(stderr.starts_with("bartizan: ") && stderr.contains(part), "{args:?}: {stderr}");
    assert!(out.stdout.is_empty(), "{args:?}");
}

fn scratch(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("bartizan-cli-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir(&dir).unwrap();
    dir
}

#[test]
fn exit_status_is_the_commands() {
    for code in [0, 1, 42, 255] {
        let out = run(&["run", "--", "sh", "-c", &format!("exit {code}")]);
        assert_eq!(out.status.code(), Some(code));
    }
    assert_eq!(run(&["run", "--", "sh", "-c", "kill -TERM $$; sleep 5"]).status.code(), Some(143));
    assert_eq!(run(&["run", "--", "sh", "-c", "sh -c 'kill -SEGV $$'; exit $?"]).status.code(), Some(139));
}

#[test]
fn options_of_container_tools() {
    assert_eq!(run(&["run", "-i", "--", "true"]).status.code(), Some(0));
    refused(&["run", "-it", "--", "true"], 2, "not a terminal");
}

#[test]
fn commands_that_cannot_be_run() {
    refused(&["run", "--", "/nonexistent/command"], 127, "not found");
    refused(&["run", "--", "no-such-command-anywhere"], 127, "not found");
    refused(&["run", "--", "/etc/passwd"], 126, "Permission denied");
    refused(&["run", "--", "/etc"], 126, "");
    let dir = scratch("elf");
    let header = {
        let mut h = vec![0_u8; 64];
        h[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1]);
        h[16] = 2; // ET_EXEC
        h[18] = 62; // x86-64
        h[54] = 56; // bytes of a program header
        h
    };
    let mut truncated = header.clone();
    truncated[32] = 64;
    truncated[56] = 4;
    let mut huge = header.clone();
    huge[32..40].copy_from_slice(&[0xff; 8]);
    huge[56..58].copy_from_slice(&[0xff; 2]);
    let mut machine = header.clone();
    machine[18] = 0xb7;
    let mut class = header.clone();
    class[4] = 1;
    let files: [(&str, &[u8]); 6] = [
        ("empty", b""),
        ("short", b"\x7fELF"),
        ("truncated", &truncated),
        ("huge", &huge),
        ("machine", &machine),
        ("class", &class),
    ];
    for (name, content) in files {
        let path = dir.join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        refused(&["run", "--", path.to_str().unwrap()], 126, "cannot be executed");
    }
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn bad_command_lines() {
    refused(&["run"], 2, "");
    refused(&[], 2, "");
    refused(&["frobnicate"], 2, "frobnicate");
    refused(&["run", "--frobnicate", "--", "true"], 2, "--frobnicate");
    refused(&["run", "--cpus", "0", "--", "true"], 2, "--cpus");
    refused(&["run", "--cpus", "many", "--", "true"], 2, "--cpus");
    refused(&["run", "--memory", "lots", "--", "true"], 2, "--memory");
    refused(&["run", "--timeout", "5x", "--", "true"], 2, "--timeout");
    refused(&["run", "--bind", "/a", "--", "true"], 2, "--bind");
    refused(&["run", "--tmpfs", "relative", "--", "true"], 2, "--tmpfs");
    refused(&["run", "--user", "7:", "--", "true"], 2, "--user");
    refused(&["run", "--cpus", "1.5", "--", "true"], 2, "whole number");
    refused(&["run", "--memory", "1K", "--", "true"], 2, "--memory");
    refused(&["run", "--env", "=x", "--", "true"], 2, "--env");
    refused(&["run", "--log", "loud", "--", "true"], 2, "--log");
    refused(&["run", "--strace=frobnicate", "--", "true"], 2, "frobnicate");
    refused(&["run", "--strace=", "--", "true"], 2, "no system call is named");
    refused(&["run", "--stats=xml", "--", "true"], 2, "--stats");
    refused(&["run", "--hostname", "", "--", "true"], 2, "--hostname");
}

#[test]
fn missing_parts() {
    refused(&["run", "--rootfs", "/nonexistent", "--", "true"], 125, "/nonexistent");
    refused(&["run", "--rootfs", "/etc/passwd", "--", "true"], 125, "/etc/passwd");
    refused(&["run", "--bind", "/nonexistent:/x", "--", "true"], 125, "/nonexistent");
    refused(&["run", "--workdir", "/nonexistent", "--", "true"], 125, "/nonexistent");
    refused(&["run", "--user", "nosuchuser", "--", "true"], 125, "no user 'nosuchuser'");
    refused(&["run", "--user", "root:nosuchgroup", "--", "true"], 125, "no group 'nosuchgroup'");
    refused(&["run", "--tmpfs", "/etc/passwd", "--", "true"], 125, "'/etc/passwd'");
    refused(&["run", "--bind", "/etc:/etc/passwd", "--", "true"], 125, "'/etc/passwd'");
    refused(&["run", "--bind", "/etc/passwd:/etc", "--", "true"], 125, "'/etc'");
    refused(&["run", "--log-file", "/nonexistent/log", "--", "true"], 125, "/nonexistent/log");
}

#[test]
fn help_and_version() {
    assert!(text(&run(&["--version"]).stdout).starts_with("bartizan "));
    let help = run(&["run", "--help"]);
    assert!(help.status.success() && text(&help.stdout).contains("--rootfs"));
}

#[test]
fn timeout_kills_everything() {
    let start = Instant::now();
    let out = run(&["run", "--timeout", "300ms", "--", "sh", "-c", "sleep 100 & sleep 100"]);
    assert_eq!(out.status.code(), Some(124));
    assert!(start.elapsed() < Duration::from_secs(30));
    assert_eq!(run(&["run", "--timeout", "100s", "--", "true"]).status.code(), Some(0));
}

#[test]
fn identity_and_environment() {
    let out = run(&[
        "run",
        "--hostname",
        "turret",
        "--env",
        "COLOUR=red",
        "--",
        "sh",
        "-c",
        "uname -n; echo $COLOUR; echo $$",
    ]);
    assert_eq!(text(&out.stdout), "turret\nred\n1\n");
    let out = run(&[
        "run",
        "--user",
        "1234:5678",
        "--",
        "sh",
        "-c",
        "id -u; id -g; cat /etc/shadow 2>/dev/null || echo refused",
    ]);
    assert_eq!(text(&out.stdout), "1234\n5678\nrefused\n");
    let script = "id -un; id -gn; echo $HOME";
    let out = run(&["run", "--user", "daemon", "--", "sh", "-c", script]);
    assert_eq!(text(&out.stdout), "daemon\ndaemon\n/usr/sbin\n");
    let out = run(&["run", "--user", "daemon:tty", "--env", "HOME=/x", "--", "sh", "-c", script]);
    assert_eq!(text(&out.stdout), "daemon\ntty\n/x\n");
    let out = run(&["run", "--cpus", "1", "--", "nproc"]);
    assert_eq!(text(&out.stdout), "1\n");
}

#[test]
fn changes_stay_inside() {
    let dir = scratch("bind");
    fs::write(dir.join("file"), "before").unwrap();
    let source = dir.to_str().unwrap();
    let inside = format!(
        "echo inside > {source}/file; cat {source}/file; echo new > {source}/new; rm {source}/file; ls {source}"
    );
    let out = run(&["run", "--", "sh", "-c", &inside]);
    assert_eq!(text(&out.stdout), "inside\nnew\n");
    assert_eq!(fs::read_to_string(dir.join("file")).unwrap(), "before");
    assert!(!dir.join("new").exists());
    let read_only = format!("{source}:/mnt:ro");
    let out =
        run(&["run", "--bind", &read_only, "--", "sh", "-c", "cat /mnt/file; echo x > /mnt/file || echo refused"]);
    assert_eq!(text(&out.stdout), "beforerefused\n");
    let writable = format!("{source}:/mnt");
    let out = run(&[
        "run",
        "--bind",
        &writable,
        "--",
        "sh",
        "-c",
        "echo after > /mnt/file; mkdir /mnt/d; mv /mnt/file /mnt/d/moved",
    ]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert_eq!(fs::read_to_string(dir.join("d/moved")).unwrap(), "after\n");
    let file = format!("{source}/d/moved:/etc/hostname:ro");
    let out =
        run(&["run", "--bind", &file, "--tmpfs", "/srv", "--", "sh", "-c", "cat /etc/hostname; touch /srv/x; ls /srv"]);
    assert_eq!(text(&out.stdout), "after\nx\n");
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_root_of_its_own() {
    let dir = scratch("root");
    fs::create_dir_all(dir.join("bin")).unwrap();
    fs::copy(tests::guest(), dir.join("bin/guest")).unwrap();
    // The guest program is dynamically linked: bring its loader and libraries.
    let root = dir.to_str().unwrap();
    let mut args = vec!["run".to_owned(), "--rootfs".to_owned(), root.to_owned()];
    for lib in ["/lib", "/lib64", "/usr/lib"] {
        args.extend(["--bind".to_owned(), format!("{lib}:{lib}:ro")]);
    }
    args.extend(["--".to_owned(), "/bin/guest".to_owned(), "hello".to_owned()]);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let out = run(&args);
    assert_eq!(text(&out.stdout), "hello\n", "{}", text(&out.stderr));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "mount points are made in the layer above the root");
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn standard_streams_pass_through() {
    let mut child = Command::new(bartizan())
        .args(["run", "--", "sh", "-c", "cat; echo err >&2"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let data: Vec<u8> = (0..500_000_u32).map(|i| i as u8).collect();
    let mut stdin = child.stdin.take().unwrap();
    let sent = data.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent).unwrap());
    let out = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert_eq!(out.stdout, data);
    assert_eq!(text(&out.stderr), "err\n");
    // A file as standard input and output, with its position shared.
    let dir = scratch("streams");
    fs::write(dir.join("in"), "one\ntwo\nthree\n").unwrap();
    let script =
        format!("exec < {0}/in > {0}/out; read first; {1} run -- head -n 1; cat", dir.display(), bartizan().display());
    assert!(output(Command::new("bash").args(["-c", &script]), LIMIT).unwrap().status.success());
    let copied = fs::read_to_string(dir.join("out")).unwrap();
    assert!(copied.starts_with("two\n"), "{copied}");
    fs::remove_dir_all(dir).unwrap();
}

fn send(signal: &str, pid: u32) {
    assert!(Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status().unwrap().success());
}

#[test]
fn signals_reach_the_command() {
    for signal in ["TERM", "INT"] {
        let child = Command::new(bartizan())
            .args([
                "run",
                "--",
                "sh",
                "-c",
                "trap 'echo got; exit 9' TERM INT; echo ready; while :; do sleep 0.05; done",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_secs(2));
        send(signal, child.id());
        let out = child.wait_with_output().unwrap();
        assert_eq!((text(&out.stdout).as_str(), out.status.code()), ("ready\ngot\n", Some(9)));
    }
    let mut child = Command::new(bartizan()).args(["run", "--", "sleep", "100"]).stdin(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    send("INT", child.id());
    let status = child.wait().unwrap();
    assert_eq!(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)), 130);
}

#[test]
fn hot_calls_are_answered_and_made_direct() {
    let count = |options: &[&str], what: &str| {
        let guest = guest().into_os_string().into_string().unwrap();
        let argv = [&["run", "--stats=json"], options, &["--", &guest, "direct_keeps_registers"]].concat();
        let out = run(&argv);
        let stats: serde_json::Value = serde_json::from_str(&text(&out.stderr)).unwrap();
        stats[what].as_u64().unwrap()
    };
    assert!(count(&[], "answered_in_guest") > 3000);
    // Where SYSCALL arrives in ring 0 nothing is gained by it.
    let ring3 = text(&run(&["doctor"]).stdout).contains("ring3");
    assert_eq!(count(&[], "direct_sites") > 0, ring3);
    assert_eq!(count(&["--no-rewrite"], "direct_sites"), 0);
}

#[test]
fn statistics_and_trace() {
    let out = run(&["run", "--stats=json", "--", "true"]);
    let stats: serde_json::Value = serde_json::from_str(&text(&out.stderr)).unwrap();
    assert!(
        stats["syscalls"].as_array().is_some_and(|a| a.iter().any(|c| c["name"] == "execve" || c["name"] == "mmap"))
    );
    assert!(stats["memory_peak_bytes"].as_u64() > Some(0));
    let out = run(&["run", "--stats", "--", "true"]);
    assert!(text(&out.stderr).contains("memory peak"));
    let out = run(&["run", "--strace=exit_group", "--", "true"]);
    assert_eq!(text(&out.stderr).lines().filter(|l| l.contains("exit_group(0)")).count(), 1);
    let dir = scratch("log");
    let log = dir.join("log");
    let out = run(&["run", "--strace", "--log-file", log.to_str().unwrap(), "--", "true"]);
    assert!(out.stderr.is_empty());
    assert!(fs::read_to_string(&log).unwrap().contains("openat("));
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn memory_limit_holds() {
    let program = "x = bytearray(300 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nprint('unlimited')";
    let out = run(&["run", "--memory", "128M", "--", "python3", "-c", program]);
    assert!(!out.status.success() && !text(&out.stdout).contains("unlimited"), "{}", text(&out.stdout));
    let out = run(&["run", "--memory", "1G", "--", "python3", "-c", program]);
    assert_eq!(text(&out.stdout), "unlimited\n", "{}", text(&out.stderr));
}

#[test]
fn few_host_threads_and_no_idle_cpu() {
    let program = "import threading, time\nfor _ in range(300): threading.Thread(target=time.sleep, args=(100,), daemon=True).start()\nprint('up', flush=True)\ntime.sleep(100)";
    let mut child = Command::new(bartizan())
        .args(["run", "--cpus", "2", "--", "python3", "-c", program])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut up = [0; 3];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut up).unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let threads: usize = status.lines().find_map(|l| l.strip_prefix("Threads:")).unwrap().trim().parse().unwrap();
    assert!(threads <= 5, "{threads} host threads for 2 workers");
    let ticks = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let fields: Vec<u64> =
            stat.rsplit(')').next().unwrap().split_whitespace().filter_map(|f| f.parse().ok()).collect();
        fields[10] + fields[11]
    };
    std::thread::sleep(Duration::from_millis(500));
    let before = ticks();
    std::thread::sleep(Duration::from_secs(3));
    assert!(ticks() - before <= 1, "an idle sandbox uses CPU time");
    child.kill().unwrap();
    child.wait().unwrap();
}
