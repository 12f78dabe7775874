//! The `bartizan` command.
fn main() {}
