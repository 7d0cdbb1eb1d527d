//! Stateful operators of two inputs, and of none: two folds over bins that hold the states of both, and rows that only go to their bins.
//!
//! The bins of both inputs are one operator's: a key of one and a key of the other that have one hash are in one bin, which moves with the states of
//! both at one time (M-16). Blocks and post-dated records carry their side.
//!
//! Source: Megaphone §4.1 (`stateful_binary`, `distribute`); M-12.

use penstock_dataflow::{OperatorBuilder, Pipeline, Stream, Wire, wire::WireError};
use penstock_files::Range;
use penstock_progress::{Capability, Timestamp, TotalOrder};
use serde::{Deserialize, Serialize};

use crate::bin::{BinState, Encoding, Extent};
use crate::block::Block;
use crate::control::Control;
use crate::error::{BinsError, BoxError, StateError};
use crate::message::Record;
use crate::state::{Later, Moment, Outbox};
use crate::stateful::{Config, Stateful, stateful};
use crate::table::BinTable;

/// What belongs to one of two inputs: a block, or a post-dated record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Side<L, R> {
    /// Of the first.
    Left(L),
    /// Of the second.
    Right(R),
}

const LEFT: u8 = 0;
const RIGHT: u8 = 1;

impl<L: Wire, R: Wire> Wire for Side<L, R> {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Left(block) => {
                out.push(LEFT);
                block.encode(out);
            }
            Self::Right(block) => {
                out.push(RIGHT);
                block.encode(out);
            }
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        match bytes.split_first() {
            Some((&LEFT, block)) => L::decode(block).map(Self::Left),
            Some((&RIGHT, block)) => R::decode(block).map(Self::Right),
            Some((side, _)) => Err(WireError(format!("a block of side {side} of two"))),
            None => Err(WireError("a block without a side".into())),
        }
    }
}

impl<L: Block, R: Block> Block for Side<L, R> {
    fn len(&self) -> usize {
        match self {
            Self::Left(block) => block.len(),
            Self::Right(block) => block.len(),
        }
    }

    fn hashes(&self) -> Option<&[u64]> {
        match self {
            Self::Left(block) => block.hashes(),
            Self::Right(block) => block.hashes(),
        }
    }

    fn split(self, workers: &[u32], emit: &mut dyn FnMut(u32, Self)) {
        match self {
            Self::Left(block) => block.split(workers, &mut |worker, part| emit(worker, Self::Left(part))),
            Self::Right(block) => block.split(workers, &mut |worker, part| emit(worker, Self::Right(part))),
        }
    }
}

/// The states of two inputs in one bin. Its chunks are those of either, each with a byte that says of which.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Both<L, R> {
    /// Of the first.
    pub left: L,
    /// Of the second.
    pub right: R,
}

impl<L: BinState, R: BinState> BinState for Both<L, R> {
    fn encode(&self, encoding: &mut Encoding) -> Result<Option<Vec<u8>>, StateError> {
        let extent = encoding.extent();
        let (left, right) = encoding.place(|| (Some(Encoding::of(extent)), Encoding::of(extent)));
        let of = |side: u8| {
            move |mut chunk: Vec<u8>| {
                chunk.push(side);
                chunk
            }
        };
        if let Some(encoding) = left {
            if let Some(chunk) = self.left.encode(encoding)? {
                return Ok(Some(of(LEFT)(chunk)));
            }
            *left = None;
        }
        Ok(self.right.encode(right)?.map(of(RIGHT)))
    }

    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateError> {
        match chunk.split_last() {
            Some((&LEFT, chunk)) => self.left.absorb(chunk),
            Some((&RIGHT, chunk)) => self.right.absorb(chunk),
            Some((side, _)) => Err(StateError::new(format!("a chunk of side {side} of two"))),
            None => Err(StateError::new("a chunk without bytes")),
        }
    }

    fn bytes(&self) -> usize {
        self.left.bytes() + self.right.bytes()
    }

    fn keys(&self) -> usize {
        self.left.keys() + self.right.keys()
    }

    fn is_empty(&self) -> bool {
        self.left.is_empty() && self.right.is_empty()
    }

