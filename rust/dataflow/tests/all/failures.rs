//! What happens when operators, programs, peers or graphs are wrong: every worker learns the same cause, and nothing hangs.

use std::cell::Cell;
use std::net::TcpStream;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use crate::frames::frame;
use crate::support::{self, Link, TAG, join, mesh, on_mesh, tcp_pair};
use penstock_dataflow::error::ProtocolFault;
use penstock_dataflow::fabric::Duplex;
use penstock_dataflow::{
    BoxError, Error, Exchange, Frontiers, LoopEnd, OperatorBuilder, Pipeline, Worker, execute, fabric,
};
use penstock_progress::timestamp::Product;

#[derive(Debug, thiserror::Error)]
#[error("value {0} is not wanted")]
struct Unwanted(u64);

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Error,
    Panic,
}

/// Worker 1 fails at the value 7; the other workers hold their inputs open and can only learn of it from the fabric.
fn failing(fault: Fault) -> impl Fn(&mut Worker) -> Result<(), BoxError> + Send + Sync + Clone + 'static {
    move |worker| {
        let mut input = worker.dataflow::<u64, _>("flow", |scope| {
            let (handle, stream) = scope.new_input::<Vec<u64>>();
            stream.exchange_by(|_| 1).sink(Pipeline, "picky", move |input, _| {
                while let Some((_, block)) = input.next() {
                    if block.contains(&7) {
                        match fault {
                            Fault::Error => return Err(Unwanted(7).into()),
                            Fault::Panic => panic!("saw {}", 7),
                        }
                    }
                }
                Ok(())
            });
            handle
        });
        if worker.index() == 0 {
            input.send(vec![1, 7]);
        }
        while worker.step_or_park(None)? {}
        Ok(())
    }
}

