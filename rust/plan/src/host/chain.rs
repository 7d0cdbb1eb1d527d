//! Steps without state on one worker: operators, and scopes for what is metered or goes around.
//!
//! A bounded part is a bounded scope, a loop a scope with a feedback. A flat map is the expansion at the ingress of a bounded scope that
//! reaches to the end of its chain: so what it makes is drawn only as the window allows, wherever it stands, under the
//! bounds of the part around it, and a flat map behind another one holds what waits before it to N batches of B rows. One
//! that begins a bounded part is that part's own ingress.
//!
//! Invariants
//! - What a function puts beside its rows leaves each scope as they do, by a way of its own, and no other step sees it.
//! - Only rows enter: watermarks and ends of epochs pass beside, at their time, which is that of no row.
//! - Nothing is exchanged, and without loops rows leave in the order in which they came: pieces of a batch, batches of a time and times
//!   are handed out one after the other, and every edge keeps their order.
//! - A loop stands in a scope of its own, so no path advances a batch.
//! - What leaves a stage with such steps, and what waits in one before a scope in a scope, is in memory of its own.
//!
//! Departure: what leaves a metered stage is copied once, since an array from Python keeps everything alive that came
//! with it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_array::cast::AsArray;
use arrow_array::{BooleanArray, RecordBatch, RecordBatchOptions};
use arrow_schema::SchemaRef;
use arrow_select::concat::concat_batches;
use arrow_select::filter::filter_record_batch;
use penstock_bins::Block;
use penstock_bounded::{BatchTime, Broken, Expand, Faucet, Fault, Monitor, OnFailure};
use penstock_dataflow::{BoxError, OperatorBuilder, Pipeline, Scope, Stream};
use penstock_progress::FlowTime;
use penstock_progress::nest::Nest;
use penstock_progress::timestamp::{FlowSummary, Product, Timestamp};

use super::stats::ScopeStats;
use crate::beside::Beside;
use crate::block::FlowBlock;
use crate::callback::{Callbacks, Expansion, SideRows};
use crate::chain::{Bound, FlatMapCall, Loop, Stateless};
use crate::error::{OpError, StepName};
use crate::foreign::{MapCall, sides};
use crate::op::{bytes_of, conform};
use crate::own::owned;
use crate::spec::SideSpec;

/// Bytes after which rows that were drawn are handed on.
const DRAWN_BYTES: usize = 1 << 20;
/// How long a step calls one function of the user before it goes on with all else; see [`called`]. A step costs some microseconds.
const CALLS: Duration = Duration::from_millis(1);

/// A time below which scopes nest.
pub(crate) trait Scoped: Timestamp {
    /// Whether it is the time of a scope in a scope.
    const NESTED: bool;
    /// The time of a scope in one of this time.
    type Inner: Scoped + BatchTime<Self>;
    /// The way from one round of a loop in such a scope to the next.
    fn round() -> <Self::Inner as Timestamp>::Summary;
}

fn round<const ODD: bool>() -> Product<FlowSummary, Nest<ODD>> {
    Product::new(FlowSummary::default(), Nest::default().with_innermost(1))
}

impl Scoped for FlowTime {
    const NESTED: bool = false;
    type Inner = Product<FlowTime, Nest<true>>;
    fn round() -> Product<FlowSummary, Nest<true>> {
        round()
    }
}

impl Scoped for Product<FlowTime, Nest<true>> {
    const NESTED: bool = true;
    type Inner = Product<FlowTime, Nest<false>>;
    fn round() -> Product<FlowSummary, Nest<false>> {
        round()
    }
}

impl Scoped for Product<FlowTime, Nest<false>> {
    const NESTED: bool = true;
    type Inner = Product<FlowTime, Nest<true>>;
    fn round() -> Product<FlowSummary, Nest<true>> {
        round()
    }
}

/// The bounded scopes of a worker, by name, in the order of their ingresses.
#[derive(Clone, Default)]
pub(crate) struct Monitors(Rc<RefCell<Vec<(String, Monitor)>>>);

impl Monitors {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    pub(crate) fn stats(&self) -> Vec<ScopeStats> {
        self.0.borrow().iter().map(|(name, monitor)| ScopeStats::of(name, monitor)).collect()
    }
}

