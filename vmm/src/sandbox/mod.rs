//! A sandbox from its parts: platform, kernel, file systems, streams, workers, jail, first process. Owns the order in which
//! they come and go; nothing of what they do.
mod command;
pub(crate) mod error;
mod inherited;
mod timeout;
mod upkeep;
mod workers;

use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use sentry::Kernel;
use sentry::fs::stdio::StdioFile;
use sentry::fs::{Bind, RootConfig, assemble_root};
use sentry::kernel::KernelConfig;
use sentry::ns::user::Credentials;
use sentry::syscalls::strace::Trace;
use sentry::task::init::InitConfig;
use sentry::time::timer::Armed;
use sentry::vfs::OpenFlags;

pub use error::SandboxError;

use crate::control;
use crate::host::inherited::was_open;
use crate::host::stream::{Stream, take_standard};
use crate::host::tree::DirTree;
use crate::jail;
use crate::memory::GuestMemory;
use crate::platform::{Config, KvmPlatform, Service};
use crate::reactor::{self, Callbacks, Reactor};
use workers::Workers;

/// A host path to show in the sandbox.
pub struct BindSource {
    /// Directory or file on the host.
    pub source: PathBuf,
    /// Absolute path in the sandbox.
    pub target: Vec<u8>,
    /// Whether the sandbox may not write.
    pub read_only: bool,
}

/// Whom the command runs as.
pub struct Identity {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
}

/// What a sandbox is made of.
pub struct SandboxConfig {
    /// Root file system on the host, shown read-only under a discardable layer.
    pub root: PathBuf,
    /// Further host paths.
    pub binds: Vec<BindSource>,
    /// Absolute paths of empty in-memory file systems.
    pub tmpfs: Vec<Vec<u8>>,
    /// Working directory.
    pub workdir: Vec<u8>,
    /// Whether a missing working directory is an error; otherwise `/` stands in.
    pub workdir_must_exist: bool,
    /// `K=V` strings.
    pub env: Vec<Vec<u8>>,
    /// User and group; the caller's by default.
    pub user: Option<Identity>,
    /// Host name.
    pub hostname: Vec<u8>,
    /// Workers.
    pub cpus: usize,
    /// Limit of memory, bytes.
    pub memory: Option<u64>,
    /// Whether idle workers serve calls of tasks that stay in the guest.
    pub service: Service,
    /// Whether hot call sites may be made direct.
    pub rewrite: bool,
    /// Life span.
    pub timeout: Option<Duration>,
    /// System call trace.
    pub trace: Option<Trace>,
    /// What a host system call that the jail does not allow does.
    pub refusal: jail::Refusal,
    /// The name under which `bartizan list`, `ps` and `kill` find it.
    pub name: Option<String>,
    /// Command and arguments, not empty.
    pub argv: Vec<Vec<u8>>,
}

/// How the command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It exited.
    Exited(u8),
    /// A signal killed it.
    Killed(u8),
    /// Its time was up.
    TimedOut,
}

/// A running sandbox. The thread that starts it is the worker of CPU 0, from [`Sandbox::wait`] on.
pub struct Sandbox {
    kernel: Arc<Kernel>,
    workers: Workers,
    reacting: Reacting,
    timed_out: Arc<AtomicBool>,
    timeout: Option<Armed>,
    control: Option<control::Server>,
}

/// Signals of the caller that reach the guest.
const FORWARDED: &[i32] = &[
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGWINCH,
    libc::SIGTSTP,
    libc::SIGCONT,
    libc::SIGUSR1,
    libc::SIGUSR2,
];

