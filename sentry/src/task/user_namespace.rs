//! Making user namespaces and writing their maps (user_namespaces(7)): who may. Owns the rules; the maps are
//! [`crate::ns::user_namespace`]'s.
use core::fmt::Write;
use std::sync::Arc;

use super::Task;
use crate::ns::ucounts::Counted;
use crate::ns::user::{Caps, Credentials};
use crate::ns::user_namespace::{Extent, IdKind, MAX_EXTENTS, MAX_LEVEL, UserNamespace};
use crate::{Errno, Result};

/// The credentials of `task` in a new user namespace below its own. ENOSPC at a limit; EPERM for a task whose root directory is not its
/// mount namespace's, or whose ids have no name in its own user namespace.
pub(super) fn in_new_namespace(task: &Task) -> Result<Credentials> {
    let mut credentials = Credentials::clone(&*task.credentials());
    let parent = credentials.user_ns.clone();
    if parent.level() >= MAX_LEVEL {
        return Err(Errno::ENOSPC);
    }
    let (uid, gid) = (credentials.euid, credentials.egid);
    let charge = task.kernel().ucounts.charge(Counted::User, uid)?;
    let chrooted = match &task.nsproxy()?.mnt {
        Some(mnt) => !mnt.root()?.is(&task.fs().get().root),
        None => false,
    };
    if chrooted || !parent.knows(uid, gid) {
        return Err(Errno::EPERM);
    }
    let setfcap = credentials.has_in_own(Caps::SETFCAP);
    let ns = UserNamespace::nested(&parent, (uid, gid), setfcap, || Ok(charge))?;
    credentials.enter_user_namespace(&ns);
    Ok(credentials)
}

/// A range as it is written: first id inside, first id in the other namespace, how many.
type Line = [u32; 3];

/// A number in any base that strtoul(3) knows, from the start of `text`; what follows it.
fn number(text: &str) -> Option<(u32, &str)> {
    let text = text.trim_start_matches([' ', '\t']);
    let (radix, digits) = match text.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, text.get(2..)?),
        [b'0', ..] => (8, text),
        _ => (10, text),
    };
    let end = digits.find(|c: char| !c.is_digit(radix)).unwrap_or(digits.len());
    let value = u32::from_str_radix(digits.get(..end)?, radix).ok()?;
    Some((value, digits.get(end..)?))
}

fn parse_line(line: &str) -> Option<Line> {
    let (first, rest) = number(line)?;
    let rest = rest.strip_prefix([' ', '\t'])?;
    let (lower, rest) = number(rest)?;
    let rest = rest.strip_prefix([' ', '\t'])?;
    let (count, rest) = number(rest)?;
    let ends = |start: u32| start != u32::MAX && start.checked_add(count).is_some_and(|end| end > start);
    (rest.trim_matches([' ', '\t', '\0']).is_empty() && ends(first) && ends(lower)).then_some([first, lower, count])
}

/// The ranges of a text. EINVAL.
fn parse(text: &[u8]) -> Result<Vec<Line>> {
    let text = core::str::from_utf8(text).map_err(|_| Errno::EINVAL)?;
    let mut lines: Vec<Line> = Vec::new();
    for line in text.strip_suffix('\n').unwrap_or(text).split('\n') {
        let new = parse_line(line).ok_or(Errno::EINVAL)?;
        let meets = |old: &Line, at: usize| old[at] < new[at] + new[2] && new[at] < old[at] + old[2];
        if lines.len() >= MAX_EXTENTS || lines.iter().any(|old| meets(old, 0) || meets(old, 1)) {
            return Err(Errno::EINVAL);
        }
        lines.push(new);
    }
    Ok(lines)
}

/// What a write to uid_map, gid_map or projid_map of a process in `ns` needs to know.
pub struct MapWrite<'a> {
    /// The user namespace whose map it is.
    pub ns: &'a Arc<UserNamespace>,
    /// Which map.
    pub kind: IdKind,
    /// Who writes.
    pub writer: &'a Credentials,
    /// Who opened the file.
    pub opener: &'a Credentials,
}

