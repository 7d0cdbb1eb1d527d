//! From a compiled plan to a dataflow on one worker.
//!
//! Owns the shape of the graph: one input whose blocks carry the number of their source, a stream for each source, then stage by stage
//! the maps of each side, and for a keyed step the key operator of each side and one F and S for all of them; at the end a sink that files
//! output by epoch. Watermarks and epoch ends travel in the stream, each worker's own: a map passes them on, S acts on them
//! after all rows of their time.
//!
//! Invariant: at each place of the graph each mark passes once. Every source's stream has all marks; where streams meet (a union, the sides
//! of an operator) they pass along the first alone.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use arrow_select::concat::concat_batches;
use penstock_bins::{
    BinEvent, BinState, BinTable, BinsError, Block, Config, Control, ControlError, ControlInput, Meter, Moment,
    Rebuilt, Routing, Shelf, Stateful, Stats, range_of, stateful_divided,
};
use penstock_dataflow::{BoxError, InputHandle, Pipeline, Scope, Stream, Worker};
use penstock_pace::{MARK, Probes, unix_ns};
use penstock_progress::{FlowTime, ProbeHandle};

use super::chain::{self, Context, Monitors, each_rows};
use super::group::{GroupConfig, HostError};
use super::pieces::{Begin, End, Piece};
use super::record::{self, Record};
use super::resident::Resident;
use super::rows::{Keep, Rows};
use super::stats::{BinMove, Gauges, StepLoads, ranges};
use super::worker::Pace;
use crate::beside::Beside;
use crate::block::FlowBlock;
use crate::error::OpError;
use crate::keyed::KeyedSpec;
use crate::op::{Output, bytes_of};
use crate::plan::{Inlet, Origin};
use crate::state::State;

type Blocks = Stream<FlowTime, FlowBlock>;

/// Rows by epoch, kept where the host wants them.
#[derive(Clone, Default)]
pub(crate) struct ByEpoch {
    keep: Option<Arc<dyn Keep>>,
    /// Whether what is filed is weighed, for [`ByEpoch::take_worth`].
    weigh: bool,
    rows: Rc<RefCell<BTreeMap<u64, Filed>>>,
}

/// The rows of one epoch.
#[derive(Default)]
struct Filed {
    rows: Vec<Rows>,
    weight: Worth,
}

/// Rows beside the output by epoch: those of kinds that the host wants are kept, all are counted.
#[derive(Clone)]
pub(crate) struct Aside {
    kinds: Rc<Beside>,
    wanted: Rc<dyn Fn(usize) -> bool>,
    kept: ByEpoch,
    /// By kind.
    counts: Rc<RefCell<BTreeMap<u64, Vec<u64>>>>,
}

impl Aside {
    fn new(config: &GroupConfig, kinds: Rc<Beside>) -> Self {
        let wanted = config.wanted.clone();
        let wanted = Rc::new(move |kind| wanted.as_ref().is_none_or(|wanted| wanted.contains(&kind)));
        Self { kinds, wanted, kept: ByEpoch::new(config), counts: Rc::default() }
    }

    /// Files rows of a kind, as [`Beside::pack`] makes them.
    fn file(&self, epoch: u64, batch: RecordBatch) -> Result<(), BoxError> {
        if batch.num_rows() == 0 {
            return Ok(());
        }
        let kind = self.kinds.kind(&batch);
        let mut counts = self.counts.borrow_mut();
        let counts = counts.entry(epoch).or_insert_with(|| vec![0; self.kinds.kinds()]);
        counts[kind] += batch.num_rows() as u64;
        if (self.wanted)(kind) { self.kept.file(epoch, batch) } else { Ok(()) }
    }

    /// Takes rows of the first epoch that has so many, as [`ByEpoch::take_worth`].
    pub(crate) fn take_worth(&self, worth: Worth) -> Result<Option<(u64, RecordBatch)>, BoxError> {
        self.kept.take_worth(worth)
    }

