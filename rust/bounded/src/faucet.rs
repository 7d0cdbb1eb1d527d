//! The wrapper: enter, batcher, body, probe, leave.

use std::fmt::Debug;

use penstock_dataflow::{Activator, BoxError, Scope, Stream};
use penstock_progress::probe::ProbeHandle;
use penstock_progress::timestamp::{Refines, Timestamp};

use crate::batch::{BatchTime, Batched};
use crate::batcher::{Event, Observer, Parts, batcher};
use crate::bounds::Bounds;
use crate::error::OnFailure;
use crate::expand::{Each, EachOr, Expand, Itself};
use crate::monitor::Monitor;

/// The end of a bounded scope: what its body gives back is probed, and leaves.
pub struct Gate<O: Timestamp, I: Timestamp> {
    outer: Scope<O>,
    probe: ProbeHandle<I>,
    wake: Activator,
}

/// What a body may give back: a stream, or several. A batch is finished when nothing of it can come out of any of them; what
/// leads to none of them is not waited for.
pub trait Egress<O: Timestamp, I: Refines<O>> {
    /// The same in the scope around.
    type Outside;
    /// Leaves the scope.
    fn leave(self, gate: &mut Gate<O, I>) -> Self::Outside;
}

impl<O: Timestamp, I: Refines<O>, D: 'static> Egress<O, I> for Stream<I, D> {
    type Outside = Stream<O, D>;
    fn leave(self, gate: &mut Gate<O, I>) -> Stream<O, D> {
        let probed = self.probe_waking(&mut gate.probe, gate.wake.clone());
        Stream::leave(&probed, &gate.outer)
    }
}

macro_rules! several {
    ($($name:ident),*) => {
        impl<O: Timestamp, I: Refines<O>, $($name: Egress<O, I>),*> Egress<O, I> for ($($name,)*) {
            type Outside = ($($name::Outside,)*);
            #[allow(non_snake_case)]
            fn leave(self, gate: &mut Gate<O, I>) -> Self::Outside {
                let ($($name,)*) = self;
                ($($name.leave(gate),)*)
            }
        }
    };
}

several!(A, B);
several!(A, B, C);
several!(A, B, C, D);

/// A bounded scope that is being set up: its bounds, name and instruments. `I`: its times; `B`: the blocks that its body gets.
///
/// [`BoundedStream`] is the short way for what most programs need.
pub struct Faucet<I, B> {
    bounds: Bounds,
    name: String,
    on_failure: OnFailure,
    observer: Option<Observer<I, B>>,
}

impl<I, B> Faucet<I, B> {
    /// With these bounds.
    pub fn new(bounds: Bounds) -> Self {
        Faucet { bounds, name: "bounded".to_string(), on_failure: OnFailure::Stop, observer: None }
    }

    /// The name of the scope. Default: `bounded`.
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// What happens when an expansion fails. Default: all workers stop.
    pub fn on_failure(mut self, on_failure: OnFailure) -> Self {
        self.on_failure = on_failure;
        self
    }

    /// Shows every admission and every finished batch on this worker, in order.
    pub fn observed(mut self, observer: impl FnMut(Event<'_, I, B>) + 'static) -> Self {
        self.observer = Some(Box::new(observer));
        self
    }

    /// Opens the scope: its inside, the stream of batches, and the gate through which what is made of them must leave. For
    /// builders that cannot be one closure, and for blocks of other kinds than lists. A gate through which nothing leaves
    /// opens the window for N batches and never again.
    pub fn open<O, D, P>(self, stream: &Stream<O, D>, expand: P) -> (Scope<I>, Stream<I, B>, Gate<O, I>, Monitor)
    where
        O: Timestamp,
        I: BatchTime<O>,
        D: 'static,
        P: Expand<D, Block = B> + 'static,
    {
        let Faucet { bounds, name, on_failure, observer } = self;
        let outer = stream.scope().clone();
        let inner = outer.nested(&name, |inner: &mut Scope<I>| inner.clone());
        let entered = stream.enter(&inner);
        let built = batcher::<O, I, D, P>(&inner, &entered, &bounds, Parts { expand, on_failure, observer });
        let gate = Gate { outer, probe: built.probe, wake: built.wake };
        (inner, built.stream, gate, Monitor::new(built.shared))
    }

    fn build<O, D, P, R>(
        self,
        stream: &Stream<O, D>,
        expand: P,
        body: impl FnOnce(&mut Scope<I>, Stream<I, B>) -> R,
    ) -> (R::Outside, Monitor)
    where
        O: Timestamp,
        I: BatchTime<O>,
        D: 'static,
        P: Expand<D, Block = B> + 'static,
        R: Egress<O, I>,
    {
        let (mut inner, batches, mut gate, monitor) = self.open(stream, expand);
        let outcome = body(&mut inner, batches);
        (outcome.leave(&mut gate), monitor)
    }
}

impl<I, Y: Clone + 'static> Faucet<I, Vec<Y>> {
    /// Builds the scope around `body`, which gets the inputs in batches.
    pub fn around<O, R>(
        self,
        stream: &Stream<O, Vec<Y>>,
        body: impl FnOnce(&mut Scope<I>, Stream<I, Vec<Y>>) -> R,
    ) -> (R::Outside, Monitor)
    where
        O: Timestamp,
        I: BatchTime<O>,
        R: Egress<O, I>,
    {
        self.build(stream, Itself, body)
    }

