//! The ring of slots, and the sink at its end.
//!
//! Owns: the slots, the number that leaves next, the sink, and all unsafe code about them. Invariants: a slot's word names a number and
//! whether it is free for it, claimed, or holds it; the numbers of one slot grow by the number of slots, so no word returns. A slot
//! becomes free for `t` only after `t - slots` has left the sink: `t < next + slots` is the test for room, and "the slot is empty"
//! never is. Between two rounds `next` is the first number that has not left.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use super::handover::Handover;
use super::sync::{AtomicBool, AtomicU64, Ordering, Padded, UnsafeCell};
use super::{NoSlots, Refusal, Refused, enough, said};

const FREE: u64 = 0;
const CLAIMED: u64 = 1;
const HELD: u64 = 2;
/// No number from here on is ever near: a word would not hold it.
const END: u64 = 1 << 61;

/// The word of a slot for number `t`.
fn word(t: u64, state: u64) -> u64 {
    t << 2 | state
}

struct Slot<T> {
    word: AtomicU64,
    item: UnsafeCell<MaybeUninit<T>>,
}

/// What only the thread with the right to emit touches.
struct Turn<F> {
    next: u64,
    at: usize,
    broken: bool,
    sink: F,
}

/// A ring whose right to emit is handed over by `H`.
pub(super) struct Ring<T, F, H> {
    slots: Box<[Padded<Slot<T>>]>,
    /// All bits of a number that choose its slot, where the slots are a power of two; else 0.
    mask: u64,
    broken: AtomicBool,
    said: OnceLock<String>,
    handover: Padded<H>,
    turn: Padded<UnsafeCell<Turn<F>>>,
    next: Padded<AtomicU64>,
}

// SAFETY: an item goes from the thread that sends it to the one that emits it, and the sink from one emitting thread to another; `T: Send`
// and `F: Send` allow both. `&Ring` gives nobody a reference to either that another thread could use at the same time: a slot's
// item is touched only by who has claimed the slot, then only by who has the right to emit, as is the turn.
unsafe impl<T: Send, F: Send, H: Handover> Sync for Ring<T, F, H> {}
// SAFETY: as above; the ring owns all of it.
unsafe impl<T: Send, F: Send, H: Handover> Send for Ring<T, F, H> {}

impl<T: Send, F: FnMut(u64, T) + Send, H: Handover> Ring<T, F, H> {
    pub(super) fn new(slots: usize, sink: F) -> Result<Self, NoSlots> {
        let count = enough(slots)? as u64;
        let slot = |t| Slot { word: AtomicU64::new(word(t, FREE)), item: UnsafeCell::new(MaybeUninit::uninit()) };
        Ok(Self {
            slots: (0..count).map(|t| Padded::new(slot(t))).collect(),
            mask: if count.is_power_of_two() { count - 1 } else { 0 },
            broken: AtomicBool::new(false),
            said: OnceLock::new(),
            handover: Padded::new(H::new()),
            turn: Padded::new(UnsafeCell::new(Turn { next: 0, at: 0, broken: false, sink })),
            next: Padded::new(AtomicU64::new(0)),
        })
    }

    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn next(&self) -> u64 {
        self.next.load(Ordering::Acquire)
    }

    pub(super) fn broken(&self) -> Option<&str> {
        self.said.get().map(String::as_str)
    }

    pub(super) fn send(&self, t: u64, item: T) -> Result<(), Refused<T>> {
        self.put(t, item)?;
        if self.handover.arrive() {
            let mut seen = 1;
            loop {
                // SAFETY: `arrive` or `leave` has just returned true: this thread has the right (`Handover`).
                unsafe { self.emit() };
                if !self.handover.leave(&mut seen, || self.ready()) {
                    break;
                }
            }
        }
        Ok(())
    }

    fn slot(&self, t: u64) -> &Slot<T> {
        let count = self.slots.len() as u64;
        let at = if self.mask == 0 { t % count } else { t & self.mask };
        &self.slots[at as usize]
    }

