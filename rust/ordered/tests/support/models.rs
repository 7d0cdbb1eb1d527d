//! Small programs over the buffers and queues, for a model checker to run in every order; each asserts what has to hold.
//!
//! Stands beside a `sync`, a `reorder` and a `queue` that are made of the primitives of that checker.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize as Count, Ordering::SeqCst};
use std::sync::{Mutex as Plain, OnceLock};

use super::queue::{self, Hybrid, PartitionQueue, Partitioned};
use super::reorder::{Flagged, Locked, NoSlots, NonBlocking, Refusal, Reorder};
use super::sync::{Arc, AtomicBool, Ordering, UnsafeCell, spawn, yield_now};

type Sink<T> = Box<dyn FnMut(u64, T) + Send>;

/// Makes a buffer.
pub type Make<T> = fn(usize, Sink<T>) -> Shared<T>;

/// A buffer that threads share. When a model fails it is left behind: dropping it would touch the checker's primitives once more.
pub struct Shared<T>(ManuallyDrop<Arc<dyn Reorder<T>>>);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T> Deref for Shared<T> {
    type Target = dyn Reorder<T>;
    fn deref(&self) -> &Self::Target {
        &**self.0
    }
}

impl<T> Drop for Shared<T> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: this is the only place that drops it, once.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}

pub fn non_blocking<T: Send + 'static>(slots: usize, sink: Sink<T>) -> Shared<T> {
    made(NonBlocking::new(slots, sink))
}

pub fn flagged<T: Send + 'static>(slots: usize, sink: Sink<T>) -> Shared<T> {
    made(Flagged::new(slots, sink))
}

pub fn locked<T: Send + 'static>(slots: usize, sink: Sink<T>) -> Shared<T> {
    made(Locked::new(slots, sink))
}

fn made<T: Send, B: Reorder<T> + 'static>(buffer: Result<B, NoSlots>) -> Shared<T> {
    Shared(ManuallyDrop::new(Arc::new(buffer.expect("there are slots"))))
}

/// Threads send the numbers 0 to `all`, dealt out in turn; one that is refused tries its other numbers first.
///
/// `again`: until all are taken. Otherwise, as waiting has so many interleavings, each number is tried once by its thread, and what was
/// refused is sent at the end by one thread. In between nothing that could leave is still there: nothing is stranded.
/// `reversed`: each sends its last number first.
pub fn in_order(make: Make<u64>, threads: u64, all: u64, slots: usize, reversed: bool, again: bool) {
    let out = Arc::new(Plain::new(Vec::new()));
    let seen = out.clone();
    let buffer = make(slots, Box::new(move |t, item| seen.lock().unwrap().push((t, item))));
    let work = move |buffer: &dyn Reorder<u64>, thread| {
        let mut mine: Vec<_> = (thread..all).step_by(threads as usize).collect();
        if reversed {
            mine.reverse();
        }
        loop {
            let before = mine.len();
            mine.retain(|t| !sent(buffer, *t));
            if mine.is_empty() || !again {
                return mine;
            }
            if mine.len() == before {
                yield_now();
            }
        }
    };
    let others: Vec<_> = (1..threads)
        .map(|thread| {
            let buffer = buffer.clone();
            spawn(move || work(&*buffer, thread))
        })
        .collect();
    let mut refused = work(&*buffer, 0);
    others.into_iter().for_each(|other| refused.extend(other.join().unwrap()));
    refused.sort_unstable();
    assert_eq!(buffer.next(), refused.first().copied().unwrap_or(all), "an item is stranded");
    refused.into_iter().for_each(|t| assert!(sent(&*buffer, t), "no room for {t}"));
    assert_eq!((buffer.next(), buffer.broken()), (all, None));
    assert_eq!(*out.lock().unwrap(), (0..all).map(|t| (t, t + 100)).collect::<Vec<_>>());
}