/// What all steps of a worker share.
pub(crate) struct Context<'a> {
    pub(crate) callbacks: &'a Arc<dyn Callbacks>,
    pub(crate) monitors: &'a Monitors,
    /// The kinds of rows beside the output.
    pub(crate) beside: &'a Rc<Beside>,
    /// Whether a step ends in the middle of long calls.
    pub(crate) yields: bool,
}

/// What a function gave beside its rows, as it travels.
struct Packer {
    beside: Rc<Beside>,
    /// By the number of the side among those of the step.
    kinds: Vec<usize>,
}

impl Packer {
    fn new(beside: &Rc<Beside>, sides: &[SideSpec]) -> Self {
        Self { beside: beside.clone(), kinds: sides.iter().map(|side| beside.side(&side.name)).collect() }
    }

    fn block(&self, side: usize, batch: RecordBatch) -> Result<FlowBlock, OpError> {
        Ok(FlowBlock::rows(self.beside.pack(self.kinds[side], batch)?).of(BESIDE))
    }
}

/// Applies `change` to rows; everything else passes, and so do no blocks without rows.
pub(crate) fn each_rows<T: Timestamp>(
    blocks: &Stream<T, FlowBlock>,
    name: &str,
    mut change: impl FnMut(RecordBatch) -> Result<FlowBlock, OpError> + 'static,
) -> Stream<T, FlowBlock> {
    each_of_rows(blocks, name, move |batch, give| {
        give(change(batch)?);
        Ok(())
    })
}

/// As [`each_rows`], of changes that make any number of blocks.
fn each_of_rows<T: Timestamp>(
    blocks: &Stream<T, FlowBlock>,
    name: &str,
    mut change: impl FnMut(RecordBatch, &mut dyn FnMut(FlowBlock)) -> Result<(), OpError> + 'static,
) -> Stream<T, FlowBlock> {
    blocks.unary(Pipeline, name, |_| {
        move |input, output, _| {
            while let Some((capability, block)) = input.next() {
                let mut give = |block: FlowBlock| {
                    if !block.is_empty() {
                        output.session(&capability).give(block);
                    }
                };
                match block {
                    FlowBlock::Rows { batch, .. } => change(batch, &mut give)?,
                    other => give(other),
                }
            }
            Ok(())
        }
    })
}

/// The blocks that `keep` wants.
fn only<T: Timestamp>(
    blocks: &Stream<T, FlowBlock>,
    name: &str,
    keep: impl Fn(&FlowBlock) -> bool + 'static,
) -> Stream<T, FlowBlock> {
    blocks.unary(Pipeline, name, |_| {
        move |input, output, _| {
            while let Some((capability, block)) = input.next() {
                if keep(&block) {
                    output.session(&capability).give(block);
                }
            }
            Ok(())
        }
    })
}

fn mapped<T: Timestamp>(blocks: &Stream<T, FlowBlock>, map: MapCall, context: &Context<'_>) -> Stream<T, FlowBlock> {
    let (name, callbacks) = (format!("map {}", map.step), context.callbacks.clone());
    let packer = Packer::new(context.beside, &map.sides);
    let change = move |batch: RecordBatch, give: &mut dyn FnMut(FlowBlock)| {
        let (rows, sides) = map.apply(&callbacks, &batch)?;
        give(FlowBlock::rows(rows));
        sides.into_iter().try_for_each(|(side, batch)| {
            give(packer.block(side, batch)?);
            Ok(())
        })
    };
    if context.yields { called(blocks, &name, change) } else { each_of_rows(blocks, &name, change) }
}

