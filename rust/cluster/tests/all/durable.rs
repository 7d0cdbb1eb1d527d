//! Durable state with the real engine: what epochs write is what later members read, whoever they are; and what is wrong with a file is
//! told by its name.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use crate::common::counts::{Cluster, Memory, OPERATOR};
use crate::common::{ask, kind, stamp, stop};
use penstock_cluster::Segment;
use penstock_engine::{Claim, DataFile, Layout, Range, Ranges, Request, encode};
use penstock_files::{ChunkWriter, Entry, File, write};
use serde_json::{Value, json};

fn parts(members: usize, epoch: i64) -> Vec<Vec<(i64, i64)>> {
    let rows = |seat: i64| (0..60).map(move |row| ((row * 7 + epoch * 3) % 90, row + 1000 * seat));
    (0..members as i64).map(|seat| rows(seat).collect()).collect()
}

fn claim() -> Claim {
    Claim { number: 1, nonce: 7, registry: "h:1".into(), from: None }
}

fn durable(members: usize, store: &Arc<Memory>, generation: u64) -> Cluster {
    store.files.lock().unwrap().insert(Claim::name(1), encode(&claim()));
    let mut cluster = Cluster::with(members, store.clone());
    (cluster.checkpoint, cluster.generation) = (Some("memory".into()), generation);
    cluster
}

fn even(members: u32, bits: u8) -> Vec<u32> {
    Layout::even(bits, members * 2).ranges().iter().map(|(_, owner)| *owner).collect()
}

fn files(answer: &Value) -> Vec<DataFile> {
    serde_json::from_value(answer["answer"]["Written"].clone()).unwrap_or_else(|_| panic!("{answer}"))
}

impl Cluster {
    fn write(&mut self, epoch: u64) -> Vec<DataFile> {
        let body = ask("q", Request::Write { stamp: stamp(self.generation), epoch });
        self.driver.ask_all(&body).iter().flat_map(files).collect()
    }

    fn load_body(&self, ranges: Vec<Range>, files: &[DataFile]) -> Value {
        let ranges = Ranges::from([(OPERATOR.to_owned(), ranges)]);
        let files = files.to_vec();
        let mut body = ask("q", Request::Load { stamp: stamp(self.generation), claim: claim(), ranges, files });
        (body["plan"], body["checkpoint"]) = (self.plan(), json!("memory"));
        body
    }

    fn load(&mut self, seat: usize, ranges: Vec<Range>, files: &[DataFile]) -> Value {
        let call = self.driver.send_with(seat, &self.load_body(ranges, files), b"through");
        self.driver.reply(call)
    }

    /// Members that have nothing load what they will own, and begin.
    fn restore(&mut self, epoch: u64, owners: &[u32], files: &[DataFile]) {
        self.generation += 1;
        let begins = stop("q", self.generation, epoch);
        for answer in self.driver.ask_all(&begins) {
            assert_eq!(answer["answer"]["Inventory"], json!({}), "{answer}");
        }
        let bits = owners.len().ilog2() as u8;
        for seat in self.seats() {
            let mine = (0..).zip(owners).filter(|(_, owner)| **owner as usize / 2 == seat);
            let ranges = mine.map(|(bin, _)| Range::new(bin, bits).unwrap()).collect();
            let answer = self.load(seat, ranges, files);
            assert_eq!(answer, json!({"ok": true, "answer": "Done"}));
        }
        for answer in self.start(epoch, owners, false) {
            assert_eq!(answer["ok"], true, "{answer}");
        }
    }

    fn merge_body(&self, files: &[DataFile]) -> Value {
        let mut body = ask("q", Request::Merge { stamp: stamp(self.generation), files: files.to_vec() });
        body["checkpoint"] = json!("memory");
        body
    }
}

