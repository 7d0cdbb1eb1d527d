//! The operator at the ingress: holds inputs back, and hands their items out in batches as the window allows.
//!
//! Per outer time it keeps the inputs that came, the one that is being expanded, and a capability at the next batch; outer times are
//! served in ascending order, one at a time. Admitting asks the probe at the egress which batches are unfinished, and nothing
//! else: no edge leads back, and the engine knows nothing of it.
//!
//! Two ways to stall are closed by construction (F-05):
//!
//! - *An open outer time.* As long as an input at `e` may come, a batch 0 of `e` may come behind it and the probe stays at or before `e`.
//!   So of a time that is open at most N batches are handed out, and the rest waits until the frontier of the batcher's input
//!   has passed it: what comes meanwhile is buffered as it came, not expanded.
//! - *An idle worker.* A worker without inputs at `e` holds no capability at `e`; its capability comes with the first block and goes with
//!   the last item.
//!
//! One run hands out at most [`QUANTUM`] items and asks for another run, so that the operators behind it work in between:
//! within a worker the queues of the body then hold what a quantum becomes, however large the batch is. So does one in which items
//! are long in coming ([`TURN`]).
//!
//! What has left the scope on its way to another process is no longer in the window, so nothing is handed out while the links are full
//! ([`Scope::has_room`]). That ends when the workers there step, whatever their operators wait for: a batcher in a loop locks nothing up.
//!
//! Source: Faucet §4. Departures: the count of unfinished batches in place of a look at batch `b - N` (`window` says
//! why it still ends), and batches handed out in pieces: so within a worker memory does not grow with B, unlike the paper's curve.
//! Between workers it does, by what one has sent and the other has not taken.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use penstock_dataflow::{Activator, BoxError, Frontiers, Input, OperatorBuilder, Output, Pipeline, Scope, Stream};
use penstock_progress::capability::Capability;
use penstock_progress::probe::ProbeHandle;
use penstock_progress::timestamp::Timestamp;

use crate::batch::BatchTime;
use crate::bounds::Bounds;
use crate::error::{Failure, OnFailure};
use crate::expand::{Broken, Expand, Fault};
use crate::monitor::Shared;
use crate::regulator::{Common, Regulator, Told};
use crate::window::Window;

/// Items in one run of the batcher, and in one block.
pub const QUANTUM: usize = 1024;
/// How long a run goes on when it has not handed out as many.
const TURN: Duration = Duration::from_millis(20);
/// Blocks of inputs that one run looks through when they have no items.
const PATIENCE: usize = 64;

/// What happens at the ingress of a bounded scope, in its order: for instrumentation.
#[derive(Debug)]
pub enum Event<'a, I, B> {
    /// Items are handed out as part of a batch.
    Admitted {
        /// Time of the batch.
        time: &'a I,
        /// The items.
        items: &'a B,
    },
    /// A batch has finished on all workers. The batcher sees it at its next run.
    Finished {
        /// Time of the batch.
        time: &'a I,
    },
}

