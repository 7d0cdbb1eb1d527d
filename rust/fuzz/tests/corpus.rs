//! Every target over the corpus that is kept, with every run of the tests; and what the corpus begins with.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use penstock_bins::{BinState, BinTable, Command, Configurations, Control, Encoding, Extent, Routing};
use penstock_cluster::session::{Client, Keys, Kind, NONCE_BYTES, Role, Secret, write_frame};
use penstock_dataflow::Wire;
use penstock_dataflow::fabric::FRAME_KINDS;
use penstock_dataflow::wire::encode_serde;
use penstock_engine::{Shown, encode};
use penstock_files::File;
use penstock_fuzz::TARGETS;
use penstock_graph::{Builder, Loops, Repeats, file};
use penstock_members::list::{Change, Home};
use penstock_members::message::{Bundle, Grant, Range, Request, State};
use penstock_members::{Lane, List, Message as MemberMessage};
use penstock_plan::spec::schema_to_text;
use penstock_plan::{CallError, Callbacks, FlowBlock, ForeignState, Plan, SideRows};
use serde::Serialize;
use serde_json::json;

/// Largest file that is kept: corpora grow by what is new, not by what is long.
const LONGEST: u64 = 64 << 10;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn corpus(target: &str) -> PathBuf {
    root().join("fuzz/corpus").join(target)
}

fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found: Vec<_> = fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect();
    found.sort();
    found
}

/// Some of what is kept is decoded, some is refused, and none of it is more than that.
#[test]
fn targets_take_their_corpus() {
    for (name, target) in TARGETS {
        let found = files(&corpus(name));
        let decoded = found.iter().filter(|(_, bytes)| target(bytes)).count();
        assert!(decoded > 0, "{name}: nothing of {} files is decoded", found.len());
        assert!(decoded < found.len(), "{name}: nothing of {} files is refused", found.len());
        for (path, bytes) in found {
            assert!(bytes.len() as u64 <= LONGEST, "{} has {} bytes", path.display(), bytes.len());
        }
    }
}

/// Every single bit of the seeds, and every cut: what a decoder must stand before a fuzzer is asked.
#[test]
fn targets_take_their_seeds_with_one_bit_wrong_and_cut_short() {
    for (name, target) in TARGETS {
        for (_, mut bytes) in
            seeds().remove(name).unwrap_or_default().into_iter().filter(|(_, seed)| seed.len() < 1_000)
        {
            for at in 0..bytes.len() {
                target(&bytes[..at]);
                let bit = 1 << (at % 8);
                bytes[at] ^= bit;
                target(&bytes);
                bytes[at] ^= bit;
            }
        }
    }
}

