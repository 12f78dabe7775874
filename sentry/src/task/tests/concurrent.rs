//! Births, execs, deaths and the end of namespaces on real threads at once, beside readers of the tgid index: what each sees is whole,
//! nobody waits for ever, and nothing is left. Debug builds check the lock order meanwhile.
use core::future::Future;
use core::pin::pin;
use core::task::{Context, Poll};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};
use std::thread::{self, Scope, Thread};
use std::time::{Duration, Instant};

use crate::Errno;
use crate::kernel::{Kernel, KernelConfig};
use crate::ns::user::Credentials;
use crate::platform::sim::SimPlatform;
use crate::signal::{self, Signal};
use crate::task::clone::{self, CloneRequest, flag};
use crate::task::wait::{Options, Target, try_wait};
use crate::task::{PidNamespace, Task, exec, exit};

/// Processes whose families change at the same time.
const FAMILIES: usize = 4;
/// Changes in each.
const ROUNDS: usize = 240;
/// Small, so that numbers come round.
const PID_MAX: i32 = 380;
/// A wake that takes longer is lost.
const PATIENCE: Duration = Duration::from_secs(60);
const THREAD: u64 = flag::VM | flag::FS | flag::FILES | flag::SIGHAND | flag::THREAD;
const STATUS: i32 = 9;

struct Unpark {
    thread: Thread,
    woken: AtomicBool,
}

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        self.thread.unpark();
    }
}

/// Polls only when woken.
fn drive<T>(future: impl Future<Output = T>) -> T {
    let own = Arc::new(Unpark { thread: thread::current(), woken: AtomicBool::new(true) });
    let waker = Waker::from(own.clone());
    let mut future = pin!(future);
    let mut since = Instant::now();
    loop {
        if own.woken.swap(false, Ordering::SeqCst) {
            if let Poll::Ready(out) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                return out;
            }
            since = Instant::now();
            continue;
        }
        // A wake that came during a poll leaves its token.
        thread::park_timeout(PATIENCE);
        assert!(own.woken.load(Ordering::SeqCst) || since.elapsed() < PATIENCE, "a wake was lost");
    }
}

/// A task that is in its program until it must end.
fn live(task: Arc<Task>) {
    loop {
        match drive(signal::prepare_return(&task)) {
            Ok(()) => thread::sleep(Duration::from_micros(20)),
            Err(status) => return drive(exit::exit_task(task, status)),
        }
    }
}

fn birth(by: &Arc<Task>, flags: u64) -> Result<Arc<Task>, Errno> {
    let exit_signal = if flags & flag::THREAD == 0 { Signal::SIGCHLD.number() } else { 0 };
    clone::make(by, &CloneRequest { flags, exit_signal, ..CloneRequest::default() }).map(|(task, _)| task)
}

struct Family<'k> {
    own: Arc<Task>,
    root: &'k Arc<PidNamespace>,
}

impl Family<'_> {
    fn child(&self, flags: u64) -> Arc<Task> {
        drive(signal::prepare_return(&self.own)).expect("nobody ends it");
        birth(&self.own, flags).expect("a child")
    }

    /// The only child is dead, and is taken.
    fn reap(&self, number: i32) {
        let options = Options { no_hang: true, exited: true, all: true, ..Options::default() };
        let report = try_wait(&self.own, &Target::Any, options).expect("a child").expect("a dead child");
        assert_eq!((report.pid, report.status), (number, exit::exited(STATUS)));
        assert_eq!(try_wait(&self.own, &Target::Any, options).err(), Some(Errno::ECHILD));
    }

    fn processes(&self, flags: u64) {
        let child = self.child(flags);
        let number = child.tid_in(self.root);
        assert!(child.group().begin_exit(exit::exited(STATUS)));
        live(child);
        self.reap(number);
    }

    /// Threads are born while the group ends.
    fn births_in_a_dying_group(&self) {
        let child = self.child(0);
        let number = child.tid_in(self.root);
        thread::scope(|s| {
            let group = child.group().clone();
            s.spawn(move || group.begin_exit(exit::exited(STATUS)));
            for _ in 0..3 {
                match birth(&child, THREAD) {
                    Ok(thread) => drop(s.spawn(|| live(thread))),
                    Err(e) => assert_eq!(e, Errno::ERESTARTNOINTR),
                }
            }
            live(child);
        });
        self.reap(number);
    }

    /// `contenders` threads of a process execute at once, and perhaps it is told to end.
    fn execs(&self, contenders: usize, ends: bool) {
        let leader = self.child(0);
        let (number, group) = (leader.tid_in(self.root), leader.group().clone());
        // Moves by hand here: whoever leads has the start of the first thread.
        let started = 5;
        leader.start_time.store(started, Ordering::SeqCst);
        let threads: Vec<_> = (0..2).map(|_| birth(&leader, THREAD).expect("a thread")).collect();
        let over = AtomicBool::new(false);
        thread::scope(|s| {
            let watcher = s.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    let seen = self.root.group(number).expect("a process that executes is always there");
                    assert!(Arc::ptr_eq(&seen, &group));
                    assert_eq!(seen.leader().expect("a leader").start_time.load(Ordering::SeqCst), started);
                    assert!(self.root.pid(number).is_some());
                    thread::yield_now();
                }
            });
            let runners: Vec<_> = threads
                .into_iter()
                .enumerate()
                .map(|(i, thread)| {
                    s.spawn(move || {
                        if i < contenders {
                            return self.executes(thread, number);
                        }
                        live(thread);
                        false
                    })
                })
                .collect();
            let first = s.spawn(|| live(leader));
            if ends {
                group.begin_exit(exit::exited(STATUS));
            }
            let won = runners.into_iter().filter_map(|r| r.join().ok()).filter(|won| *won).count();
            assert!(won <= 1 && (ends || won == 1), "{won} execs");
            first.join().expect("the first thread");
            over.store(true, Ordering::SeqCst);
            watcher.join().expect("the watcher");
        });
        self.reap(number);
    }

    /// Whether `thread` got through an exec. It lives to its end.
    fn executes(&self, thread: Arc<Task>, number: i32) -> bool {
        let result = drive(exec::end_siblings(&thread));
        let group = thread.group().clone();
        if result.is_ok() {
            assert!(thread.is_leader());
            assert_eq!(thread.tid_in(self.root), number);
            assert!(group.leader().is_some_and(|l| Arc::ptr_eq(&l, &thread)));
            group.begin_exit(exit::exited(STATUS));
        }
        live(thread);
        result.is_ok()
    }

    /// A namespace ends while its members have children, in namespaces of their own too.
    fn teardown(&self) {
        let init = self.child(flag::NEWPID);
        let (number, ns) = (init.tid_in(self.root), init.pid_namespace().clone());
        thread::scope(|s| {
            for nested in [0, flag::NEWPID] {
                let member = birth(&init, nested).expect("a member");
                s.spawn(move || multiply(s, member));
            }
            assert!(init.group().begin_exit(exit::exited(STATUS)));
            live(init);
            // Its end waits for all of theirs.
            assert!(ns.exiting());
            assert_eq!(ns.group_count(), 1);
        });
        self.reap(number);
        assert_eq!((ns.group_count(), ns.used()), (0, 0));
    }
}

