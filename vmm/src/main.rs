//! The `bartizan` command: hands its arguments to [`vmm::cli`].
use std::process::ExitCode;

fn main() -> ExitCode {
    vmm::cli::main(std::env::args_os())
}
