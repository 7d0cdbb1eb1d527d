//! What a checkpoint holds, for those who look into it: manifests as JSON, and the state in data files as rows.
//!
//! Nothing is written here, and no name of a file is known: Python lists a folder and reads bytes, this module says what they mean.

use std::collections::BTreeSet;
use std::io;

use penstock_engine::{Contents, Named};
use penstock_files::{Damage, File, FileError, Index, Range, ReadAt, ranges};
use penstock_plan::{Kept, KeptError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::json;

use crate::arrow::{RecordBatch, Schema};
use crate::ending;
use crate::errors::{self, Kind};

/// What manifests say, by name, as JSON:
/// ``{"manifests": {name: {...}}, "damaged": {name: reason}, "serving": {batch: name}, "hidden": {batch: name}}``.
///
/// A batch that nothing serves, since one of its manifests is damaged, has none in ``serving``, and that one in ``hidden``.
#[pyfunction]
pub(crate) fn checkpoint_manifests(files: Vec<(String, Vec<u8>)>) -> String {
    let mut contents = Contents::default();
    files.iter().for_each(|(name, bytes)| contents.add(name, bytes.len() as u64, bytes));
    let (mut manifests, mut damaged, mut serving, mut hidden) = (json!({}), json!({}), json!({}), json!({}));
    let mut batches = BTreeSet::new();
    for (name, read) in &contents.manifests {
        let batch = match read {
            Ok(manifest) => {
                manifests[name] = json!(manifest);
                manifest.batch
            }
            Err(reason) => {
                damaged[name] = json!(reason.to_string());
                let Some(Named::Manifest { batch }) = Named::parse(name) else { continue };
                batch
            }
        };
        // Once for all manifests of a batch.
        if !batches.insert(batch) {
            continue;
        }
        match contents.serving(batch) {
            Ok(Some(best)) => serving[batch.to_string()] = json!(best.name()),
            Ok(None) => {}
            Err((damaged, _)) => hidden[batch.to_string()] = json!(damaged),
        }
    }
    json!({"manifests": manifests, "damaged": damaged, "serving": serving, "hidden": hidden}).to_string()
}

/// Bytes that Python reads.
struct Reads {
    length: u64,
    /// `read(offset, length)`
    read: Py<PyAny>,
}

impl ReadAt for Reads {
    fn length(&self) -> io::Result<u64> {
        Ok(self.length)
    }

    fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let read = |py: Python<'_>| -> PyResult<Vec<u8>> {
            Ok(self.read.bind(py).call1((offset, length))?.cast::<PyBytes>()?.as_bytes().to_vec())
        };
        match ending::attach(read) {
            Some(read) => read.map_err(io::Error::other),
            None => Err(io::Error::other("Python is shutting down")),
        }
    }
}

/// Data files of one manifest, oldest first, opened: their indices are read.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct CheckpointFiles {
    files: Vec<File<Reads>>,
    index: Index,
}

#[pymethods]
impl CheckpointFiles {
    #[new]
    fn new(py: Python<'_>, files: Vec<(String, u64, u32, Py<PyAny>)>) -> PyResult<Self> {
        let open = |(name, length, expected, read)| {
            let file = File::open(name, Reads { length, read })?;
            match file.checksum() {
                found if found == expected => Ok(file),
                found => {
                    let damage = Damage::Checksum { what: "all of it", found, expected };
                    Err(FileError::Damage { name: file.name().to_owned(), damage })
                }
            }
        };
        let open = || files.into_iter().map(open).collect::<Result<Vec<_>, _>>();
        let files = py.detach(open).map_err(|error| from_kept(KeptError::File(error)))?;
        Ok(Self { index: Index::of(&files), files })
    }

    /// What they hold, in order: name of the file, operator, prefix and length of the range of hashes, whether it is a base, bytes.
    fn segments(&self) -> Vec<(String, String, u32, u8, bool, u64)> {
        let told = |file: &File<Reads>| {
            let name = file.name().to_owned();
            let segments = file.segments().iter().map(move |one| {
                (name.clone(), one.operator.to_string(), one.range.prefix(), one.range.length(), one.base, one.length())
            });
            segments.collect::<Vec<_>>()
        };
        self.files.iter().flat_map(told).collect()
    }

    /// The ranges of an operator: disjoint, and together all of its state. Prefix and length. Whoever asks is about to read them all: what
    /// lies together in a file is read at once then.
    fn ranges(&self, operator: &str) -> Vec<(u32, u8)> {
        let all = ranges(&self.files).into_iter().filter(|(name, _)| &**name == operator);
        let all: Vec<_> = all.map(|(_, range)| range).collect();
        self.index.expect(&self.files, all.iter().map(|range| (operator, *range)));
        all.iter().map(|range| (range.prefix(), range.length())).collect()
    }

    /// The rows of a range of an operator whose manifest has these ``columns``; of a function its keys and values as bytes.
    fn rows(
        &self,
        py: Python<'_>,
        operator: &str,
        columns: &str,
        prefix: u32,
        length: u8,
    ) -> PyResult<Vec<RecordBatch>> {
        let range = Range::new(prefix, length)
            .ok_or_else(|| errors::raise(Kind::Value, &format!("there is no range {prefix}/{length}")))?;
        let read = || {
            let mut chunks = self.index.select(&self.files, operator, range);
            let rows = Kept::from_json(columns).and_then(|kept| kept.rows(&mut chunks));
            rows.map_err(|error| Box::new((chunks.file().map(str::to_owned), error)))
        };
        let rows = py.detach(read).map_err(|failed| match *failed {
            (Some(file), error @ (KeptError::State(_) | KeptError::Damage(_))) => {
                errors::raise(Kind::State, &format!("file {file}: operator {operator}: {error}"))
            }
            (_, error) => from_kept(error),
        })?;
        Ok(rows.into_iter().map(RecordBatch::new).collect())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("CheckpointFiles", "open the files again where they are needed"))
    }
}

/// Columns of the rows of an operator by the ``columns`` of its manifest, those of its keys, and whether its values are what a function keeps.
#[pyfunction]
pub(crate) fn checkpoint_columns(columns: &str) -> PyResult<(Schema, Schema, bool)> {
    let facts = || {
        let kept = Kept::from_json(columns)?;
        Ok((Schema::new(kept.schema()?), Schema::new(kept.keys().clone()), kept.is_values()))
    };
    facts().map_err(from_kept)
}

/// What storage raised goes on as it is; all else names the file where it is one's.
fn from_kept(error: KeptError) -> PyErr {
    match error {
        KeptError::File(FileError::Read { name, source }) => {
            let message = format!("file {name} cannot be read: {source}");
            match source.into_inner().map(|inner| inner.downcast::<PyErr>()) {
                Some(Ok(raised)) => *raised,
                _ => errors::raise(Kind::Storage, &message),
            }
        }
        KeptError::File(error) => errors::raise(Kind::Storage, &error.to_string()),
        KeptError::Value(error) => errors::from_op(&error),
        error => errors::raise(Kind::State, &error.to_string()),
    }
}
