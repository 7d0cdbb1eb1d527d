//! Registry, members, feeds and drains in one process, with a host that echoes.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::common::{
    self, Begin, Driver, PATIENCE, SECRET, ask, batch, keys, kind, limits, member_keys, release, schema, stamp, stop,
    values,
};
use arrow_array::RecordBatch;
use penstock_cluster::message::Which;
use penstock_cluster::session::Limits;
use penstock_cluster::{ClusterError, End, Feed, Receipt, Registry, RegistryEvent, drain};
use penstock_engine::{Claim, MemberId, Range, Request};
use serde_json::{Value, json};

fn feed(
    driver: &Driver,
    seat: usize,
    query: &str,
    place: (u64, u32, u64),
    rows: &[i64],
) -> Result<Receipt, ClusterError> {
    let (epoch, partition, attempt) = place;
    let address = &driver.members[seat].address;
    let mut feed = Feed::connect(address, &keys(), query, epoch, partition, attempt, &schema())?;
    for chunk in rows.chunks(2) {
        feed.push(&batch(chunk))?;
    }
    feed.finish()
}

fn drained(driver: &Driver, seat: usize, epoch: u64, piece: u32, which: Which) -> Vec<i64> {
    let address = &driver.members[seat].address;
    let drain = drain(address, &keys(), "q", epoch, piece, which).unwrap();
    assert_eq!(drain.schema(), schema());
    let batches: Vec<RecordBatch> = drain.map(Result::unwrap).collect();
    values(&batches)
}

fn refusal(error: ClusterError) -> String {
    match error {
        ClusterError::Refused(failure) => failure.kind,
        other => panic!("{other}"),
    }
}

#[test]
fn rows_go_in_are_released_and_come_out_until_the_epoch_is_closed() {
    let mut driver = Driver::new(2);
    let started = driver.start("q", &[0, 1], &Begin::default());
    assert_eq!(started, vec![json!({"ok": true, "answer": "Done", "keys": 0}); 2]);

    // Several connections at once, one attempt broken off, one complete attempt that does not count.
    let receipt = feed(&driver, 0, "q", (0, 0, 10), &[1, 2, 3]).unwrap();
    assert_eq!((receipt.rows, receipt.max_event_time, receipt.member), (3, Some(3), driver.members[0].id));
    let mut broken = Feed::connect(&driver.members[0].address, &keys(), "q", 0, 1, 11, &schema()).unwrap();
    broken.push(&batch(&[99; 50])).unwrap();
    drop(broken);
    feed(&driver, 0, "q", (0, 1, 12), &[98]).unwrap();
    feed(&driver, 0, "q", (0, 1, 13), &[4, -5]).unwrap();
    let empty = feed(&driver, 1, "q", (0, 2, 14), &[]).unwrap();
    assert_eq!((empty.rows, empty.max_event_time), (0, None));
    assert_eq!(refusal(feed(&driver, 0, "q", (0, 1, 13), &[4]).unwrap_err()), "staging");

    let body = driver.ask(0, &release("q", 1, 0, &[(0, 10, 3), (1, 13, 2)]));
    assert_eq!(body["answer"], json!({"Released": {"pieces": [[0, 3, 0, []], [1, 1, 1, []]]}}));
    assert_eq!(body["ok"], json!(true));
    let body = driver.ask(1, &release("q", 1, 0, &[(2, 14, 0)]));
    assert_eq!(body["answer"]["Released"]["pieces"][1], json!([1, 0, 0, []]));

    for _ in 0..2 {
        assert_eq!(drained(&driver, 0, 0, 0, Which::Rows), [1, 2, 3]);
        assert_eq!(drained(&driver, 0, 0, 1, Which::Rows), [4]);
        assert_eq!(drained(&driver, 0, 0, 1, Which::Beside), [-5]);
        assert_eq!(drained(&driver, 1, 0, 0, Which::Rows), [] as [i64; 0]);
    }
    let stats = driver.ask(0, &json!({"do": "stats", "query": null}));
    let figures = &stats["queries"]["q"];
    assert_eq!((&figures["staged_rows"], &figures["output_rows"]), (&json!(0), &json!(4)));
    assert_eq!(figures["group"]["watermark"], 7);
    assert!(stats["process"]["rss_bytes"].as_u64().unwrap() > 0);

    // The epoch is over: it cannot be fed or released again.
    assert_eq!(refusal(feed(&driver, 0, "q", (0, 5, 1), &[1]).unwrap_err()), "epoch");
    let again = driver.ask(0, &release("q", 1, 0, &[]));
    assert_eq!(kind(&again), "internal", "{again}");

    let address = driver.members[0].address.clone();
    let read = |epoch, piece| drain(&address, &keys(), "q", epoch, piece, Which::Rows);
    assert_eq!(refusal(read(1, 0).err().unwrap()), "epoch");
    assert_eq!(refusal(read(0, 2).err().unwrap()), "piece");
    driver.ask(0, &ask("q", Request::CloseEpoch { epoch: 0 }));
    assert_eq!(refusal(read(0, 0).err().unwrap()), "epoch");
    assert_eq!(drained(&driver, 1, 0, 0, Which::Rows), [] as [i64; 0], "the other still has it");

    let ends = driver.close();
    assert!(ends.iter().all(|end| matches!(end, End::RegistryLost { .. })), "{ends:?}");
}

