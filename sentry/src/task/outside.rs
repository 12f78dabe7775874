//! Signals from whoever runs the sandbox, addressed to any of its processes. Owns the choice of the target; what a signal does is
//! the business of `signal`.
use crate::kernel::Kernel;
use crate::signal::queue::{code, info};
use crate::signal::{self, Signal};
use crate::{Errno, Result};

/// Processes looked at under one hold of the index.
const PAGE: usize = 64;

impl Kernel {
    /// Sends to the process with this number in the outermost PID namespace; it acts on an init as on any process. ESRCH if
    /// there is none.
    pub fn kill_from_host(&self, pid: i32, signal: Signal) -> Result<()> {
        let group = self.root_pid_ns.group(pid).ok_or(Errno::ESRCH)?;
        send(&group, signal);
        Ok(())
    }

    /// Sends to every process; gives how many there were.
    pub fn kill_all_from_host(&self, signal: Signal) -> usize {
        let (mut from, mut reached) = (1, 0);
        loop {
            let page = self.root_pid_ns.groups_from(from, PAGE);
            let Some((last, _)) = page.last() else { return reached };
            let next = last.checked_add(1);
            for (_, group) in &page {
                send(group, signal);
            }
            reached += page.len();
            match next {
                Some(n) => from = n,
                None => return reached,
            }
        }
    }
}

fn send(group: &std::sync::Arc<super::ThreadGroup>, signal: Signal) {
    // The sender has no number inside. Only a queue at its limit can fail, which kill(2) does not tell either.
    let info = info::from_process(signal, code::SI_USER, 0, 0);
    let _ = signal::send::send_to_group(group, signal, info, signal::send::Sender::Host);
}
