//! Checks of the repository itself: import directions, file length, where unsafe may stand, and what no file may say.
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lines a source file may have.
const MAX_LINES: usize = 800;

/// Modules of `vmm` that may opt in to unsafe code, as paths below `vmm/src`; `docs/UNSAFE.md` says why for each.
const UNSAFE_MODULES: &[&str] = &[
    "clock.rs",
    "host/chmod.rs",
    "host/inherited.rs",
    "host/terminal.rs",
    "host/vectored.rs",
    "jail/calls.rs",
    "kvm/vcpu.rs",
    "kvm/vm.rs",
    "memory/frames.rs",
    "memory/mod.rs",
    "memory/nudge.rs",
    "memory/region.rs",
    "memory/slots.rs",
    "memory/trycopy.rs",
    "reactor/signals.rs",
    "vcpu_pool/signal.rs",
];

/// Levels of the sentry's modules, lowest first. A module may use its own level and those before it.
const SENTRY_LEVELS: &[&[&str]] = &[
    &["lock"],
    &["event", "platform"],
    &["time", "sched", "trace"],
    &["vfs", "mm", "ns"],
    &["task", "signal", "futex", "timers", "loader"],
    &["fs", "socket"],
    &["syscalls"],
];

fn workspace() -> &'static Path {
    tests::workspace()
}

fn tracked() -> Vec<PathBuf> {
    let out = Command::new("git").args(["ls-files", "-z"]).current_dir(workspace()).output().expect("git runs");
    assert!(out.status.success(), "git ls-files failed");
    out.stdout
        .split(|&b| b == 0)
        .filter(|p| !p.is_empty())
        .map(|p| PathBuf::from(String::from_utf8_lossy(p).into_owned()))
        .filter(|p| workspace().join(p).is_file())
        .collect()
}

fn sources() -> BTreeMap<PathBuf, String> {
    tracked()
        .into_iter()
        .filter(|p| p.extension().is_some_and(|e| e == "rs"))
        .map(|p| (p.clone(), fs::read_to_string(workspace().join(p)).expect("sources are UTF-8")))
        .collect()
}

fn report(what: &str, found: &[String]) {
    assert!(found.is_empty(), "{what}:\n  {}", found.join("\n  "));
}

#[test]
fn files_are_short() {
    let long: Vec<String> = sources()
        .iter()
        .map(|(p, text)| (p, text.lines().count()))
        .filter(|&(_, n)| n > MAX_LINES)
        .map(|(p, n)| format!("{}: {n} lines", p.display()))
        .collect();
    report("files over the limit; split them by subject", &long);
}

#[test]
fn modules_say_what_they_own() {
    let silent: Vec<String> = sources()
        .iter()
        .filter(|(_, text)| !text.lines().next().is_some_and(|l| l.starts_with("//!")))
        .map(|(p, _)| p.display().to_string())
        .collect();
    report("files whose first line is no module comment", &silent);
}

#[test]
fn unsafe_stands_only_in_named_modules() {
    let mut found = Vec::new();
    for (path, text) in sources() {
        let code: String = text.lines().filter(|l| !l.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
        let opts_in = code.contains("![allow(unsafe_code") || code.contains("#[allow(unsafe_code");
        let in_vmm = path.strip_prefix("vmm/src").ok().map(Path::to_path_buf);
        let named = in_vmm.as_ref().is_some_and(|p| UNSAFE_MODULES.iter().any(|m| p.starts_with(m)));
        let guest_program =
            ["tests/guest", "tests/bench", "tests/tests", "vmm/tests"].iter().any(|p| path.starts_with(p));
        if opts_in && !named && !guest_program {
            found.push(format!("{} opts in to unsafe code and is not listed", path.display()));
        }
    }
    for (crate_root, needle) in
        [("sentry/src/lib.rs", "#![forbid(unsafe_code)]"), ("guest-abi/src/lib.rs", "#![forbid(unsafe_code)]")]
    {
        let text = fs::read_to_string(workspace().join(crate_root)).unwrap_or_default();
        if !text.contains(needle) {
            found.push(format!("{crate_root} does not forbid unsafe code"));
        }
    }
    report("unsafe code out of place", &found);
}

#[test]
fn unsafe_blocks_say_why_they_are_sound() {
    let mut found = Vec::new();
    for (path, text) in sources() {
        if path.starts_with("tests") {
            continue;
        }
        let lines: Vec<&str> = text.lines().collect();
        for (i, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            if !(code.contains("unsafe {") || code.contains("unsafe impl")) {
                continue;
            }
            let explained = lines.iter().take(i + 1).rev().take(12).any(|l| l.contains("// SAFETY:"));
            if !explained {
                found.push(format!("{}:{}", path.display(), i + 1));
            }
        }
    }
    report("unsafe without a SAFETY comment", &found);
}

#[test]
fn sentry_imports_point_downwards() {
    let level = |module: &str| SENTRY_LEVELS.iter().position(|l| l.contains(&module));
    let mut found = Vec::new();
    for (path, text) in sources() {
        let Ok(rest) = path.strip_prefix("sentry/src") else { continue };
        let first = rest.components().next().map(|c| c.as_os_str().to_string_lossy().into_owned()).unwrap_or_default();
        let module = first.trim_end_matches(".rs");
        let Some(own) = level(module) else { continue };
        // A test may use all that a whole sandbox has.
        if path.file_stem().is_some_and(|s| s == "tests") || path.components().any(|c| c.as_os_str() == "tests") {
            continue;
        }
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for (i, line) in code.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            for part in code.split("crate::").skip(1) {
                let name: String = part.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
                if level(&name).is_some_and(|other| other > own) {
                    found.push(format!("{}:{}: {module} uses {name}", path.display(), i + 1));
                }
            }
        }
    }
    report("imports that point upwards (add a trait to the lower module)", &found);
}

#[test]
fn crates_depend_downwards() {
    let manifest = |name: &str| fs::read_to_string(workspace().join(name).join("Cargo.toml")).unwrap_or_default();
    for (name, refused) in [("guest-abi", ["sentry", "vmm"].as_slice()), ("sentry", &["vmm"])] {
        for other in refused {
            assert!(!manifest(name).contains(&format!("{other}.workspace")), "{name} depends on {other}");
        }
    }
}

#[test]
fn no_file_names_a_machine() {
    let mut needles: Vec<String> = vec![workspace().display().to_string()];
    needles.extend(std::env::var("HOME").ok().filter(|h| h.len() > 5).map(|h| format!("{h}/")));
    let mut found = Vec::new();
    for path in tracked() {
        let Ok(text) = fs::read_to_string(workspace().join(&path)) else { continue };
        for needle in &needles {
            if text.contains(needle.as_str()) {
                found.push(format!("{} contains {needle}", path.display()));
            }
        }
    }
    report("files that name a path of this machine", &found);
}