/// Two members run three epochs, of which two say everything; others go on where they were.
#[test]
fn what_was_written_is_read_by_any_number_of_members() {
    let store = Arc::<Memory>::default();
    let mut first = durable(2, &store, 0);
    first.start(0, &even(2, 4), true);
    let mut chain = Vec::new();
    for epoch in 0..3 {
        first.epoch(epoch, &parts(2, epoch as i64));
        let written = first.write(epoch);
        assert_eq!(written.len(), 2, "one of each member");
        for file in &written {
            assert_eq!((file.epoch, file.generation), (epoch, 1));
            assert!(file.name.starts_with(&format!("data-{:020}-{epoch:020}-", 1)), "{}", file.name);
            let bytes = store.files.lock().unwrap()[&file.name].clone();
            assert_eq!((file.length, file.checksum), (bytes.len() as u64, crc32fast::hash(&bytes)));
        }
        chain.extend(written);
    }
    // An epoch without rows changes nothing.
    first.epoch(3, &[vec![], vec![]]);
    assert_eq!(first.write(3), []);
    let merge = first.merge_body(&chain);
    let [merged] = <[DataFile; 1]>::try_from(files(&first.driver.ask(1, &merge))).unwrap();
    assert_eq!((merged.epoch, merged.generation), (2, 1));
    let totals = first.totals.clone();
    first.driver.close();

    for (members, bits) in [(1, 0), (3, 3), (2, 6)] {
        for files in [chain.clone(), vec![merged.clone()]] {
            let mut next = durable(members, &store, 1);
            next.totals = totals.clone();
            next.restore(4, &even(members as u32, bits), &files);
            next.epoch(4, &parts(members, 4));
            // What was loaded is no change: only the keys of the epoch are written, and they join the chain.
            let delta = next.write(4);
            let (touched, all) = (delta.iter().map(|file| file.length).sum::<u64>(), merged.length);
            assert!(touched < all, "{touched} bytes of {all}");
            let longer = [files, delta].concat();
            let totals = next.totals.clone();
            next.driver.close();
            let mut last = durable(1, &store, 2);
            last.totals = totals;
            last.restore(5, &even(1, 4), &longer);
            last.epoch(5, &parts(1, 5));
            last.driver.close();
        }
    }
}

/// One member with four bins that has run and written an epoch: its file.
fn written(store: &Arc<Memory>) -> (Cluster, DataFile) {
    let mut cluster = durable(1, store, 0);
    cluster.start(0, &even(1, 2), true);
    cluster.epoch(0, &parts(1, 0));
    let [file] = <[DataFile; 1]>::try_from(cluster.write(0)).unwrap();
    (cluster, file)
}

fn message(answer: &Value) -> &str {
    answer["error"]["message"].as_str().unwrap_or_else(|| panic!("no error: {answer}"))
}

fn all(bits: u8) -> Vec<Range> {
    (0..1 << bits).map(|bin| Range::new(bin, bits).unwrap()).collect()
}

/// A file that nobody of ours has written.
fn made(store: &Memory, name: &str, operator: &str, shape: &[u8]) -> DataFile {
    let mut chunk = ChunkWriter::new(shape);
    chunk.push(Entry::Put { hash: 7, key: b"k", value: b"v" });
    let segment = Segment { operator: operator.into(), range: Range::ALL, base: true, chunks: vec![chunk.finish()] };
    let mut writing = write([Ok::<_, std::convert::Infallible>(segment)]);
    let bytes = writing.by_ref().flat_map(Result::unwrap).collect::<Vec<u8>>();
    let summary = writing.summary().unwrap();
    store.files.lock().unwrap().insert(name.into(), bytes);
    DataFile { name: name.into(), length: summary.length, checksum: summary.checksum, epoch: 0, generation: 1 }
}

