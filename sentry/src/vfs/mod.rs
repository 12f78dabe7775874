//! The virtual file system: names, mounts, inodes, open files and descriptor tables. Owns path resolution and permission
//! checks; never the contents of any file system (see `fs`).
pub mod attachments;
pub mod dentry;
pub mod fd_table;
pub mod file;
pub mod fs_context;
pub mod inode;
pub mod mount;
pub mod path;

pub use dentry::{Dentry, PathRef};
pub use fd_table::FdTable;
pub use file::{DirSink, File, FileOps, OpenFlags};
pub use fs_context::FsContext;
pub use inode::{FileSystem, Inode, InodeKind, OpenResult};
pub use mount::{Mount, MountNamespace};
