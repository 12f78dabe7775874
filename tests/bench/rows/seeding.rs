//! The program of the seed measurement: many threads and processes asleep, and one thread that enumerates processes a hundred times
//! a second as ps(1) does, or only wakes as often.
use std::ffi::CString;
use std::io::{Read, Write};
use std::time::{Duration, Instant};

use super::raw::{Crowd, fork, in_own_namespace, make_pipe, read_byte, write_byte};

const PERIOD: Duration = Duration::from_millis(10);

/// What the enumerating thread does in each period.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Nothing: what waking costs.
    Wake,
    /// Lists /proc and reads `stat` of every process.
    Ps,
    /// It does not even wake: others enumerate from outside.
    Hold,
}

impl Way {
    /// The word for it on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Way::Wake => "wake",
            Way::Ps => "ps",
            Way::Hold => "hold",
        }
    }
}

/// Runs for so many seconds after a line that says that all is ready; then prints how often it did what it does. It is in a PID namespace of its own, so that natively too only these
/// processes are enumerated. `what` is WAY:PROCESSES:THREADS.
pub fn run(what: &str, seconds: u32) {
    let mut parts = what.split(':');
    let way = [Way::Wake, Way::Ps, Way::Hold].into_iter().find(|w| Some(w.word()) == parts.clone().next());
    let numbers: Vec<u32> = parts.by_ref().skip(1).filter_map(|n| n.parse().ok()).collect();
    let (Some(way), &[processes, threads]) = (way, numbers.as_slice()) else { std::process::exit(2) };
    in_own_namespace(|| {
        let [ready, tell] = make_pipe();
        let members = processes.saturating_sub(1);
        for _ in 0..members {
            fork(|| {
                let _crowd = (threads > 1).then(|| Crowd::new(threads - 1));
                write_byte(tell);
                loop {
                    unsafe { libc::pause() };
                }
            });
        }
        let _crowd = (threads > 1).then(|| Crowd::new(threads - 1));
        (0..members).for_each(|_| read_byte(ready));
        println!("ready");
        let _ = std::io::stdout().flush();
        let rounds = enumerate(way, processes as usize, Duration::from_secs(seconds.into()));
        println!("{rounds}");
        let _ = std::io::stdout().flush();
        // What ended processes have taken can no longer be seen.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        // The namespace, and all members with it, ends with this process.
        0.0
    });
}

fn enumerate(way: Way, processes: usize, during: Duration) -> u32 {
    let (start, mut rounds) = (Instant::now(), 0);
    while start.elapsed() < during {
        if way == Way::Ps {
            assert_eq!(ps(), processes, "processes in /proc");
        }
        rounds += 1;
        let next = if way == Way::Hold { during } else { PERIOD * rounds };
        std::thread::sleep(next.saturating_sub(start.elapsed()));
    }
    rounds
}

/// Processes that /proc lists and whose `stat` can be read, with as few calls as can be.
fn ps() -> usize {
    let Ok(dir) = std::fs::read_dir("/proc") else { return 0 };
    let names = dir.flatten().map(|e| e.file_name().into_encoded_bytes()).filter(|n| n.iter().all(u8::is_ascii_digit));
    let readable = |name: Vec<u8>| {
        let path = CString::new([b"/proc/".as_slice(), &name, b"/stat"].concat()).unwrap_or_default();
        let mut text = [0_u8; 1024];
        unsafe {
            let fd = libc::open(path.as_ptr(), libc::O_RDONLY);
            let got = libc::read(fd, text.as_mut_ptr().cast(), text.len());
            libc::close(fd);
            got > 0
        }
    };
    names.map(readable).filter(|&r| r).count()
}
