//! The door of a fabric of threads: through it new workers come while the others run.
//!
//! Who wants workers asks at the [`Door`] and gets a [`Ticket`]. The lead of the members (`penstock_members`) takes what was asked, decides
//! the list that admits the joiners, and makes their mailboxes and seats in the same step; a joiner's mailbox is in the table of routes before
//! the first message for it is sent. A seat that is given up before its worker has joined withdraws that join and nothing else.
//!
//! Invariant: a ticket is answered once: with seats, or with why there are none.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::shuffle::Shuffle;
use super::{Endpoint, Envelope, Payload, Route, Shared, local, mailbox};
use crate::error::Error;

/// Why nobody joins.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// Nobody was asked for.
    #[error("0 workers were asked for; ask for 1 or more")]
    Nobody,
    /// There is nothing to join any more.
    #[error("all dataflows are finished, so there is nothing to join")]
    Over,
    /// The run has failed.
    #[error("the run has failed: {0}")]
    Stopped(#[source] Error),
}

/// Where joiners wait.
pub(super) struct Hall {
    /// Of a simulation.
    seed: Option<u64>,
    desk: Mutex<Desk>,
    changed: Condvar,
    /// How much was asked for and not taken by the lead.
    asked: AtomicUsize,
    over: AtomicBool,
}

#[derive(Default)]
struct Desk {
    tickets: u64,
    /// For the lead: ticket and number of workers.
    asked: VecDeque<(u64, usize)>,
    /// By ticket that somebody holds.
    seats: BTreeMap<u64, Option<Vec<Endpoint>>>,
}

impl Hall {
    fn new(seed: Option<u64>) -> Self {
        Hall {
            seed,
            desk: Mutex::default(),
            changed: Condvar::new(),
            asked: AtomicUsize::new(0),
            over: AtomicBool::new(false),
        }
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wake(&self) {
        // Under the lock, so that nobody is between a look and a wait.
        let _desk = self.desk();
        self.changed.notify_all();
    }
}

/// Lets workers into a fabric that [`joinable`] made. Clones are the same door.
#[derive(Clone)]
pub struct Door {
    shared: Arc<Shared>,
}

/// What was asked for at a [`Door`]. Dropped, it withdraws what it was given.
pub struct Ticket {
    shared: Arc<Shared>,
    number: u64,
}

/// Seats for `workers` workers, all of them threads of this process, and the door through which others join them while they run. A worker may
/// also leave: [`Worker::leave`](crate::Worker::leave). Every worker calls [`Worker::bootstrap`](crate::Worker::bootstrap) when all of its
/// dataflows are built.
///
/// # Panics
/// When `workers` is 0.
pub fn joinable(workers: usize) -> (Vec<Endpoint>, Door) {
    open(workers, None)
}

/// As [`joinable`], with messages that take as long and overtake each other as the seed wants: see [`shuffled`](super::shuffled).
///
/// # Panics
/// When `workers` is 0.
pub fn joinable_shuffled(workers: usize, seed: u64) -> (Vec<Endpoint>, Door) {
    open(workers, Some(seed))
}

fn open(workers: usize, seed: Option<u64>) -> (Vec<Endpoint>, Door) {
    let mut seats = local(workers, Some(Hall::new(seed)));
    for seat in &mut seats {
        seat.shuffle = seat.fresh_shuffle(seat.index);
    }
    let door = Door { shared: seats[0].shared.clone() };
    (seats, door)
}

impl Shared {
    fn hall(&self) -> &Hall {
        self.hall.as_ref().expect("only a joinable fabric has a door")
    }
}

impl Door {
    /// Asks for `count` workers. They are admitted when the members have agreed on it; each seat is then to be used by a worker
    /// that builds the same dataflows and calls `bootstrap`, at once: others wait for it.
    ///
    /// # Errors
    /// [`JoinError::Nobody`] when `count` is 0.
    pub fn ask(&self, count: usize) -> Result<Ticket, JoinError> {
        if count == 0 {
            return Err(JoinError::Nobody);
        }
        let hall = self.shared.hall();
        let number = {
            let mut desk = hall.desk();
            desk.tickets += 1;
            let number = desk.tickets;
            desk.asked.push_back((number, count));
            desk.seats.insert(number, None);
            hall.asked.fetch_add(1, Ordering::AcqRel);
            number
        };
        self.shared.wake_all();
        Ok(Ticket { shared: self.shared.clone(), number })
    }
}

impl Ticket {
    /// The seats, if they are there.
    ///
    /// # Errors
    /// Why there will be none.
    pub fn try_seats(&self) -> Result<Option<Vec<Endpoint>>, JoinError> {
        self.look(&mut self.shared.hall().desk())
    }