    fn mark(&mut self) {
        self.left.mark();
        self.right.mark();
    }

    fn rollback(&mut self) -> Result<(), StateError> {
        self.left.rollback()?;
        self.right.rollback()
    }

    fn settle(&mut self) {
        self.left.settle();
        self.right.settle();
    }

    fn divide(&self, ranges: &[Range], extent: Extent, new: &dyn Fn() -> Self) -> Result<Vec<Self>, StateError> {
        let lefts = self.left.divide(ranges, extent, &|| new().left)?;
        let rights = self.right.divide(ranges, extent, &|| new().right)?;
        Ok(lefts.into_iter().zip(rights).map(|(left, right)| Self { left, right }).collect())
    }

    fn leave(&mut self) {
        self.left.leave();
        self.right.leave();
    }
}

/// What both folds share.
type BothMoment<'a, T, D, E, S, R, P, Q, O> = Moment<'a, T, Side<D, E>, Both<S, R>, Side<P, Q>, O>;

/// Bins that hold nothing: only where they are counts. See [`distribute`].
impl BinState for () {
    fn encode(&self, _: &mut Encoding) -> Result<Option<Vec<u8>>, StateError> {
        Ok(None)
    }

    fn absorb(&mut self, chunk: &[u8]) -> Result<(), StateError> {
        Err(StateError::new(format!("{} bytes of a state that has none", chunk.len())))
    }

    fn bytes(&self) -> usize {
        0
    }

    fn keys(&self) -> usize {
        0
    }

    fn mark(&mut self) {}

    fn rollback(&mut self) -> Result<(), StateError> {
        Ok(())
    }
}

