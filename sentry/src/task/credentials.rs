//! Changes of credentials (setuid(2) and its family, capset(2)): who may become whom, and what that does to capabilities.
//! Owns the rules; the values are `ns::user`'s.
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{ProcessGroup, Task, session};
use crate::ns::user::{Caps, Credentials};
use crate::{Errno, Result};

/// SECBIT_NOROOT and its lock, and so on, as prctl(2) numbers them.
pub const SECBIT_KEEP_CAPS: u32 = 1 << 4;
/// SECBIT_NO_SETUID_FIXUP.
pub const SECBIT_NO_SETUID_FIXUP: u32 = 1 << 2;
/// SECBIT_NO_CAP_AMBIENT_RAISE.
pub const SECBIT_NO_CAP_AMBIENT_RAISE: u32 = 1 << 6;

/// An unchanged id in setresuid(2) and the like.
const SAME: u32 = u32::MAX;

/// Capabilities that follow the file-system user id.
const FS_CAPS: Caps = Caps::CHOWN
    .union(Caps::DAC_OVERRIDE)
    .union(Caps::DAC_READ_SEARCH)
    .union(Caps::FOWNER)
    .union(Caps::FSETID)
    .union(Caps::LINUX_IMMUTABLE)
    .union(Caps::MAC_OVERRIDE)
    .union(Caps::MKNOD);

/// What a change of user ids does to capabilities (capabilities(7), "Effect of user ID changes").
fn fix_caps(old: &Credentials, new: &mut Credentials) {
    if new.securebits & SECBIT_NO_SETUID_FIXUP != 0 {
        return;
    }
    let had_root = [old.uid, old.euid, old.suid].iter().any(|&id| old.is_root(id));
    let has_root = [new.uid, new.euid, new.suid].iter().any(|&id| new.is_root(id));
    if had_root && !has_root {
        if !new.keep_caps {
            new.permitted = Caps::empty();
            new.effective = Caps::empty();
        }
        new.ambient = Caps::empty();
    }
    let (was, is) = (old.is_root(old.euid), new.is_root(new.euid));
    if was && !is {
        new.effective = Caps::empty();
    } else if !was && is {
        new.effective = new.permitted;
    }
}

fn fix_fs_caps(old_fsuid: u32, new: &mut Credentials) {
    if new.securebits & SECBIT_NO_SETUID_FIXUP != 0 {
        return;
    }
    let (was, is) = (new.is_root(old_fsuid), new.is_root(new.fsuid));
    if was && !is {
        new.effective &= !FS_CAPS;
    } else if !was && is {
        new.effective |= new.permitted & FS_CAPS;
    }
}

impl Task {
    /// A change of user or group ids makes core dumps and inspection by others undesirable, and cancels PR_SET_PDEATHSIG.
    fn ids_changed(&self, old: &Credentials) {
        let new = self.credentials();
        if old.euid != new.euid || old.egid != new.egid || old.fsuid != new.fsuid || old.fsgid != new.fsgid {
            self.group().dumpable.store(0, Ordering::Relaxed);
            self.pdeath_signal.store(0, Ordering::Relaxed);
        }
    }

    fn change_ids(&self, f: impl FnOnce(&mut Credentials) -> Result<()>) -> Result<()> {
        let old = self.credentials();
        self.change_credentials(f)?;
        self.ids_changed(&old);
        Ok(())
    }

    /// setuid(2).
    pub fn setuid(&self, uid: u32) -> Result<()> {
        if uid == SAME {
            return Err(Errno::EINVAL);
        }
        self.change_ids(|c| {
            let old = c.clone();
            if c.has_in_own(Caps::SETUID) {
                c.uid = uid;
                c.suid = uid;
            } else if uid != c.uid && uid != c.suid {
                return Err(Errno::EPERM);
            }
            c.euid = uid;
            c.fsuid = uid;
            fix_caps(&old, c);
            Ok(())
        })
    }

    /// setgid(2).
    pub fn setgid(&self, gid: u32) -> Result<()> {
        if gid == SAME {
            return Err(Errno::EINVAL);
        }
        self.change_ids(|c| {
            if c.has_in_own(Caps::SETGID) {
                c.gid = gid;
                c.sgid = gid;
            } else if gid != c.gid && gid != c.sgid {
                return Err(Errno::EPERM);
            }
            c.egid = gid;
            c.fsgid = gid;
            Ok(())
        })
    }

    /// setreuid(2).
    pub fn setreuid(&self, ruid: u32, euid: u32) -> Result<()> {
        self.change_ids(|c| {
            let old = c.clone();
            let able = c.has_in_own(Caps::SETUID);
            if ruid != SAME {
                if !able && ruid != old.uid && ruid != old.euid {
                    return Err(Errno::EPERM);
                }
                c.uid = ruid;
            }
            if euid != SAME {
                if !able && euid != old.uid && euid != old.euid && euid != old.suid {
                    return Err(Errno::EPERM);
                }
                c.euid = euid;
            }
            if ruid != SAME || (euid != SAME && euid != old.uid) {
                c.suid = c.euid;
            }
            c.fsuid = c.euid;
            fix_caps(&old, c);
            Ok(())
        })
    }

    /// setregid(2).
    pub fn setregid(&self, rgid: u32, egid: u32) -> Result<()> {
        self.change_ids(|c| {
            let old = c.clone();
            let able = c.has_in_own(Caps::SETGID);
            if rgid != SAME {
                if !able && rgid != old.gid && rgid != old.egid {
                    return Err(Errno::EPERM);
                }
                c.gid = rgid;
            }
            if egid != SAME {
                if !able && egid != old.gid && egid != old.egid && egid != old.sgid {
                    return Err(Errno::EPERM);
                }
                c.egid = egid;
            }
            if rgid != SAME || (egid != SAME && egid != old.gid) {
                c.sgid = c.egid;
            }
            c.fsgid = c.egid;
            Ok(())
        })
    }

