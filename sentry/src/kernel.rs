//! The root object of one sandbox: handles to everything that exists once. Owns nothing but handles.
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Condvar;

use crate::fs::epoll::Instances as Epolls;
use crate::fs::inotify::Instances as Inotifies;
use crate::fs::pipe::PipeSlots;
use crate::fs::stdio::HostTerminals;
use crate::fs::tmpfs::TmpShared;
use crate::futex::Futexes;
use crate::loader::vdso::Vdso;
use crate::lock::{Mutex, MutexGuard, Rank};
use crate::ns::Owner;
use crate::ns::net::NetNamespace;
use crate::ns::ucounts::Ucounts;
use crate::ns::uts::UtsNamespace;
use crate::platform::Platform;
use crate::sched::Scheduler;
use crate::signal::queue::PendingCounts;
use crate::socket::unix_gc::Flights;
use crate::syscalls::dispatch::Dispatch;
use crate::syscalls::strace::Trace;
use crate::task::ThreadGroup;
use crate::task::in_guest::InGuest;
use crate::task::nsproxy::NsProxy;
use crate::task::pid_namespace::PidNamespace;
use crate::task::run::SystemCalls;
use crate::time::timer::Timers;
use crate::trace::Stats;
use crate::vfs::MountNamespace;
use crate::vfs::claim::Transfers;
use crate::vfs::lock::LockWaits;
use crate::{Errno, Result};

/// What a sandbox is made of, from the command line.
#[derive(Clone, Debug)]
pub struct KernelConfig {
    /// Host name at the start.
    pub hostname: Vec<u8>,
    /// Most tasks at one time (kernel.threads-max); clone gives EAGAIN beyond.
    pub max_tasks: usize,
}

impl Default for KernelConfig {
    fn default() -> Self {
        KernelConfig { hostname: b"bartizan".to_vec(), max_tasks: 131_072 }
    }
}

/// How the sandbox's init ended, in wait(2)'s form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitStatus(pub i32);

impl ExitStatus {
    /// The argument of exit(2), unless a signal killed it.
    pub fn code(self) -> Option<u8> {
        self.signal().is_none().then_some((self.0 >> 8) as u8)
    }

    /// The signal that killed it.
    pub fn signal(self) -> Option<u8> {
        (self.0 & 0x7f != 0).then_some((self.0 & 0x7f) as u8)
    }
}

/// One sandbox.
pub struct Kernel {
    /// The machine.
    pub platform: Arc<dyn Platform>,
    /// Armed timers.
    pub timers: Arc<Timers>,
    /// Run queues.
    pub sched: Scheduler,
    /// Counters.
    pub stats: Stats,
    /// Tasks whose calls may be served while they stay in the guest.
    pub in_guest: InGuest,
    /// The outermost PID namespace.
    pub root_pid_ns: Arc<PidNamespace>,
    /// The initial UTS namespace.
    pub uts: Arc<UtsNamespace>,
    /// The initial network namespace.
    pub net: Arc<NetNamespace>,
    /// Namespaces per user.
    pub ucounts: Arc<Ucounts>,
    /// Queued signals per user (RLIMIT_SIGPENDING).
    pub pending_counts: PendingCounts,
    /// The vDSO; None if it could not be made: programs make system calls instead.
    pub vdso: Option<Vdso>,
    /// Everybody who waits for a futex.
    pub futexes: Futexes,
    /// The system call trace, if one is wanted; set before the first process.
    pub trace: OnceLock<Trace>,
    /// Where memfd_create(2)'s files live.
    pub shmem: Arc<TmpShared>,
    /// Descriptors in flight between sockets.
    pub flights: Arc<Flights>,
    /// What all epoll instances share.
    pub epolls: Arc<Epolls>,
    /// What all inotify instances share.
    pub inotifies: Arc<Inotifies>,
    /// Long reads and writes under way.
    pub transfers: Arc<Transfers>,
    /// Slots of all pipes.
    pub pipe_slots: Arc<PipeSlots>,
    /// The host's terminals that the sandbox was given.
    pub terminals: Arc<HostTerminals>,
    /// Who waits for whose record lock.
    pub lock_waits: LockWaits,
    /// The initial mount namespace; set with the first process, and kept for as long as the sandbox.
    pub mounts: OnceLock<Arc<MountNamespace>>,
    first_ns: OnceLock<Arc<NsProxy>>,
    /// Configuration.
    pub config: KernelConfig,
    /// CLOCK_MONOTONIC at the start of the sandbox: the guest's boot time is this.
    pub started: crate::time::Nanos,
    boot_id: [u8; 16],
    kinship: Mutex<()>,
    tasks: AtomicUsize,
    max_tasks: AtomicUsize,
    forks: AtomicUsize,
    user_tasks: Mutex<HashMap<u32, usize>>,
    init: OnceLock<Weak<ThreadGroup>>,
    exit: parking_lot::Mutex<Option<ExitStatus>>,
    exited: Condvar,
}

