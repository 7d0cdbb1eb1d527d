//! CT, current throughput: the operator that has got through the least of the pipeline's input.

use super::{Load, Scheduler};

/// Serves the operator with the lowest n = (T + w·s)/(c·cs₋₁): how many inputs of the pipeline its workers' time in this window is worth.
///
/// cs₋₁ is Π S of the operators before it, 1 for the first; s is the slice that a worker is about to get. Where c or cs₋₁ is 0 its input
/// costs nothing or never comes, so it is no bottleneck: n is infinite. An operator that was never measured has n = 0. Of equal ones
/// the earliest.
#[derive(Clone, Copy, Debug)]
pub struct Ct {
    /// s, nanoseconds.
    pub slice_ns: f64,
}

impl Default for Ct {
    fn default() -> Self {
        Self { slice_ns: 100_000.0 }
    }
}

impl Ct {
    fn inputs(&self, load: &Load, before: f64) -> f64 {
        let Some(cost_ns) = load.cost_ns else { return 0.0 };
        let each_ns = cost_ns * before;
        // Neither 0, nor infinite, nor 0 times infinity.
        if !each_ns.is_normal() {
            return if each_ns.is_infinite() { 0.0 } else { f64::INFINITY };
        }
        (load.spent_ns as f64 + load.workers as f64 * self.slice_ns) / each_ns
    }
}

impl Scheduler for Ct {
    fn pick(&self, loads: &[Load]) -> Option<usize> {
        let mut before = 1.0;
        let mut best: Option<(usize, f64)> = None;
        for (at, load) in loads.iter().enumerate() {
            if load.runnable() {
                let inputs = self.inputs(load, before);
                if best.is_none_or(|(_, least)| inputs < least) {
                    best = Some((at, inputs));
                }
            }
            before *= load.selectivity.unwrap_or(1.0);
        }
        best.map(|(at, _)| at)
    }

    fn name(&self) -> String {
        "ct".into()
    }
}

#[cfg(test)]
mod tests {
    use super::super::vectors::load;
    use super::*;

    const CT: Ct = Ct { slice_ns: 1000.0 };

    fn at(cost_ns: f64, selectivity: f64, workers: usize, spent_ns: u64) -> Load {
        Load { cost_ns: Some(cost_ns), selectivity: Some(selectivity), workers, spent_ns, ..load(1, 0) }
    }

    #[test]
    fn the_least_inputs_for_its_time() {
        // 600/100 = 6 inputs against 1000/200 = 5.
        assert_eq!(CT.pick(&[at(100.0, 1.0, 0, 600), at(200.0, 1.0, 0, 1000)]), Some(1));
        // One worker there counts as its slice: 2000/200 = 10.
        assert_eq!(CT.pick(&[at(100.0, 1.0, 0, 600), at(200.0, 1.0, 1, 1000)]), Some(0));
        assert_eq!(CT.pick(&[at(100.0, 1.0, 0, 500), at(100.0, 1.0, 0, 500)]), Some(0), "the earliest of equal ones");
    }

    #[test]
    fn selectivity_of_those_before_it_counts_and_its_own_does_not() {
        // The second sees 4 items per input: 1000/(100*4) = 2.5 inputs against 3.
        assert_eq!(CT.pick(&[at(100.0, 4.0, 0, 300), at(100.0, 9.0, 0, 1000)]), Some(1));
        // A first one of selectivity 1/2: 1000/(100/2) = 20 against 3.
        assert_eq!(CT.pick(&[at(100.0, 0.5, 0, 300), at(100.0, 9.0, 0, 1000)]), Some(0));
    }

    #[test]
    fn no_cost_and_no_input_are_no_bottleneck() {
        assert_eq!(CT.pick(&[at(0.0, 1.0, 0, 0), at(100.0, 1.0, 3, 1_000_000)]), Some(1));
        assert_eq!(CT.pick(&[at(100.0, 0.0, 3, 1_000_000), at(100.0, 1.0, 0, 0)]), Some(0), "nothing passes the first");
        assert_eq!(CT.pick(&[at(0.0, 0.0, 0, 0), at(0.0, 0.0, 0, 0)]), Some(0), "all infinite: the earliest");
        assert_eq!(CT.pick(&[at(0.0, 0.0, 0, 0), at(f64::INFINITY, 0.0, 0, 0)]), Some(0), "0 times infinity");
    }

    #[test]
    fn what_was_never_measured_comes_first() {
        let fresh = Load { cost_ns: None, selectivity: None, ..load(1, 0) };
        assert_eq!(CT.pick(&[at(100.0, 1.0, 0, 1), fresh]), Some(1));
        assert_eq!(CT.pick(&[fresh, fresh]), Some(0));
    }
}