#[test]
fn every_target_has_a_program_and_a_corpus() {
    let names: BTreeSet<String> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
    let stems = |folder: &str| -> BTreeSet<String> {
        fs::read_dir(root().join(folder))
            .unwrap()
            .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(stems("fuzz/fuzz_targets"), names);
    assert_eq!(stems("fuzz/corpus"), names);
    let manifest = fs::read_to_string(root().join("fuzz/Cargo.toml")).unwrap();
    for name in names {
        assert!(manifest.contains(&format!("name = \"{name}\"\npath = \"fuzz_targets/{name}.rs\"")), "{name}");
    }
}

/// Run with `PENSTOCK_GOLDEN=1` to write them again, after a format has a new version.
#[test]
fn seeds_are_in_the_corpus() {
    for (target, seeds) in seeds() {
        for (name, bytes) in seeds {
            let path = corpus(target).join(format!("seed-{name}"));
            if std::env::var_os("PENSTOCK_GOLDEN").is_some() {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(&path, &bytes).unwrap();
            }
            assert_eq!(fs::read(&path).ok(), Some(bytes), "{}", path.display());
        }
    }
}

type Seeds = Vec<(String, Vec<u8>)>;

fn with(mode: u8, bytes: &[u8]) -> Vec<u8> {
    [&[mode], bytes].concat()
}

fn seeds() -> BTreeMap<&'static str, Seeds> {
    let mut found: BTreeMap<&'static str, Seeds> = BTreeMap::new();
    let mut add = |target: &'static str, name: &str, bytes: Vec<u8>| {
        found.entry(target).or_default().push((name.to_owned(), bytes));
    };
    let stats = br#"{"do":"stats","query":null}"#;
    let failure = br#"{"error":{"kind":"data","message":"no"}}"#;
    for (name, json, kind) in [("stats", &stats[..], Kind::Request), ("failure", failure, Kind::Reply)] {
        let head = [&7_u64.to_le_bytes()[..], &(json.len() as u32).to_le_bytes()].concat();
        let mut frame = Vec::new();
        write_frame(&mut frame, kind, &[&head, json, b"attached"], 1 << 16).unwrap();
        add("session_frames", name, with(0, &frame));
        add("session_frames", &format!("{name}-sealed"), with(1, &frame));
    }
    add("session_frames", "none", with(0, b"PF\x02\x01 another version"));
    let secret = Secret::new(std::array::from_fn(|at| at as u8)).unwrap();
    let (_, hello) = Client::hello(&Keys::all(&secret), Role::Mesh, "q", b"{}", [9; NONCE_BYTES]).unwrap();
    add("handshake", "hello", [&[0, hello.len() as u8], &hello[..], &[0; 40]].concat());
    add("handshake", "short", vec![0, 9, 1, 2, 3]);
    for (name, message) in messages() {
        add("messages", name, serde_json::to_vec(&message).unwrap());
    }
    let batch = batch();
    let mut stream = Vec::new();
    FlowBlock::Rows { batch: batch.clone(), hashes: vec![1, 2, 3], side: 0 }.encode(&mut stream);
    // Behind its tag, its side, the number of hashes and they themselves is an Arrow stream.
    add("packed", "rows", stream[6 + 24..].to_vec());
    add("packed", "cut", stream[6 + 24..201].to_vec());
    add("spilled", "rows", stream[6 + 24..].to_vec());
    add("spilled", "cut", stream[6 + 24..201].to_vec());
    add("columns", "rows", with(200, &stream[6 + 24..]));
    add("columns", "pieces", with(3, &stream[6 + 24..]));
    add("columns", "cut", with(3, &stream[6 + 24..201]));
    add("flow_blocks", "rows", stream);
    for (name, block) in [
        ("watermark", FlowBlock::Watermark(-5)),
        ("clock", FlowBlock::Clock(5)),
        ("end", FlowBlock::EndEpoch),
        ("begin", FlowBlock::Begin(-3)),
    ] {
        let mut bytes = Vec::new();
        block.encode(&mut bytes);
        add("flow_blocks", name, bytes);
    }
    add("flow_blocks", "none", vec![9, 9]);
    let mut all = Vec::new();
    for (kind, (name, body)) in (0..).zip(bodies()) {
        let mut header = [0; 56];
        header[5] = kind;
        add("fabric_frames", &format!("{name}-sealed"), [&[1], &header[..], &body].concat());
        // Of its kind, on the first lane, from worker 1 to worker 0.
        let frame = [&[kind, 0, 1, 0, 0, 0, 0, 0, 0, 0][..], &(body.len() as u16).to_le_bytes(), &body].concat();
        all.extend_from_slice(&frame);
        add("door", name, frame);
    }
    add("door", "all", all);
    add("door", "none", vec![0; 11]);
    add("fabric_frames", "nothing", vec![0; 57]);
    for (name, mode, said) in told() {
        add("members", name, with(mode, &encoded(&said)));
    }
    add("members", "none", with(0, &[200]));
    add("lesson", "all", encoded(&configurations()));
    add("lesson", "fresh", encoded(&Configurations::<u64>::new(Routing::new(0, 1).unwrap())));
    add("lesson", "three-bins", encoded(&(vec![0_u32; 3], [0_u8; 5])));
    // To worker 7: so much was taken, these bins are wanted.
    add("bin_parts", "taken", [&7_u32.to_le_bytes()[..], &encoded(&(0_u32, 300_u64))].concat());
    add("bin_parts", "wanted", [&7_u32.to_le_bytes()[..], &encoded(&(1_u32, vec![5_u32, u32::MAX]))].concat());
    let (query, columns) = ("q".to_owned(), "k int64".to_owned());
    let shown = Shown { query, batch: 4, generation: 2, nonce: 7, rows: 3, hash: u64::MAX, columns };
    add("manifest", "shown", with(0, &encode(&shown)));
    add("manifest", "shown-sealed", with(1, &serde_json::to_vec(&shown).unwrap()));
    let part = |kind: u8, rest: &[u8]| [&[kind, 7, 0, 0, 0], rest].concat();
    let records = vec![(5_u64, vec![(-1_i64, Some("a".to_owned())), (3, None)])];
    let pending = encoded(&records);
    for (name, part) in [
        ("prepare", part(1, &[1, 9])),
        ("state", part(2, b"any bytes")),
        ("pending", part(3, &pending)),
        ("end", part(4, &[3, 1])),
        ("none", vec![9, 9]),
    ] {
        add("bin_parts", name, part);
    }
    let golden = root().join("tests/data");
    for folder in ["checkpoint-v1", "checkpoint-v1-engine"] {
        for (number, (path, bytes)) in files(&golden.join(folder)).into_iter().enumerate() {
            let name = path.file_name().unwrap().to_str().unwrap();
            if name.starts_with("data") {
                add("data_file", &format!("{folder}-{number}"), with(0, &bytes));
                add("data_file", &format!("{folder}-{number}-sealed"), with(1, &bytes));
                let opened = File::open(name, &bytes[..]).unwrap();
                for (segment, placed) in opened.segments().iter().enumerate() {
                    let kept = match (folder, &*placed.operator) {
                        (_, "stateful_map") => 0,
                        ("checkpoint-v1-engine", "agg") => 1,
                        (_, "agg") => 2,
                        (_, "agg-2") => 3,
                        (_, "top") => 4,
                        (_, other) => panic!("{other}"),
                    };
                    for (at, chunk) in opened.chunks(segment).enumerate().take(1) {
                        add(
                            "state",
                            &format!("{folder}-{number}-{segment}-{at}"),
                            [&[kept, 255], &chunk.unwrap()[..]].concat(),
                        );
                    }
                }
            } else {
                add("manifest", &format!("{folder}-{number}"), with(0, &bytes));
                add("manifest", &format!("{folder}-{number}-sealed"), with(1, &bytes[10..bytes.len() - 12]));
            }
        }
    }
    add("manifest", "no-json", with(1, b"{"));
    add("data_file", "chunks", [&[2, 1, 1, 0, 0, 0, 0][..], &[3; 64]].concat());
    add("data_file", "none", with(0, b"penstock"));
    for (number, (_, chunks)) in kept().into_iter().enumerate() {
        let kept = (FIRST_KEPT + number) as u8;
        let halves = chunks[0].clone();
        let length = halves.len().div_ceil(16).min(255) as u8;
        add("state", &format!("kept-{kept}"), [&[kept, length], &halves[..]].concat());
    }
    add("state", "none", vec![1, 1, 0, 0]);
    for (number, kept) in files(&root().join("rust/fuzz/data")).into_iter().enumerate() {
        add("plan", &format!("kept-{number}"), kept.1);
    }
    add("plan", "no-plan", br#"{"version":1}"#.to_vec());
    add("edge_text", "numbers", with(2, b"# from to\n1 2\n\n2\t3\r\n18446744073709551615 0"));
    add("edge_text", "texts", with(3, "ann bob\nbob größe\n".as_bytes()));
    add("edge_text", "no-edge", with(0, b"1\n"));
    for (name, bytes) in graphs() {
        add("graph_file", name, with(0, &bytes));
        add("graph_file", &format!("{name}-sealed"), with(1, &bytes));
    }
    add("graph_file", "none", with(0, &[0; 40]));
    add("pattern", "triangle", b"tri(a, b, c) :- e(a, b), e(b, c), e(a, c)".to_vec());
    add("pattern", "no-pattern", b"tri(a :- e(a)".to_vec());
    found
}

