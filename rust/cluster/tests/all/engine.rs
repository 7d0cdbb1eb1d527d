//! Registry and members with the real engine: keyed counts over two members, against an oracle.

use std::sync::atomic::Ordering::SeqCst;

use crate::common::counts::{BITS, Cluster, parts};
use crate::common::{Begin, ask};
use penstock_cluster::{End, RegistryEvent};
use penstock_engine::{Layout, Range, Recut, Request};
use serde_json::{Value, json};

#[test]
fn counts_over_two_members_survive_migrations_and_generations() {
    let mut cluster = Cluster::new(2);
    let owners: Vec<u32> = (0..1 << BITS).map(|bin| bin % 4).collect();
    let started = cluster.start(0, &owners, true);
    assert_eq!(started, vec![json!({"ok": true, "answer": "Done", "keys": 0}); 2]);
    cluster.epoch(0, &parts(0));

    // Every bin moves to the other process, in two steps, while an epoch is fed.
    let moves: Vec<(u32, u32)> = (0..1 << BITS).map(|bin| (bin, (bin + 2) % 4)).collect();
    let (first, second) = moves.split_at(7);
    let call = cluster.driver.send(0, &cluster.migrate(3, &[first, second]));
    cluster.epoch(1, &parts(1));
    let moved = cluster.driver.reply(call);
    assert_eq!((&moved["ok"], &moved["report"]["moved"]), (&json!(true), &json!(16)));
    let done = &moved["answer"]["Migrated"];
    let times: Vec<(u64, u32)> = serde_json::from_value(done["times"].clone()).unwrap();
    assert!(times.len() == 2 && times.is_sorted() && times[0] != times[1] && done["refused"].is_null(), "{done}");
    cluster.epoch(2, &parts(2));
    let stats = cluster.driver.ask(1, &json!({"do": "stats", "query": "q"}));
    let group = &stats["queries"]["q"]["group"];
    // Four bins each, as before. What grows with the bins does not travel with every sample.
    assert_eq!([&group["workers"][0]["bins"], &group["workers"][1]["bins"]], [&json!([4]); 2]);
    assert_eq!(group["owners"], Value::Null);

    // Between the epochs they move back. What undoes the last epoch is kept until the driver says that it will not be undone.
    let back: Vec<(u32, u32)> = moves.iter().map(|(bin, worker)| (*bin, (worker + 2) % 4)).collect();
    let there: Vec<(u32, u32)> = moves.clone();
    for (handle, steps) in [(4, back), (5, there)] {
        let body = cluster.migrate(handle, &[&steps]);
        assert_eq!(cluster.driver.ask(0, &body)["ok"], true);
    }
    for (epoch, kept) in [(1, 16), (2, 0)] {
        let settled = cluster.driver.ask_all(&ask("q", Request::Settle { epoch }));
        assert_eq!(settled, vec![json!({"ok": true, "answer": "Done"}); 2]);
        cluster.await_originals(kept);
    }

    let owners = cluster.stop(3);
    assert_eq!(owners[0] / 2, 1, "it moved to the second process");
    let started = cluster.start(3, &owners, false);
    let keys: u64 = started.iter().map(|body| body["keys"].as_u64().unwrap()).sum();
    assert_eq!(keys, cluster.totals.len() as u64, "{started:?}");
    cluster.epoch(3, &parts(3));

    // What was counted since somebody asked in the generation before is told once.
    for ended in [&[(1, 150)][..], &[]] {
        for place in 0..2 {
            let stats = cluster.driver.ask(place, &json!({"do": "stats", "query": "q"}));
            let rows = |one: &Value| {
                let workers = one["group"]["workers"].as_array().unwrap();
                workers.iter().map(|worker| worker["rows"].as_u64().unwrap()).sum()
            };
            let told = stats["queries"]["q"]["ended"].as_array().unwrap();
            let told: Vec<(u64, u64)> =
                told.iter().map(|one| (one["generation"].as_u64().unwrap(), rows(one))).collect();
            assert_eq!(told, ended);
        }
    }
    cluster.driver.ask_all(&json!({"do": "stop"}));
    assert_eq!(cluster.driver.close(), [End::Stopped, End::Stopped]);
}