#[test]
fn a_discarded_epoch_can_be_fed_again_and_the_end_of_input_is_infinite() {
    let mut driver = Driver::new(1);
    driver.start("q", &[0], &Begin::default());
    feed(&driver, 0, "q", (0, 0, 1), &[1]).unwrap();
    driver.ask(0, &ask("q", Request::Discard { epoch: 0 }));
    feed(&driver, 0, "q", (0, 0, 1), &[2]).unwrap();
    let mut body = release("q", 1, 0, &[(0, 1, 1)]);
    body["ask"]["Release"]["watermark"] = i64::MAX.into();
    assert_eq!(driver.ask(0, &body)["ok"], true);
    assert_eq!(drained(&driver, 0, 0, 0, Which::Rows), [2]);
    let stats = driver.ask(0, &json!({"do": "stats", "query": "q"}));
    assert_eq!(stats["queries"]["q"]["group"]["watermark"], i64::MAX);
    driver.close();
}

#[test]
fn feeds_of_other_columns_or_queries_are_refused_by_name() {
    let mut driver = Driver::new(1);
    assert_eq!(refusal(feed(&driver, 0, "q", (0, 0, 1), &[1]).unwrap_err()), "unknown_query");
    driver.start("q", &[0], &Begin::default());
    let other = RecordBatch::try_from_iter([(
        "w",
        std::sync::Arc::new(arrow_array::StringArray::from(vec!["x"; 100_000])) as _,
    )])
    .unwrap();
    let mut feed = Feed::connect(&driver.members[0].address, &keys(), "q", 0, 0, 1, &other.schema()).unwrap();
    // The refusal reaches a feed that is still pushing, sooner or later.
    let error = loop {
        if let Err(error) = feed.push(&other) {
            break error;
        }
    };
    assert_eq!(refusal(error), "schema");
    drop(feed);
    let feed = Feed::connect(&driver.members[0].address, &keys(), "q", 0, 0, 1, &other.schema()).unwrap();
    assert_eq!(refusal(feed.finish().unwrap_err()), "schema");
    assert_eq!(kind(&driver.ask(0, &release("q", 1, 0, &[(0, 1, 0)]))), "staging");
    driver.close();
}

#[test]
fn a_failed_epoch_is_answered_with_the_error_and_runs_again_after_a_rollback() {
    let mut driver = Driver::new(2);
    driver.start("q", &[0, 1], &Begin::plan(json!({"fail_epoch": 1})));
    feed(&driver, 0, "q", (0, 0, 1), &[1, 2]).unwrap();
    driver.ask(0, &release("q", 1, 0, &[(0, 1, 2)]));
    driver.ask(1, &release("q", 1, 0, &[]));
    feed(&driver, 0, "q", (1, 0, 2), &[3]).unwrap();
    let call = driver.send(0, &release("q", 1, 1, &[(0, 2, 1)]));
    let event =
        driver.await_event(|event| matches!(event, RegistryEvent::Reply { call: answered, .. } if *answered == call));
    let RegistryEvent::Reply { body, attachment, .. } = event else { unreachable!("matched") };
    assert_eq!((kind(&body), &body["error"]["line"]), ("user_function", &json!(3)));
    assert_eq!(attachment, b"pickled");
    // Everything else of this generation is refused with the same error.
    assert_eq!(kind(&driver.ask(0, &release("q", 1, 2, &[]))), "user_function");

    let here = |bins: Value| json!({"Inventory": {"echo": bins}});
    assert_eq!(driver.ask_all(&stop("q", 2, 1))[0]["answer"], here(json!([[0, 3]])));
    assert_eq!(driver.ask(0, &stop("q", 2, 0))["answer"], here(json!([])));
    let started = driver.start("q", &[0, 1], &Begin::again(2, 1));
    assert!(started.iter().all(|body| body["ok"] == true), "{started:?}");

    // The staged rows are still there; the old generation is not.
    assert_eq!(kind(&driver.ask(0, &release("q", 1, 1, &[]))), "stale_generation");
    assert_eq!(driver.ask(0, &release("q", 2, 1, &[(0, 2, 1)]))["ok"], true);
    assert_eq!(drained(&driver, 0, 1, 0, Which::Rows), [3]);
    assert_eq!(drained(&driver, 0, 0, 0, Which::Rows), [1, 2], "outputs of before survive");
    let old = driver.start("q", &[0, 1], &Begin::default());
    assert_eq!(old.iter().map(kind).collect::<Vec<_>>(), ["stale_generation"; 2]);
    driver.close();
}

#[test]
fn bins_stay_resident_between_generations_unless_they_are_dropped() {
    let mut driver = Driver::new(1);
    driver.start("q", &[0], &Begin::default());
    feed(&driver, 0, "q", (0, 0, 1), &[1, 2]).unwrap();
    driver.ask(0, &release("q", 1, 0, &[(0, 1, 2)]));
    let keys = |body: &Value| body["keys"].as_u64();
    assert_eq!(driver.ask(0, &stop("q", 2, 1))["ok"], true);
    assert_eq!(driver.ask(0, &stop("q", 2, 1))["ok"], true, "stopping twice is no error");
    assert_eq!(kind(&driver.ask(0, &release("q", 2, 1, &[]))), "stale_generation");
    assert_eq!(keys(&driver.start("q", &[0], &Begin::again(2, 1))[0]), Some(2));
    assert_eq!(kind(&driver.ask(0, &stop("q", 1, 1))), "stale_generation");
    // A start does not replace the generation that runs.
    assert_eq!(kind(&driver.start("q", &[0], &Begin::again(3, 1))[0]), "internal");
    assert_eq!(driver.ask(0, &ask("q", Request::Conclude))["ok"], true);
    assert_eq!(drained(&driver, 0, 0, 0, Which::Rows), [1, 2], "outputs stay");
    assert_eq!(keys(&driver.start("q", &[0], &Begin::again(4, 1))[0]), Some(0));
    assert_eq!(driver.ask(0, &ask("q", Request::Drop))["ok"], true);
    assert_eq!(kind(&driver.ask(0, &ask("q", Request::Drop))), "unknown_query");
    assert_eq!(driver.start("q", &[0], &Begin::default())[0]["ok"], true, "a new one of that name");
    driver.close();
}

