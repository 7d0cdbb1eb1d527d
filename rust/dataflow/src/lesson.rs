//! What a joiner's copy of an operator has to learn from that of a peer: state that came of blocks which every worker was sent before the
//! joiner could be, such as a routing table.
//!
//! When everything that was sent under the list before the joiner's has come, the operator of its server runs and finds a *pupil*. It reads
//! all blocks that wait, then teaches; so what it teaches holds all that was sent under old lists, and perhaps some of what goes to the joiner
//! itself as well, which the joiner has to bear. Until a lesson has come the joiner's operator keeps its blocks. A
//! lesson counts for no frontier: what an operator may not do without it, it does with the capability of a block that waits.
//!
//! Source: rescaling R§3.5.2. Departure: no command of the user's begins it, and no time is its own, so nothing can collide with it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::activate::Activator;
use crate::core::{Core, Sink};
use crate::error::Error;
use crate::fabric::Payload;
use crate::wire::{decode_serde, encode_serde};

/// The joiners that an operator of this worker is to teach.
pub(crate) struct Pupils {
    waiting: RefCell<Vec<usize>>,
    activator: Activator,
}

impl Pupils {
    pub(crate) fn come(&self, pupil: usize) {
        self.waiting.borrow_mut().push(pupil);
        self.activator.activate();
    }

    /// Whether nobody waits to be taught.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.borrow().is_empty()
    }
}

/// Where a lesson arrives.
struct Desk<X> {
    came: RefCell<Option<X>>,
    activator: Activator,
    core: std::rc::Weak<Core>,
}

impl<X: DeserializeOwned + 'static> Sink for Desk<X> {
    fn accept(&self, from: usize, payload: Payload) -> Result<(), Error> {
        let lesson = match payload {
            Payload::Typed(boxed) => boxed.downcast::<X>().ok().map(|lesson| *lesson),
            Payload::Bytes(bytes) => decode_serde(&bytes).ok(),
            _ => None,
        };
        if lesson.is_some() {
            *self.came.borrow_mut() = lesson;
            self.activator.activate();
            return Ok(());
        }
        let worker = self.core.upgrade().map_or(0, |core| core.index());
        let detail = format!("a lesson here is {}, and something else came", std::any::type_name::<X>());
        Err(Error::GraphMismatch { worker, peer: from, detail })
    }
}

/// See the module. One that [`OperatorBuilder::lesson`](crate::OperatorBuilder::lesson) made.
pub struct Lesson<X> {
    school: Option<School<X>>,
    due: Cell<bool>,
}

struct School<X> {
    core: Rc<Core>,
    channel: u64,
    pupils: Rc<Pupils>,
    desk: Rc<Desk<X>>,
}

impl<X: Serialize + DeserializeOwned + Send + 'static> Lesson<X> {
    pub(crate) fn open(core: &Rc<Core>, activator: &Activator) -> Self {
        let Some(membership) = core.membership() else { return Lesson { school: None, due: Cell::new(false) } };
        let pupils = Rc::new(Pupils { waiting: RefCell::default(), activator: activator.clone() });
        let desk = Rc::new(Desk { came: RefCell::default(), activator: activator.clone(), core: Rc::downgrade(core) });
        let sink = desk.clone();
        let channel = core.open_channel(|_| sink);
        membership.open_school(core.building(), pupils.clone());
        let due = Cell::new(membership.joins());
        Lesson { school: Some(School { core: core.clone(), channel, pupils, desk }), due }
    }

    /// Whether this operator has to learn before it decides anything.
    #[inline]
    pub fn is_due(&self) -> bool {
        self.due.get()
    }

    /// What came, once.
    pub fn learn(&self) -> Option<X> {
        let came = self.school.as_ref()?.desk.came.take();
        if came.is_some() {
            self.due.set(false);
        }
        came
    }

    /// The joiners to teach now, by [`Worker::index`](crate::Worker::index); none while this operator has to learn itself. To be asked after all
    /// blocks that wait were read.
    pub fn pupils(&self) -> Vec<usize> {
        match &self.school {
            Some(school) if !self.is_due() => school.pupils.waiting.take(),
            _ => Vec::new(),
        }
    }

    /// Teaches a joiner.
    pub fn teach(&self, pupil: usize, lesson: X) {
        if let Some(school) = &self.school {
            let payload = if school.core.is_local(pupil) {
                Payload::Typed(Box::new(lesson))
            } else {
                let mut bytes = Vec::new();
                encode_serde(&lesson, &mut bytes);
                Payload::Bytes(bytes)
            };
            school.core.send(pupil, school.channel, payload);
        }
    }
}

impl<X> std::fmt::Debug for Lesson<X> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lesson").field("due", &self.due.get()).finish()
    }
}
