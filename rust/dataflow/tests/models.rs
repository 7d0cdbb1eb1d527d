//! Every interleaving of the modules that synchronise threads, by loom: the same source files, with its primitives in place of the
//! usual ones. And each module once more over primitives that lose something, to see that the models notice.
//!
//! Plain `cargo test -p penstock-dataflow --test models` runs them all. The queue and the parker of the mailbox are crossbeam's;
//! here stand their contracts: a queue behind a lock, a token behind a condition variable.
#![allow(dead_code, unreachable_pub, clippy::duplicate_mod)]

/// The contracts of the primitives, over those of loom.
macro_rules! primitives {
    (keep_token: $keep:expr, notify: $notify:expr) => {
        pub mod sync {
            pub use loom::sync::atomic::{AtomicBool, Ordering};
            pub use loom::sync::{Mutex, MutexGuard};
            // Not loom's: when a mutant deadlocks, its drop would panic a second time. Nothing here depends on its counts.
            use std::collections::VecDeque;
            pub use std::sync::Arc;
            use std::sync::{LockResult, PoisonError};

            pub struct Condvar(loom::sync::Condvar);

            impl Condvar {
                pub fn new() -> Self {
                    Condvar(loom::sync::Condvar::new())
                }
                pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
                    self.0.wait(guard).map_err(|poisoned| PoisonError::new(poisoned.into_inner()))
                }
                pub fn notify_one(&self) {
                    if $notify {
                        self.0.notify_one();
                    }
                }
            }

            pub struct Queue<M>(Mutex<VecDeque<M>>);

            impl<M> Queue<M> {
                pub fn new() -> Self {
                    Queue(Mutex::new(VecDeque::new()))
                }
                pub fn push(&self, message: M) {
                    self.0.lock().unwrap().push_back(message);
                }
                pub fn pop(&self) -> Option<M> {
                    self.0.lock().unwrap().pop_front()
                }
                pub fn is_empty(&self) -> bool {
                    self.0.lock().unwrap().is_empty()
                }
            }

            struct Token {
                there: Mutex<(bool, bool)>,
                changed: loom::sync::Condvar,
            }

            pub struct Parker(Unparker);

            #[derive(Clone)]
            pub struct Unparker(Arc<Token>);

            impl Parker {
                pub fn new() -> Self {
                    let there = Mutex::new((false, false));
                    Parker(Unparker(Arc::new(Token { there, changed: loom::sync::Condvar::new() })))
                }
                pub fn unparker(&self) -> &Unparker {
                    &self.0
                }
                pub fn park(&self) {
                    let Token { there, changed } = &*self.0.0;
                    let mut token = there.lock().unwrap();
                    token.1 = true;
                    while !token.0 {
                        token = changed.wait(token).unwrap();
                    }
                    *token = (false, false);
                }
            }

            impl Unparker {
                pub fn unpark(&self) {
                    let mut token = self.0.there.lock().unwrap();
                    // A token that is not kept reaches only who is parked already.
                    if $keep || token.1 {
                        token.0 = true;
                        self.0.changed.notify_one();
                    }
                }
            }
        }
        #[path = "../../src/fabric/lanes.rs"]
        pub mod lanes;
        #[path = "../../src/fabric/mailbox.rs"]
        pub mod mailbox;
    };
}

/// Whether some interleaving fails: a deadlock, an assertion.
fn fails(model: impl Fn() + Sync + Send + 'static) -> bool {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| explore(model))).is_err()
}

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

