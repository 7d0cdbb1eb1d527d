//! Which of two variants is faster, for the Python side: `penstock_trial` under its own names, with times in seconds.

use penstock_trial::{Rule, Side};
use pyo3::prelude::*;

use crate::errors::{self, Kind};

/// Nanoseconds; 0 for what is below it or no number.
fn ns(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

fn named(side: Side) -> &'static str {
    match side {
        Side::Incumbent => "incumbent",
        Side::Challenger => "challenger",
    }
}

/// See `penstock_trial::Trial`; what it is made with is the `Rule`, and a side is named.
#[pyclass(module = "penstock._native")]
pub(crate) struct Trial(penstock_trial::Trial);

#[pymethods]
impl Trial {
    #[new]
    #[pyo3(signature = (*, wins, losses, gain, sweep=None))]
    fn new(wins: u32, losses: u32, gain: f64, sweep: Option<(u32, f64)>) -> PyResult<Self> {
        if wins == 0 || losses == 0 || !gain.is_finite() || gain <= -1.0 {
            let text = format!(
                "a trial with wins={wins}, losses={losses} and gain={gain} decides nothing: give wins and losses of 1 or \
                 more, and a gain above -1"
            );
            return Err(errors::raise(Kind::Config, &text));
        }
        Ok(Self(penstock_trial::Trial::new(Rule { wins, losses, gain, sweep })))
    }

    /// Who is served in this period.
    fn turn(&self) -> &'static str {
        named(self.0.turn())
    }

    /// Takes in a period: how much per time got done in it, and the seconds that it took in all. The winner, if that decides.
    fn judge(&mut self, rate: f64, spent: f64) -> Option<&'static str> {
        self.0.judge(rate, ns(spent)).map(named)
    }

    /// Whether the challenger, in its period, cannot reach what it has to, being at most so fast.
    fn is_hopeless(&self, at_most: f64) -> bool {
        self.0.is_hopeless(at_most)
    }

    /// Ends the trial in a period of a challenger that is hopeless.
    fn give_up(&mut self, at_most: f64, spent: f64) -> &'static str {
        named(self.0.give_up(at_most, ns(spent)))
    }

    /// What was lost beside the faster one in the pairs so far, seconds.
    fn lost(&self) -> f64 {
        self.0.lost_ns() as f64 / 1e9
    }
}

/// See `penstock_trial::Allowance`.
#[pyclass(module = "penstock._native")]
pub(crate) struct Allowance(penstock_trial::Allowance);

#[pymethods]
impl Allowance {
    #[new]
    fn new(share: f64) -> PyResult<Self> {
        if share.is_nan() || share <= 0.0 {
            let text = format!("trials that may lose a share of {share} of the time: give one above 0");
            return Err(errors::raise(Kind::Config, &text));
        }
        Ok(Self(penstock_trial::Allowance::new(share)))
    }

    /// A trial has ended and lost so many seconds.
    fn spend(&mut self, now: f64, lost: f64) {
        self.0.spend(ns(now), ns(lost));
    }

    /// Whether a trial may begin now, which is expected to lose what the last ones did times `dearer`.
    #[pyo3(signature = (now, dearer=1.0))]
    fn allows(&self, now: f64, dearer: f64) -> bool {
        self.0.allows(ns(now), dearer)
    }
}