impl Sandbox {
    /// Builds everything and starts the command. When this returns an error nothing is left behind.
    pub fn start(config: SandboxConfig) -> Result<Sandbox, SandboxError> {
        reactor::block(FORWARDED);
        let limits = inherited::limits();
        let mask = inherited::file_mask();
        raise_descriptor_limit();
        let claim = config.name.as_deref().map(|name| control::Runtime::make()?.claim(name)).transpose();
        let claim = claim.map_err(SandboxError::Control)?;
        let reactor = Reactor::new().map_err(|e| SandboxError::host("make the reactor", &e))?;
        let memory_limit = config.memory.unwrap_or_else(default_memory);
        let platform = KvmPlatform::new(Config {
            cpus: config.cpus,
            memory_limit,
            service: config.service,
            rewrite: config.rewrite,
        })?;
        let clock = reactor.clone();
        platform.set_deadline_sink(Box::new(move |at| clock.set_deadline(at)));

        let memory = platform.guest_memory().clone();
        let mut readable: Vec<PathBuf> = vec![config.root.clone()];
        let mut writable: Vec<PathBuf> = Vec::new();
        let root = DirTree::open(&config.root, false, memory.clone()).map_err(|e| SandboxError::Source {
            what: "root file system",
            path: config.root.clone(),
            errno: e,
        })?;
        let mut binds = Vec::new();
        for bind in &config.binds {
            if bind.read_only { &mut readable } else { &mut writable }.push(bind.source.clone());
            binds.push(open_bind(bind, &memory)?);
        }

        let streams = standard_streams(&reactor, &memory)?;

        // Threads started from here on are under the same restriction.
        let mut paths = jail::Paths { readable, writable, ..jail::Paths::default() };
        if let Some((claim, _)) = &claim {
            paths.emptied.push(claim.path().to_owned());
            paths.thinned.push(claim.parent().to_owned());
        }
        jail::restrict_files(&paths).map_err(|e| SandboxError::Jail(e.to_string()))?;
        // They make their vCPUs while this one goes on.
        let workers = Workers::start(&platform, config.cpus)?;
        let mut reacting = Reacting::start(&reactor)?;

        let kernel_config = KernelConfig { hostname: config.hostname.clone(), ..KernelConfig::default() };
        let kernel = Kernel::new(platform.clone(), kernel_config);
        sentry::syscalls::requested::offer(&kernel);
        upkeep::start(&kernel, &platform);
        if let Some(trace) = config.trace {
            let _ = kernel.trace.set(trace);
        }
        let mounts = assemble_root(&kernel, RootConfig { tree: root, binds, tmpfs: config.tmpfs.clone() })
            .map_err(|e| SandboxError::Mount { at: e.at, errno: e.errno })?;
        let open = |stream, flags| StdioFile::open(&kernel.terminals, stream, flags);
        let files = streams.into_iter().map(|(number, stream, flags)| (number, open(stream, flags))).collect();

        let user = config.user.unwrap_or_else(inherited::identity);
        let credentials = Credentials::new(user.uid, user.gid, user.groups);
        let command = config.argv.iter().map(|a| String::from_utf8_lossy(a).into_owned()).collect();
        let init = InitConfig {
            argv: config.argv,
            envp: config.env,
            credentials,
            fs: command::places(&mounts, &config.workdir, config.workdir_must_exist, mask)?,
            fds: files,
            limits: Some(limits),
        };

        let timed_out = Arc::new(AtomicBool::new(false));
        reacting.serve(&kernel);
        workers.attach(&platform)?;
        let mut sandbox =
            Sandbox { kernel: kernel.clone(), reacting, workers, timed_out, timeout: None, control: None };
        let mut listening = None;
        if let Some((claim, listener)) = claim {
            listening = Some(listener.as_raw_fd());
            let server = control::Server::start(&kernel, claim, listener, control::Facts { command });
            sandbox.control = Some(server.map_err(|e| SandboxError::host("start the control thread", &e))?);
        }
        sandbox.reacting.begun();
        let started = jail::restrict_calls(config.refusal, listening)
            .map_err(|e| SandboxError::Jail(e.to_string()))
            .and_then(|()| command::spawn(&kernel, init));
        if let Err(error) = started {
            sandbox.stop();
            return Err(error);
        }
        if let Some(span) = config.timeout {
            sandbox.timeout = Some(timeout::arm(&kernel, span, &sandbox.timed_out));
        }
        Ok(sandbox)
    }

    /// The kernel, for reports.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Runs the command and everything it started to their end, on the thread that started the sandbox.
    pub fn wait(&self) -> Outcome {
        self.workers.run(&self.kernel);
        let status = self.kernel.wait_exit();
        match (status.code(), status.signal()) {
            _ if self.timed_out.load(Ordering::SeqCst) => Outcome::TimedOut,
            (_, Some(signal)) => Outcome::Killed(signal),
            (code, None) => Outcome::Exited(code.unwrap_or(0)),
        }
    }

    fn stop(&mut self) {
        self.timeout = None;
        self.control = None;
        self.kernel.shutdown();
        self.workers.join();
        self.reacting.stop();
    }