macro_rules! models {
    () => {
        pub mod models {
            use super::lanes::{Lane, Lanes, Phase};
            use super::mailbox::Mailbox;
            use super::sync::Arc;
            use loom::thread;

            /// Two senders and a worker that parks whenever its queue is empty and takes one message at a time: it gets everything,
            /// each sender's in order.
            pub fn mailbox(look_before_parking: bool) {
                let (mailbox, parker) = Mailbox::new();
                let mailbox = Arc::new(mailbox);
                let senders: Vec<_> = (0..2)
                    .map(|sender| {
                        let mailbox = mailbox.clone();
                        thread::spawn(move || (0..2 - sender).for_each(|number| mailbox.push((sender, number))))
                    })
                    .collect();
                let mut next = [0, 0];
                while next != [2, 1] {
                    if !look_before_parking || mailbox.queue.is_empty() {
                        parker.park();
                    }
                    if let Some((sender, number)) = mailbox.queue.pop() {
                        assert_eq!(std::mem::replace(&mut next[sender], number + 1), number);
                    }
                }
                senders.into_iter().for_each(|sender| sender.join().unwrap());
            }

            /// A sender puts data and urgent frames and closes; the thread that empties the lanes gets all of them and ends.
            pub fn emptying() {
                let lanes = Arc::new(Lanes::new(100));
                let sender = {
                    let lanes = lanes.clone();
                    thread::spawn(move || {
                        assert_eq!(lanes.put(Lane::Data, 'd', 1), Phase::Open);
                        assert_eq!(lanes.put(Lane::Urgent, 'u', 1), Phase::Open);
                        lanes.close();
                        assert_eq!(lanes.put(Lane::Data, 'x', 1), Phase::Closing);
                    })
                };
                let mut frames = Vec::new();
                let phase = loop {
                    if let Some(phase) = lanes.take(&mut frames, 10, true) {
                        break phase;
                    }
                };
                frames.sort_unstable();
                assert_eq!((phase, frames), (Phase::Closing, vec!['d', 'u']));
                sender.join().unwrap();
            }

            /// A source sends while there is room and parks while there is none; the receiving thread credits what was taken and
            /// wakes it, as the fabric does. Nobody waits for ever, and in the end there is room.
            pub fn congestion(rings: bool) {
                const BLOCKS: u64 = 3;
                let lanes = Arc::new(Lanes::new(1));
                let (mailbox, parker) = Mailbox::<()>::new();
                let receiver = {
                    let lanes = lanes.clone();
                    thread::spawn(move || {
                        let (mut frames, mut total) = (Vec::new(), 0);
                        while lanes.take(&mut frames, 1, true).is_none() {
                            total += frames.drain(..).sum::<u64>();
                            if lanes.credit(total) == Some(true) && rings {
                                mailbox.ring();
                            }
                        }
                        assert_eq!(total, BLOCKS);
                        assert_eq!(lanes.credit(total + 1), None);
                    })
                };
                for _ in 0..BLOCKS {
                    while lanes.is_over() {
                        parker.park();
                    }
                    lanes.put(Lane::Data, 1, 1);
                }
                lanes.close();
                receiver.join().unwrap();
                assert!(!lanes.is_over());
            }
        }
    };
}

#[path = "support"]
mod sound {
    primitives!(keep_token: true, notify: true);
    models!();
}

#[path = "support"]
mod without_token {
    primitives!(keep_token: false, notify: true);
    models!();
}

#[path = "support"]
mod without_notify {
    primitives!(keep_token: true, notify: false);
    models!();
}

#[test]
fn a_worker_that_looks_before_it_parks_misses_no_message() {
    explore(|| sound::models::mailbox(true));
}

#[test]
fn all_frames_are_taken_and_the_thread_ends() {
    explore(sound::models::emptying);
}

#[test]
fn a_source_that_waits_for_room_is_woken() {
    explore(|| sound::models::congestion(true));
}

#[test]
fn the_models_notice_a_lost_wake_up() {
    assert!(fails(|| sound::models::mailbox(false)), "who does not look sleeps on what the same ring announced");
    assert!(fails(|| without_token::models::mailbox(true)), "a ring between look and park is lost");
    assert!(fails(|| without_token::models::congestion(true)), "so is that for room");
    assert!(fails(|| sound::models::congestion(false)), "nobody rings for room");
    assert!(fails(without_notify::models::emptying), "nobody tells the thread that there is something to take");
}
