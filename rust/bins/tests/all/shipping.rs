//! Bins that leave their process: how much of them is under way, and what happens when one cannot be encoded.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use crate::common::fleet::{self, Layout};
use crate::common::hash;
use penstock_bins::{
    BinState, BinTable, BinsError, Command, Config, ControlInput, Encoding, Keyed, Moment, Routing, Shelf, StateError,
    bin, stateful,
};
use penstock_dataflow::Error;

const BITS: u8 = 4;
const BINS: u64 = 1 << BITS;
const CHUNK: usize = 1000;

/// Bytes that were encoded and not absorbed: now, and the most that there were.
#[derive(Default)]
struct Gauge {
    now: AtomicI64,
    most: AtomicI64,
}

/// A state of many chunks, which may be unable to make one of them.
struct Heavy {
    gauge: Arc<Gauge>,
    chunks: u64,
    broken_at: Option<u64>,
}

impl BinState for Heavy {
    fn encode(&self, encoding: &mut Encoding) -> Result<Option<Vec<u8>>, StateError> {
        let next = encoding.place(|| 0u64);
        if self.broken_at == Some(*next) {
            return Err(StateError::new(format!("chunk {next} is beyond words")));
        }
        if *next == self.chunks {
            return Ok(None);
        }
        *next += 1;
        let now = self.gauge.now.fetch_add(CHUNK as i64, Relaxed) + CHUNK as i64;
        self.gauge.most.fetch_max(now, Relaxed);
        Ok(Some(vec![7; CHUNK]))
    }
    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateError> {
        self.gauge.now.fetch_sub(chunk.len() as i64, Relaxed);
        self.chunks += 1;
        Ok(())
    }
    fn bytes(&self) -> usize {
        self.chunks as usize * CHUNK
    }
    fn keys(&self) -> usize {
        self.chunks as usize
    }
    fn mark(&mut self) {}
    fn rollback(&mut self) -> Result<(), StateError> {
        Ok(())
    }
}

struct Outcome {
    results: Vec<Result<u64, Error>>,
    gauge: Arc<Gauge>,
    shelves: Vec<Shelf<Heavy>>,
}

/// All bins go to the last worker at time 5, of an epoch that all tables have marked. The results: chunks held at the end.
fn all_go(layout: Layout, ship_bytes: usize, chunks: u64, broken: Option<(u32, u64)>) -> Outcome {
    let gauge = Arc::new(Gauge::default());
    let shelves = fleet::shelves::<Heavy>(layout);
    let measured = Arc::clone(&gauge);
    let (results, _) = fleet::run::<Heavy, u64>(layout, &shelves, move |worker, process| {
        let routing = Routing::new(BITS, worker.peers())?;
        let (here, index) = (layout.process_of(worker.index()), worker.index());
        let gauge = Arc::clone(&measured);
        let made = move |chunks| Heavy { gauge: Arc::clone(&gauge), chunks, broken_at: None };
        let mut table = BinTable::fresh(&routing, index as u32, &|| made(chunks));
        if let Some((bin, at)) = broken
            && let Some(state) = table.get_mut(bin)
        {
            state.broken_at = Some(at);
        }
        table.mark_all(3);
        let config = Config {
            name: "heavy".into(),
            routing: routing.clone(),
            table: std::rc::Rc::new(std::cell::RefCell::new(table)),
            shelf: process.shelf.clone(),
            local: std::rc::Rc::new(move |other| layout.process_of(other) == here),
            new_state: std::rc::Rc::new({
                let gauge = Arc::clone(&measured);
                move || Heavy { gauge: Arc::clone(&gauge), chunks: 0, broken_at: None }
            }),
            begins: std::rc::Rc::new(|_| None),
            record: false,
            ship_bytes,
            hot_first: true,
            stats: Arc::clone(&process.stats),
        };
        let (mut data, control, counts) = worker.dataflow::<u64, _>("heavy", |scope| {
            let (data, blocks) = scope.new_input::<Keyed<u64, u64>>();
            let (control, commands) = scope.new_input();
            let logic = move |moment: Moment<'_, u64, Keyed<u64, u64>, Heavy, (), u64>| {
                for (key, _) in moment.blocks.iter().flat_map(|block| block.rows()) {
                    moment.bins.get_mut(bin(hash(key), BITS)).ok_or("bin elsewhere")?;
                }
                Ok(())
            };
            let counts = stateful(&blocks, &commands, config, logic)?;
            Ok::<_, BinsError>((data, control, counts))
        })?;
        let mut control = ControlInput::new(control, routing, worker.peers());
        if index == 0 {
            control.schedule(5, vec![Command::Map(vec![worker.peers() as u32 - 1; BINS as usize])])?;
        }
        control.close();
        for time in 0..10 {
            data.advance_to(time)?;
            data.send(Keyed::new((0..100).map(|key| (key, time)).collect(), hash));
            worker.step()?;
        }
        data.close();
        while worker.step_or_park(None)? {}
        let held = counts.table.borrow().owned().map(|(_, state)| state.chunks).sum();
        Ok(held)
    });
    Outcome { results, gauge, shelves }
}

