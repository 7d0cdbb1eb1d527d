//! Tells the extension module which profile of Cargo.toml it is built with.

use std::env;
use std::path::PathBuf;

fn main() {
    // PROFILE says only what a profile descends from; its folder, target/NAME/build/CRATE/out, has its name.
    let folder = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let name = folder.ancestors().nth(3).and_then(|path| path.file_name()).and_then(|name| name.to_str());
    println!(
        "cargo:rustc-env=PENSTOCK_PROFILE={}",
        name.map_or("unknown", |name| if name == "debug" { "dev" } else { name })
    );
    println!("cargo:rerun-if-changed=build.rs");
}
