//! A worker: one thread with its copy of every dataflow.
//!
//! A step never blocks: it empties the mailbox into the channels, lets each dataflow with something to do apply progress and run its
//! activated operators, and shares what that changed. It does not look at the others, however many there are. A worker without work parks until a message, a timeout or a [`Waker`] ends the park.
//!
//! An error from an operator, a panic, or a failure of the fabric stops the worker and all its peers: `step` returns the error
//! from then on, the same one at all of them, and all dataflows, with their capabilities, are dropped. Only that report may take a
//! moment: when processes fail at the same time they agree on one cause.

use std::cell::{Cell, RefCell};
use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use penstock_progress::timestamp::Timestamp;

use crate::activate::{Agenda, Mark};
use crate::core::Core;
use crate::dataflow::{Caster, Dataflow};
use crate::error::{BoxError, Error, MemberFault, panic_message};
use crate::fabric::{Door, Endpoint, JoinError, Waker, joinable};
use crate::membership::Stage;
use crate::patience::Patience;
use crate::region::{Family, Region};
use crate::scope::Scope;

/// See the module.
pub struct Worker {
    core: Rc<Core>,
    /// By number.
    dataflows: Vec<Dataflow>,
    agenda: Rc<Agenda>,
    built: u64,
    /// Turns of dataflows in steps.
    turns: u64,
    /// How many workers had left when the dataflows were last checked for what those had not built.
    known_left: Option<usize>,
    /// Steps of a leaver for which nothing can come any more.
    lingered: u32,
    /// Looks into the mailbox before the next park.
    looks: Cell<u32>,
    most_looks: u32,
    /// Of [`Worker::step_until`].
    patience: Patience,
}

/// At most so many looks before a park, a few microseconds in all: about what a wake-up costs.
const MOST_LOOKS: u32 = 128;
const LEAST_LOOKS: u32 = 4;
/// How often [`Worker::step_until`] looks between two readings of the clock.
const LOOKS_PER_CLOCK: u32 = 16;
/// Steps that a leaver takes for what its operators still read, once nothing can come for them any more. Some have something to do in every step.
const LINGERS: u32 = 1_000;
/// How often a joiner looks at the clock, and who lets it in.
const JOIN_TICK: Duration = Duration::from_millis(100);

