//! uid_map, gid_map, projid_map, setgroups and timens_offsets of a process (user_namespaces(7), time_namespaces(7)). Owns their texts; never who may write what.
use super::Cx;
use crate::ns::time;
use crate::ns::user::Caps;
use crate::ns::user_namespace::IdKind;
use crate::task::user_namespace::{MapWrite, map_text};
use crate::vfs::file::Caller;
use crate::{Errno, Result};

fn show(cx: &Cx, kind: IdKind) -> Result<Vec<u8>> {
    let ns = cx.task()?.credentials().user_ns.clone();
    Ok(map_text(&ns, kind, cx.user_ns()).into_bytes())
}

fn write(cx: &Cx, caller: &dyn Caller, kind: IdKind, text: &[u8]) -> Result<()> {
    let ns = cx.task()?.credentials().user_ns.clone();
    let writer = caller.credentials();
    let opener = cx.reader.as_ref().map_or_else(|| writer.clone(), |r| r.opener.clone());
    MapWrite { ns: &ns, kind, writer: &writer, opener: &opener }.apply(text)
}

pub(super) fn uid_map(cx: &Cx) -> Result<Vec<u8>> {
    show(cx, IdKind::User)
}

pub(super) fn gid_map(cx: &Cx) -> Result<Vec<u8>> {
    show(cx, IdKind::Group)
}

pub(super) fn projid_map(cx: &Cx) -> Result<Vec<u8>> {
    show(cx, IdKind::Project)
}

pub(super) fn set_uid_map(cx: &Cx, caller: &dyn Caller, text: &[u8]) -> Result<()> {
    write(cx, caller, IdKind::User, text)
}

pub(super) fn set_gid_map(cx: &Cx, caller: &dyn Caller, text: &[u8]) -> Result<()> {
    write(cx, caller, IdKind::Group, text)
}

pub(super) fn set_projid_map(cx: &Cx, caller: &dyn Caller, text: &[u8]) -> Result<()> {
    write(cx, caller, IdKind::Project, text)
}

pub(super) fn setgroups(cx: &Cx) -> Result<Vec<u8>> {
    let allowed = cx.task()?.credentials().user_ns.setgroups_allowed();
    Ok(if allowed { b"allow\n".to_vec() } else { b"deny\n".to_vec() })
}

pub(super) fn set_setgroups(cx: &Cx, caller: &dyn Caller, text: &[u8]) -> Result<()> {
    let ns = cx.task()?.credentials().user_ns.clone();
    if !caller.credentials().has_in(&ns, Caps::SYS_ADMIN) {
        return Err(Errno::EACCES);
    }
    if text.len() >= 8 {
        return Err(Errno::EINVAL);
    }
    match text.trim_ascii_end() {
        // Nothing brings it back.
        b"allow" if ns.setgroups_allowed() => Ok(()),
        b"allow" => Err(Errno::EPERM),
        b"deny" => ns.deny_setgroups(),
        _ => Err(Errno::EINVAL),
    }
}

pub(super) fn time_offsets(cx: &Cx) -> Result<Vec<u8>> {
    let offsets = cx.task()?.nsproxy()?.time_for_children.offsets();
    let line = |name: &str, ns: i64| {
        format!("{name:<10} {:>10} {:>9}\n", ns.div_euclid(1_000_000_000), ns.rem_euclid(1_000_000_000))
    };
    Ok((line("monotonic", offsets.monotonic) + &line("boottime", offsets.boottime)).into_bytes())
}

pub(super) fn set_time_offsets(cx: &Cx, caller: &dyn Caller, text: &[u8]) -> Result<()> {
    let ns = cx.task()?.nsproxy()?.time_for_children.clone();
    let opener = cx.reader.as_ref().map_or_else(|| caller.credentials(), |r| r.opener.clone());
    if !opener.has_in(&ns.owner.user_ns, Caps::SYS_TIME) {
        return Err(Errno::EPERM);
    }
    let text = core::str::from_utf8(text).map_err(|_| Errno::EINVAL)?;
    let (mut monotonic, mut boottime) = (None, None);
    let now = cx.kernel().platform.monotonic();
    let lines: Vec<&str> = text.split('\n').filter(|l| !l.trim().is_empty()).collect();
    if lines.is_empty() || lines.len() > 2 {
        return Err(Errno::EINVAL);
    }
    for line in lines {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let [clock, seconds, nanoseconds] = words[..] else { return Err(Errno::EINVAL) };
        let number = |text: &str| text.parse::<i64>().map_err(|_| Errno::EINVAL);
        let offset = time::offset(number(seconds)?, number(nanoseconds)?, now);
        match clock {
            "monotonic" | "1" => monotonic = Some(offset?),
            "boottime" | "7" => boottime = Some(offset?),
            _ => return Err(Errno::EINVAL),
        }
    }
    ns.set(monotonic, boottime)
}
