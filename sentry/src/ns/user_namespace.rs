//! The user namespace (user_namespaces(7)): which identifiers mean whom, and who has power over what belongs to it. Owns maps and
//! ancestry; never a task, and never who may write a map.
//!
//! The sentry keeps identifiers as the initial namespace numbers them, and translates where a program gives or gets one.
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::ucounts::Charge;
use crate::{Errno, Result};

/// Deepest nesting below the initial namespace.
pub const MAX_LEVEL: usize = 32;
/// What an identifier without a name reads as (/proc/sys/kernel/overflowuid, overflowgid).
pub const OVERFLOW: u32 = 65534;
/// Ranges in one map at most (UID_GID_MAP_MAX_EXTENTS).
pub const MAX_EXTENTS: usize = 340;

/// A range of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First identifier in the namespace.
    pub first: u32,
    /// What it is in the initial namespace.
    pub initial: u32,
    /// How many follow, itself included.
    pub count: u32,
}

/// Which identifiers a map is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum IdKind {
    User,
    Group,
    Project,
}

/// Where in a range that begins at `start` and has `count` numbers the range of `len` from `n` on lies.
fn offset(n: u32, len: u32, start: u32, count: u32) -> Option<u32> {
    let at = n.checked_sub(start)?;
    (at < count && len <= count - at).then_some(at)
}

/// A user namespace.
pub struct UserNamespace {
    parent: Option<Arc<UserNamespace>>,
    level: usize,
    number: u64,
    owner: (u32, u32),
    /// Its maker had CAP_SETFCAP, which a map of the parent's root asks for.
    maker_could_setfcap: bool,
    setgroups: AtomicBool,
    maps: [OnceLock<Box<[Extent]>>; 3],
    _charge: Option<Charge>,
}

impl core::fmt::Debug for UserNamespace {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "user:[{}]", self.number)
    }
}

