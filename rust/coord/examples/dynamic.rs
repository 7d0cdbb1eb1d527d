//! Dataflows that are built while the program runs (B-11): every worker may ask questions at any moment, and a sequencer of
//! requests makes all workers build the dataflow of each in the same order. Whoever asked waits for its answer and reads it.
//!
//! Without one order two workers that ask at the same time would build different graphs, and the first step would say so.
//!
//! `cargo run -p penstock-coord --example dynamic`

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use penstock_coord::{CoordError, Sequencer};
use penstock_dataflow::{BoxError, Pipeline, Stream, Worker, execute, fabric};
use serde::{Deserialize, Serialize};

/// What can be asked about the numbers that the workers hold. Each is another dataflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    /// How many are multiples of this.
    Multiples(u64),
    /// The greatest.
    Greatest,
    /// How many different remainders they leave: the workers must compare what they have.
    Remainders(u64),
}

/// A question on its way to all workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Worker that asked.
    pub asker: usize,
    /// Number among its own questions.
    pub ticket: u64,
    /// What it asked.
    pub question: Question,
}

/// Answers that have come, by ticket.
type Answers = Rc<RefCell<BTreeMap<u64, u64>>>;

/// One worker's end of the service.
pub struct Service {
    requests: Sequencer<Request>,
    numbers: Vec<u64>,
    answers: Answers,
    asked: u64,
    /// Every request, in the order in which its dataflow was built.
    pub built: Vec<Request>,
}

impl Service {
    /// A service over the numbers of this worker.
    pub fn new(worker: &mut Worker, numbers: Vec<u64>) -> Self {
        let requests = Sequencer::new(worker);
        Service { requests, numbers, answers: Answers::default(), asked: 0, built: Vec::new() }
    }

    /// Submits a question, and returns the ticket for its answer.
    pub fn ask(&mut self, worker: &Worker, question: Question) -> Result<u64, CoordError> {
        let (asker, ticket) = (worker.index(), self.asked);
        self.requests.push(Request { asker, ticket, question })?;
        self.asked += 1;
        Ok(ticket)
    }

    /// Serves until the answer to one of this worker's questions is there.
    pub fn answer(&mut self, worker: &mut Worker, ticket: u64) -> Result<u64, BoxError> {
        loop {
            if let Some(answer) = self.answers.borrow_mut().remove(&ticket) {
                return Ok(answer);
            }
            self.serve(worker)?;
        }
    }

    /// Asks nothing more, and serves until nobody does and all answers are out.
    pub fn finish(mut self, worker: &mut Worker) -> Result<Vec<Request>, BoxError> {
        self.requests.close();
        while !self.requests.is_finished() || worker.dataflows() > 0 {
            self.serve(worker)?;
        }
        Ok(self.built)
    }

    /// Does what can be done, or parks, then builds what was asked for.
    fn serve(&mut self, worker: &mut Worker) -> Result<(), BoxError> {
        worker.step_or_park(None)?;
        while let Some(request) = self.requests.next() {
            self.built.push(request);
            build(worker, request, &self.numbers, &self.answers);
        }
        Ok(())
    }
}

/// Builds the dataflow of a request, feeds it with this worker's numbers, and lets it send its result to the asker.
fn build(worker: &mut Worker, request: Request, numbers: &[u64], answers: &Answers) {
    let Request { asker, ticket, question } = request;
    let answers = answers.clone();
    let mut input = worker.dataflow::<u64, _>(&format!("question {ticket} of worker {asker}"), |scope| {
        let (input, stream) = scope.new_input::<Vec<u64>>();
        let mine = scope.index() == asker;
        match question {
            Question::Multiples(of) => {
                let counts = stream.map_blocks(move |block| vec![block.iter().filter(|n| *n % of == 0).count() as u64]);
                collect(&counts, asker, |sum, count| sum + count, mine.then_some((ticket, answers)));
            }
            Question::Greatest => {
                let greatest = stream.map_blocks(|block| block.into_iter().max().into_iter().collect::<Vec<_>>());
                collect(&greatest, asker, u64::max, mine.then_some((ticket, answers)));
            }
            Question::Remainders(of) => {
                let mut seen = BTreeSet::new();
                let fresh = stream
                    .map_blocks(move |block| block.into_iter().map(|n| n % of).collect::<Vec<_>>())
                    .exchange_by(|remainder| *remainder)
                    .map_blocks(move |block| vec![block.into_iter().filter(|n| seen.insert(*n)).count() as u64]);
                collect(&fresh, asker, |sum, count| sum + count, mine.then_some((ticket, answers)));
            }
        }
        input
    });
    input.send(numbers.to_vec());
    // Dropping the input ends it, so the dataflow finishes by itself.
}

/// Folds everything at the asker, and gives the answer out once no worker can send any more.
fn collect(
    stream: &Stream<u64, Vec<u64>>,
    asker: usize,
    fold: impl Fn(u64, u64) -> u64 + 'static,
    mut answer: Option<(u64, Answers)>,
) {
    let mut result = 0;
    stream.exchange_by(move |_| asker as u64).sink(Pipeline, "collect", move |input, frontiers| {
        input.for_each(|_, block| result = block.into_iter().fold(result, &fold));
        if frontiers.frontier(0).is_empty()
            && let Some((ticket, answers)) = answer.take()
        {
            answers.borrow_mut().insert(ticket, result);
        }
        Ok(())
    });
}

#[allow(dead_code)] // The test includes this file.
fn main() -> Result<(), BoxError> {
    let threads = execute(fabric::threads(3), |worker| {
        let (index, peers) = (worker.index() as u64, worker.peers() as u64);
        let mut service = Service::new(worker, (0..1000).filter(|n| n % peers == index).collect());
        let questions = [Question::Multiples(7 + index), Question::Greatest, Question::Remainders(100 + index)];
        let mut lines = Vec::new();
        for question in questions {
            let ticket = service.ask(worker, question)?;
            lines.push(format!("worker {index}: {question:?} = {}", service.answer(worker, ticket)?));
        }
        let order: Vec<_> = service.finish(worker)?.iter().map(|built| (built.asker, built.ticket)).collect();
        lines.push(format!("worker {index} built {order:?}"));
        Ok::<_, BoxError>(lines)
    });
    for thread in threads {
        for line in thread.join().expect("workers catch panics")? {
            println!("{line}");
        }
    }
    Ok(())
}
