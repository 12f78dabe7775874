//! The traits between the sentry and the machine. The vmm implements them over KVM; tests implement them in plain memory.
//! This module holds types and traits only, never behaviour.
use core::any::Any;
use std::sync::Arc;

use bitflags::bitflags;
use guest_abi::Errno;

pub mod host;
#[cfg(any(test, feature = "sim"))]
pub mod sim;

/// A guest-physical address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PhysAddr(pub u64);

/// A range of guest-physical memory inside one contiguous host mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PhysRange {
    /// First byte.
    pub addr: PhysAddr,
    /// Bytes.
    pub len: usize,
}

/// The registers of a guest thread as the program sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct UserContext {
    pub rax: u64,
    pub rbx: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub rbp: u64,
    pub rsp: u64,
    pub r8: u64,
    pub r9: u64,
    pub r10: u64,
    pub r11: u64,
    pub r12: u64,
    pub r13: u64,
    pub r14: u64,
    pub r15: u64,
    pub rip: u64,
    pub rflags: u64,
    pub fs_base: u64,
    pub gs_base: u64,
    /// The system call number while one is being served or may yet restart; u64::MAX otherwise.
    pub orig_rax: u64,
}

/// Why the guest stopped running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// A SYSCALL instruction. `rip` is the instruction after it; `rcx` and `r11` hold rip and rflags as on hardware;
    /// `rax` holds the number.
    Syscall,
    /// A processor exception with Linux's view of it. `rip` is at the faulting instruction, or after a trap (#BP, #OF, #DB).
    /// `int n` that hardware turns into #GP is reported as #GP on every KVM.
    Exception {
        /// 0..=31, Intel SDM volume 3, table 6-1.
        vector: u8,
        /// The error code, 0 where the vector has none.
        error: u32,
        /// CR2, for #PF.
        cr2: u64,
    },
    /// Kicked: look at signals and the run queue.
    Interrupted,
    /// The host could not supply the memory behind a present entry (a truncated file window, host memory exhausted).
    BusError {
        /// The guest-physical address where KVM tells it.
        at: Option<PhysAddr>,
        /// The address the program used, where the instruction shows it.
        va: Option<u64>,
    },
    /// The virtual CPU cannot go on (KVM's own error). The text names it. The task is to be killed.
    Broken(&'static str),
}

bitflags! {
    /// Rights and properties of a leaf page-table entry. Present entries are always readable.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct PteFlags: u16 {
        /// Writable.
        const WRITE = 1;
        /// Executable.
        const EXEC = 2;
        /// The entry owns one reference to the frame; without it the address is borrowed (a file window).
        const OWNED = 4;
        /// Not accessible by the program though kept (PROT_NONE over populated memory): stored as a non-present entry.
        const NONE = 8;
        /// The frame belongs to a mapped object (a tmpfs page, shared memory), not to this space alone: a fork does not
        /// write-protect it.
        const OBJECT = 16;
        /// The frame is a private copy of program text in which call sites are direct ([`DirectCalls`]).
        const PATCHED = 32;
        /// The frame holds trampolines of such sites; it is in no VMA.
        const TRAMPOLINES = 64;
    }
}

/// Memory that an instruction touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// It writes there.
    pub write: bool,
}

/// A 4 KiB leaf entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pte {
    /// Page-aligned.
    pub pa: PhysAddr,
    /// Rights.
    pub flags: PteFlags,
}

/// A region that a fork left to its child as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bequest {
    /// First address.
    pub start: u64,
    /// End, exclusive.
    pub end: u64,
    /// Present pages whose frames belong to the space and its forks alone.
    pub private: u64,
    /// Other present pages.
    pub others: u64,
}

/// The page tables of one address space. The VMA tree is the truth; this is its cache. Callers serialize changes to one
/// address by the address space's lock; lookups may race with changes elsewhere.
pub trait GuestSpace: Send + Sync + Any {
    /// The entry that maps `va`, if any (entries with NONE included).
    fn lookup(&self, va: u64) -> Option<Pte>;

    /// Stores an entry that was absent, or gives an entry with the same `pa` more rights. No shootdown is needed or done.
    /// ENOMEM when no page-table page can be had.
    fn map(&self, va: u64, pte: Pte) -> Result<(), Errno>;