#[test]
fn migrations_are_checked_and_answered_by_the_leader() {
    let mut driver = Driver::new(2);
    driver.start("q", &[0, 1], &Begin::default());
    let migrate = |steps: &[&[(u32, u32)]]| {
        let range = |(bin, worker): &(u32, u32)| (Range::new(*bin, 3).unwrap(), *worker);
        let steps = steps.iter().map(|step| step.iter().map(range).collect()).collect();
        ask(
            "q",
            Request::Migrate { stamp: stamp(1), handle: 5, steps, max_pause_ms: None, drains: false, at_epoch: None },
        )
    };
    let body = driver.ask(0, &migrate(&[&[(0, 3)], &[(1, 2), (2, 1)]]));
    assert_eq!(body["answer"], json!({"Migrated": {"times": [[0, 1], [0, 1]], "refused": null}}));
    assert_eq!((&body["report"]["moved"], &body["report"]["bytes"]), (&json!(3), &json!(8)));
    let mut refused =
        |seat, body: &Value| driver.ask(seat, body)["answer"]["Migrated"]["refused"]["message"].to_string();
    assert!(refused(1, &migrate(&[&[(0, 3)]])).contains("worker 0"));
    assert!(refused(0, &migrate(&[&[(0, 4)]])).contains("worker 4 of 4"));
    driver.close();
}

/// Without a record nothing is written and nothing can be read: the answer says so, and the workers go on.
#[test]
fn a_member_that_is_not_durable_says_so() {
    let mut driver = Driver::new(1);
    driver.start("q", &[0], &Begin::default());
    driver.ask(0, &release("q", 1, 0, &[]));
    let mut refused = |request| {
        let body = driver.ask(0, &ask("q", request));
        assert_eq!((kind(&body), &body["error"]["why"]), ("not_durable", &json!("Data")));
    };
    refused(Request::Write { stamp: stamp(1), epoch: 0 });
    refused(Request::Merge { stamp: stamp(1), files: vec![] });
    assert_eq!(driver.ask(0, &release("q", 1, 1, &[]))["ok"], true);
    driver.ask(0, &stop("q", 2, 2));
    let claim = Claim { number: 1, nonce: 0, registry: String::new(), from: None };
    let load = Request::Load { stamp: stamp(2), claim, ranges: Default::default(), files: vec![] };
    assert_eq!(kind(&driver.ask(0, &ask("q", load))), "not_durable");
    driver.close();
}

#[test]
fn the_state_of_a_query_that_is_dropped_does_not_wait_for_a_store_that_hangs() {
    let mut driver = Driver::new(1);
    driver.start("q", &[0], &Begin::default());
    driver.ask(0, &stop("q", 2, 0));
    let claim = Claim { number: 1, nonce: 0, registry: String::new(), from: None };
    let load = Request::Load { stamp: stamp(2), claim, ranges: Default::default(), files: vec![] };
    let mut body = ask("q", load);
    body["checkpoint"] = "hangs".into();
    driver.send(0, &body);
    assert_eq!(driver.bins(), 1);
    assert_eq!(driver.ask(0, &ask("q", Request::Drop))["ok"], true);
    common::until("its state has gone", || driver.bins() == 0);
    driver.close();
}

#[test]
fn requests_that_cannot_be_served_are_answered_by_kind() {
    let mut driver = Driver::new(1);
    let mut refused = |body: Value| kind(&driver.ask(0, &body)).to_owned();
    assert_eq!(refused(json!({"do": "dance"})), "protocol");
    assert_eq!(refused(json!("stop")), "protocol");
    assert_eq!(refused(json!({"query": "q", "ask": "Dance"})), "protocol");
    assert_eq!(refused(json!({"do": "stats", "query": "q"})), "unknown_query");
    for request in [
        Request::Drop,
        Request::Conclude,
        Request::CloseEpoch { epoch: 0 },
        Request::Settle { epoch: 0 },
        Request::Discard { epoch: 0 },
        Request::Migrate {
            stamp: stamp(0),
            handle: 0,
            steps: vec![],
            max_pause_ms: None,
            drains: false,
            at_epoch: None,
        },
        Request::CancelMigration { stamp: stamp(0), handle: 0 },
    ] {
        assert_eq!(refused(ask("q", request)), "unknown_query");
    }
    assert_eq!(refused(release("q", 1, 0, &[])), "unknown_query");
    let bad = driver.start_body("q", &[0], 1, &Begin::default());
    assert_eq!(kind(&driver.ask(0, &bad)), "protocol");
    let call = {
        let body = driver.start_body("r", &[0], 0, &Begin::plan(json!({"unloadable": true})));
        driver.send_with(0, &body, b"callables")
    };
    let reply = driver.reply(call);
    assert_eq!(kind(&reply), "plan");
    assert!(matches!(driver.registry.send(77, "{}".into(), vec![]), Err(ClusterError::UnknownMember { member: 77 })));
    driver.close();
}

#[test]
fn a_start_takes_the_program_that_was_loaded_for_it() {
    let mut driver = Driver::new(1);
    let body = driver.start_body("q", &[0], 0, &Begin::default());
    let load = json!({"do": "load", "query": "q", "plan": body["plan"]});
    let mut asked = |body: &Value, attachment: &[u8]| {
        let call = driver.send_with(0, body, attachment);
        (driver.reply(call), driver.loads.load(Relaxed))
    };
    assert_eq!(asked(&load, b"callables"), (json!({"ok": true}), 1));
    let (started, loads) = asked(&body, b"callables");
    assert_eq!((&started["answer"], loads), (&json!("Done"), 1), "it was there");
    assert_eq!(asked(&stop("q", 2, 0), &[]).0["ok"], true);
    let again = |generation: u64| {
        let mut body = body.clone();
        body["ask"]["Start"]["stamp"]["generation"] = generation.into();
        body
    };
    assert_eq!(asked(&again(2), b"callables").1, 2, "it serves one start");
    assert_eq!(asked(&load, b"callables").1, 3);
    assert_eq!(asked(&stop("q", 3, 0), &[]).0["ok"], true);
    assert_eq!(asked(&again(3), b"other callables").1, 4, "those are others");
    let unloadable = json!({"do": "load", "query": "q", "plan": {"unloadable": true}});
    assert_eq!(kind(&asked(&unloadable, b"").0), "plan");
    driver.close();
}