/// Sees every [`Event`] of a batcher.
pub type Observer<I, B> = Box<dyn FnMut(Event<'_, I, B>)>;

/// The inputs of one outer time.
struct Pending<N, I: Timestamp> {
    /// The inputs by block; those of the first may have begun.
    blocks: VecDeque<N>,
    /// At the batch that is handed out next, or is being handed out.
    capability: Capability<I>,
    /// Items of a batch that is not full yet.
    filled: u64,
}

impl<N, I: Timestamp> Pending<N, I> {
    /// Goes on to the next batch when the one that is being handed out has reached its size.
    fn turn<O: Timestamp>(&mut self, outer: &O, size: u64, shared: &RefCell<Shared<O>>)
    where
        I: BatchTime<O>,
    {
        if self.filled >= size {
            self.filled = 0;
            let next = I::numbered(outer.clone(), shared.borrow().window.next(outer));
            self.capability.downgrade(&next).expect("the next batch comes after this one");
        }
    }
}

/// What the batcher of one scope is made of.
pub(crate) struct Parts<I, P, B> {
    pub(crate) expand: P,
    pub(crate) on_failure: OnFailure,
    pub(crate) observer: Option<Observer<I, B>>,
}

/// A built batcher.
pub(crate) struct Built<O: Timestamp, I: Timestamp, B> {
    pub(crate) stream: Stream<I, B>,
    pub(crate) probe: ProbeHandle<I>,
    /// Runs the batcher when the probe moves.
    pub(crate) wake: Activator,
    pub(crate) shared: Rc<RefCell<Shared<O>>>,
}

/// Adds a batcher to a scope, behind what enters.
pub(crate) fn batcher<O, I, D, P>(
    scope: &Scope<I>,
    entered: &Stream<I, D>,
    bounds: &Bounds,
    parts: Parts<I, P, P::Block>,
) -> Built<O, I, P::Block>
where
    O: Timestamp,
    I: BatchTime<O>,
    D: 'static,
    P: Expand<D> + 'static,
{
    let probe = ProbeHandle::new();
    let watched = probe.clone();
    let shared = Rc::new(RefCell::new(Shared {
        window: Window::new(),
        regulator: Regulator::new(scope.common(|| Common::new(bounds))),
        buffered: 0,
        failed: 0,
        failures: Vec::new(),
        unfinished: Box::new(move |outer: &O, number| watched.less_equal(&I::numbered(outer.clone(), number))),
        show: |outer: &O, number| I::numbered(outer.clone(), number).show(),
    }));
    let mut builder = OperatorBuilder::new(scope, "batcher");
    let mut input = builder.input(entered, Pipeline);
    let (mut output, stream) = builder.output();
    let wake = builder.activator();
    let (pending, scope) = (BTreeMap::new(), scope.clone());
    let mut batcher =
        Batcher { scope, pending, parts, probe: probe.clone(), shared: shared.clone(), again: wake.clone() };
    builder.build(|_| move |frontiers| batcher.run(&mut input, &mut output, frontiers));
    Built { stream, probe, wake, shared }
}

struct Batcher<O: Timestamp, I: Timestamp, D, P: Expand<D>> {
    scope: Scope<I>,
    pending: BTreeMap<O, Pending<P::Inputs, I>>,
    parts: Parts<I, P, P::Block>,
    probe: ProbeHandle<I>,
    shared: Rc<RefCell<Shared<O>>>,
    again: Activator,
}

impl<O, I, D, P> Batcher<O, I, D, P>
where
    O: Timestamp,
    I: BatchTime<O>,
    D: 'static,
    P: Expand<D>,
{
    fn run(
        &mut self,
        input: &mut Input<I, D>,
        output: &mut Output<I, P::Block>,
        frontiers: &Frontiers<'_, I>,
    ) -> Result<(), BoxError> {
        self.take_in(input)?;
        self.retire();
        let outcome = self.admit(output);
        let mut shared = self.shared.borrow_mut();
        let ((admitted, _), (finished, finished_items)) = (shared.window.admitted(), shared.window.finished());
        shared.regulator.observe(Told { admitted, finished, finished_items, waiting: !self.pending.is_empty() });
        let pending = &self.pending;
        shared
            .window
            .forget(|outer| !pending.contains_key(outer) && !frontiers.less_equal(0, &I::to_inner(outer.clone())));
        outcome
    }

    fn take_in(&mut self, input: &mut Input<I, D>) -> Result<(), BoxError> {
        while let Some((capability, block)) = input.next() {
            let inputs = self.parts.expand.load(block)?;
            let left = self.parts.expand.left(&inputs);
            if left == 0 {
                continue;
            }
            let outer = capability.time().clone().to_outer();
            let mut shared = self.shared.borrow_mut();
            shared.buffered += left;
            let pending = self.pending.entry(outer).or_insert_with_key(|outer| {
                let next = I::numbered(outer.clone(), shared.window.next(outer));
                let capability = capability.delayed(&next).expect("a batch of a time is not before the time");
                Pending { blocks: VecDeque::new(), capability, filled: 0 }
            });
            pending.blocks.push_back(inputs);
        }
        Ok(())
    }

    fn retire(&mut self) {
        let mut finished = Vec::new();
        let watched = self.parts.observer.is_some();
        self.shared.borrow_mut().window.retire(
            |outer, number| self.probe.less_equal(&I::numbered(outer.clone(), number)),
            |outer, number| {
                if watched {
                    finished.push(I::numbered(outer.clone(), number));
                }
            },
        );
        if let Some(observer) = &mut self.parts.observer {
            finished.iter().for_each(|time| observer(Event::Finished { time }));
        }
    }

    /// Hands out items as long as there are some, the window has room, and this run has not done enough.
    fn admit(&mut self, output: &mut Output<I, P::Block>) -> Result<(), BoxError> {
        let (mut items, mut looked) = (0, 0);
        let mut begun = None;
        while let Some(mut first) = self.pending.first_entry() {
            let outer = first.key().clone();
            let (batches, size) = self.shared.borrow_mut().regulator.bounds();
            let pending = first.get_mut();
            // The size may have shrunk since the batch was begun.
            pending.turn(&outer, size, &self.shared);
            if pending.filled == 0 && !self.shared.borrow().window.has_room(&outer, batches) {
                return Ok(());
            }
            let is_over = begun.get_or_insert_with(Instant::now).elapsed() >= TURN;
            if items >= QUANTUM || looked >= PATIENCE || is_over {
                self.again.activate();
                return Ok(());
            }
            if !self.scope.has_room(&self.again) {
                return Ok(());
            }
            let wanted = (size - pending.filled).min((QUANTUM - items) as u64) as usize;
            let (count, gathered) = draw(pending, &outer, wanted, &mut self.parts, &self.shared)?;
            looked += 1;
            items += count;
            if count > 0 {
                let mut shared = self.shared.borrow_mut();
                if pending.filled == 0 {
                    shared.window.admit(&outer, count as u64);
                    looked = 0;
                } else {
                    shared.window.extend(&outer, count as u64);
                }
                drop(shared);
                let Parts { expand, observer, .. } = &mut self.parts;
                let mut session = output.session(&pending.capability);
                expand.seal(gathered, &mut |block| {
                    if let Some(observer) = observer {
                        observer(Event::Admitted { time: pending.capability.time(), items: &block });
                    }
                    session.give(block);
                })?;
                pending.filled += count as u64;
            }
            if pending.blocks.is_empty() {
                first.remove();
            } else {
                pending.turn(&outer, size, &self.shared);
            }
        }
        Ok(())
    }
}

/// Up to `wanted` items of one outer time, and how many. Looks through so many blocks at most.
fn draw<O, I, D, P>(
    pending: &mut Pending<P::Inputs, I>,
    outer: &O,
    wanted: usize,
    parts: &mut Parts<I, P, P::Block>,
    shared: &RefCell<Shared<O>>,
) -> Result<(usize, P::Gathered), BoxError>
where
    O: Timestamp,
    I: Timestamp,
    P: Expand<D>,
{
    let (mut items, mut gathered, mut looked) = (0, P::Gathered::default(), 0);
    while let Some(inputs) = pending.blocks.front_mut().filter(|_| items < wanted && looked < PATIENCE) {
        let before = parts.expand.left(inputs);
        let (count, outcome) = parts.expand.fill(inputs, wanted - items, &mut gathered);
        let after = parts.expand.left(inputs);
        items += count;
        looked += 1;
        if after == 0 {
            pending.blocks.pop_front();
        }
        let mut shared = shared.borrow_mut();
        shared.buffered -= before - after;
        match outcome {
            Ok(()) if after > 0 => break,
            Ok(()) => {}
            Err(Fault::Fatal(error)) => return Err(error),
            Err(Fault::Input(Broken { input, drawn, cause })) => {
                let failure = Failure { input, time: format!("{outer:?}"), drawn, cause };
                shared.fail(failure.clone());
                if parts.on_failure == OnFailure::Stop {
                    return Err(failure.into());
                }
            }
        }
    }
    Ok((items, gathered))
}