impl MapWrite<'_> {
    /// Sets the map to what `text` says. EPERM for one that is set, and for what writer or opener may not; EINVAL for a bad text.
    pub fn apply(&self, text: &[u8]) -> Result<()> {
        let ns = self.ns;
        let parent = ns.parent().ok_or(Errno::EPERM)?;
        let from = &self.opener.user_ns;
        if !Arc::ptr_eq(from, ns) && !Arc::ptr_eq(from, parent) {
            return Err(Errno::EPERM);
        }
        // A page is the most, and Linux refuses a whole one.
        if text.len() >= 4096 {
            return Err(Errno::EINVAL);
        }
        if ns.has_map(self.kind) || self.kind != IdKind::Project && !self.opener.has_in(ns, Caps::SYS_ADMIN) {
            return Err(Errno::EPERM);
        }
        let lines = parse(text)?;
        if !self.permitted(parent, &lines) {
            return Err(Errno::EPERM);
        }
        let extents: Option<Box<[Extent]>> = lines
            .iter()
            .map(|&[first, lower, count]| {
                let initial = parent.range_to_initial(self.kind, lower, count)?;
                Some(Extent { first, initial, count })
            })
            .collect();
        ns.set_map(self.kind, extents.ok_or(Errno::EPERM)?)
    }

    fn permitted(&self, parent: &Arc<UserNamespace>, lines: &[Line]) -> bool {
        let (ns, opener) = (self.ns, self.opener);
        let root_of_parent = lines.iter().any(|l| l[1] == 0);
        if self.kind == IdKind::User && root_of_parent {
            // Who maps the parent's root could give files capabilities there.
            let inside = Arc::ptr_eq(&opener.user_ns, ns);
            let able = if inside { ns.maker_could_setfcap() } else { opener.has_in(parent, Caps::SETFCAP) };
            if !able {
                return false;
            }
        }
        // Anybody may give the own id a name.
        if let [[_, lower, 1]] = lines
            && ns.owner() == opener.euid
        {
            let own = match self.kind {
                IdKind::User => parent.user(*lower) == Some(opener.euid),
                IdKind::Group => !ns.setgroups_allowed() && parent.group(*lower) == Some(opener.egid),
                IdKind::Project => false,
            };
            if own {
                return true;
            }
        }
        let cap = match self.kind {
            IdKind::User => Caps::SETUID,
            IdKind::Group => Caps::SETGID,
            IdKind::Project => return true,
        };
        self.writer.has_in(parent, cap) && opener.has_in(parent, cap)
    }
}

/// The text of a map as a reader in `reader` sees it.
pub fn map_text(ns: &Arc<UserNamespace>, kind: IdKind, reader: &Arc<UserNamespace>) -> String {
    // Whoever is inside sees the numbers of the parent, which is what was written.
    let outer = if Arc::ptr_eq(reader, ns) { ns.parent().unwrap_or(reader) } else { reader };
    let mut text = String::new();
    for e in ns.map(kind).unwrap_or_default() {
        let lower = outer.from_initial(kind, e.initial).unwrap_or(u32::MAX);
        let _ = writeln!(text, "{:>10} {lower:>10} {:>10}", e.first, e.count);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_read_as_linux_reads_them() {
        assert_eq!(parse(b"0 1000 1"), Ok(vec![[0, 1000, 1]]));
        assert_eq!(parse(b"  0\t 1000 1  \n10 0x10 010\n"), Ok(vec![[0, 1000, 1], [10, 16, 8]]));
        for bad in [
            "",
            "\n",
            "0 0",
            "0 0 0",
            "0 0 1 1",
            "a 0 1",
            "0 4294967295 1",
            "0 4294967290 10",
            "0 0 2\n1 9 1",
            "0 0 1\n9 0 1",
        ] {
            assert_eq!(parse(bad.as_bytes()), Err(Errno::EINVAL), "{bad:?}");
        }
    }
}
