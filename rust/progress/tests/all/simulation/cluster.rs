//! Several workers run one random dataflow graph, broadcast numbered progress over links with random delays, and are
//! watched by an observer who sees everything.
//!
//! The observer checks at every step that no worker's frontier has passed a message or capability that exists anywhere
//! (safety), that frontiers never go back, that notifications come once and never early, and at the end that every count is
//! zero and every frontier empty (liveness). Numbers and what is held back are those of the crate: [`Caster`], [`Ledger`]. A [`Fault`] breaks one rule of the protocol on purpose, to see that the observer
//! notices.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use penstock_progress::ledger::{Change, Untold};
use penstock_progress::{
    Antichain, Capability, Caster, ChangeBatch, Ledger, Location, Meter, Notificator, PathSummary, Port, Source,
    Target, Tracker,
};

use crate::common::{Graph, Random, SmallTime};

/// More steps than any run takes that gets anywhere.
const PATIENCE: usize = 60_000;

/// A rule of the protocol that is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A step's consumptions travel before its productions, in a broadcast of their own.
    TornStep,
    /// A broadcast is lost on one link.
    LostBroadcast,
    /// A broadcast arrives twice on one link.
    DoubledBroadcast,
    /// A link delivers the second broadcast before the first.
    OvertakingBroadcast,
    /// One change of a broadcast is forgotten by one receiver.
    ForgottenChange,
    /// One worker's tracker lacks the summary of one path.
    DroppedSummary,
    /// Notifications look at the last input of their node only.
    DeafNotificator,
    /// A capability moves later, and only its old count is taken back.
    UncountedDowngrade,
    /// A snapshot is taken while there is something to tell.
    EarlySnapshot,
    /// A snapshot says that one bundle less of some sender is in it.
    SnapshotBehind,
}

/// What a worker broadcasts at the end of a step.
#[derive(Clone)]
struct Broadcast<T> {
    number: u64,
    changes: Vec<Change<T>>,
}

type Waiting<T> = (Notificator<T>, BTreeSet<(Source, T)>);

struct Peer<T: SmallTime> {
    ledger: Ledger<T>,
    caster: Caster,
    /// What capabilities of each output have changed, not yet counted.
    counts: BTreeMap<Source, Rc<Meter<T>>>,
    capabilities: Vec<(Source, Capability<T>)>,
    messages: Vec<(Target, T)>,
    /// Message counts, not yet counted.
    changes: ChangeBatch<(Location, T)>,
    /// By node: its notificator, and what was asked for and has not come.
    notificators: BTreeMap<usize, Waiting<T>>,
    /// Per sender, what is on its way.
    links: Vec<VecDeque<Broadcast<T>>>,
    /// What each target's frontier was when it last changed.
    known: BTreeMap<Target, Antichain<T>>,
}

impl<T: SmallTime> Peer<T> {
    fn quiet(&mut self) -> bool {
        self.capabilities.is_empty()
            && self.messages.is_empty()
            && self.notificators.values().all(|(notificator, _)| notificator.is_empty())
            && self.changes.is_empty()
            && self.counts.values().all(|counts| counts.is_empty())
            && self.links.iter().all(VecDeque::is_empty)
            && !self.ledger.owes()
    }
}

/// A run of one seed.
pub(crate) struct Cluster<T: SmallTime> {
    graph: Graph<T>,
    /// By node, whether it may wait for notifications. One that keeps times, or is on no cycle, may. Of two others on one
    /// cycle each could hold what the other waits for: so it is with any notification for the output of a feedback.
    waits: Vec<bool>,
    peers: Vec<Peer<T>>,
    random: Random,
    fault: Option<Fault>,
    /// How many broadcasts pass before a fault of one broadcast strikes.
    fuse: usize,
    /// Whether the fault has struck.
    pub struck: bool,
    /// Messages, capabilities and requests that may still be made.
    budget: usize,
    /// How often notifications came.
    pub notified: usize,
    /// By sender and number: all that was ever told.
    told: Vec<Vec<Vec<Change<T>>>>,
    /// What a lone worker counted, which it tells nobody.
    alone: Vec<Change<T>>,
    /// How many snapshots were compared.
    pub snapshots: usize,
}

