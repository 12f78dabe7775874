//! An interactive shell on a real terminal: keys are typed into the host's side of a pseudo-terminal, and what comes back is
//! compared with what the same shell says on the host.
#![allow(unsafe_code)]
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use tests::{kvm_missing, native, sandboxed};

/// Generous: the machine may be slow, and nothing here waits longer than it must.
const LIMIT: Duration = Duration::from_secs(60);

/// A command with a terminal of its own.
struct Screen {
    child: Child,
    keyboard: Option<File>,
    shown: Receiver<Vec<u8>>,
    text: String,
    /// The reader is to close its copy of the host's side.
    gone: Arc<AtomicBool>,
}

fn pty() -> (File, OwnedFd) {
    let (mut ours, mut theirs) = (-1, -1);
    // SAFETY: both numbers are valid to write; the other arguments may be null.
    let r = unsafe {
        libc::openpty(&raw mut ours, &raw mut theirs, std::ptr::null_mut(), std::ptr::null(), std::ptr::null())
    };
    assert_eq!(r, 0, "openpty");
    for fd in [ours, theirs] {
        // SAFETY: no memory is involved.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    // SAFETY: both are new descriptors that nobody else owns.
    unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) }
}

fn resize(terminal: &File, rows: u16, columns: u16) {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the structure is valid to read.
    assert_eq!(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) }, 0);
}

