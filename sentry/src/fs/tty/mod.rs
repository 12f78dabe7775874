//! Terminals: job control, settings and the line discipline that pseudo-terminals use. Owns what a terminal means to sessions and to
//! the bytes that pass; never where the bytes come from.
pub mod job_control;
pub mod line;
pub mod line_edit;
pub mod termios;

use std::sync::Arc;

pub use job_control::{JobControl, TtyDevice};
pub use line::Line;
pub use termios::{Termios, WinSize};

use crate::task::Task;
use crate::vfs::{OpenFlags, OpenResult};
use crate::{Errno, Result};

/// Opens /dev/tty: the caller's controlling terminal. ENXIO without one.
pub fn open_controlling(task: &Task, flags: OpenFlags) -> Result<OpenResult> {
    let tty = task.group().session().tty().ok_or(Errno::ENXIO)?;
    let job = tty.as_any().downcast_ref::<JobControl>().ok_or(Errno::ENXIO)?;
    let device: Arc<dyn TtyDevice> = job.terminal().ok_or(Errno::EIO)?;
    device.open_again(task, flags)
}
