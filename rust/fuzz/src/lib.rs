//! Every decoder of bytes from outside, as a function of bytes.
//!
//! Owns: what "any bytes" means for each decoder. `fuzz/` has a program for each target here (`make fuzz`), and `tests/corpus.rs`
//! runs the corpus that is kept there with every `cargo test`. Who reaches which decoder:
//!
//! | Target | Bytes come from |
//! |---|---|
//! | `session_frames`, `handshake` | whoever reaches a port |
//! | `messages`, `columns`, `fabric_frames`, `door`, `members`, `lesson`, `flow_blocks`, `bin_parts`, `packed` | a peer that has proved the secret, or damage on the way |
//! | `manifest`, `data_file`, `state` | whoever writes to the folder of a checkpoint |
//! | `spilled` | whoever writes to a local disk |
//! | `plan` | the driver; Python that was given something odd |
//! | `edge_text`, `graph_file`, `pattern` | files and text of users |
//!
//! Invariants: a target takes any bytes, neither panics nor takes memory out of proportion, and says whether something was decoded. A
//! checksum is no defence against who writes files, and a fuzzer does not find one: where the first byte is odd, checksums, magics
//! and lengths are made right before the bytes are read. What is decoded is used (read to its end, merged, searched, written and read
//! again), so that what a decoder lets pass is seen to be harmless.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use penstock_cluster::Failure;
use penstock_cluster::message::{DrainContext, FeedContext, MeshContext, Message, StreamEnd};
use penstock_cluster::session::{
    Client, Frame, Keys, Kind, NONCE_BYTES, Role, Secret, Server, fuzz_alive, fuzz_introduction, read_frame,
};
use penstock_dataflow::wire::{decode_serde, encode_serde};
use penstock_dataflow::{FabricTag, Wire, fabric};
use penstock_engine::{Answer, Claim, Contents, Event, Layout, Manifest, Named, Request, Shown, decode, encode};
use penstock_files::{Chunk, Entry, File, Range, Segment, merge, ranges, select, write};
use penstock_graph::text::{EdgeText, Ids};
use penstock_graph::{Index, Pattern, Query, Search, Unit, file};
use penstock_members::{Host, Lane, Member, Message as MemberMessage, Output};
use penstock_plan::{FlowBlock, Kept, Plan, read_batch};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Takes bytes; whether something was decoded.
pub type Target = fn(&[u8]) -> bool;

/// All of them by name.
pub const TARGETS: [(&str, Target); 19] = [
    ("bin_parts", bin_parts),
    ("columns", columns),
    ("data_file", data_file),
    ("door", door),
    ("edge_text", edge_text),
    ("fabric_frames", fabric_frames),
    ("flow_blocks", flow_blocks),
    ("graph_file", graph_file),
    ("handshake", handshake),
    ("lesson", lesson),
    ("manifest", manifest),
    ("members", members),
    ("messages", messages),
    ("packed", packed),
    ("pattern", pattern),
    ("plan", plan),
    ("session_frames", session_frames),
    ("spilled", spilled),
    ("state", state),
];

/// Longest payload of a frame here; connections allow more, of which nothing else follows.
const LIMIT: usize = 1 << 16;
/// Of the fabric that frames here belong to.
const TAG: FabricTag = FabricTag { query: 7, generation: 3 };

/// Whether checksums are made right, and the rest.
fn sealed(data: &[u8]) -> Option<(bool, &[u8])> {
    let (mode, rest) = data.split_first()?;
    Some((mode & 1 == 1, rest))
}

/// What is decoded must be the same once it was written.
fn comes_back<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(value: &T) {
    let text = serde_json::to_string(value).expect("what was read can be written");
    assert_eq!(&serde_json::from_str::<T>(&text).expect("what was written can be read"), value);
}