impl<T: SmallTime> Cluster<T> {
    pub(crate) fn new(seed: u64, fault: Option<Fault>) -> Self {
        let mut random = Random(seed);
        let graph = Graph::<T>::random(&mut random, false);
        let count = 1 + random.below(4);
        let (budget, fuse) = (random.below(80), random.below(6));
        let waits = (0..graph.nodes.len()).map(|node| may_wait(&graph, node)).collect();
        let peers = Vec::new();
        let (told, alone) = (vec![Vec::new(); count], Vec::new());
        let (struck, notified, snapshots) = (false, 0, 0);
        let mut cluster =
            Self { graph, waits, peers, random, fault, fuse, struck, budget, notified, told, alone, snapshots };
        let sources = cluster.graph.sources();
        for at in 0..count {
            let mut ledger = Ledger::new(cluster.tracker(at));
            ledger.found(sources.iter().copied(), count);
            ledger.tracker_mut().propagate();
            let counts: BTreeMap<_, _> = sources.iter().map(|source| (*source, Rc::default())).collect();
            let capabilities = counts.iter().map(|(source, counts)| {
                let capability = Capability::adopt(T::minimum(), Rc::clone(counts));
                (*source, capability)
            });
            cluster.peers.push(Peer {
                ledger,
                caster: Caster::new(),
                capabilities: capabilities.collect(),
                counts,
                messages: Vec::new(),
                changes: ChangeBatch::new(),
                notificators: BTreeMap::new(),
                links: vec![VecDeque::new(); count],
                known: BTreeMap::new(),
            });
        }
        cluster
    }

    fn tracker(&mut self, at: usize) -> Tracker<T> {
        let mut nodes = self.graph.nodes.clone();
        if self.fault == Some(Fault::DroppedSummary) && at == 0 {
            let mut paths = nodes.iter_mut().flat_map(|node| node.2.iter_mut().flatten());
            if let Some(path) = paths.find(|path| !path.is_empty()) {
                path.clear();
                self.struck = true;
            }
        }
        let graph = Graph { nodes, edges: self.graph.edges.clone() };
        graph.build().expect("cycles advance by construction")
    }

    /// Sends a message at the capability's time or later on every edge of its source.
    fn send(&mut self, at: usize) {
        let count = self.peers.len();
        let held = &self.peers[at].capabilities;
        if held.is_empty() || self.budget == 0 {
            return;
        }
        let (source, capability) = &held[self.random.below(held.len())];
        let Some(time) = T::summary(&mut self.random, false).results_in(capability.time()) else { return };
        let source = *source;
        for (from, to) in &self.graph.edges {
            if *from == source {
                let receiver = self.random.below(count);
                self.peers[receiver].messages.push((*to, time.clone()));
                self.peers[at].changes.update(((*to).into(), time.clone()), 1);
                self.budget = self.budget.saturating_sub(1);
            }
        }
    }

    /// Clones a capability, moves it later or drops it.
    fn release(&mut self, at: usize) -> Result<(), String> {
        let Self { peers, random, budget, fault, struck, .. } = self;
        let peer = &mut peers[at];
        if peer.capabilities.is_empty() {
            return Ok(());
        }
        let chosen = random.below(peer.capabilities.len());
        let (source, capability) = &mut peer.capabilities[chosen];
        if *budget == 0 || random.chance(40) {
            peer.capabilities.swap_remove(chosen);
            return Ok(());
        }
        *budget -= 1;
        if random.chance(20) {
            let clone = (*source, capability.clone());
            peer.capabilities.push(clone);
            return Ok(());
        }
        let other = T::small(random);
        if !capability.time().less_equal(&other) {
            let before = capability.time().clone();
            if capability.downgrade(&other).is_ok() || *capability.time() != before {
                return Err(format!("worker {at} moved a capability from {before:?} back to {other:?}"));
            }
        }
        if let Some(later) = T::summary(random, true).results_in(capability.time()) {
            capability.downgrade(&later).map_err(|error| error.to_string())?;
            if *fault == Some(Fault::UncountedDowngrade) && !*struck {
                *struck = true;
                peer.counts[source].update(later, -1);
            }
        }
        Ok(())
    }

