//! /proc/PID/maps, smaps and smaps_rollup (proc_pid_maps(5), proc_pid_smaps(5)).
use super::Cx;
use crate::Result;
use crate::mm::{MapFlags, MapSource, Prot, VmaInfo};
use crate::vfs::mount::{dev_major, dev_minor};

fn vmas(cx: &Cx, resident: bool) -> Result<Vec<VmaInfo>> {
    Ok(cx.task()?.space().map_or_else(|_| Vec::new(), |s| s.maps(resident)))
}

/// The column in which names begin.
const NAME_COLUMN: usize = 73;

/// Appends a number in hexadecimal with at least `width` digits. A program may have 65,530 mappings, so the texts are made by hand.
fn hex(out: &mut Vec<u8>, value: u64, width: usize) {
    let digits = (64 - value.leading_zeros() as usize).div_ceil(4).max(width);
    for i in (0..digits).rev() {
        let digit = if i < 16 { (value >> (4 * i)) & 15 } else { 0 };
        out.push(b"0123456789abcdef".get(digit as usize).copied().unwrap_or(b'0'));
    }
}

/// Appends a number in decimal, right-aligned in `width` columns.
fn decimal(out: &mut Vec<u8>, mut value: u64, width: usize) {
    let start = out.len();
    loop {
        out.push(b'0' + (value % 10) as u8);
        value /= 10;
        if value == 0 {
            break;
        }
    }
    while out.len() - start < width {
        out.push(b' ');
    }
    if let Some(number) = out.get_mut(start..) {
        number.reverse();
    }
}

fn header(out: &mut Vec<u8>, vma: &VmaInfo) {
    let ((dev, ino), offset) = match &vma.source {
        MapSource::File { object, .. } => (object.key(), vma.offset),
        _ => ((0, 0), 0),
    };
    let start = out.len();
    hex(out, vma.start, 8);
    out.push(b'-');
    hex(out, vma.end, 8);
    let flag = |on: bool, c: u8| if on { c } else { b'-' };
    out.extend_from_slice(&[
        b' ',
        flag(vma.prot.contains(Prot::READ), b'r'),
        flag(vma.prot.contains(Prot::WRITE), b'w'),
        flag(vma.prot.contains(Prot::EXEC), b'x'),
        if vma.flags.contains(MapFlags::SHARED) { b's' } else { b'p' },
        b' ',
    ]);
    hex(out, offset, 8);
    out.push(b' ');
    hex(out, dev_major(dev), 2);
    out.push(b':');
    hex(out, dev_minor(dev), 2);
    out.push(b' ');
    decimal(out, ino, 1);
    out.push(b' ');
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

    fn write(&self, out: &mut Vec<u8>, whole: bool) {
        let private = self.rss.saturating_sub(self.shared);
        let mut line = |name: &str, bytes: u64| {
            let end = out.len() + 16;
            out.extend_from_slice(name.as_bytes());
            out.push(b':');
            out.resize(end.max(out.len()), b' ');
            decimal(out, bytes / 1024, 8);
            out.extend_from_slice(b" kB\n");
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
        sums.write(&mut out, false);
        let anonymous = matches!(vma.source, MapSource::Anonymous);
        out.extend_from_slice(b"THPeligible:    ");
        decimal(&mut out, u64::from(anonymous && vma.end - vma.start >= 2 << 20), 8);
        out.extend_from_slice(b"\nVmFlags: ");
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
                out.extend_from_slice(name.as_bytes());
            }
        }
        out.push(b'\n');
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
    let mut text = text.into_bytes();
    sums.write(&mut text, true);
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_as_the_formatter_has_them() {
        for value in [0, 1, 9, 10, 15, 16, 255, 4096, 123_456_789, 0x7fff_ffff_f000, u64::MAX] {
            for width in [1, 2, 8, 20] {
                let (mut h, mut d) = (Vec::new(), Vec::new());
                hex(&mut h, value, width);
                decimal(&mut d, value, width);
                assert_eq!(h, format!("{value:0width$x}").into_bytes());
                assert_eq!(d, format!("{value:width$}").into_bytes());
            }
        }
    }
}