#[test]
fn a_stuck_query_blocks_neither_another_query_nor_figures_nor_the_end() {
    let mut driver = Driver::new(2);
    driver.start("stuck", &[0, 1], &Begin::plan(json!({"stuck_epoch": 0})));
    driver.start("q", &[0, 1], &Begin::default());
    let stuck = driver.send(0, &release("stuck", 1, 0, &[]));
    // Its thread waits for workers that do not end.
    let ending = driver.send(0, &stop("stuck", 2, 0));
    assert_eq!(kind(&driver.reply(stuck)), "stopped", "who waits for the epoch is told at once");
    for epoch in 0..3 {
        feed(&driver, 0, "q", (epoch, 0, 1), &[epoch as i64]).unwrap();
        assert_eq!(driver.ask(0, &release("q", 1, epoch, &[(0, 1, 1)]))["ok"], true);
        assert_eq!(drained(&driver, 0, epoch, 0, Which::Rows), [epoch as i64]);
    }
    let stats = driver.ask(0, &json!({"do": "stats", "query": null}));
    assert_eq!(stats["queries"]["stuck"], json!({"busy": true}));
    assert_eq!(stats["queries"]["q"]["completed"], 2);

    let stop = driver.send(0, &json!({"do": "stop"}));
    assert_eq!(driver.reply(stop)["ok"], true);
    let lost = driver.await_event(|event| matches!(event, RegistryEvent::Lost { .. }));
    let RegistryEvent::Lost { member, calls, .. } = lost else { unreachable!("matched") };
    assert_eq!((member, calls), (driver.members[0].id, vec![ending]));
    let seat = driver.members.remove(0);
    assert_eq!(seat.thread.join().unwrap(), End::Stopped);
    driver.close();
}

/// As where the functions of the next generation load, or workers do not end: requests for figures stand in line meanwhile.
#[test]
fn what_a_busy_query_has_to_tell_is_told_to_who_asks_when_it_is_free() {
    let mut driver = Driver::new(1);
    driver.start("q", &[0], &Begin::plan(json!({"stuck_epoch": 0})));
    driver.send(0, &release("q", 1, 0, &[]));
    let ending = driver.send(0, &stop("q", 2, 0));
    let figures = json!({"do": "stats", "query": "q"});
    assert_eq!(driver.ask(0, &figures)["queries"]["q"], json!({"busy": true}));
    driver.gate.open();
    assert_eq!(driver.reply(ending)["ok"], true);
    let mut ended = || driver.ask(0, &figures)["queries"]["q"]["ended"].clone();
    assert_eq!(ended()[0]["generation"], 1, "it was told to nobody");
    assert_eq!(ended(), json!([]), "once");
    driver.close();
}

#[test]
fn a_lost_member_is_reported_and_its_peers_fail_then_go_on_without_it() {
    let mut driver = Driver::new(2);
    driver.start("q", &[0, 1], &Begin::default());
    let gone = driver.members.remove(0);
    *gone.stop.lock().unwrap() = true;
    assert_eq!(gone.thread.join().unwrap(), End::Interrupted);
    let id = gone.id;
    driver.await_event(|event| matches!(event, RegistryEvent::Lost { member, .. } if *member == id));
    let message = driver.await_event(|event| matches!(event, RegistryEvent::Message { .. }));
    let RegistryEvent::Message { body, .. } = message else { unreachable!("matched") };
    assert_eq!((kind(&body), &body["query"], &body["stamp"]["generation"]), ("peer_lost", &json!("q"), &json!(1)));
    assert_eq!(body["error"]["why"], "Echo");
    assert_eq!(kind(&driver.ask(0, &release("q", 1, 0, &[]))), "peer_lost");
    assert!(driver.registry.send(id, "{}".into(), vec![]).is_err());

    // A replacement gets a new id, and the next generation runs on both.
    let place = driver.join();
    assert!(driver.members[place].id > driver.members[0].id.max(id));
    assert_eq!(driver.ask(0, &stop("q", 2, 0))["ok"], true);
    let started = driver.start("q", &[0, place], &Begin::again(2, 0));
    assert!(started.iter().all(|body| body["ok"] == true), "{started:?}");
    assert_eq!(driver.ask(place, &release("q", 2, 0, &[]))["ok"], true);
    let members: Vec<u64> = driver.registry.members().iter().map(|info| info.member).collect();
    assert_eq!(members, [driver.members[0].id, driver.members[1].id]);
    assert_eq!(driver.registry.members()[1].info["address"], driver.members[1].address);
    driver.close();
}

#[test]
fn a_start_whose_peer_never_comes_can_be_given_up_and_one_that_is_away_is_named() {
    let mut driver = Driver::new(2);
    // Process 1 waits for process 0, which is never asked to start.
    let body = driver.start_body("q", &[0, 1], 1, &Begin::default());
    let call = driver.send(1, &body);
    let stopped = driver.send(1, &stop("q", 2, 0));
    assert_eq!(kind(&driver.reply(call)), "stale_generation");
    assert_eq!(driver.reply(stopped)["ok"], true);

    let mut body = driver.start_body("r", &[0, 1], 0, &Begin::default());
    body["peers"][1]["address"] = "127.0.0.1:1".into();
    let reply = driver.ask(0, &body);
    assert_eq!((kind(&reply), &reply["error"]["process"]), ("peer_lost", &json!(1)));
    // An address that belongs to another member is noticed.
    body["peers"][1] = json!({"id": 4242, "address": driver.members[1].address});
    body["ask"]["Start"]["members"][1] = serde_json::to_value(MemberId(4242)).unwrap();
    assert_eq!(kind(&driver.ask(0, &body)), "peer_lost");
    driver.close();
}

