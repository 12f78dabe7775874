//! Program loading: ELF, `#!` scripts, the initial stack, the vDSO. Owns the image; never the task it goes into.
use core::sync::atomic::Ordering;
use std::sync::Arc;

use guest_abi::UserAddr;
use linux_raw_sys::auxvec;

use crate::mm::{AddressSpace, IoDest, MapFlags, MapRequest, MapSource, Prot, SpaceLimits};
use crate::ns::time::Offsets;
use crate::ns::user::{Caps, Credentials};
use crate::platform::{Platform, UserContext};
use crate::task::limits::Resource;
use crate::task::thread_group::Image;
use crate::task::{Task, rseq};
use crate::vfs::attr::{S_ISGID, S_ISUID};
use crate::vfs::path::{Lookup, LookupFlags, open_exec};
use crate::vfs::{File, MountFlags};
use crate::{Errno, Result};

mod elf;
mod script;
mod stack;
#[cfg(test)]
mod tests;
pub mod vdso;
mod vdso_elf;
mod vvar;

use vdso::Vdso;

/// personality(2).
const ADDR_NO_RANDOMIZE: u64 = 0x0004_0000;

/// Interpreters of interpreters followed before ELOOP.
const MAX_INTERPRETERS: usize = 5;

/// RFLAGS of a new program: interrupts on, and the bit that is always set.
const INITIAL_RFLAGS: u64 = 0x202;

/// What execve(2) asks for.
pub struct LoadRequest<'a> {
    /// Who executes: opens interpreters, gives credentials, limits, file-system context and platform.
    pub task: &'a Arc<Task>,
    /// The program, opened for execution.
    pub file: Arc<File>,
    /// Its path as given (AT_EXECFN, the argument of a script's interpreter).
    pub path: Vec<u8>,
    /// Arguments.
    pub argv: Vec<Vec<u8>>,
    /// Environment.
    pub envp: Vec<Vec<u8>>,
}

/// A program ready to run.
pub struct Loaded {
    /// Its memory.
    pub space: Arc<AddressSpace>,
    /// Its first registers.
    pub context: UserContext,
    /// What /proc shows of it.
    pub image: Image,
    /// Last component of the path that was executed, for PR_GET_NAME.
    pub comm: Vec<u8>,
    /// What it runs as.
    pub credentials: Credentials,
    /// Whether it runs as somebody other than its caller (AT_SECURE).
    pub secure: bool,
    /// Whether it was traced, when that was decided, by somebody who cannot trace everything.
    pub watched: bool,
}

/// The owner and group that the set-id bits of `file` ask for, where they count (execve(2)).
fn set_ids(file: &File, caller: &Credentials) -> (Option<u32>, Option<u32>) {
    let Some(path) = file.path() else { return (None, None) };
    if caller.no_new_privs || path.mount.flags().contains(MountFlags::NOSUID) {
        return (None, None);
    }
    let Ok((mode, uid, gid)) = path.inode().access_attr() else { return (None, None) };
    const S_IXGRP: u32 = 0o010;
    // Set-id bits speak of users whom the caller's user namespace knows, on a mount that is its own (mnt_may_suid in Linux).
    let within = path.mount.namespace().is_none_or(|ns| caller.user_ns.is_within(&ns.owner.user_ns));
    if !within || !caller.user_ns.knows(uid, gid) {
        return (None, None);
    }
    let by_group = S_ISGID | S_IXGRP;
    ((mode & S_ISUID != 0).then_some(uid), (mode & by_group == by_group).then_some(gid))
}

/// Builds a program's address space. The caller's own is not touched, so that an error leaves it as it was. ENOEXEC, ELIBBAD, EACCES,
/// ELOOP (too many interpreters), ENOMEM, E2BIG as execve(2).
pub fn load(request: LoadRequest<'_>) -> Result<Loaded> {
    let task = request.task;
    let credentials = task.credentials();
    let cx = Lookup::new(task.fs().get(), &**task);
    let open = |path: &[u8]| open_exec(&cx, None, path, LookupFlags::FOLLOW);
    load_program(Program {
        platform: &task.kernel().platform,
        file: request.file,
        path: &request.path,
        argv: request.argv,
        envp: request.envp,
        credentials: &credentials,
        watched: task.tracing.tracer().is_some_and(|t| !t.credentials().has_in(&credentials.user_ns, Caps::SYS_PTRACE)),
        limits: space_limits(task),
        randomize: task.group().personality.load(Ordering::Relaxed) & ADDR_NO_RANDOMIZE == 0,
        time_offsets: task.time_offsets(),
        vdso: task.kernel().vdso.as_ref(),
        open: &open,
    })
}

