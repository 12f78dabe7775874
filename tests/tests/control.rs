//! Named sandboxes from outside: list, ps and kill, the control socket's protocol, and clients that do not keep to it.
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::{bartizan, kvm_missing, output};

const LIMIT: u64 = 60;

/// A runtime directory of the test's own, with the sandboxes that it starts there.
struct Place {
    dir: PathBuf,
    children: Vec<Child>,
}

impl Place {
    fn new(test: &str) -> Place {
        if let Some(missing) = kvm_missing() {
            panic!("{missing}");
        }
        let dir = std::env::temp_dir().join(format!("bartizan-control-{test}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        Place { dir, children: Vec::new() }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(bartizan());
        command.args(args).env("XDG_RUNTIME_DIR", &self.dir);
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        output(&mut self.command(args), LIMIT).unwrap()
    }

    /// Starts a sandbox whose command writes a line once it is up.
    fn start(&mut self, options: &[&str], script: &str) -> usize {
        let mut args = vec!["run"];
        args.extend(options);
        args.extend(["--", "sh", "-c", script]);
        let mut command = self.command(&args);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut first = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut first).unwrap();
        assert_eq!(first, "up\n", "{options:?}");
        self.children.push(child);
        self.children.len() - 1
    }

    fn status(&mut self, index: usize) -> Option<i32> {
        let end = Instant::now() + Duration::from_secs(LIMIT);
        loop {
            if let Some(status) = self.children[index].try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < end, "the sandbox does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn connect(&self, name: &str) -> UnixStream {
        let stream = UnixStream::connect(self.dir.join("bartizan").join(name).join("control")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(LIMIT))).unwrap();
        stream
    }

    fn refused(&self, args: &[&str], status: i32, sentence: &str) {
        let out = self.run(args);
        assert_eq!(out.status.code(), Some(status), "{args:?}: {out:?}");
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.starts_with("bartizan: ") && text.contains(sentence), "{args:?}: {text}");
    }

