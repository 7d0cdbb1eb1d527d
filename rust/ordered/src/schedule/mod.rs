//! Which operator a free worker serves next.
//!
//! Owns: what a scheduler may look at ([`Load`], [`Traffic`]), the trait, the four heuristics of the source and an adaptive one that chooses among
//! them. Invariants: a scheduler names only an operator that is [`runnable`](Load::runnable); of equal operators it names the earliest;
//! it holds no lock and never divides by zero. Nothing that a scheduler does can break order or stop a pipeline: where it names nobody
//! although there is work, the worker serves the latest operator that can run.
//!
//! After "Scaling Ordered Stream Processing on Shared-Memory Multicores", part "Scheduling Runtime". Departures: an operator without
//! waiting input is never named (the source leaves open what a worker does there); thresholds never fall below one item, so that
//! an operator that drops everything is served, too; an operator that nobody has measured yet comes first where costs decide.

mod adaptive;
mod ct;
mod et;
mod lip;
mod qst;

pub use adaptive::Adaptive;
pub use ct::Ct;
pub use et::Et;
pub use lip::Lip;
pub use qst::Qst;

use std::str::FromStr;

/// One operator as a scheduler sees it. Sizes count items; an envelope without items weighs as one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// I: items that wait for it.
    pub input: usize,
    /// O: items that it has made and that nobody has taken yet, those that wait for their order included.
    pub output: usize,
    /// S: outputs per input; `None` before the first.
    pub selectivity: Option<f64>,
    /// c: nanoseconds per input; `None` before the first.
    pub cost_ns: Option<f64>,
    /// w: workers that serve it now.
    pub workers: usize,
    /// M: the most that may: 1 for stateful operators, the partitions of partitioned ones, all workers for stateless ones.
    pub most: usize,
    /// T: worker time spent on it in the current window, nanoseconds.
    pub spent_ns: u64,
}

impl Load {
    /// Whether one more worker finds something to do here: input waits, and w < M.
    #[must_use]
    pub fn runnable(&self) -> bool {
        self.input > 0 && self.workers < self.most
    }
}

/// What has gone through the workers of a pipeline so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Envelopes that have come to the first operator.
    pub entered: u64,
    /// Envelopes that have left the last one. They leave in the order in which they came.
    pub left: u64,
    /// Their items.
    pub items: u64,
}

/// Names the operator that a free worker serves next.
pub trait Scheduler: Send + Sync {
    /// The number of a runnable operator, the first of the pipeline being 0; `None` when none is worth a worker.
    fn pick(&self, loads: &[Load]) -> Option<usize>;

    /// Told now and then by the workers: the time since the pipeline began, and what has gone through it.
    fn observe(&self, now_ns: u64, traffic: Traffic, loads: &[Load]) {
        let _ = (now_ns, traffic, loads);
    }

    /// What it is called in figures; of an adaptive one also what it uses at the moment.
    fn name(&self) -> String;
}

/// The schedulers by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SchedulerKind {
    /// Tries the others and keeps the best.
    #[default]
    Adaptive,
    /// Queue-size throttling.
    Qst,
    /// Last in pipeline.
    Lip,
    /// Estimated time.
    Et,
    /// Current throughput.
    Ct,
}

impl SchedulerKind {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Adaptive, Self::Qst, Self::Lip, Self::Et, Self::Ct];

    /// The name that [`FromStr`] reads.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Adaptive => "adaptive",
            Self::Qst => "qst",
            Self::Lip => "lip",
            Self::Et => "et",
            Self::Ct => "ct",
        }
    }

    /// A scheduler of this kind with its usual parameters.
    #[must_use]
    pub fn make(self) -> Box<dyn Scheduler> {
        match self {
            Self::Adaptive => Box::new(Adaptive::default()),
            Self::Qst => Box::new(Qst::default()),
            Self::Lip => Box::new(Lip::default()),
            Self::Et => Box::new(Et),
            Self::Ct => Box::new(Ct::default()),
        }
    }
}

/// A name that no scheduler has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is no scheduler: use adaptive, qst, lip, et or ct")]
pub struct NoSuchScheduler {
    /// What was asked for.
    pub name: String,
}

impl FromStr for SchedulerKind {
    type Err = NoSuchScheduler;

    fn from_str(name: &str) -> Result<Self, NoSuchScheduler> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == name);
        found.ok_or_else(|| NoSuchScheduler { name: name.to_owned() })
    }
}

/// The latest runnable operator: what a worker serves where the scheduler names nobody.
pub(crate) fn latest(loads: &[Load]) -> Option<usize> {
    loads.iter().rposition(Load::runnable)
}

#[cfg(test)]
pub(crate) mod vectors {
    use super::Load;

    /// I and O, otherwise one worker of a stateless operator that nobody serves, with S = 1 and c = 100 ns.
    pub(crate) fn load(input: usize, output: usize) -> Load {
        Load { input, output, selectivity: Some(1.0), cost_ns: Some(100.0), workers: 0, most: 4, spent_ns: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::vectors::load;
    use super::*;

    #[test]
    fn every_scheduler_names_runnable_operators_only() {
        // All small states of two operators, with the statistics that have gone wrong elsewhere.
        let figures = [None, Some(0.0), Some(0.5), Some(3.0), Some(f64::INFINITY)];
        for kind in SchedulerKind::ALL {
            let scheduler = kind.make();
            for state in 0..(3_usize * 2 * 2 * 5 * 5).pow(2) {
                let mut rest = state;
                let mut digit = |base: usize| {
                    let digit = rest % base;
                    rest /= base;
                    digit
                };
                let loads = [(); 2].map(|()| Load {
                    input: [0, 1, 100][digit(3)],
                    output: [0, 1_000_000][digit(2)],
                    workers: digit(2),
                    selectivity: figures[digit(5)],
                    cost_ns: figures[digit(5)],
                    most: 1,
                    spent_ns: 7,
                });
                if let Some(at) = scheduler.pick(&loads) {
                    assert!(loads[at].runnable(), "{} names {at} of {loads:?}", kind.name());
                }
            }
            assert_eq!(scheduler.pick(&[]), None);
        }
    }

    #[test]
    fn names_are_read_and_wrong_ones_told() {
        for kind in SchedulerKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
            assert!(kind.make().name().starts_with(kind.name()));
        }
        let wrong = "fifo".parse::<SchedulerKind>().expect_err("there is no such one");
        assert_eq!(wrong.to_string(), "\"fifo\" is no scheduler: use adaptive, qst, lip, et or ct");
    }

    #[test]
    fn the_latest_that_can_run_is_what_remains() {
        let full = Load { workers: 4, ..load(9, 0) };
        assert_eq!(latest(&[load(1, 0), load(2, 0), full, load(0, 0)]), Some(1));
        assert_eq!(latest(&[full, load(0, 9)]), None);
    }
}