    /// Takes the rows of an epoch, and how many there were of late rows and of each side output.
    pub(crate) fn take(&self, epoch: u64) -> (Vec<Rows>, Counts) {
        let mut sides = self.counts.borrow_mut().remove(&epoch).unwrap_or_else(|| vec![0; self.kinds.kinds()]);
        let late = sides.drain(..self.kinds.late_kinds()).sum();
        (self.kept.take(epoch), Counts { late, sides })
    }
}

/// How many rows went beside the output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rows that came too late.
    pub late: u64,
    /// Rows of each side output, in the order of [`Plan::side_outputs`](crate::Plan::side_outputs).
    pub sides: Vec<u64>,
}

impl ByEpoch {
    fn new(config: &GroupConfig) -> Self {
        Self { keep: config.keep.clone(), weigh: config.eager, ..Self::default() }
    }

    fn file(&self, epoch: u64, batch: RecordBatch) -> Result<(), BoxError> {
        let weight = match self.weigh && self.keep.is_none() {
            true => Worth { rows: batch.num_rows(), bytes: bytes_of(&batch) },
            false => Worth::default(),
        };
        let rows = match &self.keep {
            Some(keep) => keep.keep(batch)?,
            None => Rows::Here(batch),
        };
        let mut filed = self.rows.borrow_mut();
        let filed = filed.entry(epoch).or_default();
        filed.rows.push(rows);
        filed.weight.rows += weight.rows;
        filed.weight.bytes += weight.bytes;
        Ok(())
    }

    /// Takes all rows; only where nothing keeps them.
    pub(crate) fn take_all(&self) -> Vec<RecordBatch> {
        let filed = std::mem::take(&mut *self.rows.borrow_mut()).into_values();
        filed.flat_map(|filed| filed.rows).map(Rows::into_here).collect()
    }

    /// Takes rows of the first epoch that has so many, its first ones up to [`WORTH_TELLING`] joined to one block; only where nothing keeps them.
    pub(crate) fn take_worth(&self, worth: Worth) -> Result<Option<(u64, RecordBatch)>, BoxError> {
        let mut rows = self.rows.borrow_mut();
        let enough = |filed: &Filed| filed.weight.rows >= worth.rows || filed.weight.bytes >= worth.bytes;
        let Some(epoch) = rows.iter().find(|(_, filed)| enough(filed)).map(|(epoch, _)| *epoch) else {
            return Ok(None);
        };
        let filed = rows.get_mut(&epoch).expect("it was just found");
        let (mut taken, mut blocks) = (Worth::default(), Vec::new());
        for rows in std::mem::take(&mut filed.rows) {
            if taken.rows >= WORTH_TELLING.rows || taken.bytes >= WORTH_TELLING.bytes {
                filed.rows.push(rows);
                continue;
            }
            let batch = rows.into_here();
            (taken.rows, taken.bytes) = (taken.rows + batch.num_rows(), taken.bytes + bytes_of(&batch));
            blocks.push(batch);
        }
        filed.weight.rows = filed.weight.rows.saturating_sub(taken.rows);
        filed.weight.bytes = filed.weight.bytes.saturating_sub(taken.bytes);
        if filed.rows.is_empty() {
            rows.remove(&epoch);
        }
        Ok(joined(blocks)?.map(|batch| (epoch, batch)))
    }

    /// Takes the rows of an epoch.
    pub(crate) fn take(&self, epoch: u64) -> Vec<Rows> {
        self.rows.borrow_mut().remove(&epoch).unwrap_or_default().rows
    }
}

/// How much output is worth handing on before its epoch is complete.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Worth {
    pub(crate) rows: usize,
    pub(crate) bytes: usize,
}

/// What is handed on to a consumer who takes as he goes.
pub(crate) const WORTH_TELLING: Worth = Worth { rows: 8192, bytes: 2 << 20 };

/// Blocks as one; none of none.
pub(crate) fn joined(mut blocks: Vec<RecordBatch>) -> Result<Option<RecordBatch>, BoxError> {
    if blocks.len() < 2 {
        return Ok(blocks.pop());
    }
    let schema = blocks[0].schema();
    Ok(Some(concat_batches(&schema, &blocks).map_err(OpError::from)?))
}