    /// Waits for the seats. Not for the thread of a worker, which others wait for.
    ///
    /// # Errors
    /// Why there will be none.
    pub fn seats(self) -> Result<Vec<Endpoint>, JoinError> {
        let hall = self.shared.hall();
        let mut desk = hall.desk();
        loop {
            if let Some(seats) = self.look(&mut desk)? {
                return Ok(seats);
            }
            desk = hall.changed.wait(desk).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn look(&self, desk: &mut Desk) -> Result<Option<Vec<Endpoint>>, JoinError> {
        let seats = desk.seats.get_mut(&self.number).and_then(Option::take);
        if seats.is_some() {
            return Ok(seats);
        }
        if let Some(error) = self.shared.verdict.report() {
            return Err(JoinError::Stopped(error));
        }
        if self.shared.hall().over.load(Ordering::Acquire) {
            return Err(JoinError::Over);
        }
        Ok(None)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let unused = self.shared.hall().desk().seats.remove(&self.number);
        // Out of the lock: the drop of a seat wakes others.
        drop(unused);
    }
}

impl Endpoint {
    /// For the lead: what was asked for at the door since the last call.
    pub(crate) fn asked(&self) -> Vec<(u64, usize)> {
        let Some(hall) = self.shared.hall.as_ref().filter(|hall| hall.asked.load(Ordering::Acquire) > 0) else {
            return Vec::new();
        };
        let asked: Vec<_> = hall.desk().asked.drain(..).collect();
        hall.asked.fetch_sub(asked.len(), Ordering::AcqRel);
        asked
    }

    /// Makes the seats of joiners whom the lead has given ids.
    pub(crate) fn admit(&self, ticket: u64, joiners: &[usize]) {
        let mut made = Vec::new();
        {
            let mut routes = self.shared.routes.lock().unwrap_or_else(PoisonError::into_inner);
            let mut table = (**routes).clone();
            for joiner in joiners {
                let (mailbox, parker) = mailbox();
                debug_assert_eq!(*joiner, table.len(), "ids are given out in order");
                table.push(Route::Local(mailbox.clone()));
                made.push((*joiner, mailbox, parker));
            }
            *routes = Arc::new(table);
        }
        self.look_up();
        let seats = made.into_iter().map(|(index, mailbox, parker)| Endpoint {
            index,
            shared: self.shared.clone(),
            routes: RefCell::new(self.shared.routes()),
            mailbox,
            parker,
            taken: Cell::new(false),
            joins: Some(self.index),
            shuffle: self.fresh_shuffle(index),
        });
        let seats: Vec<Endpoint> = seats.collect();
        let hall = self.shared.hall();
        let mut desk = hall.desk();
        let unwanted = match desk.seats.get_mut(&ticket) {
            Some(place) => {
                *place = Some(seats);
                None
            }
            None => Some(seats),
        };
        hall.changed.notify_all();
        drop(desk);
        drop(unwanted);
    }

    fn fresh_shuffle(&self, index: usize) -> Option<RefCell<Shuffle>> {
        let seed = self.shared.hall.as_ref().and_then(|hall| hall.seed)?;
        Some(RefCell::new(Shuffle::new(seed ^ (index as u64) << 32)))
    }

    /// Uses the table of routes that is in force now.
    pub(crate) fn look_up(&self) {
        *self.routes.borrow_mut() = self.shared.routes();
    }

    /// Tells the members that this joiner does not join.
    pub(crate) fn give_up(&self) {
        for (to, route) in self.shared.routes().iter().enumerate() {
            if let Route::Local(mailbox) = route
                && to != self.index
            {
                mailbox.push(Envelope { channel: 0, from: self.index, payload: Payload::Lost });
            }
        }
    }

    /// This worker has left for good: nobody needs its mailbox.
    pub(crate) fn vacate(&self) {
        let mut routes = self.shared.routes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(route) = Arc::make_mut(&mut routes).get_mut(self.index) {
            *route = Route::Gone;
        }
    }

    /// A member has finished all dataflows: so has, or will have, everybody, and there is nothing to join any more.
    pub(crate) fn finish(&self) {
        if let Some(hall) = &self.shared.hall {
            hall.over.store(true, Ordering::Release);
            self.shared.wake_all();
        }
    }

    /// Whether some member has finished all dataflows.
    pub(crate) fn is_over(&self) -> bool {
        self.shared.hall.as_ref().is_some_and(|hall| hall.over.load(Ordering::Acquire))
    }

    /// Whether messages come in an order that a seed decides, and time stands still.
    pub(crate) fn is_simulated(&self) -> bool {
        self.shuffle.is_some()
    }
}

impl std::fmt::Debug for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Door")
    }
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ticket").field("number", &self.number).finish()
    }
}
