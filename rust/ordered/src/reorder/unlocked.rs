//! The two buffers without a lock: one ring, two ways to hand the right to emit over.

use super::handover::{Counter, Flag};
use super::ring::Ring;
use super::{NoSlots, Refused, Reorder};

macro_rules! unlocked {
    ($(#[$about:meta])* $name:ident by $handover:ty) => {
        $(#[$about])*
        pub struct $name<T, F>(Ring<T, F, $handover>);

        impl<T: Send, F: FnMut(u64, T) + Send> $name<T, F> {
            /// With this many slots; what leaves goes to `sink`, which is called by one thread at a time, in order, without gaps, and
            /// must not send to the same buffer.
            ///
            /// # Errors
            /// For no slots at all, or more than [`MOST_SLOTS`](super::MOST_SLOTS).
            pub fn new(slots: usize, sink: F) -> Result<Self, NoSlots> {
                Ring::new(slots, sink).map(Self)
            }
        }

        impl<T: Send, F: FnMut(u64, T) + Send> Reorder<T> for $name<T, F> {
            fn send(&self, t: u64, item: T) -> Result<(), Refused<T>> {
                self.0.send(t, item)
            }

            fn next(&self) -> u64 {
                self.0.next()
            }

            fn slots(&self) -> usize {
                self.0.slots()
            }

            fn broken(&self) -> Option<&str> {
                self.0.broken()
            }
        }

        impl<T, F> std::fmt::Debug for $name<T, F> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    };
}

unlocked! {
    /// The buffer to use: no lock, and the right to emit is a counter of arrivals.
    ///
    /// A send costs one exchange on its slot and one addition to the counter; who emits adds one subtraction per round.
    NonBlocking by Counter
}

unlocked! {
    /// Comparator: the flag and the second look of the slides, cleared by an exchange as a second look needs.
    Flagged by Flag
}
