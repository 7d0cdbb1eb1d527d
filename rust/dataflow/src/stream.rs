//! Streams, and the operators that most programs need.

use std::rc::Rc;

use penstock_progress::antichain::Antichain;
use penstock_progress::probe::ProbeHandle;
use penstock_progress::reachability::{Source, Target};
use penstock_progress::timestamp::{Refines, Timestamp};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::activate::Activator;
use crate::channel::{Exchange, Pact, Pipeline, Push, SharedTee, Tee, Translate};
use crate::error::{BoxError, LoopEnd};
use crate::operator::{Frontiers, Input, OperatorBuilder, Output};
use crate::region::{Body, FEEDBACK};
use crate::scope::Scope;
use crate::wire::Wire;

use penstock_progress::capability::Capability;

/// The blocks that one output sends, on this worker. Clones are the same stream.
pub struct Stream<T: Timestamp, D> {
    pub(crate) source: Source,
    pub(crate) tee: SharedTee<T, D>,
    pub(crate) scope: Scope<T>,
}

impl<T: Timestamp, D> Clone for Stream<T, D> {
    fn clone(&self) -> Self {
        Stream { source: self.source, tee: self.tee.clone(), scope: self.scope.clone() }
    }
}

impl<T: Timestamp, D> std::fmt::Debug for Stream<T, D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("scope", &self.scope.path()).field("source", &self.source).finish()
    }
}

