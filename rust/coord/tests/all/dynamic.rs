//! Dataflows built on request (B-11): concurrent submissions build the same graphs in the same order everywhere.

#[path = "../../examples/dynamic.rs"]
#[allow(unreachable_pub, clippy::module_inception)]
mod dynamic;

use crate::support::{everywhere, join};
use dynamic::{Question, Request, Service};
use penstock_dataflow::{BoxError, Error, Worker, execute, fabric};

const NUMBERS: u64 = 500;

fn expected(question: Question) -> u64 {
    match question {
        Question::Multiples(of) => (0..NUMBERS).filter(|n| n % of == 0).count() as u64,
        Question::Greatest => NUMBERS - 1,
        Question::Remainders(of) => of.min(NUMBERS),
    }
}

/// Different questions, and different moments, for each worker.
fn busy(worker: &mut Worker) -> Result<Vec<Request>, BoxError> {
    let (index, peers) = (worker.index() as u64, worker.peers() as u64);
    let mut service = Service::new(worker, (0..NUMBERS).filter(|n| n % peers == index).collect());
    for round in 0..10u64 {
        let question = |place: u64| match (round + place + index) % 3 {
            0 => Question::Multiples(2 + round),
            1 => Question::Greatest,
            _ => Question::Remainders(3 + 5 * round),
        };
        // Some in one step, so that they travel together; the answers are waited for in another order.
        let tickets = [0, 1, 2].map(|place| service.ask(worker, question(place)));
        for (place, ticket) in tickets.into_iter().enumerate().rev() {
            let answer = service.answer(worker, ticket?)?;
            let question = question(place as u64);
            if answer != expected(question) {
                return Err(format!("{question:?} was answered by {answer}").into());
            }
        }
    }
    service.finish(worker)
}

#[test]
fn concurrent_submissions_build_identically_and_are_answered() {
    for (fabric, built) in everywhere(busy) {
        for (worker, order) in built.iter().enumerate() {
            assert_eq!(order, &built[0], "{fabric}");
            let own: Vec<u64> = order.iter().filter(|request| request.asker == worker).map(|own| own.ticket).collect();
            assert_eq!(own, (0..30).collect::<Vec<_>>(), "{fabric}");
        }
        assert_eq!(built[0].len(), 30 * built.len(), "{fabric}");
    }
}

/// Shows that the order is needed: what two workers build without it does not fit together.
#[test]
fn without_the_order_the_graphs_do_not_match() {
    let results = join(execute(fabric::threads(2), |worker: &mut Worker| {
        let names = if worker.index() == 0 { ["one", "two"] } else { ["two", "one"] };
        for name in names {
            drop(worker.dataflow::<u64, _>(name, |scope| scope.new_input::<u64>().0));
        }
        while worker.step_or_park(None)? {}
        Ok::<_, BoxError>(())
    }));
    for result in results {
        assert!(matches!(result, Err(Error::GraphMismatch { .. })), "{result:?}");
    }
}