    /// Takes back what others on the host could see, and leaves threads and memory to the end of the process, which is near.
    pub fn leave(mut self) {
        self.control = None;
        core::mem::forget(self);
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The reactor's thread.
struct Reacting {
    reactor: Arc<Reactor>,
    begun: mpsc::Receiver<()>,
    /// What it waits for at first; without it, it ends.
    callbacks: Option<mpsc::SyncSender<Callbacks>>,
}

impl Reacting {
    fn start(reactor: &Arc<Reactor>) -> Result<Reacting, SandboxError> {
        let (callbacks, later) = mpsc::sync_channel(1);
        let begun = reactor.start(FORWARDED, move || later.recv().ok());
        let begun = begun.map_err(|e| SandboxError::host("start the reactor thread", &e))?;
        Ok(Reacting { reactor: reactor.clone(), begun, callbacks: Some(callbacks) })
    }

    /// Lets it look at the world for `kernel`.
    fn serve(&mut self, kernel: &Arc<Kernel>) {
        if let Some(callbacks) = self.callbacks.take() {
            // The thread is there as long as `self`.
            let _ = callbacks.send(callbacks_of(kernel));
        }
    }

    /// Waits until the thread runs: its beginning makes host calls that the jail lets nobody make.
    fn begun(&self) {
        let _ = self.begun.recv();
    }

    fn stop(&mut self) {
        self.callbacks = None;
        self.reactor.stop();
    }
}

impl Drop for Reacting {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What the reactor does for the sandbox.
fn callbacks_of(kernel: &Arc<Kernel>) -> Callbacks {
    let [deadline, clock, signal] = [Arc::downgrade(kernel), Arc::downgrade(kernel), Arc::downgrade(kernel)];
    Callbacks {
        deadline: Box::new(move || {
            if let Some(kernel) = deadline.upgrade() {
                kernel.on_deadline();
            }
        }),
        clock_set: Box::new(move || {
            if let Some(kernel) = clock.upgrade() {
                kernel.on_clock_set();
            }
        }),
        signal: Box::new(move |number| {
            if let Some(kernel) = signal.upgrade() {
                forward(&kernel, number);
            }
        }),
    }
}

fn open_bind(bind: &BindSource, memory: &Arc<GuestMemory>) -> Result<Bind, SandboxError> {
    let refused = |errno| SandboxError::Source { what: "bind source", path: bind.source.clone(), errno };
    let source = bind.source.canonicalize().map_err(|e| refused(error::errno_of(&e)))?;
    let (dir, file): (&Path, Vec<u8>) = if source.is_dir() {
        (&source, Vec::new())
    } else {
        let name = source.file_name().map(|n| std::os::unix::ffi::OsStrExt::as_bytes(n).to_vec()).unwrap_or_default();
        (source.parent().unwrap_or(Path::new("/")), name)
    };
    let tree = DirTree::open(dir, !bind.read_only, memory.clone()).map_err(refused)?;
    Ok(Bind { tree, file, at: bind.target.clone(), read_only: bind.read_only })
}

fn standard_streams(
    reactor: &Arc<Reactor>,
    memory: &Arc<GuestMemory>,
) -> Result<Vec<(i32, Arc<Stream>, OpenFlags)>, SandboxError> {
    let refused = |e: std::io::Error| SandboxError::host("take over a standard stream", &e);
    let (stdin, stdout, stderr) = (std::io::stdin(), std::io::stdout(), std::io::stderr());
    let mut streams = Vec::new();
    for (number, fd) in [(0u8, stdin.as_fd()), (1, stdout.as_fd()), (2, stderr.as_fd())] {
        // A descriptor that the caller closed stays closed.
        if !was_open(number) {
            continue;
        }
        let Ok(flags) = rustix::fs::fcntl_getfl(fd) else { continue };
        // Standard error goes on to carry what bartizan itself has to say.
        let taken = take_standard(fd, number == 2).map_err(refused)?;
        let stream = Stream::new(taken, reactor, memory.clone())
            .map_err(|e| refused(std::io::Error::from_raw_os_error(e.raw())))?;
        streams.push((i32::from(number), stream, OpenFlags::from_bits_retain(flags.bits())));
    }
    Ok(streams)
}

/// Every open host file of the guest is a descriptor of this process.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(e) = setrlimit(Resource::Nofile, limit) {
        log::warn!("the limit on open files stays as it is: {e}");
    }
}

/// Three quarters of the host's memory.
fn default_memory() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_mul(u64::from(info.mem_unit)) / 4 * 3
}

/// Hands a signal of the caller to the guest. A terminal stop of the sandbox as a whole stops
/// bartizan itself, so that the caller's shell sees it.
fn forward(kernel: &Arc<Kernel>, number: i32) {
    if kernel.signal_from_host(number) {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP);
    }
}
