//! The virtual file system: names, mounts, inodes, open files and descriptor tables. Owns path resolution and permission
//! checks; never the contents of any file system (see `fs`).
pub mod attachments;
pub mod attr;
pub mod claim;
pub mod dentry;
pub mod fd_table;
pub mod file;
pub mod fs_context;
pub mod inode;
pub mod lock;
pub mod mount;
pub mod names;
pub mod notify;
pub mod open;
pub mod path;
#[cfg(test)]
mod tests;

pub use attachments::Attachments;
pub use dentry::{Dentry, PathRef};
pub use fd_table::FdTable;
pub use file::{Caller, DirSink, File, FileOps, KernelCaller, OpenFlags};
pub use fs_context::{FsContext, FsState};
pub use inode::{FileSystem, Inode, InodeKind, OpenResult};
pub use mount::{Mount, MountFlags, MountNamespace};
pub use open::OpenHow;
pub use path::{Lookup, LookupFlags};
