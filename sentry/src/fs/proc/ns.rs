//! /proc/PID/ns: namespaces as links (namespaces(7)). Owns the links; the files they lead to are `task::ns_file`'s.
use std::sync::Arc;

use super::Cx;
use crate::Result;
use crate::task::ns_file::{Kind, NsFile};
use crate::task::nsproxy::Namespace;
use crate::vfs::File;

pub(super) fn link_text(cx: &Cx, kind: Kind) -> Result<Vec<u8>> {
    Ok(Namespace::of(&*cx.task()?, kind)?.link_text(cx.kernel()))
}

pub(super) fn open(cx: &Cx, kind: Kind) -> Result<Arc<File>> {
    Ok(NsFile::open(cx.kernel(), Namespace::of(&*cx.task()?, kind)?))
}
