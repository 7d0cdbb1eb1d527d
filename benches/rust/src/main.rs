//! `penstock-bench`: the core beside its peers, one line of JSON per case.
//!
//! Owns: the table of the benches and the command line. `penstock bench` starts it; alone it works as well.

use std::io::BufReader;
use std::process::ExitCode;

use penstock_benches::harness::{Options, Report};
use penstock_benches::{
    barrier, bins_overhead, change_batch, clique_child, cliques, empty_epoch, faucet_child, faucet_memory,
    faucet_overhead, faucet_sensitivity, frontier, harness, join, keyed_count, migration, nexmark, noisy_neighbour,
    queues, reorder, schedulers, sequencer, side,
};

type Run = fn(&Options, &mut Report);

/// Name, what it measures in one line, and what runs it. A new bench is a line here and its module in `lib.rs`.
const BENCHES: &[(&str, &str, Run)] = &[
    ("barrier", "rounds of a re-usable barrier, beside timely's Barrier", barrier::run),
    ("bins-overhead", "a keyed count with 2^4 to 2^20 bins, beside one bin and timely", bins_overhead::run),
    ("change-batch", "counts are updated one by one and drained, beside timely's ChangeBatch", change_batch::run),
    (
        "cliques",
        "rows and counts of 3- and 4-cliques, beside a hand-written loop and GenericJoin on timely",
        cliques::run,
    ),
    ("empty-epoch", "an epoch without data through an exchange, one and two workers", empty_epoch::run),
    ("faucet-memory", "peak memory of cliques as a dataflow, bounded, beside no flow control", faucet_memory::run),
    ("faucet-overhead", "time of cliques as a dataflow, bounded, beside no flow control", faucet_overhead::run),
    ("faucet-sensitivity", "time and peak memory of cliques over N and B", faucet_sensitivity::run),
    ("frontier", "a frontier moves by one among many live times, beside timely's MutableAntichain", frontier::run),
    ("join", "what joining costs at rest; latency through two joins and a leave, beside a new start", join::run),
    ("keyed-count", "a count of many integer keys, beside timely with a hash map", keyed_count::run),
    (
        "bins-latency",
        "latency of a count at rest, over the number of bins, beside timely with one map",
        migration::bins_latency,
    ),
    (
        "migration",
        "latency of a count while a quarter of its state moves, beside stopping and restarting",
        migration::run,
    ),
    (
        "hot-first",
        "how long rows wait for hot bins that move: asked for, beside the order of the control",
        migration::hot_first,
    ),
    ("noisy-neighbour", "records exchanged and counted beside a CPU hog", noisy_neighbour::run),
    ("queues", "items of skewed partitions: the hybrid queue beside the partitioned and the shared one", queues::run),
    ("reorder", "items leave in order: without a lock, beside a lock, a flag, oneTBB and rayon", reorder::run),
    ("schedulers", "schedulers, queues and buffers of ordered pipelines, claim by claim", schedulers::run_all),
    ("sequencer", "a log that all workers push to and read, beside timely's Sequencer", sequencer::run),
];

const USAGE: &str = "usage: penstock-bench NAME [--quick] [--seconds S]\n       penstock-bench --list";

enum Asked {
    List,
    Side,
    Flow,
    Nexmark,
    MigrationWorker,
    CliqueMemory(Vec<String>),
    Steady(Vec<String>),
    Bench(usize, Options),
}

fn main() -> ExitCode {
    match parse(std::env::args().skip(1)) {
        Ok(Asked::List) => {
            for (name, summary, _) in BENCHES {
                println!("{name}\t{summary}");
            }
            ExitCode::SUCCESS
        }
        Ok(Asked::Side) => ended(side::serve(std::io::stdin().lock(), std::io::stdout().lock())),
        Ok(Asked::Flow) => ended(faucet_child::serve(std::io::stdin().lock(), std::io::stdout().lock())),
        Ok(Asked::Nexmark) => ended(nexmark::serve(std::io::stdin().lock())),
        Ok(Asked::MigrationWorker) => {
            ended(migration::serve(BufReader::new(std::io::stdin()), std::io::stdout().lock()))
        }
        Ok(Asked::Steady(words)) => ended(join::serve(&words)),
        Ok(Asked::CliqueMemory(words)) => ended(clique_child::serve(&words).map(|answer| println!("{answer}"))),
        Ok(Asked::Bench(at, options)) => {
            let (name, _, run) = BENCHES[at];
            if options.quick {
                harness::end_in(harness::QUICK_END);
            }
            let mut report = Report::new(name, &options);
            run(&options, &mut report);
            if report.cases() == 0 {
                eprintln!("penstock-bench: {name} has measured nothing");
                return ExitCode::FAILURE;
            }
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("penstock-bench: {message}");
            ExitCode::from(2)
        }
    }
}

