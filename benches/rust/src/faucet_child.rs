//! One run of a flow in a process of its own: `penstock-bench --flow`.
//!
//! Memory is what the system counts as resident, so every measurement needs a process that has done nothing else. It reads one
//! line of JSON that says what to run and answers with one line: what was found, seconds, and the peak of the resident
//! set above what the loaded graph takes.

use std::io::{BufRead, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;

use serde_json::{Value, json};

use crate::clique_child::{kib, settled};
use crate::clique_flow::{self, Control, Graph, Run};
use crate::clique_peers::{Feed, on_timely};
use crate::surge_flow;

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// Cliques of an R-MAT graph.
    Cliques {
        /// On timely rather than on our engine, where every bound means rounds of edges as in [`crate::clique_peers`].
        timely: bool,
        /// It has two to this power vertices.
        scale: u32,
        /// Edges drawn.
        draws: u64,
        /// Vertices of a clique.
        size: usize,
    },
    /// One input becomes so many items.
    Surge {
        /// How many.
        items: u64,
    },
}

/// What to run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Task {
    /// What is computed.
    pub work: Work,
    /// Threads.
    pub workers: usize,
    /// How the flow is held back.
    pub control: Control,
}

/// What it took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Taken {
    /// Cliques or items found.
    pub found: u64,
    /// Edges of the graph; 0 without one.
    pub edges: u64,
    /// Time of the run.
    pub seconds: f64,
    /// Peak of the resident set, less what was resident when the graph was loaded.
    pub peak_mib: f64,
    /// The most batches that were unfinished on a worker; 0 when free.
    pub maximum: u64,
    /// N and B at the end; 0 when free.
    pub bounds: (u64, u64),
}

const GRAPH_SEED: u64 = 42;

impl Task {
    fn to_json(self) -> Value {
        let control = match self.control {
            Control::Free => json!("free"),
            Control::Adaptive => json!("adaptive"),
            Control::Bounded(outer, inner) => json!({"outer": [outer.0, outer.1], "inner": inner.map(|i| [i.0, i.1])}),
        };
        let work = match self.work {
            Work::Cliques { timely, scale, draws, size } => {
                json!({"timely": timely, "scale": scale, "draws": draws, "size": size})
            }
            Work::Surge { items } => json!({"items": items}),
        };
        json!({"work": work, "workers": self.workers, "control": control})
    }

    fn from_json(told: &Value) -> Option<Self> {
        let pair = |value: &Value| Some((value.get(0)?.as_u64()?, value.get(1)?.as_u64()?));
        let control = match &told["control"] {
            Value::String(free) if free == "free" => Control::Free,
            Value::String(adaptive) if adaptive == "adaptive" => Control::Adaptive,
            bounded => Control::Bounded(pair(&bounded["outer"])?, pair(&bounded["inner"])),
        };
        let work = match &told["work"] {
            surge if surge["items"].is_u64() => Work::Surge { items: surge["items"].as_u64()? },
            cliques => Work::Cliques {
                timely: cliques["timely"].as_bool()?,
                scale: u32::try_from(cliques["scale"].as_u64()?).ok().filter(|scale| *scale < 32)?,
                draws: cliques["draws"].as_u64()?,
                size: Some(cliques["size"].as_u64()? as usize).filter(|size| (3..=4).contains(size))?,
            },
        };
        Some(Self { work, workers: told["workers"].as_u64()? as usize, control })
    }

    /// Runs it in a process of its own.
    ///
    /// # Panics
    /// When that process cannot be started or fails.
    #[must_use]
    pub fn in_child(self) -> Taken {
        let program = std::env::current_exe().expect("this program has a path");
        let mut command = Command::new(program);
        command.arg("--flow").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the system grants a process");
        writeln!(child.stdin.take().expect("it was asked for"), "{}", self.to_json()).expect("the child reads");
        let output = child.wait_with_output().expect("the child ends");
        assert!(output.status.success(), "{self:?} ended with {}", output.status);
        let told: Value = serde_json::from_slice(&output.stdout).expect("the child answers in JSON");
        let number = |name: &str| told[name].as_u64().unwrap_or(0);
        Taken {
            found: number("found"),
            edges: number("edges"),
            seconds: told["seconds"].as_f64().expect("a time"),
            peak_mib: told["peak_mib"].as_f64().expect("a figure"),
            maximum: number("maximum"),
            bounds: (number("batches"), number("batch_size")),
        }
    }
}

/// Reads a task, runs it, and answers.
///
/// # Errors
/// What was wrong, for people.
pub fn serve(mut from: impl BufRead, mut to: impl Write) -> Result<(), String> {
    let mut line = String::new();
    from.read_line(&mut line).map_err(|error| error.to_string())?;
    let told: Value = serde_json::from_str(&line).map_err(|error| format!("{line:?} is no JSON: {error}"))?;
    let task = Task::from_json(&told).ok_or_else(|| format!("{told} is no task"))?;
    let graph = match task.work {
        Work::Cliques { scale, draws, .. } => Graph::rmat(scale, draws, GRAPH_SEED),
        Work::Surge { .. } => Graph::undirected("", &[]),
    };
    let graph = Arc::new(graph);
    let loaded = settled()?;
    let taken = match task.work {
        Work::Cliques { timely: true, size, .. } => {
            let feed = if task.control == Control::Free { Feed::Whole } else { Feed::Rounds };
            let (milliseconds, found) = on_timely(&graph, size, task.workers, false, feed);
            Run { found, seconds: milliseconds / 1e3, stats: Vec::new() }
        }
        Work::Cliques { size, .. } => clique_flow::run(&graph, size, task.workers, task.control),
        Work::Surge { items } => surge_flow::run(items, task.workers, task.control),
    };
    let peak = kib("VmHWM:")?;
    let most = taken.stats.iter().map(|stats| stats.maximum).max().unwrap_or(0);
    let bounds = taken.stats.first().map_or((0, 0), |stats| (stats.batches, stats.batch_size));
    let answer = json!({
        "found": taken.found, "edges": graph.edges(), "seconds": taken.seconds, "maximum": most,
        "peak_mib": peak.saturating_sub(loaded).max(4) as f64 / 1024.0, "batches": bounds.0, "batch_size": bounds.1,
    });
    writeln!(to, "{answer}").map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_survives_the_pipe_and_is_answered() {
        let cliques = Work::Cliques { timely: false, scale: 6, draws: 300, size: 4 };
        let found = Graph::rmat(6, 300, GRAPH_SEED).count(4);
        for control in [
            Control::Free,
            Control::Adaptive,
            Control::Bounded((4, 1000), None),
            Control::Bounded((4, 1000), Some((2, 64))),
        ] {
            for (work, found) in [(cliques, found), (Work::Surge { items: 777 }, 777)] {
                let task = Task { work, workers: 1, control };
                assert_eq!(Task::from_json(&task.to_json()), Some(task));
                let mut answer = Vec::new();
                serve(format!("{}\n", task.to_json()).as_bytes(), &mut answer).unwrap();
                let told: Value = serde_json::from_slice(&answer).unwrap();
                assert_eq!(told["found"], found);
            }
        }
        let wrong =
            json!({"work": {"timely": false, "scale": 99, "draws": 1, "size": 4}, "workers": 1, "control": "free"});
        assert!(serve(format!("{wrong}\n").as_bytes(), Vec::new()).is_err());
        assert!(serve("cliques\n".as_bytes(), Vec::new()).is_err());
    }
}
