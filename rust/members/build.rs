//! A copy of the machine with seeded faults, for `tests/mutants.rs`. The library does not use it.
//!
//! A fault is a text that is replaced in one file by one that asks whether the fault is planted (`PLANTED`), so that one copy serves
//! all of them. One whose text is not found exactly once is named to the test, which then fails: the table has to follow the code.

use std::path::PathBuf;
use std::{env, fs};

/// Name, what finds it, file, text, replacement.
type Fault = (&'static str, &'static str, &'static str, &'static str, &'static str);

const FAULTS: &[Fault] = &include!("tests/support/faults.in");

fn main() {
    for watched in ["src", "tests/support/faults.in", "build.rs"] {
        println!("cargo:rerun-if-changed={watched}");
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo says where the crate is"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo says where to write"));
    let copy = out.join("machine");
    fs::create_dir_all(&copy).expect("the output folder can be written to");
    for entry in fs::read_dir(root.join("src")).expect("the sources are there").flatten() {
        let text = fs::read_to_string(entry.path()).expect("sources are text");
        let text = text.replace("crate::", "crate::machine::").replace("pub(crate)", "pub");
        fs::write(copy.join(entry.file_name()), text).expect("the output folder can be written to");
    }
    let (mut stale, mut table) = (Vec::new(), String::new());
    for (name, finds, file, text, replacement) in FAULTS {
        table.push_str(&format!("({name:?}, {finds:?}),\n"));
        if file.is_empty() {
            continue; // planted in the simulation itself
        }
        let path = copy.join(file);
        let source = fs::read_to_string(&path).unwrap_or_default();
        if source.matches(text).count() != 1 {
            stale.push(*name);
        }
        let planted = replacement.replace("PLANTED", &format!("crate::faults::planted({name:?})"));
        fs::write(&path, source.replacen(text, &planted, 1)).expect("the output folder can be written to");
    }
    let text = format!(
        "#[path = {:?}]\n#[allow(dead_code, unreachable_pub, unused_imports, clippy::all)]\nmod machine;\n\
         const STALE: &[&str] = &{stale:?};\nconst MUTANTS: &[(&str, &str)] = &[\n{table}];\n",
        copy.join("lib.rs").display()
    );
    fs::write(out.join("mutants.rs"), text).expect("the output folder can be written to");
}
