//! The peer oneTBB: a small C++ program that this compiles and talks to.
//!
//! Invariant: where there is no compiler or no library the reason is known and nothing else changes.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::{Run, Shape};

/// The program, as long as this lives.
#[derive(Debug)]
pub(super) struct Tbb {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// Of the library.
    pub(super) version: String,
}

impl Tbb {
    /// Compiles the program where that is needed, and starts it.
    ///
    /// # Errors
    /// Why there is no such peer here.
    pub(super) fn start() -> Result<Self, String> {
        let program = compiled()?;
        let mut child = Command::new(&program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{} does not start: {error}", program.display()))?;
        let (input, output) = (child.stdin.take(), child.stdout.take().ok_or("no output")?);
        let mut tbb = Self { child, input, output: BufReader::new(output), version: String::new() };
        tbb.version = tbb.line()?;
        Ok(tbb)
    }

    /// One run with so many tokens a thread; its checksum is checked by the caller.
    ///
    /// # Panics
    /// When the program has ended.
    pub(super) fn run(&mut self, shape: &Shape, tokens: usize, turns: u64, latency: bool) -> Run {
        let Shape { threads, batch, slots, .. } = *shape;
        let asked = format!("{threads} {} {slots} {batch} {turns} {}\n", tokens * threads, u8::from(latency));
        let input = self.input.as_mut().expect("it is open until the end");
        input.write_all(asked.as_bytes()).and_then(|()| input.flush()).expect("the oneTBB program reads");
        let line = self.line().expect("the oneTBB program answers");
        let words: Vec<_> = line.split_whitespace().collect();
        let number = |at: usize| words[at].parse::<u64>().expect("a number");
        Run {
            seconds: words[0].parse().expect("seconds"),
            sum: number(1),
            latency_ns: latency.then(|| (number(2), number(3))),
        }
    }

    fn line(&mut self) -> Result<String, String> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(|error| error.to_string())?;
        if line.is_empty() { Err("the oneTBB program has ended".into()) } else { Ok(line.trim().into()) }
    }
}

impl Drop for Tbb {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// The program, compiled anew when its source is younger.
fn compiled() -> Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../peers");
    let name = "tbb_pipeline.cpp";
    let source = folder.join(name);
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let program = own.with_file_name("penstock-bench-tbb");
    let modified = |path: &Path| path.metadata().and_then(|data| data.modified()).ok();
    if modified(&program).is_some_and(|built| modified(&source).is_none_or(|written| built >= written)) {
        return Ok(program);
    }
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".into());
    // By its name, beside it: what the compiler says goes into results, which are published.
    let made = Command::new(&compiler)
        .current_dir(&folder)
        .args(["-O2", "-std=c++17", "-o"])
        .arg(&program)
        .args([name, "-ltbb"])
        .output()
        .map_err(|error| format!("no compiler {compiler}: {error}"))?;
    if made.status.success() {
        return Ok(program);
    }
    let told = String::from_utf8_lossy(&made.stderr);
    let first = told.lines().find(|line| line.contains("error")).unwrap_or("it does not compile");
    Err(format!("{first} (the library and its headers are in the system's package libtbb-dev)"))
}
