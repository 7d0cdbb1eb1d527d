//! Whatever code of the user panics, wherever it runs: all workers report the same origin, and all capabilities are released.
//! And what the user keeps of a dataflow after its end refuses, and does not panic.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::support::{Link, join, mesh, on_mesh};
use penstock_dataflow::wire::{Wire, WireError};
use penstock_dataflow::{
    BoxError, Error, Exchange, InputHandle, OperatorBuilder, Output, Pipeline, Worker, execute, fabric,
};
use penstock_progress::capability::Capability;

/// Where worker 1 panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Constructor,
    Route,
    Inspect,
    Encode,
    Decode,
    DropAtTheEnd,
    DropInAStep,
    Build,
    Program,
}

/// A block whose encoding and decoding panic when asked to.
#[derive(Clone)]
struct Fragile(u64);

const ENCODE: u64 = 100;
const DECODE: u64 = 101;

impl Wire for Fragile {
    fn encode(&self, out: &mut Vec<u8>) {
        assert_ne!(self.0, ENCODE, "boom");
        self.0.encode(out);
    }
    fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let value = u64::decode(bytes)?;
        assert_ne!(value, DECODE, "boom");
        Ok(Fragile(value))
    }
}

/// Panics when it is dropped.
struct Bomb(bool);

impl Drop for Bomb {
    fn drop(&mut self) {
        if self.0 && !std::thread::panicking() {
            panic!("boom");
        }
    }
}

fn program(place: Place) -> impl Fn(&mut Worker) -> Result<(), BoxError> + Send + Sync + Clone + 'static {
    move |worker| {
        let me = worker.index();
        let at = move |here: Place| place == here && me == 1;
        let mut input = worker.dataflow::<u64, _>("flow", |scope| {
            let (handle, stream) = scope.new_input::<Fragile>();
            let routed = stream.unary::<Fragile, _>(
                Exchange::new(move |_: &u64, block: Fragile, route: &mut dyn FnMut(usize, Fragile)| {
                    assert!(!at(Place::Route), "boom");
                    route(1 - me, block);
                }),
                "across",
                |_| {
                    assert!(!at(Place::Constructor), "boom");
                    |input, output, _| {
                        input.for_each(|capability, block| output.session(&capability).give(block));
                        Ok(())
                    }
                },
            );
            assert!(!at(Place::Build), "boom");
            let looked = routed.inspect(move |_, _| assert!(!at(Place::Inspect), "boom"));
            // Two that panic in the drop: the second must not meet the first.
            for _ in 0..2 {
                let bomb = Bomb(at(Place::DropAtTheEnd));
                let mut now = at(Place::DropInAStep).then(|| Bomb(true));
                looked.sink(Pipeline, "armed", move |input, _| {
                    let _held = &bomb;
                    input.for_each(|_, _| now = None);
                    Ok(())
                });
            }
            handle
        });
        input.send(Fragile(match place {
            Place::Encode if me == 1 => ENCODE,
            Place::Decode if me == 0 => DECODE,
            _ => 1,
        }));
        assert!(!at(Place::Program), "boom");
        if place != Place::DropAtTheEnd {
            // Nobody but the one who panics would ever end this.
            while worker.step_or_park(None)? {}
        }
        Ok(())
    }
}

fn origin(place: Place) -> &'static str {
    match place {
        Place::Constructor | Place::Route | Place::Encode | Place::Decode => "flow/across",
        Place::Inspect => "flow/inspect",
        Place::DropAtTheEnd | Place::DropInAStep => "flow/armed",
        Place::Build => "flow",
        Place::Program => "program",
    }
}

fn check(place: Place, results: Vec<Result<(), Error>>) {
    for result in results {
        match result {
            Err(Error::Panic { name, worker: 1, message }) => {
                assert_eq!(name, origin(place), "{place:?}");
                assert!(message.contains("boom"), "{place:?}: {message}");
            }
            // The drop of a dataflow that has finished may come after the peers have left.
            Ok(()) if place == Place::DropAtTheEnd => {}
            other => panic!("{place:?}: {other:?}"),
        }
    }
}

#[test]
fn a_panic_anywhere_in_the_users_code_reaches_all_workers_with_its_origin() {
    use Place::*;
    for place in [Constructor, Route, Inspect, DropAtTheEnd, DropInAStep, Build, Program] {
        check(place, join(execute(fabric::threads(2), program(place))));
    }
    for place in [Constructor, Route, Inspect, Encode, Decode, DropAtTheEnd, DropInAStep, Build, Program] {
        check(place, on_mesh(mesh(2, 1, Link::Unix), program(place)));
    }
    // The one who armed the drop learns of it in any case.
    let own = join(execute(fabric::threads(2), program(DropAtTheEnd))).remove(1);
    assert!(matches!(own, Err(Error::Panic { worker: 1, .. })), "{own:?}");
}

#[test]
fn a_panic_while_building_leaves_a_worker_that_reports_it() {
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let mut first = worker.dataflow::<u64, _>("first", |scope| scope.new_input::<u64>().0);
    assert!(worker.step().unwrap());
    let dropped = Rc::new(());
    let owned = dropped.clone();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        worker.dataflow::<u64, ()>("second", |scope| {
            scope.new_input::<u64>().1.inspect(move |_, _| drop(owned.clone()));
            panic!("no second");
        });
    }));
    assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"no second"), "the caller sees its own panic");
    assert_eq!(Rc::strong_count(&dropped), 1, "what was built of it is gone");
    for _ in 0..2 {
        assert!(matches!(worker.step(), Err(Error::Panic { name, worker: 0, .. }) if name == "second"));
    }
    assert!(first.try_send(1).is_err());
}

