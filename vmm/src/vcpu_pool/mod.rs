//! The vCPUs of a sandbox and the worker threads that drive them, one each: creation, parking, kicks, preemption. Owns which
//! thread is which worker; decides nothing about what runs.
mod answers;
mod balance;
pub mod guest;
pub mod requests;
mod signal;

use core::cell::RefCell;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use kvm_ioctls::VmFd;
use parking_lot::{Mutex, MutexGuard};
use sentry::platform::{Exit, RequestedCalls, UserContext};

use crate::entry::direct::Trampolines;
use crate::entry::{SharedPages, TrapMode};
use crate::fpu::{Format, KvmFpu, Resident};
use crate::kvm::cpuid::GuestCpuid;
use crate::kvm::{PlatformError, Vcpu};
use crate::memory::GuestMemory;
use crate::page_table::KvmSpace;
use answers::Answers;
use guest::Guest;
use requests::{Look, Requests, Service};
pub use signal::Kick;
use signal::PreemptionTimer;

/// What all vCPUs of a sandbox share.
pub struct Machine {
    /// The virtual machine.
    pub vm: Arc<VmFd>,
    /// Its memory.
    pub memory: Arc<GuestMemory>,
    /// Pages of the monitor's region.
    pub shared: SharedPages,
    /// What CPUID says.
    pub cpuid: GuestCpuid,
    /// How SYSCALL arrives.
    pub mode: TrapMode,
    /// Whether KVM reports `rip` after an `out`, not at it.
    pub out_advances: bool,
    /// Whether the guest's debug registers act.
    pub debug_registers: bool,
    /// How call sites become direct, if they may.
    pub direct: Option<Trampolines>,
    /// What images of extended state look like.
    pub format: Arc<Format>,
}

/// A vCPU once it exists.
#[derive(Default)]
pub struct Slot(Option<Guest>);

impl Slot {
    /// The vCPU and the record of whose extended state it holds.
    pub fn parts(&mut self) -> Option<(&Vcpu, &mut Resident)> {
        self.0.as_mut().map(Guest::parts)
    }
}

#[derive(Default)]
struct Cpu {
    /// Held by the worker while it is in [`Pool::enter`]; by others only to fetch extended state.
    slot: Mutex<Slot>,
    kick: Kick,
    /// [`WANTED`] after an unpark that no park has consumed, [`LOOK`] after a request to look for requests.
    token: AtomicU32,
    /// The worker sleeps, or is about to.
    parked: AtomicBool,
    requests: Requests,
    answers: Answers,
    timer: OnceLock<PreemptionTimer>,
    /// When the timer is to fire, CLOCK_MONOTONIC; 0 if disarmed.
    armed: AtomicU64,
}

impl Cpu {
    /// Gives the CPU its vCPU; `slot` is the CPU's own.
    fn install(&self, slot: &mut Slot, mut guest: Guest) {
        self.kick.set_run_page(guest.run_page());
        self.requests.set_page(guest.request_page());
        self.answers.set_pages(guest.mailbox_page(), guest.request_page());
        slot.0 = Some(guest);
    }
}

/// The worker is wanted for a task.
const WANTED: u32 = 1;
/// The worker should look for requests.
const LOOK: u32 = 2;

/// All vCPUs and workers.
pub struct Pool {
    /// What they share.
    pub machine: Machine,
    service: Service,
    cpus: Box<[Cpu]>,
}

/// The attachment of this thread to a worker.
struct Attached {
    pool: Arc<Pool>,
    cpu: usize,
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Some(cpu) = self.pool.cpus.get(self.cpu) {
            signal::detach(&cpu.kick);
        }
    }
}

thread_local! {
    static ATTACHED: RefCell<Option<Attached>> = const { RefCell::new(None) };
}

