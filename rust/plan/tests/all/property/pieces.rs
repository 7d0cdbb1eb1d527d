//! The same plans as a batch host runs them: all input is one epoch, in pieces from exchange to exchange, and whole in one thread.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arrow_array::{RecordBatch, UInt32Array};
use arrow_select::take::take_record_batch;
use penstock_plan::host::{Begin, End, Inline, Piece, Pulled};
use penstock_plan::{Callbacks, Plan};

use super::functions::{Functions, block};
use super::oracle::Oracle;
use super::{Bag, PLAIN, plans, rows, schema, sorted, try_all};
use crate::common::cells;
use crate::group::Random;

fn run(seed: u64) {
    let mut random = Random::seeded(seed);
    let made = plans::made(&mut random, 4);
    let plan = Arc::new(Plan::from_json(&made.spec.to_json()).unwrap());
    let calls: Arc<dyn Callbacks> = Arc::new(Functions::new(&made));
    let mut source =
        || -> Bag { (0..random.below(5)).flat_map(|epoch| rows(&mut random, made.clock, epoch)).collect() };
    let sources: Vec<Bag> = plan.sources().iter().map(|_| source()).collect();
    let expected = sorted(Oracle::new(&made.spec, &made.calls).epoch(&sources, Some(i64::MAX)).rows);
    let blocks: Vec<RecordBatch> = sources.iter().map(|rows| block(&schema(&PLAIN, false), rows)).collect();
    for (how, given) in [("in pieces", in_pieces(&plan, &calls, &blocks)), ("whole", whole(&plan, &calls, &blocks))] {
        let given = sorted(given.iter().flat_map(cells).collect());
        assert!(given == expected, "{how}: {given:?}\nis not\n{expected:?}\n{}", plan.explain());
    }
}

fn whole(plan: &Arc<Plan>, calls: &Arc<dyn Callbacks>, sources: &[RecordBatch]) -> Vec<RecordBatch> {
    let mut inline = Inline::new(plan.clone(), calls.clone(), None).unwrap();
    let mut made = Vec::new();
    for (number, block) in (0..).zip(sources) {
        inline.push(number, block).unwrap();
        drain(&mut inline, &mut made);
    }
    inline.finish().unwrap();
    drain(&mut inline, &mut made);
    made
}

/// Between pieces rows meet by their hash in one of two parts.
fn in_pieces(plan: &Arc<Plan>, calls: &Arc<dyn Callbacks>, sources: &[RecordBatch]) -> Vec<RecordBatch> {
    let mut routed: BTreeMap<(usize, usize), Vec<RecordBatch>> = BTreeMap::new();
    let mut output = Vec::new();
    for piece in plan.pieces() {
        let mut made = Vec::new();
        for part in 0..2 {
            let mut inline = Inline::new(plan.clone(), calls.clone(), Some(piece)).unwrap();
            let mut given = Vec::new();
            match piece.begin {
                Begin::Source(number) => {
                    let (whole, half) = (&sources[number], sources[number].num_rows() / 2);
                    let rest = whole.num_rows() - half;
                    given.push((0, if part == 0 { whole.slice(0, half) } else { whole.slice(half, rest) }));
                }
                Begin::Keyed(op) => {
                    for side in 0..plan.piece_inputs(piece).len() {
                        let leads = Piece { end: End::Keyed { op, side }, ..piece };
                        for batch in routed.get(&(op, side)).into_iter().flatten() {
                            let hashes = plan.exchange_hashes(leads, batch).unwrap().unwrap();
                            let here = (0..batch.num_rows() as u32).filter(|row| hashes[*row as usize] % 2 == part);
                            let here = UInt32Array::from_iter_values(here);
                            given.push((side as u8, take_record_batch(batch, &here).unwrap()));
                        }
                    }
                }
            }
            for (input, batch) in given {
                inline.push(input, &batch).unwrap();
                drain(&mut inline, &mut made);
            }
            inline.finish().unwrap();
            drain(&mut inline, &mut made);
        }
        match piece.end {
            End::Keyed { op, side } => routed.entry((op, side)).or_default().extend(made),
            End::Output => output.extend(made),
        }
    }
    output
}

fn drain(inline: &mut Inline, made: &mut Vec<RecordBatch>) {
    loop {
        match inline.pull(Duration::from_secs(1)).unwrap() {
            Pulled::Made(batches) => made.extend(batches),
            Pulled::Idle => return,
            Pulled::Working => {}
        }
    }
}

#[test]
fn random_plans_in_pieces_give_what_the_oracle_says() {
    try_all("pieces", USUAL, run);
}

const USUAL: u64 = 30;
