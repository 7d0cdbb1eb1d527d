//! The simplest stateful operator: one fold over the values of each key.
//!
//! Source: Megaphone §4.1 (`stateful_state_machine`); M-12.

use std::hash::Hash;

use penstock_dataflow::Stream;
use penstock_progress::{Timestamp, TotalOrder};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::bin::bin;
use crate::control::Control;
use crate::error::{BinsError, BoxError};
use crate::keyed::{Keyed, KeyedMap};
use crate::state::Moment;
use crate::stateful::{Config, Stateful, stateful};

/// A built state machine over keys `K` with per-key state `A` and outputs `R`.
pub type StateMachine<T, K, A, R> = Stateful<T, KeyedMap<K, A>, Vec<R>>;

/// Nothing is post-dated here.
type MachineMoment<'a, T, K, V, A, R> = Moment<'a, T, Keyed<K, V>, KeyedMap<K, A>, (), Vec<R>>;

/// Applies `fold` to each value with the state of its key, in time order; migration is invisible to it.
///
/// `fold(key, value, state)` returns whether to drop the key, and outputs. A dropped or new key starts from the default state.
/// Blocks without hashes are refused when they arrive: there is no bin for their keys.
///
/// # Errors
/// As [`stateful`].
///
/// # Examples
/// Counting words while their counts move:
/// ```
/// use std::sync::Arc;
/// use penstock_bins::{Command, Config, ControlInput, Keyed, Routing, Shelf, Stats, state_machine};
/// use penstock_dataflow::{BoxError, execute, fabric};
///
/// fn hash(word: &String) -> u64 {
///     word.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x9E37_79B9_7F4A_7C15))
/// }
///
/// let shelf = Shelf::new();
/// let threads = execute(fabric::threads(2), move |worker| {
///     let routing = Routing::new(4, worker.peers())?;
///     let config = Config::in_process("count", routing.clone(), worker.index(), shelf.clone(), Arc::new(Stats::new()));
///     let (mut words, mut control, counts) = worker.dataflow::<u64, _>("words", |scope| {
///         let (words, lines) = scope.new_input::<Keyed<String, u64>>();
///         let (control, commands) = scope.new_input();
///         let counts = state_machine(&lines, &commands, config, |word: &String, n, sum: &mut u64| {
///             *sum += n;
///             (false, Some((word.clone(), *sum)))
///         })?;
///         Ok::<_, penstock_bins::BinsError>((words, ControlInput::new(control, routing, scope.peers()), counts))
///     })?;
///     if worker.index() == 0 {
///         // From time 1 on every word is counted by worker 1.
///         control.schedule(1, vec![Command::Map(vec![1; 16])])?;
///     }
///     for time in 0..3 {
///         words.send(Keyed::new(vec![("a".to_string(), 1), ("rose".to_string(), 1)], hash));
///         words.advance_to(time + 1)?;
///         control.advance_to(time + 1)?;
///     }
///     words.close();
///     control.close();
///     while worker.step_or_park(None)? {}
///     let counted = counts.table.borrow().owned().map(|(_, state)| *state.get(&"rose".to_string()).unwrap_or(&0)).sum::<u64>();
///     Ok::<_, BoxError>(counted)
/// });
/// let counted: Vec<u64> = threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<_, _>>()?;
/// assert_eq!(counted, [0, 6]);
/// # Ok::<(), penstock_dataflow::Error>(())
/// ```
pub fn state_machine<T, K, V, A, R, I, F>(
    data: &Stream<T, Keyed<K, V>>,
    control: &Stream<T, Vec<Control>>,
    config: Config<T, KeyedMap<K, A>>,
    mut fold: F,
) -> Result<StateMachine<T, K, A, R>, BinsError>
where
    T: Timestamp + TotalOrder,
    K: Eq + Hash + Clone + Serialize + DeserializeOwned + Send + 'static,
    V: Serialize + DeserializeOwned + Send + 'static,
    A: Default + Clone + Serialize + DeserializeOwned + Send + 'static,
    R: Clone + 'static,
    I: IntoIterator<Item = R>,
    F: FnMut(&K, V, &mut A) -> (bool, I) + 'static,
{
    let logic = move |moment: MachineMoment<'_, T, K, V, A, R>| -> Result<(), BoxError> {
        let bits = moment.bins.bits();
        let mut outputs = Vec::new();
        for block in moment.blocks {
            if !block.is_hashed() {
                return Err("a block without hashes has no bins".into());
            }
            for (hash, key, value) in block.into_hashed_rows() {
                let bin = bin(hash, bits);
                let state = moment.bins.get_mut(bin).ok_or(BinsError::Absent { bin })?;
                let (done, results) = fold(&key, value, state.entry(key.clone()));
                if done {
                    state.remove(&key);
                }
                outputs.extend(results);
            }
        }
        if !outputs.is_empty() {
            moment.out.give(outputs);
        }
        Ok(())
    };
    stateful(data, control, config, logic)
}
