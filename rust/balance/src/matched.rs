//! Steps in which every worker sends to at most one and receives from at most one.
//!
//! Senders on one side, receivers on the other, a group of moves is an edge: steps are an edge colouring of a bipartite multigraph, which takes
//! as many colours as its greatest degree (König). Each step is a matching that covers every worker which has the most left to do, senders and
//! receivers alike, so the most goes down by one a step; what else can go, goes along.
//!
//! Cost: a search per worker and step over the pairs that are left.

use std::collections::{BTreeMap, VecDeque};

use crate::Shift;

const NOBODY: usize = usize::MAX;

struct Pairs<B> {
    /// What moves between two, by sender and receiver.
    queues: Vec<BTreeMap<usize, VecDeque<Shift<B>>>>,
    /// Who sends to a receiver.
    senders_of: Vec<Vec<usize>>,
    size: usize,
}

impl<B: Copy> Pairs<B> {
    fn new(moves: &[Shift<B>], size: usize) -> Self {
        let number = |workers: &mut BTreeMap<u32, usize>, worker: u32| {
            let next = workers.len();
            *workers.entry(worker).or_insert(next)
        };
        let (mut senders, mut receivers) = (BTreeMap::new(), BTreeMap::new());
        let mut pairs = Self { queues: Vec::new(), senders_of: Vec::new(), size };
        for shift in moves {
            let (from, to) = (number(&mut senders, shift.from), number(&mut receivers, shift.to));
            pairs.queues.resize_with(senders.len(), BTreeMap::new);
            pairs.senders_of.resize_with(receivers.len(), Vec::new);
            let queue = pairs.queues[from].entry(to).or_insert_with(|| {
                pairs.senders_of[to].push(from);
                VecDeque::new()
            });
            queue.push_back(*shift);
        }
        pairs
    }

    /// Groups that a sender has left, and a receiver.
    fn degrees(&self) -> (Vec<usize>, Vec<usize>) {
        let mut degrees = (vec![0; self.queues.len()], vec![0; self.senders_of.len()]);
        for (from, queues) in self.queues.iter().enumerate() {
            for (&to, queue) in queues {
                let groups = queue.len().div_ceil(self.size);
                degrees.0[from] += groups;
                degrees.1[to] += groups;
            }
        }
        degrees
    }

    /// Takes a group of each pair.
    fn take(&mut self, matching: &Matching) -> Vec<Shift<B>> {
        let mut step = Vec::new();
        for (from, &to) in matching.receiver.iter().enumerate().filter(|(_, to)| **to != NOBODY) {
            let queue = self.queues[from].get_mut(&to).expect("pairs of the matching have moves left");
            step.extend(queue.drain(..self.size.min(queue.len())));
            if queue.is_empty() {
                self.queues[from].remove(&to);
                self.senders_of[to].retain(|sender| *sender != from);
            }
        }
        step
    }
}

/// Who sends to whom, from both sides.
struct Matching {
    receiver: Vec<usize>,
    sender: Vec<usize>,
}

impl Matching {
    /// One that covers all that have the most left, and to which no pair can be added.
    fn covering<B: Copy>(pairs: &Pairs<B>) -> Self {
        let (sending, receiving) = pairs.degrees();
        let most = sending.iter().chain(&receiving).copied().max().unwrap_or(0);
        let mut matching = Self { receiver: vec![NOBODY; sending.len()], sender: vec![NOBODY; receiving.len()] };
        let must = |degrees: &[usize]| (0..degrees.len()).filter(|at| degrees[*at] == most).collect::<Vec<_>>();
        for from in must(&sending) {
            matching.send(pairs, from, &mut vec![false; receiving.len()]);
        }
        for to in must(&receiving) {
            if matching.sender[to] == NOBODY {
                matching.receive(pairs, to, &|other| receiving[other] < most, &mut vec![false; sending.len()]);
            }
        }
        for from in 0..sending.len() {
            if matching.receiver[from] == NOBODY {
                matching.send(pairs, from, &mut vec![false; receiving.len()]);
            }
        }
        matching
    }

    fn pair(&mut self, from: usize, to: usize) {
        self.receiver[from] = to;
        self.sender[to] = from;
    }

    /// Lets a sender send; whoever is paired stays paired.
    fn send<B>(&mut self, pairs: &Pairs<B>, from: usize, seen: &mut [bool]) -> bool {
        for &to in pairs.queues[from].keys() {
            if !std::mem::replace(&mut seen[to], true)
                && (self.sender[to] == NOBODY || self.send(pairs, self.sender[to], seen))
            {
                self.pair(from, to);
                return true;
            }
        }
        false
    }

    /// Lets a receiver receive; who sends goes on sending, of the receivers one that `may` lose its sender.
    fn receive<B>(&mut self, pairs: &Pairs<B>, to: usize, may: &dyn Fn(usize) -> bool, seen: &mut [bool]) -> bool {
        for &from in &pairs.senders_of[to] {
            if std::mem::replace(&mut seen[from], true) {
                continue;
            }
            let other = self.receiver[from];
            if other == NOBODY || may(other) || self.receive(pairs, other, may, seen) {
                if other != NOBODY && self.sender[other] == from {
                    self.sender[other] = NOBODY;
                }
                self.pair(from, to);
                return true;
            }
        }
        false
    }
}

pub(crate) fn steps<B: Copy>(moves: &[Shift<B>], size: usize) -> Vec<Vec<Shift<B>>> {
    let mut pairs = Pairs::new(moves, size);
    let mut steps = Vec::new();
    let mut left = moves.len();
    while left > 0 {
        let step = pairs.take(&Matching::covering(&pairs));
        left -= step.len();
        steps.push(step);
    }
    steps
}