/// The limits that the memory of `task`'s process obeys now.
pub fn space_limits(task: &Task) -> SpaceLimits {
    SpaceLimits {
        address_space: task.limit(Resource::As),
        data: task.limit(Resource::Data),
        stack: task.limit(Resource::Stack),
        memlock: task.limit(Resource::Memlock),
    }
}

/// A program to load, whoever runs it.
pub struct Program<'a> {
    /// The machine.
    pub platform: &'a Arc<dyn Platform>,
    /// The program, opened for execution.
    pub file: Arc<File>,
    /// Its path as given.
    pub path: &'a [u8],
    /// Arguments.
    pub argv: Vec<Vec<u8>>,
    /// Environment.
    pub envp: Vec<Vec<u8>>,
    /// Credentials of the caller.
    pub credentials: &'a Credentials,
    /// A tracer would control what set-id bits make of the caller: they count only if the caller could do so by itself.
    pub watched: bool,
    /// Limits of the space.
    pub limits: SpaceLimits,
    /// How far its clocks are from the machine's.
    pub time_offsets: Offsets,
    /// The vDSO to map.
    pub vdso: Option<&'a Vdso>,
    /// Whether addresses are random (not under ADDR_NO_RANDOMIZE).
    pub randomize: bool,
    /// Opens interpreters for execution.
    pub open: &'a dyn Fn(&[u8]) -> Result<Arc<File>>,
}

/// As [`load`], for a caller that is not a task.
pub fn load_program(mut program: Program<'_>) -> Result<Loaded> {
    if program.argv.is_empty() {
        // Since Linux 5.18 a program finds an empty argv[0] rather than none.
        program.argv.push(Vec::new());
    }
    let mut file = program.file;
    let mut path = program.path.to_vec();
    for depth in 0.. {
        let head = read_head(&file)?;
        let Some(interpreter) = script::parse(&head)? else { break };
        if depth >= MAX_INTERPRETERS {
            return Err(Errno::ELOOP);
        }
        script::rewrite(&mut program.argv, &interpreter, path);
        file = (program.open)(&interpreter.path)?;
        path = interpreter.path;
    }
    let budget = stack::check_sizes(&program.argv, &program.envp, program.path, program.limits.stack)?;
    let header = elf::Header::read(&file, Errno::ENOEXEC)?;
    let interpreter = match header.interpreter(&file)? {
        Some(path) => Some((program.open)(&path)?),
        None => None,
    };
    let interpreter = match interpreter {
        Some(file) => {
            let header = elf::Header::read(&file, Errno::ELIBBAD)?;
            Some((file, header))
        }
        None => None,
    };

    let space = AddressSpace::with_layout(program.platform, program.limits, program.randomize)?;
    let random = |bits: u32| {
        let mut bytes = [0; 8];
        if program.randomize {
            program.platform.random(&mut bytes);
        }
        u64::from_le_bytes(bytes) & ((1 << bits) - 1)
    };
    // The stack first: its place is fixed, everything else goes around it.
    let stack = stack::Stack::map(&space, budget, header.executable_stack(), program.limits.stack, &random)?;
    let main = elf::map(&space, &file, &header, elf::Kind::Program { interpreted: interpreter.is_some() }, &random)?;
    let (entry, base) = match &interpreter {
        Some((file, header)) => {
            let linker = elf::map(&space, file, header, elf::Kind::Interpreter, &random)?;
            (linker.entry, linker.bias)
        }
        None => (main.entry, 0),
    };
    if entry >= guest_abi::layout::TASK_SIZE {
        return Err(Errno::EINVAL);
    }
    let vdso = program.vdso.map(|v| map_vdso(&space, v)).transpose()?;
    if let Some(v) = program.vdso {
        space.change_image(|image| image.vdso = vdso.unwrap_or(0));
        v.follow(&space, program.time_offsets);
    }
    // As arch_randomize_brk: up to 1 GiB above the program's end.
    let brk = main.brk + random(18) * guest_abi::layout::PAGE_SIZE;
    space.set_brk_base(UserAddr(brk));

    let ignored = program.watched && !program.credentials.has_in_own(Caps::SETUID);
    let (uid, gid) = if ignored { (None, None) } else { set_ids(&file, program.credentials) };
    let (c, secure) = program.credentials.for_exec(uid, gid);
    let (hwcap, hwcap2) = program.platform.hwcap();
    // The frame of a signal handler: the vector state, its marker, and the fixed part.
    let signal_frame = (program.platform.xsave_len() as u64 + 936).next_multiple_of(16);
    let mut auxv: Vec<(u32, u64)> = Vec::with_capacity(24);
    if let Some(at) = vdso {
        auxv.push((auxvec::AT_SYSINFO_EHDR, at));
    }
    auxv.extend([
        (auxvec::AT_MINSIGSTKSZ, signal_frame),
        (auxvec::AT_HWCAP, hwcap),
        (auxvec::AT_PAGESZ, guest_abi::layout::PAGE_SIZE),
        (auxvec::AT_CLKTCK, 100),
        (auxvec::AT_PHDR, main.phdr),
        (auxvec::AT_PHENT, elf::PROGRAM_HEADER_LEN as u64),
        (auxvec::AT_PHNUM, header.program_headers() as u64),
        (auxvec::AT_BASE, base),
        (auxvec::AT_FLAGS, 0),
        (auxvec::AT_ENTRY, main.entry),
        (auxvec::AT_UID, c.user_ns.shown_user(c.uid).into()),
        (auxvec::AT_EUID, c.user_ns.shown_user(c.euid).into()),
        (auxvec::AT_GID, c.user_ns.shown_group(c.gid).into()),
        (auxvec::AT_EGID, c.user_ns.shown_group(c.egid).into()),
        (auxvec::AT_SECURE, secure.into()),
        (auxvec::AT_HWCAP2, hwcap2),
        (auxvec::AT_RSEQ_FEATURE_SIZE, rseq::FEATURE_SIZE.into()),
        (auxvec::AT_RSEQ_ALIGN, rseq::ALIGN.into()),
    ]);
    let mut seed = [0; 16];
    program.platform.random(&mut seed);
    let strings = stack::Strings { argv: &program.argv, envp: &program.envp, path: program.path, random: seed };
    let laid = stack.fill(&space, &strings, auxv, &random)?;

    space.change_image(|image| {
        image.start_code = main.code.0;
        image.end_code = main.code.1;
        image.start_data = main.data.0;
        image.end_data = main.data.1;
        image.start_stack = laid.pointer;
        (image.arg_start, image.arg_end) = laid.args;
        (image.env_start, image.env_end) = laid.env;
        image.auxv.clone_from(&laid.auxv);
        image.user_ns = Some(program.credentials.user_ns.clone());
        image.vdso = vdso.unwrap_or(0);
    });
    space.set_exe(Some(file.clone()));
    let context =
        UserContext { rip: entry, rsp: laid.pointer, rflags: INITIAL_RFLAGS, orig_rax: u64::MAX, ..Default::default() };
    let name = program.path.rsplit(|&b| b == b'/').next().unwrap_or_default();
    Ok(Loaded {
        space,
        context,
        image: Image {
            exe: Some(file),
            args: laid.args,
            env: laid.env,
            auxv: laid.auxv.iter().flat_map(|word| word.to_le_bytes()).collect(),
            stack_top: laid.pointer,
        },
        comm: name.iter().copied().take(15).collect(),
        credentials: c,
        secure,
        watched: program.watched,
    })
}

