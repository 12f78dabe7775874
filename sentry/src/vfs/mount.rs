//! Mounts and mount namespaces (mount_namespaces(7)).

/// A file system attached to the tree.
pub struct Mount {}

/// A tree of mounts.
pub struct MountNamespace {}
