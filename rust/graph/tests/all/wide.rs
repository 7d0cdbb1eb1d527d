//! Cliques below roots with many neighbours: rows of several words, cut by units and batches, and roots with too many.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use penstock_graph::crew::{self, Crew, Matches};
use penstock_graph::units::{self, Cursor};
use penstock_graph::{Builder, Query, Rows, Search, Unit, cliques};
use proptest::prelude::*;

type Sets = Vec<BTreeSet<u32>>;

/// Along the sets: every node has an edge to each later one.
fn naive(sets: &Sets, size: usize) -> Vec<Vec<u32>> {
    fn grow(sets: &Sets, row: &mut Vec<u32>, candidates: &BTreeSet<u32>, size: usize, found: &mut Vec<Vec<u32>>) {
        if row.len() == size {
            return found.push(row.clone());
        }
        for &node in candidates {
            row.push(node);
            grow(sets, row, &(candidates & &sets[node as usize]), size, found);
            row.pop();
        }
    }
    let mut found = Vec::new();
    for root in 0..sets.len() as u32 {
        grow(sets, &mut vec![root], &sets[root as usize], size, &mut found);
    }
    found
}

fn query(sets: &Sets, size: usize) -> Query {
    let mut builder = Builder::numbers();
    let each = |(from, set): (usize, &BTreeSet<u32>)| {
        set.iter().map(move |&to| (from as u64, u64::from(to))).collect::<Vec<_>>()
    };
    let (from, to): (Vec<_>, Vec<_>) = sets.iter().enumerate().flat_map(each).unzip();
    builder.numbers_in("e", &from, &to).unwrap();
    let pattern = cliques::pattern("e", size).unwrap();
    let order = pattern.variables.iter().map(String::as_str).collect::<Vec<_>>();
    let query = Query::new(Arc::new(builder.finish_forward().unwrap()), &pattern, Some(&order)).unwrap();
    assert!(query.is_clique());
    query
}

/// Rows as nodes; every node must have an edge, so that nodes are numbered as in the sets.
fn rows(found: &[Rows]) -> Vec<Vec<u32>> {
    let row = |rows: &Rows, at: usize| rows.columns.iter().map(|column| column[at]).collect();
    found.iter().flat_map(|rows| (0..rows.len()).map(move |at| row(rows, at))).collect()
}

fn graph(nodes: u32, edges: impl Iterator<Item = (u32, u32)>) -> Sets {
    // A cycle, so that every node has an edge, and a self-loop of no consequence is never there.
    let mut sets = (0..nodes).map(|node| BTreeSet::from([(node + 1) % nodes])).collect::<Sets>();
    edges.filter(|(from, to)| from != to).for_each(|(from, to)| {
        sets[from as usize].insert(to);
    });
    sets
}

/// Every way to ask gives the same rows in the same order.
fn check(sets: &Sets, size: usize, batch: usize, prefixes: usize, parts: usize) {
    let (query, wanted) = (query(sets, size), naive(sets, size));
    let stop = AtomicBool::new(false);
    let mut cursor = Cursor::new(Unit::whole(&query), prefixes);
    let by_cursor =
        std::iter::from_fn(|| cursor.next(&query, &query.views())).map(|(unit, _)| unit).collect::<Vec<_>>();
    for cut in [vec![Unit::whole(&query)], by_cursor, units::split(&query, parts)] {
        let (mut search, mut all, mut count) = (Search::new(&query, cut[0]), Vec::new(), 0);
        for unit in cut {
            count += Search::new(&query, unit).count(&stop).unwrap();
            search.begin(unit);
            let mut more = true;
            while more {
                let mut some = Rows::new(&query);
                more = search.fill(&mut some, batch, &stop);
                assert!(some.len() <= batch && some.columns.iter().all(|column| column.len() == some.len()));
                all.push(some);
            }
            assert!(search.is_done());
        }
        assert_eq!(rows(&all), wanted);
        assert_eq!(count as usize, wanted.len());
    }
    let crew = Crew { workers: 2, batches: 3, batch_size: prefixes, rows: batch, in_order: true, unit: None };
    let found = Matches::start(&query, &crew).unwrap().map(Result::unwrap).collect::<Vec<_>>();
    assert_eq!(rows(&found), wanted);
    assert_eq!(crew::count(&query, &crew).unwrap().count as usize, wanted.len());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..penstock_cases::cases(6) })]

    #[test]
    fn rows_of_several_words(
        seed in any::<u64>(), size in 3_usize..6, batch in 1_usize..300, prefixes in 1_usize..60, parts in 1_usize..9, up in any::<bool>(),
    ) {
        let nodes = 150;
        let mut state = seed | 1;
        let mut random = |below: u32| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 20) as u32 % below
        };
        // Two hubs that have nearly all nodes, and nodes that are dense among themselves, though not so that rows are counted in 100,000s.
        let hubs = (0..nodes).flat_map(|node| [(3, node), (70, node)]);
        let dense = (0..300).map(|_| (random(24) * 6, random(24) * 6)).collect::<Vec<_>>();
        let edges = hubs.chain(dense).map(|(a, b)| if up { (a.min(b), a.max(b)) } else { (a, b) });
        check(&graph(nodes, edges), size, batch, prefixes, parts);
    }
}

