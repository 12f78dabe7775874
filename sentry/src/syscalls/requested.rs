//! System calls served while their task stays in the guest, by another worker. Owns which calls may be; what they do is in their rows.
//!
//! A call may if its handler neither reads nor changes the caller's registers, its vector state, its place on a worker or its program,
//! answers at once, and takes no longer than a worker may be kept from its own tasks.
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use linux_raw_sys::general as nr;

use super::table::{self, Call, Handler};
use crate::kernel::Kernel;
use crate::platform::{RequestedCalls, Served};
use crate::sched::{self, current_cpu};
use crate::signal::deliver;

/// Most bytes of a read or write served this way.
const MOST_BYTES: u64 = 64 << 10;
/// Most bytes of a mapping made or changed.
const MOST_MAPPED: u64 = 16 << 20;
/// Most random bytes.
const MOST_RANDOM: u64 = 4096;

/// The sandbox as whoever serves requests sees it.
pub struct Requested {
    kernel: Weak<Kernel>,
    owed: Arc<[AtomicBool]>,
}

impl RequestedCalls for Requested {
    fn serve(&self, cpu: usize, number: u64, args: [u64; 6], from: u64) -> Served {
        // The kernel's entry code looks at 32 bits only.
        let number = number & u64::from(u32::MAX);
        if !may_be_served(number, &args) {
            return Served::Refused;
        }
        let Some(kernel) = self.kernel.upgrade() else { return Served::Refused };
        let Some(task) = kernel.in_guest.get(cpu) else { return Served::Refused };
        // A tracer sees every call begin and end on the task's own worker, and seccomp judges it there.
        if kernel.trace.get().is_some() || task.tracing.is_traced() || task.tracing.watches_calls() {
            return Served::Refused;
        }
        let Some(row) = table::row(number) else { return Served::Refused };
        let call = Call { task: &task, nr: number, args };
        let clock = &task.sched.clock;
        clock.begin_service(cpu, || kernel.platform.monotonic());
        let result = sched::on_behalf_of(cpu, || match row.handler {
            Handler::Fast(f) => f(&call).map(Some),
            Handler::Both { fast, .. } => fast(&call),
            Handler::Slow(_) => Ok(None),
        });
        clock.end_service(cpu, || kernel.platform.monotonic());
        // None: it would block.
        let Some(result) = result.transpose() else { return Served::Refused };
        let me = current_cpu().unwrap_or(0);
        kernel.stats.syscall(me, number);
        kernel.stats.served_inside(me);
        if let Ok(space) = task.space()
            && space.note_call(from, number, 1)
        {
            kernel.stats.direct_site(me);
        }
        let restart = result.as_ref().is_err_and(|&e| deliver::asks_for_restart(e));
        let value = result.unwrap_or_else(|e| e.to_rax());
        // What the call itself brought about, a signal to the caller above all, is due before the program goes on.
        if restart || task.interruption.is_pending() {
            kernel.platform.kick(cpu);
            return Served::Held(value);
        }
        Served::Done(value)
    }

    fn task_waits(&self, looker: usize) -> bool {
        let owed = self.owed.get(looker).is_some_and(|owed| owed.load(Ordering::SeqCst));
        owed && self.kernel.upgrade().is_some_and(|kernel| kernel.sched.task_waits_for_others(looker))
    }

    fn waited_in_vain(&self, looker: usize) {
        if let Some(kernel) = self.kernel.upgrade() {
            kernel.stats.waited_in_vain(looker);
        }
    }
}

/// Lets the platform serve calls of `kernel`.
pub fn offer(kernel: &Arc<Kernel>) {
    kernel.platform.serve_requests(Arc::new(Requested { kernel: Arc::downgrade(kernel), owed: kernel.sched.owed() }));
}

