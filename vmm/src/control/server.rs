//! The sandbox's side of the control socket: one host thread that sleeps until a client comes. Owns connections and their limits; what
//! is asked it takes from the kernel without entering a guest. A client can waste this thread's time only: the guest runs on.
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with, sockopt};
use rustix::process::Uid;
use sentry::Kernel;
use sentry::fs::proc::listing;
use sentry::signal::Signal;
use serde::Serialize;

use super::{Answer, Ask, Claim, MAX_REQUEST, Page, Process, Request, Signalled, State, Thread, VERSION};

const LISTENER: u64 = 0;
const STOP: u64 = 1;
const FIRST_CONNECTION: u64 = 2;

/// Connections at one time; beyond, the oldest gives way.
const MAX_CONNECTIONS: usize = 16;
/// How long a connection may last: a client that neither asks nor reads is forgotten.
const LIFE: Duration = Duration::from_secs(30);
/// How long the socket is left alone when the host refuses a new connection (its descriptors are used up).
const PAUSE: Duration = Duration::from_millis(500);
/// Processes in one answer at most.
const PAGE: usize = 512;
/// Threads in one answer, after which no further process is added.
const PAGE_THREADS: usize = 8192;

/// What the sandbox was started with.
pub struct Facts {
    /// The command and its arguments.
    pub command: Vec<String>,
}

/// The serving thread; ends on drop.
pub struct Server {
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
    _claim: Claim,
}

struct Connection {
    token: u64,
    socket: OwnedFd,
    since: Instant,
    input: Vec<u8>,
    output: Vec<u8>,
    sent: usize,
}

struct Serving {
    kernel: Arc<Kernel>,
    name: String,
    facts: Facts,
    listener: UnixListener,
    epoll: OwnedFd,
    /// Who may ask, besides root.
    owner: Uid,
    connections: Vec<Connection>,
    next: u64,
    /// When the listener is looked at again, if it is not looked at now.
    resume: Option<Instant>,
}

