//! Groups of workers in threads and processes, and what tests feed them.
#![allow(dead_code, unreachable_pub)] // each test binary uses a part of it

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use crossbeam::channel::{Receiver, unbounded};
use penstock_bins::{Command, Routing, bin, range_of};
use penstock_dataflow::fabric::{self, Duplex};
use penstock_dataflow::{Endpoint, FabricGuard, FabricTag, Limits};
use penstock_files::{File, Range, Segment, select, write};
use penstock_plan::host::{Event, Group, GroupConfig, HostError, Loaded, PartitionRows, Record, Resident, Rows};
use penstock_plan::{Callbacks, Plan};

pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn rows(columns: &[&str], values: &[Vec<i64>]) -> RecordBatch {
    let column = |at: usize| -> ArrayRef { Arc::new(Int64Array::from_iter_values(values.iter().map(|row| row[at]))) };
    RecordBatch::try_from_iter(columns.iter().enumerate().map(|(at, name)| (*name, column(at)))).unwrap()
}

pub fn read(batches: &[RecordBatch]) -> Vec<Vec<i64>> {
    let mut all = Vec::new();
    for batch in batches {
        for row in 0..batch.num_rows() {
            let value = |column: &ArrayRef| column.as_primitive::<Int64Type>().value(row);
            all.push(batch.columns().iter().map(value).collect());
        }
    }
    all
}

/// What all workers tell of an epoch.
#[derive(Debug, Default)]
pub struct Done {
    pub rows: Vec<RecordBatch>,
    pub beside: Vec<RecordBatch>,
    pub records: Vec<Record>,
}

/// Groups of one or more processes that work on one query.
pub struct Cluster {
    pub groups: Vec<(Group, Receiver<Event>)>,
    _guards: Vec<FabricGuard>,
    workers: usize,
}

pub fn endpoints(processes: usize, threads: usize, generation: u64) -> (Vec<Vec<Endpoint>>, Vec<FabricGuard>) {
    if processes == 1 {
        return (vec![fabric::threads(threads)], Vec::new());
    }
    let mut streams: Vec<Vec<Option<Box<dyn Duplex>>>> = Vec::new();
    streams.resize_with(processes, || (0..processes).map(|_| None).collect());
    for (a, b) in (0..processes).flat_map(|a| (a + 1..processes).map(move |b| (a, b))) {
        let (left, right) = UnixStream::pair().unwrap();
        streams[a][b] = Some(Box::new(left));
        streams[b][a] = Some(Box::new(right));
    }
    let tag = FabricTag { query: 1, generation };
    // So little room that every other slice has to wait for some.
    let limits = Limits { link_bytes: 512, ..Limits::default() };
    let made = streams.into_iter().enumerate();
    let made = made.map(|(p, streams)| fabric::processes_with(p, threads, streams, tag, limits).unwrap());
    made.unzip()
}

impl Cluster {
    pub fn start(
        config: &GroupConfig,
        processes: usize,
        threads: usize,
        generation: u64,
        residents: Vec<Resident>,
    ) -> Self {
        let (endpoints, guards) = endpoints(processes, threads, generation);
        let groups = endpoints.into_iter().zip(residents).map(|(endpoints, resident)| {
            let (events, inbox) = unbounded();
            (Group::start(config.clone(), endpoints, resident, events).unwrap(), inbox)
        });
        Cluster { groups: groups.collect(), _guards: guards, workers: processes * threads }
    }

    /// Deals `values` to the processes, partition by partition, and releases them.
    pub fn release(&self, epoch: u64, columns: &[&str], values: &[Vec<i64>], watermark: Option<i64>) {
        let share = values.len().div_ceil(self.groups.len()).max(1);
        for (p, (group, _)) in self.groups.iter().enumerate() {
            let (from, to) = ((p * share).min(values.len()), ((p + 1) * share).min(values.len()));
            let batches = vec![rows(columns, &values[from..to]).into()];
            let input = PartitionRows { source: 0, partition: p as u32, batches, rows_before: from as u64 };
            group.release(epoch, vec![input], watermark).unwrap();
        }
    }