    /// setresuid(2).
    pub fn setresuid(&self, ids: [u32; 3]) -> Result<()> {
        self.change_ids(|c| {
            let old = c.clone();
            let had = [old.uid, old.euid, old.suid];
            if !c.has_in_own(Caps::SETUID) && ids.iter().any(|i| *i != SAME && !had.contains(i)) {
                return Err(Errno::EPERM);
            }
            for (slot, id) in [&mut c.uid, &mut c.euid, &mut c.suid].into_iter().zip(ids) {
                if id != SAME {
                    *slot = id;
                }
            }
            c.fsuid = c.euid;
            fix_caps(&old, c);
            Ok(())
        })
    }

    /// setresgid(2).
    pub fn setresgid(&self, ids: [u32; 3]) -> Result<()> {
        self.change_ids(|c| {
            let had = [c.gid, c.egid, c.sgid];
            if !c.has_in_own(Caps::SETGID) && ids.iter().any(|i| *i != SAME && !had.contains(i)) {
                return Err(Errno::EPERM);
            }
            for (slot, id) in [&mut c.gid, &mut c.egid, &mut c.sgid].into_iter().zip(ids) {
                if id != SAME {
                    *slot = id;
                }
            }
            c.fsgid = c.egid;
            Ok(())
        })
    }

    /// setfsuid(2): gives the old id whether or not it changed.
    pub fn setfsuid(&self, uid: u32) -> u32 {
        let old = self.credentials().fsuid;
        // A refusal is not an error here.
        let _ = self.change_ids(|c| {
            if ![c.uid, c.euid, c.suid, c.fsuid].contains(&uid) && !c.has_in_own(Caps::SETUID) || uid == SAME {
                return Err(Errno::EPERM);
            }
            c.fsuid = uid;
            fix_fs_caps(old, c);
            Ok(())
        });
        old
    }

    /// setfsgid(2).
    pub fn setfsgid(&self, gid: u32) -> u32 {
        let old = self.credentials().fsgid;
        // A refusal is not an error here.
        let _ = self.change_ids(|c| {
            if ![c.gid, c.egid, c.sgid, c.fsgid].contains(&gid) && !c.has_in_own(Caps::SETGID) || gid == SAME {
                return Err(Errno::EPERM);
            }
            c.fsgid = gid;
            Ok(())
        });
        old
    }

    /// capset(2) of the caller's own sets.
    pub fn capset(&self, effective: Caps, permitted: Caps, inheritable: Caps) -> Result<()> {
        self.change_credentials(|c| {
            if !c.has_in_own(Caps::SETPCAP) && !(c.inheritable | c.permitted).contains(inheritable) {
                return Err(Errno::EPERM);
            }
            if !(c.inheritable | c.bounding).contains(inheritable)
                || !c.permitted.contains(permitted)
                || !permitted.contains(effective)
            {
                return Err(Errno::EPERM);
            }
            c.effective = effective;
            c.permitted = permitted;
            c.inheritable = inheritable;
            c.ambient = c.ambient & permitted & inheritable;
            Ok(())
        })
    }

    /// setsid(2): gives the new session's number. EPERM for a process group leader.
    pub fn setsid(&self) -> Result<i32> {
        let group = self.group();
        let _kinship = self.kernel().kinship();
        if group.pid().process_group().is_some() {
            return Err(Errno::EPERM);
        }
        let new = session::new_session(group.pid(), &Arc::downgrade(group));
        self.enter_process_group(&new);
        Ok(group.tgid())
    }

    fn enter_process_group(&self, new: &Arc<ProcessGroup>) {
        super::thread_group::move_to(self.group(), new);
    }

    /// setpgid(2).
    pub fn setpgid(&self, pid: i32, pgid: i32) -> Result<()> {
        let own = self.group();
        let ns = self.pid_namespace();
        let pid = if pid == 0 { own.tgid() } else { pid };
        let pgid = if pgid == 0 { pid } else { pgid };
        if pgid < 0 {
            return Err(Errno::EINVAL);
        }
        let _kinship = self.kernel().kinship();
        let named = ns.pid(pid).ok_or(Errno::ESRCH)?;
        let Some(target) = named.group() else {
            return Err(if named.task().is_some() { Errno::EINVAL } else { Errno::ESRCH });
        };
        if target.parent().is_some_and(|p| Arc::ptr_eq(&p, own)) {
            if !Arc::ptr_eq(&target.session(), &own.session()) {
                return Err(Errno::EPERM);
            }
            if target.has_execed.load(Ordering::Relaxed) {
                return Err(Errno::EACCES);
            }
        } else if !Arc::ptr_eq(&target, own) {
            return Err(Errno::ESRCH);
        }
        let session = target.session();
        if session.pid().global() == target.pid().global() {
            return Err(Errno::EPERM);
        }
        let new = if pgid == pid {
            match target.pid().process_group() {
                Some(pg) => pg,
                None => session::new_process_group(target.pid(), &session),
            }
        } else {
            let pg = ns.process_group(pgid).ok_or(Errno::EPERM)?;
            if !Arc::ptr_eq(pg.session(), &own.session()) {
                return Err(Errno::EPERM);
            }
            pg
        };
        super::thread_group::move_to(&target, &new);
        Ok(())
    }
}
