//! The seccomp allow-list of the process. Owns which host system calls may be made once the guest runs, each with its reason.
#![allow(unsafe_code)]
use std::mem::size_of;
use std::os::fd::RawFd;

use kvm_bindings as kvm;
use seccompiler::sock_filter;

use super::program::{self, List, Test};
use super::{JailError, Refusal};
use crate::host::TERMINAL_REQUESTS;
use crate::memory::NUDGE_REQUESTS;

/// Calls that are harmless whatever their arguments, because those name only what the process holds already.
const ALLOWED: &[(i64, &str)] = &[
    // Guest input and output: descriptors opened before, or beneath a tree.
    (libc::SYS_read, "streams, eventfd, timerfd, signalfd"),
    (libc::SYS_write, "streams, eventfd, the log"),
    (libc::SYS_readv, "streams, into guest memory"),
    (libc::SYS_writev, "streams, from guest memory; standard error"),
    (libc::SYS_preadv, "host files, into guest memory"),
    (libc::SYS_pwritev, "host files, from guest memory"),
    (libc::SYS_preadv2, "streams without waiting (RWF_NOWAIT)"),
    (libc::SYS_pwritev2, "streams without waiting (RWF_NOWAIT)"),
    (libc::SYS_recvmsg, "a socket given as a standard stream"),
    (libc::SYS_sendmsg, "a socket given as a standard stream"),
    (libc::SYS_lseek, "a file given as a standard stream; rewinding a directory"),
    (libc::SYS_poll, "readiness of a stream"),
    (libc::SYS_ppoll, "readiness of a stream"),
    (libc::SYS_close, "descriptors"),
    // Host trees: every path is relative to a directory descriptor; Landlock judges it again.
    (libc::SYS_openat2, "beneath a tree, no symbolic links"),
    (libc::SYS_openat, "new files in a directory of a tree"),
    (libc::SYS_fstat, "attributes"),
    (libc::SYS_newfstatat, "attributes, as the C library spells fstat"),
    (libc::SYS_statx, "attributes"),
    (libc::SYS_fstatfs, "kind and size of a file system"),
    (libc::SYS_getdents64, "listing a directory"),
    (libc::SYS_readlinkat, "target of a symbolic link"),
    (libc::SYS_fgetxattr, "extended attributes"),
    (libc::SYS_flistxattr, "extended attributes"),
    (libc::SYS_mkdirat, "writable trees"),
    (libc::SYS_symlinkat, "writable trees"),
    (libc::SYS_linkat, "writable trees"),
    (libc::SYS_unlinkat, "writable trees"),
    (libc::SYS_renameat2, "writable trees"),
    (libc::SYS_fchmod, "writable trees"),
    (452, "fchmodat2: writable trees"),
    (libc::SYS_fchownat, "writable trees"),
    (libc::SYS_utimensat, "writable trees"),
    (libc::SYS_ftruncate, "writable trees"),
    (libc::SYS_fsync, "writable trees"),
    (libc::SYS_fdatasync, "writable trees"),
    // Memory of the process and of the guest.
    (libc::SYS_munmap, "the allocator, thread stacks"),
    (libc::SYS_madvise, "guest memory populated and given back"),
    (libc::SYS_brk, "the allocator"),
    (libc::SYS_membarrier, "memory barriers that the guest asks for"),
    // Waiting.
    (libc::SYS_futex, "locks, parked workers"),
    (libc::SYS_epoll_wait, "the reactor"),
    (libc::SYS_epoll_pwait, "the reactor"),
    (libc::SYS_epoll_ctl, "the reactor"),
    (libc::SYS_timerfd_settime, "the reactor's deadline"),
    (libc::SYS_timer_settime, "a worker's preemption timer"),
    (libc::SYS_timer_delete, "a worker's preemption timer"),
    (libc::SYS_clock_gettime, "clocks, where the vDSO cannot answer"),
    (libc::SYS_clock_nanosleep, "a thread that waits for others to finish"),
    (libc::SYS_nanosleep, "a thread that waits for others to finish"),
    (libc::SYS_sched_yield, "spinning with others' progress in mind"),
    (libc::SYS_restart_syscall, "a wait continued after SIGSTOP"),
    // Threads end; none begins.
    (libc::SYS_sigaltstack, "end of a thread"),
    (libc::SYS_rt_sigprocmask, "end of a thread"),
    (libc::SYS_rt_sigaction, "a fault handed to its earlier handler"),
    (libc::SYS_rt_sigreturn, "return from a handler"),
    (libc::SYS_gettid, "names of threads for kicks"),
    (libc::SYS_getpid, "names of threads for kicks"),
    (libc::SYS_exit, "end of a thread"),
    (libc::SYS_exit_group, "end of the process"),
    // Facts.
    (libc::SYS_getrandom, "random numbers for the guest and for hash tables"),
    (libc::SYS_getcpu, "which CPU a thread runs on, where the vDSO cannot answer"),
    (libc::SYS_getrusage, "statistics"),
    (libc::SYS_sysinfo, "statistics"),
];