/// Frames of control connections, feeds and drains, and the bodies in them.
pub fn session_frames(data: &[u8]) -> bool {
    const KINDS: u8 = Kind::ALL.len() as u8;
    let Some((seal, rest)) = sealed(data) else { return false };
    let mut bytes = rest.to_vec();
    if seal && bytes.len() >= 12 {
        // Magic, version, kind, length, checksum; then the payload.
        bytes[..3].copy_from_slice(b"PF\x01");
        bytes[3] = bytes[3] % KINDS + 1;
        let length = bytes.len() as u32 - 12;
        bytes[4..8].copy_from_slice(&length.to_le_bytes());
        let mut crc = crc32fast::Hasher::new();
        crc.update(&bytes[..8]);
        crc.update(&bytes[12..]);
        let crc = crc.finalize();
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
    }
    let mut input = &bytes[..];
    let mut decoded = false;
    while let Ok(Some(Frame { kind, payload })) = read_frame(&mut input, LIMIT) {
        let length = payload.len();
        assert!(length <= LIMIT);
        if let Ok(body) = (Frame { kind, payload }).into_body() {
            assert!(body.attachment.len() + 12 <= length);
            decoded |= Failure::from_body(&body.json, body.attachment.clone()).is_some();
            decoded |= Message::parse(body.json).is_ok();
        }
        decoded |= seal;
    }
    decoded
}

/// Both sides of the handshake and of the question whether an engine lives, and keys as tasks carry them. Nobody gets in without a key.
pub fn handshake(data: &[u8]) -> bool {
    static KEYS: OnceLock<Keys> = OnceLock::new();
    let keys = KEYS.get_or_init(|| {
        let secret = Secret::new(std::array::from_fn(|at| at as u8)).expect("not all the same");
        Keys::all(&secret)
    });
    let Some((_, rest)) = sealed(data) else { return false };
    // A secret alone becomes an authority, which costs a signature.
    if rest.len() != 32 {
        let _ = Keys::from_bytes(rest);
    }
    let (ours, theirs) = ([1; NONCE_BYTES], [2; NONCE_BYTES]);
    let at = rest.first().map_or(0, |at| usize::from(*at).min(rest.len() - 1));
    let (hello, answer) = rest.get(1..).unwrap_or_default().split_at(at);
    let (client, sent) = Client::hello(keys, Role::Feed, "q", b"context", theirs).expect("there are all keys");
    assert!(client.answer(answer, b"").is_err(), "a challenge without the key");
    let (server, _) = Server::challenge(keys, &sent, ours, b"").expect("a good hello");
    assert!(server.verify(answer).is_err(), "a proof without the key");
    let asks = fuzz_alive(hello);
    match Server::challenge(keys, hello, ours, b"") {
        Ok((server, challenge)) => {
            assert!(challenge.len() < 128, "an answer to who is not known stays short");
            assert!(server.verify(answer).is_err(), "a proof without the key");
            true
        }
        Err(_) => asks,
    }
}

/// Control messages: calls of the engine and their answers, and what connections are for.
pub fn messages(data: &[u8]) -> bool {
    fn read<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(data: &[u8]) -> Option<T> {
        let value = serde_json::from_slice(data).ok()?;
        comes_back(&value);
        Some(value)
    }
    let mut decoded = false;
    if let Ok(body) = serde_json::from_slice::<serde_json::Value>(data) {
        decoded |= Failure::from_body(&body, Vec::new()).is_some();
        if let Ok(message) = Message::parse(body) {
            decoded = true;
            if let Message::Ask(ask) = &message {
                comes_back(ask.as_ref());
                if let Request::Start(start) = &ask.ask
                    && let Ok(launch) = ask.launch(start)
                {
                    let workers = launch.processes * launch.threads;
                    assert!(launch.process < launch.processes);
                    let owners = launch.layouts.values().flat_map(Layout::ranges).map(|(_, owner)| *owner);
                    assert!({ owners }.all(|owner| (owner as usize) < workers));
                }
            }
        }
    }
    decoded |= read::<Answer>(data).is_some() | read::<Event>(data).is_some();
    decoded |= read::<FeedContext>(data).is_some() | read::<DrainContext>(data).is_some();
    decoded |= read::<MeshContext>(data).is_some() | read::<StreamEnd>(data).is_some();
    decoded | fuzz_introduction(data)
}

/// Rows on their way to a member and back: an Arrow stream, cut into pieces anywhere.
pub fn columns(data: &[u8]) -> bool {
    let Some((cut, rest)) = data.split_first() else { return false };
    let pieces = rest.chunks(usize::from(*cut) * 8 + 8).map(<[u8]>::to_vec);
    penstock_cluster::fuzz_columns(pieces).is_ok_and(|rows| rows > 0)
}