    /// Stores entries for `count` consecutive pages from `va` and `pa` on, as `map`, and stops before the first one that is
    /// present already (or when no page-table page can be had). Gives the number stored.
    fn map_run(&self, va: u64, pa: PhysAddr, count: usize, flags: PteFlags) -> usize {
        for i in 0..count {
            let at = i as u64 * guest_abi::layout::PAGE_SIZE;
            let pte = Pte { pa: PhysAddr(pa.0 + at), flags };
            if self.lookup(va + at).is_some() || self.map(va + at, pte).is_err() {
                return i;
            }
        }
        count
    }

    /// Visits every stored entry in `start..end` (page-aligned, ascending) and stores what `visit` answers (None clears).
    /// Cost is in proportion to page-table pages present, not to the range. Before it returns, no vCPU can use an old
    /// translation of an entry that was removed, moved or lost rights: frames taken out may be released after it.
    fn update(&self, start: u64, end: u64, visit: &mut dyn FnMut(u64, Pte) -> Option<Pte>);

    /// Visits every stored entry in `start..end` without changing any; the last argument says whether forks share the whole
    /// region, so that the frame's references do not tell.
    fn visit(&self, start: u64, end: u64, visit: &mut dyn FnMut(u64, Pte, bool)) {
        self.update(start, end, &mut |va, pte| {
            visit(va, pte, false);
            Some(pte)
        });
    }

    /// For fork(2): leaves densely used regions to `child`, a fresh space that nobody has entered, without copying their entries,
    /// where `may` admits the range. Their private pages are write-protected here and count as shared by both until one side
    /// changes the region. What is not given is to be copied by the caller.
    fn bequeath(&self, child: &dyn GuestSpace, may: &mut dyn FnMut(u64, u64) -> bool) -> Vec<Bequest> {
        let _ = (child, may);
        Vec::new()
    }

    /// Makes the region of `va` this space's own if a fork left it here (gives whether it did), or, for `write`, if forks look
    /// at it: from then on the processor finds its entries, and references to its frames count.
    fn own(&self, va: u64, write: bool) -> bool {
        let _ = (va, write);
        false
    }

    /// Takes out regions wholly inside `start..end` that forks share, as `update` would, without a visit: the references go with
    /// them. Gives how many pages of private frames and how many others these were.
    fn renounce(&self, start: u64, end: u64) -> (u64, u64) {
        let _ = (start, end);
        (0, 0)
    }

    /// Takes every entry out of a space that no vCPU is in or will ever enter again: as `update`, but nobody needs to be told.
    fn drain(&self, visit: &mut dyn FnMut(u64, Pte)) {
        self.update(0, guest_abi::layout::TASK_SIZE, &mut |va, pte| {
            visit(va, pte);
            None
        });
    }

    /// For the platform's own downcast.
    fn as_any(&self) -> &dyn Any;
}

/// What the sentry keeps its own memory for, as /proc/meminfo tells it apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum KernelMemory {
    /// Objects: descriptions, inodes, names, VMAs, signals (Slab).
    Slab,
    /// Tasks (KernelStack).
    Task,
    /// Bytes in flight in pipes and sockets.
    Buffer,
}

impl KernelMemory {
    /// How many purposes there are.
    pub const COUNT: usize = 3;
    /// All of them.
    pub const ALL: [KernelMemory; Self::COUNT] = [KernelMemory::Slab, KernelMemory::Task, KernelMemory::Buffer];
}

/// Guest-physical memory: reference-counted 4 KiB frames, and byte access to frames and windows.
///
/// Access never faults the host: memory that the host cannot supply gives EFAULT.
pub trait Memory: Send + Sync {
    /// A zeroed frame with one reference. ENOMEM beyond the sandbox's limit.
    fn alloc(&self) -> Result<PhysAddr, Errno>;

    /// `count` frames at consecutive addresses where possible: appends whole runs `(start, pages)` to `out` until `count`
    /// pages are had; all zeroed and populated, one reference each. On ENOMEM nothing is appended.
    fn alloc_many(&self, count: usize, out: &mut Vec<(PhysAddr, usize)>) -> Result<(), Errno>;

    /// One more reference to an allocated frame.
    fn share(&self, pa: PhysAddr);

    /// One reference less for each; the last one frees the frame.
    fn release(&self, frames: &[PhysAddr]);

