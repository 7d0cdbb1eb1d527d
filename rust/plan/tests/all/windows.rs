//! Windows that close together come out in rounds: what is given at once is bounded, however many windows a watermark closes.

use std::sync::Arc;

use crate::common;
use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_schema::{DataType, Field, Schema};
use penstock_bins::{BinState, BinTable, Routing};
use penstock_plan::spec::schema_to_text;
use penstock_plan::{BLOCK_ROWS, Callbacks, KeyedOp, KeyedSpec, Output, Plan, State};

const KEYS: i64 = 50;
const WINDOWS: i64 = 10_000;

struct Rig {
    keyed: KeyedSpec,
    table: BinTable<State>,
    op: Box<dyn KeyedOp>,
}

impl Rig {
    /// Each key is in all windows of a ms.
    fn new(agg: &str) -> Self {
        let fields = ["k", "t"].map(|name| Field::new(name, DataType::Int64, false));
        let text = format!(
            r#"{{"version":2,"sources":[{{"schema":"{}","event_time":"t"}}],"steps":[
                {{"op":"key_by","columns":["k"]}},{{"op":"window","kind":"sliding","size_us":{WINDOWS}000,"every_us":1000}},
                {{"op":"agg","aggs":[{agg}]}}]}}"#,
            schema_to_text(&Schema::new(fields.to_vec()))
        );
        let keyed = Plan::from_json(&text).unwrap().keyed().next().unwrap().clone();
        let calls: Arc<dyn Callbacks> = Arc::new(common::TestCalls);
        let table = BinTable::fresh(&Routing::from_owners(vec![0; 4]).unwrap(), 0, &|| keyed.new_state(&calls));
        let op = keyed.operator(&calls).unwrap();
        let mut rig = Self { keyed, table, op };
        rig.table.mark_all(0);
        rig.apply();
        rig
    }

    fn apply(&mut self) {
        let column = |value: fn(i64) -> i64| -> ArrayRef { Arc::new((0..KEYS).map(value).collect::<Int64Array>()) };
        let columns = vec![column(|key| key), column(|_| 0)];
        let batch = RecordBatch::try_new(self.keyed.input.clone(), columns).unwrap();
        let routed = self.keyed.assign(&batch).unwrap();
        let hashes = self.keyed.hashes(&routed).unwrap();
        let routed = self.keyed.carry(routed).unwrap();
        self.op.apply(&mut self.table, 0, &routed, &hashes, &mut |_| panic!("nothing is late")).unwrap();
    }

    /// What one round gives, and whether it is the last one.
    fn round(&mut self, watermark: i64) -> (Vec<RecordBatch>, bool) {
        let mut given = Vec::new();
        let mut take = |output| match output {
            Output::Rows(batch) => given.push(batch),
            _ => panic!("nothing is late"),
        };
        let done = self.op.watermark_some(&mut self.table, watermark, &mut take).unwrap();
        (given, done)
    }

    /// What all rounds give, each by itself.
    fn rounds(&mut self, watermark: i64) -> Vec<Vec<RecordBatch>> {
        let mut rounds = Vec::new();
        loop {
            let (given, done) = self.round(watermark);
            rounds.push(given);
            if done {
                return rounds;
            }
        }
    }
}

/// One aggregate that is rolled from window to window, and one whose panes are merged for each.
const AGGREGATES: [&str; 2] = [r#"{"name":"n","fn":"count"}"#, r#"{"name":"n","fn":"max","column":"k"}"#];

#[test]
fn a_round_gives_a_bounded_number_of_rows() {
    for agg in AGGREGATES {
        let mut twin = Rig::new(agg);
        let mut all = Vec::new();
        let mut take = |output| match output {
            Output::Rows(batch) => all.push(batch),
            _ => panic!("nothing is late"),
        };
        twin.op.watermark(&mut twin.table, i64::MAX, &mut take).unwrap();
        let rows = |given: &[RecordBatch]| given.iter().map(RecordBatch::num_rows).sum::<usize>();
        assert_eq!(rows(&all), (KEYS * WINDOWS) as usize);
        assert!(all[..all.len() - 1].iter().all(|batch| batch.num_rows() == BLOCK_ROWS), "blocks are full");
        let mut rig = Rig::new(agg);
        let rounds = rig.rounds(i64::MAX);
        assert!(rounds.len() > 3 && rounds.iter().all(|given| rows(given) <= 3 * BLOCK_ROWS));
        assert_eq!(rounds.concat(), all);
        assert!(rig.table.owned().all(|(_, state)| state.is_empty()));
        assert_eq!(rig.rounds(i64::MAX), [vec![]]);
    }
}

#[test]
fn an_epoch_that_is_undone_between_two_rounds_gives_the_same_again() {
    for agg in AGGREGATES {
        let expected = Rig::new(agg).rounds(i64::MAX);
        let mut rig = Rig::new(agg);
        let (given, done) = rig.round(i64::MAX);
        assert_eq!((&given, done), (&expected[0], false));
        rig.table.rollback_all().unwrap();
        rig.op.resume(i64::MIN);
        rig.apply();
        assert_eq!(rig.rounds(i64::MAX), expected);
    }
}

/// Of watermarks that follow one another none gives a window again, and the second goes on where the first one's rounds have ended.
#[test]
fn rounds_of_two_watermarks_give_what_those_of_one_give() {
    for agg in AGGREGATES {
        let whole = Rig::new(agg).rounds(i64::MAX).concat();
        let mut rig = Rig::new(agg);
        let rows = |given: &[RecordBatch]| given.iter().map(RecordBatch::num_rows).sum::<usize>();
        let half = WINDOWS / 2 * 1000;
        let first = rig.rounds(half);
        assert!(first.len() > 1);
        assert_eq!(rows(&first.concat()), (KEYS * WINDOWS / 2) as usize);
        assert_eq!(rig.rounds(half), [vec![]]);
        // The first round of a greater watermark, before all of this one.
        let (given, done) = rig.round(2 * half - 1000);
        assert!(!done);
        assert_eq!(rows(&first.concat()) + rows(&given) + rows(&rig.rounds(i64::MAX).concat()), rows(&whole));
    }
}