/// Applies two inputs to the states of both in their bins, in time order; both move together, and migration is invisible to the folds.
///
/// Each fold gets the [`Moment`] of its input: the blocks of that, the records that it has post-dated itself, and the bins with the states of both.
/// Of one time `fold` is called before `other_fold`, each when there is something for it. What a fold puts into [`Moment::again`], and what it
/// post-dates to the same time, comes when both have been called. Rows of the two inputs meet where the hashes of their keys are equal.
///
/// # Errors
/// As [`stateful`].
///
/// # Cost
/// As of [`stateful`]: a byte a block and a chunk more, where they leave the process.
///
/// # Examples
/// Sales with the names of those who sold, whichever comes first, while the bins move:
/// ```
/// use std::sync::Arc;
/// use penstock_bins::{
///     Both, Command, Config, ControlInput, Keyed, KeyedMap, Moment, Routing, Shelf, Stats, bin, stateful_binary,
/// };
/// use penstock_dataflow::{BoxError, execute, fabric};
///
/// type Names = KeyedMap<u64, String>;
/// type Sold = KeyedMap<u64, Vec<String>>;
/// type Bins = Both<Names, Sold>;
/// type Out = Vec<(u64, String, String)>;
///
/// fn hash(id: &u64) -> u64 {
///     id.wrapping_mul(0x9E37_79B9_7F4A_7C15)
/// }
///
/// let shelf = Shelf::new();
/// let threads = execute(fabric::threads(2), move |worker| {
///     let routing = Routing::new(3, worker.peers())?;
///     let config = Config::in_process("sellers", routing.clone(), worker.index(), shelf.clone(), Arc::new(Stats::new()));
///     let (mut people, mut sales, mut control, found) = worker.dataflow::<u64, _>("sellers", |scope| {
///         let (people, names) = scope.new_input::<Keyed<u64, String>>();
///         let (sales, items) = scope.new_input::<Keyed<u64, String>>();
///         let (control, commands) = scope.new_input();
///         let person = |moment: Moment<'_, u64, Keyed<u64, String>, Bins, (), Out>| {
///             for (hash, id, name) in moment.blocks.into_iter().flat_map(Keyed::into_hashed_rows) {
///                 let bin = moment.bins.get_mut(bin(hash, 3)).ok_or("a bin elsewhere")?;
///                 let sold = bin.right.get(&id).into_iter().flatten();
///                 moment.out.give(sold.map(|item| (*moment.time, name.clone(), item.clone())).collect());
///                 *bin.left.entry(id) = name;
///             }
///             Ok(())
///         };
///         let sale = |moment: Moment<'_, u64, Keyed<u64, String>, Bins, (), Out>| {
///             for (hash, id, item) in moment.blocks.into_iter().flat_map(Keyed::into_hashed_rows) {
///                 let bin = moment.bins.get_mut(bin(hash, 3)).ok_or("a bin elsewhere")?;
///                 let name = bin.left.get(&id);
///                 moment.out.give(name.map(|name| (*moment.time, name.clone(), item.clone())).into_iter().collect());
///                 bin.right.entry(id).push(item);
///             }
///             Ok(())
///         };
///         let sold = stateful_binary(&names, &items, &commands, config, person, sale)?;
///         let found = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
///         let seen = found.clone();
///         _ = sold.output.inspect(move |_, rows| seen.borrow_mut().extend(rows.clone()));
///         Ok::<_, penstock_bins::BinsError>((people, sales, ControlInput::new(control, routing, scope.peers()), found))
///     })?;
///     if worker.index() == 0 {
///         control.schedule(1, vec![Command::Map(vec![1; 8])])?;
///         people.send(Keyed::new(vec![(1, "Ada".to_string())], hash));
///         sales.send(Keyed::new(vec![(2, "lamp".to_string()), (1, "book".to_string())], hash));
///         people.advance_to(1)?;
///         people.send(Keyed::new(vec![(2, "Bob".to_string())], hash));
///     }
///     people.close();
///     sales.close();
///     control.close();
///     while worker.step_or_park(None)? {}
///     Ok::<_, BoxError>(found.take())
/// });
/// let mut found: Vec<_> = threads.into_iter().flat_map(|thread| thread.join().unwrap().unwrap()).collect();
/// found.sort();
/// let told = |time, name: &str, item: &str| (time, name.to_string(), item.to_string());
/// assert_eq!(found, [told(0, "Ada", "book"), told(1, "Bob", "lamp")]);
/// # Ok::<(), penstock_dataflow::Error>(())
/// ```
pub fn stateful_binary<T, D, E, S, R, P, Q, O, F, G>(
    left: &Stream<T, D>,
    right: &Stream<T, E>,
    control: &Stream<T, Vec<Control>>,
    config: Config<T, Both<S, R>>,
    mut fold: F,
    mut other_fold: G,
) -> Result<Stateful<T, Both<S, R>, O>, BinsError>
where
    T: Timestamp + TotalOrder,
    D: Block,
    E: Block,
    S: BinState,
    R: BinState,
    P: Record,
    Q: Record,
    O: Clone + 'static,
    F: FnMut(Moment<'_, T, D, Both<S, R>, P, O>) -> Result<(), BoxError> + 'static,
    G: FnMut(Moment<'_, T, E, Both<S, R>, Q, O>) -> Result<(), BoxError> + 'static,
{
    let logic = move |moment: BothMoment<'_, T, D, E, S, R, P, Q, O>| -> Result<(), BoxError> {
        let Moment { capability, time, blocks, due, bins, later, out, again } = moment;
        let (mut lefts, mut rights) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
        for block in blocks {
            match block {
                Side::Left(block) => lefts.0.push(block),
                Side::Right(block) => rights.0.push(block),
            }
        }
        for (bin, record) in due {
            match record {
                Side::Left(record) => lefts.1.push((bin, record)),
                Side::Right(record) => rights.1.push((bin, record)),
            }
        }
        let (made, rest) = apply(lefts, (capability, time), bins, out, &mut fold)?;
        later.extend(made, Side::Left);
        again.extend(rest.into_iter().map(Side::Left));
        let (made, rest) = apply(rights, (capability, time), bins, out, &mut other_fold)?;
        later.extend(made, Side::Right);
        again.extend(rest.into_iter().map(Side::Right));
        Ok(())
    };
    stateful(&together(left, right), control, config, logic)
}

/// Routes rows to the workers that have the bins of their keys at their times, and hands them on there: for a step behind it that keeps
/// state of its own per worker. Rows come out when their time is complete, as of [`stateful`].
///
/// # Errors
/// As [`stateful`].
///
/// # Cost
/// Per block one look-up per row and one message per receiving worker; nothing per bin that moves but its name.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use penstock_bins::{Command, Config, ControlInput, Keyed, Routing, Shelf, Stats, distribute};
/// use penstock_dataflow::{BoxError, execute, fabric};
///
/// let shelf = Shelf::new();
/// let threads = execute(fabric::threads(2), move |worker| {
///     let routing = Routing::new(2, worker.peers())?;
///     let config = Config::in_process("words", routing.clone(), worker.index(), shelf.clone(), Arc::new(Stats::new()));
///     let seen = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
///     let (mut words, mut control) = worker.dataflow::<u64, _>("words", |scope| {
///         let (words, blocks) = scope.new_input::<Keyed<u64, char>>();
///         let (control, commands) = scope.new_input();
///         let here = distribute(&blocks, &commands, config)?;
///         let seen = seen.clone();
///         _ = here.output.inspect(move |time, block| seen.borrow_mut().extend(block.rows().iter().map(|(_, row)| (*time, *row))));
///         Ok::<_, penstock_bins::BinsError>((words, ControlInput::new(control, routing, scope.peers())))
///     })?;
///     if worker.index() == 0 {
///         control.schedule(1, vec![Command::Move { bin: 0, worker: 1 }])?;
///         words.send(Keyed::new(vec![(0, 'a'), (1, 'b')], |key| key << 62));
///         words.advance_to(1)?;
///         words.send(Keyed::new(vec![(0, 'c'), (2, 'd')], |key| key << 62));
///     }
///     words.close();
///     control.close();
///     while worker.step_or_park(None)? {}
///     let mut seen = seen.take();
///     seen.sort();
///     Ok::<_, BoxError>(seen)
/// });
/// let seen: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<_, _>>()?;
/// assert_eq!(seen, [vec![(0, 'a'), (1, 'd')], vec![(0, 'b'), (1, 'c')]]);
/// # Ok::<(), penstock_dataflow::Error>(())
/// ```
pub fn distribute<T, D>(
    data: &Stream<T, D>,
    control: &Stream<T, Vec<Control>>,
    config: Config<T, ()>,
) -> Result<Stateful<T, (), D>, BinsError>
where
    T: Timestamp + TotalOrder,
    D: Block + Clone,
{
    stateful(data, control, config, |mut moment: Moment<'_, T, D, (), (), D>| {
        moment.blocks.drain(..).for_each(|block| moment.out.give(block));
        Ok(())
    })
}

