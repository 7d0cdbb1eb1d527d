//! Every interleaving of what the pipeline synchronises by hand, by loom: who sleeps and who wakes, and the gate. The same source files
//! with loom's primitives, and once more without what holds them together, to see that the models notice.
//!
//! The parts of an envelope that was split need no model: the last one to let go of an `Arc` gets what is in it.
#![allow(dead_code, unreachable_pub, missing_docs, clippy::duplicate_mod)]

macro_rules! primitives {
    ($name:ident, fence: $fence:expr) => {
        #[path = "."]
        mod $name {
            pub mod sync {
                pub use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
                use loom::sync::{Condvar, Mutex};
                // Not loom's: when a mutant deadlocks, its drop would panic a second time.
                use std::sync::Arc;

                pub fn fence(ordering: Ordering) {
                    if $fence {
                        loom::sync::atomic::fence(ordering);
                    }
                }

                struct Token(Mutex<bool>, Condvar);

                pub struct Parker(Unparker);

                #[derive(Clone)]
                pub struct Unparker(Arc<Token>);

                impl Parker {
                    pub fn new() -> Self {
                        Self(Unparker(Arc::new(Token(Mutex::new(false), Condvar::new()))))
                    }
                    pub fn unparker(&self) -> &Unparker {
                        &self.0
                    }
                    pub fn park(&self) {
                        let Token(there, changed) = &*self.0.0;
                        let mut token = there.lock().unwrap();
                        while !*token {
                            token = changed.wait(token).unwrap();
                        }
                        *token = false;
                    }
                }

                impl Unparker {
                    pub fn unpark(&self) {
                        *self.0.0.lock().unwrap() = true;
                        self.0.1.notify_one();
                    }
                }
            }
            #[path = "../src/pipeline/gate.rs"]
            pub mod gate;
            #[path = "../src/pipeline/sleepers.rs"]
            pub mod sleepers;

            use loom::thread;
            use sleepers::Sleepers;
            use std::sync::Arc;
            use sync::{AtomicUsize, Ordering, Parker};

            /// Takes one of what is there.
            fn take(there: &AtomicUsize) -> bool {
                there.fetch_update(Ordering::Acquire, Ordering::Relaxed, |count| count.checked_sub(1)).is_ok()
            }

            /// So many threads make one thing each; so many take until they have their share. All end: nobody sleeps through one.
            pub fn all_is_taken(makers: usize, takers: usize, look_again: bool) {
                let parkers = (0..takers).map(|_| Parker::new()).collect::<Vec<_>>();
                let sleepers = Arc::new(Sleepers::new(parkers.iter().map(|p| p.unparker().clone()).collect()));
                let there = Arc::new(AtomicUsize::new(0));
                let takers = parkers.into_iter().enumerate().map(|(seat, parker)| {
                    let (sleepers, there) = (sleepers.clone(), there.clone());
                    thread::spawn(move || {
                        for _ in 0..makers / takers {
                            while !take(&there) {
                                sleepers.announce(seat);
                                if !look_again || there.load(Ordering::Acquire) == 0 {
                                    parker.park();
                                }
                                sleepers.retract(seat);
                            }
                        }
                    })
                });
                let takers = takers.collect::<Vec<_>>();
                let made = |_| {
                    let (sleepers, there) = (sleepers.clone(), there.clone());
                    move || {
                        there.fetch_add(1, Ordering::Release);
                        sleepers.wake_one();
                    }
                };
                let others = (1..makers).map(|at| thread::spawn(made(at))).collect::<Vec<_>>();
                made(0)();
                others.into_iter().chain(takers).for_each(|thread| thread.join().unwrap());
            }

            /// The last to stop wakes all.
            pub fn all_are_woken() {
                let parkers = [Parker::new(), Parker::new()];
                let sleepers = Arc::new(Sleepers::new(parkers.iter().map(|p| p.unparker().clone()).collect()));
                let stop = Arc::new(AtomicUsize::new(0));
                let threads = parkers.into_iter().enumerate().map(|(seat, parker)| {
                    let (sleepers, stop) = (sleepers.clone(), stop.clone());
                    thread::spawn(move || {
                        while stop.load(Ordering::Acquire) == 0 {
                            sleepers.announce(seat);
                            if stop.load(Ordering::Acquire) == 0 {
                                parker.park();
                            }
                            sleepers.retract(seat);
                        }
                    })
                });
                let threads = threads.collect::<Vec<_>>();
                stop.store(1, Ordering::Release);
                sleepers.wake_all();
                threads.into_iter().for_each(|thread| thread.join().unwrap());
            }
        }
    };
}

