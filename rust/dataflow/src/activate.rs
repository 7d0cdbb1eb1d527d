//! Which operators have something to do.
//!
//! Each scope keeps one flag per node; all scopes of a dataflow share one count of raised flags, so an idle dataflow is
//! recognised without looking at its nodes.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// The raised flags of one scope.
pub(crate) struct Flags {
    raised: RefCell<Vec<bool>>,
    pending: Rc<Cell<usize>>,
}

impl Flags {
    pub(crate) fn new(pending: Rc<Cell<usize>>) -> Self {
        Flags { raised: RefCell::new(Vec::new()), pending }
    }

    pub(crate) fn raise(&self, node: usize) {
        let mut raised = self.raised.borrow_mut();
        if raised.len() <= node {
            raised.resize(node + 1, false);
        }
        if !std::mem::replace(&mut raised[node], true) {
            self.pending.set(self.pending.get() + 1);
        }
    }

    /// Lowers the flag of a node; whether it was raised.
    pub(crate) fn take(&self, node: usize) -> bool {
        let mut raised = self.raised.borrow_mut();
        let was = raised.get_mut(node).is_some_and(std::mem::take);
        if was {
            self.pending.set(self.pending.get() - 1);
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
}

impl std::fmt::Debug for Activator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Activator").field("node", &self.node).finish()
    }
}