fn may_be_served(number: u64, args: &[u64; 6]) -> bool {
    let Ok(number) = u32::try_from(number) else { return false };
    match number {
        nr::__NR_read | nr::__NR_write | nr::__NR_pread64 | nr::__NR_pwrite64 | nr::__NR_sendto | nr::__NR_recvfrom => {
            args[2] <= MOST_BYTES
        }
        nr::__NR_getrandom => args[1] <= MOST_RANDOM,
        nr::__NR_madvise | nr::__NR_mmap | nr::__NR_mprotect | nr::__NR_munmap => args[1] <= MOST_MAPPED,
        // Waiting needs the worker.
        nr::__NR_futex => matches!(
            args[1] as u32 & !(nr::FUTEX_PRIVATE_FLAG | nr::FUTEX_CLOCK_REALTIME),
            nr::FUTEX_WAKE | nr::FUTEX_WAKE_BITSET | nr::FUTEX_REQUEUE | nr::FUTEX_CMP_REQUEUE | nr::FUTEX_WAKE_OP
        ),
        nr::__NR_accept
        | nr::__NR_accept4
        | nr::__NR_access
        | nr::__NR_chdir
        | nr::__NR_chmod
        | nr::__NR_clock_gettime
        | nr::__NR_close
        | nr::__NR_dup
        | nr::__NR_dup2
        | nr::__NR_dup3
        | nr::__NR_epoll_ctl
        | nr::__NR_epoll_wait
        | nr::__NR_eventfd
        | nr::__NR_eventfd2
        | nr::__NR_faccessat
        | nr::__NR_faccessat2
        | nr::__NR_fchdir
        | nr::__NR_fchmod
        | nr::__NR_fchmodat
        | nr::__NR_fcntl
        | nr::__NR_fstat
        | nr::__NR_fstatfs
        | nr::__NR_get_robust_list
        | nr::__NR_getcwd
        | nr::__NR_getdents64
        | nr::__NR_getegid
        | nr::__NR_geteuid
        | nr::__NR_getgid
        | nr::__NR_getpeername
        | nr::__NR_getpgid
        | nr::__NR_getpgrp
        | nr::__NR_getpid
        | nr::__NR_getppid
        | nr::__NR_getpriority
        | nr::__NR_getrlimit
        | nr::__NR_getrusage
        | nr::__NR_getsid
        | nr::__NR_getsockname
        | nr::__NR_getsockopt
        | nr::__NR_gettid
        | nr::__NR_gettimeofday
        | nr::__NR_getuid
        | nr::__NR_ioctl
        | nr::__NR_kill
        | nr::__NR_listen
        | nr::__NR_lseek
        | nr::__NR_lstat
        | nr::__NR_mkdir
        | nr::__NR_mkdirat
        | nr::__NR_newfstatat
        | nr::__NR_open
        | nr::__NR_openat
        | nr::__NR_pipe
        | nr::__NR_pipe2
        | nr::__NR_poll
        | nr::__NR_prlimit64
        | nr::__NR_readlink
        | nr::__NR_readlinkat
        | nr::__NR_rename
        | nr::__NR_renameat
        | nr::__NR_rmdir
        | nr::__NR_rt_sigaction
        | nr::__NR_rt_sigpending
        | nr::__NR_rt_sigprocmask
        | nr::__NR_sched_get_priority_max
        | nr::__NR_sched_get_priority_min
        | nr::__NR_sched_getparam
        | nr::__NR_sched_getscheduler
        | nr::__NR_set_robust_list
        | nr::__NR_set_tid_address
        | nr::__NR_setsockopt
        | nr::__NR_shutdown
        | nr::__NR_socket
        | nr::__NR_socketpair
        | nr::__NR_stat
        | nr::__NR_statfs
        | nr::__NR_statx
        | nr::__NR_symlink
        | nr::__NR_tgkill
        | nr::__NR_time
        | nr::__NR_timer_getoverrun
        | nr::__NR_timer_gettime
        | nr::__NR_timer_settime
        | nr::__NR_timerfd_gettime
        | nr::__NR_timerfd_settime
        | nr::__NR_times
        | nr::__NR_tkill
        | nr::__NR_umask
        | nr::__NR_uname
        | nr::__NR_unlink
        | nr::__NR_unlinkat
        | nr::__NR_utimensat => true,
        _ => false,
    }
}
