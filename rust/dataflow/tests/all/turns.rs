//! A step looks at the dataflows that have something to do and at no other: counted in turns, not in time.

use penstock_dataflow::{Activator, InputHandle, OperatorBuilder, Pipeline, Worker, fabric};
use penstock_progress::capability::Capability;
use penstock_progress::probe::ProbeHandle;

const MANY: usize = 100;

type Flow = (InputHandle<u64, Vec<u64>>, ProbeHandle<u64>);

fn flows(worker: &mut Worker) -> Vec<Flow> {
    let build = |number| {
        worker.dataflow::<u64, _>(&format!("flow {number}"), |scope| {
            let (handle, stream) = scope.new_input::<Vec<u64>>();
            (handle, stream.exchange_by(|value| *value).inspect(|_, _| ()).probe().0)
        })
    };
    (0..MANY).map(build).collect()
}

/// Steps until nothing is to do, and says how many turns that took.
fn settle(workers: &mut [Worker]) -> u64 {
    let turns = |workers: &[Worker]| workers.iter().map(Worker::turns).sum::<u64>();
    let before = turns(workers);
    while workers.iter().any(Worker::has_work) {
        workers.iter_mut().for_each(|worker| assert!(worker.step().unwrap()));
    }
    turns(workers) - before
}

#[test]
fn idle_dataflows_have_no_turns() {
    for count in [1, 3] {
        let mut workers: Vec<Worker> = fabric::threads(count).into_iter().map(Worker::new).collect();
        let mut members: Vec<Vec<Flow>> = workers.iter_mut().map(flows).collect();
        settle(&mut workers);
        let before: Vec<u64> = workers.iter().map(Worker::turns).collect();
        for _ in 0..50 {
            workers.iter_mut().for_each(|worker| assert!(worker.step().unwrap()));
        }
        assert_eq!(before, workers.iter().map(Worker::turns).collect::<Vec<_>>(), "nothing happened");
        // One of them is fed, on one worker or on all.
        members[0][7].0.send(vec![1, 2, 3]);
        let turns = settle(&mut workers);
        assert!((1..=4 * count as u64).contains(&turns), "{turns} turns of {count} workers for one block");
        members.iter_mut().for_each(|flows| flows[7].0.advance_to(4).unwrap());
        let turns = settle(&mut workers);
        assert!((1..=(4 * count * count) as u64).contains(&turns), "{turns} turns of {count} workers for one epoch");
        for flows in &members {
            assert!(!flows[7].1.less_than(&4) && flows[8].1.less_equal(&0));
        }
        // And ends; the others stay.
        members.iter_mut().for_each(|flows| drop(flows.remove(7)));
        let turns = settle(&mut workers);
        assert!((1..=(4 * count * count) as u64).contains(&turns), "{turns} turns of {count} workers for one end");
        assert!(workers.iter().all(|worker| worker.dataflows() == MANY - 1));
        drop(members);
        while workers.iter_mut().fold(false, |more, worker| worker.step().unwrap() | more) {}
    }
}

/// What a program does to a dataflow between two steps, whatever it does it with, gives that one a turn.
#[test]
fn whatever_touches_a_dataflow_gives_it_a_turn() {
    let mut worker = [Worker::new(fabric::threads(1).remove(0))];
    let _others = flows(&mut worker[0]);
    let (mut feed, mut kept, mut output, activator, held, probe) = worker[0].dataflow::<u64, _>("touched", |scope| {
        let (feed, stream) = scope.new_input::<u64>();
        let mut builder = OperatorBuilder::new(scope, "kept outside");
        let input = builder.input(&stream, Pipeline);
        let (output, sent) = builder.output::<u64>();
        let activator: Activator = builder.activator();
        let mut held: Option<Capability<u64>> = None;
        builder.build(|mut capabilities| {
            held = capabilities.pop();
            |_| Ok(())
        });
        let (probe, sent) = sent.probe();
        sent.sink(Pipeline, "reader", |input, _| {
            input.for_each(|_, _| ());
            Ok(())
        });
        (feed, input, output, activator, held.unwrap(), probe)
    });
    let mut held = Some(held);
    settle(&mut worker);
    let mut touched = |what: &str, turns: std::ops::RangeInclusive<u64>| {
        let taken = settle(&mut worker);
        assert!(turns.contains(&taken), "{taken} turns after {what}");
    };
    touched("nothing", 0..=0);
    activator.activate();
    touched("an activation", 1..=1);
    feed.send(1);
    touched("a block", 1..=2);
    output.session(held.as_ref().unwrap()).give(5);
    touched("a block out of an operator", 1..=2);
    held.as_mut().unwrap().downgrade(&3).unwrap();
    touched("a later capability", 1..=2);
    assert!(probe.less_equal(&0), "a block is not read");
    drop(kept.next().unwrap());
    touched("a block that was read", 1..=2);
    assert!(probe.less_equal(&0), "the input may still send at 0");
    feed.advance_to(9).unwrap();
    touched("a later input", 1..=2);
    assert!(!probe.less_than(&3) && probe.less_equal(&3));
    held = None;
    touched("a dropped capability", 1..=2);
    assert!(!probe.less_than(&9) && probe.less_equal(&9) && held.is_none());
    drop((held.clone(), feed.time()));
    touched("a look", 0..=0);
}

/// In one step each dataflow has one turn, in the order in which they were built.
#[test]
fn a_dataflow_that_feeds_another_gives_it_a_turn_in_that_step_or_the_next() {
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let (mut first, second) = {
        let (first, stream) = worker.dataflow::<u64, _>("first", |scope| {
            let (handle, stream) = scope.new_input::<Vec<u64>>();
            let seen = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
            let sink = seen.clone();
            stream.inspect(move |_, block| sink.borrow_mut().extend(block.iter().copied()));
            (handle, seen)
        });
        (first, stream)
    };
    let onward = std::rc::Rc::new(std::cell::RefCell::new(None));
    let feeds = onward.clone();
    let mut last = worker.dataflow::<u64, _>("second", |scope| {
        let (handle, stream) = scope.new_input::<u64>();
        stream.inspect(move |_, value| {
            if let Some(handle) = &mut *feeds.borrow_mut() {
                InputHandle::<u64, Vec<u64>>::send(handle, vec![*value]);
            }
        });
        handle
    });
    while worker.has_work() {
        worker.step().unwrap();
    }
    // The dataflow that was built later feeds the earlier one: its turn in this step is over.
    first.send(vec![1]);
    *onward.borrow_mut() = Some(first);
    last.send(2);
    assert!(worker.step().unwrap());
    assert_eq!(*second.borrow(), [1]);
    assert!(worker.has_work(), "the first one has its turn in the next step");
    assert!(worker.step().unwrap());
    assert_eq!(*second.borrow(), [1, 2]);
    drop(onward.take());
    drop(last);
    while worker.step().unwrap() {}
    assert_eq!(worker.dataflows(), 0);
}