/// Has children until it must end.
fn multiply<'s>(s: &'s Scope<'s, '_>, member: Arc<Task>) {
    for _ in 0..4 {
        match birth(&member, 0) {
            Ok(child) => drop(s.spawn(|| live(child))),
            Err(e) => {
                assert!(matches!(e, Errno::ENOMEM | Errno::ERESTARTNOINTR), "{e:?}");
                break;
            }
        }
    }
    live(member);
}

/// Reads the index as /proc and kill(-1) do.
fn enumerate(root: &Arc<PidNamespace>, families: &[i32], over: &AtomicBool) {
    while !over.load(Ordering::SeqCst) {
        let (mut from, mut seen) = (0, Vec::new());
        loop {
            let page = root.groups_from(from, 3);
            let Some(last) = page.last().map(|(n, _)| *n) else { break };
            for (n, group) in page {
                assert!(n >= from && group.pid().number_in(root) == n);
                if let Some(leader) = group.leader() {
                    assert!(Arc::ptr_eq(leader.group(), &group));
                }
                seen.push(n);
            }
            from = last + 1;
        }
        assert!(seen.is_sorted_by(|a, b| a < b));
        // Whoever was there all along was met.
        assert!(families.iter().all(|n| seen.contains(n)));
        for n in 1..PID_MAX {
            if let Some(pid) = root.pid(n) {
                assert_eq!(pid.number_in(root), n);
            }
        }
    }
}

#[test]
fn families_change_on_real_threads_at_once() {
    let kernel = Kernel::new(SimPlatform::new(1), KernelConfig::default());
    let root = &kernel.root_pid_ns;
    root.set_pid_max(PID_MAX).unwrap();
    let first = super::first_task(&kernel, Credentials::new(0, 0, Vec::new()));
    let families: Vec<_> = (0..FAMILIES).map(|_| Family { own: birth(&first, 0).unwrap(), root }).collect();
    let numbers: Vec<i32> = families.iter().map(|f| f.own.tid_in(root)).collect();
    let before = (kernel.task_count(), root.used(), root.group_count());
    let over = AtomicBool::new(false);
    thread::scope(|s| {
        let reader = s.spawn(|| enumerate(root, &numbers, &over));
        let changing: Vec<_> = families
            .iter()
            .enumerate()
            .map(|(n, family)| {
                s.spawn(move || {
                    for round in 0..ROUNDS {
                        match (round + n) % 8 {
                            0 => family.processes(0),
                            1 => family.processes(flag::NEWPID),
                            2 => family.births_in_a_dying_group(),
                            3 => family.execs(1, false),
                            4 => family.execs(2, false),
                            5 => family.execs(1, true),
                            6 => family.execs(2, true),
                            _ => family.teardown(),
                        }
                    }
                })
            })
            .collect();
        let all_well = changing.into_iter().map(thread::ScopedJoinHandle::join).all(|r| r.is_ok());
        over.store(true, Ordering::SeqCst);
        assert!(all_well && reader.join().is_ok());
    });
    assert_eq!((kernel.task_count(), root.used(), root.group_count()), before);
}
