//! Rows to a member and results from it: [`Feed`], [`Drain`].

use penstock_cluster as cluster;
use penstock_cluster::message::{DrainContext, FeedContext, Which};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrow::{RecordBatch, Schema, import_batch, import_schema};
use crate::aside::{self, Aside};
use crate::errors::{self, Kind, Problem};
use crate::fork::Owner;
use crate::registry::{keys, limits};

/// One attempt to bring the rows of one partition to a member.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Feed {
    owner: Owner,
    /// The feed, until it is finished or has failed.
    aside: Option<Aside<Option<cluster::Feed>>>,
}

#[pymethods]
impl Feed {
    #[new]
    #[allow(clippy::too_many_arguments)] // the signature that Python sees
    #[pyo3(signature = (address, key, query, epoch, partition, attempt, schema, silence=None, hash=false, member=None, source=0))]
    fn new(
        py: Python<'_>,
        address: String,
        key: &[u8],
        query: String,
        epoch: u64,
        partition: u32,
        attempt: u64,
        schema: &Bound<'_, PyAny>,
        silence: Option<f64>,
        hash: bool,
        member: Option<u64>,
        source: u8,
    ) -> PyResult<Self> {
        let (keys, schema, limits) = (self::keys(key)?, import_schema(schema)?, limits(silence)?);
        let context = FeedContext { query, epoch, source, partition, attempt };
        let dial = move || {
            let feed = cluster::Feed::connect_with(&address, &keys, &context, member, &schema, limits)?;
            Ok::<_, cluster::ClusterError>(if hash { feed.hashing(&schema) } else { feed })
        };
        let feed = aside::once(py, "Feed", dial)?.map_err(|error| errors::from_cluster(&error))?;
        Ok(Self { owner: Owner::here(), aside: Some(Aside::new("Feed", Some(feed))?) })
    }

    /// Sends one batch.
    fn push(&self, py: Python<'_>, batch: &Bound<'_, PyAny>) -> PyResult<()> {
        let batch = import_batch(batch)?;
        self.call(py, move |slot| {
            let mut feed = slot.take().ok_or(None)?;
            feed.push(&batch).map_err(Some)?;
            *slot = Some(feed); // a feed that failed is over
            Ok(())
        })
    }

    /// Completes the attempt: ``{"rows", "checksum", "max_event_time", "member", "hash"}``. The rows count once released.
    fn finish<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (receipt, hash) = self.call(py, |slot| {
            let feed = slot.take().ok_or(None)?;
            let hash = feed.content().map_or(0, |content| content.sum());
            Ok((feed.finish().map_err(Some)?, hash))
        })?;
        let facts = PyDict::new(py);
        facts.set_item("rows", receipt.rows)?;
        facts.set_item("checksum", receipt.checksum)?;
        facts.set_item("max_event_time", receipt.max_event_time)?;
        facts.set_item("member", receipt.member)?;
        // As Spark's bigint, which has a sign.
        facts.set_item("hash", hash as i64)?;
        Ok(facts)
    }

    /// Gives the attempt up; nothing is staged. Harmless after `finish`.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.aside(py)?.call(py, |slot| drop(slot.take()))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("Feed", "make one in the task that has the rows"))
    }
}

impl Feed {
    fn aside(&self, py: Python<'_>) -> PyResult<&Aside<Option<cluster::Feed>>> {
        self.owner.check(py, "Feed")?;
        Ok(self.aside.as_ref().expect("only Drop takes it"))
    }

    /// Does `job` aside; its error is `None` when the feed is over already.
    fn call<T: Send + 'static>(
        &self,
        py: Python<'_>,
        job: impl FnOnce(&mut Option<cluster::Feed>) -> Result<T, Option<cluster::ClusterError>> + Send + 'static,
    ) -> PyResult<T> {
        self.aside(py)?.call(py, job)?.map_err(|error| match error {
            Some(error) => errors::from_cluster(&error),
            None => Problem::Closed("Feed").into(),
        })
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            std::mem::forget(self.aside.take());
        }
    }
}

/// The batches of one frozen piece of an epoch, as an iterator.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct Drain {
    owner: Owner,
    schema: arrow_schema::SchemaRef,
    aside: Option<Aside<cluster::Drain>>,
}

#[pymethods]
impl Drain {
    #[new]
    #[allow(clippy::too_many_arguments)] // the signature that Python sees
    #[pyo3(signature = (address, key, query, epoch, piece, which="rows", silence=None, member=None))]
    fn new(
        py: Python<'_>,
        address: String,
        key: &[u8],
        query: String,
        epoch: u64,
        piece: u32,
        which: &str,
        silence: Option<f64>,
        member: Option<u64>,
    ) -> PyResult<Self> {
        let (keys, limits) = (self::keys(key)?, limits(silence)?);
        let which = match which {
            "rows" => Which::Rows,
            "beside" => Which::Beside,
            _ => {
                let message = format!("which must be \"rows\" or \"beside\", not {which:?}");
                return Err(errors::raise(Kind::Value, &message));
            }
        };
        let context = DrainContext { query, epoch, piece, which };
        let dial = move || cluster::drain_with(&address, &keys, &context, member, &limits);
        let drain = aside::once(py, "Drain", dial)?.map_err(|error| errors::from_cluster(&error))?;
        Ok(Self { owner: Owner::here(), schema: drain.schema(), aside: Some(Aside::new("Drain", drain)?) })
    }

    /// Columns of every batch.
    #[getter]
    fn schema(&self) -> Schema {
        Schema::new(self.schema.clone())
    }

    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<RecordBatch>> {
        self.owner.check(py, "Drain")?;
        let aside = self.aside.as_ref().expect("only Drop takes it");
        match aside.call(py, Iterator::next)? {
            Some(Ok(batch)) => Ok(Some(RecordBatch::new(batch))),
            Some(Err(error)) => Err(errors::from_cluster(&error)),
            None => Ok(None),
        }
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("Drain", "make one where the rows are wanted"))
    }
}

impl Drop for Drain {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            std::mem::forget(self.aside.take());
        }
    }
}
