//! `nexmark`: the flows of NEXMark as Python writes them, beside the same queries in native timely.
//!
//! `penstock-bench --nexmark` reads one line of JSON: the folder of the events, how long an epoch of them is, which numbers of workers, and
//! each query with its plan, its functions (which have [twins](calls) here, so that no Python runs) and the columns that it reads. Both sides get the same events,
//! cut into the same epochs, of the tables that the query reads; a repeat is everything from the first event to the last row, on fresh
//! workers that run already. Their rows must be equal in every repeat, by number and a checksum.

mod calls;
mod events;
mod peer;

use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use crossbeam::channel::unbounded;
use penstock_dataflow::fabric;
use penstock_plan::Plan;
use penstock_plan::host::{Event, Group, GroupConfig, PartitionRows, Resident, Rows};
use serde_json::Value;

use crate::harness::{Better, Case, Options, Report, compare};
use calls::Calls;
use events::{Answer, Events, TABLES};
use peer::Query;

/// What a line asks for.
struct Asked {
    events: Events,
    workers: Vec<usize>,
    bits: u8,
    options: Options,
    queries: Vec<Value>,
}

impl Asked {
    fn new(told: &Value) -> Result<Self, String> {
        let number = |name: &str| told[name].as_i64().filter(|n| *n > 0).ok_or_else(|| format!("{name} in {told}"));
        let list = |name: &str| told[name].as_array().ok_or_else(|| format!("{name} is no list in {told}"));
        let folder = told["folder"].as_str().ok_or("no folder of events was given")?;
        let workers = list("workers")?.iter().map(|n| n.as_u64().map(|n| n as usize).ok_or("workers are numbers"));
        Ok(Self {
            events: Events::read(Path::new(folder), number("epoch_ms")?)?,
            workers: workers.collect::<Result<_, _>>()?,
            bits: number("bits")? as u8,
            options: Options { quick: told["quick"] == true, seconds: told["seconds"].as_f64() },
            queries: list("queries")?.clone(),
        })
    }
}

/// A flow as it runs here.
struct Flow {
    plan: Arc<Plan>,
    calls: Arc<Calls>,
    bits: u8,
    /// What each epoch releases, and the watermark that it ends with, in microseconds.
    epochs: Vec<(Vec<PartitionRows>, Option<i64>)>,
}

impl Flow {
    fn new(told: &Value, asked: &Asked) -> Result<Self, String> {
        let text = told["plan"].as_str().ok_or("a query without a plan")?;
        let plan = Plan::from_json(text).map_err(|error| error.to_string())?;
        let spec: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let sources = spec["sources"].as_array().ok_or("a plan without sources")?;
        let mut epochs = vec![(Vec::new(), None::<i64>); asked.events.epochs()];
        let mut timed = Vec::new();
        for (number, source) in sources.iter().enumerate() {
            let name = source["name"].as_str().unwrap_or_default();
            let table = TABLES.iter().position(|table| *table == name).ok_or_else(|| format!("no table {name:?}"))?;
            let columns: Vec<String> = serde_json::from_value(told["columns"][name].clone())
                .map_err(|error| format!("the columns of {name}: {error}"))?;
            for (epoch, block) in epochs.iter_mut().zip(asked.events.blocks(table, &columns)?) {
                let batches = vec![block.into()];
                epoch.0.push(PartitionRows { source: number as u8, partition: 0, batches, rows_before: 0 });
            }
            if source["event_time"].is_string() {
                timed.push(asked.events.latest(table));
            }
        }
        // As hosts do: of several sources the least, and none before all have one.
        for (at, epoch) in epochs.iter_mut().enumerate() {
            let least = timed.iter().map(|latest| latest[at]).min().flatten();
            epoch.1 = least.map(|ms| ms * 1000);
        }
        Ok(Self { plan: Arc::new(plan), calls: Arc::new(Calls::new(&told["calls"])?), bits: asked.bits, epochs })
    }