/// What the workers of one process share in one generation.
pub(crate) struct Shared {
    shelf: Shelf<State>,
    local: Vec<usize>,
    bits: u8,
    ops: Vec<OpShared>,
    /// The epoch before which there was no state.
    founding: Option<u64>,
    /// Bytes already told of by `moved_bytes`.
    moved_before: AtomicU64,
}

struct OpShared {
    name: String,
    routing: Routing,
    stats: Arc<Stats<FlowTime>>,
    anchor_ns: u64,
    /// How much of the log of moves has been handed out.
    told: Mutex<usize>,
    /// Tables waiting for their workers' threads.
    tables: Mutex<HashMap<usize, BinTable<State>>>,
}

impl Shared {
    /// Hands the bins of `resident` out to the workers `local` by `config.routings`. After an error they rest as before.
    pub(crate) fn new(config: &GroupConfig, local: &[usize], resident: &mut Resident) -> Result<Self, HostError> {
        debug_assert!(config.journal || !config.record, "without marks nobody knows what an epoch changed");
        let expected = 1_usize << config.bits;
        let (given, steps) = (config.routings.len(), config.plan.keyed_ops());
        let all = config.routings.iter().map(|routing| routing.bins() as usize);
        let bins = { all }.find(|bins| *bins != expected).unwrap_or(expected);
        if given != steps || bins != expected {
            return Err(HostError::Owners { given, bins, steps, expected });
        }
        let workers = local.iter().map(|worker| *worker as u32).collect::<Vec<_>>();
        let mut routed = Vec::new();
        for (op, (keyed, routing)) in config.plan.keyed().zip(&config.routings).enumerate() {
            let name = keyed.operator.clone();
            let shelf = &resident.shelf;
            let mut bins =
                if resident.fresh { Vec::new() } else { shelf.missing(&name, config.epoch, routing, &workers)? };
            let loaded = |bin: u32| Some(resident.loaded.has(&name, range_of(bin, config.bits)?));
            bins.retain(|bin| loaded(*bin) != Some(true));
            if !bins.is_empty() {
                return Err(HostError::MissingBins { op, bins });
            }
            routed.push((keyed, name, routing.clone()));
        }
        let mut ops = Vec::new();
        for (keyed, name, routing) in routed {
            let tables = if resident.fresh {
                let new_state = || keyed.new_state(&config.callbacks);
                let fresh = |worker: &u32| (*worker, BinTable::fresh(&routing, *worker, &new_state));
                let mut tables: Vec<_> = workers.iter().map(fresh).collect();
                if config.journal {
                    tables.iter_mut().for_each(|(_, table)| table.unmark(config.epoch));
                }
                tables
            } else {
                let Rebuilt { mut tables, missing } =
                    resident.shelf.rebuild(&name, config.epoch, &routing, &workers)?;
                for bin in missing {
                    let range = range_of(bin, config.bits).ok_or(BinsError::Absent { bin })?;
                    let state = resident.loaded.take(&name, range).ok_or(BinsError::Absent { bin })?;
                    let owner = routing.owner_of(bin);
                    let (_, table) =
                        tables.iter_mut().find(|(worker, _)| *worker == owner).expect("it is missing here");
                    table.install(bin, state)?;
                }
                // As in the first generation: bins may move in idle slices before `config.epoch` is marked at its cut. Their
                // originals must not pass for those of that epoch.
                tables.iter_mut().for_each(|(_, table)| match config.journal {
                    true => table.unmark(config.epoch),
                    false => table.settle_all(),
                });
                tables
            };
            ops.push(OpShared {
                name,
                routing,
                stats: Arc::new(Stats::new()),
                anchor_ns: unix_ns(Instant::now()),
                told: Mutex::new(0),
                tables: Mutex::new(tables.into_iter().map(|(worker, table)| (worker as usize, table)).collect()),
            });
        }
        resident.drop_loaded(); // what is left of it is elsewhere
        let founding = resident.fresh.then_some(config.epoch);
        let (shelf, local, moved_before) = (resident.shelf.clone(), local.to_vec(), AtomicU64::new(0));
        Ok(Shared { shelf, local, bits: config.bits, ops, founding, moved_before })
    }

