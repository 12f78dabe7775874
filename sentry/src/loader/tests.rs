//! Made-up ELF files on the simulated platform.
use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use guest_abi::{UserAddr, UserPtr};

use super::*;
use crate::mm::backing::MappedPage;
use crate::mm::{IoDest, MapSource, Mappable, Prot};
use crate::platform::PhysAddr;
use crate::platform::host::Window;
use crate::platform::sim::{SimPlatform, SimWindow};
use crate::vfs::{FileOps, OpenFlags};

struct Bytes {
    content: Vec<u8>,
    window: Arc<SimWindow>,
}

impl FileOps for Bytes {
    fn read(&self, _file: &File, dst: &mut IoDest<'_>, pos: u64) -> Result<usize> {
        let rest = self.content.get(pos as usize..).unwrap_or_default();
        let n = rest.len().min(dst.remaining());
        dst.put(&rest[..n])
    }
    fn mappable(&self) -> Result<Arc<dyn Mappable>> {
        Ok(Arc::new(Shown { window: self.window.clone(), len: self.content.len() as u64 }))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct Shown {
    window: Arc<SimWindow>,
    len: u64,
}

impl Mappable for Shown {
    fn key(&self) -> (u64, u64) {
        (1, self.window.base().0)
    }
    fn page(&self, offset: u64, _write: bool) -> Result<MappedPage> {
        if offset >= self.len {
            return Err(Errno::EFAULT);
        }
        let base = self.window.base();
        let run = (0, base, self.len.div_ceil(4096) as usize);
        Ok(MappedPage::Window { pa: PhysAddr(base.0 + offset), run, keep: self.window.clone() })
    }
    fn size(&self) -> u64 {
        self.len
    }
    fn add_mapper(&self, _space: &Arc<AddressSpace>) {}
}

fn segment(kind: u32, flags: u32, offset: u64, vaddr: u64, filesz: u64, memsz: u64) -> Vec<u8> {
    let mut bytes = [kind.to_le_bytes(), flags.to_le_bytes()].concat();
    for word in [offset, vaddr, vaddr, filesz, memsz, 4096] {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

/// An ELF file of `len` bytes, 0xAA after its headers; `interp` is put at 0xf00.
fn elf(kind: u16, entry: u64, segments: &[Vec<u8>], len: usize, interp: &[u8]) -> Vec<u8> {
    let mut f = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    f.extend(kind.to_le_bytes());
    f.extend(62u16.to_le_bytes());
    f.extend(1u32.to_le_bytes());
    for word in [entry, 64, 0] {
        f.extend(word.to_le_bytes());
    }
    f.extend(0u32.to_le_bytes());
    for half in [64u16, 56, segments.len() as u16, 0, 0, 0] {
        f.extend(half.to_le_bytes());
    }
    f.extend(segments.concat());
    f.resize(len, 0xaa);
    if len >= 0x1000 {
        f[0xf00..0xf00 + interp.len()].copy_from_slice(interp);
    }
    f
}

struct Disk {
    platform: Arc<SimPlatform>,
    files: HashMap<Vec<u8>, Vec<u8>>,
}

impl Disk {
    fn new(files: &[(&str, Vec<u8>)]) -> Disk {
        let files = files.iter().map(|(name, content)| (name.as_bytes().to_vec(), content.clone())).collect();
        Disk { platform: SimPlatform::new(1), files }
    }

    fn open(&self, path: &[u8]) -> Result<Arc<File>> {
        let content = self.files.get(path).ok_or(Errno::ENOENT)?.clone();
        let window = self.platform.sim_memory().window(&content);
        Ok(File::new(Arc::new(Bytes { content, window }), None, OpenFlags::empty()))
    }

    fn load(&self, path: &str, argv: &[&str]) -> Result<Loaded> {
        let platform: Arc<dyn Platform> = self.platform.clone();
        load_program(Program {
            time_offsets: crate::ns::time::Offsets::default(),
            platform: &platform,
            file: self.open(path.as_bytes())?,
            path: path.as_bytes(),
            argv: argv.iter().map(|a| a.as_bytes().to_vec()).collect(),
            envp: vec![b"A=1".to_vec()],
            watched: false,
            credentials: &Credentials::new(1000, 100, Vec::new()),
            limits: SpaceLimits::default(),
            vdso: None,
            randomize: true,
            open: &|path| self.open(path),
        })
    }
}

fn auxv(loaded: &Loaded, kind: u32) -> Option<u64> {
    let words = loaded.space.image().auxv;
    words.chunks(2).find(|w| w[0] == u64::from(kind)).map(|w| w[1])
}

fn word(space: &Arc<AddressSpace>, addr: u64) -> u64 {
    space.read(UserPtr::new(UserAddr(addr))).unwrap()
}

#[test]
fn a_static_program_lies_where_it_says() {
    let segments = [segment(1, 5, 0, 0x40_0000, 0x1800, 0x1800), segment(1, 6, 0x1800, 0x40_2800, 0x100, 0x3000)];
    let disk = Disk::new(&[("/bin/p", elf(2, 0x40_1000, &segments, 0x1900, b""))]);
    let l = disk.load("/bin/p", &["p", "x"]).unwrap();
    assert_eq!((l.context.rip, l.comm.as_slice()), (0x40_1000, &b"p"[..]));
    assert_eq!(word(&l.space, 0x40_28f8), 0xaaaa_aaaa_aaaa_aaaa);
    assert_eq!((word(&l.space, 0x40_2900), word(&l.space, 0x40_57f0)), (0, 0));
    assert_eq!(l.space.fault(UserAddr(0x40_6000), false, false), Err(crate::mm::FaultSignal::NotMapped));
    assert_eq!(auxv(&l, auxvec::AT_PHDR), Some(0x40_0040));
    let sp = l.context.rsp;
    assert_eq!((sp % 16, word(&l.space, sp), word(&l.space, sp + 24)), (0, 2, 0));
    let text = |at: u64| l.space.read_cstr(UserAddr(word(&l.space, at)), 100, Errno::EIO).unwrap();
    assert_eq!((text(sp + 8), text(sp + 16), text(sp + 32)), (b"p".to_vec(), b"x".to_vec(), b"A=1".to_vec()));
    let name = UserAddr(auxv(&l, auxvec::AT_EXECFN).unwrap());
    assert_eq!(l.space.read_cstr(name, 100, Errno::EIO).unwrap(), b"/bin/p");
    let stack = l.space.maps(false).pop().unwrap();
    assert_eq!((stack.name.as_slice(), stack.prot), (&b"[stack]"[..], Prot::READ | Prot::WRITE));
}

#[test]
fn a_dynamic_program_starts_in_its_interpreter() {
    let program =
        [segment(3, 4, 0xf00, 0xf00, 7, 7), segment(1, 5, 0, 0, 0x1000, 0x1000), segment(6, 4, 64, 64, 168, 168)];
    let linker = [segment(1, 5, 0, 0, 0x2000, 0x2000)];
    let disk = Disk::new(&[
        ("/p", elf(3, 0x800, &program, 0x1000, b"/ld.so\0")),
        ("/ld.so", elf(3, 0x123, &linker, 0x2000, b"")),
    ]);
    let l = disk.load("/p", &[]).unwrap();
    let base = auxv(&l, auxvec::AT_BASE).unwrap();
    assert_eq!(l.context.rip, base + 0x123);
    let entry = auxv(&l, auxvec::AT_ENTRY).unwrap();
    assert_eq!((entry % 4096, auxv(&l, auxvec::AT_PHDR)), (0x800, Some(entry - 0x800 + 64)));
    let maps = l.space.maps(false);
    assert!(matches!(&maps[0].source, MapSource::File { .. }) && maps[0].start == entry - 0x800);
    // No argument at all becomes an empty one.
    assert_eq!(word(&l.space, l.context.rsp), 1);
}

#[test]
fn scripts_lead_to_their_interpreter() {
    let segments = [segment(1, 5, 0, 0x40_0000, 0x1000, 0x1000)];
    let mut files = vec![("/sh", elf(2, 0x40_0000, &segments, 0x1000, b"")), ("/s", b"#!/sh -e\n".to_vec())];
    files.push(("/loop", b"#!/loop\n".to_vec()));
    let disk = Disk::new(&files);
    let l = disk.load("/s", &["ignored", "1"]).unwrap();
    let sp = l.context.rsp;
    let args: Vec<_> = (0..word(&l.space, sp))
        .map(|i| l.space.read_cstr(UserAddr(word(&l.space, sp + 8 + 8 * i)), 99, Errno::EIO).unwrap())
        .collect();
    assert_eq!(args, [b"/sh".to_vec(), b"-e".to_vec(), b"/s".to_vec(), b"1".to_vec()]);
    assert_eq!(l.comm, b"s");
    assert_eq!(disk.load("/loop", &[]).err(), Some(Errno::ELOOP));
}

#[test]
fn bad_files_are_refused() {
    let seg = |s: Vec<u8>| elf(2, 0x40_0000, &[s], 0x1000, b"");
    let good = segment(1, 5, 0, 0x40_0000, 0x1000, 0x1000);
    let mut wrong_machine = seg(good.clone());
    wrong_machine[18] = 3;
    let mut class32 = seg(good.clone());
    class32[4] = 1;
    let cases: [(Vec<u8>, Errno); 9] = [
        (b"hello".to_vec(), Errno::ENOEXEC),
        (Vec::new(), Errno::ENOEXEC),
        (wrong_machine, Errno::ENOEXEC),
        (class32, Errno::ENOEXEC),
        (seg(good)[..100].to_vec(), Errno::ENOEXEC),
        (seg(segment(1, 5, 0, 0x40_0000, 0x1000, 0x100)), Errno::EINVAL),
        (seg(segment(1, 5, 0, u64::MAX - 10, 1, 1)), Errno::EINVAL),
        (seg(segment(1, 5, 1, 0x40_0000, 0x100, 0x100)), Errno::EINVAL),
        (seg(segment(3, 5, 0, 0, 1, 1)), Errno::ENOEXEC),
    ];
    for (i, (content, errno)) in cases.into_iter().enumerate() {
        assert_eq!(Disk::new(&[("/p", content)]).load("/p", &["p"]).err(), Some(errno), "case {i}");
    }
    let long = "x".repeat(131_072);
    let fine = elf(2, 0x40_0000, &[segment(1, 5, 0, 0x40_0000, 0x1000, 0x1000)], 0x1000, b"");
    assert_eq!(Disk::new(&[("/p", fine)]).load("/p", &[&long]).err(), Some(Errno::E2BIG));
}