/// Rows on their way between members.
pub fn flow_blocks(data: &[u8]) -> bool {
    match FlowBlock::decode(data) {
        Ok(FlowBlock::Rows { batch, hashes, side }) => {
            assert!(hashes.is_empty() || hashes.len() == batch.num_rows());
            let mut out = Vec::new();
            FlowBlock::Rows { batch: batch.clone(), hashes: hashes.clone(), side }.encode(&mut out);
            let Ok(FlowBlock::Rows { batch: again, hashes: same, side: again_side }) = FlowBlock::decode(&out) else {
                panic!("what was decoded cannot be sent on")
            };
            assert_eq!((again.num_rows(), again.num_columns(), same), (batch.num_rows(), batch.num_columns(), hashes));
            assert_eq!(again_side, side);
            true
        }
        Ok(_) => true,
        Err(_) => false,
    }
}

/// Parts of bins that move between members, and what is told back.
pub fn bin_parts(data: &[u8]) -> bool {
    penstock_bins::fuzz_parts(data)
}

/// Rows that a program of dataflow sends to another process.
pub fn packed(data: &[u8]) -> bool {
    matches!(read_batch(data), Ok(Some(batch)) if batch.num_rows() > 0)
}

/// Rows that were spilled, with a right checksum.
pub fn spilled(data: &[u8]) -> bool {
    penstock_cluster::fuzz_piece(data).is_ok_and(|rows| rows > 0)
}

/// Frames between the workers of a query, and the progress in them.
pub fn fabric_frames(data: &[u8]) -> bool {
    const HEADER: usize = 56;
    type Bundle = (u64, Option<String>, Vec<(u64, Vec<u8>)>);
    let Some((seal, rest)) = sealed(data) else { return false };
    let mut bytes = rest.to_vec();
    if seal && bytes.len() >= HEADER {
        let body = bytes.len() - HEADER;
        bytes[..4].copy_from_slice(&0x7065_6e73_u32.to_le_bytes());
        (bytes[4], bytes[5]) = (3, bytes[5] % fabric::FRAME_KINDS as u8);
        bytes[8..16].copy_from_slice(&TAG.query.to_le_bytes());
        bytes[16..24].copy_from_slice(&TAG.generation.to_le_bytes());
        bytes[40..48].copy_from_slice(&(body as u64).to_le_bytes());
        let crc = crc32fast::hash(&bytes[HEADER..]);
        bytes[48..52].copy_from_slice(&crc.to_le_bytes());
        let crc = crc32fast::hash(&bytes[..52]);
        bytes[52..56].copy_from_slice(&crc.to_le_bytes());
        let _ = decode_serde::<Bundle>(&bytes[HEADER..]);
        let _ = decode_serde::<Vec<((u64, u32), i64)>>(&bytes[HEADER..]);
    }
    fabric::fuzz_frames(&bytes, TAG) > 0
}

/// Frames that the process of a joinable run takes from another one, whose key is right: kind, lane, sender, receiver and length of each, then its body.
/// Ends with the first that it does not take.
pub fn door(data: &[u8]) -> bool {
    let (seats, door, guard) = fabric::simulated_process(0, 2, 1, TAG, 7).expect("a small run");
    let wire = door.wire(1).expect("the other process");
    let ticket = door.ask(1).expect("one more worker");
    let (mut rest, mut taken) = (data, false);
    while let Some((&[kind, lane, f0, f1, f2, f3, t0, t1, t2, t3, l0, l1], more)) = rest.split_first_chunk() {
        let (from, to) = (u32::from_le_bytes([f0, f1, f2, f3]), u32::from_le_bytes([t0, t1, t2, t3]));
        let (body, more) = more.split_at(more.len().min(usize::from(u16::from_le_bytes([l0, l1]))));
        let kind = kind % fabric::FRAME_KINDS as u8;
        if wire.hear(kind, u64::from(lane), from as usize, to as usize, body.to_vec()).is_err() {
            break;
        }
        (rest, taken) = (more, true);
    }
    drop((wire, ticket, seats, guard));
    taken
}

/// The books of a member that counts nothing.
struct NoBooks;

impl Host for NoBooks {
    type Part = Vec<u8>;
    fn cast(&mut self, dataflow: u64) -> Option<Vec<u8>> {
        (dataflow == 0).then(Vec::new)
    }
    fn absorb(&mut self, _: u64, part: &Vec<u8>) -> bool {
        part.len() < 3
    }
    fn snapshot(&mut self, _: u64) -> Vec<u8> {
        Vec::new()
    }
    fn begin(&mut self, _: u64, snapshot: &Vec<u8>) -> bool {
        snapshot.len() < 3
    }
    fn grant(&mut self, _: u64) -> Option<Vec<u8>> {
        Some(vec![1])
    }
    fn hand_over(&mut self, _: u64) -> Option<Vec<u8>> {
        Some(vec![2])
    }
    fn take(&mut self, _: u64, _: &Vec<u8>) {}
}