/// As [`each_of_rows`], of a change that may take long. Nothing else of the worker runs meanwhile, a slice is complete when all workers have done
/// theirs, and a step of a migration waits several times for each of them; so a step ends its calls when they have taken [`CALLS`], and before each step
/// with calls there is one without, in which all is done that came up meanwhile. Not where what leaves a bounded part would pile up before it.
fn called<T: Timestamp>(
    blocks: &Stream<T, FlowBlock>,
    name: &str,
    mut change: impl FnMut(RecordBatch, &mut dyn FnMut(FlowBlock)) -> Result<(), OpError> + 'static,
) -> Stream<T, FlowBlock> {
    let mut builder = OperatorBuilder::new(blocks.scope(), name);
    builder.notify(false);
    let mut input = builder.input(blocks, Pipeline);
    let (mut output, stream) = builder.output();
    let wake = builder.activator();
    let mut rests = false;
    builder.build(|_| {
        move |_| {
            if std::mem::take(&mut rests) {
                wake.activate();
                return Ok(());
            }
            let begun = Instant::now();
            while let Some((capability, block)) = input.next() {
                let mut give = |block: FlowBlock| {
                    if !block.is_empty() {
                        output.session(&capability).give(block);
                    }
                };
                match block {
                    FlowBlock::Rows { batch, .. } => change(batch, &mut give)?,
                    other => give(other),
                }
                if begun.elapsed() >= CALLS {
                    break;
                }
            }
            rests = !input.is_empty();
            if rests {
                wake.activate();
            }
            Ok(())
        }
    });
    stream
}

fn is_rows(block: &FlowBlock) -> bool {
    matches!(block, FlowBlock::Rows { .. })
}

/// What the first worker is fed, dealt to the others: blocks of rows in turn, marks to all. It keeps rows only as long as it is alone. Counts
/// the rows that this worker gets.
pub(crate) fn dealt(blocks: &Stream<FlowTime, FlowBlock>, rows: Rc<Cell<u64>>) -> Stream<FlowTime, FlowBlock> {
    let (scope, mut turn) = (blocks.scope().clone(), 0);
    let mine = blocks.exchange(move |_, block: FlowBlock, route| {
        let others = scope.peers() - 1;
        if !is_rows(&block) {
            (0..=others).for_each(|rank| route(rank, block.clone()));
        } else if others == 0 {
            route(0, block);
        } else {
            turn = (turn + 1) % others;
            route(1 + turn, block);
        }
    });
    only(&mine, "dealt", move |block| {
        if let FlowBlock::Rows { batch, .. } = block {
            rows.set(rows.get() + batch.num_rows() as u64);
        }
        true
    })
}

/// Side of rows beside the output, late ones and those of side outputs, on their way out.
pub(crate) const BESIDE: u8 = u8::MAX;

fn is_beside(block: &FlowBlock) -> bool {
    matches!(block, FlowBlock::Rows { side: BESIDE, .. })
}

/// What a step gives, without what goes beside it.
pub(crate) fn without_beside<T: Timestamp>(
    blocks: &Stream<T, FlowBlock>,
    beside: &mut Vec<Stream<T, FlowBlock>>,
) -> Stream<T, FlowBlock> {
    beside.push(only(blocks, "beside", is_beside));
    only(blocks, "output", |block| !is_beside(block))
}

/// Rows of all these streams at the first worker.
pub(crate) fn gathered(streams: impl IntoIterator<Item = Stream<FlowTime, FlowBlock>>) -> Stream<FlowTime, FlowBlock> {
    only(&together(streams), "rows", is_rows).exchange(|_, block, route| route(0, block))
}

/// What each of `count` sources gives, with all marks.
pub(crate) fn sources(blocks: &Stream<FlowTime, FlowBlock>, count: usize) -> Vec<Stream<FlowTime, FlowBlock>> {
    if count == 1 {
        return vec![blocks.clone()];
    }
    let of = |source: u8| {
        let mine = move |block: &FlowBlock| match block {
            FlowBlock::Rows { side, .. } => *side == source,
            _ => true,
        };
        only(blocks, &format!("source {source}"), mine)
    };
    (0..=u8::MAX).take(count).map(of).collect()
}

/// Streams as one: rows of all, marks of the first.
pub(crate) fn together(streams: impl IntoIterator<Item = Stream<FlowTime, FlowBlock>>) -> Stream<FlowTime, FlowBlock> {
    let mut streams = streams.into_iter();
    let first = streams.next().expect("there is a stream");
    streams.fold(first, |all, next| all.concat(&only(&next, "rows", is_rows)))
}