/// As where functions load for longer than a peer waits: each try began with that, and none came in time.
#[test]
fn what_was_loaded_for_a_start_that_comes_to_nothing_serves_the_next() {
    let mut driver = Driver::new(2);
    // Process 1 waits for process 0, which is not asked to start.
    let given_up = |driver: &mut Driver, query, ending: &Value| {
        let body = driver.start_body(query, &[0, 1], 1, &Begin::default());
        let (call, ending) = (driver.send(1, &body), driver.send(1, ending));
        assert_eq!(kind(&driver.reply(call)), "stale_generation");
        assert_eq!(driver.reply(ending)["ok"], true);
        driver.loads.load(Relaxed)
    };
    assert_eq!(given_up(&mut driver, "q", &stop("q", 2, 0)), 1);
    let started = driver.start("q", &[0, 1], &Begin { generation: 2, ..Begin::default() });
    assert!(started.iter().all(|body| body["ok"] == true), "{started:?}");
    assert_eq!(driver.loads.load(Relaxed), 2, "process 0 has loaded it");
    // It goes with its query.
    assert_eq!(given_up(&mut driver, "r", &ask("r", Request::Drop)), 3);
    assert_eq!(driver.start("r", &[1], &Begin::default())[0]["ok"], true);
    assert_eq!(driver.loads.load(Relaxed), 4);
    driver.close();
}

#[test]
fn a_connection_may_come_before_the_start_that_it_is_for() {
    let mut driver = Driver::new(2);
    for generation in 0..2 {
        for process in 0..2 {
            let body = driver.start_body("q", &[0, 1], process, &Begin { generation, ..Begin::default() });
            // The first one dials and has done its part before the second one hears anything.
            assert_eq!(driver.ask(process, &body)["ok"], true);
        }
        assert_eq!(driver.ask(1, &release("q", generation, 0, &[]))["ok"], true);
        driver.ask_all(&ask("q", Request::Conclude));
    }
    driver.close();
}

#[test]
fn a_connection_whose_start_never_comes_does_not_wait_for_ever() {
    use penstock_cluster::message::MeshContext;
    use penstock_cluster::session::{Role, Session};
    let driver = Driver::with(1, Limits { mesh_time: Duration::from_millis(50), ..limits() });
    let seat = &driver.members[0];
    // Its query was never here, so nothing wakes whoever waits.
    let context = MeshContext { query: "q".into(), stamp: stamp(3), from: 1, to: 0, member: seat.id };
    let context = serde_json::to_value(context).unwrap();
    let mut waits = Session::dial(&seat.address, &keys(), Role::Mesh, "", &context, &limits()).unwrap();
    waits.receive_answer().unwrap();
    waits.set_read_timeout(Some(PATIENCE)).unwrap();
    let end = waits.receive();
    assert!(matches!(end, Ok(None)), "{end:?}");
    driver.close();
}

#[test]
fn a_batch_may_be_longer_than_a_frame() {
    let mut driver = Driver::new(1);
    driver.start("q", &[0], &Begin::default());
    let rows: Vec<i64> = (0..2_500_000).collect();
    let mut feed = Feed::connect(&driver.members[0].address, &keys(), "q", 0, 0, 1, &schema()).unwrap();
    feed.push(&batch(&rows)).unwrap();
    feed.push(&batch(&[1])).unwrap();
    assert_eq!(feed.finish().unwrap().rows, 2_500_001);
    assert_eq!(driver.ask(0, &release("q", 1, 0, &[(0, 1, 2_500_001)]))["ok"], true);
    let out = drained(&driver, 0, 0, 0, Which::Rows);
    assert_eq!((out.len(), &out[..2_500_000]), (2_500_001, &rows[..]));
    driver.close();
}

#[test]
fn members_of_different_generations_do_not_meet() {
    let mut driver = Driver::new(2);
    driver.start("q", &[0, 1], &Begin { generation: 5, ..Begin::default() });
    // Process 0 is told an old generation under a name it does not know: its peer refuses it.
    driver.ask(0, &ask("q", Request::Drop));
    let old = driver.start_body("q", &[0, 1], 0, &Begin { generation: 4, ..Begin::default() });
    let reply = driver.ask(0, &old);
    assert_eq!((kind(&reply), &reply["error"]["current"]), ("stale_generation", &json!(5)));
    let stats = driver.ask(1, &json!({"do": "stats", "query": null}));
    assert_eq!(stats["process"]["connections"]["refused_stale"], 1);
    driver.close();
}

#[test]
fn a_panic_of_the_host_is_an_answer_and_costs_the_state_of_that_query_only() {
    let mut driver = Driver::new(1);
    driver.start("p", &[0], &Begin::plan(json!({"panic_epoch": 0})));
    driver.start("q", &[0], &Begin::default());
    assert_eq!(kind(&driver.ask(0, &release("p", 1, 0, &[]))), "internal");
    assert_eq!(driver.ask(0, &release("q", 1, 0, &[]))["ok"], true);
    assert_eq!(kind(&driver.start("p", &[0], &Begin::again(2, 0))[0]), "state_lost");
    assert_eq!(driver.start("p", &[0], &Begin { generation: 3, ..Begin::default() })[0]["ok"], true);
    driver.close();
}

