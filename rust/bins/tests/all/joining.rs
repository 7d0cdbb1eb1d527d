//! words are counted by a state machine while a worker joins, gets bins, and the first worker gives up its own and leaves. The counts are those
//! of a sequential program. Once as threads of one process, and once as processes over TCP, between which bins cross as bytes.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, mpsc};

use penstock_bins::{BinsError, Command, Config, ControlInput, Keyed, Routing, Shelf, Stats, state_machine};
use penstock_dataflow::{BoxError, Worker, execute_joinable};

use crate::linked::Linked;

const BITS: u8 = 5;
const EPOCHS: u64 = 14;

fn hash(word: &str) -> u64 {
    word.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// The line that a worker reads in an epoch.
fn line(worker: usize, epoch: u64, number: u64) -> String {
    let word = |place: u64| {
        let mixed = (epoch * 31 + number * 7 + place * 3 + worker as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 58;
        format!("word{mixed}")
    };
    (0..6).map(word).collect::<Vec<_>>().join(" ")
}

/// All bins dealt to these workers.
fn dealt(workers: &[u32]) -> Vec<Command> {
    vec![Command::Map((0..1 << BITS).map(|bin: usize| workers[bin % workers.len()]).collect())]
}

type Counts = BTreeMap<String, u64>;

/// What it counted at the end, and how many bins it owned.
type Counted = (Counts, usize);

fn count(
    worker: &mut Worker,
    shelf: Option<&Shelf<penstock_bins::KeyedMap<String, u64>>>,
    fed: &Mutex<Vec<String>>,
    third: &Mutex<mpsc::Sender<()>>,
) -> Result<Counted, BoxError> {
    let routing = Routing::new(BITS, worker.peers())?;
    let index = worker.index();
    let own = shelf.cloned().unwrap_or_default();
    let mut config = Config::in_process("count", routing.clone(), index, own, Arc::new(Stats::new()));
    if shelf.is_none() {
        config.local = Rc::new(move |worker| worker == index);
    }
    let (mut lines, mut control, counts) = worker.dataflow::<u64, _>("words", |scope| {
        let (input, lines) = scope.new_input::<Vec<String>>();
        let (control, commands) = scope.new_input();
        // Lines go anywhere, words to their bins.
        let words = lines.exchange_by(|line| line.len() as u64 + hash(line)).map_blocks(|lines: Vec<String>| {
            let words = lines.iter().flat_map(|line| line.split(' ')).map(|word| (word.to_string(), 1u64));
            Keyed::new(words.collect(), |word: &String| hash(word))
        });
        let counts = state_machine(&words, &commands, config, |word: &String, n, sum: &mut u64| {
            *sum += n;
            (false, Some((word.clone(), *sum)))
        })?;
        Ok::<_, BinsError>((input, ControlInput::among(control, routing, scope), counts))
    })?;
    let joined = worker.bootstrap()?;
    if joined {
        // Where the first worker stands, which is not far ahead of the one that is in the middle of epoch 3.
        assert!((3..=5).contains(lines.time()) && counts.table.borrow().is_empty(), "without bins");
    }
    if index != 1 {
        control.close();
    }
    for epoch in *lines.time()..EPOCHS {
        for number in 0..5 {
            let line = line(index, epoch, number);
            fed.lock().unwrap().push(line.clone());
            lines.send(vec![line]);
            worker.step()?;
            if index == 1 && (epoch, number) == (3, 2) {
                third.lock().unwrap().send(()).unwrap();
                // Nobody is at that index yet.
                assert!(control.schedule(4, dealt(&[0, 1, 2])).is_err());
                while worker.peers() < 3 {
                    worker.step_or_park(None)?;
                }
            }
        }
        if index == 1 {
            match epoch {
                4 => control.schedule(6, dealt(&[0, 1, 2]))?,
                8 => control.schedule(9, dealt(&[2, 1]))?,
                _ => {}
            }
            control.advance_to(epoch + 1)?;
        }
        lines.advance_to(epoch + 1)?;
        worker.step_until(None, || !counts.probe.less_than(&epoch))?;
        if index == 0 && epoch == 10 {
            assert_eq!(counts.table.borrow().len(), 0, "its bins have moved away");
            worker.leave()?;
            assert!(worker.has_left());
            return Ok((Counts::new(), 0));
        }
    }
    drop(lines);
    control.close();
    while worker.step_or_park(None)? {}
    let table = counts.table.borrow();
    let mut sums = Counts::new();
    for (_, state) in table.owned() {
        for word in 0..64 {
            let word = format!("word{word}");
            if let Some(sum) = state.get(&word) {
                assert!(sums.insert(word, *sum).is_none(), "one bin per word");
            }
        }
    }
    Ok((sums, table.len()))
}

#[test]
fn words_are_counted_while_workers_join_and_leave() {
    check(|fed, third, come| {
        let shelf = Shelf::new();
        let mut run = execute_joinable(2, move |worker| count(worker, Some(&shelf), &fed, &third));
        come.recv().unwrap();
        assert_eq!(run.join(1).unwrap(), [2]);
        run.finish()
    });
}

#[test]
fn words_are_counted_while_processes_join_and_leave() {
    check(|fed, third, come| {
        let mut run = Linked::found(2, 1, move |worker| count(worker, None, &fed, &third));
        come.recv().unwrap();
        assert_eq!(run.join(1), [2]);
        run.finish()
    });
}

type Fed = Arc<Mutex<Vec<String>>>;
type Results = Vec<(usize, Result<Counted, penstock_dataflow::Error>)>;

fn check(run: impl FnOnce(Fed, Mutex<mpsc::Sender<()>>, mpsc::Receiver<()>) -> Results) {
    let fed = Arc::new(Mutex::new(Vec::new()));
    let (third, come) = mpsc::channel();
    let mut sums = Counts::new();
    for (index, result) in run(fed.clone(), Mutex::new(third), come) {
        let (counts, bins) = result.unwrap_or_else(|error| panic!("worker {index}: {error}"));
        assert_eq!(bins, [0, 16, 16][index], "bins of worker {index}");
        assert_eq!(counts.is_empty(), index == 0);
        for (word, sum) in counts {
            assert!(sums.insert(word, sum).is_none(), "a word is counted in one place");
        }
    }
    let mut expected = Counts::new();
    for line in &*fed.lock().unwrap() {
        line.split(' ').for_each(|word| *expected.entry(word.to_string()).or_insert(0) += 1);
    }
    assert_eq!(sums, expected);
}