    fn put(&self, t: u64, item: T) -> Result<(), Refused<T>> {
        if self.broken.load(Ordering::Acquire) {
            return Err(self.refused(t, item, Refusal::Broken));
        }
        if t >= END {
            return Err(self.refused(t, item, Refusal::Full));
        }
        let slot = self.slot(t);
        // Acquire: what was in the slot before has been moved out of it.
        let claim = slot.word.compare_exchange(word(t, FREE), word(t, CLAIMED), Ordering::Acquire, Ordering::Relaxed);
        if let Err(other) = claim {
            let why = match (other >> 2).cmp(&t) {
                std::cmp::Ordering::Less => Refusal::Full,
                std::cmp::Ordering::Equal => Refusal::Repeated,
                std::cmp::Ordering::Greater => Refusal::Past,
            };
            return Err(self.refused(t, item, why));
        }
        // SAFETY: the slot is claimed for `t`: its words do not return, so nobody else has claimed it, and who emits leaves it alone
        // until it holds `t`. It is empty: it became free for `t` after the item before was moved out.
        slot.item.with_mut(|cell| unsafe { (*cell).write(item) });
        slot.word.store(word(t, HELD), Ordering::Release);
        Ok(())
    }

    fn refused(&self, t: u64, item: T, why: Refusal) -> Refused<T> {
        Refused { item, t, next: self.next(), why }
    }

    /// Whether there is something to emit, for one who has not the right.
    fn ready(&self) -> bool {
        let next = self.next();
        !self.broken.load(Ordering::Acquire) && self.slot(next).word.load(Ordering::Acquire) == word(next, HELD)
    }

    /// Emits all that is in order and publishes how far it came.
    ///
    /// # Safety
    /// The caller has the right to emit.
    unsafe fn emit(&self) {
        self.turn.with_mut(|turn| {
            // SAFETY: only who has the right to emit comes here, and one stretch of it happens before the next (`Handover`).
            let turn = unsafe { &mut *turn };
            if turn.broken {
                return;
            }
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| while self.round(turn) {})) {
                // The item was moved into the sink: the slot that held it stays claimed, so that it is not dropped again.
                self.slots[turn.at].word.store(word(turn.next, CLAIMED), Ordering::Relaxed);
                self.next.store(turn.next, Ordering::Release);
                turn.broken = true;
                let _ = self.said.set(said(&*panic));
                self.broken.store(true, Ordering::Release);
            }
        });
    }

    /// Emits what is in order, at most as much as there are slots, and publishes how far it came; whether there may be more.
    fn round(&self, turn: &mut Turn<F>) -> bool {
        let (first, count) = (turn.next, self.slots.len());
        while turn.next < first + count as u64 {
            let (t, slot) = (turn.next, &self.slots[turn.at]);
            if slot.word.load(Ordering::Acquire) != word(t, HELD) {
                break;
            }
            // SAFETY: the slot holds `t`, which its sender has released; only who has the right to emit takes it out, once, as the
            // word moves on below or, after a panic, is never looked at again.
            let item = slot.item.with_mut(|cell| unsafe { (*cell).assume_init_read() });
            (turn.sink)(t, item);
            slot.word.store(word(t + count as u64, FREE), Ordering::Release);
            turn.next = t + 1;
            turn.at = if turn.at + 1 == count { 0 } else { turn.at + 1 };
        }
        let emitted = turn.next - first;
        if emitted > 0 {
            self.next.store(turn.next, Ordering::Release);
        }
        emitted == count as u64
    }
}

impl<T, F, H> Drop for Ring<T, F, H> {
    fn drop(&mut self) {
        for slot in &self.slots {
            if slot.word.load(Ordering::Relaxed) & 3 == HELD {
                // SAFETY: nobody else has the ring; what a slot holds was written and not taken out.
                slot.item.with_mut(|cell| unsafe { (*cell).assume_init_drop() });
            }
        }
    }
}
