//! What the sentry keeps for the guest, counted against the sandbox's memory limit. Owns the balance of charging and giving back;
//! never the memory itself, which is the sentry's heap.
//!
//! Whatever the guest can make the sentry keep without a small fixed bound has a charge: a description, bytes in a pipe, a name,
//! a task. The amounts are estimates on the high side, so that the process stays near its limit whatever the guest does.
use std::sync::Arc;

use crate::Result;
use crate::platform::{KernelMemory, Platform};

/// Bytes charged to the sandbox; given back when dropped.
pub struct Charge {
    platform: Arc<dyn Platform>,
    what: KernelMemory,
    bytes: u64,
}

impl Charge {
    /// Charges `bytes`. ENOMEM at the sandbox's memory limit.
    pub fn new(platform: &Arc<dyn Platform>, what: KernelMemory, bytes: usize) -> Result<Charge> {
        let mut charge = Charge { platform: platform.clone(), what, bytes: 0 };
        charge.resize(bytes)?;
        Ok(charge)
    }

    /// Nothing yet, to be resized.
    pub fn empty(platform: &Arc<dyn Platform>, what: KernelMemory) -> Charge {
        Charge { platform: platform.clone(), what, bytes: 0 }
    }

    /// Bytes charged.
    pub fn bytes(&self) -> usize {
        usize::try_from(self.bytes).unwrap_or(usize::MAX)
    }

    /// Another charge on the same account.
    pub fn another(&self, bytes: usize) -> Result<Charge> {
        Charge::new(&self.platform, self.what, bytes)
    }

    /// Changes the amount. Less never fails; ENOMEM leaves it as it was.
    pub fn resize(&mut self, bytes: usize) -> Result<()> {
        let wanted = bytes as u64;
        if wanted > self.bytes {
            self.platform.memory().charge(self.what, wanted - self.bytes)?;
        } else if wanted < self.bytes {
            self.platform.memory().uncharge(self.what, self.bytes - wanted);
        }
        self.bytes = wanted;
        Ok(())
    }

    /// Charges `bytes` more.
    pub fn add(&mut self, bytes: usize) -> Result<()> {
        self.resize(self.bytes().saturating_add(bytes))
    }

    /// Gives `bytes` back.
    pub fn sub(&mut self, bytes: usize) {
        let less = self.bytes.min(bytes as u64);
        if less > 0 {
            self.platform.memory().uncharge(self.what, less);
            self.bytes -= less;
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.platform.memory().uncharge(self.what, self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Errno;
    use crate::platform::sim::SimPlatform;

    #[test]
    fn charges_meet_the_limit_and_go_back() {
        let sim = SimPlatform::new(1);
        sim.sim_memory().set_limit(10_000);
        let platform: Arc<dyn Platform> = sim.clone();
        let mut a = Charge::new(&platform, KernelMemory::Slab, 6000).unwrap();
        assert_eq!(Charge::new(&platform, KernelMemory::Task, 4001).err(), Some(Errno::ENOMEM));
        assert_eq!(a.add(4001), Err(Errno::ENOMEM));
        assert_eq!(a.bytes(), 6000);
        assert_eq!(sim.memory().alloc(), Err(Errno::ENOMEM), "frames and charges share one limit");
        a.sub(1000);
        assert_eq!(sim.memory().charged(KernelMemory::Slab), 5000);
        drop(a);
        assert_eq!(sim.memory().used(), 0);
    }
}
