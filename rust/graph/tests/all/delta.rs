//! Deltas beside a search of the whole graph after every epoch.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use penstock_graph::delta::Deltas;
use penstock_graph::{Builder, Loops, Pattern, Query, Repeats, crew};
use proptest::prelude::*;

const PATTERNS: &[&str] = &[
    "p(a,b,c) :- e(a,b), e(a,c), e(b,c)",
    "p(a,b) :- e(a,b), e(b,a), e(a,a)",
    "p(a) :- e(a,a)",
    "p(a,b,c,d) :- e(a,b), f(b,c), e(c,d), f(d,a)",
    "p(a,b,c,d) :- e(a,b), e(a,c), e(a,d), e(b,c), e(b,d), e(c,d)",
    "p(a,b,c) :- e(a,b), f(b,c), e(b,b)",
];

/// Every match of the epoch that is held, and whether it came, a few nodes at a time.
fn held(deltas: &Deltas) -> BTreeMap<Vec<u32>, i64> {
    let (mut cursor, mut found) = (deltas.cursor(), BTreeMap::new());
    let mut each = |row: &[u32], came| {
        let known = found.insert(row.to_vec(), if came { 1 } else { -1 });
        assert_eq!(known, None, "it is given twice");
    };
    while deltas.next(&mut cursor, 2, 3, &mut each).unwrap() {}
    found
}

/// Every match of the edges, by variable.
fn whole(pattern: &Pattern, edges: &BTreeMap<(usize, u32, u32), ()>) -> BTreeMap<Vec<u32>, i64> {
    let mut builder = Builder::numbers();
    for (at, name) in ["e", "f"].into_iter().enumerate() {
        builder.relation(name, Loops::Keep, Repeats::Drop);
        let own = edges.keys().filter(|edge| edge.0 == at);
        let (from, to): (Vec<_>, Vec<_>) = own.map(|edge| (u64::from(edge.1), u64::from(edge.2))).unzip();
        builder.numbers_in(name, &from, &to).unwrap();
    }
    // All variables, in the order of the body.
    let all = Pattern { head: (0..pattern.variables.len()).collect(), ..pattern.clone() };
    let query = Query::new(Arc::new(builder.finish().unwrap()), &all, None).unwrap();
    let penstock_graph::domain::Domain::Numbers(ids) = query.index().domain.clone() else { panic!("numbers") };
    let mut found = BTreeMap::new();
    for rows in crew::Matches::start(&query, &crew::Crew::default()).unwrap() {
        let rows = rows.unwrap();
        let places = rows.places(&query, false);
        for at in 0..rows.len() {
            *found.entry(places.iter().map(|column| ids.get()[column[at] as usize] as u32).collect()).or_default() += 1;
        }
    }
    found
}

type Epochs = Vec<Vec<(usize, u32, u32, i64)>>;

fn epochs() -> impl Strategy<Value = Epochs> {
    proptest::collection::vec(proptest::collection::vec((0_usize..2, 0_u32..6, 0_u32..6, -2_i64..4), 0..14), 1..7)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..penstock_cases::cases(48) })]

    /// However many steps there are, and wherever somebody gives up, what is held is as it was until the turn.
    #[test]
    fn an_epoch_that_is_worked_out_in_steps_is_the_same(
        epochs in epochs(),
        ways in proptest::collection::vec((1_usize..4, 0_usize..40, 0_usize..8), 7),
    ) {
        for text in PATTERNS {
            let pattern = Pattern::parse(text).unwrap();
            let (mut whole, mut deltas) = (Deltas::new(&pattern), Deltas::new(&pattern));
            let note = |deltas: &mut Deltas, epoch: &[(usize, u32, u32, i64)]| {
                for &(at, from, to, times) in epoch {
                    let _ = deltas.change(["e", "f"][at], from * 3000, to * 3000, times);
                }
            };
            for (epoch, &(steps, gives_up, settles)) in epochs.iter().zip(&ways) {
                let before = held(&deltas);
                note(&mut deltas, epoch);
                for _ in 0..gives_up {
                    deltas.prepare(steps);
                    prop_assert_eq!(&held(&deltas), &before, "{}", text);
                }
                deltas.discard();
                prop_assert_eq!(&held(&deltas), &before, "{}", text);
                note(&mut deltas, epoch);
                while deltas.prepare(steps) {}
                prop_assert_eq!(&held(&deltas), &before, "{}", text);
                deltas.turn();
                note(&mut whole, epoch);
                whole.begin();
                let wanted = held(&whole);
                prop_assert_eq!(&held(&deltas), &wanted, "{}", text);
                for _ in 0..settles {
                    deltas.settle(steps);
                    prop_assert_eq!(&held(&deltas), &wanted, "{}", text);
                }
            }
        }
    }

    #[test]
    fn every_epoch_gives_exactly_what_changed(epochs in epochs()) {
        for text in PATTERNS {
            let pattern = Pattern::parse(text).unwrap();
            let mut deltas = Deltas::new(&pattern);
            let mut edges = BTreeMap::new();
            let mut before = whole(&pattern, &edges);
            for epoch in &epochs {
                let mut net: BTreeMap<(usize, u32, u32), i64> = BTreeMap::new();
                for &(at, from, to, times) in epoch {
                    let name = ["e", "f"][at];
                    if deltas.change(name, from, to, times).is_ok() {
                        *net.entry((at, from, to)).or_default() += times;
                    } else {
                        prop_assert!(!text.contains(name));
                    }
                }
                for (edge, times) in net {
                    if times > 0 { edges.insert(edge, ()); }
                    if times < 0 { edges.remove(&edge); }
                }
                let after = whole(&pattern, &edges);
                let mut given: BTreeMap<Vec<u32>, i64> = BTreeMap::new();
                let mut calls = 0;
                deltas.commit(&mut |row, came| {
                    calls += 1;
                    *given.entry(row.to_vec()).or_default() += if came { 1 } else { -1 };
                });
                let rows = before.keys().chain(after.keys());
                let changed = rows.filter(|row| before.contains_key(*row) != after.contains_key(*row));
                let wanted = changed.map(|row| (row.clone(), if after.contains_key(row) { 1 } else { -1 }));
                let wanted = wanted.collect::<BTreeMap<_, _>>();
                prop_assert_eq!(&given, &wanted, "{}", text);
                prop_assert_eq!(calls, wanted.len(), "{}: something was given and taken back", text);
                // The same again, a little at a time.
                let (mut cursor, mut again, mut more) = (deltas.cursor(), BTreeMap::new(), true);
                while more {
                    let mut calls = 0;
                    more = deltas
                        .next(&mut cursor, 2, 3, &mut |row, came| {
                            calls += 1;
                            again.insert(row.to_vec(), if came { 1 } else { -1 });
                        })
                        .unwrap();
                    prop_assert!(calls <= 2);
                }
                prop_assert_eq!(&again, &wanted, "{}", text);
                before = after;
            }
        }
    }
}