/// Bins are split between two epochs, and move part by part; a generation begins with them, and one with what there was before.
#[test]
fn generations_begin_with_bins_of_different_lengths() {
    let mut cluster = Cluster::new(2);
    let owners: Vec<u32> = (0..1 << BITS).map(|bin| bin % 4).collect();
    cluster.start(0, &owners, true);
    cluster.epoch(0, &parts(0));
    let bin = |prefix| Range::new(prefix, BITS).unwrap();
    let ranges: Vec<Range> = (0..8).map(bin).collect();
    let done = cluster.driver.ask(0, &cluster.recut(1, Recut::Split { ranges: ranges.clone(), by: 2 }));
    let told = &done["answer"]["Migrated"];
    assert_eq!((told["times"].as_array().unwrap().len(), &told["refused"]), (1, &Value::Null), "{done}");
    assert_eq!(told["times"][0][0], 1, "before the next epoch");
    assert_eq!(done["report"]["moved"], 8);
    cluster.epoch(1, &parts(1));
    // Again: they are split already, and nothing changes.
    let refused = cluster.driver.ask(0, &cluster.recut(2, Recut::Split { ranges: ranges[..1].to_vec(), by: 1 }));
    assert!(refused["answer"]["Migrated"]["refused"]["message"].as_str().unwrap().contains("is split"), "{refused}");
    let refused = cluster.driver.ask(0, &cluster.recut(3, Recut::Merge { ranges: vec![Range::ALL] }));
    assert!(
        refused["answer"]["Migrated"]["refused"]["message"].as_str().unwrap().contains("no range 0/0"),
        "{refused}"
    );

    let stats = cluster.driver.ask(0, &json!({"do": "stats", "query": "q", "loads": true}));
    let loads = &stats["queries"]["q"]["loads"];
    let steps = loads["steps"].as_array().unwrap();
    assert_eq!((steps.len(), steps[0]["rows"].as_array().unwrap().len()), (1, 16), "{loads}");
    assert!(!steps[0]["part_rows"].as_object().unwrap().is_empty(), "{loads}");

    // What is here is what the epoch ended with: parts of the first half, the other bins whole.
    let held = cluster.inventories(2);
    let layout = |held: Vec<Vec<Range>>| {
        let owned = |(process, held): (usize, Vec<Range>)| {
            held.into_iter().map(move |range| (range, 2 * process as u32 + range.prefix() % 2))
        };
        Layout::new(held.into_iter().enumerate().flat_map(owned).collect()).unwrap()
    };
    let mixed = layout(held);
    assert_eq!((mixed.ranges().len(), mixed.within(bin(3)).len(), mixed.within(bin(9)).len()), (40, 4, 1));
    let started = cluster.start_with(2, BITS, &mixed, false);
    let keys: u64 = started.iter().map(|body| body["keys"].as_u64().unwrap()).sum();
    assert_eq!(keys, cluster.totals.len() as u64, "{started:?}");
    cluster.epoch(2, &parts(2));

    // Parts come together and are one bin again, before an epoch that breaks off: both are held, and one will do.
    let steps = mixed.within(bin(3)).iter().map(|(part, _)| (*part, 1)).collect();
    let stamp = crate::common::stamp(cluster.generation);
    let together =
        Request::Migrate { stamp, handle: 4, steps: vec![steps], max_pause_ms: None, drains: false, at_epoch: None };
    assert_eq!(cluster.driver.ask(0, &ask("q", together))["ok"], true);
    let merged = cluster.driver.ask(0, &cluster.recut(5, Recut::Merge { ranges: vec![bin(3)] }));
    assert_eq!(merged["answer"]["Migrated"]["refused"], Value::Null, "{merged}");
    let mut held = cluster.inventories(3);
    assert!(held[0].contains(&bin(3)), "{held:?}");
    assert!(held.iter().flatten().any(|range| bin(3).holds(*range) && range.length() > BITS), "{held:?}");
    held.iter_mut().for_each(|some| some.retain(|range| *range == bin(3) || !bin(3).holds(*range)));
    let started = cluster.start_with(3, BITS, &layout(held), false);
    assert!(started.iter().all(|body| body["ok"] == true), "{started:?}");
    cluster.epoch(3, &parts(3));
    cluster.driver.close();
}