/// What enters a stage: streams with columns of the same names and types as one, whose columns are these.
pub(crate) fn merged<'a>(
    mut streams: impl ExactSizeIterator<Item = &'a Stream<FlowTime, FlowBlock>>,
    columns: &SchemaRef,
) -> Stream<FlowTime, FlowBlock> {
    if streams.len() == 1 {
        return streams.next().expect("there is a stream").clone();
    }
    together(streams.map(|blocks| {
        let columns = columns.clone();
        each_rows(blocks, "union", move |batch| {
            let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
            let (_, values, _) = batch.into_parts();
            Ok(FlowBlock::rows(RecordBatch::try_new_with_options(columns.clone(), values, &options)?))
        })
    }))
}

/// The steps of a stage, behind rows and marks; `beside` gets what they put beside their rows.
pub(crate) fn stage(
    blocks: Stream<FlowTime, FlowBlock>,
    steps: &[Stateless],
    context: &Context<'_>,
    beside: &mut Vec<Stream<FlowTime, FlowBlock>>,
) -> Stream<FlowTime, FlowBlock> {
    if !crate::chain::is_metered(steps) {
        return chain(blocks, steps, context, Bound::default(), beside);
    }
    let marks = only(&blocks, "marks", |block| !is_rows(block));
    let rows = only(&blocks, "rows", is_rows);
    let mut apart = Vec::new();
    let made = chain(rows, steps, context, Bound::default(), &mut apart);
    // Rows that wait behind what was expanded, for the end of their slice or for the host, would hold all of what they came with.
    let own = |blocks: &_, side| each_rows(blocks, "own", move |batch| Ok(FlowBlock::rows(owned(&batch)).of(side)));
    beside.extend(apart.iter().map(|blocks| own(blocks, BESIDE)));
    own(&made, 0).concat(&marks)
}

fn chain<T: Scoped>(
    mut rows: Stream<T, FlowBlock>,
    steps: &[Stateless],
    context: &Context<'_>,
    bound: Bound,
    beside: &mut Vec<Stream<T, FlowBlock>>,
) -> Stream<T, FlowBlock> {
    for (at, step) in steps.iter().enumerate() {
        rows = match step {
            Stateless::Map(map) => {
                let made = mapped(&rows, map.clone(), context);
                if map.sides.is_empty() { made } else { without_beside(&made, beside) }
            }
            Stateless::FlatMap(call) => {
                return scope(&rows, &call.step, (Some(call), &steps[at + 1..]), context, bound, beside);
            }
            Stateless::Bounded(part) => {
                let parts = match part.body.split_first() {
                    Some((Stateless::FlatMap(call), rest)) => (Some(call), rest),
                    _ => (None, &part.body[..]),
                };
                scope(&rows, &part.step, parts, context, part.bound, beside)
            }
            Stateless::Iterate(part) => looped(&rows, part, context, bound, beside),
        };
    }
    rows
}

/// A bounded scope around `rest`, behind the expansion of `call` where there is one.
fn scope<T: Scoped>(
    rows: &Stream<T, FlowBlock>,
    step: &StepName,
    (call, rest): (Option<&FlatMapCall>, &[Stateless]),
    context: &Context<'_>,
    bound: Bound,
    beside: &mut Vec<Stream<T, FlowBlock>>,
) -> Stream<T, FlowBlock> {
    let bounds = bound.bounds().expect("bounds were checked when the plan was compiled");
    let name = step.to_string();
    let on_failure = if bound.skip { OnFailure::GoOn } else { OnFailure::Stop };
    let sides = call.map_or(&[][..], |call| &call.sides);
    let packer = Packer::new(context.beside, sides);
    let callbacks = context.callbacks.clone();
    let expand = Hand { call: call.cloned(), callbacks, skip: bound.skip, own: T::NESTED, packer };
    let faucet = Faucet::<T::Inner, FlowBlock>::new(bounds).named(&name).on_failure(on_failure);
    let (_, batches, mut gate, monitor) = faucet.open(rows, expand);
    context.monitors.0.borrow_mut().push((name, monitor));
    let mut apart = Vec::new();
    let batches = if sides.is_empty() { batches } else { without_beside(&batches, &mut apart) };
    let made = chain::<T::Inner>(batches, rest, context, bound, &mut apart);
    let mut leave = |blocks| penstock_bounded::Egress::leave(blocks, &mut gate);
    beside.extend(apart.into_iter().map(&mut leave));
    leave(made)
}

