//! Index files of edges that do not fit in memory, beside those of edges that do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use penstock_graph::cliques::Orientation;
use penstock_graph::large::Shape;
use penstock_graph::{Builder, GraphError, Index, LargeBuilder, Loops, Repeats, file};
use proptest::prelude::*;

const SHAPES: [Shape; 4] =
    [Shape::Both, Shape::Forward, Shape::Oriented(Orientation::Degree), Shape::Oriented(Orientation::Degeneracy)];

type Lists = (Vec<u64>, Vec<u32>);

/// All that an index says.
#[derive(Debug, PartialEq)]
struct Told {
    nodes: Vec<String>,
    labels: Option<Vec<u32>>,
    relations: Vec<(String, Lists, Option<Lists>, Vec<u32>)>,
}

fn told(index: &Index) -> Told {
    let lists = |csr: &penstock_graph::csr::Csr| (csr.view().offsets.to_vec(), csr.view().targets.to_vec());
    let relations = index.relations.iter().map(|relation| {
        let reverse = relation.reverse.as_ref().map(lists);
        (relation.name.clone(), lists(&relation.forward), reverse, relation.loops.get().to_vec())
    });
    Told {
        nodes: (0..index.nodes() as u32).map(|node| index.domain.show(node)).collect(),
        labels: index.labels.as_ref().map(|labels| labels.get().to_vec()),
        relations: relations.collect(),
    }
}

fn finished(builder: Builder, shape: Shape) -> Index {
    match shape {
        Shape::Both => builder.finish().unwrap(),
        Shape::Forward => builder.finish_forward().unwrap(),
        Shape::Oriented(orientation) => builder.finish_oriented(orientation).unwrap(),
    }
}

type Edges = [(usize, i64, i64)];

fn fill(add: &mut dyn FnMut(&str, i64, i64), edges: &Edges) {
    edges.iter().for_each(|&(relation, from, to)| add(["e", "f"][relation], from, to));
}

/// Adds an edge as the kind of the builder asks for.
fn edge(kind: usize, builder: &mut Builder, name: &str, from: i64, to: i64) -> Result<(), GraphError> {
    let text = |node: i64| "é".repeat(node.unsigned_abs() as usize % 5) + &node.to_string();
    match kind {
        0 => builder.numbers_in(name, &[from.cast_unsigned()], &[to.cast_unsigned()]),
        1 => builder.signed_in(name, &[from], &[to]),
        _ => builder.text_in(name, &text(from), &text(to)),
    }
}

