//! Death: exit(2), exit_group(2), what a dying task leaves and to whom.
use std::sync::Arc;

use super::Task;
use crate::vfs::FdTable;

/// Lets go of a descriptor table: the last user closes what is open.
pub(super) fn drop_files(_task: &Task, files: Arc<FdTable>) {
    if let Ok(table) = Arc::try_unwrap(files) {
        for file in table.remove_range(0, u32::MAX) {
            let ops = file.ops().clone();
            ops.flush(&file);
        }
    }
}