/// What a member of a run is told by others, as a founder or, where the first byte is odd, as one that joins: sender, lane and message of each.
pub fn members(data: &[u8]) -> bool {
    type Said = Vec<(u32, Lane, MemberMessage<Vec<u8>>)>;
    let Some((joins, rest)) = sealed(data) else { return false };
    let Ok(said) = decode_serde::<Said>(rest) else { return false };
    let mut out = Vec::new();
    encode_serde(&said, &mut out);
    assert_eq!(decode_serde::<Said>(&out).as_ref(), Ok(&said), "what was read can be written and read");
    let limits = penstock_members::Limits { join: 3, serve: 2 };
    let (me, mut member) = match joins {
        true => (2, Member::joiner(2, None, limits)),
        false => (0, Member::founder(0, 2, limits)),
    };
    (0..2).for_each(|dataflow| member.open(dataflow));
    // Up to which id there is a place in the table of routes.
    let mut known = member.list().next;
    for (now, (from, lane, message)) in (1..).zip(said) {
        let from = from as usize;
        if from == me {
            continue;
        }
        let went = member.accept(from, lane, message, &mut NoBooks).and_then(|()| member.tick(now, &mut NoBooks));
        let outputs = member.outputs();
        for output in &outputs {
            if let Output::Adopted(list) = output {
                assert_eq!(list.check(), Ok(()));
                known = known.max(list.next);
            }
        }
        for output in outputs {
            if let Output::Send { to, .. } = output {
                assert!(to < known && to != me, "worker {to} is told something, and {known} were ever admitted");
            }
        }
        if went.is_err() || member.is_over() {
            break;
        }
        let _ = member.drained(&mut NoBooks);
    }
    let _ = member.remembers();
    true
}

/// What an operator of a joiner learns of a peer: how rows are routed.
pub fn lesson(data: &[u8]) -> bool {
    penstock_bins::fuzz_lesson(data)
}

/// Claims, manifests, notes of what was shown, and their names.
pub fn manifest(data: &[u8]) -> bool {
    let Some((seal, rest)) = sealed(data) else { return false };
    let bytes = match seal {
        true => {
            let mut bytes = b"penstock\x01\x00".to_vec();
            bytes.extend_from_slice(rest);
            bytes.extend_from_slice(&(rest.len() as u64).to_le_bytes());
            let crc = crc32fast::hash(&bytes);
            bytes.extend_from_slice(&crc.to_le_bytes());
            bytes
        }
        false => rest.to_vec(),
    };
    let mut contents = Contents::default();
    let name = std::str::from_utf8(&rest[..rest.len().min(128)]).unwrap_or(".");
    let kinds = ["", "data-", "claim-", "manifest-", "shown-"];
    for name in kinds.map(|kind| format!("{kind}{name}")) {
        let name = name.as_str();
        let _ = Named::parse(name);
        contents.add(name, bytes.len() as u64, &bytes);
    }
    let claim = decode::<Claim>(&bytes);
    if let Ok(claim) = &claim {
        assert_eq!(decode::<Claim>(&encode(claim)).as_ref(), Ok(claim));
        contents.add(&Claim::name(claim.number), bytes.len() as u64, &bytes);
    }
    let manifest = decode::<Manifest>(&bytes);
    if let Ok(manifest) = &manifest {
        assert_eq!(decode::<Manifest>(&encode(manifest)).as_ref(), Ok(manifest));
        contents.add(&manifest.name(), bytes.len() as u64, &bytes);
        assert_eq!(Named::parse(&manifest.name()), Some(Named::Manifest { batch: manifest.batch }));
        assert_eq!(contents.serving(manifest.batch).map(|found| found.is_some()), Ok(true));
        let _ = manifest.plan.check(&manifest.plan);
    }
    let shown = decode::<Shown>(&bytes);
    if let Ok(shown) = &shown {
        assert_eq!(decode::<Shown>(&encode(shown)).as_ref(), Ok(shown));
        contents.add(&shown.name(), bytes.len() as u64, &bytes);
        assert_eq!(Named::parse(&shown.name()), Some(Named::Shown { batch: shown.batch }));
        assert!(contents.shown(shown.batch).is_some());
    }
    let _ = (contents.newest_claim(), contents.newest_batch());
    comes_back(&contents);
    claim.is_ok() || manifest.is_ok() || shown.is_ok()
}