const FRESH: [fn() -> Builder; 3] = [Builder::numbers, Builder::signed, Builder::texts];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..penstock_cases::cases(32) })]

    #[test]
    fn pieces_on_disk_make_the_index_that_memory_makes(
        edges in proptest::collection::vec((0_usize..2, -9_i64..9, -9_i64..9), 0..300),
        kind in 0_usize..3,
        memory in 1_usize..20_000,
        drop in any::<bool>(),
        far in any::<bool>(),
    ) {
        let edges = edges.into_iter().map(|(at, a, b)| if far { (at, a << 40, b << 40) } else { (at, a, b) }).collect::<Vec<_>>();
        let folder = std::env::temp_dir().join(format!("penstock-large-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let loops = if drop { Loops::Drop } else { Loops::Keep };
        for shape in SHAPES {
            let mut small = FRESH[kind]();
            let mut large = LargeBuilder::new(FRESH[kind], &folder, memory, Arc::default()).unwrap();
            for name in ["e", "f"] {
                small.relation(name, loops, Repeats::Drop);
                large.relation(name, loops);
            }
            fill(&mut |name, from, to| edge(kind, &mut small, name, from, to).unwrap(), &edges);
            fill(&mut |name, from, to| large.add(|piece| edge(kind, piece, name, from, to)).unwrap(), &edges);
            let (pieces, path) = (large.spilled(), folder.join("index"));
            prop_assert!(edges.len() * 96 < memory || edges.is_empty() || pieces > 0);
            large.finish(shape, &path).unwrap();
            prop_assert_eq!(told(&file::open(&path).unwrap()), told(&finished(small, shape)), "{:?} of {} pieces", shape, pieces);
        }
        let left = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
        prop_assert_eq!(left, vec!["index"]);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn what_cannot_be_finished_is_not_there() {
    let folder = std::env::temp_dir().join(format!("penstock-stopped-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let mut large = LargeBuilder::new(Builder::numbers, &folder, 100, stop.clone()).unwrap();
    large.relation("e", Loops::Refuse);
    (0..50).for_each(|node| large.add(|piece| piece.numbers_in("e", &[node], &[node + 1])).unwrap());
    let error = large.add(|piece| piece.numbers_in("e", &[7, 9], &[8, 9])).unwrap_err();
    assert!(error.to_string().contains("self-loop at 9"), "{error}");
    stop.store(true, Ordering::Relaxed);
    let error = large.finish(Shape::Both, &folder.join("index")).unwrap_err();
    assert!(error.to_string().contains("stopped"), "{error}");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    std::fs::remove_dir_all(&folder).unwrap();
    let missing = LargeBuilder::new(Builder::numbers, &folder.join("none"), 100, Arc::default());
    assert!(matches!(missing.err(), Some(GraphError::Io { .. })));
}

/// A folder of a test's own.
fn folder(name: &str) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("penstock-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn who_is_told_to_stop_names_no_file() {
    let folder = folder("told");
    let path = folder.join("index");
    let small = |edges: u64| {
        let mut builder = Builder::numbers();
        (0..edges).for_each(|node| builder.numbers_in("e", &[node], &[node + 1]).unwrap());
        builder.finish().unwrap()
    };
    file::save(&small(1), &path).unwrap();
    let stop = Arc::new(AtomicBool::new(true));
    let error = file::save_unless(&small(2), &path, &stop).unwrap_err().to_string();
    assert!(error.contains("stopped"), "{error}");
    for shape in SHAPES {
        let stop = Arc::new(AtomicBool::new(false));
        let mut large = LargeBuilder::new(Builder::numbers, &folder, 1 << 20, stop.clone()).unwrap();
        large.add(|piece| piece.numbers_in("e", &[1, 2], &[2, 3])).unwrap();
        assert_eq!(large.spilled(), 0, "it is built in memory");
        stop.store(true, Ordering::Relaxed);
        let error = large.finish(shape, &path).unwrap_err().to_string();
        assert!(error.contains("stopped"), "{error}");
    }
    assert_eq!(file::open(&path).unwrap().edges(), 1, "what was there is there");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn more_relations_than_a_file_has_are_refused() {
    const MOST: usize = 4096;
    let folder = folder("many");
    let path = folder.join("index");
    let says = |error: GraphError| {
        assert!(matches!(error, GraphError::TooMany { count: 4098, most: 4096, .. }), "{error}");
        assert!(error.to_string().contains("4098 relations for one index file: there may be at most 4096"), "{error}");
    };
    for shape in SHAPES {
        let (most, over) = [MOST, MOST + 2]
            .map(|count| {
                let mut builder = Builder::numbers();
                (0..count).for_each(|at| builder.relation(&format!("r{at}"), Loops::Keep, Repeats::Drop));
                builder.numbers_in("r0", &[1], &[2]).unwrap();
                finished(builder, shape)
            })
            .into();
        file::save(&most, &path).unwrap();
        assert_eq!(told(&file::open(&path).unwrap()), told(&most));
        std::fs::remove_file(&path).unwrap();
        let oriented = matches!(shape, Shape::Oriented(_));
        // All edges of an undirected graph are one relation.
        let saved = file::save(&over, &path);
        if oriented {
            saved.unwrap()
        } else {
            says(saved.unwrap_err())
        }
        for memory in [100, 1 << 24] {
            let mut large = LargeBuilder::new(Builder::numbers, &folder, memory, Arc::default()).unwrap();
            (0..MOST + 2).for_each(|at| large.relation(&format!("r{at}"), Loops::Keep));
            large.add(|piece| piece.numbers_in("r0", &[1, 2], &[2, 3])).unwrap();
            let built = large.finish(shape, &path);
            if oriented { built.unwrap() } else { says(built.unwrap_err()) }
        }
        assert_eq!(path.exists(), oriented);
        let _ = std::fs::remove_file(&path);
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    std::fs::remove_dir_all(&folder).unwrap();
}