#[test]
fn an_error_reaches_all_workers_with_its_operator_and_cause() {
    let on_threads = join(execute(fabric::threads(3), failing(Fault::Error)));
    for result in on_threads {
        match result {
            Err(Error::Operator { name, worker: 1, source }) => {
                assert_eq!(name, "flow/picky");
                assert!(source.downcast_ref::<Unwanted>().is_some_and(|Unwanted(value)| *value == 7));
            }
            other => panic!("{other:?}"),
        }
    }
    for result in on_mesh(mesh(2, 2, Link::Tcp), failing(Fault::Error)) {
        match result {
            Err(Error::Operator { name, worker: 1, source }) => {
                assert_eq!((name.as_str(), source.to_string().as_str()), ("flow/picky", "value 7 is not wanted"));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_panic_reaches_all_workers_with_its_message() {
    let mut results = join(execute(fabric::threads(2), failing(Fault::Panic)));
    results.extend(on_mesh(mesh(3, 1, Link::Unix), failing(Fault::Panic)));
    for result in results {
        match result {
            Err(Error::Panic { name, worker: 1, message }) => {
                assert_eq!((name.as_str(), message.as_str()), ("flow/picky", "saw 7"));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_failed_program_stops_its_peers() {
    let threads = execute(fabric::threads(2), |worker: &mut Worker| {
        let _input = worker.dataflow::<u64, _>("flow", |scope| scope.new_input::<u64>().0);
        if worker.index() == 1 {
            return Err(BoxError::from(Unwanted(3)));
        }
        while worker.step_or_park(None)? {}
        Ok(())
    });
    for result in join(threads) {
        assert!(
            matches!(&result, Err(Error::Program { worker: 1, source }) if source.to_string() == "value 3 is not wanted"),
            "{result:?}"
        );
    }
}

/// Process 0 never hears from process 1, which panics, but from process 2, which learns it from process 1 and leaves.
#[test]
fn a_process_that_leaves_after_an_abort_tells_the_cause_first() {
    let ((deaf, _unheard), (_unread, spoken)) = (tcp_pair(), tcp_pair());
    let ((zero, two), (one, third)) = (tcp_pair(), tcp_pair());
    let boxed = |stream: TcpStream| -> Option<Box<dyn Duplex>> { Some(Box::new(stream)) };
    let streams = [
        vec![None, boxed(deaf), boxed(zero)],
        vec![boxed(spoken), None, boxed(one)],
        vec![boxed(two), boxed(third), None],
    ];
    let seats = streams.into_iter().enumerate();
    let mesh = seats.map(|(process, streams)| fabric::processes(process, 1, streams, TAG).unwrap()).collect();
    let results = on_mesh(mesh, |worker| {
        assert!(worker.index() != 1, "enough");
        let _input = worker.dataflow::<u64, _>("flow", |scope| scope.new_input::<Vec<u64>>().0);
        while worker.step_or_park(None)? {}
        Ok::<_, BoxError>(())
    });
    for result in results {
        assert!(matches!(&result, Err(Error::Panic { worker: 1, message, .. }) if message == "enough"), "{result:?}");
    }
}

#[test]
fn after_an_error_every_step_repeats_it_and_capabilities_are_dropped() {
    struct Bell(Rc<Cell<u32>>);
    impl Drop for Bell {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }
    let dropped = Rc::new(Cell::new(0));
    let bell = Bell(dropped.clone());
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let mut input = worker.dataflow::<u64, _>("flow", |scope| {
        let (handle, stream) = scope.new_input::<u64>();
        stream.unary::<u64, _>(Pipeline, "fails", |capability| {
            let kept = (capability, bell);
            move |input, _, _| {
                let _held = &kept;
                if input.next().is_some() { Err("no".into()) } else { Ok(()) }
            }
        });
        handle
    });
    assert!(worker.step().unwrap());
    input.send(1);
    for _ in 0..3 {
        assert!(matches!(worker.step(), Err(Error::Operator { worker: 0, .. })));
    }
    assert_eq!((dropped.get(), worker.dataflows()), (1, 0));
    input.send(2);
    input.advance_to(5).unwrap();
    assert!(matches!(worker.step_or_park(None), Err(Error::Operator { .. })));
}

#[test]
fn a_worker_that_leaves_early_stops_its_peers() {
    let mut seats = fabric::threads(2);
    let leaver = seats.remove(0);
    let build = |worker: &mut Worker| worker.dataflow::<u64, _>("flow", |scope| scope.new_input::<u64>().0);
    let mut stays = Worker::new(seats.remove(0));
    let _input = build(&mut stays);
    std::thread::spawn(move || {
        let mut worker = Worker::new(leaver);
        let _input = build(&mut worker);
    })
    .join()
    .unwrap();
    let error = loop {
        match stays.step_or_park(None) {
            Ok(alive) => assert!(alive),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Aborted { worker: 0, .. }), "{error}");
}

/// Runs process 0 of two against a peer that writes these bytes and keeps the stream open or closes it.
fn against(bytes: Vec<u8>, close: bool) -> Error {
    let (ours, mut theirs) = support::tcp_pair();
    let streams: Vec<Option<Box<dyn fabric::Duplex>>> = vec![None, Some(Box::new(ours))];
    let (endpoints, guard) = fabric::processes(0, 1, streams, support::TAG).unwrap();
    let threads = execute(endpoints, |worker: &mut Worker| {
        let _input = worker.dataflow::<u64, _>("flow", |scope| {
            let (handle, stream) = scope.new_input::<Vec<u64>>();
            stream.exchange_by(|value| *value);
            handle
        });
        while worker.step_or_park(None)? {}
        Ok::<(), Error>(())
    });
    std::io::Write::write_all(&mut theirs, &bytes).unwrap();
    let keep = (!close).then_some(theirs);
    let error = join(threads).remove(0).unwrap_err();
    drop(keep);
    drop(guard);
    error
}

#[test]
fn a_stream_that_ends_without_goodbye_is_a_lost_peer() {
    assert!(matches!(against(vec![], true), Error::PeerLost { process: 1, .. }));
    let cut = frame(0, 4, 1, 1, 0, None, &[1; 100])[..80].to_vec();
    assert!(matches!(against(cut, true), Error::PeerLost { process: 1, .. }));
}

#[test]
fn bad_frames_are_named() {
    let fault = |bytes| match against(bytes, false) {
        Error::Protocol { process: 1, fault } => fault,
        other => panic!("{other:?}"),
    };
    assert!(matches!(fault(vec![0x41; 200]), ProtocolFault::Magic(0x4141_4141)));
    assert_eq!(fault(frame(0, 5, 1, 1, 0, None, &[])), ProtocolFault::Generation(5));
    assert_eq!(fault(frame(0, 4, 1, 1, 0, Some(1 << 40), &[])), ProtocolFault::Length(1 << 40));
    assert_eq!(fault(frame(9, 4, 1, 1, 0, None, &[])), ProtocolFault::Kind(9));
    assert_eq!(fault(frame(0, 4, 1, 0, 0, None, &[])), ProtocolFault::Sender(0));
    assert_eq!(fault(frame(0, 4, 1, 1, 1, None, &[])), ProtocolFault::Receiver(1));
    assert_eq!(fault(frame(2, 4, 0, 1, 0, None, &[255; 9])), ProtocolFault::Body(0));
    let mut flipped = frame(0, 4, 1, 1, 0, None, &[1, 2, 3]);
    *flipped.last_mut().unwrap() ^= 1;
    assert_eq!(fault(flipped), ProtocolFault::Checksum);
}

#[test]
fn a_gap_in_the_progress_numbers_is_fatal() {
    // Bundle 1 without bundle 0: (number, shape, parts) in postcard.
    let error = against(frame(1, 4, 0, 1, 0, None, &[1, 0, 0]), false);
    assert!(matches!(error, Error::SequenceGap { worker: 1, expected: 0, got: 1, .. }), "{error:?}");
}

#[test]
fn bodies_that_do_not_decode_or_fit_are_a_mismatch() {
    for bytes in [
        frame(1, 4, 0, 1, 0, None, &[9; 3]),            // not a bundle
        frame(1, 4, 0, 1, 0, None, &[0, 77, 0]),        // a bundle of another graph
        frame(0, 4, 1, 1, 0, None, &[200, 0, 0, 0, 1]), // time longer than the body
    ] {
        let error = against(bytes, false);
        assert!(matches!(error, Error::GraphMismatch { worker: 0, peer: 1, .. }), "{error:?}");
    }
}

#[test]
fn different_graphs_are_noticed() {
    let program = |worker: &mut Worker| -> Result<(), BoxError> {
        let odd = worker.index() == 1;
        let _input = worker.dataflow::<u64, _>("flow", |scope| {
            let (handle, stream) = scope.new_input::<Vec<u64>>();
            let stream = stream.exchange_by(|value| *value);
            if odd {
                stream.inspect(|_, _| ());
            }
            handle
        });
        while worker.step_or_park(None)? {}
        Ok(())
    };
    let mut results = join(execute(fabric::threads(2), program));
    results.extend(on_mesh(mesh(2, 1, Link::Unix), program));
    for result in results {
        let text = mismatch(result.unwrap_err());
        for part in ["\"flow\"", "node 3 of", "\"inspect\"", "edge in"] {
            assert!(text.contains(part), "{text}");
        }
    }
}

/// Without a channel at one of them, what the other one sends would wait there for ever.
#[test]
fn an_exchange_on_one_worker_only_is_noticed() {
    let program = |worker: &mut Worker| -> Result<(), BoxError> {
        let odd = worker.index() == 1;
        let mut input = worker.dataflow::<u64, _>("flow", |scope| {
            let (handle, stream) = scope.new_input::<Vec<u64>>();
            let mut builder = OperatorBuilder::new(scope, "read");
            let mut input = match odd {
                true => builder
                    .input(&stream, Exchange::new(|_: &u64, block, give: &mut dyn FnMut(usize, _)| give(0, block))),
                false => builder.input(&stream, Pipeline),
            };
            builder.build(|_| {
                move |_| {
                    input.for_each(|_, _| ());
                    Ok(())
                }
            });
            handle
        });
        input.send(vec![1]);
        drop(input);
        let begin = std::time::Instant::now();
        while worker.step_or_park(Some(Duration::from_millis(100)))? {
            assert!(begin.elapsed() < Duration::from_secs(60), "it waits for ever");
        }
        Ok(())
    };
    let mut results = join(execute(fabric::threads(2), program));
    results.extend(on_mesh(mesh(2, 1, Link::Unix), program));
    for result in results {
        let text = mismatch(result.unwrap_err());
        assert!(text.contains("\"read\"") && text.contains("exchanged"), "{text}");
    }
}

/// The text of a mismatch: over processes the news may come as an abort that carries it.
fn mismatch(error: Error) -> String {
    match error {
        Error::GraphMismatch { .. } => error.to_string(),
        Error::Aborted { reason, .. } if reason.contains("another graph") => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn other_times_types_and_names_are_noticed() {
    let run = |which: usize| {
        let program = move |worker: &mut Worker| -> Result<(), BoxError> {
            let odd = worker.index() == 1;
            match which {
                0 if odd => drop(worker.dataflow::<u32, _>("flow", |scope| scope.new_input::<Vec<u64>>().0)),
                1 if odd => drop(worker.dataflow::<u64, _>("flux", |scope| scope.new_input::<Vec<u64>>().0)),
                _ => drop(worker.dataflow::<u64, _>("flow", |scope| {
                    let (handle, stream) = scope.new_input::<Vec<u64>>();
                    if which == 2 && odd {
                        // Same graph, other blocks: only data can show it.
                        stream.map_blocks(|_| vec![String::from("text")]).exchange_by(|_| 0);
                    } else {
                        stream.map_blocks(|block| block).exchange_by(|_| 1);
                    }
                    handle
                })),
            }
            while worker.step_or_park(None)? {}
            Ok(())
        };
        let mut texts = Vec::new();
        for result in join(execute(fabric::threads(2), program)) {
            texts.push(result);
        }
        texts.extend(on_mesh(mesh(2, 1, Link::Tcp), program));
        texts
    };
    for (which, wanted) in [(0, "times u64"), (1, "\"flux\"")] {
        for result in run(which) {
            let text = mismatch(result.unwrap_err());
            assert!(text.contains(wanted), "{text}");
        }
    }
    // Nothing was sent, so nothing is wrong.
    assert!(run(2).iter().all(Result::is_ok));
}

#[test]
fn blocks_of_another_type_are_noticed_when_they_come() {
    let program = |worker: &mut Worker| -> Result<(), BoxError> {
        let odd = worker.index() == 1;
        let mut input = worker.dataflow::<u64, _>("flow", |scope| {
            let (handle, stream) = scope.new_input::<Vec<u64>>();
            if odd {
                stream.map_blocks(|_| vec![(1u64, String::from("text"))]).exchange_by(|_| 0);
            } else {
                stream.map_blocks(|block| block).exchange_by(|_| 1);
            }
            handle
        });
        input.send(vec![1 << 60]);
        while worker.step_or_park(None)? {}
        Ok(())
    };
    let mut results = join(execute(fabric::threads(2), program));
    results.extend(on_mesh(mesh(2, 1, Link::Unix), program));
    for result in results {
        let text = mismatch(result.unwrap_err());
        assert!(text.contains("flow/exchange") && text.contains("carries"), "{text}");
    }
}

#[test]
fn a_worker_that_builds_fewer_dataflows_is_noticed_when_it_leaves() {
    let program = |worker: &mut Worker| -> Result<(), BoxError> {
        let few = worker.index() == 1;
        for name in ["one", "two", "three"] {
            if !(few && name == "three") {
                drop(worker.dataflow::<u64, _>(name, |scope| {
                    let (handle, stream) = scope.new_input::<Vec<u64>>();
                    stream.exchange_by(|value| *value);
                    handle
                }));
            }
        }
        while worker.step_or_park(None)? {}
        Ok(())
    };
    for round in 0..20 {
        let mut results = join(execute(fabric::threads(3), program));
        results.extend(on_mesh(mesh(3, 1, Link::Unix), program));
        for (worker, result) in results.into_iter().enumerate() {
            if worker % 3 == 1 {
                // It has finished, or it learns of the others' failure before it has.
                assert!(result.as_ref().err().is_none_or(|error| !mismatch(error.clone()).is_empty()), "{result:?}");
                continue;
            }
            let text = mismatch(result.expect_err("dataflow three cannot end"));
            for part in ["worker 1", "\"three\"", "number 3", "after building 2"] {
                assert!(text.contains(part), "round {round}, worker {worker}: {text}");
            }
        }
    }
}

#[test]
fn graphs_that_cannot_run_are_refused() {
    let refused = |build: &dyn Fn(&mut Worker)| {
        let mut worker = Worker::new(fabric::threads(1).remove(0));
        build(&mut worker);
        match worker.step() {
            Err(Error::Graph { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    };
    let reason = refused(&|worker| {
        worker.dataflow::<u64, _>("loop", |scope| {
            let (feedback, back) = scope.feedback::<u64>(0);
            back.inspect(|_, _| ()).connect_loop(feedback);
        });
    });
    assert!(reason.contains("at one time: feedback -> inspect -> feedback; give its feedback an advance"), "{reason}");
    let reason = refused(&|worker| {
        worker.dataflow::<u64, _>("open", |scope| drop(scope.feedback::<u64>(1)));
    });
    assert!(reason.contains("feedback was called and connect_loop was not"), "{reason}");
    let reason = refused(&|worker| {
        worker.dataflow::<u64, _>("open", |scope| drop(OperatorBuilder::new(scope, "half")));
    });
    assert!(reason.contains("operator \"half\" was never built"), "{reason}");
    let reason = refused(&|worker| {
        worker.dataflow::<u64, _>("failed", |scope| {
            let mut builder = OperatorBuilder::new(scope, "failing");
            let _stream = builder.output::<u64>();
            let built = builder.try_build(|_| match true {
                true => Err("no logic"),
                false => Ok(|_: &Frontiers<'_, u64>| Ok(())),
            });
            assert_eq!(built, Err("no logic"));
        });
    });
    assert!(reason.contains("operator \"failing\" was never built"), "{reason}");
    let reason = refused(&|worker| {
        worker.dataflow::<u64, _>("foreign", |scope| {
            let (_, stream) = scope.new_input::<u64>();
            let aside = scope.nested::<Product<u64, u64>, _>("one", |inner| inner.clone());
            scope.nested::<Product<u64, u64>, _>("two", |inner| stream.enter(inner).concat(&stream.enter(&aside)));
        });
    });
    assert!(reason.contains("reads a stream of scope"), "{reason}");
    let reason = refused(&|worker| {
        worker.dataflow::<u64, _>("twice", |scope| {
            struct NoClone;
            let mut builder = OperatorBuilder::new(scope, "source");
            let (_, stream) = builder.output_unshared::<NoClone>();
            builder.build(|_| |_| Ok(()));
            stream.inspect(|_, _| ());
            stream.inspect(|_, _| ());
        });
    });
    assert!(reason.contains("second reader"), "{reason}");
}

#[test]
fn a_loop_beyond_the_last_time_is_an_error() {
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let seen = Rc::new(Cell::new(0));
    let mut input = worker.dataflow::<u64, _>("flow", |scope| {
        let (handle, stream) = scope.new_input::<u64>();
        let (feedback, back) = scope.feedback::<u64>(1);
        let seen = seen.clone();
        stream.concat(&back.inspect(move |time, _| seen.set(*time))).connect_loop(feedback);
        handle
    });
    input.advance_to(u64::MAX - 1).unwrap();
    input.send(5);
    let error = loop {
        match worker.step() {
            Ok(_) => assert!(worker.has_work(), "the block is gone"),
            Err(error) => break error,
        }
    };
    assert_eq!(seen.get(), u64::MAX);
    let Error::Operator { source, .. } = error else { panic!("{error:?}") };
    let end = source.downcast_ref::<LoopEnd>().expect("the loop's");
    assert_eq!((end.time.as_str(), end.advance.as_str()), ("18446744073709551615", "1"));
}

#[test]
fn routing_to_a_worker_that_does_not_exist_is_named() {
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let mut input = worker.dataflow::<u64, _>("flow", |scope| {
        let (handle, stream) = scope.new_input::<u64>();
        stream.sink(
            Exchange::new(|_: &u64, block: u64, route: &mut dyn FnMut(usize, u64)| route(3, block)),
            "end",
            |_, _| Ok(()),
        );
        handle
    });
    input.send(1);
    let error = worker.step().unwrap_err();
    assert!(matches!(&error, Error::Route { target: 3, peers: 1, name } if name == "flow/end"), "{error:?}");
}

#[test]
fn too_early_times_and_foreign_capabilities_are_refused() {
    let (send, seen) = mpsc::channel();
    let mut worker = Worker::new(fabric::threads(1).remove(0));
    let mut input = worker.dataflow::<u64, _>("flow", |scope| {
        let (handle, stream) = scope.new_input::<u64>();
        let mut builder = OperatorBuilder::new(scope, "two");
        let mut input = builder.input(&stream, Pipeline);
        let (mut one, _) = builder.output::<u64>();
        let (mut two, _) = builder.output::<u64>();
        builder.build(|_| {
            move |_| {
                while let Some((capability, _)) = input.next() {
                    assert!(capability.delayed(&4).is_err(), "5 does not reach 4");
                    let later = capability.delayed(&9)?;
                    assert!(later.delayed(&8).is_err());
                    assert!(two.try_session(&later).is_err(), "it is for output 0");
                    two.try_session(&capability)?.give(1);
                    two.session(&capability.retain_for(1)).give(1);
                    send.send(())?;
                    two.session(&later).give(2);
                }
                one.try_session(&penstock_progress::capability::Capability::mint(0, Rc::default()))
                    .err()
                    .ok_or("accepted")?;
                Ok(())
            }
        });
        handle
    });
    input.advance_to(5).unwrap();
    let error = input.advance_to(4).unwrap_err();
    assert_eq!((error.held, error.asked, *input.time()), (5, 4, 5));
    input.send(1);
    let error = worker.step().unwrap_err();
    assert_eq!(seen.recv_timeout(Duration::ZERO), Ok(()));
    assert!(
        matches!(&error, Error::WrongCapability { name, worker: 0, time } if name == "flow/two" && time == "9"),
        "{error:?}"
    );
}