/// Data files: as they are, with a right index checksum, and with chunks of any bytes.
pub fn data_file(data: &[u8]) -> bool {
    const HEAD: usize = 11;
    const TAIL: usize = 12;
    let Some((&mode, rest)) = data.split_first() else { return false };
    let mut bytes = rest.to_vec();
    match mode % 3 {
        1 if bytes.len() >= HEAD + TAIL => {
            bytes[..HEAD].copy_from_slice(b"penstock\x01\x00D");
            let at = bytes.len() - TAIL;
            let announced = u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes")) as usize;
            if announced <= at - HEAD {
                let mut crc = crc32fast::Hasher::new();
                [&bytes[..HEAD], &bytes[at - announced..at + 8]].into_iter().for_each(|part| crc.update(part));
                let crc = crc.finalize();
                bytes[at + 8..].copy_from_slice(&crc.to_le_bytes());
            }
        }
        2 => {
            let halves = rest.split_at(rest.len() / 2);
            let [low, high] = Range::ALL.split().expect("all splits");
            let segment =
                |range, base, chunk: &[u8]| Segment { operator: "o".into(), range, base, chunks: vec![chunk.to_vec()] };
            let segments =
                [segment(low, true, halves.0), segment(high, false, halves.1), segment(Range::ALL, false, rest)];
            bytes = write(segments.into_iter().map(Ok::<_, std::convert::Infallible>))
                .map(|piece| piece.expect("nothing fails"))
                .collect::<Vec<_>>()
                .concat();
        }
        _ => {}
    }
    let Ok(opened) = File::open("fuzzed", &bytes[..]) else { return false };
    let mut decoded = mode % 3 != 2;
    for (number, placed) in opened.segments().iter().enumerate() {
        assert!(placed.length() <= bytes.len() as u64);
        for chunk in opened.chunks(number).map_while(Result::ok) {
            let Ok(chunk) = Chunk::parse(&chunk) else { continue };
            let entries: Vec<Entry<'_>> = chunk.entries().map_while(Result::ok).collect();
            decoded |= !entries.is_empty();
            let whole = chunk.entries().all(|entry| entry.is_ok());
            assert_eq!(chunk.filtered(|_| true).is_ok(), whole);
            let _ = (chunk.check(placed.range), chunk.filtered(|hash| hash & 1 == 0));
        }
    }
    let files = [opened, File::open("again", &bytes[..]).expect("it opened before")];
    for (operator, range) in ranges(&files) {
        let _ = select(&files, &operator, range).take_while(Result::is_ok).count();
        let _ = select(&files, &operator, Range::ALL).take_while(Result::is_ok).count();
    }
    let _ = merge(&files).take_while(Result::is_ok).count();
    decoded
}

/// What operators keep, of which kinds: as manifests have them.
const KEPT: [&str; 10] = [
    include_str!("../data/kept-0.json"),
    include_str!("../data/kept-1.json"),
    include_str!("../data/kept-2.json"),
    include_str!("../data/kept-3.json"),
    include_str!("../data/kept-4.json"),
    include_str!("../data/kept-5.json"),
    // Sketches and the like; sessions; distinct rows in windows; a join.
    include_str!("../data/kept-6.json"),
    include_str!("../data/kept-7.json"),
    include_str!("../data/kept-8.json"),
    include_str!("../data/kept-9.json"),
];

/// Chunks of state: which operator, then two chunks, of which the first is so long.
pub fn state(data: &[u8]) -> bool {
    let Some((&[which, length], rest)) = data.split_first_chunk() else { return false };
    let kept = Kept::from_json(KEPT[usize::from(which) % KEPT.len()]).expect("a golden one");
    let (first, second) = rest.split_at(rest.len().min(usize::from(length) * 16));
    let chunks = [first, second].into_iter().filter(|chunk| !chunk.is_empty());
    kept.rows(chunks.map(|chunk| Ok(chunk.to_vec())))
        .is_ok_and(|blocks| blocks.iter().any(|block| block.num_rows() > 0))
}

