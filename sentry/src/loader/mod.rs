//! Program loading: ELF, `#!` scripts, the initial stack, the vDSO. Owns the image; never the task it goes into.
use std::sync::Arc;

use crate::Result;
use crate::mm::AddressSpace;
use crate::platform::UserContext;
use crate::task::Task;
use crate::task::thread_group::Image;
use crate::vfs::File;

/// What execve(2) asks for.
pub struct LoadRequest<'a> {
    /// Who executes: opens interpreters, gives credentials, limits, file-system context and platform.
    pub task: &'a Arc<Task>,
    /// The program, opened for execution.
    pub file: Arc<File>,
    /// Its path as given (AT_EXECFN, the argument of a script's interpreter).
    pub path: Vec<u8>,
    /// Arguments.
    pub argv: Vec<Vec<u8>>,
    /// Environment.
    pub envp: Vec<Vec<u8>>,
}

/// A program ready to run.
pub struct Loaded {
    /// Its memory.
    pub space: Arc<AddressSpace>,
    /// Its first registers.
    pub context: UserContext,
    /// What /proc shows of it.
    pub image: Image,
    /// Last component of the path that was executed, for PR_GET_NAME.
    pub comm: Vec<u8>,
}

/// Builds a program's address space. The caller's own is not touched, so that an error leaves it as it was. ENOEXEC, ELIBBAD, EACCES,
/// ELOOP (five interpreters), ENOMEM, E2BIG as execve(2).
pub fn load(request: LoadRequest<'_>) -> Result<Loaded> {
    let _ = request;
    todo!()
}