/// Whether the item of number `t` was taken.
fn sent(buffer: &dyn Reorder<u64>, t: u64) -> bool {
    let refused = buffer.send(t, t + 100).map_err(|refused| (refused.item, refused.why));
    if let Err(refused) = refused {
        assert_eq!(refused, (t + 100, Refusal::Full), "number {t}");
    }
    refused.is_ok()
}

/// Who reads `next` sees everything that the sink did with the numbers before it.
pub fn next_is_a_lower_bound(make: Make<()>) {
    let left: Arc<Vec<AtomicBool>> = Arc::new((0..2).map(|_| AtomicBool::new(false)).collect());
    let marks = left.clone();
    let buffer = make(2, Box::new(move |t, ()| marks[t as usize].store(true, Ordering::Relaxed)));
    let sender = {
        let buffer = buffer.clone();
        spawn(move || [1, 0].into_iter().for_each(|t| assert!(buffer.send(t, ()).is_ok())))
    };
    let next = buffer.next();
    (0..next).for_each(|t| assert!(left[t as usize].load(Ordering::Relaxed), "{next} said before {t} has left"));
    sender.join().unwrap();
}

/// Two threads send the same number, one of them late: it is taken once.
pub fn taken_once(make: Make<u64>, slots: usize) {
    let (out, taken) = (Arc::new(Plain::new(Vec::new())), Arc::new(Count::new(0)));
    let seen = out.clone();
    let buffer = make(slots, Box::new(move |t, item| seen.lock().unwrap().push((t, item))));
    let work = move |buffer: &dyn Reorder<u64>, taken: &Count| {
        for t in [0, 1] {
            match buffer.send(t, t).map_err(|refused| refused.why) {
                Ok(()) => _ = taken.fetch_add(1, SeqCst),
                Err(Refusal::Full) => assert_eq!((t, slots), (1, 1)),
                Err(why) => assert!(matches!(why, Refusal::Past | Refusal::Repeated)),
            }
        }
    };
    let other = {
        let (buffer, taken) = (buffer.clone(), taken.clone());
        spawn(move || work(&*buffer, &taken))
    };
    work(&*buffer, &taken);
    other.join().unwrap();
    let out = out.lock().unwrap();
    assert_eq!(out.len(), taken.load(SeqCst));
    assert_eq!(*out, (0..out.len() as u64).map(|t| (t, t)).collect::<Vec<_>>());
    assert!(!out.is_empty() && (slots == 1 || out.len() == 2));
    // A new lap: nothing was left behind in the slots.
    drop(out);
    for t in buffer.next()..4 {
        assert!(buffer.send(t, t).is_ok());
    }
}

/// The sink panics at a number: all threads come back, nothing after it leaves, later sends are told, all items are dropped once.
pub fn broken(make: Make<Arc<()>>, at: u64) {
    let (item, left) = (Arc::new(()), Arc::new(Count::new(0)));
    // Never dropped: one that is dropped too often is still there to be counted.
    let spare: [_; 9] = std::array::from_fn(|_| ManuallyDrop::new(item.clone()));
    let seen = left.clone();
    let buffer = make(
        2,
        Box::new(move |t, item| {
            drop(item);
            if t == at {
                std::panic::resume_unwind(Box::new("as the model wants"));
            }
            assert_eq!(seen.fetch_add(1, SeqCst) as u64, t);
        }),
    );
    let other = {
        let (buffer, item) = (buffer.clone(), item.clone());
        spawn(move || drop(buffer.send(1, item)))
    };
    drop(buffer.send(0, item.clone()));
    other.join().unwrap();
    assert_eq!((buffer.next(), left.load(SeqCst) as u64), (at, at));
    assert_eq!(buffer.broken(), Some("as the model wants"));
    for t in [at, at + 1] {
        assert_eq!(buffer.send(t, item.clone()).unwrap_err().why, Refusal::Broken);
    }
    drop(buffer);
    assert_eq!(Arc::strong_count(&item), spare.len() + 1);
}

