//! Relations ready to be searched.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use penstock_graph::{Index, Pattern, Query, file, units};
use pyo3::prelude::*;

use crate::aside;
use crate::errors;
use crate::graph::{Ids, done, published};

/// Relations ready to be searched: memory of this process, or a file that all processes of the host share.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct GraphIndex {
    pub(crate) index: Arc<Index>,
}

impl GraphIndex {
    pub(crate) fn query(&self, pattern: &str, order: Option<Vec<String>>) -> PyResult<Query> {
        let pattern = Pattern::parse(pattern).map_err(|error| errors::from_graph(&error.into()))?;
        let order = order.as_ref().map(|order| order.iter().map(String::as_str).collect::<Vec<_>>());
        done(Query::new(self.index.clone(), &pattern, order.as_deref()))
    }
}

#[pymethods]
impl GraphIndex {
    /// Maps a file that `save` wrote.
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let index = done(aside::once(py, "GraphIndex", move || file::open(&path))?)?;
        Ok(Self { index: Arc::new(index) })
    }

    /// Writes the index to a file, which appears at once and whole.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let (index, stop) = (self.index.clone(), Arc::<AtomicBool>::default());
        let seen = stop.clone();
        published(py, "GraphIndex", &stop, move || file::save_unless(&index, &path, &seen))
    }

    /// What nodes are: signed, unsigned or text.
    #[getter]
    fn ids(&self) -> &'static str {
        Ids::of(&self.index).name()
    }

    /// Whether it is an undirected graph, oriented: matches are sets, whose nodes ascend.
    #[getter]
    fn sets(&self) -> bool {
        self.index.labels.is_some()
    }

    /// How many nodes all relations name.
    #[getter]
    fn nodes(&self) -> usize {
        self.index.nodes()
    }

    /// How many edges each relation has, by name.
    #[getter]
    fn relations(&self) -> Vec<(String, usize)> {
        let relations = self.index.relations.iter();
        relations.map(|relation| (relation.name.clone(), relation.forward.view().targets.len())).collect()
    }

    /// The order in which the attributes of a pattern are bound.
    #[pyo3(signature = (pattern, order=None))]
    fn order(&self, py: Python<'_>, pattern: &str, order: Option<Vec<String>>) -> PyResult<Vec<String>> {
        py.detach(|| self.query(pattern, order)).map(|query| query.order().to_vec())
    }

    /// Cuts the work of a pattern into about `parts` pieces of like size.
    #[pyo3(signature = (pattern, parts, order=None))]
    fn units(
        &self,
        py: Python<'_>,
        pattern: &str,
        parts: usize,
        order: Option<Vec<String>>,
    ) -> PyResult<Vec<(u32, u32, u32, u32)>> {
        let query = py.detach(|| self.query(pattern, order))?;
        let cut = move || {
            let units = units::split(&query, parts);
            query.index().release();
            units
        };
        let units = aside::once(py, "GraphIndex", cut)?;
        Ok(units.into_iter().map(|unit| (unit.from.0, unit.from.1, unit.to.0, unit.to.1)).collect())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(errors::no_pickle("GraphIndex", "save it and open the file where it is needed"))
    }
}