/// A loop: what its body marks goes around again at the next round.
fn looped<T: Scoped>(
    rows: &Stream<T, FlowBlock>,
    part: &Loop,
    context: &Context<'_>,
    bound: Bound,
    beside: &mut Vec<Stream<T, FlowBlock>>,
) -> Stream<T, FlowBlock> {
    let outer = rows.scope().clone();
    let inner: Scope<T::Inner> = outer.nested(&part.step.to_string(), |inner: &mut Scope<T::Inner>| inner.clone());
    let (feedback, around) = inner.feedback::<FlowBlock>(T::round());
    let mut apart = Vec::new();
    let made = chain::<T::Inner>(rows.enter(&inner).concat(&around), &part.body, context, bound, &mut apart);
    beside.extend(apart.iter().map(|blocks| blocks.leave(&outer)));
    parted(&made, part, true).connect_loop(feedback);
    parted(&made, part, false).leave(&outer)
}

/// The rows that go around again, or those that leave, without the column that says so. Null leaves.
fn parted<T: Timestamp>(rows: &Stream<T, FlowBlock>, part: &Loop, again: bool) -> Stream<T, FlowBlock> {
    let (at, schema, step) = (part.again, part.schema.clone(), part.step.clone());
    each_rows(rows, if again { "again" } else { "done" }, move |batch| {
        let marks = batch.column(at).as_boolean();
        let wanted: BooleanArray = marks.iter().map(|mark| Some((mark == Some(true)) == again)).collect();
        let columns: Vec<usize> = (0..at).collect();
        let kept = conform(&step, &schema, &filter_record_batch(&batch.project(&columns)?, &wanted)?)?;
        // What goes around may be what came, held by whoever made it, who holds what it was made of: a chain with a link for each round.
        Ok(FlowBlock::rows(if again { owned(&kept) } else { kept }))
    })
}

/// How blocks are handed out: as they are, or expanded.
struct Hand {
    call: Option<FlatMapCall>,
    callbacks: Arc<dyn Callbacks>,
    skip: bool,
    /// Whether what waits is copied: behind another scope it is little of much.
    own: bool,
    packer: Packer,
}

/// What is left of a block.
enum Rest {
    Rows {
        batch: RecordBatch,
        at: usize,
    },
    /// Not begun.
    Whole(RecordBatch),
    Begun(Box<dyn Expansion>),
    Done,
}

/// Rows on their way into a batch.
#[derive(Default)]
struct Drawn {
    blocks: Vec<RecordBatch>,
    /// By the number of the side among those of the step.
    sides: SideRows,
    bytes: usize,
}

impl Drawn {
    fn take(&mut self, batch: RecordBatch) -> usize {
        let rows = batch.num_rows();
        if rows > 0 {
            self.bytes += bytes_of(&batch);
            self.blocks.push(batch);
        }
        rows
    }

    fn take_side(&mut self, side: usize, batch: RecordBatch) -> usize {
        let rows = batch.num_rows();
        self.bytes += bytes_of(&batch);
        self.sides.push((side, batch));
        rows
    }
}

impl Expand<FlowBlock> for Hand {
    type Inputs = Rest;
    type Gathered = Drawn;
    type Block = FlowBlock;

    fn load(&mut self, block: FlowBlock) -> Result<Rest, BoxError> {
        let block = match block {
            FlowBlock::Rows { batch, .. } if self.own => FlowBlock::rows(owned(&batch)),
            other => other,
        };
        match block {
            FlowBlock::Rows { batch, .. } if batch.num_rows() == 0 => Ok(Rest::Done),
            FlowBlock::Rows { batch, .. } if self.call.is_some() => Ok(Rest::Whole(batch)),
            FlowBlock::Rows { batch, .. } => Ok(Rest::Rows { batch, at: 0 }),
            other => Err(format!("{other:?} in a bounded part").into()),
        }
    }

    fn left(&self, rest: &Rest) -> u64 {
        match rest {
            Rest::Rows { batch, at } => (batch.num_rows() - at) as u64,
            Rest::Whole(batch) if self.call.as_ref().is_some_and(|call| call.rows) => batch.num_rows() as u64,
            Rest::Whole(_) => 1,
            Rest::Begun(expansion) => expansion.left(),
            Rest::Done => 0,
        }
    }

