//! Edge lists as text.

use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::builder::LargeStringBuilder;
use arrow_array::{ArrayRef, RecordBatch as Batch, UInt64Array};
use penstock_graph::text::{Edge, EdgeText, Ids as TextIds};
use pyo3::prelude::*;

use crate::arrow::RecordBatch;
use crate::errors;
use crate::graph::{Ids, done};

/// Reads an edge list piece by piece into record batches of two columns.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct GraphText {
    ids: TextIds,
    reader: Mutex<EdgeText>,
}

#[pymethods]
impl GraphText {
    #[new]
    fn new(place: &str, ids: &str) -> PyResult<Self> {
        let ids = if Ids::read(ids)? == Ids::Text { TextIds::Texts } else { TextIds::Numbers };
        Ok(Self { ids, reader: Mutex::new(EdgeText::new(place, ids)) })
    }

    /// The edges of the next piece of the text; `last` says that no other follows.
    #[pyo3(signature = (text, last=false))]
    fn read(&self, py: Python<'_>, text: &[u8], last: bool) -> PyResult<RecordBatch> {
        let read = || {
            let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
            let (mut from, mut to): (Vec<u64>, Vec<u64>) = Default::default();
            let mut names = [LargeStringBuilder::new(), LargeStringBuilder::new()];
            let mut each = |edge: Edge<'_>| {
                match edge {
                    Edge::Numbers(a, b) => {
                        from.push(a);
                        to.push(b);
                    }
                    Edge::Texts(a, b) => {
                        names[0].append_value(a);
                        names[1].append_value(b);
                    }
                }
                Ok(())
            };
            reader.push(text, &mut each)?;
            if last {
                reader.finish(&mut each)?;
            }
            let columns: [ArrayRef; 2] = match self.ids {
                TextIds::Numbers => [Arc::new(UInt64Array::from(from)), Arc::new(UInt64Array::from(to))],
                TextIds::Texts => names.map(|mut names| Arc::new(names.finish()) as ArrayRef),
            };
            Ok(columns)
        };
        let [from, to] = done(py.detach(read))?;
        let batch = Batch::try_from_iter([("src", from), ("dst", to)]).map_err(|error| errors::arrow(&error))?;
        Ok(RecordBatch::new(batch))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("GraphText", "read the file where it is needed"))
    }
}
