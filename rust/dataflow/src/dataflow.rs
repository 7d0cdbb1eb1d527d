//! A running dataflow: its regions, and the bundles in which workers tell each other their progress.
//!
//! One bundle holds the changes of all regions of one worker in one step, so what was consumed and what that produced travel
//! together, also across the borders of scopes. Bundles are numbered 0, 1, 2, ... per sender; a gap is fatal. The first one of
//! each sender carries a hash of the graph that it built.
//!
//! Source: rescaling R§3.2.2, §3.4.1 (C-05, R-04). Departure: one sequence per dataflow instead of one per scope; each region
//! still keeps its own accumulated counts.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use penstock_progress::timestamp::Timestamp;

use crate::core::{Core, Sink};
use crate::error::Error;
use crate::fabric::{Lane, Payload};
use crate::region::{Family, Part, Region};
use crate::wire::{decode_serde, encode_serde};

/// The progress of one worker in one step.
pub(crate) struct Bundle {
    number: u64,
    /// Hash of the graph in the bundle numbered 0, else 0.
    shape: u64,
    parts: Vec<(usize, Arc<dyn Part>)>,
}

/// The bundle's form between processes.
type BundleBytes = (u64, u64, Vec<(u64, Vec<u8>)>);

/// Bundles that wait to be applied.
#[derive(Default)]
struct Inbox(RefCell<VecDeque<(usize, Payload)>>);

impl Sink for Inbox {
    fn accept(&self, from: usize, payload: Payload) -> Result<(), Error> {
        self.0.borrow_mut().push_back((from, payload));
        Ok(())
    }
}

/// The outermost region without its type of time.
trait Root {
    fn apply(&self) -> Result<(), Error>;
    fn propagate(&self);
    fn sweep(&self) -> Result<(), Error>;
}

impl<T: Timestamp> Root for Region<T> {
    fn apply(&self) -> Result<(), Error> {
        Region::apply(self, |_, _, _| {})
    }
    fn propagate(&self) {
        Region::propagate(self);
    }
    fn sweep(&self) -> Result<(), Error> {
        Region::sweep(self)
    }
}

/// The sending and receiving of bundles, opened before the graph is built so that its channel comes first.
pub(crate) struct Caster {
    core: Rc<Core>,
    channel: u64,
    inbox: Rc<Inbox>,
    /// Number of the next bundle of this worker.
    next: Cell<u64>,
    /// By sender: number of its next bundle.
    expected: RefCell<Vec<u64>>,
}

impl Caster {
    pub(crate) fn open(core: Rc<Core>) -> Self {
        let inbox = Rc::new(Inbox::default());
        let sink = inbox.clone();
        let channel = core.open_channel(|_| sink);
        Caster { core, channel, inbox, next: Cell::new(0), expected: RefCell::new(Vec::new()) }
    }
}

/// A built dataflow.
pub(crate) struct Dataflow {
    core: Rc<Core>,
    family: Rc<Family>,
    root: Rc<dyn Root>,
    caster: Caster,
    shape: u64,
    channels: Range<u64>,
}

impl Dataflow {
    /// Checks the built graph and announces it to the other workers.
    pub(crate) fn start<T: Timestamp>(caster: Caster, root: Rc<Region<T>>) -> Result<Self, Error> {
        root.finalise()?;
        let mut description = String::new();
        for region in root.family.regions.borrow().iter() {
            region.describe(&mut description);
        }
        let core = caster.core.clone();
        let dataflow = Dataflow {
            family: root.family.clone(),
            shape: fingerprint(description.as_bytes()),
            channels: caster.channel..core.next_channel(),
            core,
            root,
            caster,
        };
        dataflow.root.propagate();
        dataflow.cast();
        Ok(dataflow)
    }

    /// Takes in progress, runs what it or new blocks activated, and shares what that changed.
    pub(crate) fn step(&self) -> Result<(), Error> {
        self.receive()?;
        self.cast();
        self.root.apply()?;
        self.root.propagate();
        self.root.sweep()?;
        self.cast();
        self.root.apply()?;
        self.root.propagate();
        if self.family.pending.get() > 0 && self.is_done() {
            // The last run, so that logic always sees the end of its inputs; without capabilities it can send nothing.
            self.root.sweep()?;
        }
        Ok(())
    }