#[test]
fn a_relation_that_the_pattern_does_not_know_is_refused() {
    let mut deltas = Deltas::new(&Pattern::parse("p(a) :- e(a,b)").unwrap());
    assert!(deltas.change("g", 1, 2, 1).unwrap_err().to_string().contains("no relation \"g\"; there are e"));
    deltas.commit(&mut |_, _| panic!("nothing has changed"));
}

#[test]
fn what_an_epoch_changed_is_there_until_the_next_begins() {
    let mut deltas = Deltas::new(&Pattern::parse("p(a,b) :- e(a,b)").unwrap());
    (0..10).for_each(|node| deltas.change("e", node, node + 1, 1).unwrap());
    deltas.begin();
    let mut old = deltas.cursor();
    assert!(deltas.next(&mut old, 3, usize::MAX, &mut |_, _| {}).unwrap());
    deltas.change("e", 0, 1, -1).unwrap();
    let mut rest = 0;
    assert!(!deltas.next(&mut old, 100, usize::MAX, &mut |_, _| rest += 1).unwrap());
    assert_eq!(rest, 7, "what is noted for the next epoch does not count yet");
    deltas.begin();
    assert!(deltas.next(&mut old, 1, 1, &mut |_, _| {}).unwrap_err().to_string().contains("epoch that is over"));
}

/// So many that nodes are in buckets and blocks, and edges that come and go often are added up in between.
#[test]
fn the_sign_of_a_sum_decides_however_large_it_is() {
    const MOST: i64 = i64::MAX;
    let pattern = Pattern::parse("p(a, b) :- e(a, b)").unwrap();
    let sums: [(&[i64], bool); 5] = [
        (&[MOST, 1, -MOST], true),
        (&[MOST, MOST, -MOST, -MOST], false),
        (&[MOST, MOST, -MOST, -2], true),
        (&[i64::MIN, i64::MIN, MOST, MOST, 1], false),
        (&[i64::MIN, MOST, 2], true),
    ];
    // Few edges, and so many that they are added up as they come.
    for again in [1, 9_000] {
        let mut deltas = Deltas::new(&pattern);
        for (at, (times, _)) in (0..).zip(&sums) {
            for &times in *times {
                (0..again).for_each(|_| deltas.change("e", at, at, times).unwrap());
            }
        }
        deltas.begin();
        let came = (0..).zip(&sums).filter(|(_, sum)| sum.1).map(|(at, _)| (vec![at, at], 1));
        assert_eq!(held(&deltas), came.collect());
    }
}

#[test]
fn epochs_of_many_edges_are_what_a_set_of_edges_has() {
    let mut seed = 1_u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        ((seed >> 33) % below) as u32
    };
    let pattern = Pattern::parse("p(a,b) :- e(a,b), e(b,a)").unwrap();
    let (mut deltas, mut edges) = (Deltas::new(&pattern), BTreeSet::new());
    let both = |edges: &BTreeSet<(u32, u32)>| {
        edges.iter().copied().filter(|&(from, to)| edges.contains(&(to, from))).collect::<BTreeSet<_>>()
    };
    for (nodes, far, notes) in [(300, 100, 40_000), (20_000, 1, 60_000), (30, 1, 30_000), (400, 77, 9_000)] {
        let mut net = BTreeMap::<_, i64>::new();
        for _ in 0..notes {
            let (edge, times) = ((random(nodes) * far, random(nodes) * far), i64::from(random(5)) - 2);
            deltas.change("e", edge.0, edge.1, times).unwrap();
            *net.entry(edge).or_default() += times;
        }
        let (before, was) = (both(&edges), held(&deltas));
        while deltas.prepare(1000) {
            assert_eq!(held(&deltas).len(), was.len());
        }
        assert_eq!(held(&deltas), was);
        for (edge, times) in net {
            match times {
                ..0 => edges.remove(&edge),
                0 => false,
                1.. => edges.insert(edge),
            };
        }
        deltas.turn();
        let after = both(&edges);
        let rows = |some: &BTreeSet<(u32, u32)>, others: &BTreeSet<(u32, u32)>, sign: i64| {
            some.difference(others).map(|&(a, b)| (vec![a, b], sign)).collect::<Vec<_>>()
        };
        let wanted = [rows(&before, &after, -1), rows(&after, &before, 1)].concat().into_iter().collect();
        assert_eq!(held(&deltas), wanted);
        while deltas.settle(1000) {
            assert_eq!(held(&deltas).len(), wanted.len());
        }
        assert_eq!(held(&deltas), wanted);
    }
}
