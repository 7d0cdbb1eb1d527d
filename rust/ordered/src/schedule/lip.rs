//! LIP, last in pipeline: suction from the egress.

use super::{Load, Scheduler};

/// Serves the latest operator with w < M whose input queue has a minimum.
#[derive(Clone, Copy, Debug)]
pub struct Lip {
    /// The least input that is worth a worker, items; at least 1.
    pub minimum: usize,
}

impl Default for Lip {
    fn default() -> Self {
        Self { minimum: 1 }
    }
}

impl Scheduler for Lip {
    fn pick(&self, loads: &[Load]) -> Option<usize> {
        loads.iter().rposition(|load| load.runnable() && load.input >= self.minimum)
    }

    fn name(&self) -> String {
        "lip".into()
    }
}

#[cfg(test)]
mod tests {
    use super::super::vectors::load;
    use super::*;

    #[test]
    fn the_latest_with_enough_input() {
        let lip = Lip { minimum: 3 };
        assert_eq!(lip.pick(&[load(9, 0), load(3, 0), load(2, 0)]), Some(1));
        assert_eq!(lip.pick(&[load(3, 0), load(3, 0)]), Some(1));
        assert_eq!(lip.pick(&[load(2, 0), load(0, 0)]), None);
    }

    #[test]
    fn all_workers_taken_is_not_schedulable() {
        let stateful = Load { workers: 1, most: 1, ..load(9, 0) };
        assert_eq!(Lip::default().pick(&[load(1, 0), stateful]), Some(0));
        assert_eq!(Lip::default().pick(&[stateful]), None);
    }

    #[test]
    fn a_minimum_of_nothing_still_needs_input() {
        assert_eq!(Lip { minimum: 0 }.pick(&[load(0, 0)]), None);
    }
}
