//! ET, estimated time: the operator that would take longest to finish what waits.

use super::{Load, Scheduler};

/// Serves the operator with the highest I·c/(w+1): the time to finish its input if one more worker came.
///
/// An operator that was never measured counts as the longest of all, so that it is measured. Of equal ones the earliest.
#[derive(Clone, Copy, Debug, Default)]
pub struct Et;

impl Et {
    /// The estimate, nanoseconds.
    fn time_ns(load: &Load) -> f64 {
        load.cost_ns.map_or(f64::INFINITY, |cost_ns| load.input as f64 * cost_ns / (load.workers + 1) as f64)
    }
}

impl Scheduler for Et {
    fn pick(&self, loads: &[Load]) -> Option<usize> {
        let mut best: Option<(usize, f64)> = None;
        for (at, load) in loads.iter().enumerate().filter(|(_, load)| load.runnable()) {
            let time_ns = Self::time_ns(load);
            if best.is_none_or(|(_, most)| time_ns > most) {
                best = Some((at, time_ns));
            }
        }
        best.map(|(at, _)| at)
    }

    fn name(&self) -> String {
        "et".into()
    }
}

#[cfg(test)]
mod tests {
    use super::super::vectors::load;
    use super::*;

    fn at(input: usize, cost_ns: f64, workers: usize) -> Load {
        Load { cost_ns: Some(cost_ns), workers, ..load(input, 0) }
    }

    #[test]
    fn the_longest_estimate_wins() {
        assert_eq!(Et.pick(&[at(10, 100.0, 0), at(3, 400.0, 0)]), Some(1), "1000 against 1200");
        assert_eq!(Et.pick(&[at(10, 100.0, 0), at(3, 400.0, 1)]), Some(0), "1000 against 600");
        assert_eq!(Et.pick(&[at(8, 100.0, 1), at(12, 100.0, 2)]), Some(0), "400 against 400: the earliest");
    }

    #[test]
    fn costs_of_nothing_lose_but_are_served() {
        assert_eq!(Et.pick(&[at(1000, 0.0, 0), at(1, 1.0, 0)]), Some(1));
        assert_eq!(Et.pick(&[at(1000, 0.0, 0), at(9, 0.0, 0)]), Some(0));
    }

    #[test]
    fn what_was_never_measured_comes_first() {
        let fresh = Load { cost_ns: None, ..load(1, 0) };
        assert_eq!(Et.pick(&[at(1000, 1e9, 0), fresh, fresh]), Some(1));
    }

    #[test]
    fn only_where_a_worker_has_a_place() {
        assert_eq!(Et.pick(&[Load { most: 1, ..at(1000, 1e9, 1) }, at(0, 1e9, 0), at(1, 1.0, 0)]), Some(2));
    }
}