    /// What the tables have left on the shelf, once every worker has ended.
    pub(crate) fn collect(&self) -> Resident {
        let ops = self.ops.iter().map(|op| op.name.clone()).collect();
        Resident { shelf: self.shelf.clone(), fresh: false, bits: self.bits, ops, ..Resident::nothing() }
    }

    /// See [`super::Group::settle`].
    pub(crate) fn settle(&self, epoch: u64) {
        self.shelf.settle_epoch(epoch);
    }

    /// Originals of bins that are kept.
    pub(crate) fn originals(&self) -> usize {
        self.shelf.counts().1
    }

    /// Bytes of state that this process has sent or received since the last call. Only migrations move any, one at a time.
    pub(crate) fn moved_bytes(&self) -> u64 {
        let counters = self.ops.iter().map(|op| op.stats.counters());
        let total = counters.map(|counters| counters.bytes_in + counters.bytes_out).sum();
        total - self.moved_before.swap(total, Ordering::Relaxed)
    }

    /// See [`super::Group::loads`].
    pub(crate) fn loads(&self) -> Vec<StepLoads> {
        self.ops.iter().map(|op| StepLoads::of(&op.stats)).collect()
    }

    /// Log entries since the last call.
    pub(crate) fn drain_moves(&self) -> Vec<BinMove> {
        let mut moves = Vec::new();
        for (index, op) in self.ops.iter().enumerate() {
            let mut told = op.told.lock().unwrap_or_else(PoisonError::into_inner);
            let (entries, total) = op.stats.log_since(*told);
            *told = total;
            moves.extend(entries.into_iter().map(|entry| {
                BinMove {
                    op: index,
                    worker: entry.worker as u32,
                    bin: entry.bin,
                    what: match entry.what {
                        BinEvent::Prepare => "prepare",
                        BinEvent::State => "state",
                        BinEvent::Pending => "pending",
                        BinEvent::Installed => "installed",
                        BinEvent::Cut => "cut",
                    }
                    .to_owned(),
                    bytes: entry.bytes,
                    at_ns: op.anchor_ns + entry.at_ns,
                    routed_rows: entry.routed,
                }
            }));
        }
        moves
    }
}

/// One keyed step on one worker.
pub(crate) struct Op {
    pub(crate) table: Rc<RefCell<BinTable<State>>>,
    routing: Rc<RefCell<Routing>>,
    started: Rc<Cell<u64>>,
    rejected: Rc<RefCell<Vec<(FlowTime, ControlError)>>>,
    shelf: Shelf<State>,
}

/// A built plan on one worker.
pub(crate) struct Built {
    pub(crate) input: Option<InputHandle<FlowTime, FlowBlock>>,
    pub(crate) control: Option<ControlInput<FlowTime>>,
    pub(crate) probes: Probes,
    pub(crate) outputs: ByEpoch,
    pub(crate) beside: Aside,
    pub(crate) ops: Vec<Op>,
    pub(crate) monitors: Monitors,
    /// Rows that this worker was dealt, where they are.
    dealt: Option<Rc<Cell<u64>>>,
    founding: Option<u64>,
}

impl Built {
    /// Whether there is state of an earlier generation.
    pub(crate) fn goes_on(&self) -> bool {
        self.founding.is_none()
    }

    /// How often bins have been moved, split or merged, as this worker has seen it.
    pub(crate) fn changes(&self) -> u64 {
        self.ops.iter().map(|op| op.started.get()).sum()
    }

    /// Control that a keyed step has refused. It was checked before it was sent, against the bins of the first of them: others had different ones.
    pub(crate) fn rejected(&self) -> Option<ControlError> {
        self.ops.iter().find_map(|op| op.rejected.borrow().first().map(|(_, error)| error.clone()))
    }

