//! Tells the benches which compiler made them with which profile of Cargo.toml: a figure without it cannot be repeated.

use std::env;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let told = Command::new(rustc).arg("--version").output();
    let version = told.ok().and_then(|told| String::from_utf8(told.stdout).ok()).unwrap_or_default();
    println!("cargo:rustc-env=PENSTOCK_RUSTC={}", version.trim());
    // PROFILE says only what a profile descends from; its folder, target/NAME/build/CRATE/out, has its name.
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let name = folder.ancestors().nth(3).and_then(|path| path.file_name()).and_then(|name| name.to_str());
    println!(
        "cargo:rustc-env=PENSTOCK_PROFILE={}",
        name.map_or("unknown", |name| if name == "debug" { "dev" } else { name })
    );
    println!("cargo:rerun-if-changed=build.rs");
}
