//! Panics of users' code wherever it is called: from payloads that are asked or dropped, and from a scheduler. Each is an error at its place.

use std::time::Duration;

use penstock_ordered::pipeline::{
    Builder, Fault, Mode, NotTaken, OnError, Options, Payload, Pipeline, Pulled, ReorderKind,
};
use penstock_ordered::schedule::{Load, Scheduler};

const LONG: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trap {
    Items,
    Bytes,
    Drop,
}

#[derive(Debug)]
struct Mine {
    number: u64,
    trap: Option<Trap>,
}

impl Mine {
    fn new(number: u64) -> Self {
        Self { number, trap: None }
    }

    fn armed(mut self, trap: Trap) -> Self {
        self.trap = Some(trap);
        self
    }
}

impl Payload for Mine {
    fn items(&self) -> usize {
        assert_ne!(self.trap, Some(Trap::Items), "asked for items");
        1
    }

    fn bytes(&self) -> usize {
        assert_ne!(self.trap, Some(Trap::Bytes), "asked for bytes");
        8
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        if self.trap == Some(Trap::Drop) && !std::thread::panicking() {
            panic!("dropped");
        }
    }
}

type Run = Pipeline<Mine, &'static str>;

/// Both lanes, and each buffer.
fn ways() -> impl Iterator<Item = Options> {
    let parallel =
        Options { workers: 2, in_flight: 8, mode: Mode::Parallel, on_error: OnError::GoOn, ..Options::default() };
    let buffers = [ReorderKind::NonBlocking, ReorderKind::Flagged, ReorderKind::Locked];
    let inline = Options { mode: Mode::Inline, ..parallel.clone() };
    buffers.map(|reorder| Options { reorder, ..parallel.clone() }).into_iter().chain([inline])
}

/// Twenty numbers through a pipeline; what came at each place, errors as text.
fn drive(pipeline: &Run) -> Vec<Result<u64, String>> {
    let (mut next, mut outputs) = (0, Vec::new());
    loop {
        while next < 20 {
            match pipeline.try_push(Mine::new(next)) {
                Ok(()) => next += 1,
                Err(NotTaken::Full(_)) => break,
                Err(NotTaken::Closed(_)) => next = 20,
            }
        }
        if next == 20 {
            pipeline.close();
        }
        match pipeline.pull(LONG) {
            Pulled::Output { payload, .. } => outputs.push(Ok(payload.number)),
            Pulled::Error { error, .. } => outputs.push(Err(error.to_string())),
            Pulled::End => return outputs,
            Pulled::Nothing => panic!("nothing for {LONG:?}: {:#?}", pipeline.stats()),
        }
    }
}

/// All come but number 5, in whose place is an error that says this.
fn only_five_fails(pipeline: &Run, says: &str) {
    for (at, output) in drive(pipeline).into_iter().enumerate() {
        match output {
            Err(error) if at == 5 => assert_eq!(error, says),
            other => assert_eq!(other, Ok(at as u64)),
        }
    }
}

#[test]
fn what_an_operator_makes_may_panic_when_it_is_asked() {
    for (trap, said) in [(Trap::Items, "asked for items"), (Trap::Bytes, "asked for bytes")] {
        for options in ways() {
            let arm = move |mine: Mine| Ok(if mine.number == 5 { mine.armed(trap) } else { mine });
            let says = |name: &str| format!("operator 0 ({name}) panicked: ");
            let check = |pipeline: Run, name: &str| {
                let outputs = drive(&pipeline);
                assert_eq!(outputs.len(), 20);
                for (at, output) in outputs.into_iter().enumerate() {
                    match output {
                        Err(error) if at == 5 => {
                            assert!(error.starts_with(&says(name)) && error.contains(said), "{error}");
                        }
                        other => assert_eq!(other, Ok(at as u64)),
                    }
                }
            };
            let first = Builder::new().stateless("free", move |_, mine| arm(mine));
            check(first.stateful("next", |_, mine| Ok(mine)).build(options.clone()).expect("good options"), "free");
            let last = Builder::new().stateful("kept", move |_, mine| arm(mine));
            check(last.build(options.clone()).expect("good options"), "kept");
            let before = Builder::new().stateless("free", move |_, mine| arm(mine)).partitioned(
                "parted",
                2,
                |mine: Mine| Ok(vec![(0, mine)]),
                |_, _, part| Ok(part),
                |mut parts| Ok(parts.remove(0).1),
            );
            check(before.build(options.clone()).expect("good options"), "free");
            let split = Builder::new().partitioned(
                "parted",
                2,
                move |mine: Mine| Ok(vec![(0, arm(mine)?)]),
                |_, _, part| Ok(part),
                |mut parts| Ok(parts.remove(0).1),
            );
            check(split.build(options.clone()).expect("good options"), "parted");
            let merge = Builder::new().partitioned(
                "parted",
                2,
                |mine: Mine| Ok(vec![(0, mine)]),
                |_, _, part| Ok(part),
                move |mut parts| arm(parts.remove(0).1),
            );
            check(merge.build(options).expect("good options"), "parted");
        }
    }
}

