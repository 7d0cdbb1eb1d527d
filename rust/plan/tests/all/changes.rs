//! What epochs changed makes up the state: absorbed one epoch after the other by twins, through files, merged, and on other bins, while
//! bins move within epochs and between them.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

use crate::common;
use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow_schema::Schema;
use penstock_bins::{BinState, BinTable, Encoding, Extent, Routing, number_of, range_of};
use penstock_files::{Chunk, Entry, File, Range, Segment, merge, select, write};
use penstock_plan::spec::schema_to_text;
use penstock_plan::{Callbacks, KeyedKind, KeyedOp, KeyedSpec, Output, Plan, State};
use proptest::prelude::*;

const BITS: u8 = 2;
const BINS: u32 = 1 << BITS;

const PLANS: [&str; 23] = [
    r#"{"op":"key_by","columns":["k"]},{"op":"window","kind":"tumbling","size_us":10000},{"op":"agg","aggs":[{"name":"m","fn":"max","column":"k"},{"name":"n","fn":"count"}]}"#,
    r#"{"op":"key_by","columns":["i"]},{"op":"window","kind":"sliding","size_us":20000,"every_us":5000},{"op":"agg","aggs":[{"name":"s","fn":"sum","column":"t"}]}"#,
    r#"{"op":"key_by","columns":["i"]},{"op":"agg","emit":"update","aggs":[{"name":"s","fn":"sum","column":"t"},{"name":"m","fn":"min","column":"k"}]}"#,
    r#"{"op":"key_by","columns":["k","i"]},{"op":"agg","emit":"final","aggs":[{"name":"n","fn":"count"}]}"#,
    r#"{"op":"agg","emit":"update","aggs":[{"name":"n","fn":"count"}]}"#,
    r#"{"op":"window","kind":"sliding","size_us":20000,"every_us":10000},{"op":"top","n":2,"by":"i","per":"window"}"#,
    r#"{"op":"top","n":2,"by":"i","per":["k"]}"#,
    r#"{"op":"key_by","columns":["i"]},{"op":"window","kind":"tumbling","size_us":10000},{"op":"agg","aggs":[{"name":"a","fn":"min","column":"t"}]}"#,
    r#"{"op":"join","left":["k"],"right":["rk"],"inputs":[0,1]}"#,
    r#"{"op":"join","left":["i"],"right":["ri"],"inputs":[0,1]}"#,
    r#"{"op":"join","how":"full","left":["k"],"right":["rk"],"within":[-5000,9000],"inputs":[0,1]}"#,
    r#"{"op":"join","how":"semi","left":["i"],"right":["ri"],"inputs":[0,1]}"#,
    r#"{"op":"join","how":"anti","left":["k"],"right":["rk"],"within":[0,20000],"inputs":[0,1]}"#,
    r#"{"op":"join","how":"semi","left":["k"],"right":["rk"],"within":[-20000,-1000],"inputs":[0,1]}"#,
    r#"{"op":"join","how":"anti","left":["k"],"right":["rk"],"inputs":[0,1]}"#,
    r#"{"op":"window","kind":"tumbling","size_us":10000,"inputs":[0]},{"op":"window","kind":"tumbling","size_us":10000,"inputs":[1]},{"op":"join","how":"left","windowed":true,"left":["k"],"right":["rk"],"inputs":[2,3]}"#,
    r#"{"op":"key_by","columns":["i"]},{"op":"agg","emit":"update","aggs":[{"name":"d","fn":"count_distinct","column":"k"},{"name":"e","fn":"count_distinct","column":"t"},{"name":"l","fn":"last","column":"k"},{"name":"v","fn":"variance","column":"t"}]}"#,
    r#"{"op":"key_by","columns":["k"]},{"op":"window","kind":"sliding","size_us":20000,"every_us":5000},{"op":"agg","aggs":[{"name":"a","fn":"approx_count_distinct","column":"t","error":0.2},{"name":"q","fn":"approx_quantile","column":"t","q":0.9}]}"#,
    r#"{"op":"distinct","columns":["k","i"]}"#,
    r#"{"op":"window","kind":"tumbling","size_us":10000},{"op":"distinct","columns":["i"]}"#,
    r#"{"op":"key_by","columns":["k"]},{"op":"window","kind":"session","size_us":7000},{"op":"agg","aggs":[{"name":"n","fn":"count"},{"name":"m","fn":"max","column":"k"},{"name":"d","fn":"count_distinct","column":"i"}]}"#,
    r#"{"op":"key_by","columns":["i"]},{"op":"window","kind":"session","size_us":12000},{"op":"agg","aggs":[{"name":"s","fn":"sum","column":"t"}]}"#,
    r#"{"op":"key_by","columns":["i"]},{"op":"window","kind":"tumbling","size_us":86400000000,"offset_us":82800000000,"zone":"Asia/Kathmandu"},{"op":"agg","aggs":[{"name":"n","fn":"count"}]}"#,
];