    /// What the bins here have changed since the mark.
    pub(crate) fn record(&self, epoch: u64, out: &mut Vec<Record>) -> Result<(), BoxError> {
        let base = self.founding == Some(epoch);
        let mut ops = self.ops.iter().enumerate();
        ops.try_for_each(|(index, op)| record::take(index, &op.table.borrow(), base, out))
    }

    /// The data input; closed only by the inline host.
    pub(crate) fn input(&mut self) -> &mut InputHandle<FlowTime, FlowBlock> {
        self.input.as_mut().expect("the data input is open while blocks are fed")
    }

    /// Where the data input stands.
    pub(crate) fn time(&self) -> FlowTime {
        *self.input.as_ref().expect("the data input is open while blocks are fed").time()
    }

    /// Moves the data input forward.
    pub(crate) fn advance(&mut self, time: FlowTime) {
        self.input().advance_to(time).expect("slices and epochs ascend");
    }

    /// `epoch` begins and earlier ones are final: what is undone later is undone to here.
    pub(crate) fn mark(&self, epoch: u64) {
        for op in &self.ops {
            op.table.borrow_mut().mark_all(epoch);
        }
        if let Some(last) = epoch.checked_sub(1) {
            self.close(last);
        }
    }

    /// `epoch` is final: originals of bins that left this process in it are no longer needed.
    pub(crate) fn close(&self, epoch: u64) {
        self.ops.iter().for_each(|op| {
            op.shelf.close_epoch(epoch);
        });
    }

    /// Writes what the bins here hold, and who has which, into the worker's cells. Cost: one pass over the owned bins.
    pub(crate) fn measure(&self, gauges: &Gauges, busy: Duration) {
        let (mut bins, mut keys, mut sizes) = (Vec::new(), 0, Vec::new());
        for op in &self.ops {
            let table = op.table.borrow();
            let mut owned = Vec::with_capacity(table.len());
            for (bin, state) in table.owned() {
                keys += state.keys() as u64;
                owned.push((bin, state.bytes() as u64));
            }
            bins.push(owned.len() as u32);
            sizes.push(owned);
        }
        let bytes = sizes.iter().flatten().map(|(_, bytes)| bytes).sum();
        gauges.tell_bytes(sizes);
        let owners = self.owners();
        gauges.tell_bins(ranges(self.ops.iter().map(|op| op.routing.borrow())));
        let scopes = self.monitors.stats();
        gauges.update(|stats, current| {
            (stats.bins, stats.keys, stats.state_bytes) = (bins, keys, bytes);
            stats.busy_ns = busy.as_nanos() as u64;
            stats.scopes = scopes;
            if let Some(dealt) = &self.dealt {
                stats.rows = dealt.get();
            }
            *current = owners;
        });
    }

    /// Owner by bin, per keyed step.
    pub(crate) fn owners(&self) -> Vec<Vec<u32>> {
        self.ops.iter().map(|op| op.routing.borrow().owners().to_vec()).collect()
    }
}

pub(crate) fn pace(config: &GroupConfig) -> Pace {
    let ordered = config.plan.needs_order();
    let window = match ordered {
        false => config.window,
        true => u32::try_from(u64::from(config.window) * config.slice_rows as u64).unwrap_or(u32::MAX / 2),
    };
    Pace {
        window: window.max(1),
        // Without a journal one worker deals rows to all. What is metered is drawn as the probe moves on.
        apart: ordered && config.journal && !config.plan.is_metered(),
        journal: config.journal,
        eager: config.eager,
        record: config.record,
        one_by_one: config.one_by_one,
        gather: config.gather,
    }
}

/// Builds the whole plan, or one piece of it, on `worker`. A piece is the keyed step that it may begin with, the steps without state behind it,
/// and the assignment of rows for the keyed step that it may end at, so that the host's shuffle needs only hashes. Blocks that are fed to it carry
/// the side of that first step.
///
/// # Errors
/// The bins of this worker do not fit the routing.
pub(crate) fn build(
    worker: &mut Worker,
    config: &GroupConfig,
    shared: &Shared,
    piece: Option<Piece>,
) -> Result<Built, HostError> {
    worker.dataflow::<FlowTime, _>("flow", |scope| build_in(scope, config, shared, piece))
}