    /// Releases blocks of some sources in the process of their partition.
    pub fn release_of(&self, epoch: u64, blocks: &[(u8, RecordBatch)], watermark: Option<i64>) {
        for (p, (group, _)) in self.groups.iter().enumerate() {
            let mine = blocks.iter().enumerate().filter(|(at, _)| at % self.groups.len() == p);
            let input = mine.map(|(at, (source, block))| PartitionRows {
                source: *source,
                partition: at as u32,
                batches: vec![block.clone().into()],
                rows_before: blocks[..at].iter().map(|(_, block)| block.num_rows() as u64).sum(),
            });
            group.release(epoch, input.collect(), watermark).unwrap();
        }
    }

    /// Waits until every worker has completed `epoch`, in which no row is late; counts completed migrations on the way.
    pub fn complete(&self, epoch: u64, migrated: &mut usize) -> Result<Vec<RecordBatch>, HostError> {
        let done = self.done(epoch, migrated)?;
        assert_eq!(done.beside.iter().map(RecordBatch::num_rows).sum::<usize>(), 0, "late rows in epoch {epoch}");
        Ok(done.rows)
    }

    /// Waits until every worker has completed `epoch`; counts completed migrations on the way.
    pub fn done(&self, epoch: u64, migrated: &mut usize) -> Result<Done, HostError> {
        let mut all = Done::default();
        for (group, inbox) in &self.groups {
            let mut left = self.workers / self.groups.len();
            while left > 0 {
                match inbox
                    .recv_timeout(PATIENCE)
                    .unwrap_or_else(|_| panic!("epoch {epoch} hangs: {:?}", group.stats()))
                {
                    Event::EpochDone { epoch: done, outputs, beside, record, .. } => {
                        assert_eq!(done, epoch);
                        all.rows.extend(outputs.into_iter().map(Rows::into_here));
                        all.beside.extend(beside.into_iter().map(Rows::into_here));
                        all.records.extend(record);
                        left -= 1;
                    }
                    Event::MigrationDone { .. } => *migrated += 1,
                    Event::MigrationRefused { error, .. } => panic!("a good migration was refused: {error}"),
                    Event::Failed { error } => return Err(error),
                    Event::Rows { .. } => panic!("nobody asked for rows of an epoch under way"),
                }
            }
        }
        Ok(all)
    }

    /// Asks for migrations, splits and merges.
    pub fn ask(&self, handle: u64, deeds: &[Deed]) {
        for deed in deeds {
            match deed {
                Deed::Moves(steps) => self.groups[0].0.migrate(handle, steps.clone(), None),
                Deed::Recut(commands) => self.groups[0].0.recut(handle, commands.clone()),
            }
        }
    }

    /// Waits while no epoch is under way until so many migrations, splits and merges are complete.
    pub fn rest(&self, asked: usize, migrated: &mut usize) {
        while *migrated < asked {
            match self.groups[0].1.recv_timeout(PATIENCE).expect("an idle one finishes") {
                Event::MigrationDone { .. } => *migrated += 1,
                other => panic!("{other:?}"),
            }
        }
    }

    pub fn stop(self) -> (Vec<Resident>, Vec<HostError>) {
        for (group, _) in &self.groups {
            group.ask_to_stop();
        }
        let (residents, errors): (Vec<_>, Vec<_>) = self.groups.into_iter().map(|(group, _)| group.stop()).unzip();
        // A process that ends first is lost to the others: with several processes that is how a stop looks.
        let told = |error: &HostError| {
            use penstock_dataflow::Error::{Aborted, PeerLost};
            !matches!(error, HostError::Dataflow(PeerLost { .. } | Aborted { .. }))
        };
        (residents, errors.into_iter().flatten().filter(told).collect())
    }
}

pub fn config(plan: &Arc<Plan>, callbacks: &Arc<dyn Callbacks>, workers: usize) -> GroupConfig {
    let mut config = GroupConfig::founding(plan.clone(), callbacks.clone(), 4, workers as u32);
    config.slice_rows = 50;
    config.window = 4;
    config
}

pub fn fresh(processes: usize) -> Vec<Resident> {
    (0..processes).map(|_| Resident::fresh()).collect()
}

/// A deterministic stream of numbers.
pub struct Random(pub u64);

impl Random {
    /// Seeds that follow one another differ from the first number on.
    pub fn seeded(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5eed);
        (0..4).for_each(|_| _ = random.below(2));
        random
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }
}

