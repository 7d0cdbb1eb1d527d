//! Several workers in one thread, stepped by the test: every interleaving is written down.

use std::sync::Arc;

use penstock_bins::{Config, Routing, Shelf, Stats};
use penstock_dataflow::{Worker, fabric};

use super::fleet::{Layout, Process};
use super::{Block, Output, Rig, Row, SharedTrace, Sums, build, config, hash};

pub struct Duo {
    pub workers: Vec<Worker>,
    pub rigs: Vec<Rig>,
    pub trace: SharedTrace,
    pub stats: Arc<Stats<u64>>,
    pub shelf: Shelf<Sums>,
}

impl Duo {
    pub fn new(layout: Layout, routing: &Routing) -> Self {
        Self::shipping(layout, routing, penstock_bins::SHIP_BYTES)
    }

    /// With so many bytes of state under way at most.
    pub fn shipping(layout: Layout, routing: &Routing, ship_bytes: usize) -> Self {
        let (trace, shelf, stats) = (SharedTrace::default(), Shelf::new(), Arc::new(Stats::new()));
        let process = Process { layout, shelf: shelf.clone(), stats: Arc::clone(&stats) };
        let mut workers: Vec<_> = fabric::threads(layout.workers()).into_iter().map(Worker::new).collect();
        let rigs = workers
            .iter_mut()
            .map(|worker| {
                let config = Config { ship_bytes, ..config(worker, &process, routing) };
                build(worker, config, &trace).unwrap()
            })
            .collect();
        Self { workers, rigs, trace, stats, shelf }
    }

    /// Steps until nothing is left to do without further input.
    pub fn settle(&mut self) {
        while self.step() {}
    }

    /// One step of every worker; whether any had something to do.
    pub fn step(&mut self) -> bool {
        let mut busy = false;
        for worker in &mut self.workers {
            if worker.has_work() {
                busy = true;
                worker.step().unwrap();
            }
        }
        busy
    }

    pub fn send(&mut self, worker: usize, rows: Vec<Row>) {
        let block = Block::new(rows, hash);
        self.rigs[worker].data.as_mut().unwrap().send(block);
    }

    pub fn data_to(&mut self, time: u64) {
        for rig in &mut self.rigs {
            rig.data.as_mut().unwrap().advance_to(time).unwrap();
        }
    }

    /// The leader's control; the others' is closed.
    pub fn lead(&mut self) -> penstock_dataflow::InputHandle<u64, Vec<penstock_bins::Control>> {
        let leader = self.rigs[0].control.take().unwrap();
        for rig in &mut self.rigs {
            rig.control = None;
        }
        leader
    }

    pub fn frontier(&self) -> Vec<u64> {
        self.rigs[0].counts.probe.with_frontier(<[u64]>::to_vec)
    }

    pub fn outputs(&self) -> Vec<Output> {
        let mut outputs = self.trace.lock().unwrap().outputs.clone();
        outputs.sort_unstable();
        outputs
    }

    pub fn holds(&self, worker: usize, bin: u32) -> bool {
        self.rigs[worker].counts.table.borrow().get(bin).is_some()
    }
}
