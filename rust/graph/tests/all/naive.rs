//! Every search beside brute force over the edges, on random graphs with self-loops and repeated edges.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use penstock_graph::cliques::{self, Orientation};
use penstock_graph::crew::{self, Crew, Matches};
use penstock_graph::units::{self, Cursor};
use penstock_graph::{Builder, GraphError, Index, Loops, Pattern, Query, Repeats, Rows, Search, Unit, file};
use proptest::prelude::*;

type Edges = Vec<(u64, u64)>;

/// All assignments of the variables, tried one by one: rows in the order of the head.
fn naive(pattern: &Pattern, relations: &[(&str, &Edges)]) -> Vec<Vec<u64>> {
    let nodes = relations.iter().flat_map(|(_, edges)| edges.iter().flat_map(|&(a, b)| [a, b]));
    let nodes = nodes.collect::<BTreeSet<_>>();
    let sets = relations.iter().map(|(name, edges)| (*name, edges.iter().copied().collect::<BTreeSet<_>>()));
    let sets = sets.collect::<Vec<_>>();
    let mut found = vec![Vec::new()];
    for bound in 1..=pattern.variables.len() {
        found = found
            .iter()
            .flat_map(|row: &Vec<u64>| nodes.iter().map(move |&node| [&row[..], &[node]].concat()))
            .collect();
        found.retain(|row| {
            pattern.body.iter().filter(|atom| atom.from.max(atom.to) < bound).all(|atom| {
                let edges = &sets.iter().find(|set| set.0 == atom.relation).unwrap().1;
                edges.contains(&(row[atom.from], row[atom.to]))
            })
        });
    }
    let mut rows = found.iter().map(|row| pattern.head.iter().map(|&at| row[at]).collect()).collect::<Vec<_>>();
    rows.sort();
    rows
}

fn index(relations: &[(&str, &Edges)]) -> Index {
    let mut builder = Builder::numbers();
    for (name, edges) in relations {
        let (from, to): (Vec<_>, Vec<_>) = edges.iter().copied().unzip();
        builder.relation(name, Loops::Keep, Repeats::Drop);
        builder.numbers_in(name, &from, &to).unwrap();
    }
    builder.finish().unwrap()
}

/// Rows in the order of the head, as identifiers.
fn rows(query: &Query, found: &[Rows]) -> Vec<Vec<u64>> {
    let index = query.index();
    let penstock_graph::domain::Domain::Numbers(numbers) = &index.domain else { panic!("nodes are numbers") };
    let row = |rows: &Rows, at: usize| {
        let id = |level: &usize| numbers.get()[index.place(rows.columns[*level][at]) as usize];
        query.head().iter().map(id).collect::<Vec<_>>()
    };
    found.iter().flat_map(|rows| (0..rows.len()).map(move |at| (rows, at))).map(|(rows, at)| row(rows, at)).collect()
}

fn sorted(mut rows: Vec<Vec<u64>>) -> Vec<Vec<u64>> {
    rows.sort();
    rows
}

/// Ids far apart and beyond 32 bits.
fn graph() -> impl Strategy<Value = Edges> {
    let id = |node: u64| if node.is_multiple_of(3) { node } else { node << 40 | 7 };
    (1_u64..8).prop_flat_map(move |nodes| {
        proptest::collection::vec((0..nodes).prop_flat_map(move |a| (Just(a), 0..nodes)), 0..40)
            .prop_map(move |edges| edges.into_iter().map(|(a, b)| (id(a), id(b))).collect())
    })
}

const PATTERNS: &[&str] = &[
    "p(a,b) :- e(a,b)",
    "loops(a) :- e(a,a)",
    "p(a) :- e(a,a), f(a,a)",
    "p(a,b) :- e(a,b), e(b,a)",
    "p(b,a) :- e(a,b), f(b,a), e(a,a)",
    "tri(a,b,c) :- e(a,b), e(a,c), e(b,c)",
    "cycle(c,b,a) :- e(a,b), f(b,c), e(c,a)",
    "path(a,c) :- e(a,b), f(b,c)",
    "star(a,b,c,d) :- e(a,b), f(a,c), e(d,a)",
    "square(a,b,c,d) :- e(a,b), e(b,c), e(c,d), e(d,a)",
    "four(a,b,c,d) :- e(a,b), e(a,c), e(a,d), e(b,c), e(b,d), f(c,d), e(c,c)",
    "kite(a,b,c,d) :- e(a,b), e(b,a), e(a,c), e(b,c), f(c,d), f(d,c), e(d,d)",
];