/// What a process says at its end that serves a bench.
fn ended(served: Result<(), String>) -> ExitCode {
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("penstock-bench: {message}");
            ExitCode::FAILURE
        }
    }
}

fn parse(arguments: impl Iterator<Item = String>) -> Result<Asked, String> {
    let mut options = Options::default();
    let mut chosen = None;
    let mut arguments = arguments.peekable();
    if arguments.peek().is_none() {
        return Err(format!("name a bench: {}\n{USAGE}", names()));
    }
    while let Some(word) = arguments.next() {
        match word.as_str() {
            "--list" => return Ok(Asked::List),
            "--side" => return Ok(Asked::Side),
            "--flow" => return Ok(Asked::Flow),
            "--steady" => return Ok(Asked::Steady(arguments.collect())),
            "--nexmark" => return Ok(Asked::Nexmark),
            "--migration-worker" => return Ok(Asked::MigrationWorker),
            "--clique-memory" => return Ok(Asked::CliqueMemory(arguments.collect())),
            "--quick" => options.quick = true,
            "--seconds" => {
                let text = arguments.next().unwrap_or_default();
                let seconds = text.parse::<f64>().ok().filter(|seconds| *seconds > 0.0 && *seconds <= harness::MOST_S);
                let wanted = format!("--seconds {text:?}: a number above 0, at most {}", harness::MOST_S);
                options.seconds = Some(seconds.ok_or(wanted)?);
            }
            name if name.starts_with('-') => return Err(format!("{name:?} is no option\n{USAGE}")),
            name if chosen.is_some() => return Err(format!("one bench at a time; {name:?} is a second one")),
            name => {
                let at = BENCHES.iter().position(|bench| bench.0 == name);
                chosen = Some(at.ok_or_else(|| format!("{name:?} is no bench; there are {}", names()))?);
            }
        }
    }
    let at = chosen.ok_or_else(|| format!("name a bench: {}\n{USAGE}", names()))?;
    Ok(Asked::Bench(at, options))
}

fn names() -> String {
    BENCHES.iter().map(|bench| bench.0).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Result<Asked, String> {
        parse(line.split_whitespace().map(String::from))
    }

    #[test]
    fn the_command_line_is_read() {
        let Ok(Asked::Bench(at, options)) = words("--seconds 2.5 frontier --quick") else { panic!("a good line") };
        assert_eq!((BENCHES[at].0, options.quick, options.seconds), ("frontier", true, Some(2.5)));
        assert!(matches!(words("--list"), Ok(Asked::List)));
        assert!(matches!(words("--side"), Ok(Asked::Side)));
    }

    #[test]
    fn a_wrong_command_line_is_told() {
        for (line, says) in [
            ("", "name a bench: "),
            ("--quick", "name a bench: "),
            ("frontiers", "\"frontiers\" is no bench; there are "),
            ("frontier --fast", "\"--fast\" is no option"),
            ("frontier frontier", "one bench at a time"),
            ("frontier --seconds", "--seconds \"\""),
            ("frontier --seconds 0", "--seconds \"0\""),
            ("frontier --seconds nan", "--seconds \"nan\""),
            ("frontier --seconds inf", "--seconds \"inf\""),
        ] {
            let message = words(line).err().unwrap_or_default();
            assert!(message.contains(says), "{line:?} gives {message:?}");
        }
    }

    #[test]
    fn no_name_is_given_twice() {
        let mut names = BENCHES.iter().map(|bench| bench.0).collect::<Vec<_>>();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), BENCHES.len());
    }
}
