//! Program loading: ELF, `#!` scripts, the initial stack, the vDSO. Owns the image; never the task it goes into.
