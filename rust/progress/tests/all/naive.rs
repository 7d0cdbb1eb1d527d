//! Naive twins: obvious implementations beside ours, compared after every operation.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::rc::Rc;

use crate::common::{Graph, Random, SmallTime};
use penstock_progress::{
    Antichain, Capability, ChangeBatch, FlowTime, GraphError, Location, Meter, MutableAntichain, Notificator,
    PartialOrder, PathSummary, Port, PostDated, Product, Source, Target, Timestamp,
};
use proptest::prelude::*;

type Pair = Product<u64, u64>;
type Triple = Product<Pair, u64>;

fn set<T: Ord + Clone>(elements: &[T]) -> BTreeSet<T> {
    assert!(elements.iter().collect::<BTreeSet<_>>().len() == elements.len(), "repeated elements");
    elements.iter().cloned().collect()
}

/// The elements that no other precedes.
fn minimal<T: PartialOrder + Ord + Clone>(times: impl IntoIterator<Item = T>) -> BTreeSet<T> {
    let times: BTreeSet<T> = times.into_iter().collect();
    times.iter().filter(|time| !times.iter().any(|other| other.less_than(time))).cloned().collect()
}

fn add<K: Ord>(counts: &mut BTreeMap<K, i64>, key: K, diff: i64) {
    *counts.entry(key).or_default() += diff;
    counts.retain(|_, count| *count != 0);
}

fn antichain<T: SmallTime>(seed: u64, count: usize) -> Result<(), TestCaseError> {
    let mut random = Random(seed);
    let times: Vec<T> = (0..count).map(|_| T::small(&mut random)).collect();
    let mut ours = Antichain::new();
    for (at, time) in times.iter().enumerate() {
        let fresh = !times[..at].iter().any(|other| other.less_equal(time));
        prop_assert_eq!(ours.insert(time.clone()), fresh);
        prop_assert_eq!(set(ours.elements()), minimal(times[..=at].iter().cloned()));
    }
    for _ in 0..8 {
        let time = T::small(&mut random);
        prop_assert_eq!(ours.less_equal(&time), times.iter().any(|other| other.less_equal(&time)));
        prop_assert_eq!(ours.less_than(&time), times.iter().any(|other| other.less_than(&time)));
    }
    let mut shuffled = times;
    for at in (1..shuffled.len()).rev() {
        shuffled.swap(at, random.below(at + 1));
    }
    prop_assert_eq!(ours, shuffled.into_iter().collect());
    Ok(())
}

/// `draw` makes times; batches of changes of both signs, negative counts included.
fn mutable<T: Timestamp>(seed: u64, steps: usize, mut draw: impl FnMut(&mut Random) -> T) -> Result<(), TestCaseError> {
    let mut random = Random(seed);
    let mut ours = MutableAntichain::<T>::new();
    let mut counts: BTreeMap<T, i64> = BTreeMap::new();
    for _ in 0..steps {
        let before = set(ours.frontier());
        let mut batch = Vec::new();
        for _ in 0..random.below(6) {
            // Half of the time take back something that is there.
            let live = (!counts.is_empty() && random.chance(50))
                .then(|| counts.iter().nth(random.below(counts.len())).map(|(time, count)| (time.clone(), -count)));
            let change = live.flatten().unwrap_or_else(|| (draw(&mut random), random.below(8) as i64 - 3));
            add(&mut counts, change.0.clone(), change.1);
            batch.push(change);
        }
        let mut reported = before.iter().map(|time| (time.clone(), 1)).collect::<BTreeMap<_, _>>();
        for (time, diff) in ours.update_iter(batch) {
            prop_assert!(diff == 1 || diff == -1);
            prop_assert_eq!(before.contains(&time), diff == -1, "net changes");
            add(&mut reported, time, diff);
        }
        let expected = minimal(counts.iter().filter(|entry| *entry.1 > 0).map(|entry| entry.0.clone()));
        prop_assert_eq!(&set(ours.frontier()), &expected);
        prop_assert_eq!(reported.into_keys().collect::<BTreeSet<_>>(), expected);
        prop_assert!(ours.frontier().is_sorted());
        let probe = draw(&mut random);
        prop_assert_eq!(ours.count_for(&probe), counts.get(&probe).copied().unwrap_or(0));
        prop_assert_eq!(ours.live(), counts.len());
        prop_assert_eq!(ours.less_equal(&probe), ours.frontier().iter().any(|time| time.less_equal(&probe)));
        prop_assert_eq!(ours.less_than(&probe), ours.frontier().iter().any(|time| time.less_than(&probe)));
    }
    Ok(())
}

