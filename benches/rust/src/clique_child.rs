//! One search for cliques in a process of its own, for its memory: `penstock-bench --clique-memory SIDE SIZE WORKERS SCALE DRAWS`.
//!
//! Memory is the peak of the resident set above what the loaded graph takes, which needs a process that has done nothing
//! else. It writes every clique down, and answers with one line of JSON: cliques, seconds, MiB.

use std::process::{Command, Stdio};
use std::sync::Arc;

use serde_json::{Value, json};

use crate::clique_peers::{Feed, on_timely};
use crate::cliques::rows;
use crate::graphs::Graph;

/// The seed of the graphs of all sides.
pub const SEED: u64 = 42;

/// Who searches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// `penstock-graph`.
    Ours,
    /// The dataflow on timely, fed round by round.
    Timely,
    /// The same, with all edges at once.
    Unbounded,
}

impl Side {
    const ALL: [(Self, &str); 3] =
        [(Self::Ours, "ours"), (Self::Timely, "timely"), (Self::Unbounded, "timely-unbounded")];
}

/// What is searched for, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// Who searches.
    pub side: Side,
    /// Vertices of a clique.
    pub size: usize,
    /// Threads.
    pub workers: usize,
    /// The graph is made as [`Graph::rmat`] makes it.
    pub scale: u32,
    /// Edges drawn.
    pub draws: u64,
}

/// What it took.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// Cliques written.
    pub cliques: u64,
    /// Time of the search.
    pub seconds: f64,
    /// Peak of the resident set above the loaded graph.
    pub peak_mib: f64,
}

impl Task {
    fn words(self) -> [String; 5] {
        let name = Side::ALL.iter().find(|(side, _)| *side == self.side).expect("all sides have names").1;
        let Self { size, workers, scale, draws, .. } = self;
        [name.into(), size.to_string(), workers.to_string(), scale.to_string(), draws.to_string()]
    }

    fn from_words(words: &[String]) -> Option<Self> {
        let [side, size, workers, scale, draws] = words else { return None };
        Some(Self {
            side: Side::ALL.iter().find(|(_, name)| name == side)?.0,
            size: size.parse().ok().filter(|size| (3..=4).contains(size))?,
            workers: workers.parse().ok().filter(|workers| (1..=64).contains(workers))?,
            scale: scale.parse().ok().filter(|scale| *scale < 32)?,
            draws: draws.parse().ok()?,
        })
    }

    /// Runs it in a process of its own.
    ///
    /// # Panics
    /// When that process cannot be started or fails.
    #[must_use]
    pub fn in_child(self) -> Taken {
        let program = std::env::current_exe().expect("this program has a path");
        let mut command = Command::new(program);
        let output = command.arg("--clique-memory").args(self.words()).stderr(Stdio::inherit()).output();
        let output = output.expect("the system grants a process");
        assert!(output.status.success(), "{self:?} ended with {}", output.status);
        let told: Value = serde_json::from_slice(&output.stdout).expect("the child answers in JSON");
        let number = |name: &str| told[name].as_f64().expect("a figure");
        Taken { cliques: number("cliques") as u64, seconds: number("seconds"), peak_mib: number("peak_mib") }
    }
}

/// Runs what the words say, and answers.
///
/// # Errors
/// What was wrong, for people.
pub fn serve(words: &[String]) -> Result<String, String> {
    let Task { side, size, workers, scale, draws } =
        Task::from_words(words).ok_or_else(|| format!("{words:?} is no search for cliques"))?;
    let graph = Arc::new(Graph::rmat(scale, draws, SEED));
    let loaded = settled()?;
    let (ms, cliques) = match side {
        Side::Ours => rows(&graph.query(size), workers),
        Side::Timely => on_timely(&graph, size, workers, true, Feed::Rounds),
        Side::Unbounded => on_timely(&graph, size, workers, true, Feed::Whole),
    };
    let peak_mib = kib("VmHWM:")?.saturating_sub(loaded).max(4) as f64 / 1024.0;
    Ok(json!({ "cliques": cliques, "seconds": ms / 1e3, "peak_mib": peak_mib }).to_string())
}

/// What is resident now, KiB, from where on the peak counts anew: what loading has freed is given back first, as else it would be
/// used again and not be seen.
///
/// # Errors
/// Where the system lets no process begin a new peak: that of loading would count.
pub(crate) fn settled() -> Result<u64, String> {
    give_back();
    std::fs::write("/proc/self/clear_refs", "5").map_err(|error| format!("/proc/self/clear_refs: {error}"))?;
    kib("VmRSS:")
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "the standard library has no call for it")]
fn give_back() {
    unsafe extern "C" {
        fn malloc_trim(pad: usize) -> i32;
    }
    // SAFETY: as glibc declares it; it may be called at any time, by any thread.
    let _ = unsafe { malloc_trim(0) };
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn give_back() {}

pub(crate) fn kib(name: &str) -> Result<u64, String> {
    let text = std::fs::read_to_string("/proc/self/status").map_err(|error| format!("/proc/self/status: {error}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let value = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
    value.ok_or_else(|| format!("/proc/self/status has no {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_survives_the_command_line_and_is_answered() {
        for (side, _) in Side::ALL {
            let task = Task { side, size: 3, workers: 1, scale: 8, draws: 900 };
            assert_eq!(Task::from_words(&task.words()), Some(task));
            let told: Value = serde_json::from_str(&serve(&task.words()).unwrap()).unwrap();
            assert_eq!(told["cliques"], Graph::rmat(8, 900, SEED).count(3));
            assert!(told["peak_mib"].as_f64().unwrap() > 0.0);
        }
        let words = ["ours", "9", "1", "8", "900"].map(String::from);
        assert!(serve(&words).unwrap_err().contains("no search for cliques") && serve(&[]).is_err());
    }
}
