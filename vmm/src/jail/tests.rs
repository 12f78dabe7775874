//! Tests of this module.
use std::fs;
use std::process::Command;

use super::*;

/// Each case runs in a process of its own, which this test binary becomes again with a variable set.
const CASE: &str = "BARTIZAN_JAIL_CASE";

/// The file that a case reads; the parent makes it and takes it away, since the jail lets the child do neither.
const FILE: &str = "BARTIZAN_JAIL_FILE";

fn child(case: &str) -> std::process::Output {
    let exe = std::env::current_exe().unwrap();
    let file = std::env::temp_dir().join(format!("bartizan-jail-{case}-{}", std::process::id()));
    fs::write(&file, "x").unwrap();
    let output = Command::new(exe)
        .args(["--exact", "jail::tests::case", "--nocapture"])
        .env(CASE, case)
        .env(FILE, &file)
        .output()
        .unwrap();
    fs::remove_file(file).unwrap();
    output
}

fn jail(refusal: Refusal) {
    let dir = std::env::temp_dir();
    restrict_files(&Paths { readable: vec![dir], ..Paths::default() }).unwrap();
    restrict_calls(refusal, None).unwrap();
}

#[test]
fn case() {
    let Ok(case) = std::env::var(CASE) else { return };
    let file = std::env::var_os(FILE).unwrap();
    match case.as_str() {
        "files" => {
            jail(Refusal::Kill);
            assert_eq!(fs::read(&file).unwrap(), b"x");
            assert_eq!(fs::read("/etc/passwd").unwrap_err().raw_os_error(), Some(libc::EACCES));
            assert_eq!(fs::write(&file, "y").unwrap_err().raw_os_error(), Some(libc::EACCES));
            assert_eq!(vec![1u8; 1 << 24].iter().map(|b| u64::from(*b)).sum::<u64>(), 1 << 24);
        }
        "exec" => {
            jail(Refusal::Kill);
            let _ = Command::new("/bin/true").status();
        }
        "report" => {
            jail(Refusal::Report);
            let _ = std::net::TcpListener::bind("127.0.0.1:0");
        }
        _ => {}
    }
    println!("case done");
    // The test harness itself would need more than the jail leaves.
    std::process::exit(0);
}

#[test]
fn the_jail_holds() {
    let out = child("files");
    assert!(String::from_utf8_lossy(&out.stdout).contains("case done"), "{out:?}");
    let out = child("report");
    assert_eq!(out.status.code(), Some(125), "{out:?}");
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(text.contains("the jail refused host system call"), "{text}");
    let out = child("exec");
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(out.status.signal(), Some(libc::SIGSYS), "{out:?}");
}