    fn fill(&mut self, rest: &mut Rest, room: usize, drawn: &mut Drawn) -> (usize, Result<(), Fault>) {
        if drawn.bytes >= DRAWN_BYTES {
            return (0, Ok(()));
        }
        if let Rest::Rows { batch, at } = rest {
            let count = room.min(batch.num_rows() - *at);
            drawn.take(batch.slice(*at, count));
            *at += count;
            return (count, Ok(()));
        }
        let call = self.call.as_ref().expect("only a call leaves anything but rows");
        if let Rest::Whole(batch) = rest {
            match self.callbacks.expand(call.call, batch, self.skip) {
                Ok(begun) => *rest = Rest::Begun(begun),
                Err(error) => return (0, Err(fatal(error.into()))),
            }
        }
        let Rest::Begun(expansion) = rest else { return (0, Ok(())) };
        let mut beside = SideRows::new();
        let (blocks, outcome) = expansion.draw(room, &mut beside);
        let mut count = 0;
        let taken = sides(&call.step, &call.sides, &beside, |side, batch| count += drawn.take_side(side, batch));
        if let Err(error) = taken {
            return (count, Err(fatal(error)));
        }
        for block in blocks {
            match conform(&call.step, &call.schema, &block) {
                Ok(block) => count += drawn.take(block),
                Err(error) => return (count, Err(fatal(error))),
            }
        }
        match outcome {
            Ok(()) => (count, Ok(())),
            Err(spoiled) => match spoiled.input {
                Some((input, before)) if self.skip => {
                    (count, Err(Fault::Input(Broken { input, drawn: before, cause: spoiled.error.message })))
                }
                // With the exception itself, which names the input.
                _ => (count, Err(fatal(spoiled.error.into()))),
            },
        }
    }

    fn seal(&mut self, mut drawn: Drawn, give: &mut dyn FnMut(FlowBlock)) -> Result<(), BoxError> {
        let joined = |blocks: &[RecordBatch]| -> Result<RecordBatch, OpError> {
            Ok(match blocks {
                [one] => one.clone(),
                several => concat_batches(&several[0].schema(), several)?,
            })
        };
        if !drawn.blocks.is_empty() {
            give(FlowBlock::rows(joined(&drawn.blocks)?));
        }
        drawn.sides.sort_by_key(|(side, _)| *side);
        for of_side in drawn.sides.chunk_by(|(one, _), (other, _)| one == other) {
            let blocks: Vec<RecordBatch> = of_side.iter().map(|(_, batch)| batch.clone()).collect();
            give(self.packer.block(of_side[0].0, joined(&blocks)?)?);
        }
        Ok(())
    }
}

fn fatal(error: OpError) -> Fault {
    Fault::Fatal(Box::new(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_dataflow::{Worker, fabric};

    /// One call of those that wait, then a step in which all else has its turn.
    #[test]
    fn a_step_ends_with_a_long_call() {
        let mut worker = Worker::new(fabric::threads(1).remove(0));
        let calls = Rc::new(Cell::new(0));
        let counted = calls.clone();
        let (mut input, probe) = worker.dataflow::<FlowTime, _>("calls", |scope| {
            let (input, blocks) = scope.new_input::<FlowBlock>();
            let slow = called(&blocks, "slow", move |batch, give| {
                counted.set(counted.get() + 1);
                let begun = Instant::now();
                while begun.elapsed() < CALLS {
                    std::hint::spin_loop();
                }
                give(FlowBlock::rows(batch));
                Ok(())
            });
            (input, slow.probe().0)
        });
        let rows = RecordBatch::try_from_iter([(
            "n",
            Arc::new(arrow_array::Int64Array::from(vec![1])) as arrow_array::ArrayRef,
        )]);
        let rows = FlowBlock::rows(rows.unwrap());
        (0..4).for_each(|_| input.send(rows.clone()));
        input.close();
        let mut seen = Vec::new();
        while worker.has_work() {
            worker.step().unwrap();
            seen.push(calls.get());
        }
        assert!(seen.windows(2).all(|pair| pair[1] <= pair[0] + 1), "{seen:?}");
        assert!((1..4).all(|call| seen.iter().filter(|calls| **calls == call).count() > 1), "{seen:?}");
        assert_eq!(seen.last(), Some(&4));
        assert!(probe.done());
    }
}