#[test]
fn an_epoch_in_which_the_user_raised_runs_again_from_its_beginning() {
    let mut cluster = Cluster::new(2);
    let owners: Vec<u32> = (0..1 << BITS).map(|bin| bin % 4).collect();
    cluster.start(0, &owners, true);
    cluster.epoch(0, &parts(0));
    cluster.poison.store(1049, SeqCst);
    cluster.feed(1, &parts(1));
    let calls = cluster.release(1, &parts(1));
    let kept =
        cluster.driver.await_event(|event| matches!(event, RegistryEvent::Reply { call, .. } if *call == calls[1]));
    let RegistryEvent::Reply { body, attachment, .. } = kept else { unreachable!("matched") };
    let error = &body["error"];
    assert_eq!(error["kind"], "user_function", "{body}");
    assert_eq!((&error["step"], &error["line"]), (&json!("through"), &json!(12)));
    assert_eq!(attachment, b"it is poison");
    let other = cluster.driver.reply(calls[0]);
    assert!(other["error"]["message"].as_str().unwrap().contains("it is poison"), "{other}");

    cluster.poison.store(i64::MIN, SeqCst);
    let owners = cluster.stop(1);
    cluster.start(1, &owners, false);
    // The rows are staged still.
    for call in cluster.release(1, &parts(1)) {
        let body = cluster.driver.reply(call);
        assert_eq!(body["ok"], true, "{body}");
    }
    cluster.check(1, &parts(1));
    cluster.epoch(2, &parts(2));
    cluster.driver.close();
}

#[test]
fn what_cannot_start_says_why() {
    let mut cluster = Cluster::new(1);
    let refused = cluster.start(0, &[0, 9], true);
    assert_eq!(refused[0]["error"]["kind"], "protocol", "{refused:?}");
    let body = cluster.driver.start_body("r", &[0], 0, &Begin::plan(json!({"version": 99})));
    let answer = cluster.driver.ask(0, &body);
    assert_eq!(answer["error"]["kind"], "plan", "{answer}");
    let mut other = cluster.driver.start_body("r", &[0], 0, &Begin::default());
    other["plan"] = cluster.plan();
    let answer = cluster.driver.send_with(0, &other, b"through");
    let answer = cluster.driver.reply(answer);
    assert!(answer["error"]["message"].as_str().unwrap().contains("operator echo"), "{answer}");
    let started = cluster.start(0, &[0; 16], true);
    assert_eq!(started[0]["ok"], true, "{started:?}");
    cluster.driver.close();
}

/// A member that never held a bin of the query is refused the bins that it is to go on with, and does not make empty ones.
#[test]
fn a_joiner_without_bins_is_told_so() {
    let mut cluster = Cluster::new(2);
    let owners: Vec<u32> = (0..1 << BITS).map(|bin| bin % 4).collect();
    let refused = cluster.start(3, &owners, false);
    for answer in &refused {
        assert_eq!(answer["error"]["kind"], "state", "{refused:?}");
        assert_eq!(answer["error"]["bins"].as_array().map(Vec::len), Some(8), "{refused:?}");
    }
    // Neither after a beginning from nothing that failed, or one whose state was forgotten.
    let refused = cluster.start(0, &[0, 9], true);
    assert_eq!(refused[0]["error"]["kind"], "protocol", "{refused:?}");
    cluster.start(0, &owners, true);
    let answers = cluster.driver.ask_all(&ask("q", Request::Conclude));
    assert!(answers.iter().all(|answer| answer["ok"] == true), "{answers:?}");
    let refused = cluster.start(0, &owners, false);
    assert_eq!(refused[1]["error"]["kind"], "state", "{refused:?}");
    cluster.start(0, &owners, true);
    cluster.epoch(0, &parts(0));
    cluster.driver.close();
}
