//! What is to move, for the Python side: `penstock_balance` under its own names.

use penstock_balance::{Demand, Policy, SizerPolicy, Why, balanced, evened};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{self, Kind};

/// Owners with equal shares, up to one bin, that differ from these in as few bins as possible.
#[pyfunction]
pub(crate) fn balanced_owners(mut owners: Vec<u32>, workers: usize) -> Vec<u32> {
    for shift in balanced(&owners, &vec![true; workers]) {
        owners[shift.what] = shift.to;
    }
    owners
}

/// Owners by which no worker has more than `tolerance` times the mean of the loads, where bins allow it.
#[pyfunction]
pub(crate) fn evened_owners(
    mut owners: Vec<u32>,
    loads: Vec<u64>,
    workers: usize,
    tolerance: f64,
) -> PyResult<Vec<u32>> {
    fits(&owners, &loads)?;
    for shift in evened(&owners, &loads, &vec![true; workers], tolerance) {
        owners[shift.what] = shift.to;
    }
    Ok(owners)
}

fn fits(owners: &[u32], loads: &[u64]) -> PyResult<()> {
    match owners.len() == loads.len() {
        true => Ok(()),
        false => Err(errors::raise(Kind::Config, &format!("{} loads for {} bins", loads.len(), owners.len()))),
    }
}

/// See `penstock_balance::Balancer`.
#[pyclass(module = "penstock._native")]
pub(crate) struct Balancer(penstock_balance::Balancer);

#[pymethods]
impl Balancer {
    #[new]
    fn new(trigger: f64, tolerance: f64, patience: u32, least_rows: u64) -> Self {
        Self(penstock_balance::Balancer::new(Policy { trigger, tolerance, patience, least_rows }))
    }

    /// Judges the rows that each bin got since the last look.
    fn look<'py>(
        &mut self,
        py: Python<'py>,
        owners: Vec<u32>,
        rows: Vec<u64>,
        workers: u32,
    ) -> PyResult<Bound<'py, PyDict>> {
        fits(&owners, &rows)?;
        let verdict = self.0.look(&owners, &rows, workers);
        let told = PyDict::new(py);
        told.set_item("skew", verdict.skew)?;
        told.set_item("expected", verdict.expected)?;
        told.set_item("moves", verdict.moves.iter().map(|shift| (shift.what, shift.to)).collect::<Vec<_>>())?;
        let why = match verdict.why {
            Why::Quiet => "too few rows to judge".to_owned(),
            Why::Even => "even".to_owned(),
            Why::Waiting { looks } => format!("skewed, {looks} looks before anything moves"),
            Why::HotBin { bin, share } => {
                format!("bin {bin} alone has {share:.1} times what a worker should: moving bins does not help")
            }
            Why::Skewed => "skewed".to_owned(),
        };
        told.set_item("why", why)?;
        Ok(told)
    }
}

/// See `penstock_balance::Sizer`.
#[pyclass(module = "penstock._native")]
pub(crate) struct Sizer(penstock_balance::Sizer);

#[pymethods]
impl Sizer {
    #[new]
    fn new(least: u32, most: u32, busy: f64, patience: u32) -> Self {
        Self(penstock_balance::Sizer::new(SizerPolicy { least, most, busy, patience }))
    }

    /// Workers that are needed, and the number to change to when it is time: `offered` rows per second came, `rows` were processed in
    /// `busy_s` seconds of worker time.
    fn look(&mut self, workers: u32, offered: f64, rows: u64, busy_s: f64) -> (Option<u32>, Option<u32>) {
        let busy = std::time::Duration::try_from_secs_f64(busy_s).unwrap_or_default();
        let demand = Demand { workers, offered, rows, busy };
        (self.0.needed(demand), self.0.look(demand))
    }
}
