//! Assembles the code of the vDSO, so that no sandbox need do it at its start.
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

mod vdso;
#[allow(dead_code)] // the sentry uses the rest
#[path = "../src/loader/vvar.rs"]
mod vvar;

fn main() {
    let mut text = String::new();
    for (name, mailbox_readable) in [("WITH_MAILBOX", true), ("WITHOUT_MAILBOX", false)] {
        let (code, functions) = vdso::code(mailbox_readable).expect("the vDSO assembles");
        writeln!(text, "pub const {name}: (&[u8], &[(&str, u64)]) = (&{code:?}, &{functions:?});")
            .expect("a string takes all");
    }
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("vdso.rs"), text).expect("OUT_DIR can be written");
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-changed=src/loader/vvar.rs");
}
