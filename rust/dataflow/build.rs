//! A copy of the workers with seeded faults, for `tests/mutants.rs`. The library does not use it.
//!
//! A fault is a text that is replaced in one file by one that asks whether the fault is planted (`PLANTED`), so that one copy serves
//! all of them. One whose text is not found exactly once is named to the test, which then fails: the table has to follow the code.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Name, file, text, replacement.
type Fault = (&'static str, &'static str, &'static str, &'static str);

const FAULTS: &[Fault] = &include!("tests/support/faults.in");

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("the output folder can be written to");
    for entry in fs::read_dir(from).expect("the sources are there").flatten() {
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy(&path, &to);
            continue;
        }
        let text = fs::read_to_string(path).expect("sources are text");
        let text = text.replace("crate::", "crate::machine::").replace("pub(crate)", "pub");
        // Their own tests run once.
        fs::write(to, text.replace("#[cfg(test)]", "#[cfg(any())]")).expect("the output folder can be written to");
    }
}

fn main() {
    for watched in ["src", "tests/support/faults.in", "build.rs"] {
        println!("cargo:rerun-if-changed={watched}");
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo says where the crate is"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo says where to write"));
    let machine = out.join("machine");
    copy(&root.join("src"), &machine);
    let (mut stale, mut names) = (Vec::new(), Vec::new());
    for (name, file, text, replacement) in FAULTS {
        names.push(*name);
        let path = machine.join(file);
        let source = fs::read_to_string(&path).unwrap_or_default();
        if source.matches(text).count() != 1 {
            stale.push(*name);
        }
        let planted = replacement.replace("PLANTED", &format!("crate::faults::planted({name:?})"));
        fs::write(&path, source.replacen(text, &planted, 1)).expect("the output folder can be written to");
    }
    let text = format!(
        "#[path = {:?}]\n#[allow(dead_code, missing_docs, private_bounds, private_interfaces, unreachable_pub, unused_imports, clippy::all)]\n\
         mod machine;\nconst STALE: &[&str] = &{stale:?};\nconst MUTANTS: &[&str] = &{names:?};\n",
        machine.join("lib.rs").display()
    );
    fs::write(out.join("mutants.rs"), text).expect("the output folder can be written to");
}
