//! Assembles the entry stub (`src/entry/stub.rs`), so that the monitor need not do it at every start.
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

/// The part of the monitor's module of that name that the stub is made from.
#[path = "src/entry"]
mod entry {
    #![allow(dead_code, unused_imports, missing_docs)]
    #[path = "places.rs"]
    mod places;
    #[path = "stub.rs"]
    pub mod stub;
    pub use places::*;
}

fn main() {
    let mut text = String::from("pub fn stub(mode: TrapMode) -> Stub {\n    match mode {\n");
    for mode in [entry::TrapMode::Ring0, entry::TrapMode::Ring3] {
        let stub = entry::stub::assemble(mode).expect("the stub assembles");
        // What `Debug` prints of a structure is an expression, but for the vector.
        let literal = format!("{stub:?}").replace("code: [", "code: vec![");
        writeln!(text, "        TrapMode::{mode:?} => {literal},").expect("a string takes all");
    }
    text.push_str("    }\n}\n");
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("stub.rs"), text).expect("OUT_DIR can be written");
    println!("cargo::rustc-cfg=assembled");
    for file in ["build.rs", "src/entry/places.rs", "src/entry/stub.rs"] {
        println!("cargo::rerun-if-changed={file}");
    }
}