const fn ior<T>(nr: u64) -> u64 {
    (2 << 30) | ((size_of::<T>() as u64) << 16) | (0xae << 8) | nr
}
const fn iow<T>(nr: u64) -> u64 {
    (1 << 30) | ((size_of::<T>() as u64) << 16) | (0xae << 8) | nr
}

/// Requests on the virtual machine and its vCPUs (<linux/kvm.h>). None opens or creates anything.
const KVM_REQUESTS: &[u64] = &[
    0xae80,                                        // KVM_RUN
    iow::<kvm::kvm_userspace_memory_region>(0x46), // KVM_SET_USER_MEMORY_REGION: more memory; dropping shadow pages
    ior::<kvm::kvm_regs>(0x81),
    iow::<kvm::kvm_regs>(0x82),
    ior::<kvm::kvm_sregs>(0x83),
    iow::<kvm::kvm_sregs>(0x84),
    ior::<kvm::kvm_xsave>(0xa4),
    iow::<kvm::kvm_xsave>(0xa5),
    ior::<kvm::kvm_xsave>(0xcf), // KVM_GET_XSAVE2
    ior::<kvm::kvm_xcrs>(0xa6),
    iow::<kvm::kvm_xcrs>(0xa7),
    ior::<kvm::kvm_fpu>(0x8c),
    iow::<kvm::kvm_fpu>(0x8d),
    ior::<kvm::kvm_vcpu_events>(0x9f),
    iow::<kvm::kvm_vcpu_events>(0xa0),
    ior::<kvm::kvm_debugregs>(0xa1),
    iow::<kvm::kvm_debugregs>(0xa2),
    0xc008_ae88, // KVM_GET_MSRS
    0x4008_ae89, // KVM_SET_MSRS
    iow::<kvm::kvm_guest_debug>(0x9b),
    0xaea3,                            // KVM_GET_TSC_KHZ
    iow::<kvm::kvm_device_attr>(0xe1), // KVM_SET_DEVICE_ATTR: the TSC offset of a vCPU that is set up again
];

fn failed(why: impl ToString) -> JailError {
    JailError { what: "system calls", why: why.to_string() }
}