    /// References to a frame.
    fn references(&self, pa: PhysAddr) -> u32;

    /// Copies out of memory; may cross frames that are contiguous.
    fn read(&self, pa: PhysAddr, buf: &mut [u8]) -> Result<(), Errno>;

    /// Copies into memory.
    fn write(&self, pa: PhysAddr, buf: &[u8]) -> Result<(), Errno>;

    /// Zeroes memory.
    fn zero(&self, pa: PhysAddr, len: usize) -> Result<(), Errno>;

    /// Copies one page.
    fn copy_page(&self, from: PhysAddr, to: PhysAddr) -> Result<(), Errno>;

    /// Copies bytes from memory to memory.
    fn copy(&self, from: PhysAddr, to: PhysAddr, len: usize) -> Result<(), Errno> {
        let mut page = [0; 4096];
        let mut done = 0;
        while done < len {
            let n = (len - done).min(page.len());
            let buf = page.get_mut(..n).ok_or(Errno::EFAULT)?;
            self.read(PhysAddr(from.0 + done as u64), buf)?;
            self.write(PhysAddr(to.0 + done as u64), buf)?;
            done += n;
        }
        Ok(())
    }

    /// Atomically loads an aligned u32 (sequentially consistent).
    fn load_u32(&self, pa: PhysAddr) -> Result<u32, Errno>;

    /// Atomically replaces an aligned u32 if it equals `old`; gives the value found.
    fn compare_exchange_u32(&self, pa: PhysAddr, old: u32, new: u32) -> Result<u32, Errno>;

    /// Counts `bytes` of the sentry's own memory against the sandbox's limit; `mm::Charge` is how it is used. ENOMEM beyond
    /// the limit. Takes no lock: the caller may hold any.
    fn charge(&self, what: KernelMemory, bytes: u64) -> Result<(), Errno>;

    /// Gives back what `charge` took.
    fn uncharge(&self, what: KernelMemory, bytes: u64);

    /// Bytes charged for one purpose now.
    fn charged(&self, what: KernelMemory) -> u64;

    /// Bytes in allocated frames and charged now.
    fn used(&self) -> u64;

    /// The largest `used` so far.
    fn peak(&self) -> u64;

    /// The limit on `used`, bytes.
    fn limit(&self) -> u64;
}

/// The floating-point and vector state of one guest thread, kept in the vCPU until something else needs it.
pub trait Fpu: Send + Sync + Any {
    /// The state in the processor's standard (non-compacted) XSAVE format, as a signal frame carries it. Its length is
    /// [`Platform::xsave_len`].
    fn read(&self) -> Vec<u8>;

    /// Replaces the state. EINVAL for an image the processor would refuse (reserved MXCSR or XSTATE_BV bits).
    fn write(&self, image: &[u8]) -> Result<(), Errno>;

    /// Back to the state of a fresh process.
    fn reset(&self);

    /// For the platform's own downcast.
    fn as_any(&self) -> &dyn Any;
}

/// Parameters that turn the guest's TSC into nanoseconds: `base_ns + (((tsc - base_tsc) * mult) >> shift)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct TscClock {
    /// The guest's TSC at the base.
    pub base_tsc: u64,
    /// CLOCK_MONOTONIC at the base, ns.
    pub base_mono: u64,
    /// CLOCK_REALTIME minus CLOCK_MONOTONIC, ns.
    pub real_offset: i64,
    /// Multiplier.
    pub mult: u32,
    /// Right shift after multiplication.
    pub shift: u32,
}

/// One cache of a CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct CpuCache {
    pub level: u32,
    /// `Data`, `Instruction` or `Unified`.
    pub kind: &'static str,
    pub kib: u64,
    pub ways: u32,
    pub sets: u32,
    /// Bytes.
    pub line: u32,
    /// Shared by all CPUs, or private to each.
    pub shared: bool,
}

/// The guest's CPUs as /proc/cpuinfo describes them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct CpuModel {
    pub vendor: String,
    pub family: u32,
    pub model: u32,
    pub stepping: u32,
    /// The brand string.
    pub name: String,
    /// Frequency.
    pub khz: u64,
    /// Size of the last-level cache.
    pub cache_kib: u64,
    /// Largest basic CPUID leaf.
    pub cpuid_level: u32,
    /// Features under Linux's names, separated by spaces.
    pub flags: String,
    /// Bytes.
    pub cache_line: u32,
    pub physical_bits: u32,
    pub virtual_bits: u32,
    /// From the first level on.
    pub caches: Vec<CpuCache>,
}

