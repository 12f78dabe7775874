//! [`sentry::platform::Platform`] over KVM: ties vCPUs, memory, page tables and clock together. Owns none of their rules.
use std::sync::{Arc, OnceLock};

use guest_abi::Errno;
use rustix::thread::{MembarrierCommand, membarrier};
use sentry::platform::{
    CpuModel, DirectCalls, Exit, Fpu, GuestSpace, Memory, Platform, RequestedCalls, Touch, TscClock, UserContext,
};

use crate::clock::Clock;
use crate::entry::TrapMode;
use crate::entry::direct::Trampolines;
use crate::entry::stub::Stub;
use crate::fpu::KvmFpu;
use crate::kvm::{PlatformError, caps, model};
use crate::memory::GuestMemory;
use crate::page_table::KvmSpace;
use crate::self_test::{self, SelfTest};
use crate::vcpu_pool::Pool;
use crate::vcpu_pool::guest::touches;

pub use crate::vcpu_pool::requests::Mode as Service;

/// What a sandbox asks of the machine.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Workers and vCPUs, at least 1.
    pub cpus: usize,
    /// Bytes of guest memory, page tables included.
    pub memory_limit: u64,
    /// When idle workers serve system calls of tasks that stay in the guest.
    pub service: Service,
    /// Whether call sites may be made direct, where SYSCALL arrives in ring 3.
    pub rewrite: bool,
}

/// Called with a host CLOCK_MONOTONIC time at which `Kernel::on_deadline` is to run, or None to cancel.
pub type DeadlineSink = Box<dyn Fn(Option<u64>) + Send + Sync>;

/// Called by a worker that is about to sleep, once free memory that could go back to the host has come together.
pub type SurplusSink = Box<dyn Fn() + Send + Sync>;

/// A KVM virtual machine as the sentry sees it.
pub struct KvmPlatform {
    pool: Arc<Pool>,
    clock: Clock,
    report: SelfTest,
    deadline: OnceLock<DeadlineSink>,
    surplus: OnceLock<SurplusSink>,
}

impl KvmPlatform {
    /// Makes the machine and tests it. Workers attach later; that of CPU 0 should be the calling thread (see `self_test::run`).
    pub fn new(config: Config) -> Result<Arc<KvmPlatform>, PlatformError> {
        let (kvm, caps) = caps::open()?;
        let cpus = config.cpus.max(1);
        if cpus > caps.max_vcpus.min(256) {
            return Err(PlatformError::TooManyCpus(cpus, caps.max_vcpus.min(256)));
        }
        membarrier(MembarrierCommand::RegisterPrivateExpedited)
            .map_err(|e| PlatformError::Host("register for memory barriers", e.into()))?;
        let (mut machine, report, guest) = self_test::run(&kvm, caps, cpus, config.memory_limit)?;
        // In ring 0 SYSCALL is as quick as a jump.
        let direct = config.rewrite && machine.mode == TrapMode::Ring3;
        machine.direct = direct.then(|| Trampolines::new(Stub::new(machine.mode).direct));
        let clock = Clock::new(report.tsc_khz, report.tsc_usable);
        Ok(Arc::new(KvmPlatform {
            pool: Pool::new(machine, cpus, config.service, report.tsc_khz, guest),
            clock,
            report,
            deadline: OnceLock::new(),
            surplus: OnceLock::new(),
        }))
    }

    /// What the self-test found.
    pub fn self_test(&self) -> &SelfTest {
        &self.report
    }

    /// Makes the calling thread the worker of `cpu`: it gets its vCPU, blocks all signals but the kick and its own faults,
    /// and may call [`Platform::enter`] and [`Platform::park`]. Once for each CPU.
    pub fn attach_worker(&self, cpu: usize) -> Result<(), PlatformError> {
        self.pool.attach(cpu)
    }

    /// Names who keeps the nearest deadline (the reactor). Once.
    pub fn set_deadline_sink(&self, sink: DeadlineSink) {
        let _ = self.deadline.set(sink);
    }

    /// Names who plans when free memory goes back to the host. Once.
    pub fn set_surplus_sink(&self, sink: SurplusSink) {
        let _ = self.surplus.set(sink);
    }

    /// Guest memory with all it offers to the rest of the monitor.
    pub fn guest_memory(&self) -> &Arc<GuestMemory> {
        &self.pool.machine.memory
    }

    /// How SYSCALL arrives.
    pub fn trap_mode(&self) -> TrapMode {
        self.pool.machine.mode
    }
}

