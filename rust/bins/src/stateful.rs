//! The stateful operator: F and S together.
//!
//! Builds, on each worker: the broadcast of control into F, the exchange of blocks and of state from F to S, the way back on
//! which S tells F how much state it has taken in and which bins rows wait for, and the probe of S's output that F reads.
//!
//! Source: Megaphone §3.4 Fig. 3, §4.1; M-09, M-12.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use penstock_dataflow::{Exchange, OperatorBuilder, Pact, Pipeline, Stream, Wire};
use penstock_progress::{Antichain, ProbeHandle, Timestamp, TotalOrder};

use crate::bin::BinState;
use crate::block::Block;
use crate::control::Control;
use crate::error::{BinsError, BoxError, ControlError};
use crate::message::{Addressed, BinPart, Record, Told};
use crate::pending::Pending;
pub use crate::recut::Divide;
use crate::route::{self, RouteOperator, RouteParts, Shared};
use crate::routing::Routing;
use crate::shelf::Shelf;
use crate::state::{self, Moment, StateOperator};
use crate::stats::Stats;
use crate::table::BinTable;

/// The epoch that begins with the state that bins have at a time; `None` for times within an epoch.
pub type EpochOf<T> = Rc<dyn Fn(&T) -> Option<u64>>;

/// What a stateful operator is built from on one worker.
pub struct Config<T, S: BinState> {
    /// Names the operator; also its bins on the shelf. Equal on all workers.
    pub name: String,
    /// Who owns which bin at the start. Equal on all workers.
    pub routing: Routing,
    /// The bins of this worker: exactly those that `routing` gives it.
    pub table: Rc<RefCell<BinTable<S>>>,
    /// The shelf of this process; the table is attached to it.
    pub shelf: Shelf<S>,
    /// Whether a worker is a thread of this process.
    pub local: Rc<dyn Fn(usize) -> bool>,
    /// Makes the state of an empty bin.
    pub new_state: Rc<dyn Fn() -> S>,
    /// The epoch that begins with the state that a bin has when it moves at this time: `Some` for times between two epochs,
    /// at which no record is applied. Such a bin's original, kept until the move is complete, serves when it is cut off.
    pub begins: EpochOf<T>,
    /// Whether epochs are recorded: a bin that moves within one tells what has changed since the mark, and one that has come keeps undo.
    pub record: bool,
    /// Bytes of state that this worker may have under way to other processes: encoded, and not yet taken in there. Less than one
    /// chunk may come on top.
    pub ship_bytes: usize,
    /// Whether this worker asks others for the bins that its rows wait for, so that these come first; else bins come in the order of the control.
    pub hot_first: bool,
    /// Counters, shared by the workers of this process.
    pub stats: Arc<Stats<T>>,
}

/// What [`Config::ship_bytes`] is unless somebody knows better: enough for a fast link and a slow receiver.
pub const SHIP_BYTES: usize = 8 << 20;

impl<T, S: BinState + Default> Config<T, S> {
    /// A configuration for workers that are all threads of one process, starting with empty bins.
    #[must_use]
    pub fn in_process(name: &str, routing: Routing, worker: usize, shelf: Shelf<S>, stats: Arc<Stats<T>>) -> Self {
        let table = BinTable::fresh(&routing, worker as u32, &S::default);
        Self {
            name: name.to_owned(),
            routing,
            table: Rc::new(RefCell::new(table)),
            shelf,
            local: Rc::new(|_| true),
            new_state: Rc::new(S::default),
            begins: Rc::new(|_| None),
            record: false,
            ship_bytes: SHIP_BYTES,
            hot_first: true,
            stats,
        }
    }
}