/// The state of a partition: what of it was done, and the checker's eye on who is inside.
struct States(Vec<UnsafeCell<Vec<u64>>>);

// Who is inside at the same time is what is checked.
#[allow(unsafe_code)]
// SAFETY: the cells notice overlaps by themselves, before anything is touched.
unsafe impl Sync for States {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl Send for States {}

impl States {
    #[allow(unsafe_code)]
    fn push(&self, partition: usize, item: u64) {
        // SAFETY: `with_mut` fails where two threads come in at once.
        self.0[partition].with_mut(|state| unsafe { (*state).push(item) });
    }

    #[allow(unsafe_code)]
    fn done(&self) -> Vec<Vec<u64>> {
        // SAFETY: as above.
        self.0.iter().map(|state| state.with_mut(|state| unsafe { (*state).clone() })).collect()
    }
}

/// The main thread adds items to partitions while workers consume until there is nothing for them; then it does the same. When all
/// have ended all is done, each partition in order, none was worked on twice at a time.
fn consumed<Q: PartitionQueue<u64> + 'static>(
    queue: Q,
    items: &[usize],
    workers: usize,
    quantum: usize,
) -> Vec<Vec<u64>> {
    let states = Arc::new(States((0..queue.partitions()).map(|_| UnsafeCell::new(Vec::new())).collect()));
    let queue = Arc::new(queue);
    let consume = move |queue: &Q, states: &States| {
        while queue.consume(quantum, &mut |partition, item| states.push(partition, item)) > 0 {}
    };
    let workers: Vec<_> = (0..workers)
        .map(|_| {
            let (queue, states) = (queue.clone(), states.clone());
            spawn(move || consume(&queue, &states))
        })
        .collect();
    items.iter().zip(0..).for_each(|(partition, item)| queue.add(*partition, item));
    consume(&queue, &states);
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    assert_eq!(queue.len(), 0, "items are stranded");
    states.done()
}

fn dealt(items: &[usize], partitions: usize) -> Vec<Vec<u64>> {
    let mut all = vec![Vec::new(); partitions];
    items.iter().zip(0..).for_each(|(partition, item)| all[*partition].push(item));
    all
}

pub fn hybrid(items: &[usize], workers: usize, quantum: usize) {
    assert_eq!(consumed(Hybrid::new(2), items, workers, quantum), dealt(items, 2));
}

pub fn partitioned(items: &[usize], workers: usize, quantum: usize) {
    assert_eq!(consumed(Partitioned::new(2), items, workers, quantum), dealt(items, 2));
}

/// Fails: the shared queue does not keep the order.
pub fn shared_in_order(items: &[usize], workers: usize) {
    assert_eq!(consumed(queue::Shared::new(2), items, workers, 1), dealt(items, 2));
}

/// A late repetition of a number while its slot is free again and `next` still says that it has not left.
pub fn late_repetition() {
    let whole: Arc<OnceLock<Shared<u64>>> = Arc::default();
    let (inner, out) = (whole.clone(), Arc::new(Plain::new(Vec::new())));
    let seen = out.clone();
    let sink: Sink<u64> = Box::new(move |t, item| {
        seen.lock().unwrap().push(item);
        if t == 1 {
            // From within the sink, as another thread would at this moment: the one that emits does not come here twice.
            assert_eq!(inner.get().unwrap().send(0, 99).map_err(|refused| refused.why), Err(Refusal::Past));
        }
    });
    let buffer = whole.get_or_init(|| non_blocking(3, sink)).clone();
    [1, 0, 2, 3, 4].into_iter().for_each(|t| assert!(buffer.send(t, t).is_ok(), "number {t}"));
    assert_eq!((*out.lock().unwrap()).clone(), [0, 1, 2, 3, 4]);
    assert_eq!(buffer.broken(), None);
}
