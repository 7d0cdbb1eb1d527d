//! The reorder buffers against a serial run: the same for all three, by many threads, with delays, holes and wrong numbers.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use penstock_ordered::reorder::{Flagged, Locked, MOST_SLOTS, NoSlots, NonBlocking, Refusal, Refused, Reorder};
use proptest::prelude::*;

type Item = Vec<u64>;
type Buffer<'a> = Box<dyn Reorder<Item> + 'a>;
type Sink<'a, T> = Box<dyn FnMut(u64, T) + Send + 'a>;
type Make = for<'a> fn(usize, Sink<'a, Item>) -> Result<Buffer<'a>, NoSlots>;

fn non_blocking<'a>(slots: usize, sink: Sink<'a, Item>) -> Result<Buffer<'a>, NoSlots> {
    Ok(Box::new(NonBlocking::new(slots, sink)?))
}

fn flagged<'a>(slots: usize, sink: Sink<'a, Item>) -> Result<Buffer<'a>, NoSlots> {
    Ok(Box::new(Flagged::new(slots, sink)?))
}

fn locked<'a>(slots: usize, sink: Sink<'a, Item>) -> Result<Buffer<'a>, NoSlots> {
    Ok(Box::new(Locked::new(slots, sink)?))
}

const ALL: [(&str, Make); 3] = [("NonBlocking", non_blocking), ("Flagged", flagged), ("Locked", locked)];

/// What the buffers have to do, told as simply as possible.
#[derive(Default)]
struct Naive {
    waiting: BTreeMap<u64, Vec<u64>>,
    next: u64,
    out: Vec<(u64, Vec<u64>)>,
}

impl Naive {
    fn send(&mut self, slots: usize, t: u64, item: Vec<u64>) -> Result<(), Refusal> {
        let why = match t {
            t if t < self.next => Some(Refusal::Past),
            t if t - self.next >= slots as u64 => Some(Refusal::Full),
            t if self.waiting.contains_key(&t) => Some(Refusal::Repeated),
            _ => None,
        };
        if let Some(why) = why {
            return Err(why);
        }
        self.waiting.insert(t, item);
        while let Some(item) = self.waiting.remove(&self.next) {
            self.out.push((self.next, item));
            self.next += 1;
        }
        Ok(())
    }
}

/// The item of a number: up to three outputs, often none.
fn outputs(t: u64) -> Vec<u64> {
    (0..t.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 62).map(|k| t * 10 + k).collect()
}

proptest! {
    /// Any numbers in any order, from one thread: the same answers, the same outputs at every step.
    #[test]
    fn every_answer_is_that_of_the_naive_one(
        slots in 1usize..6,
        steps in prop::collection::vec((0u64..8, prop::bool::weighted(0.1)), 0..60),
    ) {
        for (name, make) in ALL {
            let (out, mut naive) = (Mutex::new(Vec::new()), Naive::default());
            let buffer = make(slots, Box::new(|t, item| out.lock().unwrap().push((t, item)))).unwrap();
            for &(step, far) in &steps {
                // Numbers around the next one; now and then one that is far off.
                let t = if far { u64::MAX - step } else { (naive.next + step).saturating_sub(3) };
                let expected = naive.send(slots, t, outputs(t % 100));
                let got = buffer.send(t, outputs(t % 100));
                if let Err(refused) = &got {
                    prop_assert_eq!((&refused.item, refused.t, refused.next), (&outputs(t % 100), t, naive.next));
                }
                prop_assert_eq!(got.map_err(|refused| refused.why), expected, "{} at {}", name, t);
                prop_assert_eq!(buffer.next(), naive.next);
                prop_assert_eq!(&*out.lock().unwrap(), &naive.out);
            }
        }
    }

    /// 1 to 64 threads that take numbers as they come, with delays: the output is that of a serial run.
    #[test]
    fn many_threads_give_the_output_of_one(
        threads in 1usize..=64,
        slots in prop_oneof![Just(1usize), 1usize..10, Just(64usize), Just(1000usize)],
        items in 0u64..400,
        seed in any::<u64>(),
    ) {
        for (name, make) in ALL {
            let (threads, items) = if cfg!(miri) { (threads.min(4), items.min(20)) } else { (threads, items) };
            let serial: Vec<_> = (0..items).map(|t| (t, outputs(t))).collect();
            let (out, inside) = (Mutex::new(Vec::new()), AtomicUsize::new(0));
            let sink = |t, item| {
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two threads in the sink");
                out.lock().unwrap().push((t, item));
                inside.fetch_sub(1, Ordering::SeqCst);
            };
            let buffer = make(slots, Box::new(sink)).unwrap();
            let number = AtomicU64::new(0);
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(|| {
                        loop {
                            let t = number.fetch_add(1, Ordering::Relaxed);
                            if t >= items {
                                break;
                            }
                            delay(seed ^ t);
                            insist(&*buffer, t, outputs(t));
                        }
                    });
                }
            });
            prop_assert_eq!(buffer.next(), items, "{}", name);
            drop(buffer);
            prop_assert_eq!(out.into_inner().unwrap(), serial, "{}", name);
        }
    }
}