fn build_in(
    scope: &mut Scope<FlowTime>,
    config: &GroupConfig,
    shared: &Shared,
    piece: Option<Piece>,
) -> Result<Built, HostError> {
    let (mut input, blocks) = scope.new_input::<FlowBlock>();
    let (mut control, commands) = scope.new_input::<Vec<Control>>();
    if !scope.joins() {
        let start = FlowTime::new(config.epoch, 0);
        input.advance_to(start).expect("the first time is the least");
        control.advance_to(start).expect("the first time is the least");
    }
    let (input_probe, blocks) = blocks.probe();
    let dealt = config.gather.then(Rc::default);
    let blocks = dealt.iter().cloned().fold(blocks, |blocks, rows| chain::dealt(&blocks, rows));
    let (control_probe, commands) = commands.probe();
    let kinds = Rc::new(Beside::of(&config.plan));
    let beside = Aside::new(config, kinds.clone());
    let (mut ops, mut apart) = (Vec::new(), Vec::new());
    let monitors = Monitors::default();
    let yields = !config.plan.is_metered();
    let context = Context { callbacks: &config.callbacks, monitors: &monitors, beside: &kinds, yields };
    let begin = piece.map(|piece| piece.begin);
    // What is not in the piece has no stream.
    let sources: Vec<Option<Blocks>> = match begin {
        None => chain::sources(&blocks, config.plan.sources().len()).into_iter().map(Some).collect(),
        Some(begin) => {
            let count = config.plan.sources().len();
            (0..count).map(|number| (begin == Begin::Source(number)).then(|| blocks.clone())).collect()
        }
    };
    let (mut stages, mut ended, mut op) = (Vec::<Option<Blocks>>::new(), None, 0);
    for stage in config.plan.stages() {
        let begins_here = begin == Some(Begin::Keyed(op)) && stage.keyed.is_some();
        let sides: Vec<Option<Blocks>> = match begins_here {
            true => chain::sources(&blocks, stage.inlets.len()).into_iter().map(Some).collect(),
            false => {
                let enter = |inlet| entered(inlet, &sources, &stages, &context, &mut apart);
                stage.inlets.iter().map(enter).collect()
            }
        };
        let Some(keyed) = &stage.keyed else {
            stages.extend(sides);
            continue;
        };
        let number = op;
        op += 1;
        let assign = |(side, blocks): (usize, &Option<Blocks>)| Some(assigned(blocks.as_ref()?, keyed.side(side)));
        if let Some(Piece { end: End::Keyed { op, side }, .. }) = piece
            && op == number
        {
            ended = assign((side, &sides[side]));
            break;
        }
        if piece.is_some() && !begins_here {
            stages.push(None); // behind an exchange of another piece
            continue;
        }
        let sides: Vec<Blocks> = match begins_here {
            true => sides.into_iter().flatten().collect(),
            false => sides.iter().enumerate().filter_map(assign).collect(),
        };
        let Stateful { output, table, routing, started, rejected, .. } =
            keyed_step(&sides, &commands, config, shared, (number, keyed), beside.clone())?;
        ops.push(Op { table, routing, started, rejected, shelf: shared.shelf.clone() });
        let output = if config.gather { chain::without_beside(&output, &mut apart) } else { output };
        stages.push(Some(output));
    }
    let output = ended.or_else(|| stages.pop().flatten()).expect("a piece leads where it ends");
    let all = std::iter::once(output).chain(apart);
    let output = if config.gather { chain::gathered(all) } else { chain::together(all) };
    // All keyed steps see the same control, with the same bins and workers.
    let routing = match shared.ops.first() {
        Some(op) => op.routing.clone(),
        None => Routing::new(config.bits, scope.peers())?,
    };
    let control = match config.gather {
        true => ControlInput::among(control, routing, scope),
        false => ControlInput::new(control, routing, scope.peers()),
    };
    let outputs = ByEpoch::new(config);
    let probes =
        Probes { input: input_probe, control: control_probe, output: filed(&output, outputs.clone(), beside.clone()) };
    Ok(Built {
        input: Some(input),
        control: Some(control),
        probes,
        outputs,
        beside,
        ops,
        monitors,
        dealt,
        founding: shared.founding,
    })
}

