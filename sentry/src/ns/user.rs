//! Credentials (credentials(7)) and capabilities (capabilities(7)). Immutable once shared: a change makes a new value.
#![allow(missing_docs)] // capability names are those of capabilities(7)
use std::sync::Arc;

use bitflags::bitflags;

use super::user_namespace::{IdKind, UserNamespace};
use crate::Result;
use crate::mm::Charge;
use crate::platform::{KernelMemory, Platform};

bitflags! {
    /// A capability set; bit n is capability n of <linux/capability.h>.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    #[allow(missing_docs)]
    pub struct Caps: u64 {
        const CHOWN = 1 << 0;
        const DAC_OVERRIDE = 1 << 1;
        const DAC_READ_SEARCH = 1 << 2;
        const FOWNER = 1 << 3;
        const FSETID = 1 << 4;
        const KILL = 1 << 5;
        const SETGID = 1 << 6;
        const SETUID = 1 << 7;
        const SETPCAP = 1 << 8;
        const LINUX_IMMUTABLE = 1 << 9;
        const NET_BIND_SERVICE = 1 << 10;
        const NET_BROADCAST = 1 << 11;
        const NET_ADMIN = 1 << 12;
        const NET_RAW = 1 << 13;
        const IPC_LOCK = 1 << 14;
        const IPC_OWNER = 1 << 15;
        const SYS_MODULE = 1 << 16;
        const SYS_RAWIO = 1 << 17;
        const SYS_CHROOT = 1 << 18;
        const SYS_PTRACE = 1 << 19;
        const SYS_PACCT = 1 << 20;
        const SYS_ADMIN = 1 << 21;
        const SYS_BOOT = 1 << 22;
        const SYS_NICE = 1 << 23;
        const SYS_RESOURCE = 1 << 24;
        const SYS_TIME = 1 << 25;
        const SYS_TTY_CONFIG = 1 << 26;
        const MKNOD = 1 << 27;
        const LEASE = 1 << 28;
        const AUDIT_WRITE = 1 << 29;
        const AUDIT_CONTROL = 1 << 30;
        const SETFCAP = 1 << 31;
        const MAC_OVERRIDE = 1 << 32;
        const MAC_ADMIN = 1 << 33;
        const SYSLOG = 1 << 34;
        const WAKE_ALARM = 1 << 35;
        const BLOCK_SUSPEND = 1 << 36;
        const AUDIT_READ = 1 << 37;
        const PERFMON = 1 << 38;
        const BPF = 1 << 39;
        const CHECKPOINT_RESTORE = 1 << 40;
    }
}

/// Who a task acts as.
/// Supplementary groups, ascending; shared by copies of the credentials.
#[derive(Clone)]
pub struct Groups(Arc<(Vec<u32>, Option<Charge>)>);

impl From<Vec<u32>> for Groups {
    fn from(mut list: Vec<u32>) -> Groups {
        list.sort_unstable();
        Groups(Arc::new((list, None)))
    }
}

impl Groups {
    /// A program's list. ENOMEM.
    pub fn charged(platform: &Arc<dyn Platform>, mut list: Vec<u32>) -> Result<Groups> {
        list.sort_unstable();
        let charge = Charge::new(platform, KernelMemory::Slab, list.len().saturating_mul(size_of::<u32>()))?;
        Ok(Groups(Arc::new((list, Some(charge)))))
    }
}

impl core::ops::Deref for Groups {
    type Target = [u32];
    fn deref(&self) -> &[u32] {
        &self.0.0
    }
}

impl core::fmt::Debug for Groups {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub struct Credentials {
    pub uid: u32,
    pub euid: u32,
    pub suid: u32,
    pub fsuid: u32,
    pub gid: u32,
    pub egid: u32,
    pub sgid: u32,
    pub fsgid: u32,
    pub groups: Groups,
    pub permitted: Caps,
    pub effective: Caps,
    pub inheritable: Caps,
    pub bounding: Caps,
    pub ambient: Caps,
    pub securebits: u32,
    pub no_new_privs: bool,
    pub keep_caps: bool,
    /// Where the capabilities count. All ids are as the initial namespace numbers them.
    pub user_ns: Arc<UserNamespace>,
}

impl Credentials {
    /// A process of `uid`:`gid`; root has all capabilities, others none.
    pub fn new(uid: u32, gid: u32, groups: Vec<u32>) -> Credentials {
        let caps = if uid == 0 { Caps::all() } else { Caps::empty() };
        Credentials {
            uid,
            euid: uid,
            suid: uid,
            fsuid: uid,
            gid,
            egid: gid,
            sgid: gid,
            fsgid: gid,
            groups: Groups::from(groups),
            permitted: caps,
            effective: caps,
            inheritable: Caps::empty(),
            bounding: Caps::all(),
            ambient: Caps::empty(),
            securebits: 0,
            no_new_privs: false,
            keep_caps: false,
            user_ns: UserNamespace::initial().clone(),
        }
    }