impl Default for CpuModel {
    fn default() -> Self {
        CpuModel {
            vendor: "unknown".into(),
            family: 6,
            model: 0,
            stepping: 0,
            name: "unknown".into(),
            khz: 0,
            cache_kib: 0,
            cpuid_level: 0,
            flags: "fpu tsc msr cx8 cmov mmx fxsr sse sse2 syscall nx lm".into(),
            cache_line: 64,
            physical_bits: 40,
            virtual_bits: 48,
            caches: Vec::new(),
        }
    }
}

/// What became of a system call that was requested from inside the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// It cannot be served this way, and nothing has been done: it is to leave the guest.
    Refused,
    /// It is over; RAX is to be this.
    Done(u64),
    /// It is over, and something is due before the task goes on: its worker has been kicked, and it stays where it is until then. It
    /// leaves the guest with `orig_rax` set, as after a call that left by itself.
    Held(u64),
}

/// What makes one system call site direct.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectCall {
    /// Addresses in the page of the call, and the bytes that replace those there. The first of them is the site, the others are in places
    /// that are otherwise never executed.
    pub patches: Vec<(u64, Vec<u8>)>,
    /// The bytes of the trampoline.
    pub trampoline: Vec<u8>,
}

/// Call sites that reach the platform by a jump instead of SYSCALL, through trampolines near them. The pages are the sentry's to make and to
/// mark ([`PteFlags::PATCHED`], [`PteFlags::TRAMPOLINES`]); what they hold is the platform's.
pub trait DirectCalls: Send + Sync {
    /// Bytes of a trampoline, aligned to as many. The first place of each page is not for one.
    fn trampoline_len(&self) -> u64;

    /// The first bytes of each page of trampolines.
    fn page_head(&self) -> Vec<u8>;

    /// How to make the call direct that `page`, which is mapped at `base`, makes before `after`, with `number` in RAX, by the trampoline
    /// at `trampoline`; None if it cannot be proven that the program would not know the difference.
    fn plan(&self, page: &[u8], base: u64, after: u64, number: u64, trampoline: u64) -> Option<DirectCall>;
}

/// System calls served while their task stays in the guest: called on another worker than the one whose vCPU runs the task.
pub trait RequestedCalls: Send + Sync {
    /// Serves the call of the task that is in the guest on `cpu`, which does not leave it before this returns. `from` is the address that
    /// it returns to: what the program says, not to be believed.
    fn serve(&self, cpu: usize, nr: u64, args: [u64; 6], from: u64) -> Served;

    /// Whether a task that worker `looker` may run waits for another, as [`Platform::keeps_tasks_away`] asked.
    fn task_waits(&self, looker: usize) -> bool {
        let _ = looker;
        false
    }

    /// A task has waited for so long that `looker` gives up serving to run it.
    fn waited_in_vain(&self, looker: usize) {
        let _ = looker;
    }
}