const LAYOUTS: [Layout; 4] = [
    Layout::Apart { processes: 2, threads: 1 },
    Layout::Apart { processes: 3, threads: 2 },
    Layout::Tcp { processes: 2, threads: 1 },
    Layout::Tcp { processes: 2, threads: 2 },
];

/// However much moves at once, what is encoded and not yet taken in stays within the budget of each sender, and one chunk.
#[test]
fn state_under_way_stays_within_the_budget() {
    for layout in LAYOUTS {
        for ship_bytes in [0, 1, 8 * CHUNK, 1 << 20] {
            let Outcome { results, gauge, .. } = all_go(layout, ship_bytes, 30, None);
            let held: u64 = results.into_iter().map(Result::unwrap).sum();
            assert_eq!(held, BINS * 30, "{layout:?}, {ship_bytes}");
            let senders = (layout.workers() - layout.threads()) as i64;
            let most = gauge.most.load(Relaxed);
            assert!(most > 0, "nothing was encoded");
            assert!(
                most <= senders * (ship_bytes + CHUNK) as i64,
                "{layout:?}: {most} bytes under way with a budget of {ship_bytes} for each of {senders}"
            );
            assert_eq!(gauge.now.load(Relaxed), 0, "all of it was taken in");
        }
    }
}

/// A bin that cannot be encoded, whichever it is and however far it is, ends all workers with the reason, and every bin is still
/// somewhere as it was.
#[test]
fn a_bin_that_cannot_be_encoded_ends_the_workers_and_costs_no_bin() {
    let layout = Layout::Apart { processes: 2, threads: 2 };
    let routing = Routing::new(BITS, layout.workers()).unwrap();
    let leaves = (0..BINS as u32).filter(|bin| layout.process_of(routing.owner_of(*bin) as usize) == 0);
    for broken in leaves {
        for at in [0, 1, 3] {
            for ship_bytes in [0, 1 << 20] {
                let Outcome { results, shelves, .. } = all_go(layout, ship_bytes, 3, Some((broken, at)));
                for result in results {
                    let Err(Error::Operator { source, .. }) = result else { panic!("{result:?}") };
                    let Some(BinsError::Encode { bin, source }) = source.downcast_ref() else { panic!("{source:?}") };
                    assert_eq!((*bin, source.to_string()), (broken, format!("chunk {at} is beyond words")));
                }
                let mut there = BTreeSet::new();
                for (process, shelf) in shelves.iter().enumerate() {
                    let workers: Vec<u32> =
                        (0..4).filter(|worker| layout.process_of(*worker as usize) == process).collect();
                    let rebuilt = shelf.rebuild("heavy", 3, &routing, &workers).unwrap();
                    assert_eq!(rebuilt.missing, [] as [u32; 0], "process {process}, bin {broken} at {at}");
                    for (_, table) in rebuilt.tables {
                        for (bin, state) in table.owned() {
                            assert_eq!(state.chunks, 3, "bin {bin}");
                            assert!(there.insert(bin));
                        }
                    }
                }
                assert_eq!(there.len() as u64, BINS);
            }
        }
    }
}