const K4: &str = "p(a,b,c,d) :- e(a,b), e(a,c), e(a,d), e(b,c), e(b,d), e(c,d)";

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..penstock_cases::cases(64) })]

    #[test]
    fn every_pattern_gives_what_brute_force_gives(
        e in graph(), f in graph(), batch in 1_usize..9, size in 1_usize..5, workers in 1_usize..4, parts in 1_usize..7,
    ) {
        let relations = [("e", &e), ("f", &f)];
        let index = Arc::new(index(&relations));
        for text in PATTERNS {
            let pattern = Pattern::parse(text).unwrap();
            let wanted = naive(&pattern, &relations);
            let query = Query::new(index.clone(), &pattern, None).unwrap();

            // One search, a few rows at a time.
            let (mut search, mut all, stop) = (Search::new(&query, Unit::whole(&query)), Vec::new(), AtomicBool::new(false));
            loop {
                let mut some = Rows::new(&query);
                let more = search.fill(&mut some, batch, &stop);
                prop_assert!(some.len() <= batch);
                all.push(some);
                if !more { break }
            }
            let in_order = rows(&query, &all);
            prop_assert_eq!(&sorted(in_order.clone()), &wanted, "{}", text);

            // Units of both kinds give the same one after the other.
            let mut cursor = Cursor::new(Unit::whole(&query), size);
            let by_cursor = std::iter::from_fn(|| cursor.next(&query, &query.views())).map(|(unit, _)| unit);
            for cut in [by_cursor.collect::<Vec<_>>(), units::split(&query, parts)] {
                prop_assert!(cut.windows(2).all(|pair| pair[0].to == pair[1].from));
                let mut some = Rows::new(&query);
                let mut count = 0;
                for unit in cut {
                    Search::new(&query, unit).fill(&mut some, usize::MAX, &stop);
                    count += Search::new(&query, unit).count(&stop).unwrap();
                }
                prop_assert_eq!(&rows(&query, &[some]), &in_order, "{}", text);
                prop_assert_eq!(count as usize, wanted.len());
            }

            // Threads.
            let crew = Crew { workers, batches: parts, batch_size: size, rows: batch, in_order: true, unit: None };
            let done = crew::count(&query, &crew).unwrap();
            prop_assert_eq!(done.count as usize, wanted.len());
            prop_assert!(done.admitted_maximum <= (parts * size) as u64 && done.batches_maximum <= parts as u64);
            let threads = Matches::start(&query, &crew).unwrap().map(Result::unwrap).collect::<Vec<_>>();
            prop_assert_eq!(&rows(&query, &threads), &in_order, "{}", text);
            let crew = Crew { in_order: false, ..crew };
            let threads = Matches::start(&query, &crew).unwrap().map(Result::unwrap).collect::<Vec<_>>();
            prop_assert_eq!(&sorted(rows(&query, &threads)), &wanted, "{}", text);
        }
    }

    #[test]
    fn counts_of_dense_graphs_are_what_is_enumerated(
        e in proptest::collection::vec((0_u64..40, 0_u64..40), 300..900), parts in 1_usize..9,
    ) {
        let index = Arc::new(index(&[("e", &e)]));
        for text in [PATTERNS[5], K4, "cycle(a,b,c) :- e(a,b), e(b,c), e(c,a)", "in(a,b,c) :- e(b,a), e(c,a), e(b,c)"] {
            let query = Query::new(index.clone(), &Pattern::parse(text).unwrap(), None).unwrap();
            let stop = AtomicBool::new(false);
            for unit in units::split(&query, parts) {
                let mut all = Rows::new(&query);
                Search::new(&query, unit).fill(&mut all, usize::MAX, &stop);
                prop_assert_eq!(Search::new(&query, unit).count(&stop), Some(all.len() as u64), "{}", text);
            }
        }
    }

    #[test]
    fn every_order_gives_the_same(e in graph(), order in Just(["a", "b", "c", "d"]).prop_shuffle()) {
        let relations = [("e", &e)];
        let index = Arc::new(index(&relations));
        for text in [
            "p(a,b,c,d) :- e(a,b), e(b,c), e(c,d), e(d,a), e(a,c), e(b,d)",
            "p(a,b,c,d) :- e(a,b), e(c,b), e(d,c), e(a,d), e(c,a), e(d,b), e(b,a)",
        ] {
            let pattern = Pattern::parse(text).unwrap();
            let query = Query::new(index.clone(), &pattern, Some(&order)).unwrap();
            prop_assert_eq!(query.order(), &order.map(String::from));
            let count = crew::count(&query, &Crew::default()).unwrap().count;
            prop_assert_eq!(count as usize, naive(&pattern, &relations).len());
        }
    }

    #[test]
    fn cliques_directed_and_undirected(e in graph(), size in 2_usize..6, degeneracy in any::<bool>()) {
        let straight = e.iter().copied().filter(|(a, b)| a != b).collect::<BTreeSet<_>>();
        let pattern = cliques::pattern("e", size).unwrap();
        let plain = straight.iter().copied().collect::<Edges>();
        let mut builder = Builder::numbers();
        builder.relation("e", Loops::Drop, Repeats::Drop);
        let (from, to): (Vec<_>, Vec<_>) = e.iter().copied().unzip();
        builder.numbers_in("e", &from, &to).unwrap();
        let names = pattern.variables.iter().map(String::as_str).collect::<Vec<_>>();
        let query = Query::new(Arc::new(builder.finish_forward().unwrap()), &pattern, Some(&names)).unwrap();
        prop_assert!(query.is_clique());
        let found = Matches::start(&query, &Crew::default()).unwrap().map(Result::unwrap).collect::<Vec<_>>();
        let wanted = naive(&pattern, &[("e", &plain)]);
        prop_assert_eq!(crew::count(&query, &Crew::default()).unwrap().count as usize, wanted.len());
        prop_assert_eq!(sorted(rows(&query, &found)), wanted);

        // Undirected: each set of nodes once.
        let both = straight.iter().flat_map(|&(a, b)| [(a, b), (b, a)]).collect::<Edges>();
        let wanted = naive(&pattern, &[("e", &both)]).into_iter().filter(|row| row.is_sorted()).collect::<Vec<_>>();
        let mut builder = Builder::numbers();
        builder.numbers_in("e", &from, &to).unwrap();
        builder.relation("e", Loops::Drop, Repeats::Drop);
        let orientation = if degeneracy { Orientation::Degeneracy } else { Orientation::Degree };
        let query = Query::new(Arc::new(builder.finish_oriented(orientation).unwrap()), &pattern, Some(&names)).unwrap();
        let found = Matches::start(&query, &Crew::default()).unwrap().map(Result::unwrap).collect::<Vec<_>>();
        let each = rows(&query, &found).into_iter().map(|row| sorted(row.into_iter().map(|id| vec![id]).collect()).concat());
        prop_assert_eq!(crew::count(&query, &Crew::default()).unwrap().count as usize, wanted.len());
        prop_assert_eq!(sorted(each.collect()), wanted);
    }

    #[test]
    fn a_file_is_what_was_saved_and_damage_is_an_error(e in graph(), at in any::<prop::sample::Index>(), flip in 1_u8..=255) {
        let folder = tempfile();
        let path = folder.join("g.index");
        file::save(&index(&[("e", &e)]), &path).unwrap();
        let query = |index: Index| {
            Query::new(Arc::new(index), &Pattern::parse("p(a,b,c) :- e(a,b), e(c,b), e(c,c)").unwrap(), None).unwrap()
        };
        let count = |query: &Query| crew::count(query, &Crew::default()).unwrap().count;
        let mapped = file::open(&path).unwrap();
        prop_assert_eq!(count(&query(mapped)), count(&query(index(&[("e", &e)]))));
        let mut bytes = std::fs::read(&path).unwrap();
        let place = at.index(bytes.len());
        bytes[place] ^= flip;
        std::fs::write(folder.join("damaged"), &bytes).unwrap();
        prop_assert!(file::open(&folder.join("damaged")).is_err(), "byte {}", place);
        std::fs::write(folder.join("short"), &bytes[..place]).unwrap();
        prop_assert!(file::open(&folder.join("short")).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

/// A folder of this test's own.
fn tempfile() -> std::path::PathBuf {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("penstock-graph-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn texts_are_nodes_as_well() {
    let mut builder = Builder::texts();
    for (from, to) in [("zoë", "ann"), ("ann", "bob"), ("bob", "zoë"), ("zoë", "bob"), ("", "ann")] {
        builder.text_in("knows", from, to).unwrap();
    }
    assert!(builder.numbers_in("knows", &[1], &[2]).is_err());
    let folder = tempfile();
    file::save(&builder.finish().unwrap(), &folder.join("g")).unwrap();
    let index = Arc::new(file::open(&folder.join("g")).unwrap());
    let pattern = Pattern::parse("p(x,y,z) :- knows(x,y), knows(y,z), knows(z,x)").unwrap();
    let query = Query::new(index.clone(), &pattern, None).unwrap();
    let found = Matches::start(&query, &Crew::default()).unwrap().map(Result::unwrap).collect::<Vec<_>>();
    let show = |at: usize| query.head().iter().map(|&level| index.domain.show(found[0].columns[level][at])).collect();
    let mut all = (0..found[0].len()).map(show).collect::<Vec<Vec<String>>>();
    all.sort();
    assert_eq!(all, [["ann", "bob", "zoë"], ["bob", "zoë", "ann"], ["zoë", "ann", "bob"]]);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn what_a_relation_refuses_is_named() {
    let build = |edges: &[(u64, u64)], loops, repeats| {
        let mut builder = Builder::numbers();
        builder.relation("e", loops, repeats);
        let (from, to): (Vec<_>, Vec<_>) = edges.iter().copied().unzip();
        builder.numbers_in("e", &from, &to).unwrap();
        builder.finish().map(|index| index.edges()).map_err(|error| error.to_string())
    };
    assert_eq!(build(&[(5, 5), (5, 6), (5, 6)], Loops::Keep, Repeats::Drop), Ok(2));
    assert_eq!(build(&[(5, 5), (5, 6), (5, 6)], Loops::Drop, Repeats::Drop), Ok(1));
    assert!(build(&[(5, 5)], Loops::Refuse, Repeats::Drop).unwrap_err().contains("self-loop at 5"));
    assert!(build(&[(5, 6), (5, 6)], Loops::Keep, Repeats::Refuse).unwrap_err().contains("5 -> 6 more than once"));
    assert!(
        Builder::numbers().numbers_in("e", &[1], &[]).unwrap_err().to_string().contains("1 sources, but 0 targets")
    );
}

#[test]
fn an_undirected_graph_has_repeats_in_either_direction_and_any_relation() {
    let build = |edges: &[(&str, u64, u64)], repeats: [Repeats; 2]| {
        let mut builder = Builder::numbers();
        ["e", "f"].into_iter().zip(repeats).for_each(|(name, repeats)| builder.relation(name, Loops::Drop, repeats));
        edges.iter().for_each(|&(name, from, to)| builder.numbers_in(name, &[from], &[to]).unwrap());
        builder.finish_oriented(Orientation::Degree).map(|index| index.edges()).map_err(|error| error.to_string())
    };
    let refuse = [Repeats::Refuse; 2];
    for (edges, says) in [
        (
            [("e", 1, 2), ("e", 2, 1)],
            "relation \"e\" has the edge 2 -> 1 more than once in the undirected graph of all",
        ),
        ([("f", 1, 2), ("f", 1, 2)], "relation \"f\" has the edge 1 -> 2 more than once"),
        ([("f", 2, 1), ("e", 1, 2)], "relation \"f\" has the edge 2 -> 1 more than once"),
        ([("e", 1, 2), ("f", 1, 2)], "relation \"f\" has the edge 1 -> 2 more than once"),
    ] {
        let error = build(&edges, refuse).unwrap_err();
        assert!(error.contains(says), "{edges:?} gives {error:?}");
        assert_eq!(build(&edges, [Repeats::Drop; 2]), Ok(1));
    }
    assert_eq!(build(&[("e", 1, 2), ("e", 2, 1)], [Repeats::Drop, Repeats::Refuse]), Ok(1), "each says it for itself");
    assert_eq!(build(&[("e", 1, 2), ("e", 2, 3), ("f", 3, 1)], refuse), Ok(3));
}

#[test]
fn what_does_not_fit_the_relations_is_told() {
    let index = Arc::new(index(&[("e", &vec![(1, 2)])]));
    let query = |text: &str, order: Option<&[&str]>| {
        Query::new(index.clone(), &Pattern::parse(text).unwrap(), order).map(|_| ()).unwrap_err().to_string()
    };
    assert!(query("p(a) :- e(a,b), g(b,c)", None).contains("character 17: there is no relation \"g\"; there are e"));
    let path = "p(a) :- e(a,b), e(b,c)";
    assert!(query(path, Some(&["a", "c", "b"])).contains("nothing joins \"c\""));
    assert!(query(path, Some(&["a", "b"])).contains("leaves out \"c\""));
    assert!(query(path, Some(&["a", "a", "b", "c"])).contains("named twice"));
    assert!(query(path, Some(&["a", "x"])).contains("no variable \"x\""));
}

#[test]
fn an_oriented_index_refuses_what_is_no_clique() {
    for orientation in [Orientation::Degree, Orientation::Degeneracy] {
        let mut builder = Builder::numbers();
        builder.numbers_in("e", &[1, 2, 3, 1], &[2, 3, 1, 4]).unwrap();
        let index = Arc::new(builder.finish_oriented(orientation).unwrap());
        let query = |text: &str| Query::new(index.clone(), &Pattern::parse(text).unwrap(), None);
        for (text, place, says) in [
            ("p(a,b,c) :- e(a,b), e(b,c)", 0, "nothing joins \"a\" and \"c\""),
            ("p(b,c) :- e(a,b), e(a,c)", 0, "nothing joins \"b\" and \"c\""),
            ("p(a,b,c) :- e(a,b), e(b,c), e(c,a)", 0, "its atoms lead in a circle"),
            ("p(a,b) :- e(a,b), e(b,a)", 19, "e(b, a) joins what another atom joins the other way round"),
            ("p(a,b) :- e(a,b), e(b,b)", 19, "e(b, b) asks for a self-loop"),
            ("p(a) :- e(a,a)", 9, "e(a, a) asks for a self-loop"),
            ("p(a) :- e(a,b)", 0, "the head leaves out \"b\""),
            ("p(c,a) :- e(a,b), e(a,c), e(b,c)", 0, "the head leaves out \"b\""),
        ] {
            let error = query(text).map(drop).expect_err(text);
            let GraphError::Pattern(pattern) = &error else { panic!("{text}: {error}") };
            assert_eq!(pattern.place(), place, "{text}");
            let message = error.to_string();
            assert!(message.contains(says) && message.contains("build it with shape=\"both\""), "{text}: {message}");
        }
        // However it is written, and in whatever order its columns are.
        for (text, count) in [
            ("p(a,b) :- e(a,b)", 4),
            ("p(b,a,c) :- e(b,c), e(a,c), e(a,b), e(a,c)", 1),
            ("p(x,y,z) :- e(z,y), e(z,x), e(y,x)", 1),
        ] {
            let query = query(text).unwrap();
            assert!(query.is_clique(), "{text}");
            assert_eq!(crew::count(&query, &Crew::default()).unwrap().count, count, "{text}");
        }
    }
}

/// Whatever would be cheaper with reverse lists.
#[test]
fn an_index_of_one_direction_answers_what_it_can() {
    let star = |hubs: u64| (0..1_000_u64).map(move |leaf| (leaf, 2_000 + leaf % hubs)).unzip::<_, _, Vec<_>, Vec<_>>();
    let index = |hubs: u64| {
        let mut builder = Builder::numbers();
        let (from, to) = star(hubs);
        builder.numbers_in("e", &from, &to).unwrap();
        Arc::new(builder.finish_forward().unwrap())
    };
    let count = |text: &str, hubs: u64| {
        let query = Query::new(index(hubs), &Pattern::parse(text).unwrap(), None)?;
        Ok::<_, GraphError>(Search::new(&query, Unit::whole(&query)).count(&AtomicBool::new(false)).unwrap())
    };
    assert_eq!(count("p(a, b) :- e(a, b)", 1).unwrap(), 1_000);
    // A path of two: from its middle nothing leads back.
    assert_eq!(count("p(a, b, c) :- e(a, b), e(b, c)", 1).unwrap(), 0);
    // More attributes than all orders are compared of.
    assert_eq!(
        count("p(a, b, c, d, f, g, h, i) :- e(a, b), e(a, c), e(a, d), e(a, f), e(a, g), e(a, h), e(a, i)", 7).unwrap(),
        1_000
    );
    let long = "p(a, c, b, d, f, g, h, i) :- e(a, c), e(a, b), e(b, c), e(c, d), e(d, f), e(f, g), e(g, h), e(h, i)";
    assert_eq!(count(long, 7).unwrap(), 0, "c comes behind b");
    let error = count("p(a, b, c) :- e(a, c), e(b, c)", 1).unwrap_err().to_string();
    assert!(error.contains("backwards, and the index has only the other direction"), "{error}");
}

#[test]
fn a_crew_that_makes_no_sense_is_refused() {
    let index = Arc::new(index(&[("e", &vec![(1, 2)])]));
    let query = Query::new(index, &Pattern::parse("p(a,b) :- e(a,b)").unwrap(), None).unwrap();
    let refused = |crew: Crew| crew::count(&query, &crew).unwrap_err().to_string();
    assert!(refused(Crew { workers: 0, ..Crew::default() }).contains("workers 0"));
    assert!(refused(Crew { batches: 0, ..Crew::default() }).contains("batches 0"));
    assert!(refused(Crew { batch_size: 0, ..Crew::default() }).contains("batch_size 0"));
    assert!(refused(Crew { rows: 0, ..Crew::default() }).contains("rows 0"));
    assert!(refused(Crew { batches: usize::MAX, batch_size: 2, ..Crew::default() }).contains("must fit"));
}

#[test]
fn the_window_is_full_when_there_is_enough_to_do_and_a_slow_reader_does_not_fill_memory() {
    let nodes = 60_u64;
    let all = (0..nodes).flat_map(|a| (0..nodes).map(move |b| (a, b))).collect::<Edges>();
    let query = Query::new(Arc::new(index(&[("e", &all)])), &cliques::pattern("e", 3).unwrap(), None).unwrap();
    let crew = Crew { workers: 2, batches: 3, batch_size: 5, rows: 10, ..Crew::default() };
    let matches = Matches::start(&query, &crew).unwrap();
    // Threads go on while nobody takes anything, until both wait with what they may leave.
    let mut seen = 0;
    while matches.done().count < 2 * 2 * 10 {
        std::thread::yield_now();
        seen += 1;
        assert!(seen < 500_000_000, "the threads do not fill the window");
    }
    assert_eq!((matches.done().count, matches.done().batches_maximum), (2 * 2 * 10, 2));
    drop(matches); // and stops them
    let crew = Crew { workers: 4, batches: 3, ..crew };
    let total = Matches::start(&query, &crew).unwrap().map(|rows| rows.unwrap().len()).sum::<usize>();
    assert_eq!(total as u64, nodes.pow(3));
}