impl Pool {
    /// A pool of `cpus` vCPUs, of which only `first`, that of CPU 0, exists yet.
    pub fn new(
        machine: Machine,
        cpus: usize,
        service: requests::Mode,
        tsc_khz: Option<u64>,
        first: Guest,
    ) -> Arc<Pool> {
        // Somebody has to be idle while another runs.
        let mode = if cpus > 1 { service } else { requests::Mode::Off };
        let service = Service::new(mode, tsc_khz);
        let cpus: Box<[Cpu]> = (0..cpus).map(|_| Cpu::default()).collect();
        if let Some(cpu) = cpus.first() {
            cpu.install(&mut cpu.slot.lock(), first);
        }
        Arc::new(Pool { machine, service, cpus })
    }

    /// Number of CPUs.
    pub fn cpus(&self) -> usize {
        self.cpus.len()
    }

    /// Makes the calling thread the worker of `cpu`, and makes that vCPU. A CPU has one worker in its life.
    pub fn attach(self: &Arc<Self>, cpu: usize) -> Result<(), PlatformError> {
        let what = "make a thread a worker";
        let invalid = || PlatformError::Host(what, std::io::Error::from_raw_os_error(libc::EINVAL));
        let worker = self.cpus.get(cpu).ok_or_else(invalid)?;
        let number = u32::try_from(cpu).map_err(|_| invalid())?;
        {
            let mut slot = worker.slot.lock();
            if slot.0.is_none() {
                let m = &self.machine;
                let guest = Guest::new(&m.vm, &m.memory, &m.shared, &m.cpuid, number, number, Some(m.mode))?;
                worker.install(&mut slot, guest);
            }
        }
        // The attachment is recorded first: its drop, at the thread's end, detaches.
        ATTACHED.with_borrow_mut(|a| *a = Some(Attached { pool: self.clone(), cpu }));
        let timer = signal::attach(&worker.kick).map_err(|e| PlatformError::Host(what, e))?;
        worker.timer.set(timer).map_err(|_| invalid())
    }

