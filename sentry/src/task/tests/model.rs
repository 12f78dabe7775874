//! A small model of thread groups and PID namespaces, written from the rules and not from the code: sets and maps without
//! concurrency. `schedule` holds it against the real thing.
use std::collections::{BTreeMap, BTreeSet};

use crate::Errno;

/// Identity of a namespace in the model.
pub(super) type NsId = usize;
/// Identity of a task, a group, a process group or a session: never used again.
pub(super) type Id = u64;
/// (namespace, number) from the outermost to the innermost.
pub(super) type Numbers = Vec<(NsId, i32)>;

const SIGKILL: i32 = 9;
const SIGCONT: i32 = 18;
const SIGSTOP: i32 = 19;
const SIGTERM: i32 = 15;

pub(super) struct Ns {
    pub parent: Option<NsId>,
    pub level: usize,
    /// Holders of each number in use.
    pub used: BTreeMap<i32, usize>,
    pub last: i32,
    pub max: i32,
    pub init: Option<Id>,
    pub had_init: bool,
    pub exiting: bool,
    /// The signal that reboot(2) gives its init as its end.
    pub reboot: Option<i32>,
}

pub(super) struct Group {
    pub numbers: Numbers,
    pub tasks: BTreeSet<Id>,
    pub leader: Id,
    pub live: usize,
    pub parent: Option<Id>,
    pub children: BTreeSet<Id>,
    pub process_group: Id,
    pub exiting: Option<i32>,
    pub exec_by: Option<Id>,
    pub zombie: Option<i32>,
    /// Its end sends SIGCHLD.
    pub sigchld: bool,
    pub subreaper: bool,
    /// It ignores SIGCHLD.
    pub ignores: bool,
    pub execed: bool,
    /// A stop signal came after the last SIGCONT.
    pub maybe_stopped: bool,
    /// Signals that will end it when a task takes them: one that stands still does so once it is continued.
    pub fatal: BTreeSet<i32>,
}

pub(super) struct Task {
    pub group: Id,
    pub numbers: Numbers,
    pub dead: bool,
    pub own_exit: Option<i32>,
    pub for_children: NsId,
}

pub(super) struct ProcessGroup {
    pub numbers: Numbers,
    pub session: Id,
    pub members: BTreeSet<Id>,
}

pub(super) struct Session {
    pub numbers: Numbers,
    pub groups: BTreeSet<Id>,
}

#[derive(Default)]
pub(super) struct Model {
    pub ns: Vec<Ns>,
    pub groups: BTreeMap<Id, Group>,
    pub tasks: BTreeMap<Id, Task>,
    pub process_groups: BTreeMap<Id, ProcessGroup>,
    pub sessions: BTreeMap<Id, Session>,
    next: Id,
}

/// What a clone asks for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Birth {
    pub thread: bool,
    pub new_pid: bool,
    pub parent: bool,
    pub silent: bool,
    pub chosen: Option<i32>,
}

impl Model {
    fn fresh(&mut self) -> Id {
        self.next += 1;
        self.next
    }

    pub fn new_ns(&mut self, parent: Option<NsId>, max: i32) -> NsId {
        let level = parent.map_or(0, |p| self.ns[p].level + 1);
        self.ns.push(Ns {
            parent,
            level,
            used: BTreeMap::new(),
            last: 0,
            max,
            init: None,
            had_init: false,
            exiting: false,
            reboot: None,
        });
        self.ns.len() - 1
    }

    pub fn number_in(numbers: &Numbers, ns: NsId) -> i32 {
        numbers.iter().find(|(n, _)| *n == ns).map_or(0, |(_, n)| *n)
    }

    pub fn home(numbers: &Numbers) -> (NsId, i32) {
        numbers[numbers.len() - 1]
    }

    /// `ns` and its ancestors, innermost first.
    fn chain(&self, ns: NsId) -> Vec<NsId> {
        let mut all = vec![ns];
        while let Some(parent) = self.ns[all[all.len() - 1]].parent {
            all.push(parent);
        }
        all
    }

