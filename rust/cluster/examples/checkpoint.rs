//! Writes the checkpoint that the tests keep of this version of the format: `cargo run -p penstock-cluster --example checkpoint -- tests/data/checkpoint-v1`.
//!
//! Three batches of two members, four operators. Batch 2 has one merged file of what went before and the deltas of its own. A release that
//! raises a version writes a folder of its own beside, and leaves this one.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray, TimestampMillisecondArray, UInt32Array};
use arrow_select::take::take_record_batch;
use penstock_bins::{BinState, BinTable, Encoding, Extent, Routing};
use penstock_engine::{Claim, DataFile, Manifest, Operator, Plan, encode};
use penstock_files::{ChunkWriter, Entry, File, FileError, Range, Segment, merge, write};
use penstock_plan::spec::schema_to_text;
use penstock_plan::{CallError, Callbacks, ForeignState, KeyedOp, KeyedSpec, Plan as Flow, SideRows, State};

/// Operators by name, each the first keyed step of a flow.
const FLOWS: [(&str, &str); 3] = [
    (
        "agg",
        r#"{"op":"key_by","columns":["name"]},{"op":"agg","emit":"update","aggs":[{"name":"n","fn":"count"},
        {"name":"total","fn":"sum","column":"price"},{"name":"mean","fn":"mean","column":"price"},{"name":"last","fn":"max","column":"name"}]}"#,
    ),
    (
        "agg-2",
        r#"{"op":"key_by","columns":["auction"]},{"op":"window","kind":"sliding","size_us":10000000,"every_us":5000000},
        {"op":"agg","aggs":[{"name":"n","fn":"count"},{"name":"low","fn":"min","column":"price"}]}"#,
    ),
    ("top", r#"{"op":"window","kind":"tumbling","size_us":10000000},{"op":"top","n":2,"by":"price","per":"window"}"#),
];
const FUNCTION: &str = "stateful_map";
const BINS: u32 = 4;
const MEMBERS: u32 = 2;
const BATCHES: u64 = 3;
const GENERATION: u64 = 1 << 32;

struct NoCalls;

impl Callbacks for NoCalls {
    fn map(&self, _: usize, batch: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
        Ok(batch.clone())
    }

    fn new_state(&self, call: usize) -> Box<dyn ForeignState> {
        unreachable!("call {call} has no state here")
    }
}

/// The rows of a batch: prices ascend over all, and each fifth name is null.
fn rows(batch: u64) -> RecordBatch {
    let numbers = (batch * 10..batch * 10 + 10).map(|n| n as i64);
    let name = |n: i64| (n % 5 > 0).then(|| format!("k{}", n % 7));
    RecordBatch::try_from_iter_with_nullable([
        ("name", Arc::new(numbers.clone().map(name).collect::<StringArray>()) as ArrayRef, true),
        ("auction", Arc::new(numbers.clone().map(|n| n % 3).collect::<Int64Array>()) as _, true),
        ("price", Arc::new(numbers.clone().map(|n| 100 + n).collect::<Int64Array>()) as _, true),
        (
            "at",
            Arc::new(TimestampMillisecondArray::from_iter_values(numbers.map(|n| n * 1_000)).with_timezone("UTC")) as _,
            false,
        ),
    ])
    .expect("columns of one length")
}

/// One operator on one member.
struct Seat {
    keyed: KeyedSpec,
    table: BinTable<State>,
    op: Box<dyn KeyedOp>,
}

