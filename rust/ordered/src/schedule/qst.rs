//! QST, queue-size throttling: pressure from the ingress, bounded output queues.

use super::{Load, Scheduler};

/// Serves the earliest operator whose output queue is below its threshold.
///
/// The threshold of operator i is θ·csᵢ, with csᵢ = Π S of the operators up to and including i: as many items as θ inputs of the pipeline become
/// there. It is never below one item.
#[derive(Clone, Copy, Debug)]
pub struct Qst {
    /// θ, in inputs of the pipeline.
    pub theta: f64,
}

impl Default for Qst {
    fn default() -> Self {
        Self { theta: 256.0 }
    }
}

impl Scheduler for Qst {
    fn pick(&self, loads: &[Load]) -> Option<usize> {
        let mut cs = 1.0;
        loads.iter().position(|load| {
            cs *= load.selectivity.unwrap_or(1.0);
            // `max` also where 0 times infinity has made it no number.
            load.runnable() && (load.output as f64) < (self.theta * cs).max(1.0)
        })
    }

    fn name(&self) -> String {
        "qst".into()
    }
}

#[cfg(test)]
mod tests {
    use super::super::vectors::load;
    use super::*;

    #[test]
    fn the_earliest_below_its_threshold() {
        let qst = Qst { theta: 10.0 };
        assert_eq!(qst.pick(&[load(5, 9), load(5, 0)]), Some(0));
        assert_eq!(qst.pick(&[load(5, 10), load(5, 9)]), Some(1), "10 is not below 10");
        assert_eq!(qst.pick(&[load(5, 10), load(5, 10)]), None);
        assert_eq!(qst.pick(&[load(5, 3), load(5, 3)]), Some(0), "of equal ones the earliest");
    }

    #[test]
    fn thresholds_follow_selectivity() {
        let qst = Qst { theta: 10.0 };
        let with = |input, output, selectivity| Load { selectivity: Some(selectivity), ..load(input, output) };
        // cs: 3, then 3 * 0.5 = 1.5: thresholds 30 and 15.
        assert_eq!(qst.pick(&[with(1, 29, 3.0), with(1, 0, 0.5)]), Some(0));
        assert_eq!(qst.pick(&[with(1, 30, 3.0), with(1, 14, 0.5)]), Some(1));
        assert_eq!(qst.pick(&[with(1, 30, 3.0), with(1, 15, 0.5)]), None);
    }

    #[test]
    fn what_drops_everything_or_was_never_measured_is_served() {
        let qst = Qst { theta: 10.0 };
        let none = Load { selectivity: Some(0.0), ..load(1, 0) };
        assert_eq!(qst.pick(&[none]), Some(0), "a threshold of one item at least");
        assert_eq!(qst.pick(&[Load { output: 1, ..none }]), None);
        let fresh = Load { selectivity: None, ..load(1, 9) };
        assert_eq!(qst.pick(&[fresh]), Some(0), "counts as 1");
        assert_eq!(qst.pick(&[none, Load { selectivity: Some(f64::INFINITY), ..load(1, 0) }]), Some(0));
    }

    #[test]
    fn an_operator_without_input_or_room_is_passed_over() {
        let qst = Qst { theta: 10.0 };
        assert_eq!(qst.pick(&[load(0, 0), Load { workers: 4, ..load(5, 0) }, load(1, 0)]), Some(2));
    }
}
