//! Whether work runs where it is faster, as measured on this machine; and that a pipeline without work uses none.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use penstock_ordered::pipeline::{Builder, Mode, NotTaken, Options, Payload, Pipeline, Pulled};

/// All tests here measure: one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// One item.
struct One;

impl Payload for One {
    fn items(&self) -> usize {
        1
    }

    fn bytes(&self) -> usize {
        8
    }
}

fn spin(time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        std::hint::spin_loop();
    }
}

fn drive(pipeline: &Pipeline<One, Infallible>, mut items: usize) -> Duration {
    let begin = Instant::now();
    let end = pipeline.stats().pulled + items as u64;
    while pipeline.stats().pulled < end {
        while items > 0 {
            match pipeline.try_push(One) {
                Ok(()) => items -= 1,
                Err(NotTaken::Full(_)) => break,
                Err(NotTaken::Closed(_)) => unreachable!("nothing closes it"),
            }
        }
        assert!(matches!(pipeline.pull(Duration::from_secs(60)), Pulled::Output { .. }));
    }
    begin.elapsed()
}

/// Items of a round, and rounds after which it is taken for a choice that others on this machine did not make.
const ROUND: usize = 10_000;
const ROUNDS: usize = 10;

/// Runs rounds until in one most items ran inline, or on the workers, as is wanted; the items of all.
fn until_most_run(pipeline: &Pipeline<One, Infallible>, inline: bool) -> u64 {
    let mut shares = Vec::new();
    for _ in 0..ROUNDS {
        let before = pipeline.stats().inline;
        drive(pipeline, ROUND);
        shares.push(pipeline.stats().inline - before);
        if (shares[shares.len() - 1] > ROUND as u64 / 2) == inline {
            return (shares.len() * ROUND) as u64;
        }
    }
    panic!("of {ROUND} items each these ran inline: {shares:?}");
}

#[test]
fn workers_that_do_not_help_are_left_alone() {
    let _alone = ALONE.lock();
    // All operators share a lock, so a second worker gains nothing; and it costs workers more, so that it shows on a busy machine, too.
    let (lock, tried) = (Arc::new(Mutex::new(())), Arc::new(AtomicUsize::new(0)));
    let pipeline = Builder::new()
        .stateless("locked", {
            let tried = tried.clone();
            move |turn, one| {
                let _held = lock.lock().expect("nothing panics inside");
                tried.fetch_add(usize::from(turn.worker < 2), Ordering::Relaxed);
                spin(Duration::from_micros(if turn.worker < 2 { 250 } else { 50 }));
                Ok(one)
            }
        })
        .build(Options { workers: 2, ..Options::default() })
        .expect("good options");
    let all = until_most_run(&pipeline, true);
    let (stats, tried) = (pipeline.stats(), tried.load(Ordering::Relaxed) as u64);
    // They are left alone because they were tried, not because nobody thought of them.
    assert!(tried > 0 && stats.threads == 2, "{tried} of {all} ran on {} workers", stats.threads);
    assert_eq!(stats.inline + tried, all);
}

#[test]
fn workers_that_help_are_used() {
    let _alone = ALONE.lock();
    // The same the other way around: what a worker does in 50 us takes the caller 250.
    let pipeline = Builder::new()
        .stateless("uneven", |turn, one| {
            spin(Duration::from_micros(if turn.worker < 2 { 50 } else { 250 }));
            Ok(one)
        })
        .build(Options { workers: 2, ..Options::default() })
        .expect("good options");
    until_most_run(&pipeline, false);
    assert_eq!(pipeline.stats().threads, 2);
}

/// CPU time of this process, with that of threads that have ended: those of the test before may still do so.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("this is Linux");
    // Behind the name, which may have anything in it, user and system time are the 12th and 13th, in hundredths of a second.
    let (_, fields) = stat.rsplit_once(')').expect("it has a name");
    let ticks: u64 =
        fields.split_whitespace().skip(11).take(2).map(|field| field.parse::<u64>().expect("a number")).sum();
    Duration::from_millis(10 * ticks)
}

#[test]
fn a_pipeline_without_work_uses_no_cpu_and_is_woken() {
    let _alone = ALONE.lock();
    let options = Options { workers: 4, mode: Mode::Parallel, ..Options::default() };
    let pipeline = Builder::<One, Infallible>::new()
        .stateless("pass", |_, one| Ok(one))
        .stateful("count", |_, one| Ok(one))
        .build(options)
        .expect("good options");
    drive(&pipeline, 100);
    assert_eq!(pipeline.stats().threads, 4);
    // The interval is what is measured, nothing is awaited by it; what others do on this machine does not count.
    let (before, began) = (cpu(), Instant::now());
    assert!(matches!(pipeline.pull(Duration::from_secs(1)), Pulled::Nothing));
    let (used, idle) = (cpu() - before, began.elapsed());
    // Whoever turns instead of parking has a CPU, or what others leave of one, for all that time; who wakes while the host stands still may
    // have some of that counted.
    assert!(used < idle / 5 + Duration::from_millis(50), "{used:?} of CPU in {idle:?}");
    drive(&pipeline, 100);
}