    pub fn is_within(&self, ns: NsId, outer: NsId) -> bool {
        self.chain(ns).contains(&outer)
    }

    fn hold(&mut self, numbers: &Numbers) {
        for (ns, n) in numbers {
            *self.ns[*ns].used.entry(*n).or_insert(0) += 1;
        }
    }

    fn let_go(&mut self, numbers: &Numbers) {
        for (ns, n) in numbers {
            let used = &mut self.ns[*ns].used;
            let count = used.get_mut(n).expect("a held number");
            *count -= 1;
            if *count == 0 {
                used.remove(n);
            }
        }
    }

    fn next_number(&self, ns: NsId) -> Option<i32> {
        let ns = &self.ns[ns];
        let low = if ns.last >= 300 { 300 } else { 1 };
        (ns.last + 1..ns.max).chain(low..ns.max).find(|n| !ns.used.contains_key(n))
    }

    fn allocate(&mut self, ns: NsId, chosen: Option<i32>) -> Result<Numbers, Errno> {
        let chain = self.chain(ns);
        let mut numbers = Vec::new();
        for (i, at) in chain.iter().enumerate() {
            if self.ns[*at].exiting {
                return Err(Errno::ENOMEM);
            }
            let number = match chosen.filter(|_| i == 0) {
                Some(n) if n < 1 || n >= self.ns[*at].max || (n != 1 && !self.ns[*at].had_init) => {
                    return Err(Errno::EINVAL);
                }
                Some(n) if self.ns[*at].used.contains_key(&n) => return Err(Errno::EEXIST),
                Some(n) => n,
                None => self.next_number(*at).ok_or(Errno::EAGAIN)?,
            };
            numbers.push((*at, number));
        }
        for (i, (at, n)) in numbers.iter().enumerate() {
            if chosen.is_none() || i > 0 {
                self.ns[*at].last = *n;
            }
        }
        numbers.reverse();
        Ok(numbers)
    }

    /// The first task of everything.
    pub fn first(&mut self, ns: NsId) -> Id {
        let numbers = self.allocate(ns, None).expect("an empty namespace");
        let session = self.fresh();
        let pg = self.fresh();
        let (task, group) = (self.fresh(), self.fresh());
        self.sessions.insert(session, Session { numbers: numbers.clone(), groups: BTreeSet::from([pg]) });
        self.process_groups
            .insert(pg, ProcessGroup { numbers: numbers.clone(), session, members: BTreeSet::from([group]) });
        self.hold(&numbers);
        self.hold(&numbers);
        self.add_group(group, task, None, pg, numbers.clone(), Birth::default(), false);
        self.tasks.insert(task, Task { group, numbers, dead: false, own_exit: None, for_children: ns });
        task
    }

    #[allow(clippy::too_many_arguments)]
    fn add_group(
        &mut self,
        group: Id,
        leader: Id,
        parent: Option<Id>,
        process_group: Id,
        numbers: Numbers,
        birth: Birth,
        ignores: bool,
    ) {
        self.hold(&numbers);
        self.hold(&numbers);
        let (home, n) = Self::home(&numbers);
        if n == 1 {
            self.ns[home].init = Some(group);
            self.ns[home].had_init = true;
        }
        self.groups.insert(
            group,
            Group {
                numbers,
                tasks: BTreeSet::from([leader]),
                leader,
                live: 1,
                parent,
                children: BTreeSet::new(),
                process_group,
                exiting: None,
                exec_by: None,
                zombie: None,
                sigchld: !birth.silent,
                subreaper: false,
                ignores,
                execed: false,
                maybe_stopped: false,
                fatal: BTreeSet::new(),
            },
        );
    }