/// The right to change who is whose parent, member or zombie.
pub type Kinship<'a> = MutexGuard<'a, ()>;

impl Kernel {
    /// A sandbox without a process.
    pub fn new(platform: Arc<dyn Platform>, config: KernelConfig) -> Arc<Kernel> {
        let max_tasks = config.max_tasks;
        let root_pid_ns = PidNamespace::outermost();
        let mut boot_id = [0; 16];
        platform.random(&mut boot_id);
        Arc::new(Kernel {
            timers: Timers::new(platform.clone()),
            sched: Scheduler::new(platform.clone()),
            stats: Stats::new(platform.cpus()),
            in_guest: InGuest::new(platform.cpus()),
            root_pid_ns,
            uts: Arc::new(UtsNamespace::new(config.hostname.clone())),
            net: NetNamespace::new(Owner::initial()),
            ucounts: Ucounts::new(&platform),
            pending_counts: PendingCounts::new(&platform),
            futexes: Futexes::default(),
            vdso: Vdso::new(&*platform).ok(),
            shmem: TmpShared::kernel_internal(platform.clone()),
            flights: Arc::default(),
            epolls: Arc::default(),
            inotifies: Arc::default(),
            transfers: Arc::default(),
            pipe_slots: Arc::default(),
            terminals: Arc::default(),
            lock_waits: LockWaits::default(),
            started: platform.monotonic(),
            platform,
            config,
            boot_id,
            kinship: Mutex::new(Rank::Kinship, ()),
            tasks: AtomicUsize::new(0),
            max_tasks: AtomicUsize::new(max_tasks),
            forks: AtomicUsize::new(0),
            user_tasks: Mutex::new(Rank::Leaf, HashMap::new()),
            trace: OnceLock::new(),
            mounts: OnceLock::new(),
            first_ns: OnceLock::new(),
            init: OnceLock::new(),
            exit: parking_lot::Mutex::new(None),
            exited: Condvar::new(),
        })
    }

    /// The nearest deadline has passed; called by the platform's reactor thread.
    pub fn on_deadline(&self) {
        self.timers.run_due();
    }

    /// The host's CLOCK_REALTIME was set; called by the platform's reactor thread.
    pub fn on_clock_set(&self) {
        self.platform.clock_was_set();
        if let Some(vdso) = &self.vdso {
            vdso.refresh(&*self.platform, self.platform.monotonic());
        }
        self.timers.clock_was_set();
    }

    /// Random bytes that name this run (/proc/sys/kernel/random/boot_id).
    pub fn boot_id(&self) -> [u8; 16] {
        self.boot_id
    }

