//! /proc/PID/maps, smaps and smaps_rollup (proc_pid_maps(5), proc_pid_smaps(5)).
use core::fmt::Write;

use super::Cx;
use crate::Result;
use crate::mm::{MapFlags, MapSource, Prot, VmaInfo};
use crate::vfs::mount::{dev_major, dev_minor};

fn vmas(cx: &Cx, resident: bool) -> Result<Vec<VmaInfo>> {
    Ok(cx.task()?.space().map_or_else(|_| Vec::new(), |s| s.maps(resident)))
}

/// The column in which names begin.
const NAME_COLUMN: usize = 73;

fn header(out: &mut Vec<u8>, vma: &VmaInfo) {
    let flag = |on: bool, c: char| if on { c } else { '-' };
    let ((dev, ino), offset) = match &vma.source {
        MapSource::File { object, .. } => (object.key(), vma.offset),
        _ => ((0, 0), 0),
    };
    let line = format!(
        "{:08x}-{:08x} {}{}{}{} {offset:08x} {:02x}:{:02x} {ino} ",
        vma.start,
        vma.end,
        flag(vma.prot.contains(Prot::READ), 'r'),
        flag(vma.prot.contains(Prot::WRITE), 'w'),
        flag(vma.prot.contains(Prot::EXEC), 'x'),
        if vma.flags.contains(MapFlags::SHARED) { 's' } else { 'p' },
        dev_major(dev),
        dev_minor(dev),
    );
    let start = out.len();
    out.extend_from_slice(line.as_bytes());
    if !vma.name.is_empty() {
        let wanted = start + NAME_COLUMN;
        if out.len() < wanted {
            out.resize(wanted, b' ');
        }
        for &b in &vma.name {
            if b == b'\n' { out.extend_from_slice(b"\\012") } else { out.push(b) }
        }
    }
    out.push(b'\n');
}

pub(super) fn maps(cx: &Cx) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    for vma in vmas(cx, false)? {
        header(&mut out, &vma);
    }
    Ok(out)
}

/// Bytes of one or several VMAs.
#[derive(Default)]
struct Sums {
    size: u64,
    rss: u64,
    anonymous: u64,
    /// Pages that other address spaces or the object share.
    shared: u64,
    locked: u64,
}

impl Sums {
    fn add(&mut self, vma: &VmaInfo, kinds: (u64, u64, u64)) {
        let (private, object, shared) = kinds;
        self.size += vma.end - vma.start;
        self.rss += private + object;
        self.anonymous += private;
        self.shared += shared + object;
        if vma.flags.contains(MapFlags::LOCKED) {
            self.locked += private + object;
        }
    }

    fn write(&self, out: &mut String, whole: bool) {
        let private = self.rss.saturating_sub(self.shared);
        let mut line = |name: &str, bytes: u64| {
            let _ = writeln!(out, "{:<16}{:>8} kB", format!("{name}:"), bytes / 1024);
        };
        if !whole {
            line("Size", self.size);
            line("KernelPageSize", 4096);
            line("MMUPageSize", 4096);
        }
        line("Rss", self.rss);
        // A shared page counts by half: how many share it is not kept.
        line("Pss", private + self.shared / 2);
        line("Pss_Dirty", private);
        if whole {
            line("Pss_Anon", self.anonymous);
            line("Pss_File", self.rss - self.anonymous);
            line("Pss_Shmem", 0);
        }
        line("Shared_Clean", self.shared);
        line("Shared_Dirty", 0);
        line("Private_Clean", 0);
        line("Private_Dirty", private);
        line("Referenced", self.rss);
        line("Anonymous", self.anonymous);
        line("KSM", 0);
        line("LazyFree", 0);
        line("AnonHugePages", 0);
        line("ShmemPmdMapped", 0);
        line("FilePmdMapped", 0);
        line("Shared_Hugetlb", 0);
        line("Private_Hugetlb", 0);
        line("Swap", 0);
        line("SwapPss", 0);
        line("Locked", self.locked);
    }
}

pub(super) fn smaps(cx: &Cx) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    let Ok(space) = cx.task()?.space() else { return Ok(out) };
    for vma in space.maps(false) {
        header(&mut out, &vma);
        let mut sums = Sums::default();
        sums.add(&vma, space.resident_kinds(vma.start, vma.end));
        let mut text = String::new();
        sums.write(&mut text, false);
        let anonymous = matches!(vma.source, MapSource::Anonymous);
        let _ = writeln!(text, "THPeligible:    {:>8}", u8::from(anonymous && vma.end - vma.start >= 2 << 20));
        let mut flags = String::new();
        for (on, name) in [
            (vma.prot.contains(Prot::READ), "rd "),
            (vma.prot.contains(Prot::WRITE), "wr "),
            (vma.prot.contains(Prot::EXEC), "ex "),
            (vma.flags.contains(MapFlags::SHARED), "sh "),
            (true, "mr "),
            (true, "mw "),
            (true, "me "),
            (vma.flags.contains(MapFlags::SHARED), "ms "),
            (vma.flags.contains(MapFlags::GROWSDOWN), "gd "),
            (vma.flags.contains(MapFlags::LOCKED), "lo "),
            (vma.flags.contains(MapFlags::NORESERVE), "nr "),
            (anonymous, "ac "),
        ] {
            if on {
                flags.push_str(name);
            }
        }
        let _ = writeln!(text, "VmFlags: {flags}");
        out.extend_from_slice(text.as_bytes());
    }
    Ok(out)
}

pub(super) fn smaps_rollup(cx: &Cx) -> Result<Vec<u8>> {
    let Ok(space) = cx.task()?.space() else { return Ok(Vec::new()) };
    let vmas = space.maps(false);
    let mut sums = Sums::default();
    for vma in &vmas {
        sums.add(vma, space.resident_kinds(vma.start, vma.end));
    }
    let (start, end) = (vmas.first().map_or(0, |v| v.start), vmas.last().map_or(0, |v| v.end));
    let mut text = format!("{start:08x}-{end:08x} ---p 00000000 00:00 0 ");
    while text.len() < NAME_COLUMN {
        text.push(' ');
    }
    text.push_str("[rollup]\n");
    sums.write(&mut text, true);
    Ok(text.into_bytes())
}