impl Platform for KvmPlatform {
    fn cpus(&self) -> usize {
        self.pool.cpus()
    }

    fn cpu_model(&self) -> CpuModel {
        model::describe(&self.report.leaves, self.report.tsc_khz.unwrap_or(0), &self.report.host_cpu)
    }

    fn memory(&self) -> &dyn Memory {
        &*self.pool.machine.memory
    }

    fn new_space(&self) -> Result<Arc<dyn GuestSpace>, Errno> {
        Ok(Arc::new(KvmSpace::new(self.pool.machine.memory.clone(), self.pool.cpus())))
    }

    fn new_fpu(&self) -> Arc<dyn Fpu> {
        Arc::new(KvmFpu::new(&self.pool, &self.pool.machine.format))
    }

    fn xsave_len(&self) -> usize {
        self.pool.machine.format.image_len()
    }

    fn xcr0(&self) -> u64 {
        self.pool.machine.cpuid.xcr0
    }

    fn hwcap(&self) -> (u64, u64) {
        let cpuid = &self.pool.machine.cpuid;
        (u64::from(cpuid.hwcap), u64::from(cpuid.fsgsbase) << 1)
    }

    fn enter(&self, space: &dyn GuestSpace, ctx: &mut UserContext, fpu: &dyn Fpu) -> Exit {
        let space = space.as_any().downcast_ref::<KvmSpace>();
        match (space, fpu.as_any().downcast_ref::<KvmFpu>()) {
            (Some(space), Some(fpu)) => self.pool.enter(space, ctx, fpu),
            _ => Exit::Broken("an address space or vector state of another platform"),
        }
    }

    fn set_debug(&self, cpu: usize, addresses: [u64; 4], control: u64) -> Option<u64> {
        self.pool.set_debug(cpu, addresses, control)
    }

    fn touches(&self, space: &dyn GuestSpace, ctx: &UserContext) -> Vec<Touch> {
        space.as_any().downcast_ref::<KvmSpace>().map_or_else(Vec::new, |s| touches(&self.pool.machine, s, ctx))
    }

    fn memory_barrier(&self) {
        // The host interrupts the CPUs that run our threads, those in a guest included: leaving it is the barrier. A
        // process that has registered is refused nothing.
        if let Err(e) = membarrier(MembarrierCommand::PrivateExpedited) {
            log::error!("the host refused a memory barrier: {e}");
        }
    }

    fn serve_requests(&self, calls: Arc<dyn RequestedCalls>) {
        self.pool.start_service(calls);
    }

    fn direct_calls(&self) -> Option<&dyn DirectCalls> {
        self.pool.machine.direct.as_ref().map(|d| d as &dyn DirectCalls)
    }

    fn set_answer(&self, cpu: usize, nr: u16, value: Option<u32>) {
        self.pool.set_answer(cpu, nr, value);
    }

    fn take_answered(&self, cpu: usize, nr: u16) -> u64 {
        self.pool.take_answered(cpu, nr)
    }

    fn kick(&self, cpu: usize) {
        self.pool.kick(cpu);
    }

    fn set_preemption(&self, cpu: usize, ns: Option<u64>) {
        self.pool.set_preemption(cpu, ns, self.clock.monotonic());
    }

    fn park(&self, cpu: usize) {
        if let Some(sink) = self.surplus.get()
            && self.pool.machine.memory.take_surplus()
        {
            sink();
        }
        self.pool.park(cpu);
    }

    fn unpark(&self, cpu: usize) {
        self.pool.unpark(cpu);
    }

    fn keeps_tasks_away(&self, cpu: usize) -> bool {
        self.pool.keeps_tasks_away(cpu)
    }

    fn monotonic(&self) -> u64 {
        self.clock.monotonic()
    }

    fn realtime(&self) -> u64 {
        self.clock.realtime()
    }

    fn clock_was_set(&self) {
        self.clock.was_set();
    }

    fn tsc_clock(&self) -> Option<TscClock> {
        self.clock.params()
    }

    fn set_deadline(&self, at: Option<u64>) {
        if let Some(sink) = self.deadline.get() {
            sink(at.map(|at| self.clock.host_deadline(at)));
        }
    }

    fn random(&self, buf: &mut [u8]) {
        let mut done = 0;
        while done < buf.len() {
            // getrandom(2) fails only by a signal before its pool is ready.
            done += rustix::rand::getrandom(&mut buf[done..], rustix::rand::GetRandomFlags::empty()).unwrap_or(0);
        }
    }

    fn mailbox_readable(&self) -> bool {
        true
    }
}