    fn json(&self, args: &[&str]) -> Value {
        let out = self.run(args);
        assert!(out.status.success(), "{args:?}: {out:?}");
        serde_json::from_slice(&out.stdout).unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn ask(stream: &mut UnixStream, request: &[u8]) -> Value {
    stream.write_all(request).unwrap();
    answer(stream)
}

fn answer(stream: &UnixStream) -> Value {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line}: {e}"))
}

const WAIT: &str = "sleep 1000 & echo up; wait";

#[test]
fn list_ps_and_kill() {
    let mut place = Place::new("kill");
    assert_eq!(place.json(&["list", "--json"]), json!([]));
    let first = place.start(&["--name", "first", "--cpus", "2", "--memory", "256M"], WAIT);
    let second = place.start(&["--name", "second.2"], "trap 'exit 7' USR1; echo up; while :; do sleep 0.05; done");
    place.start(&[], WAIT);

    let all = place.json(&["list", "--json"]);
    assert_eq!(all.as_array().map(Vec::len), Some(2), "{all}");
    assert_eq!(all[0]["name"], "first");
    assert_eq!(all[0]["pid"], place.children[first].id());
    assert_eq!((&all[0]["cpus"], &all[0]["processes"]), (&json!(2), &json!(2)));
    assert_eq!(all[0]["memory_limit_bytes"], 256 << 20);
    assert_eq!(all[0]["command"], json!(["sh", "-c", WAIT]));
    let text = String::from_utf8(place.run(&["list"]).stdout).unwrap();
    assert!(text.starts_with("NAME") && text.lines().count() == 3 && text.contains("\nsecond.2 "), "{text}");

    let ps = place.json(&["ps", "first", "--json"]);
    let rows = ps[0]["processes"].as_array().unwrap();
    assert_eq!(rows.len(), 2, "{ps}");
    assert_eq!((&rows[0]["pid"], &rows[0]["ppid"], &rows[0]["threads"]), (&json!(1), &json!(0), &json!(1)));
    assert_eq!((&rows[1]["ppid"], &rows[1]["pgid"], &rows[1]["sid"]), (&json!(1), &json!(1), &json!(1)));
    assert_eq!(rows[1]["command"], json!(["sleep", "1000"]));
    assert_eq!(rows[0]["tasks"], Value::Null);
    let ps = place.json(&["ps", "first", "--json", "--threads"]);
    assert_eq!(ps[0]["processes"][0]["tasks"][0]["tid"], 1);
    let text = String::from_utf8(place.run(&["ps", "first"]).stdout).unwrap();
    assert!(text.lines().count() == 3 && text.contains("  \\_ sleep 1000\n"), "{text}");
    assert_eq!(place.json(&["ps", "--json"]).as_array().map(Vec::len), Some(2));

    // A child first; the shell waits for it and ends.
    let child = rows[1]["pid"].to_string();
    assert!(place.run(&["kill", "first", "KILL", &child]).status.success());
    assert_eq!(place.status(first), Some(0));
    assert!(place.run(&["kill", "second.2", "SIGUSR1"]).status.success());
    assert_eq!(place.status(second), Some(7));
    assert_eq!(place.json(&["list", "--json"]), json!([]));
    assert_eq!(std::fs::read_dir(place.dir.join("bartizan")).unwrap().count(), 0, "ended sandboxes leave nothing");

    let term = place.start(&["--name", "first"], WAIT);
    assert!(place.run(&["kill", "first"]).status.success());
    assert_eq!(place.status(term), Some(143));
    let all =
        place.start(&["--name", "first"], "trap '' TERM; sh -c 'trap \"\" TERM; echo up; sleep 1000'; sleep 1000");
    assert!(place.run(&["kill", "--all", "first", "TERM"]).status.success());
    assert!(place.run(&["kill", "--all", "first", "9"]).status.success());
    assert_eq!(place.status(all), Some(137));
}

#[test]
fn bad_input_is_one_sentence() {
    let mut place = Place::new("input");
    place.refused(&["ps", "nobody"], 125, "no running sandbox named 'nobody'");
    place.refused(&["kill", "nobody"], 125, "no running sandbox named 'nobody'");
    place.refused(&["run", "--name", "a/b", "--", "true"], 2, "--name");
    place.refused(&["run", "--name", "", "--", "true"], 2, "--name");
    place.refused(&["ps", "../x"], 2, "a name has");
    place.refused(&["kill"], 2, "NAME");
    place.refused(&["kill", "one", "FROB"], 2, "no signal 'FROB'");
    place.refused(&["kill", "one", "TERM", "0"], 2, "PID");
    place.refused(&["kill", "--all", "one", "TERM", "3"], 2, "--all");
    place.start(&["--name", "one"], WAIT);
    place.refused(&["kill", "one", "TERM", "4000"], 125, "no process 4000");
    let start = Instant::now();
    place.refused(&["run", "--name", "one", "--", "true"], 125, "a sandbox named 'one' is running already");
    assert!(start.elapsed() < Duration::from_secs(20));
    // A runtime directory that others may enter is not used.
    let shared = Place::new("shared");
    std::fs::create_dir(shared.dir.join("bartizan")).unwrap();
    std::fs::set_permissions(shared.dir.join("bartizan"), std::fs::Permissions::from_mode(0o755)).unwrap();
    shared.refused(&["run", "--name", "one", "--", "true"], 125, "mode 0700");
    shared.refused(&["list"], 125, "mode 0700");
}

#[test]
fn a_killed_sandbox_leaves_nothing_that_matters() {
    let mut place = Place::new("stale");
    let first = place.start(&["--name", "one"], WAIT);
    place.children[first].kill().unwrap();
    place.children[first].wait().unwrap();
    assert!(place.dir.join("bartizan/one/control").exists());
    assert_eq!(place.json(&["list", "--json"]), json!([]));
    assert!(!place.dir.join("bartizan/one").exists(), "list cleans");
    let second = place.start(&["--name", "one"], WAIT);
    place.children[second].kill().unwrap();
    place.children[second].wait().unwrap();
    let third = place.start(&["--name", "one"], WAIT);
    assert!(place.run(&["kill", "one", "KILL"]).status.success());
    assert_eq!(place.status(third), Some(137));
}

#[test]
fn the_protocol_and_those_who_break_it() {
    let mut place = Place::new("protocol");
    place.start(&["--name", "one"], WAIT);
    let socket = place.dir.join("bartizan/one");
    assert_eq!(socket.metadata().unwrap().permissions().mode() & 0o777, 0o700);

    let mut good = place.connect("one");
    let state = ask(&mut good, b"{\"version\":1,\"request\":\"state\"}\n");
    assert_eq!((&state["version"], &state["ok"]["name"]), (&json!(1), &json!("one")));
    let ps = ask(&mut good, b"{\"version\":1,\"request\":\"ps\",\"from\":2,\"threads\":true}\n");
    assert_eq!(ps["ok"]["processes"].as_array().map(Vec::len), Some(1), "{ps}");

    for bad in [
        "\n",
        "null\n",
        "{}\n",
        "garbage\n",
        "\u{0}\u{1}\u{2}\n",
        "{\"version\":2,\"request\":\"state\"}\n",
        "{\"version\":1,\"request\":\"frob\"}\n",
        "{\"version\":1,\"request\":\"ps\",\"from\":99999999999}\n",
        "{\"version\":1,\"request\":\"ps\",\"frm\":1}\n",
        "{\"version\":1,\"request\":\"kill\"}\n",
        "{\"version\":1,\"request\":\"kill\",\"signal\":0}\n",
        "{\"version\":1,\"request\":\"kill\",\"signal\":65}\n",
        "{\"version\":1,\"request\":\"kill\",\"signal\":15,\"pid\":-1}\n",
        "{\"version\":1,\"request\":\"kill\",\"signal\":15,\"pid\":1,\"all\":true}\n",
    ] {
        let answer = ask(&mut good, bad.as_bytes());
        assert!(answer["error"].is_string() && answer["ok"].is_null(), "{bad}: {answer}");
    }
    let deep = format!("{{\"version\":1,\"x\":{}\n", "[".repeat(4000));
    assert!(ask(&mut place.connect("one"), deep.as_bytes())["error"].is_string());
    // A request in pieces, and several at once.
    good.write_all(b"{\"version\":1,\"requ").unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(ask(&mut good, b"est\":\"state\"}\n")["ok"]["name"], "one");
    good.write_all(&b"{\"version\":1,\"request\":\"state\"}\n".repeat(3)).unwrap();
    let mut reader = BufReader::new(good.try_clone().unwrap());
    for _ in 0..3 {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert!(line.contains("\"one\""), "{line}");
    }

    // A line without an end: one answer, and the end of the connection.
    let mut endless = place.connect("one");
    let _ = endless.write_all(&b"x".repeat(20_000));
    let mut text = Vec::new();
    let _ = endless.read_to_end(&mut text);
    assert!(text.is_empty() || String::from_utf8_lossy(&text).contains("at most 4096 bytes"));

    // Clients that never ask, or never read, crowd nobody out.
    let silent: Vec<UnixStream> = (0..40).map(|_| place.connect("one")).collect();
    let mut deaf = place.connect("one");
    deaf.set_nonblocking(true).unwrap();
    for _ in 0..2000 {
        if deaf.write(b"{\"version\":1,\"request\":\"ps\",\"threads\":true}\n").is_err() {
            break;
        }
    }
    assert_eq!(place.json(&["list", "--json"])[0]["name"], "one");
    assert_eq!(place.json(&["ps", "one", "--json"])[0]["processes"].as_array().map(Vec::len), Some(2));
    drop((silent, deaf));
    assert!(place.run(&["kill", "one", "KILL"]).status.success());
}