impl Worker {
    /// A worker on this seat. Stays on the thread that makes it.
    pub fn new(endpoint: Endpoint) -> Self {
        let alone = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1);
        let most_looks = if alone { 0 } else { MOST_LOOKS };
        let core = Rc::new(Core::new(endpoint));
        Worker {
            core,
            dataflows: Vec::new(),
            agenda: Rc::default(),
            built: 0,
            turns: 0,
            known_left: None,
            lingered: 0,
            looks: Cell::new(most_looks),
            most_looks,
            patience: Patience::new(),
        }
    }

    /// Index of this worker among all workers.
    pub fn index(&self) -> usize {
        self.core.index()
    }

    /// How many workers there are now. Ask each time: in a joinable fabric it changes with [`Worker::bootstrap`] and between steps.
    pub fn peers(&self) -> usize {
        self.core.peers()
    }

    /// The place of this worker among those that blocks are routed to, from 0 on: its index, as long as nobody has left. None
    /// for one that joins or leaves.
    pub fn rank(&self) -> Option<usize> {
        Some(self.core.rank()).filter(|rank| *rank != usize::MAX)
    }

    /// Whether blocks are routed to the worker of this index.
    pub fn has_member(&self, index: usize) -> bool {
        self.core.target(index, true).is_some()
    }

    /// The indices of those that blocks are routed to, by rank.
    pub fn members(&self) -> Vec<u32> {
        (0..self.peers()).filter_map(|rank| self.core.target(rank, false)).map(|index| index as u32).collect()
    }

    /// Whether workers may join and leave while it runs.
    pub fn is_joinable(&self) -> bool {
        self.core.membership().is_some()
    }

    /// How many dataflows are not finished.
    pub fn dataflows(&self) -> usize {
        self.dataflows.len()
    }

    /// How many times are counted now, at how many places, in the dataflows that are not finished: what progress keeps, and what a
    /// snapshot for a joiner has. It follows what is alive, not how long the run has been. Cost: a look at each.
    pub fn live_counts(&self) -> usize {
        self.dataflows.iter().map(Dataflow::live_counts).sum()
    }

    /// How often a step has looked at a dataflow, since this worker was made: one that has nothing to do adds nothing.
    pub fn turns(&self) -> u64 {
        self.turns
    }

    /// Builds a dataflow. All workers build the same dataflows in the same order.
    ///
    /// A graph that cannot run, such as one with a loop that does not advance time, is reported by the next [`Worker::step`].
    /// A panic of `build` stops all workers and goes on to the caller.
    pub fn dataflow<T: Timestamp, R>(&mut self, name: &str, build: impl FnOnce(&mut Scope<T>) -> R) -> R {
        let building = self.open(name);
        match catch_unwind(AssertUnwindSafe(|| build(&mut building.scope()))) {
            Ok(result) => {
                self.start(building);
                result
            }
            Err(panic) => {
                let name = self.core.take_origin().unwrap_or_else(|| name.to_string());
                self.core.fail(Error::Panic { name, worker: self.index(), message: panic_message(&*panic) });
                drop(building);
                // The peers learn of it now: the caller may never step again.
                self.core.spread();
                resume_unwind(panic);
            }
        }
    }

    /// Begins a dataflow, for builders that cannot be one closure; [`Worker::start`] ends it. At most one is open at a time.
    /// One that is dropped instead leaves this worker without a dataflow that its peers have: it must be aborted.
    pub fn open<T: Timestamp>(&mut self, name: &str) -> Building<T> {
        if self.core.membership().is_some_and(|membership| membership.stage() != Stage::Building) {
            let fault = MemberFault::BuiltLate(name.to_string());
            self.core.fail(Error::Member { worker: self.index(), fault });
        }
        let mark = Rc::new(Mark::new(self.agenda.clone()));
        let caster = Caster::open(self.core.clone(), mark.clone(), self.built);
        let family =
            Rc::new(Family { name: name.to_string(), regions: RefCell::new(Vec::new()), mark, alive: Cell::new(true) });
        let root = Region::new(self.core.clone(), family, name.to_string(), None);
        Building { caster: Some(caster), root }
    }

    /// Starts a dataflow that [`Worker::open`] began; what is wrong with its graph is in [`Worker::failure`] and the next step.
    pub fn start<T: Timestamp>(&mut self, mut building: Building<T>) {
        let Some(caster) = building.caster.take() else { return };
        self.built += 1;
        match Dataflow::start(caster, building.root.clone()) {
            Ok(dataflow) => {
                self.core.endpoint().dataflow_opened();
                self.dataflows.push(dataflow);
                self.known_left = None;
            }
            Err(error) => self.core.fail(error),
        }
    }

    /// Takes its place among the workers of a joinable fabric, once all dataflows are built and before anything is stepped. At a founder
    /// nothing happens: false. A worker that joins waits until it has all progress and is routed to, and then holds, at each of its
    /// inputs, what one of its peers held there: true. Where workers are fixed it says false, so one program serves both.
    ///
    /// # Errors
    /// Why it does not join ([`MemberFault`]; [`Error::GraphMismatch`] when it built other dataflows than its peers), which its
    /// peers hear nothing of, or why the run ended.
    pub fn bootstrap(&mut self) -> Result<bool, Error> {
        loop {
            if let Some(joined) = self.try_bootstrap()? {
                return Ok(joined);
            }
            self.core.park(Some(JOIN_TICK));
        }
    }

    /// As [`Worker::bootstrap`], but does only what can be done now: none when there is more to wait for.
    ///
    /// # Errors
    /// As [`Worker::bootstrap`].
    pub fn try_bootstrap(&mut self) -> Result<Option<bool>, Error> {
        self.core.check()?;
        let Some(membership) = self.core.membership() else { return Ok(Some(false)) };
        if !membership.joins() {
            if membership.stage() == Stage::Building {
                membership.set_stage(Stage::Seated);
            }
            return Ok(Some(false));
        }
        if membership.stage() == Stage::Building {
            membership.set_stage(Stage::Joining);
        }
        if membership.stage() == Stage::Joining {
            self.core.deliver();
            self.core.attend();
            if membership.stage() == Stage::Joining && !self.core.is_stopped() && self.core.endpoint().is_over() {
                self.core.fail(Error::Member { worker: self.index(), fault: MemberFault::Over });
            }
        }
        if let Err(error) = self.core.check() {
            self.discard();
            return Err(error);
        }
        let seated = self.core.membership().is_some_and(|membership| membership.stage() != Stage::Joining);
        Ok(seated.then_some(true))
    }

    /// Leaves the run: works off what has come, hands over what its inputs hold to the worker that leads, and says goodbye. Its dataflows are
    /// gone then, and the others go on. Every worker may leave, the founders and the first one too. Returns when it has left,
    /// or when all dataflows are finished before. The last one cannot leave: where several leave at the same time, the one that would be
    /// the last is told so as soon as all others are leaving, and takes part as before.
    ///
    /// Blocks are not routed to it from the moment on at which all have heard of it. State that its operators keep goes with
    /// it: move it before. An operator that holds a capability for longer than it has work keeps it from leaving.
    ///
    /// # Errors
    /// [`Error::Member`] when it cannot leave ([`MemberFault::Alone`] when it would be the last one); nothing changes. Else as [`Worker::step`].
    pub fn leave(&mut self) -> Result<(), Error> {
        self.start_leaving()?;
        while self.is_leaving()? && self.step_or_park(None)? {}
        Ok(())
    }

    /// As [`Worker::leave`], but the steps that follow do it, while [`Worker::is_leaving`].
    ///
    /// # Errors
    /// [`Error::Member`] when it cannot leave; nothing changes.
    pub fn start_leaving(&mut self) -> Result<(), Error> {
        let refuse = |fault| Err(Error::Member { worker: self.index(), fault });
        self.core.check()?;
        let Some(membership) = self.core.membership() else { return refuse(MemberFault::Fixed) };
        match membership.stage() {
            Stage::Seated if self.peers() == 1 => refuse(MemberFault::Alone),
            Stage::Seated => {
                membership.set_stage(Stage::Leaving);
                self.core.tend(|member, books| member.leave(books));
                self.core.check()
            }
            Stage::Leaving | Stage::Draining | Stage::Drained | Stage::Gone => Ok(()),
            Stage::Building | Stage::Joining => refuse(MemberFault::NotSeated),
        }
    }

    /// Whether what [`Worker::start_leaving`] began goes on; false when it has left.
    ///
    /// # Errors
    /// [`Error::Member`] with [`MemberFault::Alone`] when it is the last one, and so takes part as if it had not asked.
    pub fn is_leaving(&self) -> Result<bool, Error> {
        match self.stage() {
            Some(Stage::Leaving | Stage::Draining | Stage::Drained) => Ok(true),
            Some(Stage::Seated) => Err(Error::Member { worker: self.index(), fault: MemberFault::Alone }),
            _ => Ok(false),
        }
    }

    /// Whether it has left the run, in which it takes part no more.
    pub fn has_left(&self) -> bool {
        self.stage() == Some(Stage::Gone)
    }

    fn stage(&self) -> Option<Stage> {
        self.core.membership().map(|membership| membership.stage())
    }

    /// The error that the next step would report, if any.
    pub fn failure(&self) -> Option<Error> {
        self.core.check().err()
    }

    /// Does what can be done now, without blocking. True while a dataflow is unfinished.
    ///
    /// # Errors
    /// Why this worker or its fabric stopped; then always the same, and all dataflows are gone.
    pub fn step(&mut self) -> Result<bool, Error> {
        if matches!(self.stage(), Some(Stage::Building | Stage::Joining)) {
            self.core.check()?;
            return Err(Error::Member { worker: self.index(), fault: MemberFault::NotBootstrapped });
        }
        let outcome = match catch_unwind(AssertUnwindSafe(|| self.advance())) {
            Ok(outcome) => outcome,
            // Operators catch their own panics: this one is from code of the user elsewhere, such as decoding.
            Err(panic) => {
                let name = self.core.take_origin().unwrap_or_else(|| "step".to_string());
                Err(Error::Panic { name, worker: self.index(), message: panic_message(&*panic) })
            }
        };
        if let Err(error) = outcome {
            self.core.fail(error);
        } else if !self.core.is_stopped() {
            return Ok(!self.dataflows.is_empty());
        }
        // A peer that left early is why messages to it could not be sent.
        if !self.core.endpoint().is_aborted()
            && let Err(error) = self.dataflows.iter().try_for_each(Dataflow::check_built)
        {
            self.core.fail_rather(error);
        }
        let result = self.core.check();
        self.discard();
        result.map(|()| false)
    }

    fn advance(&mut self) -> Result<(), Error> {
        if self.core.is_stopped() {
            return Ok(());
        }
        self.core.deliver();
        self.core.tell_room();
        if let Some(stage) = self.stage() {
            self.core.attend();
            if self.stage() == Some(Stage::Gone) {
                self.discard();
                return Ok(());
            }
            if stage == Stage::Drained {
                // What its dataflows would do is not for it any more.
                return Ok(());
            }
        }
        let mut done = Vec::new();
        while let Some(number) = self.agenda.next() {
            if self.core.is_stopped() {
                return Ok(());
            }
            // It may have been dropped.
            let Some(dataflow) = find(&self.dataflows, number) else { continue };
            self.turns += 1;
            if dataflow.step()? {
                done.push(number);
            }
        }
        if !self.core.is_stopped() {
            for number in done {
                if let Ok(at) = self.dataflows.binary_search_by_key(&number, Dataflow::number) {
                    drop(self.dataflows.remove(at));
                    self.core.endpoint().dataflow_closed();
                }
            }
        }
        let left = self.core.endpoint().left();
        if self.known_left != Some(left) {
            self.dataflows.iter().try_for_each(Dataflow::check_built)?;
            self.known_left = Some(left);
        }
        if matches!(self.stage(), Some(Stage::Leaving | Stage::Draining)) {
            self.drain();
        }
        Ok(())
    }

    /// Hands over what this leaver still has, once nothing can come for it and all is worked off.
    fn drain(&mut self) {
        let Some(membership) = self.core.membership() else { return };
        if self.core.is_stopped() || !membership.may_drain() {
            return;
        }
        let mut done = false;
        let works = self.dataflows.iter().any(Dataflow::has_work);
        self.lingered = self.lingered.saturating_add(1);
        let retires = membership.stage() == Stage::Leaving && (!works || self.lingered > LINGERS);
        if retires && membership.retire() {
            self.core.tend(|member, books| {
                done = member.bequeath(books)?;
                Ok(())
            });
            if done {
                membership.set_stage(Stage::Draining);
            }
        }
        if membership.stage() == Stage::Draining && !works && membership.is_worked_off() {
            self.core.tend(|member, books| {
                done = member.drained(books)?;
                Ok(())
            });
            // It may be gone already.
            if done && membership.stage() == Stage::Draining {
                membership.set_stage(Stage::Drained);
            }
        }
    }

    /// Parks while there is nothing to do, at most for `timeout` (`None`: without limit), then steps. Does not park when no
    /// dataflow is unfinished. A parked worker uses no CPU. While somebody joins it looks at the clock ten times a second.
    ///
    /// # Errors
    /// As [`Worker::step`].
    pub fn step_or_park(&mut self, timeout: Option<Duration>) -> Result<bool, Error> {
        if !self.dataflows.is_empty() {
            self.rest(timeout);
        }
        self.step()
    }

    /// Steps until `done` holds, looks again for a moment when there is nothing to do, then parks: true; false when `limit` has
    /// passed before (`None`: without limit). `done` is asked first, after every step and after every park, so whoever else makes it
    /// hold wakes this worker ([`Worker::waker`]).
    ///
    /// # Errors
    /// As [`Worker::step`].
    ///
    /// # Examples
    /// ```
    /// use penstock_dataflow::{Worker, fabric};
    ///
    /// let mut worker = Worker::new(fabric::threads(1).remove(0));
    /// let (mut input, probe) = worker.dataflow::<u64, _>("count", |scope| {
    ///     let (input, numbers) = scope.new_input::<u64>();
    ///     (input, numbers.probe().0)
    /// });
    /// input.send(7);
    /// input.advance_to(1)?;
    /// assert!(worker.step_until(None, || !probe.less_than(&1))?);
    /// input.close();
    /// while worker.step()? {}
    /// # Ok::<_, penstock_dataflow::BoxError>(())
    /// ```
    pub fn step_until(&mut self, limit: Option<Duration>, mut done: impl FnMut() -> bool) -> Result<bool, Error> {
        let mut waiting: Option<Instant> = None;
        let (mut looks, mut expired) = (0u32, false);
        loop {
            if done() {
                if let Some(begin) = waiting {
                    self.patience.learn(begin.elapsed());
                }
                return Ok(true);
            }
            if expired {
                return Ok(false);
            }
            if self.has_work() {
                self.step()?;
                // Other dataflows may always have work: with a limit the clock is read after every step.
                expired = limit.is_some_and(|limit| waiting.get_or_insert_with(Instant::now).elapsed() >= limit);
                continue;
            }
            looks = looks.wrapping_add(1);
            if looks % LOOKS_PER_CLOCK != 1 {
                std::hint::spin_loop();
                continue;
            }
            let waited = waiting.get_or_insert_with(Instant::now).elapsed();
            if self.patience.is_over(waited) {
                self.rest(limit.map(|limit| limit.saturating_sub(waited)));
                self.step()?;
            }
            expired = limit.is_some_and(|limit| waited >= limit);
        }
    }

    /// Parks, unless there is something to do.
    fn rest(&self, timeout: Option<Duration>) {
        if !self.has_work() && !self.mail_comes() {
            self.park(timeout);
        }
    }

    /// Looks for mail for a moment: when peers answer at once, parking and waking cost more than that. Looks less the less it
    /// finds, so that an idle worker, or one whose peers share its CPU with others, parks nearly at once.
    fn mail_comes(&self) -> bool {
        let looks = self.looks.get();
        if self.core.membership().is_none() && self.peers() == 1 || looks == 0 {
            return false;
        }
        for _ in 0..looks {
            if self.core.endpoint().has_mail() || self.core.is_stopped() {
                self.looks.set((2 * looks).min(self.most_looks));
                return true;
            }
            std::hint::spin_loop();
        }
        self.looks.set((looks / 2).max(LEAST_LOOKS));
        false
    }

    /// Whether a step would do something now.
    pub fn has_work(&self) -> bool {
        if self.stage() == Some(Stage::Drained) {
            return self.core.is_stopped() || self.core.endpoint().has_mail();
        }
        self.core.is_stopped()
            || self.core.endpoint().has_mail()
            || self.core.has_room_again()
            || self.agenda.any(|number| find(&self.dataflows, number).is_some_and(Dataflow::has_work))
    }

    /// Parks until a message or a [`Waker`] comes, or the time is over, also when there is work. While somebody joins not for long: the lead
    /// withdraws who is late, and nobody else wakes it.
    pub fn park(&self, timeout: Option<Duration>) {
        let watches = self.core.membership().is_some_and(|membership| membership.watches_clock());
        let tick = watches.then_some(JOIN_TICK);
        self.core.park(timeout.into_iter().chain(tick).min());
    }

    /// How long this worker has been parked in all; what is left of its time it was busy.
    pub fn parked(&self) -> Duration {
        self.core.parked()
    }

    /// Whether more data is on its way to some process than [`fabric::Limits::link_bytes`](crate::fabric::Limits). A program should
    /// then send nothing more into its inputs until that has ended, for example by [`Worker::wait_for_room`]; it may advance
    /// and close them. The end of the congestion ends a park of this worker. Cost: a look at one flag per other process that
    /// is there.
    ///
    /// Nothing is refused meanwhile, so a program that does not ask is correct, but unbounded in memory. Data between
    /// threads of one process does not count: a probe bounds that.
    pub fn is_congested(&self) -> bool {
        self.core.endpoint().is_congested()
    }

    /// Steps, and parks in between, until the worker is not congested.
    ///
    /// # Errors
    /// As [`Worker::step`].
    pub fn wait_for_room(&mut self) -> Result<(), Error> {
        let core = self.core.clone();
        self.step_until(None, || !core.endpoint().is_congested()).map(drop)
    }

    /// A handle that ends a park of this worker from any thread.
    pub fn waker(&self) -> Waker {
        self.core.waker()
    }

    /// Stops this worker and all its peers: the next step of each returns this error, or that of who failed before.
    pub fn abort(&self, error: Error) {
        self.core.fail(error);
        self.core.spread();
    }

    /// Drops all dataflows, finished or not, and what still comes for them. Other workers are not told: they do the same, or
    /// are stopped.
    pub fn drop_dataflows(&mut self) {
        self.discard();
    }

    fn discard(&mut self) {
        for dataflow in self.dataflows.drain(..) {
            self.core.endpoint().dataflow_closed();
            drop(dataflow);
        }
    }
}

