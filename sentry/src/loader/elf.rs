//! ELF executables of x86-64: reading headers and mapping segments as Linux's binfmt_elf does. Trusts nothing in the file.
use std::sync::Arc;

use guest_abi::UserAddr;
use guest_abi::layout::{PAGE_SIZE, TASK_SIZE};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::read_at;
use crate::mm::{AddressSpace, MapFlags, MapRequest, MapSource, Prot};
use crate::vfs::File;
use crate::{Errno, Result};

const ET_EXEC: u16 = 2;
const ET_DYN: u16 = 3;
const EM_X86_64: u16 = 62;
const PT_LOAD: u32 = 1;
const PT_INTERP: u32 = 3;
const PT_PHDR: u32 = 6;
const PT_GNU_STACK: u32 = 0x6474_e551;
const PF_X: u32 = 1;
const PF_W: u32 = 2;
const PF_R: u32 = 4;
/// ELFCLASS64, ELFDATA2LSB after the magic.
const IDENT: &[u8] = b"\x7fELF\x02\x01";
/// Program headers may take this many bytes.
const MAX_HEADERS_LEN: usize = 65536;
/// PATH_MAX.
const MAX_INTERP: u64 = 4096;
/// Where position-independent programs go before randomization: two thirds of the address space.
const DYN_BASE: u64 = (TASK_SIZE / 3 * 2) & !(PAGE_SIZE - 1);

/// Bytes of an Elf64_Phdr.
pub(super) const PROGRAM_HEADER_LEN: usize = 56;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct FileHeader {
    ident: [u8; 16],
    kind: u16,
    machine: u16,
    version: u32,
    entry: u64,
    phoff: u64,
    shoff: u64,
    flags: u32,
    ehsize: u16,
    phentsize: u16,
    phnum: u16,
    shentsize: u16,
    shnum: u16,
    shstrndx: u16,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ProgramHeader {
    kind: u32,
    flags: u32,
    offset: u64,
    vaddr: u64,
    paddr: u64,
    filesz: u64,
    memsz: u64,
    align: u64,
}

impl ProgramHeader {
    fn prot(&self) -> Prot {
        let mut prot = Prot::empty();
        prot.set(Prot::READ, self.flags & PF_R != 0);
        prot.set(Prot::WRITE, self.flags & PF_W != 0);
        prot.set(Prot::EXEC, self.flags & PF_X != 0);
        prot
    }
}

/// The headers of a file.
pub(super) struct Header {
    file: FileHeader,
    segments: Vec<ProgramHeader>,
}

impl Header {
    /// Reads them. `bad` (ENOEXEC, or ELIBBAD for an interpreter) where this is no ELF file for this machine.
    pub(super) fn read(file: &Arc<File>, bad: Errno) -> Result<Header> {
        let mut bytes = [0; size_of::<FileHeader>()];
        if read_at(file, 0, &mut bytes)? < bytes.len() {
            return Err(bad);
        }
        let header = FileHeader::read_from_bytes(&bytes).map_err(|_| bad)?;
        if !header.ident.starts_with(IDENT) || header.machine != EM_X86_64 {
            return Err(bad);
        }
        if header.kind != ET_EXEC && header.kind != ET_DYN {
            return Err(bad);
        }
        let len = usize::from(header.phnum) * PROGRAM_HEADER_LEN;
        if usize::from(header.phentsize) != PROGRAM_HEADER_LEN || len == 0 || len > MAX_HEADERS_LEN {
            return Err(bad);
        }
        let mut table = vec![0; len];
        if read_at(file, header.phoff, &mut table)? < len {
            return Err(bad);
        }
        let segments =
            table.chunks_exact(PROGRAM_HEADER_LEN).filter_map(|c| ProgramHeader::read_from_bytes(c).ok()).collect();
        Ok(Header { file: header, segments })
    }

    /// The path of the interpreter (PT_INTERP), if the program has one.
    pub(super) fn interpreter(&self, file: &Arc<File>) -> Result<Option<Vec<u8>>> {
        let Some(segment) = self.segments.iter().find(|s| s.kind == PT_INTERP) else { return Ok(None) };
        if segment.filesz > MAX_INTERP || segment.filesz < 2 {
            return Err(Errno::ENOEXEC);
        }
        let len = usize::try_from(segment.filesz).map_err(|_| Errno::ENOEXEC)?;
        let mut path = vec![0; len];
        if read_at(file, segment.offset, &mut path)? < len {
            return Err(Errno::EIO);
        }
        if path.last() != Some(&0) {
            return Err(Errno::ENOEXEC);
        }
        path.truncate(path.iter().position(|&b| b == 0).unwrap_or(0));
        Ok(Some(path))
    }

    pub(super) fn executable_stack(&self) -> bool {
        self.segments.iter().any(|s| s.kind == PT_GNU_STACK && s.flags & PF_X != 0)
    }

    pub(super) fn program_headers(&self) -> u16 {
        self.file.phnum
    }

    fn loads(&self) -> impl Iterator<Item = &ProgramHeader> {
        self.segments.iter().filter(|s| s.kind == PT_LOAD)
    }

    /// First page and end of all segments, before any bias.
    fn extent(&self) -> Option<(u64, u64)> {
        let first = self.loads().map(|s| s.vaddr).min()? & !(PAGE_SIZE - 1);
        let mut end = 0;
        for s in self.loads() {
            end = end.max(s.vaddr.checked_add(s.memsz)?);
        }
        (end > first).then_some((first, end))
    }

    /// The largest alignment that is a power of two.
    fn alignment(&self) -> u64 {
        self.loads().map(|s| s.align).filter(|a| a.is_power_of_two()).max().unwrap_or(1).max(PAGE_SIZE)
    }

    /// Address of the program headers in memory, before any bias.
    fn headers_at(&self) -> u64 {
        if let Some(s) = self.segments.iter().find(|s| s.kind == PT_PHDR) {
            return s.vaddr;
        }
        let phoff = self.file.phoff;
        let holds = |s: &&ProgramHeader| {
            s.kind == PT_LOAD && phoff.checked_sub(s.offset).is_some_and(|within| within < s.filesz)
        };
        self.segments.iter().find(holds).map_or(0, |s| s.vaddr.wrapping_add(phoff - s.offset))
    }
}

/// Which part of a program a file is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Program { interpreted: bool },
    Interpreter,
}

