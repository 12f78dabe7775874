//! Whole lives of processes on the simulated platform: guest code is a function that makes the next system call by what
//! its registers say. `r15` is the step; a new program starts with zeroes.
mod concurrent;
#[cfg(debug_assertions)]
mod enumeration;
mod model;
mod schedule;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use guest_abi::UserAddr;
use linux_raw_sys::general as raw;

use super::Task;
use super::init::InitConfig;
use crate::Kernel;
use crate::fs::tmpfs::{TmpFs, TmpfsOptions};
use crate::kernel::{ExitStatus, KernelConfig, worker_main};
use crate::mm::IoSource;
use crate::ns::user::Credentials;
use crate::platform::sim::{Program, SimPlatform};
use crate::platform::{Exit, UserContext};
use crate::vfs::file::KernelCaller;
use crate::vfs::fs_context::FsState;
use crate::vfs::path::{Lookup, OpenHow, open};
use crate::vfs::{MountNamespace, OpenFlags};

const BASE: u64 = 0x40_0000;
/// Where the program's own path lies in its memory.
const PATH: u64 = BASE + 0x800;
const NAME: &[u8] = b"/init\0";

/// A static program of one page.
fn elf() -> Vec<u8> {
    let mut image = vec![0u8; 0x1000];
    image[..16].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    let mut header = Vec::new();
    for half in [2u16, 62] {
        header.extend_from_slice(&half.to_le_bytes());
    }
    header.extend_from_slice(&1u32.to_le_bytes());
    for word in [BASE + 0x100, 64, 0] {
        header.extend_from_slice(&word.to_le_bytes());
    }
    header.extend_from_slice(&0u32.to_le_bytes());
    for half in [64u16, 56, 1, 64, 0, 0] {
        header.extend_from_slice(&half.to_le_bytes());
    }
    for word in [1u32, 7] {
        header.extend_from_slice(&word.to_le_bytes());
    }
    for word in [0, BASE, BASE, 0x1000, 0x1000, 0x1000] {
        header.extend_from_slice(&word.to_le_bytes());
    }
    image[16..16 + header.len()].copy_from_slice(&header);
    image[0x800..0x800 + NAME.len()].copy_from_slice(NAME);
    image
}

/// The next system call, or why the guest leaves otherwise.
type Step = dyn Fn(&mut UserContext) -> Exit + Send + Sync;

pub(crate) fn call(c: &mut UserContext, next: u64, nr: u32, args: [u64; 6]) -> Exit {
    c.r15 = next;
    c.rax = nr.into();
    [c.rdi, c.rsi, c.rdx, c.r10, c.r8, c.r9] = args;
    Exit::Syscall
}

pub(crate) fn exit_group(c: &mut UserContext, code: u64) -> Exit {
    call(c, u64::MAX, raw::__NR_exit_group, [code, 0, 0, 0, 0, 0])
}

fn run(cpus: usize, step: Box<Step>) -> (Arc<Kernel>, ExitStatus) {
    run_program(cpus, Box::new(move |_, c, _| step(c)), |_, _| {})
}

/// Runs a program that sees its memory and vector state; `ready` is told of the machine before the program starts.
pub(crate) fn run_program(
    cpus: usize,
    program: Box<Program>,
    ready: impl FnOnce(&Arc<SimPlatform>, &Arc<Kernel>),
) -> (Arc<Kernel>, ExitStatus) {
    let platform = SimPlatform::with_program(cpus, program);
    let kernel = Kernel::new(platform.clone(), KernelConfig::default());
    ready(&platform, &kernel);
    let workers: Vec<_> = (0..cpus)
        .map(|cpu| {
            let kernel = kernel.clone();
            std::thread::spawn(move || {
                SimPlatform::set_current_cpu(cpu);
                worker_main(&kernel, cpu);
            })
        })
        .collect();
    first_task(&kernel, Credentials::new(0, 0, Vec::new()));
    let status = kernel.wait_exit();
    kernel.shutdown();
    for w in workers {
        w.join().unwrap();
    }
    (kernel, status)
}

/// Starts the program as number 1, in a tree that holds nothing else.
fn first_task(kernel: &Arc<Kernel>, credentials: Credentials) -> Arc<Task> {
    let fs = TmpFs::new(kernel.platform.clone(), TmpfsOptions::default(), "tmpfs").unwrap();
    let mounts = MountNamespace::new(fs);
    let root = mounts.root().unwrap();
    let state = FsState { root: root.clone(), cwd: root, umask: 0 };
    {
        let caller = KernelCaller::default();
        let cx = Lookup::new(state.clone(), &caller);
        let how = OpenHow { flags: OpenFlags::CREAT | OpenFlags::RDWR, mode: 0o755, ..OpenHow::default() };
        let file = open(&cx, None, b"/init", &how).unwrap();
        let image = elf();
        assert_eq!(file.ops().write(&file, &mut IoSource::kernel(&image), 0), Ok(image.len()));
    }
    kernel
        .spawn_init(InitConfig {
            argv: vec![b"/init".to_vec()],
            envp: Vec::new(),
            credentials,
            fs: state,
            fds: Vec::new(),
            limits: None,
        })
        .unwrap()
}

/// Nothing may be left: no task, no number, no process, and no cycle that keeps the sandbox alive.
fn assert_empty(kernel: &Arc<Kernel>) {
    assert_eq!(Arc::strong_count(kernel), 1);
    assert_eq!(kernel.task_count(), 0);
    assert_eq!(kernel.root_pid_ns.group_count(), 0);
    assert_eq!(kernel.root_pid_ns.used(), 0);
    assert_eq!(kernel.user_tasks(0), 0);
}