    /// Consumes a message and perhaps keeps capabilities for what it allows, or asks to be notified.
    fn consume(&mut self, at: usize) -> Result<(), String> {
        let peer = &mut self.peers[at];
        if peer.messages.is_empty() {
            return Ok(());
        }
        let (target, time) = peer.messages.swap_remove(self.random.below(peer.messages.len()));
        if !peer.ledger.tracker().frontier(target).iter().any(|element| element.less_equal(&time)) {
            return Err(format!("worker {at} receives {time:?} at {target:?} after its frontier passed it"));
        }
        peer.changes.update((target.into(), time.clone()), -1);
        for (output, antichain) in self.graph.nodes[target.node / 10].2[target.port].iter().enumerate() {
            for summary in antichain.elements() {
                if self.budget == 0 || self.random.chance(50) {
                    continue;
                }
                let source = Source::new(target.node, output);
                let Some(time) = summary.results_in(&time) else { continue };
                self.budget -= 1;
                let capability = Capability::mint(time.clone(), Rc::clone(&peer.counts[&source]));
                if self.waits[target.node / 10] && self.random.chance(50) {
                    let (notificator, asked) = peer.notificators.entry(target.node).or_default();
                    notificator.notify_at(capability);
                    asked.insert((source, time));
                } else {
                    peer.capabilities.push((source, capability));
                }
            }
        }
        Ok(())
    }

    /// Takes the notifications that one node's frontiers allow.
    fn notify(&mut self, at: usize) -> Result<(), String> {
        let peer = &mut self.peers[at];
        let chosen = self.random.below(peer.notificators.len().max(1));
        let Some((node, (notificator, asked))) = peer.notificators.iter_mut().nth(chosen) else { return Ok(()) };
        let targets = (0..self.graph.nodes[node / 10].0).map(|port| Target::new(*node, port));
        let mut frontiers = targets.map(|target| peer.ledger.tracker().frontier(target)).collect::<Vec<_>>();
        if self.fault == Some(Fault::DeafNotificator) && frontiers.len() > 1 {
            frontiers.drain(..frontiers.len() - 1);
            self.struck = true;
        }
        while let Some(capability) = notificator.next(&frontiers) {
            let time = capability.time().clone();
            self.notified += 1;
            if let Some((target, early)) =
                peer.messages.iter().find(|message| message.0.node == *node && message.1.less_equal(&time))
            {
                return Err(format!("worker {at} is notified of {time:?} at {node} before {early:?} at {target:?}"));
            }
            let source = *peer.counts.iter().find(|entry| capability.valid_for(entry.1)).expect("it has an output").0;
            if !asked.remove(&(source, time.clone())) {
                return Err(format!("worker {at} is notified of {time:?} at {node} without having asked"));
            }
            if self.random.chance(50) {
                peer.capabilities.push((source, capability));
            }
        }
        Ok(())
    }

    /// Ends a step: counts what it changed, and tells everybody else when that may move a frontier.
    fn broadcast(&mut self, at: usize) -> Result<(), String> {
        let share = self.peers.len() > 1;
        let Peer { ledger, caster, counts, changes, .. } = &mut self.peers[at];
        for (source, counts) in counts {
            let mut counted = ChangeBatch::new();
            counts.collect(&mut counted);
            changes.extend(counted.drain().map(|(time, diff)| (((*source).into(), time), diff)));
        }
        for ((location, time), diff) in changes.drain() {
            if !share {
                self.alone.push((location, time.clone(), diff));
            }
            ledger.count(location, time, diff, share);
        }
        ledger.apply(|_, _, _| {}).map_err(|error| error.to_string())?;
        ledger.tracker_mut().propagate();
        if share && (caster.next() == 0 || ledger.must_cast()) {
            let mut changes = Vec::new();
            ledger.cast(|location, time, diff| changes.push((location, time, diff)));
            self.tell(at, changes);
        }
        self.safe(at)?;
        if self.random.chance(10) { self.snapshot(at) } else { Ok(()) }
    }