    /// Whether a step would do something.
    pub(crate) fn has_work(&self) -> bool {
        self.family.pending.get() > 0
            || !self.caster.inbox.0.borrow().is_empty()
            || self.family.regions.borrow().iter().any(|region| region.is_dirty())
    }

    /// Whether no message and no capability is left on any worker.
    pub(crate) fn is_done(&self) -> bool {
        self.caster.inbox.0.borrow().is_empty() && self.family.regions.borrow().iter().all(|region| region.is_done())
    }

    /// Collects the changes of all regions, applies them here and sends them to all other workers.
    fn cast(&self) {
        let Caster { core, channel, next, .. } = &self.caster;
        let (me, peers) = (core.index(), core.peers());
        let regions = self.family.regions.borrow();
        let harvest = regions.iter().enumerate().filter_map(|(id, region)| Some((id, region.harvest(peers > 1)?)));
        let parts: Vec<_> = harvest.collect();
        if peers == 1 || (parts.is_empty() && next.get() > 0) {
            return;
        }
        let number = next.replace(next.get() + 1);
        let bundle = Arc::new(Bundle { number, shape: if number == 0 { self.shape } else { 0 }, parts });
        let mut bytes = None;
        for peer in (0..peers).filter(|peer| *peer != me) {
            let payload = if core.is_local(peer) {
                Payload::Typed(Box::new(bundle.clone()))
            } else {
                Payload::Bytes(bytes.get_or_insert_with(|| bundle.encode()).clone())
            };
            core.send(peer, *channel, payload, Lane::Progress);
        }
    }

    /// Hands arrived bundles to the regions.
    fn receive(&self) -> Result<(), Error> {
        while let Some((from, payload)) = self.next_bundle() {
            match payload {
                Payload::Typed(boxed) => {
                    let bundle = boxed.downcast::<Arc<Bundle>>().map_err(|_| self.mismatch(from, "progress"))?;
                    self.admit(from, bundle.number, bundle.shape)?;
                    for (region, part) in &bundle.parts {
                        let regions = self.family.regions.borrow();
                        if !regions.get(*region).is_some_and(|region| region.absorb(part.as_any())) {
                            return Err(self.mismatch(from, "the scopes"));
                        }
                    }
                }
                Payload::Bytes(bytes) => {
                    let (number, shape, parts): BundleBytes =
                        decode_serde(&bytes).map_err(|_| self.mismatch(from, "progress"))?;
                    self.admit(from, number, shape)?;
                    for (region, bytes) in &parts {
                        let regions = self.family.regions.borrow();
                        if !regions.get(*region as usize).is_some_and(|region| region.absorb_bytes(bytes)) {
                            return Err(self.mismatch(from, "the scopes"));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn next_bundle(&self) -> Option<(usize, Payload)> {
        self.caster.inbox.0.borrow_mut().pop_front()
    }

    /// Checks the number of a bundle, and with the first one the graph.
    fn admit(&self, from: usize, number: u64, shape: u64) -> Result<(), Error> {
        let mut expected = self.caster.expected.borrow_mut();
        if expected.len() <= from {
            expected.resize(from + 1, 0);
        }
        if number != expected[from] {
            let (dataflow, expected) = (self.family.name.clone(), expected[from]);
            return Err(Error::SequenceGap { dataflow, worker: from, expected, got: number });
        }
        expected[from] += 1;
        if number == 0 && shape != self.shape {
            return Err(self.mismatch(from, &format!("graph {:016x} here, {shape:016x} there", self.shape)));
        }
        Ok(())
    }

    fn mismatch(&self, peer: usize, what: &str) -> Error {
        let detail = format!("dataflow {:?}: {what}", self.family.name);
        Error::GraphMismatch { worker: self.core.index(), peer, detail }
    }
}

impl Drop for Dataflow {
    fn drop(&mut self) {
        self.family.alive.set(false);
        self.core.close_channels(self.channels.clone());
        for region in self.family.regions.take() {
            region.dismantle();
        }
    }
}

impl Bundle {
    fn encode(&self) -> Vec<u8> {
        let parts = self.parts.iter().map(|(region, part)| {
            let mut bytes = Vec::new();
            part.encode(&mut bytes);
            (*region as u64, bytes)
        });
        let form: BundleBytes = (self.number, self.shape, parts.collect());
        let mut bytes = Vec::new();
        encode_serde(&form, &mut bytes);
        bytes
    }
}

/// 64-bit FNV-1a.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