#[test]
fn a_file_that_is_not_what_the_manifest_says_is_named() {
    let store = Arc::<Memory>::default();
    let (mut cluster, file) = written(&store);
    cluster.generation += 1;
    cluster.driver.ask(0, &stop("q", cluster.generation, 1));
    let bytes = store.files.lock().unwrap()[&file.name].clone();
    let length = bytes.len();
    let flipped = |at: usize| {
        let mut bytes = bytes.clone();
        bytes[at] ^= 1;
        bytes
    };
    let wrong = [
        ("is not in the checkpoint", None),
        ("bytes of tail", Some(bytes[..length - 1].to_vec())),
        ("bytes of tail", Some([&bytes[..], b"x"].concat())),
        ("bytes of head", Some(Vec::new())),
        ("checksum", Some(flipped(20))),
        ("checksum", Some(flipped(length - 20))),
        ("is no data file", Some(flipped(0))),
    ];
    for (says, bytes) in wrong {
        match bytes {
            Some(bytes) => _ = store.files.lock().unwrap().insert(file.name.clone(), bytes),
            None => _ = store.files.lock().unwrap().remove(&file.name),
        }
        let merge = cluster.merge_body(std::slice::from_ref(&file));
        for answer in [cluster.load(0, all(2), std::slice::from_ref(&file)), cluster.driver.ask(0, &merge)] {
            assert_eq!((kind(&answer), &answer["error"]["why"]), ("damaged", &json!("Damaged")), "{says}: {answer}");
            let (name, reason) = message(&answer).split_once(' ').unwrap();
            assert_eq!(name, file.name);
            assert!(reason.contains(says), "{says}: {reason}");
        }
    }
    // One of the same length that is whole, but another.
    let other = made(&store, "other", OPERATOR, b"shape");
    let taken = DataFile { name: "other".into(), checksum: other.checksum ^ 1, ..other.clone() };
    let answer = cluster.load(0, all(2), &[taken]);
    assert!(message(&answer).starts_with("other has checksum"), "{answer}");
    // One that the state does not take.
    let answer = cluster.load(0, all(2), &[other]);
    assert_eq!(kind(&answer), "damaged", "{answer}");
    assert!(message(&answer).starts_with("other has state of agg that is not taken"), "{answer}");
    // Nothing of all that was loaded, and the right bytes are.
    store.files.lock().unwrap().insert(file.name.clone(), bytes.clone());
    assert_eq!(cluster.load(0, all(2), &[file])["ok"], true);
    cluster.driver.close();
}

#[test]
fn a_store_that_fails_is_asked_again() {
    let store = Arc::<Memory>::default();
    let (mut cluster, file) = written(&store);
    let again = ask("q", Request::Write { stamp: stamp(1), epoch: 0 });
    let merge = cluster.merge_body(std::slice::from_ref(&file));
    for body in [&again, &merge] {
        store.failing.store(1, SeqCst);
        let failed = cluster.driver.ask(0, body);
        assert_eq!((kind(&failed), &failed["error"]["why"]), ("store", &json!("Store")), "{failed}");
        assert!(message(&failed).contains("the store is down"), "{failed}");
        assert_eq!(files(&cluster.driver.ask(0, body)).len(), 1);
        // What panics answers, and harms no other.
        store.panics.store(true, SeqCst);
        let failed = cluster.driver.ask(0, body);
        assert_eq!(kind(&failed), "internal", "{failed}");
    }
    // A write that is asked for again has another name, and the same bytes.
    let [second] = <[DataFile; 1]>::try_from(files(&cluster.driver.ask(0, &again))).unwrap();
    assert_ne!(second.name, file.name);
    assert_eq!((second.length, second.checksum), (file.length, file.checksum));
    cluster.generation += 1;
    cluster.driver.ask(0, &stop("q", 2, 1));
    store.failing.store(1, SeqCst);
    let failed = cluster.load(0, all(2), std::slice::from_ref(&file));
    assert_eq!(kind(&failed), "store", "{failed}");
    assert_eq!(cluster.load(0, all(2), &[file])["ok"], true);
    cluster.driver.close();
}

