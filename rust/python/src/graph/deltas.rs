//! Changes of edges to changes of matches.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::cast::AsArray;
use arrow_array::types::{Int64Type, UInt64Type};
use arrow_array::{Array, ArrayRef, Int8Array, Int64Array, LargeStringArray, RecordBatch as Batch, UInt64Array};
use arrow_schema::{DataType, Field, Schema as ArrowSchema};
use penstock_graph::Pattern;
use penstock_graph::delta::Deltas;
use penstock_graph::domain::{signed, turned};
use pyo3::prelude::*;

use crate::arrow::{RecordBatch, Schema};
use crate::errors::{self, Kind};
use crate::graph::{Ids, done, ends};

/// Nodes numbered as they first come.
#[derive(Default)]
struct Names {
    numbers: HashMap<u64, u32>,
    ids: Vec<u64>,
    texts: HashMap<Arc<str>, u32>,
    names: Vec<Arc<str>>,
}

impl Names {
    fn full() -> PyErr {
        errors::raise(Kind::Schema, "more than 2^32 - 1 nodes: deltas cannot number them")
    }

    fn number(&mut self, id: u64) -> PyResult<u32> {
        if let Some(&node) = self.numbers.get(&id) {
            return Ok(node);
        }
        let node = u32::try_from(self.ids.len()).ok().filter(|node| *node < u32::MAX).ok_or_else(Self::full)?;
        self.numbers.insert(id, node);
        self.ids.push(id);
        Ok(node)
    }

    fn text(&mut self, name: &str) -> PyResult<u32> {
        if let Some(&node) = self.texts.get(name) {
            return Ok(node);
        }
        let node = u32::try_from(self.names.len()).ok().filter(|node| *node < u32::MAX).ok_or_else(Self::full)?;
        let name = Arc::<str>::from(name);
        self.texts.insert(name.clone(), node);
        self.names.push(name);
        Ok(node)
    }
}

/// Changes of edges to changes of the matches of a pattern.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct GraphDeltas {
    ids: Ids,
    schema: Arc<ArrowSchema>,
    state: Mutex<(Deltas, Names)>,
}

#[pymethods]
impl GraphDeltas {
    #[new]
    fn new(pattern: &str, ids: &str) -> PyResult<Self> {
        let ids = Ids::read(ids)?;
        let pattern = Pattern::parse(pattern).map_err(|error| errors::from_graph(&error.into()))?;
        let mut fields = pattern.columns().map(|name| Field::new(name, ids.arrow(), false)).collect::<Vec<_>>();
        if fields.iter().any(|field| field.name() == "diff") {
            return Err(errors::raise(
                Kind::Config,
                "a column named \"diff\" says what came and went; rename the variable",
            ));
        }
        fields.push(Field::new("diff", DataType::Int8, false));
        let state = Mutex::new((Deltas::new(&pattern), Names::default()));
        Ok(Self { ids, schema: Arc::new(ArrowSchema::new(fields)), state })
    }

    /// Notes edges that come (`times` above 0) or go (below) in the epoch under way.
    fn change(&self, name: &str, edges: &Bound<'_, PyAny>, times: i64) -> PyResult<()> {
        let (from, to) = ends(self.ids, name, edges)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (deltas, names) = &mut *state;
        let mut nodes = |column: &ArrayRef, row: usize| match self.ids {
            Ids::Signed => names.number(turned(column.as_primitive::<Int64Type>().value(row))),
            Ids::Unsigned => names.number(column.as_primitive::<UInt64Type>().value(row)),
            Ids::Text => names.text(column.as_string::<i64>().value(row)),
        };
        for row in 0..from.len() {
            let (from, to) = (nodes(&from, row)?, nodes(&to, row)?);
            done(deltas.change(name, from, to, times))?;
        }
        Ok(())
    }

    /// Forgets what was noted in the epoch under way.
    fn discard(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0.discard();
    }

    /// Ends the epoch: matches that went (diff -1), then those that came (1).
    fn commit(&self, py: Python<'_>) -> PyResult<Vec<RecordBatch>> {
        let work = || {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let (deltas, names) = &mut *state;
            let head = deltas.pattern().head.clone();
            let (mut columns, mut diffs) = (vec![Vec::<u32>::new(); head.len()], Vec::new());
            deltas.commit(&mut |row, came| {
                columns.iter_mut().zip(&head).for_each(|(column, at)| column.push(row[*at]));
                diffs.push(if came { 1_i8 } else { -1 });
            });
            let mut batches = Vec::new();
            for first in (0..diffs.len()).step_by(1 << 16) {
                let rows = first..diffs.len().min(first + (1 << 16));
                let column = |column: &Vec<u32>| -> ArrayRef {
                    let nodes = column[rows.clone()].iter().map(|&node| node as usize);
                    match self.ids {
                        Ids::Signed => {
                            Arc::new(Int64Array::from_iter_values(nodes.map(|node| signed(names.ids[node]))))
                        }
                        Ids::Unsigned => Arc::new(UInt64Array::from_iter_values(nodes.map(|node| names.ids[node]))),
                        Ids::Text => {
                            Arc::new(LargeStringArray::from_iter_values(nodes.map(|node| &*names.names[node])))
                        }
                    }
                };
                let mut arrays = columns.iter().map(column).collect::<Vec<_>>();
                arrays.push(Arc::new(Int8Array::from(diffs[rows.clone()].to_vec())));
                batches.push(Batch::try_new(self.schema.clone(), arrays)?);
            }
            Ok(batches)
        };
        let batches = py.detach(work).map_err(|error| errors::arrow(&error))?;
        Ok(batches.into_iter().map(RecordBatch::new).collect())
    }

    /// The columns of what `commit` gives.
    #[getter]
    fn schema(&self) -> Schema {
        Schema::new(self.schema.clone())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("GraphDeltas", "make one where the edges come"))
    }
}
