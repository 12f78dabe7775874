//! The system call layer: decodes, calls, encodes. Holds no policy.
//!
//! Each area file offers `ROWS`; [`table::TABLE_AREAS`] lists the areas.
pub mod args;
pub mod attr;
pub mod directory;
pub mod dispatch;
pub mod epoll;
pub mod fcntl;
pub mod file;
pub mod futex;
pub mod ids;
pub mod inotify;
pub mod io;
pub mod limits;
pub mod memfd;
pub mod memory;
pub mod message;
pub mod mount;
pub mod names;
pub mod pidfd;
pub mod pipe;
pub mod place;
pub mod poll;
pub mod prctl;
pub mod process;
pub mod requested;
pub mod sched;
pub mod signal;
pub mod socket;
pub mod stat;
pub mod strace;
pub mod sync;
pub mod system;
pub mod table;
pub mod time;
pub mod transfer;
pub mod xattr;