/// Maps `[vvar]` and `[vdso]`; the address of the latter's ELF header.
fn map_vdso(space: &Arc<AddressSpace>, vdso: &Vdso) -> Result<u64> {
    let (vvar, code) = (vdso.vvar_len(), vdso.code_len());
    let map = |addr, len, prot, flags, source| space.map(MapRequest { addr, len, prot, flags, source });
    // One hole for both: the code knows where its parameters are from where it is itself.
    let hole = map(UserAddr::NULL, vvar + code, Prot::empty(), MapFlags::NORESERVE, MapSource::Anonymous)?;
    map(hole, vvar, Prot::READ, MapFlags::FIXED, vdso.vvar_source())?;
    let at = hole.wrapping_add(vvar);
    map(at, code, Prot::READ | Prot::EXEC, MapFlags::FIXED, vdso.code_source())?;
    Ok(at.0)
}

/// The first 256 bytes of a file, zeroes past its end.
fn read_head(file: &Arc<File>) -> Result<[u8; script::LINE]> {
    let mut head = [0; script::LINE];
    read_at(file, 0, &mut head)?;
    Ok(head)
}

/// Reads until `buf` is full or the file ends; gives the bytes read.
fn read_at(file: &Arc<File>, pos: u64, buf: &mut [u8]) -> Result<usize> {
    let mut done = 0;
    while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let at = pos.checked_add(done as u64).ok_or(Errno::EINVAL)?;
        match file.ops().read(file, &mut IoDest::kernel(rest), at)? {
            0 => break,
            n => done += n,
        }
    }
    Ok(done)
}
