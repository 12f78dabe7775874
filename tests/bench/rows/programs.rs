//! Rows of real programs: an interpreter's start, git, a compiler, tar, a data base, a server with its clients. Each makes its own input
//! beneath the temporary directory first, which is not in the figure, and is skipped where the program is not installed.
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::Row;

/// Files of the tree that git looks at; of the one that is unpacked; to compile; rows of the data base's table; requests to the server.
const TREE: usize = 4000;
const PACKED: usize = 1000;
const SOURCES: usize = 100;
const TABLE: usize = 20_000;
const REQUESTS: usize = 2000;

/// A program's row: what must be installed, and its code, which gives nanoseconds of one run.
struct Program {
    needs: &'static [&'static str],
    run: fn(&Path) -> f64,
}

const PYTHON: Program = Program { needs: &["python3"], run: |_| wall(command("python3").args(["-c", "pass"])) };
const GIT: Program = Program { needs: &["git"], run: git_status };
const GCC: Program = Program { needs: &["gcc", "make"], run: gcc };
const UNTAR: Program = Program { needs: &["tar"], run: untar };
const SQLITE: Program = Program { needs: &["sqlite3"], run: sqlite };
const REDIS: Program = Program { needs: &["redis-server", "redis-benchmark"], run: redis };

/// Rows of programs, whose work inside a running system is measured: its start is not in them.
pub const ROWS: &[Row] = &[
    Row::inside("python3", "python3 -c pass", 0, || PYTHON.measure()),
    Row::inside("git_status", "git status of 4,000 files", 0, || GIT.measure()).slow(),
    Row::inside("gcc_make", "make -j2 of 100 C files with gcc", 0, || GCC.measure()).slow(),
    Row::inside("untar", "untar of 1,000 files", 0, || UNTAR.measure()).slow(),
    Row::inside("sqlite3", "sqlite3: 20,000 rows inserted, indexed, changed, joined", 0, || SQLITE.measure()),
    Row::inside("redis", "redis-benchmark: 2,000 SET, 2,000 GET, 20 clients", 0, || REDIS.measure()).slow(),
];

impl Program {
    fn measure(&self) -> f64 {
        for name in self.needs {
            if find(name).is_none() {
                eprintln!("{name} is not installed");
                std::process::exit(1);
            }
        }
        let dir = std::env::temp_dir().join(format!("bench-program-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("a directory");
        let figure = (self.run)(&dir);
        let _ = fs::remove_dir_all(&dir);
        figure
    }
}

/// Where a program is. Directories of the system come first: what else is in PATH may be a script that chooses among versions.
fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/bin", "/bin", "/usr/local/bin"].map(PathBuf::from);
    system.into_iter().chain(std::env::split_paths(&path)).map(|dir| dir.join(name)).find(|p| p.is_file())
}

fn command(name: &str) -> Command {
    let mut command = Command::new(find(name).unwrap_or_else(|| PathBuf::from(name)));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

fn ran(command: &mut Command) {
    let status = command.status();
    assert!(status.as_ref().is_ok_and(|s| s.success()), "{command:?}: {status:?}");
}

/// Nanoseconds of one run.
fn wall(command: &mut Command) -> f64 {
    let start = Instant::now();
    ran(command);
    start.elapsed().as_nanos() as f64
}

/// Files in directories of fifty, each with a line or two.
fn make_tree(root: &Path, files: usize) {
    for i in 0..files {
        let dir = root.join(format!("directory-{}", i / 50));
        if i % 50 == 0 {
            fs::create_dir_all(&dir).expect("a directory");
        }
        fs::write(dir.join(format!("file-{i}.txt")), format!("this is file {i}\n").repeat(1 + i % 40)).expect("a file");
    }
}

fn git_status(dir: &Path) -> f64 {
    make_tree(dir, TREE);
    let git = |args: &[&str]| {
        let mut git = command("git");
        git.arg("-C").arg(dir).args(["-c", "user.name=bench", "-c", "user.email=bench@localhost"]).args(args);
        git.env("GIT_CONFIG_NOSYSTEM", "1").env("HOME", dir);
        git
    };
    ran(&mut git(&["init", "--quiet"]));
    ran(&mut git(&["add", "--all"]));
    ran(&mut git(&["commit", "--quiet", "--message", "all"]));
    // The first one may look into files as new as the index.
    ran(&mut git(&["status", "--short"]));
    wall(&mut git(&["status", "--short"]))
}

fn gcc(dir: &Path) -> f64 {
    let mut names = String::new();
    for i in 0..SOURCES {
        let mut text = String::new();
        for f in 0..5 {
            let body = "int s = 0; for (int k = 0; k < n; k++) s += k ^ s >> 3; return s;";
            let _ = writeln!(text, "int f{i}_{f}(int n) {{ {body} }}");
        }
        fs::write(dir.join(format!("f{i}.c")), text).expect("a file");
        let _ = write!(names, " f{i}.o");
    }
    fs::write(dir.join("Makefile"), format!("all:{names}\n%.o: %.c\n\tgcc -c -o $@ $<\n")).expect("a file");
    wall(command("make").args(["--silent", "-j2", "-C"]).arg(dir))
}

fn untar(dir: &Path) -> f64 {
    let (from, to, archive) = (dir.join("from"), dir.join("to"), dir.join("archive.tar"));
    make_tree(&from, PACKED);
    fs::create_dir(&to).expect("a directory");
    ran(command("tar").arg("-C").arg(&from).arg("-cf").arg(&archive).arg("."));
    wall(command("tar").arg("-C").arg(&to).arg("-xf").arg(&archive))
}

fn sqlite(dir: &Path) -> f64 {
    let mut text = String::from("CREATE TABLE t(a INTEGER, b INTEGER, c TEXT);\nBEGIN;\n");
    for i in 0..TABLE {
        let _ = writeln!(text, "INSERT INTO t VALUES({i},{},'number {}');", i * 7919 % 10_007, i * 31 % 1009);
    }
    text.push_str("COMMIT;\n");
    // Each of these is a transaction of its own, written through to the file.
    for i in 0..20 {
        let _ = writeln!(text, "UPDATE t SET b = b + 1 WHERE a = {};", i * 97);
    }
    text.push_str("CREATE INDEX i ON t(b);\nSELECT count(*), avg(b) FROM t WHERE b BETWEEN 100 AND 5000;\n");
    text.push_str("SELECT count(*) FROM t AS x JOIN t AS y ON x.b = y.b;\nDELETE FROM t WHERE a % 3 = 0;\nVACUUM;\n");
    let script = dir.join("script.sql");
    fs::write(&script, text).expect("a file");
    let input = fs::File::open(&script).expect("a file");
    wall(command("sqlite3").arg(dir.join("data.db")).stdin(input))
}

fn redis(dir: &Path) -> f64 {
    let socket = dir.join("socket");
    let mut server = command("redis-server");
    server.args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"]).arg(&socket).current_dir(dir);
    let mut server = server.spawn().expect("redis-server starts");
    let start = Instant::now();
    while !socket.exists() {
        assert!(start.elapsed() < Duration::from_secs(20), "redis-server does not listen");
        std::thread::sleep(Duration::from_millis(10));
    }
    let requests = REQUESTS.to_string();
    let mut clients = command("redis-benchmark");
    clients.arg("-s").arg(&socket).args(["-q", "-t", "set,get", "-c", "20", "-n", &requests]);
    let figure = wall(&mut clients);
    let _ = server.kill();
    let _ = server.wait();
    figure
}