/// Mostly none, sometimes a change of threads, rarely some microseconds.
fn delay(random: u64) {
    match random.wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 59 {
        0 => (0..2000).for_each(|_| std::hint::spin_loop()),
        1..4 => std::thread::yield_now(),
        _ => {}
    }
}

/// Sends until there is room.
fn insist<T: Send>(buffer: &dyn Reorder<T>, t: u64, mut item: T) {
    while let Err(refused) = buffer.send(t, item) {
        assert_eq!((refused.t, refused.why), (t, Refusal::Full));
        item = refused.item;
        std::thread::yield_now();
    }
}

#[test]
fn a_ring_needs_a_slot_and_not_the_whole_memory() {
    for slots in [0, MOST_SLOTS + 1, usize::MAX] {
        for (name, make) in ALL {
            assert_eq!(make(slots, Box::new(|_, _| {})).err(), Some(NoSlots { slots }), "{name}");
        }
    }
    assert_eq!(NoSlots { slots: 0 }.to_string(), "a reorder buffer of 0 slots: give it 1 to 16777216");
}

/// The slides' trap: in a new ring every slot is empty, so "the slot is NULL" would take number 2 for number 0.
#[test]
fn an_empty_slot_is_no_room() {
    for (name, make) in ALL {
        let out = Mutex::new(Vec::new());
        let buffer = make(2, Box::new(|t, _| out.lock().unwrap().push(t))).unwrap();
        let refused = buffer.send(2, vec![2]).unwrap_err();
        assert_eq!(refused, Refused { item: vec![2], t: 2, next: 0, why: Refusal::Full }, "{name}");
        assert_eq!(refused.to_string(), "number 2 does not fit yet, 0 has to leave first; send it again later");
        assert!(buffer.send(1, vec![1]).is_ok() && out.lock().unwrap().is_empty());
        assert!(buffer.send(0, vec![0]).is_ok());
        assert_eq!((&*out.lock().unwrap(), buffer.next(), buffer.slots()), (&vec![0, 1], 2, 2), "{name}");
        assert!(buffer.send(2, vec![2]).is_ok());
        assert_eq!(*out.lock().unwrap(), [0, 1, 2], "{name}");
    }
}

/// The slides' trap: a slot that was emptied does not know any more which number was in it.
#[test]
fn a_number_that_has_left_or_waits_is_not_taken_again() {
    for (name, make) in ALL {
        for slots in 2..5 {
            let out = Mutex::new(Vec::new());
            let buffer = make(slots, Box::new(|t, _| out.lock().unwrap().push(t))).unwrap();
            let why = |t| buffer.send(t, vec![]).unwrap_err().why;
            for t in (0..20).step_by(2) {
                assert!(buffer.send(t + 1, vec![]).is_ok());
                assert_eq!(why(t + 1), Refusal::Repeated, "{name}, {slots} slots");
                assert!(buffer.send(t, vec![]).is_ok());
                (0..t + 2).for_each(|past| assert_eq!(why(past), Refusal::Past, "{name}, {slots} slots"));
            }
            assert_eq!(*out.lock().unwrap(), (0..20).collect::<Vec<_>>(), "{name}, {slots} slots");
        }
    }
}