/// A file that has been mapped.
pub(super) struct Mapped {
    /// What was added to the file's addresses.
    pub bias: u64,
    /// The entry point.
    pub entry: u64,
    /// The program headers.
    pub phdr: u64,
    /// End of the last segment, in whole pages.
    pub brk: u64,
    /// Start and end of code.
    pub code: (u64, u64),
    /// Start and end of data.
    pub data: (u64, u64),
}

/// Maps all segments of `file`.
pub(super) fn map(
    space: &Arc<AddressSpace>,
    file: &Arc<File>,
    header: &Header,
    kind: Kind,
    random: &impl Fn(u32) -> u64,
) -> Result<Mapped> {
    let object = file.ops().mappable().map_err(|_| Errno::ENOEXEC)?;
    let (first, end) =
        header.extent().ok_or(if header.loads().next().is_none() { Errno::ENOEXEC } else { Errno::EINVAL })?;
    let span = (end - first).checked_next_multiple_of(PAGE_SIZE).filter(|&s| s <= TASK_SIZE).ok_or(Errno::ENOMEM)?;
    let bias = if header.file.kind == ET_EXEC && kind != Kind::Interpreter {
        if end > TASK_SIZE {
            return Err(Errno::EINVAL);
        }
        0
    } else if kind == (Kind::Program { interpreted: true }) {
        let align = header.alignment();
        let base = (DYN_BASE + random(28) * PAGE_SIZE) & !(align - 1);
        if base.checked_add(span).is_none_or(|end| end > TASK_SIZE) {
            return Err(Errno::ENOMEM);
        }
        base.wrapping_sub(first)
    } else {
        place(space, span, header.alignment())?.wrapping_sub(first)
    };
    let mut mapped = Mapped {
        bias,
        entry: header.file.entry.wrapping_add(bias),
        phdr: header.headers_at().wrapping_add(bias),
        brk: 0,
        code: (u64::MAX, 0),
        data: (0, 0),
    };
    for s in header.loads() {
        let start = s.vaddr.wrapping_add(bias);
        let memory_end = start.checked_add(s.memsz).filter(|&e| e <= TASK_SIZE).ok_or(Errno::EINVAL)?;
        if s.filesz > s.memsz {
            return Err(Errno::EINVAL);
        }
        let file_end = start + s.filesz;
        map_segment(space, file, &object, s, start)?;
        if s.flags & PF_X != 0 {
            mapped.code.0 = mapped.code.0.min(start);
            mapped.code.1 = mapped.code.1.max(file_end);
        }
        mapped.data.0 = mapped.data.0.max(start);
        mapped.data.1 = mapped.data.1.max(file_end);
        mapped.brk = mapped.brk.max(memory_end.next_multiple_of(PAGE_SIZE));
    }
    if mapped.code.0 == u64::MAX {
        mapped.code = (0, 0);
    }
    Ok(mapped)
}