/// A built stateful operator on one worker.
pub struct Stateful<T: Timestamp, S: BinState, O: 'static> {
    /// What the logic gave.
    pub output: Stream<T, O>,
    /// S's output frontier, of all workers: a migration at `t` is complete when `!probe.less_equal(&t)`.
    pub probe: ProbeHandle<T>,
    /// The routing by which the bins lie now.
    pub routing: Rc<RefCell<Routing>>,
    /// Configurations that move, split or merge bins and have started: all before their times has been applied everywhere.
    pub started: Rc<Cell<u64>>,
    /// Control batches that were refused, with their times; the same on all workers.
    pub rejected: Rc<RefCell<Vec<(T, ControlError)>>>,
    /// The bins of this worker.
    pub table: Rc<RefCell<BinTable<S>>>,
    /// Counters of this process.
    pub stats: Arc<Stats<T>>,
}

/// Builds a stateful operator whose bins move by control.
///
/// `data` may stay where it arises: F routes it. `control` may arise on any worker (usually one): it is broadcast here.
/// `logic` is called for a time when all data at or before it are here, and all bins of which it gets rows: in time order, but that while bins
/// are on their way it is called with what is for the others, and with the rest when they have come. The times of each bin are in order, and
/// a time with blocks without keys, and what comes after it, waits for all. So it may work on the bins of the rows and records that it is given, and on
/// all where it is given a block without keys; else migration is invisible to it. See [`Moment`].
///
/// # Errors
/// [`BinsError::AbsentOwner`], and [`BinsError::Unrestored`], [`BinsError::Foreign`], [`BinsError::BitsDiffer`] when the
/// table does not hold exactly the bins of this worker. Nothing is built then.
///
/// In a joinable run a worker that joins owns no bin until control gives it some, by [`ControlInput::among`](crate::ControlInput::among); one
/// that leaves has its bins moved away before. Its routing and that of founders are built for the founders.
///
/// Inside the dataflow, breaches of the protocol and errors of `logic` stop the worker and its peers.
///
/// # Cost
/// Per block one look-up per row and one message per receiving worker; per migrated bin one lock of the shelf, or one
/// encoding when it leaves the process.
pub fn stateful<T, D, S, P, O, L>(
    data: &Stream<T, D>,
    control: &Stream<T, Vec<Control>>,
    config: Config<T, S>,
    logic: L,
) -> Result<Stateful<T, S, O>, BinsError>
where
    T: Timestamp + TotalOrder,
    D: Block,
    S: BinState,
    P: Record,
    O: Clone + 'static,
    L: FnMut(Moment<'_, T, D, S, P, O>) -> Result<(), BoxError> + 'static,
{
    stateful_divided(data, control, config, None, logic)
}

/// Like [`stateful`], of bins that may be split and merged: their states [divide](BinState::divide), `divide` gives the hash of the key of a
/// post-dated record, and `logic` finds the bin of a hash by [`BinTable::bin_of`]. Without `divide`, splits are refused
/// ([`ControlError::Indivisible`]).
///
/// # Errors
/// As `stateful`.
pub fn stateful_divided<T, D, S, P, O, L>(
    data: &Stream<T, D>,
    control: &Stream<T, Vec<Control>>,
    config: Config<T, S>,
    divide: Divide<P>,
    logic: L,
) -> Result<Stateful<T, S, O>, BinsError>
where
    T: Timestamp + TotalOrder,
    D: Block,
    S: BinState,
    P: Record,
    O: Clone + 'static,
    L: FnMut(Moment<'_, T, D, S, P, O>) -> Result<(), BoxError> + 'static,
{
    let scope = data.scope();
    let (index, peers) = (scope.index(), scope.peers());
    let Config { name, routing, table, shelf, local, new_state, begins, record, ship_bytes, hot_first, stats } = config;
    for (bin, worker) in routing.bins_owned() {
        if worker as usize >= peers {
            return Err(BinsError::AbsentOwner { bin, worker });
        }
    }
    table.borrow().check_owns(&routing, index as u32)?;
    table.borrow_mut().attach(shelf.clone(), name.clone());
    stats.owned.fetch_add(table.borrow().len() as u64, Relaxed);

    let shared = Rc::new(Shared {
        name,
        index,
        table: Rc::clone(&table),
        pending: Rc::new(RefCell::new(Pending::<T, P>::default())),
        shelf,
        local,
        new_state,
        begins,
        record,
        left: RefCell::default(),
        active: Rc::new(RefCell::new(routing.clone())),
        started: Rc::default(),
        moving: RefCell::default(),
        wake: OnceCell::new(),
        stats: Arc::clone(&stats),
    });
    let (active, started) = (Rc::clone(&shared.active), Rc::clone(&shared.started));
    let rejected = Rc::new(RefCell::new(Vec::new()));
    let mut probe = ProbeHandle::new();

    let (through, nowhere) = (|| Antichain::from_elem(T::Summary::default()), Antichain::new);
    let mut builder = OperatorBuilder::new(scope, &format!("{}: route", shared.name));
    let (routed, routed_stream) = builder.output_unshared::<Addressed<D>>();
    let (states, states_stream) = builder.output_unshared::<Addressed<BinPart<T, P>>>();
    let data = builder.input_with(data, Pipeline, vec![through(), nowhere()]);
    let members = scope.clone();
    let broadcast = Exchange::new(move |_: &T, batch: Vec<Control>, route: &mut dyn FnMut(usize, Vec<Control>)| {
        (0..members.peers()).for_each(|worker| route(worker, batch.clone()));
    });
    let control = builder.input_with(control, broadcast, vec![nowhere(), through()]);
    // What S tells comes back to F and leads nowhere, so it holds back no frontier.
    let (around, told) = scope.feedback::<Addressed<Told>>(T::Summary::default());
    // Nothing waits for what is told: a worker that has given all its bins away may be gone when it would hear that the last ones came.
    let to_senders = Exchange::new(address::<T, Told>).by_index().forgetting_leavers();
    let told = builder.input_with(&told, to_senders, vec![nowhere(), nowhere()]);
    let members = scope.clone();
    let wake_route = builder.activator();
    let mut operator = RouteOperator::new(RouteParts {
        wake: wake_route.clone(),
        ports: route::Ports { data, control, told, routed, states },
        shared: Rc::clone(&shared),
        routing,
        probe: probe.clone(),
        ship_bytes,
        rejected: Rc::clone(&rejected),
        divide,
        // Where members change they do so for each worker at another moment, so whoever sends control has checked it alone.
        present: Rc::new(move |worker| members.is_joinable() || (worker as usize) < members.peers()),
        lesson: builder.lesson(),
    });
    builder.build(|capabilities| {
        drop(capabilities);
        move |frontiers| operator.run(frontiers)
    });

    let mut builder = OperatorBuilder::new(scope, &format!("{}: state", shared.name));
    let data = builder.input(&routed_stream, by_address());
    // A piece of the budget at a time; rows that go elsewhere need not wait for it.
    let states = builder.input(&states_stream, by_address_behind());
    let (output, output_stream) = builder.output::<O>();
    let (told, told_stream) = builder.output_with::<Addressed<Told>>(vec![nowhere(), through()]);
    let wake = builder.activator();
    _ = shared.wake.set(wake.clone());
    builder.build(|capabilities| {
        drop(capabilities);
        let ports = state::Ports { data, states, output, told };
        let mut operator = StateOperator::new(ports, shared, hot_first, wake, logic);
        move |frontiers| operator.run(frontiers)
    });
    told_stream.connect_loop(around);
    let output = output_stream.probe_waking(&mut probe, wake_route);
    Ok(Stateful { output, probe, routing: active, started, rejected, table, stats })
}

/// Each message to the worker that it names.
fn by_address<T: Timestamp, D: Wire>() -> impl Pact<T, Addressed<D>> {
    Exchange::new(address::<T, D>).by_index()
}

/// The same; other messages go before these.
fn by_address_behind<T: Timestamp, D: Wire>() -> impl Pact<T, Addressed<D>> {
    Exchange::new(address::<T, D>).by_index().behind_data()
}

fn address<T, D>(_: &T, block: Addressed<D>, route: &mut dyn FnMut(usize, Addressed<D>)) {
    route(block.to as usize, block);
}
