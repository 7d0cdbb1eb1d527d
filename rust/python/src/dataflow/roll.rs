//! What a worker has beside its dataflows: the one that is being built, and the roll.
//!
//! Each worker of a run with several opens one dataflow before the program's: the roll. Over it a worker that ends its program tells
//! all others which dataflows it has built. Who has built others, or builds one more, stops with a `GraphError` instead of
//! waiting for progress that nobody will send. (Graphs of one name are compared by `penstock-dataflow` itself.) The roll also
//! holds every worker until all programs have ended.
//!
//! Departure: one hidden broadcast per run, without which a worker would wait for ever for a dataflow that the others
//! never build.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use penstock_dataflow::{Building, Error, Exchange, InputHandle, OperatorBuilder, Pact, Scope, Stream, Worker};
use penstock_progress::ProbeHandle;

use super::stream::Open;

/// The index of a worker, and the dataflows that it built.
type Entry = (usize, Vec<String>);

struct Roll {
    input: Option<InputHandle<u64, Vec<Entry>>>,
    probe: ProbeHandle<u64>,
    /// What others have told.
    told: Rc<RefCell<Vec<Entry>>>,
}

/// See the module.
pub(crate) struct Site {
    roll: RefCell<Option<Roll>>,
    built: RefCell<Vec<String>>,
    building: RefCell<Option<(String, Building<u64>, Open)>>,
    ended: Cell<bool>,
}

impl Site {
    /// Opens the roll, where there is somebody to tell.
    pub(crate) fn open(worker: &mut Worker) -> Self {
        let roll = (worker.peers() > 1 || worker.is_joinable()).then(|| open(worker));
        Site {
            roll: RefCell::new(roll),
            built: RefCell::default(),
            building: RefCell::new(None),
            ended: Cell::new(false),
        }
    }

    /// Begins a dataflow; none when one is being built.
    pub(crate) fn build(&self, worker: &mut Worker, name: &str) -> Option<(Scope<u64>, Open)> {
        let mut building = self.building.borrow_mut();
        if building.is_some() {
            return None;
        }
        let made = worker.open::<u64>(name);
        let (scope, open) = (made.scope(), Rc::new(Cell::new(true)));
        *building = Some((name.to_owned(), made, open.clone()));
        Some((scope, open))
    }

    /// Whether a dataflow is being built.
    pub(crate) fn is_building(&self) -> bool {
        self.building.borrow().is_some()
    }

    /// Starts what is being built.
    pub(crate) fn start(&self, worker: &mut Worker) {
        let building = self.building.borrow_mut().take();
        if let Some((name, building, open)) = building {
            open.set(false);
            worker.start(building);
            self.note(&name);
        }
    }

    /// Records a dataflow that was built in another way.
    pub(crate) fn note(&self, name: &str) {
        self.built.borrow_mut().push(name.to_owned());
    }

    /// Unfinished dataflows that are not the program's.
    pub(crate) fn own(&self) -> usize {
        let roll = self.roll.borrow();
        usize::from(!self.ended.get() && roll.as_ref().is_some_and(|roll| !roll.probe.done()))
    }

    /// The program has ended: tells the others, once.
    pub(crate) fn end(&self, worker: usize) {
        self.ended.set(true);
        if let Some(roll) = &mut *self.roll.borrow_mut()
            && let Some(mut input) = roll.input.take()
        {
            input.send(vec![(worker, self.built.borrow().clone())]);
        }
    }

    /// The first disagreement with a worker whose program has ended.
    pub(crate) fn disagreement(&self, worker: usize) -> Option<Error> {
        let roll = self.roll.borrow();
        let told = roll.as_ref()?.told.borrow();
        let built = self.built.borrow();
        told.iter().find_map(|(peer, theirs)| {
            let detail = match built.iter().zip(theirs).position(|(own, other)| own != other) {
                Some(at) => format!("dataflow {at} is {:?} here and {:?} there", built[at], theirs[at]),
                None if built.len() > theirs.len() => missing("there", &built[theirs.len()], theirs.len()),
                None if self.ended.get() && built.len() < theirs.len() => {
                    missing("here", &theirs[built.len()], built.len())
                }
                None => return None,
            };
            Some(Error::GraphMismatch { worker, peer: *peer, detail })
        })
    }

    /// Drops what is here, before the worker's table goes.
    pub(crate) fn clear(&self) {
        drop((self.roll.take(), self.building.take()));
    }

    /// Leaves what is here alone: it is the copy of a forked child.
    pub(crate) fn forget(&self) {
        std::mem::forget((self.roll.take(), self.building.take()));
    }
}

fn missing(at: &str, name: &str, built: usize) -> String {
    format!("dataflow {name:?} is missing {at}: the program ended after building {built}")
}

fn open(worker: &mut Worker) -> Roll {
    let told: Rc<RefCell<Vec<Entry>>> = Rc::default();
    let heard = told.clone();
    let (input, probe) = worker.dataflow::<u64, _>("roll", |scope| {
        let (input, entries) = scope.new_input::<Vec<Entry>>();
        let members = scope.clone();
        let everyone = Exchange::new(move |_: &u64, entries: Vec<Entry>, give: &mut dyn FnMut(usize, Vec<Entry>)| {
            (0..members.peers()).for_each(|worker| give(worker, entries.clone()));
        });
        (input, listen(&entries, everyone, heard))
    });
    Roll { input: Some(input), probe, told }
}

fn listen(
    entries: &Stream<u64, Vec<Entry>>,
    pact: impl Pact<u64, Vec<Entry>>,
    heard: Rc<RefCell<Vec<Entry>>>,
) -> ProbeHandle<u64> {
    let mut builder = OperatorBuilder::new(entries.scope(), "hear");
    builder.notify(false);
    let mut input = builder.input(entries, pact);
    let (_, stream) = builder.output::<()>();
    builder.build(|capabilities| {
        drop(capabilities);
        move |_| {
            input.for_each(|_, entries| heard.borrow_mut().extend(entries));
            Ok(())
        }
    });
    stream.probe().0
}