#[test]
fn roots_with_more_neighbours_than_rows_are_made_for() {
    let nodes = 5000;
    let hubs = (1..nodes).flat_map(|node| [(0, node), (1, node)]);
    let few = (2..400).flat_map(|node| [(node, node + 1), (node, node + 7), (node, 4000 + node % 50)]);
    let sets = graph(nodes, hubs.chain(few));
    let wanted = naive(&sets, 4);
    assert!(wanted.len() > 1000);
    for batch in [7, 100_000] {
        let query = query(&sets, 4);
        let crew = Crew { rows: batch, batch_size: 900, in_order: true, ..Crew::default() };
        let found = rows(&Matches::start(&query, &crew).unwrap().map(Result::unwrap).collect::<Vec<_>>());
        assert_eq!(crew::count(&query, &crew).unwrap().count as usize, wanted.len());
        assert!(found == wanted);
    }
}

/// Below the first pair of nodes there is more than there is time for: no row, one of 16 nodes with 15 kinds of them, or far too many.
#[test]
fn a_search_stops_wherever_it_is() {
    let later = |keep: fn(u32, u32) -> bool| -> Sets {
        (0..300).map(|from| (from + 1..300).filter(|to| keep(from, *to)).collect()).collect()
    };
    let (all, kinds) = (later(|_, _| true), later(|from, to| from % 15 != to % 15));
    // Of two relations: not by neighbourhoods of roots, but list by list.
    let by_lists = |sets: &Sets, size: usize| -> Query {
        let mut builder = Builder::numbers();
        for (from, set) in sets.iter().enumerate() {
            let (from, to): (Vec<_>, Vec<_>) = set.iter().map(|to| (from as u64, u64::from(*to))).unzip();
            builder.numbers_in("e", &from, &to).unwrap();
            builder.numbers_in("f", &from, &to).unwrap();
        }
        let mut pattern = cliques::pattern("e", size).unwrap();
        pattern.body[0].relation = "f".into();
        let order = pattern.variables.iter().map(String::as_str).collect::<Vec<_>>();
        let query = Query::new(Arc::new(builder.finish().unwrap()), &pattern, Some(&order)).unwrap();
        assert!(!query.is_clique());
        query
    };
    for (query, counts) in [
        (query(&all, 12), true),
        (query(&kinds, 16), true),
        (query(&kinds, 16), false),
        (by_lists(&all, 12), true),
        (by_lists(&kinds, 16), false),
    ] {
        let stop = Arc::new(AtomicBool::new(false));
        let (told, heard) = mpsc::channel();
        let seen = stop.clone();
        std::thread::spawn(move || {
            let mut search = Search::new(&query, Unit::whole(&query));
            let goes_on = match counts {
                true => search.count(&seen).is_none(),
                false => search.fill(&mut Rows::new(&query), 1_000, &seen),
            };
            told.send(goes_on && !search.is_done()).unwrap();
        });
        // It has long begun then; that it has not ended is what makes it worth a stop.
        assert_eq!(heard.recv_timeout(Duration::from_millis(200)), Err(mpsc::RecvTimeoutError::Timeout));
        stop.store(true, Ordering::Relaxed);
        assert_eq!(heard.recv_timeout(Duration::from_secs(60)), Ok(true), "counts: {counts}");
    }
}