impl UserNamespace {
    /// The one in which every sandbox begins. It never changes, so that one serves all.
    pub fn initial() -> &'static Arc<UserNamespace> {
        static INITIAL: OnceLock<Arc<UserNamespace>> = OnceLock::new();
        INITIAL.get_or_init(|| {
            Arc::new(UserNamespace {
                parent: None,
                level: 0,
                number: 0xefff_fffd,
                owner: (0, 0),
                maker_could_setfcap: true,
                setgroups: AtomicBool::new(true),
                maps: [const { OnceLock::new() }; 3],
                _charge: None,
            })
        })
    }

    /// A namespace without maps in `parent`, made by the (effective) `owner`. ENOSPC beyond the depth limit or by `charge`.
    pub fn nested(
        parent: &Arc<UserNamespace>,
        owner: (u32, u32),
        maker_could_setfcap: bool,
        charge: impl FnOnce() -> Result<Charge>,
    ) -> Result<Arc<UserNamespace>> {
        if parent.level >= MAX_LEVEL {
            return Err(Errno::ENOSPC);
        }
        Ok(Arc::new(UserNamespace {
            parent: Some(parent.clone()),
            level: parent.level + 1,
            number: super::next_number(),
            owner,
            maker_could_setfcap,
            setgroups: AtomicBool::new(parent.setgroups_allowed()),
            maps: [const { OnceLock::new() }; 3],
            _charge: Some(charge()?),
        }))
    }

    /// The enclosing namespace.
    pub fn parent(&self) -> Option<&Arc<UserNamespace>> {
        self.parent.as_ref()
    }

    /// Depth; 0 is the initial one.
    pub fn level(&self) -> usize {
        self.level
    }

    /// Its number, as the links in /proc/PID/ns show it.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The user who made it.
    pub fn owner(&self) -> u32 {
        self.owner.0
    }

    /// Whether its maker had CAP_SETFCAP.
    pub fn maker_could_setfcap(&self) -> bool {
        self.maker_could_setfcap
    }

    /// Whether it is the initial one.
    pub fn is_initial(&self) -> bool {
        self.level == 0
    }

    /// Whether it is `outer` or lies in it.
    pub fn is_within(self: &Arc<Self>, outer: &Arc<UserNamespace>) -> bool {
        let mut at = Some(self);
        while let Some(ns) = at {
            if ns.level <= outer.level {
                return Arc::ptr_eq(ns, outer);
            }
            at = ns.parent();
        }
        false
    }

    /// Whether setgroups(2) is not denied for good.
    pub fn setgroups_allowed(&self) -> bool {
        self.setgroups.load(Ordering::SeqCst)
    }

    /// Denies setgroups(2) for good. EPERM once groups are mapped.
    pub fn deny_setgroups(&self) -> Result<()> {
        if self.has_map(IdKind::Group) {
            return Err(Errno::EPERM);
        }
        self.setgroups.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Whether groups may be set in it: they have a meaning, and it is allowed.
    pub fn may_set_groups(&self) -> bool {
        self.has_map(IdKind::Group) && self.setgroups_allowed()
    }

    /// The map; None if there is none yet. The initial namespace maps everything to itself.
    pub fn map(&self, kind: IdKind) -> Option<Vec<Extent>> {
        if self.is_initial() {
            return Some(vec![Extent { first: 0, initial: 0, count: u32::MAX }]);
        }
        self.maps[kind as usize].get().map(|m| m.to_vec())
    }

    /// Whether there is a map.
    pub fn has_map(&self, kind: IdKind) -> bool {
        self.is_initial() || self.maps[kind as usize].get().is_some()
    }

    /// Sets the map, whose ranges the caller has checked. EPERM if there is one.
    pub fn set_map(&self, kind: IdKind, extents: Box<[Extent]>) -> Result<()> {
        if self.is_initial() {
            return Err(Errno::EPERM);
        }
        self.maps[kind as usize].set(extents).map_err(|_| Errno::EPERM)
    }

    /// What `count` identifiers from `id` on, as this namespace numbers them, are in the initial one, if they are mapped in one piece.
    pub fn range_to_initial(&self, kind: IdKind, id: u32, count: u32) -> Option<u32> {
        if self.is_initial() {
            return Some(id);
        }
        let extents = self.maps[kind as usize].get()?;
        extents.iter().find_map(|e| offset(id, count, e.first, e.count).map(|at| e.initial + at))
    }

    /// An identifier given by a program in this namespace. None if it means nobody.
    pub fn to_initial(&self, kind: IdKind, id: u32) -> Option<u32> {
        self.range_to_initial(kind, id, 1).filter(|_| id != u32::MAX)
    }

    /// An identifier as a program in this namespace may know it. None if it has no name here.
    pub fn from_initial(&self, kind: IdKind, id: u32) -> Option<u32> {
        if self.is_initial() {
            return Some(id);
        }
        let extents = self.maps[kind as usize].get()?;
        extents.iter().find_map(|e| offset(id, 1, e.initial, e.count).map(|at| e.first + at))
    }

    /// A user given by a program.
    pub fn user(&self, id: u32) -> Option<u32> {
        self.to_initial(IdKind::User, id)
    }

    /// A group given by a program.
    pub fn group(&self, id: u32) -> Option<u32> {
        self.to_initial(IdKind::Group, id)
    }

    /// A user as programs see it; [`OVERFLOW`] without a name.
    pub fn shown_user(&self, id: u32) -> u32 {
        self.from_initial(IdKind::User, id).unwrap_or(OVERFLOW)
    }

    /// A group as programs see it; [`OVERFLOW`] without a name.
    pub fn shown_group(&self, id: u32) -> u32 {
        self.from_initial(IdKind::Group, id).unwrap_or(OVERFLOW)
    }

    /// Whether both owners of something have a name here.
    pub fn knows(&self, uid: u32, gid: u32) -> bool {
        self.is_initial()
            || self.from_initial(IdKind::User, uid).is_some() && self.from_initial(IdKind::Group, gid).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ns::ucounts::{Counted, Ucounts};
    use crate::platform::Platform;

    #[test]
    fn maps_translate_both_ways() {
        let platform: Arc<dyn Platform> = crate::platform::sim::SimPlatform::new(1);
        let counts = Ucounts::new(&platform);
        let initial = UserNamespace::initial();
        assert_eq!((initial.user(7), initial.user(u32::MAX), initial.shown_user(7)), (Some(7), None, 7));
        let ns = UserNamespace::nested(initial, (7, 7), false, || counts.charge(Counted::User, 7)).unwrap();
        assert_eq!((ns.user(0), ns.shown_user(7), ns.knows(7, 7)), (None, OVERFLOW, false));
        let extents = [Extent { first: 0, initial: 7, count: 1 }, Extent { first: 100, initial: 1000, count: 10 }];
        ns.set_map(IdKind::User, Box::new(extents)).unwrap();
        assert_eq!(ns.set_map(IdKind::User, Box::new(extents)), Err(Errno::EPERM));
        assert_eq!((ns.user(0), ns.user(1), ns.user(109), ns.user(110)), (Some(7), None, Some(1009), None));
        assert_eq!((ns.shown_user(7), ns.shown_user(1003), ns.shown_user(8)), (0, 103, OVERFLOW));
        assert_eq!(ns.range_to_initial(IdKind::User, 105, 5), Some(1005));
        assert_eq!(ns.range_to_initial(IdKind::User, 105, 6), None);
        assert!(ns.is_within(initial) && !initial.is_within(&ns));
    }
}