/// The dataflow with this number.
fn find(dataflows: &[Dataflow], number: u64) -> Option<&Dataflow> {
    dataflows.binary_search_by_key(&number, Dataflow::number).ok().map(|at| &dataflows[at])
}

/// A dataflow that is being built: see [`Worker::open`].
pub struct Building<T: Timestamp> {
    /// Gone once it is started.
    caster: Option<Caster>,
    root: Rc<Region<T>>,
}

impl<T: Timestamp> Building<T> {
    /// Its outermost scope.
    pub fn scope(&self) -> Scope<T> {
        Scope::new(self.root.clone())
    }
}

impl<T: Timestamp> Drop for Building<T> {
    fn drop(&mut self) {
        if let Some(caster) = self.caster.take() {
            caster.abandon(&self.root.family);
        }
    }
}

impl<T: Timestamp> std::fmt::Debug for Building<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Building").field("path", &self.root.path).finish()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // A joiner is waited for also before it has built anything.
        let outside = self.core.membership().is_some_and(|membership| membership.is_outside());
        if (!self.dataflows.is_empty() || outside) && !self.core.is_stopped() {
            let what = if outside { "before it took part" } else { "with unfinished dataflows" };
            self.abort(Error::Aborted { worker: self.index(), reason: format!("the worker was dropped {what}") });
        }
        self.discard();
        // Also what surfaced in no step any more, such as a panic in the drop of an operator.
        self.core.spread();
        if !self.core.endpoint().is_aborted() {
            if matches!(self.stage(), Some(Stage::Seated | Stage::Leaving | Stage::Draining)) {
                self.core.endpoint().finish();
            }
            if !self.core.membership().is_some_and(|membership| membership.is_outside()) {
                self.core.endpoint().leave(self.built);
            }
        }
    }
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("index", &self.index()).field("dataflows", &self.dataflows.len()).finish()
    }
}

