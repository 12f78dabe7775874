//! The benchmark: one program that measures itself natively, in bartizan and in runsc, interleaved in one run, and prints
//! medians and ratios. It tests nothing.
//!
//! `bench [--quick] [--repeats N] [--runsc PATH] [--json FILE] [ROW…]` drives; `bench guest ROW` is the measured side.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)] // the measured operations are raw system calls

mod driver;
mod guest;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["guest", row] => guest::run(row),
        ["guest-list"] => guest::ROWS.iter().for_each(|r| println!("{}", r.name)),
        _ => driver::run(&args),
    }
}