    /// Seconds from the first event to the last row, and the answer.
    fn run(&self, workers: usize) -> (f64, Answer) {
        let config = GroupConfig::founding(self.plan.clone(), self.calls.clone(), self.bits, workers as u32);
        let (sender, events) = unbounded();
        let group = Group::start(config, fabric::threads(workers), Resident::fresh(), sender).expect("fresh");
        let epochs = self.epochs.clone();
        let last = epochs.len() as u64;
        let begin = Instant::now();
        for (epoch, (inputs, watermark)) in (0..).zip(epochs) {
            group.release(epoch, inputs, watermark).expect("a small epoch");
        }
        group.release(last, Vec::new(), Some(i64::MAX)).expect("an empty epoch");
        let mut rows = Vec::<RecordBatch>::new();
        for _ in 0..(last as usize + 1) * workers {
            match events.recv() {
                Ok(Event::EpochDone { outputs, counts, .. }) if counts.late == 0 => {
                    rows.extend(outputs.into_iter().map(Rows::into_here))
                }
                other => panic!("a worker failed, or rows were late: {other:?}"),
            }
        }
        let seconds = begin.elapsed().as_secs_f64();
        drop(group.stop());
        (seconds, Answer::of(&rows))
    }
}

fn query(told: &Value) -> Result<Query, String> {
    let ms = |name: &str| told[name].as_i64().filter(|ms| *ms > 0).ok_or_else(|| format!("{name} in {}", told["name"]));
    let name = told["name"].as_str().unwrap_or_default();
    Ok(match name.split('_').next().unwrap_or_default() {
        "q1" => Query::Q1,
        "q2" => Query::Q2,
        "q3" => Query::Q3,
        "q4" => Query::Q4,
        "q5" => Query::Q5 { size: ms("size_ms")?, every: ms("period_ms")? },
        "q7" => Query::Q7 { size: ms("size_ms")? },
        "q8" => Query::Q8 { size: ms("size_ms")? },
        _ => return Err(format!("{name:?} has no twin in timely")),
    })
}

fn cases(asked: &Asked, told: &Value, cases: usize, report: &mut Report) -> Result<(), String> {
    let (flow, query) = (Flow::new(told, asked)?, query(told)?);
    let plain = Arc::new(asked.events.plain(query.reads()));
    let read =
        query.reads().into_iter().zip(0..).filter(|(reads, _)| *reads).map(|(_, table)| asked.events.rows(table));
    let (read, all) = (read.sum::<usize>(), (0..TABLES.len()).map(|table| asked.events.rows(table)).sum::<usize>());
    let name = told["name"].as_str().unwrap_or_default();
    for &workers in &asked.workers {
        let answers = std::cell::RefCell::new(Vec::new());
        let rate = |(seconds, answer): (f64, Answer)| {
            answers.borrow_mut().push(answer);
            all as f64 / seconds / 1e6
        };
        let budget = if asked.options.seconds.is_some() { asked.options.budget(cases) } else { Duration::from_secs(4) };
        let paired =
            compare(budget, || rate(flow.run(workers)), || rate(peer::run(query, workers, &plain, &asked.events)));
        let answers = answers.into_inner();
        if answers.iter().any(|answer| *answer != answers[0]) {
            return Err(format!("{name} with {workers} workers: the two sides differ: {answers:?}"));
        }
        let case = Case::new(format!("w{workers} {name} vs timely 0.31"), "M events/s", Better::Higher, paired);
        let case = case.with("events", all).with("rows_read", read).with("rows_out", answers[0].rows);
        report.case(case.with("epoch_ms", asked.events.epoch_ms).with("bins", 1 << asked.bits));
    }
    Ok(())
}

/// Reads what to run, and runs it.
///
/// # Errors
/// What is wrong with the line or the events, or that the two sides differ.
pub fn serve(input: impl BufRead) -> Result<(), String> {
    let Some(Ok(first)) = input.lines().next() else { return Err("no line says what to run".into()) };
    let told = serde_json::from_str(&first).map_err(|error| format!("{first:?} is not JSON: {error}"))?;
    let asked = Asked::new(&told)?;
    if asked.options.quick {
        crate::harness::end_in(crate::harness::QUICK_END);
    }
    let mut report = Report::new("nexmark", &asked.options);
    let count = asked.queries.len() * asked.workers.len();
    asked.queries.iter().try_for_each(|told| cases(&asked, told, count, &mut report))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_with_a_line_is_told() {
        for (line, says) in [
            ("", "no line says what to run"),
            ("{", "is not JSON"),
            ("{}", "no folder of events"),
            (r#"{"folder": "/nowhere", "workers": [1], "epoch_ms": 0}"#, "epoch_ms in"),
            (r#"{"folder": "/nowhere", "workers": [1], "epoch_ms": 1000}"#, "/nowhere/person.arrow: "),
        ] {
            let message = serve(line.as_bytes()).expect_err("nothing to run");
            assert!(message.contains(says), "{line:?} gives {message:?}");
        }
        let message = query(&serde_json::json!({"name": "q6"})).expect_err("q6");
        assert_eq!(message, "\"q6\" has no twin in timely");
    }
}
