//! Values that the workers of one process have in common, each at its place in the graphs that all of them build.
//!
//! The first worker that comes to a place makes the value, the others get the same one. Workers build the same graphs in the same
//! order, so the n-th value that each asks for stands at the same place. Invariant: a value that all workers of the process have
//! taken is theirs alone, and forgotten here.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// The n-th value that a worker asks for. With its type: workers whose graphs differ never get each other's, and learn of
/// the difference by their first bundles.
type Place = (u64, TypeId);

/// A value, and how many workers have taken it.
type Common = (Arc<dyn Any + Send + Sync>, usize);

/// See the module.
pub(super) struct Commons {
    workers: usize,
    values: Mutex<HashMap<Place, Common>>,
}

impl Commons {
    /// For so many workers.
    pub(super) fn new(workers: usize) -> Self {
        Commons { workers, values: Mutex::default() }
    }

    /// The value at this place. `make` is called under a lock that only building takes.
    pub(super) fn take<V: Any + Send + Sync>(&self, number: u64, make: impl FnOnce() -> V) -> Arc<V> {
        let place = (number, TypeId::of::<V>());
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        let (value, taken) = values.entry(place).or_insert_with(|| (Arc::new(make()), 0));
        *taken += 1;
        let value = value.clone().downcast::<V>().expect("the type is part of the place");
        if *taken == self.workers {
            values.remove(&place);
        }
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_workers_of_a_process_get_what_the_first_one_made() {
        let commons = Commons::new(3);
        let made = [1, 2, 3].map(|worker| commons.take(0, || worker));
        assert_eq!(made.each_ref().map(|value| **value), [1, 1, 1]);
        assert_eq!(commons.values.lock().unwrap().len(), 0, "nothing is left behind");
        assert_eq!(Arc::strong_count(&made[0]), 3);
    }

    #[test]
    fn other_places_and_other_types_are_other_values() {
        let commons = Commons::new(2);
        assert_eq!((*commons.take(0, || 1), *commons.take(1, || 2), *commons.take(0, || "one")), (1, 2, "one"));
        assert_eq!((*commons.take(1, || 3), *commons.take(0, || 4)), (2, 1));
    }
}