/// The machine.
pub trait Platform: Send + Sync + 'static {
    /// Workers, each with one vCPU; what the guest sees as CPUs.
    fn cpus(&self) -> usize;

    /// What kind of CPUs they are, from the guest's CPUID.
    fn cpu_model(&self) -> CpuModel {
        CpuModel::default()
    }

    /// Guest-physical memory.
    fn memory(&self) -> &dyn Memory;

    /// An empty address space.
    fn new_space(&self) -> Result<Arc<dyn GuestSpace>, Errno>;

    /// A thread's vector state, fresh.
    fn new_fpu(&self) -> Arc<dyn Fpu>;

    /// Bytes of the standard-format XSAVE image of the features the guest may use.
    fn xsave_len(&self) -> usize;

    /// XCR0 of the guest: the features in the image.
    fn xcr0(&self) -> u64;

    /// Auxiliary vector AT_HWCAP (CPUID.1:EDX) and AT_HWCAP2 (bit 1: FSGSBASE) as the guest's CPUID has them.
    fn hwcap(&self) -> (u64, u64);

    /// Runs the guest on the calling worker's vCPU until something needs the sentry. Only called on a worker thread.
    /// A non-canonical or monitor-owned `rip` is the caller's to refuse; here it ends as an exception or as Broken.
    fn enter(&self, space: &dyn GuestSpace, ctx: &mut UserContext, fpu: &dyn Fpu) -> Exit;

    /// Lets the platform serve system calls by `calls` while their task stays in the guest, where and when that is quicker. Without it,
    /// or on a platform that cannot, every call leaves the guest. Once.
    fn serve_requests(&self, calls: Arc<dyn RequestedCalls>) {
        drop(calls);
    }

    /// How to make call sites direct, where that is quicker.
    fn direct_calls(&self) -> Option<&dyn DirectCalls> {
        None
    }

    /// Lets the guest on `cpu` answer system call `nr`, whatever its arguments, by itself with `value`; with None it does no longer. Acts
    /// on a guest that is running: a call made after this returns finds it. A platform that cannot do so leaves every call to the sentry.
    fn set_answer(&self, cpu: usize, nr: u16, value: Option<u32>) {
        let _ = (cpu, nr, value);
    }

    /// How often call `nr` was answered on `cpu`, the calling worker's, since this was asked last.
    fn take_answered(&self, cpu: usize, nr: u16) -> u64 {
        let _ = (cpu, nr);
        0
    }

    /// Puts breakpoint addresses (DR0 to DR3) and DR7 into the vCPU of `cpu`, the calling worker's; gives what DR6 was. None
    /// where the machine has no debug registers to give.
    fn set_debug(&self, cpu: usize, addresses: [u64; 4], control: u64) -> Option<u64> {
        let _ = (cpu, addresses, control);
        None
    }

    /// What the instruction at `ctx.rip` would touch, as far as it can be read and decoded. For machines without debug registers.
    fn touches(&self, space: &dyn GuestSpace, ctx: &UserContext) -> Vec<Touch> {
        let _ = (space, ctx);
        Vec::new()
    }

    /// Makes the worker `cpu` leave the guest soon, or skip its next entry, with [`Exit::Interrupted`]. Never lost: a kick
    /// that races with `enter` acts on that entry.
    fn kick(&self, cpu: usize);

    /// Kicks `cpu` once after `ns`; None disarms. Cheap when unchanged.
    fn set_preemption(&self, cpu: usize, ns: Option<u64>);

    /// Blocks the calling worker until `unpark(cpu)`; an unpark since the last park returns at once. The platform saves
    /// what the idle vCPU still holds of a task first.
    fn park(&self, cpu: usize);

    /// Wakes a parked worker.
    fn unpark(&self, cpu: usize);

    /// Whether the worker `cpu`, which has nothing to run, serves so many calls of tasks on other workers that a task woken there had better
    /// wait for them. Once this says no again, the worker asks [`RequestedCalls::task_waits`] before it sleeps.
    fn keeps_tasks_away(&self, cpu: usize) -> bool {
        let _ = cpu;
        false
    }

    /// CLOCK_MONOTONIC, ns; agrees with what the guest computes by [`Platform::tsc_clock`].
    fn monotonic(&self) -> u64;

    /// CLOCK_REALTIME, ns since 1970.
    fn realtime(&self) -> u64;

    /// The host's CLOCK_REALTIME was set: [`Platform::realtime`] and [`Platform::tsc_clock`] show it from here on.
    fn clock_was_set(&self) {}

    /// The current clock parameters, or None where the guest's TSC cannot serve as a clock.
    fn tsc_clock(&self) -> Option<TscClock>;

    /// Asks for one call of `Kernel::on_deadline` at monotonic time `at`; replaces the earlier request; None cancels.
    fn set_deadline(&self, at: Option<u64>);

    /// A full memory barrier on every CPU that runs threads of this sandbox (membarrier(2)).
    fn memory_barrier(&self) {
        core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
    }

    /// Fills with cryptographically secure random bytes.
    fn random(&self, buf: &mut [u8]);

    /// The `cpu`'s number as the guest's vDSO finds it: the platform keeps it at the start of each vCPU's mailbox page
    /// (a little-endian u32 at `guest_abi::layout::MAILBOX_PAGE`), readable by the program if this is true.
    fn mailbox_readable(&self) -> bool;
}
