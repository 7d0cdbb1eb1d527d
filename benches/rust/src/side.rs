//! Our side of a bench whose other side runs in another process: `penstock-bench --side`.
//!
//! The process that compares writes one line of JSON that says what to run (the plan, as text, among it), then a line
//! for each repeat; each is answered with one line: the seconds that it took and what came out. So the same plan on the
//! same input can be run from Rust and from Python in turn.

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Instant;

use arrow_array::{Int64Array, RecordBatch};
use crossbeam::channel::{Receiver, unbounded};
use penstock_dataflow::fabric;
use penstock_plan::Plan;
use penstock_plan::host::{Event, Group, GroupConfig, PartitionRows, Resident, Rows};
use serde_json::{Value, json};

use crate::counting::NoCalls;
use crate::{Numbers, block};

/// Epochs under way at once, as in the local host of Python.
const AHEAD: usize = 4;

/// Counts keys from Rust: what the local host of Python does, without Python.
struct Side {
    plan: Arc<Plan>,
    workers: usize,
    bits: u8,
    blocks: Vec<RecordBatch>,
}

impl Side {
    fn new(told: &Value) -> Result<Self, String> {
        let number = |name: &str| told[name].as_u64().ok_or_else(|| format!("{name} is not a number in {told}"));
        let text = told["plan"].as_str().ok_or("no plan was given")?;
        let plan = Plan::from_json(text).map_err(|error| error.to_string())?;
        let (keys, rows) = (number("keys")?, number("block_rows")? as usize);
        if !keys.is_power_of_two() || rows == 0 {
            return Err(format!("keys {keys} must be a power of two and blocks of {rows} rows must hold some"));
        }
        let mut numbers = Numbers(7).map(|number| (number & (keys - 1)) as i64);
        let blocks = (0..number("blocks")?).map(|_| block(&numbers.by_ref().take(rows).collect::<Vec<_>>())).collect();
        Ok(Self { plan: Arc::new(plan), workers: number("workers")? as usize, bits: number("bits")? as u8, blocks })
    }

    /// One run from the start of the threads to the last row of output.
    fn run(&self) -> Value {
        let begin = Instant::now();
        let config = GroupConfig::founding(self.plan.clone(), Arc::new(NoCalls), self.bits, self.workers as u32);
        let (sender, events) = unbounded();
        let group = Group::start(config, fabric::threads(self.workers), Resident::fresh(), sender).expect("fresh");
        let mut outputs = Vec::new();
        let mut told = 0;
        for (epoch, block) in self.blocks.iter().enumerate() {
            while epoch >= AHEAD + told / self.workers {
                told += take(&events, &mut outputs);
            }
            let input = PartitionRows { source: 0, partition: 0, batches: vec![block.clone().into()], rows_before: 0 };
            group.release(epoch as u64, vec![input], None).expect("a small epoch");
        }
        group.release(self.blocks.len() as u64, Vec::new(), Some(i64::MAX)).expect("an empty epoch");
        while told < (self.blocks.len() + 1) * self.workers {
            told += take(&events, &mut outputs);
        }
        let seconds = begin.elapsed().as_secs_f64();
        drop(group.stop());
        let rows = outputs.iter().map(RecordBatch::num_rows).sum::<usize>();
        let weighted = outputs.iter().map(weighted).fold(0, i64::wrapping_add);
        json!({ "seconds": seconds, "rows": rows, "weighted": weighted })
    }
}

fn take(events: &Receiver<Event>, outputs: &mut Vec<RecordBatch>) -> usize {
    match events.recv() {
        Ok(Event::EpochDone { outputs: more, .. }) => outputs.extend(more.into_iter().map(Rows::into_here)),
        other => panic!("a worker failed: {other:?}"),
    }
    1
}

/// The sum over all rows of key times count.
fn weighted(batch: &RecordBatch) -> i64 {
    let column = |at: usize| batch.column(at).as_any().downcast_ref::<Int64Array>().expect("both columns are int64");
    column(0).values().iter().zip(column(1).values()).fold(0, |sum, (k, n)| sum.wrapping_add(k.wrapping_mul(*n)))
}

/// Reads what to run and then runs it once for every further line, until the input ends.
///
/// # Errors
/// What is wrong with the first line, or with standard output.
pub fn serve(input: impl BufRead, mut output: impl Write) -> Result<(), String> {
    let mut lines = input.lines();
    let Some(Ok(first)) = lines.next() else { return Err("no line says what to run".into()) };
    let told = serde_json::from_str(&first).map_err(|error| format!("{first:?} is not JSON: {error}"))?;
    let side = Side::new(&told)?;
    for line in lines {
        line.map_err(|error| error.to_string())?;
        writeln!(output, "{}", side.run()).and_then(|()| output.flush()).map_err(|error| error.to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Python writes it: the flow that counts the rows of each key of the column `k` and says so at the end.
    fn plan() -> String {
        let schema = [
            "/////3gAAAAQAAAAAAAKAAwABgAFAAgACgAAAAABBAAMAAAACAAIAAAABAAIAAAABAAAAAEAAAAUAAAAEAAUAAgABgAHAAwAAAAQ",
            "ABAAAAAAAAECEAAAABwAAAAEAAAAAAAAAAEAAABrAAAACAAMAAgABwAIAAAAAAAAAUAAAAA=",
        ]
        .concat();
        let steps = json!([
            {"op": "key_by", "columns": ["k"], "nulls": "group"},
            {"op": "agg", "emit": "final", "aggs": [{"name": "n", "fn": "count"}]},
        ]);
        json!({"version": 2, "sources": [{"schema": schema}], "steps": steps}).to_string()
    }

    #[test]
    fn each_line_is_one_run_and_all_rows_are_counted() {
        let told = json!({
            "plan": plan(), "workers": 2, "bits": 4, "keys": 16, "block_rows": 100, "blocks": 7,
        });
        let mut out = Vec::new();
        serve(format!("{told}\ngo\ngo\n").as_bytes(), &mut out).expect("a good line");
        let answers = String::from_utf8(out).expect("text");
        let expected = Numbers(7).take(700).map(|number| (number & 15) as i64).sum::<i64>();
        assert_eq!(answers.lines().count(), 2);
        for line in answers.lines() {
            let answer: Value = serde_json::from_str(line).expect("JSON");
            assert_eq!((answer["rows"].as_i64(), answer["weighted"].as_i64()), (Some(16), Some(expected)));
            assert!(answer["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0));
        }
    }

    #[test]
    fn what_cannot_be_run_is_told() {
        for (line, says) in [
            (String::new(), "no line"),
            ("{".into(), "is not JSON"),
            ("{}".into(), "no plan"),
            (json!({"plan": "{}"}).to_string(), ""),
            (json!({"plan": plan(), "keys": 3, "block_rows": 1}).to_string(), "power of two"),
            (json!({"plan": plan(), "keys": 4, "block_rows": 1}).to_string(), "blocks"),
        ] {
            let error = serve(line.as_bytes(), Vec::new()).expect_err("a wrong line");
            assert!(error.contains(says), "{line:?} gives {error:?}");
        }
    }
}