/// Calls that are allowed with some arguments only.
fn conditional(list: &mut List, listener: Option<RawFd>) {
    let mut put = |call: i64, rules: Vec<Vec<Test>>| list.insert(call as u32, rules);
    let any =
        |argument: u8, values: &mut dyn Iterator<Item = u32>| values.map(|v| vec![Test::equal(argument, v)]).collect();

    // KVM_RUN is the first.
    let kvm = KVM_REQUESTS.iter().chain(NUDGE_REQUESTS).map(|r| *r as u32);
    put(libc::SYS_ioctl, any(1, &mut kvm.chain(TERMINAL_REQUESTS.iter().copied())));

    // No executable memory of our own: guest code runs in the virtual machine only.
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        put(call, vec![vec![Test::masked(2, libc::PROT_EXEC as u32, 0)]]);
    }
    // The allocator grows large blocks in place or by moving them.
    put(libc::SYS_mremap, vec![vec![Test::masked(3, !1, 0)]]);

    // Signals to this process only: kicks, and stopping with the guest on SIGTSTP.
    let pid = std::process::id();
    put(libc::SYS_tgkill, vec![vec![Test::equal(0, pid)]]);
    put(libc::SYS_kill, vec![vec![Test::equal(0, pid)]]);

    let commands = [libc::F_GETFL, libc::F_GETFD, libc::F_SETFD, libc::F_DUPFD_CLOEXEC];
    put(libc::SYS_fcntl, any(1, &mut commands.into_iter().map(|c| c as u32)));

    // FIFOs and sockets of writable trees; no device nodes.
    let kind = |k: u32| vec![Test::masked(2, libc::S_IFMT, k)];
    put(libc::SYS_mknodat, vec![kind(libc::S_IFIFO), kind(libc::S_IFSOCK)]);

    // Clients of the control socket: taken from that one listening socket, and asked who they are.
    if let Some(fd) = listener {
        put(libc::SYS_accept4, vec![vec![Test::equal(0, fd as u32)]]);
        let (level, option) = (libc::SOL_SOCKET as u32, libc::SO_PEERCRED as u32);
        put(libc::SYS_getsockopt, vec![vec![Test::equal(1, level), Test::equal(2, option)]]);
    }

    // The name of a thread.
    put(libc::SYS_prctl, vec![vec![Test::equal(0, libc::PR_SET_NAME as u32)]]);
}

fn program(refusal: Refusal, listener: Option<RawFd>) -> Vec<sock_filter> {
    let mut list: List = ALLOWED.iter().map(|(nr, _)| (*nr as u32, Vec::new())).collect();
    conditional(&mut list, listener);
    let refused = match refusal {
        Refusal::Kill => program::KILL,
        Refusal::Report => program::TRAP,
    };
    program::assemble(&list, refused)
}

extern "C" fn on_refusal(_signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let mut text =
        *b"bartizan: the jail refused host system call      (first arguments                   ,                   )\n";
    let mut number = |at: usize, mut n: u64, radix: u64, width: usize| {
        for i in (at..at + width).rev() {
            let digit = (n % radix) as usize;
            if let (Some(to), Some(c)) = (text.get_mut(i), b"0123456789abcdef".get(digit)) {
                *to = *c;
            }
            n /= radix;
            if n == 0 {
                break;
            }
        }
    };
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel gives SA_SIGINFO handlers valid structures; for SIGSYS the call's number is in RAX's slot.
    let (nr, a, b) = unsafe {
        let g = &(*context).uc_mcontext.gregs;
        let _ = info;
        (g[libc::REG_RAX as usize] as u64, g[libc::REG_RDI as usize] as u64, g[libc::REG_RSI as usize] as u64)
    };
    number(44, nr, 10, 4);
    number(66, a, 16, 17);
    number(86, b, 16, 17);
    // SAFETY: plain system calls on valid memory; both are on the list.
    unsafe {
        libc::write(2, text.as_ptr().cast(), text.len());
        libc::_exit(125);
    }
}

/// Puts the list in force for every thread of the process, for good. Afterwards nothing can be opened but beneath the trees,
/// and no thread, process or executable memory made. `listener` is the control socket, if there is one.
pub fn restrict_calls(refusal: Refusal, listener: Option<RawFd>) -> Result<(), JailError> {
    if refusal == Refusal::Report {
        // SAFETY: zero is a valid sigaction.
        let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
        action.sa_sigaction = on_refusal as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the structure is valid and the handler async-signal-safe.
        unsafe { libc::sigaction(libc::SIGSYS, &raw const action, core::ptr::null_mut()) };
    }
    seccompiler::apply_filter_all_threads(&program(refusal, listener)).map_err(failed)
}