#[test]
fn what_was_loaded_for_a_generation_that_has_ended_is_gone() {
    let store = Arc::<Memory>::default();
    let (first, file) = written(&store);
    let totals = first.totals.clone();
    first.driver.close();
    let mut cluster = durable(1, &store, 2);
    cluster.totals = totals;
    cluster.driver.ask(0, &stop("q", 2, 1));
    assert_eq!(cluster.load(0, all(2), std::slice::from_ref(&file))["ok"], true);
    let refused = |cluster: &mut Cluster| {
        let refused = cluster.start(1, &even(1, 2), false);
        assert_eq!((kind(&refused[0]), &refused[0]["error"]["bins"]), ("state", &json!([0, 1, 2, 3])), "{refused:?}");
    };
    cluster.generation = 3;
    assert_eq!(cluster.driver.ask(0, &stop("q", 3, 1))["answer"]["Inventory"], json!({}));
    refused(&mut cluster);
    // What is still being read when its generation ends does not become state either.
    let slow = store.busy.lock().unwrap();
    let body = cluster.load_body(all(2), std::slice::from_ref(&file));
    let call = cluster.driver.send_with(0, &body, b"through");
    cluster.generation = 4;
    assert_eq!(cluster.driver.ask(0, &stop("q", 4, 1))["ok"], true);
    drop(slow);
    let ended = cluster.driver.reply(call);
    assert_eq!(kind(&ended), "stale_generation", "{ended}");
    refused(&mut cluster);
    let older = DataFile { ..file.clone() };
    cluster.generation = 3;
    let stale = cluster.load(0, all(2), &[older]);
    assert_eq!(kind(&stale), "stale_generation", "{stale}");
    cluster.restore(1, &even(1, 2), &[file]);
    cluster.driver.close();
}

#[test]
fn records_are_of_the_last_epoch_of_the_present_generation() {
    let store = Arc::<Memory>::default();
    let (mut cluster, _) = written(&store);
    let record = |generation, epoch| ask("q", Request::Write { stamp: stamp(generation), epoch });
    cluster.epoch(1, &parts(1, 1));
    for (generation, epoch) in [(1, 0), (1, 2), (0, 1)] {
        let answer = cluster.driver.ask(0, &record(generation, epoch));
        assert_eq!(kind(&answer), "stale_generation", "{answer}");
    }
    assert_eq!(cluster.write(1).len(), 1);
    cluster.generation = 2;
    cluster.driver.ask(0, &stop("q", 2, 2));
    let answer = cluster.driver.ask(0, &record(1, 1));
    assert_eq!(kind(&answer), "stale_generation", "{answer}");
    // Without a checkpoint nothing is recorded, and whoever asks is told.
    cluster.checkpoint = None;
    let started = cluster.start(2, &even(1, 2), false);
    assert_eq!(started[0]["ok"], true, "{started:?}");
    cluster.epoch(2, &parts(1, 2));
    let answer = cluster.driver.ask(0, &record(2, 2));
    assert_eq!((kind(&answer), &answer["error"]["why"]), ("not_durable", &json!("Data")), "{answer}");
    cluster.driver.close();
}

#[test]
fn operators_that_files_and_flow_do_not_share() {
    let store = Arc::<Memory>::default();
    // The flow has one that no file has: it begins empty. The file has one that the flow has not any more.
    let gone = made(&store, "gone", "step 9 (agg)", b"of old");
    let mut cluster = durable(1, &store, 1);
    cluster.restore(1, &even(1, 2), std::slice::from_ref(&gone));
    cluster.epoch(1, &parts(1, 0));
    let chain = [vec![gone], cluster.write(1)].concat();
    let merge = cluster.merge_body(&chain);
    let [merged] = <[DataFile; 1]>::try_from(files(&cluster.driver.ask(0, &merge))).unwrap();
    let bytes = store.files.lock().unwrap()[&merged.name].clone();
    let file = File::open("merged", bytes).unwrap();
    let mut operators: Vec<&str> = file.segments().iter().map(|segment| &*segment.operator).collect();
    operators.dedup();
    assert_eq!(operators, [OPERATOR, "step 9 (agg)"]);
    // One that is asked for must be of the flow.
    let ranges = Ranges::from([("step 9 (agg)".to_owned(), vec![Range::ALL])]);
    cluster.driver.ask(0, &stop("q", 3, 2));
    let mut body = ask("q", Request::Load { stamp: stamp(3), claim: claim(), ranges, files: chain });
    (body["plan"], body["checkpoint"]) = (cluster.plan(), json!("memory"));
    let call = cluster.driver.send_with(0, &body, b"through");
    let answer = cluster.driver.reply(call);
    assert_eq!(kind(&answer), "plan", "{answer}");
    cluster.driver.close();
}