    /// clone(2): the child, or the error.
    pub fn clone(&mut self, by: Id, birth: Birth) -> Result<Id, Errno> {
        let own = self.tasks[&by].group;
        let (home, tgid) = Self::home(&self.groups[&own].numbers);
        let pending = self.tasks[&by].for_children;
        if birth.parent && (tgid == 1 || self.groups[&own].parent.is_none()) {
            return Err(Errno::EINVAL);
        }
        if birth.thread && (birth.new_pid || pending != home) {
            return Err(Errno::EINVAL);
        }
        let ns = if birth.new_pid {
            if pending != home {
                return Err(Errno::EINVAL);
            }
            if self.ns[home].level >= 32 {
                return Err(Errno::ENOSPC);
            }
            self.new_ns(Some(home), 4_194_304)
        } else {
            pending
        };
        let numbers = match self.allocate(ns, birth.chosen) {
            Ok(numbers) => numbers,
            Err(e) => {
                if birth.new_pid {
                    self.ns.pop();
                }
                return Err(e);
            }
        };
        let task = self.fresh();
        let group = if birth.thread {
            self.hold(&numbers);
            let g = self.groups.get_mut(&own).expect("own group");
            g.tasks.insert(task);
            g.live += 1;
            own
        } else {
            let group = self.fresh();
            let parent = if birth.parent { self.groups[&own].parent } else { Some(own) };
            let silent = if birth.parent { !self.groups[&own].sigchld } else { birth.silent };
            let pg = self.groups[&own].process_group;
            let ignores = self.groups[&own].ignores;
            self.add_group(group, task, parent, pg, numbers.clone(), Birth { silent, ..birth }, ignores);
            self.process_groups.get_mut(&pg).expect("own process group").members.insert(group);
            if let Some(p) = parent {
                self.groups.get_mut(&p).expect("a parent").children.insert(group);
            }
            group
        };
        self.tasks.insert(task, Task { group, numbers, dead: false, own_exit: None, for_children: ns });
        Ok(task)
    }

    pub fn unshare(&mut self, by: Id) -> Result<NsId, Errno> {
        let home = Self::home(&self.groups[&self.tasks[&by].group].numbers).0;
        if self.tasks[&by].for_children != home {
            return Err(Errno::EINVAL);
        }
        if self.ns[home].level >= 32 {
            return Err(Errno::ENOSPC);
        }
        let ns = self.new_ns(Some(home), 4_194_304);
        self.tasks.get_mut(&by).expect("the caller").for_children = ns;
        Ok(ns)
    }

    pub fn setns(&mut self, by: Id, ns: NsId) -> Result<(), Errno> {
        let home = Self::home(&self.groups[&self.tasks[&by].group].numbers).0;
        if !self.is_within(ns, home) {
            return Err(Errno::EINVAL);
        }
        self.tasks.get_mut(&by).expect("the caller").for_children = ns;
        Ok(())
    }

    fn leave_process_group(&mut self, group: Id) {
        let pg = self.groups[&group].process_group;
        let members = &mut self.process_groups.get_mut(&pg).expect("a process group").members;
        members.remove(&group);
        if !members.is_empty() {
            return;
        }
        let gone = self.process_groups.remove(&pg).expect("a process group");
        self.let_go(&gone.numbers);
        let session = self.sessions.get_mut(&gone.session).expect("a session");
        session.groups.remove(&pg);
        if session.groups.is_empty() {
            let gone = self.sessions.remove(&gone.session).expect("a session");
            self.let_go(&gone.numbers);
        }
    }

    fn join(&mut self, group: Id, pg: Id) {
        if self.groups[&group].process_group == pg {
            return;
        }
        self.process_groups.get_mut(&pg).expect("a process group").members.insert(group);
        self.leave_process_group(group);
        self.groups.get_mut(&group).expect("a group").process_group = pg;
    }

    fn named(&self, numbers: &Numbers) -> Option<Id> {
        self.process_groups.iter().find(|(_, pg)| pg.numbers == *numbers).map(|(id, _)| *id)
    }

