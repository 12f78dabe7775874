//! The sentry: a Linux-compatible kernel in safe Rust. It owns tasks, namespaces, signals, memory, files, sockets, time
//! and the system calls, and knows the machine only through the traits of [`platform`].
//!
//! Direction of imports: `syscalls → {fs, socket} → {task, signal, futex, timers, loader} → {vfs, mm, ns} →
//! {time, sched, trace} → {event, platform} → lock`; sideways only inside a brace, upward only through a trait owned by the lower
//! module. `kernel` holds handles and may name all.
#![forbid(unsafe_code)]

pub mod event;
pub mod fs;
pub mod futex;
pub mod kernel;
pub mod loader;
pub mod lock;
pub mod mm;
pub mod ns;
pub mod platform;
pub mod sched;
pub mod signal;
pub mod socket;
pub mod syscalls;
pub mod task;
pub mod time;
pub mod timers;
pub mod trace;
pub mod vfs;

pub use guest_abi::Errno;
pub use kernel::Kernel;

/// What a kernel operation gives: a value or Linux's error number.
pub type Result<T, E = Errno> = core::result::Result<T, E>;