/// Runs a program on each seat, in a thread of its own: builds, feeds, and at last steps until all dataflows are finished.
///
/// An error of the program, or a panic in it, stops all workers of the fabric. A program that returns the [`Error`] of a step
/// passes it on unchanged; so does one whose error has it among its causes.
///
/// # Panics
/// When the system refuses a thread.
pub fn execute<R, E, F>(endpoints: Vec<Endpoint>, program: F) -> Vec<JoinHandle<Result<R, Error>>>
where
    R: Send + 'static,
    E: Into<BoxError>,
    F: Fn(&mut Worker) -> Result<R, E> + Send + Sync + 'static,
{
    let program = Arc::new(program);
    let start = |endpoint: Endpoint| {
        let program = program.clone();
        std::thread::Builder::new()
            .name(format!("penstock-worker-{}", endpoint.index()))
            .spawn(move || drive(Worker::new(endpoint), &*program))
            .expect("the system grants a thread per worker")
    };
    endpoints.into_iter().map(start).collect()
}

/// A program on threads that others may join while it runs: what [`execute_joinable`] returns. Dropped, it lets the threads go on.
pub struct Joinable<R> {
    door: Door,
    start: Box<dyn Fn(Endpoint) -> JoinHandle<Result<R, Error>> + Send + Sync>,
    threads: Vec<(usize, JoinHandle<Result<R, Error>>)>,
}

