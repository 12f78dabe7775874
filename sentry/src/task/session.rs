//! Process groups and sessions (credentials(7), setsid(2)). Own membership and the controlling terminal's slot; never the
//! terminal. They outlive their leaders and pin the number.
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use super::{Pid, ThreadGroup};
use crate::lock::{Mutex, Rank};

/// A terminal as a session knows it; implemented by the terminal code.
pub trait ControllingTty: Send + Sync + Any {
    /// Device number as in /proc/PID/stat's tty_nr.
    fn device(&self) -> u64;
    /// The foreground process group.
    fn foreground(&self) -> Option<Arc<ProcessGroup>>;
    /// The session's leader has exited and the session has already let go of the terminal: sends SIGHUP to the
    /// foreground group and forgets the session.
    fn disassociate(&self, session: &Arc<Session>);
    /// Makes this the controlling terminal of `session`, with `foreground` in the foreground.
    fn associate(&self, session: &Arc<Session>, foreground: &Arc<ProcessGroup>);
    /// For downcasts by the terminal code.
    fn as_any(&self) -> &dyn Any;
}

/// What `FileOps::terminal` of a terminal gives.
pub struct Terminal(pub Arc<dyn ControllingTty>);

/// A session.
pub struct Session {
    pid: Arc<Pid>,
    leader: Weak<ThreadGroup>,
    tty: Mutex<Option<Arc<dyn ControllingTty>>>,
    process_groups: Mutex<BTreeMap<i32, Arc<ProcessGroup>>>,
}

impl Session {
    /// The session's identity.
    pub fn pid(&self) -> &Arc<Pid> {
        &self.pid
    }

    /// The leader, as long as it has not been reaped.
    pub fn leader(&self) -> Option<Arc<ThreadGroup>> {
        self.leader.upgrade()
    }

    /// The controlling terminal.
    pub fn tty(&self) -> Option<Arc<dyn ControllingTty>> {
        self.tty.lock().clone()
    }

    /// Sets or clears the controlling terminal, giving the old one.
    pub fn set_tty(&self, tty: Option<Arc<dyn ControllingTty>>) -> Option<Arc<dyn ControllingTty>> {
        core::mem::replace(&mut *self.tty.lock(), tty)
    }

    /// Process groups in order of their global number.
    pub fn process_groups(&self) -> Vec<Arc<ProcessGroup>> {
        self.process_groups.lock().values().cloned().collect()
    }
}

/// A process group.
pub struct ProcessGroup {
    pid: Arc<Pid>,
    session: Arc<Session>,
    members: Mutex<BTreeMap<i32, Arc<ThreadGroup>>>,
}

impl ProcessGroup {
    /// The group's identity.
    pub fn pid(&self) -> &Arc<Pid> {
        &self.pid
    }

    /// The session it belongs to.
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Members (zombies included) in order of their global tgid.
    pub fn members(&self) -> Vec<Arc<ThreadGroup>> {
        self.members.lock().values().cloned().collect()
    }

    /// Whether it has no member at all: it exists no more.
    pub fn is_empty(&self) -> bool {
        self.members.lock().is_empty()
    }

    /// Whether no member has a living parent in another process group of the same session (POSIX). `ignoring` is a
    /// member that is about to go. The caller holds the kinship lock.
    pub fn is_orphaned(self: &Arc<Self>, ignoring: Option<&Arc<ThreadGroup>>) -> bool {
        !self.members().iter().any(|m| {
            if ignoring.is_some_and(|i| Arc::ptr_eq(i, m)) || m.is_zombie() {
                return false;
            }
            let Some(parent) = m.parent() else { return false };
            let pg = parent.process_group();
            !Arc::ptr_eq(&pg, self) && Arc::ptr_eq(pg.session(), &self.session)
        })
    }

    /// Whether a member is stopped.
    pub fn has_stopped_member(&self) -> bool {
        self.members.lock().values().any(|m| m.is_stopped())
    }
}

/// Gives a session whose leader starts with `files` the terminal among them, if there is one.
pub(super) fn adopt_terminal(session: &Arc<Session>, foreground: &Arc<ProcessGroup>, files: &[Arc<crate::vfs::File>]) {
    let terminal = files.iter().find_map(|f| f.ops().terminal());
    if let Some(tty) = terminal.and_then(|t| t.downcast::<Terminal>().ok()) {
        tty.0.associate(session, foreground);
    }
}

/// A new session and its first process group, both named by `pid`. The caller holds the kinship lock.
pub(super) fn new_session(pid: &Arc<Pid>, leader: &Weak<ThreadGroup>) -> Arc<ProcessGroup> {
    let session = Arc::new(Session {
        pid: pid.clone(),
        leader: leader.clone(),
        tty: Mutex::new(Rank::Leaf, None),
        process_groups: Mutex::new(Rank::ProcessGroup, BTreeMap::new()),
    });
    pid.hold_session(&session);
    new_process_group(pid, &session)
}

/// A new, empty process group. The caller holds the kinship lock and adds a member at once.
pub(super) fn new_process_group(pid: &Arc<Pid>, session: &Arc<Session>) -> Arc<ProcessGroup> {
    let pg = Arc::new(ProcessGroup {
        pid: pid.clone(),
        session: session.clone(),
        members: Mutex::new(Rank::ProcessGroup, BTreeMap::new()),
    });
    session.process_groups.lock().insert(pid.global(), pg.clone());
    pid.hold_process_group(&pg);
    pg
}

/// Makes `group` a member. The caller holds the kinship lock.
pub(super) fn join(pg: &Arc<ProcessGroup>, group: &Arc<ThreadGroup>) {
    pg.members.lock().insert(group.pid().global(), group.clone());
}

/// Ends a membership; the last member's end is the process group's, and the last process group's the session's. The caller
/// holds the kinship lock.
pub(super) fn leave(pg: &Arc<ProcessGroup>, group: &Arc<ThreadGroup>) {
    let (old, empty) = {
        let mut members = pg.members.lock();
        (members.remove(&group.pid().global()), members.is_empty())
    };
    drop(old);
    if !empty {
        return;
    }
    pg.pid.drop_process_group();
    let (old, empty) = {
        let mut groups = pg.session.process_groups.lock();
        (groups.remove(&pg.pid.global()), groups.is_empty())
    };
    drop(old);
    if empty {
        pg.session.pid.drop_session();
    }
}
