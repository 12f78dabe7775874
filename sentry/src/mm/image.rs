//! What an address space remembers of the program in it: where its parts lie, its executable, whether it may be dumped.
use std::sync::Arc;

use super::AddressSpace;
use super::space::MappedFile;
use crate::ns::user_namespace::UserNamespace;

/// The places that /proc/PID/stat, auxv, cmdline and environ show and PR_SET_MM changes.
#[derive(Clone, Default)]
#[allow(missing_docs)]
pub struct ImageInfo {
    pub start_code: u64,
    pub end_code: u64,
    pub start_data: u64,
    pub end_data: u64,
    pub start_stack: u64,
    pub arg_start: u64,
    pub arg_end: u64,
    pub env_start: u64,
    pub env_end: u64,
    /// The auxiliary vector, (type, value) words in order, AT_NULL included.
    pub auxv: Vec<u64>,
    /// /proc/PID/exe.
    pub exe: Option<Arc<dyn MappedFile>>,
    /// The user namespace in which it was executed; None stands for the initial one. Whoever enters another keeps what it has read
    /// until then.
    pub user_ns: Option<Arc<UserNamespace>>,
    /// The system call return point in the vDSO that signal frames may use, 0 without one.
    pub vdso: u64,
}

impl AddressSpace {
    /// A copy of what is remembered of the program.
    pub fn image(&self) -> ImageInfo {
        self.image.lock().clone()
    }

    /// Changes it.
    pub fn change_image<R>(&self, change: impl FnOnce(&mut ImageInfo) -> R) -> R {
        change(&mut self.image.lock())
    }

    /// The executable.
    pub fn exe(&self) -> Option<Arc<dyn MappedFile>> {
        self.image.lock().exe.clone()
    }

    /// Replaces the executable (exec, PR_SET_MM_EXE_FILE).
    pub fn set_exe(&self, file: Option<Arc<dyn MappedFile>>) {
        let old = std::mem::replace(&mut self.image.lock().exe, file);
        drop(old);
    }

    /// The user namespace in which its program was executed.
    pub fn user_ns(&self) -> Arc<UserNamespace> {
        self.image.lock().user_ns.clone().unwrap_or_else(|| UserNamespace::initial().clone())
    }
}
