//! The threads that run tasks: the calling thread for CPU 0, and one more for each other CPU. Owns their beginning, the gate before which
//! they wait for the kernel, and their end; never what they run.
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread::{Builder, JoinHandle};

use sentry::Kernel;

use super::SandboxError;
use crate::kvm::PlatformError;
use crate::platform::KvmPlatform;

/// Bytes of a worker's stack: system calls nest a few levels deep, never by what a guest says.
const STACK: usize = 1 << 20;

/// The workers' threads.
pub struct Workers {
    attached: Receiver<Result<(), PlatformError>>,
    /// Where each gets the kernel; without one it ends.
    gates: Vec<SyncSender<Arc<Kernel>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts the threads of all CPUs but CPU 0. Each makes its vCPU at once, while the caller goes on, and waits then.
    pub fn start(platform: &Arc<KvmPlatform>, cpus: usize) -> Result<Workers, SandboxError> {
        let (report, attached) = mpsc::channel();
        let mut workers = Workers { attached, gates: Vec::new(), threads: Vec::new() };
        for cpu in 1..cpus {
            let (gate, kernel) = mpsc::sync_channel::<Arc<Kernel>>(1);
            let (platform, report) = (platform.clone(), report.clone());
            let life = move || {
                let attached = platform.attach_worker(cpu);
                let ready = attached.is_ok();
                let _ = report.send(attached);
                drop(report);
                if ready && let Ok(kernel) = kernel.recv() {
                    sentry::kernel::worker_main(&kernel, cpu);
                }
            };
            let thread = Builder::new().name(format!("worker-{cpu}")).stack_size(STACK).spawn(life);
            workers.threads.push(thread.map_err(|e| SandboxError::host("start a worker thread", &e))?);
            workers.gates.push(gate);
        }
        Ok(workers)
    }

    /// Makes the calling thread the worker of CPU 0, and waits until each worker has its vCPU, which the jail lets nobody make later.
    pub fn attach(&self, platform: &Arc<KvmPlatform>) -> Result<(), SandboxError> {
        platform.attach_worker(0)?;
        for _ in &self.threads {
            match self.attached.recv() {
                Ok(outcome) => outcome?,
                Err(_) => {
                    return Err(SandboxError::host("start a worker thread", &std::io::ErrorKind::BrokenPipe.into()));
                }
            }
        }
        Ok(())
    }

    /// Runs tasks on all CPUs until the sandbox has ended, this thread as the worker of CPU 0.
    pub fn run(&self, kernel: &Arc<Kernel>) {
        for gate in &self.gates {
            // Full if the worker has it already.
            let _ = gate.try_send(kernel.clone());
        }
        sentry::kernel::worker_main(kernel, 0);
    }

    /// Waits for the other threads to end, which those that run do when the kernel is shut down.
    pub fn join(&mut self) {
        self.gates.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.join();
    }
}
