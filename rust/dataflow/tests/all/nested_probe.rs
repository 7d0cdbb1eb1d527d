//! A probe behind a nested scope never goes back, however early blocks come before the progress that announces them.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use penstock_dataflow::{BoxError, Pipeline, Worker, execute, fabric};
use penstock_progress::probe::ProbeHandle;
use penstock_progress::timestamp::Product;

/// Numbers are halved in a loop over both workers until they are odd; whether something came after the probe had passed it.
fn program(worker: &mut Worker) -> Result<bool, BoxError> {
    let late = Rc::new(Cell::new(false));
    let flag = late.clone();
    let (mut input, probe) = worker.dataflow::<u64, _>("halve", |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let odd = scope.nested::<Product<u64, u64>, _>("rounds", |inner| {
            let (feedback, back) = inner.feedback(Product::new(0, 1));
            let all = stream.enter(inner).concat(&back).exchange_by(|number| *number);
            let part = |odd: u64, divisor: u64| {
                all.unary::<Vec<u64>, _>(Pipeline, "part", move |_| {
                    move |input, output, _| {
                        input.for_each(|capability, block| {
                            let part = block.into_iter().filter(|number| number % 2 == odd);
                            let part: Vec<u64> = part.map(|number| number / divisor).collect();
                            if !part.is_empty() {
                                output.session(&capability).give(part);
                            }
                        });
                        Ok(())
                    }
                })
            };
            part(0, 2).connect_loop(feedback);
            part(1, 1).leave(scope)
        });
        let own: Rc<RefCell<Option<ProbeHandle<u64>>>> = Rc::default();
        let asked = own.clone();
        let odd = odd.inspect(move |_, _| {
            if asked.borrow().as_ref().is_some_and(ProbeHandle::done) {
                flag.set(true);
            }
        });
        let probe = odd.probe().0;
        *own.borrow_mut() = Some(probe.clone());
        (input, probe)
    });
    input.send((1..7).collect());
    input.close();
    let mut done = false;
    while worker.step_or_park(None)? {
        late.set(late.get() || done && !probe.done());
        done = probe.done();
    }
    Ok(late.get())
}

#[test]
fn a_probe_behind_a_loop_passes_nothing_that_still_comes() {
    for turn in 0..if cfg!(miri) { 2 } else { 500 } {
        let threads = execute(fabric::threads(2), program);
        for thread in threads {
            assert!(!thread.join().unwrap().unwrap(), "in turn {turn}");
        }
    }
}
