//! Signals and timers of worker threads: the kick signal, its handler, what a worker blocks, and the preemption timer.
#![allow(unsafe_code)]
use core::cell::Cell;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};
use std::io;
use std::sync::OnceLock;

use kvm_bindings::kvm_run;

use crate::kvm::vcpu::RunPage;

/// What is needed to make one worker leave the guest.
#[derive(Default)]
pub struct Kick {
    /// The next or current entry is to end.
    kicked: AtomicBool,
    /// The worker is between the last check of `kicked` and the end of its run.
    in_guest: AtomicBool,
    /// The vCPU's run page, while it exists.
    run: AtomicPtr<kvm_run>,
    /// The worker's thread, 0 without one.
    tid: AtomicI32,
}

thread_local! {
    /// The kick state of this thread's worker, for the signal handler; null elsewhere.
    static CURRENT: Cell<*const Kick> = const { Cell::new(ptr::null()) };
}

/// The signal that makes KVM_RUN return.
pub fn kick_signal() -> i32 {
    libc::SIGRTMIN() + 2
}

/// Runs on the worker itself, so that whatever the moment, `immediate_exit` stands before the next KVM_RUN.
extern "C" fn on_kick(_signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    let kick = CURRENT.with(Cell::get);
    if kick.is_null() {
        return;
    }
    // SAFETY: `attach` promised that the state outlives the thread's attachment. The handler touches atomics and one byte
    // of the run page only.
    let kick = unsafe { &*kick };
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    if unsafe { (*info).si_code } == libc::SI_TIMER {
        kick.kicked.store(true, Ordering::SeqCst);
    }
    kick.set_immediate_exit(true);
}

impl Kick {
    /// Names the vCPU's run page.
    pub fn set_run_page(&self, page: RunPage) {
        self.run.store(page.as_ptr(), Ordering::SeqCst);
    }

    /// Sets or clears `immediate_exit` of the vCPU.
    pub fn set_immediate_exit(&self, on: bool) {
        if let Some(page) = RunPage::from_ptr(self.run.load(Ordering::SeqCst)) {
            page.set_immediate_exit(on);
        }
    }

    /// Makes the worker leave the guest, or skip its next entry.
    pub fn kick(&self) {
        self.kicked.store(true, Ordering::SeqCst);
        self.set_immediate_exit(true);
        let tid = self.tid.load(Ordering::SeqCst);
        if tid != 0 && self.in_guest.load(Ordering::SeqCst) {
            // SAFETY: plain system calls; at worst the thread is gone and the call fails.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, kick_signal()) };
        }
    }

    /// Announces an entry. False if a kick came before it, which is consumed.
    pub fn begin(&self) -> bool {
        self.set_immediate_exit(false);
        self.in_guest.store(true, Ordering::SeqCst);
        if self.take() {
            self.end();
            return false;
        }
        true
    }

    /// Consumes a kick.
    pub fn take(&self) -> bool {
        self.kicked.swap(false, Ordering::SeqCst)
    }

    /// Announces the end of an entry.
    pub fn end(&self) {
        self.in_guest.store(false, Ordering::SeqCst);
    }
}

/// A POSIX timer whose expiry is a kick.
pub struct PreemptionTimer(libc::timer_t);

// SAFETY: a timer id is a number to the kernel, valid from any thread of the process.
unsafe impl Send for PreemptionTimer {}
// SAFETY: as above.
unsafe impl Sync for PreemptionTimer {}

impl PreemptionTimer {
    /// A disarmed timer that signals the thread `tid`.
    fn new(tid: i32) -> io::Result<PreemptionTimer> {
        // SAFETY: zero is a valid sigevent.
        let mut event: libc::sigevent = unsafe { core::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = kick_signal();
        event.sigev_notify_thread_id = tid;
        let mut id: libc::timer_t = ptr::null_mut();
        // SAFETY: both pointers are to live objects of the right types.
        if unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut id) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(PreemptionTimer(id))
    }

    /// Fires once after `ns`; 0 disarms.
    pub fn set(&self, ns: u64) {
        // SAFETY: zero is a valid itimerspec.
        let mut spec: libc::itimerspec = unsafe { core::mem::zeroed() };
        spec.it_value.tv_sec = i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX);
        spec.it_value.tv_nsec = (ns % 1_000_000_000) as i64;
        // SAFETY: the timer exists for as long as `self`; the specification is valid.
        unsafe { libc::timer_settime(self.0, 0, &raw const spec, ptr::null_mut()) };
    }
}

impl Drop for PreemptionTimer {
    fn drop(&mut self) {
        // SAFETY: the timer is ours and deleted once.
        unsafe { libc::timer_delete(self.0) };
    }
}

fn install_handler() -> io::Result<()> {
    static INSTALLED: OnceLock<i32> = OnceLock::new();
    let errno = *INSTALLED.get_or_init(|| {
        // SAFETY: zero is a valid sigaction; the handler is async-signal-safe (atomics only). No SA_RESTART: KVM_RUN must end.
        unsafe {
            let mut action: libc::sigaction = core::mem::zeroed();
            action.sa_sigaction = on_kick as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            if libc::sigaction(kick_signal(), &raw const action, ptr::null_mut()) != 0 {
                return io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
            }
        }
        0
    });
    if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) }
}

/// Makes the calling thread the worker that `kick` reaches: it blocks all signals but the kick and those a fault of its own
/// raises. The caller keeps `kick` alive until [`detach`] on the same thread.
pub fn attach(kick: &Kick) -> io::Result<PreemptionTimer> {
    install_handler()?;
    // SAFETY: plain system calls on objects of this frame.
    let tid = unsafe {
        let mut set: libc::sigset_t = core::mem::zeroed();
        libc::sigfillset(&raw mut set);
        for s in [
            kick_signal(),
            libc::SIGSEGV,
            libc::SIGBUS,
            libc::SIGILL,
            libc::SIGFPE,
            libc::SIGTRAP,
            libc::SIGABRT,
            libc::SIGSYS,
        ] {
            libc::sigdelset(&raw mut set, s);
        }
        let r = libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, ptr::null_mut());
        if r != 0 {
            return Err(io::Error::from_raw_os_error(r));
        }
        libc::gettid()
    };
    let timer = PreemptionTimer::new(tid)?;
    CURRENT.with(|c| c.set(kick));
    kick.tid.store(tid, Ordering::SeqCst);
    Ok(timer)
}

/// Ends what [`attach`] began on this thread.
pub fn detach(kick: &Kick) {
    CURRENT.with(|c| c.set(ptr::null()));
    kick.tid.store(0, Ordering::SeqCst);
}