#[test]
fn what_is_dropped_for_an_error_may_panic() {
    for options in ways() {
        // Part 0 fails, so parts 1 and 2 are dropped.
        let parts = |mine: Mine| {
            let number = mine.number;
            Ok((0..3).map(|at| (at, Mine::new(number))).collect::<Vec<_>>())
        };
        let operate = |_, partition, part: Mine| match (part.number, partition) {
            (5, 0) => Err("part 0"),
            (5, _) => Ok(part.armed(Trap::Drop)),
            _ => Ok(part),
        };
        let failing = Builder::new()
            .partitioned("parted", 3, parts, operate, |mut parts| Ok(parts.remove(0).1))
            .build(options.clone())
            .expect("good options");
        only_five_fails(&failing, "operator 0 (parted) failed");
        // The split names a partition that is none, so all parts are dropped.
        let lost = |mine: Mine| {
            let number = mine.number;
            let part =
                |at| if number == 5 { (at + 2, Mine::new(number).armed(Trap::Drop)) } else { (at, Mine::new(number)) };
            Ok((0..3).map(part).collect::<Vec<_>>())
        };
        let nowhere = Builder::new()
            .partitioned("parted", 3, lost, |_, _, part| Ok(part), |mut parts| Ok(parts.remove(0).1))
            .build(options)
            .expect("good options");
        only_five_fails(&nowhere, "operator 0 (parted) has 3 partitions; its split named partition 3");
    }
}

#[test]
fn what_is_dropped_at_the_end_may_panic() {
    for options in ways() {
        let trapped = Builder::<Mine, &'static str>::new()
            .stateless("arm", |_, mine: Mine| Ok(mine.armed(Trap::Drop)))
            .stateful("fail", |turn, mine| {
                if turn.number == 2 {
                    std::mem::forget(mine);
                    return Err("stop");
                }
                Ok(mine)
            })
            .build(Options { on_error: OnError::Stop, ..options })
            .expect("good options");
        for number in 0..8 {
            if trapped.try_push(Mine::new(number)).is_err() {
                break;
            }
        }
        let mut failed = false;
        loop {
            match trapped.pull(LONG) {
                Pulled::Output { payload, .. } => {
                    std::mem::forget(payload);
                    if let Err(refused) = trapped.try_push(Mine::new(9)) {
                        drop(refused);
                    }
                }
                Pulled::Error { error, .. } => {
                    assert_eq!(error.to_string(), "operator 1 (fail) failed");
                    failed = true;
                }
                Pulled::End => break,
                Pulled::Nothing => panic!("nothing for {LONG:?}: {:#?}", trapped.stats()),
            }
        }
        assert!(failed);
        drop(trapped);
    }
}

/// Falls over at its first choice: at a later one all work may be done already.
struct Clumsy;

impl Scheduler for Clumsy {
    fn pick(&self, _: &[Load]) -> Option<usize> {
        panic!("no idea")
    }

    fn name(&self) -> String {
        "clumsy".into()
    }
}

#[test]
fn a_worker_that_panics_anywhere_else_ends_the_pipeline_with_an_error() {
    for options in ways().filter(|options| options.mode == Mode::Parallel) {
        let pipeline: Run = Builder::new()
            .stateless("pass", |_, mine| Ok(mine))
            .build_with(options, Box::new(Clumsy))
            .expect("good options");
        let outputs = drive(&pipeline);
        let last = outputs.last().expect("an error at least");
        assert!(last.as_ref().is_err_and(|error| error.contains("no idea")), "{outputs:?}");
        assert!(outputs[..outputs.len() - 1].iter().enumerate().all(|(at, output)| *output == Ok(at as u64)));
        assert!(matches!(pipeline.pull(LONG), Pulled::End));
    }
}

#[test]
fn an_error_that_is_dropped_may_panic() {
    /// Panics when it goes, unless it was shown.
    struct Sore(bool);
    impl Drop for Sore {
        fn drop(&mut self) {
            if self.0 && !std::thread::panicking() {
                panic!("an error was dropped");
            }
        }
    }
    for options in ways() {
        // All parts fail: the first error is told, the others are dropped.
        let pipeline = Builder::<Mine, Sore>::new()
            .partitioned(
                "parted",
                3,
                |mine: Mine| Ok((0..3).map(|at| (at, Mine::new(mine.number))).collect::<Vec<_>>()),
                |_, partition, _| Err(Sore(partition > 0)),
                |_| panic!("no part is left"),
            )
            .build(options)
            .expect("good options");
        pipeline.try_push(Mine::new(0)).map_err(|_| ()).expect("there is room");
        pipeline.close();
        match pipeline.pull(LONG) {
            Pulled::Error { error: Fault::Failed { error, .. }, number: 0 } => assert!(!error.0),
            _ => panic!("not the error of the first part"),
        }
        assert!(matches!(pipeline.pull(LONG), Pulled::End));
    }
}