/// What enters a stage on one side, behind its steps without state; nothing where none of it is in the piece.
fn entered(
    inlet: &Inlet,
    sources: &[Option<Blocks>],
    stages: &[Option<Blocks>],
    context: &Context<'_>,
    beside: &mut Vec<Blocks>,
) -> Option<Blocks> {
    let from = inlet.from.iter().filter_map(|origin| match origin {
        Origin::Source(number) => sources[*number].as_ref(),
        Origin::Stage(number) => stages[*number].as_ref(),
    });
    let from: Vec<&Blocks> = from.collect();
    (!from.is_empty()).then(|| chain::stage(chain::merged(from.into_iter(), &inlet.input), &inlet.pre, context, beside))
}

fn assigned(blocks: &Blocks, keyed: KeyedSpec) -> Blocks {
    blocks.unary(Pipeline, &format!("assign {}", keyed.step), |_| {
        // The last epoch that has ended here, and the watermark by then: operators have none that is greater before they have seen rows of the next epoch.
        let (mut ended, mut watermark) = (None, None);
        move |input, output, _| {
            while let Some((capability, block)) = input.next() {
                let epoch = capability.time().epoch;
                let block = match block {
                    FlowBlock::Rows { batch, .. } => {
                        let known = watermark.filter(|_| ended.is_some_and(|ended: u64| ended + 1 >= epoch));
                        for part in keyed.parts(batch) {
                            let block = FlowBlock::rows(match known {
                                Some(watermark) => keyed.assign_after(&part, watermark)?,
                                None => keyed.assign(&part)?,
                            });
                            if !block.is_empty() {
                                output.session(&capability).give(block);
                            }
                        }
                        continue;
                    }
                    FlowBlock::Watermark(reached) => {
                        watermark = watermark.max(Some(reached));
                        block
                    }
                    FlowBlock::EndEpoch => {
                        ended = Some(epoch);
                        block
                    }
                    other => other,
                };
                if !block.is_empty() {
                    output.session(&capability).give(block);
                }
            }
            Ok(())
        }
    })
}

type Keyed = Stateful<FlowTime, State, FlowBlock>;