    /// Takes a snapshot, and compares it with what was told up to the numbers that it names, and a graph that begins with it with
    /// that of the worker.
    fn snapshot(&mut self, at: usize) -> Result<(), String> {
        if self.peers.len() > 1 && self.peers[at].ledger.owes() {
            if self.fault != Some(Fault::EarlySnapshot) {
                let refused = self.peers[at].ledger.snapshot(|_| false);
                assert_eq!(refused, Err(Untold), "what is unsent would count twice");
                let mut changes = Vec::new();
                self.peers[at].ledger.cast(|location, time, diff| changes.push((location, time, diff)));
                self.tell(at, changes);
            } else {
                self.struck = true;
            }
        }
        let Peer { ledger, caster, .. } = &mut self.peers[at];
        let next = caster.snapshot(at);
        let counts = match ledger.snapshot(|_| false) {
            Ok(counts) => counts,
            Err(Untold) => ledger.tracker().accumulated().map(|((at, time), count)| (at, time, count)).collect(),
        };
        let mut replay = ChangeBatch::new();
        let count = self.peers.len() as i64;
        replay.extend(self.graph.sources().into_iter().map(|source| ((source.into(), T::minimum()), count)));
        replay.extend(self.alone.iter().cloned().map(|(location, time, diff)| ((location, time), diff)));
        let skipped = next.iter().find(|(_, next)| **next > 0).filter(|_| self.fault == Some(Fault::SnapshotBehind));
        for (sender, next) in &next {
            let mut included = &self.told[*sender][..*next as usize];
            if skipped.is_some_and(|(skipped, _)| skipped == sender) {
                self.struck |= included.last().is_some_and(|bundle| !bundle.is_empty());
                included = &included[..included.len() - 1];
            }
            let changes = included.iter().flatten().cloned();
            replay.extend(changes.map(|(location, time, diff)| ((location, time), diff)));
        }
        let mut recorded = ChangeBatch::new();
        recorded.extend(counts.iter().cloned().map(|(location, time, count)| ((location, time), count)));
        let (recorded, replay) = (recorded.drain().collect::<Vec<_>>(), replay.drain().collect::<Vec<_>>());
        if recorded != replay {
            return Err(format!("the snapshot of worker {at} at {next:?} holds {recorded:?}, the log {replay:?}"));
        }
        self.snapshots += 1;
        let mut joiner = Ledger::new(self.graph.build().expect("cycles advance by construction"));
        joiner.begin(counts).map_err(|error| error.to_string())?;
        joiner.tracker_mut().propagate();
        let tracker = self.peers[at].ledger.tracker();
        for target in self.graph.targets() {
            let (here, there) = (tracker.frontier(target), joiner.tracker().frontier(target));
            if here != there {
                return Err(format!("{target:?}: {there:?} with the snapshot of worker {at}, which has {here:?}"));
            }
        }
        Ok(())
    }

    /// Numbers the changes and puts them on the links to everybody else.
    fn tell(&mut self, at: usize, changes: Vec<Change<T>>) {
        let mut parts = vec![changes];
        if self.fault == Some(Fault::TornStep) {
            let (down, up): (Vec<_>, Vec<_>) = parts.remove(0).into_iter().partition(|change| change.2 < 0);
            self.struck |= !down.is_empty() && !up.is_empty();
            parts = vec![down, up];
        }
        for changes in parts {
            let number = self.peers[at].caster.number();
            self.told[at].push(changes.clone());
            let strikes = self.fuse == 0 && !self.struck && !changes.is_empty();
            self.fuse = self.fuse.saturating_sub(1);
            let others = self.peers.len() - 1;
            let victim = if strikes { (at + 1 + self.random.below(others)) % self.peers.len() } else { usize::MAX };
            for (to, peer) in self.peers.iter_mut().enumerate().filter(|(to, _)| *to != at) {
                let mut broadcast = Broadcast { number, changes: changes.clone() };
                let fault = self.fault.filter(|_| to == victim);
                if fault == Some(Fault::ForgottenChange) {
                    broadcast.changes.remove(self.random.below(broadcast.changes.len()));
                }
                let copies = match fault {
                    Some(Fault::LostBroadcast) => 0,
                    Some(Fault::DoubledBroadcast) => 2,
                    _ => 1,
                };
                self.struck |= copies != 1 || fault == Some(Fault::ForgottenChange);
                peer.links[at].extend(std::iter::repeat_n(broadcast, copies));
            }
        }
    }

