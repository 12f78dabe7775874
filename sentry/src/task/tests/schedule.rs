//! Random schedules of births, execs, deaths, signals and moves over nested namespaces: real tasks whose futures this test polls,
//! held against `model` after each step. A future is polled only once it was woken, so a lost wake shows.
//!
//! `BARTIZAN_MODEL_STEPS` sets the number of steps, `BARTIZAN_MODEL_SEED` the first seed.
use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Wake, Waker};

use linux_raw_sys::general as raw;

use super::model::{Birth, Id, Model, NsId};
use crate::kernel::{Kernel, KernelConfig};
use crate::ns::user::Credentials;
use crate::signal::action::{SIG_DFL, SIG_IGN};
use crate::signal::{self, Signal, send};
use crate::task::clone::{self, CloneRequest, flag};
use crate::task::nsproxy::Namespace;
use crate::task::run::Served;
use crate::task::wait::{Options, Target, try_wait};
use crate::task::{PidNamespace, Task, ThreadGroup, exec, exit};
use crate::{Errno, Result};

/// Steps of one schedule.
const LENGTH: u64 = 20_000;
/// Tasks at one time, about.
const CROWD: usize = 40;
/// pid_max of the outermost namespace: small, so that numbers run out and wrap around.
const PID_MAX: i32 = 360;

enum Out {
    Prepared(core::result::Result<(), i32>),
    Exited,
    Exec(Result<()>),
}

type Work = Pin<Box<dyn Future<Output = Out> + Send>>;

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

struct Runner {
    task: Arc<Task>,
    woken: Arc<Flag>,
    work: Option<Work>,
    /// An exit or an exec is under way.
    busy: bool,
}

struct Run {
    kernel: Arc<Kernel>,
    model: Model,
    runners: BTreeMap<Id, Runner>,
    groups: BTreeMap<Id, Arc<ThreadGroup>>,
    namespaces: Vec<Arc<PidNamespace>>,
    random: u64,
    /// The first process.
    first: Id,
}

fn same<T: core::fmt::Debug, U: core::fmt::Debug>(what: &str, real: &Result<T>, model: &Result<U>) {
    assert_eq!(real.as_ref().err(), model.as_ref().err(), "{what}: real {real:?}, model {model:?}");
}

impl Run {
    fn new(seed: u64) -> Run {
        let platform = crate::platform::sim::SimPlatform::new(1);
        let kernel = Kernel::new(platform, KernelConfig::default());
        kernel.root_pid_ns.set_pid_max(PID_MAX).unwrap();
        let task = super::first_task(&kernel, Credentials::new(0, 0, Vec::new()));
        let mut model = Model::default();
        let ns = model.new_ns(None, PID_MAX);
        let task_id = model.first(ns);
        let first = model.tasks[&task_id].group;
        let mut run = Run {
            namespaces: vec![kernel.root_pid_ns.clone()],
            kernel,
            model,
            runners: BTreeMap::new(),
            groups: BTreeMap::new(),
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            first,
        };
        run.add(task_id, task);
        run
    }

    fn add(&mut self, id: Id, task: Arc<Task>) {
        self.groups.entry(self.model.tasks[&id].group).or_insert_with(|| task.group().clone());
        let woken = Arc::new(Flag(AtomicBool::new(false)));
        self.runners.insert(id, Runner { task, woken, work: None, busy: false });
    }

