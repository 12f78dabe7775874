//! Whatever enumerates processes looks at thread groups, not at their threads: counted here, however many threads there are.
use std::sync::Arc;

use linux_raw_sys::general as raw;

use crate::fs::proc::ProcFs;
use crate::kernel::{Kernel, KernelConfig};
use crate::mm::IoDest;
use crate::ns::user::Credentials;
use crate::platform::sim::SimPlatform;
use crate::signal::Signal;
use crate::task::clone::{self, CloneRequest, flag};
use crate::task::run::Served;
use crate::task::thread_group::visits;
use crate::task::wait::{Options, Target, try_wait};
use crate::task::{Task, exit};
use crate::vfs::file::KernelCaller;
use crate::vfs::fs_context::FsState;
use crate::vfs::path::{Lookup, OpenHow, open};
use crate::vfs::{DirSink, Mount, OpenFlags};
use crate::{Errno, Result};

const PROCESSES: usize = 20;
const THREADS: usize = 500;

fn birth(by: &Arc<Task>, flags: u64, exit_signal: i32) -> Arc<Task> {
    clone::make(by, &CloneRequest { flags, exit_signal, ..CloneRequest::default() }).unwrap().0
}

fn call(task: &Arc<Task>, nr: u32, args: [u64; 6]) -> Result<u64> {
    match task.kernel().system_calls().serve(task, nr.into(), args) {
        Served::Done(result) => result,
        Served::Blocks(_) => panic!("call {nr} blocks"),
    }
}

#[derive(Default)]
struct Names(Vec<Vec<u8>>);

impl DirSink for Names {
    fn add(&mut self, name: &[u8], _ino: u64, _kind: u8, _next: u64) -> bool {
        self.0.push(name.to_vec());
        true
    }
}

#[test]
fn enumerations_visit_no_thread() {
    let kernel = Kernel::new(SimPlatform::new(1), KernelConfig::default());
    let first = super::first_task(&kernel, Credentials::new(0, 0, Vec::new()));
    let mut leaders = Vec::new();
    for _ in 0..PROCESSES {
        let leader = birth(&first, 0, Signal::SIGCHLD.number());
        let shared = flag::VM | flag::FS | flag::FILES | flag::SIGHAND | flag::THREAD;
        let threads: Vec<_> = (0..THREADS).map(|_| birth(&leader, shared, 0)).collect();
        leaders.push((leader, threads));
    }
    visits::take();
    // kill(2) of everybody and of a process group, times(2), sysinfo(2), getrusage(2).
    assert_eq!(call(&first, raw::__NR_kill, [u64::MAX, 0, 0, 0, 0, 0]), Ok(0));
    assert_eq!(call(&first, raw::__NR_kill, [0; 6]), Ok(0));
    let buffer = super::BASE + 0x900;
    call(&first, raw::__NR_times, [buffer, 0, 0, 0, 0, 0]).unwrap();
    call(&first, raw::__NR_sysinfo, [buffer, 0, 0, 0, 0, 0]).unwrap();
    call(&first, raw::__NR_getrusage, [0, buffer, 0, 0, 0, 0]).unwrap();
    // Nobody has ended, and looking for one who has is not a walk either.
    let options = Options { no_hang: true, exited: true, stopped: true, all: true, ..Options::default() };
    assert!(try_wait(&first, &Target::Any, options).unwrap().is_none());
    // What ps(1) reads.
    let at = Mount::detached(ProcFs::new(&kernel, kernel.root_pid_ns.clone())).root_path();
    let state = FsState { root: at.clone(), cwd: at, umask: 0 };
    let caller = KernelCaller::default();
    let read = |path: &[u8]| -> core::result::Result<usize, Errno> {
        let how = OpenHow { flags: OpenFlags::empty(), ..OpenHow::default() };
        let file = open(&Lookup::new(state.clone(), &caller), None, path, &how)?;
        let mut text = [0; 8192];
        file.ops().read(&file, &mut IoDest::kernel(&mut text), 0)
    };
    let how = OpenHow { flags: OpenFlags::DIRECTORY, ..OpenHow::default() };
    let top = open(&Lookup::new(state.clone(), &caller), None, b"/", &how).unwrap();
    let mut names = Names::default();
    top.ops().read_dir(&top, &caller, 0, &mut names).unwrap();
    let listed: Vec<_> = names.0.iter().filter(|n| n.iter().all(u8::is_ascii_digit)).collect();
    assert_eq!(listed.len(), PROCESSES + 1);
    for name in listed {
        for file in [b"stat".as_slice(), b"status", b"statm", b"cmdline", b"limits"] {
            read(&[b"/", name.as_slice(), b"/", file].concat()).unwrap();
        }
    }
    for file in [b"/loadavg".as_slice(), b"/stat", b"/meminfo"] {
        assert!(read(file).unwrap() > 0);
    }
    assert_eq!(visits::take(), 0, "tasks were visited");
    // Choosing the victims of a teardown is a walk over groups; each of their tasks is woken once.
    for (leader, _) in &leaders {
        assert!(leader.group().begin_exit(exit::exited(0)));
    }
    assert_eq!(visits::take(), PROCESSES * (THREADS + 1));
}
