//! Debug registers of a task (Intel SDM volume 3, 17.2) as ptrace(2) shows them in u_debugreg: four addresses, DR6, DR7. Owns what
//! may be set; the platform puts them into the processor while the task runs.
//!
//! A machine that has none to give is watched step by step: slower, and as exact.
use guest_abi::layout::TASK_SIZE;

use super::super::Task;
use super::{Tracing, flag};
use crate::platform::{Exit, GuestSpace, Touch, UserContext};
use crate::{Errno, Result};

/// Bits of DR7 that are reserved, and read as zero.
const CONTROL_RESERVED: u64 = 0xffff_ffff_0000_fc00;
/// What the unused bits of DR6 read as; a tracer sees them inverted to zero.
const STATUS_RESERVED: u64 = 0xffff_0ff0;
/// DR6: a single step.
const STATUS_STEP: u64 = 1 << 14;
/// Local and global enable bits of the four breakpoints, and of exactness.
const ENABLES: u64 = 0x3ff;
/// DR7: local and global exactness, and bit 10, which is always one.
const CONTROL_FIXED: u64 = 0x400;
/// RW field: break on execution, write, access.
const ON_EXECUTION: u64 = 0;
const ON_WRITE: u64 = 1;
const ON_PORTS: u64 = 2;
/// RFLAGS: step; the next instruction meets no breakpoint.
const TRAP_FLAG: u64 = 0x100;
const RESUME_FLAG: u64 = 0x1_0000;

/// The registers of one task.
#[derive(Clone, Copy, Default)]
pub struct DebugRegisters {
    address: [u64; 4],
    status: u64,
    control: u64,
}

impl DebugRegisters {
    fn enabled(control: u64, n: usize) -> bool {
        control >> (2 * n) & 3 != 0
    }

    /// RW and length of breakpoint `n`.
    fn kind(control: u64, n: usize) -> (u64, u64) {
        let field = control >> (16 + 4 * n);
        let len = match field >> 2 & 3 {
            0 => 1,
            1 => 2,
            2 => 8,
            _ => 4,
        };
        (field & 3, len)
    }

    /// Breakpoints that an instruction at `rip` meets before it runs.
    fn at(&self, rip: u64) -> u64 {
        self.matching(|n, address| Self::kind(self.control, n).0 == ON_EXECUTION && address == rip)
    }

    /// Breakpoints that memory accesses meet.
    fn touched(&self, touches: &[Touch]) -> u64 {
        self.matching(|n, address| {
            let (kind, len) = Self::kind(self.control, n);
            let meets = |t: &Touch| {
                t.addr < address.saturating_add(len)
                    && address < t.addr.saturating_add(t.len)
                    && (t.write || kind != ON_WRITE)
            };
            kind != ON_EXECUTION && touches.iter().any(meets)
        })
    }

    fn matching(&self, meets: impl Fn(usize, u64) -> bool) -> u64 {
        let met = |&(n, &address): &(usize, &u64)| Self::enabled(self.control, n) && meets(n, address);
        self.address.iter().enumerate().filter(met).fold(0, |bits, (n, _)| bits | 1 << n)
    }

    /// EINVAL for a breakpoint that the processor or Linux does not know, or that lies outside of the program's memory.
    fn check(address: u64, control: u64, n: usize) -> Result<()> {
        let (kind, len) = Self::kind(control, n);
        let fits = address.is_multiple_of(len) && address.checked_add(len).is_some_and(|end| end <= TASK_SIZE);
        if kind == ON_PORTS || (kind == ON_EXECUTION && len != 1) || !fits { Err(Errno::EINVAL) } else { Ok(()) }
    }
}

impl Tracing {
    /// Register `n` of u_debugreg.
    pub fn debug_register(&self, n: usize) -> u64 {
        let state = self.state.lock();
        let Some(d) = &state.debug else { return 0 };
        match n {
            0..=3 => d.address.get(n).copied().unwrap_or(0),
            6 => d.status,
            7 => d.control,
            _ => 0,
        }
    }

    /// Sets register `n` of u_debugreg. EINVAL for a breakpoint that cannot be, EIO for DR4 and DR5.
    pub fn set_debug_register(&self, n: usize, value: u64) -> Result<()> {
        let mut state = self.state.lock();
        let d = state.debug.get_or_insert_default();
        match n {
            0..=3 => {
                if DebugRegisters::enabled(d.control, n) {
                    DebugRegisters::check(value, d.control, n)?;
                } else if value >= TASK_SIZE {
                    return Err(Errno::EINVAL);
                }
                if let Some(slot) = d.address.get_mut(n) {
                    *slot = value;
                }
            }
            6 => d.status = value & 0xffff_ffff & !STATUS_RESERVED,
            7 => {
                let control = value & !CONTROL_RESERVED;
                for (n, &address) in d.address.iter().enumerate() {
                    if DebugRegisters::enabled(control, n) {
                        DebugRegisters::check(address, control, n)?;
                    }
                }
                d.control = control;
                if (0..4).any(|n| DebugRegisters::enabled(control, n)) {
                    self.set(flag::WATCH);
                } else {
                    self.clear(flag::WATCH);
                }
            }
            _ => return Err(Errno::EIO),
        }
        Ok(())
    }

    fn debug_registers(&self) -> DebugRegisters {
        self.state.lock().debug.as_deref().copied().unwrap_or_default()
    }