/// Reachability by recomputing: the minimal images of all live pointstamps under all paths.
fn reachable<T: SmallTime>(graph: &Graph<T>, counts: &BTreeMap<(Location, T), i64>) -> BTreeMap<Location, BTreeSet<T>> {
    let mut frontiers: BTreeMap<Location, Antichain<T>> = BTreeMap::new();
    for (location, time) in counts.iter().filter(|entry| *entry.1 > 0).map(|entry| entry.0.clone()) {
        frontiers.entry(location).or_default().insert(time);
    }
    let paths = graph.paths();
    let mut changed = true;
    while changed {
        changed = false;
        for (from, to, summary) in &paths {
            for time in frontiers.get(from).cloned().unwrap_or_default() {
                if let Some(time) = summary.results_in(&time) {
                    changed |= frontiers.entry(*to).or_default().insert(time);
                }
            }
        }
    }
    frontiers.into_iter().map(|(location, antichain)| (location, set(antichain.elements()))).collect()
}

fn tracker<T: SmallTime>(seed: u64, steps: usize) -> Result<(), TestCaseError> {
    let mut random = Random(seed);
    let graph = Graph::<T>::random(&mut random, false);
    let mut ours = graph.build().expect("cycles advance by construction");
    let locations = graph.locations();
    prop_assert_eq!(ours.locations().collect::<BTreeSet<_>>(), locations.iter().copied().collect::<BTreeSet<_>>());
    let mut counts: BTreeMap<(Location, T), i64> = BTreeMap::new();
    let mut reported: BTreeMap<(Target, T), i64> = BTreeMap::new();
    for step in 0..=steps {
        let mut batch = Vec::new();
        if step == steps {
            batch.extend(counts.iter().map(|(stamp, count)| (stamp.clone(), -count)));
        }
        for _ in 0..random.below(5) * usize::from(step < steps) {
            let live = (!counts.is_empty() && random.chance(45))
                .then(|| counts.iter().nth(random.below(counts.len())).map(|(stamp, count)| (stamp.clone(), -count)));
            let location = locations[random.below(locations.len())];
            batch.push(
                live.flatten().unwrap_or_else(|| ((location, T::small(&mut random)), random.below(8) as i64 - 3)),
            );
        }
        for ((location, time), diff) in batch {
            add(&mut counts, (location, time.clone()), diff);
            match location.port {
                Port::Target(port) => ours.update_target(Target::new(location.node, port), time, diff),
                Port::Source(port) => ours.update_source(Source::new(location.node, port), time, diff),
            }
        }
        ours.propagate();
        let (expected, nothing) = (reachable(&graph, &counts), BTreeSet::new());
        for (target, time, diff) in ours.drain_changes() {
            add(&mut reported, (target, time), diff);
        }
        for target in graph.targets() {
            let frontier = set(ours.frontier(target));
            prop_assert_eq!(&frontier, expected.get(&target.into()).unwrap_or(&nothing), "{:?}", target);
            let told = reported.iter().filter(|entry| entry.0.0 == target);
            prop_assert!(told.clone().all(|entry| *entry.1 == 1));
            prop_assert_eq!(told.map(|entry| entry.0.1.clone()).collect::<BTreeSet<_>>(), frontier);
        }
        for source in graph.sources() {
            let frontier = set(ours.source_frontier(source));
            prop_assert_eq!(&frontier, expected.get(&source.into()).unwrap_or(&nothing), "{:?}", source);
        }
        prop_assert_eq!(ours.is_done(), counts.is_empty());
        prop_assert_eq!(&ours.accumulated().collect::<BTreeMap<_, _>>(), &counts);
    }
    prop_assert!(ours.is_done() && reported.is_empty());
    Ok(())
}