/// Plans, and what manifests say of state, in JSON.
pub fn plan(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else { return false };
    if let Ok(kept) = Kept::from_json(text) {
        let _ = (kept.types(), kept.schema(), kept.rows(std::iter::empty()));
        written(&kept);
        return true;
    }
    let Ok(plan) = Plan::from_json(text) else { return false };
    let _ = plan.explain();
    for spec in plan.keyed() {
        written(&spec.kept());
    }
    let again = |plan: &Plan| Plan::from_json(&plan.spec().to_json()).expect("what was written can be read");
    let once = again(&plan);
    assert_eq!(again(&once).explain(), once.explain());
    true
}

/// What was written once stays. At first Arrow drops what it does not tell apart, such as an empty time zone from none.
fn written(kept: &Kept) {
    let again = |kept: &Kept| Kept::from_json(&kept.to_json()).expect("what was written can be read");
    let once = again(kept);
    assert_eq!(again(&once), once);
}

/// Edges as text, cut into pieces anywhere.
pub fn edge_text(data: &[u8]) -> bool {
    let Some((&mode, rest)) = data.split_first() else { return false };
    let ids = || if mode & 1 == 0 { Ids::Numbers } else { Ids::Texts };
    let read = |pieces: usize| {
        let (mut text, mut edges) = (EdgeText::new("fuzzed", ids()), Vec::new());
        let mut each = |edge: penstock_graph::text::Edge<'_>| {
            edges.push(format!("{edge:?}"));
            Ok(())
        };
        let read = rest.chunks(pieces).try_for_each(|piece| text.push(piece, &mut each));
        let read = read.and_then(|()| text.finish(&mut each));
        (read.map_err(|error| error.to_string()), edges)
    };
    let (whole, edges) = read(rest.len().max(1));
    assert_eq!(read(usize::from(mode >> 1) + 1), (whole.clone(), edges.clone()), "where it is cut makes no difference");
    whole.is_ok() && !edges.is_empty()
}

/// Index files of graphs.
pub fn graph_file(data: &[u8]) -> bool {
    const HEAD: usize = 24;
    let Some((seal, rest)) = sealed(data) else { return false };
    let mut bytes = rest.to_vec();
    if seal && bytes.len() >= HEAD + 8 {
        bytes[..8].copy_from_slice(b"PENSTKGR");
        bytes[8..12].copy_from_slice(&1_u32.to_le_bytes());
        let crc = crc32fast::hash(&bytes[HEAD..]);
        bytes[12..16].copy_from_slice(&crc.to_le_bytes());
        let length = (bytes.len() - HEAD) as u64;
        bytes[16..24].copy_from_slice(&length.to_le_bytes());
    }
    let shared = std::path::Path::new("/dev/shm");
    let folder = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    let thread = std::thread::current().id();
    let path = folder.join(format!("penstock-fuzz-{}-{thread:?}", std::process::id()));
    std::fs::write(&path, &bytes).expect("a folder for a small file");
    let opened = file::open(&path);
    let decoded = match opened {
        Ok(index) => {
            search(index);
            true
        }
        Err(_) => false,
    };
    let _ = std::fs::remove_file(&path);
    decoded
}

/// Searches what a file made of a graph, but not for long: an index of few bytes has few edges.
fn search(index: Index) {
    let index = Arc::new(index);
    if index.nodes() > 1 << 12 || index.edges() > 1 << 12 {
        return;
    }
    for text in ["t(a, b) :- e(a, b)", "t(a, b, c) :- e(a, b), e(b, c), e(a, c)"] {
        let pattern = Pattern::parse(text).expect("a pattern");
        if let Ok(query) = Query::new(index.clone(), &pattern, None) {
            let stop = AtomicBool::new(false);
            let _ = Search::new(&query, Unit::whole(&query)).count(&stop);
        }
    }
}

/// Patterns of graphs as text.
pub fn pattern(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else { return false };
    match Pattern::parse(text) {
        Ok(pattern) => {
            let relations: BTreeMap<_, ()> = pattern.relations().into_iter().map(|name| (name, ())).collect();
            assert!(!relations.is_empty() && pattern.columns().count() > 0);
            true
        }
        Err(error) => {
            assert!(error.place() <= text.chars().count() + 1, "an error beyond the text");
            false
        }
    }
}