    /// The credentials after execve(2) of a file whose set-id bits ask for `uid` and `gid`, and whether the program must
    /// not trust its environment (AT_SECURE). No file has capabilities of its own here (capabilities(7)).
    #[must_use]
    pub fn for_exec(&self, uid: Option<u32>, gid: Option<u32>) -> (Credentials, bool) {
        const SECBIT_NOROOT: u32 = 1;
        let mut c = self.clone();
        c.euid = uid.unwrap_or(c.euid);
        c.egid = gid.unwrap_or(c.egid);
        (c.suid, c.fsuid) = (c.euid, c.euid);
        (c.sgid, c.fsgid) = (c.egid, c.egid);
        c.keep_caps = false;
        let changed = c.euid != self.uid || c.egid != self.gid;
        if (uid.is_some() || gid.is_some()) && changed {
            c.ambient = Caps::empty();
        }
        let by_root = c.securebits & SECBIT_NOROOT == 0 && (c.is_root(c.euid) || c.is_root(c.uid));
        let effective = by_root && c.is_root(c.euid);
        c.permitted = if by_root { c.inheritable | c.bounding } else { Caps::empty() };
        // Under no_new_privs a program has no more than its caller had (prctl(2)).
        if c.no_new_privs && (changed || !self.permitted.contains(c.permitted)) {
            (c.euid, c.suid, c.fsuid) = (c.uid, c.uid, c.uid);
            (c.egid, c.sgid, c.fsgid) = (c.gid, c.gid, c.gid);
            c.permitted &= self.permitted;
        }
        c.permitted |= c.ambient;
        c.effective = if effective { c.permitted } else { c.ambient };
        let grew = !c.ambient.contains(c.permitted);
        let secure = changed || (!c.is_root(c.uid) && grew);
        (c, secure)
    }

    /// Whether all of `caps` are effective in the initial user namespace: power over what belongs to no other (capable() in Linux).
    pub fn has(&self, caps: Caps) -> bool {
        self.user_ns.is_initial() && self.effective.contains(caps)
    }

    /// Whether all of `caps` are effective in the own user namespace, whichever that is.
    pub fn has_in_own(&self, caps: Caps) -> bool {
        self.effective.contains(caps)
    }

    /// Whether `caps` are there over what belongs to `owner`: in the own namespace and those below by being effective, and all of them over
    /// a namespace below that one's own effective user has made from here (capabilities(7), user_namespaces(7)).
    pub fn has_in(&self, owner: &Arc<UserNamespace>, caps: Caps) -> bool {
        let mut at = owner;
        loop {
            if Arc::ptr_eq(at, &self.user_ns) {
                return self.effective.contains(caps);
            }
            if at.level() <= self.user_ns.level() {
                return false;
            }
            let Some(parent) = at.parent() else { return false };
            if Arc::ptr_eq(parent, &self.user_ns) && at.owner() == self.euid {
                return true;
            }
            at = parent;
        }
    }

    /// Whether `caps` reach an inode of `uid` and `gid`: they are effective, and both owners have a name in the own namespace.
    pub fn has_over(&self, caps: Caps, uid: u32, gid: u32) -> bool {
        self.effective.contains(caps) && self.user_ns.knows(uid, gid)
    }

    /// Whether the own user namespace has its maps of users and groups, which never change.
    pub fn ids_are_settled(&self) -> bool {
        self.user_ns.has_map(IdKind::User) && self.user_ns.has_map(IdKind::Group)
    }

    /// Whether `uid` is the root of the own user namespace.
    pub fn is_root(&self, uid: u32) -> bool {
        self.user_ns.user(0) == Some(uid)
    }

    /// All capabilities, in `ns` alone: what its maker and whoever enters it begin with.
    pub fn enter_user_namespace(&mut self, ns: &Arc<UserNamespace>) {
        self.securebits = 0;
        self.keep_caps = false;
        self.inheritable = Caps::empty();
        self.permitted = Caps::all();
        self.effective = Caps::all();
        self.bounding = Caps::all();
        self.ambient = Caps::empty();
        self.user_ns = ns.clone();
    }

    /// Whether the file-system group or a supplementary group is `gid`.
    pub fn in_group(&self, gid: u32) -> bool {
        self.fsgid == gid || self.groups.binary_search(&gid).is_ok()
    }
}
