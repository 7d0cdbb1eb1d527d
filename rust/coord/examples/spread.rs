//! How close together workers start after a barrier (B-05): each sleeps between 0 and a given time, all meet, and each notes
//! when it goes on. Prints the spread between the first and the last, for threads and for processes over TCP.
//!
//! The clock is that of this process, in which also the processes run, with real sockets between them.
//!
//! `cargo run --release -p penstock-coord --example spread [ROUNDS [LONGEST_SKEW_MS]]`

use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use penstock_coord::Barrier;
use penstock_dataflow::fabric::{Duplex, FabricTag};
use penstock_dataflow::{BoxError, Endpoint, Error, FabricGuard, Worker, execute, fabric};

/// Least, median and greatest spread.
pub type Spread = [Duration; 3];

/// When a worker arrived at the barrier, and when it went on.
type Round = (Instant, Instant);

fn program(rounds: u64, skew: Duration) -> impl Fn(&mut Worker) -> Result<Vec<Round>, BoxError> + Clone {
    move |worker| {
        let mut barrier = Barrier::new(worker);
        let mut starts = Vec::new();
        for round in 0..rounds {
            // The workers are late in turns, the last by the whole skew.
            let share = (worker.index() as u64 + round) % worker.peers() as u64;
            std::thread::sleep(skew * share as u32 / (worker.peers() as u32 - 1).max(1));
            let arrived = Instant::now();
            barrier.wait(worker)?;
            starts.push((arrived, Instant::now()));
        }
        Ok(starts)
    }
}

fn summarise(workers: Vec<Vec<Round>>) -> Result<Spread, BoxError> {
    let mut spreads = Vec::new();
    for round in 0..workers[0].len() {
        let started = || workers.iter().map(|rounds| rounds[round].1);
        let arrived = workers.iter().map(|rounds| rounds[round].0).max();
        let (Some(last_arrived), Some(first), Some(last)) = (arrived, started().min(), started().max()) else {
            continue;
        };
        if first < last_arrived {
            return Err(
                format!("round {round}: a worker went on {:?} before the last arrived", last_arrived - first).into()
            );
        }
        spreads.push(last - first);
    }
    spreads.sort_unstable();
    Ok([spreads[0], spreads[spreads.len() / 2], spreads[spreads.len() - 1]])
}

fn run(endpoints: Vec<Endpoint>, rounds: u64, skew: Duration) -> Result<Vec<Vec<Round>>, Error> {
    let threads = execute(endpoints, program(rounds, skew));
    threads.into_iter().map(|thread| thread.join().expect("workers catch panics")).collect()
}

/// Workers as threads.
pub fn in_process(workers: usize, rounds: u64, skew: Duration) -> Result<Spread, BoxError> {
    summarise(run(fabric::threads(workers), rounds, skew)?)
}

/// Workers as processes with one thread each, over TCP.
pub fn over_tcp(workers: usize, rounds: u64, skew: Duration) -> Result<Spread, BoxError> {
    let mut streams: Vec<Vec<Option<Box<dyn Duplex>>>> =
        (0..workers).map(|_| (0..workers).map(|_| None).collect()).collect();
    let listener = TcpListener::bind("127.0.0.1:0")?;
    for (one, two) in (0..workers).flat_map(|one| (one + 1..workers).map(move |two| (one, two))) {
        let stream = TcpStream::connect(listener.local_addr()?)?;
        streams[one][two] = Some(Box::new(stream));
        streams[two][one] = Some(Box::new(listener.accept()?.0));
    }
    let tag = FabricTag { query: 0, generation: 0 };
    let seats: Result<Vec<(Vec<Endpoint>, FabricGuard)>, Error> =
        streams.into_iter().enumerate().map(|(own, streams)| fabric::processes(own, 1, streams, tag)).collect();
    let processes: Vec<_> = seats?
        .into_iter()
        .map(|(endpoints, guard)| {
            std::thread::spawn(move || {
                let starts = run(endpoints, rounds, skew);
                drop(guard);
                starts
            })
        })
        .collect();
    let starts = processes.into_iter().map(|process| process.join().expect("workers catch panics"));
    summarise(starts.collect::<Result<Vec<_>, Error>>()?.into_iter().flatten().collect())
}

#[allow(dead_code)] // The test includes this file.
fn main() -> Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1).map(|word| word.parse::<u64>());
    let rounds = arguments.next().transpose()?.unwrap_or(10).max(1);
    let skew = Duration::from_millis(arguments.next().transpose()?.unwrap_or(1000));
    for workers in [2, 4] {
        let [least, median, most] = in_process(workers, rounds, skew)?;
        println!("{workers} threads: {least:?} .. {median:?} .. {most:?} after a skew of {skew:?}, {rounds} rounds");
        let [least, median, most] = over_tcp(workers, rounds, skew)?;
        println!("{workers} over TCP: {least:?} .. {median:?} .. {most:?} after a skew of {skew:?}, {rounds} rounds");
    }
    Ok(())
}
