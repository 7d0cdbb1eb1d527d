//! What has something to do: which operators of a dataflow, and which dataflows of a worker.
//!
//! Each scope keeps one flag per node; all scopes of a dataflow share its [`Mark`], which counts the raised ones, so that one without any
//! is recognised without a look at its nodes. A mark enters its dataflow into the [`Agenda`] of the worker when a flag is raised,
//! something is counted, or news come, whoever causes that and when; so a step looks at no other dataflow.
//!
//! Invariant: a dataflow that could do something in a step is in the agenda, or is the one that is stepped now; and none is there twice.
//! What is entered for a dataflow whose turn in this step is over waits for the next one, so each has one turn in a step, in
//! the order in which they were built.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::rc::Rc;

/// The dataflows of a worker that have something to do, by number.
#[derive(Default)]
pub(crate) struct Agenda {
    due: RefCell<BinaryHeap<Reverse<u64>>>,
    /// For the next step.
    later: RefCell<Vec<u64>>,
    /// Whose turn it is.
    turn: Cell<Option<u64>>,
}

impl Agenda {
    fn enter(&self, number: u64) {
        if self.turn.get().is_some_and(|turn| number <= turn) {
            self.later.borrow_mut().push(number);
        } else {
            self.due.borrow_mut().push(Reverse(number));
        }
    }

    /// The next dataflow that has a turn in this step; at the end none, and the next step begins.
    pub(crate) fn next(&self) -> Option<u64> {
        let mut due = self.due.borrow_mut();
        let next = due.pop().map(|Reverse(number)| number);
        self.turn.set(next);
        if next.is_none() {
            due.extend(self.later.borrow_mut().drain(..).map(Reverse));
        }
        next
    }

    /// Whether some dataflow of the next step fulfils this.
    pub(crate) fn any(&self, mut test: impl FnMut(u64) -> bool) -> bool {
        self.due.borrow().iter().any(|Reverse(number)| test(*number))
    }
}

/// Whether a dataflow has something to do.
pub(crate) struct Mark {
    agenda: Rc<Agenda>,
    /// Once it is started.
    number: Cell<Option<u64>>,
    /// It is in the agenda, or has its turn.
    entered: Cell<bool>,
    /// Raised activation flags in all regions.
    pending: Cell<usize>,
    /// Something was counted since [`Mark::collect`].
    counted: Cell<bool>,
}

impl Mark {
    pub(crate) fn new(agenda: Rc<Agenda>) -> Self {
        let (number, pending) = (Cell::new(None), Cell::new(0));
        Mark { agenda, number, entered: Cell::new(false), pending, counted: Cell::new(false) }
    }

    /// The dataflow is built and has its first turn in the next step.
    pub(crate) fn start(&self, number: u64) {
        self.number.set(Some(number));
        self.entered.set(true);
        self.agenda.enter(number);
    }

    /// The dataflow may have something to do.
    pub(crate) fn raise(&self) {
        if let Some(number) = self.number.get()
            && !self.entered.replace(true)
        {
            self.agenda.enter(number);
        }
    }

    /// The turn of the dataflow is over; `busy`: it has more to do.
    pub(crate) fn turned(&self, busy: bool) {
        self.entered.set(false);
        if busy {
            self.raise();
        }
    }

    /// Something was counted.
    pub(crate) fn count(&self) {
        self.counted.set(true);
        self.raise();
    }

    /// What was counted is collected now.
    pub(crate) fn collect(&self) {
        self.counted.set(false);
    }

    pub(crate) fn has_counted(&self) -> bool {
        self.counted.get()
    }

    /// Whether a flag is raised.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.get() > 0
    }
}

/// The raised flags of one scope.
pub(crate) struct Flags {
    raised: RefCell<Vec<bool>>,
    mark: Rc<Mark>,
}

impl Flags {
    pub(crate) fn new(mark: Rc<Mark>) -> Self {
        Flags { raised: RefCell::new(Vec::new()), mark }
    }

    pub(crate) fn raise(&self, node: usize) {
        let mut raised = self.raised.borrow_mut();
        if raised.len() <= node {
            raised.resize(node + 1, false);
        }
        if !std::mem::replace(&mut raised[node], true) {
            self.mark.pending.set(self.mark.pending.get() + 1);
            self.mark.raise();
        }
    }

    /// Lowers the flag of a node; whether it was raised.
    pub(crate) fn take(&self, node: usize) -> bool {
        let mut raised = self.raised.borrow_mut();
        let was = raised.get_mut(node).is_some_and(std::mem::take);
        if was {
            self.mark.pending.set(self.mark.pending.get() - 1);
        }
        was
    }
}

/// Makes one operator run in the current or the next step of its worker. Belongs to that worker's thread.
#[derive(Clone)]
pub struct Activator {
    flags: Rc<Flags>,
    node: usize,
}

impl Activator {
    pub(crate) fn new(flags: Rc<Flags>, node: usize) -> Self {
        Activator { flags, node }
    }

    /// Asks for a run. Asking again before it happens changes nothing.
    pub fn activate(&self) {
        self.flags.raise(self.node);
    }

    /// Whether both run the same operator.
    pub(crate) fn is(&self, other: &Activator) -> bool {
        self.node == other.node && Rc::ptr_eq(&self.flags, &other.flags)
    }
}

impl std::fmt::Debug for Activator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Activator").field("node", &self.node).finish()
    }
}