    /// The vCPU of `cpu`, unless its worker is using it.
    pub fn try_lock_vcpu(&self, cpu: usize) -> Option<MutexGuard<'_, Slot>> {
        self.cpus.get(cpu)?.slot.try_lock()
    }

    /// Runs the guest on the calling worker's vCPU. See [`sentry::platform::Platform::enter`].
    pub fn enter(&self, space: &KvmSpace, ctx: &mut UserContext, fpu: &KvmFpu) -> Exit {
        let attached = ATTACHED.with_borrow(|a| a.as_ref().map(|a| a.cpu));
        let Some((number, cpu)) = attached.and_then(|n| Some((n, self.cpus.get(n)?))) else {
            return Exit::Broken("the calling thread is no worker");
        };
        if !cpu.kick.begin() {
            return Exit::Interrupted;
        }
        let mut slot = cpu.slot.lock();
        let exit = match slot.0.as_mut() {
            Some(guest) => {
                let service = self.service.is_on().then_some((&self.service, &cpu.requests));
                guest.enter(&self.machine, &cpu.kick, service, number, space, ctx, fpu)
            }
            None => Exit::Broken("the worker has no virtual CPU"),
        };
        drop(slot);
        cpu.kick.end();
        if exit == Exit::Syscall && self.service.left(&cpu.requests) {
            self.call_a_looker();
        }
        exit
    }

    /// See [`sentry::platform::Platform::set_debug`].
    pub fn set_debug(&self, cpu: usize, addresses: [u64; 4], control: u64) -> Option<u64> {
        if !self.machine.debug_registers {
            return None;
        }
        let mut slot = self.cpus.get(cpu)?.slot.lock();
        slot.parts()?.0.set_debug(addresses, control)
    }

    /// See [`sentry::platform::Platform::kick`].
    pub fn kick(&self, cpu: usize) {
        if let Some(cpu) = self.cpus.get(cpu) {
            cpu.kick.kick();
        }
    }

    /// See [`sentry::platform::Platform::set_preemption`]; `now` is CLOCK_MONOTONIC.
    pub fn set_preemption(&self, cpu: usize, ns: Option<u64>, now: u64) {
        let Some(cpu) = self.cpus.get(cpu) else { return };
        let Some(timer) = cpu.timer.get() else { return };
        let armed = cpu.armed.load(Ordering::Relaxed);
        match ns {
            Some(ns) => {
                let ns = ns.max(1);
                let at = now.saturating_add(ns);
                if armed > now && armed <= at && at - armed <= ns / 8 {
                    return;
                }
                cpu.armed.store(at, Ordering::Relaxed);
                timer.set(ns);
            }
            None if armed == 0 => {}
            None => {
                cpu.armed.store(0, Ordering::Relaxed);
                if armed > now {
                    timer.set(0);
                }
            }
        }
    }

    /// See [`sentry::platform::Platform::set_answer`].
    pub fn set_answer(&self, cpu: usize, nr: u16, value: Option<u32>) {
        if let Some(cpu) = self.cpus.get(cpu) {
            cpu.answers.set(&self.machine.memory, nr, value);
        }
    }

    /// See [`sentry::platform::Platform::take_answered`].
    pub fn take_answered(&self, cpu: usize, nr: u16) -> u64 {
        self.cpus.get(cpu).map_or(0, |cpu| cpu.answers.take(&self.machine.memory, nr))
    }

    /// Lets idle workers serve the calls of tasks that stay in the guest. Once.
    pub fn start_service(&self, calls: Arc<dyn RequestedCalls>) {
        self.service.start(calls);
    }

    /// Makes a worker that sleeps look for requests.
    fn call_a_looker(&self) {
        self.service.asked();
        let asleep = self.cpus.iter().find(|c| c.parked.load(Ordering::SeqCst));
        if let Some(cpu) = asleep
            && cpu.token.compare_exchange(0, LOOK, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        {
            wake(&cpu.token);
        }
    }

    /// Looks for requests, as the worker of `cpu`: its own gate is shut.
    fn look(&self, number: usize, cpu: &Cpu) -> Look {
        let all: Vec<&Requests> = self.cpus.iter().map(|c| &c.requests).collect();
        self.service.look(&self.machine.memory, number, &all, || cpu.token.load(Ordering::SeqCst) == WANTED)
    }

    /// See [`sentry::platform::Platform::park`]. What the vCPU holds of a task stays there: whoever runs that task next can
    /// fetch it while the worker is parked. Before it sleeps the worker may look for requests of the others.
    pub fn park(&self, number: usize) {
        let Some(cpu) = self.cpus.get(number) else { return };
        loop {
            let mut others = self.cpus.iter().enumerate().filter(|&(n, _)| n != number).map(|(_, c)| &c.requests);
            let looks = match cpu.token.swap(0, Ordering::SeqCst) {
                WANTED => return,
                LOOK => true,
                _ => self.service.pays(&mut others),
            };
            if looks {
                match self.look(number, cpu) {
                    Look::Wanted => continue,
                    Look::Better => return,
                    // Who was kept from this worker while it looked found it looking.
                    Look::Quiet if self.service.task_waits(number) => return,
                    Look::Quiet => {}
                }
            }
            cpu.parked.store(true, Ordering::SeqCst);
            // An error means that a token is there, or a signal was: look again.
            let _ = rustix::thread::futex::wait(&cpu.token, rustix::thread::futex::Flags::PRIVATE, 0, None);
            cpu.parked.store(false, Ordering::SeqCst);
        }
    }

    /// See [`sentry::platform::Platform::keeps_tasks_away`].
    pub fn keeps_tasks_away(&self, cpu: usize) -> bool {
        self.cpus.get(cpu).is_some_and(|cpu| cpu.requests.is_keeping())
    }

    /// See [`sentry::platform::Platform::unpark`].
    pub fn unpark(&self, cpu: usize) {
        let Some(cpu) = self.cpus.get(cpu) else { return };
        cpu.token.store(WANTED, Ordering::SeqCst);
        if cpu.parked.load(Ordering::SeqCst) {
            wake(&cpu.token);
        }
    }
}

fn wake(token: &AtomicU32) {
    let _ = rustix::thread::futex::wake(token, rustix::thread::futex::Flags::PRIVATE, 1);
}