impl<R> Joinable<R> {
    /// Lets so many workers more join, each in a thread of its own with the same program, and returns their indices. They are routed to
    /// when their `bootstrap` returns.
    ///
    /// # Errors
    /// [`JoinError`]: why nobody joins.
    ///
    /// # Panics
    /// When the system refuses a thread.
    pub fn join(&mut self, count: usize) -> Result<Vec<usize>, JoinError> {
        let seats = self.door.ask(count)?.seats()?;
        let indices = seats.iter().map(Endpoint::index).collect();
        for seat in seats {
            self.threads.push((seat.index(), (self.start)(seat)));
        }
        Ok(indices)
    }

    /// Waits for the end of all programs: what each worker returned, by index. Of one that did not join in time that is an error of its own.
    pub fn finish(self) -> Vec<(usize, Result<R, Error>)> {
        let wait = |(index, thread): (usize, JoinHandle<Result<R, Error>>)| match thread.join() {
            Ok(result) => (index, result),
            Err(panic) => resume_unwind(panic),
        };
        self.threads.into_iter().map(wait).collect()
    }
}

impl<R> std::fmt::Debug for Joinable<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Joinable").field("threads", &self.threads.len()).finish()
    }
}

/// As [`execute`], for a program that workers may join and leave while it runs. The program builds its dataflows, calls [`Worker::bootstrap`],
/// and goes on from what that says.
///
/// # Panics
/// When `workers` is 0, or the system refuses a thread.
///
/// # Examples
/// ```
/// use penstock_dataflow::{BoxError, Worker, execute_joinable};
///
/// let mut run = execute_joinable(1, |worker: &mut Worker| {
///     let (mut input, probe) = worker.dataflow::<u64, _>("count", |scope| {
///         let (input, numbers) = scope.new_input::<Vec<u64>>();
///         (input, numbers.exchange_by(|number| *number).probe().0)
///     });
///     let joined = worker.bootstrap()?;
///     // Nobody can pass a time at which the other still stands.
///     worker.step_until(None, || joined || probe.less_than(&1))?;
///     while worker.peers() < 2 {
///         worker.step_or_park(None)?;
///     }
///     input.send(vec![7, 8]);
///     input.advance_to(1)?;
///     Ok::<_, BoxError>(joined)
/// });
/// assert_eq!(run.join(1)?, [1]);
/// let joined: Vec<bool> = run.finish().into_iter().map(|(_, result)| result.unwrap()).collect();
/// assert_eq!(joined, [false, true]);
/// # Ok::<(), BoxError>(())
/// ```
pub fn execute_joinable<R, E, F>(workers: usize, program: F) -> Joinable<R>
where
    R: Send + 'static,
    E: Into<BoxError>,
    F: Fn(&mut Worker) -> Result<R, E> + Send + Sync + 'static,
{
    let program = Arc::new(program);
    let start = move |seat: Endpoint| {
        let program = program.clone();
        std::thread::Builder::new()
            .name(format!("penstock-worker-{}", seat.index()))
            .spawn(move || drive(Worker::new(seat), &*program))
            .expect("the system grants a thread per worker")
    };
    let (seats, door) = joinable(workers);
    let threads = seats.into_iter().map(|seat| (seat.index(), start(seat))).collect();
    Joinable { door, start: Box::new(start), threads }
}

