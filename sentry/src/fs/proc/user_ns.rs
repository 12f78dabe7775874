//! uid_map, gid_map, projid_map and setgroups of a process (user_namespaces(7)). Owns their texts; never who may write what.
use super::Cx;
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
