//! The door of a fabric: through it new workers come while the others run.
//!
//! Who wants workers asks at the [`Door`] and gets a [`Ticket`]. A worker of the process takes what was asked; the lead of the members
//! (`penstock_members`) decides the list that admits the joiners. That list says in which process they run and with which ticket they were
//! asked for, so whoever of that process hears of it first makes their mailboxes and seats. Every process knows where a member is reached before
//! it sends the first message to it, and whose worker a joiner is before data come from it, whether its own workers have read that or not. A seat
//! that is given up before its worker has joined withdraws that join and nothing else.
//!
//! A process that joins dials all that run or join, numbers below its own; each says *welcome* when it uses the link. When all have said so it
//! *asks*, and names those that it is connected with; the lead waits until those of all members are among them. So who adopts a list
//! has a link to everybody in it, and nobody has to be asked for that. Until one of its workers is a full member such a process stops nobody.
//!
//! Invariant: a ticket is answered once: with seats, or with why there are none.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use penstock_members::List;
use penstock_members::list::{Home, MAX_IDS, MAX_MEMBERS};
use serde::{Deserialize, Serialize};

use super::link::Outbox;
use super::process::Hub;
use super::shuffle::Shuffle;
use super::stream::Duplex;
use super::{Endpoint, Envelope, Payload, Route, Shared, local, mailbox, seat};
use crate::error::Error;

/// Why nobody joins.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// Nobody was asked for.
    #[error("0 workers were asked for; ask for 1 or more")]
    Nobody,
    /// More than a run may have at a time.
    #[error("{0} workers were asked for; a run has at most {MAX_MEMBERS} at a time, and {MAX_IDS} in all")]
    Many(usize),
    /// There is nothing to join any more.
    #[error("all dataflows are finished, so there is nothing to join")]
    Over,
    /// The run has failed.
    #[error("the run has failed: {0}")]
    Stopped(#[source] Error),
}

/// What a process that joins asks for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Ask {
    ticket: u64,
    pub(super) count: usize,
    /// The processes that it is connected with.
    linked: BTreeSet<usize>,
}

/// What was asked for at a door, for the members.
pub(crate) struct Asked {
    pub(crate) home: Home,
    pub(crate) count: usize,
    pub(crate) linked: BTreeSet<usize>,
}

/// Where joiners wait.
pub(super) struct Hall {
    /// Of a simulation.
    seed: Option<u64>,
    desk: Mutex<Desk>,
    changed: Condvar,
    /// How much was asked for and not taken by a member.
    asked: AtomicUsize,
    over: AtomicBool,
    /// Seats of this process that are not dropped, and whose workers take part or may yet.
    taken: AtomicUsize,
    /// Processes that have left or are lost.
    cuts: AtomicUsize,
}

#[derive(Default)]
struct Desk {
    tickets: u64,
    asked: VecDeque<Asked>,
    /// By ticket that somebody holds.
    places: BTreeMap<u64, Place>,
    /// Joiners of this process whose seats were made.
    made: BTreeSet<usize>,
    /// Processes that use their link with this one.
    welcomes: BTreeSet<usize>,
    /// Processes that have left, or are lost and why.
    cut: BTreeMap<usize, Option<Error>>,
}

/// What is kept for one ticket.
struct Place {
    count: usize,
    /// Answered: nothing more comes for it.
    granted: bool,
    /// The answer was that there is no room.
    crowded: bool,
    seats: Option<Vec<Endpoint>>,
}

/// What a ticket has come to.
enum Look {
    Seats(Vec<Endpoint>),
    Waits,
    /// The run has failed: the verdict says why, which may take a while.
    Stopped,
    Never(JoinError),
}

impl Hall {
    pub(super) fn new(seed: Option<u64>) -> Self {
        Hall {
            seed,
            desk: Mutex::default(),
            changed: Condvar::new(),
            asked: AtomicUsize::new(0),
            over: AtomicBool::new(false),
            taken: AtomicUsize::new(0),
            cuts: AtomicUsize::new(0),
        }
    }

    /// Whether no worker of this process could pass on what is asked, now or later: there is none, or all have left or ended alone.
    fn is_outside(&self) -> bool {
        self.taken.load(Ordering::Acquire) == 0
    }

