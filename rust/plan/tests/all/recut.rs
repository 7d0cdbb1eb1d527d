//! M-24 on threads and processes: bins are split, move part by part, and are merged, while epochs run; every epoch gives the rows that one
//! worker gives whose bins rest.

use std::sync::Arc;

use crate::group::{Cluster, Deed, PATIENCE, Random, config, deeds, fresh, read, rows};
use penstock_bins::{BinName, Command, ControlError, Range, Routing, number_of, range_of};
use penstock_plan::host::{Event, HostError, Refusal, Resident};
use penstock_plan::spec::schema_to_text;
use penstock_plan::{CallError, Callbacks, ForeignState, Plan, SideRows};

struct NoCalls;

impl Callbacks for NoCalls {
    fn map(
        &self,
        _: usize,
        batch: &arrow_array::RecordBatch,
        _: &mut SideRows,
    ) -> Result<arrow_array::RecordBatch, CallError> {
        Ok(batch.clone())
    }

    fn new_state(&self, call: usize) -> Box<dyn ForeignState> {
        unreachable!("no state of call {call}")
    }
}

const PLANS: [&str; 6] = [
    r#"{"op":"key_by","columns":["k"]},{"op":"agg","emit":"update","aggs":[{"name":"n","fn":"count"},{"name":"s","fn":"sum","column":"v"}]}"#,
    r#"{"op":"key_by","columns":["k"]},{"op":"agg","emit":"final","aggs":[{"name":"n","fn":"count"}]}"#,
    r#"{"op":"key_by","columns":["k"]},{"op":"window","kind":"sliding","size_us":40000,"every_us":10000},{"op":"agg","aggs":[{"name":"n","fn":"count"}]}"#,
    r#"{"op":"key_by","columns":["k"]},{"op":"window","kind":"session","size_us":3000},{"op":"agg","aggs":[{"name":"s","fn":"sum","column":"v"}]}"#,
    r#"{"op":"distinct","columns":["k","v"]}"#,
    r#"{"op":"key_by","columns":["k"]},{"op":"window","kind":"tumbling","size_us":20000},{"op":"agg","aggs":[{"name":"n","fn":"count"}]},{"op":"top","n":2,"by":"n","per":"window"}"#,
];