    pub fn setsid(&mut self, group: Id) -> Result<(), Errno> {
        let numbers = self.groups[&group].numbers.clone();
        if self.named(&numbers).is_some() {
            return Err(Errno::EPERM);
        }
        let (session, pg) = (self.fresh(), self.fresh());
        self.hold(&numbers);
        self.sessions.insert(session, Session { numbers: numbers.clone(), groups: BTreeSet::new() });
        self.new_process_group(pg, session, numbers);
        self.join(group, pg);
        Ok(())
    }

    fn new_process_group(&mut self, pg: Id, session: Id, numbers: Numbers) {
        self.hold(&numbers);
        self.process_groups.insert(pg, ProcessGroup { numbers, session, members: BTreeSet::new() });
        self.sessions.get_mut(&session).expect("a session").groups.insert(pg);
    }

    pub fn setpgid(&mut self, group: Id, pid: i32, pgid: i32) -> Result<(), Errno> {
        let (home, tgid) = Self::home(&self.groups[&group].numbers);
        let pid = if pid == 0 { tgid } else { pid };
        let pgid = if pgid == 0 { pid } else { pgid };
        let found = self.groups.iter().find(|(_, g)| Self::number_in(&g.numbers, home) == pid).map(|(id, _)| *id);
        let Some(target) = found else {
            let task = self.tasks.values().any(|t| Self::number_in(&t.numbers, home) == pid);
            return Err(if task { Errno::EINVAL } else { Errno::ESRCH });
        };
        let session_of = |m: &Model, g: Id| m.process_groups[&m.groups[&g].process_group].session;
        let session = session_of(self, target);
        if self.groups[&target].parent == Some(group) {
            if session != session_of(self, group) {
                return Err(Errno::EPERM);
            }
            if self.groups[&target].execed {
                return Err(Errno::EACCES);
            }
        } else if target != group {
            return Err(Errno::ESRCH);
        }
        if self.sessions[&session].numbers == self.groups[&target].numbers {
            return Err(Errno::EPERM);
        }
        let numbers = self.groups[&target].numbers.clone();
        let pg = if pgid == pid {
            if let Some(pg) = self.named(&numbers) {
                pg
            } else {
                let pg = self.fresh();
                self.new_process_group(pg, session, numbers);
                pg
            }
        } else {
            let found = self.process_groups.iter().find(|(_, pg)| Self::number_in(&pg.numbers, home) == pgid);
            let (pg, of) = found.map(|(id, pg)| (*id, pg.session)).ok_or(Errno::EPERM)?;
            if of != session_of(self, group) {
                return Err(Errno::EPERM);
            }
            pg
        };
        self.join(target, pg);
        Ok(())
    }

    pub fn decide(&mut self, group: Id, status: i32) {
        let g = self.groups.get_mut(&group).expect("a group");
        if g.exiting.is_none() && g.live > 0 {
            g.exiting = Some(status);
        }
    }

    /// A signal with its default action from a task of group `from`.
    pub fn signal(&mut self, from: Id, to: Id, signal: i32) {
        let target = &self.groups[&to];
        if target.zombie.is_some() || target.exiting.is_some() {
            return;
        }
        let (home, tgid) = Self::home(&target.numbers);
        // The command of the sandbox is an init only to others; a namespace's init to all within.
        let own_command = home == 0 && from == to;
        let outside = Self::number_in(&self.groups[&from].numbers, home) == 0;
        let acts = tgid != 1 || own_command || (outside && matches!(signal, SIGKILL | SIGSTOP));
        match signal {
            SIGCONT => self.groups.get_mut(&to).expect("a target").maybe_stopped = false,
            SIGSTOP if acts => self.groups.get_mut(&to).expect("a target").maybe_stopped = true,
            SIGKILL if acts => self.decide(to, signal),
            SIGTERM if acts => {
                let target = self.groups.get_mut(&to).expect("a target");
                // One that is pending already is not generated again.
                if target.fatal.insert(signal) && target.live > 0 && !target.maybe_stopped {
                    self.decide(to, signal);
                }
            }
            _ => {}
        }
    }

