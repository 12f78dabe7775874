//! The vDSO's ELF form: a shared object with the tables that C libraries and language runtimes look symbols up in. Knows
//! nothing of the code.

/// DT_SONAME.
const SONAME: &str = "linux-vdso.so.1";
/// The version of every symbol.
const VERSION: &str = "LINUX_2.6";

/// The System V hash of a name.
fn sysv_hash(name: &str) -> u32 {
    let mut h: u32 = 0;
    for b in name.bytes() {
        h = (h << 4).wrapping_add(u32::from(b));
        let g = h & 0xf000_0000;
        h = (h ^ (g >> 24)) & !g;
    }
    h
}

/// The GNU hash of a name.
fn gnu_hash(name: &str) -> u32 {
    name.bytes().fold(5381, |h: u32, b| h.wrapping_mul(33).wrapping_add(u32::from(b)))
}

/// Bytes under construction.
#[derive(Default)]
struct Image(Vec<u8>);

impl Image {
    fn here(&self) -> u64 {
        self.0.len() as u64
    }
    fn align(&mut self, to: usize) -> u64 {
        while !self.0.len().is_multiple_of(to) {
            self.0.push(0);
        }
        self.here()
    }
    fn u8(&mut self, v: u8) {
        self.0.push(v);
    }
    fn u16(&mut self, v: u16) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
    fn u32(&mut self, v: u32) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
    fn u64(&mut self, v: u64) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
}

/// The string table and where strings are in it.
#[derive(Default)]
struct Strings(Vec<u8>);

impl Strings {
    fn add(&mut self, s: &str) -> u32 {
        if self.0.is_empty() {
            self.0.push(0);
        }
        let at = self.0.len() as u32;
        self.0.extend_from_slice(s.as_bytes());
        self.0.push(0);
        at
    }
}

struct Symbol {
    name: String,
    weak: bool,
    value: u64,
    size: u64,
}

const PHDRS: u16 = 3;

