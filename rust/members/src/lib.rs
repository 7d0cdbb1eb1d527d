//! Who takes part in a running dataflow: workers join and leave mid-stream. Messages in, messages out; no thread, clock or wire.
//!
//! | module | owns |
//! |---|---|
//! | [`list`] | the versioned list of members, and what may follow it |
//! | [`message`] | what members tell each other |
//! | [`member`] | the machine of one worker, whose parts are: |
//! | `lead` | deciding the next list, one at a time |
//! | `serving` | snapshots for joiners, and what was taken in since |
//! | `joining` | the joiner's half of the bootstrap |
//!
//! # The protocol
//!
//! The list of members has a version. The *lead*, the full member with the least id, decides the next list when the one before
//! has settled everywhere that matters, so at most two lists are in use at a time. A worker adopts a list when the first
//! *marker* of it comes; then it sends markers to all others on every lane of every link: the list in the urgent one, its version in the others. What
//! came before the marker was sent under the old list, what comes behind it under the new one.
//!
//! *Join.* 1. A list admits the joiner as *joining*: from its own marker on everybody sends it progress, and nobody data. 2. The marker
//! says with which number the sender's progress begins (the bootstrap message of the thesis). 3. The joiner asks a server, any
//! full member, for a snapshot. A server that still lacks something of one who left waits for that first,
//! since nobody tells the joiner later. 4. The server casts what it owes, sends what it has counted with the next number of each sender, and records in the same step
//! what it takes in from then on, of each sender up to its marker. 5. What the snapshot has the joiner skips when it comes over a link; 6. what neither has,
//! from the snapshot's next number to the marker's, it asks for. 7. The server answers once it has taken that in. 8. The joiner installs all at once
//! and says so. 9. A second list makes it a *full* member, to which data are routed. Right before its marker of that list the server counts one more
//! capability per joiner for each that it holds, casts that, and hands them over with the marker.
//!
//! *Leave.* A list makes it *leaving*: nothing is routed to it any more. When all have adopted it and what was on its way is worked off, it casts what it owes,
//! hands its capabilities to the lead and tells its last numbers; the list after that is without it, and it goes when nobody sends to it any more. What its inputs
//! hold it hands over first, as soon as nothing can come for it. Any number leave at a time: what one works off may wait for a time that another one's inputs hold
//! back, whose program does nothing any more, so no leave waits for the end of another. The lead
//! leaves like any other: the next one leads from the list on that makes it leaving. What others gave or asked it as the lead comes before their markers of that list,
//! and it hands over nothing before those. The last one does not leave: it leads, so it is the one that tells
//! itself, once nobody joins any more and however the wish came to it ([`Output::Alone`](member::Output)).
//!
//! # Invariants
//!
//! 1. The counts of a worker are the initial ones and, of each sender, its first so many bundles, each once ([`Caster`](penstock_progress::Caster)).
//! 2. Who has a bundle has what it follows from: a bundle that rests on a capability of another worker names the bundle in which that one counted it,
//!    and waits for it (*after*). Otherwise the joiner's release of a granted capability could overtake the grant and cancel the
//!    granter's own count. What is handed over names all bundles that count it, and is not taken before them.
//!    Markers keep this across a list: what follows from a bundle under the new list was itself sent under the new list.
//! 3. Nothing counts on a joiner before it is a full member. So a join that ends early, however it does, is one list more and nothing else: no
//!    record was routed to it, no capability is pinned for it.
//! 4. Data are routed to full members of the sender's list only, whole blocks under one list; all that was sent to or by anybody under the old list
//!    has come when the markers of all lanes are there ([`Output::Settled`](member::Output)). Then routing state may be copied to a joiner, and a leaver may be empty.
//! 5. Ids are never used again, so a late message of one who is gone names nobody.
//!
//! A full member that is lost ends the run, at a joiner too, with the same cause; so does one that has left, where not all that it sent before has
//! come. A joiner that is lost, or takes longer than the limit, is withdrawn. A joiner whose server takes long asks another one.
//!
//! Source: rescaling R§3.4.1, §3.2.1. Departures: two lists instead of one, so that a join can be aborted; the snapshot may be ahead of
//! a link; members go on while one is served; capabilities for joiners, causally ordered (*after*); no founder is special; workers leave.
//!
//! Threads and the links of processes are wired to it (`penstock-dataflow`, module `membership`); the simulation and
//! the exploration of all schedules (`tests/`) drive it over the caster and ledger that workers run on.

pub mod joining;
pub mod list;
pub mod member;
pub mod message;

mod lead;
mod serving;

pub use list::{Id, List, Standing};
pub use member::{Failure, Host, Limits, Member, Output};
pub use message::{Lane, Message};