impl<T: Timestamp, D: 'static> Stream<T, D> {
    pub(crate) fn new(source: Source, tee: SharedTee<T, D>, scope: Scope<T>) -> Self {
        Stream { source, tee, scope }
    }

    /// The scope that this stream is in.
    pub fn scope(&self) -> &Scope<T> {
        &self.scope
    }

    pub(crate) fn attach(&self, edge: Box<dyn Push<T, D>>) {
        if !self.tee.borrow_mut().add(edge) {
            self.scope
                .region
                .refuse(format!("a second reader of blocks that cannot be cloned, from {:?}", self.source));
        }
    }

    /// An operator with this input and one output. The constructor gets the capability of the output at the minimum time.
    pub fn unary<E, L>(
        &self,
        pact: impl Pact<T, D>,
        name: &str,
        constructor: impl FnOnce(Capability<T>) -> L,
    ) -> Stream<T, E>
    where
        E: Clone + 'static,
        L: FnMut(&mut Input<T, D>, &mut Output<T, E>, &Frontiers<'_, T>) -> Result<(), BoxError> + 'static,
    {
        let mut builder = OperatorBuilder::new(&self.scope, name);
        let mut input = builder.input(self, pact);
        let (mut output, stream) = builder.output();
        builder.build(|mut capabilities| {
            let mut logic = constructor(capabilities.remove(0));
            move |frontiers| logic(&mut input, &mut output, frontiers)
        });
        stream
    }

    /// An operator with this and another input, and one output.
    pub fn binary<D2, E, L>(
        &self,
        other: &Stream<T, D2>,
        pact: impl Pact<T, D>,
        other_pact: impl Pact<T, D2>,
        name: &str,
        constructor: impl FnOnce(Capability<T>) -> L,
    ) -> Stream<T, E>
    where
        D2: 'static,
        E: Clone + 'static,
        L: FnMut(&mut Input<T, D>, &mut Input<T, D2>, &mut Output<T, E>, &Frontiers<'_, T>) -> Result<(), BoxError>
            + 'static,
    {
        let mut builder = OperatorBuilder::new(&self.scope, name);
        let mut input = builder.input(self, pact);
        let mut input2 = builder.input(other, other_pact);
        let (mut output, stream) = builder.output();
        builder.build(|mut capabilities| {
            let mut logic = constructor(capabilities.remove(0));
            move |frontiers| logic(&mut input, &mut input2, &mut output, frontiers)
        });
        stream
    }

    /// Reads the stream to its end.
    pub fn sink<L>(&self, pact: impl Pact<T, D>, name: &str, mut logic: L)
    where
        L: FnMut(&mut Input<T, D>, &Frontiers<'_, T>) -> Result<(), BoxError> + 'static,
    {
        let mut builder = OperatorBuilder::new(&self.scope, name);
        let mut input = builder.input(self, pact);
        builder.build(|_| move |frontiers| logic(&mut input, frontiers));
    }

    /// The same blocks, after `look` has seen them.
    pub fn inspect(&self, mut look: impl FnMut(&T, &D) + 'static) -> Stream<T, D> {
        self.pass("inspect", Pipeline, move |time, block| {
            look(time, &block);
            block
        })
    }

    /// The same blocks on the workers that `route` names: see [`Exchange`].
    pub fn exchange(&self, route: impl FnMut(&T, D, &mut dyn FnMut(usize, D)) + 'static) -> Stream<T, D>
    where
        D: Wire,
    {
        self.pass("exchange", Exchange::new(route), |_, block| block)
    }

    fn pass(&self, name: &str, pact: impl Pact<T, D>, mut each: impl FnMut(&T, D) -> D + 'static) -> Stream<T, D> {
        let mut builder = OperatorBuilder::new(&self.scope, name);
        builder.notify(false);
        let mut input = builder.input(self, pact);
        let (mut output, stream) = builder.output_of(self.tee.borrow().duplicate());
        builder.build(|_| {
            move |_| {
                while let Some((capability, block)) = input.next() {
                    let block = each(capability.time(), block);
                    output.session(&capability).give(block);
                }
                Ok(())
            }
        });
        stream
    }

    /// Each block through a function.
    pub fn map_blocks<E: Clone + 'static>(&self, mut map: impl FnMut(D) -> E + 'static) -> Stream<T, E> {
        let mut builder = OperatorBuilder::new(&self.scope, "map");
        builder.notify(false);
        let mut input = builder.input(self, Pipeline);
        let (mut output, stream) = builder.output();
        builder.build(|_| {
            move |_| {
                while let Some((capability, block)) = input.next() {
                    output.session(&capability).give(map(block));
                }
                Ok(())
            }
        });
        stream
    }

    /// The blocks of this and another stream.
    pub fn concat(&self, other: &Stream<T, D>) -> Stream<T, D> {
        let mut builder = OperatorBuilder::new(&self.scope, "concat");
        builder.notify(false);
        let mut inputs = [builder.input(self, Pipeline), builder.input(other, Pipeline)];
        let (mut output, stream) = builder.output_of(self.tee.borrow().duplicate());
        builder.build(|_| {
            move |_| {
                for input in &mut inputs {
                    while let Some((capability, block)) = input.next() {
                        output.session(&capability).give(block);
                    }
                }
                Ok(())
            }
        });
        stream
    }

    /// A view of this stream's frontier, and the stream itself.
    ///
    /// The view holds over all workers: when it has passed a time, no block at that time can come out of this output any
    /// more. It watches the output without an edge for data, so it costs nothing per block.
    pub fn probe(&self) -> (ProbeHandle<T>, Stream<T, D>) {
        let mut handle = ProbeHandle::new();
        let stream = self.probe_with(&mut handle);
        (handle, stream)
    }

    /// As [`Stream::probe`] with an existing handle. A handle that watches several streams shows the times that may
    /// still come out of any of them.
    pub fn probe_with(&self, handle: &mut ProbeHandle<T>) -> Stream<T, D> {
        self.watch(handle, Vec::new())
    }

    /// As [`Stream::probe_with`]; the operator of `wake` runs whenever the frontier moves.
    pub fn probe_waking(&self, handle: &mut ProbeHandle<T>, wake: Activator) -> Stream<T, D> {
        self.watch(handle, vec![wake])
    }

    fn watch(&self, handle: &mut ProbeHandle<T>, wake: Vec<Activator>) -> Stream<T, D> {
        let region = &self.scope.region;
        let node = region.add_node("probe", Body::Probe { handle: handle.clone(), wake });
        region.edges.borrow_mut().push((self.source, Target { node, port: 0 }));
        self.clone()
    }

    /// This stream in a scope nested in its own.
    pub fn enter<I: Refines<T>>(&self, inner: &Scope<I>) -> Stream<I, D> {
        let (outer, region) = (&self.scope.region, &inner.region);
        let port = region.entering.replace(region.entering.get() + 1);
        let tee = Tee::shared(self.tee.borrow().duplicate());
        match region.node_in(outer) {
            Some(node) => {
                outer.edges.borrow_mut().push((self.source, Target { node, port }));
                self.attach(Box::new(Translate { tee: tee.clone(), translate: I::to_inner }));
            }
            None => outer.refuse(format!("scope {:?} is not nested in {:?}", region.path, outer.path)),
        }
        Stream::new(Source { node: 0, port }, tee, inner.clone())
    }

    /// This stream in the scope around its own.
    pub fn leave<O: Timestamp>(&self, outer: &Scope<O>) -> Stream<O, D>
    where
        T: Refines<O>,
    {
        let (region, around) = (&self.scope.region, &outer.region);
        let port = region.leaving.replace(region.leaving.get() + 1);
        let tee = Tee::shared(self.tee.borrow().duplicate());
        region.edges.borrow_mut().push((self.source, Target { node: 0, port }));
        self.attach(Box::new(Translate { tee: tee.clone(), translate: T::to_outer }));
        let node = region.node_in(around).unwrap_or_else(|| {
            region.refuse(format!("scope {:?} is not nested in {:?}", region.path, around.path));
            0
        });
        Stream::new(Source { node, port }, tee, outer.clone())
    }

    /// Feeds a loop that [`Scope::feedback`] opened.
    pub fn connect_loop(&self, feedback: FeedbackHandle<T, D>) {
        feedback.connect(self);
    }
}

impl<T: Timestamp, X: Serialize + DeserializeOwned + Send + Clone + 'static> Stream<T, Vec<X>> {
    /// Sends each element to the worker `hash(element) mod peers`.
    pub fn exchange_by(&self, hash: impl Fn(&X) -> u64 + 'static) -> Stream<T, Vec<X>> {
        let core = Rc::clone(&self.scope.region.core);
        self.exchange(move |_, block: Vec<X>, route| {
            let peers = core.peers();
            if peers == 1 {
                return route(0, block);
            }
            let mut parts: Vec<Vec<X>> = (0..peers).map(|_| Vec::new()).collect();
            for element in block {
                parts[(hash(&element) % peers as u64) as usize].push(element);
            }
            for (worker, part) in parts.into_iter().enumerate().filter(|(_, part)| !part.is_empty()) {
                route(worker, part);
            }
        })
    }
}

/// The open end of a loop: to be connected to a stream of the same scope.
pub struct FeedbackHandle<T: Timestamp, D> {
    builder: OperatorBuilder<T>,
    output: Output<T, D>,
    summary: T::Summary,
}

impl<T: Timestamp, D: 'static> FeedbackHandle<T, D> {
    fn connect(self, stream: &Stream<T, D>) {
        use penstock_progress::timestamp::PathSummary;
        let FeedbackHandle { mut builder, mut output, summary } = self;
        builder.notify(false);
        let mut input = builder.input_with(stream, Pipeline, vec![Antichain::from_elem(summary.clone())]);
        builder.build(|_| {
            move |_| {
                while let Some((capability, block)) = input.next() {
                    let time = capability.time();
                    if summary.results_in(time).is_none() {
                        return Err(LoopEnd { time: format!("{time:?}"), advance: format!("{summary:?}") }.into());
                    }
                    let later = capability.retain();
                    output.session(&later).give(block);
                }
                Ok(())
            }
        });
    }
}

impl<T: Timestamp> Scope<T> {
    /// Opens a loop: blocks sent into the handle by [`Stream::connect_loop`] come out of the stream with their time advanced by
    /// `summary`, which must be more than nothing. A loop that stays open makes the graph invalid. A block whose next time is beyond the last
    /// there is stops the workers with [`LoopEnd`].
    pub fn feedback<D: Clone + 'static>(&self, summary: T::Summary) -> (FeedbackHandle<T, D>, Stream<T, D>) {
        let mut builder = OperatorBuilder::new(self, FEEDBACK);
        let (output, stream) = builder.output();
        (FeedbackHandle { builder, output, summary }, stream)
    }
}