/// Key text, number and event time; small numbers are nulls.
type Row = (u8, u8, i64);

fn block(rows: &[Row]) -> RecordBatch {
    let text = |(k, _, _): &Row| (*k > 0).then(|| "x".repeat(*k as usize % 5) + &k.to_string());
    let number = |(_, i, _): &Row| match i {
        0 => None,
        // Its hash is 0: it has no position.
        1 => Some(0_u64.wrapping_sub(0x9e37_79b9_7f4a_7c15) as i64),
        i => Some(i64::from(*i)),
    };
    RecordBatch::try_from_iter_with_nullable([
        ("k", Arc::new(rows.iter().map(text).collect::<StringArray>()) as ArrayRef, true),
        ("i", Arc::new(rows.iter().map(number).collect::<Int64Array>()) as _, true),
        ("t", Arc::new(rows.iter().map(|row| row.2).collect::<Int64Array>()) as _, false),
    ])
    .unwrap()
}

fn keyed(steps: &str) -> KeyedSpec {
    let schema = schema_to_text(&block(&[]).schema());
    let mut sources = format!(r#"{{"schema":"{schema}","event_time":"t"}}"#);
    if steps.contains("join") {
        let right = block(&[]).schema();
        let named = right.fields().iter().map(|field| field.as_ref().clone().with_name(format!("r{}", field.name())));
        let right = schema_to_text(&Schema::new(named.collect::<Vec<_>>()));
        sources += &format!(r#",{{"name":"right","schema":"{right}","event_time":"rt"}}"#);
    }
    let text = format!(r#"{{"version":2,"sources":[{sources}],"steps":[{steps}]}}"#);
    Plan::from_json(&text).unwrap().keyed().next().unwrap().clone()
}

fn chunks(state: &State, extent: Extent) -> Vec<Vec<u8>> {
    let mut encoding = Encoding::of(extent);
    std::iter::from_fn(|| state.encode(&mut encoding).unwrap()).collect()
}

type Content = BTreeMap<(Vec<u8>, u64), Vec<u8>>;

/// Keys and values, and whether they share something. What they share is how far they have fired, which need not be told where nothing with
/// rows has: [`Rig::rest`] sees what it does.
fn content(chunks: &[Vec<u8>]) -> Content {
    let mut content = Content::new();
    for chunk in chunks {
        for entry in Chunk::parse(chunk).unwrap().entries() {
            match entry.unwrap() {
                Entry::Put { hash, key, value } => {
                    assert_eq!(content.insert((key.to_vec(), hash), value.to_vec()), None, "a key once");
                }
                Entry::Shared { .. } => _ = content.insert((b"shared".to_vec(), 0), Vec::new()),
                other => panic!("{other:?} in all of a state"),
            }
        }
    }
    content
}

/// What changes say of each key.
fn content_of_changes(chunks: &[Vec<u8>]) -> Content {
    let mut content = Content::new();
    for chunk in chunks {
        for entry in Chunk::parse(chunk).unwrap().entries() {
            match entry.unwrap() {
                Entry::Put { hash, key, value } => _ = content.insert((key.to_vec(), hash), value.to_vec()),
                Entry::Gone { hash, key } => _ = content.insert((key.to_vec(), hash), b"gone".to_vec()),
                Entry::GoneAll { prefix } => _ = content.insert((prefix.to_vec(), 0), b"all gone".to_vec()),
                Entry::Shared { value } => _ = content.insert((b"shared".to_vec(), 0), value.to_vec()),
            }
        }
    }
    content
}

struct Rig {
    keyed: KeyedSpec,
    calls: Arc<dyn Callbacks>,
    table: BinTable<State>,
    op: Box<dyn KeyedOp>,
}

impl Rig {
    fn new(plan: &str) -> Self {
        let keyed = keyed(plan);
        let calls: Arc<dyn Callbacks> = Arc::new(common::TestCalls);
        let routing = Routing::from_owners(vec![0; BINS as usize]).unwrap();
        let table = BinTable::fresh(&routing, 0, &|| keyed.new_state(&calls));
        let op = keyed.operator(&calls).unwrap();
        Self { keyed, calls, table, op }
    }

    fn state(&self, chunks: &[Vec<u8>]) -> State {
        let mut state = self.keyed.new_state(&self.calls);
        chunks.iter().for_each(|chunk| state.absorb(chunk).unwrap());
        state
    }

    /// All of a state. One that is empty has no content, however far it has fired.
    fn content(&self, state: &State) -> Content {
        if state.is_empty() {
            return Content::new();
        }
        let content = content(&chunks(&self.state(&chunks(state, Extent::All)), Extent::Changed));
        // A join fires nothing: its rows wait for no time.
        let fires = self.keyed.operator != "join";
        assert!(!fires || content.contains_key(&(b"shared".to_vec(), 0)), "how far it has fired is told");
        content
    }

    /// What workers say that go on from these bins of as many bits at a watermark: of rows that come, and at the end of input.
    fn rest(&self, states: Vec<State>, watermark: Option<i64>) -> Vec<String> {
        let routing = Routing::from_owners(vec![0; states.len()]).unwrap();
        let mut table = BinTable::fresh(&routing, 0, &|| self.keyed.new_state(&self.calls));
        for (bin, state) in (0..).zip(states) {
            table.uninstall(bin).unwrap();
            table.install(bin, Box::new(state)).unwrap();
        }
        let mut op = self.keyed.operator(&self.calls).unwrap();
        watermark.into_iter().for_each(|watermark| op.resume(watermark));
        let mut said = Vec::new();
        let mut say = |output: Output| {
            let (what, block) = match output {
                Output::Rows(block) => ("row", block),
                Output::Late(block) => ("late", block),
                Output::Side(..) => panic!("no step here has a side output"),
            };
            said.extend((0..block.num_rows()).map(|row| format!("{what} {:?}", block.slice(row, 1).columns())));
        };
        let rows: Vec<Row> = (0..80).map(|row| (row % 9, row % 40, i64::from(row) - 20)).collect();
        let routed = self.keyed.assign(&block(&rows)).unwrap();
        let hashes = self.keyed.hashes(&routed).unwrap();
        let routed = self.keyed.carry(routed).unwrap();
        op.apply(&mut table, 0, &routed, &hashes, &mut say).unwrap();
        op.end_epoch(&mut table, &mut say).unwrap();
        op.watermark(&mut table, i64::MAX, &mut say).unwrap();
        said.sort_unstable();
        said
    }

    /// Rows of odd times are those of the second side, where there is one.
    fn apply(&mut self, rows: &[Row]) {
        let sides = if matches!(self.keyed.kind, KeyedKind::Join(_)) { 2 } else { 1 };
        for side in 0..sides {
            let mine: Vec<Row> = rows.iter().filter(|row| row.2.rem_euclid(sides) == side).copied().collect();
            let spec = self.keyed.side(side as usize);
            let mine = RecordBatch::try_new(spec.input.clone(), block(&mine).columns().to_vec()).unwrap();
            let routed = spec.assign(&mine).unwrap();
            let hashes = spec.hashes(&routed).unwrap();
            let routed = spec.carry(routed).unwrap();
            self.op.apply(&mut self.table, side as usize, &routed, &hashes, &mut |_| {}).unwrap();
        }
    }

    /// To another process.
    fn moved(&mut self, bin: u32, extent: Extent) {
        let before = self.table.uninstall(bin).unwrap();
        let mut state = self.keyed.new_state(&self.calls);
        state.mark();
        chunks(&before, extent).iter().for_each(|chunk| state.absorb(chunk).unwrap());
        assert_eq!(self.content(&state), self.content(&before));
        self.table.install(bin, Box::new(state)).unwrap();
    }

    fn said(
        &mut self,
        act: impl FnOnce(&mut dyn KeyedOp, &mut BinTable<State>, &mut dyn FnMut(Output)),
    ) -> Vec<String> {
        let mut said = Vec::new();
        let mut say = |output: Output| {
            let (what, block) = match output {
                Output::Rows(block) => ("row", block),
                Output::Late(block) => ("late", block),
                Output::Side(..) => panic!("no step here has a side output"),
            };
            said.extend((0..block.num_rows()).map(|row| format!("{what} {:?}", block.slice(row, 1).columns())));
        };
        act(&mut *self.op, &mut self.table, &mut say);
        said.sort_unstable();
        said
    }

    /// What comes of rows, as `apply` takes them.
    fn told(&mut self, rows: &[Row]) -> Vec<String> {
        let sides = if matches!(self.keyed.kind, KeyedKind::Join(_)) { 2 } else { 1 };
        let mut all = Vec::new();
        for side in 0..sides {
            let mine: Vec<Row> = rows.iter().filter(|row| row.2.rem_euclid(sides) == side).copied().collect();
            let spec = self.keyed.side(side as usize);
            let mine = RecordBatch::try_new(spec.input.clone(), block(&mine).columns().to_vec()).unwrap();
            let routed = spec.assign(&mine).unwrap();
            let hashes = spec.hashes(&routed).unwrap();
            let routed = spec.carry(routed).unwrap();
            all.extend(self.said(|op, table, say| op.apply(table, side as usize, &routed, &hashes, say).unwrap()));
        }
        all
    }

    /// The bin of a hash is split by so many bits, or all parts of its bin become one.
    fn recut(&mut self, hash: u64, bits: Option<u8>, extent: Extent) {
        let new = || self.keyed.new_state(&self.calls);
        let bin = self.table.bin_of(hash);
        let range = range_of(bin, BITS).unwrap();
        match bits.filter(|bits| range.length() + bits <= 12) {
            Some(bits) => {
                let parts = (0..1 << bits).map(|low| Range::new(range.prefix() << bits | low, range.length() + bits));
                let ranges: Vec<Range> = parts.map(Option::unwrap).collect();
                let state = self.table.uninstall(bin).unwrap();
                for (range, part) in ranges.iter().zip(state.divide(&ranges, extent, &new).unwrap()) {
                    self.table.install(number_of(*range, BITS).unwrap(), Box::new(part)).unwrap();
                }
            }
            None => {
                let whole = penstock_bins::bin(hash, BITS);
                let of = |part: &u32| penstock_bins::bin(range_of(*part, BITS).unwrap().first(), BITS) == whole;
                let parts: Vec<u32> = self.table.owned().map(|(bin, _)| bin).filter(of).collect();
                let mut one = new();
                if extent == Extent::Marked {
                    one.mark();
                }
                for part in parts {
                    let state = self.table.uninstall(part).unwrap();
                    chunks(&state, extent).iter().for_each(|chunk| one.absorb(chunk).unwrap());
                }
                self.table.install(whole, Box::new(one)).unwrap();
            }
        }
    }

    fn records(&self) -> Vec<(u32, Vec<Vec<u8>>)> {
        self.table.owned().map(|(bin, state)| (bin, chunks(state, Extent::Changed))).collect()
    }
}

#[derive(Clone, Debug)]
struct Epoch {
    /// Bins that move before the mark.
    idle: Vec<u32>,
    /// Blocks, and the bin that moves after each.
    blocks: Vec<(Vec<Row>, Option<u32>)>,
    undone: bool,
    watermark: i64,
}

fn epochs() -> impl Strategy<Value = Vec<Epoch>> {
    let rows = |most| prop::collection::vec((0u8..9, 0u8..40, -20i64..60), 0..most);
    let rows = prop_oneof![4 => rows(6), 1 => rows(400)];
    let blocks = prop::collection::vec((rows, prop::option::of(0..BINS)), 0..5);
    let idle = prop::collection::vec(0..BINS, 0..3);
    let epoch = (idle, blocks, any::<bool>(), -20i64..70).prop_map(|(idle, blocks, undone, watermark)| Epoch {
        idle,
        blocks,
        undone,
        watermark,
    });
    prop::collection::vec(epoch, 1..6)
}

fn file(epoch: usize, records: Vec<(u32, Vec<Vec<u8>>)>, bits: u8) -> File<Vec<u8>> {
    let records = records.into_iter().filter(|(_, chunks)| !chunks.is_empty()).map(|(bin, chunks)| {
        let range = Range::new(bin, bits).unwrap();
        Ok::<_, Infallible>(Segment { operator: "step".into(), range, base: epoch == 0, chunks })
    });
    let bytes = write(records).flat_map(Result::unwrap).collect::<Vec<_>>();
    File::open(format!("data-{epoch}"), bytes).unwrap()
}

fn loaded(rig: &Rig, files: &[File<Vec<u8>>], range: Range) -> State {
    rig.state(&select(files, "step", range).collect::<Result<Vec<_>, _>>().unwrap())
}

proptest! {
    #![proptest_config(penstock_cases::cases(48))]
    #[test]
    fn changes_make_up_the_state(plan in 0..PLANS.len(), epochs in epochs()) {
        let mut rig = Rig::new(PLANS[plan]);
        let mut twins: Vec<State> = (0..BINS).map(|_| rig.state(&[])).collect();
        let mut files = Vec::new();
        let mut watermark = -100;
        for (number, epoch) in epochs.iter().enumerate() {
            epoch.idle.iter().for_each(|bin| rig.moved(*bin, Extent::All));
            rig.table.mark_all(number as u64);
            prop_assert!(rig.records().iter().all(|(_, chunks)| chunks.is_empty()), "nothing has changed");
            if epoch.undone {
                let before: Vec<_> = rig.table.owned().map(|(_, state)| rig.content(state)).collect();
                epoch.blocks.iter().for_each(|(rows, _)| rig.apply(rows));
                rig.table.rollback_all().unwrap();
                let after: Vec<_> = rig.table.owned().map(|(_, state)| rig.content(state)).collect();
                prop_assert_eq!(before, after);
                prop_assert!(rig.records().iter().all(|(_, chunks)| chunks.is_empty()), "all is undone");
            }
            for (rows, moved) in &epoch.blocks {
                rig.apply(rows);
                moved.iter().for_each(|bin| rig.moved(*bin, Extent::Marked));
            }
            watermark = watermark.max(epoch.watermark);
            rig.op.watermark(&mut rig.table, watermark * 1_000, &mut |_| {}).unwrap();
            rig.op.end_epoch(&mut rig.table, &mut |_| {}).unwrap();
            let records = rig.records();
            for (bin, chunks) in &records {
                let twin = &mut twins[*bin as usize];
                chunks.iter().for_each(|chunk| twin.absorb(chunk).unwrap());
                let state = rig.table.get(*bin).unwrap();
                prop_assert_eq!(rig.content(twin), rig.content(state), "epoch {}, bin {}", number, bin);
            }
            files.push(file(number, records, BITS));
        }
        // From files, from one that was merged from all, and on as many bins, more and fewer.
        let all: Content = rig.table.owned().flat_map(|(_, state)| rig.content(state)).collect();
        let copy = |state: &State| rig.state(&chunks(state, Extent::All));
        let reached = (!epochs.is_empty()).then_some(watermark * 1_000);
        let rest = rig.rest(rig.table.owned().map(|(_, state)| copy(state)).collect(), reached);
        let bytes = write(merge(&files)).collect::<Result<Vec<_>, _>>().unwrap().concat();
        let merged = [File::open("merged", bytes).unwrap()];
        for files in [&files[..], &merged] {
            for bits in [BITS, 4, 1, 0] {
                let states = (0..1 << bits).map(|bin| {
                    let range = Range::new(bin, bits).unwrap();
                    let content = rig.content(&loaded(&rig, files, range));
                    assert!(content.keys().all(|(key, hash)| key == b"shared" || range.contains(*hash)));
                    content
                });
                prop_assert_eq!(states.flatten().collect::<Content>(), all.clone(), "{} bits", bits);
                let states = (0..1 << bits).map(|bin| loaded(&rig, files, Range::new(bin, bits).unwrap()));
                prop_assert_eq!(rig.rest(states.collect(), reached), rest.clone(), "{} bits", bits);
            }
        }
        let live = merged[0].segments().iter().map(|segment| segment.base);
        prop_assert!(live.into_iter().all(|base| base));
    }
}

/// When, of which hash, and by how many bits: none merges.
type Cut = (u64, Option<u8>);

fn cuts() -> impl Strategy<Value = Vec<Cut>> {
    prop::collection::vec((any::<u64>(), prop::option::of(1u8..4)), 0..4)
}

/// All that is in the bins, but for what they share.
fn without_shared(rig: &Rig) -> Content {
    let mut all: Content = rig.table.owned().flat_map(|(_, state)| rig.content(state)).collect();
    all.remove(&(b"shared".to_vec(), 0));
    all
}

proptest! {
    #![proptest_config(penstock_cases::cases(64))]
    /// Splits and merges, within epochs and between them, are seen neither in what comes out, nor in the state, nor in what epochs
    /// changed; also when an epoch is undone, and through files.
    #[test]
    fn splits_and_merges_change_nothing(
        plan in 0..PLANS.len(),
        epochs in prop::collection::vec((epochs().prop_map(|mut epochs| epochs.remove(0)), cuts(), cuts()), 1..5),
    ) {
        let (mut rig, mut twin) = (Rig::new(PLANS[plan]), Rig::new(PLANS[plan]));
        let mut files = Vec::new();
        let mut watermark = -100;
        for (number, (epoch, before, within)) in epochs.iter().enumerate() {
            before.iter().for_each(|(hash, bits)| rig.recut(*hash, *bits, Extent::All));
            prop_assert_eq!(without_shared(&rig), without_shared(&twin), "between epochs");
            rig.table.mark_all(number as u64);
            twin.table.mark_all(number as u64);
            if epoch.undone {
                epoch.blocks.iter().for_each(|(rows, _)| rig.apply(rows));
                rig.table.rollback_all().unwrap();
                prop_assert_eq!(without_shared(&rig), without_shared(&twin), "undone");
            }
            let mut within = within.iter();
            for (rows, _) in &epoch.blocks {
                prop_assert_eq!(rig.told(rows), twin.told(rows), "epoch {}", number);
                within.next().into_iter().for_each(|(hash, bits)| rig.recut(*hash, *bits, Extent::Marked));
            }
            watermark = watermark.max(epoch.watermark);
            let reached = watermark * 1_000;
            let fired = [&mut rig, &mut twin].map(|rig| rig.said(|op, table, say| op.watermark(table, reached, say).unwrap()));
            prop_assert_eq!(&fired[0], &fired[1], "epoch {}", number);
            let ended = [&mut rig, &mut twin].map(|rig| rig.said(|op, table, say| op.end_epoch(table, say).unwrap()));
            prop_assert_eq!(&ended[0], &ended[1], "epoch {}", number);
            prop_assert_eq!(without_shared(&rig), without_shared(&twin), "after epoch {}", number);
            let changed = |rig: &Rig| {
                let mut all: Content = rig.records().iter().flat_map(|(_, chunks)| content_of_changes(chunks)).collect();
                all.remove(&(b"shared".to_vec(), 0));
                // A pane that was born and went in the epoch is gone where it came from elsewhere. What had to be told the files show.
                all.retain(|_, value| !value.ends_with(b"gone"));
                all
            };
            // A group is told for a row that is not of its top, unless the rows behind its top are known to be enough: that depends on where it was.
            if !matches!(rig.keyed.kind, KeyedKind::Top(_)) {
                prop_assert_eq!(changed(&rig), changed(&twin), "changes of epoch {}", number);
            }
            let records = rig.records().into_iter().filter(|(_, chunks)| !chunks.is_empty()).map(|(bin, chunks)| {
                let range = range_of(bin, BITS).unwrap();
                for chunk in &chunks {
                    Chunk::parse(chunk).unwrap().check(range).unwrap();
                }
                Ok::<_, Infallible>(Segment { operator: "step".into(), range, base: number == 0, chunks })
            });
            let bytes = write(records).flat_map(Result::unwrap).collect::<Vec<_>>();
            files.push(File::open(format!("data-{number}"), bytes).unwrap());
        }
        let bytes = write(merge(&files)).collect::<Result<Vec<_>, _>>().unwrap().concat();
        let merged = [File::open("merged", bytes).unwrap()];
        for (files, bits) in [&files[..], &merged].into_iter().zip([BITS, 3]) {
            let all = (0..1 << bits).flat_map(|bin| rig.content(&loaded(&rig, files, Range::new(bin, bits).unwrap())));
            let mut all: Content = all.collect();
            all.remove(&(b"shared".to_vec(), 0));
            prop_assert_eq!(all, without_shared(&twin), "{} bits", bits);
        }
        let copy = |state: &State| rig.state(&chunks(state, Extent::All));
        let rest = twin.rest(twin.table.owned().map(|(_, state)| copy(state)).collect(), Some(watermark * 1_000));
        for bin in 0..BINS {
            rig.recut(u64::from(bin) << 62, None, Extent::Marked);
        }
        let copy = |state: &State| rig.state(&chunks(state, Extent::All));
        let found = rig.rest(rig.table.owned().map(|(_, state)| copy(state)).collect(), Some(watermark * 1_000));
        prop_assert_eq!(found, rest);
    }
}

/// Chunks of changes cost what was touched, not what there is.
#[test]
fn a_key_that_is_touched_is_all_that_is_told() {
    for plan in [PLANS[0], PLANS[2], PLANS[3], PLANS[7]] {
        let mut rig = Rig::new(plan);
        let rows: Vec<Row> = (0..2_000).map(|row| (1 + (row % 250) as u8, 2 + (row % 251) as u8, 1)).collect();
        rig.apply(&rows);
        rig.table.mark_all(0);
        rig.apply(&[(3, 3, 1)]);
        let told: usize = rig.records().iter().flat_map(|(_, chunks)| chunks).map(Vec::len).sum();
        assert!((1..400).contains(&told), "{told} bytes of {plan}");
    }
}

/// A row of sliding windows, some of which have fired, comes to a bin that had none: it counts in those that are open.
#[test]
fn closed_windows_take_no_row_where_nothing_is_told_of_them() {
    let rig = Rig::new(PLANS[1]);
    let said = rig.rest((0..BINS).map(|_| rig.state(&[])).collect(), Some(0));
    let bounds = |row: &String| row.split(['\n', ',']).filter_map(|part| part.trim().parse::<i64>().ok()).nth(1);
    let ends: Vec<i64> = said.iter().filter(|row| row.starts_with("row")).filter_map(bounds).collect();
    assert!(ends.len() > 50 && ends.iter().all(|end| *end > 0), "{ends:?}");
}

/// A watermark that passes is no change of a bin in which no window with rows has fired.
#[test]
fn a_bin_that_is_not_touched_tells_nothing() {
    for (at, plan) in PLANS.iter().enumerate().filter(|(_, plan)| plan.contains("window")) {
        let mut rig = Rig::new(plan);
        let rows: Vec<Row> = (0..200).map(|row| (1 + row as u8, 2 + row as u8 % 250, 50)).collect();
        rig.apply(&rows);
        rig.op.watermark(&mut rig.table, 1_000, &mut |_| {}).unwrap();
        for (epoch, watermark) in [(0, 2_000), (1, 30_000), (2, 39_000)] {
            rig.table.mark_all(epoch);
            rig.op.watermark(&mut rig.table, watermark, &mut |_| {}).unwrap();
            assert!(rig.records().iter().all(|(_, chunks)| chunks.is_empty()), "epoch {epoch} of plan {at}");
        }
        // The windows of 20 ms every 5 ms that begin at 35 ms end at 55 ms, and hold rows that others hold too.
        rig.table.mark_all(3);
        rig.op.watermark(&mut rig.table, 55_000, &mut |_| {}).unwrap();
        let sliding = plan.contains("sliding");
        assert_eq!(rig.records().iter().any(|(_, chunks)| !chunks.is_empty()), sliding && at != 5, "plan {at}");
    }
}

/// Where a bin came in the middle of an epoch, its record is of the keys that the epoch has touched on either side.
#[test]
fn a_bin_that_has_moved_tells_what_was_touched() {
    for (at, plan) in PLANS.iter().enumerate() {
        let mut rig = Rig::new(plan);
        let rows: Vec<Row> = (0..2_000).map(|row| (1 + (row % 250) as u8, 2 + (row % 251) as u8, 1)).collect();
        rig.apply(&rows);
        let all: usize = rig.table.owned().map(|(_, state)| rig.content(state).len()).sum();
        rig.table.mark_all(0);
        rig.apply(&[(3, 3, 1)]);
        let before: Vec<Content> = rig.records().iter().map(|(_, chunks)| content_of_changes(chunks)).collect();
        (0..BINS).for_each(|bin| rig.moved(bin, Extent::Marked));
        let after: Vec<Content> = rig.records().iter().map(|(_, chunks)| content_of_changes(chunks)).collect();
        assert_eq!(before, after, "plan {at}");
        let told: usize = after.iter().map(Content::len).sum();
        assert!(all <= 9 || told < all / 2, "{told} of {all} keys of plan {at}");
        // And one more, touched here.
        rig.apply(&[(4, 4, 1)]);
        let told: usize = rig.records().iter().map(|(_, chunks)| content_of_changes(chunks).len()).sum();
        assert!(all <= 9 || told < all / 2, "{told} of {all} keys of plan {at}");
    }
}

#[test]
fn wrong_changes_are_refused_and_change_nothing() {
    for (at, plan) in PLANS.iter().enumerate() {
        let mut rig = Rig::new(plan);
        rig.apply(&[(1, 3, 5), (2, 4, 5), (3, 1, 5), (0, 0, 5)]);
        for (_, chunks) in rig.records() {
            for chunk in chunks {
                for cut in 0..chunk.len() {
                    let mut state = rig.state(&[]);
                    if state.absorb(&chunk[..cut]).is_err() {
                        assert!(state.is_empty(), "cut at {cut} of {plan}");
                    }
                }
                for (other, into) in PLANS.iter().enumerate().filter(|(other, _)| *other != at) {
                    let mut state = Rig::new(into).state(&[]);
                    assert!(state.absorb(&chunk).is_err(), "{plan} into {into}, {other}");
                }
                let mut newer = chunk.clone();
                newer[1] = 9;
                let told = rig.state(&[]).absorb(&newer).unwrap_err().to_string();
                assert!(told.contains("state format 9"), "{told}");
            }
        }
    }
}