/// The blocks of both, each with its side.
fn together<T: Timestamp, D: Block, E: Block>(left: &Stream<T, D>, right: &Stream<T, E>) -> Stream<T, Side<D, E>> {
    let mut builder = OperatorBuilder::new(left.scope(), "sides");
    builder.notify(false);
    let (mut lefts, mut rights) = (builder.input(left, Pipeline), builder.input(right, Pipeline));
    let (mut output, stream) = builder.output_unshared();
    builder.build(|capabilities| {
        drop(capabilities);
        move |_| {
            while let Some((capability, block)) = lefts.next() {
                output.session(&capability).give(Side::Left(block));
            }
            while let Some((capability, block)) = rights.next() {
                output.session(&capability).give(Side::Right(block));
            }
            Ok(())
        }
    });
    stream
}

/// Gives a fold the blocks and records of its side, if there are any; what it post-dates, and blocks that are to come again.
fn apply<T, D, S, P, O>(
    (blocks, due): (Vec<D>, Vec<(u32, P)>),
    (capability, time): (&Capability<T>, &T),
    bins: &mut BinTable<S>,
    out: &mut Outbox<'_, T, O>,
    fold: &mut impl FnMut(Moment<'_, T, D, S, P, O>) -> Result<(), BoxError>,
) -> Result<(Later<T, P>, Vec<D>), BoxError>
where
    T: Timestamp + TotalOrder,
    S: BinState,
    O: Clone + 'static,
{
    let (mut later, mut again) = (Later::new(time.clone()), Vec::new());
    if !blocks.is_empty() || !due.is_empty() {
        let (later, out, again) = (&mut later, &mut out.lend(), &mut again);
        fold(Moment { capability, time, blocks, due, bins, later, out, again })?;
    }
    Ok((later, again))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keyed::{Keyed, KeyedMap};

    type Maps = Both<KeyedMap<u64, u64>, KeyedMap<u64, String>>;

    fn new() -> Maps {
        Both { left: KeyedMap::hashed(|key| *key), right: KeyedMap::hashed(|key| *key) }
    }

    type Shown = (Vec<(u64, u64)>, Vec<(u64, String)>);

    fn shown(state: &Maps) -> Shown {
        let mut left: Vec<_> = state.left.iter().map(|(key, value)| (*key, *value)).collect();
        let mut right: Vec<_> = state.right.iter().map(|(key, value)| (*key, value.clone())).collect();
        left.sort_unstable();
        right.sort_unstable();
        (left, right)
    }

    fn sent(state: &Maps, extent: Extent, to: &mut Maps) -> usize {
        let mut encoding = Encoding::of(extent);
        let mut chunks = 0;
        while let Some(chunk) = state.encode(&mut encoding).unwrap() {
            to.absorb(&chunk).unwrap();
            chunks += 1;
        }
        assert_eq!(state.encode(&mut encoding).unwrap(), None);
        chunks
    }

    #[test]
    fn both_states_move_and_are_undone_and_divided_together() {
        let mut state = new();
        assert!(state.is_empty() && sent(&state, Extent::All, &mut new()) == 0);
        *state.right.entry(1) = "a".into();
        assert!(!state.is_empty());
        state.mark();
        *state.left.entry(1) = 7;
        *state.right.entry(u64::MAX) = "b".into();
        let mut other = new();
        assert_eq!(sent(&state, Extent::All, &mut other), 2);
        assert_eq!(shown(&other), (vec![(1, 7)], vec![(1, "a".into()), (u64::MAX, "b".into())]));
        assert_eq!((state.keys(), other.bytes() > 0), (3, true));
        // What has changed is told of both, and what has not goes along only where all of it does.
        let mut changed = new();
        sent(&state, Extent::Changed, &mut changed);
        assert_eq!(shown(&changed), (vec![(1, 7)], vec![(u64::MAX, "b".into())]));
        let mut marked = new();
        marked.mark();
        sent(&state, Extent::Marked, &mut marked);
        let mut changed = new();
        sent(&marked, Extent::Changed, &mut changed);
        assert_eq!(shown(&changed), (vec![(1, 7)], vec![(u64::MAX, "b".into())]));
        let halves = [Range::new(0, 1).unwrap(), Range::new(1, 1).unwrap()];
        let parts = state.divide(&halves, Extent::All, &new).unwrap();
        assert_eq!(shown(&parts[0]), (vec![(1, 7)], vec![(1, "a".into())]));
        assert_eq!(shown(&parts[1]), (vec![], vec![(u64::MAX, "b".into())]));
        state.rollback().unwrap();
        assert_eq!(shown(&state), (vec![], vec![(1, "a".into())]));
        for chunk in [&[][..], &[9], &[1, 2]] {
            assert!(state.absorb(chunk).is_err());
        }
    }

    #[test]
    fn a_block_carries_its_side() {
        type Blocks = Side<Keyed<u64, u8>, Keyed<u64, String>>;
        let rows = |rows: &[u64]| Keyed::new(rows.iter().map(|key| (*key, key.to_string())).collect(), |key| *key);
        for block in [Blocks::Left(Keyed::new(vec![(3, 4)], |key| *key)), Blocks::Right(rows(&[1, 2, 3]))] {
            let mut bytes = Vec::new();
            block.encode(&mut bytes);
            assert_eq!(Blocks::decode(&bytes).unwrap(), block);
            assert_eq!(block.hashes().unwrap().len(), block.len());
        }
        let mut parts = Vec::new();
        Blocks::Right(rows(&[1, 2, 3])).split(&[0, 1, 0], &mut |worker, part| parts.push((worker, part)));
        assert_eq!(parts, [(0, Blocks::Right(rows(&[1, 3]))), (1, Blocks::Right(rows(&[2])))]);
        for bytes in [&[][..], &[2], &[0, 255]] {
            assert!(Blocks::decode(bytes).is_err());
        }
    }
}