#[test]
fn fork_and_wait() {
    let (kernel, status) = run(
        2,
        Box::new(|c| match c.r15 {
            0 => call(c, 1, raw::__NR_fork, [0; 6]),
            1 if c.rax == 0 => call(c, 9, raw::__NR_exit, [3, 0, 0, 0, 0, 0]),
            1 => {
                c.r14 = c.rax;
                call(c, 2, raw::__NR_wait4, [u64::MAX, PATH + 16, 0, 0, 0, 0])
            }
            2 => {
                let right = c.rax == c.r14;
                exit_group(c, if right { 7 } else { 8 })
            }
            _ => Exit::Broken("the child went on"),
        }),
    );
    assert_eq!(status, ExitStatus(7 << 8));
    assert_empty(&kernel);
}

const THREAD_FLAGS: u64 =
    (raw::CLONE_VM | raw::CLONE_FS | raw::CLONE_FILES | raw::CLONE_SIGHAND | raw::CLONE_THREAD) as u64;

#[test]
fn threads_outlive_their_leader() {
    const N: u64 = 300;
    let (kernel, status) = run(
        2,
        Box::new(|c| match c.r15 {
            0 if c.r14 < N => call(c, 1, raw::__NR_clone, [THREAD_FLAGS, 0, 0, 0, 0, 0]),
            1 if c.rax == 0 => call(c, 2, raw::__NR_sched_yield, [0; 6]),
            1 => {
                c.r14 += 1;
                call(c, 0, raw::__NR_gettid, [0; 6])
            }
            // The status of the last is the group's; the leader may be any of them.
            2 => call(c, 9, raw::__NR_exit, [5, 0, 0, 0, 0, 0]),
            0 => call(c, 9, raw::__NR_exit, [5, 0, 0, 0, 0, 0]),
            _ => Exit::Broken("a dead thread went on"),
        }),
    );
    assert_eq!(status, ExitStatus(5 << 8));
    assert_empty(&kernel);
}

#[test]
fn exec_by_a_thread_takes_the_leaders_place() {
    let programs = Arc::new(AtomicUsize::new(0));
    let counter = programs.clone();
    let (kernel, status) = run(
        2,
        Box::new(move |c| match c.r15 {
            0 => match counter.fetch_add(1, Ordering::SeqCst) {
                0 => call(c, 1, raw::__NR_clone, [THREAD_FLAGS, 0, 0, 0, 0, 0]),
                // The new program: it must be process and thread 1.
                _ => call(c, 3, raw::__NR_gettid, [0; 6]),
            },
            1 if c.rax == 0 => call(c, 2, raw::__NR_execve, [PATH, 0, 0, 0, 0, 0]),
            1 => call(c, 8, raw::__NR_pause, [0; 6]),
            3 => {
                let tid = c.rax;
                exit_group(c, tid)
            }
            _ => Exit::Broken("an old thread went on"),
        }),
    );
    assert_eq!(status, ExitStatus(1 << 8));
    assert_eq!(programs.load(Ordering::SeqCst), 2);
    assert_empty(&kernel);
}

#[test]
fn the_end_of_init_ends_everybody() {
    const N: u64 = 50;
    let (kernel, status) = run(
        2,
        Box::new(|c| match c.r15 {
            0 if c.r14 < N => call(c, 1, raw::__NR_fork, [0; 6]),
            1 if c.rax == 0 => call(c, 2, raw::__NR_fork, [0; 6]),
            1 => {
                c.r14 += 1;
                call(c, 0, raw::__NR_getppid, [0; 6])
            }
            // Children and grandchildren sleep for ever.
            2 => call(c, 9, raw::__NR_pause, [0; 6]),
            0 => exit_group(c, 0),
            _ => Exit::Broken("a sleeper woke up"),
        }),
    );
    assert_eq!(status, ExitStatus(0));
    assert_empty(&kernel);
}

#[test]
fn orphans_go_to_init_and_vfork_waits() {
    let (kernel, status) = run(
        1,
        Box::new(|c| match c.r15 {
            0 => call(c, 1, raw::__NR_vfork, [0; 6]),
            // The child forks an orphan and leaves.
            1 if c.rax == 0 => call(c, 2, raw::__NR_fork, [0; 6]),
            1 => call(c, 5, raw::__NR_wait4, [u64::MAX, 0, 0, 0, 0, 0]),
            2 if c.rax == 0 => call(c, 3, raw::__NR_sched_yield, [0; 6]),
            2 => call(c, 9, raw::__NR_exit, [0; 6]),
            3 => call(c, 9, raw::__NR_exit, [0; 6]),
            5 => call(c, 6, raw::__NR_wait4, [u64::MAX, 0, 0, 0, 0, 0]),
            6 => {
                c.r14 = c.rax;
                call(c, 7, raw::__NR_wait4, [u64::MAX, 0, 0, 0, 0, 0])
            }
            7 => {
                let code = if c.r14 == 3 { (c.rax as i64).unsigned_abs() } else { 99 };
                exit_group(c, code)
            }
            _ => Exit::Broken("the dead went on"),
        }),
    );
    assert_eq!(status, ExitStatus(guest_abi::Errno::ECHILD.raw() << 8));
    assert_empty(&kernel);
    assert!(UserAddr(PATH).range_ok(1));
}