/// Waits a little for something to read.
fn readable(terminal: &File) -> bool {
    let mut poll = libc::pollfd { fd: terminal.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid structure.
    unsafe { libc::poll(&raw mut poll, 1, 50) > 0 }
}

impl Screen {
    fn open(mut command: Command) -> Screen {
        let (ours, theirs) = pty();
        resize(&ours, 24, 80);
        let stream = || Stdio::from(theirs.try_clone().unwrap());
        command.stdin(stream()).stdout(stream()).stderr(stream());
        command.env("TERM", "dumb").env("PS1", "ready> ").env_remove("PROMPT_COMMAND").env("INPUTRC", "/dev/null");
        // SAFETY: between fork and exec only system calls are made.
        unsafe {
            command.pre_exec(|| {
                // Whoever runs the tests may ignore some: a shell in the background does, and nohup.
                for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTSTP] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                libc::setsid();
                if libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
            });
        }
        let child = command.spawn().unwrap();
        drop((command, theirs));
        let mut screen = ours.try_clone().unwrap();
        let (tell, shown) = channel();
        let gone = Arc::new(AtomicBool::new(false));
        let closing = gone.clone();
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            while !closing.load(Ordering::SeqCst) {
                if !readable(&screen) {
                    continue;
                }
                match screen.read(&mut part) {
                    Ok(n) if n > 0 && tell.send(part[..n].to_vec()).is_ok() => {}
                    _ => break,
                }
            }
        });
        Screen { child, keyboard: Some(ours), shown, gone, text: String::new() }
    }

    fn type_keys(&mut self, keys: &str) {
        self.keyboard.as_mut().unwrap().write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until `wanted` has been shown, and forgets the screen up to there.
    fn expect(&mut self, wanted: &str) {
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(at) = self.text.find(wanted) {
                self.text.drain(..at + wanted.len());
                return;
            }
            match self.shown.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(part) => self.text.push_str(&String::from_utf8_lossy(&part)),
                Err(e) => panic!("{wanted:?} is not shown ({e}), but {:?}", self.text),
            }
        }
    }

    /// Types a command line and waits for what it shows.
    fn line(&mut self, command: &str, wanted: &str) {
        self.expect("ready> ");
        self.type_keys(&format!("{command}\r"));
        self.expect(wanted);
    }

    /// Closes the host's side: the window is gone.
    fn hang_up(&mut self) {
        self.keyboard = None;
        self.gone.store(true, Ordering::SeqCst);
    }

    /// The exit status as a shell gives it.
    fn end(mut self) -> i32 {
        let end = Instant::now() + LIMIT;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("the command does not end; the screen shows {:?}", self.text);
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `script` natively and in sandboxes with one and two CPUs; the same status must come of it.
fn everywhere(argv: &[&str], script: impl Fn(Screen) -> i32) {
    if let Some(missing) = kvm_missing() {
        panic!("{missing}");
    }
    let expected = script(Screen::open(native(argv)));
    for cpus in ["1", "2"] {
        assert_eq!(script(Screen::open(sandboxed(&["--cpus", cpus], argv))), expected, "--cpus {cpus}");
    }
}

const SHELL: &[&str] = &["bash", "--norc", "--noprofile", "--noediting", "-i"];

/// A job that says when it has the terminal, at its start and when `fg` continues it: no key comes too early. It starts no process:
/// one that is stopped between vfork(2) and execve(2) would keep its parent from stopping.
const JOB: &str = "sh -c 'trap \"echo again\" CONT; echo running; while :; do :; done'";

/// Waits inside the shell until a job is stopped.
const STOPPED: &str = "until [ \"$(jobs -s)\" ]; do sleep 0.05; done; echo is \"stopped\"";

#[test]
fn keys_reach_the_foreground_job() {
    everywhere(SHELL, |mut s| {
        s.line(JOB, "\nrunning");
        s.type_keys("\x03");
        s.line("echo status $?", "status 130");
        s.line(JOB, "\nrunning");
        s.type_keys("\x1c");
        s.line("echo status $?", "status 131");
        s.line(&format!("{JOB} | cat"), "\nrunning");
        s.type_keys("\x1a");
        s.expect("Stopped");
        s.line("fg", "\nagain");
        s.type_keys("\x1a");
        s.expect("Stopped");
        s.line("bg; jobs -r | wc -l", "\n1");
        // It may say "again" from behind at any time: nothing after it waits for that.
        s.line("kill %1; wait %1; echo status $?", "status 143");
        s.line("cat", "\n");
        s.type_keys("typed\r");
        s.expect("typed\r\ntyped\r\n");
        s.type_keys("no end\x04\x04");
        s.expect("no endno end");
        s.line("exit 7", "exit");
        s.end()
    });
}

#[test]
fn background_jobs_stop_at_the_terminal() {
    everywhere(SHELL, |mut s| {
        s.line(&format!("cat & {STOPPED}"), "\nis stopped");
        s.line("kill %1; kill -CONT %1; wait %1; echo status $?", "status 143");
        s.line(&format!("stty tostop; (echo from behind) & {STOPPED}; stty -tostop"), "\nis stopped");
        s.line("fg; echo status $?", "from behind");
        s.expect("status 0");
        s.line(&format!("(stty tostop) & {STOPPED}"), "\nis stopped");
        s.line("fg; echo status $?; stty -tostop", "status 0");
        // A job that ignores the signals goes on.
        s.line("stty tostop; (trap '' TTOU; echo from afar) & wait $!; stty -tostop", "\nfrom afar");
        s.line("(trap '' TTIN; read x; echo read $?) & wait $!", "\nread 1");
        s.line("exit 3", "exit");
        s.end()
    });
}

#[test]
fn settings_and_size_are_the_terminals() {
    everywhere(SHELL, |mut s| {
        s.line("stty size", "24 80");
        s.line("bash -c 'trap w=1 WINCH; echo running; until [ \"$w\" ]; do sleep 0.05; done; stty size'", "\nrunning");
        resize(s.keyboard.as_ref().unwrap(), 40, 100);
        s.expect("40 100");
        s.line("stty rows 30; stty size", "30 100");
        s.line("stty -echo; echo running; read x; stty echo; echo got=$x", "\nrunning\r\n");
        s.type_keys("secret\r");
        s.expect("got=secret");
        s.line("read -n 1 -p 'key?' x; echo \"<$x>\"", "key?");
        s.expect("key?");
        s.type_keys("q");
        s.expect("<q>");
        s.line(&format!("stty intr ^G; {JOB}"), "\nrunning");
        s.type_keys("\x07");
        s.line("echo status $?; stty intr ^C", "status 130");
        s.line("test -t 0 && [ -c \"$(tty)\" ] && echo named > /dev/tty", "\nnamed");
        s.line("exit", "exit");
        s.end()
    });
}

#[test]
fn a_lost_terminal_hangs_up() {
    let script = "trap 'exit 9' HUP; echo up; while :; do sleep 0.05; done";
    everywhere(&["bash", "-c", script], |mut s| {
        s.expect("up");
        s.hang_up();
        s.end()
    });
}

#[test]
fn a_terminal_inside_the_terminal() {
    // A shell below a shell on a pseudo-terminal that is made inside.
    let program = "import os, pty, sys; os.environ['PS1'] = 'ready> '; sys.exit(pty.spawn(['bash', '--norc', '--noprofile', '--noediting', '-i']) >> 8)";
    everywhere(&["python3", "-c", program], |mut s| {
        s.line("tty", "/dev/pts/");
        s.line(JOB, "\nrunning");
        s.type_keys("\x1a");
        s.expect("Stopped");
        s.line("fg", "\nagain");
        s.type_keys("\x03");
        s.line("echo status $?", "status 130");
        s.line("exit 5", "exit");
        s.end()
    });
}
