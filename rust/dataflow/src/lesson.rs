//! What a joiner's copy of an operator has to learn from that of a peer: state that came of blocks which every worker was sent before the
//! joiner could be, such as a routing table.
//!
//! When everything that was sent under the list before the joiner's has come, the operator of its server runs and finds a *pupil*. It reads
//! all blocks that wait, then teaches; so what it teaches holds all that was sent under old lists, and perhaps some of what goes to the joiner
//! itself as well, which the joiner has to bear. Until a lesson has come the joiner's operator keeps its blocks. A
//! lesson counts for no frontier: what an operator may not do without it, it does with the capability of a block that waits.
//!
//! A dataflow with lessons does not end while somebody joins or is to be taught, nor at a joiner before its lessons have come: all inputs may close in
//! between. Where it had ended before the joiner was let in there is nothing to learn, and the joiner is told so, by its snapshot or in place of a lesson.
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

/// The joiners that an operator of this worker is to teach, and whether it has to learn itself.
pub(crate) struct Pupils {
    waiting: RefCell<Vec<usize>>,
    due: Cell<bool>,
    activator: Activator,
    /// Tells a joiner that there is nothing to learn.
    dismiss: Box<dyn Fn(usize)>,
}

impl Pupils {
    pub(crate) fn come(&self, pupil: usize) {
        self.waiting.borrow_mut().push(pupil);
        self.activator.activate();
    }

    /// The dataflow had ended here before the pupil was let in.
    pub(crate) fn dismiss(&self, pupil: usize) {
        (self.dismiss)(pupil);
    }

    /// Has the operator, and its dataflow, look again.
    pub(crate) fn activate(&self) {
        self.activator.activate();
    }

    /// Whether the operator has to learn.
    pub(crate) fn is_due(&self) -> bool {
        self.due.get()
    }

    /// There is nothing to learn.
    pub(crate) fn graduate(&self) {
        if self.due.replace(false) {
            self.activator.activate();
        }
    }

    /// Nobody will be taught any more.
    pub(crate) fn forget(&self) {
        self.waiting.take();
    }

    /// Whether nobody waits to be taught.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.borrow().is_empty()
    }
}

/// Where a lesson arrives.
struct Desk<X> {
    came: RefCell<Option<X>>,
    pupils: Rc<Pupils>,
    core: std::rc::Weak<Core>,
}

impl<X: DeserializeOwned + 'static> Sink for Desk<X> {
    fn accept(&self, from: usize, payload: Payload) -> Result<(), Error> {
        let lesson = match payload {
            Payload::Typed(boxed) => boxed.downcast::<Option<X>>().ok().map(|lesson| *lesson),
            Payload::Bytes(bytes) => decode_serde(&bytes).ok(),
            _ => None,
        };
        match lesson {
            Some(None) => {
                self.pupils.graduate();
                return Ok(());
            }
            Some(lesson) => {
                *self.came.borrow_mut() = lesson;
                self.pupils.activate();
                return Ok(());
            }
            None => {}
        }
        let worker = self.core.upgrade().map_or(0, |core| core.index());
        let detail = format!("a lesson here is {}, and something else came", std::any::type_name::<X>());
        Err(Error::GraphMismatch { worker, peer: from, detail })
    }
}

/// See the module. One that [`OperatorBuilder::lesson`](crate::OperatorBuilder::lesson) made.
pub struct Lesson<X> {
    school: Option<School<X>>,
}

struct School<X> {
    core: Rc<Core>,
    channel: u64,
    pupils: Rc<Pupils>,
    desk: Rc<Desk<X>>,
}

impl<X: Serialize + DeserializeOwned + Send + 'static> Lesson<X> {
    pub(crate) fn open(core: &Rc<Core>, activator: &Activator) -> Self {
        let Some(membership) = core.membership() else { return Lesson { school: None } };
        let mut school = None;
        let channel = core.open_channel(|channel| {
            let weak = Rc::downgrade(core);
            let dismiss = Box::new(move |pupil| {
                if let Some(core) = weak.upgrade() {
                    send::<X>(&core, channel, pupil, None);
                }
            });
            let (waiting, due) = (RefCell::default(), Cell::new(membership.joins()));
            let pupils = Rc::new(Pupils { waiting, due, activator: activator.clone(), dismiss });
            let (came, core) = (RefCell::default(), Rc::downgrade(core));
            let desk = Rc::new(Desk { came, pupils: pupils.clone(), core });
            school = Some((pupils, desk.clone()));
            desk
        });
        let school = school.map(|(pupils, desk)| {
            membership.open_school(core.building(), pupils.clone());
            School { core: core.clone(), channel, pupils, desk }
        });
        Lesson { school }
    }

    /// Whether this operator has to learn before it decides anything.
    #[inline]
    pub fn is_due(&self) -> bool {
        self.school.as_ref().is_some_and(|school| school.pupils.is_due())
    }

    /// What came, once.
    pub fn learn(&self) -> Option<X> {
        let school = self.school.as_ref()?;
        let came = school.desk.came.take();
        if came.is_some() {
            school.pupils.due.set(false);
        }
        came
    }

    /// Whether this operator is to teach somebody, now or when all has come that was sent before. What comes meanwhile may have been sent to that one as
    /// well, and it is taught what this operator holds then: an operator that lets go of what it has read waits with it.
    pub fn is_awaited(&self) -> bool {
        let expects = |school: &School<X>| school.core.membership().is_some_and(|membership| membership.has_pupils());
        self.school.as_ref().is_some_and(|school| expects(school) || !school.pupils.is_empty())
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
            send(&school.core, school.channel, pupil, Some(lesson));
        }
    }
}

fn send<X: Serialize + Send + 'static>(core: &Core, channel: u64, pupil: usize, lesson: Option<X>) {
    let payload = if core.is_local(pupil) {
        Payload::Typed(Box::new(lesson))
    } else {
        let mut bytes = Vec::new();
        encode_serde(&lesson, &mut bytes);
        Payload::Bytes(bytes)
    };
    core.send(pupil, channel, payload);
}

impl<X> std::fmt::Debug for Lesson<X> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lesson").field("due", &self.school.as_ref().map(|school| school.pupils.is_due())).finish()
    }
}