#[test]
fn members_end_when_they_are_told_sent_away_or_left_alone() {
    let mut driver = Driver::new(3);
    assert_eq!(driver.ask(0, &json!({"do": "stop"}))["ok"], true);
    driver.registry.dismiss(driver.members[1].id, "too old").unwrap();
    let away = driver.members[1].id;
    let lost = driver.await_event(|event| matches!(event, RegistryEvent::Lost { member, .. } if *member == away));
    let RegistryEvent::Lost { reason, .. } = lost else { unreachable!("matched") };
    assert_eq!(reason, "dismissed: too old");
    let ends = driver.close();
    assert_eq!(ends[0], End::Stopped);
    assert_eq!(ends[1], End::Dismissed { reason: "too old".into() });
    assert!(matches!(ends[2], End::RegistryLost { .. }));
}

#[test]
fn rows_beyond_the_budget_go_to_files_and_come_back_in_order() {
    let folder = std::env::temp_dir().join(format!("penstock-spill-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let narrow = || Limits { staging_bytes: 2_000, spill_folders: vec![folder.clone()], ..limits() };
    let mut driver = Driver::with(1, narrow());
    driver.start("q", &[0], &Begin::default());
    let staging = |driver: &mut Driver, figure: &str| {
        let stats = driver.ask(0, &json!({"do": "stats", "query": null}));
        stats["process"]["staging"][figure].as_u64().unwrap()
    };
    // Who has sent rows lets go of them a moment after they have come.
    let comes_below = |driver: &mut Driver, most: u64| {
        common::until("all but some bytes are let go of", || {
            staging(driver, "disk_bytes") + staging(driver, "memory_bytes") < most
        });
    };
    for epoch in 0..3 {
        let values: Vec<i64> = (0..2_000).map(|v| 10_000 * epoch + v).collect();
        for (partition, attempt) in [(2, 3), (0, 1), (2, 4)] {
            feed(&driver, 0, "q", (epoch as u64, partition, attempt), &values).unwrap();
        }
        let staged = staging(&mut driver, "disk_bytes");
        assert!(staged > 40_000 && staging(&mut driver, "memory_bytes") <= 2_000, "{staged}");
        let body = driver.ask(0, &release("q", 1, epoch as u64, &[(0, 1, 2_000), (2, 4, 2_000)]));
        assert_eq!(body["ok"], true, "{body}");
        let both = [&values[..], &values[..]].concat();
        for _ in 0..2 {
            assert_eq!(drained(&driver, 0, epoch as u64, 0, Which::Rows), both);
        }
        // What is left are the outputs of one epoch.
        comes_below(&mut driver, 40_000);
        driver.ask(0, &ask("q", Request::CloseEpoch { epoch: epoch as u64 }));
        comes_below(&mut driver, 1);
    }
    assert!(staging(&mut driver, "spilled_bytes") > 3 * 80_000);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "no name is left");
    driver.close();

    // A directory that is not there: the feed is refused by name, and the epoch can be fed again.
    let gone = folder.join("gone");
    let mut driver = Driver::with(1, Limits { spill_folders: vec![gone.clone()], ..narrow() });
    driver.start("q", &[0], &Begin::default());
    let values: Vec<i64> = (0..2_000).collect();
    let ClusterError::Refused(failure) = feed(&driver, 0, "q", (0, 0, 1), &values).unwrap_err() else {
        panic!("room?")
    };
    assert_eq!(failure.kind, "storage");
    assert!(failure.message.contains(gone.to_str().unwrap()) && failure.message.contains("spark.local.dir"));
    assert_eq!(staging(&mut driver, "memory_bytes"), 0, "nothing of the attempt is kept");
    std::fs::create_dir_all(&gone).unwrap();
    feed(&driver, 0, "q", (0, 0, 2), &values).unwrap();
    assert_eq!(driver.ask(0, &release("q", 1, 0, &[(0, 2, 2_000)]))["ok"], true);
    driver.close();
    std::fs::remove_dir_all(&folder).unwrap();
}

/// As where the host of a task loses power: no end comes.
#[test]
fn a_feed_that_falls_silent_leaves_nothing_when_its_epoch_is_over() {
    let mut driver = Driver::new(1);
    driver.start("q", &[0], &Begin::default());
    let staged = |driver: &mut Driver| {
        let stats = driver.ask(0, &json!({"do": "stats", "query": null}));
        stats["process"]["staging"]["memory_bytes"].as_u64().unwrap()
    };
    let address = driver.members[0].address.clone();
    let values: Vec<i64> = (0..1_000).collect();
    for (epoch, fed_again) in [(0, false), (1, true)] {
        let mut silent = Feed::connect(&address, &keys(), "q", epoch, 3, 9, &schema()).unwrap();
        silent.push(&common::batch(&values)).unwrap();
        common::until("its rows have come", || staged(&mut driver) > 0);
        if fed_again {
            driver.ask(0, &ask("q", Request::Discard { epoch }));
            common::until("its rows have gone", || staged(&mut driver) == 0);
        }
        feed(&driver, 0, "q", (epoch, 0, 1), &[1]).unwrap();
        assert_eq!(driver.ask(0, &release("q", 1, epoch, &[(0, 1, 1)]))["ok"], true);
        driver.ask(0, &ask("q", Request::CloseEpoch { epoch }));
        common::until("all rows have gone", || staged(&mut driver) == 0);
        // Who was only slow is told.
        assert_eq!(refusal(silent.finish().unwrap_err()), if fed_again { "staging" } else { "epoch" });
    }
    driver.close();
}

/// As a sink whose statement hangs: it reads no more, and never goes.
#[test]
fn a_read_of_results_that_stands_still_is_broken_off_when_they_go() {
    use penstock_cluster::session::{Kind, Role, Session};
    let mut driver = Driver::new(1);
    driver.start("q", &[0], &Begin::default());
    let address = driver.members[0].address.clone();
    let stats = |driver: &mut Driver| driver.ask(0, &json!({"do": "stats", "query": null}));
    let held = |driver: &mut Driver| stats(driver)["process"]["staging"]["memory_bytes"].as_u64().unwrap();
    let reads = |driver: &mut Driver| stats(driver)["queries"]["q"]["open_reads"].as_u64().unwrap();
    // More than two sockets take.
    let rows: Vec<i64> = (0..250_000).collect();
    let complete = |driver: &mut Driver, generation, epoch| {
        let mut feed = Feed::connect(&address, &keys(), "q", epoch, 0, 1, &schema()).unwrap();
        for _ in 0..10 {
            feed.push(&batch(&rows)).unwrap();
        }
        assert_eq!(feed.finish().unwrap().rows, 2_500_000);
        assert_eq!(driver.ask(0, &release("q", generation, epoch, &[(0, 1, 2_500_000)]))["ok"], true);
        let context = json!({"query": "q", "epoch": epoch, "piece": 0, "which": "rows"});
        let scope = format!("q {epoch}");
        let mut stands = Session::dial(&address, &keys(), Role::Drain, &scope, &context, &limits()).unwrap();
        stands.receive_answer().unwrap();
        common::until("it is read", || reads(driver) == 1);
        stands
    };
    let broken = |driver: &mut Driver, mut stands: Session| {
        common::until("its rows have gone", || held(driver) == 0);
        // What is under way still comes, and then an error, or an end in the place of what says that it is complete.
        while let Ok(Some(frame)) = stands.receive() {
            assert_ne!(frame.kind, Kind::End);
        }
    };
    let first = complete(&mut driver, 1, 0);
    driver.ask(0, &ask("q", Request::CloseEpoch { epoch: 0 }));
    broken(&mut driver, first);
    common::until("nobody reads", || reads(&mut driver) == 0);
    // The epoch is to be run again.
    let second = complete(&mut driver, 1, 1);
    driver.ask(0, &stop("q", 2, 1));
    driver.start("q", &[0], &Begin::again(2, 1));
    broken(&mut driver, second);
    // Nobody wants the query any more.
    let third = complete(&mut driver, 2, 1);
    driver.ask(0, &ask("q", Request::Drop));
    broken(&mut driver, third);
    driver.close();
}

/// Forwards connections to an address until told to stop; then it keeps them until its end of the channel is dropped, as a stopped process
/// does.
fn proxy(to: &str) -> (std::sync::Arc<std::sync::atomic::AtomicBool>, String, std::sync::mpsc::Sender<()>) {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    let stopped = std::sync::Arc::<std::sync::atomic::AtomicBool>::default();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (asked, to) = (stopped.clone(), to.to_owned());
    let (held, until) = std::sync::mpsc::channel::<()>();
    let until = std::sync::Arc::new(std::sync::Mutex::new(until));
    std::thread::spawn(move || {
        let (near, _) = listener.accept().unwrap();
        let far = TcpStream::connect(to).unwrap();
        let pairs = [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)];
        let ways = pairs.map(|(mut from, mut to)| {
            let (asked, until) = (asked.clone(), until.clone());
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(some @ 1..) = from.read(&mut bytes) {
                    if asked.load(std::sync::atomic::Ordering::SeqCst) {
                        let _ = until.lock().unwrap().recv();
                        return;
                    }
                    if to.write_all(&bytes[..some]).is_err() {
                        return;
                    }
                }
            })
        });
        ways.into_iter().for_each(|way| way.join().unwrap());
    });
    (stopped, address, held)
}