/// The image: tables, then `text` at offset and address `text_at`, whose functions start at the given offsets. None if the tables do
/// not fit before the text.
pub(super) fn build(text_at: u64, text: &[u8], functions: &[(&str, u64)]) -> Option<Vec<u8>> {
    let mut symbols = Vec::new();
    for (i, (name, offset)) in functions.iter().enumerate() {
        let end = functions.get(i + 1).map_or(text.len() as u64, |f| f.1);
        for (prefix, weak) in [("__vdso_", false), ("", true)] {
            symbols.push(Symbol {
                name: format!("{prefix}{name}"),
                weak,
                value: text_at + offset,
                size: end.checked_sub(*offset)?,
            });
        }
    }

    let mut strings = Strings::default();
    let soname = strings.add(SONAME);
    let version = strings.add(VERSION);
    let names: Vec<u32> = symbols.iter().map(|s| strings.add(&s.name)).collect();

    let mut im = Image(vec![0; 64 + 56 * usize::from(PHDRS)]);

    let dynsym = im.align(8);
    im.0.extend_from_slice(&[0; 24]);
    for (s, name) in symbols.iter().zip(&names) {
        im.u32(*name);
        im.u8(if s.weak { 0x22 } else { 0x12 });
        im.u8(0);
        // Defined, in a section that has no header.
        im.u16(1);
        im.u64(s.value);
        im.u64(s.size);
    }

    let dynstr = im.here();
    im.0.extend_from_slice(&strings.0);

    let count = symbols.len() as u32;
    let hash = im.align(8);
    im.u32(1);
    im.u32(count + 1);
    im.u32(1);
    im.u32(0);
    // One bucket: each symbol leads to the next, the last to none.
    for i in 1..=count {
        im.u32(if i == count { 0 } else { i + 1 });
    }

    let gnu = im.align(8);
    im.u32(1);
    im.u32(1);
    im.u32(1);
    im.u32(6);
    let mut bloom: u64 = 0;
    for s in &symbols {
        let h = gnu_hash(&s.name);
        bloom |= 1 << (h % 64) | 1 << ((h >> 6) % 64);
    }
    im.u64(bloom);
    im.u32(1);
    for (i, s) in symbols.iter().enumerate() {
        let h = gnu_hash(&s.name);
        im.u32(if i + 1 == symbols.len() { h | 1 } else { h & !1 });
    }

    let versym = im.align(2);
    im.u16(0);
    for _ in &symbols {
        im.u16(2);
    }

    let verdef = im.align(4);
    for (flags, index, name, text, next) in [(1, 1, soname, SONAME, 28), (0, 2, version, VERSION, 0)] {
        im.u16(1);
        im.u16(flags);
        im.u16(index);
        im.u16(1);
        im.u32(sysv_hash(text));
        im.u32(20);
        im.u32(next);
        im.u32(name);
        im.u32(0);
    }

    let dynamic = im.align(8);
    let entries = [
        (14, u64::from(soname)),
        (4, hash),
        (0x6fff_fef5, gnu),
        (5, dynstr),
        (6, dynsym),
        (10, strings.0.len() as u64),
        (11, 24),
        (0x6fff_fff0, versym),
        (0x6fff_fffc, verdef),
        (0x6fff_fffd, 2),
        (0, 0),
    ];
    for (tag, value) in entries {
        im.u64(tag);
        im.u64(value);
    }
    let dynamic_len = im.here() - dynamic;

    let (eh_hdr, eh_len) = unwind_tables(&mut im, text_at, text.len());

    if im.here() > text_at {
        return None;
    }
    im.0.resize(text_at as usize, 0);
    im.0.extend_from_slice(text);
    let total = im.here();

    let mut head = Image::default();
    head.0.extend_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    head.u16(3);
    head.u16(62);
    head.u32(1);
    head.u64(text_at);
    head.u64(64);
    head.u64(0);
    head.u32(0);
    head.u16(64);
    head.u16(56);
    head.u16(PHDRS);
    head.u16(64);
    head.u16(0);
    head.u16(0);
    for (kind, flags, at, len, align) in
        [(1, 5, 0, total, 4096), (2, 4, dynamic, dynamic_len, 8), (0x6474_e550, 4, eh_hdr, eh_len, 4)]
    {
        head.u32(kind);
        head.u32(flags);
        head.u64(at);
        head.u64(at);
        head.u64(at);
        head.u64(len);
        head.u64(len);
        head.u64(align);
    }
    im.0.get_mut(..head.0.len())?.copy_from_slice(&head.0);
    Some(im.0)
}

/// .eh_frame_hdr and .eh_frame: no function moves the stack pointer, so one entry covers all. Gives the header's place and
/// length.
fn unwind_tables(im: &mut Image, text_at: u64, text_len: usize) -> (u64, u64) {
    let header = im.align(4);
    im.0.extend_from_slice(&[0; 20]);
    let header_len = im.here() - header;
    let frame = im.align(8);
    // CIE: version 1, "zR", addresses relative to themselves; CFA is rsp+8, the return address at CFA-8.
    im.u32(20);
    im.u32(0);
    im.0.extend_from_slice(&[1, b'z', b'R', 0, 1, 0x78, 16, 1, 0x1b, 0x0c, 7, 8, 0x90, 1, 0, 0]);
    let fde = im.here();
    im.u32(20);
    im.u32((fde + 4 - frame) as u32);
    let at = im.here();
    im.u32((text_at as i64 - at as i64) as u32);
    im.u32(text_len as u32);
    im.0.extend_from_slice(&[0; 8]);
    im.u32(0);
    // Header: version 1, encodings, where .eh_frame is, one entry.
    let mut h = Image::default();
    h.0.extend_from_slice(&[1, 0x1b, 0x03, 0x3b]);
    h.u32((frame as i64 - (header as i64 + 4)) as u32);
    h.u32(1);
    h.u32((text_at as i64 - header as i64) as u32);
    h.u32((fde as i64 - header as i64) as u32);
    for (i, chunk) in h.0.chunks(4).enumerate() {
        if let Some(slot) = im.0.get_mut(header as usize + 4 * i..header as usize + 4 * i + 4) {
            slot.copy_from_slice(chunk);
        }
    }
    (header, header_len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_the_known_ones() {
        assert_eq!(sysv_hash("LINUX_2.6"), 0x3ae_75f6);
        assert_eq!(gnu_hash("printf"), 0x156b_2bb8);
    }
}
