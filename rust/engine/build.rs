//! A copy of the machines, and of the pace that members keep, with seeded faults, for `tests/mutants.rs`. The library does not use it.
//!
//! A fault is a text that is replaced in one file by one that asks whether the fault is planted (`PLANTED`), so that one copy serves
//! all of them. One whose text is not found exactly once is named to the test, which then fails: the table has to follow the code.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Name, what finds it, file, text, replacement.
type Fault = (&'static str, &'static str, &'static str, &'static str, &'static str);

const FAULTS: &[Fault] = &include!("tests/support/faults.in");

fn main() {
    for watched in ["src", "../pace/src", "tests/support", "build.rs"] {
        println!("cargo:rerun-if-changed={watched}");
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo says where the crate is"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo says where to write"));
    copy_folder(&root.join("src"), &out.join("machine"), "machine");
    copy_folder(&root.join("../pace/src"), &out.join("pace"), "pace");
    let (mut stale, mut table) = (Vec::new(), String::new());
    for (name, finds, file, text, replacement) in FAULTS {
        table.push_str(&format!("({name:?}, {finds:?}),\n"));
        if file.is_empty() {
            continue; // planted in the simulation itself
        }
        let path = out.join(if file.starts_with("pace/") { "" } else { "machine" }).join(file);
        let source = fs::read_to_string(&path).unwrap_or_default();
        if source.matches(text).count() != 1 {
            stale.push(*name);
        }
        let planted = replacement.replace("PLANTED", &format!("crate::sim::planted({name:?})"));
        fs::write(&path, source.replacen(text, &planted, 1)).expect("the output folder can be written to");
    }
    let copies = ["machine", "pace"].map(|name| {
        let file = out.join(name).join("lib.rs");
        format!("#[path = {file:?}]\n#[allow(dead_code, unreachable_pub, unused_imports, clippy::all)]\nmod {name};\n")
    });
    let text = format!(
        "{}const STALE: &[&str] = &{stale:?};\nconst MUTANTS: &[(&str, &str)] = &[\n{table}];\n",
        copies.concat()
    );
    fs::write(out.join("mutants.rs"), text).expect("the output folder can be written to");
}

/// Copies the sources of a crate so that they stand below a module, without their tests.
fn copy_folder(from: &Path, to: &Path, module: &str) {
    fs::create_dir_all(to).expect("the output folder can be written to");
    for entry in fs::read_dir(from).expect("the sources are there").flatten() {
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &to.join(entry.file_name()), module);
            continue;
        }
        let text = fs::read_to_string(entry.path()).expect("sources are text");
        let text = text
            .replace("crate::", &format!("crate::{module}::"))
            .replace("pub(crate)", "pub")
            .replace("#[cfg(test)]", "#[cfg(any())]");
        fs::write(to.join(entry.file_name()), text).expect("the output folder can be written to");
    }
}