fn plan(steps: &str) -> Arc<Plan> {
    let schema = schema_to_text(&rows(&["t", "k", "v"], &[]).schema());
    let source = format!(r#"{{"schema":"{schema}","event_time":"t","lateness_ms":0}}"#);
    Arc::new(Plan::from_json(&format!(r#"{{"version":2,"sources":[{source}],"steps":[{steps}]}}"#)).unwrap())
}

#[test]
fn epochs_give_the_same_rows_while_bins_are_split_and_merged() {
    let none: Arc<dyn Callbacks> = Arc::new(NoCalls);
    for (number, steps) in PLANS.iter().enumerate() {
        let (mut split, mut merged) = (0, 0);
        for (processes, threads, journal) in [(1, 1, false), (1, 3, false), (1, 2, true), (2, 1, false), (2, 2, true)] {
            let plan = plan(steps);
            let workers = processes * threads;
            let mut twin = config(&plan, &none, 1);
            twin.journal = journal;
            let twin = Cluster::start(&twin, 1, 1, 1, fresh(1));
            let mut settings = config(&plan, &none, workers);
            (settings.journal, settings.record) = (journal, journal);
            let cluster = Cluster::start(&settings, processes, threads, 1, fresh(processes));
            let mut random = Random(17 * number as u64 + workers as u64);
            let mut routing = Routing::new(4, workers).unwrap();
            let (mut asked, mut done) = (0, 0);
            const EPOCHS: u64 = 14;
            for epoch in 0..EPOCHS {
                let row = |random: &mut Random| {
                    vec![(epoch * 10 + random.below(15)) as i64, random.below(200) as i64, random.below(9) as i64]
                };
                let values = (0..random.below(900)).map(|_| row(&mut random)).collect::<Vec<_>>();
                let watermark = if epoch + 1 == EPOCHS { i64::MAX } else { (epoch * 10_000) as i64 };
                let early = random.below(2) == 0;
                let doing = deeds(&mut random, &mut routing, workers);
                asked += doing.len();
                if early {
                    cluster.ask(epoch, &doing);
                }
                for cluster in [&cluster, &twin] {
                    cluster.release(epoch, &["t", "k", "v"], &values, Some(watermark));
                }
                if !early {
                    cluster.ask(epoch, &doing);
                }
                for command in doing.iter().filter_map(|deed| match deed {
                    Deed::Recut(commands) => Some(commands),
                    Deed::Moves(_) => None,
                }) {
                    split += usize::from(matches!(command.first(), Some(Command::Split { .. })));
                    merged += usize::from(matches!(command.first(), Some(Command::Merge { .. })));
                }
                let [mut found, mut expected] = [(&cluster, &mut done), (&twin, &mut 0)]
                    .map(|(cluster, done)| read(&cluster.complete(epoch, done).unwrap()));
                found.sort_unstable();
                expected.sort_unstable();
                assert_eq!(found, expected, "{steps}: {processes} x {threads}, epoch {epoch}");
            }
            cluster.rest(asked, &mut done);
            let deadline = std::time::Instant::now() + PATIENCE;
            let expected: Vec<(Range, u32)> =
                routing.bins_owned().map(|(bin, owner)| (range_of(bin, 4).unwrap(), owner)).collect();
            while cluster.groups[0].0.bins()[0] != expected {
                assert!(std::time::Instant::now() < deadline, "{:?}", cluster.groups[0].0.bins()[0]);
                std::thread::yield_now();
            }
            let keys = |residents: &[Resident]| residents.iter().map(Resident::keys).sum::<u64>();
            let ((residents, errors), (rest, _)) = (cluster.stop(), twin.stop());
            assert!(errors.is_empty(), "{errors:?}");
            assert_eq!(keys(&residents), keys(&rest));
        }
        assert!(split > 20 && merged > 5, "{split} splits and {merged} merges");
    }
}

#[test]
fn what_is_no_bin_is_told_and_the_group_goes_on() {
    let none: Arc<dyn Callbacks> = Arc::new(NoCalls);
    let cluster = Cluster::start(&config(&plan(PLANS[0]), &none, 2), 1, 2, 1, fresh(1));
    let part = |prefix, length| number_of(Range::new(prefix, length).unwrap(), 4).unwrap();
    let told = |cluster: &Cluster| match cluster.groups[0].1.recv_timeout(PATIENCE).expect("it is told") {
        Event::MigrationDone { steps, .. } => Ok(steps[0].bins),
        Event::MigrationRefused { error: Refusal::Control(error), .. } => Err(error),
        other => panic!("{other:?}"),
    };
    let group = &cluster.groups[0].0;
    group.recut(1, vec![Command::Split { bin: 3, bits: 1 }, Command::Split { bin: 5, bits: 2 }]);
    assert_eq!(told(&cluster), Ok(2));
    group.recut(2, vec![Command::Split { bin: 3, bits: 1 }, Command::Split { bin: 6, bits: 2 }]);
    assert_eq!(told(&cluster), Err(ControlError::Split { bin: BinName::new(3, 4) }));
    group.recut(3, vec![Command::Merge { bin: 6 }]);
    assert_eq!(
        told(&cluster),
        Err(ControlError::Whole { bin: BinName::new(6, 4) }),
        "nothing of the one before was done"
    );
    group.migrate(4, vec![vec![(3, 1)]], None);
    assert_eq!(told(&cluster), Err(ControlError::Split { bin: BinName::new(3, 4) }));
    group.migrate(5, vec![vec![(part(0b110, 5), 0), (part(0b111, 5), 1)]], None);
    assert_eq!(told(&cluster), Ok(2));
    group.recut(6, vec![Command::Merge { bin: 3 }]);
    assert_eq!(told(&cluster), Err(ControlError::Apart { bin: BinName::new(3, 4), one: 0, other: 1 }));
    cluster.release(0, &["t", "k", "v"], &[vec![1, 2, 3]], None);
    assert_eq!(read(&cluster.complete(0, &mut 0).unwrap()), [[2, 1, 3]]);
    assert!(cluster.stop().1.is_empty());
}

/// Control is checked against the bins of the first keyed step. Where another one has different bins, what it refuses is not told as done.
#[test]
fn what_only_the_second_keyed_step_refuses_ends_the_workers() {
    let none: Arc<dyn Callbacks> = Arc::new(NoCalls);
    let mut config = config(&plan(&format!("{0},{0}", PLANS[1])), &none, 2);
    _ = config.routings[1].apply(&Command::Split { bin: 3, bits: 1 }).unwrap();
    let cluster = Cluster::start(&config, 1, 2, 1, fresh(1));
    cluster.groups[0].0.recut(1, vec![Command::Split { bin: 3, bits: 1 }]);
    match cluster.groups[0].1.recv_timeout(PATIENCE).expect("it is told") {
        Event::Failed { error: HostError::Dataflow(penstock_dataflow::Error::Operator { name, source, .. }) } => {
            assert_eq!(name, "control");
            assert_eq!(source.downcast_ref(), Some(&ControlError::Split { bin: BinName::new(3, 4) }));
        }
        other => panic!("{other:?}"),
    }
}