/// The same sleepers over a token that calls whom it wakes, there and then: as when the sleeper runs at once, in the waker's stead.
#[path = "."]
mod at_once {
    pub mod sync {
        pub use std::sync::atomic::{AtomicU64, Ordering, fence};

        pub struct Unparker(pub Box<dyn Fn()>);

        impl Unparker {
            pub fn unpark(&self) {
                (self.0)();
            }
        }
    }
    #[path = "../src/pipeline/sleepers.rs"]
    pub mod sleepers;
}

primitives!(sound, fence: true);
primitives!(unfenced, fence: false);

use sound::gate::{Gate, Limits, Share};

fn explore(bound: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = bound;
    builder.check(model);
}

/// Whether some interleaving fails: a deadlock, an assertion.
fn fails(model: impl Fn() + Sync + Send + 'static) -> bool {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| explore(Some(3), model))).is_err()
}

#[test]
fn nobody_sleeps_through_what_was_made() {
    explore(None, || sound::all_is_taken(1, 1, true));
    explore(Some(2), || sound::all_is_taken(2, 1, true));
    explore(Some(1), || sound::all_is_taken(2, 2, true));
}

#[test]
fn all_wake_at_the_end() {
    explore(Some(2), sound::all_are_woken);
}

/// Who finds nothing and sleeps again before the waker goes on is not woken again: the two would be busy with each other for ever.
#[test]
fn a_wake_of_all_is_once_per_sleeper() {
    use std::cell::{Cell, OnceCell};
    use std::rc::Rc;

    let (woken, sleepers) = (Rc::new(Cell::new([0; 3])), Rc::new(OnceCell::<at_once::sleepers::Sleepers>::new()));
    let seats = (0..3).map(|seat| {
        let (woken, sleepers) = (woken.clone(), sleepers.clone());
        at_once::sync::Unparker(Box::new(move || {
            let mut counts = woken.get();
            counts[seat] += 1;
            woken.set(counts);
            assert!(counts[seat] < 10, "woken again and again");
            let sleepers = sleepers.get().unwrap();
            sleepers.retract(seat);
            sleepers.announce(seat);
        }))
    });
    let _ = sleepers.set(at_once::sleepers::Sleepers::new(seats.collect()));
    let all = sleepers.get().unwrap();
    all.announce(0);
    all.announce(2);
    all.wake_all();
    assert_eq!(woken.get(), [1, 0, 1]);
}

#[test]
fn parking_without_a_second_look_is_noticed() {
    assert!(fails(|| sound::all_is_taken(1, 1, false)));
}

#[test]
fn missing_fences_are_noticed() {
    assert!(fails(|| unfenced::all_is_taken(1, 1, true)));
}

/// The owner admits while a worker changes what is inside and takes it out: counts come back to nothing, and bounds hold.
#[test]
fn the_gate_counts_exactly() {
    explore(None, || {
        let gate = std::sync::Arc::new(Gate::new(Limits { envelopes: 2, items: 10, bytes: 10 }));
        let (small, large) = (Share { items: 1, bytes: 1 }, Share { items: 9, bytes: 9 });
        assert!(gate.admit(small));
        let worker = {
            let gate = gate.clone();
            loom::thread::spawn(move || {
                gate.change(small, large);
                gate.leave(large);
            })
        };
        let mut admitted = 0;
        for _ in 0..2 {
            // 2 items beside 9 would be too many; beside 1, or none, they fit.
            let two = Share { items: 2, bytes: 2 };
            if gate.admit(two) {
                admitted += 1;
            }
            assert!(gate.envelopes() <= 2);
        }
        worker.join().unwrap();
        for _ in 0..admitted {
            gate.leave(Share { items: 2, bytes: 2 });
        }
        assert_eq!((gate.envelopes(), gate.held()), (0, Share::default()));
    });
}