    fn random(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) as usize % below.max(1)
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        let n = self.random(from.len());
        from.get(n).copied()
    }

    fn group_of(&self, id: Id) -> Id {
        self.model.tasks[&id].group
    }

    /// Tasks that have something to do of themselves.
    fn woken(&self) -> Vec<Id> {
        let has_work = |r: &Runner| match r.work {
            Some(_) => r.woken.0.load(Ordering::SeqCst),
            None => r.task.interruption.is_pending(),
        };
        self.runners.iter().filter(|(_, r)| has_work(r)).map(|(id, _)| *id).collect()
    }

    fn poll(&mut self, id: Id) -> Option<Out> {
        let r = self.runners.get_mut(&id).unwrap();
        r.woken.0.store(false, Ordering::SeqCst);
        let waker = Waker::from(r.woken.clone());
        let Poll::Ready(out) = r.work.as_mut().unwrap().as_mut().poll(&mut Context::from_waker(&waker)) else {
            return None;
        };
        r.work = None;
        Some(out)
    }

    /// Lets a task go on until it waits.
    fn go_on(&mut self, id: Id) {
        let r = self.runners.get_mut(&id).unwrap();
        if r.work.is_none() {
            let task = r.task.clone();
            r.work = Some(Box::pin(async move { Out::Prepared(signal::prepare_return(&task).await) }));
        }
        match self.poll(id) {
            None => {}
            Some(Out::Prepared(Ok(()))) => assert_eq!(self.model.must_exit(id), None),
            Some(Out::Prepared(Err(status))) => {
                self.late_ends();
                assert_eq!(self.model.must_exit(id), Some(status), "the status of {id}");
                let r = self.runners.get_mut(&id).unwrap();
                let task = r.task.clone();
                r.work = Some(Box::pin(async move {
                    exit::exit_task(task, status).await;
                    Out::Exited
                }));
                r.busy = true;
                let waits = self.model.begin_exit(id, status);
                let done = self.poll(id).is_some();
                let alone = self.exit_may_end(id);
                assert_eq!(done, !waits || alone, "the exit of {id}");
                if done {
                    self.exited(id);
                }
                self.hang_ups();
                self.late_ends();
            }
            Some(Out::Exited) => {
                assert!(self.exit_may_end(id));
                self.exited(id);
                self.hang_ups();
                self.late_ends();
            }
            Some(Out::Exec(result)) => self.exec_ended(id, result),
        }
    }

    /// Whether the namespace of an init that exits holds nobody else.
    fn exit_may_end(&self, id: Id) -> bool {
        let (home, _) = Model::home(&self.model.groups[&self.group_of(id)].numbers);
        self.model.members(home).len() <= 1
    }

    fn exited(&mut self, id: Id) {
        self.model.finish_exit(id);
        self.runners.remove(&id);
    }

    /// Processes that the orphaning of their process group hangs up, which must have a member that can be stopped.
    fn hang_ups(&mut self) {
        let lives = |g: &super::model::Group| g.exiting.is_none() && g.zombie.is_none();
        let all: Vec<Id> = self.model.groups.iter().filter(|(_, g)| lives(g)).map(|(id, _)| *id).collect();
        for id in all {
            let hup = Signal::SIGHUP;
            let real = &self.groups[&id];
            let hit = real.exiting() == Some(hup.number()) || real.signals.pending().contains(hup);
            if !hit || !self.model.groups.get_mut(&id).unwrap().fatal.insert(hup.number()) {
                continue;
            }
            let pg = self.model.groups[&id].process_group;
            assert!(self.model.is_orphaned(pg), "SIGHUP for {id} in a process group that is not orphaned");
            let members = &self.model.process_groups[&pg].members;
            assert!(members.iter().any(|m| self.model.groups[m].maybe_stopped));
        }
    }

    /// Signals that had to wait for somebody to take them.
    fn late_ends(&mut self) {
        let lives = |g: &super::model::Group| g.exiting.is_none() && g.zombie.is_none() && !g.fatal.is_empty();
        let all: Vec<Id> = self.model.groups.iter().filter(|(_, g)| lives(g)).map(|(id, _)| *id).collect();
        for id in all {
            if let Some(status) = self.groups[&id].exiting().filter(|s| self.model.groups[&id].fatal.contains(s)) {
                self.model.decide(id, status);
            }
        }
    }

    fn exec_ended(&mut self, id: Id, result: Result<()>) {
        let task = self.runners[&id].task.clone();
        self.runners.get_mut(&id).unwrap().busy = false;
        if let Err(e) = result {
            assert_eq!(e, Errno::EINTR);
            assert!(self.model.groups[&self.group_of(id)].exiting.is_some());
            self.model.abort_exec(id);
            return;
        }
        assert!(self.model.exec_is_alone(id));
        self.model.finish_exec(id);
        task.group().has_execed.store(true, Ordering::Relaxed);
        task.group().exit_signal.store(Signal::SIGCHLD.number(), Ordering::Relaxed);
    }

    /// Tasks that are in their program.
    fn idle(&self) -> Vec<Id> {
        let runs = |r: &Runner| r.work.is_none() && !r.task.interruption.is_pending();
        self.runners.iter().filter(|(_, r)| runs(r)).map(|(id, _)| *id).collect()
    }

    fn step(&mut self) {
        if self.random(100) < 45 {
            let woken = self.woken();
            if let Some(id) = self.pick(&woken) {
                self.go_on(id);
                return;
            }
        }
        let idle = self.idle();
        if let Some(id) = self.pick(&idle) {
            self.act(id);
        } else if let Some(id) = self.pick(&self.woken()) {
            self.go_on(id);
        } else {
            self.wake_somebody();
        }
    }

    /// Everybody stands still: as a process outside would, continue one.
    fn wake_somebody(&mut self) {
        let ids: Vec<Id> = self.model.groups.keys().copied().collect();
        let Some(id) = self.pick(&ids) else { return };
        send::from_host(&self.groups[&id].clone(), Signal::SIGCONT);
        self.model.groups.get_mut(&id).unwrap().maybe_stopped = false;
        self.late_ends();
    }

    fn act(&mut self, id: Id) {
        let task = self.runners[&id].task.clone();
        match self.random(100) {
            0..=29 => self.birth(id, &task),
            30..=39 => self.end(id, &task),
            40..=52 => self.kill(id, &task),
            53..=64 => self.wait(id, &task),
            65..=72 => self.move_process(id, &task),
            73..=77 => {
                let (real, model) = (task.setsid(), self.model.setsid(self.group_of(id)));
                same("setsid", &real, &model);
            }
            78..=81 => {
                let (real, model) = (task.unshare(flag::NEWPID), self.model.unshare(id));
                same("unshare", &real, &model);
                if real.is_ok() {
                    self.namespaces.push(task.nsproxy().unwrap().pid_for_children.clone());
                }
            }
            82..=85 => {
                let ns: NsId = self.random(self.namespaces.len());
                let real = task.join_namespaces(&[Namespace::Pid(self.namespaces[ns].clone())]);
                same("setns", &real, &self.model.setns(id, ns));
            }
            86..=89 => {
                let on = self.random(2) == 0;
                task.set_subreaper(on);
                let group = self.group_of(id);
                self.model.groups.get_mut(&group).unwrap().subreaper = on;
            }
            90..=92 => {
                let ignores = self.random(3) == 0;
                let actions = task.group().signals.actions();
                let mut action = actions.get(Signal::SIGCHLD);
                action.handler = if ignores { SIG_IGN } else { SIG_DFL };
                actions.set(Signal::SIGCHLD, action);
                let group = self.group_of(id);
                self.model.groups.get_mut(&group).unwrap().ignores = ignores;
            }
            93 => self.kill_all(id, &task),
            94 => self.reboot(id, &task),
            _ => self.exec(id, task),
        }
    }

    /// kill(-1): all of the namespace but its init and the caller.
    fn kill_all(&mut self, id: Id, task: &Arc<Task>) {
        let from = self.group_of(id);
        let home = Model::home(&self.model.groups[&from].numbers).0;
        // All ends too often otherwise for anything to grow.
        let mild = home == 0 && self.random(8) != 0;
        let signals: &[Signal] = if mild {
            &[Signal::SIGCONT, Signal::SIGSTOP]
        } else {
            &[Signal::SIGKILL, Signal::SIGTERM, Signal::SIGSTOP, Signal::SIGCONT]
        };
        let signal = self.pick(signals).unwrap();
        let number_in = |g: &Id| Model::number_in(&self.model.groups[g].numbers, home);
        let hit: Vec<Id> = self.model.members(home).into_iter().filter(|g| *g != from && number_in(g) != 1).collect();
        let number = u64::from(signal.number().cast_unsigned());
        let real = call(task, raw::__NR_kill, [u64::MAX, number, 0, 0, 0, 0]);
        same("kill(-1)", &real, &if hit.is_empty() { Err(Errno::ESRCH) } else { Ok(()) });
        for to in hit {
            self.model.signal(from, to, signal.number());
        }
        self.late_ends();
    }

    /// reboot(2) in a namespace of its own.
    fn reboot(&mut self, id: Id, task: &Arc<Task>) {
        let home = Model::home(&self.model.groups[&self.group_of(id)].numbers).0;
        let halt = self.random(2) == 0;
        let (command, signal) = if halt { (0xcdef_0123, 2) } else { (0x0123_4567, 1) };
        if home == 0 || self.random(4) != 0 {
            return;
        }
        let real = call(task, raw::__NR_reboot, [0xfee1_dead, 672_274_793, command, 0, 0, 0]);
        assert_eq!(real, Ok(0));
        self.model.reboot(id, signal);
    }

    fn birth(&mut self, id: Id, task: &Arc<Task>) {
        if self.runners.len() >= CROWD && self.random(8) != 0 {
            return;
        }
        let thread = self.random(3) == 0;
        let birth = Birth {
            thread,
            new_pid: self.random(7) == 0,
            parent: !thread && self.random(9) == 0,
            silent: !thread && self.random(6) == 0,
            chosen: (self.random(12) == 0).then(|| self.random(40) as i32),
        };
        let mut flags = 0;
        for (on, bits) in [
            (birth.thread, flag::VM | flag::FS | flag::FILES | flag::SIGHAND | flag::THREAD),
            (birth.new_pid, flag::NEWPID),
            (birth.parent, flag::PARENT),
            (!thread && self.random(2) == 0, flag::VM),
            (!thread && self.random(4) == 0, flag::VFORK),
        ] {
            if on {
                flags |= bits;
            }
        }
        let request = CloneRequest {
            flags,
            exit_signal: if birth.silent || thread { 0 } else { Signal::SIGCHLD.number() },
            set_tid: birth.chosen.into_iter().collect(),
            ..CloneRequest::default()
        };
        let real = clone::make(task, &request).map(|(child, _)| child);
        let model = self.model.clone(id, birth);
        same(&format!("{birth:?}"), &real.as_ref().map(|t| t.global_tid()).map_err(|e| *e), &model);
        if let (Ok(child), Ok(child_id)) = (real, model) {
            if birth.new_pid {
                self.namespaces.push(child.pid_namespace().clone());
            }
            self.add(child_id, child);
        }
    }

    fn end(&mut self, id: Id, task: &Arc<Task>) {
        let status = exit::exited(self.random(256) as i32);
        let group = self.group_of(id);
        // The very first process lives to the end of the schedule.
        let first = group == self.first;
        let staying = |t: &Id| self.model.tasks[t].own_exit.is_none() && !self.model.tasks[t].dead;
        if first && self.model.groups[&group].tasks.iter().filter(|t| staying(t)).count() < 2 {
            return;
        }
        if self.random(2) == 0 && !first {
            task.group().begin_exit(status);
            self.model.decide(group, status);
        } else {
            task.end(status);
            self.model.tasks.get_mut(&id).unwrap().own_exit = Some(status);
        }
    }

    fn kill(&mut self, id: Id, task: &Arc<Task>) {
        let from = self.group_of(id);
        let signals = [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGSTOP, Signal::SIGCONT, Signal::SIGCONT];
        let signal = self.pick(&signals).unwrap();
        let home = Model::home(&self.model.groups[&from].numbers).0;
        let first = self.first;
        if self.random(4) == 0 {
            let seen: Vec<Id> = self
                .model
                .process_groups
                .iter()
                .filter(|(_, pg)| Model::number_in(&pg.numbers, home) != 0)
                .map(|(id, _)| *id)
                .collect();
            let Some(pg) = self.pick(&seen) else { return };
            let members: Vec<Id> = self.model.process_groups[&pg].members.iter().copied().collect();
            if from == first && members.contains(&first) {
                return;
            }
            let number = Model::number_in(&self.model.process_groups[&pg].numbers, home);
            let target = task.pid_namespace().process_group(number).expect("a process group");
            assert_eq!(send::kill_pgrp(&target, Some(signal), task), Ok(()));
            for to in members {
                self.model.signal(from, to, signal.number());
            }
        } else {
            let seen = self.model.members(home);
            let Some(to) = self.pick(&seen) else { return };
            if from == first && to == first {
                return;
            }
            let number = Model::number_in(&self.model.groups[&to].numbers, home);
            let target = task.pid_namespace().group(number).expect("a group");
            assert!(Arc::ptr_eq(&target, &self.groups[&to]));
            assert_eq!(send::kill_group(&target, Some(signal), task), Ok(()));
            self.model.signal(from, to, signal.number());
        }
        self.late_ends();
    }

    fn wait(&mut self, id: Id, task: &Arc<Task>) {
        let own = self.group_of(id);
        let home = Model::home(&self.model.groups[&own].numbers).0;
        let children: Vec<Id> = self.model.groups[&own].children.iter().copied().collect();
        let all: Vec<Id> = self.model.groups.keys().copied().collect();
        let (target, eligible): (Target, Vec<Id>) = match self.random(4) {
            0 => {
                let Some(who) = self.pick(&all) else { return };
                (Target::Pid(self.groups[&who].pid().clone()), children.into_iter().filter(|c| *c == who).collect())
            }
            1 => {
                let Some(who) = self.pick(&all) else { return };
                let pg = self.model.groups[&who].process_group;
                let same = |c: &Id| self.model.groups[c].process_group == pg;
                (Target::ProcessGroup(self.groups[&who].process_group()), children.into_iter().filter(same).collect())
            }
            _ => (Target::Any, children),
        };
        let options = Options { no_hang: true, exited: true, all: true, ..Options::default() };
        let zombies: Vec<Id> = eligible.iter().copied().filter(|c| self.model.groups[c].zombie.is_some()).collect();
        match try_wait(task, &target, options) {
            Err(e) => assert_eq!((e, eligible.len()), (Errno::ECHILD, 0)),
            Ok(None) => assert!(!eligible.is_empty() && zombies.is_empty(), "{eligible:?} {zombies:?}"),
            Ok(Some(report)) => {
                let seen = |c: &&Id| Model::number_in(&self.model.groups[*c].numbers, home) == report.pid;
                let child = *zombies.iter().find(seen).expect("a zombie child");
                assert_eq!(self.model.groups[&child].zombie, Some(report.status));
                self.model.wait(child);
            }
        }
    }

    fn move_process(&mut self, id: Id, task: &Arc<Task>) {
        let own = self.group_of(id);
        let home = Model::home(&self.model.groups[&own].numbers).0;
        let groups: Vec<Id> = self.model.groups.keys().copied().collect();
        let pgs: Vec<Id> = self.model.process_groups.keys().copied().collect();
        let tasks: Vec<Id> = self.model.tasks.keys().copied().collect();
        let group_number = |run: &mut Run| {
            let id = run.pick(&groups).unwrap();
            Model::number_in(&run.model.groups[&id].numbers, home)
        };
        let pid = match self.random(6) {
            0..=2 => 0,
            3 => {
                let id = self.pick(&tasks).unwrap();
                Model::number_in(&self.model.tasks[&id].numbers, home)
            }
            _ => group_number(self),
        };
        let pgid = match self.random(4) {
            0 => 0,
            1 => group_number(self),
            _ => {
                let id = self.pick(&pgs).unwrap();
                Model::number_in(&self.model.process_groups[&id].numbers, home)
            }
        };
        let (real, model) = (task.setpgid(pid, pgid), self.model.setpgid(own, pid, pgid));
        same(&format!("setpgid({pid}, {pgid})"), &real, &model);
    }

    fn exec(&mut self, id: Id, task: Arc<Task>) {
        let model = self.model.begin_exec(id);
        let r = self.runners.get_mut(&id).unwrap();
        r.busy = true;
        r.work = Some(Box::pin(async move { Out::Exec(exec::end_siblings(&task).await) }));
        match self.poll(id) {
            None => assert!(model.is_ok() && !self.model.exec_is_alone(id)),
            Some(Out::Exec(result)) => {
                same("exec", &result, &model);
                self.exec_ended(id, result);
            }
            Some(_) => unreachable!(),
        }
    }

    /// Everything that can be seen must be as the model says.
    fn check(&mut self) {
        self.groups.retain(|id, _| self.model.groups.contains_key(id));
        assert_eq!(self.kernel.task_count(), self.model.tasks.len());
        for (ns, real) in self.namespaces.iter().enumerate() {
            let model = &self.model.ns[ns];
            if model.used.is_empty() && real.used() == 0 && real.group_count() == 0 {
                continue;
            }
            assert_eq!((real.used(), real.last()), (model.used.len(), model.last), "numbers of namespace {ns}");
            assert_eq!(real.exiting(), model.exiting);
            let mut listed: Vec<(i32, Id)> = self
                .model
                .members(ns)
                .iter()
                .map(|g| (Model::number_in(&self.model.groups[g].numbers, ns), *g))
                .collect();
            listed.sort_unstable();
            let seen = real.groups_from(0, usize::MAX);
            assert_eq!(seen.len(), listed.len());
            for ((number, real), (want, id)) in seen.iter().zip(&listed) {
                assert_eq!(number, want);
                assert!(Arc::ptr_eq(real, &self.groups[id]));
            }
            for number in model.used.keys() {
                let pid = real.pid(*number).expect("a number in use");
                assert_eq!(pid.number_in(real), *number);
            }
        }
        for (id, model) in &self.model.groups {
            self.check_group(*id, model);
        }
        for (id, r) in &self.runners {
            let model = &self.model.tasks[id];
            let numbers: Vec<i32> = r.task.pid().numbers().iter().map(|(_, n)| *n).collect();
            assert!(numbers.iter().eq(model.numbers.iter().map(|(_, n)| n)), "numbers of task {id}");
            assert!(r.task.pid().task().is_some_and(|t| Arc::ptr_eq(&t, &r.task)));
            assert_eq!(r.task.is_dead(), model.dead);
        }
    }

    fn check_group(&self, id: Id, model: &super::model::Group) {
        let real = &self.groups[&id];
        let parent = real.parent();
        let want = model.parent.map(|p| &self.groups[&p]);
        assert_eq!(parent.as_ref().map(Arc::as_ptr), want.map(Arc::as_ptr), "the parent of {id}");
        let mut children: Vec<_> = real.children().iter().map(Arc::as_ptr).collect();
        let mut want: Vec<_> = model.children.iter().map(|c| Arc::as_ptr(&self.groups[c])).collect();
        children.sort_unstable();
        want.sort_unstable();
        assert_eq!(children, want, "the children of {id}");
        assert_eq!(real.task_count(), model.tasks.len(), "the tasks of {id}");
        assert_eq!((real.exiting(), real.is_zombie()), (model.exiting, model.zombie.is_some()), "the end of {id}");
        let pg = real.process_group();
        let model_pg = &self.model.process_groups[&model.process_group];
        let numbers = |pid: &crate::task::Pid| pid.numbers().iter().map(|(_, n)| *n).collect::<Vec<_>>();
        assert!(numbers(pg.pid()).iter().eq(model_pg.numbers.iter().map(|(_, n)| n)));
        assert_eq!(pg.members().len(), model_pg.members.len());
        let session = &self.model.sessions[&model_pg.session];
        assert!(numbers(pg.session().pid()).iter().eq(session.numbers.iter().map(|(_, n)| n)));
        assert_eq!(pg.session().process_groups().len(), session.groups.len());
        let leader = real.leader().expect("a leader");
        assert_eq!(leader.is_dead(), self.model.tasks[&model.leader].dead, "the leader of {id}");
        assert!(Arc::ptr_eq(&leader.pid(), real.pid()));
        let state = real.state.lock();
        for child in &model.children {
            let noted = state.news.contains_key(&self.groups[child].pid().global());
            assert!(noted || self.model.groups[child].zombie.is_none(), "wait(2) of {id} misses {child}");
        }
        assert!(state.news.keys().all(|n| state.children.contains_key(n)));
        assert_eq!((state.live, state.exec_by.is_some()), (model.live, model.exec_by.is_some()));
    }

    /// Ends the first process, and with it all; nothing may be left.
    fn finish(mut self) {
        let group = self.first;
        // A hang-up may have ended it before.
        if self.model.groups.contains_key(&group) {
            self.groups[&group].begin_exit(exit::exited(3));
            self.model.decide(group, exit::exited(3));
        }
        loop {
            let woken = self.woken();
            let Some(id) = self.pick(&woken) else { break };
            self.go_on(id);
        }
        self.check();
        assert!(self.runners.is_empty(), "{:?} never ended", self.runners.keys().collect::<Vec<_>>());
        assert_eq!(self.kernel.task_count(), 0);
        assert_eq!((self.kernel.root_pid_ns.used(), self.kernel.root_pid_ns.group_count()), (0, 0));
        // The start of the first task waits in a run queue that nobody serves.
        assert_eq!(self.kernel.user_tasks(0), 1);
    }
}

