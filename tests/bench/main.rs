//! The benchmark: one program that measures itself natively, in bartizan and in runsc, interleaved in one run, and prints
//! medians, their spread and ratios. It tests nothing.
//!
//! `bench --help` gives the options of the driving side; `bench guest ROW [OPERATIONS]` is the measured side.
#![allow(unsafe_code, clippy::undocumented_unsafe_blocks)] // the measured operations are raw system calls

mod counts;
mod driver;
mod figures;
mod growth;
mod held;
mod options;
mod rows;
mod seed;
mod systems;

use options::Form;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["guest", row] => rows::run(row, None),
        ["guest", row, operations] => rows::run(row, operations.parse().ok()),
        ["guest-list"] => rows::all().for_each(|r| println!("{}", r.name)),
        _ => {
            let o = options::parse(&args);
            match o.form {
                Form::Table => driver::run(&o),
                Form::Counts => counts::run(&o),
                Form::Growth => growth::run(&o),
                Form::Seed => seed::run(&o),
            }
        }
    }
}