impl Seat {
    fn new(flow: &str, member: u32) -> Result<Self, Box<dyn Error>> {
        let schema = schema_to_text(&rows(0).schema());
        let text = format!(r#"{{"version":2,"sources":[{{"schema":"{schema}","event_time":"at"}}],"steps":[{flow}]}}"#);
        let keyed = Flow::from_json(&text)?.keyed().next().expect("it has one").clone();
        let calls: Arc<dyn Callbacks> = Arc::new(NoCalls);
        let routing = Routing::from_owners((0..BINS).map(|bin| bin * MEMBERS / BINS).collect())?;
        let table = BinTable::fresh(&routing, member, &|| keyed.new_state(&calls));
        let op = keyed.operator(&calls)?;
        Ok(Self { keyed, table, op })
    }

    /// Runs a batch; its changes as segments.
    fn run(&mut self, name: &str, batch: u64, member: u32) -> Result<Vec<Segment>, Box<dyn Error>> {
        self.table.mark_all(batch);
        let routed = self.keyed.assign(&rows(batch))?;
        let hashes = self.keyed.hashes(&routed)?;
        let mine = |hash: &u64| (hash >> 62) as u32 * MEMBERS / BINS == member;
        let kept: Vec<u32> = (0..).zip(&hashes).filter(|(_, hash)| mine(hash)).map(|(row, _)| row).collect();
        let routed = take_record_batch(&routed, &UInt32Array::from(kept))?;
        let hashes: Vec<u64> = hashes.into_iter().filter(mine).collect();
        let routed = self.keyed.carry(routed)?;
        self.op.apply(&mut self.table, 0, &routed, &hashes, &mut |_| {})?;
        self.op.watermark(&mut self.table, watermark(batch), &mut |_| {})?;
        self.op.end_epoch(&mut self.table, &mut |_| {})?;
        let mut segments = Vec::new();
        for (bin, state) in self.table.owned() {
            let mut encoding = Encoding::of(Extent::Changed);
            let mut chunks = Vec::new();
            while let Some(chunk) = state.encode(&mut encoding)? {
                chunks.push(chunk);
            }
            let range = Range::new(bin, 2).expect("a bin of four");
            let some = !chunks.is_empty();
            segments.extend(some.then(|| Segment { operator: name.to_owned(), range, base: batch == 0, chunks }));
        }
        Ok(segments)
    }
}

/// Five seconds behind the last row.
fn watermark(batch: u64) -> i64 {
    (batch as i64 * 10 + 9 - 5) * 1_000_000
}

/// What a function has kept after a batch, as Python pickles it: by number `n` of a key the tuple `(n, batch)`; key 0 goes with batch 2, key 3
/// has a value of a class of its own.
fn function(batch: u64) -> Segment {
    let mut writer = ChunkWriter::new(b"F\x01");
    for n in 0..4_u8 {
        let key = [0x80, 5, b'K', n, b'.'];
        let value = match n {
            3 => b"\x80\x05\x8c\x08no_where\x94\x8c\x05Class\x94\x93\x94.".to_vec(),
            n => vec![0x80, 5, b'K', n, b'K', batch as u8, 0x86, 0x94, b'.'],
        };
        let hash = penstock_plan::hash_int(i64::from(n));
        writer.push(match (n, batch) {
            (0, 2) => Entry::Gone { hash, key: &key },
            _ => Entry::Put { hash, key: &key, value: &value },
        });
    }
    Segment { operator: FUNCTION.into(), range: Range::ALL, base: batch == 0, chunks: vec![writer.finish()] }
}

fn function_columns() -> (String, String) {
    let schema = schema_to_text(&rows(0).schema());
    let flow = format!(
        r#"{{"version":2,"sources":[{{"schema":"{schema}"}}],"steps":[{{"op":"stateful_map","call":0,"columns":["auction"],"schema":"{schema}"}}]}}"#
    );
    let kept = Flow::from_json(&flow).expect("a flow").keyed().next().expect("it has one").kept();
    (format!("{} -> values of a function", kept.types()), kept.to_json())
}

/// Writes a data file, and says what a manifest tells of it.
fn data(
    folder: &Path,
    epoch: u64,
    unique: &str,
    segments: Vec<Result<Segment, FileError>>,
) -> Result<DataFile, Box<dyn Error>> {
    let name = format!("data-{GENERATION:020}-{epoch:020}-{unique}");
    let mut writing = write(segments);
    let bytes = writing.by_ref().collect::<Result<Vec<_>, _>>()?.concat();
    let summary = writing.summary().expect("it has ended");
    std::fs::write(folder.join(&name), &bytes)?;
    Ok(DataFile { name, length: summary.length, checksum: summary.checksum, epoch, generation: GENERATION })
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1).ok_or("name the folder to write to")?;
    let folder = Path::new(&folder);
    std::fs::create_dir_all(folder)?;
    let mut members = (0..MEMBERS)
        .map(|member| FLOWS.iter().map(|(_, flow)| Seat::new(flow, member)).collect::<Result<Vec<_>, _>>())
        .collect::<Result<Vec<_>, _>>()?;
    let operator = |name: &str, kind: &str, types: String, columns: String| Operator {
        name: name.into(),
        kind: kind.into(),
        types,
        version: KeyedSpec::STATE_VERSION,
        columns,
        reads: None,
    };
    let mut operators: Vec<Operator> = FLOWS
        .iter()
        .zip(&members[0])
        .map(|((name, _), seat)| {
            let kept = seat.keyed.kept();
            operator(name, seat.keyed.step.op, kept.types(), kept.to_json())
        })
        .collect();
    let (types, columns) = function_columns();
    operators.push(operator(FUNCTION, "stateful_map", types, columns));

    let claim = Claim { number: 1, nonce: 7, registry: "10.0.0.1:40001".into(), from: None };
    std::fs::write(folder.join(Claim::name(1)), encode(&claim))?;
    let (mut files, mut parent): (Vec<DataFile>, Option<String>) = (Vec::new(), None);
    for batch in 0..BATCHES {
        if batch == 2 {
            let bytes = files.iter().map(|file| Ok((file.name.clone(), std::fs::read(folder.join(&file.name))?)));
            let opened = bytes.collect::<Result<Vec<_>, std::io::Error>>()?;
            let opened =
                opened.into_iter().map(|(name, bytes)| File::open(name, bytes)).collect::<Result<Vec<_>, _>>()?;
            files = vec![data(folder, 1, "merged", merge(&opened).collect())?];
        }
        for (member, seats) in (0..).zip(&mut members) {
            let mut segments = Vec::new();
            for ((name, _), seat) in FLOWS.iter().zip(seats) {
                segments.extend(seat.run(name, batch, member)?.into_iter().map(Ok));
            }
            segments.extend((member == 0).then(|| Ok(function(batch))));
            files.push(data(folder, batch, &format!("{member}"), segments)?);
        }
        let manifest = Manifest {
            query: "b1c5b5a4-0000-4000-8000-000000000001".into(),
            batch,
            finished: false,
            claim: 1,
            generation: GENERATION,
            nonce: 40 + batch,
            plan: Plan { operators: operators.clone(), sources: vec!["input".into()] },
            watermarks: vec![Some(watermark(batch))],
            watermark: None,
            heard_ms: Vec::new(),
            clock_ms: 1_700_000_000_000 + batch as i64 * 1_000,
            late_rows: 0,
            parent: parent.clone(),
            files: files.clone(),
            parts: Vec::new(),
        };
        std::fs::write(folder.join(manifest.name()), encode(&manifest))?;
        parent = Some(manifest.name());
    }
    Ok(())
}