pub fn moves(random: &mut Random, workers: usize, strategy: u64) -> Vec<Vec<(u32, u32)>> {
    let mut all = Vec::new();
    for bin in 0..16 {
        if random.below(2) == 0 {
            all.push((bin, random.below(workers as u64) as u32));
        }
    }
    match strategy {
        0 => vec![all],
        1 => all.chunks(3).map(<[_]>::to_vec).collect(),
        _ => all.into_iter().map(|step| vec![step]).collect(),
    }
}

/// A migration, or bins that are split or merged.
pub enum Deed {
    Moves(Vec<Vec<(u32, u32)>>),
    Recut(Vec<Command>),
}

/// Splits, moves and merges in the order in which they take their turns; `routing` is where they lead.
pub fn deeds(random: &mut Random, routing: &mut Routing, workers: usize) -> Vec<Deed> {
    let bits = routing.bits();
    let mut deeds = Vec::new();
    for _ in 0..random.below(4) {
        let present: Vec<(u32, u32)> = routing.bins_owned().collect();
        let whole_of = |part: u32| bin(range_of(part, bits).unwrap().first(), bits);
        let mut pick = || present[random.below(present.len() as u64) as usize].0;
        let some: Vec<u32> = (0..12).map(|_| pick()).collect();
        let mut doing = Vec::new();
        match random.below(4) {
            0 | 1 => {
                let fine = some.into_iter().filter(|bin| range_of(*bin, bits).unwrap().length() < 10);
                let fine = fine.map(|bin| (bin, 1 + bin as u8 % 4)).collect::<BTreeMap<u32, u8>>();
                doing.push(Deed::Recut(fine.into_iter().map(|(bin, bits)| Command::Split { bin, bits }).collect()));
            }
            2 => {
                let moves = some.into_iter().map(|bin| (bin, random.below(workers as u64) as u32));
                let moves = moves.collect::<BTreeMap<_, _>>().into_iter().collect::<Vec<_>>();
                doing.push(Deed::Moves(moves.chunks(5).map(<[_]>::to_vec).collect()));
            }
            _ => {
                let whole = whole_of(some.iter().copied().max().unwrap());
                let parts = present.iter().filter(|(part, _)| whole_of(*part) == whole);
                let parts: Vec<_> = parts.map(|(part, _)| (*part, whole % workers as u32)).collect();
                if parts.len() > 1 {
                    doing.push(Deed::Moves(vec![parts]));
                    doing.push(Deed::Recut(vec![Command::Merge { bin: whole }]));
                }
            }
        }
        for deed in &doing {
            let commands: Vec<Command> = match deed {
                Deed::Recut(commands) => commands.clone(),
                Deed::Moves(steps) => {
                    steps.iter().flatten().map(|&(bin, worker)| Command::Move { bin, worker }).collect()
                }
            };
            commands.iter().for_each(|command| drop(routing.apply(command).unwrap()));
        }
        deeds.append(&mut doing);
    }
    deeds
}

/// What an epoch changed, as a file.
pub fn file(plan: &Plan, epoch: u64, records: Vec<Record>) -> File<Vec<u8>> {
    let names: Vec<&str> = plan.keyed().map(|keyed| keyed.operator.as_str()).collect();
    let segments = records.into_iter().map(|Record { op, range, base, chunks }| {
        Ok::<_, Infallible>(Segment { operator: names[op].into(), range, base, chunks })
    });
    let bytes = write(segments).flat_map(Result::unwrap).collect::<Vec<_>>();
    File::open(format!("data-{epoch}"), bytes).unwrap()
}

/// Bins of these ranges, of all operators, from files.
pub fn loaded(
    plan: &Plan,
    calls: &Arc<dyn Callbacks>,
    files: &[File<Vec<u8>>],
    ranges: impl Iterator<Item = Range>,
) -> Resident {
    let (mut resident, mut all) = (Resident::nothing(), Loaded::default());
    for range in ranges {
        for keyed in plan.keyed() {
            all.load(plan, calls, &keyed.operator, range, select(files, &keyed.operator, range)).unwrap();
        }
    }
    resident.keep(all);
    resident
}