/// A free place for `span` bytes, aligned, where mmap(2) would put them.
fn place(space: &Arc<AddressSpace>, span: u64, align: u64) -> Result<u64> {
    let len = span.checked_add(align - PAGE_SIZE).ok_or(Errno::ENOMEM)?;
    let request = MapRequest {
        addr: UserAddr::NULL,
        len,
        prot: Prot::empty(),
        flags: MapFlags::NORESERVE,
        source: MapSource::Anonymous,
    };
    let at = space.map(request)?;
    space.unmap(at, len)?;
    // As high as possible: below the top of what was found.
    Ok((at.0 + len - span) & !(align - 1))
}

fn map_segment(
    space: &Arc<AddressSpace>,
    file: &Arc<File>,
    object: &Arc<dyn crate::mm::Mappable>,
    s: &ProgramHeader,
    start: u64,
) -> Result<()> {
    let page = start & !(PAGE_SIZE - 1);
    let within = start - page;
    let file_end = start + s.filesz;
    let memory_end = start + s.memsz;
    let mut zeroes_from = page;
    if s.filesz > 0 {
        let offset = s.offset.wrapping_sub(within);
        if !offset.is_multiple_of(PAGE_SIZE) || s.offset < within {
            return Err(Errno::EINVAL);
        }
        let len = (s.filesz + within).next_multiple_of(PAGE_SIZE);
        if offset.checked_add(len).is_none() {
            return Err(Errno::EINVAL);
        }
        space.map(MapRequest {
            addr: UserAddr(page),
            len,
            prot: s.prot(),
            flags: MapFlags::FIXED | MapFlags::LIBRARY,
            source: MapSource::File { object: object.clone(), offset, file: Some(file.clone()), may_write: false },
        })?;
        zeroes_from = page + len;
        if s.memsz > s.filesz && s.flags & PF_W != 0 {
            // The rest of the last page of the file is not the program's.
            let len = usize::try_from(zeroes_from - file_end).map_err(|_| Errno::EFAULT)?;
            if space.zero_partial(UserAddr(file_end), len) < len {
                return Err(Errno::EFAULT);
            }
        }
    }
    let zeroes_to = memory_end.next_multiple_of(PAGE_SIZE);
    if zeroes_to > zeroes_from {
        space.map(MapRequest {
            addr: UserAddr(zeroes_from),
            len: zeroes_to - zeroes_from,
            prot: s.prot(),
            flags: MapFlags::FIXED,
            source: MapSource::Anonymous,
        })?;
    }
    Ok(())
}