    /// Delivers the next broadcast of one link, then checks safety for its receiver.
    fn deliver(&mut self, at: usize) -> Result<(), String> {
        let from = self.random.below(self.peers.len());
        let Peer { ledger, caster, links, .. } = &mut self.peers[at];
        let link = &mut links[from];
        if self.fault == Some(Fault::OvertakingBroadcast) && link.len() > 1 && !self.struck {
            link.swap(0, 1);
            self.struck = true;
        }
        let Some(broadcast) = link.pop_front() else { return Ok(()) };
        caster.admit(from, broadcast.number).map_err(|gap| format!("worker {at}: {gap}"))?;
        ledger.absorb(broadcast.changes);
        ledger.apply(|_, _, _| {}).map_err(|error| error.to_string())?;
        ledger.tracker_mut().propagate();
        self.safe(at)
    }

    /// Nothing that exists anywhere is behind the frontiers of this worker, and they did not go back.
    fn safe(&mut self, at: usize) -> Result<(), String> {
        let tracker = self.peers[at].ledger.tracker();
        for (other, peer) in self.peers.iter().enumerate() {
            for (target, time) in &peer.messages {
                if !tracker.frontier(*target).iter().any(|element| element.less_equal(time)) {
                    return Err(format!("worker {at} passed {time:?} at {target:?}, which waits at worker {other}"));
                }
            }
            let asked = peer.notificators.values().flat_map(|notificator| &notificator.1);
            let asked = asked.map(|(source, time)| (*source, time));
            let held = peer.capabilities.iter().map(|(source, held)| (*source, held.time()));
            for (source, time) in held.chain(asked) {
                if !tracker.source_frontier(source).iter().any(|element| element.less_equal(time)) {
                    return Err(format!("worker {at} passed {time:?} at {source:?}, which worker {other} may send"));
                }
            }
        }
        let Peer { ledger, known, .. } = &mut self.peers[at];
        let tracker = ledger.tracker_mut();
        let changes = tracker.drain_changes();
        for (target, time, diff) in &changes {
            let before = known.get(target);
            if *diff > 0 && before.is_some_and(|before| !before.less_equal(time)) {
                return Err(format!("the frontier of {target:?} at worker {at} went back to {time:?}"));
            }
        }
        for (target, _, _) in changes {
            known.insert(target, tracker.frontier(target).iter().cloned().collect());
        }
        Ok(())
    }

    /// Runs until nothing is left to do.
    pub(crate) fn run(&mut self) -> Result<(), String> {
        let mut steps = 0;
        while !self.peers.iter_mut().all(Peer::quiet) {
            let at = self.random.below(self.peers.len());
            match self.random.below(7) {
                0 => self.send(at),
                1 => self.release(at)?,
                2 => self.consume(at)?,
                3 => self.broadcast(at)?,
                4 => self.notify(at)?,
                _ => self.deliver(at)?,
            }
            steps += 1;
            if steps > PATIENCE {
                return Err(format!("nothing is settled after {PATIENCE} steps"));
            }
        }
        for (at, peer) in self.peers.iter().enumerate() {
            let tracker = peer.ledger.tracker();
            if !tracker.is_done() {
                return Err(format!("worker {at} still counts {:?}", tracker.accumulated().collect::<Vec<_>>()));
            }
            for location in tracker.locations() {
                let frontier = match location.port {
                    Port::Target(port) => tracker.frontier(Target::new(location.node, port)),
                    Port::Source(port) => tracker.source_frontier(Source::new(location.node, port)),
                };
                if !frontier.is_empty() {
                    return Err(format!("worker {at} still expects {frontier:?} at {location:?}"));
                }
            }
        }
        Ok(())
    }
}

fn may_wait<T: SmallTime>(graph: &Graph<T>, node: usize) -> bool {
    let (inputs, outputs, summary) = &graph.nodes[node];
    if summary.iter().flatten().flat_map(Antichain::elements).all(|path| *path == T::Summary::default()) {
        return true;
    }
    let mut tracker = graph.build().expect("cycles advance by construction");
    (0..*outputs).for_each(|port| tracker.update_source(Source::new(10 * node, port), T::minimum(), 1));
    tracker.propagate();
    (0..*inputs).all(|port| tracker.frontier(Target::new(10 * node, port)).is_empty())
}