/// Hashes the keys of each side, routes by bin, applies in time order.
fn keyed_step(
    sides: &[Blocks],
    commands: &Stream<FlowTime, Vec<Control>>,
    config: &GroupConfig,
    shared: &Shared,
    (number, keyed): (usize, &KeyedSpec),
    beside: Aside,
) -> Result<Keyed, HostError> {
    let op = &shared.ops[number];
    let hashed = (0..).zip(sides).map(|(side, blocks): (u8, _)| {
        let spec = keyed.side(side.into());
        each_rows(blocks, &format!("key {}", keyed.step), move |batch| {
            let hashes = spec.hashes(&batch)?;
            Ok(FlowBlock::keyed(spec.carry(batch)?, hashes).of(side))
        })
    });
    let hashed = chain::together(hashed);
    let index = hashed.scope().index();
    let table = op.tables.lock().unwrap_or_else(PoisonError::into_inner).remove(&index);
    let table = table.expect("each local worker takes its table once");
    let local = shared.local.clone();
    let (spec, callbacks, journal) = (keyed.clone(), config.callbacks.clone(), config.journal);
    let gather = config.gather;
    let side_kinds: Vec<usize> = keyed.sides().iter().map(|side| beside.kinds.side(&side.name)).collect();
    let bins = Config {
        name: op.name.clone(),
        routing: op.routing.clone(),
        table: Rc::new(RefCell::new(table)),
        shelf: shared.shelf.clone(),
        local: Rc::new(move |worker| local.contains(&worker)),
        new_state: Rc::new(move || spec.new_state(&callbacks)),
        // Without marks nothing tells an original from what became of its copy.
        begins: Rc::new(move |time: &FlowTime| (journal && time.slice < MARK).then_some(time.epoch)),
        record: config.record,
        ship_bytes: config.ship_bytes,
        hot_first: true,
        stats: op.stats.clone(),
    };
    let mut meter = Meter::new(op.stats.clone(), config.bits);
    let mut operator = keyed.operator(&config.callbacks)?;
    if let Some(watermark) = config.watermark {
        operator.resume(watermark);
    }
    // Marks of a time that is not done: they leave when it is.
    let mut marks = Vec::new();
    let logic = move |moment: Moment<'_, FlowTime, FlowBlock, State, (), FlowBlock>| -> Result<(), BoxError> {
        let began = Instant::now();
        let Moment { time, blocks, bins, out, again, .. } = moment;
        let mut refused = None;
        // Of which side what is made is: rows are late as they come.
        let own = Cell::new(0);
        let mut made = |output| {
            let (kind, batch) = match output {
                Output::Rows(batch) => return out.give(FlowBlock::rows(batch)),
                Output::Late(batch) => (beside.kinds.late(number, own.get()), batch),
                Output::Side(side, batch) => (side_kinds[side], batch),
            };
            let packed = beside.kinds.pack(kind, batch).map_err(BoxError::from);
            let filed = packed.and_then(|batch| match gather {
                true => {
                    out.give(FlowBlock::rows(batch).of(chain::BESIDE));
                    Ok(())
                }
                false => beside.file(time.epoch, batch),
            });
            if let Err(error) = filed {
                refused.get_or_insert(error);
            }
        };
        let mut blocks = blocks.into_iter();
        while let Some(block) = blocks.next() {
            match block {
                FlowBlock::Rows { batch, hashes, side } => {
                    own.set(usize::from(side));
                    let done = operator.apply_some(bins, side.into(), &batch, &hashes, &mut made)?;
                    if done < batch.num_rows() {
                        let rest = batch.slice(done, batch.num_rows() - done);
                        again.push(FlowBlock::keyed(rest, hashes[done..].to_vec()).of(side));
                    }
                }
                FlowBlock::Watermark(watermark) => match operator.watermark_some(bins, watermark, &mut made)? {
                    true => marks.push(FlowBlock::Watermark(watermark)),
                    false => again.push(FlowBlock::Watermark(watermark)),
                },
                FlowBlock::Clock(clock) => {
                    operator.clock(clock);
                    marks.push(FlowBlock::Clock(clock));
                }
                FlowBlock::EndEpoch => {
                    operator.end_epoch(bins, &mut made)?;
                    marks.push(FlowBlock::EndEpoch);
                }
                FlowBlock::Begin(watermark) => {
                    operator.resume(watermark);
                    marks.push(FlowBlock::Begin(watermark));
                }
            }
            if !again.is_empty() {
                again.extend(blocks);
                break;
            }
        }
        if again.is_empty() {
            marks.drain(..).for_each(|mark| out.give(mark));
        }
        let own = operator.own_costs();
        meter.meet(&own.met, bins.is_split().then_some(|hash| bins.bin_of(hash)));
        meter.spend(began.elapsed(), &own.spent);
        refused.map_or(Ok(()), Err)
    };
    // Nothing is post-dated: timers are in the bins.
    Ok(stateful_divided(&hashed, commands, bins, Some(Rc::new(|(): &()| 0)), logic)?)
}

/// Files rows by epoch and probes what has been filed.
fn filed(blocks: &Blocks, outputs: ByEpoch, beside: Aside) -> ProbeHandle<FlowTime> {
    let filed = blocks.unary::<(), _>(Pipeline, "output", |_| {
        move |input, _, _| {
            while let Some((capability, block)) = input.next() {
                if let FlowBlock::Rows { batch, side, .. } = block {
                    let epoch = capability.time().epoch;
                    match side {
                        chain::BESIDE => beside.file(epoch, batch)?,
                        _ => outputs.file(epoch, batch)?,
                    }
                }
            }
            Ok(())
        }
    });
    filed.probe().0
}