fn encoded(value: &impl Serialize) -> Vec<u8> {
    let mut out = Vec::new();
    encode_serde(value, &mut out);
    out
}

/// The list that lets worker 2 in, which is of the process of worker 0.
fn admitted() -> List {
    let mut list = List::founded_at(2, 1).after(Change::Admitted(vec![2])).unwrap();
    list.homes.insert(2, Home { process: 0, ticket: 1 });
    list
}

fn marker<P>(list: &List, grant: Option<Grant<P>>) -> MemberMessage<P> {
    MemberMessage::Marker { list: Arc::new(list.clone()), next: [(0, 1), (1, 0)].into(), grant }
}

/// A body of each kind of frames between processes, by number: who adds a kind adds one here.
fn bodies() -> [(&'static str, Vec<u8>); FRAME_KINDS] {
    type Told = (Option<String>, Vec<Vec<u8>>);
    let number = |number: u64| number.to_le_bytes().to_vec();
    [
        ("data", [&1_u32.to_le_bytes()[..], &[5, 1, 9]].concat()),
        ("bundle", encoded(&(0_u64, Some("graph"), vec![(0_u64, vec![1_u8, 2])]))),
        ("abort", encoded(&(1_usize, (3_u32, 1_usize, "it ended")))),
        ("goodbye", Vec::new()),
        ("beat", Vec::new()),
        ("credit", number(0)),
        ("leave", number(1)),
        ("behind", vec![1, 0, 0, 0, 5]),
        ("member", encoded(&marker::<Told>(&admitted(), None))),
        ("given-up", Vec::new()),
        ("ask", encoded(&(1_u64, 2_usize, [0_usize].as_slice()))),
        ("welcome", number(2)),
        ("over", Vec::new()),
        ("crowded", number(1)),
    ]
}

type Said = Vec<(u32, Lane, MemberMessage<Vec<u8>>)>;

/// What members are told: a founder, and with an odd mode one that joins.
fn told() -> Vec<(&'static str, u8, Said)> {
    let lanes = [Lane::Urgent, Lane::Data, Lane::Behind];
    let (admitted, empty) = (admitted(), || Vec::<u8>::new());
    let seated = admitted.after(Change::Seated { joiner: 2, granter: 0 }).unwrap();
    let urgent = |from: u32, message| (from, Lane::Urgent, message);
    let bundle = |number, after| MemberMessage::Bundle(0, Bundle { number, after, part: vec![7] });
    let range = Range { dataflow: 0, sender: 1, start: 0, end: 1 };
    let grant = || Grant::from([(0, (vec![1], vec![(1, 0)]))]);
    let home = Home { process: 1, ticket: 1 };
    let leaving = List::founded_at(2, 1).after(Change::Leaving(1)).unwrap();
    let states =
        || Arc::new([0, 1].map(|dataflow| (dataflow, State { next: [(0, 3)].into(), counts: empty() })).into());
    // The list goes with the urgent lane, and the others say which one.
    let marks = |from: u32, list: &List| {
        let message = |lane| if lane == Lane::Urgent { marker(list, None) } else { MemberMessage::Mark(list.version) };
        lanes.map(|lane| (from, lane, message(lane)))
    };
    let mut admits: Said = marks(1, &admitted).into();
    admits.push(urgent(2, marker(&admitted, None)));
    admits.push(urgent(2, MemberMessage::Bootstrap { attempt: 1 }));
    admits.push(urgent(1, bundle(0, vec![(0, 0)])));
    admits.push(urgent(2, MemberMessage::Ask { attempt: 1, range }));
    admits.push(urgent(2, MemberMessage::Request(Request::Seat { joiner: 2, granter: 0 })));
    admits.push(urgent(2, MemberMessage::Done { attempt: 1 }));
    admits.push(urgent(1, MemberMessage::Request(Request::Admit { home, count: 3, linked: [0, 1].into() })));
    let mut leaves: Said = marks(1, &leaving).into();
    leaves.push(urgent(1, bundle(0, Vec::new())));
    leaves.push(urgent(1, MemberMessage::Legacy(grant())));
    leaves.push(urgent(1, MemberMessage::Request(Request::Close { leaver: 1, finals: [(0, 1)].into() })));
    leaves.push(urgent(1, MemberMessage::Request(Request::Withdraw(2))));
    leaves.push(urgent(1, MemberMessage::Request(Request::Leave(0))));
    let mut joins: Said = marks(0, &admitted).into();
    joins.extend(marks(1, &admitted));
    joins.push(urgent(0, MemberMessage::Snapshot { attempt: 1, states: states() }));
    let bundles = Ok(vec![Bundle { number: 0, after: Vec::new(), part: empty() }]);
    joins.push(urgent(0, MemberMessage::Answer { attempt: 1, range, bundles }));
    joins.push(urgent(0, marker(&seated, Some(grant()))));
    joins.push(urgent(1, bundle(1, Vec::new())));
    vec![("admits", 0, admits), ("leaves", 0, leaves), ("joins", 1, joins)]
}

/// Configurations of which some are pending, with a bin that is split, and one that may still come.
fn configurations() -> Configurations<u64> {
    let mut f = Configurations::new(Routing::new(2, 2).unwrap());
    f.stage(3, Control::batch(0, vec![Command::Split { bin: 3, bits: 2 }]));
    f.stage(5, Control::batch(1, vec![Command::Map(vec![1, 1, 0, 0])]));
    f.stage(7, Control::batch(2, vec![Command::Merge { bin: 3 }, Command::Move { bin: 2, worker: 1 }]));
    f.stage(9, Control::batch(3, vec![Command::Noop]));
    f.advance(&[8], |_| true);
    f.start(|_| false).unwrap();
    f
}

/// Files of `data` before this one are of golden checkpoints.
const FIRST_KEPT: usize = 6;

/// What operators keep of which there is no golden checkpoint, and chunks of it.
fn kept() -> Vec<(String, Vec<Vec<u8>>)> {
    struct NoCalls;
    impl Callbacks for NoCalls {
        fn map(&self, _: usize, batch: &RecordBatch, _: &mut SideRows) -> Result<RecordBatch, CallError> {
            Ok(batch.clone())
        }

        fn new_state(&self, call: usize) -> Box<dyn ForeignState> {
            unreachable!("no state of call {call}")
        }
    }
    let numbers = 0..60_i64;
    let columns: [ArrayRef; 3] = [
        Arc::new(numbers.clone().map(|n| (n % 4 > 0).then(|| format!("k{}", n % 4))).collect::<StringArray>()),
        Arc::new(numbers.clone().map(|n| (n % 5 > 0).then_some(n % 5)).collect::<Int64Array>()),
        Arc::new(numbers.collect::<Int64Array>()),
    ];
    let named = |names: [&str; 3]| RecordBatch::try_from_iter(names.into_iter().zip(columns.clone())).unwrap();
    let blocks = [named(["k", "i", "t"]), named(["l", "j", "u"])];
    let [schema, right] = [0, 1].map(|side: usize| schema_to_text(&blocks[side].schema()));
    let one = |steps: &str| {
        format!(r#"{{"version":2,"sources":[{{"schema":"{schema}","event_time":"t"}}],"steps":[{steps}]}}"#)
    };
    let plans = [
        one(
            r#"{"op":"key_by","columns":["i"]},{"op":"agg","emit":"update","aggs":[{"name":"b","fn":"min_by","column":"k","by":"t"},{"name":"l","fn":"last","column":"i"},{"name":"d","fn":"count_distinct","column":"k"},{"name":"a","fn":"approx_count_distinct","column":"t"},{"name":"q","fn":"approx_quantile","column":"t","q":0.9},{"name":"s","fn":"stddev","column":"t"}]}"#,
        ),
        one(
            r#"{"op":"key_by","columns":["k"]},{"op":"window","kind":"session","size_us":3000},{"op":"agg","aggs":[{"name":"n","fn":"count_distinct","column":"t"},{"name":"b","fn":"max_by","column":"i","by":"t"},{"name":"c","fn":"count"}]}"#,
        ),
        one(r#"{"op":"window","kind":"tumbling","size_us":10000},{"op":"distinct","columns":["k"]}"#),
        format!(
            r#"{{"version":2,"sources":[{{"name":"l","schema":"{schema}"}},{{"name":"r","schema":"{right}"}}],"steps":[{{"op":"join","left":["i"],"right":["u"],"inputs":[0,1]}}]}}"#
        ),
    ];
    let run = |plan: &String| {
        let keyed = Plan::from_json(plan).unwrap().keyed().next().unwrap().clone();
        let calls: Arc<dyn Callbacks> = Arc::new(NoCalls);
        let routing = Routing::from_owners(vec![0]).unwrap();
        let mut table = BinTable::fresh(&routing, 0, &|| keyed.new_state(&calls));
        let mut op = keyed.operator(&calls).unwrap();
        let sides = if plan.contains("join") { 2 } else { 1 };
        for (side, block) in blocks.iter().enumerate().take(sides) {
            let spec = keyed.side(side);
            let routed = spec.assign(&block.slice(0, 6)).unwrap();
            let hashes = spec.hashes(&routed).unwrap();
            op.apply(&mut table, side, &spec.carry(routed).unwrap(), &hashes, &mut |_| {}).unwrap();
        }
        let mut chunks = Vec::new();
        for (_, state) in table.owned() {
            let mut encoding = Encoding::of(Extent::Changed);
            chunks.extend(std::iter::from_fn(|| state.encode(&mut encoding).unwrap()));
        }
        (keyed.kept().to_json(), chunks)
    };
    plans.iter().map(run).collect()
}

#[test]
fn what_operators_keep_is_what_the_target_reads() {
    for (number, (kept, chunks)) in kept().into_iter().enumerate() {
        let path = root().join(format!("rust/fuzz/data/kept-{}.json", FIRST_KEPT + number));
        if std::env::var_os("PENSTOCK_GOLDEN").is_some() {
            fs::write(&path, &kept).unwrap();
        }
        assert_eq!(fs::read_to_string(&path).ok(), Some(kept), "{}", path.display());
        assert!(!chunks.is_empty());
    }
}

fn messages() -> Vec<(&'static str, serde_json::Value)> {
    let stamp = json!({"generation": 4_294_967_297_u64, "attempt": 1});
    vec![
        ("stats", json!({"do": "stats", "query": "q"})),
        ("stop", json!({"do": "stop"})),
        ("close", json!({"query": "q", "ask": {"CloseEpoch": {"epoch": 3}}})),
        ("drop", json!({"query": "q", "ask": "Drop"})),
        ("done", json!("Done")),
        ("released", json!({"Released": {"pieces": [[0, 5, 0, [2, 0]]]}})),
        ("member-up", json!({"MemberUp": {"slot": 0, "member": 1, "executor": "host/1", "executors": 2}})),
        ("feed", json!({"query": "q", "epoch": 1, "partition": 2, "attempt": 3})),
        ("drain", json!({"query": "q", "epoch": 1, "piece": 2, "which": "beside"})),
        ("end", json!({"rows": 3, "checksum": 7})),
        ("introduction", json!({"group": "g", "from": 0, "to": 1, "processes": 2, "threads": 4})),
        ("failure", json!({"error": {"kind": "state", "message": "no"}})),
        ("none", json!({"stamp": stamp})),
    ]
}

fn batch() -> RecordBatch {
    let numbers: ArrayRef = Arc::new(Int64Array::from(vec![Some(1), None, Some(3)]));
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["a", "", "größe"]));
    RecordBatch::try_from_iter_with_nullable([("n", numbers, true), ("t", texts, false)]).unwrap()
}

fn graphs() -> Vec<(&'static str, Vec<u8>)> {
    let folder =
        std::env::temp_dir().join(format!("penstock-seeds-{}-{:?}", std::process::id(), std::thread::current().id()));
    fs::create_dir_all(&folder).unwrap();
    let mut numbers = Builder::numbers();
    numbers.relation("e", Loops::Keep, Repeats::Drop);
    numbers.numbers_in("e", &[10, 20, 10, 30], &[20, 30, 30, 30]).unwrap();
    let mut texts = Builder::texts();
    texts.text_in("e", "ann", "bob").unwrap();
    let found = [("numbers", numbers.finish()), ("texts", texts.finish())].map(|(name, index)| {
        let path = folder.join(name);
        file::save(&index.unwrap(), &path).unwrap();
        (name, fs::read(path).unwrap())
    });
    fs::remove_dir_all(folder).unwrap();
    found.into()
}