    /// A debug exception came with `status` in DR6. True if a breakpoint on execution was met, which must not be met again at once.
    fn debug_hit(&self, status: u64) -> bool {
        let mut state = self.state.lock();
        let Some(d) = state.debug.as_deref_mut() else { return false };
        let hits = (0..4).filter(|n| status >> n & 1 != 0 && DebugRegisters::enabled(d.control, *n));
        let (bits, execution) = hits.fold((0, false), |(bits, execution), n| {
            (bits | 1 << n, execution || DebugRegisters::kind(d.control, n).0 == ON_EXECUTION)
        });
        d.status = status & STATUS_STEP | bits;
        execution
    }

    /// Whether the last debug exception met a breakpoint and was no step.
    pub fn met_breakpoint(&self) -> bool {
        let status = self.state.lock().debug.as_ref().map_or(0, |d| d.status);
        self.has(flag::WATCH) && status & STATUS_STEP == 0 && status & 0xf != 0
    }

    /// execve(2): another program, no breakpoints.
    pub fn forget_breakpoints(&self) {
        self.clear(flag::WATCH);
        let old = self.state.lock().debug.take();
        drop(old);
    }
}

/// How breakpoints are watched over one entry into the guest.
pub enum Watch {
    /// There are none.
    Off,
    /// By the processor.
    Hardware,
    /// By a step over an instruction that meets `hits`; `own` if nobody else wanted the step.
    Step {
        /// Bits of DR6.
        hits: u64,
        /// The step is to be hidden.
        own: bool,
    },
}

impl Watch {
    /// Prepares an entry on `cpu`, the calling worker's. `Err` is how the entry ends without having been made.
    pub fn begin(task: &Task, cpu: usize, space: &dyn GuestSpace, ctx: &mut UserContext) -> Result<Watch, Exit> {
        if !task.tracing.has(flag::WATCH) {
            return Ok(Watch::Off);
        }
        let d = task.tracing.debug_registers();
        let platform = &task.kernel().platform;
        let control = d.control & (ENABLES | 0xffff_0000) | CONTROL_FIXED;
        if platform.set_debug(cpu, d.address, control).is_some() {
            return Ok(Watch::Hardware);
        }
        let met = d.at(ctx.rip);
        if met != 0 && ctx.rflags & RESUME_FLAG == 0 {
            task.tracing.debug_hit(met);
            task.context.lock().rflags |= RESUME_FLAG;
            return Err(Exit::Exception { vector: 1, error: 0, cr2: 0 });
        }
        let own = ctx.rflags & TRAP_FLAG == 0;
        ctx.rflags |= TRAP_FLAG;
        Ok(Watch::Step { hits: d.touched(&platform.touches(space, ctx)), own })
    }

    /// After the entry: what its end means to the task.
    pub fn end(self, task: &Task, cpu: usize, ctx: &mut UserContext, exit: Exit) -> Exit {
        let trapped = matches!(exit, Exit::Exception { vector: 1, .. });
        match self {
            Watch::Off => exit,
            Watch::Hardware => {
                // They are this task's alone.
                let status = task.kernel().platform.set_debug(cpu, [0; 4], 0).unwrap_or(0);
                if trapped && task.tracing.debug_hit(status) {
                    ctx.rflags |= RESUME_FLAG;
                }
                exit
            }
            Watch::Step { hits, own } => {
                if own {
                    ctx.rflags &= !TRAP_FLAG;
                    if exit == Exit::Syscall {
                        ctx.r11 &= !TRAP_FLAG;
                    }
                }
                if trapped {
                    ctx.rflags &= !RESUME_FLAG;
                    task.tracing.debug_hit(hits | if own { 0 } else { STATUS_STEP });
                    if own && hits == 0 {
                        return Exit::Interrupted;
                    }
                }
                exit
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn breakpoints_are_checked() {
        let t = Tracing::default();
        assert_eq!(t.set_debug_register(0, 0x1001), Ok(()));
        // A write of four bytes at an odd address.
        assert_eq!(t.set_debug_register(7, 1 | 0xd << 16), Err(Errno::EINVAL));
        assert_eq!(t.set_debug_register(0, 0x1004), Ok(()));
        assert_eq!(t.set_debug_register(7, 1 | 0xd << 16), Ok(()));
        assert_eq!(t.debug_register(7), 1 | 0xd << 16);
        assert_eq!(t.set_debug_register(0, 0x1002), Err(Errno::EINVAL));
        assert_eq!(t.set_debug_register(1, 1 << 63), Err(Errno::EINVAL));
        assert_eq!(t.set_debug_register(4, 0), Err(Errno::EIO));
        // Ports, and execution of more than a byte.
        assert_eq!(t.set_debug_register(7, 1 | 2 << 16), Err(Errno::EINVAL));
        assert_eq!(t.set_debug_register(7, 1 | 4 << 16), Err(Errno::EINVAL));
        assert!(!t.debug_hit(0xffff_0ff1) && t.met_breakpoint());
        assert_eq!(t.debug_register(6), 1);
        let d = t.debug_registers();
        let touch = |addr, len, write| d.touched(&[Touch { addr, len, write }]);
        assert_eq!((touch(0x1000, 8, true), touch(0x1000, 8, false), touch(0x1008, 8, true)), (1, 0, 0));
        t.forget_breakpoints();
        assert_eq!(t.debug_register(0), 0);
    }
}