#[test]
fn a_member_that_neither_reads_nor_answers_holds_nobody() {
    use penstock_cluster::drain_with;
    use penstock_cluster::message::{DrainContext, FeedContext};
    // The port of a stopped process: the system accepts connections, nobody serves them.
    let stopped = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = stopped.local_addr().unwrap().to_string();
    let limits = Limits::patient(Duration::from_millis(900));
    assert_eq!((limits.handshake_time, limits.heartbeat), (limits.silence, Duration::from_millis(150)));
    let mesh_time = |seconds| Limits::patient(Duration::from_secs(seconds)).mesh_time.as_secs();
    assert_eq!(
        [1, 60, 600].map(mesh_time),
        [30, 90, 900],
        "as long as links wait for a word, and time to load functions in"
    );
    let context = FeedContext { query: "q".into(), epoch: 0, source: 0, partition: 0, attempt: 1 };
    let error = Feed::connect_with(&address, &keys(), &context, None, &schema(), limits.clone()).err().unwrap();
    assert!(matches!(&error, ClusterError::Silent { peer, .. } if peer.contains(&address)), "{error}");
    let context = DrainContext { query: "q".into(), epoch: 0, piece: 0, which: Which::Rows };
    let error = drain_with(&address, &keys(), &context, None, &limits).err().unwrap();
    assert!(matches!(error, ClusterError::Silent { .. }), "{error}");

    // One that stops later: it does not read what is sent, nor answer the end, nor send what it has. What stands in its place passes on
    // what it cannot read.
    let keys = keys().always_encrypted();
    let mut driver = Driver::with_keys(1, common::limits(), &keys, &member_keys().always_encrypted());
    driver.start("q", &[0], &Begin::default());
    let first = FeedContext { query: "q".into(), epoch: 0, source: 0, partition: 0, attempt: 1 };
    let address = driver.members[0].address.clone();
    let mut fed = Feed::connect_with(&address, &keys, &first, None, &schema(), common::limits()).unwrap();
    fed.push(&batch(&[1, 2])).unwrap();
    fed.finish().unwrap();
    driver.ask(0, &release("q", 1, 0, &[(0, 1, 2)]));
    // Only what is silent is measured: to meet may take as long as it does.
    let [handshake_time, connect_time, dial_time] = [common::PATIENCE; 3];
    let met = Limits { handshake_time, connect_time, dial_time, ..limits.clone() };
    for pushes in [0, 1, 10_000] {
        let context = FeedContext { query: "q".into(), epoch: 1, source: 0, partition: pushes, attempt: 1 };
        let (proxy, _held, mut feed) = loop {
            let (proxy, address, held) = proxy(&driver.members[0].address);
            match Feed::connect_with(&address, &keys, &context, None, &schema(), met.clone()) {
                Err(ClusterError::Silent { .. }) => {} // it was put aside before it had answered
                feed => break (proxy, held, feed.unwrap()),
            }
        };
        proxy.store(true, std::sync::atomic::Ordering::SeqCst);
        let values = batch(&[7; 10_000]);
        let sent = (0..pushes).try_for_each(|_| feed.push(&values));
        assert_eq!(sent.is_err(), pushes > 1, "the system takes a little");
        let error = sent.err().or_else(|| feed.finish().err()).unwrap();
        assert!(matches!(error, ClusterError::Silent { .. }), "{error}");
    }
    let (proxy, address, _held) = proxy(&driver.members[0].address);
    proxy.store(true, std::sync::atomic::Ordering::SeqCst);
    let error = drain_with(&address, &keys, &context, None, &limits).err().unwrap();
    assert!(matches!(error, ClusterError::Silent { .. }), "{error}");
    drop(driver.close());
}