    /// reboot(2) by `task`: its namespace's init ends as if by `signal`.
    pub fn reboot(&mut self, task: Id, signal: i32) {
        let home = Self::home(&self.groups[&self.tasks[&task].group].numbers).0;
        self.ns[home].reboot = Some(signal);
        if let Some(init) = self.ns[home].init.filter(|init| self.groups.contains_key(init)) {
            self.decide(init, SIGKILL);
        }
        self.tasks.get_mut(&task).expect("the caller").own_exit = Some(0);
    }

    /// What `task` must exit with, if it must.
    pub fn must_exit(&self, task: Id) -> Option<i32> {
        let t = &self.tasks[&task];
        let g = &self.groups[&t.group];
        if g.exec_by.is_some_and(|by| by != task) {
            return Some(SIGKILL);
        }
        g.exiting.or(t.own_exit)
    }

    /// The task begins to exit; true if it is the last of an init, which has to wait for its namespace.
    pub fn begin_exit(&mut self, task: Id, status: i32) -> bool {
        let group = self.tasks[&task].group;
        let g = self.groups.get_mut(&group).expect("a group");
        g.live -= 1;
        if g.live == 0 {
            g.exiting.get_or_insert(status);
        }
        let (home, tgid) = Self::home(&g.numbers);
        if g.live > 0 || tgid != 1 {
            return false;
        }
        self.ns[home].exiting = true;
        let members: Vec<Id> = self.members(home).into_iter().filter(|m| *m != group).collect();
        for m in &members {
            self.decide(*m, SIGKILL);
        }
        for m in members {
            if self.groups.get(&m).is_some_and(|g| g.zombie.is_some()) && self.reaped_quietly(m) {
                self.reap(m);
            }
        }
        true
    }

    /// Groups with a number in `ns`.
    pub fn members(&self, ns: NsId) -> Vec<Id> {
        self.groups.iter().filter(|(_, g)| Self::number_in(&g.numbers, ns) != 0).map(|(id, _)| *id).collect()
    }

    /// Whether nobody waits for a member of a dying namespace: its parent lies within, or is gone.
    fn reaped_quietly(&self, group: Id) -> bool {
        let g = &self.groups[&group];
        if Self::home(&g.numbers) == (0, 1) {
            return false;
        }
        g.numbers.iter().any(|(ns, n)| {
            let within = g.parent.is_none_or(|p| Self::number_in(&self.groups[&p].numbers, *ns) != 0);
            self.ns[*ns].exiting && *n != 1 && within
        })
    }

    fn reaper(&self, group: Id) -> Option<Id> {
        let home = Self::home(&self.groups[&group].numbers).0;
        let lives = |id: &Id| self.groups[id].live > 0;
        let mut at = self.groups[&group].parent;
        while let Some(id) = at {
            let g = &self.groups[&id];
            if Self::home(&g.numbers).0 != home {
                break;
            }
            if g.subreaper && lives(&id) {
                return Some(id);
            }
            at = g.parent;
        }
        self.ns[home].init.filter(|init| *init != group && self.groups.contains_key(init) && lives(init))
    }

    fn reap(&mut self, group: Id) {
        let g = &self.groups[&group];
        let (numbers, parent, tasks) = (g.numbers.clone(), g.parent, g.tasks.clone());
        if let Some(p) = parent.and_then(|p| self.groups.get_mut(&p)) {
            p.children.remove(&group);
        }
        for t in tasks {
            let t = self.tasks.remove(&t).expect("a task");
            self.let_go(&t.numbers);
        }
        self.let_go(&numbers);
        self.leave_process_group(group);
        self.groups.remove(&group);
    }

    /// Whether the parent of a zombie wants no news.
    fn unwanted(&self, group: Id) -> bool {
        let g = &self.groups[&group];
        g.parent.is_some_and(|p| g.sigchld && self.groups[&p].ignores)
    }

