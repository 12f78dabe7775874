//! What a group does with each signal (sigaction(2)). Shared between groups by CLONE_SIGHAND. Never touches a queue.
use std::sync::Arc;

use guest_abi::types::SigAction;

use super::set::{DefaultAction, SigSet, Signal};
use crate::lock::{Mutex, Rank};

/// SIG_DFL.
pub const SIG_DFL: u64 = 0;
/// SIG_IGN.
pub const SIG_IGN: u64 = 1;

/// SA_* of sigaction(2).
pub mod sa {
    #![allow(missing_docs)]
    pub const NOCLDSTOP: u64 = 1;
    pub const NOCLDWAIT: u64 = 2;
    pub const SIGINFO: u64 = 4;
    pub const UNSUPPORTED: u64 = 0x400;
    pub const EXPOSE_TAGBITS: u64 = 0x800;
    pub const RESTORER: u64 = 0x0400_0000;
    pub const ONSTACK: u64 = 0x0800_0000;
    pub const RESTART: u64 = 0x1000_0000;
    pub const NODEFER: u64 = 0x4000_0000;
    pub const RESETHAND: u64 = 0x8000_0000;
    /// Those that sigaction(2) keeps; SA_UNSUPPORTED and unknown bits are cleared, which is how programs probe for flags.
    pub const KNOWN: u64 =
        NOCLDSTOP | NOCLDWAIT | SIGINFO | EXPOSE_TAGBITS | RESTORER | ONSTACK | RESTART | NODEFER | RESETHAND;
}

type Table = [SigAction; Signal::MAX as usize];

/// The actions of all signals.
pub struct SignalActions {
    table: Mutex<Table>,
}

impl Default for SignalActions {
    fn default() -> Self {
        SignalActions::with(&[SigAction::default(); Signal::MAX as usize])
    }
}

impl SignalActions {
    fn with(table: &Table) -> SignalActions {
        SignalActions { table: Mutex::new(Rank::SignalActions, *table) }
    }

    /// The action of one signal.
    pub fn get(&self, signal: Signal) -> SigAction {
        self.table.lock()[signal.index()]
    }

    /// Replaces an action; gives the old one.
    pub fn set(&self, signal: Signal, action: SigAction) -> SigAction {
        core::mem::replace(&mut self.table.lock()[signal.index()], action)
    }

    /// Takes the action for a delivery: SA_RESETHAND resets it in the same step.
    pub fn take(&self, signal: Signal) -> SigAction {
        let mut table = self.table.lock();
        let action = table[signal.index()];
        if action.flags & sa::RESETHAND != 0 && action.handler > SIG_IGN {
            table[signal.index()].handler = SIG_DFL;
        }
        action
    }

    /// Whether the signal would be dropped: SIG_IGN, or SIG_DFL of one whose default is to be ignored.
    pub fn ignores(&self, signal: Signal) -> bool {
        is_ignored(signal, self.get(signal).handler)
    }

    /// A copy, for fork(2).
    pub fn duplicate(&self) -> Arc<SignalActions> {
        Arc::new(SignalActions::with(&self.table.lock()))
    }

    /// A copy with every handler reset (CLONE_CLEAR_SIGHAND, execve(2)): ignored signals stay ignored.
    pub fn duplicate_reset(&self) -> Arc<SignalActions> {
        let mut table = *self.table.lock();
        for action in &mut table {
            let handler = if action.handler == SIG_IGN { SIG_IGN } else { SIG_DFL };
            *action = SigAction { handler, ..SigAction::default() };
        }
        Arc::new(SignalActions::with(&table))
    }

    /// Ignored and caught signals, for /proc/PID/status.
    pub fn summary(&self) -> (SigSet, SigSet) {
        let (mut ignored, mut caught) = (SigSet::EMPTY, SigSet::EMPTY);
        for (i, action) in self.table.lock().iter().enumerate() {
            match action.handler {
                SIG_DFL => {}
                SIG_IGN => ignored.0 |= 1 << i,
                _ => caught.0 |= 1 << i,
            }
        }
        (ignored, caught)
    }
}

/// Whether `handler` means that `signal` is dropped.
pub fn is_ignored(signal: Signal, handler: u64) -> bool {
    match handler {
        SIG_IGN => !signal.is_kernel_only(),
        SIG_DFL => matches!(signal.default_action(), DefaultAction::Ignore | DefaultAction::Continue),
        _ => false,
    }
}