    /// Builds the scope around `body`, which gets what `expand` makes of each input. Its iterator is drawn from only as the
    /// window allows, and dropped when it ends.
    pub fn expanding<O, X, L, R>(
        self,
        stream: &Stream<O, Vec<X>>,
        expand: impl FnMut(X) -> L + 'static,
        body: impl FnOnce(&mut Scope<I>, Stream<I, Vec<Y>>) -> R,
    ) -> (R::Outside, Monitor)
    where
        O: Timestamp,
        I: BatchTime<O>,
        X: 'static,
        L: Iterator<Item = Y> + 'static,
        R: Egress<O, I>,
    {
        self.build(stream, Each(expand), body)
    }

    /// As [`Faucet::expanding`] where an item may be an error, or the iterator may panic: see [`Faucet::on_failure`].
    pub fn trying<O, X, L, E, R>(
        self,
        stream: &Stream<O, Vec<X>>,
        expand: impl FnMut(X) -> L + 'static,
        body: impl FnOnce(&mut Scope<I>, Stream<I, Vec<Y>>) -> R,
    ) -> (R::Outside, Monitor)
    where
        O: Timestamp,
        I: BatchTime<O>,
        X: Clone + Debug + 'static,
        L: Iterator<Item = Result<Y, E>> + 'static,
        E: Into<BoxError> + 'static,
        R: Egress<O, I>,
    {
        self.build(stream, EachOr(expand), body)
    }
}

impl<I, B> Debug for Faucet<I, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Faucet").field("name", &self.name).field("bounds", &self.bounds).finish()
    }
}

/// Bounded scopes, on the stream that enters them.
pub trait BoundedStream<T: Timestamp, X: 'static> {
    /// `body` with at most so many batches of this stream in it as `bounds` allow; the rest waits before it.
    fn bounded<R>(
        &self,
        bounds: Bounds,
        body: impl FnOnce(&mut Scope<Batched<T>>, Stream<Batched<T>, Vec<X>>) -> R,
    ) -> (R::Outside, Monitor)
    where
        X: Clone,
        R: Egress<T, Batched<T>>;

    /// As [`BoundedStream::bounded`], for the items that `expand` makes of each input, lazily.
    fn bounded_flat_map<Y, L, R>(
        &self,
        bounds: Bounds,
        expand: impl FnMut(X) -> L + 'static,
        body: impl FnOnce(&mut Scope<Batched<T>>, Stream<Batched<T>, Vec<Y>>) -> R,
    ) -> (R::Outside, Monitor)
    where
        Y: Clone + 'static,
        L: Iterator<Item = Y> + 'static,
        R: Egress<T, Batched<T>>;
}

impl<T: Timestamp, X: 'static> BoundedStream<T, X> for Stream<T, Vec<X>> {
    fn bounded<R>(
        &self,
        bounds: Bounds,
        body: impl FnOnce(&mut Scope<Batched<T>>, Stream<Batched<T>, Vec<X>>) -> R,
    ) -> (R::Outside, Monitor)
    where
        X: Clone,
        R: Egress<T, Batched<T>>,
    {
        Faucet::new(bounds).around(self, body)
    }

    fn bounded_flat_map<Y, L, R>(
        &self,
        bounds: Bounds,
        expand: impl FnMut(X) -> L + 'static,
        body: impl FnOnce(&mut Scope<Batched<T>>, Stream<Batched<T>, Vec<Y>>) -> R,
    ) -> (R::Outside, Monitor)
    where
        Y: Clone + 'static,
        L: Iterator<Item = Y> + 'static,
        R: Egress<T, Batched<T>>,
    {
        Faucet::new(bounds).expanding(self, expand, body)
    }
}