fn drive<R, E: Into<BoxError>>(mut worker: Worker, program: &dyn Fn(&mut Worker) -> Result<R, E>) -> Result<R, Error> {
    let index = worker.index();
    let outcome = match catch_unwind(AssertUnwindSafe(|| program(&mut worker).map_err(Into::into))) {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(cause)) => Err(match passed_on(&*cause) {
            Some(error) => error.clone(),
            None => Error::Program { worker: index, source: Arc::from(cause) },
        }),
        Err(panic) => {
            let name = worker.core.take_origin().unwrap_or_else(|| "program".to_string());
            Err(Error::Panic { name, worker: index, message: panic_message(&*panic) })
        }
    };
    match outcome {
        Ok(result) => {
            while worker.step_or_park(None)? {}
            // A panic in the drop of an operator that has finished counts as well.
            worker.core.check().map(|()| result)
        }
        Err(error) => {
            // If another one failed before, or a panic while a dataflow was built is known already, all report that.
            worker.abort(error.clone());
            Err(worker.failure().unwrap_or(error))
        }
    }
}

/// The first [`Error`] of a step in a chain of causes.
fn passed_on<'a>(error: &'a (dyn StdError + Send + Sync + 'static)) -> Option<&'a Error> {
    let mut next: Option<&(dyn StdError + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        next = error.source();
    }
    None
}
