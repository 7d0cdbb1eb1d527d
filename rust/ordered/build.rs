//! Copies of the synchronising modules with one seeded fault each, for `tests/mutants.rs`. The library does not use them.
//!
//! A fault is a text that is replaced in one file. One whose text is not found exactly once is named to the test, which then fails:
//! the table has to follow the code.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Name, the gate that has to notice, file, text, replacement.
type Fault = (&'static str, &'static str, &'static str, &'static str, &'static str);

const FAULTS: &[Fault] = &include!("tests/support/faults.in");

fn main() {
    for watched in ["src/reorder", "src/queue", "tests/support", "build.rs"] {
        println!("cargo:rerun-if-changed={watched}");
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo says where the crate is"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo says where to write"));
    let (mut modules, mut table, mut stale) = (String::new(), String::new(), String::new());
    for (name, gate, file, text, replacement) in FAULTS {
        let copy = out.join("mutants").join(name);
        for folder in ["reorder", "queue"] {
            copy_folder(&root.join("src").join(folder), &copy.join(folder));
        }
        let source = fs::read_to_string(copy.join(file)).unwrap_or_default();
        if source.matches(text).count() != 1 {
            stale.push_str(name);
            stale.push(' ');
        }
        fs::write(copy.join(file), source.replacen(text, replacement, 1)).expect("the output folder can be written to");
        let (support, copy) = (root.join("tests/support"), copy.display());
        let path = |part: &str| support.join(part).display().to_string();
        let _ = write!(
            modules,
            "pub mod {name} {{\n\
                #[path = {:?}] pub mod models;\n#[path = \"{copy}/queue/mod.rs\"] pub mod queue;\n\
                #[path = \"{copy}/reorder/mod.rs\"] pub mod reorder;\n#[path = {:?}] pub mod sync;\n}}\n",
            path("models.rs"),
            path("loom.rs"),
        );
        let _ = writeln!(table, "({name:?}, {gate:?}, gate!({name}, {gate:?}) as fn() -> Option<usize>),");
    }
    let text = format!(
        "{modules}\npub const STALE: &str = {stale:?};\n\
         pub const MUTANTS: &[(&str, &str, fn() -> Option<usize>)] = &[\n{table}];\n"
    );
    fs::write(out.join("mutants.rs"), text).expect("the output folder can be written to");
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("the output folder can be written to");
    for entry in fs::read_dir(from).expect("the sources are there").flatten() {
        let text = fs::read_to_string(entry.path()).expect("sources are text");
        fs::write(to.join(entry.file_name()), text).expect("the output folder can be written to");
    }
}