impl Server {
    /// Starts the thread and waits until it runs: a thread's own beginning makes host calls that the jail, which comes next,
    /// lets nobody make.
    pub fn start(kernel: &Arc<Kernel>, claim: Claim, listener: UnixListener, facts: Facts) -> io::Result<Server> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &stop, epoll::EventData::new_u64(STOP), epoll::EventFlags::IN)?;
        let mut serving = Serving {
            kernel: kernel.clone(),
            name: claim.name().to_owned(),
            facts,
            listener,
            epoll,
            owner: rustix::process::geteuid(),
            connections: Vec::new(),
            next: FIRST_CONNECTION,
            resume: None,
        };
        let (running, runs) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name("control".into()).stack_size(512 << 10).spawn(move || {
            let _ = running.send(());
            serving.run();
        })?;
        let _ = runs.recv();
        Ok(Server { stop, thread: Some(thread), _claim: claim })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Serving {
    fn run(&mut self) {
        let mut events = Vec::with_capacity(MAX_CONNECTIONS + 2);
        loop {
            events.clear();
            let wait = self.nearest().map(|at| timespec(at.saturating_duration_since(Instant::now())));
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), wait.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => {
                    log::error!("the control socket cannot be waited for: {e}");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    STOP => return,
                    LISTENER => self.accept(),
                    token => self.serve(token),
                }
            }
            let now = Instant::now();
            self.connections.retain(|c| now.duration_since(c.since) < LIFE);
            if self.resume.is_some_and(|at| at <= now) {
                self.resume = None;
                let data = epoll::EventData::new_u64(LISTENER);
                let _ = epoll::add(&self.epoll, &self.listener, data, epoll::EventFlags::IN);
            }
        }
    }

    /// When there is something to do without an event; None with no connection: the thread then sleeps for good.
    fn nearest(&self) -> Option<Instant> {
        self.connections.iter().map(|c| c.since + LIFE).chain(self.resume).min()
    }

    fn accept(&mut self) {
        let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => socket,
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
            Err(e) => {
                log::debug!("a control connection is refused: {e}");
                let _ = epoll::delete(&self.epoll, &self.listener);
                self.resume = Some(Instant::now() + PAUSE);
                return;
            }
        };
        if !sockopt::socket_peercred(&socket).is_ok_and(|peer| peer.uid == self.owner || peer.uid.is_root()) {
            return;
        }
        let data = epoll::EventData::new_u64(self.next);
        if epoll::add(&self.epoll, &socket, data, epoll::EventFlags::IN).is_err() {
            return;
        }
        if self.connections.len() >= MAX_CONNECTIONS {
            self.connections.remove(0);
        }
        self.connections.push(Connection {
            token: self.next,
            socket,
            since: Instant::now(),
            input: Vec::new(),
            output: Vec::new(),
            sent: 0,
        });
        self.next += 1;
    }

    fn serve(&mut self, token: u64) {
        let Some(at) = self.connections.iter().position(|c| c.token == token) else { return };
        let mut connection = self.connections.remove(at);
        if self.advance(&mut connection) {
            let more = !connection.output.is_empty();
            let interest = if more { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            let data = epoll::EventData::new_u64(token);
            if epoll::modify(&self.epoll, &connection.socket, data, interest).is_ok() {
                self.connections.insert(at, connection);
            }
        }
    }

    /// Reads, answers and writes as far as the client lets it; false once the connection is over. While an answer waits to be
    /// taken nothing further is read.
    fn advance(&self, c: &mut Connection) -> bool {
        if c.output.is_empty() {
            let mut part = [0; MAX_REQUEST];
            match rustix::io::read(&c.socket, &mut part) {
                Ok(0) => return false,
                Ok(n) => c.input.extend_from_slice(part.get(..n).unwrap_or_default()),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        loop {
            if !send(c) {
                return false;
            }
            if !c.output.is_empty() {
                return true;
            }
            match c.input.iter().position(|&b| b == b'\n') {
                Some(end) => {
                    let line: Vec<u8> = c.input.drain(..=end).collect();
                    c.output = self.answer(&line);
                }
                None if c.input.len() >= MAX_REQUEST => {
                    // Whatever this is, it is no client of ours: one answer, and the end.
                    c.output = failure(format!("a request has at most {MAX_REQUEST} bytes"));
                    send(c);
                    return false;
                }
                None => return true,
            }
        }
    }

    fn answer(&self, line: &[u8]) -> Vec<u8> {
        if line.len() > MAX_REQUEST {
            return failure(format!("a request has at most {MAX_REQUEST} bytes"));
        }
        #[derive(serde::Deserialize)]
        struct Versioned {
            version: u32,
        }
        match serde_json::from_slice::<Versioned>(line) {
            Ok(v) if v.version == VERSION => {}
            Ok(v) => {
                return failure(format!("version {} of the protocol is not spoken here, but {VERSION} is", v.version));
            }
            Err(_) => return failure("a request is one JSON object with a version".to_owned()),
        }
        match serde_json::from_slice::<Request>(line) {
            Ok(request) => match request.ask {
                Ask::State => success(self.state()),
                Ask::Ps { from, threads } => success(self.page(from, threads)),
                Ask::Kill { signal, pid, all } => match self.kill(signal, pid, all) {
                    Ok(done) => success(done),
                    Err(sentence) => failure(sentence),
                },
            },
            Err(e) => failure(format!("the request is not understood: {e}")),
        }
    }

    fn state(&self) -> State {
        let memory = self.kernel.platform.memory();
        State {
            name: self.name.clone(),
            pid: std::process::id(),
            uptime_ns: self.kernel.uptime(),
            cpus: self.kernel.platform.cpus(),
            processes: self.kernel.root_pid_ns.group_count(),
            threads: self.kernel.task_count(),
            memory_bytes: memory.used(),
            memory_limit_bytes: memory.limit(),
            command: self.facts.command.clone(),
        }
    }

    fn page(&self, from: i32, threads: bool) -> Page {
        let (processes, next) = listing::page(&self.kernel, from.max(0), PAGE, threads.then_some(PAGE_THREADS));
        Page { processes: processes.into_iter().map(process).collect(), next }
    }

    fn kill(&self, signal: i32, pid: Option<i32>, all: bool) -> Result<Signalled, String> {
        let signal = Signal::new(signal).ok_or_else(|| format!("there is no signal {signal}"))?;
        if all {
            if pid.is_some() {
                return Err("a signal goes to one process or to all".to_owned());
            }
            return Ok(Signalled { processes: self.kernel.kill_all_from_host(signal) });
        }
        let pid = pid.unwrap_or(1);
        match self.kernel.kill_from_host(pid, signal) {
            Ok(()) => Ok(Signalled { processes: 1 }),
            Err(_) => Err(format!("there is no process {pid}")),
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn process(p: listing::Process) -> Process {
    Process {
        pid: p.pid,
        ppid: p.ppid,
        pgid: p.pgid,
        sid: p.sid,
        uid: p.uid,
        state: p.state,
        threads: p.threads,
        user_ns: p.user,
        system_ns: p.system,
        start_ns: p.start,
        name: text(&p.name),
        command: p.command.iter().map(|a| text(a)).collect(),
        tasks: p
            .tasks
            .iter()
            .map(|t| Thread { tid: t.tid, state: t.state, user_ns: t.user, system_ns: t.system, name: text(&t.name) })
            .collect(),
    }
}

fn line(answer: &impl Serialize) -> Vec<u8> {
    let mut out = serde_json::to_vec(answer).unwrap_or_default();
    out.push(b'\n');
    out
}

fn success(ok: impl Serialize) -> Vec<u8> {
    line(&Answer { version: VERSION, ok: Some(ok), error: None })
}

fn failure(sentence: String) -> Vec<u8> {
    line(&Answer::<()> { version: VERSION, ok: None, error: Some(sentence) })
}

/// Writes what waits; false if the client is gone.
fn send(c: &mut Connection) -> bool {
    while let Some(rest) = c.output.get(c.sent..).filter(|r| !r.is_empty()) {
        match rustix::io::write(c.socket.as_fd(), rest) {
            Ok(n) => c.sent += n,
            Err(Errno::AGAIN) => return true,
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
    c.output.clear();
    c.sent = 0;
    true
}

fn timespec(d: Duration) -> Timespec {
    // A little later than the time itself, so that the time has passed when the thread wakes.
    let d = d + Duration::from_millis(1);
    Timespec { tv_sec: i64::try_from(d.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(d.subsec_nanos()) }
}