/// Whether some cycle consists of paths none of which is sure to advance: by closing the relation.
fn idles<T: SmallTime>(graph: &Graph<T>) -> bool {
    let identity = T::Summary::default();
    let steps: BTreeSet<(Location, Location)> =
        graph.paths().into_iter().filter(|path| !identity.less_than(&path.2)).map(|path| (path.0, path.1)).collect();
    let mut closure = steps.clone();
    loop {
        let longer: BTreeSet<_> = closure
            .iter()
            .flat_map(|&(a, b)| steps.iter().filter(move |step| step.0 == b).map(move |step| (a, step.1)))
            .collect();
        let before = closure.len();
        closure.extend(longer);
        if closure.len() == before {
            return closure.iter().any(|(a, b)| a == b);
        }
    }
}

fn refusal<T: SmallTime>(seed: u64) -> Result<(), TestCaseError> {
    let graph = Graph::<T>::random(&mut Random(seed), true);
    match graph.build() {
        Ok(_) => prop_assert!(!idles(&graph)),
        Err(GraphError::CycleDoesNotAdvance { cycle }) => {
            let identity = T::Summary::default();
            let paths = graph.paths();
            for (at, from) in cycle.iter().enumerate() {
                let to = cycle[(at + 1) % cycle.len()];
                let idle = |path: &&(Location, Location, T::Summary)| !identity.less_than(&path.2);
                prop_assert!(paths.iter().filter(idle).any(|path| path.0 == *from && path.1 == to));
            }
        }
        Err(error) => prop_assert!(false, "{}", error),
    }
    Ok(())
}

fn notificator<T: SmallTime>(seed: u64) -> Result<(), TestCaseError> {
    let mut random = Random(seed);
    let (changes, mut held) = (Rc::new(Meter::new()), ChangeBatch::new());
    let mut ours = Notificator::new();
    let mut pending: BTreeSet<T> = BTreeSet::new();
    for _ in 0..40 {
        if random.chance(60) {
            let time = T::small(&mut random);
            ours.notify_at(Capability::mint(time.clone(), Rc::clone(&changes)));
            pending.insert(time);
        }
        // Frontiers need not advance here: whatever they are, a delivery must be justified by them.
        let draw = |random: &mut Random| (0..random.below(3)).map(|_| T::small(random)).collect::<Antichain<T>>();
        let frontiers = [draw(&mut random), draw(&mut random)];
        let complete = |time: &&T| !frontiers.iter().any(|frontier| frontier.less_equal(time));
        let expected = pending.iter().find(complete).cloned();
        let slices = [frontiers[0].elements(), frontiers[1].elements()];
        let delivered = ours.next(&slices);
        prop_assert_eq!(delivered.as_ref().map(Capability::time), expected.as_ref());
        if let Some(time) = expected {
            pending.remove(&time);
        }
        drop(delivered);
        changes.collect(&mut held);
        prop_assert_eq!(
            held.iter().cloned().collect::<Vec<_>>(),
            pending.iter().map(|time| (time.clone(), 1)).collect::<Vec<_>>()
        );
    }
    while ours.next(&[]).is_some() {}
    changes.collect(&mut held);
    prop_assert!(ours.is_empty() && held.is_empty());
    Ok(())
}

fn post_dated<T: SmallTime>(seed: u64) -> Result<(), TestCaseError> {
    let mut random = Random(seed);
    let mut ours = PostDated::new();
    let mut pending: Vec<(T, u64, usize)> = Vec::new();
    for step in 0..60 {
        for _ in 0..random.below(4) {
            let time = T::small(&mut random);
            let key = random.next() % 3;
            ours.push(time.clone(), key, step);
            pending.push((time, key, step));
        }
        let frontier: Antichain<T> = (0..random.below(4)).map(|_| T::small(&mut random)).collect();
        if random.chance(20) {
            let key = random.next() % 3;
            let mut expected: Vec<_> = pending.iter().filter(|record| record.1 == key).cloned().collect();
            expected.sort_by(|a, b| a.0.cmp(&b.0));
            pending.retain(|record| record.1 != key);
            prop_assert_eq!(ours.extract(|_, held, _| *held == key), expected);
        }
        let mut expected: Vec<_> = pending.iter().filter(|record| !frontier.less_equal(&record.0)).cloned().collect();
        expected.sort_by(|a, b| a.0.cmp(&b.0));
        // Sometimes the consumer stops early: the rest must stay.
        expected.truncate(if random.chance(30) { random.below(3) } else { usize::MAX });
        let ready: Vec<_> = ours.drain_ready(frontier.elements()).take(expected.len()).collect();
        prop_assert_eq!(&ready, &expected);
        for record in &expected {
            let at = pending.iter().position(|other| other == record).expect("expected records are pending");
            pending.remove(at);
        }
        prop_assert_eq!(ours.len(), pending.len());
        prop_assert_eq!(ours.least(), pending.iter().map(|record| &record.0).min());
    }
    Ok(())
}