    /// The rest of an exit.
    pub fn finish_exit(&mut self, task: Id) {
        let group = self.tasks[&task].group;
        let last = self.groups[&group].live == 0;
        if last {
            let to = self.reaper(group);
            let children = core::mem::take(&mut self.groups.get_mut(&group).expect("a group").children);
            for child in children {
                let c = self.groups.get_mut(&child).expect("a child");
                c.parent = to;
                c.sigchld = true;
                let dead = c.zombie.is_some();
                if let Some(to) = to {
                    self.groups.get_mut(&to).expect("a reaper").children.insert(child);
                }
                if dead && (to.is_none() || self.unwanted(child)) {
                    self.reap(child);
                }
            }
        }
        let t = self.tasks.get_mut(&task).expect("a task");
        t.dead = true;
        if self.groups[&group].leader != task {
            let t = self.tasks.remove(&task).expect("a task");
            self.let_go(&t.numbers);
            self.groups.get_mut(&group).expect("a group").tasks.remove(&task);
        }
        let g = &self.groups[&group];
        if g.live > 0 || g.tasks.iter().any(|t| !self.tasks[t].dead) {
            return;
        }
        let (home, number) = Self::home(&g.numbers);
        let reboot = self.ns[home].reboot.filter(|_| number == 1);
        let status = reboot.or(g.exiting);
        self.groups.get_mut(&group).expect("a group").zombie = status;
        let first = Self::home(&self.groups[&group].numbers) == (0, 1);
        if first || self.reaped_quietly(group) || self.unwanted(group) {
            self.reap(group);
        }
    }

    /// execve(2) begins. EAGAIN if the group is doing something of the kind.
    pub fn begin_exec(&mut self, task: Id) -> Result<(), Errno> {
        let g = self.groups.get_mut(&self.tasks[&task].group).expect("a group");
        if g.exiting.is_some() || g.exec_by.is_some() {
            return Err(Errno::EAGAIN);
        }
        if g.tasks.len() > 1 {
            g.exec_by = Some(task);
        }
        Ok(())
    }

    /// Whether an exec under way has nobody left to wait for.
    pub fn exec_is_alone(&self, task: Id) -> bool {
        let g = &self.groups[&self.tasks[&task].group];
        g.tasks.iter().all(|t| *t == task || (*t == g.leader && self.tasks[t].dead))
    }

    pub fn finish_exec(&mut self, task: Id) {
        let group = self.tasks[&task].group;
        let g = self.groups.get_mut(&group).expect("a group");
        g.exec_by = None;
        g.execed = true;
        g.sigchld = true;
        let (old, numbers) = (g.leader, g.numbers.clone());
        if old != task {
            g.leader = task;
            g.tasks = BTreeSet::from([task]);
            // The leader's numbers change hands; the caller's own are free.
            let old = self.tasks.remove(&old).expect("the old leader");
            self.let_go(&old.numbers);
            self.hold(&numbers);
            let own = core::mem::replace(&mut self.tasks.get_mut(&task).expect("a task").numbers, numbers);
            self.let_go(&own);
        }
    }

    pub fn abort_exec(&mut self, task: Id) {
        self.groups.get_mut(&self.tasks[&task].group).expect("a group").exec_by = None;
    }

    /// wait(2) took this zombie.
    pub fn wait(&mut self, group: Id) {
        self.reap(group);
    }

    /// Whether no member has a living parent in another process group of the session.
    pub fn is_orphaned(&self, pg: Id) -> bool {
        let session = self.process_groups[&pg].session;
        !self.process_groups[&pg].members.iter().any(|m| {
            let m = &self.groups[m];
            m.zombie.is_none()
                && m.parent.is_some_and(|p| {
                    let other = self.groups[&p].process_group;
                    other != pg && self.process_groups[&other].session == session
                })
        })
    }
}
