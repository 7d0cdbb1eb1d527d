//! Here so that the build dependencies count.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
}