#[derive(Clone, Debug)]
enum Change {
    Update(u64, i64),
    Extend(Vec<(u64, i64)>),
    Compact,
    Drain,
    Pour,
    Clear,
}

fn change() -> impl Strategy<Value = Change> {
    let key = prop_oneof![0..2u64, 0..8u64, 0..500u64];
    let diff = -2..3i64;
    prop_oneof![
        20 => (key.clone(), diff.clone()).prop_map(|(key, diff)| Change::Update(key, diff)),
        6 => prop::collection::vec((key, diff), 0..120).prop_map(Change::Extend),
        2 => Just(Change::Compact),
        1 => Just(Change::Drain),
        1 => Just(Change::Pour),
        1 => Just(Change::Clear),
    ]
}

// Failures are reproduced by the values that proptest prints; no files are written.
proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..penstock_cases::cases(256) })]

    #[test]
    fn change_batches(changes in prop::collection::vec(change(), 0..80)) {
        let (mut ours, mut other) = (ChangeBatch::new(), ChangeBatch::new());
        let (mut naive, mut poured) = (BTreeMap::new(), BTreeMap::new());
        for change in changes {
            match change {
                Change::Update(key, diff) => {
                    ours.update(key, diff);
                    add(&mut naive, key, diff);
                }
                Change::Extend(changes) => {
                    changes.iter().for_each(|(key, diff)| add(&mut naive, *key, *diff));
                    ours.extend(changes);
                }
                Change::Compact => {
                    prop_assert_eq!(ours.len(), naive.len());
                    prop_assert_eq!(ours.iter().copied().collect::<Vec<_>>(), naive.clone().into_iter().collect::<Vec<_>>());
                    prop_assert!(ours.is_compact() && ours.held() == naive.len());
                }
                Change::Drain => {
                    let drained: Vec<_> = ours.drain().collect();
                    prop_assert_eq!(drained, std::mem::take(&mut naive).into_iter().collect::<Vec<_>>());
                    prop_assert!(ours.is_empty());
                }
                Change::Pour => {
                    ours.drain_into(&mut other);
                    std::mem::take(&mut naive).into_iter().for_each(|(key, diff)| add(&mut poured, key, diff));
                    prop_assert!(ours.is_empty());
                }
                Change::Clear => {
                    ours.clear();
                    naive.clear();
                }
            }
        }
        prop_assert_eq!(ours.is_empty(), naive.is_empty());
        prop_assert_eq!(ours.drain().collect::<BTreeMap<_, _>>(), naive);
        prop_assert_eq!(other.drain().collect::<BTreeMap<_, _>>(), poured);
    }

    #[test]
    fn random_pairs_vanish(keys in prop::collection::vec(any::<u64>(), 0..2000), seed in any::<u64>()) {
        let mut changes: Vec<_> = keys.iter().flat_map(|key| [(*key, 1), (*key, -1)]).collect();
        let mut random = Random(seed);
        for at in (1..changes.len()).rev() {
            changes.swap(at, random.below(at + 1));
        }
        let mut batch = ChangeBatch::new();
        batch.extend(changes);
        prop_assert!(batch.is_empty() && batch.held() == 0);
    }

    #[test]
    fn antichains(seed in any::<u64>(), count in 0..20usize) {
        antichain::<u64>(seed, count)?;
        antichain::<FlowTime>(seed, count)?;
        antichain::<Pair>(seed, count)?;
        antichain::<Triple>(seed, count)?;
    }

    #[test]
    fn mutable_antichains(seed in any::<u64>(), steps in 1..60usize) {
        mutable::<()>(seed, steps, |_| ())?;
        mutable::<u64>(seed, steps, u64::small)?;
        mutable::<FlowTime>(seed, steps, FlowTime::small)?;
        mutable::<Pair>(seed, steps, Pair::small)?;
        mutable::<Triple>(seed, steps, Triple::small)?;
        mutable::<Product<(), u64>>(seed, steps, |random| Product::new((), u64::small(random)))?;
    }

    #[test]
    fn trackers(seed in any::<u64>(), steps in 0..12usize) {
        tracker::<u64>(seed, steps)?;
        tracker::<FlowTime>(seed, steps)?;
        tracker::<Pair>(seed, steps)?;
        tracker::<Product<FlowTime, u64>>(seed, steps)?;
        tracker::<Triple>(seed, steps)?;
    }

    #[test]
    fn only_idle_cycles_are_refused(seed in any::<u64>()) {
        refusal::<u64>(seed)?;
        refusal::<FlowTime>(seed)?;
        refusal::<Pair>(seed)?;
    }

    #[test]
    fn notificators(seed in any::<u64>()) {
        notificator::<u64>(seed)?;
        notificator::<FlowTime>(seed)?;
        notificator::<Pair>(seed)?;
    }

    #[test]
    fn post_dated_records(seed in any::<u64>()) {
        post_dated::<u64>(seed)?;
        post_dated::<FlowTime>(seed)?;
        post_dated::<Pair>(seed)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..penstock_cases::cases(4) })]

    /// Enough live times, entering and leaving everywhere, that the counts take every form they have.
    #[test]
    fn large_mutable_antichains(seed in any::<u64>()) {
        let mut ours = MutableAntichain::new();
        let mut counts: BTreeMap<u64, i64> = BTreeMap::new();
        let mut random = Random(seed);
        for step in 0..if cfg!(miri) { 1_500 } else { 12_000 } {
            let growing = (step / if cfg!(miri) { 750 } else { 3000 }) % 2 == 0;
            let live = (!counts.is_empty() && random.chance(if growing { 10 } else { 95 }))
                .then(|| counts.range(random.next() % 5000..).next().map(|(time, count)| (*time, -count)));
            let (time, diff) = live.flatten().unwrap_or_else(|| (random.next() % 5000, 1));
            *counts.entry(time).or_default() += diff;
            if counts[&time] == 0 {
                counts.remove(&time);
            }
            ours.update_iter([(time, diff)]);
            prop_assert_eq!(ours.frontier().first(), counts.keys().next());
            prop_assert_eq!(ours.live(), counts.len());
        }
        prop_assert!(ours.counts().map(|(time, count)| (*time, count)).eq(counts));
    }

    /// The same under a partial order: long enough for the search tree, and back.
    #[test]
    fn large_mutable_antichains_of_pairs(seed in any::<u64>()) {
        let mut ours = MutableAntichain::new();
        let mut counts: BTreeMap<Pair, i64> = BTreeMap::new();
        let mut random = Random(seed);
        let most = if cfg!(miri) { 200 } else { 9_000 };
        for step in 0..most {
            let growing = (step / (most / 3)) % 2 == 0;
            // Mostly the front goes, so that others are exposed.
            let skip = if random.chance(80) { 0 } else { random.below(counts.len().max(1)) };
            let live = (!counts.is_empty() && random.chance(if growing { 15 } else { 97 }))
                .then(|| counts.iter().nth(skip).map(|(time, count)| (*time, -count)));
            let draw = |random: &mut Random| Product::new(random.next() % 200, random.next() % 200);
            let (time, diff) = live.flatten().unwrap_or_else(|| (draw(&mut random), random.below(8) as i64 - 1));
            *counts.entry(time).or_default() += diff;
            if counts[&time] == 0 {
                counts.remove(&time);
            }
            ours.update_iter([(time, diff)]);
            prop_assert_eq!(ours.live(), counts.len());
            if step % 16 == 0 || counts.len() < 3 {
                let live = counts.iter().filter(|entry| *entry.1 > 0).map(|entry| *entry.0);
                let expected: Antichain<Pair> = live.collect();
                prop_assert_eq!(set(ours.frontier()), set(expected.elements()));
            }
        }
        prop_assert!(ours.counts().map(|(time, count)| (*time, count)).eq(counts));
    }
}