/// What a program may keep of an operator.
type Kept = Rc<RefCell<Option<(Output<u64, u64>, Capability<u64>)>>>;

fn keeping(worker: &mut Worker, kept: &Kept, seen: &Rc<Cell<u64>>) -> InputHandle<u64, u64> {
    let (kept, seen) = (kept.clone(), seen.clone());
    worker.dataflow::<u64, _>("flow", |scope| {
        let (handle, stream) = scope.new_input::<u64>();
        let mut builder = OperatorBuilder::new(scope, "lender");
        let mut input = builder.input(&stream, Pipeline);
        let (output, lent) = builder.output::<u64>();
        builder.build(|mut capabilities| {
            kept.borrow_mut().replace((output, capabilities.remove(0)));
            move |_| {
                input.for_each(|_, _| ());
                Ok(())
            }
        });
        lent.sink(Pipeline, "seen", move |input, _| {
            input.for_each(|_, block| seen.set(seen.get() + block));
            Ok(())
        });
        handle
    })
}

#[test]
fn handles_and_capabilities_outlive_their_dataflow_and_refuse() {
    let (kept, seen) = (Kept::default(), Rc::new(Cell::new(0)));
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let mut input = keeping(&mut worker, &kept, &seen);
    worker.step().unwrap();
    {
        let mut kept = kept.borrow_mut();
        let (output, capability) = kept.as_mut().unwrap();
        output.try_session(capability).unwrap().give(5);
        assert!(input.try_send(1).is_ok() && !input.has_ended());
    }
    worker.step().unwrap();
    assert_eq!(seen.get(), 5);
    worker.drop_dataflows();
    let mut kept = kept.borrow_mut();
    let (output, capability) = kept.as_mut().unwrap();
    let refused = output.try_session(capability).err().unwrap();
    assert!(refused.ended && refused.to_string().contains("has ended"), "{refused}");
    output.session(capability).give(7);
    capability.downgrade(&9).unwrap();
    assert!(capability.downgrade(&8).is_err());
    assert_eq!(input.try_send(1).unwrap_err().dataflow, "flow");
    input.send(1);
    input.advance_to(3).unwrap();
    assert!(input.advance_to(2).is_err() && input.has_ended());
    drop(capability.delayed(&10));
    assert!(!worker.step().unwrap());
    assert_eq!(seen.get(), 5);
}

#[test]
fn handles_that_outlive_the_worker_refuse_as_well() {
    let (kept, seen) = (Kept::default(), Rc::new(Cell::new(0)));
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let mut input = keeping(&mut worker, &kept, &seen);
    drop(worker);
    assert!(input.try_send(1).is_err() && !input.is_congested());
    let mut kept = kept.borrow_mut();
    let (output, capability) = kept.as_mut().unwrap();
    assert!(output.try_session(capability).is_err());
}

/// A block whose right to send is held, wherever that is, is under way: nothing passes its time.
#[test]
fn a_block_holds_frontiers_back_until_its_right_is_dropped() {
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let (mut feed, mut kept, mut output, probe) = worker.dataflow::<u64, _>("flow", |scope| {
        let (feed, stream) = scope.new_input::<u64>();
        let mut builder = OperatorBuilder::new(scope, "kept outside");
        let input = builder.input(&stream, Pipeline);
        let (output, sent) = builder.output::<u64>();
        builder.build(|_| |_| Ok(()));
        (feed, input, output, sent.probe().0)
    });
    feed.send(1);
    feed.advance_to(5).unwrap();
    let steps = |worker: &mut Worker| (0..3).for_each(|_| assert!(worker.step().unwrap()));
    steps(&mut worker);
    let (capability, block) = kept.next().unwrap();
    steps(&mut worker);
    assert!(probe.less_equal(&0), "a block at 0 may still be sent");
    output.session(&capability).give(block);
    let retained = capability.retain();
    drop(capability);
    steps(&mut worker);
    assert!(probe.less_equal(&0), "the retained capability is at 0");
    drop(retained);
    steps(&mut worker);
    assert!(!probe.less_than(&5) && probe.less_equal(&5));
}

/// A session that is open when its dataflow ends drops what it is given.
#[test]
fn a_session_gives_nothing_after_the_end() {
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let (capability, mut output) = worker.dataflow::<u64, _>("flow", |scope| {
        let mut builder = OperatorBuilder::new(scope, "kept outside");
        let (output, sent) = builder.output::<Rc<()>>();
        sent.sink(Pipeline, "reader", |_, _| Ok(()));
        let mut held = None;
        builder.build(|mut capabilities| {
            held = capabilities.pop();
            |_| Ok(())
        });
        (held.unwrap(), output)
    });
    let block = Rc::new(());
    let mut session = output.session(&capability);
    worker.drop_dataflows();
    session.give(block.clone());
    assert_eq!(Rc::strong_count(&block), 1, "it waits for a reader that is gone");
}
