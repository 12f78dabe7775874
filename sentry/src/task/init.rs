//! The first process of a sandbox. Owns how it comes into being without a parent.
use std::sync::Arc;

use super::limits::{Limits, default_limits};
use super::nsproxy::NsProxy;
use super::task::NewTask;
use super::thread_group::Image;
use super::{Task, ThreadGroup, exec, run, session};
use crate::kernel::Kernel;
use crate::loader::{self, LoadRequest};
use crate::mm::{AddressSpace, Charge};
use crate::ns::Owner;
use crate::ns::cgroup::CgroupNamespace;
use crate::ns::ipc::IpcNamespace;
use crate::ns::time::TimeNamespace;
use crate::ns::user::Credentials;
use crate::platform::{KernelMemory, UserContext};
use crate::sched::Entity;
use crate::signal::{self, GroupSignals, Signal, TaskSignals};
use crate::vfs::fs_context::FsState;
use crate::vfs::path::{Lookup, LookupFlags, open_exec};
use crate::vfs::{FdTable, File, FsContext};
use crate::{Errno, Result};

/// The command a sandbox runs.
pub struct InitConfig {
    /// Arguments; the first one is also the program, searched in PATH of `envp` unless it has a slash.
    pub argv: Vec<Vec<u8>>,
    /// Environment strings.
    pub envp: Vec<Vec<u8>>,
    /// Who it runs as.
    pub credentials: Credentials,
    /// Root, working directory, umask.
    pub fs: FsState,
    /// Open descriptors.
    pub fds: Vec<(i32, Arc<File>)>,
    /// Limits; None for the defaults.
    pub limits: Option<Limits>,
}

/// Default search path when the environment has none (what execvp(3) uses).
const DEFAULT_PATH: &[u8] = b"/bin:/usr/bin";

impl Kernel {
    /// Starts the sandbox's first process, number 1. ENOENT if the command is not found, EACCES or ENOEXEC if it cannot be
    /// executed.
    pub fn spawn_init(self: &Arc<Kernel>, config: InitConfig) -> Result<Arc<Task>> {
        let first = config.argv.first().cloned().ok_or(Errno::EINVAL)?;
        if let Some(mounts) = config.fs.root.mount.namespace() {
            let _ = self.mounts.set(mounts);
        }
        self.count_task()?;
        let pid = self.root_pid_ns.allocate(&[], false)?;
        let now = self.timers.now();
        let group = Arc::new(ThreadGroup::new(
            self.clone(),
            pid.clone(),
            GroupSignals::default(),
            config.limits.unwrap_or_else(default_limits),
            Arc::new(Image::default()),
            Signal::SIGCHLD.number(),
            now,
        ));
        group.signals.set_unkillable();
        let files = Arc::new(FdTable::new(&self.platform));
        let opened: Vec<Arc<File>> = config.fds.iter().map(|(_, file)| file.clone()).collect();
        for (fd, file) in config.fds {
            files.replace(fd, file, false, 1 << 20)?;
        }
        let time = TimeNamespace::first();
        let nsproxy = Arc::new(NsProxy {
            time: time.clone(),
            time_for_children: time,
            uts: self.uts.clone(),
            ipc: Arc::new(IpcNamespace::new(Owner::initial())),
            net: self.net.clone(),
            cgroup: Arc::new(CgroupNamespace::new(Owner::initial())),
            mnt: config.fs.root.mount.namespace(),
            pid_for_children: self.root_pid_ns.clone(),
        });
        self.set_first_ns(&nsproxy);
        let task = Task::new(NewTask {
            kernel: self.clone(),
            group: group.clone(),
            pid: pid.clone(),
            context: UserContext { orig_rax: u64::MAX, ..UserContext::default() },
            fpu: self.platform.new_fpu(),
            signals: TaskSignals::default(),
            space: AddressSpace::new(&self.platform)?,
            files,
            fs: Arc::new(FsContext::new(config.fs)),
            credentials: Arc::new(config.credentials),
            nsproxy,
            comm: [0; 16],
            sched: Arc::new(Entity::new(self.sched.cpus(), group.cpu_clock.clone())),
            start_time: now,
            charge: Charge::new(&self.platform, KernelMemory::Task, super::clone::TASK_COST)?,
        });
        let (path, file) = find(&task, &first, &config.envp)?;
        let loaded = loader::load(LoadRequest { task: &task, file, path, argv: config.argv, envp: config.envp })?;
        {
            let _kinship = self.kinship();
            let pg = session::new_session(&pid, &Arc::downgrade(&group));
            let mut s = group.state.lock();
            s.tasks.insert(task.global_tid(), task.clone());
            s.leader = Some(task.clone());
            s.live = 1;
            s.process_group = Some(pg.clone());
            drop(s);
            group.task_count.store(1, std::sync::atomic::Ordering::Relaxed);
            session::join(&pg, &group);
            session::adopt_terminal(pg.session(), &pg, &opened);
            pid.hold_task(&task);
            pid.hold_group(&group);
        }
        exec::commit(&task, loaded);
        self.set_init(&group);
        run::start(&task);
        Ok(task)
    }

    /// A signal from outside the sandbox for its first process: acts on it as on any process, not as on an init. What a
    /// terminal causes goes to the foreground process group of the first process's terminal. Gives whether a terminal stop
    /// is for the sandbox as a whole: no shell inside has put another job into the foreground or takes SIGTSTP itself.
    pub fn signal_from_host(&self, number: i32) -> bool {
        let (Some(init), Some(signal)) = (self.init(), Signal::new(number)) else { return false };
        let by_terminal =
            matches!(signal, Signal::SIGINT | Signal::SIGQUIT | Signal::SIGTSTP | Signal::SIGWINCH | Signal::SIGHUP);
        let foreground = init.session().tty().and_then(|tty| tty.foreground()).filter(|_| by_terminal);
        let own = foreground.as_ref().is_none_or(|group| Arc::ptr_eq(group, &init.process_group()));
        let default = init.signals.actions().get(signal).handler == signal::action::SIG_DFL;
        match foreground {
            Some(group) => group.members().iter().for_each(|m| signal::send::from_host(m, signal)),
            None => signal::send::from_host(&init, signal),
        }
        signal == Signal::SIGTSTP && own && default
    }
}

/// Searches the command as execvp(3) does.
fn find(task: &Arc<Task>, name: &[u8], envp: &[Vec<u8>]) -> Result<(Vec<u8>, Arc<File>)> {
    let cx = Lookup::new(task.fs().get(), &**task);
    if name.contains(&b'/') {
        return Ok((name.to_vec(), open_exec(&cx, None, name, LookupFlags::FOLLOW)?));
    }
    if name.is_empty() {
        return Err(Errno::ENOENT);
    }
    let path = envp.iter().find_map(|e| e.strip_prefix(b"PATH=".as_slice())).unwrap_or(DEFAULT_PATH);
    let mut result = Errno::ENOENT;
    for dir in path.split(|&b| b == b':') {
        let mut full = if dir.is_empty() { b".".to_vec() } else { dir.to_vec() };
        full.push(b'/');
        full.extend_from_slice(name);
        match open_exec(&cx, None, &full, LookupFlags::FOLLOW) {
            Ok(file) => return Ok((full, file)),
            Err(Errno::EACCES) => result = Errno::EACCES,
            Err(_) => {}
        }
    }
    Err(result)
}
