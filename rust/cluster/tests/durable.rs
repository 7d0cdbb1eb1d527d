//! Durable state with the real engine: what epochs write is what later members read, whoever they are; and what is wrong with a file is
//! told by its name.

mod common;

use std::sync::Arc;

use common::counts::{Cluster, Memory, OPERATOR};
use common::{ask, stamp, stop};
use penstock_engine::{DataFile, Layout, Range, Ranges, Request};
use serde_json::{Value, json};

fn parts(members: usize, epoch: i64) -> Vec<Vec<(i64, i64)>> {
    let rows = |seat: i64| (0..60).map(move |row| ((row * 7 + epoch * 3) % 90, row + 1000 * seat));
    (0..members as i64).map(|seat| rows(seat).collect()).collect()
}

fn durable(members: usize, store: &Arc<Memory>, generation: u64) -> Cluster {
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
        let mut body = ask("q", Request::Load { stamp: stamp(self.generation), ranges, files });
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
