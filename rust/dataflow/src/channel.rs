//! Edges: how a block gets from an output to the inputs behind it.
//!
//! An output feeds a `Tee`; each edge of it is a `Push`. An edge inside a scope ends in a queue of the receiving operator
//! and counts each block in the `in_flight` meter of that input, which the reader counts down again; so a block that is read
//! in the step that made it costs no progress message. An edge that enters or leaves a nested scope only translates the time
//! and goes on to the tee behind it.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::rc::{Rc, Weak};

use penstock_progress::meter::Meter;
use penstock_progress::timestamp::Timestamp;

use crate::activate::Activator;
use crate::core::{Core, Sink};
use crate::error::{Error, ProtocolFault};
use crate::fabric::Payload;
use crate::wire::{Wire, decode_serde, encode_serde};

/// Counts that one port shares with the progress tracking.
pub(crate) type Counts<T> = Rc<Meter<T>>;

/// Blocks waiting at an input, with time and sender.
pub(crate) type Queue<T, D> = Rc<RefCell<VecDeque<(T, usize, D)>>>;

/// One edge.
pub(crate) trait Push<T, D> {
    fn push(&mut self, time: &T, block: D);
}

/// The edges of one output.
pub(crate) struct Tee<T, D> {
    edges: Vec<Box<dyn Push<T, D>>>,
    duplicate: Option<fn(&D) -> D>,
}

pub(crate) type SharedTee<T, D> = Rc<RefCell<Tee<T, D>>>;

impl<T, D> Tee<T, D> {
    pub(crate) fn shared(duplicate: Option<fn(&D) -> D>) -> SharedTee<T, D> {
        Rc::new(RefCell::new(Tee { edges: Vec::new(), duplicate }))
    }

    pub(crate) fn duplicate(&self) -> Option<fn(&D) -> D> {
        self.duplicate
    }

    /// Adds an edge; false when the block cannot be duplicated for it.
    pub(crate) fn add(&mut self, edge: Box<dyn Push<T, D>>) -> bool {
        let fits = self.edges.is_empty() || self.duplicate.is_some();
        if fits {
            self.edges.push(edge);
        }
        fits
    }

    pub(crate) fn push(&mut self, time: &T, block: D) {
        if let Some((last, others)) = self.edges.split_last_mut() {
            if let Some(duplicate) = self.duplicate {
                for edge in others {
                    edge.push(time, duplicate(&block));
                }
            }
            last.push(time, block);
        }
    }
}

/// An edge within a worker.
pub(crate) struct Direct<T, D> {
    pub(crate) queue: Queue<T, D>,
    pub(crate) in_flight: Counts<T>,
    pub(crate) activator: Activator,
    pub(crate) worker: usize,
}

impl<T: Timestamp, D> Push<T, D> for Direct<T, D> {
    fn push(&mut self, time: &T, block: D) {
        self.in_flight.update(time.clone(), 1);
        self.queue.borrow_mut().push_back((time.clone(), self.worker, block));
        self.activator.activate();
    }
}

/// An edge that changes the type of time and goes on.
pub(crate) struct Translate<A, B, D> {
    pub(crate) tee: SharedTee<B, D>,
    pub(crate) translate: fn(A) -> B,
}

impl<A: Clone, B, D> Push<A, D> for Translate<A, B, D> {
    fn push(&mut self, time: &A, block: D) {
        self.tee.borrow_mut().push(&(self.translate)(time.clone()), block);
    }
}

/// How an edge spreads blocks over the workers.
pub trait Pact<T: Timestamp, D: 'static> {
    /// What the engine needs to build the edge.
    fn into_wiring(self) -> Wiring<T, D>;
}

/// A built [`Pact`]: opaque.
pub struct Wiring<T, D>(pub(crate) Option<Routing<T, D>>);

/// Distributes one block: the routing function of an exchange.
type Route<T, D> = Box<dyn FnMut(&T, D, &mut dyn FnMut(usize, D))>;

/// What an exchange needs to know about its blocks.
pub(crate) struct Routing<T, D> {
    route: Route<T, D>,
    boxed: fn(T, D) -> Payload,
    encode: fn(&D, &mut Vec<u8>),
    decode: fn(&[u8]) -> Result<D, crate::wire::WireError>,
    /// What encoded blocks travel as.
    encoded: fn(Vec<u8>) -> Payload,
    /// Whether the function names ids of workers, not ranks.
    by_id: bool,
    /// Whether blocks for who takes no part are dropped.
    forgets: bool,
}

/// Blocks stay on their worker.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pipeline;

impl<T: Timestamp, D: 'static> Pact<T, D> for Pipeline {
    fn into_wiring(self) -> Wiring<T, D> {
        Wiring(None)
    }
}

/// Blocks go to the workers that a function names.
///
/// The function gets the time, the block and a sink; it hands each piece to the sink with the index of a worker. Pieces for
/// threads of the same process are moved as they are, others encoded.
///
/// Where workers join and leave, the index is the rank among those that take part now: 0, 1, 2, ... up to
/// [`Scope::peers`](crate::Scope::peers), which the function asks anew for each block. What it did before is of no use then: state by key has to move.
pub struct Exchange<T, D, F> {
    route: F,
    encoded: fn(Vec<u8>) -> Payload,
    by_id: bool,
    forgets: bool,
    marker: PhantomData<fn(T, D)>,
}

