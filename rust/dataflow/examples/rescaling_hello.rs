//! A worker joins a running dataflow: the first of two workers sends the integers 0 to 9, each to the worker of that rank; after 5 a third
//! worker joins in the middle of the epoch, and from 6 on there are three to go to. Then the first worker leaves, and the two others go on.
//!
//! `cargo run -p penstock-dataflow --example rescaling_hello`

use std::error::Error;
use std::sync::{Mutex, mpsc};

use penstock_dataflow::{BoxError, execute_joinable};

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let (five, came) = mpsc::channel();
    let five = Mutex::new(five);
    let mut run = execute_joinable(2, move |worker| {
        let index = worker.index();
        let (mut input, probe) = worker.dataflow::<u64, _>("hello", |scope| {
            let (input, numbers) = scope.new_input::<Vec<u64>>();
            let seen = numbers.exchange_by(|number| *number).inspect(move |epoch, block| {
                block.iter().for_each(|number| println!("worker {index} has {number} in epoch {epoch}"));
            });
            (input, seen.probe().0)
        });
        if worker.bootstrap()? {
            println!("worker {index} has joined in epoch {}", input.time());
        }
        if index == 0 {
            for number in 0..10 {
                input.send(vec![number]);
                if number == 5 {
                    five.lock().map_err(|_| "another worker has panicked")?.send(())?;
                    while worker.peers() < 3 {
                        worker.step_or_park(None)?;
                    }
                }
                input.advance_to(number + 1)?;
                worker.step()?;
            }
            worker.leave()?;
            println!("worker 0 has left");
            return Ok(());
        }
        // The others send nothing, and say so.
        drop(input);
        worker.step_until(None, || probe.done())?;
        Ok::<_, BoxError>(())
    });
    came.recv()?;
    run.join(1)?;
    for (_, result) in run.finish() {
        result?;
    }
    Ok(())
}
