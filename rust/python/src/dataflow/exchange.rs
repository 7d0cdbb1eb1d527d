//! Exchanges: which worker gets which item or row.
//!
//! An exchange is two operators. The first runs where the block is: it splits it, and packs the parts that leave the process, so
//! that a key function that raises or an object that does not pickle is an error of that step. The second receives. A list is
//! split by one call of the key function's wrapper for the whole block and one pass over the keys; a record batch by the
//! project's hash of its columns, without the interpreter.
//!
//! Departure: two operators, so that splitting and pickling fail as a step of the user's; the edge only moves parcels.

use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch as Batch, UInt32Array};
use penstock_dataflow::{BoxError, Exchange, OperatorBuilder, Pipeline, Scope, Stream};
use penstock_plan::hash::{decoded, hash_columns_of};
use pyo3::exceptions::{PyException, PyIndexError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use super::block::{Block, Parcel, attached};
use super::time::Time;
use super::{failure, hash};
use crate::errors::{self, Kind};

/// How blocks spread over the workers.
pub(crate) enum Spread {
    /// Items by their keys: `keys(block)` gives the key of each item of a list.
    Keys {
        /// The wrapper of the user's function.
        keys: Py<PyAny>,
        /// Says which key of which item was refused, as the user's error: `refused(error)`.
        refused: Py<PyAny>,
    },
    /// Rows of record batches by the hash of these columns.
    Columns(Vec<String>),
    /// Items that are tuples, each to the worker whose number it begins with.
    Owners,
    /// Every block to every worker.
    Broadcast,
}

/// The stream after the exchange.
pub(crate) fn exchange<T: Time>(stream: &Stream<T, Block>, name: &str, spread: Spread) -> Stream<T, Block> {
    let mut builder = OperatorBuilder::new(stream.scope(), name);
    builder.notify(false);
    let mut input = builder.input(stream, Pipeline);
    let (mut output, parcels) = builder.output_unshared::<Parcel>();
    let scope = stream.scope().clone();
    let called = name.to_owned();
    builder.build(|_| {
        move |_| {
            while let Some((capability, block)) = input.next() {
                let parcels = split(block, &spread, &scope, &called)?;
                let mut session = output.session(&capability);
                parcels.into_iter().for_each(|parcel| session.give(parcel));
            }
            Ok(())
        }
    });
    let mut builder = OperatorBuilder::new(stream.scope(), "receive");
    builder.notify(false);
    let pact = Exchange::new(|_: &T, parcel: Parcel, give: &mut dyn FnMut(usize, Parcel)| give(parcel.to, parcel));
    let mut input = builder.input(&parcels, pact);
    let (mut output, made) = builder.output();
    builder.build(|_| {
        move |_| {
            while let Some((capability, parcel)) = input.next() {
                let block = match parcel.block {
                    packed @ Block::Packed(_) => attached(|py| packed.unpack(py))?,
                    open => open,
                };
                output.session(&capability).give(block);
            }
            Ok(())
        }
    });
    made
}

/// The parts of a block, each for its worker. With one worker too the key of each item and the columns are looked at, so that mistakes there
/// do not wait for a second one.
fn split<T: Time>(block: Block, spread: &Spread, scope: &Scope<T>, name: &str) -> Result<Vec<Parcel>, BoxError> {
    let peers = scope.peers();
    let parts = match (spread, &block) {
        (Spread::Broadcast, _) | (Spread::Owners, Block::Items(_)) if peers == 1 => vec![(0, block)],
        (Spread::Broadcast, _) => return broadcast(&block, scope, name),
        (Spread::Columns(columns), Block::Rows(batch)) => by_columns(batch, columns, peers)?,
        (Spread::Keys { keys, refused }, Block::Items(items)) => {
            attached(|py| by_keys(py, items, keys, refused, peers))?
        }
        (Spread::Owners, Block::Items(items)) => attached(|py| by_owners(py, items, peers))?,
        (Spread::Owners, _) => {
            return Err(misfit("a pyarrow.RecordBatch", "owners", "the first value of each tuple in a list"));
        }
        (Spread::Columns(columns), _) => {
            return Err(misfit("a list", &format!("columns {columns:?}"), "a function of an item"));
        }
        (Spread::Keys { .. }, _) => {
            return Err(misfit("a pyarrow.RecordBatch", "a function", "the name of a column or a list of names"));
        }
    };
    let remote = parts.iter().any(|(to, _)| !scope.is_local(*to));
    let pack = |py: Option<Python<'_>>| -> PyResult<Vec<Parcel>> {
        let pack = |(to, block): (usize, Block)| {
            let block = match py {
                Some(py) if !scope.is_local(to) => block.pack(py).map_err(|error| unpacked(py, error, &block, name))?,
                _ => block,
            };
            Ok(Parcel { to, block })
        };
        parts.into_iter().map(pack).collect()
    };
    match remote {
        true => attached(|py| pack(Some(py))),
        false => pack(None).map_err(BoxError::from),
    }
}

fn broadcast<T: Time>(block: &Block, scope: &Scope<T>, name: &str) -> Result<Vec<Parcel>, BoxError> {
    let peers = scope.peers();
    let packed = match (0..peers).all(|to| scope.is_local(to)) {
        true => None,
        false => Some(attached(|py| block.pack(py).map_err(|error| unpacked(py, error, block, name)))?),
    };
    let block = |to: usize| match &packed {
        Some(packed) if !scope.is_local(to) => packed.clone(),
        _ => block.clone(),
    };
    Ok((0..peers).map(|to| Parcel { to, block: block(to) }).collect())
}