impl<T, D, F> Exchange<T, D, F>
where
    F: FnMut(&T, D, &mut dyn FnMut(usize, D)) + 'static,
{
    /// An exchange by this routing function. A worker that does not exist stops the dataflow with [`Error::Route`].
    pub fn new(route: F) -> Self {
        Exchange { route, encoded: Payload::Bytes, by_id: false, forgets: false, marker: PhantomData }
    }

    /// Lets the blocks of other edges go before these on their way to another process, but for a fifth. They do not count for
    /// [`Limits::link_bytes`](crate::fabric::Limits), so their sender has to bound what is under way.
    #[must_use]
    pub fn behind_data(self) -> Self {
        Exchange { encoded: Payload::Behind, ..self }
    }

    /// The function names workers by [`Worker::index`](crate::Worker::index), which stays when others leave: one that takes no part now
    /// stops the dataflow. A worker that leaves may still name itself for what it held: it goes when it holds nothing any more.
    #[must_use]
    pub fn by_index(self) -> Self {
        Exchange { by_id: true, ..self }
    }

    /// Drops what is for a worker that takes no part any more, in place of stopping the dataflow: for receipts and hints, which may still be on
    /// their way when all that they are about is done and their receiver has left.
    #[must_use]
    pub fn forgetting_leavers(self) -> Self {
        Exchange { forgets: true, ..self }
    }
}

impl<T, D, F> Pact<T, D> for Exchange<T, D, F>
where
    T: Timestamp,
    D: Wire,
    F: FnMut(&T, D, &mut dyn FnMut(usize, D)) + 'static,
{
    fn into_wiring(self) -> Wiring<T, D> {
        Wiring(Some(Routing {
            route: Box::new(self.route),
            boxed: |time, block| Payload::Typed(Box::new((time, block))),
            encode: D::encode,
            decode: D::decode,
            encoded: self.encoded,
            by_id: self.by_id,
            forgets: self.forgets,
        }))
    }
}

/// The sending end of an exchange.
pub(crate) struct Spread<T, D> {
    name: String,
    core: Rc<Core>,
    channel: u64,
    routing: Routing<T, D>,
    local: Direct<T, D>,
}

impl<T: Timestamp, D: 'static> Spread<T, D> {
    /// Opens a channel and both its ends.
    pub(crate) fn open(name: String, core: Rc<Core>, routing: Routing<T, D>, local: Direct<T, D>) -> Self {
        let receiver = Receiver {
            name: name.clone(),
            core: Rc::downgrade(&core),
            queue: local.queue.clone(),
            activator: local.activator.clone(),
            decode: routing.decode,
        };
        let channel = core.open_channel(|channel| Rc::new(Arrivals { channel, receiver }));
        Spread { name, core, channel, routing, local }
    }
}

impl<T: Timestamp, D: 'static> Push<T, D> for Spread<T, D> {
    fn push(&mut self, time: &T, block: D) {
        let Spread { name, core, channel, routing, local } = self;
        let (boxed, encode, encoded, by_id) = (routing.boxed, routing.encode, routing.encoded, routing.by_id);
        let forgets = routing.forgets;
        let _origin = core.origin(name);
        (routing.route)(time, block, &mut |asked, piece| {
            let target = core.target(asked, by_id);
            if target == Some(local.worker) {
                local.push(time, piece);
            } else if let Some(target) = target {
                local.in_flight.update(time.clone(), 1);
                let payload = if core.is_local(target) {
                    boxed(time.clone(), piece)
                } else {
                    let mut bytes = vec![0; 4];
                    encode_serde(time, &mut bytes);
                    let length = (bytes.len() - 4) as u32;
                    bytes[..4].copy_from_slice(&length.to_le_bytes());
                    encode(&piece, &mut bytes);
                    encoded(bytes)
                };
                core.send(target, *channel, payload);
            } else if !forgets {
                core.fail(Error::Route { name: name.clone(), target: asked, peers: core.peers() });
            }
        });
    }
}

struct Receiver<T, D> {
    name: String,
    core: Weak<Core>,
    queue: Queue<T, D>,
    activator: Activator,
    decode: fn(&[u8]) -> Result<D, crate::wire::WireError>,
}

/// The receiving end of an exchange.
struct Arrivals<T, D> {
    channel: u64,
    receiver: Receiver<T, D>,
}

impl<T: Timestamp, D: 'static> Sink for Arrivals<T, D> {
    fn accept(&self, from: usize, payload: Payload) -> Result<(), Error> {
        let Receiver { name, core, queue, activator, decode } = &self.receiver;
        let Some(core) = core.upgrade() else { return Ok(()) };
        // Decoding may be the user's code.
        let _origin = core.origin(name);
        let expected = std::any::type_name::<D>();
        let mismatch = |what: String| {
            let detail = format!("channel {} into {name:?} carries {expected} here: {what}", self.channel);
            Error::GraphMismatch { worker: core.index(), peer: from, detail }
        };
        let (time, block) = match payload {
            Payload::Typed(boxed) => {
                *boxed.downcast::<(T, D)>().map_err(|_| mismatch("another type was sent".to_string()))?
            }
            Payload::Bytes(bytes) | Payload::Behind(bytes) => {
                parse(&bytes, *decode).ok_or_else(|| mismatch(ProtocolFault::Body(self.channel).to_string()))?
            }
            Payload::Progress(_)
            | Payload::Bundle(_)
            | Payload::Member(..)
            | Payload::MemberBytes(..)
            | Payload::Lost
            | Payload::Cut(..) => {
                return Err(mismatch("progress was sent".to_string()));
            }
        };
        queue.borrow_mut().push_back((time, from, block));
        activator.activate();
        Ok(())
    }
}

fn parse<T: Timestamp, D>(bytes: &[u8], decode: fn(&[u8]) -> Result<D, crate::wire::WireError>) -> Option<(T, D)> {
    let (length, rest) = bytes.split_first_chunk::<4>()?;
    let (time, block) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    Some((decode_serde(time).ok()?, decode(block).ok()?))
}