    /// The system call layer.
    pub fn system_calls(&self) -> &'static dyn SystemCalls {
        &Dispatch
    }

    /// Nanoseconds since the sandbox started: what the guest sees as uptime.
    pub fn uptime(&self) -> crate::time::Nanos {
        self.platform.monotonic().saturating_sub(self.started)
    }

    /// Serializes changes of kinship: parents, children, process groups, sessions, zombies.
    pub fn kinship(&self) -> Kinship<'_> {
        self.kinship.lock()
    }

    /// The first process.
    pub fn init(&self) -> Option<Arc<ThreadGroup>> {
        self.init.get().and_then(Weak::upgrade)
    }

    /// The namespaces that the first process began with.
    pub fn first_ns(&self) -> Option<&Arc<NsProxy>> {
        self.first_ns.get()
    }

    pub(crate) fn set_first_ns(&self, first: &Arc<NsProxy>) {
        let _ = self.first_ns.set(first.clone());
    }

    pub(crate) fn set_init(&self, group: &Arc<ThreadGroup>) {
        let _ = self.init.set(Arc::downgrade(group));
    }

    /// Tasks that exist (zombies included).
    pub fn task_count(&self) -> usize {
        self.tasks.load(Ordering::Relaxed)
    }

    /// Tasks ever made (`processes` of /proc/stat).
    pub fn fork_count(&self) -> usize {
        self.forks.load(Ordering::Relaxed)
    }

    /// Most tasks at one time (kernel.threads-max).
    pub fn max_tasks(&self) -> usize {
        self.max_tasks.load(Ordering::Relaxed)
    }

    /// Changes that; EINVAL for 0 and beyond what the sandbox was started with.
    pub fn set_max_tasks(&self, max: usize) -> Result<()> {
        if max == 0 || max > self.config.max_tasks {
            return Err(Errno::EINVAL);
        }
        self.max_tasks.store(max, Ordering::Relaxed);
        Ok(())
    }

    /// Counts a task that is about to be made; EAGAIN at the limit.
    pub(crate) fn count_task(&self) -> Result<()> {
        self.tasks
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < self.max_tasks()).then_some(n + 1))
            .map_err(|_| Errno::EAGAIN)?;
        self.forks.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn uncount_task(&self) {
        self.tasks.fetch_sub(1, Ordering::Relaxed);
    }

    /// Tasks of a real user id (RLIMIT_NPROC).
    pub fn user_tasks(&self, uid: u32) -> usize {
        self.user_tasks.lock().get(&uid).copied().unwrap_or(0)
    }

    pub(crate) fn charge_user(&self, uid: u32) {
        *self.user_tasks.lock().entry(uid).or_insert(0) += 1;
    }

    pub(crate) fn uncharge_user(&self, uid: u32) {
        let mut users = self.user_tasks.lock();
        if let Some(n) = users.get_mut(&uid) {
            *n = n.saturating_sub(1);
            if *n == 0 {
                users.remove(&uid);
            }
        }
    }

    /// The sandbox's init has ended: whoever waits in [`Kernel::wait_exit`] goes on, and the workers return.
    pub(crate) fn set_exit(&self, status: ExitStatus) {
        let mut exit = self.exit.lock();
        if exit.is_none() {
            *exit = Some(status);
        }
        drop(exit);
        self.exited.notify_all();
        self.shutdown();
    }

    /// Blocks the calling host thread (not a worker) until the sandbox's init has ended and all its processes are gone.
    pub fn wait_exit(&self) -> ExitStatus {
        let mut exit = self.exit.lock();
        loop {
            if let Some(status) = *exit {
                return status;
            }
            self.exited.wait(&mut exit);
        }
    }

    /// The status, once the sandbox has ended.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        *self.exit.lock()
    }

    /// Makes all workers return.
    pub fn shutdown(&self) {
        self.sched.shutdown();
    }
}

/// The life of a worker's host thread: runs tasks on `cpu` until the sandbox has ended, or [`Kernel::shutdown`].
pub fn worker_main(kernel: &Arc<Kernel>, cpu: usize) {
    kernel.sched.run_worker(cpu);
}