/// A member that wants one range of many reads little more than that.
#[test]
fn only_what_is_wanted_is_read() {
    let store = Arc::<Memory>::default();
    let mut cluster = durable(1, &store, 0);
    cluster.start(0, &even(1, 6), true);
    let rows: Vec<(i64, i64)> = (0..20_000).map(|row| (row, row)).collect();
    cluster.epoch(0, &[rows]);
    let [file] = <[DataFile; 1]>::try_from(cluster.write(0)).unwrap();
    cluster.generation += 1;
    cluster.driver.ask(0, &stop("q", 2, 1));
    assert_eq!(cluster.load(0, vec![Range::new(9, 6).unwrap()], std::slice::from_ref(&file))["ok"], true);
    let read = store.read.lock().unwrap()[&file.name] as u64;
    assert!(read * 20 < file.length, "{read} bytes of {}", file.length);
    cluster.driver.close();
}

/// What a store is asked for, not what lies in it, is what a far one costs.
#[test]
fn a_restore_of_many_files_asks_a_store_for_little_more_than_the_files() {
    let store = Arc::<Memory>::default();
    let mut cluster = durable(1, &store, 0);
    cluster.start(0, &even(1, 8), true);
    let mut files = Vec::new();
    for epoch in 0..20 {
        // Every key once, then one of a hundred.
        let rows = (0..100_000).filter(|row| epoch == 0 || row % 100 == epoch as i64);
        cluster.epoch(epoch, &[rows.map(|row| (row, row)).collect()]);
        files.extend(cluster.write(epoch));
    }
    let (small, large): (Vec<_>, Vec<_>) = files.iter().partition(|file| file.length <= 256 << 10);
    assert_eq!((small.len(), large.len()), (19, 1));
    cluster.generation += 1;
    cluster.driver.ask(0, &stop("q", 2, 20));
    // All bins, and every other one.
    for (step, most) in [(1, 19 + 4), (2, 19 + 5)] {
        store.reads.store(0, SeqCst);
        store.read.lock().unwrap().clear();
        let bins = (0..1 << 8).step_by(step).map(|bin| Range::new(bin, 8).unwrap());
        assert_eq!(cluster.load(0, bins.collect(), &files)["ok"], true);
        let (reads, chunks) = (store.reads.load(SeqCst), files.len() << 8);
        println!("{} files, {chunks} chunks: {reads} reads", files.len());
        // The claim is read, too; of the large file head, end and pieces of 3 MiB.
        assert!(reads <= 1 + most, "{reads} reads of {} files with {chunks} chunks", files.len());
        let read: usize = store.read.lock().unwrap().values().sum();
        let all: u64 = files.iter().map(|file| file.length).sum();
        assert!(read as u64 <= all + (64 << 10), "{read} bytes of {all}: nothing is read twice");
    }
    let merge = cluster.merge_body(&files);
    store.reads.store(0, SeqCst);
    let [merged] = <[DataFile; 1]>::try_from(self::files(&cluster.driver.ask(0, &merge))).unwrap();
    assert!(store.reads.load(SeqCst) <= 19 + 5 && merged.length > 256 << 10);
    cluster.driver.close();
}

/// A member that sees another folder than the driver begins nothing and says so; so does one where the claim is another engine's.
#[test]
fn a_checkpoint_is_one_folder_for_all() {
    let store = Arc::<Memory>::default();
    let mut cluster = durable(1, &store, 1);
    cluster.driver.ask(0, &stop("q", 2, 1));
    cluster.generation = 2;
    assert_eq!(cluster.load(0, Vec::new(), &[])["ok"], true);
    let other = Claim { nonce: 8, ..claim() };
    for (there, told) in [(Some(encode(&other)), "sees another one"), (None, "does not see it")] {
        match there {
            Some(bytes) => store.files.lock().unwrap().insert(Claim::name(1), bytes),
            None => store.files.lock().unwrap().remove(&Claim::name(1)),
        };
        let answer = cluster.load(0, Vec::new(), &[]);
        assert_eq!((kind(&answer), &answer["error"]["why"]), ("not_shared", &json!("Data")));
        assert!(answer["error"]["message"].as_str().unwrap().contains(told), "{answer}");
    }
    cluster.driver.close();
}