fn by_keys(
    py: Python<'_>,
    whole: &Arc<Py<PyList>>,
    keys: &Py<PyAny>,
    refused: &Py<PyAny>,
    peers: usize,
) -> PyResult<Vec<(usize, Block)>> {
    let items = whole.bind(py);
    let found = keys.bind(py).call1((items,))?.cast_into::<PyList>()?;
    let hash = |key: &Bound<'_, PyAny>| hash::of(key).map_err(|error| failure::refusal(py, refused, error));
    if peers == 1 {
        found.iter().try_for_each(|key| hash(&key).map(drop))?;
        return Ok(vec![(0, Block::Items(whole.clone()))]);
    }
    let mut parts: Vec<Option<Bound<'_, PyList>>> = (0..peers).map(|_| None).collect();
    for (item, key) in items.iter().zip(found.iter()) {
        let hash = hash(&key)?;
        parts[(hash % peers as u64) as usize].get_or_insert_with(|| PyList::empty(py)).append(item)?;
    }
    Ok(full(parts))
}

fn full(parts: Vec<Option<Bound<'_, PyList>>>) -> Vec<(usize, Block)> {
    parts.into_iter().enumerate().filter_map(|(to, part)| Some((to, Block::of_list(part?)))).collect()
}

fn by_owners(py: Python<'_>, items: &Arc<Py<PyList>>, peers: usize) -> PyResult<Vec<(usize, Block)>> {
    let mut parts: Vec<Option<Bound<'_, PyList>>> = (0..peers).map(|_| None).collect();
    for item in items.bind(py).iter() {
        let owner = item.cast::<PyTuple>()?.get_item(0)?.extract::<usize>()?;
        let part = parts.get_mut(owner).ok_or_else(|| PyIndexError::new_err(format!("there is no worker {owner}")))?;
        part.get_or_insert_with(|| PyList::empty(py)).append(item)?;
    }
    Ok(full(parts))
}

fn by_columns(batch: &Batch, columns: &[String], peers: usize) -> Result<Vec<(usize, Block)>, BoxError> {
    let column = |name: &String| {
        batch.column_by_name(name).cloned().ok_or_else(|| {
            let there: Vec<_> = batch.schema_ref().fields().iter().map(|field| field.name().as_str()).collect();
            raised(Kind::Schema, &format!("exchange by column {name:?}: the batch has the columns {there:?}"))
        })
    };
    let columns = columns.iter().map(column).collect::<Result<Vec<_>, _>>()?;
    let hashes = |columns: &[ArrayRef], rows: usize| {
        // Batches of one stream may have the same keys in a dictionary and without.
        let columns = columns.iter().map(decoded).collect::<Result<Vec<_>, _>>();
        let hashes = columns.and_then(|columns| hash_columns_of(&columns, rows));
        hashes.map_err(|error| raised(Kind::Schema, &error.to_string()))
    };
    if peers == 1 {
        // Types alone: what each row hashes to makes no difference.
        let types: Vec<_> = columns.iter().map(|column| column.slice(0, 0)).collect();
        hashes(&types, 0)?;
        return Ok(vec![(0, Block::Rows(batch.clone()))]);
    }
    let hashes = hashes(&columns, batch.num_rows())?;
    let mut rows: Vec<Vec<u32>> = vec![Vec::new(); peers];
    for (row, hash) in hashes.iter().enumerate() {
        rows[(hash % peers as u64) as usize].push(row as u32);
    }
    if let Some(to) = rows.iter().position(|part| part.len() == batch.num_rows()) {
        return Ok(vec![(to, Block::Rows(batch.clone()))]);
    }
    let full = rows.into_iter().enumerate().filter(|(_, part)| !part.is_empty());
    full.map(|(to, part)| {
        let part = arrow_select::take::take_record_batch(batch, &UInt32Array::from(part))
            .map_err(|error| raised(Kind::Schema, &error.to_string()))?;
        Ok((to, Block::Rows(part)))
    })
    .collect()
}

/// An error of this module as the cause of an operator's.
fn raised(kind: Kind, message: &str) -> BoxError {
    match attached(|_| Err::<(), _>(errors::raise(kind, message))) {
        Ok(()) => message.into(),
        Err(error) => error,
    }
}

fn misfit(block: &str, given: &str, wanted: &str) -> BoxError {
    raised(Kind::Block, &format!("an exchange by {given} got {block}: the key of such a block is {wanted}"))
}

/// A block that cannot leave the process: `BlockError` from what pickling raised, with the first item that is at fault where one is alone.
fn unpacked(py: Python<'_>, error: PyErr, block: &Block, name: &str) -> PyErr {
    if !error.is_instance_of::<PyException>(py) {
        return error;
    }
    let text = error.to_string();
    let mut message = format!("{name}: a block that goes to another process cannot be pickled: {text}");
    if let Some(item) = block.unpicklable(py) {
        message.push_str(&format!("\nitem: {item}"));
    }
    let made = errors::raise_with(py, Kind::Block, &message, |_: &Bound<'_, PyDict>| Ok(()));
    made.set_cause(py, Some(error));
    made
}