/// The same while somebody emits and has not said yet how far: number 0 has left, its slot is free, and `next` still says 0.
#[test]
fn a_number_that_has_just_left_is_not_taken_again() {
    fn with<B: Reorder<u64> + 'static>(make: fn(usize, Sink<'static, u64>) -> Result<B, NoSlots>) {
        let whole: Arc<OnceLock<B>> = Arc::default();
        let (sink_side, out) = (Arc::downgrade(&whole), Arc::new(Mutex::new(Vec::new())));
        let seen = out.clone();
        let sink = move |t, item| {
            seen.lock().unwrap().push(item);
            if t == 1 {
                let other = sink_side.upgrade().unwrap();
                let sent = std::thread::spawn(move || other.get().unwrap().send(0, 99)).join().unwrap();
                let refused = sent.unwrap_err();
                assert_eq!((refused.item, refused.next, refused.why), (99, 0, Refusal::Past));
            }
        };
        let buffer = whole.get_or_init(|| make(3, Box::new(sink)).unwrap());
        [1, 0, 2, 3, 4].into_iter().for_each(|t| assert!(buffer.send(t, t).is_ok()));
        assert_eq!((buffer.broken(), buffer.next()), (None, 5));
        assert_eq!(*out.lock().unwrap(), [0, 1, 2, 3, 4]);
    }
    with(NonBlocking::new);
    with(Flagged::new);
}

/// A sink that panics takes nobody along: who emits comes back, waiting items are dropped once, and later sends are told.
#[test]
fn a_sink_that_panics_breaks_the_buffer_and_nobody_hangs() {
    for (name, make) in ALL {
        let out = Mutex::new(Vec::new());
        let sink = |t, _| {
            assert!(t != 2, "no room for {t}");
            out.lock().unwrap().push(t);
        };
        let buffer = make(4, Box::new(sink)).unwrap();
        [3, 2, 1].into_iter().for_each(|t| assert!(buffer.send(t, vec![t]).is_ok()));
        assert_eq!(buffer.broken(), None);
        assert!(catch_unwind(AssertUnwindSafe(|| buffer.send(0, vec![0]))).unwrap().is_ok(), "{name}");
        assert_eq!((buffer.broken(), buffer.next()), (Some("no room for 2"), 2), "{name}");
        for t in [0, 2, 3, 4, 5, 99] {
            let refused = buffer.send(t, vec![t]).unwrap_err();
            assert_eq!((refused.item, refused.next, refused.why), (vec![t], 2, Refusal::Broken), "{name} {t}");
        }
        assert_eq!(*out.lock().unwrap(), [0, 1], "{name}");
    }
}

/// The same with many threads: all come back, and what has left before is in order.
#[test]
fn threads_that_meet_a_panic_all_come_back() {
    for (name, make) in ALL {
        let out = Mutex::new(Vec::new());
        let sink = |t, _| {
            assert!(t != 50);
            out.lock().unwrap().push(t);
        };
        let (buffer, number) = (make(8, Box::new(sink)).unwrap(), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    loop {
                        let t = number.fetch_add(1, Ordering::Relaxed);
                        loop {
                            match buffer.send(t, vec![]).map_err(|refused| refused.why) {
                                Ok(()) => break,
                                Err(Refusal::Full) => std::thread::yield_now(),
                                Err(why) => return assert_eq!((why, t >= 50), (Refusal::Broken, true), "{name}"),
                            }
                        }
                    }
                });
            }
        });
        assert_eq!(*out.lock().unwrap(), (0..50).collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn every_item_is_dropped_once() {
    struct Counted<'a>(&'a AtomicUsize);
    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    fn with<'a, B: Reorder<Counted<'a>>>(
        dropped: &'a AtomicUsize,
        make: impl Fn(usize, Sink<'a, Counted<'a>>) -> Result<B, NoSlots>,
    ) {
        for panics_at in [1, 99] {
            dropped.store(0, Ordering::Relaxed);
            let buffer = make(5, Box::new(move |t, _| assert!(t != panics_at))).unwrap();
            for t in [4, 1, 3, 0, 9] {
                drop(buffer.send(t, Counted(dropped)));
            }
            drop(buffer);
            assert_eq!(dropped.load(Ordering::Relaxed), 5);
        }
    }
    let dropped = AtomicUsize::new(0);
    with(&dropped, NonBlocking::new);
    with(&dropped, Flagged::new);
    with(&dropped, Locked::new);
}
