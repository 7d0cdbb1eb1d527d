//! Idle costs nothing: parked workers use no CPU and are woken at once. A test program of its own: it reads the CPU time of the whole
//! process.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use penstock_dataflow::{BoxError, Endpoint, FabricGuard, Worker, execute, fabric};
use support::{Link, join, mesh};

/// CPU time of this process, with that of threads that have ended.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // Behind the name, which may have anything in it, user and system time are the 12th and 13th, in hundredths of a second.
    let (_, fields) = stat.rsplit_once(')').unwrap();
    Duration::from_millis(
        fields.split_whitespace().skip(11).take(2).map(|field| 10 * field.parse::<u64>().unwrap()).sum(),
    )
}

fn check(name: &str, endpoints: Vec<Endpoint>, guards: Vec<FabricGuard>) {
    let workers = endpoints.len();
    let (ready, parked) = mpsc::channel();
    let stop = Arc::new(AtomicUsize::new(0));
    let flag = stop.clone();
    let threads = execute(endpoints, move |worker: &mut Worker| -> Result<usize, BoxError> {
        let (mut input, probe) = worker.dataflow::<u64, _>("flow", |scope| {
            let (handle, stream) = scope.new_input::<Vec<u64>>();
            (handle, stream.exchange_by(|value| *value).inspect(|_, _| ()).probe().0)
        });
        input.send((0..100).collect());
        input.advance_to(1)?;
        worker.step_until(None, || !probe.less_than(&1))?;
        ready.send(worker.waker())?;
        let mut turns = 0;
        while flag.load(Ordering::SeqCst) == 0 {
            worker.step_or_park(None)?;
            turns += 1;
        }
        Ok(turns)
    });
    let wakers: Vec<_> = parked.iter().take(workers).collect();
    // The interval is what is measured, nothing is awaited by it; what others do on this machine does not count.
    let (before, began) = (cpu(), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let (used, idle) = (cpu() - before, began.elapsed());
    stop.store(1, Ordering::SeqCst);
    wakers.iter().for_each(fabric::Waker::wake);
    let turns: Vec<usize> = join(threads).into_iter().map(Result::unwrap).collect();
    drop(guards);
    assert!(turns.iter().all(|turns| *turns < 20), "{name}: {turns:?} turns");
    // Whoever turns instead of parking has a CPU, or what others leave of one, for all that time; who wakes while the host stands still may
    // have some of that counted.
    assert!(used < idle / 5 + Duration::from_millis(50), "{name}: {used:?} of CPU in {idle:?}");
}

#[test]
fn parked_workers_use_no_cpu_on_any_fabric() {
    check("threads", fabric::threads(3), Vec::new());
    let (seats, guards): (Vec<_>, Vec<_>) = mesh(2, 2, Link::Unix).into_iter().unzip();
    check("processes", seats.into_iter().flatten().collect(), guards);
}