#[test]
fn who_sends_does_not_wait_for_a_member_that_does_not_read() {
    use penstock_cluster::session::{Kind, Role, Session};
    let registry = Registry::bind("127.0.0.1", 0, None, SECRET).unwrap();
    let [hung, mut quick] = [(); 2].map(|()| {
        let mut session =
            Session::dial(registry.address(), &keys(), Role::Member, "", &Value::Null, &limits()).unwrap();
        session.send_body(Kind::Join, 0, "{}", &[]).unwrap();
        session.receive_answer().unwrap();
        session
    });
    let unread = registry.send(1, "{}".into(), vec![7; 64 << 20]).unwrap();
    let read = registry.send(2, "{}".into(), vec![7; 64 << 20]).unwrap();
    let body = quick.receive().unwrap().expect("the request").into_body().unwrap();
    assert_eq!((body.call, body.attachment.len()), (read, 64 << 20));
    drop(hung);
    let mut events = Vec::new();
    common::until("the loss is told", || {
        events.extend(registry.poll(Duration::from_millis(10)));
        let lost = events.iter().find_map(|event| match event {
            RegistryEvent::Lost { member: 1, calls, .. } => Some(calls.clone()),
            _ => None,
        });
        lost.inspect(|calls| assert_eq!(*calls, [unread])).is_some()
    });
    let long = registry.send(2, "{}".into(), vec![7; 256 << 20]);
    assert!(matches!(long, Err(ClusterError::Frame(_))));
}

#[test]
fn a_silent_member_is_lost_and_heartbeats_are_no_events() {
    use penstock_cluster::session::{Kind, Role, Session};
    let join = |registry: &Registry| {
        let address = registry.address();
        let mut session = Session::dial(address, &keys(), Role::Member, "", &Value::Null, &limits()).unwrap();
        session.send_body(Kind::Join, 0, "{}", &[]).unwrap();
        session.receive_answer().unwrap();
        session
    };
    let next = |registry: &Registry| {
        let events = registry.poll(PATIENCE);
        assert!(!events.is_empty());
        events
    };
    // Who joins has to say so within it.
    let strict = Limits { silence: Duration::from_secs(2), ..limits() };
    let registry = Registry::bind_with("127.0.0.1", 0, None, keys(), strict).unwrap();
    let _silent = join(&registry);
    let mut events = next(&registry);
    if events.len() == 1 {
        events.extend(next(&registry));
    }
    let RegistryEvent::Lost { member, reason, .. } = &events[1] else { panic!("{events:?}") };
    assert_eq!(*member, 1);
    assert!(reason.starts_with("connected but silent for 2s"), "{reason}");

    let registry = Registry::bind("127.0.0.1", 0, None, SECRET).unwrap();
    let mut beating = join(&registry);
    assert!(matches!(next(&registry)[..], [RegistryEvent::Joined { member: 1, .. }]));
    for _ in 0..3 {
        beating.send(Kind::Heartbeat, &[]).unwrap();
    }
    beating.send_body(Kind::Message, 0, "{}", b"x").unwrap();
    let events = next(&registry);
    assert!(matches!(&events[..], [RegistryEvent::Message { member: 1, attachment, .. }] if attachment == b"x"));
}

#[test]
fn a_registry_is_bound_only_with_a_secret_and_a_name() {
    let bind = |host, advertise, secret| Registry::bind(host, 0, advertise, secret).map(drop);
    assert!(matches!(bind("127.0.0.1", None, [0; 32]), Err(ClusterError::WeakSecret)));
    assert!(matches!(bind("0.0.0.0", None, SECRET), Err(ClusterError::NothingToAdvertise { .. })));
    assert!(matches!(bind("256.0.0.1", None, SECRET), Err(ClusterError::Io { .. })));
    let registry = Registry::bind("0.0.0.0", 0, Some("localhost"), SECRET).unwrap();
    assert!(registry.address().starts_with("localhost:"));
    // As Spark writes it. Not every host has IPv6.
    if std::net::TcpListener::bind("[::1]:0").is_ok() {
        let registry = Registry::bind("[::1]", 0, Some("[::1]"), SECRET).unwrap();
        assert!(registry.address().starts_with("[::1]:"));
    }
}
