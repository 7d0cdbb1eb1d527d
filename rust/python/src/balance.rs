//! What is to move, for the Python side: `penstock_balance` under its own names.

use penstock_balance::{Bin, Demand, Divider, Fate, Large, Policy, SizerPolicy, Why, balanced, evened};
use penstock_bins::MAX_BITS;
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
    py: Python<'_>,
    mut owners: Vec<u32>,
    loads: Vec<u64>,
    workers: usize,
    tolerance: f64,
) -> PyResult<Vec<u32>> {
    fits(&owners, &loads)?;
    for shift in py.detach(|| evened(&owners, &loads, &vec![true; workers], tolerance)) {
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

/// Why a bin is left as it is.
const ONE_KEY: &str = "it is one key's, which nothing divides";

/// See `penstock_balance::Balancer` and `penstock_balance::Divider`, which look at the same.
#[pyclass(module = "penstock._native")]
pub(crate) struct Balancer {
    policy: Policy,
    bits: u8,
    balancer: penstock_balance::Balancer,
    divider: Divider,
    /// Those of the last look.
    bins: Vec<Bin>,
}

#[pymethods]
impl Balancer {
    #[new]
    fn new(trigger: f64, tolerance: f64, patience: u32, least_rows: u64, most_bytes: Option<u64>, bits: u8) -> Self {
        let policy = Policy { trigger, tolerance, patience, least_rows, most_bytes };
        let (balancer, divider) = (penstock_balance::Balancer::new(policy), Divider::new(policy, bits, MAX_BITS));
        Self { policy, bits, balancer, divider, bins: Vec::new() }
    }

    /// Judges the load of each bin and part since the last look, with the rows that came in that time, and the bytes that it holds.
    fn look<'py>(
        &mut self,
        py: Python<'py>,
        bins: Vec<Bin>,
        owners: Vec<u32>,
        loads: (Vec<u64>, u64),
        bytes: Vec<Option<u64>>,
        workers: u32,
    ) -> PyResult<Bound<'py, PyDict>> {
        let (loads, came) = loads;
        fits(&owners, &loads)?;
        let wrong = |(prefix, bits): &Bin| !(self.bits..=MAX_BITS).contains(bits) || prefix >> bits != 0;
        if bins.len() != loads.len() || bins.len() != bytes.len() || bins.iter().any(wrong) {
            let (loads, bytes) = (loads.len(), bytes.len());
            let text = format!("{loads} loads and {bytes} sizes for {} bins of {} bits or more", bins.len(), self.bits);
            return Err(errors::raise(Kind::Config, &text));
        }
        if bins != self.bins {
            self.balancer.recut(&self.bins, &bins, workers);
            self.bins.clone_from(&bins);
        }
        let verdict = self.balancer.look(&owners, &loads, came, workers);
        let mut division = self.divider.look(&bins, &loads, came, &bytes, workers);
        if let Why::Packed { bin, part: Some(part), .. } = verdict.why {
            self.divider.relieve(&bins, &loads, (bin, part), workers, &mut division);
        }
        let told = PyDict::new(py);
        told.set_item("skew", verdict.skew)?;
        told.set_item("expected", verdict.expected)?;
        told.set_item("moves", verdict.moves.iter().map(|shift| (bins[shift.what], shift.to)).collect::<Vec<_>>())?;
        told.set_item("splits", &division.splits)?;
        told.set_item("merges", &division.merges)?;
        let named = |(prefix, bits): Bin| match bits == self.bits {
            true => prefix.to_string(),
            false => format!("({prefix}, {bits})"),
        };
        let hot = |bin, share: f64, then: &str| {
            format!("bin {} alone has {share:.1} times what a worker should: {then}", named(bin))
        };
        let why = match (verdict.why, division.hot_key) {
            (Why::HotBin { share, .. }, Some((bin, _))) => hot(bin, share, ONE_KEY),
            (Why::HotBin { bin, share }, None) => hot(bins[bin], share, "moving bins does not help, splitting it does"),
            (Why::Packed { worker, bin, part }, _) => {
                let divides = division.splits.iter().any(|(one, _)| *one == bins[bin]);
                let helps = match part {
                    None => "moving bins does not help, and it has too little to be split",
                    Some(_) if divides => "moving bins does not help, splitting it does",
                    Some(_) => ONE_KEY,
                };
                format!("bin {} fills worker {worker} up: {helps}", named(bins[bin]))
            }
            (Why::Quiet, _) => "too few rows to judge".to_owned(),
            (Why::Even, _) => "even".to_owned(),
            (Why::Waiting { looks }, _) => format!("skewed, {looks} looks before anything moves"),
            (Why::Skewed, _) => "skewed".to_owned(),
        };
        let larger = self.too_large(&division.large, named).map(|large| format!("{why}; {large}"));
        told.set_item("why", larger.unwrap_or(why))?;
        Ok(told)
    }
}

impl Balancer {
    /// What is said of the largest bin, and how many more there are.
    fn too_large(&self, large: &[Large], named: impl Fn(Bin) -> String) -> Option<String> {
        let (Large { bin, bytes, fate }, others) = large.split_first()?;
        let limit = size(self.policy.most_bytes?);
        let then = match fate {
            Fate::Split { by } => format!("{} parts", 1 << by),
            Fate::Waits { looks: 0 } => "others are split first".to_owned(),
            Fate::Waits { looks } => format!("{looks} looks before it is split"),
            Fate::Stays => ONE_KEY.to_owned(),
        };
        let more = if others.is_empty() { String::new() } else { format!(", and {} more", others.len()) };
        Some(format!("bin {} holds {}, limit {limit}: {then}{more}", named(*bin), size(*bytes)))
    }
}

/// Bytes in the units in which limits are given.
fn size(bytes: u64) -> String {
    match bytes {
        ..0x2800 => format!("{bytes} bytes"),
        0x2800..0xA0_0000 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

/// See `penstock_balance::Sizer`.
#[pyclass(module = "penstock._native")]
pub(crate) struct Sizer(penstock_balance::Sizer);

#[pymethods]
impl Sizer {
    #[new]
    fn new(least: u32, most: u32, threads: u32, busy: f64, patience: u32) -> Self {
        Self(penstock_balance::Sizer::new(SizerPolicy { least, most, threads, busy, patience }))
    }

    /// Workers that one query keeps busy: `offered` rows per second came, `rows` were processed in `busy_s` seconds of all threads.
    fn load(&self, offered: f64, rows: u64, busy_s: f64) -> Option<f64> {
        let busy = std::time::Duration::try_from_secs_f64(busy_s).unwrap_or_default();
        self.0.load(Demand { offered, rows, busy })
    }

    /// Of the `workers` that there are and those that each query keeps busy: how many are busy, how many are needed, the number to go to, and the
    /// looks until then.
    fn look(&mut self, workers: u32, loads: Vec<Option<f64>>) -> Option<(f64, u32, u32, u32)> {
        self.0.look(workers, &loads).map(|size| (size.load, size.needed, size.workers, size.looks))
    }
}