    fn put(&self, desk: &mut Desk, asked: Asked) {
        desk.asked.push_back(asked);
        self.asked.fetch_add(1, Ordering::AcqRel);
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

/// Lets workers into a fabric that [`joinable`] or [`joinable_processes`](super::joinable_processes) made. Clones are the same door.
#[derive(Clone)]
pub struct Door {
    shared: Arc<Shared>,
    /// Of a fabric over processes.
    hub: Option<Arc<Hub>>,
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
    let door = Door { shared: seats[0].shared.clone(), hub: None };
    (seats, door)
}

impl Shared {
    fn hall(&self) -> &Hall {
        self.hall.as_ref().expect("only a joinable fabric has a door")
    }

    /// Knows where the members of a list are reached; those who join here get seats.
    pub(super) fn extend(self: &Arc<Self>, list: &List) {
        let Some(hall) = &self.hall else { return };
        let mut made: BTreeMap<u64, Vec<Endpoint>> = BTreeMap::new();
        let mut desk = hall.desk();
        {
            let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
            let fresh = |id: &usize, home: &Home| match routes.get(*id) {
                None => true,
                Some(Route::Gone) => home.process != self.process || !desk.made.contains(id),
                Some(_) => false,
            };
            let fresh: Vec<_> = list.homes.iter().filter(|(id, home)| fresh(id, home)).collect();
            if fresh.is_empty() && routes.len() >= list.next {
                return;
            }
            let (mut table, links) = ((**routes).clone(), self.links());
            if table.len() < list.next {
                table.resize(list.next, Route::Gone);
            }
            let mut mailboxes = Vec::new();
            for (id, home) in fresh {
                if home.process == self.process {
                    let (mailbox, parker) = mailbox();
                    table[*id] = Route::Local(mailbox.clone());
                    desk.made.insert(*id);
                    mailboxes.push((*id, home.ticket, mailbox, parker));
                } else if let Some(outbox) = links.iter().find(|outbox| outbox.process() == home.process) {
                    table[*id] = Route::Remote(outbox.clone());
                }
            }
            *routes = Arc::new(table);
            drop(routes);
            for (index, ticket, mailbox, parker) in mailboxes {
                let mut seat = seat(self, index, mailbox, parker, Some(list.lead().unwrap_or(0)));
                seat.shuffle = seat.fresh_shuffle(index);
                made.entry(ticket).or_default().push(seat);
            }
        }
        let mut unwanted = Vec::new();
        for (ticket, seats) in made {
            match desk.places.get_mut(&ticket).filter(|place| !place.granted) {
                Some(place) => (place.granted, place.seats) = (true, Some(seats)),
                None => unwanted.push(seats),
            }
        }
        drop(desk);
        hall.wake();
        // Out of the lock: the drop of a seat wakes others.
        drop(unwanted);
    }

    /// Asks the members of other processes for what is wanted here, while no worker of this one could.
    pub(super) fn knock(&self) {
        let Some(hall) = self.hall.as_ref().filter(|hall| hall.is_outside()) else { return };
        let links = self.links();
        let alive: Vec<_> = links.iter().filter(|outbox| !outbox.is_departed()).collect();
        let desk = hall.desk();
        if self.founders() == 0 || !alive.iter().all(|outbox| desk.welcomes.contains(&outbox.process())) {
            return;
        }
        let linked: BTreeSet<usize> = alive.iter().map(|outbox| outbox.process()).collect();
        for (ticket, place) in desk.places.iter().filter(|(_, place)| !place.granted) {
            let ask = Ask { ticket: *ticket, count: place.count, linked: linked.clone() };
            alive.iter().for_each(|outbox| outbox.send_ask(&ask));
        }
    }

    /// Another process uses its link with this one.
    pub(super) fn welcomed(&self, process: usize, founders: usize) {
        let Some(hall) = &self.hall else { return };
        if founders > 0 {
            // All who know say the same.
            let _ = self.founders.compare_exchange(0, founders, Ordering::AcqRel, Ordering::Acquire);
        }
        hall.desk().welcomes.insert(process);
        self.knock();
    }

    /// Another process asks for workers of its own.
    pub(super) fn asked(&self, process: usize, ask: Ask) {
        let Some(hall) = self.hall.as_ref().filter(|_| self.speaks.load(Ordering::Acquire)) else { return };
        let home = Home { process, ticket: ask.ticket };
        hall.put(&mut hall.desk(), Asked { home, count: ask.count, linked: ask.linked });
        self.wake_all();
    }

    /// The lead says that there is no room for what was asked for here.
    pub(super) fn crowded(&self, ticket: u64) {
        let Some(hall) = &self.hall else { return };
        if let Some(place) = hall.desk().places.get_mut(&ticket).filter(|place| !place.granted) {
            (place.granted, place.crowded) = (true, true);
        }
        hall.wake();
    }

    /// All dataflows are finished somewhere, so they will be everywhere.
    pub(super) fn is_over(&self) -> bool {
        self.hall.as_ref().is_some_and(|hall| hall.over.load(Ordering::Acquire))
    }

    pub(super) fn end(&self) {
        if let Some(hall) = &self.hall {
            hall.over.store(true, Ordering::Release);
            self.wake_all();
        }
    }

    /// A link failed. Where members are fixed that ends the run; else each worker knows what that process is to it.
    pub(super) fn link_lost(&self, process: usize, error: Error) {
        // First: who waits for its word waits no longer.
        self.verdict.ended(process);
        if self.hall.is_none() {
            self.abort(error);
        } else {
            self.cut(process, Some(error));
        }
    }

    /// A process has left, or is lost: nothing comes from it any more, and nothing is sent to it.
    pub(super) fn cut(&self, process: usize, error: Option<Error>) {
        let Some(hall) = &self.hall else { return };
        if hall.desk().cut.insert(process, error.clone()).is_some() {
            return;
        }
        hall.cuts.fetch_add(1, Ordering::AcqRel);
        let links = self.links();
        if let Some(outbox) = links.iter().find(|outbox| outbox.process() == process) {
            outbox.depart();
        }
        let speaks = self.speaks.load(Ordering::Acquire);
        if let Some(error) = error.clone().filter(|_| hall.is_outside() && !speaks)
            && links.iter().all(|outbox| outbox.is_departed())
        {
            // Nobody is left who could know better.
            self.abort(error);
        }
        for route in &*self.routes() {
            if let Route::Local(mailbox) = route {
                mailbox.push(Envelope { channel: 0, from: usize::MAX, payload: Payload::Cut(process, error.clone()) });
            }
        }
        hall.wake();
        // It may be the one whose welcome was waited for.
        self.knock();
    }

    /// A link is used from now on: what its process has to know at once.
    pub(super) fn greet(&self, outbox: &Outbox) {
        outbox.send_welcome(self.founders());
        if self.is_over() {
            outbox.send_over();
        }
        if let Some(cause) = self.verdict.cause().filter(|_| self.speaks.load(Ordering::Acquire)) {
            outbox.send_abort(self.first_local.load(Ordering::Acquire), &cause);
        }
    }
}

impl Door {
    pub(super) fn of(hub: &Arc<Hub>) -> Self {
        Door { shared: hub.shared.clone(), hub: Some(hub.clone()) }
    }

    fn hub(&self) -> Result<&Arc<Hub>, Error> {
        let reason = || "the workers of this fabric are threads of one process; make it with joinable_processes";
        self.hub.as_ref().ok_or_else(|| Error::Setup { reason: reason().to_string() })
    }

    /// Uses a connected and authenticated stream to a process that joins the run. Its number is greater than those of all before it, and
    /// never used again.
    ///
    /// # Errors
    /// [`Error::Setup`] when there is, or was, such a process; the run goes on without the stream.
    pub fn link(&self, process: usize, stream: Box<dyn Duplex>) -> Result<(), Error> {
        self.hub()?.link(process, stream)
    }

    /// As [`Door::link`], for a simulation: who holds it moves the frames.
    ///
    /// # Errors
    /// As [`Door::link`].
    #[doc(hidden)]
    pub fn wire(&self, process: usize) -> Result<super::Wire, Error> {
        self.hub()?.wire(process)
    }

    /// Asks for `count` workers. They are admitted when the members have agreed on it; each seat is then to be used by a worker
    /// that builds the same dataflows and calls `bootstrap`, at once: others wait for it.
    ///
    /// # Errors
    /// [`JoinError::Nobody`] when `count` is 0, [`JoinError::Many`] when it is more than a run may have. Whether there is room for them
    /// beside those that are there, the ticket says.
    pub fn ask(&self, count: usize) -> Result<Ticket, JoinError> {
        match count {
            0 => return Err(JoinError::Nobody),
            1..=MAX_MEMBERS => {}
            many => return Err(JoinError::Many(many)),
        }
        let hall = self.shared.hall();
        let number = {
            let mut desk = hall.desk();
            desk.tickets += 1;
            let number = desk.tickets;
            desk.places.insert(number, Place { count, granted: false, crowded: false, seats: None });
            if !hall.is_outside() {
                // Its last member may leave before the others hear of it.
                let linked = self.shared.links().iter().map(|outbox| outbox.process()).collect();
                let home = Home { process: self.shared.process, ticket: number };
                hall.put(&mut desk, Asked { home, count, linked });
            }
            number
        };
        self.shared.knock();
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
        let look = self.look(&mut self.shared.hall().desk());
        self.told(look)
    }

    /// Waits for the seats. Not for the thread of a worker, which others wait for.
    ///
    /// # Errors
    /// Why there will be none.
    pub fn seats(self) -> Result<Vec<Endpoint>, JoinError> {
        let hall = self.shared.hall();
        let mut desk = hall.desk();
        loop {
            match self.look(&mut desk) {
                Look::Waits => desk = hall.changed.wait(desk).unwrap_or_else(PoisonError::into_inner),
                look => {
                    drop(desk);
                    if let Some(seats) = self.told(look)? {
                        return Ok(seats);
                    }
                    desk = hall.desk();
                }
            }
        }
    }

    fn look(&self, desk: &mut Desk) -> Look {
        let place = desk.places.get_mut(&self.number);
        let crowded = place.as_ref().and_then(|place| place.crowded.then_some(place.count));
        if let Some(seats) = place.and_then(|place| place.seats.take()) {
            return Look::Seats(seats);
        }
        if self.shared.verdict.is_stopped() {
            return Look::Stopped;
        }
        let hall = self.shared.hall();
        let links = self.shared.links();
        if hall.over.load(Ordering::Acquire) {
            return Look::Never(JoinError::Over);
        }
        if hall.is_outside() && links.iter().all(|outbox| outbox.is_departed()) {
            // One that said goodbye knew of no failure.
            let lost: Option<Vec<&Error>> = desk.cut.values().map(Option::as_ref).collect();
            let lost = lost.and_then(|lost| lost.first().copied().cloned());
            return Look::Never(lost.map_or(JoinError::Over, JoinError::Stopped));
        }
        crowded.map_or(Look::Waits, |count| Look::Never(JoinError::Many(count)))
    }

    /// Without the desk, which those need who bring the last word for the verdict.
    fn told(&self, look: Look) -> Result<Option<Vec<Endpoint>>, JoinError> {
        match look {
            Look::Seats(seats) => Ok(Some(seats)),
            Look::Waits => Ok(None),
            Look::Stopped => self.shared.verdict.report().map_or(Ok(None), |error| Err(JoinError::Stopped(error))),
            Look::Never(error) => Err(error),
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let unused = self.shared.hall().desk().places.remove(&self.number);
        // Out of the lock: the drop of a seat wakes others.
        drop(unused);
    }
}

impl Endpoint {
    /// Whether something was asked for at the door.
    #[inline]
    pub(crate) fn is_asked(&self) -> bool {
        self.shared.hall.as_ref().is_some_and(|hall| hall.asked.load(Ordering::Acquire) > 0)
    }

    /// For the members: what was asked for at the door since the last call.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        let Some(hall) = &self.shared.hall else { return Vec::new() };
        let asked: Vec<_> = hall.desk().asked.drain(..).collect();
        hall.asked.fetch_sub(asked.len(), Ordering::AcqRel);
        asked
    }

    pub(super) fn sit_down(self) -> Self {
        if let Some(hall) = &self.shared.hall {
            hall.taken.fetch_add(1, Ordering::AcqRel);
        }
        self
    }

    /// Its worker passes on nothing any more: who asks at the door asks others. Once.
    pub(crate) fn stand_up(&self) {
        if let Some(hall) = self.shared.hall.as_ref().filter(|_| self.seated.replace(false))
            && hall.taken.fetch_sub(1, Ordering::AcqRel) == 1
        {
            hall.wake();
            self.shared.knock();
        }
    }

    /// Whether what stops a worker here stops all.
    pub(crate) fn speaks(&self) -> bool {
        self.shared.speaks.load(Ordering::Acquire)
    }

    /// Its worker takes part from now on: what stops it stops all.
    pub(crate) fn speak(&self) {
        self.shared.speaks.store(true, Ordering::Release);
    }

    /// Knows where the members of a list are reached.
    pub(crate) fn extend(&self, list: &List) {
        self.shared.extend(list);
        self.look_up();
    }

    /// There is no room for what was asked for there.
    pub(crate) fn refuse(&self, home: Home) {
        if home.process == self.shared.process {
            self.shared.crowded(home.ticket);
        } else if let Some(outbox) = self.shared.links().iter().find(|outbox| outbox.process() == home.process) {
            outbox.send_crowded(home.ticket);
        }
    }

    /// Processes of a list that have left or are lost.
    pub(crate) fn cut_among(&self, list: &List) -> Vec<(usize, Option<Error>)> {
        let Some(hall) = self.shared.hall.as_ref().filter(|hall| hall.cuts.load(Ordering::Acquire) > 0) else {
            return Vec::new();
        };
        let (processes, desk) = (list.processes(), hall.desk());
        let among = |(process, _): &(&usize, &Option<Error>)| processes.contains(process);
        desk.cut.iter().filter(among).map(|(process, error)| (*process, error.clone())).collect()
    }

    /// With messages that come late and interleaved, where the door has a seed.
    pub(super) fn shaken(mut self) -> Self {
        self.shuffle = self.fresh_shuffle(self.index);
        self
    }

    fn fresh_shuffle(&self, index: usize) -> Option<RefCell<Shuffle>> {
        let seed = self.shared.hall.as_ref().and_then(|hall| hall.seed)?;
        Some(RefCell::new(Shuffle::new(seed ^ (index as u64) << 32)))
    }

    /// Uses the table of routes that is in force now, and the links of processes that have not left.
    pub(crate) fn look_up(&self) {
        *self.routes.borrow_mut() = self.shared.routes();
        let links = self.shared.links();
        *self.links.borrow_mut() = Arc::new(links.iter().filter(|outbox| !outbox.is_departed()).cloned().collect());
    }

    /// Tells the members that this joiner does not join. When a member has finished all dataflows nobody waits for it, and it would be missed where
    /// it was made a full member meanwhile.
    pub(crate) fn give_up(&self) {
        if self.is_over() {
            return;
        }
        for (to, route) in self.shared.routes().iter().enumerate().filter(|(to, _)| *to != self.index) {
            match route {
                Route::Local(mailbox) => {
                    mailbox.push(Envelope { channel: 0, from: self.index, payload: Payload::Lost });
                }
                Route::Remote(outbox) => outbox.send_given_up(self.index, to),
                Route::Gone => {}
            }
        }
    }

    /// This worker has left for good: nobody needs its mailbox.
    pub(crate) fn vacate(&self) {
        self.shared.hall().desk().made.insert(self.index);
        let mut routes = self.shared.routes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(route) = Arc::make_mut(&mut routes).get_mut(self.index) {
            *route = Route::Gone;
        }
    }

    /// A member has finished all dataflows: so has, or will have, everybody, and there is nothing to join any more.
    pub(crate) fn finish(&self) {
        if self.shared.hall.is_some() {
            self.shared.end();
            self.shared.links().iter().for_each(|outbox| outbox.send_over());
        }
    }

    /// Whether some member has finished all dataflows.
    pub(crate) fn is_over(&self) -> bool {
        self.shared.is_over()
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

#[cfg(test)]
mod tests {
    use super::super::verdict::Cause;
    use super::super::{FabricTag, Wire, simulated_process};
    use super::*;
    use crate::core::Core;

    /// What each step looks at does not grow with every process that joins and leaves.
    #[test]
    fn the_links_of_who_has_left_are_looked_at_no_more() {
        let tag = FabricTag { query: 1, generation: 1 };
        let (mut seats, door, guard) = simulated_process(0, 1, 1, tag, 1).unwrap();
        let core = Core::new(seats.remove(0));
        let wires: Vec<_> = (1..4).map(|process| door.wire(process).unwrap()).collect();
        core.endpoint().look_up();
        let looks_at = || core.endpoint().links.borrow().iter().map(|outbox| outbox.process()).collect::<Vec<_>>();
        assert_eq!(looks_at(), [1, 2, 3]);
        wires[..2].iter().for_each(Wire::cut);
        while core.endpoint().has_mail() {
            core.deliver();
        }
        assert_eq!(looks_at(), [3]);
        drop((core, guard));
    }

    /// What a process says last is waited for, unless it is gone: that is known though nobody gets to the desk.
    #[test]
    fn a_lost_link_is_known_to_the_verdict_before_anybody_waits_for_the_desk() {
        let shared = Shared::new(Vec::new(), Vec::new(), 2, 0, Some(Hall::new(None)));
        shared.verdict.begin(0);
        shared.stop(None, Cause { origin: 1, error: Error::Setup { reason: "test".to_owned() } });
        assert!(!shared.verdict.is_decided(), "process 0 may know a better cause");
        std::thread::scope(|scope| {
            let _desk = shared.hall().desk();
            scope.spawn(|| shared.link_lost(0, Error::PeerLost { process: 0, reason: "test".to_owned() }));
            let began = std::time::Instant::now();
            while !shared.verdict.is_decided() {
                assert!(began.elapsed().as_secs() < 60, "it waits for the desk");
                std::thread::yield_now();
            }
        });
    }
}