fn call(task: &Arc<Task>, nr: u32, args: [u64; 6]) -> Result<u64> {
    match task.kernel().system_calls().serve(task, nr.into(), args) {
        Served::Done(result) => result,
        Served::Blocks(_) => panic!("call {nr} blocks"),
    }
}

fn setting(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn random_schedules_agree_with_the_model() {
    let left = AtomicU64::new(setting("BARTIZAN_MODEL_STEPS", 1_000_000));
    let seed = AtomicU64::new(setting("BARTIZAN_MODEL_SEED", 1));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(8) {
            scope.spawn(|| {
                loop {
                    let steps = left.load(Ordering::SeqCst).min(LENGTH);
                    if steps == 0 {
                        return;
                    }
                    let done = one_schedule(seed.fetch_add(1, Ordering::SeqCst), steps);
                    let _ = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |l| Some(l.saturating_sub(done)));
                }
            });
        }
    });
}

/// Runs a schedule of at most `steps`; gives how many it had before the first process ended.
fn one_schedule(seed: u64, steps: u64) -> u64 {
    let mut run = Run::new(seed);
    let short = steps < LENGTH;
    for step in 0..steps {
        if run.runners.is_empty() {
            run.finish();
            return step;
        }
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            run.step();
            // A failing schedule that is repeated up to its failure is looked at after every step.
            if short || step % 32 == 0 {
                run.check();
            }
        }));
        if let Err(why) = done {
            eprintln!("seed {seed}, step {step}; again: BARTIZAN_MODEL_SEED={seed} BARTIZAN_MODEL_STEPS={}", step + 1);
            std::panic::resume_unwind(why);
        }
    }
    run.finish();
    steps
}
